-- check.lua: what `make gpu-check` does on a machine with a GPU. It is made of parts, those that tell most in the least
-- time first. Each part has a deadline: one that hangs (a kernel that never ends) is named and stopped, and the next
-- one begins. What cannot be done is said and counted as skipped; the exit status is 1 when anything failed.
--
--   luajit tests/gpu/check.lua --build=build --device=cuda --kernels=FILE [--sanitizer=FILE] [--only=PATTERN]
--     [--parts=NAME,...]
--     [--most=SECONDS] [--mpi=] [--busted=] [--cmocka=]     (versions; empty: not found)
--
-- --device=cuda_host runs all of it on the pretended GPU: the script is tested so, and the times say nothing. --only:
-- of the specs and case lists. --parts: these, in the order of the table below. --most: no part may take longer than
-- that.
package.path = "./?.lua;" .. package.path
local process = require "tests.harness.process"

local options = { build = "build", device = "cuda", kernels = "", sanitizer = "", only = "", parts = "", most = "",
  mpi = "", busted = "", cmocka = "" }
for _, word in ipairs(arg) do
  local name, value = word:match "^%-%-(%w+)=(.*)$"
  if not name or not options[name] then
    io.stderr:write(("check.lua: unknown argument '%s', allowed: --build= --device= --kernels= --sanitizer= --only= "
      .. "--parts= --most= --mpi= --busted= --cmocka=\n"):format(word))
    os.exit(2)
  end
  options[name] = value
end
local B, device = options.build, options.device
local pretended = device == "cuda_host"
local most = tonumber(options.most) or math.huge
local began, total = process.now(), { passed = 0, failed = 0, skipped = 0 }
local problems = {} -- lines for the end
local gpus = 1
local named = options.only == "" -- there is a spec or case list of this name

local pipe = assert(io.popen "pwd")
local here = pipe:read "*l"
pipe:close()
local env = {
  PERI_PLUGIN_PATH = (pretended and ("%s/%s/cuda_host:"):format(here, B) or "") .. ("%s/%s"):format(here, B),
  LUA_PATH = ("%s/lua/?.lua;./lua/?.lua;./lua/?/init.lua;./?.lua;;"):format(B),
  LD_LIBRARY_PATH = pretended and ("%s/%s/cuda_host"):format(here, B) or nil,
}

-- -- running and counting ---------------------------------------------------------------------------------------------

local part_ends -- when the deadline of the part is over
local part_late -- it was

