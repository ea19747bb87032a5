-- copies.lua: copies of models: TorchRec's copy_to_device and sharded_model_copy.
local ffi = require "ffi"
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local signature = require "perilune.signature"
local Module = require "perilune.nn.module"

local M = {}

local copy_value

local function copy_tensor(t, device)
  local d = t:describe()
  local grad, dtype = d.requires_grad, P.dtype_names[d.dtype]
  local copy = Tensor.empty(t:shape(), dtype, device or t:device()):copy(t:detach())
  if grad then copy:requires_grad() end
  return copy
end

local function copy_fields(from, to, device, seen)
  seen[from] = to
  for key, value in util.ordered(from) do rawset(to, key, copy_value(value, device, seen)) end
  return to
end

local function copy_module(module, device, seen)
  if type(module.copy) == "function" then
    seen[module] = module:copy(device)
    return seen[module]
  end
  if type(module.materialise) == "function" then
    P.fail(("copy_to_device: %s is trained, and has no copies; quantize it first (quantize_embeddings)"):format(
      module.class_name))
  end
  return copy_fields(module, setmetatable({}, getmetatable(module)), device, seen)
end

function copy_value(x, device, seen)
  if type(x) == "cdata" then
    if not Tensor.is_live(x) then return x end
    local key = tonumber(ffi.cast("intptr_t", x.ptr))
    seen[key] = seen[key] or copy_tensor(x, device)
    return seen[key]
  end
  if type(x) ~= "table" or seen[x] then return seen[x] or x end
  if Module.is(x) then return copy_module(x, device, seen) end
  if getmetatable(x) == nil then return copy_fields(x, {}, device, seen) end
  return x
end

--- The same as copy_to_device, with other modules in the place of some: `others`: module -> the one that the copy has.
function M.copy_with(module, device, others) return P.lasting(copy_value, module, device, util.copy(others)) end

--- A model with the same numbers on another device (nil: the same ones), which shares no parameter with this one:
--- modules that have a method copy(device), as quantized collections have, sharded or not, copy themselves; of all
--- others the tensors, sub-modules and plain tables in their fields are copied.
function M.copy_to_device(module, device)
  if not Module.is(module) then
    P.fail(("copy_to_device: module is %s, wanted an nn.Module"):format(errors.kind(module)))
  end
  if device ~= nil then P.device(device) end
  return P.lasting(copy_value, module, device, {})
end

signature.check("embed.copies.", M, { copy_with = "module: table, device: any, others: table" })

return M
