-- eval_sparse_dist.lua: sparse_dist without training; nothing is recorded.
return require("perilune.pipeline.schedules.sparse_dist"):drop("zero_grad", "backward",
  "optimizer"):with { grad = false }
  :called "eval_sparse_dist"
