-- jagged_exchange.lua: Jagged tensors: what exchanges are made of, regrouping.
--
-- More of the KeyedJaggedTensor of the page `jagged` and the KeyedTensor of `jagged_parts`. The first part is for
-- exchanges of one's own between ranks; sharded modules do all of it by themselves. In shapes, N is the number of ids,
-- B of samples.
---@meta

---@class peri
local peri = {}

---Facts of it, as the library keeps them: a C struct, which is overwritten by the next call. `kjt:stride()`,
---`kjt:is_weighted()` and the others are the same one by one.
---
---```lua
---local kjt = peri.KeyedJaggedTensor.from_lists { keys = { "a", "b" }, { { 1, 2 }, {} },
---  { { 3 }, { 4 } } }
---print(kjt:describe().keys, kjt:describe().weighted, kjt:flatten_lengths() == kjt)
-----> 2 false true
---```
---@return any # A cdata: keys, stride, values, ranks (0: a fixed batch), weighted, has_lengths, has_offsets, synced, device, ...
function peri.KeyedJaggedTensor:describe() end

---Lengths are flat always: itself.
---@return peri.KeyedJaggedTensor # Itself: N ids of B samples, the lengths `[keys * B]`.
function peri.KeyedJaggedTensor:flatten_lengths() end

---What an exchange sends: the names of the tensors, in the order of `dist_tensors` and `dist_splits`.
---
---```lua
---local kjt = peri.KeyedJaggedTensor.from_lists { keys = { "a", "b" }, { { 1, 2 }, {} },
---  { { 3 }, { 4 } } }
---print(table.concat(kjt:dist_labels(), " "), kjt:dist_splits({ 1, 1 })[2][1],
---  kjt:dist_tensors()[1]:numel()) --> lengths values 2 4
---```
---@return string[] # `lengths`, `values`; of variable batches `strides`, with weights `weights`.
function peri.KeyedJaggedTensor:dist_labels() end

---How many elements of each tensor go to each rank, when the first keys go to the first rank, and so on. May wait for
---the device.
---
---Errors: numbers that are negative, or that do not add up to the number of keys.
---@param key_splits integer[] How many keys go to each rank.
---@return integer[][] # For each label, the number of elements for each rank.
function peri.KeyedJaggedTensor:dist_splits(key_splits) end

---What an exchange sends: the tensors of the labels.
---@return peri.Tensor[] # Of one dimension: the lengths `[keys * B]`, the ids `[N]`, ...
function peri.KeyedJaggedTensor:dist_tensors() end

---A batch of what arrived from other ranks: the samples of all ranks one after the other, for the keys of this rank.
---Each buffer has what came from rank 0, then from rank 1, and so on, each with all keys.
---
---Errors: an argument that is missing or unknown; strides that do not fit the keys and ranks; buffers of other sizes
---than the lengths say.
---
---```lua
---local kjt = peri.KeyedJaggedTensor.dist_init { keys = { "a", "b" },
---  lengths = peri.tensor({ 1, 0, 1, 2 }, "i32"), values = peri.tensor({ 1, 2, 3, 4 }, "i64"),
---  num_workers = 2, stride_per_rank = { 1, 1 } }
---print(table.concat(kjt.a:values():to_list(), " "), table.concat(kjt.b:values():to_list(), " "))
-----> 1 2 3 4
---print(table.concat(peri.KeyedJaggedTensor.recat(2, 2), " ")) --> 0 2 1 3
---```
---@param args peri.KeyedJaggedTensor.dist_init.args Buffers of one dimension and their strides.
---@return peri.KeyedJaggedTensor # Of the samples of all ranks.
function peri.KeyedJaggedTensor.dist_init(args) end

---@class peri.KeyedJaggedTensor.dist_init.args
---@field keys string[] The keys of this rank.
---@field lengths peri.Tensor How many ids each bag has: `[bags]`, by rank, key and sample.
---@field values peri.Tensor The ids: `[N]`, in the same order.
---@field weights? peri.Tensor A weight for each id: `[N]` (default: none).
---@field num_workers integer How many ranks sent something.
---@field stagger? integer Ranks that lie `stagger` apart come after each other in the result (default: 1).
---@field stride_per_rank? integer[] How many samples each rank has (default: what `strides` says).
---@field strides? integer[][] Of a variable batch: for each rank, how many rows each key has (default: a fixed batch).

---The order in which segments that arrived by rank and key are in the batch that `dist_init` makes: by key and rank.
---
---Errors: numbers that are negative; too many segments; a stagger that does not divide the ranks.
---@param keys integer How many keys.
---@param ranks integer How many ranks.
---@param stagger? integer Ranks that lie so far apart come after each other (default: 1).
---@return integer[] # For each segment of the result, which of those that arrived it is, from 0.
function peri.KeyedJaggedTensor.recat(keys, ranks, stagger) end

---Sorts columns of several KeyedTensors into groups, as `KeyedTensor.regroup_as_dict`, but works out only once where
---columns are. It is `peri.jagged.KTRegroupAsDict`, too.
---
---Errors: another number of names than of groups; no group; when called, KeyedTensors of other keys or columns than the
---first time.
---
---```lua
---local kt = peri.KeyedTensor { keys = { "a", "b" }, length_per_key = { 1, 2 },
---  values = peri.tensor { { 1, 2, 3 } } }
---local regroup = peri.KeyedTensor.KTRegroupAsDict({ { "b" }, { "b", "a" } },
---  { "first", "second" })
---print(table.concat(regroup({ kt }).second:to_list(), " "),
---  regroup:forward({ kt }).first:numel())
-----> 2 3 1 2
---```
---@class peri.KeyedTensor.KTRegroupAsDict
---@param groups string[][] The keys of each group.
---@param names string[] What each group is called.
---@overload fun(groups: string[][], names: string[]): peri.KeyedTensor.KTRegroupAsDict
peri.KeyedTensor.KTRegroupAsDict = {}

---Sort the columns. Calling the object calls it.
---@param kts peri.KeyedTensor[] Matrices of `[B, columns]`, whose keys all groups are of.
---@return table<string, peri.Tensor> # Name -> the group: `[B, columns of its keys]`.
function peri.KeyedTensor.KTRegroupAsDict:forward(kts) end

---Make a KeyedTensor as the constructor does, for code that makes one in every step: nothing is built of Lua lists.
---
---Errors: what is no Keys; another number of widths than of keys; columns that do not add up.
---
---```lua
---local ffi, keys = require "ffi", peri.jagged.Keys.of { "a", "b" }
---print(#peri.KeyedTensor.of(keys, ffi.new("int64_t[?]", 2, 1, 2), peri.zeros { 3, 3 })) --> 2
---```
---@param keys peri.jagged.Keys The keys.
---@param lengths any An array `int64_t[?]`: how many columns each key has. It is copied.
---@param values peri.Tensor `[rows, columns of all keys]`.
---@return peri.KeyedTensor # `[rows, columns of all keys]`.
function peri.KeyedTensor.of(keys, lengths, values) end
