-- Groups of parameters with options of their own: PyTorch's steps (spec/golden/groups.py made them), states, schedulers, wrong groups.
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
    assert.is_true(math.abs(x - got[i]) <= 1e-6 * math.max(1, math.abs(x)), ("%s: %.9g, not %.9g"):format(what, got[i], x))
  end
end

-- Steps [from, to) of a case.
local function run(case, params, optimizer, scheduler, from, to)
  for k = from, to - 1 do
    local step = case.steps[k + 1]
    for i, values in ipairs(step.grads) do params[i]:set_grad(peri.tensor(values, "f32", "cpu", shapes[i])) end
    if k == 4 and not scheduler then optimizer.param_groups[2].lr = optimizer.param_groups[2].lr * 3 end
    optimizer:step()
    near(step.lr, peri.util.map(optimizer.param_groups, function(g) return g.lr end), ("%s, rates of step %d"):format(case.name, k))
    for i, values in ipairs(step.params) do
      near(values, params[i]:reshape({ -1 }):to_list(), ("%s, parameter %d after step %d"):format(case.name, i, k))
    end
    if scheduler then scheduler:step() end
  end
end

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
      return a, b, { params = { { name = "a", tensor = a } }, lr = 0.1 }, { params = { { name = "b", tensor = b } }, lr = 0.2 }
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
    assert.error_matches(function() peri.checkpoint.load(folder, { optimizer = whole }) end, "'lr' is .* which share one number here")
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
    local function fails(params, pattern) assert.error_matches(function() optim.Adam { params = params } end, pattern) end
    fails({ { params = { p }, lrr = 1 } }, "Adam: params%[1%] has no option 'lrr'; allowed: amsgrad, betas, eps, lr,")
    fails({ { params = { p } }, q }, "Adam: params%[2%] is .*, wanted a group like the first")
    fails({ { params = { p } }, { params = { p } } }, "is the same tensor as")
    fails({ { params = { p } }, { params = {} } }, "params is empty")
    fails({ { params = { p } }, { params = { q }, lr = -1 } }, "lr")
    fails({ { params = { { name = "x", tensor = p } } }, { params = { { name = "x", tensor = q } } } }, "two parameters are named 'x'")
  end)
end)
