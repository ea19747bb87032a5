-- base.lua: one batch after the other; the next is loaded while nobody waits for it.
return require("perilune.pipeline.schedule") { name = "base", depth = 2,
  { "load", ahead = 1, on = "load" },
  { "to_device", ahead = 1, on = "copy" },
  { "zero_grad" },
  { "forward" },
  { "backward" },
  { "optimizer" },
}
