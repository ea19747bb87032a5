-- mixed.lua: every sharding type at once, for any model: the largest table by rows, the second by columns, small ones on every rank, the
-- rest whole, dealt out in turn. env.tables lists the tables of the model, env.module is their collection's path.
local plan = require "perilune.plan"

--- Columns are cut into even blocks, each a multiple of 4: over the first n ranks, as many as allow it.
local function by_columns(columns, world_size)
  local n = world_size
  while n > 1 and columns % (4 * n) ~= 0 do n = n - 1 end
  local ranks = {}
  for i = 1, n do ranks[i] = i - 1 end
  return plan.column_wise { ranks = ranks }
end

return function(env)
  local tables = {}
  for i, t in ipairs(env.tables) do tables[i] = t end
  table.sort(tables, function(a, b)
    if a.num_embeddings ~= b.num_embeddings then return a.num_embeddings > b.num_embeddings end
    return a.name < b.name
  end)
  local entries, turn = {}, 0
  for i, t in ipairs(tables) do
    if i == 1 then entries[t.name] = plan.row_wise()
    elseif i == 2 then entries[t.name] = by_columns(t.embedding_dim, env.world_size)
    elseif t.num_embeddings < 1000 then entries[t.name] = plan.data_parallel { compute_kernel = "fused" }
    else
      entries[t.name] = plan.table_wise(turn % env.world_size)
      turn = turn + 1
    end
  end
  return plan.ShardingPlan { [env.module] = entries }
end
