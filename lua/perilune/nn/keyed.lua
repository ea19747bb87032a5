-- keyed.lua: KeyedOptimizer: an optimizer whose state has the names of parameters, so that it can be saved, and loaded into another run
-- (TorchRec's optim.keyed). All optimizers of nn.optim are keyed, those of fused tables too (embed/fused.lua).
--
--   optimizer:state_dict()             -- { state = { ["over.weight"] = { exp_avg = tensor, ... }, ... } }; tensors are live
--   optimizer:load_state_dict(dict)
--   optimizer.param_groups[1].lr = 0.1 -- holds at once
local P = require "perilune.ffi"
local util = require "perilune.util"
local errors = require "perilune.errors"
local sharded = require "perilune.tensor.sharded"
local signature = require "perilune.signature"
local all_or_none = require("perilune.nn.ranks").all_or_none

local M = {}

-- -- groups of parameters ------------------------------------------------------------------------------------------------------------

--- Numbers that some parameters share, as fields ("lr", ...); `params`: the names of the parameters. Reading asks the optimizer, and an
--- assignment holds at once.
local ParamGroup = {}
M.ParamGroup = ParamGroup
function ParamGroup.__index(group, name)
  local own = rawget(group, "_group")
  if name == "params" then return own.params end
  return own.get(name)
end
function ParamGroup.__newindex(group, name, value)
  local own = rawget(group, "_group")
  if not util.index_of(own.numbers)[name] then
    P.fail(("param_groups: it has no number '%s'; those are: %s"):format(tostring(name), table.concat(own.numbers, ", ")))
  end
  own.set(name, signature.value("param_groups", name, value, "number"))
end

--- A group: the names of its parameters, the names of its numbers, and functions that read and set one.
function M.group(params, numbers, get, set)
  return setmetatable({ _group = { params = params, numbers = numbers, get = get, set = set } }, ParamGroup)
end

--- What of a group is saved.
local function saved(group)
  local own = rawget(group, "_group")
  local copy = { params = util.copy(own.params) }
  for _, name in ipairs(own.numbers) do copy[name] = own.get(name) end
  return copy
end

-- -- the optimizer -------------------------------------------------------------------------------------------------------------------

--- Fields: names (of the parameters, in order), params (their tensors, where they have some), param_groups. Subclasses have step,
--- zero_grad, and named_state: a list of { name =, tensor =, parameter =, key = }, a name being "parameter.key" unless it says otherwise.
local KeyedOptimizer = util.class "KeyedOptimizer"
M.KeyedOptimizer = KeyedOptimizer

--- KeyedOptimizer { params = { name = tensor, ... }, state = { name = { key = tensor, ... }, ... }, param_groups = { { params = { names },
--- lr =, ... }, ... } }: for optimizers of one's own, which add step.
function KeyedOptimizer:init(args)
  local a = util.named(self.class_name, args, { params = util.required.table, state = util.optional.table,
    param_groups = util.optional.list })
  self.names, self.params, self._state, self.param_groups = util.keys(a.params), {}, a.state or {}, {}
  for i, name in ipairs(self.names) do
    self.params[i] = signature.value(self.class_name, ("params['%s']"):format(name), a.params[name], "tensor")
  end
  for name in util.ordered(self._state) do
    if not a.params[name] then P.fail(("%s: state of '%s', which is no parameter"):format(self.class_name, tostring(name))) end
  end
  for i, given in ipairs(a.param_groups or {}) do
    local numbers = {}
    for name, value in util.ordered(given) do
      if type(value) == "number" then numbers[#numbers + 1] = name end
    end
    local own = util.copy(given)
    self.param_groups[i] = M.group(given.params or self.names, numbers, function(name) return own[name] end,
      function(name, value) own[name] = value end)
  end
end

function KeyedOptimizer:step() P.fail(("%s: no step method"):format(self.class_name)) end
function KeyedOptimizer:zero_grad()
  for _, p in ipairs(self.params) do p:set_grad(nil) end
end

function KeyedOptimizer:named_state()
  local list = {}
  for _, parameter in ipairs(self.names) do
    for key, tensor in util.ordered(self._state[parameter] or {}) do
      list[#list + 1] = { name = parameter .. "." .. key, tensor = tensor, parameter = parameter, key = key }
    end
  end
  return list
end

--- The state as one map from name to tensor.
function KeyedOptimizer:state()
  local map = {}
  for _, s in ipairs(self:named_state()) do map[s.name] = s.tensor end
  return map
end

--- The groups of ranks that have this optimizer together, each with its part of the state: a list.
function KeyedOptimizer:state_groups() return {} end -- luacheck: ignore 212

--- Restore what state() returned, or the same made whole. Every name must be there, and no other. If something is wrong nothing is
--- changed; collective over state_groups: nothing on any rank then.
function KeyedOptimizer:load_state(map)
  local func = self.class_name .. ":load_state"
  local ok, err = pcall(function() self:check_state(signature.value(func, "map", map, "table")) end)
  all_or_none(self:state_groups(), func, not ok and err or nil)
  self:assign_state(map)
end

--- Raise if `map` is not the optimizer's state. Subclasses that keep state of their own have this and assign_state.
function KeyedOptimizer:check_state(map)
  local known, state = {}, self:named_state()
  for _, s in ipairs(state) do
    known[s.name] = true
    if map[s.name] == nil then P.fail(("%s: state '%s' is missing"):format(self.class_name, s.name)) end
    local why = sharded.refusal(s.tensor, map[s.name])
    if why then P.fail(("%s: state '%s' %s"):format(self.class_name, s.name, why)) end
  end
  for name in util.ordered(map) do
    if not known[name] then P.fail(("%s: it has no state '%s'"):format(self.class_name, tostring(name))) end
  end
end

--- Take over a map that check_state has nothing against. Entries of named_state may have `load`, a function(source) in place of a copy.
function KeyedOptimizer:assign_state(map)
  for _, s in ipairs(self:named_state()) do
    if s.load then s.load(map[s.name]) else sharded.assign(s.tensor, map[s.name]) end
  end
end

function KeyedOptimizer:lr()
  return self.param_groups[1] and self.param_groups[1].lr or P.fail(self.class_name .. ": it has no parameters, and so no learning rate")
end
function KeyedOptimizer:set_lr(lr)
  for _, group in ipairs(self.param_groups) do group.lr = lr end
end
function KeyedOptimizer:set_momentum(value)
  for _, group in ipairs(self.param_groups) do group.momentum = value end
end

-- -- dictionaries --------------------------------------------------------------------------------------------------------------------

--- The parameter that an entry of named_state belongs to, and its key there.
local function place_of(s)
  if s.parameter then return s.parameter, s.key end
  local parameter, key = s.name:match "^(.*)%.([^.]+)$"
  return parameter or s.name, key or s.name
end

--- { state = { [name of parameter] = { [key] = live tensor or ShardedTensor } }, param_groups = (after save_param_groups(true)) a list of
--- { params = names, lr =, ... } }. Local.
function KeyedOptimizer:state_dict()
  local dict = { state = {} }
  for _, name in ipairs(self.names) do dict.state[name] = {} end
  for _, s in ipairs(self:named_state()) do
    local parameter, key = place_of(s)
    dict.state[parameter] = dict.state[parameter] or {}
    dict.state[parameter][key] = s.tensor
  end
  if self._save_param_groups then dict.param_groups = util.map(self.param_groups, saved) end
  return dict
end

--- The numbers of param_groups that are to be loaded, checked.
local function check_groups(self, func, groups)
  if groups == nil then return end
  if #signature.value(func, "dict.param_groups", groups, "list") ~= #self.param_groups then
    P.fail(("%s: %d param_groups, wanted %d"):format(func, #groups, #self.param_groups))
  end
  for i, group in ipairs(groups) do
    local known = util.index_of(rawget(self.param_groups[i], "_group").numbers)
    for name, value in util.ordered(signature.value(func, ("dict.param_groups[%d]"):format(i), group, "table")) do
      if name ~= "params" and not known[name] then
        P.fail(("%s: param_groups[%d] has no number '%s'"):format(func, i, tostring(name)))
      end
      if name ~= "params" then signature.value(func, ("param_groups[%d].%s"):format(i, name), value, "number") end
    end
  end
end

--- The entries of a state_dict as one map from name to tensor. Raises where it is not of this optimizer.
local function check_dict(self, func, dict)
  local flat, known = {}, {}
  signature.value(func, "dict", dict, "table")
  signature.value(func, "dict.state", dict.state, "table")
  for _, s in ipairs(self:named_state()) do
    local parameter, key = place_of(s)
    local own = dict.state[parameter]
    if type(own) ~= "table" or own[key] == nil then
      P.fail(("%s: '%s' of parameter '%s' is missing"):format(func, key, parameter))
    end
    flat[s.name] = own[key]
    known[parameter] = known[parameter] or {}
    known[parameter][key] = true
  end
  local names = util.index_of(self.names)
  for parameter, own in util.ordered(dict.state) do
    if not (names[parameter] or known[parameter]) then
      P.fail(("%s: it has no parameter '%s'; those are: %s"):format(func, tostring(parameter), table.concat(self.names, ", ")))
    end
    for key in util.ordered(signature.value(func, ("dict.state['%s']"):format(parameter), own, "table")) do
      if not (known[parameter] and known[parameter][key]) then
        P.fail(("%s: parameter '%s' has no state '%s'"):format(func, parameter, tostring(key)))
      end
    end
  end
  check_groups(self, func, dict.param_groups)
  self:check_state(flat)
  return flat
end

--- Restore a state_dict. All parameters and keys must be there, and no others; tensors are whole, or pieces of the same plan. With
--- param_groups in it, their numbers too. If something is wrong nothing is changed; collective over state_groups: on no rank then.
function KeyedOptimizer:load_state_dict(dict)
  local func = self.class_name .. ":load_state_dict"
  local ok, flat = pcall(check_dict, self, func, dict)
  all_or_none(self:state_groups(), func, not ok and flat or nil)
  self:assign_state(flat)
  for i, group in ipairs(dict.param_groups or {}) do
    for name, value in util.ordered(group) do
      if name ~= "params" then self.param_groups[i][name] = value end
    end
  end
  self:post_load_state_dict()
end

--- What a subclass does when a state_dict was loaded.
function KeyedOptimizer:post_load_state_dict() end -- luacheck: ignore 212
--- Whether state_dict has param_groups.
function KeyedOptimizer:save_param_groups(on) self._save_param_groups = on ~= false end
--- States are there from the start, so there is nothing to do (TorchRec: a step of gradients of zero, which makes them).
function KeyedOptimizer:init_state() end -- luacheck: ignore 212
function KeyedOptimizer:add_param_group() P.fail(("%s: parameters are given when it is made"):format(self.class_name)) end

-- -- made of another -----------------------------------------------------------------------------------------------------------------

--- KeyedOptimizerWrapper(params, factory): the optimizer that factory(list of { name =, tensor = }) makes of a map from names to tensors.
local KeyedOptimizerWrapper = util.class("KeyedOptimizerWrapper", KeyedOptimizer)
M.KeyedOptimizerWrapper = KeyedOptimizerWrapper
function KeyedOptimizerWrapper:init(params, factory)
  local list = {}
  for name, tensor in util.ordered(params) do
    list[#list + 1] = { name = name, tensor = signature.value("KeyedOptimizerWrapper", ("params['%s']"):format(name), tensor, "tensor") }
  end
  local made = factory(list)
  if not KeyedOptimizer.is(made) then
    P.fail(("KeyedOptimizerWrapper: factory returned %s, wanted an optimizer of nn.optim"):format(errors.kind(made)))
  end
  self.optimizer, self.params, self.names, self.param_groups = made, made.params, made.names, made.param_groups
end
for _, name in ipairs { "step", "zero_grad", "named_state", "check_state", "assign_state", "state_groups", "lr", "set_lr", "set_momentum",
  "get", "set" } do
  KeyedOptimizerWrapper[name] = function(self, a, b) return self.optimizer[name](self.optimizer, a, b) end
end

signature.check("KeyedOptimizer:", KeyedOptimizer, { load_state_dict = "self: table, dict: any", load_state = "self: table, map: any",
  save_param_groups = "self: table, on: boolean?" })
signature.check("KeyedOptimizerWrapper:", KeyedOptimizerWrapper, { init = "self: table, params: table, factory: callable" })

return M
