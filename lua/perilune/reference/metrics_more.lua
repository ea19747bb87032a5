-- metrics_more.lua: Metrics of sums, of samples that were served or left out, and of targets.
--
-- Sums over the samples themselves; normalized entropy and calibration of samples that were served, and of models whose
-- training left negative samples out; what a threshold would have given; precision of several labels. All else is as
-- said with `peri.nn.metrics`.
---@meta

---@class peri.nn.metrics
local metrics = {}

---How many positive samples there were: the sum of labels times weights. `compute` gives
---`lifetime_num_positive_samples`, `window_num_positive_samples`.
---
---Errors: an unknown argument; a window_size below 1; an update with numbers that are not of the metric's kind.
---
---```lua
---local metric = peri.nn.metrics.NumPositiveSamplesMetric {}
---metric:update({ 0.9, 0.2, 0.6 }, { 1, 0, 0 }, { 1, 0, 2 })
---print(metric:compute().lifetime_num_positive_samples) --> 1
---```
---@class peri.nn.metrics.NumPositiveSamplesMetric: peri.nn.metrics.RecMetric
---@overload fun(args?: peri.nn.metrics.args): peri.nn.metrics.NumPositiveSamplesMetric
metrics.NumPositiveSamplesMetric = {}

---How many labels were missing: the sum of the weights of samples whose label is NaN, which no other metric takes.
---`compute` gives `lifetime_num_missing_labels`, `window_num_missing_labels`.
---
---Errors: an unknown argument; a window_size below 1; an update with numbers that are not of the metric's kind.
---
---```lua
---local metric = peri.nn.metrics.NumMissingLabelsMetric {}
---metric:update({ 0.9, 0.2, 0.6 }, { 1, 0 / 0, 0 }, { 1, 3, 2 })
---print(metric:compute().lifetime_num_missing_labels) --> 3
---```
---@class peri.nn.metrics.NumMissingLabelsMetric: peri.nn.metrics.RecMetric
---@overload fun(args?: peri.nn.metrics.args): peri.nn.metrics.NumMissingLabelsMetric
metrics.NumMissingLabelsMetric = {}

---The sum of the samples' weights. `compute` gives `lifetime_sum_weights`, `window_sum_weights`.
---
---Errors: an unknown argument; a window_size below 1; an update with numbers that are not of the metric's kind.
---
---```lua
---local metric = peri.nn.metrics.SumWeightsMetric {}
---metric:update({ 0.9, 0.2, 0.6 }, { 1, 0, 0 }, { 1, 0, 2 })
---print(metric:compute().lifetime_sum_weights) --> 3
---```
---@class peri.nn.metrics.SumWeightsMetric: peri.nn.metrics.RecMetric
---@overload fun(args?: peri.nn.metrics.args): peri.nn.metrics.SumWeightsMetric
metrics.SumWeightsMetric = {}

---The sum of predictions times weights. `compute` gives `lifetime_weighted_sum_predictions`,
---`window_weighted_sum_predictions`.
---
---Errors: an unknown argument; a window_size below 1; an update with numbers that are not of the metric's kind.
---
---```lua
---local metric = peri.nn.metrics.WeightedSumPredictionsMetric {}
---metric:update({ 0.9, 0.2, 0.6 }, { 1, 0, 0 }, { 1, 0, 2 })
---print(("%.4f"):format(metric:compute().lifetime_weighted_sum_predictions)) --> 2.1000
---```
---@class peri.nn.metrics.WeightedSumPredictionsMetric: peri.nn.metrics.RecMetric
---@overload fun(args?: peri.nn.metrics.args): peri.nn.metrics.WeightedSumPredictionsMetric
metrics.WeightedSumPredictionsMetric = {}

---Normalized entropy of a model that was trained with a share c of the negative samples, on samples of which none is
---left out: a prediction p counts as p / (p + (1 - p) / c). `compute` gives `lifetime_ne`, `window_ne`.
---
---Errors: an unknown argument; a window_size below 1, a coefficient that is not above 0; an update with numbers that
---are not of the metric's kind.
---
---```lua
---local metric = peri.nn.metrics.RecalibratedNEMetric { recalibration_coefficient = 0.1 }
---metric:update({ 0.9, 0.2, 0.6 }, { 1, 0, 0 })
---print(("%.4f"):format(metric:compute().lifetime_ne)) --> 0.4774
---```
---@class peri.nn.metrics.RecalibratedNEMetric: peri.nn.metrics.RecMetric
---@overload fun(args?: peri.nn.metrics.RecalibratedNEMetric.args): peri.nn.metrics.RecalibratedNEMetric
metrics.RecalibratedNEMetric = {}

---@class peri.nn.metrics.RecalibratedNEMetric.args
---@field window_size? integer Samples of all ranks together that the window holds (default: 10000000).
---@field group? peri.dist.Group|boolean The ranks (default: the world when the first samples come); `false`: this rank alone.
---@field recalibration_coefficient? number The share c of negative samples that were kept in training, above 0 (default: 1).
---@field include_logloss? boolean Whether `compute` tells the cross entropy itself too (default: false).

---Calibration of a model that was trained with a share c of the negative samples, on samples of which none is left out:
---a prediction p, which is a probability, counts as p / (p + (1 - p) / c). `compute` gives `lifetime_calibration`,
---`window_calibration`.
---
---Errors: an unknown argument; a window_size below 1, a coefficient that is not above 0; an update with numbers that
---are not of the metric's kind.
---
---```lua
---local metric = peri.nn.metrics.RecalibratedCalibrationMetric { recalibration_coefficient = 0.1 }
---metric:update({ 0.9, 0.2, 0.6 }, { 1, 0, 0 })
---print(("%.4f"):format(metric:compute().lifetime_calibration)) --> 0.6285
---```
---@class peri.nn.metrics.RecalibratedCalibrationMetric: peri.nn.metrics.RecMetric
---@overload fun(args?: peri.nn.metrics.RecalibratedCalibrationMetric.args): peri.nn.metrics.RecalibratedCalibrationMetric
metrics.RecalibratedCalibrationMetric = {}

