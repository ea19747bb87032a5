-- sparse_dist.lua: ids of the next batch travel while this one computes, and the one after it is loaded.
return require("perilune.pipeline.schedule") { name = "sparse_dist", depth = 3,
  { "zero_grad" },
  { "input_dist", ahead = 1, on = "dist" },
  { "load", ahead = 2 },
  { "to_device", ahead = 2, on = "copy" },
  { "forward" },
  { "wait_dist", ahead = 1, on = "dist" },
  { "backward" },
  { "optimizer" },
}
