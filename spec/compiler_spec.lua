-- Where LuaJIT's compiler makes wrong code, Lua runs uncompiled.
local compiler = require "perilune.compiler"

describe("LuaJIT's compiler", function()
  it("is not used on ARM before its faults there were mended, and everywhere else", function()
    local wrong = { ["LuaJIT 2.1.0-beta3"] = true, ["LuaJIT 2.0.5"] = true, ["LuaJIT 2.1.ROLLING"] = true, ["LuaJIT 2.1.1692616192"] = true,
      ["LuaJIT 2.1.1703358377"] = false, ["LuaJIT 2.1.1737090214"] = false }
    for version, expected in pairs(wrong) do
      assert.equal(expected, compiler.wrong("arm64", version), version)
      assert.is_false(compiler.wrong("x64", version))
    end
  end)

  it("is on in this process if it is not one of those", function()
    require "perilune.ffi"
    assert.equal(not compiler.wrong(jit.arch, jit.version), (jit.status()))
  end)
end)
