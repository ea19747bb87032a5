-- Sparse operators against FBGEMM's own results (spec/golden/ops/sparse), on both devices.
-- cuda: always
local peri = require "perilune"
local golden = require "spec.support.golden"
local sparse = peri.sparse

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
    lengths = case:tensor("in.lengths", device), indices = case:tensor("in.indices", device),
    weights = case:tensor("in.weights", device), bucketize_pos = a.bucketize_pos, sequence = a.sequence,
    block_sizes = blocks or case:list "in.block_sizes", my_size = a.my_size,
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
end

for _, op in ipairs { "block_bucketize_sparse_features", "block_bucketize_sparse_features_inference",
  "block_bucketize_sparse_features_2d_weights" } do
  checks[op] = function(case, device) assert_buckets(case, bucketize(case, device)) end
end

function checks.bucketize_sparse_features(case, device)
  local a = case.args
  assert_buckets(case, sparse.block_bucketize_sparse_features { lengths = case:tensor("in.lengths", device),
    indices = case:tensor("in.indices", device), weights = case:tensor("in.weights", device),
    bucketize_pos = a.bucketize_pos, block_sizes = { 0 }, my_size = a.my_size })
end


-- -- helpers ----------------------------------------------------------------------------------------------------------

--- Run f with inputs that want gradients, feed in.grad_output back, and compare out.grad_<name> of each input in
--- `names`.
local function with_gradient(case, device, names, f)
  local inputs = {}
  for i, name in ipairs(names) do
    inputs[i] = case:tensor("in." .. name, device)
    if case:has("out.grad_" .. name) then inputs[i]:requires_grad(true) end
  end
  local result = f(unpack(inputs))
  if case:has "in.grad_output" then
    result:backward(case:tensor("in.grad_output", device))
    for i, name in ipairs(names) do
      if case:has("out.grad_" .. name) then case:assert_near("out.grad_" .. name, inputs[i]:grad()) end
    end
  end
  return result
end

