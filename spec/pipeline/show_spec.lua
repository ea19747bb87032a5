-- Schedules as text, simulated steps, measured ones as JSON, and `perilune schedule`.
local peri = require "perilune"
local json = require "dkjson"
local sim = require "perilune.dist.sim"
local shell = require "spec.support.shell"
local support = require "spec.support.pipeline"
local show, schedules = peri.pipeline.show, peri.pipeline.schedules

describe("a simulated step", function()
  local function step_of(schedule, times)
    for _, o in ipairs(schedule.operations) do times[o.name] = times[o.name] or 0 end
    local list, ends = show.simulate(schedule, times, 30), {}
    for _, x in ipairs(list) do ends[x.step] = math.max(ends[x.step] or 0, x.to) end
    return (ends[29] - ends[19]) / 10
  end

  it("takes as long as its longest stream, where nothing waits", function()
    assert.equal(10, step_of(schedules.base, { load = 2, forward = 3, backward = 4, optimizer = 1, to_device = 5 }))
    assert.equal(20, step_of(schedules.sparse_dist, { load = 2, forward = 3, backward = 4, optimizer = 1, input_dist = 20 }))
    assert.equal(10, step_of(schedules.sparse_dist, { load = 2, forward = 3, backward = 4, optimizer = 1, input_dist = 9 }))
  end)

  it("takes what is not hidden besides", function()
    -- On one stream nothing is hidden.
    assert.equal(29, step_of(schedules.sparse_dist:set { input_dist = { on = "main" } }, { forward = 5, backward = 4, input_dist = 20 }))
    -- A lookup on a stream of its own comes after the tables' update and before the forward pass: it hides under neither.
    assert.equal(15, step_of(schedules.fused_sparse_dist, { forward = 5, backward = 4, lookup = 6 }))
    assert.equal(10, step_of(schedules.fused_sparse_dist, { optimizer = 6, backward = 4, lookup = 6 })) -- but under the optimizer
  end)

  it("says who waits for whom, and refuses what it does not know", function()
    assert.matches("\na step takes 29\n?", show.simulation(schedules.sparse_dist, { input_dist = 25, wait_dist = 4 }))
    assert.matches("forward waits for wait_dist: %d+", show.simulation(schedules.sparse_dist, { input_dist = 25, wait_dist = 4 }))
    assert.error_matches(function() show.simulate(schedules.base, { lookup = 1 }, 3) end, "simulate: no operation 'lookup'")
    assert.error_matches(function() show.simulate(schedules.base, { load = -1 }, 3) end, "simulate: the time of 'load' is %-1")
  end)
end)

describe("a measured run", function()
  it("is a Chrome trace of every operation of every batch", function()
    sim.run(2, function(rank, world)
      local model = support.model(world, "cpu")
      local p = peri.TrainPipelineFusedSparseDist { model = model, optimizer = support.optimizer(model) }
      assert.error_matches(function() show.trace(p) end, "TrainPipelineFusedSparseDist: nothing is measured")
      p:measure(true)
      for _ in p:run(support.batches(rank, "cpu", 5)) do end -- luacheck: ignore
      local trace, seen, last = json.decode(show.trace(p)), {}, 0
      for _, e in ipairs(trace.traceEvents) do
        assert.same({ "X", rank }, { e.ph, e.pid })
        assert.is_true(e.ts >= last and e.dur >= 0)
        last = e.ts
        local key = e.name .. " " .. e.args.batch
        assert.is_nil(seen[key])
        seen[key] = e.tid
      end
      local n = 0
      for _ in pairs(seen) do n = n + 1 end -- any order: counted
      -- Each of 9 operations on each of 5 batches, and a load that finds nothing, on both ranks.
      assert.equal(9 * 5 + 1, n)
      assert.same({ "embed", "dist", "copy", "main" }, { seen["lookup 4"], seen["input_dist 0"], seen["to_device 3"], seen["load 5"] })
      for _, o in ipairs(p.plan.operations) do assert.is_true(show.times(p)[o.name] >= 0) end
    end)
  end)
end)

describe("perilune schedule", function()
  local function run(arguments) return shell.run(("%s schedule %s 2>&1"):format(shell.perilune, arguments)) end
  local function file(text)
    local path = os.tmpname()
    local f = assert(io.open(path, "w"))
    f:write(text)
    f:close()
    return path
  end

  it("prints, checks and simulates a file's schedule", function()
    if shell.no_launcher() then return pending(shell.no_launcher()) end
    local path = file [[
      local Schedule = require("perilune").Schedule
      return function()
        return Schedule { name = "mine", { "load", ahead = 1 }, { "forward" }, { "backward" }, { "optimizer" }, { "zero_grad" } }
      end
    ]]
    assert.matches("^schedule 'mine', hash %x+\nplace  operation  batch  stream  when\n1      load       n%+1    main\n",
      (run("print " .. path)))
    local out, status = run("check " .. path)
    assert.equal(0, status)
    assert.matches("batches in flight  2\nprologue           1 step before the first, drain 0 after the last\nstaleness          tables 0, "
      .. "dense 0", out, 1, true)
    assert.matches("a step takes 7\n", (run("sim --times forward=2,backward=2 " .. path)))
    os.remove(path)
  end)

  it("says why one is refused, with another exit code", function()
    if shell.no_launcher() then return pending(shell.no_launcher()) end
    local path = file "return require('perilune').pipeline.schedules.base:drop('zero_grad')"
    local out, status = run("check " .. path)
    os.remove(path)
    assert.equal(1, status)
    assert.equal("perilune: schedule 'base': 'optimizer' (ahead 0, place 5) applies the grads of batch 0, of 'backward' (ahead 0, "
      .. "place 4), a second time: no 'zero_grad' has dropped them\n", out)
    out, status = run "check no_such_schedule"
    assert.equal(1, status)
    assert.matches("^perilune: schedule: cannot open no_such_schedule.*; or a name of the library: base, sparse_dist,", out)
  end)

  it("measures a run", function()
    if shell.no_launcher() then return pending(shell.no_launcher()) end
    local path = os.tmpname()
    local out, status = run(("trace sparse_dist --steps 2 -o %s"):format(path))
    assert.equal(0, status, out)
    assert.matches("a step takes [%d.]+", out)
    assert.equal(16, #json.decode(shell.read(path)).traceEvents) -- 8 operations in each of 2 steps
    os.remove(path)
  end)
end)
