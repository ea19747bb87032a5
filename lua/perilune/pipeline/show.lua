-- show.lua: schedules as text, a step as it would run if operations took given times, and what a pipeline has measured as a Chrome trace
-- (which Perfetto opens).
local P = require "perilune.ffi"
local util = require "perilune.util"
local signature = require "perilune.signature"
local Pipeline = require "perilune.pipeline.pipeline"

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

local function conditions(o)
  local list = {}
  if o.every > 1 then list[#list + 1] = ("batches b %% %d == %d"):format(o.every, o.at) end
  if o.from_step > 0 then list[#list + 1] = ("from batch %d"):format(o.from_step) end
  if o.until_step then list[#list + 1] = ("before batch %d"):format(o.until_step) end
  if o.scale ~= 1 then list[#list + 1] = ("loss x %g"):format(o.scale) end
  return table.concat(list, ", ")
end

--- The slots of step n, in the order of issue.
function M.table_of(schedule)
  local rows = { { "place", "operation", "batch", "stream", "when" } }
  for i, o in ipairs(schedule.operations) do
    rows[i + 1] = { tostring(i), o.name, batch_text(o.ahead), o.on, conditions(o) }
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
    ("prologue           %d step%s before the first, drain %d after the last"):format(plan.ahead, plan.ahead == 1 and "" or "s",
      plan.behind),
    ("staleness          tables %d, dense %d"):format(plan.staleness.tables, plan.staleness.dense) }
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

-- -- a step that nobody runs -----------------------------------------------------------------------------------------------------------

--- Run `steps` steps of a schedule whose operations take times[name] (default 1): each begins when its stream is free and all that it waits
--- for is done. Returns a list of { operation, batch, step, from, to, waits_for (the operation that it began after; nil: its own stream) }.
function M.simulate(schedule, times, steps)
  local plan = schedule:check()
  for name, t in util.ordered(times) do
    local known = false
    for _, o in ipairs(plan.operations) do known = known or o.name == name end
    if not known then P.fail(("simulate: no operation '%s' in schedule '%s'"):format(name, plan.name)) end
    if type(t) ~= "number" or not (t >= 0 and t < math.huge) then P.fail(("simulate: the time of '%s' is %s"):format(name, tostring(t))) end
  end
  local free, done, list = {}, {}, {}
  for n = -plan.ahead, steps - 1 do
    for _, o in ipairs(plan.operations) do
      local b = n + o.ahead
      local fits = b >= o.from_step and (not o.until_step or b < o.until_step) and b % o.every == o.at
      if b >= 0 and fits then
        local from, waits_for = free[o.on] or 0, nil
        for _, e in ipairs(plan.edges) do
          local t = e.to == o and done[e.from.place .. " " .. n - e.steps]
          if t and t > from then from, waits_for = t, e.from end
        end
        local to = from + (times[o.name] or 1)
        free[o.on], done[o.place .. " " .. n] = to, to
        list[#list + 1] = { operation = o, batch = b, step = n, from = from, to = to, waits_for = waits_for }
      end
    end
  end
  return list
end

--- A simulated step as text: when operations run, how long a step takes in the long run, and for whom each stream waits.
function M.simulation(schedule, times)
  local steps = 40
  local list = M.simulate(schedule, times, steps)
  local ends, rows, waits, free = {}, { { "operation", "batch", "stream", "from", "to", "waits for" } }, {}, {}
  for _, x in ipairs(list) do
    if x.step >= 0 then ends[x.step] = math.max(ends[x.step] or 0, x.to) end
    if x.waits_for and x.step >= steps / 2 then
      local key = ("%s waits for %s"):format(x.operation.name, x.waits_for.name)
      waits[key] = (waits[key] or 0) + x.from - (free[x.operation.on] or 0)
    end
    free[x.operation.on] = x.to
  end
  local shown = steps - 2
  for _, x in ipairs(list) do
    if x.step == shown then
      rows[#rows + 1] = { x.operation.name, batch_text(x.operation.ahead), x.operation.on, ("%.4g"):format(x.from - ends[shown - 1]),
        ("%.4g"):format(x.to - ends[shown - 1]), x.waits_for and x.waits_for.name or "" }
    end
  end
  local half = steps / 2
  local lines = { columns(rows), "", ("a step takes %.4g"):format((ends[steps - 1] - ends[half - 1]) / half) }
  for key, t in util.ordered(waits) do lines[#lines + 1] = ("%s: %.4g a step"):format(key, t / half) end
  return table.concat(lines, "\n")
end

-- -- what was measured -----------------------------------------------------------------------------------------------------------------

--- What a pipeline has measured (pipeline:measure(true) before) as Chrome trace JSON: an event for each operation, a thread for each
--- stream, a process for each rank.
function M.trace(pipeline)
  local list = pipeline.measured
  if not list then P.fail(("%s: nothing is measured; call pipeline:measure(true) before the steps"):format(pipeline.class_name)) end
  local rank, events, first = pipeline.group and pipeline.group:rank() or 0, {}, list[1] and list[1].from or 0
  for i, x in ipairs(list) do
    events[i] = ('{"name":"%s","cat":"%s","ph":"X","ts":%.3f,"dur":%.3f,"pid":%d,"tid":"%s","args":{"batch":%d}}'):format(x.operation.name,
      x.operation.kind, (x.from - first) / 1000, (x.to - x.from) / 1000, rank, x.operation.on, x.batch)
  end
  return '{"traceEvents":[\n' .. table.concat(events, ",\n") .. '\n]}\n'
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

signature.kind("Pipeline", "a Pipeline", Pipeline.is)
signature.check_each("show.", M, { "table_of", "check" }, "schedule: Schedule")
signature.check_each("show.", M, { "trace", "times" }, "pipeline: Pipeline")
signature.check("show.", M, { simulate = "schedule: Schedule, times: table, steps: count",
  simulation = "schedule: Schedule, times: table" })

return M
