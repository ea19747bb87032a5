-- sparse_tables.lua: Sparse operators: rows in few bits, pruned tables, calibration.
--
-- Operators under the names of FBGEMM's. In shapes, N is the number of ids, T of tables.
---@meta

---@class peri.sparse
local sparse = {}
---@class peri.sparse.quantize
local quantize = {}

---How rows are stored in 8, 4 or 2 bits a number, with a scale and a bias for each row: FBGEMM's layouts.
---
---Errors: a layout that there is not.
---
---```lua
---local format = peri.sparse.quantize.format { codes = "int8" }
---local rows = peri.sparse.quantize.rows(peri.tensor { { 0, 255 } }, format)
---print(peri.sparse.quantize.row_bytes(format, 2), rows:size(2),
---  peri.sparse.quantize.restore(rows, format, 2):item(1)) --> 10 10 255
---```
---@param args peri.sparse.quantize.format.args The layout.
---@return ffi.cdata* # The format, for the functions below.
function quantize.format(args) end

---@class peri.sparse.quantize.format.args
---@field codes string `int8`, `int4`, `int2` or `fp8`.
---@field scale? string dtype of scale and bias: `f32`, `f16`, `none` (default: f32 for int8, f16 for int4 and int2, none for fp8).
---@field scale_first? boolean They stand before the numbers (default: false).
---@field alignment? integer A row's bytes are a multiple of it (default: 1).
---@field exponent_bits? integer Of fp8 (default: 4).
---@field exponent_bias? integer Of fp8 (default: 7).

---The bytes of a row.
---
---Errors: what is no format; sizes out of range.
---@param format ffi.cdata* Of `quantize.format`.
---@param cols integer Numbers of a row.
---@return integer
function quantize.row_bytes(format, cols) end

---Rows in a format.
---
---Errors: what is no format; dtypes that are no floats.
---@param x peri.Tensor f32, f16 or bf16 `[..., cols]`.
---@param format ffi.cdata* Of `quantize.format`.
---@param min_max? peri.Tensor The least and largest number of each row, f32: `[rows, 2]` (default: those that it has).
---@return peri.Tensor # u8 `[..., bytes of a row]`.
function quantize.rows(x, format, min_max) end

---The numbers of quantized rows, as f32 again.
---
---Errors: what is no format; rows of another number of bytes.
---@param rows peri.Tensor u8 `[..., bytes of a row]`.
---@param format ffi.cdata* Of `quantize.format`.
---@param cols integer Numbers of a row.
---@param dtype? string f32, f16 or bf16 (default: f32).
---@return peri.Tensor # `[..., cols]`.
function quantize.restore(rows, format, cols, dtype) end

---Leave out rows of a table whose indicator is small. A table whose mapping would not be worth its size comes back as
---it is, with the mapping `{ 0 }`.
---
---Errors: an indicator without a number for each row.
---
---```lua
---local rows, mapping = peri.sparse.embedding_bag_rowwise_prune(peri.ones { 3, 64 },
---  peri.tensor { 1, 0, 1 }, 0.5, "i32")
---print(rows:size(1), table.concat(mapping:to_list(), " ")) --> 2 0 -1 1
---```
---@param weight peri.Tensor `[n, columns]`.
---@param indicator peri.Tensor A number for each row: `[n]`.
---@param threshold number Rows whose indicator is more stay.
---@param compressed_indices_dtype string dtype of the mapping: `i32` or `i64`.
---@param abs? boolean The absolute value of the indicator counts (default: true).
---@param min_num_rows? number Rows that count as saved least (default: 0).
---@param min_save_ratio? number From which share of the table on it is pruned (default: 1).
---@return peri.Tensor # The rows that stay: `[m, columns]`.
---@return peri.Tensor # For each id its row, or -1: `[n]`.
function sparse.embedding_bag_rowwise_prune(weight, indicator, threshold, compressed_indices_dtype, abs, min_num_rows, min_save_ratio) end

---Ids as rows of pruned tables; -1 where a row was left out.
---
---Errors: offsets that do not fit.
---
---```lua
---local function i64(list) return peri.tensor(list, "i64") end
---local function i32(list) return peri.tensor(list, "i32") end
---print(peri.sparse.pruned_array_lookup(i32 { 2 }, i32 { 0, 1 }, i32 { 0, -1, 1 },
---  i64 { 0, 3 }):item())
-----> 1
---local free = peri.full({ 4, 2 }, -1, "i32")
---local hash = peri.sparse.pruned_hashmap_insert(i32 { 7 }, i32 { 3 }, i32 { 0, 1 }, free,
---  i64 { 0, 4 })
---print(peri.sparse.pruned_hashmap_lookup(i32 { 7 }, i32 { 0, 1 }, hash, i64 { 0, 4 }):item())
-----> 3
---```
---@param indices peri.Tensor `[N]`.
---@param offsets peri.Tensor Complete offsets of the bags: `[T * B + 1]`.
---@param index_remappings peri.Tensor The mappings of all tables: `[n]`.
---@param index_remappings_offsets peri.Tensor Where each table's mapping begins, and the end; an empty one is not pruned: `[T + 1]`.
---@return peri.Tensor # `[N]`.
function sparse.pruned_array_lookup(indices, offsets, index_remappings, index_remappings_offsets) end

