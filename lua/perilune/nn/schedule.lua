-- schedule.lua: learning-rate schedules: PyTorch's schedulers and TorchRec's WarmupOptimizer.
--
--   local scheduler = nn.optim.StepLR { optimizer = optimizer, step_size = 30, gamma = 0.1 }
--   ... optimizer:step(); scheduler:step()
--
-- A step changes the rates as PyTorch's does. Most schedulers change the rate that is there (`_change`), so what was
-- set by hand, or by another scheduler of the same optimizer, stays a factor of all later rates. Those whose rates are
-- a function of the number of steps and of the first rates only (LambdaLR, CosineAnnealingWarmRestarts, OneCycleLR,
-- CyclicLR) overwrite it. All have that function (`rate`), and seek(n) goes to a step by it. state_dict() has the
-- number of steps, the first rates, and the rates as they are now.
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local live = require("perilune.tensor.state_dict").live
local groups = require "perilune.nn.groups"
local optim = require "perilune.nn.optim"
local signature = require "perilune.signature"

local M = {}

signature.object("scheduled", "an optimizer with a learning rate", { lr = "callable", set_lr = "callable" })

local cos, pi, floor, max, min = math.cos, math.pi, math.floor, math.max, math.min

local LRScheduler = util.seal(util.class "LRScheduler")
M.LRScheduler = LRScheduler

--- The rate that a group of the optimizer began with, whichever scheduler met it first; of a group that was added
--- later, the rate that it has when this scheduler meets it.
local function base_of(self, i)
  if not self._groups then return self.base_lr end
  self._base_lrs[i] = self._base_lrs[i] or groups.initial_lr(self._groups[i])
  return self._base_lrs[i]
end

--- The rate of step n beside the first one and, where the class has one, the momentum. changed: from the rate now.
local function rate_of(self, n, changed, now, base)
  if changed then return self._change(self.options, n, now, base) end
  return self:rate(n, base)
end

--- Let rates, and momenta where the class has them, be those of step n.
local function set_rates(self, n, changed)
  local momentum
  if self._groups then
    for i, group in ipairs(self._groups) do
      group.lr, momentum = rate_of(self, n, changed, group.lr, base_of(self, i))
    end
  else
    local lr
    lr, momentum = rate_of(self, n, changed, self.optimizer:lr(), self.base_lr)
    self.optimizer:set_lr(lr)
  end
  if momentum then self.optimizer:set_momentum(momentum) end
end

--- What the classes below have in its place where a step changes the rate that is there.
LRScheduler._change = false

--- One step further.
function LRScheduler:step()
  local n = self.last_epoch + 1
  if not self._change then return self:seek(n) end
  self.last_epoch = n
  set_rates(self, n, true)
end

--- Continue as after n steps: the rates are those of step n, whatever was set by hand.
function LRScheduler:seek(n)
  self.last_epoch = util.integer(self.class_name, "the number of steps", n, 0)
  set_rates(self, n, false)
end
function LRScheduler:get_last_lr() return self.optimizer:lr() end
--- The rate of step t (from 0), and the momentum, where it is cycled.
function LRScheduler:rate() P.fail(("%s: no method 'rate'"):format(self.class_name)) end

-- -- state ------------------------------------------------------------------------------------------------------------

--- The name of the number that schedules with cycle_momentum change in a group; nil: this one does not.
local function momentum_of(scheduler, group)
  local numbers = scheduler.options.cycle_momentum and util.index_of(groups.numbers_of(group)) or {}
  return numbers.beta1 and "beta1" or numbers.momentum and "momentum" or nil
end

--- The options that can be saved: functions cannot.
local function options_of(scheduler)
  local options = {}
  for name, value in util.ordered(scheduler.options) do
    if name ~= "optimizer" and type(value) ~= "function" then
      options[name] = type(value) == "table" and util.copy(value) or value
    end
  end
  return options
end

