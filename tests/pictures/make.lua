-- make.lua: the pictures of the documents, docs/pictures: `make pictures` runs it.
--
--   luajit tests/pictures/make.lua --perilune=build/perilune [--only=PATTERN]
--
-- curve.svg  the learning curve of a run of the demonstration, which runs here (needs apt's package lists, Open MPI; 1
--            to 3 minutes)
-- plan.png   the page that `perilune plan --html` makes of shop.lua's tables (needs Chromium; Debian: chromium)
-- built.svg  how Perilune is built; and a chart for each of figures.lua. These are drawn here, always alike.
local TO, FROM = "docs/pictures", "build/pictures"

local options = { only = "" }
for _, word in ipairs(arg) do
  local name, value = word:match "^%-%-(%w+)=(.*)$"
  options[name or error(word)] = value
end

local function fail(...)
  io.stderr:write(("pictures: " .. (...) .. "\n"):format(select(2, ...)))
  os.exit(1)
end

local function run(...)
  local command = (...):format(select(2, ...))
  if os.execute(command) ~= 0 then fail("this failed: %s", command) end
end

local pictures = {}

pictures[1] = { "curve", function(to)
  if os.execute "ls /var/lib/apt/lists/*_Packages* >/dev/null 2>&1" ~= 0 then
    fail "curve.svg needs apt's package lists; run: make demo"
  end
  run("%s run -n 2 examples/dlrm.lua --out %s/demo >%s/demo.txt", options.perilune, FROM, FROM)
  dofile "tests/pictures/curve.lua"(FROM .. "/demo", to .. ".svg")
end }

pictures[2] = { "plan", function(to)
  local browser
  for _, name in ipairs { "chromium", "chromium-browser", "google-chrome" } do
    if not browser and os.execute(("command -v %s >/dev/null 2>&1"):format(name)) == 0 then browser = name end
  end
  if not browser then fail "plan.png needs Chromium, which was not found (Debian: chromium)" end
  run("root=$PWD && cd tests/pictures && $root/%s plan shop.lua --topology dgx_a100_40gb -n 16 --batch-size 2048 "
    .. "--html $root/%s/plan.html >$root/%s/plan.txt", options.perilune, FROM, FROM)
  run("%s --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1100,1020 --screenshot=%s.png "
    .. "file://$PWD/%s/plan.html >/dev/null 2>&1", browser, to, FROM)
end }

pictures[3] = { "built", function(to) dofile "tests/pictures/built.lua"(to .. ".svg") end }

for _, chart in ipairs(dofile "tests/pictures/figures.lua") do
  table.insert(pictures, { chart.name, function(to) dofile "tests/pictures/bars.lua"(chart, to .. ".svg") end })
end

run("mkdir -p %s %s", TO, FROM)
for _, picture in ipairs(pictures) do
  local name, draw = picture[1], picture[2]
  if name:match(options.only) then
    draw(TO .. "/" .. name)
    print("  PICTURE " .. TO .. "/" .. name)
  end
end
