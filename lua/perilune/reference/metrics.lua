-- metrics.lua: Metrics.
--
-- What a model's predictions are worth, over everything seen (`lifetime_*`) and over the last samples (`window_*`).
-- Names and formulas are TorchRec's. Make one object for each task, call `update` with each batch, and `compute` when a
-- report is due. A metric speaks of the samples of all ranks: `compute` is collective where there are several, and
-- gives all of them the same numbers. In shapes, B is the number of samples.
--
-- An update is refused as a whole if a prediction or a label is NaN, a label or weight infinite, a weight negative, or
-- if predictions or labels are not of the kind that the metric wants: entropies want probabilities in 0..1 (not logits)
-- and labels in 0..1. Where a metric means nothing its value is TorchRec's: NE of samples of one class alone is very
-- large (what it divides by is nearly 0), AUC of them is 0.5. Where all weights are 0, entropies, RAUC and
-- `weighted_avg` are NaN, other means, shares and errors 0. Metrics have `state_dict` and `load_state_dict`, which
-- checkpoints take, and which hold on another number of ranks.
---@meta

---@class peri.nn.metrics
local metrics = {}

---@class peri.nn.metrics.args
---@field window_size? integer Samples of all ranks together that the window holds (default: 10000000).
---@field group? peri.dist.Group|boolean The ranks (default: the world when the first samples come); `false`: this rank alone.

---The class above all metrics: what every one of them can do. Make one of those below. A metric of your own is no
---class below this one, but any object that adds up its sums: docs/models.md, "A metric of your own".
---
---Errors: it is no metric itself.
---
---```lua
---local metric, copy = peri.nn.metrics.MSEMetric {}, peri.nn.metrics.MSEMetric {}
---metric:update({ 0.5, 1 }, { 1, 1 })
---local state = metric:merge_state_dicts({ metric:state_dict() }, 0, 1)
---print(copy:check_state_dict(state), copy:check_state_dict {})
-----> nil it is a state of nil, wanted one of MSEMetric
---copy:load_state_dict(state)
---print(copy:compute().lifetime_mse, peri.nn.metrics.RecMetric.is(copy)) --> 0.125 true
---copy:reset()
---print(copy:compute().lifetime_mse) --> nil
---```
---@class peri.nn.metrics.RecMetric
metrics.RecMetric = {}

---Take the samples of a batch in.
---
---Errors: other numbers of labels or weights than predictions; numbers that are not of the metric's kind; then nothing
---is taken in.
---@param predictions peri.Tensor|number[] What the model says: `[B]` (of several classes `[B, classes]`).
---@param labels peri.Tensor|number[] What was right: `[B]`.
---@param weights? peri.Tensor|number[] What each sample counts: `[B]` (default: 1 each).
---@param ... any Metrics of sessions and segments, NDCGMetric: the group of each sample, `[B]`: whole numbers of 64 bits.
function metrics.RecMetric:update(predictions, labels, weights, ...) end

---The values by name, `lifetime_*` and `window_*`. Before the first update of any rank there are none. Collective over
---the group.
---@return table<string, number>
function metrics.RecMetric:compute() end

---Forget all samples of this rank, as before the first update.
function metrics.RecMetric:reset() end

---What this rank has seen, for checkpoints: copies.
---@return table
function metrics.RecMetric:state_dict() end

---What keeps a state from being loaded.
---
---Errors: none.
---@param dict any What `state_dict` returned.
---@return string|nil # The reason in words; nil: it can be loaded.
function metrics.RecMetric:check_state_dict(dict) end

---Go on from a state. A window that is smaller here keeps the newest samples.
---
---Errors: the state of another metric, or of other options.
---@param dict table What `state_dict` returned.
function metrics.RecMetric:load_state_dict(dict) end

---The state of one rank of those of several ranks, to go on with on another number of ranks. Checkpoints ask for it.
---
---Errors: what is no list; a rank outside of 0..size - 1.
---@param list table[] States, one for each rank that there was.
---@param rank integer The rank that wants its part, from 0.
---@param size integer How many ranks there are now.
---@return table|nil # The state; nil and why: there is none, as with `group = false`.
function metrics.RecMetric:merge_state_dicts(list, rank, size) end

