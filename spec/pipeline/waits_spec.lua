-- Where measured steps wait, and for whom: one rank is slowed on purpose, in one operation, and is the one that is
-- named.
-- (The ranks of a sim world take turns: who computes stops all of them. So this needs processes.)
-- mpirun: 2
local peri = require "perilune"
local worlds = require "spec.support.worlds"
local json = require "dkjson"
local support = require "spec.support.pipeline"
local shell = require "spec.support.shell"
local schedules, waits = peri.pipeline.schedules, require "perilune.pipeline.waits"
local C = peri.ffi.C

local SLOW = 30 -- ms

local function sleep(ms)
  local stop = C.peri_time_ns() + ms * 1000000LL
  while C.peri_time_ns() < stop do C.peri_pause(100000) end
end

--- A measured pipeline, in which `who` sleeps before operation `place` of its schedule (nil: last).
local function measured(world, device, schedule, who, place, fields)
  local model = support.model(world, device)
  local slow = { "slow", run = function() if world:rank() == who then sleep(SLOW) end end }
  for key, value in peri.util.ordered(fields or {}) do slow[key] = value end
  local p = peri.pipeline.Pipeline { model = model, optimizer = support.optimizer(model), vote = false,
    schedule = schedule:insert(slow, place and { before = place } or { last = true }) }
  local batches = support.batches(world:rank(), device, 12)
  for step = 1, 8 do
    if step == 4 then p:measure(true) end
    p:progress(batches)
  end
  return p
end

--- The row of an operation and channel, or one of nothing.
local function row_of(rows, operation, channel)
  for _, row in ipairs(rows) do
    if row.operation == operation and row.channel == channel then return row end
  end
  return { ms = 0, late_ms = 0 }
end

