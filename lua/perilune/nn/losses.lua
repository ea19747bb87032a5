-- losses.lua: losses as modules. reduction: "mean" (default), "sum" or "none".
local util = require "perilune.util"
local F = require "perilune.nn.functional"
local Module = require "perilune.nn.module"

local M = {}

local reductions = { "mean", "sum", "none" }

--- Of logits and targets; weight scales elements, pos_weight their positive part; both broadcast.
local BCEWithLogitsLoss = Module:extend "BCEWithLogitsLoss"
M.BCEWithLogitsLoss = BCEWithLogitsLoss
function BCEWithLogitsLoss:init(args)
  local a = util.named("BCEWithLogitsLoss", args, { weight = util.optional, reduction = "mean", pos_weight = util.optional })
  self.reduction = util.one_of("BCEWithLogitsLoss", "reduction", a.reduction, reductions)
  if a.weight then self:register_buffer("weight", a.weight) end
  if a.pos_weight then self:register_buffer("pos_weight", a.pos_weight) end
end
function BCEWithLogitsLoss:forward(input, target)
  return F.binary_cross_entropy_with_logits(input, target, rawget(self, "weight"), rawget(self, "pos_weight"), self.reduction)
end

--- Of probabilities and targets.
local BCELoss = Module:extend "BCELoss"
M.BCELoss = BCELoss
function BCELoss:init(args)
  local a = util.named("BCELoss", args, { weight = util.optional, reduction = "mean" })
  self.reduction = util.one_of("BCELoss", "reduction", a.reduction, reductions)
  if a.weight then self:register_buffer("weight", a.weight) end
end
function BCELoss:forward(input, target) return F.binary_cross_entropy(input, target, rawget(self, "weight"), self.reduction) end

local MSELoss = Module:extend "MSELoss"
M.MSELoss = MSELoss
function MSELoss:init(args)
  self.reduction = util.one_of("MSELoss", "reduction", util.named("MSELoss", args, { reduction = "mean" }).reduction, reductions)
end
function MSELoss:forward(input, target) return F.mse_loss(input, target, self.reduction) end

--- Of logits [B, C] and class numbers (i64 [B], from 0).
local CrossEntropyLoss = Module:extend "CrossEntropyLoss"
M.CrossEntropyLoss = CrossEntropyLoss
function CrossEntropyLoss:init(args)
  self.reduction = util.one_of("CrossEntropyLoss", "reduction", util.named("CrossEntropyLoss", args, { reduction = "mean" }).reduction,
    reductions)
end
function CrossEntropyLoss:forward(input, target) return F.cross_entropy(input, target, self.reduction) end

return M
