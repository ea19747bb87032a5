-- tables.lua: functions of plain tables: their keys in order, lists, copies.
local errors = require "perilune.errors"
local fail, kind = errors.fail, errors.kind

local M = {}

local function numbers_first(a, b)
  local ta, tb = type(a), type(b)
  if ta ~= tb then return ta < tb end
  return a < b
end

--- Keys of a table in a fixed order: numbers ascending, then strings ascending. For everything whose order reaches a
--- wire, a plan or a file (style J6). Keys of other kinds have no order: then nil, and the kind of one.
function M.keys(t)
  local keys, n, numbers, odd = {}, 0, 0, nil
  for k in pairs(t) do
    n = n + 1
    keys[n] = k
    if type(k) == "number" then numbers = numbers + 1
    elseif type(k) ~= "string" then odd = type(k) end
  end
  if odd then return nil, odd end
  table.sort(keys, numbers > 0 and numbers < n and numbers_first or nil)
  return keys
end

--- for key, value in util.ordered(t): pairs in the order of `keys`.
function M.ordered(t)
  if type(t) ~= "table" then fail(("%s where a table is wanted"):format(kind(t))) end
  local keys, odd = M.keys(t)
  local i = 0
  if odd then fail(("a %s as key, allowed: strings and numbers"):format(odd)) end
  return function()
    i = i + 1
    local k = keys[i]
    if k ~= nil then return k, t[k] end
  end
end

--- Why a table is no whole list, in words; nil: it is one. A list ends before its first nil: what stands behind it
--- would be left out, as would what has a name. (A list of parameters has names beside its entries, `elsewhere` and
--- others, if it has any entries here.)
function M.list_fault(x)
  if getmetatable(x) ~= nil or x.elsewhere ~= nil then return nil end
  local n = #x
  for i = 1, n do
    if x[i] == nil then return ("has an entry [%d], and no entry [%d]"):format(n, i) end
  end
  local key = next(x, n > 0 and n or nil)
  if key == nil then return nil end
  if n == 0 and type(key) ~= "number" then
    return ("is a table with the key '%s', wanted a list"):format(tostring(key))
  end
  for other in next, x do
    if type(other) == "number" and (other < 1 or other > n) then
      return ("has an entry [%s], and no entry [%d]"):format(other, n + 1)
    end
  end
end

--- Whether a value is a list from 1 on without gaps, and nothing beside.
function M.is_whole_list(value)
  local keys = type(value) == "table" and M.keys(value)
  return keys and #keys == #value or false
end

--- A list from 1 on without gaps, or an error. of: what its entries are.
function M.whole_list(func, what, value, of)
  if not M.is_whole_list(value) then
    fail(("%s: %s is no list of %s: it has entries behind a nil, or keys that are no positions"):format(func, what, of))
  end
  return value
end

--- The positions of a list's values: { "a", "b" } -> { a = 1, b = 2 }.
function M.index_of(values)
  local index = {}
  for i, v in ipairs(values) do index[v] = i end
  return index
end

--- Exchange all fields of two tables.
function M.exchange(a, b)
  local from_a = M.copy(a)
  for k in pairs(from_a) do rawset(a, k, nil) end
  for k, v in pairs(b) do rawset(a, k, v) end
  for k in pairs(a) do rawset(b, k, nil) end
  for k, v in pairs(from_a) do rawset(b, k, v) end
end

--- A new table with the fields of `t`.
function M.copy(t)
  local out = {}
  for k, v in pairs(t) do out[k] = v end
  return out
end

--- The median of a list of numbers (of two in the middle the lesser), and the least. The list stays as it is; an empty
--- one has none.
function M.median(numbers)
  local sorted = M.copy(numbers)
  table.sort(sorted)
  return sorted[math.ceil(#sorted / 2)], sorted[1]
end

--- A new list of f(value, position).
function M.map(values, f)
  local out = {}
  for i, v in ipairs(values) do out[i] = f(v, i) end
  return out
end

--- The product of a list of numbers, from place `from` (1) to place `to` (the last); 1 if there are none.
function M.product(list, from, to)
  local n = 1
  for i = from or 1, to or #list do n = n * list[i] end
  return n
end

return M
