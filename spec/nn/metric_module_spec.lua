-- RecMetricModule and ThroughputMetric: the values of each task are sums written out here; over ranks, and after a
-- state was saved and loaded, they are those of one rank that has seen all. Throughput by a clock that the spec moves.
require "perilune"
local metrics = require "perilune.nn.metrics"
local worlds = require "spec.support.worlds"

local TASKS = {
  { name = "ctr", label_name = "click", prediction_name = "p_click" },
  { name = "cvr", label_name = "buy", prediction_name = "p_buy", weight_name = "weight" },
}

local function make(more)
  local args = { tasks = TASKS, metrics = { CTRMetric = {}, MSEMetric = {}, NEMetric = { include_logloss = true } },
    group = false }
  for name, value in pairs(more or {}) do args[name] = value end -- any order
  return metrics.RecMetricModule(args)
end

--- Batch k of 8 samples.
local function batch(k)
  local out = { p_click = {}, p_buy = {}, click = {}, buy = {}, weight = {} }
  for i = 1, 8 do
    local x = (k * 8 + i) % 11
    out.p_click[i], out.p_buy[i] = (x + 1) / 13, (12 - x) / 13
    out.click[i], out.buy[i], out.weight[i] = x % 2, x % 3 == 0 and 1 or 0, 1 + x / 4
  end
  return out
end

--- Share of positive labels, weighted mean square error and cross entropy of some batches, written out.
local function written_out(batches, prediction, label, weight)
  local sum, positive, square, entropy = 0, 0, 0, 0
  for _, b in ipairs(batches) do
    for i = 1, 8 do
      local w, p, y = weight and b[weight][i] or 1, b[prediction][i], b[label][i]
      sum, positive, square = sum + w, positive + w * y, square + w * (p - y) ^ 2
      entropy = entropy - w * (y * math.log(p) + (1 - y) * math.log(1 - p))
    end
  end
  local rate = positive / sum
  local of_rate = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate)) * sum
  return { ctr = rate, mse = square / sum, rmse = math.sqrt(square / sum), ne = entropy / of_rate }
end

local function check(out, task, span, want)
  for name, value in pairs(want) do -- any order: each by itself
    local key = ("%s-%s|%s_%s"):format(name == "rmse" and "mse" or name, task, span, name)
    assert.near(value, out[key], 1e-9, key)
  end
end

