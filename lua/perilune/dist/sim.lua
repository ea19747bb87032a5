-- sim.lua: N ranks in one process: coroutines that take turns wherever a rank waits. The state of a rank
-- (perilune.ffi's `state`) is exchanged on every switch, so library and scripts run unchanged.
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local util = require "perilune.util"
local dist = require "perilune.dist"
local C, state = P.C, P.state

local M = {}
local worlds = 0

--- Rounds in which nobody moves before the ranks' deadlines count as passed; rounds after that before the run gives up.
local STALL, HOPELESS = 3, 10000

--- Run one rank until it waits or ends. True when it ended.
local function turn(rank)
  P.exchange_state(rank.state)
  local _, ok, result = assert(coroutine.resume(rank.co))
  local ended = coroutine.status(rank.co) == "dead"
  if ended then
    rank.ended = true
    if ok then
      rank.result = result
    else
      rank.error = result
      if rank.world then C.peri_group_abort(rank.world:ptr(), (errors.describe(result):match "^[^\n]*")) end
    end
  end
  P.exchange_state(rank.state)
  return ended
end

local function coroutine_body(rank, n, body, options, job)
  local function run()
    rank.world = dist.init {
      transport = "sim", job = job, rank = rank.number, size = n, local_size = options.local_size,
      timeout = options.timeout, device_transport = options.device_transport, device = options.device_transport
        and options.device,
    }
    local result = body(rank.number, rank.world)
    dist.finish()
    return result
  end
  return function() return xpcall(run, P.locate) end
end

local function raise_error_of_rank(ranks, first)
  local err = first.error
  local who = ("rank %d of %d"):format(first.number, #ranks)
  local function named(text) return text:sub(1, #who) == who and text or who .. ": " .. text end
  if getmetatable(err) ~= P.Error then error(named(errors.said(err)), 0) end
  local fields = util.copy(err)
  fields.message, fields.rank = named(err.message), first.number
  errors.raise(fields)
end

--- Run body(rank, world) on `n` ranks; returns the list of what the ranks returned. Named options: local_size, timeout,
--- device (the ranks' default device), device_transport (of that device: "sim"), catch. An error of a rank ends the
--- run: the first one is raised, with its rank; under `catch` nothing is raised and a second list (by rank + 1) holds
--- the error of each rank that failed.
function M.run(n, body, options)
  options = util.named("sim.run", options, {
    local_size = 0, timeout = 0, device = state.device, device_transport = util.optional, catch = false,
  })
  util.integer("sim.run", "the number of ranks", n, 1, 4096)
  if not util.is_callable(body) then P.fail(("sim.run: body is %s, wanted a function"):format(errors.kind(body))) end
  worlds = worlds + 1
  local job, ranks, first, live, quiet, events = "sim " .. worlds, {}, nil, n, 0, -1
  for i = 1, n do
    local rank = { number = i - 1 }
    rank.state = P.of_new_rank()
    rank.state.device, rank.state.yield = options.device, coroutine.yield
    rank.co = coroutine.create(coroutine_body(rank, n, body, options, job))
    ranks[i] = rank
  end
  while live > 0 do
    local now = 0
    for i = 1, n do
      local rank = ranks[i]
      if not rank.ended and turn(rank) then
        live = live - 1
        events = -1
        if rank.error and not first then first = rank end
      end
    end
    for i = 1, n do
      if ranks[i].world then now = now + tonumber(C.peri_group_progress(ranks[i].world:ptr())) end
    end
    quiet = now == events and quiet + 1 or 0
    events = now
    if quiet >= STALL then
      for i = 1, n do
        if not ranks[i].ended and ranks[i].world then C.peri_group_expire(ranks[i].world:ptr()) end
      end
    end
    if quiet > HOPELESS then P.fail "sim.run: ranks wait for something that is no operation of theirs" end
  end
  local results, failures = {}, {}
  for i = 1, n do
    results[i], failures[i] = ranks[i].result, ranks[i].error
    if ranks[i].world then ranks[i].world:release() end
  end
  if options.catch then return results, failures end
  if first then raise_error_of_rank(ranks, first) end
  return results
end

return M
