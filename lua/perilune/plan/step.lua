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
local constraints_of = require "perilune.plan.constraints"
local enumerators = require "perilune.plan.enumerators"

local M = {}

local WIRE = 4    -- bytes of a number on the wire, of an id (shards have fewer than 2^31 rows), of a length
local NUMBER = 4  -- bytes of what is pooled
local LINE = 64   -- bytes that come from memory at once
local KEPT = 2048 -- bytes that a rank knows about a table
local COPIES = 3  -- of the rows that a rank returns: as looked up, as they arrive, as they leave for the model; of a replica: weights, its
                  -- gradient, what arrives of it

--- Columns of rows that lookups and updates know when they are compiled (kernels/cpu/tbe_forward.c, tbe_batch.c).
local common = { [32] = true, [64] = true, [128] = true, [256] = true }

local cut_by_rows = { row_wise = true, table_row_wise = true, grid_shard = true }

--- By which exchange rows of a sharding type come home, or gradients of replicas are summed; "whole_rows" unless said otherwise.
local ways = { "whole_rows", "rank_sums", "host_sums", "replica_sums" }
local way_of = { row_wise = "rank_sums", table_row_wise = "host_sums", grid_shard = "host_sums", data_parallel = "replica_sums" }

--- Units that are sums over the shards of a rank, as they are counted.
local counted = { "table", "id", "id_byte", "row", "shared_row", "shared_id", "odd_id", "odd_row", "cut_id", "cut_bag", "bag", "bag_byte",
  "replica_byte", "state_row", "state_byte" }

M.units = topologies.units

--- Milliseconds a unit where a topology says none: forward, backward (with the update). One core of a Zen 4.
local usual = {
  forward = { step = 0.05, home_id = 1.5e-6, id = 2e-6, id_byte = 2e-8, cold_row = 4e-6, cold_row_byte = 4e-8, bag = 5e-6, bag_byte = 1e-7,
    replica_byte = 0, near = 1, far = 1 },
  backward = { step = 0.05, home_id = 0, id = 1e-5, id_byte = 5e-8, cold_row = 1e-5, cold_row_byte = 1e-7, bag = 3e-6, bag_byte = 1.5e-7,
    replica_byte = 5e-7, state_row = 5e-6, state_byte = 5e-8, cold_state_byte = 1e-7, near = 1, far = 1 },
}

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

--- Bytes that an optimizer keeps: for a row, for each of its numbers, for a square of columns, as the library's tables say it; nil: nobody
--- has said which optimizer.
local function states_of(optimizer)
  if not optimizer then return nil end
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

--- What one shard of a run is to the rank that has it. Fields: as in `units`; row_byte (bytes of rows that are looked up, in lines), bytes
--- (of the shard), home_bag, home_bag_byte (its part of what comes back to all ranks), near_out, far_out: bytes of rows that leave for the
--- same host and for others; near_back, far_back: of gradients; near_ids, far_ids: bytes of ids and lengths that arrive.
function M.count(option, run, topology)
  local t, kind = topology, option.sharding_type
  local W, L = t.world_size, t.local_world_size
  local G, ids, bags = t.intra_group_size, batch_of(option)
  local width = run.cols * data_bytes[option.data_type]
  local c = { table = run.rows * run.cols > 0 and 1 or 0, bytes = run.rows * width, replica_byte = 0, near_out = 0, far_out = 0,
    near_back = 0, far_back = 0, near_ids = 0, far_ids = 0 }
  for _, way in ipairs(ways) do c[way] = 0 end
  c[way_of[kind] or "whole_rows"] = 1
  if kind == "data_parallel" then
    c.id, c.bag, c.replica_byte = ids, option.is_pooled and bags or ids, run.rows * run.cols * NUMBER
    -- gradients only: parts to their sums, and sums back to all
    c.near_back, c.far_back = 2 * c.replica_byte * (L - 1) / W, 2 * c.replica_byte * (W - L) / W
  else
    local share = option.rows > 0 and run.rows / option.rows or 0
    c.id = ids * W * share
    c.bag = option.is_pooled and bags * W or c.id
    local out = c.bag * run.cols * WIRE / W -- for each rank
    local by_host = option.is_pooled and (kind == "table_row_wise" or kind == "grid_shard") and W > L
    if by_host then -- sums within the host, then one of them for every sample crosses
      c.near_out, c.far_out = out * W * (G - 1) / G, out * (W - L) / G
    else
      c.near_out, c.far_out = out * (L - 1), out * (W - L)
    end
    c.near_back, c.far_back = c.near_out, c.far_out
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
  local state = (states_of(option.optimizer) or NO_STATES).full * run.cols -- of one for each row, prices of rows know
  local updated = kind == "data_parallel" and rows_of(option, ids * W, run.rows) or c.row -- of a replica, by all ranks' gradients
  c.state_row, c.state_byte = state > 0 and updated or 0, updated * state
  c.state_line_byte, c.state_bytes = updated * (state > 0 and math.max(state, LINE) or 0), run.rows * state
  return c
