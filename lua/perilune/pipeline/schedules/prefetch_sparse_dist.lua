-- prefetch_sparse_dist.lua: sparse_dist for tables in files: rows of the next batch come into memory while this one is
-- trained.
return require("perilune.pipeline.schedule") { name = "prefetch_sparse_dist", depth = 3,
  { "zero_grad" },
  { "load", ahead = 2, on = "load" },
  { "to_device", ahead = 2, on = "copy" },
  { "wait_dist", ahead = 1, on = "dist" },
  { "forward" },
  { "prefetch", ahead = 1, on = "prefetch" },
  { "backward" },
  { "optimizer" },
  { "input_dist", ahead = 2, on = "dist" },
}
