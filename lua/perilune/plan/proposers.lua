-- plan/proposers.lua: which proposals a planner tries: one option for each table (TorchRec's proposers).
--
-- load(space, enumerator); within(topology), optional: what is left of the machine; begin(proposal, rating), optional:
-- the best that the proposers before it found, if there is one; propose() returns a list of options, or nil when there
-- is no more; feedback(partitionable, proposal, rating, topology) says what became of it (rating: what plans are chosen
-- by, EmbeddingShardingPlanner:score).
local ffi = require "ffi"
local util = require "perilune.util"
local kinds = require "perilune.plan.kinds"
local by_table = require("perilune.plan.pack").by_table
local topologies = require "perilune.plan.topology"

local M = {}

--- Sorted by key(option), equal ones in the order that they had.
local function sort_by(list, key)
  local keys, order = {}, {}
  for i, option in ipairs(list) do keys[option], order[option] = key(option), i end
  table.sort(list, function(a, b)
    if keys[a] ~= keys[b] then return keys[a] < keys[b] end
    return order[a] < order[b]
  end)
end

local function slowest(option) return option.max_perf end
local function summed(option) return option.total_perf end

local function sorted_tables(space, use_depth)
  local tables = by_table(space)
  for _, options in ipairs(tables) do sort_by(options, use_depth and slowest or summed) end
  return tables
end

local function choose(tables, indexes)
  local proposal = {}
  for t, options in ipairs(tables) do proposal[t] = options[indexes[t]] end
  return proposal
end

-- -- greedy -----------------------------------------------------------------------------------------------------------

local GreedyProposer = util.class "GreedyProposer"
M.GreedyProposer = GreedyProposer

--- GreedyProposer { use_depth = true, threshold = nil }: the fastest option of every table first; then, step by step,
--- the next one of the table that takes most. use_depth: an option is as fast as its slowest shard, else as all of
--- them. threshold: stop after so many proposals that were no better than the best.
function GreedyProposer:init(args)
  local a = util.named("GreedyProposer", args, { use_depth = true, threshold = util.whole(nil, 0) })
  self.use_depth, self.threshold, self.tables, self.best, self.worse = a.use_depth, a.threshold, {}, math.huge, 0
end

function GreedyProposer:load(space)
  self.tables, self.indexes, self.best, self.worse = sorted_tables(space, self.use_depth), {}, math.huge, 0
  for t in ipairs(self.tables) do self.indexes[t] = 1 end
  if #self.tables == 0 then self.indexes = nil end
end

function GreedyProposer:propose() return self.indexes and choose(self.tables, self.indexes) or nil end

--- Whether a takes more than b: of its own memory in the largest shard, in all, then the same of the host's.
local function larger(a, b)
  local x, y = a.max_storage, b.max_storage
  local u, v = a.total_storage, b.total_storage
  if x.hbm ~= y.hbm then return x.hbm > y.hbm end
  if u.hbm ~= v.hbm then return u.hbm > v.hbm end
  if x.ddr ~= y.ddr then return x.ddr > y.ddr end
  return u.ddr > v.ddr
end

local NOTHING = { max_storage = { hbm = 0, ddr = 0 }, total_storage = { hbm = 0, ddr = 0 } }

function GreedyProposer:feedback(_, _, rating)
  if self.threshold and rating then
    self.worse = self.worse + 1
    if rating < self.best then self.best, self.worse = rating, 0 end
    if self.worse > self.threshold then
      self.indexes = nil
      return
    end
  end
  local largest, at = NOTHING, nil
  for t, options in ipairs(self.tables) do
    local i = self.indexes[t]
    if i < #options and larger(options[i], largest) then largest, at = options[i], t end
  end
  if at then self.indexes[at] = self.indexes[at] + 1 else self.indexes = nil end
end

-- -- uniform ----------------------------------------------------------------------------------------------------------

local UniformProposer = util.class "UniformProposer"
M.UniformProposer = UniformProposer

--- UniformProposer { use_depth = true }: for each sharding type that all tables have, the plan in which all use it.
function UniformProposer:init(args)
  self.use_depth = util.named("UniformProposer", args, { use_depth = true }).use_depth
  self.proposals, self.at = {}, 1
end

function UniformProposer:load(space)
  self.proposals, self.at = {}, 1
  local types, of_type = {}, {}
  for _, option in ipairs(space) do
    local kind = option.sharding_type
    if not of_type[kind] then
      types[#types + 1] = kind
      of_type[kind] = {}
    end
    table.insert(of_type[kind], option)
  end
  local count = #by_table(space)
  for _, kind in ipairs(types) do
    local tables = sorted_tables(of_type[kind], self.use_depth)
    if #tables == count then
      self.proposals[#self.proposals + 1] = util.map(tables, function(options) return options[1] end)
    end
  end
  self.none = #self.proposals == 0 and "no sharding type is an option of all tables" or nil
end

function UniformProposer:propose() return self.proposals[self.at] end
function UniformProposer:feedback() self.at = self.at + 1 end

-- -- all of them
-- ---------------------------------------------------------------------------------------------------------------------

local GridSearchProposer = util.class "GridSearchProposer"
M.GridSearchProposer = GridSearchProposer

--- GridSearchProposer { max_proposals = 10000 }: every combination; none at all if there are more than that.
function GridSearchProposer:init(args)
  local a = util.named("GridSearchProposer", args, { max_proposals = util.whole(10000, 1) })
  self.max_proposals, self.tables = a.max_proposals, {}
end

function GridSearchProposer:load(space)
  self.tables, self.indexes = sorted_tables(space, true), {}
  local n = 1
  for t, options in ipairs(self.tables) do self.indexes[t], n = 1, n * #options end
  self.none = n > self.max_proposals and ("%.4g combinations of %d tables' options, max_proposals is %d"):format(n,
    #self.tables, self.max_proposals) or nil
  if self.none or #self.tables == 0 then self.indexes = nil end
end

function GridSearchProposer:propose() return self.indexes and choose(self.tables, self.indexes) or nil end

function GridSearchProposer:feedback()
  for t = #self.tables, 1, -1 do
    if self.indexes[t] < #self.tables[t] then
      self.indexes[t] = self.indexes[t] + 1
      return
    end
    self.indexes[t] = 1
  end
  self.indexes = nil
end

-- -- what takes least memory ------------------------------------------------------------------------------------------

--- Proposes, for each kind of memory, the options that take least of it: in all, and in their largest shard.
local LeastMemoryProposer = util.class "LeastMemoryProposer"
M.LeastMemoryProposer = LeastMemoryProposer
function LeastMemoryProposer:init() self.proposals, self.at = {}, 1 end

function LeastMemoryProposer:load(space)
  self.proposals, self.at = {}, 1
  for _, sum in ipairs { "total_storage", "max_storage" } do
    for _, tier in ipairs(topologies.tiers) do
      local proposal, at = {}, {}
      for _, option in ipairs(space) do
        local i = at[option.fqn] or #proposal + 1
        at[option.fqn] = i
        if not proposal[i] or option[sum][tier] < proposal[i][sum][tier] then proposal[i] = option end
      end
      self.proposals[#self.proposals + 1] = #proposal > 0 and proposal or nil
    end
  end
end

function LeastMemoryProposer:propose() return self.proposals[self.at] end
function LeastMemoryProposer:feedback() self.at = self.at + 1 end

-- -- changes of the best ----------------------------------------------------------------------------------------------

local RefiningProposer = util.class "RefiningProposer"
M.RefiningProposer = RefiningProposer

--- RefiningProposer { max_proposals = 1000 }: begins with the best proposal of the proposers before it, and gives one
--- table another option, or all tables at once that have the same options; goes on from what is better, until nothing
--- is, or it made so many proposals.
function RefiningProposer:init(args)
  local a = util.named("RefiningProposer", args, { max_proposals = util.whole(1000, 1) })
  self.max_proposals, self.tables = a.max_proposals, {}
  self.groups, self.indexes, self.n = {}, nil, 0
end

--- What an option is, whatever table it is of.
local function text_of(option)
  return ("%s %s %d %.17g %.17g"):format(option.sharding_type, option.compute_kernel, option.num_shards,
    option.max_perf, option.total_perf)
end

function RefiningProposer:load(space)
  self.tables, self.groups, self.indexes, self.tried, self.n = by_table(space), {}, nil, nil, 0
  local groups = {} -- tables that are alike, together
  for t, options in ipairs(self.tables) do
    local text = table.concat(util.map(options, text_of), "\n")
    if not groups[text] then
      groups[text] = {}
      self.groups[#self.groups + 1] = groups[text]
    end
    table.insert(groups[text], t)
  end
  self.none = "no proposer before it found a plan"
end

--- The moves from here: lists of { tables, option }. Of tables that are alike and have the same option, one is moved
--- for all of them.
function RefiningProposer:_look_around()
  self.moves, self.in_vain = {}, 0
  for _, group in ipairs(self.groups) do
    for i = 1, #self.tables[group[1]] do
      local from, n = {}, 0 -- options that some have now -> a table that does
      for _, t in ipairs(group) do
        local now = self.indexes[t]
        if now ~= i and not from[now] then n, from[now] = n + 1, t end
      end
      if #group > 1 and n > 0 then self.moves[#self.moves + 1] = { group, i } end
      for _, t in ipairs(group) do
        if from[self.indexes[t]] == t then self.moves[#self.moves + 1] = { { t }, i } end
      end
    end
  end
  self.at = #self.moves > 0 and (self.at - 1) % #self.moves + 1 or 1
end

--- The best proposal so far, and its rating.
function RefiningProposer:begin(proposal, rating)
  local chosen, indexes = util.index_of(proposal), {}
  for t, options in ipairs(self.tables) do
    for i, option in ipairs(options) do
      if chosen[option] then indexes[t] = i end
    end
    if not indexes[t] then -- some proposer's own option
      self.none = "the best plan has options of a proposer's own"
      return
    end
  end
  self.none, self.indexes, self.rating, self.at = nil, indexes, rating, 1
  self:_look_around()
end

function RefiningProposer:propose()
  local move = self.indexes and self.moves[self.at]
  if not move or self.in_vain == #self.moves or self.n >= self.max_proposals then return nil end
  self.n = self.n + 1
  self.tried = util.copy(self.indexes)
  for _, t in ipairs(move[1]) do self.tried[t] = move[2] end
  return choose(self.tables, self.tried)
end

function RefiningProposer:feedback(_, _, rating)
  if not self.tried then return end
  if rating and rating < self.rating then
    self.indexes, self.rating = self.tried, rating
    self:_look_around()
  else
    self.at, self.in_vain = self.at % #self.moves + 1, self.in_vain + 1
  end
end

-- -- dynamic programming
-- ---------------------------------------------------------------------------------------------------------------------

local DynamicProgrammingProposer = util.class "DynamicProgrammingProposer"
M.DynamicProgrammingProposer = DynamicProgrammingProposer

--- DynamicProgrammingProposer { hbm_bins_per_device = 100 }: the least sum of all shards' times for each amount of
--- memory of all ranks, in steps; from the most memory to the least. (On a cpu, the host's memory.)
function DynamicProgrammingProposer:init(args)
  local a = util.named("DynamicProgrammingProposer", args, { hbm_bins_per_device = 100 })
  self.bins_per_device = math.max(util.integer("DynamicProgrammingProposer", "hbm_bins_per_device",
    a.hbm_bins_per_device, 0, 1e6), 1)
  self.tables, self.tier = {}, "ddr"
end

function DynamicProgrammingProposer:load(space)
  local own = false -- the kind of memory that tables take
  for _, option in ipairs(space) do own = own or option.total_storage.hbm > 0 end
  self.tier = own and "hbm" or "ddr"
  local list = {}
  for i, option in ipairs(space) do list[i] = option end
  sort_by(list, function(option) return option.total_storage[self.tier] end)
  self.tables, self.proposals, self.at = by_table(list), nil, 1
end

function DynamicProgrammingProposer:propose()
  if not self.proposals then
    return #self.tables > 0 and util.map(self.tables, function(options) return options[1] end) or nil
  end
  local indexes = self.proposals[self.at]
  return indexes and choose(self.tables, indexes) or nil
end

--- One table more. before: { perf, memory } by bin; returns those after, and by bin which option and which bin before
--- it (-1: none).
local function extend(before, options, tier, bins, bin_bytes)
  local after = { perf = ffi.new("double[?]", bins), memory = ffi.new("double[?]", bins),
    option = ffi.new("int32_t[?]", bins), from = ffi.new("int32_t[?]", bins) }
  for b = 0, bins - 1 do
    after.perf[b], after.memory[b], after.option[b], after.from[b] = math.huge, math.huge, -1, -1
  end
  for i, option in ipairs(options) do
    local memory, perf = option.total_storage[tier] / bin_bytes, option.total_perf
    for b = 0, bins - 1 do
      local so_far = before.perf[b]
      local sum = before.memory[b] + memory
      if so_far < math.huge and sum < bins then
        local to = math.floor(sum)
        if after.perf[to] > so_far + perf then
          after.perf[to], after.memory[to], after.option[to], after.from[to] = so_far + perf, sum, i, b
        end
      end
    end
  end
  return after
end

function DynamicProgrammingProposer:_solve(topology)
  local all = 0
  for _, device in ipairs(topology.devices) do all = all + device[self.tier] end
  local bins = self.bins_per_device * topology.world_size
  local layers = { { perf = ffi.new("double[?]", bins), memory = ffi.new("double[?]", bins) } }
  for b = 1, bins - 1 do layers[1].perf[b] = math.huge end
  for t, options in ipairs(self.tables) do layers[t + 1] = extend(layers[t], options, self.tier, bins, all / bins) end
  local proposals, last = {}, #layers
  for b = bins - 1, 0, -1 do
    if layers[last].option[b] >= 0 then
      local indexes, at = {}, b
      for t = last, 2, -1 do indexes[t - 1], at = layers[t].option[at], layers[t].from[at] end
      proposals[#proposals + 1] = indexes
    end
  end
  return proposals
end

function DynamicProgrammingProposer:feedback(_, _, _, topology)
  if self.proposals then self.at = self.at + 1 else self.proposals = self:_solve(topology) end
end

local methods = { load = "space: proposal, enumerator: any",
  feedback = "partitionable: any, proposal: any, rating: number?, topology: any", propose = "" }
for _, class in ipairs { GreedyProposer, UniformProposer, GridSearchProposer, LeastMemoryProposer, RefiningProposer } do
  kinds.methods(class, methods)
end
kinds.methods(RefiningProposer, { begin = "proposal: proposal, rating: number" })
kinds.methods(DynamicProgrammingProposer, { load = methods.load, propose = "", _solve = "topology: Topology",
  feedback = "partitionable: any, proposal: any, rating: number?, topology: Topology?" })

return M
