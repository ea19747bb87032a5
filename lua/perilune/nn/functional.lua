-- functional.lua: dense operations on tensors, by PyTorch's name for them.
require "perilune.tensor"
return require("perilune.util").face("peri.nn.functional", require "perilune.tensor.ops")