---Normalized entropy: the cross entropy of the predictions, divided by that of a model that always says the share of
---positive samples. Below 1 the model knows more than that share. With `include_logloss` also `lifetime_logloss` and
---`window_logloss` (natural logarithm). `compute` gives `lifetime_ne`, `window_ne`.
---
---Errors: an unknown argument; a window_size below 1; an update with numbers that are not of the metric's kind.
---
---```lua
---local metric = peri.nn.metrics.NEMetric {}
---metric:update({ 0.9, 0.2, 0.6 }, { 1, 0, 0 })
---print(("%.4f"):format(metric:compute().lifetime_ne)) --> 0.6519
---```
---@class peri.nn.metrics.NEMetric: peri.nn.metrics.RecMetric
---@overload fun(args?: peri.nn.metrics.NEMetric.args): peri.nn.metrics.NEMetric
metrics.NEMetric = {}

---@class peri.nn.metrics.NEMetric.args
---@field window_size? integer Samples of all ranks together that the window holds (default: 10000000).
---@field group? peri.dist.Group|boolean The ranks (default: the world when the first samples come); `false`: this rank alone.
---@field include_logloss? boolean Whether `compute` tells the cross entropy itself too (default: false).

---The part of the normalized entropy that positive samples make.
---`compute` gives `lifetime_ne_positive`, `window_ne_positive`.
---
---Errors: an unknown argument; a window_size below 1; an update with numbers that are not of the metric's kind.
---
---```lua
---local metric = peri.nn.metrics.NEPositiveMetric {}
---metric:update({ 0.9, 0.2, 0.6 }, { 1, 0, 0 })
---print(("%.4f"):format(metric:compute().lifetime_ne_positive)) --> 0.0552
---```
---@class peri.nn.metrics.NEPositiveMetric: peri.nn.metrics.RecMetric
---@overload fun(args?: peri.nn.metrics.args): peri.nn.metrics.NEPositiveMetric
metrics.NEPositiveMetric = {}

---Normalized entropy in which all samples count alike, whatever their weights.
---`compute` gives `lifetime_unweighted_ne`, `window_unweighted_ne`.
---
---Errors: an unknown argument; a window_size below 1; an update with numbers that are not of the metric's kind.
---
---```lua
---local metric = peri.nn.metrics.UnweightedNEMetric {}
---metric:update({ 0.9, 0.2, 0.6 }, { 1, 0, 0 })
---print(("%.4f"):format(metric:compute().lifetime_unweighted_ne)) --> 0.6519
---```
---@class peri.nn.metrics.UnweightedNEMetric: peri.nn.metrics.RecMetric
---@overload fun(args?: peri.nn.metrics.args): peri.nn.metrics.UnweightedNEMetric
metrics.UnweightedNEMetric = {}

---Normalized entropy of the predictions as they would be if their mean were right: what is left of it without
---miscalibration. `compute` gives `lifetime_cali_free_ne`, `window_cali_free_ne`.
---
---Errors: an unknown argument; a window_size below 1; an update with numbers that are not of the metric's kind.
---
---```lua
---local metric = peri.nn.metrics.CaliFreeNEMetric {}
---metric:update({ 0.9, 0.2, 0.6 }, { 1, 0, 0 })
---print(("%.4f"):format(metric:compute().lifetime_cali_free_ne)) --> 0.2017
---```
---@class peri.nn.metrics.CaliFreeNEMetric: peri.nn.metrics.RecMetric
---@overload fun(args?: peri.nn.metrics.args): peri.nn.metrics.CaliFreeNEMetric
metrics.CaliFreeNEMetric = {}

---Sum of the predictions divided by the sum of the labels: 1 is calibrated, above it the model promises too much.
---`compute` gives `lifetime_calibration`, `window_calibration`.
---
---Errors: an unknown argument; a window_size below 1; an update with numbers that are not of the metric's kind.
---
---```lua
---local metric = peri.nn.metrics.CalibrationMetric {}
---metric:update({ 0.9, 0.2, 0.6 }, { 1, 0, 0 })
---print(("%.4f"):format(metric:compute().lifetime_calibration)) --> 1.7000
---```
---@class peri.nn.metrics.CalibrationMetric: peri.nn.metrics.RecMetric
---@overload fun(args?: peri.nn.metrics.args): peri.nn.metrics.CalibrationMetric
metrics.CalibrationMetric = {}

