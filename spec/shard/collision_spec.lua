-- Managed collision over ranks, any number of them: what the unsharded collection gives, to the last bit; batches in
-- flight; states.
-- mpirun: 2 4
local ffi = require "ffi"
local peri = require "perilune"
local worlds = require "spec.support.worlds"
local util = require "perilune.util"
local embed, plan = peri.embed, peri.plan

local SAMPLES, STEPS, DIM = 11, 7, 4
local FEATURES = { "f", "g", "h" }
local configs = {
  { name = "a", rows = 37, features = { "f", "g" }, buckets = 5, segments = { 0, 7, 14, 22, 29, 37 } },
  { name = "b", rows = 16, features = { "h" }, buckets = 3, segments = { 0, 5, 10, 16 } },
}

local function generator(seed)
  local x = seed
  return function(n)
    x = x * 16807 % 2147483647
    return x % n
  end
end

--- Raw ids that fade in and out with the steps; any 64-bit number, some of them strange.
local strange = { -1LL, -9223372036854775807LL - 1, 9223372036854775806LL, 0LL }
local function raw(k, step) return k < 2 and strange[(k + step) % 4 + 1] or (step * 5 + k) * 0x9E3779B97F4A7C15LL end

--- The bags of a step: by feature and sample, the ids.
local drawn = {}
local function draw(step)
  if drawn[step] then return drawn[step] end
  local below, bags = generator(step * 977 + 3), {}
  for _, f in ipairs(FEATURES) do
    bags[f] = {}
    for s = 1, SAMPLES do
      local ids = {}
      for i = 1, below(4) do ids[i] = raw(below(24), step) end
      bags[f][s] = ids
    end
  end
  drawn[step] = bags
  return bags
end

