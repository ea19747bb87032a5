-- plan/step.lua: milliseconds of a training step of sharded collections, our own estimates: what TorchRec's formulas (perf.lua) leave out.
--
-- A step is counted, then priced. Counted are ids, bags and bytes of each shard by its rows and columns: a rank's data for itself do not
-- travel ((W - 1)/W), of rows cut within a host one sum crosses the network, ids that come again find their rows in a cache. Prices are
-- milliseconds a unit (Topology.costs), which `perilune calibrate` finds by measuring steps; a topology without them has those of one core
-- of a Zen 4. The time of a step is that of the slowest rank: all wait for it. Ranks that share processors take turns.
local util = require "perilune.util"
local kinds = require "perilune.plan.kinds"
local signature = require "perilune.signature"
local types = require "perilune.plan.types"
local topologies = require "perilune.plan.topology"
local embed = require "perilune.embed.config"
local tbes = require "perilune.embed.tbe"
local data_bytes = require("perilune.plan.constraints").data_bytes
local storage = require "perilune.plan.storage"
local partitioners = require "perilune.plan.partitioners"
local options = require "perilune.plan.options"
local links = require "perilune.plan.links"
local amounts_of = require "perilune.plan.amounts"
local constraints_of = require "perilune.plan.constraints"
local enumerators = require "perilune.plan.enumerators"

local M = {}

local WIRE = 4    -- bytes of an id on the wire (shards have fewer than 2^31 rows), of a length
local NUMBER = 4  -- bytes of what is pooled
local LINE = 64   -- bytes that come from memory at once
local USUAL_SHARE = embed.CacheParams({}).load_factor -- of a cache that nobody said anything about
local KEPT = 2048 -- bytes that a rank knows about a table

--- Columns of rows that lookups and updates know when they are compiled (kernels/cpu/tbe_forward.c, tbe_batch.c).
local common = { [32] = true, [64] = true, [128] = true, [256] = true }

local cut_by_rows = { row_wise = true, table_row_wise = true, grid_shard = true }

--- By which exchange rows of a sharding type come home, or gradients of replicas are summed; "whole_rows" unless said otherwise.
local ways = amounts_of.ways
local way_of = { row_wise = "rank_sums", table_row_wise = "host_sums", grid_shard = "host_sums", data_parallel = "replica_sums" }

M.units = topologies.units

--- Milliseconds a unit where a topology says none: forward, backward (with the update). One core of a Zen 4.
local usual = {
  forward = { step = 0.05, home_id = 1.5e-6, id = 2e-6, id_byte = 2e-8, cold_row = 4e-6, cold_row_byte = 4e-8, bag = 5e-6, bag_byte = 1e-7,
    replica_byte = 0, near = 1, far = 1 },
  backward = { step = 0.05, home_id = 0, id = 1e-5, id_byte = 5e-8, cold_row = 1e-5, cold_row_byte = 1e-7, bag = 3e-6, bag_byte = 1.5e-7,
    replica_byte = 5e-7, state_row = 5e-6, state_byte = 5e-8, cold_state_byte = 1e-7, near = 1, far = 1 },
}

M.usual = usual

local function price(costs, way, unit)
  local list = costs and costs[way] or usual[way]
  return list[unit] or 0
end

--- Ids and bags of a rank's batch.
local function batch_of(option)
  local ids, bags = 0, 0
  for i, length in ipairs(option.input_lengths) do
    local n = option.num_poolings[i] * option.batch_sizes[i]
    ids, bags = ids + length * n, bags + n
  end
  return ids, bags
end

local NO_STATES = { row = 0, full = 0, square = 0 }
local kept_states = {} -- by optimizer

--- Bytes that an optimizer keeps: for a row, for each of its numbers, for a square of columns, as the library's tables say it; none where
--- nobody has said which optimizer.
local function states_of(optimizer)
  if not optimizer then return NO_STATES end
  local known = kept_states[optimizer]
  if not known then
    known = { row = 0, full = 0, square = 0, scalar = 0 }
    for _, state in ipairs(tbes.states_of(embed.usual_params(optimizer), "FP32")) do
      known[state.geometry] = known[state.geometry] + (state.dtype == "i64" and 8 or 4)
    end
    kept_states[optimizer] = known
  end
  return known
