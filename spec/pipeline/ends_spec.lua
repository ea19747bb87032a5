-- How runs of a pipeline end: ranks with different numbers of batches, loaders that fail, early stops, operations that
-- fail or never end, in every slot of a schedule. No batch is lost or trained twice, and no rank waits for ever.
-- mpirun: 2
local peri = require "perilune"
local worlds = require "spec.support.worlds"
local sim = require "perilune.dist.sim"
local P = require "perilune.ffi"
local support = require "spec.support.pipeline"
local schedules = peri.pipeline.schedules
local C = P.C
local it_alone = worlds.mpirun and function() end or it -- of sim worlds: not again on every rank

local names = { "base", "sparse_dist", "sparse_dist_lite", "fused_sparse_dist", "prefetch_sparse_dist", "wire_first" }

--- The batches of a rank and, after its n, empty ones: what a rank does while others have more.
local function padded(rank, device, n, total)
  local batches, k = support.batches(rank, device, n), 0
  local empty = {
    dense_features = peri.empty({ 0, 3 }, "f32", device), labels = peri.empty({ 0 }, "f32", device),
    sparse_features = peri.KeyedJaggedTensor { keys = { "f1", "f2", "f3" }, values = peri.empty({ 0 }, "i64", device),
      lengths = peri.empty({ 0 }, "i32", device), stride = 0 },
  }
  return function()
    k = k + 1
    if k <= total then return batches() or empty end
  end, empty
end

--- What a world learns when its ranks have counts[rank + 1] batches.
local function plain(world, device, counts, total)
  local model = support.model(world, device)
  local batches = padded(world:rank(), device, counts[world:rank() + 1], total or math.max(unpack(counts)))
  support.plain(model, support.optimizer(model), batches)
  return support.learned(model)
end

--- Count the calls of an iterator, and the batches that it gave.
local function counted(batches)
  local seen = { calls = 0, given = 0 }
  return function()
    seen.calls = seen.calls + 1
    local batch = batches()
    seen.given = seen.given + (batch and 1 or 0)
    return batch
  end, seen
end

local function make(world, device, name, more)
  local model = support.model(world, device)
  local args = { model = model, optimizer = support.optimizer(model), schedule = type(name) == "string"
    and schedules[name] or name }
  for key, value in pairs(more or {}) do args[key] = value end -- any order: named arguments
  return peri.pipeline.Pipeline(args), model
end

it_alone("ranks whose last step was another are told at the end, on all of them", function()
  for i, name in ipairs(names) do
    local _, failures = sim.run(2, function(rank, world)
      local model = support.model(world, "cpu")
      local optimizer, steps = support.optimizer(model), 0
      local pipeline = peri.pipeline.Pipeline { model = model, optimizer = optimizer, schedule = schedules[name] }
      for _ in pipeline:run((padded(rank, "cpu", 3, 3))) do
        steps = steps + 1
        local differs = rank == 1
        if i % 2 == 0 and differs and steps == 2 then optimizer:set_lr(0.7) end
        if i % 2 == 1 and differs and steps == 3 then
          P.no_grad(function() model:replicated_parameters()[1]:fill(9) end)
        end
      end
    end, { catch = true })
    for rank = 1, 2 do
      assert.matches("Pipeline: after the last step the checksum of parameter '[%w_.]+' is %d+ULL on rank 0 of group "
        .. "'world' and %d+ULL on rank 1", tostring(failures[rank] and failures[rank].message), 1, false)
    end
  end
end)

