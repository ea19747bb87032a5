-- sparse_dist.lua: ids of the next batch travel while this one computes, and the one after it is loaded. Rows set out
-- before anything that does not need them, so that ids of the next batch are behind them on a slow link, and not
-- before; those have until the step's end.
return require("perilune.pipeline.schedule") { name = "sparse_dist", depth = 3,
  { "lookup" },
  { "zero_grad" },
  { "input_dist", ahead = 1, on = "dist" },
  { "load", ahead = 2, on = "load" },
  { "to_device", ahead = 2, on = "copy" },
  { "forward" },
  { "backward" },
  { "wait_dist", ahead = 1, on = "dist" },
  { "optimizer" },
}
