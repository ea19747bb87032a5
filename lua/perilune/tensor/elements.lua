-- elements.lua: functions that compare elements, choose, pick and sort them, and reductions beside sums: methods of
-- tensors and members of nn.functional, with PyTorch's names and meaning. Dimensions count from 1 (-1 is the last),
-- elements from 0. Where PyTorch's result has a gradient, so has this one.
local ffi = require "ffi"
local P = require "perilune.ffi"
local Tensor = require "perilune.tensor.core"
local ops = require "perilune.tensor.ops"
local signature = require "perilune.signature"
local formula = require "perilune.tensor.formula"
local C, check, wrap, ptr, out = P.C, P.check, Tensor.wrap, Tensor.ptr, Tensor.out
local istype, type = ffi.istype, type

local M = ops
local out2 = ffi.new "peri_tensor *[1]"
local dims = ffi.new "int32_t[8]"
local int64, uint64 = ffi.typeof "int64_t", ffi.typeof "uint64_t"
local NONE, SUM = C.PERI_LOSS_NONE, C.PERI_LOSS_SUM

local function dimension(d) return d > 0 and d - 1 or d end

local function fill_dims(dim)
  if not dim then return 0 end
  if type(dim) == "number" then
    dims[0] = dimension(dim)
    return 1
  end
  for i = 1, #dim do dims[i - 1] = dimension(dim[i]) end
  return #dim
end

--- Both results of an operation. Callers end with `local values, places = both() return values, places`, no tail call.
local function both()
  local second = out2[0]
  return wrap(out[0]), wrap(second)
end

-- -- comparing: bool tensors ------------------------------------------------------------------------------------------

local EXACT = 2 ^ 53

local function compare(t, op, x)
  if istype(int64, x) or istype(uint64, x) then
    local number = tonumber(x) -- from 2^53 on it may be rounded, which only i64 can tell
    if number < EXACT and number > -EXACT or t:describe().dtype ~= C.PERI_I64 then x = number
    else x = Tensor._number(x, t) end
  elseif type(x) == "number" and (x >= EXACT or x <= -EXACT) and x - x == 0 and t:dtype() == "i64" then
    P.fail(("compare: %.17g with i64: a Lua number from 2^53 on may have been rounded; write it with LL "
      .. "(9007199254740993LL)"):format(x))
  end
  if type(x) == "number" then check(C.peri_op_compare(ptr(t), op, nil, x, out))
  else check(C.peri_op_compare(ptr(t), op, ptr(x), 0, out)) end
  return (wrap(out[0]))
end

--- t == x for each element, x a tensor that broadcasts with t, or a number.
function M.eq(t, x) return (compare(t, C.PERI_COMPARE_EQ, x)) end
function M.ne(t, x) return (compare(t, C.PERI_COMPARE_NE, x)) end
function M.lt(t, x) return (compare(t, C.PERI_COMPARE_LT, x)) end
function M.le(t, x) return (compare(t, C.PERI_COMPARE_LE, x)) end
function M.gt(t, x) return (compare(t, C.PERI_COMPARE_GT, x)) end
function M.ge(t, x) return (compare(t, C.PERI_COMPARE_GE, x)) end
function M.isnan(t) return (compare(t, C.PERI_COMPARE_NE, t)) end
--- Neither NaN nor an infinity.
function M.isfinite(t)
  if not Tensor._is_float(t) then return (M.eq(t, t)) end
  check(C.peri_op_compare(ptr(M.sub(t, t)), C.PERI_COMPARE_EQ, nil, 0, out))
  return (wrap(out[0]))
end

-- -- choosing ---------------------------------------------------------------------------------------------------------

local none = {}

--- Elements of a where the bool tensor `condition` is true, else of b; numbers stand for themselves, and all shapes
--- broadcast.
function M.where(condition, a, b)
  if Tensor._is_number(a) and Tensor._is_number(b) then
    local exact = type(a) == "cdata" or type(b) == "cdata"
    local like = Tensor.full(none, 0, exact and "i64" or "f32", condition:device())
    a, b = Tensor._number(a, like), Tensor._number(b, like)
  elseif Tensor._is_number(a) then a = Tensor._number(a, b)
  elseif Tensor._is_number(b) then b = Tensor._number(b, a) end
  check(C.peri_op_where(ptr(condition), ptr(a), ptr(b), out))
  return (wrap(out[0]))
