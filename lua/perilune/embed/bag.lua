-- bag.lua: EmbeddingBagCollection: for every feature of a batch, the pooled rows of its table. Not sharded:
-- perilune.shard has the same over ranks. What it shares with EmbeddingCollection is in collection.lua.
--
--   local ebc = peri.EmbeddingBagCollection {
--     tables = { peri.EmbeddingBagConfig { name = "t", embedding_dim = 16, num_embeddings = 1000,
--       feature_names = { "f", "g" } } },
--     fused_params = { optimizer = "rowwise_adagrad", learning_rate = 0.1 },
--   }
--   local kt = ebc(kjt)      -- KeyedTensor: columns "f", "g"
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local jagged = require "perilune.jagged"
local TableCollection = require "perilune.embed.collection"
local C, check = P.C, P.check

local Keys, KeyedTensor = jagged.Keys, jagged.KeyedTensor
local kjt_ptr = jagged.KeyedJaggedTensor.ptr

local EmbeddingBagCollection = TableCollection:extend "EmbeddingBagCollection"
EmbeddingBagCollection.sharder = "EmbeddingBagCollectionSharder" -- in peri.shard
EmbeddingBagCollection.config_name, EmbeddingBagCollection.parameter_prefix = "EmbeddingBagConfig", "embedding_bags"

local arguments = TableCollection._arguments {
  is_weighted = false, -- the ids' weights multiply their rows
}

function EmbeddingBagCollection:init(args)
  local a = util.named("EmbeddingBagCollection", args, arguments)
  self:_setup(a)
  self._weighted, self._width = a.is_weighted, 0 -- columns of the output
  for _, dim in ipairs(self._dims) do self._width = self._width + dim end
  self._keys = Keys.of(self._names)
  self._lengths = ffi.new("int64_t[?]", #self._dims, self._dims)
end

-- -- forward ----------------------------------------------------------------------------------------------------------

--- The block list for batches with these keys and this stride.
local function block_list(self, keys, stride)
  local list, column = {}, 0
  for i, output in ipairs(self._outputs) do
    local key = self:_key_of(output, keys, "feature")
    list[i] = {
      table = output.table, feature = output.feature, first_bag = key * stride, bags = stride, out_offset = column,
      out_stride = self._width,
    }
    column = column + self._dims[i]
  end
  return self:materialise():blocks(list)
end

local desc = P.struct "peri_kjt_info"
local ids_out, offsets_out, weights_out = ffi.new "peri_tensor *[1]", ffi.new "peri_tensor *[1]",
  ffi.new "peri_tensor *[1]"
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
    local key = self:_key_of(output, keys, "feature")
    local dim = self._dims[i]
    list[i] = {
      table = output.table, feature = output.feature, first_bag = first[key + 1], bags = strides[key + 1],
      out_offset = at, out_stride = dim,
    }
    at = at + strides[key + 1] * dim
    rows[i - 1], row[i - 1], names[i - 1] = strides[key + 1], self:_key_of(output, inverse_keys, "inverse indices of"),
      output.name
  end
  local weights = self._weighted and features:weights() or nil
  local pooled = batch:lookup(features:values(), features:offsets(), batch:blocks(list), at, nil, weights)
  local a = ffi.new "peri_tbe_expand_args"
  local indices = inverse[2]:contiguous()
  local dtype = pooled:dtype()
  pooled = pooled:to "f32" -- exact, and rounded back without loss
  a.pooled, a.inverse, a.features, a.rows, a.cols, a.inverse_row, a.names = pooled.ptr, indices.ptr, n, rows,
    self._lengths, row, names
  check(C.peri_tbe_expand(a, out))
  local values = Tensor.wrap(out[0]):to(dtype)
  check(C.peri_kt_new(self._keys.ptr, self._lengths, 1, values.ptr, kt_out))
  return KeyedTensor.wrap(kt_out[0])
end

--- Pooled rows of the features of a KeyedJaggedTensor, as a KeyedTensor [batch, columns]; the batch may have further
--- keys.
function EmbeddingBagCollection:forward(features)
  self:_check_features(features)
  local kjt = kjt_ptr(features)
  C.peri_kjt_describe(kjt, desc)
  if self._weighted and not desc.weighted then
    P.fail "EmbeddingBagCollection: is_weighted, but the batch has no weights"
  end
  if desc.weighted and not self._weighted then
    P.fail("EmbeddingBagCollection: the batch has weights, but is_weighted is false; set it, or leave the weights out "
      .. "of the batch")
  end
  if desc.variable_stride then return variable(self, features) end
  local stride = tonumber(desc.stride)
  self:_prepare(C.peri_kjt_keys(kjt), stride, block_list)
  local ahead = self:_take_ahead(features)
  if ahead then
    check(C.peri_kt_new(self._keys.ptr, self._lengths, 1, ahead.lookups:lookup(stride, self._width).ptr, kt_out))
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

function EmbeddingBagCollection:_prepare_batch(features)
  self:_prepare(C.peri_kjt_keys(features.ptr), features:stride(), block_list)
  local weights = self._weighted and features:weights() or nil
  return { lookups = self._tbe:batch(features:values(), features:offsets(), self._blocks, weights) }
end

-- -- looking ----------------------------------------------------------------------------------------------------------

--- The tables' configurations, in order.
function EmbeddingBagCollection:embedding_bag_configs() return self.tables end
function EmbeddingBagCollection:is_weighted() return self._weighted end
--- Columns of the output's parts, in the order of embedding_names.
function EmbeddingBagCollection:embedding_dims() return self._dims end

TableCollection._check_arguments(EmbeddingBagCollection)

return EmbeddingBagCollection
