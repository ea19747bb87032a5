-- plan/places.lua: shards moved between ranks, and exchanged, while that makes a plan better. Partitioners place shards
-- one after the other by what each takes alone; what ranks and links have together is only known of a whole plan.
local topologies = require "perilune.plan.topology"

local M = {}

local BETTER = 1 - 1e-9

--- Shards that may be moved, those that take longest first: { option = position, shard = number, run = }.
local function movable(proposal, placement)
  local list = {}
  for i, option in ipairs(proposal) do
    local k = 0
    for _, run in ipairs(option.partition_by == "device" and placement[i] ~= true and option.runs or {}) do
      for _ = 1, run.n do
        k = k + 1
        list[#list + 1] = { option = i, shard = k, run = run }
      end
    end
  end
  table.sort(list, function(a, b)
    if a.run.perf.total ~= b.run.perf.total then return a.run.perf.total > b.run.perf.total end
    if a.option ~= b.option then return a.option < b.option end
    return a.shard < b.shard
  end)
  return list
end

--- Bytes that each rank has left, by tier: lists by rank.
local function room_of(proposal, placement, topology)
  local room = {}
  for _, tier in ipairs(topologies.tiers) do
    room[tier] = {}
    for r, device in ipairs(topology.devices) do room[tier][r] = device[tier] end
  end
  for i, option in ipairs(proposal) do
    local k = 0
    for _, run in ipairs(option.runs) do
      for _ = 1, run.n do
        k = k + 1
        local r = placement[i] == true and k or placement[i][k] + 1
        for _, tier in ipairs(topologies.tiers) do room[tier][r] = room[tier][r] - run.storage[tier] end
      end
    end
  end
  return room
end

--- Whether rank r (from 1) has room for a run's shard once another's left it.
local function fits(room, r, run, leaving)
  for _, tier in ipairs(topologies.tiers) do
    if room[tier][r] + (leaving and leaving.storage[tier] or 0) < run.storage[tier] then return false end
  end
  return true
end

--- A better placement of a proposal, or the same, and its rating. rate(placement) is the rating of one; topology: what
--- may be used of the machine; most: ratings at most. Returns also how many there were. Ranks that two shards of a
--- table share are not made.
function M.improve(proposal, placement, rating, rate, topology, most)
  local at, list, ratings = {}, movable(proposal, placement), 0
  for i, ranks in ipairs(placement) do at[i] = ranks == true and true or { unpack(ranks) } end
  local room = room_of(proposal, at, topology)
  local function rank_of(s) return at[s.option][s.shard] + 1 end
  local function put(s, r)
    local from = rank_of(s)
    for _, tier in ipairs(topologies.tiers) do
      room[tier][from], room[tier][r] = room[tier][from] + s.run.storage[tier], room[tier][r] - s.run.storage[tier]
    end
    at[s.option][s.shard] = r - 1
  end
  local function free(s, r) -- of shards of the same table
    for k, other in ipairs(at[s.option]) do
      if k ~= s.shard and other == r - 1 then return false end
    end
    return true
  end
  local function better()
    ratings = ratings + 1
    local found = rate(at)
    if found < rating * BETTER then
      rating = found
      return true
    end
    return false
  end
  local improved = true
  while improved and ratings < most do
    improved = false
    for i, s in ipairs(list) do
      for r = 1, topology.world_size do
        local from = rank_of(s)
        if r ~= from and ratings < most and free(s, r) and fits(room, r, s.run) then
          put(s, r)
          if better() then improved = true else put(s, from) end
        end
      end
      for j = i + 1, #list do
        local o = list[j]
        local here, there = rank_of(s), rank_of(o)
        if here ~= there and ratings < most and o.option ~= s.option and free(s, there) and free(o, here)
          and fits(room, there, s.run, o.run) and fits(room, here, o.run, s.run) then
          put(s, there)
          put(o, here)
          if better() then improved = true
          else
            put(s, here)
            put(o, there)
          end
        end
      end
    end
  end
  return at, rating, ratings
end

return M
