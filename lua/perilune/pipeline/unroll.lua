-- unroll.lua: runs a schedule on batches that are mere numbers, with all that its operations need, make and change, and
-- compares with the plain loop: each batch is looked up after the updates of all batches before it, each gradient is
-- applied once, in its group. Refuses what cannot go well, and counts what the schedule says it may: how old tables and
-- dense part are when they are read.
local P = require "perilune.ffi"
local operations = require "perilune.pipeline.operations"

local M = {}
local util = require "perilune.util"
local is_of_batch = util.index_of(operations.of_batch)

local function where(o) return ("'%s' (ahead %d, place %d)"):format(o.name, o.ahead, o.place) end
M.where = where

local function refuse(plan, text, ...) P.fail(("schedule '%s': " .. text):format(plan.name, ...)) end
M.refuse = refuse

--- Whether an operation acts on batch b, but for the end of the data.
local function acts(o, b)
  return b >= o.first and b < o.past and b % o.every == o.at
end
M.acts = acts

--- The same in a run, where from_step and until_step are what they are.
function M.acts_at(o, b) return b >= o.from_step and b < (o.until_step or math.huge) and b % o.every == o.at end

--- The first batch that is in no finished group before batch b, where groups end at batches e with e % every == at.
local function due(o, b)
  local e = b - 1
  while e >= 0 and not acts(o, e) do e = e - 1 end
  return e + 1
end

--- Ends of groups in [from, past).
local function ends(o, from, past)
  local n = 0
  for e = from, past - 1 do n = n + (acts(o, e) and 1 or 0) end
  return n
end

-- -- what operations do -----------------------------------------------------------------------------------------------

local function count_missing(run, o, what, updater, missing)
  if missing > (run.stale[what] or 0) then
    run.stale[what], run.readers[what] = missing, { o, updater }
  end
end

--- How many updates of tables or of the dense part ("tables", "dense") are missing when `o` reads them for batch b.
local function read_state(run, o, b, what, updater, applied)
  if not updater then return end
  local wanted = due(updater, b)
  if applied > b then
    refuse(run.plan, "%s reads %s for batch %d, when %s has already changed them with batch %d", where(o), what, b,
      where(updater), applied - 1)
  end
  count_missing(run, o, what, updater, ends(updater, applied, wanted))
end

--- The same of user's operations that change tables: what they did with the batches before b; with b itself, as they
--- stand.
local function read_owned(run, o, b)
  for _, own in ipairs(run.plan.own_tables) do
    local applied = run.owned[own] or 0
    if applied > b + 1 then
      refuse(run.plan, "%s reads tables for batch %d, when %s has already changed them with batch %d", where(o), b,
        where(own), applied - 1)
    end
    count_missing(run, o, "tables", own, ends(own, applied, b))
  end
end

local rules = {}

function rules.lookup(run, o, b)
  read_owned(run, o, b)
  read_state(run, o, b, "tables", run.plan.updates_tables, run.tables)
  if run.plan.sync then read_state(run, o, b, "tables", run.plan.sync, run.synced) end
  if run.plan.facts.dense_tables then read_state(run, o, b, "dense", run.plan.updates_dense, run.dense) end
end

function rules.forward(run, o, b)
  if not run.plan.first.lookup then rules.lookup(run, o, b) end
  read_state(run, o, b, "dense", run.plan.updates_dense, run.dense)
  run.version_of[b] = run.dense
  run.between[b] = run.plan.first.backward
end

local function update_tables(run, o, b)
  local sync = run.plan.sync
  if sync and ends(sync, run.synced, b) > 0 then
    refuse(run.plan, "%s changes tables with batch %d before %s has averaged them after batch %d", where(o), b,
      where(sync), run.synced)
  end
  if b ~= run.tables then
    refuse(run.plan, "%s changes tables with batch %d, when batch %d should be next", where(o), b, run.tables)
  end
  run.tables = b + 1
end

