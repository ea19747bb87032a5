-- What `make gpu-check` does, on the pretended GPU: deadline: 240 s
-- takes: 14 s
local shell = require "spec.support.shell"
local build = os.getenv "PERI_BUILD" or "build"

describe("gpu-check", function()
  local kernels = build .. "/cuda_host/libperilune_cuda_host.so"
  local there = io.open(kernels)
  if there then there:close() end
  local function test(title, body)
    it(title, function()
      if not there then return pending "no C++ compiler was found" end
      if shell.sanitizer ~= "" then return pending "not under sanitizers" end
      body()
    end)
  end
  local function check(words, env)
    return shell.run(("luajit tests/gpu/check.lua --build=%s --device=cuda_host --kernels=%s --busted=yes "
      .. "--cmocka=yes %s"):format(build, kernels, words), env, 200)
  end

  test("runs case lists and specs on the device, the demonstration and the benchmark, and counts", function()
    local out, status = check("--only=test_bags", { PERI_CUDA_HOST_UNCALLED = "1" })
    assert.equal(0, status, out)
    -- What checks a GPU first has to try everything that can be wrong on it: every kernel and operation is called in
    -- tests/gpu/short.lua (the part families), but those that run on the host only.
    assert.matches("\n== families[^\n]*\n%d+ tensors on cuda_host are those of cpu\nnot called: route_lines\n", out)
    assert.matches("ok +tests/kernels/test_bags%.c %(cuda_host%) +%d passed", out)
    local cpu, device = out:match "cpu +loss ([%d.]+)\ncuda_host +loss ([%d.]+)"
    assert.equal(cpu, device)
    assert.matches("bucketize 8, F 26.-GB/s +[%d.]+ %% +>= 55 %%\n", out)
    assert.matches("DLRM of cross layers, B 8,192, f32 +%d+ samples/s", out)
    assert.matches("skipped: memcheck: compute%-sanitizer is not beside nvcc\n", out)
    assert.matches("\n%d+ passed, 0 failed, 4 skipped\n$", out)
  end)

  test("fails when something that it runs fails, and goes on", function()
    local out, status = check "--only=none.has.this.name --sanitizer=false --parts=racecheck,kernels,initcheck"
    assert.equal(1, status)
    assert.matches("cuda_host:0: computes.-== kernels.-== racecheck.-== initcheck", out)
    assert.matches("\nfailed: racecheck: [^\n]*\nfailed: initcheck: [^\n]*\nfailed: no spec or case list is named "
      .. "'none", out)
    assert.matches("1 passed, 3 failed, 0 skipped\n$", out)
  end)

  test("stops a part that hangs, names it, and goes on with the next one", function()
    local folder, clean = shell.temporary()
    local tool = shell.write(folder .. "/tool.sh", [[
#!/bin/sh
case "$*" in
*--show-backtrace*no*"run tests/gpu/short.lua cuda_host") ;;
*) echo "unexpected: $*"; exit 3 ;;
esac
case "$*" in
*memcheck*) trap "" TERM; echo "the kernel began"; while :; do sleep 0.1; done ;;
esac
]])
    os.execute("chmod +x " .. tool)
    local out, status = check(("--sanitizer=%s --parts=memcheck,synccheck --most=2"):format(tool))
    clean()
    assert.equal(1, status)
    assert.matches("== memcheck.-the kernel began\nFAILED  memcheck.-\nmemcheck did not end within 2 s and was "
      .. "stopped\n", out)
    assert.matches("== synccheck", out)
    assert.matches("\nfailed: memcheck: [^\n]*%(memcheck did not end within 2 s and was stopped%)\n2 passed, 1 "
      .. "failed, 0 skipped\n$", out)
  end)

  test("gives up when the device does not answer in time", function()
    local folder, clean = shell.temporary()
    shell.write(folder .. "/perilune", "#!/bin/sh\nsleep 60\n")
    os.execute(("chmod +x %s/perilune"):format(folder))
    local out, status = shell.run(("luajit tests/gpu/check.lua --build=%s --device=cuda_host --most=0.5"):format(
      folder))
    clean()
    assert.equal(1, status)
    assert.matches("device 'cuda_host' cannot be used here, its first call did not end within 0.5 s: nothing was "
      .. "checked", out)
  end)

  it("does not wait for a process that cannot be killed", function()
    local process = require "tests.harness.process"
    -- no process, so no news of its end
    local p = { pid = 2 ^ 30, start = process.now() - 100, ends = process.now() - 30, deadline = 70 }
    assert.is_false(process.poll(p))
    assert.is_true(process.poll(p))
    assert.equal("it did not end within 70 s, nor when it was killed", process.how(p))
  end)

  test("knows the names of its parts", function()
    local out, status = check "--parts=family"
    assert.equal(2, status)
    assert.matches("there is no part 'family'; parts are device, families, kernels, .*, specs\n", out)
  end)

  test("asks the driver before anything is built", function()
    local folder = os.tmpname() .. ".d"
    --- What driver.lua says with a driver whose cuInit returns `status`, and that sees `gpus`.
    local function driver(status, gpus, device)
      return shell.run(("mkdir -p %s; echo 'int cuInit(unsigned f) { return f + %d; } int cuDeviceGetCount(int *n) { "
        .. "*n = %d; return 0; }' | cc -shared -fPIC -xc - -o %s/libcuda.so.1 && LD_LIBRARY_PATH=%s luajit "
        .. "tests/gpu/driver.lua %s"):format(folder, status, gpus, folder, folder, device))
    end
    local function says(what, status, gpus, device)
      local out, code = driver(status, gpus, device or "cuda")
      assert.equal(1, code)
      assert.matches(what .. ".-\nnothing was built or checked;.-\n0 passed, 1 failed, 0 skipped\n$", out)
    end
    local out, code = driver(0, 2, "cuda:1")
    assert.same({ "", 0 }, { out, code })
    out, code = driver(3, 0, "cuda_host")
    assert.same({ "", 0 }, { out, code })
    says("the driver sees no GPU", 0, 0)
    says("the driver sees no GPU", 100, 0)
    says("the driver cannot be used: its cuInit returned 803", 803, 1)
    says("GPU is 'tpu', allowed: cuda, cuda:<number>, cuda_host", 0, 1, "tpu")
    out, code = driver(100, 0, "cuda demo")
    assert.equal(1, code)
    assert.matches("^make demo: the driver sees no GPU.-\nnothing was built; without DEVICE=cuda ", out)
    assert.same({ "2\n", "0\n" }, { (driver(0, 2, "count")), (driver(999, 2, "count")) })
    os.execute("rm -r " .. folder)
  end)

  test("stops where the device is not to be had, and says why", function()
    local out, status = shell.run(("luajit tests/gpu/check.lua --build=%s --device=nothing"):format(build))
    assert.equal(1, status)
    assert.matches("no libperilune_nothing%.so.-gpu%-check: device 'nothing' cannot be used here", out)
    assert.matches("0 passed, 1 failed, 0 skipped\n$", out)
  end)
end)
