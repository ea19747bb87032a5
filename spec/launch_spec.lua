-- The launcher: scripts on one rank and on several, their arguments, errors and exit codes; the command line.
-- deadline: 240 s
-- takes: 20 s, mostly waits
local shell = require "spec.support.shell"
local launch = require "perilune.launch"
local openmpi = require "perilune.launch.openmpi"
local perilune = shell.perilune

local folder, clean
setup(function() folder, clean = shell.temporary() end)
teardown(function() clean() end)

local function script(text) return shell.write(folder .. "/script.lua", text) end
local function run(words, env) return shell.run(perilune .. " " .. words, env) end
local function count(text, pattern) return select(2, text:gsub(pattern, "")) end

local function describe_launcher(name, f)
  describe(name, function()
    if shell.no_launcher() then return it("is there", function() pending(shell.no_launcher()) end) end
    f()
  end)
end

describe_launcher("perilune run, one rank", function()
  it("gives the script its arguments as luajit does", function()
    local path = script "print(arg[0], #arg, arg[1], arg[2], arg[3], ...)"
    assert.equal(path .. "\t3\t--steps\t5\t-n\t--steps\t5\t-n\n", (run("run " .. path .. " --steps 5 -n")))
    assert.equal(path .. "\t0\tnil\tnil\tnil\n", (run("run -n 1 -- " .. path)))
    assert.equal(path .. "\t1\t--help\tnil\tnil\t--help\n", (run("run " .. path .. " --help")))
  end)

  it("ends with the script's exit code", function()
    assert.equal(0, select(2, run("run " .. script "")))
    assert.equal(7, select(2, run("run " .. script "os.exit(7)")))
    assert.equal(1, select(2, run("run " .. script "os.exit(false)")))
    assert.equal(0, select(2, run("run " .. script "os.exit(true)")))
    assert.equal(0, select(2, run("run " .. script "pcall(error, 'caught')")))
  end)

  it("fails when its output could not be written", function()
    for _, case in ipairs { { 74, "print 'lost'" }, { 0, "os.exit(0)" }, { 7, "print 'lost' os.exit(7)" } } do
      local out, status = run("run " .. script(case[2]) .. " >/dev/full")
      assert.equal(case[1], status, case[2])
      assert.equal(case[1] == 0 and 0 or 1, count(out, "perilune: standard output could not be written"), case[2])
    end
    assert.equal(74, select(2, run "--help >/dev/full"))
    assert.equal(0, select(2, run("run " .. script "local _ = 1" .. " >&-"))) -- closed from the start, and never used
  end)

  it("prints nothing into files that it opens where its streams are closed", function()
    local path = os.tmpname()
    local writes = script(("local f = io.open('%s', 'w')\nprint 'lost'\nio.stdout:flush()\nio.stderr:write 'lost'\n"
      .. "f:write 'data'\nf:close()"):format(path))
    assert.equal(74, select(2, run("run " .. writes .. " </dev/null >&- 2>&-")))
    assert.equal("data", io.open(path):read "*a")
    os.remove(path)
  end)

  it("fails when the output of ranks could not be written, and goes on when nobody reads it any more", function()
    local path = script "print(('x'):rep(100))\nrequire('perilune').init()\nprint 'lost'"
    local out, status = run("run -n 2 " .. path .. " >/dev/full")
    assert.equal(74, status)
    assert.equal(1, count(out, "perilune: standard output could not be written"))
    assert.equal(7, select(2, run("run -n 2 " .. script "print 'lost' os.exit(7)" .. " >/dev/full")))
    local long = "for i = 1, 3000 do print(('x'):rep(60)) end "
    out = run("run -n 2 " .. script(long .. "io.stderr:write 'done\\n'") .. " | head -1")
    assert.equal(2, count(out, "done"))
    out, status = run("run -n 2 " .. script(long) .. " | wc -l")
    assert.equal("6000", out:match "%d+")
    assert.equal(0, status)
  end)

  it("says how many files it wants to open, where it may not open so many", function()
    local out, status = shell.run(("ulimit -n 64; %s run -n 2 %s"):format(shell.perilune, script ""))
    assert.equal(2, status)
    assert.matches("may open 64 files %(ulimit %-n%), wanted 116 or more\n", out)
  end)

  it("prints what an uncaught error says, once, and where", function()
    local out, status = run("run " .. script "print 'before'\nerror 'the moon is gone'")
    assert.equal(1, status)
    assert.matches("^before\n", out)
    assert.matches("perilune: the moon is gone %(.*script%.lua:2%)\n$", out)
    assert.equal(1, count(out, "the moon is gone"))
    assert.not_matches("traceback", out)
    out, status = run("run " .. script "require('perilune').empty { -3 }")
    assert.equal(1, status)
    assert.matches("peri_tensor_new: the size %-3 of the 1st dimension is negative %(.*script%.lua:1%)\n$", out)
    assert.equal(1, select(2, run("run " .. script "error()")))
    assert.matches("the script raised a table", (run("run " .. script "error {}")), 1, true)
  end)

  it("prints the traceback when asked", function()
    local path = script "local function inner() error 'deep' end\nlocal function outer() inner() end\nouter()"
    for _, out in ipairs { (run("run --traceback " .. path)), (run("run " .. path, { PERI_TRACEBACK = "1" })) } do
      assert.matches("stack traceback", out)
      assert.matches("script%.lua:1: in function 'inner'", out)
    end
  end)

  it("names a script that is missing or broken", function()
    local out, status = run "run /nowhere/script.lua"
    assert.equal(1, status)
    assert.matches("cannot open /nowhere/script.lua", out)
    out, status = run("run -n 2 " .. script "x = = 1")
    assert.equal(1, status)
    assert.equal(1, count(out, "unexpected symbol"))
    out, status = run("run -n 2 " .. shell.perilune)
    assert.equal(1, status)
    assert.equal(("perilune: '%s' is a compiled program, no Lua script; it is started by itself: mpirun -n RANKS %s\n")
      :format(shell.perilune, shell.perilune), out)
  end)

  it("sets the number of threads", function()
    assert.equal("3\n", (run("run -t 3 " .. script "print(require('perilune').ffi.C.peri_threads())")))
  end)

  it("lets a developer's files go first", function()
    local path = script "print(require('perilune.util').mine)"
    os.execute("mkdir -p " .. folder .. "/lua/perilune")
    shell.write(folder .. "/lua/perilune/util.lua", "local M = dofile 'lua/perilune/util.lua' M.mine = 'yes' return M")
    assert.equal("yes\n", (run("run " .. path, { PERI_LUA_PATH = folder .. "/lua" })))
    assert.equal("yes\n", (run("run " .. path, { PERI_LUA_PATH = folder .. "/lua/?.lua" })))
    assert.equal("nil\n", (run("run " .. path)))
  end)

  -- other processes do not lengthen it, as they do the time that passes
  it("starts within 20 ms of processor time", function()
    if shell.sanitizer ~= "" then return pending "a sanitizer is slower" end
    local best = math.huge
    for _ = 1, 8 do
      local out = shell.run(("%s run %s; times"):format(perilune, script "require 'perilune'"))
      local um, us, sm, ss = out:match "([%d.]+)m([%d.]+)s ([%d.]+)m([%d.]+)s%s*$" -- the second line: of the children
      best = math.min(best, 60 * (um + sm) + us + ss)
    end
    assert.is_true(best < 0.02, ("%g s"):format(best))
  end)

  it("says that Ctrl-C has ended it", function()
    local out, status = run("run " .. script [[
      require("ffi").cdef "int raise(int);"
      require("ffi").C.raise(2)
      print "after"
    ]])
    assert.equal("perilune: interrupted (Ctrl-C)\n", out)
    assert.equal(130, status)
  end)
end)

