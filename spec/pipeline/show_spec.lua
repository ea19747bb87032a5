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
    local on_main = { load = { on = "main" } }
    assert.equal(10, step_of(schedules.base:set(on_main), { load = 2, forward = 3, backward = 4, optimizer = 1,
      to_device = 5 }))
    assert.equal(20, step_of(schedules.sparse_dist, { load = 2, forward = 3, backward = 4, optimizer = 1,
      input_dist = 20 }))
    assert.equal(10, step_of(schedules.sparse_dist:set(on_main), { load = 2, forward = 3, backward = 4, optimizer = 1,
      input_dist = 9 }))
    -- Batches are made in a lane of their own.
    assert.equal(8, step_of(schedules.base, { load = 7, forward = 3, backward = 4, optimizer = 1, to_device = 5 }))
    assert.equal(12, step_of(schedules.sparse_dist, { load = 12, forward = 3, backward = 4, optimizer = 1,
      input_dist = 9 }))
  end)

  it("takes what is not hidden besides", function()
    -- On one stream nothing is hidden.
    assert.equal(29, step_of(schedules.sparse_dist:set { input_dist = { on = "main" } },
      { forward = 5, backward = 4, input_dist = 20 }))
    -- A lookup on a stream of its own comes after the tables' update and before the forward pass: it hides under
    -- neither.
    assert.equal(15, step_of(schedules.fused_sparse_dist, { forward = 5, backward = 4, lookup = 6 }))
    -- but under the optimizer
    assert.equal(10, step_of(schedules.fused_sparse_dist, { optimizer = 6, backward = 4, lookup = 6 }))
  end)

  it("advises nothing that only streams of their own bring, where all operations share a processor", function()
    for name, schedule in peri.util.ordered(schedules) do
      if peri.Schedule.is(schedule) then
        local times = {}
        for i, o in ipairs(schedule.operations) do times[o.name] = 1 + i % 3 end
        for _, h in ipairs(show.hints(schedule, times, true)) do error(("%s: %s"):format(name, h.words)) end
        assert.matches("nothing further ahead, or beside the rest", show.simulation(schedule, times, true))
      end
    end
  end)

  it("says what would make it shorter, and no more than that is true", function()
    local function best(schedule, times)
      for _, o in ipairs(schedule.operations) do times[o.name] = times[o.name] or 0 end
      return show.hints(schedule, times)[1]
    end
    -- Reading takes 6 of 13, and nothing of it needs the model.
    local h = best(schedules.base:set { load = { on = "main" } }, { load = 6, forward = 3, backward = 4 })
    assert.same({ 7, 0 }, { h.step, h.stale })
    assert.matches("'load' beside the rest, by workers of its loader", h.words)
    -- A lookup between the update before it and the forward pass after it is hidden by no exact order. By a stale one
    -- it is, under the forward pass; the backward pass changes what it reads, and cannot run meanwhile.
    h = best(schedules.fused_sparse_dist, { lookup = 5, forward = 3, backward = 4 })
    assert.same({ 9, 1 }, { h.step, h.stale })
    assert.matches("lookup = 1", h.words)
    local plain = schedules.sparse_dist:drop("lookup")
    assert.is_nil(best(plain, { forward = 3, backward = 4, input_dist = 2 }))
    assert.matches("\nnothing further ahead, or beside the rest, would make it shorter$",
      show.simulation(plain, { load = 0, to_device = 0, input_dist = 1, wait_dist = 0, zero_grad = 0, optimizer = 0 }))
    local shown = show.simulation(schedules.fused_sparse_dist, { lookup = 5, forward = 3, backward = 4, load = 0,
      zero_grad = 0, optimizer = 0, to_device = 0, input_dist = 0, wait_dist = 0 })
    assert.matches("\n9 with retime { [^\n]*lookup = 1 } %(tables are read one update older%)", shown)
  end)

  it("says who waits for whom, and refuses what it does not know", function()
    assert.matches("\na step takes 29\n?", show.simulation(schedules.sparse_dist, { input_dist = 25, wait_dist = 4 }))
    assert.matches("lookup waits for wait_dist: %d+",
      show.simulation(schedules.sparse_dist, { input_dist = 25, wait_dist = 4 }))
    assert.error_matches(function() show.simulate(schedules.base, { lookup = 1 }, 3) end,
      "simulate: no operation 'lookup'")
    assert.error_matches(function() show.simulate(schedules.base, { load = -1 }, 3) end,
      "simulate: the time of 'load' is %-1")
  end)
