-- model.lua: DistributedModelParallel: a model whose embedding collections are sharded by a plan and whose dense part is replicated.
--
--   local model = peri.DistributedModelParallel { module = DLRM {...}, plan = dofile "plan.lua" }
--   local optimizer = nn.optim.Adagrad { params = model:dense_parameters(), lr = 0.01 }
--   local loss = model(batch)         -- ids and rows travel between the ranks
--   loss:backward()                   -- gradients too; sharded tables are updated, dense gradients are averages over the ranks
--   optimizer:step()
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local util = require "perilune.util"
local signature = require "perilune.signature"
local Tensor = require "perilune.tensor"
local nn = require "perilune.nn"
local dist = require "perilune.dist"
local group_of = require("perilune.dist.group").group_of
local embed = require "perilune.embed"
local plans = require "perilune.plan"
local shard = require "perilune.shard"

local M = {}

local DistributedModelParallel = nn.Module:extend "DistributedModelParallel"
M.DistributedModelParallel = DistributedModelParallel
DistributedModelParallel.wraps = true -- paths in errors are those of the model, see errors.lua

local arguments = {
  module = util.required,          -- nn.Module; its EmbeddingBagCollections are replaced in place
  plan = util.optional,            -- what plan.load takes; default: whole tables, spread by size
  group = util.optional,           -- the ranks; default: the world
  device = util.optional,
  bucket_bytes = 25 * 1024 * 1024, -- of gradients that are averaged together
  gradient_division = util.optional,     -- see ShardedEmbeddingBagCollection
  qcomm_codecs_registry = util.optional, -- likewise; the dense part travels as it is
  init_data_parallel = true,       -- start from rank 0's dense parameters
}

