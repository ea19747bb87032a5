-- loading.lua: DataLoadingThread: batches are made on threads of their own while the step computes, and wait in queues.
--
--   local batches = peri.pipeline.DataLoadingThread { arguments = { path = "day_0", batch_size = 4096 },
--     loader = function(arguments)
--     return require("perilune").data.criteo(arguments)
--   end, num_workers = 2 }
--   for loss in pipeline:run(batches) do ... end
--
-- The loader runs in a state of Lua of its own (each worker has one), which shares nothing with this one: it is a
-- function without upvalues (it requires what it needs), or the name of a module that is such a function. It returns an
-- iterator, which is called on the thread.
local util = require "perilune.util"
local functions = require "perilune.data.functions"
local position = require "perilune.data.position"
local Workers = require "perilune.data.workers"
local place_of = require("perilune.data.loader")._place
local signature = require "perilune.signature"

local DataLoadingThread = util.class("DataLoadingThread", Workers)

local NAME = "DataLoadingThread"
local arguments = {
  loader = util.required,     -- function(arguments) -> function() -> a batch, or nil at the end; or the name of a
                              -- module
  arguments = util.optional,  -- what it is called with: plain values, which are copied
  num_workers = 1,            -- threads; each calls the loader
  prefetch_factor = 2,        -- batches that wait for whoever takes them, for each worker, at most
  pin_memory = util.optional, -- in memory pinned for the device (default: true where batches are copied to one)
  device = util.optional,     -- where they are moved when they are taken; default: they stay in host memory
  timeout = 300,              -- seconds that taking one waits, at most
  global_batches = false,     -- batch k of all ranks together is the same on any number of ranks: a position in them
                              -- holds on any
}

function DataLoadingThread:init(args)
  local a = util.named(NAME, args, arguments)
  local source = functions.sent(NAME, "loader", a.loader, "a function(arguments) that returns an iterator")
  Workers._check(NAME, a, 1)
  source.arguments = a.arguments
  local rank, world_size = place_of(NAME, {})
  Workers.init(self, NAME, source, { rank = rank, world_size = world_size, num_workers = a.num_workers,
    prefetch_factor = a.prefetch_factor, pin_memory = a.pin_memory, device = a.device, timeout = a.timeout,
    global_batches = a.global_batches })
end

--- Leave the next n batches out.
function DataLoadingThread:skip(n)
  self:go_to(self:given() + n)
  return self
end

function DataLoadingThread:get_next_batch()
  local batch = self:next()
  if batch ~= nil then position.note(self) end
  return batch
end
DataLoadingThread.__call = DataLoadingThread.get_next_batch

signature.check("DataLoadingThread:", DataLoadingThread, { stop = "self: table, timeout: number?",
  skip = "self: table, n: count", get_next_batch = "self: table" })

return DataLoadingThread
