-- Large batches in parts: one update of tables and dense part for several batches, and the model after that.
local peri = require "perilune"
local worlds = require "spec.support.worlds"
local sim = require "perilune.dist.sim"
local support = require "spec.support.pipeline"
local pipeline = peri.pipeline

local small = { sizes = { 1, 2 }, timeout = 60 }

local run, plain = support.run_class, support.plain_run

describe("large batches in parts", function()
  local options = { no_replica = true }
  local function by_hand(world, device, n, parts)
    local model = support.model(world, device, options)
    local optimizer, k = support.optimizer(model), 0
    model:accumulate(true)
    local function apply()
      model:apply_accumulated()
      optimizer:step()
      optimizer:zero_grad()
      k = 0
    end
    for batch in support.batches(world:rank(), device, n) do
      local loss = model(batch)
      model:backward(loss, peri.Tensor.full(loss:shape(), 1 / parts, "f32", device))
      k = k + 1
      if k == parts then apply() end
    end
    if k > 0 then apply() end
    return support.learned(model)
  end

  worlds.each("are one update, of one batch too, and the last may have fewer", function(world, device)
    local one = plain(world, device, 7, options)
    support.assert_same(one, (run(pipeline.GradientAccumulationPipeline, world, device, 7, options)), "one part")
    for _, n in ipairs { 6, 7 } do
      local expected = by_hand(world, device, n, 3)
      local model = run(pipeline.GradientAccumulationPipeline, world, device, n, options, { num_steps = 3 })
      support.assert_same(expected, model, "three parts")
    end
  end, small)

  it("update a last group of fewer once, whether its end is asked for before close() or not", function()
    for n = 1, 4 do
      sim.run(2, function(rank, world)
        local model = support.model(world, "cpu", options)
        local p = pipeline.GradientAccumulationPipeline { model = model, optimizer = support.optimizer(model),
          num_steps = 3 }
        local batches = support.batches(rank, "cpu", n)
        for _ = 1, n do p:progress(batches) end
        assert.equal(0, p:close())
        support.assert_same(by_hand(world, "cpu", n, 3), model, "closed")
      end)
    end
  end)

  it("are one step of an average of parameters, a last group of fewer too", function()
    sim.run(2, function(rank, world)
      for _, n in ipairs { 1, 4, 5, 6, 7 } do
        local model = support.model(world, "cpu", options)
        local weight, optimizer = model:named_parameters()[1], support.optimizer(model)
        local ema, average_of = pipeline.ema { params = { weight }, decay = 0.75 }
        local updates, want, step = 0, weight.tensor:detach():to_list(), optimizer.step
        rawset(optimizer, "step", function(...)
          step(...)
          updates = updates + 1
          want = (peri.tensor(want) * 0.75 + weight.tensor:detach():reshape(-1) * 0.25):to_list()
        end)
        local p = pipeline.Pipeline { model = model, optimizer = optimizer,
          schedule = pipeline.schedules.accumulate(3):insert(ema, { last = true }) }
        local batches = support.batches(rank, "cpu", n)
        for _ = 1, n + n % 2 do p:progress(batches) end -- the end is asked for, or close() comes before
        p:close()
        assert.equal(math.ceil(n / 3), updates)
        assert.same(want, average_of(weight.tensor):to_list(), ("%d batches"):format(n))
      end
    end)
  end)

  it("change no table before they are complete", function()
    sim.run(2, function(rank, world)
      local model = support.model(world, "cpu", options)
      local before = support.learned(model)
      local p = pipeline.GradientAccumulationPipeline { model = model, optimizer = support.optimizer(model),
        num_steps = 4 }
      local batches = support.batches(rank, "cpu", 9)
      for step = 1, 4 do
        p:progress(batches)
        if step < 4 then
          assert.error_matches(function() model:state_dict() end, "gradients of " .. step
            .. " batche?s? wait for their update")
          assert.error_matches(function() model:load_state_dict {} end, "load_state_dict: gradients of " .. step
            .. " batch")
          support.assert_same(before, model.module, "in between")
        end
      end
      assert.is_false(pcall(support.assert_same, before, model, "after four"))
    end)
  end)
end)

describe("a model whose pipeline trained in parts", function()
  local options = { no_replica = true }
  --- What is learned from `parts` batches as one, from `more` as another, and from the next two by the plain loop.
  local function wanted(world, parts, more)
    local model = support.model(world, "cpu", options)
    local optimizer, batches = support.optimizer(model), support.batches(world:rank(), "cpu", parts + more + 2)
    for _, n in ipairs { parts, more } do
      model:accumulate(true)
      for _ = 1, n do
        local loss = model(batches())
        model:backward(loss, peri.Tensor.full(loss:shape(), 1 / parts, "f32", "cpu"))
      end
      if n > 0 then
        model:apply_accumulated()
        optimizer:step()
        optimizer:zero_grad()
      end
      model:accumulate(false)
    end
    support.plain(model, optimizer, batches)
    return support.learned(model)
  end

  it("is as ever outside of its steps", function()
    for _, n in ipairs { 3, 5 } do
      for _, after in ipairs { "plain", "pipeline" } do
        sim.run(2, function(rank, world)
          local model = support.model(world, "cpu", options)
          local optimizer, batches, k = support.optimizer(model), support.batches(rank, "cpu", n + 2), 0
          local p = pipeline.GradientAccumulationPipeline { model = model, optimizer = optimizer, num_steps = 3 }
          for _ in p:run(function()
            k = k + 1
            return k <= n and batches() or nil
          end) do end -- luacheck: ignore
          if after == "plain" then support.plain(model, optimizer, batches)
          else
            local sparse = peri.TrainPipelineSparseDist { model = model, optimizer = optimizer }
            for _ in sparse:run(batches) do end -- luacheck: ignore
          end
          support.assert_same(wanted(world, 3, n - 3), model, after)
        end)
      end
    end
  end)

  it("has learned from all batches that it does not give up", function()
    for n = 3, 5 do
      sim.run(2, function(rank, world)
        local model = support.model(world, "cpu", options)
        local optimizer, batches = support.optimizer(model), support.batches(rank, "cpu", 20)
        local p = pipeline.GradientAccumulationPipeline { model = model, optimizer = optimizer, num_steps = 3 }
        for _ = 1, n do p:progress(batches) end
        assert.equal(2, p:close())
        batches = support.batches(rank, "cpu", n + 2)
        for _ = 1, n do batches() end
        support.plain(model, optimizer, batches)
        support.assert_same(wanted(world, 3, n - 3), model, "closed")
      end)
    end
  end)
end)
