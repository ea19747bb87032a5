-- Models cut into stages on groups of ranks: one_f_one_b learns what the plain loop learns, bit for bit; schedules that
-- would wait.
-- mpirun: 2 4
local ffi = require "ffi"
local peri = require "perilune"
local worlds = require "spec.support.worlds"
local sim = require "perilune.dist.sim"
local support = require "spec.support.pipeline"
local nn, schedules, pipeline = peri.nn, peri.pipeline.schedules, peri.pipeline
local it_alone = worlds.mpirun and function() end or it -- of sim worlds: not again on every rank

local Part, LAYERS, WIDTH = support.Part, support.LAYERS, support.WIDTH

local function numbers(model)
  local out = {}
  for _, p in ipairs(model:named_parameters()) do
    local buffer = p.tensor:detach():to(nil, "cpu"):contiguous():read()
    out[p.name:match "layer.*"] = ffi.string(buffer, ffi.sizeof(buffer))
  end
  return out
end

local function adam(model) return nn.optim.Adam { params = model:parameters(), lr = 0.05 } end

--- The plain loop over groups of `micro` batches: one update of the mean of their losses (of `micro`, also where there
--- are fewer).
local function plain(model, batches, micro)
  local optimizer, k, losses, parallel = adam(model), 0, {}, model.accumulate ~= nil
  if parallel then model:accumulate(true) end
  local function apply()
    if parallel then model:apply_accumulated() end
    optimizer:step()
  end
  for batch in batches do
    if k % micro == 0 then optimizer:zero_grad() end
    local loss = model(batch)
    loss:backward(peri.Tensor.full(loss:shape(), 1 / micro, "f32", loss:device()))
    losses[#losses + 1], k = loss:item(), k + 1
    if k % micro == 0 then apply() end
  end
  if k % micro > 0 then apply() end
  return losses
end

--- `each` ranks a stage.
local function train(world, device, each, micro, n)
  local stages = world:size() / each
  local stage = pipeline.Stage { stages = stages, group = world, device = device,
    shape = function(batch) return { batch.dense_features:size(1), WIDTH } end }
  local function whole(part)
    if each == 1 then return part end
    return peri.DistributedModelParallel { module = part, group = stage.group, device = device }
  end
  local place = world:rank() % each
  local wanted = whole(Part(1, LAYERS, device))
  local losses = plain(wanted, support.batches(place, device, n), micro)
  wanted = numbers(wanted)

  local first, last = math.floor(LAYERS * stage.index / stages) + 1, math.floor(LAYERS * (stage.index + 1) / stages)
  local model = whole(Part(first, last, device))
  local p = pipeline.Pipeline { model = model, stage = stage, optimizer = adam(model),
    schedule = schedules.one_f_one_b { stages = stages, stage = stage.index, micro_batches = micro } }
  local got, steps = {}, 0
  for loss, step in p:run(support.batches(place, device, n)) do
    got[#got + 1], steps = loss, step
  end
  assert.equal(n, steps)
  if last == LAYERS then assert.same(losses, got) end
  local count = 0
  for name, bytes in pairs(numbers(model)) do -- any order
    assert.is_true(wanted[name] == bytes, name .. " differs from the plain loop's")
    count = count + 1
  end
  assert.equal(2 * (last - first + 1), count)
end

describe("stages", function()
  worlds.each("of one rank each learn what the plain loop learns", function(world, device)
    for _, micro in ipairs { 1, 3, 8 } do train(world, device, 1, micro, 10) end
  end, { sizes = { 1, 2, 3 }, timeout = 60, devices = worlds.mpirun and { "cpu" } or nil })

  worlds.each("of two ranks each do, too", function(world, device) train(world, device, 2, 4, 10) end,
    { sizes = { 2, 4 }, timeout = 60, devices = { "cpu" } })

  worlds.each("end together when one of them stops", function(world, device, n)
    local stage = pipeline.Stage { stages = n, group = world, device = device,
      shape = function(batch) return { batch.dense_features:size(1), WIDTH } end }
    local model = Part(LAYERS * stage.index / n + 1, LAYERS * (stage.index + 1) / n, device)
    local p = pipeline.Pipeline { model = model, stage = stage, optimizer = adam(model),
      schedule = schedules.one_f_one_b { stages = n, stage = stage.index, micro_batches = 2 } }
    local steps = 0
    for _, step in p:run(support.batches(0, device, 40)) do
      steps = step
      if step == 5 and stage.index == 0 then p:stop() end
    end
    local all = world:all_gather(peri.tensor({ steps }, "i64", "cpu")):wait():to_list()
    for _, x in ipairs(all) do assert.equal(steps, tonumber(x)) end
    assert.is_true(steps >= 5 and steps <= 9)
  end, { sizes = { 2 }, timeout = 60 })
end)

describe("a stage", function()
  --- What both stages are told when stage s has counts[s + 1] batches, and its neighbour's results have shape(batch).
  local function fails(text, counts, shape)
    local _, errors = sim.run(2, function(rank, world)
      local stage = pipeline.Stage { stages = 2, group = world, shape = shape }
      local model = Part(LAYERS * rank / 2 + 1, LAYERS * (rank + 1) / 2, "cpu")
      local p = pipeline.Pipeline { model = model, stage = stage, optimizer = adam(model),
        schedule = schedules.one_f_one_b { stages = 2, stage = rank, micro_batches = 4 } }
      for _ in p:run(support.batches(0, "cpu", counts[rank + 1])) do end -- luacheck: ignore
    end, { catch = true })
    for r = 1, 2 do assert.matches(text, errors[r].message, 1, true) end
  end

  it_alone("that has fewer batches than others is told at which batch", function()
    local function shape(batch) return { batch.dense_features:size(1), WIDTH } end
    fails("there is no batch 7 on some stages, where others have one", { 8, 7 }, shape)
    fails("there is no batch 2 on some stages, where others have one", { 2, 9 }, shape)
  end)

  it_alone("whose shape is none says so", function()
    for got, value in pairs { ["'x'"] = "x", ["a list with something else"] = { 3, "x" }, ["7"] = 7 } do -- any order
      fails(("Stage: shape, asked on stage 1, returned %s, wanted a list of sizes such as { batch.rows, 64 }"):format(
        got), { 4, 4 }, function() return value end)
    end
  end)
end)

describe("schedules of stages", function()
  local function list(stages, micro, change)
    local out = {}
    for s = 1, stages do
      out[s] = schedules.one_f_one_b { stages = stages, stage = s - 1, micro_batches = micro }
      if change and change[s] then out[s] = change[s](out[s]) end
    end
    return out
  end
  local function refused(text, schedule_list)
    local ok, err = pcall(pipeline.check_stages, schedule_list)
    assert.is_false(ok)
    assert.matches(text, err.message, 1, true)
  end

  it_alone("are a list of Schedules", function()
    refused("pipeline.check_stages: list is 3, wanted a list of Schedules", 3)
  end)

  it_alone("go together, with as many activations in flight as there are stages behind", function()
    for stages = 1, 5 do
      for micro = 1, 9 do
        pipeline.check_stages(list(stages, micro))
        for s = 0, stages - 1 do
          local plan = schedules.one_f_one_b({ stages = stages, stage = s, micro_batches = micro }):check()
          assert.equal(math.min(stages - s, micro), plan.live.loss)
          assert.same({ tables = 0, dense = 0 }, plan.staleness)
        end
      end
    end
  end)

  it_alone("are refused where they would wait for ever, or take a batch for another", function()
    refused("stage 0 has 'receive', but there is no stage beside it", { list(2, 4)[2] })
    refused("stage 0 has 'send', but stage 1 has no 'receive'", list(2, 4, { [2] = function(s)
      return s:drop "receive"
    end }))
    refused("stage 1 has 'receive', but stage 0 has no 'send'", list(2, 4, { [1] = function(s)
      return s:drop "send"
    end }))
    refused("4 batches are together on stage 1, 3 on stage 0", { list(2, 3)[1], list(2, 4)[2] })
    -- The first stage wants a gradient before it has sent what that is of.
    refused("stages wait for ever: stage 0 at 'backward' of batch 0 for 'send_grad' of stage 1, stage 1 at 'forward' "
      .. "of batch 0 for 'send' of stage 0", list(2, 4, { [1] = function(s)
        return s:retime({ send = 0 }):move("send", { last = true })
      end }))
    -- All forward passes first: no stage may keep so many.
    local gpipe = list(2, 4, { [1] = function(s)
      return s:retime({ load = 3, to_device = 3, forward = 3, send = 3 }):with { depth = 4 }
    end })
    pipeline.check_stages(gpipe)
    local ok, err = pcall(function() pipeline.check_stages { gpipe[1]:with { live = { loss = 2 } }, gpipe[2] } end)
    assert.is_false(ok)
    assert.matches("4 batches have 'loss' at once, from 'forward' (ahead 3, place 4)", err.message, 1, true)
  end)

  it_alone("are compared by all stages before the first step", function()
    local _, errors = sim.run(2, function(_, world)
      local stage = pipeline.Stage { stages = 2, group = world, shape = function() return { 1, WIDTH } end }
      local schedule = schedules.one_f_one_b { stages = 2, stage = stage.index, micro_batches = 2 + stage.index }
      local model = Part(1, LAYERS, "cpu")
      local p = pipeline.Pipeline { model = model, stage = stage, optimizer = adam(model), schedule = schedule }
      p:progress(support.batches(0, "cpu", 4))
    end, { catch = true })
    for r = 1, 2 do assert.matches("3 batches are together on stage 1, 2 on stage 0", errors[r].message, 1, true) end
    sim.run(2, function(_, world)
      local model = Part(1, LAYERS, "cpu")
      local ok, err = pcall(pipeline.Pipeline,
        { model = model, optimizer = adam(model), schedule = schedules.one_f_one_b() })
      assert.is_false(ok)
      assert.equal("Pipeline: schedule 'one_f_one_b' has a 'send'; the pipeline must have a stage", err.message)
      ok, err = pcall(pipeline.Stage, { stages = 3, group = world, shape = print })
      assert.is_false(ok)
      assert.matches("stages is 3, allowed: whole numbers 1..2", err.message, 1, true)
    end)
  end)
end)
