-- What a training step of the demonstration asks of a GPU, counted on the pretended one (tests/cuda_host), so that it
-- stays down: launches, copies, events, memory, and how often the host waits. Who makes a number smaller lowers its
-- bound here.
-- deadline: 240 s
local shell = require "spec.support.shell"
local here = io.popen("pwd"):read "*l"
local folder = ("%s/%s/cuda_host"):format(here, shell.build)

--- The most that there may be of each on a step of rank 0, by the number of ranks. "asked", how often the host looked
--- whether something has run, depends on time and has none. "waited": what it found unfinished when it looked, each
--- thing once. That is the report of how many ids each rank gets, which depends on ids, and nothing else; with several
--- ranks also the exchanges, which are looked after for the errors of other ranks while the host goes on. A copy to the
--- host for each report, and one of the loss. "blocked": waits for a whole stream; "awaited": for an event, which a
--- script that reads each loss (read_...) does once. "last": those of both with nothing queued behind them, so that the
--- stream has nothing to do. Launches and products together are at most 50 on any number of ranks.
local BOUNDS = {
  [1] = { launches = 32, products = 14, exchanges = 0, copies_on_device = 0, copies_up_pageable = 0,
    copies_up_pinned = 4, copies_down = 2, records = 22, stream_waits = 13, events_made = 0, allocations = 49,
    frees = 49, pinned_made = 0, blocked = 0, awaited = 0, graphs = 0, asked = math.huge, waited = 1, last = 1,
    read_waited = 2, read_blocked = 0, read_awaited = 1 },
  [2] = { launches = 36, products = 14, exchanges = 7, copies_on_device = 0, copies_up_pageable = 0,
    copies_up_pinned = 4, copies_down = 2, records = 36, stream_waits = 27, events_made = 0, allocations = 43,
    frees = 43, pinned_made = 0, blocked = 0, awaited = 0, graphs = 0, asked = math.huge, waited = 8, last = 8,
    read_waited = 9, read_blocked = 0, read_awaited = 1 },
}
BOUNDS[4] = BOUNDS[2]
--- The same model without a sharded module. The report on a step's ids is looked at by its backward pass, which goes on
--- where it is not there yet ("waited"), and judged by the next step.
local PLAIN = { launches = 25, products = 14, exchanges = 0, copies_on_device = 0, copies_up_pageable = 0,
  copies_up_pinned = 5, copies_down = 2, records = 17, stream_waits = 4, events_made = 0, allocations = 37, frees = 37,
  pinned_made = 0, blocked = 0, awaited = 0, graphs = 0, asked = math.huge, waited = 1, last = 0, read_waited = 1,
  read_blocked = 0, read_awaited = 1 }

--- With nn.graphed for the dense part, in three modules: two graphs for each, and no product. A copy for each input,
--- and for each gradient that comes back to a result; of several ranks for each gradient that ranks average, too, which
--- without a graph is written where it is averaged. Launches: lookups, the loss, the optimizer.
for bounds, launches in pairs { [PLAIN] = 14, [BOUNDS[1]] = 21, [BOUNDS[2]] = 25 } do
  bounds.graphed_launches, bounds.graphed_products, bounds.graphed_graphs = launches, 0, 6
  bounds.graphed_copies_on_device = bounds == BOUNDS[2] and 17 or 7
  for _, name in ipairs { "waited", "blocked", "awaited" } do bounds["graphed_" .. name] = bounds[name] end
end

--- Count a step on n ranks, or of the model alone, and compare with `bounds`.
local function count(n, bounds, kind)
  local there = io.open(folder .. "/libperilune_cuda_host.so")
  if not there then return pending "no C++ compiler was found" end
  there:close()
  if shell.no_launcher() then return pending(shell.no_launcher()) end
  if n > 1 and not shell.has "mpirun" then return pending "mpirun was not found" end
  local out, status = shell.run(("%s run -n %d spec/support/step_counts.lua %s %s"):format(shell.perilune, n, folder,
    kind), { PERI_CUDA_HOST_GPUS = n, PERI_PLUGIN_PATH = folder .. ":" .. here .. "/" .. shell.build,
      PERI_NUM_THREADS = 1 })
  assert.equal(0, status, out)
  local seen, over = 0, {}
  for name, number in out:gmatch "([%w_]+) ([%d.]+)\n" do
    seen = seen + 1
    local most = bounds[name]
    assert.is_truthy(most, "no bound for " .. name)
    if tonumber(number) > most then over[#over + 1] = ("%s: %s, at most %g"):format(name, number, most) end
  end
  assert.equal(n < 4 and 29 or 22, seen, out)
  assert.equal("", table.concat(over, "\n"), out)
end

describe("a training step of the demonstration", function()
  for _, n in ipairs { 1, 2, 4 } do
    it(("asks no more of a GPU than it did: %d of them"):format(n), function() count(n, BOUNDS[n], "sharded") end)
  end

  it("waits for nothing where its tables are not sharded", function() count(1, PLAIN, "plain") end)
end)

describe("what takes offsets", function()
  it("makes the host wait for a GPU once a call, and in a loop that trains never; nor does attention within sequences "
    .. "that it knows; bucketize, permute, jagged to dense and back have queued work by then", function()
    local there = io.open(folder .. "/libperilune_cuda_host.so")
    if not there then return pending "no C++ compiler was found" end
    there:close()
    if shell.no_launcher() then return pending(shell.no_launcher()) end
    local out, status = shell.run(("%s run -n 1 spec/support/bag_counts.lua %s"):format(shell.perilune, folder),
      { PERI_PLUGIN_PATH = folder .. ":" .. here .. "/" .. shell.build })
    assert.equal(0, status, out)
    assert.equal("sum 1, 0\nmean 1, 0\nmax 1, 0\nattention 0\nbucketize 1, 0\npermute 1, 0\nto dense 1, 0\n"
      .. "of two levels 1, 0\nto jagged 1, 0\n", out)
  end)
end)
