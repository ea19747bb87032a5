-- What LuaJIT's compiler makes wrong code of is not compiled.
local compiler = require "perilune.compiler"
require "perilune.ffi"

describe("LuaJIT's compiler", function()
  it("is not used on ARM before its faults there were mended; elsewhere old ones do not compile traversals", function()
    local everything = { ["LuaJIT 2.1.0-beta3"] = true, ["LuaJIT 2.0.5"] = true, ["LuaJIT 2.1.ROLLING"] = true,
      ["LuaJIT 2.1.1692616192"] = true, ["LuaJIT 2.1.1703358377"] = false, ["LuaJIT 2.1.1737090214"] = false }
    for version, expected in pairs(everything) do
      assert.equal(expected and "everything" or nil, compiler.wrong("arm64", version), version)
    end
    assert.equal("traversal", compiler.wrong("x64", "LuaJIT 2.1.0-beta3"))
    assert.is_nil(compiler.wrong("x64", "LuaJIT 2.1.1692616192"))
    assert.is_nil(compiler.wrong("x64", "LuaJIT 2.1.1737090214"))
  end)

  it("is on in this process if it is not one of those", function()
    assert.equal(compiler.wrong(jit.arch, jit.version) ~= "everything", (jit.status()))
  end)

  it("rounds as the interpreter does: a sum of a product rounds twice, however often it is computed", function()
    local function rest(a, b, c) return a * b + c end
    local function rests()
      local most = 0
      for i = 1, 1000 do most = math.max(most, math.abs(rest(i / 7, i / 3, -(i / 7 * (i / 3))))) end
      return most
    end
    for _ = 1, 5 do assert.equal(0, rests()) end
  end)

  -- In a process of its own, where it is always the same: the compiler of March 2022 gives up the outer loop after some
  -- 40,000 rounds, and then ends it after one of five entries.
  it("traverses whole tables, loops inside loops too", function()
    local pipe = assert(io.popen([[luajit - 2>&1 <<'END'
      package.path = "lua/?.lua;lua/?/init.lua;" .. package.path
      require("perilune.compiler").settle()
      local inner = { 1, 2, 3, 4, 5 }
      local outer = { a = inner, b = inner, c = inner, d = inner, e = inner }
      local function back_to_the_interpreter(...) for _ = 1, 100 do end end
      local least = math.huge
      for _ = 1, 100000 do
        back_to_the_interpreter()
        local count = 0
        for _, values in pairs(outer) do
          for _ in pairs(values) do end
          count = count + 1
        end
        least = math.min(least, count)
      end
      print(least)
END]]))
    assert.equal("5\n", pipe:read "*a")
    pipe:close()
  end)

  it("leaves pairs and next as they are: entries, errors with the caller's line", function()
    local seen = {}
    for key, value in next, { 1, 2, x = 3 } do seen[key] = value end
    assert.same({ 1, 2, x = 3 }, seen)
    assert.is_nil(next {})
    for name, call in pairs { pairs = function() pairs(nil) end, next = function() next(nil) end } do
      local _, message = pcall(call)
      assert.equal(("spec/compiler_spec.lua:%d: bad argument #1 to '%s' (table expected, got nil)"):format(
        debug.getinfo(call, "S").linedefined, name), (message:gsub("^%./", "")))
    end
    assert.has_error(function() next({}, 3) end, "invalid key to 'next'")
  end)

  it("compiles loops that call next, and what it says is right there", function()
    local lists = { { 1, 2 }, { 1, 2, x = 3 }, {}, { y = 4 }, { 1, nil, 3 } }
    local expected, ends, wrong, next = { false, "x", false, "y", 3 }, { 2, 2, false, false, 1 }, 0, next
    require("spec.support.jit").assert_compiles("next", function(i)
      local at = i % 5 + 1
      local list = lists[at]
      local key, value = next(list, ends[at] or nil)
      if key ~= (expected[at] or nil) or key ~= nil and value ~= list[key] then wrong = wrong + 1 end
    end)
    assert.equal(0, wrong)
  end)

  it("keeps nothing alive that next was asked about", function()
    local gone = setmetatable({}, { __mode = "kv" })
    do
      local t = { {} }
      gone[1], gone[2] = t, t[1]
      next(t)
    end
    collectgarbage()
    assert.same({}, gone)
  end)
end)
