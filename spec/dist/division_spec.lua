-- Whether gradients that exchanges bring back are divided by the size of the group: of one call, else of the group,
-- else of the script, else of the process.
local ops = require "perilune.dist.ops"
local peri = require "perilune"
local worlds = require "spec.support.worlds"
local ffi = require "ffi"
local P = require "perilune.ffi"
local C = P.C

describe("gradient division", function()
  worlds.each("follows call, group, script, process, in this order", function(world, device, n)
    local ranks = {}
    for r = 1, n do ranks[r] = r - 1 end
    local group = world:new_group(ranks, "divided")
    local function divided(division)
      local x = peri.ones({ n, 1 }, "f64", device):requires_grad()
      ops.reduce_scatter_base_pooled { input = x, group = group,
        gradient_division = division }:wait():backward(peri.ones({ 1, 1 }, "f64", device))
      local g = x:grad():item(0)
      assert(math.abs(g - 1) < 1e-12 or math.abs(g - 1 / n) < 1e-12, g)
      return math.abs(g - 1) > 1e-9
    end
    local yes = n > 1 -- a group of one exchanges nothing
    assert.equal(yes, divided())
    world:barrier():wait()
    P.check(C.peri_exchange_division_set(nil, C.PERI_DIVISION_OFF)) -- of the process: all ranks of a sim world
    world:barrier():wait()
    local ok, err = pcall(function()
      assert.is_false(C.peri_exchange_division(nil))
      assert.is_false(ops.get_gradient_division(group))
      assert.is_false(divided())
      assert.equal(yes, divided(true))
      ops.set_gradient_division(true)
      assert.equal(yes, divided())
      ops.set_gradient_division(false, group)
      assert.is_false(divided())
      assert.is_false(C.peri_exchange_division(group:ptr()))
      assert.equal(yes, divided(true))
      ops.set_gradient_division(true, group)
      ops.set_gradient_division(false)
      assert.equal(yes, divided())
      assert.is_false(divided(false))
      world:barrier():wait()
    end)
    C.peri_exchange_division_set(nil, C.PERI_DIVISION_ON)
    if not ok then error(err, 0) end
  end)

  it("is on or off", function()
    assert.error_matches(function() P.check(C.peri_exchange_division_set(nil, 7)) end, "7")
    assert.error_matches(function() P.check(C.peri_exchange_division_set(nil, -1)) end, "%-1")
    assert.is_true(C.peri_exchange_division(ffi.cast("peri_group *", nil)))
  end)
end)
