-- sparse_jagged.lua: Sparse operators: jagged and dense tensors.
--
-- Operators under the names of FBGEMM's. A jagged tensor is its values, all bags one after the other, with the lengths
-- of the bags or their offsets: where each bag begins, and the end of the last one ("complete" offsets). Offsets come
-- as a list with one tensor for each level; bags of bags have several. In shapes, B is the number of bags, N of values,
-- D of columns. Positions count from 0. docs/sparse_operators.md tells more.
---@meta

---@class peri.sparse
local sparse = {}

---Bags as rows of equal length, filled up with a number; what is longer is cut off. Recorded on the tape.
---
---Errors: another number of sizes than levels; offsets that do not fit the values.
---
---```lua
---local values, offsets = peri.tensor { 1, 2, 3 }, peri.tensor({ 0, 1, 3 }, "i64")
---local dense = peri.sparse.jagged_to_padded_dense(values, { offsets }, { 2 }, 9)
---print(table.concat(dense:to_list(), " "),
---  (peri.sparse.dense_to_jagged(dense, { offsets })):item(2))
-----> 1 9 2 3 3
---```
---@param values peri.Tensor `[N, ...]`.
---@param offsets peri.Tensor[] Complete offsets of each level, 1 to 5 of them: `[B + 1]`.
---@param max_lengths integer[] A size for each level.
---@param padding_value? number What fills up (default: 0).
---@return peri.Tensor # `[B, max_lengths..., ...]`.
function sparse.jagged_to_padded_dense(values, offsets, max_lengths, padding_value) end

---The reverse of `jagged_to_padded_dense`. Values beyond the size of `dense` are 0. Recorded on the tape.
---
---Errors: offsets that do not fit.
---@param dense peri.Tensor `[B, L, ...]`.
---@param offsets peri.Tensor[] Complete offsets of each level, 1 to 5 of them: `[B + 1]`.
---@param total_L? integer The number of values, which saves asking the device (default: read from the offsets).
---@return peri.Tensor # Values: `[N, ...]`.
---@return peri.Tensor[] # The offsets, as they came: `[B + 1]` each.
function sparse.dense_to_jagged(dense, offsets, total_L) end

---`jagged_to_padded_dense` of one level.
---
---Errors: offsets that do not fit the values.
---
---```lua
---local offsets = peri.tensor({ 0, 1, 3 }, "i64")
---print(peri.sparse.jagged_1d_to_dense(peri.tensor { 1, 2, 3 }, offsets, 1, 0):numel()) --> 2
---print(peri.sparse.jagged_2d_to_dense(peri.ones { 3, 4 }, offsets, 2):numel()) --> 16
---```
---@param values peri.Tensor `[N]`.
---@param offsets peri.Tensor Complete offsets: `[B + 1]`.
---@param max_sequence_length integer L, the length of all rows.
---@param padding_value? number What fills up (default: 0).
---@return peri.Tensor # `[B, L]`.
function sparse.jagged_1d_to_dense(values, offsets, max_sequence_length, padding_value) end

---`jagged_to_padded_dense` of one level, of rows, filled up with 0.
---
---Errors: offsets that do not fit the values.
---@param values peri.Tensor `[N, D]`.
---@param offsets peri.Tensor Complete offsets: `[B + 1]`.
---@param max_sequence_length integer L, the length of all rows.
---@return peri.Tensor # `[B, L, D]`.
function sparse.jagged_2d_to_dense(values, offsets, max_sequence_length) end

---One dense tensor for each key. `stacked_jagged_2d_to_dense` is the same function.
---
---Errors: lists without an entry for each key; lengths that do not fit.
---
---```lua
---local lengths = peri.tensor({ { 1 }, { 2 } }, "i64")
---local dense = peri.sparse.stacked_jagged_1d_to_dense(peri.tensor { 1, 2, 3 }, lengths,
---  { 0, 1, 3 }, { 1, 2 })
---print(#dense, dense[2]:item(1)) --> 2 3
---```
---@param values peri.Tensor `[N]` or `[N, D]`, key by key.
---@param lengths peri.Tensor `[K, B]`: bags of each of K keys.
---@param offset_per_key integer[] Where the values of each key begin, and the end: K + 1 numbers.
---@param max_lengths_per_key integer[] The size for each key.
---@param padding_value? number What fills up (default: 0).
---@return peri.Tensor[] # For each key `[B, size]` or `[B, size, D]`.
function sparse.stacked_jagged_1d_to_dense(values, lengths, offset_per_key, max_lengths_per_key, padding_value) end

