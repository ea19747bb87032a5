-- What a training step of the demonstration asks of a GPU, counted on the pretended one (tests/cuda_host), so that it stays down: launches,
-- copies, events, memory, and how often the host waits. Who makes a number smaller lowers its bound here.
-- deadline: 240 s
local shell = require "spec.support.shell"
local here = io.popen("pwd"):read "*l"
local folder = ("%s/%s/cuda_host"):format(here, shell.build)

--- The most that there may be of each on a step of rank 0, by the number of ranks.
--- "asked", how often the host looked whether something has run, depends on time and has none.
local BOUNDS = {
  [1] = { launches = 37, products = 14, exchanges = 0, copies_on_device = 0, copies_up_pageable = 0, copies_up_pinned = 4, copies_down = 1,
    records = 21, stream_waits = 14, events_made = 0, allocations = 50, frees = 51, pinned_made = 0, blocked = 0, asked = math.huge },
  [2] = { launches = 39, products = 14, exchanges = 7, copies_on_device = 10, copies_up_pageable = 0, copies_up_pinned = 4, copies_down = 1,
    records = 36, stream_waits = 24, events_made = 0, allocations = 54, frees = 55, pinned_made = 0, blocked = 0, asked = math.huge },
}
BOUNDS[4] = BOUNDS[2]

describe("a training step of the demonstration", function()
  for _, n in ipairs { 1, 2, 4 } do
    it(("asks no more of a GPU than it did: %d of them"):format(n), function()
      local there = io.open(folder .. "/libperilune_cuda_host.so")
      if not there then return pending "no C++ compiler was found" end
      there:close()
      if shell.no_launcher() then return pending(shell.no_launcher()) end
      if n > 1 and not shell.has "mpirun" then return pending "mpirun was not found" end
      local out, status = shell.run(("%s run -n %d spec/support/step_counts.lua %s"):format(shell.perilune, n, folder),
        { PERI_CUDA_HOST_GPUS = n, PERI_PLUGIN_PATH = folder .. ":" .. here .. "/" .. shell.build, PERI_NUM_THREADS = 1 })
      assert.equal(0, status, out)
      local seen, over = 0, {}
      for name, count in out:gmatch "([%w_]+) ([%d.]+)\n" do
        seen = seen + 1
        local most = BOUNDS[n][name]
        assert.is_truthy(most, "no bound for " .. name)
        if tonumber(count) > most then over[#over + 1] = ("%s: %s, at most %g"):format(name, count, most) end
      end
      assert.equal(15, seen, out)
      assert.equal("", table.concat(over, "\n"), out)
    end)
  end
end)
