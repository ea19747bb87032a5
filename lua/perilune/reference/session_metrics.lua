-- session_metrics.lua: Metrics of sessions and segments, and files for TensorBoard.
--
-- Metrics of groups of samples: of sessions (what was shown together: one user's, one request's), and of segments (a
-- country, a device). `update(predictions, labels, weights, groups)` takes the group of each sample: a list of numbers
-- or a tensor `[B]`. All else is as said with `peri.nn.metrics`.
---@meta

---@class peri.nn.metrics
local metrics = {}

---GAUC: the mean over sessions of the area under the ROC curve within each. Sessions whose labels or predictions are
---all the same do not count. `compute` gives `lifetime_gauc`, `window_gauc` (0.5 without a session that counts) and
---`lifetime_gauc_num_samples`, `window_gauc_num_samples`: the sessions that counted. Sessions of different updates, and
---of different ranks, are different ones.
---
---Errors: an unknown argument; a window_size below 1; an update without sessions, or with labels outside of 0..1.
---
---```lua
---local metric = peri.nn.metrics.GAUCMetric {}
---metric:update({ 0.9, 0.2, 0.6, 0.4 }, { 1, 0, 0, 1 }, nil, { 1, 1, 2, 2 })
---print(metric:compute().lifetime_gauc) --> 0.5
---```
---@class peri.nn.metrics.GAUCMetric: peri.nn.metrics.RecMetric
---@overload fun(args?: peri.nn.metrics.args): peri.nn.metrics.GAUCMetric
metrics.GAUCMetric = {}

---Recall at k: which share of the positive samples is among the `top_threshold` highest predictions of its session. Of
---equal predictions all count as the highest of them. `compute` gives `lifetime_recall_session_level`,
---`window_recall_session_level`; NaN without positive samples.
---
---Errors: an unknown argument; a top_threshold below 1; an update without sessions, or with labels outside of 0..1.
---
---```lua
---local metric = peri.nn.metrics.RecallSessionMetric { top_threshold = 1 }
---metric:update({ 0.9, 0.2, 0.6, 0.4 }, { 1, 0, 0, 1 }, nil, { 1, 1, 2, 2 })
---print(metric:compute().lifetime_recall_session_level) --> 0.5
---```
---@class peri.nn.metrics.RecallSessionMetric: peri.nn.metrics.RecMetric
---@overload fun(args: peri.nn.metrics.session.args): peri.nn.metrics.RecallSessionMetric
metrics.RecallSessionMetric = {}

---@class peri.nn.metrics.session.args
---@field top_threshold integer The k: how many samples of each session are shown.
---@field run_ranking_of_labels? boolean The positive samples of a session are those of its k highest labels, of any size (default: false).
---@field window_size? integer Samples of all ranks together that the window holds (default: 10000000).
---@field group? peri.dist.Group|boolean The ranks (default: the world when the first samples come); `false`: this rank alone.

---Precision at k: which share of the `top_threshold` highest predictions of the sessions is positive. `compute` gives
---`lifetime_precision_session_level`, `window_precision_session_level`.
---
---Errors: an unknown argument; a top_threshold below 1; an update without sessions, or with labels outside of 0..1.
---
---```lua
---local metric = peri.nn.metrics.PrecisionSessionMetric { top_threshold = 1 }
---metric:update({ 0.9, 0.2, 0.6, 0.4 }, { 1, 0, 0, 1 }, nil, { 1, 1, 2, 2 })
---print(metric:compute().lifetime_precision_session_level) --> 0.5
---```
---@class peri.nn.metrics.PrecisionSessionMetric: peri.nn.metrics.RecMetric
---@overload fun(args: peri.nn.metrics.session.args): peri.nn.metrics.PrecisionSessionMetric
metrics.PrecisionSessionMetric = {}

