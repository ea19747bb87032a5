-- sharded.lua: a small collection, sharded in every way, and batches for it.
--
--   local sharded = require "spec.support.sharded"
--   local ebc = sharded.make { kind = "row_wise", world = world, device = device, fused_params = {...} }
--   local kt = ebc:forward(sharded.batch(step, rank, device))      -- [sharded.BATCH, sharded.WIDTH]
local peri = require "perilune"
local support = require "spec.support.tbe"
local plan = peri.plan

local M = { BATCH = 6, WIDTH = 8 + 8 + 16 + 4, features = { "f1", "f2", "f3" } }
local limit = { f1 = 200, f2 = 170, f3 = 330 }

M.configs = {
  { name = "a", rows = 200, cols = 8, features = { "f1", "f2" }, pooling = "SUM" },
  { name = "b", rows = 170, cols = 16, features = { "f2" }, pooling = "MEAN" },
  { name = "c", rows = 330, cols = 4, features = { "f3" }, pooling = "SUM" },
}

--- Plan entries of table i on n ranks.
M.kinds = {
  table_wise = function(i, n, options) return plan.table_wise(i % n, options) end,
  row_wise = function(_, _, options) return plan.row_wise(options) end,
  column_wise = function(i, n, options)
    options.ranks = { i % n }
    if i < 3 then options.ranks[2] = (i + 1) % n end
    return plan.column_wise(options)
  end,
  data_parallel = function() return plan.data_parallel { compute_kernel = "fused" } end,
}
function M.kinds.mixed(i, n, options)
  if i == 2 then return plan.data_parallel { compute_kernel = "fused_uvm" } end
  return M.kinds[i == 1 and "row_wise" or "table_wise"](i, n, options)
end

--- In a world of nodes of 2 ranks: a table on one node, one of whose ranks has none of its rows, and grids.
function M.kinds.within_nodes(i, n, options)
  if i ~= 1 then return plan.grid_shard(nil, options) end
  options.ranks = { n - 1 - n % 2 }
  if options.ranks[1] < 0 then options.ranks = { 0 } end
  return plan.table_row_wise(nil, options)
end

--- The tables: all of `data_type` (or by table), pooled as `pooling` says.
function M.tables(args)
  return peri.util.map(M.configs, function(t)
    local types = args.data_type
    return peri.EmbeddingBagConfig {
      name = t.name, num_embeddings = t.rows, embedding_dim = t.cols, feature_names = t.features,
      pooling = args.pooling or t.pooling, data_type = type(types) == "table" and types[t.name] or types,
      init_fn = args.init_fn,
    }
  end)
end

local own = { kind = true, world = true, cache = true, data_type = true, pooling = true, init_fn = true }
--- A sharded collection: kind, world, cache (cache_params: tables in files), data_type, pooling, init_fn; all else are
--- its own arguments.
function M.make(args)
  local entries, a = {}, { tables = M.tables(args), group = args.world, plan = {}, seed = 5 }
  for i, t in ipairs(M.configs) do
    entries[t.name] = M.kinds[args.kind](i, args.world:size(),
      args.cache and { compute_kernel = "fused_uvm_caching", cache_params = args.cache } or {})
  end
  a.plan = entries
  for name, value in peri.util.ordered(args) do
    if not own[name] then a[name] = value end
  end
  a.fused_params = a.fused_params or { optimizer = "rowwise_adagrad", learning_rate = 0.1 }
  return peri.shard.ShardedEmbeddingBagCollection(a)
end

--- The batch of a rank: values and lengths by feature, as plain lists.
function M.draw(step, rank)
  local draw = support.generator(1000 * step + rank)
  local values, lengths = {}, {}
  for i, f in ipairs(M.features) do
    values[i], lengths[i] = {}, {}
    for b = 1, M.BATCH do
      lengths[i][b] = draw(4)
      for _ = 1, lengths[i][b] do values[i][#values[i] + 1] = draw(9) == 0 and -1 or draw(limit[f]) end
    end
  end
  return values, lengths
end

--- A KJT of the batches of these ranks, one after the other.
function M.batch(step, ranks, device)
  local all_values, all_lengths = {}, {}
  ranks = type(ranks) == "table" and ranks or { ranks }
  for i = 1, #M.features do
    for _, rank in ipairs(ranks) do
      local values, lengths = M.draw(step, rank)
      for _, x in ipairs(values[i]) do all_values[#all_values + 1] = x end
      for _, x in ipairs(lengths[i]) do all_lengths[#all_lengths + 1] = x end
    end
  end
  return peri.KeyedJaggedTensor { keys = M.features, values = all_values, lengths = all_lengths, device = device }
end

--- All of a shard's state `name`, as a list.
function M.whole(shard, name, device)
  return shard.read(name, 0, peri.empty(shard.shape(name), "f32", device)):to_list()
end

--- Two collections of one plan hold the same numbers.
function M.assert_same(want, got, device)
  local a, b = want:local_shards(), got:local_shards()
  assert(#a == #b)
  for i, s in ipairs(a) do
    assert(s.table == b[i].table)
    for _, name in ipairs(s.names()) do
      require("luassert").same(M.whole(s, name, device), M.whole(b[i], name, device))
    end
  end
end

return M
