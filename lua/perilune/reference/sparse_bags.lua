-- sparse_bags.lua: Sparse operators: order, buckets, batches.
--
-- Operators under the names of FBGEMM's, on bags of ids: their values one after the other, and the lengths of the bags
-- or their offsets (where each begins; "complete" ones have the end of the last, too). In shapes, B is the number of
-- bags, N of values, T of tables or keys. Positions count from 0. docs/sparse_operators.md tells more.
---@meta

---@class peri.sparse
local sparse = {}

---Sums of all entries before each one, from 0 to the total: lengths become complete offsets.
---`asynchronous_batched_complete_cumsum` is the same function.
---
---Errors: dtypes other than i32 and i64; a sum that the dtype cannot hold.
---
---```lua
---local lengths = peri.tensor({ 2, 1 }, "i64")
---local function list(t) return table.concat(t:to_list(), " ") end
---print(list(peri.sparse.asynchronous_complete_cumsum(lengths))) --> 0 2 3
---print(list(peri.sparse.asynchronous_exclusive_cumsum(lengths)),
---  list(peri.sparse.asynchronous_inclusive_cumsum(lengths))) --> 0 2 2 3
---```
---@param t peri.Tensor `[n]`, or `[rows, n]`: each row by itself.
---@return peri.Tensor # `[n + 1]`, or `[rows, n + 1]`.
function sparse.asynchronous_complete_cumsum(t) end

---Sums of all entries before each one, from 0 on.
---
---Errors: dtypes other than i32 and i64; a sum that the dtype cannot hold.
---@param t peri.Tensor `[n]`, or `[rows, n]`.
---@return peri.Tensor # Of the shape of t.
function sparse.asynchronous_exclusive_cumsum(t) end

---Sums of all entries up to each one.
---
---Errors: dtypes other than i32 and i64; a sum that the dtype cannot hold.
---@param t peri.Tensor `[n]`, or `[rows, n]`.
---@return peri.Tensor # Of the shape of t.
function sparse.asynchronous_inclusive_cumsum(t) end

---Bags in another order; repeats and subsets are fine. Recorded on the tape.
---
---Errors: a bag that is not there; lengths that do not fit the values.
---
---```lua
---local lengths, values = peri.tensor({ 1, 2 }, "i64"), peri.tensor { 5, 6, 7 }
---local order = peri.tensor({ 1, 0 }, "i64")
---local moved, ids = peri.sparse.permute_1D_sparse_data(order, lengths, values)
---print(moved:item(0), table.concat(ids:to_list(), " ")) --> 2 6 7 5
---print((peri.sparse.permute_2D_sparse_data(order, lengths:reshape(2, 1), values)):item(0)) --> 2
---print((peri.sparse.permute_2D_sparse_data_input1D(order, lengths, values, 1)):item(0)) --> 2
---print((peri.sparse.permute_sparse_features(order, lengths, values)):item(0)) --> 2
---local _, rows = peri.sparse.permute_sequence_embeddings(order, lengths, peri.ones { 3, 4 })
---print(rows:size(2), (peri.sparse.jagged_index_select(values, lengths, order)):item(0)) --> 4 6
---```
---@param order peri.Tensor Numbers of bags: `[n]`.
---@param lengths peri.Tensor `[B]`.
---@param values peri.Tensor `[N]`.
---@param weights? peri.Tensor A weight for each value: `[N]` (default: none).
---@return peri.Tensor # Lengths in the new order: `[n]`.
---@return peri.Tensor # Values: `[N']`.
---@return peri.Tensor|nil # Weights: `[N']`.
function sparse.permute_1D_sparse_data(order, lengths, values, weights) end

---Rows of bags in another order.
---
---Errors: a row that is not there; lengths that do not fit the values.
---@param order peri.Tensor Numbers of rows: `[n]`.
---@param lengths peri.Tensor `[T, B]`.
---@param values peri.Tensor `[N]`.
---@param weights? peri.Tensor A weight for each value: `[N]` (default: none).
---@return peri.Tensor # Lengths in the new order: `[n, B]`.
---@return peri.Tensor # Values: `[N']`.
---@return peri.Tensor|nil # Weights: `[N']`.
function sparse.permute_2D_sparse_data(order, lengths, values, weights) end

