-- calls.lua: what a call of a tensor function costs from Lua where there is next to nothing to compute: tensors of
-- 4 x 4 numbers, calls in scopes of 50. Columns: microseconds a call, without and with a gradient recorded: the best of
-- --rounds. Functions take turns, so that a slow second of the machine does not fall upon one of them. Each is compiled
-- anew when its turn comes: LuaJIT would give up some of the traces that hundreds of functions share, which is nothing
-- that a script's own loop meets.
local peri = require "perilune"
local argparse = require "argparse"
local json = require "dkjson"
local C = peri.ffi.C
local F = peri.nn.functional

local parser = argparse("tests/bench/calls.lua", "What calls of tensor functions cost.")
parser:option("--out", "Append results as JSON lines to this file.")
parser:option("--rounds", "Rounds; the best one counts.", 100, tonumber)
parser:option("--only", "Functions whose names match this pattern.", ".")
local options = parser:parse(arg)
peri.init()

local CALLS, TURNS = 50, 4

-- -- the functions: each is called with x, a tensor of 4 x 4 numbers that may want a gradient ------------------------

local b = peri.Tensor.uniform({ 4, 4 }, 0.5, 1.5, 1, 1)
local mask, places, zeros = b:gt(1), peri.zeros({ 4, 4 }, "i64"), peri.zeros { 4, 4 }
local classes, signs = peri.tensor({ 0, 1, 2, 3 }, "i64"), peri.tensor { 1, -1, 1, -1 }
local weight, pair = peri.ones { 4 }, { b, b }
local in_batch, sparse = { ids = classes, temperature = 0.5 }, peri.Tensor.uniform({ 4, 2, 4 }, 0, 1, 1, 2)
local batches, weights = peri.Tensor.uniform({ 2, 4, 4 }, 0, 1, 1, 3), { weight, weight }
local functions = {
  abs = F.abs, exp = F.exp, relu = F.relu, affine = function(x) return F.affine(x, 2, 1) end, gelu = F.gelu,
  add = function(x) return x + b end, mul = function(x) return x * b end, div = function(x) return x / b end,
  pow = function(x) return x ^ 2 end, maximum = function(x) return F.maximum(x, b) end,
  clamp = function(x) return F.clamp(x, 0, 1) end, where = function(x) return F.where(mask, x, b) end,
  masked_fill = function(x) return F.masked_fill(x, mask, 0) end, elu = F.elu, logit = F.logit,
  lerp = function(x) return F.lerp(x, b, b) end, isclose = function(x) return F.isclose(x, b) end,
  nan_to_num = F.nan_to_num, muladd = function(x) return F.muladd(x, b, b) end,
  sum = F.sum, ["sum 2"] = function(x) return F.sum(x, 2) end, mean = F.mean,
  ["amax 2"] = function(x) return F.amax(x, 2) end,
  ["var 2"] = function(x) return F.var(x, 2) end, std = F.std, norm = F.norm,
  ["norm 3"] = function(x) return F.norm(x, 3, 2) end, logsumexp = function(x) return F.logsumexp(x, 2) end,
  prod = F.prod, any = F.any, all = F.all, count_nonzero = F.count_nonzero, nansum = F.nansum, nanmean = F.nanmean,
  cumsum = function(x) return F.cumsum(x, 2) end, cumprod = function(x) return F.cumprod(x, 2) end,
  softmax = function(x) return F.softmax(x, 2) end, log_softmax = function(x) return F.log_softmax(x, 2) end,
  normalize = F.normalize, layer_norm = function(x) return F.layer_norm(x, 1, weight, weight) end,
  rms_norm = function(x) return F.rms_norm(x, 1, weight) end,
  argmax = function(x) return F.argmax(x, 2) end, sort = function(x) return F.sort(x, 2) end,
  topk = function(x) return F.topk(x, 2, 2) end, median = function(x) return F.median(x, 2) end,
  mode = function(x) return F.mode(x, 2) end, quantile = function(x) return F.quantile(x, 0.3, 2) end,
  kthvalue = function(x) return F.kthvalue(x, 2, 2) end, unique = F.unique, nonzero = F.nonzero,
  masked_select = function(x) return F.masked_select(x, mask) end, isin = function(x) return F.isin(x, b) end,
  histc = F.histc, searchsorted = function(x) return F.searchsorted(weight, x) end,
  gather = function(x) return F.gather(x, 2, places) end, take = function(x) return F.index_select(x, 1, classes) end,
  scatter_add = function(x) return F.scatter_add(x, 2, places, b) end,
  scatter = function(x) return F.scatter(x, 2, places, b) end,
  index_add = function(x) return F.index_add(x, 1, classes, b) end,
  index = function(x) return x[1] end, slice = function(x) return x:slice(1, 1, 3) end,
  reshape = function(x) return x:reshape(2, 8) end, transpose = function(x) return x:transpose(1, 2):contiguous() end,
  cat = function() return F.cat(pair, 1) end, stack = function() return F.stack(pair, 1) end,
  chunk = function(x) return F.chunk(x, 2) end, flip = function(x) return F.flip(x, 1) end,
  roll = function(x) return F.roll(x, 1, 1) end, pad = function(x) return F.pad(x, { 1, 1 }) end,
  tril = F.tril, one_hot = function() return F.one_hot(classes, 4) end, diff = F.diff, flatten = F.flatten,
  matmul = function(x) return F.matmul(x, b) end, linear = function(x) return F.linear(x, b, weight) end,
  addmm = function(x) return F.addmm(b, x, b) end, tensordot = function(x) return F.tensordot(x, b, 1) end,
  einsum = function(x) return F.einsum("ij,jk->ik", x, b) end, cdist = function(x) return F.cdist(x, b) end,
  outer = function(x) return F.outer(x:select(1, 0), weight) end,
  cosine_similarity = function(x) return F.cosine_similarity(x, b) end,
  pairwise_distance = function(x) return F.pairwise_distance(x, b) end,
  attention = function(x) return F.scaled_dot_product_attention(x, b, b, nil, true) end,
  mse_loss = function(x) return F.mse_loss(x, b) end, l1_loss = function(x) return F.l1_loss(x, b) end,
  huber_loss = function(x) return F.huber_loss(x, b) end,
  binary_cross_entropy = function(x) return F.binary_cross_entropy(x, zeros) end,
  bce_with_logits = function(x) return F.binary_cross_entropy_with_logits(x, b) end,
  focal = function(x) return F.sigmoid_focal_loss(x, b) end, kl_div = function(x) return F.kl_div(x, b) end,
  cross_entropy = function(x) return F.cross_entropy(x, classes) end,
  ["cross_entropy ignore_index"] = function(x) return F.cross_entropy(x, classes, "mean", 3) end,
  ["cross_entropy label_smoothing"] = function(x) return F.cross_entropy(x, classes, "mean", nil, 0.1) end,
  nll_loss = function(x) return F.nll_loss(x, classes) end,
  triplet_margin_loss = function(x) return F.triplet_margin_loss(x, b, b) end,
  cosine_embedding_loss = function(x) return F.cosine_embedding_loss(x, b, signs) end,
  hinge_embedding_loss = function(x) return F.hinge_embedding_loss(x, b) end,
  bpr_loss = function(x) return F.bpr_loss(x, b) end,
  in_batch_softmax_loss = function(x) return F.in_batch_softmax_loss(x, b, in_batch) end,
  smooth_l1_loss = function(x) return F.smooth_l1_loss(x, b) end,
  margin_ranking_loss = function(x) return F.margin_ranking_loss(x, b, b) end,
  gumbel_softmax = F.gumbel_softmax,
  baddbmm = function() return F.baddbmm(batches, batches, batches) end,
  bmm = function() return F.bmm(batches, batches) end,
  interaction = function(x) return F.interaction(x, sparse) end,
  cross_net = function(x) return F.cross_net(x, nil, pair, nil) end,
  argmin = function(x) return F.argmin(x, 2) end, argsort = function(x) return F.argsort(x, 2) end,
  amin = function(x) return F.amin(x, 2) end, cummax = function(x) return F.cummax(x, 2) end,
  cummin = function(x) return F.cummin(x, 2) end, max = F.max, min = F.min,
  ["max 2"] = function(x) return F.max(x, 2) end,
  minimum = function(x) return F.minimum(x, b) end, bincount = function() return F.bincount(classes) end,
  bucketize = function(x) return F.bucketize(x, weight) end, clone = F.clone,
  diag = F.diag, trace = F.trace, triu = F.triu, unbind = F.unbind,
  ["diag 1"] = function() return F.diag(weight) end,
  meshgrid = function() return F.meshgrid(weights) end,
  repeat_interleave = function(x) return F.repeat_interleave(x, 2, 1) end,
  ["repeat_interleave tensor"] = function(x) return F.repeat_interleave(x, classes, 1) end,
  split = function(x) return F.split(x, { 2, 2 }) end, tile = function(x) return F.tile(x, { 2, 2 }) end,
  take_along_dim = function(x) return F.take_along_dim(x, places, 2) end,
  select = function(x) return F.select(x, 1, 0) end, squeeze = F.squeeze,
  unsqueeze = function(x) return F.unsqueeze(x, 1) end, permute = function(x) return F.permute(x, { 2, 1 }) end,
  dropout = function(x) return F.dropout(x, 0.5, 1, 1) end, bernoulli = F.bernoulli,
  multinomial = function() return F.multinomial(b, 2) end,
  mean_parts = function(x) return F.mean_parts(F.sum(x), 4) end,
  mean_of = function(x) return F.mean_of(F.sum(x), 4) end,
  allclose = function(x) return F.allclose(x, b) end, equal = function(x) return F.equal(x, b) end,
  floor_divide = function(x) return F.floor_divide(x, b) end, fmod = function(x) return F.fmod(x, b) end,
  remainder = function(x) return F.remainder(x, b) end, leaky_relu = F.leaky_relu,
  reciprocal = F.reciprocal,
}
for _, name in ipairs { "cos", "sin", "erf", "log", "expm1", "log1p", "floor", "ceil", "round", "trunc", "sign", "sqrt",
  "square", "rsqrt", "neg", "sigmoid", "silu", "tanh", "softplus", "logsigmoid", "logical_not", "isnan", "isinf",
  "isfinite" } do
  functions[name] = F[name]
