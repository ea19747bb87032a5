-- Places of triangles, parts that a mask picks, and what is drawn of several words, each beside its definition written
-- out; on both devices.
-- cuda: always
local peri = require "perilune"
local F = peri.nn.functional
local devices = require "spec.support.devices"
local gradcheck = require "spec.support.gradcheck"

for _, device in ipairs(devices) do
  describe("picking on " .. device, function()
    it("triu_indices and tril_indices are the places right and left of the diagonal", function()
      for _, size in ipairs { { 3, 3 }, { 2, 5 }, { 5, 2 }, { 0, 3 }, { 3, 0 }, { 1, 1 } } do
        for k = -6, 6 do
          for name, inside in pairs { triu_indices = function(r, c) return c - r >= k end,
            tril_indices = function(r, c) return c - r <= k end } do
            local rows, columns = {}, {}
            for r = 0, size[1] - 1 do
              for c = 0, size[2] - 1 do
                if inside(r, c) then rows[#rows + 1], columns[#columns + 1] = r, c end
              end
            end
            local places = peri[name](size[1], size[2], k, device)
            assert.same({ 2, #rows }, places:shape())
            assert.same({ rows, columns }, places:to_table())
          end
        end
      end
      assert.error_matches(function() peri.triu_indices(2, 2, 2LL ^ 60) end, "diagonals %-2%^53")
    end)

    it("x[mask] is the parts where the mask of the first sizes is true, with their gradient", function()
      for _, sizes in ipairs { { { 3, 4 }, { 3 } }, { { 3, 4 }, { 3, 4 } }, { { 2, 3, 2 }, { 2, 3 } },
        { { 3, 0 }, { 3 } }, { { 4 }, {} }, { { 0, 2 }, { 0 } } } do
        local shape, own = sizes[1], sizes[2]
        local t = peri.rand(shape, "f32", device):requires_grad()
        local mask = peri.rand(own, "f32", device):gt(0.4)
        local some = t[mask]
        local n, width = mask:sum():item(), t:numel() / math.max(1, mask:numel())
        local list, chosen, expected, grad = t:to_list(), mask:to_list(), {}, {}
        for i = 1, #chosen do
          for j = 1, width do
            if chosen[i] ~= 0 then expected[#expected + 1] = list[(i - 1) * width + j] end
            grad[#grad + 1] = chosen[i] ~= 0 and 2 or 0
          end
        end
        assert.equal(n, some:size(1))
        assert.same(expected, some:to_list())
        if #grad > 0 then
          (some * 2):sum():backward()
          assert.same(grad, t:grad():to_list())
        end
      end
      local x = peri.rand({ 4, 3 }, "f32", device):transpose(1, 2) -- neither it nor its mask lies in order
      local mask = peri.rand({ 4, 3 }, "f32", device):gt(0.5):transpose(1, 2)
      assert.is_true(F.equal(F.masked_select(x, mask), x[mask]))
    end)

    it("new_* and empty_like are of a tensor's dtype and on its device", function()
      local t = peri.zeros({ 2, 3 }, "f64", device)
      for name, made in pairs { new_empty = t:new_empty { 4 },
        new_zeros = t:new_zeros { 4 }, new_ones = t:new_ones { 4 },
        new_full = t:new_full({ 4 }, 7), new_tensor = t:new_tensor { 1, 2, 3, 4 } } do
        assert.same({ name, { 4 }, "f64", t:device() }, { name, made:shape(), made:dtype(), made:device() })
      end
      assert.same({ 7, 7 }, t:new_full({ 2 }, 7):to_list())
      assert.same({ "i32", { 2, 3 } }, { peri.empty_like(t, "i32"):dtype(), peri.empty_like(t):shape() })
      local other = t:new_ones({ 1 }, "i64", "cpu")
      assert.same({ "i64", "cpu" }, { other:dtype(), other:device() })
      assert.same({ { 1, 3 }, 3, 8, 1 }, { t:transpose(1, 2):stride(), t:stride(-2), t:element_size(), peri.zeros({ 1 },
        "bool"):element_size() })
      assert.error_matches(function() t:stride(3) end, "dimension 3 of 2")
    end)

    it("what is made of others has the gradients of finite differences", function()
      local ids, places = peri.tensor({ 1, 0, 1 }, "i64", device), peri.tensor({ { 1, 0, 1 }, { 0, 0, 1 } }, "i64",
        device)
      for _, case in ipairs {
        { function(x) return (x * x + 0.3):log2() + (x * x + 0.3):log10() + x:exp2() + x:selu() + x:mish() end,
          { { 2, 3 } } },
        { function(x, y, z) return F.addcmul(x, y, z, 2) + F.logaddexp(x, y) end, { { 2, 3 }, { 2, 3 }, { 3 } } },
        { function(x) return x:glu():unflatten(2, { 3, 1 }):movedim(3, 1) end, { { 2, 6 } } },
        { function(x, y) return x:index_copy(2, ids:slice(1, 0, 2), y) + x:index_fill(1, ids, 3) end,
          { { 2, 3 }, { 2, 2 } } },
        { function(x, y) return x:scatter_add(1, places, y:prod()):square() end, { { 2, 3 }, { 2 } } }, -- one for all
        { function(x, y) return x:scatter_reduce(1, places, y, "mean"):square() end, { { 2, 3 }, { 2, 3 } } },
        { function(x, y) return x:scatter_reduce(1, places, y, "amin", false) end, { { 2, 3 }, { 2, 3 } } },
        { function(x, y) -- without dimensions
          return x:sum():scatter_reduce(1, peri.tensor(0, "i64", device), y:sum(), "amax", false)
        end, { { 2 }, { 3 } } },
        { function(x, y) return F.gaussian_nll_loss(x, y, x * y + 2) + F.poisson_nll_loss(x * y, places) end,
          { { 2, 3 }, { 2, 3 } } },
      } do
        for _, layout in ipairs { "contiguous", "transposed" } do
          gradcheck.check(case[1], case[2], { device = device, layout = layout })
        end
      end
      local x = peri.tensor({ 2, 2, 5 }, "f32", device):requires_grad() -- of equal ones one has the gradient
      local most = peri.zeros({ 2 }, "f32", device):scatter_reduce(1, ids, x, "amax")
      most:sum():backward()
      assert.same({ { 2, 5 }, 2 }, { most:to_list(), x:grad():sum():item() })
      assert.error_matches(function() x:scatter_reduce(1, ids, x, "prod") end, "'prod', allowed: sum, mean, amax, amin")
      assert.error_matches(function() x:scatter(1, ids, x:sum()) end, "to put it, expand it to the index")
      assert.error_matches(function() x:unflatten(1, { 2, -1 }) end, "whose product is 3")
      assert.error_matches(function() x:glu() end, "an even size")
      assert.error_matches(function() peri.nn.utils.vector_to_parameters(x, { x, x }) end, "one dimension of 6")
      peri.nn.utils.vector_to_parameters(peri.arange(6):to("f32", device), { x, x:reshape(3, 1) })
      assert.same({ 3, 4, 5 }, x:to_list()) -- it is in the list twice
    end)

    it("a number of two words is one draw and 2^-24 of the next", function()
      peri.nn.manual_seed(3)
      local order = peri.randperm(9, device)
      peri.nn.manual_seed(3)
      local first, second = peri.rand({ 9 }, "f32", device):to "f64", peri.rand({ 9 }, "f32", device):to "f64"
      assert.is_true(F.equal((first + second * 2 ^ -24):argsort(), order))
    end)
  end)
end
