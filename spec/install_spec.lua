-- `make install`: what a C program, plain luajit and the launcher find afterwards, and that `make uninstall` takes all of it away.
-- deadline: 180 s
local shell = require "spec.support.shell"

describe("an installation", function()
  local root, clean, prefix
  setup(function()
    root, clean = shell.temporary()
    prefix = root .. "/opt/moon"
  end)
  teardown(function() clean() end)

  local function make(target)
    return shell.run(("make --no-print-directory %s DESTDIR=%s PREFIX=/opt/moon"):format(target, root))
  end

  local installed
  local function need()
    if shell.build ~= "build" then return "a sanitizer's library is for tests only" end
    if not installed then
      local out, status = make "install"
      assert.equal(0, status, out)
      installed = true
    end
  end

  local function pkg_config(words)
    local out = shell.run("pkg-config " .. words, { PKG_CONFIG_PATH = prefix .. "/lib/pkgconfig", PKG_CONFIG_SYSROOT_DIR = root })
    return (out:gsub("\n", " "))
  end

  local program = [[
    #include <perilune/perilune.h>
    #include <stdio.h>
    int main(void)
    {
        peri_device *cpu;
        peri_tensor *t;
        double x = 0;
        if (peri_device_get("cpu", &cpu) < 0 || peri_tensor_full(cpu, PERI_F32, 1, (int64_t[]){3}, 2.5, &t) < 0) return 1;
        if (peri_tensor_item(t, 2, &x) < 0) return 2;
        peri_tensor_release(t);
        printf("%s %g\n", peri_version(), x);
        return 0;
    }
  ]]

  it("has a library with a SONAME, and a pkg-config file that names no place of the build", function()
    if need() then return pending(need()) end
    assert.matches("libperilune%.so%.0%s", (shell.run(("objdump -p %s/lib/libperilune.so | grep SONAME"):format(prefix))))
    local pc = shell.read(prefix .. "/lib/pkgconfig/perilune.pc")
    assert.matches("prefix=/opt/moon\n", pc)
    local here = io.popen("pwd"):read "*l"
    assert.equal("", (shell.run(("grep -rlF %s/ %s --include=*.pc --include=*.lua --include=*.h"):format(here, root))))
    assert.matches("%-lperilune", pkg_config "--libs perilune")
    assert.matches("%-lxxhash", pkg_config "--static --libs perilune")
  end)

  it("serves a C program, shared and static", function()
    if need() then return pending(need()) end
    shell.write(root .. "/t.c", program)
    local flags = pkg_config "--cflags perilune"
    local out, status = shell.run(("${CC:-cc} -std=c11 -Wall -Werror -Wpedantic %s %s/t.c -o %s/shared %s"):format(flags, root, root,
      pkg_config "--libs perilune"))
    assert.equal(0, status, out)
    out = shell.run(root .. "/shared", { LD_LIBRARY_PATH = prefix .. "/lib" })
    assert.matches("^%d+%.%d+%.%d+ 2%.5\n$", out)
    out, status = shell.run(("${CC:-cc} -std=c11 %s %s/t.c -o %s/static %s/lib/libperilune.a %s"):format(flags, root, root, prefix,
      pkg_config("--static --libs perilune"):gsub("%-lperilune", "")))
    assert.equal(0, status, out)
    assert.matches(" 2%.5\n$", (shell.run(root .. "/static")))
    assert.not_matches("libperilune", (shell.run(("ldd %s/static"):format(root))))
  end)

  it("has headers that C++ reads", function()
    if need() then return pending(need()) end
    if not shell.has "c++" then return pending "there is no C++ compiler" end
    shell.write(root .. "/t.cc", "#include <perilune/perilune.h>\nint main() { return peri_abi_version() == 0; }\n")
    local out, status = shell.run(("c++ -Wall -Werror %s %s/t.cc -o %s/cxx %s"):format(pkg_config "--cflags perilune", root, root,
      pkg_config "--libs perilune"))
    assert.equal(0, status, out)
  end)

  it("serves plain luajit from any folder", function()
    if need() then return pending(need()) end
    local path = ("%s/share/lua/5.1/?.lua;%s/share/lua/5.1/?/init.lua"):format(prefix, prefix)
    local out, status = shell.run("cd / && luajit -e 'print(require(\"perilune\").tensor({1, 2, 3}):to_list()[3])'", { LUA_PATH = path })
    assert.equal("3\n", out)
    assert.equal(0, status)
  end)

  it("has a launcher that runs by itself", function()
    if need() then return pending(need()) end
    if shell.no_launcher() then return pending(shell.no_launcher()) end
    shell.write(root .. "/s.lua", "print(require('perilune').tensor({1, 2, 3}):to_list()[3])")
    assert.equal("3\n", (shell.run(("cd / && %s/bin/perilune run %s/s.lua"):format(prefix, root))))
  end)

  it("finds its plugins", function()
    if need() then return pending(need()) end
    if shell.no_launcher() then return pending(shell.no_launcher()) end
    if not io.open(prefix .. "/lib/perilune/libperilune_mpi.so") then return pending "Open MPI was not found" end
    local text = "local peri = require 'perilune' peri.init() print(peri.world_size())"
    shell.write(root .. "/world.lua", text)
    assert.equal("2\n2\n", (shell.run(("cd / && %s/bin/perilune run -n 2 %s/world.lua"):format(prefix, root))))
    assert.matches("mpi +usable", (shell.run(("cd / && %s/bin/perilune info"):format(prefix))))
    local path = ("%s/share/lua/5.1/?.lua;%s/share/lua/5.1/?/init.lua"):format(prefix, prefix)
    local out = shell.run(("cd / && luajit -e 'print(require(\"perilune\").dist.probe \"mpi\")'"), { LUA_PATH = path })
    assert.equal("true\n", out)
  end)

  it("goes away without a trace", function()
    if shell.build ~= "build" then return pending "a sanitizer's library is for tests only" end
    local own, clean_own = shell.temporary()
    local words = (" DESTDIR=%s PREFIX=/opt/moon"):format(own)
    local out, status = shell.run("make --no-print-directory install" .. words)
    assert.equal(0, status, out)
    assert.not_equal("", (shell.run(("find %s -type f"):format(own))))
    out, status = shell.run("make --no-print-directory uninstall" .. words)
    assert.equal(0, status, out)
    assert.equal("", (shell.run(("find %s -type f -o -type l -o -name perilune"):format(own))))
    clean_own()
  end)
end)
