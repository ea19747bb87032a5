-- plan.lua: ten configurations of tables: what plans were predicted to take, beside what steps of them take; the planner's choice beside
-- plans written by hand, and beside the one by TorchRec's formulas for the same topology. The topology is measured before
-- (perilune calibrate); a step is the forward and backward pass with the update of the sharded collections, all plans of a configuration
-- take turns, and of their turns the fastest counts.
local argparse = require "argparse"
local json = require "dkjson"
local peri = require "perilune"
local verify = require "perilune.launch.verify"
local plan = peri.plan

local parser = argparse("tests/bench/plan.lua", "Predicted and measured steps of plans.")
parser:option("--topology", "The measured topology.")
parser:option("--out", "Append results as JSON lines to this file.")
parser:option("--only", "One configuration.", "")
parser:option("--seconds", "For each plan of a configuration, about.", 2, tonumber)
local options = parser:parse(arg)

local world = peri.init()
local topology = plan.Topology.load(options.topology)
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
  { "large rows, rest in turn", function(t, i) return t.num_embeddings >= 100000 and plan.row_wise() or plan.table_wise(i % W) end },
  { "small replicas, rest in turn", function(t, i)
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
  list[#list + 1] = { name = "by size", by_hand = true, plan = plan.table_wise_by_size({ [""] = tables }, { world_size = W }) }
  for name, estimates in peri.util.ordered { chosen = "step", torchrec = "torchrec" } do
    local planner = plan.EmbeddingShardingPlanner { topology = topology, batch_size = batch, constraints = constraints,
      sharder = plan.perilune_sharder, estimates = estimates }
    list[#list + 1] = { name = name, plan = planner:collective_plan(model, world) }
  end
  return list
end

--- One entry for each plan; equal ones are measured once.
local function distinct(list)
  local seen, out = {}, {}
  for _, entry in ipairs(list) do
    local text = plan.to_text(entry.plan)
    seen[text] = seen[text] or entry
    if seen[text] == entry then out[#out + 1] = entry end
    entry.same = seen[text]
  end
  return out
end

local function run(config)
  local model, constraints = described(config)
  local list = plans_of(model, constraints, config.batch)
  table.sort(list, function(a, b) return a.name < b.name end)
  verify.compare(distinct(list), { model = model, topology = topology, batch_size = config.batch, constraints = constraints, group = world,
    seconds = options.seconds })
  local best, of = nil, {}
  for _, entry in ipairs(list) do
    of[entry.name] = entry.same
    if entry.by_hand and (not best or entry.same.measured.ms < best.same.measured.ms) then best = entry end
  end
  local c = of.chosen
  local r = { config = config.name, ranks = W, nodes = hosts, predicted_ms = c.predicted.ms, measured_ms = c.measured.ms,
    predicted_bytes = c.predicted.bytes, measured_bytes = c.measured.bytes, best_ms = best.same.measured.ms, best = best.name,
    torchrec_ms = of.torchrec.measured.ms, torchrec_differs = of.torchrec ~= c, plans = {} }
  for _, entry in ipairs(list) do
    r.plans[#r.plans + 1] = { name = entry.name, predicted_ms = entry.same.predicted.ms, measured_ms = entry.same.measured.ms }
  end
  if world:rank() == 0 then
    print(("%d ranks on %d: %-16s predicted %7.2f ms, measured %7.2f (%+.0f %%), bytes %+.1f %%; best by hand %7.2f (%s): %.2f; "
      .. "TorchRec's %s"):format(W, hosts, r.config, r.predicted_ms, r.measured_ms, 100 * (r.predicted_ms / r.measured_ms - 1),
        100 * (r.predicted_bytes / r.measured_bytes - 1), r.best_ms, r.best, r.measured_ms / r.best_ms,
        r.torchrec_differs and ("%.2f"):format(r.torchrec_ms) or "is the same"))
    if options.out then
      local out = assert(io.open(options.out, "a"))
      out:write(json.encode(r), "\n")
      out:close()
    end
  end
end

for _, config in ipairs(configurations) do
  if options.only == "" or options.only == config.name then peri.scope(run, config) end
end
peri.finish()