describe_launcher("perilune run, several ranks", function()
  local function need_mpi() return not shell.has "mpirun" and "mpirun was not found" end

  it("hands over to mpirun", function()
    if need_mpi() then return pending(need_mpi()) end
    local out, status = run("run -n 2 " .. script [[
      io.write(("rank %s of %s: %s %s\n"):format(os.getenv "OMPI_COMM_WORLD_RANK", os.getenv "OMPI_COMM_WORLD_SIZE", arg[1], ...))
    ]] .. " --steps=3")
    assert.equal(0, status, out)
    assert.equal(1, count(out, "rank 0 of 2: %-%-steps=3 %-%-steps=3\n"))
    assert.equal(1, count(out, "rank 1 of 2: %-%-steps=3 %-%-steps=3\n"))
    assert.equal(2, count(out, "\n"), out) -- and mpirun is quiet
  end)

  it("keeps Open MPI from waiting for MUNGE, unless somebody has chosen", function()
    if need_mpi() then return pending(need_mpi()) end
    local path = script "print(os.getenv 'PMIX_MCA_psec')"
    assert.equal("^munge\n^munge\n", (run("run -n 2 " .. path)))
    assert.equal("native\nnative\n", (run("run -n 2 " .. path, { PMIX_MCA_psec = "native" })))
  end)

  it("says in one line what it cannot take", function()
    if need_mpi() then return pending(need_mpi()) end
    local path = script "print 'started'"
    local function refused(words, message, env)
      local out, status = run("run -n 2 " .. words .. " " .. path, env)
      assert.not_equal(0, status)
      assert.truthy(("\n" .. out):find("\nperilune: " .. message .. "[^\n]*\n$"), out)
      assert.not_matches("started", out)
    end
    refused("--bind foo", "%-%-bind: 'foo', allowed: none, hwthread, core, ")
    refused("--bind core:foo", "%-%-bind: 'core:foo', allowed: none, hwthread, core, ")
    local five = tonumber(openmpi.find().version:match "^%d+") >= 5 -- it names the option on the standard output
    refused("--mpi --nosuchoption", five and "mpirun: its command line is refused"
      or 'mpirun: unknown option "%-%-nosuchoption"')
    refused("", "PERI_START_TIMEOUT_S is 'x', allowed: numbers above 0", { PERI_START_TIMEOUT_S = "x" })
    refused("", "PERI_START_TIMEOUT_S is '%-3', allowed: numbers above 0", { PERI_START_TIMEOUT_S = "-3" })
    refused("", "PERI_MOST_RANKS is 'x', allowed: whole numbers above 0", { PERI_MOST_RANKS = "x" })
  end)

  it("takes more ranks than processors", function()
    if need_mpi() then return pending(need_mpi()) end
    local out, status = run("run -n 5 " .. script "print('here')")
    assert.equal(0, status, out)
    assert.equal(5, count(out, "here\n"), out)
  end)

  it("ends the job with the failing rank's message", function()
    if need_mpi() then return pending(need_mpi()) end
    local started = os.time()
    local out, status = run("run -n 3 " .. script [[
      if os.getenv "OMPI_COMM_WORLD_RANK" == "1" then error "table t7 has no rows" end
      os.execute "exec sleep 30"
    ]])
    assert.not_equal(0, status)
    assert.equal(1, count(out, "table t7 has no rows"), out)
    assert.matches("%[rank 1%] table t7 has no rows %(.*script%.lua:1%)\n", out)
    assert.is_true(os.time() - started < 20)
  end)

  it("frees ranks that wait in an exchange, and prints the first cause only", function()
    if need_mpi() then return pending(need_mpi()) end
    local started = os.time()
    local out, status = run("run -n 3 " .. script [[
      local peri = require "perilune"
      peri.init()
      if peri.rank() == 1 then error "table t7 has no rows" end
      peri.world():barrier():wait()
      print "nobody gets here"
    ]])
    assert.equal(1, status)
    assert.matches("%[rank 1%] table t7 has no rows %(.*script%.lua:3%)\n", out)
    assert.equal(1, count(out, "t7 has no rows"), out)
    assert.not_matches("nobody", out)
    assert.is_true(os.time() - started < 20)
  end)

  it("leaves a joined world in order, at the end and at os.exit", function()
    if need_mpi() then return pending(need_mpi()) end
    local join = "local peri = require 'perilune' peri.init() peri.world():barrier():wait() print 'done' "
    local out, status = run("run -n 2 " .. script(join))
    assert.equal(0, status, out)
    assert.equal("done\ndone\n", out)
    out, status = run("run -n 2 " .. script(join .. "os.exit(0)"))
    assert.equal(0, status, out)
    assert.equal("done\ndone\n", out)
    out, status = run("run -n 2 " .. script(join .. "os.exit(6)"))
    assert.equal(6, status, out)
  end)

  it("says that a world had failed whose error the script has caught", function()
    if need_mpi() then return pending(need_mpi()) end
    local words = " the script went on to its end after an error that it caught, or that another rank met: group "
      .. "'world' was given up: "
    -- else rank 0 comes to its end: in the last case before the other gives up
    local function waits(i) return i < 4 end
    local runs = {} -- beside each other: each waits for some seconds
    for i, ending in ipairs { "", "peri.finish()", "os.exit(0)", "", "" } do
      runs[i] = shell.start(("%s run -n 2 %s"):format(perilune, shell.write(("%s/caught%d.lua"):format(folder, i), [[
        local peri = require "perilune"
        peri.init()
        print(pcall(function()
          local till = os.clock() + ]] .. (i == 5 and 0.2 or 0) .. [[ * peri.rank()
          while os.clock() < till do end
          if peri.rank() == 1 then peri.world():abort "bad thing" end
          if peri.rank() == 1 or ]] .. tostring(waits(i)) .. [[ then peri.world():barrier():wait() end
        end))
      ]] .. ending)))
    end
    for i, finish in ipairs(runs) do
      local out, status = finish()
      assert.equal(1, status)
      assert.matches("%[rank 1%]" .. words .. "bad thing", out)
      assert.matches("%[rank 0%]" .. (waits(i) and words or "") .. "[^\n]*rank 1 gave up: bad thing", out)
      assert.not_matches("never joined", out)
    end
    local out, status = run("run -n 2 " .. script [[
      local peri = require "perilune"
      peri.init()
      if peri.rank() == 1 then
        peri.world():abort "bad thing"
        os.exit(3)
      end
    ]])
    assert.equal(3, status)
    assert.matches("%[rank 1%] the script called os.exit%(3%); before that group 'world' was given up: bad thing", out)
  end)

  it("passes an exit code on", function()
    if need_mpi() then return pending(need_mpi()) end
    local _, status = run("run -n 2 " .. script "os.exit(os.getenv 'OMPI_COMM_WORLD_RANK' == '1' and 9 or 0)")
    assert.equal(9, status)
  end)

  it("runs inside a world that is there already", function()
    local inside = { OMPI_COMM_WORLD_SIZE = "4", OMPI_COMM_WORLD_RANK = "2" }
    assert.equal("once\n", (run("run " .. script "print 'once'", inside)))
    assert.equal("once\n", (run("run -n 4 " .. script "print 'once'", inside)))
    local out, status = run("run -n 3 " .. script "print 'once'", inside)
    assert.equal(2, status)
    assert.matches("%-n 3 inside a world of 4 ranks that mpirun has made", out)
    assert.equal("once\n", (run("run -n 2 " .. script "print 'once'",
      { SLURM_STEP_NUM_TASKS = "2", SLURM_PROCID = "1" })))
    out = run("run " .. script "error 'x'", { SLURM_STEP_NUM_TASKS = "2", SLURM_PROCID = "1" })
    assert.matches("^%[rank 1%] ", out)
  end)
end)

