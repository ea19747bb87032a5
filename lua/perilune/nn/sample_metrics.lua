-- sample_metrics.lua: metrics that need the samples themselves: areas under curves. Each keeps those of its window.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local ranks = require "perilune.nn.ranks"
local samples = require "perilune.nn.samples"
local states = require "perilune.nn.metric_state"
local C, check = P.C, P.check
local OF_CLASSES = C.PERI_METRIC_LABELS_OF_CLASSES
local ENTROPY = C.PERI_METRIC_PROBABILITIES + OF_CLASSES

local M = {}
local number = ffi.new "double[1]"

--- The last `size` samples, in arrays that grow up to that many. most (or nil): if the first samples are more than
--- that, so many of them stay until the next come.
local Samples = util.class "Samples"
function Samples:init(size, most)
  self.size, self.used, self.at, self.room = math.max(size, most or 0), 0, 0, 0 -- at: the oldest, once all are used
  self.arrays, self.lasting = {}, size
end

--- Forget what is older than the last `lasting` samples.
function Samples:shrink()
  local keep = math.min(self.used, self.lasting)
  for k = 1, 3 do
    local all, array = self:in_order(k), ffi.new("double[?]", keep + 1)
    ffi.copy(array, all + self.used - keep, keep * 8)
    self.arrays[k] = array
  end
  self.size, self.used, self.at, self.room = self.lasting, keep, 0, keep
end

function Samples:reserve(n)
  if n <= self.room then return end
  self.room = math.min(self.size, math.max(n, 2 * self.room, 1024))
  for k = 1, 3 do
    local more = ffi.new("double[?]", self.room)
    if self.arrays[k] then ffi.copy(more, self.arrays[k], self.used * 8) end
    self.arrays[k] = more
  end
end

--- Take in the samples s (a peri_metric_samples).
function Samples:push(s)
  local n = tonumber(s.n)
  local from = math.max(0, n - self.size)
  self:reserve(math.min(self.size, self.used + n))
  while from < n do
    local full = self.used == self.size
    local to = full and self.at or self.used
    local count = math.min(n - from, self.size - to)
    ffi.copy(self.arrays[1] + to, s.predictions + from, count * 8)
    ffi.copy(self.arrays[2] + to, s.labels + from, count * 8)
    if s.weights ~= nil then ffi.copy(self.arrays[3] + to, s.weights + from, count * 8)
    else
      for i = to, to + count - 1 do self.arrays[3][i] = 1 end
    end
    if full then self.at = (self.at + count) % self.size else self.used = self.used + count end
    from = from + count
  end
end

--- The k-th array (predictions, labels, weights) from the oldest sample to the newest: a copy.
function Samples:in_order(k)
  local copy = ffi.new("double[?]", self.used + 1)
  if self.used == 0 then return copy end
  ffi.copy(copy, self.arrays[k] + self.at, (self.used - self.at) * 8)
  ffi.copy(copy + self.used - self.at, self.arrays[k], self.at * 8)
  return copy
end

local BINS = 1000
local single = ffi.new "float[1]"