---@class peri.nn.metrics.RecalibratedCalibrationMetric.args
---@field window_size? integer Samples of all ranks together that the window holds (default: 10000000).
---@field group? peri.dist.Group|boolean The ranks (default: the world when the first samples come); `false`: this rank alone.
---@field recalibration_coefficient? number The share c of negative samples that were kept in training, above 0 (default: 1).

---Normalized entropy, and how many samples had a weight other than 0: where samples that were not served have weight 0,
---those that were. `compute` gives `lifetime_ne`, `window_ne` and `total_examples`.
---
---Errors: an unknown argument; a window_size below 1; an update with numbers that are not of the metric's kind.
---
---```lua
---local metric = peri.nn.metrics.ServingNEMetric {}
---metric:update({ 0.9, 0.2, 0.6 }, { 1, 0, 0 }, { 1, 0, 2 })
---local values = metric:compute()
---print(("%.4f"):format(values.lifetime_ne), values.total_examples) --> 1.0149 2
---```
---@class peri.nn.metrics.ServingNEMetric: peri.nn.metrics.RecMetric
---@overload fun(args?: peri.nn.metrics.args): peri.nn.metrics.ServingNEMetric
metrics.ServingNEMetric = {}

---Calibration, and how many samples had a weight other than 0. `compute` gives `lifetime_calibration`,
---`window_calibration` and `total_examples`.
---
---Errors: an unknown argument; a window_size below 1; an update with numbers that are not of the metric's kind.
---
---```lua
---local metric = peri.nn.metrics.ServingCalibrationMetric {}
---metric:update({ 0.9, 0.2, 0.6 }, { 1, 0, 0 }, { 1, 0, 2 })
---local values = metric:compute()
---print(("%.4f"):format(values.lifetime_calibration), values.total_examples) --> 2.1000 2
---```
---@class peri.nn.metrics.ServingCalibrationMetric: peri.nn.metrics.RecMetric
---@overload fun(args?: peri.nn.metrics.args): peri.nn.metrics.ServingCalibrationMetric
metrics.ServingCalibrationMetric = {}

---Precision of each of several yes-or-no labels. Predictions and labels are whole numbers: bit i, from the lowest, is
---label i (5 of three labels: the first and the last). `compute` gives `lifetime_multi_label_precision<label>` and
---`window_multi_label_precision<label>`, as TorchRec does; 0 where a label was never predicted.
---
---Errors: an unknown argument; a window_size below 1, num_labels outside of 1..53, other than num_labels names; an
---update with numbers that are not whole, negative, or 2^53 and more.
---
---```lua
---local names = { "_like", "_share" }
---local metric = peri.nn.metrics.MultiLabelPrecisionMetric { num_labels = 2, label_names = names }
---metric:update({ 3, 1, 2 }, { 1, 1, 2 })
---local values = metric:compute()
---print(values.lifetime_multi_label_precision_like) --> 1
---print(values.lifetime_multi_label_precision_share) --> 0.5
---```
---@class peri.nn.metrics.MultiLabelPrecisionMetric: peri.nn.metrics.RecMetric
---@overload fun(args?: peri.nn.metrics.MultiLabelPrecisionMetric.args): peri.nn.metrics.MultiLabelPrecisionMetric
metrics.MultiLabelPrecisionMetric = {}

---@class peri.nn.metrics.MultiLabelPrecisionMetric.args
---@field window_size? integer Samples of all ranks together that the window holds (default: 10000000).
---@field group? peri.dist.Group|boolean The ranks (default: the world when the first samples come); `false`: this rank alone.
---@field num_labels? integer How many labels a number holds, 1..53 (default: 1).
---@field label_names? string[] What the labels are called, each another name (default: `label_0`, `label_1`, ...).

---Precision and recall at the threshold that one would have set to reach a precision: the lowest of 1,000 thresholds
---from 0 to 1 with at least `target_precision`; the highest, if none has it. `compute` gives `hindsight_target_pr` (the
---threshold's index, 0..999), `hindsight_target_precision` and `hindsight_target_recall`, each `lifetime_*` and
---`window_*`.
---
---Errors: an unknown argument; a window_size below 1, a target_precision outside of 0..1; an update with numbers that
---are not of the metric's kind.
---
---```lua
---local metric = peri.nn.metrics.HindsightTargetPRMetric { target_precision = 0.9 }
---metric:update({ 0.9, 0.2, 0.6, 0.4 }, { 1, 0, 0, 1 })
---local values = metric:compute()
---print(values.window_hindsight_target_pr, values.window_hindsight_target_precision) --> 600 1
---print(values.window_hindsight_target_recall) --> 0.5
---```
---@class peri.nn.metrics.HindsightTargetPRMetric: peri.nn.metrics.RecMetric
---@overload fun(args?: peri.nn.metrics.HindsightTargetPRMetric.args): peri.nn.metrics.HindsightTargetPRMetric
metrics.HindsightTargetPRMetric = {}

---@class peri.nn.metrics.HindsightTargetPRMetric.args
---@field window_size? integer Samples of all ranks together that the window holds (default: 10000000).
---@field group? peri.dist.Group|boolean The ranks (default: the world when the first samples come); `false`: this rank alone.
---@field target_precision? number The precision that is wanted, 0..1 (default: 0.5).

---The values of all samples, and of the window's, of all ranks. Collective over the group.
---@return table<string, number>
function metrics.HindsightTargetPRMetric:compute() end
