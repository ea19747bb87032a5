-- Tensors: making, views, copies between layouts, dtypes and devices, on both devices.
local peri = require "perilune"

for _, device in ipairs { "cpu", "opaque" } do
  describe("tensor on " .. device, function()
    local function t(data, dtype) return peri.tensor(data, dtype, device) end

    it("reads back what was written, through views", function()
      local a = t { { 1, 2, 3 }, { 4, 5, 6 } }
      assert.same({ { 1, 2, 3 }, { 4, 5, 6 } }, a:to_table())
      assert.same({ { 1, 4 }, { 2, 5 }, { 3, 6 } }, a:transpose(1, 2):to_table())
      assert.same({ { 2 }, { 5 } }, a:slice(2, 1, 2):to_table())
      assert.same({ { 1, 3 }, { 4, 6 } }, a:slice(-1, 0, 3, 2):to_table())
      for start = -3, 3 do -- negative bounds against positive ones
        for stop = start < 0 and start + 3 or start, 3 do
          local want = a:slice(2, start < 0 and start + 3 or start, stop):to_table()
          assert.same(want, a:slice(2, start, stop ~= 3 and stop - 3 or nil):to_table())
          assert.same(want, a:narrow(-1, start, stop - (start < 0 and start + 3 or start)):to_table())
        end
      end
      assert.same({ 1, 2, 3, 4, 5, 6 }, a:reshape(-1):to_table())
      assert.same({ { 1, 4, 2 }, { 5, 3, 6 } }, a:transpose(1, 2):reshape(2, 3):to_table())
      assert.equal(6, a:item(5))
      assert.equal(4, a:transpose(1, 2):item(1))
      assert.same({}, t({}):to_table())
    end)

    it("has powers", function() assert.same({ 1, 4, 9 }, (t { 1, -2, 3 } ^ 2):to_table()) end)

    it("writes through views", function()
      local a = peri.zeros({ 2, 3 }, "f32", device)
      a:slice(2, 1, 2):copy(t { { 7 }, { 8 } })
      a:slice(1, 0, 1):slice(2, 2, 3):fill(9)
      assert.same({ { 0, 7, 9 }, { 0, 8, 0 } }, a:to_table())
    end)

    it("casts between all dtypes", function()
      local dtypes = { "f64", "f32", "f16", "bf16", "i64", "i32", "i16", "i8", "u8", "bool", "c64", "c128" }
      for _, from in ipairs(dtypes) do
        local complex = from:match "^c"
        local source = complex and t({ { 0, 0 }, { 1, 2 }, { 100, 0 } }, from) or t({ 0, 1, 100 }, from)
        for _, to in ipairs(dtypes) do
          local got = source:to(to)
          assert.equal(to, got:dtype())
          local want = (to == "bool" or from == "bool") and { 0, 1, 1 } or { 0, 1, 100 }
          local list = got:to_list()
          if to:match "^c" then
            for i = 1, 3 do assert.equal(want[i], list[2 * i - 1], from .. " to " .. to) end
            assert.equal(complex and 2 or 0, list[4])
          else
            assert.same(want, list, from .. " to " .. to)
          end
        end
      end
    end)

    it("follows the rules of casts at the edges", function()
      local inf = math.huge
      assert.same({ 127, -128, 0, 1, -1 }, t({ 1e9, -1e9, 0 / 0, 1.9, -1.9 }):to("i8"):to_list())
      assert.same({ 255, 0, 0 }, t({ 300, -5, 0.99 }):to("u8"):to_list())
      assert.same({ inf, -inf, 65504, 0 }, t({ 65520, -1e9, 65519, 2 ^ -26 }):to("f16"):to_list())
      assert.same({ 2 ^ -24, 2 ^ -23, 2 ^ -24 * 1023 },
        t({ 2 ^ -24, 2 ^ -24 * 1.5, 2 ^ -24 * 1023 }):to("f16"):to_list())
      assert.same({ 1, 1 + 2 ^ -6, 1 + 2 ^ -7 },
        t({ 1 + 2 ^ -8, 1 + 2 ^ -7 + 2 ^ -8, 1 + 2 ^ -8 + 2 ^ -20 }):to("bf16"):to_list())
      -- one rounding from f64 to f16, not two
      assert.equal(1 + 2 ^ -10, t({ 1 + 2 ^ -11 + 2 ^ -40 }, "f64"):to("f16"):item())
      assert.same({ 1, 0, 1 }, t({ 0.1, 0, 0 / 0 }):to("bool"):to_list())
      assert.same({ -56 }, t({ 200 }, "i64"):to("i8"):to_list())
    end)

    it("makes numbers that do not depend on the shape around them", function()
      local a = peri.Tensor.uniform({ 1000 }, -1, 1, 7, 3, "f32", device):to_list()
      local b = peri.Tensor.uniform({ 10 }, -1, 1, 7, 3, "f32", device):to_list()
      for i = 1, 10 do assert.equal(a[i], b[i]) end
      local sum, square = 0, 0
      local n = peri.Tensor.normal({ 20000 }, 1, 2, 5, 0, "f64", device):to_list()
      for _, x in ipairs(n) do
        sum = sum + x
        square = square + x * x
      end
      local mean = sum / #n
      assert.near(1, mean, 0.05)
      assert.near(4, square / #n - mean * mean, 0.15)
      for _, x in ipairs(a) do assert.is_true(x >= -1 and x < 1) end
      for _, bad in ipairs { { 1, 0.5 }, { 0 / 0, 1 }, { 0, 1 / 0 } } do
        assert.error_matches(function() peri.Tensor.uniform({ 2 }, bad[1], bad[2], 7) end,
          "allowed: finite ones, in this order")
      end
      assert.error_matches(function() peri.Tensor.normal({ 2 }, 0, -1, 7) end, "mean 0 and deviation %-1, allowed")
      assert.error_matches(function() peri.nn.functional.layer_norm(peri.ones { 2 }, 1, nil, nil, -1) end,
        "eps %-1, allowed: 0 and more")
    end)

    it("sends gradients back through views", function()
      local w = t({ { 1, 2, 3 }, { 4, 5, 6 } }):requires_grad()
      w:slice(2, 0, 2):transpose(1, 2):reshape(4):backward(t { 1, 10, 100, 1000 })
      assert.same({ { 1, 100, 0 }, { 10, 1000, 0 } }, w:grad():to_table())
      w:transpose(1, 2):to("f64"):backward(t({ { 1, 1 }, { 1, 1 }, { 1, 1 } }, "f64"))
      assert.same({ { 2, 101, 1 }, { 11, 1001, 1 } }, w:grad():to_table())
      for _, dtype in ipairs { "f16", "bf16" } do
        w:slice(1, 1, 2):to(dtype):backward(t({ { 1, 2, 0.5 } }, dtype))
      end
      assert.same({ { 2, 101, 1 }, { 13, 1005, 2 } }, w:grad():to_table())
    end)

    it("goes back from several tensors at once", function()
      local w = t({ 1, 2, 3 }):requires_grad()
      local doubled, leaf = w * 2, t({ 5, 6 }):requires_grad()
      local total = doubled:sum()
      peri.backward({ total, leaf, doubled, doubled }, { t(1):reshape {}, t { 1, 2 }, t { 1, 10, 100 }, t { 3, 0, 0 } })
      assert.same({ 2 * (1 + 1 + 3), 2 * (1 + 10), 2 * (1 + 100) }, w:grad():to_list())
      assert.same({ 1, 2 }, leaf:grad():to_list())
      peri.backward { w:sum() }
      assert.same({ 11, 23, 203 }, w:grad():to_list())
      assert.error_matches(function() peri.backward({ w:sum() }, {}) end, "backward: 0 gradients for 1 tensors")
      assert.error_matches(function() peri.backward {} end, "peri_backward_new: 0 roots, allowed: 1 and more")
      assert.error_matches(function() peri.backward({ w, doubled }, { w:detach(), w:detach() }) end,
        "already used by a backward pass")
      assert.same({ 11, 23, 203 }, w:grad():to_list())
    end)

    it("names what is wrong", function()
      local a = t { { 1, 2, 3 }, { 4, 5, 6 } }
      assert.error_matches(function() a:slice(2, -4) end, "slice: start is %-4 of tensor f32 %[2, 3%].*%-3%.%.3")
      assert.error_matches(function() a:narrow(2, 1, 3) end, "%[1, 4%).*f32 %[2, 3%].*stop <= 3")
      assert.error_matches(function() a:slice(2, 2, 0, -1) end, "by %-1.*step >= 1")
      assert.error_matches(function() a:slice(2, 0, 4) end, "%[0, 4%).*f32 %[2, 3%].*stop <= 3")
      assert.error_matches(function() a:reshape(4) end, "6 elements, the new shape 4")
      assert.error_matches(function() a:copy(t { 1, 2 }) end, "does not expand to size 3")
      assert.error_matches(function() a:item(6) end, "element 6.*allowed: 0%.%.5")
      assert.error_matches(function() peri.empty({ 1 }, "f33") end, "'f33' is no dtype")
      assert.error_matches(function() peri.empty({ -1 }) end, "%-1")
      assert.error_matches(function() peri.empty({ 1 }, "f32", "gpu") end, "gpu")
      a:release()
      assert.error_matches(function() a:shape() end, "released")
    end)
  end)
end

describe("tensors outside scopes", function()
  --- Collections that `f` forces.
  local function forced(f)
    local globals, n = package.loaded._G, 0 -- a spec has an environment of its own
    local real = globals.collectgarbage
    globals.collectgarbage = function(what, ...)
      if what == nil then n = n + 1 end
      return real(what or "collect", ...)
    end
    local ok, why = pcall(f)
    globals.collectgarbage = real
    assert(ok, why)
    return n
  end

  it("force no collection when they are released, however many they are", function()
    assert.equal(0, forced(function()
      for _ = 1, 640 do peri.zeros({ 2 ^ 18 }):release() end -- 640 MiB
    end))
  end)

  it("force few collections while they are held, however often as many are held again", function()
    local n = forced(function()
      for _ = 1, 20 do
        local held = {}
        for i = 1, 640 do held[i] = peri.zeros { 2 ^ 16 } end -- 160 MiB at the same time
        for i = 1, 640 do held[i]:release() end
      end
    end)
    assert.is_true(n <= 12, tostring(n)) -- two at a time
  end)

  it("are collected when they are not, before they fill the memory", function()
    collectgarbage()
    collectgarbage()
    local before, most = tonumber(peri.ffi.C.peri_mem_live()), 0
    local n = forced(function()
      for _ = 1, 1280 do
        peri.zeros { 2 ^ 18 }
        most = math.max(most, tonumber(peri.ffi.C.peri_mem_live()) - before)
      end
    end)
    assert.is_true(n > 0)
    assert.is_true(most < 400 * 2 ^ 20, tostring(most))
  end)
end)

describe("scopes", function()
  it("release what was made, but not what was kept", function()
    collectgarbage()
    collectgarbage()
    local before = tonumber(peri.ffi.C.peri_mem_objects())
    local kept
    peri.scope(function()
      local a = peri.ones { 100 }
      kept = peri.keep(a:reshape(10, 10))
      a:reshape(5, 20)
    end)
    assert.equal(before + 1, tonumber(peri.ffi.C.peri_mem_objects()))
    assert.equal(10, kept:size(1))
    kept:release()
    assert.equal(before, tonumber(peri.ffi.C.peri_mem_objects()))
  end)

  it("release when the body fails, and keep its error", function()
    local before = tonumber(peri.ffi.C.peri_mem_objects())
    local ok, err = pcall(peri.scope, function()
      peri.ones { 3 }
      peri.tensor({ 1 }):reshape(7)
    end)
    assert.is_false(ok)
    assert.equal("EINVAL", err.name)
    assert.matches("new shape 7", tostring(err))
    assert.equal(before, tonumber(peri.ffi.C.peri_mem_objects()))
  end)
end)
