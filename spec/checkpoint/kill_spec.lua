-- Processes that are killed at any moment of saving leave the checkpoint before or the one after, whole, and nothing
-- that the next save does not sweep; and who reads while others replace and remove checkpoints sees one of them, never
-- parts of two.
--
-- PERI_TEST_KILLS=n: that many kills of each kind, where `make test` has a few.
-- deadline: 180 s
local ffi = require "ffi"
local peri = require "perilune"
local shell = require "spec.support.shell"

if shell.no_launcher() then return end
pcall(ffi.cdef, "int usleep(unsigned)")
pcall(ffi.cdef, "int kill(int, int)")

local folder, clean = shell.temporary()
teardown(function() clean() end)
local KILLS = tonumber(os.getenv "PERI_TEST_KILLS") or false
local random = math.random

--- Saves in a loop, with replace and by a Saver. Every element of every tensor is the number of the step. Arguments:
--- the folder, how many steps (0: until it is killed), and "async", to go on while it saves. The rows are spread over
--- the ranks, and the last tensor is in a file of its own.
local script = shell.write(folder .. "/script.lua", [[
local ffi = require "ffi"
ffi.cdef "int getpid(void);"
local peri = require "perilune"
local sharded = require "perilune.tensor.sharded"
peri.init()
local folder, last, async = arg[1], tonumber(arg[2]), arg[3] == "async"
local world, rank, ranks = peri.world(), peri.rank(), peri.world_size()
local ROWS = 512
local own, metadata, dense = peri.zeros { ROWS, 8 }, {}, peri.zeros { 30000 }
for r = 0, ranks - 1 do metadata[r + 1] = { shard_offsets = { ROWS * r, 0 }, shard_sizes = { ROWS, 8 }, placement = "rank:" .. r } end
local rows = sharded.ShardedTensor { size = { ROWS * ranks, 8 }, dtype = "f32", shards_metadata = metadata, group = ranks > 1 and world,
  local_shards = { sharded.shard_of(metadata[rank + 1], own) } }
local object = { state_dict = function() return { rows = rows, dense = dense } end, load_state_dict = function() end }
local file = assert(io.open(("%s/pid-%d"):format(folder, rank), "w"))
file:write(ffi.C.getpid())
file:close()
local saver = peri.checkpoint.Saver { folder = folder .. "/saves", parts = { object = object }, every = 1, keep = 2, async = async }
local step, outcome = saver:resume() or 0, ""
world:barrier():wait()
for n = 1, last > 0 and last or 1e9 do
  if ranks == 1 and io.open(folder .. "/stop") then break end
  step = step + 1
  own:fill(step)
  dense:fill(step)
  local saved = peri.checkpoint.save(folder .. "/model", { object = object }, { replace = true, values = { step = step },
    file_bytes = 100000, async = async })
  if async and n % 3 == 0 then saved = saved:wait() end
  if type(saved) == "string" then outcome = outcome .. saved end
  if async then own:fill(-1) end -- which nobody may see
  if async then own:fill(step) end
  saver:step(step)
  if n == 2 and rank == 0 then io.open(folder .. "/ready", "w"):close() end
end
saver:close()
for _, other in ipairs(world:all_gather_object(outcome)) do assert(other == outcome, "ranks were told different outcomes") end
]])

local function exists(path)
  local file = io.open(path)
  return file and file:close()
end

local function pid_of(of, rank) return tonumber((shell.read(("%s/pid-%d"):format(of, rank)))) end

--- The lowest and the highest of numbers.
local function bounds(t)
  local low, high = math.huge, -math.huge
  for _, x in ipairs(t:reshape(-1):to_list()) do low, high = math.min(low, x), math.max(high, x) end
  return low, high
end

