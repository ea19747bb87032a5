-- A run that is killed or fails goes on where its newest good checkpoint is, also on another number of ranks; which
-- checkpoints are kept; the command line.
-- deadline: 120 s
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local shell = require "spec.support.shell"
collectgarbage("setpause", 200) -- as in programs (tests/harness/busted_main.lua): memory is measured here
local nn = peri.nn

local folder, clean = shell.temporary()
teardown(function() clean() end)

local function model()
  nn.manual_seed(1)
  return { model = nn.Linear { in_features = 3, out_features = 2 } }
end

local function names(of) return (shell.run("ls " .. of)) end

describe("a Saver", function()
  it("saves every so many steps, keeps the newest and what it is told to, and goes on from the newest", function()
    local path, p = folder .. "/steps", model()
    local saver = peri.checkpoint.Saver { folder = path, parts = p, every = 2, keep = 2, keep_every = 4 }
    assert.is_nil(saver:resume())
    for step = 1, 11 do
      p.model.weight:detach():fill(step)
      saver:step(step, function() return { at = step } end)
    end
    assert.equal("save-000002-step-4\nsave-000004-step-8\nsave-000005-step-10\n", names(path))
    assert.equal(path .. "/save-000006-step-11", saver:close(11))
    local q = model()
    local again = peri.checkpoint.Saver { folder = path, parts = q, every = "5steps", keep = 1 }
    assert.equal(11, again:resume())
    assert.equal(11, q.model.weight:item(0))
    assert.is_nil(again:close(11)) -- it is saved already
  end)

  it("counts steps forwards, and names a value that cannot be kept as its user does", function()
    local saver = peri.checkpoint.Saver { folder = folder .. "/forwards", parts = model(), every = 100 }
    saver:step(5)
    assert.error_matches(function() saver:step(4) end, "Saver:step: step 4, after step 5; steps go up")
    assert.error_matches(function() saver:save(3) end, "Saver:save: step 3, after step 5")
    assert.error_matches(function() saver:save(6, { 1, { f = print } }) end, "Saver:save: values%[2%]%.f is a function")
    saver:close()
  end)

  it("waits for a whole state: the last micro-batch of a group, the average of replicas", function()
    local function saves(path, world, made, size, after)
      local ebc = peri.EmbeddingBagCollection { fused_params = { optimizer = "sgd" }, tables = {
        peri.EmbeddingBagConfig { name = "t", num_embeddings = 9, embedding_dim = 4, feature_names = { "f" } } } }
      local m = made(ebc)
      local saver = peri.checkpoint.Saver { folder = path, parts = { model = m }, every = 3, keep = 9, group = world }
      for step = 1, 12 do
        local kjt = peri.KeyedJaggedTensor { keys = { "f" }, values = { step % 9 }, lengths = { 1 } }
        local pooled = m(kjt)
        m:backward((pooled.wait and pooled:wait() or pooled):values():sum())
        if step % size == 0 then after(m) end
        saver:step(step)
      end
      saver:close(12)
    end
    saves(folder .. "/groups", nil, function(ebc)
      local m = peri.DistributedModelParallel { module = ebc }
      m:accumulate(true)
      return m
    end, 2, function(m) m:apply_accumulated() end)
    assert.equal("save-000001-step-4\nsave-000002-step-6\nsave-000003-step-10\nsave-000004-step-12\n",
      names(folder .. "/groups"))
    sim.run(2, function(_, world)
      saves(folder .. "/replicas", world, function(ebc)
        return peri.DMPCollection { module = ebc, global_pg = world, sharding_group_size = 1, sync_interval = 4 }
      end, 4, function() end)
    end)
    local Net = nn.Module:extend "Averaged"
    function Net:init()
      self.ebc = peri.EmbeddingBagCollection { fused_params = { optimizer = "sgd" }, tables = {
        peri.EmbeddingBagConfig { name = "t", num_embeddings = 9, embedding_dim = 4, feature_names = { "f" } } } }
    end
    function Net:forward(kjt) return self.ebc(kjt):values():sum() end
    sim.run(2, function(_, world) -- the averages are the schedule's
      local m, step = peri.DMPCollection { module = Net(), global_pg = world, sharding_group_size = 1,
        sync_interval = 0 }, 0
      local saver = peri.checkpoint.Saver { folder = folder .. "/scheduled", parts = { model = m }, every = 3, keep = 9,
        group = world }
      local pipeline = peri.pipeline.Pipeline { model = m, schedule = peri.pipeline.schedules.prefetch_fused_2d(4) }
      local batches = 0
      for _ in pipeline:run(function()
        batches = batches + 1
        return batches <= 12 and peri.KeyedJaggedTensor { keys = { "f" }, values = { batches % 9 }, lengths = { 1 } }
          or nil
      end) do
        step = step + 1
        saver:step(step)
      end
      saver:close(12)
    end)
    for _, kind in ipairs { "replicas", "scheduled" } do
      assert.equal("save-000001-step-4\nsave-000002-step-8\nsave-000003-step-12\n", names(folder .. "/" .. kind))
    end
  end)

  it("has a pipeline whose optimizer is a step behind come to a whole state, and go on to the same bits", function()
    local Net = nn.Module:extend "Behind"
    function Net:init()
      self.ebc = peri.EmbeddingBagCollection { fused_params = { optimizer = "sgd", learning_rate = 0.1 }, tables = {
        peri.EmbeddingBagConfig { name = "t", num_embeddings = 9, embedding_dim = 4, feature_names = { "f" } } } }
      self.over = nn.Linear { in_features = 4, out_features = 1 }
    end
    function Net:forward(kjt) return self.over(self.ebc(kjt):values()):mean() end
    local behind = peri.pipeline.Schedule { name = "behind", depth = 4, { "load", ahead = 1 },
      { "optimizer", ahead = -1 }, { "zero_grad" }, { "forward" }, { "backward" } }
    local function trained(world, from, last, path, stop)
      nn.manual_seed(4)
      local m = peri.DistributedModelParallel { module = Net(), group = world }
      local optimizer = nn.optim.Adam { params = m:dense_parameters(), lr = 0.05 }
      local parts, step = { model = m, optimizer = optimizer }, from
      local saver = path and peri.checkpoint.Saver { folder = path, parts = parts, every = 3, keep = 9, group = world }
      if saver then step = saver:resume() or 0 end
      local loaded = step
      local pipeline = peri.pipeline.Pipeline { model = m, optimizer = optimizer, schedule = behind }
      for _ in pipeline:run(function()
        loaded = loaded + 1
        return loaded <= last and peri.KeyedJaggedTensor { keys = { "f" }, values = { loaded % 9 }, lengths = { 1 } }
          or nil
      end) do
        step = step + 1
        if saver then saver:step(step) end
        if step == stop then peri.request_stop() end
      end
      if saver then saver:close(step) end
      return tostring(m.module.over.weight) .. tostring(m.module.over.bias), step
    end
    for n = 1, 2 do
      local path, wanted = folder .. "/behind-" .. n, {}
      sim.run(n, function(rank, world)
        wanted[rank] = trained(world, 0, 14)
        local _, stopped = trained(world, 0, 14, path, 8)
        assert.is_true(stopped >= 8 and stopped < 14)
      end)
      sim.run(n, function(rank, world) assert.equal(wanted[rank], (trained(world, 0, 14, path))) end)
      assert.matches("^save%-000001%-step%-4\n", names(path))
    end
  end)

  it("has a loop of one's own stop where there is a whole state; a run that stops elsewhere keeps the last one",
    function()
    local function stops(path, world, m, again)
      local saver = peri.checkpoint.Saver { folder = path, parts = { model = m }, every = 100, group = world }
      local from, step = saver:resume() or 0, 0
      repeat
        step = step + 1
        local kjt = peri.KeyedJaggedTensor { keys = { "f" }, values = { (from + step) % 9 }, lengths = { 1 } }
        local pooled = m(kjt);
        (pooled.wait and pooled:wait() or pooled):values():sum():backward()
        if m._accumulates and step % 4 == 0 then m:apply_accumulated() end
        saver:step(from + step)
        if step == 5 then peri.request_stop() end
      until peri.stopping() or again and step == 7
      assert.equal(8, saver.last_step)
      saver:close(from + step)
      return from + step
    end
    local function ebc()
      return peri.EmbeddingBagCollection { fused_params = { optimizer = "sgd" }, tables = {
        peri.EmbeddingBagConfig { name = "t", num_embeddings = 9, embedding_dim = 4, feature_names = { "f" } } } }
    end
    local kinds = { group = function(world)
      local m = peri.DistributedModelParallel { module = ebc(), group = world }
      m:accumulate(true)
      return m
    end, replicas = function(world)
      return peri.DMPCollection { module = ebc(), global_pg = world, sharding_group_size = 1, sync_interval = 4 }
    end }
    for kind, made in peri.util.ordered(kinds) do
      local path = folder .. "/stops-" .. kind
      for run, last in ipairs { 8, 15 } do
        sim.run(2, function(_, world) assert.equal(last, stops(path, world, made(world), run == 2)) end)
      end
      assert.equal("save-000001-step-8\n", names(path))
    end
  end)

  it("goes by what really continued, whatever the steps of other futures", function()
    local path, p = folder .. "/futures", model()
    local saver = peri.checkpoint.Saver { folder = path, parts = p, every = 10, keep = 9 }
    saver:save(10)
    saver:save(20)
    saver:close()
    local back = peri.checkpoint.Saver { folder = path, parts = p, every = 10, keep = 9, resume = path
      .. "/save-000001-step-10" }
    assert.equal(10, back:resume())
    back:save(12)
    back:close()
    local again = peri.checkpoint.Saver { folder = path, parts = p }
    assert.equal(12, again:resume())
    again:close()
  end)

  it("removes only checkpoints of the run that goes on, also after one that began anew in the same folder", function()
    local path, p = folder .. "/anew", model()
    local function run(args, ...)
      args.folder, args.parts = path, p
      local saver = peri.checkpoint.Saver(args)
      saver:resume()
      for _, step in ipairs { ... } do saver:save(step) end
      saver:close()
    end
    run({}, 5, 6, 7)
    run({ resume = "no", keep = 2 }, 1, 2)
    local old = "save-000001-step-5\nsave-000002-step-6\nsave-000003-step-7\n"
    assert.equal(old .. "save-000004-step-1\nsave-000005-step-2\n", names(path))
    run({ keep = 2 }, 3, 4, 5)
    -- and what it went on from
    assert.equal(old .. "save-000005-step-2\nsave-000007-step-4\nsave-000008-step-5\n", names(path))
    run({ keep = 1 }) -- the older ones go before the first save
    assert.equal(old .. "save-000008-step-5\n", names(path))
    run({ keep = 1, resume = path .. "/save-000002-step-6" }, 8, 9)
    assert.equal("save-000002-step-6\nsave-000008-step-5\nsave-000010-step-9\n", names(path))
    -- However that is spelled.
    shell.run(("ln -s save-000010-step-9 %s/best"):format(path))
    run({ keep = 1, resume = path .. "/best" }, 10, 11)
    assert.equal("best\nsave-000008-step-5\nsave-000010-step-9\nsave-000012-step-11\n", names(path))
    run({ keep = 1, resume = path .. "/save-000012-step-11/" }, 12, 13)
    assert.equal("best\nsave-000008-step-5\nsave-000012-step-11\nsave-000014-step-13\n",
      names(path))
  end)

  it("takes the one before where the newest is damaged, and says so", function()
    local path, p = folder .. "/damaged", model()
    local saver = peri.checkpoint.Saver { folder = path, parts = p, every = 1 }
    for step = 1, 2 do
      p.model.weight:detach():fill(step)
      saver:save(step)
    end
    saver:close()
    shell.run(("printf x | dd of=%s/save-000002-step-2/rank-0.safetensors bs=1 seek=210 conv=notrunc"):format(path))
    local q = model()
    local again = peri.checkpoint.Saver { folder = path, parts = q }
    assert.equal(1, again:resume())
    assert.equal(1, q.model.weight:item(0))
    again:save(3)
    assert.truthy(names(path):find("save-000003-step-3", 1, true))
    again:close()
  end)

  it("goes by names that are free: what has lost its manifest is no checkpoint, and keeps its name", function()
    local path, p = folder .. "/broken", model()
    local saver = peri.checkpoint.Saver { folder = path, parts = p, every = 1, keep = 1 }
    for step = 1, 2 do saver:save(step) end
    saver:close()
    shell.run(("mkdir %s/save-000003-step-3 %s/save-000004-step-3; ln -s nothing %s/save-000005-step-3"):format(path,
      path, path))
    for _, async in ipairs { false, true } do
      local again = peri.checkpoint.Saver { folder = path, parts = p, keep = 1, async = async }
      assert.equal(async and 3 or 2, again:resume())
      assert.equal(async and path .. "/save-000007-step-4" or path .. "/save-000006-step-3",
        again:save(async and 4 or 3))
      again:close()
    end
    assert.equal("save-000003-step-3\nsave-000004-step-3\nsave-000005-step-3\nsave-000006-step-3\nsave-000007-step-4\n",
      names(path))
  end)

  it("knows of the save that one before it left under way: resume goes on from it, and save counts on", function()
    local path, p = folder .. "/left", model()
    peri.checkpoint.Saver({ folder = path, parts = p, every = 1, async = true }):step(1)
    collectgarbage()
    collectgarbage()
    local saver = peri.checkpoint.Saver { folder = path, parts = p, every = 1, async = true }
    assert.equal(1, saver:resume())
    saver:save(2)
    collectgarbage()
    saver:close()
    assert.equal("save-000001-step-1\nsave-000002-step-2\n", names(path))
  end)

  it("does not share its folder, nor remove what somebody reads or what is not its own", function()
    local path, p = folder .. "/shared", model()
    local saver = peri.checkpoint.Saver { folder = path, parts = p, every = 1, keep = 1 }
    assert.error_matches(function() peri.checkpoint.Saver { folder = path, parts = p } end,
      "is saved into already %(process %d+ on")
    local first = saver:save(1)
    local reader = peri.checkpoint.open(first)
    shell.run("touch " .. path .. "/notes " .. path .. "/save-000009-step-9")
    saver:save(2)
    assert.equal("notes\nsave-000001-step-1\nsave-000002-step-2\nsave-000009-step-9\n", names(path))
    assert.same(p.model.bias:to_list(), reader:read("model/bias"):to_list())
    reader:close()
    saver:save(3)
    assert.equal("notes\nsave-000003-step-3\nsave-000009-step-9\n", names(path))
    shell.run(("mv %s %s-moved"):format(path, path)) -- another job has the name now
    local other = peri.checkpoint.Saver { folder = path, parts = p, every = 1 }
    other:save(1)
    assert.error_matches(function() saver:save(4) end, "is saved into already")
    other:close()
    saver:save(5)
    assert.equal("save-000001-step-1\nsave-000004-step-5\n", names(path))
    assert.equal("notes\nsave-000003-step-3\nsave-000009-step-9\n", names(path .. "-moved"))
    saver:close()
  end)

  it("knows its folder again, which was mounted anew", function()
    local path, p = folder .. "/mounted", model()
    local saver = peri.checkpoint.Saver { folder = path, parts = p, every = 1, keep = 2 }
    saver:save(1)
    saver:save(2)
    shell.run(("cp -a %s %s-copy && rm -r %s && mv %s-copy %s"):format(path, path, path, path, path)) -- another inode
    saver:save(3)
    saver:save(4)
    assert.equal("save-000003-step-3\nsave-000004-step-4\n", names(path))
    saver:close()
  end)

  it("takes little of Lua's memory, which the collector goes by", function()
    local p, before = model(), collectgarbage "count"
    local saver = peri.checkpoint.Saver { folder = folder .. "/little", parts = p }
    assert.is_true(collectgarbage "count" - before < 4096) -- KiB
    saver:close(0)
  end)

  it("says what it takes", function()
    local p = model()
    for every, words in peri.util.ordered { ["0"] = "every is '0'", ["10x"] = "allowed: a number of steps",
      ["1.5steps"] = "1000steps" } do
      assert.error_matches(function() peri.checkpoint.Saver { folder = folder, parts = p, every = every } end, words)
    end
    assert.is_nil(peri.checkpoint.Saver { parts = p }:step(1)) -- no folder: nothing is saved
    assert.error_matches(function() peri.checkpoint.save(folder .. "/x", { model = 5 }) end,
      "part 'model' is 5, wanted an object")
    assert.error_matches(function() peri.checkpoint.save(folder .. "/x", {}) end, "parts is empty")
    local Odd = nn.Module:extend "Odd"
    function Odd:get_extra_state() return { f = print } end
    function Odd:set_extra_state() end
    assert.error_matches(function() peri.checkpoint.Saver { parts = { odd = Odd() } } end,
      "part 'odd': get_extra_state.*is a function")
  end)
end)

