-- parameter_groups.lua: optimizers whose parameters are in groups with options of their own, as PyTorch's: each group
-- is an optimizer, and they are one CombinedOptimizer.
--
--   local optimizer = nn.optim.AdamW { lr = 1e-3, params = {
--     -- options that a group does not name are those of the optimizer
--     { params = model.sparse_arch },
--     { params = model.over_arch, lr = 1e-2, weight_decay = 0 },
--   } }
--   optimizer.param_groups[2].lr = 1e-4
--   optimizer:add_param_group { params = model.tail, lr = 1e-3 }       -- any time, also where there were no groups
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local Module = require "perilune.nn.module"
local leaves = require "perilune.nn.parameter"
local combined = require "perilune.nn.combined"
local groups = require "perilune.nn.groups"

local M = {}

--- The groups of an optimizer's arguments; nil: its parameters are in none.
local function groups_of(args)
  local list = type(args) == "table" and args.params
  if type(list) ~= "table" or Module.is(list) or type(list[1]) ~= "table" or list[1].params == nil then return nil end
  return list
end

--- The parameters of a group; those without a name are numbered through all groups, from `first` on. The second value:
--- how many there are.
local function named(params, first)
  if Tensor.is(params) then params = { params } end
  if Module.is(params) then return params, #params:named_parameters() end
  if type(params) ~= "table" then return params, 0 end
  local own = util.copy(params) -- with what is wrong about it, of which the optimizer speaks
  for i, p in ipairs(params) do
    if Tensor.is(p) then own[i] = { name = tostring(first + i - 1), tensor = p, unnamed = true } end
  end
  return own, #params
end

--- An optimizer of one group. args: options of all; single(args): makes it; from: the number of parameters before it.
local function optimizer_of(name, spec, args, single, group, what, from)
  if type(group) ~= "table" or Tensor.is(group) then
    P.fail(("%s: %s is %s, wanted { params =, lr =, ... }"):format(name, what, errors.kind(group)))
  end
  if group.params == nil then
    P.fail(("%s: %s has no 'params', which are wanted beside the options"):format(name, what))
  end
  local own = util.copy(args)
  for option, value in util.ordered(group) do
    if spec[option] == nil then
      P.fail(("%s: %s has no option '%s'; allowed: %s"):format(name, what, tostring(option),
        table.concat(util.keys(spec), ", ")))
    end
    own[option] = value
  end
  local params, count = named(group.params, from)
  own.params = params
  return single(own), count
end

--- The class of such optimizers. get and set: a number of the first group, and of all.
local function grouped_class(name, spec, single)
  local class = util.class(name, combined.CombinedOptimizer)
  function class:init(args, optimizers)
    combined.CombinedOptimizer.init(self, optimizers)
    self._common = util.copy(args)
    self._common.params = nil
  end
  function class:get(number) return self.optimizers[1].optimizer:get(number) end
  function class:set(number, value)
    for _, o in ipairs(self.optimizers) do o.optimizer:set(number, value) end
  end
  --- A list of the names of those states that every group has. One that only some groups have is left out, since a
  --- group may have options of its own (amsgrad).
  function class:state_names()
    local found, all = {}, {}
    for _, o in ipairs(self.optimizers) do
      for _, state in ipairs(o.optimizer:state_names()) do found[state] = (found[state] or 0) + 1 end
    end
    for _, state in ipairs(self.optimizers[1].optimizer:state_names()) do
      if found[state] == #self.optimizers then all[#all + 1] = state end
    end
    return all
  end
  function class:add_param_group(group)
    local o = { name = "", optimizer = optimizer_of(name, spec, self._common, single, group, "the group", #self.names) }
    self.optimizers[#self.optimizers + 1] = o
    local ok, err = pcall(self._collect, self)
    if not ok then
      self.optimizers[#self.optimizers] = nil
      self:_collect()
      error(err, 0)
    end
    combined.register(self)
  end
  return class
end

--- Let an optimizer without groups, which stays the object that it is, be one of the class `grouped` whose only group
--- has been all of it.
local function into_groups(optimizer, grouped, args)
  local inner, lists = setmetatable(util.copy(optimizer), getmetatable(optimizer)),
    { "params", "names", "param_groups" }
  for _, list in ipairs(lists) do rawset(inner, list, util.copy(optimizer[list])) end
  local whole, group = grouped(args, { inner }), optimizer.param_groups[1]
  groups.renew(group, groups.like(group, inner.names, function(number) return inner:get(number) end,
    function(number, value) inner:set(number, value) end))
  for _, list in ipairs(lists) do rawset(whole, list, optimizer[list]) end
  util.exchange(optimizer, whole)
  setmetatable(optimizer, grouped)
  combined.register(optimizer, whole)
  leaves.keep_rows(optimizer, nil)
  leaves.keep_rows(inner, inner.params)
end

--- Let `class`, an optimizer with the arguments `spec`, take groups, and others later.
function M.let(class, name, spec)
  local meta = getmetatable(class)
  local make = meta.__call
  local function single(args) return make(class, args) end
  local grouped = grouped_class(name, spec, single)
  meta.__call = function(_, args, ...)
    local list = select("#", ...) == 0 and groups_of(args)
    if not list then return make(class, args, ...) end
    local optimizers, from = {}, 0
    for i, group in ipairs(list) do
      local count
      optimizers[i], count = optimizer_of(name, spec, args, single, group, ("params[%d]"):format(i), from)
      from = from + count
    end
    return grouped(args, optimizers)
  end
  function class:add_param_group(group)
    into_groups(self, grouped, self._made[2])
    self:add_param_group(group)
  end
end

return M
