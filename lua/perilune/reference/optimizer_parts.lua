-- optimizer_parts.lua: Optimizers of one's own, wrappers, learning-rate schedules.
--
-- All optimizers here are keyed: their state has the names of parameters, so that it can be saved, and loaded into a
-- run with another plan. Names, formulas and defaults are PyTorch's and TorchRec's.
---@meta

---@class peri.nn.optim
local optim = {}

---The base of all optimizers. For one of your own make a class below it, with a method `step`; `param_groups[i].lr =
---0.1` then changes a number at once. Methods that must be there for a state in other places than `state`:
---`named_state`, `check_state`, `assign_state`.
---
---Errors: a parameter that is no tensor; state of a parameter that is not there; a state_dict that does not fit, all of
---it named.
---
---```lua
---local w = peri.ones({ 2 }):requires_grad()
---local Plain = require("perilune.util").class("Plain", nn.optim.KeyedOptimizer)
---function Plain:step()
---  for _, p in ipairs(self.params) do p:detach():copy(p:detach() - p:grad() * self:lr()) end
---end
---local groups = { { lr = 0.5, momentum = 0 } }
---local optimizer = Plain { params = { w = w }, state = { w = { seen = peri.zeros { 1 } } },
---  param_groups = groups }
---w:sum():backward()
---optimizer:step()
---optimizer:zero_grad()
---print(w:item(0), optimizer:lr(), optimizer:state()["w.seen"]:item(),
---  optimizer:named_state()[1].key) --> 0.5 0.5 0 seen
---optimizer:set_lr(0.1)
---optimizer:set_momentum(0.9)
---local dict = optimizer:state_dict()
---print(dict.param_groups[1].lr, dict.state.w.seen:numel(), optimizer:check_state_dict(dict))
-----> 0.1 1 nil
---optimizer:save_param_groups(true)
---optimizer:load_state_dict(dict)
---optimizer:post_load_state_dict()
---optimizer:init_state()
---print(#optimizer:named_groups(), #optimizer:state_groups(),
---  #optimizer:check_state { ["w.seen"] = peri.zeros { 3 } }) --> 1 0 1
---optimizer:assign_state { ["w.seen"] = peri.ones { 1 } }
---print(optimizer:state()["w.seen"]:item(), (pcall(optimizer.add_param_group, optimizer)))
-----> 1 false
---```
---@class peri.nn.optim.KeyedOptimizer
---@overload fun(args: peri.nn.optim.KeyedOptimizer.args): peri.nn.optim.KeyedOptimizer
optim.KeyedOptimizer = {}

---@class peri.nn.optim.KeyedOptimizer.args
---@field params table<string, peri.Tensor> Parameters by name, of any shape.
---@field state? table Name -> key -> tensor of any shape (default: none).
---@field param_groups? table[] `{ params = names (all), lr =, ... }` each (default: none).

---Update the parameters. Each class has its own.
function optim.KeyedOptimizer:step() end

---Drop all gradients.
function optim.KeyedOptimizer:zero_grad() end

---The learning rate of the first group.
---@return number
function optim.KeyedOptimizer:lr() end

---The learning rate of all groups from now on.
---@param lr number The rate.
function optim.KeyedOptimizer:set_lr(lr) end

---The momentum of all groups from now on: what schedules that cycle it call.
---@param value number The momentum.
function optim.KeyedOptimizer:set_momentum(value) end

---The state as one map.
---@return table<string, peri.Tensor> # `parameter.key` -> a live tensor, of any shape.
function optim.KeyedOptimizer:state() end

---The state as a list, in a fixed order.
---@return table[] # `{ name =, tensor =, parameter =, key = }` each.
function optim.KeyedOptimizer:named_state() end

---The groups with the names of their parameters, as the whole optimizer has them.
---@return table[] # `{ params = names, group = }` each.
function optim.KeyedOptimizer:named_groups() end

