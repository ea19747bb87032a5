-- plateau.lua: A learning-rate schedule that follows a metric.
--
-- A schedule of `peri.nn.optim` whose rates follow from a metric, such as the loss of held-out samples, and not from
-- the number of steps alone.
---@meta

---@class peri.nn.optim
local optim = {}

---The rates times `factor` when a metric has stopped getting better. `step(metric)` after each epoch; all ranks
---must give the same metric (a mean over ranks, say). What it has seen is in its `state_dict`;
---it has no `seek` and no `rate`.
---
---Errors: an optimizer without a learning rate; an option out of its range; a metric that is no number.
---
---```lua
---local optimizer = nn.optim.SGD { params = { peri.ones({ 2 }):requires_grad() }, lr = 1 }
---local schedule = nn.optim.ReduceLROnPlateau { optimizer = optimizer, factor = 0.5,
---  patience = 1 }
---for _, loss in ipairs { 0.9, 0.8, 0.8, 0.8 } do schedule:step(loss) end
---print(optimizer:lr(), schedule.best, schedule.num_bad_epochs) --> 0.5 0.8 0
---```
---@class peri.nn.optim.ReduceLROnPlateau: peri.nn.optim.LRScheduler
---@overload fun(args: peri.nn.optim.ReduceLROnPlateau.args): peri.nn.optim.ReduceLROnPlateau
optim.ReduceLROnPlateau = {}

---@class peri.nn.optim.ReduceLROnPlateau.args
---@field optimizer peri.nn.optim.KeyedOptimizer The optimizer.
---@field mode? string `"min"`: a smaller metric is better; `"max"`: a larger one (default: `"min"`).
---@field factor? number From 0 to below 1 (default: 0.1).
---@field patience? integer Steps without a better metric that do not reduce the rates yet (default: 10).
---@field threshold? number By how much a metric must be better to count (default: 1e-4).
---@field threshold_mode? string `"rel"`: a share of the best metric; `"abs"`: a difference (default: `"rel"`).
---@field cooldown? integer Steps after a reduction in which no metric counts as bad (default: 0).
---@field min_lr? number|number[] The smallest rate, or one for each group (default: 0).
---@field eps? number A change of a rate up to this is not made (default: 1e-8).

---One epoch further.
---@param metric number|peri.Tensor Its metric: a number, or a tensor of one element `[]`.
function optim.ReduceLROnPlateau:step(metric) end
