-- workers.lua: threads that make batches ahead, each in a state of Lua of its own.
--
-- Each worker has an iterator of its own. When it has made a batch, it asks for the number of the next batch that no
-- worker makes yet, and its iterator leaves out the batches before that one. So a worker that is slow, or that the
-- system has interrupted, makes fewer batches than the others. Batches wait in one queue, `prefetch_factor` for each
-- worker at most, and are taken in the order of their numbers. So order and content are those of one worker, or of
-- none. Where batches are copied to a device, workers make them in memory pinned for it.
--
--     worker 0    batch 0, batch 3, batch 4, ...   --+
--     worker 1    batch 1, batch 5, ...            --+--> queue --> batch 0, 1, 2, ... --> copied to the device, on a
--     worker 2    batch 2, ... (slow)              --+              stream of its own
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local lua_states = require "perilune.lua_states"
local serial = require "perilune.serial"
local position = require "perilune.data.position"
local parcels = require "perilune.data.parcels"
local signature = require "perilune.signature"
local streams = require "perilune.tensor.stream"
local C, check = P.C, P.check

local wrap, _, feed_ptr = P.handle("peri_feed", {}, nil, "a worker")
local out, parcel = ffi.new "peri_feed *[1]", ffi.new "peri_feed_parcel"

local Workers = util.class "Workers"

local function fail(self, text, ...) P.fail((self.name .. ": " .. text):format(...)) end

local MAIN = [[
local path, cpath, job, shared, address = ...
package.path, package.cpath = path, cpath
require("perilune.data.worker").run(job, shared, address)
]]

--- Begin a thread that does the job (bytes) for a feed; address: of the feed.
local function start(self, feed, job, address)
  local lua = lua_states.new(self.name, MAIN, package.path, package.cpath, job, parcels.sent(self.shared), address)
  local thread = ffi.new("peri_feed_thread", { state = lua.ptr, n_args = 5, run = lua.pcall, close = lua.close })
  local status = C.peri_feed_start(feed_ptr(feed), thread)
  if status < 0 then lua.close(lua.ptr) end
  check(status)
end

--- The device whose copies read the batches, for memory pinned for it; false: none does.
local function pinned_for(device, pin_memory)
  local there = P.device(device)
  if pin_memory == false or C.peri_device_host_access(there) then return false end
  return ffi.string(C.peri_device_name(there))
end

local WORKERS_MOST = 1024

--- Check what all that has workers takes: num_workers (`least` or more), prefetch_factor, timeout.
function Workers._check(name, a, least)
  util.integer(name, "num_workers", a.num_workers, least, WORKERS_MOST)
  util.integer(name, "prefetch_factor", a.prefetch_factor, 1, 4096)
  if not (type(a.timeout) == "number" and a.timeout > 0 and a.timeout < 2 ^ 40) then
    P.fail(("%s: timeout is %s, allowed: seconds above 0"):format(name, tostring(a.timeout)))
  end
  if a.pin_memory ~= nil then signature.value(name, "pin_memory", a.pin_memory, "boolean") end
end

--- name: for messages; source: { code or module (of a function(arguments, shared) that returns an iterator), arguments
--- (plain values), shared (a list of tensors of cpu) }; options: num_workers, prefetch_factor, pin_memory, device
--- (where batches are moved when they are taken; nil: they stay), timeout (seconds), start (batches that are left out
--- before the first), rank, world_size.
function Workers:init(name, source, options)
  self.name, self.num_workers, self.timeout = name, options.num_workers, options.timeout
  local device = options.device and P.device(options.device)
  self.global_batches = options.global_batches or false
  self.device = device and not C.peri_device_host_access(device) and device or false
  self.shared = source.shared or {}
  self.ended, self.taken, self._feed = false, 0, false
  self._stream, self._copied = self.device and streams.Stream(self.device), nil
  local job = { code = source.code, module = source.module, arguments = source.arguments, seed = P.state.seed,
    start = options.start or 0, pin = pinned_for(options.device, options.pin_memory) }
  job.rank, job.world_size = options.rank, options.world_size
  self._job, self._prefetch_factor = job, options.prefetch_factor
  self:_begin()
end