---As `pruned_array_lookup`, by hash tables.
---
---Errors: offsets that do not fit.
---@param indices peri.Tensor `[N]`.
---@param offsets peri.Tensor Complete offsets of the bags: `[T * B + 1]`.
---@param hash_table peri.Tensor An id and its row in each slot, -1 and -1 in free ones: `[slots, 2]`.
---@param hash_table_offsets peri.Tensor Where each table's slots begin, and the end: `[T + 1]`.
---@return peri.Tensor # `[N]`.
function sparse.pruned_hashmap_lookup(indices, offsets, hash_table, hash_table_offsets) end

---A hash table with more ids in it: a new one. Ids whose row is -1 are left out.
---
---Errors: a table that has no slot left.
---@param indices peri.Tensor `[N]`.
---@param dense_indices peri.Tensor The row of each id: `[N]`.
---@param offsets peri.Tensor Complete offsets of the bags: `[T * B + 1]`.
---@param hash_table peri.Tensor As in `pruned_hashmap_lookup`: `[slots, 2]`.
---@param hash_table_offsets peri.Tensor Where each table's slots begin, and the end: `[T + 1]`.
---@return peri.Tensor # `[slots, 2]`.
function sparse.pruned_hashmap_insert(indices, dense_indices, offsets, hash_table, hash_table_offsets) end

---Sums over bags in tables of one column, for several tasks. Recorded on the tape.
---
---Errors: sizes or offsets that do not fit; an id that a table does not have.
---
---```lua
---local function i64(list) return peri.tensor(list, "i64") end
---print(peri.sparse.batched_unary_embeddings(peri.tensor { { 1, 2, 3 } }, i64 { 0, 3 },
---  i64 { 0, 2 },
---  i64 { 0, 2 }):item()) --> 4
---```
---@param weight peri.Tensor `[tasks, rows of all tables]`.
---@param table_offsets peri.Tensor Where each table begins, and the end: `[T + 1]`.
---@param offsets peri.Tensor Complete offsets of the bags, table by table: `[T * B + 1]`.
---@param indices peri.Tensor `[N]`.
---@return peri.Tensor # `[tasks, B, T]`.
function sparse.batched_unary_embeddings(weight, table_offsets, offsets, indices) end

---For each distinct id the sum of its weights, and how many there are.
---
---Errors: positions outside of the distinct ids.
---
---```lua
---local r = peri.sparse.jagged_acc_weights_and_counts(peri.tensor { 1, 2, 5 },
---  peri.tensor({ 0, 0, 1 }, "i64"), 2)
---print(table.concat(r:to_list(), " ")) --> 3 2 5 1
---```
---@param weights peri.Tensor `[N]`.
---@param reverse_indices peri.Tensor Of `unique`, its second result: `[N]`.
---@param num_unique_indices integer n, the distinct ids.
---@return peri.Tensor # `[n, 2]`.
function sparse.jagged_acc_weights_and_counts(weights, reverse_indices, num_unique_indices) end

---Calibrate predictions by what was seen in bins of predictions. Named arguments: `logit` [N], `bin_num_examples` and
---`bin_num_positives` (f64, a number for each bin), `positive_weight`; optional: `lower_bound` (0), `upper_bound` (1),
---`bin_ctr_in_use_after` (0), `bin_ctr_weight_value` (1).
---
---Errors: an argument that is missing or unknown; bins that do not fit.
---
---```lua
---local bins = peri.zeros({ 4 }, "f64")
---local a = { logit = peri.tensor { 0 }, bin_num_examples = bins, bin_num_positives = bins,
---  positive_weight = 1 }
---local p, bin = peri.sparse.histogram_binning_calibration(a)
---print(p:item(), bin:item()) --> 0.5 1
---```
---@param a table The named arguments.
---@return peri.Tensor # Predictions: `[N]`.
---@return peri.Tensor # Their bins: `[N]`.
function sparse.histogram_binning_calibration(a) end

---The same with bins for each segment, those of no segment first. Also needed: `segment_value`, `segment_lengths` (0 or
---1 value for each logit), `num_segments`, `num_bins`.
---
---Errors: an argument that is missing or unknown; bins that do not fit.
---
---```lua
---local bins = peri.zeros({ 8 }, "f64")
---local p = peri.sparse.histogram_binning_calibration_by_feature { logit = peri.tensor { 0 },
---  bin_num_examples = bins, bin_num_positives = bins, positive_weight = 1,
---  segment_value = peri.tensor({ 0 }, "i64"), segment_lengths = peri.tensor({ 1 }, "i64"),
---  num_segments = 1, num_bins = 4 }
---print(p:item()) --> 0.5
---```
---@param a table The named arguments.
---@return peri.Tensor # Predictions: `[N]`.
---@return peri.Tensor # Their bins: `[N]`.
function sparse.histogram_binning_calibration_by_feature(a) end

---MurmurHash3 of pairs of numbers.
---
---Errors: a dtype other than i64.
---
---```lua
---print(peri.sparse.murmur_hash3(peri.tensor({ 1 }, "i64"), 0, 0):numel()) --> 1
---```
---@param input peri.Tensor i64 `[N]`.
---@param y peri.Tensor|integer The second number of each pair `[N]`, or one for all.
---@param seed peri.Tensor|integer A seed for each `[N]`, or one for all.
---@return peri.Tensor # i64 `[N]`.
function sparse.murmur_hash3(input, y, seed) end