---The normalized entropy of each segment. `update` takes the segment of each sample, a whole number from 0 on.
---`compute` gives `lifetime_segmented_ne_0`, `window_segmented_ne_0`, and so on; NaN for a segment without samples.
---
---Errors: an unknown argument; num_groups below 1; an update with a segment that is not below num_groups, or with
---logits.
---
---```lua
---local metric = peri.nn.metrics.SegmentedNEMetric { num_groups = 2 }
---metric:update({ 0.9, 0.2, 0.6, 0.4 }, { 1, 0, 0, 1 }, nil, { 0, 0, 1, 1 })
---print(("%.3f"):format(metric:compute().lifetime_segmented_ne_1)) --> 1.322
---```
---@class peri.nn.metrics.SegmentedNEMetric: peri.nn.metrics.RecMetric
---@overload fun(args: peri.nn.metrics.SegmentedNEMetric.args): peri.nn.metrics.SegmentedNEMetric
metrics.SegmentedNEMetric = {}

---@class peri.nn.metrics.SegmentedNEMetric.args
---@field num_groups integer The segments.
---@field window_size? integer Samples of all ranks together that the window holds (default: 10000000).
---@field group? peri.dist.Group|boolean The ranks (default: the world when the first samples come); `false`: this rank alone.

---Writes numbers of a run into files from which they can be plotted. `folder` gets an event file, which TensorBoard
---reads: `tensorboard --logdir FOLDER`. Each writer makes a file of its own, and TensorBoard takes all files of a
---folder for one run, so a run that goes on with `--resume` adds to its curves. `log` is a file of JSON lines (jsonl),
---such as `{"step":100,"loss":0.7}`: what is added is appended, a line for each call, and `perilune compare a.jsonl
---b.jsonl` draws such files, one run over the other, in the terminal. One rank writes.
---
---Errors: neither a folder nor a log; a file that cannot be made; a step that is not whole, or below 0; a value that is
---no number; a writer that is closed.
---
---```lua
---local folder = os.tmpname() .. ".events"
---local writer = peri.nn.metrics.SummaryWriter { folder = folder }
---writer:add_scalar("loss", 0.7, 100)
---local ne = peri.nn.metrics.NEMetric {}
---ne:update({ 0.9, 0.2 }, { 1, 0 })
---writer:add_scalars(ne:compute(), 100)
---writer:flush()
---writer:close()
---print(writer.path:match "events%.out%.tfevents") --> events.out.tfevents
---os.execute("rm -r " .. folder)
---
---local path = os.tmpname()
---writer = peri.nn.metrics.SummaryWriter { log = path }
---writer:add_scalars({ loss = 0.7, auc = 0.5 }, 100)
---writer:close()
---for line in io.lines(path) do print(line) end --> {"step":100,"auc":0.5,"loss":0.7}
---os.remove(path)
---```
---@class peri.nn.metrics.SummaryWriter
---@overload fun(args: peri.nn.metrics.SummaryWriter.args): peri.nn.metrics.SummaryWriter
metrics.SummaryWriter = {}

---@class peri.nn.metrics.SummaryWriter.args
---@field folder? string Where the event file goes; it is made if it is not there (default: no event file).
---@field log? string The file of JSON lines, to whose end lines are added (default: none).
---@field overwrite? boolean The log begins anew (default: false).

---Add a number of a step. In the log NaN and infinities are `null`.
---
---Errors: a value that is no number; a step that is not whole, or below 0.
---@param tag string Its name, such as `loss` or `validation/auc`.
---@param value number The number, which the event file has as f32.
---@param step integer The step.
function metrics.SummaryWriter:add_scalar(tag, value, step) end

---Add all numbers of a table, such as `metric:compute()`: each under its key, those of tables within it under
---`outer/inner`.
---
---Errors: a step that is not whole, or below 0.
---@param values table Numbers by name; what is no number is left out.
---@param step integer The step.
function metrics.SummaryWriter:add_scalars(values, step) end

---Let what was added be in the event file. Lines of the log are there at once.
function metrics.SummaryWriter:flush() end

---Complete the files. The garbage collector does so too.
function metrics.SummaryWriter:close() end