end

--- Of `ids` lookups among `rows` rows: rows that are looked up, those of them that more than one id asks for, and how many ids do. Ids
--- drawn alike from all rows, unless statistics know how many distinct ones there are; those are then taken to be drawn alike from fewer.
local function rows_of(option, ids, rows)
  if ids <= 0 or rows <= 0 then return 0, 0, 0 end
  local stats = option.cache_params and option.cache_params.stats
  local known = stats and stats.expected_lookups and math.min(stats.expected_lookups * rows / math.max(option.rows, 1), ids, rows)
  if known and known > 0 and known < rows * (1 - math.exp(-ids / rows)) then
    local low, high = 0, rows
    for _ = 1, 50 do
      rows = (low + high) / 2
      if rows * (1 - math.exp(-ids / rows)) < known then low = rows else high = rows end
    end
  end
  local found, alone = rows * (1 - math.exp(-ids / rows)), ids * math.exp(-ids / rows)
  return found, math.max(0, found - alone), ids - alone
end

--- Milliseconds in which rows of a shard move between its device's memory and what lies below that (the host's; for caches on processors
--- files), in the forward and in the backward pass: mapped rows are read and updated there, with their states; of rows behind a cache
--- those that are missing come, and as many leave.
local function below(option, c, topology, width, updated, states)
  local kernel, apart = option.compute_kernel, topology.compute_device ~= "cpu"
  if kernel == "fused_uvm" and apart then
    local line = math.max(width, LINE)
    return c.row * line / topology.hbm_to_ddr_mem_bw, 2 * updated * (line + states) / topology.hbm_to_ddr_mem_bw
  end
  if kernel ~= "fused_uvm_caching" then return 0, 0 end
  local params = option.cache_params
  local share = params and params.load_factor or USUAL_SHARE
  local missing = params and params.stats and params.stats:expected_miss_rate(share) or 1 - share
  return 2 * missing * c.row * (width + states) / (apart and topology.hbm_to_ddr_mem_bw or topology.ssd_mem_bw), 0
end

