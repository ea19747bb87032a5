-- quant.lua: collections for serving (TorchRec's torchrec.quant): tables whose rows are bytes, or f16, bf16, f32. They
-- are written once (from_float, load_state_dict) and looked up; nothing here is trained or recorded.
--
--   local quant = peri.QuantEmbeddingBagCollection.from_float(ebc, { dtype = "INT8", output_dtype = "FP16" })
--   local kt = quant(kjt)      -- KeyedTensor, as the collection that was trained returns
--
-- Tables may be of different data types; those of one are looked up by one call, all write into one output. Ids outside
-- a table are reported as bounds_check_mode says ("WARNING" unless it is given) and add nothing; so do ids of rows that
-- pruning left out.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local jagged = require "perilune.jagged"
local TableCollection = require "perilune.embed.collection"
local outputs = require "perilune.embed.outputs"
local Remap = require "perilune.embed.remap"
local config = require "perilune.embed.config"
local tbe = require "perilune.embed.tbe"
local row_format = require "perilune.tensor.row_format"
local signature = require "perilune.signature"
local C, check = P.C, P.check

local Keys, KeyedTensor, KeyedJaggedTensor = jagged.Keys, jagged.KeyedTensor, jagged.KeyedJaggedTensor
local kjt_ptr = KeyedJaggedTensor.ptr

local QuantCollection = TableCollection:extend "QuantCollection"
QuantCollection.data_types = config.table_types

--- The named arguments of both classes with their defaults, and those of `more`, which one class has alone. tables:
--- configurations, whose data_type says how rows are stored.
local function arguments_of(more)
  local list = {
    tables = util.required.list,
    device = util.optional,        -- a device's name, or "meta": never take memory
    output_dtype = "FP32",         -- FP32, FP16, BF16: of what a lookup gives
    bounds_check_mode = "WARNING", -- as in fused_params
    pruned = util.optional.table,  -- table name -> which rows are left (remap.lua); the configuration has the number of
                                   -- ids
  }
  for name, value in util.ordered(more) do list[name] = value end
  return list
end

local arguments = { QuantEmbeddingBagCollection = arguments_of { is_weighted = false },
  QuantEmbeddingCollection = arguments_of { need_indices = false } }

function QuantCollection:init(args)
  local f = self.class_name
  if not arguments[f] then P.fail(f .. ": the base of QuantEmbeddingBagCollection and QuantEmbeddingCollection") end
  local a = util.named(f, args, arguments[f])
  util.one_of(f, "output_dtype", a.output_dtype, util.keys(config.data_types))
  util.one_of(f, "bounds_check_mode", a.bounds_check_mode, util.keys(config.bounds_checks))
  self:_setup { tables = a.tables, device = a.device }
  self.output_dtype, self.bounds_check_mode, self.pruned = a.output_dtype, a.bounds_check_mode, a.pruned or false
  self._dtype = config.data_types[a.output_dtype]
  self._remap = a.pruned and P.lasting(Remap, f, self.tables, self._outputs, a.pruned, a.device) or false
  self._order = ffi.new("int32_t[?]", #self._outputs) -- the place of each output's feature in the keys of a batch
  self._arrange = false -- whether batches are rearranged to one key for each output
  self:_setup_output(a)
end

--- Rows that table i has in memory: those that pruning left.
function QuantCollection:_rows_of(i) return self._remap and self._remap.rows[i] or self.tables[i].num_embeddings end

--- A live view of the rows of table t, number i of a table batch.
local function rows_of(batch, i, t)
  return row_format.note(batch:state(i), config._row_format(t.data_type, t.embedding_dim))
end

--- One table batch for each data type, in order of their first tables.
function QuantCollection:_make()
  local list, of = {}, {}
  for i, t in ipairs(self.tables) do
    local set = of[t.data_type]
    if not set then
      set = { tables = {}, data_type = t.data_type, index = {} }
      of[t.data_type], list[#list + 1] = set, set
    end
    set.tables[#set.tables + 1] = { name = t.name, rows = self:_rows_of(i), cols = t.embedding_dim, pooling = t.pooling
      or "NONE", init = config.row_formats[t.data_type] == nil and config.constant(0) or nil }
    set.index[i] = #set.tables
  end
  local names = {}
  for _, set in ipairs(list) do
    set.tbe = tbe.new { tables = set.tables, features = self._features, data_type = config.table_types[set.data_type],
      fused_params = { optimizer = "none", bounds_check_mode = self.bounds_check_mode }, device = self.device or nil,
      seed = 0 }
  end
  for i, t in ipairs(self.tables) do
    local name, set = ("%s.%s.weight"):format(self.parameter_prefix, t.name), of[t.data_type]
    rawset(self, name, rows_of(set.tbe, set.index[i], t))
    names[i] = name
  end
  rawset(self, "_parameters", {})
  rawset(self, "_buffers", names)
  return list
end

-- -- batches ----------------------------------------------------------------------------------------------------------

--- Find the features of the outputs in these keys. one_each: batches must have one key for each output, whichever.
local function find(self, keys, one_each)
  self._seen_stride = -1 -- until all is found, no batch has these
  local used, arrange = {}, self._remap or one_each and C.peri_keys_count(keys) ~= #self._outputs
  for i, output in ipairs(self._outputs) do
    local key = self:_key_of(output, keys, "feature")
    arrange = arrange or one_each and used[key]
    used[key] = true
    self._order[i - 1] = key
  end
  self._arrange = arrange and true or false
end

--- The blocks of each table batch. bags(key): first bag and bags of a key; offset(i): where output i begins; stride:
--- from row to row.
local function blocks_of(self, bags, offset, stride)
  local lists = {}
  for k, set in ipairs(self:materialise()) do
    local list = {}
    for i, output in ipairs(self._outputs) do
      if set.index[output.table] then
        local first, n = bags(outputs.place(self, i))
        list[#list + 1] = { table = set.index[output.table], feature = output.feature, first_bag = first, bags = n,
          out_offset = offset(i, n), out_stride = stride or self._dims[i] }
      end
    end
    lists[k] = set.tbe:blocks(list)
  end
  return lists
end

local desc = P.struct "peri_kjt_info"
local ids_out, offsets_out, weights_out = ffi.new "peri_tensor *[1]", ffi.new "peri_tensor *[1]",
  ffi.new "peri_tensor *[1]"
local kt_out = ffi.new "peri_kt *[1]"

--- Look a batch up with these blocks; every element of `result` is written. Returns it.
local function look_up(self, batch, blocks, weighted, result)
  local kjt, input = kjt_ptr(batch), self._input
  check(C.peri_kjt_values(kjt, ids_out))
  local ids = Tensor.wrap(ids_out[0])
  check(C.peri_kjt_offsets(kjt, offsets_out))
  local offsets = Tensor.wrap(offsets_out[0])
  if self._remap then ids = self._remap:rows_of_ids(batch, ids) end
  input.ids, input.offsets, input.weights = ids.ptr, offsets.ptr, nil
  if weighted then
    check(C.peri_kjt_weights(kjt, weights_out))
    input.weights = Tensor.wrap(weights_out[0]).ptr
  end
  local sets = self._tbe
  for i = 1, #sets do
    input.blocks = blocks[i].ptr
    check(C.peri_tbe_forward(sets[i].tbe.ptr, input, result.ptr))
  end
  return result
end

--- A description of a batch: an error unless it is one, and has weights exactly if `weighted`.
local function describe(self, features, weighted)
  self:_check_features(features)
  C.peri_kjt_describe(kjt_ptr(features), desc)
  if desc.weighted == weighted then return desc end
  if weighted then P.fail(self.class_name .. ": is_weighted, but the batch has no weights") end
  P.fail(self.class_name .. ": the batch has weights, but is_weighted is false; set it, or leave the weights out of "
    .. "the batch")
end

-- -- pooled -----------------------------------------------------------------------------------------------------------

local Bags = QuantCollection:extend "QuantEmbeddingBagCollection"
Bags.sharder = "QuantEmbeddingBagCollectionSharder" -- in peri.shard
Bags.config_name, Bags.parameter_prefix = "EmbeddingBagConfig", "embedding_bags"

function Bags:_setup_output(a)
  self._weighted, self._width, self._columns = a.is_weighted, 0, {}
  for i, dim in ipairs(self._dims) do
    self._columns[i] = self._width
    self._width = self._width + dim
  end
  self._keys = Keys.of(self._names)
  self._lengths = ffi.new("int64_t[?]", #self._dims, self._dims)
end

local function pooled_blocks(self, keys, stride)
  find(self, keys, false)
  return blocks_of(self, function(key) return key * stride, stride end, function(i) return self._columns[i] end,
    self._width)
end

--- A variable batch: look every key's own bags up, then put its rows where the inverse indices say.
local function variable_bags(self, features)
  find(self, C.peri_kjt_keys(features.ptr), false)
  local inverse = features:inverse_indices_or_none()
  if not inverse then P.fail(self.class_name .. ": a variable batch per feature needs inverse indices") end
  local batch = outputs.arranged(self, features)
  local strides, first, n = batch:stride_per_key(), batch:lengths_offset_per_key(), #self._outputs
  local inverse_keys = C.peri_kjt_inverse_keys(features.ptr)
  local rows, row, names = ffi.new("int64_t[?]", n), ffi.new("int64_t[?]", n), ffi.new("const char *[?]", n)
  local begins, at = {}, 0
  for i, output in ipairs(self._outputs) do
    local bags = strides[outputs.place(self, i) + 1]
    begins[i], at = at, at + bags * self._dims[i]
    rows[i - 1], row[i - 1], names[i - 1] = bags, self:_key_of(output, inverse_keys, "inverse indices of"), output.name
  end
  local blocks = blocks_of(self, function(key) return first[key + 1], strides[key + 1] end,
    function(i) return begins[i] end)
  local pooled = look_up(self, batch, blocks, self._weighted, Tensor.empty({ at }, "f32", features:device()))
  local a, indices = ffi.new "peri_tbe_expand_args", inverse[2]:contiguous()
  a.pooled, a.inverse, a.features, a.rows, a.cols, a.inverse_row, a.names = pooled.ptr, indices.ptr, n, rows,
    self._lengths, row, names
  check(C.peri_tbe_expand(a, ids_out))
  return Tensor.wrap(ids_out[0]):to(self._dtype)
end

local function new_tensor(self, rows, cols)
  self._shape[0], self._shape[1] = rows, cols
  check(C.peri_tensor_new(P.device(self.device or nil), P.dtype(self._dtype), 2, self._shape, Tensor.out))
  return Tensor.wrap(Tensor.out[0])
end

--- Pooled rows of the features of a KeyedJaggedTensor, as a KeyedTensor [batch, columns]; the batch may have further
--- keys.
function Bags:forward(features)
  local d = describe(self, features, self._weighted)
  local values
  if d.variable_stride then
    values = variable_bags(self, features)
  else
    local stride = tonumber(d.stride)
    self:_prepare(C.peri_kjt_keys(kjt_ptr(features)), stride, pooled_blocks)
    values = look_up(self, outputs.arranged(self, features), self._blocks, self._weighted,
      new_tensor(self, stride, self._width))
  end
  check(C.peri_kt_new(self._keys.ptr, self._lengths, 1, values.ptr, kt_out))
  return KeyedTensor.wrap(kt_out[0])
end

--- The tables' configurations, in order.
function Bags:embedding_bag_configs() return self.tables end
function Bags:is_weighted() return self._weighted end
--- Columns of the output's parts, in the order of embedding_names.
function Bags:embedding_dims() return self._dims end

-- -- sequences --------------------------------------------------------------------------------------------------------

local Rows = QuantCollection:extend "QuantEmbeddingCollection"
Rows.sharder = "QuantEmbeddingCollectionSharder" -- in peri.shard
Rows.config_name, Rows.parameter_prefix = "EmbeddingConfig", "embeddings"

function Rows:_setup_output(a)
  outputs.widths(self)
  self._need_indices = a.need_indices
  self._jts = ffi.new("peri_jt *[?]", #self._outputs)
end

local function at_the_start() return 0 end
local function row_blocks(self, keys, stride)
  find(self, keys, true)
  return blocks_of(self, function(key) return key * stride, stride end, at_the_start, self._dim)
end

--- A variable batch in the order of the tables, and the blocks of the output that its bags fill.
local function variable_rows(self, features)
  find(self, C.peri_kjt_keys(features.ptr), true)
  local batch, bags = outputs.variable(self, features)
  return batch, blocks_of(self, bags, at_the_start, self._dim)
end

--- The rows of the features of a KeyedJaggedTensor: name -> JaggedTensor of [ids of the feature, embedding_dim] with
--- the feature's lengths; its weights are those of the batch, or with need_indices the ids. With inverse indices every
--- sample has the rows of the bag that they name. The batch may have further keys.
function Rows:forward(features)
  local batch, blocks
  self:_check_features(features)
  C.peri_kjt_describe(kjt_ptr(features), desc)
  if desc.variable_stride then
    batch, blocks = variable_rows(self, features)
  else
    self:_prepare(C.peri_kjt_keys(kjt_ptr(features)), tonumber(desc.stride), row_blocks)
    batch, blocks = outputs.arranged(self, features), self._blocks
  end
  C.peri_kjt_describe(kjt_ptr(batch), desc)
  check(C.peri_kjt_values(kjt_ptr(batch), ids_out))
  local n = Tensor.wrap(ids_out[0]):numel()
  local rows = look_up(self, batch, blocks, false, new_tensor(self, n, self._dim))
  local of = util.map(self._outputs, function(output) return output.name end)
  local result = outputs.narrowed(self, outputs.cut(self, batch, rows))
  return outputs.completed(self.class_name, features, self._names, of, result, self._need_indices)
end

function Rows:embedding_configs() return self.tables end
--- Columns of the widest table.
function Rows:embedding_dim() return self._dim end
function Rows:need_indices() return self._need_indices end

-- -- rows -------------------------------------------------------------------------------------------------------------

--- The table batch of table i, and its number there.
local function home_of(self, i)
  for _, set in ipairs(self:materialise()) do
    if set.index[i] then return set.tbe, set.index[i] end
  end
end

--- A live view of a table's rows as they are stored: bytes (u8 [rows, bytes of a row]), or numbers.
function QuantCollection:table_state(name, which)
  if which ~= nil and which ~= "weight" then
    P.fail(("%s: table '%s' has no state '%s'; its only one: weight"):format(self.class_name, name, which))
  end
  local t = self:_table_index(name)
  local batch, i = home_of(self, t)
  return rows_of(batch, i, self.tables[t])
end

--- Rows [row, row + n) of a table as numbers (f32).
function QuantCollection:table_rows(name, which, row, n)
  if which ~= "weight" then return self:table_state(name, which) end
  local i = self:_table_index(name)
  local batch, k = home_of(self, i)
  return batch:read(k, "weight", row, Tensor.empty({ n, self.tables[i].embedding_dim }, "f32", self.device or nil))
end

--- Overwrite rows of a table from `row` on with numbers, or (u8) with bytes as they are stored.
function QuantCollection:write_rows(name, row, source)
  local batch, i = home_of(self, self:_table_index(name))
  batch:write(i, "weight", row, source)
end

--- Nothing to bring and nothing to write: rows are in memory.
function QuantCollection:prefetch() end -- luacheck: ignore 212
function QuantCollection:flush() end -- luacheck: ignore 212
function QuantCollection:cache_statistics() end -- luacheck: ignore 212
function QuantCollection:set_learning_rate() -- luacheck: ignore 212
  P.fail(self.class_name .. ": its rows are not trained, and have no learning rate")
end

function QuantCollection:extra_text()
  return table.concat(util.map(self.tables, function(t, i)
    return ("%s: %d x %d %s%s"):format(t.name, self:_rows_of(i), t.embedding_dim, t.data_type, t.pooling
      and " " .. t.pooling or "")
  end), ", ")
end

--- What makes another of the same tables, on a device.
local function arguments_for(self, device)
  return { tables = self.tables, device = device, output_dtype = self.output_dtype,
    bounds_check_mode = self.bounds_check_mode, pruned = self.pruned or nil, is_weighted = self.is_weighted
    and self:is_weighted(), need_indices = self.need_indices and self:need_indices() }
end

--- A collection with the same rows on another device (nil: the same one), which shares nothing with this one.
function QuantCollection:copy(device)
  local a, class = arguments_for(self, device or self.device or nil), getmetatable(self)
  if class == Bags then a.need_indices = nil else a.is_weighted = nil end
  local other = class(a)
  if not self:is_materialised() or other.device == "meta" then return other end
  for _, t in ipairs(self.tables) do other:write_rows(t.name, 0, self:table_state(t.name)) end
  return other
end

-- -- from what was trained --------------------------------------------------------------------------------------------

local from_arguments = {
  dtype = "INT8",                               -- INT8, INT4, INT2, FP8, FP16, BF16, FP32: of the rows
  per_table_weight_dtype = util.optional.table, -- table name -> dtype of its own
  output_dtype = "FP32",
  bounds_check_mode = "WARNING",
  pruned = util.optional.table,                 -- table name -> which rows are left (remap.lua)
  device = util.optional,                       -- default: that of the collection
}
local COPY_ROWS = 65536

--- A table's configuration with another data type.
local function retyped(class, t, data_type)
  return class { name = t.name, num_embeddings = t.num_embeddings, embedding_dim = t.embedding_dim,
    feature_names = t.feature_names, pooling = t.pooling, data_type = data_type }
end

local function check_names(f, what, map, tables)
  local known = util.index_of(util.map(tables, function(t) return t.name end))
  for name in util.ordered(map or {}) do
    if not known[name] then
      P.fail(("%s: %s names table '%s', which does not exist; tables: %s"):format(f, what, tostring(name),
        table.concat(util.keys(known), ", ")))
    end
  end
end

--- Write the rows of a trained collection, without those that pruning leaves out.
local function take_rows(self, collection)
  for i, t in ipairs(self.tables) do
    for row = 0, t.num_embeddings - 1, COPY_ROWS do
      P.scope(function()
        local rows = collection:table_rows(t.name, "weight", row, math.min(COPY_ROWS, t.num_embeddings - row))
        if not (self._remap and self._remap.rows[i]) then return self:write_rows(t.name, row, rows) end
        self._remap:each_kept(i, row, rows:size(1), function(from, m, to)
          self:write_rows(t.name, to, rows:slice(1, from, from + m))
        end)
      end)
    end
  end
end

--- The quantized collection of a trained one, which stays as it is. Of one on device "meta": a description on device
--- "meta".
local function from_float(class, wanted, collection, args)
  local f = class.class_name .. ".from_float"
  if not (type(collection) == "table" and getmetatable(collection) and wanted.is(collection)) then
    P.fail(("%s: collection is %s, wanted an %s"):format(f, signature.text(collection), wanted.class_name))
  end
  local a = util.named(f, args, from_arguments)
  util.one_of(f, "dtype", a.dtype, util.keys(config.table_types))
  check_names(f, "per_table_weight_dtype", a.per_table_weight_dtype, collection.tables)
  for name, dtype in util.ordered(a.per_table_weight_dtype or {}) do
    util.one_of(f, ("dtype of table '%s'"):format(name), dtype, util.keys(config.table_types))
  end
  local tables = util.map(collection.tables, function(t)
    return retyped(config[class.config_name], t, a.per_table_weight_dtype and a.per_table_weight_dtype[t.name]
      or a.dtype)
  end)
  local made = class {
    tables = tables, device = a.device or collection.device or nil, output_dtype = a.output_dtype,
    bounds_check_mode = a.bounds_check_mode, pruned = a.pruned, is_weighted = class == Bags
    and collection:is_weighted() or nil, need_indices = class == Rows and collection:need_indices() or nil,
  }
  if made.device ~= "meta" and collection.device ~= "meta" then take_rows(made, collection) end
  return made
end

function Bags.from_float(collection, args)
  return from_float(Bags, require "perilune.embed.bag", collection, args)
end
function Rows.from_float(collection, args)
  return from_float(Rows, require "perilune.embed.sequence", collection, args)
end

for _, class in ipairs { Bags, Rows } do
  for _, name in ipairs { "weight", "table_state", "table_rows", "write_rows", "copy" } do class[name] = class[name] end
  signature.check(class.class_name .. ":", class, {
    weight = "self: table, name: string", table_state = "self: table, name: string, which: string?",
    copy = "self: table, device: device?",
    table_rows = "self: table, name: string, which: string, row: integer, n: integer",
    write_rows = "self: table, name: string, row: integer, source: tensor",
  })
end

return { QuantCollection = QuantCollection, QuantEmbeddingBagCollection = Bags, QuantEmbeddingCollection = Rows }
