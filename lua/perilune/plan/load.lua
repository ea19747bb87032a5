-- plan/load.lua: what ranks have left and what they have to do, while a plan is put together; and a heap of ranks, the
-- least busy first.
local ffi = require "ffi"
local util = require "perilune.util"

local M = {}

local fields = { "hbm", "ddr", "ssd", "fwd_compute", "bwd_compute", "fwd_comms", "bwd_comms", "prefetch", "total" }
local doubles = ffi.typeof "double[?]"

local Load = util.class "Load"
M.Load = Load

--- Of all ranks of a topology. Storage: bytes that are left; times: milliseconds so far. `most`: no rank has more than
--- this of its own memory. topology.rules: of relations (relations.lua), or nil.
function Load:init(topology, most)
  local n = topology.world_size
  self.rules = topology.rules
  if self.rules then self.rules:clear() end
  self.n, self.local_size = n, topology.local_world_size
  for _, field in ipairs(fields) do self[field] = doubles(n) end
  self.saved = doubles(#fields * n)
  self.of_groups = doubles(n) -- of groups of ranks, while one is looked for
  local own = topology:own_tier()
  for r, device in ipairs(topology.devices) do
    self.hbm[r - 1], self.ddr[r - 1], self.ssd[r - 1] = device.hbm, device.ddr, device.ssd
    if most then self[own][r - 1] = math.min(most, device[own]) end
  end
end

function Load:fits(r, storage)
  return storage.hbm <= self.hbm[r] and storage.ddr <= self.ddr[r] and storage.ssd <= self.ssd[r]
end

--- Whether a shard of an option's `run` may be on rank r: it fits, and no relation is against it.
function Load:takes(r, run, option)
  return self:fits(r, run.storage) and not (self.rules and self.rules:refuses(option, r, run))
end

--- Put one shard of an option's `run` on rank r, which takes it.
function Load:add(r, run, option)
  if self.rules then self.rules:add(option, r, run) end
  local s, p = run.storage, run.perf
  self.hbm[r], self.ddr[r], self.ssd[r] = self.hbm[r] - s.hbm, self.ddr[r] - s.ddr, self.ssd[r] - s.ssd
  local a, b = self.fwd_compute[r] + p.fwd_compute, self.bwd_compute[r] + p.bwd_compute
  local c, d, e = self.fwd_comms[r] + p.fwd_comms, self.bwd_comms[r] + p.bwd_comms, self.prefetch[r]
    + p.prefetch_compute
  self.fwd_compute[r], self.bwd_compute[r], self.fwd_comms[r], self.bwd_comms[r], self.prefetch[r] = a, b, c, d, e
  self.total[r] = a + b + c + d + e
end

--- What ranks first .. first + n - 1 have now, to `restore` it, until the next `save`.
function Load:save(first, n)
  for i, field in ipairs(fields) do ffi.copy(self.saved + (i - 1) * n, self[field] + first, n * 8) end
  return self.rules and self.rules:save()
end

function Load:restore(of_rules, first, n)
  for i, field in ipairs(fields) do ffi.copy(self[field] + first, self.saved + (i - 1) * n, n * 8) end
  if self.rules then self.rules:restore(of_rules) end
end

-- -- the heap ---------------------------------------------------------------------------------------------------------

--- Ranks by time so far; equal ones by their place on their hosts, so that the first shards spread over hosts.
local Heap = util.class "Heap"
M.Heap = Heap

--- Of ranks first .. first + n - 1; local_size: ranks of a host.
function Heap:init(load, first, n, local_size)
  self.load, self.local_size, self.n = load, local_size, n
  for i = 1, n do self[i] = first + i - 1 end
  for i = math.floor(n / 2), 1, -1 do self:down(i) end
end

function Heap:less(a, b)
  local x, y = self.load.total[a], self.load.total[b]
  if x ~= y then return x < y end
  x, y = a % self.local_size, b % self.local_size
  if x ~= y then return x < y end
  return a < b
end

function Heap:down(i)
  while true do
    local least, left = i, 2 * i
    if left <= self.n and self:less(self[left], self[least]) then least = left end
    if left < self.n and self:less(self[left + 1], self[least]) then least = left + 1 end
    if least == i then return end
    self[i], self[least], i = self[least], self[i], least
  end
end

function Heap:up(i)
  while i > 1 do
    local parent = math.floor(i / 2)
    if not self:less(self[i], self[parent]) then return end
    self[i], self[parent], i = self[parent], self[i], parent
  end
end

function Heap:pop()
  local top = self[1]
  self[1], self[self.n] = self[self.n], nil
  self.n = self.n - 1
  self:down(1)
  return top
end

function Heap:push(r)
  self.n = self.n + 1
  self[self.n] = r
  self:up(self.n)
end

--- Put one shard of an option's `run` on the least busy rank that takes it. Returns the rank, or nil.
function Heap:place(run, option)
  local set_aside, load, rank = nil, self.load, nil
  while self.n > 0 do
    local r = self[1]
    if load:takes(r, run, option) then
      load:add(r, run, option)
      self:down(1)
      rank = r
      break
    end
    set_aside = set_aside or {}
    set_aside[#set_aside + 1] = self:pop()
  end
  for _, r in ipairs(set_aside or {}) do self:push(r) end
  return rank
end

return M
