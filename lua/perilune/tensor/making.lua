-- making.lua: tensors made of numbers in a row, of another tensor's shape, and of random numbers: peri.linspace and
-- the like, with PyTorch's names. Random ones draw as peri.rand does: what comes after nn.manual_seed(s) is a function
-- of s and of the draws before.
local P = require "perilune.ffi"
local Tensor = require "perilune.tensor.core"
local F = require "perilune.tensor.ops"
local signature = require "perilune.signature"
local formula = require "perilune.tensor.formula"

local C, check, wrap, out, state = P.C, P.check, Tensor.wrap, Tensor.out, P.state
local NONE, SUM = P.C.PERI_LOSS_NONE, P.C.PERI_LOSS_SUM

--- `steps` numbers from start to stop, both included, at equal distances: f32 if no dtype is given.
function Tensor.linspace(start, stop, steps, dtype, device)
  dtype = dtype or "f32"
  if dtype ~= "f32" and dtype ~= "f64" then
    P.fail(("linspace: dtype is '%s', allowed: f32, f64"):format(dtype))
  end
  local t = Tensor.arange(0, steps, 1, dtype, device)
  if steps < 2 then return (F.affine(t, 1, start)) end
  t = F.affine(t, (stop - start) / (steps - 1), start)
  t:slice(1, steps - 1, steps):fill(stop)
  return t
end

--- Ones where the row's number is the column's, zeros elsewhere: [rows, columns], columns being rows if not given.
function Tensor.eye(rows, columns, dtype, device)
  local at, along = Tensor.arange(0, rows, 1, "i64", device), Tensor.arange(0, columns or rows, 1, "i64", device)
  return (F.eq(F.unsqueeze(at, 2), along):to(dtype or "f32"))
end

local function triangle_places(rows, columns, k, upper, device)
  check(C.peri_tensor_triangle_places(P.device(device), rows, columns or rows, k or 0, upper, out))
  return (wrap(out[0]))
end
--- The places (row, column) of a matrix from its diagonal k (0) on upwards, row by row: i64 [2, n]. columns: rows if
--- not given.
function Tensor.triu_indices(rows, columns, k, device) return (triangle_places(rows, columns, k, true, device)) end
--- Those from the diagonal on downwards.
function Tensor.tril_indices(rows, columns, k, device) return (triangle_places(rows, columns, k, false, device)) end

function Tensor.empty_like(t, dtype) return (Tensor.empty(t:shape(), dtype or t:dtype(), t:describe().device)) end
function Tensor.full_like(t, value, dtype) return (Tensor._filled(t, value, dtype and P.dtype(dtype))) end
function Tensor.zeros_like(t, dtype) return (Tensor.full_like(t, 0, dtype)) end
function Tensor.ones_like(t, dtype) return (Tensor.full_like(t, 1, dtype)) end
--- Numbers as rand's of t's shape, where t is: of t's dtype, or the one with this code.
local function drawn_like(t, code)
  local d = t:describe()
  check(C.peri_tensor_uniform(d.device, code or d.dtype, d.ndim, d.shape, 0, 1, state.seed, Tensor._next_stream(), out))
  return (wrap(out[0]))
end
function Tensor.rand_like(t, dtype) return (drawn_like(t, dtype and P.dtype(dtype))) end
function Tensor.randn_like(t, dtype)
  return (Tensor.randn(t:shape(), dtype or t:dtype(), t:describe().device))
end

local WORD = 2 ^ -24 -- what peri.rand's numbers are multiples of

--- f64 numbers from 0 to below 1 (of three words: to 1) of `words` of peri.rand's, one behind the other: for what is to
--- choose among more than 2^24, or by less than that.
local function fine(shape, device, words)
  local n, stream = Tensor._fill_dims("rand", shape), Tensor._next_stream()
  for _ = 2, words do Tensor._next_stream() end
  check(C.peri_tensor_uniform_words(P.device(device), n, Tensor._dims, words, state.seed, stream, out))
  return (wrap(out[0]))
end

-- The product may be rounded up to `range`.
local place_in = formula("randint", 1, 2, function(f, u, range, most)
  return f.clamp(f.floor(f.affine(u, range, 0)), 0, most)
end)
local MANY = 2 ^ 32 -- numbers from which on 48 bits favour some of them by more than 2^-16

