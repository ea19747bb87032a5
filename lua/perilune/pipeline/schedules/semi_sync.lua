-- semi_sync.lua: rows of the next batch are looked up before this one's backward pass has updated the tables: they
-- travel under it, and are one update old. Up to batch `start_batch` (0: from the first on) they are looked up after
-- it, and exact.
local Schedule = require "perilune.pipeline.schedule"
local util = require "perilune.util"

return function(start_batch)
  start_batch = util.integer("semi_sync", "start_batch", start_batch or 0, 0)
  local stale = Schedule { name = "semi_sync", depth = 4, staleness = { tables = 1, dense = 0 },
    { "input_dist", ahead = 2, on = "dist" },
    { "forward" },
    { "load", ahead = 3, on = "load" },
    { "to_device", ahead = 3, on = "copy" },
    { "lookup", ahead = 1 },
    { "wait_dist", ahead = 2, on = "dist" },
    { "backward" },
    { "optimizer" },
    { "zero_grad" },
  }
  if start_batch == 0 then return stale end
  return stale:set { lookup = { from_step = start_batch + 1 } }
    :insert({ "lookup", name = "exact_lookup", ahead = 1, until_step = start_batch + 1 }, { last = true })
end
