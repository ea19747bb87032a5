-- hosted.lua: calls from a C program (perilune/lua.h): pointers that come in become handles, and handles that go out
-- pointers again. runtime/host/guest/luajit.c calls its functions. A value comes as two: the kind of a handle
-- (PERI_LUA_*) and its pointer, or 0 and the value itself.
local ffi = require "ffi"
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local Tensor = require "perilune.tensor"
local jagged = require "perilune.jagged"
local tbe = require "perilune.embed.tbe"
local C = P.C

local M = {}

local INTEGER = C.PERI_LUA_INTEGER

--- What a handle's class is called in C, and its Lua face.
local classes = {
  { kind = C.PERI_LUA_TENSOR, name = "peri_tensor", face = Tensor },
  { kind = C.PERI_LUA_JT, name = "peri_jt", face = jagged.JaggedTensor },
  { kind = C.PERI_LUA_KJT, name = "peri_kjt", face = jagged.KeyedJaggedTensor },
  { kind = C.PERI_LUA_KT, name = "peri_kt", face = jagged.KeyedTensor },
  { kind = C.PERI_LUA_TBE, name = "peri_tbe", face = tbe },
}
local by_kind = {}
for _, class in ipairs(classes) do
  class.pointer, class.retain = ffi.typeof(class.name .. " *"), class.name .. "_retain"
  by_kind[class.kind] = class
end

local integers = ffi.typeof "int64_t *"

--- The value that came as (kind, value).
local function take(kind, value)
  if kind == 0 then return value end
  if kind == INTEGER then
    local integer = ffi.cast(integers, value)[0]
    local number = tonumber(integer)
    return math.abs(number) < 2 ^ 53 and number or integer
  end
  local class = by_kind[kind]
  local pointer = ffi.cast(class.pointer, value)
  C[class.retain](pointer)
  return class.face.wrap(pointer)
end

--- The values of a call: given.n pairs.
local function values(given)
  local list = {}
  for i = 1, given.n do list[i] = take(given[2 * i - 1], given[2 * i]) end
  return list
end

--- Put a result into its slot (kind, pointer) if it is a handle or a 64-bit integer; otherwise it is what the caller
--- gets.
local function give(slots, i, value)
  if type(value) == "cdata" and (ffi.istype("int64_t", value) or ffi.istype("uint64_t", value)) then
    slots[2 * i], slots[2 * i + 1] = INTEGER, ffi.cast("int64_t", value)
    return false
  end
  for _, class in ipairs(type(value) ~= "string" and classes or {}) do
    if class.face.is(value) then
      local pointer = class.face.ptr(value)
      C[class.retain](pointer)
      slots[2 * i], slots[2 * i + 1] = class.kind, ffi.cast("intptr_t", pointer)
      return false
    end
  end
  return value
end

--- The function that `method` names: "score" of the target, ":forward" with the target as its first argument, nil: the
--- target itself.
local function find(target, method)
  if not method then return target end
  local name, own = method:gsub("^:", "")
  local found, f = pcall(function() return target[name] end)
  if not found and errors.memory(f) then error(f, 0) end
  if not found or f == nil then P.fail(("the object (%s) has no function '%s'"):format(errors.kind(target), name)) end
  return f, own == 1
end

local function run(target, method, slots, n_out, given)
  P._begin_call()
  local f, own = find(target, method)
  local list, n = values(given), given.n
  local results = own and { errors.run(f, target, unpack(list, 1, n)) } or { errors.run(f, unpack(list, 1, n)) }
  local room = ffi.cast(integers, slots)
  for i = 1, n_out do results[i] = give(room, i - 1, results[i]) end
  return results
end

--- Call target.method with n_in values; returns the table of the first n_out results.
function M.call(target, method, slots, n_out, n_in, ...)
  P._end_call() -- the last one
  local given = { n = n_in, ... }
  return P.scope(run, target, method, slots, n_out, given)
end

--- Run a script with n values; returns the first thing that it returns. What it makes lives as long as it is kept.
function M.load(chunk, n, ...)
  local given = { n = n, ... }
  return P.lasting(function() return (chunk(unpack(values(given), 1, n))) end)
end

--- A caught error: the status that it stands for, and its text.
function M.describe(err)
  local text, _, trace = errors.describe(err)
  local code = getmetatable(err) == P.Error and err.code or C.PERI_EINVAL
  if trace then text = text .. "\n" .. trace end
  return code, text
end

--- Whether texts of errors have their stacks.
function M.trace(on) errors.tracing = on or errors.tracing end

return M
