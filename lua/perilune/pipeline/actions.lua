-- actions.lua: what the operations of the library do: f(pipeline, context, operation), in the scope of the batch that
-- they act on.
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local Flight = require "perilune.pipeline.flight"
local post_deferred = require("perilune.shard.embedding")._post_deferred
local kind_of = require("perilune.errors").kind

local M = {}

function M.load(pipeline, context)
  pipeline.supply:load(context)
  if not context.batch then return end
  pipeline.loaded = pipeline.loaded or Flight(context.batch)
  pipeline.loaded:take(context)
end

function M.to_device(pipeline, context)
  local batch, device = context.batch, pipeline.device
  if not (batch and device and batch.to) then return end
  Flight.check(pipeline.class_name, context)
  context.batch = batch:to(device, true)
  pipeline.moved = pipeline.moved or Flight(context.batch)
  pipeline.moved:take(context)
end

--- Ids of all modules whose arguments are known set out, announced in one message.
function M.input_dist(pipeline, context)
  local forwards, list, n = pipeline.forwards, pipeline.sent_together, 0
  Flight.check(pipeline.class_name, context)
  for i = 1, #forwards do
    local f = forwards[i]
    if f:_ready() then
      local dist = f:_defer(context)
      n = n + 1
      context.dists[i], list[n] = dist, dist
    end
  end
  post_deferred(list, n)
  for i = 1, n do list[i] = false end
end

function M.wait_dist(pipeline, context)
  local forwards = pipeline.forwards
  for i = 1, #forwards do
    local dist = context.dists[i]
    if dist then dist:wait() end
  end
end

function M.prefetch(pipeline, context)
  local forwards = pipeline.forwards
  for i = 1, #forwards do
    local f, dist = forwards[i], context.dists[i]
    if dist and f.module:in_files() then
      f:_prefetch(dist)
      context.prefetched[i] = true
    end
  end
end

function M.lookup(pipeline, context)
  local forwards = pipeline.forwards
  if not pipeline.sends_ids then M.input_dist(pipeline, context) end
  for i = 1, #forwards do
    local f, dist = forwards[i], context.dists[i]
    if dist then
      context.dists[i] = false
      context.rows[i] = f:_lookup(dist)
    end
  end
end

--- The tables of the module of `f` were changed between two steps, or (loaded) state was loaded into it. Rows that were
--- looked up before are those of the former tables, and ids that a managed collision has remapped those of the former
--- map, which loading replaces: for batches in flight (contexts, in their order) that is done again. Collective. Where
--- rows for such ids have been fetched from files it is refused.
local function send_again(name, f, contexts, loaded)
  local i, again = f.index, {}
  for k, context in ipairs(contexts) do
    local rows, dist = context.rows[i], context.dists[i]
    if rows then util.resolve(rows)
    elseif loaded and dist and f.module._managed_collision_collection then
      if context.prefetched and context.prefetched[i] then
        P.fail(("%s: state was loaded into module '%s', whose ids of batch %d were remapped before and whose rows "
          .. "come from files already; load it before the first step, or when the pipeline has come to its end"):format(
          name, f.path, context.index))
      end
      dist:wait()
    else dist = false end
    again[k] = (rows or dist) and true or false
  end
  for k, context in ipairs(contexts) do
    if again[k] then
      P.inside(context.scope, function()
        local dist = f:_defer(context)
        post_deferred({ dist }, 1)
        if context.rows[i] then context.rows[i] = f:_lookup(dist) else context.dists[i] = dist end
      end)
    end
  end
end

