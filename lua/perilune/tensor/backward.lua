-- backward.lua: backward passes, and hooks inside them.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor.core"
local signature = require "perilune.signature"
local C, check = P.C, P.check

local M, methods, ptr, wrap, out = Tensor, Tensor.methods, Tensor.ptr, Tensor.wrap, Tensor.out

local pass, root, upstream = ffi.new "peri_backward *[1]", ffi.new "peri_tensor *[1]", ffi.new "peri_tensor *[1]"

local hooks, n_hooks = setmetatable({}, { __mode = "v" }), 0
local hook_id, hook_grad = ffi.new "int64_t[1]", ffi.new "peri_tensor *[1]"

--- Call what waits at the hook that the pass stands at; false: it stands at none.
local function at_hook(p)
  check(C.peri_backward_hook(p, hook_id, hook_grad))
  local id = tonumber(hook_id[0])
  if id == 0 then return false end
  local hook, grad = hooks[id], hook_grad[0] ~= nil and wrap(hook_grad[0]) or nil
  if hook then
    local ok, err = xpcall(P.no_grad, P.locate, hook.f, grad)
    if not ok then
      C.peri_backward_release(p)
      error(err, 0)
    end
  end
  return true
end

--- Run a pass to its end. Waits for exchanges.
local function run(p)
  local round = 0
  local status = C.peri_backward_step(p)
  while status == C.PERI_PENDING do
    if n_hooks == 0 or not at_hook(p) then
      P.pause(round)
      round = round + 1
    end
    status = C.peri_backward_step(p)
  end
  if status < 0 then -- releasing must not lose the message: it never touches the error record (style E5)
    C.peri_backward_release(p)
    check(status)
  end
  C.peri_backward_release(p)
end

--- Hook(f): called with a tensor it returns one of the same elements. A backward pass that has the gradient of that one
--- calls f(gradient, or nil where none flowed back) before it goes on, without recording, on all ranks in the same
--- order. As long as the Hook lives.
local Hook = util.class "Hook"
M.Hook = Hook
function Hook:init(f)
  n_hooks = n_hooks + 1
  self.f, self.id = f, n_hooks
  hooks[n_hooks] = self
end
function Hook:__call(t)
  check(C.peri_tensor_hooked(ptr(t), self.id, out))
  return (wrap(out[0]))
end

--- Who is asked about a pass that reaches what nobody averages (peri_backward_strays): object -> its function(object,
--- reaches), which raises if that is a mistake; reaches(leaf): whether the pass has a gradient for it.
M.stray_checks = setmetatable({}, { __mode = "k" })

--- Asks everybody in M.stray_checks about the pass `p`; raises the first error that one of them finds.
local function check_strays(p)
  local function reaches(leaf) return C.peri_backward_reaches(p, ptr(leaf)) end
  for object, f in pairs(M.stray_checks) do f(object, reaches) end -- any order: the first error ends it
end

--- Run a new pass, whose tables and gradients nothing has changed so far.
local function start(p)
  if C.peri_backward_strays(p) then
    local ok, err = xpcall(check_strays, P.locate, p)
    if not ok then
      C.peri_backward_release(p)
      error(err, 0)
    end
  end
  run(p)
  if P.state.anomaly then P.state.anomaly:pass_ended() end
end

--- Run the backward pass from this tensor; `grad` is the upstream gradient (default 1, for one-element tensors). Waits
--- for exchanges.
function methods:backward(grad)
  root[0], upstream[0] = ptr(self), grad and ptr(grad) or nil
  check(C.peri_backward_new(root, upstream, 1, pass))
  start(pass[0])
end

--- One backward pass from several tensors, each with its upstream gradient (`grads` nil: 1, for one-element tensors).
function M.backward(tensors, grads)
  local n = #tensors
  if grads and #grads ~= n then P.fail(("backward: %d gradients for %d tensors"):format(#grads, n)) end
  local roots, ups = ffi.new("peri_tensor *[?]", n), grads and ffi.new("peri_tensor *[?]", n) or nil
  for i = 1, n do
    roots[i - 1] = ptr(tensors[i])
    if grads then ups[i - 1] = ptr(grads[i]) end
  end
  check(C.peri_backward_new(roots, ups, n, pass))
  start(pass[0])
end

signature.kind("tensors", "a list of tensors", function(x)
  if type(x) ~= "table" then return false end
  for i = 1, #x do
    if not M.is(x[i]) then return false end
  end
  return true
end)
signature.check("", M, { backward = "tensors: tensors, grads: tensors?" })
signature.check("tensor:", methods, { backward = "self: tensor, grad: tensor?" })
signature.check("Hook:", Hook, { init = "self: table, f: callable" })

return M
