-- wire_first.lua: sparse_dist for links that take longer than the computation: rows of the next batch set out as soon
-- as the tables have learned from this one, before the averages of its dense gradients have come, so that there is
-- always something on its way.
return require("perilune.pipeline.schedule") { name = "wire_first", depth = 3,
  { "zero_grad" },
  { "input_dist", ahead = 1, on = "dist" },
  { "load", ahead = 2, on = "load" },
  { "to_device", ahead = 2, on = "copy" },
  { "forward" },
  { "backward" },
  { "wait_dist", ahead = 1, on = "dist" },
  { "lookup", ahead = 1, on = "embed" },
  { "wait_grads" },
  { "optimizer" },
}
