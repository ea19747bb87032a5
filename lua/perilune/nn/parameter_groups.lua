-- parameter_groups.lua: optimizers whose parameters are in groups with options of their own, as PyTorch's: each group is an optimizer, and
-- they are one CombinedOptimizer.
--
--   local optimizer = nn.optim.AdamW { lr = 1e-3, params = {
--     { params = model.sparse_arch },                                  -- options that a group does not name are those of the optimizer
--     { params = model.over_arch, lr = 1e-2, weight_decay = 0 },
--   } }
--   optimizer.param_groups[2].lr = 1e-4
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local Module = require "perilune.nn.module"

local M = {}

--- The groups of an optimizer's arguments; nil: its parameters are in none.
local function groups_of(name, args)
  local list = type(args) == "table" and args.params
  if type(list) ~= "table" or Module.is(list) or type(list[1]) ~= "table" or list[1].params == nil then return nil end
  for i, group in ipairs(list) do
    if type(group) ~= "table" or group.params == nil then
      P.fail(("%s: params[%d] is %s, wanted a group like the first: { params =, lr =, ... }"):format(name, i, errors.kind(group)))
    end
  end
  return list
end

--- The parameters of a group; those without a name are numbered through all groups, from `first` on. The second value: how many there are.
local function named(params, first)
  if Tensor.is(params) then params = { params } end
  if Module.is(params) then return params, #params:named_parameters() end
  if type(params) ~= "table" then return params, 0 end
  local own = util.copy(params)
  for i, p in ipairs(params) do
    if Tensor.is(p) then own[i] = { name = tostring(first + i - 1), tensor = p } end
  end
  return own, #params
end

--- The class of such optimizers. get and set: a number of the first group, and of all.
local function grouped_class(name, base)
  local class = util.class(name, base)
  function class:get(number) return self.optimizers[1].optimizer:get(number) end
  function class:set(number, value)
    for _, o in ipairs(self.optimizers) do o.optimizer:set(number, value) end
  end
  return class
end

--- Let `class`, an optimizer with the arguments `spec`, take groups. combined(): the class CombinedOptimizer.
function M.let(class, name, spec, combined)
  local meta, grouped = getmetatable(class), nil
  local single = meta.__call
  meta.__call = function(self, args)
    local groups = groups_of(name, args)
    if not groups then return single(self, args) end
    grouped = grouped or grouped_class(name, combined())
    local optimizers, first = {}, 0
    for i, group in ipairs(groups) do
      local own = util.copy(args)
      for option, value in util.ordered(group) do
        if spec[option] == nil then
          P.fail(("%s: params[%d] has no option '%s'; allowed: %s"):format(name, i, tostring(option), table.concat(util.keys(spec), ", ")))
        end
        own[option] = value
      end
      local params, count = named(group.params, first)
      own.params = params
      optimizers[i], first = single(self, own), first + count
    end
    return grouped(optimizers)
  end
end

return M
