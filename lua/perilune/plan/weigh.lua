-- plan/weigh.lua: options of tables weighed against the memory that is left: a knapsack.
--
-- Wanted is the least T such that every table has an option none of whose shards takes longer than T, all shards
-- together take no longer than T on each rank, and all fit into the memory of all ranks together. Memory gets a price,
-- milliseconds a byte for each kind; every table then takes the option that costs it least, time and memory together,
-- and prices rise until what is taken fits. That shards find places on single ranks is not known here: the proposer
-- asks for less memory than there is, too, and for a T that is longer.
--
-- One thing about single ranks is known: of a table that is cut over all ranks, each rank has a shard. What these take
-- of every rank's time and memory, shards of other tables do not have. So the tables that find no room beside them are
-- cut over all ranks too, and so on until the others have room (solve_wide). How they share their memory and time is
-- tried by several prices.
local ffi = require "ffi"
local util = require "perilune.util"
local signature = require "perilune.signature"
local kinds = require "perilune.plan.kinds"
local by_table = require("perilune.plan.pack").by_table

local M = {}

local doubles, ints = ffi.typeof "double[?]", ffi.typeof "int32_t[?]"

-- -- the knapsack -----------------------------------------------------------------------------------------------------

local NEAR = 1.01       -- times the least price: near enough
local VERY_NEAR = 1.001 -- to prove what no plan is better than
local FIRST_STEP = 1.05 -- times a price, to find others above and below it; each step is the last one's square
local HIGHEST = 1e15    -- times the first price: nothing fits

local Knapsack = {}
Knapsack.__index = Knapsack

--- The least time of a shard of an option, and the least bytes.
local function shortest_of(option)
  local time, hbm, ddr = math.huge, math.huge, math.huge
  for _, run in ipairs(option.runs) do
    local s = run.storage
    time, hbm, ddr = math.min(time, run.perf.total), math.min(hbm, s.hbm), math.min(ddr, s.ddr)
  end
  return time, hbm, ddr
end

--- So many numbers for each name.
local function rows_of(count, ...)
  local rows = {}
  for _, name in ipairs { ... } do rows[name] = doubles(count) end
  return rows
end

--- Of tables: a list of lists of options.
function M.knapsack(tables)
  local n, count = #tables, 0
  for _, options in ipairs(tables) do count = count + #options end
  local k = setmetatable(rows_of(count, "time", "longest", "hbm", "ddr", "hbm_shard", "ddr_shard"), Knapsack)
  k.tables, k.n, k.first, k.shards, k.pick, k.forced = tables, n, ints(n + 1), ints(count), ints(n), ints(n)
  k.short, k.left = rows_of(count, "time", "hbm", "ddr"), rows_of(count, "time", "hbm", "ddr")
  k.left.first, k.left.option = ints(n + 1), ints(count)
  k.near, k.near_hbm, k.near_ddr = NEAR, 1e-9, 1e-9
  local at = 0
  for t, options in ipairs(tables) do
    k.first[t - 1] = at
    for _, o in ipairs(options) do
      k.time[at], k.longest[at] = o.total_perf, o.max_perf
      k.hbm[at], k.ddr[at] = o.total_storage.hbm, o.total_storage.ddr
      k.short.time[at], k.short.hbm[at], k.short.ddr[at] = shortest_of(o)
      k.hbm_shard[at], k.ddr_shard[at], k.shards[at] = o.max_storage.hbm, o.max_storage.ddr, o.num_shards
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
  self.wide = self.ranks > 1 and self:wide_prices() or {}
end

--- Whether an option can be picked where no rank may work longer than `longest`: its largest shard has room on a rank.
--- A rank has its shard of each table that is cut over all ranks, whatever else it has: what those take (`beside`) is
--- gone for all other options.
function Knapsack:may(i, longest)
  local beside = self.beside
  local time, hbm, ddr = self.longest[i], self.hbm_shard[i], self.ddr_shard[i]
  if self.shards[i] < self.ranks then time, hbm, ddr = time + beside.time, hbm + beside.hbm, ddr + beside.ddr end
  return time <= longest and hbm <= self.most.hbm and ddr <= self.most.ddr
end

--- Leave only what can be picked where no rank may work longer than `longest`: milliseconds and bytes of it lie in rows
--- of their own, which `take` goes through often. Returns whether every table has an option left.
function Knapsack:narrow(longest)
  local k, at = self.left, 0
  for t = 0, self.n - 1 do
    k.first[t] = at
    for i = self.first[t], self.first[t + 1] - 1 do
      if self.forced[t] == i or self.forced[t] < 0 and self:may(i, longest) then
        k.option[at], k.time[at], k.hbm[at], k.ddr[at] = i, self.time[i], self.hbm[i], self.ddr[i]
        at = at + 1
      end
    end
    if at == k.first[t] then return false end
  end
  k.first[self.n] = at
  return true