---The groups of ranks that have this optimizer together, each rank with its part: `load_state_dict` is collective over
---these.
---@return peri.dist.Group[]
function optim.KeyedOptimizer:state_groups() end

---Everything that must be saved: live tensors by parameter and key, and the numbers of the groups.
---`state_dict():clone()` is a copy. Local.
---@return table # `{ state = { parameter = { key = tensor } }, param_groups = { { params = names, lr =, ... } } }`.
function optim.KeyedOptimizer:state_dict() end

---Restore a state_dict. Groups are found by the names of their parameters. What does not fit is one error that lists
---all of it, and nothing is changed, on any rank.
---@param dict table What `state_dict` returned, here or under another plan.
function optim.KeyedOptimizer:load_state_dict(dict) end

---What keeps `load_state_dict` from loading, in words. It changes nothing. Local.
---@param dict table The state_dict.
---@return string|nil # nil: it would load.
function optim.KeyedOptimizer:check_state_dict(dict) end

---For classes with a state of their own: what of a map does not fit.
---@param map table<string, peri.Tensor> Names of `named_state` -> tensors of the same shapes.
---@param prefix? string Put before names in the texts (default: none).
---@return string[]
function optim.KeyedOptimizer:check_state(map, prefix) end

---For classes with a state of their own: take over a whole map that `check_state` has nothing against.
---@param map table<string, peri.Tensor> Names of `named_state` -> tensors of the same shapes.
function optim.KeyedOptimizer:assign_state(map) end

---Called when a state_dict was loaded; for classes that keep more. Here it does nothing.
function optim.KeyedOptimizer:post_load_state_dict() end

---Whether state_dicts have the numbers of the groups, and loading sets them. At first they do.
---@param on? boolean On or off (default: true).
function optim.KeyedOptimizer:save_param_groups(on) end

---TorchRec's; states are there from the start, so it does nothing.
function optim.KeyedOptimizer:init_state() end

---Add a group of parameters. Optimizers of `nn.optim`, and wrappers around them, have it; of several in one
---(`CombinedOptimizer`), each.
---
---Errors: an optimizer of one's own or of fused tables, whose parameters are given when it is made.
---@param group table `{ params =, lr =, ... }`.
function optim.KeyedOptimizer:add_param_group(group) end

---The optimizer that a function makes of a map of parameters.
---
---Errors: a parameter that is no tensor; a function that returns no optimizer; names of numbers that it does not have.
---
---```lua
---local w = peri.ones({ 2 }):requires_grad()
---local keyed = nn.optim.KeyedOptimizerWrapper({ w = w }, function(params)
---  return nn.optim.SGD { params = params, lr = 0.5 }
---end)
---keyed:set("weight_decay", 0.1)
---print(keyed:get("weight_decay"), keyed.names[1]) --> 0.1 w
---```
---@class peri.nn.optim.KeyedOptimizerWrapper: peri.nn.optim.OptimizerWrapper
---@param params table<string, peri.Tensor> Parameters by name, of any shape.
---@param factory function Gets a list of `{ name =, tensor = }`, returns an optimizer.
---@overload fun(params: table<string, peri.Tensor>, factory: function): peri.nn.optim.KeyedOptimizerWrapper
optim.KeyedOptimizerWrapper = {}

---A number of the optimizer, as `Optimizer:get`.
---@param name string Such as `weight_decay`.
---@return number
function optim.KeyedOptimizerWrapper:get(name) end

---Change such a number, as `Optimizer:set`.
---@param name string Such as `weight_decay`.
---@param value number The value from now on.
function optim.KeyedOptimizerWrapper:set(name, value) end