describe("RecMetricModule", function()
  it("gives each task the values of its own columns", function()
    local module, batches = make(), {}
    for k = 1, 5 do
      batches[k] = batch(k)
      module:update(batches[k])
    end
    local out = module:compute()
    check(out, "ctr", "lifetime", written_out(batches, "p_click", "click"))
    check(out, "cvr", "lifetime", written_out(batches, "p_buy", "buy", "weight"))
    check(out, "cvr", "window", written_out(batches, "p_buy", "buy", "weight"))
    assert.is_number(out["ne-ctr|lifetime_logloss"])
    module:reset()
    assert.same({}, module:compute())
  end)

  it("names values as TorchRec 1.9.2 does: the namespace of the class, and the names of its report", function()
    -- class -> namespace (_namespace of the class), values (MetricName), its options; AUC and RAUC have a window only
    for class, want in pairs { -- any order: each by itself
      NEMetric = { "ne", "ne" }, NEPositiveMetric = { "ne_positive", "ne_positive" },
      UnweightedNEMetric = { "unweighted_ne", "unweighted_ne" }, CaliFreeNEMetric = { "cali_free_ne", "cali_free_ne" },
      CalibrationMetric = { "calibration", "calibration" }, CTRMetric = { "ctr", "ctr" },
      AverageMetric = { "average", "label_average prediction_average" },
      WeightedAvgMetric = { "weighted_avg", "weighted_avg" }, MSEMetric = { "mse", "mse rmse" },
      NMSEMetric = { "nmse", "nmse nrmse" }, MAEMetric = { "mae", "mae" }, AccuracyMetric = { "accuracy", "accuracy" },
      PrecisionMetric = { "precision", "precision" }, RecallMetric = { "recall", "recall" },
      XAUCMetric = { "xauc", "xauc" }, NDCGMetric = { "ndcg", "ndcg" }, AUCMetric = { "auc", "auc" },
      RAUCMetric = { "rauc", "rauc" }, AUPRCMetric = { "auprc", "auprc" },
      GAUCMetric = { "gauc", "gauc gauc_num_samples" }, SegmentedNEMetric = { "segmented_ne",
        "segmented_ne_0 segmented_ne_1", { num_groups = 2 } },
      RecallSessionMetric = { "recall_session_level", "recall_session_level", { top_threshold = 1 } },
      PrecisionSessionMetric = { "precision_session_level", "precision_session_level", { top_threshold = 1 } },
    } do
      local module = metrics.RecMetricModule { group = false, metrics = { [class] = want[3] or {} },
        tasks = { { name = "t", label_name = "y", prediction_name = "p", group_name = "g" } } }
      module:update { p = { 0.9, 0.2, 0.4, 0.7 }, y = { 1, 0, 0, 1 }, g = { 0, 0, 1, 1 } }
      local names = {}
      for value in want[2]:gmatch "%S+" do
        names[("%s-t|window_%s"):format(want[1], value)] = true
        if class ~= "AUCMetric" and class ~= "RAUCMetric" then
          names[("%s-t|lifetime_%s"):format(want[1], value)] = true
        end
      end
      for key, value in pairs(module:compute()) do -- any order
        assert.is_true(names[key], key)
        assert.is_number(value, key)
        names[key] = nil
      end
      assert.same({}, names)
    end
  end)

  it("takes a batch with all of its metrics or, where one refuses it, with none", function()
    local all = { metrics = { MSEMetric = {}, NEMetric = {}, AUCMetric = {}, AUPRCMetric = {} }, throughput = {} }
    local module, other = make(all), make(all)
    for k = 1, 2 do
      module:update(batch(k))
      other:update(batch(k))
    end
    for _, wrong in ipairs { { "p_click", 1.5 }, { "p_buy", 1.5 }, { "weight", -1 }, { "p_buy", 0 / 0 } } do
      local b = batch(3)
      b[wrong[1]][8] = wrong[2]
      assert.has_error(function() module:update(b) end)
    end
    assert.equal(16, module.throughput:compute().total_examples)
    for _, m in ipairs { module, other } do m.throughput = false end -- its seconds differ
    assert.same(other:compute(), module:compute())
  end)

  it("has windows of its size", function()
    local module = make { window_size = 16 }
    for k = 1, 6 do module:update(batch(k)) end
    check(module:compute(), "ctr", "window", written_out({ batch(5), batch(6) }, "p_click", "click"))
  end)

  it("goes on from its state", function()
    local whole, first, second = make { throughput = {} }, make { throughput = {} }, make { throughput = {} }
    for k = 1, 3 do
      whole:update(batch(k))
      first:update(batch(k))
    end
    second:load_state_dict(first:state_dict())
    for k = 4, 6 do
      whole:update(batch(k))
      second:update(batch(k))
    end
    assert.same(whole:compute(), second:compute())
    assert.error_matches(function() second:load_state_dict(make():state_dict()) end, "'throughput': it is no state", 1,
      true)
    assert.error_matches(function() second:load_state_dict {} end, "it is no state of RecMetricModule", 1, true)
  end)

  it("is put together on other numbers of ranks", function()
    local states, batches = {}, {}
    for r = 1, 3 do
      local module = metrics.RecMetricModule { tasks = TASKS, metrics = { CTRMetric = {}, MSEMetric = {},
        NEMetric = {} }, throughput = {} }
      batches[r] = batch(r)
      module:update(batches[r])
      states[r] = module:state_dict()
    end
    local again = metrics.RecMetricModule { tasks = TASKS, metrics = { CTRMetric = {}, MSEMetric = {},
      NEMetric = {} }, throughput = {} }
    again:load_state_dict(assert(again:merge_state_dicts(states, 0, 1)))
    check(again:compute(), "cvr", "lifetime", written_out(batches, "p_buy", "buy", "weight"))
    assert.equal(24, again:compute()["throughput-throughput|total_examples"])
  end)

  worlds.each("over ranks is that of one rank with all samples", function(world, _, n)
    local module, batches = make { group = world, throughput = {} }, {}
    for k = 0, 5 do
      batches[k + 1] = batch(k)
      if k % n == world:rank() then module:update(batches[k + 1]) end
    end
    local out = module:compute()
    check(out, "ctr", "lifetime", written_out(batches, "p_click", "click"))
    check(out, "cvr", "window", written_out(batches, "p_buy", "buy", "weight"))
    assert.equal(48, out["throughput-throughput|total_examples"])
  end, { sizes = { 1, 2, 3 }, devices = { "cpu" } })

  it("names what is wrong", function()
    assert.error_matches(function() make { metrics = { NoMetric = {} } } end, "metrics has 'NoMetric', wanted", 1, true)
    assert.error_matches(function() make { tasks = { TASKS[1], TASKS[1] } } end, "two tasks have the name 'ctr'", 1,
      true)
    assert.error_matches(function() make { tasks = { { name = "x" } } } end, "label_name", 1, true)
    assert.error_matches(function() make():update { p_click = { 1 } } end,
      "task 'ctr' wants 'label_name' = 'click', which the output has not; it has: p_click", 1, true)
  end)
end)

describe("ThroughputMetric", function()
  it("counts samples and seconds behind the warm-up, and those of its window", function()
    local now = 100
    local metric = metrics.ThroughputMetric { warmup_steps = 2, window_seconds = 10, group = false,
      clock = function() return now end }
    local function step(n, took)
      now = now + took
      metric:update(n)
    end
    step(7, 50)
    step(9, 30)
    assert.same({ total_examples = 16, warmup_examples = 16 }, metric:compute())
    step(10, 2)
    step(20, 8)
    local out = metric:compute()
    assert.equal(46, out.total_examples)
    assert.equal(3, out.lifetime_throughput)
    assert.equal(3, out.window_throughput)
    step(60, 6) -- the step of 2 s leaves the window of 10 s, and so does the one of 8 s
    out = metric:compute()
    assert.equal(90 / 16, out.lifetime_throughput)
    assert.equal(60 / 6, out.window_throughput)
    local state = metric:state_dict()
    local again = metrics.ThroughputMetric { group = false, clock = function() return now end }
    now = now + 1000 -- between a checkpoint and what goes on from it
    again:load_state_dict(state)
    assert.equal(90 / 16, again:compute().lifetime_throughput)
    assert.equal(106, assert(again:merge_state_dicts({ state, state }, 0, 2)).total)
    assert.equal(212, assert(again:merge_state_dicts({ state, state }, 0, 1)).total)
    assert.error_matches(function() metrics.ThroughputMetric { warmup_steps = 0 } end, "warmup_steps is 0", 1, true)
  end)
end)