--- The sums of all samples of all ranks: an array for each of the metric's `sums`.
local function sums_of_all(metric, place)
  place(metric)
  local numbers, arrays = {}, {}
  for _, field in ipairs(metric.sums) do
    for bin = 0, metric.bins - 1 do numbers[#numbers + 1] = metric[field][bin] end
  end
  numbers = ranks.sum(metric.group, numbers)
  for k in ipairs(metric.sums) do
    arrays[k] = ffi.new("double[?]", metric.bins)
    for bin = 0, metric.bins - 1 do arrays[k][bin] = numbers[(k - 1) * metric.bins + bin + 1] end
  end
  return unpack(arrays)
end

--- The base of these metrics. options_of, place: see the function at the end.
local function base(RecMetric, options_of, place)
  --- Keeps the last window_size samples.
  local SampleMetric = util.class("SampleMetric", RecMetric)
  function SampleMetric:init(args, spec)
    options_of(self, args, spec)
    self.samples = false
    for _, field in ipairs(self.sums) do self[field] = ffi.new("double[?]", self.bins) end
  end

  --- Forget all samples.
  function SampleMetric:reset()
    self.samples = false
    for _, field in ipairs(self.sums) do ffi.fill(self[field], self.bins * 8) end
  end

  function SampleMetric:update(predictions, labels, weights)
    self:_take(self:_look(predictions, labels, weights))
  end
  function SampleMetric:_look(predictions, labels, weights)
    return samples.metric_samples(self.class_name, self.needs, predictions, labels, weights)
  end
  function SampleMetric:_take(s, memory)
    if self._taken then self:_taken(s) end
    self.samples = self.samples or Samples(place(self))
    if self.samples.size > self.samples.lasting then self.samples:shrink() end
    self.samples:push(s)
    return memory and self
  end

  states.of_samples(SampleMetric, Samples, place)

  --- The window's samples of all ranks; the second value keeps their memory alive.
  function SampleMetric:_gather()
    self.samples = self.samples or Samples(place(self))
    local s, parts = ffi.new "peri_metric_samples", {}
    for k = 1, 3 do parts[k] = self.samples:in_order(k) end
    local n
    parts, n = ranks.gather(self.group, parts, self.samples.used)
    s.predictions, s.labels, s.weights, s.n = parts[1], parts[2], parts[3], n
    return s, parts
  end

  function SampleMetric:_sums_of_all() return sums_of_all(self, place) end

  --- What `compute`, a function of C, makes of the window's samples.
  function SampleMetric:_area(compute)
    local s, memory = self:_gather()
    check(compute(s, number))
    return memory and number[0]
  end
  return SampleMetric
end

local function define_areas(SampleMetric)
  --- Area under the ROC curve of the window; ties count one half.
  M.AUCMetric = util.class("AUCMetric", SampleMetric)
  M.AUCMetric.needs = OF_CLASSES
  function M.AUCMetric:compute() return { window_auc = self:_area(C.peri_metric_auc) } end

  --- Regression AUC of the window: the share of pairs, weighted w_i * w_j, that predictions and labels do not order in
  --- opposite ways. (TorchRec ignores the weights.)
  M.RAUCMetric = util.class("RAUCMetric", SampleMetric)
  M.RAUCMetric.needs = 0
  function M.RAUCMetric:compute() return { window_rauc = self:_area(C.peri_metric_rauc) } end
end

--- Add samples to weights of positives and negatives by the bin, from 0, of each prediction.
local function count(s, bin_of, positive, negative)
  for i = 0, tonumber(s.n) - 1 do
    local bin, y, w = bin_of(s.predictions[i]), s.labels[i], s.weights ~= nil and s.weights[i] or 1
    positive[bin], negative[bin] = positive[bin] + w * y, negative[bin] + w * (1 - y)
  end
end

--- The bin of a prediction among BINS, in f32, as the reference bins them.
local function bin_of(p)
  single[0] = p
  single[0] = single[0] * BINS
  return math.min(math.floor(single[0]), BINS - 1)
end

local function define_auprc(SampleMetric)
  --- Average precision of the window; over everything from a histogram of 1,000 bins of predictions in [0, 1] (0.5
  --- while a class is missing).
  M.AUPRCMetric = util.class("AUPRCMetric", SampleMetric)
  M.AUPRCMetric.needs, M.AUPRCMetric.sums, M.AUPRCMetric.bins = ENTROPY, { "positive", "negative" }, BINS
  function M.AUPRCMetric:_taken(s) count(s, bin_of, self.positive, self.negative) end
  function M.AUPRCMetric:compute()
    local positives, negatives = self:_sums_of_all()
    local positive, negative, area = 0, 0, 0
    for bin = BINS - 1, 0, -1 do
      positive, negative = positive + positives[bin], negative + negatives[bin]
      if positive + negative > 0 then area = area + positives[bin] * (positive / (positive + negative)) end
    end
    return { lifetime_auprc = (positive == 0 or negative == 0) and 0.5 or area / positive,
      window_auprc = self:_area(C.peri_metric_auprc) }
  end
end

local THRESHOLDS = 1000
local steps = ffi.new("float[?]", THRESHOLDS) -- THRESHOLDS numbers from 0 to 1, in f32, as torch.linspace has them
single[0] = 1 / (THRESHOLDS - 1)
for i = 0, THRESHOLDS - 1 do
  steps[i] = i < THRESHOLDS / 2 and single[0] * i or 1 - single[0] * (THRESHOLDS - 1 - i)
end

--- Which of the thresholds is the highest that a prediction in [0, 1] reaches.
local function reached(p)
  local at = math.min(math.floor(p * (THRESHOLDS - 1)) + 1, THRESHOLDS - 1)
  while steps[at] > p do at = at - 1 end
  return at
end

--- The lowest threshold with at least the precision `target` (the highest threshold: none has it), and the precision
--- and recall there. positive and negative: from 0 on, by the highest threshold that a sample reaches.
local function at_target(positive, negative, target)
  local right, wrong = {}, {}
  local positives, negatives = 0, 0
  for i = THRESHOLDS - 1, 0, -1 do
    positives, negatives = positives + positive[i], negatives + negative[i]
    right[i], wrong[i] = positives, negatives
  end
  local function precision(i) return right[i] + wrong[i] == 0 and 0 or right[i] / (right[i] + wrong[i]) end
  local found = 0
  while found < THRESHOLDS - 1 and precision(found) < target do found = found + 1 end
  return found, precision(found), positives == 0 and 0 or right[found] / positives
end

local function define_target(SampleMetric)
  --- Precision and recall at the lowest of 1,000 thresholds that would have had the precision `target_precision`.
  M.HindsightTargetPRMetric = util.class("HindsightTargetPRMetric", SampleMetric)
  local Metric = M.HindsightTargetPRMetric
  Metric.needs, Metric.sums, Metric.bins = ENTROPY, { "positive", "negative" }, THRESHOLDS
  function Metric:init(args)
    SampleMetric.init(self, args, { target_precision = util.from(0.5, 0, 1) })
  end
  function Metric:_taken(s) count(s, reached, self.positive, self.negative) end
  function Metric:compute()
    local out = {}
    local function report(prefix, positive, negative)
      out[prefix .. "hindsight_target_pr"], out[prefix .. "hindsight_target_precision"],
        out[prefix .. "hindsight_target_recall"] = at_target(positive, negative, self.options.target_precision)
    end
    report("lifetime_", self:_sums_of_all())
    local s, memory = self:_gather()
    local positive, negative = ffi.new("double[?]", THRESHOLDS), ffi.new("double[?]", THRESHOLDS)
    count(s, reached, positive, negative)
    report("window_", positive, negative)
    return memory and out
  end
end

--- The metrics by name. RecMetric: the base of all metrics; options_of, place: what all of them do with their arguments
--- and their group (metrics.lua).
return function(RecMetric, options_of, place)
  local SampleMetric = base(RecMetric, options_of, place)
  define_areas(SampleMetric)
  define_auprc(SampleMetric)
  define_target(SampleMetric)
  return M
end
