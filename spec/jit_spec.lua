-- The functions of a training step compile: no aborted traces, no stitches (style J2). The harness is
-- spec/support/jit.lua.
local peri = require "perilune"
local support = require "spec.support.jit"

describe("the JIT harness", function()
  local function complaint(f)
    local ok, err = pcall(support.assert_compiles, "this", f)
    return not ok and err
  end

  it("accepts plain loops, inner loops and FFI calls", function()
    local sum, C = 0, peri.ffi.C
    if not jit.status() then return pending(support.OFF) end
    assert.is_false(complaint(function(i) sum = sum + i end))
    assert.is_false(complaint(function(i) for k = 1, i % 7 do sum = sum + k end end))
    assert.is_false(complaint(function() sum = sum + C.peri_abi_version() end))
  end)

  it("sees closures, stitches and code that is switched off", function()
    if not jit.status() then return pending(support.OFF) end
    assert.matches("NYI: bytecode", complaint(function(i) return function() return i end end))
    assert.matches("stitched at", complaint(function(i) return ("x%d"):format(i):gsub("x", "y") end))
    local function interpreted(i) return i end
    jit.off(interpreted)
    local told = complaint(function(i) return interpreted(i) end)
    assert.is_truthy(told and (told:match "JIT compilation disabled" or told:match "blacklisted"))
  end)

  it("passes an error of the function on", function()
    assert.error_matches(function() support.watch(function(i) if i == 5 then error("at five", 0) end end) end,
      "^at five$")
  end)
end)

for _, device in ipairs { "cpu", "opaque" } do
  describe("compiled on " .. device, function()
    local a = peri.Tensor.uniform({ 4, 6 }, -1, 1, 1, 0, "f32", device)
    local b = peri.zeros({ 4, 6 }, "f32", device)

    local hot = {
      { "copy and fill", function() b:copy(a):fill(1) end },
      { "item", function(i) return b:item(i % 24) end },
      { "shape queries", function() return a:dim() + a:numel() + a:size(-1) end },
      { "views, released by hand", function()
        local s = a:slice(2, 1, 3)
        local t = s:transpose(1, 2)
        t:release()
        s:release()
      end },
      { "reshape, left to the collector", function() a:reshape(24) end },
      { "casts", function() a:to("f64"):release() end },
      { "detach and requires_grad", function() a:detach():requires_grad():release() end },
      { "new tensors", function()
        peri.empty({ 2, 3 }, "f32", device):release()
        peri.zeros({ 2, 3 }, "f32", device):release()
      end },
    }
    for _, case in ipairs(hot) do
      it(case[1], function() support.assert_compiles(case[1], case[2]) end)
    end

    local function work(x)
      local s = x:slice(1, 0, 2)
      return s:numel()
    end
    it("scopes", function() support.assert_compiles("scope", function() return peri.scope(work, a) end) end)
    it("no_grad", function() support.assert_compiles("no_grad", function() return peri.no_grad(work, a) end) end)
  end)
end
