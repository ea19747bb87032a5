-- optim.lua: optimizers of the dense part. Clipping is in clip.lua, optimizers made of others in combined.lua,
-- schedules in schedule.lua, all reachable from here. Formulas and defaults are PyTorch's.
--
--   local optimizer = nn.optim.Adagrad { params = model:parameters(), lr = 0.01 }
--   optimizer:zero_grad(); loss:backward(); optimizer:step()
local ffi = require "ffi"
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local Module = require "perilune.nn.module"
local leaves = require "perilune.nn.parameter"
local keyed = require "perilune.nn.keyed"
local clip = require "perilune.nn.clip"
local combined = require "perilune.nn.combined"
local spread = require "perilune.nn.spread"
local parameter_groups = require "perilune.nn.parameter_groups"
local param_group = require "perilune.nn.groups"
local of_ranks = require "perilune.tensor.sharded"
local StoredTensor = require "perilune.tensor.stored"
local signature = require "perilune.signature"
local C, check = P.C, P.check

local M = { KeyedOptimizer = keyed.KeyedOptimizer, KeyedOptimizerWrapper = keyed.KeyedOptimizerWrapper,
  OptimizerWrapper = keyed.OptimizerWrapper, GradientClippingOptimizer = combined.GradientClippingOptimizer,
  CombinedOptimizer = combined.CombinedOptimizer, grad_norm = clip.grad_norm, clip_grad_norm = clip.clip_grad_norm,
  clip_grad_value = clip.clip_grad_value, select = spread.select }
local KeyedOptimizer = keyed.KeyedOptimizer

local wrap, _, optim_ptr = P.handle("peri_optim", {}, nil, "an optimizer")
local out, tensor_out, number = ffi.new "peri_optim *[1]", Tensor.out, ffi.new "double[1]"

-- -- parameters -------------------------------------------------------------------------------------------------------

--- Tensors and names of what a user gives as parameters: a list of tensors, a list of { name =, tensor = }, or a
--- Module. One with a field `elsewhere` may be empty: other ranks have parameters (see parameter.own_parts); the list
--- of tensors has these fields too, and `unnamed`: a list of { tensor =, name = }, those that were given without a
--- name and have a number in its place.
local function parameters_of(func, params)
  local elsewhere = type(params) == "table" and params.elsewhere or nil
  local group = elsewhere and params.group
  if Module.is(params) then params = params:named_parameters() end
  local pieces = type(params) == "table" and elsewhere and params.spread or nil
  if type(params) ~= "table" then
    P.fail(("%s: params must be a list of tensors, of { name, tensor }, or a Module"):format(func))
  end
  local fault = util.list_fault(params)
  if fault then P.fail(("%s: params %s"):format(func, fault)) end
  local tensors = { elsewhere = elsewhere, group = group, spread = pieces, unnamed = {} }
  local names, seen, at = {}, {}, {}
  for i, p in ipairs(params) do
    tensors[i] = Tensor.is(p) and p or type(p) == "table" and p.tensor
    names[i] = type(p) == "table" and p.name or tostring(i - 1)
    if not Tensor.is(tensors[i]) then P.fail(("%s: params[%d] is no tensor"):format(func, i)) end
    if seen[names[i]] then P.fail(("%s: two parameters are named '%s'"):format(func, names[i])) end
    seen[names[i]] = true
    if Tensor.is(p) or p.unnamed then table.insert(tensors.unnamed, { tensor = tensors[i], name = names[i] }) end
    if leaves.retired[tensors[i]] then
      P.fail(("%s: parameter '%s' %s"):format(func, names[i], leaves.retired[tensors[i]]))
    end
    clip.once(func, "params", at, tensors[i], i)
  end
  if #tensors == 0 and not elsewhere then
    P.fail(("%s: params is empty, so there is nothing to train; tables with fused_params are updated in the backward "
      .. "pass and need no optimizer"):format(func))
  end
  return tensors, names
end

