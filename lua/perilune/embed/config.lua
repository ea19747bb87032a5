-- config.lua: what an embedding table is (TorchRec's EmbeddingBagConfig and EmbeddingConfig), how it starts, and how it
-- is trained (fused_params).
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local signature = require "perilune.signature"
local C = P.C

local M = {}

--- Poolings and data types by TorchRec's names.
M.PoolingType = util.face("peri.embed.PoolingType", { SUM = "SUM", MEAN = "MEAN" })
M.poolings = P.options "pooling"
M.poolings.NONE = nil -- bags are pooled
--- Rows of bytes, for lookups only, by name: FBGEMM's two layouts of 8-bit rows, 8-bit floats, rows of 4 and of 2 bits
--- a number.
M.row_formats = {}
M.data_types = { FP32 = "f32", FP16 = "f16", BF16 = "bf16" }
--- What tables can hold, and what table batches call it: numbers, which are trained, and rows of bytes for quantized
--- collections, whose 8-bit rows are those of FBGEMM's tables for inference (INT8 is INT8_HALF). And how many bytes a
--- number of each takes.
M.table_types, M.data_bytes = {}, {}

local function add_type(name, held_as, dtype)
  M.table_types[name], M.data_bytes[name] = held_as, C.peri_row_format_bits(dtype) / 8
end
for name, dtype in util.ordered(M.data_types) do add_type(name, name, P.dtype(dtype)) end
local row_format = C.PERI_ROWS_INT8
while C.peri_row_format_name(row_format) ~= nil do
  local name = ffi.string(C.peri_row_format_name(row_format))
  M.row_formats[name] = row_format
  add_type(name:match "^(.-)_HALF$" or name, name, row_format) -- the later of two
  row_format = row_format + 1
end
M.bounds_checks = P.options "bounds_check"

local format_text = ffi.new "char[64]"

--- How a quantized table's rows of so many numbers are stored, as a text (tensor/row_format.lua); nil: as numbers.
function M._row_format(data_type, cols)
  local format = M.row_formats[M.table_types[data_type]]
  if not format then return nil end
  P.check(C.peri_row_format_text(format, cols, format_text, ffi.sizeof(format_text)))
  return ffi.string(format_text)
end

local format, row_bytes = ffi.new "peri_row_format", ffi.new "int64_t[1]"

--- The bytes of a quantized table's rows of so many numbers.
function M._row_bytes(data_type, cols)
  P.check(C.peri_row_format_of(M.row_formats[M.table_types[data_type]], format))
  P.check(C.peri_quantize_row_bytes(format, cols, row_bytes))
  return tonumber(row_bytes[0])
end

local function one_of(func, what, value, allowed)
  if allowed[value] == nil then util.one_of(func, what, value, util.keys(allowed)) end
  return allowed[value]
end

-- -- how weights start ------------------------------------------------------------------------------------------------

--- Start values that do not depend on the sharding: every element is a function of the seed, the table's name, and its
--- row and column. (A Lua function could not promise that, so `init_fn` is one of these.)
local function init(kind, a, b) return { kind = kind, a = a, b = b } end

local function finite(func, what, x)
  if type(x) ~= "number" or not (x > -math.huge and x < math.huge) then
    P.fail(("%s: %s is %s, allowed: finite numbers"):format(func, what, tostring(x)))
  end
end

function M.uniform(low, high)
  finite("uniform", "low", low)
  finite("uniform", "high", high)
  if low > high then P.fail(("uniform: low is %g, high is %g, allowed: low <= high"):format(low, high)) end
  return init(C.PERI_INIT_UNIFORM, low, high)
end

function M.normal(mean, deviation)
  finite("normal", "mean", mean)
  finite("normal", "deviation", deviation)
  if deviation < 0 then P.fail(("normal: deviation is %g, allowed: numbers >= 0"):format(deviation)) end
  return init(C.PERI_INIT_NORMAL, mean, deviation)
end

function M.constant(value)
  finite("constant", "value", value)
  return init(C.PERI_INIT_CONSTANT, value, 0)
end

-- -- tables -----------------------------------------------------------------------------------------------------------

--- What tables have whose rows are pooled (EmbeddingBagConfig) or not (EmbeddingConfig).
local BaseEmbeddingConfig = util.seal(util.class "BaseEmbeddingConfig")
M.BaseEmbeddingConfig = BaseEmbeddingConfig

local table_arguments = {
  name = util.required.string,
  embedding_dim = util.required.number,
  num_embeddings = util.required.number,
  feature_names = util.required.list,
  data_type = "FP32",
  weight_init_min = util.optional.number, -- default: -sqrt(1 / num_embeddings)
  weight_init_max = util.optional.number, -- default: +sqrt(1 / num_embeddings)
  init_fn = util.optional,                -- embed.uniform(low, high), embed.normal(mean, deviation),
                                          -- embed.constant(value)
}
local bag_arguments = util.copy(table_arguments)
bag_arguments.pooling = "SUM"

--- Take the named arguments `args`, which are those of the list `known`, into the fields of the same names.
local function fill(self, args, known)
  local f = self.class_name
  local a = util.named(f, args, known)
  if type(a.name) ~= "string" or a.name == "" then
    P.fail(("%s: name is '%s', allowed: a text"):format(f, tostring(a.name)))
  end
  f = ("%s '%s'"):format(f, a.name)
  util.integer(f, "embedding_dim", a.embedding_dim, 1, 2 ^ 20)
  util.integer(f, "num_embeddings", a.num_embeddings, 1, 2 ^ 43)
  if known.pooling then one_of(f, "pooling", a.pooling, M.poolings) end
  one_of(f, "data_type", a.data_type, M.table_types)
  if type(a.feature_names) ~= "table" or #a.feature_names == 0 then
    P.fail(f .. ": feature_names is no list of names")
  end
  if not util.is_whole_list(a.feature_names) then
    P.fail(f .. ": feature_names has entries behind a nil, or keys that are no positions")
  end
  for _, name in ipairs(a.feature_names) do
    if type(name) ~= "string" or name == "" then P.fail(("%s: '%s' is no feature name"):format(f, tostring(name))) end
  end
  util.distinct(f, "feature", a.feature_names)
  if a.init_fn ~= nil and (type(a.init_fn) ~= "table" or not a.init_fn.kind) then
    P.fail(f .. ": init_fn, allowed: embed.uniform(low, high), embed.normal(mean, deviation), embed.constant(value)")
  end
  if a.init_fn and (a.weight_init_min or a.weight_init_max) then
    P.fail(f .. ": init_fn and weight_init_min or _max exclude each other")
  end
  for name, value in util.ordered(a) do self[name] = value end
  local low, high = self:get_weight_init_min(), self:get_weight_init_max()
  finite(f, "weight_init_min", low)
  finite(f, "weight_init_max", high)
  if low > high then
    P.fail(("%s: weight_init_min is %g, weight_init_max is %g, allowed: min <= max"):format(f, low, high))
  end
end

--- The range of uniform start values.
--- The checks of a constructor once more, for fields may have been assigned since.
local function check_again(self, known)
  local now = {}
  for name in util.ordered(known) do now[name] = self[name] end
  fill(self, now, known)
end

function BaseEmbeddingConfig:get_weight_init_min()
  return self.weight_init_min or -math.sqrt(1 / self.num_embeddings)
end
function BaseEmbeddingConfig:get_weight_init_max() return self.weight_init_max or math.sqrt(1 / self.num_embeddings) end
function BaseEmbeddingConfig:num_features() return #self.feature_names end

--- How the weights start: kind and parameters.
function BaseEmbeddingConfig:initialiser()
  if self.init_fn then return self.init_fn end
  if not self.weight_init_min and not self.weight_init_max then return init(C.PERI_INIT_DEFAULT, 0, 0) end
  return M.uniform(self:get_weight_init_min(), self:get_weight_init_max())
end

--- An error of `func` unless a table of this configuration can be trained.
function M._check_trained(func, t)
  if M.data_types[t.data_type] then return end
  P.fail(("%s: table '%s' holds %s, which is looked up only: see QuantEmbeddingBagCollection and "
    .. "QuantEmbeddingCollection; allowed here: %s"):format(func, t.name, tostring(t.data_type),
    table.concat(util.keys(M.data_types), ", ")))
end

--- A table of an EmbeddingBagCollection.
local EmbeddingBagConfig = util.seal(util.class("EmbeddingBagConfig", BaseEmbeddingConfig), bag_arguments)
M.EmbeddingBagConfig = EmbeddingBagConfig
function EmbeddingBagConfig:init(args) fill(self, args, bag_arguments) end
function EmbeddingBagConfig:_check() check_again(self, bag_arguments) end

--- A table of an EmbeddingCollection: the rows of its ids are not pooled.
local EmbeddingConfig = util.seal(util.class("EmbeddingConfig", BaseEmbeddingConfig), table_arguments)
M.EmbeddingConfig = EmbeddingConfig
function EmbeddingConfig:init(args) fill(self, args, table_arguments) end
function EmbeddingConfig:_check() check_again(self, table_arguments) end

--- Names of a collection's outputs, in the order of tables and their features, and their columns: the feature, or
--- "feature@table" where several tables use it.
function M.output_names(tables)
  local users, names, dims = {}, {}, {}
  for _, t in ipairs(tables) do
    for _, f in ipairs(t.feature_names) do users[f] = (users[f] or 0) + 1 end
  end
  for _, t in ipairs(tables) do
    for _, f in ipairs(t.feature_names) do
      names[#names + 1] = users[f] > 1 and f .. "@" .. t.name or f
      dims[#dims + 1] = t.embedding_dim
    end
  end
  return names, dims
end

-- -- caches -----------------------------------------------------------------------------------------------------------

local algorithms = P.options "cache_algorithm"
M.CacheAlgorithm = util.face("peri.embed.CacheAlgorithm", { LRU = "LRU", LFU = "LFU" })

--- How a table that is larger than memory is cached (TorchRec's CacheParams, compute kernel "fused_uvm_caching"). What
--- TorchRec keeps in unified memory lies in the host's, behind a device that has its own, or in a file: `directory`
--- says where it stays; on a CPU it is a nameless temporary file without one.
local CacheParams = util.seal(util.class "CacheParams")
M.CacheParams = CacheParams

local cache_arguments = {
  algorithm = "LRU",           -- "LRU" or "LFU"
  load_factor = 0.2,           -- rows in the cache / rows of the table
  -- slots of a set, of which a row takes one; 0: no sets, any slot; absent: 64 on devices with a memory of their own,
  -- else 0 (not TorchRec's; FBGEMM has 32)
  ways = util.whole(nil, 0, C.PERI_CACHE_WAYS_MAX),
  reserved_memory = util.whole(0, 0), -- bytes (TorchRec: GB of the device) that caches leave to others
  precision = util.optional,   -- data type of cached rows; only the table's own
  prefetch_pipeline = false,   -- a pipeline will prefetch the next batch's rows; prefetches are always safe, so this is
                               -- a note to it
  stats = util.optional,       -- hints for a planner: kept, not interpreted
  directory = util.optional,   -- where the files are (not TorchRec's)
}

function CacheParams:init(args)
  local f = "CacheParams"
  local a = util.named(f, args, cache_arguments)
  if type(a.load_factor) ~= "number" or not (a.load_factor > 0 and a.load_factor <= 1) then
    P.fail(("%s: load_factor is %s, allowed: 0 < load_factor <= 1"):format(f, tostring(a.load_factor)))
  end
  one_of(f, "algorithm", a.algorithm, algorithms)
  if a.precision ~= nil then one_of(f, "precision", a.precision, M.data_types) end
  if a.directory ~= nil and (type(a.directory) ~= "string" or a.directory == "") then
    P.fail(("%s: directory is '%s', allowed: the name of a folder"):format(f, tostring(a.directory)))
  end
  for name in util.ordered(cache_arguments) do self[name] = a[name] == nil and false or a[name] end
end

function CacheParams:__tostring()
  local sets = self.ways and (", %d ways"):format(self.ways) or ""
  return ("%s %g%s%s"):format(self.algorithm, self.load_factor, sets, self.directory and " in " .. self.directory or "")
end

--- `value` as CacheParams: a copy of an instance, or a new one of a table of its arguments.
function M.cache_params(func, value)
  if CacheParams.is(value) then return setmetatable(util.copy(value), getmetatable(value)) end
  if type(value) ~= "table" then P.fail(("%s: cache_params is a %s, wanted CacheParams"):format(func, type(value))) end
  return CacheParams(value)
end

--- Fill a peri_cache_config for a table of `data_type`. The result stays valid as long as `params` does.
function M._fill_cache_params(func, slot, params, data_type)
  if params.precision and params.precision ~= data_type then
    P.fail(("%s: cache precision %s for a table of %s; allowed: %s"):format(func, params.precision, data_type,
      data_type))
  end
  slot.algorithm, slot.load_factor = algorithms[params.algorithm], params.load_factor
  slot.reserved_memory, slot.directory = params.reserved_memory, params.directory or nil
  slot.ways = params.ways == 0 and C.PERI_CACHE_WAYS_NONE or params.ways or 0
end

-- -- optimizers -------------------------------------------------------------------------------------------------------

local kinds = P.options "optimizer"
local aliases = {
  exact_sgd = "sgd", exact_adagrad = "adagrad", exact_rowwise_adagrad = "rowwise_adagrad",
  exact_row_wise_adagrad = "rowwise_adagrad", partial_row_wise_adam = "partial_rowwise_adam",
  partial_row_wise_lamb = "partial_rowwise_lamb", emainplace_row_wise_adagrad = "emainplace_rowwise_adagrad",
}
--- The optimizer that fused_params, FBGEMM or TorchRec's classes (RowWiseAdagrad) call `name`, by its name here; an
--- error of `func` if it is none.
function M.optimizer_of(func, name)
  local function plain(text) return (text:lower():gsub("_", "")) end
  for _, list in ipairs { kinds, aliases } do
    for known in util.ordered(list) do
      if plain(known) == plain(name) then return aliases[known] or known end
    end
  end
  util.one_of(func, "optimizer", name, util.keys(kinds))
end

--- fused_params with which an optimizer of that name trains: what planners and measurements know of a model is no more
--- than it.
function M.usual_params(name)
  local params = { optimizer = M.optimizer_of("embed.config.usual_params", name) }
  if params.optimizer ~= "none" then params.learning_rate = 0.01 end
  if params.optimizer == "rowwise_adagrad_with_counter" then params.weight_decay_mode = "counter" end
  return params
end

--- Names of the optimizers.
function M.optimizers() return util.keys(kinds) end

local decay_modes, counter_decay_modes = P.options "weight_decay_mode", P.options "counter_weight_decay_mode"
local rate_modes = P.options "learning_rate_mode"

--- FBGEMM's definitions, as tables of their fields.
local tail_arguments = { val = 0, is_ratio = false }
local counter_arguments = {
  counter_weight_decay_mode = "none", -- none, l2, decouple, adagradw
  counter_halflife = util.whole(-1, -2),
  adjustment_iter = util.whole(-1, -1),
  adjustment_ub = 1.0,
  learning_rate_mode = "equal",       -- equal, tail_id_lr_increase, tail_id_lr_decrease, counter_sgd
  grad_sum_decay = "no_decay",        -- FBGEMM takes ctr_decay too, and does nothing with it
  tail_id_threshold = util.optional,  -- { val =, is_ratio = }
  max_counter_update_freq = util.whole(1000, 0),
}
local cowclip_arguments = { counter_weight_decay_mode = "none", counter_halflife = util.whole(-1, -2),
  weight_norm_coefficient = 0, lower_bound = 0 }
local average_arguments = { step_ema = util.whole(10, 1), step_start = util.whole(0, 0), step_ema_coef = 0.6 }

--- Row-wise Adagrad with counters: its definition, into `k` (peri_tbe_counter).
local function fill_counter(func, k, mode, a)
  local key = mode == "counter" and "counter_based_regularization" or "cowclip_regularization"
  func = ("%s: %s"):format(func, key)
  local d = util.named(func, a[key] or {}, mode == "counter" and counter_arguments or cowclip_arguments)
  local function lower(value) return tostring(value):lower() end
  k.weight_decay_mode = one_of(func, "counter_weight_decay_mode", lower(d.counter_weight_decay_mode),
    counter_decay_modes)
  k.halflife = d.counter_halflife
  if mode == "cowclip" then
    k.weight_norm_coefficient, k.lower_bound = d.weight_norm_coefficient, d.lower_bound
    return
  end
  k.learning_rate_mode = one_of(func, "learning_rate_mode", lower(d.learning_rate_mode), rate_modes)
  one_of(func, "grad_sum_decay", lower(d.grad_sum_decay), { no_decay = true })
  k.adjustment_iter, k.adjustment_ub, k.max_counter_update_freq = d.adjustment_iter, d.adjustment_ub,
    d.max_counter_update_freq
  local tail = util.named(func .. ": tail_id_threshold", d.tail_id_threshold or {}, tail_arguments)
  k.tail_id_threshold, k.tail_id_is_ratio = tail.val, tail.is_ratio
end

--- EMA in place: its definition, into the optimizer.
local function fill_average(func, o, definition)
  func = func .. ": emainplace_mode"
  local d = util.named(func, definition, average_arguments)
  o.step_ema, o.step_start, o.step_ema_coef = d.step_ema, d.step_start, d.step_ema_coef
end

local optimizer_arguments = {
  optimizer = util.required,
  learning_rate = util.optional.number,
  eps = util.optional.number,
  beta1 = util.optional.number,
  beta2 = util.optional.number,
  weight_decay = util.optional.number,
  weight_decay_mode = "none",
  use_rowwise_bias_correction = false,
  eta = util.optional.number,      -- lars_sgd
  momentum = util.optional.number, -- lars_sgd
  ema_beta = util.optional.number, -- rowwise_rmsprop_ar, and the next two
  ar_alpha = util.optional.number,
  min_shrinkage = util.optional.number,
  counter_based_regularization = util.optional, -- rowwise_adagrad with weight_decay_mode counter: counter_arguments
  cowclip_regularization = util.optional,       -- rowwise_adagrad with weight_decay_mode cowclip: cowclip_arguments
  emainplace_mode = util.optional,              -- emainplace_rowwise_adagrad: average_arguments
  max_norm = util.optional,
  stochastic_rounding = true, -- of f16 and bf16 tables
  exact = false,              -- sums of gradients that do not depend on the order, to the last bit; over ranks:
                              -- docs/sharded_tables.md
  gradient_clipping = false,
  max_gradient = 1.0, -- with gradient_clipping
  bounds_check_mode = "FATAL",
  cache_params = util.optional, -- CacheParams: tables behind a cache
  output_dtype = util.optional, -- of pooled rows: FP32 (default), FP16, BF16
}

--- The names that fused_params may have.
M.optimizer_arguments = optimizer_arguments

--- Those of them that are finite numbers >= 0, also as f32, whatever the optimizer is; the others' ranges are checked
--- where the table is made.
local MOST = (2 - 2 ^ -23) * 2 ^ 127
local from_zero = { learning_rate = true, eps = true, weight_decay = true, eta = true, max_norm = true,
  ar_alpha = true }

--- fused_params -> peri_tbe_optimizer_config, bounds check mode, the optimizer's name, CacheParams or nil, and the
--- output's data type (a key of data_types) or nil. FBGEMM's names and defaults:
--- learning_rate 0.01, eps 1e-8, beta1 0.9, beta2 0.999, eta 0.001, momentum 0.9, ema_beta 0.99, ar_alpha 0,
--- min_shrinkage 0.1; `optimizer` is one of `kinds`, or FBGEMM's EmbOptimType name.
function M.fused_params(func, params)
  local a = util.named(func, params, optimizer_arguments)
  local name = tostring(a.optimizer):lower()
  name = aliases[name] or name
  local mode = tostring(a.weight_decay_mode):lower()
  local counts = mode == "counter" or mode == "cowclip"
  if counts and name == "rowwise_adagrad" then name = "rowwise_adagrad_with_counter" end
  local o = P.struct "peri_tbe_optimizer_config"
  P.check(C.peri_tbe_optimizer_default(one_of(func, "optimizer", name, kinds), o))
  for _, key in ipairs { "learning_rate", "eps", "beta1", "beta2", "weight_decay", "eta", "momentum", "max_norm",
    "ema_beta", "ar_alpha", "min_shrinkage" } do
    if a[key] ~= nil then
      o[key] = util.number(func, key, a[key])
      if from_zero[key] and not (o[key] >= 0 and o[key] <= MOST) then
        P.fail(("%s: %s %s, allowed: finite numbers >= 0"):format(func, key, tostring(a[key])))
      end
    end
  end
  o.weight_decay_mode = one_of(func, "weight_decay_mode", mode, decay_modes)
  for key, wanted in util.ordered { counter_based_regularization = "counter", cowclip_regularization = "cowclip" } do
    if a[key] ~= nil and mode ~= wanted then
      P.fail(("%s: %s with weight_decay_mode '%s', allowed: '%s'"):format(func, key, mode, wanted))
    end
  end
  if counts and name == "rowwise_adagrad_with_counter" then fill_counter(func, o.counter, mode, a) end
  if a.emainplace_mode ~= nil then
    if name ~= "emainplace_rowwise_adagrad" then
      P.fail(("%s: emainplace_mode of optimizer '%s', allowed: 'emainplace_rowwise_adagrad'"):format(func, name))
    end
    fill_average(func, o, a.emainplace_mode)
  end
  o.nearest, o.exact = not a.stochastic_rounding, a.exact
  o.row_bias_correction = a.use_rowwise_bias_correction
  if a.gradient_clipping then
    if not (a.max_gradient > 0 and a.max_gradient <= MOST) then
      P.fail(("%s: max_gradient %s, allowed with gradient_clipping: finite numbers above 0"):format(func,
        tostring(a.max_gradient)))
    end
    o.max_gradient = a.max_gradient
  end
  local cache = a.cache_params ~= nil and M.cache_params(func, a.cache_params) or nil
  if a.output_dtype ~= nil then one_of(func, "output_dtype", a.output_dtype, M.data_types) end
  return o, one_of(func, "bounds_check_mode", a.bounds_check_mode, M.bounds_checks), name, cache, a.output_dtype
end

--- An error unless parameters of single tables (name -> fused_params; nil: there are none) belong to `tables`.
function M._table_fused_params(func, tables, own)
  local known = util.index_of(util.map(tables, function(t) return t.name end))
  for name, params in util.ordered(own or {}) do
    if not known[name] then
      P.fail(("%s: table_fused_params of table '%s', which does not exist; tables: %s"):format(func, tostring(name),
        table.concat(util.keys(known), ", ")))
    end
    if type(params) ~= "table" then
      P.fail(("%s: table_fused_params of table '%s' is a %s, wanted a table"):format(func, name, type(params)))
    end
    M.fused_params(("%s: table_fused_params of table '%s'"):format(func, name), params)
  end
end

local slot_type = ffi.typeof "peri_cache_config"
signature.kind("cache_slot", "a peri_cache_config", function(x) return ffi.istype(slot_type, x) end)
signature.kind("CacheParams", "CacheParams", CacheParams.is)
signature.object("embedding_config", "an EmbeddingBagConfig or EmbeddingConfig",
  { name = "string", embedding_dim = "number", feature_names = "strings" })
signature.list_of("embedding_configs", "a list of EmbeddingBagConfigs or EmbeddingConfigs", "embedding_config")
signature.check("", M, { _check_trained = "func: string, t: table",
  _fill_cache_params = "func: string, slot: cache_slot, params: CacheParams, data_type: string",
  output_names = "tables: embedding_configs", optimizer_of = "func: string, name: string",
  usual_params = "name: string" })

return M