describe_launcher("a reason in one line", function()
  local function need_mpi() return not shell.has "mpirun" and "mpirun was not found" end

  for words, pattern in pairs {
    ["--hostfile /tmp"] = "^perilune: %-%-hostfile: '/tmp': Is a directory\n$",
    ["--hostfile /dev/null"] = "^perilune: %-%-hostfile: '/dev/null' names no host\n$",
    ["--hostfile ''"] = "^perilune: %-%-hostfile: '': No such file or directory\n$",
    ["--host a,,b"] = "\nperilune: %-%-host: '' in 'a,,b', allowed: names of nodes, [^\n]*: a:4,b:4\n$",
    ["--host ''"] = "\nperilune: %-%-host: '' in '', allowed: names of nodes",
    ["--host 'a, b'"] = "\nperilune: %-%-host: ' b' in 'a, b', allowed: names of nodes",
    ["--host a:4,b:0"] = "\nperilune: %-%-host: 'b:0' in 'a:4,b:0', allowed",
    ["--host a:x"] = "\nperilune: %-%-host: 'a:x' in", ["--host a:"] = "\nperilune: %-%-host: 'a:' in",
    ["--host a:2:3"] = "\nperilune: %-%-host: 'a:2:3' in",
    ["-n 0"] = "\nperilune: %-n: '0' is not a whole number above 0\n$",
    ["-n inf"] = "\nperilune: %-n: inf, allowed: whole numbers 1%.%.2147483647\n$",
    ["-n 2 -n 3"] = "\nperilune: option '%-n' must be used at most 1 time\n$",
    ["--host a --host b"] = "\nperilune: option '%-%-host' must be used at most 1 time\n$",
    ["--hostfile missing"] = "^perilune: %-%-hostfile: 'missing': No such file or directory\n$",
    ["-n 2 --mpi -np"] = { "^perilune: mpirun cannot read its option 'np', which got '[^\n]*perilune': see %-%-mpi\n$",
      -- Open MPI 4, 5
      "^perilune: mpirun takes 'run' for the program to run: an option before it [^\n]*: see %-%-mpi\n$" },
  } do
    it("is there for " .. words, function()
      if need_mpi() then return pending(need_mpi()) end
      local out, status = run(("run %s %s"):format(words, script ""))
      assert.is_true(status ~= 0)
      local patterns, said = type(pattern) == "table" and pattern or { pattern }, false
      for _, p in ipairs(patterns) do said = said or out:find(p) ~= nil end
      assert.is_true(said, out)
    end)
  end

  it("is there for slots that are no number", function()
    if need_mpi() then return pending(need_mpi()) end
    local name = os.tmpname()
    local file = assert(io.open(name, "w"))
    file:write "# slots=x\nlocalhost max_slots=2 slots = x\n"
    file:close()
    local out, status = run(("run -n 1 --hostfile %s %s"):format(name, script ""))
    os.remove(name)
    assert.equal(2, status)
    assert.equal(("perilune: --hostfile: '%s', line 2: slots is 'x', allowed: whole numbers\n"):format(name), out)
  end)

  it("is there for an operation that nobody waited for, and a rank that never posts it", function()
    if need_mpi() then return pending(need_mpi()) end
    local out, status = run("run -n 2 " .. script [[
      local peri = require "perilune"
      peri.init()
      if peri.rank() == 0 then local w = peri.world():barrier() end
    ]], { PERI_COMM_TIMEOUT_S = "5" })
    assert.equal(1, status)
    assert.matches("%[rank 0%] .*barrier: rank 1 has left the world and will never post it", out)
  end)

  it("is there for an error object that cannot be read", function()
    local out, status = run("run " .. script "error(setmetatable({}, { __tostring = function() error 'oops' end }))")
    assert.equal(1, status)
    assert.matches("^perilune: an error object whose __tostring fails: [^\n]*oops %([^\n]*script%.lua:1%)\n$", out)
  end)
end)

