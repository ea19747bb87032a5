-- feature_processors.lua: Weights of ids, by feature processors.
--
-- A feature processor gives each id of a batch a weight before the lookup, with gradient: by its place in the bag, for
-- instance. One of your own is a class below `FeatureProcessor` (for one feature: `forward` gets a JaggedTensor) or
-- below `FeatureProcessorsCollection` (for a batch: a KeyedJaggedTensor) that returns the same ids with weights
-- (`with_weights`).
---@meta

---@class peri
local peri = {}
---@class peri.embed
local embed = {}

---A weighted EmbeddingBagCollection behind feature processors.
---
---Errors: a collection that is not weighted; a processor of a feature that no table has; a processor that returns no
---weights.
---
---```lua
---local ebc = peri.EmbeddingBagCollection { tables = { peri.EmbeddingBagConfig { name = "t",
---  num_embeddings = 10, embedding_dim = 4, feature_names = { "f" } } }, is_weighted = true }
---local by_place = peri.embed.PositionWeightedModuleCollection { max_feature_lengths = { f = 5 } }
---local fp = peri.FeatureProcessedEmbeddingBagCollection { embedding_bag_collection = ebc,
---  feature_processors = by_place }
---local batch = peri.KeyedJaggedTensor.from_lists { keys = { "f" }, { { 1, 2 }, {} } }
---print(fp:forward(batch):values():size(2), fp:process(batch):weights():numel(),
---  fp:fused_optimizer())
-----> 4 2 nil
---print(fp:embedding_names()[1], fp:embedding_dims()[1], fp:embedding_bag_configs()[1].name)
-----> f 4 t
---print(rawequal(fp:embedding_bag_collection(), ebc), rawequal(fp:feature_processors(), by_place))
-----> true true
---local quant = peri.embed.QuantFeatureProcessedEmbeddingBagCollection.from_float(fp,
---  { dtype = "INT8" })
---print(quant:copy("cpu"):forward(batch):values():size(2)) --> 4
---print(quant:table_rows("t", "weight", 3, 2):size(1)) --> 2
---```
---@class peri.FeatureProcessedEmbeddingBagCollection: peri.nn.Module
---@overload fun(args: peri.FeatureProcessedEmbeddingBagCollection.args): peri.FeatureProcessedEmbeddingBagCollection
peri.FeatureProcessedEmbeddingBagCollection = {}

---@class peri.FeatureProcessedEmbeddingBagCollection.args
---@field embedding_bag_collection peri.EmbeddingBagCollection The tables, with `is_weighted`.
---@field feature_processors peri.embed.FeatureProcessorsCollection|table One for all, or FeatureProcessors by feature; other ids weigh 1.

---Look a batch up. Calling the module calls it.
---@param features peri.KeyedJaggedTensor The ids of B samples.
---@return peri.KeyedTensor # `[B, columns of all features]`.
function peri.FeatureProcessedEmbeddingBagCollection:forward(features) end

---The batch with the weights that the processors make.
---@param features peri.KeyedJaggedTensor The ids.
---@return peri.KeyedJaggedTensor
function peri.FeatureProcessedEmbeddingBagCollection:process(features) end

---The configurations of the tables.
---@return peri.EmbeddingBagConfig[]
function peri.FeatureProcessedEmbeddingBagCollection:embedding_bag_configs() end

---Names of the parts of the result.
---@return string[]
function peri.FeatureProcessedEmbeddingBagCollection:embedding_names() end

---Columns of the parts of the result.
---@return integer[]
function peri.FeatureProcessedEmbeddingBagCollection:embedding_dims() end

---The collection behind the processors.
---@return peri.EmbeddingBagCollection
function peri.FeatureProcessedEmbeddingBagCollection:embedding_bag_collection() end

---The processors.
---@return peri.embed.FeatureProcessorsCollection
function peri.FeatureProcessedEmbeddingBagCollection:feature_processors() end

---The optimizer of the collection's tables.
---@return any|nil # nil: it has no `fused_params`.
function peri.FeatureProcessedEmbeddingBagCollection:fused_optimizer() end

---A FeatureProcessedEmbeddingBagCollection with quantized tables, for serving: nothing is recorded.
---
---Errors: a collection that is not quantized, or not weighted; what is no FeatureProcessorsCollection.
---@class peri.embed.QuantFeatureProcessedEmbeddingBagCollection: peri.nn.Module
---@overload fun(args: peri.embed.QuantFeatureProcessedEmbeddingBagCollection.args): peri.embed.QuantFeatureProcessedEmbeddingBagCollection
embed.QuantFeatureProcessedEmbeddingBagCollection = {}

