-- losses.lua: losses as modules.
--
--   self.loss = nn.BCEWithLogitsLoss { reduction = "global_mean" }
--   return self.loss(logits, labels)
--
-- reduction: "mean" (default; over the samples of this rank), "sum", "none", or "global_mean": over the samples of all
-- ranks. A global mean has the same value on all ranks, and trains alike however the samples are shared among them: a
-- rank may have more than others, or none. It is collective. group: its ranks; default: those of the
-- DistributedModelParallel that the loss is in, else the world.
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local util = require "perilune.util"
local F = require "perilune.nn.functional"
local ranks = require "perilune.nn.ranks"
local signature = require "perilune.signature"
local Tensor = require "perilune.tensor"
local Module = require "perilune.nn.module"

local M = {}

local reductions = { "mean", "sum", "none", "global_mean" }

--- The class above all losses.
local Loss = Module:extend "Loss"
M.Loss = Loss

function Loss:forward(input, target, third)
  if third ~= nil and self._many ~= "three" then
    P.fail(("%s: a third argument, %s; it takes an input and its target, and `weight`, where it has one, when it is "
      .. "made"):format(self.class_name, errors.kind(third)))
  end
  if self.reduction ~= "global_mean" then return self:_compute(self.reduction, input, target, third) end
  local group = self.group
  if group == "default" then group = nil end
  if not self._many then return ranks.mean_of(self:_compute("sum", input, target), self:_count(target), group) end
  local losses = self:_compute("none", input, target, third)
  return ranks.mean_of(F.sum(losses), losses:numel(), group)
end

--- How many losses of this rank a global mean is of.
function Loss:_count(target) return target:numel() end -- luacheck: ignore 212

--- The ranks that train together, unless the constructor was told others.
function Loss:set_group(group)
  ranks._check_group(self.class_name .. ":set_group", group)
  if self.group == "default" then self.group = group end
end

--- The weights of a loss, if they can be such: a tensor of finite numbers from 0 on. Waits for them.
local function checked_weights(name, option, weights)
  signature.value(name, option, weights, "tensor")
  local good = F.logical_and(F.ge(weights, 0), F.lt(weights, math.huge))
  if F.sum(good):item() == weights:numel() then return weights end
  P.fail(("%s: %s is %s with numbers that are negative, infinite or NaN, allowed: finite numbers >= 0"):format(name,
    option, Tensor._text(weights)))
end

--- A class of losses. `options`: its arguments beside reduction and group, all optional tensors, which become buffers;
--- `numbers`: those that are no tensors, with their defaults, which become fields. compute(self, reduction, ...): what
--- the functions of nn.functional know, of what the loss is called with: an input and a target for each loss, or
--- (many) "two" or "three" tensors of which there may be more or less losses.
local function define(name, options, compute, numbers, many)
  local class = Loss:extend(name)
  local spec = { reduction = "mean", group = util.optional }
  for _, option in ipairs(options) do spec[option] = util.optional end
  for option, default in util.ordered(numbers or {}) do spec[option] = default end
  function class:init(args)
    local a = util.named(name, args, spec)
    self.reduction = util.one_of(name, "reduction", a.reduction, reductions)
    ranks._check_group(name, a.group)
    self.group = a.group == nil and "default" or a.group
    for option in util.ordered(numbers or {}) do self[option] = a[option] end
    for _, option in ipairs(options) do
      if a[option] ~= nil then self:register_buffer(option, checked_weights(name, option, a[option])) end
    end
  end
  class._compute, class._many = compute, many or false
  M[name] = class
end

--- Of logits and targets; weight scales elements, pos_weight their positive part; both broadcast.
define("BCEWithLogitsLoss", { "weight", "pos_weight" }, function(self, reduction, input, target)
  return F.binary_cross_entropy_with_logits(input, target, rawget(self, "weight"), rawget(self, "pos_weight"),
    reduction)
end)

--- Of probabilities and targets.
define("BCELoss", { "weight" }, function(self, reduction, input, target)
  return F.binary_cross_entropy(input, target, rawget(self, "weight"), reduction)
end)

define("MSELoss", {}, function(_, reduction, input, target) return F.mse_loss(input, target, reduction) end)

define("L1Loss", {}, function(_, reduction, input, target) return F.l1_loss(input, target, reduction) end)
define("HuberLoss", {}, function(self, reduction, input, target)
  return F.huber_loss(input, target, self.delta, reduction)
end, { delta = util.over(1, 0) })
define("SmoothL1Loss", {}, function(self, reduction, input, target)
  return F.smooth_l1_loss(input, target, self.beta, reduction)
end, { beta = util.from(1, 0) })