describe_launcher("the command line", function()
  it("helps", function()
    for _, words in ipairs { "--help", "run --help", "info --help", "version --help", "-h" } do
      local out, status = run(words)
      assert.equal(0, status)
      assert.matches("^Usage: perilune", out)
    end
  end)

  it("tells versions and what is there", function()
    assert.matches("^perilune %d+%.%d+%.%d+ %(contract %d+, LuaJIT ", (run "version"))
    assert.equal((run "version"), (run "--version"))
    local out, status = run "info"
    assert.equal(0, status)
    assert.matches("\n  cpu +usable\n", out)
    assert.matches("\n  opaque +usable\n", out)
    assert.matches("\n  self +usable\n", out)
    assert.matches("\n  nccl +", out)
    local function steady(text) return (text:gsub("[%d.]+ GiB available", "")) end
    assert.equal(steady(out), steady((run "devices")))
  end)

  it("tells the processor, the memory and the versions of libraries", function()
    local out = run "info"
    local gib = tonumber(shell.read "/proc/meminfo":match "MemTotal:%s*(%d+)") / 2 ^ 20
    local said = tonumber(out:match "\n  memory +([%d.]+) GiB, [%d.]+ GiB available")
    assert.is_true(said > 0 and said <= gib + 0.05, out) -- less in a container that may have less
    assert.matches("\n  processor +[^\n]+, %d+ of %d+ processors, %d+ NUMA node", out)
    assert.matches("\n  caches +%d+K data", out)
    for _, name in ipairs { "LuaJIT", "OpenBLAS", "xxHash" } do assert.matches("\n  " .. name .. " +%d+%.%d+", out) end
    if shell.has "mpirun" then
      assert.matches("\n  Open MPI +v" .. shell.run("mpirun --version"):match "%d+%.%d+%.%d+":gsub("%.", "%%."), out)
    end
    assert.matches("\n  kernels +ref ", (run("info", { PERI_CPU_ISA = "ref" })))
    assert.matches("\n  matrix products +OpenBLAS, ", (run("info", { PERI_BLAS = "openblas" })))
    assert.not_matches("\n  oneDNN ", (run("info", { PERI_BLAS = "openblas" })))
    assert.matches("\n  threads +3 ", (run("info", { PERI_NUM_THREADS = "3" })))
  end)

  it("gives hints", function()
    local function hint(words, pattern)
      local out, status = run(words)
      assert.equal(2, status, out)
      assert.matches(pattern, out)
    end
    hint("run --rank 2 x.lua", "unknown option '%-%-rank'\nDid you mean '%-%-ranks'")
    hint("rum x.lua", "unknown command 'rum'\nDid you mean 'run'")
    hint(script "" .. " --steps 3", "Did you mean 'perilune run .*script%.lua'")
    hint("schedule prnt sparse_dist", "must be one of 'print'.*\nDid you mean 'print'")
    hint("run", "missing argument 'script'")
    hint("run -n 0 x.lua", "%-n: '0' is not a whole number above 0")
    hint("run -t two x.lua", "%-t: 'two' is not a whole number")
    hint("run -n", "option '%-n' requires an argument")
    hint("", "a command is required")
  end)
end)

