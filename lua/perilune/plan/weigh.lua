-- plan/weigh.lua: options of tables weighed against the memory that is left: a knapsack.
--
-- Wanted is the least T such that every table has an option none of whose shards takes longer than T, all shards together take no longer
-- than T on each rank, and all fit into the memory of all ranks together. Memory gets a price, milliseconds a byte for each kind; every
-- table then takes the option that costs it least, time and memory together, and prices rise until what is taken fits. That shards find
-- places on single ranks is not known here: the proposer asks for less memory than there is, too, and for a T that is longer.
local ffi = require "ffi"
local util = require "perilune.util"
local signature = require "perilune.signature"
local kinds = require "perilune.plan.kinds"
local by_table = require("perilune.plan.pack").by_table

local M = {}

local doubles, ints = ffi.typeof "double[?]", ffi.typeof "int32_t[?]"

-- -- the knapsack ----------------------------------------------------------------------------------------------------------------------

local Knapsack = {}
Knapsack.__index = Knapsack

--- Of tables: a list of lists of options.
function M.knapsack(tables)
  local n, count = #tables, 0
  for _, options in ipairs(tables) do count = count + #options end
  local k = setmetatable({ tables = tables, n = n, first = ints(n + 1), time = doubles(count), longest = doubles(count),
    hbm = doubles(count), ddr = doubles(count), hbm_shard = doubles(count), ddr_shard = doubles(count), pick = ints(n) }, Knapsack)
  local at = 0
  for t, options in ipairs(tables) do
    k.first[t - 1] = at
    for _, o in ipairs(options) do
      k.time[at], k.longest[at] = o.total_perf, o.max_perf
      k.hbm[at], k.ddr[at] = o.total_storage.hbm, o.total_storage.ddr
      k.hbm_shard[at], k.ddr_shard[at] = o.max_storage.hbm, o.max_storage.ddr
      at = at + 1
    end
  end
  k.first[n] = at
  return k
end

--- What ranks have: together, and the one that has most.
function Knapsack:within(topology)
  self.ranks, self.room, self.most, self.proved = topology.world_size, { hbm = 0, ddr = 0 }, { hbm = 0, ddr = 0 }, 0
  for _, device in ipairs(topology.devices) do
    for _, tier in ipairs { "hbm", "ddr" } do
      self.room[tier], self.most[tier] = self.room[tier] + device[tier], math.max(self.most[tier], device[tier])
    end
  end
end

--- Every table takes the option that costs least at these prices, of those whose shards take no longer than `longest`. Returns milliseconds
--- and bytes of what was taken (self.pick); nil: some table has no such option.
function Knapsack:take(longest, price_hbm, price_ddr)
  local first, time, top, hbm, ddr, pick = self.first, self.time, self.longest, self.hbm, self.ddr, self.pick
  local hbm_shard, ddr_shard, most_hbm, most_ddr = self.hbm_shard, self.ddr_shard, self.most.hbm, self.most.ddr
  local ms, h, d = 0, 0, 0
  for t = 0, self.n - 1 do
    local least, at = math.huge, -1
    for i = first[t], first[t + 1] - 1 do
      local cost = time[i] + price_hbm * hbm[i] + price_ddr * ddr[i]
      if cost < least and top[i] <= longest and hbm_shard[i] <= most_hbm and ddr_shard[i] <= most_ddr then least, at = cost, i end
    end
    if at < 0 then return nil end
    pick[t], ms, h, d = at, ms + time[at], h + hbm[at], d + ddr[at]
  end
  self.proved = math.max(self.proved, ms + price_hbm * (h - self.room.hbm) + price_ddr * (d - self.room.ddr))
  return ms, h, d
end

local STEPS = 18    -- halvings of a price's range
local HIGHEST = 80  -- doublings of a price before it is given up

--- The least price for which take(price) fits: fits(...) of what take returns. Returns it, and what take then returned. nil: none does.
local function least_price(start, take, fits)
  local low, high, x, y, z = 0, start, take(0)
  if not x then return nil end
  if fits(x, y, z) then return 0, x, y, z end
  x, y, z = take(high)
  local doublings = 0
  while not fits(x, y, z) do
    low, high, doublings = high, high * 4, doublings + 1
    if doublings > HIGHEST / 2 then return nil end
    x, y, z = take(high)
  end
  for _ = 1, STEPS do
    local middle = low > 0 and math.sqrt(low * high) or high / 64
    local a, b, c = take(middle)
    if fits(a, b, c) then high, x, y, z = middle, a, b, c else low = middle end
    if low > 0 and high / low < 1.0005 then break end
  end
  return high, x, y, z
end

--- The picks whose shards take no longer than `longest`, that fit into `share` of the device's memory and all of the host's, and take least
--- time; its milliseconds. nil: there are none.
function Knapsack:solve(longest, share)
  local room_hbm, room_ddr = self.room.hbm * share, self.room.ddr
  local unit = 1e-12 * (1 + longest)
  local function by_hbm(price_ddr)
    return least_price(unit, function(price) return self:take(longest, price, price_ddr) end, function(_, h) return h <= room_hbm end)
  end
  local price, _, _, needed = by_hbm(0)
  local price_ddr = 0
  if not price or needed > room_ddr then
    price_ddr = least_price(unit, function(p)
      local found, x, y, z = by_hbm(p)
      if found then price = found else x, y, z = self:take(longest, p, p) end
      return x, y, z
    end, function(_, y, z) return y <= room_hbm and z <= room_ddr end)
    if not price_ddr then return nil end
    price = (by_hbm(price_ddr))
    if not price then return nil end
  end
  local ms, h, d = self:take(longest, price, price_ddr)
  self.price_hbm, self.price_ddr = price, price_ddr
  return self:fill(longest, room_hbm - h, room_ddr - d, ms)
