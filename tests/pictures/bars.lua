-- bars.lua: a chart of horizontal bars, with the number at the end of each: figures.lua says of what.
local svg = dofile "tests/pictures/svg.lua"

local WIDTH, LEFT, RIGHT, BAR, GAP = 860, 150, 110, 17, 10
local COLORS = { "#d95f02", "#6b9ac4", "#a7bed3", "#cccccc" }

local function height_of(panel) return 66 + #panel.rows * (#panel.series * BAR + GAP) end

local function draw(d, panel, top)
  d:text(20, top + 16, panel.title, { size = 13, bold = true })
  local x = 20
  for i, name in ipairs(panel.series) do
    if #panel.series > 1 then
      d:rect(x, top + 27, 11, 11, { fill = COLORS[i] })
      d:text(x + 16, top + 37, name, { size = 12 })
      x = x + 32 + 7.4 * #name
    end
  end
  local most, y = 0, top + 48
  for _, row in ipairs(panel.rows) do
    for i = 2, #row do most = math.max(most, row[i]) end
  end
  for _, row in ipairs(panel.rows) do
    d:text(LEFT - 10, y + #panel.series * BAR / 2 + 4, row[1], { size = 12.5, anchor = "end" })
    for i = 2, #row do
      local length = row[i] / most * (WIDTH - LEFT - RIGHT)
      d:rect(LEFT, y, length, BAR - 3, { fill = COLORS[i - 1] })
      d:text(LEFT + length + 6, y + BAR - 5, ("%g %s"):format(row[i], panel.unit), { size = 12, bold = i == 2 })
      y = y + BAR
    end
    y = y + GAP
  end
end

return function(chart, to)
  local height = 40
  for _, panel in ipairs(chart.panels) do height = height + height_of(panel) end
  local d, top = svg.new(WIDTH, height, chart.title), 36
  d:text(20, 26, chart.title, { size = 15, bold = true })
  for _, panel in ipairs(chart.panels) do
    draw(d, panel, top)
    top = top + height_of(panel)
  end
  d:save(to)
end
