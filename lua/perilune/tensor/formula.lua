-- formula.lua: functions of elements that are computed in one pass, whatever they are made of (peri_op_formula).
--
--   local huber = formula("huber_loss", 2, 1, function(f, t, target, delta)
--     local d = f.abs(f.sub(t, target))
--     local near = f.clamp(d, -math.huge, delta)
--     return f.mul(near, f.sub(d, f.affine(near, 0.5, 0)))
--   end)
--   local losses = huber(C.PERI_LOSS_NONE, nil, false, t, target, 1)
--
-- The function is called once, when the formula is made: what it calls are the steps. `f` has the steps of
-- peri_formula_code, which take registers (the inputs, and what steps return) and, where they have numbers, those of
-- the formula or Lua's.
local ffi = require "ffi"
local P = require "perilune.ffi"
local Tensor = require "perilune.tensor.core"
local C, check, wrap, ptr, out = P.C, P.check, Tensor.wrap, Tensor.ptr, Tensor.out
local watch = require("perilune.signature").watch
local type = type

local MOST_STEPS, MOST_NUMBERS = 64, 16
local inputs = ffi.new "peri_tensor *[4]"
local dims = ffi.new "int32_t[8]"

local Number = {} -- the metatable of what stands for a number of a formula

local function write_step(steps, name, a, b, c, x, y)
  local code, n = C.peri_formula_code(name), steps.n
  assert(code >= 0 and n < MOST_STEPS, name)
  local s = steps.list + 6 * n
  s[0], s[1], s[2], s[3], s[4], s[5] = code, a, b, c, x, y
  steps.n = n + 1
  return steps.n_in + n
end

--- The place of a number, Lua's or the formula's.
local function place_of(steps, x)
  if getmetatable(x) == Number then return x.place end
  for i = steps.first, steps.n_numbers - 1 do
    if steps.numbers[i] == x then return i end
  end
  assert(steps.n_numbers < MOST_NUMBERS)
  steps.numbers[steps.n_numbers] = x
  steps.n_numbers = steps.n_numbers + 1
  return steps.n_numbers - 1
end

local of_two = {}
for _, name in ipairs { "add", "sub", "mul", "div", "maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge" } do
  of_two[name] = true
end

--- What the function that makes a formula calls the steps by.
local function writer_of(steps)
  return setmetatable({}, { __index = function(_, name)
    if name == "where" then return function(a, b, c) return write_step(steps, name, a, b, c, 0, 0) end end
    if name == "number" then return function(x) return write_step(steps, name, 0, 0, 0, place_of(steps, x), 0) end end
    if of_two[name] then return function(a, b) return write_step(steps, name, a, b, 0, 0, 0) end end
    return function(a, x, y)
      return write_step(steps, name, a, 0, 0, place_of(steps, x or 0), place_of(steps, y or 0))
    end
  end })
end

local function fill_dims(dim)
  if not dim then return 0 end
  if type(dim) == "number" then
    dims[0] = dim > 0 and dim - 1 or dim
    return 1
  end
  for i = 1, #dim do dims[i - 1] = dim[i] > 0 and dim[i] - 1 or dim[i] end
  return #dim
end

local made = {} -- what formulas point at lives as long as this module

--- The formula as C takes it, and its numbers.
local function compile(name, n_in, n_numbers, build, in_f32)
  local steps = { list = ffi.new("int32_t[?]", 6 * MOST_STEPS), n = 0, n_in = n_in,
    numbers = ffi.new("double[?]", MOST_NUMBERS), n_numbers = n_numbers, first = n_numbers }
  local arguments, f = {}, P.struct "peri_formula"
  for i = 1, n_in do arguments[i] = i - 1 end
  for i = 1, n_numbers do arguments[n_in + i] = setmetatable({ place = i - 1 }, Number) end
  build(writer_of(steps), unpack(arguments))
  f.name, f.steps, f.numbers, f.dims = name, steps.list, steps.numbers, dims
  f.n_in, f.n_steps, f.n_numbers, f.in_f32 = n_in, steps.n, steps.n_numbers, in_f32 or false
  made[#made + 1] = { name, steps }
  return f, steps.numbers
end

local function run(f, reduction, dim, keepdim)
  f.reduction, f.n_dims, f.keepdim = reduction, fill_dims(dim), keepdim or false
  check(C.peri_op_formula(f, inputs, out))
  return (wrap(out[0]))
end

local functions -- what the steps are called after
--- The formula by functions of tensors, which whoever records a model hears of (signature.watch).
local function spelled_out(build, reduction, dim, keepdim, ...)
  local F = require "perilune.tensor.ops"
  functions = functions or setmetatable({ root = F._root, number = function(x) return x end }, { __index = F })
  local y = build(functions, ...)
  if reduction == C.PERI_LOSS_NONE then return y end
  return ((reduction == C.PERI_LOSS_SUM and F.sum or F.mean)(y, dim, keepdim))
end

--- A formula of n_in (1 to 4) tensors and n_numbers (0 to 3) numbers: a function(reduction, dim, keepdim, tensors ...,
--- numbers ...) that returns a tensor. reduction: C.PERI_LOSS_*, over `dim`, as in sum. in_f32: see peri_formula.
return function(name, n_in, n_numbers, build, in_f32)
  local f, numbers = compile(name, n_in, n_numbers, build, in_f32)
  local function put(x, y, z) -- those that the formula does not have are not given
    if x then numbers[0] = x end
    if y then numbers[1] = y end
    if z then numbers[2] = z end
  end
  local by_inputs = {
    function(reduction, dim, keepdim, a, x, y, z)
      if watch.call then return (spelled_out(build, reduction, dim, keepdim, a, x, y, z)) end
      inputs[0] = ptr(a)
      put(x, y, z)
      return (run(f, reduction, dim, keepdim))
    end,
    function(reduction, dim, keepdim, a, b, x, y, z)
      if watch.call then return (spelled_out(build, reduction, dim, keepdim, a, b, x, y, z)) end
      inputs[0], inputs[1] = ptr(a), ptr(b)
      put(x, y, z)
      return (run(f, reduction, dim, keepdim))
    end,
    function(reduction, dim, keepdim, a, b, c, x, y, z)
      if watch.call then return (spelled_out(build, reduction, dim, keepdim, a, b, c, x, y, z)) end
      inputs[0], inputs[1], inputs[2] = ptr(a), ptr(b), ptr(c)
      put(x, y, z)
      return (run(f, reduction, dim, keepdim))
    end,
    function(reduction, dim, keepdim, a, b, c, d, x, y, z)
      if watch.call then return (spelled_out(build, reduction, dim, keepdim, a, b, c, d, x, y, z)) end
      inputs[0], inputs[1], inputs[2], inputs[3] = ptr(a), ptr(b), ptr(c), ptr(d)
      put(x, y, z)
      return (run(f, reduction, dim, keepdim))
    end,
  }
  return by_inputs[n_in]
end
