-- Metrics of sessions and segments: TorchRec 1.9.2's values (gauc.get_auc_states, recall_session, precision_session,
-- segmented_ne) of these samples, ties within a session aside, and what is said about wrong sessions.
local metrics = require "perilune.nn.metrics"

local p, y = { .9, .2, .6, .4, .7, .1, .35, .8, .5, .5, .3, .65 }, { 1, 0, 0, 1, 0, 1, 1, 0, 1, 1, 0, 0 }
local w, sessions = { 1, 2, 1, .5, 1, 1, 2, 1, 1, 1, 3, 1 }, { 7, 7, 7, 7, 3, 3, 3, 3, 9, 9, 1, 1 }

local function of(name, args, groups)
  args.group = false
  local metric = metrics[name](args)
  metric:update(p, y, w, groups or sessions)
  return metric:compute()
end

describe("metrics of sessions", function()
  it("have TorchRec's values", function()
    local gauc = of("GAUCMetric", {})
    assert.near(0.8889 / 2, gauc.lifetime_gauc, 1e-4)
    assert.equal(2, gauc.window_gauc_num_samples) -- of four: one has one prediction, one no positive sample
    assert.near(6 / 13, of("RecallSessionMetric", { top_threshold = 1 }).window_recall_session_level, 1e-12)
    assert.near(0.6, of("PrecisionSessionMetric", { top_threshold = 1 }).lifetime_precision_session_level, 1e-12)
    assert.near(0.3, of("PrecisionSessionMetric", { top_threshold = 2 }).lifetime_precision_session_level, 1e-12)
    local ne = of("SegmentedNEMetric", { num_groups = 4 }, { 0, 0, 0, 1, 1, 1, 0, 0, 0, 2, 2, 2 })
    for g, value in pairs { [0] = 1.0586, 2.3564, 1.1243 } do
      assert.near(value, ne["lifetime_segmented_ne_" .. g], 1e-4)
    end
    assert.is_true(ne.lifetime_segmented_ne_3 ~= ne.lifetime_segmented_ne_3)
  end)

  it("counts ties one half, and ranks labels where asked", function()
    local metric = metrics.GAUCMetric { group = false }
    metric:update({ 0.5, 0.5, 0.1 }, { 1, 0, 0 }, nil, { 1, 1, 1 })
    assert.equal(0.75, metric:compute().lifetime_gauc)
    local recall = metrics.RecallSessionMetric { top_threshold = 1, run_ranking_of_labels = true, group = false }
    recall:update({ 3, 2, 5, 4 }, { 10, 20, 40, 30 }, nil, { 1, 1, 2, 2 })
    assert.equal(0.5, recall:compute().lifetime_recall_session_level)
  end)

  it("say what is wrong", function()
    local function fails(pattern, name, args, ...)
      local groups = { ... }
      assert.error_matches(function() of(name, args, groups[1]) end, pattern)
    end
    fails("RecallSessionMetric: argument 'top_threshold' is missing", "RecallSessionMetric", {})
    fails("PrecisionSessionMetric: top_threshold is 0, allowed", "PrecisionSessionMetric", { top_threshold = 0 })
    fails("SegmentedNEMetric: sample 0: group 7, allowed: whole numbers 0..3", "SegmentedNEMetric", { num_groups = 4 })
    fails("GAUCMetric: 2 sessions for 12 labels", "GAUCMetric", {}, { 1, 2 })
    assert.error_matches(function() metrics.GAUCMetric({ group = false }):update(p, y, w) end,
      "GAUCMetric: sessions are nil")
  end)
end)
