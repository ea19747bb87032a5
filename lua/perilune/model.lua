-- model.lua: DistributedModelParallel: a model whose embedding collections are sharded by a plan and whose dense part
-- is replicated.
--
--   local model = peri.DistributedModelParallel { module = DLRM {...}, plan = dofile "plan.lua" }
--   local optimizer = nn.optim.Adagrad { params = model:dense_parameters(), lr = 0.01 }
--   local loss = model(batch)         -- ids and rows travel between the ranks
--   -- gradients too; sharded tables are updated, dense gradients are averages over the ranks
--   loss:backward()
--   optimizer:step()
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local util = require "perilune.util"
local signature = require "perilune.signature"
local Tensor = require "perilune.tensor"
local nn = require "perilune.nn"
local dist = require "perilune.dist"
local group_of = require("perilune.dist.group").group_of
local own_parts = require("perilune.nn.parameter").own_parts
local wrapper = require "perilune.model.wrapper"
local plans = require "perilune.plan"
local shard = require "perilune.shard"
local checkpoint = require "perilune.checkpoint"
local copies = require "perilune.embed.copies"
local changes = require "perilune.model.changes"
local collections = require "perilune.model.collections"
local reshard = require "perilune.model.reshard"

local M = { DataParallelWrapper = wrapper.DataParallelWrapper,
  DefaultDataParallelWrapper = wrapper.DefaultDataParallelWrapper }

local DistributedModelParallel = nn.Module:extend "DistributedModelParallel"
DistributedModelParallel.wraps = true -- paths in errors are those of the model, see errors.lua

local arguments = {
  module = util.required,          -- nn.Module; its embedding collections are replaced in place
  plan = util.optional,            -- what plan.load takes, or a planner; default: made here (plan/automatic.lua)
  env = util.optional,             -- ShardingEnv with a process group; default: of `group`
  group = util.optional,           -- the ranks; default: the world
  device = util.optional,
  sharders = util.optional,        -- list of ModuleSharders, and nothing else is sharded; default: those that the
                                   -- modules' classes name
  bucket_bytes = util.optional.number, -- of gradients that are averaged together; default: 25 MiB
  gradient_division = util.optional,     -- of the default sharders: see ShardedEmbeddingModule
  qcomm_codecs_registry = util.optional, -- likewise; the dense part travels as it is
  init_data_parallel = true,       -- false: model:init_data_parallel() is called later, before it is trained
  data_parallel_wrapper = util.optional, -- a DataParallelWrapper; default: DefaultDataParallelWrapper
}
M.DistributedModelParallel, DistributedModelParallel._arguments = DistributedModelParallel, arguments

--- The ranks that share the model.
local function env_of(a)
  local func = "DistributedModelParallel"
  if a.env ~= nil and a.group ~= nil then
    P.fail(func .. ": env and group both say which ranks share the model; give one of them")
  end
  if a.env == nil then
    return plans.ShardingEnv.from_process_group(group_of(func, a.group or P.state.world or dist.init()))
  end
  if not plans.ShardingEnv.is(a.env) then
    P.fail(("%s: env is %s, wanted a ShardingEnv"):format(func, errors.kind(a.env)))
  end
  if not a.env.pg then P.fail(("%s: env has no process group (%s); ShardingEnv.from_process_group makes one that "
    .. "has"):format(func, tostring(a.env))) end
  return a.env
end

--- The function(module) -> sharder of a model.
local function sharders_of(a)
  local func = "DistributedModelParallel"
  for _, name in ipairs { "gradient_division", "qcomm_codecs_registry" } do
    if a.sharders ~= nil and a[name] ~= nil then
      P.fail(("%s: %s is the sharders' own argument where these are given: sharders = { ...Sharder { %s = ... } "
        .. "}"):format(func, name, name))
    end
  end
  return shard.registry(func, a.sharders,
    { gradient_division = a.gradient_division, qcomm_codecs_registry = a.qcomm_codecs_registry }, shard)
end

--- The wrapper of the dense part.
local function wrapper_of(a)
  local func, w = "DistributedModelParallel", a.data_parallel_wrapper
  if a.bucket_bytes then util.integer(func, "bucket_bytes", a.bucket_bytes, 1) end
  if w == nil then
    return wrapper.DefaultDataParallelWrapper { bucket_cap_mb = a.bucket_bytes and a.bucket_bytes / 2 ^ 20 }
  end
  if not wrapper.DataParallelWrapper.is(w) then
    P.fail(("%s: data_parallel_wrapper is %s, wanted a DataParallelWrapper (a class is called to make one)"):format(
      func, errors.kind(w)))
  end
  if a.bucket_bytes then
    P.fail(func .. ": bucket_bytes is the argument of the default wrapper; give it to data_parallel_wrapper's")
  end
  return w
