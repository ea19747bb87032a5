-- check.lua: what follows from a schedule: prologue and drain, how many batches are in flight, event edges between
-- streams, staleness; and the refusal of one that is wrong, which names the operations and what they quarrel about.
local util = require "perilune.util"
local operations = require "perilune.pipeline.operations"
local unroll = require "perilune.pipeline.unroll"

local M = {}
local refuse, where = unroll.refuse, unroll.where

--- Conditions far apart are brought near, and stay in their order and in their place within all `every`: what is
--- unrolled is short.
local function shorten(plan)
  local lcm, marks, list = 1, {}, {}
  for _, o in ipairs(plan.operations) do
    local a, b = lcm, o.every
    while b > 0 do a, b = b, a % b end
    lcm = lcm * o.every / a
    marks[o.from_step] = true
    if o.until_step then marks[o.until_step] = true end
  end
  if lcm > 4096 then refuse(plan, "the operations' every repeat after %d batches, allowed: up to 4096", lcm) end
  for mark in util.ordered(marks) do list[#list + 1] = mark end
  local gap = lcm * math.ceil((2 * (plan.ahead + plan.behind) + 4) / lcm) + lcm
  local shifted, before, cut = {}, 0, 0
  for _, mark in ipairs(list) do
    cut = cut + math.max(0, math.floor((mark - before - gap) / lcm)) * lcm
    shifted[mark], before = mark - cut, mark
  end
  for _, o in ipairs(plan.operations) do
    o.first, o.past = shifted[o.from_step], o.until_step and shifted[o.until_step] or math.huge
  end
  return before - cut + gap, lcm
end

local function one_of_kind(plan, kind, needed)
  local found
  for _, o in ipairs(plan.operations) do
    if o.kind == kind then
      if found then refuse(plan, "%s and %s are both '%s'; allowed: one", where(found), where(o), kind) end
      found = o
    end
  end
  if not found and needed then refuse(plan, "it has no operation '%s'", kind) end
  return found
end

--- Operations with what they need and make in this schedule, by place.
local function resolve(schedule, plan)
  local present = {}
  for _, o in ipairs(schedule.operations) do present[o.kind] = true end
  local access, streams = operations.resolve(present), {}
  for i, o in ipairs(schedule.operations) do
    local own = util.copy(o)
    if o.own then
      own.access = { own = true, run = o.own.run, channel = o.own.channel }
      for _, list in ipairs { "needs", "makes", "reads", "changes", "posts" } do
        own.access[list] = o.own[list] or {}
      end
    else
      own.access = access[o.kind]
    end
    if plan.facts.dense_tables and o.kind == "lookup" then
      own.access, own.access.reads = util.copy(own.access), util.copy(own.access.reads)
      table.insert(own.access.reads, "dense") -- the optimizer of the dense part trains tables
    end
    plan.operations[i] = own
    plan.first[o.kind] = plan.first[o.kind] or own
    if not streams[o.on] then
      streams[o.on] = true
      plan.streams[#plan.streams + 1] = o.on
    end
    for _, r in ipairs(own.access.makes) do
      plan.makers[r] = plan.makers[r] or {}
      table.insert(plan.makers[r], own)
    end
  end
end

--- Operations that act with another one act on its batches, a last group of fewer included.
local function follow(plan)
  for _, o in ipairs(plan.operations) do
    local other = o.every == 1 and o.with and plan.first[o.with]
    if other and other.every > 1 then
      o.every, o.at, o.access = other.every, other.at, util.copy(o.access)
      o.access.closes = other.access.closes
    end
  end
end

--- Everything but the load comes after it.
local function check_load(plan)
  local load = one_of_kind(plan, "load", true)
  if load.every ~= 1 or load.from_step > 0 or load.until_step then
    refuse(plan, "%s must load every batch", where(load))
  end
  for _, o in ipairs(plan.operations) do
    if o.ahead > load.ahead or o.ahead == load.ahead and o.place < load.place then
      refuse(plan, "%s acts on a batch that %s has not loaded yet", where(o), where(load))
    end
  end
  return load
end

--- An operation inside the backward pass stands before it, and acts on its batch.
local function check_hook(plan, o)
  if not o.access.own then refuse(plan, "%s has a hook; only operations with a run of their own do", where(o)) end
  local at = o.place
  repeat at = at + 1 until not plan.operations[at] or not plan.operations[at].hook
  local backward = plan.operations[at]
  if not backward or backward.kind ~= "backward" then
    refuse(plan, "%s has a hook: it must stand before 'backward'%s", where(o), backward and ", not before "
      .. where(backward) or "")
  end
  if o.ahead ~= backward.ahead or o.on ~= backward.on then
    refuse(plan, "%s has a hook: it acts on the batch of %s and on its stream", where(o), where(backward))
  end
end

--- An error for a misspelt name among what operations of the user's own read and change: one that is read and that no
--- operation changes, or one that is changed and that no other operation reads or changes.
local function check_words(plan)
  local read, changed, library = {}, {}, util.index_of(operations.beside)
  for _, o in ipairs(plan.operations) do
    for _, what in ipairs(o.access.reads) do read[what] = true end
    for _, what in ipairs(o.access.changes) do changed[what] = (changed[what] or 0) + 1 end
  end
  local function slip(o, verb, what, missing)
    refuse(plan, "%s %s '%s', which no %s; the library has %s", where(o), verb, what, missing,
      table.concat(operations.beside, ", "))
  end
  for _, o in ipairs(plan.operations) do
    for _, what in ipairs(o.access.reads) do
      if not changed[what] and not library[what] then slip(o, "reads", what, "operation changes") end
    end
    for _, what in ipairs(o.access.changes) do
      if not read[what] and changed[what] == 1 and not library[what] then
        slip(o, "changes", what, "other operation reads or changes")
      end
    end
  end
end

local function check_kinds(plan)
  for _, kind in ipairs { "update", "wait_grads", "optimizer", "sync" } do one_of_kind(plan, kind) end
  local wait = plan.first.wait_grads
  if wait and plan.first.update then
    refuse(plan, "%s: averages are taken, and waited for, by %s", where(wait), where(plan.first.update))
  end
  if wait and (wait.every > 1 or wait.from_step > 0 or wait.until_step) then
    refuse(plan, "%s must act on every batch", where(wait))
  end
  if not plan.first.forward then refuse(plan, "it has no operation 'forward'") end
  check_words(plan)
  for _, o in ipairs(plan.operations) do
    for _, what in ipairs(o.access.changes) do
      if o.access.own and what == "tables" then table.insert(plan.own_tables, o) end
    end
  end
  for _, o in ipairs(plan.operations) do
    for _, r in ipairs(o.access.needs) do
      if not plan.makers[r] then refuse(plan, "%s needs '%s' of its batch, which no operation makes", where(o), r) end
    end
    if o.hook then check_hook(plan, o) end
    if plan.flush and (o.from_step > 0 or o.until_step) then
      refuse(plan, "%s begins or ends at a batch, but batches count from 0 in every %d (flush)", where(o), plan.flush)
    end
    if o.scale ~= 1 and o.kind ~= "backward" then
      refuse(plan, "%s has a scale; only 'backward' scales, the loss", where(o))
    end
    if (o.kind == "update" or o.kind == "optimizer") and (o.from_step > 0 or o.until_step) then
      refuse(plan, "%s begins or ends at a step; allowed: every", where(o))
    end
    if plan.grad == false and (o.kind == "backward" or o.kind == "optimizer") then
      refuse(plan, "%s in a schedule with grad = false: nothing is recorded", where(o))
    end
  end
end

--- By channel: the operations that post on it, in the order of a step, on all ranks.
local function channels_of(plan)
  local channels = {}
  for _, o in ipairs(plan.operations) do
    for _, channel in ipairs(o.access.posts) do
      channels[channel] = channels[channel] or {}
      table.insert(channels[channel], o)
    end
  end
  return channels
end

--- Contracts: what the schedule promises, and what was found.
local function check_contracts(schedule, plan, found)
  for _, what in ipairs { "tables", "dense" } do
    local stale, allowed, who = found.staleness[what] or 0, schedule.staleness[what], found.readers[what]
    if stale > allowed then
      refuse(plan, "%s reads %s without the last %d update%s, which %s makes later: staleness %d, the schedule allows "
        .. "%d", where(who[1]), what, stale, stale > 1 and "s" or "", where(who[2]), stale, allowed)
    end
  end
  if schedule.depth and plan.depth > schedule.depth then
    refuse(plan, "%d batches are in flight from %s to %s, the schedule allows %d (depth)", plan.depth, where(plan.load),
      where(plan.last), schedule.depth)
  end
  for what, most in util.ordered(schedule.live) do
    if (found.live[what] or 0) > most then
      local maker, last = plan.makers[what][1], plan.makers[what][1]
      for _, o in ipairs(plan.operations) do
        for _, r in ipairs(o.access.needs) do
          if r == what and o.ahead <= last.ahead then last = o end
        end
      end
      refuse(plan, "%d batches have '%s' at once, from %s to %s, the schedule allows %d (live)", found.live[what], what,
        where(maker), where(last), most)
    end
  end
end

--- Check a schedule; see Schedule:check. Returns { name, operations (with .access), streams, ahead and behind (steps of
--- prologue and drain), depth (batches in flight), load, staleness = { tables, dense }, edges = list of { from, to,
--- over, steps }, live = resource -> batches that have it at once, channels = channel -> operations, flush = how many
--- batches are together, or false }.
function M.run(schedule, facts)
  local plan = { name = schedule.name, facts = facts, operations = {}, first = {}, makers = {}, streams = {},
    own_tables = {}, grad = schedule.grad, flush = schedule.flush or false }
  resolve(schedule, plan)
  follow(plan)
  local load = check_load(plan)
  local most, least, last = load.ahead, 0, nil
  for _, o in ipairs(plan.operations) do
    if o.ahead <= least then least, last = o.ahead, o end
  end
  plan.load, plan.last, plan.ahead, plan.behind = load, last or load, math.max(most, 0), -least
  plan.depth = most - least + 1
  if load.ahead < 0 then refuse(plan, "%s loads a batch after its step; allowed: ahead from 0", where(load)) end
  check_kinds(plan)
  plan.updates_tables = plan.first.update or plan.first.backward
  plan.updates_dense, plan.sync = plan.first.optimizer, plan.first.sync
  local long, lcm = shorten(plan)
  local found = { live = {}, edges = {}, staleness = { tables = 0, dense = 0 }, readers = {} }
  local together = plan.flush or math.huge
  for n = 1, math.min(plan.depth + 2, long, together) do unroll.run(plan, n, found) end
  for n = math.min(long, together), math.min(long + math.min(lcm, 4), together) do unroll.run(plan, n, found) end
  check_contracts(schedule, plan, found)
  plan.staleness, plan.edges, plan.live, plan.channels = found.staleness, found.edges, found.live, channels_of(plan)
  return plan
end

return M
