-- bag.lua: EmbeddingBagCollection over ranks: the plan says where rows live; ids go there, pooled rows come back (perilune/shard.h).
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local jagged = require "perilune.jagged"
local nn = require "perilune.nn"
local awaitable = require "perilune.dist.awaitable"
local group_of = require("perilune.dist.group").group_of
local codec = require "perilune.dist.codec"
local ops = require "perilune.dist.ops"
local config = require "perilune.embed.config"
local tbes = require "perilune.embed.tbe"
local files = require "perilune.shard.files"
local types = require "perilune.plan.types"
local parameter = require "perilune.nn.parameter"
local signature = require "perilune.signature"
local C, check, state = P.C, P.check, P.state

local wrap, _, module_ptr = P.handle("peri_sharded_ebc", {}, nil, "a ShardedEmbeddingBagCollection")
local out = ffi.new "peri_sharded_ebc *[1]"
local work_out, tensor_out = awaitable.work_out, Tensor.out
local kjt_ptr = jagged.KeyedJaggedTensor.ptr

-- -- awaitables ----------------------------------------------------------------------------------------------------------------------

--- The exchange of ids; its result is itself, for compute_and_output_dist.
local InputDist = util.class("ShardedInputDist", awaitable.Awaitable)
function InputDist:init(work)
  awaitable.Awaitable.init(self)
  self.work = awaitable.wrap_work(work)
end
function InputDist:_wait_impl()
  awaitable.wait_work(self.work.ptr)
  return self
end
function InputDist:_test_impl() return self.work.ptr == nil or C.peri_work_test(self.work.ptr) ~= C.PERI_PENDING end

--- The exchange of pooled rows; stands for the KeyedTensor that it becomes.
local EmbeddingBagCollectionAwaitable = awaitable.lazy_class("EmbeddingBagCollectionAwaitable", awaitable.Awaitable)
function EmbeddingBagCollectionAwaitable:init(module, work)
  awaitable.Awaitable.init(self)
  rawset(self, "_module", module)
  rawset(self, "_work", awaitable.wrap_work(work))
end
function EmbeddingBagCollectionAwaitable:_wait_impl()
  local work, module = rawget(self, "_work"), rawget(self, "_module")
  awaitable.wait_work(work.ptr)
  local status = C.peri_sharded_ebc_output(module_ptr(module._ref), work.ptr, tensor_out)
  work:release()
  check(status)
  return module:_keyed_tensor(Tensor.wrap(tensor_out[0]))
end
function EmbeddingBagCollectionAwaitable:_test_impl() return C.peri_work_test(rawget(self, "_work").ptr) ~= C.PERI_PENDING end

-- -- the module ------------------------------------------------------------------------------------------------------------------------

local ShardedEmbeddingBagCollection = nn.Module:extend "ShardedEmbeddingBagCollection"

local arguments = {
  tables = util.required,      -- list of EmbeddingBagConfig
  plan = util.required,        -- EmbeddingModuleShardingPlan, or a table of ParameterShardings
  group = util.required,       -- the ranks that share the module
  fused_params = util.optional, -- optimizer of the fused tables, as in EmbeddingBagCollection
  table_fused_params = util.optional, -- table name -> fused_params of its own
  is_weighted = false,
  device = util.optional,
  seed = util.optional,        -- default: the rank state's
  gradient_division = util.optional,     -- whether gradients of tables are means over ranks; default: as dist.ops has it for the group
  qcomm_codecs_registry = util.optional, -- operation -> QuantizedCommCodecs (dist/codec.lua); default: rows travel as f32
  name = "",                   -- path of the module, for messages
}

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

--- Names of the output's parts: the feature, or "feature@table" where several tables use it.
local function output_names(tables)
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

--- Parameters of single tables belong to tables that exist.
local function check_own_params(a)
  local known = util.index_of(util.map(a.tables, function(t) return t.name end))
  for name, params in util.ordered(a.table_fused_params or {}) do
    if not known[name] then
      P.fail(("ShardedEmbeddingBagCollection: table_fused_params of table '%s', which does not exist; tables: %s"):format(tostring(name),
        table.concat(util.keys(known), ", ")))
    end
    if type(params) ~= "table" then
      P.fail(("ShardedEmbeddingBagCollection: table_fused_params of table '%s' is a %s, wanted a table"):format(name, type(params)))
    end
  end
end

