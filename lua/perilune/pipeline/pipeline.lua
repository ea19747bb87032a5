-- pipeline.lua: runs a schedule over batches.
--
--   local pipeline = peri.pipeline.Pipeline { model = model, optimizer = optimizer,
--     schedule = peri.pipeline.schedules.sparse_dist }
--   for loss, step in pipeline:run(batches) do ... end
--   local loss, logits, labels = pipeline:progress(batches) -- one step: tensors for the caller; nil at the end
--
-- model(batch) returns the loss (one element) and up to two more tensors, or tables of them. A batch may have a method
-- to(device). Which of its fields a sharded module is called with is seen in the first forward pass, so the first
-- batches run whole; `inputs` says it before.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local errors = require "perilune.errors"
local shard = require "perilune.shard"
local get_module = require("perilune.model").get_module
local agree = require("perilune.dist.collective_utils").agree
local Schedule = require "perilune.pipeline.schedule"
local hash_of = Schedule._hash_of
local Supply = require "perilune.pipeline.supply"
local Loader = require "perilune.data.loader"
local Streams = require "perilune.pipeline.streams"
local contexts = require "perilune.pipeline.context"
local forwards = require "perilune.pipeline.forward"
local Hooks = require "perilune.pipeline.hooks"
local program = require "perilune.pipeline.program"
local actions = require "perilune.pipeline.actions"
local fits = require "perilune.pipeline.fits"
local stages = require "perilune.pipeline.stages"
local acts_at = require("perilune.pipeline.unroll").acts_at
local signature = require "perilune.signature"
local stop = require "perilune.stop"
local kind, accumulate = errors.kind, fits.accumulate

local Pipeline = util.seal(util.class "Pipeline")

local arguments = {
  model = util.required,       -- a DistributedModelParallel or nn.Module
  optimizer = util.optional,   -- of the dense part; nil: it has no parameters; false: they are not trained
  schedule = util.required,    -- a Schedule
  device = util.optional,      -- where batches are moved; default: they stay
  on_step = util.optional,     -- function(step), called before each step, which count from 1: it sets learning rates,
                               -- and returns nothing
  stage = util.optional,       -- a Stage, if the model is one of several
  inputs = util.optional.table, -- path of a sharded module -> function(batch) -> what it is called with; false: it is
                                -- not pipelined
  vote = true,                 -- let ranks have different numbers of batches; false: they all have as many
  empty_batch = util.optional, -- function() -> a batch without samples; default: made of the first batch
}

local function fail(self, text, ...) P.fail((self.class_name .. ": " .. text):format(...)) end

local function check_arguments(self, a)
  if not util.is_callable(a.model) then fail(self, "model is %s, wanted an nn.Module", kind(a.model)) end
  local optimizer = a.optimizer
  if optimizer and not (type(optimizer) == "table" and optimizer.step and optimizer.zero_grad) then
    fail(self, "optimizer is %s, wanted one of nn.optim", kind(optimizer))
  end
  if not Schedule.is(a.schedule) then fail(self, "schedule is %s, wanted a Schedule", kind(a.schedule)) end
  if a.stage ~= nil and not stages.Stage.is(a.stage) then fail(self, "stage is %s, wanted a Stage", kind(a.stage)) end
  for _, name in ipairs { "on_step", "empty_batch" } do
    if a[name] ~= nil and not util.is_callable(a[name]) then
      fail(self, "%s is %s, wanted a function", name, kind(a[name]))
    end
  end
end

