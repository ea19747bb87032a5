-- anomaly.lua: nn.detect_anomaly: which module makes the first NaN, in which step.
--
--   -- from now on each result of each module of the model is looked at, and each gradient of one
--   nn.detect_anomaly(model)
--   ... train ...              -- error: detect_anomaly: step 17: NaN in the result of module 'over.1' (Linear)
--   nn.detect_anomaly(false)
--
-- Looking waits for the device after every module, so a step takes longer. A step ends with its backward pass.
local ffi = require "ffi"
local P = require "perilune.ffi"
local Tensor = require "perilune.tensor"
local Module = require "perilune.nn.module"
local F = require "perilune.nn.functional"
local state = P.state
P.own { anomaly = false } -- what looks for NaN, or false

local M = {}

local floats = { f32 = true, f64 = true, f16 = true, bf16 = true }
local keyed, jagged = ffi.typeof "peri_kt_ref", ffi.typeof "peri_jt_ref"

local function count_nan(t) return F.sum(F.isnan(t)):item() end

--- How many NaN a tensor has.
local function nan_in(t)
  if t:numel() == 0 or not floats[t:dtype()] then return 0 end
  return P.no_grad(P.scope, count_nan, t)
end

--- The tensor of a result: itself, or the values of a KeyedTensor or JaggedTensor. nil: something else, an awaitable
--- for one.
local function tensor_of(x)
  if type(x) ~= "cdata" then return nil end
  if Tensor.is_live(x) then return x end
  if (ffi.istype(keyed, x) or ffi.istype(jagged, x)) and x.ptr ~= nil then return x:values() end
end

local function name_of(watch, module)
  local path = watch.paths[module]
  return ("module '%s' (%s)"):format(path == "" and "the model" or path or "?", module.class_name)
end

--- Look at the gradient of a module's result when a backward pass has it.
local function watched(watch, t, module)
  local hook = Tensor.Hook(function(grad)
    local n = grad and nan_in(grad) or 0
    local name = name_of(watch, module)
    if n > 0 then
      P.fail(("detect_anomaly: step %d: %d NaN in the gradient of the result of %s%s"):format(watch.step, n, name,
        watch.clean
        and ("; that of %s had none: look at what lies between them"):format(watch.clean)
        or "; look at what is made of it"))
    end
    watch.clean = name
  end)
  watch.hooks[#watch.hooks + 1] = hook -- a hook works as long as it lives
  return hook(t)
end

--- One result of a module: checked, and, where a gradient will come back to it, hooked.
local function look(watch, module, x)
  local t = tensor_of(x)
  if not t then return x end
  local n = nan_in(t)
  if n > 0 then
    P.fail(("detect_anomaly: step %d: %d NaN in the result of %s"):format(watch.step, n, name_of(watch, module)))
  end
  if rawequal(t, x) and state.grad and t:describe().requires_grad and not t:is_leaf() then
    return watched(watch, t, module)
  end
  return x
end

local Watch = {}
Watch.__index = Watch
--- What module.lua calls with a module and its results: returns them.
function Watch:results(module, ...)
  if not self.paths[module] then return ... end
  local list, n = { ... }, select("#", ...)
  for i = 1, n do list[i] = look(self, module, list[i]) end
  return unpack(list, 1, n)
end
--- What backward.lua calls after each pass.
function Watch:pass_ended() self.step, self.hooks, self.clean = self.step + 1, {}, nil end

--- From now on an error tells which module of `model` has the first NaN in a result or in the gradient of one, and in
--- which step (counted from here; a backward pass ends one). false: no more.
function M.detect_anomaly(model)
  if not model then
    state.anomaly = false
    return
  end
  local whole = type(model) == "table" and model.wraps and model.module or model
  if not Module.is(whole) then
    P.fail(("detect_anomaly: %s, wanted a module, or false"):format(require("perilune.errors").kind(model)))
  end
  local paths = setmetatable({}, { __mode = "k" })
  for _, m in ipairs(whole:named_modules()) do paths[m.module] = m.path end
  state.anomaly = setmetatable({ paths = paths, step = 1, hooks = {} }, Watch)
end

return M
