-- losses.lua: losses that are made of other functions: members of nn.functional. reduction, where there is one: "mean"
-- (default), "sum" or "none". Those that PyTorch (or torchvision) has are called and computed as there.
local P = require "perilune.ffi"
local Tensor = require "perilune.tensor.core"
local F = require "perilune.tensor.ops"
local util = require "perilune.util"
local signature = require "perilune.signature"
local formula = require "perilune.tensor.formula"

local C, check, wrap, ptr, out = P.C, P.check, Tensor.wrap, Tensor.ptr, Tensor.out
local NONE, MEAN, SUM = C.PERI_LOSS_NONE, C.PERI_LOSS_MEAN, C.PERI_LOSS_SUM
local alike, codes = Tensor._alike, { none = NONE, mean = MEAN, sum = SUM }

--- The code of a reduction.
local function code_of(func, reduction)
  return codes[reduction or "mean"]
    or P.fail(("%s: reduction '%s', allowed: none, mean, sum"):format(func, tostring(reduction)))
end
--- A formula of a loss: in regions of autocast losses are f32. One of its first two tensors has to be of floats.
local function loss_of(func, n_in, n_numbers, build)
  local compute = formula(func, n_in, n_numbers, build, true)
  return function(reduction, dim, keepdim, t, a, b, c, d, x, y)
    if not Tensor._is_float(t) and (n_in == 1 or not Tensor._is_float(a)) then
      P.fail(("%s: %s, allowed: floats; cast it with t:to \"f32\""):format(func, Tensor._text(t)))
    end
    return (compute(reduction, dim, keepdim, t, a, b, c, d, x, y))
  end
end

local bpr = loss_of("bpr_loss", 2, 0, function(f, positive, negative)
  return f.affine(f.logsigmoid(f.sub(positive, negative)), -1, 0)
end)
--- Bayesian personalised ranking: -log sigmoid(positive - negative), of the scores of an item that was taken and one
--- that was not; they broadcast: positive [B, 1] with negative [B, n].
function F.bpr_loss(positive, negative, reduction)
  return (bpr(code_of("bpr_loss", reduction), nil, false, positive, negative))
end

-- `slope` and `shift`: alpha is slope * target + shift.
local focal = loss_of("sigmoid_focal_loss", 2, 3, function(f, t, target, gamma, slope, shift)
  local p, other = f.sigmoid(t), f.affine(target, -1, 1)
  local of_positive, of_negative = f.mul(target, f.softplus(f.affine(t, -1, 0))), f.mul(other, f.softplus(t))
  local miss = f.add(f.mul(p, other), f.mul(f.affine(p, -1, 1), target)) -- 1 - the target's probability
  return f.mul(f.mul(f.add(of_positive, of_negative), f.pow(miss, gamma)), f.affine(target, slope, shift))
end)
--- The focal loss of logits and targets 0 or 1: binary cross entropy times alpha (of targets 1; 1 - alpha of others;
--- negative: no such factor) and (1 - p)^gamma, p being the probability of the target.
function F.sigmoid_focal_loss(t, target, alpha, gamma, reduction)
  alike("sigmoid_focal_loss", "t", t, "target", target)
  alpha = alpha or 0.25
  local code = code_of("sigmoid_focal_loss", reduction)
  if alpha < 0 then return (focal(code, nil, false, t, target, gamma or 2, 0, 1)) end
  return (focal(code, nil, false, t, target, gamma or 2, 2 * alpha - 1, 1 - alpha))
end

local margin_ranking = formula("margin_ranking_loss", 3, 1, function(f, a, b, target, margin)
  return f.relu(f.affine(f.mul(target, f.sub(a, b)), -1, margin))
end, true) -- of integers too, in f32, as in PyTorch
--- max(0, -target (a - b) + margin): target 1 where a should be larger, -1 where b should. margin: 0.
function F.margin_ranking_loss(a, b, target, margin, reduction)
  alike("margin_ranking_loss", "a", a, "b", b)
  alike("margin_ranking_loss", "a", a, "target", target)
  return (margin_ranking(code_of("margin_ranking_loss", reduction), nil, false, a, b, target, margin or 0))
end

