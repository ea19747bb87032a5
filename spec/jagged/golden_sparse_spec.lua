-- Sparse operators against FBGEMM's own results (spec/golden/ops/sparse), on both devices.
local peri = require "perilune"
local golden = require "spec.support.golden"
local sparse = peri.jagged.sparse

local checks = {}

--- Some results are numbers that a double cannot hold: compare bytes of equal dtype.
local function assert_same_bits(case, name, got)
  local bytes, dtype = case:bytes(name)
  assert.same(case:shape(name), got:shape(), name)
  if got:dtype() ~= dtype then return case:assert_near(name, got) end
  local buffer = got:read()
  assert.equal(bytes, require("ffi").string(buffer, #bytes), name)
end

local function bucketize(case, device, blocks)
  local a = case.args
  local bounds
  if case:has "in.block_bucketize_pos.0" then
    bounds = {}
    for i = 1, case:shape("in.block_sizes")[1] do bounds[i] = case:list("in.block_bucketize_pos." .. i - 1) end
  end
  local keep = case:list "in.keep_orig_idx_per_feature"
  return sparse.block_bucketize_sparse_features {
    lengths = case:tensor("in.lengths", device), indices = case:tensor("in.indices", device), weights = case:tensor("in.weights", device),
    bucketize_pos = a.bucketize_pos, sequence = a.sequence, block_sizes = blocks or case:list "in.block_sizes", my_size = a.my_size,
    total_num_blocks = case:list "in.total_num_blocks", batch_size_per_feature = case:list "in.batch_size_per_feature",
    block_bucketize_pos = bounds, keep_orig_idx = a.keep_orig_idx, return_bucket_mapping = a.return_bucket_mapping,
    keep_orig_idx_per_feature = keep and peri.util.map(keep, function(x) return x ~= 0 end),
  }
end

local function assert_buckets(case, r)
  assert_same_bits(case, "out.bucketized_lengths", r.lengths)
  assert_same_bits(case, "out.bucketized_indices", r.indices)
  for name, got in pairs { ["out.bucketized_weights"] = "weights", ["out.bucketized_pos"] = "positions",
    ["out.unbucketize_permute"] = "unbucketize_permute", ["out.bucket_mapping"] = "bucket_mapping" } do
    if case:has(name) then assert_same_bits(case, name, r[got]) else assert.is_nil(r[got], name) end
  end
  local sum, offsets = 0, r.offsets:to_list()
  for i, n in ipairs(r.lengths:to_list()) do
    assert.equal(sum, offsets[i])
    sum = sum + n
  end
  assert.equal(sum, offsets[#offsets])
end

for _, op in ipairs { "block_bucketize_sparse_features", "block_bucketize_sparse_features_inference",
  "block_bucketize_sparse_features_2d_weights" } do
  checks[op] = function(case, device) assert_buckets(case, bucketize(case, device)) end
end

function checks.bucketize_sparse_features(case, device)
  local a = case.args
  assert_buckets(case, sparse.block_bucketize_sparse_features { lengths = case:tensor("in.lengths", device),
    indices = case:tensor("in.indices", device), weights = case:tensor("in.weights", device), bucketize_pos = a.bucketize_pos,
    block_sizes = { 0 }, my_size = a.my_size })
end

for _, device in ipairs { "cpu", "opaque" } do
  describe("sparse operators as FBGEMM's on " .. device, function()
    for _, name in ipairs(golden.names "ops/sparse") do
      local case = golden.load(name)
      it(case.name, function() assert(checks[case.args.op], case.args.op)(case, device) end)
    end
  end)
end