--- Everything that must be saved: { scheduler = its class, last_epoch = steps, options =, groups = { { params = names
--- of parameters, base_lr =, lr = the rate now, momentum = }, ... } }; an optimizer without groups has { base_lr =, lr
--- = } in their place. Local.
function LRScheduler:state_dict()
  local dict = { scheduler = self.class_name, last_epoch = self.last_epoch, options = options_of(self) }
  if not self._groups then
    dict.groups = { base_lr = self.base_lr, lr = self.optimizer:lr() }
    return live(dict)
  end
  dict.groups = util.map(self.optimizer:named_groups(), function(entry, i)
    local momentum = momentum_of(self, entry.group)
    return { params = util.copy(entry.params), base_lr = base_of(self, i), lr = entry.group.lr,
      momentum = momentum and entry.group[momentum] or nil }
  end)
  return live(dict)
end

local function text_of(value)
  if type(value) ~= "table" then return errors.kind(value) end
  return "{ " .. table.concat(util.map(value, tostring), ", ") .. " }"
end

--- What does not fit of a state_dict: a list of texts; and what it has for the groups.
local function check_dict(self, func, dict)
  local wrong, found = {}, nil
  signature.value(func, "dict", dict, "table")
  if dict.scheduler ~= self.class_name then
    return { ("it is the state of %s"):format(dict.scheduler == nil and "no scheduler" or text_of(dict.scheduler)) }
  end
  local last = dict.last_epoch
  if type(last) ~= "number" or last < 0 or last ~= floor(last) then
    wrong[1] = ("last_epoch is %s, wanted a number of steps"):format(text_of(last))
  end
  local own, given, all = options_of(self), type(dict.options) == "table" and dict.options or {}, {}
  for name in util.ordered(own) do all[name] = true end
  for name in util.ordered(given) do all[name] = true end
  for name in util.ordered(all) do
    if own[name] ~= given[name] and not (type(own[name]) == "table" and text_of(own[name]) == text_of(given[name])) then
      wrong[#wrong + 1] = ("option %s is %s here, and %s in the state that is given"):format(name, text_of(own[name]),
        text_of(given[name]))
    end
  end
  if self._groups then
    found = groups.find("groups", self.optimizer:named_groups(), dict.groups, function(group)
      return momentum_of(self, group) and { "base_lr", "lr", "momentum" } or { "base_lr", "lr" }
    end, wrong)
  elseif type(dict.groups) ~= "table" or type(dict.groups.base_lr) ~= "number" or type(dict.groups.lr) ~= "number" then
    wrong[#wrong + 1] = "groups have no base_lr and lr"
  end
  return wrong, found
end

--- What keeps load_state_dict(dict) from loading, in words; nil: nothing does. Changes nothing; not collective.
function LRScheduler:check_state_dict(dict)
  local wrong = check_dict(self, "", dict)
  return #wrong > 0 and table.concat(wrong, "; ") or nil
end

--- Continue as the scheduler whose state_dict this is; the optimizer gets the rates that it had then. The class and its
--- options must be the same, and the optimizer's parameters, by name; what does not fit is one error that lists it all,
--- and nothing is changed. Local.
function LRScheduler:load_state_dict(dict)
  local func = self.class_name .. ":load_state_dict"
  local wrong, found = check_dict(self, func, dict)
  if #wrong > 0 then P.fail(("%s: %s"):format(func, table.concat(wrong, "; "))) end
  self.last_epoch = dict.last_epoch
  if not found then
    self.base_lr = dict.groups.base_lr
    self.optimizer:set_lr(dict.groups.lr)
    return
  end
  for i, entry in ipairs(self.optimizer:named_groups()) do
    local numbers, momentum = found[i].numbers, momentum_of(self, entry.group)
    self._base_lrs[i], entry.group.lr = groups.initial_lr(entry.group, numbers.base_lr), numbers.lr
    if momentum then entry.group[momentum] = numbers.momentum end
  end
end

--- What options of these names may be, in whatever scheduler.
local least = { step_size = 1, total_iters = 1, total_steps = 1, T_max = 1, T_0 = 1, T_mult = 1, step_size_up = 1,
  step_size_down = 1 }
local positive = { gamma = true, factor = true, start_factor = true, end_factor = true, power = true, eta_min = true,
  max_lr = true, base_lr = true }

local function check_options(name, a)
  for option, value in util.ordered(a) do
    if least[option] and value ~= nil then util.integer(name, option, value, least[option]) end
    if positive[option] and not (value >= 0 and value < math.huge) then
      P.fail(("%s: %s is %g, allowed: finite numbers >= 0"):format(name, option, value))
    end
  end
end

--- An error unless the optimizer has the momentum that a schedule is to change.
local function check_momentum(name, optimizer)
  for _, group in ipairs(optimizer.param_groups or {}) do
    if util.index_of(groups.numbers_of(group)).momentum and group.momentum == 0 then
      P.fail(("%s: cycle_momentum, which is on unless it is said otherwise, changes the momentum, and the optimizer "
        .. "was made without one; allowed: an optimizer with momentum = 0.9, or cycle_momentum = false"):format(name))
    end
  end
end

--- A class of schedulers: options; rate(options, t, base_lr, self) -> learning rate of step t (from 0) and, if it
--- cycles, momentum; prepare(self, options): what it checks and makes, and, where it has one of its own, returns the
--- rate to begin with; change(options, t, lr, base_lr): the rate of step t where that before it was lr.
local function define(name, options, rate, prepare, change)
  local spec = { optimizer = util.required }
  for option, default in util.ordered(options) do spec[option] = default end
  local class = util.class(name, LRScheduler)
  function class:init(args)
    local a = util.named(name, args, spec)
    a.optimizer = signature.value(name, "optimizer", a.optimizer, "scheduled")
    check_options(name, a)
    self.optimizer, self.options, self.base_lr = a.optimizer, a, a.optimizer:lr()
    self._groups = a.optimizer.param_groups or false -- each has its own rate
    local first = prepare and prepare(self, a) or nil
    if a.cycle_momentum then check_momentum(name, a.optimizer) end
    self._base_lrs = self._groups and util.map(self._groups, function(group) return groups.initial_lr(group, first) end)
    self.last_epoch = -1
    self:step()
  end
  class._change = change or nil
  function class:rate(t, base) return rate(self.options, t, base or self.base_lr, self) end
  signature.check(name .. ":", class, { rate = "self: table, t: number, base: number?" })
  M[name] = class
end

--- base_lr * lr_lambda(t)
define("LambdaLR", { lr_lambda = util.required }, function(a, t, base)
  return base * util.number("LambdaLR", "what lr_lambda returned", a.lr_lambda(t))
end, function(_, a) signature.value("LambdaLR", "lr_lambda", a.lr_lambda, "callable") end)

define("StepLR", { step_size = util.required.number, gamma = 0.1 }, function(a, t, base)
  return base * a.gamma ^ floor(t / a.step_size)
end, nil, function(a, t, lr)
  return t > 0 and t % a.step_size == 0 and lr * a.gamma or lr
end)

--- How many milestones lie above `from`, and not above `to`.
local function milestones_in(a, from, to)
  local passed = 0
  for _, milestone in ipairs(a.milestones) do
    if from < milestone and milestone <= to then passed = passed + 1 end
  end
  return passed
end

define("MultiStepLR", { milestones = util.required.list, gamma = 0.1 }, function(a, t, base)
  return base * a.gamma ^ milestones_in(a, -math.huge, t)
end, function(_, a)
  for i, step in ipairs(a.milestones) do util.integer("MultiStepLR", ("milestones[%d]"):format(i), step, 0) end
  a.milestones = util.copy(a.milestones)
end, function(a, t, lr)
  return lr * a.gamma ^ milestones_in(a, t - 1, t)
end)

define("ExponentialLR", { gamma = util.required.number }, function(a, t, base) return base * a.gamma ^ t end, nil,
  function(a, t, lr)
  return t > 0 and lr * a.gamma or lr
end)

define("ConstantLR", { factor = util.from(1 / 3, 0, 1), total_iters = 5 }, function(a, t, base)
  return t < a.total_iters and base * a.factor or base
end, nil, function(a, t, lr, base)
  if t == 0 then return lr * a.factor end
  if t ~= a.total_iters then return lr end
  return a.factor == 0 and base or lr * (1 / a.factor)
end)

define("LinearLR", { start_factor = util.from(1 / 3, 0, 1), end_factor = util.from(1, 0, 1), total_iters = 5 },
  function(a, t, base)
  return base * (a.start_factor + (a.end_factor - a.start_factor) * min(t, a.total_iters) / a.total_iters)
end, function(_, a)
  if a.start_factor == 0 then
    P.fail "LinearLR: start_factor is 0, allowed: above 0, since later rates are multiples of the first"
  end
end, function(a, t, lr)
  local rise = a.end_factor - a.start_factor
  if t == 0 then return lr * a.start_factor end
  if t > a.total_iters then return lr end
  return max(lr * (1 + rise / (a.total_iters * a.start_factor + (t - 1) * rise)), 0) -- rounded, 0 may be below
end)

define("PolynomialLR", { total_iters = 5, power = 1 }, function(a, t, base)
  return base * (1 - min(t, a.total_iters) / a.total_iters) ^ a.power
end, nil, function(a, t, lr)
  return (t == 0 or t > a.total_iters) and lr
    or lr * ((1 - t / a.total_iters) / (1 - (t - 1) / a.total_iters)) ^ a.power
end)

local function cosine(from, to, part) return to + (from - to) / 2 * (1 + cos(pi * part)) end
local function straight(from, to, part) return from + (to - from) * part end

define("CosineAnnealingLR", { T_max = util.required.number, eta_min = 0 }, function(a, t, base)
  return cosine(base, a.eta_min, t / a.T_max)
end, nil, function(a, t, lr, base)
  if t == 0 then return lr end
  -- up from eta_min
  if (t - 1 - a.T_max) % (2 * a.T_max) == 0 then return lr + (base - a.eta_min) * (1 - cos(pi / a.T_max)) / 2 end
  local next_lr = (1 + cos(pi * t / a.T_max)) / (1 + cos(pi * (t - 1) / a.T_max)) * (lr - a.eta_min) + a.eta_min
  return max(next_lr, min(base, a.eta_min)) -- rounded, it may be below
end)

define("CosineAnnealingWarmRestarts", { T_0 = util.required.number, T_mult = 1, eta_min = 0 }, function(a, t, base)
  local period = a.T_0
  if a.T_mult == 1 then
    t = t % period
  else
    while t >= period do
      t = t - period
      period = period * a.T_mult
    end
  end
  return cosine(base, a.eta_min, t / period)
end)

-- -- cycles of rate and momentum --------------------------------------------------------------------------------------

define("OneCycleLR", { max_lr = util.required.number, total_steps = util.required.number,
  pct_start = util.from(0.3, 0, 1), anneal_strategy = "cos", cycle_momentum = true, base_momentum = util.from(0.85, 0),
  max_momentum = util.from(0.95, 0), div_factor = util.over(25, 0), final_div_factor = util.over(1e4, 0),
  three_phase = false }, function(a, t, _, self)
  if t > a.total_steps then P.fail(("OneCycleLR: step %d of %d"):format(t, a.total_steps)) end
  local first = 0
  for i, phase in ipairs(self.phases) do
    if t <= phase.last or i == #self.phases then
      local part = (t - first) / (phase.last - first)
      local anneal = a.anneal_strategy == "cos" and cosine or straight
      return anneal(phase.lr[1], phase.lr[2], part), a.cycle_momentum
        and anneal(phase.momentum[1], phase.momentum[2], part) or nil
    end
    first = phase.last
  end
end, function(self, a)
  util.one_of("OneCycleLR", "anneal_strategy", a.anneal_strategy, { "cos", "linear" })
  local initial, up = a.max_lr / a.div_factor, a.pct_start * a.total_steps
  local final, high, low = initial / a.final_div_factor, a.max_momentum, a.base_momentum
  local phases = { { last = up - 1, lr = { initial, a.max_lr }, momentum = { high, low } } }
  if a.three_phase then
    phases[2] = { last = 2 * up - 2, lr = { a.max_lr, initial }, momentum = { low, high } }
    phases[3] = { last = a.total_steps - 1, lr = { initial, final }, momentum = { high, high } }
  else
    phases[2] = { last = a.total_steps - 1, lr = { a.max_lr, final }, momentum = { low, high } }
  end
  self.phases = phases
  return initial
end)

define("CyclicLR", { base_lr = util.required.number, max_lr = util.required.number, step_size_up = 2000,
  step_size_down = util.optional.number, mode = "triangular", gamma = 1, cycle_momentum = true,
  base_momentum = util.from(0.8, 0), max_momentum = util.from(0.9, 0) }, function(a, t)
  local down = a.step_size_down or a.step_size_up
  local size, ratio = a.step_size_up + down, a.step_size_up / (a.step_size_up + down)
  local cycle = floor(1 + t / size)
  local x = 1 + t / size - cycle
  local height = x <= ratio and x / ratio or (x - 1) / (ratio - 1)
  if a.mode == "triangular2" then height = height / 2 ^ (cycle - 1)
  elseif a.mode == "exp_range" then height = height * a.gamma ^ t end
  return straight(a.base_lr, a.max_lr, height), a.cycle_momentum and straight(a.max_momentum, a.base_momentum, height)
    or nil
end, function(_, a)
  util.one_of("CyclicLR", "mode", a.mode, { "triangular", "triangular2", "exp_range" })
  a.optimizer:set_lr(a.base_lr)
end)

-- -- warm-up ----------------------------------------------------------------------------------------------------------

--- it: steps taken; s: the stage.
local policies = {
  none = function() return 1 end,
  linear = function(it, s) return s.value + (1 - s.value) * it / s.max_iters end,
  constant = function(_, s) return s.value end,
  poly = function(it, s) return (1 - it / s.decay_iters) ^ s.value end,
  step = function(it, s) return s.value ^ floor(it / s.decay_iters) end,
  inv_sqrt = function(it) return 1 / math.sqrt(it) end,
  cosine_annealing_warm_restarts = function(it, s) return cosine(1, s.value, it % s.sgdr_period / s.sgdr_period) end,
  interpolate = function(it, s)
    local part = (it - s.start_interpolating_iters) / (s.max_iters - s.start_interpolating_iters)
    return s.value * (1 - part) + s.end_value * part -- exact at both ends: a rate that ends at 0 is not below it
  end,
}

local stage_arguments = { policy = "linear", max_iters = util.whole(1, 1), value = util.from(1, 0),
  lr_scale = util.from(1, 0), decay_iters = util.whole(-1), sgdr_period = util.whole(1, 1),
  start_interpolating_iters = util.whole(0, 0), end_value = util.from(1, 0) }

--- An error unless stage i, which begins at step `first`, has rates that an optimizer takes. Between the first and the
--- last step of a stage factors rise or fall all the way, or lie between numbers that are allowed.
local function check_factors(i, s, first)
  for _, step in ipairs { first, s.max_iters } do
    local factor = policies[s.policy](step, s)
    if not (factor >= 0 and factor < math.huge) then
      P.fail(("WarmupStage: stage %d, '%s', has the factor %g at step %d, allowed: finite numbers >= 0"):format(i,
        s.policy, factor, step))
    end
  end
end

--- Stages with their defaults, and the last one, which lasts for ever. max_iters are numbers of steps since the start,
--- ascending.
local function prepare_stages(stages)
  local list, before = {}, 0
  for i, given in ipairs(stages) do
    local s = util.named("WarmupStage", given, stage_arguments)
    if not policies[s.policy] then
      P.fail(("WarmupStage: stage %d has policy '%s', allowed: %s"):format(i, tostring(s.policy),
        table.concat(util.keys(policies), ", ")))
    end
    if s.max_iters <= before then
      P.fail(("WarmupStage: stage %d ends at step %d, the one before it at %d"):format(i, s.max_iters, before))
    end
    if s.decay_iters <= 0 then s.decay_iters = s.policy == "step" and 1 or s.max_iters end
    check_factors(i, s, i == 1 and 0 or before + 1)
    list[i], before = s, s.max_iters
  end
  list[#list + 1] = { policy = "none", max_iters = math.huge, value = 1, lr_scale = 1 }
  return list
end

--- Steps an optimizer and sets its rate: lr times the multiplier of the stage (a list of tables with TorchRec's
--- fields), from step to step.
local WarmupOptimizer = util.class("WarmupOptimizer", optim.OptimizerWrapper)
M.WarmupOptimizer = WarmupOptimizer
function WarmupOptimizer:init(args)
  local a = util.named("WarmupOptimizer", args, { optimizer = util.required, stages = util.required.list,
    lr = util.from(0.1, 0) })
  optim.OptimizerWrapper.init(self, a.optimizer)
  self.stages, self.base_lr, self.iter, self.stage = prepare_stages(a.stages), a.lr, 0, 1
  self:_apply()
end
function WarmupOptimizer:_apply()
  local s = self.stages[self.stage]
  self.optimizer:set_lr(self.base_lr * policies[s.policy](self.iter, s) * s.lr_scale)
end
function WarmupOptimizer:step()
  optim.OptimizerWrapper.step(self)
  self.iter = self.iter + 1
  if self.iter > self.stages[self.stage].max_iters then self.stage = self.stage + 1 end
  self:_apply()
end
--- With { name = "__warmup", tensor = i64 { steps, stage from 0 } }, as TorchRec has it, and the rate that stages are
--- factors of, which TorchRec leaves to the script: a run that goes on has the rates of the one that stopped.
function WarmupOptimizer:named_state()
  local list = util.copy(self.optimizer:named_state())
  list[#list + 1] = { name = "__warmup", tensor = Tensor.tensor({ self.iter, self.stage - 1 }, "i64", "cpu"),
    parameter = "__warmup", key = "warmup" }
  list[#list + 1] = { name = "__warmup.lr", tensor = Tensor.tensor({ self.base_lr }, "f64", "cpu"),
    parameter = "__warmup", key = "lr", optional = true }
  return list
end
function WarmupOptimizer:check_state(map, prefix)
  local wrong, own, lr = self.optimizer:check_state(map, prefix), map.__warmup, map["__warmup.lr"]
  if lr ~= nil and not (Tensor.is(lr) and lr:numel() == 1 and lr:item() >= 0 and lr:item() < math.huge) then
    wrong[#wrong + 1] = ("state '__warmup.lr' is %s, wanted a rate, 0 or more"):format(errors.kind(lr))
  end
  if own == nil then return wrong end
  local list = Tensor.is(own) and own:numel() == 2 and own:to_list()
  if not list then
    wrong[#wrong + 1] = ("state '__warmup' is %s, wanted two numbers: steps, stage"):format(errors.kind(own))
  elseif not (list[1] >= 0 and list[1] % 1 == 0
    and self.stages[list[2] + 1] and list[1] <= self.stages[list[2] + 1].max_iters) then
    wrong[#wrong + 1] = ("state '__warmup' is of step %g in stage %g; these are other stages"):format(list[1], list[2])
  end
  return wrong
end
function WarmupOptimizer:assign_state(map)
  self.optimizer:assign_state(map)
  local list = map.__warmup:to_list()
  self.iter, self.stage = list[1], list[2] + 1
  self.base_lr = map["__warmup.lr"] and map["__warmup.lr"]:item() or self.base_lr
  self:_apply()
end
require("perilune.nn.keyed").check_maps(WarmupOptimizer)

return M
