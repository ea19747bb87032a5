-- run.lua: runs the tests: cmocka programs, busted specs, the same specs under mpirun and on several machines, fuzzers,
-- lint. `make test` calls it.
--
--   luajit tests/run.lua [--parts=c,lua,mpi,net,fuzz,lint,cuda,cuda-short,gpu,gpu-kernels] [--only=PATTERN] [--seed=N]
--     [--jobs=N]
--     [--fuzz-seconds=N] --build=build ...
--
-- Files are found by their places: tests/unit/*.c, tests/kernels/*.c, tests/fuzz/*.c (programs are built by make under
-- <build>/tests), spec/**/*_spec.lua. A file may say, within its first lines, in a comment:
--   deadline: 300 s     its time (default 60 s for C, 120 s for Lua; on pretended GPUs at least what those get)
--   mpirun: 2 3 4       run it under mpirun too, at these world sizes; "mpirun: none" keeps a file out. Unless said
--                       otherwise spec/dist runs at 2 3 4, and spec/shard, which sees no transport, at 3: its sim
--                       worlds have other sizes
--   machines: 2,2 3,1   run it on pretended machines too (tests/net/nodes), of so many ranks each; --parts=all-net runs
--                       all that run under
--                       mpirun -n 4 on 2,2 and on 1,1,1,1
--   nccl: too           a spec that starts its own ranks: --parts=cuda has them exchange tensors of devices by the
--                       transport nccl
-- --parts=cuda has another device behind the name `opaque`: kernels/cuda compiled for the host (cuda-short: the short
-- specs only, in one process each). --parts=gpu has --device there (cuda), and nccl with as many ranks as there are
-- --gpus. --parts=gpu-kernels runs the case lists of tests/kernels on the kernels of that device (--kernels: their
-- library).
--   cuda: always        a short one of those that --parts=cuda runs: run it so beside --parts=lua (mpi: on nccl) too
--     inputs: 30000       how many a fuzzer makes (default 100000; lua.lua counts children)
--
-- Fuzzers make the same inputs on every machine and every day: as many as that, of seed 1 unless --seed says another.
-- With --fuzz-seconds each runs for so long instead, with a seed from the clock (`make fuzz`).
package.path = "./?.lua;" .. package.path
local process = require "tests.harness.process"
local report = require "tests.harness.report"
local schedule = require "tests.harness.schedule"

--- Processor seconds that all programs of `make test` may take on two usual cores, beside which the last lines tell
--- what they took.
local BUDGET = 1000
local ALL_PARTS = "lint,c,lua,mpi,net,fuzz"

local options = { parts = ALL_PARTS, jobs = "", seed = "", only = "", build = "build", san = "", preload = "", mpi = "",
  busted = "", cmocka = "", luacheck = "", fuzz_seconds = "", device = "cuda", kernels = "", gpus = "1" }
for _, word in ipairs(arg) do
  local name, value = word:match "^%-%-([%w_-]+)=(.*)$"
  name = name and name:gsub("-", "_")
  if not name or not options[name] then
    io.stderr:write(("run.lua: unknown argument '%s'\n"):format(word))
    os.exit(2)
  end
  options[name] = value
end

local B = options.build
local seed = tonumber(options.seed) or os.time() % 1000000
local fuzz_seconds = tonumber(options.fuzz_seconds)
local fuzz_seed = tonumber(options.seed) or fuzz_seconds and seed or 1
local slow = ({ address = 4, undefined = 3, thread = 10 })[options.san] or 1
local terminal = process.is_terminal()

