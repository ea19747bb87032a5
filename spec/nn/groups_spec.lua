-- Groups of parameters with options of their own: PyTorch's steps (spec/golden/groups.py made them), states,
-- schedulers, wrong groups.
local peri = require "perilune"
local optim = peri.nn.optim

local cases = require("spec.support.golden").document "groups"
local shapes = { { 2, 3 }, { 4 }, { 3 } }
local schedulers = {
  Adagrad = function(o) return optim.schedule.StepLR { optimizer = o, step_size = 2, gamma = 0.5 } end,
  Adam = function(o) return optim.schedule.ExponentialLR { optimizer = o, gamma = 0.8 } end,
  RMSprop = function(o) return optim.schedule.CosineAnnealingLR { optimizer = o, T_max = 6 } end,
}

local function parameter(values, shape)
  local p = peri.tensor(values, "f32", "cpu", shape)
  p:requires_grad(true)
  return p
end

-- Parameters and an optimizer of a case.
local function make(case)
  local params, groups = {}, {}
  for i, values in ipairs(case.start) do params[i] = parameter(values, shapes[i]) end
  for i, g in ipairs(case.groups) do
    groups[i] = { params = peri.util.map(g.of, function(k) return params[k + 1] end) }
    for name, value in pairs(g.options) do groups[i][name] = value end
  end
  local args = { params = groups }
  for name, value in pairs(case.common) do args[name] = value end
  return params, optim[case.name](args)
end

local function near(want, got, what)
  for i, x in ipairs(want) do
    assert.is_true(math.abs(x - got[i]) <= 1e-6 * math.max(1, math.abs(x)),
      ("%s: %.9g, not %.9g"):format(what, got[i], x))
  end
end

-- Steps [from, to) of a case.
local function run(case, params, optimizer, scheduler, from, to)
  for k = from, to - 1 do
    local step = case.steps[k + 1]
    for i, values in ipairs(step.grads) do params[i]:set_grad(peri.tensor(values, "f32", "cpu", shapes[i])) end
    if k == 4 and not scheduler then optimizer.param_groups[2].lr = optimizer.param_groups[2].lr * 3 end
    optimizer:step()
    near(step.lr, peri.util.map(optimizer.param_groups, function(g) return g.lr end),
      ("%s, rates of step %d"):format(case.name, k))
    for i, values in ipairs(step.params) do
      near(values, params[i]:reshape({ -1 }):to_list(), ("%s, parameter %d after step %d"):format(case.name, i, k))
    end
    if scheduler then scheduler:step() end
  end
end

--- An SGD with two groups, and schedulers, as spec/golden/schedules.py makes them.
local schedules = require("spec.support.golden").document "schedules"
local function scheduled(names)
  local optimizer = optim.SGD { params = { { params = parameter({ 0, 0 }, { 2 }) },
    { params = parameter({ 1, 1 }, { 2 }), lr = 0.125 } }, lr = 0.5, momentum = 0.9 }
  return optimizer, peri.util.map(names, function(name)
    local args = peri.util.copy(schedules.schedulers[name])
    args.optimizer = optimizer
    return optim[name](args)
  end)
end