end

local summed = { "home_bag", "home_bag_byte", "row_byte", "bytes", "state_line_byte", "state_bytes", "near_out", "far_out",
  "near_back", "far_back", "near_ids", "far_ids" }
for _, name in ipairs(counted) do summed[#summed + 1] = name end
for _, name in ipairs(ways) do summed[#summed + 1] = name end

local function empty()
  local c = {}
  for _, name in ipairs(summed) do c[name] = 0 end
  return c
end

--- Counts of a placement: a list from rank 0 on.
function M.by_rank(proposal, placement, topology)
  partitioners.check_placement("plan.step.by_rank", proposal, placement, topology.world_size)
  local ranks = {}
  for r = 1, topology.world_size do ranks[r] = empty() end
  for i, option in ipairs(proposal) do
    local where, k = placement[i], 0
    for _, run in ipairs(option.runs) do
      local c = run.count or M.count(option, run, topology)
      for _ = 1, run.n do
        local to = ranks[where == true and k + 1 or where[k + 1] + 1]
        for j = 1, #summed do to[summed[j]] = to[summed[j]] + c[summed[j]] end
        k = k + 1
      end
    end
  end
  return ranks
end

--- Share of so many bytes, met at random, that no cache has.
local function cold_share(bytes, cache) return bytes > cache and 1 - cache / bytes or 0 end

--- The same of bytes that are gone through from end to end, again and again: what is met next has been away longest. A line survives
--- m bytes' worth of misses with the probability exp(-m bytes / cache), where misses drive out lines at random.
local function cold_share_in_turn(bytes, cache)
  if bytes <= cache then return 0 end
  local m = 1
  for _ = 1, 60 do m = 1 - math.exp(-m * bytes / cache) end
  return m
end

--- share(bytes, cache), where the bytes are the sum of f(rank) over the ranks of a host, whose caches are theirs together: by rank.
local function cold_shares(ranks, topology, share, f)
  local shares, L = {}, topology.local_world_size
  for first = 1, #ranks, L do
    local bytes, last = 0, math.min(first + L - 1, #ranks)
    for r = first, last do bytes = bytes + f(ranks[r]) end
    for r = first, last do shares[ranks[r]] = share(bytes, topology.cache_bytes) end
  end
  return shares
end

--- The largest f(rank); of ranks that share their host's processors: what the processor that has most to do has, where the next rank in
--- order of size goes to the one that has least (three ranks with as much to do take two turns of two processors, not one and a half).
local function busiest(ranks, topology, f)
  local most, L, P = 0, topology.local_world_size * topology.hosts_sharing, topology.processors
  for first = 1, #ranks, L do
    local last = math.min(first + L - 1, #ranks)
    local alike = #ranks < L and math.floor(L / #ranks) or 1 -- hosts of which only one is here
    if (last - first + 1) * alike <= P then
      for r = first, last do most = math.max(most, f(ranks[r])) end
    else
      local list, on = {}, {}
      for r = first, last do
        for _ = 1, alike do list[#list + 1] = f(ranks[r]) end
      end
      table.sort(list, function(x, y) return x > y end)
      for p = 1, P do on[p] = 0 end
      for _, x in ipairs(list) do
        local least = 1
        for p = 2, P do
          if on[p] < on[least] then least = p end
        end
        on[least] = on[least] + x
      end
      for p = 1, P do most = math.max(most, on[p]) end
    end
  end
  return most
end

--- Milliseconds of bytes that leave ranks for others of their host (`field`), and that arrive, evenly, at all: the larger counts.
local function near_ms(ranks, topology, field)
  local most, sum = 0, 0
  for _, c in ipairs(ranks) do most, sum = math.max(most, c[field]), sum + c[field] end
  return math.max(most, sum / #ranks) / topology.intra_host_bw
end

local STEPS = 8 -- until links rest as they did in the step before

--- Milliseconds of the exchanges of a step across hosts, forward and backward, where every host has a link each way, whose limit is its
--- ranks' together: of ids (bytes that arrive), of rows (that leave), of gradients (the other way). An exchange takes as long as the link
--- that has most to do. The others rest meanwhile, as all do while ranks compute (`compute`: milliseconds, { forward =, backward = }), and
--- what a link could have moved then it makes up for, up to a burst.
function M.far(ranks, topology, compute)
  local L = topology.local_world_size
  local hosts, bandwidth, burst = math.ceil(#ranks / L), topology.inter_host_bw * L, topology.inter_host_burst * L
  if hosts == 1 then return { forward = 0, backward = 0 } end
  local exchanges, rests = {}, { compute.forward, 0, compute.backward } -- after each: lookups, nothing, updates
  for i, field in ipairs { "far_ids", "far_out", "far_back" } do
    local to, sum, links = {}, 0, {}
    for h = 1, hosts do
      to[h] = 0
      for r = (h - 1) * L + 1, math.min(h * L, #ranks) do to[h] = to[h] + ranks[r][field] end
      sum = sum + to[h]
    end
    for h = 1, hosts do
      local here, others = to[h], (sum - to[h]) / (hosts - 1)
      links[2 * h - 1], links[2 * h] = here, others -- out and in; of ids in and out, and of gradients
      if field ~= "far_out" then links[2 * h - 1], links[2 * h] = others, here end
    end
    exchanges[i] = links
  end
  local rested, ms = {}, {}
  for link = 1, 2 * hosts do rested[link] = 0 end
  for _ = 1, burst > 0 and STEPS or 1 do
    for i, links in ipairs(exchanges) do
      local most = 0
      for link, bytes in ipairs(links) do most = math.max(most, (bytes - rested[link]) / bandwidth) end
      for link, bytes in ipairs(links) do rested[link] = math.min(burst, rested[link] + most * bandwidth - bytes) end
      for link = 1, 2 * hosts do rested[link] = math.min(burst, rested[link] + rests[i] * bandwidth) end
      ms[i] = most
    end
  end
  return { forward = ms[1] + ms[2], backward = ms[3] }
end

--- M.amounts without what crosses hosts, which depends on what ranks compute.
local function amounts_at_home(ranks, topology)
  local shared = math.max(1, math.min(topology.local_world_size, #ranks) * topology.hosts_sharing / topology.processors)
  local function at_home(field) -- as much on every rank
    local sum = 0
    for _, c in ipairs(ranks) do sum = sum + c[field] end
    return sum / #ranks * shared
  end
  local amounts = { step = 1, home_id = at_home "id", home_bag = at_home "home_bag", home_bag_byte = at_home "home_bag_byte", way = 0 }
  for _, way in ipairs(ways) do amounts.way = amounts.way + (#ranks > 1 and at_home(way) > 0 and 1 or 0) end
  for _, name in ipairs(counted) do
    amounts[name] = busiest(ranks, topology, function(c) return c[name] end)
  end
  local mid = topology.core_cache_bytes
  local function of_core(share, f) -- the same of a processor's own cache: ranks that take turns on it drive out each other's
    return function(c) return share(f(c) * shared, mid) end
  end
  local function of_tables(c) return c.bytes + c.state_bytes + COPIES * c.bag_byte end
  local mid_rows = of_core(cold_share, of_tables)
  local mid_bags = of_core(cold_share_in_turn, function(c) return c.row_byte + COPIES * c.bag_byte end)
  amounts.mid_row_byte = busiest(ranks, topology, function(c) return c.row_byte * mid_rows(c) end)
  amounts.mid_bag_byte = busiest(ranks, topology, function(c) return c.bag_byte * mid_bags(c) end)
  local rows = cold_shares(ranks, topology, cold_share, of_tables)
  local bags = cold_shares(ranks, topology, cold_share_in_turn, function(c) return c.row_byte + COPIES * c.bag_byte end)
  amounts.cold_row = busiest(ranks, topology, function(c) return c.row * rows[c] end)
  amounts.cold_row_byte = busiest(ranks, topology, function(c) return c.row_byte * rows[c] end)
  amounts.cold_state_byte = busiest(ranks, topology, function(c) return c.state_line_byte * rows[c] end)
  amounts.cold_bag_byte = busiest(ranks, topology, function(c) return c.bag_byte * bags[c] end)
  local replicas = cold_shares(ranks, topology, cold_share_in_turn, function(c) return COPIES * c.replica_byte end)
  amounts.cold_replica_byte = busiest(ranks, topology, function(c) return c.replica_byte * replicas[c] end)
  amounts.far = 0
  local back = util.copy(amounts)
  amounts.state_row, amounts.state_byte, amounts.cold_state_byte = 0, 0, 0 -- only updates touch them
  amounts.near = near_ms(ranks, topology, "near_out") + near_ms(ranks, topology, "near_ids")
  back.near = near_ms(ranks, topology, "near_back")
  return { forward = amounts, backward = back }
end

local NOTHING = { forward = 0, backward = 0 }

--- Units of a step of these ranks, by direction: { forward = { step = 1, ... }, backward = ... }. Prices times units are milliseconds.
--- What crosses hosts is counted as if links never rested while ranks compute: see M.far.
function M.amounts(ranks, topology)
  local amounts, far = amounts_at_home(ranks, topology), M.far(ranks, topology, NOTHING)
  amounts.forward.far, amounts.backward.far = far.forward, far.backward
  return amounts
end

--- Milliseconds of a pass with these amounts at these prices, but for what crosses hosts.
function M.compute(amounts, costs, way)
  local compute = 0
  for _, unit in ipairs(M.units) do
    if unit ~= "far" then compute = compute + amounts[unit] * price(costs, way, unit) end
  end
  return compute
end

--- Milliseconds of a step: all, forward, backward.
function M.ms(ranks, topology)
  local amounts, compute, ms = amounts_at_home(ranks, topology), {}, {}
  for way, list in util.ordered(amounts) do compute[way] = M.compute(list, topology.costs, way) end
  local far = M.far(ranks, topology, compute)
  for way in util.ordered(amounts) do ms[way] = compute[way] + far[way] * price(topology.costs, way, "far") end
  return ms.forward + ms.backward, ms.forward, ms.backward
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
      local fields, ranks = enumerator:shared_fields(collection, config, constraint), {}
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
  p.ms, p.forward_ms, p.backward_ms = M.ms(M.by_rank(list, placement, topology), topology)
  p.bytes = 0
  for _, option in ipairs(list) do
    for _, run in ipairs(option.runs) do run.kept = M.kept_bytes(option, run) end
  end
  local bytes = partitioners.by_rank(list, placement, topology.world_size, function(run) return run.kept end)
  for _, b in ipairs(bytes) do p.bytes = math.max(p.bytes, b + KEPT * #list) end
  return p
end

-- -- parts of a planner ----------------------------------------------------------------------------------------------------------------

local StepEstimator = util.class "StepEstimator"
M.StepEstimator = StepEstimator

--- StepEstimator { topology = }: what one shard adds to its rank. Ratings of whole plans are StepModel's.
function StepEstimator:init(args)
  self.topology = util.named("StepEstimator", args, { topology = util.required.table }).topology
  signature.value("StepEstimator", "topology", self.topology, "Topology")
end

--- Times of one shard of a run.
function StepEstimator:of_run(option, run)
  local t, c = self.topology, M.count(option, run, self.topology)
  local function compute(way)
    local ms = 0
    for _, unit in ipairs { "table", "id", "id_byte", "row", "shared_row", "odd_row", "bag", "bag_byte", "replica_byte", "state_row",
      "state_byte" } do
      ms = ms + c[unit] * price(t.costs, way, unit)
    end
    local cold = cold_share(c.bytes + c.state_bytes, t.cache_bytes / t.local_world_size)
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
local StepModel = util.class "StepModel"
M.StepModel = StepModel
StepModel.unit = "ms"
function StepModel:init(args)
  self.topology = util.named("StepModel", args, { topology = util.required.table }).topology
  signature.value("StepModel", "topology", self.topology, "Topology")
end
function StepModel:rate(proposal, placement) return (M.ms(M.by_rank(proposal, placement, self.topology), self.topology)) end

--- What stays in memory for one shard: weights and states.
function M.kept_bytes(option, run)
  local bytes, own = run.rows * run.cols * data_bytes[option.data_type], states_of(option.optimizer) or NO_STATES
  if run.rows * run.cols == 0 then return bytes end
  return bytes + run.rows * own.row + run.rows * run.cols * own.full + run.cols ^ 2 * own.square
end

local StepStorageEstimator = util.class("StepStorageEstimator", storage.EmbeddingStorageEstimator)
M.StepStorageEstimator = StepStorageEstimator

--- Like EmbeddingStorageEstimator, with the states that each shard really has: blocks of columns have row-wise states of their own, and
--- optimizers of fused_params count.
function StepStorageEstimator:of_run(option, run)
  local stateless = setmetatable(util.copy(option), getmetatable(option))
  stateless.optimizer = nil
  local s = storage.EmbeddingStorageEstimator.of_run(self, stateless, run)
  if option.compute_kernel ~= "fused_uvm_caching" then
    local plain = run.rows * run.cols * data_bytes[option.data_type]
    local tier = s.hbm > 0 and option.compute_kernel == "fused" and "hbm" or "ddr"
    s[tier] = s[tier] + math.ceil(M.kept_bytes(option, run) - plain)
  end
  return s
end

signature.check("plan.step.", M, { count = "option: option_with_ids, run: run, topology: Topology",
  by_rank = "proposal: options_with_ids, placement: table, topology: Topology", kept_bytes = "option: option_with_ids, run: run" })
signature.kind("ShardingPlan", "a ShardingPlan", types.ShardingPlan.is)
local planned = "plan: ShardingPlan, model: model, topology: Topology, batch_size: count, constraints: constraints?"
signature.check("plan.step.", M, { of_plan = planned, predict = planned })
kinds.methods(StepEstimator, { of_run = "option: option_with_ids, run: run", estimate = "options: options_with_ids" })
kinds.methods(StepModel, { rate = "proposal: options_with_ids, placement: table" })

local fields = {}
for _, name in ipairs(summed) do fields[name] = "number" end
signature.object("rank_counts", "counts of a rank (step.by_rank)", fields)
signature.list_of("step_counts", "a list of counts of ranks (step.by_rank)", "rank_counts")
local units, prices = {}, {}
for _, unit in ipairs(M.units) do units[unit], prices[unit] = "number", "number?" end
signature.object("pass_amounts", "amounts of a pass (step.amounts)", units)
signature.object("pass_prices", "prices of a pass", prices)
signature.object("step_prices", "prices of a step (Topology.costs)", { forward = "pass_prices?", backward = "pass_prices?" })
signature.kind("pass", "'forward' or 'backward'", function(x) return x == "forward" or x == "backward" end)
signature.object("pass_times", "milliseconds of passes", { forward = "number", backward = "number" })
signature.check("plan.step.", M, { far = "ranks: step_counts, topology: Topology, compute: pass_times",
  compute = "amounts: pass_amounts, costs: step_prices?, way: pass", amounts = "ranks: step_counts, topology: Topology",
  ms = "ranks: step_counts, topology: Topology" })

return M
