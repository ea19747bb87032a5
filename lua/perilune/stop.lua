-- stop.lua: being asked to stop, by a signal or by the script, and all ranks doing it after the same step.
--
--   peri.on_stop(function(reason, seconds_left) model:flush() end)   on every rank
--   for loss in pipeline:run(batches) do ... end                      ends after a step once a rank was asked; then
--                                                                     functions run
--   for i = 1, n do step() if peri.stopping() then break end end      the same in a loop of one's own
--
-- A signal at one rank is enough: ranks vote, pipelines with each batch that they load (pipeline/supply.lua),
-- peri.stopping() in each call. Signals are the launcher's (runtime/host/stop.c): in another program on_stop takes
-- none, and peri.request_stop() asks.
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

--- Where signals come from: { open = function(), asked = function() -> number, seconds since or nil, grace = seconds };
--- nil: from nowhere.
M.source = package.preload["perilune.stop.source"] and require "perilune.stop.source"
local opened = false -- of this process, whatever ranks it has
local is_guest = package.loaded["perilune.core"] ~= nil -- a C program runs Lua, and asks by request_stop

local function seconds() return tonumber(C.peri_time_ns()) * 1e-9 end

--- Of this rank: functions; own: when the script asked, or false; reason: why all stop, once they have agreed;
--- deadline: when the grace time is over, or math.huge; told: the functions have been called; group, vote: of
--- peri.stopping, which lasts until no object in `waits` is _unfinished.
local function new()
  return { functions = {}, own = false, reason = false, deadline = math.huge, told = false, group = false,
    vote = false, waits = setmetatable({}, { __mode = "k" }) }
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

local function unfinished(s)
  local any = false
  for object in pairs(s.waits) do any = object:_unfinished() or any end -- any order
  return any
end

local function group_of(s)
  local world = state.world
  if not world or world.world_size == 1 then return nil end
  if not s.group then
    local ranks = {}
    for r = 0, world.world_size - 1 do ranks[r + 1] = r end
    s.group = world:new_group(ranks, "stop") -- its operations take no numbers of the world's
  end
  return s.group
end

--- At the end of a step of one's own loop: why all ranks stop, and the seconds that are left, or nil. The first call
--- does what on_stop without a function does. When it returns a reason, the functions of on_stop have been called.
--- Collective; what it says was asked before its last call, so that no rank waits for the others.
function M.stopping()
  if not state.stop then M.on_stop() end
  local s = state.stop
  local group = not s.reason and group_of(s)
  if group then
    local vote = s.vote
    if vote then
      local result = vote:wait()
      if result:item(0) > 0 then M._agree(result:item(0), result:item(1)) end
    end
    s.vote = not s.reason and group:all_reduce(Tensor.tensor({ M._says() }, "i64", "cpu"), "max")
  elseif not s.reason then
    local reason, since = M._says()
    if reason > 0 then M._agree(reason, since) end
  end
  if s.reason and not s.told and unfinished(s) then return nil end
  M._call()
  return M.stopped()
end

return M