---The share of positive samples, by weight.
---`compute` gives `lifetime_ctr`, `window_ctr`.
---
---Errors: an unknown argument; a window_size below 1; an update with numbers that are not of the metric's kind.
---
---```lua
---local metric = peri.nn.metrics.CTRMetric {}
---metric:update({ 0.9, 0.2, 0.6 }, { 1, 0, 0 })
---print(("%.4f"):format(metric:compute().lifetime_ctr)) --> 0.3333
---```
---@class peri.nn.metrics.CTRMetric: peri.nn.metrics.RecMetric
---@overload fun(args?: peri.nn.metrics.args): peri.nn.metrics.CTRMetric
metrics.CTRMetric = {}

---The means of labels and predictions, by weight. `compute` gives `lifetime_label_average`, `window_label_average` and
---`lifetime_prediction_average`, `window_prediction_average`.
---
---Errors: an unknown argument; a window_size below 1; an update with numbers that are not of the metric's kind.
---
---```lua
---local metric = peri.nn.metrics.AverageMetric {}
---metric:update({ 0.9, 0.2, 0.6 }, { 1, 0, 0 })
---print(("%.4f"):format(metric:compute().lifetime_label_average)) --> 0.3333
---```
---@class peri.nn.metrics.AverageMetric: peri.nn.metrics.RecMetric
---@overload fun(args?: peri.nn.metrics.args): peri.nn.metrics.AverageMetric
metrics.AverageMetric = {}

---The mean of the predictions, by weight.
---`compute` gives `lifetime_weighted_avg`, `window_weighted_avg`.
---
---Errors: an unknown argument; a window_size below 1; an update with numbers that are not of the metric's kind.
---
---```lua
---local metric = peri.nn.metrics.WeightedAvgMetric {}
---metric:update({ 0.9, 0.2, 0.6 }, { 1, 0, 0 })
---print(("%.4f"):format(metric:compute().lifetime_weighted_avg)) --> 0.5667
---```
---@class peri.nn.metrics.WeightedAvgMetric: peri.nn.metrics.RecMetric
---@overload fun(args?: peri.nn.metrics.args): peri.nn.metrics.WeightedAvgMetric
metrics.WeightedAvgMetric = {}

---Mean square error and its root; with `include_r_squared` also R squared, 1 less the error over that of the labels'
---mean. `compute` gives `lifetime_mse`, `window_mse`, `lifetime_rmse`, `window_rmse` (and `lifetime_r_squared`,
---`window_r_squared`).
---
---Errors: an unknown argument; a window_size below 1; an update with numbers that are not of the metric's kind.
---
---```lua
---local metric = peri.nn.metrics.MSEMetric {}
---metric:update({ 0.9, 0.2, 0.6 }, { 1, 0, 0 })
---print(("%.4f"):format(metric:compute().lifetime_mse)) --> 0.1367
---```
---@class peri.nn.metrics.MSEMetric: peri.nn.metrics.RecMetric
---@overload fun(args?: peri.nn.metrics.MSEMetric.args): peri.nn.metrics.MSEMetric
metrics.MSEMetric = {}

---@class peri.nn.metrics.MSEMetric.args
---@field window_size? integer Samples of all ranks together that the window holds (default: 10000000).
---@field group? peri.dist.Group|boolean The ranks (default: the world when the first samples come); `false`: this rank alone.
---@field include_r_squared? boolean Whether `compute` tells R squared too (default: false).

---Mean square error, divided by that of a model that always says 1, and its root.
---`compute` gives `lifetime_nmse`, `window_nmse` and `lifetime_nrmse`, `window_nrmse`.
---
---Errors: an unknown argument; a window_size below 1; an update with numbers that are not of the metric's kind.
---
---```lua
---local metric = peri.nn.metrics.NMSEMetric {}
---metric:update({ 0.9, 0.2, 0.6 }, { 1, 0, 0 })
---print(("%.4f"):format(metric:compute().lifetime_nmse)) --> 0.2050
---```
---@class peri.nn.metrics.NMSEMetric: peri.nn.metrics.RecMetric
---@overload fun(args?: peri.nn.metrics.args): peri.nn.metrics.NMSEMetric
metrics.NMSEMetric = {}

