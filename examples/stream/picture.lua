-- picture.lua: the AUC over time as a picture (an SVG that needs nothing else), and as a row of bars for the terminal.
local peri = require "perilune"

local M = {}

local WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 420, 60, 20, 40, 50
local COLOURS = { managed = "#1b7837", modulo = "#d95f02" }
local BARS = { "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█" }

local function range(points, models)
  local low, high = 1, 0
  for _, p in ipairs(points) do
    for _, m in ipairs(models) do low, high = math.min(low, p[m.key]), math.max(high, p[m.key]) end
  end
  return math.floor(low * 20) / 20, math.min(1, math.ceil(high * 20 + 0.001) / 20)
end

--- Bars from the least to the largest AUC of all.
function M.bars(points, key, models)
  local low, high = range(points, models)
  local text, n = {}, math.min(#points, 24)
  for i = 1, n do
    local auc = points[math.ceil(i * #points / n)][key]
    text[i] = BARS[math.max(1, math.min(#BARS, math.ceil(#BARS * (auc - low) / (high - low))))]
  end
  return table.concat(text)
end

--- The path of the picture in the folder `out`, which is made if it is not there; or an error, before anything is
--- trained.
function M.path(out)
  local path = out .. "/stream.svg"
  os.execute(("mkdir -p '%s' 2> /dev/null"):format(out:gsub("'", "'\\''")))
  local file, why = io.open(path, "a")
  if not file then peri.ffi.fail(("--out %s: %s; allowed: a folder to write to"):format(out, why)) end
  file:close()
  return path
end

--- Write the picture to `path`.
function M.write(path, points, models)
  local low, high = range(points, models)
  local steps = points[#points].step
  local function x(step) return LEFT + (WIDTH - LEFT - RIGHT) * step / steps end
  local function y(auc) return TOP + (HEIGHT - TOP - BOTTOM) * (high - auc) / (high - low) end
  local t = { ('<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" '
    .. 'font-size="13">'):format(WIDTH, HEIGHT), '<rect width="100%" height="100%" fill="white"/>' }
  local function add(format, ...) t[#t + 1] = format:format(...) end
  add('<text x="%d" y="22" font-size="15">AUC of predictions made before learning, at equal memory</text>', LEFT)
  for tick = 0, math.floor((high - low) * 20 + 0.5) do
    local auc = low + tick / 20
    add('<line x1="%d" x2="%d" y1="%.1f" y2="%.1f" stroke="#ddd"/><text x="%d" y="%.1f" text-anchor="end">%.2f</text>',
      LEFT, WIDTH - RIGHT, y(auc), y(auc), LEFT - 8, y(auc) + 4, auc)
  end
  for part = 0, 4 do
    add('<text x="%.1f" y="%d" text-anchor="middle">%d</text>', x(steps * part / 4), HEIGHT - BOTTOM + 18,
      steps * part / 4)
  end
  add('<text x="%d" y="%d" text-anchor="middle">step</text>', (WIDTH + LEFT - RIGHT) / 2, HEIGHT - 10)
  for i, m in ipairs(models) do
    local line = {}
    for k, p in ipairs(points) do line[k] = ("%.1f,%.1f"):format(x(p.step), y(p[m.key])) end
    add('<polyline fill="none" stroke="%s" stroke-width="2" points="%s"/>', COLOURS[m.key], table.concat(line, " "))
    add('<text x="%d" y="%d" fill="%s">%s</text>', LEFT + 20, HEIGHT - BOTTOM - 12 - 20 * (#models - i), COLOURS[m.key],
      m.name)
  end
  t[#t + 1] = "</svg>\n"
  local file = assert(io.open(path, "w"))
  file:write(table.concat(t, "\n"))
  file:close()
end

return M
