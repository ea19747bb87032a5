-- fused_sparse_dist.lua: sparse_dist whose lookups have a stream of their own.
return require("perilune.pipeline.schedules.sparse_dist"):set { lookup = { on = "embed" } }:called "fused_sparse_dist"