--- The collections of a model: list of { path =, module = } in the model's order.
local function collections_of(module)
  local list = {}
  for _, entry in ipairs(module:named_modules()) do
    if embed.EmbeddingBagCollection.is(entry.module) then list[#list + 1] = entry end
  end
  return list
end

--- Every collection has an entry in the plan, and every entry a collection.
local function check_paths(collections, plan)
  local known, names, named = {}, {}, plan.from and ("plan '%s'"):format(plan.from) or "the plan"
  for i, c in ipairs(collections) do
    known[c.path] = true
    names[i] = "'" .. c.path .. "'"
  end
  for path in util.ordered(plan.plan) do
    if not known[path] then
      P.fail(("DistributedModelParallel: %s names module '%s', which is no EmbeddingBagCollection of the model; "
        .. "those are: %s"):format(named, path, #names > 0 and table.concat(names, ", ") or "none"))
    end
  end
  for _, c in ipairs(collections) do
    if not plan:get_plan_for_module(c.path) then
      P.fail(("DistributedModelParallel: module '%s' has embedding tables but no entry in %s, which names: %s"):format(c.path, named,
        table.concat(util.keys(plan.plan), ", ")))
    end
  end
end

local function make_plan(source, collections, group)
  local modules = {}
  for _, c in ipairs(collections) do modules[c.path] = c.module:embedding_bag_configs() end
  local env = { world_size = group:size(), local_size = group.local_size, modules = modules }
  if source ~= nil then return plans.load(source, env) end
  return plans.table_wise_by_size(modules, env)
end

--- Make a sharded module of each collection, one more entry of `made` each. Their files are of one flush.
local function make_sharded(a, collections, plan, group, made)
  for i, c in ipairs(collections) do
    made[i] = shard.ShardedEmbeddingBagCollection {
      tables = c.module:embedding_bag_configs(), plan = plan:get_plan_for_module(c.path), group = group, device = a.device,
      fused_params = c.module.fused_params or nil, is_weighted = c.module:is_weighted(), gradient_division = a.gradient_division,
      qcomm_codecs_registry = a.qcomm_codecs_registry,
      seed = c.module.seed or nil, name = c.path,
    }
  end
  local in_files = shard.files.of(made)
  if #in_files > 1 then shard.files.agree(group, "DistributedModelParallel", in_files) end
end

function DistributedModelParallel:init(args)
  local a = util.named("DistributedModelParallel", args, arguments)
  if not nn.Module.is(a.module) then
    P.fail(("DistributedModelParallel: module is %s, wanted an nn.Module (a class is called to make one)"):format(errors.kind(a.module)))
  end
  local group = group_of("DistributedModelParallel", a.group or P.state.world or dist.init())
  util.integer("DistributedModelParallel", "bucket_bytes", a.bucket_bytes, 1)
  local collections = collections_of(a.module)
  local plan = make_plan(a.plan, collections, group)
  check_paths(collections, plan)
  self.group, self.plan = group, plan
  self.sharded = setmetatable({}, {}) -- a metatable: they are modules of self.module
  local module, own = a.module, {}
  self.elsewhere = false -- other ranks may have shards of dense tables even if this one has nothing for an optimizer
  local ok, err = pcall(make_sharded, a, collections, plan, group, self.sharded)
  if not ok then
    for _, sharded in ipairs(self.sharded) do sharded:release() end -- their files too: somebody may put things right and try again
    error(err, 0)
  end
  for i, c in ipairs(collections) do
    local sharded = self.sharded[i]
    sharded:copy_from(c.module)
    if c.path == "" then module = sharded else module:substitute(c.module, sharded) end
    rawset(c.module, "forward", function()
      P.fail(("EmbeddingBagCollection: '%s' of a DistributedModelParallel has its tables in shards now; call the one that the model has "
        .. "in its place: this one would train a copy"):format(c.path))
    end)
    for _, sharding in util.ordered(plan:get_plan_for_module(c.path).tables) do
      self.elsewhere = self.elsewhere or sharding.compute_kernel == "dense"
    end
    for _, name in ipairs(sharded:own_parameters()) do own[rawget(sharded, name)] = true end
  end
  self.module = module
  for _, m in ipairs(module:modules()) do
    if m.reduction == "global_mean" and m.set_group then m:set_group(group) end
  end
  local replicated = {} -- equal on all ranks, gradients averaged: the dense part and replicas of dense tables
  for _, p in ipairs(module:parameters()) do
    if not own[p] then replicated[#replicated + 1] = p end
  end
  if a.init_data_parallel then self:_broadcast(replicated) end
  self._reducer = #replicated > 0 and dist.Reducer { group = group, params = replicated, bucket_bytes = a.bucket_bytes } or false
end

--- Rank 0's numbers of these parameters and of the replicas of fused tables to all. Collective.
function DistributedModelParallel:_broadcast(replicated)
  if self.group:size() == 1 then return end
  local pending = util.map(replicated, function(p) return self.group:broadcast(p:detach(), 0) end)
  for _, sharded in ipairs(self.sharded) do
    for _, s in ipairs(sharded:local_shards()) do
      for _, name in ipairs(s.replica and not s.dense and s.names() or {}) do
        pending[#pending + 1] = self.group:broadcast(s.state(name), 0)
      end
    end
  end
  for _, work in ipairs(pending) do work:wait() end
end

--- What an optimizer of the dense part trains: the replicated parameters, and this rank's shards of tables whose compute_kernel is "dense".
--- Fused tables are none. The list says of itself whether some rank has such shards (parameter.own_parts): norms of gradients want to know.
function DistributedModelParallel:parameters()
  local list = nn.Module.parameters(self)
  list.elsewhere, list.group = self.elsewhere, self.group
  return list
end
DistributedModelParallel.dense_parameters = DistributedModelParallel.parameters

function DistributedModelParallel:named_parameters(prefix)
  local list = nn.Module.named_parameters(self, prefix)
  list.elsewhere, list.group = self.elsewhere, self.group
  return list
end

--- Let a backward pass through what the model returned reduce the dense gradients, whichever of them it reaches on this rank.
--- (Without "...", which LuaJIT does not compile here.)
local function watched(reducer, a, b, c, d, e, f, more)
  if more ~= nil then P.fail "DistributedModelParallel: the model returns more than 6 values; return a table of them" end
  if Tensor.is(a) then reducer:watch(a) end
  if Tensor.is(b) then reducer:watch(b) end
  if Tensor.is(c) then reducer:watch(c) end
  if Tensor.is(d) then reducer:watch(d) end
  if Tensor.is(e) then reducer:watch(e) end
  if Tensor.is(f) then reducer:watch(f) end
  return a, b, c, d, e, f
end

function DistributedModelParallel:forward(...)
  if not self._reducer then return self.module(...) end
  return watched(self._reducer, self.module(...))
end

--- The same as loss:backward(grad): afterwards fused tables are updated and dense gradients are averages over the ranks. Collective.
function DistributedModelParallel:backward(loss, grad) loss:backward(grad) end

--- Learning rate of the fused tables from now on.
function DistributedModelParallel:set_fused_learning_rate(learning_rate)
  for _, sharded in ipairs(self.sharded) do sharded:set_learning_rate(learning_rate) end
end

--- Write the changed rows of all tables in files: one event for the model, after which all files on all ranks carry one number. Collective.
function DistributedModelParallel:flush()
  local in_files = shard.files.of(self.sharded)
  if #in_files > 0 then shard.files.flush(self.group, "DistributedModelParallel:flush", in_files) end
end

signature.check("DistributedModelParallel:", DistributedModelParallel, { backward = "self: table, loss: tensor, grad: tensor?",
  set_fused_learning_rate = "self: table, learning_rate: number" })

return M
