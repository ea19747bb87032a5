-- Processes that are killed at any moment of saving increments, one after the other, or of making a full checkpoint of
-- them, leave the chain before or the one after; and the chain replays to the bits of a run that never stopped. Each
-- start draws how many ranks there are, whether they save behind the training, and which of them are killed: one of
-- them, or all.
--
-- PERI_TEST_KILLS=200: that many kills, while five times as many increments come in a row; `make test` makes a few.
-- deadline: 120 s
local ffi = require "ffi"
local peri = require "perilune"
local shell = require "spec.support.shell"

if shell.no_launcher() then return end
pcall(ffi.cdef, "int usleep(unsigned)")
pcall(ffi.cdef, "int kill(int, int)")

local folder, clean = shell.temporary()
teardown(clean)
local KILLS = tonumber(os.getenv "PERI_TEST_KILLS") or 3
local LAST = 5 * KILLS + 20
local PATIENCE = os.getenv "PERI_TEST_KILLS" and 600 or 60 -- seconds for a start: a chain of 1,000 is verified first
local random, C = math.random, peri.ffi.C
local RANKS = shell.has "mpirun" and 2 or 1

--- Trains and saves an increment of each step, up to step `last`, on 1 or 2 ranks. Arguments: the folder ("": nothing
--- is saved), the last step, whether it saves behind the training ("async"), and where the checksum of the state at the
--- end goes.
local script = shell.write(folder .. "/script.lua", [[
local ffi = require "ffi"
ffi.cdef "int getpid(void);"
local peri = require "perilune"
peri.init()
local folder, last, async, result = arg[1], tonumber(arg[2]), arg[3] == "async", arg[4]
local rank, ranks = peri.rank(), peri.world_size()
peri.nn.manual_seed(3)
local net = peri.nn.Module:extend "Net" ()
net.ebc = peri.EmbeddingBagCollection { seed = 5, fused_params = { optimizer = "adam", learning_rate = 0.1, exact = true }, tables = {
  peri.EmbeddingBagConfig { name = "a", num_embeddings = 3000, embedding_dim = 8, feature_names = { "fa" } },
  peri.EmbeddingBagConfig { name = "b", num_embeddings = 500, embedding_dim = 16, feature_names = { "fb" } } } }
function net:forward(kjt) return self.ebc(kjt):values():sum() * ranks end -- gradients are those of the mean of all ranks
local model = peri.DistributedModelParallel { module = net, group = peri.world(), plan = { ebc = { a = peri.plan.row_wise(),
  b = peri.plan.table_wise(ranks - 1) } } }
local saver = folder ~= "" and peri.checkpoint.Saver { folder = folder, parts = { model = model }, every = 1, full_every = 1e9, keep = 1,
  async = async, pace = async and 1 or nil }
local step = saver and saver:resume() or 0
if saver then
  local file = assert(io.open(("%s/../pid-%d"):format(folder, rank), "w"))
  file:write(ffi.C.getpid())
  file:close()
end
for i = step + 1, last do
  peri.scope(function()
    local samples = { { i * 17 % 3000, i * 31 % 3000, i % 500 }, { i * 7 % 3000, i * 17 % 3000, i * 3 % 500 } }
    local own, ids, lengths = ranks == 1 and samples or { samples[rank + 1] }, {}, {}
    for _, s in ipairs(own) do ids[#ids + 1], ids[#ids + 2], lengths[#lengths + 1] = s[1], s[2], 2 end
    for _, s in ipairs(own) do ids[#ids + 1], lengths[#lengths + 1] = s[3], 1 end
    model(peri.KeyedJaggedTensor { keys = { "fa", "fb" }, lengths = lengths, values = peri.tensor(ids, "i64") }):backward()
  end)
  if saver then saver:step(i) end
end
if saver then saver:close() end
if result then
  local sums, out = {}, ffi.new "uint64_t[1]"
  local states = model:fused_optimizer():state_dict().state
  for _, dict in ipairs { model:state_dict(), unpack(peri.util.map(peri.util.keys(states), function(name) return states[name] end)) } do
    for _, t in peri.util.ordered(peri.shard.gather_state_dict(dict)) do
      peri.ffi.check(peri.ffi.C.peri_checkpoint_checksum(peri.Tensor.ptr(t), out))
      sums[#sums + 1] = tostring(out[0])
    end
  end
  if rank == 0 then
    local file = assert(io.open(result, "w"))
    file:write(table.concat(sums, " "))
    file:close()
  end
end
]])

local function run(of, last, result, ranks, async)
  return shell.start(("%s run -n %d %s \"%s\" %d %s %s"):format(shell.perilune, ranks or 1, script, of, last, async
    and "async" or "-", result or ""), nil, PATIENCE + 50)
end

local function newest(of)
  local ok, list = pcall(peri.checkpoint.Saver.list, of)
  return ok and list[1] and list[1].number or 0, ok and list or {}
end

local function pid_of(name)
  local ok, text = pcall(shell.read, folder .. "/" .. (name or "pid"))
  return ok and tonumber(text) or nil
end

--- The checksums of all that a checkpoint holds with those that it stands on, verified. look (or nil): gets it, open.
local function contents(path, look)
  local c, all, out = peri.checkpoint.open(path), {}, ffi.new "uint64_t[1]"
  c:verify()
  for _, name in ipairs(c:names()) do
    peri.ffi.check(C.peri_checkpoint_checksum(peri.Tensor.ptr(c:read(name)), out))
    all[name] = tostring(out[0])
  end
  if look then look(c) end
  c:close()
  return all
end

describe("a chain of increments", function()
  it("replays to the bits of the run that never stopped, however often its saves are killed", function()
    local of, kills = folder .. "/saves", 0
    shell.run("mkdir -p " .. of)
    while kills < KILLS do
      local from = newest(of)
      for rank = 0, 1 do os.remove(folder .. "/pid-" .. rank) end
      local ranks, async, all = random(RANKS), random(2) == 1, random(2) == 1
      local wait = run(of, LAST, nil, ranks, async)
      -- About five increments later, at any moment.
      local goal = math.min(from + random(2, 7), LAST - 1)
      local began = C.peri_time_ns()
      while newest(of) < goal and C.peri_time_ns() - began < PATIENCE * 1000000000LL do ffi.C.usleep(300) end
      assert.is_true(newest(of) >= goal, "no increment came in time")
      ffi.C.usleep(random(0, 3000))
      local victim = random(0, ranks - 1)
      for rank = 0, ranks - 1 do
        if all or rank == victim then ffi.C.kill(assert(pid_of("pid-" .. rank)), 9) end
      end
      local out, status = wait()
      assert.is_not.equal(0, status, out)
      local at, list = newest(of)
      assert.is_true(at >= goal)
      local c = peri.checkpoint.open(list[1].path) -- the newest is there, with all before it
      assert.equal(list[1].number, #c:levels())
      c:close()
      kills = kills + 1
      if at >= LAST - 5 then break end
    end
    local out, status = run(of, LAST, folder .. "/chain", RANKS)()
    assert.equal(0, status, out)
    local at, list = newest(of)
    assert.equal(LAST, at)
    assert.equal(LAST, #list, "nothing of it was removed")
    run("", LAST, folder .. "/straight")()
    assert.equal(shell.read(folder .. "/straight"), shell.read(folder .. "/chain"))
    -- Loaded by a process of its own.
    run(of, LAST, folder .. "/again")()
    assert.equal(shell.read(folder .. "/straight"), shell.read(folder .. "/again"))
    if os.getenv "PERI_TEST_KILLS" then print(("%d increments in a row, killed %d times"):format(#list - 1, kills)) end
  end)

  it("that is made a full checkpoint and killed meanwhile is the chain, or the full one", function()
    local of, full = folder .. "/saves", 0
    local _, list = newest(of)
    local tip = list[1].path
    local name = tip:match "[^/]*$"
    --- Start compacting in a folder; the function that is returned waits for its end.
    local function compact(path)
      os.remove(folder .. "/pid")
      return shell.start(("echo $$ > %s/pid; exec %s checkpoint compact %s/%s"):format(folder, shell.perilune, path,
        name), nil, PATIENCE)
    end
    local function copy(path)
      local out, status = shell.run(("rm -rf %s && cp -a %s %s"):format(path, of, path), nil, PATIENCE)
      assert.equal(0, status, out)
    end
    local want, whole = contents(tip), folder .. "/whole"
    copy(whole)
    local from = C.peri_time_ns()
    local _, status = compact(whole)()
    local took = tonumber(C.peri_time_ns() - from) / 1000
    assert.equal(0, status)
    for n = 1, KILLS do
      local path = ("%s/killed"):format(folder)
      copy(path)
      local wait = compact(path)
      ffi.C.usleep(random(0, math.floor(1.1 * took)))
      local pid = pid_of()
      if pid then ffi.C.kill(pid, 9) end
      wait()
      local was_full
      assert.same(want, contents(path .. "/" .. name, function(c) was_full = not c:parent() end), "kill " .. n)
      full = full + (was_full and 1 or 0)
      -- It is compacted all the same, and what the dead one left is swept.
      shell.run(("find %s -name '.*.saving-*' -exec touch -d '2 minutes ago' {} +"):format(path))
      local _, again = compact(path)()
      assert.equal(was_full and 1 or 0, again)
      assert.same(want, contents(path .. "/" .. name, function(c) assert.is_nil(c:parent()) end))
      if not was_full then assert.equal("", (shell.run(("find %s -name '.*.saving-*'"):format(path)))) end
    end
    if os.getenv "PERI_TEST_KILLS" then print(("%d compactions killed, %d had ended"):format(KILLS, full)) end
    assert.equal(0, (select(2, compact(of)())))
    -- The run goes on, on top of it; what the full one stands for is not needed any more.
    local _, after = run(of, LAST + 3, folder .. "/on")()
    assert.equal(0, after)
    run("", LAST + 3, folder .. "/straight")()
    assert.equal(shell.read(folder .. "/straight"), shell.read(folder .. "/on"))
    assert.equal(4, #select(2, newest(of)), "the full one and three increments")
  end)
end)
