-- cluster.lua: a plan and a schedule on ranks that are not there: how long a step takes, how much of it waits for
-- exchanges, who has most to do; as a table, and as a timeline (simulate.lua).
local P = require "perilune.ffi"
local util = require "perilune.util"
local traffic = require "perilune.simulation.traffic"
local simulate = require "perilune.simulation.simulate"
local Timeline = require "perilune.simulation.timeline"
local planners = require "perilune.plan.planner"
local signature = require "perilune.signature"

local M = {}

local MOST_SHOWN = 64 -- ranks of a timeline

--- What each kind of operation is made of: f(times, traffic, rank, plan of the schedule). times: of what the tables do
--- not decide.
local phases = {}

local function exchange_first(list, plan, times, t, rank)
  if not plan.first.input_dist then list[#list + 1] = { "post", "ids" } end
  list[#list + 1] = { "wait", "ids" }
  list[#list + 1] = { "run", t.lookup[rank] + (plan.first.prefetch and 0 or t.prefetch[rank]) + (times.lookup or 0) }
  list[#list + 1] = { "post", "rows" }
end

function phases.input_dist(times) return { { "hold", times.input_dist or 0 }, { "post", "ids" } } end
function phases.wait_dist(times) return { { "wait", "ids" }, { "hold", times.wait_dist or 0 } } end
function phases.prefetch(times, t, rank) return { { "hold", t.prefetch[rank] + (times.prefetch or 0) } } end

function phases.lookup(times, t, rank, plan)
  local list = {}
  exchange_first(list, plan, times, t, rank)
  return list
end

function phases.forward(times, t, rank, plan)
  local list = {}
  if not plan.first.lookup then exchange_first(list, plan, times, t, rank) end
  list[#list + 1] = { "wait", "rows" }
  list[#list + 1] = { "run", times.forward or 0 }
  return list
end

function phases.backward(times, t, rank, plan)
  local list = { { "run", times.backward or 0 }, { "post", "grads" } }
  if not plan.first.update then list[#list + 1] = { "post", "dense" } end
  list[#list + 1] = { "wait", "grads" }
  if not plan.first.update then
    list[#list + 1] = { "run", t.update[rank] }
    list[#list + 1] = { "wait", "dense" }
  end
  return list
end

function phases.update(times, t, rank)
  return { { "post", "dense" }, { "run", t.update[rank] + (times.update or 0) }, { "wait", "dense" } }
end

local held = util.index_of { "load", "to_device" } -- not by the processor that trains

local function work_of(plan, times, t)
  return function(o, rank)
    if phases[o.kind] then return phases[o.kind](times, t, rank, plan) end
    return { { held[o.kind] and "hold" or "run", times[o.name] or 0 } }
  end
end

--- Ranks whose operations a timeline has: all, or some of all.
local function shown_ranks(W)
  local set, list = {}, {}
  for i = 0, math.min(W, MOST_SHOWN) - 1 do
    local r = W <= MOST_SHOWN and i or math.floor(i * (W - 1) / (MOST_SHOWN - 1))
    if not set[r] then set[r], list[#list + 1] = true, r end
  end
  return set, list
end

local function extremes(list, n)
  local most, sum, at = 0, 0, 0
  for r = 0, n - 1 do
    sum = sum + list[r]
    if list[r] > most then most, at = list[r], r end
  end
  return most, sum / n, at
end

--- The end of each step: when its last operation is done on the last rank.
local function step_ends(run, ranks)
  local ends, k = {}, #run.list
  for _, x in ipairs(run.list) do
    if x.step >= 0 then
      local most = ends[x.step] or 0
      for r = 0, ranks - 1 do most = math.max(most, run.to[r * k + x.id]) end
      ends[x.step] = most
    end
  end
  return ends
end

--- cluster.simulate { planner = one that has planned, schedule =, times = { forward = ms, ... }: of what the tables do
--- not decide (default 0), dense_bytes = 0 of the dense part's gradients, steps = 12 }. Returns { ranks, step_ms,
--- samples_per_s, busy_ms (of the processor that works most) and mean_busy_ms, slowest (that rank), exposed_ms =
--- step_ms - busy_ms: in which even that one waits for exchanges, imbalance = busy_ms / mean_busy_ms, links = by
--- exchange: { name, ms = on the slowest rank }, and run, shown: for `trace` }.
function M.simulate(args)
  local f = "cluster.simulate"
  local a = util.named(f, args, { planner = util.required.table, schedule = util.required.table,
    times = util.optional.table, dense_bytes = util.whole(0, 0), steps = util.whole(12, 4, 1000) })
  if not planners.EmbeddingShardingPlanner.is(a.planner) or not (a.planner.last and a.planner.last.best) then
    P.fail(f .. ": planner is none that has planned: an EmbeddingShardingPlanner after planner:plan(model)")
  end
  if not util.above("perilune.pipeline.schedule").is(a.schedule) then P.fail(f .. ": schedule is no Schedule") end
  local plan, W = a.schedule:check(), a.planner.topology.world_size
  simulate.check_times(a.times or {}, plan)
  local t = traffic.traffic_of_plan(a.planner, a.dense_bytes)
  local shown, list = shown_ranks(W)
  local run = simulate.run(plan, { ranks = W, steps = a.steps, work = work_of(plan, a.times or {}, t), shown = shown,
    links = function(name) return t.links[name] end })
  local ends, half = step_ends(run, W), run.half
  local steps = a.steps - half
  local busy, mean, slowest = extremes(run.busy, W)
  local out = { ranks = W, run = run, shown = list, slowest = slowest,
    step_ms = (ends[a.steps - 1] - ends[half - 1]) / steps, busy_ms = busy / steps, mean_busy_ms = mean / steps,
    imbalance = mean > 0 and busy / mean or 1, links = {} }
  out.exposed_ms = math.max(0, out.step_ms - out.busy_ms)
  out.samples_per_s = out.step_ms > 0 and W * a.planner.batch_size / out.step_ms * 1000 or math.huge
  for _, name in ipairs { "ids", "rows", "grads", "dense" } do
    local ms = t.links[name].latency
    for _, link in ipairs(t.links[name]) do ms = math.max(ms, t.links[name].latency + extremes(link.ms, W)) end
    table.insert(out.links, { name = name, ms = ms })
  end
  return out
end

--- Rows of text about simulations of several worlds, heads first.
function M.cells(list)
  local rows = { { "ranks", "ms a step", "samples/s", "busy ms", "mean", "imbalance", "exposed ms", "ids", "rows",
    "grads", "dense" } }
  for i, s in ipairs(list) do
    rows[i + 1] = { tostring(s.ranks), ("%.4g"):format(s.step_ms), ("%.4g"):format(s.samples_per_s),
      ("%.4g"):format(s.busy_ms), ("%.4g"):format(s.mean_busy_ms), ("%.2f"):format(s.imbalance),
      ("%.4g"):format(s.exposed_ms) }
    for _, link in ipairs(s.links) do table.insert(rows[i + 1], ("%.4g"):format(link.ms)) end
  end
  return rows
end

--- A simulation as Chrome trace JSON: a process for each of up to 64 ranks, a thread for each stream and link.
function M.trace(simulation)
  if type(simulation) ~= "table" or type(simulation.run) ~= "table" or type(simulation.shown) ~= "table" then
    P.fail("cluster.trace: simulation is no result of cluster.simulate")
  end
  local run, of, texts = simulation.run, {}, {}
  local k = #run.list
  for _, r in ipairs(simulation.shown) do
    of[r] = Timeline(r, "rank " .. r)
    for _, x in ipairs(run.list) do of[r]:thread("stream " .. x.o.on) end
    for _, x in ipairs(run.list) do
      local i = r * k + x.id
      of[r]:add("stream " .. x.o.on, x.o.name, "operation", run.from[i] * 1000, run.to[i] * 1000, "batch", x.batch)
    end
  end
  for _, c in ipairs(run.exchanges) do
    for _, s in ipairs(c.spans or {}) do
      of[s.rank]:add("link " .. s.name, c.name, "exchange", s.from * 1000, s.to * 1000, "batch", c.batch)
    end
  end
  for i, r in ipairs(simulation.shown) do texts[i] = of[r]:text() end
  return Timeline.document(texts)
end

signature.object("cluster_simulation", "a result of cluster.simulate",
  { ranks = "number", step_ms = "number", samples_per_s = "number", busy_ms = "number", mean_busy_ms = "number",
    imbalance = "number", exposed_ms = "number", links = "list" })
signature.list_of("cluster_simulations", "a list of results of cluster.simulate", "cluster_simulation")
signature.check("cluster.", M, { cells = "list: cluster_simulations" })

return util.face("peri.pipeline.cluster", M)
