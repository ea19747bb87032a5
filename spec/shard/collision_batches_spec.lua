-- Managed collision over ranks in every kind of batch: variable, weighted, in codecs, with dedup switched on, by itself
-- (remap only), after an error. The unsharded collection learns from the batches of all ranks as one; in evaluation it
-- then says what each rank's batch gives.
-- mpirun: 2
-- machines: 2,2
local ffi = require "ffi"
local peri = require "perilune"
local worlds = require "spec.support.worlds"
local util = require "perilune.util"
local embed, plan = peri.embed, peri.plan

local FEATURES, STEPS, DIM = { "f", "g", "h" }, worlds.mpirun and 4 or 6, 4
local tables = { { name = "a", rows = 37, features = { "f", "g" }, buckets = 5 },
  { name = "b", rows = 16, features = { "h" }, buckets = 3 } }
local MIN = -9223372036854775807LL - 1
local strange = { -1LL, MIN, 9223372036854775806LL, 0LL }

local modules = {
  lfu = function(t, on_miss)
    return embed.MCHManagedCollisionModule { zch_size = t.rows, buckets = t.buckets, eviction_interval = 2,
      on_miss = on_miss, eviction_policy = embed.LFU_EvictionPolicy {} }
  end,
  own = function(t, on_miss)
    return embed.MCHManagedCollisionModule { zch_size = t.rows, buckets = t.buckets, eviction_interval = 2,
      on_miss = on_miss, eviction_policy = embed.MCHEvictionPolicy { score = function(count, last, now)
        return count - (now - last) * 3
      end } }
  end,
  hash = function(t, on_miss)
    return embed.HashZchManagedCollisionModule { zch_size = t.rows, total_num_buckets = t.buckets, max_probe = 6,
      on_miss = on_miss, output_segments = t.name == "a" and { 0, 7, 14, 22, 29, 37 } or { 0, 5, 10, 16 },
      eviction_policy_name = "LRU_EVICTION" }
  end,
}

local function mcc_of(c, configs)
  local maps = {}
  for _, t in ipairs(tables) do maps[t.name] = modules[c.module or "lfu"](t, c.on_miss or "default") end
  return embed.ManagedCollisionCollection { managed_collision_modules = maps, embedding_configs = configs }
end

local function configs_of(c)
  return util.map(tables, function(t)
    return (c.sequence and peri.EmbeddingConfig or peri.EmbeddingBagConfig) { name = t.name, num_embeddings = t.rows,
      embedding_dim = DIM, feature_names = t.features }
  end)
end

local function collection_of(c, device)
  local configs = configs_of(c)
  local args = { tables = configs, seed = 5, device = device, fused_params = { optimizer = "sgd", learning_rate = 0.1,
    exact = true }, is_weighted = c.weighted or nil }
  if c.sequence then
    return embed.ManagedCollisionEmbeddingCollection { embedding_collection = peri.EmbeddingCollection(args),
      managed_collision_collection = mcc_of(c, configs), return_remapped_features = true }
  end
  return embed.ManagedCollisionEmbeddingBagCollection { embedding_bag_collection = peri.EmbeddingBagCollection(args),
    managed_collision_collection = mcc_of(c, configs), return_remapped_features = true }
end

local function plan_of(kind, n)
  return plan.EmbeddingModuleShardingPlan { a = kind == "table_wise" and plan.table_wise(n - 1) or plan.row_wise(),
    b = kind == "row_wise" and plan.row_wise() or plan.table_wise(0) }
end

local function sharded_of(c, world, device)
  local sharder = peri.shard[("ManagedCollisionEmbedding%sCollectionSharder"):format(c.sequence and "" or "Bag")]
  return sharder { gradient_division = false, qcomm_codecs_registry = c.codecs }:shard(collection_of(c, "meta"),
    plan_of(c.kind, world:size()), peri.ShardingEnv.from_process_group(world), device, "mc")
end

--- Bags of a rank: by feature, lists of ids that fade in and out. Variable: features differ in number. The last rank
--- has none of step 2.
local function bags_of(c, step, rank, n)
  local x = step * 977 + rank * 31 + 3
  local function below(k)
    x = x * 16807 % 2147483647
    return x % k
  end
  local bags = {}
  for k, f in ipairs(FEATURES) do
    bags[f] = {}
    local none = rank == n - 1 and n > 1 and step == 2 and not c.variable
    for s = 1, none and 0 or c.variable and 1 + below(3) or 3 do
      bags[f][s] = {}
      for i = 1, below(5) do
        local id = below(20)
        bags[f][s][i] = c.ids and c.ids(id) or id < 2 and strange[(id + step + k) % 4 + 1]
          or (step * 4 + id) * 0x9E3779B97F4A7C15LL
      end
    end
  end
  return bags