---Mean absolute error.
---`compute` gives `lifetime_mae`, `window_mae`.
---
---Errors: an unknown argument; a window_size below 1; an update with numbers that are not of the metric's kind.
---
---```lua
---local metric = peri.nn.metrics.MAEMetric {}
---metric:update({ 0.9, 0.2, 0.6 }, { 1, 0, 0 })
---print(("%.4f"):format(metric:compute().lifetime_mae)) --> 0.3000
---```
---@class peri.nn.metrics.MAEMetric: peri.nn.metrics.RecMetric
---@overload fun(args?: peri.nn.metrics.args): peri.nn.metrics.MAEMetric
metrics.MAEMetric = {}

---The share of samples, by weight, whose prediction is on the label's side of the threshold.
---`compute` gives `lifetime_accuracy`, `window_accuracy`.
---
---Errors: an unknown argument; a window_size below 1; an update with numbers that are not of the metric's kind.
---
---```lua
---local metric = peri.nn.metrics.AccuracyMetric {}
---metric:update({ 0.9, 0.2, 0.6 }, { 1, 0, 0 })
---print(("%.4f"):format(metric:compute().lifetime_accuracy)) --> 0.6667
---```
---@class peri.nn.metrics.AccuracyMetric: peri.nn.metrics.RecMetric
---@overload fun(args?: peri.nn.metrics.AccuracyMetric.args): peri.nn.metrics.AccuracyMetric
metrics.AccuracyMetric = {}

---@class peri.nn.metrics.AccuracyMetric.args
---@field window_size? integer Samples of all ranks together that the window holds (default: 10000000).
---@field group? peri.dist.Group|boolean The ranks (default: the world when the first samples come); `false`: this rank alone.
---@field threshold? number Predictions from this on are taken for 1 (default: 0.5).

---Of the samples that are taken for 1, the share that are 1.
---`compute` gives `lifetime_precision`, `window_precision`.
---
---Errors: an unknown argument; a window_size below 1; an update with numbers that are not of the metric's kind.
---
---```lua
---local metric = peri.nn.metrics.PrecisionMetric {}
---metric:update({ 0.9, 0.2, 0.6 }, { 1, 0, 0 })
---print(("%.4f"):format(metric:compute().lifetime_precision)) --> 0.5000
---```
---@class peri.nn.metrics.PrecisionMetric: peri.nn.metrics.RecMetric
---@overload fun(args?: peri.nn.metrics.PrecisionMetric.args): peri.nn.metrics.PrecisionMetric
metrics.PrecisionMetric = {}

---@class peri.nn.metrics.PrecisionMetric.args
---@field window_size? integer Samples of all ranks together that the window holds (default: 10000000).
---@field group? peri.dist.Group|boolean The ranks (default: the world when the first samples come); `false`: this rank alone.
---@field threshold? number Predictions from this on are taken for 1 (default: 0.5).

---Of the samples that are 1, the share that are taken for 1.
---`compute` gives `lifetime_recall`, `window_recall`.
---
---Errors: an unknown argument; a window_size below 1; an update with numbers that are not of the metric's kind.
---
---```lua
---local metric = peri.nn.metrics.RecallMetric {}
---metric:update({ 0.9, 0.2, 0.6 }, { 1, 0, 0 })
---print(("%.4f"):format(metric:compute().lifetime_recall)) --> 1.0000
---```
---@class peri.nn.metrics.RecallMetric: peri.nn.metrics.RecMetric
---@overload fun(args?: peri.nn.metrics.RecallMetric.args): peri.nn.metrics.RecallMetric
metrics.RecallMetric = {}

---@class peri.nn.metrics.RecallMetric.args
---@field window_size? integer Samples of all ranks together that the window holds (default: 10000000).
---@field group? peri.dist.Group|boolean The ranks (default: the world when the first samples come); `false`: this rank alone.
---@field threshold? number Predictions from this on are taken for 1 (default: 0.5).

