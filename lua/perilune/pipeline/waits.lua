-- waits.lua: where the steps of a measured pipeline wait, for whom, and what would hide it.
--
-- While a pipeline is measured its rank notes when operations are posted and complete, and when it could not go on
-- (runtime/comm/wait_log.c). Operations have the same numbers on all ranks. So afterwards the ranks tell each other
-- when each posted them, by clocks that they have compared, and whoever was last has made the others wait; what is
-- left of a wait is the way of the data.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local signature = require "perilune.signature"
local C = P.C

local M = {}

local ROUNDS = 16 -- in which clocks are compared
local BETWEEN = "(between)"
M.BETWEEN = BETWEEN -- what is no operation of the schedule: votes, and results that the caller asks for

-- -- clocks -----------------------------------------------------------------------------------------------------------

local function now() return tonumber(C.peri_time_ns()) end

local function gathered(group, list)
  local n = #list
  local all, by_rank = group:all_gather(Tensor.tensor(list, "f64", "cpu", { n })):wait():to_list(), {}
  for r = 1, group:size() do
    by_rank[r] = {}
    for i = 1, n do by_rank[r][i] = all[(r - 1) * n + i] end
  end
  return by_rank
end

--- What this rank's clock is ahead of rank 0's, in ns, and how far that may be wrong. Collective. A number that another
--- rank has read from its clock is older than what this rank reads when it arrives: so each rank knows what the others'
--- clocks are ahead of its own at least, and what the other rank knows of it is a bound on the other side.
function M.clock(group)
  local W, me, least = group:size(), group:rank(), {}
  for r = 1, W do least[r] = -math.huge end
  for _ = 1, ROUNDS do
    local list = gathered(group, { now() })
    local after = now()
    for r = 1, W do least[r] = math.max(least[r], list[r][1] - after) end
  end
  local all = gathered(group, least)
  local low, high = all[1][me + 1], -all[me + 1][1]
  if me == 0 then return 0, 0 end
  return (low + high) / 2, (high - low) / 2
end

-- -- what this rank has noted -----------------------------------------------------------------------------------------

local ops, n_ops = ffi.new "const peri_watched_op *[1]", ffi.new "int64_t[1]"
local waits, n_waits = ffi.new "const peri_watched_wait *[1]", ffi.new "int64_t[1]"

