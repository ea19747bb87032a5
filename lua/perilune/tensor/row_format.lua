-- tensor/row_format.lua: what the bytes of a u8 tensor mean whose rows are those of a quantized table. Rows of other
-- data types and columns may have as many bytes (4 numbers as INT8 and 8 as INT4 take 8), so shapes alone do not say
-- whether a state fits. State_dicts, their copies and checkpoints carry the format along; loading compares it.
local M = {}

local formats = setmetatable({}, { __mode = "k" })

--- Note that the rows of x (a Tensor or a StoredTensor) have this format ("INT8 x 4": 4 numbers each); nil: nothing is
--- known. Returns x.
function M.note(x, format)
  formats[x] = format
  return x
end

--- The format that was noted; nil: none was.
function M.noted_format(x) return formats[x] end

local function words(x, format) return format and "rows of " .. format or x:dtype() .. " numbers" end

--- Why rows of `source` are not those of `target`, in words; nil: they are, or nobody knows. Bytes of which nothing was
--- noted may be any: those of a checkpoint from before formats were saved, say.
function M.refusal(target, source, origin)
  local here, there = formats[target], formats[source]
  if here == there or not here and target:dtype() == "u8" or not there and source:dtype() == "u8" then return nil end
  return ("has %s here, and %s %s"):format(words(target, here), words(source, there), origin)
end

return M
