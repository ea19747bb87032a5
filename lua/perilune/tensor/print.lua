-- print.lua: how tensors show themselves: print(t), tostring(t). The first line says dtype, shape and device; then come
-- the elements, of tensors of more than 1000 elements the first three and the last three along each dimension. Waits
-- for the elements.
local P = require "perilune.ffi"
local Tensor = require "perilune.tensor.core"
local ops = require "perilune.tensor.ops"

local M = {}

--- Elements that are shown in full; elements at each end of a dimension otherwise; digits; characters of a line.
local MOST, EDGE, DIGITS, WIDTH = 1000, 3, 4, 100

local pairs_of = { c64 = true, c128 = true }
local wholes = { i64 = true, i32 = true, i16 = true, i8 = true, u8 = true, bool = true }

--- Only the ends of long dimensions.
local function ends_of(t)
  for d = 1, t:dim() do
    local n = t:size(d)
    if n > 2 * EDGE then t = ops.cat({ t:slice(d, 0, EDGE), t:slice(d, n - EDGE, n) }, d) end
  end
  return t
end

--- Nested lists of the elements to show, and whether they are ends only.
local function shown(t)
  local short = t:numel() > MOST
  t = t:detach()
  if short then t = ends_of(t) end
  return t:to_table(), short
end

local function each(x, f)
  if type(x) ~= "table" then return f(x) end
  for i = 1, #x do each(x[i], f) end
end

local function special(x) return x ~= x and "nan" or x == math.huge and "inf" or x == -math.huge and "-inf" or nil end

--- A function that writes one element, all as wide: whole numbers as "3.", numbers of like size with four decimals,
--- others as 1.0000e+10.
local function writer(list, dtype)
  local least, most, whole = math.huge, 0, true
  if not wholes[dtype] then
    each(list, function(x)
      local size = math.abs(x)
      if size < math.huge and size > 0 then least, most = math.min(least, size), math.max(most, size) end
      whole = whole and (special(x) ~= nil or x == math.floor(x))
    end)
  end
  local scientific = most > 1e8 or most / least > 1000 or not whole and least < 1e-4
  local format = scientific and "%." .. DIGITS .. "e" or whole and "%d." or "%." .. DIGITS .. "f"
  local function one(x)
    if dtype == "bool" then return x ~= 0 and "true" or "false" end
    if wholes[dtype] then return type(x) == "number" and ("%.0f"):format(x) or (tostring(x):gsub("LL$", "")) end
    return special(x) or format:format(x)
  end
  local width = 0
  each(list, function(x) width = math.max(width, #one(x)) end)
  return function(x) return ("%" .. width .. "s"):format(one(x)) end
end

--- The elements of one innermost list in lines of at most WIDTH characters.
local function row(list, write, margin, short)
  local lines, line = {}, ""
  for i = 1, #list do
    local text = write(list[i]) .. (i < #list and "," or "")
    if short and i == EDGE + 1 then text = "..., " .. text end
    if line ~= "" and #margin + #line + #text + 1 > WIDTH then
      lines[#lines + 1], line = line, ""
    end
    line = line == "" and text or line .. " " .. text
  end
  lines[#lines + 1] = line
  return table.concat(lines, "\n" .. margin)
end

local function complex(pair, write)
  return write(pair[1]) .. (pair[2] < 0 and " - " or " + ") .. write(math.abs(pair[2])) .. "i"
end

--- `sizes`: the tensor's own, by which a list says whether elements were left out of it.
local function block(list, write, depth, sizes, short)
  local margin, cut = (" "):rep(depth), short and sizes[depth] > 2 * EDGE
  if depth == #sizes then return "[" .. row(list, write, margin, cut) .. "]" end
  local parts = {}
  for i = 1, #list do
    if cut and i == EDGE + 1 then parts[#parts + 1] = "..." end
    parts[#parts + 1] = block(list[i], write, depth + 1, sizes, short)
  end
  return "[" .. table.concat(parts, ",\n" .. ("\n"):rep(#sizes - depth - 1) .. margin) .. "]"
end

local function elements(t)
  local dtype, sizes = t:dtype(), t:shape()
  local list, short = shown(t)
  local write = writer(list, dtype)
  if pairs_of[dtype] then
    local number = write
    write = function(pair) return complex(pair, number) end
  end
  if #sizes == 0 then return write(list):match "^%s*(.*)$" end
  return block(list, write, 1, sizes, short)
end

--- "tensor f32 [2] on cpu" and, from the next line on, the elements.
function M.text(t)
  local head = Tensor._text(t)
  if t.ptr == nil or t:numel() == 0 then return head end
  return head .. "\n" .. P.no_grad(P.scope, elements, t)
end

Tensor.meta.__tostring = M.text

return M
