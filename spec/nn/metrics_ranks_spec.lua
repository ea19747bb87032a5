-- Metrics over ranks are those of one rank that has seen all samples, however they are shared; windows are what they
-- are said to be.
-- mpirun: 2 3
local metrics = require "perilune.nn.metrics"
local peri = require "perilune"
local worlds = require "spec.support.worlds"
collectgarbage("setpause", 200) -- as in programs (tests/harness/busted_main.lua): memory is measured here

local N = 600

local function uniform(stream, low, high)
  return peri.Tensor.uniform({ N }, low, high, 7, stream, "f64", "cpu"):to_list()
end

--- N samples: predictions with ties, labels that follow them, weights, sessions.
local function samples()
  local p, r, w, y, session = uniform(1, 0.02, 0.98), uniform(2, 0, 1), uniform(3, 0.5, 2), {}, {}
  for i = 1, N do
    p[i] = math.floor(p[i] * 200) / 200
    y[i], session[i] = r[i] < p[i] and 1 or 0, i % 8
  end
  return { p = p, y = y, w = w, session = session }
end

--- Samples [from, to) as a metric takes them. Multiclass: two predictions for each label.
local function part(all, name, from, to)
  local p, y, w, session = {}, {}, {}, {}
  for i = from + 1, to do
    if name == "MulticlassRecallMetric" then p[#p + 1] = 1 - all.p[i] end
    local prediction = name == "MultiLabelPrecisionMetric" and i % 4 or all.p[i]
    p[#p + 1], y[#y + 1], w[#w + 1], session[#session + 1] = prediction, all.y[i], all.w[i], all.session[i]
    if name == "NumMissingLabelsMetric" and i % 3 == 0 then y[#y] = 0 / 0 end
  end
  return p, y, w, session
end

local names = {
  "AUCMetric", "AUPRCMetric", "AccuracyMetric", "AverageMetric", "CTRMetric", "CaliFreeNEMetric", "CalibrationMetric",
  "MAEMetric", "MSEMetric", "MulticlassRecallMetric", "NDCGMetric", "NEMetric", "NEPositiveMetric", "NMSEMetric",
  "PrecisionMetric", "RAUCMetric", "GAUCMetric", "RecallMetric", "RecallSessionMetric", "PrecisionSessionMetric",
  "SegmentedNEMetric", "UnweightedNEMetric", "WeightedAvgMetric", "XAUCMetric", "HindsightTargetPRMetric",
  "MultiLabelPrecisionMetric", "NumMissingLabelsMetric", "NumPositiveSamplesMetric", "RecalibratedCalibrationMetric",
  "RecalibratedNEMetric", "ServingCalibrationMetric", "ServingNEMetric", "SumWeightsMetric",
  "WeightedSumPredictionsMetric",
}

local function make(name, options)
  if name == "MulticlassRecallMetric" then options.number_of_classes = 2 end
  if name:match "SessionMetric$" then options.top_threshold = 2 end
  if name == "SegmentedNEMetric" then options.num_groups = 8 end
  if name == "NEMetric" then options.include_logloss = true end
  if name == "MultiLabelPrecisionMetric" then options.num_labels = 2 end
  if name:match "^Recalibrated" then options.recalibration_coefficient = 0.2 end
  return metrics[name](options)
end

local function near(want, got, what)
  assert.same(peri.util.keys(want), peri.util.keys(got), what)
  for key, value in pairs(want) do
    for i, x in ipairs(type(value) == "table" and value or { value }) do
      assert.near(x, type(got[key]) == "table" and got[key][i] or got[key], 1e-12, what .. " " .. key)
    end
  end
end

-- Updates of 40 samples, whole sessions, dealt out: to all ranks in turn; or all to the last, so that the others never
-- see any.
local deals = { turn = function(k, n) return k % n end, last = function(_, n) return n - 1 end }

describe("metrics over ranks", function()
  it("are all here", function()
    for name, class in pairs(metrics) do
      if type(name) == "string" and name:match "Metric$" and name ~= "RecMetric" and name ~= "ThroughputMetric" then
        assert.is_truthy(class and peri.util.index_of(names)[name], name)
      end
    end
  end)

  worlds.each("are those of one rank with all samples", function(world, _, n)
    local all = samples()
    for _, name in ipairs(names) do
      for kind, rank_of in peri.util.ordered(deals) do
        local alone, shared = make(name, { group = false }), make(name, { group = world })
        for k = 0, N / 40 - 1 do
          alone:update(part(all, name, 40 * k, 40 * k + 40))
          if rank_of(k, n) == world:rank() then shared:update(part(all, name, 40 * k, 40 * k + 40)) end
        end
        near(alone:compute(), shared:compute(), name .. ", " .. kind)
      end
    end
  end, { sizes = { 1, 2, 3 }, devices = { "cpu" } })

  worlds.each("use the world if nobody says otherwise", function(world, _, n)
    peri.ffi.state.world = world
    local ctr, alone = metrics.CTRMetric {}, metrics.CTRMetric { group = false }
    for _, metric in ipairs { ctr, alone } do metric:update({ 0.5 }, { world:rank() == 0 and 1 or 0 }) end
    assert.equal(1 / n, ctr:compute().lifetime_ctr)
    assert.equal(world:rank() == 0 and 1 or 0, alone:compute().lifetime_ctr)
    assert.same({}, metrics.NEMetric({}):compute())
    assert.equal(0.5, metrics.AUCMetric({}):compute().window_auc)
  end, { sizes = { 1, 2, 3 }, devices = { "cpu" } })

  worlds.each("look at the last window_size / n samples of each of n ranks", function(world, _, n)
    local all, window = samples(), 90
    local auc = metrics.AUCMetric { window_size = window, group = world }
    local each, p, y = math.ceil(window / n), {}, {}
    local count = N / 10 - world:rank() * 7 -- of its own, from its own place
    local first = world:rank() * 100
    for i = first, first + count - 1 do auc:update(part(all, "AUCMetric", i, i + 1)) end
    for r = 0, n - 1 do
      local last = r * 100 + N / 10 - r * 7
      for i = math.max(r * 100, last - each) + 1, last do p[#p + 1], y[#y + 1] = all.p[i], all.y[i] end
    end
    local weights = {}
    for r = 0, n - 1 do
      local last = r * 100 + N / 10 - r * 7
      for i = math.max(r * 100, last - each) + 1, last do weights[#weights + 1] = all.w[i] end
    end
    assert.near((metrics.auc(p, y, weights)), auc:compute().window_auc, 1e-12)
  end, { sizes = { 1, 2, 3 }, devices = { "cpu" } })
end)

describe("a window", function()
  it("of AUCMetric holds what metrics.auc is given, unless it is told to be small", function()
    local all = samples()
    local auc = metrics.AUCMetric { group = false }
    for k = 0, N / 40 - 1 do auc:update(part(all, "AUCMetric", 40 * k, 40 * k + 40)) end
    assert.near((metrics.auc(all.p, all.y, all.w)), auc:compute().window_auc, 1e-12)
  end)

  it("is the last samples, in updates of any size", function()
    local all = samples()
    for _, window in ipairs { 1, 7, 64, 250 } do
      local auc, at, size = metrics.AUCMetric { window_size = window, group = false }, 0, 1
      while at < N do
        local to = math.min(N, at + size)
        auc:update(part(all, "AUCMetric", at, to))
        at, size = to, (size * 5 + 3) % 97
        local p, y, w = part(all, "AUCMetric", math.max(0, at - window), at)
        assert.near((metrics.auc(p, y, w)), auc:compute().window_auc, 1e-12, ("window %d at %d"):format(window, at))
      end
    end
  end)

  it("of sums is right to 1 part in 5,000, and small however small the updates are", function()
    local ctr = metrics.CTRMetric { window_size = 50000, group = false }
    collectgarbage()
    local before = collectgarbage "count"
    local one, zero, p = { 1 }, { 0 }, { 0.5 }
    for i = 1, 150000 do ctr:update(p, i > 120000 and one or zero) end
    assert.near(30000 / 50000, ctr:compute().window_ctr, 1 / 5000)
    assert.near(30000 / 150000, ctr:compute().lifetime_ctr, 1e-12)
    collectgarbage()
    assert.is_true(collectgarbage "count" - before < 4096, "kilobytes")
  end)

  it("is checked", function()
    assert.error_matches(function() metrics.AUCMetric { window_size = 0 } end, "AUCMetric: window_size is 0")
    assert.error_matches(function() metrics.AUCMetric({ group = 3 }):update({ 1 }, { 1 }) end,
      "AUCMetric: group is a number")
    assert.error_matches(function() metrics.MulticlassRecallMetric { number_of_classes = 0 } end,
      "number_of_classes is 0")
  end)
end)
