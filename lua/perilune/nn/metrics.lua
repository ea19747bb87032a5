-- metrics.lua: what a model's predictions are worth: AUC, normalized entropy, log-loss, calibration and their
-- relatives, over everything seen (lifetime) and over the last samples (window). Names are TorchRec's; one object per
-- task.
--
--   local ne = metrics.NEMetric { window_size = 100000, include_logloss = true }
--   ne:update(predictions, labels, weights)       -- tensors or lists; weights may be left out
--   -- { lifetime_ne = .., window_ne = .., lifetime_logloss = .., window_logloss = .. }
--   ne:compute()
--   -- { auc =, ne =, logloss =, calibration =, ... } of this one set of samples
--   metrics.evaluate(predictions, labels)
--
-- A metric speaks of the samples of all ranks: compute is collective where the world has more than one. Every class
-- takes
--   window_size  samples of all ranks together that the window holds (default 10,000,000, as TorchRec's
--                configurations); each of n ranks keeps its last ceil(window_size / n). A class that needs the samples
--                themselves (AUC and its relatives) keeps them, 24 bytes each; others keep sums, by update or by
--                window_size / 10,000 samples, whichever is more
--   group        the ranks; default: the world when the first samples come; false: this rank alone, and nothing is
--                collective
--
-- An update is refused as a whole if a prediction or label is NaN, a label or weight infinite, a weight negative, or if
-- predictions or labels are not what the metric speaks of (`needs` below): entropies want probabilities, not logits,
-- and labels 0..1. A sample of weight 0 changes nothing, except what counts samples without weights.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local ranks = require "perilune.nn.ranks"
local samples = require "perilune.nn.samples"
local signature = require "perilune.signature"
local states = require "perilune.nn.metric_state"
local C, check = P.C, P.check

local M = {}
local number, second = ffi.new "double[1]", ffi.new "double[1]"
local FINITE, PROBABILITIES = C.PERI_METRIC_FINITE, C.PERI_METRIC_PROBABILITIES
local OF_CLASSES, NOT_NEGATIVE = C.PERI_METRIC_LABELS_OF_CLASSES, C.PERI_METRIC_LABELS_NOT_NEGATIVE

-- -- formulas over sums -----------------------------------------------------------------------------------------------

local function log2(x) return math.log(x) / math.log(2) end
local function ratio(a, b) return b == 0 and 0 or a / b end

-- By class name: the names of its values (perilune/io.h), which are functions of sums.
local by_sums = {
  NEMetric = { "ne", "logloss" }, NEPositiveMetric = { "ne_positive" }, UnweightedNEMetric = { "unweighted_ne" },
  CaliFreeNEMetric = { "cali_free_ne" }, CalibrationMetric = { "calibration" }, CTRMetric = { "ctr" },
  AverageMetric = { "label_average", "prediction_average" }, WeightedAvgMetric = { "weighted_avg" },
  NumPositiveSamplesMetric = { "num_positive_samples" }, SumWeightsMetric = { "sum_weights" },
  WeightedSumPredictionsMetric = { "weighted_sum_predictions" }, RecalibratedNEMetric = { "ne", "logloss" },
  RecalibratedCalibrationMetric = { "calibration" }, ServingNEMetric = { "ne" },
  ServingCalibrationMetric = { "calibration" },
  MSEMetric = { "mse", "rmse", "r_squared" }, NMSEMetric = { "nmse", "nrmse" }, MAEMetric = { "mae" },
  AccuracyMetric = { "accuracy" }, PrecisionMetric = { "precision" }, RecallMetric = { "recall" },
}

--- The value of one of them.
local function value_of(sums, name)
  check(C.peri_metric_value(sums, name, number))
  return number[0]
end

-- -- what all metrics take --------------------------------------------------------------------------------------------

local WINDOW = 10000000

