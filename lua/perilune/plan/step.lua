-- plan/step.lua: milliseconds of a training step of sharded collections, our own estimates: what TorchRec's formulas
-- (perf.lua) leave out.
--
-- A step is counted (counts.lua), then priced. Prices are milliseconds a unit (Topology.costs), which `perilune
-- calibrate` finds by measuring steps; a topology without them has those of one core of a Zen 4. The time of a step is
-- that of the slowest rank: all wait for it. Ranks that share processors take turns.
local util = require "perilune.util"
local kinds = require "perilune.plan.kinds"
local signature = require "perilune.signature"
local types = require "perilune.plan.types"
local topologies = require "perilune.plan.topology"
local storage = require "perilune.plan.storage"
local partitioners = require "perilune.plan.partitioners"
local buckets = require "perilune.plan.buckets"
local options = require "perilune.plan.options"
local links = require "perilune.plan.links"
local counts = require "perilune.plan.counts"
local sharding_types = require "perilune.plan.sharding_types"
local prices = require "perilune.plan.prices"
local amounts_of = require "perilune.plan.amounts"
local constraints_of = require "perilune.plan.constraints"
local enumerators = require "perilune.plan.enumerators"

local M = {}

local KEPT = 2048 -- bytes that a rank knows about a table

M.units = topologies.units

--- Milliseconds a unit where a topology says none: forward, backward (with the update). One core of a Zen 4.
local usual = {
  forward = { step = 0.05, home_id = 1.5e-6, id = 2e-6, id_byte = 2e-8, cold_row = 4e-6, cold_row_byte = 4e-8,
    bag = 5e-6, bag_byte = 1e-7, replica_byte = 0, near = 1, far = 1 },
  backward = { step = 0.05, home_id = 0, id = 1e-5, id_byte = 5e-8, cold_row = 1e-5, cold_row_byte = 1e-7, bag = 3e-6,
    bag_byte = 1.5e-7, replica_byte = 5e-7, state_row = 5e-6, state_byte = 5e-8, cold_state_byte = 1e-7, near = 1,
    far = 1 },
}

M.usual = usual

local function price(costs, way, unit)
  local list = costs and costs[way] or usual[way]
  return list[unit] or 0
end

local beyond = util.index_of { "far", "far_sums", "far_mixed" }

--- Milliseconds of a pass with these amounts at these prices, but for what crosses hosts.
local function computed_ms(amounts, costs, way)
  local ms = 0
  for _, unit in ipairs(M.units) do
    if not beyond[unit] then ms = ms + amounts[unit] * price(costs, way, unit) end
  end
  return ms
end

--- What a pass computes, as links.passes takes it, and all of it.
local function computed(amounts, topology, costs, way)
  local own, priced, n = {}, 0, topology.world_size
  for r = 1, n do own[r] = 0 end
  for _, list in ipairs(amounts.own) do
    local p = (list.way or way) == way and price(costs, way, list.unit) or 0
    if p > 0 then
      priced = priced + p * amounts[way][list.unit]
      for r = 1, n do own[r] = own[r] + p * list[r] end
    end
  end
  local most, all = amounts_of.busiest(own, topology), computed_ms(amounts[way], costs, way)
  -- a rank may be the busiest in one unit, and not in another
  for r = 1, n do own[r] = most > 0 and own[r] * priced / most or 0 end
  return { before = all - priced, own = own }, all
end

--- Milliseconds that a step of these ranks takes longer for what crosses hosts, by direction, beside what is computed:
--- amounts at these prices, or nothing.
local function far_ms(ranks, topology, amounts, costs)
  if #ranks <= topology.local_world_size then return { forward = 0, backward = 0 } end
  local given, all = {}, {}
  for _, way in ipairs { "forward", "backward" } do
    if amounts then given[way], all[way] = computed(amounts, topology, costs, way)
    else given[way], all[way] = { before = 0, own = util.map(ranks, function() return 0 end) }, 0 end
  end
  local ms = links.passes(ranks, topology, given)
  return { forward = ms.forward - all.forward, backward = ms.backward - all.backward }
end

--- Milliseconds that a pass takes longer for what moves between memories: beside what each rank computes.
local function below_ms(ranks, topology, amounts, costs, way)
  local field, any = "below_" .. way, 0
  for _, c in ipairs(ranks) do any = math.max(any, c[field]) end
  if any == 0 then return 0 end
  local own, without, with = computed(amounts, topology, costs, way).own, 0, 0
  for r, c in ipairs(ranks) do without, with = math.max(without, own[r]), math.max(with, own[r] + c[field]) end
  return with - without
