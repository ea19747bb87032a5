-- changes.lua: a DistributedModelParallel that is no longer what was wrapped: parameters, and modules with tables, that
-- were made or put into it since. Each rank would have numbers of its own for them, and train them on its own batches.
-- A backward pass that reaches such a one is refused before it changes anything. And a model in the middle of a step,
-- whose parts are of different moments.
local P = require "perilune.ffi"
local Tensor = require "perilune.tensor"
local parameter = require "perilune.nn.parameter"
local agree = require("perilune.dist.collective_utils").agree

local M = {}

local MOST = 3 -- names in a message

--- The replicated parameters that the model has now, as a set of tensors.
function M.noted(model)
  local set = {}
  for _, p in ipairs(model:replicated_parameters()) do set[p] = true end
  return setmetatable(set, {}) -- a metatable: no place to look for parameters
end

--- An error on all ranks unless each of these parameters, which averages keep alike, has the same bits on all of them.
--- What the last step of a run did is in no gradients that follow, with which it would be compared. Collective; waits.
function M.check_replicas(model, func)
  if model.dense_env.pg:size() == 1 then return end
  agree(model.dense_env.pg, func, P.scope(function()
    local sums = {}
    for _, p in ipairs(model:named_parameters()) do
      if not parameter.own_parts[p.tensor] then
        sums[#sums + 1] = { ("after the last step the checksum of parameter '%s'"):format(p.name),
          tostring(Tensor._checksum(p.tensor:detach())) }
      end
    end
    return sums
  end))
end

local function changed(model)
  local now = M.noted(model)
  for p in pairs(now) do -- any order
    if not model._wrapped[p] then return true end
  end
  for p in pairs(model._wrapped) do -- any order
    if not now[p] then return true end
  end
  return false
end

--- Whether the model's parameters are others than when they were handed to the wrapper: on all ranks, or an error.
--- Collective.
function M.of_all(model)
  local is = changed(model)
  agree(model.dense_env.pg, "DistributedModelParallel:init_data_parallel",
    { { "whether the model has got other parameters", tostring(is) } })
  return is
end