---The share of pairs of samples (of one update, by weight) that predictions and labels put into the same order.
---`compute` gives `lifetime_xauc`, `window_xauc`.
---
---Errors: an unknown argument; a window_size below 1; an update with numbers that are not of the metric's kind.
---
---```lua
---local metric = peri.nn.metrics.XAUCMetric {}
---metric:update({ 0.9, 0.2, 0.6 }, { 1, 0, 0 })
---print(("%.4f"):format(metric:compute().lifetime_xauc)) --> 0.6667
---```
---@class peri.nn.metrics.XAUCMetric: peri.nn.metrics.RecMetric
---@overload fun(args?: peri.nn.metrics.args): peri.nn.metrics.XAUCMetric
metrics.XAUCMetric = {}

---How often the right class is among the k most likely ones, for k = 1, 2, ... Predictions are `[B, classes]`, labels
---whole numbers from 0. `compute` gives the lists `lifetime_multiclass_recall` and `window_multiclass_recall`; entry k
---is recall at k.
---
---Errors: an unknown argument; a window_size below 1; an update with numbers that are not of the metric's kind.
---
---```lua
---local metric = peri.nn.metrics.MulticlassRecallMetric { number_of_classes = 3 }
---metric:update(peri.tensor { { 0.2, 0.5, 0.3 }, { 0.6, 0.3, 0.1 } }, { 2, 0 })
---print(table.concat(metric:compute().lifetime_multiclass_recall, " ")) --> 0.5 1 1
---```
---@class peri.nn.metrics.MulticlassRecallMetric: peri.nn.metrics.RecMetric
---@overload fun(args: peri.nn.metrics.MulticlassRecallMetric.args): peri.nn.metrics.MulticlassRecallMetric
metrics.MulticlassRecallMetric = {}

---@class peri.nn.metrics.MulticlassRecallMetric.args
---@field window_size? integer Samples of all ranks together that the window holds (default: 10000000).
---@field group? peri.dist.Group|boolean The ranks (default: the world when the first samples come); `false`: this rank alone.
---@field number_of_classes integer How many classes there are.

---Normalized discounted cumulative gain: how well each session (a request, a user) is ordered, as a mean over sessions.
---`update` takes a fourth argument: the session of each sample, `[B]`. All samples of a session belong into one update.
---By default `compute` gives 1 - NDCG, which falls as a model learns, under `lifetime_ndcg` and `window_ndcg`, as
---TorchRec does.
---
---Errors: an unknown argument; a window_size below 1; an update with numbers that are not of the metric's kind.
---
---```lua
---local metric = peri.nn.metrics.NDCGMetric { report_ndcg_as_decreasing_curve = false }
---metric:update({ 0.9, 0.1, 0.2, 0.7 }, { 1, 0, 1, 0 }, nil, { 5, 5, 6, 6 })
---print(("%.4f"):format(metric:compute().lifetime_ndcg)) --> 0.8155
---```
---@class peri.nn.metrics.NDCGMetric: peri.nn.metrics.RecMetric
---@overload fun(args?: peri.nn.metrics.NDCGMetric.args): peri.nn.metrics.NDCGMetric
metrics.NDCGMetric = {}

---@class peri.nn.metrics.NDCGMetric.args
---@field window_size? integer Samples of all ranks together that the window holds (default: 10000000).
---@field group? peri.dist.Group|boolean The ranks (default: the world when the first samples come); `false`: this rank alone.
---@field k? integer Only the first k of a session count (default: -1), all of them.
---@field exponential_gain? boolean A label y is worth 2^y - 1 instead of y (default: false).
---@field report_ndcg_as_decreasing_curve? boolean Give 1 - NDCG; false: NDCG (default: true).
---@field remove_single_length_sessions? boolean Leave sessions of one sample out (default: false).
---@field scale_by_weights_tensor? boolean Weights multiply predictions and labels, instead of sessions (default: false).

