-- Managed collision of unsharded tables: what its arguments may be, and how others are refused.
local peri = require "perilune"

local embed = peri.embed

local function mch(args)
  local a = { zch_size = 5, eviction_policy = embed.LFU_EvictionPolicy {}, eviction_interval = 1, buckets = 1,
    name = "t" }
  for name, value in pairs(args or {}) do a[name] = value end
  return embed.MCHManagedCollisionModule(a)
end

local function one_feature(ids)
  return peri.KeyedJaggedTensor { keys = { "f" }, values = peri.tensor(ids, "i64"), lengths = { #ids } }
end

describe("arguments of managed collision", function()
  local function refused(words, f, ...) assert.error_matches(f, words, ...) end

  it("are checked by name", function()
    refused("MCHManagedCollisionModule: argument 'zch_size' is missing", function()
      embed.MCHManagedCollisionModule { eviction_policy = embed.LFU_EvictionPolicy {}, eviction_interval = 1 }
    end)
    refused("zch_size is 0, allowed: whole numbers 1", function() mch { zch_size = 0 } end)
    refused("eviction_interval is 0, allowed: whole numbers 1", function() mch { eviction_interval = 0 } end)
    refused("eviction_policy is 'LFU', allowed: LFU_EvictionPolicy {}", function() mch { eviction_policy = "LFU" } end)
    refused("mch_size is 3, allowed: nil; TorchRec ignores it too", function() mch { mch_size = 3 } end)
    refused("buckets is 6, allowed: whole numbers 1..5", function() mch { buckets = 6 } end)
    refused("spread is 'odd', allowed: hash, modulo, range", function() mch { spread = "odd" } end)
    refused("on_miss is 'zero', allowed: default, row, hash, drop, error", function() mch { on_miss = "zero" } end)
    refused("output_segments go from 0 to 4, wanted 0 to 5", function()
      embed.MCHManagedCollisionModule { zch_size = 5, output_segments = { 0, 4 },
        eviction_policy = embed.LFU_EvictionPolicy {}, eviction_interval = 1 }
    end)
    refused("output_segments%[3%] is 2, allowed: whole numbers 3", function()
      mch { output_segments = { 0, 2, 2, 5 }, buckets = 3 }
    end)
    refused("eviction_interval is 2147483648, allowed: whole numbers 1..2147483647", function()
      mch { eviction_interval = 2 ^ 31 }
    end)
    for _, size in ipairs { -1, 0.5, 0 / 0, 2 ^ 63, -1LL, "64", {} } do
      refused("input_hash_size is .*, allowed: whole numbers 0", function() mch { input_hash_size = size } end)
    end
    refused("input_hash_size is 0, allowed: whole numbers 1..2%^53 %- 1 %(spread by range%)", function()
      mch { spread = "range", input_hash_size = 0 }
    end)
    refused("device", function() mch { device = "nowhere" } end)
    refused("device", function() mch { device = 3 } end)
    for _, exponent in ipairs { math.huge, 0 / 0, 0, -1 } do
      refused("LRU_EvictionPolicy: decay_exponent is .*, allowed: finite numbers above 0", function()
        embed.LRU_EvictionPolicy { decay_exponent = exponent }
      end)
    end
    for _, value in ipairs { -0.1, 1.1, 0 / 0 } do
      refused("per_id_probability is .*, allowed: 0..1", function()
        embed.probabilistic_threshold_filter { per_id_probability = value }
      end)
      refused("per_id_probability is .*, allowed: 0..1", function()
        embed.probabilistic_threshold_filter(peri.tensor({ 1 }, "i64"), value)
      end)
    end
    refused("threshold_skew_multiplier is nan, allowed: 0..", function()
      embed.dynamic_threshold_filter { threshold_skew_multiplier = 0 / 0 }
    end)
    refused("dynamic_threshold_filter: threshold_skew_multiplier is inf, allowed: 0.., finite numbers", function()
      embed.dynamic_threshold_filter { threshold_skew_multiplier = 1 / 0 }
    end)
    refused("per_id_probability is inf, allowed: 0..1", function()
      embed.probabilistic_threshold_filter { per_id_probability = 1 / 0 }
    end)
    refused("average_threshold_filter: value is 2, allowed: nil", function()
      embed.average_threshold_filter(peri.tensor({ 1 }, "i64"), 2)
    end)
    refused("LFU_EvictionPolicy: no argument 'decay_exponent'", function()
      embed.LFU_EvictionPolicy { decay_exponent = 1 }
    end)
    refused("threshold_filtering_func is a function, allowed: embed.dynamic_threshold_filter", function()
      embed.LFU_EvictionPolicy { threshold_filtering_func = print }
    end)
    refused("per_id_probability is 2, allowed: 0..1", function()
      embed.LFU_EvictionPolicy { threshold_filtering_func = embed.probabilistic_threshold_filter {
        per_id_probability = 2 } }
    end)
    refused("MCHEvictionPolicy: score is nil", function() embed.MCHEvictionPolicy {} end)
    local Mine = embed.LFU_EvictionPolicy:extend "Mine"
    function Mine:score(count) return -count end -- luacheck: ignore 212
    refused("Mine: it has a score of its own, and is a LFU_EvictionPolicy; extend MCHEvictionPolicy", function()
      Mine {}
    end)
  end)

  it("of probing maps that make no sense here are refused by name", function()
    local function hash(args)
      local a = { zch_size = 12, total_num_buckets = 2 }
      for name, value in pairs(args) do a[name] = value end
      return function() embed.HashZchManagedCollisionModule(a) end
    end
    refused("zch_size is 12, total_num_buckets is 5; allowed: buckets of equal size", hash { total_num_buckets = 5 })
    refused("zch_size is 0, allowed: whole numbers 1", hash { zch_size = 0 })
    refused("zch_size is nan, allowed: whole numbers 1", hash { zch_size = 0 / 0 })
    refused("total_num_buckets is 2048, allowed: whole numbers 1..1024",
      hash { zch_size = 4096, total_num_buckets = 2048 })
    refused("read_only_suffix is 3, wanted a string", hash { read_only_suffix = 3 })
    refused("input_hash_size is 0, allowed: whole numbers 1", hash { spread = "range" })
    for name, value in pairs { is_inference = true, tb_logging_frequency = 3,
      inference_dispatch_div_train_world_size = true, start_bucket = 1, end_bucket = 1, opt_in_prob = 10,
      percent_reserved_slots = 5, track_id_freq = true, enable_per_feature_lookups = true, no_bag = true,
      write_runtime_meta_dim = 1, persist_hash_zch_bucket = false } do
      refused(name .. " is .*, allowed: ", hash { [name] = value })
    end
    refused("SINGLE_TTL_EVICTION needs eviction_config with single_ttl",
      hash { eviction_policy_name = "SINGLE_TTL_EVICTION" })
    refused("eviction_config has per_feature_ttl, which SINGLE_TTL_EVICTION does not go by; allowed: single_ttl", hash {
      eviction_policy_name = "SINGLE_TTL_EVICTION", eviction_config = { features = { "f" }, single_ttl = 1,
        per_feature_ttl = { 2 } } })
    refused("eviction_config has single_ttl and per_feature_ttl; allowed with LRU_EVICTION: one of them", hash {
      eviction_policy_name = "LRU_EVICTION", eviction_config = { features = { "f" }, single_ttl = 1,
        per_feature_ttl = { 2 } } })
    refused("input_hash_size, and spread is 'hash', which does not go by it", hash { input_hash_size = 1000 })
    refused("eviction_policy_name is 'FIFO', allowed: SINGLE_TTL_EVICTION", hash { eviction_policy_name = "FIFO" })
    refused("HashZchEvictionConfig: feature 'a' is listed twice", function()
      embed.HashZchEvictionConfig { features = { "a", "b", "a" }, single_ttl = 1 }
    end)
    refused("per_feature_ttl has 1 entries for 2 features", function()
      embed.HashZchEvictionConfig { features = { "f", "g" }, per_feature_ttl = { 1 } }
    end)
    refused("HashZchEvictionConfig: single_ttl is .*, allowed: whole numbers 0..2147483647", function()
      embed.HashZchEvictionConfig { features = { "f" }, single_ttl = 2 ^ 31 }
    end)
    refused("HashZchEvictionConfig: per_feature_ttl%[2%] is .*, allowed: whole numbers 0..2147483647", function()
      embed.HashZchEvictionConfig { features = { "f", "g" }, per_feature_ttl = { 2 ^ 31 - 1, 2 ^ 40 } }
    end)
    refused("disable_fallback and on_miss = 'row' exclude each other",
      hash { disable_fallback = true, on_miss = "row" })
  end)

  it("of maps name what is allowed", function()
    local function map(change)
      local args = { name = "t", rows = 4, kind = "hash" }
      for name, value in pairs(change) do args[name] = value end -- any order: fields
      return function() embed.mc_map.new(args) end
    end
    refused("map of ids: kind is 'tree', allowed: hash, mch", map { kind = "tree" })
    refused("map of ids: spread is 'even', allowed: hash, modulo, range", map { spread = "even" })
    refused("map of ids: on_miss is 'fail', allowed: default, drop, error, hash, row", map { on_miss = "fail" })
  end)

  it("of collections name tables and features", function()
    local t = embed.EmbeddingBagConfig { name = "t", num_embeddings = 5, embedding_dim = 2, feature_names = { "f" } }
    local u = embed.EmbeddingBagConfig { name = "u", num_embeddings = 6, embedding_dim = 2, feature_names = { "f" } }
    local function mcc(modules, configs)
      return function()
        embed.ManagedCollisionCollection { managed_collision_modules = modules, embedding_configs = configs }
      end
    end
    refused("has nothing for table 't'", mcc({}, { t }))
    refused("the module of table 'u' gives 5 rows, the table has 6", mcc({ u = mch() }, { u }))
    refused("names table 'x', which has no configuration", mcc({ t = mch(), x = mch() }, { t }))
    refused("feature 'f' is of tables 't' and 'u'", mcc({ t = mch(), u = mch { zch_size = 6 } }, { t, u }))
    local shared = mch()
    local v = embed.EmbeddingBagConfig { name = "v", num_embeddings = 5, embedding_dim = 2, feature_names = { "g" } }
    refused("it is of table 't', and cannot be of 'v' too", mcc({ t = shared, v = shared }, { t, v }))
    local good = embed.ManagedCollisionCollection { managed_collision_modules = { t = mch() },
      embedding_configs = { t } }
    refused("the batch has no feature 'f' %(of table 't'%); those are: g",
      function() good(one_feature({ 1 }):permute { 0 } and
      peri.KeyedJaggedTensor { keys = { "g" }, values = { 1 }, lengths = { 1 } }) end)
    refused("table 1 of the collection is 'v'", function()
      embed.ManagedCollisionEmbeddingBagCollection { managed_collision_collection = good,
        embedding_bag_collection = embed.EmbeddingBagCollection { tables = { v } } }
    end)
  end)

  it("about features hold whatever was asked of a module before its first batch", function()
    local function batch(lengths)
      return peri.KeyedJaggedTensor { keys = { "short", "long", "seen_readonly" }, values = peri.tensor({ 7, 8, 9 },
        "i64"), lengths = lengths }
    end
    for _, c in ipairs { { eviction_policy_name = "PER_FEATURE_TTL_EVICTION", eviction_config = {
      features = { "short", "long", "seen_readonly" }, per_feature_ttl = { 0, 9, 0 } } }, {} } do
      c.zch_size, c.total_num_buckets, c.on_miss = 64, 4, "drop"
      for name, ask in peri.util.ordered {
        nothing = function(module) return module end,
        time = function(module) module:set_time(0) return module end,
        state = function(module) module:state_dict() return module end,
        load = function(module) module:load_state_dict(embed.HashZchManagedCollisionModule(c):state_dict()) end,
        statistics = function(module) module:statistics() end,
        copy = function(module) module:statistics() return module:copy() end,
      } do
        local module = embed.HashZchManagedCollisionModule(c)
        module = ask(module) or module
        local state = module:state_dict()
        module(batch { 1, 1, 1 })
        assert.equal(2, module:statistics().occupied, name) -- 9 is only looked up
        local ids = {}
        for _, row in ipairs(state._hash_zch_identities:gather():to_table()) do
          ids[#ids + 1] = tonumber(row[1]) >= 0 and tonumber(row[1]) or nil
        end
        table.sort(ids)
        assert.same({ 7, 8 }, ids, name)
        assert.error_matches(function() module(peri.KeyedJaggedTensor { keys = { "long", "short", "seen_readonly" },
          values = { 1 }, lengths = { 1, 0, 0 } }) end, "has the features long, short, .* wanted short, long")
      end
    end
  end)
end)
