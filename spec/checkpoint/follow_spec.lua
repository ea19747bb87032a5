-- A process that follows a run has what that one saved, bit by bit and as a whole: under other plans, on other numbers
-- of ranks, over increments, full checkpoints and compacted chains; damaged ones change nothing; another process
-- follows while one trains.
local ffi = require "ffi"
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local text = require "spec.support.facts"
local shell = require "spec.support.shell"
local small = require "spec.support.small_net"
local nn, plan = peri.nn, peri.plan
local C, check = peri.ffi.C, peri.ffi.check

local folder, clean = shell.temporary()
teardown(clean)

local build, batch, entries = small.build, small.batch, small.entries

local function train(model, from, last)
  for i = from, last do
    peri.scope(function()
      model(batch(i)):backward()
    end)
  end
end

local function state(model)
  local tables = model.fused_optimizer and model:fused_optimizer()
    or nn.optim.CombinedOptimizer { { name = "ebc", optimizer = model.ebc:fused_optimizer() } }
  return text(peri.shard.gather_state_dict { model = model:state_dict(), tables = tables:state_dict() })
end

local function bytes_of(path)
  local c, sum = peri.checkpoint.open(path), 0
  for _, name in ipairs(c:names()) do
    for _, piece in ipairs(c:tensor(name).pieces) do sum = sum + piece.bytes end
  end
  c:close()
  return sum
end

--- A run of `ranks` under a plan, whose saves `each(model, saver, step)` comes after; returns the states by step.
local function run_of(of, entry, ranks, steps, each, full_every)
  local states = {}
  sim.run(ranks, function(rank, world)
    local model = build(world, entry)
    local saver = peri.checkpoint.Saver { folder = of, parts = { model = model }, every = 1, full_every = full_every
      or 1e9, keep = 100, group = world }
    for step = 1, steps do
      train(model, step, step)
      saver:step(step, { said = step })
      local now = state(model)
      if rank == 0 then states[step] = now end
      if each then each(rank, step) end
    end
    saver:close()
  end)
  return states
end