--- Check and keep a metric's arguments: those of all metrics, and those of `spec`.
local function options_of(metric, args, spec)
  local all = { window_size = WINDOW, group = util.optional }
  for name, default in util.ordered(spec or {}) do all[name] = default end
  metric.options = util.named(metric.class_name, args, all)
  util.integer(metric.class_name, "window_size", metric.options.window_size, 1)
  ranks._check_group(metric.class_name, metric.options.group)
  metric._placed, metric.group = false, false
end

--- Find the metric's group out, once: at its first update or, if it never had one, when it is computed. Returns this
--- rank's window size.
local function place(metric)
  if not metric._placed then
    metric._placed, metric.group = true, ranks.group_of(metric.class_name, metric.options.group)
  end
  return math.ceil(metric.options.window_size / (metric.group and metric.group:size() or 1))
end

-- -- lifetime and window ----------------------------------------------------------------------------------------------

--- A list of numbers added to another, in place; returns it.
local function add(into, part)
  for i = 1, #part do into[i] = (into[i] or 0) + part[i] end
  return into
end

--- Sums of updates: over all of them, and over the newest that have at most window_size samples together (the newest
--- one at least).
local Window = util.class "Window"

function Window:init(size)
  self.size, self.parts, self.counts, self.first, self.last, self.used = size, {}, {}, 1, 0, 0
end

--- Append an entry; what is too old stays until the next push.
function Window:restore(part, count)
  self.last = self.last + 1
  self.parts[self.last], self.counts[self.last], self.used = add({}, part), count, self.used + count
end

--- The newest entry has so many samples more.
function Window:grow(count)
  self.counts[self.last], self.used = self.counts[self.last] + count, self.used + count
  while self.used > self.size and self.first < self.last do
    self.used = self.used - self.counts[self.first]
    self.parts[self.first], self.counts[self.first] = nil, nil
    self.first = self.first + 1
  end
end

function Window:push(part, count)
  -- small updates do not stand alone
  local apart = self.last < self.first or self.counts[self.last] + count > self.size / 10000
  if apart then self:restore(part, 0) else add(self.parts[self.last], part) end
  self:grow(count)
end

function Window:sum()
  local total = {}
  for i = self.first, self.last do add(total, self.parts[i]) end
  return total
end

local fields = { "n", "weight", "label", "prediction", "plain_label", "cross_entropy", "positive_cross_entropy",
  "plain_cross_entropy", "square_error", "absolute_error", "ones_square_error", "correct", "true_positive",
  "false_positive", "false_negative" }