---The base of wrappers: hands everything on to another optimizer.
---
---Errors: what is no optimizer.
---
---```lua
---local w = peri.ones({ 2 }):requires_grad()
---local wrapper = nn.optim.OptimizerWrapper(nn.optim.SGD { params = { w }, lr = 0.5 })
---wrapper:set("weight_decay", 0.1)
---print(wrapper:lr(), wrapper:get("weight_decay")) --> 0.5 0.1
---```
---@class peri.nn.optim.OptimizerWrapper: peri.nn.optim.KeyedOptimizer
---@param optimizer peri.nn.optim.KeyedOptimizer The optimizer.
---@overload fun(optimizer: peri.nn.optim.KeyedOptimizer): peri.nn.optim.OptimizerWrapper
optim.OptimizerWrapper = {}

---A number of the optimizer, as `Optimizer:get`.
---@param name string Such as `weight_decay`.
---@return number
function optim.OptimizerWrapper:get(name) end

---Change such a number, as `Optimizer:set`.
---@param name string Such as `weight_decay`.
---@param value number The value from now on.
function optim.OptimizerWrapper:set(name, value) end

---Clips gradients before each step. By norm it is collective where parameters are shards of dense tables.
---
---Errors: a clipping that is not among those; `sharded` without `group`, or with clipping by value.
---
---```lua
---local w = peri.ones({ 4 }):requires_grad()
---local optimizer = nn.optim.GradientClippingOptimizer {
---  optimizer = nn.optim.SGD { params = { w }, lr = 1 }, clipping = "norm", max_gradient = 1 };
---(w * 3):sum():backward()
---optimizer:step()
---print(("%.3f"):format(w:item(0))) --> 0.500
---```
---@class peri.nn.optim.GradientClippingOptimizer: peri.nn.optim.OptimizerWrapper
---@overload fun(args: peri.nn.optim.GradientClippingOptimizer.args): peri.nn.optim.GradientClippingOptimizer
optim.GradientClippingOptimizer = {}

---@class peri.nn.optim.GradientClippingOptimizer.args
---@field optimizer peri.nn.optim.KeyedOptimizer The optimizer.
---@field clipping? string `"none"`, `"norm"` (of all gradients together) or `"value"` (default: none).
---@field max_gradient? number The most of the norm, or of each element (default: 0.1).
---@field norm_type? number p of the norm; `math.huge`: the largest (default: 2).
---@field sharded? peri.Tensor[] Parameters, of any shape, of which each rank has its own part (default: what the list of parameters says).
---@field group? peri.dist.Group Their ranks (default: what the list of parameters says).

---Several optimizers as one: that of the dense part and those of tables, say. A name comes before those of the
---optimizer's parameters, with a dot.
---
---Errors: an empty list; what is no optimizer; a parameter or a name that comes twice.
---
---```lua
---local a, b = peri.ones({ 2 }):requires_grad(), peri.ones({ 2 }):requires_grad()
---local both = nn.optim.CombinedOptimizer { { name = "one",
---  optimizer = nn.optim.SGD { params = { { name = "a", tensor = a } } } },
---  nn.optim.SGD { params = { { name = "b", tensor = b } } } }
---print(table.concat(both.names, " "), #both.param_groups) --> one.a b 2
---```
---@class peri.nn.optim.CombinedOptimizer: peri.nn.optim.KeyedOptimizer
---@param optimizers table[] Optimizers, or `{ name =, optimizer = }` each.
---@overload fun(optimizers: table[]): peri.nn.optim.CombinedOptimizer
optim.CombinedOptimizer = {}

---The base of learning-rate schedules. Call `step()` after the optimizer's. As in PyTorch, most change the rate that is
---there: what was set by hand, or by another schedule of the optimizer, goes into all later rates. `LambdaLR`,
---`CosineAnnealingWarmRestarts`, `OneCycleLR` and `CyclicLR` overwrite it. A group that is added later is one that
---began with the rate it has then. A schedule of your own is a `LambdaLR` with your function; nothing is built on this
---class.
---
---Errors: an optimizer without a learning rate; options out of their range; a state_dict of another class or with other
---options.
---
---```lua
---local w = peri.ones({ 2 }):requires_grad()
---local optimizer = nn.optim.SGD { params = { w }, lr = 1, momentum = 0.9 }
---local schedule = nn.optim.StepLR { optimizer = optimizer, step_size = 2, gamma = 0.1 }
---schedule:step()
---schedule:seek(2)
---print(schedule:get_last_lr(), schedule:rate(0), schedule.last_epoch,
---  nn.optim.LRScheduler.is(schedule)) --> 0.1 1 2 true
---local dict = schedule:state_dict()
---print(schedule:check_state_dict(dict)) --> nil
---schedule:load_state_dict(dict)
---```
---@class peri.nn.optim.LRScheduler
optim.LRScheduler = {}