local function tensors(case, prefix, device)
  local list = {}
  while case:has(prefix .. "." .. #list) do list[#list + 1] = case:tensor(prefix .. "." .. #list, device) end
  return list
end

local function booleans(case, name) return peri.util.map(case:list(name), function(x) return x ~= 0 end) end

-- -- sums and permutations --------------------------------------------------------------------------------------------

for _, op in ipairs { "asynchronous_complete_cumsum", "asynchronous_exclusive_cumsum",
  "asynchronous_inclusive_cumsum" } do
  checks[op] = function(case, device)
    assert_same_bits(case, "out.t_out", sparse[op](case:tensor("in.t_in", device)))
  end
end

function checks.asynchronous_batched_complete_cumsum(case, device)
  assert_same_bits(case, "out.t_out", sparse.asynchronous_batched_complete_cumsum(case:tensor("in.values", device)))
end

local function check_permuted(case, values, lengths, got, weights)
  assert_same_bits(case, "out.permuted_lengths", lengths)
  assert_same_bits(case, "out.permuted_" .. values, got)
  if case:has "out.permuted_weights" then
    assert_same_bits(case, "out.permuted_weights", weights)
  else
    assert.is_nil(weights)
  end
end

for op, values in pairs { permute_1D_sparse_data = "values", permute_2D_sparse_data = "values",
  permute_sparse_features = "indices" } do
  checks[op] = function(case, device)
    check_permuted(case, values, sparse[op](case:tensor("in.permute", device), case:tensor("in.lengths", device),
      case:tensor("in." .. values, device), case:tensor("in.weights", device)))
  end
end

function checks.permute_2D_sparse_data_input1D(case, device)
  check_permuted(case, "values", sparse.permute_2D_sparse_data_input1D(case:tensor("in.permute", device),
    case:tensor("in.lengths", device), case:tensor("in.values", device), case.args.stride,
    case:tensor("in.weights", device)))
end

--- FBGEMM's CPU operator moves single numbers, as if rows had one column; the right answer has the rows.
function checks.permute_sequence_embeddings(case, device)
  local lengths, rows = sparse.permute_sequence_embeddings(case:tensor("in.permute", device),
    case:tensor("in.lengths", device), case:tensor("in.embeddings", device))
  assert_same_bits(case, "out.permuted_lengths", lengths)
  local shape, given, order = case:shape "in.lengths", case:list "in.lengths", case:list "in.permute"
  local embeddings, dim, starts, want = case:list "in.embeddings", case:shape("in.embeddings")[2], { [0] = 0 }, {}
  for t = 1, shape[1] do
    starts[t] = starts[t - 1]
    for b = 1, shape[2] do starts[t] = starts[t] + given[(t - 1) * shape[2] + b] end
  end
  for _, t in ipairs(order) do
    for i = starts[t] * dim + 1, starts[t + 1] * dim do want[#want + 1] = embeddings[i] end
  end
  assert.same(want, rows:to_list())
end

function checks.jagged_index_select(case, device)
  local lengths
  local values = with_gradient(case, device, { "values" }, function(v)
    local selected
    selected, lengths = sparse.jagged_index_select(v, case:tensor("in.lengths", device),
      case:tensor("in.indices", device))
    return selected
  end)
  assert_same_bits(case, "out.values", values)
  assert_same_bits(case, "out.lengths", lengths)
end

function checks.index_select_dim0(case, device)
  assert_same_bits(case, "out.output", sparse.index_select_dim0(case:tensor("in.input", device),
    case:tensor("in.indices", device)))
end

function checks.group_index_select_dim0(case, device)
  local inputs, grads = tensors(case, "in.input_group", device), tensors(case, "in.grad_output", device)
  for _, t in ipairs(inputs) do t:requires_grad(true) end
  local outputs = sparse.group_index_select_dim0(inputs, tensors(case, "in.indices_group", device))
  for i, t in ipairs(outputs) do
    assert_same_bits(case, "out.output." .. i - 1, t)
    t:backward(grads[i])
    case:assert_near("out.grad_input." .. i - 1, inputs[i]:grad())
  end
end

function checks.invert_permute(case, device)
  assert_same_bits(case, "out.inverse", sparse.invert_permute(case:tensor("in.permute", device)))
end

function checks.expand_into_jagged_permute(case, device)
  assert_same_bits(case, "out.output_permute", sparse.expand_into_jagged_permute(case:tensor("in.permute", device),
    case:tensor("in.input_offset", device), case:tensor("in.output_offset", device), case.args.output_size))
end

--- FBGEMM's offsets may lack the last bound or have it.
function checks.offsets_range(case, device)
  assert_same_bits(case, "out.range", sparse.offsets_range(case:tensor("in.offsets", device), case.args.range_size))
end

function checks.lengths_range(case, device)
  assert_same_bits(case, "out.range", sparse.lengths_range(case:tensor("in.t_in", device)))
end
function checks.repeat_arange(case, device)
  assert_same_bits(case, "out.range", sparse.repeat_arange(case:tensor("in.lengths", device)))
end

function checks.segment_sum_csr(case, device)
  case:assert_near("out.sum", sparse.segment_sum_csr(case.args.batch_size, case:tensor("in.csr_seg", device),
    case:tensor("in.values", device)))
end

function checks.populate_bucketized_permute(case, device)
  assert_same_bits(case, "out.unbucketize_permute",
    sparse.populate_bucketized_permute(case:tensor("in.lengths", device), case:tensor("in.bucketized_lengths", device),
      case:tensor("in.bucket_mapping", device)))
end

-- -- pooled embeddings ------------------------------------------------------------------------------------------------

for _, op in ipairs { "permute_pooled_embs", "permute_duplicate_pooled_embs", "permute_pooled_embs_auto_grad" } do
  checks[op] = function(case, device)
    assert_same_bits(case, "out.output", sparse[op](case:tensor("in.pooled_embs", device),
      case:list "in.offset_dim_list", case:list "in.permute_list"))
  end
end

--- Regrouping: the keys and groups that FBGEMM's table was made from.
function checks.permute_multi_embedding(case, device)
  local a, values = case.args, tensors(case, "in.pooled_embs", device)
  local kts, grads = {}, tensors(case, "in.grad_output", device)
  for i, t in ipairs(values) do
    kts[i] = peri.KeyedTensor { keys = a.keys[i], length_per_key = a.dims[i], values = t:requires_grad(true) }
  end
  local names = {}
  for i = 1, #a.groups do names[i] = "g" .. i end
  local groups = peri.jagged.KTRegroupAsDict(a.groups, names)(kts)
  for i, name in ipairs(names) do
    assert_same_bits(case, "out.output." .. i - 1, groups[name])
  end
  local loss = peri.nn.functional.sum(peri.nn.functional.mul(groups.g1, grads[1]))
  for i = 2, #names do
    local f = peri.nn.functional
    loss = f.add(loss, f.sum(f.mul(groups[names[i]], grads[i])))
  end
  loss:backward()
  for i, t in ipairs(values) do case:assert_near("out.grad_pooled_embs." .. i - 1, t:grad()) end
end

-- -- distinct ids -----------------------------------------------------------------------------------------------------

local function check_unique(case, device)
  local ids = case:tensor("in.linear_indices", device)
  local unique, inverse, counts = sparse.unique(ids, case:has "out.inverse", case.args.compute_count)
  local n = case:list("out.count")[1] -- FBGEMM's results have room for as many as there are ids
  assert.equal(n, unique:numel())
  assert.same(peri.tensor(case:list "out.unique", "f64"):slice(1, 0, n):to_list(), unique:to_list())
  assert.same(peri.tensor(case:list "out.counts", "f64"):slice(1, 0, n):to_list(), counts:to_list())
  if inverse then
    -- What FBGEMM's CPU operator returns as `inverse` is the order that sorts the ids; the inverse tells where each id
    -- went.
    local to, all, distinct, order = inverse:to_list(), ids:to_list(), unique:to_list(), case:list "out.inverse"
    for i = 1, #all do assert.equal(all[i], distinct[to[i] + 1]) end
    for i = 2, #order do assert.is_true(to[order[i - 1] + 1] < to[order[i] + 1]
      or (to[order[i - 1] + 1] == to[order[i] + 1]
      and order[i - 1] < order[i])) end
  end
  assert.equal(ids:dtype(), unique:dtype())
end
checks.get_unique_indices, checks.get_unique_indices_with_inverse = check_unique, check_unique

-- -- jagged and dense -------------------------------------------------------------------------------------------------

function checks.jagged_to_padded_dense(case, device)
  local offsets = tensors(case, "in.offsets", device)
  assert_same_bits(case, "out.dense", with_gradient(case, device, { "values" }, function(values)
    return sparse.jagged_to_padded_dense(values, offsets, case.args.max_lengths, case.args.padding_value)
  end))
end

local function check_cut(case, device)
  local offsets = tensors(case, "in.x_offsets", device)
  assert_same_bits(case, "out.values", with_gradient(case, device, { "dense" }, function(dense)
    return (sparse.dense_to_jagged(dense, offsets, case.args.total_L))
  end))
end
checks.dense_to_jagged, checks.dense_to_jagged_forward = check_cut, check_cut

for _, op in ipairs { "jagged_1d_to_dense", "jagged_2d_to_dense" } do
  checks[op] = function(case, device)
    assert_same_bits(case, "out.dense", sparse[op](case:tensor("in.values", device), case:tensor("in.offsets", device),
      case.args.max_sequence_length, case.args.padding_value))
  end
end

for _, op in ipairs { "stacked_jagged_1d_to_dense", "stacked_jagged_2d_to_dense" } do
  checks[op] = function(case, device)
    local a = case.args
    local list = sparse[op](case:tensor("in.values", device), case:tensor("in.lengths", device), a.offset_per_key,
      a.max_lengths_per_key, a.padding_value)
    for i, t in ipairs(list) do assert_same_bits(case, "out.dense." .. i - 1, t) end
    assert.equal(#a.max_lengths_per_key, #list)
  end
end

function checks.pack_segments(case, device)
  assert_same_bits(case, "out.packed", sparse.pack_segments(case:tensor("in.t_in", device),
    case:tensor("in.lengths", device), case.args.max_length))
end

function checks.pack_segments_v2(case, device)
  local packed, mask = sparse.pack_segments_v2(case:tensor("in.t_in", device), case:tensor("in.lengths", device),
    case.args.max_length, case.args.pad_minf, case.args.return_presence_mask)
  assert_same_bits(case, "out.packed", packed)
  assert_same_bits(case, "out.presence_mask", mask)
end

function checks.jagged_1d_to_truncated_values(case, device)
  assert_same_bits(case, "out.truncated_values", sparse.jagged_1d_to_truncated_values(case:tensor("in.values", device),
    case:tensor("in.lengths", device), case.args.max_truncated_length))
end

-- -- arithmetic -------------------------------------------------------------------------------------------------------

for op, result in pairs { jagged_dense_elementwise_add = "out.output",
  jagged_dense_elementwise_add_jagged_output = "out.output", jagged_dense_elementwise_mul = "out.output" } do
  checks[op] = function(case, device)
    local offsets = tensors(case, "in.x_offsets", device)
    case:assert_near(result, with_gradient(case, device, { "x_values", "y" }, function(x, y)
      return (sparse[op](x, offsets, y))
    end))
  end
end

function checks.jagged_dense_dense_elementwise_add_jagged_output(case, device)
  local values = sparse.jagged_dense_dense_elementwise_add_jagged_output(case:tensor("in.x_values", device),
    tensors(case, "in.x_offsets", device), case:tensor("in.y_0", device), case:tensor("in.y_1", device))
  case:assert_near("out.values", values)
end

function checks.jagged_softmax(case, device)
  case:assert_near("out.output", with_gradient(case, device, { "values" }, function(values)
    return sparse.jagged_softmax(values, case:tensor("in.x_offsets", device), case.args.max_L)
  end))
end

function checks.jagged_dense_bmm(case, device)
  case:assert_near("out.output", with_gradient(case, device, { "x_values", "y" }, function(x, y)
    return sparse.jagged_dense_bmm(x, case:tensor("in.x_offsets", device), y, case.args.max_L)
  end))
end

function checks.jagged_jagged_bmm(case, device)
  case:assert_near("out.output", with_gradient(case, device, { "x_values", "y_values" }, function(x, y)
    return sparse.jagged_jagged_bmm(x, y, case:tensor("in.x_offsets", device), case.args.max_L)
  end))
end

function checks.batched_dense_vec_jagged_2d_mul(case, device)
  case:assert_near("out.output", with_gradient(case, device, { "v", "a_values" }, function(v, a)
    return sparse.batched_dense_vec_jagged_2d_mul(v, a, case:tensor("in.a_offsets", device))
  end))
end

-- -- batches ----------------------------------------------------------------------------------------------------------

function checks.reorder_batched_ad_lengths(case, device)
  assert_same_bits(case, "out.reordered", sparse.reorder_batched_ad_lengths(case:tensor("in.cat_ad_lengths", device),
    case:tensor("in.batch_offsets", device), case.args.num_ads_in_batch))
end

function checks.reorder_batched_ad_indices(case, device)
  assert_same_bits(case, "out.reordered", sparse.reorder_batched_ad_indices(case:tensor("in.cat_ad_offsets", device),
    case:tensor("in.cat_ad_indices", device), case:tensor("in.batch_offsets", device), case.args.num_ads_in_batch))
end

local function check_combined(case, device)
  local ids, offsets, weights = sparse.tbe_input_combine(tensors(case, "in.indices_list", device),
    tensors(case, "in.offsets_list", device), tensors(case, "in.per_sample_weights", device),
    booleans(case, "in.include_last_offsets"), case.args.batch_size)
  assert_same_bits(case, "out.indices", ids)
  assert_same_bits(case, "out.offsets", offsets)
  assert_same_bits(case, "out.per_sample_weights", weights)
end
checks.tbe_input_combine, checks.padding_fused_tbe_input_combine = check_combined, check_combined

function checks.tbe_input_combine_with_length(case, device)
  local ids, lengths, weights = sparse.tbe_input_combine_with_length(tensors(case, "in.indices_list", device),
    tensors(case, "in.lengths_list", device), tensors(case, "in.per_sample_weights", device))
  assert_same_bits(case, "out.indices", ids)
  assert_same_bits(case, "out.lengths", lengths)
  assert_same_bits(case, "out.per_sample_weights", weights)
end

-- -- members and rows picked ------------------------------------------------------------------------------------------

function checks.masked_select_jagged_1d(case, device)
  local values, lengths = sparse.masked_select_jagged_1d(case:tensor("in.values", device),
    case:tensor("in.lengths", device), case:tensor("in.mask", device))
  assert_same_bits(case, "out.values", values)
  assert_same_bits(case, "out.lengths", lengths)
end

function checks.jagged_slice(case, device)
  local values, lengths = sparse.jagged_slice(case:tensor("in.x_values", device), case:tensor("in.x_lengths", device),
    case:tensor("in.start", device), case.args.slice_length)
  assert_same_bits(case, "out.values", values)
  assert_same_bits(case, "out.lengths", lengths)
end

function checks.batch_index_select_dim0(case, device)
  local a = case.args
  assert_same_bits(case, "out.output", with_gradient(case, device, { "inputs" }, function(inputs)
    return sparse.batch_index_select_dim0(inputs, case:tensor("in.indices", device), a.input_num_indices, a.input_rows,
      a.input_columns, a.permute_output_dim_0_1)
  end))
end

function checks.permute102_baddbmm_permute102(case, device)
  case:assert_near("out.output", sparse.permute102_baddbmm_permute102(case:tensor("in.bias", device),
    case:tensor("in.A", device), case:tensor("in.B", device)))
end

-- -- pruned tables ----------------------------------------------------------------------------------------------------

function checks.embedding_bag_rowwise_prune(case, device)
  local a = case.args
  assert.equal("torch.int32", a.compressed_indices_dtype)
  local rows, mapping = sparse.embedding_bag_rowwise_prune(case:tensor("in.weight", device),
    case:tensor("in.indicator", device), a.threshold, "i32", a.abs, a.min_num_rows, a.min_save_ratio)
  assert_same_bits(case, "out.output", rows)
  assert_same_bits(case, "out.compressed_indices_mapping", mapping)
end

function checks.pruned_array_lookup(case, device)
  assert_same_bits(case, "out.dense_indices", sparse.pruned_array_lookup(case:tensor("in.indices", device),
    case:tensor("in.offsets", device), case:tensor("in.index_remappings", device),
    case:tensor("in.index_remappings_offsets", device)))
end

function checks.pruned_hashmap_lookup(case, device)
  assert_same_bits(case, "out.dense_indices", sparse.pruned_hashmap_lookup(case:tensor("in.indices", device),
    case:tensor("in.offsets", device), case:tensor("in.hash_table", device),
    case:tensor("in.hash_table_offsets", device)))
end

--- FBGEMM's changes its argument.
function checks.pruned_hashmap_insert(case, device)
  local table = case:tensor("in.hash_table", device)
  assert_same_bits(case, "out.hash_table", sparse.pruned_hashmap_insert(case:tensor("in.indices", device),
    case:tensor("in.dense_indices", device), case:tensor("in.offsets", device), table,
    case:tensor("in.hash_table_offsets", device)))
  assert_same_bits(case, "in.hash_table", table)
end

-- -- a number for each id ---------------------------------------------------------------------------------------------

function checks.batched_unary_embeddings(case, device)
  case:assert_near("out.output", sparse.batched_unary_embeddings(case:tensor("in.weight", device),
    case:tensor("in.table_offsets", device), case:tensor("in.offsets", device), case:tensor("in.indices", device)))
end

function checks.jagged_acc_weights_and_counts(case, device)
  case:assert_near("out.output", sparse.jagged_acc_weights_and_counts(case:tensor("in.weights", device),
    case:tensor("in.reverse_indices", device), case.args.num_unique_indices))
end

local function check_calibrated(case, device)
  local args = {}
  for name, value in pairs(case.args) do args[name] = name ~= "op" and value or nil end
  for _, name in ipairs(case:tensor_names "^in%.") do args[name:match "^in%.(.*)"] = case:tensor(name, device) end
  local calibrated, bins = sparse[case.args.op](args)
  case:assert_near("out.calibrated", calibrated)
  assert_same_bits(case, "out.bin_ids", bins)
end
checks.histogram_binning_calibration, checks.histogram_binning_calibration_by_feature = check_calibrated,
  check_calibrated

function checks.murmur_hash3(case, device)
  assert_same_bits(case, "out.hash", sparse.murmur_hash3(case:tensor("in.input", device), case:tensor("in.y", device),
    case:tensor("in.seed", device)))
end

for _, device in ipairs(require "spec.support.devices") do
  describe("sparse operators as FBGEMM's on " .. device, function()
    for _, name in ipairs(golden.names "ops/sparse") do
      local case = golden.load(name)
      local here = case.args.op ~= "bounds_check_indices" -- those are spec/embed/tbe_bounds_spec.lua's
      if here then it(case.name, function() assert(checks[case.args.op], case.args.op)(case, device) end) end
    end
  end)
end
