-- gradcheck.lua: gradients against central differences, in f64.
--
--   gradcheck.check(function(x, y) return F.mul(x, y) end, { { 2, 3 }, { 3 } }, { device = "opaque" })
--
-- Each input is a leaf of the given shape with reproducible numbers in [low, high) away from 0 (options low, high,
-- seed). `layout` says how the function sees it: "contiguous", "transposed" (a view with all dimensions reversed in
-- memory) or "stepped" (every second element of a larger leaf). The function's result is weighted with fixed numbers
-- and summed.
local peri = require "perilune"
local Tensor = peri.Tensor

local M = { layouts = { "contiguous", "transposed", "stepped" } }

local function product(shape)
  local n = 1
  for i = 1, #shape do n = n * shape[i] end
  return n
end

--- Reproducible numbers: uniform, and at least 0.05 away from 0, where functions may have kinks.
local function numbers(n, low, high, seed)
  local list = Tensor.uniform({ math.max(n, 1) }, low, high, seed, 0, "f64", "cpu"):to_list()
  local out = {}
  for i = 1, n do
    local x = list[i]
    out[i] = math.abs(x) < 0.05 and (x < 0 and x - 0.05 or x + 0.05) or x
  end
  return out
end

--- A leaf and the function from it to the input of the wanted layout.
local function leaf(shape, layout, low, high, seed, device)
  local base = {}
  for i = 1, #shape do base[i] = shape[i] end
  if layout == "transposed" then
    for i = 1, #shape do base[i] = shape[#shape + 1 - i] end
  elseif layout == "stepped" and #shape > 0 then
    base[#shape] = 2 * shape[#shape]
  end
  local t = peri.tensor(numbers(product(base), low, high, seed), "f64", device, base):requires_grad()
  return t, function()
    if layout == "transposed" then
      local v = t
      for i = 1, math.floor(#shape / 2) do v = v:transpose(i, #shape + 1 - i) end
      return v
    elseif layout == "stepped" and #shape > 0 then
      return t:slice(-1, 0, base[#shape], 2)
    end
    return t
  end
end

local function weighted(list, weights)
  local sum = 0
  for i = 1, #list do sum = sum + list[i] * weights[i] end
  return sum
end

local function run(f, views)
  local inputs = {}
  for i, view in ipairs(views) do inputs[i] = view() end
  return f(unpack(inputs, 1, #views))
end

local function evaluate(f, views, t, values, device, weights)
  t:copy(peri.tensor(values, "f64", device, t:shape()))
  return peri.no_grad(function() return weighted(run(f, views):to_list(), weights) end)
end

--- Raise unless all gradients of f at inputs of these shapes agree with central differences.
local function check(f, shapes, options)
  local device, layout = options.device or "cpu", options.layout or "contiguous"
  local low, high, seed = options.low or -1, options.high or 1, options.seed or 11
  local leaves, views = {}, {}
  for i, shape in ipairs(shapes) do leaves[i], views[i] = leaf(shape, layout, low, high, seed + i, device) end
  local out = run(f, views)
  local shape = out:shape()
  local weights = numbers(product(shape), -1, 1, seed + 100)
  out:backward(peri.tensor(weights, "f64", device, shape))
  local step, tolerance = options.step or 1e-5, options.tolerance or 1e-7
  for i, t in ipairs(leaves) do
    local values, gradient = t:to_list(), t:grad() and t:grad():to_list()
    if #values > 0 and not gradient then error(("gradcheck: input %d got no gradient"):format(i), 2) end
    for k = 1, #values do
      local x, sums = values[k], {}
      for side = 1, 2 do
        values[k] = side == 1 and x + step or x - step
        sums[side] = peri.scope(evaluate, f, views, t, values, device, weights)
      end
      values[k] = x
      local want, got = (sums[1] - sums[2]) / (2 * step), gradient[k]
      if not (math.abs(got - want) <= tolerance * (1 + math.abs(want))) then -- luacheck: ignore 581 (NaN fails)
        error(("gradcheck: input %d, element %d (layout %s): gradient %.12g, central difference %.12g"):format(i, k - 1,
          layout, got, want), 2)
      end
    end
    t:copy(peri.tensor(values, "f64", device, t:shape()))
  end
end

--- Handles are released at once: on the test device every live tensor costs time.
function M.check(f, shapes, options) peri.scope(check, f, shapes, options or {}) end

return M