describe("ranks with different numbers of batches", function()
  worlds.each("train all of them, and end together", function(world, device, n)
    local r = world:rank()
    for k, counts in ipairs { { 5, 2, 7 }, { 1, 4, 1 }, { 3, 3, 4 } } do
      for i = #counts, n + 1, -1 do counts[i] = nil end
      local expected = plain(world, device, counts)
      for _, name in ipairs(k == 1 and names or { "fused_sparse_dist", "prefetch_sparse_dist" }) do
        local p, model = make(world, device, name)
        local batches, seen = counted(support.batches(r, device, counts[r + 1]))
        local steps = 0
        for _, step in p:run(batches) do steps = step end
        assert.equal(math.max(unpack(counts)), steps)
        -- a source at its end is not asked again
        assert.same({ calls = counts[r + 1] + 1, given = counts[r + 1] }, seen)
        support.assert_same(expected, model, name)
      end
    end
  end, { sizes = { 2, 3 }, timeout = 60 })

  it_alone("may have none at all, if somebody can make an empty one", function()
    sim.run(2, function(rank, world)
      local counts = { 0, 3 }
      local expected = plain(world, "cpu", counts)
      local _, empty = padded(rank, "cpu", 0, 0)
      local p, model = make(world, "cpu", "sparse_dist", { empty_batch = function() return empty end })
      local steps = 0
      for _ in p:run(support.batches(rank, "cpu", counts[rank + 1])) do steps = steps + 1 end
      assert.equal(3, steps)
      support.assert_same(expected, model, "none on rank 0")
    end)
    local _, errors = sim.run(2, function(rank, world)
      for _ in make(world, "cpu", "sparse_dist"):run(support.batches(rank, "cpu", rank * 3)) do end -- luacheck: ignore
    end, { catch = true })
    for r = 1, 2 do
      assert.matches("rank 0 has no batch at all where others have; give empty_batch = function() ... end",
        errors[r].message, 1, true)
    end
    sim.run(2, function(rank, world)
      local p = make(world, "cpu", "sparse_dist")
      assert.is_nil((p:progress(support.batches(rank, "cpu", 0))))
      assert.is_nil((p:progress(support.batches(rank, "cpu", 0))))
    end)
  end)
end)