describe("schedules", function()
  for _, case in ipairs(schedules.cases) do
    it(("change rates as PyTorch's: %s%s%s"):format(table.concat(case.schedulers, " and "), case.hand
      and ", a rate set by hand" or "", case.add and ", a group added" or ""), function()
      local optimizer, made = scheduled(case.schedulers)
      for k, want in ipairs(case.lr) do
        if case.hand and k - 1 == schedules.hand then optimizer.param_groups[1].lr = 0.0625 end
        if case.add and k - 1 == schedules.add then
          optimizer:add_param_group { params = parameter({ 2, 2 }, { 2 }), lr = 0.3 }
        end
        local function of(name) return peri.util.map(optimizer.param_groups, function(g) return g[name] end) end
        assert.equal(#want, #optimizer.param_groups)
        near(want, of "lr", "rates before step " .. k - 1)
        near(case.momentum[k], of "momentum", "momenta before step " .. k - 1)
        if k < #case.lr then
          for _, s in ipairs(made) do s:step() end
        end
        if k == 12 then -- a run that is resumed here goes on alike
          local again, others = scheduled(case.schedulers)
          if case.add then again:add_param_group { params = parameter({ 2, 2 }, { 2 }) } end
          again:load_state_dict(optimizer:state_dict())
          for i, s in ipairs(others) do s:load_state_dict(made[i]:state_dict()) end
          optimizer, made = again, others
        end
      end
    end)
  end

  it("take a group that is added to be one that began with its rate", function()
    local optimizer = scheduled {}
    local schedule = optim.LambdaLR { optimizer = optimizer, lr_lambda = function(t) return 1 / (1 + t) end }
    schedule:step()
    optimizer:add_param_group { params = parameter({ 2 }, { 1 }), lr = 0.6 }
    schedule:step()
    near({ 0.5 / 3, 0.125 / 3, 0.6 / 3 }, peri.util.map(optimizer.param_groups, function(g) return g.lr end), "rates")
  end)
end)

describe("groups of parameters", function()
  for _, case in ipairs(cases) do
    it("step as PyTorch's: " .. case.name, function()
      local params, optimizer = make(case)
      run(case, params, optimizer, schedulers[case.name] and schedulers[case.name](optimizer), 0, #case.steps)
    end)

    it("go on from their states: " .. case.name, function()
      local params, optimizer = make(case)
      local scheduler = schedulers[case.name] and schedulers[case.name](optimizer)
      run(case, params, optimizer, scheduler, 0, 3)
      local others, again = make(case)
      local resumed = schedulers[case.name] and schedulers[case.name](again)
      for i, p in ipairs(params) do others[i]:copy(p) end
      again:load_state_dict(optimizer:state_dict())
      if resumed then resumed:load_state_dict(scheduler:state_dict()) end
      run(case, others, again, resumed, 3, #case.steps)
    end)
  end

  it("name their parameters through all groups, and show themselves", function()
    local _, optimizer = make(cases[4]) -- AdamW: parameter 2, 0, 1
    assert.same({ "0", "1", "2" }, optimizer.names)
    assert.same({ "1" }, optimizer.param_groups[2].params)
    assert.equal(0.8, optimizer.param_groups[1].beta1)
    assert.equal(0, optimizer:state_dict().param_groups[2].weight_decay)
    assert.matches("^AdamW %(\n  group 1: 1 parameters.*group 3: 1 parameters", tostring(optimizer))
    optimizer:set_lr(0.5)
    assert.same({ 0.5, 0.5, 0.5 }, peri.util.map(optimizer.param_groups, function(g) return g.lr end))
  end)

  it("are saved and loaded by checkpoints, by name: into groups in another order, too", function()
    local folder = os.tmpname()
    os.remove(folder)
    finally(function() os.execute("rm -rf " .. folder) end)
    local function start()
      local a, b = parameter({ 1, 2 }, { 2 }), parameter({ 3 }, { 1 })
      return a, b, { params = { { name = "a", tensor = a } }, lr = 0.1 },
        { params = { { name = "b", tensor = b } }, lr = 0.2 }
    end
    local function step(a, b, optimizer)
      a:set_grad(peri.tensor({ 0.5, -1 }, "f32", "cpu"))
      b:set_grad(peri.tensor({ 2 }, "f32", "cpu"))
      optimizer:step()
    end
    local a, b, first, second = start()
    local optimizer = optim.Adam { params = { first, second } }
    step(a, b, optimizer)
    optimizer.param_groups[2].lr = 0.7
    peri.checkpoint.save(folder, { optimizer = optimizer })
    local c, d, third, fourth = start()
    local again = optim.Adam { params = { fourth, third } }
    peri.checkpoint.load(folder, { optimizer = again })
    assert.same({ 0.7, 0.1 }, peri.util.map(again.param_groups, function(g) return g.lr end))
    c:copy(a)
    d:copy(b)
    step(a, b, optimizer)
    step(c, d, again)
    assert.same(a:to_list(), c:to_list())
    assert.same(b:to_list(), d:to_list())
    -- one optimizer without groups cannot have both rates
    local _, _, e, f = start()
    local whole = optim.Adam { params = { e.params[1], f.params[1] } }
    assert.error_matches(function() peri.checkpoint.load(folder, { optimizer = whole }) end,
      "'lr' is .* which share one number here")
  end)

  it("may be added at any time, also to what had none, below wrappers and beside others", function()
    local a, b, c, d = parameter({ 1, 2 }, { 2 }), parameter({ 3 }, { 1 }), parameter({ 4 }, { 1 }),
      parameter({ 5 }, { 1 })
    local adam = optim.Adam { params = { a }, lr = 0.1 }
    local clipped = optim.GradientClippingOptimizer { optimizer = adam, clipping = "norm", max_gradient = 1 }
    local both = optim.CombinedOptimizer { { name = "x", optimizer = clipped },
      { name = "y", optimizer = optim.SGD { params = { d } } } }
    local function step(optimizer, list)
      for _, p in ipairs(list) do p:set_grad(peri.full(p:shape(), 3)) end
      optimizer:step()
    end
    step(both, { a, d })
    clipped:add_param_group { params = b, lr = 0.2 }
    both.optimizers[1].optimizer:add_param_group { params = { { name = "c", tensor = c } }, betas = { 0.5, 0.9 } }
    assert.same({ "0", "1", "c" }, adam.names)
    assert.same({ "x.0", "x.1", "x.c", "y.0" }, both.names)
    assert.same({ 0.1, 0.2, 0.1, 1e-3 }, peri.util.map(both.param_groups, function(g) return g.lr end))
    assert.equal(0.5, clipped.param_groups[3].beta1)
    assert.equal(4, #both.params)
    -- Adam's first step is lr, whatever the gradient: b and c begin now; clipped together, a's second one is of the
    -- gradients 3 / 9^0.5 ...
    local before = { a:to_list()[1], b:item(), c:item() }
    step(both, { a, b, c, d })
    near({ before[2] - 0.2, before[3] - 0.1 }, { b:item(), c:item() }, "what was added")
    near({ 0.5, 0.5 }, a:grad():to_list(), "gradients of norm 1: four of 3 / 6")
    assert.same({ 2, 1, 1 }, { both:state()["x.0.step"]:item(), both:state()["x.1.step"]:item(),
      both:state()["x.c.step"]:item() })
    -- what cannot be added changes nothing
    local function fails(group, pattern) assert.error_matches(function() adam:add_param_group(group) end, pattern) end
    fails({ params = a }, "is the same tensor as")
    fails({ params = d }, "is the same tensor as") -- of the other optimizer
    fails({ params = { { name = "c", tensor = parameter({ 1 }, { 1 }) } } }, "two parameters are named 'c'")
    fails({ params = parameter({ 1 }, { 1 }), lrr = 1 }, "Adam: the group has no option 'lrr'; allowed: amsgrad")
    fails({ params = {} }, "params is empty")
    assert.same({ 3, 4, 4 }, { #adam.params, #both.names, #both.param_groups })
    assert.error_matches(function() both:add_param_group { params = parameter({ 1 }, { 1 }) } end,
      "is added to one of its optimizers")
    -- states go by name into an optimizer that had the groups from the start
    local e, f, g = a:clone():detach():requires_grad(), b:clone():detach():requires_grad(),
      c:clone():detach():requires_grad()
    local again = optim.Adam { lr = 0.1,
      params = { { params = e }, { params = f }, { params = { { name = "c", tensor = g } }, betas = { 0.5, 0.9 } } } }
    again:load_state_dict(adam:state_dict())
    step(adam, { a, b, c })
    step(again, { e, f, g })
    assert.same({ a:to_list(), b:item(), c:item() }, { e:to_list(), f:item(), g:item() })
  end)

  it("take modules and named parameters, and are clipped together", function()
    local a, b = peri.nn.Linear { in_features = 2, out_features = 2 }, parameter({ 3, 4 }, { 2 })
    local inner = optim.SGD { lr = 1, params = { { params = a, lr = 0 }, { params = { { name = "b", tensor = b } } } } }
    assert.same({ "b" }, inner.param_groups[2].params)
    for _, p in ipairs(a:parameters()) do p:set_grad(peri.zeros(p:shape(), "f32", "cpu")) end
    b:set_grad(peri.tensor({ 30, 40 }, "f32", "cpu"))
    optim.GradientClippingOptimizer({ optimizer = inner, clipping = "norm", max_gradient = 5 }):step()
    near({ 0, 0 }, b:to_list(), "b")
  end)

  it("say what is wrong", function()
    local p, q = parameter({ 1 }, { 1 }), parameter({ 2 }, { 1 })
    local function fails(params, pattern)
      assert.error_matches(function() optim.Adam { params = params } end, pattern)
    end
    fails({ { params = { p }, lrr = 1 } }, "Adam: params%[1%] has no option 'lrr'; allowed: amsgrad, betas, eps, lr,")
    fails({ { params = { p } }, q }, "Adam: params%[2%] is .*, wanted { params =")
    fails({ { params = { p } }, { params = { p } } }, "is the same tensor as")
    fails({ { params = { p } }, { params = {} } }, "params is empty")
    fails({ { params = { p } }, { params = { q }, lr = -1 } }, "lr")
    fails({ { params = { { name = "x", tensor = p } } }, { params = { { name = "x", tensor = q } } } },
      "two parameters are named 'x'")
  end)

  it("are not heeded where a script puts others, so that is refused", function()
    local function optimizer(grouped)
      local a, b = peri.nn.Linear { in_features = 2, out_features = 1 }, peri.nn.Linear { in_features = 1,
        out_features = 1 }
      return grouped and peri.nn.optim.SGD { lr = 1, params = { { params = a:parameters() }, { params = b:parameters(),
        lr = 2 } } } or peri.nn.optim.SGD { params = a:parameters(), lr = 1 }, grouped and 2 or 1
    end
    for _, grouped in ipairs { false, true } do
      for _, change in ipairs { function(o) o.param_groups = {} end, function(o) o.param_groups[1] = { lr = 0 } end,
        function(o, n) o.param_groups[n + 1] = { lr = 5 } end, function(o, n) o.param_groups[n] = nil end } do
        local o, n = optimizer(grouped)
        o:step()
        change(o, n)
        assert.error_matches(function() o:step() end,
          "SGD: param_groups%[%d%] is .*, which no step heeds; allowed: numbers of its %d groups?")
      end
    end
    for _, grouped in ipairs { false, true } do
      for _, field in ipairs { "params", "names" } do
        for _, change in ipairs { function(o) o[field] = {} end, function(o) o[field] = false end,
          function(o) o[field][1] = o[field][2] end, function(o) table.insert(o[field], o[field][1]) end } do
          local o = optimizer(grouped)
          o:step()
          change(o)
          assert.error_matches(function() o:step() end, "SGD: " .. field .. "%[%d%] is .*, which no step heeds, as the "
            .. "optimizer was made of .*; allowed: add_param_group%(group%), or a new optimizer")
        end
        for _, wrap in ipairs { function(o) return peri.nn.optim.GradientClippingOptimizer { optimizer = o } end,
          function(o) return peri.nn.optim.WarmupOptimizer { optimizer = o, stages = {} } end } do
          local o = wrap(optimizer(grouped))
          o:step()
          o[field] = {}
          assert.error_matches(function() o:step() end, field .. " is another list than that of the optimizer in it")
        end
      end
      local o = optimizer(grouped)
      o:add_param_group { params = { peri.ones({ 1 }):requires_grad() } }
      o:step()
    end
  end)
end)
