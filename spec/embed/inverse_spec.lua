-- Inverse indices and weights of batches of an EmbeddingCollection, on both devices.
local peri = require "perilune"
local golden = require "spec.support.golden"
local Collection = peri.EmbeddingCollection

local function config(more)
  local a = { name = "t", embedding_dim = 4, num_embeddings = 10 }
  for key, value in pairs(more) do a[key] = value end
  return peri.EmbeddingConfig(a)
end

for _, device in ipairs(require "spec.support.devices") do
  local function t(list, dtype) return peri.tensor(list, dtype, device) end

  it(("on %s every sample has the rows of the bag that inverse indices name, whose gradients add up"):format(device),
    function()
    local function collection(need_indices)
      return Collection { device = device, need_indices = need_indices, seed = 5,
        tables = { config { feature_names = { "f", "g" } } }, fused_params = { optimizer = "sgd", learning_rate = 1 } }
    end
    local ec, plain = collection(false), collection(false)
    local inverse = { { "f", "g" }, t({ { 1, 0, 1 }, { 0, 0, 0 } }, "i64") }
    local once = { keys = { "f", "g" }, values = t({ 1, 2, 3, 4 }, "i64"), lengths = t({ 2, 1, 1 }, "i32"),
      stride_per_key_per_rank = { { 2 }, { 1 } }, inverse_indices = inverse, weights = t { 0.5, 1, 2, 4 } }
    local written = { keys = { "f", "g" }, values = t({ 3, 1, 2, 3, 4, 4, 4 }, "i64"),
      lengths = t({ 1, 2, 1, 1, 1, 1 }, "i32"), weights = t { 2, 0.5, 1, 2, 4, 4, 4 } }
    local got, want = ec(peri.KeyedJaggedTensor(once)), plain(peri.KeyedJaggedTensor(written))
    for name, jt in pairs(want) do
      assert.same(jt:values():to_list(), got[name]:values():to_list())
      assert.same(jt:lengths():to_list(), got[name]:lengths():to_list())
      assert.same(jt:weights():to_list(), got[name]:weights():to_list())
    end
    for _, result in ipairs { got, want } do
      local up = t { { 1, 2, 3, 4 }, { 5, 6, 7, 8 }, { 9, 10, 11, 12 }, { 13, 14, 15, 16 } };
      (peri.nn.functional.sum(result.f:values() * up) + peri.nn.functional.sum(result.g:values())):backward()
    end
    golden.assert_near(plain:weight("t"):to_list(), ec:weight("t"):to_list(), { abs = 1e-5, rel = 1e-5 }, "trained")
    once.weights = nil
    assert.same({ 3, 1, 2, 3 }, collection(true)(peri.KeyedJaggedTensor(once)).f:weights():to_list()) -- the ids
    once.inverse_indices = { { "f" }, t({ { 1, 0, 1 } }, "i64") }
    assert.error_matches(function() ec(peri.KeyedJaggedTensor(once)) end, "no inverse indices of 'g'; those are: f")
    assert.error_matches(function() collection(true)(peri.KeyedJaggedTensor(written)) end,
      "the batch has weights, whose place need_indices")
  end)
end