---One step further.
function optim.LRScheduler:step() end

---Continue as after a number of steps, with the rates of that step, whatever was set by hand.
---@param n integer Steps.
function optim.LRScheduler:seek(n) end

---The rate now.
---@return number
function optim.LRScheduler:get_last_lr() end

---Everything that must be saved: class, options, steps, and the rates of the groups. Local.
---@return table
function optim.LRScheduler:state_dict() end

---Continue as the schedule whose state_dict it is. The class, its options and the parameters must be the same, else
---nothing is changed. Local.
---@param dict table What `state_dict` returned.
function optim.LRScheduler:load_state_dict(dict) end

---What keeps `load_state_dict` from loading, in words. It changes nothing. Local.
---@param dict table The state_dict.
---@return string|nil # nil: it would load.
function optim.LRScheduler:check_state_dict(dict) end

---The rate of a step. Each schedule has its own.
---
---Errors: a step that OneCycleLR does not have.
---@param t integer Steps so far.
---@param base? number The rate at the start (default: that of the optimizer when the schedule was made).
---@return number
---@return number|nil # The momentum, where a schedule cycles it.
function optim.LRScheduler:rate(t, base) end

---The rate times `gamma` every `step_size` steps.
---
---Errors: an optimizer without a learning rate; an option out of its range.
---
---```lua
---local optimizer = nn.optim.SGD { params = { peri.ones({ 2 }):requires_grad() }, lr = 1,
---  momentum = 0.9 }
---local schedule = nn.optim.StepLR { optimizer = optimizer, step_size = 2, gamma = 0.5 }
---print(("%.4f"):format((schedule:rate(5)))) --> 0.2500
---```
---@class peri.nn.optim.StepLR: peri.nn.optim.LRScheduler
---@overload fun(args: peri.nn.optim.StepLR.args): peri.nn.optim.StepLR
optim.StepLR = {}

---@class peri.nn.optim.StepLR.args
---@field optimizer peri.nn.optim.KeyedOptimizer The optimizer.
---@field step_size integer Steps.
---@field gamma? number The factor (default: 0.1).

---The rate times `gamma` at each milestone.
---
---Errors: an optimizer without a learning rate; an option out of its range.
---
---```lua
---local optimizer = nn.optim.SGD { params = { peri.ones({ 2 }):requires_grad() }, lr = 1,
---  momentum = 0.9 }
---local schedule = nn.optim.MultiStepLR { optimizer = optimizer, milestones = { 2, 4 },
---  gamma = 0.5 }
---print(("%.4f"):format((schedule:rate(5)))) --> 0.2500
---```
---@class peri.nn.optim.MultiStepLR: peri.nn.optim.LRScheduler
---@overload fun(args: peri.nn.optim.MultiStepLR.args): peri.nn.optim.MultiStepLR
optim.MultiStepLR = {}

---@class peri.nn.optim.MultiStepLR.args
---@field optimizer peri.nn.optim.KeyedOptimizer The optimizer.
---@field milestones integer[] Steps.
---@field gamma? number The factor (default: 0.1).

