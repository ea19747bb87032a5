-- saver.lua: checkpoints of a run: when to save, which to keep, and where to go on after a stop.
--
--   local saver = peri.checkpoint.Saver { folder = "checkpoints", parts = { model = model, optimizer = optimizer },
--     every = "10m" }
--   local step = saver:resume() or 0        -- loads the newest checkpoint that is good; nil: there is none
--   loader:skip(step)
--   for batch in loader do
--     ... a training step ...
--     step = step + 1
--     saver:step(step)                      -- saves when it is time; ends the script when it was asked to stop
--   end
--   saver:close(step)                       -- saves the last state, if steps were made since
--
-- `perilune run --checkpoint FOLDER --every 10m --resume auto script.lua` gives folder, every, keep and resume, so that
-- a script need not: peri.checkpoint.Saver { parts = ... } then takes them from there; without a folder it saves
-- nothing.
--
-- Checkpoints of a folder are named save-NUMBER-step-STEP. Numbers count saves, whatever their steps: after going back
-- to an older one, the newest is what really continued, and clocks do not matter.
local ffi = require "ffi"
local environment = require "perilune.environment"
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local util = require "perilune.util"
local signature = require "perilune.signature"
local stop = require "perilune.stop"
local parts_of = require "perilune.checkpoint.parts"
local names = require "perilune.checkpoint.names"
local encode = require("perilune.checkpoint.values").encode
local interval = require "perilune.checkpoint.interval"
local async = require "perilune.checkpoint.async"
local Checkpoint = require "perilune.checkpoint.reader"
local save, knows = require("perilune.checkpoint.save").save, require("perilune.checkpoint.save").knows
local load = require "perilune.checkpoint.load"
local C, check = P.C, P.check

local _, _, _, wrap_lock = P.handle("peri_checkpoint_lock", {}, nil, "the right to save into a folder")
local lock_out = ffi.new "peri_checkpoint_lock *[1]"

local Saver = util.seal(util.class "Saver")
local VOTE_SECONDS = 0.25 -- how often ranks vote whether it is time to save or to stop, about

local arguments = {
  parts = util.required.table,     -- as for checkpoint.save
  folder = util.optional.string,   -- of the checkpoints; nil: PERI_CHECKPOINT, which the launcher sets; without either
                                   -- nothing is saved
  every = util.optional,           -- steps or a time between saves; default: PERI_CHECKPOINT_EVERY, else 10 minutes
  full_every = util.optional.number, -- every so many saves one is a full checkpoint, those between are increments;
                                     -- default: PERI_CHECKPOINT_FULL_EVERY, else 1: all are full
  keep = util.optional.number,     -- the newest so many are kept, with what they are increments of; default:
                                   -- PERI_CHECKPOINT_KEEP, else 3
  keep_every = util.whole(nil, 1), -- and those of every so many steps, for ever
  async = util.optional,           -- true: go on while a checkpoint is written (async.lua); default:
                                   -- PERI_CHECKPOINT_ASYNC is 1
  pace = util.optional.number,     -- with async, the share of the time that copying takes: above 0, at most 1; default:
                                   -- 0.01
  resume = util.optional.string,   -- "auto": the newest that is good; "no"; or a checkpoint's path; default:
                                   -- PERI_CHECKPOINT_RESUME, else auto
  group = util.optional,           -- the ranks that save together; default: the world, if one was joined
}

local function of_launcher(name) return environment("PERI_CHECKPOINT" .. name) end

