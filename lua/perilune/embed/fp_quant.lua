-- fp_quant.lua: QuantFeatureProcessedEmbeddingBagCollection: a quantized collection behind feature processors
-- (processor.lua), for serving. Nothing of it is recorded, the processors neither.
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local util = require "perilune.util"
local nn = require "perilune.nn"
local FeatureProcessedEmbeddingBagCollection = require "perilune.embed.fp_bag"
local FeatureProcessorsCollection = require("perilune.embed.processor").FeatureProcessorsCollection
local copies = require "perilune.embed.copies"
local QuantEmbeddingBagCollection = require("perilune.embed.quant").QuantEmbeddingBagCollection

local Quant = nn.Module:extend "QuantFeatureProcessedEmbeddingBagCollection"
Quant.sharder = "QuantFeatureProcessedEmbeddingBagCollectionSharder" -- in peri.shard

local arguments = {
  embedding_bag_collection = util.required, -- a QuantEmbeddingBagCollection that is_weighted
  feature_processors = util.required,       -- a FeatureProcessorsCollection
}

function Quant:init(args)
  local func = self.class_name
  local a = util.named(func, args, arguments)
  if not QuantEmbeddingBagCollection.is(a.embedding_bag_collection) then
    P.fail(("%s: embedding_bag_collection is %s, wanted a QuantEmbeddingBagCollection"):format(func,
      errors.kind(a.embedding_bag_collection)))
  end
  if not a.embedding_bag_collection:is_weighted() then
    P.fail(func .. ": embedding_bag_collection is not weighted, so it could not use the weights of processors; make "
      .. "it with is_weighted")
  end
  if not FeatureProcessorsCollection.is(a.feature_processors) then
    P.fail(("%s: feature_processors is %s, wanted a FeatureProcessorsCollection"):format(func,
      errors.kind(a.feature_processors)))
  end
  self._embedding_bag_collection, self._feature_processors = a.embedding_bag_collection, a.feature_processors
  self.device, self.output_dtype = a.embedding_bag_collection.device, a.embedding_bag_collection.output_dtype
end

--- A batch with the weights that the processors make.
function Quant:process(features) return P.no_grad(FeatureProcessedEmbeddingBagCollection.process, self, features) end

--- Pooled rows of the features of a KeyedJaggedTensor, whose weights the processors make, as a KeyedTensor [batch,
--- columns].
function Quant:forward(features) return self._embedding_bag_collection(self:process(features)) end

--- The tables' configurations.
function Quant:embedding_bag_configs() return self._embedding_bag_collection:embedding_bag_configs() end
--- Names of the output's parts and their columns, in order.
function Quant:embedding_names() return self._embedding_bag_collection:embedding_names() end
function Quant:embedding_dims() return self._embedding_bag_collection:embedding_dims() end
--- The collection behind the processors, and these.
function Quant:embedding_bag_collection() return self._embedding_bag_collection end
function Quant:feature_processors() return self._feature_processors end

--- See QuantEmbeddingBagCollection.
function Quant:table_rows(name, which, row, n)
  return self._embedding_bag_collection:table_rows(name, which, row, n)
end

--- The quantized collection of a trained one, which stays as it is, with processors of its own. args: those of
--- QuantEmbeddingBagCollection.from_float.
function Quant.from_float(module, args)
  if not FeatureProcessedEmbeddingBagCollection.is(module) then
    P.fail(("%s.from_float: module is %s, wanted a FeatureProcessedEmbeddingBagCollection"):format(Quant.class_name,
      errors.kind(module)))
  end
  local collection = QuantEmbeddingBagCollection.from_float(module:embedding_bag_collection(), args)
  local device = collection.device ~= "meta" and collection.device or nil
  return Quant { embedding_bag_collection = collection,
    feature_processors = copies.copy_to_device(module:feature_processors(), device) }
end

--- One with the same numbers on another device (nil: the same one), which shares nothing with this one.
function Quant:copy(device)
  return Quant { embedding_bag_collection = self._embedding_bag_collection:copy(device),
    feature_processors = copies.copy_to_device(self._feature_processors, device) }
end

return { QuantFeatureProcessedEmbeddingBagCollection = Quant }