end

--- Every table takes the option that costs least at these prices, of those that are left. Returns milliseconds and
--- bytes of what was taken (self.pick).
function Knapsack:take(price_hbm, price_ddr)
  local first, time, hbm, ddr, option, pick = self.left.first, self.left.time, self.left.hbm, self.left.ddr,
    self.left.option, self.pick
  local ms, h, d = 0, 0, 0
  for t = 0, self.n - 1 do
    local least, at = math.huge, -1
    for i = first[t], first[t + 1] - 1 do
      local cost = time[i] + price_hbm * hbm[i] + price_ddr * ddr[i]
      if cost < least then least, at = cost, i end
    end
    pick[t], ms, h, d = option[at], ms + time[at], h + hbm[at], d + ddr[at]
  end
  self.proved = math.max(self.proved, ms + price_hbm * (h - self.room.hbm) + price_ddr * (d - self.room.ddr))
  return ms, h, d
end

--- The least price for which take(price) fits: fits(...) of what take returns. `start`: a price to begin with. Returns
--- it, and what take then returned. nil: none does.
local function least_price(start, near, take, fits)
  local x, y, z = take(0)
  if fits(x, y, z) then return 0, x, y, z end
  local low, high, step = 0, start, FIRST_STEP
  x, y, z = take(high)
  if fits(x, y, z) then
    low = high / step
    local a, b, c = take(low)
    while fits(a, b, c) do
      high, x, y, z, step = low, a, b, c, step * step
      low = high / step
      a, b, c = take(low)
    end
  else
    while not fits(x, y, z) do
      low, high, step = high, high * step, math.min(step * step, 64)
      if high > start * HIGHEST then return nil end
      x, y, z = take(high)
    end
  end
  while high / low > near do
    local middle = math.sqrt(low * high)
    local a, b, c = take(middle)
    if fits(a, b, c) then high, x, y, z = middle, a, b, c else low = middle end
  end
  return high, x, y, z
end

--- Whether what is left can fit: what takes least of one kind of memory, of the other, or of both in parts, does.
function Knapsack:can_fit(room_hbm, room_ddr)
  local first, hbm, ddr = self.left.first, self.left.hbm, self.left.ddr
  for part = 0, 1, 0.25 do
    local a, b, sum = (1 - part) / math.max(room_hbm, 1), part / math.max(room_ddr, 1), 0
    for t = 0, self.n - 1 do
      local least = math.huge
      for i = first[t], first[t + 1] - 1 do least = math.min(least, a * hbm[i] + b * ddr[i]) end
      sum = sum + least
    end
    if sum > 1 + 1e-9 then return false end
  end
  return true
end

--- As solve, beside what is said to be on all ranks.
function Knapsack:solve_beside(longest, share)
  local room_hbm, room_ddr = self.room.hbm * share, self.room.ddr
  if not (self:narrow(longest) and self:can_fit(room_hbm, room_ddr)) then
    self.proved = math.huge
    return nil
  end
  local near_hbm, near_ddr = self.near_hbm, self.near_ddr
  local function by_hbm(price_ddr)
    local price, x, y, z = least_price(near_hbm, self.near, function(p) return self:take(p, price_ddr) end,
      function(_, h) return h <= room_hbm end)
    if price and price > 0 then near_hbm = price end
    return price, x, y, z
  end
  local price, _, _, needed = by_hbm(0)
  local price_ddr = 0
  if not price or needed > room_ddr then
    price_ddr = least_price(near_ddr, self.near, function(p)
      local found, x, y, z = by_hbm(p)
      if found then price = found else x, y, z = self:take(p, p) end
      return x, y, z
    end, function(_, y, z) return y <= room_hbm and z <= room_ddr end)
    if not price_ddr then return nil end
    price = (by_hbm(price_ddr))
    if not price then return nil end
  end
  local ms, h, d = self:take(price, price_ddr)
  self.price_hbm, self.price_ddr, self.near_hbm, self.near_ddr = price, price_ddr, near_hbm, price_ddr > 0
    and price_ddr or near_ddr
  return self:fill(room_hbm - h, room_ddr - d, ms)
end

--- What each rank has of the tables that are picked cut over all ranks.
function Knapsack:everywhere()
  local time, hbm, ddr = 0, 0, 0
  for t = 0, self.n - 1 do
    local i = self.pick[t]
    if self.shards[i] >= self.ranks then time, hbm, ddr = time + self.time[i], hbm + self.hbm[i], ddr + self.ddr[i] end
  end
  return { time = time / self.ranks, hbm = hbm / self.ranks, ddr = ddr / self.ranks }
end