local function passed() total.passed = total.passed + 1 end
local function failed(what)
  total.failed = total.failed + 1
  problems[#problems + 1] = "failed: " .. what
  print("FAILED  " .. what)
end
local function skipped(what)
  total.skipped = total.skipped + 1
  problems[#problems + 1] = "skipped: " .. what
  print("skipped: " .. what)
end

--- Run a program until the part's deadline; show what it prints. Returns whether it ended well, and its lines.
local function run(argv, quiet)
  local log = ("%s/gpu-check.log"):format(B)
  if part_late then return false, {} end
  os.remove(log) -- of the run before
  local p = process.start(argv, env, log, math.max(part_ends - process.now(), 0))
  local lines, rest, file = {}, "", nil
  repeat
    local ended = process.poll(p)
    file = file or io.open(log, "rb")
    local text = file and file:read "*a" or ""
    rest = rest .. text
    for line in rest:gmatch "([^\n]*)\n" do
      lines[#lines + 1] = line
      if not quiet then print(line) end
    end
    rest = rest:match "[^\n]*$"
    io.flush()
    if not ended then process.sleep(0.05) end
  until ended
  if rest ~= "" then
    lines[#lines + 1] = rest
    if not quiet then print(rest) end
  end
  if file then file:close() end
  part_late = p.late
  return p.code == 0 and not p.late, lines
end

local launcher = B .. "/perilune"
local function perilune(...) return { launcher, "run", ... } end

--- tests/run.lua with some of its parts, whose counts are added to ours.
local function run_tests(parts, what, kernels)
  local _, said = run { "luajit", "tests/run.lua", "--parts=" .. parts, "--build=" .. B, "--device=" .. device,
    "--kernels=" .. kernels, "--gpus=" .. gpus, "--only=" .. options.only, "--mpi=" .. options.mpi, "--busted="
      .. options.busted, "--cmocka=" .. options.cmocka }
  for _, line in ipairs(said) do
    local p, f, s = line:match "^(%d+) passed, (%d+) failed, (%d+) skipped$"
    if p then
      if table.concat(said, "\n"):find "\nnothing to run\n" then
        return print(("there are no %s of this name"):format(what))
      end
      named = true
      total.passed, total.failed, total.skipped = total.passed + p, total.failed + f, total.skipped + s
      if tonumber(f) > 0 then problems[#problems + 1] = ("failed: %s of the %s"):format(f, what) end
      return
    end
  end
  if not part_late then failed(("the %s: tests/run.lua did not come to its end"):format(what)) end
end

-- -- the parts --------------------------------------------------------------------------------------------------------

--- name, seconds, what it does. Sums up to an hour on a machine where everything hangs.
local parts = {}
local function part(name, seconds, body) parts[#parts + 1] = { name = name, seconds = seconds, body = body } end

part("device", 60, function()
  local ok, lines = run(perilune("tests/gpu/device.lua", device))
  if not ok then return "stop" end
  for _, line in ipairs(lines) do gpus = tonumber(line:match "^(%d+) devices?") or gpus end
  passed()
end)

part("families", 120, function()
  if run(perilune("tests/gpu/short.lua", device)) then passed() else failed "families: tests/gpu/short.lua" end
end)

part("kernels", 600, function()
  if options.cmocka == "" then return skipped "case lists of tests/kernels: cmocka was not found" end
  run_tests("gpu-kernels", "case lists", here .. "/" .. options.kernels)
end)

part("demonstration", 300, function()
  local losses = {}
  for _, d in ipairs { "cpu", device } do
    local argv = perilune("examples/dlrm.lua", "--eval-every", "0", "--no-baseline", "--no-recommend", "--device", d)
    for word in (pretended and "--data synthetic:300 --rows 100 --steps 2 --batch-size 16 --dim 8" or
      "--data synthetic:40000 --steps 60 --batch-size 256"):gmatch "%S+" do argv[#argv + 1] = word end
    local went, text = run(argv, true)
    losses[d] = went and tonumber(table.concat(text, "\n"):match ".*loss +([%d.]+)")
    print(("%-10s loss %s"):format(d, losses[d] or table.concat(text, "\n")))
  end
  if not losses.cpu or not losses[device] then failed "demonstration: examples/dlrm.lua"
  elseif math.abs(losses.cpu - losses[device]) > 1e-3 * losses.cpu then
    failed(("demonstration: loss %g on %s, %g on cpu"):format(losses[device], device, losses.cpu))
  else passed() end
end)

part("benchmark", 300, function()
  os.execute(("mkdir -p %s/bench && rm -f %s/bench/gpu.jsonl"):format(B, B))
  local argv = perilune("tests/bench/gpu.lua", "--device", device, "--out", B .. "/bench/gpu.jsonl")
  for word in (pretended and "--scale 20000 --rounds 1" or ""):gmatch "%S+" do argv[#argv + 1] = word end
  if run(argv) then passed() else failed "benchmark: tests/bench/gpu.lua" end
end)

-- It is not shown where calls come from: compute-sanitizer would walk the stack, and compiled Lua has no tables for
-- that, which ends the process.
for _, tool in ipairs { "memcheck", "racecheck", "synccheck", "initcheck" } do
  part(tool, 300, function()
    if options.sanitizer == "" then return skipped(tool .. ": compute-sanitizer is not beside nvcc") end
    if run { options.sanitizer, "--tool", tool, "--show-backtrace", "no", "--error-exitcode", "9", launcher, "run",
      "tests/gpu/short.lua", device } then passed()
    else failed(("%s: compute-sanitizer --tool %s on tests/gpu/short.lua"):format(tool, tool)) end
  end)
end

part("specs", 1800, function()
  if options.busted == "" then skipped "specs: busted was not found" end
  run_tests("gpu", "specs", "")
  if gpus < 2 and not pretended then skipped "the transport nccl: it wants a GPU for each rank, and there is one" end
end)

-- -- all of them ------------------------------------------------------------------------------------------------------

local wanted, names = {}, {}
for i, p in ipairs(parts) do names[i], names[p.name] = p.name, true end
for name in options.parts:gmatch "[^,%s]+" do
  if not names[name] then
    io.stderr:write(("check.lua: there is no part '%s'; parts are %s\n"):format(name, table.concat(names, ", ")))
    os.exit(2)
  end
  wanted[name] = true
end
os.execute("mkdir -p " .. B)
for _, p in ipairs(parts) do
  if p.name == "device" or next(wanted) == nil or wanted[p.name] then
    local from, bad, seconds = process.now(), total.failed, math.min(p.seconds, most)
    part_ends, part_late = from + seconds, false
    print(("\n== %s (%.0f s have gone by, this part may take %g s)"):format(p.name, from - began, seconds))
    io.flush()
    local told = p.body()
    if part_late and told ~= "stop" then
      if total.failed == bad then failed(p.name) end
      local late = (" did not end within %g s and was stopped"):format(seconds)
      problems[#problems] = ("%s (%s%s)"):format(problems[#problems], p.name, late)
      print(p.name .. late)
    end
    if told == "stop" then
      print(("gpu-check: device '%s' cannot be used here%s: nothing was checked"):format(device, part_late and
        (", its first call did not end within %g s"):format(seconds) or ""))
      print "0 passed, 1 failed, 0 skipped"
      os.exit(1)
    end
  end
end
if not named and (next(wanted) == nil or wanted.kernels or wanted.specs) then
  failed(("no spec or case list is named '%s' (ONLY)"):format(options.only))
end

print(("\n== the end (%.0f s)"):format(process.now() - began))
for _, p in ipairs(problems) do print(p) end
print(("%d passed, %d failed, %d skipped"):format(total.passed, total.failed, total.skipped))
os.exit(total.failed == 0 and 0 or 1)