---The rate times `gamma` at each step.
---
---Errors: an optimizer without a learning rate; an option out of its range.
---
---```lua
---local optimizer = nn.optim.SGD { params = { peri.ones({ 2 }):requires_grad() }, lr = 1,
---  momentum = 0.9 }
---local schedule = nn.optim.ExponentialLR { optimizer = optimizer, gamma = 0.5 }
---print(("%.4f"):format((schedule:rate(2)))) --> 0.2500
---```
---@class peri.nn.optim.ExponentialLR: peri.nn.optim.LRScheduler
---@overload fun(args: peri.nn.optim.ExponentialLR.args): peri.nn.optim.ExponentialLR
optim.ExponentialLR = {}

---@class peri.nn.optim.ExponentialLR.args
---@field optimizer peri.nn.optim.KeyedOptimizer The optimizer.
---@field gamma number The factor.

---The rate times `factor` for the first steps, then the rate.
---
---Errors: an optimizer without a learning rate; an option out of its range.
---
---```lua
---local optimizer = nn.optim.SGD { params = { peri.ones({ 2 }):requires_grad() }, lr = 1,
---  momentum = 0.9 }
---local schedule = nn.optim.ConstantLR { optimizer = optimizer, factor = 0.5 }
---print(("%.4f"):format((schedule:rate(2)))) --> 0.5000
---```
---@class peri.nn.optim.ConstantLR: peri.nn.optim.LRScheduler
---@overload fun(args: peri.nn.optim.ConstantLR.args): peri.nn.optim.ConstantLR
optim.ConstantLR = {}

---@class peri.nn.optim.ConstantLR.args
---@field optimizer peri.nn.optim.KeyedOptimizer The optimizer.
---@field factor? number The factor, 0 or more (default: 0.3333333333333333).
---@field total_iters? integer So many steps (default: 5).

---The rate times a factor that changes evenly over the first steps.
---
---Errors: an optimizer without a learning rate; an option out of its range.
---
---```lua
---local optimizer = nn.optim.SGD { params = { peri.ones({ 2 }):requires_grad() }, lr = 1,
---  momentum = 0.9 }
---local schedule = nn.optim.LinearLR { optimizer = optimizer, start_factor = 0.5,
---  total_iters = 2 }
---print(("%.4f"):format((schedule:rate(1)))) --> 0.7500
---```
---@class peri.nn.optim.LinearLR: peri.nn.optim.LRScheduler
---@overload fun(args: peri.nn.optim.LinearLR.args): peri.nn.optim.LinearLR
optim.LinearLR = {}

---@class peri.nn.optim.LinearLR.args
---@field optimizer peri.nn.optim.KeyedOptimizer The optimizer.
---@field start_factor? number The factor at first, above 0 (default: 0.3333333333333333).
---@field end_factor? number The factor at the end, 0 or more (default: 1).
---@field total_iters? integer So many steps (default: 5).

---The rate times `(1 - t / total_iters) ^ power`, then 0.
---
---Errors: an optimizer without a learning rate; an option out of its range.
---
---```lua
---local optimizer = nn.optim.SGD { params = { peri.ones({ 2 }):requires_grad() }, lr = 1,
---  momentum = 0.9 }
---local schedule = nn.optim.PolynomialLR { optimizer = optimizer, total_iters = 4 }
---print(("%.4f"):format((schedule:rate(1)))) --> 0.7500
---```
---@class peri.nn.optim.PolynomialLR: peri.nn.optim.LRScheduler
---@overload fun(args: peri.nn.optim.PolynomialLR.args): peri.nn.optim.PolynomialLR
optim.PolynomialLR = {}

---@class peri.nn.optim.PolynomialLR.args
---@field optimizer peri.nn.optim.KeyedOptimizer The optimizer.
---@field total_iters? integer Steps (default: 5).
---@field power? number The power (default: 1).

