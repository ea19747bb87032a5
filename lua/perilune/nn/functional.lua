-- functional.lua: dense operations on tensors, by PyTorch's name for them.
return require "perilune.tensor.ops"
