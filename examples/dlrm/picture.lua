-- picture.lua: the learning curve as a picture, drawn by gnuplot: training and validation loss above, validation AUC
-- below, the ends of the passes, and the point whose weights were kept.
local files = require "dlrm.files"

local M = {}

local MOST_PASSES = 20 -- whose ends are drawn

--- A text in gnuplot's language.
local function text_of(words) return "'" .. words:gsub("'", "''") .. "'" end

local function has(points, name)
  for _, p in ipairs(points) do
    if p[name] then return true end
  end
  return false
end

local function add(script, format, ...) script[#script + 1] = format:format(...) end

--- A gnuplot data block of one number of the points.
local function block(script, points, name)
  add(script, "$%s << E", name)
  for _, p in ipairs(points) do
    if p[name] then add(script, "%d %.9g", p.step, p[name]) end
  end
  add(script, "E")
end

--- Vertical lines where passes end, and at the kept weights.
local function marks(script, summary)
  local passes = math.floor(summary.steps / summary.steps_per_pass)
  for pass = 1, passes <= MOST_PASSES and passes or 0 do
    local x = pass * summary.steps_per_pass
    add(script, "set arrow from %d, graph 0 to %d, graph 1 nohead dashtype 3 linecolor rgb '#888888' back", x, x)
    add(script, "set label 'end of pass %d' at %d, graph 0.02 rotate by 90 offset -0.6, 0 font ',8' textcolor rgb "
      .. "'#888888'", pass, x)
  end
  if summary.validation then
    add(script, "set arrow from %d, graph 0 to %d, graph 1 nohead linewidth 1.5 linecolor rgb '#2a9d2a' back",
      summary.kept_step, summary.kept_step)
  end
end

local function losses(script, points, summary)
  local parts = { "$loss using 1:2 with lines linewidth 1.5 linecolor rgb '#9ecae1' title 'training loss'" }
  if has(points, "validation_loss") then
    parts[2] = "$validation_loss using 1:2 with linespoints linewidth 2 pointtype 7 pointsize 0.6 linecolor rgb "
      .. "'#d95f02' "
      .. "title 'validation loss'"
    parts[3] = ("'+' using (%d):(%.9g) every ::0::0 with points pointtype 6 pointsize 2 linewidth 2 linecolor rgb "
      .. "'#2a9d2a' title %s")
      :format(summary.kept_step, summary.validation.loss, text_of(("weights kept: step %d"):format(summary.kept_step)))
  end
  add(script, "set ylabel 'log-loss'")
  add(script, "plot %s", table.concat(parts, ", "))
end

local function areas(script, summary)
  local logistic = summary.baseline.logistic_regression
  local title = ("test AUC: DLRM %.4f%s"):format(summary.auc, logistic
    and (", logistic regression %.4f"):format(logistic.auc) or "")
  add(script, "set title %s", text_of(title))
  add(script, "unset label\nset ylabel 'AUC'")
  add(script, "plot $validation_auc using 1:2 with linespoints linewidth 2 pointtype 7 pointsize 0.6 linecolor rgb "
    .. "'#7570b3' title 'validation AUC'")
end

--- What a file has; "" where there is none.
local function contents(path)
  local file = io.open(path, "rb")
  local text = file and file:read "*a" or ""
  if file then file:close() end
  return text
end

--- The last bytes of every whole PNG file.
local END = "IEND\174B`\130"

--- Draw OUT/curve.png. Returns whether there is a picture; one of an earlier run does not stay.
function M.draw(out, summary, points)
  local path, script = out .. "/curve.png", {}
  os.remove(path)
  if os.execute "command -v gnuplot >/dev/null 2>&1" ~= 0 then
    print "curve.png is left out: gnuplot is not installed"
    return false
  end
  local two = has(points, "validation_auc")
  for _, name in ipairs { "loss", "validation_loss", "validation_auc" } do block(script, points, name) end
  add(script, "set terminal pngcairo size 1000,%d", two and 800 or 500)
  add(script, "set output %s", text_of(path))
  if two then add(script, "set multiplot layout 2, 1") end
  add(script, "set grid\nset xlabel 'step' offset 0, 0.6\nset xrange [0:%d]\nset lmargin 10\nset key below",
    summary.steps)
  local ranks = summary.ranks == 1 and "1 rank" or summary.ranks .. " ranks"
  add(script, "set title %s noenhanced",
    text_of(("DLRM on %s, %s, batches of %d"):format(summary.data, ranks, summary.batch_size)))
  marks(script, summary)
  losses(script, points, summary)
  if two then areas(script, summary) end
  local file = files.open(out .. "/curve.gnuplot")
  file:write(table.concat(script, "\n") .. "\n")
  file:close()
  local said = os.tmpname()
  local status = os.execute(("gnuplot %s >%s 2>&1"):format(files.quoted(out .. "/curve.gnuplot"), said))
  local words = contents(said):gsub("%s+$", "")
  os.remove(said)
  local drawn = contents(path)
  if status ~= 0 or drawn:sub(-#END) ~= END then
    error(("cannot write %s: gnuplot's status is %d, and the file ends after %d bytes%s"):format(path, status, #drawn,
      words ~= "" and "; gnuplot says: " .. words or "; is the disk full?"), 0)
  end
  return true
end

return M
