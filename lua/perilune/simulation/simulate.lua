-- simulate.lua: a schedule as it would run on ranks that are not there: discrete events over the streams and the
-- processor of each rank, and exchanges that all ranks take part in, over links that are busy or free.
--
-- An operation begins on a rank when its stream is free and all that it waits for is done. What it does is a list of
-- phases:
--   { "hold", ms }   the stream is taken, nothing else
--   { "run", ms }    the rank's processor works; whoever asks first goes first
--   { "post", name } the rank takes part in exchange `name` of the batch, which begins when all ranks have posted it
--   { "wait", name } until that exchange is done
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"

local M = {}

--- An error unless times (ms) are of operations of a checked schedule.
function M.check_times(times, plan)
  for name, t in util.ordered(times) do
    local known = false
    for _, o in ipairs(plan.operations) do known = known or o.name == name end
    if not known then
      P.fail(("simulate: no operation '%s' in schedule '%s', but %s"):format(name, plan.name,
        table.concat(util.map(plan.operations, function(o) return o.name end), ", ")))
    end
    if type(t) ~= "number" or not (t >= 0 and t < math.huge) then
      P.fail(("simulate: the time of '%s' is %s, allowed: milliseconds, 0 and more"):format(name, tostring(t)))
    end
  end
end

-- -- events by time ---------------------------------------------------------------------------------------------------

--- A heap of (time, payload), equal times in the order in which they came.
local function new_queue() return { n = 0, count = 0, time = {}, order = {}, what = {} } end

local function before(q, i, j)
  local a, b = q.time[i], q.time[j]
  if a ~= b then return a < b end
  return q.order[i] < q.order[j]
end

local function swap(q, i, j)
  q.time[i], q.time[j] = q.time[j], q.time[i]
  q.order[i], q.order[j] = q.order[j], q.order[i]
  q.what[i], q.what[j] = q.what[j], q.what[i]
end

local function push(q, time, what)
  local i = q.n + 1
  q.n, q.count = i, q.count + 1
  q.time[i], q.order[i], q.what[i] = time, q.count, what
  while i > 1 do
    local parent = math.floor(i / 2)
    if not before(q, i, parent) then return end
    swap(q, i, parent)
    i = parent
  end
end

local function pop(q)
  local time, what = q.time[1], q.what[1]
  swap(q, 1, q.n)
  q.n = q.n - 1
  local i = 1
  while true do
    local least, left = i, 2 * i
    if left <= q.n and before(q, left, least) then least = left end
    if left < q.n and before(q, left + 1, least) then least = left + 1 end
    if least == i then return time, what end
    swap(q, i, least)
    i = least
  end
end

-- -- what there is to do ----------------------------------------------------------------------------------------------

