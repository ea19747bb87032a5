-- fit.lua: prices that are no less than 0 from measured sums: the least squares of relative errors.
local M = {}

local SWEEPS = 4000
local SETTLED = 1e-7 -- of the measured sums: a sweep that changes every price by less than that is the last

--- rows: a list of { amounts = unit -> amount, ms = their measured sum }; units: list of names; known: unit -> price of
--- those that are not to be found; lowest: unit -> the least that its price can be (0). Returns unit -> price, and the
--- mean relative error that is left.
function M.least(rows, units, known, lowest)
  known, lowest = known or {}, lowest or {}
  local a, n, m = {}, #rows, #units
  for i, row in ipairs(rows) do
    a[i] = {}
    for j, unit in ipairs(units) do a[i][j] = (row.amounts[unit] or 0) / row.ms end
  end
  -- products of the columns, and of each with what is left of the sums: all that the sweeps need of the rows
  local products, slopes, x = {}, {}, {}
  for j, unit in ipairs(units) do
    products[j], slopes[j], x[j] = {}, 0, known[unit] or lowest[unit] or 0
    for k = 1, m do
      local sum = 0
      for i = 1, n do sum = sum + a[i][j] * a[i][k] end
      products[j][k] = sum
    end
    for i = 1, n do slopes[j] = slopes[j] + a[i][j] end
  end
  local function move(j, change)
    local of_j = products[j]
    for k = 1, m do slopes[k] = slopes[k] - change * of_j[k] end
  end
  for j in ipairs(units) do move(j, x[j]) end
  for _ = 1, SWEEPS do -- one price after the other to its best, the others as they are
    local most = 0
    for j, unit in ipairs(units) do
      if products[j][j] > 0 and not known[unit] then
        local better = math.max(lowest[unit] or 0, x[j] + slopes[j] / products[j][j])
        local change = better - x[j]
        if change ~= 0 then
          move(j, change)
          x[j] = better
          most = math.max(most, change * change * products[j][j])
        end
      end
    end
    if most < n * SETTLED ^ 2 then break end
  end
  local prices, off = {}, 0
  for j, unit in ipairs(units) do
    prices[unit] = (known[unit] or lowest[unit] or x[j] * math.sqrt(products[j][j] / n) > 1e-6) and x[j] or 0
  end
  for i = 1, n do
    local residual = 1
    for j = 1, m do residual = residual - a[i][j] * x[j] end
    off = off + math.abs(residual) / n
  end
  return prices, off
end

return M
