-- Awaitables: idempotent waits, callbacks, awaitables of awaitables, lazy ones that stand for their results.
-- (mpirun: 2)
local dist = require "perilune.dist"
local peri = require "perilune"
local util = require "perilune.util"
local worlds = require "spec.support.worlds"

local Slow = util.class("Slow", dist.Awaitable)
function Slow:init(result)
  dist.Awaitable.init(self)
  self.result, self.waits = result, 0
end
function Slow:_wait_impl()
  self.waits = self.waits + 1
  if self.result == "fail" then error("no result", 0) end
  return self.result
end

describe("Awaitable", function()
  it("waits once, however often it is asked", function()
    local a = Slow(7)
    assert.is_false(a:test())
    assert.equal(7, a:wait())
    assert.equal(7, a:wait())
    assert.equal(1, a.waits)
    assert.is_true(a:test())
  end)

  it("raises the same error again", function()
    local a = Slow "fail"
    assert.error_matches(function() a:wait() end, "no result")
    assert.error_matches(function() a:wait() end, "no result")
    assert.equal(1, a.waits)
    assert.is_true(a:test())
  end)

  it("runs callbacks in order, each on the result of the one before, once", function()
    local calls = 0
    local a = Slow(2):and_then(function(x) calls = calls + 1; return x * 10 end):and_then(function(x) return x + 1 end)
    assert.equal(21, a:wait())
    assert.equal(21, a:wait())
    assert.equal(1, calls)
    assert.error_matches(function() a:and_then(print) end, "already waited for")
    local bad = Slow(1):and_then(function() error("in a callback", 0) end)
    assert.error_matches(function() bad:wait() end, "in a callback")
    assert.error_matches(function() bad:wait() end, "in a callback")
  end)

  it("may result in an awaitable", function()
    assert.equal(5, Slow(Slow(5)):wait():wait())
  end)

  it("does not wait for itself", function()
    local a = Slow(1)
    a._wait_impl = function(self) return self:wait() end
    assert.error_matches(function() a:wait() end, "waits for itself")
  end)

  it("can be there already, or be a list", function()
    local now = dist.NoWait "x"
    assert.is_true(now:test())
    assert.equal("x", now:wait())
    assert.is_nil(dist.NoWait():wait())
    local list = dist.ListAwaitable { Slow(1), now, Slow(3) }
    assert.is_false(list:test())
    assert.same({ 1, "x", 3 }, list:wait())
  end)

  it("has to be defined", function()
    local Empty = util.class("Empty", dist.Awaitable)
    assert.error_matches(function() Empty():wait() end, "Empty: _wait_impl is not defined")
  end)
end)

