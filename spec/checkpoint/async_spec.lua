-- Saving while training goes on. The law: whatever happens until it has ended, an asynchronous save is the state at its
-- call, bit for bit; or it is nothing, which all ranks are told.
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local shell = require "spec.support.shell"
local async = require "perilune.checkpoint.async"
local nn, plan, C = peri.nn, peri.plan, peri.ffi.C

local folder, clean = shell.temporary()
teardown(clean)
-- So little at once that saves last for many steps.
local pace = peri.util.copy(async.pace)
setup(function() async.pace.block, async.pace.most = 128, 1e-6 end)
teardown(function() for key, value in peri.util.ordered(pace) do async.pace[key] = value end end)

local Net = nn.Module:extend "Net"
function Net:init(options)
  local fused = { optimizer = options.optimizer or "rowwise_adagrad", learning_rate = 0.1,
    cache_params = options.cache }
  self.ebc = peri.EmbeddingBagCollection { seed = 5, device = options.device, fused_params = fused, tables = {
    peri.EmbeddingBagConfig { name = "a", num_embeddings = 500, embedding_dim = 8, feature_names = { "fa" } },
    peri.EmbeddingBagConfig { name = "b", num_embeddings = 370, embedding_dim = 24, feature_names = { "fb" } } } }
  self.over = nn.Linear { in_features = 32, out_features = 1, device = options.device }
end
function Net:forward(kjt) return self.over(self.ebc(kjt):values()):mean() end

local function build(options, world, entry)
  nn.manual_seed(3)
  local net = Net(options)
  local model = world and peri.DistributedModelParallel { module = net, group = world,
    plan = { ebc = { a = entry, b = entry } }, device = options.device } or net
  local dense = world and model:named_parameters() or { net.over.weight, net.over.bias }
  return { model = model, optimizer = nn.optim.Adam { params = dense, lr = 0.05 } }
end

local function train(p, from, last, device)
  for i = from, last do
    peri.scope(function()
      local values, lengths = {}, {}
      for k = 1, 12 do values[k], lengths[k] = (i * 37 + k * k * 11) % 370, 1 + k % 2 * 0 end
      local kjt = peri.KeyedJaggedTensor { keys = { "fa", "fb" }, values = values, lengths = lengths }
      p.optimizer:zero_grad()
      p.model(device and kjt:to(device) or kjt):backward()
      p.optimizer:step()
    end)
  end
end

--- What the checkpoint at `path` holds, wherever in its files: tensors and the checksums of their pieces, and values.
--- (A save behind the training writes the pieces of a table one after the other.)
local function contents(path)
  local c, all = peri.checkpoint.open(path), {}
  for i, name in ipairs(c:names()) do
    all[i] = c:tensor(name)
    for _, piece in ipairs(all[i].pieces) do piece.file, piece.begin = nil, nil end
  end
  all.values = c:values()
  c:close()
  return all
end

