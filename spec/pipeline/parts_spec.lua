-- Pipelines: how they watch a model, stale rows, evaluation, replicas, operations of one's own.
local peri = require "perilune"
local worlds = require "spec.support.worlds"
local sim = require "perilune.dist.sim"
local shell = require "spec.support.shell"
local support = require "spec.support.pipeline"
local pipeline = peri.pipeline
local schedules = pipeline.schedules

local small = { sizes = { 1, 2 }, timeout = 60 }

local run, plain = support.run_class, support.plain_run

local inputs = { bags = function(batch) return batch.sparse_features end,
  rows = function(batch) return batch.sparse_features end }

describe("a class", function()
  worlds.each("of TorchRec's runs its schedule", function(world, device)
    local expected, losses = plain(world, device, 6)
    for _, name in ipairs { "TrainPipelineSparseDist", "PrefetchTrainPipelineSparseDist", "TrainPipelineSparseDistLite",
      "TrainPipelineFusedSparseDist" } do
      local model, got, p = run(peri.pipeline[name], world, device, 6)
      assert.same(losses, got)
      support.assert_same(expected, model, name)
      assert.same({}, p:not_pipelined())
      local prefetch = name:match "^Prefetch" ~= nil
      assert.equal(prefetch, pipeline.PrefetchPipelinedForward.is(p.forwards[1]))
      assert.is_true(pipeline.PipelinedForward.is(p.forwards[2]) and pipeline.BaseForward.is(p.forwards[2]))
      assert.is_true(pipeline.TrainPipelineContext.is(p.ring[1]))
      assert.equal(prefetch, pipeline.PrefetchTrainPipelineContext.is(p.ring[1]))
    end
  end, small)

  it("refuses what is no function of a step, and what a schedule cannot do", function()
    sim.run(1, function(_, world)
      local model = support.model(world, "cpu")
      local optimizer = support.optimizer(model)
      local function refused(text, f, args)
        local ok, err = pcall(f, args)
        assert.is_false(ok)
        assert.equal(text, err.message)
      end
      refused("TrainPipelineSparseDist: schedule is Schedule, wanted a function(step); a Schedule is "
        .. "run by peri.pipeline.Pipeline",
        peri.TrainPipelineSparseDist, { model = model, schedule = schedules.base })
      refused("Pipeline: schedule is 3, wanted a Schedule", pipeline.Pipeline, { model = model, schedule = 3 })
      refused("Pipeline: inputs names 'bugs', which is no sharded module of the model; those are: 'bags', 'rows'",
        pipeline.Pipeline, { model = model, schedule = schedules.base, inputs = { bugs = print } })
      refused("Pipeline: schedule 'prefetch_fused_2d' has a 'sync'; the model must be a DMPCollection with "
        .. "sync_interval = 0", pipeline.Pipeline, { model = model, schedule = schedules.prefetch_fused_2d(2) })
      refused("ShardedEmbeddingBagCollection: updates of table 'c' (data_parallel, compute_kernel fused) cannot be "
        .. "accumulated; allowed: dense, or sharded tables in memory", pipeline.Pipeline,
        { model = model, optimizer = optimizer,
          schedule = schedules.accumulate(2) })
      refused("Pipeline: there is an optimizer, but schedule 'x' has no operation 'optimizer'", pipeline.Pipeline,
        { model = model, optimizer = optimizer, schedule = schedules.base:drop("optimizer", "zero_grad"):called "x" })
      refused("Pipeline: on_step sets what holds in a step, but 'optimizer' of schedule 'x' acts on another batch "
        .. "(ahead -1)", pipeline.Pipeline,
        { model = model, on_step = print, schedule = schedules.base:move("optimizer", { first = true },
          { ahead = -1 }):retime { zero_grad = -1 }:move("zero_grad", { after = "optimizer" }):with { depth =
            3 }:called "x" })
    end)
  end)
end)

