-- stream.lua: streams of devices, and events between them (perilune/device.h). Names are PyTorch's.
--
--   local side = peri.stream.Stream(device)
--   side:wait_stream(peri.stream.current(device))        -- what was queued so far comes before
--   local y = peri.stream.run(side, function() return x * 2 end)
--   peri.stream.current(device):wait_stream(side)        -- before y is used, or x or y released, on the other stream
--
-- Work of one stream runs in order; work of two streams in any order that no event forbids. Memory belongs to the
-- stream that was current when it was taken, which is where it is freed: so join the streams before what both use is
-- released. On "cpu" everything runs at once.
local ffi = require "ffi"
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local signature = require "perilune.signature"
local C, check, state = P.C, P.check, P.state

local M = {}

--- A handle class whose handles are equal when they stand for one object, and outlive scopes.
local function class(name, methods, text)
  local ctype, wrap, ptr
  wrap, ctype, ptr = P.handle(name, methods, {
    __eq = function(a, b) return ffi.istype(ctype, a) and ffi.istype(ctype, b) and a.ptr == b.ptr end,
  }, text)
  return function(pointer) return P.lasting(wrap, pointer) end, ctype, ptr
end

local streams, events = {}, {}
local wrap_stream, stream_type, stream_ptr = class("peri_stream", streams, "a stream")
local wrap_event, event_type, event_ptr = class("peri_event", events, "an event")
signature.handle("Stream", stream_type)
signature.handle("Event", event_type)
local stream_out, event_out = ffi.new "peri_stream *[1]", ffi.new "peri_event *[1]"

--- A new stream of a device (default: the rank's). It lives until it is released or collected.
function M.Stream(device)
  check(C.peri_stream_new(P.device(device), stream_out))
  return wrap_stream(stream_out[0])
end

--- A new event of a device. One that was never recorded is done.
function M.Event(device)
  check(C.peri_event_new(P.device(device), event_out))
  return wrap_event(event_out[0])
end

local function current_of(device)
  local stream = C.peri_stream_current(device)
  C.peri_stream_retain(stream)
  return wrap_stream(stream)
end

--- The stream on which operations on a device queue now.
function M.current(device) return current_of(P.device(device)) end

-- -- streams ----------------------------------------------------------------------------------------------------------

--- Name of its device.
function streams:device() return ffi.string(C.peri_device_name(C.peri_stream_device(stream_ptr(self)))) end
--- Later work of this stream waits for the event. Does not block.
function streams:wait_event(event) check(C.peri_stream_wait(stream_ptr(self), event_ptr(event))) end
--- Later work of this stream waits for what is queued on another of the same device. Does not block.
function streams:wait_stream(stream) self:wait_event(stream:record_event()) end
--- Mark the present end of this stream by `event` (default: a new one), which is returned.
function streams:record_event(event)
  event = event or M.Event(C.peri_stream_device(stream_ptr(self)))
  check(C.peri_event_record(event_ptr(event), stream_ptr(self)))
  return event
end
--- Whether all that is queued has run. Does not block.
function streams:query() return self:record_event():query() end
--- Block until all that is queued has run.
function streams:synchronize() check(C.peri_stream_synchronize(stream_ptr(self))) end

-- -- events -----------------------------------------------------------------------------------------------------------

function events:device() return ffi.string(C.peri_device_name(C.peri_event_device(event_ptr(self)))) end
--- Mark the present end of `stream` (default: the current one).
function events:record(stream)
  check(C.peri_event_record(event_ptr(self), stream_ptr(stream or current_of(C.peri_event_device(event_ptr(self))))))
end
--- Later work of `stream` (default: the current one) waits for the mark. Does not block.
function events:wait(stream)
  stream = stream or current_of(C.peri_event_device(event_ptr(self)))
  stream:wait_event(self)
end
--- Whether everything before the mark has run. Does not block.
function events:query() return check(C.peri_event_query(event_ptr(self))) == C.PERI_OK end
--- Block until everything before the mark has run.
function events:synchronize() check(C.peri_event_synchronize(event_ptr(self))) end

-- -- the current stream -----------------------------------------------------------------------------------------------

local function leave(before, device, ok, ...)
  state.streams = before
  P.set_stream(device)
  if not ok then error((...), 0) end
  return ...
end

--- Run f(...) with `stream` as the current one of its device. Returns what f returns.
function M.run(stream, f, ...)
  signature.value("stream.run", "stream", stream, "Stream")
  signature.value("stream.run", "f", f, "callable")
  local device, before = C.peri_stream_device(stream_ptr(stream)), state.streams
  state.streams = { device = device, stream = stream, outer = before }
  P.set_stream(device)
  return leave(before, device, xpcall(f, P.locate, ...))
end
errors.runners[M.run] = true

--- Give memory back to the driver that the device keeps for later and does not use, for other libraries that allocate
--- for themselves.
function M.empty_cache(device) check(C.peri_device_trim(P.device(device))) end

signature.check("stream.", M, { Stream = "device: device?", Event = "device: device?", current = "device: device?",
  empty_cache = "device: device?" })
signature.check_each("Stream:", streams, { "device", "query", "synchronize" }, "self: Stream")
signature.check("Stream:", streams,
  { wait_event = "self: Stream, event: Event", wait_stream = "self: Stream, stream: Stream",
    record_event = "self: Stream, event: Event?" })
signature.check_each("Event:", events, { "device", "query", "synchronize" }, "self: Event")
signature.check("Event:", events, { record = "self: Event, stream: Stream?", wait = "self: Event, stream: Stream?" })

return P.util.face("peri.stream", M)
