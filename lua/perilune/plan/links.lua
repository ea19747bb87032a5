-- plan/links.lua: a step across hosts: what ranks compute while links work. plan/step.lua counts and prices both.
--
-- Ranks look up their tables in parts, and rows of a part set out while the next is looked up; gradients come back in
-- parts, and each is applied while the next is on its way (runtime/shard/module_batch.c). A rank that computes moves no
-- messages on. So rows leave from when their part is looked up and the ranks of other hosts are done with theirs; and
-- gradients are on their way for as long as links take, and as long as their senders apply others meanwhile.
local ffi = require "ffi"

local M = {}

local PARTS = 8 -- of a rank's tables (runtime/shard/routes.h)

--- Parts of what a rank has that take it as long each. Tables whose rows are summed within a host first are one; of
--- tables with unlike bags there are as many as of the one with most ids.
local function parts_of(c)
  local alike = c.most_ids > 0 and math.floor(c.id / c.most_ids + 1e-9) or 1
  return math.max(1, math.min(PARTS, alike, c.whole_rows + c.rank_sums + math.min(1, c.host_sums)))
end

--- When ranks are done with what takes them `ms` and cannot begin before `ready` (lists by rank). Those that share
--- processors have as much of them each.
function M.ends(topology, ready, ms)
  local n, P, ends = #ms, topology.processors, {}
  local together = topology.local_world_size * topology.hosts_sharing
  for first = 1, n, together do
    -- ranks, and what they have left to do
    local last, waiting, left, now = math.min(first + together - 1, n), {}, {}, 0
    for r = first, last do
      if last - first < P then ends[r] = ready[r] + ms[r]
      else waiting[#waiting + 1], left[r] = r, ms[r] end
    end
    while #waiting > 0 do
      local running, soonest, others = 0, math.huge, {}
      for _, r in ipairs(waiting) do running = running + (ready[r] <= now and 1 or 0) end
      local slower = math.max(1, running / P)
      for _, r in ipairs(waiting) do
        soonest = math.min(soonest, ready[r] > now and ready[r] or now + left[r] * slower)
      end
      for _, r in ipairs(waiting) do
        if ready[r] <= now and now + left[r] * slower <= soonest then ends[r] = soonest
        else
          if ready[r] <= now then left[r] = left[r] - (soonest - now) / slower end
          others[#others + 1] = r
        end
      end
      waiting, now = others, soonest
    end
  end
  return ends
end

--- Of a list by rank the largest number of the ranks of all other hosts, by host.
local function largest_elsewhere(list, hosts, per_host)
  local first, second, where, most = 0, 0, 0, {} -- the largest of a host, and of all others
  for h = 1, hosts do
    local own = 0
    for r = (h - 1) * per_host + 1, math.min(h * per_host, #list) do own = math.max(own, list[r]) end
    if own > first then first, second, where = own, first, h else second = math.max(second, own) end
  end
  for h = 1, hosts do most[h] = h == where and second or first end
  return most
end

--- Of a list by host the mean of all other hosts, by host.
local function mean_elsewhere(list)
  local sum, means = 0, {}
  for h = 1, #list do sum = sum + list[h] end
  for h = 1, #list do means[h] = (sum - list[h]) / (#list - 1) end
  return means
end

--- Bytes a millisecond of a host's link, one way: its ranks' together, whichever of them sends.
local function bandwidth(topology) return topology.inter_host_bw * topology.local_world_size end

--- Milliseconds that each rank's bytes to other hosts, and from them (arrays by rank from 0), take its host's link, the
--- slower way: all ranks of a host have those of all of them.
function M.far_ms(out, into, topology)
  local W, L = topology.world_size, topology.local_world_size
  local ms = ffi.new("double[?]", W)
  for first = 0, W - 1, L do
    local last, leave, arrive = math.min(first + L, W) - 1, 0, 0
    for r = first, last do leave, arrive = leave + out[r], arrive + into[r] end
    for r = first, last do ms[r] = math.max(leave, arrive) / bandwidth(topology) end
  end
  return ms
end

local Links = {}
Links.__index = Links

--- A link each way of every host, its ranks' together: the bytes that are before it; below 0: that it lets through at
--- once, having rested.
local function new_links(ranks, topology)
  local L = topology.local_world_size
  local self = setmetatable({ ranks = ranks, L = L, n = math.ceil(#ranks / L), out = {}, into = {},
    at = ffi.new("double[?]", L * PARTS), bytes = ffi.new("double[?]", L * PARTS) }, Links) -- of what leaves a host
  self.bandwidth, self.burst = bandwidth(topology), topology.inter_host_burst * L
  for h = 1, self.n do self.out[h], self.into[h] = 0, 0 end
  return self
end

--- The first and the last rank of a host.
function Links:ranks_of(h) return (h - 1) * self.L + 1, math.min(h * self.L, #self.ranks) end

--- What a link has before it so many milliseconds later.
function Links:later(bytes, ms) return math.max(-self.burst, bytes - ms * self.bandwidth) end

function Links:pass(ms)
  for h = 1, self.n do self.out[h], self.into[h] = self:later(self.out[h], ms), self:later(self.into[h], ms) end
end

--- Milliseconds until all links have moved what is before them.
function Links:left()
  local most = 0
  for h = 1, self.n do most = math.max(most, self.out[h], self.into[h]) end
  return most / self.bandwidth
end

--- Bytes that come to the ranks of each host, of a field of their counts; they leave the others alike.
function Links:add(field)
  local sums = {}
  for h = 1, self.n do
    sums[h] = 0
    local first, last = self:ranks_of(h)
    for r = first, last do sums[h] = sums[h] + self.ranks[r][field] end
  end
  local others = mean_elsewhere(sums)
  for h = 1, self.n do self.into[h], self.out[h] = self.into[h] + sums[h], self.out[h] + others[h] end
end

--- Bytes that leave at some time, among n that leave, in the order of their times.
function Links:leaves(n, at, bytes)
  local times, of = self.at, self.bytes
  while n > 0 and times[n - 1] > at do
    times[n], of[n] = times[n - 1], of[n - 1]
    n = n - 1
  end
  times[n], of[n] = at, bytes
end

--- Rows leave, while ranks look them up until `over`. Returns milliseconds until all is done; links are as they are
--- then.
function Links:rows(over)
  local taken, ms, bytes, moments = largest_elsewhere(over, self.n, self.L), 0, {}, {}
  for h = 1, self.n do
    local n, now, level = 0, 0, self.out[h]
    local first, last = self:ranks_of(h)
    bytes[h], moments[h] = 0, 0
    for r = first, last do
      local parts = self.ranks[r].far_out > 0 and parts_of(self.ranks[r]) or 0
      for k = 1, parts do
        local at, part = math.max(over[r] * k / parts, taken[h]), self.ranks[r].far_out / parts
        self:leaves(n, at, part)
        n, bytes[h], moments[h] = n + 1, bytes[h] + part, moments[h] + at * part
      end
      ms = math.max(ms, over[r])
    end
    for i = 0, n - 1 do level, now = self:later(level, self.at[i] - now) + self.bytes[i], self.at[i] end
    -- as if they had waited since 0
    self.out[h], ms = level + now * self.bandwidth, math.max(ms, now + level / self.bandwidth)
  end
  local others, at = mean_elsewhere(bytes), mean_elsewhere(moments)
  for h = 1, self.n do
    local mean = others[h] > 0 and at[h] / others[h] or 0
    self.out[h] = self:later(self.out[h], ms)
    self.into[h] = self:later(self:later(self.into[h], mean) + others[h], ms - mean)
  end
  return ms
end

--- Gradients come, and ranks apply them, which takes `own`. Returns milliseconds until all is done.
function Links:gradients(topology, own)
  self:add "far_back"
  local ms, arrived, ready, beside = self:left(), {}, {}, {}
  for h = 1, self.n do
    local first, last = self:ranks_of(h)
    for r = first, last do
      local parts = parts_of(self.ranks[r])
      arrived[r] = self.ranks[r].far_back > 0 and math.max(0, self.into[h]) / self.bandwidth or 0
      ready[r], beside[r] = arrived[r] / parts, own[r] * (1 - 1 / parts) -- before the last part is here
    end
  end
  local applied, senders = M.ends(topology, ready, own), largest_elsewhere(beside, self.n, self.L)
  for r = 1, #own do
    ms = math.max(ms, applied[r], arrived[r] + senders[math.ceil(r / self.L)] + own[r] / parts_of(self.ranks[r]))
  end
  self:pass(ms)
  return ms
end

local STEPS = 8 -- until links rest as they did in the step before

--- Milliseconds of a step's passes: { forward =, backward = }. ranks: counts (step.by_rank) of several hosts; compute:
--- by pass { before = what all ranks do when nothing is on its way, own = a list by rank: what they look up, or apply
--- }.
function M.passes(ranks, topology, compute)
  local links, nothing, ms = new_links(ranks, topology), {}, {}
  for r = 1, #ranks do nothing[r] = 0 end
  local looked_up = M.ends(topology, nothing, compute.forward.own)
  for _ = 1, links.burst > 0 and STEPS or 1 do
    links:add "far_ids"
    local ids = links:left()
    links:pass(ids + compute.forward.before)
    ms.forward = ids + compute.forward.before + links:rows(looked_up)
    ms.backward = links:gradients(topology, compute.backward.own) + compute.backward.before
    links:pass(compute.backward.before)
  end
  return ms
end

return M
