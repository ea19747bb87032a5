-- plan/dense.lua: milliseconds of the dense part of a training step, by the prices of a device that was measured
-- (Topology.dense, which `perilune calibrate --device` finds: calibration/dense.lua).
--
-- A dense part is described by its matrices of weights ({ out, in } each), for nearly all of its time goes with these.
-- Of each matrix and B samples are counted:
--   product     1: what a product costs whatever its size (launches)
--   flop        operations: 2 B out in forward, twice that backward
--   out_byte    bytes of what it gives: B out numbers of 4 bytes. Bias, activation, products of columns and their
--               gradients read and write as many. Cross layers (matrices marked `as_features`) compute in the dtype of
--               the features: 2 bytes a number where these come as bf16 under autocast
--   weight_byte bytes of its weights: what the optimizer reads and writes
-- { 512, 256 } with B = 1000: 1 product, 262,144,000 operations forward, 2,048,000 bytes given, 524,288 bytes of
-- weights.
local util = require "perilune.util"
local signature = require "perilune.signature"
require "perilune.plan.kinds"
local topologies = require "perilune.plan.topology"

local M = {}

M.units, M.ways = topologies.dense_units, topologies.dense_ways

local NUMBER = 4 -- bytes

--- Whether everything that is looked up comes as bf16. Under autocast with bf16, cross layers then compute and give
--- bf16 too; where one collection's rows come otherwise, the concatenation of features is f32, and so are cross layers.
local function features_are_bf16(model)
  for _, collection in ipairs(model) do
    if collection.output_dtype ~= "BF16" then return false end
  end
  return true
end

--- What is counted of matrices ({ { out, in }, ... }) with so many samples: { forward = unit -> amount, backward =,
--- optimizer = }. narrow: the features are of 16 bits, so what matrices marked `as_features` give is, too.
function M._amounts(matrices, batch_size, narrow)
  local amounts = {}
  for _, way in ipairs(M.ways) do amounts[way] = { product = 0, flop = 0, out_byte = 0, weight_byte = 0 } end
  for _, matrix in ipairs(matrices) do
    local out, inner = matrix[1], matrix[2]
    local number = narrow and matrix.as_features and NUMBER / 2 or NUMBER
    for _, way in ipairs { "forward", "backward" } do
      local a = amounts[way]
      a.product = a.product + 1
      a.flop = a.flop + (way == "forward" and 2 or 4) * batch_size * out * inner
      a.out_byte = a.out_byte + batch_size * out * number
      a.weight_byte = a.weight_byte + out * inner * NUMBER
    end
    amounts.optimizer.product = amounts.optimizer.product + 1
    amounts.optimizer.weight_byte = amounts.optimizer.weight_byte + out * inner * NUMBER
  end
  return amounts
end

--- Milliseconds of the dense part of a step of `model` (plan.describe) with so many samples on a rank's device: {
--- forward =, backward =, optimizer =, ms = (all of it) }. precision: "highest" (f32), "high" (TF32) or "bf16"
--- (autocast); the first that the topology has, if none is said. Nothing where the topology has no such prices, or the
--- model does not say its matrices.
function M.predict(model, topology, batch_size, precision)
  local prices = topology.dense
  if not prices or not model.matrices then return nil end
  precision = precision or util.keys(prices)[1]
  if not prices[precision] then util.one_of("plan.dense.predict", "precision", precision, util.keys(prices)) end
  local narrow = precision == "bf16" and features_are_bf16(model)
  local out, amounts = { ms = 0 }, M._amounts(model.matrices, batch_size, narrow)
  for _, way in ipairs(M.ways) do
    out[way] = 0
    for _, unit in ipairs(M.units) do out[way] = out[way] + amounts[way][unit] * prices[precision][way][unit] end
    out.ms = out.ms + out[way]
  end
  return out
end

M.precisions = topologies.precisions
signature.check("plan.dense.", M, { _amounts = "matrices: matrices_sizes, batch_size: number, narrow: boolean?",
  predict = "model: model, topology: Topology, batch_size: count, precision: string?" })

return M
