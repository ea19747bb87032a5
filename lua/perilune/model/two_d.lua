-- two_d.lua: 2D parallelism (TorchRec's DMPCollection): the ranks are sharding groups, each of which shards the whole
-- model, and replica groups, which hold the same shards. Within a sharding group tables are trained as ever; every few
-- steps replicas become their average.
--
--   local model = peri.DMPCollection { module = DLRM {...}, sharding_group_size = 4, plan = (a plan for 4 ranks),
--     sync_interval = 10 }
--   model:backward(model(batch))       -- after every 10th the averaging sets out; the next lookup waits for it
--   optimizer:step()
--
-- Between two averages replicas drift apart. The dense part is the same on all ranks at any time, dense tables
-- included: their gradients are averaged.
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local util = require "perilune.util"
local dist = require "perilune.dist"
local group_of = require("perilune.dist.group").group_of
local own_parts = require("perilune.nn.parameter").own_parts
local plans = require "perilune.plan"
local agree = require("perilune.dist.collective_utils").agree
local signature = require "perilune.signature"
local DistributedModelParallel = require("perilune.model").DistributedModelParallel

local C = P.C

local M = {}

local DMPCollection = DistributedModelParallel:extend "DMPCollection"
M.DMPCollection = DMPCollection

--- Beside those of DistributedModelParallel, but for env and group; ranks of the plan count within a sharding group.
local own = {
  sharding_group_size = util.required.number, -- divides the number of ranks
  world_size = util.optional.number,          -- of global_pg, if one wants to say it
  global_pg = util.optional,                  -- the ranks; default: the world
  use_inter_host_allreduce = false, -- false: a replica group is ranks that follow each other; true: a sharding group is
  sync_interval = util.whole(1, 0), -- steps between two averages; 0: only sync() makes them
  custom_all_reduce = util.optional, -- function(tensors, group): make each the average over the group, and return when
                                     -- that is done
}
local arguments = util.copy(DistributedModelParallel._arguments)
arguments.env, arguments.group = nil, nil
for name, default in util.ordered(own) do arguments[name] = default end

--- The ranks of this rank's sharding group and of its replica group.
local function ranks_of(rank, world_size, size, contiguous)
  local replicas, sharding, replica = world_size / size, {}, {}
  for i = 0, size - 1 do
    sharding[i + 1] = contiguous and math.floor(rank / size) * size + i or rank % replicas + i * replicas
  end
  for i = 0, replicas - 1 do
    replica[i + 1] = contiguous and rank % size + i * size or math.floor(rank / replicas) * replicas + i
  end
  return sharding, replica
end

local function check_size(a, world)
  local n, size = world:size(), a.sharding_group_size
  if a.world_size and a.world_size ~= n then
    P.fail(("DMPCollection: world_size is %g, but %s has %d ranks"):format(a.world_size, tostring(world), n))
  end
  if size >= 1 and n % size == 0 then return end
  local allowed = {}
  for i = 1, n do
    if n % i == 0 then allowed[#allowed + 1] = i end
  end
  P.fail(("DMPCollection: sharding_group_size is %g, allowed for %d ranks: %s"):format(size, n,
    table.concat(allowed, ", ")))
end

--- A number that is another one after each backward pass. Noted where steps end, which mostly is in backward: forward
--- takes any arguments, and LuaJIT may give it up where it comes out of these calls.
local function passes(self)
  local n = 0
  for _, sharded in ipairs(self.sharded) do n = n + (sharded:changes()) end
  return n
end

function DMPCollection:init(args)
  if type(args) ~= "table" then
    P.fail(("DMPCollection: arguments are %s, wanted a table"):format(errors.kind(args)))
  end
  for _, name in ipairs { "env", "group" } do
    if args[name] ~= nil then P.fail(("DMPCollection: no argument '%s'; its ranks are global_pg"):format(name)) end
  end
  if args.allreduce_comm_precision ~= nil then
    P.fail(("DMPCollection: allreduce_comm_precision is %s: replicas are averaged as f32, since 16 bits would round "
      .. "their weights at every average; custom_all_reduce may do so"):format(
      signature.text(args.allreduce_comm_precision)))
  end
  local a, rest = util.named("DMPCollection", args, arguments), {}
  local world = group_of("DMPCollection", a.global_pg)
  check_size(a, world)
  if a.custom_all_reduce ~= nil then
    signature.value("DMPCollection", "custom_all_reduce", a.custom_all_reduce, "callable")
  end
  self.sync_interval = a.sync_interval
  agree(world, "DMPCollection", { { "sharding_group_size", a.sharding_group_size },
    { "sync_interval", a.sync_interval }, { "use_inter_host_allreduce", tostring(a.use_inter_host_allreduce) } })
  local sharding, replica = ranks_of(world:rank(), world:size(), a.sharding_group_size, a.use_inter_host_allreduce)
  self.global_pg, self._custom = world, a.custom_all_reduce or false
  self.sharding_pg, self.replica_pg = world:new_group(sharding, "sharding group"),
    world:new_group(replica, "replica group")
  self.dense_env = plans.ShardingEnv.from_process_group(world)
  self._of_shards = false
  -- no place to look for parameters
  self._averaged, self._pending, self._steps, self._open = setmetatable({}, {}), false, 0, false
  for name in util.ordered(DistributedModelParallel._arguments) do rest[name] = a[name] end
  rest.env = plans.ShardingEnv.from_process_group(self.sharding_pg)
  DistributedModelParallel.init(self, rest)
  local ok, err = pcall(self._find_tables, self)
  if ok then
    self._before = passes(self)
    return
  end
  for _, sharded in ipairs(self.sharded) do sharded:release() end -- their files too
  error(err, 0)
end

--- Fused tables and their states: what is averaged. A list of { tensor =, weight = }, alike in a replica group, which
--- starts with the numbers of its first rank. Collective.
function DMPCollection:_find_tables()
  local pending = {}
  for i, sharded in ipairs(self.sharded) do
    agree(self.replica_pg, ("DMPCollection: module '%s'"):format(self._paths[i]), sharded:_identity())
    if sharded.managed_collision_collection then
      P.fail(("DMPCollection: module '%s' takes raw ids (managed collision): each sharding group would give them rows "
        .. "of its own, and averages would mix the rows of different ids; shard it over all ranks "
        .. "(DistributedModelParallel)"):format(self._paths[i]))
    end
    for _, s in ipairs(sharded:local_shards()) do
      if s.cached then
        P.fail(("DMPCollection: table '%s' of module '%s' is in files, which replicas cannot be averaged in; allowed "
          .. "compute_kernels: dense, fused, fused_uvm"):format(s.table, self._paths[i]))
      end
      for _, name in ipairs(s.rows > 0 and s.names() or {}) do
        local tensor = P.lasting(s.state, name)
        pending[#pending + 1] = self.replica_pg:broadcast(tensor, 0)
        if not s.dense then self._averaged[#self._averaged + 1] = { tensor = tensor, weight = name == "weight" } end
      end
    end
    sharded:_settle_with(function() self:wait() end)
    sharded:_replicate(self.replica_pg, self.global_pg)
  end
  for _, work in ipairs(pending) do work:wait() end
end

--- Gradients of the dense part are averaged over all ranks, those of this rank's shards of dense tables over their
--- replicas.
function DMPCollection:init_data_parallel()
  DistributedModelParallel.init_data_parallel(self)
  if self._of_shards then return end
  local params = {}
  for _, p in ipairs(self.module:parameters()) do
    if own_parts[p] then params[#params + 1] = p end
  end
  if #params == 0 or self.replica_pg:size() == 1 then return end
  -- begins when a pass reaches a table, as it does on all ranks
  self._of_shards = dist.Reducer { group = self.replica_pg, params = params }
  if self._accumulates then self:accumulate(true) end
  if not self._reducer or #self:replicated_parameters() == 0 then self._watcher = self._of_shards end
end

--- After reshard the tables that are averaged are others.
function DMPCollection:_resharded()
  self._averaged = setmetatable({}, {})
  self:_find_tables()
  if self._of_shards then self._of_shards:detach() end
  self._of_shards = false
  DistributedModelParallel._resharded(self)
end

--- Both reducers.
function DMPCollection:_reducers()
  local list = { self._of_shards or nil }
  list[#list + 1] = self._reducer or nil
  return list
end

-- -- averaging --------------------------------------------------------------------------------------------------------

local BLOCK = 2 ^ 20 -- elements that are scaled together

local function scale_in_blocks(tensor, factor, target)
  local rows = tensor:size(1)
  local step = math.max(1, math.floor(BLOCK * rows / tensor:numel()))
  for at = 0, rows - 1, step do
    local stop = math.min(at + step, rows)
    target:slice(1, at, stop):copy(tensor:slice(1, at, stop) * factor)
  end
end

--- Post the sum of one tensor over the replicas: { work =, from = what arrives (nil: the tensor itself, as it is to
--- be), tensor = }. Numbers of 16 bits are added up in f32; of whole numbers (the last step that used a row) the
--- largest counts.
local function post(tensor, group, tag)
  local dtype = tensor:dtype()
  if dtype == "i64" then return { work = group:all_reduce(tensor, "max", tag) } end
  local from = dtype == "f32" and tensor or P.lasting(tensor.to, tensor, "f32")
  return { work = group:all_reduce(from, "sum", tag), from = from, tensor = tensor }
end

--- The learning rates of the fused tables, of which the tag of their averages is made: replicas that were trained with
--- different ones have no average that means anything.
local function rates_of(self)
  return util.map(self:fused_optimizer().param_groups, function(group) return group.lr end)
end
local function tag_of_rates(rates)
  local tag = 0
  for i = 1, #rates do
    local mantissa, exponent = math.frexp(rates[i])
    tag = (tag * 31 + mantissa * 2 ^ 32 + exponent) % 2 ^ 40
  end
  return math.floor(tag)
end

--- What an average met; of ranks that disagree, with what its tag means.
local function failed(self, err)
  if type(err) == "table" and err.code == C.PERI_EMISMATCH then
    err.message = ("DMPCollection: %s; the tag is that of the learning rates of fused tables (on this rank %s): where "
      .. "it differs, replicas were trained at different rates"):format(err.message,
      table.concat(rates_of(self), ", "))
  end
  error(err, 0)
end

--- Let the weights and (unless include_optimizer_state is false) all optimizer states of fused tables become their
--- averages over the replica group. Posts and returns; the next lookup, or whoever looks at the state, waits. Between
--- a forward pass and loss:backward() it waits itself: that would update tables whose averages are on their way.
--- Collective.
function DMPCollection:sync(include_optimizer_state)
  self:wait()
  local inside = self._open and passes(self) == self._before
  self._steps, self._open = 0, inside
  if self.replica_pg:size() == 1 then return end
  local tensors = {}
  for _, x in ipairs(self._averaged) do
    if x.weight or include_optimizer_state ~= false then tensors[#tensors + 1] = x.tensor end
  end
  local pending = false
  if self._custom then self._custom(tensors, self.replica_pg)
  else
    pending = setmetatable({}, {}) -- and no closure: LuaJIT would not compile this
    local tag = tag_of_rates(rates_of(self))
    for i = 1, #tensors do
      local ok, posted = pcall(post, tensors[i], self.replica_pg, tag)
      if not ok then failed(self, posted) end
      pending[i] = posted
    end
  end
  for _, sharded in ipairs(self.sharded) do sharded:tables_changed() end
  self._pending, self._before = pending, passes(self)
  if inside then self:wait() end
end

--- Wait until averages that set out have arrived. What nobody has to call.
function DMPCollection:wait()
  local pending = self._pending
  if not pending then return end
  self._pending = false
  local factor = 1 / self.replica_pg:size()
  for _, x in ipairs(pending) do
    local ok, err = pcall(x.work.wait, x.work)
    if not ok then failed(self, err) end
    if x.from then P.scope(P.no_grad, scale_in_blocks, x.from, factor, x.tensor) end
    if x.from and not rawequal(x.from, x.tensor) then x.from:release() end
  end
end

local function after_step(self)
  self._open, self._steps = false, self._steps + 1
  if self.sync_interval > 0 and self._steps >= self.sync_interval then self:sync() else self._before = passes(self) end
end

function DMPCollection:copy() -- luacheck: ignore 212
  P.fail("DMPCollection:copy: its replicas are averaged together; copy the model that they are of: "
    .. "shard.sharded_model_copy(model.module)")
end

--- A step is a forward pass in training, with its backward pass; it ends with model:backward(loss), or, after
--- loss:backward(), when the next one begins. While gradients are accumulated, a step is all passes up to
--- apply_accumulated, which ends it.
function DMPCollection:forward(...)
  if self.training and P.state.grad then
    if self._open then after_step(self) end
    self._open = not self._accumulates
  end
  return DistributedModelParallel.forward(self, ...)
end

--- Averages of rows that are still travelling arrive first: they would undo this pass's update of rows that were looked
--- up before.
function DMPCollection:backward(loss, grad)
  self:wait()
  DistributedModelParallel.backward(self, loss, grad)
  if self._open then after_step(self) end
end

--- As with backward, averages that are on their way arrive before the update.
function DMPCollection:apply_accumulated()
  self:wait()
  local held = self._held
  DistributedModelParallel.apply_accumulated(self)
  if held > 0 then after_step(self) end
end

--- What is loaded is the average of all replicas, from which steps count anew.
function DMPCollection:load_state_dict(map, strict)
  local keys = DistributedModelParallel.load_state_dict(self, map, strict)
  self._steps, self._open, self._before = 0, false, passes(self)
  return keys
end

--- Whether a step that follows ends with an average, by sync_interval or by the pipeline's schedule. Whoever asks does
--- so between two steps.
function DMPCollection:_unfinished()
  if self._open and self._held == 0 then after_step(self) end
  local pipeline = self._mid_pipeline
  local averages = self.sync_interval > 0 or pipeline and pipeline.plan.first.sync ~= nil
  return DistributedModelParallel._unfinished(self) or averages and self._steps > 0
end

--- Replicas that have learned apart are no one model: what one of them has, the others lack. An error on all ranks,
--- also on those that have no rows of the tables.
function DMPCollection:check_moment()
  DistributedModelParallel.check_moment(self)
  local steps = self._steps + (self._open and 1 or 0)
  if self.replica_pg:size() == 1 or steps == 0 or #self:fused_optimizer().param_groups == 0 then
    return
  end
  P.fail(("DMPCollection:state_dict: the replicas have learned apart since their last average (%d step%s); allowed: "
    .. "after model:sync() on all ranks, or after a step that ends with an average (sync_interval = %d; "
    .. "model:backward(loss) ends a step)"):format(steps, steps == 1 and "" or "s", self.sync_interval))
end

signature.check("DMPCollection:", DMPCollection, { sync = "self: table, include_optimizer_state: boolean?" })

return M
