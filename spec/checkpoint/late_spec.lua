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
  --- Returns what each was told (false: nothing) and how many seconds it took.
  local function load(first, later)
    local there, told, took = folder .. "/there", {}, {}
    shell.run(("rm -rf %s; mkdir %s; cd %s; S=%s/saves; %s"):format(there, there, there, folder, first))
    local wait
    sim.run(2, function(rank, world)
      local model, began = small.build(world, peri.plan.row_wise()), peri.ffi.C.peri_time_ns()
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
        assert.is_true(took[rank] > 0.1 and took[rank] < 10)
      end
    end)
  end
end)