--- A forward for each sharded module of the model.
local function find_modules(self, a, plan)
  local list, inputs = {}, util.copy(a.inputs or {})
  local class = plan.first.prefetch and forwards.PrefetchPipelinedForward or forwards.PipelinedForward
  local module = get_module(a.model)
  for _, m in ipairs(type(module) == "table" and module.named_modules and module:named_modules() or {}) do
    if shard.ShardedModule.is(m.module) then
      local given = inputs[m.path]
      inputs[m.path] = nil
      local f = class(m.module, m.path, #list + 1, given)
      if given == false then f.refusal = "inputs says so"
      elseif given ~= nil and not util.is_callable(given) then
        fail(self, "inputs of module '%s' is %s, wanted a function(batch) or false", m.path, kind(given))
      end
      list[#list + 1] = f
    end
  end
  local unknown = util.keys(inputs)
  if not unknown or unknown[1] then
    fail(self, "inputs names '%s', which is no sharded module of the model; those are: %s",
      tostring(unknown and unknown[1]), #list > 0
        and table.concat(util.map(list, function(f) return "'" .. f.path .. "'" end), ", ") or "none")
  end
  return list
end

--- What the checker asks of a model.
local function facts_of(list)
  local dense = false
  for _, f in ipairs(list) do
    for _, sharding in util.ordered(f.module.plan and f.module.plan.tables or {}) do
      dense = dense or sharding.compute_kernel == "dense"
    end
  end
  return { dense_tables = dense }
end

--- The ranks that take the same steps; nil: there are no others.
local function group_of(model, list)
  local env = type(model) == "table" and model.dense_env
  if env then return env.pg end
  return list[1] and list[1].module.group or nil
end

--- When nobody has the pipeline any more, what its batches hold is given back. (No context knows its pipeline.)
local function release_with(ring)
  return ffi.gc(ffi.new "char[1]", function()
    for _, c in ipairs(ring) do P.close_scope(c.scope) end
  end)
end

function Pipeline:init(args)
  local a = util.named(self.class_name, args, arguments)
  check_arguments(self, a)
  self.model, self.optimizer, self.device, self.on_step = a.model, a.optimizer or false, a.device or false, a.on_step
    or false
  self.steps, self.measured, self.told, self.agreed, self.broken, self.next, self.before = 0, false, false, false,
    false, false, 0
  self.frozen = a.optimizer == false
  self.hooks, self.plan, self.stage, self.again, self.averaging = false, false, a.stage or false, false, false
  self.attached, self.stepping, self.learned = false, false, -1
  self.loaded, self.moved = false, false
  self.sent_together = {} -- of actions.input_dist
  local present = { first = {} }
  for _, o in ipairs(a.schedule.operations) do present.first[o.kind] = o end
  self.forwards = find_modules(self, a, present)
  self.group = group_of(a.model, self.forwards) or false
  if self.group and self.group:size() == 1 then self.group = false end
  local all = self.stage and self.stage.world or self.group -- those who have as many batches
  self.comm = all and all:size() > 1 and all:ptr() or false
  self.supply = Supply(a.vote and all or nil, a.empty_batch, a.device, a.stage ~= nil)
  self.supply.heeds = a.vote or not self.comm
  self.vote = a.vote
  self:set_schedule(a.schedule)
end

local function device_of(self)
  local model = self.model
  return P.device(self.device or type(model) == "table" and model.device or nil)
end

--- Run an operation that has a hook.
local function at_hook(self, operation, context, gradient)
  context.gradient = gradient
  self.actions[operation.place](self, context, operation)
  context.gradient = nil
end

--- What runs inside the backward passes of this schedule.
local function set_hooks(self)
  if self.hooks then self.hooks:detach() end
  self.hooks = false
  for _, o in ipairs(self.plan.operations) do
    if o.hook and not self.hooks then
      self.hooks = Hooks(self.class_name, self.model, self.plan, function(...) at_hook(self, ...) end)
    end
  end
end

function Pipeline:__tostring()
  return ("%s (schedule '%s', %s taken)"):format(self.class_name, self.schedule.name,
    util.number_of(self.steps, "step"))
end

--- Run this schedule from the next step on. What is in flight is trained first, by the steps that follow; then it
--- begins.
function Pipeline:set_schedule(schedule)
  if not Schedule.is(schedule) then fail(self, "schedule is %s, wanted a Schedule", kind(schedule)) end
  local plan = schedule:check(facts_of(self.forwards))
  fits.check_model(self, plan)
  fits.check_stage(self, plan)
  if self.next then
    self.following = schedule
    self.supply:hold()
    return
  end
  self.following, self.agreed = false, false
  self.schedule, self.plan = schedule, plan
  self.supply.flush, self.supply.closing = plan.flush or math.huge, {}
  self.sends_ids, self.looks_ahead = plan.first.input_dist ~= nil, false
  for _, o in ipairs(plan.operations) do
    self.looks_ahead = self.looks_ahead or o.kind == "lookup" and o.ahead > 0
    if o.access.closes then table.insert(self.supply.closing, o) end
  end
  local class = plan.first.prefetch and contexts.PrefetchTrainPipelineContext or contexts.TrainPipelineContext
  local ring = {}
  for i = 1, plan.depth do ring[i] = class(#self.forwards) end
  self.ring, self.supply.ring, self._release = ring, ring, release_with(ring)
  local device = device_of(self)
  local name = ffi.string(P.C.peri_device_name(device))
  self.streams = name ~= "cpu" and Streams(device, plan.streams) or false
  self:measure(self.measured and true or false)
  set_hooks(self)
  self:attach()
end

--- Note when operations begin and end, in pipeline.measured: a list of { operation, batch, from, to (ns) }; and for
--- what the rank waits (waits.lua).
function Pipeline:measure(on)
  if self.comm and (on or self.measured) then
    P.C.peri_group_watch_set(self.comm, on or false)
    P.state.watched = on and self.comm
  end
  self.measured = on and (self.measured or {}) or false
  self.program, self.actions = program.compile(self.plan, Supply.has, self.streams, on)
end

-- -- the model --------------------------------------------------------------------------------------------------------

--- Put the pipeline before the sharded modules of its model, which it is from the beginning. A model has one pipeline
--- at a time, the last that was attached. Calls of the model outside of the pipeline's steps are as ever.
function Pipeline:attach()
  self.attached = true
  for _, f in ipairs(self.forwards) do f.module:_set_pipelined(f) end
  if self.hooks then self.hooks:attach() end
end

--- Let the model be as it was, until the next step.
function Pipeline:detach()
  self.attached = false
  for _, f in ipairs(self.forwards) do
    if rawequal(f.module._pipelined, f) then f.module:_set_pipelined(false) end
  end
  if self.hooks then self.hooks:detach() end
end

--- Modules that run whole in the forward pass: a list of { path =, reason = }. Known after the first step.
function Pipeline:not_pipelined()
  local list = {}
  for _, f in ipairs(self.forwards) do
    if f.refusal then list[#list + 1] = { path = f.path, reason = f.refusal } end
  end
  return list
end

--- Say once, on the first rank, which those are.
function Pipeline:_tell()
  self.told = true
  if not self.sends_ids and not self.plan.first.lookup or self.group and self.group:rank() > 0 then return end
  for _, m in ipairs(self:not_pipelined()) do
    io.stderr:write(("%s: module '%s' is not pipelined: %s\n"):format(self.class_name, m.path, m.reason))
  end
end

-- -- steps ------------------------------------------------------------------------------------------------------------

--- Before step n, whose batch is there.
function Pipeline:_begin(n)
  self.steps = self.before + n + 1
  if not self.on_step then return end
  local said = self.on_step(self.steps)
  if said == nil then return end
  fail(self, "%s returned %s for step %d, and what it returns is not used: it sets rates itself, as in "
    .. "optimizer:set_lr(0.1) and model:fused_optimizer():set_lr(0.1), and returns nothing",
    self.class_name == "Pipeline" and "on_step" or "schedule", kind(said), self.steps)
end

--- What the model returned besides its loss, kept for the caller: a tensor, or a table of tensors by names (of several
--- tasks, say).
local function held(x)
  if type(x) ~= "table" or getmetatable(x) then return P.keep(util.resolve(x)) end
  for _, t in util.ordered(x) do
    t = util.resolve(t)
    if type(t) == "cdata" then P.keep(t) end
  end
  return x
end

local function take_loss(context)
  local loss, second, third = context.loss, context.second, context.third
  return loss and P.keep(util.resolve(loss)) or nil, second and held(second) or nil, third and held(third) or nil
end

--- The loss as a number: NaN for a stage that is not the last one, which has no loss. The tensors are not released
--- here: those that the model made die with the scope of their batch, and a field of the batch that the model returned
--- belongs to whoever made the batch.
local function take_number(context)
  local loss, second, third = context.loss, context.second, context.third
  if second then util.resolve(second) end
  if third then util.resolve(third) end
  if not loss then return nil end
  loss = util.resolve(loss)
  return loss:numel() == 1 and loss:item() or 0 / 0
end

--- Tell the modules whether batches are in flight.
local function fly(self, on)
  for _, f in ipairs(self.forwards) do f:_fly(on and self.supply) end
end

local function close_context(self, context)
  if context.index < 0 then return end
  if self.streams then self.streams:retire(context) end
  context:_close()
end

local function check_batches(self, batches)
  if util.is_callable(batches) then return end
  fail(self, "batches is %s, wanted a function that returns the next batch, such as data.synthetic {...}",
    kind(batches))
end

--- Whether the schedules of all stages go together.
local function compare_stages(self)
  local stage, list = self.stage, {}
  local given = stage.world:all_gather_object(stages.summary(self.plan), self.class_name)
  for s = 1, stage.stages do list[s] = given[(s - 1) * #given / stage.stages + 1] end
  stages.check(list)
end

--- Ranks compare what they are about to do: hashes of it, and where those differ all of it, so that an error names what
--- differs.
local function compare_ranks(self)
  local facts = self.schedule:facts()
  facts[#facts + 1] = { "vote", tostring(self.vote) }
  facts[#facts + 1] = { "list of pipelined modules",
    table.concat(util.map(self.forwards, function(f) return f:_way() end), ", ") }
  local hashes = self.group:all_gather_object(hash_of(facts), self.class_name)
  for _, hash in ipairs(hashes) do
    if hash ~= hashes[1] then return agree(self.group, self.class_name, facts) end
  end
end

--- The first step of a run: ranks compare, and the operations that run ahead run. (Not where the same goes on after a
--- flush: those are many.)
local function begin(self, batches)
  if not (self.again and self.agreed) then
    if self.group then compare_ranks(self) end
    if self.stage then compare_stages(self) end
  end
  self.agreed, self.next, self.before, self.learned = true, 0, self.steps, -1
  if type(self.model) == "table" and self.model._note_step then self.model:_note_step(-1, self) end
  self:attach()
  for _, f in ipairs(self.forwards) do f:_loaded() end -- state that was loaded while no batch was in flight
  self.supply:start(batches, self.again)
  self.again = false
  fly(self, true)
  for n = -self.plan.ahead, -1 do self.program(self, n) end
end

--- After the last batch: operations that act on earlier ones, then everything begins anew.
local function finish(self, n)
  for k = n + 1, n + self.plan.behind - 1 do self.program(self, k) end
  for i = 1, #self.ring do close_context(self, self.ring[i]) end
  if self.stage then self.stage:_settle() end
  self.next = false
  fly(self, false)
  if self.streams then self.streams:hear() end
end

local function step(self, batches, taking)
  if not self.next then begin(self, batches) elseif not self.attached then self:attach() end
  if not rawequal(self.supply.source, batches) then
    check_batches(self, batches)
    self.supply:follow(batches)
  end
  local n, depth, list, looks_ahead = self.next, self.plan.depth, self.forwards, self.looks_ahead
  for i = 1, #list do
    if list[i].module._loads ~= list[i].loads or looks_ahead and list[i]:_tables_changed() then
      actions.follow_changes(self, n)
    end
  end
  self.program(self, n)
  if looks_ahead then actions.note_changes(self, n + 1) end
  if not self.supply:has(n) then
    finish(self, n)
    return nil
  end
  self.next = n + 1
  local context = self.ring[n % depth + 1]
  local loss, second, third = P.inside(context.scope, taking, context)
  local given = context.given
  for i = 1, given and #given or 0 do given[i].batches = given[i].batches - 1 end -- they are trained
  if n >= self.plan.behind then close_context(self, self.ring[(n - self.plan.behind) % depth + 1]) end
  return loss, second, third
end

local function recorded(self, batches, taking)
  if self.plan.grad == false then return P.no_grad(step, self, batches, taking) end
  accumulate(self, true)
  return step(self, batches, taking)
end

--- An exchange of some of the ranks (a stage's, a sharding group's) that fails ends it for all of them: others would
--- wait for ranks that wait, and say that those have left.
local function end_for_all(self)
  local all = self.stage and self.stage.world or self.group
  if not all or not all:is_healthy() then return end
  local groups = self.stage and self.stage:_groups() or {}
  for _, f in ipairs(self.forwards) do groups[#groups + 1] = f.module.group end
  for _, group in ipairs(groups) do
    if not group:is_healthy() then return all:abort(("rank %d: %s"):format(all:rank(), self.broken)) end
  end
end

--- A step that failed leaves nothing behind; the pipeline cannot go on.
local function broken(self, err)
  self.broken = errors.describe(err):match "^[^\n]*"
  for _, f in ipairs(self.forwards) do f.context = false end
  if self.hooks then self.hooks:set(false) end
  for _, c in ipairs(self.ring) do c:_close() end
  fly(self, false)
  end_for_all(self)
  error(err, 0)
end

--- What is called between steps is not called in one.
local function check_between(self, name)
  if not self.stepping then return end
  fail(self, "%s is called within a step (by an operation, the loader or on_step); there stop() asks for no more "
    .. "batches", name)
end

--- Nothing more is trained: ranks end with the same weights, or this is an error on all of them.
local function check_replicas(self)
  local model = self.model
  if not (self.group and self.plan.updates_dense) then return end
  if type(model) == "table" and model._check_replicas then model:_check_replicas(self.class_name) end
end

local function stepped(self, batches, taking)
  self.stepping = true
  local ok, loss, second, third = xpcall(recorded, P.locate, self, batches, taking)
  self.stepping = false
  accumulate(self, false)
  if not ok then broken(self, loss) end
  return loss, second, third
end

--- All batches that are together were trained: whether others follow.
local function go_on(self)
  local following = self.following
  self.again = self.supply.full
  if following then self:set_schedule(following) end
  return following or self.again
end

local function progress(self, batches, taking)
  if self.broken then fail(self, "an earlier step failed: %s", self.broken) end
  check_between(self, "progress")
  if not self.next then check_batches(self, batches) end
  local loss, second, third = stepped(self, batches, taking)
  -- Before a pause the operations that are a step behind run for the last batch, too: who waits finds a whole state.
  if loss ~= nil and self.plan.behind > 0 and self.next == self.supply.most then
    stepped(self, batches, taking)
    go_on(self)
  end
  if loss ~= nil or self.next then
    local supply = self.supply
    local last = not self.next or self.next >= math.min(supply.total, supply.most)
    if supply.heeds then stop._ends(last and "last" or "more") end
    return loss, second, third
  end
  self.supply:raise()
  if not go_on(self) then
    check_replicas(self)
    stop._call()
    return nil
  end
  return progress(self, batches, taking)
end

--- One step: the next batch of the iterator `batches` (a function) is trained on. Returns what the model returned, or
--- nil when there are no more. Another iterator than in the last call follows what is in flight. Collective.
function Pipeline:progress(batches) return progress(self, batches, take_loss) end

--- Ask for no more batches: what is loaded is trained by the next steps, then there are none. All ranks together, or
--- any of them.
function Pipeline:stop() self.supply:stop() end

--- Updates of batches that were trained last, which wait for others of their group: as at the end of the data.
local function finish_group(self)
  accumulate(self, true)
  for i, o in ipairs(self.plan.operations) do
    local b = self.next - 1 + o.ahead
    local closed = acts_at(o, b) or program.knows_last(self.plan, o) and not self.supply:has(b + 1)
    if o.access.closes and b >= 0 and not closed then
      local context = self.ring[b % self.plan.depth + 1]
      P.inside(context.scope, self.actions[i], self, context, o)
      context:_close()
    end
  end
  accumulate(self, false)
end

--- Forget the batches that are loaded and not yet trained, when nobody goes on with them; returns how many. All ranks
--- alike.
function Pipeline:close()
  check_between(self, "close")
  local n = 0
  if self.next and not self.broken then finish_group(self) end
  if self.next then
    for _, c in ipairs(self.ring) do
      if c.index >= self.next and c.batch then n = n + 1 end
      for i = 1, #c.dists do
        if c.dists[i] then c.dists[i]:wait() end
        if c.rows[i] then util.resolve(c.rows[i]) end
      end
      if c.vote then c.vote:wait() end
      close_context(self, c)
    end
    actions.wait_grads(self)
    self.next = false
  end
  fly(self, false)
  self:detach()
  return n
end

--- for loss, step in pipeline:run(batches): the loss as a number after each step.
function Pipeline:run(batches)
  if Loader.is(batches) and batches._over and batches.rank == 0 then -- a second loop over it, which would train nothing
    io.stderr:write(("%s: %s is at its end and has no more batches; rewind() begins again, epochs = N makes N "
      .. "passes\n"):format(
      self.class_name, batches.func))
  end
  return function()
    local loss = progress(self, batches, take_number)
    if loss then return loss, self.steps end
  end
end

signature.kind("Pipeline", "a Pipeline", Pipeline.is)
signature.check("Pipeline:", Pipeline,
  { measure = "self: Pipeline, on: boolean?", set_schedule = "self: Pipeline, schedule: any" })
signature.check_each("Pipeline:", Pipeline, { "progress", "run" }, "self: Pipeline, batches: any")
signature.check_each("Pipeline:", Pipeline, { "attach", "detach", "not_pipelined", "_tell", "stop", "close" },
  "self: Pipeline")

return Pipeline
