-- Parts of a planner that users write: what they return is looked at, and what is wrong names the part; what planners
-- say of their plans is what they rate them by.
local peri = require "perilune"
local plan = peri.plan
local step = require "perilune.plan.step"

local function model_of(n)
  local tables = {}
  for i = 1, n do
    tables[i] = { name = "t" .. i, num_embeddings = 1000 * 4 ^ i, embedding_dim = 32, feature_names = { "f" .. i } }
  end
  return plan.describe.of { tables = tables, optimizer = "rowwise_adagrad" }
end

local function planner_of(more)
  local args = { topology = plan.Topology { world_size = 2 }, sharder = plan.perilune_sharder, batch_size = 256 }
  for name, value in pairs(more) do args[name] = value end
  return plan.EmbeddingShardingPlanner(args)
end

local function said(more, n)
  local ok, err = pcall(function() return planner_of(more):plan(model_of(n or 3)) end)
  assert.is_false(ok)
  assert.equal("table", type(err)) -- an error of the library's own
  return err.message
end

--- A proposer that proposes what f(options by table) returns, once.
local function proposer_of(f)
  local p = {}
  function p:load(space)
    self.of = {}
    for _, option in ipairs(space) do
      self.of[option.name] = self.of[option.name] or {}
      table.insert(self.of[option.name], option)
    end
    self.done = false
  end
  function p:propose() if not self.done then return f(self.of) end end
  function p:feedback() self.done = true end
  return p
end

describe("a user's proposer", function()
  it("is refused when it proposes what is no proposal", function()
    local cases = {
      { 5, "is 5, wanted a list of ShardingOptions" }, { "x", "is 'x', wanted a list of ShardingOptions" },
      { true, "is true, wanted a list" }, { { 1, 2 }, "wanted a list of ShardingOptions with their estimates" },
      { {}, "has no option of table 't1'; wanted one of each table" },
    }
    for _, case in ipairs(cases) do
      local words = said { proposers = { plan.GreedyProposer(), proposer_of(function() return case[1] end) } }
      assert.matches("what proposers[2]:propose returned", words, 1, true)
      assert.matches(case[2], words, 1, true)
    end
  end)

  it("is refused when tables are missing, come twice, or are none of the model's", function()
    local function words_of(f) return said { proposers = { proposer_of(f) } } end
    assert.matches("has no option of table 't2'; wanted one of each table",
      words_of(function(of) return { of.t1[1], of.t3[1] } end), 1, true)
    assert.matches("has [3] of table 't1', of which it has another one; wanted one option of each table",
      words_of(function(of) return { of.t1[1], of.t2[1], of.t1[2] } end), 1, true)
    local foreign
    local other = proposer_of(function(of) foreign = of.t4[1] return { of.t1[1], of.t2[1], of.t3[1], foreign } end)
    planner_of({ proposers = { other } }):plan(model_of(4))
    assert.matches("has [4] of table 't4', of which no options were loaded",
      words_of(function(of) return { of.t1[1], of.t2[1], of.t3[1], foreign } end), 1, true)
  end)

  it("is heard with its options in any order, and with nil from the start", function()
    local planner = planner_of { proposers = { proposer_of(function(of) return { of.t3[2], of.t1[1], of.t2[1] } end) } }
    assert.is_string(plan.to_text(planner:plan(model_of(3))))
    assert.equal(1, planner.last.num_plans)
    assert.matches("no proposals", said { proposers = { proposer_of(function() end) } }, 1, true)
  end)

  it("ends at the limit when it proposes the same for ever", function()
    local endless = proposer_of(function(of) return { of.t1[1], of.t2[1], of.t3[1] } end)
    endless.feedback = function() end
    local planner = planner_of { proposers = { endless }, max_placements = 1000 }
    planner:plan(model_of(3))
    assert.is_true(planner.last.stopped)
    assert.equal(1, planner.last.num_proposals)
  end)
end)

