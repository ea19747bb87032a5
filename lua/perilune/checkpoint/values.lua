-- values.lua: Lua values as JSON, and back, without losing anything: nil, booleans, all numbers, 64-bit whole numbers,
-- strings of any bytes, plain tables of these. What JSON has no word for is an object with one key that begins with
-- "$":
--
--   { "$number": "nan" }   not a number; "inf", "-inf"        { "$int": "-9007199254740993" }   an int64_t; "$uint": a
--                          uint64_t
--   { "$bytes": "00ff" }   a string that is no UTF-8          { "$map": [[1.5, "a"], ...] }     a table that is neither
--                          list nor object
local ffi = require "ffi"
local json = require "dkjson"
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local util = require "perilune.util"

local M = {}
M.DEPTH = 60 -- nesting that the C reader takes
local signed, unsigned = ffi.typeof "int64_t", ffi.typeof "uint64_t"

--- Whether a string is UTF-8 (RFC 3629), without zero bytes.
local function is_utf8(s)
  local i, n = 1, #s
  while i <= n do
    local c = s:byte(i)
    if c == 0 then return false end
    local more = c < 0x80 and 0 or c >= 0xc2 and c < 0xe0 and 1 or c >= 0xe0 and c < 0xf0 and 2 or c >= 0xf0
      and c < 0xf5 and 3
    if not more then return false end
    for k = 1, more do
      local b = s:byte(i + k) or 0
      if b < 0x80 or b > 0xbf then return false end
    end
    local second = more > 0 and s:byte(i + 1)
    if c == 0xe0 and second < 0xa0 or c == 0xed and second > 0x9f or c == 0xf0 and second < 0x90 or c == 0xf4
      and second > 0x8f then
      return false
    end
    i = i + 1 + more
  end
  return true
end

local escapes = { ['"'] = '\\"', ["\\"] = "\\\\" }

