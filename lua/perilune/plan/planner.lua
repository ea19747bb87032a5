-- plan/planner.lua: the best plan that proposers and a partitioner find (TorchRec's EmbeddingShardingPlanner). A function of what it is
-- given: the same plan on every rank and in every run.
local P = require "perilune.ffi"
local util = require "perilune.util"
local types = require "perilune.plan.types"
local topologies = require "perilune.plan.topology"
local enumerators = require "perilune.plan.enumerators"
local reservations = require "perilune.plan.reservations"
local partitioners = require "perilune.plan.partitioners"
local proposers = require "perilune.plan.proposers"
local json = require "perilune.plan.json"
local reasons = require "perilune.plan.reasons"
local collective_utils = require "perilune.dist.collective_utils"

local M = {}

--- Ranks of a column's or block's shards and their columns.
local function columns_of(option, ranks)
  local sizes = {}
  for _, run in ipairs(option.runs) do
    for _ = 1, run.n do sizes[#sizes + 1] = run.cols end
  end
  return ranks, sizes
end

--- Rows of each shard, where these are not even blocks.
local function uneven_rows(option, topology)
  local custom = topology.custom_topology_data
  if not (custom and custom[topology:own_tier() .. "_cap"]) then return nil end
  local ranks, sizes = {}, {}
  for k, shard in ipairs(option:shards()) do ranks[k], sizes[k] = k - 1, shard.rows end
  return ranks, sizes
end

--- The entry of a plan for an option whose shards are on `ranks` (true: shard k on rank k).
function M.entry(option, ranks, topology)
  local kind = option.sharding_type
  local entry = { sharding_type = kind, compute_kernel = option.compute_kernel,
    cache_params = option.compute_kernel == "fused_uvm_caching" and option.cache_params or nil }
  if kind == "table_wise" then entry.ranks = ranks
  elseif kind == "column_wise" or kind == "table_column_wise" then entry.ranks, entry.sizes = columns_of(option, ranks)
  elseif kind == "row_wise" then entry.ranks, entry.sizes = uneven_rows(option, topology)
  elseif kind ~= "data_parallel" then entry.ranks = ranks end
  return types.ParameterSharding(entry)
end

local EmbeddingShardingPlanner = util.class "EmbeddingShardingPlanner"
M.EmbeddingShardingPlanner = EmbeddingShardingPlanner

local arguments = {
  topology = util.required.table,
  batch_size = 512,                    -- samples of a rank
  constraints = util.optional.table,   -- table name, or path.name -> ParameterConstraints
  enumerator = util.optional.table,    -- default: EmbeddingEnumerator
  sharder = util.optional.table,       -- of the default enumerator: torchrec_sharder (default) or perilune_sharder
  storage_reservation = util.optional.table, -- default: HeuristicalStorageReservation
  proposers = util.optional.list,      -- default: grid search, greedy by the slowest shard and by all, uniform
  partitioner = util.optional.table,   -- default: GreedyPerfPartitioner
  performance_model = util.optional.table, -- default: NoopPerfModel
  max_placements = 2e7,                -- shards that the search places before it keeps the best plan so far: a limit that every machine
                                       -- reaches at the same proposal, unlike a time
}

function EmbeddingShardingPlanner:init(args)
  local f = "EmbeddingShardingPlanner"
  local a = util.named(f, args, arguments)
  for name, value in util.ordered(a) do self[name] = value end
  self.args = a
  if not topologies.Topology.is(a.topology) then P.fail(("%s: topology is a %s, wanted a Topology"):format(f, type(a.topology))) end
  util.integer(f, "batch_size", a.batch_size, 1)
  util.integer(f, "max_placements", a.max_placements, 1)
  self.constraints = a.constraints or {}
  self.enumerator = a.enumerator or enumerators.EmbeddingEnumerator { topology = a.topology, batch_size = a.batch_size,
    constraints = self.constraints, sharder = a.sharder }
  self.storage_reservation = a.storage_reservation or reservations.HeuristicalStorageReservation()
  self.proposers = a.proposers or { proposers.GridSearchProposer(), proposers.GreedyProposer(),
    proposers.GreedyProposer { use_depth = false }, proposers.UniformProposer() }
  self.partitioner = a.partitioner or partitioners.GreedyPerfPartitioner()
  self.performance_model = a.performance_model or partitioners.NoopPerfModel { topology = a.topology }
end

--- A name of a proposal: its options, whatever their order.
local function key_of(proposal)
  local keys = {}
  for i, option in ipairs(proposal) do keys[i] = tostring(option.key or option.id) end
  table.sort(keys)
  return table.concat(keys, " ")
end

--- nil, or why no placement can be found: all shards together take more than all ranks have.
local function too_large(proposal, room)
  for _, tier in ipairs(topologies.tiers) do
    local bytes = 0
    for _, option in ipairs(proposal) do bytes = bytes + option.total_storage[tier] end
    if bytes > room[tier] then return { tier = tier, bytes = bytes, room = room[tier] } end
  end
end

--- Try one proposal. Returns what became of it: { placement =, rating = } or { why = }.
function EmbeddingShardingPlanner:try(search, proposal)
  search.num_proposals = search.num_proposals + 1
  local outcome = { proposal = proposal, why = too_large(proposal, search.room) }
  if outcome.why then return outcome end
  for _, option in ipairs(proposal) do search.placements = search.placements + option.num_shards end
  outcome.placement, outcome.why = self.partitioner:partition(proposal, search.topology)
  if not outcome.placement then return outcome end
  search.num_plans = search.num_plans + 1
  outcome.rating = self.performance_model:rate(proposal, outcome.placement)
  if not search.best or outcome.rating < search.best.rating then search.best = outcome end
  return outcome
end

--- Run one proposer to its end, or to the limit.
function EmbeddingShardingPlanner:exhaust(search, proposer)
  local proposal = proposer:propose()
  while proposal do
    if search.placements >= self.max_placements then
      search.stopped = true
      return
    end
    local key = key_of(proposal)
    local outcome = search.known[key]
    if not outcome then
      outcome = self:try(search, proposal)
      -- what a proposer wants to know of a proposal that comes again
      search.known[key] = { rating = outcome.rating, fits = outcome.placement ~= nil }
      if outcome.why and (not search.failure or self:nearer(outcome, search.failure)) then search.failure = outcome end
      outcome = search.known[key]
    end
    proposer:feedback(outcome.fits, proposal, outcome.rating, search.topology)
    proposal = proposer:propose()
  end
end

--- Whether a proposal that did not fit takes less memory than another one.
function EmbeddingShardingPlanner:nearer(a, b)
  local tier = self.topology:own_tier()
  local function bytes(outcome)
    local sum = 0
    for _, option in ipairs(outcome.proposal) do sum = sum + option.total_storage[tier] end
    return sum
  end
  b.bytes = b.bytes or bytes(b)
  a.bytes = bytes(a)
  return a.bytes < b.bytes
end

--- Look for the best plan of a model (see enumerators.lua). Returns { best = { proposal =, placement =, rating = } or nil, space =,
--- topology = what was left of it, num_proposals =, num_plans =, stopped = at the limit, failure = the smallest that did not fit }.
function EmbeddingShardingPlanner:search(model)
  local reserved = self.storage_reservation:reserve(self.topology, model, self.batch_size, self.constraints)
  local search = { num_proposals = 0, num_plans = 0, placements = 0, known = {}, topology = reserved, stopped = false,
    room = { hbm = 0, ddr = 0, ssd = 0 }, space = self.enumerator:enumerate(model) }
  for _, device in ipairs(reserved.devices) do
    for _, tier in ipairs(topologies.tiers) do search.room[tier] = search.room[tier] + device[tier] end
  end
  for _, proposer in ipairs(self.proposers) do proposer:load(search.space, self.enumerator) end
  for _, proposer in ipairs(self.proposers) do self:exhaust(search, proposer) end
  search.known = nil
  self.last = search
  return search
end

--- The ShardingPlan of a model: a list of collections (enumerators.lua). An error if nothing fits. Local; the search is kept in `last`.
function EmbeddingShardingPlanner:plan(model)
  local search = self:search(model)
  if #search.space == 0 then return types.ShardingPlan {} end
  if not search.best then P.fail(self:why_nothing_fits(search, model)) end
  local entries = {}
  for i, option in ipairs(search.best.proposal) do
    entries[option.path] = entries[option.path] or {}
    entries[option.path][option.name] = M.entry(option, search.best.placement[i], self.topology)
  end
  return types.ShardingPlan(entries)
end

--- The same plan on every rank of a group (nil: a single process): rank 0 of the group makes it, as data, and all must have asked for the
--- same tables and machines. Collective; waits. What rank 0 raises is raised on all.
function EmbeddingShardingPlanner:collective_plan(model, group)
  if group == nil then return self:plan(model) end
  local facts = { { "the topology", tostring(self.topology) }, { "the batch size", self.batch_size } }
  for _, collection in ipairs(model) do
    for _, config in ipairs(collection.tables) do
      facts[#facts + 1] = { ("table '%s' of '%s'"):format(config.name, collection.path),
        ("%d x %d"):format(config.num_embeddings, config.embedding_dim) }
    end
  end
  collective_utils.agree(group, "EmbeddingShardingPlanner", facts)
  local text = collective_utils.invoke_on_rank_and_broadcast_result(group, 0, function() return json.to_json(self:plan(model)) end)
  return json.from_json(text)
end

--- The words for a model of which no proposal fits, and what would.
function EmbeddingShardingPlanner:why_nothing_fits(search, model)
  local t, tier = search.topology, self.topology:own_tier()
  local words = ("EmbeddingShardingPlanner: none of %d proposals fits %d ranks of %s (%s)%s: in the smallest, %s"):format(
    search.num_proposals, t.world_size, reasons.gib(t.devices[1][tier]), tier, search.stopped and ", where the search stopped" or "",
    reasons.failure(search.failure.why, t))
  local change = reasons.would_fit(self, model)
  return change and words .. "; " .. change or words
end

return M