--- The step that all of an open checkpoint is of.
local function step_of(c)
  local step
  for _, name in ipairs(c:names()) do
    local shape = c:tensor(name).shape
    local low, high = bounds(c:read(name))
    -- A part of it, which no checksum looks after.
    local size = peri.util.map(shape, function(n) return math.max(1, n - 3) end)
    local offset = peri.util.map(shape, function(n) return n - math.max(1, n - 3) end)
    local part_low, part_high = bounds(c:read(name, { offset = offset, size = size }))
    low, high = math.min(low, part_low), math.max(high, part_high)
    if low ~= high or step and step ~= low then
      error(("%s is a mixture: %s has steps %d to %d"):format(c.path, name, low, high))
    end
    step = low
  end
  return step
end

--- What a checkpoint is of; its bytes hold.
local function whole(path, said)
  local c = peri.checkpoint.open(path)
  c:verify()
  local step, values = step_of(c), c:values().values
  c:close()
  assert.equal(said or values.step, step)
  return step
end

--- Everything that must be so after a kill. Returns the newest step.
local function check(of, at_least)
  local step = whole(of .. "/model")
  local list = peri.checkpoint.Saver.list(of .. "/saves")
  assert.is_true(#list >= 1)
  for _, entry in ipairs(list) do whole(entry.path, entry.step) end
  assert.is_true(step >= at_least and list[1].step >= at_least)
  assert.is_true(step - list[1].step <= 1, "the save that came first is there")
  peri.checkpoint.Saver { folder = of .. "/saves",
    parts = { none = peri.nn.Linear { in_features = 1, out_features = 1 } } }:close()
  return list[1].step
end

--- Start it; the function that is returned waits for its end.
local function start(of, ranks, steps, async)
  os.remove(of .. "/ready")
  return shell.start(("%s run -n %d %s %s %d %s"):format(shell.perilune, ranks, script, of, steps or 0, async
    and "async" or ""), nil, 170)
end

--- Wait until a process that start began has saved once, and begun a second time.
local function await(of, wait)
  for _ = 1, 10000 do
    if exists(of .. "/ready") then return end
    ffi.C.usleep(5000)
  end
  error("nothing was saved: " .. wait())
end

describe("saving that is killed", function()
  --- victims: lists of ranks, killed in turn, from a random one on.
  local function killed(title, ranks, times, victims)
    it(title, function()
      if ranks > 1 and not shell.has "mpirun" then return pending "mpirun was not found" end
      local of = ("%s/%d"):format(folder, ranks)
      shell.run(("mkdir -p %s"):format(of))
      local step, swept, first = 0, 0, random(0, 2)
      for n = 1, KILLS and KILLS * #victims or times do
        local wait = start(of, ranks, 0, n % 2 == 0)
        await(of, wait)
        ffi.C.usleep(random(0, KILLS and 300000 or 60000))
        for _, rank in ipairs(victims[(first + n) % #victims + 1]) do ffi.C.kill(pid_of(of, rank), 9) end
        local _, status = wait()
        assert.is_not.equal(0, status)
        step = check(of, step + 1)
        -- What it left is swept by the next save, once it is older than a minute, or the clock was set back.
        local find, at = ("find %s -name '.*.saving-*'"):format(of), n % 2 == 0 and "next week" or "2 minutes ago"
        local left = shell.run(("%s -exec touch -d '%s' {} +; %s"):format(find, at, find))
        swept = swept + select(2, left:gsub("\n", ""))
      end
      local _, status = start(of, 1, 1)()
      assert.equal(0, status)
      assert.equal("", (shell.run(("find %s -name '.*.saving-*'"):format(of))))
      assert.equal("model\n", (shell.run(("ls %s | grep model"):format(of))))
      assert.equal(2, select(2, shell.run(("ls %s/saves"):format(of)):gsub("\n", "")))
      if KILLS then
        print(("%s: %d kills, %d steps, %d leftovers swept"):format(title, KILLS * #victims, step, swept))
      end
    end)
  end
  killed("leaves the one before or the one after", 1, 6, { { 0 } })
  killed("does so where one of two ranks, or both, are killed", 2, 2, { { 1 }, { 0 }, { 0, 1 } })
end)

describe("saving with a rank that is slow", function()
  it("waits for it: all are told the same outcomes, and nothing is lost", function()
    if not shell.has "mpirun" then return pending "mpirun was not found" end
    local STOP, CONTINUE = 19, 18
    for n = 1, 2 do
      local of, steps = ("%s/slow-%d"):format(folder, n), KILLS and 400 or 40
      shell.run(("mkdir -p %s"):format(of))
      local wait = start(of, 2, steps, n == 2)
      await(of, wait)
      for k = 1, KILLS and 40 or 2 do
        ffi.C.usleep(random(0, 20000))
        local pid = pid_of(of, k % 2)
        if ffi.C.kill(pid, STOP) ~= 0 then break end -- it has ended
        ffi.C.usleep(100000)
        ffi.C.kill(pid, CONTINUE)
      end
      local out, status = wait()
      assert.equal("0 ", status .. " " .. out)
      assert.equal(steps, check(of, steps))
    end
  end)
end)

describe("reading while another process replaces and removes", function()
  it("goes on with the checkpoint that was opened, as long as it is open", function()
    local path, model = folder .. "/open", peri.nn.Linear { in_features = 4, out_features = 5 }
    local function save(x)
      model.weight:detach():fill(x)
      model.bias:detach():fill(x)
      peri.checkpoint.save(path, { model = model }, { replace = true, file_bytes = 1 })
    end
    local function hidden() return (shell.run(("ls -A %s | grep saving"):format(folder))) end
    save(1)
    local c = peri.checkpoint.open(path)
    save(2)
    save(3)
    assert.equal(1, step_of(c))
    c:verify()
    shell.run(("touch -d '2 minutes ago' %s/.open.saving-*"):format(folder))
    save(4)
    assert.equal(1, step_of(c))
    c:close()
    assert.is_not.equal("", hidden())
    save(5)
    assert.equal("", hidden(), "nobody reads the old one any more")
    local newest = peri.checkpoint.open(path)
    save(6)
    assert.equal(5, step_of(newest))
    newest:close()
    save(7)
    assert.equal("", hidden(), "nor this one, which was read a moment ago")
    assert.equal(7, step_of(peri.checkpoint.open(path)))
  end)

  it("sees one checkpoint, whole, or is told that it is not there any more", function()
    local of, seen, gone = folder .. "/read", 0, 0
    shell.run(("mkdir -p %s"):format(of))
    local wait = start(of, 1)
    await(of, wait)
    local function try(path)
      local ok, err = pcall(function()
        local c = peri.checkpoint.open(path)
        local done, why = pcall(step_of, c)
        if done then done, why = pcall(c.verify, c) end
        c:close()
        if not done then error(why, 0) end
      end)
      if ok then seen = seen + 1
      else
        local text = tostring(type(err) == "table" and err.message or err)
        assert.truthy(text:find("it was removed", 1, true) or text:find("No such file or directory", 1, true), text)
        assert.is_false(path:find "model$" and true or false, text) -- this one always is there
        gone = gone + 1
      end
    end
    local pid, began = pid_of(of, 0), peri.ffi.C.peri_time_ns()
    while (seen < (KILLS and 500 or 50) or gone == 0) and peri.ffi.C.peri_time_ns() - began < 60000000000LL do
      try(of .. "/model")
      for _, entry in ipairs(peri.checkpoint.Saver.list(of .. "/saves")) do
        if random() < 0.5 then ffi.C.usleep(random(0, 10000)) end
        try(entry.path)
      end
    end
    assert.equal(0, ffi.C.kill(pid, 0), "it still saves")
    io.open(of .. "/stop", "w"):close()
    local out, status = wait()
    assert.equal("0 ", status .. " " .. out)
    assert.is_true(seen >= 50, "it read something")
    if KILLS then print(("%d reads, %d were of what was gone"):format(seen, gone)) end
  end)
end)