end
--- t with `value` where the bool tensor `mask` is true: of t's dtype, which must hold it.
function M.masked_fill(t, mask, value)
  if type(value) == "number" then value = Tensor._scalar(value, t)
  else value = Tensor.tensor({ value }, t:dtype(), t:device(), none) end
  check(C.peri_op_where(ptr(mask), ptr(value), ptr(t), out))
  return (wrap(out[0]))
end
--- t with what is below `min` raised to it, and what is above `max` lowered to it; either may be nil. NaN stays.
function M.clamp(t, min, max)
  if not min and not max then P.fail "clamp: min and max are nil, wanted at least one of them" end
  if type(min) == "cdata" or type(max) == "cdata" then -- 64-bit integers, which a double may not hold
    if min then t = M.maximum(t, Tensor._number(min, t)) end
    return (max and M.minimum(t, Tensor._number(max, t)) or t)
  end
  check(C.peri_op_clamp(ptr(t), min or -math.huge, max or math.huge, out))
  return (wrap(out[0]))
end
--- The larger of a and b for each element, NaN if either is.
function M.maximum(a, b)
  check(C.peri_op_maximum(ptr(a), ptr(b), out))
  return (wrap(out[0]))
end
function M.minimum(a, b)
  check(C.peri_op_minimum(ptr(a), ptr(b), out))
  return (wrap(out[0]))
end
--- A copy in memory of its own, through which gradients go.
function M.clone(t)
  check(C.peri_tensor_clone(ptr(t), out))
  return (wrap(out[0]))
end

--- The shape of one element with as many dimensions as t: what is kept of all of them.
function Tensor._ones_shape(t)
  local shape = {}
  for d = 1, t:dim() do shape[d] = 1 end
  return shape
end
local of_a, of_b = P.struct "peri_tensor_info", P.struct "peri_tensor_info"
--- Whether two tensors have one shape.
function Tensor._same_shape(a, b)
  C.peri_tensor_describe(ptr(a), of_a)
  C.peri_tensor_describe(ptr(b), of_b)
  local n = of_a.ndim
  if of_b.ndim ~= n then return false end
  for d = 0, n - 1 do
    if of_a.shape[d] ~= of_b.shape[d] then return false end
  end
  return true
end
--- An error unless a and b, the arguments `name_of_a` and `name_of_b`, have the same shape: what broadcasts would be
--- other numbers than are meant ([B, 1] with [B]: [B, B]).
function Tensor._alike(func, name_of_a, a, name_of_b, b)
  if Tensor._same_shape(a, b) then return end
  P.fail(("%s: %s is %s, %s is %s, wanted the same shape"):format(func, name_of_a, Tensor._text(a), name_of_b,
    Tensor._text(b)))
end

-- -- picking ----------------------------------------------------------------------------------------------------------

--- Element (i, j) of the result is t[index[i][j]][j] for dim 1, t[i][index[i][j]] for dim 2, and so on.
function M.gather(t, dim, index)
  check(C.peri_op_gather(ptr(t), dimension(dim), ptr(index), out))
  return (wrap(out[0]))
end
--- The slices of t along `dim` that a list of ids (a tensor of one dimension) names.
function M.index_select(t, dim, ids)
  local first = dim == 1
  check(C.peri_sparse_index_select(ptr(first and t or t:transpose(1, dim)), ptr(ids), out))
  local picked = wrap(out[0])
  return first and picked or picked:transpose(1, dim)
end
--- Element i (from 0; negative: from the end) of dimension `dim`, which is gone from the result: a view.
function M.select(t, dim, i)
  check(C.peri_tensor_select(ptr(t), dimension(dim), i, out))
  return (wrap(out[0]))
end
--- A view without dimensions of size 1: without dimension `dim`, if it has size 1, or without all of them (nil).
function M.squeeze(t, dim)
  if dim then
    check(C.peri_tensor_squeeze(ptr(t), dimension(dim), out))
    return (wrap(out[0]))
  end
  for d = t:dim(), 1, -1 do
    if t:size(d) == 1 then t = M.squeeze(t, d) end
  end
  return t
