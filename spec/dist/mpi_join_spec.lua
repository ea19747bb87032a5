-- Joining and leaving the world within a deadline, whatever another rank does: it is late, stopped, killed or absent.
-- Who is waited for is named. Through the launcher, as users start it. (mpirun: none: it starts its own)
-- deadline: 120 s
-- takes: 50 s, mostly waits
local shell = require "spec.support.shell"
local missing = shell.no_launcher() or not shell.has "mpirun" and "mpirun was not found"
local folder, clean
setup(function() folder, clean = shell.temporary() end)
teardown(function() clean() end)

local host = shell.run("uname -n"):match "%S+"

--- Run a script on three ranks, with a deadline in seconds; rank 1 calls `act` where the script says so. The script
--- tells its process.
local function run(words, text, act, deadline)
  local path = shell.write(folder .. "/script.lua", ([[
    local ffi = require "ffi"
    ffi.cdef "int kill(int, int); int getpid(void); unsigned sleep(unsigned);"
    local function act()
      if os.getenv "OMPI_COMM_WORLD_RANK" ~= "1" then return end
      io.stdout:write("victim ", ffi.C.getpid(), "\n")
      io.stdout:flush()
      %s
    end
    local peri = require "perilune"
    %s]]):format(act, text))
  local began = os.time()
  local out, status = shell.run(("%s run -n 3 %s %s"):format(shell.perilune, words, path),
    { PERI_COMM_TIMEOUT_S = deadline })
  return out, status, os.time() - began, out:match "victim (%d+)"
end

local stop, sleep, kill = "ffi.C.kill(ffi.C.getpid(), 19)", "ffi.C.sleep(9)", "ffi.C.kill(ffi.C.getpid(), 9)"

local function case(name, words, text, act, expected)
  it(name, function()
    if missing then return pending(missing) end
    local out, status, seconds, victim = run(words, text, act, expected:match "(%d) s:" or "4")
    assert.is_truthy(victim, out)
    assert.is_truthy(out:find(expected:gsub("VICTIM", ("(process %s on %s)"):format(victim, host)), 1, true), out)
    if words == "" then assert.equal(1, status) end -- with recovery mpirun ends well all the same
    assert.is_true(seconds < 20, seconds .. " s")
    local state = io.open(("/proc/%s/stat"):format(victim))
    assert.is_true(not state or state:read "*a":match "%) Z" ~= nil, "the rank is left")
  end)
end

describe("joining the world waits no longer than it may for a rank that", function()
  case("is stopped before it", "", "act() peri.init()", stop,
    "mpi: joining the world took longer than 2 s: rank 1 VICTIM has not come: it is stopped")
  case("comes too late", "", "act() peri.init()", sleep,
    "mpi: joining the world took longer than 2 s: rank 1 VICTIM has not come")
  case("never comes, while the error is caught", "",
    "act() local ok, err = pcall(peri.init) if not ok then print('caught', err) os.exit(1) end", sleep,
    "caught\tmpi: joining the world took longer than 2 s: rank 1 VICTIM has not come")
  case("ends without it", "", "act() peri.init()", "os.exit(0)", "rank 1") -- mpirun may see it first
  it("ends without it, with time to spare", function()
    if missing then return pending(missing) end
    local out, status, seconds = run("", "act() peri.init()", "os.exit(0)", 60)
    assert.equal(1, status)
    assert.is_truthy(out:find("rank 1", 1, true), out)
    -- without the launcher's word that all have been started: more than 20
    assert.is_true(seconds < 15, seconds .. " s")
  end)
  case("is killed before it, when mpirun lets the others live", "--mpi --enable-recovery", "act() peri.init()", kill,
    "mpi: joining the world")

  it("has another version of Perilune", function()
    if missing then return pending(missing) end
    local out, status = run("", "act() peri.init()", "ffi.cdef 'int setenv(const char *, const char *, int);' "
      .. "ffi.C.setenv('PERI_TEST_PATCH', '77', 1)", "20")
    assert.equal(1, status)
    assert.matches("%[ranks 0%-2%] mpi: rank 0 on %S+ has Perilune %d+%.%d+%.%d+, and rank 1 on %S+ has %d+%.%d+%.77: "
      .. "all hosts must have the same version", out)
  end)

  it("was refused for its arguments before", function()
    if missing then return pending(missing) end
    local out, status = run("", [[
      for _, args in ipairs { { device = "smoke" }, { device_transport = "sim" }, { device_transport = "none", device = "opaque" },
        { device_transport = "mpi", device = "opaque" }, { device_transport = "sim", device = "cpu" }, { local_size = -1 } } do
        assert(not pcall(peri.init, args))
      end
      local sum = peri.init():all_reduce(peri.ones { 1 }):wait():item()
      if peri.rank() == 0 then print("sum", sum) end]], "")
    assert.equal(0, status, out)
    assert.matches("sum\t3", out)
  end)

  it("is stopped within MPI's own making of a group", function()
    if missing then return pending(missing) end
    shell.write(folder .. "/stop.c", [[ /* instead of MPI's function: rank 1 stops in it, the others wait */
      #include <signal.h>
      #include <stdlib.h>
      #include <unistd.h>
      int MPI_Comm_create_group(void)
      {
          if (atoi(getenv("OMPI_COMM_WORLD_RANK")) == 1) kill(getpid(), SIGSTOP);
          for (;;) pause();
      }]])
    local out, status = shell.run(("${CC:-cc} -shared -fPIC %s/stop.c -o %s/stop.so"):format(folder, folder))
    assert.equal(0, status, out)
    local text = ("ffi.load('%s/stop.so', true) local world = peri.init() act() world:new_group({ 0, 1, 2 }, "
      .. "'all')"):format(folder)
    local said, code, _, victim = run("", text, "", "3")
    assert.equal(1, code, said)
    assert.is_truthy(said:find(("took longer than 3 s: rank 1 (process %s on %s) is stopped"):format(victim, host), 1,
      true), said)
    assert.is_nil(said:find("has not come", 1, true), said)
  end)

  it("is killed while groups are made, when mpirun lets the others live", function()
    if missing then return pending(missing) end
    local out, _, seconds = run("--mpi --enable-recovery", [[
      local world = peri.init()
      if peri.rank() == 1 then os.execute(("(sleep 0.%03d; kill -9 %d) &"):format(math.random(1, 99), ffi.C.getpid())) end
      local groups = {}
      for k = 1, 100000 do groups[k % 8] = world:new_group({ 0, 1, 2 }, "group " .. k) collectgarbage() end
    ]], "", "4")
    assert.is_true(seconds < 20, seconds .. " s")
    for rank = 0, 2, 2 do assert.matches(("%%[ranks? [^]]*%d[^]]*%%] mpi: making a group"):format(rank), out) end
  end)
end)

describe("leaving the world names a rank that", function()
  case("is stopped", "", "peri.init() act()", stop,
    "mpi: leaving the world took longer than 4 s: rank 1 VICTIM is stopped")
  case("has not left yet", "", "peri.init() act()", sleep,
    "mpi: leaving the world took longer than 4 s: rank 1 VICTIM has not left it")
  case("is gone", "--mpi --enable-recovery", "peri.init() act()", kill,
    "mpi: leaving the world: rank 1 VICTIM is gone without leaving it")
end)