end)

describe("a measured run", function()
  it("is compared with what is predicted of it", function()
    sim.run(1, function(_, world)
      local model = support.model(world, "cpu")
      local schedule = schedules.base:insert({ "aside", on = "aside", run = function() end }, { last = true })
      local p = peri.pipeline.Pipeline { model = model, optimizer = support.optimizer(model), schedule = schedule }
      assert.is_nil(show.compare(p))
      p:measure(true)
      local by_name, ms = {}, { forward = 3, backward = 4, optimizer = 1, aside = 4 }
      for _, o in ipairs(p.plan.operations) do by_name[o.name] = o end
      for step = 0, 4 do -- 12 ms of operations every 14 ms
        local at = step * 14e6
        for _, name in ipairs { "forward", "backward", "optimizer", "aside" } do
          p.measured[#p.measured + 1] = { operation = by_name[name], batch = step, from = at, to = at + ms[name] * 1e6 }
          at = at + ms[name] * 1e6
        end
      end
      assert.same({ measured = 14, operations = 12, predicted = 12, apart = 8 }, show.compare(p))
    end)
  end)

  it("is a Chrome trace of every operation of every batch", function()
    sim.run(2, function(rank, world)
      local model = support.model(world, "cpu")
      local p = peri.TrainPipelineFusedSparseDist { model = model, optimizer = support.optimizer(model) }
      assert.error_matches(function() show.trace(p) end, "TrainPipelineFusedSparseDist: nothing is measured")
      p:measure(true)
      for _ in p:run(support.batches(rank, "cpu", 5)) do end -- luacheck: ignore
      local trace, seen, last = json.decode(show.trace(p)), {}, 0
      local threads = {}
      for _, e in ipairs(trace.traceEvents) do
        assert.same({ rank + 1, 0 }, { e.pid, e.tid % 1 })
        if e.ph == "M" then threads[e.tid] = e.args.name
        else
          assert.same({ "X", true, true }, { e.ph, e.ts >= last, e.dur >= 0 })
          last = e.ts
          local key = e.name .. " " .. e.args.batch
          assert.is_nil(seen[key])
          seen[key] = threads[e.tid]
        end
      end
      assert.equal("rank " .. rank, threads[0])
      local n = 0
      for _ in pairs(seen) do n = n + 1 end -- any order: counted
      -- Each of 9 operations on each of 5 batches, and a load that finds nothing, on both ranks.
      assert.equal(9 * 5 + 1, n)
      assert.same({ "embed", "dist", "copy", "load" }, { seen["lookup 4"], seen["input_dist 0"], seen["to_device 3"],
        seen["load 5"] })
      for _, o in ipairs(p.plan.operations) do assert.is_true(show.times(p)[o.name] >= 0) end
    end)
  end)
end)

describe("a trace", function()
  it("is JSON whatever operations are called", function()
    sim.run(1, function(_, world)
      local model, name = support.model(world, "cpu"), 'says "\\" and more'
      local p = peri.pipeline.Pipeline { model = model, optimizer = support.optimizer(model),
        schedule = schedules.base:insert({ "mine", name = name, run = function() end }, { last = true }) }
      p:measure(true)
      for _ in p:run(support.batches(0, "cpu", 2)) do end -- luacheck: ignore
      local found = 0
      for _, e in ipairs(json.decode(show.trace(p)).traceEvents) do found = found + (e.name == name and 1 or 0) end
      assert.equal(2, found)
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
    assert.matches("^schedule 'mine', hash %x+\nplace  operation  batch  stream  when\n1      load       n%+1    "
      .. "main\n", (run("print " .. path)))
    local out, status = run("check " .. path)
    assert.equal(0, status)
    assert.matches("batches in flight  2\nprologue           1 step before the first, drain 0 after the "
      .. "last\nstaleness          tables 0, dense 0", out, 1, true)
    assert.matches("a step takes 7\n", (run("sim --times forward=2,backward=2 " .. path)))
    os.remove(path)
  end)

  it("says why one is refused, with another exit code", function()
    if shell.no_launcher() then return pending(shell.no_launcher()) end
    local path = file "return require('perilune').pipeline.schedules.base:drop('zero_grad')"
    local out, status = run("check " .. path)
    os.remove(path)
    assert.equal(1, status)
    assert.equal("perilune: schedule 'base': 'optimizer' (ahead 0, place 5) applies the grads of batch 0, of "
      .. "'backward' (ahead 0, place 4), a second time: no 'zero_grad' has dropped them\n", out)
    out, status = run "check no_such_schedule"
    assert.equal(1, status)
    assert.matches("^perilune: schedule: cannot open no_such_schedule.*; or a name of the library: base, sparse_dist,",
      out)
  end)

  it("refuses options that mean nothing, before anything runs", function()
    if shell.no_launcher() then return pending(shell.no_launcher()) end
    for arguments, expected in pairs { -- any order: each by itself
      ["sim base --times forward=1,forward=2"] = { 1, "perilune: schedule: --times has 'forward' twice, as 1 and 2\n" },
      ["sim base --times forward=1,,load=2"] = { 1, "perilune: schedule: --times has '', wanted name=milliseconds\n" },
      ["sim base --times frward=1"] = { 1, "perilune: simulate: no operation 'frward' in schedule 'base', but load, "
        .. "to_device, zero_grad, forward, backward, optimizer\n" },
      ["print base --times forward=1"] = { 2, "perilune: schedule print: --times is for 'schedule sim'\n" },
      ["sim base -n 2"] = { 2, "perilune: schedule sim: --ranks is for 'schedule trace'\n" },
      ["check base -o x.json"] = { 2, "perilune: schedule check: --output is for 'schedule trace'\n" },
      ["trace base -n 2 -o /no/such/folder/x.json"] = { 2,
        "perilune: schedule trace: /no/such/folder/x.json: No such file or directory\n" },
    } do
      local out, status = run(arguments)
      assert.same(expected, { status, out })
    end
  end)

  it("measures a schedule without an optimizer, and leaves no file of one that it cannot run", function()
    if shell.no_launcher() then return pending(shell.no_launcher()) end
    local path, edited = os.tmpname(), os.tmpname()
    local f = io.open(edited, "w")
    f:write [[return require("perilune").pipeline.schedules.base:drop("optimizer", "zero_grad")]]
    f:close()
    local out, status = run(("trace %s --steps 2 -o %s"):format(edited, path))
    assert.equal(0, status, out)
    os.remove(path)
    os.remove(edited)
    out, status = run(("trace one_f_one_b -o %s"):format(path))
    assert.matches("schedule 'one_f_one_b' has a 'send'; the pipeline must have a stage", out)
    assert.equal(1, status)
    assert.is_nil((io.open(path)))
  end)

  it("leaves no file where it fails", function()
    if shell.no_launcher() then return pending(shell.no_launcher()) end
    local folder, clean = shell.temporary()
    local wrong = shell.write(folder .. "/wrong.lua", "return 3")
    local out, status = run(("trace %s -o %s/new.json"):format(wrong, folder))
    assert.equal(1, status, out)
    assert.equal("wrong.lua\n", (shell.run("ls " .. folder)))
    clean()
  end)

  it("measures a run", function()
    if shell.no_launcher() then return pending(shell.no_launcher()) end
    local path = os.tmpname()
    local out, status = run(("trace sparse_dist --steps 2 -o %s"):format(path))
    assert.equal(0, status, out)
    assert.matches("a step takes [%d.]+", out)
    assert.matches("\nmeasured  +[%d.]+ ms a step, [%d.]+ of them in operations\npredicted +[%d.]+ ms of these times; "
      .. "[%d.]+ if each", out)
    local count = {}
    for _, e in ipairs(json.decode(shell.read(path)).traceEvents) do
      count[e.cat or e.ph] = (count[e.cat or e.ph] or 0) + 1
    end
    assert.equal(2, count.backward)
    assert.is_true(count.predicted > 2 * 9)
    os.remove(path)
  end)
end)