if shell.no_launcher() then return end

local script = [[
local peri = require "perilune"
local nn, plan = peri.nn, peri.plan
peri.init()
nn.manual_seed(2)
local Net = nn.Module:extend "Net"
function Net:init()
  self.ebc = peri.EmbeddingBagCollection { fused_params = { optimizer = "rowwise_adagrad", learning_rate = 0.1, exact = true }, tables = {
    peri.EmbeddingBagConfig { name = "t", num_embeddings = 40, embedding_dim = 8, feature_names = { "f" } } } }
  self.over = nn.Linear { in_features = 8, out_features = 1 }
end
function Net:forward(kjt) return self.over(self.ebc(kjt):values()):mean() end
local model = peri.DistributedModelParallel { module = Net(), plan = { ebc = { t = plan.row_wise() } } }
local optimizer = nn.optim.Adam { params = model:named_parameters(), lr = 0.01 }
local saver = peri.checkpoint.Saver { parts = { model = model, optimizer = optimizer } }
local step = saver:resume() or 0
while step < 12 do
  step = step + 1
  peri.scope(function()
    optimizer:zero_grad()
    model(peri.KeyedJaggedTensor { keys = { "f" }, values = { step * 7 % 40, step * 3 % 40 }, lengths = { 1, 1 } }):backward()
    optimizer:step()
  end)
  saver:step(step)
  if arg[1] == "fail" and step == 8 and peri.rank() == peri.world_size() - 1 then os.exit(3) end
  if arg[1] == "kill" and step == 8 then require("ffi").C.raise(9) end
end
saver:close(step)
]]

