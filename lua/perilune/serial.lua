-- serial.lua: Lua values as bytes: nil, booleans, numbers (all bits), 64-bit whole numbers, strings of any bytes, plain
-- tables of these. Tables are written in the order of util.keys, so equal values have equal bytes on all ranks.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"

local M = {}
local DEPTH = 100
local double, int64, uint64 = ffi.typeof "double[1]", ffi.typeof "int64_t[1]", ffi.typeof "uint64_t[1]"
local signed, unsigned = ffi.typeof "int64_t", ffi.typeof "uint64_t"

-- -- writing ----------------------------------------------------------------------------------------------------------

local function refuse(what, path, why)
  if #path > 120 then path = path:sub(1, 80) .. "..." end
  P.fail(("%s: %s %s"):format(what, path, why))
end

local function raw(ctype, x) return ffi.string(ctype(x), 8) end

local write

local function write_table(out, what, x, path, depth)
  if depth > DEPTH then refuse(what, path, "is nested deeper than " .. DEPTH .. " tables, or contains itself") end
  local meta = getmetatable(x)
  if meta ~= nil then
    local name = type(meta) == "table" and rawget(meta, "class_name") or "with a metatable"
    refuse(what, path, ("is an object (%s), allowed: plain tables"):format(name))
  end
  local keys, odd = util.keys(x)
  if odd then refuse(what, path, ("has a %s as key, allowed: strings and numbers"):format(odd)) end
  out[#out + 1] = "T" .. raw(double, #keys)
  for _, key in ipairs(keys) do
    write(out, what, key, path, depth)
    write(out, what, x[key], ("%s[%s]"):format(path, type(key) == "string" and '"' .. key .. '"' or tostring(key)),
      depth + 1)
  end
end

write = function(out, what, x, path, depth)
  local kind = type(x)
  if x == nil then out[#out + 1] = "n"
  elseif kind == "boolean" then out[#out + 1] = x and "t" or "f"
  elseif kind == "number" then out[#out + 1] = "d" .. raw(double, x)
  elseif kind == "string" then out[#out + 1] = "s" .. raw(double, #x) .. x
  elseif kind == "table" then write_table(out, what, x, path, depth)
  elseif kind == "cdata" and ffi.istype(signed, x) then out[#out + 1] = "l" .. raw(int64, x)
  elseif kind == "cdata" and ffi.istype(unsigned, x) then out[#out + 1] = "u" .. raw(uint64, x)
  else refuse(what, path, ("is a %s, allowed: nil, booleans, numbers, strings and tables of them"):format(kind)) end
end

--- The bytes of a value; `what` names it in errors.
function M.encode(x, what)
  local out = {}
  write(out, what or "serial", x, "the value", 1)
  return table.concat(out)
end

-- -- reading ----------------------------------------------------------------------------------------------------------

local function broken(what, at) P.fail(("%s: byte %d begins no value"):format(what, at)) end

local function take(ctype, bytes, at, what)
  if at + 7 > #bytes then broken(what, at) end
  local x = ctype()
  ffi.copy(x, bytes:sub(at, at + 7), 8)
  return x[0], at + 8
end

--- A count that the rest of the bytes can hold.
local function take_count(bytes, at, what)
  local n, next_at = take(double, bytes, at, what)
  if not (n >= 0 and n <= #bytes and n == math.floor(n)) then broken(what, at) end
  return n, next_at
end

local function read(bytes, at, what, depth)
  local tag = bytes:sub(at, at)
  at = at + 1
  if tag == "n" then return nil, at
  elseif tag == "t" then return true, at
  elseif tag == "f" then return false, at
  elseif tag == "d" then return take(double, bytes, at, what)
  elseif tag == "l" then return take(int64, bytes, at, what)
  elseif tag == "u" then return take(uint64, bytes, at, what)
  elseif tag == "s" then
    local n, begin = take_count(bytes, at, what)
    if begin + n - 1 > #bytes then broken(what, at) end
    return bytes:sub(begin, begin + n - 1), begin + n
  elseif tag == "T" and depth <= DEPTH then
    local n, begin = take_count(bytes, at, what)
    local t = {}
    at = begin
    for _ = 1, n do
      local key, value
      key, at = read(bytes, at, what, depth + 1) -- a table as key is refused, but only after it was read
      if type(key) ~= "string" and (type(key) ~= "number" or key ~= key) then broken(what, at) end
      value, at = read(bytes, at, what, depth + 1)
      t[key] = value
    end
    return t, at
  end
  broken(what, at - 1)
end

--- The value that the bytes stand for; malformed bytes are an error.
function M.decode(bytes, what)
  local x, at = read(bytes, 1, what or "serial", 1)
  if at ~= #bytes + 1 then broken(what or "serial", at) end
  return x
end

return M