function Saver:init(args)
  local func = "Saver"
  local a = util.named(func, args, arguments)
  self.parts, self.folder = a.parts, a.folder or of_launcher "" or false
  self.seconds, self.steps = interval(func, a.every or of_launcher "_EVERY" or "10m")
  self.keep = util.integer(func, "keep", a.keep or tonumber(of_launcher "_KEEP" or 3), 1)
  self.full_every = util.integer(func, "full_every", a.full_every or tonumber(of_launcher "_FULL_EVERY" or 1), 1)
  self.keep_every = a.keep_every or false
  if a.async ~= nil then signature.value(func, "async", a.async, "boolean") end
  self.async = a.async or a.async == nil and of_launcher "_ASYNC" == "1"
  self.pace = a.pace or false
  if a.pace and not (a.pace > 0 and a.pace <= 1) then
    P.fail(("%s: pace is %g, allowed: above 0, at most 1"):format(func, a.pace))
  end
  self._held, self._lost, self._who = false, false, false -- of rank 0: see hold
  self._postponed = false -- a save that is due when the state is whole again
  self.saving = false -- the save that is under way: { handle =, step = of the one before it }
  self._resume = a.resume or of_launcher "_RESUME" or "auto"
  for _, part in ipairs(parts_of.list(func, self.parts)) do -- an error now, not at the first save
    if part.module then
      encode(parts_of.extra_of(part.object), ("%s: part '%s': get_extra_state"):format(func, part.name))
    end
  end
  self.group = parts_of.group(func, a.group) or false
  self.rank = self.group and self.group:rank() or 0
  local world = P.state.world -- a part of the ranks does not stop alone
  self._stops = not world or world.world_size == (self.group and self.group:size() or 1)
  self.at = 0 -- the newest step that it was told
  -- of the last save; the digest of what the run went on from
  self.number, self.last_step, self.from = 0, false, false
  -- path of what the next increment is one of; how many there are since the full checkpoint
  self.parent, self.increments = false, 0
  self._saved_at = C.peri_time_ns()
  self._vote, self._next_vote = false, 1 -- the vote that is under way; the step that begins the next one
  self._voted_at, self._voted_step = false, 0
  self._turn, self._has_stopped = 0, false -- see others_wait
  self.resumed, self.stepped, self.closed = false, false, false -- resume(), step() and close() were called
  -- number of the run's first save, which all its checkpoints tell; that of each path
  self.first, self._firsts = false, {}
  Saver.made = true
  stop.on_stop() -- from now on a signal lets ranks stop after a step, which is saved
  stop._waits_for(self, true)
  if self.folder then self:_lock() end
  if self.folder then self:_tell("saves", self.folder) end
end

--- Tell the launcher, which starts the job again (--max-restarts): "saves", into which folder; "stepped", a step was
--- made.
function Saver:_tell(kind, text)
  local launched = self.rank == 0 and package.preload["perilune.checkpoint.note"]
  if launched then require "perilune.checkpoint.note"(kind, text) end
end

--- parts.on_first among the ranks that save.
local function on_first(self, func, f, own) return parts_of.on_first(self.group or nil, func, f, own) end

--- Whether rank 0, which asks, has the right to save into what is the folder now.
local function holds(self) return self._held and C.peri_checkpoint_lock_holds(self._held.ptr, self.folder) end

--- Whether the folder is that of before, which was mounted anew: .lock is still what this run wrote, and its last save
--- is there.
local function is_same(self)
  if util.read_file(self.folder .. "/.lock") ~= self._who then return false end
  for _, entry in ipairs(Saver.list(self.folder)) do
    if entry.path == self.parent then return true end
  end
  return false
end

--- Take it, unless it is had. Returns whether another folder has got the name since.
local function hold(self)
  if holds(self) then return false end
  if self._held then
    self._held:release()
    self._held, self._lost = false, true
  end
  local same = self._lost and is_same(self)
  check(C.peri_checkpoint_lock_new(self.folder, lock_out))
  local moved = self._lost and not same
  self._held, self._lost = P.lasting(wrap_lock, lock_out[0]), false
  self._who = util.read_file(self.folder .. "/.lock")
  return moved
end