---Area under the ROC curve of the window: how probably a positive sample has a higher prediction than a negative one;
---equal ones count half. Predictions may be logits. It keeps the window's samples: 24 bytes each. `compute` gives
---`window_auc`.
---
---Errors: an unknown argument; a window_size below 1; an update with numbers that are not of the metric's kind.
---
---```lua
---local metric = peri.nn.metrics.AUCMetric { window_size = 100000 }
---metric:update({ 0.9, 0.2, 0.6, 0.4 }, { 1, 0, 0, 1 })
---print(("%.4f"):format(metric:compute().window_auc)) --> 0.7500
---```
---@class peri.nn.metrics.AUCMetric: peri.nn.metrics.RecMetric
---@overload fun(args?: peri.nn.metrics.args): peri.nn.metrics.AUCMetric
metrics.AUCMetric = {}

---The values of the window's samples of all ranks. Collective over the group.
---@return table<string, number>
function metrics.AUCMetric:compute() end

---AUC of regression, over the window: the share of pairs, weighted by both, that predictions and labels do not put into
---opposite orders. It keeps the window's samples: 24 bytes each. `compute` gives `window_rauc`.
---
---Errors: an unknown argument; a window_size below 1; an update with numbers that are not of the metric's kind.
---
---```lua
---local metric = peri.nn.metrics.RAUCMetric { window_size = 100000 }
---metric:update({ 0.9, 0.2, 0.6, 0.4 }, { 1, 0, 0, 1 })
---print(("%.4f"):format(metric:compute().window_rauc)) --> 0.8333
---```
---@class peri.nn.metrics.RAUCMetric: peri.nn.metrics.RecMetric
---@overload fun(args?: peri.nn.metrics.args): peri.nn.metrics.RAUCMetric
metrics.RAUCMetric = {}

---The values of the window's samples of all ranks. Collective over the group.
---@return table<string, number>
function metrics.RAUCMetric:compute() end

---Area under the curve of precision and recall (average precision): of the window, and over everything from a histogram
---of 1,000 bins of predictions. It keeps the window's samples: 24 bytes each. `compute` gives `window_auprc` and
---`lifetime_auprc`.
---
---Errors: an unknown argument; a window_size below 1; an update with numbers that are not of the metric's kind.
---
---```lua
---local metric = peri.nn.metrics.AUPRCMetric { window_size = 100000 }
---metric:update({ 0.9, 0.2, 0.6, 0.4 }, { 1, 0, 0, 1 })
---print(("%.4f"):format(metric:compute().window_auprc)) --> 0.8333
---```
---@class peri.nn.metrics.AUPRCMetric: peri.nn.metrics.RecMetric
---@overload fun(args?: peri.nn.metrics.args): peri.nn.metrics.AUPRCMetric
metrics.AUPRCMetric = {}

---The values of the window's samples of all ranks. Collective over the group.
---@return table<string, number>
function metrics.AUPRCMetric:compute() end

---AUC of these samples, of this rank alone. Nothing is collective.
---
---Errors: a prediction that is NaN; labels outside of 0..1; weights that are negative or not finite.
---
---```lua
---print(peri.nn.metrics.auc({ 0.9, 0.2, 0.6, 0.4 }, { 1, 0, 0, 1 })) --> 0.75
---```
---@param predictions peri.Tensor|number[] What the model says: `[B]`; logits or probabilities.
---@param labels peri.Tensor|number[] What was right: `[B]`.
---@param weights? peri.Tensor|number[] What each sample counts: `[B]` (default: 1 each).
---@return number
function metrics.auc(predictions, labels, weights) end

---What a report says about these samples, of this rank alone: `samples`, `auc`, `ne`, `logloss` (natural logarithm),
---`calibration`, `ctr`, `accuracy`. Nothing is collective.
---
---Errors: predictions or labels outside of 0..1.
---
---```lua
---local report = peri.nn.metrics.evaluate({ 0.9, 0.2, 0.6, 0.4 }, { 1, 0, 0, 1 })
---print(report.auc, report.accuracy, report.ctr) --> 0.75 0.5 0.5
---```
---@param predictions peri.Tensor|number[] Probabilities: `[B]`.
---@param labels peri.Tensor|number[] What was right: `[B]`.
---@param weights? peri.Tensor|number[] What each sample counts: `[B]` (default: 1 each).
---@return table<string, number>
function metrics.evaluate(predictions, labels, weights) end
