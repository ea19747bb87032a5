-- Processes that die or stop while they train, in each slot of a schedule: the other rank gets an error that names them, by its deadline.
-- PERI_TEST_SCHEDULES: which ("sparse_dist prefetch_sparse_dist"). (mpirun: none: it starts its own)
-- deadline: 240 s
local peri = require "perilune"
local shell = require "spec.support.shell"
local support = require "spec.support.pipeline"
local schedules = peri.pipeline.schedules

local found = shell.has "mpirun"
local names = os.getenv "PERI_TEST_SCHEDULES" or "sparse_dist prefetch_sparse_dist"

local function slots_of(name)
  local list, slots = {}, support.slots(schedules.load(name), function() end)
  while true do
    local _, slot = slots(#list + 1)
    if not slot then return list end
    list[#list + 1] = slot
  end
end

--- Start an mpirun of two ranks for each slot. The function that is returned waits for its end: what the first of each two said, by slot,
--- and the log.
local function start(name, fault, deadline, n)
  local pipe = assert(io.popen(("LUA_PATH='%s' PERI_NUM_THREADS=1 timeout 100 %s --oversubscribe --mca orte_enable_recovery 1 -n %d %s "
    .. "spec/support/pipeline_fault.lua %s %s %g 2>&1"):format(package.path, shell.mpirun, 2 * n, shell.rank, name, fault, deadline)))
  return function()
    local ends, log = {}, {}
    for line in pipe:lines() do
      local slot, seconds, kind, message = line:match "^(%d+)|([%d.]+)|(%w+)|(.*)$"
      if slot then ends[tonumber(slot)] = { seconds = tonumber(seconds), name = kind, message = message } end
      log[#log + 1] = line
    end
    pipe:close()
    return ends, table.concat(log, "\n")
  end
end

local faults = {
  dies = { deadline = 30, most = 28, names = { EPEER = true, EABORTED = true }, message = "rank 1.* is gone" },
  stalls = { deadline = 2, most = 40, names = { ETIMEOUT = true, EPEER = true, EABORTED = true }, message = "rank 1" },
}

describe("a process that", function()
  local stalled = {}
  setup(function() -- most of their time they wait
    for name in names:gmatch "%S+" do
      stalled[name] = found and start(name, "stalls", faults.stalls.deadline, #slots_of(name))
    end
  end)

  for fault, expected in peri.util.ordered(faults) do
    for name in names:gmatch "%S+" do
      it(("%s in any slot of %s is an error on the other rank"):format(fault, name), function()
        if not found then return pending "Open MPI was not found" end
        local slots = slots_of(name)
        assert.is_true(#slots >= #schedules.load(name).operations)
        local finish = fault == "stalls" and stalled[name] or start(name, fault, expected.deadline, #slots)
        local ends, log = finish()
        for _, slot in ipairs(slots) do
          local got = ends[slot]
          assert.is_truthy(got, ("slot %d: nobody said anything:\n%s"):format(slot, log))
          assert.is_true(expected.names[got.name] == true, ("slot %d: %s: %s"):format(slot, got.name, got.message))
          assert.matches(expected.message, got.message)
          assert.is_true(got.seconds <= expected.most, ("slot %d after %.1f s"):format(slot, got.seconds))
        end
      end)
    end
  end
end)
