-- plan/planner.lua: the best plan that proposers and a partitioner find (TorchRec's EmbeddingShardingPlanner). A
-- function of what it is given: the same plan on every rank and in every run.
local P = require "perilune.ffi"
local util = require "perilune.util"
local types = require "perilune.plan.types"
local topologies = require "perilune.plan.topology"
local enumerators = require "perilune.plan.enumerators"
local reservations = require "perilune.plan.reservations"
local partitioners = require "perilune.plan.partitioners"
local proposers = require "perilune.plan.proposers"
local step = require "perilune.plan.step"
local storage = require "perilune.plan.storage"
local json = require "perilune.plan.json"
local relations = require "perilune.plan.relations"
local objectives = require "perilune.plan.objectives"
local kinds = require "perilune.plan.kinds"
local describe = require "perilune.plan.describe"
local constraints_of = require "perilune.plan.constraints"
local parts = require "perilune.plan.parts"
local places = require "perilune.plan.places"
local settle = require "perilune.plan.settle"
local sharding_types = require "perilune.plan.sharding_types"
local signature = require "perilune.signature"
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

--- What a plan says of a cache: all but what planners are told about its ids.
local function without_statistics(params)
  local copy = setmetatable(util.copy(params), getmetatable(params))
  copy.stats = false
  return copy
end

--- The entry of a plan for an option whose shards are on `ranks` (true: shard k on rank k).
function M.entry(option, ranks, topology)
  partitioners.check_placement("plan.planner.entry", { option }, { ranks }, topology.world_size)
  local kind = option.sharding_type
  local entry = { sharding_type = kind, compute_kernel = option.compute_kernel,
    cache_params = option.compute_kernel == "fused_uvm_caching" and option.cache_params
      and without_statistics(option.cache_params) or nil }
  local t = sharding_types.of[kind]
  if t.partition_by == "uniform" then
    if t.cuts_rows then entry.ranks, entry.sizes = uneven_rows(option, topology) end
  elseif t.cuts_columns and not t.cuts_rows then entry.ranks, entry.sizes = columns_of(option, ranks)
  else entry.ranks = ranks end
  return types.ParameterSharding(entry)
end

local EmbeddingShardingPlanner = util.seal(util.class "EmbeddingShardingPlanner")
M.EmbeddingShardingPlanner = EmbeddingShardingPlanner

local arguments = {
  topology = util.required.table,
  batch_size = util.whole(512, 1),     -- samples of a rank
  constraints = util.optional.table,   -- table name, or path.name -> ParameterConstraints
  enumerator = util.optional.table,    -- default: EmbeddingEnumerator
  sharder = util.optional.table,       -- of the default enumerator: torchrec_sharder (default) or perilune_sharder
  storage_reservation = util.optional.table, -- default: HeuristicalStorageReservation
  proposers = util.optional.list,      -- default: grid search, greedy by the slowest shard and by all, uniform; of our
                                       -- own estimates, changes of the best of these
  partitioner = util.optional.table,   -- default: GreedyPerfPartitioner; of our own estimates the better of it by
                                       -- storage and by perf
  performance_model = util.optional.table, -- default: NoopPerfModel
  estimates = "torchrec",              -- "step": our own (plan/step.lua) in place of TorchRec's formulas, unless parts
                                       -- are given
  relations = util.optional.list,      -- of tables and ranks: plan.colocate, spread, at_most, at_most_bytes, forbid,
                                       -- pin
  cost = util.optional,                -- function(perf, option, shard, topology): see EmbeddingEnumerator
  objective = util.optional,           -- function(load): what a plan is rated by, the less the better (objectives.lua)
  max_placements = util.whole(2e7, 1), -- shards that the search places, and ranks that it goes through for that, before
                                       -- it keeps the best plan so far: a limit that every machine reaches at the same
                                       -- proposal, unlike a time
}

local kind_of = { topology = "Topology", constraints = "constraints", enumerator = "enumerator", sharder = "sharder",
  storage_reservation = "reservation", proposers = "proposers", partitioner = "partitioner",
  performance_model = "performance_model" }

function EmbeddingShardingPlanner:init(args)
  local f = "EmbeddingShardingPlanner"
  local a = util.named(f, args, arguments)
  if a.enumerator then parts.agree(f, args, a) end
  for name, value in util.ordered(a) do self[name] = value end
  -- of the last search; of explain/reasons.lua
  self.args, self.last, self.may_search, self.first_will_do = a, false, 0, false
  self.constraints = a.constraints or {}
  self.relations = util.whole_list(f, "relations", a.relations or {}, "relations")
  if proposers.RefiningProposer.is(self.proposers and self.proposers[1]) then
    P.fail(f .. ": proposers[1] is a RefiningProposer, which changes the best proposal of those before it; put it "
      .. "behind others")
  end
  if a.enumerator and a.cost ~= nil then P.fail(f .. ": cost and enumerator; give cost to the enumerator") end
  if a.performance_model and a.objective ~= nil then
    P.fail(f .. ": objective and performance_model; give one of them")
  end
  for name, kind in util.ordered(kind_of) do
    if a[name] ~= nil then signature.value(f, name, a[name], kind) end
  end
  local own = util.one_of(f, "estimates", a.estimates, { "torchrec", "step" }) == "step"
  local estimators = own and { step.StepEstimator { topology = a.topology },
    storage.EmbeddingStorageEstimator { topology = a.topology } } or nil
  self.enumerator = a.enumerator or enumerators.EmbeddingEnumerator { topology = a.topology, batch_size = a.batch_size,
    constraints = self.constraints, sharder = a.sharder, cost = a.cost, estimators = estimators }
  self.storage_reservation = a.storage_reservation or reservations.HeuristicalStorageReservation()
  self.proposers = a.proposers or { proposers.GridSearchProposer(), proposers.GreedyProposer(),
    proposers.GreedyProposer { use_depth = false }, proposers.UniformProposer(), own and proposers.RefiningProposer()
      or nil }
  if not (own or a.proposers or a.partitioner or a.performance_model or a.objective ~= nil or self.relations[1])
    and self.enumerator.sharder ~= enumerators.torchrec_sharder then -- settle.lua finds what greedy ones do, and sooner
    self.proposers, self.if_none = { self.proposers[1], self.proposers[4] }, { self.proposers[2], self.proposers[3] }
  end
  self.partitioner = a.partitioner or partitioners.GreedyPerfPartitioner()
  self.other_partitioner = own and not a.partitioner and partitioners.GreedyPerfPartitioner { sort_by = "perf" } or nil
  self.performance_model = a.performance_model or a.objective ~= nil and objectives.Objective(a.objective, a.topology)
    or own and step.StepModel { topology = a.topology } or partitioners.NoopPerfModel { topology = a.topology }
end

--- A name of a proposal: its options, whatever their order. numbers: of each table among the tables.
local function key_of(proposal, numbers)
  local keys = {}
  for _, option in ipairs(proposal) do keys[numbers[option.fqn]] = option.key or option.id end
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

--- The rating of a placed proposal, whose options may stand for several tables.
function EmbeddingShardingPlanner:_rate(search, proposal, placement)
  if search.topology.rules then proposal, placement = relations.taken_apart(proposal, placement) end
  return parts.rating(self.performance_model, proposal, placement)
end

--- Where the partitioner puts a proposal, and its rating; or nil and why not. Of two partitioners' the better.
function EmbeddingShardingPlanner:_place(search, proposal)
  local placement, why = parts.placement(self.partitioner, proposal, search.topology)
  local rating = placement and self:_rate(search, proposal, placement)
  if self.other_partitioner then
    local other = parts.placement(self.other_partitioner, proposal, search.topology)
    local others = other and self:_rate(search, proposal, other)
    if other and not (rating and rating <= others) then placement, rating = other, others end
  end
  return placement, rating or why
end

--- Where another option for the best plan's unit i goes if all others stay, and what that is rated; nil: it has no room
--- there, or relations are about it.
function EmbeddingShardingPlanner:_instead(search, i, option)
  local best = search.best
  if search.topology.rules or not search.weighed then return nil end
  local placement = settle.instead(best.units, best.unit_placement, i, option, search.topology)
  if not placement then return nil end
  local proposal = util.copy(best.units)
  proposal[i] = option
  return placement, self:_rate(search, proposal, placement)
end

--- Sharding types in a proposal.
local function types_of(proposal)
  local seen, n = {}, 0
  for _, option in ipairs(proposal) do
    if not seen[option.sharding_type] then seen[option.sharding_type], n = true, n + 1 end
  end
  return n
end

local SIMPLER = 0.01

--- The number by which plans are compared: the plan with the least one is chosen. It is the plan's rating. To a rating
--- by our own estimates each sharding type beside the first adds 1 %, so that of plans that are rated about alike the
--- one with fewer types is chosen; estimates are off by more than that.
function EmbeddingShardingPlanner:score(rating, proposal)
  if not step.StepModel.is(self.performance_model) then return rating end
  return rating * (1 + SIMPLER * math.max(0, types_of(proposal) - 1))
end

-- shards that are placed while a rank, or a table, is looked at once more: by TorchRec's formulas; by our own
-- estimates, for which two partitioners place a proposal, and its step is counted twice
local RATED, RATED_STEP = 20, 60

--- The work of rating a proposal.
local function rating_work(self, search, proposal)
  return (self.other_partitioner and RATED_STEP or RATED) * (search.topology.world_size + #proposal)
end

--- Try one proposal. Returns what became of it: { placement =, rating = } or { why = }.
local function try(self, search, proposal)
  search.num_proposals = search.num_proposals + 1
  local outcome = { proposal = proposal, why = too_large(proposal, search.room) }
  if outcome.why then
    search.placements = search.placements + #proposal -- the work of a proposal that is not placed
    return outcome
  end
  local ranks = search.topology.world_size -- are gone through for each table that is placed by hosts, and to rate all
  for _, option in ipairs(proposal) do
    local by_hosts = option.partition_by ~= "uniform" and option.partition_by ~= "device"
    search.placements = search.placements + option.num_shards + (by_hosts and ranks or 0)
  end
  search.placements = search.placements + rating_work(self, search, proposal)
  local placement, rating = self:_place(search, proposal)
  if not placement then
    outcome.why = rating
    return outcome
  end
  search.num_plans = search.num_plans + 1
  outcome.placement, outcome.rating = placement, rating
  outcome.score = self:score(outcome.rating, proposal)
  if not search.best or outcome.score < search.best.score then search.best = outcome end
  if self.other_partitioner and proposal[1].partition_by == "device" and types_of(proposal) == 1 then
    local kind = proposal[1].sharding_type
    local before = search.alike[kind]
    if not before or outcome.score < before.score then search.alike[kind] = outcome end
  end
  return outcome
end

--- Move shards of the best plan, and of the best of whole tables and of blocks of columns alone, between ranks while
--- that makes them better: of our own estimates.
local function improve(self, search)
  if not self.other_partitioner or search.topology.rules then return end
  local found = { search.best }
  for _, outcome in util.ordered(search.alike) do
    if outcome ~= search.best then found[#found + 1] = outcome end
  end
  for i, outcome in ipairs(found) do
    local work = RATED * (search.topology.world_size + #outcome.proposal)
    local most = math.max(0, self.max_placements - search.placements) / (#found - i + 1) / work
    local rated
    outcome.placement, outcome.rating, rated = places.improve(outcome.proposal, outcome.placement, outcome.rating,
      function(placement)
      return parts.rating(self.performance_model, outcome.proposal, placement)
    end, search.topology, most)
    search.placements = search.placements + rated * work
    outcome.score = self:score(outcome.rating, outcome.proposal)
    if outcome.score < search.best.score then search.best = outcome end
  end
end

local WEIGHED = 0.5 -- of the limit

--- Whether options and places are weighed together: where the user has given no parts, and nothing that weighing knows
--- nothing of. TorchRec's planner does not: where its own way finds all that it can, or memory is no matter, plans are
--- TorchRec's.
local function weighs(self, search)
  local a = self.args
  local own = a.proposers or a.partitioner or a.performance_model or a.objective ~= nil
  if search.weighed or own or search.topology.rules then return false end
  if self.enumerator.sharder ~= enumerators.torchrec_sharder or self.other_partitioner then return true end
  return self.proposers[1].none ~= nil and search.num_plans < search.num_proposals
end

--- Look for options and places together (settle.lua), by what shards take one by one.
local function weigh(self, search)
  if not weighs(self, search) then return end
  search.weighed = true
  local additive = not self.other_partitioner and search.best or nil
  local found, work = settle.search(search.units, search.topology, WEIGHED * self.max_placements, additive)
  search.placements, search.num_proposals = search.placements + work, search.num_proposals + 1
  if not found then return end
  local rating = self:_rate(search, found.proposal, found.placement)
  local outcome = { proposal = found.proposal, placement = found.placement, rating = rating }
  search.least = found.least
  outcome.score, search.num_plans = self:score(rating, found.proposal), search.num_plans + 1
  if not search.best or outcome.score < search.best.score then search.best = outcome end
end

--- Whether a proposal that did not fit takes less memory than another one.
local function nearer(self, a, b)
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

--- Run a proposer, the i-th, to its end, or to its part of what is left of the limit: those behind it may find what is
--- better by far. One behind all of them has no limit.
local function exhaust(self, search, proposer, i)
  local sharing = #self.proposers - i + (self.other_partitioner and 2 or 1) -- with `improve`
  local left = math.max(0, self.max_placements - search.placements)
  local limit = i > #self.proposers and math.huge or search.placements + left / sharing
  if proposer.begin and search.best then proposer:begin(search.best.proposal, search.best.score) end
  local proposal = parts.proposal(proposer, i, search)
  while proposal do
    if search.placements >= limit then
      search.stopped = true
      return
    end
    if search.best and self.first_will_do then return end
    local key = key_of(proposal, search.places)
    local outcome = search.known[key]
    if not outcome then
      outcome = try(self, search, proposal)
      -- what a proposer wants to know of a proposal that comes again
      search.known[key] = { score = outcome.score, fits = outcome.placement ~= nil }
      if outcome.why and (not search.failure or nearer(self, outcome, search.failure)) then search.failure = outcome end
      outcome = search.known[key]
    else
      search.placements = search.placements + #proposal -- a proposer that proposes the same for ever ends too
    end
    proposer:feedback(outcome.fits, proposal, outcome.score, search.topology)
    proposal = parts.proposal(proposer, i, search)
  end
end

--- A model in an order that does not depend on the one in which its collections and tables are given: ties go by it.
local function in_order(model)
  local function by(list, name)
    local sorted, keys = {}, {}
    for i, x in ipairs(list) do -- t2 before t10, as people count
      sorted[i], keys[x] = x, x[name]:gsub("%d+", function(digits) return ("0"):rep(20 - #digits) .. digits end)
    end
    table.sort(sorted, function(a, b)
      if keys[a] ~= keys[b] then return keys[a] < keys[b] end
      return a[name] < b[name]
    end)
    return sorted
  end
  local out = util.copy(model)
  for i, collection in ipairs(by(model, "path")) do
    local copy = util.copy(collection)
    copy.tables = by(collection.tables, "name")
    out[i] = copy
  end
  return out
end

--- Look for the best plan of a model (see enumerators.lua). Returns { best = { proposal =, placement =, rating =, units
--- = and unit_placement = the same with co-located tables as one option } or nil, space = all options, units = those
--- that proposals are made of, left_out = tables for other devices (constraints.lua), least = a rating that no plan is
--- better than, if options were weighed, refused = those that relations leave out, topology = what was left of it,
--- num_proposals =, num_plans =, stopped = at the limit, failure = the smallest that did not fit }.
function EmbeddingShardingPlanner:search(model)
  self.topology:_check()
  self.last = false
  model = in_order(describe._model("EmbeddingShardingPlanner:search", model))
  constraints_of.check("EmbeddingShardingPlanner", self.constraints, model)
  local reserved = parts.reserved(self.storage_reservation:reserve(self.topology, model, self.batch_size,
    self.constraints))
  local search = { num_proposals = 0, num_plans = 0, placements = 0, known = {}, alike = {}, topology = reserved,
    stopped = false, room = { hbm = 0, ddr = 0, ssd = 0 }, space = parts.space(self.enumerator:enumerate(model)) }
  for _, device in ipairs(reserved.devices) do
    for _, tier in ipairs(topologies.tiers) do search.room[tier] = search.room[tier] + device[tier] end
  end
  reserved.rules, search.units, search.refused = relations.apply(self.relations, search.space, reserved)
  search.places, search.num_tables = {}, 0 -- by fqn, of each table among the tables
  for _, option in ipairs(search.units) do
    if not search.places[option.fqn] then
      search.num_tables = search.num_tables + 1
      search.places[option.fqn] = search.num_tables
    end
  end
  for _, proposer in ipairs(self.proposers) do
    proposer:load(search.units, self.enumerator)
    if proposer.within then proposer:within(search.topology) end
  end
  for i, proposer in ipairs(self.proposers) do
    if proposer.begin then weigh(self, search) end
    exhaust(self, search, proposer, i)
  end
  weigh(self, search)
  for _, proposer in ipairs(not search.best and self.if_none or {}) do
    proposer:load(search.units, self.enumerator)
    exhaust(self, search, proposer, #self.proposers)
  end
  if not search.best and not self.args.proposers then
    local least = proposers.LeastMemoryProposer()
    least:load(search.units, self.enumerator)
    exhaust(self, search, least, #self.proposers + 1)
  end
  improve(self, search)
  search.known, search.alike = nil, nil
  search.left_out = constraints_of.left_out(self.constraints, model, self.topology.compute_device)
  local best = search.best
  if best then
    best.units, best.unit_placement = best.proposal, best.placement
    best.proposal, best.placement = relations.taken_apart(best.units, best.unit_placement)
  end
  self.last = search
  return search
end

--- The words for a search that tried nothing: what proposers say of themselves (`none`).
local function why_nothing_tried(self)
  local words = {}
  for i, proposer in ipairs(self.proposers) do
    words[i] = ("%s%s"):format(proposer.class_name or "a proposer", proposer.none and ": " .. proposer.none or "")
  end
  return ("EmbeddingShardingPlanner: no proposals (%s)"):format(#words > 0 and table.concat(words, "; ")
    or "there are no proposers")
end

--- Why a plan is what it is stands above the planner: explain/reasons.lua.
local function reasons() return util.above "perilune.explain.reasons" end

--- The words for a model of which no proposal fits, and what would.
local function why_nothing_fits(self, search, model)
  if not search.failure then return why_nothing_tried(self) end
  local t, tier = search.topology, self.topology:own_tier()
  local words = ("EmbeddingShardingPlanner: none of %d proposals fits %d ranks of %s (%s)%s: in the smallest, "
    .. "%s"):format(
    search.num_proposals, t.world_size, reasons()._gib(t.devices[1][tier]), tier, search.stopped
    and ", where the search stopped" or "", reasons()._failure(search.failure.why, t))
  if t.rules and t.rules.contradiction then words = words .. "; " .. t.rules.contradiction end
  local change = reasons()._would_fit(self, model)
  return change and words .. "; " .. change or words
end

--- The ShardingPlan of a model: a list of collections (enumerators.lua). An error if nothing fits. Local; the search is
--- kept in `last`.
function EmbeddingShardingPlanner:plan(model)
  model = describe._model("EmbeddingShardingPlanner:plan", model)
  local ok, search = pcall(self.search, self, model)
  if not ok then
    local err, own = search, self.storage_reservation.class_name
    local no_room = getmetatable(err) == P.Error and own and err.message:find(own, 1, true) == 1
    local change = no_room and reasons()._would_fit(self, model)
    if change then err.message = err.message .. "; " .. change end
    error(err, 0)
  end
  if #search.space == 0 then return types.ShardingPlan {} end
  if not search.best then P.fail(why_nothing_fits(self, search, model)) end
  local entries = {}
  for i, option in ipairs(search.best.proposal) do
    entries[option.path] = entries[option.path] or {}
    entries[option.path][option.name] = M.entry(option, search.best.placement[i], self.topology)
  end
  return types.ShardingPlan(entries)
end

--- The same plan on every rank of a group (nil: a single process): rank 0 of the group makes it, as data, and all must
--- have asked for the same tables and machines. Collective; waits. What rank 0 raises is raised on all.
function EmbeddingShardingPlanner:collective_plan(model, group)
  model = describe._model("EmbeddingShardingPlanner:collective_plan", model)
  if group == nil then return self:plan(model) end
  local facts = { { "the topology", tostring(self.topology) }, { "the batch size", self.batch_size } }
  for _, collection in ipairs(model) do
    for _, config in ipairs(collection.tables) do
      facts[#facts + 1] = { ("table '%s' of '%s'"):format(config.name, collection.path),
        ("%d x %d"):format(config.num_embeddings, config.embedding_dim) }
    end
  end
  collective_utils.agree(group, "EmbeddingShardingPlanner", facts)
  local text = collective_utils.invoke_on_rank_and_broadcast_result(group, 0, function()
    return json.to_json(self:plan(model))
  end)
  return json.from_json(text)
end

signature.object("search", "a search", { topology = "Topology" })
kinds.methods(EmbeddingShardingPlanner,
  { search = "model: any", _rate = "search: search, proposal: proposal, placement: table",
    _place = "search: search, proposal: proposal", _instead = "search: search, i: count, option: ShardingOption",
  score = "rating: number, proposal: proposal", plan = "model: any",
  collective_plan = "model: any, group: Group?" })
signature.check("plan.planner.", M, { entry = "option: ShardingOption, ranks: any, topology: Topology" })

return M
