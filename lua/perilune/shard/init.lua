-- shard: sharded modules, built from plans.
return {
  ShardedEmbeddingBagCollection = require "perilune.shard.bag",
  files = require "perilune.shard.files",
}
