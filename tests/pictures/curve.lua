-- curve.lua: the learning curve of a run of the demonstration, from what it wrote (log.jsonl, summary.json).
local json = require "dkjson"
local svg = dofile "tests/pictures/svg.lua"

local WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 330, 62, 200, 58, 40

local function read(path)
  local file = assert(io.open(path))
  local text = file:read "*a"
  file:close()
  return text
end

local function grouped(n)
  local text = ("%d"):format(n):reverse():gsub("(%d%d%d)", "%1,"):reverse()
  return (text:gsub("^,", ""))
end

--- Draw `to` of the run in the folder `from`.
return function(from, to)
  local summary, points = assert(json.decode(read(from .. "/summary.json"))), {}
  for line in io.lines(from .. "/log.jsonl") do points[#points + 1] = assert(json.decode(line)) end
  local most = 0.6
  local function x(step) return LEFT + step / summary.steps * (WIDTH - LEFT - RIGHT) end
  local function y(loss) return TOP + (1 - math.min(loss, most) / most) * (HEIGHT - TOP - BOTTOM) end
  local d = svg.new(WIDTH, HEIGHT, "Learning curve of the demonstration")
  d:text(LEFT, 24, ("make demo: which package depends on which? %d steps on %d processes"):format(summary.steps,
    summary.ranks), { size = 15, bold = true })
  d:text(LEFT, 43, ("log-loss, less is better; %d passes over %s samples"):format(
    math.floor(summary.steps / summary.steps_per_pass + 0.5), grouped(summary.steps_per_pass * summary.batch_size)),
      { color = "#555555" })
  for loss = 0, most, 0.1 do
    d:line(LEFT, y(loss), WIDTH - RIGHT, y(loss), { color = "#e3e3e3" })
    d:text(LEFT - 8, y(loss) + 4, ("%.1f"):format(loss), { size = 11, anchor = "end", color = "#555555" })
  end
  for part = 0, 4 do
    local step = summary.steps * part / 4
    d:text(x(step), HEIGHT - BOTTOM + 17, ("%d"):format(step), { size = 11, anchor = "middle", color = "#555555" })
  end
  d:text(x(summary.steps / 2), HEIGHT - 6, "step", { size = 11, anchor = "middle", color = "#555555" })
  --- A level that something else reaches, with its name beside it.
  local function level(loss, name, color)
    d:line(LEFT, y(loss), WIDTH - RIGHT, y(loss), { color = color, dash = "5 4", width = 1.3 })
    d:text(WIDTH - RIGHT + 8, y(loss) + 4, ("%s %.3f"):format(name, loss), { size = 12, color = color })
  end
  local other = summary.baseline
  level(other.base_rate.logloss, "guessing the average:", "#777777")
  if other.logistic_regression then level(other.logistic_regression.logloss, "logistic regression:", "#777777") end
  local function curve(name, options)
    local list = {}
    for _, p in ipairs(points) do
      if p[name] then list[#list + 1] = { x(p.step), y(p[name]) } end
    end
    d:path(list, options)
    return list
  end
  curve("loss", { color = "#9ecae1", width = 1.6 })
  for _, p in ipairs(curve("validation_loss", { color = "#d95f02", width = 2.2 })) do
    d:circle(p[1], p[2], 3, "#d95f02")
  end
  d:text(WIDTH - RIGHT + 8, y(summary.logloss) + 4, ("this model: %.3f"):format(summary.logloss),
    { size = 12, color = "#d95f02",
  bold = true })
  d:text(WIDTH - RIGHT + 8, y(summary.logloss) + 20,
    ("AUC %.3f on %s unseen"):format(summary.auc, grouped(summary.test_samples)), { size = 11, color = "#d95f02" })
  local across = LEFT + 230
  d:line(across, TOP + 12, across + 26, TOP + 12, { color = "#9ecae1", width = 2 })
  d:text(across + 33, TOP + 16, "training", { size = 12 })
  d:line(across + 110, TOP + 12, across + 136, TOP + 12, { color = "#d95f02", width = 2.2 })
  d:text(across + 143, TOP + 16, "validation", { size = 12 })
  d:save(to)
end
