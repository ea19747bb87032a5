-- loading.lua: DataLoadingThread: batches are made on a thread of their own while the step computes, and wait in a queue.
--
--   local batches = peri.pipeline.DataLoadingThread { arguments = { path = "day_0", batch_size = 4096 }, loader = function(arguments)
--     return require("perilune").data.criteo(arguments)
--   end }
--   for loss in pipeline:run(batches) do ... end
--
-- The loader runs in a state of Lua of its own, which shares nothing with this one: it is a function without upvalues (it requires what it
-- needs), or the name of a module that is such a function. It returns an iterator, which is called on the thread.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local errors = require "perilune.errors"
local serial = require "perilune.dist.serial"
local parcels = require "perilune.pipeline.parcels"
local place_of = require("perilune.data.loader").place
local signature = require "perilune.signature"
local C, check = P.C, P.check

local wrap, _, feed_ptr = P.handle("peri_feed", {}, nil, "a DataLoadingThread")
local out, parcel = ffi.new "peri_feed *[1]", ffi.new "peri_feed_parcel"

local DataLoadingThread = util.class "DataLoadingThread"

local NAME = "DataLoadingThread"
local arguments = {
  loader = util.required,     -- function(arguments) -> function() -> a batch, or nil at the end; or the name of a module
  arguments = util.optional,  -- what it is called with: plain values, which are copied
  ahead = 2,                  -- so many batches wait for whoever takes them, at most
  device = util.optional,     -- where they are moved when they are taken; default: they stay in host memory
  timeout = 300,              -- seconds that taking one waits, at most
}

local function fail(text, ...) P.fail((NAME .. ": " .. text):format(...)) end

--- { code = } or { module = }.
local function source_of(loader)
  if type(loader) == "string" then return { module = loader } end
  if type(loader) ~= "function" then
    fail("loader is %s, wanted a function(arguments) that returns an iterator, or the name of a module that is one", errors.kind(loader))
  end
  local name = debug.getupvalue(loader, 1)
  if name and name ~= "" then
    fail("loader uses '%s' of what surrounds it; its thread has a state of Lua of its own: require it inside, or give it as arguments",
      name)
  end
  local ok, code = pcall(string.dump, loader)
  if not ok then fail "loader is a function of C, wanted one of Lua, or the name of a module" end
  return { code = code }
end

local MAIN = [[
local path, cpath, job, address = ...
package.path, package.cpath = path, cpath
require("perilune.pipeline.feeder").run(job, address)
]]

function DataLoadingThread:init(args)
  local a = util.named(NAME, args, arguments)
  local job = source_of(a.loader)
  util.integer(NAME, "ahead", a.ahead, 1, 4096)
  if not (a.timeout > 0 and a.timeout < 2 ^ 40) then fail("timeout is %g, allowed: seconds above 0", a.timeout) end
  job.arguments, job.seed = a.arguments, P.state.seed
  job.rank, job.world_size = place_of(NAME, {})
  self.device, self.timeout, self.ended, self.taken = a.device and P.device(a.device) and a.device or false, a.timeout, false, 0
  local bytes = serial.encode(job, NAME .. ": arguments")
  check(C.peri_feed_new(a.ahead, out))
  self._feed = P.lasting(wrap, out[0])
  local lua = P.new_lua(NAME, MAIN, package.path, package.cpath, bytes, ffi.string(out, ffi.sizeof "peri_feed *"))
  self._lua = lua.ptr
  local function address(f) return ffi.cast("void *", f) end
  local thread = ffi.new("peri_feed_thread", { state = lua.ptr, n_args = 4, run = address(lua.pcall), close = address(lua.close) })
  local status = C.peri_feed_start(feed_ptr(self._feed), thread)
  if status < 0 then lua.close(lua.ptr) end
  check(status)
end

--- Exchanges of this rank go on while it waits for a batch.
local function progress()
  local world = P.state.world
  if world then C.peri_group_progress(world:ptr()) end
end

local SLICE_US = 200

--- The status of taking the next parcel, which is there or will not come any more. (Ranks of a sim world do not take turns meanwhile: the
--- thread goes on by itself, and who waits for it is not stuck.)
local function take(self)
  local ptr, from = feed_ptr(self._feed), tonumber(C.peri_time_ns())
  local status = C.peri_feed_take(ptr, 0, parcel)
  while status == C.PERI_PENDING do
    if tonumber(C.peri_time_ns()) - from > self.timeout * 1e9 then
      fail("batch %d is not there after %g s (timeout)", self.taken, self.timeout)
    end
    progress()
    status = C.peri_feed_take(ptr, SLICE_US, parcel)
  end
  return status
end

--- The next batch; nil at the end, or after stop(). What is an error of the loader is raised after the batches that it made before, and
--- whenever it is called again.
function DataLoadingThread:get_next_batch()
  if self.ended then
    if self.ended ~= true then fail("%s", self.ended) end
    return nil
  end
  local status = take(self)
  if status == C.PERI_OK then
    self.taken = self.taken + 1
    local batch = parcels.batch_of(parcel)
    if self.device and type(batch) == "table" and batch.to then batch = batch:to(self.device) end
    return batch
  end
  if status ~= C.PERI_ECLOSED then check(status) end
  self.ended = C.peri_feed_result(feed_ptr(self._feed)) ~= 0 and P.lua_text(self._lua) or true
  return self:get_next_batch()
end
DataLoadingThread.__call = DataLoadingThread.get_next_batch

--- Want no more: batches that wait are given up, and the thread ends with the batch that it is making. Waits for that `timeout` seconds (5)
--- at most, which is an error if they pass; the thread is then left alone until it ends. What the garbage collector finds is stopped too.
function DataLoadingThread:stop(timeout)
  self.ended = self.ended or true
  check(C.peri_feed_stop(feed_ptr(self._feed), (timeout or 5) * 1e6))
end

signature.check("DataLoadingThread:", DataLoadingThread, { stop = "self: table, timeout: number?",
  get_next_batch = "self: table" })

return DataLoadingThread
