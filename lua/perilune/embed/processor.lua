-- processor.lua: feature processors: modules in front of a lookup that give each id of a batch its weight, with
-- gradient.
--
--   local processors = embed.PositionWeightedModuleCollection { max_feature_lengths = { clicked = 20, bought = 5 } }
--   local fp = embed.FeatureProcessedEmbeddingBagCollection { embedding_bag_collection = ebc,
--     feature_processors = processors }
--
-- One of your own is a class made with :extend and a forward method. A FeatureProcessor is for one feature: it gets a
-- JaggedTensor and returns one with a weight (f32) for each of its ids. A FeatureProcessorsCollection is for a batch:
-- it gets a KeyedJaggedTensor and gives one of the same keys and ids with weights. jt:with_weights(w) and
-- kjt:with_weights(w) make these. Their parameters are trained like any others; on several ranks they are replicas, so
-- what forward does must not depend on the rank, but for the batch.
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local jagged = require "perilune.jagged"
local nn = require "perilune.nn"
local sparse = require "perilune.sparse"

local JaggedTensor, KeyedJaggedTensor = jagged.JaggedTensor, jagged.KeyedJaggedTensor
local M = {}

--- Weights of the ids of one feature: forward(JaggedTensor) -> JaggedTensor with weights.
local FeatureProcessor = nn.Module:extend "FeatureProcessor"
M.FeatureProcessor = FeatureProcessor

--- Weights of the ids of a batch: forward(KeyedJaggedTensor) -> KeyedJaggedTensor with weights.
local FeatureProcessorsCollection = nn.Module:extend "FeatureProcessorsCollection"
M.FeatureProcessorsCollection = FeatureProcessorsCollection
-- TorchRec's name where the features are those of a group of tables
M.BaseGroupedFeatureProcessor = FeatureProcessorsCollection

--- Names of the features that it has something for, sorted; nil: whatever comes.
function FeatureProcessorsCollection:feature_names() end -- luacheck: ignore 212

local function check_kind(self, features, class, name)
  if not class.is(features) then
    P.fail(("%s: features is %s, wanted a %s"):format(self.class_name, errors.kind(features), name))
  end
end

--- Every feature that a collection has something for is in the batch.
local function check_keys(self, names, keys)
  local known = util.index_of(keys)
  for _, name in ipairs(names) do
    if not known[name] then
      P.fail(("%s: the batch has no feature '%s'; those are: %s"):format(self.class_name, name,
        table.concat(keys, ", ")))
    end
  end
end

-- -- one for each feature ---------------------------------------------------------------------------------------------

--- FeatureProcessorDictWrapper { feature_processors = { name = FeatureProcessor, ... } }: ids of other features weigh
--- 1.
local FeatureProcessorDictWrapper = FeatureProcessorsCollection:extend "FeatureProcessorDictWrapper"
M.FeatureProcessorDictWrapper = FeatureProcessorDictWrapper

function FeatureProcessorDictWrapper:init(args)
  local a = util.named(self.class_name, args, { feature_processors = util.required.table })
  self._features = util.keys(a.feature_processors)
  if not self._features or #self._features == 0 then
    P.fail(("%s: feature_processors is no map from names of features to FeatureProcessors"):format(self.class_name))
  end
  for _, name in ipairs(self._features) do
    local processor = a.feature_processors[name]
    if type(name) ~= "string" or not FeatureProcessor.is(processor) then
      P.fail(("%s: feature_processors['%s'] is %s, wanted a FeatureProcessor for the name of a feature"):format(
        self.class_name, tostring(name), errors.kind(processor)))
    end
    self:add_module(name, processor)
  end
end

function FeatureProcessorDictWrapper:feature_names() return self._features end