end

--- Whether some rank has shards of dense tables, even if this one has nothing for an optimizer.
local function has_dense_tables(list)
  for _, sharded in ipairs(list) do
    for _, sharding in util.ordered(sharded.plan and sharded.plan.tables or {}) do
      if sharding.compute_kernel == "dense" then return true end
    end
  end
  return false
end

function DistributedModelParallel:init(args)
  local a = util.named("DistributedModelParallel", args, arguments)
  if not nn.Module.is(a.module) then
    P.fail(("DistributedModelParallel: module is %s, wanted an nn.Module (a class is called to make one)"):format(
      errors.kind(a.module)))
  end
  local env = env_of(a)
  if env.pg == P.state.world then dist.use_device(a.device) end
  self._wrapper, self.device = wrapper_of(a), a.device or false
  local list = collections.find(a.module, sharders_of(a))
  local plan = collections.plan(a.plan, list, env, a.device)
  collections.check_paths(list, plan, a.device)
  self.env, self.group, self.plan = env, env.pg, plan
  self.dense_env = self.dense_env or env -- the ranks that share the dense part
  self._fused, self._paths = false, setmetatable(util.map(list, function(c) return c.path end), {})
  self.sharded = setmetatable({}, {}) -- a metatable: they are modules of self.module
  local ok, err = pcall(collections.shard, list, env, a.device, self.sharded)
  if not ok then
    -- their files too: somebody may put things right and try again
    for _, sharded in ipairs(self.sharded) do sharded:release() end
    error(err, 0)
  end
  local module = a.module
  for i, c in ipairs(list) do module = collections.put_in_place(module, c, self.sharded[i]) end
  self.elsewhere = has_dense_tables(self.sharded)
  self.module = module
  -- for another plan; a metatable: no place to look for modules
  self._collections = setmetatable(util.map(list, collections.remembered), {})
  for _, m in ipairs(module:modules()) do
    if m.reduction == "global_mean" and m.set_group then m:set_group(self.dense_env.pg) end
  end
  self._accumulates, self._held = false, 0 -- passes whose gradients are kept
  self._mid_step, self._mid_pipeline = -1, false -- see _note_step
  self._reducer, self._watcher, self._wrapped, self._home = false, false, false, P.state.world or false
  Tensor.stray_checks[self] = changes.check
  if a.init_data_parallel then self:init_data_parallel() end
end

