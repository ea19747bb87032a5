-- The training step over many steps: memory stays flat, and the whole loop is compiled.
local peri = require "perilune"
local shell = require "spec.support.shell"
local sim = require "perilune.dist.sim"
local small = require "spec.support.step"
collectgarbage("setpause", 200) -- as in programs (tests/harness/busted_main.lua): memory is measured here
local C = peri.ffi.C

local function resident()
  local file = assert(io.open "/proc/self/status")
  local kib = tonumber(file:read("*a"):match "VmRSS:%s*(%d+)")
  file:close()
  return kib * 1024
end

local function flat(device, steps, class)
  sim.run(2, function(rank, world)
    local pipeline, batches = small.pipeline(world, device, false, class), small.batches(rank, device)
    local function run(n)
      for _ = 1, n do small.release(pipeline:progress(batches)) end
      if jit.status() then jit.flush() end -- compiled code is Lua's memory too, and some of it comes late
      collectgarbage()
      collectgarbage()
      world:barrier():wait()
      peri.ffi.check(C.peri_device_synchronize(peri.ffi.device(device))) -- what is queued holds memory
      world:barrier():wait()
    end
    run(steps / 10)
    local live, objects, rss, lua = tonumber(C.peri_mem_live()), tonumber(C.peri_mem_objects()), resident(),
      collectgarbage "count"
    run(steps)
    assert.is_true(tonumber(C.peri_mem_objects()) <= objects + 16,
      ("objects: %d, then %d"):format(objects, tonumber(C.peri_mem_objects())))
    assert.is_true(tonumber(C.peri_mem_live()) <= live + 65536,
      ("bytes: %d, then %d"):format(live, tonumber(C.peri_mem_live())))
    local after = collectgarbage "count"
    assert.is_true(after <= lua + 128, ("Lua's KiB: %d, then %d"):format(lua, after))
    if shell.sanitizer == "" then -- which keeps what was freed
      assert.is_true(resident() <= rss + 8 * 1024 * 1024, ("resident: %d, then %d"):format(rss, resident()))
    end
  end, { device = device })
end

describe("the training step", function()
  it("takes no memory: 5,000 steps on two ranks", function() flat("cpu", 5000) end)
  it("takes no memory on opaque", function() flat("opaque", 600) end)
  it("takes no memory with batches ahead", function() flat("cpu", 1500, "TrainPipelineFusedSparseDist") end)
  it("takes no memory with batches ahead on streams of their own", function()
    flat("opaque", 200, "TrainPipelineFusedSparseDist")
  end)

  -- In a process of its own: LuaJIT gives functions up for good that it often met in the coroutines of a sim world.
  -- any order: each is a test of its own
  for model, two_d in pairs { DistributedModelParallel = false, DMPCollection = true } do
    it("of a " .. model .. " is compiled, without an aborted trace", function()
      local out, status = shell.luajit(([[
        local peri = require "perilune"
        local small = require "spec.support.step"
        local world = peri.dist.init { transport = "self" }
        local pipeline, batches = small.pipeline(world, "cpu", %s), small.batches(0, "cpu")
        local function step() small.release(pipeline:progress(batches)) end
        step()
        require("spec.support.jit").assert_compiles("TrainPipelineBase:progress", step)
        print "compiled"
      ]]):format(tostring(two_d)))
      assert.equals("compiled\n", out)
      assert.equals(0, status)
    end)
  end

  it("gives as many results as the model returned", function()
    peri.init()
    local Many = peri.nn.Module:extend "Many"
    function Many:init() self.layer = peri.nn.Linear { in_features = 1, out_features = 1 } end
    function Many.forward(_, n) return unpack({ 1, nil, 3, 4, 5, 6 }, 1, n) end
    local model = peri.DistributedModelParallel { module = Many() }
    for _, n in ipairs { 1, 3, 4, 5, 6 } do assert.equal(n, select("#", model(n))) end
  end)
end)
