-- named.lua: optimizers whose parameters were given as bare tensors (model:parameters()), their schedules, and averages
-- of such parameters (pipeline.ema), as a checkpoint has them: under the names that these parameters have in the models
-- that are saved beside. The object itself numbers them by their position, which is another one as soon as the model
-- has one layer more.
--
-- Parameters that no model has keep their numbers. So do those of a checkpoint that has only numbers: they are
-- found by position.
local util = require "perilune.util"
local spread = require "perilune.nn.spread"

local M = {}

--- The names of the models' parameters: tensor -> name. A name that several models have gets the part's in front.
local function names_in(models)
  local list, names, often = {}, {}, {}
  for _, part in ipairs(models) do
    local params, seen = part.object:named_parameters(), {}
    local pieces = spread.pieces_of(params.spread) -- of one table, and so of one name
    for _, p in ipairs(params) do
      if not pieces[p.tensor] and not seen[p.tensor] then
        list[#list + 1], seen[p.tensor] = { tensor = p.tensor, name = p.name, part = part.name }, true
        often[p.name] = (often[p.name] or 0) + 1
      end
    end
  end
  for _, p in ipairs(list) do
    names[p.tensor] = names[p.tensor] or (often[p.name] > 1 and p.part .. "." or "") .. p.name
  end
  return names
end

--- What an object calls parameters that were given without names: own name -> name in the models; nil: there are none.
local function numbered(object, models)
  local optimizer = object.params and object or type(object.optimizer) == "table" and object.optimizer or {}
  local unnamed = type(optimizer.params) == "table" and optimizer.params.unnamed or {}
  local names, result = #unnamed > 0 and names_in(models) or {}, {}
  for _, p in ipairs(unnamed) do
    local name = names[p.tensor]
    if name then result[p.name] = p.name:gsub("%d+$", function() return name end) end
  end
  return next(result) and result or nil
end

--- A copy of a table by names of parameters, under other names.
local function by_other_names(states, names)
  local result = {}
  for name, own in util.ordered(states) do result[names[name] or name] = own end
  return result
end

--- A copy of a state dict of an optimizer or a schedule in which parameters have other names.
function M.renamed(dict, names)
  if type(dict) ~= "table" then return dict end
  local result = util.copy(dict)
  if type(dict.state) == "table" then result.state = by_other_names(dict.state, names) end
  for _, key in ipairs { "param_groups", "groups" } do
    for i, group in ipairs(type(dict[key]) == "table" and dict[key] or {}) do
      if rawequal(result[key], dict[key]) then result[key] = util.copy(dict[key]) end
      if type(group) == "table" and type(group.params) == "table" then
        result[key][i] = util.copy(group)
        result[key][i].params = util.map(group.params, function(name) return names[name] or name end)
      end
    end
  end
  return result
end

--- The object itself, or, where it numbers parameters of `models` (parts), one that does for it what checkpoints ask.
function M.by_names(object, models)
  local there = numbered(object, models)
  if not there then return object end
  local own, view, rename = {}, {}, object.by_parameter and by_other_names or M.renamed
  for number, name in util.ordered(there) do own[name] = number end
  function view.state_dict() return rename(object:state_dict(), there) end
  function view.load_state_dict(_, dict) object:load_state_dict(rename(dict, own)) end
  view.check_state_dict = object.check_state_dict and function(_, dict)
    local why = object:check_state_dict(rename(dict, own))
    -- the object speaks of its numbers
    return why and why:gsub("'([^']*)'", function(name) return there[name] and ("'%s'"):format(there[name]) end) or nil
  end
  return setmetatable(view, { __index = object })
end

return M
