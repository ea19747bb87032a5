-- Metrics: the reference's own values after every update, and the edges.
local golden = require "spec.support.golden"
local metrics = require "perilune.nn.metrics"
local peri = require "perilune"

describe("metrics", function()
  for _, name in ipairs(golden.names "ops/metrics") do
    it("reproduce " .. name, function()
      local case = golden.load(name)
      local args = case.args
      local tasks = args.tasks or { "task0" }
      local objects, compared = {}, 0
      for _, task in ipairs(tasks) do
        local options = { window_size = args.window_size }
        for key, value in pairs(args.kwargs) do options[key] = value end
        objects[task] = metrics[args.metric](options)
      end
      for step = 1, args.updates do
        for _, task in ipairs(tasks) do
          -- the session-wise metric has its inputs without a task's name
          local prefix = ("step%d.in."):format(step) .. (args.tasks and task .. "." or "")
          local weights -- which the reference ignores in RAUCMetric
          if args.metric ~= "RAUCMetric" then weights = case:tensor(prefix .. "weights", "cpu") end
          objects[task]:update(case:tensor(prefix .. "predictions", "cpu"), case:tensor(prefix .. "labels", "cpu"),
            weights, case:list(("step%d.in.session"):format(step)))
          local got = objects[task]:compute()
          for _, wanted in ipairs(case:tensor_names(("^step%d%%.out%%.%s%%."):format(step, task))) do
            local value = got[wanted:match "[^.]+$"]
            assert.is_truthy(value, wanted)
            case:assert_near(wanted, type(value) == "table" and value or { value })
            compared = compared + 1
          end
        end
      end
      assert.is_true(compared >= args.updates)
    end)
  end

  it("reproduce TorchRec's own values of the others (spec/golden/metrics.py)", function()
    for _, case in ipairs(golden.document("metrics").cases) do
      local metric = metrics[case.metric](case.args)
      for k, u in ipairs(case.updates) do
        local y = {}
        for i = 1, #u.predictions do y[i] = u.labels[i] or 0 / 0 end
        metric:update(u.predictions, y, u.weights)
        local got = metric:compute()
        assert.same(peri.util.keys(case.values[k]), peri.util.keys(got), case.metric)
        for name, value in pairs(got) do -- any order
          assert.near(case.values[k][name], value, 1e-9, case.metric .. " " .. name)
        end
      end
    end
  end)

  it("of recalibrated predictions are those of the predictions that the formula gives", function()
    local p, q, y, w = {}, {}, {}, {}
    for i = 1, 40 do
      p[i], y[i], w[i] = (i * 7 % 41) / 41, i * 11 % 3 == 0 and 1 or 0, i % 4
      q[i] = p[i] / (p[i] + (1 - p[i]) / 0.05)
    end
    for name, class in pairs { -- any order
      RecalibratedNEMetric = "NEMetric", RecalibratedCalibrationMetric = "CalibrationMetric",
    } do
      local options = { recalibration_coefficient = 0.05, include_logloss = class == "NEMetric" or nil }
      local metric, plain = metrics[name](options), metrics[class] { include_logloss = options.include_logloss }
      metric:update(peri.tensor(p, "f64"), y, w)
      plain:update(q, y, w)
      assert.same(plain:compute(), metric:compute())
    end
  end)

  it("count a tie one half", function()
    assert.equal(0.5, (metrics.auc({ 0.3, 0.3 }, { 0, 1 })))
    assert.equal(0.75, (metrics.auc({ 0.3, 0.3, 0.5 }, { 0, 1, 1 })))
    assert.equal(1, (metrics.auc({ 0.1, 0.3, 0.5 }, { 0, 1, 1 })))
    assert.equal(0, (metrics.auc({ 0.9, 0.3, 0.5 }, { 0, 1, 1 })))
    assert.equal(0.5, (metrics.auc({ 0.9, 0.3 }, { 1, 1 })))
    assert.equal(0.5, (metrics.auc({}, {})))
  end)

  it("agree with the definition of the area on many samples", function()
    local p = peri.Tensor.uniform({ 500 }, 0, 1, 3, 1):to_list()
    local r = peri.Tensor.uniform({ 500 }, 0, 1, 3, 2):to_list()
    local y, right, pairs_seen = {}, 0, 0
    for i = 1, 500 do
      p[i] = math.floor(p[i] * 50) / 50
      y[i] = r[i] < p[i] and 1 or 0
    end
    for i = 1, 500 do
      for j = 1, 500 do
        if y[i] == 1 and y[j] == 0 then
          pairs_seen = pairs_seen + 1
          right = right + (p[i] > p[j] and 1 or p[i] == p[j] and 0.5 or 0)
        end
      end
    end
    assert.near(right / pairs_seen, (metrics.auc(p, y)), 1e-12)
    local e = metrics.evaluate(p, y)
    local base, loss = 0, 0
    for i = 1, 500 do base = base + y[i] / 500 end
    for i = 1, 500 do loss = loss - (y[i] == 1 and math.log(math.max(p[i], 1e-12)) or math.log(1 - p[i])) / 500 end
    assert.near(loss, e.logloss, 1e-9)
    assert.near(loss / -(base * math.log(base) + (1 - base) * math.log(1 - base)), e.ne, 1e-9)
    assert.equal(500, e.samples)
  end)

  it("of areas do not depend on the scale of weights", function()
    local p, y, w = {}, {}, {}
    for i = 1, 60 do p[i], y[i], w[i] = i * 7 % 20 / 20, i * 11 % 3 == 0 and 1 or 0, i * 5 % 9 end
    for _, name in ipairs { "AUCMetric", "AUPRCMetric", "RAUCMetric" } do
      local first
      for _, scale in ipairs { 1, 2 ^ 990, 2 ^ -990 } do
        local metric = peri.nn.metrics[name] {}
        local function scaled(x) return x * scale end
        metric:update(peri.tensor(p, "f64"), peri.tensor(y, "f64"), peri.tensor(peri.util.map(w, scaled), "f64"))
        first = first or metric:compute()
        assert.same(first, metric:compute())
      end
    end
  end)

  it("of sums and of pairs do not depend on the scale of weights, or say that it is too large or too small", function()
    local function value(name, scale, times)
      local p, y, w = {}, {}, {}
      for i = 1, 60 do p[i], y[i], w[i] = (i * 7 % 20 + 1) / 22, i * 11 % 3 == 0 and 1 or 0, i * 5 % 9 * scale end
      local metric = peri.nn.metrics[name] {}
      for _ = 1, times do metric:update(peri.tensor(p, "f64"), peri.tensor(y, "f64"), peri.tensor(w, "f64")) end
      return metric:compute()
    end
    for _, name in ipairs { "XAUCMetric", "CalibrationMetric", "MSEMetric", "AccuracyMetric", "CTRMetric" } do
      for _, scale in ipairs { 2 ^ 480, 2 ^ -480 } do
        assert.same(value(name, 1, 3), value(name, scale, 3))
      end
    end
    for _, scale in ipairs { 2 ^ 990, 2 ^ -990 } do
      assert.error_matches(function() value("XAUCMetric", scale, 1) end, "the products of two weights")
    end
    assert.error_matches(function() value("MSEMetric", 2e306, 1) end, "MSEMetric: the weights of all samples sum up")
    assert.error_matches(function() value("CTRMetric", 1e305, 9) end, "CTRMetric: the weights of all samples sum up")
    assert.error_matches(function() value("XAUCMetric", 2 ^ 503, 20) end, "XAUCMetric: the weights of all samples")
  end)

  it("take predictions from any device", function()
    for _, device in ipairs { "cpu", "opaque" } do
      local p, y = peri.tensor({ 0.1, 0.9, 0.4 }, "f32", device), peri.tensor({ 0, 1, 1 }, "i32", device)
      assert.equal(1, metrics.evaluate(p, y).auc)
    end
  end)

  it("name what is wrong", function()
    assert.error_matches(function() metrics.auc({ 1, 2 }, { 1 }) end, "2 predictions for 1 labels")
    assert.error_matches(function() metrics.auc({ 1 }, { 1 }, { 1, 1 }) end, "2 weights for 1 labels")
    assert.error_matches(function() metrics.auc({ 0 / 0 }, { 1 }) end,
      "metrics.auc: sample 0: prediction nan, not a number")
    assert.error_matches(function() metrics.auc("x", { 1 }) end, "predictions are 'x', wanted a tensor or a list")
    assert.error_matches(function() metrics.NEMetric { window = 3 } end, "no argument 'window'")
    assert.error_matches(function() metrics.NEMetric { window_size = 0 } end, "window_size is 0")
    assert.error_matches(function() metrics.AUPRCMetric({}):update({ 2 }, { 1 }) end,
      "sample 0: prediction 2, allowed: probabilities, 0..1")
    assert.same({}, metrics.NEMetric({}):compute())
  end)
end)