---As `permute_2D_sparse_data`, with flat lengths.
---
---Errors: a number of lengths that the stride does not divide.
---@param order peri.Tensor Numbers of rows: `[n]`.
---@param lengths peri.Tensor `[T * stride]`.
---@param values peri.Tensor `[N]`.
---@param stride integer Bags of a row.
---@param weights? peri.Tensor A weight for each value: `[N]` (default: none).
---@return peri.Tensor # Lengths in the new order: `[n * stride]`.
---@return peri.Tensor # Values: `[N']`.
---@return peri.Tensor|nil # Weights: `[N']`.
function sparse.permute_2D_sparse_data_input1D(order, lengths, values, stride, weights) end

---Bags, or rows of them, in another order: as both functions above, by the shape of the lengths.
---
---Errors: a bag that is not there; lengths that do not fit the values.
---@param order peri.Tensor Numbers of bags: `[n]`.
---@param lengths peri.Tensor `[B]` or `[T, B]`.
---@param indices peri.Tensor `[N]`.
---@param weights? peri.Tensor A weight for each value: `[N]` (default: none).
---@return peri.Tensor # Lengths in the new order: `[n]` or `[n, B]`.
---@return peri.Tensor # Values: `[N']`.
---@return peri.Tensor|nil # Weights: `[N']`.
function sparse.permute_sparse_features(order, lengths, indices, weights) end

---Bags of rows in another order.
---
---Errors: a bag that is not there; lengths that do not fit the rows.
---@param order peri.Tensor Numbers of bags: `[n]`.
---@param lengths peri.Tensor `[B]` or `[T, B]`.
---@param embeddings peri.Tensor `[N, D]`.
---@return peri.Tensor # Lengths in the new order: `[n]` or `[n, B]`.
---@return peri.Tensor # Rows: `[N', D]`.
function sparse.permute_sequence_embeddings(order, lengths, embeddings) end

---The bags that `indices` names, one after the other. Recorded on the tape.
---
---Errors: a bag that is not there.
---@param values peri.Tensor `[N]` or `[N, D]`.
---@param lengths peri.Tensor `[B]`.
---@param indices peri.Tensor Numbers of bags: `[n]`.
---@return peri.Tensor # Values: `[N']` or `[N', D]`.
---@return peri.Tensor # Lengths: `[n]`.
function sparse.jagged_index_select(values, lengths, indices) end

---Rows by their numbers. Recorded on the tape.
---
---Errors: a row that is not there.
---
---```lua
---local x, rows = peri.tensor { { 1 }, { 2 } }, peri.tensor({ 1, 1 }, "i64")
---print(peri.sparse.index_select_dim0(x, rows):item(0),
---  #peri.sparse.group_index_select_dim0({ x, x }, { rows, rows })) --> 2 2
---```
---@param values peri.Tensor `[n, ...]`.
---@param indices peri.Tensor `[m]`.
---@return peri.Tensor # `[m, ...]`.
function sparse.index_select_dim0(values, indices) end

---As `index_select_dim0`, for several tensors.
---
---Errors: lists of different lengths; a row that is not there.
---@param inputs peri.Tensor[] Each `[n, ...]`.
---@param indices peri.Tensor[] Numbers of rows for each: `[m]`.
---@return peri.Tensor[] # Each `[m, ...]`.
function sparse.group_index_select_dim0(inputs, indices) end

---Rows of several matrices that lie one after the other. Recorded on the tape.
---
---Errors: lists of different lengths; sizes that do not fit; a row that is not there.
---
---```lua
---local two = peri.tensor { 1, 2, 3, 4 }
---local picked = peri.sparse.batch_index_select_dim0(two, peri.tensor({ 1, 0 }, "i64"), { 1, 1 },
---  { 2, 1 }, { 1, 2 })
---print(table.concat(picked:to_list(), " ")) --> 2 3 4
---```
---@param inputs peri.Tensor All matrices: `[sum of rows * columns]`.
---@param indices peri.Tensor Numbers of rows, matrix by matrix: `[n]`.
---@param input_num_indices integer[] How many of them each matrix has.
---@param input_rows integer[] Rows of each matrix.
---@param input_columns integer[] Columns of each matrix.
---@param permute_output_dim_0_1? boolean The first row of every matrix, then the second, ... (default: false, matrix by matrix).
---@return peri.Tensor # The rows: `[N]`.
function sparse.batch_index_select_dim0(inputs, indices, input_num_indices, input_rows, input_columns, permute_output_dim_0_1) end

