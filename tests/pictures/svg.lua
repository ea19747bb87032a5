-- svg.lua: a drawing as the text of an SVG file: rectangles, lines, words. What the pictures of the documents are made
-- of.
local M = {}
M.__index = M

local FONT = "DejaVu Sans, Verdana, Arial, sans-serif"

local function escaped(text) return (tostring(text):gsub("&", "&amp;"):gsub("<", "&lt;"):gsub(">", "&gt;")) end
local function number(x) return (("%.1f"):format(x):gsub("%.0$", "")) end

--- A drawing of so many points; `title` is what a reader who cannot see it is told.
function M.new(width, height, title)
  local self = setmetatable({ width = width, height = height }, M)
  self.lines = { ('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" '
    .. 'font-family="%s" role="img">')
    :format(width, height, width, height, FONT), ("<title>%s</title>"):format(escaped(title)) }
  self:rect(0, 0, width, height, { fill = "#ffffff" })
  return self
end

function M:add(format, ...) self.lines[#self.lines + 1] = format:format(...) end

--- options: fill, stroke, radius.
function M:rect(x, y, w, h, options)
  local o = options or {}
  self:add('<rect x="%s" y="%s" width="%s" height="%s" rx="%s" fill="%s" stroke="%s"/>', number(x), number(y),
    number(w), number(h), o.radius or 0, o.fill or "none", o.stroke or "none")
end

--- options: color, width, dash ("4 3"), arrow (a head at the end).
function M:line(x1, y1, x2, y2, options)
  local o = options or {}
  local color = o.color or "#444444"
  self:add('<line x1="%s" y1="%s" x2="%s" y2="%s" stroke="%s" stroke-width="%s"%s/>', number(x1), number(y1),
    number(x2), number(y2), color, o.width or 1, o.dash and (' stroke-dasharray="%s"'):format(o.dash) or "")
  if o.arrow then
    local length = math.sqrt((x2 - x1) ^ 2 + (y2 - y1) ^ 2)
    local dx, dy = (x2 - x1) / length * 7, (y2 - y1) / length * 7
    self:add('<path d="M%s %sL%s %sL%s %sZ" fill="%s"/>', number(x2), number(y2), number(x2 - dx - dy / 2),
      number(y2 - dy + dx / 2), number(x2 - dx + dy / 2), number(y2 - dy - dx / 2), color)
  end
end

--- A line through points { { x, y }, ... }.
function M:path(points, options)
  local o, parts = options or {}, {}
  for i, p in ipairs(points) do parts[i] = (i == 1 and "M" or "L") .. number(p[1]) .. " " .. number(p[2]) end
  self:add('<path d="%s" fill="none" stroke="%s" stroke-width="%s"/>', table.concat(parts), o.color or "#444444",
    o.width or 1)
end

function M:circle(x, y, radius, color) self:add('<circle cx="%s" cy="%s" r="%s" fill="%s"/>', number(x), number(y),
  number(radius), color) end

--- options: size, color, anchor ("middle", "end"), bold.
function M:text(x, y, words, options)
  local o = options or {}
  self:add('<text x="%s" y="%s" font-size="%s" fill="%s"%s%s>%s</text>', number(x), number(y), o.size or 13, o.color
    or "#222222", o.anchor and (' text-anchor="%s"'):format(o.anchor) or "", o.bold and ' font-weight="bold"' or "",
    escaped(words))
end

function M:save(path)
  local file = assert(io.open(path, "w"))
  file:write(table.concat(self.lines, "\n") .. "\n</svg>\n")
  file:close()
end

return M
