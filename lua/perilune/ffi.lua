-- ffi.lua: what every file that calls C requires: the library (library.lua), the state of the running rank (state.lua),
-- handles and scopes (handles.lua), and C's structures, dtypes and devices.
local ffi = require "ffi"
local errors = require "perilune.errors"
local util = require "perilune.util"
local library = require "perilune.library"
local rank_state = require "perilune.state"
local C, check = library.C, library.check

local M = { C = C, check = check, util = util, state = rank_state.now }
for _, part in ipairs { rank_state, require "perilune.handles" } do
  for name, f in util.ordered(part) do
    if type(f) == "function" then M[name] = f end
  end
end

--- What failing calls raise, see errors.lua; the handler of protected calls that pass errors on: xpcall(f, P.locate,
--- ...) instead of pcall(f, ...); and an error of the same kind for misuse found in Lua.
M.Error, M.locate, M.fail, M.numeral = errors.Error, errors.locate, errors.fail, errors.numeral

-- -- structures that begin with their size ----------------------------------------------------------------------------

--- A structure of C's, such as "peri_kjt_config": zeros, or `init`, and its size, which every such structure begins
--- with.
function M.struct(name, init)
  local s = init and ffi.new(name, init) or ffi.new(name)
  s.size = ffi.sizeof(name)
  return s
end

--- An array of n of them.
function M.structs(name, n)
  local list = ffi.new(name .. "[?]", n)
  for i = 0, n - 1 do list[i].size = ffi.sizeof(name) end
  return list
end

--- Zeros in all of structure `s` but its size.
function M.clear(s)
  local size = s.size
  ffi.fill(s, size)
  s.size = size
end

-- -- small conversions ------------------------------------------------------------------------------------------------

M.dtype_names = {}
for code = 0, C.PERI_DTYPE_COUNT - 1 do M.dtype_names[code] = ffi.string(C.peri_dtype_name(code)) end

local dtype_codes = {}
--- "f32" -> C.PERI_F32. Numbers pass through.
function M.dtype(name)
  local code = dtype_codes[name]
  if code then return code end
  if type(name) == "number" and M.dtype_names[name] then return name end
  code = check(C.peri_dtype_parse(tostring(name)))
  dtype_codes[name] = code
  return code
end

local value_out = ffi.new "int32_t[1]"
--- The values of one of C's options (peri_option_value) by name: { SUM = C.PERI_POOLING_SUM, ... }.
function M.options(option)
  local values, i, name = {}, 0, C.peri_option_name(option, 0, value_out)
  while name ~= nil do
    values[ffi.string(name)] = value_out[0]
    i = i + 1
    name = C.peri_option_name(option, i, value_out)
  end
  return values
end

local bytes_out = ffi.new "int64_t[1]"
--- Bytes of memory that this process may have, of this machine or of its container or job, and those that are free.
function M.host_memory()
  local total = C.peri_host_memory(bytes_out)
  return tonumber(total), tonumber(bytes_out[0])
end

local devices, device_out, device_type = {}, ffi.new "peri_device *[1]", ffi.typeof "peri_device *"
--- A device by name (nil: the default one of this rank). Devices live as long as the process.
function M.device(name)
  name = name or M.state.device
  if type(name) ~= "string" then
    if type(name) == "cdata" and ffi.istype(device_type, name) and name ~= nil then return name end
    M.fail(("device: %s, wanted a device's name"):format(errors.kind(name)))
  end
  local d = devices[name]
  if not d then
    check(C.peri_device_get(name, device_out))
    d = device_out[0]
    devices[name] = d
  end
  return d
end

return M
