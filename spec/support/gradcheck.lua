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

--- The central difference of f's weighted sum where the leaf t moves from `values` along `direction`.
local function difference(f, views, t, values, direction, step, device, weights)
  local sums = {}
  for side = 1, 2 do
    local moved = {}
    for k = 1, #values do moved[k] = values[k] + (side == 1 and step or -step) * direction[k] end
    sums[side] = peri.scope(evaluate, f, views, t, moved, device, weights)
  end
  return (sums[1] - sums[2]) / (2 * step)
end

local function near(got, want, tolerance) return math.abs(got - want) <= tolerance * (1 + math.abs(want)) end

--- The words about the first element whose own central difference is another; nil: there is none.
local function element(f, views, t, values, gradient, options, device, weights)
  local direction = {}
  for k = 1, #values do direction[k] = 0 end
  for k = 1, #values do
    direction[k] = 1
    local want = difference(f, views, t, values, direction, options.step, device, weights)
    direction[k] = 0
    if not near(gradient[k], want, options.tolerance) then
      return ("element %d: gradient %.12g, central difference %.12g"):format(k - 1, gradient[k], want)
    end
  end
end

--- Raise unless all gradients of f at inputs of these shapes agree with central differences, each input's along two
--- directions in which every element takes part: an element that is wrong changes both. Only when they do not agree
--- is each element asked, so that the error names one.
local function check(f, shapes, options)
  local device, layout = options.device or "cpu", options.layout or "contiguous"
  local low, high, seed = options.low or -1, options.high or 1, options.seed or 11
  local leaves, views = {}, {}
  for i, shape in ipairs(shapes) do leaves[i], views[i] = leaf(shape, layout, low, high, seed + i, device) end
  local out = run(f, views)
  local shape = out:shape()
  local weights = numbers(product(shape), -1, 1, seed + 100)
  out:backward(peri.tensor(weights, "f64", device, shape))
  local how = { step = options.step or 1e-5, tolerance = options.tolerance or 1e-7 }
  for i, t in ipairs(leaves) do
    local values, gradient = t:to_list(), t:grad() and t:grad():to_list()
    if #values > 0 and not gradient then error(("gradcheck: input %d got no gradient"):format(i), 2) end
    for round = 1, #values > 0 and 2 or 0 do
      local direction = numbers(#values, -1, 1, seed + 200 * round + i)
      local got, want = weighted(direction, gradient), difference(f, views, t, values, direction, how.step, device,
        weights)
      if not near(got, want, how.tolerance) then -- also NaN
        error(("gradcheck: input %d, layout %s, %s"):format(i, layout, element(f, views, t, values, gradient, how,
          device, weights) or ("along a direction: gradient %.12g, central difference %.12g"):format(got, want)), 2)
      end
    end
    t:copy(peri.tensor(values, "f64", device, t:shape()))
  end
end

--- Handles are released at once: on the test device every live tensor costs time.
function M.check(f, shapes, options) peri.scope(check, f, shapes, options or {}) end

return M
