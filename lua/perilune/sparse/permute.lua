-- permute.lua: cumulative sums, permutations, segment sums, distinct ids.
local ffi = require "ffi"
local P = require "perilune.ffi"
local Tensor = require "perilune.tensor"
local A = require "perilune.jagged.arguments"
local signature = require "perilune.signature"
local C, check = P.C, P.check
local ptr, wrap, out = Tensor.ptr, Tensor.wrap, Tensor.out

local M = {}

-- -- cumulative sums --------------------------------------------------------------------------------------------------

local function cumsum(t, mode)
  check(C.peri_sparse_cumsum(ptr(t), mode, out))
  return (wrap(out[0]))
end

--- Cumulative sums of [n], or of every row of [rows, n]: from 0 to the total (one more entry), from 0, or to the total.
--- A sum that the dtype cannot hold is an error.
function M.asynchronous_complete_cumsum(t) return (cumsum(t, C.PERI_CUMSUM_COMPLETE)) end
function M.asynchronous_exclusive_cumsum(t) return (cumsum(t, C.PERI_CUMSUM_EXCLUSIVE)) end
function M.asynchronous_inclusive_cumsum(t) return (cumsum(t, C.PERI_CUMSUM_INCLUSIVE)) end

-- -- segments ---------------------------------------------------------------------------------------------------------

local moved = ffi.new "peri_permute_result"

local function permute(order, lengths, values, weights)
  check(C.peri_sparse_permute(ptr(order), ptr(lengths), ptr(values), A.ptr(weights), moved))
  local new_weights
  if weights then new_weights = wrap(moved.weights) end
  return wrap(moved.lengths), wrap(moved.values), new_weights
end

--- Bags in another order (repeats and subsets are fine): lengths, values and, if given, weights. With gradient.
function M.permute_1D_sparse_data(order, lengths, values, weights)
  local l, v, w = permute(order, lengths, values, weights)
  return l, v, w -- no tail call (signature.lua, guard)
end

--- Rows of bags in another order: lengths [T, B].
M.permute_2D_sparse_data = M.permute_1D_sparse_data

--- The same with flat lengths of T * stride bags.
function M.permute_2D_sparse_data_input1D(order, lengths, values, stride, weights)
  if stride < 1 or lengths:numel() % stride ~= 0 then
    P.fail(("permute_2D_sparse_data_input1D: %d lengths, wanted a multiple of the stride %d"):format(lengths:numel(),
      stride))
  end
  local new_lengths, new_values, new_weights = permute(order, lengths:reshape(lengths:numel() / stride, stride), values,
    weights)
  return new_lengths:reshape(new_lengths:numel()), new_values, new_weights
end

M.permute_sparse_features = M.permute_1D_sparse_data

--- Rows of embeddings as segments: lengths and embeddings.
function M.permute_sequence_embeddings(order, lengths, embeddings)
  local new_lengths, rows = permute(order, lengths, embeddings)
  return new_lengths, rows
end

--- The bags that `indices` names, one after the other: their rows, and their lengths. With gradient.
function M.jagged_index_select(values, lengths, indices)
  local new_lengths, rows = permute(indices, lengths, values)
  return rows, new_lengths
end

--- Rows of values. With gradient.
function M.index_select_dim0(values, indices)
  check(C.peri_sparse_index_select(ptr(values), ptr(indices), out))
  return (wrap(out[0]))
end