--- Whole numbers, each of low .. high - 1 as likely as the others; i64 if no dtype is given.
function Tensor.randint(low, high, shape, dtype, device)
  local range = tonumber(high - low)
  if not (range >= 1 and range <= 2 ^ 53) then
    P.fail(("randint: from %s to below %s, wanted 1 to 2^53 numbers"):format(tostring(low), tostring(high)))
  end
  local places = place_in(NONE, nil, false, fine(shape, device, range > MANY and 3 or 2), range, range - 1)
  if low == 0 then return (places:to(dtype or "i64")) end
  places = F.add(places:to "i64", low)
  return (dtype and places:to(dtype) or places)
end

--- The numbers 0 .. n - 1 in an order by chance, all orders alike: i64.
function Tensor.randperm(n, device) return (F.argsort(fine({ n }, device, 2))) end

-- Whether first + second 2^-24 is below t, which has more bits than f32 would keep of that sum. The difference below is
-- exact wherever the second word decides.
local chosen = formula("bernoulli", 3, 0, function(f, t, first, second)
  return f.lt(f.affine(second, WORD, 0), f.sub(t, first))
end)
local improbable = formula("bernoulli", 1, 0, function(f, t)
  return f.affine(f.mul(f.ge(t, f.number(0)), f.le(t, f.number(1))), -1, 1)
end)
--- t, but for its gradient.
local function plain(t) return t:describe().requires_grad and t:detach() or t end
--- 1 with the probability that t has at that place, else 0: of t's dtype. Waits for t, whose numbers are 0..1.
function F.bernoulli(t)
  local dtype, first, second = t:dtype(), drawn_like(t, C.PERI_F32), drawn_like(t, C.PERI_F32)
  local p = Tensor._is_float(t) and plain(t) or t:to "f32"
  if improbable(SUM, nil, false, p):item() ~= 0 then
    P.fail(("bernoulli: %s with numbers that are no probabilities, allowed: 0..1"):format(Tensor._text(t)))
  end
  return (chosen(NONE, nil, false, p, first, second):to(dtype))
end

-- 1 for each weight that can be drawn, 0 for 0, NaN for those that are no weights.
local drawable = formula("multinomial", 1, 0, function(f, weight)
  local good = f.mul(f.ge(weight, f.number(0)), f.lt(weight, f.number(math.huge)))
  return f.where(good, f.gt(weight, f.number(0)), f.number(0 / 0))
end)
-- Exponential waiting times, of uniform numbers: the least one for what is no weight, so that it is drawn, the greatest
-- one for 0.
local waiting = formula("multinomial", 2, 0, function(f, weight, uniform)
  local time = f.div(f.affine(f.log(f.affine(uniform, -1, 1)), -1, 0), weight)
  local good = f.mul(f.ge(weight, f.number(0)), f.lt(weight, f.number(math.huge)))
  return f.where(good, f.where(f.eq(weight, f.number(0)), f.number(math.huge), time), f.number(-math.huge))
end)
--- An error unless `least` elements or more of each row of weights are above 0, and all are weights.
local function check_weights(weights, least)
  local found = F.amin(drawable(SUM, -1, false, weights:to "f64")):item()
  if found ~= found or found < least then
    local what = found ~= found and "weights that are negative, infinite or NaN"
      or ("a row with only %d above 0"):format(found)
    P.fail(("multinomial: %s, wanted finite ones from 0 on, %d or more of each row above 0"):format(what, least))
  end
end
--- For each row of weights (which need not add up to 1) the numbers of n columns, drawn with probabilities in
--- proportion to them: i64. Without `replacement` no column twice: as many as n must have a weight.
function F.multinomial(t, n, replacement)
  local dims = t:dim()
  if dims ~= 1 and dims ~= 2 or t:size(-1) == 0 then
    P.fail(("multinomial: %s, wanted one or two dimensions, the last one not empty"):format(Tensor._text(t)))
  end
  if t:numel() == 0 then return (Tensor.zeros({ 0, n }, "i64", t:describe().device)) end
  local weights = plain(t)
  local shape, device = t:shape(), t:describe().device
  if replacement then
    weights = weights:to "f64"
    check_weights(weights, 1)
    shape[dims] = n
    local sums = F.cumsum(weights, -1)
    local total = sums:slice(-1, -1)
    local drawn = F.mul(fine(shape, device, 2), total)
    return F.minimum(F.searchsorted(sums, drawn, true), F.sum(F.lt(sums, total), -1, true))
  end
  if n == 0 or n > shape[dims] then check_weights(weights, n) end
  -- the shortest times come first: the same as one draw after the other
  local times, places = F.topk(waiting(NONE, nil, false, weights, fine(shape, device, 2)), n, -1, false)
  local sum = F.sum(times):item()
  if sum - sum ~= 0 then check_weights(weights, n) end -- what was drawn is no weight, 0, or next to it
  return places
