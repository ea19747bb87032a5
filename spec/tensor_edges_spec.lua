-- What functions of tensors give where mathematics leaves it open, as PyTorch does: rows that see nothing, roots at 0,
-- nothing to add up, infinities beside what was not chosen.
local peri = require "perilune"
local F = peri.nn.functional

for _, device in ipairs { "cpu", "opaque" } do
  describe("at the edge on " .. device, function()
    local function tensor(x, dtype) return peri.tensor(x, dtype, device) end

    it("attention of a row that sees nothing is 0 and has no gradient", function()
      local inf = math.huge
      local seen = tensor({ { 1, 0, 1 }, { 0, 0, 0 } }):ne(0)
      local added = tensor { { 0, -inf, 0 }, { -inf, -inf, -inf } }
      for _, dtype in ipairs { "f32", "f64", "f16", "bf16" } do
        for _, mask in ipairs { seen, added } do
          local q = peri.Tensor.uniform({ 2, 4 }, -1, 1, 1, 0, "f32", device):requires_grad()
          local k = peri.Tensor.uniform({ 3, 4 }, -1, 1, 1, 1, "f32", device):requires_grad()
          local v = peri.Tensor.uniform({ 3, 2 }, -1, 1, 1, 2, "f32", device):requires_grad()
          local y = F.scaled_dot_product_attention(q:to(dtype), k:to(dtype), v:to(dtype),
            mask == added and mask:to(dtype) or mask)
          assert.same({ 0, 0 }, y[1]:to_list())
          y:square():sum():backward()
          -- the same as of the first row by itself
          local first = F.scaled_dot_product_attention(q:detach():slice(1, 0, 1):to(dtype), k:detach():to(dtype),
            v:detach():to(dtype), seen:slice(1, 0, 1))
          assert.same(first:to_table()[1], y[0]:to_list())
          assert.same({ 0, 0, 0, 0 }, q:grad()[1]:to_list())
          for _, leaf in ipairs { q, k, v } do
            assert.is_true(F.all(F.isfinite(leaf:grad())):item() == 1 and leaf:grad():abs():sum():item() > 0)
          end
          assert.same({ 0, 0, 0, 0 }, k:grad()[1]:to_list()) -- nobody sees the second column
        end
      end
      local softmax = F.softmax(tensor { -inf, -inf }, 1):to_list() -- attention alone has that rule
      assert.is_true(softmax[1] ~= softmax[1])
    end)

    it("results that are no views have memory of their own, also where there is nothing to do", function()
      local T = peri.Tensor
      local same = { -- of a tensor [1, 1]
        sum = { 1 }, mean = { 1 }, amax = { 1 }, prod = { 1 }, cumsum = { 1 }, norm = { 1, 1 }, logsumexp = { 1 },
        roll = { 1, 1 }, flip = { 1 }, tile = { { 1 } }, repeat_interleave = { 1, 1 }, diff = { 0, 1 }, trace = {},
        pad = { { 0, 0 } }, triu = {}, sort = { 1 }, clamp = { -9, 9 }, masked_fill = { "none", 0 }, relu = {},
        affine = { 1, 0 }, pow = { 1 }, nan_to_num = {}, round = {}, clone = {}, cummax = { 1 }, median = { 1 },
      }
      for name, arguments in peri.util.ordered(same) do
        for _, dtype in ipairs { "f32", "f64", "i64" } do
          local whole = dtype == "i64" and (name == "mean" or name == "norm" or name == "logsumexp")
          for _, a in ipairs(whole and {} or { arguments, { nil } }) do
            local x = T.full({ 1, 1 }, 2, dtype, device)
            local rest = {}
            for i, v in ipairs(a) do rest[i] = v == "none" and x:ne(x) or v end
            local ok, y = pcall(F[name], x, unpack(rest))
            assert.is_true(ok or a ~= arguments, name .. ": " .. tostring(y))
            local before = ok and y:to("f64"):reshape(-1):to_list()[1]
            x:fill(7)
            if ok then assert.equal(before, y:to("f64"):reshape(-1):to_list()[1], name .. " of " .. dtype) end
          end
        end
      end
      local w = tensor { 2 }:requires_grad()
      local y = F.mean(w, 1)
      peri.no_grad(function() y:fill(0) end)
      assert.equal(2, w:item())
    end)

    it("functions that are flat have the gradient 0, whatever the one of their result is", function()
      for name, exponent in peri.util.ordered { floor = 1, ceil = 1, round = 1, trunc = 1, sign = 1, pow = 0 } do
        for _, dtype in ipairs { "f32", "f64", "f16" } do
          for _, up in ipairs { 1, math.huge, 0 / 0 } do
            local x = tensor { -1.5, 0, 2.5 }:requires_grad()
            local y = name == "pow" and F.pow(x:to(dtype), exponent) or F[name](x:to(dtype))
            y:backward(peri.full({ 3 }, up, dtype, device))
            assert.same({ 0, 0, 0 }, x:grad():to_list(), name .. " of " .. dtype)
          end
        end
      end
      local x = tensor { 0.25 }:requires_grad() -- the root of 0 has an infinite gradient
      F.sqrt(F.round(x)):sum():backward()
      assert.same({ 0 }, x:grad():to_list())
    end)

    it("a bound of clamp that is NaN makes all NaN, and what is below has no gradient", function()
      local nan = 0 / 0
      for _, dtype in ipairs { "f32", "f64", "f16", "bf16" } do
        for _, bounds in ipairs { { nan }, { nil, nan }, { math.huge, nan }, { nan, 1 } } do
          local x = tensor { -1, 0.5, 7 }:requires_grad()
          local y = x:to(dtype):clamp(bounds[1], bounds[2])
          y:sum():backward()
          assert.same({ 3, dtype }, { F.count_nonzero(y:isnan()):item(), y:dtype() })
          assert.same({ 0, 0, 0 }, x:grad():to_list())
        end
      end
    end)

    it("parts of one size: the last may be smaller, and one of nothing is there", function()
      local function sizes(t, ...)
        local list = {}
        for i, part in ipairs(t:split(...)) do list[i] = part:size(select(2, ...) or 1) end
        return list
      end
      assert.same({ 2, 2, 1 }, sizes(peri.zeros({ 5, 2 }, "f32", device), 2))
      assert.same({ 2, 2 }, sizes(peri.zeros({ 3, 4 }, "f32", device), 2, -1))
      assert.same({ 0 }, sizes(peri.zeros({ 0, 2 }, "f32", device), 3))
      assert.same({ 3 }, sizes(peri.zeros({ 3 }, "f32", device), 9))
    end)

    it("an index into nothing is told that nothing is allowed", function()
      local none, index = peri.zeros({ 2, 0 }, "f32", device), peri.zeros({ 2, 1 }, "i64", device)
      assert.error_matches(function() F.gather(none, 2, index) end,
        "index 0 at flat position 0, and nothing is allowed")
    end)

    it("gradients of biases without numbers have their shape", function()
      for rows = 0, 5 do
        local bias = peri.zeros({ 0 }, "f32", device):requires_grad()
        F.linear(peri.ones({ rows, 3 }, "f32", device), peri.ones({ 0, 3 }, "f32", device), bias):sum():backward()
        assert.same({ 0 }, bias:grad():shape())
      end
    end)

    it("norms below 1 have no gradient at 0", function()
      local x = tensor({ 4, 0, -1 }):requires_grad()
      x:norm(0.5):backward() -- (2 + 1)^2 = 9, whose derivative is sqrt(9 / |x|) sign(x)
      local grad = x:grad():to_list()
      for i, expected in ipairs { 1.5, 0, -3 } do assert.is_true(math.abs(grad[i] - expected) < 1e-5) end
    end)

    it("lerp's weight has b - a as its gradient, also where that is infinite", function()
      local a, b = tensor { math.huge, math.huge, 1 }, tensor { -3, -3, 2 }
      local weight = tensor({ 0.25, 0.75, 1 }):requires_grad()
      F.lerp(a, b, weight):sum():backward()
      assert.same({ -math.huge, -math.huge, 1 }, weight:grad():to_list())
    end)

    it("hinge_embedding_loss takes both sides of a target that is neither 1 nor -1", function()
      local t = tensor { 0.25, 0.25, 0.25 }
      assert.same({ 0.25, 0.75, 1 }, F.hinge_embedding_loss(t, tensor { 1, -1, 0 }, 1, "none"):to_list())
    end)

    it("distances of an f16 and an f32 tensor are f32", function()
      local a, b = tensor({ { 1, 2 } }, "f16"), tensor { { 4, 6 } }
      for _, f in ipairs { F.pairwise_distance, F.cdist } do
        assert.equal("f32", f(a, b):dtype())
        assert.equal("f32", f(b, a):dtype())
        assert.equal("f16", f(a, b:to "f16"):dtype())
      end
    end)

    it("cosine_embedding_loss has nothing for a target that is neither 1 nor -1", function()
      local a, b = tensor({ { 1, 2 }, { 1, 2 }, { 1, 2 } }):requires_grad(), tensor { { 2, 4 }, { 2, 4 }, { 2, 4 } }
      local loss = F.cosine_embedding_loss(a, b, tensor { 0, 0.5, 2 }, 0.1, "none")
      assert.same({ 0, 0, 0 }, loss:to_list())
      loss:sum():backward()
      assert.same({ 0, 0, 0, 0, 0, 0 }, a:grad():reshape(6):to_list())
    end)

    it("probabilities are numbers in 0..1 wherever a function takes them", function()
      for _, bad in ipairs { 1.5, -0.1, 0 / 0, math.huge } do
        for _, dtype in ipairs { "f32", "f64", "f16", "bf16" } do
          local good, p = tensor({ 0, 1, 0.5 }, dtype), tensor({ 0, 1, bad }, dtype)
          for what, f in pairs { bernoulli = function() return p:bernoulli() end,
            ["of x is"] = function() return F.binary_cross_entropy(p, good) end,
            ["of target is"] = function() return F.binary_cross_entropy(good, p) end } do
            assert.error_matches(f, what .. ".* allowed: .*0%.%.1")
          end
          assert.is_true(good:bernoulli():le(1):all():item() ~= 0)
        end
      end
    end)

    it("integers are close by all of their 64 bits", function()
      local big, most = 2 ^ 53 * 1LL, 0x7fffffffffffffffLL
      local a = tensor({ big + 1, big, 5, -big - 1, most }, "i64")
      local b = tensor({ big, big, 6, -big + 1, -most - 1 }, "i64")
      for tolerance, close in pairs { [0] = { 0, 1, 0, 0, 0 }, { 1, 1, 1, 0, 0 }, { 1, 1, 1, 1, 0 } } do
        assert.same(close, F.isclose(a, b, 0, tolerance):to_list())
      end
      assert.is_false(F.allclose(a, a + 1, 0, 0))
      assert.is_true(F.allclose(a, a, 0, 0))
      assert.is_false(F.allclose(a:slice(1, 4, 5), b:slice(1, 4, 5), 0, 2)) -- their difference needs 65 bits
      assert.same({ 1, 0 }, F.isclose(tensor({ 1, 0 }, "bool"), tensor({ 1, 1 }, "u8"), 0, 0):to_list())
    end)
  end)
end