--- One job at a time saves into a folder, which all hosts share: each rank finds there what rank 0 has written.
function Saver:_lock()
  local file = self.folder .. "/.lock"
  local who = on_first(self, "Saver", function()
    hold(self)
    return util.read_file(file)
  end)
  if not self.group then return end
  parts_of.together(self.group, "Saver", function()
    local began, seconds = tonumber(C.peri_time_ns()), parts_of.patience(self.group)
    while util.read_file(file) ~= who do
      if tonumber(C.peri_time_ns()) - began > seconds * 1e9 then
        P.fail(("Saver: folder '%s' is another one here than on rank 0 (%s): all hosts must share the folder of "
          .. "checkpoints"):format(
          self.folder, who))
      end
      C.peri_pause(50000)
    end
  end)
end

-- -- what is in the folder --------------------------------------------------------------------------------------------

--- Checkpoints of a folder that a Saver has made, newest first: see names.lua. Local.
Saver.list = names.list

local function say(format, ...) io.stderr:write("perilune: ", format:format(...), "\n") end

local identity = P.struct "peri_checkpoint_info"

--- The entries, each with the digests of what it is (`is`: its own, and of what it stands for) and of what it is an
--- increment of (`of`).
local function with_digests(list)
  for _, entry in ipairs(list) do
    local known = C.peri_checkpoint_identify(entry.path, identity) >= 0
    entry.is = known and { ffi.string(identity.digest), ffi.string(identity.same_as) } or {}
    entry.of = known and ffi.string(identity.parent) or ""
  end
  return list
end

--- The number of the first save of the run that made a checkpoint; nil: it cannot be read, or does not say.
local function first_of(self, path)
  if self._firsts[path] == nil then
    local ok, first = pcall(function()
      local c = Checkpoint(path, true)
      local values = c:values().values
      c:close()
      return values.saver.first
    end)
    self._firsts[path] = ok and first or nil -- what cannot be read now may be read next time
  end
  return self._firsts[path]
end

--- Remove, of the checkpoints of this run, what is neither among its newest, nor of a step that is kept, nor what the
--- run went on from, nor what one of these is an increment of. What is open elsewhere stays, and so does what somebody
--- else has an increment of.
local function remove_old(self)
  if not self.first or not holds(self) then return end
  local list, by_digest, own = with_digests(Saver.list(self.folder)), {}, 0
  for _, entry in ipairs(list) do
    for _, digest in ipairs(entry.is) do by_digest[digest] = by_digest[digest] or entry end
  end
  for _, entry in ipairs(list) do
    local others = first_of(self, entry.path) ~= self.first
    own = own + (others and 0 or 1)
    local kept = others or own <= self.keep or entry.is[1] == self.from or entry.is[2] == self.from
      or entry.path == self.parent or self.keep_every and entry.step % self.keep_every == 0
    while kept and entry and not entry.kept do
      entry.kept = true
      entry = entry.of ~= "" and by_digest[entry.of]
    end
  end
  for _, entry in ipairs(list) do -- the newest first: an increment before what it is one of
    if not entry.kept and C.peri_checkpoint_remove(entry.path) < 0 and C.peri_error_status() ~= C.PERI_EPEER then
      say("'%s' could not be removed: %s", entry.path, ffi.string(C.peri_error_message()))
    end
  end
end

--- The same on rank 0, after a save or a load, which has not failed if this does: what was met is said, and the next
--- save removes what is left. Collective.
local function sweep(self)
  on_first(self, "Saver", function()
    local ok, err = pcall(remove_old, self)
    if not ok then say("old checkpoints of '%s' stay for now: %s", self.folder, (errors.describe(err))) end
  end)
end

-- -- going on ---------------------------------------------------------------------------------------------------------

--- Whether checkpoint `path` lies in the folder.
local function is_within(self, path)
  return self.folder and path:gsub("/+$", ""):match "^(.*)/[^/]*$" == self.folder:gsub("/+$", "")
end

