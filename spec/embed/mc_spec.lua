-- Managed collision of unsharded tables: training and evaluation, policies of one's own, rows that start again, state,
-- copies. (Arguments: mc_arguments_spec.lua.)
local peri = require "perilune"
local collision = require "spec.support.collision"

local embed, nn = peri.embed, peri.nn
local Model = collision.Model

local function mch(args)
  local a = { zch_size = 5, eviction_policy = embed.LFU_EvictionPolicy {}, eviction_interval = 1, buckets = 1,
    name = "t" }
  for name, value in pairs(args or {}) do a[name] = value end
  return embed.MCHManagedCollisionModule(a)
end

local function one_feature(ids, device)
  return peri.KeyedJaggedTensor { keys = { "f" }, values = peri.tensor(ids, "i64", device), lengths = { #ids },
    device = device }
end

local function rows(module, ids, device) return module(one_feature(ids, device)):values():to_list() end

for _, device in ipairs { "cpu", "opaque" } do
  describe("managed collision on " .. device, function()
    it("learns in training mode only", function()
      local module = mch { device = device }
      module:eval()
      assert.same({ 4, 4 }, rows(module, { 7, 8 }, device))
      assert.equal(0, module:statistics().iterations)
      module:train()
      assert.same({ 2, 3 }, rows(module, { 7, 8 }, device)) -- the best newcomers take the last free rows, in order
      module:eval()
      assert.same({ 4, 2 }, rows(module, { 9, 7 }, device))
      assert.equal(2, module:open_slots())
      assert.same({ 2 }, module:train():remap(one_feature({ 7 }, device)):values():to_list())
      assert.equal(1, module:statistics().iterations)
    end)

    it("counts what happened", function()
      local module = mch { device = device }
      rows(module, { 1, 2, 2, 3, 4, 5, 5 }, device) -- one of the ids that came once has no row
      local s = module:statistics()
      assert.equal(7, s.ids)
      assert.equal(4, s.inserted)
      assert.equal(4, s.occupied)
      assert.equal(6, s.hits)
      assert.equal(1, s.missed)
      assert.near(6 / 7, s.hit_rate, 1e-12)
      assert.near(4 / 5, s.occupancy, 1e-12)
      assert.equal(0, s.evicted)
      for _ = 1, 3 do rows(module, { 9, 9, 9 }, device) end
      assert.equal(1, module:statistics().evicted)
    end)

    it("has TorchRec's example of LFU", function()
      -- sorted ids 4, 5 with counts 10, 1 and rows 0, 1; then 3, 4, 5, 6 three times, 7 and 8 three times, 9, 10
      local module = mch { device = device }
      local state = { 4, 5 }
      local function i64(list)
        local text = peri.Tensor.empty({ #list }, "i64", "cpu")
        local memory = text:read()
        for i, x in ipairs(list) do memory[i - 1] = x end
        return text:write(memory):to(nil, device)
      end
      for i = 3, 5 do state[i] = collision.MAX end
      module:load_state_dict({ _mch_sorted_raw_ids = i64(state), _mch_counts = i64 { 10, 1, 0, 0, 0 },
        _mch_remapped_ids_mapping = i64 { 0, 1, 2, 3, 4 } }, false)
      rows(module, { 3, 4, 5, 6, 6, 6, 7, 7, 7, 8, 8, 8, 9, 10 }, device)
      local after = module:state_dict()
      local counts = after._mch_counts:gather():to_list()
      assert.same({ 11, 3, 3, 3 }, { counts[1], counts[2], counts[3], counts[4] })
      assert.same({ 0, 1, 2, 3, 4 }, after._mch_remapped_ids_mapping:gather():to_list())
      assert.same({ 1, 2, 3 }, module:evict():to_list())
    end)

    it("asks a policy of Lua", function()
      local asked = 0
      local pool = collision.pool { { collision.read(peri.tensor({ 1, 2, 3, 4, 5, 6, 7, 8, 9 }, "i64")), 9 } }
      local function score(count, last, now)
        asked = asked + 1
        return (count * 7 + last * 3) % 5 - now % 3
      end
      local module = mch { device = device, eviction_policy = score, eviction_interval = 2 }
      local model = Model { rows = 5, policy = score, interval = 2 }
      local random = collision.random(5)
      for _ = 1, 200 do
        local lists = collision.random_features(random, pool, 1, 6)
        local want = model:remap(lists, true)
        assert.same(want[1], module(peri.KeyedJaggedTensor { keys = { "f" }, values = pool:tensor(lists[1], device),
          lengths = { #lists[1] }, device = device }):values():to_list())
      end
      assert.is_true(asked > 400)
      local Mine = embed.MCHEvictionPolicy:extend "Mine"
      function Mine:score(count) return count end -- luacheck: ignore 212
      local mine, lfu = mch { device = device, eviction_policy = Mine {} }, mch { device = device }
      for step = 1, 5 do
        local ids = { step, step, step + 1, 3, 9 - step, 9 - step, 9 - step }
        assert.same(rows(lfu, ids, device), rows(mine, ids, device))
      end
    end)

    it("refuses a policy of Lua that gives ids to its own map", function()
      local module
      module = mch { device = device, eviction_policy = function(count)
        rows(module, { 9 }, device)
        return count
      end }
      assert.error_matches(function() rows(module, { 1, 2 }, device) end,
        "table 't': the eviction policy: .*table 't': its eviction policy gives ids to the map that asks it for scores")
    end)

    it("raises what a policy of Lua raises, and names the table", function()
      local broken = true
      local module = mch { device = device, eviction_policy = function(count)
        if broken then error "no score today" end
        return count
      end }
      for _ = 1, 3 do
        assert.error_matches(function() rows(module, { 1, 2 }, device) end,
          "table 't': the eviction policy: .*no score today")
      end
      broken = false
      assert.same({ 2, 3 }, rows(module, { 1, 2 }, device))
      local other = mch { device = device, eviction_policy = function() return "much" end }
      assert.error_matches(function() rows(other, { 1 }, device) end,
        "table 't': the eviction policy: the score of count %d+, last access %d+, now 1 is 'much', wanted a number")
    end)

    it("hashes ids first, if asked", function()
      local seen
      local module = mch { device = device, input_hash_size = 100, input_hash_func = function(ids, size)
        seen = size
        return ids:to("f32"):mul(2):to "i64"
      end }
      rows(module, { 3, 4 }, device)
      assert.equal(100, seen)
      local memory = collision.read(module:state_dict()._mch_sorted_raw_ids:gather())
      assert.equal(6LL, memory[0])
      assert.equal(8LL, memory[1])
    end)

    it("gives ids without a row what on_miss says", function()
      assert.same({ -1, -1 }, rows(mch({ device = device, on_miss = "drop" }):eval(), { 1, 2 }, device))
      assert.same({ 4, 4 }, rows(mch({ device = device, on_miss = "row" }):eval(), { 1, 2 }, device))
      for _, row in ipairs(rows(mch({ device = device, on_miss = "hash" }):eval(), { 1, 2, 99 }, device)) do
        assert.is_true(row >= 0 and row < 4)
      end
      assert.error_matches(function() rows(mch({ device = device, on_miss = "error" }):eval(), { 1, 77 }, device) end,
        "'t'.* id 1")
    end)

    it("keeps its state, also into another module and a copy", function()
      local module = mch { device = device, zch_size = 40, buckets = 4, output_global_offset = 100,
        eviction_policy = embed.DistanceLFU_EvictionPolicy { decay_exponent = 0.5 } }
      local random = collision.random(11)
      local pool = collision.random_pool(random, 90, 2)
      local function step(m, lists)
        return m(peri.KeyedJaggedTensor { keys = { "f" }, values = pool:tensor(lists[1], device),
          lengths = { #lists[1] }, device = device }):values():to_list()
      end
      for _ = 1, 20 do step(module, collision.random_features(random, pool, 1, 30)) end
      local other = mch { device = device, zch_size = 40, buckets = 4, output_global_offset = 100,
        eviction_policy = embed.DistanceLFU_EvictionPolicy { decay_exponent = 0.5 } }
      assert.same({ missing_keys = {}, unexpected_keys = {} }, other:load_state_dict(module:state_dict()))
      local copy = embed.copy_to_device(module, device)
      for _ = 1, 20 do
        local lists = collision.random_features(random, pool, 1, 30)
        local want = step(module, lists)
        assert.same(want, step(other, lists))
        assert.same(want, step(copy, lists))
      end
    end)
  end)
end

-- -- rows that start again --------------------------------------------------------------------------------------------

--- A collection over table t of 4 rows and its map: ids get rows at once, the last ones that came go first.
local function collection(args)
  local config = embed[args.sequence and "EmbeddingConfig" or "EmbeddingBagConfig"] { name = "t", num_embeddings = 4,
    embedding_dim = 3, feature_names = { "f" } }
  local tables = embed[args.sequence and "EmbeddingCollection" or "EmbeddingBagCollection"] { tables = { config },
    fused_params = args.fused_params, device = args.device, seed = 3 }
  local mcc = embed.ManagedCollisionCollection { embedding_configs = { config }, managed_collision_modules = {
    t = embed.MCHManagedCollisionModule { zch_size = 4, device = args.device, buckets = 1, eviction_interval = 1,
      eviction_policy = embed.LRU_EvictionPolicy {} } } }
  local class = args.sequence and "ManagedCollisionEmbeddingCollection" or "ManagedCollisionEmbeddingBagCollection"
  return peri[class] { [args.sequence and "embedding_collection" or "embedding_bag_collection"] = tables,
    managed_collision_collection = mcc, return_remapped_features = true }, tables
end

local function total(values) return nn.functional.sum(values.values and values:values() or values.f:values()) end

for _, device in ipairs { "cpu", "opaque" } do
  describe("rows of evicted ids on " .. device, function()
    for _, sequence in ipairs { false, true } do
      for _, optimizer in ipairs { "rowwise_adagrad", "adam", "adagrad" } do
        it(("start again: %s, %s"):format(sequence and "sequences" or "bags", optimizer), function()
          local mc, tables = collection { sequence = sequence, device = device,
            fused_params = { optimizer = optimizer, learning_rate = 0.5 } }
          local start = tables:weight("t"):to_table()
          local states = tables:materialise():state_names()
          -- rows 1, 2, 3 - 1: all but the last are taken and trained
          total((mc(one_feature({ 1, 2, 3 }, device)))):backward()
          for row = 1, 3 do assert.not_same(start[row], tables:weight("t"):to_table()[row]) end
          local trained = tables:weight("t"):to_table()
          -- 8 takes the row of 1 or 3, which came as long ago
          local values, remapped = mc(one_feature({ 2, 8 }, device))
          local taken = remapped:values():to_list()[2]
          assert.is_true(taken < 3)
          local now = tables:weight("t"):to_table()
          for row = 1, 4 do assert.same(row == taken + 1 and start[row] or trained[row], now[row], "row " .. row) end
          for _, name in ipairs(states) do
            if name ~= "weight" then
              local state = tables:table_state("t", name):to_table()[taken + 1]
              for _, x in ipairs(type(state) == "table" and state or { state }) do assert.equal(0, x, name) end
            end
          end
          assert.is_truthy(values)
        end)
      end
    end

    it("start again in files", function()
      local mc, tables = collection { device = device,
        fused_params = { optimizer = "adagrad", learning_rate = 0.5, cache_params = { load_factor = 0.5 } } }
      local function read(which) return tables:table_rows("t", which, 0, 4):to_table() end
      local start = read "weight"
      for id = 1, 3 do total((mc(one_feature({ id }, device)))):backward() end -- two rows fit into memory
      local trained = read "weight"
      local _, remapped = mc(one_feature({ 8 }, device))
      local taken = remapped:values():to_list()[1]
      assert.is_true(taken < 3)
      assert.not_same(start[taken + 1], trained[taken + 1])
      for row = 1, 4 do
        assert.same(row == taken + 1 and start[row] or trained[row], read("weight")[row], "row " .. row)
      end
      assert.same({ 0, 0, 0 }, read("momentum1")[taken + 1])
    end)

    it("start again where a dense optimizer trains them", function()
      local mc, tables = collection { device = device }
      local start = tables:weight("t"):to_table()
      local optimizer = nn.optim.Adagrad { params = mc:named_parameters(), lr = 0.5 }
      local function step(ids)
        optimizer:zero_grad()
        local values, remapped = mc(one_feature(ids, device))
        local weights = tables:weight("t"):to_table()
        total(values):backward()
        optimizer:step()
        return remapped:values():to_list(), weights
      end
      step { 1, 2, 3 }
      local rows_now, before = step { 2, 8 }
      local taken = rows_now[2]
      assert.same(start[taken + 1], before[taken + 1])
      -- a first step of Adagrad has the size of the learning rate, whatever the gradient
      for c, x in ipairs(tables:weight("t"):to_table()[taken + 1]) do
        assert.near(start[taken + 1][c] - 0.5, x, 1e-5)
      end
    end)

    it("are an error where nobody can reset them", function()
      local mc = collection { device = device }
      rawset(mc._embedding_module, "reset_rows", false)
      assert.error_matches(function() mc(one_feature({ 1 }, device)) end,
        "it is in training mode, and EmbeddingBagCollection cannot make rows that get other ids start again")
      assert.equal(0, mc:statistics().t.ids) -- refused before anything was learned
      mc:eval()
      assert.is_truthy((mc(one_feature({ 5 }, device))))
    end)
  end)
end

describe("quantized tables", function()
  it("serve raw ids, and are not trained", function()
    local mc = collection { fused_params = { optimizer = "sgd", learning_rate = 0.1 } }
    for _ = 1, 2 do total((mc(one_feature { 5, 77 }))):backward() end
    local ids = one_feature { 77, 5, 5, 123 }
    mc:eval()
    local want = mc(ids):values():to_list()
    local trained = mc
    mc = peri.quantize_embeddings { module = mc, dtype = "FP32" }
    assert.equal("EmbeddingBagCollection", trained:embedding_module().class_name)
    assert.equal("QuantEmbeddingBagCollection", mc:embedding_module().class_name)
    assert.same(want, mc(ids):values():to_list())
    local copy = embed.copy_to_device(mc)
    assert.same(want, copy(ids):values():to_list())
    assert.error_matches(function() mc:train()(one_feature { 8 }) end,
      "it is in training mode, and QuantEmbeddingBagCollection cannot make rows that get other ids start again; in "
        .. "evaluation mode")
    assert.same(want, copy(ids):values():to_list()) -- it has a map of its own
    assert.same(want, mc:eval()(ids):values():to_list()) -- and this one has learned nothing
  end)
end)

describe("a state_dict whose map makes no sense", function()
  it("changes neither maps nor weights", function()
    local mc = collection { fused_params = { optimizer = "sgd", learning_rate = 0.1 } }
    for _ = 1, 2 do total((mc(one_feature { 5, 77 }))):backward() end
    local state, other = peri.shard.gather_state_dict(mc:state_dict()),
      collection { fused_params = { optimizer = "sgd" } }
    local name = "_managed_collision_collection._managed_collision_modules.t."
    local before = other:embedding_module():weight("t"):to_list()
    for _, strict in ipairs { true, false } do
      local bad = {}
      for k, t in pairs(state) do bad[k] = t end
      bad[name .. "_mch_remapped_ids_mapping"] = peri.zeros({ 4 }, "i64")
      assert.error_matches(function() other:load_state_dict(bad, strict) end, "table 't', bucket 0: .*another id's too")
      bad[name .. "_mch_remapped_ids_mapping"] = state[name .. "_mch_remapped_ids_mapping"]:to "f64"
      assert.error_matches(function() other:load_state_dict(bad, strict) end,
        "_mch_remapped_ids_mapping' is f64, wanted i64")
      assert.same(before, other:embedding_module():weight("t"):to_list())
      assert.equal(0, other:statistics().t.occupied)
    end
    other:load_state_dict(state)
    assert.equal(2, other:statistics().t.occupied)
  end)
end)

describe("an input_hash_func", function()
  it("returns as many ids as it got, or is told what it returned", function()
    for _, c in ipairs { { function() end, "nil" }, { function() return 3 end, "3" },
      { function() return peri.tensor({ 1 }, "i64") end, "tensor i64 %[1%] on cpu" },
      { function(ids) return ids:to "f32" end, "tensor f32 %[2%] on cpu" } } do
      assert.error_matches(function() rows(mch { input_hash_func = c[1] }, { 5, 6 }) end,
        "MCHManagedCollisionModule of table 't': input_hash_func returned " .. c[2] .. ", wanted a tensor of 2 ids")
    end
    assert.equal(2, #rows(mch { input_hash_func = function(ids) return ids:to "i32" end }, { 5, 6 }))
  end)

  it("stays left out of copies where ids come hashed", function()
    local calls = 0
    local module = mch { input_hash_func = function(ids)
      calls = calls + 1
      return ids
    end }
    local t = embed.EmbeddingBagConfig { name = "t", num_embeddings = 5, embedding_dim = 2, feature_names = { "f" } }
    local mcc = embed.ManagedCollisionCollection { embedding_configs = { t },
      managed_collision_modules = { t = module }, need_preprocess = false }
    mcc(one_feature { 1, 2 })
    embed.copy_to_device(mcc)(one_feature { 1, 2 })
    assert.equal(0, calls)
  end)
end)

describe("a copy of a module", function()
  it("is called by its table's name, and has its time", function()
    local module = embed.HashZchManagedCollisionModule { zch_size = 1, total_num_buckets = 1, on_miss = "error",
      eviction_policy_name = "SINGLE_TTL_EVICTION", eviction_config = { features = { "f" }, single_ttl = 5 } }
    local t = embed.EmbeddingBagConfig { name = "t", num_embeddings = 1, embedding_dim = 2, feature_names = { "f" } }
    local mcc = embed.ManagedCollisionCollection { embedding_configs = { t },
      managed_collision_modules = { t = module } }
    mcc:set_time(100)
    mcc(one_feature { 7 })
    local copy = embed.copy_to_device(mcc)
    assert.error_matches(function() copy(one_feature { 8 }) end, "table 't': id 8")
    for _, m in ipairs { mcc, copy } do
      m:set_time(106)
      assert.same({ 0 }, m(one_feature { 8 }):values():to_list())
    end
    local later = embed.copy_to_device(mcc) -- its clock is at 106, whatever its number of steps
    for _ = 1, 9 do assert.is_false((pcall(later, one_feature { 9 }))) end
    later:set_time(112)
    assert.same({ 0 }, later(one_feature { 9 }):values():to_list())
    assert.error_matches(function()
      embed.ManagedCollisionCollection { embedding_configs = { embed.EmbeddingBagConfig { name = "t",
        num_embeddings = 5, embedding_dim = 2, feature_names = { "f" } } },
          managed_collision_modules = { t = mch() } }:set_time(3)
    end, "set_time: no table has a HashZchManagedCollisionModule")
  end)
end)

describe("a ManagedCollisionCollection", function()
  it("orders features by configurations, and keeps weights and samples", function()
    local t = embed.EmbeddingBagConfig { name = "t", num_embeddings = 5, embedding_dim = 2,
      feature_names = { "b", "a" } }
    local u = embed.EmbeddingBagConfig { name = "u", num_embeddings = 4, embedding_dim = 2, feature_names = { "c" } }
    -- modules in an order other than that of the configurations
    local mcc = embed.ManagedCollisionCollection { embedding_configs = { u, t },
      managed_collision_modules = { t = mch { eviction_interval = 1 }, u = mch { zch_size = 4 } } }
    local batch = peri.KeyedJaggedTensor { keys = { "a", "b", "c", "d" }, values = { 10, 20, 21, 30, 99 },
      lengths = { 1, 0, 1, 1, 0, 1, 1, 0 }, weights = { 1, 2, 3, 4, 5 } }
    local out = mcc(batch)
    assert.same({ "c", "b", "a" }, out:keys())
    assert.same({ 0, 1, 1, 1, 1, 0 }, out:lengths():to_list())
    assert.same({ 4, 2, 3, 1 }, out:weights():to_list())
    local values = out:values():to_list()
    assert.equal(2, values[1])                                  -- 30: the last free row of u
    assert.same({ 2, 3, 1 }, { values[2], values[3], values[4] }) -- 20, 21 and 10: by id, 10 first
    assert.same({ t = 1, u = 1 }, mcc:table_to_number_buckets())
    assert.same({ t = 1, u = 2 }, mcc:open_slots())
  end)

  it("takes variable batches", function()
    local t = embed.EmbeddingBagConfig { name = "t", num_embeddings = 5, embedding_dim = 2,
      feature_names = { "a", "b" } }
    local mcc = embed.ManagedCollisionCollection { embedding_configs = { t },
      managed_collision_modules = { t = mch() } }
    local out = mcc(peri.KeyedJaggedTensor { keys = { "b", "a" }, values = { 5, 6, 7 }, lengths = { 1, 1, 1 },
      stride_per_key_per_rank = { { 1 }, { 2 } }, inverse_indices = { { "b", "a" }, { { 0, 0 }, { 0, 1 } } } })
    assert.same({ "a", "b" }, out:keys())
    assert.same({ 2, 1 }, out:stride_per_key())
    assert.is_truthy(out:inverse_indices_or_none())
  end)
end)
