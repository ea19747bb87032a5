-- plan/pack.lua: options and places of tables chosen together, where what a rank takes is the sum of what its shards
-- take.
--
-- Partitioners place a proposal: they cannot take another option for a table that finds no room. Here tables come one
-- after the other, the largest first, and each takes the option that costs it least (time, and memory at its price,
-- weigh.lua) of those that find ranks where no shard makes a rank work longer than T; if none does, T is made longer.
-- Then the rank that works longest is relieved, as long as that is possible: a table of it moves, takes another option,
-- or changes places with another one.
local ffi = require "ffi"
local util = require "perilune.util"
local sharding_types = require "perilune.plan.sharding_types"

local M = {}

--- The options of each table, tables in the order of their first options.
function M.by_table(space)
  local list, at = {}, {}
  for _, option in ipairs(space) do
    if not at[option.fqn] then
      list[#list + 1] = {}
      at[option.fqn] = list[#list]
    end
    table.insert(at[option.fqn], option)
  end
  return list
end

local doubles, ints = ffi.typeof "double[?]", ffi.typeof "int32_t[?]"

local ASKED = 30 -- ranks that can be looked at while an option is asked for its places at all
local RANK = 0.25 -- of one of many ranks in a row, whose numbers lie in arrays

--- What is asked of all ranks, and what they have. work counts ranks that were looked at.
local Packing = {}
Packing.__index = Packing

--- Tables: a list of lists of options.
function M.new(tables, topology)
  local W = topology.world_size
  local self = setmetatable({ tables = tables, W = W, group = topology.intra_group_size, work = 0, time = doubles(W),
    hbm = doubles(W), ddr = doubles(W), ssd = doubles(W),
    caps = { hbm = doubles(W), ddr = doubles(W), ssd = doubles(W) }, option = {}, ranks = {}, mark = ints(W), stamp = 0,
    extra = doubles(W) }, Packing)
  for r, device in ipairs(topology.devices) do
    for tier, cap in util.ordered(self.caps) do cap[r - 1] = device[tier] end
  end
  return self
end

function Packing:clear()
  for r = 0, self.W - 1 do
    self.time[r], self.hbm[r], self.ddr[r], self.ssd[r] = 0, self.caps.hbm[r], self.caps.ddr[r], self.caps.ssd[r]
  end
  for t = 1, #self.tables do self.option[t], self.ranks[t] = nil, nil end
end

--- Whether rank r has room for a shard.
function Packing:fits(r, s) return s.hbm <= self.hbm[r] and s.ddr <= self.ddr[r] and s.ssd <= self.ssd[r] end

function Packing:add(r, run, sign)
  local s = run.storage
  self.time[r] = self.time[r] + sign * run.perf.total
  self.hbm[r], self.ddr[r], self.ssd[r] = self.hbm[r] - sign * s.hbm, self.ddr[r] - sign * s.ddr,
    self.ssd[r] - sign * s.ssd
end

--- Table t has this option on these ranks (true: shard k on rank k).
function Packing:put(t, option, ranks, sign)
  local k = 0
  for _, run in ipairs(option.runs) do
    for _ = 1, run.n do
      k = k + 1
      self:add(ranks == true and k - 1 or ranks[k], run, sign)
    end
  end
  self.work = self.work + RANK * k
  if sign > 0 then self.option[t], self.ranks[t] = option, ranks else self.option[t], self.ranks[t] = nil, nil end
end

-- -- places for one option --------------------------------------------------------------------------------------------

--- How a rank is chosen among those that take a shard: the one that works least; the one of whose time and memory less
--- is gone; the one with least memory left.
local ways = {
  time = function(self, r, run) return self.time[r] + run.perf.total end,
  both = function(self, r, run)
    local hbm, ddr = self.caps.hbm[r], self.caps.ddr[r]
    return math.max((self.time[r] + run.perf.total) / self.limit, hbm > 0 and 1 - (self.hbm[r] - run.storage.hbm) / hbm
      or 0, ddr > 0 and 1 - (self.ddr[r] - run.storage.ddr) / ddr or 0)
  end,
}
M.ways = { "both", "time" }

--- Ranks of shards that each go anywhere, no two on one rank; nil: there are none where no rank works longer than
--- `limit`. And the longest that one of these works then.
function Packing:places_on_devices(option, limit)
  local way, mark, ranks, longest = ways[self.way], self.mark, {}, 0
  self.stamp = self.stamp + 1
  local stamp, alone = self.stamp, option.num_shards > self.W
  if alone then return nil end
  for _, run in ipairs(option.runs) do
    local s, ms = run.storage, run.perf.total
    for _ = 1, run.n do
      local least, at = math.huge, -1
      for r = 0, self.W - 1 do
        if mark[r] ~= stamp and self.time[r] + ms <= limit and s.hbm <= self.hbm[r] and s.ddr <= self.ddr[r]
          and s.ssd <= self.ssd[r] then
          local x = way(self, r, run)
          if x < least then least, at = x, r end
        end
      end
      self.work = self.work + RANK * self.W
      if at < 0 then return nil end
      mark[at] = stamp
      ranks[#ranks + 1] = at
      longest = math.max(longest, self.time[at] + ms)
    end
  end
  return ranks, longest
end

function Packing:places_everywhere(option, limit)
  local k, longest = 0, 0
  for _, run in ipairs(option.runs) do
    local s, ms = run.storage, run.perf.total
    for _ = 1, run.n do
      if self.time[k] + ms > limit or not self:fits(k, s) then return nil end
      longest = math.max(longest, self.time[k] + ms)
      k = k + 1
    end
  end
  self.work = self.work + RANK * k
  if k ~= self.W then return nil end
  return true, longest
end

--- A block of shards on the group of ranks from `first` on, shard k of it on the group's rank k. Returns the longest;
--- nil: no room.
function Packing:block(shards, from, first, limit)
  local longest = 0
  for k = 0, self.group - 1 do
    local run = shards[from + k]
    local ms = self.time[first + k] + run.perf.total
    if ms > limit or not self:fits(first + k, run.storage) then return nil end
    longest = math.max(longest, ms)
  end
  return longest
end

--- Blocks of shards, each on a group of its own.
function Packing:places_on_groups(option, limit)
  local shards, ranks, longest, taken = {}, {}, 0, {}
  for _, run in ipairs(option.runs) do
    for _ = 1, run.n do shards[#shards + 1] = run end
  end
  local G = self.group
  if #shards % G ~= 0 or #shards > self.W then return nil end
  for from = 1, #shards, G do
    local least, at = math.huge, nil
    for first = 0, self.W - G, G do
      local ms = not taken[first] and self:block(shards, from, first, limit)
      if ms and ms < least then least, at = ms, first end
    end
    self.work = self.work + RANK * self.W
    if not at then return nil end
    taken[at], longest = true, math.max(longest, least)
    for k = 0, G - 1 do ranks[#ranks + 1] = at + k end
  end
  return ranks, longest
end

--- Shards on any ranks of one group.
function Packing:places_in_group(option, limit)
  local G, best, least = self.group, nil, math.huge
  if option.num_shards > G then return nil end
  for first = 0, self.W - G, G do
    local ranks, longest, used = {}, 0, {}
    for _, run in ipairs(option.runs) do
      for _ = 1, run.n do
        local soonest, at = math.huge, nil
        for r = first, first + G - 1 do
          local ms = self.time[r] + run.perf.total
          if ms < soonest and ms <= limit and not used[r] and self:fits(r, run.storage) then soonest, at = ms, r end
        end
        if not at then
          longest = math.huge
          break
        end
        used[at], ranks[#ranks + 1], longest = true, at, math.max(longest, soonest)
      end
    end
    if longest < least then best, least = ranks, longest end
  end
  self.work = self.work + RANK * self.W
  return best, least
end

--- Ranks for an option of a table that is on none, and the longest that one of these works then; nil: none where that
--- is `limit` at most.
function Packing:places(option, limit)
  local by = option.partition_by
  self.work = self.work + ASKED
  if by == "uniform" then return self:places_everywhere(option, limit) end
  if by == "device" then return self:places_on_devices(option, limit) end
  if by == "host" and not sharding_types.of[option.sharding_type].cuts_rows then
    return self:places_in_group(option, limit)
  end
  return self:places_on_groups(option, limit)
end

-- -- one after the other ----------------------------------------------------------------------------------------------

--- Put all tables. order: numbers of tables; sorted[t]: options of table t from the cheapest. Returns whether all found
--- places; if not, which table did not.
function Packing:fill(order, sorted, limit, way)
  self:clear()
  self.limit, self.way = limit, way
  for _, t in ipairs(order) do
    local found
    for _, option in ipairs(sorted[t]) do
      if option.max_perf <= limit then
        found = self:places(option, limit)
        if found then
          self:put(t, option, found, 1)
          break
        end
      end
    end
    if not found then return false, t end
  end
  return true
end

-- -- relief of the rank that works longest ----------------------------------------------------------------------------

function Packing:longest()
  local most, at = -1, 0
  for r = 0, self.W - 1 do
    if self.time[r] > most then most, at = self.time[r], r end
  end
  return most, at
end

--- The tables with a shard on rank r: those that go to all ranks last.
function Packing:tables_on(r)
  local list, everywhere = {}, {}
  for t = 1, #self.tables do
    local ranks = self.ranks[t]
    if ranks == true then everywhere[#everywhere + 1] = t
    else
      for _, rank in ipairs(ranks) do
        if rank == r then
          list[#list + 1] = t
          break
        end
      end
    end
  end
  for _, t in ipairs(everywhere) do list[#list + 1] = t end
  return list
end

local BETTER = 1 - 1e-6

--- Another option, or other places, for a table of rank r, with which no rank of its works as long as r does now: of
--- all such, the one with which all ranks together work least. True: it was found.
function Packing:replace(r, now, list)
  local best, cost = nil, math.huge
  for _, t in ipairs(list) do
    local option, ranks = self.option[t], self.ranks[t]
    self:put(t, option, ranks, -1)
    local all_less = ranks ~= true or self:longest() < now * BETTER
    for _, other in ipairs(all_less and self.tables[t] or {}) do
      if other.max_perf < now * BETTER then
        local found, longest = self:places(other, now * BETTER)
        local extra = found and (other.total_perf - option.total_perf) + 1e-3 * longest or math.huge
        if extra < cost then best, cost = { t, other, found }, extra end
      end
    end
    self:put(t, option, ranks, 1)
  end
  if not best then return false end
  self:put(best[1], self.option[best[1]], self.ranks[best[1]], -1)
  self:put(best[1], best[2], best[3], 1)
  return true
end

--- Whether a table has one shard, which any rank may have.
function Packing:is_single(t)
  return self.ranks[t] ~= true and self.option[t].num_shards == 1 and self.option[t].partition_by == "device"
end

--- Single shards of two tables change ranks: one of rank r with a shorter one of another rank.
function Packing:exchange(r, now, list)
  local singles = {} -- of other ranks
  for t = 1, #self.tables do
    if self:is_single(t) and self.ranks[t][1] ~= r then singles[#singles + 1] = t end
  end
  for _, t in ipairs(list) do
    local a, mine = self.option[t], self.ranks[t]
    if self:is_single(t) then
      local x = a.runs[1]
      self.work = self.work + #singles
      for _, o in ipairs(singles) do
        local there, y = self.ranks[o][1], self.option[o].runs[1]
        local more = x.perf.total - y.perf.total
        if more > 0 and self.time[there] + more < now * BETTER then
          local s, u = x.storage, y.storage
          if s.hbm - u.hbm <= self.hbm[there] and u.hbm - s.hbm <= self.hbm[r] and s.ddr - u.ddr <= self.ddr[there]
            and u.ddr - s.ddr <= self.ddr[r] and s.ssd - u.ssd <= self.ssd[there] and u.ssd - s.ssd <= self.ssd[r] then
            local b = self.option[o]
            self:put(t, a, mine, -1)
            self:put(o, b, { there }, -1)
            self:put(t, a, { there }, 1)
            self:put(o, b, { r }, 1)
            return true
          end
        end
      end
    end
  end
  return false
end

--- A table of rank r takes an option that another table makes room for, by an option of its own.
function Packing:make_room(r, now, list, most)
  local limit = now * BETTER
  for _, t in ipairs(list) do
    local option, ranks = self.option[t], self.ranks[t]
    self:put(t, option, ranks, -1)
    for _, other in ipairs(ranks ~= true and self.tables[t] or {}) do
      local run = other.runs[1]
      if other.num_shards == 1 and other.partition_by == "device" and other.max_perf < limit then
        for q = 0, self.W - 1 do
          if self.work > most then break end
          local ms = self.time[q] + run.perf.total
          if ms < limit and not self:fits(q, run.storage) then
            for _, o in ipairs(self:singles_on(q)) do
              local b = self.option[o]
              self:put(o, b, { q }, -1)
              local smaller
              for _, c in ipairs(self:fits(q, run.storage) and self.tables[o] or {}) do
                self:add(q, run, 1)
                local found = c.max_perf < limit and self:places(c, limit)
                self:add(q, run, -1)
                if found then
                  smaller = { c, found }
                  break
                end
              end
              if smaller then
                self:put(o, smaller[1], smaller[2], 1)
                self:put(t, other, { q }, 1)
                return true
              end
              self:put(o, b, { q }, 1)
            end
          end
        end
      end
    end
    self:put(t, option, ranks, 1)
  end
  return false
end

--- Tables whose only shard is on rank q.
function Packing:singles_on(q)
  local list = {}
  for t = 1, #self.tables do
    local ranks = self.ranks[t]
    if ranks and ranks ~= true and #ranks == 1 and ranks[1] == q then list[#list + 1] = t end
  end
  self.work = self.work + #self.tables / 8
  return list
end

--- Relieve the rank that works longest until that cannot be done, or `most` work is.
function Packing:relieve(most)
  self.way = "time"
  while self.work < most do
    local now, r = self:longest()
    self.limit = now
    local list = self:tables_on(r)
    self.work = self.work + #self.tables
    if not (self:replace(r, now, list) or self:exchange(r, now, list) or self:make_room(r, now, list, most)) then
      return
    end
  end
end

--- What is put now: a proposal, its placement, and the longest that a rank works.
function Packing:result()
  local proposal, placement = {}, {}
  for t = 1, #self.tables do
    proposal[t] = self.option[t]
    placement[t] = self.ranks[t] == true or { unpack(self.ranks[t]) }
  end
  return { proposal = proposal, placement = placement, rating = (self:longest()) }
end

return M
