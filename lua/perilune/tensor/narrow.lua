-- tensor/narrow.lua: whether numbers fit the dtype that they are loaded into. Tensor:copy makes infinities of those
-- that do not, as PyTorch's copy_ does; whoever loads a state wants the numbers that were saved, or an error.
local P = require "perilune.ffi"

local M = {}

local largest = { f16 = 65504, bf16 = 0x1.fep127, f32 = 0x1.fffffep127, f64 = 0x1.fffffffffffffp1023 }
local whole = { i64 = 2 ^ 63, i32 = 2 ^ 31, i16 = 2 ^ 15, i8 = 2 ^ 7, u8 = 2 ^ 8, bool = 1 }
local allowed = { f16 = "-65504..65504, inf, nan", bf16 = "-3.3895314e38..3.3895314e38, inf, nan",
  f32 = "-3.4028235e38..3.4028235e38, inf, nan", i64 = "whole numbers -2^63..2^63 - 1",
  i32 = "whole numbers -2147483648..2147483647", i16 = "whole numbers -32768..32767",
  i8 = "whole numbers -128..127", u8 = "whole numbers 0..255", bool = "0 and 1" }

--- Whether a number of dtype `from` may become another one, other than by rounding, as one of dtype `to`.
function M.may_lose(to, from)
  if to == from or from == "bool" then return false end
  if whole[to] then return largest[from] ~= nil or whole[from] ~= nil end
  return (largest[from] or whole[from] or 0) > (largest[to] or math.huge) -- complex numbers have neither
end

--- Where the first element of `x` is that a number of `dtype` cannot be, counted in its shape from 0, and the element;
--- nil: all fit. Rounding is no loss; infinities and NaN that x has are kept by floats.
local function first_lost(x, dtype)
  x = x:detach():to(nil, "cpu"):reshape(-1)
  local made = x:to(dtype)
  local lost = whole[dtype] and made:to(x:dtype()):ne(x) or x:isfinite():ne(made:isfinite())
  local places = lost:nonzero():reshape(-1)
  if places:numel() == 0 then return nil end
  local at = tonumber(places:item(0))
  return at, tonumber(x:item(at))
end

--- What keeps `x` from being loaded as `dtype`, in words; nil: nothing does. row_of(i): where row i of x is in the
--- whole; column: where its first column is.
function M.refusal(x, dtype, row_of, column)
  return P.no_grad(P.scope, function()
    local at, value = first_lost(x, dtype)
    if not at then return nil end
    local width = x:dim() > 0 and x:numel() / x:size(1) or 1
    local place = x:dim() == 0 and "" or (" at row %d"):format(row_of(math.floor(at / width)))
    if x:dim() > 1 then place = ("%s, column %d"):format(place, column + at % width) end
    return ("has %.9g%s, which %s cannot hold; allowed: %s"):format(value, place, dtype, allowed[dtype])
  end)
end

return M
