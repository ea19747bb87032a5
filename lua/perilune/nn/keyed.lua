-- keyed.lua: KeyedOptimizer: an optimizer whose state has the names of parameters, so that it can be saved, and loaded
-- into another run (TorchRec's optim.keyed). All optimizers of nn.optim are keyed, those of fused tables too
-- (embed/fused.lua).
--
--   -- { state = { ["over.weight"] = { exp_avg = tensor, ... }, ... },
--   --   param_groups = { { params = names, lr = 0.1, ... } } }; tensors are live, see tensor/state_dict.lua
--   optimizer:state_dict()
--   optimizer:load_state_dict(dict)
--   optimizer.param_groups[1].lr = 0.1 -- holds at once
local P = require "perilune.ffi"
local util = require "perilune.util"
local errors = require "perilune.errors"
local sharded = require "perilune.tensor.sharded"
local live = require("perilune.tensor.state_dict").live
local groups = require "perilune.nn.groups"
local signature = require "perilune.signature"
local ranks = require "perilune.nn.ranks"

local M = { group = groups.group, ParamGroup = groups.ParamGroup }

-- -- the optimizer ----------------------------------------------------------------------------------------------------

--- Fields: names (of the parameters, in order), params (their tensors, where they have some), param_groups. Subclasses
--- have step, zero_grad, and named_state: a list of { name =, tensor =, parameter =, key =, optional =, alike = }, a
--- name being "parameter.key" unless it says otherwise. optional (true): a state_dict may lack it, one from before it
--- was saved. alike: the group whose ranks have it alike.
local KeyedOptimizer = util.seal(util.class "KeyedOptimizer")
KeyedOptimizer.reads_stored = true -- load_state_dict takes StoredTensors, too (checkpoint/load.lua)
M.KeyedOptimizer = KeyedOptimizer

--- What to do instead of assigning to a field that there is not (util.seal).
function KeyedOptimizer.set_advice(self)
  local numbers = {}
  for _, group in ipairs(self.param_groups or {}) do
    for _, name in ipairs(rawget(group, "_group").numbers) do numbers[name] = true end
  end
  return next(numbers) and ("numbers are fields of param_groups[i]: %s; set_lr(lr) sets the rate of all"):format(
    table.concat(util.keys(numbers), ", "))
end

--- KeyedOptimizer { params = { name = tensor, ... }, state = { name = { key = tensor, ... }, ... }, param_groups = { {
--- params = { names }, lr =, ... }, ... } }: for optimizers of one's own, which add step.
function KeyedOptimizer:init(args)
  local a = util.named(self.class_name, args, { params = util.required.table, state = util.optional.table,
    param_groups = util.optional.list })
  self.names, self.params, self._state, self.param_groups = util.keys(a.params), {}, a.state or {}, {}
  for i, name in ipairs(self.names) do
    self.params[i] = signature.value(self.class_name, ("params['%s']"):format(name), a.params[name], "tensor")
  end
  for name in util.ordered(self._state) do
    if not a.params[name] then
      P.fail(("%s: state of '%s', which is no parameter"):format(self.class_name, tostring(name)))
    end
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

--- Its class, and for each group the parameters and the numbers.
function KeyedOptimizer:__tostring()
  local lines = {}
  for i, group in ipairs(self.param_groups or {}) do
    local own, parts = rawget(group, "_group"), {}
    parts[1] = ("  group %d: %d parameters"):format(i, #own.params)
    for _, name in ipairs(own.numbers) do parts[#parts + 1] = ("%s = %g"):format(name, own.get(name)) end
    lines[i] = table.concat(parts, ", ")
  end
  return #lines == 0 and self.class_name or ("%s (\n%s\n)"):format(self.class_name, table.concat(lines, "\n"))
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

--- What of `map`, from the names of named_state to what is given for them, does not fit: a list of texts, in which
--- `prefix` (or nil) comes before the names. Subclasses that keep state of their own have this and assign_state.
function KeyedOptimizer:check_state(map, prefix)
  local wrong = {}
  for _, s in ipairs(self:named_state()) do
    local why = map[s.name] ~= nil and sharded.refusal(s.tensor, map[s.name])
    if why then wrong[#wrong + 1] = ("state '%s%s' %s"):format(prefix or "", s.name, why) end
  end
  return wrong
end

--- What a map, which assign_state takes as a whole, has for the entry `s` of named_state.
function M.given(map, s)
  local source = map[s.name]
  if source == nil then P.fail(("assign_state: state '%s' is missing"):format(s.name)) end
  return source
end

--- Take over a whole map that check_state has nothing against. Entries of named_state may have `load`, a
--- function(source), in place of a copy.
function KeyedOptimizer:assign_state(map)
  for _, s in ipairs(self:named_state()) do
    local source = M.given(map, s)
    if s.load then s.load(source) else sharded.assign(s.tensor, source) end
  end
end

--- Have what check_state and assign_state of a class of optimizers are given checked.
function M.check_maps(class)
  signature.check(class.class_name .. ":", class, { check_state = "self: table, map: table, prefix: string?",
    assign_state = "self: table, map: table" })
end
M.check_maps(KeyedOptimizer)

function KeyedOptimizer:lr()
  return self.param_groups[1] and self.param_groups[1].lr
    or P.fail(self.class_name .. ": it has no parameters, and so no learning rate")
end
function KeyedOptimizer:set_lr(lr)
  for _, group in ipairs(self.param_groups) do group.lr = lr end
end
function KeyedOptimizer:set_momentum(value)
  for _, group in ipairs(self.param_groups) do group.momentum = value end
end

-- -- listed once ------------------------------------------------------------------------------------------------------

-- Checking and loading a state dict ask for the states again and again, and of 100,000 tables listing them takes a
-- while. While something is loaded, named_state of fused optimizers lists them once.
local listed = setmetatable({}, { __mode = "k" }) -- by coroutine: ranks of `sim` load beside each other
local MAIN = {}

local function here() return coroutine.running() or MAIN end

local function loaded(before, ok, ...)
  listed[here()] = before
  if not ok then error((...), 0) end
  return ...
end

--- Return f(...); meanwhile M.once(optimizer, list) lists what an optimizer has once.
function M.listing_once(f, ...)
  local before = listed[here()]
  listed[here()] = before or {}
  return loaded(before, xpcall(f, P.locate, ...))
end

--- list(optimizer), or what it returned before.
function M.once(optimizer, list)
  local known = listed[here()]
  if not known then return list(optimizer) end
  known[optimizer] = known[optimizer] or list(optimizer)
  return known[optimizer]
end

-- -- dictionaries -----------------------------------------------------------------------------------------------------

--- The parameter that an entry of named_state belongs to, and its key there.
local function place_of(s)
  if s.parameter then return s.parameter, s.key end
  local parameter, key = s.name:match "^(.*)%.([^.]+)$"
  return parameter or s.name, key or s.name
end

--- Its groups, with the parameters' names as this optimizer has them: a list of { params = names, group = a ParamGroup
--- }.
function KeyedOptimizer:named_groups()
  return util.map(self.param_groups, function(group) return { params = group.params, group = group } end)
end

--- { state = { [name of parameter] = { [key] = live tensor or ShardedTensor } }, param_groups = (unless
--- save_param_groups(false)) a list of { params = names, lr =, ... }: the numbers as they are now }. Local.
function KeyedOptimizer:state_dict()
  local dict = { state = {} }
  for _, name in ipairs(self.names) do dict.state[name] = {} end
  for _, s in ipairs(self:named_state()) do
    local parameter, key = place_of(s)
    dict.state[parameter] = dict.state[parameter] or {}
    dict.state[parameter][key] = s.tensor
  end
  if self._save_param_groups then dict.param_groups = groups.saved(self:named_groups()) end
  return live(dict)
end

--- The keys of the states that each parameter has: a set for each.
local function keys_of_states(self)
  local keys = {}
  for _, s in ipairs(self:named_state()) do
    local parameter, key = place_of(s)
    keys[parameter] = keys[parameter] or {}
    keys[parameter][key] = true
  end
  return keys
end

--- The entries of the states that `state` has as one map from name to tensor; `wrong` gets a text for everything that
--- does not fit.
local function check_entries(self, state, wrong)
  local flat, found, keys = {}, {}, nil -- found: of each parameter how many of its states are there
  for _, s in ipairs(self:named_state()) do
    local parameter, key = place_of(s)
    local own = type(state[parameter]) == "table" and state[parameter] or {}
    if own[key] ~= nil then flat[s.name] = own[key]
    elseif not s.optional then
      wrong[#wrong + 1] = ("'%s' of parameter '%s' is missing"):format(key, parameter)
    end
    found[parameter] = (found[parameter] or 0) + (own[key] ~= nil and 1 or 0)
  end
  local names = util.index_of(self.names)
  for parameter, own in util.ordered(state) do
    if not (names[parameter] or found[parameter]) then
      wrong[#wrong + 1] = ("it has no parameter '%s'; those are: %s"):format(tostring(parameter),
        table.concat(self.names, ", "))
    elseif type(own) ~= "table" then
      wrong[#wrong + 1] = ("dict.state['%s'] is %s, wanted a table"):format(parameter, errors.kind(own))
    elseif #util.keys(own) ~= (found[parameter] or 0) then
      keys = keys or keys_of_states(self)
      for key in util.ordered(own) do
        if not (keys[parameter] and keys[parameter][key]) then
          wrong[#wrong + 1] = ("parameter '%s' has no state '%s'"):format(parameter, tostring(key))
        end
      end
    end
  end
  return flat
end

--- What a state_dict has for the optimizer: one map from the names of states to tensors, and the numbers of its groups
--- (false: they stay). Raises where it is not of this optimizer, with all that does not fit.
local function check_dict(self, func, dict)
  local wrong, found = {}, false
  signature.value(func, "dict", dict, "table")
  local flat = check_entries(self, signature.value(func, "dict.state", dict.state, "table"), wrong)
  for _, text in ipairs(self:check_state(flat)) do wrong[#wrong + 1] = text end
  local named = self._save_param_groups and self:named_groups() or {}
  if #named > 0 and dict.param_groups == nil then
    wrong[#wrong + 1] = "param_groups, with the learning rates, are missing; after save_param_groups(false) rates "
      .. "stay as they are"
  elseif self._save_param_groups then
    found = groups.check(named, dict.param_groups or {}, wrong)
  end
  if #wrong > 0 then P.fail(("%s: %s"):format(func, table.concat(wrong, "; "))) end
  return flat, found
end

--- What keeps load_state_dict(dict) from loading, in words; nil: nothing does. Changes nothing; not collective.
function KeyedOptimizer:check_state_dict(dict)
  return errors.refusal(pcall(check_dict, self, "", dict))
end

--- Restore a state_dict. All parameters and keys must be there, and no others; tensors are whole, or pieces of the same
--- plan. The numbers of param_groups are found by the parameters' names. What does not fit is one error that lists it
--- all, and nothing is changed; collective over state_groups: on no rank then.
function KeyedOptimizer:load_state_dict(dict) return M.listing_once(self._load_state_dict, self, dict) end
function KeyedOptimizer:_load_state_dict(dict)
  local func = self.class_name .. ":load_state_dict"
  local ok, flat, found = pcall(check_dict, self, func, dict)
  ranks.all_or_none(self:state_groups(), func, not ok and flat or nil)
  ranks.given_alike(func, self:named_state(), flat)
  self:assign_state(flat)
  if found then groups.assign(self:named_groups(), found) end
  self:post_load_state_dict()
end

--- What a subclass does when a state_dict was loaded.
function KeyedOptimizer:post_load_state_dict() end -- luacheck: ignore 212
--- Whether state_dict has param_groups, and load_state_dict asks for them and sets them (at first: yes; in TorchRec:
--- no).
KeyedOptimizer._save_param_groups = true
function KeyedOptimizer:save_param_groups(on) self._save_param_groups = on ~= false end
--- States are there from the start, so there is nothing to do (TorchRec: a step of gradients of zero, which makes
--- them).
function KeyedOptimizer:init_state() end -- luacheck: ignore 212
function KeyedOptimizer:add_param_group()
  P.fail(("%s: parameters are given when it is made"):format(self.class_name))
end

-- -- made of another --------------------------------------------------------------------------------------------------

--- Around another optimizer; hands everything on.
local OptimizerWrapper = util.class("OptimizerWrapper", KeyedOptimizer)
M.OptimizerWrapper = OptimizerWrapper
function OptimizerWrapper:init(optimizer)
  self.optimizer, self.params, self.names, self.param_groups = optimizer, optimizer.params, optimizer.names,
    optimizer.param_groups
  self._shared = groups.shared(optimizer)
end
function OptimizerWrapper:_check_kept() groups.check_shared(self, self._shared) end
function OptimizerWrapper:step()
  self:_check_kept()
  self.optimizer:step()
end
for _, name in ipairs { "zero_grad", "named_state", "check_state", "assign_state", "state_groups",
  "named_groups", "lr", "set_lr", "set_momentum", "get", "set", "add_param_group" } do
  OptimizerWrapper[name] = function(self, a, b) return self.optimizer[name](self.optimizer, a, b) end
end

--- KeyedOptimizerWrapper(params, factory): the optimizer that factory(list of { name =, tensor = }) makes of a map from
--- names to tensors.
local KeyedOptimizerWrapper = util.class("KeyedOptimizerWrapper", OptimizerWrapper)
M.KeyedOptimizerWrapper = KeyedOptimizerWrapper
function KeyedOptimizerWrapper:init(params, factory)
  local list = {}
  for name, tensor in util.ordered(params) do
    list[#list + 1] = { name = name, tensor = signature.value("KeyedOptimizerWrapper", ("params['%s']"):format(name),
      tensor, "tensor") }
  end
  local made = factory(list)
  if not KeyedOptimizer.is(made) then
    P.fail(("KeyedOptimizerWrapper: factory returned %s, wanted an optimizer of nn.optim"):format(errors.kind(made)))
  end
  OptimizerWrapper.init(self, made)
end

signature.check("KeyedOptimizer:", KeyedOptimizer, { load_state_dict = "self: table, dict: any",
  save_param_groups = "self: table, on: boolean?" })
signature.check("KeyedOptimizerWrapper:", KeyedOptimizerWrapper,
  { init = "self: table, params: table, factory: callable" })

return M
