-- schedules.lua: the schedules of the library by name. Those that take a number are functions, as are their files.
local util = require "perilune.util"

local modules = {}
local names = { "base", "sparse_dist", "sparse_dist_lite", "fused_sparse_dist", "semi_sync", "prefetch_sparse_dist", "eval_sparse_dist",
  "eval_fused_sparse_dist", "accumulate", "prefetch_fused_2d" }
for _, name in ipairs(names) do modules[name] = "perilune.pipeline.schedules." .. name end

return util.face("peri.pipeline.schedules", { names = names }, modules)
