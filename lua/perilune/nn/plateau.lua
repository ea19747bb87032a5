-- plateau.lua: PyTorch's ReduceLROnPlateau: rates that follow from a metric.
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local groups = require "perilune.nn.groups"
local LRScheduler = require("perilune.nn.schedule").LRScheduler
local signature = require "perilune.signature"

--- step(metric): the rates times factor when the metric has not become better for more than `patience` steps. mode:
--- whether less ("min") or more ("max") is better; threshold: by how much, relative ("rel") or not ("abs");
--- cooldown: steps after a reduction that do not count; min_lr: a bound of the rates, or one for each group; eps:
--- changes up to it are not made. Ranks must give the same metric.
local ReduceLROnPlateau = util.seal(util.class("ReduceLROnPlateau", LRScheduler))

--- An error unless min_lr is a rate, or one for each of n groups.
local function check_least_rates(min_lr, n)
  if type(min_lr) == "number" then min_lr = { min_lr } elseif type(min_lr) == "table" and #min_lr ~= n then
    P.fail(("ReduceLROnPlateau: min_lr is a list of %d, wanted one for each of %d groups"):format(#min_lr, n))
  end
  signature.value("ReduceLROnPlateau", "min_lr", min_lr, "numbers")
  for _, lr in ipairs(min_lr) do
    if not (lr >= 0 and lr < math.huge) then
      P.fail(("ReduceLROnPlateau: min_lr is %g, allowed: finite numbers >= 0"):format(lr))
    end
  end
end

function ReduceLROnPlateau:init(args)
  local a = util.named("ReduceLROnPlateau", args, { optimizer = util.required, mode = "min",
    factor = util.below(0.1, 0, 1), patience = util.whole(10, 0), threshold = util.from(1e-4, 0),
    threshold_mode = "rel", cooldown = util.whole(0, 0), min_lr = util.optional, eps = util.from(1e-8, 0) })
  a.optimizer = signature.value("ReduceLROnPlateau", "optimizer", a.optimizer, "scheduled")
  util.one_of("ReduceLROnPlateau", "mode", a.mode, { "min", "max" })
  util.one_of("ReduceLROnPlateau", "threshold_mode", a.threshold_mode, { "rel", "abs" })
  self.optimizer, self.options, self.base_lr = a.optimizer, a, a.optimizer:lr()
  self._groups = a.optimizer.param_groups or false
  a.min_lr = type(a.min_lr) == "table" and util.copy(a.min_lr) or a.min_lr or 0
  check_least_rates(a.min_lr, self._groups and #self._groups or 1)
  self._base_lrs = self._groups and util.map(self._groups, function(group) return groups.initial_lr(group) end)
  self.last_epoch, self.best, self.num_bad_epochs, self.cooldown_counter = 0, false, 0, 0
end

--- Whether x is better than the best metric so far (false: there was none).
local function is_better(a, x, best)
  if not best then return a.mode == "min" and x < math.huge or a.mode == "max" and x > -math.huge end
  local less = a.mode == "min"
  local by = a.threshold_mode == "rel" and best * (less and 1 - a.threshold or 1 + a.threshold)
    or best + (less and -a.threshold or a.threshold)
  if less then return x < by end
  return x > by
end

local function reduced(a, lr, i)
  local new = math.max(lr * a.factor, type(a.min_lr) == "table" and a.min_lr[i] or a.min_lr)
  return lr - new > a.eps and new or lr
end
local function reduce(self)
  local a, list = self.options, self._groups
  if not list then return self.optimizer:set_lr(reduced(a, self.optimizer:lr(), 1)) end
  if type(a.min_lr) == "table" then check_least_rates(a.min_lr, #list) end -- a group may have come since
  for i, group in ipairs(list) do group.lr = reduced(a, group.lr, i) end
end

--- After each epoch, with its metric: a number, or a tensor of one element.
function ReduceLROnPlateau:step(metric)
  if Tensor.is(metric) then metric = metric:item() end
  local a, x = self.options, signature.value("ReduceLROnPlateau:step", "metric", metric, "number")
  self.last_epoch, self.num_bad_epochs = self.last_epoch + 1, self.num_bad_epochs + 1
  if is_better(a, x, self.best) then self.best, self.num_bad_epochs = x, 0 end
  if self.cooldown_counter > 0 then self.cooldown_counter, self.num_bad_epochs = self.cooldown_counter - 1, 0 end
  if self.num_bad_epochs > a.patience then
    reduce(self)
    self.cooldown_counter, self.num_bad_epochs = a.cooldown, 0
  end
end
--- It has no other steps to go to: what it does depends on metrics.
function ReduceLROnPlateau:seek()
  P.fail(("%s: seek: its rates follow from metrics, wanted load_state_dict"):format(self.class_name))
end

function ReduceLROnPlateau:state_dict()
  local dict = LRScheduler.state_dict(self)
  dict.best, dict.num_bad_epochs, dict.cooldown_counter = self.best, self.num_bad_epochs, self.cooldown_counter
  return dict
end
--- What keeps load_state_dict(dict) from loading, in words; nil: nothing does. Changes nothing; not collective.
function ReduceLROnPlateau:check_state_dict(dict)
  local wrong = LRScheduler.check_state_dict(self, dict)
  for _, name in ipairs { "best", "num_bad_epochs", "cooldown_counter" } do
    local value = dict[name]
    if not wrong and type(value) ~= "number" and not (name == "best" and value == false) then
      wrong = ("%s is %s, wanted a number"):format(name, errors.kind(value))
    end
  end
  return wrong
end
function ReduceLROnPlateau:load_state_dict(dict)
  local wrong = self:check_state_dict(dict)
  if wrong then P.fail(("ReduceLROnPlateau:load_state_dict: %s"):format(wrong)) end
  LRScheduler.load_state_dict(self, dict)
  self.best, self.num_bad_epochs, self.cooldown_counter = dict.best, dict.num_bad_epochs, dict.cooldown_counter
end

return { ReduceLROnPlateau = ReduceLROnPlateau }
