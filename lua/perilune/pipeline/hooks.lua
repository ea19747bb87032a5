-- hooks.lua: operations inside the backward pass: each runs when the gradient of a module's output is there, before the
-- pass goes on to that module. The module's forward is replaced while the pipeline is attached; outside of the
-- pipeline's steps it is as ever.
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local KeyedTensor = require("perilune.jagged").KeyedTensor
local awaitable = require "perilune.dist.awaitable"
local kind = require("perilune.errors").kind
local acts = require("perilune.pipeline.unroll").acts_at
local get_module = require("perilune.model").get_module

local Hooks = util.class "Hooks"

local function module_at(name, model, o)
  local ok, module = pcall(function() return get_module(model):get_module(o.hook) end)
  if not ok or not module then
    P.fail(("%s: operation '%s': the model has no module '%s' (hook)"):format(name, o.name, o.hook))
  end
  return module
end

--- What a module returned, with the hook on it.
local function hooked(x, hook, path)
  if awaitable.Awaitable.is(x) then return x:and_then(function(result) return hooked(result, hook, path) end) end
  if Tensor.is(x) then return hook(x) end
  if KeyedTensor.is(x) then
    return KeyedTensor { keys = x:keys(), length_per_key = x:length_per_key(), values = hook(x:values()) }
  end
  P.fail(("module '%s' returned %s; a hook wants a tensor or KeyedTensor"):format(path, kind(x)))
end

--- Of the hooks in `plan`. run(o, context, gradient) runs an operation. (A model that is attached does not keep its
--- pipeline: it has `now`, which knows the context, and the Hooks while somebody else has them.)
function Hooks:init(name, model, plan, run)
  self.name, self.now, self.list = name, { context = false }, {}
  for _, o in ipairs(plan.operations) do
    if o.hook then
      local entry = { operation = o, module = module_at(name, model, o), called = -1, ran = -1 }
      entry.hook = Tensor.Hook(function(gradient)
        local context = self.now.context
        if not context then return end
        entry.ran = context.index
        if acts(o, context.index) then run(o, context, gradient) end
      end)
      self.list[#self.list + 1] = entry
    end
  end
end

local function replace_forward(entry, now)
  local weak, path, forward = setmetatable({ entry = entry }, { __mode = "v" }), entry.operation.hook,
    entry.module.forward
  entry.before = rawget(entry.module, "forward")
  rawset(entry.module, "forward", function(self, a, b, c, d)
    local x, y, z = forward(self, a, b, c, d)
    local context, e = now.context, weak.entry
    if not context or not e or not P.state.grad then return x, y, z end
    if e.called == context.index then
      P.fail(("module '%s' is called twice in a forward pass, and has a hook"):format(path))
    end
    e.called = context.index
    return hooked(x, e.hook, path), y, z
  end)
  entry.attached = true
end

function Hooks:attach()
  for _, entry in ipairs(self.list) do
    if not entry.attached then replace_forward(entry, self.now) end
  end
end

function Hooks:detach()
  for i = #self.list, 1, -1 do
    local entry = self.list[i]
    if entry.attached then rawset(entry.module, "forward", entry.before) end
    entry.attached = false
  end
end

--- The forward or backward pass of a context begins; false: it is over.
function Hooks:set(context) self.now.context = context end

--- After the backward pass of a batch.
function Hooks:check(context)
  for _, entry in ipairs(self.list) do
    if entry.ran ~= context.index then
      P.fail(("%s: operation '%s' did not run: the loss of batch %d was not made of what module '%s' returned"):format(
        self.name, entry.operation.name, context.index, entry.operation.hook))
    end
    entry.called, entry.ran = -1, -1 -- numbers begin anew with the next run
  end
end

return Hooks