---@class peri.embed.QuantFeatureProcessedEmbeddingBagCollection.args
---@field embedding_bag_collection peri.QuantEmbeddingBagCollection The tables, with `is_weighted`.
---@field feature_processors peri.embed.FeatureProcessorsCollection The processors.

---Make one of a trained one, which stays as it is.
---@param module peri.FeatureProcessedEmbeddingBagCollection The trained one.
---@param args? table As `QuantEmbeddingBagCollection.from_float` takes (default: INT8).
---@return peri.embed.QuantFeatureProcessedEmbeddingBagCollection
function embed.QuantFeatureProcessedEmbeddingBagCollection.from_float(module, args) end

---One with the same numbers that shares nothing with this one.
---@param device? string Where it is (default: the same device).
---@return peri.embed.QuantFeatureProcessedEmbeddingBagCollection
function embed.QuantFeatureProcessedEmbeddingBagCollection:copy(device) end

---Look a batch up. Calling the module calls it.
---@param features peri.KeyedJaggedTensor The ids of B samples.
---@return peri.KeyedTensor # `[B, columns of all features]`.
function embed.QuantFeatureProcessedEmbeddingBagCollection:forward(features) end

---The batch with the weights that the processors make.
---@param features peri.KeyedJaggedTensor The ids.
---@return peri.KeyedJaggedTensor
function embed.QuantFeatureProcessedEmbeddingBagCollection:process(features) end

---The configurations of the tables.
---@return peri.EmbeddingBagConfig[]
function embed.QuantFeatureProcessedEmbeddingBagCollection:embedding_bag_configs() end

---Names of the parts of the result.
---@return string[]
function embed.QuantFeatureProcessedEmbeddingBagCollection:embedding_names() end

---Columns of the parts of the result.
---@return integer[]
function embed.QuantFeatureProcessedEmbeddingBagCollection:embedding_dims() end

---The collection behind the processors.
---@return peri.QuantEmbeddingBagCollection
function embed.QuantFeatureProcessedEmbeddingBagCollection:embedding_bag_collection() end

---The processors.
---@return peri.embed.FeatureProcessorsCollection
function embed.QuantFeatureProcessedEmbeddingBagCollection:feature_processors() end

---Rows of a table as numbers.
---@param name string Name of the table.
---@param which string `weight`.
---@param row integer The first row, from 0.
---@param n integer How many rows.
---@return peri.Tensor # f32 `[n, embedding_dim]`.
function embed.QuantFeatureProcessedEmbeddingBagCollection:table_rows(name, which, row, n) end

---The base of processors of one feature: `forward` gets a JaggedTensor and returns one with a weight (f32) for each id.
---
---Errors: `forward` of a class that has none.
---
---```lua
---local Half = peri.embed.FeatureProcessor:extend "Half"
---function Half:forward(jt) return jt:with_weights(peri.full({ jt:values():numel() }, 0.5)) end
---local wrapper = peri.embed.FeatureProcessorDictWrapper { feature_processors = { f = Half() } }
---local batch = peri.KeyedJaggedTensor.from_lists { keys = { "f" }, { { 1, 2 } } }
---print(wrapper:forward(batch):weights():item(0), wrapper:feature_names()[1]) --> 0.5 f
---```
---@class peri.embed.FeatureProcessor: peri.nn.Module
embed.FeatureProcessor = {}

---The base of processors of a whole batch: `forward` gets a KeyedJaggedTensor and returns one of the same keys and ids
---with weights. `BaseGroupedFeatureProcessor` is the same class.
---
---Errors: `forward` of a class that has none.
---
---```lua
---print(peri.embed.FeatureProcessorsCollection == peri.embed.BaseGroupedFeatureProcessor) --> true
---```
---@class peri.embed.FeatureProcessorsCollection: peri.nn.Module
embed.FeatureProcessorsCollection = {}

---The features that it has something for, sorted.
---@return string[]|nil # nil: whatever comes.
function embed.FeatureProcessorsCollection:feature_names() end

---FeatureProcessors by the names of features; ids of other features weigh 1.
---
---Errors: what is no FeatureProcessor; one that does not return a weight for each id; a batch without one of the
---features.
---@class peri.embed.FeatureProcessorDictWrapper: peri.embed.FeatureProcessorsCollection
---@overload fun(args: peri.embed.FeatureProcessorDictWrapper.args): peri.embed.FeatureProcessorDictWrapper
embed.FeatureProcessorDictWrapper = {}

