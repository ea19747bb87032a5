-- bag.lua: EmbeddingBagCollection: for every feature of a batch, the pooled rows of its table. Not sharded: perilune.shard has the
-- same over ranks.
--
--   local ebc = peri.EmbeddingBagCollection {
--     tables = { peri.EmbeddingBagConfig { name = "t", embedding_dim = 16, num_embeddings = 1000, feature_names = { "f", "g" } } },
--     fused_params = { optimizer = "rowwise_adagrad", learning_rate = 0.1 },
--   }
--   local kt = ebc(kjt)      -- KeyedTensor: columns "f", "g"
--
-- With fused_params the tables are updated in the backward pass; without, they are ordinary parameters with dense gradients. Memory is
-- taken when it is first needed, so that a collection that is only a description (of what to shard) costs nothing.
local ffi = require "ffi"
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local jagged = require "perilune.jagged"
local Module = require "perilune.nn.module"
local config = require "perilune.embed.config"
local tbe = require "perilune.embed.tbe"
local signature = require "perilune.signature"
local C, check = P.C, P.check

local Keys, KeyedJaggedTensor, KeyedTensor = jagged.Keys, jagged.KeyedJaggedTensor, jagged.KeyedTensor
local kjt_ptr = KeyedJaggedTensor.ptr

local EmbeddingBagCollection = Module:extend "EmbeddingBagCollection"
EmbeddingBagCollection.sharder = "EmbeddingBagCollectionSharder" -- in peri.shard

local arguments = {
  tables = util.required.list,        -- list of EmbeddingBagConfig
  is_weighted = false,                -- the ids' weights multiply their rows
  device = util.optional,             -- a device's name, or "meta": never take memory
  fused_params = util.optional.table, -- { optimizer = "rowwise_adagrad", learning_rate =, eps =, ... }; nil: dense gradients
  seed = util.optional.number,        -- of the start values; default: that of the running rank
}

local function check_tables(tables, described)
  local f = "EmbeddingBagCollection"
  if type(tables) ~= "table" or #tables == 0 then P.fail(f .. ": tables is no list of EmbeddingBagConfig") end
  local seen = {}
  for i, t in ipairs(tables) do
    if not config.EmbeddingBagConfig.is(t) then P.fail(("%s: entry %d of tables is no EmbeddingBagConfig"):format(f, i)) end
    if seen[t.name] then P.fail(("%s: two tables are named '%s'"):format(f, t.name)) end
    if t.data_type ~= tables[1].data_type and not described then
      P.fail(("%s: table '%s' holds %s, table '%s' %s; allowed: one data_type, except on device 'meta' (to be sharded)"):format(f, t.name,
        t.data_type, tables[1].name, tables[1].data_type))
    end
    seen[t.name] = true
  end
end

