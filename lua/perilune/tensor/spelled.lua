-- spelled.lua: functions that are one call of C, made of others: for a model that is recorded (signature.watch), whose
-- file has the operations that they consist of.
local Tensor = require "perilune.tensor.core"
local F = require "perilune.tensor.ops"

local M = {}

function M.scaled_dot_product_attention(q, k, v, attn_mask, is_causal, scale)
  local scores = F.affine(F.matmul(q, k:transpose(-1, -2)), scale, 0)
  if is_causal then
    local device = q:describe().device
    local rows = Tensor.arange(0, q:size(-2), 1, "i64", device)
    local columns = Tensor.arange(0, k:size(-2), 1, "i64", device)
    scores = F.masked_fill(scores, F.gt(columns, F.unsqueeze(rows, 2)), -math.huge)
  end
  if attn_mask then
    scores = attn_mask:dtype() == "bool" and F.where(attn_mask, scores, -math.huge) or F.add(scores, attn_mask)
  end
  local weights = F.softmax(scores, -1)
  if attn_mask then -- a row that sees nothing is 0
    local seen = F.sum(F.gt(scores, -math.huge):to "f32", -1, true)
    weights = F.where(F.gt(seen, 0), weights, 0)
  end
  return (F.matmul(weights, v))
end

local function filled(t, d, size, value)
  local shape, about = t:shape(), t:describe()
  shape[d] = size
  return (Tensor.full(shape, value, about.dtype, about.device))
end
function M.pad(t, pads, value)
  for i = 1, #pads, 2 do
    local d, before, behind = t:dim() - (i - 1) / 2, pads[i], pads[i + 1]
    if before < 0 or behind < 0 then t = t:slice(d, math.max(0, -before), t:size(d) + math.min(0, behind)) end
    local parts = { t }
    if before > 0 then table.insert(parts, 1, filled(t, d, before, value)) end
    if behind > 0 then table.insert(parts, filled(t, d, behind, value)) end
    if #parts > 1 then t = F.cat(parts, d) end
  end
  return t
end

return M