---@class peri.embed.FeatureProcessorDictWrapper.args
---@field feature_processors table<string, peri.embed.FeatureProcessor> Feature -> processor.

---Make the weights. Calling the module calls it.
---@param features peri.KeyedJaggedTensor The ids.
---@return peri.KeyedJaggedTensor # With weights.
function embed.FeatureProcessorDictWrapper:forward(features) end

---The weight of the i-th id of a bag is the parameter `position_weight[i]`, 1 at first. For one feature.
---
---Errors: a bag longer than max_feature_length; ids that have weights already.
---
---```lua
---local places = peri.embed.PositionWeightedModule { max_feature_length = 3 }
---local jt = peri.JaggedTensor { values = peri.tensor({ 5, 6 }, "i64"), lengths = { 2 } }
---print(places:forward(jt):weights():item(1), places:extra_text()) --> 1 max_feature_length=3
---```
---@class peri.embed.PositionWeightedModule: peri.embed.FeatureProcessor
---@overload fun(args: peri.embed.PositionWeightedModule.args): peri.embed.PositionWeightedModule
embed.PositionWeightedModule = {}

---@class peri.embed.PositionWeightedModule.args
---@field max_feature_length integer Ids of the longest bag.
---@field device? string Where the parameter is (default: that of the rank).

---Make the weights. Calling the module calls it.
---@param features peri.JaggedTensor The ids of one feature.
---@return peri.JaggedTensor # With weights.
function embed.PositionWeightedModule:forward(features) end

---The same for several features; ids of others weigh 1. `PositionWeightedProcessor` is a class like it under TorchRec's
---older name.
---
---Errors: a bag longer than its feature's length; ids that have weights already; a batch without one of the features.
---
---```lua
---local places = peri.embed.PositionWeightedProcessor { max_feature_lengths = { f = 3 } }
---local batch = peri.KeyedJaggedTensor.from_lists { keys = { "f" }, { { 1, 2 } } }
---print(places:forward(batch):weights():item(0), places:extra_text(), places:feature_names()[1])
-----> 1 f=3 f
---```
---@class peri.embed.PositionWeightedModuleCollection: peri.embed.FeatureProcessorsCollection
---@overload fun(args: peri.embed.PositionWeightedModuleCollection.args): peri.embed.PositionWeightedModuleCollection
embed.PositionWeightedModuleCollection = {}

---@class peri.embed.PositionWeightedModuleCollection.args
---@field max_feature_lengths table<string, integer> Feature -> ids of its longest bag.
---@field device? string Where the parameters are (default: that of the rank).

---Make the weights. Calling the module calls it.
---@param features peri.KeyedJaggedTensor The ids.
---@return peri.KeyedJaggedTensor # With weights.
function embed.PositionWeightedModuleCollection:forward(features) end

---As `PositionWeightedModuleCollection`.
---
---Errors: as there.
---@class peri.embed.PositionWeightedProcessor: peri.embed.PositionWeightedModuleCollection
---@overload fun(args: peri.embed.PositionWeightedProcessor.args): peri.embed.PositionWeightedProcessor
embed.PositionWeightedProcessor = {}

---@class peri.embed.PositionWeightedProcessor.args
---@field max_feature_lengths table<string, integer> Feature -> ids of its longest bag.
---@field device? string Where the parameters are (default: that of the rank).

---The same for bags that were cut: weights that a batch has already say at which place each id was before (as
---`bucketize_pos` gives them).
---
---Errors: a feature without a length; a place outside of its bag.
---
---```lua
---local places = peri.embed.GroupedPositionWeightedModule { max_feature_lengths = { f = 3 } }
---local batch = peri.KeyedJaggedTensor { keys = { "f" }, values = { 8, 9 }, lengths = { 2 },
---  weights = { 2, 0 } }
---print(places(batch):weights():item(0)) --> 1
---```
---@class peri.embed.GroupedPositionWeightedModule: peri.embed.PositionWeightedModuleCollection
---@overload fun(args: peri.embed.GroupedPositionWeightedModule.args): peri.embed.GroupedPositionWeightedModule
embed.GroupedPositionWeightedModule = {}

---@class peri.embed.GroupedPositionWeightedModule.args
---@field max_feature_lengths table<string, integer> Feature -> ids of its longest bag; every feature of the batch has one.
---@field device? string Where the parameters are (default: that of the rank).
