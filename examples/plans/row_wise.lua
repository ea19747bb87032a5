-- row_wise.lua: the rows of every table in equal blocks over all ranks.
local plan = require "perilune.plan"

return function(env)
  local entries = {}
  for _, t in ipairs(env.tables) do entries[t.name] = plan.row_wise() end
  return plan.ShardingPlan { [env.module] = entries }
end
