-- plan/partitioners.lua: which rank gets which shard of a proposal, one option for each table (TorchRec's
-- partitioners).
--
-- partition(proposal, topology) returns the ranks of each option's shards, a list beside the proposal (true: shard k on
-- rank k), or nil and why not: { option =, run = (the shard that found no place), rank = (of those it was tried on, the
-- one that misses least), tier =, left = (bytes of that memory that this rank has left) or relation = (what keeps the
-- shard from it), tried = (how many ranks) }; or { option =, count = ranks that want a shard each }.
local P = require "perilune.ffi"
local util = require "perilune.util"
local loads = require "perilune.plan.load"
local kinds = require "perilune.plan.kinds"
local sharding_types = require "perilune.plan.sharding_types"
local signature = require "perilune.signature"

local M = {}

local tiers = { "hbm", "ddr", "ssd" }

--- Why a shard of an option's run is on none of `ranks` (nil: all).
local function refused(load, option, run, ranks)
  local why, least = { option = option, run = run, tried = ranks and #ranks or load.n }, math.huge
  for i = 1, why.tried do
    local r = ranks and ranks[i] or i - 1
    local missing, tier = 0, nil
    for _, name in ipairs(tiers) do
      local short = run.storage[name] - load[name][r]
      if short > missing then missing, tier = short, name end
    end
    if missing < least then
      least, why.rank, why.tier, why.left = missing, r, tier, tier and load[tier][r]
      why.relation = not tier and load.rules and load.rules:refuses(option, r, run) or nil
    end
  end
  return why
end

--- Shard k on ranks[k], or on rank k - 1. Returns true, or nil and why not; then some are placed.
local function in_order(load, option, ranks)
  local n = ranks and #ranks or load.n
  if option.num_shards ~= n then return nil, { option = option, count = n } end
  local k = 0
  for _, run in ipairs(option.runs) do
    for _ = 1, run.n do
      local r = ranks and ranks[k + 1] or k
      if not load:takes(r, run, option) then return nil, refused(load, option, run, { r }) end
      load:add(r, run, option)
      k = k + 1
    end
  end
  return true
end

--- Each shard on the least busy rank of the heap. Returns their ranks, or nil and why not.
local function on_devices(heap, load, option, among)
  local ranks = {}
  for _, run in ipairs(option.runs) do
    for _ = 1, run.n do
      local rank = heap:place(run, option)
      if not rank then return nil, refused(load, option, run, among) end
      ranks[#ranks + 1] = rank
    end
  end
  return ranks
end

--- Groups of ranks: the first rank of the least busy one, and so on, each time that it is called; nil: there are no
--- more. (Most who ask need the first, and tables that are cut within hosts ask for each of theirs.)
local function groups_by_time(load, size)
  local n = math.floor(load.n / size)
  local ms, total = load.of_groups, load.total
  for g = 0, n - 1 do
    local sum = 0
    for r = g * size, g * size + size - 1 do sum = sum + total[r] end
    ms[g] = sum
  end
  return function()
    local least, at = math.huge, nil
    for g = 0, n - 1 do
      if ms[g] < least then least, at = ms[g], g end
    end
    if not at then return nil end
    ms[at] = math.huge
    return at * size
  end
end

local function consecutive(first, n)
  local ranks = {}
  for i = 1, n do ranks[i] = first + i - 1 end
  return ranks
end

--- Why no group has room for an option: of its memories taken together, on the group that misses least.
local function group_full(load, option, size)
  local why, least = { option = option, group = size }, math.huge
  for first = 0, load.n - size, size do
    for _, tier in ipairs(tiers) do
      local room = 0
      for r = first, first + size - 1 do room = room + load[tier][r] end
      local short = option.total_storage[tier] - room
      if short > 0 and short < least then least, why.rank, why.tier, why.left = short, first, tier, room end
    end
  end
  return why
end

--- All shards on one group of ranks.
local function on_host(load, option, size)
  local why
  for first in groups_by_time(load, size) do
    local room = { hbm = 0, ddr = 0, ssd = 0 }
    for r = first, first + size - 1 do
      for _, tier in ipairs(tiers) do room[tier] = room[tier] + load[tier][r] end
    end
    local total, ranks = option.total_storage, consecutive(first, size)
    if total.hbm <= room.hbm and total.ddr <= room.ddr and total.ssd <= room.ssd then
      local saved, by_rows = load:save(first, size), sharding_types.of[option.sharding_type].cuts_rows
      local placed
      if by_rows then placed, why = in_order(load, option, ranks)
      else placed, why = on_devices(loads.Heap(load, first, size, size), load, option, ranks) end
      if placed then return by_rows and ranks or placed end
      load:restore(saved, first, size)
    end
  end
  return nil, why or group_full(load, option, size)
end

--- A block of columns on each of several groups.
local function on_hosts(load, option, size)
  local order, blocks = {}, option.num_shards / size
  if blocks ~= math.floor(blocks) then return nil, { option = option, count = size } end
  for first in groups_by_time(load, size) do order[#order + 1] = first end
  local wraps, why = blocks >= #order, nil
  local saved = load:save(0, load.n)
  for start = 1, wraps and 1 or #order - blocks + 1 do
    local ranks = {}
    for b = 0, blocks - 1 do
      local first = order[wraps and b % #order + 1 or start + b]
      for r = first, first + size - 1 do ranks[#ranks + 1] = r end
    end
    local placed
    placed, why = in_order(load, option, ranks)
    if placed then return ranks end
    load:restore(saved, 0, load.n)
  end
  return nil, why
end

-- -- greedy -----------------------------------------------------------------------------------------------------------

local GreedyPerfPartitioner = util.seal(util.class "GreedyPerfPartitioner")
M.GreedyPerfPartitioner = GreedyPerfPartitioner

--- GreedyPerfPartitioner { sort_by = "storage" | "perf", balance_modules = false }: tables that go to all ranks first,
--- then the others from the largest (or, by perf, the slowest), each shard to the least busy rank that it fits.
--- balance_modules: those of modules with few tables come first.
function GreedyPerfPartitioner:init(args)
  local a = util.named("GreedyPerfPartitioner", args, { sort_by = "storage", balance_modules = false })
  util.one_of("GreedyPerfPartitioner", "sort_by", a.sort_by, { "storage", "perf" })
  self.sort_by, self.balance_modules = a.sort_by, a.balance_modules
end

--- Positions in the proposal of what does not go to all ranks, in the order of placement. rules: of relations
--- (relations.lua); nil, false: there are none.
function GreedyPerfPartitioner:order(proposal, rules)
  local positions, of_module, pinned = {}, {}, {}
  local first, hbm, ddr, ssd = {}, {}, {}, {} -- what is compared, by position
  for i, option in ipairs(proposal) do
    local s = option.total_storage
    pinned[i] = rules and rules:pinned(option) or false
    of_module[option.path] = (of_module[option.path] or 0) + 1
    first[i], hbm[i], ddr[i], ssd[i] = 0, s.hbm, s.ddr, s.ssd
    if self.sort_by == "perf" then first[i], hbm[i], ddr[i], ssd[i] = option.total_perf, 0, 0, 0 end
    if option.partition_by ~= "uniform" then positions[#positions + 1] = i end
  end
  local by_module = self.balance_modules
  table.sort(positions, function(i, j)
    if pinned[i] ~= pinned[j] then return pinned[i] end
    if by_module then
      local a, b = of_module[proposal[i].path], of_module[proposal[j].path]
      if a ~= b then return a < b end
    end
    if first[i] ~= first[j] then return first[i] > first[j] end
    if hbm[i] ~= hbm[j] then return hbm[i] > hbm[j] end
    if ddr[i] ~= ddr[j] then return ddr[i] > ddr[j] end
    if ssd[i] ~= ssd[j] then return ssd[i] > ssd[j] end
    return i < j
  end)
  return positions
end

--- most: bytes of its own memory that a rank may use at most (default: what it has).
function GreedyPerfPartitioner:partition(proposal, topology, most)
  local load, placement, heap = loads.Load(topology, most), {}, nil
  for i, option in ipairs(proposal) do
    if option.partition_by == "uniform" then
      local ok, why = in_order(load, option)
      if not ok then return nil, why end
      placement[i] = true
    end
  end
  local size = topology.intra_group_size
  for _, i in ipairs(self:order(proposal, load.rules)) do
    local option = proposal[i]
    local why
    if option.partition_by == "device" then
      heap = heap or loads.Heap(load, 0, load.n, load.local_size)
      placement[i], why = on_devices(heap, load, option)
    else
      placement[i], why = (option.partition_by == "host" and on_host or on_hosts)(load, option, size)
      heap = nil
    end
    if not placement[i] then return nil, why end
  end
  return placement
end

-- -- others -----------------------------------------------------------------------------------------------------------

--- Places what goes to all ranks, and nothing else.
local UniformPartitioner = util.seal(util.class "UniformPartitioner")
M.UniformPartitioner = UniformPartitioner
function UniformPartitioner:init(args) util.named("UniformPartitioner", args, {}) end -- luacheck: ignore 212

function UniformPartitioner:partition(proposal, topology) -- luacheck: ignore 212
  for _, option in ipairs(proposal) do
    if option.partition_by ~= "uniform" then return nil, { option = option, count = topology.world_size } end
  end
  return GreedyPerfPartitioner():partition(proposal, topology)
end

--- Each rank's milliseconds under a placement, the slowest (TorchRec's NoopPerfModel).
local NoopPerfModel = util.class "NoopPerfModel"
M.NoopPerfModel = NoopPerfModel
NoopPerfModel.unit = "ms"
function NoopPerfModel:init(args)
  self.topology = util.named("NoopPerfModel", args, { topology = util.required.table }).topology
  signature.value("NoopPerfModel", "topology", self.topology, "Topology")
end

--- f(rank from 0, run) for every shard of a placement.
function M.each_shard(option, ranks, f)
  M.check_placement("each_shard", { option }, { ranks }, ranks == true and option.num_shards or 2 ^ 31 - 1)
  local k = 0
  for _, run in ipairs(option.runs) do
    for _ = 1, run.n do
      f(ranks == true and k or ranks[k + 1], run)
      k = k + 1
    end
  end
end

--- An error unless a placement says a rank of each shard of a proposal.
function M.check_placement(func, proposal, placement, world_size)
  for i, option in ipairs(proposal) do
    local ranks = placement[i]
    local right = ranks == true and option.num_shards == world_size or type(ranks) == "table"
      and #ranks == option.num_shards
    for k = 1, right and ranks ~= true and #ranks or 0 do
      local r = ranks[k]
      right = right and type(r) == "number" and r >= 0 and r < world_size and r % 1 == 0
    end
    if not right then
      P.fail(("%s: placement[%d] of table '%s': wanted a list of the ranks 0..%d of its %d shards, or true: shard k "
        .. "on rank k"):format(func, i, option.fqn, world_size - 1, option.num_shards))
    end
  end
end

--- value(run) summed by rank: a list from rank 0 on.
function M.by_rank(proposal, placement, world_size, value)
  M.check_placement("by_rank", proposal, placement, world_size)
  local sums = {}
  for r = 1, world_size do sums[r] = 0 end
  for i, option in ipairs(proposal) do
    local ranks, k = placement[i], 0
    for _, run in ipairs(option.runs) do
      local x = value(run)
      for _ = 1, run.n do
        local r = ranks == true and k + 1 or ranks[k + 1] + 1
        sums[r] = sums[r] + x
        k = k + 1
      end
    end
  end
  return sums
end

local function most_of(list)
  local most = 0
  for _, x in ipairs(list) do most = math.max(most, x) end
  return most
end

local function total_ms(run) return run.perf.total end

function NoopPerfModel:rate(proposal, placement)
  return most_of(M.by_rank(proposal, placement, self.topology.world_size, total_ms))
end

--- Rates a plan by the bytes of the fullest rank instead.
local NoopStorageModel = util.class "NoopStorageModel"
M.NoopStorageModel = NoopStorageModel
NoopStorageModel.unit = "bytes"
function NoopStorageModel:init(args)
  self.topology = util.named("NoopStorageModel", args, { topology = util.required.table }).topology
  signature.value("NoopStorageModel", "topology", self.topology, "Topology")
end
function NoopStorageModel:rate(proposal, placement)
  local tier = self.topology:own_tier()
  return most_of(M.by_rank(proposal, placement, self.topology.world_size, function(run) return run.storage[tier] end))
end

-- -- balanced ---------------------------------------------------------------------------------------------------------

local MemoryBalancedPartitioner = util.seal(util.class "MemoryBalancedPartitioner")
M.MemoryBalancedPartitioner = MemoryBalancedPartitioner

local NEAR = 10 * 2 ^ 20 -- bytes: caps nearer than this are one

--- MemoryBalancedPartitioner { max_search_count = 10, tolerance = 0.02, balance_modules = false }: a greedy placement
--- whose fullest rank has as little as a search of so many steps finds, no slower than the plain one by more than the
--- tolerance.
function MemoryBalancedPartitioner:init(args)
  local a = util.named("MemoryBalancedPartitioner", args,
    { max_search_count = util.whole(10, 0), tolerance = 0.02, balance_modules = false })
  if a.tolerance < 0 then
    P.fail(("MemoryBalancedPartitioner: tolerance is %g, allowed: numbers >= 0"):format(a.tolerance))
  end
  self.max_search_count, self.tolerance, self.balance_modules = a.max_search_count, a.tolerance, a.balance_modules
end

function MemoryBalancedPartitioner:partition(proposal, topology)
  local greedy = GreedyPerfPartitioner { sort_by = "perf", balance_modules = self.balance_modules }
  local best, why = greedy:partition(proposal, topology)
  if not best then return nil, why end
  local tier, model = topology:own_tier(), NoopPerfModel { topology = topology }
  local limit = model:rate(proposal, best) * (1 + self.tolerance)
  local used = M.by_rank(proposal, best, topology.world_size, function(run) return run.storage[tier] end)
  local all, largest = 0, 0
  for _, option in ipairs(proposal) do
    all, largest = all + option.total_storage[tier], math.max(largest, option.max_storage[tier])
  end
  local low, high = math.max(math.floor(all / topology.world_size), largest), most_of(used)
  for _ = 1, self.max_search_count do
    if low + NEAR >= high then break end
    local cap = math.floor((low + high) / 2)
    local placement = greedy:partition(proposal, topology, cap)
    if placement and model:rate(proposal, placement) <= limit then best, high = placement, cap else low = cap end
  end
  return best
end

local partition = { partition = "proposal: proposal, topology: Topology, most: count?" }
kinds.methods(GreedyPerfPartitioner, { partition = partition.partition, order = "proposal: proposal, rules: any" })
kinds.methods(UniformPartitioner, partition)
kinds.methods(MemoryBalancedPartitioner, partition)
kinds.methods(NoopPerfModel, { rate = "proposal: proposal, placement: table" })
kinds.methods(NoopStorageModel, { rate = "proposal: proposal, placement: table" })
signature.check("plan.partitioners.", M,
  { check_placement = "func: string, proposal: options, placement: table, world_size: int",
    each_shard = "option: ShardingOption, ranks: any, f: function",
  by_rank = "proposal: options, placement: table, world_size: int, value: function" })

return M
