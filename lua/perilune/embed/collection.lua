-- collection.lua: what EmbeddingBagCollection (bag.lua) and EmbeddingCollection (sequence.lua) share: named tables that
-- features look into, over one table batch. With fused_params the tables are updated in the backward pass; without,
-- they are ordinary parameters with dense gradients. Memory is taken when it is first needed, so that a collection that
-- is only a description (of what to shard) costs nothing.
--
-- A class has the fields parameter_prefix and config_name, and calls setup in its init; its forward and _prepare_batch
-- say what becomes of a batch.
local ffi = require "ffi"
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local jagged = require "perilune.jagged"
local Module = require "perilune.nn.module"
local parameter = require "perilune.nn.parameter"
local config = require "perilune.embed.config"
local kept = require "perilune.embed.kept"
local tbe = require "perilune.embed.tbe"
local FusedOptimizer = require("perilune.embed.fused").FusedOptimizer
local ShardedTensor = require("perilune.tensor.sharded").ShardedTensor
local signature = require "perilune.signature"
local C = P.C

local Keys, KeyedJaggedTensor = jagged.Keys, jagged.KeyedJaggedTensor

local TableCollection = Module:extend "TableCollection"

--- The data types of a class whose tables are not trained, and may be of several; false: those that can be, one for a
--- collection.
TableCollection.data_types = false

--- A class of collections. Whoever asks for the parameters or buffers of one makes it take its memory.
function TableCollection.extend(base, name)
  local class = Module.extend(base, name)
  class.__index = function(self, key)
    if key == "_parameters" or key == "_buffers" then
      if rawget(self, "_tbe") == nil then return nil end
      self:materialise()
      return rawget(self, key)
    end
    return class[key]
  end
  return class
end

--- The arguments of all collections, and `more`.
function TableCollection._arguments(more)
  local list = {
    tables = util.required.list,        -- list of EmbeddingBagConfig or EmbeddingConfig
    device = util.optional,             -- a device's name, or "meta": never take memory
    fused_params = util.optional.table, -- { optimizer = "rowwise_adagrad", learning_rate =, eps =, ... }; nil: dense
                                        -- gradients
    table_fused_params = util.optional.table, -- table name -> fused_params of its own, in place of those of all tables;
                                        -- such tables are trained when they are sharded (DistributedModelParallel)
    seed = util.optional.seed,          -- of the start values; default: that of the running rank
    table_batch = util.optional,        -- a table batch (peri.embed.tbe) of these tables, which several collections may
                                        -- use
  }
  for name, value in util.ordered(more) do list[name] = value end
  return list
end

local function check_tables(self, tables, described)
  local f, class = self.class_name, config[self.config_name]
  if type(tables) ~= "table" or #tables == 0 then
    P.fail(("%s: tables is no list of %s"):format(f, self.config_name))
  end
  local seen = {}
  for i, t in ipairs(tables) do
    if not class.is(t) then P.fail(("%s: entry %d of tables is no %s"):format(f, i, self.config_name)) end
    t:_check()
    if seen[t.name] then P.fail(("%s: two tables are named '%s'"):format(f, t.name)) end
    if not self.data_types then config._check_trained(f, t) end
    if not self.data_types and t.data_type ~= tables[1].data_type and not described then
      P.fail(("%s: table '%s' holds %s, table '%s' %s; allowed: one data_type, except on device 'meta' (to be "
        .. "sharded)"):format(f, t.name, t.data_type, tables[1].name, tables[1].data_type))
    end
    seen[t.name] = true
  end
end