---A permutation turned around.
---
---Errors: numbers that are no permutation.
---
---```lua
---print(table.concat(peri.sparse.invert_permute(peri.tensor({ 2, 0, 1 }, "i64")):to_list(), " "))
-----> 1 2 0
---```
---@param order peri.Tensor Each of 0 .. n - 1 once: `[n]`.
---@return peri.Tensor # `[n]`.
function sparse.invert_permute(order) end

---A permutation of segments as one of elements.
---
---Errors: offsets that do not fit.
---
---```lua
---local order, from = peri.tensor({ 1, 0 }, "i64"), peri.tensor({ 0, 1, 3 }, "i64")
---print(table.concat(peri.sparse.expand_into_jagged_permute(order, from,
---  peri.tensor({ 0, 2, 3 }, "i64")):to_list(),
---  " ")) --> 1 2 0
---```
---@param order peri.Tensor `[B]`.
---@param input_offset peri.Tensor Complete offsets of the segments: `[B + 1]`.
---@param output_offset peri.Tensor Complete offsets in the new order: `[B + 1]`.
---@param output_size? integer The number of elements, which saves asking the device (default: read from the offsets).
---@return peri.Tensor # `[N]`.
function sparse.expand_into_jagged_permute(order, input_offset, output_offset, output_size) end

---0, 1, 2, ... within each segment.
---
---Errors: offsets that do not ascend.
---
---```lua
---print(table.concat(peri.sparse.offsets_range(peri.tensor({ 0, 2 }, "i64"), 3):to_list(), " "))
-----> 0 1 0
---print(table.concat(peri.sparse.lengths_range(peri.tensor({ 2, 1 }, "i64")):to_list(), " "))
-----> 0 1 0
---```
---@param offsets peri.Tensor Where each segment begins: `[B]`.
---@param range_size integer The end of the last one.
---@return peri.Tensor # `[range_size]`.
function sparse.offsets_range(offsets, range_size) end

---0, 1, ..., length - 1 for each length. `repeat_arange` is the same function.
---
---Errors: a length below 0.
---@param lengths peri.Tensor `[B]`.
---@return peri.Tensor # `[N]`.
function sparse.lengths_range(lengths) end

---Sums of segments. Recorded on the tape.
---
---Errors: segments outside of the values.
---
---```lua
---print(peri.sparse.segment_sum_csr(1, peri.tensor({ 0, 2, 3 }, "i64"),
---  peri.tensor { 1, 2, 3 }):item(0))
-----> 3
---```
---@param batch_size integer Values of one step of `csr_seg`.
---@param csr_seg peri.Tensor Where segments begin, in steps, and the end: `[S + 1]`.
---@param values peri.Tensor `[N]`.
---@return peri.Tensor # `[S]`.
function sparse.segment_sum_csr(batch_size, csr_seg, values) end

---Blocks of columns in another order; repeats and subsets are fine. Recorded on the tape.
---`permute_duplicate_pooled_embs` and `permute_pooled_embs_auto_grad` are the same function.
---
---Errors: offsets that do not fit the columns; a block that is not there.
---
---```lua
---print(peri.sparse.permute_pooled_embs(peri.tensor { { 1, 2, 3 } }, { 0, 1, 3 },
---  { 1, 0 }):item(0))
-----> 2
---```
---@param pooled peri.Tensor `[B, columns]`.
---@param offset_dim_list integer[] Where each block begins, and the end.
---@param permute_list integer[] Numbers of blocks.
---@return peri.Tensor # `[B, columns]`.
function sparse.permute_pooled_embs(pooled, offset_dim_list, permute_list) end

---Each id once, ascending.
---
---Errors: dtypes other than i32 and i64.
---
---```lua
---local ids, inverse, counts = peri.sparse.unique(peri.tensor({ 7, 5, 7 }, "i64"), true, true)
---print(ids:item(0), inverse:item(0), counts:item(1)) --> 5 1 2
---```
---@param ids peri.Tensor `[N]`.
---@param inverse? boolean Return where each id went, too (default: false).
---@param counts? boolean Return how many there are of each, too (default: false).
---@return peri.Tensor # The ids: `[n]`.
---@return peri.Tensor|nil # For each id its position among them: `[N]`.
---@return peri.Tensor|nil # How many there are: `[n]`.
function sparse.unique(ids, inverse, counts) end

