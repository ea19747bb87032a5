-- plan/perf.lua: milliseconds that shards take (TorchRec's EmbeddingPerfEstimator, its formulas).
--
-- A lookup reads ids (input), rows (lookup) and writes what comes out (output), all at the bandwidth of the memory that the kernel reads.
-- What it knows nothing of: latency, rows of a shard, ids that come twice, skew, overlap.
local P = require "perilune.ffi"
local util = require "perilune.util"
local kinds = require "perilune.plan.kinds"
local signature = require "perilune.signature"
local data_bytes = require("perilune.plan.constraints").data_bytes
local batch_counts = require("perilune.plan.storage").batch_counts

local M = {}

local ID_BYTES = 8
local CACHE_RATIO = 0.2
local BATCHED_COPY = 2.455       -- bytes moved for a byte of gathered gradients
local DENSE_UPDATE = 9.22        -- for a byte of a replicated table
local WEIGHTED_KERNEL = 1.1      -- time of gradients of weights over that of the lookup
local PINNED_SHARE = 10          -- what is left of the host link: one part in so many

--- Share of a block of threads that rows of few columns leave idle.
local function block_penalty(cols) return cols >= 128 and 1 or cols >= 64 and 1.15 or 1.75 end

--- Bytes a millisecond at which a kernel reads its table; nil: the device has no such kernel.
function M.kernel_bandwidth(topology, kernel, cache_params)
  local own = topology.compute_device == "cpu" and topology.ddr_mem_bw or topology.hbm_mem_bw
  if kernel == "dense" then return 0.5 * own end
  if kernel == "fused" or kernel == "quant" then return own end
  if topology.compute_device == "cpu" then return kernel == "fused_uvm" and own or nil end -- where all tables are in the host's memory
  if topology.compute_device ~= "cuda" then return nil end
  if kernel == "fused_uvm" or kernel == "quant_uvm" then return topology.hbm_to_ddr_mem_bw / PINNED_SHARE end
  if kernel ~= "fused_uvm_caching" then return nil end
  if cache_params and cache_params.prefetch_pipeline then return own end
  local ratio = cache_params and cache_params.load_factor or CACHE_RATIO
  return (ratio * own + (1 - ratio) * topology.hbm_to_ddr_mem_bw) / PINNED_SHARE
end

--- Bytes of the three streams of a shard of c.cols columns. c: see `context`.
local function whole_rows(c)
  return math.ceil(c.inputs * c.W * ID_BYTES), c.inputs * c.W * math.max(c.cols, 32) * c.bytes, c.outputs * c.W * c.cols * c.bytes
end

local function split_rows(c, ways)
  local ids = c.inputs / ways
  local outputs = c.option.is_pooled and c.outputs or c.outputs / ways
  return math.ceil(ids * c.W * ID_BYTES), ids * c.W * c.cols * c.bytes, outputs * c.W * c.cols * c.bytes
end

local function replica(c)
  return math.ceil(c.inputs * ID_BYTES), c.inputs * c.cols * c.bytes, c.outputs * c.cols * c.bytes
end

local function row_wise_comms(c, output)
  local t = c.topology
  return output / t:bandwidth("reduce_scatter", c.W, c.L),
    output / t:bandwidth("all_gather", c.W, c.L) + output * BATCHED_COPY / c.bandwidth
end

local function table_wise_comms(c, output)
  local ms = output / c.topology:bandwidth("all_to_all", c.W, c.L)
  return ms, ms
end

--- Within the group, then between groups.
local function host_row_comms(c, output)
  local t, groups, near = c.topology, c.W / c.G, math.min(c.G, c.L)
  local across = groups > 1 and c.outputs * groups * c.cols * c.bytes / t:bandwidth("all_to_all", groups, 1) or 0
  return output / t:bandwidth("reduce_scatter", c.G, near) + across,
    across + output / t:bandwidth("all_gather", c.G, near) + output * BATCHED_COPY / c.bandwidth
end

local function replica_comms(c)
  local size, nodes = c.rows * c.cols * c.bytes, math.min(c.W / c.L, 2)
  local reduce = size * (2 * nodes - 1) / nodes / c.topology:bandwidth("all_reduce", c.W, c.L)
  if c.W > 2 * c.L then reduce = reduce * 2 end
  return 0, reduce + size * DENSE_UPDATE / c.bandwidth
end

--- By sharding type: the streams, the time of forward and backward exchanges, and whether narrow rows are slower.
local function of_rows(c) return split_rows(c, c.W) end
local function of_host_rows(c) return split_rows(c, c.G) end
local ways = {
  table_wise = { whole_rows, table_wise_comms, true }, column_wise = { whole_rows, table_wise_comms, true },
  table_column_wise = { whole_rows, table_wise_comms, true }, row_wise = { of_rows, row_wise_comms, false },
  table_row_wise = { of_host_rows, host_row_comms, false }, grid_shard = { of_host_rows, host_row_comms, false },
  data_parallel = { replica, replica_comms, false },
}

--- Ids that a prefetch brings from the host's memory, where the cache's statistics are known.
local function prefetch_ms(c, option)
  local stats = option.cache_params and option.cache_params.stats
  if option.compute_kernel ~= "fused_uvm_caching" or not stats then return 0 end
  local divisor = option.sharding_type == "row_wise" and c.W
    or (option.sharding_type == "table_row_wise" or option.sharding_type == "grid_shard") and c.G or 1
  local missed = stats:expected_miss_rate(option.cache_params.load_factor) * stats.expected_lookups / divisor
  return missed * c.cols * c.bytes / c.topology.hbm_to_ddr_mem_bw
end

local EmbeddingPerfEstimator = util.seal(util.class "EmbeddingPerfEstimator")
M.EmbeddingPerfEstimator = EmbeddingPerfEstimator

--- EmbeddingPerfEstimator { topology =, is_inference = false }
function EmbeddingPerfEstimator:init(args)
  local a = util.named("EmbeddingPerfEstimator", args, { topology = util.required.table, is_inference = false })
  signature.value("EmbeddingPerfEstimator", "topology", a.topology, "Topology")
  self.topology, self.is_inference = a.topology, a.is_inference
end

--- The time that a plan's rating counts: all but the distribution of ids, which pipelines hide.
function M.total(p) return p.fwd_compute + p.bwd_compute + p.fwd_comms + p.bwd_comms + p.prefetch_compute end

--- Times of one shard of a run.
function EmbeddingPerfEstimator:of_run(option, run)
  local t = self.topology
  local inputs, outputs = batch_counts(option)
  local bandwidth = M.kernel_bandwidth(t, option.compute_kernel, option.cache_params)
    or P.fail(("EmbeddingPerfEstimator: table '%s': no compute kernel '%s' on a %s"):format(option.fqn, option.compute_kernel,
      t.compute_device))
  local c = { option = option, topology = t, W = t.world_size, L = t.local_world_size, G = t.intra_group_size, inputs = inputs,
    outputs = outputs, rows = run.rows, cols = run.cols, bytes = data_bytes[option.data_type], bandwidth = bandwidth }
  local streams, comms, narrow = unpack(ways[option.sharding_type])
  local input, lookup, output = streams(c)
  if option.is_weighted then input = input * 2 end
  local p = { input_dist_comms = 0 }
  p.fwd_compute = (input + lookup + output) * (narrow and block_penalty(run.cols) or 1) / bandwidth
  p.fwd_comms, p.bwd_comms = comms(c, output)
  p.bwd_compute = p.fwd_compute * t.bwd_compute_multiplier
  if option.is_weighted then
    p.bwd_compute = p.bwd_compute * t.weighted_feature_bwd_compute_multiplier + p.fwd_compute * WEIGHTED_KERNEL
  end
  if self.is_inference then p.bwd_compute, p.bwd_comms = 0, 0 end
  p.prefetch_compute = prefetch_ms(c, option)
  if option.sharding_type ~= "data_parallel" then
    p.input_dist_comms = math.ceil(inputs * c.W * ID_BYTES) / t:bandwidth("all_to_all", c.W, c.L)
  end
  p.total = M.total(p)
  return p
end

--- Fill the times of all runs of options.
function EmbeddingPerfEstimator:estimate(options)
  for _, option in ipairs(options) do
    for _, run in ipairs(option.runs) do run.perf = self:of_run(option, run) end
    option:sum_perf()
  end
end

kinds.methods(EmbeddingPerfEstimator, { of_run = "option: option_with_ids, run: run", estimate = "options: options_with_ids" })
signature.check("plan.perf.", M, { total = "p: parts", kernel_bandwidth = "topology: Topology, kernel: string, cache_params: table?" })

return M