--- The dtype of the output: what the optimizers' parameters say; all that say something must agree.
local function output_dtype_of(a)
  local result = a.fused_params and a.fused_params.output_dtype
  for name, params in util.ordered(a.table_fused_params or {}) do
    if params.output_dtype and result and params.output_dtype ~= result then
      P.fail(("ShardedEmbeddingBagCollection: fused_params of table '%s': output_dtype %s, but the module's is %s; allowed: one "
        .. "output_dtype"):format(name, tostring(params.output_dtype), tostring(result)))
    end
    result = result or params.output_dtype
  end
  if result then util.one_of("ShardedEmbeddingBagCollection: fused_params", "output_dtype", result, util.keys(config.data_types)) end
  return P.dtype(config.data_types[result or "FP32"])
end

--- Optimizers of the module: a C array, a list { c =, name = }, and for each table the index of its optimizer (0 where it has none of its
--- own: a dense one) and its bounds check.
local function optimizers_of(a, plan)
  local list, index, bounds, known = {}, {}, {}, {} -- known: fused_params -> { entry = of list, index =, bounds = }
  for i, t in ipairs(a.tables) do
    local kernel = plan.tables[t.name].compute_kernel
    local params = a.table_fused_params and a.table_fused_params[t.name] or a.fused_params
    if not params and kernel ~= "dense" then
      P.fail(("ShardedEmbeddingBagCollection: table '%s' has compute_kernel '%s' but no optimizer; give fused_params, or "
        .. "plan it with compute_kernel = 'dense'"):format(t.name, kernel))
    end
    index[i], bounds[i] = 0, C.PERI_BOUNDS_FATAL
    if params then
      local seen = known[params]
      if not seen then
        local optimizer, check_mode, name = config.fused_params(("fused_params of table '%s'"):format(t.name), params)
        seen = { entry = { c = optimizer, name = name }, bounds = check_mode }
        known[params] = seen
      end
      bounds[i] = seen.bounds
      if kernel ~= "dense" then
        if not seen.index then
          list[#list + 1] = seen.entry
          seen.index = #list - 1
        end
        index[i] = seen.index
      end
    end
  end
  local array = ffi.new("peri_tbe_optimizer[?]", math.max(#list, 1))
  for i, o in ipairs(list) do array[i - 1] = o.c end
  return array, list, index, bounds
end

--- Fill in the codecs of both exchanges of pooled rows. A registry may know of more operations.
local function fill_codecs(cfg, registry)
  local func = "ShardedEmbeddingBagCollection: qcomm_codecs_registry"
  if registry == nil then return end
  if type(registry) ~= "table" then
    P.fail(("%s is a %s, wanted a table of QuantizedCommCodecs by operation"):format(func, type(registry)))
  end
  for op, codecs in util.ordered(registry) do
    util.one_of(func, "an operation", tostring(op), util.keys(codec.CommOp))
    if not codec.QuantizedCommCodecs.is(codecs) then
      P.fail(("%s: %s is a %s, wanted QuantizedCommCodecs"):format(func, op, type(codecs)))
    end
  end
  for op, slot in util.ordered { POOLED_EMBEDDINGS_ALL_TO_ALL = cfg.all_to_all, POOLED_EMBEDDINGS_REDUCE_SCATTER = cfg.reduce_scatter } do
    local codecs = registry[op]
    if codecs then
      slot.forward, slot.backward = codecs.forward and codecs.forward.ptr or nil, codecs.backward and codecs.backward.ptr or nil
    end
  end
end

--- The cache of table t, or nil: the plan's parameters, else the optimizer's, else the defaults.
local function cache_of(a, t, sharding)
  if sharding.compute_kernel ~= "fused_uvm_caching" then return nil end
  local params = a.table_fused_params and a.table_fused_params[t.name] or a.fused_params
  local func = ("table '%s'"):format(t.name)
  local cache, slot = config.cache_params(func, sharding.cache_params or params.cache_params or {}), ffi.new "peri_cache_params[1]"
  config.fill_cache_params(func, slot[0], cache, t.data_type)
  return slot, cache
end

function ShardedEmbeddingBagCollection:init(args)
  local a = util.named("ShardedEmbeddingBagCollection", args, arguments)
  local plan = types.EmbeddingModuleShardingPlan.is(a.plan) and a.plan or types.EmbeddingModuleShardingPlan(a.plan)
  group_of("ShardedEmbeddingBagCollection", a.group)
  local env = { world_size = a.group:size(), local_size = a.group.local_size }
  plan:validate(a.tables, env, a.name)
  self.tables, self.plan, self.group, self.is_weighted = a.tables, plan, a.group, a.is_weighted
  check_own_params(a)
  local names, positions = features_of(a.tables)
  local optimizers, list, index, bounds = optimizers_of(a, plan)
  self._optimizer_names = util.map(list, function(o) return o.name end)
  local n = #a.tables
  local tables, anchors = ffi.new("peri_sharded_table[?]", n), {}
  local function array(ctype, values)
    local x = ffi.new(ctype, math.max(#values, 1), values)
    anchors[#anchors + 1] = x
    return x
  end
  for i, t in ipairs(a.tables) do
    local c, sharding, init = tables[i - 1], plan.tables[t.name], t:initialiser()
    c.name, c.rows, c.cols = t.name, t.num_embeddings, t.embedding_dim
    c.pooling, c.init, c.init_a, c.init_b = config.poolings[t.pooling], init.kind, init.a, init.b
    c.sharding_type = types.type_codes[sharding.sharding_type]
    c.compute_kernel = sharding.compute_kernel == "dense" and C.PERI_KERNEL_DENSE or C.PERI_KERNEL_FUSED
    c.features = array("int32_t[?]", util.map(t.feature_names, function(f) return positions[f] end))
    c.n_features, c.optimizer, c.dtype = #t.feature_names, index[i], P.dtype(config.data_types[t.data_type])
    c.bounds_check = bounds[i]
    c.n_ranks = sharding.ranks and #sharding.ranks or 0
    c.ranks = sharding.ranks and array("int32_t[?]", sharding.ranks) or nil
    c.sizes = sharding.sizes and array("int64_t[?]", sharding.sizes) or nil
    local cache, kept = cache_of(a, t, sharding)
    c.cache = cache
    anchors[#anchors + 1], anchors[#anchors + 2] = cache or false, kept or false
  end
  local cfg = ffi.new "peri_sharded_ebc_config"
  cfg.group, cfg.device = a.group:ptr(), P.device(a.device)
  cfg.tables, cfg.n_tables = tables, n
  cfg.features, cfg.n_features = array("const char *[?]", names), #names
  cfg.optimizers, cfg.n_optimizers = optimizers, #list
  cfg.seed = a.seed or state.seed
  cfg.local_size = env.local_size
  cfg.weighted, cfg.output_dtype = a.is_weighted, output_dtype_of(a)
  local division = a.gradient_division
  if division ~= nil then signature.value("ShardedEmbeddingBagCollection", "gradient_division", division, "boolean") end
  if division == nil then division = ops.get_gradient_division(a.group) end
  cfg.gradient_division = division and C.PERI_DIVISION_ON or C.PERI_DIVISION_OFF
  fill_codecs(cfg, a.qcomm_codecs_registry)
  self:_make(cfg)
  self._names, self._dims = output_names(a.tables)
  self._keys = jagged.Keys.of(self._names)
  self._lengths = ffi.new("int64_t[?]", #self._dims, self._dims)
  self:_register_dense()
end

--- Make the C module. With tables in files, ranks tell each other what came of it.
function ShardedEmbeddingBagCollection:_make(cfg)
  self._in_files = false
  for _, t in ipairs(self.tables) do
    self._in_files = self._in_files or self.plan.tables[t.name].compute_kernel == "fused_uvm_caching"
  end
  local ok, err = pcall(check, C.peri_sharded_ebc_new(cfg, out))
  if not ok and not self._in_files then error(err, 0) end
  if ok then self._ref = P.lasting(wrap, out[0]) end
  if not self._in_files then return end -- no rank has any
  files.agree(self.group, "ShardedEmbeddingBagCollection", { self }, not ok and err or nil)
end

function ShardedEmbeddingBagCollection:_keyed_tensor(values)
  return jagged.KeyedTensor.of(self._keys, self._lengths, values)
end

--- Names of the output's parts and their columns, in order.
function ShardedEmbeddingBagCollection:embedding_names() return self._names end
function ShardedEmbeddingBagCollection:embedding_dims() return self._dims end
--- The tables' configurations.
function ShardedEmbeddingBagCollection:embedding_bag_configs() return self.tables end

--- Send ids to their owners. Collective. Returns an Awaitable for compute_and_output_dist.
function ShardedEmbeddingBagCollection:input_dist(features)
  check(C.peri_sharded_ebc_input_dist(module_ptr(self._ref), kjt_ptr(features), work_out))
  return InputDist(work_out[0])
end

--- Look up what arrived and send the rows back. Collective. Uses `dist` up: what it holds lives on in the gradient tape only. Returns a
--- LazyAwaitable of a KeyedTensor [batch, columns].
function ShardedEmbeddingBagCollection:compute_and_output_dist(dist)
  local work = dist.work
  if work.ptr == nil then P.fail "ShardedEmbeddingBagCollection:compute_and_output_dist: this input_dist is already used" end
  check(C.peri_sharded_ebc_compute_and_output_dist(module_ptr(self._ref), work.ptr, work_out))
  work:release()
  return EmbeddingBagCollectionAwaitable(self, work_out[0])
end

--- Bring the rows that `dist` (waited for, not yet looked up) will need from files into memory, in the background.
function ShardedEmbeddingBagCollection:prefetch(dist)
  local work = dist.work
  if work.ptr == nil then P.fail "ShardedEmbeddingBagCollection:prefetch: this input_dist is already used" end
  check(C.peri_sharded_ebc_prefetch(module_ptr(self._ref), work.ptr))
end

--- The C module, or an error after release.
function ShardedEmbeddingBagCollection:_pointer() return module_ptr(self._ref) end

--- Whether some table is in files, on whatever rank.
function ShardedEmbeddingBagCollection:in_files() return self._in_files end

--- Write the changed rows of tables in files; afterwards all files of all ranks are whole and of one flush. Collective.
function ShardedEmbeddingBagCollection:flush()
  if self._in_files then files.flush(self.group, "ShardedEmbeddingBagCollection:flush", { self }) end
end

function ShardedEmbeddingBagCollection:forward(features)
  return self:compute_and_output_dist(self:input_dist(features):wait())
end

-- -- state -------------------------------------------------------------------------------------------------------------------------------

local piece = ffi.new "peri_local_shard"
local function state_name(x) return signature.value("local_shards", "the state's name", x, "string") end
local function row_number(x) return signature.value("local_shards", "row", x, "integer") end
local COPY_ROWS = 65536

--- The pieces of tables on this rank: a list of { table = name, rank, row_offset, rows, col_offset, cols, dense, replica, state =
--- function(name), read = function(name, row, tensor), write = function(name, row, tensor), cached, cache_statistics }. state("weight") and
--- so on give live views of shards in memory; rows of shards in files (cached) are read and written.
function ShardedEmbeddingBagCollection:local_shards()
  local list, ref = {}, self._ref
  for i = 1, C.peri_sharded_ebc_local_shards(module_ptr(ref)) do
    check(C.peri_sharded_ebc_local_shard(module_ptr(ref), i - 1, piece))
    local batch, number = piece.tbe, piece.tbe_table
    -- The pieces keep the module, and ask whether it was released before they touch its table batch.
    local function tbe()
      module_ptr(ref)
      return batch
    end
    list[i] = {
      table = self.tables[piece.table + 1].name, rank = piece.shard.rank,
      row_offset = tonumber(piece.shard.row_offset), rows = tonumber(piece.shard.rows),
      col_offset = tonumber(piece.shard.col_offset), cols = tonumber(piece.shard.cols),
      dense = piece.dense, replica = piece.replica, cached = C.peri_tbe_cache_io(batch) ~= nil,
      read = function(name, row, result)
        check(C.peri_tbe_read(tbe(), number, state_name(name), row_number(row), Tensor.ptr(result)))
        return result
      end,
      write = function(name, row, source) check(C.peri_tbe_write(tbe(), number, state_name(name), row_number(row), Tensor.ptr(source))) end,
      shape = function(name)
        local dims = ffi.new "int64_t[2]"
        local n = check(C.peri_tbe_state_shape(tbe(), number, state_name(name), dims))
        return { tonumber(dims[0]), n == 2 and tonumber(dims[1]) or nil }
      end,
      iteration = function() return tonumber(C.peri_tbe_iteration(tbe())) end,
      cache_statistics = function() return tbes.cache_statistics_of(tbe(), tonumber(number)) end,
      state = function(name)
        check(C.peri_tbe_state(tbe(), number, state_name(name), tensor_out))
        return Tensor.wrap(tensor_out[0])
      end,
      leaf = piece.dense and function()
        check(C.peri_tbe_leaf(tbe(), number, tensor_out))
        return Tensor.wrap(tensor_out[0])
      end or nil,
      names = function()
        local names, k = {}, 0
        while true do
          local name = C.peri_tbe_state_name(tbe(), k)
          if name == nil then return names end
          k = k + 1
          names[k] = ffi.string(name)
        end
      end,
    }
  end
  return list
end

--- Give the memory and files back now; the module is of no use afterwards. Tables in files: flush first.
function ShardedEmbeddingBagCollection:release() self._ref:release() end

--- States that have no rows: a matrix of columns, a number of the table.
local without_rows = { preconditioner = true, max_counter = true }

--- Write a shard's part of one of them.
local function copy_whole(collection, s, name)
  local whole = collection:table_state(s.table, name)
  if whole:dim() == 2 then
    whole = whole:slice(1, s.col_offset, s.col_offset + s.cols):slice(2, s.col_offset, s.col_offset + s.cols)
  end
  s.write(name, 0, whole)
end

--- Write a shard's rows of weights or of a state.
local function copy_rows(collection, s, name)
  for row = 0, s.rows - 1, COPY_ROWS do
    local from = collection:table_rows(s.table, name, s.row_offset + row, math.min(COPY_ROWS, s.rows - row))
    if from:dim() == 2 then from = from:slice(2, s.col_offset, s.col_offset + s.cols) end
    s.write(name, row, from)
  end
end

--- Take this rank's parts of the weights and optimizer states of an unsharded collection that has memory (one that is a mere description is
--- left alone: both start from the same numbers), and of a trained one its iteration, and its learning rate if that was changed.
function ShardedEmbeddingBagCollection:copy_from(collection)
  if not collection:is_materialised() then return end
  local batch, params = collection:materialise(), collection.fused_params
  if params then
    check(C.peri_sharded_ebc_iteration_set(self._ref.ptr, batch:iteration()))
    local rate = batch:learning_rate()
    if rate ~= config.fused_params("EmbeddingBagCollection: fused_params", params).learning_rate then self:set_learning_rate(rate) end
  end
  for _, s in ipairs(self:local_shards()) do
    for _, name in ipairs(s.names()) do
      local copy = without_rows[name] and copy_whole or copy_rows
      copy(collection, s, name)
    end
  end
end

--- Make parameters of dense tables: "embedding_bags.NAME.weight"; the k-th of the pieces of a table on this rank has ".k" behind it.
function ShardedEmbeddingBagCollection:_register_dense()
  local pieces, own = {}, {}
  for _, s in ipairs(self:local_shards()) do
    if s.dense then
      local name = "embedding_bags." .. s.table .. ".weight"
      pieces[name] = (pieces[name] or -1) + 1
      if pieces[name] > 0 then name = name .. "." .. pieces[name] end
      self:register_parameter(name, P.lasting(s.leaf))
      if not s.replica then
        own[#own + 1] = name
        parameter.own_parts[rawget(self, name)] = true
      end
    end
  end
  self._own = own
end

--- Names of the parameters that only this rank has, so that their gradients are not averaged over ranks: its shards of dense tables.
function ShardedEmbeddingBagCollection:own_parameters() return self._own end

--- Learning rate of the fused tables from now on.
function ShardedEmbeddingBagCollection:set_learning_rate(learning_rate)
  for i = 1, #self._optimizer_names do
    check(C.peri_sharded_ebc_learning_rate_set(module_ptr(self._ref), i - 1, learning_rate))
  end
end

function ShardedEmbeddingBagCollection:__tostring()
  return ("ShardedEmbeddingBagCollection\n%s"):format(tostring(self.plan))
end

signature.kind("Collection", "an EmbeddingBagCollection", function(x)
  return type(x) == "table" and type(x.is_materialised) == "function"
end)
signature.kind("InputDist", "what input_dist returned", InputDist.is)
signature.check("ShardedEmbeddingBagCollection:", ShardedEmbeddingBagCollection, {
  input_dist = "self: table, features: KeyedJaggedTensor", forward = "self: table, features: KeyedJaggedTensor",
  compute_and_output_dist = "self: table, dist: InputDist", prefetch = "self: table, dist: InputDist",
  copy_from = "self: table, collection: Collection", set_learning_rate = "self: table, learning_rate: number",
})

return ShardedEmbeddingBagCollection
