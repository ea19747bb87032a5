-- optim.lua: optimizers of the dense part, gradient clipping, and wrappers around optimizers. Schedules are in schedule.lua, reachable
-- from here too. Formulas and defaults are PyTorch's, wrappers TorchRec's.
--
--   local optimizer = nn.optim.Adagrad { params = model:parameters(), lr = 0.01 }
--   optimizer:zero_grad(); loss:backward(); optimizer:step()
local ffi = require "ffi"
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local F = require "perilune.nn.functional"
local Module = require "perilune.nn.module"
local leaves = require "perilune.nn.parameter"
local keyed = require "perilune.nn.keyed"
local spread = require "perilune.nn.spread"
local parameter_groups = require "perilune.nn.parameter_groups"
local of_ranks = require "perilune.tensor.sharded"
local StoredTensor = require "perilune.tensor.stored"
local signature = require "perilune.signature"
local C, check, ptr = P.C, P.check, Tensor.ptr

local M = { KeyedOptimizer = keyed.KeyedOptimizer, KeyedOptimizerWrapper = keyed.KeyedOptimizerWrapper }
local KeyedOptimizer = keyed.KeyedOptimizer

local wrap, _, optim_ptr = P.handle("peri_optim", {}, nil, "an optimizer")
local out, tensor_out, number = ffi.new "peri_optim *[1]", Tensor.out, ffi.new "double[1]"

-- -- parameters --------------------------------------------------------------------------------------------------------------------

--- An error if a tensor is in a list twice: an optimizer would step it twice, a norm count it twice. at: address -> position so far.
local function once(func, what, at, tensor, position)
  local address = tonumber(ffi.cast("intptr_t", ptr(tensor)))
  if at[address] then
    P.fail(("%s: %s[%d] is the same tensor as %s[%d]; each may be there once"):format(func, what, position, what, at[address]))
  end
  at[address] = position
end

--- Tensors and names of what a user gives as parameters: a list of tensors, a list of { name =, tensor = }, or a Module. One with a field
--- `elsewhere` may be empty: other ranks have parameters (see parameter.own_parts); the list of tensors has these fields too.
local function parameters_of(func, params)
  local elsewhere = type(params) == "table" and params.elsewhere or nil
  local group = elsewhere and params.group
  if Module.is(params) then params = params:named_parameters() end
  local pieces = type(params) == "table" and elsewhere and params.spread or nil
  if type(params) ~= "table" then P.fail(("%s: params must be a list of tensors, of { name, tensor }, or a Module"):format(func)) end
  local tensors, names, seen, at = { elsewhere = elsewhere, group = group, spread = pieces }, {}, {}, {}
  for i, p in ipairs(params) do
    tensors[i] = Tensor.is(p) and p or type(p) == "table" and p.tensor
    names[i] = type(p) == "table" and p.name or tostring(i - 1)
    if not Tensor.is(tensors[i]) then P.fail(("%s: params[%d] is no tensor"):format(func, i)) end
    if seen[names[i]] then P.fail(("%s: two parameters are named '%s'"):format(func, names[i])) end
    seen[names[i]] = true
    if leaves.retired[tensors[i]] then P.fail(("%s: parameter '%s' %s"):format(func, names[i], leaves.retired[tensors[i]])) end
    once(func, "params", at, tensors[i], i)
  end
  if #tensors == 0 and not elsewhere then
    P.fail(("%s: params is empty, so there is nothing to train; tables with fused_params are updated in the backward pass and need no "
      .. "optimizer"):format(func))
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

