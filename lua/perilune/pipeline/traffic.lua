-- traffic.lua: what a plan makes ranks do in a step: milliseconds of lookups and updates, and bytes that each sends and receives in the
-- exchanges of ids, of rows, of their gradients, and of what is replicated, within hosts and between them.
--
-- Each rank sends its ids to those that have the rows, and gets what they make of them: from row_wise shards each rank's part of every
-- bag, from shards on the ranks of a group (table_row_wise, grid_shard) parts that the group has added up. Gradients go the same ways back.
-- Replicas, and the dense part, are reduced within hosts, then between them.
local ffi = require "ffi"
local util = require "perilune.util"
local partitioners = require "perilune.plan.partitioners"
local storage = require "perilune.plan.storage"
local links = require "perilune.plan.links"
local data_bytes = require("perilune.plan.constraints").data_bytes

local M = {}

local ID_BYTES = 8
local GRADIENT_BYTES = 4 -- of replicated parameters

--- Bytes by rank: what it sends to each other rank, and what it sends to the other ranks of its group (added up in the group).
local function new_flow(W) return { each = ffi.new("double[?]", W), group = ffi.new("double[?]", W) } end

--- What one shard of an option's run, which is on some rank, gets from each rank (bytes of ids), sends to each (bytes of rows), and sends
--- to the others of its group before that.
local function shard_bytes(option, run, topology)
  local inputs, outputs = storage.batch_counts(option)
  local W, G, kind = topology.world_size, topology.intra_group_size, option.sharding_type
  if run.rows * run.cols == 0 then return 0, 0, 0 end
  local bytes = run.cols * data_bytes[option.output_dtype or option.data_type]
  local grouped = kind == "table_row_wise" or kind == "grid_shard"
  local ways = kind == "row_wise" and W or grouped and G or 1
  if not option.is_pooled then return inputs / ways * ID_BYTES, inputs / ways * bytes, 0 end
  if grouped then return inputs / G * ID_BYTES, outputs / G * bytes, outputs * W / G * bytes end
  return inputs / ways * ID_BYTES, outputs * bytes, 0
end

--- The milliseconds that a flow takes each rank on its two links, the slower direction of each. The link between hosts is all ranks' of a
--- host together (plan/links.lua): it takes as long as all that they send, or get, at their rates together.
local function links_of(flow, topology, extra_near, extra_far)
  local W, L = topology.world_size, topology.local_world_size
  local near, out, into = ffi.new("double[?]", W), ffi.new("double[?]", W), ffi.new("double[?]", W)
  local all, of_host = 0, {}
  for r = 0, W - 1 do
    local h = math.floor(r / L)
    all, of_host[h] = all + flow.each[r], (of_host[h] or 0) + flow.each[r]
  end
  local G = topology.intra_group_size
  for r = 0, W - 1 do
    local h, own = math.floor(r / L), flow.each[r]
    local in_host = math.min(L, W - h * L)
    local group = flow.group[r] * (G - 1)
    near[r] = (math.max(own * (in_host - 1), of_host[h] - own) + group + (extra_near or 0)) / topology.intra_host_bw
    out[r], into[r] = own * (W - in_host) + (extra_far or 0), all - of_host[h] + (extra_far or 0)
  end
  return { { name = "within the host", ms = near }, { name = "between hosts", ms = links.far_ms(out, into, topology) },
    latency = W > L and topology.inter_host_latency or W > 1 and topology.intra_host_latency or 0 }
end

--- Links of a reduction of `bytes` on all ranks: within each host, then between hosts by as many ranks as one has, then back.
local function reduction(bytes, topology)
  local W, L = topology.world_size, math.min(topology.local_world_size, topology.world_size)
  local hosts = math.ceil(W / L)
  local near, far = 2 * bytes * (L - 1) / L, 2 * bytes / L * (hosts - 1) / hosts
  return links_of(new_flow(W), topology, near, far)
end

--- What a planner's plan asks of ranks: { lookup, update, prefetch = ms by rank from 0, links = by exchange ("ids", "rows", "grads",
--- "dense"): see simulate.lua, bytes = by exchange: of all ranks }. dense_bytes: of the dense part's gradients.
function M.of(planner, dense_bytes)
  local topology, best = planner.topology, planner.last.best
  local W = topology.world_size
  local out = { bytes = {} }
  for name, part in util.ordered { lookup = "fwd_compute", update = "bwd_compute", prefetch = "prefetch_compute" } do
    local sums = partitioners.by_rank(best.proposal, best.placement, W, function(run) return run.perf[part] end)
    out[name] = ffi.new("double[?]", W, sums)
  end
  local ids, rows, replicated = new_flow(W), new_flow(W), dense_bytes
  for i, option in ipairs(best.proposal) do
    if option.sharding_type == "data_parallel" then replicated = replicated + option.rows * option.dim * GRADIENT_BYTES
    else
      local known = {}
      partitioners.each_shard(option, best.placement[i], function(rank, run)
        local b = known[run] or { shard_bytes(option, run, topology) }
        known[run] = b
        ids.each[rank], rows.each[rank], rows.group[rank] = ids.each[rank] + b[1], rows.each[rank] + b[2], rows.group[rank] + b[3]
      end)
    end
  end
  out.links = { ids = links_of(ids, topology), rows = links_of(rows, topology), grads = links_of(rows, topology),
    dense = reduction(replicated, topology) }
  return out
end

return M