describe("a user's part", function()
  it("is refused when it returns what is none", function()
    local function partitioner(...)
      local returned = { ... }
      return { partition = function() return unpack(returned, 1, 2) end }
    end
    local base = plan.perilune_sharder
    local function sharder(types, kernels)
      return { sharding_types = function(_, ...) return types or base:sharding_types(...) end,
        compute_kernels = function(_, ...) return kernels or base:compute_kernels(...) end }
    end
    for _, case in ipairs {
      { { partitioner = partitioner(7) }, "what partitioner:partition returned is 7, wanted a table" },
      { { partitioner = partitioner {} }, "what partitioner:partition returned: placement[1] of table 't" },
      { { partitioner = partitioner { { 0 }, { 0 }, { 9 } } }, "wanted a list of the ranks 0..1" },
      { { partitioner = partitioner(nil, "the moon is full") }, "the partitioner says: the moon is full" },
      { { partitioner = partitioner(nil, { option = 3 }) }, "the partitioner says: no placement, and no reason" },
      { { partitioner = partitioner() }, "the partitioner says: no placement, and no reason" },
      { { performance_model = { rate = function() return "x" end } },
        "what performance_model:rate returned is 'x', wanted a number" },
      { { performance_model = { rate = function() return 0 / 0 end } }, "what performance_model:rate returned is nan" },
      { { performance_model = { rate = function() end } },
        "what performance_model:rate returned is nil, wanted a number" },
      { { storage_reservation = { reserve = function() end } },
        "what storage_reservation:reserve returned is nil, wanted a Topology" },
      { { enumerator = { enumerate = function() return 3 end, populate_estimates = print } },
        "what enumerator:enumerate returned is 3, wanted a list of ShardingOptions" },
      { { sharder = sharder("row_wise") },
        "what sharder:sharding_types returned is 'row_wise', wanted a list of strings" },
      { { sharder = sharder { 1 } }, "what sharder:sharding_types returned [1] is 1, wanted a string" },
      { { sharder = sharder(nil, 5) }, "what sharder:compute_kernels returned is 5, wanted a list of strings" },
      { { estimates = {} }, "estimates is a table, allowed: torchrec, step" },
    } do
      assert.matches(case[2], said(case[1]), 1, true)
    end
  end)

  local topology = plan.Topology { world_size = 2 }
  local function enumerator(more)
    local args = { topology = topology, sharder = plan.perilune_sharder, batch_size = 256 }
    for name, value in pairs(more) do args[name] = value end
    return plan.EmbeddingEnumerator(args)
  end

  it("is refused as an estimator that leaves no numbers behind", function()
    local function spoiled(f)
      return said { topology = topology,
        enumerator = enumerator { estimators = { plan.EmbeddingPerfEstimator { topology = topology },
          plan.EmbeddingStorageEstimator { topology = topology }, { estimate = function(_, options)
            f(options[1].runs[1])
          end } } } }
    end
    local of_run = "of runs%[1%] of table 't%d' %([%a_]+, fused%)"
    for _, case in ipairs {
      { function(run) run.perf.fwd_compute = "x" end, "perf.fwd_compute " .. of_run
        .. " is 'x' after them, allowed: finite numbers >= 0" },
      { function(run) run.perf.bwd_comms = -1 end, "perf.bwd_comms " .. of_run .. " is %-1 after them" },
      { function(run) run.perf.bwd_comms = 0 / 0 end, "perf.bwd_comms " .. of_run .. " is %-?nan after them" },
      { function(run) run.perf = nil end, "perf " .. of_run .. ", after them, is nil, wanted a table" },
      { function(run) run.storage = nil end, "storage " .. of_run .. ", after them, is nil, wanted a table" },
      { function(run) run.storage.ddr = -1 end, "storage.ddr " .. of_run .. " is %-1 after them, .*bytes" },
    } do
      assert.matches(case[2], (spoiled(case[1])))
    end
  end)

  it("counts as an estimator with what it changed last", function()
    local function rating(factor)
      local planner = planner_of { topology = topology, enumerator = enumerator { estimators = {
        plan.EmbeddingPerfEstimator { topology = topology }, plan.EmbeddingStorageEstimator { topology = topology },
        { estimate = function(_, options)
          for _, o in ipairs(options) do
            for _, run in ipairs(o.runs) do
              for _, part in ipairs { "fwd_compute", "bwd_compute", "fwd_comms", "bwd_comms" } do
                run.perf[part] = factor * run.perf[part]
              end
            end
          end
        end } } } }
      planner:plan(model_of(3))
      return planner.last.best.rating
    end
    assert.near(100 * rating(1), rating(100), 1e-9 * rating(100))
  end)

  it("is an enumerator by which its planner goes too", function()
    local forced = { t1 = plan.ParameterConstraints { sharding_types = { "data_parallel" } } }
    assert.matches("batch_size and an enumerator with another one",
      said { topology = topology, enumerator = enumerator { batch_size = 64 } }, 1, true)
    local planner = plan.EmbeddingShardingPlanner { topology = topology,
      enumerator = enumerator { constraints = forced, batch_size = 64 } }
    assert.same({ 64, "data_parallel" },
      { planner.batch_size, planner:plan(model_of(2)):get_plan_for_module("").tables.t1.sharding_type })
    local function refused(words, more)
      local args = { topology = topology, enumerator = enumerator {} }
      for name, value in pairs(more) do args[name] = value end
      assert.error_matches(function() plan.EmbeddingShardingPlanner(args) end, words)
    end
    refused("constraints and an enumerator with another one; give constraints to the enumerator only",
      { constraints = forced })
    refused("sharder and an enumerator with another one", { sharder = plan.torchrec_sharder })
    refused("the topology of its enumerator is another one", { topology = plan.Topology { world_size = 4 } })
  end)
end)

describe("what a planner says of its plan", function()
  --- The first line and the words of a report.
  local function headline(more)
    local planner = planner_of(more)
    local model = model_of(4)
    planner:plan(model)
    local page = plan.html.page(planner, {})
    return plan.report.lines(planner)[1], planner, page
  end

  it("is the step that plans are rated by, of our own estimates", function()
    for _, proposer in ipairs { plan.GreedyProposer(), plan.GridSearchProposer(), plan.UniformProposer() } do
      local line, planner, page = headline { estimates = "step", proposers = { proposer } }
      local best = planner.last.best
      local list = step.by_rank(best.proposal, best.placement, planner.topology)
      local ms = ("%.4g ms"):format((step.ms(list, planner.topology)))
      assert.matches((": %s a step ("):format(ms), line, 1, true)
      assert.matches(("<b>%s</b><span>a step"):format(ms), page, 1, true)
    end
  end)

  it("is in the unit of its performance model", function()
    local topology = plan.Topology { world_size = 2 }
    local line, planner = headline { performance_model = plan.NoopStorageModel { topology = topology } }
    assert.matches(("%.2f GiB by the performance model ("):format(planner.last.best.rating / 2 ^ 30), line, 1, true)
    line = headline { performance_model = { rate = function() return 42 end } }
    assert.matches(", 42 by the performance model (", line, 1, true)
    line = headline { objective = function() return 43 end }
    assert.matches(", 43 by the objective (", line, 1, true)
    line, planner = headline {}
    assert.matches((": %.4g ms on the slowest rank ("):format(planner.last.best.rating), line, 1, true)
  end)
end)