end

--- Memory that is still left goes to the tables that gain most time a byte. Returns milliseconds.
function Knapsack:fill(longest, left_hbm, left_ddr, ms)
  local first, time, top, hbm, ddr, pick = self.first, self.time, self.longest, self.hbm, self.ddr, self.pick
  for _ = 1, self.n do
    local best, table_at, option_at = 0, -1, -1
    for t = 0, self.n - 1 do
      local now = pick[t]
      for i = first[t], first[t + 1] - 1 do
        local gain, h, d = time[now] - time[i], hbm[i] - hbm[now], ddr[i] - ddr[now]
        if gain > 0 and h <= left_hbm and d <= left_ddr and top[i] <= longest and self.hbm_shard[i] <= self.most.hbm
          and self.ddr_shard[i] <= self.most.ddr then
          local worth = gain / (math.max(h, 0) / math.max(self.room.hbm, 1) + math.max(d, 0) / math.max(self.room.ddr, 1) + 1e-12)
          if worth > best then best, table_at, option_at = worth, t, i end
        end
      end
    end
    if table_at < 0 then break end
    local now = pick[table_at]
    left_hbm, left_ddr, ms = left_hbm - hbm[option_at] + hbm[now], left_ddr - ddr[option_at] + ddr[now], ms - time[now] + time[option_at]
    pick[table_at] = option_at
  end
  return ms
end

--- A T that no plan is better than, whatever memory there is: of the table whose quickest option is the slowest.
local function slowest_table(self)
  local low = 0
  for t = 0, self.n - 1 do
    local least = math.huge
    for i = self.first[t], self.first[t + 1] - 1 do least = math.min(least, self.longest[i]) end
    low = math.max(low, least)
  end
  return low
end

--- The least T, to so many parts of a thousand, that can be had with a share of the device's memory; nil: none.
function Knapsack:shortest(share)
  local low = slowest_table(self)
  local function does(T)
    local ms = self:solve(T, share)
    return ms and ms <= T * self.ranks * (1 + 1e-9)
  end
  if low > 0 and does(low) then return low end
  local high = math.max(low, 1e-6) * 2
  while not does(high) do
    high = high * 4
    if high > 1e12 then return nil end
  end
  low = math.max(low, high / 4)
  while high / low > 1.004 do
    local middle = math.sqrt(low * high)
    if does(middle) then high = middle else low = middle end
  end
  return high
end

--- A T, to so many parts of a thousand, that no plan is better than. With any prices, what tables cost at least, less the price of all the
--- memory that there is, is no more than what any plan takes in all (the dual of the knapsack).
function Knapsack:bound()
  local low, high = slowest_table(self), self:shortest(1)
  local function impossible(T)
    self.proved = 0
    self:solve(T, 1)
    return self.proved > T * self.ranks
  end
  if not high or not impossible(low) then return low end
  while high / low > 1.004 do
    local middle = math.sqrt(low * high)
    if impossible(middle) then low = middle else high = middle end
  end
  return low
end

--- The options that were picked.
function Knapsack:proposal()
  local proposal = {}
  for t, options in ipairs(self.tables) do proposal[t] = options[self.pick[t - 1] - self.first[t - 1] + 1] end
  return proposal
end

-- -- the proposer -----------------------------------------------------------------------------------------------------------------------

local WeighingProposer = util.class "WeighingProposer"
M.WeighingProposer = WeighingProposer

local SHARES = { 1, 0.97, 0.93, 0.88, 0.8, 0.7 } -- of the device's memory
local LONGER = { 1, 1.04, 1.1, 1.25, 1.6 }       -- times the least T

--- WeighingProposer {}: options that take least time together in the memory that is there, and in less: what single ranks have is cut up.
function WeighingProposer:init(args)
  util.named("WeighingProposer", args, {})
  self.at = 1
end

function WeighingProposer:load(space)
  local tables = by_table(space)
  self.knapsack, self.at, self.least = #tables > 0 and M.knapsack(tables) or nil, 0, {}
end

function WeighingProposer:within(topology)
  if self.knapsack then self.knapsack:within(topology) end
end

function WeighingProposer:propose()
  if not (self.knapsack and self.knapsack.room) then return nil end
  while self.at < #SHARES * #LONGER do
    local share, longer = SHARES[math.floor(self.at / #LONGER) + 1], LONGER[self.at % #LONGER + 1]
    if self.least[share] == nil then self.least[share] = self.knapsack:shortest(share) or false end
    local T = self.least[share]
    if T and self.knapsack:solve(T * longer, share) then return self.knapsack:proposal() end
    self.at = self.at + 1
  end
end

function WeighingProposer:feedback() self.at = self.at + 1 end

signature.list_of("lists_of_estimates", "a list of lists of ShardingOptions with their estimates", "proposal")
signature.check("plan.weigh.", M, { knapsack = "tables: lists_of_estimates" })
kinds.methods(WeighingProposer, { load = "space: proposal, enumerator: any", propose = "", within = "topology: Topology",
  feedback = "partitionable: any, proposal: any, rating: number?, topology: any" })

return M
