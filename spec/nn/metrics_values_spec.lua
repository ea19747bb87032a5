-- What metrics take: weights count in all of them, what a metric does not speak of is refused with the sample's number,
-- and a refused update changes nothing.
local metrics = require "perilune.nn.metrics"
local peri = require "perilune"
local draw = require("spec.support.tbe").generator(23)

local INF, NAN = math.huge, 0 / 0
local names = {}
for name in pairs(metrics) do
  local of_samples = type(name) == "string" and name:match "Metric$" and name ~= "ThroughputMetric"
  if of_samples and name ~= "RecMetric" then names[#names + 1] = name end
end
table.sort(names)

local CLASSES = 3
local function make(name, options)
  local a = { window_size = 1000, group = false }
  for key, value in pairs(options or {}) do a[key] = value end
  if name == "MulticlassRecallMetric" then a.number_of_classes = CLASSES end
  if name:match "SessionMetric$" then a.top_threshold = 2 end
  if name == "SegmentedNEMetric" then a.num_groups = 120 end
  return metrics[name](a)
end

--- n random samples that suit every metric: { p =, y =, w =, session = }.
local function random(name, n)
  local s = { p = {}, y = {}, w = {}, session = {} }
  for i = 1, n do
    for _ = 1, name == "MulticlassRecallMetric" and CLASSES or 1 do
      s.p[#s.p + 1] = name == "MultiLabelPrecisionMetric" and draw(4) or (draw(19) + 1) / 20
    end
    s.y[i], s.w[i], s.session[i] = draw(2), (draw(8) + 1) / 4, draw(4)
  end
  return s
end

-- What is a sum of weights has their scale.
local sums = { NumPositiveSamplesMetric = true, NumMissingLabelsMetric = true, SumWeightsMetric = true,
  WeightedSumPredictionsMetric = true }

local function update(m, s) m:update(s.p, s.y, s.w, s.session) end

local function near(want, got, what)
  assert.same(peri.util.keys(want), peri.util.keys(got), what)
  for key, value in pairs(want) do -- any order
    local list, other = type(value) == "table" and value or { value }, type(got[key]) == "table" and got[key]
      or { got[key] }
    for i, x in ipairs(list) do
      assert.is_true(x == other[i] or x ~= x and other[i] ~= other[i]
        or math.abs(x - other[i]) <= 1e-9 * math.max(1, math.abs(x)),
        ("%s %s: %s, not %s"):format(what, key, tostring(other[i]), tostring(x)))
    end
  end
end

describe("every metric", function()
  for _, name in ipairs(names) do
    local width = name == "MulticlassRecallMetric" and CLASSES or 1

    it(name .. " knows nothing after a reset", function()
      local again, fresh = make(name), make(name)
      update(again, random(name, 30))
      again:reset()
      local samples = random(name, 20)
      update(again, samples)
      update(fresh, samples)
      near(fresh:compute(), again:compute(), name)
    end)

    if name ~= "UnweightedNEMetric" then
      it(name .. " is unchanged by samples of weight 0, and by a factor of all weights", function()
        for _ = 1, 5 do
          local plain, more, scaled = make(name), make(name), make(name)
          local s, t = random(name, 12), { p = {}, y = {}, w = {}, session = {} }
          local u = { p = s.p, y = s.y, session = s.session, w = peri.util.map(s.w, function(w) return 8 * w end) }
          for i = 1, 12 do
            for _ = 0, draw(2) do -- one that does not count, in the same session
              local other = random(name, 1)
              for c = 1, width do t.p[#t.p + 1] = other.p[c] end
              t.y[#t.y + 1], t.w[#t.w + 1], t.session[#t.session + 1] = other.y[1], 0, 100 + i
            end
            for c = 1, width do t.p[#t.p + 1] = s.p[(i - 1) * width + c] end
            t.y[#t.y + 1], t.w[#t.w + 1], t.session[#t.session + 1] = s.y[i], s.w[i], s.session[i]
          end
          update(plain, s)
          update(more, t)
          update(scaled, u)
          if name ~= "NDCGMetric" then -- its mean is over sessions, and a session's weight a factor
            near(plain:compute(), more:compute(), name)
            local want = plain:compute()
            for key, value in pairs(sums[name] and want or {}) do want[key] = 8 * value end -- any order
            -- the reference's divides by a sum
            if name ~= "CaliFreeNEMetric" then near(want, scaled:compute(), name) end
          end
        end
      end)
    end

    it(name .. " refuses what is no number or no weight, and goes on as if nothing had come", function()
      local m, other = make(name), make(name)
      local first = random(name, 10)
      update(m, first)
      update(other, first)
      local function refused(words, change)
        local s = random(name, 6)
        local at = draw(6) + 1
        change(s, at)
        local ok, why = pcall(update, m, s)
        assert.is_false(ok, words)
        assert.truthy(tostring(why):find(("%s: sample %d: %s"):format(name, at - 1, words), 1, true), tostring(why))
        near(other:compute(), m:compute(), name)
      end
      refused("prediction nan", function(s, at) s.p[at * width] = NAN end)
      if name ~= "NumMissingLabelsMetric" then refused("label nan", function(s, at) s.y[at] = NAN end) end
      refused("label inf", function(s, at) s.y[at] = INF end)
      refused("weight nan", function(s, at) s.w[at] = NAN end)
      refused("weight inf", function(s, at) s.w[at] = INF end)
      refused("weight -0.25", function(s, at) s.w[at] = -0.25 end)
      for key, tensors in pairs { predictions = { "p", { 3, 2 * width } }, weights = { "w", { 3, 2 } } } do -- any order
        local s = random(name, 6)
        local t = { p = peri.tensor(s.p, "f64", "cpu", { 2, 3, width }), y = peri.tensor(s.y, "f64", "cpu", { 2, 3 }),
          w = peri.tensor(s.w, "f64", "cpu", { 2, 3 }), session = s.session }
        t[tensors[1]] = t[tensors[1]]:reshape(unpack(tensors[2]))
        if width == 1 or key == "weights" then
          local ok, why = pcall(update, m, t)
          assert.is_false(ok, key)
          assert.truthy(tostring(why):find(key .. " are tensor f64 [3, 2]", 1, true), tostring(why))
        end
      end
      local good = random(name, 6)
      update(m, { p = peri.tensor(good.p, "f64", "cpu", { 6, width }), y = peri.tensor(good.y, "i64"),
        w = peri.tensor(good.w, "f64"), session = good.session })
      update(other, good)
      near(other:compute(), m:compute(), name)
    end)
  end
end)

--- What a metric takes: predictions that are logits, predictions below 0, infinite ones; labels of 2 and of -1.
local takes = {
  NEMetric = {}, NEPositiveMetric = {}, UnweightedNEMetric = {}, CaliFreeNEMetric = {}, AUPRCMetric = {},
  AccuracyMetric = {}, PrecisionMetric = {}, RecallMetric = {}, CalibrationMetric = { large = true, two = true },
  CTRMetric = { large = true, low = true }, AUCMetric = { large = true, low = true, infinite = true },
  MulticlassRecallMetric = { large = true, low = true, infinite = true, two = true },
  NDCGMetric = { large = true, low = true, two = true }, SegmentedNEMetric = {},
  RAUCMetric = { large = true, low = true, infinite = true, two = true, negative = true },
  NumMissingLabelsMetric = { large = true, low = true, infinite = true, two = true, negative = true },
  RecalibratedNEMetric = {}, RecalibratedCalibrationMetric = { two = true }, ServingNEMetric = {},
  ServingCalibrationMetric = { large = true, two = true }, HindsightTargetPRMetric = {},
  MultiLabelPrecisionMetric = { two = true },
}
for _, name in ipairs { "GAUCMetric", "RecallSessionMetric", "PrecisionSessionMetric" } do
  takes[name] = { large = true, low = true, infinite = true }
end
for _, name in ipairs { "MSEMetric", "MAEMetric", "NMSEMetric", "XAUCMetric", "AverageMetric", "WeightedAvgMetric",
  "NumPositiveSamplesMetric", "SumWeightsMetric", "WeightedSumPredictionsMetric" } do
  takes[name] = { large = true, low = true, two = true, negative = true }
end

describe("metrics know logits from probabilities, and labels of classes from others", function()
  for _, name in ipairs(names) do
    it(name, function()
      local width = name == "MulticlassRecallMetric" and CLASSES or 1
      -- any order
      for kind, case in pairs { large = { "p", 1.5, "prediction 1.5" }, low = { "p", -0.25, "prediction -0.25" },
        infinite = { "p", INF, "prediction inf" }, two = { "y", 2, "label 2" }, negative = { "y", -1, "label -1" } } do
        local m, s = make(name), random(name, 6)
        s[case[1]][5 * (case[1] == "p" and width or 1)] = case[2]
        local ok, why = pcall(update, m, s)
        assert.equal(takes[name][kind] or false, ok, ("%s of %s: %s"):format(kind, name, tostring(why)))
        if not ok then
          assert.truthy(tostring(why):find(("%s: sample 4: %s, allowed: "):format(name, case[3]), 1, true),
            tostring(why))
        end
      end
    end)
  end

  it("where a threshold is given it is of whatever the predictions are", function()
    for _, name in ipairs { "AccuracyMetric", "PrecisionMetric", "RecallMetric" } do
      local logits, chances = make(name, { threshold = 0 }), make(name)
      for _ = 1, 3 do
        local s = random(name, 9)
        local x = peri.util.map(s.p, function(p) return math.log(p / (1 - p)) end)
        chances:update(s.p, s.y, s.w)
        logits:update(x, s.y, s.w)
      end
      near(chances:compute(), logits:compute(), name)
      assert.error_matches(function() make(name, { threshold = NAN }):update({ 0.5 }, { 1 }) end, "threshold is nan")
    end
  end)

  it("of several labels, whose names are as many, each another", function()
    for words, labels in peri.util.ordered { ["label_names has 1 names, wanted 2"] = { "a" },
      ["label 'a' is listed twice"] = { "a", "a" }, ["label_names is a table with the key 'a'"] = { a = 1 },
      ["label_names [2] is 2, wanted a string"] = { "a", 2 } } do
      assert.error_matches(function() metrics.MultiLabelPrecisionMetric { num_labels = 2, label_names = labels } end,
        words, 1, true)
    end
  end)

  it("also for one set of samples", function()
    assert.error_matches(function() metrics.evaluate({ 3, 0.5 }, { 1, 0 }) end,
      "metrics.evaluate: sample 0: prediction 3, allowed: prob")
    assert.error_matches(function() metrics.evaluate({ 0.5 }, { -1 }) end,
      "metrics.evaluate: sample 0: label %-1, allowed: 0..1")
    assert.error_matches(function() metrics.auc({ 3, -0.5 }, { 1, 0 }, { 1, -1 }) end,
      "metrics.auc: sample 1: weight %-1, allowed")
    assert.equal(1, (metrics.auc({ INF, -3 }, { 1, 0 })))
  end)

  it("classes, sessions and places of the first ones too", function()
    assert.error_matches(function() make("MulticlassRecallMetric"):update({ 1, 2, 3 }, { 3 }) end,
      "sample 0: label 3, allowed: whole numbers 0..2")
    assert.error_matches(function() make("MulticlassRecallMetric"):update({ 1, 2, 3 }, { 0.5 }) end,
      "label 0.5, allowed: whole numbers")
    assert.error_matches(function()
      make("MulticlassRecallMetric"):update(peri.tensor({ 1, 2, 3, 4, 5, 6 }, "f32", "cpu", { 3, 2 }), { 1, 2 })
    end, "predictions are tensor f32 %[3, 2%] on cpu, wanted %[samples, 3%]")
    for _, k in ipairs { 0, 0.5 } do
      assert.error_matches(function() make("NDCGMetric", { k = k }) end, "k is " .. k)
    end
    assert.error_matches(function() make("NDCGMetric"):update({ 1, 2 }, { 1, 0 }, nil, { 1, NAN }) end,
      "session of sample 1 is nan")
    local near_ids = peri.tensor({ 9007199254740992LL, 9007199254740993LL }, "i64") -- one double
    local m, apart = make "NDCGMetric", make "NDCGMetric"
    m:update({ 0.2, 0.9 }, { 1, 0 }, nil, near_ids)
    apart:update({ 0.2, 0.9 }, { 1, 0 }, nil, { 1, 2 })
    near(apart:compute(), m:compute(), "sessions")
    -- two numbers may be one there
    for _, name in ipairs { "NDCGMetric", "GAUCMetric", "RecallSessionMetric", "PrecisionSessionMetric" } do
      assert.error_matches(function() make(name):update({ 1, 2 }, { 1, 0 }, nil, { 1, 2 ^ 53 }) end,
        name .. ": the session of sample 1 is 9007199254740992, wanted a whole number below 2%^53, or a 64%-bit one")
      local one, same = make(name), make(name)
      one:update({ 0.2, 0.9, 0.5 }, { 1, 0, 1 }, nil, { 5, 5LL, 5ULL })
      same:update({ 0.2, 0.9, 0.5 }, { 1, 0, 1 }, nil, { 5, 5, 5 })
      near(same:compute(), one:compute(), name)
    end
  end)
end)

describe("regression AUC", function()
  it("is the weighted share of pairs that are not in opposite orders", function()
    for _ = 1, 40 do
      local p, y, w, right, all = {}, {}, {}, 0, 0
      for i = 1, draw(30) do p[i], y[i], w[i] = draw(6) / 4 - 1, draw(6) - 3, draw(5) / 2 end
      for i = 1, #p do
        for j = i + 1, #p do
          all = all + w[i] * w[j]
          right = right + ((p[i] - p[j]) * (y[i] - y[j]) >= 0 and w[i] * w[j] or 0)
        end
      end
      local m = make "RAUCMetric"
      m:update(p, y, w)
      near({ window_rauc = right / all }, m:compute(), "pairs")
    end
  end)
end)
