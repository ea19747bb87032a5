-- states.lua: states of optimizers, and averages of parameters, in a load in part. They go with the weights:
--
--   the weights of a parameter are            what the optimizer (the average) has for it afterwards
--   in the checkpoint, and loaded             the states of the checkpoint
--   left as they are here (except, only)      its states stay as they are here, too
--   in the checkpoint, not in this model      nothing: they are left there
--
-- States that the options themselves leave out ("optimizer/state/PARAMETER", the numbers of its group with them) stay
-- as they are here, whatever becomes of the weights: another optimizer may train them from now on. Where nothing of a
-- model is loaded, its optimizers are loaded whole or not at all.
local util = require "perilune.util"

local M = {}

--- The weights of models: name of a module part -> the set of its names.
local function names_of(list)
  local names = {}
  for _, name in ipairs(list) do
    local part, rest = name:match "^([^/]*)/(.*)$"
    names[part or ""] = names[part or ""] or {}
    names[part or ""][rest or name] = true
  end
  return names
end

--- The part and the name of the weights that an optimizer's parameter is, in `names`; nil: of no model. An optimizer of
--- tables is of one model; others may have a part's name in front of those that several models have (named.lua).
local function weights_of(optimizer, parameter, names)
  local of = optimizer:match "^(.*)%.tables$"
  for part, own in util.ordered(names) do
    local rest = parameter:sub(1, #part + 1) == part .. "." and parameter:sub(#part + 2)
    if (not of or of == part) and own[parameter] then return part, parameter end
    if not of and rest and own[rest] then return part, rest end
  end
  return nil
end

--- Without this parameter.
local function drop(dict, parameter)
  dict.state[parameter] = nil
  local groups = {}
  for _, group in ipairs(dict.param_groups or {}) do
    local copy = util.copy(group)
    copy.params = {}
    for _, name in ipairs(group.params) do copy.params[#copy.params + 1] = name ~= parameter and name or nil end
    if #copy.params > 0 then groups[#groups + 1] = copy end
  end
  dict.param_groups = dict.param_groups and groups
end

--- With what `own`, the state dict of the optimizer that is here, has for this parameter. Numbers that it shares here
--- with parameters of the checkpoint are those of the checkpoint.
local function keep(dict, own, parameter)
  dict.state[parameter] = own.state[parameter]
  for _, here in ipairs(dict.param_groups and own.param_groups or {}) do
    local shared = util.index_of(here.params)
    if shared[parameter] then
      for _, group in ipairs(dict.param_groups) do
        for _, name in ipairs(group.params) do
          if shared[name] then
            group.params = util.copy(group.params)
            table.insert(group.params, parameter)
            return
          end
        end
      end
      local alone = util.copy(here)
      alone.params = { parameter }
      table.insert(dict.param_groups, alone)
    end
  end
end

--- All parameters that a state dict speaks of, in its states or its groups: a set.
local function parameters_of(dict)
  local set = {}
  for name in util.ordered(dict.state) do set[name] = true end
  for _, group in ipairs(dict.param_groups or {}) do
    for _, name in ipairs(group.params) do set[name] = true end
  end
  return set
end

--- The states of a part by parameter; nil: it has none. Averages of parameters (pipeline.ema) are nothing else.
local function states_of(part, dict)
  local states = part.object.by_parameter and { state = dict } or dict
  return type(states) == "table" and type(states.state) == "table" and states or nil
end

--- The dict of a part that is to be loaded with what fits the weights, if it is an optimizer or has averages. here,
--- saved: the names of the weights of those models of which something is loaded, in the program and in the checkpoint,
--- "part/name" each; chosen(name): whether one is loaded, or a state of a parameter.
function M.fit(part, dict, here, saved, chosen)
  if part.module or not states_of(part, dict) or type(part.object.state_dict) ~= "function" then return dict end
  local own = states_of(part, part.object:state_dict())
  if not own then return dict end
  local fitted = util.copy(states_of(part, dict))
  local of_here, of_saved = names_of(here), names_of(saved)
  local form = part.object.by_parameter and "%s/%s" or "%s/state/%s/"
  local function loads(parameter) return chosen(form:format(part.name, parameter)) end
  local function stays(parameter)
    local model, name = weights_of(part.name, parameter, of_here)
    return model and not chosen(model .. "/" .. name) or not loads(parameter)
  end
  fitted.state = util.copy(fitted.state)
  fitted.param_groups = fitted.param_groups and util.map(fitted.param_groups, util.copy)
  for parameter in util.ordered(parameters_of(fitted)) do
    local model = weights_of(part.name, parameter, of_saved)
    local gone = model and of_here[model] and own.state[parameter] == nil
      and not weights_of(part.name, parameter, of_here)
    if gone or stays(parameter) then drop(fitted, parameter) end
  end
  for parameter in util.ordered(own.state) do
    if fitted.state[parameter] == nil and stays(parameter) then keep(fitted, own, parameter) end
  end
  return part.object.by_parameter and fitted.state or fitted
end

return M
