-- composed.lua: everyday functions that are made of other functions, with PyTorch's names: members of nn.functional and
-- methods of tensors.
local P = require "perilune.ffi"
local Tensor = require "perilune.tensor.core"
local F = require "perilune.tensor.ops"
local util = require "perilune.util"
local signature = require "perilune.signature"
local formula = require "perilune.tensor.formula"
local spelled = require "perilune.tensor.spelled"
local watch = signature.watch

local C, check, wrap, ptr, out = P.C, P.check, Tensor.wrap, Tensor.ptr, Tensor.out
local NONE, SUM, MEAN = P.C.PERI_LOSS_NONE, P.C.PERI_LOSS_SUM, P.C.PERI_LOSS_MEAN

local divided = formula("normalize", 2, 1, function(f, t, norm, eps) return f.div(t, f.clamp(norm, eps, math.huge)) end)
--- t divided by its p-norm (2) along dim (2); norms below eps (1e-12) count as eps.
function F.normalize(t, p, dim, eps)
  return (divided(NONE, nil, false, t, F.norm(t, p or 2, dim or 2, true), eps or 1e-12))
end

--- dtype -> its largest finite number.
local largest = { f16 = 65504, bf16 = 0x1.fep127, f32 = 0x1.fffffep127, f64 = 0x1.fffffffffffffp1023 }

