-- The boundary between C and Lua: the generated declarations, the layouts, the handshake of versions, and where the
-- library is found.
local shell = require "spec.support.shell"
local build = shell.build

local here = io.popen("pwd"):read "*l"
local cdef_path = build .. "/lua/perilune/cdef.lua"
local env = shell.luajit_env()
local lua_path = env.LUA_PATH
local hello = "luajit -e 'print(require(\"perilune\").tensor({1, 2, 3}):to_list()[3])'"

describe("the generated declarations", function()
  local cc, folder, clean = "${CC:-cc}", nil, nil
  setup(function() folder, clean = shell.temporary() end)
  teardown(function() clean() end)

  -- Run the generator of static asserts on a changed copy of the declarations, then the compiler on its output.
  local function check_layout(from, to)
    local text = shell.read(cdef_path)
    local changed, count = text:gsub(from, to)
    assert.is_true(count > 0, "the change must hit something")
    shell.write(folder .. "/cdef.lua", changed)
    local out, status = shell.run(("luajit runtime/gen/abi.lua %s/cdef.lua > %s/abi.c"):format(folder, folder))
    assert.equal(0, status, out)
    return shell.run(("%s -std=c11 -Iruntime/include -fsyntax-only %s/abi.c"):format(cc, folder))
  end

  it("agree with the headers", function()
    local out, status = check_layout("return", "return")
    assert.equal(0, status, out)
  end)

  it("are caught when a member has another size", function()
    local out, status = check_layout("_Bool%s+contiguous,", "int32_t contiguous,")
    assert.not_equal(0, status)
    assert.matches("LuaJIT sees another value", out)
  end)

  it("are caught when members change places", function()
    local out, status = check_layout("int32_t dtype, ndim;", "int32_t ndim, dtype;")
    assert.not_equal(0, status)
    assert.matches("offsetof%(peri_tensor_info, ndim%)", out)
  end)

  it("are caught when a struct has a form that is not checked", function()
    local changed = shell.read(cdef_path):gsub("%]==%]", "struct peri_odd { int x; };\n]==]")
    shell.write(folder .. "/cdef.lua", changed)
    local out, status = shell.run(("luajit runtime/gen/abi.lua %s/cdef.lua"):format(folder))
    assert.equal(1, status)
    assert.matches("of the form", out)
  end)

  it("are caught when a constant has another value", function()
    local out, status = check_layout("PERI_BOOL = 9", "PERI_BOOL = 11")
    assert.not_equal(0, status)
    assert.matches("PERI_BOOL", out)
  end)

  it("refuse headers that the FFI cannot read", function()
    local generate = " | luajit runtime/gen/cdef.lua x/perilune"
    local out, status = shell.run("printf '# 1 \"x/perilune/bad.h\"\\nint f(int (*)[static 3]);\\n'" .. generate)
    assert.equal(1, status)
    assert.matches("not cdef%-clean", out)
    out, status = shell.run("printf '# 1 \"elsewhere.h\"\\nint f(void);\\n'" .. generate)
    assert.equal(1, status)
    assert.matches("no declarations from x/perilune", out)
  end)
end)

describe("loading", function()
  local folder, clean
  setup(function() folder, clean = shell.temporary() end)
  teardown(function() clean() end)

  it("works under plain luajit, from any folder", function()
    local out, status = shell.run(hello, env)
    assert.equal("3\n", out)
    assert.equal(0, status)
    if build == "build" then
      assert.equal("3\n", (shell.run("cd / && " .. hello, { LUA_PATH = lua_path }))) -- the tree's own library
    end
  end)

  it("works under the launcher, which needs nothing else", function()
    if shell.no_launcher() then return pending(shell.no_launcher()) end
    shell.write(folder .. "/hello.lua", "print(require('perilune').tensor({1, 2, 3}):to_list()[3])")
    local out, status = shell.run(("cd / && %s/%s run %s/hello.lua"):format(here, shell.perilune, folder),
      { LUA_PATH = "/nowhere/?.lua" })
    assert.equal("3\n", out)
    assert.equal(0, status)
  end)

  it("refuses a library of another contract", function()
    shell.write(folder .. "/fake.c", "int peri_abi_version(void) { return 999; }\n")
    local out, status = shell.run(("${CC:-cc} -shared -fPIC %s/fake.c -o %s/fake.so"):format(folder, folder))
    assert.equal(0, status, out)
    out, status = shell.run(hello, { LUA_PATH = lua_path, PERI_LIBRARY = folder .. "/fake.so" })
    assert.equal(1, status)
    assert.matches("the library %(contract 999%) and the Lua files %(contract %d+%) are from different builds; run "
      .. "`make`", out)
  end)

  it("refuses Lua files of another contract", function()
    os.execute(("mkdir -p %s/perilune"):format(folder))
    local changed, count = shell.read(cdef_path):gsub("PERI_ABI_VERSION = %d+", "PERI_ABI_VERSION = 998")
    assert.equal(1, count)
    shell.write(folder .. "/perilune/cdef.lua", changed)
    local out, status = shell.run(hello, { LUA_PATH = folder .. "/?.lua;" .. lua_path, PERI_LIBRARY = env.PERI_LIBRARY,
      LD_PRELOAD = env.LD_PRELOAD })
    assert.equal(1, status)
    assert.matches("contract 998%) are from different builds", out)
  end)

  it("says what it tried when there is no library", function()
    local out, status = shell.run(hello, { LUA_PATH = lua_path, PERI_LIBRARY = "/nowhere/libperilune.so" })
    assert.equal(1, status)
    assert.matches("/nowhere/libperilune.so", out)
  end)
end)

describe("errors from C", function()
  local peri = require "perilune"

  it("carry status, message, place and rank", function()
    local ok, err = pcall(peri.empty, { -1 })
    assert.is_false(ok)
    assert.equal("EINVAL", err.name)
    assert.equal(peri.ffi.C.PERI_EINVAL, err.code)
    assert.matches("^peri_tensor_new: the size %-1 of the 1st dimension", err.message)
    assert.matches("^runtime/tensor/tensor%.c:%d+$", err.where)
    assert.matches("^spec/boundary_spec%.lua:%d+$", err.place)
    assert.equal(("%s (%s)"):format(err.message, err.place), tostring(err))
    assert.equal(peri.Error, getmetatable(err))
  end)

  it("keep their message while garbage is collected", function()
    for _ = 1, 200 do peri.empty { 10 } end
    local status = peri.ffi.C.peri_dtype_parse "f33"
    collectgarbage()
    collectgarbage()
    local ok, err = pcall(peri.ffi.check, status)
    assert.is_false(ok)
    assert.matches("'f33' is no dtype", err.message)
  end)
end)
