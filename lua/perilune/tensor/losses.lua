-- losses.lua: losses that are made of other functions: members of nn.functional. reduction, where there is one: "mean"
-- (default), "sum" or "none". Those that PyTorch (or torchvision) has are called and computed as there.
local P = require "perilune.ffi"
local Tensor = require "perilune.tensor.core"
local F = require "perilune.tensor.ops"
local util = require "perilune.util"
local signature = require "perilune.signature"

local alike = Tensor._alike

local function reduce(func, losses, reduction)
  if reduction == nil or reduction == "mean" then return (F.mean(losses)) end
  if reduction == "sum" then return (F.sum(losses)) end
  if reduction == "none" then return losses end
  P.fail(("%s: reduction '%s', allowed: none, mean, sum"):format(func, tostring(reduction)))
end

--- Bayesian personalised ranking: -log sigmoid(positive - negative), of the scores of an item that was taken and one
--- that was not; they broadcast: positive [B, 1] with negative [B, n].
function F.bpr_loss(positive, negative, reduction)
  return reduce("bpr_loss", F.neg(F.logsigmoid(F.sub(positive, negative))), reduction)
end

--- The focal loss of logits and targets 0 or 1: binary cross entropy times alpha (of targets 1; 1 - alpha of others;
--- negative: no such factor) and (1 - p)^gamma, p being the probability of the target.
function F.sigmoid_focal_loss(t, target, alpha, gamma, reduction)
  alpha, gamma = alpha or 0.25, gamma or 2
  local p = F.sigmoid(t)
  local loss = F.binary_cross_entropy_with_logits(t, target, nil, nil, "none")
  local other = F.affine(target, -1, 1)
  local miss = F.add(F.mul(p, other), F.mul(F.affine(p, -1, 1), target)) -- 1 - the target's probability
  loss = F.mul(loss, F.pow(miss, gamma))
  if alpha >= 0 then loss = F.mul(loss, F.affine(target, 2 * alpha - 1, 1 - alpha)) end
  return reduce("sigmoid_focal_loss", loss, reduction)
end

--- max(0, -target (a - b) + margin): target 1 where a should be larger, -1 where b should. margin: 0.
function F.margin_ranking_loss(a, b, target, margin, reduction)
  alike("margin_ranking_loss", "a", a, "b", b)
  alike("margin_ranking_loss", "a", a, "target", target)
  return reduce("margin_ranking_loss", F.relu(F.affine(F.mul(target, F.sub(a, b)), -1, margin or 0)), reduction)
end

--- t where target is 1, max(0, margin - t) where it is -1. margin: 1.
function F.hinge_embedding_loss(t, target, margin, reduction)
  alike("hinge_embedding_loss", "t", t, "target", target)
  return reduce("hinge_embedding_loss", F.where(F.eq(target, 1), t, F.relu(F.affine(t, -1, margin or 1))), reduction)
end

--- The mean of |t - target|.
function F.l1_loss(t, target, reduction)
  alike("l1_loss", "t", t, "target", target)
  return reduce("l1_loss", F.abs(F.sub(t, target)), reduction)
end

--- Of d = |t - target|: d^2 / 2 up to delta, delta (d - delta / 2) beyond it.
local function huber(func, t, target, delta)
  alike(func, "t", t, "target", target)
  local d = F.abs(F.sub(t, target))
  local near = F.clamp(d, nil, delta)
  return (F.mul(near, F.sub(d, F.affine(near, 0.5, 0))))
end
--- Half the squared difference up to delta (1), delta times the difference minus half of delta beyond it.
function F.huber_loss(t, target, delta, reduction)
  delta = delta or 1
  if delta <= 0 or delta ~= delta then P.fail(("huber_loss: delta is %g, allowed: numbers above 0"):format(delta)) end
  return reduce("huber_loss", huber("huber_loss", t, target, delta), reduction)
end
--- huber_loss divided by beta (1), which is its delta; l1_loss for 0.
function F.smooth_l1_loss(t, target, beta, reduction)
  beta = beta or 1
  if beta < 0 or beta ~= beta then P.fail(("smooth_l1_loss: beta is %g, allowed: numbers from 0"):format(beta)) end
  if beta == 0 then return (F.l1_loss(t, target, reduction)) end
  return reduce("smooth_l1_loss", F.affine(huber("smooth_l1_loss", t, target, beta), 1 / beta, 0), reduction)
end

--- Of logarithms of probabilities [B, C] and class numbers (i64 [B], from 0): minus the one of each row's class.
function F.nll_loss(t, labels, reduction)
  if t:dim() ~= 2 or labels:dim() ~= 1 then
    P.fail(("nll_loss: %s and labels %s, wanted two dimensions and one"):format(Tensor._text(t), Tensor._text(labels)))
  end
  return reduce("nll_loss", F.neg(F.squeeze(F.gather(t, 2, F.unsqueeze(labels, 2)), 2)), reduction)
end

--- max(0, d(anchor, positive) - d(anchor, negative) + margin), d the p-norm (2) of the difference (pairwise_distance).
--- margin: 1.
function F.triplet_margin_loss(anchor, positive, negative, margin, p, eps, reduction)
  local near, far = F.pairwise_distance(anchor, positive, p, eps), F.pairwise_distance(anchor, negative, p, eps)
  return reduce("triplet_margin_loss", F.relu(F.affine(F.sub(near, far), 1, margin or 1)), reduction)
end