---Segments as rows, filled up with 0.
---
---Errors: lengths that do not fit.
---
---```lua
---local t, lengths = peri.tensor { 1, 2, 3 }, peri.tensor({ 1, 2 }, "i64")
---local packed, there = peri.sparse.pack_segments_v2(t, lengths, 2, false, true)
---print(peri.sparse.pack_segments(t, lengths, 2):item(1), packed:item(3), there:item(1)) --> 0 3 0
---```
---@param t peri.Tensor `[N, ...]`.
---@param lengths peri.Tensor `[B]`.
---@param max_length integer L, the length of all rows.
---@return peri.Tensor # `[B, L, ...]`.
function sparse.pack_segments(t, lengths, max_length) end

---As `pack_segments`; it also returns which rows are there.
---
---Errors: lengths that do not fit.
---@param t peri.Tensor `[N, ...]`.
---@param lengths peri.Tensor `[B]`.
---@param max_length integer L, the length of all rows.
---@param pad_minf? boolean Fill up with -inf (default: false, with 0).
---@param return_presence_mask? boolean Return the mask, too (default: false).
---@return peri.Tensor # `[B, L, ...]`.
---@return peri.Tensor|nil # Where a value is, bool: `[B, L]`.
function sparse.pack_segments_v2(t, lengths, max_length, pad_minf, return_presence_mask) end

---The first values of each bag.
---
---Errors: lengths that do not fit.
---
---```lua
---print(peri.sparse.jagged_1d_to_truncated_values(peri.tensor { 1, 2, 3 },
---  peri.tensor({ 1, 2 }, "i64"),
---  1):item(1)) --> 2
---```
---@param values peri.Tensor `[N]`.
---@param lengths peri.Tensor `[B]`.
---@param max_truncated_length integer The most of a bag.
---@return peri.Tensor # `[n]`.
function sparse.jagged_1d_to_truncated_values(values, lengths, max_truncated_length) end

---The values for which a mask is true. Recorded on the tape.
---
---Errors: a mask that is not bool, or of another length.
---
---```lua
---local values, lengths = peri.tensor { 1, 2, 3 }, peri.tensor({ 1, 2 }, "i64")
---local kept, left = peri.sparse.masked_select_jagged_1d(values, lengths, values:gt(2))
---print(kept:item(), table.concat(left:to_list(), " ")) --> 3 0 1
---```
---@param values peri.Tensor `[N]`.
---@param lengths peri.Tensor `[B]`.
---@param mask peri.Tensor bool `[N]`.
---@return peri.Tensor # The values: `[n]`.
---@return peri.Tensor # What is left of the bags: `[B]`.
function sparse.masked_select_jagged_1d(values, lengths, mask) end

---Some values of each bag from a place on. Recorded on the tape.
---
---Errors: a place outside of its bag.
---
---```lua
---local start = peri.tensor({ 0, 1 }, "i64")
---print(peri.sparse.jagged_slice(peri.tensor { 1, 2, 3 }, peri.tensor({ 1, 2 }, "i64"), start,
---  1):item(1))
-----> 3
---```
---@param x_values peri.Tensor `[N]`.
---@param x_lengths peri.Tensor `[B]`.
---@param start peri.Tensor The first place in each bag: `[B]`.
---@param slice_length integer The most of a bag.
---@return peri.Tensor # The values: `[n]`.
---@return peri.Tensor # Lengths of the bags: `[B]`.
function sparse.jagged_slice(x_values, x_lengths, start, slice_length) end

---A jagged and a dense tensor added up, as a dense one. Recorded on the tape.
---
---Errors: offsets that do not fit.
---
---```lua
---local values, offsets = peri.ones { 2, 1 }, { peri.tensor({ 0, 2, 2 }, "i64") }
---local y = peri.full({ 2, 2, 1 }, 5)
---local sparse = peri.sparse
---print(sparse.jagged_dense_elementwise_add(values, offsets, y):sum():item()) --> 22
---print((sparse.jagged_dense_elementwise_add_jagged_output(values, offsets, y)):sum():item())
-----> 12
---print((sparse.jagged_dense_dense_elementwise_add_jagged_output(values, offsets, y,
---  y)):sum():item())
-----> 22
---print((sparse.jagged_dense_elementwise_mul(values, offsets, y)):sum():item()) --> 10
---```
---@param x_values peri.Tensor `[N, D]`.
---@param x_offsets peri.Tensor[] Complete offsets of each level: `[B + 1]`.
---@param y peri.Tensor `[B, L, D]`.
---@return peri.Tensor # `[B, L, D]`.
function sparse.jagged_dense_elementwise_add(x_values, x_offsets, y) end

---As `jagged_dense_elementwise_add`, with jagged values as the result.
---
---Errors: offsets that do not fit.
---@param x_values peri.Tensor `[N, D]`.
---@param x_offsets peri.Tensor[] Complete offsets of each level: `[B + 1]`.
---@param y peri.Tensor `[B, L, D]`.
---@return peri.Tensor # `[N, D]`.
---@return peri.Tensor[] # The offsets, as they came: `[B + 1]` each.
function sparse.jagged_dense_elementwise_add_jagged_output(x_values, x_offsets, y) end

