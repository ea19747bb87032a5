-- What a stranger meets first: the probe, its table, and the installation of what is missing.
-- takes: 12 s
local shell = require "spec.support.shell"

local folder, clean
before_each(function() folder, clean = shell.temporary() end)
after_each(function() clean() end)

--- A program of the given shell text on a PATH of its own.
local function program(name, text)
  os.execute("mkdir -p " .. folder .. "/bin")
  shell.write(folder .. "/bin/" .. name, "#!/bin/sh\n" .. text .. "\n")
  os.execute("chmod +x " .. folder .. "/bin/" .. name)
end

local function values(text)
  local found = {}
  for name, value in text:gmatch "([%u_]+) := ([^\n]*)\n" do found[name] = value end
  return found
end

describe("the probe", function()
  local function probe(env) return values((shell.run("sh runtime/gen/probe.sh", env))) end

  it("finds what this test runs with", function()
    local found = probe()
    assert.matches("%d", found.HAVE_CC)
    assert.matches("^2%.1", found.HAVE_LUAJIT)
    assert.matches("^%d+%.%d+", found.HAVE_OPENBLAS)
    assert.matches("openblas", found.OPENBLAS_LIBS)
    assert.matches("^%d+$", found.HAVE_XXHASH)
    assert.matches("^%d+%.%d+", found.HAVE_BUSTED)
  end)

  it("does not take a program's presence for its working", function()
    program("mpicc", "echo -I/nowhere")
    program("nvcc", "exit 1")
    program("gnuplot", "exit 1")
    local found = probe { PATH = folder .. "/bin:" .. os.getenv "PATH" }
    assert.equal("", found.HAVE_MPI)
    assert.equal("", found.HAVE_CUDA)
    assert.equal("", found.HAVE_GNUPLOT)
    assert.is_nil(found.MPI_LIBS)
  end)

  it("writes a value for everything without a compiler", function()
    local found = probe { CC = "/nowhere/cc" }
    for _, name in ipairs { "HAVE_CC", "HAVE_LUAJIT_LIB", "HAVE_OPENBLAS", "HAVE_XXHASH", "HAVE_MPI", "HAVE_CMOCKA" } do
      assert.equal("", found[name], name)
    end
  end)

  it("takes only a library that reads the interpreter's bytecode", function()
    program("luajit", 'case "$*" in *-b*) echo "no bytecode" >"$4";; *) echo "LuaJIT 2.1.0-other";; esac')
    local found = probe { PATH = folder .. "/bin:" .. os.getenv "PATH" }
    assert.equal("2.1.0-other", found.HAVE_LUAJIT)
    assert.equal("", found.HAVE_LUAJIT_LIB)
  end)
end)

