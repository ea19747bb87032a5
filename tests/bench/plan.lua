-- plan.lua: ten configurations of tables: what plans were predicted to take, beside what steps of them take; the
-- planner's choice beside plans written by hand, and beside the one by TorchRec's formulas for the same topology. A
-- step is the forward and backward pass with the update of the sharded collections, all plans of a configuration take
-- turns, and of their turns the fastest counts.
--
-- The topology is measured by what `perilune calibrate` runs, in rounds: calibration, then all configurations. Others
-- on the machine change what it can do for minutes, so both are measured at the same times. Each round plans by what is
-- known then; predictions and the choice are by the topology of all rounds. Predictions are compared with the rounds',
-- of which there are as many turns as of calibration's steps: of more, the fastest is faster. Plans are compared with
-- each other by more: at the end the choice, TorchRec's and those by hand that are near the best are made and run again
-- and again, and the median of what their turns took counts, for a plan that is made again takes up to 5 % more or less
-- across machines (as its connections fall), and the fastest of many is the luckiest.
local argparse = require "argparse"
local json = require "dkjson"
local peri = require "perilune"
local machine = require "perilune.calibration.machine"
local verify = require "perilune.launch.verify"
local step = require "perilune.plan.step"
local plan = peri.plan

local parser = argparse("tests/bench/plan.lua", "Predicted and measured steps of plans.")
parser:option("--topology", "Keep the measured topology in this file.")
parser:option("--out", "Append results as JSON lines to this file.")
parser:option("--only", "One configuration.", "")
parser:option("--seconds", "For each plan of a configuration and round, about.", 0.3, tonumber)
parser:option("--rounds", "Of calibration and all configurations.", 3, tonumber)
parser:option("--calibration", "Seconds of a round's calibration, about.", 8, tonumber)
parser:option("--configurations", "Others: a Lua file that returns a list like that of this file.")
local options = parser:parse(arg)

local world = peri.init()
local topology, calibrated
local W, hosts = world:size(), world:size() / world.local_size

--- Tables: { count, rows, columns, ids of a bag }; a batch is of each rank.
local configurations = {
  { name = "one id", batch = 1024, { 8, 100000, 64, 1 } },
  { name = "twenty ids", batch = 512, { 8, 100000, 64, 20 } },
  { name = "wide rows", batch = 512, { 8, 30000, 256, 4 } },
  { name = "narrow rows", batch = 1024, { 16, 100000, 8, 4 } },
  { name = "one large table", batch = 512, { 1, 800000, 64, 20 }, { 7, 1000, 64, 1 } },
  { name = "few tables", batch = 1024, { 3, 100000, 64, 4 } },
  { name = "small tables", batch = 1024, { 16, 500, 32, 1 } },
  { name = "all sizes", batch = 512, { 2, 400000, 32, 8 }, { 4, 20000, 32, 2 }, { 6, 100, 32, 1 } },
  { name = "uneven work", batch = 512, { 1, 100000, 64, 40 }, { 1, 100000, 64, 10 }, { 4, 100000, 64, 1 } },
  { name = "few samples", batch = 64, { 8, 100000, 64, 4 } },
}

if options.configurations then configurations = assert(loadfile(options.configurations))() end