---A jagged and two dense tensors added up, as jagged values.
---
---Errors: offsets that do not fit.
---@param x_values peri.Tensor `[N, D]`.
---@param x_offsets peri.Tensor[] Complete offsets of each level: `[B + 1]`.
---@param y_0 peri.Tensor `[B, L, D]`.
---@param y_1 peri.Tensor `[B, L, D]`.
---@return peri.Tensor # `[N, D]`.
---@return peri.Tensor[] # The offsets, as they came: `[B + 1]` each.
function sparse.jagged_dense_dense_elementwise_add_jagged_output(x_values, x_offsets, y_0, y_1) end

---A jagged and a dense tensor multiplied element by element, as jagged values.
---
---Errors: offsets that do not fit.
---@param x_values peri.Tensor `[N, D]`.
---@param x_offsets peri.Tensor[] Complete offsets of each level: `[B + 1]`.
---@param y peri.Tensor `[B, L, D]`.
---@return peri.Tensor # `[N, D]`.
---@return peri.Tensor[] # The offsets, as they came: `[B + 1]` each.
function sparse.jagged_dense_elementwise_mul(x_values, x_offsets, y) end

---Softmax over the values of each bag, column by column. Values beyond `max_L` become 0. Recorded on the tape.
---
---Errors: offsets that do not fit.
---
---```lua
---print(peri.sparse.jagged_softmax(peri.ones { 3, 1 }, peri.tensor({ 0, 1, 3 }, "i64"),
---  2):item(1))
-----> 0.5
---```
---@param values peri.Tensor `[N, D]`.
---@param offsets peri.Tensor Complete offsets: `[B + 1]`.
---@param max_L integer The longest bag.
---@return peri.Tensor # `[N, D]`.
function sparse.jagged_softmax(values, offsets, max_L) end

---The rows of each bag times a matrix of that bag. Recorded on the tape.
---
---Errors: sizes or offsets that do not fit.
---
---```lua
---local x, offsets = peri.ones { 3, 2 }, peri.tensor({ 0, 1, 3 }, "i64")
---print(peri.sparse.jagged_dense_bmm(x, offsets, peri.ones { 2, 2, 4 }, 2):size(2)) --> 4
---print(peri.sparse.jagged_jagged_bmm(x, peri.ones { 3, 4 }, offsets, 2):item(8)) --> 2
---```
---@param x_values peri.Tensor `[N, D]`.
---@param x_offsets peri.Tensor Complete offsets: `[B + 1]`.
---@param y peri.Tensor `[B, D, T]`.
---@param max_L integer The longest bag.
---@return peri.Tensor # `[N, T]`.
function sparse.jagged_dense_bmm(x_values, x_offsets, y, max_L) end

---For each bag the sum over its rows of x times y: the transposed rows of one times those of the other. Recorded on the
---tape.
---
---Errors: sizes or offsets that do not fit.
---@param x_values peri.Tensor `[N, D]`.
---@param y_values peri.Tensor `[N, T]`.
---@param x_offsets peri.Tensor Complete offsets of both: `[B + 1]`.
---@param max_L integer The longest bag.
---@return peri.Tensor # `[B, D, T]`.
function sparse.jagged_jagged_bmm(x_values, y_values, x_offsets, max_L) end

---For each bag and head a vector times the rows of the bag. Recorded on the tape.
---
---Errors: sizes or offsets that do not fit.
---
---```lua
---print(peri.sparse.batched_dense_vec_jagged_2d_mul(peri.ones { 2, 2 }, peri.ones { 3, 4 },
---  peri.tensor({ 0, 1, 3 }, "i64")):item(4)) --> 2
---```
---@param v peri.Tensor `[B * heads, L]`.
---@param a_values peri.Tensor `[N, heads * D]`.
---@param a_offsets peri.Tensor Complete offsets: `[B + 1]`.
---@return peri.Tensor # `[B * heads, D]`.
function sparse.batched_dense_vec_jagged_2d_mul(v, a_values, a_offsets) end

---Products of matrices whose batch is the second dimension, plus a bias. Recorded on the tape.
---
---Errors: sizes that do not fit.
---
---```lua
---print(peri.sparse.permute102_baddbmm_permute102(peri.ones { 2, 4 }, peri.ones { 5, 2, 3 },
---  peri.ones { 2, 3, 4 }):item(0)) --> 4
---```
---@param bias peri.Tensor `[batch, n]`.
---@param A peri.Tensor `[m, batch, k]`.
---@param B peri.Tensor `[batch, k, n]`.
---@return peri.Tensor # `[m, batch, n]`.
function sparse.permute102_baddbmm_permute102(bias, A, B) end