describe("LazyAwaitable", function()
  it("waits at the first use", function()
    local inner = Slow { x = 3, double = function(self) return self.x * 2 end }
    local lazy = dist.LazyAwaitable(inner)
    assert.equal(0, inner.waits)
    assert.equal(3, lazy.x)
    assert.equal(6, lazy:double())
    lazy.x = 4
    assert.equal(4, inner.result.x)
    assert.equal(8, lazy:wait():double())
    assert.equal(1, inner.waits)
    assert.equal(inner.result, dist.resolve(lazy))
    assert.equal(9, dist.resolve(9))
  end)

  it("takes part in arithmetic and calls", function()
    local function lazy(x) return dist.LazyAwaitable(Slow(x)) end
    assert.equal(5, lazy(2) + 3)
    assert.equal(-1, 2 - lazy(3))
    assert.equal(6, lazy(2) * lazy(3))
    assert.equal(4, lazy(8) / 2)
    assert.equal(-2, -lazy(2))
    assert.equal(8, lazy(2) ^ 3)
    assert.equal(1, lazy(7) % 2)
    assert.equal("ab", lazy "a" .. "b")
    assert.equal(12, lazy(function(x) return x + 2 end)(10))
    assert.equal("41", tostring(lazy(41)))
    assert.equal(1, dist.LazyNoWait { y = 1 }.y)
    assert.equal(2, lazy(1):and_then(function(x) return x + 1 end):wait())
  end)

  it("says in words what its result cannot do", function()
    local function refused(words, f)
      local ok, err = pcall(f)
      assert.is_false(ok, words)
      assert.equal(words, err.message)
    end
    for _, make in ipairs { dist.LazyNoWait, function(x) return dist.LazyAwaitable(Slow(x)) end } do
      refused("no operator '+' for nil and a function", function() return make(nil) + print end)
      refused("no operator '*' for 2 and a table", function() return 2 * make {} end)
      refused("no operator '..' for a table and 'x'", function() return make {} .. "x" end)
      refused("no operator '-' for true and true", function() return -make(true) end)
    end
    local own = setmetatable({}, { __add = function() error("words of a script", 0) end })
    local ok, err = pcall(function() return dist.LazyNoWait(own) + 1 end)
    assert.is_false(ok)
    assert.equal("words of a script", tostring(err):match "words of a script")
  end)

  it("stands for a lazy result of a lazy one", function()
    assert.equal(3, dist.LazyAwaitable(dist.LazyNoWait(dist.LazyNoWait { z = 3 })).z)
  end)

  it("stands for handles in compiled code too", function()
    local Tensor = require "perilune.tensor"
    local kt = peri.KeyedTensor { keys = { "a", "b" }, length_per_key = { 2, 3 },
      values = peri.ones({ 4, 5 }, "f32", "cpu") }
    for _ = 1, 500 do
      local lazy = dist.LazyNoWait(kt)
      assert.equal(5, lazy:values():size(2))
      assert.equal(3, lazy["b"]:size(2))
      assert.is_true(lazy.ptr == kt.ptr)
    end
    for _ = 1, 500 do assert.is_true(Tensor.ptr(dist.LazyNoWait(kt:values())) ~= nil) end
  end)

  it("carries errors to the place of use", function()
    local lazy = dist.LazyAwaitable(Slow "fail")
    assert.error_matches(function() return lazy.anything end, "no result")
  end)

  worlds.each("stands for a tensor in tensor operations", function(world, device, n)
    local lazy = dist.LazyAwaitable(world:all_reduce(peri.ones({ 2, 2 }, "f32", device)))
    local copy = peri.zeros({ 2, 2 }, "f32", device):copy(lazy)
    assert.same({ n, n, n, n }, copy:to_list())
    assert.same({ 2, 2 }, lazy:shape())
    assert.same({ { n, n }, { n, n } }, lazy:to_table())
  end, { sizes = { 1, 3 } })

  worlds.each("stands for its result wherever a tensor or a container is wanted", function(world, device, n)
    local Tensor, F = peri.Tensor, peri.nn.functional
    local waits = 0
    local function lazy(value)
      return dist.LazyAwaitable(world:all_reduce(peri.full({ 2, 3 }, value, "f32", device)):and_then(function(t)
        waits = waits + 1
        return t
      end))
    end
    local two = peri.full({ 2, 3 }, 2, "f32", device)
    local uses = {
      function(x) return F.add(x, two) end, function(x) return F.add(two, x) end, function(x) return x + two end,
      function(x) return two + x end, function(x) return two:add(x) end, function(x) return x - x + two end,
      function(x) return F.mul(x, x) end, function(x) return 2 * x end, function(x) return x / 2 end,
      function(x) return -x end, function(x) return x:relu() end,
      function(x) return F.matmul(x, two:transpose(1, 2)) end, function(x) return F.cat({ x, two }, 1) end,
      function(x) return x:sum(1) end, function(x) return x:slice(1, 0, 1) end, function(x) return x:to "f64" end,
      function(x) return x:reshape(-1) end, function(x) return world:all_gather(x):wait() end,
      function(x) return F.softmax(x, 2) end, function(x) return world:broadcast(x, 0):wait() end,
    }
    for i, use in ipairs(uses) do
      local before, x = waits, lazy(i)
      assert.equal(before, waits)
      local got = use(x)
      assert.equal(before + 1, waits, "use " .. i)
      assert.same(use(peri.full({ 2, 3 }, i * n, "f32", device)):to_list(), dist.resolve(got):to_list(), "use " .. i)
    end
    assert.is_true(Tensor.is(lazy(1)))
    assert.is_false(Tensor.is(dist.LazyNoWait { 1 }))
    local kjt = peri.KeyedJaggedTensor { keys = { "a" }, values = peri.tensor({ 1, 2 }, "i64", device),
      lengths = peri.tensor({ 2 }, "i64", device) }
    assert.is_true(peri.KeyedJaggedTensor.is(dist.LazyNoWait(kjt)))
    local p = peri.full({ 2 }, 3, "f32", device):requires_grad()
    F.mul(dist.LazyNoWait(p), dist.LazyNoWait(p)):sum():backward()
    assert.same({ 6, 6 }, p:grad():to_list())
  end, { sizes = { 1, 2 } })

  it("may stand for one element of a result that several share", function()
    local parent = Slow { a = { x = 1 }, b = { x = 2 } }
    local a, b = dist.GetItemLazyAwaitable(parent, "a"), dist.GetItemLazyAwaitable(parent, "b")
    assert.equal(0, parent.waits)
    assert.is_false(a:test())
    assert.equal(2, b.x)
    assert.equal(1, a.x)
    assert.equal(1, parent.waits)
    assert.is_true(a:test())
    assert.equal(5, dist.GetItemLazyAwaitable(dist.LazyNoWait(dist.LazyNoWait { 5 }), 1):wait())
    assert.error_matches(function() return dist.GetItemLazyAwaitable(Slow "fail", 1).x end, "no result")
  end)

  worlds.each("is waited for before lists of operands are filled, which ranks share", function(world, device, n)
    local F, r = peri.nn.functional, world.rank_number
    local function lazy() return dist.LazyAwaitable(world:all_reduce(peri.full({ 2, 2 }, r + 1, "f32", device))) end
    local sum, own = n * (n + 1) / 2, peri.full({ 1, 2 }, 10 + r, "f32", device)
    assert.same({ 10 + r, 10 + r, sum, sum, sum, sum }, F.cat({ own, lazy() }, 1):reshape(-1):to_list())
    assert.same({ 10 + r, sum }, F.stack({ peri.full({ 2, 2 }, 10 + r, "f32", device), lazy() }, 1):slice(2, 0,
      1):slice(3, 0, 1)
      :reshape(-1):to_list())
  end, { sizes = { 1, 2, 3 } })

  it("may stand for views that are asked for before they are needed", function()
    local t = peri.tensor({ 0, 1, 2, 3, 4, 5 }, "f32")
    local waits = 0
    local Tensors = util.class("Tensors", dist.Awaitable)
    function Tensors:_wait_impl() -- luacheck: ignore 212
      waits = waits + 1
      return { numbers = function() return t end }
    end
    local awaitable = require "perilune.dist.awaitable"
    local view = awaitable.MethodLazyAwaitable(Tensors(), "numbers"):reshape(-1, 3):slice(1, 1, 2)
    local five = awaitable.MethodLazyAwaitable(Tensors(), "numbers"):reshape(1, 1, 2, 1, 3)
    assert.equal(1, waits) -- five sizes are not kept for later
    assert.is_false(view:test())
    peri.scope(function() assert.same({ 3, 4, 5 }, view:reshape(-1):to_list()) end)
    assert.equal(2, waits)
    -- made outside the scope in which it was needed first, and so not released with it
    assert.same({ 1, 3 }, view:shape())
    assert.same({ 1, 1, 2, 1, 3 }, five:shape())
    assert.same({ 6 }, awaitable.MethodLazyAwaitable(dist.NoWait { numbers = function() return t end },
      "numbers"):reshape({ 6 }):shape())
    assert.error_matches(function() view:reshape(7):shape() end, "reshape")
  end)

  worlds.each("of several phases makes progress while others are waited for", function(world, device, n)
    local Two = util.class("Two", dist.Awaitable)
    function Two:init() -- sizes first, then the data
      dist.Awaitable.init(self)
      self.first = world:all_gather(peri.tensor({ world.rank_number }, "i64", device))
    end
    function Two:_wait_impl()
      local rows = self.first:wait():to_list()
      return world:all_gather_v(peri.full({ world.rank_number, 2 }, world.rank_number, "f32", device), rows)
    end
    local got = Two():wait():wait()
    assert.equal(n * (n - 1) / 2, got:size(1))
  end, { sizes = { 2, 3 } })
end)
