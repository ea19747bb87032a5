-- short.lua: a few calls of every family of kernels on a device, each compared with the device cpu: what `make
-- gpu-check` runs first, and under compute-sanitizer, where whole specs would take hours. spec/gpu_check_spec.lua knows
-- the few kernels that it leaves out.
local peri = require "perilune"
local ffi = require "ffi"
local Tensor, sparse, nn = peri.Tensor, peri.sparse, peri.nn
local device, compared = arg[1] or "cuda", 0

--- Compare what f(device) returns, a list of tensors, with what f "cpu" does: equal, or within `tolerance` of the
--- largest number.
local function same(name, f, tolerance)
  peri.scope(function()
    local expected, got = f "cpu", f(device)
    for i, want in ipairs(expected) do
      local a, b = want:to "f64":to_list(), got[i]:to(nil, "cpu"):to "f64":to_list()
      local function flat(list, out)
        for _, x in ipairs(list) do
          if type(x) == "table" then flat(x, out) else out[#out + 1] = x end
        end
        return out
      end
      a, b = flat(a, {}), flat(b, {})
      local largest = 1
      for _, x in ipairs(a) do largest = math.max(largest, math.abs(x)) end
      if #a ~= #b then error(("%s: result %d has %d numbers, on cpu %d"):format(name, i, #b, #a), 0) end
      for k = 1, #a do
        local close = math.abs(a[k] - b[k]) <= (tolerance or 0) * largest -- a NaN is not
        if not close then
          error(("%s: result %d, number %d is %.9g, on cpu %.9g"):format(name, i, k, b[k], a[k]), 0)
        end
      end
      compared = compared + 1
    end
  end)
end

local function ids_on(d, n, rows, seed)
  return Tensor.uniform({ n }, 0, rows, seed, 0, "f64", "cpu"):to("i64"):to(nil, d)
end
local function floats_on(d, shape, seed) return Tensor.uniform(shape, -1, 1, seed, 0, "f32", "cpu"):to(nil, d) end

-- Tables: forward, backward, forward again.
local table_cases = { { "FP16", "rowwise_adagrad" }, { "BF16", "adagrad" }, { "INT8", "none" }, { "INT4", "none" } }
local optimizers, changes = require "perilune.embed.config", require "perilune.embed.changes"
for _, name in ipairs(optimizers.optimizers()) do table_cases[#table_cases + 1] = { "FP32", name } end
local function params_of(name) -- with what takes every kernel of the optimizer
  local params = optimizers.usual_params(name)
  if name == "emainplace_rowwise_adagrad" then params.emainplace_mode = { step_ema = 1 } end
  if name == "rowwise_adagrad_with_counter" then
    params.counter_based_regularization = { learning_rate_mode = "tail_id_lr_decrease", max_counter_update_freq = 1,
      tail_id_threshold = { val = 0.4, is_ratio = true } }
  end
  return params
end
for _, c in ipairs(table_cases) do
  same(("table batch %s %s"):format(c[1], c[2]), function(d)
    local B, L, D, tables, blocks = 7, 5, 36, {}, {}
    for t = 1, 2 do
      tables[t] = { name = "t" .. t, rows = 50, cols = D, init = c[2] ~= "none" and peri.embed.constant(0.5) or nil }
      blocks[t] = { table = t, first_bag = (t - 1) * B, bags = B, out_offset = (t - 1) * D, out_stride = 2 * D }
    end
    local batch = peri.embed.tbe.new { tables = tables, data_type = c[1], seed = 1, device = d,
      fused_params = params_of(c[2]) }
    local source = { batch = batch, table = 0, name = "weight" }
    local marks = changes.marks(source)
    local offsets = ffi.new("int64_t[?]", 2 * B + 1)
    for b = 0, 2 * B do offsets[b] = b * L end
    offsets = Tensor.from_memory(offsets, { 2 * B + 1 }, "i64", d)
    local ids = ids_on(d, 2 * B * L, 50, 3)
    local out = peri.zeros({ B, 2 * D }, "f32", d)
    blocks = batch:blocks(blocks)
    if c[2] ~= "none" then
      batch:backward(ids, offsets, blocks, floats_on(d, { B, 2 * D }, 4))
      if c[2] == "rowwise_adagrad" then -- the other ways to the same update
        batch:accumulate(true)
        batch:backward(ids, offsets, blocks, floats_on(d, { B, 2 * D }, 5))
        batch:backward(ids, offsets, blocks, floats_on(d, { B, 2 * D }, 6))
        batch:apply_accumulated()
        batch:accumulate(false)
        batch:apply_gradient(batch:gradient(ids, offsets, blocks, floats_on(d, { B, 2 * D }, 7)))
      end
    end
    batch:forward(ids, offsets, blocks, out)
    return { out, changes.rows(source, changes.take(marks), 0) }
  end, 1e-5)
end

dofile "tests/gpu/short_tensors.lua"(same, ids_on)
-- Jagged and sparse.
same("sparse operators", function(d)
  local F, B = 3, 9
  local lengths = ids_on(d, F * B, 6, 5):to "i32"
  local order, n = peri.tensor({ 2, 0, 1 }, "i32", d), lengths:to("f64"):sum():item()
  local ids = ids_on(d, n, 1000, 6)
  local offsets = sparse.asynchronous_complete_cumsum(lengths:to "i64")
  local l, v = sparse.permute_2D_sparse_data(order, lengths:reshape(F, B), ids)
  local rows = floats_on(d, { n, 8 }, 7)
  local items = ids_on(d, 512, 1000, 9):to("f32"):reshape(64, 8)
  return { l, v, sparse.jagged_2d_to_dense(rows, offsets, 4), (sparse.unique(ids)),
    sparse.top_products(items:slice(1, 0, 4), items, 10) }
end)
same("bucketize", function(d)
  local lengths = ids_on(d, 18, 6, 5):to "i32"
  local n = lengths:to("f64"):sum():item()
  local r = sparse.block_bucketize_sparse_features { lengths = lengths, indices = ids_on(d, n, 1000, 6),
    block_sizes = { 250, 250 }, my_size = 4 }
  return { r.lengths, r.indices }
end)
same("rows of int8", function(d)
  local format = sparse.quantize.format { codes = "int8" }
  local rows = sparse.quantize.rows(floats_on(d, { 5, 40 }, 8), format)
  return { sparse.quantize.restore(rows, format, 40) }
end, 1e-6)

-- Selections by masks and places, pruned tables, hashes, lookups by number, each with its gradient where it has one.
local function lengths_on(d, bags, most, seed, dtype) return ids_on(d, bags, most, seed):to(dtype or "i64") end
local function total(lengths) return lengths:to("f64"):sum():item() end
--- As t is now: later steps change views of buffers.
local function copied(t) return peri.empty(t:shape(), t:dtype(), t:device()):copy(t:detach()) end
--- f's first result for a leaf of floats, what else it returns, and the leaf's gradient.
local function with_gradient(d, shape, seed, f)
  local leaf = floats_on(d, shape, seed):requires_grad()
  local results = { f(leaf) }
  results[1]:backward(floats_on(d, results[1]:shape(), seed + 1))
  results[#results + 1] = leaf:grad()
  for i, t in ipairs(results) do results[i] = t:detach() end
  return results
end
same("selections by masks", function(d)
  local lengths = lengths_on(d, 700, 9, 11) -- more rows than a block of the kernel has
  local n = total(lengths)
  local mask = ids_on(d, n, 3, 12):to "bool"
  local out = with_gradient(d, { n, 6 }, 13, function(x) return sparse.masked_select_jagged_1d(x, lengths, mask) end)
  out[#out + 1] = sparse.masked_select_jagged_1d(ids_on(d, n, 1000, 14), lengths, mask)
  for _, few in ipairs { true, false } do -- none, all
    out[#out + 1] = sparse.masked_select_jagged_1d(ids_on(d, n, 1000, 14), lengths,
      peri.full({ n }, few and 0 or 1, "bool", d))
  end
  return out
end)
same("selections by places", function(d)
  local lengths = lengths_on(d, 200, 7, 15)
  local n = total(lengths)
  local out = with_gradient(d, { n, 5 }, 16, function(x)
    return sparse.jagged_slice(x, lengths, peri.zeros({ 200 }, "i64", d), 3)
  end)
  local picked = with_gradient(d, { 40, 12 }, 17, function(x)
    return sparse.index_select_dim0(x, ids_on(d, 64, 40, 18))
  end)
  local jagged = with_gradient(d, { n, 4 }, 19, function(x)
    return (sparse.jagged_index_select(x, lengths, ids_on(d, 90, 200, 20)))
  end)
  for _, list in ipairs { picked, jagged } do
    for _, t in ipairs(list) do out[#out + 1] = t end
  end
  return out
end, 1e-6)
same("pruned tables", function(d)
  local weight = floats_on(d, { 90, 8 }, 21)
  local kept, remapping = sparse.embedding_bag_rowwise_prune(weight, floats_on(d, { 90 }, 22), 0.1, "i32")
  local ids, offsets = ids_on(d, 200, 90, 23), peri.tensor({ 0, 50, 200 }, "i64", d)
  local starts = peri.tensor({ 0, 90, 180 }, "i64", d)
  return { kept, remapping, sparse.pruned_array_lookup(ids, offsets, nn.functional.cat({ remapping, remapping }, 1),
    starts) }
end)
same("numbers by id, hashes", function(d)
  local offsets = peri.tensor({ 0, 3, 3, 7, 12 }, "i64", d)
  local out = with_gradient(d, { 2, 30 }, 24, function(w)
    return sparse.batched_unary_embeddings(w, peri.tensor({ 0, 10, 30 }, "i64", d), offsets, ids_on(d, 12, 10, 25))
  end)
  out[#out + 1] = sparse.murmur_hash3(ids_on(d, 500, 2 ^ 40, 26), 3, 5)
  return out
end, 1e-6)
same("arithmetic of jagged rows", function(d)
  local lengths = lengths_on(d, 30, 6, 27)
  local offsets, n = sparse.asynchronous_complete_cumsum(lengths), total(lengths)
  local softmax = with_gradient(d, { n, 4 }, 28, function(x) return (sparse.jagged_softmax(x, offsets, 6)) end)
  local product = with_gradient(d, { n, 4 }, 29, function(x)
    return (sparse.jagged_dense_bmm(x, offsets, floats_on(d, { 30, 4, 3 }, 30), 6))
  end)
  local padded = with_gradient(d, { n, 4 }, 31, function(x)
    return sparse.jagged_to_padded_dense(x, { offsets }, { 5 }, 0.5)
  end)
  for _, list in ipairs { product, padded } do
    for _, t in ipairs(list) do softmax[#softmax + 1] = t end
  end
  return softmax
end, 1e-5)
dofile "tests/gpu/short_sequences.lua"(same, lengths_on, total, with_gradient)

-- Codecs of exchanged rows.
for _, c in ipairs { { comm_precision = "FP16", loss_scale = 24 }, { comm_precision = "BF16" },
  { comm_precision = "FP8", row_dim = 32 }, { comm_precision = "INT8", row_dim = 40 }, { comm_precision = "MX4" } } do
  same("codec " .. c.comm_precision, function(d)
    local codec = peri.dist.codec.QuantizedCommCodec(c)
    local context = codec:create_context { 640, 0, 1280 }
    return { codec:decode(codec:encode(floats_on(d, { 1920 }, 32), context), context) }
  end)
end

-- Collections in shards of two ranks, which take turns here: routes of ids and rows there and back, exchanges with
-- codecs or without, updates; then the same rows again. `many` wants a device-independent name of the whole state.
local B, rows_a, rows_b = 6, 50, 33
local function batch_on(d, rank, step, few)
  local lengths = Tensor.uniform({ 2 * B }, 0, 5, 40 + 10 * step + rank, 0, "f64", "cpu"):to "i32"
  local n = total(lengths)
  local ids = Tensor.uniform({ n }, 0, few or rows_b, 60 + 10 * step + rank, 0, "f64", "cpu"):to "i64"
  return peri.KeyedJaggedTensor { keys = { "f1", "f2" }, values = ids:to(nil, d), lengths = lengths:to(nil, d) }
end
local function configs(class, data_type, pooling)
  return { peri[class] { name = "a", num_embeddings = rows_a, embedding_dim = 16, feature_names = { "f1" },
    data_type = data_type, pooling = pooling }, peri[class] { name = "b", num_embeddings = rows_b, embedding_dim = 16,
    feature_names = { "f2" }, data_type = data_type } }
end
--- f(rank, world) on two ranks of a device: what they return, one after the other.
local function on_ranks(d, f)
  local results, all = peri.dist.sim.run(2, f, { device = d, device_transport = d ~= "cpu" and "sim" or nil }), {}
  for _, list in ipairs(results) do
    for _, t in ipairs(list) do all[#all + 1] = t end
  end
  return all
end
local plans = {
  row_wise = { a = peri.plan.row_wise(), b = peri.plan.row_wise() },
  ["table_wise and column_wise"] = { a = peri.plan.table_wise(1), b = peri.plan.column_wise { ranks = { 0, 1 } } },
}
for _, c in ipairs { { "ShardedEmbeddingBagCollection", "EmbeddingBagConfig", "row_wise", "MEAN" },
  { "ShardedEmbeddingBagCollection", "EmbeddingBagConfig", "table_wise and column_wise" },
  { "ShardedEmbeddingBagCollection", "EmbeddingBagConfig", "row_wise", nil, "FP16", "FP16" },
  { "ShardedEmbeddingBagCollection", "EmbeddingBagConfig", "row_wise", nil, nil, nil, true },
  { "ShardedEmbeddingCollection", "EmbeddingConfig", "row_wise" },
  { "ShardedEmbeddingCollection", "EmbeddingConfig", "row_wise", nil, nil, nil, true },
  { "ShardedEmbeddingCollection", "EmbeddingConfig", "table_wise and column_wise", nil, nil, "BF16" } } do
  local class, config, kind, pooling, data_type, precision, dedup = unpack(c, 1, 7)
  same(("%s, %s, codec %s%s"):format(class, kind, precision, dedup and ", each id once" or ""), function(d)
    return on_ranks(d, function(rank, world)
      local module = peri.shard[class] { tables = configs(config, data_type, pooling), plan = plans[kind],
        group = world, device = d, seed = 5, fused_params = { optimizer = "rowwise_adagrad", learning_rate = 0.1 },
        use_index_dedup = dedup or nil, qcomm_codecs_registry = precision
          and peri.dist.codec.get_qcomm_codecs_registry { forward = precision, backward = precision } }
      local out = {}
      for step = 1, 2 do
        -- fewer ids than bags: rows are pooled at home
        local got = module(batch_on(d, rank, step, dedup and step == 1 and 3 or nil))
        if got.wait then got = got:wait() end
        if class:find "Bag" then got = { got:values() } else got = { got.f1:values(), got.f2:values() } end
        local sum = nil
        for _, t in ipairs(got) do
          out[#out + 1] = copied(t)
          local weighted = nn.functional.sum(nn.functional.mul(t, floats_on(d, t:shape(), 70 + step)))
          sum = sum and nn.functional.add(sum, weighted) or weighted
        end
        sum:backward()
      end
      return out
    end)
  end, precision and 1e-3 or 1e-5)
end

for _, how in ipairs { "as they are", "each id once", "exact" } do
  same("collections with weights of ids, sums over ranks, " .. how, function(d)
    return on_ranks(d, function(rank, world)
      local plain = batch_on(d, rank, 3, how == "each id once" and 3 or nil)
      local weights = floats_on(d, { plain:values():numel() }, 150 + rank):requires_grad()
      local batch = peri.KeyedJaggedTensor { keys = plain:keys(), values = plain:values(), lengths = plain:lengths(),
        weights = weights }
      local module = peri.shard.ShardedEmbeddingBagCollection { tables = configs "EmbeddingBagConfig",
        plan = plans.row_wise, group = world, device = d, seed = 5, is_weighted = true,
        use_index_dedup = how == "each id once" or nil, fused_params = { optimizer = "sgd", learning_rate = 0.1,
          exact = how == "exact" or nil } }
      local pooled = module(batch):values()
      if pooled.wait then pooled = pooled:wait() end
      pooled:backward(floats_on(d, pooled:shape(), 152))
      local sum = floats_on(d, { 50 }, 153 + rank)
      world:all_reduce(sum):wait()
      return { copied(pooled), weights:grad(), sum }
    end)
  end, 1e-5)
end
same("ids to the ranks of their keys", function(d)
  return on_ranks(d, function(rank, world)
    local got = peri.dist.exchange.KJTAllToAll(world, { 1, 1 })(batch_on(d, rank, 4)):wait():wait()
    return { got:values(), got:lengths() }
  end)
end)
same("managed collision over ranks", function(d)
  return on_ranks(d, function(rank, world)
    local tables = configs "EmbeddingConfig"
    local module = peri.ManagedCollisionEmbeddingCollection { return_remapped_features = true,
      embedding_collection = peri.EmbeddingCollection { tables = tables, device = "meta",
        fused_params = { optimizer = "sgd" } },
      managed_collision_collection = peri.ManagedCollisionCollection { embedding_configs = tables,
        managed_collision_modules = {
        a = peri.MCHManagedCollisionModule { zch_size = rows_a, eviction_interval = 2,
          eviction_policy = peri.embed.LFU_EvictionPolicy {} },
        b = peri.HashZchManagedCollisionModule { zch_size = rows_b, total_num_buckets = 3, max_probe = 5 } } } }
    local sharded = peri.shard.ManagedCollisionEmbeddingCollectionSharder {}:shard(module,
      peri.plan.EmbeddingModuleShardingPlan(plans.row_wise), peri.ShardingEnv.from_process_group(world), d, "mc")
    local out = {}
    for step = 1, 3 do
      local rows, remapped = sharded(batch_on(d, rank, step, 500))
      rows, remapped = peri.util.resolve(rows), peri.util.resolve(remapped)
      for _, f in ipairs { "f1", "f2" } do
        out[#out + 1] = copied(remapped:get(f):values())
        out[#out + 1] = copied(rows[f]:values())
      end
    end
    return out
  end)
end, 1e-5)
same("columns in other groups", function(d)
  local a, b = floats_on(d, { 6, 20 }, 155):requires_grad(), floats_on(d, { 6, 12 }, 156):requires_grad()
  local groups = peri.KeyedTensor.regroup({ peri.KeyedTensor { keys = { "x", "y" }, length_per_key = { 8, 12 },
    values = a }, peri.KeyedTensor { keys = { "z" }, length_per_key = { 12 }, values = b } },
      { { "z", "x" }, { "y", "x" } })
  local sum = nn.functional.add(nn.functional.sum(nn.functional.square(groups[1])), nn.functional.sum(groups[2]))
  sum:backward()
  return { groups[1]:detach(), groups[2]:detach(), a:grad(), b:grad() }
end, 1e-5)

-- Tables in files, behind a cache on the device that holds a part of the rows.
for _, policy in ipairs { "LRU", "LFU" } do
  same("tables in files, " .. policy, function(d)
    local collection = peri.EmbeddingBagCollection { tables = configs("EmbeddingBagConfig"), device = d, seed = 6,
      fused_params = { optimizer = "rowwise_adagrad", learning_rate = 0.1,
        cache_params = { load_factor = 0.7, algorithm = policy } } }
    local out = {}
    for step = 1, 4 do
      local pooled = collection(batch_on(d, 0, step)):values()
      out[#out + 1] = copied(pooled)
      pooled:backward(floats_on(d, pooled:shape(), 80 + step))
    end
    return out
  end, 1e-5)
end

-- Managed collision: sorted maps and probing ones, whose rows are trained.
for kind, make in peri.util.ordered {
  MCH = function(d) return peri.MCHManagedCollisionModule { device = d, zch_size = 40, eviction_interval = 2,
    eviction_policy = peri.embed.DistanceLFU_EvictionPolicy { decay_exponent = 1 } } end,
  HashZch = function(d) return peri.HashZchManagedCollisionModule { device = d, zch_size = 40, total_num_buckets = 2,
    max_probe = 6, eviction_policy_name = "SINGLE_TTL_EVICTION",
    eviction_config = { features = { "f" }, single_ttl = 1 } } end } do
  same("managed collision, " .. kind, function(d)
    local tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = 40, embedding_dim = 8,
      feature_names = { "f" } } }
    local mc = peri.ManagedCollisionEmbeddingBagCollection {
      embedding_bag_collection = peri.EmbeddingBagCollection { tables = tables, device = d, seed = 7,
        fused_params = { optimizer = "sgd", learning_rate = 0.1 } },
      managed_collision_collection = peri.ManagedCollisionCollection { embedding_configs = tables,
        managed_collision_modules = { t = make(d) } },
      return_remapped_features = true }
    local out = {}
    for step = 1, 4 do
      local lengths = Tensor.uniform({ 20 }, 0, 5, 90 + step, 0, "f64", "cpu"):to "i32"
      local ids = Tensor.uniform({ total(lengths) }, 0, 90, 95 + step, 0, "f64", "cpu"):to "i64"
      local pooled, remapped = mc(peri.KeyedJaggedTensor { keys = { "f" }, values = ids:to(nil, d),
        lengths = lengths:to(nil, d) })
      out[#out + 1], out[#out + 2] = copied(remapped:values()), copied(pooled:values())
      pooled:values():backward(floats_on(d, pooled:values():shape(), 99))
    end
    local state = mc:state_dict()
    for _, t in peri.util.ordered(state) do
      if Tensor.is(t) and t:numel() > 0 and t:dtype() ~= "u8" then out[#out + 1] = copied(t) end
    end
    mc:load_state_dict(state)
    return out
  end, 1e-5)
end

-- Quantized collections, whole and in pieces.
for _, c in ipairs { { "INT8", "FP16" }, { "INT4", "FP32" }, { "INT2", "BF16" }, { "FP8", "FP32" },
  { "FP16", "FP16" } } do
  same(("quantized collections, %s to %s"):format(c[1], c[2]), function(d)
    local function quantized()
      return peri.quantize_embeddings { dtype = c[1], output_dtype = c[2],
        module = peri.EmbeddingBagCollection { tables = configs("EmbeddingBagConfig"), device = d, seed = 8 } }
    end
    local batch = batch_on(d, 1, 7)
    local pieces = peri.shard.shard_quant_model { module = quantized(), env = peri.ShardingEnv.from_local(2),
      device = d, plan = peri.plan.ShardingPlan { [""] = plans["table_wise and column_wise"] } }
    return { quantized()(batch):values(), pieces(batch):values() }
  end, 1e-6)
end
same("quantized sequences", function(d)
  local q = peri.quantize_embeddings { dtype = "INT8",
    module = peri.EmbeddingCollection { tables = configs("EmbeddingConfig"), device = d, seed = 9 } }
  local rows = q(batch_on(d, 0, 8))
  return { rows.f1:values(), rows.f2:values() }
end, 1e-6)

-- The dense part: functions of each number, of rows and of columns, with their gradients.
local F = nn.functional
local function append(list, more)
  for _, t in ipairs(more) do list[#list + 1] = t end
  return list
end
same("functions of numbers", function(d)
  local out = {}
  for _, name in ipairs { "relu", "sigmoid", "tanh", "silu", "gelu", "softplus", "logsigmoid", "leaky_relu", "exp",
    "abs", "square" } do
    append(out, with_gradient(d, { 37, 5 }, 110, F[name]))
  end
  local other = floats_on(d, { 37, 5 }, 111)
  append(out, with_gradient(d, { 37, 5 }, 112, function(x) return F.muladd(x, other, x) end))
  append(out, with_gradient(d, { 5 }, 113, function(x) return F.div(F.mul(other, x), F.affine(F.square(x), 1, 1)) end))
  append(out, with_gradient(d, { 37, 5 }, 171, function(x) return F.huber_loss(x, other, 0.5, "none") end))
  return append(out, with_gradient(d, { 37, 5 }, 172, function(x) return F.cosine_similarity(other, x, 2) end))
end, 1e-5)
same("functions of rows and columns", function(d)
  local weight, bias = floats_on(d, { 40 }, 114), floats_on(d, { 40 }, 115)
  local labels = ids_on(d, 33, 40, 116)
  local calls = {
    function(x) return F.layer_norm(x, 1, weight, bias, 1e-5) end, function(x) return F.softmax(x, 2) end,
    function(x) return F.log_softmax(x, 1) end, function(x) return F.max(x, 2) end, function(x) return F.sum(x, 1) end,
    function(x) return F.mean(x, 2) end, function(x) return F.dropout(x, 0.3, 7, 1, 0) end,
    function(x) return F.cross_entropy(x, labels) end, function(x) return F.matmul(x, x:transpose(1, 2)) end,
    function(x) return F.linear(x, floats_on(d, { 9, 40 }, 117), floats_on(d, { 9 }, 118), F.activations.relu) end,
    function(x) return F.mse_loss(x, floats_on(d, { 33, 40 }, 119)) end,
    function(x)
      return F.interaction(x:slice(2, 0, 8):contiguous(), x:slice(2, 8, 40):contiguous():reshape(33, 4, 8))
    end,
  }
  local out = {}
  for _, f in ipairs(calls) do append(out, with_gradient(d, { 33, 40 }, 120, function(x) return (f(x)) end)) end
  return out
end, 1e-4)
same("means over ranks", function(d)
  local sum, count = nn.functional.sum(floats_on(d, { 40 }, 167)), peri.full({ 1 }, 7, "f32", d)
  local out = with_gradient(d, { 40 }, 168, function(x)
    return F.mean_of(F.sum(x), F.mean_parts(F.sum(x), count), 2)
  end)
  return append(out, { F.mean_parts(sum, count), F.mean_of(sum, 7, 2) })
end, 1e-5)
same("cross networks", function(d)
  local function parameter(shape, seed) return floats_on(d, shape, seed):requires_grad() end
  local out = {}
  for _, low in ipairs { false, true } do -- with a matrix a layer, and with two of a lower rank
    local w = { parameter({ 24, low and 5 or 24 }, 160), parameter({ 24, low and 5 or 24 }, 161) }
    local v = low and { parameter({ 5, 24 }, 162), parameter({ 5, 24 }, 163) } or nil
    local bias = { parameter({ 24 }, 164), parameter({ 24 }, 165) }
    append(out, with_gradient(d, { 33, 24 }, 166, function(x) return F.cross_net(x, v, w, bias) end))
    for _, list in ipairs { w, v or {}, bias } do
      for _, t in ipairs(list) do out[#out + 1] = t:grad() end
    end
  end
  return out
end, 1e-4)
same("norms of gradients, and their clipping", function(d)
  local out = {}
  for k = 1, 2 do
    local p = nn.Parameter(floats_on(d, { 50, 7 }, 121))
    p:set_grad(floats_on(d, { 50, 7 }, 122))
    if k == 1 then out[#out + 1] = nn.optim.clip_grad_norm({ p }, 0.5, 2) else nn.optim.clip_grad_value({ p }, 0.25) end
    out[#out + 1] = p:grad()
  end
  return out
end, 1e-5)
for _, mode in ipairs { "sum", "mean", "max" } do
  same("nn.EmbeddingBag, " .. mode .. ", with a padding row", function(d)
    nn.manual_seed(4)
    local bags = nn.EmbeddingBag { num_embeddings = 30, embedding_dim = 12, mode = mode, device = d, padding_idx = 7 }
    bags.weight:detach():copy(floats_on(d, { 30, 12 }, 141))
    local out = bags(ids_on(d, 400, 30, 142), peri.tensor({ 0, 0, 130, 300 }, "i64", d))
    out:backward(floats_on(d, out:shape(), 143))
    return { out:detach(), bags.weight:grad() }
  end, 1e-5)
  same("nn.EmbeddingBag, " .. mode, function(d)
    nn.manual_seed(3)
    local bags = nn.EmbeddingBag { num_embeddings = 30, embedding_dim = 12, mode = mode, device = d,
      max_norm = mode == "sum" and 2 or nil }
    bags.weight:detach():copy(floats_on(d, { 30, 12 }, 123))
    local ids, offsets = ids_on(d, 40, 30, 124), peri.tensor({ 0, 0, 13, 30 }, "i64", d)
    local weights = mode == "sum" and floats_on(d, { 40 }, 125):requires_grad() or nil
    local out = bags(ids, offsets, weights)
    out:backward(floats_on(d, out:shape(), 126))
    return { out:detach(), bags.weight:grad(), weights and weights:grad() or bags.weight:detach() }
  end, 1e-5)
end

-- Sparse operators beside those above.
same("segments, levels, buckets back", function(d)
  local out = with_gradient(d, { 240 }, 127, function(x)
    return sparse.segment_sum_csr(4, peri.tensor({ 0, 10, 10, 60 }, "i64", d), x)
  end)
  local inner = lengths_on(d, 9, 5, 128)
  local levels = { peri.tensor({ 0, 4, 9 }, "i64", d), sparse.asynchronous_complete_cumsum(inner) }
  append(out, with_gradient(d, { total(inner), 3 }, 129, function(x)
    return sparse.jagged_to_padded_dense(x, levels, { 3, 4 }, 0)
  end))
  append(out, with_gradient(d, { 2, 3, 4, 3 }, 130, function(x)
    return (sparse.dense_to_jagged(x, levels, total(inner)))
  end))
  local lengths = lengths_on(d, 12, 6, 131, "i32")
  local r = sparse.block_bucketize_sparse_features { lengths = lengths, indices = ids_on(d, total(lengths), 100, 132),
    block_sizes = { 30, 30 }, my_size = 3, sequence = true, return_bucket_mapping = true, bucketize_pos = true }
  local replayed = sparse.populate_bucketized_permute(lengths, r.lengths, r.bucket_mapping)
  return append(out, { r.positions, r.unbucketize_permute, replayed,
    sparse.invert_permute(peri.tensor({ 2, 0, 1, 3 }, "i64", d)) })
end, 1e-5)
same("rows of several matrices", function(d)
  local picked = peri.tensor({ 0, 2, 2, 1, 4, 0 }, "i64", d)
  return with_gradient(d, { 3 * 4 + 5 * 6 }, 133, function(x)
    return sparse.batch_index_select_dim0(x, picked, { 3, 3 }, { 3, 5 }, { 4, 6 }, false)
  end)
end, 1e-6)
same("hash tables, calibration, counted weights", function(d)
  local starts = peri.tensor({ 0, 64 }, "i64", d)
  local empty = peri.full({ 64, 2 }, -1, "i64", d)
  local offsets = peri.tensor({ 0, 20 }, "i64", d)
  local keys = peri.tensor({ 3, 900, 17, 2, 44, 51, 60, 71, 82, 93, 104, 115, 126, 137, 148, 159, 160, 171, 182, 193 },
    "i64", d)
  local built = sparse.pruned_hashmap_insert(keys, ids_on(d, 20, 50, 134), offsets, empty, starts)
  local found = sparse.pruned_hashmap_lookup(keys, offsets, built, starts)
  local unique, inverse = sparse.unique(ids_on(d, 90, 20, 135), true)
  local weights = sparse.jagged_acc_weights_and_counts(floats_on(d, { 90 }, 136), inverse, unique:numel())
  local p, bins = sparse.histogram_binning_calibration { logit = floats_on(d, { 80 }, 137), positive_weight = 0.4,
    bin_num_examples = peri.full({ 10 }, 20, "f64", d), bin_num_positives = peri.full({ 10 }, 5, "f64", d) }
  return { found, weights, p, bins }
end, 1e-5)

-- The dense part: a step.
for _, name in ipairs { "SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "RowWiseAdagrad" } do
  same("a training step, " .. name, function(d)
    nn.manual_seed(2)
    local model = nn.MLP { in_size = 13, layer_sizes = { 17, 1 }, device = d }
    local trained = {} -- a row-wise optimizer has matrices only
    for _, p in ipairs(model:parameters()) do
      if name ~= "RowWiseAdagrad" or p:dim() > 1 then trained[#trained + 1] = p end
    end
    local optimizer = nn.optim[name] { params = trained, lr = 0.1 }
    for _, p in ipairs(model:parameters()) do p:detach():copy(floats_on(d, p:shape(), 9)) end
    for step = 1, 2 do
      optimizer:zero_grad()
      local logits = model(floats_on(d, { 33, 13 }, step)):reshape(-1)
      nn.functional.binary_cross_entropy_with_logits(logits, peri.full({ 33 }, 1, "f32", d)):backward()
      optimizer:step()
    end
    return peri.util.map(model:parameters(), function(p) return p:detach() end)
  end, 1e-4)
end

print(("%d tensors on %s are those of cpu"):format(compared, device))
