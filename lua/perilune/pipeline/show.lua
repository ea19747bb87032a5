-- show.lua: schedules as text, a step as it would run if operations took given times, and what a pipeline has measured
-- as a Chrome trace (which Perfetto opens).
local P = require "perilune.ffi"
local util = require "perilune.util"
local signature = require "perilune.signature"
local write = require("perilune.text").write
local waits = require "perilune.pipeline.waits"
local simulate = require "perilune.simulation.simulate"
local Timeline = require "perilune.simulation.timeline"

local M = {}

local function batch_text(ahead) return ahead == 0 and "n" or ("n%+d"):format(ahead) end

--- Rows of equal columns.
local function columns(rows)
  local widths, lines = {}, {}
  for _, row in ipairs(rows) do
    for i, cell in ipairs(row) do widths[i] = math.max(widths[i] or 0, #cell) end
  end
  for k, row in ipairs(rows) do
    local cells = {}
    for i, cell in ipairs(row) do cells[i] = cell .. (" "):rep(widths[i] - #cell) end
    lines[k] = (table.concat(cells, "  "):gsub("%s+$", ""))
  end
  return table.concat(lines, "\n")
end

local function conditions_text(o)
  local list = {}
  if o.every > 1 then list[#list + 1] = ("batches b %% %d == %d"):format(o.every, o.at) end
  if o.from_step > 0 then list[#list + 1] = ("from batch %d"):format(o.from_step) end
  if o.until_step then list[#list + 1] = ("before batch %d"):format(o.until_step) end
  if o.hook then list[#list + 1] = ("in backward, at the gradient of '%s'"):format(o.hook) end
  if o.scale ~= 1 then list[#list + 1] = ("loss x %g"):format(o.scale) end
  return table.concat(list, ", ")
end

--- The slots of step n, in the order of issue.
function M.table_of(schedule)
  local rows = { { "place", "operation", "batch", "stream", "when" } }
  for i, o in ipairs(schedule.operations) do
    rows[i + 1] = { tostring(i), o.name, batch_text(o.ahead), o.on, conditions_text(o) }
  end
  return ("schedule '%s', hash %s\n%s"):format(schedule.name, schedule:hash(), columns(rows))
end

local function names_of(operations)
  return table.concat(util.map(operations, function(o) return ("%s(%s)"):format(o.name, batch_text(o.ahead)) end), ", ")
end

--- What follows from a schedule (Schedule:check); an error if it is refused.
function M.check(schedule)
  local plan = schedule:check()
  local lines = { M.table_of(schedule), "",
    ("batches in flight  %d"):format(plan.depth),
    ("prologue           %d step%s before the first, drain %d after the last"):format(plan.ahead, plan.ahead == 1
      and "" or "s", plan.behind),
    ("staleness          tables %d, dense %d"):format(plan.staleness.tables, plan.staleness.dense) }
  if plan.flush then
    lines[#lines + 1] = ("flush              %d batches are done with before others begin, and count from 0"):format(
      plan.flush)
  end
  local live = {}
  for what, n in util.ordered(plan.live) do live[#live + 1] = ("%s %d"):format(what, n) end
  lines[#lines + 1] = "live at once       " .. table.concat(live, ", ")
  for channel, operations in util.ordered(plan.channels) do
    lines[#lines + 1] = ("channel %-10s %s"):format(channel, names_of(operations))
  end
  for _, e in ipairs(plan.edges) do
    lines[#lines + 1] = ("event              %s waits for %s%s, over %s"):format(e.to.name, e.from.name,
      e.steps == 0 and "" or e.steps == 1 and " of the step before" or (" of %d steps before"):format(e.steps),
      table.concat(util.keys(e.over), ", "))
  end
  return table.concat(lines, "\n")
end

-- -- a step that nobody runs ------------------------------------------------------------------------------------------

--- Run `steps` steps of a schedule whose operations take times[name] (default 1): each begins when its stream is free
--- and all that it waits for is done. Returns a list of { operation, batch, step, from, to, waits_for (the operation
--- that it began after; nil: its own stream) }.
function M.simulate(schedule, times, steps)
  local plan = schedule:check()
  simulate.check_times(times, plan)
  local run = simulate.run(plan, { steps = steps, work = function(o) return { { "hold", times[o.name] or 1 } } end })
  local list = {}
  for i, x in ipairs(run.list) do
    list[i] = { operation = x.o, batch = x.batch, step = x.step, from = run.from[x.id], to = run.to[x.id],
      waits_for = run.cause[x.id] }
  end
  return list
end

--- Time of a simulated step in the long run.
local function predicted(schedule, times)
  local steps, ends = 40, {}
  for _, x in ipairs(M.simulate(schedule, times, steps)) do
    if x.step >= 0 then ends[x.step] = math.max(ends[x.step] or 0, x.to) end
  end
  return (ends[steps - 1] - ends[steps / 2 - 1]) / (steps / 2)
end

-- what may act on later batches, in this order
local early = { "load", "to_device", "input_dist", "wait_dist", "prefetch", "lookup" }
local WORTH = 0.01 -- of a step: what an edit must gain to be told

--- Edits that let something act a batch further ahead, or beside the rest: a list of { words, the schedule }.
local function edits_of(schedule)
  local list, by, aheads, told = {}, {}, {}, {}
  for _, o in ipairs(schedule.operations) do by[o.name] = o end
  local wider = schedule:with { depth = schedule.depth and schedule.depth + 1 }
  for _, name in ipairs(early) do
    local o = by[name]
    if o then
      aheads[name], told[#told + 1] = o.ahead + 1, ("%s = %d"):format(name, o.ahead + 1)
      list[#list + 1] = { ("retime { %s }"):format(table.concat(told, ", ")), wider:retime(aheads) }
      if o.on == "main" then
        list[#list + 1] = { ("'%s' beside the rest, %s"):format(name,
          name == "load" and "by workers of its loader" or 'on = "' .. name .. '"'),
            schedule:set { [name] = { on = name } } }
        list[#list + 1] = { ("both: retime { %s }, and '%s' beside the rest"):format(table.concat(told, ", "), name),
          wider:retime(aheads):set { [name] = { on = name } } }
      end
    end
  end
  return list
end

--- The schedule as it runs on one stream, which the CPU has.
local function on_one_stream(schedule)
  local one = {}
  for _, o in ipairs(schedule.operations) do
    one[o.name] = { on = "main" }
    if o.every > 1 then one[o.name].at = o.at end
  end
  return schedule:set(one)
end

--- What would make a simulated step shorter: a list of { words =, step = what one would take then, stale = (tables
--- would be read without so many updates more) }, the best first. Tried are edits that let something act a batch
--- further ahead, or on a stream of its own. alone: all operations share one stream, as on a processor: what is only
--- beside others there brings nothing.
function M.hints(schedule, times, alone)
  local function step_of(s) return predicted(alone and on_one_stream(s) or s, times) end
  local now, list = step_of(schedule), {}
  for _, edit in ipairs(edits_of(schedule)) do
    local words, edited, stale = edit[1], edit[2], 0
    local legal = pcall(edited.check, edited)
    if not legal then
      edited, stale = edited:with { staleness = { tables = edited.staleness.tables + 1,
        dense = edited.staleness.dense } }, 1
      legal = pcall(edited.check, edited)
    end
    local step = legal and step_of(edited) or now
    if step < (1 - WORTH) * now then list[#list + 1] = { words = words, step = step, stale = stale, n = #list } end
  end
  table.sort(list, function(x, y)
    if math.abs(x.step - y.step) > 1e-9 * now then return x.step < y.step end
    if x.stale ~= y.stale then return x.stale < y.stale end
    return x.n < y.n
  end)
  return list
end

--- A simulated step as text: when operations run, how long a step takes in the long run, and for whom each stream
--- waits. alone: as for `hints`.
function M.simulation(schedule, times, alone)
  local steps = 40
  if alone then schedule = on_one_stream(schedule) end
  local list = M.simulate(schedule, times, steps)
  local ends, rows, whom, free = {}, { { "operation", "batch", "stream", "from", "to", "waits for" } }, {}, {}
  for _, x in ipairs(list) do
    if x.step >= 0 then ends[x.step] = math.max(ends[x.step] or 0, x.to) end
    if x.waits_for and x.step >= steps / 2 then
      local key = ("%s waits for %s"):format(x.operation.name, x.waits_for.name)
      whom[key] = (whom[key] or 0) + x.from - (free[x.operation.on] or 0)
    end
    free[x.operation.on] = x.to
  end
  local shown = steps - 2
  for _, x in ipairs(list) do
    if x.step == shown then
      rows[#rows + 1] = { x.operation.name, batch_text(x.operation.ahead), x.operation.on,
        ("%.4g"):format(x.from - ends[shown - 1]), ("%.4g"):format(x.to - ends[shown - 1]), x.waits_for
          and x.waits_for.name or "" }
    end
  end
  local half = steps / 2
  local lines = { columns(rows), "", ("a step takes %.4g"):format((ends[steps - 1] - ends[half - 1]) / half) }
  for key, t in util.ordered(whom) do lines[#lines + 1] = ("%s: %.4g a step"):format(key, t / half) end
  local hints = M.hints(schedule, times, alone)
  for i = 1, math.min(3, #hints) do
    local h = hints[i]
    lines[#lines + 1] = ("%.4g with %s%s"):format(h.step, h.words, h.stale > 0
      and " (tables are read one update older)" or "")
  end
  if #hints == 0 then lines[#lines + 1] = "nothing further ahead, or beside the rest, would make it shorter" end
  return table.concat(lines, "\n")
end

-- -- what was measured ------------------------------------------------------------------------------------------------

--- What a pipeline has measured, by a clock that is 0 at `first`: the Timeline of this rank.
local function timeline_of(pipeline, rank, first)
  local list = pipeline.measured
  if not list then
    P.fail(("%s: nothing is measured; call pipeline:measure(true) before the steps"):format(pipeline.class_name))
  end
  first = first or list[1] and list[1].from or 0
  local timeline = Timeline(rank, "rank " .. rank)
  for _, stream in ipairs(pipeline.plan.streams) do timeline:thread(stream) end
  for _, x in ipairs(list) do
    timeline:add(x.operation.on, x.operation.name, x.operation.kind, (x.from - first) / 1000, (x.to - first) / 1000,
      "batch", x.batch)
  end
  return timeline
end

--- Times of all operations, 0 of those that have not run.
local function all_times(pipeline)
  local times = M.times(pipeline)
  for _, o in ipairs(pipeline.schedule.operations) do times[o.name] = times[o.name] or 0 end
  return times
end

--- As many steps as were measured, predicted of the times of this rank's operations: a Timeline that stands below those
--- of the ranks.
local function predicted_timeline(pipeline, pid)
  local steps = 0
  for _, x in ipairs(pipeline.measured) do steps = steps + (x.operation.kind == "forward" and 1 or 0) end
  local timeline = Timeline(pid, "predicted, of the times on rank 0")
  if steps < 1 then return timeline end
  local schedule = pipeline.streams and pipeline.schedule or on_one_stream(pipeline.schedule)
  for _, x in ipairs(M.simulate(schedule, all_times(pipeline), steps)) do
    timeline:add(x.operation.on, x.operation.name, "predicted", x.from * 1000, x.to * 1000, "batch", x.batch)
  end
  return timeline
end

--- What a pipeline has measured (pipeline:measure(true) before) as Chrome trace JSON: an event for each operation, a
--- thread for each stream, a process for each rank. Of this rank; `write` puts all together.
function M.trace(pipeline)
  return Timeline.document { timeline_of(pipeline, pipeline.group and pipeline.group:rank() or 0):text() }
end

--- The same of all ranks, by one clock, with their waits, and what is predicted of rank 0's times, into a file that
--- rank 0 writes. Returns where they wait: what waits(pipeline) returns. Collective; ends the measurement.
function M.write(pipeline, path)
  local found, group = waits.waits(pipeline), pipeline.stage and pipeline.stage.world or pipeline.group
  local rank = group and group:rank() or 0
  local timeline = timeline_of(pipeline, rank, found.begin + found.ahead)
  for _, w in ipairs(found.list) do
    timeline:add("waits", "wait: " .. w.channel, "wait", (w.from - found.begin) / 1000, (w.to - found.begin) / 1000,
      "last", w.last or -1)
  end
  local all = group and group:all_gather_object(timeline:text(), "show.write") or { timeline:text() }
  if rank > 0 then return found end
  all[#all + 1] = predicted_timeline(pipeline, #all):text()
  write(path, Timeline.document(all), "show.write")
  return found
end

--- Mean time of each operation, in ms: for simulate.
function M.times(pipeline)
  local sums, counts = {}, {}
  for _, x in ipairs(pipeline.measured or {}) do
    local name = x.operation.name
    sums[name], counts[name] = (sums[name] or 0) + (x.to - x.from) * 1e-6, (counts[name] or 0) + 1
  end
  for name, n in util.ordered(counts) do sums[name] = sums[name] / n end
  return sums
end

--- What a pipeline has measured beside what is predicted of the times of its operations, in ms: { measured, operations
--- = (their sum in a step), predicted = (on the streams that the device has), apart = (if each stream went on by
--- itself) }; nil before two steps.
function M.compare(pipeline)
  local list, first, last, n, sum = pipeline.measured or {}, nil, nil, 0, 0
  for _, x in ipairs(list) do
    if x.operation.kind == "forward" then first, last, n = first or x.from, x.from, n + 1 end
  end
  if n < 2 then return nil end
  for _, x in ipairs(list) do
    if x.from >= first and x.from < last then sum = sum + x.to - x.from end
  end
  local times, schedule = all_times(pipeline), pipeline.schedule
  local apart = predicted(schedule, times)
  return { measured = (last - first) * 1e-6 / (n - 1), operations = sum * 1e-6 / (n - 1), apart = apart,
    predicted = pipeline.streams and apart or predicted(on_one_stream(schedule), times) }
end

signature.check_each("show.", M, { "table_of", "check" }, "schedule: Schedule")
M.waits, M.waits_text = waits.waits, waits.waits_text
signature.check("show.", M, { write = "pipeline: Pipeline, path: string" })
signature.check_each("show.", M, { "trace", "times", "compare" }, "pipeline: Pipeline")
signature.check("show.", M, { simulate = "schedule: Schedule, times: table, steps: count",
  simulation = "schedule: Schedule, times: table, alone: boolean?",
  hints = "schedule: Schedule, times: table, alone: boolean?" })

return util.face("peri.pipeline.show", M)
