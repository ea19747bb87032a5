-- state.lua: the state of the running rank. Under `sim` the scheduler exchanges it when it switches ranks, so nothing
-- else may cache it. Each field belongs to the file that says `own`: to a layer above this one as a rule, which this
-- file need not know.
local library = require "perilune.library"
local errors = require "perilune.errors"
local getenv = require "perilune.environment"
local util = require "perilune.util"

local C, check = library.C, library.check
local M = {}

--- Values that fields have before somebody sets them, and those fields that a rank does not take over from who starts
--- it.
local initial, anew, names = {}, {}, {}

--- The state of the rank that runs now. Setting a field that nobody owns is an error.
local now = setmetatable({}, {
  __index = initial,
  __newindex = function(state, name, value)
    if initial[name] == nil then error(("state.%s: there is no such field"):format(tostring(name)), 2) end
    rawset(state, name, value)
  end,
})
M.now = now

--- Fields and their first values, none of them nil. `per_rank`: a rank begins with these, whatever whoever starts it
--- has.
function M.own(fields, per_rank)
  for name, value in util.ordered(fields) do
    if initial[name] == nil then names[#names + 1] = name end
    initial[name] = value
    if rawget(now, name) == nil then rawset(now, name, value) end
    if per_rank then anew[name] = value end
  end
end

--- scope: the open scope, or false (handles.lua); yield: under sim, a function(round) by which a rank lets the next one
--- run; watched: the group (a pointer) whose world notes what this rank waits for, or false; streams: { device =,
--- stream =, outer = }, the current streams that are not the default ones; autocast: the innermost region (a pointer),
--- or false; grad: gradients are recorded; capturing: a graph is captured (nn/graphed.lua); owner: a number of the
--- rank's own, by which C tells what its lookups found.
M.own({ scope = false, yield = false, streams = false, autocast = false, grad = true, capturing = false, owner = 0 },
  true)
--- device: name of the default device; place: { rank, world size } where there is no world (in a loader's thread), or
--- false.
M.own { device = getenv "PERI_DEVICE" or "cpu", watched = false, place = false }

local owners = 0

--- The state of a rank that starts here.
function M.of_new_rank()
  local state = util.copy(now)
  for name, value in util.ordered(anew) do state[name] = value end
  owners = owners + 1
  state.owner = owners
  return state
end

--- Give other ranks a chance. `round` counts the calls of one wait. Under `sim` it switches to the next rank.
function M.pause(round)
  if now.capturing then errors.fail("graphed: a wait for other ranks cannot be captured") end
  if now.watched then C.peri_group_waits(now.watched) end
  if now.yield then return now.yield(round) end
  C.peri_pause(round)
end

--- Run f(...) without recording gradients.
local function restore_grad(before, ok, ...)
  now.grad = before
  check(C.peri_grad_enabled_set(before))
  if not ok then error((...), 0) end
  return ...
end
function M.no_grad(f, ...)
  if not util.is_callable(f) then errors.fail(("no_grad: f is %s, wanted a function"):format(errors.kind(f))) end
  local before = now.grad
  check(C.peri_grad_enabled_set(false)) -- first: the name is looked up here, for which Lua may have no memory
  now.grad = false
  return restore_grad(before, xpcall(f, errors.locate, ...))
end
errors.runners[M.no_grad] = true

--- Tell C the current stream of a device, after now.streams has changed.
function M.set_stream(device)
  local at = now.streams
  while at and at.device ~= device do at = at.outer end
  check(C.peri_stream_current_set(device, at and at.stream.ptr or nil))
end

--- Tell C the current streams of all devices in `streams`, a list linked by `outer` (as now.streams): what now.streams
--- says of each, which for a device that it does not name is none.
local function set_streams_of(streams)
  local at = streams
  while at do
    M.set_stream(at.device)
    at = at.outer
  end
end

--- Exchange `state` with that of another rank, and what C keeps for each thread with it.
function M.exchange_state(other)
  local before = now.streams
  for i = 1, #names do
    local name = names[i]
    now[name], other[name] = other[name], now[name]
  end
  check(C.peri_grad_enabled_set(now.grad))
  check(C.peri_autocast_current_set(now.autocast or nil))
  C.peri_late_owner(now.owner)
  set_streams_of(before)
  set_streams_of(now.streams)
end

return M