end

--- Views of each of some tensors of one dimension, of the shape of all their sizes: the i-th one changes along
--- dimension i ("ij", PyTorch's default) of them.
function F.meshgrid(tensors)
  local n, shape, grids = #tensors, {}, {}
  for i = 1, n do
    if not Tensor.is(tensors[i]) or tensors[i]:dim() ~= 1 then
      P.fail(("meshgrid: entry %d is %s, wanted a tensor of one dimension"):format(i, Tensor._text(tensors[i])))
    end
    shape[i] = tensors[i]:size(1)
  end
  for i = 1, n do
    local own = {}
    for d = 1, n do own[d] = d == i and shape[i] or 1 end
    grids[i] = tensors[i]:reshape(own):expand(shape)
  end
  return unpack(grids)
end

local noisy = formula("gumbel_softmax", 2, 1, function(f, t, uniform, scale)
  return f.affine(f.sub(t, f.log(f.affine(f.log(uniform), -1, 0))), scale, 0)
end)
--- softmax((t + noise) / tau) along dim (-1), noise of the Gumbel distribution, so that the largest element is each one
--- with its probability under softmax(t). hard: 1 for the largest and 0 for the others, with the gradient of the soft
--- one.
function F.gumbel_softmax(t, tau, hard, dim)
  tau, dim = tau or 1, dim or -1
  if not (tau > 0 and tau < math.huge) then
    P.fail(("gumbel_softmax: tau is %s, allowed: finite numbers above 0"):format(tau))
  end
  local dtype = t:dtype()
  local uniform = drawn_like(t, dtype == "f64" and C.PERI_F64 or C.PERI_F32)
  local soft = F.softmax(noisy(NONE, nil, false, t, uniform, 1 / tau):to(dtype), dim)
  if not hard then return soft end
  local kept = soft:detach()
  local _, place = F.max(kept, dim, true)
  local best = F.scatter(Tensor.zeros_like(kept), dim, place, 1)
  return (F.add(best, F.sub(soft, kept)))
end

-- Of t's dtype, where t is, if not said otherwise.
local methods = Tensor.methods
local function device_of(t, device) return device or t:describe().device end
function methods.new_empty(t, shape, dtype, device)
  return (Tensor.empty(shape, dtype or t:dtype(), device_of(t, device)))
end
function methods.new_full(t, shape, value, dtype, device)
  return (Tensor.full(shape, value, dtype or t:dtype(), device_of(t, device)))
end
function methods.new_zeros(t, shape, dtype, device) return (methods.new_full(t, shape, 0, dtype, device)) end
function methods.new_ones(t, shape, dtype, device) return (methods.new_full(t, shape, 1, dtype, device)) end
--- As peri.tensor.
function methods.new_tensor(t, data, dtype, device)
  return (Tensor._named_tensor("new_tensor", data, dtype or t:dtype(), device or t:device()))
end

signature.check_one("", Tensor, {
  linspace = "start: number, stop: number, steps: count, dtype: dtype?, device: device?",
  eye = "rows: count, columns: count?, dtype: dtype?, device: device?",
  full_like = "t: tensor, value: number, dtype: dtype?",
  randint = "low: integer, high: integer, shape: list, dtype: dtype?, device: device?",
  randperm = "n: count, device: device?",
})
signature.check_each_one("", Tensor, { "triu_indices", "tril_indices" },
  "rows: count, columns: count?, k: integer?, device: device?")
signature.check_each_one("", Tensor, { "zeros_like", "ones_like", "empty_like", "rand_like", "randn_like" },
  "t: tensor, dtype: dtype?")
signature.check_each_one("tensor:", methods, { "new_empty", "new_zeros", "new_ones" },
  "self: tensor, shape: list, dtype: dtype?, device: device?")
signature.check_one("tensor:", methods, {
  new_full = "self: tensor, shape: list, value: scalar, dtype: dtype?, device: device?",
  new_tensor = "self: tensor, data: any, dtype: dtype?, device: device?",
})
signature.check("", F, { meshgrid = "tensors: list" })
signature.check_one("", F, {
  bernoulli = "t: tensor", multinomial = "t: tensor, n: count, replacement: boolean?",
  gumbel_softmax = "t: tensor, tau: number?, hard: boolean?, dim: dim?",
})
for _, name in ipairs { "bernoulli", "multinomial", "gumbel_softmax" } do Tensor.methods[name] = F[name] end

return Tensor
