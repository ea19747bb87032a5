-- fp_bag.lua: FeatureProcessedEmbeddingBagCollection: a weighted EmbeddingBagCollection behind feature processors
-- (processor.lua), which make the weights of the ids. Not sharded: perilune.shard has the same over ranks.
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local util = require "perilune.util"
local jagged = require "perilune.jagged"
local nn = require "perilune.nn"
local EmbeddingBagCollection = require "perilune.embed.bag"
local processor = require "perilune.embed.processor"

local FeatureProcessedEmbeddingBagCollection = nn.Module:extend "FeatureProcessedEmbeddingBagCollection"
FeatureProcessedEmbeddingBagCollection.sharder = "FeatureProcessedEmbeddingBagCollectionSharder" -- in peri.shard

local arguments = {
  embedding_bag_collection = util.required, -- an EmbeddingBagCollection that is_weighted
  feature_processors = util.required,       -- a FeatureProcessorsCollection, or FeatureProcessors by feature; other ids
                                            -- weigh 1
}

--- The processors as one module, of features that the collection has.
local function processors_of(func, given, collection)
  if type(given) == "table" and getmetatable(given) == nil then
    given = processor.FeatureProcessorDictWrapper { feature_processors = given }
  end
  if not processor.FeatureProcessorsCollection.is(given) then
    P.fail(("%s: feature_processors is %s, wanted a FeatureProcessorsCollection, or FeatureProcessors by "
      .. "feature"):format(func, errors.kind(given)))
  end
  local known = util.index_of(collection:feature_names())
  for _, name in ipairs(given:feature_names() or {}) do
    if not known[name] then
      P.fail(("%s: feature_processors has feature '%s', which no table has; those are: %s"):format(func, name,
        table.concat(collection:feature_names(), ", ")))
    end
  end
  return given
end

function FeatureProcessedEmbeddingBagCollection:init(args)
  local func = self.class_name
  local a = util.named(func, args, arguments)
  local collection = a.embedding_bag_collection
  if not EmbeddingBagCollection.is(collection) then
    P.fail(("%s: embedding_bag_collection is %s, wanted an EmbeddingBagCollection"):format(func,
      errors.kind(collection)))
  end
  if not collection:is_weighted() then
    P.fail(func .. ": embedding_bag_collection is not weighted, so it could not use the weights of processors; make "
      .. "it with is_weighted")
  end
  self._embedding_bag_collection = collection
  self._feature_processors = processors_of(func, a.feature_processors, collection)
end

--- Pooled rows of the features of a KeyedJaggedTensor, whose weights the processors make, as a KeyedTensor [batch,
--- columns].
function FeatureProcessedEmbeddingBagCollection:forward(features)
  return self._embedding_bag_collection(self:process(features))
end

--- A batch with the weights that the processors make, checked.
function FeatureProcessedEmbeddingBagCollection.process(self, features)
  if not jagged.KeyedJaggedTensor.is(features) then
    P.fail(("%s: features is %s, wanted a KeyedJaggedTensor"):format(self.class_name, errors.kind(features)))
  end
  local processed = self._feature_processors(features)
  if not jagged.KeyedJaggedTensor.is(processed) or not processed:weights_or_none() then
    P.fail(("%s: %s returned %s, wanted a KeyedJaggedTensor with weights"):format(self.class_name,
      self._feature_processors.class_name, errors.kind(processed)))
  end
  return processed
end

--- The tables' configurations.
function FeatureProcessedEmbeddingBagCollection:embedding_bag_configs()
  return self._embedding_bag_collection:embedding_bag_configs()
end
--- Names of the output's parts and their columns, in order.
function FeatureProcessedEmbeddingBagCollection:embedding_names()
  return self._embedding_bag_collection:embedding_names()
end
function FeatureProcessedEmbeddingBagCollection:embedding_dims()
  return self._embedding_bag_collection:embedding_dims()
end
--- The collection behind the processors, and these.
function FeatureProcessedEmbeddingBagCollection:embedding_bag_collection() return self._embedding_bag_collection end
function FeatureProcessedEmbeddingBagCollection:feature_processors() return self._feature_processors end
--- The collection's optimizer (embed/fused.lua).
function FeatureProcessedEmbeddingBagCollection:fused_optimizer()
  return self._embedding_bag_collection:fused_optimizer()
end

return FeatureProcessedEmbeddingBagCollection