--- Parameters that `from` had and that `to`, in whose place it was, has not: whoever trains them is told.
function M.retire(from, to)
  local kept, gone = {}, {}
  for _, p in ipairs(to:parameters()) do kept[p] = true end
  for _, m in ipairs(from:modules()) do
    for _, name in ipairs(m.is_materialised and not m:is_materialised() and {} or m._parameters) do
      local p = rawget(m, name)
      if p and not kept[p] then gone[#gone + 1] = p end
    end
  end
  if #gone == 0 then return end
  parameter.retire(gone, "is a table that DistributedModelParallel has cut into shards since, and its memory is not "
    .. "the model's any more: make the optimizer of model:dense_parameters(), after the model was wrapped")
end

--- Names of parameters that the pass reaches and that are not averaged.
local function new_parameters(model, reaches)
  local list = {}
  for _, p in ipairs(model:named_parameters()) do
    local averaged = model._wrapped[p.tensor] or parameter.own_parts[p.tensor]
    if not averaged and reaches(p.tensor) then list[#list + 1] = ("'%s'"):format(p.name) end
  end
  return list
end

--- Modules with tables that train themselves on this rank alone: those that wrapping would have refused or sharded.
local function new_tables(model)
  local within, list = {}, {}
  for _, sharded in ipairs(model.sharded) do
    for _, m in ipairs(sharded:modules()) do within[m] = true end
  end
  for _, m in ipairs(model.module:named_modules()) do
    if not within[m.module] and m.module.sharder and rawget(m.module, "fused_params") then
      list[#list + 1] = ("'%s' (%s)"):format(m.path, m.module.class_name)
    end
  end
  return list
end

--- The first few of a list of names as text, and how many more there are.
local function listed(list)
  local more = #list > MOST and (" and %d more"):format(#list - MOST) or ""
  return table.concat(list, ", ", 1, math.min(#list, MOST)) .. more
end

--- Whether a pass is one of this model: it reaches parameters that are averaged.
local function is_of(model, reaches)
  for p in pairs(model._wrapped) do -- any order
    if reaches(p) then return true end
  end
  return false
end

-- Parameters outside of all models about which somebody was told.
local told = setmetatable({}, { __mode = "k" })

--- Whether a live model has the parameter and sees to its gradient.
local function is_averaged(p)
  if parameter.own_parts[p] then return true end
  for model in pairs(Tensor.stray_checks) do -- any order
    if model._wrapped and model._wrapped[p] then return true end
  end
  return false
end

-- What optimizers train outside of all models, as it was when `kept` and `wrapped` were those that there are: nothing,
-- nearly always, so that a pass has nothing to look through. Keeps nothing alive.
local outside = { kept = -1, models = 0, wrapped = setmetatable({}, { __mode = "kv" }), list = {} }

--- Whether the list was made of the optimizers and the models that there are now.
local function is_current()
  local models = 0
  for model in pairs(Tensor.stray_checks) do -- any order
    if model._wrapped then
      models = models + 1
      if outside.wrapped[model] ~= model._wrapped then return false end
    end
  end
  return models == outside.models and outside.kept == parameter._kept_changes()
end

--- { keeper, position, parameter } of all that optimizers train and no model averages, in no order.
local function all_outside()
  if is_current() then return outside.list end
  outside.kept, outside.models, outside.list = parameter._kept_changes(), 0, {}
  for model in pairs(Tensor.stray_checks) do -- any order
    outside.wrapped[model] = model._wrapped or nil
    if model._wrapped then outside.models = outside.models + 1 end
  end
  parameter._each_kept(function(keeper, position, p)
    if not is_averaged(p) then
      outside.list[#outside.list + 1] = setmetatable({ keeper, position, p }, { __mode = "v" })
    end
  end)
  return outside.list
end

--- Say, once of each and each rank for itself, which parameters outside of the model an optimizer trains by this pass:
--- a layer in a closure, say. It may be meant, and the script averages their gradients: no error.
local function tell_outside(model, reaches)
  local list, pg = {}, model.dense_env.pg
  if pg:size() == 1 or not is_of(model, reaches) then return end
  for _, one in ipairs(all_outside()) do
    local keeper, position, p = one[1], one[2], one[3]
    if keeper and p and not told[p] and reaches(p) and not is_averaged(p) then
      told[p] = true
      list[#list + 1] = ("params[%d] of %s (%s [%s])"):format(position, keeper.class_name or "an optimizer", p:dtype(),
        table.concat(p:shape(), ", "))
    end
  end
  if #list == 0 then return end
  table.sort(list)
  io.stderr:write(("perilune: rank %d: a backward pass of a DistributedModelParallel reaches %s, outside of the model: "
    .. "nobody averages what an optimizer trains there, and each rank trains other numbers; put the layer into the "
    .. "model before it is wrapped, or average the gradients before each step\n"):format(pg:rank(), listed(list)))
end

--- An error if a backward pass reaches what is in `model` and nobody averages. Asked where a pass reaches such a thing,
--- in this model or in another one, or in none.
function M.check(model, reaches)
  if not model._wrapped or model._home ~= (P.state.world or false) then return end
  local tables = is_of(model, reaches) and new_tables(model) or {}
  if #tables > 0 then
    P.fail(("backward: %s %s came into a DistributedModelParallel after it was wrapped, and each rank would train "
      .. "tables of its own; wrap the model when it is whole"):format(#tables > 1 and "modules" or "module",
      listed(tables)))
  end
  local names = new_parameters(model, reaches)
  if #names == 0 then return tell_outside(model, reaches) end
  P.fail(("backward: %s %s of a DistributedModelParallel came into the model, or began to require a gradient, after "
    .. "it was wrapped: ranks have different numbers, and nobody averages the gradient; make it before, or call "
    .. "model:init_data_parallel() on all ranks after such a change (rank 0's numbers go to all), and make the "
    .. "optimizer that is to train it of model:dense_parameters()"):format(
    #names > 1 and "parameters" or "parameter", listed(names)))
end

--- An error where tables and dense part are of different moments, or gradients wait that belong to neither. On all
--- ranks alike.
function M.check_moment(model, func)
  if model._held > 0 then
    P.fail(("DistributedModelParallel:%s: gradients of %d batch%s wait for their update, and are no part of the "
      .. "state; allowed: after apply_accumulated (in a pipeline: after the last step of a group of micro-batches, or "
      .. "after pipeline:close())"):format(func, model._held, model._held > 1 and "es" or ""))
  end
  if model._mid_step >= 0 then
    P.fail(("DistributedModelParallel:%s: the tables have learned from batch %d of a pipeline, and the dense part has "
      .. "not: they are of different moments; allowed: between two steps, or in an operation after 'optimizer'; where "
      .. "the schedule's optimizer is a step behind, after the pipeline's end"):format(func, model._mid_step))
  end
end

return M
