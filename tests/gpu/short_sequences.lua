-- short_sequences.lua: the part of short.lua that calls attention within sequences, and what goes with it.
local peri = require "perilune"
local sparse = peri.sparse

return function(same, lengths_on, total, with_gradient)
  for form, attend in pairs { softmax = sparse.jagged_attention, silu = sparse.hstu_mha } do
    same("attention " .. form, function(d)
      local lengths = lengths_on(d, 40, 70, 60):to "f64" -- up to two blocks of the kernel
      lengths = (lengths + lengths:clamp(0, 1) * 5):to "i64" -- none, or enough for contextual members and targets
      local n, offsets = total(lengths), sparse.asynchronous_complete_cumsum(lengths)
      local targets = lengths:to("f64"):clamp(0, 2):to "i64"
      local out = {}
      for _, mask in ipairs { { 0, 0, 0 }, { 5, 0, 0 }, { 5, 3, 4 } } do
        local window, contextual, full = unpack(mask)
        local part = with_gradient(d, { 3, n, 2, 8 }, 61, function(x)
          return attend { q = x[0], k = x[1], v = x[2], seq_offsets = offsets, num_targets = targets,
            max_attn_len = window, contextual_seq_len = contextual, min_full_attn_seq_len = full,
            max_seq_len = form == "silu" and 75 or nil }
        end)
        for _, t in ipairs(part) do out[#out + 1] = t end
      end
      return out
    end, 1e-5)
  end
  same("places and times", function(d)
    local lengths = lengths_on(d, 40, 9, 62)
    local n, offsets = total(lengths), sparse.asynchronous_complete_cumsum(lengths)
    local times = lengths_on(d, n, 1e6, 63)
    local function places(most)
      return sparse.sequence_positions { seq_offsets = offsets, rows = n, max_positions = most }
    end
    return { places(100), places(3), sparse.time_buckets { timestamps = times, seq_offsets = offsets },
      sparse.time_buckets { timestamps = times, seq_offsets = offsets, time_bucket_fn = "log", increment = 2 },
      sparse.sequence_numbers(offsets, n) }
  end)
end
