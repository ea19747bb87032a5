-- plan/runtime.lua: what the runtime says of a way to shard a table: what its shards keep in memory, and whether it can
-- be done at all. The answers come from the functions by which sharded modules are made, so that a plan and what
-- becomes of it agree.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local embed = require "perilune.embed.config"
local sharding_types = require "perilune.plan.sharding_types"
local signature = require "perilune.signature"
require "perilune.plan.options" -- kinds of arguments
local C = P.C

local M = {}

local named = {}                             -- optimizer by name, as peri_tbe_optimizer_config
local given = setmetatable({}, { __mode = "k" }) -- by fused_params

local function optimizer_of_params(params) return (embed.fused_params("fused_params", params)) end

local function optimizer_named(name)
  named[name] = named[name] or optimizer_of_params(embed.usual_params(name))
  return named[name]
end

local known = util.index_of(embed.optimizers())

--- Whether an option says by which of the runtime's optimizers its table is trained. Options of TorchRec's models name
--- its classes (Adam), and those of models without weights may say nothing: their bytes are TorchRec's formulas'.
function M.knows(option) return option.optimizer ~= nil and known[option.optimizer] ~= nil end

local function is_bytes(option) return embed.data_types[option.data_type] == nil end
local function is_quantized(option) return option.compute_kernel:match "^quant" ~= nil or is_bytes(option) end

--- The optimizer of the shards: rows of bytes have none.
local function optimizer_of(option)
  if is_quantized(option) then return optimizer_named "none" end
  local params = option.fused_params
  if not params then return optimizer_named(option.optimizer) end
  given[params] = given[params] or optimizer_of_params(params)
  return given[params]
end

local function is_cached(option) return option.compute_kernel:match "_uvm_caching$" ~= nil end
local function is_mapped(option) return option.compute_kernel == "fused_uvm" or option.compute_kernel == "quant_uvm" end

local cache = P.struct "peri_cache_config"

--- A cache's parameters for C: the option's, else those of the table's fused_params, else the defaults. Valid until the
--- next call.
local function cache_of(option)
  if not is_cached(option) or option.compute_kernel:match "^quant" then return nil end
  local params = option.cache_params or option.fused_params and option.fused_params.cache_params or {}
  params = embed.cache_params("plan.runtime", params)
  embed._fill_cache_params("plan.runtime", cache, params, option.data_type)
  return cache, params -- which the directory's name lives by
end

local function dtype_of(data_type)
  return embed.row_formats[embed.table_types[data_type]] or P.dtype(embed.data_types[data_type])
end

local config, table_config, bytes_out = P.struct "peri_tbe_config", P.struct "peri_table_config",
  ffi.new "peri_tbe_bytes"

--- Bytes that one shard of an option's run keeps in memory: in that of its device, in the host's beside it, in files.
--- Weights, what the optimizer keeps for them (inference: nothing), caches and what they know of rows; of dense tables
--- as if the collection's optimizer trained them. compute_device: whose memory is its own, unless "cpu".
function M.bytes(option, run, compute_device, inference)
  if run.rows * run.cols == 0 then return 0, 0, 0 end
  local params
  config.caches, params = cache_of(option)
  if inference and config.caches == nil then
    config.optimizer = optimizer_named "none"
  else
    config.optimizer = optimizer_of(option)
  end
  table_config.name, table_config.rows, table_config.cols = option.name, run.rows, run.cols
  table_config.init = C.PERI_INIT_NONE
  config.n_tables, config.tables, config.dtype, config.mapped = 1, table_config, dtype_of(option.data_type),
    is_mapped(option)
  P.check(C.peri_tbe_bytes_of(config, compute_device ~= "cpu", bytes_out))
  return tonumber(bytes_out.device), tonumber(bytes_out.host), tonumber(bytes_out.files), params
end

local sharded = P.struct "peri_sharded_table"

--- Why no module can shard and train a table like that, in the runtime's words; nil: it can, or nobody says by what it
--- is trained. way: fields of an option: name, rows, dim, data_type, sharding_type, compute_kernel, optimizer,
--- fused_params, cache_params.
function M.refusal(way)
  if not M.knows(way) then return nil end
  local params
  sharded.cache, params = cache_of(way)
  sharded.name, sharded.rows, sharded.cols, sharded.dtype = way.name, way.rows, way.dim, dtype_of(way.data_type)
  sharded.sharding_type, sharded.mapped = sharding_types.of[way.sharding_type].code, is_mapped(way)
  sharded.compute_kernel = is_quantized(way) and C.PERI_KERNEL_QUANT or way.compute_kernel == "dense"
    and C.PERI_KERNEL_DENSE
    or C.PERI_KERNEL_FUSED
  local ok, err = pcall(P.check, C.peri_sharded_table_check(sharded, optimizer_of(way)))
  if ok then return nil, params end
  return (tostring(err.message):gsub("^peri_[%w_]+: ", ""))
end

signature.check("plan.runtime.", M, { knows = "option: table", refusal = "way: table",
  bytes = "option: option_with_ids, run: run, compute_device: string, inference: boolean?" })

return M