---Deal the ids of tables to buckets, such as the shards of each table, as FBGEMM's operator of this name. With n
---buckets (`my_size`) and blocks of b ids (`block_sizes`, a number for each table), id i goes
---
---- to bucket `i / b`, as id `i % b` there, if i is below `b * n`;
---- else, and always where b is 0, to bucket `i % n`, as id `i / n`.
---
---Named arguments that are needed: `lengths` i32 or i64 [T * B], `indices` i32 or i64 [N], `block_sizes` and `my_size`.
---Optional:
---
---- `weights` [N]: they travel with their ids;
---- `bucketize_pos` (default: false): return `positions`, the place that each id had in its bag;
---- `sequence` (default: false): return `unbucketize_permute`, where each id of before is now;
---- `total_num_blocks`: a number for each table, a multiple of n: the table has so many blocks, of which each bucket
---  takes the same number, one after the other; b is that number times the block size (default: n, one block for each);
---- `batch_size_per_feature`: bags of each table, where these are not B each;
---- `block_bucketize_pos`: for each table the ids with which buckets begin, and the end: n + 1 numbers rising from 0,
---  in place of equal blocks;
---- `keep_orig_idx` (default: false): ids stay as they are; `keep_orig_idx_per_feature`: the same, a boolean for each
---  table;
---- `return_bucket_mapping` (default: false): return `bucket_mapping`, the bucket of each id of before, i32.
---
---Errors: an argument that is missing or unknown; lists without an entry for each table; lengths that do not fit.
---
---```lua
---local ids = { lengths = peri.tensor({ 3 }, "i64"), indices = peri.tensor({ 1, 5, 2 }, "i64"),
---  block_sizes = { 4 }, my_size = 2 }
---local dealt = peri.sparse.block_bucketize_sparse_features(ids)
---print(table.concat(dealt.lengths:to_list(), " "), table.concat(dealt.indices:to_list(), " "))
-----> 2 1 1 2 1
---```
---@param a table The named arguments.
---@return table # `lengths` [buckets * T * B], `indices`, and if asked for `weights`, `positions`, `unbucketize_permute`, `bucket_mapping`.
function sparse.block_bucketize_sparse_features(a) end

---Deal ids to buckets by `id % my_size`; the new id is `id / my_size`, rounded down.
---
---Errors: lengths that do not fit.
---
---```lua
---local r = peri.sparse.bucketize_sparse_features(peri.tensor({ 2 }, "i64"),
---  peri.tensor({ 4, 5 }, "i64"), false, 2)
---print(table.concat(r.indices:to_list(), " ")) --> 2 2
---```
---@param lengths peri.Tensor `[B]`.
---@param indices peri.Tensor `[N]`.
---@param bucketize_pos? boolean Return the places in bags, too (default: false).
---@param my_size integer Buckets.
---@param weights? peri.Tensor `[N]` (default: none).
---@return table # As `block_bucketize_sparse_features`.
function sparse.bucketize_sparse_features(lengths, indices, bucketize_pos, my_size, weights) end

---The permutation back, of the buckets of ids and both lengths.
---
---Errors: sizes that do not fit.
---
---```lua
---local lengths, ids = peri.tensor({ 2 }, "i64"), peri.tensor({ 5, 1 }, "i64")
---local r = peri.sparse.block_bucketize_sparse_features { lengths = lengths, indices = ids,
---  block_sizes = { 4 }, my_size = 2, return_bucket_mapping = true }
---print(table.concat(peri.sparse.populate_bucketized_permute(lengths, r.lengths,
---  r.bucket_mapping):to_list(),
---  " ")) --> 1 0
---```
---@param lengths peri.Tensor Of the bags before: `[B]`.
---@param bucketized_lengths peri.Tensor Of the bags in buckets: `[buckets * B]`.
---@param bucket_mapping peri.Tensor The bucket of each id: `[N]`.
---@return peri.Tensor # `[N]`.
function sparse.populate_bucketized_permute(lengths, bucketized_lengths, bucket_mapping) end

