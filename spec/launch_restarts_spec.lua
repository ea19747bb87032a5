-- perilune run --max-restarts: a job whose rank died goes on from its newest checkpoint, to the numbers of the run that
-- never stopped; one that would only fail again ends; 75 means "start me again"; a machine that vanished is left out.
-- takes: 19 s, mostly waits
-- deadline: 120 s
local shell = require "spec.support.shell"
if shell.no_launcher() then return end

local folder, clean = shell.temporary()
teardown(clean)

local script = shell.write(folder .. "/script.lua", [[
local peri = require "perilune"
require("ffi").cdef "int raise(int); int getpid(void); int kill(int, int);"
local C = require("ffi").C
peri.init()
peri.nn.manual_seed(2)
local model = peri.nn.Linear { in_features = 3, out_features = 2 }
local saver = peri.checkpoint.Saver { parts = { model = model } }
local step = saver:resume() or 0
local began, host, x = step, io.popen("uname -n"):read "*l", peri.zeros { 1 }
if arg[1] == "at once" then error "nothing works" end
while step < 9 do
  step = step + 1
  model.weight:detach():fill(step)
  peri.world():all_reduce(x):wait()
  saver:step(step)
  if peri.rank() == peri.world_size() - 1 then
    if arg[1] == "dies" and step == began + 4 then C.raise(9) end
    if arg[1] == "is asked" and step == 2 then C.kill(C.getpid(), 15) end
  end
  if arg[1] == "fails" and step == 2 then
    error(("broken: %s/.x.saving-%08x%08x, process %d at %p"):format(arg[0], os.time(), os.clock() * 1e6, C.getpid(), {}))
  end
  if arg[1] == "vanishes" and step == 4 and host == "node1" then os.execute "ip link set eth0 down" end
end
saver:close(step)
if peri.rank() == 0 then print("done", step, peri.world_size()) end
]])

local count = 0
local function run(how, words, before)
  count = count + 1
  local out, status = shell.run(("%s %s run -n 2 --checkpoint %s/c%d --every 3steps --max-restarts 3 %s %s "
    .. "'%s'"):format(before or "", shell.perilune, folder, count, words or "", script, how))
  local told = {}
  for line in out:gmatch "[^\n]+" do
    if line:match "^done" or line:match "again" or line:match "^perilune: without" then
      told[#told + 1] = (line:gsub("^perilune: ", ""):gsub(", from '[^']*/", ", from '"):gsub("\t", " "))
    end
  end
  return table.concat(told, "\n"), status, out
end

describe("perilune run --max-restarts", function()
  it("goes on from the newest checkpoint after a rank was killed", function()
    local told, status, out = run "dies"
    assert.equal("start 1 of 3 again, from 'save-000001-step-3', 2 ranks\nstart 2 of 3 again, from "
      .. "'save-000002-step-6', 2 ranks\ndone 9 2", told, out)
    assert.equal(0, status)
  end)

  it("ends where starting again would only repeat the failure", function()
    local told, status, out = run "at once"
    assert.equal("the job failed before its first step, so it is not started again", told, out)
    assert.equal(1, status)
    told, status, out = run "fails"
    assert.equal("start 1 of 3 again, 2 ranks\nthe job failed twice in the same way without a newer checkpoint, so it "
      .. "is not started again", told, out)
    assert.equal(1, status)
  end)

  it("takes 75, of a job of which one rank was asked to stop, for 'start me again'; --resume no holds for the first "
    .. "start", function()
    local told, status, out = run("is asked", "--resume no")
    assert.truthy(told:find("^stopped after a step, as it was asked to %(SIGTERM%): it can be started "
      .. "again\n"
      .. "start 1 of 3 again, from 'save%-00000%d%-step%-%d', 2 ranks\ndone 9 2$"), out)
    assert.equal(0, status)
  end)

  it("takes a signal before there is a Saver for one to start again later", function()
    local early = shell.write(folder .. "/early.lua", [[
local peri = require "perilune"
require("ffi").cdef "int usleep(unsigned);"
if arg[1] then peri.init() end
if not arg[1] or peri.rank() == 0 then
  require("ffi").cdef "int getpid(void);"
  local file = io.open(arg[0] .. ".rank", "w")
  file:write(require("ffi").C.getpid())
  file:close()
  io.open(arg[0] .. ".ready", "w"):close()
  for _ = 1, 3000 do require("ffi").C.usleep(10000) end
end
peri.checkpoint.Saver { parts = { model = peri.nn.Linear { in_features = 3, out_features = 2 } } }
for _ = 1, 3000 do require("ffi").C.usleep(10000) end]])
    -- to the launcher, or to one of the ranks; any order
    for words, who in pairs { ["%s"] = "$p", ["-n 2 %s ranks"] = "$p", ["-n 2 --max-restarts 2 %s ranks"] = "$p",
      ["-n 2 %s ranks alone"] = "$(cat %s.rank)" } do
      local command = "rm -f %s.ready; %s run --checkpoint %s/early " .. words .. " & p=$!; "
        .. "until [ -e %s.ready ]; do sleep 0.02; done; kill " .. who .. "; wait $p"
      local out, status = shell.run(command:format(early, shell.perilune, folder, early, early, early))
      assert.equal(75, status, out)
      assert.matches("it can be started again", out)
    end
  end)

  it("does without a machine that has vanished", function()
    if not os.getenv "PERI_TEST_VANISH" then return pending "takes 30 s: PERI_TEST_VANISH=1" end
    local nodes = "PERI_COMM_TIMEOUT_S=3 tests/net/nodes 1,1"
    local why, cannot = shell.run "tests/net/nodes 1,1 true"
    if cannot ~= 0 then return pending(why) end
    local told, status, out = run("vanishes", nil, nodes)
    assert.equal("without node1, which does not answer\nstart 1 of 3 again, from 'save-000001-step-3', 1 rank\ndone 9 "
      .. "1", told, out)
    assert.equal(0, status)
  end)
end)