--- What one shard of a run is to the rank that has it. Fields: as in `units`; row_byte (bytes of rows that are looked up, in lines), bytes
--- (of the shard), below_forward, below_backward (see `below`), home_bag, home_bag_byte (its part of what comes back to all ranks),
--- near_out, far_out: bytes of rows that leave for the same host and for others; near_back, far_back: of gradients; near_ids, far_ids:
--- bytes of ids and lengths that arrive.
local function count(option, run, topology)
  local t, kind = topology, option.sharding_type
  local W, L = t.world_size, t.local_world_size
  local G, ids, bags = t.intra_group_size, batch_of(option)
  local width = run.cols * data_bytes[option.data_type]
  local c = { table = run.rows * run.cols > 0 and 1 or 0, bytes = run.rows * width, replica_byte = 0, near_out = 0, far_out = 0,
    near_back = 0, far_back = 0, near_ids = 0, far_ids = 0 }
  for _, way in ipairs(ways) do c[way], c["far_" .. way] = 0, 0 end
  c[way_of[kind] or "whole_rows"] = 1
  if kind == "data_parallel" then
    c.id, c.bag, c.replica_byte = ids, option.is_pooled and bags or ids, run.rows * run.cols * NUMBER
    -- gradients only: parts to their sums, and sums back to all
    c.near_back, c.far_back = 2 * c.replica_byte * (L - 1) / W, 2 * c.replica_byte * (W - L) / W
  else
    local share = option.rows > 0 and run.rows / option.rows or 0
    c.id = ids * W * share
    c.bag = option.is_pooled and bags * W or c.id
    local out = c.bag * run.cols * data_bytes[option.output_dtype or "FP32"] / W -- for each rank
    local by_host = option.is_pooled and (kind == "table_row_wise" or kind == "grid_shard") and W > L
    if by_host then -- sums within the host, then one of them for every sample crosses
      c.near_out, c.far_out = out * W * (G - 1) / G, out * (W - L) / G
    else
      c.near_out, c.far_out = out * (L - 1), out * (W - L)
    end
    c.near_back, c.far_back = c.near_out, c.far_out
    c["far_" .. (way_of[kind] or "whole_rows")] = c.far_out
    local sent = (c.id + bags * W) * WIRE / W
    c.near_ids, c.far_ids = sent * (L - 1), sent * (W - L)
  end
  local whole = option.is_pooled and bags or ids
  local part = option.rows * option.dim > 0 and run.rows * run.cols / (option.rows * option.dim) or 0
  c.home_bag = kind == "data_parallel" and 0 or whole * part * (W - 1) -- a rank's own are looked up to where they belong
  c.home_bag_byte = c.home_bag * option.dim * NUMBER
  c.id_byte, c.bag_byte = c.id * width, c.bag * run.cols * NUMBER
  c.row, c.shared_row, c.shared_id = rows_of(option, c.id, run.rows)
  c.odd_id, c.odd_row = common[run.cols] and 0 or c.id, common[run.cols] and 0 or c.row
  local cut = cut_by_rows[kind] and 1 or 0
  c.cut_id, c.cut_bag = cut * c.id, cut * c.bag
  c.row_byte = c.row * math.max(width, LINE)
  local state = states_of(option.optimizer).full * run.cols -- of one for each row, prices of rows know
  local updated = kind == "data_parallel" and rows_of(option, ids * W, run.rows) or c.row -- of a replica, by all ranks' gradients
  c.state_row, c.state_byte = state > 0 and updated or 0, updated * state
  c.below_forward, c.below_backward = below(option, c, topology, width, updated, state + states_of(option.optimizer).row)
  c.state_line_byte, c.state_bytes = updated * (state > 0 and math.max(state, LINE) or 0), run.rows * state
  return c
end

local summed = { "below_forward", "below_backward", "home_bag", "home_bag_byte", "row_byte", "bytes", "state_line_byte", "state_bytes",
  "near_out", "far_out",
  "near_back", "far_back", "near_ids", "far_ids" }
