-- metric_module.lua: Metrics of several tasks, and throughput.
--
-- `peri.nn.metrics.RecMetricModule` holds the metrics of all tasks of a model: one `update` a batch, one `compute` a
-- report, one state for checkpoints. Names are TorchRec's. All else is as said with `peri.nn.metrics`.
---@meta

---@class peri.nn.metrics
local metrics = {}

---The metrics of a model with several tasks. Each task names the columns of the model's output that are its
---predictions, its labels and (optional) its weights and groups; every metric is made for every task.
---
---Errors: an unknown argument; a task without a name, label_name or prediction_name; two tasks of one name; a metric
---that is not there.
---
---```lua
---local module = peri.nn.metrics.RecMetricModule {
---  tasks = { { name = "ctr", label_name = "click", prediction_name = "p_click" },
---    { name = "cvr", label_name = "buy", prediction_name = "p_buy", weight_name = "weight" } },
---  metrics = { NEMetric = { include_logloss = true }, CTRMetric = {} },
---  throughput = { warmup_steps = 1 },
---}
---module:update { click = { 1, 0 }, p_click = { 0.8, 0.3 }, buy = { 1, 0 }, p_buy = { 0.6, 0.1 },
---  weight = { 1, 3 } }
---local values = module:compute()
---print(values["ctr-ctr|lifetime_ctr"], values["ctr-cvr|lifetime_ctr"]) --> 0.5 0.25
---print(values["throughput-throughput|total_examples"]) --> 2
---local copy = peri.nn.metrics.RecMetricModule { tasks = module.tasks,
---  metrics = { CTRMetric = {} } }
---print(copy:check_state_dict {}) --> it is no state of RecMetricModule
---copy:load_state_dict(copy:merge_state_dicts({ copy:state_dict() }, 0, 1))
---copy:reset()
---```
---@class peri.nn.metrics.RecMetricModule
---@overload fun(args: peri.nn.metrics.RecMetricModule.args): peri.nn.metrics.RecMetricModule
metrics.RecMetricModule = {}

---@class peri.nn.metrics.RecMetricModule.args
---@field tasks table[] The tasks: `{ name =, label_name =, prediction_name =, weight_name?, group_name? }`, strings. `group_name`: the column of sessions or segments, for metrics that want one.
---@field metrics table<string, table> Metrics by the name of their class, with their arguments: `{ NEMetric = {}, AUCMetric = { window_size = 1000 } }`.
---@field window_size? integer The window_size of metrics that name none (default: 10000000).
---@field group? peri.dist.Group|boolean The ranks (default: the world when the first samples come); `false`: this rank alone.
---@field throughput? table The arguments of a `ThroughputMetric` (default: none, and no throughput is counted).

---Take in what the model says of a batch.
---
---Errors: a column that a task names is not there; samples that a metric refuses: no metric has taken the batch then.
---@param model_out table<string, peri.Tensor|number[]> The columns by name, each `[B]`.
function metrics.RecMetricModule:update(model_out) end

---The values of all metrics by TorchRec's keys: `"ne-ctr|window_ne"` is the window's `ne` of the task `ctr`.
---Collective over the group.
---@return table<string, number>
function metrics.RecMetricModule:compute() end

---Forget all samples of this rank, as before the first update.
function metrics.RecMetricModule:reset() end

---What this rank has seen, for checkpoints: copies.
---@return table
function metrics.RecMetricModule:state_dict() end

---What keeps a state from being loaded.
---@param dict any What `state_dict` returned.
---@return string|nil # The reason in words; nil: it can be loaded.
function metrics.RecMetricModule:check_state_dict(dict) end

---Go on from a state.
---
---Errors: the state of other tasks or metrics.
---@param dict table What `state_dict` returned.
function metrics.RecMetricModule:load_state_dict(dict) end

---The state of one rank of those of several ranks, to go on with on another number of ranks. Checkpoints ask for it.
---
---Errors: what is no list; a rank outside of 0..size - 1.
---@param list table[] States, one for each rank that there was.
---@param rank integer The rank that wants its part, from 0.
---@param size integer How many ranks there are now.
---@return table|nil # The state; nil and why: there is none.
function metrics.RecMetricModule:merge_state_dicts(list, rank, size) end

---Samples a second of all ranks together. `compute` gives `total_examples`, `warmup_examples` and, once the warm-up is
---over, `lifetime_throughput` and `window_throughput`. The time between a checkpoint and what goes on from it does not
---count.
---
---Errors: an unknown argument; window_seconds or warmup_steps below 1.
---
---```lua
---local metric = peri.nn.metrics.ThroughputMetric { warmup_steps = 1, window_seconds = 10 }
---metric:update(512)
---metric:update(512)
---local values = metric:compute()
---print(values.total_examples, values.lifetime_throughput > 0) --> 1024 true
---local copy = peri.nn.metrics.ThroughputMetric {}
---print(copy:check_state_dict {}) --> it is no state of ThroughputMetric
---copy:load_state_dict(metric:merge_state_dicts({ metric:state_dict() }, 0, 1))
---print(copy:compute().total_examples) --> 1024
---copy:reset()
---```
---@class peri.nn.metrics.ThroughputMetric
---@overload fun(args?: peri.nn.metrics.ThroughputMetric.args): peri.nn.metrics.ThroughputMetric
metrics.ThroughputMetric = {}

---@class peri.nn.metrics.ThroughputMetric.args
---@field window_seconds? integer The window's length (default: 100).
---@field warmup_steps? integer Steps whose time does not count (default: 100).
---@field group? peri.dist.Group|boolean The ranks (default: the world); `false`: this rank alone.
---@field clock? fun(): number What tells the time in seconds (default: the system's clock, which only goes forward).

---A step has trained on samples.
---@param n integer Samples of this rank.
function metrics.ThroughputMetric:update(n) end

---The values by name. Collective over the group.
---@return table<string, number>
function metrics.ThroughputMetric:compute() end

---Forget all samples of this rank; a new warm-up begins.
function metrics.ThroughputMetric:reset() end

---What this rank has counted, for checkpoints.
---@return table
function metrics.ThroughputMetric:state_dict() end

---What keeps a state from being loaded.
---@param dict any What `state_dict` returned.
---@return string|nil # The reason in words; nil: it can be loaded.
function metrics.ThroughputMetric:check_state_dict(dict) end

---Go on from a state. The window begins anew.
---
---Errors: what is no state of this metric.
---@param dict table What `state_dict` returned.
function metrics.ThroughputMetric:load_state_dict(dict) end

---The state of one rank of those of several ranks.
---@param list table[] States, one for each rank that there was.
---@param rank integer The rank that wants its part, from 0.
---@param size integer How many ranks there are now.
---@return table|nil # The state; nil and why: there is none.
function metrics.ThroughputMetric:merge_state_dicts(list, rank, size) end
