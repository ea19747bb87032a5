-- collective_utils: one rank computes, everybody gets the result or the error; leaders; Lua values as bytes.
local dist = require "perilune.dist"
local peri = require "perilune"
local serial = require "perilune.serial"
local worlds = require "spec.support.worlds"
local ffi = require "ffi"
local utils = dist.collective_utils

describe("invoke_on_rank_and_broadcast_result", function()
  worlds.each("gives every rank the value", function(world, _, n)
    local calls = 0
    local value = { 1, 2.5, "text\0with\nbytes", { deep = { true, false } }, [7] = -0.0, name = "x", huge = math.huge,
      empty = {} }
    for root = 0, n - 1 do
      local got = utils.invoke_on_rank_and_broadcast_result(world, root, function(a, b)
        calls = calls + 1
        value.rank, value.sum = world.rank_number, a + b
        return value
      end, 3, 4)
      value.rank, value.sum = root, 7
      assert.same(value, got)
      assert.equal(1 / -0.0, 1 / got[7])
    end
    assert.equal(1, calls)
    for _, plain in ipairs { true, false, 0, "", ("long "):rep(10000) } do
      assert.equal(plain, utils.invoke_on_rank_and_broadcast_result(world, n - 1, function() return plain end))
    end
    assert.is_nil(utils.invoke_on_rank_and_broadcast_result(world, 0, function() end))
  end, { devices = { "cpu" } })

  worlds.each("raises its error everywhere, and the group lives on", function(world, _, n)
    local rank, root = world.rank_number, n - 1
    local function raised(f)
      local ok, err = pcall(utils.invoke_on_rank_and_broadcast_result, world, root, f)
      assert.is_false(ok)
      return type(err) == "table" and err.message or err, err
    end
    local text, there = raised(function() error("no more ids", 0) end)
    assert.matches("^no more ids", text)
    if rank ~= root then assert.equal(root, there.rank) end -- where it comes from
    local _, misuse = raised(function() return peri.tensor "x" end)
    assert.same({ root, "tensor: entry [1] is 'x'" }, { misuse.rank, misuse.message:sub(1, 24) })
    local _, err = raised(function() return peri.tensor({ 1 }):reshape(7) end)
    assert.equal("EINVAL", err.name)
    assert.matches("the value is a function, allowed", (raised(function() return print end)))
    assert.matches('the value%["a"%]%[2%] is a cdata', (raised(function() return { a = { 1, peri.ones { 1 } } } end)))
    assert.matches("is an object %(peri.Group%)", (raised(function() return { world } end)))
    assert.matches("contains itself", (raised(function()
      local loop = {}
      loop.loop = loop
      return loop
    end)))
    assert.matches("has a boolean as key", (raised(function() return { [true] = 1 } end)))
    assert.equal(5, utils.invoke_on_rank_and_broadcast_result(world, 0, function() return 5 end))
  end, { devices = { "cpu" } })

  worlds.each("counts ranks in the group, not in the world", function(world, _, n)
    local members = {}
    for r = 1, n - 1 do members[r] = n - r end
    local group = world:new_group(members, "others")
    if not group then return end
    local got = utils.invoke_on_rank_and_broadcast_result(group, 0, function() return world.rank_number end)
    assert.equal(n - 1, got)
  end, { devices = { "cpu" }, sizes = { 2, 3, 5 } })

  it("is a plain call without a group, and checks its arguments", function()
    assert.equal(3, utils.invoke_on_rank_and_broadcast_result(nil, 0, function(x) return x end, 3))
    assert.error_matches(function() utils.invoke_on_rank_and_broadcast_result(nil, 0, 5) end, "func is a number")
  end)

  worlds.each("checks the rank", function(world, _, n)
    assert.error_matches(function() utils.invoke_on_rank_and_broadcast_result(world, n, print) end, "rank is " .. n)
    assert.error_matches(function() utils.invoke_on_rank_and_broadcast_result(world, -1, print) end, "rank is %-1")
  end, { devices = { "cpu" }, sizes = { 2 } })
end)