for _, name in ipairs(amounts_of.counted) do summed[#summed + 1] = name end
for _, name in ipairs(ways) do
  summed[#summed + 1], summed[#summed + 2] = name, "far_" .. name
end

local function empty()
  local c = { most_ids = 0 } -- of a shard
  for _, name in ipairs(summed) do c[name] = 0 end
  return c
end

--- Counts of a placement: a list from rank 0 on, each with the fields that `count` tells. What travels in a step is counted here only;
--- schedules are simulated with it, too (pipeline/traffic.lua).
local function by_rank(proposal, placement, topology)
  partitioners.check_placement("plan.step.by_rank", proposal, placement, topology.world_size)
  local ranks = {}
  for r = 1, topology.world_size do ranks[r] = empty() end
  for i, option in ipairs(proposal) do
    local where, k = placement[i], 0
    for _, run in ipairs(option.runs) do
      local c = run.count or count(option, run, topology)
      for _ = 1, run.n do
        local to = ranks[where == true and k + 1 or where[k + 1] + 1]
        for j = 1, #summed do to[summed[j]] = to[summed[j]] + c[summed[j]] end
        to.most_ids = math.max(to.most_ids, c.id)
        k = k + 1
      end
    end
  end
  return ranks
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
    local p = (way == "backward" or not list.back) and price(costs, way, list.unit) or 0
    if p > 0 then
      priced = priced + p * amounts[way][list.unit]
      for r = 1, n do own[r] = own[r] + p * list[r] end
    end
  end
  local most, all = amounts_of.busiest(own, topology), computed_ms(amounts[way], costs, way)
  for r = 1, n do own[r] = most > 0 and own[r] * priced / most or 0 end -- a rank may be the busiest in one unit, and not in another
  return { before = all - priced, own = own }, all
end

--- Milliseconds that a step of these ranks takes longer for what crosses hosts, by direction, beside what is computed: amounts at these
--- prices, or nothing.
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
local function step_ms(ranks, topology)
  local amounts, costs, passes = amounts_of.of(ranks, topology), topology.costs or usual, {}
  local far = far_ms(ranks, topology, amounts, costs)
  for _, way in ipairs { "forward", "backward" } do
    local of = amounts[way]
    passes[way] = computed_ms(of, costs, way) + far[way] * price(costs, way, "far") + of.far_sums * price(costs, way, "far_sums")
      + of.far_mixed * price(costs, way, "far_mixed") + below_ms(ranks, topology, amounts, costs, way)
  end
  return passes.forward + passes.backward, passes.forward, passes.backward
end

--- Units of a step of these ranks (amounts.lua), with far: as if nothing were computed.
local function amounts(ranks, topology)
  local all, far = amounts_of.of(ranks, topology), far_ms(ranks, topology)
  for _, way in ipairs { "forward", "backward" } do all[way].far = far[way] end
  return all
end

--- A plan (ShardingPlan) of a model (plan/describe.lua) as options and their placement, with the shards that its entries say.
function M.of_plan(plan, model, topology, batch_size, constraints)
  local enumerator = enumerators.EmbeddingEnumerator { topology = topology, batch_size = batch_size, constraints = constraints or {},
    estimators = {} }
  local env = { world_size = topology.world_size, local_size = topology.local_world_size }
  local list, placement = {}, {}
  for _, collection in ipairs(model) do
    local tables = plan:get_plan_for_module(collection.path).tables
    for _, config in ipairs(collection.tables) do
      local entry = tables[config.name]
      local constraint = constraints_of.of(constraints or {}, collection.path, config.name)
      local fields, ranks = enumerator:_shared_fields(collection, config, constraint), {}
      fields.id, fields.sharding_type, fields.compute_kernel, fields.runs = #list + 1, entry.sharding_type, entry.compute_kernel, {}
      if entry.sharding_type == "data_parallel" then
        ranks = true
        fields.runs[1] = { n = topology.world_size, rows = config.num_embeddings, cols = config.embedding_dim, row_offset = 0,
          col_offset = 0 }
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

--- What a step of a plan takes: { ms =, forward_ms =, backward_ms =, bytes = (weights and states that stay, on the fullest rank) }.
function M.predict(plan, model, topology, batch_size, constraints)
  local list, placement = M.of_plan(plan, model, topology, batch_size, constraints)
  local p = {}
  p.ms, p.forward_ms, p.backward_ms = step_ms(by_rank(list, placement, topology), topology)
  p.bytes = 0
  for _, option in ipairs(list) do
    for _, run in ipairs(option.runs) do run.kept = M.kept_bytes(option, run, topology) end
  end
  local bytes = partitioners.by_rank(list, placement, topology.world_size, function(run) return run.kept end)
  for _, b in ipairs(bytes) do p.bytes = math.max(p.bytes, b + KEPT * #list) end
  return p
end

-- -- parts of a planner ----------------------------------------------------------------------------------------------------------------

local StepEstimator = util.seal(util.class "StepEstimator")
M.StepEstimator = StepEstimator

--- StepEstimator { topology = }: what one shard adds to its rank. Ratings of whole plans are StepModel's.
function StepEstimator:init(args)
  self.topology = util.named("StepEstimator", args, { topology = util.required.table }).topology
  signature.value("StepEstimator", "topology", self.topology, "Topology")
end

--- Times of one shard of a run.
function StepEstimator:of_run(option, run)
  local t, c = self.topology, count(option, run, self.topology)
  local function compute(way)
    local ms = 0
    for _, unit in ipairs { "table", "id", "id_byte", "row", "shared_row", "odd_row", "bag", "bag_byte", "replica_byte", "state_row",
      "state_byte" } do
      ms = ms + c[unit] * price(t.costs, way, unit)
    end
    ms = ms + c["below_" .. way]
    local cold = amounts_of.cold_share(c.bytes + c.state_bytes, t.cache_bytes / t.local_world_size)
    return ms + c.id * price(t.costs, way, "home_id") + c.home_bag * price(t.costs, way, "home_bag")
      + c.home_bag_byte * price(t.costs, way, "home_bag_byte") + cold * (c.row * price(t.costs, way, "cold_row")
      + c.row_byte * price(t.costs, way, "cold_row_byte") + c.state_line_byte * price(t.costs, way, "cold_state_byte"))
  end
  local function exchange(way, near, far)
    return near / t.intra_host_bw * price(t.costs, way, "near") + far / t.inter_host_bw * price(t.costs, way, "far")
  end
  local p = { fwd_compute = compute "forward", bwd_compute = compute "backward", fwd_comms = exchange("forward", c.near_out, c.far_out),
    bwd_comms = exchange("backward", c.near_back, c.far_back), prefetch_compute = 0,
    input_dist_comms = exchange("forward", c.near_ids, c.far_ids) }
  p.total = p.fwd_compute + p.bwd_compute + p.fwd_comms + p.bwd_comms
  return p, c
end

--- Fill the times and counts of all runs of options.
function StepEstimator:estimate(list)
  for _, option in ipairs(list) do
    for _, run in ipairs(option.runs) do run.perf, run.count = self:of_run(option, run) end
    option:sum_perf()
  end
end

--- Rates a placement by the time of its step.
local StepModel = util.seal(util.class "StepModel")
M.StepModel = StepModel
StepModel.unit = "ms"
function StepModel:init(args)
  self.topology = util.named("StepModel", args, { topology = util.required.table }).topology
  signature.value("StepModel", "topology", self.topology, "Topology")
end
function StepModel:rate(proposal, placement) return (step_ms(by_rank(proposal, placement, self.topology), self.topology)) end

local one_host = topologies.Topology { world_size = 1 }

--- What stays in memory for one shard, the device's and the host's: weights, states, caches. topology: default: that of a processor.
function M.kept_bytes(option, run, topology)
  local device, host = storage.kept(option, run, topology or one_host)
  return device + host
end

M.count, M.by_rank, M.amounts, M.compute, M.far, M.ms = count, by_rank, amounts, computed_ms, far_ms, step_ms
signature.check("plan.step.", M, { count = "option: option_with_ids, run: run, topology: Topology",
  by_rank = "proposal: options_with_ids, placement: table, topology: Topology",
  kept_bytes = "option: option_with_ids, run: run, topology: Topology?" })
signature.kind("ShardingPlan", "a ShardingPlan", types.ShardingPlan.is)
local planned = "plan: ShardingPlan, model: model, topology: Topology, batch_size: count, constraints: constraints?"
signature.check("plan.step.", M, { of_plan = planned, predict = planned })
kinds.methods(StepEstimator, { of_run = "option: option_with_ids, run: run", estimate = "options: options_with_ids" })
kinds.methods(StepModel, { rate = "proposal: options_with_ids, placement: table" })

local fields = { most_ids = "number" }
for _, name in ipairs(summed) do fields[name] = "number" end
signature.object("rank_counts", "counts of a rank (step.by_rank)", fields)
signature.list_of("step_counts", "a list of counts of ranks (step.by_rank)", "rank_counts")
local units, prices = {}, {}
for _, unit in ipairs(M.units) do units[unit], prices[unit] = "number", "number?" end
signature.object("pass_amounts", "amounts of a pass (step.amounts)", units)
signature.object("pass_prices", "prices of a pass", prices)
signature.object("step_prices", "prices of a step (Topology.costs)", { forward = "pass_prices?", backward = "pass_prices?" })
signature.kind("pass", "'forward' or 'backward'", function(x) return x == "forward" or x == "backward" end)
signature.object("step_amounts", "amounts of a step (step.amounts)", { forward = "pass_amounts", backward = "pass_amounts", own = "list" })
signature.check("plan.step.", M, { far = "ranks: step_counts, topology: Topology, amounts: step_amounts?, costs: step_prices?",
  compute = "amounts: pass_amounts, costs: step_prices?, way: pass", amounts = "ranks: step_counts, topology: Topology",
  ms = "ranks: step_counts, topology: Topology" })

return M