local function lines(command)
  local out, pipe = {}, assert(io.popen(command))
  for line in pipe:lines() do out[#out + 1] = line end
  pipe:close()
  return out
end

local cpus = tonumber(lines("nproc")[1]) or 1
local jobs_limit = tonumber(options.jobs) or cpus
local here = lines("pwd")[1]

-- -- what there is to run ---------------------------------------------------------------------------------------------

local jobs, skips = {}, {}
local wanted = {}
for part in options.parts:gmatch "[^,]+" do wanted[part] = true end

local function head_of(path)
  local file, text = assert(io.open(path)), {}
  for line in file:lines() do
    text[#text + 1] = line
    if #text == 20 then break end
  end
  file:close()
  return table.concat(text, "\n")
end

local base_env = {
  LUA_PATH = ("%s/lua/?.lua;./lua/?.lua;./lua/?/init.lua;./?.lua;;"):format(B),
  PERI_BUILD = B,
  PERI_SAN = options.san,
  PERI_LIBRARY = ("%s/%s/libperilune.so"):format(here, B),
  PERI_PLUGIN_PATH = here .. "/" .. B,
  PERI_NUM_THREADS = "2",
  PERI_CACHE_BYTES = tostring(32 * 2 ^ 20), -- what measures past the caches takes as long on all machines
  XDG_CACHE_HOME = ("%s/%s/cache"):format(here, B), -- what this build measures stays with it
  PMIX_MCA_psec = "^munge", -- as the launcher sets it: where MUNGE is installed and does not run, each mpirun waits 2 s
                            -- for it
  PERI_LUA_PATH = false, PERI_LOG = false, PERI_TRACEBACK = false, MAKEFLAGS = false, MFLAGS = false, MAKELEVEL = false,
  CMOCKA_MESSAGE_OUTPUT = "TAP",
  ASAN_OPTIONS = ("suppressions=%s/tests/harness/asan.supp:detect_leaks=1:allocator_may_return_null=1"):format(here),
  LSAN_OPTIONS = ("suppressions=%s/tests/harness/lsan.supp:print_suppressions=0"):format(here),
  UBSAN_OPTIONS = "print_stacktrace=1:halt_on_error=1",
  TSAN_OPTIONS = ("suppressions=%s/tests/harness/tsan.supp:halt_on_error=1:allocator_may_return_null=1"):format(here),
}

local function job(j)
  if options.only ~= "" and not j.name:find(options.only) then return end
  local env = {}
  for _, from in ipairs { base_env, j.env or {} } do
    for name, value in pairs(from) do env[name] = value end
  end
  j.env = env
  j.file = ("%s/test/%s"):format(B, (j.name:gsub("[^%w]+", "-")))
  j.deadline = math.max(j.head and tonumber(j.head:match "deadline: (%d+) s") or 0, j.deadline) * slow
  local takes, weight = schedule.of_head(j.head or j.note or "")
  j.takes, j.weight = takes, math.min(j.weight or weight, jobs_limit)
  jobs[#jobs + 1] = j
end

local function skip(name, reason) skips[#skips + 1] = { name = name, reason = reason } end

-- Programs found by wildcard become <build>/tests/<folder>/<name>.
local function programs(folder)
  local found = {}
  for _, path in ipairs(lines(("ls tests/%s/*.c tests/%s/*.cc 2>/dev/null"):format(folder, folder))) do
    found[#found + 1] = { name = path, program = ("./%s/%s"):format(B, (path:gsub("%.cc?$", ""))),
      head = head_of(path) }
  end
  return found
end

if wanted.lint and options.san == "" then
  job { name = "lint", part = "lint", deadline = 120, note = "takes: 20 s",
    argv = { "luajit", "tests/lint/run.lua", "--build=" .. B, "--luacheck=" .. options.luacheck } }
end

if wanted.c then
  for _, folder in ipairs { "unit", "kernels" } do
    for _, p in ipairs(programs(folder)) do
      if options.cmocka == "" then skip(p.name, "cmocka was not found")
      elseif p.name:find "%.cc$" and not io.open(p.program) then skip(p.name, "no C++ compiler was found")
      else job { name = p.name, part = "C programs", head = p.head, argv = { p.program }, deadline = 60,
        tap = true } end
    end
  end
end

--- How long a fuzzer runs: "30s", or the number that its head tells.
local function fuzz_length(head, usual)
  return fuzz_seconds and ("%gs"):format(fuzz_seconds) or head:match "inputs: (%d+)" or usual
end

--- Does a test use the device `opaque`, in so many words or through worlds.each? Then it can run on another device of
--- that name.
local function on_opaque(path)
  local file = assert(io.open(path))
  local text = file:read "*a"
  file:close()
  return text:find '"opaque"' ~= nil or text:find "worlds%.each" ~= nil or text:find "spec%.support%.devices" ~= nil
end
-- What stands behind the name opaque in the parts that are about it.
local on_host = ("%s/%s/cuda_host"):format(here, B)
local stand_ins = {
  cuda = { name = "kernels/cuda on the host", device = "cuda_host", most = 4 },
  gpu = { name = options.device, device = options.device, most = tonumber(options.gpus), shared = true },
  ["gpu-kernels"] = { name = options.device, device = options.device, kernels = true },
}
local pretended_gpu = io.open(on_host .. "/libperilune_cuda_host.so")
if pretended_gpu then pretended_gpu:close() end
if wanted["cuda-short"] then wanted.cuda, stand_ins.cuda.few = true, true end
stand_ins.cuda.short = (wanted.lua or wanted.mpi) and not wanted.cuda and options.san == "" and pretended_gpu ~= nil
for part, s in pairs(stand_ins) do -- any order: each by itself
  if wanted[part] or s.short then
    local pretended = s.device == "cuda_host"
    s.env = { PERI_OPAQUE_DEVICE = s.device, PERI_PLUGIN_PATH = (pretended and on_host .. ":" or "") .. here .. "/"
      .. B, LD_LIBRARY_PATH = pretended and on_host or nil, PERI_CUDA_KERNELS = options.kernels ~= ""
      and options.kernels or nil, PERI_TEST_WORLDS = not s.short and "all" or nil }
  else stand_ins[part] = nil end
end

local function with(env, more)
  local out = {}
  for _, from in ipairs { env, more } do
    for name, value in pairs(from) do out[name] = value end
  end
  return out
end

for _, s in pairs(stand_ins) do -- any order: jobs are shuffled
  for _, p in ipairs(options.cmocka ~= "" and programs "unit" or {}) do
    if on_opaque(p.name) and not s.short and not s.few and not s.kernels then
      job { name = ("%s (%s)"):format(p.name, s.name), part = s.name, head = p.head, argv = { p.program },
        deadline = 120, tap = true, env = s.env }
    end
  end
  for _, p in ipairs(options.cmocka ~= "" and s.kernels and programs "kernels" or {}) do
    job { name = ("%s (%s)"):format(p.name, s.name), part = s.name, head = p.head, argv = { p.program }, deadline = 120,
      tap = true, env = s.env }
  end
end

--- The pretended GPU whose device code is watched for races (tests/cuda_host/races.cc): the case lists, and the short
--- specs.
local races = wanted.cuda and not wanted["cuda-short"] and io.open(on_host .. "/races/libperilune_cuda_host.so")
local watched = { name = "watched for races", env = { PERI_OPAQUE_DEVICE = "cuda_host",
  PERI_PLUGIN_PATH = ("%s/races:%s/%s"):format(on_host, here, B), PERI_CUDA_KERNELS = on_host
    .. "/races/libperilune_cuda_host.so" } }
if races then races:close() else watched = nil end
for _, p in ipairs(watched and options.cmocka ~= "" and programs "kernels" or {}) do
  job { name = ("%s (%s)"):format(p.name, watched.name), part = watched.name, head = p.head, argv = { p.program },
    deadline = 360, tap = true, env = watched.env }
end

if wanted.fuzz then
  local deadline = 60 + (fuzz_seconds or 0)
  for _, p in ipairs(programs "fuzz") do
    job { name = p.name, part = "fuzzers", head = p.head, argv = { p.program, fuzz_length(p.head, "100000"),
      tostring(fuzz_seed) }, deadline = deadline, whole = true }
  end
  for _, path in ipairs(lines "ls tests/fuzz/*.lua 2>/dev/null") do -- each starts children of its own, which may crash
    local head = head_of(path)
    job { name = path, part = "fuzzers", head = head, argv = { "luajit", path, fuzz_length(head, "20"),
      tostring(fuzz_seed) }, deadline = deadline + 90, whole = true, env = { PERI_FUZZ_PRELOAD = options.preload ~= ""
        and options.preload } }
  end
end

local busted_words = { "tests/harness/busted_main.lua", "--output=tests/harness/busted_report.lua", "--seed=" .. seed }

local function busted_argv(first, path)
  local argv = {}
  for _, word in ipairs(first) do argv[#argv + 1] = word end
  for _, word in ipairs(busted_words) do argv[#argv + 1] = word end
  argv[#argv + 1] = path
  return argv
end

--- Why there are no pretended machines here; nil: there are.
local function no_machines()
  if options.mpi == "" then return "Open MPI was not found" end
  if options.busted == "" then return "busted was not found" end
  if options.san ~= "" then return "not under sanitizers" end
  local said = lines(("PERI_BUILD=%s sh tests/net/nodes 1,1 true 2>&1; echo $?"):format(B))
  if said[#said] == "0" then return nil end
  return "no pretended machines here: " .. (said[1]:gsub("^nodes: ", ""))
end

local why_no_machines, known_machines
--- Run a spec on pretended machines: shapes such as "2,2 3,1".
local function on_machines(path, head, shapes)
  for shape in shapes:gmatch "%S+" do
    local name, ranks = ("%s (on machines of %s)"):format(path, shape), 0
    for n in shape:gmatch "%d+" do ranks = ranks + n end
    local named = options.only == "" or name:find(options.only)
    if named and not known_machines then known_machines, why_no_machines = true, no_machines() end
    if named and why_no_machines then skip(name, why_no_machines)
    elseif named then
      job { name = name, part = "specs on several machines", head = head, ranks = ranks, deadline = 120,
        weight = jobs_limit, env = { PERI_NUM_THREADS = "1", PERI_COMM_TIMEOUT_S = "30" },
        argv = busted_argv({ "sh", "tests/net/nodes", shape, B .. "/perilune", "run", "-n", tostring(ranks) }, path) }
    end
  end
end
local golden_read = B .. "/test/golden.read" -- specs append the names of the golden files that they read

local specs = lines "find spec -name '*_spec.lua' | LC_ALL=C sort"
for _, path in ipairs(specs) do
  local head = head_of(path)
  local usual = path:match "^spec/dist/" and "2 3 4" or path:match "^spec/shard/" and "3"
  local worlds = head:match "mpirun: ([%d ]+)" or not head:match "mpirun: none" and usual
  if wanted.lua then
    if options.busted == "" then skip(path, "busted was not found")
    else
      job { name = path, part = "specs", head = head, argv = busted_argv({ "luajit" }, path), deadline = 120,
        env = { LD_PRELOAD = options.preload ~= "" and options.preload, PERI_GOLDEN_READ = golden_read } }
    end
  end
  -- any order: jobs are shuffled
  for _, s in pairs(options.busted ~= "" and not wanted["gpu-kernels"] and stand_ins or {}) do
    local nccl = with(s.env, { PERI_TEST_DEVICE_TRANSPORT = "nccl",
      PERI_CUDA_HOST_GPUS = s.device == "cuda_host" and tostring(s.most) or nil }) -- NCCL wants one for each rank
    local ranked = { PERI_NUM_THREADS = "1", PERI_COMM_TIMEOUT_S = "30" }
    local function under_mpirun(what, n, env)
      job { name = ("%s (%s, mpirun -n %s)"):format(path, what, n), part = "specs on " .. what, head = head,
        ranks = tonumber(n), deadline = 360, argv = busted_argv({ B .. "/perilune", "run", "-n", n }, path),
        env = with(env, ranked) }
    end
    local taken = not s.short and not s.few or head:find("cuda: always", 1, true)
    if on_opaque(path) and taken and (wanted.lua or not s.short) then
      job { name = ("%s (%s)"):format(path, s.name), part = s.name, head = head, argv = busted_argv({ "luajit" }, path),
        deadline = 360, env = with(s.env, { LD_PRELOAD = options.preload ~= "" and options.preload or nil }) }
    end
    if watched and s.device == "cuda_host" and head:find("cuda: always", 1, true) and on_opaque(path) then
      job { name = ("%s (%s)"):format(path, watched.name), part = watched.name, head = head,
        argv = busted_argv({ "luajit" }, path), deadline = 900, env = watched.env }
    end
    if head:match "nccl: too" and not s.short and not s.few and options.mpi ~= "" and s.most >= 4 then
      job { name = path .. " (nccl)", part = "specs on nccl", head = head, deadline = 600, env = nccl,
        argv = busted_argv({ "luajit" }, path) }
    end
    local ranked_too = worlds and taken and not s.few and (wanted.mpi or not s.short)
    if ranked_too and path:match "^spec/dist/" and options.mpi ~= "" and on_opaque(path) then
      for n in worlds:gmatch "%d+" do
        -- beside --parts=mpi two ranks, which are each other's only neighbour, and four
        if tonumber(n) <= s.most and not (s.short and n == "3") then under_mpirun("nccl", n, nccl) end
        if s.shared and n == "2" then under_mpirun("a shared " .. s.name, n, s.env) end
      end
    end
  end
  if wanted.mpi and worlds then
    if options.mpi == "" then skip(path .. " under mpirun", "Open MPI was not found")
    elseif options.busted == "" then skip(path .. " under mpirun", "busted was not found")
    else
      for n in worlds:gmatch "%d+" do
        job { name = ("%s (mpirun -n %s)"):format(path, n), part = "specs under mpirun", head = head,
          ranks = tonumber(n), deadline = 120, env = { PERI_NUM_THREADS = "1", PERI_COMM_TIMEOUT_S = "30" },
          argv = busted_argv({ B .. "/perilune", "run", "-n", n }, path) }
      end
    end
  end
  local shapes = head:match "machines: ([%d, ]+)"
  if wanted["all-net"] and worlds and (worlds:find "4" or usual == "3") then on_machines(path, head, "2,2 1,1,1,1")
  elseif wanted.net and shapes then on_machines(path, head, shapes) end
end

-- -- running ----------------------------------------------------------------------------------------------------------

local seconds_of = {} -- part -> the seconds of its programs, which may run beside each other
local totals = { pass = 0, fail = 0, skip = #skips }
local failed_names = {}

local function read_file(path)
  local file = io.open(path, "rb")
  local text = file and file:read "*a" or ""
  if file then file:close() end
  return text
end

--- The tests of a finished job: what each of its ranks reported, and a failure for a program that died or said nothing.
local function results(j)
  local p, all, order = j.process, {}, {}
  local function add(t, key, who)
    local known = all[key]
    if not known then
      all[key] = t
      order[#order + 1] = t
    elseif t.status == "fail" or known.status ~= "fail" and t.status == "skip" then
      known.status, known.message = t.status, known.status == "fail" and known.message .. "\n" .. t.message or t.message
    end
    if t.status == "fail" then t.message = who .. t.message end
  end
  if j.whole then
    local ok = p.code == 0 and not p.late
    return { { status = ok and "pass" or "fail", name = j.name, message = ok and "" or process.how(p) .. "\n"
      .. read_file(p.log) } }
  end
  local complete, any = true, false
  for rank = 0, (j.ranks or 1) - 1 do
    local tests, running, whole
    if j.tap then tests, running, whole = report.read_tap(read_file(p.log))
    else tests, running, whole = report.read(("%s.report.%d"):format(j.file, rank)) end
    local seen, who = {}, j.ranks and ("rank %d: "):format(rank) or ""
    for _, t in ipairs(tests) do
      any = any or t.status == "fail"
      seen[t.name] = (seen[t.name] or 0) + 1
      add(t, t.name .. "#" .. seen[t.name], who) -- the same name twice is two tests
    end
    if not whole and complete then
      complete = false
      order[#order + 1] = { status = "fail", name = running or "(whole program)", message = who .. process.how(p) }
    end
  end
  local unclean = p.code ~= 0 or p.late
  if any or not complete then
    for _, t in ipairs(order) do
      if t.status == "fail" and (j.tap or not complete) then
        t.log = read_file(p.log)
        break
      end
    end
  end
  if complete and unclean and not any then
    order[#order + 1] = { status = "fail", name = "(end of the program)", message = process.how(p),
      log = read_file(p.log) }
  end
  return order
end

local function print_failure(j, t)
  io.write(("\nFAILED  %s: %s\n"):format(j.name, t.name))
  local text = t.message .. (t.log and "\n" .. t.log or "")
  if #text > 20000 then text = text:sub(1, 14000) .. "\n ... \n" .. text:sub(-6000) end
  io.write("    ", (text:gsub("\n$", ""):gsub("\n", "\n    ")), "\n")
end

local finished = 0
local function progress(running)
  if not terminal then return end
  local names = {}
  for _, j in ipairs(running) do names[#names + 1] = j.name:match "([^/]+)$" end
  local now = table.concat(names, " "):sub(1, 90)
  io.write(("\r\27[K[%d/%d] %d passed, %d failed  %s"):format(finished, #jobs, totals.pass, totals.fail, now))
  io.flush()
end

local function finish(j)
  finished = finished + 1
  local count, bad = 0, 0
  local tests = results(j)
  seconds_of[j.part] = (seconds_of[j.part] or 0) + j.process.seconds
  if terminal then io.write "\r\27[K" end
  for _, t in ipairs(tests) do
    totals[t.status] = totals[t.status] + 1
    if t.status == "skip" then skips[#skips + 1] = { name = j.name .. ": " .. t.name, reason = t.message }
    elseif t.status == "fail" then
      bad = bad + 1
      failed_names[#failed_names + 1] = j.name .. ": " .. t.name
    else count = count + 1 end
  end
  io.write(("  %-6s %-58s %4d passed  %5.1f s, of a processor %5.1f s\n"):format(bad > 0 and "FAILED" or "ok", j.name,
    count, j.process.seconds, j.process.cpu_seconds or 0))
  for _, t in ipairs(tests) do
    if t.status == "fail" then print_failure(j, t) end
  end
  io.flush()
end

local function start(j)
  os.execute(("rm -f %s.report.*"):format(j.file))
  j.env.PERI_TEST_REPORT = j.file .. ".report"
  j.process = process.start(j.argv, j.env, j.file .. ".log", j.deadline)
end

math.randomseed(seed)
local order = schedule.order(jobs, jobs_limit)

os.execute(("mkdir -p %s/test"):format(B))
if wanted.lua then os.remove(golden_read) end -- a run of other parts may be one of its jobs
print(("seed %d (the same %s again: make %s SEED=%d)"):format(seed, fuzz_seconds and "inputs" or "order",
  fuzz_seconds and "fuzz" or "test", seed))
local began = process.now()
schedule.run(order, jobs_limit, start, finish, progress)
if terminal then io.write "\r\27[K" end

--- When all specs have run: every golden file was read by one of them.
local function check_golden()
  local seen, unread = {}, {}
  for name in read_file(golden_read):gmatch "[^\n]+" do seen[name] = true end
  for _, path in ipairs(lines "find spec/golden -name '*.safetensors' -o -name '*.json' | LC_ALL=C sort") do
    local name = path:match "^spec/golden/(.*)%.%w+$"
    if not seen[name] then unread[#unread + 1] = name end
  end
  local name = "spec/golden: every file is read by a spec"
  if #unread == 0 then
    totals.pass = totals.pass + 1
    return
  end
  totals.fail = totals.fail + 1
  failed_names[#failed_names + 1] = name
  print_failure({ name = "tests/run.lua" }, { name = name, message = "read by none: " .. table.concat(unread, ", ") })
end
if wanted.lua and options.only == "" and options.busted ~= "" and options.san == "" then check_golden() end

-- -- closing ----------------------------------------------------------------------------------------------------------

if #skips > 0 then
  print "\nskipped:"
  for _, s in ipairs(skips) do print(("  %s: %s"):format(s.name, s.reason)) end
end
if #failed_names > 0 then
  print "\nfailed:"
  for _, name in ipairs(failed_names) do print("  " .. name) end
end
if #jobs == 0 and #skips == 0 then
  print "nothing to run"
  totals.fail = 1
end
local whole_run = options.parts == ALL_PARTS and options.only == "" and options.san == "" and not fuzz_seconds
if #order > 1 then print("\n" .. table.concat(schedule.report(order, whole_run and BUDGET), "\n")) end
local parts = {}
for _, part in ipairs { "lint", "C programs", "fuzzers", "specs", "specs under mpirun", "specs on several machines",
  "kernels/cuda on the host", "watched for races", "specs on nccl", options.device, "specs on a shared "
    .. options.device } do
  if seconds_of[part] then parts[#parts + 1] = ("%s %.0f"):format(part, seconds_of[part]) end
end
print(("%.1f s; seconds of all programs, %d at a time: %s"):format(process.now() - began, jobs_limit,
  table.concat(parts, ", ")))
print(("%d passed, %d failed, %d skipped"):format(totals.pass, totals.fail, totals.skip))
os.exit(totals.fail == 0 and 0 or 1)
