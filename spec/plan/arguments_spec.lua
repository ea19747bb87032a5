-- What planners' functions are given by mistake: errors that name the function and the argument, never the inside.
local peri = require "perilune"
local signature = require "perilune.signature"
local plan = peri.plan

local function message_of(f, ...)
  local ok, err = pcall(f, ...)
  if ok then return nil end
  return tostring(type(err) == "table" and err.message or err)
end

local function refuses(pattern, f, ...) assert.matches(pattern, message_of(f, ...)) end

local function planner()
  return plan.EmbeddingShardingPlanner { topology = plan.Topology { world_size = 2 } }
end

describe("arguments of planners", function()
  it("are parts that can do their work", function()
    local topology = plan.Topology { world_size = 2 }
    refuses("EmbeddingShardingPlanner: topology is a table, wanted a Topology", plan.EmbeddingShardingPlanner,
      { topology = {} })
    refuses("partitioner has partition = nil, wanted a function", plan.EmbeddingShardingPlanner,
      { topology = topology, partitioner = {} })
    refuses("proposers %[1%] has feedback = nil", plan.EmbeddingShardingPlanner,
      { topology = topology, proposers = { {} } })
    refuses("EmbeddingEnumerator: constraints is a table, wanted a table of ParameterConstraints",
      plan.EmbeddingEnumerator, { topology = topology, constraints = { t = 3 } })
    refuses("tiers is 'vram', allowed: hbm, ddr, ssd", plan.FixedPercentageStorageReservation, { tiers = { "vram" } })
    refuses("num_poolings, wanted one for each of 1 input_lengths", plan.ShardingOption,
      { path = "", name = "t", rows = 1, dim = 4, data_type = "FP32", sharding_type = "table_wise",
        compute_kernel = "fused", runs = {}, input_lengths = { 1 }, num_poolings = {},
      batch_sizes = { 1 } })
  end)

  it("are models, and planners that have planned", function()
    refuses("plan: model %[1%] has kind = nil, wanted a string", function() planner():plan { { tables = {} } } end)
    refuses("report.lines: planner is a table, wanted an EmbeddingShardingPlanner that has made a plan",
      plan.report.lines, planner())
    local made = planner()
    made:plan(plan.describe.of { tables = { { name = "t", num_embeddings = 100, embedding_dim = 8 } } })
    refuses("reasons.of: model has no tables", plan.reasons.of, made, {})
    refuses("reasons.of: the planner has planned table 't' of 100 x 8, which the model has not", plan.reasons.of, made,
      plan.describe.of { tables = { { name = "u", num_embeddings = 100, embedding_dim = 8 } } })
    refuses("reasons.of: the planner has planned table 't' of 100 x 8", plan.reasons.of, made,
      plan.describe.of { tables = { { name = "t", num_embeddings = 10, embedding_dim = 8 } } })
    refuses("cluster.trace: simulation is no result of cluster.simulate", peri.pipeline.cluster.trace, {})
    refuses("cluster.trace: simulation is no result of cluster.simulate", peri.pipeline.cluster.trace)
    refuses("would_fit: planner is a table, wanted an EmbeddingShardingPlanner", plan.reasons._would_fit, {}, {})
  end)

  it("are modules, which are described, and no empty models", function()
    local bags = peri.EmbeddingBagCollection { tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = 50,
      embedding_dim = 8, feature_names = { "f" } } } }
    local described = plan.to_json(planner():plan(plan.describe.of(bags)))
    assert.matches('"t": {"sharding_type"', described)
    assert.equal(described, plan.to_json(planner():plan(bags)))
    assert.equal(described, plan.to_json(planner():collective_plan(bags)))
    refuses("^EmbeddingShardingPlanner:plan: model has no tables$", function() planner():plan {} end)
    refuses("plan: model has the key 'zz'", function() planner():plan { zz = 1 } end)
    refuses("plan: model has no tables", function()
      planner():plan(peri.nn.Linear { in_features = 3, out_features = 4 })
    end)
    refuses("constrain: model is an nn.Module, wanted what plan.describe.of%(EmbeddingBagCollection%)",
      plan.statistics.constrain, {}, bags, nil, 2)
    refuses("construct_module_sharding_plan: configs has the key '", plan.construct_module_sharding_plan, bags, {},
      plan.ShardingEnv.from_local(2, 0))
  end)

  it("are constraints of tables that some module of the model has, and relations in a list", function()
    local model = plan.describe.of { { path = "a",
      tables = { { name = "t", num_embeddings = 50, embedding_dim = 8 } } },
        { path = "b", tables = { { name = "u", num_embeddings = 50, embedding_dim = 8 } } } }
    local function planned(args)
      args.topology = plan.Topology { world_size = 2 }
      return plan.EmbeddingShardingPlanner(args):plan(model)
    end
    local only = plan.ParameterConstraints { sharding_types = { "column_wise" } }
    assert.equal("column_wise", planned({ constraints = { t = only, ["b.u"] = only } }).plan.a.tables.t.sharding_type)
    for _, name in ipairs { "tt", "a.u", "b.t" } do
      refuses("^EmbeddingShardingPlanner: constraints of table '" .. name
        .. "', which the model has not; it has: a%.t, b%.u$", planned, { constraints = { [name] = only } })
    end
    refuses("constraints of table '1'", planned, { constraints = { only } })
    refuses("relations is no list of relations", planned, { relations = plan.pin("t", 0) })
    refuses("relations is no list of relations", planned,
      { relations = { plan.pin("t", 0), zz = plan.forbid("*", 0) } })
    refuses("relations is no list of relations", planned,
      { relations = { [1] = plan.pin("t", 0), [3] = plan.forbid("*", 0) } })
    refuses("relations is a table with the key 'zz', wanted a list", planned,
      { relations = { zz = plan.forbid("*", 0) } })
  end)

  it("are words that mean something", function()
    local function described(more)
      local t = { name = "t", num_embeddings = 50, embedding_dim = 8 }
      for key, value in pairs(more) do t[key] = value end -- any order: one
      return plan.describe.of { tables = { t }, optimizer = t.optimizer }
    end
    refuses("tables%[1%] 't': pooling is 'x', allowed: SUM, MEAN", described, { pooling = "x" })
    refuses("tables%[1%]: its name is empty", described, { name = "" })
    refuses("feature_names is a table with the key 'k', wanted a list", described, { feature_names = { k = 1 } })
    refuses("tables%[1%] 't': feature_names %[1%] is nan, wanted a string", described, { feature_names = { 0 / 0 } })
    refuses("model%[1%]: optimizer is 'x', allowed: adagrad, ", plan.describe.of, { optimizer = "x",
      tables = { { name = "t", num_embeddings = 50, embedding_dim = 8 } } })
    for _, name in ipairs { "rowwise_adagrad", "exact_sgd", "RowWiseAdagrad", "Adam" } do
      plan.describe.of { optimizer = name, tables = { { name = "t", num_embeddings = 50, embedding_dim = 8 } } }
    end
    local constraints = plan.ParameterConstraints
    refuses("feature_names %[1%] is 3, wanted a string", constraints, { feature_names = { 3 } })
    for _, name in ipairs { "sharding_types", "compute_kernels" } do
      refuses(name .. " is empty, which allows nothing", constraints, { [name] = {} })
      refuses(name .. " is a table with the key 'zz', wanted a list", constraints, { [name] = { zz = 1 } })
    end
    for _, sharder in ipairs { plan.torchrec_sharder, plan.perilune_sharder } do
      refuses("sharding_type is 'zz', allowed: data_parallel, table_wise, ", sharder.compute_kernels, sharder, "zz",
        "cpu")
    end
  end)

  it("are placements that say a rank for each shard", function()
    local made = planner()
    made:plan(plan.describe.of { tables = { { name = "t", num_embeddings = 100, embedding_dim = 8 } } })
    local best, model = made.last.best, made.performance_model
    assert.equal(best.rating, model:rate(best.proposal, best.placement))
    refuses("placement%[1%] of table 't': wanted a list of the ranks 0..1 of its %d+ shards", model.rate, model,
      best.proposal, { { 7 } })
    refuses("placement%[1%]", model.rate, model, best.proposal, {})
  end)

  it("are never met by the inside of a function", function()
    local junk = { function() return nil end, function() return 3 end, function() return {} end,
      function() return "t" end, function() return planner() end, function() return function() end end }
    local looked = 0
    local owners = {}
    for _, name in ipairs { "Topology", "ShardingOption", "EmbeddingEnumerator", "EmbeddingStorageEstimator",
      "EmbeddingPerfEstimator", "FixedPercentageStorageReservation", "FixedAbsoluteStorageReservation",
      "HeuristicalStorageReservation", "GreedyPerfPartitioner", "MemoryBalancedPartitioner", "UniformPartitioner",
      "NoopPerfModel", "NoopStorageModel", "GreedyProposer", "UniformProposer", "GridSearchProposer",
      "DynamicProgrammingProposer", "EmbeddingShardingPlanner", "EmbeddingOffloadScaleupProposer",
      "EmbeddingOffloadStats" } do
      owners[plan[name]] = true
    end
    assert(plan.reasons and plan.report) -- loaded, they have signatures
    for _, s in ipairs(signature.all) do
      local writes = s.name:match "write$" or s.name:match "save"
      local own = not writes and (s.name:match "^plan%." or s.arguments[1] and s.arguments[1].name == "self"
        and owners[s.table])
      for _, make in ipairs(own and junk or {}) do
        local args = {}
        for i = 1, #s.arguments do args[i] = make() end
        local message = message_of(s.table[s.key], unpack(args, 1, #s.arguments))
        if message then assert.is_nil(message:find("attempt to ", 1, true), s.name .. ": " .. message) end
        looked = looked + 1
      end
    end
    assert.is_true(looked > 200, tostring(looked))
  end)
end)
