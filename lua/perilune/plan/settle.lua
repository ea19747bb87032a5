-- plan/settle.lua: a search for options and places of tables together (pack.lua), by the prices of memory (weigh.lua):
-- the longest that a rank works is made shorter, first by filling ranks anew, then by taking some tables out and
-- putting them back otherwise.
local ffi = require "ffi"
local util = require "perilune.util"
local sharding_types = require "perilune.plan.sharding_types"
local weigh = require "perilune.plan.weigh"
local pack = require "perilune.plan.pack"

local M = {}

local SHARES = { 1, 0.95, 0.88, 0.78, 0.62 } -- of the memory of all ranks: what single ranks have is cut up
local LONGER, MOST_LONGER = 1.25, 40      -- a limit over the one before it, and how many are tried
-- how many longer ones, for a filling without prices of what is cut over all ranks
local MOST_PLAIN = 3
local BETWEEN = 10                       -- limits between one that did and one that did not
local ORDERS = 6                         -- orders of tables that are tried
local MOST_TO_FIND = 4                   -- times the work that is allowed, to find any plan
local NEAR = 1.002                       -- times what no plan can be better than: good enough
local SHORTER = 0.9985                   -- the limit of the next round
local MOST_OUT = 24                      -- tables that are taken out at once
-- fillings from which rounds begin: where memory is tight, most end where none leads on
local STARTS = 4
local IN_VAIN, IN_VAIN_LOOSE = 2500, 300 -- rounds in a row that found nothing; the second where memory is no matter
-- times what ranks worked beyond the target before: a round that found something
local NEARER = 1 - 1e-6
local FEW_GROUPS = 4                     -- of ranks: of so few, one is no small part of all
local LOOSE = 0.5                        -- of each rank's memory: a plan that leaves so much is not held back by memory

--- Where shards of an option can go: to any ranks ("any"), any ranks of one group ("group"), rank k for shard k
--- ("all"), groups in blocks ("blocks"). What is forced upon it by their number counts: one shard in one group can go
--- anywhere.
local function reach_of(option, topology)
  local W, G = topology.world_size, topology.intra_group_size
  if option.partition_by == "device" then return "any" end
  if option.partition_by == "host" and not sharding_types.of[option.sharding_type].cuts_rows then
    return (option.num_shards == 1 or G == W) and "any" or "group"
  end
  return (option.partition_by == "uniform" or option.num_shards == W and G == W) and "all" or "blocks"
end

--- Whether no shard of option a takes more, of anything, than the same shard of option b.
local function no_worse(a, b)
  if #a.runs ~= #b.runs then return false end
  for i, x in ipairs(a.runs) do
    local y = b.runs[i]
    local s, u = x.storage, y.storage
    if x.n ~= y.n or x.perf.total > y.perf.total or s.hbm > u.hbm or s.ddr > u.ddr or s.ssd > u.ssd then
      return false
    end
  end
  return true
end

