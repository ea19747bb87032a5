-- DataLoadingThread: batches that are made on a thread of their own, in a state of Lua of its own.
-- mpirun: 2
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local P = require "perilune.ffi"
local shell = require "spec.support.shell"
local worlds = require "spec.support.worlds"
local support = require "spec.support.pipeline"
local DataLoadingThread = peri.pipeline.DataLoadingThread
local C = P.C
local it_alone = worlds.mpirun and function() end or it -- of sim worlds: not again on every rank

local function now() return tonumber(C.peri_time_ns()) * 1e-9 end

--- Sleep, in whatever state of Lua: what a disk does.
local function sleep(seconds)
  for _ = 1, math.ceil(seconds / 100e-6) do C.peri_pause(2 ^ 40) end -- 200 us each, or somewhat more
end

local function all(batches)
  local list = {}
  for batch in batches do list[#list + 1] = batch end
  return list
end

--- The batches of support.pipeline of a rank, made on a thread; sleep_s each; `fails_at`: instead of that batch.
local function thread_of(rank, n, more)
  local arguments = { rank = rank, n = n, root = false }
  for key, value in pairs(more or {}) do arguments[key] = value end -- any order: named arguments
  return DataLoadingThread { arguments = arguments, num_workers = arguments.num_workers, loader = function(a)
    local own, k = require("spec.support.pipeline").batches(a.rank, "cpu", a.n), 0
    return function()
      k = k + 1
      if k == a.fails_at then error("the disk is full", 0) end
      return own()
    end
  end }
end

describe("a DataLoadingThread", function()
  it("hands batches over as they are, in their order", function()
    local list = all(DataLoadingThread { loader = "spec.support.loading_module", arguments = { n = 5 } })
    assert.equal(5, #list)
    for k, batch in ipairs(list) do
      assert.equal(k, batch.number)
      assert.equal("batch " .. k, batch.text)
      assert.is_true(batch.flag)
      assert.same({ k, k + 0.5 }, batch.x[1]:to_list())
    end
  end)

  it("gives what the library's loaders give, of this rank", function()
    local function loader_of(a) return require("perilune").data.synthetic(a) end
    local rank, size = P.state.world and P.state.world:rank() or 1, P.state.world and P.state.world:size() or 3
    local arguments = { num_rows = 50, batch_size = 12, sparse_features = 3, dense_features = 2, rows = 40,
      ids_per_bag = { 0, 3 } }
    local before = P.state.place
    P.state.place = { rank, size }
    local wanted, got = all(peri.data.synthetic(arguments)),
      all(DataLoadingThread { loader = loader_of, arguments = arguments })
    P.state.place = before
    assert.equal(5, #got)
    for k, batch in ipairs(got) do
      local w = wanted[k]
      assert.is_true(peri.data.Batch.is(batch))
      assert.same({ w.rows, w.global_rows, w.global_row, w.loss_scale },
        { batch.rows, batch.global_rows, batch.global_row, batch.loss_scale })
      assert.same(w.dense_features:to_list(), batch.dense_features:to_list())
      assert.same(w.labels:to_list(), batch.labels:to_list())
      assert.same(w.sparse_features:keys(), batch.sparse_features:keys())
      assert.same(w.sparse_features:values():to_list(), batch.sparse_features:values():to_list())
      assert.same(w.sparse_features:lengths():to_list(), batch.sparse_features:lengths():to_list())
    end
  end)

  it("knows the rank that began it", function()
    local before = P.state.place
    P.state.place = not P.state.world and { 1, 3 } or before
    local t = DataLoadingThread { loader = function()
      local p, k = require "perilune", 0
      return function()
        k = k + 1
        if k == 1 then return { p.rank(), p.world_size() } end
      end
    end }
    P.state.place = before
    assert.same({ { P.state.world and peri.rank() or 1, P.state.world and peri.world_size() or 3 } }, all(t))
  end)

  it("runs ahead, but not further than it may", function()
    local folder = os.tmpname()
    local t = DataLoadingThread { prefetch_factor = 3, arguments = folder, loader = function(path)
      local k = 0
      return function()
        k = k + 1
        local file = io.open(path, "w")
        file:write(tostring(k))
        file:close()
        return k
      end
    end }
    local function made()
      local file = io.open(folder)
      local n = tonumber(file:read "*a") or 0
      file:close()
      return n
    end
    local from = now()
    while made() < 4 and now() - from < 20 do sleep(1e-3) end
    sleep(30e-3)
    assert.equal(4, made()) -- three wait, and one is in its hand
    assert.equal(1, t:get_next_batch())
    while made() < 5 and now() - from < 20 do sleep(1e-3) end
    assert.equal(5, made())
    t:stop()
    assert.is_nil(t:get_next_batch())
    os.remove(folder)
  end)

  it("refuses what cannot go to another state of Lua", function()
    local function refused(text, args)
      local ok, err = pcall(DataLoadingThread, args)
      assert.is_false(ok)
      assert.matches(text, err.message, 1, true)
    end
    local kept = {}
    refused("DataLoadingThread: loader uses 'kept' of what surrounds it", { loader = function() return kept end })
    refused("DataLoadingThread: loader is 3, wanted a function(arguments)", { loader = 3 })
    refused("DataLoadingThread: loader is a function of C", { loader = print })
    refused("DataLoadingThread: arguments: the value[\"arguments\"][\"f\"] is a function",
      { loader = "x", arguments = { f = print } })
    refused("DataLoadingThread: prefetch_factor is 0, allowed: whole numbers 1..4096",
      { loader = "x", prefetch_factor = 0 })
    local function fails(text, loader, arguments)
      local t = DataLoadingThread { loader = loader, arguments = arguments }
      for _ = 1, 2 do
        local ok, err = pcall(t.get_next_batch, t)
        assert.is_false(ok)
        assert.matches(text, err.message, 1, true)
      end
    end
    fails("module 'no.such.module' not found", "no.such.module")
    fails("the loader returned 3, wanted a function", function() return 3 end)
    fails("the loader returned false, wanted a batch, or nil at the end", function()
      return function() return false end
    end)
    local text = "a DataLoadingThread is in no world, so there are no exchanges on it; peri.rank() and "
      .. "peri.world_size() are those of the rank that began it"
    fails("dist.init: " .. text, function() require("perilune").init() end)
    fails("dist: " .. text, function() require("perilune").world() end)
    local circle = {}
    circle.itself = circle
    refused("DataLoadingThread: arguments: the value[\"arguments\"]" .. ("[\"itself\"]"):rep(5)
      .. "[\"itself... is nested deeper than 100 tables, or contains itself", { loader = "x", arguments = circle })
    fails("the batch.x.f is a function", function() return function() return { x = { f = print } } end end)
    fails("the batch is on device 'opaque', allowed: cpu", function()
      return function() return require("perilune").zeros({ 2 }, "f32", "opaque") end
    end)
  end)

  it("waits for a batch so long, and no longer", function()
    local path, begun = os.tmpname(), os.tmpname()
    local t = DataLoadingThread { timeout = 0.05, arguments = { path = path, begun = begun }, loader = function(a)
      return function() -- at work until the file is gone
        os.remove(a.begun)
        local file = io.open(a.path)
        while file do
          file:close()
          require("perilune.ffi").C.peri_pause(2 ^ 40)
          file = io.open(a.path)
        end
      end
    end }
    local ok, err = pcall(t.get_next_batch, t)
    assert.is_false(ok)
    assert.matches("batch 0 is not there after 0.05 s", err.message, 1, true)
    local deadline = now() + 60 -- a busy machine may not have begun the thread yet, and one that has not ends at once
    while shell.exists(begun) and now() < deadline do sleep(0.001) end
    assert.is_false(shell.exists(begun))
    ok, err = pcall(t.stop, t, 0.01)
    assert.is_false(ok)
    assert.matches("peri_feed_stop: the thread has not ended after 0%.0[01]%d* s", err.message) -- what was left of it
    os.remove(path)
    t:stop(20)
  end)

  it("gives everything back, wherever it is left", function()
    local function objects()
      collectgarbage()
      collectgarbage()
      return tonumber(C.peri_mem_objects())
    end
    local before = objects()
    for taken = 0, 3 do
      local t = thread_of(0, 9)
      for _ = 1, taken do t:get_next_batch() end
      if taken % 2 == 0 then t:stop() end
      t = nil -- luacheck: ignore
      assert.equal(before, objects())
    end
  end)
end)

describe("a pipeline", function()
  local function plain(world, n, device)
    local model = support.model(world, device or "cpu")
    local losses = support.plain(model, support.optimizer(model), support.batches(world:rank(), device or "cpu", n))
    return support.learned(model), losses
  end

  worlds.each("learns from a thread what it learns from its loader", function(world)
    local expected, losses = plain(world, 7)
    for _, name in ipairs { "TrainPipelineSparseDist", "TrainPipelineBase" } do
      local model = support.model(world, "cpu")
      local p, got = peri[name] { model = model, optimizer = support.optimizer(model) }, {}
      for loss in p:run(thread_of(world:rank(), 7)) do got[#got + 1] = loss end
      assert.same(losses, got)
      support.assert_same(expected, model, name)
    end
  end, { sizes = { 1, 2 }, devices = { "cpu" }, timeout = 60 })

  -- Every schedule, some with several workers (the start of a worker is most of what this costs): batches come to the
  -- device by copies that nobody waits for. Ranks of mpirun have every second schedule.
  local schedules = peri.pipeline.schedules
  local every = { schedules.base, schedules.sparse_dist, schedules.sparse_dist_lite, schedules.fused_sparse_dist,
    schedules.prefetch_sparse_dist, schedules.wire_first, schedules.semi_sync(100000), schedules.accumulate(1),
    schedules.base:set { load = { on = "main" } }, schedules.sparse_dist:drop "to_device",
    schedules.sparse_dist:set { load = { on = "copy" } } }
  worlds.each("learns the same from workers, under every schedule", function(world, device)
    local options = { no_replica = true } -- accumulate takes no others
    local model = support.model(world, device, options)
    local losses = support.plain(model, support.optimizer(model), support.batches(world:rank(), device, 9))
    local expected = support.learned(model)
    for i = 1, #every, worlds.mpirun and 2 or 1 do
      local schedule = every[i]
      local own = support.model(world, device, options)
      local moves = schedule.name == "sparse_dist" and i == 2 -- this one: the pipeline moves what stays on the host
      local p, got = peri.pipeline.Pipeline { model = own, optimizer = support.optimizer(own), schedule = schedule,
        device = moves and device or nil }, {}
      local thread = DataLoadingThread { arguments = { rank = world:rank(), n = 9 },
        num_workers = ({ 1, 1, 2, 1, 3 })[i % 5 + 1], device = not moves and device or nil, loader = function(a)
          return require("spec.support.pipeline").batches(a.rank, "cpu", a.n)
        end }
      for loss in p:run(moves and function()
        local b = thread()
        return b and setmetatable(b, { __index = { to = function(x, to, non_blocking)
          assert.is_true(non_blocking)
          return { dense_features = x.dense_features:to(nil, to, true), labels = x.labels:to(nil, to, true),
            sparse_features = x.sparse_features:to(to, true) }
        end } })
      end or thread) do got[#got + 1] = loss end
      assert.same(losses, got)
      support.assert_same(expected, own, schedule.name)
    end
  end, { sizes = { 2 }, timeout = 60 })

  it_alone("moves what a thread has loaded to its device", function()
    sim.run(2, function(rank, world)
      local expected = plain(world, 5, "opaque")
      local model = support.model(world, "opaque")
      local p = peri.TrainPipelineSparseDist { model = model, optimizer = support.optimizer(model), device = "opaque" }
      local thread = thread_of(rank, 5)
      for _ in p:run(function()
        local batch = thread()
        return batch and setmetatable(batch, { __index = { to = function(b, device)
          return { dense_features = b.dense_features:to(nil, device), labels = b.labels:to(nil, device),
            sparse_features = b.sparse_features:to(device) }
        end } })
      end) do end -- luacheck: ignore
      support.assert_same(expected, model, "opaque")
    end)
  end)

  it_alone("trains what was loaded before the loader failed, and raises its error on all ranks", function()
    local _, errors = sim.run(2, function(rank, world)
      local model = support.model(world, "cpu")
      local p, steps = peri.TrainPipelineSparseDist { model = model, optimizer = support.optimizer(model) }, 0
      local ok, err = pcall(function()
        for _ in p:run(thread_of(rank, 9, { fails_at = rank == 1 and 5 or nil })) do steps = steps + 1 end
      end)
      assert.is_false(ok)
      assert.is_true(steps >= 4 and steps <= 7)
      error(err, 0)
    end, { catch = true })
    assert.matches("DataLoadingThread: the disk is full", errors[2].message, 1, true)
    assert.matches("^the loader of rank 1 failed: DataLoadingThread: the disk is full", errors[1].message)
  end)

  it_alone("gives back what a loader has made when its batch is done, without the garbage collector", function()
    sim.run(1, function(_, world)
      for _, device in ipairs { "cpu", "opaque" } do
        local model = support.model(world, device)
        local p = peri.TrainPipelineSparseDist { model = model, optimizer = support.optimizer(model) }
        local loader = peri.data.synthetic { num_rows = 400, batch_size = 10, dense_features = 3, sparse_features = 3,
          rows = 30, device = device }
        loader.keys = { "f1", "f2", "f3" } -- of the model
        local seen = {}
        local function step(n)
          local loss, logits, labels = p:progress(loader)
          for _, t in ipairs { loss, logits, labels } do t:release() end
          seen[n] = tonumber(C.peri_mem_objects())
        end
        for n = 1, 10 do step(n) end
        collectgarbage()
        collectgarbage "stop"
        for n = 11, 35 do step(n) end
        collectgarbage "restart"
        assert.equal(seen[12], seen[35])
        p:close()
      end
    end)
  end)

  it_alone("says of a loader at its end that another loop over it has no batches", function()
    sim.run(1, function(_, world)
      local model, said, stderr = support.model(world, "cpu"), {}, io.stderr
      local p = peri.TrainPipelineSparseDist { model = model, optimizer = support.optimizer(model) }
      local loader = peri.data.synthetic { num_rows = 20, batch_size = 10, dense_features = 3, sparse_features = 3,
        rows = 30 }
      loader.keys = { "f1", "f2", "f3" } -- of the model
      local steps = {}
      rawset(io, "stderr", { write = function(_, text) said[#said + 1] = text end })
      local ok, err = pcall(function()
        for pass = 1, 3 do
          if pass == 3 then loader:rewind() end
          steps[pass] = 0
          for _ in p:run(loader) do steps[pass] = steps[pass] + 1 end
        end
      end)
      rawset(io, "stderr", stderr)
      assert(ok, err)
      assert.same({ 2, 0, 2 }, steps)
      assert.same({ "TrainPipelineSparseDist: data.synthetic is at its end and has no more batches; rewind() begins "
        .. "again, epochs = N makes N passes\n" }, said)
    end)
  end)

  it_alone("loads while it computes", function()
    sim.run(1, function(_, world)
      local model = support.model(world, "cpu")
      local each, steps = 5e-3, 40
      local slow_step = peri.pipeline.schedules.base:insert({ "compute", run = function() sleep(each) end },
        { last = true })
      local function run(batches)
        local p = peri.pipeline.Pipeline { model = model, optimizer = support.optimizer(model), schedule = slow_step }
        p:progress(batches) -- the thread is there
        local from = now()
        for _ in p:run(batches) do end -- luacheck: ignore
        return now() - from
      end
      local function slow(a)
        local pause = require("perilune.ffi").C.peri_pause
        local own = require("spec.support.pipeline").batches(0, "cpu", a.n)
        return function()
          for _ = 1, math.ceil(a.each / 100e-6) do pause(2 ^ 40) end
          return own()
        end
      end
      local alone = run(slow { n = steps, each = each })
      local ahead = run(DataLoadingThread { loader = slow, arguments = { n = steps, each = each } })
      assert.is_true(ahead < 0.75 * alone, ("%.3f s with a thread, %.3f s without"):format(ahead, alone))
    end)
  end)
end)


