-- ReduceLROnPlateau: rates as PyTorch 2.14's for the same metrics (literals that torch.optim.lr_scheduler gave),
-- groups, state, refusals.
local peri = require "perilune"
local optim = peri.nn.optim

local nan = 0 / 0
local cases = {
  { args = { factor = 0.5, patience = 1 }, metrics = { 5, 4, 4, 4, 4, 4, 3, 3, 3, 3.5, nan, 3, 2 },
    rates = { 0.5, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.125, 0.0625, 0.0625, 0.03125, 0.03125, 0.03125 } },
  { args = { mode = "max", patience = 0, threshold = 0.1, threshold_mode = "abs", cooldown = 2, min_lr = 1e-3 },
    metrics = { 1, 1.05, 1.2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1 },
    rates = { 0.5, 0.05, 0.05, 0.05, 0.005, 0.005, 0.005, 0.001, 0.001, 0.001, 0.001, 0.001, 0.001 } },
}

local function sgd(lr)
  return optim.SGD { params = { { name = "w", tensor = peri.zeros({ 1 }):requires_grad() } }, lr = lr or 0.5 }
end
local function plateau(optimizer, args)
  args = peri.util.copy(args)
  args.optimizer = optimizer
  return optim.ReduceLROnPlateau(args)
end

describe("ReduceLROnPlateau", function()
  it("has PyTorch's rates, and goes on from its state at any step", function()
    for _, case in ipairs(cases) do
      for stop = 0, #case.metrics do
        local optimizer = sgd()
        local schedule = plateau(optimizer, case.args)
        for k, metric in ipairs(case.metrics) do
          if k == stop then
            local first, second = optimizer:state_dict(), schedule:state_dict():clone()
            optimizer = sgd()
            schedule = plateau(optimizer, case.args)
            optimizer:load_state_dict(first)
            schedule:load_state_dict(second)
          end
          schedule:step(k % 2 == 0 and metric or peri.tensor({ metric }, "f64"))
          assert.is_true(math.abs(optimizer:lr() - case.rates[k]) < 1e-12)
        end
        assert.equal(#case.metrics, schedule.last_epoch)
      end
    end
  end)

  it("reduces each group down to its own bound", function()
    local both = optim.CombinedOptimizer { { name = "x", optimizer = sgd(1) }, { name = "y", optimizer = sgd(0.5) } }
    local schedule = plateau(both, { factor = 0.5, patience = 0, min_lr = { 0.75, 0.125 } })
    local rates = {}
    for k = 0, 3 do
      schedule:step(1)
      rates[k + 1] = { both.param_groups[1].lr, both.param_groups[2].lr }
    end
    assert.same({ { 1, 0.5 }, { 0.75, 0.25 }, { 0.75, 0.125 }, { 0.75, 0.125 } }, rates)
  end)

  it("refuses what it cannot use, by name", function()
    for name, bad in pairs { mode = { "most" }, factor = { 1, -0.1, nan }, patience = { -1, 0.5 },
      threshold = { -1, math.huge }, threshold_mode = { "part" }, cooldown = { -1 }, eps = { -1, nan },
      min_lr = { -1, nan, { 0.1, 0.2 }, "x" } } do
      for _, value in ipairs(bad) do
        assert.error_matches(function() plateau(sgd(), { [name] = value }) end, "ReduceLROnPlateau: .*" .. name)
      end
    end
    local schedule = plateau(sgd(), {})
    assert.error_matches(function() schedule:step() end, "metric is nil, wanted a number")
    assert.error_matches(function() schedule:seek(3) end, "seek")
    local dict = schedule:state_dict()
    dict.num_bad_epochs = nil
    assert.error_matches(function() schedule:load_state_dict(dict) end, "num_bad_epochs is nil")
  end)
end)