local hinge_embedding = loss_of("hinge_embedding_loss", 2, 1, function(f, t, target, margin)
  -- of targets that are neither both count, as PyTorch's
  local near, zero = f.where(f.eq(target, f.number(-1)), f.number(0), t), f.number(0)
  return f.add(near, f.where(f.eq(target, f.number(1)), zero, f.relu(f.affine(t, -1, margin))))
end)
--- t where target is 1, max(0, margin - t) where it is -1. margin: 1.
function F.hinge_embedding_loss(t, target, margin, reduction)
  alike("hinge_embedding_loss", "t", t, "target", target)
  return (hinge_embedding(code_of("hinge_embedding_loss", reduction), nil, false, t, target, margin or 1))
end

local l1 = loss_of("l1_loss", 2, 0, function(f, t, target) return f.abs(f.sub(t, target)) end)
--- The mean of |t - target|.
function F.l1_loss(t, target, reduction)
  alike("l1_loss", "t", t, "target", target)
  return (l1(code_of("l1_loss", reduction), nil, false, t, target))
end

--- Of d = |t - target|: d^2 / 2 up to delta, delta (d - delta / 2) beyond it; times scale.
local function huber_of(func)
  return loss_of(func, 2, 2, function(f, t, target, delta, scale)
    local d = f.abs(f.sub(t, target))
    local near = f.clamp(d, -math.huge, delta)
    return f.affine(f.mul(near, f.sub(d, f.affine(near, 0.5, 0))), scale, 0)
  end)
end
local huber, smooth_l1 = huber_of "huber_loss", huber_of "smooth_l1_loss"
--- Half the squared difference up to delta (1), delta times the difference minus half of delta beyond it.
function F.huber_loss(t, target, delta, reduction)
  delta = delta or 1
  if delta <= 0 or delta ~= delta then P.fail(("huber_loss: delta is %g, allowed: numbers above 0"):format(delta)) end
  alike("huber_loss", "t", t, "target", target)
  return (huber(code_of("huber_loss", reduction), nil, false, t, target, delta, 1))
end
--- huber_loss divided by beta (1), which is its delta; l1_loss for 0.
function F.smooth_l1_loss(t, target, beta, reduction)
  beta = beta or 1
  if beta < 0 or beta ~= beta then P.fail(("smooth_l1_loss: beta is %g, allowed: numbers from 0"):format(beta)) end
  if beta == 0 then return (F.l1_loss(t, target, reduction)) end
  alike("smooth_l1_loss", "t", t, "target", target)
  return (smooth_l1(code_of("smooth_l1_loss", reduction), nil, false, t, target, beta, 1 / beta))
end

local negative = loss_of("nll_loss", 1, 0, function(f, t) return f.affine(t, -1, 0) end)
--- Of logarithms of probabilities [B, C] and class numbers (i64 [B], from 0): minus the one of each row's class.
function F.nll_loss(t, labels, reduction)
  if t:dim() ~= 2 or labels:dim() ~= 1 then
    P.fail(("nll_loss: %s and labels %s, wanted two dimensions and one"):format(Tensor._text(t), Tensor._text(labels)))
  end
  local picked = F.gather(t, 2, F.unsqueeze(labels, 2))
  local loss = negative(code_of("nll_loss", reduction), nil, false, picked)
  return reduction == "none" and F.squeeze(loss, 2) or loss
end

local triplet = loss_of("triplet_margin_loss", 2, 1, function(f, near, far, margin)
  return f.relu(f.affine(f.sub(near, far), 1, margin))
end)
local triplet_of_squares = loss_of("triplet_margin_loss", 2, 1, function(f, near, far, margin)
  return f.relu(f.affine(f.sub(f.root(near), f.root(far)), 1, margin))
end)
local function of_triplet(reduction, anchor, positive, negative_rows, margin, p, eps)
  if p ~= 2 then
    return (triplet(reduction, nil, false, F.pairwise_distance(anchor, positive, p, eps),
      F.pairwise_distance(anchor, negative_rows, p, eps), margin))
  end
  local name = anchor:dtype()
  local narrow = name == "f16" or name == "bf16"
  if narrow then anchor = anchor:to "f32" end -- f16 ends at 65504
  local near = F._squared_distance(SUM, -1, false, anchor, positive, eps)
  local far = F._squared_distance(SUM, -1, false, anchor, negative_rows, eps)
  local loss = triplet_of_squares(reduction, nil, false, near, far, margin)
  return (narrow and not P.state.autocast and loss:to(name) or loss)