--- The weights of feature `key`, one for each of `n` ids.
local function processed(self, key, features, n)
  local processor = rawget(self, key)
  local result = processor(features)
  local weights = JaggedTensor.is(result) and result:weights_or_none()
  if not weights or weights:dtype() ~= "f32" or weights:dim() ~= 1 or weights:size(1) ~= n then
    P.fail(("%s: %s of feature '%s' returned %s, wanted a JaggedTensor with a weight (f32) for each of the %d "
      .. "ids"):format(self.class_name, processor.class_name, key, weights and "weights " .. tostring(weights)
      or errors.kind(result), n))
  end
  return weights
end

function FeatureProcessorDictWrapper:forward(features)
  check_kind(self, features, KeyedJaggedTensor, "KeyedJaggedTensor")
  local keys, counts, weights = features:keys(), features:length_per_key(), {}
  check_keys(self, self._features, keys)
  local own = util.index_of(self._features)
  for i, key in ipairs(keys) do
    if own[key] then weights[i] = processed(self, key, features:get(key), counts[i])
    else weights[i] = Tensor.ones({ counts[i] }, "f32", features:device()) end
  end
  return features:with_weights(#keys > 0 and nn.functional.cat(weights, 1)
    or Tensor.ones({ 0 }, "f32", features:device()))
end

-- -- weights by position ----------------------------------------------------------------------------------------------

--- An error if a bag is longer than its feature's limit (false: there is none). strides: bags of each feature.
local function check_lengths(func, lengths, names, limits, strides)
  local list, at = lengths:read(), 0
  for i, limit in ipairs(limits) do
    for b = 0, strides[i] - 1 do
      local length = tonumber(list[at + b])
      if limit and length > limit then
        P.fail(("%s: sample %d of %s has %d ids, allowed: 0..%d (the feature's max_feature_length)"):format(func, b,
          names[i], length, limit))
      end
    end
    at = at + strides[i]
  end
end

--- An error if the place of an id, as its weight has it, is none of its feature's. counts: ids of each feature.
local function check_places(func, places, names, limits, counts)
  local list, at = places:read(), 0
  for i, limit in ipairs(limits) do
    for k = 0, counts[i] - 1 do
      local place = tonumber(list[at + k])
      if not (place >= 0 and place < limit and place == math.floor(place)) then
        P.fail(("%s: the weight of id %d of %s, its place, is %s, allowed: whole numbers 0..%d"):format(func, k,
          names[i], P.numeral(place), limit - 1))
      end
    end
    at = at + counts[i]
  end
end

--- A parameter of ones for each place of a bag.
local function new_weights(func, name, length, device)
  util.integer(func, name, length, 1, 2 ^ 31 - 1)
  return nn.parameter.ones({ length }, "f32", device)
end

--- PositionWeightedModule { max_feature_length =, device = }: the weight of the i-th id of a bag is the parameter
--- position_weight[i], 1 at first. A bag longer than max_feature_length is an error.
local PositionWeightedModule = FeatureProcessor:extend "PositionWeightedModule"
M.PositionWeightedModule = PositionWeightedModule

local one_arguments = { max_feature_length = util.required.number, device = util.optional }
function PositionWeightedModule:init(args)
  local a = util.named(self.class_name, args, one_arguments)
  self.max_feature_length = a.max_feature_length
  self.position_weight = new_weights(self.class_name, "max_feature_length", a.max_feature_length, a.device)
end
function PositionWeightedModule:extra_text() return ("max_feature_length=%d"):format(self.max_feature_length) end

local function refuse_weights(self, weights)
  if weights then
    P.fail(self.class_name .. ": the batch has weights already, which places would replace; leave them out of the "
      .. "batch")
  end
end

function PositionWeightedModule:forward(features)
  check_kind(self, features, JaggedTensor, "JaggedTensor")
  refuse_weights(self, features:weights_or_none())
  local lengths = features:lengths()
  if features:longest() > self.max_feature_length then
    check_lengths(self.class_name, lengths, { "the batch" }, { self.max_feature_length }, { lengths:numel() })
  end
  return features:with_weights(sparse.index_select_dim0(self.position_weight, sparse.lengths_range(lengths)))
