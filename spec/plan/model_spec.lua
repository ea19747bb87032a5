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
      sharder = plan.perilune_sharder,
      constraints = { b = plan.ParameterConstraints { sharding_types = { "row_wise" } } } }
    local module = peri.nn.Sequential { collection() }
    local want = plan.to_text(planner:plan(plan.describe.of(module)))
    local model = peri.DistributedModelParallel { module = module, plan = planner, group = world }
    for _, text in ipairs(world:all_gather_object(plan.to_text(model.plan))) do assert.equal(want, text) end
    assert.equal("row_wise", model.plan:get_plan_for_module("0").tables.b.sharding_type)
    local batch = peri.KeyedJaggedTensor { keys = { "a", "b", "c" },
      values = peri.tensor({ 7, 999, 39, 5, 0, 299 }, "i64"), lengths = peri.tensor({ 1, 1, 2, 0, 1, 1 }, "i64") }
    local alone = collection()(batch):values():to_list()
    assert.same(alone, peri.util.resolve(model(batch)):values():to_list())
  end, { devices = { "cpu" } })

  worlds.each("makes a plan where none is given: the same on all ranks, again the same, and no bit of a sum is "
    .. "another one", function(world, _, n)
      local function made()
        return peri.DistributedModelParallel { module = peri.nn.Sequential { collection() }, group = world }
      end
      local model = made()
      local text = plan.to_text(model.plan)
      for _, other in ipairs(world:all_gather_object(text)) do assert.equal(text, other) end
      assert.equal(text, plan.to_text(made().plan))
      local used = {}
      for _, entry in pairs(model.plan:get_plan_for_module("0").tables) do
        assert.equal("table_wise", entry.sharding_type)
        used[entry.ranks[1]] = true
      end
      assert.equal(math.min(n, 3), #peri.util.keys(used)) -- three tables: as many ranks have one
      local batch = peri.KeyedJaggedTensor { keys = { "a", "b", "c" },
        values = peri.tensor({ 7, 999, 39, 5, 0, 299 }, "i64"), lengths = peri.tensor({ 1, 1, 2, 0, 1, 1 }, "i64") }
      assert.same(collection()(batch):values():to_list(), peri.util.resolve(model(batch)):values():to_list())
    end, { devices = { "cpu" } })

  worlds.each("cuts columns of wide tables, unless the optimizer looks at whole rows", function(world, _, n)
    local function types(optimizer)
      local wide = peri.EmbeddingBagConfig { name = "wide", num_embeddings = 100, embedding_dim = 256,
        feature_names = { "f" } }
      local model = peri.DistributedModelParallel { group = world,
        module = peri.EmbeddingBagCollection { tables = { wide },
          fused_params = { optimizer = optimizer, learning_rate = 0.1 } } }
      return model.plan:get_plan_for_module("").tables.wide.sharding_type
    end
    assert.equal("table_wise", types "rowwise_adagrad")
    if n > 1 then assert.matches("column_wise", types "adagrad") end
  end, { devices = { "cpu" } })

  worlds.each("refuses a planner for other ranks", function(world, _, n)
    local planner = plan.EmbeddingShardingPlanner { topology = plan.Topology { world_size = n + 1 } }
    assert.error_matches(function()
      peri.DistributedModelParallel { module = peri.nn.Sequential { collection() }, plan = planner, group = world }
    end, ("topology has %d ranks, the model is shared by %d"):format(n + 1, n))
  end, { devices = { "cpu" } })
end)
