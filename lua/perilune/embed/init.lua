-- embed: embedding tables: configurations, table batches, collections.
local config = require "perilune.embed.config"

return {
  EmbeddingBagConfig = config.EmbeddingBagConfig,
  PoolingType = config.PoolingType,
  uniform = config.uniform, normal = config.normal, constant = config.constant,
  config = config,
  tbe = require "perilune.embed.tbe",
}
