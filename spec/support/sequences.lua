-- sequences.lua: the cases of attention within sequences: those whose results PyTorch made (spec/golden/sequences.py),
-- and larger ones of which only the speed is asked. Correctness, gradients and tests/bench/sparse.lua go through this
-- list.
local peri = require "perilune"
local golden = require "spec.support.golden"
local sparse = peri.sparse

local M = { document = golden.document "ops/tensor/sequences" }

local function offsets_of(lengths, device)
  local offsets = { 0 }
  for i, n in ipairs(lengths) do offsets[i + 1] = offsets[i] + n end
  return peri.tensor(offsets, "i64", device), offsets[#offsets]
end
M.offsets_of = offsets_of

--- The function of q, k and v that a case's arguments (lengths, targets, causal, window, form, alpha, max_seq_len)
--- describe, and its rows.
function M.attention(args, device)
  local offsets, rows = offsets_of(args.lengths, device)
  local f = args.form == "softmax" and sparse.jagged_attention or sparse.hstu_mha
  -- dkjson's null is a function, and its lists have metatables
  local targets = type(args.targets) == "table" and peri.tensor({ unpack(args.targets) }, "i64", device) or nil
  return function(q, k, v)
    return f { q = q, k = k, v = v, seq_offsets = offsets, num_targets = targets, causal = args.causal,
      max_attn_len = args.window, contextual_seq_len = args.contextual, min_full_attn_seq_len = args.full,
      alpha = args.alpha, max_seq_len = args.max_seq_len }
  end, rows
end

--- What is measured: name, arguments, heads, dim.
function M.speed()
  local list = {}
  for _, form in ipairs { "softmax", "silu" } do
    for _, shape in ipairs { { 64, 50, 2, 32 }, { 16, 200, 4, 64 }, { 2, 1000, 2, 64 } } do
      local sequences, mean, heads, dim = unpack(shape)
      local lengths, targets = {}, {}
      for i = 1, sequences do
        lengths[i] = math.floor(2 * mean * (i - 0.5) / sequences)
        targets[i] = math.min(lengths[i], 5)
      end
      list[#list + 1] = { name = ("%s attention %d x %d, %d heads of %d"):format(form, sequences, mean, heads, dim),
        heads = heads, dim = dim, args = { form = form, lengths = lengths, targets = targets, causal = true, window = 0,
          contextual = 0, max_seq_len = 2 * mean } }
    end
  end
  return list
end

return M