describe("launch.command", function()
  local function words(options, machine)
    options.script, options.arguments = options.script or "s.lua", options.arguments or {}
    local m = { program = "/bin/perilune", cpus = 4, root = false, peer_memory = true, ssh = true,
      openmpi = openmpi.version_facts(("mpirun (Open MPI) %s\n"):format(options.version or "4.1.4")) }
    for k, v in pairs(machine or {}) do m[k] = v end
    return " " .. table.concat(launch.command(options, m), " ") .. " "
  end

  it("ends with the launcher, the script and its arguments", function()
    assert.matches(" /bin/perilune run a b%.lua %-n x $",
      words { ranks = 2, script = "a b.lua", arguments = { "-n", "x" } })
    assert.matches(" %-n 2 ", words { ranks = 2 })
    assert.matches(" run %-%-traceback s%.lua ", words { ranks = 2, traceback = true })
  end)

  it("knows the machine", function()
    assert.not_matches("allow%-run%-as%-root", words { ranks = 2 })
    assert.matches(" %-%-allow%-run%-as%-root ", words({ ranks = 2 }, { root = true }))
    assert.not_matches("yield_when_idle", words { ranks = 4 })
    assert.matches(" mpi_yield_when_idle 1 ", words { ranks = 5 })
    assert.not_matches("single_copy", words { ranks = 2 })
    assert.matches(" btl_vader_single_copy_mechanism none ", words({ ranks = 2 }, { peer_memory = false }))
    assert.matches(" smsc %^cma ", words({ ranks = 2, version = "5.0.7" }, { peer_memory = false }))
    assert.matches(" plm isolated ", words({ ranks = 2 }, { ssh = false }))
    assert.not_matches(" plm ", words({ ranks = 2, version = "5.0.7" }, { ssh = false }))
    assert.matches(" %-%-mca pml ob1 ", words { ranks = 2 })
    assert.not_matches("ob1", words({ ranks = 2 }, { allocation = "77" }))
    assert.not_matches("ob1", words { ranks = 2, mpi = { "--mca", "pml", "ucx" } })
    assert.matches(" %-%-bind%-to none ", words { ranks = 2 })
    assert.matches(" %-%-bind%-to core ", words { ranks = 2, bind = "core" })
  end)

  it("lets ranks on other nodes see the variables that choose how they work", function()
    if shell.no_launcher() or not shell.has "mpirun" then return pending "no launcher, or no mpirun" end
    for _, name in ipairs { "PERI_BLAS", "PERI_TUNE", "PERI_CPU_ISA", "PERI_NUM_THREADS" } do
      local out = run(("run -n 1 --host $(uname -n) %s"):format(script(("print(os.getenv '%s')"):format(name))),
        { [name] = "1" })
      assert.matches("\n?1\n", out)
    end
  end)

  it("lets other nodes be", function()
    local command = words { ranks = 8, hosts = "a:4,b:4", mpi = { "--mca", "btl", "tcp,self" } }
    assert.matches(" %-%-host a:4,b:4 ", command)
    assert.not_matches("oversubscribe", command)
    assert.not_matches("ob1", command)
    assert.matches(" %-%-mca btl tcp,self /bin/perilune ", command)
    assert.matches(" %-%-hostfile nodes ", words { ranks = 2, hostfile = "nodes" })
  end)
end)