end
--- A view with a new dimension `dim` of size 1.
function M.unsqueeze(t, dim)
  check(C.peri_tensor_unsqueeze(ptr(t), dimension(dim), out))
  return (wrap(out[0]))
end
--- A view whose dimension k is dimension order[k] of t.
function M.permute(t, order)
  local n = t:dim()
  local at, seen = {}, {}
  if #order ~= n then
    P.fail(("permute: %d dimensions of %s, wanted all %d of them"):format(#order, Tensor._text(t), n))
  end
  for k = 1, n do
    local d = order[k] < 0 and order[k] + n + 1 or order[k]
    if d < 1 or d > n or seen[d] then
      P.fail(("permute: dimension %d of %s, wanted each once"):format(order[k], Tensor._text(t)))
    end
    at[k], seen[d] = d, true
  end
  local view, place = t, {}
  for k = 1, n do place[k] = k end -- place[k]: the dimension of t that stands at k
  for k = 1, n do
    local from = k
    while place[from] ~= at[k] do from = from + 1 end
    if from ~= k then
      view = view:transpose(k, from)
      place[k], place[from] = place[from], place[k]
    end
  end
  return view
end

-- -- sorting ----------------------------------------------------------------------------------------------------------

--- The elements in rising order (`descending`: in falling order) along dim (-1), and their places (i64). Equal ones
--- keep their order; NaN is larger than all numbers.
function M.sort(t, dim, descending)
  check(C.peri_op_sort(ptr(t), dimension(dim or -1), descending or false, -1, out, out2))
  local values, places = both()
  return values, places
end
function M.argsort(t, dim, descending)
  local values, places = M.sort(t, dim, descending)
  values:release()
  return places
end
--- The k largest elements along dim (-1) in falling order, and their places; `largest` false: the k smallest, rising.
function M.topk(t, k, dim, largest)
  check(C.peri_op_sort(ptr(t), dimension(dim or -1), largest ~= false, k, out, out2))
  local values, places = both()
  return values, places
end

-- -- reductions -------------------------------------------------------------------------------------------------------

--- The largest element over a dimension, a list of dimensions, or all (nil); equal ones share the gradient.
function M.amax(t, dim, keepdim)
  check(C.peri_op_amax(ptr(t), dims, fill_dims(dim), keepdim or false, false, out))
  return (wrap(out[0]))
end
function M.amin(t, dim, keepdim)
  check(C.peri_op_amax(ptr(t), dims, fill_dims(dim), keepdim or false, true, out))
  return (wrap(out[0]))
end
--- Three functions, as in PyTorch: of all elements (no dim): the largest one; along a dimension: the largest elements
--- and their places (i64, from 0; of equal ones one that has it gets the gradient); with a tensor: maximum.
function M.max(t, dim, keepdim)
  if not dim then return (M.amax(t)) end
  if type(dim) ~= "number" then return (M.maximum(t, dim)) end
  check(C.peri_op_max(ptr(t), dimension(dim), keepdim or false, out, out2))
  local values, places = both()
  return values, places
end
function M.min(t, dim, keepdim)
  if not dim then return (M.amin(t)) end
  if type(dim) ~= "number" then return (M.minimum(t, dim)) end
  check(C.peri_op_min(ptr(t), dimension(dim), keepdim or false, out, out2))
  local values, places = both()
  return values, places
end
local function place(t, dim, keepdim, extreme)
  local values, places = extreme(dim and t or t:reshape(-1), dim or 1, keepdim)
  values:release()
  if dim or not keepdim then return places end
  return (places:reshape(Tensor._ones_shape(t)))
end
--- The place of the largest element along dim, or, without dim, among all in row-major order; i64, the first of equal
--- ones.
function M.argmax(t, dim, keepdim) return (place(t, dim, keepdim, M.max)) end
function M.argmin(t, dim, keepdim) return (place(t, dim, keepdim, M.min)) end

--- How many elements a reduction takes together.
local function count(t, dim)
  if not dim or t:dim() == 0 then return t:numel() end
  if type(dim) == "number" then return t:size(dim) end
  local n = 1
  for i = 1, #dim do n = n * t:size(dim[i]) end
  return n
end
--- f(t, ...) of a 16-bit tensor in f32: squares and their sums pass 65504, the largest f16, long before their roots do.
--- In a region of autocast the result stays f32, as that of squares does.
local function in_f32(f, t, ...)
  local name = t:dtype()
  if name ~= "f16" and name ~= "bf16" then return (f(t, ...)) end
  local result = f(t:to "f32", ...)
  return (P.state.autocast and result or result:to(name))
end

M._in_f32 = in_f32 -- of this layer
--- f(a, b, ...) of two tensors likewise.
function M._both_in_f32(f, a, b, ...)
  local name, other = a:dtype(), b:dtype()
  local narrow, narrow_b = name == "f16" or name == "bf16", other == "f16" or other == "bf16"
  if not (narrow or narrow_b) then return (f(a, b, ...)) end
  local result = f(narrow and a:to "f32" or a, narrow_b and b:to "f32" or b, ...)
  return (name == other and not P.state.autocast and result:to(name) or result)
end

local squared_distance = formula("var", 2, 0, function(f, t, mean) return f.square(f.sub(t, mean)) end)
local scaled_root = formula("std", 1, 1, function(f, t, scale) return f.root(f.affine(t, scale, 0)) end)

--- The squared distances from the mean, added up, and what to multiply that by.
local function distances(t, dim, keepdim, correction)
  local sum = squared_distance(SUM, dim, keepdim, t, M.mean(t, dim, true))
  return sum, 1 / math.max(0, count(t, dim) - (correction or 1))
end
local function variance(t, dim, keepdim, correction)
  local sum, scale = distances(t, dim, keepdim, correction)
  return (M.affine(sum, scale, 0))
end
--- Of this layer: the square root, whose gradient is 0 where it is 0.
function M._root(t)
  check(C.peri_op_root(ptr(t), out))
  return (wrap(out[0]))
end
local function deviation(t, dim, keepdim, correction)
  local sum, scale = distances(t, dim, keepdim, correction)
  return (scaled_root(NONE, nil, false, sum, scale))
end
--- The sum of squared distances from the mean over dim (as in sum), divided by n - correction (1).
function M.var(t, dim, keepdim, correction) return (in_f32(variance, t, dim, keepdim, correction)) end
--- The square root of var.
function M.std(t, dim, keepdim, correction) return (in_f32(deviation, t, dim, keepdim, correction)) end

local squares = formula("norm", 1, 0, function(f, t) return f.square(t) end)
local magnitudes = formula("norm", 1, 0, function(f, t) return f.abs(t) end)
--- |t| ^ p. Below p = 1 the derivative at 0 is infinite, and the gradient is 0, as PyTorch's.
local powers = formula("norm", 1, 1, function(f, t, p)
  local size = f.abs(t)
  local zero = f.eq(size, f.number(0))
  return f.where(zero, f.number(0), f.pow(f.where(zero, f.number(1), size), p))
end)
local others_than_0 = formula("norm", 1, 0, function(f, t) return f.ne(t, f.number(0)) end)
--- sum ^ (1 / p). Where the sum is 0 the power's derivative is infinite, and the gradient is 0.
local power_root = formula("norm", 1, 1, function(f, sum, inverse)
  local zero = f.eq(sum, f.number(0))
  return f.where(zero, f.number(0), f.pow(f.where(zero, f.number(1), sum), inverse))
end)
local function norm(t, p, dim, keepdim)
  if p == 2 then return (M._root(squares(SUM, dim, keepdim, t))) end
  if p == 1 then return (magnitudes(SUM, dim, keepdim, t)) end
  if p == math.huge then return (M.amax(M.abs(t), dim, keepdim)) end
  if p == -math.huge then return (M.amin(M.abs(t), dim, keepdim)) end
  if p == 0 then return (others_than_0(SUM, dim, keepdim, t)) end
  if p < 0 or p ~= p then P.fail(("norm: p is %g, allowed: numbers >= 0, math.huge, -math.huge"):format(p)) end
  return (power_root(NONE, nil, false, powers(SUM, dim, keepdim, t, p), 1 / p))
end
--- The p-norm (2) over dim, as in sum: any number above 0, 0 (elements that are not 0), math.huge and -math.huge
--- (largest, smallest |x|).
function M.norm(t, p, dim, keepdim)
  if not Tensor._is_float(t) then
    P.fail(("norm: %s, allowed: floats; cast it with t:to \"f32\""):format(Tensor._text(t)))
  end
  return (in_f32(norm, t, p or 2, dim, keepdim))
end
--- t[1] + ... + t[i] along dim; of integers and bool in i64.
function M.cumsum(t, dim)
  check(C.peri_op_running_sum(ptr(t), dimension(dim), out))
  return (wrap(out[0]))
end

--- t[1] * ... * t[i] along dim; of integers and bool in i64.
function M.cumprod(t, dim)
  check(C.peri_op_running_product(ptr(t), dimension(dim), out))
  return (wrap(out[0]))
end

--- The largest of t[1], ..., t[i] along dim, and their places (i64, from 0; of equal ones the last).
function M.cummax(t, dim)
  check(C.peri_op_cummax(ptr(t), dimension(dim), out, out2))
  local values, places = both()
  return values, places
end
function M.cummin(t, dim)
  check(C.peri_op_cummin(ptr(t), dimension(dim), out, out2))
  local values, places = both()
  return values, places
end

-- -- making -----------------------------------------------------------------------------------------------------------

local function integer_64(what, x)
  if not (signature.is("integer", x) and (x < 0 or x <= 9223372036854775807LL)) then
    P.fail(("arange: %s is %s, allowed beside 64-bit integers: whole numbers that fit i64"):format(what,
      signature.text(x)))
  end
  return ffi.cast("int64_t", x)
end

--- arange where one of the numbers is a 64-bit integer, which a Lua number may not hold: all of them are.
local function arange_64(start, stop, step, dtype, device)
  start, stop, step = integer_64("start", start), integer_64("stop", stop), integer_64("step", step)
  local apart, by = ffi.cast("uint64_t", stop) - start, ffi.cast("uint64_t", step) -- modulo 2^64
  if step < 0 then apart, by = -apart, -by end
  local n = (apart == 0 or step == 0) and 0 or tonumber((apart - 1) / by) + 1
  if step == 0 or stop ~= start and (stop > start) ~= (step > 0) or n >= 2 ^ 53 then
    P.fail(("arange: from %s to %s by %s, wanted a stop in the direction of the step, after less than 2^53 of "
      .. "them"):format(tostring(start), tostring(stop), tostring(step)))
  end
  local last = start + step * math.max(n - 1, 0)
  local function fits(x) return x >= -2 ^ 31 and x < 2 ^ 31 end
  if P.dtype(dtype or "i64") == C.PERI_I32 and n > 0 and not (fits(start) and fits(last)) then
    P.fail(("arange: numbers from %s to %s in i32, allowed: those that fit it"):format(tostring(start), tostring(last)))
  end
  return (M.add(M.mul(Tensor.arange(0, n, 1, "i64", device), step), start):to(dtype or "i64"))
end

--- start, start + step, ... below `stop` (above, if step is negative): arange(5), arange(2, 8), arange(0, 1, 0.25). i64
--- if all three are whole numbers and no dtype is given, else f32. 64-bit integers are taken exactly.
function Tensor.arange(start, stop, step, dtype, device)
  if not stop then start, stop = 0, start end
  step = step or 1
  if type(start) == "cdata" or type(stop) == "cdata" or type(step) == "cdata" then
    return arange_64(start, stop, step, dtype, device)
  end
  if step == 0 or step ~= step then P.fail(("arange: step is %s, allowed: numbers but 0"):format(tostring(step))) end
  local n = math.ceil((stop - start) / step)
  if n ~= n or n >= 2 ^ 53 or n < 0 then
    P.fail(("arange: from %s to %s by %s, wanted a stop in the direction of the step"):format(P.numeral(start),
      P.numeral(stop), P.numeral(step)))
  end
  local all_whole = start == math.floor(start) and stop == math.floor(stop) and step == math.floor(step)
  check(C.peri_tensor_arange(P.device(device), P.dtype(dtype or all_whole and "i64" or "f32"), start, step, n, out))
  return (wrap(out[0]))
end

-- Numbers of rand and randn: streams of the rank's seed that neither parameters (0, 1, ...) nor dropout (from 2^52 on)
-- use.
local FIRST_STREAM = 2 ^ 51
local state = P.state
P.own { seed = 0, numbers_drawn = 0 } -- of random numbers
function Tensor._next_stream()
  local n = state.numbers_drawn
  state.numbers_drawn = n + 1
  return FIRST_STREAM + n
end
--- Uniform numbers in [0, 1) of a shape. nn.manual_seed sets the seed; ranks with one seed draw the same numbers.
function Tensor.rand(shape, dtype, device)
  return (Tensor.uniform(shape, 0, 1, state.seed, Tensor._next_stream(), dtype, device))
end
--- Normal numbers of mean 0 and deviation 1.
function Tensor.randn(shape, dtype, device)
  return (Tensor.normal(shape, 0, 1, state.seed, Tensor._next_stream(), dtype, device))
end

-- -- what they take ---------------------------------------------------------------------------------------------------

signature.kind("dim_or_tensor", "a dimension (1, 2, ..., or -1, -2, ... from the end) or a tensor", function(x)
  return Tensor.is_live(x) or signature.is("dim", x)
end)
signature.list_of("order", "a list of dimensions", "dim")

signature.check_each_one("", M, { "eq", "ne", "lt", "le", "gt", "ge" }, "t: tensor, x: operand")
signature.check_each_one("", M, { "isnan", "isfinite", "clone" }, "t: tensor")
signature.check_each_one("", M, { "maximum", "minimum" }, "a: tensor, b: tensor")
signature.check_each_one("", M, { "amax", "amin" }, "t: tensor, dim: dims?, keepdim: boolean?")
signature.check_each("", M, { "max", "min" }, "t: tensor, dim: dim_or_tensor?, keepdim: boolean?", 2)
signature.check_each_one("", M, { "argmax", "argmin" }, "t: tensor, dim: dim?, keepdim: boolean?")
signature.check("", M, { sort = "t: tensor, dim: dim?, descending: boolean?",
  topk = "t: tensor, k: count, dim: dim?, largest: boolean?" }, 2)
signature.check_each_one("", M, { "var", "std" }, "t: tensor, dim: dims?, keepdim: boolean?, correction: number?")
signature.check_each("", M, { "cummax", "cummin" }, "t: tensor, dim: dim", 2)
signature.check_one("", M, {
  where = "condition: tensor, a: operand, b: operand", masked_fill = "t: tensor, mask: tensor, value: scalar",
  clamp = "t: tensor, min: scalar?, max: scalar?", _root = "t: tensor", gather = "t: tensor, dim: dim, index: tensor",
  index_select = "t: tensor, dim: dim, ids: tensor", select = "t: tensor, dim: dim, i: integer",
  squeeze = "t: tensor, dim: dim?", unsqueeze = "t: tensor, dim: dim", permute = "t: tensor, order: order",
  argsort = "t: tensor, dim: dim?, descending: boolean?",
  norm = "t: tensor, p: number?, dim: dims?, keepdim: boolean?", cumsum = "t: tensor, dim: dim",
  cumprod = "t: tensor, dim: dim",
})
signature.check_one("", Tensor, {
  arange = "start: scalar, stop: scalar?, step: scalar?, dtype: dtype?, device: device?",
  rand = "shape: list, dtype: dtype?, device: device?", randn = "shape: list, dtype: dtype?, device: device?",
})

for _, name in ipairs { "eq", "ne", "lt", "le", "gt", "ge", "isnan", "isfinite", "masked_fill", "clamp", "maximum",
  "minimum", "clone", "gather", "index_select", "select", "squeeze", "unsqueeze", "permute", "sort", "argsort", "topk",
  "amax", "amin", "max", "min", "argmax", "argmin", "var", "std", "norm", "cumsum", "cumprod",
  "cummax", "cummin" } do
  Tensor.methods[name] = M[name]
end

return M