function EmbeddingBagCollection:init(args)
  local a = util.named("EmbeddingBagCollection", args, arguments)
  check_tables(a.tables, a.device == "meta")
  self.tables, self.fused_params, self.seed = a.tables, a.fused_params or false, a.seed or false
  self.device = a.device or false
  self._weighted = a.is_weighted
  if a.fused_params then config.fused_params("EmbeddingBagCollection: fused_params", a.fused_params) end
  local features, index = {}, {} -- each feature once
  self._outputs, self._width = {}, 0 -- { table =, feature =, name = } of each block of output columns
  for t, table_config in ipairs(a.tables) do
    for _, name in ipairs(table_config.feature_names) do
      if not index[name] then
        features[#features + 1] = name
        index[name] = #features
      end
      self._outputs[#self._outputs + 1] = { table = t, feature = index[name], name = name }
      self._width = self._width + table_config.embedding_dim
    end
  end
  self._features = features
  self._names, self._dims = config.output_names(a.tables)
  self._keys = Keys.of(self._names)
  self._lengths = ffi.new("int64_t[?]", #self._dims, self._dims)
  self._input = ffi.new "peri_tbe_input"
  self._shape = ffi.new "int64_t[2]"
  self._tbe, self._blocks, self._seen_keys, self._seen_stride, self._ahead = false, false, false, -1, false
  rawset(self, "_parameters", nil) -- see __index
  rawset(self, "_buffers", nil)
end

--- Whoever asks for the parameters or buffers of a collection makes it take its memory.
EmbeddingBagCollection.__index = function(self, key)
  if key == "_parameters" or key == "_buffers" then
    if not rawget(self, "_lengths") then return nil end
    self:materialise()
    return rawget(self, key)
  end
  return EmbeddingBagCollection[key]
end

local function make(self)
  local batch = tbe.new {
    tables = util.map(self.tables, function(t)
      return { name = t.name, rows = t.num_embeddings, cols = t.embedding_dim, pooling = t.pooling, init = t:initialiser() }
    end),
    fused_params = self.fused_params or { optimizer = "none" },
    features = self._features, data_type = self.tables[1].data_type, seed = self.seed or nil, device = self.device or nil,
  }
  local parameters, buffers = {}, {}
  for i, t in ipairs(self.tables) do
    local name = "embedding_bags." .. t.name .. ".weight"
    local list = self.fused_params and buffers or parameters
    if not batch:is_cached() then -- rows in files are no tensors
      list[i] = name
      rawset(self, name, self.fused_params and batch:state(i) or batch:leaf(i))
    end
  end
  rawset(self, "_parameters", parameters)
  rawset(self, "_buffers", buffers)
  return batch
end

--- Allocate and initialise the tables, if that has not been done. Returns their table batch.
function EmbeddingBagCollection:materialise()
  if not self._tbe then
    if self.device == "meta" then
      P.fail "EmbeddingBagCollection: it is on device 'meta', a description without memory; shard it, or make it on a real device"
    end
    self._tbe = P.lasting(make, self)
  end
  return self._tbe
end

--- Whether the tables have memory yet.
function EmbeddingBagCollection:is_materialised() return self._tbe ~= false end

-- -- forward ---------------------------------------------------------------------------------------------------------------------------

--- Position (from 0) of the feature of an output in the batch's keys.
local function key_of(self, output, keys, what)
  local key = C.peri_keys_find(keys, output.name)
  if key >= 0 then return key end
  P.fail(("EmbeddingBagCollection: the batch has no %s '%s' (of table '%s'); those are: %s"):format(what, output.name,
    self.tables[output.table].name, table.concat(Keys.list(keys), ", ")))
end

--- The block list for batches with these keys and this stride.
local function blocks_for(self, keys, stride)
  local list, column = {}, 0
  for i, output in ipairs(self._outputs) do
    local key = key_of(self, output, keys, "feature")
    list[i] = {
      table = output.table, feature = output.feature, first_bag = key * stride, bags = stride, out_offset = column,
      out_stride = self._width,
    }
    column = column + self._dims[i]
  end
  return self:materialise():blocks(list)
end

local function prepare(self, keys, stride)
  self._blocks = P.lasting(blocks_for, self, keys, stride)
  self._seen_keys, self._seen_stride = P.lasting(Keys.share, keys), stride -- kept, so that its address stays its own
end

local desc = ffi.new "peri_kjt_desc"
local ids_out, offsets_out, weights_out = ffi.new "peri_tensor *[1]", ffi.new "peri_tensor *[1]", ffi.new "peri_tensor *[1]"
local out, kt_out = ffi.new "peri_tensor *[1]", ffi.new "peri_kt *[1]"

--- A variable batch: look every key's own bags up, then put its rows where the inverse indices say.
local function variable(self, features)
  local batch, keys = self:materialise(), C.peri_kjt_keys(features.ptr)
  local inverse = features:inverse_indices_or_none()
  if not inverse then P.fail "EmbeddingBagCollection: a variable batch per feature needs inverse indices" end
  local strides, first = features:stride_per_key(), features:lengths_offset_per_key()
  local inverse_keys, n = C.peri_kjt_inverse_keys(features.ptr), #self._outputs
  local rows, row, names = ffi.new("int64_t[?]", n), ffi.new("int64_t[?]", n), ffi.new("const char *[?]", n)
  local list, at = {}, 0
  for i, output in ipairs(self._outputs) do
    local key = key_of(self, output, keys, "feature")
    local dim = self._dims[i]
    list[i] = {
      table = output.table, feature = output.feature, first_bag = first[key + 1], bags = strides[key + 1], out_offset = at,
      out_stride = dim,
    }
    at = at + strides[key + 1] * dim
    rows[i - 1], row[i - 1], names[i - 1] = strides[key + 1], key_of(self, output, inverse_keys, "inverse indices of"), output.name
  end
  local weights = self._weighted and features:weights() or nil
  local pooled = batch:lookup(features:values(), features:offsets(), batch:blocks(list), at, nil, weights)
  local a = ffi.new "peri_tbe_expand_args"
  local indices = inverse[2]:contiguous()
  local dtype = pooled:dtype()
  pooled = pooled:to "f32" -- exact, and rounded back without loss
  a.pooled, a.inverse, a.features, a.rows, a.cols, a.inverse_row, a.names = pooled.ptr, indices.ptr, n, rows, self._lengths, row, names
  check(C.peri_tbe_expand(a, out))
  local values = Tensor.wrap(out[0]):to(dtype)
  check(C.peri_kt_new(self._keys.ptr, self._lengths, 1, values.ptr, kt_out))
  return KeyedTensor.wrap(kt_out[0])
end

--- Pooled rows of the features of a KeyedJaggedTensor, as a KeyedTensor [batch, columns]; the batch may have further keys.
function EmbeddingBagCollection:forward(features)
  if not KeyedJaggedTensor.is(features) then
    P.fail(("EmbeddingBagCollection: features is %s, wanted a KeyedJaggedTensor"):format(errors.kind(features)))
  end
  local kjt = kjt_ptr(features)
  C.peri_kjt_describe(kjt, desc)
  if self._weighted and not desc.weighted then P.fail "EmbeddingBagCollection: is_weighted, but the batch has no weights" end
  if desc.weighted and not self._weighted then
    P.fail "EmbeddingBagCollection: the batch has weights, but is_weighted is false; set it, or leave the weights out of the batch"
  end
  if desc.variable_stride then return variable(self, features) end
  local stride, keys = tonumber(desc.stride), C.peri_kjt_keys(kjt)
  if stride ~= self._seen_stride or self._seen_keys.ptr ~= keys then prepare(self, keys, stride) end
  local batch = self._ahead and self._ahead[features]
  if batch then
    self._ahead[features] = nil
    check(C.peri_kt_new(self._keys.ptr, self._lengths, 1, batch:lookup(stride, self._width).ptr, kt_out))
    return KeyedTensor.wrap(kt_out[0])
  end
  check(C.peri_kjt_values(kjt, ids_out))
  local ids = Tensor.wrap(ids_out[0])
  check(C.peri_kjt_offsets(kjt, offsets_out))
  local offsets = Tensor.wrap(offsets_out[0])
  local input, shape = self._input, self._shape
  input.ids, input.offsets, input.blocks, input.weights = ids.ptr, offsets.ptr, self._blocks.ptr, nil
  if self._weighted then
    check(C.peri_kjt_weights(kjt, weights_out))
    input.weights = Tensor.wrap(weights_out[0]).ptr
  end
  shape[0], shape[1] = stride, self._width
  check(C.peri_tbe_lookup(self._tbe.ptr, input, 2, shape, out))
  local values = Tensor.wrap(out[0])
  check(C.peri_kt_new(self._keys.ptr, self._lengths, 1, values.ptr, kt_out))
  return KeyedTensor.wrap(kt_out[0])
end

local function batch_of(self, features)
  return self._tbe:batch(features:values(), features:offsets(), self._blocks, self._weighted and features:weights() or nil)
end

--- Bring the rows of a later batch from files into memory, in the background (fused_params.cache_params). The batch must not change until
--- it is looked up. Nothing to do for tables in memory and for variable batches.
function EmbeddingBagCollection:prefetch(features)
  local kjt = kjt_ptr(features)
  C.peri_kjt_describe(kjt, desc)
  if desc.variable_stride or not self:materialise():is_cached() then return end
  local stride, keys = tonumber(desc.stride), C.peri_kjt_keys(kjt)
  if stride ~= self._seen_stride or self._seen_keys.ptr ~= keys then prepare(self, keys, stride) end
  if self._ahead and self._ahead[features] then return end
  local batch = P.lasting(batch_of, self, features)
  batch:prefetch()
  self._ahead = self._ahead or setmetatable({}, { __mode = "k" })
  self._ahead[features] = batch
end

--- Write changed rows of tables in files; afterwards the files are whole.
function EmbeddingBagCollection:flush()
  if self._tbe then self._tbe:flush() end
end

-- -- looking ---------------------------------------------------------------------------------------------------------------------------

--- The tables' configurations, in order.
function EmbeddingBagCollection:embedding_bag_configs() return self.tables end
function EmbeddingBagCollection:is_weighted() return self._weighted end
--- Names of the output's parts and their columns, in order.
function EmbeddingBagCollection:embedding_names() return self._names end
function EmbeddingBagCollection:embedding_dims() return self._dims end
--- Each feature once, in order of first use.
function EmbeddingBagCollection:feature_names() return self._features end

--- Position of a table.
local function table_index(self, name)
  for i, t in ipairs(self.tables) do
    if t.name == name then return i end
  end
  P.fail(("EmbeddingBagCollection: no table '%s'; tables: %s"):format(tostring(name),
    table.concat(util.map(self.tables, function(t) return t.name end), ", ")))
end

--- A live view of a table's weights, or of another state of its optimizer ("momentum1", ...).
function EmbeddingBagCollection:weight(name) return self:table_state(name, "weight") end
function EmbeddingBagCollection:table_state(name, which) return self:materialise():state(table_index(self, name), which) end

--- Counts of a table's cache (nil for tables in memory).
function EmbeddingBagCollection:cache_statistics(name) return self:materialise():cache_statistics(table_index(self, name)) end

--- Rows [row, row + n) of a table's weights or state: a view, or a copy where the rows are in a file.
function EmbeddingBagCollection:table_rows(name, which, row, n)
  local batch, i = self:materialise(), table_index(self, name)
  if not batch:is_cached() then return batch:state(i, which):slice(1, row, row + n) end
  local shape = batch:state_shape(i, which)
  shape[1] = n
  return batch:read(i, which, row, Tensor.empty(shape, "f32", self.device or nil))
end

--- Learning rate of the fused optimizer from now on.
function EmbeddingBagCollection:set_learning_rate(rate) self:materialise():set_learning_rate(rate) end

function EmbeddingBagCollection:extra_text()
  return table.concat(util.map(self.tables, function(t)
    return ("%s: %d x %d %s"):format(t.name, t.num_embeddings, t.embedding_dim, t.pooling)
  end), ", ")
end

signature.check("EmbeddingBagCollection:", EmbeddingBagCollection, {
  prefetch = "self: table, features: KeyedJaggedTensor", weight = "self: table, name: string",
  table_state = "self: table, name: string, which: string?", cache_statistics = "self: table, name: string",
  table_rows = "self: table, name: string, which: string, row: integer, n: integer", set_learning_rate = "self: table, rate: number",
})

return EmbeddingBagCollection