end
for _, name in ipairs { "eq", "ne", "lt", "le", "gt", "ge", "sub", "logical_and", "logical_or", "logical_xor" } do
  functions[name] = function(x) return F[name](x, b) end
end

-- -- the clock --------------------------------------------------------------------------------------------------------

local names = {}
for name in peri.util.ordered(functions) do
  if name:match(options.only) then names[#names + 1] = name end
end

--- A loop of its own for each function, so that each is compiled by itself.
local function loop_of(f, x)
  local loop = assert(loadstring "local f, x, n = ... return function() for _ = 1, n do f(x) end end")(f, x, CALLS)
  return function()
    local from = C.peri_time_ns()
    peri.scope(loop)
    return tonumber(C.peri_time_ns() - from) * 1e-3 / CALLS
  end
end

local best, loops = {}, {}
for _, name in ipairs(names) do
  best[name] = { math.huge, math.huge }
  local plain = peri.Tensor.uniform({ 4, 4 }, 0.1, 0.9, 1, 0)
  loops[name] = { loop_of(functions[name], plain), loop_of(functions[name], plain:clone():requires_grad()) }
end
for _ = 1, TURNS do
  for _, name in ipairs(names) do
    for i = 1, 2 do
      jit.flush()
      for _ = 1, math.ceil(options.rounds / TURNS) do best[name][i] = math.min(best[name][i], loops[name][i]()) end
    end
  end
end

local out = options.out and assert(io.open(options.out, "a"))
for _, name in ipairs(names) do
  local plain, recorded = best[name][1], best[name][2]
  print(("%-32s %7.2f %7.2f us"):format(name, plain, recorded))
  if out then out:write(json.encode { name = name, us = plain, recorded_us = recorded }, "\n") end
end
