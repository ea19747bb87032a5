-- sparse_dist_lite.lua: one batch in flight, and the next loaded under the optimizer: no more memory than the plain
-- loop.
return require("perilune.pipeline.schedule") { name = "sparse_dist_lite", depth = 2,
  { "zero_grad" },
  { "input_dist" },
  { "wait_dist" },
  { "forward" },
  { "backward" },
  { "load", ahead = 1, on = "load" },
  { "to_device", ahead = 1, on = "copy" },
  { "optimizer" },
}
