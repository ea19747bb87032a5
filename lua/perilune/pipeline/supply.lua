-- supply.lua: where a pipeline's batches come from, and what the ranks know of each other's: with every batch that is
-- loaded they vote whether somebody has one. A rank that has none while others do takes part with an empty batch, so
-- every batch of every rank is trained once, and all ranks end with the same step. When the loader of one fails, all
-- stop loading, train what is loaded, and get the error.
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local jagged = require "perilune.jagged"
local Batch = require("perilune.data.batch").Batch
local Loader = require "perilune.data.loader"
local Workers = require "perilune.data.workers"
local errors = require "perilune.errors"
local stop = require "perilune.stop"

local Supply = util.class "Supply"
local MOST_GROUP = 4096 -- batches that pause waits for the end of a group, or it is cut

--- group: the ranks that vote, or nil; make_empty: function() -> a batch without samples, or nil: made of the first
--- batch. lockstep: the ranks are stages of one model: all load the same batches, none is loaded before all have the
--- one before, and there are no empty ones.
function Supply:init(group, make_empty, device, lockstep)
  self.lockstep = lockstep or false
  self.heeds = true -- false: ranks that do not vote cannot stop together by themselves
  self.group = group and group:size() > 1 and group or false
  self.make_empty, self.device, self.empty, self.ring = make_empty or false, device or false, false, false
  self.held, self.ended, self.flush, self.before, self.total = false, false, math.huge, 0, 0
  self.closing = {}
  self:start(false)
end

