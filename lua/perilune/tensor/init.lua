-- tensor: tensors with all their methods and operators.
local Tensor = require "perilune.tensor.core"
require "perilune.tensor.backward"
require "perilune.tensor.ops"

return Tensor
