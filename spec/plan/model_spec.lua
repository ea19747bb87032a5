-- mpirun: 3
-- A planner as the plan of a model: the same plan on all ranks, which the model then has.
local peri = require "perilune"
local worlds = require "spec.support.worlds"
local plan = peri.plan

local function collection()
  local function config(name, rows, dim)
    return peri.EmbeddingBagConfig { name = name, num_embeddings = rows, embedding_dim = dim, feature_names = { name } }
  end
  return peri.EmbeddingBagCollection { tables = { config("a", 1000, 8), config("b", 40, 16), config("c", 300, 4) },
    fused_params = { optimizer = "adagrad", learning_rate = 0.1 }, seed = 3 }
end

describe("DistributedModelParallel { plan = planner }", function()
  worlds.each("plans the model that it gets", function(world, _, n)
    local planner = plan.EmbeddingShardingPlanner { topology = plan.Topology { world_size = n }, batch_size = 4,
      sharder = plan.perilune_sharder, constraints = { b = plan.ParameterConstraints { sharding_types = { "row_wise" } } } }
    local module = peri.nn.Sequential { collection() }
    local want = plan.to_text(planner:plan(plan.describe.of(module)))
    local model = peri.DistributedModelParallel { module = module, plan = planner, group = world }
    for _, text in ipairs(world:all_gather_object(plan.to_text(model.plan))) do assert.equal(want, text) end
    assert.equal("row_wise", model.plan:get_plan_for_module("0").tables.b.sharding_type)
    local batch = peri.KeyedJaggedTensor { keys = { "a", "b", "c" }, values = peri.tensor({ 7, 999, 39, 5, 0, 299 }, "i64"),
      lengths = peri.tensor({ 1, 1, 2, 0, 1, 1 }, "i64") }
    local alone = collection()(batch):values():to_list()
    assert.same(alone, peri.util.resolve(model(batch)):values():to_list())
  end, { devices = { "cpu" } })

  worlds.each("refuses a planner for other ranks", function(world, _, n)
    local planner = plan.EmbeddingShardingPlanner { topology = plan.Topology { world_size = n + 1 } }
    assert.error_matches(function()
      peri.DistributedModelParallel { module = peri.nn.Sequential { collection() }, plan = planner, group = world }
    end, ("topology has %d ranks, the model is shared by %d"):format(n + 1, n))
  end, { devices = { "cpu" } })
end)
