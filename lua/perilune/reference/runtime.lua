-- runtime.lua: Memory, precision, streams, stopping.
--
-- What holds for a whole script or a part of it: when tensors are released, whether operations are recorded, how exact
-- products are, on which stream of a device work is queued, and how all ranks of a run stop together.
---@meta

---@class peri
local peri = {}
---@class peri.Tensor
local Tensor = {}
---@class peri.stream
local stream = {}

---Run a function; handles (tensors and others) that are made meanwhile are released at its end, also when it fails.
---Loops that make many tensors stay flat in memory this way. Pipelines have a scope for each step.
---
---Errors: what is no function; what the function raises.
---
---```lua
---local kept
---peri.scope(function() kept = peri.keep(peri.ones { 2 }) * 1 end)
---print(peri.Tensor.is_live(kept)) --> false
---```
---@param f function The function.
---@param a? any Its arguments, up to six (default: none).
---@param b? any The second (default: none).
---@param c? any The third (default: none).
---@param d? any The fourth (default: none).
---@param e? any The fifth (default: none).
---@param g? any The sixth (default: none).
---@return any # Up to four values that f returned; handles among them only if they were kept.
function peri.scope(f, a, b, c, d, e, g) end

---Keep a handle beyond the end of the current scope.
---
---Errors: nothing is checked.
---@param h any A tensor or another handle.
---@return any # The handle.
function peri.keep(h) end

---Run a function without recording on the gradient tape: for evaluation.
---
---Errors: what is no function; what the function raises.
---
---```lua
---local x = peri.ones({ 1 }):requires_grad()
---print(peri.no_grad(function() return x * 2 end):is_leaf()) --> true
---```
---@param f function The function.
---@param ... any Its arguments.
---@return any # What it returned.
function peri.no_grad(f, ...) end

---Mixed precision: run a function with products (linear layers, matmul) in 16-bit floats, as PyTorch's autocast;
---parameters stay f32.
---Without a function it makes a region with methods `enter()` and `exit()`. docs/precision.md tells more.
---
---Errors: an unknown option, device or dtype.
---
---```lua
---local y = peri.autocast({ dtype = "bf16" },
---  function() return peri.ones({ 1, 2 }):matmul(peri.ones { 2, 1 }) end)
---print(y:dtype()) --> bf16
---```
---@param options table `device` (`"cuda"`, also on a machine without GPUs, where nothing is cast then; `"cpu"`; default the rank's), `dtype` (`"bf16"`, `"f16"`; default bf16), `enabled` (true).
---@param f? function The function (default: none, a region is returned).
---@param ... any Its arguments.
---@return any # What it returned.
function peri.autocast(options, f, ...) end

---How exact products of f32 are on GPUs from now on.
---
---Errors: another word.
---
---```lua
---peri.set_float32_matmul_precision "highest"
---print(peri.get_float32_matmul_precision()) --> highest
---```
---@param precision string `"highest"` (at first): f32; `"high"`, `"medium"`: TF32 where a GPU has it.
function peri.set_float32_matmul_precision(precision) end

---What `set_float32_matmul_precision` has set.
---@return string
function peri.get_float32_matmul_precision() end

---A place on the gradient tape. A Hook is called with a tensor and returns one of the same elements; a backward pass
---that has computed the gradient of that one calls `f(gradient)` before it goes on (`f(nil)` where no gradient came).
---It works as long as the Hook lives.
---
---Errors: what is no function; what f raises.
---
---```lua
---local seen
---local hook = peri.Tensor.Hook(function(grad) seen = grad:item() end)
---local x = peri.ones({ 1 }):requires_grad();
---(hook(x * 1) * 5):backward()
---print(seen) --> 5
---```
---@class peri.Tensor.Hook
---@param f function Called with the gradient, without recording; on all ranks in the same order.
---@overload fun(f: function): peri.Tensor.Hook
Tensor.Hook = {}

---A new stream of a device: a queue of work. Work of one stream runs in order, work of two streams in any order that no
---event forbids. Methods: `wait_event(event)`, `wait_stream(stream)`, `record_event([event])`, `query()` (whether all
---has run), `synchronize()`, `device()`. On `cpu` everything runs at once. Join streams before what both use is
---released.
---
---Errors: an unknown device.
---
---```lua
---local side, now = peri.stream.Stream("cpu"), peri.stream.current("cpu")
---side:wait_stream(now)
---local y = peri.stream.run(side, function(x) return x * 2 end, peri.ones { 1 })
---local event = peri.stream.Event("cpu")
---event:record(side)
---event:wait(now)
---print(y:item(), event:query(), side:device()) --> 2 true cpu
---peri.stream.empty_cache("cpu")
---```
---@param device? string The device (default: that of the rank).
---@return any # The stream.
function stream.Stream(device) end

---A new event of a device: a mark in a stream. Methods: `record([stream])`, `wait([stream])`, `query()` (whether all
---before the mark has run), `synchronize()`, `device()`. One that was never recorded is done.
---
---Errors: an unknown device.
---@param device? string The device (default: that of the rank).
---@return any # The event.
function stream.Event(device) end

---The stream on which operations on a device queue now.
---
---Errors: an unknown device.
---@param device? string The device (default: that of the rank).
---@return any # The stream.
function stream.current(device) end

---Run a function with a stream as the current one of its device.
---
---Errors: what is no stream or no function; what the function raises.
---@param stream any The stream.
---@param f function The function.
---@param ... any Its arguments.
---@return any # What it returned.
function stream.run(stream, f, ...) end

---Give memory that the device keeps for later, and does not use, back to the driver: for other libraries that allocate
---for themselves.
---
---Errors: an unknown device.
---@param device? string The device (default: that of the rank).
function stream.empty_cache(device) end

---Let all ranks stop together, after the same step, when one of them is asked to: by SIGTERM, SIGINT, SIGUSR1, SIGUSR2
---(under `perilune run`) or by `request_stop`. Pipelines then load no more batches. On all ranks together.
---
---Errors: what is no function.
---
---```lua
---local why
---peri.dist.sim.run(1, function()
---  peri.on_stop(function(reason) why = reason end)
---  for step = 1, 9 do -- a loop of one's own
---    if step == 3 then peri.request_stop() end
---    if peri.stopping() then break end
---  end
---  print(why, (peri.stopped())) --> script script
---end)
---```
---@param f? function `f(reason, seconds_left)`, called on every rank after the last step (default: none).
function peri.on_stop(f) end

---Ask all ranks to stop, as a signal does. Any rank may.
---
---Errors: neither `on_stop` nor `stopping` was called before.
function peri.request_stop() end

---For loops of one's own, at the end of each step: why all ranks stop, or nil. When it returns a reason, the functions
---of `on_stop` have been called. Collective; it tells what was asked before its last call, so no rank waits for the
---others.
---@return string|nil # `"SIGTERM"`, ..., or `"script"`; nil: go on.
---@return number|nil # Seconds that are left; `math.huge`: no limit.
function peri.stopping() end

---Why all ranks stop, once they have agreed. Local.
---@return string|nil # As `stopping`.
---@return number|nil # As `stopping`.
function peri.stopped() end
