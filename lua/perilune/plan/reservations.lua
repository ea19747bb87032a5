-- plan/reservations.lua: memory that plans leave to others: the dense part, ids on their way, a margin (TorchRec's
-- storage reservations).
--
-- reserve(topology, model, batch_size, constraints) returns a topology with what is left. model: see enumerators.lua;
-- its dense_bytes and buffer_bytes are the sizes of parameters and of buffers outside of its collections.
local P = require "perilune.ffi"
local util = require "perilune.util"
local constraints_of = require "perilune.plan.constraints"
local kinds = require "perilune.plan.kinds"
local signature = require "perilune.signature"
local topologies = require "perilune.plan.topology"

local M = {}

local ID_BYTES = 8
local TRAINED = 6   -- a parameter, its optimizer's state, buckets and gradients of the exchange
local IDS = 20      -- copies of a batch's ids that a training pipeline holds

local function share(func, value)
  if type(value) == "number" and value >= 0 and value <= 1 then return value end
  P.fail(("%s: percentage is %s, allowed: 0..1"):format(func, tostring(value)))
end

local function tiers_of(func, tiers)
  signature.value(func, "tiers", tiers, "strings")
  for _, tier in ipairs(tiers) do util.one_of(func, "one of tiers", tier, topologies.tiers) end
  return tiers
end

--- Bytes of one rank's ids of a batch.
function M.batch_bytes(model, batch_size, constraints)
  local ids = 0
  for _, collection in ipairs(model) do
    for _, config in ipairs(collection.tables) do
      local c = constraints_of.for_table(constraints, collection.path, config.name)
      local lengths = constraints_of.per_feature(c, "pooling_factors", config.name, #config.feature_names, 1)
      local batches = constraints_of.per_feature(c, "batch_sizes", config.name, #config.feature_names, batch_size)
      for i, length in ipairs(lengths) do ids = ids + length * batches[i] end
    end
  end
  return math.ceil(ids * ID_BYTES)
end

--- Takes a share of the devices' own memory; of the host's too where `tiers` names it: { "hbm", "ddr" }.
local FixedPercentageStorageReservation = util.seal(util.class "FixedPercentageStorageReservation")
M.FixedPercentageStorageReservation = FixedPercentageStorageReservation
function FixedPercentageStorageReservation:init(args)
  local a = util.named(self.class_name, args, { percentage = 0.15, tiers = { "hbm" } })
  self.percentage, self.tiers = share(self.class_name, a.percentage), tiers_of(self.class_name, a.tiers)
end
function FixedPercentageStorageReservation:reserve(topology)
  return topology:with_devices(function(device)
    for _, tier in ipairs(self.tiers) do device[tier] = math.floor((1 - self.percentage) * device[tier]) end
  end)
end

--- Takes so many bytes of the devices' own memory.
local FixedAbsoluteStorageReservation = util.seal(util.class "FixedAbsoluteStorageReservation")
M.FixedAbsoluteStorageReservation = FixedAbsoluteStorageReservation
function FixedAbsoluteStorageReservation:init(args)
  local a = util.named(self.class_name, args, { bytes = util.whole(util.required, 0) })
  self.bytes = a.bytes
end
function FixedAbsoluteStorageReservation:reserve(topology)
  local tier = topology:own_tier()
  return topology:with_devices(function(device) device[tier] = math.max(0, device[tier] - self.bytes) end)
end

--- Takes a share, and what the dense part and the ids of batches are estimated to need.
local HeuristicalStorageReservation = util.seal(util.class "HeuristicalStorageReservation")
M.HeuristicalStorageReservation = HeuristicalStorageReservation
--- HeuristicalStorageReservation { percentage = 0.15, parameter_multiplier = 6, dense_tensor_estimate = nil or bytes,
--- tiers = { "hbm" } }
function HeuristicalStorageReservation:init(args)
  local a = util.named(self.class_name, args, { percentage = 0.15, parameter_multiplier = TRAINED,
    dense_tensor_estimate = util.optional.number, tiers = { "hbm" } })
  share(self.class_name, a.percentage)
  tiers_of(self.class_name, a.tiers)
  for name, value in util.ordered(a) do self[name] = value end
  self.id_multiplier = IDS
end

function HeuristicalStorageReservation:reserve(topology, model, batch_size, constraints)
  local tier = topology:own_tier()
  local dense = self.dense_tensor_estimate or self.parameter_multiplier * (model.dense_bytes or 0)
    + (model.buffer_bytes or 0)
  local ids = M.batch_bytes(model, batch_size, constraints) * self.id_multiplier
  local margin = FixedPercentageStorageReservation { percentage = self.percentage, tiers = self.tiers }
  return margin:reserve(topology):with_devices(function(device)
    local left = device[tier] - dense - ids
    if left < 0 then
      P.fail(("%s: rank %d has %d bytes (%s) after the margin of %g, and the dense part needs %d, batches %d; "
        .. "allowed: no less than 0")
        :format(self.class_name, device.rank, device[tier], tier, self.percentage, dense, ids))
    end
    device[tier] = left
  end)
end

--- The same for models that are not trained: one copy of everything.
local InferenceStorageReservation = util.class("InferenceStorageReservation", HeuristicalStorageReservation)
M.InferenceStorageReservation = InferenceStorageReservation
function InferenceStorageReservation:init(args)
  HeuristicalStorageReservation.init(self, args)
  self.parameter_multiplier, self.id_multiplier = 1, 1
end

local of_topology = { reserve = "topology: Topology, and more" }
kinds.methods(FixedPercentageStorageReservation, of_topology)
kinds.methods(FixedAbsoluteStorageReservation, of_topology)
kinds.methods(HeuristicalStorageReservation,
  { reserve = "topology: Topology, model: model, batch_size: count, constraints: constraints?" })
signature.check("plan.reservations.", M, { batch_bytes = "model: model, batch_size: count, constraints: constraints?" })

return M
