-- ops.lua: dense operations on tensors, one FFI call each. They are methods of tensors too: t:relu(), t + u, 2 * t.
-- Dimensions count from 1, negative ones from the end. `t` is always a tensor, options follow.
local ffi = require "ffi"
local P = require "perilune.ffi"
local errors = require "perilune.errors"
local util = require "perilune.util"
local Tensor = require "perilune.tensor.core"
local signature = require "perilune.signature"
local C, check, wrap, ptr = P.C, P.check, Tensor.wrap, Tensor.ptr
local istype, type = ffi.istype, type

local M = {}
local out = Tensor.out
local dims = ffi.new "int32_t[8]"

--- A dimension as C counts it.
local function dimension(d) return d > 0 and d - 1 or d end

local function optional(t) return t and ptr(t) or nil end

-- -- functions of one number ------------------------------------------------------------------------------------------

function M.relu(t) check(C.peri_op_relu(ptr(t), out)) return (wrap(out[0])) end
function M.sigmoid(t) check(C.peri_op_sigmoid(ptr(t), out)) return (wrap(out[0])) end
function M.tanh(t) check(C.peri_op_tanh(ptr(t), out)) return (wrap(out[0])) end
function M.silu(t) check(C.peri_op_silu(ptr(t), out)) return (wrap(out[0])) end
function M.gelu(t) check(C.peri_op_gelu(ptr(t), out)) return (wrap(out[0])) end
function M.softplus(t) check(C.peri_op_softplus(ptr(t), out)) return (wrap(out[0])) end
function M.logsigmoid(t) check(C.peri_op_logsigmoid(ptr(t), out)) return (wrap(out[0])) end
--- slope of the negative side: 0.01
function M.leaky_relu(t, slope) check(C.peri_op_leaky_relu(ptr(t), slope or 0.01, out)) return (wrap(out[0])) end
function M.exp(t) check(C.peri_op_exp(ptr(t), out)) return (wrap(out[0])) end
function M.log(t) check(C.peri_op_log(ptr(t), out)) return (wrap(out[0])) end
function M.sqrt(t) check(C.peri_op_sqrt(ptr(t), out)) return (wrap(out[0])) end
function M.abs(t) check(C.peri_op_abs(ptr(t), out)) return (wrap(out[0])) end
function M.log1p(t) check(C.peri_op_log1p(ptr(t), out)) return (wrap(out[0])) end
function M.expm1(t) check(C.peri_op_expm1(ptr(t), out)) return (wrap(out[0])) end
function M.rsqrt(t) check(C.peri_op_rsqrt(ptr(t), out)) return (wrap(out[0])) end
function M.sin(t) check(C.peri_op_sin(ptr(t), out)) return (wrap(out[0])) end
function M.cos(t) check(C.peri_op_cos(ptr(t), out)) return (wrap(out[0])) end
function M.erf(t) check(C.peri_op_erf(ptr(t), out)) return (wrap(out[0])) end
function M.floor(t) check(C.peri_op_floor(ptr(t), out)) return (wrap(out[0])) end
function M.ceil(t) check(C.peri_op_ceil(ptr(t), out)) return (wrap(out[0])) end
function M.round(t) check(C.peri_op_round(ptr(t), out)) return (wrap(out[0])) end
function M.trunc(t) check(C.peri_op_trunc(ptr(t), out)) return (wrap(out[0])) end
function M.sign(t) check(C.peri_op_sign(ptr(t), out)) return (wrap(out[0])) end
function M.square(t) check(C.peri_op_square(ptr(t), out)) return (wrap(out[0])) end
--- scale * t + shift
function M.affine(t, scale, shift) check(C.peri_op_affine(ptr(t), scale, shift or 0, out)) return (wrap(out[0])) end
function M.neg(t)
  if t:describe().dtype == C.PERI_BOOL then P.fail 'neg: t is bool; t:eq(0) is "not", t:to "i64" is numbers' end
  return (M.affine(t, -1, 0))
