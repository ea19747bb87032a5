-- deadline: 300 s
-- Moments of whole models, drawn at random: what is kept of one is copies, which further steps do not change; loaded
-- back, into the same model or a new one, training goes on bit for bit as if it had not gone on in between.
local peri = require "perilune"
local moments = require "spec.support.moments"
local sim = require "perilune.dist.sim"

local CASES, STOP, STEPS = tonumber(os.getenv "PERI_TEST_MOMENTS") or 8, 4, 7
local FIRST = tonumber(os.getenv "PERI_TEST_FIRST_MOMENT") or 1

local function losses(m, from, to)
  local list = {}
  for n = from, to do list[#list + 1] = moments.step(m, n) end
  return list
end

describe("a moment of a whole model", function()
  for number = FIRST, FIRST + CASES - 1 do
    local case, ranks = moments.case(number), 1 + number % 4
    it(("is loaded back bit for bit, on %d ranks: %s"):format(ranks, case.text), function()
      sim.run(ranks, function(_, world)
        local m = moments.make(case, world, "cpu")
        losses(m, 1, STOP)
        local cloned, gathered = moments.keep(m, "clone"), moments.keep(m, "gather")
        local whole = moments.text(gathered)
        local want = losses(m, STOP + 1, STEPS)
        local last = moments.text(moments.keep(m, "gather"))
        assert.same(whole, moments.text(gathered)) -- nothing that was kept has changed
        for what, kept in peri.util.ordered { clone = cloned, gather = gathered } do
          moments.load(m, kept)
          assert.same(whole, moments.text(moments.keep(m, "gather")), what)
          assert.same(want, losses(m, STOP + 1, STEPS), what)
          assert.same(last, moments.text(moments.keep(m, "gather")), what)
          local other = moments.make(case, world, "cpu")
          losses(other, 20, 20)
          moments.load(other, kept)
          assert.same(whole, moments.text(moments.keep(other, "gather")), what)
          assert.same(want, losses(other, STOP + 1, STEPS), what)
          assert.same(last, moments.text(moments.keep(other, "gather")), what)
        end
      end)
    end)
  end
end)

local names = { "base", "wire_first", "sparse_dist", "sparse_dist_lite", "fused_sparse_dist", "prefetch_sparse_dist" }

--- The name of a schedule for a case. What is looked up ahead needs tables that the backward pass updates, and (its
--- state would be refused) none of raw ids.
local function schedule_for(case, number)
  local name = names[1 + number % #names]
  for _, p in ipairs(name == "wire_first" and case.parts or {}) do
    if p.kind == "parameters" or p.kind == "raw" then return "sparse_dist" end
  end
  return name
end

--- A pipeline over the batches from number `first` on, and a function that makes step n of it.
local function pipeline_of(m, name, first)
  local n = first - 1
  local function batches()
    n = n + 1
    return n <= STEPS and moments.batch(m, n) or nil
  end
  local inputs = {} -- what trained processors make of ids cannot leave early
  for i, p in ipairs(m.case.parts) do
    if p.kind == "processed" then inputs[("parts.%d"):format(i - 1)] = false end
  end
  local pipeline = peri.pipeline.Pipeline { model = m.model, optimizer = m.optimizer,
    schedule = peri.pipeline.schedules.load(name), inputs = inputs }
  pipeline.told = true -- that those are not pipelined
  return pipeline, function(step)
    moments.before(m, step)
    local loss = pipeline:progress(batches)
    moments.after(m)
    return loss:item()
  end
end

describe("a moment in the middle of a pipeline", function()
  for number = FIRST, FIRST + CASES - 1 do
    local case, ranks = moments.case(number), 1 + (number + 1) % 4
    local name = schedule_for(case, number)
    it(("is that of the last step, whatever is in flight: %s on %d ranks, %s"):format(name, ranks, case.text),
      function()
      sim.run(ranks, function(_, world)
        local m, want = moments.make(case, world, "cpu"), {}
        local pipeline, step = pipeline_of(m, name, 1)
        for n = 1, STOP do step(n) end
        local kept = moments.keep(m, "gather")
        local whole = moments.text(kept)
        for n = STOP + 1, STEPS do want[#want + 1] = step(n) end
        pipeline:close()
        local last = moments.text(moments.keep(m, "gather"))
        assert.same(whole, moments.text(kept))
        local other, got = moments.make(case, world, "cpu"), {}
        moments.load(other, kept)
        assert.same(whole, moments.text(moments.keep(other, "gather")))
        local _, next_step = pipeline_of(other, name, STOP + 1)
        for n = STOP + 1, STEPS do got[#got + 1] = next_step(n) end
        assert.same(want, got)
        assert.same(last, moments.text(moments.keep(other, "gather")))
      end)
    end)
  end
end)

describe("averages in place that a lookup has made ahead of their step", function()
  it("are an error of the state until the step is made, and the state of any other moment goes on bit for bit",
    function()
    local case = moments.case(1)
    local fused = { optimizer = "emainplace_rowwise_adagrad", emainplace_mode = { step_ema = 3, step_start = 1,
      step_ema_coef = 0.5 } }
    case.parts, case.dense, case.schedule, case.of_tables = { { kind = "bags", fused = fused } }, "SGD", false, false
    sim.run(2, function(_, world)
      local m, seen, want, kept = moments.make(case, world, "cpu"), {}, {}, {}
      local pipeline, step = pipeline_of(m, "wire_first", 1)
      for n = 1, STEPS do
        want[n] = step(n)
        local ok, dict = pcall(moments.keep, m, "gather")
        seen[n], kept[n] = ok and "kept" or dict.message, ok and dict or nil
      end
      pipeline:close()
      for n = 1, STEPS do
        if n % 3 == 2 and n < STEPS then assert.matches("averages in place of step " .. n + 1, seen[n])
        else assert.equal("kept", seen[n]) end
        if kept[n] then
          local other = moments.make(case, world, "cpu")
          moments.load(other, kept[n])
          assert.same({ unpack(want, n + 1) }, losses(other, n + 1, STEPS))
        end
      end
    end)
  end)
end)
