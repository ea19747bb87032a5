-- nn.detect_anomaly names the module and the step of the first NaN, in results and in gradients.
local peri = require "perilune"
local nn, F = peri.nn, peri.nn.functional
local devices = require "spec.support.devices"

local Root = nn.Module:extend "Root" -- NaN for negative numbers; at 0 its gradient is infinite
function Root:forward(x) return F.sqrt(x) end
local Zero = nn.Module:extend "Zero" -- the product of 0 and an infinite gradient is NaN
function Zero:forward(x) return x * 0 end

local function model_of(device, ...)
  return nn.Sequential { nn.Linear { in_features = 2, out_features = 2, device = device }, nn.Sequential { ... } }
end

for _, device in ipairs(devices) do
  describe("detect_anomaly on " .. device, function()
    after_each(function() nn.detect_anomaly(false) end)
    local x = peri.ones({ 3, 2 }, "f32", device)

    it("names the module whose result has the first NaN, and the step", function()
      local model = model_of(device, nn.ReLU(), Root(), nn.Softplus())
      nn.detect_anomaly(model)
      peri.scope(function() model(x):sum():backward() end)
      peri.no_grad(function() model[2][2].forward = function(_, y) return F.sqrt(y - 1e6) end end)
      assert.error_matches(function() model(x) end,
        "detect_anomaly: step 2: 6 NaN in the result of module '1.1' %(Root%)")
    end)

    it("names where a gradient becomes NaN", function()
      local model = model_of(device, Zero(), Root(), nn.Identity())
      nn.detect_anomaly(model)
      assert.error_matches(function() model(x):sum():backward() end,
        "step 1: 6 NaN in the gradient of the result of module '0' %(Linear%); that of module '1.0' %(Zero%) had none")
    end)

    it("changes no result, and ends", function()
      local model = model_of(device, nn.Tanh())
      local function step()
        model:zero_grad()
        local y = model(x)
        y:sum():backward()
        return y:to_list(), model:parameters()[1]:grad():to_list()
      end
      local y, g = step()
      nn.detect_anomaly(model)
      for _ = 1, 2 do
        local also_y, also_g = step()
        assert.same(y, also_y)
        assert.same(g, also_g)
      end
      nn.detect_anomaly(false)
      assert.is_true(model(x * (0 / 0)):isnan():sum():item() > 0)
      assert.error_matches(function() nn.detect_anomaly(3) end, "detect_anomaly: 3, wanted a module, or false")
    end)
  end)
end
