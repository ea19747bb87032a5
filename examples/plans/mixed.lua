-- mixed.lua: every sharding type at once, for any model: of each collection the largest table by rows, the second by
-- columns, small ones on every rank, the rest whole, dealt out in turn. env.modules has the tables of each collection
-- by its path.
local plan = require "perilune.plan"

local function larger(a, b)
  if a.num_embeddings ~= b.num_embeddings then return a.num_embeddings > b.num_embeddings end
  return a.name < b.name
end

return function(env)
  local modules = {}
  for path, configs in pairs(env.modules) do
    local tables, entries, turn = {}, {}, 0
    for i, t in ipairs(configs) do tables[i] = t end
    table.sort(tables, larger)
    for i, t in ipairs(tables) do
      if i == 1 then entries[t.name] = plan.row_wise()
      elseif i == 2 and t.embedding_dim % 4 == 0 then entries[t.name] = plan.column_wise()
      elseif t.num_embeddings < 1000 then entries[t.name] = plan.data_parallel()
      else
        entries[t.name] = plan.table_wise(turn % env.world_size)
        turn = turn + 1
      end
    end
    modules[path] = entries
  end
  return plan.ShardingPlan(modules)
end
