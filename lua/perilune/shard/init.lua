-- shard: sharded modules, built from plans.
local util = require "perilune.util"
local bag = require "perilune.shard.bag"
local dedup = require "perilune.shard.dedup"
local embedding_bag = require "perilune.shard.embedding_bag"
local fp_bag = require "perilune.shard.fp_bag"
local sequence = require "perilune.shard.sequence"
local sharder = require "perilune.shard.sharder"
local sharded_tensor = require "perilune.tensor.sharded"
local state_dict = require "perilune.tensor.state_dict"

local faces = {
  ShardedModule = require "perilune.shard.module",
  ShardedEmbeddingModule = require "perilune.shard.embedding",
  ShardedEmbeddingBagCollection = bag.ShardedEmbeddingBagCollection,
  ShardedEmbeddingCollection = sequence.ShardedEmbeddingCollection,
  ShardedFeatureProcessedEmbeddingBagCollection = fp_bag.ShardedFeatureProcessedEmbeddingBagCollection,
  ShardedEmbeddingBag = embedding_bag.ShardedEmbeddingBag,
  ModuleSharder = sharder.ModuleSharder,
  EmbeddingBagCollectionSharder = bag.EmbeddingBagCollectionSharder,
  FeatureProcessedEmbeddingBagCollectionSharder = fp_bag.FeatureProcessedEmbeddingBagCollectionSharder,
  EmbeddingBagSharder = embedding_bag.EmbeddingBagSharder,
  EmbeddingCollectionSharder = sequence.EmbeddingCollectionSharder,
  set_ec_index_dedup = dedup.set_ec_index_dedup, get_ec_index_dedup = dedup.get_ec_index_dedup,
  ShardedTensor = sharded_tensor.ShardedTensor,
  gather_state_dict = state_dict.gather_state_dict, clone_state_dict = state_dict.clone_state_dict,
  registry = sharder.registry,
  _files = require "perilune.shard.files",
  explain = require("perilune.shard.explain").explain,
}
for name, value in util.ordered(require "perilune.shard.quant") do faces[name] = value end
for name, value in util.ordered(require "perilune.shard.mc_embedding") do faces[name] = value end
for _, name in ipairs { "ShardedManagedCollisionCollection", "ManagedCollisionCollectionSharder",
  "ManagedCollisionCollectionContext", "create_mc_sharding" } do
  faces[name] = require("perilune.shard.mc_collection")[name]
end

return util.face("peri.shard", faces, { utils = "perilune.shard.utils" })