describe("leaders", function()
  worlds.each("lead", function(world, _, n)
    local rank = world.rank_number
    assert.equal(rank == 0, utils.is_leader(world))
    assert.equal(rank == n - 1, utils.is_leader(world, n - 1))
    local ran = 0
    local plan = utils.run_on_leader(world, n - 1)(function(x)
      ran = ran + 1
      return { x, "from " .. world.rank_number }
    end)
    assert.same({ 1, "from " .. n - 1 }, plan(1))
    assert.same({ 2, "from " .. n - 1 }, plan(2))
    assert.equal(rank == n - 1 and 2 or 0, ran)
  end, { devices = { "cpu" } })

  it("a process alone leads itself", function()
    assert.is_true(utils.is_leader(nil))
    assert.is_false(utils.is_leader(nil, 1))
    assert.equal(4, utils.run_on_leader(nil, 0)(function(x) return x * 2 end)(2))
    assert.error_matches(function() utils.is_leader(nil, -1) end, "leader_rank is %-1")
  end)
end)

describe("all_gather_object", function()
  worlds.each("gives every rank the values of all", function(world, _, n)
    local rank = world:rank()
    local got = world:all_gather_object({ rank = rank, list = { 1, 2 } }, "somebody")
    for r = 1, n do assert.same({ rank = r - 1, list = { 1, 2 } }, got[r]) end
    assert.same({}, world:all_gather_object(nil)) -- nil of every rank
    local flags = world:all_gather_object(rank == 0)
    for r = 1, n do assert.equal(r == 1, flags[r]) end
  end, { devices = { "cpu" } })

  worlds.each("of two purposes that meet is an error on all ranks, and the group lives on", function(world, _, n)
    local own, last = world:rank() == n - 1 and "ends" or "starts", n - 1
    local err = select(2, pcall(world.all_gather_object, world, 1, own))
    assert.equal("EMISMATCH", err.name)
    local other, rank = own == "ends" and "starts" or "ends", own == "ends" and 0 or last
    local want = ("%s: rank %d of group '%s' came to %s instead; all ranks make the same calls"):format(own, rank,
      world.name, other)
    assert.is_truthy(tostring(err.message):find(want, 1, true), tostring(err.message))
    assert.equal(n, #world:all_gather_object(1, "starts"))
  end, { devices = { "cpu" }, sizes = { 2, 3, 5 } })
end)

describe("Lua values as bytes", function()
  it("come back", function()
    local values = { 0, -1, 1 / 3, 2 ^ 53, -math.huge, "", "a\0b", {}, { { {} } },
      { a = 1, b = { 2, 3 }, [1] = "x", [2.5] = true } }
    for _, v in ipairs(values) do assert.same(v, serial.decode(serial.encode(v))) end
    local nan = serial.decode(serial.encode(0 / 0))
    assert.is_true(nan ~= nan)
    assert.is_nil(serial.decode(serial.encode(nil)))
    assert.is_true(ffi.new("int64_t", -2 ^ 62) - 1 == serial.decode(serial.encode(ffi.new("int64_t", -2 ^ 62) - 1)))
    assert.is_true(0xffffffffffffffffULL == serial.decode(serial.encode(0xffffffffffffffffULL)))
  end)

  it("are the same bytes for equal tables", function()
    local a, b = {}, {}
    for i = 1, 50 do a["k" .. i] = i end
    for i = 50, 1, -1 do b["k" .. i] = i end
    assert.equal(serial.encode(a), serial.encode(b))
  end)

  it("that were cut or changed are refused, never misread", function()
    local whole = serial.encode { 1, "two", { three = 3, list = { "x", "y" } }, false }
    for n = 0, #whole - 1 do assert.is_false((pcall(serial.decode, whole:sub(1, n)))) end
    assert.is_false((pcall(serial.decode, whole .. "n")))
    -- tables as keys of tables as keys ...: each a "T" and the number 1
    local read, why = pcall(serial.decode, ("T" .. ffi.string(ffi.new("double[1]", 1), 8)):rep(100000))
    assert.is_true(not read and tostring(why):find "begins no value %(" ~= nil, tostring(why))
    math.randomseed(5)
    for _ = 1, 3000 do
      local bytes = { whole:byte(1, -1) }
      for _ = 1, math.random(1, 4) do bytes[math.random(#bytes)] = math.random(0, 255) end
      local ok, err = pcall(serial.decode, string.char(unpack(bytes)))
      if not ok then assert.equal("EINVAL", err.name) end
    end
    assert.is_false((pcall(serial.decode, "T" .. ffi.string(ffi.new("double[1]", 1e300), 8))))
    assert.is_false((pcall(serial.decode, ("T" .. ffi.string(ffi.new("double[1]", 1), 8)):rep(5000))))
  end)
end)