end

--- Milliseconds of a step: all, forward, backward.
local function step_ms(ranks, topology, kept)
  local amounts, costs, passes = amounts_of.amounts_of_ranks(ranks, topology, kept), topology.costs or usual, {}
  local far = far_ms(ranks, topology, amounts, costs)
  for _, way in ipairs { "forward", "backward" } do
    local of = amounts[way]
    passes[way] = computed_ms(of, costs, way) + far[way] * price(costs, way, "far")
      + of.far_sums * price(costs, way, "far_sums") + of.far_mixed * price(costs, way, "far_mixed")
      + below_ms(ranks, topology, amounts, costs, way)
  end
  return passes.forward + passes.backward, passes.forward, passes.backward
end

--- Units of a step of these ranks (amounts.lua), with far: as if nothing were computed.
local function amounts(ranks, topology)
  local all, far = amounts_of.amounts_of_ranks(ranks, topology), far_ms(ranks, topology)
  for _, way in ipairs { "forward", "backward" } do all[way].far = far[way] end
  return all
end

--- A plan (ShardingPlan) of a model (plan/describe.lua) as options and their placement, with the shards that its
--- entries say.
function M.of_plan(plan, model, topology, batch_size, constraints)
  local enumerator = enumerators.EmbeddingEnumerator { topology = topology, batch_size = batch_size,
    constraints = constraints or {}, estimators = {} }
  local env = { world_size = topology.world_size, local_size = topology.local_world_size }
  local list, placement = {}, {}
  for _, collection in ipairs(model) do
    local tables = plan:get_plan_for_module(collection.path).tables
    for _, config in ipairs(collection.tables) do
      local entry, map = tables[config.name], collection.maps and collection.maps[config.name]
      if map then entry = buckets.cut(entry, map, env) end
      local constraint = constraints_of.for_table(constraints or {}, collection.path, config.name)
      local fields, ranks = enumerator:_shared_fields(collection, config, constraint), {}
      fields.id, fields.sharding_type, fields.compute_kernel, fields.runs = #list + 1, entry.sharding_type,
        entry.compute_kernel, {}
      if sharding_types.of[entry.sharding_type].replica then
        ranks = true
        fields.runs[1] = { n = topology.world_size, rows = config.num_embeddings, cols = config.embedding_dim,
          row_offset = 0, col_offset = 0 }
      end
      for k, s in ipairs(ranks == true and {} or entry:shards(config, env)) do
        ranks[k] = s.rank
        fields.runs[k] = { n = 1, rows = s.rows, cols = s.cols, row_offset = s.row_offset, col_offset = s.col_offset }
      end
      list[#list + 1] = options.ShardingOption(fields)
      placement[#list] = ranks
    end
  end
  return list, placement
end

--- What a step of a plan takes: { ms =, forward_ms =, backward_ms =, bytes = (weights and states that stay, on the
--- fullest rank) }.
function M.predict(plan, model, topology, batch_size, constraints)
  local list, placement = M.of_plan(plan, model, topology, batch_size, constraints)
  local p = {}
  p.ms, p.forward_ms, p.backward_ms = step_ms(counts.by_rank(list, placement, topology), topology)
  p.bytes = 0
  for _, option in ipairs(list) do
    for _, run in ipairs(option.runs) do run.kept = M.kept_bytes(option, run, topology) end
  end
  local bytes = partitioners.by_rank(list, placement, topology.world_size, function(run) return run.kept end)
  for _, b in ipairs(bytes) do p.bytes = math.max(p.bytes, b + KEPT * #list) end
  return p
end

-- -- parts of a planner -----------------------------------------------------------------------------------------------

local StepEstimator = util.seal(util.class "StepEstimator")
M.StepEstimator = StepEstimator

--- StepEstimator { topology = }: what one shard adds to its rank. Ratings of whole plans are StepModel's.
function StepEstimator:init(args)
  self.topology = util.named("StepEstimator", args, { topology = util.required.table }).topology
  signature.value("StepEstimator", "topology", self.topology, "Topology")
  self.prices = false -- while it estimates
end

--- Prices of a shard's units, by part of its time (prices.lua).
local function prices_of(t)
  local function list(way, units)
    local out = {}
    for _, unit in ipairs(units) do
      local of = unit == "home_id" and "id" -- a rank's ids are at home what they are to owners
        or unit == "id_byte" and way == "backward" and "grad_byte" or unit
      out[#out + 1], out[#out + 2] = of, price(t.costs, way, unit)
    end
    return out
  end
  local function compute(way)
    local out = list(way, { "table", "id", "id_byte", "row", "shared_row", "odd_row", "bag", "bag_byte", "replica_byte",
      "state_row", "state_byte", "home_id", "home_bag", "home_bag_byte", "cold_row", "cold_row_byte",
      "cold_state_byte" })
    out[#out + 1], out[#out + 2] = "below_" .. way, 1
    return out
  end
  local function exchange(way, near, far)
    return { near, price(t.costs, way, "near") / t.intra_host_bw, far, price(t.costs, way, "far") / t.inter_host_bw }
  end
  return { fwd_compute = compute "forward", bwd_compute = compute "backward", prefetch_compute = {},
    fwd_comms = exchange("forward", "near_out", "far_out"), bwd_comms = exchange("backward", "near_back", "far_back"),
    input_dist_comms = exchange("forward", "near_ids", "far_ids") }
end

--- Times of one shard of a run.
function StepEstimator:of_run(option, run)
  local t, c = self.topology, counts.count(option, run, self.topology)
  local cold = amounts_of.cold_share(c.bytes + c.state_bytes, t.cache_bytes / t.local_world_size)
  c.cold_row, c.cold_row_byte, c.cold_state_byte = cold * c.row, cold * c.row_byte, cold * c.state_line_byte
  return prices.times(c, self.prices or prices_of(t)), c
end

--- Fill the times and counts of all runs of options.
function StepEstimator:estimate(list)
  self.prices = prices_of(self.topology)
  for _, option in ipairs(list) do
    for _, run in ipairs(option.runs) do run.perf, run.count = self:of_run(option, run)
      run.counted = nil
    end
    option:sum_perf()
  end
  self.prices = false
end

--- Rates a placement by the time of its step.
local StepModel = util.seal(util.class "StepModel")
M.StepModel = StepModel
StepModel.unit = "ms"
function StepModel:init(args)
  self.topology = util.named("StepModel", args, { topology = util.required.table }).topology
  signature.value("StepModel", "topology", self.topology, "Topology")
  self.ranks, self.lists = {}, {} -- filled again by each rating
end
function StepModel:rate(proposal, placement)
  return (step_ms(counts._by_rank_again(proposal, placement, self.topology, self.ranks), self.topology, self.lists))
end

local one_host = topologies.Topology { world_size = 1 }

--- What stays in memory for one shard, the device's and the host's: weights, states, caches. topology: default: that of
--- a processor.
function M.kept_bytes(option, run, topology)
  local device, host = storage.kept(option, run, topology or one_host)
  return device + host
end

M.count, M.by_rank, M.amounts, M.compute, M.far, M.ms = counts.count, counts.by_rank, amounts, computed_ms, far_ms,
  step_ms
signature.check("plan.step.", M, {
  kept_bytes = "option: option_with_ids, run: run, topology: Topology?" })
signature.kind("ShardingPlan", "a ShardingPlan", types.ShardingPlan.is)
local planned = "plan: ShardingPlan, model: model, topology: Topology, batch_size: count, constraints: constraints?"
signature.check("plan.step.", M, { of_plan = planned, predict = planned })
kinds.methods(StepEstimator, { of_run = "option: option_with_ids, run: run", estimate = "options: options_with_ids" })
kinds.methods(StepModel, { rate = "proposal: options_with_ids, placement: table" })

local fields = { most_ids = "number" }
for _, name in ipairs(counts.summed) do fields[name] = "number" end
signature.object("rank_counts", "counts of a rank (step.by_rank)", fields)
signature.list_of("step_counts", "a list of counts of ranks (step.by_rank)", "rank_counts")
local units, unit_prices = {}, {}
for _, unit in ipairs(M.units) do units[unit], unit_prices[unit] = "number", "number?" end
signature.object("pass_amounts", "amounts of a pass (step.amounts)", units)
signature.object("pass_prices", "prices of a pass", unit_prices)
signature.object("step_prices", "prices of a step (Topology.costs)",
  { forward = "pass_prices?", backward = "pass_prices?" })
signature.kind("pass", "'forward' or 'backward'", function(x) return x == "forward" or x == "backward" end)
signature.object("step_amounts", "amounts of a step (step.amounts)",
  { forward = "pass_amounts", backward = "pass_amounts", own = "list" })
signature.check("plan.step.", M,
  { far = "ranks: step_counts, topology: Topology, amounts: step_amounts?, costs: step_prices?",
    compute = "amounts: pass_amounts, costs: step_prices?, way: pass",
    amounts = "ranks: step_counts, topology: Topology",
  ms = "ranks: step_counts, topology: Topology" })

return M
