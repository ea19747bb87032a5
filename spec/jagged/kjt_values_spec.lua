-- KeyedJaggedTensor:with_values: other ids in the same places.
local peri = require "perilune"

describe("with_values", function()
  it("keeps keys, samples and weights", function()
    local kjt = peri.KeyedJaggedTensor { keys = { "a", "b" }, values = { 1, 2, 3 }, lengths = { 1, 0, 1, 1 },
      weights = { 4, 5, 6 } }
    local other = kjt:with_values(peri.tensor({ 7, 8, 9 }, "i64"))
    assert.same({ "a", "b" }, other:keys())
    assert.same({ 7, 8, 9 }, other:values():to_list())
    assert.same({ 1, 0, 1, 1 }, other:lengths():to_list())
    assert.same({ 4, 5, 6 }, other:weights():to_list())
    assert.equal(2, other:stride())
    assert.same({ 1, 2, 3 }, kjt:values():to_list())
    local plain = peri.KeyedJaggedTensor { keys = { "a" }, values = { 1 },
      lengths = { 1 } }:with_values(peri.tensor({ 2 }, "i64"))
    assert.is_nil(plain:weights_or_none())
  end)

  it("keeps variable batches and inverse indices", function()
    local kjt = peri.KeyedJaggedTensor { keys = { "b", "a" }, values = { 5, 6, 7 }, lengths = { 1, 1, 1 },
      stride_per_key_per_rank = { { 1 }, { 2 } }, inverse_indices = { { "b", "a" }, { { 0, 0 }, { 0, 1 } } } }
    local other = kjt:with_values(peri.tensor({ 1, 2, 3 }, "i64"))
    assert.same({ 1, 2 }, other:stride_per_key())
    assert.same({ 0, 0, 0, 1 }, other:inverse_indices()[2]:reshape(-1):to_list())
    assert.same({ 1, 2, 3 }, other:values():to_list())
  end)

  it("refuses another number of ids", function()
    local kjt = peri.KeyedJaggedTensor { keys = { "a" }, values = { 1, 2 }, lengths = { 2 } }
    local ok = pcall(function() return kjt:with_values(peri.tensor({ 1 }, "i64")):validate() end)
    assert.is_false(ok)
  end)
end)
