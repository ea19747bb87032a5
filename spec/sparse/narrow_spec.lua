-- Rows of 16-bit numbers, as tables give them with output_dtype, and products in an autocast region: what picks, moves
-- and spreads them passes the same gradient on as for f32. (All numbers here are exact in 16 bits.)
local peri = require "perilune"
local devices = require "spec.support.devices"
local sparse = peri.sparse

local function numbers(shape, dtype, device)
  local n, list = 1, {}
  for _, d in ipairs(shape) do n = n * d end
  for i = 1, n do list[i] = (i * 7 % 16 + 1) / 8 end
  return peri.tensor(list, "f32", device, shape):to(dtype)
end

--- By name: the shape of what has a gradient, and a function of it. lengths 2, 0, 3 of bags.
local function cases_on(device)
  local function ids(list) return peri.tensor(list, "i64", device) end
  local lengths, offsets, twice = ids { 2, 0, 3 }, ids { 0, 2, 2, 5 }, ids { 2, 0, 2 }
  local function jagged(values) return peri.JaggedTensor { values = values, lengths = lengths } end
  local function kjt(values)
    return peri.KeyedJaggedTensor { keys = { "a", "b", "c" }, values = values, lengths = lengths }
  end
  return {
    index_select = { { 5, 4 }, function(x) return x:index_select(1, twice) end },
    index_select_dim0 = { { 5, 4 }, function(x) return sparse.index_select_dim0(x, twice) end },
    jagged_index_select = { { 5, 4 }, function(x) return (sparse.jagged_index_select(x, lengths, twice)) end },
    batch_index_select = { { 20 }, function(x)
      return sparse.batch_index_select_dim0(x, twice, { 3 }, { 5 }, { 4 })
    end },
    permute_1D = { { 5 }, function(x)
      local _, values = sparse.permute_1D_sparse_data(ids { 2, 1, 0 }, lengths, x)
      return values
    end },
    masked_select = { { 5 }, function(x)
      return (sparse.masked_select_jagged_1d(x, lengths, peri.tensor({ 1, 0, 1, 1, 0 }, "bool", device)))
    end },
    jagged_slice = { { 5, 4 }, function(x) return (sparse.jagged_slice(x, lengths, ids { 0, 0, 1 }, 1)) end },
    truncate = { { 5, 4 }, function(x) return (sparse.truncate_jagged(x, lengths, 2, "last")) end },
    permute_pooled = { { 3, 4 }, function(x) return sparse.permute_pooled_embs(x, { 0, 1, 4 }, { 1, 0 }) end },
    to_padded = { { 5, 4 }, function(x) return jagged(x):to_padded_dense(4) end },
    from_dense = { { 3, 3, 4 }, function(x) return peri.JaggedTensor.from_dense_lengths(x, lengths):values() end },
    levels = { { 5, 4 }, function(x) return sparse.jagged_to_padded_dense(x, { offsets }, { 3 }) end },
    from_levels = { { 3, 3, 4 }, function(x) return (sparse.dense_to_jagged(x, { offsets })) end },
    permute_keys = { { 5 }, function(x) return kjt(x):permute({ 2, 0, 2 }):values() end },
    split_keys = { { 5 }, function(x) return kjt(x):split({ 2, 1 })[1]:values() end },
    regroup = { { 3, 4 }, function(x)
      local kt = peri.KeyedTensor { keys = { "a", "b" }, length_per_key = { 1, 3 }, values = x }
      return peri.KeyedTensor.regroup({ kt }, { { "b", "a", "b" } })[1]
    end },
  }
end

--- The result and the gradient of f, as lists.
local function both(shape, f, dtype, device)
  local x = numbers(shape, "f32", device):requires_grad()
  local y = f(x:to(dtype))
  assert.equal(dtype, y:dtype())
  y:backward(numbers(y:shape(), dtype, device))
  return { y:detach():to "f32":to_list(), x:grad():to_list() }
end

for _, device in ipairs(devices) do
  describe("rows of 16-bit numbers on " .. device, function()
    for name, case in peri.util.ordered(cases_on(device)) do
      it("pass their gradients on through " .. name, function()
        local wide = both(case[1], case[2], "f32", device)
        for _, dtype in ipairs { "bf16", "f16" } do assert.same(wide, both(case[1], case[2], dtype, device)) end
      end)
    end
  end)
end

describe("a collection of rows whose output has 16 bits", function()
  for _, dtype in ipairs { "BF16", "FP16" } do
    it("is trained through inverse indices and padded rows: " .. dtype, function()
      local learned = {}
      for _, output in ipairs { "FP32", dtype } do
        local ec = peri.EmbeddingCollection { fused_params = { optimizer = "sgd", learning_rate = 1,
          output_dtype = output }, tables = { peri.EmbeddingConfig { name = "t", num_embeddings = 4, embedding_dim = 4,
          feature_names = { "f" }, init_fn = peri.embed.constant(0) } } }
        local rows = ec(peri.KeyedJaggedTensor { keys = { "f" }, values = { 1, 3 }, lengths = { 2 },
          stride_per_key_per_rank = { { 1 } }, inverse_indices = { { "f" }, peri.tensor({ { 0, 0 } }, "i64") } })
        local padded = rows.f:to_padded_dense(3)
        padded:backward(numbers(padded:shape(), padded:dtype()))
        learned[#learned + 1] = ec:weight("t"):to_table()
      end
      assert.same(learned[1], learned[2])
      assert.not_equal(0, learned[1][2][1])
    end)
  end
end)
