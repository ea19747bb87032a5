-- outputs.lua: batches of collections whose outputs share features, or leave some of a batch out: each output has a key of its own then.
-- A collection has _outputs, _names (of them), _order (by output, from 0: the place of its feature among the keys of a batch), _arrange
-- (whether batches are rearranged to one key for each output) and, for rows of ids, _jts (an array of so many peri_jt *), _need_indices.
local ffi = require "ffi"
local P = require "perilune.ffi"
local jagged = require "perilune.jagged"
local C, check = P.C, P.check
local KeyedJaggedTensor, JaggedTensor = jagged.KeyedJaggedTensor, jagged.JaggedTensor
local kjt_ptr = KeyedJaggedTensor.ptr

local M = {}
local kjt_out = ffi.new "peri_kjt *[1]"

--- The key of output i (from 1) in an arranged batch.
function M.place(self, i)
  if self._arrange then return i - 1 end
  return self._order[i - 1]
end

--- The batch itself, or one with a key for each output.
function M.arranged(self, features)
  if not self._arrange then return features end
  check(C.peri_kjt_permute(kjt_ptr(features), self._order, #self._outputs, kjt_out))
  return KeyedJaggedTensor.wrap(kjt_out[0])
end

--- A variable batch, arranged; and the function(key) -> first bag and bags of a key. They stay as they are: inverse indices are the user's.
function M.variable(self, features)
  local batch = M.arranged(self, features)
  local strides, first = batch:stride_per_key(), batch:lengths_offset_per_key()
  return batch, function(key) return first[key + 1], strides[key + 1] end
end

--- The JaggedTensors of _jts, by name.
function M.by_name(self)
  local names, jts, result = self._names, self._jts, {}
  for i = 1, #names do result[names[i]] = JaggedTensor.wrap(jts[M.place(self, i)]) end
  return result
end

--- Rows of all ids of an arranged batch, as JaggedTensors by name.
function M.cut(self, batch, rows)
  check(C.peri_kjt_cut(kjt_ptr(batch), rows.ptr, self._need_indices, self._jts))
  return M.by_name(self)
end

return M
