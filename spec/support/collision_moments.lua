-- collision_moments.lua: a small model of raw ids, for the specs that compare its maps with its rows.
local peri = require "perilune"
local collision = require "spec.support.collision"
local embed, nn = peri.embed, peri.nn

local M = {}
local ROWS, IDS = 24, 40

local modules = {
  lfu = function() return embed.MCHManagedCollisionModule { zch_size = ROWS, buckets = 3, eviction_interval = 2,
    eviction_policy = embed.LFU_EvictionPolicy {} } end,
  mine = function() return embed.MCHManagedCollisionModule { zch_size = ROWS, buckets = 3, eviction_interval = 1,
    on_miss = "drop", eviction_policy = function(count, last) return last + count / 100 end } end,
  lru = function() return embed.HashZchManagedCollisionModule { zch_size = ROWS, total_num_buckets = 3, max_probe = 5,
    eviction_policy_name = "LRU_EVICTION" } end,
  ttl = function() return embed.HashZchManagedCollisionModule { zch_size = ROWS, total_num_buckets = 3,
    on_miss = "drop", eviction_policy_name = "SINGLE_TTL_EVICTION",
    eviction_config = { features = { "f" }, single_ttl = 2 } } end,
}
M.kinds = { "lfu", "lru", "mine", "ttl" }

local Model = nn.Module:extend "Model"
M.Model, M.ROWS = Model, ROWS
function Model:init(kind, sequence, params)
  local config = (sequence and peri.EmbeddingConfig or peri.EmbeddingBagConfig) { name = "t", num_embeddings = ROWS,
    embedding_dim = 4, feature_names = { "f" }, init_fn = embed.constant(1) }
  local args = { managed_collision_collection = peri.ManagedCollisionCollection { embedding_configs = { config },
    managed_collision_modules = { t = modules[kind]() } } }
  args[sequence and "embedding_collection" or "embedding_bag_collection"] =
    (sequence and peri.EmbeddingCollection or peri.EmbeddingBagCollection) { tables = { config }, fused_params = params,
      seed = 5 }
  self.sequence = sequence
  self.mc = (sequence and peri.ManagedCollisionEmbeddingCollection or peri.ManagedCollisionEmbeddingBagCollection)(args)
end
function Model:forward(batch)
  return self:rows_of(batch.ids):sum() * batch.weight
end
function Model:rows_of(ids)
  local out = peri.util.resolve((self.mc(ids)))
  if self.sequence then return out.f:values() end
  return out:values()
end

function M.kjt(list)
  local lengths = {}
  for i = 1, #list do lengths[i] = 1 end
  return peri.KeyedJaggedTensor { keys = { "f" }, values = peri.tensor(list, "i64", nil, { #list }),
    lengths = peri.tensor(lengths, "i32", nil, { #list }) }
end

--- A random batch of step `s` of a rank of `size`; later steps have later ids.
function M.batch(seed, s, rank, size)
  local r, list = collision.random(seed * 1000 + s * 10 + rank), {}
  for i = 1, 4 + r(6) do list[i] = 1000 + (s * 3 + r(IDS)) % (2 * IDS) end
  return { ids = M.kjt(list), weight = size * (1 + s / 8) }
end

local every = {}
for i = 1, 2 * IDS do every[i] = 999 + i end

--- What evaluation gives for all ids, alike on all ranks.
function M.answers(model)
  model:eval()
  local module = model.module or model
  local result = peri.no_grad(function() return module:rows_of(M.kjt(every)):to_list() end)
  model:train()
  return result
end

return M
