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

  test("stops where the device is not to be had, and says why", function()
    local out, status = shell.run(("luajit tests/gpu/check.lua --build=%s --device=nothing"):format(build))
    assert.equal(1, status)
    assert.matches("no libperilune_nothing%.so.-gpu%-check: device 'nothing' cannot be used here", out)
    assert.matches("0 passed, 1 failed, 0 skipped\n$", out)
  end)
end)
