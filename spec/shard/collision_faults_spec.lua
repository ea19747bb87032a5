-- Managed collision over ranks: what one rank does otherwise, plans without a table, what input_hash_func returns,
-- time, copies.
-- mpirun: 2
local peri = require "perilune"
local worlds = require "spec.support.worlds"
local util = require "perilune.util"
local embed, plan = peri.embed, peri.plan

local sizes = { sizes = { 2 }, devices = { "cpu" } }
local classes = {
  ManagedCollisionEmbeddingBagCollection = { peri.EmbeddingBagConfig, function(out) return out:values() end },
  ManagedCollisionEmbeddingCollection = { peri.EmbeddingConfig, function(out) return out.f:values() end },
}

local function lfu() return embed.LFU_EvictionPolicy {} end

--- A sharded collection of the table "t", 16 rows in 4 buckets, 8 on each of two ranks. args: of the module; `class`,
--- `plan`, `returns`.
local function collection(world, device, args)
  local a = args or {}
  local name = a.class or "ManagedCollisionEmbeddingBagCollection"
  local module = a.ttl and embed.HashZchManagedCollisionModule { zch_size = 16, total_num_buckets = 4, on_miss = "drop",
    eviction_policy_name = "SINGLE_TTL_EVICTION", eviction_config = { features = { "f" }, single_ttl = a.ttl } }
    or embed.MCHManagedCollisionModule { zch_size = 16, buckets = 4, eviction_interval = 1, eviction_policy = a.policy
      or lfu(), input_hash_func = a.input_hash_func }
  local tables = { classes[name][1] { name = "t", num_embeddings = 16, embedding_dim = 4, feature_names = { "f" } } }
  return peri.shard["Sharded" .. name] { tables = tables, plan = a.plan or { t = plan.row_wise() }, seed = 1,
    group = world, device = device, fused_params = { optimizer = "rowwise_adagrad", learning_rate = 0.5 },
    return_remapped_features = a.returns,
    managed_collision_collection = embed.ManagedCollisionCollection { managed_collision_modules = { t = module },
      embedding_configs = tables } }
end

