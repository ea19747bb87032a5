-- A checkpoint whose names appear later on one rank than on another, as they do on network file systems, is waited for;
-- what does not appear is named, by every rank.
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local shell = require "spec.support.shell"
local small = require "spec.support.small_net"
local parts_of = require "perilune.checkpoint.parts"

describe("a checkpoint that another rank sees first", function()
  local folder, clean = shell.temporary()
  local usual = parts_of.LATE_SECONDS
  teardown(function()
    parts_of.LATE_SECONDS = usual
    clean()
  end)
  setup(function()
    local model = small.build()
    peri.checkpoint.save(folder .. "/saves/full", { model = model }, { increments = true })
    peri.checkpoint.save(folder .. "/saves/next", { model = model }, { increment_of = folder .. "/saves/full" })
  end)

  --- Two ranks load: rank 0 what was saved, rank 1 what `first` has made of it, and `later` (or nil) after 0.15 s.
  --- deadline: of the group, or nil. Returns what each was told (false: nothing) and how many seconds it took.
  local function load(first, later, deadline)
    local there, told, took = folder .. "/there", {}, {}
    shell.run(("rm -rf %s; mkdir %s; cd %s; S=%s/saves; %s"):format(there, there, there, folder, first))
    local wait
    sim.run(2, function(rank, world)
      local model, began = small.build(world, peri.plan.row_wise()), peri.ffi.C.peri_time_ns()
      world:timeout(deadline)
      if rank == 1 and later then
        wait = shell.start(("sleep 0.15; cd %s; S=%s/saves; %s"):format(there, folder, later))
      end
      local ok, err = pcall(peri.checkpoint.load, (rank == 0 and folder .. "/saves" or there) .. "/next",
        { model = model }, { group = world })
      told[rank], took[rank] = not ok and tostring(err), tonumber(peri.ffi.C.peri_time_ns() - began) / 1e9
    end)
    if wait then wait() end
    return told, took
  end

  for what, case in peri.util.ordered {
    ["nothing of it"] = { "true", "cp -r $S/* .", "there/next'" },
    ["a file of it"] = { "cp -r $S/* .; mv next/rank-0.safetensors .", "mv rank-0.safetensors next",
      "rank-0.safetensors" },
    ["its manifest"] = { "cp -r $S/* .; mv next/manifest.json .", "mv manifest.json next", "there/next'" },
    ["its parent"] = { "cp -r $S/next .", "cp -r $S/full .", "is missing" },
    ["a part of its parent's manifest"] = { "cp -r $S/* .; head -c 50 $S/full/manifest.json >full/manifest.json",
      "cp $S/full/manifest.json full", "is missing" },
  } do
    it("is waited for: " .. what, function()
      parts_of.LATE_SECONDS = 20
      local told, took = load(case[1], case[2])
      assert.same({ [0] = false, false }, told)
      assert.is_true(took[1] > 0.1 and took[1] < 10)
      parts_of.LATE_SECONDS = 0.1
      told, took = load(case[1])
      for rank = 0, 1 do
        assert.truthy(told[rank] and told[rank]:find(case[3], 1, true), told[rank])
        assert.is_true(took[rank] < 10)
      end
      assert.is_true(took[1] > 0.1)
    end)
  end

  it("is named where the group's deadline comes before the end of the wait", function()
    parts_of.LATE_SECONDS = 20
    local told, took = load("true", nil, 1)
    for rank = 0, 1 do
      assert.truthy(told[rank] and told[rank]:find("there/next'", 1, true), told[rank])
      assert.is_true(took[rank] < 10)
    end
  end)
end)

describe("a file that no rank sees yet", function()
  local folder, clean = shell.temporary()
  local usual = parts_of.LATE_SECONDS
  teardown(function()
    parts_of.LATE_SECONDS = usual
    clean()
  end)
  setup(function() peri.checkpoint.save(folder .. "/full", { model = small.build() }) end)

  --- Load on `ranks` ranks when `first` was done to the checkpoint, `later` (or nil) after 0.4 s by another process.
  --- Returns what the ranks were told (false: nothing) and the seconds that each took.
  local function load(ranks, first, later)
    local told, took, wait = {}, {}, nil
    shell.run(("cd %s; rm -rf now; cp -r full now; cd now; %s"):format(folder, first))
    if later then wait = shell.start(("sleep 0.4; cd %s/now; %s"):format(folder, later)) end
    sim.run(ranks, function(rank, world)
      local model, began = small.build(world, peri.plan.row_wise()), peri.ffi.C.peri_time_ns()
      local ok, err = pcall(peri.checkpoint.load, folder .. "/now", { model = model }, { group = world })
      told[rank + 1], took[rank + 1] = not ok and tostring(err), tonumber(peri.ffi.C.peri_time_ns() - began) / 1e9
    end)
    if wait then wait() end
    return told, took
  end

  for what, case in peri.util.ordered {
    ["is missing"] = { "mv rank-0.safetensors ..", "mv ../rank-0.safetensors ." },
    ["is cut"] = { "truncate -s -1 rank-0.safetensors", "cp ../full/rank-0.safetensors ." },
  } do
    for ranks = 1, 2 do
      it(("is waited for by %d: it %s"):format(ranks, what), function()
        parts_of.LATE_SECONDS = 20
        local told, took = load(ranks, case[1], case[2])
        for rank = 1, ranks do
          assert.is_false(told[rank])
          assert.is_true(took[rank] < 10)
        end
        assert.is_true(math.max(unpack(took)) > 0.05)
        parts_of.LATE_SECONDS = 0.2
        told, took = load(ranks, case[1])
        for rank = 1, ranks do
          assert.truthy(told[rank] and told[rank]:find("file 'rank-0.safetensors'", 1, true), told[rank])
          assert.is_true(took[rank] < 10)
        end
        assert.is_true(math.max(unpack(took)) > 0.2)
      end)
    end
  end

  it("is not waited for where it is longer than the manifest says, nor by who only looks", function()
    parts_of.LATE_SECONDS = 20
    local told, took = load(1, "echo >>rank-0.safetensors")
    assert.truthy(told[1] and told[1]:find("file 'rank-0.safetensors'", 1, true), told[1])
    assert.is_true(took[1] < 10)
    shell.run(("rm %s/now/rank-0.safetensors"):format(folder))
    local began = peri.ffi.C.peri_time_ns()
    assert.has_error(function() peri.checkpoint.open(folder .. "/now") end)
    assert.is_true(tonumber(peri.ffi.C.peri_time_ns() - began) < 10e9)
  end)

  it("makes resume take the older checkpoint after the wait, and say so", function()
    local script = shell.write(folder .. "/resume.lua", [[
local peri = require "perilune"
require("perilune.checkpoint.parts").LATE_SECONDS = 0.3
local saver = peri.checkpoint.Saver { parts = { model = peri.nn.Linear { in_features = 2, out_features = 2 } } }
local from = saver:resume() or 0
for step = from + 1, from + 2 do saver:step(step) end
print("from", from)
]])
    local command = ("%s run --checkpoint %s/saves --every 1steps --resume auto %s"):format(shell.perilune, folder,
      script)
    assert.truthy(shell.run(command):find "from\t0")
    shell.run(("rm %s/saves/save-*-step-2/rank-0.safetensors"):format(folder))
    local out = shell.run(command)
    assert.truthy(out:find("step%-2': file 'rank%-0.safetensors'[^\n]* is waited for, 0.3 s at most"), out)
    assert.truthy(out:find "going on from '[^']*step%-1', step 1", out)
    assert.truthy(out:find "from\t1", out)
  end)
end)