--- The law, for objects that `change` changes. Returns the handle.
local function holds(path, p, group, change)
  peri.checkpoint.save(path .. "-now", p, { group = group, values = { step = 3 } })
  local save = peri.checkpoint.save(path .. "-behind", p, { group = group, values = { step = 3 }, async = true })
  assert.is_false(save:done())
  change(save)
  assert.equal(32, #save:wait())
  assert.is_true(save:done())
  assert.is_nil(save:error())
  local want = contents(path .. "-now")
  assert.same(want, contents(path .. "-behind"))
  peri.checkpoint.save(path .. "-then", p, { group = group, values = { step = 3 } })
  assert.not_same(want, contents(path .. "-then"))
end

local entries = {
  table_wise = function() return plan.table_wise(0) end, row_wise = function() return plan.row_wise() end,
  data_parallel = function() return plan.data_parallel() end,
  column_wise = function() return plan.column_wise { ranks = { 0, 0 } } end,
  files = function()
    return plan.row_wise { compute_kernel = "fused_uvm_caching", cache_params = { load_factor = 0.2 } }
  end,
}

describe("an asynchronous save", function()
  it("copies at the pace that it is given", function()
    local path, parts = folder .. "/pace", { linear = peri.nn.Linear { in_features = 2, out_features = 1 } }
    for _, bad in ipairs { 0, -1, 1.5, 0 / 0 } do
      assert.error_matches(function() peri.checkpoint.save(path, parts, { async = true, pace = bad }) end,
        "pace is .*, allowed")
    end
    assert.error_matches(function() peri.checkpoint.save(path, parts, { pace = 0.5 }) end,
      "pace is 0.5, allowed with async = true")
    assert.error_matches(function() peri.checkpoint.Saver { parts = parts, pace = 2 } end, "Saver: pace is 2, allowed")
    local save = peri.checkpoint.save(path, parts, { async = true, pace = 1 })
    while not save:done() do end
    assert.equal(save:wait(), peri.checkpoint.open(path):digest())
  end)

  it("is on the disk when a rank has left its world", function()
    local path = folder .. "/finish"
    sim.run(2, function(_, world)
      local p = build({}, world, plan.row_wise())
      train(p, 1, 2)
      peri.checkpoint.save(path .. "-now", p, { group = world })
      peri.checkpoint.save(path, p, { group = world, async = true })
      train(p, 3, 4)
      peri.finish()
    end)
    assert.same(contents(path .. "-now"), contents(path))
  end)

  it("is an error of leaving the world where it fails and nobody has asked", function()
    local path = folder .. "/finish-fails"
    local _, errors = sim.run(2, function(_, world)
      local p = build({}, world, plan.row_wise())
      peri.checkpoint.save(path, p, { group = world, async = true })
      peri.ffi.check(C.peri_fault_arm("checkpoint_sync", 1))
      peri.finish()
    end, { catch = true })
    C.peri_fault_arm("checkpoint_sync", 0)
    for rank = 1, 2 do assert.matches("was not saved", tostring(errors[rank])) end
    assert.is_nil(io.open(path .. "/manifest.json"))
  end)

  for name, make in peri.util.ordered(entries) do
    it(("of tables %s is the state at its call, on 1 to 3 ranks"):format(name), function()
      for n, optimizer in ipairs { "adam", "rowwise_adagrad", "sgd" } do
        sim.run(n, function(_, world)
          local p = build({ optimizer = optimizer }, world, make())
          train(p, 1, 3)
          holds(("%s/%s-%d"):format(folder, name, n), p, world, function(save)
            train(p, 4, 8)
            assert.is_false(save:done())
          end)
        end)
      end
    end)
  end

  for name, options in peri.util.ordered { memory = { optimizer = "adagrad" },
    files = { cache = { load_factor = 0.1 } }, opaque = { device = "opaque" } } do
    it("of a model of one rank is the state at its call: " .. name, function()
      local p = build(options)
      train(p, 1, 3, options.device)
      holds(folder .. "/one-" .. name, p, false, function()
        train(p, 4, 6, options.device)
        p.model.ebc:reset_rows("a", peri.tensor({ 0, 5, 77, 499 }, "i64"))
        train(p, 7, 9, options.device)
      end)
    end)
  end

  it("does not see what is loaded meanwhile, also where all rows change at once", function()
    local p, q = build {}, build {}
    train(p, 1, 3)
    train(q, 1, 9)
    peri.checkpoint.save(folder .. "/other", q)
    holds(folder .. "/loaded", p, false, function() peri.checkpoint.load(folder .. "/other", p) end)
  end)

  it("needs memory for the rows that changed before their turn, and gives it back", function()
    local p = build {}
    local save = peri.checkpoint.save(folder .. "/memory", p, { async = true })
    local bytes = function() return tonumber(C.peri_moment_bytes(save._moment.ptr)) end
    assert.equal(0, bytes())
    train(p, 1, 1)
    local once = bytes()
    assert.is_true(once > 0 and once <= 24 * (24 * 4 + 8)) -- 12 ids of each table: weights and a number each
    train(p, 1, 1)
    assert.is_true(bytes() <= once)
    save:wait()
  end)

  it("copies the parts of a table one after the other, small ones first, and then takes no more of it", function()
    local p, ffi = build {}, require "ffi"
    local states = p.model.ebc:state_dict()
    local out, index, order = ffi.new "peri_moment *[1]", ffi.new "int64_t[1]", ffi.new "int64_t[4]"
    peri.ffi.check(C.peri_moment_new(out))
    local moment = ffi.gc(out[0], C.peri_moment_release)
    local function add(t)
      local status = C.peri_moment_add(moment, peri.Tensor.ptr(t), index)
      return status >= 0 and tonumber(index[0])
    end
    local fused = p.model.ebc:fused_optimizer():state_dict().state
    local names = { "embedding_bags.b.weight", "embedding_bags.a.weight" }
    for i, name in ipairs(names) do assert.equal(i - 1, add(states[name])) end
    for i, name in ipairs(names) do
      for _, t in peri.util.ordered(fused[name]) do
        if peri.Tensor.is(t) and t:size(1) > 1 then assert.equal(i + 1, add(t)) end
      end
    end
    peri.ffi.check(C.peri_moment_order(moment, 4, order))
    assert.same({ 3, 1, 2, 0 }, { tonumber(order[0]), tonumber(order[1]), tonumber(order[2]), tonumber(order[3]) })
    for _, i in ipairs { 3, 1 } do peri.ffi.check(C.peri_moment_pass(moment, i, 10)) end
    assert.is_false(add(states[names[2]]))
    assert.matches("table 'a' has been passed", ffi.string(C.peri_error_message()))
  end)

  it("is its process's: a child of fork is told so, saves for itself, and the parent goes on", function()
    local out, status = shell.luajit(([[
      local ffi, peri = require "ffi", require "perilune"
      local async = require "perilune.checkpoint.async"
      ffi.cdef "int fork(void); int waitpid(int, int *, int); unsigned alarm(unsigned);"
      async.pace.block, async.pace.most, async.pace.direct = 128, 1e-6, 0
      local parts, folder = { a = peri.nn.Linear { in_features = 100, out_features = 100 } }, %q
      local save = peri.checkpoint.save(folder .. "/forked", parts, { async = true })
      local pid, of_child = ffi.C.fork(), ffi.new "int[1]"
      if pid == 0 then
        ffi.C.alarm(20)
        local ok, why = pcall(save.wait, save)
        local own = peri.checkpoint.save(folder .. "/child", parts, { async = true })
        os.exit(not ok and tostring(why):find("the process that this one was forked from saves it", 1, true)
          and why.name == "EUNSUPPORTED" and save:done() and #own:wait() == 32 and 7 or 1, true)
      end
      ffi.C.waitpid(pid, of_child, 0)
      print(of_child[0], #save:wait(), peri.checkpoint.open(folder .. "/forked"):digest() == save.digest)
    ]]):format(folder))
    assert.same({ ("%d\t32\ttrue\n"):format(7 * 256), 0 }, { out, status })
  end)

  it("that fails is told to all ranks by wait, leaves nothing, and the next one is good", function()
    for _, fault in ipairs { "checkpoint_write", "checkpoint_sync" } do
      sim.run(2, function(rank, world)
        local p = build({}, world, plan.row_wise())
        local path = folder .. "/fails-" .. fault
        local save = peri.checkpoint.save(path, p, { group = world, async = true })
        world:barrier():wait()
        if rank == 1 then peri.ffi.check(C.peri_fault_arm(fault, 1)) end
        train(p, 1, 2)
        local ok, err = pcall(save.wait, save)
        peri.ffi.check(C.peri_fault_arm(fault, 0))
        assert.is_false(ok)
        local message = tostring(err)
        assert.equal(1, select(2, message:gsub("%(spec/checkpoint/async_spec%.lua:%d+%)", "")), message)
        assert.truthy(message:find(path .. "' was not saved: rank ", 1, true)
          and message:find "rank %d: checkpoint: %a+ing '", message)
        assert.equal(32, #peri.checkpoint.save(path, p, { group = world }))
      end)
    end
    assert.equal("", (shell.run(("ls -A %s | grep saving"):format(folder))))
  end)

  it("that nobody has waited for is waited for by the next save, which tells its failure once instead of saving",
    function()
    sim.run(2, function(rank, world)
      local p = build({}, world, plan.row_wise())
      local first = peri.checkpoint.save(folder .. "/first", p, { group = world, async = true })
      local second = peri.checkpoint.save(folder .. "/second", p, { group = world, async = true })
      assert.is_true(first:done())
      world:barrier():wait()
      if rank == 0 then peri.ffi.check(C.peri_fault_arm("checkpoint_write", 1)) end
      local ok, err = pcall(peri.checkpoint.save, folder .. "/third", p, { group = world, async = true })
      peri.ffi.check(C.peri_fault_arm("checkpoint_write", 0))
      assert.is_false(ok)
      assert.truthy(tostring(err):find("second' was not saved", 1, true), "met: " .. tostring(err))
      assert.is_truthy(second:error())
      assert.equal(32, #peri.checkpoint.save(folder .. "/third", p, { group = world, async = true }):wait())
    end)
  end)
end)
