-- What `make gpu-check` does, on the pretended GPU: deadline: 240 s
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
  local function check(words)
    return shell.run(("luajit tests/gpu/check.lua --build=%s --device=cuda_host --kernels=%s --busted=yes --cmocka=yes %s"):format(build,
      kernels, words))
  end

  test("runs case lists and specs on the device, the demonstration and the benchmark, and counts", function()
    local out, status = check "--only=test_bags"
    assert.equal(0, status, out)
    assert.matches("ok +tests/kernels/test_bags%.c %(cuda_host%) +%d passed", out)
    assert.matches("26 tensors on cuda_host are those of cpu", out)
    local cpu, device = out:match "cpu +loss ([%d.]+)\ncuda_host +loss ([%d.]+)"
    assert.equal(cpu, device)
    assert.matches("bucketize 8, F 26.-GB/s +[%d.]+ %% +>= 60 %%\n", out)
    assert.matches("DLRM of cross layers, B 8,192 +%d+ samples/s", out)
    assert.matches("skipped: compute%-sanitizer: not beside nvcc\n%d+ passed, 0 failed, 1 skipped\n$", out)
  end)

  test("fails when something that it runs fails, and goes on", function()
    local out, status = check "--only=none.has.this.name --sanitizer=false"
    assert.equal(1, status)
    assert.matches("\nfailed: compute%-sanitizer %-%-tool memcheck\nfailed: compute%-sanitizer %-%-tool racecheck\n", out)
    assert.matches("DLRM of cross layers", out)
    assert.matches("%d+ passed, [3-9] failed, %d+ skipped\n$", out)
  end)

  test("asks the driver before anything is built", function()
    local folder = os.tmpname() .. ".d"
    --- What driver.lua says with a driver whose cuInit returns `status`, and that sees `gpus`.
    local function driver(status, gpus, device)
      return shell.run(("mkdir -p %s; echo 'int cuInit(unsigned f) { return f + %d; } int cuDeviceGetCount(int *n) { *n = %d; return 0; }' "
        .. "| cc -shared -fPIC -xc - -o %s/libcuda.so.1 && LD_LIBRARY_PATH=%s luajit tests/gpu/driver.lua %s"):format(folder, status, gpus,
        folder, folder, device))
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
    os.execute("rm -r " .. folder)
  end)

  test("stops where the device is not to be had, and says why", function()
    local out, status = shell.run(("luajit tests/gpu/check.lua --build=%s --device=nothing"):format(build))
    assert.equal(1, status)
    assert.matches("no libperilune_nothing%.so.-gpu%-check: device 'nothing' cannot be used here", out)
    assert.matches("0 passed, 1 failed, 0 skipped\n$", out)
  end)
end)
