-- launch/compare.lua: `perilune compare a.jsonl b.jsonl`: draws the numbers of runs' logs over their steps, a letter
-- for each run.
local util = require "perilune.util"

local M = {}

local WIDTH, HEIGHT, MOST = 64, 12, 26

--- The objects of a log, one a line, in order; nil and why. A line that was cut off at the end of a run that was killed
--- is left out.
local function read(path)
  local json = require "dkjson"
  local file, problem = io.open(path)
  if not file then return nil, problem end
  local rows, lines, broken = {}, 0, nil
  for line in file:lines() do
    lines = lines + 1
    local object = json.decode(line, 1, json.null) -- a NaN is null in JSON
    if broken then break end
    if type(object) == "table" then rows[#rows + 1] = object elseif line:match "%S" then broken = lines end
  end
  file:close()
  if broken and broken < lines then return nil, ("%s: line %d is no JSON object"):format(path, broken) end
  if #rows == 0 then return nil, path .. ": it has no JSON object" end
  return rows
end

--- Field -> list of { step, value } of a log, and how many of its values cannot be drawn: NaN, infinity. Steps are the
--- field "step", or the numbers of the lines.
local function curves(rows, json)
  local out, odd = {}, {}
  for i, row in ipairs(rows) do
    local step = type(row.step) == "number" and row.step or i
    for name, value in util.ordered(row) do
      if name ~= "step" and type(value) == "number" and math.abs(value) < math.huge then
        out[name] = out[name] or { odd = 0 }
        table.insert(out[name], { step, value })
      elseif value == json.null or tonumber(value) then
        odd[name] = (odd[name] or 0) + 1
      end
    end
  end
  for name, n in pairs(odd) do -- any order: fields of a table
    if out[name] then out[name].odd = n end
  end
  return out
end

--- Lines that draw curves (a list by run; false: the run has none) of one field.
function M.draw(name, list)
  local low, high, first, last = math.huge, -math.huge, math.huge, -math.huge
  for _, curve in ipairs(list) do
    for _, p in ipairs(curve or {}) do
      first, last = math.min(first, p[1]), math.max(last, p[1])
      low, high = math.min(low, p[2]), math.max(high, p[2])
    end
  end
  local grid, lines = {}, { ("%s: %g to %g, steps %g to %g"):format(name, low, high, first, last) }
  for y = 1, HEIGHT do grid[y] = {} end
  local function at(x, from, to, n)
    return to > from and math.floor((x - from) / (to - from) * (n - 1) + 0.5) + 1 or 1
  end
  for run, curve in ipairs(list) do
    for _, p in ipairs(curve or {}) do
      local x, y, mark = at(p[1], first, last, WIDTH), HEIGHT + 1 - at(p[2], low, high, HEIGHT), string.char(96 + run)
      grid[y][x] = (not grid[y][x] or grid[y][x] == mark) and mark or "*"
    end
  end
  for y = 1, HEIGHT do
    local row = {}
    for x = 1, WIDTH do row[x] = grid[y][x] or " " end
    lines[#lines + 1] = ("  |%s"):format(table.concat(row)):gsub("%s+$", "")
  end
  lines[#lines + 1] = "  +" .. ("-"):rep(WIDTH)
  for run, curve in ipairs(list) do
    if curve then
      local least = math.huge
      for _, p in ipairs(curve) do least = math.min(least, p[2]) end
      local odd = curve.odd or 0
      lines[#lines + 1] = ("  %s  last %g, least %g%s"):format(string.char(96 + run), curve[#curve][2], least,
        odd > 0 and (", and %s that cannot be drawn (NaN or infinity)"):format(util.number_of(odd, "value")) or "")
    end
  end
  return table.concat(lines, "\n")
end

--- The command. fields: names with commas; nil: all that some run has. Returns the exit code, and with 1 or 2 why.
function M.run(paths, fields)
  if not pcall(require, "dkjson") then
    return 1, "compare: logs are JSON, and dkjson was not found (Debian: lua-dkjson)"
  end
  if #paths > MOST then return 2, ("compare: %d logs, allowed: 1..%d"):format(#paths, MOST) end
  local runs, names = {}, {}
  for i, path in ipairs(paths) do
    local rows, why = read(path)
    if not rows then return 1, "compare: " .. why end
    runs[i] = curves(rows, require "dkjson")
    for name in util.ordered(runs[i]) do names[name] = true end
  end
  local chosen = {}
  for name in (fields or ""):gmatch "[^,]+" do
    if not names[name] then
      return 2, ("compare: no log has '%s'; they have: %s"):format(name, table.concat(util.keys(names), ", "))
    end
    chosen[#chosen + 1] = name
  end
  for i, path in ipairs(paths) do print(("%s  %s"):format(string.char(96 + i), path)) end
  print "*  several runs"
  for _, name in ipairs(fields and chosen or util.keys(names)) do
    print("\n" .. M.draw(name, util.map(runs, function(run) return run[name] or false end)))
  end
  return 0
end

return M
