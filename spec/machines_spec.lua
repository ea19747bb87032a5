-- Several machines, pretended by network namespaces (tests/net/nodes): the tool itself, and what goes wrong between machines.
-- deadline: 120 s
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
    local out, status = shell.run(("echo in | PERI_BUILD=%s sh tests/net/nodes 1,1 sh -c 'cat; echo \"$1\"; exit 5' x \"a  b\""):format(
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
