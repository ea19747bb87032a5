-- Operations inside the backward pass: at the gradient of a module's output.
-- mpirun: 2
local peri = require "perilune"
local worlds = require "spec.support.worlds"
local sim = require "perilune.dist.sim"
local support = require "spec.support.pipeline"
local schedules = peri.pipeline.schedules
local it_alone = worlds.mpirun and function() end or it -- of sim worlds: not again on every rank

describe("a hook on the tape", function()
  for _, device in ipairs { "cpu", "opaque" } do
    it("is called with the gradient, inside the pass: " .. device, function()
      local seen = {}
      local x = peri.tensor({ 1, 2, 3 }, "f32", device):requires_grad()
      local after = peri.tensor({ 2, 2, 2 }, "f32", device):requires_grad()
      local hook = peri.Tensor.Hook(function(gradient)
        seen[#seen + 1] = gradient:to_list()
        assert.is_nil(x:grad()) -- the pass has not come to what is below
        assert.is_not_nil(after:grad()) -- but it has to what is above
        assert.is_false((gradient * gradient):describe().requires_grad)
      end)
      local y = hook(x * 2)
      assert.same({ 2, 4, 6 }, y:to_list())
      local z = y * after;
      (z * z):sum():backward()
      assert.same({ { 16, 32, 48 } }, seen) -- 2 z after = 8 y
      assert.same({ 32, 64, 96 }, x:grad():to_list())
      assert.same({ 2, 4, 6 }, hook(x:detach() * 2):to_list()) -- nothing is recorded: a view
    end)
  end

  it("runs once for each pass, passes errors on, and is gone with its Hook", function()
    local n, fails = 0, false
    local hook = peri.Tensor.Hook(function()
      n = n + 1
      if fails then error("in the hook", 0) end
    end)
    local x = peri.tensor({ 1, 2 }, "f32", "cpu"):requires_grad()
    for k = 1, 3 do
      hook(x):sum():backward()
      assert.equal(k, n)
    end
    fails = true
    local ok, err = pcall(function() hook(x):sum():backward() end)
    assert.is_false(ok)
    assert.matches("in the hook", tostring(err.message or err))
    local y = hook(x)
    hook = nil -- luacheck: ignore
    collectgarbage()
    collectgarbage()
    y:sum():backward()
    assert.equal(4, n)
  end)
end)

describe("an operation with a hook", function()
  worlds.each("runs at the gradient of its module, and changes nothing", function(world, device, n)
    local model = support.model(world, device)
    local losses = support.plain(model, support.optimizer(model), support.batches(world:rank(), device, 6))
    local expected = support.learned(model)
    for _, name in ipairs(worlds.mpirun and { "sparse_dist" } or { "base", "sparse_dist", "fused_sparse_dist" }) do
      model = support.model(world, device)
      local final, ran = model.module.final, {}
      -- The average of the last layer's gradients sets out while those of the tables are not made yet.
      local schedule = schedules[name]:insert({ "early", hook = "bags", posts = "own2", every = 2,
        run = function(context)
        ran[#ran + 1] = context.index
        assert.equal(12, context.gradient:size(2)) -- three tables of 4 columns
        context.own.work = world:all_reduce(final.weight:grad() * 1)
      end }, { before = "backward" }):insert({ "late", every = 2, run = function(context)
        local sum, average = context.own.work:wait():to_list(), final.weight:grad():to_list()
        for i = 1, 16 do assert.is_true(math.abs(sum[i] / n - average[i]) <= 1e-6) end
      end }, { after = "backward" })
      local p = peri.pipeline.Pipeline { model = model, optimizer = support.optimizer(model), schedule = schedule }
      local got = {}
      for loss in p:run(support.batches(world:rank(), device, 6)) do got[#got + 1] = loss end
      assert.same({ 1, 3, 5 }, ran)
      assert.same(losses, got)
      support.assert_same(expected, model, name)
      p:detach()
      assert.is_nil(rawget(model.module.bags, "forward"))
    end
  end, { sizes = { 1, 2 }, timeout = 60 })

  it_alone("is refused where it cannot run", function()
    local function refused(text, schedule)
      local ok, err = pcall(schedule.check, schedule)
      assert.is_false(ok)
      assert.matches(text, err.message, 1, true)
    end
    local own = { "mine", hook = "bags", run = function() end }
    local function with(fields, where)
      local o = peri.util.copy(own)
      for key, value in pairs(fields) do o[key] = value end -- any order
      return schedules.sparse_dist:insert(o, where)
    end
    refused("'mine' (ahead 0, place 8) has a hook: it must stand before 'backward', not before 'wait_dist'",
      with({}, { after = "backward" }))
    refused("'mine' (ahead 1, place 7) has a hook: it acts on the batch of 'backward'",
      with({ ahead = 1 }, { before = "backward" }))
    refused("'optimizer' (ahead 0, place 7) has a hook; only operations with a run of their own do",
      schedules.sparse_dist:move("optimizer", { before = "backward" }, { hook = "bags" }))
    assert.matches("in backward, at the gradient of 'bags'", tostring(with({}, { before = "backward" })), 1, true)
    sim.run(1, function(_, world)
      local model = support.model(world, "cpu")
      local function fails(text, hook, after)
        local ok, err = pcall(function()
          local p = peri.pipeline.Pipeline { model = model, optimizer = support.optimizer(model),
            schedule = with({ hook = hook }, { before = "backward" }) }
          if after then after() end
          p:progress(support.batches(0, "cpu", 3))
        end)
        assert.is_false(ok)
        assert.matches(text, err.message, 1, true)
      end
      fails("Pipeline: operation 'mine': the model has no module 'bugs' (hook)", "bugs")
      fails("module 'rows' returned", "rows")
      fails("operation 'mine' did not run: the loss of batch 0 was not made of what module 'dense' returned", "dense",
        function()
        local forward = model.module.dense.forward
        rawset(model.module.dense, "forward", function(self, x) return forward(self, x):detach() end)
      end)
    end)
  end)
end)
