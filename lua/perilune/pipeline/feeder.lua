-- feeder.lua: what runs on the thread of a DataLoadingThread, in a state of Lua of its own: make the iterator, then hand over one batch
-- after the other, until there are no more or nobody wants more. What goes wrong is the error with which the thread ends.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local errors = require "perilune.errors"
local serial = require "perilune.dist.serial"
local parcels = require "perilune.pipeline.parcels"

local M = {}

--- The function that makes the iterator.
local function maker_of(job)
  if job.code then return assert(loadstring(job.code)) end
  local ok, found = pcall(require, job.module)
  if not ok then P.fail(tostring(found)) end
  if not util.is_callable(found) then
    P.fail(("module '%s' is %s, wanted a function(arguments)"):format(job.module, errors.kind(found)))
  end
  return found
end

local function feed_all(feed, job)
  local iterator = maker_of(job)(job.arguments)
  if not util.is_callable(iterator) then
    P.fail(("the loader returned %s, wanted a function that returns the next batch"):format(errors.kind(iterator)))
  end
  local batch = iterator()
  while batch ~= nil do
    if batch == false then P.fail "the loader returned false, wanted a batch, or nil at the end" end
    if not parcels.put(feed, batch) then return end
    batch = iterator()
  end
end

--- job: bytes of { code or module, arguments, rank, world_size, seed }; address: of the feed, 8 bytes.
function M.run(job, address)
  job = serial.decode(job, "DataLoadingThread")
  local feed = ffi.cast("peri_feed **", ffi.cast("const char *", address))[0]
  P.state.place, P.state.seed = { job.rank, job.world_size }, job.seed
  local ok, err = xpcall(feed_all, P.locate, feed, job)
  if not ok then error(errors.describe(err), 0) end
end

return M