end
--- max(0, d(anchor, positive) - d(anchor, negative) + margin), d the p-norm (2) of the difference (pairwise_distance).
--- margin: 1.
function F.triplet_margin_loss(anchor, positive, negative_rows, margin, p, eps, reduction)
  return (of_triplet(code_of("triplet_margin_loss", reduction), anchor, positive, negative_rows, margin or 1, p or 2,
    eps or 1e-6))
end

local function cosine(a, b, dim, eps, added)
  check(C.peri_op_cosine_similarity(ptr(a), ptr(b), dim > 0 and dim - 1 or dim, eps, added, out))
  return (wrap(out[0]))
end
--- The cosine of the angle between a and b, which broadcast, along dim (-1); sizes below eps (1e-8) count as eps.
function F.cosine_similarity(a, b, dim, eps)
  dim, eps = dim or -1, eps or 1e-8
  return (cosine(a, b, dim, eps, 0))
end

local cosine_embedding = loss_of("cosine_embedding_loss", 2, 1, function(f, of_row, target, margin)
  -- of targets that are neither none counts, as PyTorch's
  local apart = f.where(f.eq(target, f.number(-1)), f.relu(f.sub(of_row, f.number(margin))), f.number(0))
  return f.where(f.eq(target, f.number(1)), f.affine(of_row, -1, 1), apart)
end)
--- Of rows a and b [B, D] and target [B]: 1 - cosine where it is 1, max(0, cosine - margin) where it is -1. margin: 0.
--- Squares of sizes are 1e-12 larger here than they are, as PyTorch's: gradients of rows of zeros are not infinite.
function F.cosine_embedding_loss(a, b, target, margin, reduction)
  alike("cosine_embedding_loss", "a", a, "b", b)
  local whole = not (Tensor._is_float(a) or Tensor._is_float(b))
  local of_row = cosine(whole and a:to "f32" or a, b, -1, 0, 1e-12)
  alike("cosine_embedding_loss", "the cosine of each row", of_row, "target", target)
  return (cosine_embedding(code_of("cosine_embedding_loss", reduction), nil, false, of_row, target, margin or 0))
end

-- A target of 0 has no logarithm, and counts nothing.
local kl_div = loss_of("kl_div", 2, 0, function(f, t, target)
  local known = f.where(f.eq(target, f.number(0)), f.number(1), target)
  return f.mul(target, f.sub(f.log(known), t))
end)
local kl_div_of_logs = loss_of("kl_div", 2, 0, function(f, t, target) return f.mul(f.exp(target), f.sub(target, t)) end)
--- target (log target - t): the distance of the distribution `target` from the one whose logarithms are t. log_target:
--- target is given by its logarithms. reduction also "batchmean": the sum divided by the first size, which is the
--- distance's mean.
function F.kl_div(t, target, log_target, reduction)
  alike("kl_div", "t", t, "target", target)
  local by_batch = reduction == "batchmean"
  local code = by_batch and SUM or code_of("kl_div", reduction)
  local loss = (log_target and kl_div_of_logs or kl_div)(code, nil, false, t, target)
  if not by_batch then return loss end
  return (F.affine(loss, 1 / (t:dim() > 0 and t:size(1) or 1), 0))
end

local poisson = loss_of("poisson_nll_loss", 2, 1, function(f, t, target, eps)
  return f.sub(t, f.mul(target, f.log(f.affine(t, 1, eps))))
end)
local poisson_of_logs = loss_of("poisson_nll_loss", 2, 0, function(f, t, target)
  return f.sub(f.exp(t), f.mul(target, t))
end)
-- Stirling's formula, of targets above 1.
local log_factorial = loss_of("poisson_nll_loss", 1, 0, function(f, target)
  local above = f.maximum(target, f.number(1))
  local size = f.add(f.mul(above, f.log(above)), f.affine(f.log(f.affine(above, 2 * math.pi, 0)), 0.5, 0))
  return f.where(f.le(target, f.number(1)), f.number(0), f.sub(size, above))
end)
--- Minus the logarithm of the probability that a Poisson distribution has for `target`, a count: t is the logarithm of
--- its mean (log_input, true), or the mean, to which eps (1e-8) is added within the logarithm. full: with the term that
--- depends on the target alone.
function F.poisson_nll_loss(t, target, log_input, full, eps, reduction)
  alike("poisson_nll_loss", "t", t, "target", target)
  local code = code_of("poisson_nll_loss", reduction)
  local loss = log_input == false and poisson(code, nil, false, t, target, eps or 1e-8)
    or poisson_of_logs(code, nil, false, t, target)
  if not full then return loss end
  local floats = Tensor._is_float(target) and target:detach() or target:to "f32"
  return (F.add(loss, log_factorial(code, nil, false, floats)))
