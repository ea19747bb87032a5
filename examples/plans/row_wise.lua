-- row_wise.lua: the rows of every table in equal blocks over all ranks.
local plan = require "perilune.plan"

return function(env)
  local modules = {}
  for path, tables in pairs(env.modules) do
    modules[path] = {}
    for _, t in ipairs(tables) do modules[path][t.name] = plan.row_wise() end
  end
  return plan.ShardingPlan(modules)
end