end

--- The batch of ranks [from, to].
local function batch_of(c, step, from, to, n, device)
  local ids, lengths, weights, strides = {}, {}, {}, {}
  for k, f in ipairs(FEATURES) do
    strides[k] = { 0 }
    for rank = from, to do
      for s, bag in ipairs(bags_of(c, step, rank, n)[f]) do
        lengths[#lengths + 1], strides[k][1] = #bag, strides[k][1] + 1
        for i, id in ipairs(bag) do ids[#ids + 1], weights[#weights + 1] = id, (s * 7 + i) % 5 / 4 end
      end
    end
  end
  local most = 0
  for _, s in ipairs(strides) do most = math.max(most, s[1]) end
  local places = {}
  for k, s in ipairs(strides) do
    places[k] = {}
    for i = 1, 4 do places[k][i] = (i * 5) % s[1] end
  end
  local memory = ffi.new("int64_t[?]", math.max(#ids, 1), ids)
  return peri.KeyedJaggedTensor { keys = FEATURES, values = peri.Tensor.from_memory(memory, { #ids }, "i64", device),
    lengths = peri.tensor(lengths, "i32", device, { #lengths }), stride = not c.variable and most or nil,
    stride_per_key_per_rank = c.variable and strides or nil,
    inverse_indices = c.variable and { FEATURES, peri.tensor(places, "i64", device) } or nil,
    weights = c.weighted and peri.tensor(weights, "f32", device, { #weights }) or nil }
end

local function texts(t)
  local memory, n = t:read()
  local list = {}
  for i = 0, n - 1 do list[i + 1] = tostring(memory[i]) end
  return list
end

local function numbers(c, result)
  if not c.sequence then return result:values():to_list() end
  return util.map(FEATURES, function(f) return result[f]:values():to_list() end)
end

local function near(want, got, by)
  if type(want) == "number" then return assert.near(want, got, by) end
  assert.equal(#want, #got)
  for i, x in ipairs(want) do near(x, got[i], by) end
end

--- Steps of both; `same(want, got)` compares what they gave.
local function run(c, world, device, n)
  local whole, module, rank = collection_of(c, device), sharded_of(c, world, device), world:rank()
  local evicted = 0
  for step = 1, STEPS do
    whole:train()
    whole(batch_of(c, step, 0, n - 1, n, device))
    whole:eval()
    local mine = batch_of(c, step, rank, rank, n, device)
    local want, want_rows = whole(mine)
    local got, got_rows = module(mine)
    local by = c.codecs and 2e-3 or nil
    got = util.resolve(got)
    if by then
      near(numbers(c, want), numbers(c, got), by)
    else
      assert.same(numbers(c, want), numbers(c, got), "step " .. step)
    end
    assert.same(texts(want_rows:values()), texts(util.resolve(got_rows):values()), "rows of step " .. step)
  end
  local sums = module:statistics()
  for name, s in util.ordered(whole:statistics()) do
    assert.equal(s.inserted, sums[name].inserted, name)
    assert.equal(s.occupied, sums[name].occupied, name)
    evicted = evicted + sums[name].evicted
  end
  assert.is_true(c.ids ~= nil or evicted > 0)
end

local half = peri.dist.codec.get_qcomm_codecs_registry { forward = "FP16", backward = "FP16" }
local sizes = { sizes = worlds.mpirun and { 2, 4 } or { 2, 3 }, devices = worlds.mpirun and { "cpu" } or nil }
describe("managed collision over ranks, beside one that sees all ranks' ids at once:", function()
  for title, c in util.ordered {
    ["variable batches"] = { kind = "row_wise", variable = true }, ["variable batches, probing"] = { kind = "mixed",
      variable = true, module = "hash" },
    ["weighted bags"] = { kind = "mixed", weighted = true }, ["FP16 on the way"] = { kind = "row_wise", codecs = half },
    ["FP16 on the way, table-wise sequences"] = { kind = "table_wise", codecs = half, sequence = true,
      module = "hash" },
    ["all ids equal"] = { kind = "row_wise", ids = function() return MIN end },
  } do
    worlds.each(title, function(world, device, n) run(c, world, device, n) end, sizes)
  end

  worlds.each("sequences while dedup is switched on: maps see every id", function(world, device, n)
    local before = peri.shard.get_ec_index_dedup()
    peri.shard.set_ec_index_dedup(true)
    local ok, err = pcall(run, { kind = "row_wise", sequence = true }, world, device, n)
    world:barrier():wait()
    peri.shard.set_ec_index_dedup(before)
    assert(ok, err)
  end, { sizes = { 2 }, only = "sim" })
end)

-- -- remap only -------------------------------------------------------------------------------------------------------

local function alone(c, world, device)
  local sharder = peri.shard.ManagedCollisionCollectionSharder {}
  return sharder:shard(mcc_of(c, configs_of(c)), plan_of(c.kind, world:size()),
    peri.ShardingEnv.from_process_group(world), device)
end

describe("a sharded ManagedCollisionCollection by itself", function()
  for _, c in ipairs { { kind = "row_wise" }, { kind = "table_wise", module = "own" },
    { kind = "mixed", module = "hash", weighted = true }, { kind = "row_wise", on_miss = "drop", variable = true } } do
    worlds.each(("gives the rows of the unsharded one: %s, %s"):format(c.kind, c.module or "lfu"),
      function(world, device, n)
      local whole, module, rank, turned = mcc_of(c, configs_of(c)), alone(c, world, device), world:rank(), 0
      for step = 1, STEPS do
        whole:train()
        whole(batch_of(c, step, 0, n - 1, n, device))
        whole:eval()
        local mine = batch_of(c, step, rank, rank, n, device)
        module:train()
        local want, got = whole(mine), module(mine)
        assert.same(texts(want:values()), texts(got:values()))
        assert.same(want:keys(), got:keys())
        assert.same(want:lengths():to_list(), got:lengths():to_list())
        if c.weighted then assert.same(want:weights():to_list(), got:weights():to_list()) end
        module:eval()
        assert.same(texts(want:values()), texts(module(mine):values()))
        local all, own = whole:evict(), module:evict()
        for name, t in util.ordered(all) do
          local list = {}
          for _, rows in ipairs(world:all_gather_object(own[name] and texts(own[name]) or {})) do
            for _, row in ipairs(rows) do list[#list + 1] = tonumber((row:gsub("LL$", ""))) end
          end
          table.sort(list)
          assert.same(util.map(texts(t), function(row) return tonumber((row:gsub("LL$", ""))) end), list, name)
          turned = turned + #list
        end
      end
      assert.is_true(turned > 0)
      local sums = module:statistics()
      for name, s in util.ordered(whole:statistics()) do assert.equal(s.inserted, sums[name].inserted, name) end
    end, sizes)
  end

  local function fails(pattern, f, ...)
    local ok, err = pcall(f, ...)
    assert.is_false(ok)
    assert.truthy(tostring(err):find(pattern), ("'%s' in: %s"):format(pattern, tostring(err)))
  end

  worlds.each("says on every rank what is wrong: other arguments", function(world, device, n)
    local module = alone({ kind = "row_wise", on_miss = world:rank() == 1 and "drop" or "row" }, world, device)
    fails("table 'a': rank %d has on_miss %w+, rank %d has on_miss %w+", module,
      batch_of({}, 1, world:rank(), world:rank(), n, device))
  end, { sizes = { 2 }, devices = { "cpu" }, only = "sim" })
  worlds.each("says on every rank what is wrong: other modes", function(world, device, n)
    local module = alone({ kind = "row_wise" }, world, device)
    module:train(world:rank() == 1)
    fails("rank %d is in %w+ mode, rank %d in %w+", module, batch_of({}, 1, world:rank(), world:rank(), n, device))
  end, { sizes = { 2 }, devices = { "cpu" }, only = "sim" })
  worlds.each("says on every rank what is wrong: an id without a row", function(world, device, n)
    local module = alone({ kind = "row_wise", on_miss = "error" }, world, device)
    fails("table '[ab]': id .* has no row.*rank %d", module, batch_of({}, 1, world:rank(), world:rank(), n, device))
  end, { sizes = { 2 }, devices = { "cpu" }, only = "sim" })
  worlds.each("says on every rank what is wrong: a feature that is missing", function(world, device, n)
    local module, mine = alone({ kind = "row_wise" }, world, device),
      batch_of({}, 1, world:rank(), world:rank(), n, device)
    fails("the batch has no feature 'h' %(of table 'b'%); those are: f, g; rank 1", module,
      world:rank() == 1 and mine:permute { 0, 1 } or mine)
    assert.same(mine:lengths():to_list(), module(mine):lengths():to_list()) -- the next batch is welcome
  end, { sizes = { 2 }, devices = { "cpu" } })
end)
