-- plan/storage.lua: bytes that shards take. Of tables whose optimizer is one of the runtime's, what stays is what the
-- runtime keeps (runtime.lua); of others (TorchRec's classes, or nobody says which) it is by TorchRec's
-- EmbeddingStorageEstimator, its formulas, as are ids and rows on their way.
local util = require "perilune.util"
local kinds = require "perilune.plan.kinds"
local runtime = require "perilune.plan.runtime"
local signature = require "perilune.signature"
local sharding_types = require "perilune.plan.sharding_types"
local data_bytes = require("perilune.plan.constraints").data_bytes

local M = {}

local ID_BYTES = 8
local CACHE_RATIO = 0.2

--- Bytes of optimizer state for a byte of weights, as TorchRec counts them by the names of its classes; dim: columns of
--- the table.
local multipliers = { SGD = 0, Adam = 2, RowWiseAdagrad = function(dim) return 1 / dim end }

local function optimizer_multiplier(optimizer, dim)
  if not optimizer then return 0 end
  local m = multipliers[optimizer]
  if type(m) == "function" then return m(dim) end
  return m or 1
end

--- Of one rank's batch of a table, over its features, the sums of ids, of rows that come out as TorchRec counts them
--- (of bags with less than an id on average fewer), and of bags.
function M.batch_counts(option)
  local inputs, outputs, bags = 0, 0, 0
  for i, length in ipairs(option.input_lengths) do
    local poolings, batch = option.num_poolings[i], option.batch_sizes[i]
    inputs = inputs + length * poolings * batch
    outputs, bags = outputs + math.min(1, length) * poolings * batch, bags + poolings * batch
  end
  return inputs, option.is_pooled and outputs or inputs, bags
end

--- Bytes that a shard receives (ids) and makes (rows) for one batch.
local function io_bytes(option, run, topology, out_bytes)
  local inputs, outputs = M.batch_counts(option)
  local W, kind = topology.world_size, sharding_types.of[option.sharding_type]
  if kind.replica then return math.ceil(inputs * ID_BYTES), math.ceil(outputs * run.cols * out_bytes) end
  if kind.cuts_rows then
    if run.rows * run.cols == 0 then return 0, 0 end
    inputs = inputs / sharding_types.row_parts(kind.name, W, topology.intra_group_size)
    if not option.is_pooled then outputs = inputs end
  end
  return math.ceil(inputs * W * ID_BYTES), math.ceil(outputs * W * run.cols * out_bytes)
end

--- Half to even, as Python rounds.
local function round(x)
  local low = math.floor(x)
  if x - low == 0.5 then return low % 2 == 0 and low or low + 1 end
  return math.floor(x + 0.5)
end

--- Bytes of weights, optimizer state and (with a cache of that share) its bookkeeping in one shard, where the table has
--- `bytes`.
local function kept_bytes(option, run, bytes, cache_ratio, inference)
  local weights = sharding_types.of[option.sharding_type].replica and bytes
    or math.ceil(bytes * (run.rows * run.cols) / (option.rows * option.dim))
  if inference then return weights end
  local aux = cache_ratio and math.ceil(run.rows * (4 + cache_ratio * 16)) or 0
  return aux + weights + math.ceil(weights * optimizer_multiplier(option.optimizer, option.dim))
end

--- Bytes of the table in the device's own memory and in the host's.
local function table_bytes(option, topology)
  local bytes = option.rows * option.dim * data_bytes[option.data_type]
  if option.compute_kernel:match "^quant" then bytes = bytes + option.rows * 4 end -- scale and bias of each row
  local on_host = topology.compute_device == "cpu" or option.compute_kernel:match "_uvm" ~= nil
  return on_host and 0 or bytes, on_host and bytes or 0
end

--- What ids and outputs add to memory at its peak, by the pipeline.
local pipelines = {
  none = function(input, output) return input + output end,
  train_sparse_dist = function(input, output, _, at_peak) return 2 * input + (at_peak and output or 0) end,
  train_prefetch_sparse_dist = function(input, output, prefetched, at_peak)
    return 3 * input + 7 * prefetched + (at_peak and output or 0)
  end,
}

local EmbeddingStorageEstimator = util.seal(util.class "EmbeddingStorageEstimator")
M.EmbeddingStorageEstimator = EmbeddingStorageEstimator

--- EmbeddingStorageEstimator { topology =, pipeline_type = "none" | "train_sparse_dist" | "train_prefetch_sparse_dist",
--- run_embedding_at_peak_memory = false, is_inference = false }
function EmbeddingStorageEstimator:init(args)
  local f = "EmbeddingStorageEstimator"
  local a = util.named(f, args, { topology = util.required.table, pipeline_type = "none",
    run_embedding_at_peak_memory = false, is_inference = false })
  signature.value(f, "topology", a.topology, "Topology")
  util.one_of(f, "pipeline_type", a.pipeline_type, util.keys(pipelines))
  for name, value in util.ordered(a) do self[name] = value end
end

local function is_cached(option)
  return option.compute_kernel == "fused_uvm_caching" or option.compute_kernel == "quant_uvm_caching"
end

--- Bytes that stay of one shard, by TorchRec's formulas: in the device's own memory, in the host's.
local function by_formulas(option, run, topology, inference)
  local hbm, ddr = table_bytes(option, topology)
  local ratio = is_cached(option) and (option.cache_params and option.cache_params.load_factor or CACHE_RATIO) or nil
  if ratio then hbm = round(ddr * ratio) end
  local fast, slow = kept_bytes(option, run, hbm, ratio, inference), kept_bytes(option, run, ddr, nil, inference)
  return topology.compute_device == "cpu" and 0 or fast, slow, 0
end

--- Bytes that stay of one shard: in the device's own memory, in the host's, in files. The map of raw ids is on the
--- device of the rows.
function M.kept(option, run, topology, inference)
  local map = option.map and option.map:_map_bytes(run.row_offset, run.rows) or 0
  local device, host, files
  if runtime.knows(option) then
    device, host, files = runtime.bytes(option, run, topology.compute_device, inference or false)
  else
    device, host, files = by_formulas(option, run, topology, inference or false)
  end
  if topology.compute_device == "cpu" then return 0, device + host + map, files end
  return device + map, host, files
end

--- Storage of one shard of a run.
function EmbeddingStorageEstimator:of_run(option, run)
  local topology, inference = self.topology, self.is_inference
  local input, output = io_bytes(option, run, topology, data_bytes[option.output_dtype or option.data_type])
  local hbm, ddr, ssd = M.kept(option, run, topology, inference)
  if topology.compute_device == "cpu" then
    return { hbm = 0, ddr = ddr + (inference and 0 or input + output), ssd = ssd }
  end
  local peak = pipelines[self.pipeline_type]
  local io = inference and 0 or peak(input, output, is_cached(option) and input or 0, self.run_embedding_at_peak_memory)
  return { hbm = hbm + io, ddr = ddr, ssd = ssd }
end

--- Fill the storage of all runs of options.
function EmbeddingStorageEstimator:estimate(options)
  for _, option in ipairs(options) do
    for _, run in ipairs(option.runs) do run.storage = self:of_run(option, run) end
    option:sum_storage()
  end
end

kinds.methods(EmbeddingStorageEstimator,
  { of_run = "option: option_with_ids, run: run", estimate = "options: options_with_ids" })
signature.check("plan.storage.", M, { batch_counts = "option: option_with_ids",
  kept = "option: option_with_ids, run: run, topology: Topology, inference: boolean?" })

return M
