-- table_wise.lua: whole tables, the largest first, each to the rank that has the fewest bytes so far.
local plan = require "perilune.plan"

return function(env) return plan.table_wise_by_size(env.modules, env) end