describe("fields of a batch that the model returns", function()
  it_alone("may be released by the caller, also those of empty batches, and run leaves them alone", function()
    sim.run(2, function(rank, world)
      local p, steps = make(world, "cpu", "sparse_dist"), 0
      local batches = support.batches(rank, "cpu", rank == 0 and 5 or 1)
      while true do
        local loss, _, labels = p:progress(batches)
        if not loss then break end
        steps = steps + 1
        labels:release()
      end
      assert.equal(5, steps)
      local list = {}
      for batch in support.batches(rank, "cpu", 2) do list[#list + 1] = batch end
      for _ = 1, 2 do -- two passes over batches that are the program's
        local k = 0
        for loss in p:run(function() k = k + 1 return list[k] end) do assert.equal("number", type(loss)) end
        assert.equal(3, k)
      end
    end)
  end)
end)

describe("tables of tensors that the model returns", function()
  it("are kept for the caller, such as those of several tasks", function()
    local nn = peri.nn
    local Tasks = nn.Module:extend "Tasks"
    function Tasks:init() self.linear = nn.Linear { in_features = 2, out_features = 2 } end
    function Tasks:forward(x)
      local y = self.linear(x)
      return y:square():mean(), { click = y:select(2, 0), buy = y:select(2, 1), name = "both" }, { x:sum() }
    end
    local model, n = Tasks(), 0
    local optimizer = nn.optim.SGD { params = model:parameters(), lr = 0.1 }
    local pipeline = peri.TrainPipelineBase { model = model, optimizer = optimizer }
    local function batches() n = n + 1 return n <= 3 and peri.ones { 4, 2 } or nil end
    for _ = 1, 3 do
      local loss, found, more = pipeline:progress(batches)
      local click, buy = found.click:to_list(), found.buy:to_list()
      assert.near(loss:item(), (click[1] ^ 2 + buy[1] ^ 2) / 2, 1e-6)
      assert.same({ "both", 8 }, { found.name, more[1]:item() })
    end
    assert.is_nil((pipeline:progress(batches)))
  end)
end)

describe("a loader that fails", function()
  worlds.each("is an error on all ranks after everything that was loaded is trained", function(world, device, n)
    local r, counts = world:rank(), { 9, 9, 9 }
    counts[n] = 4 -- on the last rank: its 5th fails
    for _, name in ipairs(names) do
      local p, model = make(world, device, name)
      local own, fails = support.batches(r, device, counts[r + 1]), r == n - 1
      local batches, seen = counted(function()
        local batch = own()
        if fails and not batch then error("the disk is full", 0) end
        return batch
      end)
      local steps = 0
      local ok, err = pcall(function()
        for _ in p:run(batches) do steps = steps + 1 end
      end)
      assert.is_false(ok)
      assert.matches(fails and "^the disk is full"
        or ("^the loader of rank %d failed: the disk is full"):format(n - 1), tostring(err.message or err))
      local trained = {}
      for i = 1, n do trained[i] = math.min(counts[i], steps) end
      assert.equal(trained[r + 1], seen.given, name) -- nothing was loaded that is not trained
      support.assert_same(plain(world, device, trained, steps), model, name)
      fails = false -- and it goes on, with what comes next
      assert.equal(n > 1, p:progress(batches) ~= nil) -- of the other ranks
      p:close()
    end
  end, { sizes = { 1, 3 }, devices = { "cpu" }, timeout = 60, only = "sim" })

  it_alone("with its first batch leaves nothing to train on, and the ranks can go on", function()
    for _, name in ipairs(names) do
      sim.run(2, function(rank, world)
        local own, fails = support.batches(rank, "cpu", 5), rank == 1
        local function load() return fails and error("the disk is full", 0) or own() end
        local p, steps = make(world, "cpu", name), 0
        local ok, err = pcall(p.progress, p, load)
        assert.is_false(ok)
        assert.matches(rank == 1 and "^the disk is full" or "^the loader of rank 1 failed: the disk is full",
          tostring(err.message or err))
        fails = false
        for _ in p:run(load) do steps = steps + 1 end
        assert.equal(5, steps, name)
      end)
    end
  end)

  it_alone("on every rank is each rank's own error", function()
    sim.run(2, function(rank, world)
      local own, left, steps = support.batches(rank, "cpu", 9), 3, 0
      local ok, err = pcall(function()
        for _ in make(world, "cpu", "sparse_dist"):run(function()
          left = left - 1
          if left < 0 then error(("disk %d is full"):format(rank), 0) end
          return own()
        end) do steps = steps + 1 end
      end)
      assert.is_false(ok)
      assert.matches(("^disk %d is full"):format(rank), tostring(err.message or err))
      assert.equal(3, steps)
    end)
  end)

  it_alone("is one that returns false", function()
    sim.run(2, function(rank, world)
      local own, left = support.batches(rank, "cpu", 9), 3
      local ok, err = pcall(function()
        for _ in make(world, "cpu", "sparse_dist"):run(function()
          left = left - 1
          return (left >= 0 or rank == 0) and own()
        end) do end -- luacheck: ignore
      end)
      assert.is_false(ok)
      assert.matches((rank == 0 and "^the loader of rank 1 failed: " or "^")
        .. "the loader returned false, wanted a batch, or nil at the end", err.message)
    end)
  end)
end)

describe("every schedule, with whatever batch a rank is the last or its loader fails,", function()
  local all = { { "semi_sync", 0 }, { "semi_sync", 3 }, { "accumulate", 2, no_replica = true },
    { "prefetch_fused_2d", 2, two_d = 1, sync_interval = 0 } }
  for _, name in ipairs(names) do all[#all + 1] = { name } end

  --- Two ranks: one has 7 batches, the other `last`, and then an end or an error.
  local function ends(case, last, fails)
    return sim.run(2, function(rank, world)
      local own, left, steps = support.batches(rank, "cpu", 7), rank == 1 and last or 7, 0
      local schedule = schedules[case[1]]
      local model = support.model(world, "cpu", case)
      local p = peri.pipeline.Pipeline { model = model, optimizer = support.optimizer(model),
        schedule = case[2] and schedule(case[2]) or schedule }
      local ok, err = pcall(function()
        for _ in p:run(function()
          left = left - 1
          if left < 0 and rank == 1 and fails then error("the disk is full", 0) end
          return left >= 0 and own() or nil
        end) do steps = steps + 1 end
      end)
      if case.two_d then model:wait() end -- averages of replicas travel until tables are read
      assert.equal(0, tonumber(C.peri_group_pending(world:ptr())), case[1])
      return { steps = steps, err = not ok and tostring(type(err) == "table" and err.message or err) or nil }
    end)
  end

  it_alone("ends on all ranks", function()
    for i, case in ipairs(all) do
      for last = 1, 7 do -- ends and errors in turn: each schedule has both, and so has each batch
        local fails = (i + last) % 2 == 0
        local r = ends(case, last, fails)
        if fails then
          assert.equal("the disk is full", r[2].err, case[1])
          assert.matches("^the loader of rank 1 failed: the disk is full", r[1].err, nil, nil, case[1])
          assert.equal(r[2].steps, r[1].steps)
          assert.is_true(r[1].steps >= last and r[1].steps <= 7, case[1])
        else
          assert.same({ { steps = 7 }, { steps = 7 } }, { r[1], r[2] }, case[1])
        end
      end
    end
  end)
end)

describe("a run", function()
  worlds.each("that one rank stops ends for all, and nothing is lost", function(world, device, n)
    local r = world:rank()
    for _, name in ipairs(names) do
      local p, model = make(world, device, name)
      local batches, seen = counted(support.batches(r, device, 20))
      local steps = 0
      for _ in p:run(batches) do
        steps = steps + 1
        if steps == 3 and r == n - 1 then p:stop() end
      end
      local given = world:all_gather(peri.tensor({ seen.given }, "i64", "cpu")):wait():to_list()
      assert.is_true(steps >= 3 and steps < 8)
      support.assert_same(plain(world, device, given, steps), model, name)
    end
  end, { sizes = { 1, 2 }, timeout = 60 })

  worlds.each("that is left goes on where it was", function(world, device)
    local expected = plain(world, device, { 9, 9 })
    local p, model = make(world, device, "fused_sparse_dist")
    local batches, steps = support.batches(world:rank(), device, 9), 0
    for _ in p:run(batches) do
      steps = steps + 1
      if steps == 4 then break end
    end
    for _ in p:run(batches) do steps = steps + 1 end
    assert.equal(9, steps)
    support.assert_same(expected, model, "left and taken up")
  end, { sizes = { 1, 2 }, timeout = 60 })

  it_alone("goes on with another schedule on all ranks, or on none", function()
    local function run(at, text)
      local _, errors = sim.run(2, function(rank, world)
        local p = make(world, "cpu", "sparse_dist")
        local batches = support.batches(rank, "cpu", 9)
        if at == 0 then
          p:progress(support.batches(rank, "cpu", 0))
          if rank == 1 then p:set_schedule(schedules.base) end
        end
        for _, step in p:run(batches) do
          if step == at and rank == 1 then p:set_schedule(schedules.base) end
        end
      end, { catch = true })
      for r = 1, 2 do assert.matches(text, errors[r].message, 1, true) end
    end
    run(3, "set_schedule was called on rank 1 and not on rank 0: it is collective")
    run(0, "Pipeline: schedule is sparse_dist on rank 0 of group 'world' and base on rank 1; allowed: the same on all "
      .. "ranks")
  end)

  it_alone("goes on with the next source", function()
    sim.run(2, function(rank, world)
      local both = support.batches(rank, "cpu", 9)
      local model = support.model(world, "cpu")
      support.plain(model, support.optimizer(model), both)
      local expected = support.learned(model)
      local p, other = make(world, "cpu", "sparse_dist")
      local all, k = support.batches(rank, "cpu", 9), 0
      local function first() k = k + 1 return all() end
      local function second() return all() end
      for _ = 1, 3 do p:progress(first) end
      while p:progress(second) do end -- luacheck: ignore
      assert.equal(5, k) -- two were in flight
      support.assert_same(expected, other, "two sources")
    end)
  end)

  it_alone("that is given up leaves nothing in flight", function()
    for _, name in ipairs(names) do
      sim.run(2, function(rank, world)
        local p = make(world, "cpu", name)
        local batches = support.batches(rank, "cpu", 9)
        p:progress(batches)
        p:progress(batches)
        assert.equal(p.plan.depth - 1, p:close())
        world:barrier():wait()
        assert.equal(0, tonumber(C.peri_group_pending(world:ptr())))
      end)
    end
  end)
end)

describe("an operation that", function()
  --- Run `act` on the last of two ranks at batch 2, in each slot of each schedule; check(errors) looks at what the
  --- ranks got.
  local function in_every_slot(act, check, options)
    for _, name in ipairs(names) do
      local slots, i = support.slots(schedules[name], function(context)
        if context.index == 2 and P.state.world:rank() == 1 then act() end
      end), 1
      local schedule, slot = slots(i)
      while schedule do
        local edited = schedule
        local _, errors = sim.run(2, function(rank, world)
          for _ in make(world, "cpu", edited):run(support.batches(rank, "cpu", 5)) do end -- luacheck: ignore
        end, { catch = true, timeout = options })
        check(errors, ("%s, slot %d"):format(name, slot))
        i = i + 1
        schedule, slot = slots(i)
      end
      assert.is_true(i > #schedules[name].operations) -- most slots are legal
    end
  end

  it_alone("fails is an error on all ranks, and everything is given back", function()
    local function objects()
      collectgarbage()
      collectgarbage()
      return tonumber(C.peri_mem_objects())
    end
    local before = objects()
    in_every_slot(function() error("no more", 0) end, function(errors, where)
      assert.matches("^no more", tostring(errors[2] and (errors[2].message or errors[2])), nil, nil, where)
      assert.matches("no more", errors[1].message, nil, nil, where)
    end, 0)
    assert.is_true(objects() <= before + 16, ("%d objects, then %d"):format(before, objects()))
  end)

  it_alone("goes to sleep is an error on the other ranks by their deadline", function()
    C.peri_log_level_set(C.PERI_LOG_ERROR) -- what each rank did last is printed otherwise
    in_every_slot(function()
      for round = 1, 100 do P.pause(round) end -- deadlines pass when nobody gets any further
      error("woke up", 0)
    end, function(errors, where)
      assert.matches("waiting for rank 1", errors[1].message, nil, nil, where)
      assert.matches("woke up", tostring(errors[2].message or errors[2]), nil, nil, where)
    end, 0.2)
    C.peri_log_level_set(C.PERI_LOG_WARN)
  end)
end)

describe("an id that no table has", function()
  local BAD, nn = 5, peri.nn

  --- What this rank has of everything that was learned, as one text; also where its group was given up.
  local function here(model)
    local out = {}
    for name, value in peri.util.ordered(model:state_dict()) do
      local parts = peri.Tensor.is(value) and { { tensor = value } } or value:clone():local_shards()
      for _, part in ipairs(parts) do
        out[#out + 1] = name .. table.concat(part.tensor:reshape(-1):to_list(), " ")
      end
    end
    return table.concat(out, "\n")
  end

  --- n batches of a rank; number BAD of the last rank has `id` in front in feature f2.
  local function spoilt(world, device, n, id)
    local batches, k = support.batches(world:rank(), device, n), 0
    return function()
      local batch = batches()
      k = k + 1
      if not batch or k ~= BAD or world:rank() < world:size() - 1 then return batch end
      local ids, at = batch.sparse_features, 0
      local lengths, values = ids:lengths():to_list(), ids:values():to_list()
      for bag = 1, ids:stride() do at = at + lengths[bag] end
      values[at + 1] = id
      batch.sparse_features = peri.KeyedJaggedTensor { keys = ids:keys(), values = values, lengths = lengths,
        stride = ids:stride(), device = device }
      return batch
    end
  end

  --- What is here after 0, 1, ... of the batches, by the plain loop.
  local function states_of(model, optimizer, batches)
    local states = { [0] = here(model) }
    for batch in batches do
      local given = { batch }
      support.plain(model, optimizer, function() return table.remove(given) end)
      states[#states + 1] = here(model)
    end
    return states
  end

  --- Run a pipeline until it fails. Returns its steps, and the message.
  local function failed(p, batches)
    local steps = 0
    local ok, why = pcall(function()
      while p:progress(batches) do steps = steps + 1 end
    end)
    assert.is_false(ok)
    return steps, tostring(type(why) == "table" and why.message or why)
  end

  it_alone("is an error on all ranks of a sharded model, and nothing is learned of its batch", function()
    for _, case in ipairs { { 1 }, { 2 }, { 2, 0.5 } } do
      local n, options, states = case[1], { files = case[2] }, {}
      sim.run(n, function(rank, world)
        local model = support.model(world, "opaque", options)
        states[rank] = states_of(model, support.optimizer(model), spoilt(world, "opaque", BAD - 1))
      end, { device = "opaque" })
      for _, class in ipairs { "TrainPipelineSparseDist", "TrainPipelineSparseDistLite", "TrainPipelineSemiSync",
        "PrefetchTrainPipelineSparseDist" } do
        sim.run(n, function(rank, world)
          local model = support.model(world, "opaque", options)
          local steps, why = failed(peri[class] { model = model, optimizer = support.optimizer(model) },
            spoilt(world, "opaque", BAD + 3, 99))
          assert.matches("table 'b', feature 'f2', sample 0: id 99 at position 0 of the bag, allowed: 0%.%.29", why)
          assert.is_true(steps < BAD)
          local whole, now = pcall(here, model)
          local at = not whole and now.message:find "are of different moments" -- the step before was half done
          for k = 0, BAD - 1 do at = at or states[rank][k] == now end
          assert.is_truthy(at, ("%s, rank %d of %d"):format(class, rank, n))
        end, { device = "opaque" })
      end
    end
  end)

  --- A model whose ids are judged late: with a collection that is not sharded, or the layer of nn.
  local Model = nn.Module:extend "LateModel"
  function Model:init(layer, device)
    nn.manual_seed(5)
    if layer then
      self.bag = nn.EmbeddingBag { num_embeddings = 30, embedding_dim = 4, mode = "sum", include_last_offset = true,
        device = device }
    else
      self.bags = peri.EmbeddingBagCollection { tables = { peri.EmbeddingBagConfig { name = "b", num_embeddings = 30,
        embedding_dim = 4, feature_names = { "f2" } } }, fused_params = { optimizer = "sgd", learning_rate = 0.1 },
        device = device }
    end
    self.final = nn.Linear { in_features = 7, out_features = 1, device = device }
    self.loss = nn.BCEWithLogitsLoss()
  end
  function Model:forward(batch)
    local f2 = batch.sparse_features:to_dict().f2
    local rows = self.bags and self.bags(batch.sparse_features):values() or self.bag(f2:values(), f2:offsets())
    return self.loss(self.final(nn.functional.cat({ batch.dense_features, rows }, 2)):reshape(-1), batch.labels)
  end
  function Model:backward(loss) loss:backward() end

  it_alone("is told a step later where nobody waits for a GPU, which learned without it; at the end at the latest",
    function()
      sim.run(1, function(_, world)
        for _, layer in ipairs { false, true } do
          local function make_late()
            local model = Model(layer, "opaque")
            return model, nn.optim.SGD { params = layer and model:parameters() or model.final:parameters(), lr = 0.1 }
          end
          local model, optimizer = make_late()
          local states = states_of(model, optimizer, spoilt(world, "opaque", BAD, -1)) -- -1 stands for no id
          for _, class in ipairs { "TrainPipelineBase", "TrainPipelineSparseDist", "TrainPipelineSemiSync" } do
            for _, total in ipairs { BAD, BAD + 1 } do -- the end, and the next step
              model, optimizer = make_late()
              local p = peri[class] { model = model, optimizer = optimizer, device = "opaque" }
              local steps, why = failed(p, spoilt(world, "opaque", total, 99))
              -- the report was there before the backward pass of its own step, or afterwards
              assert.is_true(steps == BAD or steps == BAD - 1)
              assert.matches("sample 0: id 99 at place 0 of the bag, allowed: 0%.%.29, .*%(of an earlier lookup%)", why)
              assert.equal(states[steps], here(model), class) -- here() raises nothing: it is told once
            end
          end
        end
      end, { device = "opaque" })
    end)
end)
