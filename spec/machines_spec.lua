-- Several machines, pretended by network namespaces (tests/net/nodes): the tool itself, and what goes wrong between
-- machines.
-- deadline: 120 s
-- takes: 16 s, mostly waits
local json = require "dkjson"
local shell = require "spec.support.shell"

local function nodes(words, env)
  env = env or {}
  env.PERI_BUILD = shell.build
  return shell.run("sh tests/net/nodes " .. words, env)
end
local missing = shell.no_launcher() or not shell.has "mpirun" and "mpirun was not found"
local said, refused = nodes "1,1 true"
if refused ~= 0 then missing = said:gsub("\n.*", "") end

local folder, clean
setup(function() folder, clean = shell.temporary() end)
teardown(function() clean() end)
local function script(text) return shell.write(folder .. "/script.lua", text) end

local function each(name, body)
  it(name, function()
    if missing then return pending(missing) end
    body()
  end)
end

describe("pretended machines", function()
  each("are as many as asked for, with ranks on each", function()
    local out, status = nodes(("3,1 %s run -n 4 %s"):format(shell.perilune, script [[
      local world = require("perilune").init()
      local host = io.open("/proc/sys/kernel/hostname"):read "*l"
      io.write(("%d %s %d of %d\n"):format(world.rank_number, host, world.local_rank, world.local_size))]]))
    assert.equal(0, status, out)
    local lines = {}
    for line in out:gmatch "[^\n]+" do lines[#lines + 1] = line end
    table.sort(lines)
    assert.same({ "0 node0 0 of 3", "1 node0 1 of 3", "2 node0 2 of 3", "3 node1 0 of 1" }, lines)
  end)

  each("give a command's words, input and exit code on", function()
    local out, status = shell.run(("echo in | PERI_BUILD=%s sh tests/net/nodes 1,1 sh -c 'cat; echo \"$1\"; exit 5' x "
      .. "\"a  b\""):format(
      shell.build))
    assert.equal("in\na  b\n", out)
    assert.equal(5, status)
  end)

  each("refuse what they do not understand", function()
    for _, words in ipairs { "", "2,2", "2,x true", "-r 1gbit" } do
      local out, status = nodes(words)
      assert.equal(2, status)
      assert.matches("nodes %[%-r RATE%] SIZES COMMAND", out)
    end
  end)

  each("are gone when the tool is killed", function()
    for _, signal in ipairs { "KILL", "TERM" } do
      local mark = folder .. "/" .. signal
      local out = shell.run(([[
        PERI_BUILD=%s sh tests/net/nodes 1,1 sh -c 'echo >%s; exec tail -n 0 -f %s' & tool=$!
        while [ ! -s %s ]; do sleep 0.05; done; sleep 0.1
        pgrep -fc "^tail -n 0 -f %s"
        kill -%s $tool; wait $tool; sleep 0.2
        pgrep -fc "^tail -n 0 -f %s"]]):format(shell.build, mark, mark, mark, mark, signal, mark))
      assert.matches("^1\n.*0\n$", out) -- the shell may say that the tool was killed
    end
  end)
end)

describe("between machines", function()
  --- Four ranks on two machines reduce again and again; after a moment rank 3, or its machine, suffers `what`. Starts
  --- it; the function that is returned gives what the launcher says, its exit code, what each rank ended with, and how
  --- many processes are left.
  local function suffer(name, what)
    local place = ("%s/%s"):format(folder, name)
    os.execute("mkdir " .. place)
    local path = shell.write(place .. "/loop.lua", ([[
      local peri = require "perilune"
      local world = peri.init { timeout = 30 }
      world:timeout(1.5)
      world:barrier():wait()
      local began = os.time()
      if world.rank_number == 3 then os.execute("(sleep 0.3; %s) >/dev/null 2>&1 &") end
      local ok, err = pcall(function()
        while os.time() < began + 20 do world:all_reduce(peri.ones { 1000 }):wait() end
      end)
      local file = io.open(("%s/rank%%d"):format(world.rank_number), "w")
      file:write(os.time() - began, " ", tostring(err))
      file:close()
      error(err, 0)]]):format(what, place))
    local command = shell.write(place .. "/command.sh", ([[
      PERI_LOG=error %s run -n 4 %s; echo "exit $?"
      sleep 0.2; echo left $(ps -eo comm= | grep -c "mpirun\\|orted\\|perilune\\|sleep 0")]]):format(shell.perilune, path))
    local wait = shell.start(("PERI_BUILD=%s sh tests/net/nodes 2,2 sh %s"):format(shell.build, command))
    return function()
      local out, ends = wait(), {}
      for rank = 0, 3 do
        local file = io.open(("%s/rank%d"):format(place, rank))
        ends[rank] = file and file:read "*a"
        if file then file:close() end
      end
      return out, tonumber(out:match "exit (%d+)"), ends, tonumber(out:match "left (%d+)")
    end
  end

  local cut -- takes longest: it goes on while the others run
  setup(function() cut = not missing and suffer("cut", "ip link set eth0 down") end)

  each("sums of a table cut within a machine cross once, in as few bytes as their codec says", function()
    local bench = folder .. "/net.jsonl"
    local out, status = nodes(("2,2 %s run -n 4 tests/bench/net.lua --batch 512 --tables 4 --rounds 2 --codecs "
      .. "FP32,INT8 --out %s"):format(
      shell.perilune, bench))
    assert.equal(0, status, out)
    local seen = {}
    for line in shell.read(bench):gmatch "[^\n]+" do
      local case = json.decode(line)
      seen[#seen + 1] = case.sharding .. " " .. case.codec
      -- beside them: headers of packets, sizes, fingerprints
      local share = case.bytes / (case.expected_rows + case.expected_ids)
      assert.is_true(share > 1 and share < 1.08, ("%s: %g of %g bytes"):format(seen[#seen], case.bytes,
        case.bytes / share))
    end
    assert.same({ "row_wise FP32", "table_row_wise FP32", "row_wise INT8", "table_row_wise INT8" }, seen)
  end)

  each("a rank that never comes is named, also by those that cannot see it", function()
    local out, status = nodes(("1,1,1 %s run -n 3 %s"):format(shell.perilune, script [[
      local ffi = require "ffi"
      ffi.cdef "int kill(int, int); int getpid(void);"
      if os.getenv "OMPI_COMM_WORLD_RANK" == "1" then ffi.C.kill(ffi.C.getpid(), 19) end -- SIGSTOP
      require("perilune").init()]]), { PERI_COMM_TIMEOUT_S = "2" })
    assert.equal(1, status)
    assert.matches("%[rank 0%] mpi: joining the world took longer than 2 s: no process on node0 has rank 1, 2", out)
    assert.matches("\nperilune: no word from rank 1 %(process %d+ on node1%)\n", out)
  end)

  each("a rank that is killed ends the run, by name", function()
    local out, code, ends, left = suffer("killed", "kill -9 $PPID")()
    assert.equal(137, code, out)
    assert.is_nil(ends[3])
    assert.matches("perilune: rank 3 %(process %d+ on node1, .*%) was killed by signal 9", out)
    assert.equal(0, left, out)
  end)

  each("a cut link ends every rank within the deadline, and the run", function()
    local out, code, ends, left = cut()
    assert.equal(1, code, out)
    for rank = 0, 3 do
      local seconds, message = tostring(ends[rank]):match "^(%d+) (.*)$"
      assert.is_truthy(seconds, ("rank %d has not ended: %s"):format(rank, out))
      assert.is_true(tonumber(seconds) <= 4, ("rank %d after %s s"):format(rank, seconds))
      assert.matches("no end after 1%.5 s: waiting for rank " .. (rank < 2 and "[23]" or "[01]"), message)
      assert.matches(("or node%d cannot be reached"):format(rank < 2 and 1 or 0), message)
    end
    assert.matches("%[ranks? [01]", out)
    assert.matches("perilune: mpirun has not ended rank 2 %(process %d+ on node1%), rank 3 %(process %d+ on node1%) "
      .. "within 10 s", out)
    assert.equal(0, left, out)
  end)
end)