--- Names that are the same on all ranks: of parameters, and of the wholes that some are pieces of.
local function names_of_whole(params, names)
  if not params.spread then return names end
  local own, list = spread.pieces_of(params.spread), {}
  for i, p in ipairs(params) do
    if not own[p] then list[#list + 1] = names[i] end
  end
  for _, e in ipairs(params.spread) do list[#list + 1] = e.name end
  return list
end

-- -- optimizers -------------------------------------------------------------------------------------------------------

local Optimizer = util.class("Optimizer", KeyedOptimizer)
M.Optimizer = Optimizer

function Optimizer:_make(algorithm, a)
  self._made = setmetatable({ algorithm, a }, {})
  self.params, self._names = parameters_of(self.class_name, a.params)
  self.names = names_of_whole(self.params, self._names)
  self._kept_params, self._kept_names = util.copy(self.params), util.copy(self.names) -- see step
  local c = P.struct "peri_optim_config"
  check(C.peri_optim_default(algorithm, c))
  for name, value in util.ordered(a) do
    if name == "betas" then
      if type(value) ~= "table" or #value ~= 2 then
        P.fail(("%s: betas is %s, wanted two numbers"):format(self.class_name, errors.kind(value)))
      end
      c.beta1, c.beta2 = util.number(self.class_name, "betas[1]", value[1]),
        util.number(self.class_name, "betas[2]", value[2])
    elseif name ~= "params" then c[name] = type(c[name]) == "number" and util.number(self.class_name, name, value)
      or value end
  end
  check(C.peri_optim_new(c, clip.pointers(self.params), #self.params, out))
  self._ref = P.lasting(wrap, out[0])
  leaves.keep_rows(self, self.params)
  self._momentum = (algorithm == C.PERI_OPTIM_ADAM or algorithm == C.PERI_OPTIM_ADAMW) and "beta1" or "momentum"
  local fixed = { optimizer = self.class_name }
  for _, name in ipairs(self.switches) do fixed[name] = c[name] end
  self.param_groups = { keyed.group(self.names, self.numbers, function(name) return self:get(name) end,
    function(name, value) self:set(name, value) end, fixed) }
end

--- Parameter i is trained no more, as the next step says.
function Optimizer:retire(i, why) self._retired = ("parameter '%s' %s"):format(self._names[i], why) end
Optimizer._retired = false

--- Why _rebind(params) cannot be; nil: it can.
function Optimizer:_rebind_refusal(params)
  local known, pieces = {}, spread.pieces_of(params.spread)
  for _, e in ipairs(params.spread or {}) do known[e.name] = true end
  for _, p in ipairs(params) do known[p.name] = known[p.name] or not pieces[p.tensor] end
  for _, name in ipairs(self.names) do
    if not known[name] then
      return ("its parameters have no names that the model knows ('%s'): make it of model:named_parameters()"):format(
        name)
    end
  end
end

--- Train what has the same names in another list (DistributedModelParallel:named_parameters) from now on: tables were
--- cut otherwise. Numbers stay, states are those of the first step; whoever calls it loads them.
function Optimizer:_rebind(params)
  local wanted, numbers, list = util.index_of(self.names), {}, { elsewhere = params.elsewhere, group = params.group,
    spread = {} }
  local pieces, own = spread.pieces_of(params.spread), {}
  for _, e in ipairs(params.spread or {}) do
    if wanted[e.name] then
      list.spread[#list.spread + 1] = e
      for _, piece in ipairs(e.pieces) do own[piece.tensor] = true end
    end
  end
  for _, p in ipairs(params) do
    signature.value("optimizer:_rebind", "an entry of params", p, "table")
    if own[p.tensor] or wanted[p.name] and not pieces[p.tensor] then list[#list + 1] = p end
  end
  for _, name in ipairs(self.numbers) do numbers[name] = self:get(name) end
  local algorithm, a, old, groups = self._made[1], util.copy(self._made[2]), { self.params, self.names },
    self.param_groups
  local rebound = (self.params.rebound or 0) + 1
  a.params, self._retired = list, nil
  self:_make(algorithm, a)
  -- Lists and groups stay the objects that they were: wrappers have them too.
  util.exchange(old[1], self.params)
  util.exchange(old[2], self.names)
  param_group.renew(groups[1], self.param_groups[1], old[2])
  self.params, self.names, self.param_groups = old[1], old[2], groups
  self.params.rebound = rebound
  leaves.keep_rows(self, self.params)
  combined.changed(self.params)
  for name, value in util.ordered(numbers) do self:set(name, value) end
end

--- Update every parameter that has a gradient.
function Optimizer:step()
  if self._retired then P.fail(("%s: %s"):format(self.class_name, self._retired)) end
  param_group.check_kept(self.class_name, self.param_groups, 1)
  param_group.check_list(self.class_name, "params", self.params, self._kept_params)
  param_group.check_list(self.class_name, "names", self.names, self._kept_names)
  check(C.peri_optim_step(optim_ptr(self._ref)))
  if P.state.saves then P.state.saves.progress() end
end
--- Drop all gradients.
function Optimizer:zero_grad() check(C.peri_optim_zero_grad(optim_ptr(self._ref))) end

--- A number by its name: "lr", "weight_decay", "momentum", "eps", "beta1", ...
function Optimizer:get(name)
  check(C.peri_optim_get(optim_ptr(self._ref), name, number))
  return number[0]
end
function Optimizer:set(name, value) check(C.peri_optim_set(optim_ptr(self._ref), name, value)) end
function Optimizer:lr() return self:get "lr" end
function Optimizer:set_lr(lr) self:set("lr", lr) end
--- What schedules that cycle the momentum change: momentum, or the first beta.
function Optimizer:set_momentum(value) self:set(self._momentum, value) end

--- Names of the states that every parameter has.
function Optimizer:state_names()
  local list, i = {}, 0
  while true do
    local name = C.peri_optim_state_name(optim_ptr(self._ref), i)
    if name == nil then return list end
    i = i + 1
    list[i] = ffi.string(name)
  end
end

function Optimizer:_state_of(i, kind)
  check(C.peri_optim_state(optim_ptr(self._ref), i - 1, kind, tensor_out))
  return Tensor.wrap(tensor_out[0])
end
function Optimizer:_steps(i) return tonumber(C.peri_optim_steps(optim_ptr(self._ref), i - 1)) end

--- Everything that must be saved: a list of { name = "weight.exp_avg", tensor = } with live tensors, and { name =
--- "weight.step", tensor = } with the number of steps taken (f64, of the host). Of tables that are spread over ranks
--- these are ShardedTensors. `params`: numbers of the parameters that an entry is about.
function Optimizer:named_state()
  local list, kinds, own, position = {}, self:state_names(), spread.pieces_of(self.params.spread), {}
  local function add(name, kind, tensor, params)
    list[#list + 1] = { name = name .. "." .. kind, tensor = tensor, parameter = name, key = kind, params = params }
  end
  for i, p in ipairs(self.params) do
    position[p] = i
    for _, kind in ipairs(own[p] and {} or kinds) do add(self._names[i], kind, self:_state_of(i, kind), { i }) end
    if not own[p] then add(self._names[i], "step", Tensor.tensor(self:_steps(i), "f64", "cpu"), { i }) end
  end
  for _, e in ipairs(self.params.spread or {}) do
    local params = util.map(e.pieces, function(piece) return position[piece.tensor] end)
    for _, kind in ipairs(kinds) do
      add(e.name, kind, spread.state(e, self.by_row, function(p) return self:_state_of(position[p], kind) end), params)
    end
    add(e.name, "step", spread.steps(e, function(p) return self:_steps(position[p]) end), params)
  end
  return list
end

--- Rows [first, first + n) of parameter i (from 1) start again: their states are those of the first step. Counts of
--- steps stay.
function Optimizer:restart_rows(i, first, n)
  for _, kind in ipairs(self:state_names()) do
    check(C.peri_optim_state(optim_ptr(self._ref), i - 1, kind, tensor_out))
    local start = kind == "sum" and self:get "initial_accumulator_value" or 0
    Tensor.wrap(tensor_out[0]):slice(1, first, first + n):fill(start)
  end
end

function Optimizer:state_groups()
  optim_ptr(self._ref) -- an error for a class, which has no parameters
  return spread.groups_of(self.params.spread)
end

--- What keeps `source` from becoming the state `s`; nil: nothing.
local function refusal(s, source)
  if Tensor.is(s.tensor) or s.key == "step" and Tensor.is(source) then
    local n = Tensor.is(s.tensor) and s.tensor:numel() or 1
    if of_ranks.ShardedTensor.is(source) then
      return ("is whole here, and a ShardedTensor %s; ShardedTensor:gather() makes it whole"):format(
        of_ranks.origin(source))
    end
    if not Tensor.is(source) and not StoredTensor.is(source) then
      return ("is %s, wanted a tensor"):format(errors.kind(source))
    end
    if source:numel() ~= n then
      return ("has %d elements here, and %d %s"):format(n, source:numel(), of_ranks.origin(source))
    end
    if s.key == "step" then return spread.steps_refusal(source) end
    return of_ranks.refusal(s.tensor, Tensor.is(source) and source:reshape(s.tensor:shape()) or source)
  end
  return of_ranks.refusal(s.tensor, source) or s.key == "step" and spread.steps_refusal(source) or nil
end

function Optimizer:check_state(map, prefix)
  local wrong = {}
  for _, s in ipairs(self:named_state()) do
    local why = map[s.name] ~= nil and refusal(s, map[s.name])
    if why then wrong[#wrong + 1] = ("state '%s%s' %s"):format(prefix or "", s.name, why) end
  end
  return wrong
end

function Optimizer:assign_state(map)
  for _, s in ipairs(self:named_state()) do
    local source = keyed.given(map, s)
    if s.key == "step" then
      for _, i in ipairs(s.params) do
        check(C.peri_optim_steps_set(optim_ptr(self._ref), i - 1, spread.number_of(source)))
      end
    elseif Tensor.is(s.tensor) and Tensor.is(source) then s.tensor:copy(source:reshape(s.tensor:shape()))
    else of_ranks.assign(s.tensor, source) end
  end
end

--- A class of optimizers with the given options.
local function define(name, kind, options)
  local spec = { params = util.required }
  for option, default in util.ordered(options) do spec[option] = default end
  local class = util.class(name, Optimizer)
  class.numbers, class.switches, class.by_row = {}, {}, kind == C.PERI_OPTIM_ROWWISE_ADAGRAD
  for option, default in util.ordered(options) do
    if option == "betas" then class.numbers[#class.numbers + 1], class.numbers[#class.numbers + 2] = "beta1", "beta2"
    elseif type(default) == "number" then class.numbers[#class.numbers + 1] = option
    else class.switches[#class.switches + 1] = option end
  end
  function class:init(args) self:_make(kind, util.named(name, args, spec)) end
  parameter_groups.let(class, name, spec)
  M[name] = class
end

define("SGD", C.PERI_OPTIM_SGD,
  { lr = 1e-3, momentum = 0, dampening = 0, weight_decay = 0, nesterov = false, maximize = false })
define("Adagrad", C.PERI_OPTIM_ADAGRAD,
  { lr = 1e-2, lr_decay = 0, weight_decay = 0, initial_accumulator_value = 0, eps = 1e-10, maximize = false })
define("Adam", C.PERI_OPTIM_ADAM,
  { lr = 1e-3, betas = { 0.9, 0.999 }, eps = 1e-8, weight_decay = 0, amsgrad = false, maximize = false })
define("AdamW", C.PERI_OPTIM_ADAMW,
  { lr = 1e-3, betas = { 0.9, 0.999 }, eps = 1e-8, weight_decay = 1e-2, amsgrad = false, maximize = false })
define("RMSprop", C.PERI_OPTIM_RMSPROP,
  { lr = 1e-2, alpha = 0.99, eps = 1e-8, weight_decay = 0, momentum = 0, centered = false, maximize = false })
--- TorchRec's: one sum for each row; parameters have two dimensions or more.
define("RowWiseAdagrad", C.PERI_OPTIM_ROWWISE_ADAGRAD,
  { lr = 1e-2, lr_decay = 0, weight_decay = 0, initial_accumulator_value = 0, eps = 1e-10, maximize = false })

keyed.check_maps(Optimizer)
signature.check("optimizer:", Optimizer, { _rebind = "self: table, params: list",
  _rebind_refusal = "self: table, params: list",
  restart_rows = "self: table, i: count, first: count, n: count",
  get = "self: table, name: string", set = "self: table, name: string, value: number",
  set_lr = "self: table, lr: number", set_momentum = "self: table, value: number" })

-- What schedule.lua and plateau.lua have is reachable from here; they need this file, and so load later.
return util.face("peri.nn.optim", M, { schedule = "perilune.nn.schedule" }, {},
  { "perilune.nn.schedule", "perilune.nn.plateau" })
