-- Random numbers of tensors: how often they come, and that a seed brings them back; on both devices.
-- cuda: always
local peri = require "perilune"
local F = require "perilune.nn.functional"
local devices = require "spec.support.devices"

for _, device in ipairs(devices) do
  describe("numbers by chance on " .. device, function()
    it("are as likely as they should be", function()
      peri.scope(function()
        peri.nn.manual_seed(5)
        local n = 4000
        local whole = peri.randint(-3, 5, { n }, "i64", device)
        local counts = (whole + 3):bincount():to_list()
        assert.equal(8, #counts)
        for _, c in ipairs(counts) do assert.is_true(math.abs(c - n / 8) < 5 * math.sqrt(n / 8)) end
        for _, bits in ipairs { 10, 24, 25, 32, 40, 53 } do -- each bit is set as often as not
          local high = bits < 53 and 2 ^ bits or 2LL ^ bits
          local drawn = peri.randint(0, high, { n }, "i64", device)
          assert.is_true(drawn:min():item() >= 0 and drawn:max():item() < high)
          for _ = 1, bits do
            assert.is_true(math.abs(drawn:remainder(2):to("f64"):mean():item() - 0.5) < 5 * math.sqrt(0.25 / n))
            drawn = drawn:floor_divide(2)
          end
        end
        local far = peri.randint(2LL ^ 60, 2LL ^ 60 + 4, { n }, "i64", device) - 2LL ^ 60
        assert.equal(4, #far:bincount():to_list())
        local order = peri.randperm(100, device)
        assert.is_true(F.equal(order:sort(), peri.arange(0, 100, 1, "i64", device)))
        assert.is_false(F.equal(order, peri.arange(0, 100, 1, "i64", device)))
        local share = peri.full({ n }, 0.3, "f32", device):bernoulli():mean():item()
        assert.is_true(math.abs(share - 0.3) < 5 * math.sqrt(0.21 / n))
        local weights = peri.tensor({ { 0, 1, 2, 5 }, { 4, 0, 0, 4 } }, "f32", device)
        for _, drawn in ipairs { weights:multinomial(n, true), weights:tile({ n, 1 }):multinomial(1):reshape(n,
          2):transpose(1, 2) } do
          for row, wanted in ipairs { { 0, 1 / 8, 2 / 8, 5 / 8 }, { 1 / 2, 0, 0, 1 / 2 } } do
            local seen = drawn:select(1, row - 1):contiguous():bincount(nil, 4):to_list()
            for k = 1, 4 do
              assert.is_true(math.abs(seen[k] - n * wanted[k]) <= 5 * math.sqrt(n * wanted[k]), device .. k)
            end
          end
        end
        local two = weights:multinomial(2):sort(2):to_table() -- without replacement: others each time
        assert.is_true(two[1][1] >= 1 and two[1][1] < two[1][2])
        assert.same({ 0, 3 }, two[2])
        local logits = peri.tensor({ 0, 1, 2 }, "f32", device):expand { n, 3 }:clone():requires_grad()
        local hard = logits:gumbel_softmax(0.5, true)
        local chosen, soft = hard:sum(1):to_list(), F.softmax(peri.tensor { 0, 1, 2 }, 1):to_list()
        for k = 1, 3 do assert.is_true(math.abs(chosen[k] - n * soft[k]) < 5 * math.sqrt(n * soft[k])) end
        assert.is_true(F.allclose(hard:max(2), peri.ones({ n }, "f32", device)))
        hard:select(2, 0):sum():backward()
        assert.is_true(logits:grad():abs():sum():item() > 0)
        for _, dtype in ipairs { "f16", "bf16" } do
          local narrow = logits:detach():to(dtype):gumbel_softmax()
          assert.equal(dtype, narrow:dtype())
          assert.is_true(F.allclose(narrow:to("f32"):sum(2), peri.ones({ n }, "f32", device), 0.02))
        end
        assert.same({ 0, 2 }, peri.zeros({ 0, 3 }, "f32", device):multinomial(2):shape())
        peri.nn.manual_seed(0)
      end)
    end)

    it("of bernoulli has 48 bits: " .. device, function()
      peri.scope(function()
        local n = 2000
        peri.nn.manual_seed(9)
        local first, second = peri.rand({ n }, "f32", device):to_list(), peri.rand({ n }, "f32", device):to_list()
        local near = {} -- probabilities within 2^-24 of the first word, where the second one decides
        for i = 1, n do near[i] = first[i] + (i % 5 - 1) * 2 ^ -26 end
        for _, dtype in ipairs { "f32", "f64" } do
          local p = peri.tensor(near, dtype, device)
          peri.nn.manual_seed(9)
          local drawn, wanted = p:bernoulli():to_list(), p:to_list()
          for i = 1, n do wanted[i] = first[i] + second[i] * 2 ^ -24 < wanted[i] and 1 or 0 end
          assert.same(wanted, drawn)
        end
        peri.nn.manual_seed(0)
      end)
    end)
  end)
end

describe("rand and randn", function()
  it("draw other numbers at each call, and the same ones after manual_seed", function()
    peri.nn.manual_seed(3)
    local a, b, c = peri.rand { 1000 }, peri.rand { 1000 }, peri.randn { 1000 }
    assert.are_not.same(a:to_list(), b:to_list())
    peri.nn.manual_seed(3)
    assert.same(a:to_list(), peri.rand({ 1000 }):to_list())
    assert.is_true(a:min():item() >= 0 and a:max():item() < 1 and math.abs(a:mean():item() - 0.5) < 0.05)
    assert.is_true(math.abs(c:mean():item()) < 0.15 and math.abs(c:std():item() - 1) < 0.1)
    peri.nn.manual_seed(0)
  end)
end)
