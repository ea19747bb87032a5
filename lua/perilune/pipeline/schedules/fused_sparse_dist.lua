-- fused_sparse_dist.lua: sparse_dist whose rows set out first in the step, before anything that does not need them.
return require("perilune.pipeline.schedules.sparse_dist"):insert({ "lookup", on = "embed" }, { first = true }):called "fused_sparse_dist"