end
--- numerator / t
function M.reciprocal(t, numerator) check(C.peri_op_reciprocal(ptr(t), numerator or 1, out)) return (wrap(out[0])) end

-- -- arithmetic: either side may be a number --------------------------------------------------------------------------

local ctype, int64, uint64 = Tensor.ctype, ffi.typeof "int64_t", ffi.typeof "uint64_t"
local none, floats = {}, {}
for _, name in ipairs { "f64", "f32", "f16", "bf16", "c64", "c128" } do floats[P.dtype(name)] = true end

--- Whether its elements are no integers and no bool.
function Tensor._is_float(t) return floats[t:describe().dtype] == true end

--- An error unless all elements of t are whole numbers. Waits for floats, to look at them.
function Tensor._check_integers(func, t)
  if Tensor._is_float(t) and t:ne(t:floor()):sum():item() > 0 then
    P.fail(("%s: %s has elements that are no whole numbers"):format(func, Tensor._text(t)))
  end
end

--- The number x, a Lua number or a 64-bit integer, as a tensor without dimensions beside t: of t's dtype if that can
--- hold it, else of the next kind: i64 beside bool, f32 beside integers.
function Tensor._number(x, t)
  if Tensor._is_number(t) then
    P.fail(("%s and %s are both numbers, wanted at least one tensor"):format(errors.kind(x), errors.kind(t)))
  end
  local code = t:describe().dtype
  if floats[code] then return (Tensor._scalar(tonumber(x), t)) end
  local fraction = type(x) == "number" and (x ~= math.floor(x) or x - x ~= 0)
  code = fraction and C.PERI_F32 or code == C.PERI_BOOL and C.PERI_I64 or code
  if type(x) == "number" then return (Tensor._scalar(x, t, code)) end
  return (Tensor.tensor({ x }, P.dtype_names[code], t:device(), none))
end

--- Both operands of a function of two tensors: 64-bit integers become tensors.
local function operands(a, b)
  if istype(int64, b) or istype(uint64, b) then return a, Tensor._number(b, util.resolve(a)) end
  if istype(int64, a) or istype(uint64, a) then return Tensor._number(a, util.resolve(b)), b end
  return a, b
end

function M.add(a, b)
  if type(b) == "number" then return (M.affine(a, 1, b)) end
  if type(a) == "number" then return (M.affine(b, 1, a)) end
  if not (istype(ctype, a) and istype(ctype, b)) then a, b = operands(a, b) end
  check(C.peri_op_add(ptr(a), ptr(b), out))
  return (wrap(out[0]))
end
function M.sub(a, b)
  if type(b) == "number" then return (M.affine(a, 1, -b)) end
  if type(a) == "number" then return (M.affine(b, -1, a)) end
  if not (istype(ctype, a) and istype(ctype, b)) then a, b = operands(a, b) end
  check(C.peri_op_sub(ptr(a), ptr(b), out))
  return (wrap(out[0]))
end
function M.mul(a, b)
  if type(b) == "number" then return (M.affine(a, b, 0)) end
  if type(a) == "number" then return (M.affine(b, a, 0)) end
  if not (istype(ctype, a) and istype(ctype, b)) then a, b = operands(a, b) end
  check(C.peri_op_mul(ptr(a), ptr(b), out))
  return (wrap(out[0]))
end
function M.div(a, b)
  if type(a) == "number" then return (M.reciprocal(b, a)) end
  if type(b) == "number" then
    if not istype(ctype, a) then operands(a, b) end -- refuses a number
    if Tensor._is_float(a) then return (M.affine(a, 1 / b, 0)) end
    b = Tensor._scalar(b, a, C.PERI_F32)
  elseif not (istype(ctype, a) and istype(ctype, b)) then a, b = operands(a, b) end
  check(C.peri_op_div(ptr(a), ptr(b), out))
  return (wrap(out[0]))
