-- base.lua: the plain training loop: one batch after the other, the next batch on its way to the device while this one computes.
--
--   local pipeline = peri.TrainPipelineBase { model = model, optimizer = optimizer }
--   for loss in pipeline:run(batches) do ... end        -- numbers; every batch of the iterator is trained on
--   local loss, logits, labels = pipeline:progress(batches) -- one step: tensors for the caller; nil at the end
--
-- model(batch) returns the loss (one element) and up to two more tensors, such as logits and labels. A batch may have a method to(device).
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local kind = require("perilune.errors").kind

local TrainPipelineBase = util.class "TrainPipelineBase"

--- model: a DistributedModelParallel or nn.Module; optimizer: of the dense part, or nil; device: where batches are moved (default: they
--- stay); schedule: a function(step) called before each step (learning rates).
function TrainPipelineBase:init(args)
  local a = util.named("TrainPipelineBase", args, {
    model = util.required, optimizer = util.optional, device = util.optional, schedule = util.optional,
  })
  local optimizer = a.optimizer
  if not util.is_callable(a.model) then P.fail(("TrainPipelineBase: model is %s, wanted an nn.Module"):format(kind(a.model))) end
  if optimizer and not (type(optimizer) == "table" and optimizer.step and optimizer.zero_grad) then
    P.fail(("TrainPipelineBase: optimizer is %s, wanted one of nn.optim"):format(kind(optimizer)))
  end
  self.model, self.optimizer, self.device, self.schedule = a.model, a.optimizer or false, a.device or false, a.schedule or false
  self.steps = 0
  self._next = false    -- the batch that follows, already on the device
  self._source = false  -- the iterator that it came from
end

local function fetch(self, batches)
  local batch = batches()
  if batch ~= nil and self.device and batch.to then batch = batch:to(self.device) end
  return batch or false
end

local function keep(x) return x and P.keep(x) or nil end

--- One step, inside a scope: everything but what the model returned dies with it.
local function step(self, batch)
  local model, optimizer = self.model, self.optimizer
  if optimizer then optimizer:zero_grad() end
  local loss, second, third = model(batch)
  if not Tensor.is(loss) then P.fail(("TrainPipelineBase: the model returned %s, wanted the loss (a tensor)"):format(kind(loss))) end
  if model.backward then model:backward(loss) else loss:backward() end
  if optimizer then optimizer:step() end
  return P.keep(loss), keep(second), keep(third)
end

--- Train on the next batch of the iterator `batches` (a function). Returns what the model returned, or nil when there are no more batches.
function TrainPipelineBase:progress(batches)
  if self._source ~= batches then
    if not util.is_callable(batches) then
      P.fail(("TrainPipelineBase: batches is %s, wanted a function that returns the next batch, such as data.synthetic {...}"):format(
        kind(batches)))
    end
    self._source = batches
    self._next = fetch(self, batches)
  end
  local batch = self._next
  if not batch then
    self._source = false
    return nil
  end
  self._next = fetch(self, batches)
  self.steps = self.steps + 1
  if self.schedule then self.schedule(self.steps) end
  return P.scope(step, self, batch)
end

--- for loss, step in pipeline:run(batches): the loss as a number after each step.
function TrainPipelineBase:run(batches)
  return function()
    local loss, second, third = self:progress(batches)
    if not loss then return nil end
    local number = loss:item()
    loss:release()
    if second then second:release() end
    if third then third:release() end
    return number, self.steps
  end
end

return TrainPipelineBase