function rules.backward(run, o, b)
  if run.version_of[b] ~= run.dense then
    refuse(run.plan, "%s changes dense between %s and %s of batch %d", where(run.plan.updates_dense),
      where(run.plan.first.forward), where(o), b)
  end
  run.between[b] = nil
  local first = run.plan.first
  if first.update then run.kept[#run.kept + 1] = b else update_tables(run, o, b) end
  for _, g in ipairs(run.grads) do
    if first.wait_grads and not g.ready then
      refuse(run.plan, "%s makes grads of batch %d before %s has waited for the averages of batch %d", where(o), b,
        where(first.wait_grads), g.batch)
    end
  end
  run.grads[#run.grads + 1] = { batch = b, ready = not first.update and not first.wait_grads, maker = o }
end

function rules.wait_grads(run)
  for _, g in ipairs(run.grads) do g.ready = true end
end

function rules.update(run, o, b)
  if #run.kept == 0 then
    refuse(run.plan, "%s has no table_grads at batch %d: nothing was kept since the last", where(o), b)
  end
  for _, kept in ipairs(run.kept) do update_tables(run, o, kept) end
  run.kept = {}
  for _, g in ipairs(run.grads) do g.ready = true end
end

function rules.optimizer(run, o, b)
  if #run.grads == 0 then
    refuse(run.plan, "%s has no grads at batch %d: none was made since they were dropped", where(o), b)
  end
  for _, g in ipairs(run.grads) do
    if g.applied then
      refuse(run.plan, "%s applies the grads of batch %d, of %s, a second time: no 'zero_grad' has dropped them",
        where(o), g.batch, where(g.maker))
    end
    if not g.ready then
      refuse(run.plan, "%s reads grads of batch %d before %s", where(o), g.batch, run.plan.first.update
        and where(run.plan.first.update) .. " has averaged them" or where(run.plan.first.wait_grads)
        .. " has waited for their averages")
    end
    if g.batch ~= run.dense then
      refuse(run.plan, "%s applies grads of batch %d, when batch %d should be next", where(o), g.batch, run.dense)
    end
    g.applied, run.dense = true, run.dense + 1
  end
  local last = run.dense - 1
  if last ~= b then refuse(run.plan, "%s at batch %d applies grads up to batch %d", where(o), b, last) end
end

function rules.zero_grad(run, o)
  for _, g in ipairs(run.grads) do
    if not g.ready and run.plan.first.wait_grads then
      refuse(run.plan, "%s drops the grads of batch %d, of %s, before %s has waited for their averages", where(o),
        g.batch, where(g.maker), where(run.plan.first.wait_grads))
    end
    if not g.applied and run.plan.updates_dense then
      refuse(run.plan, "%s drops the grads of batch %d, of %s, before %s has applied them", where(o), g.batch,
        where(g.maker), where(run.plan.updates_dense))
    end
    if not g.applied and not g.taken then
      refuse(run.plan, "%s drops the grads of batch %d, of %s, which nobody has applied: there is no 'optimizer', nor "
        .. "an operation of one's own that reads grads; where they are not wanted, leave out 'zero_grad' too", where(o),
        g.batch, where(g.maker))
    end
  end
  run.grads = {}
end

function rules.sync(run, o, b)
  local after = run.plan.first.update or run.plan.first.backward
  if run.tables ~= b + 1 then
    refuse(run.plan, "%s averages tables after batch %d, when %s has changed them up to batch %d", where(o), b,
      where(after), run.tables - 1)
  end
  run.synced = b + 1
end

--- A user's operation that reads or changes the gradients finds those of all ranks.
local function own_grads(run, o)
  for _, list in ipairs { o.access.reads, o.access.changes } do
    for _, what in ipairs(list) do
      if what == "grads" then run.found[o] = run.found[o] or #run.grads > 0 end
      for _, g in ipairs(what == "grads" and run.grads or {}) do
        g.taken = true
        local first = run.plan.first
        if not g.ready then
          refuse(run.plan, "%s %s grads of batch %d, of %s, before %s", where(o), list == o.access.reads and "reads"
            or "changes", g.batch, where(g.maker), first.update and where(first.update) .. " has averaged them"
            or where(first.wait_grads) .. " has waited for their averages")
        end
      end
    end
  end
end

--- Tables that a user's operation changes have learned from batch b.
local function own_tables(run, o, b)
  for _, what in ipairs(o.access.changes) do
    if what == "tables" then run.owned[o] = b + 1 end
  end
end

--- A user's operation that changes the dense part does so when no batch is between its forward and its backward pass.
local function own_dense(run, o)
  for _, what in ipairs(o.access.changes) do
    for b, backward in util.ordered(what == "dense" and run.between or {}) do
      refuse(run.plan, "%s changes dense between %s and %s of batch %d", where(o), where(run.plan.first.forward),
        where(backward), b)
    end
  end
end

-- -- order ------------------------------------------------------------------------------------------------------------

local function check_needs(run, o, b)
  local made = run.made[b]
  for _, r in ipairs(o.access.needs) do
    if not made[r] then
      local maker = run.plan.makers[r][1]
      for _, other in ipairs(run.plan.makers[r]) do
        if acts(other, b) then maker = other end
      end
      if not acts(maker, b) then
        refuse(run.plan, "%s needs '%s' of batch %d, which %s does not make for every batch", where(o), r, b,
        where(maker))
      end
      refuse(run.plan, "%s needs '%s' of its batch before %s makes it%s", where(o), r, where(maker),
        r == "sent" and ": it would wait for ever (deadlock)" or "")
    end
  end
  for _, r in ipairs(o.access.makes) do
    if made[r] then refuse(run.plan, "%s and %s both make '%s' of batch %d", where(made[r]), where(o), r, b) end
    made[r] = o
    run.live[r] = (run.live[r] or 0) + 1
    if run.live[r] > (run.most[r] or 0) then run.most[r] = run.live[r] end
  end
end

--- The last operation that needs resource r of batch b.
local function last_user(plan, r, b)
  local last
  for _, o in ipairs(plan.operations) do
    local uses = false
    for _, list in ipairs { o.access.needs, o.access.makes } do
      for _, x in ipairs(list) do uses = uses or x == r end
    end
    if uses and acts(o, b) and (not last or o.ahead <= last.ahead) then last = o end
  end
  return last
end

local function retire(run, o, b)
  for _, list in ipairs { o.access.needs, o.access.makes } do
    for _, r in ipairs(list) do
      if last_user(run.plan, r, b) == o then run.live[r] = run.live[r] - 1 end
    end
  end
end

--- Note which operation must wait for which other's event, since they are on different streams.
local function order_streams(run, o, n, b)
  local function edge(from, what)
    if from and from.o.on ~= o.on then
      local key = ("%d %d %d"):format(from.o.place, o.place, n - from.n)
      local e = run.edges[key]
      if not e then
        e = { from = from.o, to = o, over = {}, steps = n - from.n }
        run.edges[key], run.edges[#run.edges + 1] = e, e
      end
      e.over[what] = true
    end
  end
  local function touch(r, what, changes)
    local state = run.last[r] or { readers = {} }
    run.last[r] = state
    edge(state.writer, what)
    local mine = { o = o, n = n }
    if not changes then state.readers[o.on] = mine return end
    for _, stream in ipairs(run.plan.streams) do edge(state.readers[stream], what) end
    state.writer, state.readers = mine, {}
  end
  local a = o.access
  for _, r in ipairs(a.needs) do touch(r .. " " .. b, r, false) end
  for _, r in ipairs(a.makes) do touch(r .. " " .. b, r, true) end
  for _, r in ipairs(a.reads) do touch(r, r, false) end
  for _, r in ipairs(a.changes) do touch(r, r, true) end
end

--- It finds some, at least after the first batch.
local function check_found(run)
  local plan = run.plan
  for _, o in ipairs(plan.operations) do
    if run.found[o] == false and not o.hook then
      refuse(plan, "%s reads or changes grads, of which there are none when it acts: %s makes them, and %s drops them",
        where(o), plan.first.backward and where(plan.first.backward) or "no operation", where(plan.first.zero_grad))
    end
  end
end

local function finish(run, batches)
  local plan = run.plan
  if batches > 1 and plan.first.zero_grad then check_found(run) end
  for _, g in ipairs(run.grads) do
    if not g.applied and plan.updates_dense then
      refuse(plan, "the grads of batch %d, of %s, are never applied by %s when there are %d batches", g.batch,
        where(g.maker), where(plan.updates_dense), batches)
    end
  end
  if #run.kept > 0 then
    refuse(plan, "the table_grads of batch %d are never applied by %s when there are %d batches", run.kept[1],
      where(plan.first.update), batches)
  end
end

--- Unroll `plan` (of check.lua) over so many batches; raises the most staleness, the most live batches and the edges in
--- `into`.
function M.run(plan, batches, into)
  local run = { plan = plan, made = {}, live = {}, most = into.live, last = {}, edges = into.edges,
    stale = into.staleness, readers = into.readers, version_of = {}, between = {}, owned = {}, found = {}, grads = {},
    kept = {}, tables = 0, dense = 0, synced = 0 }
  local known = false
  for n = -plan.ahead, batches - 1 + plan.behind do
    for _, o in ipairs(plan.operations) do
      local b = n + o.ahead
      if o.kind == "load" and b >= 0 then
        known = known or b >= batches
        if b < batches then run.made[b] = {} end
      end
      local closing = o.access.closes and known and b == batches - 1 and b >= o.first and b < o.past
      if b >= 0 and b < batches and (acts(o, b) or closing) then
        check_needs(run, o, b)
        order_streams(run, o, n, b)
        if rules[o.kind] then rules[o.kind](run, o, b) end
        if o.access.own then
          own_grads(run, o)
          own_dense(run, o)
          own_tables(run, o, b)
        end
        retire(run, o, b)
      end
    end
  end
  finish(run, batches)
end

M.is_of_batch = is_of_batch
return M
