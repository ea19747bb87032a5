-- plan/perf.lua: milliseconds that shards take (TorchRec's EmbeddingPerfEstimator, its formulas).
--
-- A lookup reads ids (input), rows (lookup) and writes what comes out (output), all at the bandwidth of the memory that
-- the kernel reads. What it knows nothing of: latency, rows of a shard, ids that come twice, skew, overlap.
local P = require "perilune.ffi"
local util = require "perilune.util"
local kinds = require "perilune.plan.kinds"
local prices = require "perilune.plan.prices"
local signature = require "perilune.signature"
local sharding_types = require "perilune.plan.sharding_types"
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
  -- where all tables are in the host's memory
  if topology.compute_device == "cpu" then return kernel == "fused_uvm" and own or nil end
  if topology.compute_device ~= "cuda" then return nil end
  if kernel == "fused_uvm" or kernel == "quant_uvm" then return topology.hbm_to_ddr_mem_bw / PINNED_SHARE end
  if kernel ~= "fused_uvm_caching" then return nil end
  if cache_params and cache_params.prefetch_pipeline then return own end
  local ratio = cache_params and cache_params.load_factor or CACHE_RATIO
  return (ratio * own + (1 - ratio) * topology.hbm_to_ddr_mem_bw) / PINNED_SHARE
end

--- Amounts of a shard, as TorchRec counts them: bytes that it reads (input: ids; lookup: rows) and writes (output),
--- that cross hosts after what is added up within one (across), of a replica; c: see of_run.
local function amounts_of(c)
  local kind, copies = c.kind, c.kind.replica and 1 or c.W
  local ids = c.inputs / sharding_types.row_parts(kind.name, c.W, c.G)
  local outputs = (c.option.is_pooled or not kind.cuts_rows) and c.outputs or ids
  local cols = (kind.cuts_rows or kind.replica) and c.cols or math.max(c.cols, 32)
  local groups = c.W / c.G
  return { input = math.ceil(ids * copies * ID_BYTES), lookup = ids * copies * cols * c.bytes,
    output = outputs * copies * c.cols * c.bytes, across = groups > 1 and c.outputs * groups * c.cols * c.bytes or 0,
    replica = c.rows * c.cols * c.bytes, sent = kind.replica and 0 or math.ceil(c.inputs * c.W * ID_BYTES) }
end

--- By the kind of exchange (sharding_types.lua): prices of what travels forward and backward.
local comms = {}

function comms.whole_rows(c)
  local price = 1 / c.topology:bandwidth("all_to_all", c.W, c.L)
  return { "output", price }, { "output", price }
end

--- What is gathered among `ranks`, `near` of them on a host, is also copied.
local function sums_among(c, ranks, near)
  return 1 / c.topology:bandwidth("reduce_scatter", ranks, near), 1 / c.topology:bandwidth("all_gather", ranks, near)
    + BATCHED_COPY / c.bandwidth
end

function comms.rank_sums(c)
  local forward, backward = sums_among(c, c.W, c.L)
  return { "output", forward }, { "output", backward }
end

--- Within the group, then between groups.
function comms.host_sums(c)
  local groups = c.W / c.G
  local forward, backward = sums_among(c, c.G, math.min(c.G, c.L))
  local across = groups > 1 and 1 / c.topology:bandwidth("all_to_all", groups, 1) or 0
  return { "output", forward, "across", across }, { "output", backward, "across", across }
end

function comms.replica_sums(c)
  local nodes = math.min(c.W / c.L, 2)
  local reduce = (2 * nodes - 1) / nodes / c.topology:bandwidth("all_reduce", c.W, c.L)
  if c.W > 2 * c.L then reduce = reduce * 2 end
  return {}, { "replica", reduce + DENSE_UPDATE / c.bandwidth }
end

--- Milliseconds a byte of the three streams, forward and backward.
local function compute_prices(c, option)
  local t, narrow = c.topology, not (c.kind.cuts_rows or c.kind.replica)
  local forward = (narrow and block_penalty(c.cols) or 1) / c.bandwidth
  local backward = forward * t.bwd_compute_multiplier
  if not option.is_weighted then return forward, backward end
  return forward, backward * t.weighted_feature_bwd_compute_multiplier + forward * WEIGHTED_KERNEL
end

--- Bytes of rows that a prefetch brings from the host's memory, where the cache's statistics are known.
local function missed_bytes(c, option)
  local stats = option.cache_params and option.cache_params.stats
  if option.compute_kernel ~= "fused_uvm_caching" or not stats then return 0 end
  local divisor = sharding_types.row_parts(c.kind.name, c.W, c.G)
  local missed = stats:expected_miss_rate(option.cache_params.load_factor) * stats.expected_lookups / divisor
  return missed * c.cols * c.bytes
end

local EmbeddingPerfEstimator = util.seal(util.class "EmbeddingPerfEstimator")
M.EmbeddingPerfEstimator = EmbeddingPerfEstimator

--- EmbeddingPerfEstimator { topology =, is_inference = false }
function EmbeddingPerfEstimator:init(args)
  local a = util.named("EmbeddingPerfEstimator", args, { topology = util.required.table, is_inference = false })
  signature.value("EmbeddingPerfEstimator", "topology", a.topology, "Topology")
  self.topology, self.is_inference = a.topology, a.is_inference
end

M.total = prices.total

--- Times of one shard of a run.
function EmbeddingPerfEstimator:of_run(option, run)
  local t = self.topology
  local inputs, outputs = batch_counts(option)
  local bandwidth = M.kernel_bandwidth(t, option.compute_kernel, option.cache_params)
    or P.fail(("EmbeddingPerfEstimator: table '%s': no compute kernel '%s' on a %s"):format(option.fqn,
      option.compute_kernel, t.compute_device))
  local c = { option = option, kind = sharding_types.of[option.sharding_type], topology = t, W = t.world_size,
    L = t.local_world_size, G = t.intra_group_size, inputs = inputs, outputs = outputs, rows = run.rows,
    cols = run.cols, bytes = data_bytes[option.data_type], bandwidth = bandwidth }
  local amounts = amounts_of(c)
  amounts.missed = missed_bytes(c, option)
  if option.is_weighted then amounts.input = amounts.input * 2 end
  local there, back = comms[c.kind.way](c)
  local forward, backward = compute_prices(c, option)
  return prices.times(amounts, {
    fwd_compute = { "input", forward, "lookup", forward, "output", forward }, fwd_comms = there,
    bwd_compute = self.is_inference and {} or { "input", backward, "lookup", backward, "output", backward },
    bwd_comms = self.is_inference and {} or back, prefetch_compute = { "missed", 1 / t.hbm_to_ddr_mem_bw },
    input_dist_comms = { "sent", 1 / t:bandwidth("all_to_all", c.W, c.L) } })
end

--- Fill the times of all runs of options.
function EmbeddingPerfEstimator:estimate(options)
  for _, option in ipairs(options) do
    for _, run in ipairs(option.runs) do run.perf = self:of_run(option, run) end
    option:sum_perf()
  end
end

kinds.methods(EmbeddingPerfEstimator,
  { of_run = "option: option_with_ids, run: run", estimate = "options: options_with_ids" })
signature.check("plan.perf.", M,
  { total = "p: parts", kernel_bandwidth = "topology: Topology, kernel: string, cache_params: table?" })

return M
