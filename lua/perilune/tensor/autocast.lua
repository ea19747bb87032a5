-- autocast.lua: how exact products are, by PyTorch's names (perilune/precision.h): TF32 for products of f32, and
-- regions in which products run in 16-bit floats.
--
--   peri.set_float32_matmul_precision "high"
--   local loss = peri.autocast({ device = "cuda", dtype = "bf16" }, function() return criterion(model(x), y) end)
--   loss:backward()
local ffi = require "ffi"
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor.core"
local signature = require "perilune.signature"
local C, check, state, locate = P.C, P.check, P.state, P.locate

local methods = {}
local _, region_type, ptr, wrap = P.handle("peri_autocast", methods, {}, "an autocast region")
signature.handle("Autocast", region_type)
local out = ffi.new "peri_autocast *[1]"

--- How products of f32 may be computed from now on: "highest" (the start): in f32; "high", "medium": by TF32 where a
--- GPU has it.
function Tensor.set_float32_matmul_precision(precision) check(C.peri_float32_matmul_precision_set(precision)) end
function Tensor.get_float32_matmul_precision() return ffi.string(C.peri_float32_matmul_precision()) end

--- Tell Lua which region the thread is in, after C has changed it.
local function note()
  local region = C.peri_autocast_current()
  state.autocast = region ~= nil and region
end
Tensor._note_autocast = note

--- From now on operations are in the region, until exit().
function methods:enter()
  check(C.peri_autocast_enter(ptr(self)))
  note()
  return self
end
--- Leave the region, which must be the one that was entered last.
function methods:exit()
  check(C.peri_autocast_exit(ptr(self)))
  note()
end

--- After f: leave the region, and after an error those inside of it too.
local function left(region, ok, ...)
  while not ok and state.autocast ~= ptr(region) do
    check(C.peri_autocast_exit(state.autocast))
    note()
  end
  region:exit()
  region:release()
  if not ok then error((...), 0) end
  return ...
end

--- A region of autocast, or, with a function, f(...) inside of one. Named options: device, a kind of device ("cuda",
--- "cpu"; default: the rank's); dtype, "bf16" (default) or "f16"; enabled (true): false is a region in which nothing is
--- cast.
function Tensor.autocast(options, f, ...)
  local a = util.named("autocast", options, { device = state.device, dtype = "bf16", enabled = true })
  if f ~= nil and not util.is_callable(f) then
    P.fail(("autocast: f is %s, wanted a function"):format(errors.kind(f)))
  end
  local device = signature.value("autocast", "device", a.device, "string")
  -- "cuda" is a name on machines without GPUs, too: nothing is cast there, and scripts that name it run
  if device ~= "" and device ~= "cuda" then P.device(device) end
  local enabled = signature.value("autocast", "enabled", a.enabled, "boolean")
  check(C.peri_autocast_new(device, P.dtype(a.dtype), enabled, out))
  local region = wrap(out[0])
  if f == nil then return region end
  region:enter()
  return left(region, xpcall(f, locate, ...))
end
errors.runners[Tensor.autocast] = true

signature.check("", Tensor, { set_float32_matmul_precision = "precision: string" })

return Tensor
