-- Runs that end badly, through the launcher as users start it: ranks that die without a word, signals to the launcher,
-- mpirun that cannot start. Each ends soon, with a line that says what happened. (mpirun: none: it starts its own)
-- deadline: 240 s
-- takes: 30 s, mostly waits
local shell = require "spec.support.shell"
local perilune = shell.perilune

local missing = shell.no_launcher() or not shell.has "mpirun" and "mpirun was not found"
local folder, clean
setup(function() folder, clean = shell.temporary() end)
teardown(function() clean() end)

--- Output, exit code and seconds of a command.
local function run(words, env)
  local began = os.time()
  local out, status = shell.run(words, env)
  return out, status, os.time() - began
end

local function check(name, f)
  it(name, function()
    if missing then return pending(missing) end
    f()
  end)
end

local host = shell.run("uname -n"):match "%S+"

--- A script whose rank 1 does `act` at `moment`: before it joins, in training, when it has left.
local function script(moment, act)
  local text = ([[
    local ffi = require "ffi"
    ffi.cdef "int kill(int, int); int getpid(void); void _exit(int); void *signal(int, void *);"
    local function act() if os.getenv "OMPI_COMM_WORLD_RANK" == "1" then %s end end
    if MOMENT == "before" then act() end
    local peri = require "perilune"
    peri.init()
    for step = 1, 40 do
      peri.world():all_reduce(peri.ones { 3 }):wait()
      if MOMENT == "training" and step == 20 then
        if peri.rank() == 1 then io.stdout:write("victim ", ffi.C.getpid(), "\n") end
        act()
      end
    end
    peri.finish()
    if MOMENT == "after" then act() end
  ]]):gsub("MOMENT", ("%q"):format(moment))
  return shell.write(folder .. "/script.lua", text:format(act))
end

-- A handler of the signal is taken out first: a sanitizer's reports the fault and exits with a code of its own.
local function kill(signal)
  return ("ffi.C.signal(%d, nil) ffi.C.kill(ffi.C.getpid(), %d) ffi.C.kill(ffi.C.getpid(), 19)"):format(signal, signal)
end

describe("a rank that dies without a word is named,", function()
  local function dies(moment, act, status, how)
    check(("%s: %s"):format(moment, how), function()
      local out, code, seconds = run(("%s run -n 3 %s"):format(perilune, script(moment, act)))
      local process, on, rest = out:match(
        "perilune: rank 1 %(process (%d+) on (%S+), [%d.]+ s old, at most [%d.]+ [MG]iB of memory%) ([^\n]+)\n")
      assert.is_truthy(process, out)
      assert.equal(host, on)
      assert.is_truthy(rest:find(how, 1, true), rest)
      local victim = out:match "victim (%d+)"
      if victim then assert.equal(victim, process) end
      assert.equal(status, code)
      assert.is_true(seconds < 20, seconds .. " s")
      assert.not_matches("%-%-%-%-%-%-", out) -- none of mpirun's boxes
      assert.not_matches("rank [02] %(process", out)
    end)
  end
  dies("before", kill(9), 137, "was killed by signal 9 (SIGKILL); ")
  dies("training", kill(9), 137, "was killed by signal 9 (SIGKILL); ")
  dies("after", kill(9), 137, "was killed by signal 9 (SIGKILL); ")
  dies("training", kill(15), 143, "was killed by signal 15 (SIGTERM)")
  dies("before", kill(11), 139, "was killed by signal 11 (SIGSEGV)")
  dies("training", "ffi.C._exit(3)", 3, "ended with exit code 3 in the middle of its script, without leaving the world")
  dies("before", "ffi.C._exit(0)", 1, "ended with exit code 0 in the middle of its script, without leaving the world")

  check("at any moment", function()
    math.randomseed(os.time())
    for _ = 1, 2 do
      local moment, rank = math.random(0, 600), math.random(0, 2)
      local path = shell.write(folder .. "/any.lua", ([[
        local file = io.open("%s/pid-" .. os.getenv "OMPI_COMM_WORLD_RANK", "w")
        file:write(io.open "/proc/self/stat":read "*n")
        file:close()
        local peri = require "perilune"
        peri.init()
        while true do peri.world():all_reduce(peri.ones { 3 }):wait() end
      ]]):format(folder))
      local file = ("%s/pid-%d"):format(folder, rank)
      local out, code = run(([[rm -f %s; %s run -n 3 %s & while ! test -s %s; do sleep 0.01; done; sleep %.3f; kill -9 $(cat %s); wait $!]])
        :format(file, perilune, path, file, moment / 1000, file))
      assert.equal(137, code, out)
      assert.is_truthy(out:find(("perilune: rank %d (process %s on %s, "):format(rank, shell.read(file), host), 1,
        true), out)
    end
  end)

  check("an exit code of the script's own too", function()
    local out, code = run(("%s run -n 2 %s"):format(perilune, script("training", "os.exit(6)")))
    assert.equal(6, code)
    assert.matches("perilune: rank 1 ended with exit code 6\n", out)
  end)
end)