--- A text that grows at its end: the strings that were appended last, n of them, and `whole`, a list of texts of what
--- was before them. So no text is copied for each table around it, and few small strings are kept.
local PIECES = 256
local function new_text() return { n = 0, whole = {} } end
local function append(out, s)
  if out.n == PIECES then
    out.whole[#out.whole + 1] = table.concat(out)
    out.n = 0
  end
  out.n = out.n + 1
  out[out.n] = s
end
local function whole_text(out)
  out.whole[#out.whole + 1] = table.concat(out, "", 1, out.n)
  return table.concat(out.whole)
end

local function append_text(out, s)
  if not is_utf8(s) then
    append(out, ('{"$bytes":"%s"}'):format((s:gsub(".", function(c) return ("%02x"):format(c:byte()) end))))
    return
  end
  append(out, '"')
  append(out, (s:gsub('[%c"\\\127]', function(c) return escapes[c] or ("\\u%04x"):format(c:byte()) end)))
  append(out, '"')
end

local function number(x)
  if x ~= x then return '{"$number":"nan"}' end
  if x == math.huge or x == -math.huge then return ('{"$number":"%s"}'):format(x > 0 and "inf" or "-inf") end
  return x == 0 and 1 / x < 0 and "-0.0" or ("%.17g"):format(x)
end

local write

--- Of a table: "list", "object" or "map", and its keys in order (nil: some are of a kind that has none).
local function shape_of(x)
  local keys = util.keys(x)
  local list, names = keys ~= nil and #keys > 0, true
  for i, key in ipairs(keys or {}) do
    list = list and key == i -- Lua's # may be the number of keys of a table that has gaps and names
    names = names and type(key) == "string" and key:sub(1, 1) ~= "$" and is_utf8(key)
  end
  return list and "list" or names and "object" or "map", keys
end

--- Where a value is, as its user would write it: keys = { name, key, ... } down to depth.
local function place_of(keys, depth)
  local path = keys[1]
  for i = 2, depth do
    local key = keys[i]
    path = path .. (type(key) == "string" and (key:match "^[%a_][%w_]*$" and "." .. key or ("[%q]"):format(key))
      or ("[%s]"):format(tostring(key)))
  end
  return path
end

local function write_table(out, x, func, at, depth)
  if depth > M.DEPTH then
    P.fail(("%s: %s is nested deeper than %d tables, or contains itself"):format(func, place_of(at, depth):sub(1, 80),
      M.DEPTH))
  end
  local shape, keys = shape_of(x)
  if not keys then
    P.fail(("%s: %s has keys that are neither strings nor numbers"):format(func, place_of(at, depth)))
  end
  append(out, shape == "list" and "[" or shape == "object" and "{" or '{"$map":[')
  for i, key in ipairs(keys) do
    if i > 1 then append(out, ",") end
    if shape == "object" then
      append_text(out, key)
      append(out, ":")
    elseif shape == "map" then
      append(out, "[")
      write(out, key, func, at, depth)
      append(out, ",")
    end
    at[depth + 1] = key
    write(out, rawget(x, key), func, at, depth + 1)
    if shape == "map" then append(out, "]") end
  end
  append(out, shape == "list" and "]" or shape == "object" and "}" or "]}")
end

write = function(out, x, func, at, depth)
  local kind = type(x)
  if x == nil then append(out, "null")
  elseif kind == "boolean" then append(out, tostring(x))
  elseif kind == "number" then append(out, number(x))
  elseif kind == "string" then append_text(out, x)
  elseif kind == "table" and getmetatable(x) == nil then write_table(out, x, func, at, depth)
  elseif kind == "cdata" and ffi.istype(signed, x) then
    append(out, ('{"$int":"%s"}'):format((tostring(x):gsub("LL$", ""))))
  elseif kind == "cdata" and ffi.istype(unsigned, x) then
    append(out, ('{"$uint":"%s"}'):format((tostring(x):gsub("ULL$", ""))))
  else
    P.fail(("%s: %s is %s, allowed: nil, booleans, numbers, strings and plain tables of them"):format(func,
      place_of(at, depth), errors.kind(x)))
  end
end

--- The JSON text of a value; func: whose it is, and name: what its user calls it ("values"), for errors.
function M.encode(x, func, name)
  local out = new_text()
  write(out, x, func, { name or "values" }, 1)
  return whole_text(out)
end

--- The JSON text of an object or, if `texts` is a list, a list: texts has those of what is in it.
function M.join(texts)
  local out, list, comma = new_text(), #texts > 0, ""
  append(out, list and "[" or "{")
  for key, x in util.ordered(texts) do
    append(out, comma)
    comma = ","
    if not list then
      append_text(out, key)
      append(out, ":")
    end
    append(out, x)
  end
  append(out, list and "]" or "}")
  return whole_text(out)
end

local numbers = { nan = 0 / 0, inf = math.huge, ["-inf"] = -math.huge }

--- What an object with one key that begins with "$" says; nil: it is none that encode writes.
local special = {
  ["$number"] = function(s) return numbers[s] end,
  ["$int"] = function(s)
    local minus, digits = s:match "^(%-?)(%d+)$"
    local x = 0LL
    for c in (digits or ""):gmatch "." do x = x * 10 + tonumber(c) end
    return digits and (minus == "-" and -x or x)
  end,
  ["$uint"] = function(s)
    local x = 0ULL
    for c in s:gmatch "%d" do x = x * 10 + tonumber(c) end
    return s:match "^%d+$" and x
  end,
  ["$bytes"] = function(s)
    return #s % 2 == 0 and not s:find "%X" and (s:gsub("%x%x", function(h) return string.char(tonumber(h, 16)) end))
  end,
}

local function wrong(what) P.fail(("'%s' of its values is nothing that a checkpoint has"):format(what)) end

local function read(x)
  if type(x) ~= "table" then return x end
  local key, value = next(x)
  local alone = key ~= nil and next(x, key) == nil
  if alone and special[key] then
    local result = type(value) == "string" and special[key](value) or nil
    if result == nil then wrong(key) end
    return result
  end
  local result = {}
  if alone and key == "$map" then
    for _, pair in ipairs(type(value) == "table" and value or wrong(key)) do
      local name
      if type(pair) == "table" then name = read(pair[1]) end
      if name == nil or name ~= name then wrong(key) end
      result[name] = read(pair[2])
    end
    return result
  end
  for k, v in util.ordered(x) do result[k] = read(v) end
  return result
end

--- The value that a JSON text says; `from` names it in errors.
function M.decode(json_text, from)
  local value, _, err = json.decode(json_text, 1, nil, nil)
  if err then P.fail(("%s: its values are no JSON: %s"):format(from, err)) end
  local ok, result = pcall(read, value)
  if not ok then P.fail(("%s: %s"):format(from, errors.describe(result))) end
  return result
end

return M
