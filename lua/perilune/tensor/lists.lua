-- lists.lua: nested lists of numbers as the elements of a tensor: their shape, and whether each number fits the dtype.
local ffi = require "ffi"
local P = require "perilune.ffi"
local signature = require "perilune.signature"

local M = {}

-- What a dtype can hold: least and largest number, whether whole ones only, and how messages say it. A finite number
-- beyond `least` and `most` is an error, also for floats, where it would become an infinity; inside they are rounded. A
-- Lua number from 2^53 on may be another whole number that was rounded, so i64 takes those as 64-bit integers only.
local EXACT = 2 ^ 53 - 1
M.EXACT = EXACT
local ranges = {
  i64 = { -EXACT, EXACT, true, "whole numbers -2^53 + 1..2^53 - 1, and 64-bit integers (9007199254740993LL)" },
  i32 = { -2 ^ 31, 2 ^ 31 - 1, true }, i16 = { -32768, 32767, true },
  i8 = { -128, 127, true }, u8 = { 0, 255, true }, f16 = { -65519.99, 65519.99, false, "-65504..65504, inf, nan" },
  f32 = { -0x1.fffffefffffffp127, 0x1.fffffefffffffp127, false, "-3.4028235e38..3.4028235e38, inf, nan" },
  bf16 = { -0x1.fefffep127, 0x1.fefffep127, false, "-3.3895314e38..3.3895314e38, inf, nan" },
}
ranges.c64 = ranges.f32

local integer, unsigned = ffi.typeof "int64_t", ffi.typeof "uint64_t"
local MOST_SIGNED = 0x7fffffffffffffffULL

--- Whether the number x (a Lua number, or a 64-bit whole one) can be an element of this range.
local function fits(range, x)
  if type(x) == "cdata" then
    if range == ranges.i64 then return ffi.istype(integer, x) or x <= MOST_SIGNED end
    x = tonumber(x)
  end
  if range[3] then return x == math.floor(x) and x >= range[1] and x <= range[2] end
  return x >= range[1] and x <= range[2] or x ~= x or x == math.huge or x == -math.huge
end

local float, double = ffi.new "float[1]", ffi.new "double[1]"
local holders = { f64 = double, f32 = float, f16 = float, bf16 = float, c64 = float, c128 = double }

--- Whether the 64-bit whole number x survives as a number of this dtype; f16 and bf16 are made of f32. (A Lua number is
--- rounded to the nearest: it was a float before. Who writes 123LL means that number.)
local function exact(dtype, x)
  local holder = holders[dtype]
  if not holder then return true end
  holder[0] = tonumber(x)
  return ffi.cast(ffi.typeof(x), holder[0]) == x and math.abs(tonumber(holder[0])) < 2 ^ 63
end

--- The place of flat position `at` in nested lists: "[2][1]".
local function place(at, shape)
  local text = ""
  for d = #shape, 1, -1 do
    text = ("[%d]%s"):format(at % shape[d] + 1, text)
    at = math.floor(at / shape[d])
  end
  return text == "" and "the number" or "entry " .. text
end

--- An error if a list holds more than its length n says: there is a nil in it, or an entry with a name (`n`, a count,
--- is none: table.pack leaves one). Where there is nothing, nothing comes after entry n.
local function check_whole(func, data, n)
  if data[0] ~= nil then P.fail(func .. ": entry [0] of a list, but lists begin at [1]") end
  if next(data, n > 0 and n or nil) == nil then return end
  local last = n
  for key in next, data do
    if type(key) == "number" then last = math.max(last, key)
    elseif key ~= "n" then P.fail(("%s: a list with the key '%s'"):format(func, tostring(key))) end
  end
  if last > n then P.fail(("%s: entry [%d] is nil, and there is an entry [%s]"):format(func, n + 1, tostring(last))) end
end

--- Fill `shape` with the sizes of nested lists, which must be equally long, and numbers equally deep (`shape.numbers`).
function M.measure(func, data, shape, depth, most)
  if depth > most then P.fail(("%s: lists nested deeper than %d, or a list inside itself"):format(func, most)) end
  local n = #data
  check_whole(func, data, n)
  shape[depth] = shape[depth] or n
  if shape[depth] ~= n then P.fail(("%s: a row of %d elements beside one of %d"):format(func, n, shape[depth])) end
  local nested = type(data[1]) == "table"
  for i = 1, n do
    if (type(data[i]) == "table") ~= nested then
      P.fail(("%s: entry %d of a list is %s, beside entries that are %s"):format(func, i, signature.text(data[i]),
        nested and "lists" or "numbers"))
    end
    if nested then M.measure(func, data[i], shape, depth + 1, most) end
  end
  if nested or n == 0 then return end
  shape.numbers = shape.numbers or depth
  if shape.numbers ~= depth or #shape ~= depth then
    P.fail(("%s: numbers in lists nested %d deep, beside lists nested %d deep"):format(func, depth,
      shape.numbers ~= depth and shape.numbers or #shape))
  end
end

local function is_number(x)
  return type(x) == "number" or type(x) == "cdata" and (ffi.istype(integer, x) or ffi.istype(unsigned, x))
end

--- Write the numbers of nested lists of this shape to `buffer`, from its element `at` on. Returns where the next one
--- goes.
function M.flatten(func, data, buffer, at, shape, depth, dtype)
  if depth < #shape then
    for i = 1, #data do at = M.flatten(func, data[i], buffer, at, shape, depth + 1, dtype) end
    return at
  end
  local range, logical = ranges[dtype], dtype == "bool"
  for i = 1, #data do
    local x = data[i]
    if x == true then x = 1 elseif x == false then x = 0 end
    if not is_number(x) then
      P.fail(("%s: %s is %s, wanted a number"):format(func, place(at, shape), signature.text(x)))
    end
    if type(x) == "cdata" and not logical and not exact(dtype, x) then
      P.fail(("%s: %s is %s, which %s rounds; allowed: 64-bit integers that it holds, or dtype 'i64'"):format(func,
        place(at, shape), tostring(x), dtype))
    end
    if logical then x = x ~= 0 and 1 or 0
    elseif range and not fits(range, x) then
      P.fail(("%s: %s is %s, which does not fit %s, allowed: %s"):format(func, place(at, shape), signature.text(x),
        dtype, range[4] or ("whole numbers %d..%d"):format(range[1], range[2])))
    end
    buffer[at] = x
    at = at + 1
  end
  return at
end

return M
