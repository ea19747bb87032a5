-- sequence.lua: EmbeddingCollection over ranks: ids go to the ranks that have their rows, and a row for each id comes
-- back.
local ffi = require "ffi"
local P = require "perilune.ffi"
local Tensor = require "perilune.tensor"
local jagged = require "perilune.jagged"
local awaitable = require "perilune.dist.awaitable"
local config = require "perilune.embed.config"
local EmbeddingCollection = require "perilune.embed.sequence"
local outputs = require "perilune.embed.outputs"
local ShardedEmbeddingModule = require "perilune.shard.embedding"
local ModuleSharder = require("perilune.shard.sharder").ModuleSharder
local util = require "perilune.util"
local sparse = require "perilune.sparse"
local index_dedup = require "perilune.shard.dedup"
local signature = require "perilune.signature"
local C, check = P.C, P.check

local M = {}

--- The table of JaggedTensors that a lookup becomes.
local EmbeddingCollectionAwaitable = awaitable.lazy_class("EmbeddingCollectionAwaitable",
  ShardedEmbeddingModule.OutputAwaitable)

--- ShardedEmbeddingCollection { tables =, plan =, group =, need_indices = false, use_index_dedup =
--- get_ec_index_dedup(), ... }: all other arguments are in embedding.lua. Its result has a JaggedTensor for each
--- feature: a row for each of its ids, and its lengths; with need_indices its weights are the ids. A feature of several
--- tables has one for each, "feature@table".
local ShardedEmbeddingCollection = ShardedEmbeddingModule:extend "ShardedEmbeddingCollection"
ShardedEmbeddingCollection.OutputAwaitable = EmbeddingCollectionAwaitable
M.ShardedEmbeddingCollection = ShardedEmbeddingCollection
ShardedEmbeddingCollection.kind = C.PERI_SHARDED_EC
ShardedEmbeddingCollection.codec_slots = { SEQUENCE_EMBEDDINGS_ALL_TO_ALL = "all_to_all" }
ShardedEmbeddingCollection.parameter_prefix = "embeddings"
ShardedEmbeddingCollection.allowed_arguments = util.extended(ShardedEmbeddingModule.allowed_arguments,
  { need_indices = util.optional.boolean, use_index_dedup = util.optional.boolean })

function ShardedEmbeddingCollection:init(args)
  local own = util.named(self.class_name, args, self.allowed_arguments)
  self._need_indices = own.need_indices or false
  local wanted = index_dedup.wanted(self.class_name, own.use_index_dedup)
  local dedup = wanted and not index_dedup.changes(own)
  ShardedEmbeddingModule.init(self, own, wanted)
  self._names, self._features = config.output_names(self.tables), {}
  self._dedup = dedup and index_dedup.Dedup(self.tables) or false
  -- by output: that whose rows it is made of; columns of its table. The widest table's
  self._source, self._columns, self._dim = {}, {}, 0
  for _, t in ipairs(self.tables) do
    local first = #self._features
    self._dim = math.max(self._dim, t.embedding_dim)
    for i, f in ipairs(t.feature_names) do
      self._columns[first + i] = t.embedding_dim
      self._features[first + i] = f
      self._source[first + i] = first + (self._dedup and util.index_of(t.feature_names)[self._dedup.leader[f]] or i)
    end
  end
  self._results = ffi.new("peri_tensor *[?]", #self._names)
  self:_keep_arguments(args)
  self._made_of.use_index_dedup = wanted
end

--- The next stages need the lengths of what was asked for, its weights and inverse indices: they stay at home.
function ShardedEmbeddingCollection:input_dist(features)
  local batch, places = features, nil
  if jagged.KeyedJaggedTensor.is(features) and features:weights_or_none() then batch = features:with_weights(nil) end
  if self._dedup then batch, places = self:_at_home(self._dedup.shorten, self._dedup, batch) end
  local stage = ShardedEmbeddingModule.input_dist(self, batch)
  stage.features, stage.places = features, places
  return stage
end

function ShardedEmbeddingCollection:lookup(dist)
  local stage = ShardedEmbeddingModule.lookup(self, dist)
  stage.features, stage.places = dist.features, dist.places
  return stage
end

function ShardedEmbeddingCollection:output(rows)
  local work, list, result = rows.work, self._results, {}
  local status = C.peri_sharded_output(self:_pointer(), work.ptr, list)
  work:release()
  check(status)
  local values = {}
  for i = 1, #self._names do values[i] = outputs.own_columns(Tensor.wrap(list[i - 1]), self._columns[i]) end
  for i, name in ipairs(self._names) do
    local ids = rows.features:get(self._features[i])
    local own = values[i]
    if rows.places then own = sparse.index_select_dim0(values[self._source[i]], rows.places[self._features[i]]) end
    result[name] = jagged.JaggedTensor { values = own, lengths = ids:lengths(), weights = self._need_indices
      and ids:values() or nil }
  end
  return outputs.completed(self.class_name, rows.features, self._names, self._features, result, self._need_indices)
end

--- Names of the results, in order.
function ShardedEmbeddingCollection:embedding_names() return self._names end
--- Columns of the widest table.
function ShardedEmbeddingCollection:embedding_dim() return self._dim end
function ShardedEmbeddingCollection:need_indices() return self._need_indices end
--- Ids that this rank has asked for, and those that travelled: { asked =, sent = }; nil: without index dedup, or where
--- it would change what is learned.
function ShardedEmbeddingCollection:index_dedup_counts()
  return self._dedup and { asked = self._dedup.asked, sent = self._dedup.sent } or nil
end
--- The tables' configurations.
function ShardedEmbeddingCollection:embedding_configs() return self.tables end

ShardedEmbeddingModule._check_arguments(ShardedEmbeddingCollection, "features: KeyedJaggedTensor")

--- Its sharder.
local EmbeddingCollectionSharder = util.class("EmbeddingCollectionSharder", ModuleSharder)
M.EmbeddingCollectionSharder = EmbeddingCollectionSharder
EmbeddingCollectionSharder.module_type = EmbeddingCollection

--- Named arguments: those of ModuleSharder, and use_index_dedup.
EmbeddingCollectionSharder.allowed_arguments = util.extended(ModuleSharder.allowed_arguments,
  { use_index_dedup = util.optional.boolean })

function EmbeddingCollectionSharder:shardable_parameters(module) -- luacheck: ignore 212
  return module:embedding_configs()
end

function EmbeddingCollectionSharder:shard(module, plan, env, device, path)
  local params, own = self:_params_of(module)
  return ShardedEmbeddingCollection {
    tables = module:embedding_configs(), plan = plan, group = env.pg, device = device,
    need_indices = module:need_indices(), use_index_dedup = self.use_index_dedup,
    fused_params = params, table_fused_params = own, seed = module.seed or nil,
    gradient_division = self.gradient_division, qcomm_codecs_registry = self.qcomm_codecs_registry, name = path,
  }
end

signature.object("unsharded_rows", "an EmbeddingCollection",
  { embedding_configs = "callable", need_indices = "callable" })
signature.check("EmbeddingCollectionSharder:", EmbeddingCollectionSharder, {
  shardable_parameters = "self: Sharder, module: unsharded_rows",
  shard = "self: Sharder, module: unsharded_rows, plan: table, env: env_of_group, device: any, path: string?",
})

return M