describe("a measured step", function()
  worlds.each("waits for the rank that comes last", function(world, device, n)
    for who = 0, math.min(n, 2) - 1 do
      -- It sleeps before its ids leave: what others wait for is what it announces, not the ids themselves.
      local p = measured(world, device, schedules.sparse_dist_lite, who, "input_dist")
      local found = waits.waits(p)
      assert.equal(5, found.steps)
      assert.equal(n, #found.ranks)
      for r, rows in ipairs(found.ranks) do
        local control = row_of(rows, "wait_dist", "control")
        if r - 1 == who then
          assert.is_true(control.late_ms < SLOW / 2, ("rank %d itself waits %g ms"):format(who, control.late_ms))
        else
          assert.same({ who, r - 1 }, { control.last, control.rank })
          assert.is_true(control.late_ms > SLOW / 2 and control.late_ms <= control.ms,
            ("%g of %g ms"):format(control.late_ms, control.ms))
          assert.is_true(control.last_share > 0.6)
          assert.matches(("^rank %d works %%d[%%d.]* ms in 'slow', others "):format(who), control.hint)
          assert.is_true(row_of(rows, "wait_dist", "ids").ms < SLOW / 2)
        end
      end
      local text = waits.waits_text(found)
      assert.matches(("rank %d waits [%%d.]+ ms a step in 'wait_dist' for sizes of ids %%(channel control%%): [%%d.]+ "
        .. "until all had come, last rank %d %%("):format(1 - who, who), text)
      assert.matches("clocks of ranks agree to [%d.]+ ms", text)
    end
  end, { sizes = { 2 }, timeout = 60, only = "mpi" })

  worlds.each("waits in the backward pass for one that comes late to it", function(world, device)
    local who = world:size() - 1
    local found = waits.waits(measured(world, device, schedules.base, who, "backward"))
    for r, rows in ipairs(found.ranks) do
      if r - 1 ~= who then
        local late = 0
        for _, channel in ipairs { "rows", "dense" } do
          local row = row_of(rows, "backward", channel)
          if row.last == who then late = late + row.late_ms end
        end
        assert.is_true(late > SLOW / 2, ("%g ms"):format(late))
      end
    end
  end, { sizes = { 2 }, timeout = 60, only = "mpi" })

  worlds.each("is measured by clocks that have been compared", function(world)
    local ahead, wrong = waits.clock(world)
    assert.is_true(wrong >= 0 and wrong < 1e9)
    -- the ranks have one clock
    assert.is_true(math.abs(ahead) <= wrong + 1, ("%g ns ahead, within %g"):format(ahead, wrong))
  end, { sizes = { 2, 3 }, devices = { "cpu" }, timeout = 60 })

  worlds.each("is shown on one timeline with those of the other ranks", function(world, device, n)
    local path = os.tmpname()
    local p = measured(world, device, schedules.sparse_dist, 0, "input_dist", { ahead = 1 })
    local found = peri.pipeline.show.write(p, path)
    if world:rank() == 0 then
      local events, of, before = json.decode(shell.read(path)).traceEvents, {}, false
      for _, e in ipairs(events) do
        local kind = ({ wait = "wait", predicted = "predicted" })[e.cat] or "operation"
        if e.ph == "M" then
          of[e.args.name .. e.pid - 1] = true
          kind = "name"
        end
        of[kind .. e.pid - 1] = (of[kind .. e.pid - 1] or 0) + 1
        if kind ~= "name" then
          assert.is_true(e.ts >= 0 and e.dur >= 0)
          before = before or e.ts == 0
        end
        if kind == "wait" then assert.is_true(e.args.last >= 0 and e.args.last < n, tostring(e.args.last)) end
      end
      assert.is_true(of["predicted" .. n] >= 10 * 5 and of["predicted, of the times on rank 0" .. n],
        "predicted beside measured")
      assert.is_true(before, "the timeline begins with the first operation")
      for r = 0, n - 1 do
        assert.equal(10 * 5, of["operation" .. r])
        assert.is_true(of[("rank %d%d"):format(r, r)])
        assert.is_true(#found.ranks[r + 1] == 0 or of["wait" .. r] > 0)
      end
    end
    world:barrier():wait()
    os.remove(path)
    p:measure(false)
  end, { sizes = { 1, 2, 3 }, timeout = 60 })

  worlds.each("is measured until it is asked for, and anew afterwards", function(world, device)
    local p = measured(world, device, schedules.sparse_dist_lite, 0, "input_dist")
    local found = waits.waits(p)
    assert.is_false(peri.ffi.state.watched)
    p:measure(false)
    assert.error_matches(function() waits.waits(p) end,
      "Pipeline: nothing is measured; call pipeline:measure%(true%) before the steps")
    p:measure(true)
    local batches = support.batches(world:rank(), device, 3)
    while p:progress(batches) do end -- luacheck: ignore
    local again = waits.waits(p)
    assert.is_true(found.steps == 5 and again.steps >= 3)
    p:measure(false)
  end, { sizes = { 2 }, devices = { "cpu" }, timeout = 60 })
end)

if worlds.mpirun then return end

describe("perilune schedule trace", function()
  it("says on several ranks who waits for whom, and what would hide it", function()
    if shell.no_launcher() then return pending(shell.no_launcher()) end
    local path = os.tmpname()
    local out, status = shell.run(("%s schedule trace base -n 2 --steps 6 -o %s 2>&1"):format(shell.perilune, path))
    os.remove(path)
    assert.equal(0, status, out)
    local n = 0
    for line, hint in out:gmatch "\n(rank [01] waits [^\n]*)\n(  [^\n]+)" do
      assert.matches("ms a step in '%w+' for [%w ,]+ %(channel %w+%): [%d.]+ until all had come, last [%w ]+ %(%d+ "
        .. "%%%)$", line)
      assert.is_true(#hint > 20, hint)
      n = n + 1
    end
    assert.is_true(n > 0 or out:find("no rank waits for more than", 1, true) ~= nil, out)
  end)
end)