end
--- A function of two operands: by_number where the second one is a Lua number, else of_tensors, for which numbers
--- become tensors.
local function by_both(by_number, of_tensors)
  return function(a, b)
    if type(b) == "number" and istype(ctype, a) then
      check(by_number(ptr(a), b, out))
      return (wrap(out[0]))
    end
    if type(a) == "number" then a = Tensor._number(a, b) elseif type(b) == "number" then b = Tensor._number(b, a)
    else a, b = operands(a, b) end
    check(of_tensors(ptr(a), ptr(b), out))
    return (wrap(out[0]))
  end
end
--- t to the power of exponent: t ^ exponent. Either side may be a number.
M.pow = by_both(C.peri_op_pow, C.peri_op_power)
--- a / b rounded down; either side may be a number. Divisors of integers are not 0.
M.floor_divide = by_both(C.peri_op_floor_divide_number, C.peri_op_floor_divide)
--- a - b * floor_divide(a, b), which has the sign of b: a % b.
M.remainder = by_both(C.peri_op_remainder_number, C.peri_op_remainder)
--- What C's fmod leaves of a / b, which has the sign of a.
M.fmod = by_both(C.peri_op_fmod_number, C.peri_op_fmod)
--- a * b + c, all of one shape
function M.muladd(a, b, c)
  check(C.peri_op_muladd(ptr(a), ptr(b), ptr(c), out))
  return (wrap(out[0]))
end

-- -- products ---------------------------------------------------------------------------------------------------------

--- Names of the activations that a linear layer can fuse.
M.activations = { none = C.PERI_ACTIVATION_NONE, relu = C.PERI_ACTIVATION_RELU, sigmoid = C.PERI_ACTIVATION_SIGMOID,
  tanh = C.PERI_ACTIVATION_TANH }

--- f(x W^T + b): x [..., in], weight [out, in], bias [out] or nil; activation nil or a code of M.activations.
function M.linear(x, weight, bias, activation)
  check(C.peri_op_linear(ptr(x), ptr(weight), optional(bias), activation or 0, out))
  return (wrap(out[0]))
end
--- Product of the last two dimensions; the leading ones broadcast; one-dimensional operands are a row and a column.
function M.matmul(a, b)
  check(C.peri_op_matmul(ptr(a), ptr(b), out))
  return (wrap(out[0]))
end
--- [B, m, k] times [B, k, n]
function M.bmm(a, b)
  if a:dim() ~= 3 or b:dim() ~= 3 then
    P.fail(("bmm: %s and %s; three dimensions each are needed"):format(Tensor._text(a), Tensor._text(b)))
  end
  return (M.matmul(a, b))
end

-- -- joining ----------------------------------------------------------------------------------------------------------

local parts, capacity = ffi.new("peri_tensor *[?]", 64), 64

--- Make room for n pointers.
local function reserve(n)
  if n <= capacity then return end
  capacity = 2 * n
  parts = ffi.new("peri_tensor *[?]", capacity)
end

--- Put the pointers of a list of tensors into `parts`, from place `first` on, where there is room for them.
local function put(func, tensors, first)
  util.settle(tensors)
  for i = 1, #tensors do
    local t = tensors[i]
    if not Tensor.is(t) then P.fail(("%s: entry %d is %s, wanted a tensor"):format(func, i, signature.text(t))) end
    parts[first + i - 1] = ptr(t)
  end
end

local function fill(func, tensors)
  local n = #tensors
  reserve(n)
  put(func, tensors, 0)
  return n
end

--- A list of tensors one after the other along a dimension (1).
function M.cat(tensors, dim)
  local n = fill("cat", tensors)
  check(C.peri_op_cat(parts, n, dimension(dim or 1), out))
  return (wrap(out[0]))
end
--- A list of tensors of one shape along a new dimension (1) of the result.
function M.stack(tensors, dim)
  local n = fill("stack", tensors)
  check(C.peri_op_stack(parts, n, dimension(dim or 1), out))
  return (wrap(out[0]))
end

local sizes_type = ffi.typeof "int64_t[?]"