--- index_select_dim0 of each of a list of tensors, with the list of indices that belongs to it.
function M.group_index_select_dim0(inputs, indices)
  if #inputs ~= #indices then
    P.fail(("group_index_select_dim0: %d inputs, %d lists of indices"):format(#inputs, #indices))
  end
  return P.util.map(inputs, function(t, i) return M.index_select_dim0(t, indices[i]) end)
end

--- A permutation turned around.
function M.invert_permute(order)
  check(C.peri_sparse_invert_permute(ptr(order), out))
  return (wrap(out[0]))
end

--- A permutation of segments as one of elements; offsets are complete.
function M.expand_into_jagged_permute(order, input_offset, output_offset, output_size)
  check(C.peri_sparse_expand_permute(ptr(order), ptr(input_offset), ptr(output_offset), output_size or -1, out))
  return (wrap(out[0]))
end

--- 0, 1, ... within each segment; the last one ends at range_size.
function M.offsets_range(offsets, range_size)
  check(C.peri_sparse_offsets_range(ptr(offsets), range_size, out))
  return (wrap(out[0]))
end

--- 0, 1, ..., length - 1 for each length.
function M.lengths_range(lengths)
  check(C.peri_sparse_lengths_range(ptr(lengths), out))
  return (wrap(out[0]))
end

--- Sums of values[csr_seg[s] * batch_size .. csr_seg[s + 1] * batch_size). With gradient.
function M.segment_sum_csr(batch_size, csr_seg, values)
  check(C.peri_sparse_segment_sum(ptr(values), ptr(csr_seg), batch_size, out))
  return (wrap(out[0]))
end

-- -- pooled embeddings ------------------------------------------------------------------------------------------------

--- Column blocks in another order (lists of numbers): block i of the result is block permute_list[i] (from 0); repeats
--- and subsets are fine. With gradient.
function M.permute_pooled_embs(pooled, offset_dim_list, permute_list)
  local func = "permute_pooled_embs"
  local offsets, _, n = A.matrix(func, "offset_dim_list", { offset_dim_list })
  local order, _, count = A.matrix(func, "permute_list", { permute_list })
  if n < 1 then P.fail(func .. ": offset_dim_list is empty; it has one entry more than there are features") end
  check(C.peri_sparse_permute_pooled(ptr(pooled), offsets, n - 1, order, count, out))
  return (wrap(out[0]))
end

-- -- distinct ids -----------------------------------------------------------------------------------------------------

local distinct = ffi.new "peri_unique_result"

--- Each id once, ascending; with `inverse` where each id went (unique[inverse[i]] = ids[i]); with `counts` how many
--- there are of each: unique, inverse or nil, counts or nil.
function M.unique(ids, inverse, counts)
  check(C.peri_sparse_unique(ptr(ids), inverse or false, counts or false, distinct))
  local to, many
  if inverse then to = wrap(distinct.inverse) end
  if counts then many = wrap(distinct.counts) end
  return wrap(distinct.unique), to, many
end

signature.check("sparse.", M, {
  asynchronous_complete_cumsum = "t: tensor", asynchronous_exclusive_cumsum = "t: tensor",
  asynchronous_inclusive_cumsum = "t: tensor",
  permute_1D_sparse_data = "order: tensor, lengths: tensor, values: tensor, weights: tensor?",
  permute_2D_sparse_data = "order: tensor, lengths: tensor, values: tensor, weights: tensor?",
  permute_2D_sparse_data_input1D = "order: tensor, lengths: tensor, values: tensor, stride: integer, weights: tensor?",
  permute_sparse_features = "order: tensor, lengths: tensor, indices: tensor, weights: tensor?",
  permute_sequence_embeddings = "order: tensor, lengths: tensor, embeddings: tensor",
  jagged_index_select = "values: tensor, lengths: tensor, indices: tensor",
  index_select_dim0 = "values: tensor, indices: tensor", group_index_select_dim0 = "inputs: tensors, indices: tensors",
  invert_permute = "order: tensor",
  expand_into_jagged_permute = "order: tensor, input_offset: tensor, output_offset: tensor, output_size: integer?",
  offsets_range = "offsets: tensor, range_size: integer", lengths_range = "lengths: tensor",
  segment_sum_csr = "batch_size: integer, csr_seg: tensor, values: tensor",
  permute_pooled_embs = "pooled: tensor, offset_dim_list: any, permute_list: any",
  unique = "ids: tensor, inverse: boolean?, counts: boolean?",
}, 3)
M.asynchronous_batched_complete_cumsum, M.repeat_arange = M.asynchronous_complete_cumsum, M.lengths_range
M.permute_duplicate_pooled_embs, M.permute_pooled_embs_auto_grad = M.permute_pooled_embs, M.permute_pooled_embs

return M
