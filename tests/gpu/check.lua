-- check.lua: what `make gpu-check` does on a machine with a GPU: the device as it is found, every spec and case list on it, a short program
-- under compute-sanitizer, the demonstration on it beside the CPU, and the benchmark table. What cannot be done is said and counted as
-- skipped; the exit status is 1 when anything failed.
--
--   luajit tests/gpu/check.lua --build=build --device=cuda --kernels=FILE [--sanitizer=FILE] [--only=PATTERN]
--     [--mpi=] [--busted=] [--cmocka=]     (versions; empty: not found)
--
-- --device=cuda_host runs all of it on the pretended GPU: the script is tested so, and the times say nothing. --only: of the specs.
package.path = "./?.lua;" .. package.path
local process = require "tests.harness.process"

local options = { build = "build", device = "cuda", kernels = "", sanitizer = "", only = "", mpi = "", busted = "", cmocka = "" }
for _, word in ipairs(arg) do
  local name, value = word:match "^%-%-(%w+)=(.*)$"
  if not name or not options[name] then
    io.stderr:write(("check.lua: unknown argument '%s', allowed: --build= --device= --kernels= --sanitizer= --only= --mpi= --busted= "
      .. "--cmocka=\n"):format(word))
    os.exit(2)
  end
  options[name] = value
end
local B, device = options.build, options.device
local pretended = device == "cuda_host"
local began, total = process.now(), { passed = 0, failed = 0, skipped = 0 }
local problems = {}

local pipe = assert(io.popen "pwd")
local here = pipe:read "*l"
pipe:close()
local env = ("PERI_PLUGIN_PATH='%s%s/%s' LUA_PATH='%s/lua/?.lua;./lua/?.lua;./lua/?/init.lua;./?.lua;;' "):format(
  pretended and ("%s/%s/cuda_host:"):format(here, B) or "", here, B, B)
if pretended then env = env .. ("LD_LIBRARY_PATH='%s/%s/cuda_host' "):format(here, B) end
local launcher = ("%s%s/perilune"):format(env, B)

local function head(text) print(("\n== %s (%.0f s)"):format(text, process.now() - began)) io.flush() end

--- Run a shell command, show what it prints; returns whether it ended well, and its lines.
local function run(command, quiet)
  local out, lines = assert(io.popen("{ " .. command .. "; } 2>&1; echo \"exit status $?\"")), {}
  for line in out:lines() do
    lines[#lines + 1] = line
    if not quiet and not line:match "^exit status" then
      print(line)
      io.flush()
    end
  end
  out:close()
  local status = table.remove(lines)
  return status == "exit status 0", lines
end

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

-- -- the device -------------------------------------------------------------------------------------------------------------------------

head "the device"
local ok, lines = run(("%s run tests/gpu/device.lua %s"):format(launcher, device))
if not ok then
  print(("gpu-check: device '%s' cannot be used here: nothing was checked"):format(device))
  print "0 passed, 1 failed, 0 skipped"
  os.exit(1)
end
passed()
local gpus = 1
for _, line in ipairs(lines) do gpus = tonumber(line:match "^(%d+) devices?") or gpus end

-- -- specs and case lists -----------------------------------------------------------------------------------------------------------

head(("specs on %s, and the case lists of the kernels"):format(device))
local _, reached = run(("%sluajit -e 'local ffi = require \"ffi\" ffi.cdef \"const void *peri_cuda_host_kernels(void);\" "
  .. "print(ffi.load(\"./%s\").peri_cuda_host_kernels() ~= nil)'"):format(env, options.kernels), true)
if reached[1] ~= "true" then
  skipped(("case lists of tests/kernels: %s"):format(reached[1] == "false"
    and "this GPU does not reach the host's memory (no heterogeneous memory management); the specs run the same kernels" or
    table.concat(reached, " ")))
end
local _, said = run(("luajit tests/run.lua --parts=gpu --build=%s --device=%s --kernels='%s' --gpus=%d --only='%s' "
  .. "--mpi='%s' --busted='%s' --cmocka='%s'"):format(B, device, reached[1] == "true" and here .. "/" .. options.kernels or "", gpus,
  options.only, options.mpi, options.busted, options.cmocka))
local counted = false
for _, line in ipairs(said) do
  local p, f, s = line:match "^(%d+) passed, (%d+) failed, (%d+) skipped$"
  if p then
    counted = true
    total.passed, total.failed, total.skipped = total.passed + p, total.failed + f, total.skipped + s
    if tonumber(f) > 0 then problems[#problems + 1] = ("failed: %s of the specs and case lists"):format(f) end
  end
end
if not counted then failed "tests/run.lua did not come to its end" end
if options.busted == "" then skipped "specs: busted was not found" end
if options.cmocka == "" then skipped "C programs: cmocka was not found" end
if gpus < 2 and not pretended then skipped "the transport nccl: it wants a GPU for each rank, and there is one" end

-- -- compute-sanitizer ----------------------------------------------------------------------------------------------------------------

head "compute-sanitizer"
if options.sanitizer == "" then
  skipped "compute-sanitizer: not beside nvcc"
  if run(("%s run tests/gpu/short.lua %s"):format(launcher, device)) then passed() else failed "tests/gpu/short.lua" end
else
  for _, tool in ipairs { "memcheck", "racecheck" } do
    local words = ("'%s' --tool %s --error-exitcode 9"):format(options.sanitizer, tool)
    if run(("%s%s %s/perilune run tests/gpu/short.lua %s"):format(env, words, B, device)) then passed()
    else failed("compute-sanitizer --tool " .. tool) end
  end
end

-- -- the demonstration ----------------------------------------------------------------------------------------------------------------

head "the demonstration"
local losses = {}
for _, d in ipairs { "cpu", device } do
  local went, text = run(("%s run examples/dlrm.lua --data synthetic:%s --eval-every 0 --no-baseline --no-recommend --device %s"):format(
    launcher, pretended and "300 --steps 2 --batch-size 16 --dim 8" or "40000 --steps 60 --batch-size 256", d), true)
  losses[d] = went and tonumber(table.concat(text, "\n"):match ".*loss +([%d.]+)")
  print(("%-10s loss %s"):format(d, losses[d] or table.concat(text, "\n")))
end
if not losses.cpu or not losses[device] then failed "the demonstration"
elseif math.abs(losses.cpu - losses[device]) > 1e-3 * losses.cpu then
  failed(("the demonstration: loss %g on %s, %g on cpu"):format(losses[device], device, losses.cpu))
else passed() end

-- -- the benchmark ------------------------------------------------------------------------------------------------------------------------

head "the benchmark"
os.execute(("mkdir -p %s/bench && rm -f %s/bench/gpu.jsonl"):format(B, B))
if run(("%s run tests/bench/gpu.lua --device %s --out %s/bench/gpu.jsonl%s"):format(launcher, device, B,
  pretended and " --scale 20000 --rounds 1" or "")) then passed()
else failed "tests/bench/gpu.lua" end

-- -- closing ------------------------------------------------------------------------------------------------------------------------------

head "the end"
for _, p in ipairs(problems) do print(p) end
print(("%d passed, %d failed, %d skipped"):format(total.passed, total.failed, total.skipped))
os.exit(total.failed == 0 and 0 or 1)
