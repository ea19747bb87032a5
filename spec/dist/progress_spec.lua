-- Exchanges go on while ranks compute: nobody has to wait for them. And messages of any size, also to other machines,
-- where they go in pieces of 65,000 bytes up to 16 MiB, and of 512 KiB from there on.
-- mpirun: 2
-- machines: 1,1
local peri = require "perilune"
local worlds = require "spec.support.worlds"

describe("an exchange", function()
  --- Whether the last operation of this rank is still under way, without a look at the wires.
  local function pending(world) return world:record():match "([^\n]*)\n*$":match "pending" ~= nil end

  worlds.each("goes on between the operations of a forward and a backward pass", function(world)
    local n = 300000
    local x = peri.ones { 64, 64 }
    local w = peri.full({ 64, 64 }, 1 / 64, "f32"):requires_grad()
    local function compute(record)
      local y = x
      for _ = 1, 50 do y = y:matmul(w) end
      if record then y:sum():backward() end
    end
    compute(true)
    for _, record in ipairs { true, false } do
      world:barrier():wait()
      local work = world:all_to_all_v(peri.full({ 2 * n }, world:rank(), "f32"), { n, n }, { n, n })
      assert.is_true(pending(world))
      local round = 0
      while pending(world) do
        round = round + 1
        assert.is_true(round < 2000, "the exchange stands still while its ranks compute")
        compute(record)
      end
      local got = work:wait()
      assert.same({ 0, 0, 1, 1 }, { got:item(0), got:item(n - 1), got:item(n), got:item(2 * n - 1) })
    end
  end, { sizes = { 2 }, devices = { "cpu" }, only = "mpi" })

  worlds.each("carries messages of any size", function(world)
    for _, n in ipairs { 1, 16249, 16250, 16251, 32501, 2 ^ 22, 2 ^ 22 + 2 ^ 17 + 1 } do -- of 4 bytes
      local got = world:all_to_all_v(peri.full({ 2 * n }, world:rank() + 1, "i32"), { n, n }, { n, n }):wait():to "f64"
      local sums = { got:slice(1, 0, n):sum():item(), got:slice(1, n, 2 * n):sum():item() }
      assert.same({ n, 2 * n }, sums)
    end
  end, { sizes = { 2 }, devices = { "cpu" }, only = "mpi" })
end)
