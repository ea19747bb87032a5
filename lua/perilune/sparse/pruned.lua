-- pruned.lua: rows of a table left out, and the way from ids to the rows that are left.
local ffi = require "ffi"
local P = require "perilune.ffi"
local Tensor = require "perilune.tensor"
local signature = require "perilune.signature"
local C, check = P.C, P.check
local ptr, wrap, out = Tensor.ptr, Tensor.wrap, Tensor.out

local M = {}

local prune_args = ffi.new "peri_prune_args"
local mapping_out = ffi.new "peri_tensor *[1]"

--- The rows of weight [n, columns] whose indicator [n] (its absolute value, unless abs is false) is more than the
--- threshold, and by id the row's place among them, -1 where it is left out: compressed_indices_dtype ("i32", "i64"). A
--- table whose mapping is not worth its size (see perilune/sparse.h: n + min_num_rows * columns >= min_save_ratio * n *
--- columns) comes back as it is, with the mapping { 0 }.
function M.embedding_bag_rowwise_prune(weight, indicator, threshold, compressed_indices_dtype, abs, min_num_rows,
  min_save_ratio)
  local a = prune_args
  a.threshold, a.compressed_indices_dtype = threshold, P.dtype(compressed_indices_dtype)
  a.abs, a.min_num_rows, a.min_save_ratio = abs ~= false, min_num_rows or 0, min_save_ratio or 1
  check(C.peri_sparse_rowwise_prune(ptr(weight), ptr(indicator), a, out, mapping_out))
  local mapping = wrap(mapping_out[0])
  return wrap(out[0]), mapping
end

--- Ids as rows of pruned tables, -1 where a row was left out; each table's mapping is a part of index_remappings, empty
--- for one that is not pruned.
function M.pruned_array_lookup(indices, offsets, index_remappings, index_remappings_offsets)
  check(C.peri_sparse_pruned_array_lookup(ptr(indices), ptr(offsets), ptr(index_remappings),
    ptr(index_remappings_offsets), out))
  return (wrap(out[0]))
end

--- The same by hash tables, [slots, 2] of an id and its row, -1 and -1 in free slots.
function M.pruned_hashmap_lookup(indices, offsets, hash_table, hash_table_offsets)
  check(C.peri_sparse_pruned_hashmap_lookup(ptr(indices), ptr(offsets), ptr(hash_table), ptr(hash_table_offsets), out))
  return (wrap(out[0]))
end

--- A hash table with more ids in it: a new one (FBGEMM's changes its argument). Ids whose dense index is -1 are left
--- out.
function M.pruned_hashmap_insert(indices, dense_indices, offsets, hash_table, hash_table_offsets)
  check(C.peri_sparse_pruned_hashmap_insert(ptr(indices), ptr(dense_indices), ptr(offsets), ptr(hash_table),
    ptr(hash_table_offsets), out))
  return (wrap(out[0]))
end

signature.check("sparse.", M, {
  embedding_bag_rowwise_prune =
    "weight: tensor, indicator: tensor, threshold: number, compressed_indices_dtype: dtype, abs: boolean?, "
      .. "min_num_rows: number?, min_save_ratio: number?",
  pruned_array_lookup = "indices: tensor, offsets: tensor, index_remappings: tensor, index_remappings_offsets: tensor",
  pruned_hashmap_lookup = "indices: tensor, offsets: tensor, hash_table: tensor, hash_table_offsets: tensor",
  pruned_hashmap_insert = "indices: tensor, dense_indices: tensor, offsets: tensor, hash_table: tensor, "
    .. "hash_table_offsets: tensor",
}, 2)

return M