describe("a module", function()
  worlds.each("runs whole where its ids cannot leave early, and says why", function(world, device)
    local expected, losses = plain(world, device, 6, { bags_only = true })
    -- What the collection is called with is not in the batch, but made of it.
    local function derived(given)
      local model = support.model(world, device, { bags_only = true })
      local module = model.module
      local forward = module.forward
      rawset(module, "forward", function(self, batch)
        return forward(self, { dense_features = batch.dense_features, labels = batch.labels,
          sparse_features = batch.sparse_features:to(device) })
      end)
      local p = peri.TrainPipelineSparseDist { model = model, optimizer = support.optimizer(model), inputs = given }
      p.told = true -- not on the terminal of the tests
      local got = {}
      for loss in p:run(support.batches(world:rank(), device, 6)) do got[#got + 1] = loss end
      assert.same(losses, got)
      support.assert_same(expected, model, "derived")
      return p:not_pipelined()
    end
    assert.same({ { path = "bags", reason = "argument 1 of its call is no field of the batch; inputs = { ['bags'] = "
      .. "function(batch) ... end } can name it" } }, derived(nil))
    assert.same({}, derived { bags = inputs.bags })
    assert.same({ { path = "bags", reason = "inputs says so" } }, derived { bags = false })
  end, { sizes = { 1, 2 }, timeout = 60 })

  it("is called with what was sent, or that is an error", function()
    sim.run(1, function(_, world)
      local model = support.model(world, "cpu", { bags_only = true })
      local module, n = model.module, 0
      local forward = module.forward
      rawset(module, "forward", function(self, batch)
        n = n + 1
        return forward(self, n < 3 and batch or { dense_features = batch.dense_features, labels = batch.labels,
          sparse_features = batch.sparse_features:to "cpu" })
      end)
      local p, batches = peri.TrainPipelineSparseDist { model = model, optimizer = false }, support.batches(0, "cpu", 9)
      p:progress(batches)
      p:progress(batches)
      local ok, err = pcall(p.progress, p, batches)
      assert.is_false(ok)
      assert.matches("module 'bags' is called with something else than batch.sparse_features, whose ids were sent;",
        err.message, 1, true)
      ok, err = pcall(p.progress, p, batches)
      assert.is_false(ok)
      assert.matches("TrainPipelineSparseDist: an earlier step failed: .*is called with something else", err.message)
    end)
  end)

  it("is found in a batch by its ArgInfo", function()
    local ArgInfo, kjt = pipeline.ArgInfo, {}
    local batch = { x = { 1, { y = kjt } } }
    assert.equal("batch.x[2].y", tostring(ArgInfo.find(batch, kjt)))
    assert.equal(kjt, ArgInfo.find(batch, kjt):of(batch))
    assert.equal("batch", tostring(ArgInfo.find(batch, batch)))
    assert.equal(5, ArgInfo.find(batch, 5):of(batch))
    assert.is_nil(ArgInfo.find(batch, {}))
    local ok, err = pcall(ArgInfo.of, ArgInfo.find(batch, kjt), { x = { 1 } })
    assert.is_false(ok)
    assert.equal("a batch without field 'x.2', which the first one had", err.message)
    local function says(text, other)
      ok, err = pcall(ArgInfo.of, ArgInfo.find(batch, kjt), other)
      assert.is_false(ok)
      assert.equal(text, err.message)
    end
    says("a batch is 5, where the first one was a table with a field 'x'", 5)
    says("field 'x' of a batch is true, where that of the first one was a table with a field '2'", { x = true })
  end)

  it("is its own again for evaluation in the middle, and after detach", function()
    sim.run(2, function(rank, world)
      local expected = plain(world, "cpu", 6)
      local model = support.model(world, "cpu")
      local p = peri.TrainPipelineFusedSparseDist { model = model, optimizer = support.optimizer(model) }
      local batches, other = support.batches(rank, "cpu", 6), support.batches(rank, "cpu", 1)()
      for step = 1, 7 do
        local loss = p:progress(batches)
        assert.equal(step <= 6, loss ~= nil)
        local before = peri.no_grad(function() return model(other):item() end)
        if step == 4 then
          p:detach()
          assert.equal(before, peri.no_grad(function() return model(other):item() end))
          p:attach()
        end
      end
      support.assert_same(expected, model, "evaluated in between")
    end)
  end)
end)

describe("semi-synchronous training", function()
  --- By hand, with the modules' own stages: rows of batch b are looked up before the backward pass of b - 1, if b >
  --- start, else after it.
  local function by_hand(world, device, n, start)
    local model = support.model(world, device)
    local optimizer, batches, list = support.optimizer(model), support.batches(world:rank(), device, n), {}
    for batch in batches do list[#list + 1] = batch end
    local rows = {}
    for i, m in ipairs(model.sharded) do m:_set_pipelined { forward = function() return rows[i] end } end
    local function look_up(b)
      local new = {}
      for i, m in ipairs(model.sharded) do
        new[i] = m:compute_and_output_dist(m:input_dist(list[b].sparse_features):wait())
      end
      return new
    end
    local new = look_up(1)
    for b = 1, n do
      rows = new
      local loss = model(list[b])
      local early = b + 1 <= n and b > start
      if early then new = look_up(b + 1) end
      optimizer:zero_grad()
      model:backward(loss)
      optimizer:step()
      if b + 1 <= n and not early then new = look_up(b + 1) end
    end
    return support.learned(model)
  end

  for _, start in ipairs { 0, 3, 100 } do
    worlds.each(("reads tables without the last update after batch %d"):format(start), function(world, device)
      local expected = by_hand(world, device, 7, start)
      local model = run(peri.TrainPipelineSemiSync, world, device, 7, nil, { start_batch = start, inputs = inputs })
      support.assert_same(expected, model, "semi_sync")
    end, small)
  end
end)

describe("evaluation", function()
  worlds.each("returns what the model returns, and trains nothing", function(world, device)
    for _, name in ipairs { "EvalPipelineSparseDist", "EvalPipelineFusedSparseDist" } do
      local model = support.model(world, device)
      local before, wanted = support.learned(model), {}
      for batch in support.batches(world:rank(), device, 5) do
        local loss, logits = peri.no_grad(function() return model(batch) end)
        wanted[#wanted + 1] = { loss:item(), logits:to_list() }
      end
      local p, batches, got = pipeline[name] { model = model }, support.batches(world:rank(), device, 5), {}
      local loss, logits = p:progress(batches)
      while loss do
        assert.is_false(loss:describe().requires_grad)
        got[#got + 1] = { loss:item(), logits:to_list() }
        loss, logits = p:progress(batches)
      end
      assert.same(wanted, got)
      support.assert_same(before, model, name)
    end
  end, small)
end)

describe("2D parallelism", function()
  worlds.each("averages where the schedule says so", function(world, device, n)
    local size = n / 2
    local expected = plain(world, device, 7, { two_d = size, sync_interval = 2 })
    local model = run(pipeline.Pipeline, world, device, 7, { two_d = size, sync_interval = 0 },
      { schedule = schedules.prefetch_fused_2d(2) })
    support.assert_same(expected, model, "prefetch_fused_2d")
    model = run(peri.TrainPipelineFusedSparseDist, world, device, 7, { two_d = size, sync_interval = 2 })
    support.assert_same(expected, model, "its own interval")
  end, { sizes = { 2, 8 }, timeout = 60 })
end)

describe("dense tables", function()
  it("are looked up after their optimizer on every stream", function()
    for _, schedule in ipairs { schedules.fused_sparse_dist, schedules.prefetch_fused_2d(2) } do
      local plan, ordered = schedule:check { dense_tables = true }, false
      assert.equal("embed", plan.first.lookup.on)
      for _, e in ipairs(plan.edges) do
        ordered = ordered or e.from == plan.first.optimizer and e.to == plan.first.lookup
      end
      assert.is_true(ordered, plan.name)
    end
  end)
  worlds.each("are read after their optimizer's step", function(world, device)
    local expected = plain(world, device, 6, { dense = true })
    support.assert_same(expected, (run(peri.TrainPipelineFusedSparseDist, world, device, 6, { dense = true })),
      "fused_sparse_dist")
    local ok, err = pcall(run, pipeline.Pipeline, world, device, 6, { dense = true },
      { schedule = schedules.semi_sync(0) })
    assert.is_false(ok)
    assert.matches("'lookup' (ahead 1, place 5) reads dense without the last 1 update, which 'optimizer'", err.message,
      1, true)
  end, { sizes = { 1, 2 }, timeout = 60 })
end)

describe("operations of one's own", function()
  it("run where the schedule has them, on their channel", function()
    pipeline.register("gather_means", { needs = { "loss" }, posts = "own3", run = function(context)
      context.own.work = peri.world():all_reduce(peri.full({ 1 }, context.index, "f32", "cpu"))
    end })
    sim.run(2, function(rank, world)
      local expected = plain(world, "cpu", 6)
      local sums, channels = {}, {}
      local schedule = schedules.sparse_dist:insert({ "gather_means", every = 2 }, { after = "forward" })
        :insert({ "take_means", ahead = -1, every = 2, run = function(context, p)
          assert.equal(world, p.group)
          sums[#sums + 1] = context.own.work:wait():item(0)
          channels[#channels + 1] = world:channel()
        end }, { last = true }):with { depth = 4 }
      local model = run(pipeline.Pipeline, world, "cpu", 6, nil, { schedule = schedule })
      support.assert_same(expected, model, "with operations of its own")
      assert.same({ 2, 6, 10 }, sums) -- of both ranks: batches 1, 3 and 5
      assert.same({ "dense", "dense", "dense" }, channels)
      assert.is_true(rank >= 0)
    end)
  end)
end)

describe("operations of one's own", function()
  it("act on the batches that they say", function()
    sim.run(1, function(_, world)
      local seen = {}
      local function note(name) return function(context) table.insert(seen[name], context.index) end end
      local schedule, cases = schedules.base, { some = { every = 3 }, first = { every = 3, at = 0 },
        from = { from_step = 5 }, before = { until_step = 2 }, between = { from_step = 2, until_step = 7, every = 2,
          at = 0 }, behind = { ahead = -1, every = 4 } }
      for name, fields in peri.util.ordered(cases) do
        seen[name], fields[1], fields.run = {}, name, note(name)
        schedule = schedule:insert(fields, { last = true })
      end
      run(pipeline.Pipeline, world, "cpu", 8, nil, { schedule = schedule:with { depth = 3 } })
      assert.same({ some = { 2, 5 }, first = { 0, 3, 6 }, from = { 5, 6, 7 }, before = { 0, 1 }, between = { 2, 4, 6 },
        behind = { 3, 7 } }, seen)
    end)
  end)

  worlds.each("validate, and stop early, on all ranks at one step", function(world, device)
    local rank, patience = world:rank(), 2
    --- Train until the mean loss on held-out batches has not improved `patience` times; validate(model) is that loss,
    --- over the ranks.
    local function validate(model)
      local sum = 0
      for batch in support.batches(rank + 7, device, 2) do
        sum = sum + peri.no_grad(function() return (model(batch)):item() end)
      end
      return world:all_reduce(peri.tensor({ sum }, "f32", "cpu")):wait():item()
    end
    local function judge()
      local best, worse = math.huge, 0
      return function(loss)
        worse = loss < best and 0 or worse + 1
        best = math.min(best, loss)
        return worse >= patience
      end
    end
    local model, steps, stop = support.model(world, device), 0, judge()
    local optimizer, wanted = support.optimizer(model), {}
    for batch in support.batches(rank, device, 40) do
      optimizer:zero_grad()
      local loss = model(batch)
      model:backward(loss)
      optimizer:step()
      steps = steps + 1
      if steps % 2 == 0 then
        wanted[#wanted + 1] = validate(model)
        if stop(wanted[#wanted]) then break end
      end
    end
    assert.is_true(steps < 40) -- it did stop
    -- Batches that are in flight when it stops are trained too: what validation has seen is the same, and the last step
    -- is one for all.
    local got, stopped = {}, judge()
    local schedule = schedules.sparse_dist:insert({ "validate", every = 2, reads = { "tables", "dense" },
      run = function(_, p)
      if #got == #wanted then return end
      got[#got + 1] = validate(p.model)
      if stopped(got[#got]) then p:stop() end
    end }, { last = true })
    local _, losses = run(pipeline.Pipeline, world, device, 40, nil, { schedule = schedule })
    assert.same(wanted, got)
    assert.is_true(#losses >= steps and #losses <= steps + 2)
    local all = world:all_gather(peri.tensor({ #losses }, "i64", "cpu")):wait():to_list()
    for _, n in ipairs(all) do assert.equal(#losses, tonumber(n)) end
  end, { sizes = { 1, 2 }, timeout = 60 })

  worlds.each("average parameters as they go", function(world, device)
    local model = support.model(world, device)
    local p = model:dense_parameters()[1]
    local ema, average_of, averages = pipeline.ema { params = model:named_parameters(), decay = 0.75 }
    local wanted, worst = p:to_list(), 0
    local loop = pipeline.Pipeline { model = model, optimizer = support.optimizer(model),
      schedule = schedules.sparse_dist:insert(ema, { last = true }) }
    for _ in loop:run(support.batches(world:rank(), device, 5)) do
      local now, average = p:to_list(), average_of(p):to_list()
      for i in ipairs(now) do
        wanted[i] = 0.75 * wanted[i] + 0.25 * now[i]
        worst = math.max(worst, math.abs(wanted[i] - average[i]))
      end
    end
    assert.is_true(worst < 1e-6)
    local kept, names = averages:state_dict():clone(), peri.util.map(model:named_parameters(), function(x)
      return x.name
    end)
    table.sort(names)
    assert.same(names, peri.util.keys(kept))
    local _, other_of, others = pipeline.ema { params = model:named_parameters(), decay = 0.75 }
    others:load_state_dict(kept)
    assert.same(average_of(p):to_list(), other_of(p):to_list())
    kept[names[1]], kept.more = nil, peri.zeros { 1 }
    assert.error_matches(function() others:load_state_dict(kept) end,
      ("pipeline.ema: load_state_dict: '%s' is missing; it has no 'more'"):format(names[1]:gsub("%p", "%%%0")))
    local table_rows = peri.nn.Parameter(peri.zeros { 3, 2 })
    local _, of_rows = pipeline.ema { params = { table_rows } }
    table_rows:detach():fill(1)
    peri.nn.parameter.restart_rows(table_rows, peri.tensor({ 1 }, "i64")) -- another raw id has row 1
    assert.same({ 0, 0, 1, 1, 0, 0 }, of_rows(table_rows):to_list())
    local ok, err = pcall(pipeline.ema, { params = { p }, decay = 2 })
    assert.is_false(ok)
    assert.equal("pipeline.ema: decay is 2, allowed: 0..1", err.message)
  end, small)

  it("average tables over ranks as whole ones, which a checkpoint takes to other plans", function()
    local folder, clean = shell.temporary()
    finally(clean)
    local weight, wanted, plan = "embedding_bags.a.weight", {}, peri.plan
    local function built(world, entry)
      local model = peri.DistributedModelParallel { group = world, plan = { [""] = { a = entry } },
        module = peri.EmbeddingBagCollection { tables = { peri.EmbeddingBagConfig { name = "a", num_embeddings = 13,
          embedding_dim = 8, feature_names = { "f" } } } } }
      local ema, _, averages = pipeline.ema { params = model:named_parameters(), decay = 0.75 }
      return model, ema, averages, function() return model:state_dict():gather()[weight]:to_list() end
    end
    local here = { compute_kernel = "dense" }
    sim.run(2, function(rank, world)
      local model, ema, averages, now = built(world, plan.row_wise(here))
      local sgd, average = peri.nn.optim.SGD { params = model:named_parameters(), lr = 1 }, now()
      for step = 1, 3 do
        sgd:zero_grad()
        model(peri.KeyedJaggedTensor { keys = { "f" }, values = { step, 12 - rank }, lengths = { 2 } }):values():sum()
          :backward()
        sgd:step()
        ema.run()
        for i, x in ipairs(now()) do average[i] = 0.75 * average[i] + 0.25 * x end
      end
      wanted[rank + 1] = average
      peri.checkpoint.save(folder .. "/averages", { averages = averages }, { group = world })
      local _, _, unnamed = pipeline.ema { params = model:parameters() }
      assert.error_matches(function() unnamed:state_dict() end, "shard of a dense table.*model:named_parameters%(%)")
    end)
    for n, entry in ipairs { plan.table_wise(0, here), plan.column_wise { ranks = { 0, 1 }, compute_kernel = "dense" },
      plan.table_wise(2, here) } do
      sim.run(n, function(_, world)
        local _, _, averages = built(world, entry)
        peri.checkpoint.load(folder .. "/averages", { averages = averages }, { group = world })
        for i, x in ipairs(averages:state_dict():gather()[weight]:to_list()) do
          assert.is_true(math.abs(x - wanted[1][i]) < 1e-6)
        end
      end)
    end
  end)
end)

describe("a pipeline's schedule", function()
  it("is exchanged by an operation too, at the next step", function()
    sim.run(2, function(rank, world)
      local expected, losses = plain(world, "cpu", 9)
      local schedule = schedules.base:insert({ "change", from_step = 3, until_step = 4, run = function(_, p)
        p:set_schedule(schedules.fused_sparse_dist)
      end }, { after = "forward" })
      local model, got, p = run(pipeline.Pipeline, world, "cpu", 9, nil, { schedule = schedule })
      assert.same(losses, got)
      assert.equal("fused_sparse_dist", p.schedule.name)
      assert.is_true(rank >= 0)
      support.assert_same(expected, model, "changed within a step")
    end)
  end)

  worlds.each("is exchanged for evaluation, and back: TrainEvalHybridPipelineBase", function(world, device)
    local expected, losses = plain(world, device, 8)
    local model = support.model(world, device)
    local p = peri.TrainPipelineSparseDist { model = model, optimizer = support.optimizer(model) }
    local function some(batches)
      local got = {}
      for loss in p:run(batches) do got[#got + 1] = loss end
      return got
    end
    local all, k = support.batches(world:rank(), device, 8), 0
    local first = some(function()
      k = k + 1
      if k <= 5 then return all() end
    end)
    p:set_schedule(schedules.eval_sparse_dist)
    local before, wanted = support.learned(model), {}
    for batch in support.batches(world:rank() + 3, device, 3) do
      wanted[#wanted + 1] = peri.no_grad(function() return (model(batch)):item() end)
    end
    assert.same(wanted, some(support.batches(world:rank() + 3, device, 3)))
    support.assert_same(before, model, "evaluated")
    p:set_schedule(schedules.sparse_dist)
    for _, loss in ipairs(some(all)) do first[#first + 1] = loss end
    assert.same(losses, first)
    support.assert_same(expected, model, "trained, evaluated, trained")
  end, small)

  worlds.each("is edited where TorchRec has the option enable_embedding_lookup_prefetch", function(world, device)
    local wanted, got = {}, {}
    local model = support.model(world, device)
    for batch in support.batches(world:rank(), device, 5) do
      wanted[#wanted + 1] = peri.no_grad(function() return (model(batch)):item() end)
    end
    local p = pipeline.Pipeline { model = model,
      schedule = schedules.eval_fused_sparse_dist:move("lookup", { first = true }, { ahead = 0 }) }
    for loss in p:run(support.batches(world:rank(), device, 5)) do got[#got + 1] = loss end
    assert.same(wanted, got)
  end, { sizes = { 2 }, timeout = 60 })

  for title, edit in peri.util.ordered {
    embedding_lookup_after_data_dist = function()
      return schedules.fused_sparse_dist:move("lookup", { after = "input_dist" })
    end, emb_lookup_stream = function() return schedules.fused_sparse_dist:set { lookup = { on = "dist" } } end,
    enqueue_batch_after_forward = function() return schedules.sparse_dist:move("to_device", { after = "forward" }) end,
  } do
    worlds.each("is edited where TorchRec has the option " .. title, function(world, device)
      local expected, losses = plain(world, device, 6)
      local model, got = run(pipeline.Pipeline, world, device, 6, nil, { schedule = edit() })
      assert.same(losses, got)
      support.assert_same(expected, model, title)
    end, { sizes = { 2 }, timeout = 60 })
  end

  for where, options in peri.util.ordered { memory = {}, files = { files = 0.9 } } do
    it(("is exchanged between steps, and nothing is lost: tables in %s"):format(where), function()
      sim.run(2, function(rank, world)
        local expected, losses = plain(world, "cpu", 12, options)
        local model = support.model(world, "cpu", options)
        local p = peri.TrainPipelineBase { model = model, optimizer = support.optimizer(model) }
        local got, order = {}, { [3] = "fused_sparse_dist", [6] = "prefetch_sparse_dist", [11] = "sparse_dist_lite" }
        for loss, step in p:run(support.batches(rank, "cpu", 12)) do
          got[#got + 1] = loss
          assert.equal(#got, step)
          if order[step] then p:set_schedule(schedules[order[step]]) end
        end
        assert.same(losses, got)
        assert.equal("sparse_dist_lite", p.schedule.name)
        support.assert_same(expected, model, "three schedules")
      end)
    end)
  end
end)
