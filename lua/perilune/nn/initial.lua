-- initial.lua: nn.init: first values of tensors, by PyTorch's names and rules. Each function overwrites its tensor and
-- returns it; nothing is recorded. Random ones draw the next stream of the rank's generator, as parameters do
-- (parameter.lua): ranks that build the same model from the same seed get the same values.
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local F = require "perilune.nn.functional"
local parameter = require "perilune.nn.parameter"
local signature = require "perilune.signature"
local state = P.state

local M = {}

--- Numbers by chance are for floats: integers would lose what is behind the point.
local function check_floats(func, t)
  local dtype = t:dtype()
  if dtype ~= "f32" and dtype ~= "f64" and dtype ~= "f16" and dtype ~= "bf16" then
    P.fail(("%s: t is %s, wanted a tensor of f32, f64, f16 or bf16"):format(func, Tensor._text(t)))
  end
end

local function filled(t, values)
  t:detach():copy(values)
  return t
end

--- Draw numbers of the tensor's shape, in f64 where it is f64, else in f32.
local function draw(t, generator, a, b)
  local dtype = t:dtype() == "f64" and "f64" or "f32"
  return generator(t:shape(), a, b, state.seed, parameter._next_stream(), dtype, t:device())
end

--- Run f(t, a, b, c, d) in a scope, without recording, and return the tensor. func: the name for messages.
local function within(func, f, t, a, b, c, d)
  check_floats(func, t)
  P.scope(P.no_grad, f, t, a, b, c, d)
  return t
end

local function uniform(t, low, high) filled(t, draw(t, Tensor.uniform, low, high)) end
local function normal(t, mean, deviation) filled(t, draw(t, Tensor.normal, mean, deviation)) end

--- Uniform in [a, b): 0 and 1.
function M.uniform_(t, a, b) return within("uniform_", uniform, t, a or 0, b or 1) end
--- Normal, of mean 0 and deviation 1.
function M.normal_(t, mean, std) return within("normal_", normal, t, mean or 0, std or 1) end
function M.constant_(t, value)
  t:detach():fill(value)
  return t
end
function M.zeros_(t) return M.constant_(t, 0) end
function M.ones_(t) return M.constant_(t, 1) end

-- -- truncated normal numbers -----------------------------------------------------------------------------------------

--- The normal distribution function: gelu(x) is x times it.
local function distribution(x) return F.where(x:eq(0), 0.5, F.gelu(x) / x) end

--- Where the normal distribution function has the values p, between low and high: halved 60 times, which is all that
--- f64 has.
local function quantile(p, low, high)
  low, high = F.affine(p, 0, low), F.affine(p, 0, high)
  for _ = 1, 60 do
    local middle = (low + high) * 0.5
    local below = distribution(middle):lt(p)
    low, high = F.where(below, middle, low), F.where(below, high, middle)
  end
  return (low + high) * 0.5
end

local function truncated(t, mean, std, a, b)
  local low, high = (a - mean) / std, (b - mean) / std
  local ends = distribution(Tensor.tensor({ math.max(low, -38), math.min(high, 38) }, "f64", t:device())):to_list()
  local u = Tensor.uniform(t:shape(), 0, 1, state.seed, parameter._next_stream(), "f64", t:device())
  local x = quantile(F.affine(u, ends[2] - ends[1], ends[1]), math.max(low, -38), math.min(high, 38))
  filled(t, F.affine(x, std, mean):clamp(a, b))
end

--- Normal numbers of `mean` (0) and `std` (1), of which those outside [a, b] (-2 and 2) are not drawn.
function M.trunc_normal_(t, mean, std, a, b)
  mean, std, a, b = mean or 0, std or 1, a or -2, b or 2
  if not (std > 0 and a < b) then
    P.fail(("trunc_normal_: std is %g, from %g to %g; allowed: std > 0, a < b"):format(std, a, b))
  end
  return within("trunc_normal_", truncated, t, mean, std, a, b)
end

-- -- by the sizes of a layer ------------------------------------------------------------------------------------------

--- Inputs and outputs of a weight [out, in, ...].
local function fans(func, t)
  local shape, field = t:shape(), 1
  if #shape < 2 then P.fail(("%s: %s, wanted 2 dimensions or more"):format(func, Tensor._text(t))) end
  for d = 3, #shape do field = field * shape[d] end
  return shape[2] * field, shape[1] * field
end