end

local gaussian = loss_of("gaussian_nll_loss", 3, 2, function(f, t, target, var, eps, constant)
  local v = f.clamp(var, eps, math.huge)
  return f.affine(f.add(f.log(v), f.div(f.square(f.sub(t, target)), v)), 0.5, constant)
end)
--- Minus the logarithm of the probability density that a normal distribution of mean t and variance var has at
--- `target`. var: of t's shape, or with a last size of 1; what is below eps (1e-6) counts as eps, and has no gradient.
--- full: with the constant. Waits for var, to check it.
function F.gaussian_nll_loss(t, target, var, full, eps, reduction)
  alike("gaussian_nll_loss", "t", t, "target", target)
  if not Tensor._same_shape(var, t) then
    local shape = t:shape()
    shape[#shape] = 1
    local n = t:dim()
    local fits = n > 0 and var:dim() == n
    for d = 1, fits and n or 0 do fits = fits and var:size(d) == shape[d] end
    if not fits then
      P.fail(("gaussian_nll_loss: var is %s, wanted the shape of t, [%s], or a last size of 1"):format(
        Tensor._text(var), table.concat(t:shape(), ", ")))
    end
  end
  if var:numel() > 0 and F.amin(var:detach()):item() < 0 then
    P.fail "gaussian_nll_loss: var has a negative number, allowed: from 0"
  end
  return (gaussian(code_of("gaussian_nll_loss", reduction), nil, false, t, target, var, eps or 1e-6,
    full and 0.5 * math.log(2 * math.pi) or 0))
end

local in_batch = { temperature = 1, log_q = util.optional, ids = util.optional, reduction = "mean" }
local none = {}
--- The options of in_batch_softmax_loss, if they are such. util.named refuses others; it is not compiled.
local function in_batch_options(o)
  local name = next(o)
  while name ~= nil and in_batch[name] do name = next(o, name) end
  local temperature = type(o.temperature)
  return name == nil and (temperature == "number" or temperature == "nil") and o
    or util.named("in_batch_softmax_loss", o, in_batch)
end
--- Sampled softmax with the batch's own items as negatives: row i of `queries` [B, D] should choose row i of `items`
--- [B, D] among all of them. options: temperature (1) divides the products; log_q [B]: the logarithm of how often each
--- item is drawn as a negative (its share of the data), which is subtracted from its logits, since frequent items are
--- drawn too often; ids (i64 [B]): items with the same id are no negatives of each other; reduction.
function F.in_batch_softmax_loss(queries, items, options)
  local o = options and in_batch_options(options) or none
  local temperature = o.temperature or 1
  if not (temperature > 0 and temperature < math.huge) then
    P.fail(("in_batch_softmax_loss: temperature is %s, allowed: finite numbers above 0"):format(temperature))
  end
  local ids, log_q = o.ids, o.log_q
  check(C.peri_op_in_batch_softmax(ptr(queries), ptr(items), ids and ptr(ids), log_q and ptr(log_q), 1 / temperature,
    code_of("in_batch_softmax_loss", o.reduction), out))
  return (wrap(out[0]))
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
  poisson_nll_loss = "t: tensor, target: tensor, log_input: boolean?, full: boolean?, eps: number?, reduction: string?",
  gaussian_nll_loss = "t: tensor, target: tensor, var: tensor, full: boolean?, eps: number?, reduction: string?",
  in_batch_softmax_loss = "queries: tensor, items: tensor, options: table?",
})

return F
