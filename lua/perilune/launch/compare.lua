-- launch/compare.lua: `perilune compare a.jsonl b.jsonl`: draws the numbers of runs' logs over their steps, a letter
-- for each run.
local errors = require "perilune.errors"
local util = require "perilune.util"

local M = {}

local WIDTH, HEIGHT, MOST = 64, 12, 26

--- The JSON object in a line, or nil. NaN and Infinity, which Python writes and JSON does not have, are null in it.
local function object_of(line, json)
  local object = json.decode(line, 1, json.null)
    or json.decode((line:gsub("(:%s*)NaN", "%1null"):gsub("(:%s*)%-?Infinity", "%1null")), 1, json.null)
  return type(object) == "table" and getmetatable(object).__jsontype == "object" and object or nil
end

--- Add the numbers of a log's object to its curves. Steps are the field "step", or the number of the object.
local function add(curves, object, number, json)
  local step = type(object.step) == "number" and object.step or number
  for name, value in next, object do -- any order: fields of a table
    local x = value ~= json.null and tonumber(value)
    if name ~= "step" and (x or value == json.null) then
      local curve = curves[name] or { steps = {}, values = {}, odd = 0 }
      curves[name] = curve
      if not x or x ~= x or math.abs(x) == math.huge then curve.odd = curve.odd + 1
      else
        curve.steps[#curve.steps + 1], curve.values[#curve.values + 1] = step, x
      end
    end
  end
end

--- Field -> curve of a log, { steps = list, values = list, odd = how many of its values cannot be drawn: NaN, infinity
--- }; nil and why. A line that was cut off at the end of a run that was killed is left out.
local function curves_of(path)
  local json = require "dkjson"
  local file, problem = io.open(path)
  if not file then return nil, problem end
  local curves, lines, objects, broken = {}, 0, 0, nil
  while true do
    local line, why = file:read "*l"
    if why then return nil, ("%s: %s"):format(path, why) end -- a folder
    if not line then break end
    lines = lines + 1
    local object = object_of(line, json)
    if broken then break end
    if object then
      objects = objects + 1
      add(curves, object, objects, json)
    elseif line:match "%S" then broken = lines end
  end
  file:close()
  if broken and broken < lines then return nil, ("%s: line %d is no JSON object"):format(path, broken) end
  if objects == 0 then return nil, path .. ": it has no JSON object" end
  for name, curve in pairs(curves) do -- any order: fields of a table
    if #curve.steps == 0 then curves[name] = nil end
  end
  if next(curves) == nil then return nil, path .. ": its objects have no number that can be drawn" end
  return curves
end

--- A function that writes numbers between low and high with as many digits as tell them apart: 6 and more.
local function writer(low, high)
  local apart = high > low and math.log10(math.max(-low, high) / (high - low)) or 0
  local format = ("%%.%dg"):format(math.max(6, math.min(17, math.ceil(apart) + 3)))
  return function(x) return x == math.floor(x) and errors.numeral(x) or format:format(x) end
end

local function bounds_of_field(curves, field)
  local low, high = math.huge, -math.huge
  for _, curve in ipairs(curves) do
    for _, x in ipairs(curve and curve[field] or {}) do low, high = math.min(low, x), math.max(high, x) end
  end
  return low, high
end

--- Lines that draw curves (a list by run; false: the run has none) of one field, in `columns` columns.
function M.draw(name, list, columns)
  local width = math.max(8, math.min(WIDTH, columns - 3))
  local low, high = bounds_of_field(list, "values")
  local first, last = bounds_of_field(list, "steps")
  local value_text, step_text, grid = writer(low, high), writer(first, last), {}
  local lines = { ("%s: %s to %s, steps %s to %s"):format(name, value_text(low), value_text(high), step_text(first),
    step_text(last)) }
  for y = 1, HEIGHT do grid[y] = {} end
  --- halves, since from the least number to the largest one is more than a number holds
  local function at(x, from, to, n)
    return to > from and math.floor((x / 2 - from / 2) / (to / 2 - from / 2) * (n - 1) + 0.5) + 1 or 1
  end
  for run, curve in ipairs(list) do
    local mark = string.char(96 + run)
    for i, step in ipairs(curve and curve.steps or {}) do
      local x, y = at(step, first, last, width), HEIGHT + 1 - at(curve.values[i], low, high, HEIGHT)
      grid[y][x] = (not grid[y][x] or grid[y][x] == mark) and mark or "*"
    end
  end
  for y = 1, HEIGHT do
    local row = {}
    for x = 1, width do row[x] = grid[y][x] or " " end
    lines[#lines + 1] = ("  |%s"):format(table.concat(row)):gsub("%s+$", "")
  end
  lines[#lines + 1] = "  +" .. ("-"):rep(width)
  for run, curve in ipairs(list) do
    if curve then
      local least, most = bounds_of_field({ curve }, "values")
      lines[#lines + 1] = ("  %s  last %s, least %s, most %s%s"):format(string.char(96 + run),
        value_text(curve.values[#curve.values]), value_text(least), value_text(most), curve.odd > 0
        and (", and %s that cannot be drawn (NaN or infinity)"):format(util.number_of(curve.odd, "value")) or "")
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
    local curves, why = curves_of(path)
    if not curves then return 1, "compare: " .. why end
    runs[i] = curves
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
  local columns = require("perilune.launcher").columns()
  for _, name in ipairs(fields and chosen or util.keys(names)) do
    print("\n" .. M.draw(name, util.map(runs, function(run) return run[name] or false end), columns))
  end
  return 0
end

return M