--- Tables that have room nowhere but cut over all ranks, beside what is so already: each takes the option that costs it
--- least, time and the device's memory at this price. self.forced is their options then, and `beside` has what these
--- take. Returns how many there are; nil: one of them has no room at all.
function Knapsack:force(longest, price)
  local count, time, hbm, ddr = 0, 0, 0, 0
  for t = 0, self.n - 1 do
    local alone, least, at = false, math.huge, -1
    for i = self.first[t], self.first[t + 1] - 1 do
      if self:may(i, longest) then
        local cost = self.time[i] + price * self.hbm[i]
        if self.shards[i] < self.ranks then alone = true elseif cost < least then least, at = cost, i end
      end
    end
    self.forced[t] = -1
    if not alone then
      if at < 0 then return nil end
      self.forced[t], count = at, count + 1
      time, hbm, ddr = time + self.time[at], hbm + self.hbm[at], ddr + self.ddr[at]
    end
  end
  self:reserve(time / self.ranks, hbm / self.ranks, ddr / self.ranks)
  return count
end

--- So much of each rank, or more, is taken by tables that are cut over all ranks.
function Knapsack:reserve(time, hbm, ddr)
  local beside = self.beside
  self.beside = { time = math.max(beside.time, time), hbm = math.max(beside.hbm, hbm), ddr = math.max(beside.ddr, ddr) }
end

--- Whether all picks have room beside those that are cut over all ranks; what those take is `beside` then.
function Knapsack:is_consistent(longest)
  local before = self.beside
  self.beside = self:everywhere()
  local right = true
  for t = 0, self.n - 1 do right = right and self:may(self.pick[t], longest) end
  if not right then self.beside = before end
  return right
end

local ROUNDS = 6

--- As solve, where tables that have room nowhere but cut over all ranks pay this price for the device's memory. More
--- tables are cut so, round by round, until the others have room beside them. tried: options of such tables that were
--- tried.
function Knapsack:solve_wide(longest, share, price, tried)
  self.beside = { time = 0, hbm = 0, ddr = 0 }
  for _ = 1, ROUNDS do
    local before, count = -1, 0
    while count ~= before do
      before, count = count, self:force(longest, price)
      if not count then return nil end
    end
    local key = ffi.string(self.forced, ffi.sizeof "int32_t" * self.n)
    if count == 0 or tried[key] then return nil end
    tried[key] = true
    local ms = self:solve_beside(longest, share)
    if not ms then return nil end
    if self:is_consistent(longest) then return ms end
    local now = self:everywhere()
    self:reserve(now.time, now.hbm, now.ddr)
  end
end

--- The picks whose shards take no longer than `longest`, that fit into `share` of the device's memory and all of the
--- host's, and take least time; its milliseconds. nil: there are none.
function Knapsack:solve(longest, share)
  self.beside = { time = 0, hbm = 0, ddr = 0 }
  for t = 0, self.n - 1 do self.forced[t] = -1 end
  return self:solve_beside(longest, share)
end

--- All ways to pick: as solve, then by several prices for tables that must be cut over all ranks. f(milliseconds,
--- whether all picks have room beside what is cut over all ranks, whether it is by such a price) is called for each
--- until it returns true. Returns whether it did.
function Knapsack:each(longest, share, f)
  local tried = {}
  local ms = self:solve(longest, share)
  if ms and f(ms, self:is_consistent(longest), false) then return true end
  for _, price in ipairs(self.wide) do
    ms = self:solve_wide(longest, share, price, tried)
    if ms and f(ms, true, true) then return true end
  end
  return false
end

local PRICES = 8