local function batch(ids, device)
  return peri.KeyedJaggedTensor { keys = { "f" }, values = peri.tensor(ids, "i64", device), lengths = { #ids },
    device = device }
end

local function fails(pattern, f, ...)
  local ok, err = pcall(f, ...)
  assert.is_false(ok)
  assert.truthy(tostring(err):find(pattern), ("'%s' in: %s"):format(pattern, tostring(err)))
end

local function look(module, ids, device, name)
  return classes[name or "ManagedCollisionEmbeddingBagCollection"][2](util.resolve((module(batch(ids, device)))))
end

describe("managed collision over ranks", function()
  worlds.each("names the tables of a plan that lacks one", function(world, device)
    fails("table 't' is not in the plan; planned tables: u", collection, world, device,
      { plan = { u = plan.row_wise() } })
  end, sizes)

  worlds.each("is in no model by itself", function(world, device)
    local Model = peri.nn.Module:extend "Model"
    function Model:init()
      self.maps = embed.ManagedCollisionCollection {
        managed_collision_modules = { t = embed.MCHManagedCollisionModule { zch_size = 16, eviction_interval = 1,
          eviction_policy = lfu() } },
            embedding_configs = { peri.EmbeddingBagConfig { name = "t", num_embeddings = 16, embedding_dim = 4,
              feature_names = { "f" } } } }
    end
    fails("module 'maps', a ManagedCollisionCollection, looks nothing up; give it to a "
      .. "ManagedCollisionEmbeddingBagCollection", function()
      peri.DistributedModelParallel { module = Model(), group = world, device = device }
    end)
  end, sizes)

  worlds.each("tells all ranks that the policy of one has failed", function(world, device)
    local module = collection(world, device, { policy = embed.MCHEvictionPolicy { score = function(count)
      if world:rank() == 1 then error "out of order" end
      return count
    end } })
    fails("table 't': the eviction policy: .*out of order", function()
      look(module, { 1, 2, 3, 4, 5, 6 }, device):to_list()
    end)
  end, { sizes = { 2 }, devices = { "cpu" }, only = "sim" })

  worlds.each("returns remapped features on all ranks or on none", function(world, device)
    fails("rank 1 has return_remapped_features false where rank 0 has true %(table 't'%)", function()
      look(collection(world, device, { returns = world:rank() == 0 }), { 1 }, device):to_list()
    end)
  end, { sizes = { 2 }, devices = { "cpu" }, only = "sim" })

  worlds.each("wants of input_hash_func as many ids as it gave it", function(world, device)
    local module = collection(world, device, { input_hash_func = function(ids) return ids:slice(1, 0, 1) end })
    fails("MCHManagedCollisionModule of table 't': input_hash_func returned tensor i64 %[1%].*, wanted a tensor of 3 "
      .. "ids", function()
      look(module, { 1, 2, 3 }, device):to_list()
    end)
  end, { sizes = { 2 }, devices = { "cpu" }, only = "sim" })

  worlds.each("takes the time from its caller, and counts steps", function(world, device)
    local module = collection(world, device, { ttl = 5, returns = true })
    local maps, many = module:managed_collision_collection(), {}
    for i = 1, 40 do many[i] = i * 7 end
    maps:set_time(100)
    look(module, many, device):to_list()
    local full = module:statistics().t
    assert.same({ 16, 1 }, { full.occupied, full.iterations })
    for _, case in ipairs { { 105, 0 }, { 106, 16 } } do -- ids of 100 are over after 105
      maps:set_time(case[1])
      look(module, util.map(many, function(id) return id + 1000 end), device):to_list()
      assert.equal(case[2], module:statistics().t.evicted)
    end
    assert.equal(3, module:statistics().t.iterations)
    fails("now is 1.5, wanted a whole number", maps.set_time, maps, 1.5)
    local sorted = collection(world, device):managed_collision_collection()
    fails("no table has a HashZchManagedCollisionModule", sorted.set_time, sorted, 1)
  end, sizes)

  worlds.each("has the same time on all ranks", function(world, device)
    local module = collection(world, device, { ttl = 5, returns = true })
    module:set_time(100)
    look(module, { 1, 2, 3 }, device):to_list()
    assert.same({ t = 16 - module:statistics().t.occupied }, module:open_slots())
    if world:rank() == 1 then module:managed_collision_collection():set_time(101) end
    fails("rank 1 has time %(set_time%) 101 where rank 0 has 100 %(managed collision of table 't'%)", function()
      look(module, { 1, 2, 3 }, device):to_list()
    end)
  end, { sizes = { 2 }, only = "sim" })

  for name in util.ordered(classes) do
    worlds.each("is copied, maps and all: " .. name, function(world, device)
      local module = collection(world, device, { class = name, returns = true })
      for step = 1, 3 do look(module, { step, 2 * step, 70 - world:rank() }, device, name):sum():backward() end
      local copy = peri.embed.copy_to_device(module)
      assert.equal(3, copy:statistics().t.iterations)
      local ids = { 1, 2, 3, 4, 6, 69, 70, 5 }
      module:eval()
      copy:eval()
      local want, got = look(module, ids, device, name):to_list(), look(copy, ids, device, name):to_list()
      assert.same(want, got)
      copy:train()
      for _ = 1, 3 do
        look(copy, { 900, 901, 902, 903, 904, 905, 906, 907, 908, 909 }, device, name):sum():backward()
      end
      assert.same(want, look(module, ids, device, name):to_list()) -- it shares nothing
      assert.is_true(copy:statistics().t.inserted > 0)
    end, sizes)
  end

  worlds.each("loads all of a state_dict or nothing, on all ranks", function(world, device)
    local trained, module = collection(world, device), collection(world, device)
    look(trained, { 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 }, device):sum():backward()
    local good, prefix = peri.shard.gather_state_dict(trained:state_dict()),
      "_managed_collision_collection._managed_collision_modules.t."
    local function texts(state)
      return util.map(peri.shard.gather_state_dict(state), function(t)
        return table.concat(t:to "f32":to_list(), " ")
      end)
    end
    local function bad(pattern, name, t)
      local state, before = util.copy(good), texts(module:state_dict())
      state[prefix .. name] = t
      fails(pattern, module.load_state_dict, module, state)
      assert.same(before, texts(module:state_dict()))
    end
    local rows = good[prefix .. "_mch_remapped_ids_mapping"]:to_list()
    for i = 13, 16 do rows[i] = 12 end -- rows of the last bucket, which rank 1 has
    bad("rank 1 of group .*table 't', bucket 3: .*row 12", "_mch_remapped_ids_mapping", peri.tensor(rows, "i64"))
    bad("_mch_sorted_raw_ids' is f32, wanted i64", "_mch_sorted_raw_ids",
      good[prefix .. "_mch_sorted_raw_ids"]:to "f32")
    module:load_state_dict(good)
    assert.same(texts(trained:state_dict()), texts(module:state_dict()))
  end, sizes)

  worlds.each("by itself is copied too, with its time", function(world, device)
    local t = peri.EmbeddingBagConfig { name = "t", num_embeddings = 16, embedding_dim = 4, feature_names = { "f" } }
    local module = embed.HashZchManagedCollisionModule { zch_size = 16, total_num_buckets = 4, on_miss = "drop",
      eviction_policy_name = "SINGLE_TTL_EVICTION", eviction_config = { features = { "f" }, single_ttl = 5 } }
    local sharded = peri.shard.ShardedManagedCollisionCollection { plan =
      plan.EmbeddingModuleShardingPlan { t = plan.row_wise { ranks = { 0, 1 }, sizes = { 8, 8 } } }, group = world,
      device = device, managed_collision_collection =
        embed.ManagedCollisionCollection { managed_collision_modules = { t = module }, embedding_configs = { t } } }
    sharded:set_time(100)
    local many = {}
    for i = 1, 40 do many[i] = i * 7 end
    local want = sharded(batch(many, device)):values():to_list()
    local copy = peri.embed.copy_to_device(sharded)
    for _ = 1, 9 do assert.same(want, copy(batch(many, device)):values():to_list()) end -- at 100, however many steps
    copy:set_time(200)
    copy(batch({ 1001, 1002, 1003 }, device))
    assert.is_true(copy:statistics().t.evicted > 0)
    assert.equal(0, sharded:statistics().t.evicted)
    if world:rank() == 1 then copy:set_time(-1) end
    fails("table 't': rank %d has time %-?%d+, rank %d has %-?%d+ %(set_time", copy, batch({ 1 }, device))
    fails("now is 2147483648, allowed: 0 to 2147483647", copy.set_time, copy, 2 ^ 31)
  end, sizes)
end)