--- A table batch that was given has the tables of the configurations, in their order.
local function check_shared(self, a)
  local f, batch = self.class_name, a.table_batch
  if not tbe.is(batch) then P.fail(("%s: table_batch is %s, wanted a table batch"):format(f, errors.kind(batch))) end
  for _, name in ipairs { "fused_params", "table_fused_params", "device", "seed" } do
    if a[name] then P.fail(("%s: %s is the table batch's own; leave it out beside table_batch"):format(f, name)) end
  end
  for i, t in ipairs(a.tables) do
    local has, pooling = batch:table(i), t.pooling or "NONE"
    local function text(x) return ("'%s', %d x %d, pooling %s"):format(x.name, x.rows, x.cols, x.pooling) end
    local wanted = text { name = t.name, rows = t.num_embeddings, cols = t.embedding_dim, pooling = pooling }
    if not has or text(has) ~= wanted then
      P.fail(("%s: table %d of table_batch is %s, wanted %s"):format(f, i, has and text(has) or "not there", wanted))
    end
  end
  if batch:table(#a.tables + 1) then
    P.fail(("%s: table_batch has more tables than the %d of tables"):format(f, #a.tables))
  end
end

--- A copy of a configuration or of fused_params, with copies of the lists and tables in it.
local function copied(x)
  local out = util.copy(x)
  for key, value in util.ordered(x) do
    if type(value) == "table" then out[key] = setmetatable(util.copy(value), getmetatable(value)) end
  end
  return setmetatable(out, getmetatable(x))
end

--- Take the arguments `a`, checked against `arguments`, and find the features of the tables.
function TableCollection:_setup(a)
  check_tables(self, a.tables, a.device == "meta")
  if a.fused_params then config.fused_params(self.class_name .. ": fused_params", a.fused_params) end
  if a.table_fused_params and not a.fused_params then
    P.fail(self.class_name .. ": table_fused_params without fused_params, which are for the other tables; give both")
  end
  config._table_fused_params(self.class_name, a.tables, a.table_fused_params)
  -- Copies: a caller may change its own tables later, to make a second collection of them.
  self.tables, self.fused_params = util.map(a.tables, copied), a.fused_params and copied(a.fused_params) or false
  self.table_fused_params = a.table_fused_params and {} or false
  for name, params in util.ordered(a.table_fused_params or {}) do self.table_fused_params[name] = copied(params) end
  self.seed, self.device = a.seed or false, a.device or false
  self.table_batch = a.table_batch or false
  if a.table_batch then
    check_shared(self, a)
    P.keep_for_good(a.table_batch) -- the collection looks rows up in it as long as it lives
  end
  local features, index = {}, {} -- each feature once
  self._outputs = {} -- { table =, feature =, name = } of each output
  for t, table_config in ipairs(a.tables) do
    for _, name in ipairs(table_config.feature_names) do
      if not index[name] then
        features[#features + 1] = name
        index[name] = #features
      end
      self._outputs[#self._outputs + 1] = { table = t, feature = index[name], name = name }
    end
  end
  self._features = features
  self._names, self._dims = config.output_names(a.tables)
  self._input = ffi.new "peri_tbe_input"
  self._shape = ffi.new "int64_t[2]"
  self._blocks, self._seen_keys, self._seen_stride, self._ahead = false, false, -1, false
  self._kept = kept.snapshot(self, { "tables" }) -- names and columns of outputs are known from now on; see _check_kept
  rawset(self, "_tbe", false)
  self._moment = false
  rawset(self, "_parameters", nil) -- see extend
  rawset(self, "_buffers", nil)
end

--- Make the table batch, and register its tables.
function TableCollection:_make()
  local shared = self.table_batch
  local batch = shared or tbe.new {
    tables = util.map(self.tables, function(t)
      return { name = t.name, rows = t.num_embeddings, cols = t.embedding_dim, pooling = t.pooling or "NONE",
        init = t:initialiser(), raw_ids = self._moment and true or false }
    end),
    fused_params = self.fused_params or { optimizer = "none" },
    features = self._features, data_type = self.tables[1].data_type, seed = self.seed or nil, device = self.device
      or nil,
  }
  local parameters, buffers = {}, {}
  for i, t in ipairs(self.tables) do
    local name = ("%s.%s.weight"):format(self.parameter_prefix, t.name)
    local list = self.fused_params and buffers or parameters
    if not batch:is_cached() then -- rows in files are no tensors
      if shared then list = batch:has_leaves() and parameters or buffers end
      list[#list + 1] = name
      rawset(self, name, list == buffers and batch:state(i) or batch:leaf(i))
    end
  end
  rawset(self, "_parameters", parameters)
  rawset(self, "_buffers", buffers)
  return batch
end

--- Allocate and initialise the tables, if that has not been done. Returns their table batch.
function TableCollection:materialise()
  if not self._tbe then
    if self.device == "meta" then
      P.fail(self.class_name .. ": it is on device 'meta', a description without memory; shard it "
        .. "(DistributedModelParallel), or make it without device = 'meta'")
    end
    self:_check_kept()
    self._tbe = P.lasting(self._make, self)
    self._kept = kept.snapshot(self, { "tables", "fused_params", "seed", "device", "table_batch" },
      { fused_params = config.optimizer_arguments })
  end
  return self._tbe
end

--- Of a description on device "meta" that nobody shards: its tables are on the rank's device from now on.
function TableCollection:_leave_meta()
  if self.device ~= "meta" then return end
  check_tables(self, self.tables, false)
  self.device = false
end

--- Whether the tables have memory yet.
function TableCollection:is_materialised() return self._tbe ~= false end

--- Whether the table's weights are a parameter that is not to learn: requires_grad(false).
function TableCollection:_is_frozen(name)
  name = ("%s.%s.weight"):format(self.parameter_prefix, name)
  local leaf = util.index_of(self._parameters)[name] and rawget(self, name)
  return leaf and not leaf:describe().requires_grad or false
end

-- -- batches ----------------------------------------------------------------------------------------------------------

--- Whether its backward pass updates its tables, by one optimizer.
function TableCollection:_trains_itself()
  return self.fused_params and not self.table_fused_params
end

local function refuse_own_params(self)
  P.fail(self.class_name .. ": tables with optimizers of their own (table_fused_params) are trained in a "
    .. "DistributedModelParallel, which one rank can have too; unwrapped they are looked up under peri.no_grad")
end

--- An error unless `features` is a KeyedJaggedTensor, and what is learned from it reaches the tables.
function TableCollection:_check_features(features)
  if self.table_fused_params and C.peri_grad_enabled() then refuse_own_params(self) end
  if not KeyedJaggedTensor.is(features) then
    P.fail(("%s: features is %s, wanted a KeyedJaggedTensor"):format(self.class_name, errors.kind(features)))
  end
end

--- Position (from 0) of the feature of an output in the batch's keys.
function TableCollection:_key_of(output, keys, what)
  local key = C.peri_keys_find(keys, output.name)
  if key >= 0 then return key end
  P.fail(("%s: the batch has no %s '%s' (of table '%s'); those are: %s"):format(self.class_name, what, output.name,
    self.tables[output.table].name, table.concat(Keys._list(keys), ", ")))
end

local set_otherwise = { ["fused_params.learning_rate"] = "to change it: collection:set_learning_rate(rate), or "
  .. "fused_optimizer().param_groups[1].lr = rate" }

--- An error where a script has changed what the tables were made of. most: see kept.check.
function TableCollection:_check_kept(most) kept.check(self._kept, self.class_name, set_otherwise, most) end

--- Make ready for batches of these keys and this stride: block_list(self, keys, stride) says their blocks. They are
--- kept until another such batch comes.
function TableCollection:_prepare(keys, stride, block_list)
  self:_check_kept(kept.WITH_EACH_BATCH)
  if stride == self._seen_stride and self._seen_keys.ptr == keys then return end
  self._blocks = P.lasting(block_list, self, keys, stride)
  self._seen_keys, self._seen_stride = P.lasting(Keys._share, keys), stride -- kept, so that its address stays its own
end

local desc = P.struct "peri_kjt_info"

--- Bring the rows of a later batch from files into memory, in the background (fused_params.cache_params). The batch
--- must not change until it is looked up. Nothing to do for tables in memory and for variable batches.
function TableCollection:prefetch(features)
  C.peri_kjt_describe(KeyedJaggedTensor.ptr(features), desc)
  if desc.variable_stride or not self:materialise():is_cached() then return end
  if self._ahead and self._ahead[features] then return end
  local batch = P.lasting(self._prepare_batch, self, features)
  batch.lookups:prefetch()
  self._ahead = self._ahead or setmetatable({}, { __mode = "k" })
  self._ahead[features] = batch
end

--- What prefetch has prepared of a batch (_prepare_batch's result, with the field `lookups`), once; nil: nothing.
function TableCollection:_take_ahead(features)
  local batch = self._ahead and self._ahead[features]
  if batch then self._ahead[features] = nil end
  return batch
end

--- Write changed rows of tables in files; afterwards the files are whole.
function TableCollection:flush()
  if not self._tbe then return end
  if self._moment then
    self._moment:flush(function(t, sum, iteration) self._tbe:mark_ids(self:_table_index(t.name), sum, iteration) end)
  end
  self._tbe:flush()
end

--- Its rows are given to raw ids by maps: a CollisionMoment compares both.
function TableCollection:_goes_with(moment)
  for i, t in ipairs(self._tbe and self.tables or {}) do
    if self._tbe:file(i) then
      P.fail(("%s: table '%s' was looked at before raw ids became its rows, and its file '%s' is open as one of other "
        .. "ids; give the collection to the managed collision first"):format(self.class_name, t.name,
        self._tbe:file(i).path))
    end
  end
  self._moment = moment
end

--- What the file of a table says (tbe._file_of); nil: it has none.
function TableCollection:_file(name) return self:materialise():file(self:_table_index(name)) end

-- -- looking ----------------------------------------------------------------------------------------------------------

--- Names of the outputs, in order.
function TableCollection:embedding_names() return self._names end
--- Each feature once, in order of first use.
function TableCollection:feature_names() return self._features end

--- Position of a table.
function TableCollection:_table_index(name)
  for i, t in ipairs(self.tables) do
    if t.name == name then return i end
  end
  P.fail(("%s: no table '%s'; tables: %s"):format(self.class_name, tostring(name),
    table.concat(util.map(self.tables, function(t) return t.name end), ", ")))
end

--- A live view of a table's weights, or of another state of its optimizer ("momentum1", ...).
function TableCollection:weight(name) return self:table_state(name, "weight") end
function TableCollection:table_state(name, which) return self:materialise():state(self:_table_index(name), which) end

--- Counts of a table's cache (nil for tables in memory).
function TableCollection:cache_statistics(name) return self:materialise():cache_statistics(self:_table_index(name)) end

--- Rows [row, row + n) of a table's weights or state: a view, or a copy where the rows are in a file.
function TableCollection:table_rows(name, which, row, n)
  local batch, i = self:materialise(), self:_table_index(name)
  if not batch:is_cached() then return batch:state(i, which):slice(1, row, row + n) end
  local shape = batch:state_shape(i, which)
  shape[1] = n
  return batch:read(i, which, row, Tensor.empty(shape, "f32", self.device or nil))
end

--- Rows (i64, ascending, each once) of a table start again: weights as they were at first, what the optimizer keeps of
--- them too: that of fused_params, and those of nn.optim that have the table as a parameter.
function TableCollection:reset_rows(name, rows)
  local i = self:_table_index(name)
  self:materialise():reset_rows(i, rows)
  if not self.fused_params then
    parameter.restart_rows(rawget(self, ("%s.%s.weight"):format(self.parameter_prefix, name)), rows)
  end
end

--- Learning rate of the fused optimizer from now on.
function TableCollection:set_learning_rate(rate)
  if self.table_fused_params then refuse_own_params(self) end
  self:materialise():set_learning_rate(rate)
end

function TableCollection:extra_text()
  return table.concat(util.map(rawget(self, "tables") or {}, function(t)
    local text = ("%s: %d x %d"):format(t.name, t.num_embeddings, t.embedding_dim)
    return t.pooling and text .. " " .. t.pooling or text
  end), ", ")
end

-- -- state ------------------------------------------------------------------------------------------------------------

--- State `which` of table i: a live view, or, where rows are in files, a ShardedTensor of one piece.
local function state_of(self, i, which)
  local batch = self:materialise()
  if not batch:is_cached() then return P.lasting(batch.state, batch, i, which) end
  local size = batch:state_shape(i, which)
  local metadata = { shard_offsets = util.map(size, function() return 0 end), shard_sizes = size, placement = "rank:0" }
  local dtype = which == "prev_iter" and "i64" or which == "weight" and config.data_types[self.tables[i].data_type]
    or "f32"
  return ShardedTensor { size = size, dtype = dtype, shards_metadata = { metadata },
    device = self.device or nil, settle = self._moment and function() self._moment:check() end or nil,
    local_shards = { { metadata = metadata,
      source = function() return batch:source(i, which) end,
      read = function(row, result) return batch:read(i, which, row, result) end,
      write = function(row, source) batch:write(i, which, row, source) end } } }
end

--- See Module:check_moment.
function TableCollection:check_moment()
  if self._tbe and self:_trains_itself() then self._tbe:settled() end
end

function TableCollection:own_state()
  if not self.fused_params or not self:materialise():is_cached() then return Module.own_state(self) end
  return util.map(self.tables, function(t, i)
    return { name = ("%s.%s.weight"):format(self.parameter_prefix, t.name), tensor = state_of(self, i, "weight") }
  end)
end

--- The keyed optimizer of the tables (fused.lua); nil: it does not update its tables.
function TableCollection:fused_optimizer()
  if not self:_trains_itself() then return nil end
  local batch = self:materialise()
  local _, _, optimizer = config.fused_params(self.class_name .. ": fused_params", self.fused_params)
  self._fused_optimizer = self._fused_optimizer or FusedOptimizer {
    parameter_name = function(name) return ("%s.%s.weight"):format(self.parameter_prefix, name) end,
    groups = { { tables = util.map(self.tables, function(t) return t.name end), optimizer = optimizer,
      rate = function() return batch:learning_rate() end,
      set_rate = function(rate) batch:set_learning_rate(rate) end } },
    states = function(name)
      local i, list = self:_table_index(name), {}
      for _, which in ipairs(batch:state_names()) do
        if which ~= "weight" then list[#list + 1] = { name = which, tensor = state_of(self, i, which) } end
      end
      return list
    end,
    iteration = function() return P.lasting(Tensor.tensor, { batch:iteration() }, "i64", "cpu") end,
    set_iteration = function(n) batch:set_iteration(n) end,
  }
  return self._fused_optimizer
end

signature.check("TableCollection:", TableCollection, {
  _prepare = "self: table, keys: KeysPointer, stride: integer, block_list: callable",
  _setup = "self: table, a: table" })

--- Check the arguments of the methods that users call. For each class, so that messages name it.
function TableCollection._check_arguments(class)
  signature.check(class.class_name .. ":", class, {
    prefetch = "self: table, features: KeyedJaggedTensor", _prepare_batch = "self: table, features: KeyedJaggedTensor",
    reset_rows = "self: table, name: string, rows: tensor",
    weight = "self: table, name: string", table_state = "self: table, name: string, which: string?",
    cache_statistics = "self: table, name: string", set_learning_rate = "self: table, rate: number",
    table_rows = "self: table, name: string, which: string, row: integer, n: integer",
  })
end

return TableCollection