--- The model and constraints of a configuration.
local function described(config)
  local tables, constraints = {}, {}
  for _, kind in ipairs(config) do
    for _ = 1, kind[1] do
      local name = "t" .. #tables + 1
      tables[#tables + 1] = { name = name, num_embeddings = kind[2], embedding_dim = kind[3] }
      constraints[name] = plan.ParameterConstraints { pooling_factors = { kind[4] } }
    end
  end
  return plan.describe.of { tables = tables, optimizer = "rowwise_adagrad" }, constraints
end

--- Plans that people write: name -> function(table, number of the table) -> entry.
local by_hand = {
  { "row-wise", function() return plan.row_wise() end },
  { "tables in turn", function(_, i) return plan.table_wise(i % W) end },
  { "large rows, rest in turn", function(t, i)
    return t.num_embeddings >= 100000 and plan.row_wise() or plan.table_wise(i % W)
  end }, { "small replicas, rest in turn", function(t, i)
    return t.num_embeddings <= 1000 and plan.data_parallel() or plan.table_wise(i % W)
  end },
}
if hosts > 1 then
  table.insert(by_hand, { "within hosts", function(_, i) return plan.table_row_wise(i % hosts) end })
end

local function plans_of(model, constraints, batch)
  local list, tables = {}, model[1].tables
  for _, hand in ipairs(W > 1 and by_hand or { by_hand[2] }) do
    local entries = {}
    for i, t in ipairs(tables) do entries[t.name] = hand[2](t, i - 1) end
    list[#list + 1] = { name = hand[1], plan = plan.ShardingPlan { [""] = entries }, by_hand = true }
  end
  list[#list + 1] = { name = "by size", by_hand = true, plan = plan.table_wise_by_size({ [""] = tables },
    { world_size = W }) }
  for name, estimates in peri.util.ordered { chosen = "step", torchrec = "torchrec" } do
    local planner = plan.EmbeddingShardingPlanner { topology = topology, batch_size = batch, constraints = constraints,
      sharder = plan.perilune_sharder, estimates = estimates }
    list[#list + 1] = { name = name, plan = planner:collective_plan(model, world) }
  end
  return list
end

local median = peri.util.median

--- What a plan is but for names: tables of a kind are alike, whichever of them is where.
local function key_of(config, p)
  local kinds, i = {}, 0
  for _, kind in ipairs(config) do
    local entries = {}
    for k = 1, kind[1] do
      i = i + 1
      entries[k] = plan.to_text(plan.ShardingPlan { [""] = { t = p.plan[""].tables["t" .. i] } })
    end
    table.sort(entries)
    kinds[#kinds + 1] = table.concat(entries)
  end
  return table.concat(kinds, "\n")
end

-- configuration -> key of a plan -> { measured = (of the rounds), times = (of each time that it was made) }
local results = {}

--- All plans of `entries` that differ, in turns. rounds: whether these are of the rounds.
local function measure(config, entries, rounds)
  local model, constraints = described(config)
  local seen, list = {}, {}
  for _, entry in ipairs(entries) do
    local key = key_of(config, entry.plan)
    if not seen[key] then
      seen[key] = { key = key, plan = entry.plan }
      list[#list + 1] = seen[key]
    end
  end
  verify.compare(list, { model = model, topology = topology, batch_size = config.batch, constraints = constraints,
    group = world, seconds = options.seconds })
  local of = results[config] or {}
  results[config] = of
  for _, entry in ipairs(list) do
    local best = of[entry.key] or { measured = entry.measured, times = {} }
    of[entry.key], best.times[#best.times + 1] = best, entry.measured.median_ms
    if rounds and entry.measured.ms < best.measured.ms then best.measured = entry.measured end
  end
end

--- One round of a configuration.
local function round(config)
  local model, constraints = described(config)
  measure(config, plans_of(model, constraints, config.batch), true)
end

--- Its plans, with what is known of them; by name; the best by hand.
local function known(config)
  local model, constraints = described(config)
  local best, of, list = nil, {}, plans_of(model, constraints, config.batch)
  for _, entry in ipairs(list) do
    local key = key_of(config, entry.plan)
    local found = results[config][key]
    entry.key, entry.text, entry.measured = key, plan.to_text(entry.plan), found and found.measured
    entry.ms = found and median(found.times)
    entry.predicted = step.predict(entry.plan, model, topology, config.batch, constraints)
    of[entry.name] = entry
    if entry.by_hand and (not best or entry.ms < best.ms) then best = entry end
  end
  return list, of, best
end

local NEAR, FINALS = 1.1, 5 -- times the best by hand: those are run again, so often

--- The last rounds of a configuration.
local function finals(config)
  local list, _, best = known(config)
  local entries = {}
  for _, entry in ipairs(list) do
    if not entry.by_hand or entry.ms <= NEAR * best.ms then entries[#entries + 1] = entry end
  end
  for _ = 1, FINALS do measure(config, entries) end
end

--- What all rounds say of a configuration.
local function report(config)
  local list, of, best = known(config)
  local c = of.chosen
  local r = { config = config.name, ranks = W, nodes = hosts, predicted_ms = c.predicted.ms,
    measured_ms = c.measured.ms, predicted_bytes = c.predicted.bytes, measured_bytes = c.measured.bytes,
    chosen_ms = c.ms, best_ms = best.ms, best = best.name, torchrec_ms = of.torchrec.ms,
    torchrec_differs = of.torchrec.key ~= c.key, plans = {} }
  for _, entry in ipairs(list) do
    r.plans[#r.plans + 1] = { name = entry.name, predicted_ms = entry.predicted.ms, measured_ms = entry.measured.ms,
      median_ms = entry.ms, measured_forward_ms = entry.measured.forward_ms, text = entry.text }
  end
  if world:rank() == 0 then
    print(("%d ranks on %d: %-16s predicted %7.2f ms, measured %7.2f (%+.0f %%), bytes %+.1f %%; made again %.2f, "
      .. "best by hand %.2f (%s): %.2f; TorchRec's %s"):format(W, hosts, r.config, r.predicted_ms, r.measured_ms,
        100 * (r.predicted_ms / r.measured_ms - 1), 100 * (r.predicted_bytes / r.measured_bytes - 1), r.chosen_ms,
        r.best_ms, r.best, r.chosen_ms / r.best_ms, r.torchrec_differs and ("%.2f"):format(r.torchrec_ms)
          or "is the same"))
    if options.out then
      local out = assert(io.open(options.out, "a"))
      out:write(json.encode(r), "\n")
      out:close()
    end
  end
end

local function each(f)
  for _, config in ipairs(configurations) do
    if options.only == "" or options.only == config.name then peri.scope(f, config) end
  end
end

for _ = 1, options.rounds do
  local off
  topology, off, calibrated = machine.topology { group = world, seconds = options.calibration, before = calibrated }
  if world:rank() == 0 then
    print(("calibrated: %.0f %% off forward, %.0f %% backward, in the mean over %d steps"):format(100 * off.forward,
      100 * off.backward, off.steps))
  end
  each(round)
end
each(finals)
each(report)
if options.topology and world:rank() == 0 then topology:save(options.topology) end
peri.finish()
