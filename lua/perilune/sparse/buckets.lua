-- buckets.lua: ids dealt to the shards of a table.
local ffi = require "ffi"
local P = require "perilune.ffi"
local Tensor = require "perilune.tensor"
local A = require "perilune.jagged.arguments"
local KeyedJaggedTensor = require "perilune.jagged.kjt"
local signature = require "perilune.signature"
local C, check = P.C, P.check

local M = {}

local bucket_args = ffi.new "peri_bucket_args"
local bucket_result = ffi.new "peri_bucket_result"

local function int64s(func, what, list)
  if list == nil then return nil, 0 end
  if Tensor.is(list) then list = list:to_list() end
  local buffer, _, n = A.matrix(func, what, { list })
  return buffer, n
end

local host = {} -- the host arrays that bucket_args points at: alive until the next call

--- Fill bucket_args from named arguments.
local function fill(func, a)
  signature.value(func, "my_size", a.my_size, "int")
  for _, name in ipairs { "block_bucketize_pos", "keep_orig_idx_per_feature" } do
    if a[name] then signature.value(func, name, a[name], "list") end
  end
  local blocks, n = int64s(func, "block_sizes", a.block_sizes)
  local total, n_total = int64s(func, "total_num_blocks", a.total_num_blocks)
  if total and n_total ~= n then P.fail(("%s: %d total_num_blocks for %d block sizes"):format(func, n_total, n)) end
  local bounds, rows = nil, {}
  if a.block_bucketize_pos then
    bounds = ffi.new("const int64_t *[?]", math.max(n, 1))
    for i = 1, n do
      local row = a.block_bucketize_pos[i]
      local count
      rows[i], count = int64s(func, "block_bucketize_pos", row or nil)
      if row and count ~= a.my_size + 1 then
        P.fail(("%s: %d bounds of feature %d for %d buckets, wanted one more"):format(func, count, i - 1, a.my_size))
      end
      bounds[i - 1] = rows[i]
    end
  end
  local keep
  if a.keep_orig_idx or a.keep_orig_idx_per_feature then
    keep = ffi.new("bool[?]", math.max(n, 1))
    for i = 1, n do
      if a.keep_orig_idx_per_feature then keep[i - 1] = a.keep_orig_idx_per_feature[i] and true or false
      else keep[i - 1] = true end
    end
  end
  host.blocks, host.total, host.rows, host.bounds, host.keep = blocks, total, rows, bounds, keep
  local b = bucket_args
  b.buckets, b.n_features, b.block_sizes, b.total_num_blocks = a.my_size, n, host.blocks, host.total
  b.bounds, b.keep_original_indices = host.bounds, host.keep
  b.sequence, b.bucketize_pos, b.bucket_mapping = a.sequence or false, a.bucketize_pos or false,
    a.return_bucket_mapping or false
end

local required, optional = P.util.required, P.util.optional
local bucket_spec = { lengths = required, indices = required, weights = optional, bucketize_pos = false,
  sequence = false, block_sizes = required, my_size = required, total_num_blocks = optional,
  batch_size_per_feature = optional, block_bucketize_pos = optional, keep_orig_idx = false,
  keep_orig_idx_per_feature = optional, return_bucket_mapping = false }

--- Ids cut into my_size buckets: see perilune/sparse.h. Returns { lengths, indices, weights, positions,
--- unbucketize_permute, bucket_mapping }.
function M.block_bucketize_sparse_features(a)
  local func = "block_bucketize_sparse_features"
  a = P.util.named(func, a, bucket_spec)
  local batches, n = int64s(func, "batch_size_per_feature", a.batch_size_per_feature)
  fill(func, a)
  if batches and n ~= bucket_args.n_features then
    P.fail(("%s: %d batch sizes for %d features"):format(func, n, bucket_args.n_features))
  end
  check(C.peri_sparse_bucketize(bucket_args, Tensor.ptr(a.lengths), Tensor.ptr(a.indices), A.ptr(a.weights), batches,
    bucket_result))
  local r = {}
  for name, field in pairs { lengths = "lengths", indices = "ids", weights = "weights", positions = "positions",
    unbucketize_permute = "unbucketize", bucket_mapping = "mapping" } do
    if bucket_result[field] ~= nil then r[name] = Tensor.wrap(bucket_result[field]) end
  end
  return r
end

--- bucket = id % my_size, new id = id / my_size; as above.
function M.bucketize_sparse_features(lengths, indices, bucketize_pos, my_size, weights)
  return M.block_bucketize_sparse_features { lengths = lengths, indices = indices, weights = weights,
    block_sizes = { 0 }, bucketize_pos = bucketize_pos or false, my_size = my_size }
end

--- The unbucketize permutation from the buckets of ids (bucket_mapping) and both lengths.
function M.populate_bucketized_permute(lengths, bucketized_lengths, bucket_mapping)
  Tensor.out[0] = nil
  check(C.peri_sparse_bucketize_replay(Tensor.ptr(lengths), Tensor.ptr(bucketized_lengths), Tensor.ptr(bucket_mapping),
    Tensor.out))
  return Tensor.wrap(Tensor.out[0])
end

local kjt_out, tensor_out = ffi.new "peri_kjt *[1]", Tensor.out

--- The keys of a KJT bucket after bucket (each name stands num_buckets times); returns it and the unbucketize
--- permutation (with output_permute). With bucketize_pos the weights of the result are the places of ids in their bags.
function M.bucketize_kjt_before_all2all(kjt, a)
  local func = "bucketize_kjt_before_all2all"
  local u = P.util
  a = u.named(func, a, { num_buckets = u.required, block_sizes = u.required, total_num_blocks = u.optional,
    output_permute = false, bucketize_pos = false, block_bucketize_row_pos = u.optional,
    keep_original_indices = false })
  fill(func, { my_size = a.num_buckets, block_sizes = a.block_sizes, total_num_blocks = a.total_num_blocks,
    sequence = a.output_permute, bucketize_pos = a.bucketize_pos, block_bucketize_pos = a.block_bucketize_row_pos,
    keep_orig_idx = a.keep_original_indices })
  tensor_out[0] = nil
  check(C.peri_kjt_bucketize(KeyedJaggedTensor.ptr(kjt), bucket_args, kjt_out, tensor_out))
  local permute = tensor_out[0] ~= nil and Tensor.wrap(tensor_out[0]) or nil
  return KeyedJaggedTensor.wrap(kjt_out[0]), permute
end

signature.check("sparse.", M, {
  bucketize_sparse_features =
  "lengths: tensor, indices: tensor, bucketize_pos: boolean?, my_size: int, weights: tensor?",
  populate_bucketized_permute = "lengths: tensor, bucketized_lengths: tensor, bucket_mapping: tensor",
  bucketize_kjt_before_all2all = "kjt: KeyedJaggedTensor, args: table",
})

return M
