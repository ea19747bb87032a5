-- fits.lua: whether a pipeline's model, optimizer and Stage are what a checked schedule asks for.
local P = require "perilune.ffi"
local util = require "perilune.util"

local M = {}

local function fail(pipeline, text, ...) P.fail((pipeline.class_name .. ": " .. text):format(...)) end

--- Where a model that is not distributed has tables that a backward pass updates: "module 'x'"; nil: it has none.
local function fused_within(model)
  if type(model) ~= "table" or not model.named_modules then return "the model" end
  for _, m in ipairs(model:named_modules()) do
    if rawget(m.module, "fused_params") then return ("module '%s'"):format(m.path) end
  end
end

--- In steps of a schedule with an 'update' the model keeps its updates and averages; outside of them it is as ever.
--- (One without either has nothing to keep: its gradients add up.)
function M.accumulate(self, on)
  if self.plan.first.update and self.model.accumulate then self.model:accumulate(on) end
end

--- Whether it can, for the steps of `plan`, or an error of the model.
local function check_accumulates(self, plan)
  local model = self.model
  if not plan.first.update or not model.accumulate then return end
  local ok, err = pcall(model.accumulate, model, true)
  model:accumulate(false)
  if self.stepping then M.accumulate(self, true) end -- of the schedule that runs
  if not ok then error(err, 0) end
end

--- A dense part that nobody trains is meant, or an optimizer was forgotten.
local function check_optimizer(self, plan)
  local model = self.model
  if self.optimizer or self.frozen or not plan.first.optimizer or type(model) ~= "table"
    or not model.named_parameters then return end
  local names = util.map(model:named_parameters(), function(p) return p.name end)
  if #names == 0 then return end
  fail(self, "schedule '%s' has an 'optimizer', but the pipeline has none for %d parameter%s of the model ('%s'%s): "
    .. "give optimizer = one of nn.optim, or optimizer = false to leave them as they are", plan.name, #names,
    #names > 1 and "s" or "", names[1], #names > 1 and ", ..." or "")
end

--- What a schedule asks of model and optimizer.
function M.check_model(self, plan)
  local model = self.model
  if self.optimizer and plan.first.backward and not plan.first.optimizer then
    fail(self, "there is an optimizer, but schedule '%s' has no operation 'optimizer'", plan.name)
  end
  local trains_itself = plan.first.update and not (type(model) == "table" and model.accumulate) and fused_within(model)
  if trains_itself then
    fail(self, "schedule '%s' has an 'update', for which the model must be a DistributedModelParallel; tables of %s "
      .. "update in backward", plan.name, trains_itself)
  end
  if plan.first.sync and not (type(model) == "table" and model.sync and model.sync_interval == 0) then
    fail(self, "schedule '%s' has a 'sync'; the model must be a DMPCollection with sync_interval = 0", plan.name)
  end
  for _, o in ipairs(plan.operations) do
    if self.on_step and o.ahead ~= 0 and (o.kind == "backward" or o.kind == "update" or o.kind == "optimizer") then
      fail(self, "on_step sets what holds in a step, but '%s' of schedule '%s' acts on another batch (ahead %d)",
        o.name, plan.name, o.ahead)
    end
  end
  check_optimizer(self, plan)
  check_accumulates(self, plan)
end

--- What a schedule asks of the Stage, and the other way round.
function M.check_stage(self, plan)
  for _, what in ipairs { "receive", "send", "receive_grad", "send_grad" } do
    if plan.first[what] and not self.stage then
      fail(self, "schedule '%s' has a '%s'; the pipeline must have a stage", plan.name, what)
    end
  end
end

return M