local no_sizes = {}
--- t without the dimensions `dim` (as in sum), which have size 1.
local function without(t, dim)
  if not dim then return (t:reshape(no_sizes)) end
  if type(dim) == "number" then return (F.squeeze(t, dim)) end
  local n, sizes, gone = t:dim(), {}, {}
  for i = 1, #dim do gone[dim[i] < 0 and dim[i] + n + 1 or dim[i]] = true end
  for d = 1, n do
    if not gone[d] then sizes[#sizes + 1] = t:size(d) end
  end
  return (t:reshape(sizes))
end

-- The bounds keep an infinite largest element from leaving NaN behind.
local exponentials = formula("logsumexp", 2, 2, function(f, t, most, low, high)
  return f.exp(f.sub(t, f.clamp(most, low, high)))
end)
local shifted_log = formula("logsumexp", 2, 2, function(f, sum, most, low, high)
  return f.add(f.log(sum), f.clamp(most, low, high))
end)
local function logsumexp(t, dim, keepdim)
  local most, bound = F.amax(t:describe().requires_grad and t:detach() or t, dim, true), largest[t:dtype()]
  local log = shifted_log(NONE, nil, false, exponentials(SUM, dim, true, t, most, -bound, bound), most, -bound, bound)
  return keepdim and log or without(log, dim)
end
--- The logarithm of the sum of exp(t) over dim (as in sum). Of integers and bool in f32.
function F.logsumexp(t, dim, keepdim)
  if not Tensor._is_float(t) then t = t:to "f32" end -- differences of the largest and the smallest one would wrap
  if t:numel() == 0 then return (F.log(F.sum(t, dim, keepdim))) end -- nothing has no largest one
  return (F._in_f32(logsumexp, t, dim, keepdim))
end

local numbers = formula("nansum", 1, 0, function(f, t) return f.where(f.ne(t, t), f.number(0), t) end)
local are_numbers = formula("nanmean", 1, 0, function(f, t) return f.eq(t, t) end)
--- The sum over dim (as in sum) of what is not NaN.
function F.nansum(t, dim, keepdim)
  if not Tensor._is_float(t) then return (F.sum(t, dim, keepdim)) end
  return (numbers(SUM, dim, keepdim, t))
end
local function nanmean(t, dim, keepdim)
  return (F.div(numbers(SUM, dim, keepdim, t), are_numbers(SUM, dim, keepdim, t:detach())))
end
--- The mean of what is not NaN; NaN where nothing is left.
function F.nanmean(t, dim, keepdim)
  if not Tensor._is_float(t) then return (F.div(F.sum(t, dim, keepdim), F.sum(F.eq(t, t), dim, keepdim))) end
  return (F._in_f32(nanmean, t, dim, keepdim))
end

local are_not_0 = formula("any", 1, 0, function(f, t) return f.ne(t, f.number(0)) end)
local are_0 = formula("all", 1, 0, function(f, t) return f.eq(t, f.number(0)) end)
--- Whether any element over dim (as in sum) is true, or not 0: bool.
function F.any(t, dim, keepdim) return (F.gt(are_not_0(SUM, dim, keepdim, t:detach()), 0)) end
--- Whether all elements over dim (as in sum) are true, or not 0: bool.
function F.all(t, dim, keepdim) return (F.eq(are_0(SUM, dim, keepdim, t:detach()), 0)) end

--- Views of t cut along dim (1) into n parts of one size, the last of which may be smaller, or missing.
function F.chunk(t, n, dim)
  if n < 1 then P.fail(("chunk: n is %d, allowed: 1 and more"):format(n)) end
  local total, none = t:size(dim or 1), {}
  if total > 0 then return (F.split(t, math.ceil(total / n), dim)) end
  for i = 1, n do none[i] = 0 end
  return (F.split(t, none, dim))
end

--- t with the dimensions from `first` (1) to `last` (-1) as one.
function F.flatten(t, first, last)
  local n, shape, product = t:dim(), {}, 1
  if n == 0 then return t:reshape(1) end
  first, last = first or 1, last or -1
  local from, to = first < 0 and first + n + 1 or first, last < 0 and last + n + 1 or last
  if from < 1 or to > n or from > to then
    P.fail(("flatten: dimensions %d to %d of %s, wanted first <= last of its %d"):format(first, last, Tensor._text(t),
      n))
  end
  for d = 1, n do
    if d < from or d > to then shape[#shape + 1] = t:size(d)
    else
      product = product * t:size(d)
      if d == to then shape[#shape + 1] = product end
    end
  end
  return t:reshape(shape)
end

--- For each id a row of `classes` numbers, 1 at its place and 0 elsewhere: i64. Waits for the ids, to check them.
function F.one_hot(ids, classes)
  if Tensor._is_float(ids) then
    Tensor._check_integers("one_hot", ids)
    ids = ids:to "i64"
  end
  check(C.peri_op_one_hot(ptr(ids), classes, out))
  return (wrap(out[0]))
end

-- -- of one number ----------------------------------------------------------------------------------------------------

--- Where an element is an infinity: bool.
function F.isinf(t)
  if not Tensor._is_float(t) then return (F.ne(t, t)) end -- none
  return (F.eq(F.abs(t), math.huge))
end
local replaced = formula("nan_to_num", 1, 3, function(f, t, nan, posinf, neginf)
  local finite = f.where(f.eq(t, f.number(-math.huge)), f.number(neginf), t)
  return f.where(f.ne(t, t), f.number(nan), f.where(f.eq(t, f.number(math.huge)), f.number(posinf), finite))
end)
--- t with `nan` (0) for NaN, and for infinities posinf and neginf: where they are nil the largest and the least number
--- of the dtype.
function F.nan_to_num(t, nan, posinf, neginf)
  if not Tensor._is_float(t) then return (F.clone(t)) end
  local most = largest[t:dtype()]
  return (replaced(NONE, nil, false, t, nan or 0, posinf or most, neginf or -most))
end
--- log(t / (1 - t)); eps: of t not below eps nor above 1 - eps.
function F.logit(t, eps)
  if not Tensor._is_float(t) then t = t:to "f32" end
  if eps then t = F.clamp(t, eps, 1 - eps) end
  return (F.sub(F.log(t), F.log1p(F.neg(t))))
end
local elu = formula("elu", 1, 1, function(f, t, alpha)
  -- of large t, which is not chosen, the exponential would leave NaN in the gradient
  local below = f.expm1(f.clamp(t, -math.huge, 1))
  return f.where(f.le(t, f.number(0)), f.affine(below, alpha, 0), t)
end)
--- t where it is above 0, else alpha (1) times exp(t) - 1.
function F.elu(t, alpha) return (elu(NONE, nil, false, t, alpha or 1)) end

local glued = formula("glu", 2, 0, function(f, a, b) return f.mul(a, f.sigmoid(b)) end)
--- The first half of t along dim (-1) times the sigmoid of the second one.
function F.glu(t, dim)
  dim = dim or -1
  local size = t:size(dim)
  if size % 2 ~= 0 then
    P.fail(("glu: dimension %d of %s, wanted an even size, since it is cut into halves"):format(dim, Tensor._text(t)))
  end
  return (glued(NONE, nil, false, t:slice(dim, 0, size / 2), t:slice(dim, size / 2, size)))
end
local selu = formula("selu", 1, 2, function(f, t, below_scale, scale)
  local below = f.expm1(f.clamp(t, -math.huge, 1)) -- as in elu
  return f.where(f.le(t, f.number(0)), f.affine(below, below_scale, 0), f.affine(t, scale, 0))
end)
local SELU_ALPHA, SELU_SCALE = 1.6732632423543772, 1.0507009873554805
--- SELU_SCALE times elu with SELU_ALPHA: through many layers means stay near 0 and variances near 1.
function F.selu(t) return (selu(NONE, nil, false, t, SELU_ALPHA * SELU_SCALE, SELU_SCALE)) end
local mish = formula("mish", 1, 0, function(f, t) return f.mul(t, f.tanh(f.softplus(t))) end)
--- t times the tanh of the softplus of t.
function F.mish(t) return (mish(NONE, nil, false, t)) end

local scaled_log = formula("log2", 1, 1, function(f, t, scale) return f.affine(f.log(t), scale, 0) end)
--- By how much a logarithm misses the whole number from which only rounding can have kept it; else 0.
local beside_whole = formula("log2", 1, 1, function(f, t, scale)
  local y = f.affine(f.log(t), scale, 0)
  local whole = f.round(y)
  local apart = f.sub(y, whole)
  return f.where(f.le(f.abs(apart), f.affine(f.abs(whole), 2 ^ -51, 0)), apart, f.number(0))
end)
--- log(t) times scale, computed in f64, so that whole numbers are exact: log2(8) is 3, also where it is rounded down.
local function logarithm(t, scale)
  local name = Tensor._is_float(t) and t:dtype() or "f32"
  if watch.call then return (F.affine(F.log(t), scale, 0)) end -- model files compute in f32
  if name ~= "f64" then return (scaled_log(NONE, nil, false, t:to "f64", scale):to(name)) end
  return (F.sub(scaled_log(NONE, nil, false, t, scale), beside_whole(NONE, nil, false, t:detach(), scale)))
end
--- The logarithm to base 2. Of integers and bool in f32.
function F.log2(t) return (logarithm(t, 1 / math.log(2))) end
--- The logarithm to base 10. Of integers and bool in f32.
function F.log10(t) return (logarithm(t, 1 / math.log(10))) end
--- 2 to the power of t. Of integers and bool in f32.
function F.exp2(t) return (F.pow(2, Tensor._is_float(t) and t or t:to "f32")) end

-- -- of truth ---------------------------------------------------------------------------------------------------------

--- Where t is 0 or false: bool.
function F.logical_not(t) return (F.eq(t, 0)) end
--- Where both, one of both, or exactly one of both are not 0: bool.
function F.logical_and(a, b) return (F.mul(F.ne(a, 0), F.ne(b, 0))) end
function F.logical_or(a, b) return (F.add(F.ne(a, 0), F.ne(b, 0))) end
function F.logical_xor(a, b) return (F.ne(F.ne(a, 0), F.ne(b, 0))) end

--- 1 where a and b are close.
local function closeness(f, a, b, rtol, atol)
  local size = f.abs(b)
  local near = f.le(f.abs(f.sub(a, b)), f.affine(size, rtol, atol))
  return f.maximum(f.mul(near, f.lt(size, f.number(math.huge))), f.eq(a, b))
end
--- The same where NaN is close to NaN.
local function closeness_of_nan(f, a, b, rtol, atol)
  return f.maximum(closeness(f, a, b, rtol, atol), f.mul(f.ne(a, a), f.ne(b, b)))
end
local function opposite(f, close) return f.affine(close, -1, 1) end
--- [whether NaN is close to NaN]
local are_close = { [false] = formula("isclose", 2, 2, closeness), [true] = formula("isclose", 2, 2, closeness_of_nan) }
local are_apart = {
  [false] = formula("allclose", 2, 2, function(f, ...) return opposite(f, closeness(f, ...)) end),
  [true] = formula("allclose", 2, 2, function(f, ...) return opposite(f, closeness_of_nan(f, ...)) end),
}
local function compare(how, reduction, a, b, rtol, atol, equal_nan)
  if not (Tensor._is_float(a) and Tensor._is_float(b)) then a, b = a:to "f64", b:to "f64" end
  return (how[equal_nan or false](reduction, nil, false, a:detach(), b:detach(), rtol or 1e-5, atol or 1e-8))
end
--- Of integers: doubles have not all of 64 bits, so the difference is taken before, unless 64 bits cannot hold it.
local function whole_close(a, b, rtol, atol)
  local size, far = F.abs(b:to "f64"), F.abs(F.sub(a:to "f64", b:to "f64"))
  local apart = F.where(F.lt(far, 2 ^ 62), F.abs(F.sub(a:to "i64", b:to "i64")):to "f64", far)
  return (F.le(apart, F.affine(size, rtol or 1e-5, atol or 1e-8)))
end
--- Where |a - b| <= atol (1e-8) + rtol (1e-5) |b|; equal infinities are close, and with equal_nan NaN and NaN.
function F.isclose(a, b, rtol, atol, equal_nan)
  if not Tensor._is_float(a) and not Tensor._is_float(b) then return (whole_close(a, b, rtol, atol)) end
  return (F.ne(compare(are_close, NONE, a, b, rtol, atol, equal_nan), 0))
end
--- Whether isclose holds everywhere: true or false. Waits.
function F.allclose(a, b, rtol, atol, equal_nan)
  if not Tensor._is_float(a) and not Tensor._is_float(b) then
    return F.all(whole_close(a, b, rtol, atol)):item() ~= 0
  end
  return compare(are_apart, SUM, a, b, rtol, atol, equal_nan):item() == 0 -- a mean would be rounded to all, or nearly
end
local differing = formula("equal", 2, 0, function(f, a, b) return f.ne(a, b) end)
--- Whether a and b have one shape and equal elements: true or false. Waits.
function F.equal(a, b)
  if not Tensor._same_shape(a, b) then return false end
  if Tensor._is_float(a) and Tensor._is_float(b) then
    return differing(SUM, nil, false, a:detach(), b:detach()):item() == 0
  end
  return F.all(F.eq(a, b)):item() ~= 0
end

-- -- of two and more --------------------------------------------------------------------------------------------------

local between = formula("lerp", 3, 0, function(f, a, b, weight)
  local by_a = f.lt(f.abs(weight), f.number(0.5))
  -- one product: a second one that is not chosen would leave 0 times infinity in the gradient
  local share = f.where(by_a, weight, f.affine(weight, 1, -1))
  return f.add(f.where(by_a, a, b), f.mul(f.sub(b, a), share))
end)
local from_first = formula("lerp", 2, 1, function(f, a, b, weight)
  return f.add(a, f.affine(f.sub(b, a), weight, 0))
end)
local from_second = formula("lerp", 2, 1, function(f, a, b, rest)
  return f.sub(b, f.affine(f.sub(b, a), rest, 0))
end)
--- a + weight (b - a); weight: a number or a tensor. From 1/2 on it is computed from b, as PyTorch's: weight 1 gives
--- b's bits.
function F.lerp(a, b, weight)
  if not Tensor._is_number(weight) then return (between(NONE, nil, false, a, b, weight)) end
  weight = tonumber(weight)
  if math.abs(weight) < 0.5 then return (from_first(NONE, nil, false, a, b, weight)) end
  return (from_second(NONE, nil, false, a, b, 1 - weight))
end
local added_product = formula("addcmul", 3, 1, function(f, t, a, b, value)
  return f.add(t, f.affine(f.mul(a, b), value, 0))
end)
--- t + value (1) times a times b, which broadcast.
function F.addcmul(t, a, b, value)
  if not (Tensor._is_float(t) and Tensor._is_float(a) and Tensor._is_float(b)) then
    return (F.add(t, F.affine(F.mul(a, b), value or 1, 0)))
  end
  return (added_product(NONE, nil, false, t, a, b, value or 1))
end
local log_of_sum = formula("logaddexp", 2, 0, function(f, a, b)
  -- equal infinities have no difference
  local apart = f.abs(f.where(f.eq(a, b), f.number(0), f.sub(a, b)))
  return f.add(f.maximum(a, b), f.log1p(f.exp(f.affine(apart, -1, 0))))
end)
--- The logarithm of exp(a) + exp(b).
function F.logaddexp(a, b) return (log_of_sum(NONE, nil, false, a, b)) end
--- The smallest and the largest element over dim (as in sum).
function F.aminmax(t, dim, keepdim)
  local least, most = F.amin(t, dim, keepdim), F.amax(t, dim, keepdim)
  return least, most
end
--- std and mean, var and mean.
function F.std_mean(t, dim, keepdim, correction)
  local deviation, mean = F.std(t, dim, keepdim, correction), F.mean(t, dim, keepdim)
  return deviation, mean
end
function F.var_mean(t, dim, keepdim, correction)
  local variance, mean = F.var(t, dim, keepdim, correction), F.mean(t, dim, keepdim)
  return variance, mean
end
local weighted_sum = formula("addmm", 2, 2, function(f, t, product, beta, alpha)
  return f.add(f.affine(t, beta, 0), f.affine(product, alpha, 0))
end)
-- Nothing of t, not even NaN; its gradient is 0.
local scaled_product = formula("addmm", 2, 1, function(f, t, product, alpha)
  return f.where(f.lt(t, t), t, f.affine(product, alpha, 0))
end)
--- beta (1) t + alpha (1) times a product. beta 0: t may hold anything, NaN too.
local function add_product(t, product, beta, alpha)
  if Tensor._is_float(t) or Tensor._is_float(product) then
    if beta == 0 then return (scaled_product(NONE, nil, false, t, product, alpha or 1)) end
    return (weighted_sum(NONE, nil, false, t, product, beta or 1, alpha or 1))
  end
  local sum = F.affine(product, alpha or 1, 0)
  if beta ~= 0 then sum = F.add(F.affine(t, beta or 1, 0), sum) else t:expand(sum:shape()) end
  return sum
end
--- beta (1) t + alpha (1) a b, of matrices.
function F.addmm(t, a, b, beta, alpha)
  if a:dim() ~= 2 or b:dim() ~= 2 then
    P.fail(("addmm: %s and %s, wanted two dimensions each"):format(Tensor._text(a), Tensor._text(b)))
  end
  return add_product(t, F.matmul(a, b), beta, alpha)
end
--- beta (1) t + alpha (1) a b, of batches of matrices.
function F.baddbmm(t, a, b, beta, alpha)
  return add_product(t, F.bmm(a, b), beta, alpha)
end
--- Append a list to another one. (With a place, table.insert is not compiled.)
local function append(list, more)
  for i = 1, #more do list[#list + 1] = more[i] end
end
--- The dimensions `list` of t, whose sizes are `shape`, each once and counted from 1, behind (`last`) or before the
--- others, and the sizes of both: the product over the list, and those that stay.
local function gathered(t, shape, list, last)
  local n, taken, others, stay, inner = #shape, {}, {}, {}, 1
  for i = 1, #list do
    local d = list[i]
    local at = d < 0 and d + n + 1 or d
    if at < 1 or at > n or taken[at] then
      P.fail(("tensordot: dimension %d of %s, wanted each once"):format(d, Tensor._text(t)))
    end
    taken[at], list[i] = true, at
    inner = inner * shape[at]
  end
  for d = 1, n do
    if not taken[d] then
      others[#others + 1] = d
      stay[#stay + 1] = shape[d]
    end
  end
  local order = {}
  append(order, last and others or list)
  append(order, last and list or others)
  for d = 1, n do
    if order[d] ~= d then return t:permute(order), stay, inner end
  end
  return t, stay, inner
end
--- The sum of products over dimensions of a and b: the last `dims` (2) of a with as many first ones of b, or the two
--- lists { of a, of b }. The result has those of a that are left, then those of b.
function F.tensordot(a, b, dims)
  local in_a, in_b, of_a, of_b = {}, {}, a:shape(), b:shape()
  if type(dims) == "table" then
    if type(dims[1]) ~= "table" or type(dims[2]) ~= "table" or #dims[1] ~= #dims[2] then
      P.fail "tensordot: dims is a table, wanted a number, or two lists of as many dimensions: { { 1 }, { 2 } }"
    end
    for i = 1, 2 do signature.value("tensordot", ("dims[%d]"):format(i), dims[i], "dims") end
    for i = 1, #dims[1] do in_a[i], in_b[i] = dims[1][i], dims[2][i] end
  else
    local n = signature.value("tensordot", "dims", dims or 2, "count")
    if n > #of_a or n > #of_b then
      P.fail(("tensordot: %s dimensions of %s and %s, wanted as many as both have"):format(n, Tensor._text(a),
        Tensor._text(b)))
    end
    for i = 1, n do in_a[i], in_b[i] = #of_a - n + i, i end
  end
  local x, rows, inner = gathered(a, of_a, in_a, true)
  local y, columns = gathered(b, of_b, in_b, false)
  for i = 1, #in_a do
    local d = in_a[i]
    if of_a[d] ~= of_b[in_b[i]] then
      P.fail(("tensordot: dimension %d of %s and %d of %s, wanted equal sizes"):format(d, Tensor._text(a), in_b[i],
        Tensor._text(b)))
    end
  end
  local of = F.matmul(x:reshape(util.product(rows), inner), y:reshape(inner, util.product(columns)))
  append(rows, columns)
  return (of:reshape(rows))
end
--- Each element minus the one before it along dim (-1), n (1) times over; of bool whether they differ.
function F.diff(t, n, dim)
  dim = dim or -1
  if n == 0 then return (F.clone(t)) end
  local apart = t:dtype() == "bool" and F.ne or F.sub
  for _ = 1, math.min(tonumber(n or 1), t:size(dim)) do -- then none are left
    local size = t:size(dim)
    t = apart(t:slice(dim, math.min(1, size), size), t:slice(dim, 0, math.max(0, size - 1)))
  end
  return t
end
--- Of this layer: the square of a - b + eps.
F._squared_distance = formula("pairwise_distance", 2, 1, function(f, a, b, eps)
  return f.square(f.affine(f.sub(a, b), 1, eps))
end)
local function distance(a, b, keepdim, eps) return (F._root(F._squared_distance(SUM, -1, keepdim, a, b, eps))) end
--- The p-norm (2) of a - b + eps (1e-6) along the last dimension.
function F.pairwise_distance(a, b, p, eps, keepdim)
  p = p or 2
  if p ~= 2 then return (F.norm(F.affine(F.sub(a, b), 1, eps or 1e-6), p, -1, keepdim)) end
  return (F._both_in_f32(distance, a, b, keepdim, eps or 1e-6))
end
local MOST_PAIRS = 25 -- rows, up to which cdist subtracts them, as PyTorch does
--- The p-norm (2) of the difference of each row of a [..., n, D] and each of b [..., m, D]: [..., n, m]. Of more than
--- 25 rows squares and products are added up for p = 2, which is faster, and less exact where rows are near each other.
function F.cdist(a, b, p)
  p = p or 2
  if a:dim() < 2 or b:dim() < 2 or a:size(-1) ~= b:size(-1) then
    P.fail(("cdist: %s and %s, wanted rows of one size"):format(Tensor._text(a), Tensor._text(b)))
  end
  if p ~= 2 or a:size(-2) <= MOST_PAIRS and b:size(-2) <= MOST_PAIRS then
    local x, y = F.unsqueeze(a, -2), F.unsqueeze(b, -3)
    return (p == 2 and F._both_in_f32(distance, x, y, false, 0) or F.norm(F.sub(x, y), p, -1))
  end
  local squares = F.add(F.sum(F.square(a), -1, true), F.unsqueeze(F.sum(F.square(b), -1), -2))
  return (F._root(F.clamp(F.sub(squares, F.affine(F.matmul(a, b:transpose(-1, -2)), 2, 0)), 0)))
end

local squares = formula("rms_norm", 1, 0, function(f, t) return f.square(t) end)
local scaled = formula("rms_norm", 2, 1, function(f, t, square, eps)
  return f.mul(t, f.rsqrt(f.affine(square, 1, eps)))
end)
local weighted = formula("rms_norm", 3, 1, function(f, t, square, weight, eps)
  return f.mul(f.mul(t, f.rsqrt(f.affine(square, 1, eps))), weight)
end)
local function rms_norm(t, dims, weight, eps)
  local square = squares(MEAN, dims, true, t)
  if not weight then return (scaled(NONE, nil, false, t, square, eps)) end
  return (weighted(NONE, nil, false, t, square, weight, eps))
end
--- t divided by the root of the mean of its squares plus eps over the last n (1) dimensions, times weight (nil: 1).
--- eps: that of f32 (2^-23) or f64 (2^-52) if not given.
function F.rms_norm(t, n, weight, eps)
  local dims = {}
  for i = 1, n or 1 do
    dims[i] = -i
    if weight and (weight:dim() ~= (n or 1) or weight:size(-i) ~= t:size(-i)) then
      P.fail(("rms_norm: weight is %s, wanted the last %s of %s"):format(Tensor._text(weight),
        util.number_of(n or 1, "size"), Tensor._text(t)))
    end
  end
  return (F._in_f32(rms_norm, t, dims, weight, eps or (t:dtype() == "f64" and 2 ^ -52 or 2 ^ -23)))
end

--- softmax(scale q k^T + mask) v: q [..., n, D], k [..., m, D], v [..., m, V]. attn_mask: bool (true: may be seen) or
--- numbers that are added, broadcast to [..., n, m]; is_causal: row i sees columns 0..i; scale: 1 / sqrt(D) if not
--- given.
function F.scaled_dot_product_attention(q, k, v, attn_mask, is_causal, scale)
  scale = scale or 1 / math.sqrt(q:size(-1))
  if watch.call then return (spelled.scaled_dot_product_attention(q, k, v, attn_mask, is_causal, scale)) end
  check(C.peri_op_scaled_dot_product_attention(ptr(q), ptr(k), ptr(v), attn_mask and ptr(attn_mask) or nil,
    is_causal or false, scale, out))
  return (wrap(out[0]))
end

signature.check_each_one("", F, { "isinf", "logical_not", "selu", "mish", "log2", "log10", "exp2" }, "t: tensor")
signature.check_each_one("", F, { "logical_and", "logical_or", "logical_xor", "equal", "logaddexp" },
  "a: tensor, b: tensor")
signature.check("", F, { aminmax = "t: tensor, dim: dims?, keepdim: boolean?" }, 2)
signature.check_each("", F, { "std_mean", "var_mean" },
  "t: tensor, dim: dims?, keepdim: boolean?, correction: number?", 2)
signature.check_each_one("", F, { "isclose", "allclose" },
  "a: tensor, b: tensor, rtol: number?, atol: number?, equal_nan: boolean?")
signature.check_each_one("", F, { "addmm", "baddbmm" },
  "t: tensor, a: tensor, b: tensor, beta: number?, alpha: number?")
signature.check_one("", F, {
  nan_to_num = "t: tensor, nan: number?, posinf: number?, neginf: number?", logit = "t: tensor, eps: number?",
  elu = "t: tensor, alpha: number?", glu = "t: tensor, dim: dim?",
  addcmul = "t: tensor, a: tensor, b: tensor, value: number?", lerp = "a: tensor, b: tensor, weight: operand",
  diff = "t: tensor, n: count?, dim: dim?",
  pairwise_distance = "a: tensor, b: tensor, p: number?, eps: number?, keepdim: boolean?",
  tensordot = "a: tensor, b: tensor, dims: any",
  cdist = "a: tensor, b: tensor, p: number?", rms_norm = "t: tensor, n: count?, weight: tensor?, eps: number?",
  scaled_dot_product_attention =
  "q: tensor, k: tensor, v: tensor, attn_mask: tensor?, is_causal: boolean?, scale: number?",
})

signature.check_one("", F, {
  normalize = "t: tensor, p: number?, dim: dims?, eps: number?", logsumexp = "t: tensor, dim: dims?, keepdim: boolean?",
  nansum = "t: tensor, dim: dims?, keepdim: boolean?", nanmean = "t: tensor, dim: dims?, keepdim: boolean?",
  any = "t: tensor, dim: dims?, keepdim: boolean?", all = "t: tensor, dim: dims?, keepdim: boolean?",
  chunk = "t: tensor, n: count, dim: dim?", flatten = "t: tensor, first: dim?, last: dim?",
  one_hot = "ids: tensor, classes: count",
})
for _, name in ipairs { "nansum", "nanmean", "normalize", "logsumexp",
  "any", "all", "chunk", "flatten", "one_hot", "isinf", "nan_to_num",
  "logit", "elu", "logical_not", "logical_and", "logical_or", "logical_xor", "isclose", "allclose", "equal", "lerp",
  "addmm", "baddbmm", "diff", "glu", "selu", "mish", "log2", "log10", "exp2", "addcmul", "logaddexp", "aminmax",
  "std_mean", "var_mean" } do
  Tensor.methods[name] = F[name]
end

return F
