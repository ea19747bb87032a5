-- plan/buckets.lua: how tables of raw ids (managed collision) are cut: between the buckets of their maps, because a map
-- of some buckets lies beside their rows.
local util = require "perilune.util"
local ShardingEnv = require "perilune.plan.env"
local sharding_types = require "perilune.plan.sharding_types"
local types = require "perilune.plan.types"

local M = {}

--- Rows where the buckets of a managed-collision module begin, and the end, from 0 on.
function M.segments(module)
  return util.map(module:output_segments(), function(row) return row - module.output_global_offset end)
end

--- Rows of each of n shards: an even share of the buckets each, rounded up, while these last (a shard may get none).
function M.sizes(module, n)
  local segments, sizes = M.segments(module), {}
  local buckets = #segments - 1
  local each = math.ceil(buckets / n)
  for i = 1, n do
    sizes[i] = segments[math.min(i * each, buckets) + 1] - segments[math.min((i - 1) * each, buckets) + 1]
  end
  return sizes
end

--- The plan's entry `sharding` of a table of raw ids (its managed-collision `module`), cut between buckets: row-wise
--- shards without sizes get those of `sizes`.
function M.cut(sharding, module, env)
  local nodes = ShardingEnv.of(env).nodes
  if sharding_types.of[sharding.sharding_type].way ~= "rank_sums" or sharding.sizes then return sharding end
  local ranks = sharding:ranks_on(nodes)
  if not ranks then
    ranks = {}
    for r = 1, #nodes do ranks[r] = r - 1 end
  end
  return types.ParameterSharding { sharding_type = sharding.sharding_type, compute_kernel = sharding.compute_kernel,
    ranks = ranks, sizes = M.sizes(module, #ranks), cache_params = sharding.cache_params or nil }
end

--- The runs of such a table, row-wise over n ranks (see options.runs).
function M.runs(module, n, cols)
  local runs, at = {}, 0
  for k, rows in ipairs(M.sizes(module, n)) do
    runs[k] = { n = 1, rows = rows, cols = cols, row_offset = at, col_offset = 0 }
    at = at + rows
  end
  return runs
end

return M