local gains = { linear = 1, sigmoid = 1, tanh = 5 / 3, relu = math.sqrt(2), selu = 0.75 }
local nonlinearities = { "linear", "sigmoid", "tanh", "relu", "leaky_relu", "selu" }

--- By how much deviations grow for a layer with such a function behind it; param: leaky_relu's slope (0.01).
function M.calculate_gain(nonlinearity, param)
  util.one_of("calculate_gain", "nonlinearity", nonlinearity, nonlinearities)
  return gains[nonlinearity] or math.sqrt(2 / (1 + (param or 0.01) ^ 2))
end

local function glorot(func, t, gain)
  local fan_in, fan_out = fans(func, t)
  return (gain or 1) * math.sqrt(2 / (fan_in + fan_out))
end
--- Glorot and Bengio: deviation gain * sqrt(2 / (fan in + fan out)).
function M.xavier_uniform_(t, gain)
  local bound = math.sqrt(3) * glorot("xavier_uniform_", t, gain)
  return M.uniform_(t, -bound, bound)
end
function M.xavier_normal_(t, gain) return M.normal_(t, 0, glorot("xavier_normal_", t, gain)) end

local function he(func, t, args)
  local a = util.named(func, args or {}, { a = 0, mode = "fan_in", nonlinearity = "leaky_relu" })
  local fan_in, fan_out = fans(func, t)
  local fan = util.one_of(func, "mode", a.mode, { "fan_in", "fan_out" }) == "fan_in" and fan_in or fan_out
  return M.calculate_gain(a.nonlinearity, a.a) / math.sqrt(fan)
end
--- He and others: deviation gain / sqrt(fan); args: a (the slope of leaky_relu, 0), mode ("fan_in", "fan_out"),
--- nonlinearity ("leaky_relu").
function M.kaiming_uniform_(t, args)
  local bound = math.sqrt(3) * he("kaiming_uniform_", t, args)
  return M.uniform_(t, -bound, bound)
end
function M.kaiming_normal_(t, args) return M.normal_(t, 0, he("kaiming_normal_", t, args)) end

-- -- orthogonal matrices ----------------------------------------------------------------------------------------------

local function dot(a, b)
  local sum = 0
  for i = 1, #a do sum = sum + a[i] * b[i] end
  return sum
end

--- Make a list of vectors orthonormal, each keeping its direction among those before it: Gram-Schmidt, twice, which f64
--- needs.
local function orthonormal(vectors)
  for k, v in ipairs(vectors) do
    for _ = 1, 2 do
      for j = 1, k - 1 do
        local u = vectors[j]
        local part = dot(u, v)
        for i = 1, #v do v[i] = v[i] - part * u[i] end
      end
    end
    local size = 1 / math.sqrt(dot(v, v))
    for i = 1, #v do v[i] = v[i] * size end
  end
  return vectors
end

local function orthogonal(t, gain)
  local shape, cols = t:shape(), 1
  local rows = shape[1]
  for d = 2, #shape do cols = cols * shape[d] end
  if rows * cols == 0 then return end
  local flat = Tensor.normal({ rows, cols }, 0, 1, state.seed, parameter._next_stream(), "f64", "cpu")
  local tall = rows > cols
  local q = Tensor.tensor(orthonormal((tall and flat:transpose(1, 2) or flat):to_table()), "f64", "cpu")
  filled(t, F.affine(tall and q:transpose(1, 2) or q, gain):reshape(shape))
end
--- An orthogonal matrix times `gain` (1): of a tensor [rows, ...] taken as [rows, cols], its rows are orthonormal, or,
--- if they are more than cols, its columns.
function M.orthogonal_(t, gain)
  fans("orthogonal_", t)
  return within("orthogonal_", orthogonal, t, gain or 1)
end

signature.check("", M, {
  uniform_ = "t: tensor, a: number?, b: number?", normal_ = "t: tensor, mean: number?, std: number?",
  constant_ = "t: tensor, value: number", zeros_ = "t: tensor", ones_ = "t: tensor",
  trunc_normal_ = "t: tensor, mean: number?, std: number?, a: number?, b: number?",
  calculate_gain = "nonlinearity: string, param: number?", xavier_uniform_ = "t: tensor, gain: number?",
  xavier_normal_ = "t: tensor, gain: number?", kaiming_uniform_ = "t: tensor, args: table?",
  kaiming_normal_ = "t: tensor, args: table?", orthogonal_ = "t: tensor, gain: number?",
})

return util.face("peri.nn.init", M)
