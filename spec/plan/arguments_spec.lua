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
    refuses("EmbeddingShardingPlanner: topology is a table, wanted a Topology", plan.EmbeddingShardingPlanner, { topology = {} })
    refuses("partitioner has partition = nil, wanted a function", plan.EmbeddingShardingPlanner, { topology = topology, partitioner = {} })
    refuses("proposers %[1%] has feedback = nil", plan.EmbeddingShardingPlanner, { topology = topology, proposers = { {} } })
    refuses("EmbeddingEnumerator: constraints is a table, wanted a table of ParameterConstraints", plan.EmbeddingEnumerator,
      { topology = topology, constraints = { t = 3 } })
    refuses("tiers is 'vram', allowed: hbm, ddr, ssd", plan.FixedPercentageStorageReservation, { tiers = { "vram" } })
    refuses("num_poolings, wanted one for each of 1 input_lengths", plan.ShardingOption, { path = "", name = "t", rows = 1, dim = 4,
      data_type = "FP32", sharding_type = "table_wise", compute_kernel = "fused", runs = {}, input_lengths = { 1 }, num_poolings = {},
      batch_sizes = { 1 } })
  end)

  it("are models, and planners that have planned", function()
    refuses("plan: model %[1%] has kind = nil, wanted a string", function() planner():plan { { tables = {} } } end)
    refuses("report.lines: planner is a table, wanted an EmbeddingShardingPlanner that has made a plan", plan.report.lines, planner())
    refuses("would_fit: planner is a table, wanted an EmbeddingShardingPlanner", plan.reasons.would_fit, {}, {})
  end)

  it("are placements that say a rank for each shard", function()
    local made = planner()
    made:plan(plan.describe.of { tables = { { name = "t", num_embeddings = 100, embedding_dim = 8 } } })
    local best, model = made.last.best, made.performance_model
    assert.equal(best.rating, model:rate(best.proposal, best.placement))
    refuses("placement%[1%] of table 't': wanted a list of the ranks 0..1 of its %d+ shards", model.rate, model, best.proposal, { { 7 } })
    refuses("placement%[1%]", model.rate, model, best.proposal, {})
  end)

  it("are never met by the inside of a function", function()
    local junk = { function() return nil end, function() return 3 end, function() return {} end, function() return "t" end,
      function() return planner() end, function() return function() end end }
    local looked = 0
    local owners = {}
    for _, name in ipairs { "Topology", "ShardingOption", "EmbeddingEnumerator", "EmbeddingStorageEstimator", "EmbeddingPerfEstimator",
      "FixedPercentageStorageReservation", "FixedAbsoluteStorageReservation", "HeuristicalStorageReservation", "GreedyPerfPartitioner",
      "MemoryBalancedPartitioner", "UniformPartitioner", "NoopPerfModel", "NoopStorageModel", "GreedyProposer", "UniformProposer",
      "GridSearchProposer", "DynamicProgrammingProposer", "EmbeddingShardingPlanner", "EmbeddingOffloadScaleupProposer",
      "EmbeddingOffloadStats" } do
      owners[plan[name]] = true
    end
    assert(plan.reasons and plan.report) -- loaded, they have signatures
    for _, s in ipairs(signature.all) do
      local writes = s.name:match "write$" or s.name:match "save"
      local own = not writes and (s.name:match "^plan%." or s.arguments[1] and s.arguments[1].name == "self" and owners[s.table])
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
