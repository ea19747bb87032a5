-- Ranks whose maps follow other rules are told so with the first batch, by the argument's name, before anything is
-- learned.
-- mpirun: none
local peri = require "perilune"
local worlds = require "spec.support.worlds"
local util = require "perilune.util"
local embed, plan = peri.embed, peri.plan

local SEGMENTS = { 0, 7, 14, 22, 29, 37 }

describe("a table of raw ids", function()
  local MCH, Hash = embed.MCHManagedCollisionModule, embed.HashZchManagedCollisionModule
  local function lfu(args)
    return embed.LFU_EvictionPolicy(args or {})
  end
  for argument, c in util.ordered {
    managed_collision_module = { MCH, { eviction_policy = lfu() }, "HashZchManagedCollisionModule",
      "MCHManagedCollisionModule" },
    eviction_policy = { MCH, { eviction_policy = embed.LRU_EvictionPolicy {} }, "LRU_EvictionPolicy",
      "LFU_EvictionPolicy" },
    decay_exponent = { MCH, { eviction_policy = embed.LRU_EvictionPolicy { decay_exponent = 2 } }, "2", "1",
      { eviction_policy = embed.LRU_EvictionPolicy {} } },
    threshold_filtering_func =
      { MCH, { eviction_policy = lfu { threshold_filtering_func = embed.dynamic_threshold_filter {
      threshold_skew_multiplier = 3 } } }, "dynamic_threshold_filter%(3%)", "none" },
    eviction_interval = { MCH, { eviction_interval = 3 }, "3", "2" },
    on_miss = { MCH, { on_miss = "drop" }, "drop", "default" }, history_capacity = { MCH, { history_capacity = 9 }, "9",
      "0" },
    input_hash_func = { MCH, { input_hash_func = function(ids) return ids end }, "a function", "none" },
    max_probe = { Hash, { max_probe = 7 }, "7", "6" },
    single_ttl = { Hash, { eviction_policy_name = "SINGLE_TTL_EVICTION",
      eviction_config = { features = { "f", "g" }, single_ttl = 2 } }, "2", "3",
        { eviction_policy_name = "SINGLE_TTL_EVICTION",
          eviction_config = { features = { "f", "g" }, single_ttl = 3 } } },
    eviction_policy_name = { Hash, { eviction_policy_name = "LRU_EVICTION" }, "LRU_EVICTION", "none" },
    read_only_suffix = { Hash, { read_only_suffix = "_x" }, "_x", "_readonly" },
  } do
    worlds.each("has the same " .. argument .. " on all ranks", function(world, device)
      local class, mine, got, wanted, others = unpack(c, 1, 5)
      local own = util.copy(class == MCH and { zch_size = 37, buckets = 5, eviction_interval = 2,
        eviction_policy = lfu() }
        or { zch_size = 37, total_num_buckets = 5, output_segments = SEGMENTS, max_probe = 6 })
      for name, value in pairs(world:rank() == 1 and mine or others or {}) do own[name] = value end
      if argument == "managed_collision_module" and world:rank() == 1 then
        class, own = Hash, { zch_size = 37, total_num_buckets = 5, output_segments = SEGMENTS }
      end
      local tables = { peri.EmbeddingBagConfig { name = "a", num_embeddings = 37, embedding_dim = 4,
        feature_names = { "f", "g" } } }
      local module = peri.shard.ShardedManagedCollisionEmbeddingBagCollection { tables = tables,
        plan = { a = plan.row_wise() }, seed = 1, group = world, device = device, fused_params = { optimizer = "sgd" },
        managed_collision_collection =
          embed.ManagedCollisionCollection { managed_collision_modules = { a = class(own) },
            embedding_configs = tables } }
      local batch = peri.KeyedJaggedTensor { keys = { "f", "g" }, values = peri.tensor({ 1, 2 + world:rank() }, "i64",
        device), lengths = peri.tensor({ 1, 1 }, "i32", device) }
      local ok, err = pcall(function() util.resolve(module(batch)):values():to_list() end)
      assert.is_false(ok)
      local pattern = ("rank 1 has %s %s where rank 0 has %s %%(table 'a'%%)"):format(argument, got, wanted)
      assert.truthy(tostring(err):find(pattern), ("'%s' in: %s"):format(pattern, tostring(err)))
    end, { sizes = { 2 }, devices = { "cpu" } })
  end
end)
