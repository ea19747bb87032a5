-- sequence.lua: EmbeddingCollection: for every feature of a batch, the rows of its ids, one by one. Not sharded. What
-- it shares with EmbeddingBagCollection is in collection.lua.
--
--   local ec = peri.EmbeddingCollection {
--     tables = { peri.EmbeddingConfig { name = "t", embedding_dim = 16, num_embeddings = 1000,
--       feature_names = { "f", "g" } } },
--     fused_params = { optimizer = "rowwise_adagrad", learning_rate = 0.1 },
--   }
--   local rows = ec(kjt)      -- { f = JaggedTensor, g = JaggedTensor }
--   rows.f:values()           -- [ids of f, 16], cut into samples by rows.f:lengths()
--
-- An id outside its table is treated as bounds_check_mode says; -1 gives a row of zeros and no gradient.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local jagged = require "perilune.jagged"
local TableCollection = require "perilune.embed.collection"
local outputs = require "perilune.embed.outputs"
local C, check = P.C, P.check

local kjt_ptr = jagged.KeyedJaggedTensor.ptr

local EmbeddingCollection = TableCollection:extend "EmbeddingCollection"
EmbeddingCollection.sharder = "EmbeddingCollectionSharder" -- in peri.shard
EmbeddingCollection.config_name, EmbeddingCollection.parameter_prefix = "EmbeddingConfig", "embeddings"

local arguments = TableCollection._arguments {
  need_indices = false, -- the outputs' weights are the ids
}

function EmbeddingCollection:init(args)
  local a = util.named("EmbeddingCollection", args, arguments)
  self:_setup(a)
  outputs.widths(self)
  self._need_indices = a.need_indices
  self._order = ffi.new("int32_t[?]", #self._outputs) -- the place of each output's feature in the keys of a batch
  self._jts = ffi.new("peri_jt *[?]", #self._outputs)
  self._of = util.map(self._outputs, function(output) return output.name end) -- by output its feature
  -- whether batches are rearranged to one key for each output, as those with shared or further features are
  self._arrange = false
end

-- -- forward ----------------------------------------------------------------------------------------------------------

--- Find the features of the outputs in these keys.
local function find(self, keys)
  self._seen_stride = -1 -- until all is found, no batch has these
  local used, arrange = {}, C.peri_keys_count(keys) ~= #self._outputs
  for i, output in ipairs(self._outputs) do
    local key = self:_key_of(output, keys, "feature")
    if used[key] then arrange = true end
    used[key] = true
    self._order[i - 1] = key
  end
  self._arrange = arrange
end

--- Blocks that write the row of each id at its place among the ids. bags(key): first bag and bags of a key.
local function blocks_of(self, bags)
  local list = {}
  for i, output in ipairs(self._outputs) do
    local first, n = bags(outputs.place(self, i))
    list[i] = { table = output.table, feature = output.feature, first_bag = first, bags = n, out_offset = 0,
      out_stride = self._dim }
  end
  return self:materialise():blocks(list)
end

--- The block list for batches with these keys and this stride.
local function block_list(self, keys, stride)
  find(self, keys)
  return blocks_of(self, function(key) return key * stride, stride end)
end

local desc = P.struct "peri_kjt_info"
local ids_out, offsets_out, lookups_out = ffi.new "peri_tensor *[1]", ffi.new "peri_tensor *[1]",
  ffi.new "peri_tbe_batch *[1]"

--- A variable batch and its blocks.
local function variable_blocks(self, features)
  find(self, C.peri_kjt_keys(features.ptr))
  local batch, bags = outputs.variable(self, features)
  return batch, blocks_of(self, bags)
end

--- The results by name, with what the batch has beside its ids.
local function completed(self, features)
  local result = outputs.narrowed(self, outputs.by_name(self))
  return outputs.completed("EmbeddingCollection", features, self._names, self._of, result, self._need_indices)
end

--- The rows of the features of a KeyedJaggedTensor: name -> JaggedTensor of [ids of the feature, embedding_dim] with
--- the feature's lengths; its weights are those of the batch, or with need_indices the ids. With inverse indices every
--- sample has the rows of the bag that they name. The batch may have further keys.
function EmbeddingCollection:forward(features)
  self:_check_features(features)
  local kjt = kjt_ptr(features)
  C.peri_kjt_describe(kjt, desc)
  local batch, blocks
  if desc.variable_stride then
    batch, blocks = variable_blocks(self, features)
  else
    self:_prepare(C.peri_kjt_keys(kjt), tonumber(desc.stride), block_list)
    local ahead = self:_take_ahead(features)
    if ahead then
      ahead.lookups:lookup_jagged(ahead.batch, self._need_indices, self._jts)
      return completed(self, features)
    end
    batch, blocks = outputs.arranged(self, features), self._blocks
  end
  local arranged_kjt = kjt_ptr(batch)
  check(C.peri_kjt_values(arranged_kjt, ids_out))
  local ids = Tensor.wrap(ids_out[0])
  check(C.peri_kjt_offsets(arranged_kjt, offsets_out))
  local offsets, input = Tensor.wrap(offsets_out[0]), self._input
  input.ids, input.offsets, input.blocks = ids.ptr, offsets.ptr, blocks.ptr
  check(C.peri_tbe_batch_new(self._tbe.ptr, input, lookups_out))
  local lookups = lookups_out[0]
  local status = C.peri_tbe_batch_lookup_jagged(lookups, arranged_kjt, self._need_indices, self._jts)
  C.peri_tbe_batch_release(lookups)
  check(status)
  return completed(self, features)
end

function EmbeddingCollection:_prepare_batch(features)
  self:_prepare(C.peri_kjt_keys(features.ptr), features:stride(), block_list)
  local batch = outputs.arranged(self, features)
  local ids = batch:values()
  return { batch = batch, ids = ids:numel(), lookups = self._tbe:batch(ids, batch:offsets(), self._blocks) }
end

-- -- looking ----------------------------------------------------------------------------------------------------------

--- The tables' configurations, in order.
function EmbeddingCollection:embedding_configs() return self.tables end
--- Columns of the widest table.
function EmbeddingCollection:embedding_dim() return self._dim end
function EmbeddingCollection:need_indices() return self._need_indices end
function EmbeddingCollection:is_weighted() return false end -- luacheck: ignore 212
--- For each table, in order, the names of its outputs.
function EmbeddingCollection:embedding_names_by_table()
  local lists = util.map(self.tables, function() return {} end)
  for i, output in ipairs(self._outputs) do
    local list = lists[output.table]
    list[#list + 1] = self._names[i]
  end
  return lists
end

TableCollection._check_arguments(EmbeddingCollection)

return EmbeddingCollection
