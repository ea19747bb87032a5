-- traffic.lua: what a plan makes ranks do in a step: milliseconds of lookups and updates, and of the links, by the
-- exchanges of ids, of rows, of their gradients, and of what is replicated, within hosts and between them.
--
-- Bytes are those of plan/counts.lua: each rank sends its ids and lengths to those that have the rows, and gets what
-- they make of them. Where rows are cut within hosts, the ranks of a host add their parts up, and one sum goes to every
-- sample of other hosts. Gradients go the same ways back. Replicas, and the dense part, are reduced.
local ffi = require "ffi"
local util = require "perilune.util"
local partitioners = require "perilune.plan.partitioners"
local counts = require "perilune.plan.counts"
local sharding_types = require "perilune.plan.sharding_types"
local links = require "perilune.plan.links"

local M = {}

--- The milliseconds that an exchange takes each rank on its two links, the slower direction of each. near, far: bytes
--- by rank from 1 on that it exchanges one way with the others of its host and with all other ranks, as much with each.
--- The link between hosts is all ranks' of a host together (plan/links.lua): it takes as long as all that they send, or
--- get, at their rates together.
local function links_of(near, far, topology)
  local W, L = topology.world_size, topology.local_world_size
  local ms, out, into = ffi.new("double[?]", W), ffi.new("double[?]", W), ffi.new("double[?]", W)
  local near_of, far_of, all = {}, {}, 0 -- by host
  local function in_host(h) return math.min(L, W - h * L) end
  for r = 0, W - 1 do
    local h = math.floor(r / L)
    near_of[h], far_of[h] = (near_of[h] or 0) + near[r + 1], (far_of[h] or 0) + far[r + 1] / math.max(1, W - in_host(h))
    all = all + far[r + 1] / math.max(1, W - in_host(h)) -- to each rank elsewhere
  end
  for r = 0, W - 1 do
    local h = math.floor(r / L)
    local back = in_host(h) > 1 and (near_of[h] - near[r + 1]) / (in_host(h) - 1) or 0
    ms[r] = math.max(near[r + 1], back) / topology.intra_host_bw
    out[r], into[r] = far[r + 1], all - far_of[h]
  end
  return { { name = "within the host", ms = ms }, { name = "between hosts", ms = links.far_ms(out, into, topology) },
    latency = W > L and topology.inter_host_latency or W > 1 and topology.intra_host_latency or 0 }
end

--- Links of a reduction of `bytes` on all ranks.
local function reduction(bytes, topology)
  local near, far = {}, {}
  for r = 1, topology.world_size do near[r], far[r] = counts.reduction(bytes, topology) end
  return links_of(near, far, topology)
end

--- What a planner's plan asks of ranks: { lookup, update, prefetch = ms by rank from 0, links = by exchange ("ids",
--- "rows", "grads", "dense"): see simulate.lua }. dense_bytes: of the dense part's gradients.
function M.traffic_of_plan(planner, dense_bytes)
  local topology, best = planner.topology, planner.last.best
  local W, out = topology.world_size, {}
  for name, part in util.ordered { lookup = "fwd_compute", update = "bwd_compute", prefetch = "prefetch_compute" } do
    local sums = partitioners.by_rank(best.proposal, best.placement, W, function(run) return run.perf[part] end)
    out[name] = ffi.new("double[?]", W, sums)
  end
  local function counted(replicas) -- of the replicas, or of all else
    local list, placement = {}, {}
    for i, option in ipairs(best.proposal) do
      if sharding_types.of[option.sharding_type].replica == replicas then
        list[#list + 1], placement[#list + 1] = option, best.placement[i]
      end
    end
    return counts.by_rank(list, placement, topology)
  end
  local ranks, replicated = counted(false), dense_bytes + counted(true)[1].replica_byte
  local function exchange(near, far)
    return links_of(util.map(ranks, function(c) return c[near] end), util.map(ranks, function(c) return c[far] end),
      topology)
  end
  out.links = { ids = exchange("near_ids", "far_ids"), rows = exchange("near_out", "far_out"),
    grads = exchange("near_back", "far_back"), dense = reduction(replicated, topology) }
  return out
end

return M