describe("a follower", function()
  for from, make in peri.util.ordered(entries) do
    it(("of tables %s has the bits of the trainer, unsharded and under other plans"):format(from), function()
      local of, followers, polls = folder .. "/" .. from, {}, 0
      local alone = build()
      local follower = peri.checkpoint.follow(of, { model = alone }, { group = false })
      local function each(rank, step)
        if rank > 0 or step == 2 then return end -- two increments at once after step 3
        followers[step] = { follower:poll() }
        followers[step].state, polls = state(alone), polls + 1
      end
      local want = run_of(of, make(), 2, 5, each)
      assert.equal(4, polls)
      for step, got in pairs(followers) do
        assert.equal(step, got[2].said)
        assert.is_true(want[step] == got.state, ("step %d"):format(step))
      end
      assert.equal(5, follower.step)
      assert.is_nil((follower:poll()))
      follower:close()
      for to, other in peri.util.ordered(from == "row_wise" and entries or {}) do
        local elsewhere = folder .. "/" .. from .. "-" .. to
        shell.run("mkdir -p " .. elsewhere)
        local list = peri.checkpoint.Saver.list(of)
        sim.run(to == "column_wise" and 2 or 3, function(rank, world)
          local model = build(world, other())
          local f = peri.checkpoint.follow(elsewhere, { model = model }, { group = world })
          for i = #list, 1, -1 do
            if rank == 0 then shell.run(("cp -r %s %s"):format(list[i].path, elsewhere)) end
            world:barrier():wait()
            assert.truthy(f:poll())
            assert.is_true(want[list[i].step] == state(model), ("%s, step %d"):format(to, list[i].step))
          end
          f:close()
        end)
      end
    end)
  end

  it("reads what changed, not the tables", function()
    local of = folder .. "/row_wise"
    local list = peri.checkpoint.Saver.list(of)
    assert.is_true(bytes_of(list[1].path) < bytes_of(list[#list].path) / 5)
  end)

  it("goes on over full checkpoints, compacted increments and ones that were removed", function()
    local of = folder .. "/kept"
    local alone, seen = build(), {}
    local follower = peri.checkpoint.follow(of, { model = alone }, { group = false })
    local want = run_of(of, plan.row_wise(), 1, 9, function(_, step)
      local newest = peri.checkpoint.Saver.list(of)[1]
      if step == 5 then
        local c = peri.checkpoint.open(newest.path)
        c:compact(newest.path, true)
        c:close()
      end
      if step ~= 4 then
        follower:poll()
        seen[step] = state(alone)
      end
      if step == 7 then for _, entry in ipairs(peri.checkpoint.Saver.list(of)) do
        if entry.step < 5 then pcall(peri.checkpoint.remove, entry.path) end
      end end
    end, 7)
    for step, got in pairs(seen) do assert.is_true(want[step] == got, ("step %d"):format(step)) end
    follower:close()
  end)

  it("takes the weights alone, and what is in the folder by other names", function()
    local of = folder .. "/names"
    shell.run("mkdir -p " .. of)
    local model, alone = build(), build()
    local follower = peri.checkpoint.follow(of, { model = alone }, { only = { "model/" }, group = false })
    local late = peri.checkpoint.follow(of, { model = build() }, { group = false })
    for i, name in ipairs { "first", "b", "a" } do
      train(model, i, i)
      peri.checkpoint.save(of .. "/" .. name, { model = model }, i == 1 and { increments = true }
        or { increment_of = of .. "/" .. ({ "first", "b" })[i - 1] })
      assert.equal(of .. "/" .. name, (follower:poll()))
      if i == 2 then late:poll() end
      local own = alone.ebc:weight("a"):slice(1, 49, 50)
      if i > 1 then
        assert.equal(7, own:to_list()[1])
        own:copy(model.ebc:weight("a"):slice(1, 49, 50))
      end
      assert.is_true(text(model:state_dict()) == text(alone:state_dict()))
      own:fill(7) -- a row that no increment has, and nobody reads again
      assert.is_false(state(model) == state(alone)) -- the optimizer's states stay
    end
    local c = peri.checkpoint.open(of .. "/a")
    c:compact(of .. "/a", true)
    c:close()
    assert.same({}, { follower:poll() }) -- it has what the full one has
    for _, other in ipairs { late, peri.checkpoint.follow(of, { model = alone }, { group = false }) } do
      assert.equal(of .. "/a", (other:poll())) -- where 'b' was taken, and anew; 'first' and 'b' are still there
      other:close()
    end
    assert.is_true(state(model) == state(alone))
    peri.checkpoint.save(of .. "/apart", { model = model })
    local stranger = peri.checkpoint.follow(of, { model = build() }, { group = false })
    assert.matches("has two that could be next", select(2, stranger:poll()))
    stranger:close()
    peri.checkpoint.remove(of .. "/apart")
    peri.checkpoint.save(of .. "/c", { model = model }, { increment_of = of .. "/a" })
    assert.equal(of .. "/c", (follower:poll()))
    train(model, 4, 4)
    peri.checkpoint.save(of .. "/fork", { model = model }, { increment_of = of .. "/c" })
    train(model, 5, 5)
    peri.checkpoint.save(of .. "/other", { model = model }, { increment_of = of .. "/c" })
    local path, why = follower:poll()
    assert.is_nil(path)
    assert.matches("has two that could be next, .*fork.* and .*other", why)
    follower:close()
  end)

  it("takes a checkpoint that was replaced under its name", function()
    local of, model, alone = folder .. "/replaced", build(), build()
    local follower = peri.checkpoint.follow(of, { model = alone }, { group = false })
    for i = 1, 3 do
      train(model, i, i)
      peri.checkpoint.save(of .. "/model", { model = model }, { replace = true })
      local path = follower:poll() or follower:poll() -- at the second look
      assert.equal(of .. "/model", path)
      assert.is_true(text(model:state_dict()) == text(alone:state_dict()))
      assert.is_nil((follower:poll()))
    end
    follower:close()
  end)

  it("has the metrics of the trainer's ranks together, lifetime and windows, whatever it has seen itself", function()
    local of, metrics = folder .. "/metrics", nn.metrics
    local function parts(group, model)
      return { model = model, auc = metrics.AUCMetric { window_size = 20, group = group },
        ne = metrics.NEMetric { window_size = 12, group = group } }
    end
    local function see(p, i)
      for _, m in ipairs { p.auc, p.ne } do
        m:update({ 0.1 + i * 7 % 10 / 12, 0.9 - i * 3 % 10 / 12 }, { i % 2, 1 }, { 1, 2 })
      end
    end
    local function numbers(p)
      local all = {}
      for _, m in ipairs { p.auc, p.ne } do
        for key, value in peri.util.ordered(m:compute()) do all[#all + 1] = { key, value } end
      end
      return all
    end
    local want = {}
    sim.run(2, function(rank, world)
      local there = parts(world, build(world, plan.row_wise()))
      local saver = peri.checkpoint.Saver { folder = of, parts = there, every = 1, full_every = 1e9, keep = 20,
        group = world }
      for step = 1, 9 do -- the windows are full after step 5
        train(there.model, step, step)
        see(there, 10 * step + rank)
        saver:step(step)
        want[step] = numbers(there)
      end
      saver:close()
    end)
    local here, elsewhere, list = parts(nil, build()), folder .. "/metrics-followed", peri.checkpoint.Saver.list(of)
    shell.run("mkdir -p " .. elsewhere)
    local follower = peri.checkpoint.follow(elsewhere, here)
    for step = 1, #list do
      shell.run(("cp -r %s %s"):format(list[#list + 1 - step].path, elsewhere))
      if step ~= 3 then -- two increments at once after step 4
        see(here, step)
        assert.truthy(follower:poll())
        for k, x in ipairs(numbers(here)) do
          assert.equal(want[step][k][1], x[1])
          assert.is_true(math.abs(x[2] - want[step][k][2]) < 1e-12, ("step %d: %s is %.17g, wanted %.17g"):format(step,
            x[1], x[2], want[step][k][2]))
        end
      end
    end
    assert.equal(9, follower.step)
    follower:close()
  end)

  it("goes on as the trainer would have in the middle of a window of a map of raw ids", function()
    local of = folder .. "/windows"
    local function raw()
      local tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = 12, embedding_dim = 4,
        feature_names = { "f" } } }
      return peri.ManagedCollisionEmbeddingBagCollection {
        embedding_bag_collection = peri.EmbeddingBagCollection { tables = tables, seed = 4,
          fused_params = { optimizer = "rowwise_adagrad", learning_rate = 0.1, exact = true } },
        managed_collision_collection = peri.ManagedCollisionCollection { embedding_configs = tables,
          managed_collision_modules = { t = peri.MCHManagedCollisionModule { zch_size = 12, device = "cpu",
            eviction_interval = 4, eviction_policy = peri.embed.LFU_EvictionPolicy() } } } }
    end
    local function go(model, from, last)
      for i = from, last do
        peri.scope(function()
          local ids = {}
          for k = 1, 9 do ids[k] = (i * 5 + k * k) % 31 * 1000003 end
          local kjt = peri.KeyedJaggedTensor { keys = { "f" }, values = peri.tensor(ids, "i64"), lengths = { 4, 5 } }
          model(kjt):values():sum():backward()
        end)
      end
    end
    local there, here = raw(), raw()
    local saver = peri.checkpoint.Saver { folder = of, parts = { model = there }, every = 1, full_every = 1e9,
      keep = 20 }
    local follower = peri.checkpoint.follow(of, { model = here })
    for step = 1, 11 do
      go(there, step, step)
      saver:step(step)
      if step % 3 ~= 1 then
        assert.truthy(follower:poll())
        peri.checkpoint.save(folder .. "/windows-here", { model = here }, { replace = true }) -- it trains not
        local on, alone = raw(), raw()
        peri.checkpoint.load(folder .. "/windows-here", { model = on })
        go(on, step + 1, step + 5)
        go(alone, 1, step + 5)
        assert.equal(text(peri.shard.gather_state_dict(alone:state_dict())),
          text(peri.shard.gather_state_dict(on:state_dict())))
      end
    end
    saver:close()
    follower:close()
  end)

  it("changes nothing when what comes is damaged, and takes the next good one", function()
    local of = folder .. "/damaged"
    local model, alone = build(), build()
    local saver = peri.checkpoint.Saver { folder = of, parts = { model = model }, every = 1, full_every = 4, keep = 9 }
    local follower = peri.checkpoint.follow(of, { model = alone })
    train(model, 1, 1)
    saver:step(1)
    follower:poll()
    local before = state(alone)
    train(model, 2, 2)
    local path = saver:step(2)
    shell.run(("printf x | dd of=%s/rank-0.safetensors bs=1 seek=$(( $(stat -c %%s %s/rank-0.safetensors) - 3 )) "
      .. "conv=notrunc"):format(path, path))
    local taken, why = follower:poll()
    assert.is_nil(taken)
    assert.matches("is damaged", why)
    assert.is_true(before == state(alone))
    assert.is_nil(select(2, follower:poll()), "it is not read again and again")
    train(model, 3, 3)
    saver:step(3) -- an increment of the damaged one
    assert.is_nil((follower:poll()))
    assert.is_true(before == state(alone))
    for step = 4, 5 do
      train(model, step, step)
      saver:step(step) -- the second of them is a full one
    end
    assert.truthy(follower:poll())
    assert.equal(5, follower.step)
    assert.is_true(state(model) == state(alone))
    -- An error in the middle: what was there comes back.
    train(model, 6, 6)
    saver:step(6)
    before = state(alone)
    local changed = 0
    repeat
      changed = changed + 1
      check(C.peri_fault_arm("checkpoint_read", changed))
      taken, why = follower:poll()
      check(C.peri_fault_arm("checkpoint_read", 0))
      assert.is_true(taken ~= nil or why ~= nil and before == state(alone), why)
    until taken
    assert.is_true(changed > 20, "reads failed in the middle too: " .. changed)
    assert.is_true(state(model) == state(alone))
    follower:close()
    saver:close()
  end)

  it("offers no older save where memory or descriptors fail for the newest, and a Saver goes on from none", function()
    local of = folder .. "/scarce"
    local model, alone = build(), build()
    local parts = { parts = { model = model }, folder = of, every = 1, full_every = 2, keep = 9 }
    local saver = peri.checkpoint.Saver(parts)
    for step = 1, 4 do
      train(model, step, step)
      saver:step(step)
    end
    saver:close()
    ffi.cdef [[typedef struct spec_rlimit { unsigned long now, most; } spec_rlimit;
      int getrlimit(int, spec_rlimit *); int setrlimit(int, const spec_rlimit *); int dup(int); int close(int);]]
    local NOFILE, limit, counts = 7, ffi.new "spec_rlimit", { 0, 0 }
    ffi.C.getrlimit(NOFILE, limit)
    --- Call f while n more descriptors can be opened, or memory fails for the n-th time that some is asked for.
    local scarce = {
      function(n, f)
        local free = ffi.C.dup(0)
        ffi.C.close(free)
        ffi.C.setrlimit(NOFILE, ffi.new("spec_rlimit", free + n, limit.most))
        local ok, taken, why = pcall(f)
        ffi.C.setrlimit(NOFILE, limit)
        return ok and taken, ok and why or taken
      end,
      function(n, f)
        check(C.peri_fault_arm("alloc", n + 1))
        local ok, taken, why = pcall(f)
        check(C.peri_fault_arm("alloc", 0))
        return ok and taken, ok and why or taken
      end,
    }
    for kind, call in ipairs(scarce) do
      local follower = peri.checkpoint.follow(of, { model = alone })
      repeat
        local taken, why = call(counts[kind], function() return follower:poll() end)
        counts[kind] = counts[kind] + 1
        assert.is_true(not not (taken or why), "nothing newer, it says")
      until taken
      assert.equal(4, follower.step)
      follower:close()
      for n = 0, counts[kind] do
        saver = peri.checkpoint.Saver(parts)
        local step = call(n, function() return saver:resume() end)
        assert.is_true(step == false or step == 4, step)
        saver:close()
      end
    end
    assert.is_true(counts[1] > 3 and counts[2] > 20, table.concat(counts, " "))
  end)

  it("says when the first checkpoint does not fit, and what its options may be", function()
    local other = nn.Linear { in_features = 2, out_features = 1 }
    assert.has_error(function() peri.checkpoint.follow(folder .. "/damaged", { model = other }):poll() end)
    assert.has_error(function() peri.checkpoint.follow(folder .. "/x", { model = other }, { increments = true }) end)
    assert.has_error(function() peri.checkpoint.follow(folder .. "/x", {}) end)
    assert.is_nil((peri.checkpoint.follow(folder .. "/missing", { model = other }):poll()))
  end)

  it("with tables of f16 refuses an increment that f16 cannot hold, and has what was there before", function()
    local of, NAME = folder .. "/narrow", "embedding_bags.t.weight"
    local function bags(data_type, cached)
      return peri.EmbeddingBagCollection { seed = 5, tables = { peri.EmbeddingBagConfig { name = "t",
        num_embeddings = 50, embedding_dim = 4, feature_names = { "f" }, data_type = data_type } },
        fused_params = { optimizer = "sgd", learning_rate = 1,
          cache_params = cached and { load_factor = 0.5 } or nil } }
    end
    local trained = bags "FP32"
    local saver = peri.checkpoint.Saver { folder = of, parts = { model = trained }, every = 1, full_every = 1e9 }
    local function step(i, down) -- row 7 goes down by as much
      local ids = peri.KeyedJaggedTensor { keys = { "f" }, values = { 7 }, lengths = { 1 } }
      local loss = trained(ids):values():sum() * down
      loss:backward()
      saver:step(i)
    end
    local function numbers(model) return peri.shard.gather_state_dict(model:state_dict())[NAME]:to_list() end
    for _, cached in ipairs { false, true } do
      local model = bags("FP16", cached)
      local follower = peri.checkpoint.follow(of, { model = model }, { group = false, only = { "model/" } })
      if not cached then
        step(1, 2)
        assert.truthy(follower:poll())
        step(2, 60000)
        assert.truthy(follower:poll())
        local before = numbers(model)
        step(3, 60000)
        local path, why = follower:poll()
        assert.is_nil(path)
        assert.matches("has %-12000%d%.%d+ at row 7, column 0, which f16 cannot hold; allowed: %-65504..65504", why)
        assert.same(before, numbers(model))
        assert.equal(2, follower.step)
      else
        assert.error_matches(function() follower:poll() end,
          "'" .. NAME .. "' has %-12000%d%.%d+ at row 7, column 0, which f16")
      end
      follower:close()
    end
    saver:close()
  end)

  it("is another process while one trains: each state that it has is one that was saved", function()
    if shell.no_launcher() then return end
    local of = folder .. "/live"
    local script = shell.write(folder .. "/live.lua", [[
      local peri = require "perilune"
      local of, role, steps = arg[1], arg[2], tonumber(arg[3])
      peri.nn.manual_seed(3)
      local model = peri.EmbeddingBagCollection { seed = 5, fused_params = { optimizer = "rowwise_adagrad", learning_rate = 0.1 },
        tables = { peri.EmbeddingBagConfig { name = "a", num_embeddings = 20000, embedding_dim = 8, feature_names = { "fa" } } } }
      -- Row 0 is changed in each step, and the last row too: a mixture would show.
      local function sum() return ("%.17g"):format(model:weight("a"):sum():item()) end
      if role == "train" then
        local saver = peri.checkpoint.Saver { folder = of, parts = { model = model }, every = 1, full_every = 8, keep = 2, async = true }
        for step = 1, steps do
          peri.scope(function()
            model(peri.KeyedJaggedTensor { keys = { "fa" }, lengths = { 3 }, values = { 0, step * 37 % 20000, 19999 } }):values():sum()
              :backward()
            saver:step(step, { sum = sum() })
          end)
          -- it is followed before it ends, however late the other one starts
          while step == 20 and not io.open(of .. ".followed") do peri.ffi.C.peri_pause(100000) end
        end
        saver:close()
      else
        local follower, taken = peri.checkpoint.follow(of, { model = model }), 0
        while follower.step ~= steps do
          local path, values = follower:poll()
          if path then
            taken = taken + 1
            io.open(of .. ".followed", "w"):close()
            assert(values.sum == sum(), path .. ": " .. values.sum .. " " .. sum())
          end
        end
        print("taken " .. taken)
      end
    ]])
    local train_, follow_ = shell.start(("%s run %s %s train 60"):format(shell.perilune, script, of)),
      shell.start(("%s run %s %s follow 60"):format(shell.perilune, script, of))
    local out, status = follow_()
    local said, ended = train_()
    assert.equal(0, ended, said)
    assert.equal(0, status, out)
    assert.is_true(tonumber(out:match "taken (%d+)") >= 2)
  end)
end)
