-- fit.lua: prices that are no less than 0 from measured sums: the least squares of relative errors.
local M = {}

local SWEEPS = 4000

--- rows: a list of { amounts = unit -> amount, ms = their measured sum }; units: list of names; known: unit -> price of those that are not
--- to be found. Returns unit -> price, and the mean relative error that is left.
function M.least(rows, units, known)
  known = known or {}
  local a, residual, n = {}, {}, #rows
  for i, row in ipairs(rows) do
    a[i], residual[i] = {}, 1
    for j, unit in ipairs(units) do a[i][j] = (row.amounts[unit] or 0) / row.ms end
  end
  local squares, x = {}, {}
  for j in ipairs(units) do
    squares[j], x[j] = 0, known[units[j]] or 0
    for i = 1, n do
      squares[j] = squares[j] + a[i][j] ^ 2
      residual[i] = residual[i] - a[i][j] * x[j]
    end
  end
  for _ = 1, SWEEPS do -- one price after the other to its best, the others as they are
    for j, unit in ipairs(units) do
      if squares[j] > 0 and not known[unit] then
        local slope = 0
        for i = 1, n do slope = slope + a[i][j] * residual[i] end
        local better = math.max(0, x[j] + slope / squares[j])
        local change = better - x[j]
        if change ~= 0 then
          for i = 1, n do residual[i] = residual[i] - change * a[i][j] end
          x[j] = better
        end
      end
    end
  end
  local prices, off = {}, 0
  for j, unit in ipairs(units) do prices[unit] = (known[unit] or x[j] * math.sqrt(squares[j] / n) > 1e-6) and x[j] or 0 end
  for i = 1, n do off = off + math.abs(residual[i]) / n end
  return prices, off
end

return M
