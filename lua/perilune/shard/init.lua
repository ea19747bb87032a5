-- shard: sharded modules, built from plans.
local util = require "perilune.util"

return util.face("peri.shard", {
  ShardedEmbeddingBagCollection = require "perilune.shard.bag",
  files = require "perilune.shard.files",
})
