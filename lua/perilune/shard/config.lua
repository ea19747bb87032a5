-- config.lua: what C is told to make a sharded module of tables: tables with their plan entries, optimizers, codecs,
-- caches.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local codec = require "perilune.dist.codec"
local ops = require "perilune.dist.ops"
local config = require "perilune.embed.config"
local sharding_types = require "perilune.plan.sharding_types"
local types = require "perilune.plan.types"
local signature = require "perilune.signature"
local C = P.C

local M = {}

--- Distinct feature names in order of first use, and their positions.
local function features_of(tables)
  local names, index = {}, {}
  for _, t in ipairs(tables) do
    for _, f in ipairs(t.feature_names) do
      if not index[f] then
        names[#names + 1] = f
        index[f] = #names - 1
      end
    end
  end
  return names, index
end

--- The dtype of the output: what the optimizers' parameters say; all that say something must agree.
local function output_dtype_of(func, a)
  local result = a.fused_params and a.fused_params.output_dtype
  for name, params in util.ordered(a.table_fused_params or {}) do
    if params.output_dtype and result and params.output_dtype ~= result then
      P.fail(("%s: fused_params of table '%s': output_dtype %s, but the module's is %s; allowed: one "
        .. "output_dtype"):format(func, name, tostring(params.output_dtype), tostring(result)))
    end
    result = result or params.output_dtype
  end
  if result then util.one_of(func .. ": fused_params", "output_dtype", result, util.keys(config.data_types)) end
  return P.dtype(config.data_types[result or "FP32"])
end

--- Optimizers of the module: a C array, a list { c =, name =, params =, tables = names }, and for each table the index
--- of its optimizer (0 where it has none of its own: a dense one) and its bounds check.
local function optimizers_of(func, a, plan)
  local list, index, bounds, known = {}, {}, {}, {} -- known: fused_params -> { entry = of list, index =, bounds = }
  for i, t in ipairs(a.tables) do
    local kernel = plan.tables[t.name].compute_kernel
    if not util.index_of(types.trained_kernels)[kernel] then
      P.fail(("%s: table '%s' has compute_kernel '%s', which is for quantized collections; allowed: %s"):format(func,
        t.name, kernel, table.concat(types.trained_kernels, ", ")))
    end
    local params = a.table_fused_params and a.table_fused_params[t.name] or a.fused_params
    if not params and kernel ~= "dense" then
      P.fail(("%s: table '%s' has compute_kernel '%s' but no optimizer; give fused_params%s"):format(func, t.name,
        kernel,
        -- rows of raw ids start again in fused tables only
        a.collisions and "" or ", or plan it with compute_kernel = 'dense'"))
    end
    index[i], bounds[i] = 0, C.PERI_BOUNDS_FATAL
    if params then
      local seen = known[params]
      if not seen then
        local optimizer, check_mode, name = config.fused_params(("fused_params of table '%s'"):format(t.name), params)
        seen = { entry = { c = optimizer, name = name, params = params, tables = {} }, bounds = check_mode }
        known[params] = seen
      end
      bounds[i] = seen.bounds
      if kernel ~= "dense" then
        if not seen.index then
          list[#list + 1] = seen.entry
          seen.index = #list - 1
        end
        index[i] = seen.index
        table.insert(seen.entry.tables, t.name)
      end
    end
  end
  local array = P.structs("peri_tbe_optimizer_config", math.max(#list, 1))
  for i, o in ipairs(list) do array[i - 1] = o.c end
  return array, list, index, bounds
end

--- Fill in the codecs of the exchanges of rows. slots: operation -> field of the configuration. A registry may know of
--- more operations.
local function fill_codecs(func, cfg, registry, slots)
  if registry == nil then return end
  func = func .. ": qcomm_codecs_registry"
  if type(registry) ~= "table" then
    P.fail(("%s is a %s, wanted a table of QuantizedCommCodecs by operation"):format(func, type(registry)))
  end
  for op, codecs in util.ordered(registry) do
    util.one_of(func, "an operation", tostring(op), util.keys(codec.CommOp))
    if not codec.QuantizedCommCodecs.is(codecs) then
      P.fail(("%s: %s is a %s, wanted QuantizedCommCodecs"):format(func, op, type(codecs)))
    end
  end
  for op, name in util.ordered(slots) do
    local codecs, slot = registry[op], cfg[name]
    if codecs then
      slot.forward, slot.backward = codecs.forward and codecs.forward.ptr or nil, codecs.backward
        and codecs.backward.ptr or nil
    end
  end
end

--- The cache of table t, or nil: the plan's parameters, else the optimizer's, else the defaults.
local function cache_of(a, t, sharding)
  if sharding.compute_kernel ~= "fused_uvm_caching" then return nil end
  local params = a.table_fused_params and a.table_fused_params[t.name] or a.fused_params
  local func = ("table '%s'"):format(t.name)
  local cache, slot = config.cache_params(func, sharding.cache_params or params.cache_params or {}),
    P.structs("peri_cache_config", 1)
  config._fill_cache_params(func, slot[0], cache, t.data_type)
  return slot, cache
end

--- C's number for what a table holds.
local function row_dtype(data_type)
  return config.row_formats[config.table_types[data_type]] or P.dtype(config.data_types[data_type])
end

--- Tables with their plan entries, in C's words, into `cfg`. optimizer: for each table its number; nil: nothing is
--- trained. keep(x): x lives as long as cfg does.
local function fill_tables(cfg, a, plan, env, optimizer, bounds, keep)
  local n, names, positions = #a.tables, features_of(a.tables)
  local tables = keep(P.structs("peri_sharded_table", n))
  local function array(ctype, values) return keep(ffi.new(ctype, math.max(#values, 1), values)) end
  for i, t in ipairs(a.tables) do
    local c, sharding, init = tables[i - 1], plan.tables[t.name], t:initialiser()
    c.name, c.rows, c.cols = t.name, t.num_embeddings, t.embedding_dim
    c.pooling = t.pooling and config.poolings[t.pooling] or C.PERI_POOLING_NONE
    c.init, c.init_a, c.init_b = init.kind, init.a, init.b
    c.sharding_type = sharding_types.of[sharding.sharding_type].code
    c.compute_kernel = not optimizer and C.PERI_KERNEL_QUANT or sharding.compute_kernel == "dense"
      and C.PERI_KERNEL_DENSE
      or C.PERI_KERNEL_FUSED
    c.mapped = sharding.compute_kernel == "fused_uvm" or sharding.compute_kernel == "quant_uvm"
    c.features = array("int32_t[?]", util.map(t.feature_names, function(f) return positions[f] end))
    c.n_features, c.optimizer = #t.feature_names, optimizer and optimizer[i] or 0
    c.dtype = row_dtype(t.data_type)
    if not optimizer then
      local bytes = config.row_formats[config.table_types[t.data_type]] ~= nil
      c.init, c.init_a, c.init_b = bytes and C.PERI_INIT_NONE or C.PERI_INIT_CONSTANT, 0, 0
    end
    c.bounds_check = bounds[i]
    local ranks = sharding:ranks_on(env.nodes)
    c.n_ranks = ranks and #ranks or 0
    c.ranks = ranks and array("int32_t[?]", ranks) or nil
    c.sizes = sharding.sizes and array("int64_t[?]", sharding.sizes) or nil
    local cache, params
    if optimizer then cache, params = cache_of(a, t, sharding) end
    if a.collisions then c.collision = keep(a.collisions:_entry(t.name)) end
    c.cache = cache
    keep(cache)
    keep(params)
  end
  cfg.tables, cfg.n_tables = tables, n
  cfg.features, cfg.n_features = array("const char *[?]", names), #names
end

local function division_of(func, a)
  local division = a.gradient_division
  if division ~= nil then signature.value(func, "gradient_division", division, "boolean") end
  if division == nil then division = ops.get_gradient_division(a.group) end
  return division and C.PERI_DIVISION_ON or C.PERI_DIVISION_OFF
end

local function keeper()
  local anchors = {}
  return anchors, function(x)
    anchors[#anchors + 1] = x or false
    return x
  end
end

--- The configuration of a module with the arguments `a` (embedding.lua), a plan that was checked in `env`, and codecs
--- for the operations in `slots`. Returns it, what must live while it is used, and its optimizers: a list of { name =,
--- params = (fused_params), tables = (names), learning_rate = }.
function M.sharded_config(func, a, plan, env, kind, slots)
  local anchors, keep = keeper()
  config._table_fused_params(func, a.tables, a.table_fused_params)
  for _, t in ipairs(a.tables) do config._check_trained(func, t) end
  local optimizers, list, optimizer, bounds = optimizers_of(func, a, plan)
  local cfg = P.struct "peri_sharded_config"
  fill_tables(cfg, a, plan, env, optimizer, bounds, keep)
  cfg.group, cfg.device = a.group:ptr(), P.device(a.device)
  cfg.optimizers, cfg.n_optimizers = keep(optimizers), #list
  cfg.kind, cfg.name = kind, keep(a.name)
  cfg.seed = a.seed or P.state.seed
  cfg.weighted, cfg.output_dtype = a.is_weighted, output_dtype_of(func, a)
  cfg.index_dedup, cfg.returns_rows = a.index_dedup, a.returns_rows
  cfg.gradient_division = division_of(func, a)
  fill_codecs(func, cfg, a.qcomm_codecs_registry, slots)
  return cfg, anchors, util.map(list, function(o)
    return { name = o.name, params = o.params, tables = o.tables, learning_rate = o.c.learning_rate }
  end)
end

--- The same of a module that is not trained. how: { bounds_check_mode =, output_dtype =, places = } (quant.lua).
function M.quantized(func, a, plan, env, kind, slots, how)
  local anchors, keep = keeper()
  local cfg, bounds = P.struct "peri_sharded_config", config.bounds_checks[how.bounds_check_mode]
  fill_tables(cfg, a, plan, env, nil, util.map(a.tables, function() return bounds end), keep)
  cfg.group, cfg.device, cfg.kind, cfg.places = a.group:ptr(), P.device(a.device), kind, how.places
  cfg.name = keep(a.name)
  cfg.weighted, cfg.output_dtype = a.is_weighted, P.dtype(config.data_types[how.output_dtype])
  cfg.gradient_division = C.PERI_DIVISION_OFF -- there are no gradients
  fill_codecs(func, cfg, a.qcomm_codecs_registry, slots)
  return cfg, anchors, {}
end

return M