--- Prices of memory for tables that are cut over all ranks: from one at which none saves memory to one at which all do,
--- each with as many bytes between it and the next.
function Knapsack:wide_prices()
  local list, all, prices = {}, 0, { 0 }
  for t = 0, self.n - 1 do
    for i = self.first[t], self.first[t + 1] - 1 do
      for j = self.first[t], self.first[t + 1] - 1 do
        local saved, longer = self.hbm[i] - self.hbm[j], self.time[j] - self.time[i]
        if self.shards[i] >= self.ranks and self.shards[j] >= self.ranks and saved > 0 and longer > 0 then
          list[#list + 1], all = { longer / saved, saved }, all + saved
        end
      end
    end
  end
  table.sort(list, function(a, b) return a[1] < b[1] end)
  local so_far = 0
  for _, x in ipairs(list) do
    so_far = so_far + x[2]
    if so_far * PRICES >= #prices * all and x[1] > prices[#prices] then prices[#prices + 1] = x[1] * (1 + 1e-9) end
  end
  return prices
end

--- Memory that is still left goes to the tables that gain most time a byte. Returns milliseconds.
function Knapsack:fill(left_hbm, left_ddr, ms)
  local k, time, hbm, ddr, pick = self.left, self.time, self.hbm, self.ddr, self.pick
  for _ = 1, self.n do
    local best, table_at, option_at = 0, -1, -1
    for t = 0, self.n - 1 do
      local now = pick[t]
      for at = k.first[t], k.first[t + 1] - 1 do
        local gain, h, d = time[now] - k.time[at], k.hbm[at] - hbm[now], k.ddr[at] - ddr[now]
        if gain > 0 and h <= left_hbm and d <= left_ddr then
          local worth = gain / (math.max(h, 0) / math.max(self.room.hbm, 1) + math.max(d, 0) / math.max(self.room.ddr,
            1) + 1e-12)
          if worth > best then best, table_at, option_at = worth, t, k.option[at] end
        end
      end
    end
    if table_at < 0 then break end
    local now = pick[table_at]
    left_hbm, left_ddr, ms = left_hbm - hbm[option_at] + hbm[now], left_ddr - ddr[option_at] + ddr[now], ms - time[now]
      + time[option_at]
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

--- The least T, to so many parts of a thousand, that can be had with a share of the device's memory: by picks that have
--- room beside what is cut over all ranks, or, where no such picks are found, by any. nil: none.
function Knapsack:shortest(share)
  local low, beside = slowest_table(self), true
  local function does(T)
    return self:each(T, share, function(ms, right)
      return (right or not beside) and ms <= T * self.ranks * (1 + 1e-9)
    end)
  end
  if low > 0 and does(low) then return low end
  local start = math.max(low, 1e-6) * 2
  local high = start
  while not does(high) do
    high = high * 4
    if high > 1e12 then
      if not beside then return nil end
      high, beside = start, false
    end
  end
  low = math.max(low, high / 4)
  while high / low > 1.004 do
    local middle = math.sqrt(low * high)
    if does(middle) then high = middle else low = middle end
  end
  return high
end

--- What each rank has, whatever plan it is of, where no rank may work longer than `longest`: of each table that has
--- room nowhere but cut over all ranks, the least time and the least bytes of a shard. `beside` is that then. Returns
--- whether all tables have room.
function Knapsack:least_everywhere(longest)
  local short, before = self.short, -1
  self.beside = { time = 0, hbm = 0, ddr = 0 }
  while self.beside.time > before do
    local sum = { time = 0, hbm = 0, ddr = 0 }
    before = self.beside.time
    for t = 0, self.n - 1 do
      local alone, time, hbm, ddr = false, math.huge, math.huge, math.huge
      for i = self.first[t], self.first[t + 1] - 1 do
        if self:may(i, longest) then
          alone = alone or self.shards[i] < self.ranks
          time, hbm, ddr = math.min(time, short.time[i]), math.min(hbm, short.hbm[i]), math.min(ddr, short.ddr[i])
        end
      end
      if time == math.huge then return false end
      if not alone then sum.time, sum.hbm, sum.ddr = sum.time + time, sum.hbm + hbm, sum.ddr + ddr end
    end
    self.beside = sum
  end
  return true
end

--- A T, to so many parts of a thousand, that no plan is better than. With any prices, what tables cost at least, less
--- the price of all the memory that there is, is no more than what any plan takes in all (the dual of the knapsack).
function Knapsack:bound()
  local low, high = slowest_table(self), self:shortest(1)
  for t = 0, self.n - 1 do self.forced[t] = -1 end
  local function impossible(T)
    self.proved = 0
    if not self:least_everywhere(T) then return true end
    self.near = VERY_NEAR
    self:solve_beside(T, 1)
    self.near = NEAR
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

-- -- the proposer -----------------------------------------------------------------------------------------------------

local WeighingProposer = util.class "WeighingProposer"
M.WeighingProposer = WeighingProposer

local SHARES = { 1, 0.97, 0.93, 0.88, 0.8, 0.7 } -- of the device's memory
local LONGER = { 1, 1.04, 1.1, 1.25, 1.6 }       -- times the least T

--- WeighingProposer {}: options that take least time together in the memory that is there, and in less: what single
--- ranks have is cut up.
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
    local proposal
    if T then
      self.knapsack:each(T * longer, share, function(_, right)
        proposal = self.knapsack:proposal()
        return right
      end)
    end
    if proposal then return proposal end
    self.at = self.at + 1
  end
end

function WeighingProposer:feedback() self.at = self.at + 1 end

signature.list_of("lists_of_estimates", "a list of lists of ShardingOptions with their estimates", "proposal")
signature.check("plan.weigh.", M, { knapsack = "tables: lists_of_estimates" })
kinds.methods(WeighingProposer, { load = "space: proposal, enumerator: any", propose = "",
  within = "topology: Topology", feedback = "partitionable: any, proposal: any, rating: number?, topology: any" })

return M