--- Batches in flight from number `first` on, in their order.
local function in_flight(pipeline, first)
  local contexts = {}
  for _, c in ipairs(pipeline.ring) do
    if c.index >= first and c.exists == c.index then contexts[#contexts + 1] = c end
  end
  table.sort(contexts, function(a, b) return a.index < b.index end)
  return contexts
end

--- This rank's shards alone were changed, for all that is known: others do not know that rows are to be looked up
--- again.
local function refuse_changes_here(pipeline, f)
  local group = f.module.group
  local text = ("%s: shards of module '%s' were written to on rank %d between two steps, and rows for the next batch "
    .. "were looked up before; write before the first step, or call tables_changed() of the module on all ranks "
    .. "afterwards"):format(pipeline.class_name, f.path, group:rank())
  group:abort(text)
  P.fail(text)
end

--- Before a step: see send_again. `first`: the batch of that step.
function M.follow_changes(pipeline, first)
  local contexts
  for _, f in ipairs(pipeline.forwards) do
    local loaded, changed, everywhere = f:_loaded(), f:_tables_changed()
    if loaded or changed then
      contexts = contexts or in_flight(pipeline, first)
      if changed and not (loaded or everywhere or f.module.group:size() == 1) then refuse_changes_here(pipeline, f) end
      send_again(pipeline.class_name, f, contexts, loaded)
      f:_note_tables(f.everywhere)
    end
  end
end

--- Whether rows of module i are here for a batch from number `first` on.
local function looked_up(ring, i, first)
  for k = 1, #ring do
    local c = ring[k]
    if c.index >= first and c.rows[i] then return true end
  end
  return false
end

--- After a step, note how often the tables of each module have been changed, if rows of a later batch (number `first`
--- or later) have been looked up in them: a change after this makes these rows old (forward.lua, _tables_changed).
function M.note_changes(pipeline, first)
  local forwards, ring = pipeline.forwards, pipeline.ring
  for i = 1, #forwards do forwards[i]:_note_tables(looked_up(ring, i, first)) end
end

--- A module that was not called has ids or rows on their way that nobody takes.
local function check_used(pipeline, context)
  local forwards = pipeline.forwards
  for i = 1, #forwards do
    if context.rows[i] or context.dists[i] then
      P.fail(("%s: module '%s' was not called in the forward pass of batch %d, but its ids were sent; leave it out "
        .. "with inputs = { ['%s'] = false }"):format(pipeline.class_name, forwards[i].path, context.index,
        forwards[i].path))
    end
  end
end

--- What is on its way from another stage.
local function arrived(x)
  x.work:wait()
  return x.tensor
end

function M.forward(pipeline, context)
  local forwards = pipeline.forwards
  Flight.check(pipeline.class_name, context)
  for i = 1, #forwards do forwards[i].context = context end
  if pipeline.hooks then pipeline.hooks:set(context) end
  local loss, second, third, fourth
  if context.input then loss, second, third,
    fourth = pipeline.model(context.batch, arrived(context.input):requires_grad(P.state.grad))
  else loss, second, third, fourth = pipeline.model(context.batch) end
  if fourth ~= nil then
    P.fail(pipeline.class_name .. ": the model returned more than three values; a pipeline passes on the loss and two "
      .. "more, each a tensor or a table of tensors: return loss, { click = a, buy = b }, { click = c, buy = d }")
  end
  for i = 1, #forwards do forwards[i].context = false end
  if pipeline.hooks then pipeline.hooks:set(false) end
  check_used(pipeline, context)
  context.loss, context.second, context.third = loss, second, third
  if not pipeline.told then pipeline:_tell() end
end

--- The tables have learned from a batch, from which an optimizer has yet to train the dense part.
local function tables_learned(pipeline, context)
  pipeline.learned = context.index
  if pipeline.optimizer and pipeline.model._note_step then pipeline.model:_note_step(context.index, pipeline) end
end

function M.backward(pipeline, context, operation)
  local loss, model, grad = context.loss, pipeline.model, nil
  if not Tensor.is(loss) then
    P.fail(("%s: the model returned %s, wanted the loss (a tensor)"):format(pipeline.class_name, kind_of(loss)))
  end
  if context.upstream then grad = arrived(context.upstream)
  elseif loss:numel() ~= 1 then
    P.fail(("%s: the loss, which the model returned first, is %s [%s], wanted one number: its mean or sum"):format(
      pipeline.class_name, loss:dtype(), table.concat(loss:shape(), ", ")))
  elseif operation.scale ~= 1 then grad = Tensor.full(loss:shape(), operation.scale, loss:dtype(), loss:device()) end
  local hooks = pipeline.hooks
  if hooks then hooks:set(context) end
  local deferred = pipeline.plan.first.wait_grads and model._defer_averages
  if deferred then model:_defer_averages(true) end
  if model.backward then model:backward(loss, grad) else loss:backward(grad) end
  if deferred then
    model:_defer_averages(false)
    pipeline.averaging = true
  end
  if not pipeline.plan.first.update then tables_learned(pipeline, context) end
  if not hooks then return end
  hooks:set(false)
  hooks:check(context)
end

--- Averages of dense gradients that set out in 'backward' have arrived.
function M.wait_grads(pipeline)
  if not pipeline.averaging then return end
  pipeline.averaging = false
  pipeline.model:_wait_averages()
end

function M.receive(pipeline, context, o) context.input = pipeline.stage:_receive(context, o) end
function M.send(pipeline, context, o) pipeline.stage:_send(context, o) end
function M.receive_grad(pipeline, context, o) context.upstream = pipeline.stage:_receive_grad(context, o) end
function M.send_grad(pipeline, context, o) pipeline.stage:_send_grad(context, o) end

function M.update(pipeline, context)
  local model = pipeline.model
  if model.apply_accumulated then model:apply_accumulated() end
  tables_learned(pipeline, context)
end

function M.sync(pipeline) pipeline.model:sync() end

function M.optimizer(pipeline, context)
  if not pipeline.optimizer then return end
  pipeline.optimizer:step()
  if pipeline.model._note_step and context.index >= pipeline.learned then pipeline.model:_note_step(-1, pipeline) end
end

function M.zero_grad(pipeline)
  if pipeline.optimizer then pipeline.optimizer:zero_grad() end
end

local function run_on_channel(run, group, channel, context, pipeline)
  local before = group:channel(channel)
  local ok, err = xpcall(run, P.locate, context, pipeline)
  group:channel(before)
  if not ok then error(err, 0) end
end

--- A user's operation: on its channel, if it has one. Of its context the pipeline's own fields stay what they are.
function M.own(pipeline, context, operation)
  local run, channel, group = operation.access.run, operation.access.channel, pipeline.group
  local dists, rows, events, index = context.dists, context.rows, context.events, context.index
  Flight.check(pipeline.class_name, context)
  if not channel or not group then
    run(context, pipeline)
  else
    run_on_channel(run, group, channel, context, pipeline)
  end
  local noted = context.noted.flight -- an operation may change its batch
  if noted and context.batch then noted:take(context) end
  if context.dists == dists and context.rows == rows and context.events == events and context.index == index then
    return
  end
  context.dists, context.rows, context.events, context.index = dists, rows, events, index
  P.fail(("operation '%s' has assigned to dists, rows, events or index of its context, which are the pipeline's; a "
    .. "table for operations is context.own"):format(operation.name))
end

return M
