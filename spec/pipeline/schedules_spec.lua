-- Every schedule of staleness 0 learns what the plain loop learns, bit for bit, whatever the number of ranks and
-- batches: with tables in memory and in files, in two dimensions, and on a device whose streams run late.
-- PERI_TEST_STEPS=200: so many batches in all worlds, not in one.
-- deadline: 300 s
-- mpirun: 4
-- machines: 2,2
-- takes: 10 s
local peri = require "perilune"
local worlds = require "spec.support.worlds"
local support = require "spec.support.pipeline"
local schedules = peri.pipeline.schedules

local STEPS = tonumber(os.getenv "PERI_TEST_STEPS" or 8)
local LONG = 60
local later = { semi_sync = 100000 } -- up to there it is exact

--- Share of the rows in memory, by the number of ranks: little more than a batch of all ranks needs.
local cached = { 0.5, 0.7, 0.8, 0.9, [8] = 1 }

--- Models that schedules train: which (a name, or a name and the number that it takes), options of the model, and of
--- the oracle's if they differ (as functions of the number of ranks).
local cases = {
  memory = { schedules = { "base", "sparse_dist", "sparse_dist_lite", "fused_sparse_dist", "prefetch_sparse_dist",
    { "semi_sync", later.semi_sync }, "wire_first" }, sizes = { 1, 2, 3, 8 }, options = function() return {} end },
  ["no replicas"] = { schedules = { { "accumulate", 1 } }, sizes = { 1, 2, 3, 8 },
    options = function() return { no_replica = true } end },
  files = { schedules = { "base", "sparse_dist", "fused_sparse_dist", "prefetch_sparse_dist", "wire_first" },
    options = function(n) return { files = cached[n] } end, plain = function() return {} end, sizes = { 1, 2, 3, 8 },
    check = function(model, n)
      local evictions = 0
      for _, module in ipairs(model.sharded) do
        for _, shard in ipairs(module:local_shards()) do
          evictions = evictions + (shard.cached and shard.cache_statistics().evictions or 0)
        end
      end
      assert.is_true(evictions > 0 or n > 1, "no row left the cache for another")
    end },
  ["two dimensions"] = { schedules = { { "prefetch_fused_2d", 3 } }, sizes = { 2, 8 },
    options = function(n) return { two_d = n / 2, sync_interval = 0 } end,
    plain = function(n) return { two_d = n / 2, sync_interval = 3 } end },
}

local function schedule_of(x)
  if type(x) == "string" then return schedules[x] end
  return schedules[x[1]](x[2])
end

local function train(world, device, schedule, n, options)
  local model = support.model(world, device, options)
  local pipeline = peri.pipeline.Pipeline { model = model, optimizer = support.optimizer(model), schedule = schedule }
  local losses = {}
  for loss in pipeline:run(support.batches(world:rank(), device, n)) do losses[#losses + 1] = loss end
  assert.same({}, pipeline:not_pipelined())
  return model, losses
end

local plain = support.plain_run

local function compare(case, world, device, n, list)
  local size = world:size()
  local expected, losses = plain(world, device, n, (case.plain or case.options)(size))
  for _, x in ipairs(list or case.schedules) do
    local schedule = schedule_of(x)
    local model, got = train(world, device, schedule, n, case.options(size))
    assert.same(losses, got)
    support.assert_same(expected, model, schedule.name)
    if case.check and n > 4 then case.check(model, size) end
  end
end

describe("schedules", function()
  for name, case in peri.util.ordered(cases) do
    worlds.each("learn what the plain loop learns: " .. name, function(world, device)
      compare(case, world, device, STEPS)
    end,
      { timeout = 60, sizes = case.sizes })
  end

  if STEPS < LONG then
    worlds.each(("do so over %d batches"):format(LONG), function(world, device)
      compare(cases.memory, world, device, LONG)
    end,
      { timeout = 60, sizes = { 2 }, devices = { "cpu" }, only = "sim" })
  end

  worlds.each("do so with fewer batches than are in flight", function(world, device)
    for n = 0, 4 do
      compare(cases.memory, world, device, n, { "fused_sparse_dist", "prefetch_sparse_dist", "wire_first" })
    end
  end, { sizes = { 1, 2 }, timeout = 60 })

  worlds.each("do so when they are detached in the middle, also of a group of batches", function(world, device)
    local list = { schedules.accumulate(2), schedules.accumulate(3), schedules.fused_sparse_dist, schedules.wire_first }
    for _, schedule in ipairs(list) do
      local function learned(detached)
        local model, n = support.model(world, device, { no_replica = true }), 0
        local pipeline = peri.pipeline.Pipeline { model = model, optimizer = support.optimizer(model),
          schedule = schedule }
        for _ in pipeline:run(support.batches(world:rank(), device, 7)) do
          n = n + 1
          if n == detached then pipeline:detach() end
        end
        return model
      end
      local expected = support.learned(learned(0))
      for n = 1, 2 do support.assert_same(expected, learned(n), ("%s, detached after %d"):format(schedule.name, n)) end
    end
  end, { sizes = { 1, 2 }, timeout = 60 })

  worlds.each("do so when state is loaded between two steps, while rows of the next are there", function(world, device)
    local BATCHES, left = 7, 3
    local other = support.model(world, device)
    support.plain(other, support.optimizer(other), support.batches(world:rank(), device, 5))
    local loaded = peri.shard.gather_state_dict(other:state_dict())
    local expected = support.model(world, device)
    local optimizer, batches = support.optimizer(expected), support.batches(world:rank(), device, BATCHES)
    support.plain(expected, optimizer, function()
      left = left - 1
      return left >= 0 and batches() or nil
    end)
    expected:load_state_dict(loaded)
    support.plain(expected, optimizer, batches)
    local want = support.learned(expected)
    for _, x in ipairs { "wire_first", "sparse_dist", "prefetch_sparse_dist", { "semi_sync", later.semi_sync } } do
      local model = support.model(world, device)
      local pipeline = peri.pipeline.Pipeline { model = model, optimizer = support.optimizer(model),
        schedule = schedule_of(x) }
      for _, step in pipeline:run(support.batches(world:rank(), device, BATCHES)) do
        if step == 3 then model:load_state_dict(loaded) end
      end
      support.assert_same(want, model, pipeline.schedule.name)
    end
  end, { sizes = { 1, 2, 3 }, timeout = 60 })

  it("of staleness 0 are all among them", function()
    local known = { one_f_one_b = true } -- of a model in stages: stages_spec.lua
    for _, case in peri.util.ordered(cases) do
      for _, x in ipairs(case.schedules) do known[type(x) == "table" and x[1] or x] = true end
    end
    for _, name in ipairs(schedules.names) do
      local s = schedules[name]
      if peri.util.is_callable(s) then s = s(later[name]) end
      local trains = s:check().first.backward
      assert.is_true(not trains or known[name] == true, ("no case for schedule '%s'"):format(name))
    end
  end)
end)
