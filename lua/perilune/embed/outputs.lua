-- outputs.lua: batches of collections whose outputs share features, or leave some of a batch out: each output has a key
-- of its own then. A collection has _outputs, _names (of them), _order (by output, from 0: the place of its feature
-- among the keys of a batch), _arrange (whether batches are rearranged to one key for each output) and, for rows of
-- ids, _jts (an array of so many peri_jt *), _need_indices.
local ffi = require "ffi"
local P = require "perilune.ffi"
local jagged = require "perilune.jagged"
local sparse = require "perilune.sparse"
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

--- A variable batch, arranged; and the function(key) -> first bag and bags of a key.
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

--- The row of a feature among the inverse indices of a batch, [samples].
local function inverse_of(func, inverse, feature)
  for i, name in ipairs(inverse[1]) do
    if name == feature then return inverse[2]:slice(1, i - 1, i):reshape(-1) end
  end
  P.fail(("%s: the batch has no inverse indices of '%s'; those are: %s"):format(func, feature,
    table.concat(inverse[1], ", ")))
end

--- `rows` without the columns that only wider tables of the collection have.
function M.own_columns(rows, dim) return rows:size(2) > dim and rows:slice(2, 0, dim):contiguous() or rows end

--- Note how wide the tables of a collection of rows are: _dim, the columns of the widest, which all rows of a batch lie
--- in; _narrow, the outputs of the others, and _narrow_dims, their columns.
function M.widths(self)
  local widest = 0
  for _, t in ipairs(self.tables) do widest = math.max(widest, t.embedding_dim) end
  self._dim, self._narrow, self._narrow_dims = widest, {}, {}
  for i, output in ipairs(self._outputs) do
    local dim = self.tables[output.table].embedding_dim
    if dim < widest then
      self._narrow[#self._narrow + 1], self._narrow_dims[#self._narrow + 1] = i, dim
    end
  end
end

--- The JaggedTensors `result`, by name, each with the columns of its own table.
function M.narrowed(self, result)
  for i, output in ipairs(self._narrow) do
    local jt = result[self._names[output]]
    result[self._names[output]] = JaggedTensor { lengths = jt:lengths(), weights = jt:weights_or_none(),
      values = M.own_columns(jt:values(), self._narrow_dims[i]) }
  end
  return result
end

--- What the batch has beside its ids, for the JaggedTensors `result` that have a row for each: the ids' weights go with
--- their rows, and where there are inverse indices, every sample gets the rows of the bag that they name. names and
--- features: by output.
function M.completed(func, batch, names, features, result, need_indices)
  local inverse, weighted = batch:inverse_indices_or_none(), batch:weights_or_none()
  if not inverse and not weighted then return result end
  if weighted and need_indices then
    P.fail(func .. ": the batch has weights, whose place need_indices gives to the ids; leave one of them out")
  end
  for i, name in ipairs(names) do
    local rows = result[name]
    local values, lengths = rows:values(), rows:lengths()
    local weights = weighted and batch:get(features[i]):weights() or need_indices and rows:weights() or nil
    if inverse then
      local bags, given = inverse_of(func, inverse, features[i]), lengths
      values, lengths = sparse.jagged_index_select(values, given, bags)
      if weights then weights = sparse.jagged_index_select(weights, given, bags) end
    end
    result[name] = JaggedTensor { values = values, lengths = lengths, weights = weights }
  end
  return result
end

return M