---The rate falls to `eta_min` along half a cosine in `T_max` steps.
---
---Errors: an optimizer without a learning rate; an option out of its range.
---
---```lua
---local optimizer = nn.optim.SGD { params = { peri.ones({ 2 }):requires_grad() }, lr = 1,
---  momentum = 0.9 }
---local schedule = nn.optim.CosineAnnealingLR { optimizer = optimizer, T_max = 4 }
---print(("%.4f"):format((schedule:rate(2)))) --> 0.5000
---```
---@class peri.nn.optim.CosineAnnealingLR: peri.nn.optim.LRScheduler
---@overload fun(args: peri.nn.optim.CosineAnnealingLR.args): peri.nn.optim.CosineAnnealingLR
optim.CosineAnnealingLR = {}

---@class peri.nn.optim.CosineAnnealingLR.args
---@field optimizer peri.nn.optim.KeyedOptimizer The optimizer.
---@field T_max integer Steps.
---@field eta_min? number The least rate (default: 0).

---The same again and again, each period `T_mult` times as long as the one before.
---
---Errors: an optimizer without a learning rate; an option out of its range.
---
---```lua
---local optimizer = nn.optim.SGD { params = { peri.ones({ 2 }):requires_grad() }, lr = 1,
---  momentum = 0.9 }
---local schedule = nn.optim.CosineAnnealingWarmRestarts { optimizer = optimizer, T_0 = 2 }
---print(("%.4f"):format((schedule:rate(3)))) --> 0.5000
---```
---@class peri.nn.optim.CosineAnnealingWarmRestarts: peri.nn.optim.LRScheduler
---@overload fun(args: peri.nn.optim.CosineAnnealingWarmRestarts.args): peri.nn.optim.CosineAnnealingWarmRestarts
optim.CosineAnnealingWarmRestarts = {}

---@class peri.nn.optim.CosineAnnealingWarmRestarts.args
---@field optimizer peri.nn.optim.KeyedOptimizer The optimizer.
---@field T_0 integer Steps of the first period.
---@field T_mult? integer The factor (default: 1).
---@field eta_min? number The least rate (default: 0).

---The rate rises to `max_lr` and falls far below where it began, while the momentum does the opposite.
---
---Errors: an optimizer without a learning rate; an option out of its range.
---
---```lua
---local optimizer = nn.optim.SGD { params = { peri.ones({ 2 }):requires_grad() }, lr = 1,
---  momentum = 0.9 }
---local schedule = nn.optim.OneCycleLR { optimizer = optimizer, max_lr = 1, total_steps = 10 }
---print(("%.4f"):format((schedule:rate(2)))) --> 1.0000
---```
---@class peri.nn.optim.OneCycleLR: peri.nn.optim.LRScheduler
---@overload fun(args: peri.nn.optim.OneCycleLR.args): peri.nn.optim.OneCycleLR
optim.OneCycleLR = {}

---@class peri.nn.optim.OneCycleLR.args
---@field optimizer peri.nn.optim.KeyedOptimizer The optimizer.
---@field max_lr number The largest rate.
---@field total_steps integer Steps of the whole cycle; a later one is an error.
---@field pct_start? number Share of the steps that rise (default: 0.3).
---@field anneal_strategy? string `cos` or `linear` (default: cos).
---@field cycle_momentum? boolean Whether the momentum changes (default: true).
---@field base_momentum? number The least momentum (default: 0.85).
---@field max_momentum? number The largest momentum (default: 0.95).
---@field div_factor? number max_lr divided by it is the first rate (default: 25).
---@field final_div_factor? number The first rate divided by it is the last one (default: 10000).
---@field three_phase? boolean Fall to the first rate, and then to the last one (default: false).

---The rate rises and falls between two rates again and again.
---
---Errors: an optimizer without a learning rate; an option out of its range.
---
---```lua
---local optimizer = nn.optim.SGD { params = { peri.ones({ 2 }):requires_grad() }, lr = 1,
---  momentum = 0.9 }
---local schedule = nn.optim.CyclicLR { optimizer = optimizer, base_lr = 0, max_lr = 1,
---  step_size_up = 4 }
---print(("%.4f"):format((schedule:rate(2)))) --> 0.5000
---```
---@class peri.nn.optim.CyclicLR: peri.nn.optim.LRScheduler
---@overload fun(args: peri.nn.optim.CyclicLR.args): peri.nn.optim.CyclicLR
optim.CyclicLR = {}