--- Options of a table, without those for which another one can go wherever they can and takes no more. No plan needs
--- them, and rounds that try other options at random find those that differ sooner.
local function worth_trying(options, topology)
  local function beats(a, b)
    local x, y = reach_of(a, topology), reach_of(b, topology)
    return (x == y or x == "any" and y == "group") and no_worse(a, b)
  end
  local kept = {}
  for _, option in ipairs(options) do
    local rest, beaten = {}, false
    for _, other in ipairs(kept) do
      beaten = beaten or beats(other, option)
      if beaten or not beats(option, other) then rest[#rest + 1] = other end
    end
    if not beaten then rest[#rest + 1] = option end
    kept = rest
  end
  return kept
end

local LAST = 1e15 -- milliseconds: costs more than all that has room

--- Options of each table from the cheapest, by the knapsack's prices, that of memory so many times. What must be cut
--- over all ranks has the option that the knapsack found; those that have no room beside come last.
local function sorted_by_cost(knapsack, longest, times)
  local price_hbm, price_ddr = knapsack.price_hbm * times, knapsack.price_ddr * times
  return util.map(knapsack.tables, function(options, t)
    local list, costs, first = {}, {}, knapsack.first[t - 1] - 1
    for k, o in ipairs(options) do
      local i, at = first + k, k
      local cost = knapsack.time[i] + price_hbm * knapsack.hbm[i] + price_ddr * knapsack.ddr[i]
      if knapsack.forced[t - 1] == i then cost = -1 elseif not knapsack:may(i, longest) then cost = cost + LAST end
      while at > 1 and (costs[at - 1] > cost or costs[at - 1] == cost and list[at - 1].id > o.id) do
        list[at], costs[at] = list[at - 1], costs[at - 1]
        at = at - 1
      end
      list[at], costs[at] = o, cost
    end
    return list
  end)
end

--- Numbers of tables: those that go to all ranks, then the others from the one whose shards are hardest to place.
local function order_of(knapsack, limit)
  local order, size = {}, {}
  for t = 1, knapsack.n do
    local i = knapsack.pick[t - 1]
    order[t] = t
    size[t] = math.max(knapsack.hbm_shard[i] / math.max(knapsack.most.hbm, 1),
      knapsack.ddr_shard[i] / math.max(knapsack.most.ddr, 1), knapsack.longest[i] / limit)
    if knapsack.tables[t][i - knapsack.first[t - 1] + 1].partition_by == "uniform" then size[t] = size[t] + 1e9 end
  end
  table.sort(order, function(a, b)
    if size[a] ~= size[b] then return size[a] > size[b] end
    return a < b
  end)
  return order, size
end

local Search = {}
Search.__index = Search

function Search:draw(n)
  self.state = 16807 * self.state % 2147483647
  return self.state % n + 1
end

--- Fill ranks in this order; a table that finds no place comes first the next time. Returns whether all found places.
function Search:filled(order, sorted, limit, way)
  local refused = {}
  for _ = 1, ORDERS do
    local right, t = self.packing:fill(order, sorted, limit, way)
    if right then return true end
    if refused[t] then return false end
    refused[t] = true
    table.remove(order, util.index_of(order)[t])
    table.insert(order, 1, t)
  end
  return false
end

--- Fill ranks by what the knapsack says now, where none may work longer than a limit, in all ways; goes on with what
--- was found. Returns whether anything was, and whether work may go on. wide: whether the knapsack went by a price for
--- what is cut over all ranks.
function Search:fillings_by(limit, wide)
  local found, sorted = false, sorted_by_cost(self.knapsack, limit, 1)
  for _, way in ipairs(pack.ways) do
    if self.packing.work > (self.best and self.most / 2 or MOST_TO_FIND * self.most) then return found, false end
    local order, size = order_of(self.knapsack, limit)
    if self:filled(order, sorted, limit, way) then
      found = true
      self.packing:relieve(self.packing.work + self.most / 10)
      self:keep(self.packing:result(), sorted, size, wide)
    end
  end
  return found, true
end

--- As above, by all that the knapsack finds, with several shares of memory; plain: without those prices.
function Search:fillings_within(limit, plain)
  local knapsack, any, seen, goes_on = self.knapsack, false, {}, true
  for _, share in ipairs(SHARES) do
    knapsack:each(limit, share, function(_, _, wide)
      if wide and plain then return true end
      local key = ffi.string(knapsack.pick, ffi.sizeof "int32_t" * knapsack.n)
      if seen[key] then return false end
      seen[key] = true
      local found
      found, goes_on = self:fillings_by(limit, wide)
      any = any or found
      return not goes_on
    end)
    if not goes_on then break end
  end
  return any, goes_on
end

--- Fill ranks with limits from the least that can be hoped for on, until one does; then with limits between it and the
--- one before.
function Search:fillings()
  local low, high, goes_on = self.least, self.hoped, true
  local found
  for _ = 1, MOST_LONGER do
    found, goes_on = self:fillings_within(high)
    if found or not goes_on then break end
    low, high = high, high * LONGER
  end
  if not found then return end
  local longer = high
  for _ = 1, MOST_PLAIN do -- rounds lead on from others than those that have least now
    if self.plain or not goes_on then break end
    longer = longer * LONGER
    goes_on = select(2, self:fillings_within(longer, true))
  end
  for n = 1, BETWEEN do
    high = math.min(high, self.best.rating)
    if high / low < 1.01 or not goes_on then return end
    local middle = n <= BETWEEN / 2 and math.sqrt(low * high) or high * (low / high) ^ (0.1 * (n - BETWEEN / 2))
    found, goes_on = self:fillings_within(middle)
    if found then high = middle elseif n <= BETWEEN / 2 then low = middle end
  end
end

--- sorted: the lists of options with which ranks were filled, where rounds can begin; size: how hard tables were to
--- place.
function Search:keep(result, sorted, size, wide)
  if sorted then
    self.starts[#self.starts + 1] = { plan = result, sorted = sorted, size = size, wide = wide or false }
  end
  self.plain = self.plain or sorted and not wide
  if self.best and result.rating >= self.best.rating then return end
  self.best = result
end

--- The packing as a plan is.
function Search:put_plan(plan)
  self.packing:clear()
  for t, option in ipairs(plan.proposal) do self.packing:put(t, option, plan.placement[t], 1) end
end

--- Milliseconds by which ranks work longer than a target, of all ranks; and these ranks.
function Search:beyond(target)
  local packing, sum, list = self.packing, 0, {}
  for r = 0, packing.W - 1 do
    local more = packing.time[r] - target
    if more > 0 then sum, list[#list + 1] = sum + more, r end
  end
  packing.work = packing.work + packing.W / 4
  return sum, list
end

--- Tables of a rank; every other time, where tables are cut within groups, those of all ranks of its group: a table
--- that needs room on each of them finds none while the others are there.
function Search:near(rank)
  local packing, on = self.packing, {}
  local G = packing.group
  if G == 1 or packing.W < FEW_GROUPS * G or self:draw(2) == 1 then return packing:tables_on(rank) end
  local seen, first = {}, rank - rank % G
  for r = first, first + G - 1 do
    for _, t in ipairs(packing:tables_on(r)) do
      if not seen[t] and packing.ranks[t] ~= true then seen[t], on[#on + 1] = true, t end
    end
  end
  packing.work = packing.work + G * #self.tables / 8
  return on, true
end

--- Tables to take out: some of ranks that work longer than the target (over), and some others.
function Search:chosen(over)
  local packing, list, out = self.packing, {}, {}
  local function take(t)
    if t and not out[t] then out[t], list[#list + 1] = true, t end
  end
  for _ = 1, math.min(#over, self:draw(3)) do
    local on = packing:tables_on(over[self:draw(#over)])
    for _ = 1, self:draw(4) do take(on[self:draw(#on)]) end
  end
  local near, whole = self:near(self:draw(packing.W) - 1)
  if whole and #near <= MOST_OUT then
    for _, t in ipairs(near) do take(t) end
    packing.work = packing.work + 4 * #self.tables
    return list
  end
  for i = 1, self:draw(MOST_OUT) - 1 do
    take(i % 2 == 0 and near[self:draw(math.max(#near, 1))] or self:draw(#self.tables))
  end
  packing.work = packing.work + 4 * #self.tables
  return list
end

--- A table that is on no rank takes the cheapest option that finds a place where no rank works longer than the limit;
--- now and then one is passed over. True: it did.
function Search:take_in(t, options, limit)
  for _, option in ipairs(options) do
    if option.max_perf <= limit and self:draw(8) > 1 then
      local found = self.packing:places(option, limit)
      if found then
        self.packing:put(t, option, found, 1)
        return true
      end
    end
  end
  return false
end

--- Tables in the order in which they are put back.
function Search:mixed(list)
  local by = self:draw(3)
  if by == 1 then
    for i = #list, 2, -1 do
      local j = self:draw(i)
      list[i], list[j] = list[j], list[i]
    end
    return
  end
  local size = self.size
  table.sort(list, function(a, b)
    if size[a] ~= size[b] then return size[a] > size[b] end
    return a < b
  end)
end

--- One round: some tables out, and in again, where no rank works longer than the target, or than `longest`. What ranks
--- work beyond the target is no more then, or all is as before. Returns what it is.
function Search:again(target, sum, over, longest)
  local packing, before, list = self.packing, {}, self:chosen(over)
  for _, t in ipairs(list) do
    before[t] = { packing.option[t], packing.ranks[t] }
    packing:put(t, before[t][1], before[t][2], -1)
  end
  self:mixed(list)
  packing.limit, packing.way = target, pack.ways[self:draw(#pack.ways)]
  local sorted, placed, right = self.priced[self:draw(#self.priced)], {}, true
  for _, t in ipairs(list) do
    right = self:take_in(t, sorted[t], target) or self:take_in(t, sorted[t], longest)
    if not right then break end
    placed[#placed + 1] = t
  end
  local now, still = self:beyond(target)
  if right and now <= sum then return now, still end
  for _, t in ipairs(placed) do packing:put(t, packing.option[t], packing.ranks[t], -1) end
  for _, t in ipairs(list) do packing:put(t, before[t][1], before[t][2], 1) end
  return sum, over
end

--- Lists of options by several prices of memory, beginning with those of a start.
function Search:prices(start)
  local knapsack, longest = self.knapsack, self.best.rating
  self.priced, self.size = { start.sorted }, start.size
  for _, share in ipairs { 1, 0.8 } do
    knapsack:each(longest, share, function()
      for _, factor in ipairs { 1, 3 } do self.priced[#self.priced + 1] = sorted_by_cost(knapsack, longest, factor) end
      return true
    end)
  end
end

--- Whether all ranks have much of every kind of memory left with this plan.
function Search:is_loose(plan)
  self:put_plan(plan)
  for r = 0, self.packing.W - 1 do
    for tier, cap in util.ordered(self.packing.caps) do
      if self.packing[tier][r] < LOOSE * cap[r] then return false end
    end
  end
  return true
end

--- Take out and put back, beginning with a plan, until nothing has come of so many rounds, or `most` work is done.
function Search:rounds(best, in_vain, most)
  self:put_plan(best)
  local target = best.rating * SHORTER
  local sum, over = self:beyond(target)
  local vain = 0
  while self.packing.work < most and best.rating > self.least * NEAR and vain < in_vain do
    local now, still = self:again(target, sum, over, best.rating)
    vain = now < sum * NEARER and 0 or vain + 1
    sum, over = now, still
    if sum == 0 then
      best = self.packing:result()
      target = best.rating * SHORTER
      sum, over = self:beyond(target)
    end
  end
  if self.packing:longest() < best.rating then best = self.packing:result() end
  self:keep(best)
end

--- Rounds from the best of the fillings, which share the work that is left.
function Search:from_starts()
  table.sort(self.starts, function(a, b) return a.plan.rating < b.plan.rating end)
  local list, others, last = {}, {}, {}
  for _, start in ipairs(self.starts) do
    if last[start.wide] ~= start.plan.rating then
      local to = start.wide == self.starts[1].wide and list or others
      to[#to + 1], last[start.wide] = start, start.plan.rating
    end
  end
  -- of both kinds
  for i = 1, math.min(#others, STARTS / 2) do table.insert(list, math.min(2 * i, #list + 1), others[i]) end
  local loose = self:is_loose(self.best)
  local n = math.min(loose and 1 or STARTS, #list)
  for i = 1, n do
    local work = self.packing.work
    self:prices(list[i])
    self:rounds(list[i].plan, loose and IN_VAIN_LOOSE or IN_VAIN, work + (self.most - work) / (n - i + 1))
  end
end

--- A plan of the tables, in the order of the search's, from one in any order.
local function arranged(tables, plan)
  local place, proposal, placement = {}, {}, {}
  for i, option in ipairs(plan.proposal) do place[option.fqn] = i end
  for t, options in ipairs(tables) do
    local i = place[options[1].fqn]
    proposal[t], placement[t] = plan.proposal[i], plan.placement[i]
  end
  return { proposal = proposal, placement = placement, rating = plan.rating }
end

--- The best plan that is found of the options of tables on a topology: { proposal =, placement =, rating =
--- (milliseconds of the rank that works longest), least = (what no plan is better than) } or nil: none; and the work:
--- ranks that were looked at. most: of these. start: a plan to begin with, or nil.
function M.search(space, topology, most, start)
  local tables = util.map(pack.by_table(space), function(options) return worth_trying(options, topology) end)
  local knapsack = weigh.knapsack(tables)
  knapsack:within(topology)
  local self = setmetatable({ tables = tables, knapsack = knapsack, packing = pack.new(tables, topology), most = most,
    state = 12345, starts = {} }, Search)
  self.hoped = knapsack:shortest(1)
  if not self.hoped then return nil, #space end
  self.least = knapsack:bound()
  self:fillings()
  if start then
    self:keep(arranged(tables, start), sorted_by_cost(knapsack, math.huge, 0),
      select(2, order_of(knapsack, start.rating)))
  end
  if not self.best then return nil, self.packing.work end
  self:from_starts()
  self.best.least = self.least
  return self.best, self.packing.work
end

--- A plan with another option for table i of its proposal, whose places change, where the others stay: its placement,
--- and what the rank that works longest then takes; nil: that has no room.
function M.instead(proposal, placement, i, option, topology)
  local packing = pack.new(util.map(proposal, function(o) return { o } end), topology)
  packing:clear()
  for t, o in ipairs(proposal) do
    if t ~= i then packing:put(t, o, placement[t], 1) end
  end
  packing.limit, packing.way = math.huge, "time"
  local ranks = packing:places(option, math.huge)
  if not ranks then return nil end
  packing:put(i, option, ranks, 1)
  local result = packing:result()
  return result.placement, result.rating
end

return M