--- Make the threads, which begin behind the first `start` batches of their job.
function Workers:_begin()
  self.ended, self.taken, self.ahead = false, 0, { batches = 0 }
  local job = serial.encode(self._job, self.name .. ": arguments")
  check(C.peri_feed_new(self._prefetch_factor * self.num_workers, out))
  self._feed = P.lasting(wrap, out[0])
  local address = ffi.string(out, ffi.sizeof "peri_feed *")
  for _ = 1, self.num_workers do start(self, self._feed, job, address) end
end

position.counted(Workers)

function Workers:given() return self._job.start + self.taken end

--- Go on with batch n, which new threads make: what was made ahead is given up.
function Workers:go_to(n)
  signature.value(self.name .. ":go_to", "n", n, "count")
  self:_give_up()
  self._job.start = n
  self:_begin()
end

--- The world whose exchanges this rank has to drive while it waits for a batch; nil: there are no other ranks.
local function others()
  local world = P.state.world
  return world and world:size() > 1 and world or nil
end

-- Microseconds after which whoever waits looks at the exchanges. Short for a rank that is alone, too: on a machine that
-- has more threads than processors, who sleeps until it is woken comes late, and the workers wait for it.
local SLICE = 200

--- The status of taking the next parcel, which is there or will not come any more. (Ranks of a sim world do not take
--- turns meanwhile: the thread goes on by itself, and who waits for it is not stuck.)
local function take_batch(self, feed)
  local status = C.peri_feed_take(feed, 0, parcel)
  if status ~= C.PERI_PENDING then return status end
  local world, from = others(), tonumber(C.peri_time_ns())
  while status == C.PERI_PENDING do
    if tonumber(C.peri_time_ns()) - from > self.timeout * 1e9 then
      fail(self, "batch %d is not there after %g s (timeout)", self.taken, self.timeout)
    end
    if world then C.peri_group_progress(world:ptr()) end
    status = C.peri_feed_take(feed, SLICE, parcel)
  end
  return status
end

--- Nobody wants more; workers that make a batch end with it.
local function stop_all(self) C.peri_feed_stop(feed_ptr(self._feed), 0) end

--- The batch of the parcel that was taken: parcels.open. Copies to a device are queued on a stream of the loader's own,
--- so that they run beside what is queued already; what is queued on the current stream from now on comes after them.
local function open(self)
  local device = self.device
  if not device then return parcels.open(parcel) end
  local batch, err = streams.run(self._stream, parcels.open, parcel, device)
  self._copied = self._stream:record_event(self._copied)
  streams.current(device):wait_event(self._copied)
  return batch, err
end

--- The next batch; nil at the end, or after stop(). What is an error of the loader is raised after the batches that it
--- made before, and whenever it is called again.
function Workers:next()
  if self.ended then
    if self.ended ~= true then fail(self, "%s", self.ended) end
    return nil
  end
  local feed = feed_ptr(self._feed)
  local status = take_batch(self, feed)
  if status == C.PERI_OK then
    local batch, err = open(self)
    if not err then
      self.taken = self.taken + 1
      return batch
    end
    self.ended = err
    stop_all(self)
  elseif status ~= C.PERI_ECLOSED then check(status)
  else
    local failed = C.peri_feed_failed(feed)
    self.ended = failed == nil or lua_states.text(failed)
  end
  return self:next()
end

--- Begin again with the first batch. False: some worker is over, so that new ones are needed.
function Workers:_restart()
  if self.ended and self.ended ~= true then return false end
  if C.peri_feed_restart(feed_ptr(self._feed)) ~= C.PERI_OK then return false end
  self.ended, self.taken = false, 0
  return true
end

--- Want no more, without waiting for the workers.
function Workers:_give_up()
  self.ended = self.ended or true
  stop_all(self)
end

--- Want no more: batches that wait are given up, and each worker ends with the batch that it is making. Waits for that
--- `timeout` (5) seconds at most, which is an error if they pass; workers are then left alone until they end. What the
--- garbage collector finds is stopped too.
function Workers:stop(timeout)
  self.ended = self.ended or true
  check(C.peri_feed_stop(feed_ptr(self._feed), (timeout or 5) * 1e6))
end

return Workers
