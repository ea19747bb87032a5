-- A thousand tables on 512 ranks: planned in seconds, within memory, and the same again.
-- takes: 15 s
local peri = require "perilune"
local plan = peri.plan

local GiB = 2 ^ 30

local function model_of(n)
  local state, tables = 5, {}
  local function draw(a, b)
    state = 16807 * state % 2147483647
    return a + state % (b - a + 1)
  end
  for i = 1, n or 1000 do
    tables[i] = { name = "t" .. i, num_embeddings = math.floor(10 ^ (3 + draw(0, 4000) / 1000)),
      embedding_dim = ({ 16, 32, 64, 128, 256 })[draw(1, 5)] }
  end
  return plan.describe.of { tables = tables, optimizer = "rowwise_adagrad" }
end

local function planned(model, max_placements)
  local planner = plan.EmbeddingShardingPlanner { topology = plan.Topology.preset("dgx_a100_80gb",
    { world_size = 512 }), sharder = plan.perilune_sharder, max_placements = max_placements }
  local started = os.clock()
  local made = planner:plan(model)
  return made, planner, os.clock() - started
end

describe("1000 tables on 512 ranks", function()
  it("are planned in under 10 s of this process, within every rank's memory", function()
    local made, planner, seconds = planned(model_of())
    assert.is_true(seconds < 10, ("%.1f s"):format(seconds))
    local used, best = {}, planner.last.best
    for r = 1, 512 do used[r] = 0 end
    for i, option in ipairs(best.proposal) do
      for k, shard in ipairs(option:shards()) do
        local r = best.placement[i] == true and k or best.placement[i][k] + 1
        used[r] = used[r] + shard.storage.hbm
      end
    end
    for r = 1, 512 do
      assert.is_true(used[r] > 0 and used[r] <= 0.85 * 80 * GiB, ("rank %d: %g"):format(r - 1, used[r]))
    end
    local n = 0
    for _ in pairs(made.plan[""].tables) do n = n + 1 end
    assert.equal(1000, n)
  end)

  it("are planned by our own estimates as soon, and no worse than by hand", function()
    local topology, step = plan.Topology { world_size = 512, local_world_size = 8 }, require "perilune.plan.step"
    local model = model_of()
    local planner = plan.EmbeddingShardingPlanner { topology = topology, estimates = "step",
      sharder = plan.perilune_sharder }
    local started = os.clock()
    planner:plan(model)
    local seconds = os.clock() - started
    assert.is_true(seconds < 10, ("%.1f s"):format(seconds))
    local tables, in_turn = model[1].tables, {}
    for i, t in ipairs(tables) do in_turn[t.name] = plan.table_wise((i - 1) % 512) end
    for _, by_hand in ipairs { plan.ShardingPlan { [""] = in_turn },
      plan.table_wise_by_size({ [""] = tables }, { world_size = 512 }) } do
      local ms = step.predict(by_hand, model, topology, 512, {}).ms
      assert.is_true(planner.last.best.rating <= ms, ("%g, by hand %g"):format(planner.last.best.rating, ms))
    end
  end)

  it("get the same plan again", function() -- a tenth of them: what could differ is not their number
    local function text() return plan.to_text((planned(model_of(100), 2e4))) end
    assert.equal(text(), text())
  end)
end)

describe("many tables that do not fit", function()
  it("are refused within seconds, with what would fit", function()
    local planner = plan.EmbeddingShardingPlanner { sharder = plan.perilune_sharder,
      topology = plan.Topology { world_size = 16, local_world_size = 8, compute_device = "cuda", hbm_cap = GiB,
        ddr_cap = GiB / 2 } }
    local started = os.clock()
    assert.error_matches(function() planner:plan(model_of(100)) end,
      "it would fit with [%d.]+ GiB %(hbm%) on every rank")
    assert.is_true(os.clock() - started < 20, os.clock() - started)
  end)
end)