--- Of logarithms of probabilities [B, C] and class numbers (i64 [B], from 0).
define("NLLLoss", {}, function(_, reduction, input, target) return F.nll_loss(input, target, reduction) end)

--- Of logits [B, C] and class numbers (i64 [B], from 0). weight: [C], the factor of each class's
--- losses. A global mean waits for the labels where some are left out or weighted.
define("CrossEntropyLoss", { "weight" }, function(self, reduction, input, target)
  return F.cross_entropy(input, target, reduction, rawget(self, "ignore_index"),
    self.label_smoothing ~= 0 and self.label_smoothing or nil, rawget(self, "weight"))
end, { ignore_index = util.whole(nil), label_smoothing = util.from(0, 0, 1) })
function M.CrossEntropyLoss:_count(target)
  local left_out, weight = rawget(self, "ignore_index"), rawget(self, "weight")
  if not (left_out or weight) then return target:numel() end
  local counts = left_out and F.ne(target, left_out)
  if not weight then return (tonumber(F.sum(counts):item())) end
  local of_rows = F.index_select(weight, 1, counts and F.where(counts, target, 0) or target)
  return (F.sum(counts and F.mul(of_rows, counts) or of_rows):item())
end

--- Called with the scores of items that were taken and of others (functional.bpr_loss).
define("BPRLoss", {}, function(_, reduction, positive, negative) return F.bpr_loss(positive, negative, reduction) end,
  nil, "two")

--- Of logits and targets 0 or 1.
define("FocalLoss", {}, function(self, reduction, input, target)
  return F.sigmoid_focal_loss(input, target, self.alpha, self.gamma, reduction)
end, { alpha = util.from(0.25, -1, 1), gamma = util.from(2, 0) })

--- Called with two scores and a target: 1 where the first should be larger, -1 where the second should.
define("MarginRankingLoss", {}, function(self, reduction, a, b, target)
  return F.margin_ranking_loss(a, b, target, self.margin, reduction)
end, { margin = util.finite(0) }, "three")

define("HingeEmbeddingLoss", {}, function(self, reduction, input, target)
  return F.hinge_embedding_loss(input, target, self.margin, reduction)
end, { margin = util.finite(1) })

--- Called with two lists of rows and a target for each: 1 (alike) or -1.
define("CosineEmbeddingLoss", {}, function(self, reduction, a, b, target)
  return F.cosine_embedding_loss(a, b, target, self.margin, reduction)
end, { margin = util.finite(0) }, "three")

--- Called with rows, rows that should be near them, and rows that should not.
define("TripletMarginLoss", {}, function(self, reduction, anchor, positive, negative)
  return F.triplet_margin_loss(anchor, positive, negative, self.margin, self.p, self.eps, reduction)
end, { margin = util.over(1, 0), p = util.from(2, 0), eps = util.from(1e-6, 0) }, "three")

--- Of logarithms of probabilities and probabilities (log_target: their logarithms, too).
define("KLDivLoss", {}, function(self, reduction, input, target)
  return F.kl_div(input, target, self.log_target, reduction)
end,
  { log_target = false })

--- Of the logarithms of means (log_input false: of means) and counts.
define("PoissonNLLLoss", {}, function(self, reduction, input, target)
  return F.poisson_nll_loss(input, target, self.log_input, self.full, self.eps, reduction)
end, { log_input = true, full = false, eps = util.from(1e-8, 0) })

--- Called with means, targets and variances.
define("GaussianNLLLoss", {}, function(self, reduction, input, target, var)
  return F.gaussian_nll_loss(input, target, var, self.full, self.eps, reduction)
end, { full = false, eps = util.over(1e-6, 0) }, "three")

--- Called with queries, items and (optional) { log_q =, ids = }: functional.in_batch_softmax_loss. Negatives are those
--- of this rank.
define("InBatchSoftmaxLoss", {}, function(self, reduction, queries, items, more)
  local a = util.named("InBatchSoftmaxLoss", more or {}, { log_q = util.optional, ids = util.optional })
  local o = { temperature = self.temperature, reduction = reduction, log_q = a.log_q, ids = a.ids }
  return F.in_batch_softmax_loss(queries, items, o)
end, { temperature = util.over(1, 0) }, "three")

return M