---@class peri.nn.optim.CyclicLR.args
---@field optimizer peri.nn.optim.KeyedOptimizer The optimizer.
---@field base_lr number The least rate.
---@field max_lr number The largest rate.
---@field step_size_up? integer Steps that rise (default: 2000).
---@field step_size_down? integer Steps that fall (default: step_size_up).
---@field mode? string `triangular`; `triangular2`: half as high each time; `exp_range`: by gamma (default: triangular).
---@field gamma? number The factor a step of `exp_range` (default: 1).
---@field cycle_momentum? boolean Whether the momentum changes (default: true).
---@field base_momentum? number The least momentum (default: 0.8).
---@field max_momentum? number The largest momentum (default: 0.9).

---The rate times what a function returns for the number of the step.
---
---Errors: an optimizer without a learning rate; an option out of its range.
---
---```lua
---local optimizer = nn.optim.SGD { params = { peri.ones({ 2 }):requires_grad() }, lr = 1,
---  momentum = 0.9 }
---local schedule = nn.optim.LambdaLR { optimizer = optimizer,
---  lr_lambda = function(t) return 1 / (t + 1) end }
---print(("%.4f"):format((schedule:rate(3)))) --> 0.2500
---```
---@class peri.nn.optim.LambdaLR: peri.nn.optim.LRScheduler
---@overload fun(args: peri.nn.optim.LambdaLR.args): peri.nn.optim.LambdaLR
optim.LambdaLR = {}

---@class peri.nn.optim.LambdaLR.args
---@field optimizer peri.nn.optim.KeyedOptimizer The optimizer.
---@field lr_lambda function Gets the number of steps, returns the factor.

---TorchRec's: steps an optimizer and sets its rate, in stages. The rate is `lr * factor * lr_scale`, whose factor is
---said by the stage's `policy`, with t for the steps since the start:
---
---- `none`: 1; `constant`: `value`; `inv_sqrt`: `1 / sqrt(t)`;
---- `linear` (default): from `value` to 1, `value + (1 - value) * t / max_iters`;
---- `poly`: `(1 - t / decay_iters) ^ value`;
---- `step`: `value ^ floor(t / decay_iters)`;
---- `cosine_annealing_warm_restarts`: along half a cosine from 1 to `value`, again every `sgdr_period` steps;
---- `interpolate`: from `value` to `end_value` between the steps `start_interpolating_iters` and `max_iters`.
---
---A stage is a table of `policy`, `max_iters` (the step after which the next stage follows, counted from the start;
---default: 1), `value` (1), `lr_scale` (1), `decay_iters` (1 for `step`, else `max_iters`), `sgdr_period` (1),
---`start_interpolating_iters` (0) and `end_value` (1).
---
---Errors: an unknown policy; stages whose ends do not rise; `inv_sqrt` as the first stage.
---
---```lua
---local inner = nn.optim.SGD { params = { peri.ones({ 2 }):requires_grad() } }
---local optimizer = nn.optim.WarmupOptimizer { optimizer = inner, lr = 1,
---  stages = { { policy = "linear", max_iters = 4, value = 0 } } }
---optimizer:step()
---print(inner:lr()) --> 0.25
---```
---@class peri.nn.optim.WarmupOptimizer: peri.nn.optim.OptimizerWrapper
---@overload fun(args: peri.nn.optim.WarmupOptimizer.args): peri.nn.optim.WarmupOptimizer
optim.WarmupOptimizer = {}

---@class peri.nn.optim.WarmupOptimizer.args
---@field optimizer peri.nn.optim.KeyedOptimizer The optimizer.
---@field stages table[] The stages, in order; after the last one the rate is `lr`.
---@field lr? number The rate (default: 0.1); loading a state dict sets it to that of the optimizer that was saved.
