-- collision_ranks.lua: managed collision over ranks beside the plain models. Batches are shared among ranks; the model
-- sees all of each.
local peri = require "perilune"
local collision = require "spec.support.collision"
local models = require "spec.support.collision_world"
local util = require "perilune.util"
local embed, plan = peri.embed, peri.plan
local M = {}

--- A random table that ranks can share: history_capacity cuts a window by the order of arrival, which depends on them.
function M.table_of(kind, seed)
  local r = collision.random(seed)
  local w
  repeat w = models[kind](r, "cpu") until kind == "hash" or w.text:find "capacity nil"
  w.row_wise, w.seed = r(4) > 1, seed
  return w
end

function M.sharded_of(w, world, device)
  local names = {}
  for f = 1, w.features do names[f] = "f" .. f end
  local tables = { peri.EmbeddingConfig { name = "t", num_embeddings = w.rows, embedding_dim = 2,
    feature_names = names } }
  local module = embed.ManagedCollisionEmbeddingCollection { return_remapped_features = true,
    embedding_collection = peri.EmbeddingCollection { tables = tables, device = "meta",
      fused_params = { optimizer = "sgd" } },
    managed_collision_collection = embed.ManagedCollisionCollection { managed_collision_modules = { t = w.new() },
      embedding_configs = tables } }
  local entry = w.row_wise and plan.row_wise() or plan.table_wise(w.seed % world:size())
  return peri.shard.ManagedCollisionEmbeddingCollectionSharder {}:shard(module,
    plan.EmbeddingModuleShardingPlan { t = entry }, peri.ShardingEnv.from_process_group(world), device, "mc"), names
end

--- What rank `rank` brings to operation `step`: a list of ids (places in the pool) for each feature.
local function brings(w, step, rank)
  return collision.random_features(collision.random((w.seed * 100000 + step) * 64 + rank + 1), w.pool, w.features, 4)
end

local function rows_of(module, names, w, lists, device)
  local ids, lengths = {}, {}
  for f, list in ipairs(lists) do
    lengths[f] = #list
    for _, place in ipairs(list) do ids[#ids + 1] = place end
  end
  local _, remapped = module(peri.KeyedJaggedTensor { keys = names, values = w.pool:tensor(ids, device),
    lengths = peri.tensor(lengths, "i32", device) })
  remapped = util.resolve(remapped)
  return util.map(names, function(name) return remapped:get(name):values():to_list() end)
end

local function expect(want, got, what, w, step)
  if table.concat(want, " ") ~= table.concat(got, " ") then
    error(("%s at operation %d: %s; wanted %s (%s; %d rows, %d buckets, %s)"):format(what, step, table.concat(got, " "),
      table.concat(want, " "), w.text, w.rows, w.buckets, w.spread), 0)
  end
end

--- The model's rows for the whole batch of operation `step` on `n` ranks, and by feature the ids before those of rank
--- `own`.
function M.by_model(w, step, n, own)
  local whole, first = {}, {}
  for f = 1, w.features do whole[f] = {} end
  for rank = 0, n - 1 do
    for f, list in ipairs(brings(w, step, rank)) do
      if rank == own then first[f] = #whole[f] end
      for _, place in ipairs(list) do whole[f][#whole[f] + 1] = place end
    end
  end
  return w.model:remap(whole, step % 4 ~= 0), first
end

--- One batch on all ranks, and by the model.
function M.operation(w, module, names, world, device, step)
  local mine, training = brings(w, step, world:rank()), step % 4 ~= 0
  local want, first = M.by_model(w, step, world:size(), world:rank())
  module:train(training)
  local got = rows_of(module, names, w, mine, device)
  for f, list in ipairs(mine) do
    local part = {}
    for i = 1, #list do part[i] = want[f][first[f] + i] end
    expect(part, got[f], ("rows of feature %d on rank %d"):format(f, world:rank()), w, step)
  end
end

return M