--- Operations by index from 0 ({ key = equal on all ranks, posted, channel, bytes }) and waits ({ from, to, op = one of
--- them }); times in ns by rank 0's clock, from `first` to `last` by this one's, which is `ahead`.
local function noted(comm, first, last, ahead)
  C.peri_group_watched(comm, ops, n_ops, waits, n_waits)
  local of, list = {}, {}
  for i = 0, tonumber(n_ops[0]) - 1 do
    local o = ops[0][i]
    of[i] = { key = ("%s %s"):format(tostring(o.group), tostring(o.sequence)), posted = tonumber(o.posted_ns) - ahead,
      channel = ffi.string(C.peri_channel_name(o.channel)), bytes = tonumber(o.bytes) }
  end
  for i = 0, tonumber(n_waits[0]) - 1 do
    local w = waits[0][i]
    local from, to = tonumber(w.from_ns), tonumber(w.to_ns)
    if from >= first and to <= last then
      list[#list + 1] = { from = from - ahead, to = to - ahead, op = of[tonumber(w.op)] }
    end
  end
  return of, list
end

--- The operation of the schedule within which each wait began: the innermost one.
local function place_waits(list, measured, ahead)
  local sorted = util.copy(measured)
  table.sort(sorted, function(a, b) return a.from < b.from or a.from == b.from and a.to > b.to end)
  local i = 0
  for _, w in ipairs(list) do
    local t = w.from + ahead
    while sorted[i + 1] and sorted[i + 1].from <= t do i = i + 1 end
    local k = i
    while k > 0 and sorted[k].to < t and i - k < 64 do k = k - 1 end
    local x = sorted[k]
    w.within = x and x.from <= t and t <= x.to and x.operation or false
  end
end

--- Milliseconds a step that this rank works in each operation: without waits.
local function spent(list, measured, steps)
  local sums = {}
  for _, x in ipairs(measured) do
    sums[x.operation.name] = (sums[x.operation.name] or 0) + (x.to - x.from) * 1e-6 / steps
  end
  for _, w in ipairs(list) do
    if w.within then sums[w.within.name] = sums[w.within.name] - (w.to - w.from) * 1e-6 / steps end
  end
  return sums
end

-- -- who came last ----------------------------------------------------------------------------------------------------

--- The rank that posted operation `key` last, and when.
local function last_of(told, key)
  local last, at = nil, -math.huge
  for r, t in ipairs(told) do
    local posted = t.posts[key]
    if posted and posted > at then last, at = r - 1, posted end
  end
  return last, at
end

--- Sums of this rank's waits by operation of the schedule and channel.
local function rows_of(list, told, rank, steps)
  local rows, by = {}, {}
  for _, w in ipairs(list) do
    local name = w.within and w.within.name or BETWEEN
    local id = name .. " " .. w.op.channel
    local row = by[id]
    if not row then
      row = { rank = rank, operation = name, kind = w.within and w.within.kind or false, channel = w.op.channel,
        waits = 0, ms = 0, late_ms = 0, last = {} }
      by[id], rows[#rows + 1] = row, row
    end
    local last, posted = last_of(told, w.op.key)
    local ms = (w.to - w.from) * 1e-6 / steps
    local late = last ~= rank and math.max(0, math.min(w.to, posted) - w.from) * 1e-6 / steps or 0
    w.channel, w.last = w.op.channel, last
    row.waits, row.ms, row.late_ms = row.waits + 1 / steps, row.ms + ms, row.late_ms + late
    if last then row.last[last + 1] = (row.last[last + 1] or 0) + ms end
  end
  for _, row in ipairs(rows) do
    local who, most = nil, -1
    for r = 1, #told do
      if (row.last[r] or 0) > most and row.last[r] then who, most = r - 1, row.last[r] end
    end
    row.last, row.last_share = who, who and most / math.max(row.ms, 1e-12) or 0
  end
  table.sort(rows, function(a, b) return a.ms > b.ms end)
  return rows
end

-- -- what would hide it -----------------------------------------------------------------------------------------------

local advice = {
  load = "workers of the loader (num_workers) make batches meanwhile",
  forward = "a plan that gives it fewer tables, if lookups take it",
  lookup = "a plan that gives it fewer rows to look up",
  backward = "a plan that gives it fewer rows to update, if tables take it",
  prefetch = "a larger cache, or fewer tables in files there",
}

--- Of a rank that came late, `late` ms a step: in what it works longer than the others do, if that explains it.
local function why_late(who, told, late)
  local worst, more, mine, others = nil, 0, 0, 0
  for name, ms in util.ordered(told[who + 1].spent) do
    local sum, n = 0, 0
    for r, t in ipairs(told) do
      if r ~= who + 1 then sum, n = sum + (t.spent[name] or 0), n + 1 end
    end
    local mean = n > 0 and sum / n or 0
    if ms - mean > more then worst, more, mine, others = name, ms - mean, ms, mean end
  end
  if more < late / 4 then
    return ("rank %d works no longer than the others, but not when they do: do ranks, or other programs, share "
      .. "processors?"):format(who)
  end
  return ("rank %d works %.3g ms in '%s', others %.3g%s"):format(who, mine, worst, others, advice[worst] and "; "
    .. advice[worst] or "")
end

--- Of data that is on its way.
local function why_moving(row, plan)
  local first, channel = plan.first, row.channel
  if channel == "control" or channel == "ids" then
    if not first.input_dist or first.input_dist.ahead == 0 then
      return "ids leave when they are needed; sparse_dist sends them a batch ahead"
    end
    return "more to compute between input_dist and wait_dist: move wait_dist later, or both a batch further ahead"
  elseif channel == "rows" and row.kind ~= "backward" then
    if not first.lookup then
      return "rows leave when they are needed; sparse_dist looks them up first, wire_first in the step before"
    end
    if first.lookup.ahead == 0 then
      return "semi_sync looks them up a batch ahead (tables stale by one update); or codecs make them fewer bytes"
    end
    return "codecs (qcomm_codecs_registry) make them fewer bytes"
  elseif channel == "rows" then
    return "gradients end the pass: codecs make them fewer bytes, accumulate sends them once in several batches"
  elseif row.operation == BETWEEN then return "where all ranks have as many batches, vote = false"
  elseif channel == "dense" and row.kind == "wait_grads" then
    return "averages wait behind rows on the same link: what the links carry is what a step takes; codecs make rows "
      .. "fewer bytes"
  elseif channel == "dense" and (row.kind == "backward" or row.kind == "update") then
    return "smaller bucket_bytes let the last bucket leave earlier; accumulate averages once in several batches"
  elseif channel == "dense" then
    return "what the model itself exchanges, such as the samples of a global_mean: a mean needs no exchange"
  elseif channel == "activations" or channel == "gradients" then return "more micro-batches of fewer samples" end
  return "move what posts it earlier, or what needs it later"
end

local function hint(row, plan, told, W)
  if W > 1 and row.last and row.late_ms > row.ms / 2 then return why_late(row.last, told, row.late_ms) end
  return why_moving(row, plan)
end

-- -- all of it --------------------------------------------------------------------------------------------------------

--- Where the steps that a pipeline has measured (pipeline:measure(true)) waited: { steps, step_ms, clocks_ms = how far
--- clocks may be wrong, ranks = by rank: a list of rows, the longest first; and of this rank: ahead = its clock, of
--- rank 0's, in ns, list = its waits, { from, to (ns by rank 0's clock), channel, last }; begin = of the first
--- operation of any rank }. A row: { rank, operation = of the schedule, or waits.BETWEEN, channel = of the exchange
--- ("control": the sizes of ids; "ids", "rows", "dense", ...), waits and ms (a step), late_ms = of them, until the last
--- rank had posted it, last = the rank that mostly came last, last_share = of the ms, hint = what would hide it }.
--- Collective over the ranks of the pipeline; ends the measurement.
function M.waits(pipeline)
  local measured = pipeline.measured
  if not measured then
    P.fail(("%s: nothing is measured; call pipeline:measure(true) before the steps"):format(pipeline.class_name))
  end
  local group, steps, first, last = pipeline.stage and pipeline.stage.world or pipeline.group, 0, math.huge, -math.huge
  for _, x in ipairs(measured) do
    first, last = math.min(first, x.from), math.max(last, x.to)
    if x.operation.kind == "forward" then steps = steps + 1 end
  end
  steps = math.max(steps, 1)
  if not pipeline.comm then
    return { steps = steps, step_ms = (last - first) * 1e-6 / steps, clocks_ms = 0, ranks = { {} }, ahead = 0,
      list = {}, begin = first }
  end
  C.peri_group_watch_set(pipeline.comm, false)
  P.state.watched = false
  local ahead, wrong = M.clock(group)
  local of, list = noted(pipeline.comm, first, last, ahead)
  place_waits(list, measured, ahead)
  local posts = {}
  for i = 0, tonumber(n_ops[0]) - 1 do posts[of[i].key] = of[i].posted end
  local told = group:all_gather_object({ posts = posts, spent = spent(list, measured, steps), wrong = wrong,
    ms = (last - first) * 1e-6 / steps, first = first - ahead }, "pipeline.waits")
  local rows = rows_of(list, told, group:rank(), steps)
  for _, row in ipairs(rows) do row.hint = hint(row, pipeline.plan, told, group:size()) end
  local out = { steps = steps, step_ms = told[1].ms, clocks_ms = 0,
    ranks = group:all_gather_object(rows, "pipeline.waits"), ahead = ahead, list = list, begin = math.huge }
  for _, t in ipairs(told) do
    out.clocks_ms, out.begin = math.max(out.clocks_ms, t.wrong * 1e-6), math.min(out.begin, t.first)
  end
  return out
