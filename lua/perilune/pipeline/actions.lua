-- actions.lua: what the operations of the library do: f(pipeline, context, operation), in the scope of the batch that they act on.
local P = require "perilune.ffi"
local Tensor = require "perilune.tensor"
local kind_of = require("perilune.errors").kind

local M = {}

function M.load(pipeline, context) pipeline.supply:load(context) end

function M.to_device(pipeline, context)
  local batch, device = context.batch, pipeline.device
  if batch and device and batch.to then context.batch = batch:to(device) end
end

function M.input_dist(pipeline, context)
  local forwards = pipeline.forwards
  for i = 1, #forwards do
    local f = forwards[i]
    if f:ready() then context.dists[i] = f:input_dist(context.batch) end
  end
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
  for i = 1, #forwards do
    local f, dist = forwards[i], context.dists[i]
    if not dist and not pipeline.sends_ids and f:ready() then dist = f:input_dist(context.batch) end
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

function M.forward(pipeline, context)
  local forwards = pipeline.forwards
  for i = 1, #forwards do forwards[i].context = context end
  local loss, second, third = pipeline.model(context.batch)
  for i = 1, #forwards do forwards[i].context = false end
  check_used(pipeline, context)
  context.loss, context.second, context.third = loss, second, third
  if not pipeline.told then pipeline:tell() end
end

function M.backward(pipeline, context, operation)
  local loss, model, grad = context.loss, pipeline.model, nil
  if not Tensor.is(loss) then
    P.fail(("%s: the model returned %s, wanted the loss (a tensor)"):format(pipeline.class_name, kind_of(loss)))
  end
  if operation.scale ~= 1 then grad = Tensor.full(loss:shape(), operation.scale, loss:dtype(), loss:device()) end
  if model.backward then model:backward(loss, grad) else loss:backward(grad) end
end

function M.update(pipeline) pipeline.model:apply_accumulated() end

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