--- Parameters that are equal on all ranks: the dense part and replicas of dense tables.
function DistributedModelParallel:replicated_parameters()
  local list = {}
  for _, p in ipairs(self.module:parameters()) do
    if not own_parts[p] then list[#list + 1] = p end
  end
  return list
end

--- Hand the dense part to the data-parallel wrapper: it starts from rank 0's numbers, and its gradients are averaged
--- from now on. Later calls do so again if the model has got other parameters since, and otherwise nothing. Collective.
function DistributedModelParallel:init_data_parallel()
  if self._wrapped and not changes.of_all(self) then return end
  if self._reducer and self._reducer.detach then self._reducer:detach() end
  local watcher = self._wrapper:wrap(self, self.dense_env, self.device or nil)
  self._wrapped = changes.noted(self)
  if watcher and not (type(watcher) == "table" and util.is_callable(watcher.watch)) then
    P.fail(("DistributedModelParallel: %s:wrap returned %s, wanted nil or an object with a method watch"):format(
      self._wrapper.class_name, errors.kind(watcher)))
  end
  self._reducer, self._watcher = watcher or false, watcher or false
  if self._accumulates then self:accumulate(true) end
end

--- What an optimizer of the dense part trains: the replicated parameters, and this rank's shards of tables whose
--- compute_kernel is "dense". Fused tables are none. The list says of itself whether some rank has such shards
--- (parameter.own_parts): norms of gradients want to know.
function DistributedModelParallel:parameters()
  local list = nn.Module.parameters(self)
  list.elsewhere, list.group = self.elsewhere, self.group
  return list
end
DistributedModelParallel.dense_parameters = DistributedModelParallel.parameters

--- Names are those of the model as it was before it was wrapped, here and in all that follows. The list says of dense
--- tables what pieces of them are (nn/spread.lua), by which an optimizer made of it has states of whole tables.
function DistributedModelParallel:named_parameters(prefix)
  local list = self.module:named_parameters(prefix)
  list.elsewhere, list.group, list.spread = self.elsewhere, self.group, {}
  for i, sharded in ipairs(self.sharded) do
    for _, e in ipairs(sharded:_spread_parameters()) do
      for _, part in ipairs { self._paths[i], prefix or "" } do
        e.name = part == "" and e.name or part .. "." .. e.name
      end
      list.spread[#list.spread + 1] = e
    end
  end
  return list
end
function DistributedModelParallel:named_buffers(prefix) return self.module:named_buffers(prefix) end
function DistributedModelParallel:named_state(prefix) return self.module:named_state(prefix) end

--- See Module:state_dict and Module:load_state_dict; tables over ranks are ShardedTensors. Loading is collective: all
--- ranks load, or none. Both are errors where tables and dense part are of different moments.
function DistributedModelParallel:state_dict(prefix)
  self:check_moment()
  return self.module:state_dict(prefix)
end
function DistributedModelParallel:check_state_dict(map, strict)
  local ok, err = pcall(changes.check_moment, self, "load_state_dict")
  if not ok then return tostring(type(err) == "table" and err.message or err) end
  return self.module:check_state_dict(map, strict)
end
function DistributedModelParallel:load_state_dict(map, strict)
  changes.check_moment(self, "load_state_dict")
  return self.module:load_state_dict(map, strict, { self.dense_env.pg }, self:_alike())
end
--- A function: the group whose ranks train alike what { name =, tensor =, alike = } of the state is.
function DistributedModelParallel:_alike()
  local alike = {}
  local averaged = wrapper.DefaultDataParallelWrapper.is(self._wrapper) -- another may let each rank train its own
  for _, p in ipairs(averaged and self:replicated_parameters() or {}) do alike[p] = self.dense_env.pg end
  return function(s) return alike[s.tensor] end
end
--- See changes.check_replicas; of a wrapper that may let each rank train its own, nothing is compared.
function DistributedModelParallel:_check_replicas(func)
  if self._wrapped and wrapper.DefaultDataParallelWrapper.is(self._wrapper) then changes.check_replicas(self, func) end
end
function DistributedModelParallel:check_moment() changes.check_moment(self, "state_dict") end
--- Whether there is a state after some more steps, and none now: gradients of micro-batches wait for their update, or a
--- pipeline has to train batches that maps of raw ids have learned from, or the dense part by a batch that the tables
--- have learned from, which it does then before it loads more.
function DistributedModelParallel:_unfinished()
  local pipeline = self._mid_step >= 0 and self._mid_pipeline
  local ahead = pipeline and not pipeline.stepping or false -- within a step nothing is there after some more steps
  if ahead then pipeline.supply:pause() end
  for _, sharded in ipairs(self.sharded) do
    if sharded:_ahead() then
      ahead = true
      for _, supply in pairs(sharded._flights) do supply:pause() end -- any order
    end
  end
  return ahead or self._held > 0
end
--- A pipeline is between the tables' update by batch `batch` and that of the dense part; -1: it is not.
function DistributedModelParallel:_note_step(batch, pipeline)
  rawset(self, "_mid_step", batch)
  rawset(self, "_mid_pipeline", pipeline)
end

--- What checkpoint.save and load take for the model and `options`.
local function with_parts(model, options)
  local rest = util.copy(options or {})
  local parts = util.copy(rest.parts or {})
  parts.model, rest.parts, rest.group = model, nil, rest.group or model.dense_env.pg
  return parts, rest
end

--- Save the model, and the optimizers of its fused tables, as the checkpoint `path`; options: parts = { name = what
--- else is saved with it }, and those of peri.checkpoint.save. Returns the digest, or with async = true a handle.
--- Collective.
function DistributedModelParallel:save(path, options)
  local parts, rest = with_parts(self, options)
  return checkpoint.save(path, parts, rest)
end

--- Load such a checkpoint, of any plan and number of ranks; options: parts =, and those of checkpoint.load. Returns
--- `values`. Collective.
function DistributedModelParallel:load(path, options)
  local parts, rest = with_parts(self, options)
  return checkpoint.load(path, parts, rest)
end

--- Put the live model under another plan (what plan.load takes, or a planner), between two steps: afterwards it is what
--- saving it and loading the checkpoint under that plan would make of it. Tables are in a folder meanwhile (options:
--- folder =, shared by all hosts), so that no rank needs them in memory twice. Objects stay: modules, fused optimizers,
--- pipelines (which have no batches in flight). See docs/sharded_tables.md. Collective.
function DistributedModelParallel:reshard(plan, options)
  local func = "DistributedModelParallel:reshard"
  if plan == nil then P.fail(func .. ": plan is nil, wanted what plan.load takes, or a planner") end
  plan = collections.plan(plan, self._collections, self.env, self.device or nil)
  P.sparing(reshard.reshard, self, plan, options)
end

--- An error where a plan is none of this model's, or changes who trains a table.
function DistributedModelParallel:check_plan(plan)
  local list = util.map(self._collections, util.copy)
  collections.check_paths(list, plan, self.device or nil)
  for i, c in ipairs(list) do
    c.plan:validate(c.tables, self.env, c.path)
    reshard.ask(self.sharded[i], c)
  end
end

--- The optimizers of fused tables that the sharded modules have, by name.
local function fused_optimizers(self)
  local list = {}
  for i, sharded in ipairs(self.sharded) do
    local optimizer = sharded:fused_optimizer()
    if optimizer then list[#list + 1] = { name = self._paths[i], optimizer = optimizer } end
  end
  return list
end

--- The sharded modules were made again.
function DistributedModelParallel:_resharded()
  self.elsewhere = has_dense_tables(self.sharded)
  if self._fused and self._fused.optimizers then
    self._fused.optimizers = fused_optimizers(self)
    self._fused:_collect()
  end
  if self._wrapped then self:init_data_parallel() end
end

--- Parameters that belong to no sharded module: a list of { name =, tensor = }.
function DistributedModelParallel:bare_named_parameters(prefix)
  local within, list = {}, {}
  for _, sharded in ipairs(self.sharded) do
    for _, p in ipairs(sharded:parameters()) do within[p] = true end
  end
  for _, p in ipairs(self.module:named_parameters(prefix)) do
    if not within[p.tensor] then list[#list + 1] = p end
  end
  return list
end

--- Names of parameters whose gradients are sparse tensors: none are. (Tables of which few rows are touched are trained
--- by themselves.)
function DistributedModelParallel:sparse_grad_parameter_names() return {} end -- luacheck: ignore 212

--- The optimizer of all fused tables, a CombinedOptimizer: rates set in its param_groups hold at once, and its states
--- have the names of the unsharded model's tables. A model without fused tables has one without parameters.
function DistributedModelParallel:fused_optimizer()
  if not self._fused then
    local list = fused_optimizers(self)
    self._fused = #list > 0 and nn.optim.CombinedOptimizer(list) or nn.optim.KeyedOptimizer { params = {} }
  end
  return self._fused
end

--- A copy, on another device (nil: the same): its sharded modules have the same plans and numbers, its dense part is
--- copied, and it shares nothing with this one. It is of one moment, as state_dict is, and in evaluation mode; to be
--- trained it is put into training mode, and init_data_parallel called. Collective.
function DistributedModelParallel:copy(device)
  changes.check_moment(self, "copy")
  local copy, places = setmetatable(util.copy(self), getmetatable(self)), {}
  for _, m in ipairs(self.module:named_modules()) do places[m.module] = m.path end
  rawset(copy, "module", copies.copy_to_device(self.module, device))
  rawset(copy, "sharded", setmetatable(util.map(self.sharded, function(m) return copy.module:get_module(places[m]) end),
    {}))
  copy._fused, copy._reducer, copy._watcher, copy._wrapped, copy.device = false, false, false, false, device
    or self.device
  copy._accumulates, copy._held = false, 0
  Tensor.stray_checks[copy] = changes.check
  return copy:eval()
end

--- Let a backward pass through what the model returned reduce the dense gradients, whichever of them it reaches on this
--- rank. (Without "...", which LuaJIT does not compile here.)
local function watched(reducer, a, b, c, d, e, f, more)
  if more ~= nil then
    P.fail "DistributedModelParallel: the model returns more than 6 values; return a table of them"
  end
  if Tensor.is(a) then reducer:watch(a) end
  if Tensor.is(b) then reducer:watch(b) end
  if Tensor.is(c) then reducer:watch(c) end
  if Tensor.is(d) then reducer:watch(d) end
  if Tensor.is(e) then reducer:watch(e) end
  if Tensor.is(f) then reducer:watch(f) end
  if type(f) ~= "nil" then return a, b, c, d, e, f end -- as many as the model returned: print shows each nil
  if type(e) ~= "nil" then return a, b, c, d, e end
  if type(d) ~= "nil" then return a, b, c, d end
  if type(c) ~= "nil" then return a, b, c end
  if type(b) ~= "nil" then return a, b end
  return a
end

function DistributedModelParallel:forward(...)
  if not self._wrapped and self.training and P.state.grad then
    P.fail("DistributedModelParallel: it is not ready to be trained: call model:init_data_parallel(), which "
      .. "init_data_parallel = false left out")
  end
  if self._accumulates and P.state.grad then self._held = self._held + 1 end
  if P.state.saves then P.state.saves.progress() end
  if not self._watcher then return self.module(...) end
  return watched(self._watcher, self.module(...))
end

--- The same as loss:backward(grad): afterwards fused tables are updated and dense gradients are averages over the
--- ranks. Collective.
function DistributedModelParallel:backward(loss, grad) loss:backward(grad) end

--- While on, backward passes change no table and average no gradient, until apply_accumulated: then tables are updated
--- and gradients are averages, both of all passes since. For large batches in parts, whose losses are scaled by 1 /
--- parts. All ranks alike.
function DistributedModelParallel:accumulate(on)
  for _, reducer in ipairs(self:_reducers()) do
    if on and not (reducer.enable and reducer.finish) then
      P.fail("DistributedModelParallel: what its data_parallel_wrapper returned has no enable and finish, which "
        .. "accumulating needs")
    end
  end
  for _, sharded in ipairs(self.sharded) do sharded:accumulate(on) end
  self._accumulates = on and true or false
  for _, reducer in ipairs(self:_reducers()) do
    if reducer.enable then reducer:enable(not on) end
  end
end
function DistributedModelParallel:apply_accumulated()
  for _, sharded in ipairs(self.sharded) do sharded:apply_accumulated() end
  self._held = 0
  for _, reducer in ipairs(self:_reducers()) do
    reducer:enable(true)
    reducer:finish()
    reducer:enable(false)
  end
end
--- While on, backward passes end when averages of dense gradients have set out; wait_averages, after each pass, waits
--- for them. What a data_parallel_wrapper of one's own returned may have no `defer`: it waits in the pass. All ranks
--- alike.
function DistributedModelParallel:_defer_averages(on)
  for _, reducer in ipairs(self:_reducers()) do
    if reducer.defer then reducer:defer(on) end
  end
end
function DistributedModelParallel:_wait_averages()
  for _, reducer in ipairs(self:_reducers()) do
    if reducer.defer then reducer:finish() end
  end
end
--- What averages gradients.
function DistributedModelParallel:_reducers() return { self._reducer or nil } end

--- Learning rate of the fused tables from now on.
function DistributedModelParallel:set_fused_learning_rate(learning_rate)
  for _, sharded in ipairs(self.sharded) do sharded:set_learning_rate(learning_rate) end
end

--- Write the changed rows of all tables in files: one event for the model, after which all files on all ranks carry one
--- number. Collective.
function DistributedModelParallel:flush()
  local in_files = shard._files.tables_in_files(self.sharded)
  if #in_files > 0 then shard._files.flush(self.group, "DistributedModelParallel:flush", in_files) end
end

--- The model within its wrapper: what a DistributedModelParallel was made of; any other module itself.
function M.get_module(module) return DistributedModelParallel.is(module) and module.module or module end
M.get_unwrapped_module = M.get_module

signature.check("model.", M, { get_module = "module: Module", get_unwrapped_module = "module: Module" })
signature.check("DistributedModelParallel:", DistributedModelParallel,
  { save = "self: table, path: string, options: table?", load = "self: table, path: string, options: table?",
    backward = "self: table, loss: tensor, grad: tensor?",
  accumulate = "self: table, on: boolean?", _defer_averages = "self: table, on: boolean?",
  reshard = "self: table, plan: any, options: table?", check_plan = "self: table, plan: table",
  copy = "self: table, device: device?", set_fused_learning_rate = "self: table, learning_rate: number" })

return util.face("peri.model", M, { two_d = "perilune.model.two_d" }, { DMPCollection = "two_d" })
