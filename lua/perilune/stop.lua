-- stop.lua: being asked to stop, by a signal or by the script, and all ranks doing it after the same step.
--
--   peri.on_stop(function(reason, seconds_left) model:flush() end)   on every rank
--   for loss in pipeline:run(batches) do ... end                      ends after a step once a rank was asked; then
--                                                                     functions run
--   for i = 1, n do step() if peri.stopping() then break end end      the same in a loop of one's own
--   for i = 1, n do step() saver:step(i) end                          saver:step saves, and ends the script
--
-- A signal at one rank is enough: ranks vote, pipelines with each batch that they load (pipeline/supply.lua),
-- peri.stopping() in each call, and a Saver now and then (checkpoint/saver.lua). Signals are the launcher's
-- (runtime/host/stop.c): in another program on_stop takes none, and peri.request_stop() asks.
local P = require "perilune.ffi"
local errors = require "perilune.errors"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local C, state = P.C, P.state
P.own({ stop = false }, true) -- what this rank knows of a request to stop, or false

local M = {}

--- What asks, by the numbers that ranks send each other; the first three as runtime/host/stop.c numbers them.
local REASONS = { "SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "script" }
local SCRIPT = 5

--- Where signals come from: { open = function(), asked = function() -> number, seconds since or nil, grace = seconds,
--- leave = function(): ends the script as its own end does }; nil: from nowhere.
M.source = package.preload["perilune.stop.source"] and require "perilune.stop.source"
local opened = false -- of this process, whatever ranks it has
local is_guest = package.loaded["perilune.core"] ~= nil -- a C program runs Lua, and asks by request_stop

local function seconds() return tonumber(C.peri_time_ns()) * 1e-9 end

--- Of this rank: functions; own: when the script asked, or false; reason: why all stop, once they have agreed;
--- deadline: when the grace time is over, or math.huge; told: the functions have been called; vote: of peri.stopping,
--- which lasts until no object in `waits` is _unfinished; ends: see _ends; turn: see _turn.
local function new()
  return { functions = {}, own = false, reason = false, deadline = math.huge, told = false, vote = false,
    ends = false, turn = 0, waits = setmetatable({}, { __mode = "k" }) }
end

--- From now on the ranks stop together when one of them is asked to: pipelines load no more batches, peri.stopping()
--- says so. Then `f(reason, seconds_left)`, if there is one, is called on every rank, after the last step. On all ranks
--- together.
function M.on_stop(f)
  if type(f) ~= "nil" and not util.is_callable(f) then -- a null pointer equals nil
    P.fail(("on_stop: %s, wanted a function(reason, seconds_left)"):format(errors.kind(f)))
  end
  local s = state.stop or new()
  state.stop = s
  s.functions[#s.functions + 1] = f
  if opened then return end
  opened = true
  if M.source then M.source.open()
  elseif not is_guest then
    io.stderr:write("perilune: on_stop: no signal is heard, as `perilune run` has not started this script: SIGTERM and "
      .. "Ctrl-C end it at once; peri.request_stop() asks it to stop\n")
  end
end

--- Ask all ranks to stop, as a signal does. Any rank; those that were told on_stop heed it.
function M.request_stop()
  local s = state.stop
  if not s then P.fail "request_stop: peri.on_stop(f) or peri.stopping() goes before it" end
  s.own = s.own or seconds()
end

--- What a rank says in a vote: the number of the reason for which it was asked, or 0, and the milliseconds since.
function M._says()
  local s = state.stop
  if not s then return 0, 0 end
  local reason, since
  if M.source then reason, since = M.source.asked() end
  if reason then return reason, math.floor(since * 1000) end
  if s.own then return SCRIPT, math.floor((seconds() - s.own) * 1000) end
  return 0, 0
end

--- The ranks have agreed to stop.
function M._agree(reason, milliseconds)
  util.number("stop.agree", "reason", reason)
  util.number("stop.agree", "milliseconds", milliseconds)
  local s = state.stop
  if not s or s.reason then return end
  s.reason = REASONS[tonumber(reason)]
  local grace = M.source and reason ~= SCRIPT and M.source.grace or math.huge
  s.deadline = seconds() + grace - tonumber(milliseconds) * 1e-3
end

--- Why all ranks stop, or nil; and the seconds that are left for it. Local.
function M.stopped()
  local s = state.stop
  if not s or not s.reason then return nil end
  return s.reason, math.max(0, s.deadline - seconds())
end

--- Call the functions, once. Between steps, on all ranks together.
function M._call()
  local s = state.stop
  if not s or not s.reason or s.told then return end
  s.told = true
  for _, f in ipairs(s.functions) do f(M.stopped()) end
end

--- peri.stopping() tells nobody to stop as long as object:_unfinished() says so, which is alike on all ranks.
function M._waits_for(object, on) state.stop.waits[object] = on or nil end

--- Whether f(object) holds for one of these objects; it is called with each.
function M._some(f)
  local some = false
  for object in pairs(state.stop.waits) do some = f(object) or some end -- any order
  return some
end

--- What asks this rank alone to stop is heeded.
function M._ask()
  local reason, since = M._says()
  if reason > 0 then M._agree(reason, since) end
end

--- Begin a vote of the ranks of `group` (more than one): whether one of them was asked to stop (asks: false: not this
--- time), and two numbers more, of each of which the largest is the result. _heard(vote) waits for it. Collective.
function M._vote(group, asks, third, fourth)
  return P.lasting(function()
    if not group._stops then -- its operations take no numbers of the group's
      local ranks = {}
      for r = 1, group:size() do ranks[r] = r - 1 end
      group._stops = group:new_group(ranks, group.name .. "-stop")
    end
    local reason, since = 0, 0
    if asks then reason, since = M._says() end
    return group._stops:all_reduce(Tensor.tensor({ reason, since, third or 0, fourth or 0 }, "i64", "cpu"), "max")
  end)
end

--- The end of a vote: the two numbers. The ranks have agreed if one of them was asked.
function M._heard(vote)
  local told = vote:wait()
  local reason = told:item(0)
  if reason > 0 then M._agree(reason, told:item(1)) end
  return told:item(2), told:item(3)
end

--- Whoever ends a loop when the ranks have agreed to stop says so in each step, on all ranks alike, and whether this is
--- the last step ("last", "more"). The Saver then leaves the end of the script to it.
function M._ends(which)
  if state.stop then state.stop.ends = which end
end
--- What was said since the last call; false: nothing, so nobody else ends the loop.
function M._ending()
  local s = state.stop
  local which = s.ends
  s.ends = false
  return which
end

--- Numbers calls of Saver:step, whichever Saver's.
function M._turn()
  local s = state.stop
  s.turn = s.turn + 1
  return s.turn
end

--- At the end of a step of one's own loop: why all ranks stop, and the seconds that are left, or nil. The first call
--- does what on_stop without a function does. When it returns a reason, the functions of on_stop have been called.
--- Collective; what it says was asked before its last call, so that no rank waits for the others.
function M.stopping()
  if not state.stop then M.on_stop() end
  local s, world = state.stop, state.world
  s.ends = "last"
  if world and world.world_size > 1 then
    if s.vote then M._heard(s.vote) end
    s.vote = not s.reason and M._vote(world, true)
  else M._ask() end
  if s.reason and not s.told and M._some(function(object) return object:_unfinished() end) then return nil end
  M._call()
  return M.stopped()
end

--- End the script as it does at its own end: the functions of on_stop are called, then before(), and the process ends
--- with the exit code that says "start me again". Returns where `perilune run` has not started the script. Collective.
function M._leave(before)
  if not (M.source and M.source.leave) then return end
  M._call()
  before()
  M.source.leave()
end

return M
