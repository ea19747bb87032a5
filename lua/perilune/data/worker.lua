-- worker.lua: what runs on the thread of a worker (workers.lua), in a state of Lua of its own: make the iterator, then
-- make and hand over one batch after the other, of the numbers that it gets, until nobody wants more. What goes wrong
-- is handed over in place of the batch.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local errors = require "perilune.errors"
local serial = require "perilune.serial"
local functions = require "perilune.data.functions"
local parcels = require "perilune.data.parcels"
local Loader = require "perilune.data.loader"
local C = P.C

local M = {}

local function iterator_of(job)
  local iterator = functions.received(job)(job.arguments, job.shared)
  if util.is_callable(iterator) then return iterator end
  P.fail(("the loader returned %s, wanted a function that returns the next batch"):format(errors.kind(iterator)))
end

local function next_batch_of(iterator)
  local batch = iterator()
  if batch == false then P.fail "the loader returned false, wanted a batch, or nil at the end" end
  return batch
end

local function can_skip(iterator) return type(iterator) == "table" and util.is_callable(iterator.skip) end

--- Leave the next n batches out; false: there were not so many.
local function leave_out(job, iterator, n)
  local to = job.at + n
  if n > 0 and can_skip(iterator) then
    iterator:skip(n)
    job.at = to
    return true
  end
  while job.at < to do
    if next_batch_of(iterator) == nil then return false end
    job.at = job.at + 1
  end
  return true
end

local DRAWN = 2 ^ 20 -- tensors of random numbers of a batch

--- Random numbers that the state draws now depend on the number of the batch, not on the batches that this worker has
--- made before.
local function seed(k)
  local mixed = (ffi.cast("uint64_t", P.state.seed) * 0x9e3779b97f4a7c15ULL + k) * 0xbf58476d1ce4e5b9ULL
  math.randomseed(tonumber(mixed / 2048ULL)) -- 53 bits
  P.state.numbers_drawn = k * DRAWN
end

local number = ffi.new "int64_t[1]"

--- Make batches until the iterator has no batch of the number that this worker got: PERI_OK. Else as parcels.put.
local function feed_all(feed, job)
  job.at = 0 -- number of the batch that comes next
  local iterator = iterator_of(job)
  local own = Loader.is(iterator) -- nobody else sees its batches, which are in pinned memory where they should be
  while true do
    local status = C.peri_feed_next(feed, number)
    if status ~= C.PERI_OK then return status end
    local k = job.start + tonumber(number[0])
    if not leave_out(job, iterator, k - job.at) then return C.PERI_OK end
    if can_skip(iterator) and not own then seed(k) end
    local batch = next_batch_of(iterator)
    if batch == nil then return C.PERI_OK end
    status = own and parcels.put_loaded(feed, batch) or parcels.put(feed, batch, job.pin)
    if status ~= C.PERI_OK then return status end
    job.at = job.at + 1
  end
end

--- Once more, each time that it is wanted.
local function work(feed, job)
  while true do
    local ok, status = xpcall(feed_all, P.locate, feed, job)
    if not ok then
      local text = ("%s (batch %d)"):format(errors.describe(status), job.at)
      status = parcels.put_error(feed, text)
    end
    if status == C.PERI_OK then status = C.peri_feed_end(feed) end
    if status == C.PERI_ECLOSED then return end
    P.check(status)
  end
end

--- job: bytes of { code or module, arguments, start, rank, world_size, seed, pin }; shared:
--- references to tensors (parcels.sent); address: of the feed, 8 bytes.
function M.run(job, shared, address)
  shared = parcels.received(shared)
  job = serial.decode(job, "DataLoadingThread")
  job.shared = shared
  local feed = ffi.cast("peri_feed **", ffi.cast("const char *", address))[0]
  P.state.place, P.state.seed, P.state.device, P.state.pin = { job.rank, job.world_size }, job.seed, "cpu", job.pin
  work(feed, job)
end

return M