end

local words = { control = "sizes of ids", dense = "averages, or a vote" }

--- The same as text: what takes at least `least` (0.01) of a step, at most `most` (6) rows a rank.
function M.waits_text(found, least, most)
  local lines = {}
  for r, rows in ipairs(found.ranks) do
    for i, row in ipairs(rows) do
      if i <= (most or 6) and row.ms >= (least or 0.01) * found.step_ms then
        local who = row.last and (row.last == r - 1 and "itself" or "rank " .. row.last) or "nobody"
        lines[#lines + 1] = ("rank %d waits %.3f ms a step in '%s' for %s (channel %s): %.3f until all had come, last "
          .. "%s (%.0f %%)\n  %s"):format(r - 1, row.ms, row.operation, words[row.channel] or row.channel, row.channel,
          row.late_ms, who, 100 * row.last_share, row.hint)
      end
    end
  end
  if #lines == 0 then return ("no rank waits for more than %g %% of a step"):format(100 * (least or 0.01)) end
  lines[#lines + 1] = ("(clocks of ranks agree to %.3f ms)"):format(found.clocks_ms)
  return table.concat(lines, "\n")
end

signature.object("Waits", "what waits(pipeline) returns", { ranks = "list", step_ms = "number", clocks_ms = "number" })
signature.check("waits.", M, { clock = "group: Group" })
signature.check("show.", M, { waits = "pipeline: Pipeline", waits_text = "found: Waits, least: number?, most: count?" })

return M