describe("perilune run --checkpoint", function()
  local path = shell.write(folder .. "/script.lua", "require('ffi').cdef 'int raise(int)'\n" .. script)
  local function run(words, to)
    return shell.run(("%s run --checkpoint %s/%s --every 3steps %s"):format(shell.perilune, folder, to, words))
  end
  local function equal(a, b)
    local out, status = shell.run(("%s checkpoint diff %s/%s %s/%s"):format(shell.perilune, folder, a, folder, b))
    assert.equal("0 all 11 tensors are equal,", (status .. " " .. out):match "^[^,]*,")
  end

  it("goes on after a rank was killed or failed, on another number of ranks, to the same bits", function()
    assert.equal(0, select(2, run("-n 2 " .. path, "whole")))
    for how in ("fail kill"):gmatch "%a+" do
      assert.is_not.equal(0, select(2, run(("-n 2 %s %s"):format(path, how), how)))
      assert.truthy(names(folder .. "/" .. how):find("step%-6"))
      -- one rank: the batch is the same on all, so the mean of two gradients is one of them
      local out, status = run(path, how)
      assert.equal(0, status, out)
      assert.truthy(out:find("going on from '[^']*step%-6', step 6"), out)
      equal("whole/save-000004-step-12", how .. "/save-000004-step-12")
    end
  end)

  -- Rank 1 gets a file system of its own over the folder, as where a host has not mounted it; for `late` of it goes
  -- away after a second.
  local apart = shell.write(folder .. "/apart.lua", [[
local peri, ffi = require "perilune", require "ffi"
ffi.cdef "int unshare(int);"
peri.init()
local folder, late = arg[1], arg[2] == "late"
local parts = { model = peri.nn.Linear { in_features = 2, out_features = 2 } }
peri.checkpoint.save(folder .. "/one", parts)
require("perilune.checkpoint.parts").LATE_SECONDS = late and 20 or 0.3
if peri.rank() == 1 then
  local alone = ffi.C.unshare(0x20000) == 0 and os.execute("mount --make-rprivate / && mount -t tmpfs none " .. folder) == 0
  if not alone then io.stderr:write "cannot mount\n" os.exit(77) end
  if late then os.execute("(sleep 1; umount " .. folder .. ") >/dev/null 2>&1 &") end
end
peri.world():barrier():wait()
if late then
  peri.checkpoint.load(folder .. "/one", parts)
  print "loaded"
else
  for _, f in ipairs { function() peri.checkpoint.Saver { folder = folder, parts = parts } end,
    function() peri.checkpoint.load(folder .. "/one", parts) end } do
    local ok, err = pcall(f)
    if peri.rank() == 0 then print(ok, err) end
  end
end
]])

  it("finds a folder that not all hosts share at the start, and waits for names that are late on one", function()
    shell.run("mkdir " .. folder .. "/apart " .. folder .. "/later")
    local out = shell.run(("%s run -n 2 %s %s/apart"):format(shell.perilune, apart, folder))
    if out:find "cannot mount" then return pending "no file systems can be mounted here" end
    assert.truthy(out:find("Saver: rank 1 of group 'world': folder '[^']*/apart' is another one here than on rank 0 "
      .. "%(process %d+ on"), out)
    assert.truthy(out:find "checkpoint.load: rank 1 of group 'world': .*/apart/one': No such file", out)
    assert.equal("loaded\nloaded\n",
      (shell.run(("%s run -n 2 %s %s/later late"):format(shell.perilune, apart, folder))))
  end)

  it("says when the script saves nothing, and what options want", function()
    local plain = shell.write(folder .. "/plain.lua", "print 'done'")
    local words = "done\nperilune: nothing was saved in '%s/x': the script made no peri.checkpoint.Saver "
      .. "(docs/checkpoints.md)\n"
    assert.equal(words:format(folder), (run(plain, "x")))
    local out, status = shell.run(shell.perilune .. " run --every 10m " .. plain)
    assert.equal("2 perilune: run: --every goes with --checkpoint FOLDER\n", status .. " " .. out)
    out, status = shell.run(("%s run --checkpoint %s --every 10y %s"):format(shell.perilune, folder, plain))
    assert.equal(2, status)
    assert.truthy(out:find("every is '10y', allowed", 1, true), out)
    for _, option in ipairs { "--keep", "--full-every" } do
      out = shell.run(("%s run --checkpoint %s %s x %s"):format(shell.perilune, folder, option, plain))
      assert.truthy(out:find(option .. ": 'x' is not a whole number above 0", 1, true), out)
    end
    shell.run("touch " .. folder .. "/file")
    local placed = shell.write(folder .. "/place.lua",
      "require('perilune').init()\nrequire('perilune').checkpoint.Saver { parts = "
        .. "{ m = require('perilune').nn.Linear { in_features = 1, out_features = 1 } } }")
    out = shell.run(("%s run -n 2 --checkpoint %s/file %s"):format(shell.perilune, folder, placed))
    assert.truthy(out:find("place.lua:2", 1, true), out)
    for line in out:gmatch "[^\n]*place.lua:2[^\n]*" do -- the place is said once, on each rank
      assert.equal(1, select(2, line:gsub("place.lua:2", "")), out)
    end
  end)
end)