describe("a signal to the launcher ends all ranks, and says so:", function()
  local forever = [[
    local peri = require "perilune"
    peri.init()
    local file = io.open("%s/pids", "a")
    file:write(io.open "/proc/self/stat":read "*n", "\n")
    file:close()
    while true do peri.world():all_reduce(peri.ones { 3 }):wait() end
  ]]

  --- Does a process run? (Z: it has ended, and its parent has not asked yet.)
  local function is_left(pid)
    local file = io.open(("/proc/%s/stat"):format(pid))
    local state = file and file:read "*a":match "^.*%) (%a)"
    if file then file:close() end
    return state and state ~= "Z" or nil
  end

  --- The signal comes when all ranks have joined. to: what kill takes: "-$run", the terminal's way, to all processes of
  --- the launcher; "$run", to it alone. (env: a shell lets its background commands ignore interrupts. setsid: a process
  --- group of its own, as in a terminal. The watch ends what outlives 40 s.)
  local function signalled(name, signal, to, status, line)
    check(name, function()
      local pids = folder .. "/pids"
      os.remove(pids)
      local path = shell.write(folder .. "/forever.lua", forever:format(folder))
      local out, code = run(([[env --default-signal setsid %s run -n 3 %s & run=$!
        (sleep 40; kill -9 -$run) >/dev/null 2>&1 & watch=$!
        until test "$(cat %s 2>/dev/null | wc -l)" = 3 || ! kill -0 $run; do sleep 0.02; done
        kill -%s %s; wait $run; code=$?; kill $watch; exit $code]]):format(perilune, path, pids, signal, to))
      assert.equal(status, code, out)
      if line then assert.equal(("perilune: %s; all 3 ranks were ended\n"):format(line), out) end
      local deadline = os.time() + 15 -- ranks whose launcher was killed look for it every second
      for pid in shell.read(pids):gmatch "%d+" do
        while is_left(pid) and os.time() < deadline do os.execute "sleep 0.1" end
        assert.is_nil(is_left(pid), "a rank is left")
      end
    end)
  end
  signalled("Ctrl-C", "INT", "-$run", 130, "interrupted (Ctrl-C)")
  signalled("an interrupt to it alone", "INT", "$run", 130, "interrupted (Ctrl-C)")
  signalled("SIGTERM", "TERM", "-$run", 143, "ended by signal 15 (SIGTERM)")
  signalled("SIGKILL, which leaves no rank behind", "KILL", "$run", 137)
end)

describe("the folder of a job", function()
  check("is removed by the next run if its launcher was killed, not before", function()
    local where = folder .. "/where"
    os.remove(where)
    local path = shell.write(folder .. "/lies.lua", ([[
      local peri = require "perilune"
      peri.init()
      if peri.rank() == 0 then
        local maps = io.open "/proc/self/maps":read "*a"
        local file = io.open("%s", "w")
        file:write(maps:match "(/dev/shm/perilune%%-job%%-%%w+)/" or "in no folder of a job", "\n")
        file:close()
      end
      while true do peri.world():all_reduce(peri.ones { 3 }):wait() end
    ]]):format(where))
    local one = ("%s run -n 2 %s"):format(perilune, shell.write(folder .. "/one.lua",
      "require 'perilune'.init()"))
    local out = run(([[setsid %s run -n 2 %s & run=$!
      until test -s %s || ! kill -0 $run; do sleep 0.02; done; job=$(cat %s)
      %s; test -d $job && echo kept; kill -9 $run; wait $run
      %s; test -d $job || echo removed $job]]):format(perilune, path, where, where, one, one))
    assert.matches("kept\n.*removed /dev/shm/perilune%-job%-%w+\n", out)
  end)
end)

describe("a run that cannot start says why:", function()
  local path
  before_each(function() path = shell.write(folder .. "/hello.lua", "print 'hello'") end)

  local function refused(name, words, line, env)
    check(name, function()
      os.execute(("printf '#!/bin/sh\\nexec sleep 3' >%s/agent; chmod +x %s/agent"):format(folder, folder))
      local out, code, seconds = run(words:gsub("PERILUNE", perilune):gsub("FOLDER", folder) .. " " .. path, env)
      assert.not_equal(0, code)
      assert.is_truthy(out:find(line, 1, true), out)
      assert.is_true(seconds < 20, seconds .. " s")
    end)
  end
  refused("no hostfile", "PERILUNE run -n 2 --hostfile /no/where",
    "perilune: --hostfile: '/no/where': No such file or directory\n")
  refused("too few slots", "PERILUNE run -n 3 --host " .. host .. ":2",
    "perilune: the nodes offer fewer slots than there are ranks")
  refused("too few files", "ulimit -n 256; PERILUNE run -n 100",
    "perilune: -n 100: this process and its children may open 256 files")
  refused("too many ranks", "PERILUNE run -n 9", "perilune: -n 9: PERI_MOST_RANKS is 8\n", { PERI_MOST_RANKS = "8" })
  refused("no mpirun", "PATH=/none PERILUNE run -n 2",
    "perilune: 2 ranks need Open MPI's mpirun (Debian: openmpi-bin): mpirun: No such file")
  refused("a node that never answers", "PERILUNE run -n 2 --host 192.0.2.1:2 --mpi --mca plm_rsh_agent FOLDER/agent",
    "perilune: 2 of 2 ranks did not start within 1 s (PERI_START_TIMEOUT_S): rank 0, rank 1\n",
    { PERI_START_TIMEOUT_S = "1" })
  refused("an option that mpirun does not know", "PERILUNE run -n 2 --mpi --no-such-option", "--no-such-option")

  check("mpirun's own options pass", function()
    for _, words in ipairs { "--mpi --mca btl self,vader", "--mpi '--mca btl self,vader'",
      "--mpi=--mca --mpi btl --mpi self,vader" } do
      local out, code = run(("%s run -n 2 %s %s"):format(perilune, words, shell.write(folder .. "/btl.lua",
        "print(os.getenv 'OMPI_MCA_btl')")))
      assert.equal(0, code, out)
      assert.equal("self,vader\nself,vader\n", out)
    end
  end)
end)