--- The cosine of the angle between a and b, which broadcast, along dim (-1); sizes below eps (1e-8) count as eps.
function F.cosine_similarity(a, b, dim, eps)
  dim, eps = dim or -1, eps or 1e-8
  if not Tensor._same_shape(a, b) then
    local shape = Tensor._broadcast(a, b)
    a, b = a:expand(shape), b:expand(shape)
  end
  local x, y = F.clamp(F.norm(a, 2, dim, true), eps), F.clamp(F.norm(b, 2, dim, true), eps)
  return (F.sum(F.mul(F.div(a, x), F.div(b, y)), dim))
end

local function square_of(x) return (F.affine(F.sum(F.square(x), -1), 1, 1e-12)) end
--- Of rows a and b [B, D] and target [B]: 1 - cosine where it is 1, max(0, cosine - margin) where it is -1. margin: 0.
--- Squares of sizes are 1e-12 larger here than they are, as PyTorch's: gradients of rows of zeros are not infinite.
function F.cosine_embedding_loss(a, b, target, margin, reduction)
  alike("cosine_embedding_loss", "a", a, "b", b)
  local cosine = F.div(F.sum(F.mul(a, b), -1), F.sqrt(F.mul(square_of(a), square_of(b))))
  alike("cosine_embedding_loss", "the cosine of each row", cosine, "target", target)
  local loss = F.where(F.eq(target, 1), F.affine(cosine, -1, 1), F.relu(F.affine(cosine, 1, -(margin or 0))))
  return reduce("cosine_embedding_loss", loss, reduction)
end

--- target (log target - t): the distance of the distribution `target` from the one whose logarithms are t. log_target:
--- target is given by its logarithms. reduction also "batchmean": the sum divided by the first size, which is the
--- distance's mean.
function F.kl_div(t, target, log_target, reduction)
  alike("kl_div", "t", t, "target", target)
  local loss
  if log_target then loss = F.mul(F.exp(target), F.sub(target, t))
  else
    local known = F.masked_fill(target, F.eq(target, 0), 1) -- a target of 0 has no logarithm, and counts nothing
    loss = F.mul(target, F.sub(F.log(known), t))
  end
  if reduction == "batchmean" then
    return (F.affine(F.sum(loss), 1 / (t:dim() > 0 and t:size(1) or 1), 0))
  end
  return reduce("kl_div", loss, reduction)
end

local in_batch = { temperature = 1, log_q = util.optional, ids = util.optional, reduction = "mean" }
local none = {}
--- The options of in_batch_softmax_loss, if they are such. util.named refuses others; it is not compiled.
local function in_batch_options(o)
  local known = o.temperature == nil or type(o.temperature) == "number"
  for name in pairs(o) do known = known and in_batch[name] ~= nil end -- any order: a set
  return known and o or util.named("in_batch_softmax_loss", o, in_batch)
end
--- Sampled softmax with the batch's own items as negatives: row i of `queries` [B, D] should choose row i of `items`
--- [B, D] among all of them. options: temperature (1) divides the products; log_q [B]: the logarithm of how often each
--- item is drawn as a negative (its share of the data), which is subtracted from its logits, since frequent items are
--- drawn too often; ids (i64 [B]): items with the same id are no negatives of each other; reduction.
function F.in_batch_softmax_loss(queries, items, options)
  local o = in_batch_options(options or none)
  local temperature = o.temperature or 1
  if not (temperature > 0 and temperature < math.huge) then
    P.fail(("in_batch_softmax_loss: temperature is %s, allowed: finite numbers above 0"):format(temperature))
  end
  if queries:dim() ~= 2 or items:dim() ~= 2 or queries:size(1) ~= items:size(1) then
    P.fail(("in_batch_softmax_loss: queries %s and items %s, wanted two dimensions each and as many rows"):format(
      Tensor._text(queries), Tensor._text(items)))
  end
  local n, device = queries:size(1), queries:device()
  local logits = F.affine(F.matmul(queries, items:transpose(1, 2)), 1 / temperature, 0)
  if o.log_q then logits = F.sub(logits, o.log_q) end
  local own = Tensor.arange(0, n, 1, "i64", device)
  if o.ids then
    local same, self = F.eq(F.unsqueeze(o.ids, 2), o.ids), F.eq(F.unsqueeze(own, 2), own)
    logits = F.masked_fill(logits, F.gt(same, self), -math.huge) -- the same item, but not the row's own
  end
  return (F.cross_entropy(logits, own, o.reduction))
end

signature.check_one("", F, {
  bpr_loss = "positive: tensor, negative: tensor, reduction: string?",
  sigmoid_focal_loss = "t: tensor, target: tensor, alpha: number?, gamma: number?, reduction: string?",
  margin_ranking_loss = "a: tensor, b: tensor, target: tensor, margin: number?, reduction: string?",
  hinge_embedding_loss = "t: tensor, target: tensor, margin: number?, reduction: string?",
  l1_loss = "t: tensor, target: tensor, reduction: string?",
  huber_loss = "t: tensor, target: tensor, delta: number?, reduction: string?",
  smooth_l1_loss = "t: tensor, target: tensor, beta: number?, reduction: string?",
  cosine_similarity = "a: tensor, b: tensor, dim: dim?, eps: number?",
  cosine_embedding_loss = "a: tensor, b: tensor, target: tensor, margin: number?, reduction: string?",
  nll_loss = "t: tensor, labels: tensor, reduction: string?",
  triplet_margin_loss = "anchor: tensor, positive: tensor, negative: tensor, margin: number?, p: number?, "
    .. "eps: number?, reduction: string?",
  kl_div = "t: tensor, target: tensor, log_target: boolean?, reduction: string?",
  in_batch_softmax_loss = "queries: tensor, items: tensor, options: table?",
})

return F
