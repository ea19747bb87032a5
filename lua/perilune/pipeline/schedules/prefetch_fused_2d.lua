-- prefetch_fused_2d.lua: all at once: rows first in the step, rows in files fetched ahead, and the averages over the
-- replicas of a DMPCollection (with its own sync_interval = 0) every `sync_interval` batches.
local util = require "perilune.util"
local prefetch = require "perilune.pipeline.schedules.prefetch_sparse_dist"

return function(sync_interval)
  sync_interval = util.integer("prefetch_fused_2d", "sync_interval", sync_interval or 10, 1)
  return prefetch:insert({ "lookup", on = "embed" }, { first = true })
    :insert({ "sync", every = sync_interval }, { after = "backward" }):called "prefetch_fused_2d"
end