--- The operations of `steps` steps and of the prologue, in the order of issue: { o, step, batch, after = those that
--- wait for it, needs = how many it waits for, of = by predecessor: its operation }.
local function instances(plan, steps)
  local list, at, last = {}, {}, {}
  for n = -plan.ahead, steps - 1 do
    for _, o in ipairs(plan.operations) do
      local b = n + o.ahead
      local fits = b >= o.from_step and (not o.until_step or b < o.until_step) and b % o.every == o.at
      if b >= 0 and fits then
        local x = { o = o, step = n, batch = b, after = {}, needs = 0, id = #list }
        list[#list + 1] = x
        local function wait_for(y)
          if not y then return end
          table.insert(y.after, x)
          x.needs = x.needs + 1
        end
        wait_for(last[o.on])
        last[o.on] = x
        for _, e in ipairs(plan.edges) do
          if e.to == o then wait_for(at[e.from.place .. " " .. n - e.steps]) end
        end
        at[o.place .. " " .. n] = x
      end
    end
  end
  return list
end

-- -- running it -------------------------------------------------------------------------------------------------------

local Run = {}
Run.__index = Run

--- An operation of rank r has what it waits for: its phases begin.
function Run:begin(x, r, t, waited)
  self.from[r * self.k + x.id] = t
  if waited then self.cause[r * self.k + x.id] = waited end
  self:go_on({ x = x, r = r, phases = self.work(x.o, r, x.batch), phase = 0, from = t }, t)
end

--- All ranks have posted an exchange: it takes the links of each, one after another.
function Run:transfer(c, t)
  local done, links = t, self.links(c.name, c.batch)
  c.spans = {}
  for i, link in ipairs(links) do
    local free = self.free[link.name] or ffi.new("double[?]", self.ranks)
    self.free[link.name] = free
    for r = 0, self.ranks - 1 do
      local ms = link.ms[r]
      if ms > 0 then
        local from = math.max(t, free[r])
        free[r] = from + ms
        done = math.max(done, free[r])
        if self.shown[r] then
          table.insert(c.spans, { rank = r, link = i, name = link.name, from = from, to = free[r] })
        end
      end
    end
  end
  c.done = done + (links.latency or 0)
  for _, waiting in ipairs(c.waiting) do push(self.queue, c.done, waiting) end
  c.waiting = nil
end

function Run:exchange(name, batch)
  local key = name .. " " .. batch
  local c = self.exchanges[key]
  if not c then
    c = { name = name, batch = batch, posted = 0, waiting = {} }
    self.exchanges[key], self.exchange_list[#self.exchange_list + 1] = c, c
  end
  return c
end

--- The next phases of an operation, as long as they take no time.
function Run:go_on(job, t)
  while true do
    job.phase = job.phase + 1
    local phase = job.phases[job.phase]
    if not phase then return self:finish(job, t) end
    local kind, what = phase[1], phase[2]
    if kind == "hold" then return push(self.queue, t + what, job) end
    if kind == "run" then
      local from = math.max(t, self.processor[job.r])
      self.processor[job.r] = from + what
      self.busy[job.r] = self.busy[job.r] + (job.x.step >= self.half and what or 0)
      return push(self.queue, from + what, job)
    end
    local c = self:exchange(what, job.x.batch)
    if kind == "post" then
      c.posted = c.posted + 1
      if c.posted == self.ranks then self:transfer(c, t) end
    elseif c.waiting then
      table.insert(c.waiting, job)
      return
    elseif c.done > t then
      return push(self.queue, c.done, job)
    end
  end
end

function Run:finish(job, t)
  local x, r = job.x, job.r
  self.to[r * self.k + x.id] = t
  self.ended = self.ended + 1
  for _, y in ipairs(x.after) do
    local at = r * self.k + y.id
    self.left[at] = self.left[at] - 1
    if self.left[at] == 0 then self:begin(y, r, t, y.o.on ~= x.o.on and x.o or nil) end
  end
end

--- Run `steps` steps of a checked schedule on `ranks` ranks. args: { ranks = 1, steps =, work = function(operation,
--- rank, batch): phases, links = function(name, batch): list of { name =, ms = by rank from 0 } with latency (ms),
--- shown = set of ranks whose transfers are kept }. Returns { list = operations in the order of issue ({ o, step,
--- batch, id }), from and to (ms) at rank * #list + id, cause = by the same: the operation of another stream that it
--- began after, busy = ms of each rank's processor in the second half of the steps, half, exchanges }.
function M.run(plan, args)
  local ranks, list = args.ranks or 1, instances(plan, args.steps)
  local k = #list
  local self = setmetatable({ ranks = ranks, k = k, work = args.work, links = args.links, queue = new_queue(),
    exchanges = {}, exchange_list = {}, free = {}, cause = {}, ended = 0, half = math.floor(args.steps / 2),
    shown = args.shown or {}, processor = ffi.new("double[?]", ranks), busy = ffi.new("double[?]", ranks),
    from = ffi.new("double[?]", ranks * k), to = ffi.new("double[?]", ranks * k),
    left = ffi.new("int32_t[?]", ranks * k) }, Run)
  for r = 0, ranks - 1 do
    for i, x in ipairs(list) do self.left[r * k + i - 1] = x.needs end
  end
  for _, x in ipairs(list) do
    if x.needs == 0 then
      for r = 0, ranks - 1 do self:begin(x, r, 0) end
    end
  end
  while self.queue.n > 0 do
    local t, job = pop(self.queue)
    self:go_on(job, t)
  end
  if self.ended < ranks * k then
    P.fail(("simulate: schedule '%s' comes to a stop after %d of %d operations"):format(plan.name, self.ended,
      ranks * k))
  end
  return { list = list, from = self.from, to = self.to, cause = self.cause, busy = self.busy, half = self.half,
    exchanges = self.exchange_list }
end

return M