--- Samples [from, to) of a step, and by feature the number of ids before them.
local function batch(step, from, to, device, weighted)
  local bags, list, lengths, before, weights = draw(step), {}, {}, {}, {}
  for _, f in ipairs(FEATURES) do
    before[f] = 0
    for s = 1, SAMPLES do
      local here = s > from and s <= to
      if here then lengths[#lengths + 1] = #bags[f][s] end
      if s <= from then before[f] = before[f] + #bags[f][s] end
      for i, id in ipairs(bags[f][s]) do
        if here then list[#list + 1], weights[#weights + 1] = id, (s * 7 + i) % 5 / 4 end
      end
    end
  end
  local memory = ffi.new("int64_t[?]", math.max(#list, 1), list)
  return peri.KeyedJaggedTensor { keys = FEATURES, values = peri.Tensor.from_memory(memory, { #list }, "i64", device),
    lengths = peri.tensor(lengths, "i32", device, { #lengths }), stride = to - from,
    weights = weighted and peri.tensor(weights, "f32", device, { #weights }) or nil }, before
end

local modules = {
  lfu = function(t, drop)
    return embed.MCHManagedCollisionModule { zch_size = t.rows, buckets = t.buckets, eviction_interval = 2,
      on_miss = drop, eviction_policy = embed.LFU_EvictionPolicy {} }
  end,
  own = function(t, drop)
    return embed.MCHManagedCollisionModule { zch_size = t.rows, buckets = t.buckets, eviction_interval = 2,
      on_miss = drop, eviction_policy = embed.MCHEvictionPolicy { score = function(count, last, now)
        return count - (now - last) * 3
      end } }
  end,
  hashed = function(t, drop) -- raw ids are halved first
    return embed.MCHManagedCollisionModule { zch_size = t.rows, buckets = t.buckets, eviction_interval = 2,
      on_miss = drop, eviction_policy = embed.LFU_EvictionPolicy {}, input_hash_func = function(ids)
        return ids:to("f64"):mul(0.5):to "i64"
      end }
  end,
  hash = function(t, drop)
    return embed.HashZchManagedCollisionModule { zch_size = t.rows, total_num_buckets = t.buckets,
      output_segments = t.segments, max_probe = 6, on_miss = drop,
      eviction_policy_name = "SINGLE_TTL_EVICTION", eviction_config = { features = t.features, single_ttl = 2 } }
  end,
}

--- c: sequence, module, on_miss, weighted, kernel, optimizer.
local function collection_of(c, device)
  local tables = util.map(configs, function(t)
    return (c.sequence and peri.EmbeddingConfig or peri.EmbeddingBagConfig) { name = t.name, num_embeddings = t.rows,
      embedding_dim = DIM, feature_names = t.features, pooling = not c.sequence and (t.name == "b" and "MEAN" or "SUM")
        or nil }
  end)
  local maps = {}
  for _, t in ipairs(configs) do maps[t.name] = modules[c.module or "lfu"](t, c.on_miss or "default") end
  local mcc = embed.ManagedCollisionCollection { managed_collision_modules = maps, embedding_configs = tables }
  local args = { tables = tables, seed = 5, device = device, fused_params = { optimizer = c.optimizer or "adam",
    learning_rate = 0.1, exact = true }, is_weighted = c.weighted or nil }
  if c.sequence then
    return embed.ManagedCollisionEmbeddingCollection { embedding_collection = peri.EmbeddingCollection(args),
      managed_collision_collection = mcc, return_remapped_features = true }
  end
  return embed.ManagedCollisionEmbeddingBagCollection { embedding_bag_collection = peri.EmbeddingBagCollection(args),
    managed_collision_collection = mcc, return_remapped_features = true }
end

local kinds = {
  row_wise = function(_, _, o) return plan.row_wise(o) end,
  table_wise = function(i, n, o) return plan.table_wise(i % n, o) end,
  mixed = function(i, n, o) return i == 1 and plan.row_wise(o) or plan.table_wise(n - 1, o) end,
}

local function sharded_of(c, world, device)
  local module, entries = collection_of(c, "cpu"), {}
  local sharder = peri.shard[("ManagedCollisionEmbedding%sCollectionSharder"):format(c.sequence and "" or "Bag")]
  for i, t in ipairs(configs) do
    entries[t.name] = kinds[c.kind](i, world:size(), c.cache
      and { compute_kernel = "fused_uvm_caching", cache_params = c.cache } or { compute_kernel = c.kernel })
  end
  return sharder { gradient_division = false, qcomm_codecs_registry = c.codecs }:shard(module,
    plan.EmbeddingModuleShardingPlan(entries), peri.ShardingEnv.from_process_group(world), device, "mc")
end

--- The parts of a result: a list of { values, feature or nil }.
local function parts_of(c, result)
  if not c.sequence then return { { result:values() } } end
  local list = {}
  for _, f in ipairs(FEATURES) do list[#list + 1] = { result[f]:values(), f } end
  return list
end

local function gradient(step, i, shape, device)
  return peri.Tensor.uniform(shape, -1, 1, 31 * step + i, 0, "f32", device)
end

local function texts(t)
  local memory, n = t:read()
  local list = {}
  for i = 0, n - 1 do list[i + 1] = tostring(memory[i]) end
  return list
end

--- What a lookup gave on samples [from, to), compared with the whole one's; then the backward pass.
local function compare(c, step, want, got, before, from, to, device)
  local whole, mine, loss = parts_of(c, want.result), parts_of(c, got.result), nil
  for i, part in ipairs(mine) do
    local first = part[2] and before[part[2]] or from
    local n = part[1]:size(1)
    assert.same(want.values[i]:slice(1, first, first + n):to_list(), part[1]:to_list(),
      ("step %d, output %d"):format(step, i))
    if got.trains then
      local shape = whole[i][1]:shape()
      local term = (part[1] * gradient(step, i, shape, device):slice(1, first, first + n):contiguous()):sum()
      loss = loss and loss + term or term
    end
  end
  local rows = got.remapped
  assert.same(rows:keys(), FEATURES)
  for _, f in ipairs(FEATURES) do
    local own, theirs = rows:get(f):values(), want.remapped:get(f):values()
    assert.same(texts(theirs:slice(1, before[f], before[f] + own:size(1))), texts(own),
      ("step %d, rows of %s"):format(step, f))
  end
  assert.equal(to - from, rows:stride())
  if loss then loss:backward() end
end

--- One step of the unsharded collection.
local function whole_step(c, module, step, device, trains)
  local result, remapped = module(batch(step, 0, SAMPLES, device, c.weighted))
  local parts, loss = parts_of(c, result), nil
  local values = util.map(parts, function(p) return p[1]:detach() end)
  for i, p in ipairs(parts) do
    local term = (p[1] * gradient(step, i, p[1]:shape(), device)):sum()
    loss = loss and loss + term or term
  end
  if trains then loss:backward() end
  return { result = result, values = values, remapped = remapped }
end

local function same_states(whole, module)
  local want, got = peri.shard.gather_state_dict(whole:state_dict()), peri.shard.gather_state_dict(module:state_dict())
  assert.same(util.keys(want), util.keys(got))
  for name, t in util.ordered(want) do assert.same(texts(t), texts(got[name]), name) end
  local a, b = whole:embedding_module():fused_optimizer(), module:fused_optimizer()
  local x, y = peri.shard.gather_state_dict(a:state_dict()), peri.shard.gather_state_dict(b:state_dict())
  local prefix = "_embedding_module."
  for name, states in util.ordered(x.state) do
    for key, t in util.ordered(states) do
      if peri.Tensor.is(t) then assert.same(texts(t), texts(y.state[prefix .. name][key]), name .. " " .. key) end
    end
  end
end

--- Samples of this rank.
local function share_of(world, n)
  return math.floor(SAMPLES * world:rank() / n), math.floor(SAMPLES * (world:rank() + 1) / n)
end

local function run(c, world, device, n)
  local from, to = share_of(world, n)
  local whole, module = collection_of(c, device), sharded_of(c, world, device)
  for step = 1, STEPS do
    local trains = step ~= 5
    whole:train(trains)
    module:train(trains)
    local want = whole_step(c, whole, step, device, trains)
    local mine, before = batch(step, from, to, device, c.weighted)
    local result, remapped = module(mine)
    result = util.resolve(result)
    compare(c, step, want, { result = result, remapped = util.resolve(remapped), trains = trains }, before, from, to,
      device)
  end
  same_states(whole, module)
  local sums = module:statistics()
  for name, s in util.ordered(whole:statistics()) do
    for _, key in ipairs { "ids", "hits", "missed", "inserted", "evicted", "collisions", "occupied", "rows" } do
      assert.equal(s[key], sums[name][key], name .. " " .. key)
    end
    assert.is_true(sums[name].evicted > 0)
  end
  return whole, module
end

local sizes = { sizes = worlds.mpirun and { 2, 4 } or { 1, 2, 3, 5, 8 } }
describe("managed collision over ranks is that of one:", function()
  for _, kind in ipairs { "row_wise", "table_wise", "mixed" } do
    worlds.each("pooled, " .. kind, function(world, device, n) run({ kind = kind }, world, device, n) end,
      kind == "row_wise" and sizes or { sizes = { 2, worlds.mpirun and 4 or 3 } })
    worlds.each("rows of ids, " .. kind, function(world, device, n)
      run({ kind = kind, sequence = true }, world, device, n)
    end,
      { sizes = worlds.mpirun and { 2, 4 } or { 1, 3 } })
  end
  for title, c in util.ordered {
    ["weighted, hash maps"] = { weighted = true, module = "hash", optimizer = "rowwise_adagrad" },
    ["dropped misses"] = { on_miss = "drop" }, ["dropped misses of sequences"] = { on_miss = "drop", sequence = true },
    ["a policy of Lua"] = { module = "own" }, ["hash maps of sequences"] = { module = "hash", sequence = true },
    ["in files"] = { cache = { load_factor = 1 } }, ["in the host's memory"] = { kernel = "fused_uvm" },
    ["ids hashed first"] = { module = "hashed" },
  } do
    c.kind = "row_wise"
    worlds.each(title, function(world, device, n) run(c, world, device, n) end, { sizes = { 3 } })
  end
end)

-- -- batches in flight ------------------------------------------------------------------------------------------------

--- Ids of the next batch leave, and rows of it are prefetched, before this one's backward pass.
local function in_flight(c, world, device, n)
  local from, to = share_of(world, n)
  local whole, module = collection_of(c, device), sharded_of(c, world, device)
  local mine, before = batch(1, from, to, device)
  local ids = module:input_dist(mine):wait()
  for step = 1, STEPS do
    local want = whole_step(c, whole, step, device, true)
    local result, remapped = module:compute_and_output_dist(ids)
    assert.is_true(peri.shard.ManagedCollisionCollectionAwaitable.is(remapped))
    local mine_before = before
    if step < STEPS then
      mine, before = batch(step + 1, from, to, device)
      ids = module:input_dist(mine):wait()
      module:prefetch(ids) -- learns, and evicts rows that the batch above still updates
    end
    compare(c, step, want, { result = util.resolve(result), remapped = util.resolve(remapped), trains = true },
      mine_before, from, to, device)
  end
  same_states(whole, module)
end

describe("managed collision with batches in flight", function()
  for _, cache in ipairs { false, { load_factor = 1 }, { load_factor = 0.7 } } do
    for _, kind in ipairs { "row_wise", "table_wise" } do
      worlds.each(("%s, %s"):format(kind, cache and "in files " .. cache.load_factor or "in memory"),
        function(world, device, n)
        in_flight({ kind = kind, cache = cache or nil }, world, device, n)
      end, { sizes = { 2 } })
    end
  end
end)

-- -- state ------------------------------------------------------------------------------------------------------------

--- Train on `n` simulated ranks from a state (nil: none) for some steps; returns the whole state of module and
--- optimizer, and the outputs.
local function stretch(c, n, first, last, state)
  local out
  peri.dist.sim.run(n, function(_, world)
    local from, to = share_of(world, n)
    local module = sharded_of(c, world, "cpu")
    if state then
      module:load_state_dict(state.module)
      module:fused_optimizer():load_state_dict(state.optimizer)
    end
    for step = first, last do
      local mine, before = batch(step, from, to, "cpu")
      local result = util.resolve((module(mine)))
      local parts = parts_of(c, result)
      local loss
      for i, p in ipairs(parts) do
        local first_row = p[2] and before[p[2]] or from
        local total = p[2] and 0 or SAMPLES
        for s = 1, p[2] and SAMPLES or 0 do total = total + #draw(step)[p[2]][s] end
        local grad = gradient(step, i, { total, p[1]:size(2) }, "cpu")
        local term = (p[1] * grad:slice(1, first_row, first_row + p[1]:size(1)):contiguous()):sum()
        loss = loss and loss + term or term
      end
      loss:backward()
    end
    local whole = { module = peri.shard.gather_state_dict(module:state_dict()),
      optimizer = peri.shard.gather_state_dict(module:fused_optimizer():state_dict()) }
    if world:rank() == 0 then out = whole end
    world:barrier():wait()
  end, { device = "cpu" })
  return out
end

local function flat(dict, prefix, list)
  for name, x in util.ordered(dict) do
    local path = prefix .. "/" .. tostring(name)
    if peri.Tensor.is(x) then list[path] = texts(x)
    elseif type(x) == "table" and getmetatable(x) == nil then flat(x, path, list)
    else list[path] = tostring(x) end
  end
  return list
end

describe("maps in a state_dict", function()
  for _, c in ipairs { { kind = "row_wise" }, { kind = "row_wise", module = "hash", sequence = true } } do
    it("go on under another number of ranks as if nothing had been: " .. (c.module or "lfu"), function()
      if worlds.mpirun then return end
      for _, from in ipairs { 2, 1 } do
        local half = stretch(c, from, 1, 4)
        for _, name in ipairs { "a", "b" } do
          local found = false
          for key in pairs(half.module) do
            found = found or key:find("^_managed_collision_collection%._managed_collision_modules%." .. name
              .. "%._") ~= nil
          end
          assert.is_true(found)
        end
        local want = flat(stretch(c, from, 5, 8, half), "", {})
        for _, to in ipairs(from == 2 and { 1, 3, 5 } or { 4 }) do
          assert.same(want, flat(stretch(c, to, 5, 8, half), "", {}), ("%d -> %d"):format(from, to))
        end
      end
    end)
  end

  worlds.each("come from an unsharded collection that has learned, and go back", function(world, device, n)
    for _, c in ipairs { { kind = "row_wise" }, { kind = "mixed", module = "hash" } } do
      local whole = collection_of(c, device)
      for step = 1, 4 do whole_step(c, whole, step, device, true) end
      local module = sharded_of(c, world, device)
      module:copy_from(whole)
      same_states(whole, module)
      local other = collection_of(c, device)
      other:load_state_dict(peri.shard.gather_state_dict(module:state_dict()))
      for name, t in util.ordered(peri.shard.gather_state_dict(whole:state_dict())) do
        assert.same(texts(t), texts(peri.shard.gather_state_dict(other:state_dict())[name]), name)
      end
    end
    assert.is_true(n >= 1)
  end, { sizes = { 1, 3 } })
end)

-- -- models, mistakes -------------------------------------------------------------------------------------------------

describe("managed collision", function()
  worlds.each("is sharded by DistributedModelParallel", function(world, device)
    local c = {}
    local Model = peri.nn.Module:extend "Model"
    function Model:init() self.mc = collection_of(c, "cpu") end
    function Model:forward(batch_of) return (self.mc(batch_of)) end
    local model = peri.DistributedModelParallel { module = Model(), group = world, device = device,
      plan = plan.ShardingPlan { mc = { a = plan.row_wise(), b = plan.table_wise(0) } } }
    local kt = util.resolve(model((batch(1, 0, SAMPLES, device))))
    assert.same({ SAMPLES, 3 * DIM }, kt:values():shape())
    local inner = model.module.mc
    assert.is_true(peri.shard.ShardedManagedCollisionEmbeddingBagCollection.is(inner))
    assert.is_true(peri.shard.ShardedManagedCollisionCollection.is(inner:managed_collision_collection()))
    assert.is_true(peri.shard.ManagedCollisionEmbeddingBagCollectionContext.is(inner:create_context()))
    model:eval()
    local seen = inner:statistics()
    util.resolve(model((batch(2, 0, SAMPLES, device))))
    for name, s in util.ordered(inner:statistics()) do
      assert.equal(seen[name].inserted, s.inserted)
      assert.is_true(s.ids > seen[name].ids)
    end
    local sequence = sharded_of({ kind = "row_wise", sequence = true }, world, device)
    assert.is_true(peri.shard.ShardedManagedCollisionEmbeddingCollection.is(sequence))
    assert.is_true(peri.shard.ManagedCollisionEmbeddingCollectionContext.is(sequence:create_context()))
    assert.is_true(peri.shard.ManagedCollisionCollectionContext.is(sequence:create_context()))
  end, { sizes = { 2 } })

  local function fails(pattern, f, ...)
    local ok, err = pcall(f, ...)
    assert.is_false(ok)
    assert.truthy(tostring(err):find(pattern), ("'%s' in: %s"):format(pattern, tostring(err)))
  end

  it("is cut between buckets (create_mc_sharding)", function()
    local module, env = modules.lfu(configs[1], "default"), { world_size = 3, local_size = 3 }
    local cut = peri.shard.create_mc_sharding(plan.row_wise(), module, env)
    assert.same({ 14, 15, 8 }, cut.sizes) -- buckets of 7, 7, 8, 7 and 8 rows: two, two, one
    assert.same({ 0, 1, 2 }, cut.ranks)
    local whole = plan.table_wise(1)
    assert.equal(whole, peri.shard.create_mc_sharding(whole, module, env))
  end)

  worlds.each("refuses what it cannot do, by name", function(world, device)
    kinds.wrong = function(i, n)
      return i == 1 and plan.row_wise { ranks = { 0, n - 1 }, sizes = { 10, 27 } } or plan.table_wise(0)
    end
    fails("table 'a': row_wise shard 1 begins at row 10; .* begins at row 7, the next at row 14", sharded_of,
      { kind = "wrong" }, world, device)
    kinds.columns = function(i, n) return i == 1 and plan.column_wise { ranks = { n - 1 } } or plan.table_wise(0) end
    fails("table 'a' has raw ids and sharding type column_wise, allowed: table_wise, row_wise", sharded_of,
      { kind = "columns" }, world, device)
    kinds.dense = function() return plan.row_wise { compute_kernel = "dense" } end
    fails("compute kernel dense", sharded_of, { kind = "dense" }, world, device)
    for _, name in ipairs { "ManagedCollisionCollectionSharder", "ManagedCollisionEmbeddingBagCollectionSharder",
      "ManagedCollisionEmbeddingCollectionSharder" } do
      assert.same({ "row_wise", "table_wise" }, peri.shard[name] {}:sharding_types())
    end
    local own = collection_of({ sequence = true }, "cpu")
    fails("raw ids and use_index_dedup", peri.shard.ShardedManagedCollisionEmbeddingCollection, {
      tables = own:embedding_module():embedding_configs(), plan = { a = plan.row_wise(), b = plan.row_wise() },
      group = world, fused_params = { optimizer = "sgd" },
      managed_collision_collection = own:managed_collision_collection(), use_index_dedup = true })
  end, { sizes = { 2 }, devices = { "cpu" } })

  worlds.each("says what is wrong on every rank, and nobody hangs", function(world, device, n)
    local from, to = share_of(world, n)
    local module = sharded_of({ kind = "row_wise", on_miss = "error" }, world, device)
    local ok, err = pcall(function() return util.resolve((module((batch(1, from, to, device))))):values():to_list() end)
    assert.is_false(ok)
    assert.truthy(tostring(err):find "table '[ab]': id .*rank %d", tostring(err))
  end, { sizes = { 3 } })

  worlds.each("is in training or in evaluation on all ranks", function(world, device, n)
    local from, to = share_of(world, n)
    local module = sharded_of({ kind = "row_wise" }, world, device)
    module:train(world:rank() ~= 1)
    local ok, err = pcall(function() return util.resolve((module((batch(1, from, to, device))))):values():to_list() end)
    assert.is_false(ok)
    assert.truthy(tostring(err):find "in evaluation", tostring(err))
  end, { sizes = { 2 }, only = "sim" })
end)

describe("managed collision in training", function()
  --- The state after a few steps of a pipeline: as values, and as a state_dict. loaded: one that is loaded after step
  --- 2.
  local function trained(name, world, device, n, module, loaded)
    local Model = peri.nn.Module:extend "Model"
    function Model:init()
      self.mc = collection_of({ module = module }, "cpu")
      self.over = peri.nn.Linear { in_features = 3 * DIM, out_features = 1 }
      for _, p in ipairs(self.over:parameters()) do p:detach():fill(0.25) end
    end
    function Model:forward(features)
      local over = self.over((self.mc(features)):values())
      return (over * over):sum()
    end
    local model = peri.DistributedModelParallel { module = Model(), group = world, device = device,
      gradient_division = false,
      plan = plan.ShardingPlan { mc = { a = plan.row_wise(),
        b = plan.table_wise(n - 1, { compute_kernel = "fused_uvm_caching", cache_params = { load_factor = 0.8 } }) } } }
    local from, to = share_of(world, n)
    local step = 0
    local pipeline = peri[name] { model = model, optimizer = peri.nn.optim.SGD { params = model:dense_parameters(),
      lr = 0.1 } }
    for _, done in pipeline:run(function()
      step = step + 1
      if step <= STEPS then return (batch(step, from, to, device)) end
    end) do
      if done == 2 and loaded then model:load_state_dict(loaded) end
    end
    local state = peri.shard.gather_state_dict(model:state_dict())
    return flat(state, "", {}), state
  end

  worlds.each("is the same in every pipeline", function(world, device, n)
    for _, module in ipairs { "own", "hash" } do
      local want, state = trained("TrainPipelineBase", world, device, n, module)
      local want_loaded = trained("TrainPipelineBase", world, device, n, module, state)
      for _, name in ipairs { "TrainPipelineSparseDist", "PrefetchTrainPipelineSparseDist",
        "TrainPipelineFusedSparseDist", "TrainPipelineSparseDistLite" } do
        assert.same(want, trained(name, world, device, n, module), name .. ", " .. module)
        if name:match "^Prefetch" then -- they were fetched for ids that the former map remapped
          assert.error_matches(function() trained(name, world, device, n, module, state) end,
            "state was loaded into module 'mc', whose " .. "ids of batch 2 were remapped before and whose rows come "
              .. "from files already; load it before the first step", nil, true)
        else
          assert.same(want_loaded, trained(name, world, device, n, module, state), name .. ", loaded, " .. module)
        end
      end
    end
  end, { sizes = { 2 } })

  worlds.each("travels in codecs, and takes no more memory from step to step", function(world, device, n)
    local from, to = share_of(world, n)
    local codecs = peri.dist.codec.get_qcomm_codecs_registry { forward = "FP16", backward = "FP16" }
    local module, before = sharded_of({ kind = "row_wise", codecs = codecs }, world, device), nil
    for step = 1, 16 do
      peri.scope(function()
        local result, remapped = module((batch(step, from, to, device)))
        util.resolve(remapped)
        util.resolve(result):values():sum():backward()
      end)
      if step == 10 or step == 16 then
        collectgarbage()
        collectgarbage()
      end
      world:barrier():wait()
      if step == 10 then before = peri.ffi.C.peri_mem_objects() end
    end
    assert.is_true(peri.ffi.C.peri_mem_objects() <= before + 8) -- the other rank may be on its way
    world:barrier():wait()
  end, { sizes = { 2 }, only = "sim" })
end)