--- C's array of tensors.
local function pointers(tensors)
  local array = ffi.new("peri_tensor *[?]", math.max(#tensors, 1))
  for i = 1, #tensors do array[i - 1] = ptr(tensors[i]) end
  return array
end

-- -- optimizers --------------------------------------------------------------------------------------------------------------------

local Optimizer = util.class("Optimizer", KeyedOptimizer)
M.Optimizer = Optimizer

function Optimizer:_make(algorithm, a)
  self._made = setmetatable({ algorithm, a }, {})
  self.params, self._names = parameters_of(self.class_name, a.params)
  self.names = names_of_whole(self.params, self._names)
  local c = P.struct "peri_optim_args"
  check(C.peri_optim_default(algorithm, c))
  for name, value in util.ordered(a) do
    if name == "betas" then
      if type(value) ~= "table" or #value ~= 2 then
        P.fail(("%s: betas is %s, wanted two numbers"):format(self.class_name, errors.kind(value)))
      end
      c.beta1, c.beta2 = util.number(self.class_name, "betas[1]", value[1]), util.number(self.class_name, "betas[2]", value[2])
    elseif name ~= "params" then c[name] = type(c[name]) == "number" and util.number(self.class_name, name, value) or value end
  end
  check(C.peri_optim_new(c, pointers(self.params), #self.params, out))
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

--- Why _rebind cannot be; nil: it can.
function Optimizer:_rebind_refusal()
  if self.params.spread then return nil end
  return "its parameters have no names: make it of model:named_parameters()"
end

--- Train what has the same names in another list (DistributedModelParallel:named_parameters) from now on: tables were cut otherwise.
--- Numbers stay, states are those of the first step; whoever calls it loads them.
function Optimizer:_rebind(params)
  local wanted, numbers, list = util.index_of(self.names), {}, { elsewhere = params.elsewhere, group = params.group, spread = {} }
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
  local algorithm, a, old, groups = self._made[1], util.copy(self._made[2]), { self.params, self.names }, self.param_groups
  local rebound = (self.params.rebound or 0) + 1
  a.params, self._retired = list, nil
  self:_make(algorithm, a)
  -- Lists and groups stay the objects that they were: wrappers have them too.
  util.exchange(old[1], self.params)
  util.exchange(old[2], self.names)
  util.exchange(groups[1], self.param_groups[1])
  self.params, self.names, self.param_groups = old[1], old[2], groups
  self.params.rebound = rebound
  leaves.keep_rows(self, self.params)
  for name, value in util.ordered(numbers) do self:set(name, value) end
end

--- Update every parameter that has a gradient.
function Optimizer:step()
  if self._retired then P.fail(("%s: %s"):format(self.class_name, self._retired)) end
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

--- Everything that must be saved: a list of { name = "weight.exp_avg", tensor = } with live tensors, and { name = "weight.step", tensor = }
--- with the number of steps taken (f64, of the host). Of tables that are spread over ranks these are ShardedTensors. `params`: numbers of
--- the parameters that an entry is about.
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

--- Rows [first, first + n) of parameter i (from 1) start again: their states are those of the first step. Counts of steps stay.
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
    if of_ranks.ShardedTensor.is(source) then return "is whole here, given a ShardedTensor; ShardedTensor:gather() makes it whole" end
    if not Tensor.is(source) and not StoredTensor.is(source) then return ("is %s, wanted a tensor"):format(errors.kind(source)) end
    return source:numel() ~= n and ("has %d elements, given %d"):format(n, source:numel()) or nil
  end
  return of_ranks.refusal(s.tensor, source)
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
    local source = map[s.name]
    if s.key == "step" then
      for _, i in ipairs(s.params) do check(C.peri_optim_steps_set(optim_ptr(self._ref), i - 1, spread.number_of(source))) end
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
  parameter_groups.let(class, name, spec, function() return M.CombinedOptimizer end)
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

-- -- clipping ----------------------------------------------------------------------------------------------------------------------

local function power_of(array, n, p)
  check(C.peri_grad_norm_power(array, n, p, tensor_out))
  return Tensor.wrap(tensor_out[0])
end

--- What a norm is made of: parameters that all ranks have alike, and of which each has its own part: { sharded = list, group = }, or nil.
--- The list of parameters tells them apart, unless `options` does.
local function parts_of(func, params, options)
  local at = {}
  for i, p in ipairs(params) do once(func, "params", at, p, i) end
  local own, alike, chosen = {}, {}, options and options.sharded
  if chosen and not options.group then P.fail(func .. ": sharded parameters need a group") end
  for _, p in ipairs(chosen or {}) do own[tonumber(ffi.cast("intptr_t", ptr(p)))] = true end
  local parts = {}
  for i, p in ipairs(params) do
    local mine = own[tonumber(ffi.cast("intptr_t", ptr(p)))]
    if not chosen and leaves.own_parts[p] then
      if not params.elsewhere then
        P.fail(("%s: parameter %d is this rank's shard of a dense table, so the norm is of all ranks: give model:dense_parameters() as it "
          .. "is, or sharded = and group ="):format(func, i - 1))
      end
      parts[#parts + 1], mine = p, true
    end
    if not mine then alike[#alike + 1] = p end
  end
  if chosen then return alike, #chosen > 0 and options or nil end
  return alike, params.elsewhere and { sharded = parts, group = params.group } or nil
end

--- The sum (largest, if p is infinite) of both over all ranks of a group, for parameters of which each rank holds its own part. Collective.
local function with_sharded(power, sharded, group, p)
  local own = #sharded > 0 and power_of(pointers(sharded), #sharded, p) or Tensor.full({}, 0, "f64", power and power:device())
  group:all_reduce(own, p == math.huge and "max" or "sum"):wait()
  if not power then return own end
  if p == math.huge then return (F.max(F.stack({ power, own }, 1), 1)) end
  return F.add(power, own)
end

local function norm_of(alike, parts, p)
  local power
  if #alike > 0 then power = power_of(pointers(alike), #alike, p) end
  if parts then power = with_sharded(power, parts.sharded, parts.group, p) end
  if not power then P.fail "grad_norm: no parameters" end
  check(C.peri_grad_norm_finish(ptr(power), p, tensor_out))
  return Tensor.wrap(tensor_out[0])
end

local function clip(alike, parts, max_norm, norm_type)
  local norm = norm_of(alike, parts, norm_type)
  check(C.peri_grad_clip_norm(pointers(alike), #alike, ptr(norm), max_norm))
  if parts then check(C.peri_grad_clip_norm(pointers(parts.sharded), #parts.sharded, ptr(norm), max_norm)) end
  return norm
end

--- Norm of all gradients of a list of parameters: an f64 scalar tensor. Collective where the list (model:dense_parameters()) holds shards
--- of dense tables, on this rank or on another; `options` says which they are in other lists: sharded = a list of parameters of which each
--- rank of `group` holds its own part.
function M.grad_norm(params, norm_type, options)
  local alike, parts = parts_of("grad_norm", params, options)
  return norm_of(alike, parts, norm_type or 2)
end

--- Scale all gradients in place so that their norm is at most max_norm. Returns the norm that they had. Collective as grad_norm is.
function M.clip_grad_norm(params, max_norm, norm_type, options)
  local alike, parts = parts_of("clip_grad_norm", params, options)
  return clip(alike, parts, max_norm, norm_type or 2)
end

--- Limit every element of all gradients to +-clip_value, in place.
function M.clip_grad_value(params, clip_value) check(C.peri_grad_clip_value(pointers(params), #params, clip_value)) end

-- -- wrappers ----------------------------------------------------------------------------------------------------------------------

--- Around another optimizer; hands everything on.
local OptimizerWrapper = util.class("OptimizerWrapper", KeyedOptimizer)
M.OptimizerWrapper = OptimizerWrapper
function OptimizerWrapper:init(optimizer)
  self.optimizer, self.params, self.names, self.param_groups = optimizer, optimizer.params, optimizer.names, optimizer.param_groups
end
function OptimizerWrapper:step() self.optimizer:step() end
function OptimizerWrapper:zero_grad() self.optimizer:zero_grad() end
function OptimizerWrapper:get(name) return self.optimizer:get(name) end
function OptimizerWrapper:set(name, value) self.optimizer:set(name, value) end
function OptimizerWrapper:lr() return self.optimizer:lr() end
function OptimizerWrapper:set_lr(lr) self.optimizer:set_lr(lr) end
function OptimizerWrapper:set_momentum(value) self.optimizer:set_momentum(value) end
function OptimizerWrapper:named_state() return self.optimizer:named_state() end
function OptimizerWrapper:named_groups() return self.optimizer:named_groups() end
function OptimizerWrapper:check_state(map, prefix) return self.optimizer:check_state(map, prefix) end
function OptimizerWrapper:assign_state(map) self.optimizer:assign_state(map) end
function OptimizerWrapper:state_groups() return self.optimizer:state_groups() end

--- Clips gradients before each step. clipping: "none", "norm" (of all gradients together) or "value".
local GradientClippingOptimizer = util.class("GradientClippingOptimizer", OptimizerWrapper)
M.GradientClippingOptimizer = GradientClippingOptimizer
function GradientClippingOptimizer:init(args)
  local a = util.named("GradientClippingOptimizer", args, { optimizer = util.required, clipping = "none", max_gradient = 0.1, norm_type = 2,
    sharded = util.optional, group = util.optional })
  OptimizerWrapper.init(self, a.optimizer)
  self.clipping = util.one_of("GradientClippingOptimizer", "clipping", a.clipping, { "none", "norm", "value" })
  self.max_gradient, self.norm_type = a.max_gradient, a.norm_type
  if a.sharded and not a.group then P.fail "GradientClippingOptimizer: sharded parameters need a group" end
  if a.sharded and self.clipping == "value" then P.fail "GradientClippingOptimizer: clipping by value takes no sharded parameters" end
  if a.sharded then signature.value("GradientClippingOptimizer", "sharded", a.sharded, "tensors") end
  self._options, self._alike, self._parts, self._rebound = a.sharded and { sharded = a.sharded, group = a.group } or false, {}, nil, nil
  if self.clipping == "norm" then self:_sort() end
end
--- Which parameters are whole, and which are parts.
function GradientClippingOptimizer:_sort()
  self._alike, self._parts = parts_of("GradientClippingOptimizer", self.params, self._options or nil)
  self._rebound = self.params.rebound
end
function GradientClippingOptimizer:step()
  if self.clipping == "norm" and self._rebound ~= self.params.rebound then self:_sort() end
  if self.clipping == "norm" then clip(self._alike, self._parts, self.max_gradient, self.norm_type)
  elseif self.clipping == "value" then M.clip_grad_value(self.params, self.max_gradient) end
  self.optimizer:step()
end

--- Several optimizers as one: a list of optimizers or of { name =, optimizer = }; the name, with a dot, comes before those of the states.
local CombinedOptimizer = util.class("CombinedOptimizer", KeyedOptimizer)
M.CombinedOptimizer = CombinedOptimizer
function CombinedOptimizer:init(optimizers)
  self.optimizers, self.params, self.names, self.param_groups = {}, {}, {}, {}
  if type(optimizers) ~= "table" or #optimizers == 0 then P.fail "CombinedOptimizer: a list of optimizers is wanted, with one or more" end
  local seen, all, at = {}, self.params, {}
  for i, o in ipairs(optimizers) do
    signature.value("CombinedOptimizer", ("optimizers[%d]"):format(i), type(o) == "table" and o.optimizer or o, "optimizer")
    if not o.optimizer or OptimizerWrapper.is(o) then o = { name = "", optimizer = o } end
    self.optimizers[i] = o
    for _, group in ipairs(o.optimizer.param_groups or {}) do self.param_groups[#self.param_groups + 1] = group end
    all.elsewhere, all.group = all.elsewhere or o.optimizer.params.elsewhere, all.group or o.optimizer.params.group
    for _, name in ipairs(o.optimizer.names) do
      local full = o.name == "" and name or o.name .. "." .. name
      if seen[full] then P.fail(("CombinedOptimizer: two parameters are named '%s'"):format(full)) end
      seen[full] = true
      self.names[#self.names + 1] = full
    end
    for _, p in ipairs(o.optimizer.params) do
      all[#all + 1] = p
      once("CombinedOptimizer", "the parameters of all, params", at, p, #all)
    end
  end
end
for _, name in ipairs { "step", "zero_grad", "set_lr", "set_momentum" } do
  CombinedOptimizer[name] = function(self, value)
    for _, o in ipairs(self.optimizers) do o.optimizer[name](o.optimizer, value) end
  end
end
function CombinedOptimizer:lr() return self.optimizers[1].optimizer:lr() end
function CombinedOptimizer:named_state()
  local list = {}
  for _, o in ipairs(self.optimizers) do
    for _, s in ipairs(o.optimizer:named_state()) do
      local prefix = o.name == "" and "" or o.name .. "."
      list[#list + 1] = { name = prefix .. s.name, tensor = s.tensor, parameter = s.parameter and prefix .. s.parameter, key = s.key }
    end
  end
  return list
end
function CombinedOptimizer:named_groups()
  local list = {}
  for _, o in ipairs(self.optimizers) do
    for _, entry in ipairs(o.optimizer:named_groups()) do
      local names = util.map(entry.params, function(name) return o.name == "" and name or o.name .. "." .. name end)
      list[#list + 1] = { params = names, group = entry.group }
    end
  end
  return list
end
--- The part of `map` that is an optimizer's of the list, under its own names.
local function part_of(o, map)
  local part = {}
  for _, s in ipairs(o.optimizer:named_state()) do part[s.name] = map[o.name == "" and s.name or o.name .. "." .. s.name] end
  return part
end
function CombinedOptimizer:state_groups()
  local list = {}
  for _, o in ipairs(self.optimizers) do
    for _, group in ipairs(o.optimizer:state_groups()) do list[#list + 1] = group end
  end
  return list
end
function CombinedOptimizer:assign_state(map)
  for _, o in ipairs(self.optimizers) do o.optimizer:assign_state(part_of(o, map)) end
end
function CombinedOptimizer:check_state(map, prefix)
  local wrong = {}
  for _, o in ipairs(self.optimizers) do
    local before = (prefix or "") .. (o.name == "" and "" or o.name .. ".")
    for _, text in ipairs(o.optimizer:check_state(part_of(o, map), before)) do wrong[#wrong + 1] = text end
  end
  return wrong
end

signature.kind("optimizer", "an optimizer", function(x) return type(x) == "table" and (Optimizer.is(x) or type(x.step) == "function") end)
signature.check("optimizer:", Optimizer, { _rebind = "self: table, params: list",
  restart_rows = "self: table, i: count, first: count, n: count",
  get = "self: table, name: string", set = "self: table, name: string, value: number",
  set_lr = "self: table, lr: number", set_momentum = "self: table, value: number" })
signature.check("OptimizerWrapper:", OptimizerWrapper, { init = "self: table, optimizer: optimizer" })
signature.check("", M, {
  grad_norm = "params: list, norm_type: number?, options: table?",
  clip_grad_norm = "params: list, max_norm: number, norm_type: number?, options: table?",
  clip_grad_value = "params: list, clip_value: number",
})

-- What schedule.lua has is reachable from here; it needs this file, and so loads later.
return util.face("peri.nn.optim", M, { schedule = "perilune.nn.schedule" }, {}, { "perilune.nn.schedule" })
