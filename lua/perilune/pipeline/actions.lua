-- actions.lua: what the operations of the library do: f(pipeline, context, operation), in the scope of the batch that they act on.
local P = require "perilune.ffi"
local Tensor = require "perilune.tensor"
local post_deferred = require("perilune.shard.embedding").post_deferred
local kind_of = require("perilune.errors").kind

local M = {}

function M.load(pipeline, context) pipeline.supply:load(context) end

function M.to_device(pipeline, context)
  local batch, device = context.batch, pipeline.device
  if batch and device and batch.to then context.batch = batch:to(device) end
end

--- Ids of all modules whose arguments are known set out, announced in one message.
function M.input_dist(pipeline, context)
  local forwards, list, n = pipeline.forwards, pipeline.sent_together, 0
  for i = 1, #forwards do
    local f = forwards[i]
    if f:ready() then
      local dist = f:defer(context.batch)
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
      f:prefetch(dist)
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
      context.rows[i] = f:lookup(dist)
    end
  end
end

--- A module that was not called has ids or rows on their way that nobody takes.
local function check_used(pipeline, context)
  local forwards = pipeline.forwards
  for i = 1, #forwards do
    if context.rows[i] or context.dists[i] then
      P.fail(("%s: module '%s' was not called in the forward pass of batch %d, but its ids were sent; leave it out with inputs = "
        .. "{ ['%s'] = false }"):format(pipeline.class_name, forwards[i].path, context.index, forwards[i].path))
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
  for i = 1, #forwards do forwards[i].context = context end
  if pipeline.hooks then pipeline.hooks:set(context) end
  local loss, second, third
  if context.input then loss, second, third = pipeline.model(context.batch, arrived(context.input):requires_grad(P.state.grad))
  else loss, second, third = pipeline.model(context.batch) end
  for i = 1, #forwards do forwards[i].context = false end
  if pipeline.hooks then pipeline.hooks:set(false) end
  check_used(pipeline, context)
  context.loss, context.second, context.third = loss, second, third
  if not pipeline.told then pipeline:tell() end
end

function M.backward(pipeline, context, operation)
  local loss, model, grad = context.loss, pipeline.model, nil
  if not Tensor.is(loss) then
    P.fail(("%s: the model returned %s, wanted the loss (a tensor)"):format(pipeline.class_name, kind_of(loss)))
  end
  if context.upstream then grad = arrived(context.upstream)
  elseif operation.scale ~= 1 then grad = Tensor.full(loss:shape(), operation.scale, loss:dtype(), loss:device()) end
  local hooks = pipeline.hooks
  if hooks then hooks:set(context) end
  local deferred = pipeline.plan.first.wait_grads and model.defer_averages
  if deferred then model:defer_averages(true) end
  if model.backward then model:backward(loss, grad) else loss:backward(grad) end
  if deferred then
    model:defer_averages(false)
    pipeline.averaging = true
  end
  if not hooks then return end
  hooks:set(false)
  hooks:check(context)
end

--- Averages of dense gradients that set out in 'backward' have arrived.
function M.wait_grads(pipeline)
  if not pipeline.averaging then return end
  pipeline.averaging = false
  pipeline.model:wait_averages()
end

function M.receive(pipeline, context, o) context.input = pipeline.stage:receive(context, o) end
function M.send(pipeline, context, o) pipeline.stage:send(context, o) end
function M.receive_grad(pipeline, context, o) context.upstream = pipeline.stage:receive_grad(context, o) end
function M.send_grad(pipeline, context, o) pipeline.stage:send_grad(context, o) end

function M.update(pipeline)
  local model = pipeline.model
  if model.apply_accumulated then model:apply_accumulated() end
end

function M.sync(pipeline) pipeline.model:sync() end

function M.optimizer(pipeline)
  if pipeline.optimizer then pipeline.optimizer:step() end
end

function M.zero_grad(pipeline)
  if pipeline.optimizer then pipeline.optimizer:zero_grad() end
end

--- A user's operation: on its channel, if it has one.
function M.own(pipeline, context, operation)
  local run, channel, group = operation.access.run, operation.access.channel, pipeline.group
  if not channel or not group then return run(context, pipeline) end
  local before = group:channel(channel)
  local ok, err = xpcall(run, P.locate, context, pipeline)
  group:channel(before)
  if not ok then error(err, 0) end
end

return M