describe("perilune checkpoint", function()
  local function cli(words) return shell.run(shell.perilune .. " checkpoint " .. words) end
  it("lists, shows, verifies, compares, exports", function()
    local path, p = folder .. "/cli", model()
    local saver = peri.checkpoint.Saver { folder = path, parts = p }
    local a = saver:save(1, { note = "x" })
    p.model.weight:detach():slice(1, 0, 1):fill(5)
    local b = saver:save(2)
    saver:close()
    local out = cli("ls " .. path)
    assert.truthy(out:find "save%-000001%-step%-1 +1 +2 +32 bytes +1 +%- +%x+\n")
    out = cli("show " .. a)
    assert.truthy(out:find "model/weight +f32 +2 x 3 +1\n", out)
    assert.truthy(out:find 'note = "x"', out)
    assert.truthy(cli("verify " .. a):find "all checksums hold")
    local found
    out, found = cli(("diff %s %s"):format(a, b))
    assert.matches("^model/weight +3 of 6 elements differ, by [%d.]+ at most\nvalues.user.note +only in [^\n]*\n$", out)
    assert.equal(1, found)
    assert.equal(0, select(2, cli(("diff %s %s"):format(b, b))))
    out = cli(("export %s model/weight -o %s/w.npy"):format(b, folder))
    assert.equal(("%s/w.npy: f32 [2, 3]\n"):format(folder), out)
    local file = assert(io.open(folder .. "/w.npy", "rb"))
    local text = file:read "*a"
    file:close()
    assert.equal(128 + 24, #text)
    assert.equal("\147NUMPY\1\0v\0{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }", text:sub(1, 69))
    shell.run(("printf x | dd of=%s/rank-0.safetensors bs=1 seek=210 conv=notrunc"):format(a))
    local words, status = cli("verify " .. a)
    assert.equal(1, status)
    assert.truthy(words:find("rank%-0.safetensors' is damaged: bytes %d+ to %d+, of tensor 'model/%a+', have another "
      .. "checksum"), words)
    -- What is exported is there whole or not at all; a pipe gets it as it comes.
    local w, left = folder .. "/w.npy", shell.run("ls -A " .. folder)
    assert.equal(1, select(2, cli(("export %s model/weight -o %s"):format(a, w))))
    assert.equal(text, shell.read(w))
    assert.equal(left, (shell.run("ls -A " .. folder)))
    shell.run(("mkfifo %s/pipe; cat %s/pipe >%s/piped & %s checkpoint export %s model/weight -o %s/pipe; wait"):format(
      folder, folder, folder, shell.perilune, b, folder))
    assert.equal(text, shell.read(folder .. "/piped"))
    -- An error is told from an answer: of these questions nothing is known.
    for _, question in ipairs { "diff %s/none %s", "diff %s %s/none", "verify %s/none" } do
      assert.equal(2, select(2, cli(question:format(b, b))), question)
    end
    assert(os.remove(b .. "/rank-0.safetensors"))
    assert.equal(2, select(2, cli(("diff %s %s"):format(a, b))))
    assert.equal(1, select(2, cli("verify " .. b)))
  end)
end)
