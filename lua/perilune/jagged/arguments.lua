-- arguments.lua: what the constructors of this folder take: tensors or plain Lua lists.
local ffi = require "ffi"
local P = require "perilune.ffi"
local Tensor = require "perilune.tensor"
local signature = require "perilune.signature"

local M = {}

--- An error unless every name in `args` is in `allowed` (a set).
function M.check(func, args, allowed)
  if type(args) ~= "table" then P.fail(("%s: named arguments in a table wanted, got a %s"):format(func, type(args))) end
  for name in next, args do
    if not allowed[name] then
      local words = type(name) == "number" and "%s: argument %s has no name; they go by name: %s"
        or "%s: no argument '%s'; allowed: %s"
      P.fail(words:format(func, tostring(name), table.concat(P.util.keys(allowed), ", ")))
    end
  end
end

--- The same, and an error if one of the names in the list `required` is missing. Compiles, unlike util.named.
function M.check_all(func, args, allowed, required)
  M.check(func, args, allowed)
  for i = 1, #required do
    if args[required[i]] == nil then P.fail(("%s: argument '%s' is missing"):format(func, required[i])) end
  end
end

--- A tensor from a tensor (as it is) or a list of numbers (dtype, device); nil passes.
function M.tensor(func, what, value, dtype, device)
  if value == nil or Tensor.is(value) then return value end
  if type(value) ~= "table" then
    P.fail(("%s: %s is a %s, wanted a tensor or a list"):format(func, what, type(value)))
  end
  return Tensor._named_tensor(func .. ": " .. what, value, dtype, device)
end

--- The pointer of a tensor or nil.
function M.ptr(t)
  if t == nil then return nil end
  return Tensor.ptr(t)
end

--- A matrix of whole numbers (list of rows, or a tensor [n, m]) as int64 host memory, with its rows and columns.
function M.matrix(func, what, value)
  if Tensor.is(value) then
    if value:dim() ~= 2 then P.fail(("%s: %s is %s, wanted 2 dimensions"):format(func, what, tostring(value))) end
    local wide = value:to "i64"
    local rows, columns = value:size(1), value:size(2)
    return wide:read(), rows, columns
  end
  if type(value) ~= "table" then
    P.fail(("%s: %s is a %s, wanted a list of rows or a tensor"):format(func, what, type(value)))
  end
  local rows = #value
  local columns = rows > 0 and type(value[1]) == "table" and #value[1] or 0
  local buffer = ffi.new("int64_t[?]", math.max(rows * columns, 1))
  for i = 1, rows do
    local row = value[i]
    if type(row) ~= "table" or #row ~= columns then
      P.fail(("%s: row %d of %s is %s, wanted a list of %d numbers like the first row"):format(func, i, what,
        type(row) == "table" and ("a list of %d"):format(#row) or tostring(row), columns))
    end
    for j = 1, columns do
      buffer[(i - 1) * columns + j - 1] = signature.value(func, ("entry %d of row %d of %s"):format(j, i, what), row[j],
        "integer")
    end
  end
  return buffer, rows, columns
end

--- Numbers of a host array as a Lua list.
function M.list(array, n)
  local list = {}
  for i = 1, n do list[i] = tonumber(array[i - 1]) end
  return list
end

return M
