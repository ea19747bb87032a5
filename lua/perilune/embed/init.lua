-- embed: embedding tables: configurations, table batches, collections.
local util = require "perilune.util"
local config = require "perilune.embed.config"

local embed = {
  EmbeddingBagConfig = config.EmbeddingBagConfig, EmbeddingConfig = config.EmbeddingConfig,
  PoolingType = config.PoolingType,
  CacheParams = config.CacheParams, CacheAlgorithm = config.CacheAlgorithm,
  uniform = config.uniform, normal = config.normal, constant = config.constant,
  config = config,
  tbe = require "perilune.embed.tbe",
}

--- Collections are modules; who only needs table batches does not load perilune.nn.
local collections = { EmbeddingBagCollection = "perilune.embed.bag", EmbeddingCollection = "perilune.embed.sequence",
  PiecewiseEmbeddingBagCollection = "perilune.embed.pieces", TableCollection = "perilune.embed.collection",
  FeatureProcessedEmbeddingBagCollection = "perilune.embed.fp_bag", _processor = "perilune.embed.processor",
  _quant = "perilune.embed.quant", _quantize = "perilune.embed.quantize", _fp_quant = "perilune.embed.fp_quant",
  _copies = "perilune.embed.copies", _mc_policies = "perilune.embed.mc_policies",
  _mc_modules = "perilune.embed.mc_modules", _mc_hash = "perilune.embed.mc_hash",
  ManagedCollisionCollection = "perilune.embed.mc_collection", mc_map = "perilune.embed.mc_map",
  _mc_embedding = "perilune.embed.mc_embedding" }
local names = { QuantEmbeddingBagCollection = "_quant", QuantEmbeddingCollection = "_quant",
  quantize_embeddings = "_quantize", copy_to_device = "_copies", QuantFeatureProcessedEmbeddingBagCollection =
    "_fp_quant" }
for _, name in ipairs { "FeatureProcessor", "FeatureProcessorsCollection", "BaseGroupedFeatureProcessor",
  "FeatureProcessorDictWrapper", "PositionWeightedModule", "PositionWeightedModuleCollection",
  "PositionWeightedProcessor", "GroupedPositionWeightedModule" } do
  names[name] = "_processor"
end
for module, list in pairs {
  _mc_policies = { "MCHEvictionPolicy", "LFU_EvictionPolicy", "LRU_EvictionPolicy", "DistanceLFU_EvictionPolicy",
    "dynamic_threshold_filter", "average_threshold_filter", "probabilistic_threshold_filter" },
  _mc_modules = { "ManagedCollisionModule", "MCHManagedCollisionModule" },
  _mc_hash = { "HashZchManagedCollisionModule", "HashZchEvictionPolicyName", "HashZchEvictionConfig" },
  _mc_embedding = { "BaseManagedCollisionEmbeddingCollection", "ManagedCollisionEmbeddingBagCollection",
    "ManagedCollisionEmbeddingCollection" },
} do
  for _, name in ipairs(list) do names[name] = module end
end

return util.face("peri.embed", embed, collections, names)