--- A list of sizes for C. (An array that is made of the list is not compiled.)
local function array_of(sizes)
  local array = sizes_type(#sizes)
  for i = 1, #sizes do array[i - 1] = sizes[i] end
  return array
end

--- Sizes of parts of `each`, the last of which may be smaller: one at least.
local function equal_sizes(each, total)
  if each < 1 then P.fail(("split: sizes is %d, allowed: from 1 on, or a list"):format(each)) end
  local sizes = {}
  for at = 0, math.max(total - 1, 0), each do sizes[#sizes + 1] = math.min(each, total - at) end
  return sizes
end

--- Views of `t`, cut along a dimension (1) into parts of the sizes in a list, which add up to its size, or all of one
--- size. Their gradients become its own at once, so this is faster than slices of them all.
function M.split(t, sizes, dim)
  if type(sizes) == "number" then sizes = equal_sizes(sizes, t:size(dim or 1)) end
  local n = #sizes
  reserve(n)
  check(C.peri_op_split(ptr(t), array_of(sizes), n, dimension(dim or 1), parts))
  local list = {}
  for i = 1, n do list[i] = wrap(parts[i - 1]) end
  return list
end

-- -- reductions -------------------------------------------------------------------------------------------------------

local function fill_dims(dim)
  if not dim then return 0 end
  if type(dim) == "number" then
    dims[0] = dimension(dim)
    return 1
  end
  for i = 1, #dim do dims[i - 1] = dimension(dim[i]) end
  return #dim
end

--- Sum over a dimension, a list of dimensions, or all (nil).
function M.sum(t, dim, keepdim)
  check(C.peri_op_sum(ptr(t), dims, fill_dims(dim), keepdim or false, out))
  return (wrap(out[0]))
end
function M.mean(t, dim, keepdim)
  check(C.peri_op_mean(ptr(t), dims, fill_dims(dim), keepdim or false, out))
  return (wrap(out[0]))
end
--- Product over a dimension, or of all (nil).
function M.prod(t, dim, keepdim)
  check(C.peri_op_prod(ptr(dim and t or t:reshape(-1)), dimension(dim or 1), dim and keepdim or false, out))
  local y = wrap(out[0])
  return not dim and keepdim and y:reshape(Tensor._ones_shape(t)) or y
end
--- Of a mean over ranks: f64 [2], what they add up: sum (a tensor of one element) and count (one, or a number).
function M.mean_parts(sum, count)
  local number = type(count) == "number"
  check(C.peri_op_mean_parts(ptr(sum), not number and ptr(count) or nil, number and count or 0, out))
  return (wrap(out[0]))
end
--- The mean of `ranks` ranks, from `divided`, the parts that they have added up: [1] / [2]. With a number in their
--- place it is sum / number, of this rank alone. Its gradient goes to `sum`.
function M.mean_of(sum, divided, ranks)
  local number = type(divided) == "number"
  check(C.peri_op_mean_of(ptr(sum), not number and ptr(divided) or nil, number and divided or 0, ranks or 1, out))
  return (wrap(out[0]))
end
function M.softmax(t, dim)
  check(C.peri_op_softmax(ptr(t), dimension(dim), out))
  return (wrap(out[0]))
end
function M.log_softmax(t, dim)
  check(C.peri_op_log_softmax(ptr(t), dimension(dim), out))
  return (wrap(out[0]))
end
--- Normalise over the last `n` dimensions (1); weight and bias may be nil.
function M.layer_norm(t, n, weight, bias, eps)
  check(C.peri_op_layer_norm(ptr(t), n or 1, optional(weight), optional(bias), eps or 1e-5, out))
  return (wrap(out[0]))
end

-- -- the rest ---------------------------------------------------------------------------------------------------------

--- Zero elements with probability p, divide the others by 1 - p. The mask is a function of (seed, stream, offset + i).
function M.dropout(t, p, seed, stream, offset)
  check(C.peri_op_dropout(ptr(t), p, seed, stream, offset or 0, out))
  return (wrap(out[0]))
end
--- dense [B, D], sparse [B, F, D] -> [B, D + F (F + 1) / 2]: dense and the pairwise dot products (DLRM).
function M.interaction(dense, sparse)
  check(C.peri_op_interaction(ptr(dense), ptr(sparse), out))
  return (wrap(out[0]))
end

--- A cross network: x becomes x0 * (W V x + bias) + x in each layer, starting with x = x0 [..., c]. v: a list of [r,
--- c], or nil for no V; w: a list of [c, r], or [c, c] without V; bias: a list of c numbers each, or nil. All layers
--- are one operation.
function M.cross_net(x0, v, w, bias)
  local n = #w
  if v and #v ~= n or bias and #bias ~= n then
    P.fail(("cross_net: %d W, %d V, %d biases; as many of each are needed"):format(n, v and #v or n, bias and #bias
      or n))
  end
  reserve(3 * n)
  put("cross_net", w, 0)
  if v then put("cross_net", v, n) end
  if bias then put("cross_net", bias, 2 * n) end
  check(C.peri_op_cross_net(ptr(x0), v and parts + n or nil, parts, bias and parts + 2 * n or nil, n, out))
  return (wrap(out[0]))
end

M.reductions = { none = C.PERI_LOSS_NONE, mean = C.PERI_LOSS_MEAN, sum = C.PERI_LOSS_SUM }

local function reduction_code(name)
  local code = M.reductions[name or "mean"]
  if not code then
    P.fail(("loss: reduction '%s', allowed: none, mean, sum; for a mean over all ranks: nn.global_mean, or the "
      .. "classes of losses"):format(
      tostring(name)))
  end
  return code
end

--- Binary cross entropy of logits; reduction "mean", "sum" or "none".
function M.binary_cross_entropy_with_logits(t, target, weight, pos_weight, reduction)
  check(C.peri_op_bce_with_logits(ptr(t), ptr(target), optional(weight), optional(pos_weight),
    reduction_code(reduction), out))
  return (wrap(out[0]))
end
--- Binary cross entropy of probabilities.
function M.binary_cross_entropy(t, target, weight, reduction)
  check(C.peri_op_bce(ptr(t), ptr(target), optional(weight), reduction_code(reduction), out))
  return (wrap(out[0]))
end
function M.mse_loss(t, target, reduction)
  check(C.peri_op_mse(ptr(t), ptr(target), reduction_code(reduction), out))
  return (wrap(out[0]))
end
local class_shares = P.struct "peri_cross_entropy_config"
--- Softmax cross entropy of logits [B, C] and class numbers (i64 [B], from 0). Rows with the label ignore_index
--- (default: none) have the loss 0, and do not count in the mean. label_smoothing (0): the share of the target that all
--- classes have in equal parts. weight ([C], 1 each): the factor of a class's losses; the mean is weighted by it.
function M.cross_entropy(t, labels, reduction, ignore_index, label_smoothing, weight)
  local code = reduction_code(reduction)
  if not (ignore_index or label_smoothing or weight) then
    check(C.peri_op_cross_entropy(ptr(t), ptr(labels), code, out))
    return (wrap(out[0]))
  end
  local o = class_shares
  o.weight, o.label_smoothing = optional(weight), label_smoothing or 0
  o.ignores, o.ignore_index = ignore_index ~= nil, ignore_index or 0
  check(C.peri_op_cross_entropy_with(ptr(t), ptr(labels), o, code, out))
  return (wrap(out[0]))
end

-- -- what they take ---------------------------------------------------------------------------------------------------

local is_live, is_number = Tensor.is_live, Tensor._is_number
signature.kind("operand", "a tensor or a number", function(x)
  return type(x) == "number" or is_live(x) or (is_number(x))
end, function(x) return Tensor.is(x) and signature.RELEASED end)

signature.list_of("counts", "a list of whole numbers", "count")
signature.kind("count_or_counts", "a whole number or a list of them", function(x)
  return signature.is("count", x) or signature.is("counts", x)
end, function(x) return signature.why("counts", x) end)
signature.check_each_one("", M, { "relu", "sigmoid", "tanh", "silu", "gelu", "softplus", "logsigmoid", "exp", "log",
  "sqrt", "abs", "square", "neg", "log1p", "expm1", "rsqrt", "sin", "cos", "erf", "floor", "ceil", "round",
  "trunc", "sign" }, "t: tensor")
signature.check_one("", M, {
  leaky_relu = "t: tensor, slope: number?", pow = "t: operand, exponent: operand",
  affine = "t: tensor, scale: number, shift: number?", reciprocal = "t: tensor, numerator: number?",
  add = "a: operand, b: operand", sub = "a: operand, b: operand", mul = "a: operand, b: operand",
  div = "a: operand, b: operand", floor_divide = "a: operand, b: operand",
  remainder = "a: operand, b: operand", fmod = "a: operand, b: operand", muladd = "a: tensor, b: tensor, c: tensor",
  linear = "x: tensor, weight: tensor, bias: tensor?, activation: int?", matmul = "a: tensor, b: tensor",
  bmm = "a: tensor, b: tensor", cat = "tensors: list, dim: dim?", stack = "tensors: list, dim: dim?",
  split = "t: tensor, sizes: count_or_counts, dim: dim?", sum = "t: tensor, dim: dims?, keepdim: boolean?",
  mean_parts = "sum: tensor, count: operand", mean_of = "sum: tensor, divided: operand, ranks: int?",
  mean = "t: tensor, dim: dims?, keepdim: boolean?", softmax = "t: tensor, dim: dim",
  prod = "t: tensor, dim: dim?, keepdim: boolean?",
  log_softmax = "t: tensor, dim: dim", layer_norm = "t: tensor, n: int?, weight: tensor?, bias: tensor?, eps: number?",
  dropout = "t: tensor, p: number, seed: integer, stream: integer, offset: integer?",
  interaction = "dense: tensor, sparse: tensor", cross_net = "x0: tensor, v: list?, w: list, bias: list?",
  binary_cross_entropy_with_logits =
  "t: tensor, target: tensor, weight: tensor?, pos_weight: tensor?, reduction: string?",
  binary_cross_entropy = "t: tensor, target: tensor, weight: tensor?, reduction: string?",
  mse_loss = "t: tensor, target: tensor, reduction: string?",
  cross_entropy = "t: tensor, labels: tensor, reduction: string?, ignore_index: integer?, label_smoothing: number?, "
    .. "weight: tensor?",
})

-- -- methods ----------------------------------------------------------------------------------------------------------

for _, name in ipairs { "relu", "sigmoid", "tanh", "silu", "gelu", "softplus", "logsigmoid", "leaky_relu", "exp", "log",
  "sqrt", "abs", "square", "pow", "affine", "neg", "reciprocal", "add", "sub", "mul", "div", "log1p", "expm1", "rsqrt",
  "sin", "cos", "erf", "floor", "ceil", "round", "trunc", "sign",
  "floor_divide", "remainder", "fmod", "matmul", "bmm", "sum", "prod",
  "mean", "softmax", "log_softmax", "split" } do
  Tensor.methods[name] = M[name]
end
local meta = Tensor.meta
meta.__add, meta.__sub, meta.__mul, meta.__div = M.add, M.sub, M.mul, M.div
meta.__unm = function(t) return (M.neg(t)) end -- Lua passes t twice
meta.__pow, meta.__mod = M.pow, M.remainder
--- Two handles are equal if they are the same one. Lua would say that a tensor is not equal to a number, whatever it
--- holds, and a condition would go on with that. With `...`, since LuaJIT begins no trace in such a function: one that
--- begins here ends in whoever compares, for instance a handle with nil, is given up, and after some times all traces
--- that come through here are ("blacklisted").
function meta.__eq(...)
  local a, b = ...
  local other = type(a) == "number" and a or type(b) == "number" and b
  if other then
    P.fail(("'==' of a tensor and %g compares no elements; a tensor of truth values: t:eq(x), a number: t:item() == x")
      :format(other))
  end
  return rawequal(a, b)
end

return M
