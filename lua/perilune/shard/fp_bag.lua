-- fp_bag.lua: FeatureProcessedEmbeddingBagCollection over ranks: the processors run at home, before the ids leave, and
-- their weights travel with the ids. The gradients of the weights come back (they are those of this rank's own loss),
-- so processors are like any other dense part: replicas, whose gradients are averaged.
local P = require "perilune.ffi"
local util = require "perilune.util"
local FeatureProcessedEmbeddingBagCollection = require "perilune.embed.fp_bag"
local FeatureProcessorsCollection = require("perilune.embed.processor").FeatureProcessorsCollection
local bag = require "perilune.shard.bag"
local ShardedEmbeddingModule = require "perilune.shard.embedding"
local ModuleSharder = require("perilune.shard.sharder").ModuleSharder
local errors = require "perilune.errors"
local signature = require "perilune.signature"

local M = {}
local Base = bag.ShardedEmbeddingBagCollection

--- ShardedFeatureProcessedEmbeddingBagCollection { feature_processors = a FeatureProcessorsCollection, tables =, plan
--- =, group =, ... }: all other arguments are in embedding.lua. Its result is a KeyedTensor.
local Sharded = Base:extend "ShardedFeatureProcessedEmbeddingBagCollection"
M.ShardedFeatureProcessedEmbeddingBagCollection = Sharded
Sharded.parameter_prefix = "_embedding_bag_collection.embedding_bags"

function Sharded:init(args)
  local own = type(args) == "table" and util.copy(args) or {}
  local processors = own.feature_processors
  if not FeatureProcessorsCollection.is(processors) then
    P.fail(("%s: feature_processors is %s, wanted a FeatureProcessorsCollection"):format(self.class_name,
      errors.kind(processors)))
  end
  own.feature_processors, own.is_weighted = nil, true
  Base.init(self, own)
  self._feature_processors = processors
  self:_keep_arguments(args)
end

--- Weights, then the ids with them to their owners. What a processor cannot take is an error on all ranks.
function Sharded:input_dist(features)
  return Base.input_dist(self, self:_at_home(FeatureProcessedEmbeddingBagCollection.process, self, features))
end

function Sharded:feature_processors() return self._feature_processors end

function Sharded:sends_early() -- luacheck: ignore 212
  return false, "its feature processors are trained, and make the weights that leave with the ids"
end

signature.object("processed_bags", "a FeatureProcessedEmbeddingBagCollection", { embedding_bag_collection = "callable",
  feature_processors = "callable" })
ShardedEmbeddingModule._check_arguments(Sharded, "features: KeyedJaggedTensor")
function Sharded:try_copy_from(module) Base.try_copy_from(self, module:embedding_bag_collection()) end
function Sharded:copy_from(module) Base.copy_from(self, module:embedding_bag_collection()) end
signature.check("ShardedFeatureProcessedEmbeddingBagCollection:", Sharded,
  { copy_from = "self: table, module: processed_bags" })

--- Its sharder.
local Sharder = util.class("FeatureProcessedEmbeddingBagCollectionSharder", ModuleSharder)
M.FeatureProcessedEmbeddingBagCollectionSharder = Sharder
Sharder.module_type = FeatureProcessedEmbeddingBagCollection

function Sharder:shardable_parameters(module) return module:embedding_bag_configs() end -- luacheck: ignore 212

function Sharder:shard(module, plan, env, device, path)
  local collection = module:embedding_bag_collection()
  local params, own = self:_params_of(collection)
  return Sharded {
    tables = collection:embedding_bag_configs(), plan = plan, group = env.pg, device = device, name = path,
    feature_processors = module:feature_processors(), fused_params = params, table_fused_params = own,
    seed = collection.seed or nil, gradient_division = self.gradient_division,
    qcomm_codecs_registry = self.qcomm_codecs_registry,
  }
end

signature.check("FeatureProcessedEmbeddingBagCollectionSharder:", Sharder, {
  shardable_parameters = "self: Sharder, module: processed_bags",
  shard = "self: Sharder, module: processed_bags, plan: table, env: env_of_group, device: any, path: string?",
})

return M
