-- built.lua: how Perilune is built: the layers, and below them the way of one batch through two ranks.
local svg = dofile "tests/pictures/svg.lua"

local LUA, C, LEAF, DATA = "#fde8d0", "#d9e8f5", "#e4e4e4", "#e2f0dc"
local WIDTH, HEIGHT = 860, 534

local function box(d, x, y, w, h, fill, title, words)
  d:rect(x, y, w, h, { fill = fill, stroke = "#9a9a9a", radius = 5 })
  local lines = words and #words or 0
  local top = y + h / 2 - lines * 8 + 5
  d:text(x + w / 2, top, title, { size = 14, anchor = "middle", bold = true })
  for i, line in ipairs(words or {}) do
    d:text(x + w / 2, top + 16 * i, line, { size = 11.5, anchor = "middle", color = "#444444" })
  end
end

local function layers(d)
  box(d, 20, 14, 600, 44, LUA, "Your script in Lua", { "model, plan, training schedule: a few dozen lines" })
  box(d, 640, 14, 200, 100, DATA, "Your program in C", { "or C++: trains, or looks up,", "without Lua" })
  box(d, 20, 70, 600, 44, LUA, "Lua library",
    { "modules, planner, pipelines, data loaders; it describes, and moves no numbers" })
  d:rect(20, 126, 820, 24, { fill = "#ffffff", stroke = "#9a9a9a", radius = 5 })
  d:text(430, 143, "C API: plain headers, from which Lua's declarations are generated",
    { size = 12, anchor = "middle" })
  local names = { { "shard", "plans at work" }, { "embed", "tables, optimizers" }, { "comm", "exchanges" },
    { "sparse", "ids and bags" }, { "tensor", "gradients, streams" } }
  for i, n in ipairs(names) do box(d, 20 + (i - 1) * 165.5, 162, 158, 48, C, n[1], { n[2] }) end
  box(d, 20, 222, 400, 48, LEAF, "Devices", { "CPU: AVX-512, AVX2, plain C; CUDA: from compute capability 8.0" })
  box(d, 440, 222, 400, 48, LEAF, "Transports", { "one process; many simulated; Open MPI; NCCL" })
end

local function batch(d)
  local top = 330
  d:text(20, top - 22, "One training step on two ranks", { size = 15, bold = true })
  local columns = { { 20, "batch", "ids of this rank's", "samples" },
    { 196, "route", "each id to the rank", "that owns its row" },
  { 372, "look up", "rows of the ids of", "all ranks, pooled" },
    { 548, "return", "pooled vectors back", "to their samples" }, { 724, "dense part", "layers, loss,", "gradients" } }
  for rank = 0, 1 do
    local y = top + rank * 84
    d:text(20, y + 4, ("rank %d"):format(rank), { size = 12, color = "#777777" })
    for i, c in ipairs(columns) do
      local w = i == 5 and 116 or 128
      box(d, c[1], y + 10, w, 56, i == 5 and LUA or C, c[2], { c[3], c[4] })
      if i < 5 then d:line(c[1] + w + 4, y + 38, columns[i + 1][1] - 4, y + 38, { arrow = true, width = 1.4 }) end
    end
  end
  for _, at in ipairs { 2, 4 } do -- what crosses between the ranks
    local x = columns[at][1]
    local from, to = x + 134, columns[at + 1][1] - 8
    d:line(from, top + 46, to, top + 114, { arrow = true, color = "#2a6f97", width = 1.4 })
    d:line(from, top + 114, to, top + 46, { arrow = true, color = "#2a6f97", width = 1.4 })
  end
  d:line(840, top + 168, 326, top + 168, { arrow = true, color = "#b23a2e", width = 1.6 })
  d:text(540, top + 187, "gradients go the same way back; the owner of a row updates it there: rows stay where they "
    .. "are", { size = 12,
  anchor = "middle",
    color = "#b23a2e" })
end

return function(to)
  local d = svg.new(WIDTH, HEIGHT, "How Perilune is built")
  layers(d)
  batch(d)
  d:save(to)
end
