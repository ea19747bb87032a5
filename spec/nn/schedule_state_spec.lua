-- The state of schedules: a run that is resumed has the rates of the one that went on, whichever of optimizer and
-- schedule is made or loaded first, also where a script has set a rate by hand.
local peri = require "perilune"
local optim = peri.nn.optim

local STEPS = 12

local schedules = {
  LambdaLR = { lr_lambda = function(t) return 1 / (1 + t) end }, StepLR = { step_size = 3, gamma = 0.5 },
  MultiStepLR = { milestones = { 2, 6, 9 }, gamma = 0.5 }, ExponentialLR = { gamma = 0.75 },
  ConstantLR = { total_iters = 4 }, LinearLR = { total_iters = 7 }, PolynomialLR = { total_iters = 20, power = 2 },
  CosineAnnealingLR = { T_max = 9 }, CosineAnnealingWarmRestarts = { T_0 = 3, T_mult = 2 },
  OneCycleLR = { max_lr = 1, total_steps = 30 }, CyclicLR = { base_lr = 0.1, max_lr = 0.5, step_size_up = 4,
    mode = "exp_range", gamma = 0.9 },
}

local function parameter() return peri.zeros({ 1 }):requires_grad() end

local function optimizer_of(kind)
  local function make(class, lr) return optim[class] { params = { { name = "w", tensor = parameter() } }, lr = lr,
    momentum = class == "SGD" and 0.9 or nil } end
  if kind ~= "Both" then return make(kind, 0.25) end
  return optim.CombinedOptimizer { { name = "x", optimizer = make("SGD", 0.5) },
    { name = "y", optimizer = make("SGD", 0.125) } }
end

local function schedule_of(name, optimizer)
  local args = peri.util.copy(schedules[name])
  args.optimizer = optimizer
  return optim[name](args)
end

local function rates(optimizer)
  return peri.util.map(optimizer.param_groups, function(group)
    return { group.lr, group.optimizer == "SGD" and group.momentum or group.beta1 }
  end)
end

--- Rates of steps to the end; in the middle one is set by hand.
local function run(optimizer, schedule, from)
  local list = {}
  for step = from, STEPS do
    if step == 5 then optimizer.param_groups[1].lr = 0.0625 end
    list[#list + 1] = rates(optimizer)
    schedule:step()
  end
  return list
end

describe("the state of a schedule", function()
  for name in peri.util.ordered(schedules) do
    for _, kind in ipairs { "SGD", "Adam", "Both" } do
      it(("%s of %s: goes on as if it had not stopped"):format(name, kind), function()
        for stop = 0, STEPS, 5 do
          local optimizer = optimizer_of(kind)
          local schedule = schedule_of(name, optimizer)
          for _ = 1, stop do schedule:step() end
          if stop == 5 then optimizer.param_groups[1].lr = 0.0625 end -- as run does
          local first, second = optimizer:state_dict(), schedule:state_dict():clone()
          local want = run(optimizer, schedule, stop)
          local other = optimizer_of(kind) -- made, made, loaded, loaded
          local later = schedule_of(name, other)
          other:load_state_dict(first)
          later:load_state_dict(second)
          assert.same(want, run(other, later, stop))
          other = optimizer_of(kind) -- made, loaded, made, loaded: the schedule begins with the rates of the middle
          other:load_state_dict(first)
          later = schedule_of(name, other)
          later:load_state_dict(second)
          assert.same(want, run(other, later, stop))
        end
      end)
    end
  end

  it("is refused by another schedule, with all that differs, and changes nothing", function()
    local optimizer = optimizer_of "SGD"
    local schedule = schedule_of("MultiStepLR", optimizer)
    schedule:step()
    local function refused(change, text)
      local dict = schedule:state_dict()
      change(dict)
      local other = optimizer_of "SGD"
      local later = schedule_of("MultiStepLR", other)
      assert.error_matches(function() later:load_state_dict(dict) end, "MultiStepLR:load_state_dict: " .. text)
      assert.same({ 0, 0.25 }, { later.last_epoch, other:lr() })
    end
    refused(function(d) d.scheduler = "StepLR" end, "it is the state of 'StepLR'")
    refused(function(d) d.options.gamma, d.options.milestones, d.last_epoch = 0.1, { 2, 6 }, -1 end,
      "last_epoch is %-1, wanted a number of steps; option gamma is 0.5 here, and 0.1 in the state that is given; "
      .. "option milestones is { 2, 6, 9 } here, and { 2, 6 } in the state that is given")
    refused(function(d) d.groups[1].params[1] = "v" end, "groups: missing: 'w'; groups: it has no parameter 'v'")
    refused(function(d) d.groups[1].base_lr = nil end, "groups: 'base_lr' of parameter 'w' is nil, wanted a number")
    refused(function(d) d.groups = nil end, "groups is nil, wanted a list, as state_dict has it; groups: missing: 'w'")
  end)

  it("goes with any object that has a rate", function()
    local lr = 4
    local own = { lr = function() return lr end, set_lr = function(_, x) lr = x end }
    local schedule = optim.StepLR { optimizer = own, step_size = 1, gamma = 0.5 }
    schedule:step()
    local dict = schedule:state_dict()
    schedule:step()
    local other = optim.StepLR { optimizer = own, step_size = 1, gamma = 0.5 }
    other:load_state_dict(dict)
    assert.equal(2, lr)
    other:step()
    assert.equal(1, lr)
  end)

  it("of a WarmupOptimizer is its steps, its rate, and a rate that was set by hand", function()
    local function make(lr, combined)
      local inner = optimizer_of "SGD"
      inner = combined and optim.CombinedOptimizer { { name = "x", optimizer = inner } } or inner
      return optim.WarmupOptimizer { optimizer = inner, lr = lr or 0.5,
        stages = { { policy = "linear", max_iters = 4, value = 0.25 }, { policy = "poly", max_iters = 8, value = 2 } } }
    end
    for stop = 0, 10 do
      local one, two = make(nil, true), make(0.25, true) -- whose rate was another one
      for _ = 1, stop do one:step() end
      one.param_groups[1].lr = 3
      two:load_state_dict(one:state_dict())
      for _ = stop, 12 do
        assert.same(rates(one), rates(two))
        one:step()
        two:step()
      end
    end
    local outer, other = optim.CombinedOptimizer { make() }, optim.CombinedOptimizer { make(2) }
    other:load_state_dict(outer:state_dict())
    assert.equal(outer:lr(), other:lr())
    local dict = make():state_dict()
    dict.state.__warmup.lr = peri.tensor({ -1 }, "f64")
    assert.error_matches(function() make():load_state_dict(dict) end, "state '__warmup.lr' is .*, wanted a rate")
    dict.state.__warmup.lr = nil -- as TorchRec has it
    make():load_state_dict(dict)
    dict.state.__warmup.warmup = peri.tensor({ 9, 0 }, "i64")
    assert.error_matches(function() make():load_state_dict(dict) end,
      "state '__warmup' is of step 9 in stage 0; these are other stages")
  end)
end)
