-- utils.lua: what PyTorch has in nn.utils: all parameters as one vector, and sequences of different lengths as one
-- tensor.
local P = require "perilune.ffi"
local Tensor = require "perilune.tensor"
local F = require "perilune.nn.functional"
local signature = require "perilune.signature"

local M = {}

--- The list of tensors, if it is one; it must not be empty.
local function checked(func, what, list)
  if #list == 0 then P.fail(("%s: no %s, wanted at least one"):format(func, what)) end
  for i = 1, #list do
    if not Tensor.is(list[i]) then
      P.fail(("%s: entry %d is %s, wanted a tensor"):format(func, i, signature.text(list[i])))
    end
  end
  return list
end

--- All elements of a list of parameters, one parameter after the other: one dimension. Gradients go through.
function M.parameters_to_vector(parameters)
  local parts = {}
  for i, p in ipairs(checked("parameters_to_vector", "parameters", parameters)) do parts[i] = p:reshape(-1) end
  return F.cat(parts, 1)
end

local function write_parts(vector, parameters)
  local at = 0
  for _, p in ipairs(parameters) do
    local n = p:numel()
    p:detach():copy(vector:slice(1, at, at + n):reshape(p:shape()))
    at = at + n
  end
end
--- Write the elements of a vector, in the order of parameters_to_vector, into a list of parameters.
function M.vector_to_parameters(vector, parameters)
  local wanted = 0
  for _, p in ipairs(checked("vector_to_parameters", "parameters", parameters)) do wanted = wanted + p:numel() end
  if vector:dim() ~= 1 or vector:numel() ~= wanted then
    P.fail(("vector_to_parameters: vector is %s, wanted one dimension of %d, the elements of all parameters"):format(
      Tensor._text(vector), wanted))
  end
  P.no_grad(write_parts, vector:detach(), parameters)
end

--- A list of sequences [L_i, ...] as one tensor, [longest, B, ...] or, with batch_first, [B, longest, ...]: behind the
--- end of each there is padding_value (0).
function M.pad_sequence(sequences, batch_first, padding_value)
  local longest, first, padded = 0, checked("pad_sequence", "sequences", sequences)[1], {}
  local rest = first:shape()
  for i, s in ipairs(sequences) do
    local alike = s:dim() == #rest and s:dim() > 0
    for d = 2, alike and #rest or 0 do alike = alike and s:size(d) == rest[d] end
    if not alike then
      P.fail(("pad_sequence: entry %d is %s, wanted sequences that differ in their first size only, as %s"):format(i,
        Tensor._text(s), Tensor._text(first)))
    end
    longest = math.max(longest, s:size(1))
  end
  local pads = {}
  for d = 1, 2 * #rest do pads[d] = 0 end
  for i, s in ipairs(sequences) do
    pads[#pads] = longest - s:size(1)
    padded[i] = F.pad(s, pads, padding_value)
  end
  return F.stack(padded, batch_first and 1 or 2)
end

signature.check_one("nn.utils.", M, { parameters_to_vector = "parameters: list",
  pad_sequence = "sequences: list, batch_first: boolean?, padding_value: number?" })
signature.check("nn.utils.", M, { vector_to_parameters = "vector: tensor, parameters: list" })

return require("perilune.util").face("peri.nn.utils", M)
