-- collections.lua: the embedding collections of a model: which of its modules are sharded, the plan that has an entry
-- for each, and the sharded modules in their places.
--
-- A collection is { path =, module =, sharder =, tables =, plan = its entry of the plan, once it is known }.
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local util = require "perilune.util"
local signature = require "perilune.signature"
local plans = require "perilune.plan"
local automatic = require "perilune.plan.automatic"
local shard = require "perilune.shard"
local changes = require "perilune.model.changes"

local M = {}

--- Modules in whose place a sharded one is: module -> the path that it had in its model.
local replaced = setmetatable({}, { __mode = "k" })

--- An error if a module of `entry` gave its tables to another model: this one would train copies of them.
local function check_own(entry)
  for _, inner in ipairs(entry.module:modules()) do
    if replaced[inner] then
      P.fail(("DistributedModelParallel: module '%s', this %s is '%s' of another DistributedModelParallel, which has "
        .. "its tables in shards: a second model would train copies of them. Allowed: the module that the other model "
        .. "has in its place, or a collection of its own"):format(entry.path, inner.class_name, replaced[inner]))
    end
  end
end

--- What plans have entries for, of the module of `entry`.
local function tables_of(sharder, entry)
  local what = ("%s:shardable_parameters of module '%s'"):format(sharder.class_name, entry.path)
  return signature.value("DistributedModelParallel", what, sharder:shardable_parameters(entry.module), "table_configs")
end

--- Those modules of a model that have sharders, in the model's order. What is within one of them is its own.
function M.find(module, sharder_of)
  local list, within = {}, {}
  for _, entry in ipairs(module:named_modules()) do
    if entry.module.wraps then
      P.fail(("DistributedModelParallel: module '%s' is a %s already; wrap a model once, before it has others within "
        .. "it"):format(entry.path, entry.module.class_name))
    end
    local sharder = not within[entry.module] and sharder_of(entry.module)
    if sharder and sharder.by_itself then
      P.fail(("DistributedModelParallel: module '%s', a %s, %s"):format(entry.path, entry.module.class_name,
        sharder.by_itself))
    end
    if sharder then
      check_own(entry)
      for _, inner in ipairs(entry.module:modules()) do within[inner] = true end
      list[#list + 1] = { path = entry.path, module = entry.module, sharder = sharder,
        tables = tables_of(sharder, entry) }
    elseif not within[entry.module] and entry.module.sharder and rawget(entry.module, "fused_params") then
      P.fail(("DistributedModelParallel: module '%s' has fused_params, and none of the sharders is for %s: each rank "
        .. "would train tables of its own; give its sharder too, or no fused_params"):format(entry.path,
        entry.module.class_name))
    end
  end
  return list
end

--- "EmbeddingBagCollection", or whatever the model has that is sharded.
local function class_names(collections)
  local names = {}
  for _, c in ipairs(collections) do names[c.module.class_name] = true end
  local list = util.keys(names)
  return #list > 0 and table.concat(list, " or ") or "EmbeddingBagCollection"
end

--- Every collection has an entry in the plan that its sharder can do, and every entry a collection.
function M.check_paths(collections, plan, device)
  local known, names, named = {}, {}, plan.from and ("plan '%s'"):format(plan.from) or "the plan"
  for i, c in ipairs(collections) do
    known[c.path] = true
    names[i] = "'" .. c.path .. "'"
  end
  for path in util.ordered(plan.plan) do
    if not known[path] then
      P.fail(("DistributedModelParallel: %s names module '%s', which is no %s of the model; those are: %s"):format(
        named, path, class_names(collections), #names > 0 and table.concat(names, ", ") or "none"))
    end
  end
  for _, c in ipairs(collections) do
    c.plan = plan:get_plan_for_module(c.path) or #c.tables == 0 and plans.EmbeddingModuleShardingPlan {} or nil
    if not c.plan then
      P.fail(("DistributedModelParallel: module '%s' has embedding tables but no entry in %s, which names: %s"):format(
        c.path, named, table.concat(util.keys(plan.plan), ", ")))
    end
    c.sharder:check_plan(c.plan, device, c.path, named)
  end
end

--- What a planner makes of the collections, agreed by all ranks.
local function planned(planner, collections, env)
  if planner.topology.world_size ~= env.world_size then
    P.fail(("DistributedModelParallel: the planner's topology has %d ranks, the model is shared by %d"):format(
      planner.topology.world_size, env.world_size))
  end
  if #collections == 0 then return plans.ShardingPlan {} end
  return planner:collective_plan(util.map(collections, plans.describe._of), env.pg)
end

--- A plan of what was given for one: what plan.load takes, a planner, or nothing.
function M.plan(source, collections, env, device)
  local modules = {}
  for _, c in ipairs(collections) do modules[c.path] = c.tables end
  env = env:with_modules(modules)
  if plans.EmbeddingShardingPlanner.is(source) then return planned(source, collections, env) end
  if source ~= nil then return plans.load(source, env) end
  return automatic.collective(collections, env, device)
end

--- Make a sharded module of each collection, one more entry of `made` each. Their files are of one flush.
function M.shard(collections, env, device, made)
  for i, c in ipairs(collections) do
    local sharded = c.sharder:shard(c.module, c.plan, env, device, c.path)
    if not shard.ShardedModule.is(sharded) then
      P.fail(("DistributedModelParallel: %s:shard returned %s for module '%s', wanted a ShardedModule"):format(
        c.sharder.class_name, errors.kind(sharded), c.path))
    end
    made[i] = sharded
  end
  local in_files = shard._files.tables_in_files(made)
  if #in_files == 0 then return end
  local ok, err = pcall(function()
    for i, c in ipairs(collections) do made[i]:try_copy_from(c.module) end
  end)
  shard._files.agree(env.pg, "DistributedModelParallel", in_files, not ok and err or nil)
end

--- Put `sharded` in the place of a collection; returns the model, which may be that place.
function M.put_in_place(module, c, sharded)
  sharded:copy_from(c.module)
  changes.retire(c.module, sharded)
  local function refuse()
    P.fail(("%s: '%s' of a DistributedModelParallel has its tables in shards now; call the one that the model has "
      .. "in its place: this one has a copy, of before it was wrapped"):format(c.module.class_name, c.path))
  end
  rawset(c.module, "forward", refuse)
  local kept = {}
  for _, m in ipairs(sharded:modules()) do kept[m] = true end
  for _, m in ipairs(c.module:modules()) do
    if not kept[m] then
      replaced[m] = c.path
      if m.materialise then rawset(m, "materialise", refuse) end -- whoever wants its rows or states
    end
  end
  if c.path == "" then return sharded end
  module:substitute(c.module, sharded)
  return module
end

--- What is kept of a collection that is in its place, for another plan.
function M.remembered(c)
  return { path = c.path, sharder = c.sharder, tables = c.tables, described = plans.describe._of(c),
    module = { class_name = c.module.class_name } }
end

return M
