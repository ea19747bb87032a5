-- one_f_one_b.lua: one stage of a model that is cut into `stages`, each on its own group of ranks. `micro_batches`
-- batches are one step of the optimizer, and are flushed before the next begin; stage s runs stages - 1 - s forward
-- passes, then a forward and a backward pass in turn. A number instead of arguments: so many stages, the first of them.
-- Updates of tables and averages over a stage's ranks are kept until the step.
local Schedule = require "perilune.pipeline.schedule"
local util = require "perilune.util"

return function(args)
  local func = "one_f_one_b"
  local a = util.named(func, type(args) == "number" and { stages = args } or args or {},
    { stages = util.whole(4, 1, 16), stage = 0, micro_batches = util.whole(8, 1, 4096) })
  util.integer(func, "stage", a.stage, 0, a.stages - 1)
  local ahead, last = math.min(a.stages - 1 - a.stage, a.micro_batches - 1), a.stage == a.stages - 1
  local schedule = Schedule { name = "one_f_one_b", flush = a.micro_batches, depth = ahead + 2,
    { "zero_grad", every = a.micro_batches, at = 0 },
    { "load", ahead = ahead + 1, on = "load" },
    { "to_device", ahead = ahead + 1, on = "copy" },
    { "forward", ahead = ahead },
    { "backward", scale = last and 1 / a.micro_batches or 1 },
    { "update", every = a.micro_batches },
    { "optimizer", every = a.micro_batches },
  }
  if a.stage > 0 then
    schedule = schedule:insert({ "receive", ahead = ahead }, { before = "forward" }):insert({ "send_grad" },
      { after = "backward" })
  end
  if not last then
    schedule = schedule:insert({ "receive_grad" }, { before = "backward" }):insert({ "send", ahead = ahead },
      { after = "forward" })
  end
  return schedule
end
