-- program.lua: from a checked schedule to the program of a step: straight-line Lua, one call an operation, which LuaJIT
-- compiles as it compiles a loop written by hand.
local P = require "perilune.ffi"
local stream = require "perilune.tensor.stream"
local actions = require "perilune.pipeline.actions"

local M = {}

--- Whether it is known, when operation o acts on batch b, that b is the last one: batch b + 1 was asked for before.
function M.knows_last(plan, o)
  local load = plan.load
  return load.ahead > o.ahead + 1 or load.ahead == o.ahead + 1 and load.place < o.place
end

--- The condition under which an operation acts on batch b, as Lua.
local function condition(plan, o)
  local tests = { "b >= " .. o.from_step }
  if o.until_step then tests[#tests + 1] = "b < " .. o.until_step end
  if o.kind == "load" then
    tests[#tests + 1] = "b < supply.total"
    return table.concat(tests, " and ")
  end
  if not o.access.early then tests[#tests + 1] = "has(supply, b)" end
  if o.every > 1 then
    local turn = ("b %% %d == %d"):format(o.every, o.at)
    local last = o.access.closes and M.knows_last(plan, o)
    tests[#tests + 1] = last and ("(%s or not has(supply, b + 1))"):format(turn) or turn
  end
  return table.concat(tests, " and ")
end

--- The lines of the i-th operation.
local function add_operation(lines, plan, i, o)
  local guarded = o.access.early and o.kind ~= "load"
  lines[#lines + 1] = ("  b = n + %d -- %s"):format(o.ahead, o.name)
  lines[#lines + 1] = ("  if %s then"):format(condition(plan, o))
  lines[#lines + 1] = ("    c = ring[b %% %d + 1]"):format(plan.depth)
  if o.kind == "load" then lines[#lines + 1] = "    c:_open(b)" end
  if guarded then lines[#lines + 1] = "    if c.index == b and c.batch then" end
  lines[#lines + 1] = ("    inside(c.scope, f%d, self, c, o%d)"):format(i, i)
  if guarded then lines[#lines + 1] = "    end" end
  lines[#lines + 1] = "    if comm then progress(comm) end"
  lines[#lines + 1] = "  end"
end

--- The text of a step's program. Operations with a hook are not in it: they run within 'backward'.
local function source_of(plan)
  local lines = {
    "local operations, actions, inside, has, progress = ...",
  }
  for i in ipairs(plan.operations) do
    lines[#lines + 1] = ("local o%d, f%d = operations[%d], actions[%d]"):format(i, i, i, i)
  end
  lines[#lines + 1] = "return function(self, n)"
  lines[#lines + 1] = "  local supply, ring, comm, b, c = self.supply, self.ring, self.comm, 0, nil"
  local begin = "  if n >= 0 and has(supply, n) then self:_begin(n) end"
  if plan.load.ahead > 0 then lines[#lines + 1] = begin end
  for i, o in ipairs(plan.operations) do
    if not o.hook then add_operation(lines, plan, i, o) end
    if o == plan.load and o.ahead == 0 then lines[#lines + 1] = begin end
  end
  lines[#lines + 1] = "end"
  return table.concat(lines, "\n")
end

--- What an operation does on a device with streams: on its own one, after those whose results it needs, before those
--- who wait for it.
local function on_stream(plan, o, action)
  local before, signals = {}, o.on ~= "main"
  for _, e in ipairs(plan.edges) do
    if e.to == o then before[#before + 1] = { place = e.from.place, batches = e.from.ahead - o.ahead - e.steps } end
    signals = signals or e.from == o
  end
  local function body(pipeline, context)
    local own, ring = pipeline.streams:current(o.on), pipeline.ring
    for _, from in ipairs(before) do
      local b = context.index + from.batches
      local event = b >= 0 and ring[b % plan.depth + 1].events[from.place]
      if event then own:wait_event(event) end
    end
    action(pipeline, context, o)
    if signals then context.events[o.place] = own:record_event(context.events[o.place]) end
  end
  return function(pipeline, context)
    local own = pipeline.streams:get(o.on)
    if own then return stream.run(own, body, pipeline, context) end
    return body(pipeline, context)
  end
end

--- What an operation does while it is measured.
local function timed(o, action)
  return function(pipeline, context)
    local from = tonumber(P.C.peri_time_ns())
    action(pipeline, context, o)
    local list = pipeline.measured
    list[#list + 1] = { operation = o, batch = context.index, from = from, to = tonumber(P.C.peri_time_ns()) }
  end
end

local function progress(comm) P.C.peri_group_progress(comm) end

--- The program of `plan`: function(pipeline, n), which runs step n; and what its operations do: a list of
--- function(pipeline, context, operation). streams: the device has some. measure: note times in pipeline.measured.
function M.compile(plan, has, streams, measure)
  local list = {}
  for i, o in ipairs(plan.operations) do
    local action = o.access.own and actions.own or actions[o.kind]
    if streams then action = on_stream(plan, o, action) end
    if measure then action = timed(o, action) end
    list[i] = action
  end
  local chunk = assert(loadstring(source_of(plan), ("=perilune/pipeline/%s"):format(plan.name)))
  return chunk(plan.operations, list, P.inside, has, progress), list
end

M.source_of = source_of
return M
