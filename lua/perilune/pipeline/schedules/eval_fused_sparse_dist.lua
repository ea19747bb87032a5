-- eval_fused_sparse_dist.lua: evaluation in which rows of the next batch are on their way while this one computes.
return require("perilune.pipeline.schedules.eval_sparse_dist"):move("lookup", { after = "wait_dist" },
  { ahead = 1, on = "embed" })
  :called "eval_fused_sparse_dist"