--- The next increment is one of checkpoint `path`, which was loaded; of one in another folder there are none.
function Saver:_go_on_from(path)
  if self.full_every == 1 or not is_within(self, path) then return end
  self.parent, self.increments = path, on_first(self, "Saver:resume", function()
    local c = Checkpoint(path)
    local levels = #c:levels()
    c:close()
    return levels - 1
  end)
end

--- Load the checkpoint that the run goes on from: the newest that is good, or the one that was asked for. Returns its
--- step and what was saved as `values`; nil: there is none. Collective.
function Saver:resume()
  self.resumed = true
  async.settle() -- it is the newest
  if self._resume == "no" then return nil end
  local auto = self._resume == "auto"
  if auto and not self.folder then return nil end
  local list = auto and on_first(self, "Saver:resume", function() return Saver.list(self.folder) end)
    or { { path = self._resume } }
  for i, entry in ipairs(list) do
    local options = { group = self.group or nil, increments = self.full_every > 1 }
    local ok, values, damaged, begun = load.attempt(entry.path, self.parts, options, true)
    if ok then
      local own = type(values) == "table" and values.saver
      if not own then P.fail(("Saver:resume: '%s' was not saved by a Saver, so it does not say its step; "
        .. "checkpoint.load takes it"):format(
        entry.path)) end
      -- By its digest: the path may be a link to it, or spelled otherwise than the folder's.
      self.from = on_first(self, "Saver:resume", function()
        check(C.peri_checkpoint_identify(entry.path, identity))
        return ffi.string(identity.digest)
      end)
      self.last_step, self.at = own.step, own.step
      self.number, self.first = auto and list[1].number or self.number, is_within(self, entry.path) and own.first
        or false
      self:_go_on_from(entry.path)
      if self.rank == 0 then say("going on from '%s', step %d", entry.path, own.step) end
      if auto then sweep(self) end
      return own.step, values.user
    end
    if auto and damaged and i == #list and self.rank == 0 then
      say("no checkpoint of '%s' is good; --resume no starts anew", self.folder)
    end
    if not (auto and damaged and i < #list) then load.give_up(values, begun) end
    if self.rank == 0 then say("'%s' is not good: %s; trying the one before", entry.path, (errors.describe(values))) end
  end
  return nil
end

-- -- saving -----------------------------------------------------------------------------------------------------------

--- Whether there is something of that name, whatever it is: renaming it to its own name does nothing.
local function is_there(path) return (os.rename(path, path)) == true end

local function path_of(folder, number, step) return ("%s/save-%06d-step-%d"):format(folder, number, step) end

--- The first number from `number` on whose name is free in the folder: a checkpoint that was copied in part, or lost
--- its manifest, is none, and keeps its name.
local function free_number(folder, number, step)
  while is_there(path_of(folder, number, step)) do number = number + 1 end
  return number
end

--- The end of the save that is under way, if there is one, also one of another Saver: what it met is an error now.
--- Collective.
local function settle(self)
  local saving = self.saving
  if not saving then return async.settle() end
  self.saving = false
  local ok, err = xpcall(saving.handle.wait, P.locate, saving.handle)
  if not ok then
    self.last_step, self.parent, self.increments = saving.before, saving.parent, saving.increments
    error(err, 0)
  end
  sweep(self)
end

--- Whether the next save is to be an increment, if all ranks know what changed. All ranks alike.
local function wants_increment(self)
  return self.full_every > 1 and self.parent and self.increments + 1 < self.full_every
end

--- Another folder has got the name of the one that was saved into: what is there is not of this run.
local function begin_anew(self)
  self.first, self.from, self.parent, self.increments, self._firsts = false, false, false, 0, {}
  if self.rank == 0 then
    say("'%s' is another folder than before, or has lost its .lock: the run saves into it as a new one", self.folder)
  end
end

--- What the next save is an increment of; nil: it is a full one. told: what ranks told in Saver:save.
local function next_parent(self, told)
  if not wants_increment(self) then return nil end
  local all = true
  for _, other in ipairs(told) do all = all and other.knows end
  if all then return self.parent end
  if self.rank == 0 then
    say("which rows changed since '%s' is not known any more (the model, or what it saved beside, is another): saving "
      .. "a full checkpoint", self.parent)
  end
end

--- Steps are counted forwards.
function Saver:_forward(func, step)
  if step < self.at then
    P.fail(("%s: step %d, after step %d; steps go up from that of resume()"):format(func, step, self.at))
  end
  self.at = step
end

--- Save now, after `step` steps, with `values` beside: plain numbers, texts and tables, or a function that returns
--- them. Returns the path; nil without a folder. With async the save is under way then, and ends behind the steps that
--- follow; what it meets is an error of the next save, or of close. Collective.
function Saver:save(step, values)
  if not self.folder then return nil end
  util.integer("Saver:save", "step", step, 0)
  if self.closed then P.fail "Saver:save: it was closed" end
  self:_forward("Saver:save", step)
  settle(self)
  if util.is_callable(values) then values = values() end
  local ok, wrong = pcall(encode, values, "Saver:save") -- all ranks hear of it
  local found, told = on_first(self, "Saver:save", function()
    local moved = hold(self)
    local newest = Saver.list(self.folder)[1]
    if newest and not self.resumed and self.number == 0 then
      P.fail(("Saver:save: folder '%s' has checkpoints of an earlier run, and saver:resume() was not called: call it "
        .. "before the first step (--resume no starts anew), or take another folder"):format(self.folder))
    end
    return { moved = moved,
      number = free_number(self.folder, math.max(self.number, newest and newest.number or 0) + 1, step) }
  end, { step = step, wrong = not ok and errors.describe(wrong) or false,
    knows = wants_increment(self) and knows(self.parts, self.parent) or false })
  if not ok then error(wrong, 0) end
  for r, other in ipairs(told) do
    if other.step ~= step then
      P.fail(("Saver:save: step %d on rank %d, and %d on rank %d"):format(step, self.rank, other.step, r - 1))
    end
    if other.wrong then P.fail(("%s (on rank %d)"):format(other.wrong, r - 1)) end
  end
  if found.moved then begin_anew(self) end
  local number = found.number
  local path = path_of(self.folder, number, step)
  local first = self.first or number
  local parent = next_parent(self, told)
  local result = save(path, self.parts,
    { values = { saver = { number = number, step = step, first = first }, user = values }, group = self.group or nil,
      async = self.async or nil, pace = self.async and self.pace or nil,
    increments = self.full_every > 1, increment_of = parent })
  if self.async then
    self.saving = { handle = result, before = self.last_step, parent = self.parent, increments = self.increments }
  end
  self.number, self.first, self.last_step, self._saved_at = number, first, step, C.peri_time_ns()
  self.parent, self.increments = path, parent and self.increments + 1 or 0
  if self.async then return path end
  sweep(self)
  return path
end

local function since(at) return tonumber(C.peri_time_ns() - at) * 1e-9 end
local function is_time(self) return self.seconds and since(self._saved_at) >= self.seconds end

--- Begin a vote: whether somebody was asked to stop (asks), and of rank 0 whether it is time to save, and after which
--- step the next vote begins: the one that comes VOTE_SECONDS later, if steps go on as fast as since the last vote.
local function begin_vote(self, step, asks)
  local due, next_vote = 0, 0
  if self.rank == 0 then
    local steps = step - self._voted_step
    local rate = self._voted_at and steps / math.max(since(self._voted_at), 1e-9) or 0
    -- some fast steps are not to make it late
    next_vote = step + math.max(1, math.min(math.floor(rate * VOTE_SECONDS), 2 * steps))
    due = is_time(self) and 1 or 0
    self._voted_at, self._voted_step = C.peri_time_ns(), step
  end
  self._vote = stop._vote(self.group, asks, due, next_vote)
end

--- The end of the vote that is under way, if there is one: whether it is time to save.
local function end_vote(self)
  if not self._vote then return false end
  local due, next_vote = stop._heard(self._vote)
  self._next_vote, self._vote = next_vote, false
  return due > 0
end

--- Whether it is time to save after this step; asks: the ranks agree to stop if one of them was asked to. Ranks vote
--- about every VOTE_SECONDS, and hear what comes of it a step later, so no rank waits for the others. Collective.
local function hear(self, step, asks)
  if not self.group and asks then stop._ask() end
  local due = self.group and end_vote(self) or not self.group and is_time(self)
  return due or self.steps and step % self.steps == 0
end

--- The end of a step: the next vote, if it is time for one. saved: this step was saved, which took a while: if somebody
--- was asked to stop meanwhile, the ranks agree now.
local function vote(self, step, asks, saved)
  if not self.group then
    if saved and asks then stop._ask() end
  elseif not stop.stopped() and (saved or step >= self._next_vote) then
    begin_vote(self, step, asks)
    if saved and asks then end_vote(self) end
  end
end

--- Whether a model will have a whole state after some more steps, and has none now. On all ranks alike.
function Saver:_unfinished()
  for _, part in util.ordered(self.parts) do
    if part.wraps and part:_unfinished() then return true end
  end
  return false
end

--- Whether another Saver of the same loop is still to save before the script ends: an open one that was told a step
--- since turn `before`, when this one was told its last, and has not saved for the end.
local function others_wait(self, before)
  return stop._some(function(other)
    return other ~= self and (before == 0 or other._turn > before) and not other._has_stopped
  end)
end

--- After each step: saves if it is time; of a group of micro-batches after its last one, of replicas after their next
--- average. If the run was asked to stop it saves, and ends the script (exit code 75), unless a pipeline or
--- peri.stopping() ends the loop. Returns the path of what was saved, or nil. Collective.
function Saver:step(step, values)
  self:_forward("Saver:step", step)
  if not self.stepped then
    self.stepped = true
    self:_tell("stepped", "")
  end
  if P.state.saves then P.state.saves.progress() end
  local ending, before = stop._ending(), self._turn
  self._turn = stop._turn()
  local asks = self._stops and not ending
  local due = hear(self, step, asks)
  local stopping = stop.stopped() ~= nil and ending ~= "more" -- else a pipeline still trains what it has loaded
  local wanted = self._postponed or due or stopping and not self._has_stopped
  local whole = not ((wanted or stopping) and self:_unfinished())
  self._postponed = wanted and not whole
  local path = wanted and whole and step ~= self.last_step and self:save(step, values) or nil
  vote(self, step, asks, path)
  if stop.stopped() and whole and ending ~= "more" then
    self._has_stopped = true
    if asks and not others_wait(self, before) then stop._leave(function() self:close(step, values) end) end
  end
  return path
end

--- The end of the run: the last state is saved if it was not; of a run that was asked to stop, if it is whole. Then
--- another job may save into the folder. Collective.
function Saver:close(step, values)
  local path
  if self.folder and step and step ~= self.last_step then
    if not (stop.stopped() and self:_unfinished()) then path = self:save(step, values)
    elseif self.rank == 0 then
      say("the run stops within a group of micro-batches, or between averages of replicas, so step %d is not saved; it "
        .. "goes on from step %s", step, self.last_step or "0, of which nothing was saved")
    end
  end
  stop._waits_for(self, false)
  if self._vote then self._vote:wait() end -- the run ends anyway
  self._vote = false
  settle(self)
  if self._held then self._held:release() end
  self._held, self.closed = false, true
  return path
end

signature.check("Saver:", Saver, { resume = "self: object", save = "self: object, step: count, values: any",
  step = "self: object, step: count, values: any", close = "self: object, step: count?, values: any" })

return Saver
