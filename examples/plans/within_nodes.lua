-- within_nodes.lua: for ranks on several nodes, between which bytes are dear: tables by rows within a node, the nodes
-- in turn, so that one sum of a bag crosses the network; of each collection the largest table over all nodes, a block
-- of columns on each.
local plan = require "perilune.plan"

local function count(nodes)
  local n, seen = 0, {}
  for _, node in ipairs(nodes) do
    if not seen[node] then n, seen[node] = n + 1, true end
  end
  return n
end

return function(env)
  local modules, nodes = {}, count(env.nodes)
  for path, tables in pairs(env.modules) do
    local entries, largest, turn = {}, tables[1], 0
    for _, t in ipairs(tables) do
      if t.num_embeddings > largest.num_embeddings then largest = t end
    end
    for _, t in ipairs(tables) do
      if t == largest and t.embedding_dim % 4 == 0 and t.embedding_dim / 4 >= nodes then entries[t.name] =
        plan.grid_shard()
      else
        entries[t.name] = plan.table_row_wise(turn % nodes)
        turn = turn + 1
      end
    end
    modules[path] = entries
  end
  return plan.ShardingPlan(modules)
end