--- The class above all metrics, whose methods each of them has.
M.RecMetric = util.seal(util.class "RecMetric")
--- What print shows: the class, and what the metric was made with.
function M.RecMetric:__tostring()
  local parts = {}
  for name, value in util.ordered(self.options) do parts[#parts + 1] = ("%s = %s"):format(name, tostring(value)) end
  return ("%s { %s }"):format(self.class_name, table.concat(parts, ", "))
end
for _, name in ipairs { "init", "update", "compute", "reset", "state_dict", "check_state_dict", "load_state_dict",
  "merge_state_dicts" } do
  M.RecMetric[name] = function(self)
    P.fail(("%s: a metric has '%s' of its own; RecMetric itself is none"):format(self.class_name, name))
  end
end

--- The base of all metrics that are functions of sums. A metric has `part(...)`, which makes the list of numbers of one
--- update and its number of samples, `width`, the length of that list, `weights_at`, the place of the sum of weights in
--- it (or nil), and `report(sums, prefix, out)`.
local SumMetric = util.class("SumMetric", M.RecMetric)

function SumMetric:init(args, spec)
  options_of(self, args, spec)
  self:reset()
end

--- Forget all samples.
function SumMetric:reset() self.lifetime, self.window = {}, false end

--- Take samples in. NDCGMetric takes a further list, the session of each sample.
function SumMetric:update(predictions, labels, weights, ...)
  self:_take(self:_look(predictions, labels, weights, ...))
end
--- What samples are that may be taken, or an error; the metric stays what it is.
function SumMetric:_look(...) return self:_part(...) end
function SumMetric:_take(part, n)
  self.window = self.window or Window(place(self))
  add(self.lifetime, part)
  self.window:push(part, n)
end

--- Values by name, lifetime_* and window_*. Before the first update of any rank there are none. Collective over the
--- group.
function SumMetric:compute()
  place(self)
  local width, window, numbers_of_all = self.width, self.window and self.window:sum() or {}, {}
  for i = 1, width do numbers_of_all[i], numbers_of_all[width + i] = self.lifetime[i] or 0, window[i] or 0 end
  numbers_of_all[2 * width + 1] = self.window and 1 or 0
  local total, out = ranks.sum(self.group, numbers_of_all), {}
  if total[2 * width + 1] == 0 then return out end
  local at = self.weights_at
  if at and (total[at] == math.huge or total[width + at] == math.huge) then
    P.fail(("%s: the weights of all samples sum up to more than a double holds; allowed: smaller ones, their scale "
      .. "changes nothing"):format(self.class_name))
  end
  self:_report(total, "lifetime_", out)
  self:_report({ unpack(total, width + 1, 2 * width) }, "window_", out)
  return out
end

states.of_sums(SumMetric, Window, place)

local ENTROPY = PROBABILITIES + OF_CLASSES

-- Values that are given when an option of that name is true.
local asked_for = { logloss = "include_logloss", r_squared = "include_r_squared" }

--- What the samples of a simple metric have to be. Who compares predictions with `threshold` compares with 0.5 of
--- probabilities, unless another one is given, of whatever they are; only probabilities can be recalibrated.
local function needs_of(definition, options)
  if options.threshold then return OF_CLASSES + FINITE end
  if options.recalibration_coefficient and definition[1] == "calibration" then return PROBABILITIES + NOT_NEGATIVE end
  return C.peri_metric_needs(definition[1])
end

--- Put in place of the predictions p of s what they were before negative samples were left out, p / (p + (1 - p) / c).
--- Returns their memory.
local function recalibrate(s, c)
  local n = tonumber(s.n)
  local p = ffi.new("double[?]", math.max(n, 1))
  for i = 0, n - 1 do p[i] = s.predictions[i] / (s.predictions[i] + (1 - s.predictions[i]) / c) end
  s.predictions = p
  return p
end

--- Number of samples whose weight is not 0.
local function served(s)
  local count = 0
  for i = 0, tonumber(s.n) - 1 do
    if s.weights == nil or s.weights[i] ~= 0 then count = count + 1 end
  end
  return count
end

local function simple(name, definition, spec)
  local class = util.class(name, SumMetric)
  local counts_served = name:find "^Serving" ~= nil
  class.width, class.weights_at = #fields + (counts_served and 1 or 0), 2
  function class:init(args) SumMetric.init(self, args, spec) end
  function class:_part(predictions, labels, weights)
    local threshold, c = self.options.threshold, self.options.recalibration_coefficient
    local s, memory = samples.metric_samples(name, needs_of(definition, self.options), predictions, labels, weights)
    if c then memory[#memory + 1] = recalibrate(s, c) end
    local sums = ffi.new "peri_metric_sums"
    check(C.peri_metric_add(s, threshold or 0.5, sums))
    local part = {}
    for i, field in ipairs(fields) do part[i] = sums[field] end
    if counts_served then part[#fields + 1] = served(s) end
    return part, memory and tonumber(s.n)
  end
  function class:_report(sums, prefix, out)
    local named = ffi.new "peri_metric_sums"
    for i, field in ipairs(fields) do named[field] = sums[i] end
    for _, value in ipairs(definition) do
      local option = asked_for[value]
      if not option or self.options[option] then out[prefix .. value] = value_of(named, value) end
    end
    if counts_served and prefix == "lifetime_" then out.total_examples = sums[#fields + 1] end
  end
  M[name] = class
end

local threshold = { threshold = util.finite(nil) }
local coefficient = util.over(1, 0)
local specs = { NEMetric = { include_logloss = false }, AccuracyMetric = threshold, PrecisionMetric = threshold,
  RecallMetric = threshold, MSEMetric = { include_r_squared = false },
  RecalibratedNEMetric = { include_logloss = false, recalibration_coefficient = coefficient },
  RecalibratedCalibrationMetric = { recalibration_coefficient = coefficient } }
for name, definition in util.ordered(by_sums) do simple(name, definition, specs[name]) end

-- -- metrics with sums of their own -----------------------------------------------------------------------------------

--- Share of pairs (weighted; inside one update) that predictions and labels order alike.
M.XAUCMetric = util.class("XAUCMetric", SumMetric)
M.XAUCMetric.width, M.XAUCMetric.weights_at = 2, 2
function M.XAUCMetric:_part(predictions, labels, weights)
  local s, memory = samples.metric_samples("XAUCMetric", FINITE, predictions, labels, weights)
  check(C.peri_metric_xauc(s, number, second))
  return { number[0], second[0] }, memory and tonumber(s.n)
end
function M.XAUCMetric:_report(sums, prefix, out) out[prefix .. "xauc"] = ratio(sums[1], sums[2]) end

--- Recall of the k most likely of `number_of_classes` classes, a list over k = 1, 2, ... Predictions are [samples,
--- classes].
M.MulticlassRecallMetric = util.class("MulticlassRecallMetric", SumMetric)
function M.MulticlassRecallMetric:init(args)
  SumMetric.init(self, args, { number_of_classes = util.required.number })
  self.width = util.integer("MulticlassRecallMetric", "number_of_classes", self.options.number_of_classes, 1, 2 ^ 20)
    + 1
end
function M.MulticlassRecallMetric:_part(predictions, labels, weights)
  local classes, func = self.options.number_of_classes, "MulticlassRecallMetric"
  local s, memory = samples.metric_samples(func, NOT_NEGATIVE, predictions, labels, weights, classes)
  local of = samples.layout(predictions)
  if of and classes > 1 and of:find "," and not of:find((" %d$"):format(classes)) then
    P.fail(("%s: predictions are %s, wanted [samples, %d]"):format(func, require("perilune.tensor")._text(predictions),
      classes))
  end
  for i = 0, tonumber(s.n) - 1 do
    local label = s.labels[i]
    if label ~= math.floor(label) or label >= classes then
      P.fail(("%s: sample %d: label %s, allowed: whole numbers 0..%d"):format(func, i, P.numeral(label),
        classes - 1))
    end
    for c = i * classes, (i + 1) * classes - 1 do
      if s.predictions[c] ~= s.predictions[c] then
        P.fail(("%s: sample %d: prediction nan, not a number"):format(func, i))
      end
    end
  end
  local part = {}
  for k = 1, classes + 1 do part[k] = 0 end
  for i = 0, tonumber(s.n) - 1 do
    local w, row, label = s.weights ~= nil and s.weights[i] or 1, s.predictions + i * classes, s.labels[i]
    local rank = 1 -- of the label's class; among equal predictions the lower class comes first
    for c = 0, classes - 1 do
      if row[c] > row[label] or (row[c] == row[label] and c < label) then rank = rank + 1 end
    end
    for k = rank, classes do part[k] = part[k] + w end
    part[classes + 1] = part[classes + 1] + w
  end
  return part, memory and tonumber(s.n)
end
function M.MulticlassRecallMetric:_report(sums, prefix, out)
  local list = {}
  for k = 1, self.options.number_of_classes do list[k] = sums[k] / sums[self.options.number_of_classes + 1] end
  out[prefix .. "multiclass_recall"] = list
end

--- Weights of the samples whose label is missing (NaN).
M.NumMissingLabelsMetric = util.class("NumMissingLabelsMetric", SumMetric)
M.NumMissingLabelsMetric.width, M.NumMissingLabelsMetric.weights_at = 2, 2
function M.NumMissingLabelsMetric:_part(predictions, labels, weights)
  local known, missing = samples.missing_labels("NumMissingLabelsMetric", labels)
  local s, memory = samples.metric_samples("NumMissingLabelsMetric", 0, predictions, known, weights)
  local count, total = 0, 0
  for i = 0, tonumber(s.n) - 1 do
    local w = s.weights ~= nil and s.weights[i] or 1
    count, total = count + (missing[i + 1] and w or 0), total + w
  end
  return { count, total }, memory and tonumber(s.n)
end
function M.NumMissingLabelsMetric:_report(sums, prefix, out) out[prefix .. "num_missing_labels"] = sums[1] end

--- Precision of each of `num_labels` yes-or-no labels. Predictions and labels are whole numbers, whose bit i, from the
--- lowest, is label i.
M.MultiLabelPrecisionMetric = util.class("MultiLabelPrecisionMetric", SumMetric)
function M.MultiLabelPrecisionMetric:init(args)
  SumMetric.init(self, args, { num_labels = util.whole(1, 1, 53), label_names = util.optional.list })
  local n, names = self.options.num_labels, self.options.label_names
  self.width, self.names = 2 * n, {}
  if names then
    signature.value("MultiLabelPrecisionMetric", "label_names", names, "strings")
    util.distinct("MultiLabelPrecisionMetric", "label", names)
  end
  if names and #names ~= n then
    P.fail(("MultiLabelPrecisionMetric: label_names has %d names, wanted %d"):format(#names, n))
  end
  for i = 1, n do self.names[i] = names and names[i] or "label_" .. i - 1 end
  -- a state says of which labels it is by text
  self.options.label_names = names and table.concat(names, ",") or nil
end
function M.MultiLabelPrecisionMetric:_part(predictions, labels, weights)
  local func, n = "MultiLabelPrecisionMetric", self.options.num_labels
  local s, memory = samples.metric_samples(func, NOT_NEGATIVE, predictions, labels, weights)
  local part = {}
  for k = 1, 2 * n do part[k] = 0 end
  for i = 0, tonumber(s.n) - 1 do
    local p, y, w = s.predictions[i], s.labels[i], s.weights ~= nil and s.weights[i] or 1
    for what, x in pairs { prediction = p, label = y } do -- any order: at most one message
      if not util.is_whole(x, 0) then
        P.fail(("%s: sample %d: %s %s, allowed: whole numbers 0..2^53 - 1"):format(func, i, what, P.numeral(x)))
      end
    end
    for k = 1, n do
      if p % 2 == 1 then part[2 * k - y % 2] = part[2 * k - y % 2] + w end -- odd: right; even: wrong
      p, y = math.floor(p / 2), math.floor(y / 2)
    end
  end
  return part, memory and tonumber(s.n)
end
function M.MultiLabelPrecisionMetric:_report(sums, prefix, out)
  for k, label in ipairs(self.names) do
    out[prefix .. "multi_label_precision" .. label] = ratio(sums[2 * k - 1], sums[2 * k - 1] + sums[2 * k])
  end
end

--- Discounted cumulative gain of labels in this order, of the first k.
local function dcg(labels, k, exponential)
  local sum = 0
  for rank = 1, math.min(k, #labels) do
    sum = sum + (exponential and 2 ^ labels[rank] - 1 or labels[rank]) / log2(rank + 1)
  end
  return sum
end

--- 1 - NDCG@k (or NDCG, if report_ndcg_as_decreasing_curve is false), a mean over sessions, each times its largest
--- weight.
M.NDCGMetric = util.class("NDCGMetric", SumMetric)
M.NDCGMetric.width = 2
function M.NDCGMetric:init(args)
  SumMetric.init(self, args, { exponential_gain = false, k = -1, report_ndcg_as_decreasing_curve = true,
    remove_single_length_sessions = false, scale_by_weights_tensor = false })
  local k = self.options.k
  if k ~= math.floor(k) or k == 0 or k < -1 or k > 2 ^ 53 then
    P.fail(("NDCGMetric: k is %g, allowed: whole numbers from 1 on, or -1 for all"):format(k))
  end
end
local function sessions_of(s, session)
  local by_id, list = {}, {}
  for i = 0, tonumber(s.n) - 1 do
    local id = session[i]
    if not by_id[id] then
      by_id[id] = {}
      list[#list + 1] = by_id[id]
    end
    table.insert(by_id[id], { p = s.predictions[i], y = s.labels[i], w = s.weights ~= nil and s.weights[i] or 1,
      at = i })
  end
  return list
end
function M.NDCGMetric:_part(predictions, labels, weights, session)
  local o = self.options
  local s, memory = samples.metric_samples("NDCGMetric", FINITE + NOT_NEGATIVE, predictions, labels, weights)
  local n = tonumber(s.n)
  local ids = samples.sessions(session, n, "NDCGMetric")
  local sum, count = 0, 0
  for _, list in ipairs(sessions_of(s, ids)) do
    if #list > 1 or not o.remove_single_length_sessions then
      local heaviest = 0
      for _, x in ipairs(list) do
        heaviest = math.max(heaviest, x.w)
        if o.scale_by_weights_tensor then x.p, x.y = x.p * x.w, x.y * x.w end
      end
      table.sort(list, function(a, b) return a.p > b.p or (a.p == b.p and a.at < b.at) end)
      local shown = util.map(list, function(x) return x.y end)
      local best = util.map(list, function(x) return x.y end)
      table.sort(best, function(a, b) return a > b end)
      local k = o.k < 0 and #list or o.k
      local ideal = dcg(best, k, o.exponential_gain)
      local ndcg = dcg(shown, k, o.exponential_gain) / (ideal == 0 and 1e-6 or ideal)
      if o.report_ndcg_as_decreasing_curve then ndcg = 1 - ndcg end
      sum = sum + (o.scale_by_weights_tensor and ndcg or ndcg * heaviest)
      count = count + 1
    end
  end
  return { sum, count }, memory and n
end
function M.NDCGMetric:_report(sums, prefix, out) out[prefix .. "ndcg"] = sums[1] / sums[2] end

-- -- one set of samples -----------------------------------------------------------------------------------------------

--- Area under the ROC curve of these samples: of those of this rank alone. Nothing is collective.
function M.auc(predictions, labels, weights)
  local s, memory = samples.metric_samples("metrics.auc", OF_CLASSES, predictions, labels, weights)
  check(C.peri_metric_auc(s, number))
  return memory and number[0]
end

--- Everything that a report says about these samples (of this rank alone), with predictions in [0, 1]: samples, auc,
--- ne, logloss (natural logarithm), calibration, ctr, accuracy.
function M.evaluate(predictions, labels, weights)
  local s, memory = samples.metric_samples("metrics.evaluate", ENTROPY, predictions, labels, weights)
  local sums = ffi.new "peri_metric_sums"
  check(C.peri_metric_add(s, 0.5, sums))
  local report = {}
  for _, name in ipairs { "ne", "logloss", "calibration", "ctr", "accuracy" } do report[name] = value_of(sums, name) end
  check(C.peri_metric_auc(s, number))
  report.samples, report.auc, report.logloss = memory and tonumber(s.n), number[0], report.logloss * math.log(2)
  return report
end

for name, class in util.ordered(require "perilune.nn.sample_metrics"(M.RecMetric, options_of, place)) do
  M[name] = class
end
for name, class in util.ordered(require "perilune.nn.session_metrics"(SumMetric, value_of)) do M[name] = class end
require "perilune.nn.metric_module"(M)
M.SummaryWriter = require "perilune.nn.summary"

return util.face("peri.nn.metrics", M)