--- Take batches from `source` from now on, numbered from 0. again: they continue the run of the batches before, which
--- `before` counts. The fields that this sets:
---   total      how many batches there are; math.huge until the source has ended
---   ended      the source has no more batches
---   dry        the pipeline asks for no more: the source has ended, or somebody stops the run
---   stopping   somebody wants to stop
---   held       another schedule is to go on with the source
---   most       how many batches this start gives; the others wait for the next one (a schedule's flush, or pause)
---   asked      how many batches were asked for; full: `most` of them
function Supply:start(source, again)
  local stopping = again and self.stopping or stop.stopped() ~= nil
  local over = self.held and self.ended and rawequal(source, self.source)
  self.before = again and self.before + self.total or 0
  self.source, self.total, self.failed, self.error = source, math.huge, 0, nil
  if not again then self.counted = {} end -- the sources, by their `ahead`, whose batches are counted
  self.dry, self.ended = over or stop.stopped() ~= nil or stopping and not self.lockstep or false, over or false
  self.stopping, self.held, self.full = stopping, false, false
  self.most, self.asked = self.flush, 0
end

--- Go on with another source. One that comes when all ranks have reached the end of the one before waits for the next
--- start.
function Supply:follow(source)
  if self.total < math.huge then return end
  self.source, self.ended = source, false
  self.dry = self.stopping or self.held or self.failed > 0
end

-- -- empty batches ----------------------------------------------------------------------------------------------------

local empty

local function empty_tensor(t)
  local shape = t:shape()
  if #shape == 0 then return t end
  shape[1] = 0
  return Tensor.empty(shape, t:dtype(), t:device())
end

local function empty_kjt(kjt)
  if kjt:variable_stride_per_key() then P.fail "its KeyedJaggedTensor is a variable batch" end
  local weights = kjt:weights_or_none()
  return jagged.KeyedJaggedTensor { keys = kjt:keys(), values = empty_tensor(kjt:values()), weights = weights
    and empty_tensor(weights), lengths = Tensor.empty({ 0 }, "i32", kjt:device()), stride = 0 }
end

local function empty_table(batch)
  local out = setmetatable({}, getmetatable(batch))
  for key, value in util.ordered(batch) do out[key] = empty(value) end
  return out
end

--- The same without samples; nil: nobody knows how to make that.
function empty(x)
  if Tensor.is(x) then return empty_tensor(x) end
  if jagged.KeyedJaggedTensor.is(x) then return empty_kjt(x) end
  if Batch.is(x) then
    return Batch(empty(x.dense_features), empty(x.sparse_features), empty(x.labels), 0, x.global_rows, x.global_row,
      x.loss_scale)
  end
  if util.is_plain(x) then return empty_table(x) end
  return x
end

local function moved(self, batch)
  if self.device and type(batch) == "table" and batch.to then return batch:to(self.device) end
  return batch
end

local function make_template(self, batch)
  if self.empty or self.make_empty or not self.group then return end
  local ok, made = pcall(P.lasting, empty, batch)
  self.empty = { ok and made or nil, why = not ok and errors.describe(made) or nil }
end

--- An error of all ranks.
local function give_up(self, text, ...)
  self.group:abort(text:format(...))
  self.group:check_healthy()
end

--- A batch without samples. Made anew for each step: the model may return its fields, and who gets those may release
--- them.
local function empty_batch(self, index)
  local made, batch = self.empty
  if self.make_empty then batch = P.lasting(self.make_empty)
  elseif not made then
    give_up(self, "rank %d has no batch at all where others have; give empty_batch = function() ... end",
      self.group:rank())
  elseif made[1] ~= nil then batch = P.lasting(empty, made[1]) end
  if batch == nil then
    give_up(self, "rank %d has no batch %d where others have, and no empty one can be made%s; give empty_batch = "
      .. "function() ... end", self.group:rank(), self.before + index, made and made.why and " (" .. made.why .. ")"
      or "")
  end
  return moved(self, batch)
end

-- -- loading and voting -----------------------------------------------------------------------------------------------

--- Call the source outside of any scope: who makes batches may keep them. Batches of a loader of the library nobody
--- else has seen: they are made in the scope of their context, and die with it. given: a list, to which each source of
--- the library that gave a batch meanwhile adds its `ahead` (data/position.lua).
local function pull(source, given)
  local state = P.state
  local scope, outer = state.scope, state.given
  if not (Loader.is(source) or Workers.is(source)) then state.scope = false end
  state.given = given
  local ok, batch = xpcall(source, P.locate)
  state.scope, state.given = scope, outer
  if ok and batch == false then return pcall(P.fail, "the loader returned false, wanted a batch, or nil at the end") end
  return ok, batch
end

--- Sources have given these batches (a list of their `ahead`), which are not trained yet.
local function count(self, given)
  for i = 1, #given do
    local ahead = given[i]
    if not self.counted[ahead] then -- what an earlier run has taken and not trained is gone
      self.counted[ahead], ahead.batches = true, 0
    end
    ahead.batches = ahead.batches + 1
  end
end

local function next_batch(self, given)
  if self.dry then return false end
  local ok, batch = pull(self.source, given)
  if not ok then
    self.error, self.dry = batch, true
    if not self.group then self.failed = 1 end
    return false
  end
  if batch == nil then
    self.dry, self.ended = true, true
    return false
  end
  return batch
end

local function ends_group(self, b)
  for _, o in ipairs(self.closing) do
    if b % o.every ~= o.at then return false end
  end
  return true
end

--- Batches that were asked for, and those of their group of micro-batches, are trained before others are asked for: for
--- who waits until none is ahead of training, or stops. (A schedule that flushes comes there by itself.) On all ranks
--- together.
function Supply:pause()
  if self.most < math.huge then return end
  local n, last = self.asked, self.asked + MOST_GROUP
  while n < last and not ends_group(self, n - 1) do n = n + 1 end
  self.most = n < last and n or self.asked
end

--- What this rank says with a batch, or with none: whether it has one; who has failed; whether somebody wants no more;
--- whether nobody can train without this rank, which has none; who is to go on with another schedule, and who is not;
--- what stop.lua says.
local function votes_of(self, batch)
  local rank, failed = self.group:rank() + 1, self.error ~= nil
  local alone = self.lockstep or failed and not (self.make_empty or self.empty and self.empty[1] ~= nil)
  return { batch and 1 or 0, failed and rank or 0, self.stopping and 1 or 0, not batch and alone and 1 or 0, self.held
    and rank or 0, not self.held and rank or 0, stop._says() }
end

--- Ask for the batch of `context`, and let the others know. Collective, if there are others.
function Supply:load(context)
  context.batch = false
  if self.lockstep and context.index > 0 and not self:has(context.index - 1) then return end
  local asked, since = 0, 0
  if self.heeds and P.state.stop and not (self.group or self.dry) then asked, since = stop._says() end -- a group votes
  if asked > 0 then
    self:pause()
    stop._agree(asked, since)
  end
  if context.index >= self.most then
    self.total, self.full = context.index, true
    return
  end
  self.asked = context.index + 1
  local given = {}
  local batch = next_batch(self, given)
  if batch then count(self, given) end
  context.batch, context.given = batch, batch and given
  if not self.group then
    if batch then context.exists = context.index else self.total = context.index end
    return
  end
  if batch then make_template(self, batch) end
  context.vote = self.group:all_reduce(Tensor.tensor(votes_of(self, batch), "i64", "cpu"), "max")
end

local function settle(self, context)
  local result = context.vote:wait()
  local have, failed = result:item(0), result:item(1)
  context.vote = false
  if failed > 0 then self.failed, self.dry = failed, true end
  if result:item(2) > 0 then self.stopping, self.dry = true, true end
  if result:item(6) > 0 then
    self:pause()
    stop._agree(result:item(6), result:item(7))
  end
  local held, goes_on = result:item(4), result:item(5)
  if held > 0 and goes_on > 0 then
    give_up(self, "set_schedule was called on rank %d and not on rank %d: it is collective", held - 1, goes_on - 1)
  end
  if result:item(3) > 0 then
    if self.lockstep and have > 0 and failed == 0 then
      give_up(self, "there is no batch %d on some stages, where others have one; all stages load the same batches",
        self.before + context.index)
    end
    have = 0 -- a loader has failed: nobody trains it
  end
  if have == 0 then
    self.total, self.full = context.index, false
    return false
  end
  context.exists = context.index
  if not context.batch then context.batch = empty_batch(self, context.index) end
  return true
end

--- Whether there is a batch number b on some rank; it has been asked for. Waits for the vote, if the answer is not
--- known yet.
function Supply:has(b)
  local ring = self.ring
  local context = ring[b % #ring + 1]
  -- noted with the batch: what a step leaves to the next costs LuaJIT registers
  if context.exists == b then return true end
  if b >= self.total then return false end
  return settle(self, context)
end

--- Ask for no more batches, on no rank.
function Supply:stop() self.stopping, self.dry = true, self.dry or not self.lockstep end
--- Ask for no more batches until the next start, which goes on with the same source. On all ranks together.
function Supply:hold() self.held, self.dry = true, true end

--- After the last batch: the error of the loader that failed, if one did, on all ranks; a rank whose own has failed
--- gets that. Collective then.
function Supply:raise()
  local err = self.error
  if self.failed == 0 then return end
  if not self.group then error(err, 0) end
  local said = self.group:all_gather_object(err ~= nil and (errors.describe(err)), "Supply:raise")
  if err ~= nil then error(err, 0) end
  for r, text in ipairs(said) do
    if text then
      errors.raise { code = P.C.PERI_EPEER, name = "EPEER", where = "",
        message = ("the loader of rank %d failed: %s"):format(r - 1, text) }
    end
  end
end

return Supply