---The keys of a KeyedJaggedTensor bucket after bucket: each key stands `num_buckets` times.
---
---Errors: an argument that is missing or unknown; lists without an entry for each key.
---
---```lua
---local kjt = peri.KeyedJaggedTensor { keys = { "f" }, values = { 5, 1 }, lengths = { 2 } }
---print(#peri.sparse.bucketize_kjt_before_all2all(kjt, { num_buckets = 2, block_sizes = { 4 } }))
-----> 2
---```
---@param kjt peri.KeyedJaggedTensor The ids.
---@param args table `num_buckets`, `block_sizes`; optional: `total_num_blocks`, `output_permute`, `bucketize_pos`, ... as above.
---@return peri.KeyedJaggedTensor # The ids in buckets; with `bucketize_pos` its weights are places in bags.
---@return peri.Tensor|nil # The permutation back, with `output_permute`: `[N]`.
function sparse.bucketize_kjt_before_all2all(kjt, args) end

---Lengths of candidates' bags from batch, table, candidate to table, candidate of all batches.
---
---Errors: batch offsets that do not fit.
---
---```lua
---local ends, lengths = peri.tensor({ 0, 1, 2 }, "i64"), peri.tensor({ 1, 2, 3, 4 }, "i64")
---print(table.concat(peri.sparse.reorder_batched_ad_lengths(lengths, ends, 2):to_list(), " "))
-----> 1 3 2 4
---local begins = peri.sparse.asynchronous_complete_cumsum(lengths)
---print(peri.sparse.reorder_batched_ad_indices(begins, peri.arange(0, 10, 1, "i64"), ends,
---  2):item(1))
-----> 3
---```
---@param cat_ad_lengths peri.Tensor `[T * candidates]`.
---@param batch_offsets peri.Tensor Where the candidates of each batch begin, and the end: `[batches + 1]`.
---@param num_ads_in_batch integer Candidates of all batches.
---@return peri.Tensor # `[T * candidates]`.
function sparse.reorder_batched_ad_lengths(cat_ad_lengths, batch_offsets, num_ads_in_batch) end

---The ids of these bags.
---
---Errors: batch offsets that do not fit.
---@param cat_ad_offsets peri.Tensor Complete offsets of the bags: `[T * candidates + 1]`.
---@param cat_ad_indices peri.Tensor `[N]`.
---@param batch_offsets peri.Tensor Where the candidates of each batch begin, and the end: `[batches + 1]`.
---@param num_ads_in_batch integer Candidates of all batches.
---@return peri.Tensor # `[N]`.
function sparse.reorder_batched_ad_indices(cat_ad_offsets, cat_ad_indices, batch_offsets, num_ads_in_batch) end

---Several inputs of a table batch as one. An input without weights counts 1 where others have some.
---
---Errors: no input; lists of different lengths; offsets that do not fit; an id that i32 cannot hold.
---
---```lua
---local ids, ends = { peri.tensor({ 7, 8 }, "i64") }, { peri.tensor({ 0, 1 }, "i64") }
---local all, offsets = peri.sparse.tbe_input_combine(ids, ends)
---local _, lengths = peri.sparse.tbe_input_combine_with_length(ids,
---  { peri.tensor({ 1, 1 }, "i64") })
---print(all:dtype(), table.concat(offsets:to_list(), " "), lengths:numel()) --> i32 0 1 2 2
---```
---@param indices_list peri.Tensor[] Ids of each input: `[n]`.
---@param offsets_list peri.Tensor[] Where the bags of each input begin: `[B]`.
---@param per_sample_weights? table Weights of each input, `[n]` or none (default: none).
---@param include_last_offsets? boolean[] Whether the offsets of an input are complete (default: they are not).
---@param batch_size? integer Fill each input up with empty bags to that many (default: none).
---@return peri.Tensor # Ids, i32: `[N]`.
---@return peri.Tensor # Complete offsets, i32: `[bags + 1]`.
---@return peri.Tensor|nil # Weights: `[N]`.
function sparse.tbe_input_combine(indices_list, offsets_list, per_sample_weights, include_last_offsets, batch_size) end

---As `tbe_input_combine`, for inputs with lengths.
---
---Errors: no input; lists of different lengths; lengths that do not fit; an id that i32 cannot hold.
---@param indices_list peri.Tensor[] Ids of each input: `[n]`.
---@param lengths_list peri.Tensor[] Lengths of the bags of each input: `[B]`.
---@param per_sample_weights? table Weights of each input, `[n]` or none (default: none).
---@return peri.Tensor # Ids, i32: `[N]`.
---@return peri.Tensor # Lengths, i32: `[bags]`.
---@return peri.Tensor|nil # Weights: `[N]`.
function sparse.tbe_input_combine_with_length(indices_list, lengths_list, per_sample_weights) end
