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

for _, device in ipairs(require "spec.support.devices") do
  describe("lengths or offsets that are changed in place, on " .. device, function()
    local function t(list) return peri.tensor(list, "i64", device) end
    local values = t { 5, 6, 7, 8 }
    local function kjt(given) -- 2 keys of 2 samples
      return peri.KeyedJaggedTensor { keys = { "a", "b" }, values = values, lengths = given.lengths,
        offsets = given.offsets }
    end
    local function jt(given)
      return peri.JaggedTensor { values = values, lengths = given.lengths, offsets = given.offsets }
    end
    local function seen(x, make)
      local list = { x:lengths():to_list(), x:offsets():to_list() }
      if make == kjt then
        list[3], list[4] = x:length_per_key(), x.b:values():to_list()
        list[5] = x:permute({ 1 }):lengths():to_list()
      else list[3], list[4] = x:to_dense()[1]:to_list(), x:to_padded_dense(3):to_list() end
      return list
    end

    it("are those of a new one of these tensors", function()
      for _, make in ipairs { kjt, jt } do
        for kind, moments in pairs { lengths = { { 1, 1, 1, 1 }, { 0, 3, 1, 0 }, { 2, 0, 0, 2 } },
          offsets = { { 0, 1, 2, 3, 4 }, { 0, 0, 3, 4, 4 }, { 0, 2, 2, 2, 4 } } } do
          local tensor = t(moments[1])
          local x = make { [kind] = tensor }
          for _, now in ipairs(moments) do
            tensor:copy(t(now))
            assert.same(seen(make { [kind] = t(now) }, make), seen(x, make))
          end
          tensor:fill(7)
          for _ = 1, 2 do assert.error_matches(function() seen(x, make) end, "7") end
          tensor:copy(t(moments[2]))
          assert.same(seen(make { [kind] = t(moments[2]) }, make), seen(x, make))
        end
      end
    end)
  end)
end
