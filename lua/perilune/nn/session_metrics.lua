-- session_metrics.lua: metrics of groups of samples: of sessions (what was shown together: one user's, one request's),
-- and of segments (a country, a device). Each update says the group of each sample, in a further list; sessions of
-- different updates are different ones.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local samples = require "perilune.nn.samples"
local C, check = P.C, P.check
local FINITE, OF_CLASSES, PROBABILITIES = C.PERI_METRIC_FINITE, C.PERI_METRIC_LABELS_OF_CLASSES,
  C.PERI_METRIC_PROBABILITIES

local number = ffi.new "double[1]"

--- The samples of s by session: a list of lists of positions.
local function by_session(s, func, session)
  local ids, of, list = samples.sessions(session, tonumber(s.n), func), {}, {}
  for i = 0, tonumber(s.n) - 1 do
    local own = of[ids[i]]
    if not own then
      own = {}
      of[ids[i]], list[#list + 1] = own, own
    end
    own[#own + 1] = i
  end
  return list
end

--- AUC of the samples at `positions`; nil where all labels, or all predictions, are the same.
local function auc_of(s, positions)
  local n = #positions
  local p, y, w = ffi.new("double[?]", n), ffi.new("double[?]", n), ffi.new("double[?]", n)
  local positive, negative, differ = 0, 0, false
  for k, i in ipairs(positions) do
    p[k - 1], y[k - 1], w[k - 1] = s.predictions[i], s.labels[i], s.weights ~= nil and s.weights[i] or 1
    positive, negative = positive + w[k - 1] * y[k - 1], negative + w[k - 1] * (1 - y[k - 1])
    differ = differ or p[k - 1] ~= p[0]
  end
  if not (positive > 0 and negative > 0 and differ) then return nil end
  check(C.peri_metric_auc(ffi.new("peri_metric_samples", { predictions = p, labels = y, weights = w, n = n }), number))
  return number[0]
end

local M = {}

local function define_gauc(SumMetric)
  --- The mean over sessions of the AUC within each; sessions whose labels or predictions are all the same do not count.
  --- 0.5 without any.
  M.GAUCMetric = util.class("GAUCMetric", SumMetric)
  M.GAUCMetric.width = 2
  function M.GAUCMetric:_part(predictions, labels, weights, session)
    local s, memory = samples.metric_samples("GAUCMetric", OF_CLASSES, predictions, labels, weights)
    local sum, count = 0, 0
    for _, positions in ipairs(by_session(s, "GAUCMetric", session)) do
      local auc = auc_of(s, positions)
      if auc then sum, count = sum + auc, count + 1 end
    end
    return { sum, count }, memory and tonumber(s.n)
  end
  function M.GAUCMetric:_report(sums, prefix, out)
    out[prefix .. "gauc"], out[prefix .. "gauc_num_samples"] = sums[2] > 0 and sums[1] / sums[2] or 0.5, sums[2]
  end
end

--- Weights of positive and of all samples among the `top_threshold` with the highest predictions of each session, and
--- of positive ones behind them: sums of recall and precision at k. With run_ranking_of_labels the positive samples of
--- a session are those of its top_threshold highest labels.
local function of_session(SumMetric, name, value_name, report)
  local class = util.class(name, SumMetric)
  class.width, class.namespace = 3, value_name
  function class:init(args)
    SumMetric.init(self, args, { top_threshold = util.required.number, run_ranking_of_labels = false })
    util.integer(name, "top_threshold", self.options.top_threshold, 1)
  end
  function class:_part(predictions, labels, weights, session)
    local o = self.options
    local s, memory = samples.metric_samples(name, o.run_ranking_of_labels and 0 or OF_CLASSES, predictions, labels,
      weights)
    local hit, shown, missed = 0, 0, 0
    local function above(array, positions, i) -- samples of the session that are higher
      local n = 0
      for _, j in ipairs(positions) do n = n + (array[j] > array[i] and 1 or 0) end
      return n
    end
    for _, positions in ipairs(by_session(s, name, session)) do
      for _, i in ipairs(positions) do
        local y, w = s.labels[i], s.weights ~= nil and s.weights[i] or 1
        if o.run_ranking_of_labels then y = above(s.labels, positions, i) < o.top_threshold and 1 or 0 end
        if above(s.predictions, positions, i) < o.top_threshold then hit, shown = hit + w * y, shown + w
        else missed = missed + w * y end
      end
    end
    return { hit, shown, missed }, memory and tonumber(s.n)
  end
  function class:_report(sums, prefix, out) out[prefix .. value_name] = report(sums) end
  M[name] = class
end
local function define_segmented(SumMetric, value_of)
  --- The normalized entropy of each of num_groups segments.
  M.SegmentedNEMetric = util.class("SegmentedNEMetric", SumMetric)
  function M.SegmentedNEMetric:init(args)
    SumMetric.init(self, args, { num_groups = util.required.number })
    self.width = 3 * util.integer("SegmentedNEMetric", "num_groups", self.options.num_groups, 1, 2 ^ 20)
  end
  function M.SegmentedNEMetric:_part(predictions, labels, weights, grouping_keys)
    local func, groups = "SegmentedNEMetric", self.options.num_groups
    local s, memory = samples.metric_samples(func, FINITE + PROBABILITIES + OF_CLASSES, predictions, labels, weights)
    local keys, part = samples.numbers(func, "grouping_keys", grouping_keys, tonumber(s.n)), {}
    for i = 1, self.width do part[i] = 0 end
    for i = 0, tonumber(s.n) - 1 do
      local g = keys[i]
      if g ~= math.floor(g) or g < 0 or g >= groups then
        P.fail(("%s: sample %d: group %s, allowed: whole numbers 0..%d"):format(func, i, P.numeral(g),
          groups - 1))
      end
      local one, sums = ffi.new "peri_metric_samples", ffi.new "peri_metric_sums"
      one.predictions, one.labels, one.n = s.predictions + i, s.labels + i, 1
      if s.weights ~= nil then one.weights = s.weights + i end
      check(C.peri_metric_add(one, 0.5, sums))
      part[3 * g + 1], part[3 * g + 2] = part[3 * g + 1] + sums.cross_entropy, part[3 * g + 2] + sums.label
      part[3 * g + 3] = part[3 * g + 3] + sums.weight
    end
    return part, memory and tonumber(s.n)
  end
  function M.SegmentedNEMetric:_report(sums, prefix, out)
    local of_group = ffi.new "peri_metric_sums"
    for g = 0, self.options.num_groups - 1 do
      of_group.cross_entropy, of_group.label, of_group.weight = sums[3 * g + 1], sums[3 * g + 2], sums[3 * g + 3]
      out[("%ssegmented_ne_%d"):format(prefix, g)] = value_of(of_group, "ne")
    end
  end
end

--- The metrics by name. SumMetric: the base of metrics of sums, value_of: the value of one of sums (both metrics.lua).
return function(SumMetric, value_of)
  define_gauc(SumMetric)
  of_session(SumMetric, "RecallSessionMetric", "recall_session_level", function(s) return s[1] / (s[1] + s[3]) end)
  of_session(SumMetric, "PrecisionSessionMetric", "precision_session_level", function(s) return s[1] / s[2] end)
  define_segmented(SumMetric, value_of)
  return M
end