end

--- PositionWeightedModuleCollection { max_feature_lengths = { name = ids of the longest bag, ... }, device = }: the
--- same for several features; ids of others weigh 1.
local PositionWeightedModuleCollection = FeatureProcessorsCollection:extend "PositionWeightedModuleCollection"
M.PositionWeightedModuleCollection = PositionWeightedModuleCollection

local arguments = { max_feature_lengths = util.required.table, device = util.optional }
function PositionWeightedModuleCollection:init(args)
  local func = self.class_name
  local a = util.named(func, args, arguments)
  self._features = util.keys(a.max_feature_lengths)
  if not self._features or #self._features == 0 or type(self._features[1]) ~= "string" then
    P.fail(func .. ": max_feature_lengths is no map from names of features to lengths")
  end
  self.max_feature_lengths, self._shortest = setmetatable(util.copy(a.max_feature_lengths), {}), math.huge
  for _, name in ipairs(self._features) do
    local length = a.max_feature_lengths[name]
    self:register_parameter("position_weights." .. name,
      new_weights(func, ("max_feature_lengths['%s']"):format(tostring(name)), length, a.device))
    self._shortest = math.min(self._shortest, length)
  end
end

function PositionWeightedModuleCollection:feature_names() return self._features end
function PositionWeightedModuleCollection:extra_text()
  return table.concat(util.map(self._features,
    function(name) return ("%s=%d"):format(name, self.max_feature_lengths[name]) end), ", ")
end

--- The places of ids in their bags; nil: to be counted.
function PositionWeightedModuleCollection:_places(features) refuse_weights(self, features:weights_or_none()) end

function PositionWeightedModuleCollection:forward(features)
  check_kind(self, features, KeyedJaggedTensor, "KeyedJaggedTensor")
  local given, keys, counts = self:_places(features), features:keys(), features:length_per_key()
  check_keys(self, self._features, keys)
  local lengths, longest = features:lengths(), features:longest()
  local parts, rows, columns, limits, names = {}, {}, {}, {}, {}
  for i, key in ipairs(keys) do
    local limit = self.max_feature_lengths[key]
    limits[i], names[i] = limit or false, ("feature '%s'"):format(key)
    rows[i], columns[i] = limit or math.max(longest, 1), 1
    parts[i] = limit and rawget(self, "position_weights." .. key) or Tensor.ones({ rows[i] }, "f32", features:device())
  end
  if given then check_places(self.class_name, given, names, limits, counts)
  elseif longest > self._shortest then check_lengths(self.class_name, lengths, names, limits,
    features:stride_per_key()) end
  local places = given and given:to "i64" or sparse.lengths_range(lengths)
  return features:with_weights(sparse.batch_index_select_dim0(nn.functional.cat(parts, 1), places, counts, rows,
    columns))
end

--- PositionWeightedProcessor: the same under TorchRec's older name.
M.PositionWeightedProcessor = PositionWeightedModuleCollection:extend "PositionWeightedProcessor"

--- GroupedPositionWeightedModule: a batch that has weights already says by them at which place of its bag each id was
--- before the bag was cut (what bucketize_pos of sparse.block_bucketize_sparse_features gives); else places are
--- counted. Every feature of the batch needs a length.
local GroupedPositionWeightedModule = PositionWeightedModuleCollection:extend "GroupedPositionWeightedModule"
M.GroupedPositionWeightedModule = GroupedPositionWeightedModule

function GroupedPositionWeightedModule:_places(features)
  for _, key in ipairs(features:keys()) do
    if not self.max_feature_lengths[key] then
      P.fail(("%s: feature '%s' of the batch has no entry in max_feature_lengths; those are: %s"):format(
        self.class_name, key, table.concat(self._features, ", ")))
    end
  end
  return features:weights_or_none()
end

return M