describe("make", function()
  -- A configuration where the named things are absent.
  local function without(...)
    local text = shell.read("build/config.mk"):gsub("(HAVE_[%w_]+) :=%s*\n", "%1 := yes\n")
    for _, name in ipairs { ... } do text = text:gsub("(HAVE_" .. name .. ") := [^\n]*", "%1 :=") end
    return shell.write(folder .. "/config.mk", text)
  end
  local function make(words, ...)
    return shell.run(("make --no-print-directory %s CONFIG=%s"):format(words, without(...)))
  end

  it("gives the demonstration its words whole, and two ranks unless told", function()
    local out = shell.run [[make -n demo-run RANKS= DATA="/tmp/it's a b.txt" PLAN='my plan.lua']]
    out = out:gsub("%s*\\\n%s*", " ") -- versions of make print an empty continued line, or none
    assert.truthy(out:find([[--plan 'my plan.lua' --data '/tmp/it'\''s a b.txt']], 1, true), out)
    assert.not_matches("run %-n examples", out)
    assert.matches("run %-n '?[12]'? examples/dlrm%.lua", out)
  end)

  it("says of the demonstration that it could train on the machine's GPU", function()
    --- What `make demo-run` would say with a driver that sees so many GPUs.
    local function says(gpus, words)
      assert(os.execute(("echo 'int cuInit(unsigned f) { return (int)f; } int cuDeviceGetCount(int *n) { *n = %d; "
        .. "return 0; }' | cc -shared -fPIC -xc - -o %s/libcuda.so.1"):format(gpus, folder)) == 0)
      local out = shell.run(("LD_LIBRARY_PATH=%s make -n demo-run %s"):format(folder, words or ""))
      for line in out:gmatch "[^\n]+" do
        if line:find("this machine has a GPU", 1, true) then return (shell.run(line)) end
      end
      return ""
    end
    assert.matches("^perilune: this machine has a GPU; make demo DEVICE=cuda trains on it", says(2))
    for device, ranks in pairs { cuda = 2, ["cuda:1"] = 1 } do -- any order: each by itself
      assert.matches(("run %%-n '?%d'? "):format(ranks),
        (shell.run(("LD_LIBRARY_PATH=%s make -n demo-run DEVICE=%s"):format(folder, device))))
    end
    assert.equal("", says(0))
    assert.equal("", says(1, "DEVICE=cuda"))
  end)

  it("compiles kernels for GPUs optimized, and only the PTX that tests read quickly", function()
    for _, file in ipairs { "codec", "mask" } do -- one without barriers, one with
      local source = ("kernels/cuda/%s"):format(file)
      local out = shell.run(("make -n -W %s.cu build/cuda/%s.o"):format(source, source))
      assert.matches("%-O3[^\n]* %-gencode arch=compute_80,code=sm_80 %-gencode arch=compute_90,code=sm_90 [^\n]*"
        .. source, out)
      assert.not_matches("fast%-compile", out)
    end
  end)

  it("prints what was not found and goes on", function()
    local out, status = make("config", "MPI", "GNUPLOT")
    assert.equal(0, status)
    assert.matches("Open MPI +%-%- not found +for more than one process", out)
    assert.matches("gnuplot +%-%- not found", out)
    assert.matches("OpenBLAS +%d", out)
    assert.equal(0, select(2, make("needed", "MPI", "CUDA", "GNUPLOT")))
    assert.matches("CUDA +%S+ +for GPUs %(make cuda%)", (make "config"))
  end)

  it("stops without what it needs, or what is asked for", function()
    local out, status = make("needed", "OPENBLAS")
    assert.not_equal(0, status)
    assert.matches("needed and not found: OpenBLAS%. Run: make setup\n", out)
    assert.matches("not found: a C compiler, OpenBLAS, xxHash%. Run: make setup\n",
      (make("needed", "OPENBLAS", "CC", "XXHASH")))
    out, status = make("needed MPI=1", "MPI")
    assert.not_equal(0, status)
    assert.matches("MPI=1 but Open MPI was not found", out)
    for _, goal in ipairs { "needed CUDA=1", "cuda" } do
      out, status = make(goal, "CUDA")
      assert.not_equal(0, status)
      assert.matches("CUDA was not found: install the CUDA Toolkit %(nvcc%)", out)
    end
    out, status = make "all SAN=adress"
    assert.not_equal(0, status)
    assert.matches("SAN=adress: allowed are address, undefined, thread", out)
  end)

  it("compiles nothing before it stops", function()
    for _, goal in ipairs { "", "all", "check", "install" } do
      local out, status = make(("%s -j4 B=%s/build MAKELEVEL=1"):format(goal, folder), "XXHASH")
      assert.not_equal(0, status, goal)
      assert.matches("needed and not found: xxHash%. Run: make setup\n", out)
      assert.not_matches("  CC  ", out)
      assert.not_matches("xxhash.h", out)
      assert.equal("", (shell.run(("find %s/build -name '*.o' 2>/dev/null"):format(folder))), goal)
    end
  end)

  it("installs the packages of what is missing, and nothing when nothing is", function()
    local out = make("-n setup", "MPI", "LUACHECK", "LUAJIT_LIB")
    assert.matches("setup%.sh libluajit%-5%.1%-dev openmpi%-bin libopenmpi%-dev lua%-check;", out)
    assert.matches("setup%.sh iproute2;", (make("-n setup", "IP")))
    assert.not_matches("apt", (make("-n setup")))
    assert.not_matches("setup.sh", (make("-n setup")))
  end)

  it("gives the makes in it its jobs, and prints what they would do", function()
    local out = make("-n -j2 test B=" .. folder .. "/build", "IP")
    assert.matches("setup%.sh iproute2;", out)
    assert.matches("luajit tests/run%.lua", out)
    assert.not_matches("jobserver unavailable", out)
    assert.is_nil(io.open(folder .. "/build"))
  end)

  it("takes warnings for errors in continuous integration only", function()
    local function compiled(words)
      local out, list = shell.run("make -n CUDA_HOME=/cuda -W runtime/base/error.c -W tests/cuda_host/device.cc -W "
        .. "kernels/cuda/bags.cu build/obj/runtime/base/error.o build/cuda_host/tests/cuda_host/device.o "
        .. "build/cuda/kernels/cuda/bags.o " .. words), {}
      for line in out:gmatch "[^\n]*%-Wall[^\n]*" do list[#list + 1] = line end
      assert.is_true(#list >= 3, out)
      return list
    end
    for _, line in ipairs(compiled "WERROR=") do assert.not_matches("-Werror", line, 1, true) end
    for _, line in ipairs(compiled "WERROR=1") do assert.matches("-Werror", line, 1, true) end
    assert.matches("make test WERROR=1", shell.read ".ci/run", 1, true)
  end)

  it("shows its targets", function() assert.matches("make demo.*make test.*make install", (shell.run "make help")) end)
end)

describe("setup.sh", function()
  local function setup_sh(words)
    return shell.run("sh runtime/gen/setup.sh " .. words, { PATH = folder .. "/bin:/usr/bin:/bin" })
  end

  it("prints one line to run without root, and does not fail", function()
    program("id", "echo 1000")
    program("apt-get", "echo called; exit 1")
    local out, status = setup_sh "luajit gnuplot-nox"
    assert.equal(0, status)
    assert.matches("\n  sudo apt%-get install %-y luajit gnuplot%-nox\n", out)
    assert.not_matches("called", out)
  end)

  it("installs as root, all at once", function()
    program("id", "echo 0")
    program("apt-get", ("echo \"$*\" >>%s/log"):format(folder))
    local out, status = setup_sh "luajit gnuplot-nox"
    assert.equal(0, status, out)
    local log = shell.read(folder .. "/log")
    assert.matches("install %-y .* luajit gnuplot%-nox\n$", log)
    assert.equal(1, select(2, log:gsub("install ", "")))
  end)

  it("goes on without the one package that cannot be had", function()
    program("id", "echo 0")
    program("apt-get", ("echo \"$*\" >>%s/log; case \"$*\" in *nonsense*) echo E: no nonsense; exit 100;; esac"):format(
      folder))
    local out, status = setup_sh "luajit nonsense lua-check"
    assert.equal(0, status)
    assert.matches("nonsense could not be installed:\nE: no nonsense", out)
    local log = shell.read(folder .. "/log")
    assert.matches("update", log)
    assert.matches("install [^\n]* lua%-check\n", log)
  end)

  it("sees to the package lists that the demonstration reads", function()
    local env = { PATH = folder .. "/bin:/usr/bin:/bin", APT_LISTS = folder }
    local function lists() return shell.run("sh runtime/gen/setup.sh --lists", env) end
    program("apt-get", "echo \"apt $*\"")
    program("id", "echo 1000")
    local out, status = lists()
    assert.equal(0, status)
    assert.matches("\n  sudo apt%-get update\n", out)
    program("id", "echo 0")
    assert.matches("apt update", (lists()))
    shell.write(folder .. "/x_Packages", "")
    assert.equal("", (lists()))
  end)

  it("does nothing for nothing", function() assert.equal("", (setup_sh "")) end)
end)
