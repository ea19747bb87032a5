-- bag.lua: EmbeddingBagCollection over ranks: the plan says where rows live; ids go there, pooled rows come back.
local ffi = require "ffi"
local jagged = require "perilune.jagged"
local awaitable = require "perilune.dist.awaitable"
local config = require "perilune.embed.config"
local EmbeddingBagCollection = require "perilune.embed.bag"
local ShardedEmbeddingModule = require "perilune.shard.embedding"
local index_dedup = require "perilune.shard.dedup"
local ModuleSharder = require("perilune.shard.sharder").ModuleSharder
local util = require "perilune.util"
local signature = require "perilune.signature"

local M = {}

--- The KeyedTensor that a lookup becomes. Its values() are lazy too: nobody waits before the numbers are needed.
local EmbeddingBagCollectionAwaitable = awaitable.lazy_class("EmbeddingBagCollectionAwaitable",
  ShardedEmbeddingModule.OutputAwaitable)
function EmbeddingBagCollectionAwaitable:values() return awaitable.MethodLazyAwaitable(self, "values") end

--- ShardedEmbeddingBagCollection { tables =, plan =, group =, use_index_dedup = false, ... }: all other arguments are
--- in embedding.lua. Its result is a KeyedTensor [batch, columns].
local ShardedEmbeddingBagCollection = ShardedEmbeddingModule:extend "ShardedEmbeddingBagCollection"
ShardedEmbeddingBagCollection.OutputAwaitable = EmbeddingBagCollectionAwaitable
M.ShardedEmbeddingBagCollection = ShardedEmbeddingBagCollection
ShardedEmbeddingBagCollection.codec_slots = {
  POOLED_EMBEDDINGS_ALL_TO_ALL = "all_to_all", POOLED_EMBEDDINGS_REDUCE_SCATTER = "reduce_scatter",
}
ShardedEmbeddingBagCollection.parameter_prefix = "embedding_bags"
ShardedEmbeddingBagCollection.allowed_arguments = util.extended(ShardedEmbeddingModule.allowed_arguments,
  { use_index_dedup = util.optional.boolean })

function ShardedEmbeddingBagCollection:init(args)
  local own = util.named(self.class_name, args, self.allowed_arguments)
  local dedup = own.use_index_dedup or false
  ShardedEmbeddingModule.init(self, own, dedup)
  self._dedup = dedup and not index_dedup.changes(own) and index_dedup.BagDedup(own) or false
  self._names, self._dims = config.output_names(self.tables)
  self._keys = jagged.Keys.of(self._names)
  self._lengths = ffi.new("int64_t[?]", #self._dims, self._dims)
  self:_keep_arguments(args)
end

function ShardedEmbeddingBagCollection:input_dist(features)
  local batch, pools = features, nil
  if self._dedup then batch, pools = self:_at_home(self._dedup.shorten, self._dedup, features) end
  local stage = ShardedEmbeddingModule.input_dist(self, batch)
  stage.pools = pools
  return stage
end

function ShardedEmbeddingBagCollection:lookup(dist)
  local stage = ShardedEmbeddingModule.lookup(self, dist)
  stage.pools = dist.pools
  return stage
end

function ShardedEmbeddingBagCollection:_result(values, rows)
  if rows.pools then values = self._dedup:pool(values, rows.pools, self._dims) end
  return jagged.KeyedTensor._of(self._keys, self._lengths, values)
end

--- Names of the output's parts and their columns, in order.
function ShardedEmbeddingBagCollection:embedding_names() return self._names end
function ShardedEmbeddingBagCollection:embedding_dims() return self._dims end
--- As ShardedEmbeddingCollection's.
function ShardedEmbeddingBagCollection:index_dedup_counts()
  return self._dedup and { asked = self._dedup.asked, sent = self._dedup.sent } or nil
end
--- The tables' configurations.
function ShardedEmbeddingBagCollection:embedding_bag_configs() return self.tables end

ShardedEmbeddingModule._check_arguments(ShardedEmbeddingBagCollection, "features: KeyedJaggedTensor")

--- Its sharder.
local EmbeddingBagCollectionSharder = util.class("EmbeddingBagCollectionSharder", ModuleSharder)
M.EmbeddingBagCollectionSharder = EmbeddingBagCollectionSharder
EmbeddingBagCollectionSharder.module_type = EmbeddingBagCollection

--- Named arguments: those of ModuleSharder, and use_index_dedup.
EmbeddingBagCollectionSharder.allowed_arguments = util.extended(ModuleSharder.allowed_arguments,
  { use_index_dedup = util.optional.boolean })

function EmbeddingBagCollectionSharder:shardable_parameters(module) -- luacheck: ignore 212
  return module:embedding_bag_configs()
end

function EmbeddingBagCollectionSharder:shard(module, plan, env, device, path)
  local params, own = self:_params_of(module)
  return ShardedEmbeddingBagCollection {
    tables = module:embedding_bag_configs(), plan = plan, group = env.pg, device = device,
    fused_params = params, table_fused_params = own, is_weighted = module:is_weighted(),
    seed = module.seed or nil, use_index_dedup = self.use_index_dedup,
    gradient_division = self.gradient_division, qcomm_codecs_registry = self.qcomm_codecs_registry, name = path,
  }
end

signature.object("unsharded_bags", "an EmbeddingBagCollection",
  { embedding_bag_configs = "callable", is_weighted = "callable" })
signature.object("env_of_group", "a ShardingEnv with a process group", { pg = "Group" })
signature.check("EmbeddingBagCollectionSharder:", EmbeddingBagCollectionSharder, {
  shardable_parameters = "self: Sharder, module: unsharded_bags",
  shard = "self: Sharder, module: unsharded_bags, plan: table, env: env_of_group, device: any, path: string?",
})

return M
