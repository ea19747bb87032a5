-- Every schedule of staleness 0 learns what the plain loop learns, bit for bit, whatever the number of ranks and batches.
-- mpirun: 2 4
local peri = require "perilune"
local worlds = require "spec.support.worlds"
local support = require "spec.support.pipeline"
local schedules = peri.pipeline.schedules

local exact = { "base", "sparse_dist", "sparse_dist_lite", "fused_sparse_dist", "prefetch_sparse_dist" }

local function train(world, device, schedule, n, options)
  local model = support.model(world, device, options)
  local pipeline = peri.pipeline.Pipeline { model = model, optimizer = support.optimizer(model), schedule = schedule,
    inputs = options and options.inputs }
  local losses = {}
  for loss in pipeline:run(support.batches(world:rank(), device, n)) do losses[#losses + 1] = loss end
  return model, losses, pipeline
end

local function plain(world, device, n, options)
  local model = support.model(world, device, options)
  local losses = support.plain(model, support.optimizer(model), support.batches(world:rank(), device, n))
  return support.learned(model), losses
end

local STEPS = tonumber(os.getenv "PERI_TEST_STEPS" or 8)

describe("schedules", function()
  worlds.each("learn what the plain loop learns", function(world, device)
    local expected, losses = plain(world, device, STEPS)
    for _, name in ipairs(exact) do
      local model, got = train(world, device, schedules[name], STEPS)
      assert.same(losses, got)
      support.assert_same(expected, model, name)
    end
  end, { timeout = 60 })

  worlds.each("do so with fewer batches than are in flight", function(world, device)
    for n = 0, 4 do
      local expected, losses = plain(world, device, n)
      for _, name in ipairs { "fused_sparse_dist", "prefetch_sparse_dist" } do
        local model, got = train(world, device, schedules[name], n)
        assert.same(losses, got)
        support.assert_same(expected, model, name)
      end
    end
  end, { sizes = { 1, 2 }, timeout = 60 })
end)
