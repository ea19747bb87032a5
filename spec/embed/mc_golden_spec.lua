-- Managed collision against TorchRec's own results (spec/golden/ops/collision): the plain model, which other specs take
-- for the truth, and the modules on both devices.
local peri = require "perilune"
local golden = require "spec.support.golden"
local collision = require "spec.support.collision"

local embed = peri.embed

local function step_names(case)
  local list = {}
  for k = 1, case.args.batches do list[k] = ("step%d."):format(k) end
  list[#list + 1] = "eval."
  return list
end

local function sorted(list)
  table.sort(list)
  return list
end

--- The state after the last step. (That of every step is in the files, but as views of what changed later: all are the
--- last one.)
local function assert_state(case, pool, state)
  local a, step = case.args, ("step%d.state."):format(case.args.batches)
  local ids = collision.read(case:tensor(step .. "mch_sorted_raw_ids"))
  for i = 1, a.zch_size do
    assert.equal(state.ids[i] and pool.ids[state.ids[i]] or collision.MAX, ids[i - 1], "id of place " .. i)
  end
  local rows = case:list(step .. "mch_remapped_ids_mapping")
  for i = 1, #rows do rows[i] = rows[i] - a.output_global_offset end
  assert.same(rows, state.rows)
  for which, field in pairs { mch_counts = "counts", mch_last_access_iter = "last" } do
    local list = case:list(step .. which)
    -- the model counts in doubles
    for i = 1, list and #list or 0 do assert.equal(tonumber(list[i]), state[field][i], which) end
  end
end

describe("the plain model", function()
  for _, name in ipairs(golden.names("ops/collision", "^mch_")) do
    it("gives " .. name, function()
      local case = golden.load(name)
      local pool, model, a = collision.pool_of_case(case, "in%.f%d"), collision.model_of_case(case), case.args
      local offset = a.output_global_offset
      for _, step in ipairs(step_names(case)) do
        local training, features = step ~= "eval.", {}
        for f, feature in ipairs(a.features) do
          if case:has(step .. "in." .. feature) then features[f] = pool:of(case:tensor(step .. "in." .. feature)) end
        end
        local rows = model:remap(features, training)
        for f = 1, #features do
          local feature = a.features[f]
          local want = case:list(step .. "out." .. feature)
          for i = 1, #want do want[i] = want[i] - offset end
          assert.same(want, rows[f], step .. feature)
        end
        if training then
          local evicted, got = case:list(step .. "out.evicted"), model:evicted()
          for i = 1, #(evicted or {}) do evicted[i] = evicted[i] - offset end
          assert.same(evicted and sorted(evicted) or {}, got or {}, step .. "evicted")
          assert.same(case:list(step .. "out.open_slots"), { model:open_slots() })
        end
      end
      assert_state(case, pool, model:state())
    end)
  end
end)

--- The module of an mch_ case.
local function mch_module(case, device)
  local a = case.args
  local filter = a.threshold_filter and embed[a.threshold_filter]
  if a.threshold_arg then filter = filter { threshold_skew_multiplier = a.threshold_arg } end
  local policy = embed[a.policy] { threshold_filtering_func = filter,
    decay_exponent = a.policy ~= "LFU_EvictionPolicy" and a.decay_exponent or nil }
  return embed.MCHManagedCollisionModule { zch_size = a.zch_size, device = device, eviction_policy = policy,
    eviction_interval = a.eviction_interval, input_hash_size = 0LL + a.input_hash_size,
    output_global_offset = a.output_global_offset, buckets = 1, history_capacity = a.history_buffer_size, name = "t" }
end

--- The features of a step as JaggedTensors by name.
local function features_of(case, step, device)
  local features = {}
  for _, name in ipairs(case.args.features) do
    local values = case:tensor(step .. "in." .. name, device)
    if values then
      features[name] = peri.JaggedTensor { values = values, lengths = { values:numel() }, device = device }
    end
  end
  return features
end

for _, device in ipairs { "cpu", "opaque" } do
  describe("managed collision on " .. device, function()
    for _, name in ipairs(golden.names("ops/collision", "^mch_")) do
      it("gives " .. name, function()
        local case = golden.load(name)
        local module = mch_module(case, device)
        for _, step in ipairs(step_names(case)) do
          module:train(step ~= "eval.")
          local features = features_of(case, step, device)
          for feature, jt in pairs(module(features)) do
            assert.same(case:list(step .. "out." .. feature), jt:values():to_list(), step .. feature)
            assert.same(features[feature]:lengths():to_list(), jt:lengths():to_list())
          end
          if step ~= "eval." then
            local evicted, want = module:evict(), case:list(step .. "out.evicted")
            assert.same(want and sorted(want) or {}, evicted and evicted:to_list() or {}, step .. "evicted")
            assert.same(case:list(step .. "out.open_slots"), { module:open_slots() })
          end
        end
        local state, last = module:state_dict(), ("step%d.state."):format(case.args.batches)
        for which in pairs { mch_sorted_raw_ids = 1, mch_remapped_ids_mapping = 1, mch_counts = 1,
          mch_last_access_iter = 1 } do
          if case:has(last .. which) then
            local got, want = state["_" .. which]:gather(), case:tensor(last .. which)
            local a, b = collision.read(got), collision.read(want)
            for i = 0, want:numel() - 1 do assert.equal(b[i], a[i], which .. i) end
          end
        end
      end)
    end

    for _, name in ipairs(golden.names("ops/collision", "^hash_zch_")) do
      it("gives " .. name, function()
        local case = golden.load(name)
        local a = case.args
        local module = embed.HashZchManagedCollisionModule { zch_size = a.zch_size, device = device,
          max_probe = a.max_probe, total_num_buckets = a.total_num_buckets, output_segments = a.output_segments,
          disable_fallback = a.disable_fallback, input_hash_size = 0LL + (a.input_hash_size or 0),
          spread = a.input_hash_size and "range" or "modulo", name = "t" }
        module:eval()
        module:load_state_dict({ _hash_zch_identities = case:tensor("in.identities", device) }, false)
        local function rows_of(key)
          local ids = case:tensor(key, device)
          local out = module { f = peri.JaggedTensor { values = ids,
            lengths = peri.ones({ ids:numel() }, "i64", device) } }
          return out.f:values():to_list()
        end
        local rows, kept, lengths = rows_of "in.ids", {}, {}
        for i, row in ipairs(rows) do -- TorchRec takes ids without a row out; here they are -1
          if row >= 0 then kept[#kept + 1] = row end
          lengths[i] = row >= 0 and 1 or 0
        end
        assert.same(case:list "out.ids", kept)
        assert.same(case:list "out.lengths", lengths)
        -- all that were inserted are found, at their home or behind it
        local held = case:list "in.identities"
        local memory = collision.read(case:tensor "in.inserted_ids")
        for i, row in ipairs(rows_of "in.inserted_ids") do
          local identity = row >= 0 and held[row + 1]
          if not identity or identity ~= memory[i - 1] then
            assert.is_true(not identity or row == case:list("out.home_of_inserted")[i])
          end
        end
      end)
    end

    --- Ids of a table that TorchRec counts in a window: by those of the first batch.
    local function capacity_of(case, t)
      local ids, lengths, at = 0, case:list "step1.in.lengths", 0
      for _, key in ipairs(case.args.keys) do
        for _ = 1, case.args.stride do
          at = at + 1
          for _, feature in ipairs(t.features) do ids = ids + (feature == key and lengths[at] or 0) end
        end
      end
      return math.floor(ids * t.eviction_interval * 1.25)
    end

    for name, pooled in pairs { mc_ebc = true, mc_ec = false } do
      it("gives " .. name, function()
        local case = golden.load("ops/collision/" .. name)
        local a, configs, modules = case.args, {}, {}
        for i, t in ipairs(a.tables) do
          configs[i] = embed[pooled and "EmbeddingBagConfig" or "EmbeddingConfig"] { name = t.name,
            num_embeddings = t.rows, embedding_dim = t.dim, feature_names = t.features }
          modules[t.name] = embed.MCHManagedCollisionModule { zch_size = t.rows, device = device, buckets = 1,
            eviction_policy = embed[t.policy] {}, eviction_interval = t.eviction_interval,
            history_capacity = capacity_of(case, t) }
        end
        local collection = embed[pooled and "EmbeddingBagCollection" or "EmbeddingCollection"] { tables = configs,
          device = device }
        for _, t in ipairs(a.tables) do
          collection:weight(t.name):copy(case:tensor(("in.%s.weight"):format(t.name), device))
        end
        collection.reset_rows = function() end -- in TorchRec unsharded rows keep what the id before had
        local mc = embed[pooled and "ManagedCollisionEmbeddingBagCollection" or "ManagedCollisionEmbeddingCollection"] {
          [pooled and "embedding_bag_collection" or "embedding_collection"] = collection,
          return_remapped_features = true,
          managed_collision_collection = embed.ManagedCollisionCollection { managed_collision_modules = modules,
            embedding_configs = configs },
        }
        for _, step in ipairs(step_names(case)) do
          mc:train(step ~= "eval.")
          local values, remapped =
            mc(peri.KeyedJaggedTensor { keys = a.keys, values = case:tensor(step .. "in.values", device),
              lengths = case:tensor(step .. "in.lengths", device), stride = a.stride })
          assert.same(a.remapped_keys, remapped:keys())
          assert.same(case:list(step .. "out.remapped.values"), remapped:values():to_list(), step)
          assert.same(case:list(step .. "out.remapped.lengths"), remapped:lengths():to_list(), step)
          if pooled then
            assert.same(a.out_keys, values:keys())
            case:assert_near(step .. "out.values", values:values())
          else
            for _, key in ipairs(a.out_keys) do
              case:assert_near(("%sout.%s.values"):format(step, key), values[key]:values())
            end
          end
        end
        local state = mc:state_dict()
        for _, t in ipairs(a.tables) do
          for _, which in ipairs { "mch_sorted_raw_ids", "mch_remapped_ids_mapping" } do
            local want = case:tensor(("step%d.state.%s.%s"):format(a.batches, t.name, which))
            local got = state[("_managed_collision_collection._managed_collision_modules.%s._%s"):format(t.name,
              which)]:gather()
            local x, y = collision.read(want), collision.read(got)
            for i = 0, want:numel() - 1 do assert.equal(x[i], y[i], t.name .. " " .. which) end
          end
        end
      end)
    end

    it("gives threshold_filters", function()
      local case = golden.load "ops/collision/threshold_filters"
      local counts = case:tensor("in.counts", device)
      local function check(which, mask, threshold)
        assert.same(case:list("out." .. which .. "_mask"), mask:to_list())
        golden.assert_near(case:list("out." .. which .. "_threshold"), threshold:to_list(), case.tol)
      end
      check("average", embed.average_threshold_filter(counts))
      check("dynamic", embed.dynamic_threshold_filter(counts, case.args.skew_multiplier))
      check("dynamic", embed.dynamic_threshold_filter { threshold_skew_multiplier = case.args.skew_multiplier } (
        counts))
    end)
  end)
end
