-- losses.lua: losses as modules.
--
--   self.loss = nn.BCEWithLogitsLoss { reduction = "global_mean" }
--   return self.loss(logits, labels)
--
-- reduction: "mean" (default; over the samples of this rank), "sum", "none", or "global_mean": over the samples of all ranks. A global mean
-- has the same value on all ranks, and trains alike however the samples are shared among them: a rank may have more than others, or none.
-- It is collective. group: its ranks; default: those of the DistributedModelParallel that the loss is in, else the world.
local util = require "perilune.util"
local F = require "perilune.nn.functional"
local ranks = require "perilune.nn.ranks"
local Module = require "perilune.nn.module"

local M = {}

local reductions = { "mean", "sum", "none", "global_mean" }

--- A class of losses. `options`: its arguments beside reduction and group, all optional tensors, which become buffers; compute(self, input,
--- target, reduction): what the functions of nn.functional know.
local function define(name, options, compute)
  local class = Module:extend(name)
  local spec = { reduction = "mean", group = util.optional }
  for _, option in ipairs(options) do spec[option] = util.optional end
  function class:init(args)
    local a = util.named(name, args, spec)
    self.reduction = util.one_of(name, "reduction", a.reduction, reductions)
    self.group = a.group == nil and "default" or a.group
    for _, option in ipairs(options) do
      if a[option] then self:register_buffer(option, a[option]) end
    end
  end
  function class:forward(input, target)
    if self.reduction ~= "global_mean" then return compute(self, input, target, self.reduction) end
    local group = self.group
    if group == "default" then group = nil end
    return ranks.mean_of(compute(self, input, target, "sum"), target:numel(), group)
  end
  --- The ranks that train together, unless the constructor was told others.
  function class:set_group(group)
    if self.group == "default" then self.group = group end
  end
  M[name] = class
end

--- Of logits and targets; weight scales elements, pos_weight their positive part; both broadcast.
define("BCEWithLogitsLoss", { "weight", "pos_weight" }, function(self, input, target, reduction)
  return F.binary_cross_entropy_with_logits(input, target, rawget(self, "weight"), rawget(self, "pos_weight"), reduction)
end)

--- Of probabilities and targets.
define("BCELoss", { "weight" }, function(self, input, target, reduction)
  return F.binary_cross_entropy(input, target, rawget(self, "weight"), reduction)
end)

define("MSELoss", {}, function(_, input, target, reduction) return F.mse_loss(input, target, reduction) end)

--- Of logits [B, C] and class numbers (i64 [B], from 0).
define("CrossEntropyLoss", {}, function(_, input, target, reduction) return F.cross_entropy(input, target, reduction) end)

return M
