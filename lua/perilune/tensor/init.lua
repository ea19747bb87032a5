-- tensor: tensors with all their methods and operators.
local Tensor = require "perilune.tensor.core"
require "perilune.tensor.backward"
require "perilune.tensor.ops"
require "perilune.tensor.elements"
require "perilune.tensor.einsum"
require "perilune.tensor.losses"
require "perilune.tensor.composed"
require "perilune.tensor.making"
require "perilune.tensor.arranged"
require "perilune.tensor.counted"
require "perilune.tensor.index"
require "perilune.tensor.print"
require "perilune.tensor.autocast"

return Tensor
