-- mpirun: 3
-- The planner: the plans of TorchRec's own for twelve models and machines; laws of its parts; the same plan on every
-- rank.
local peri = require "perilune"
local support = require "spec.support.planner"
local worlds = require "spec.support.worlds"
local plan = peri.plan

local reservations = { fixed = plan.FixedPercentageStorageReservation,
  heuristical = plan.HeuristicalStorageReservation }

--- The shards that an entry says, as "rank rows x cols at row,col", those without rows left out.
local function shards_of(entry, config, topology)
  local out = {}
  for _, s in ipairs(entry:shards(config,
    { world_size = topology.world_size, local_size = topology.local_world_size })) do
    if s.rows > 0 then
      out[#out + 1] = ("%d %dx%d at %d,%d"):format(s.rank, s.rows, s.cols, s.row_offset, s.col_offset)
    end
  end
  table.sort(out)
  return out
end

local function config_of(loaded, module, name)
  for _, collection in ipairs(loaded.collections) do
    for _, config in ipairs(collection.tables) do
      if collection.path == module and config.name == name then return config end
    end
  end
end

local function compare_entry(loaded, want, entry)
  assert.same({ want.sharding_type, want.compute_kernel }, { entry.sharding_type, entry.compute_kernel })
  local shards = {}
  for _, s in ipairs(want.shards or {}) do
    if s[1] > 0 then shards[#shards + 1] = ("%d %dx%d at %d,%d"):format(s[5], s[1], s[2], s[3], s[4]) end
  end
  table.sort(shards)
  assert.same(shards, shards_of(entry, config_of(loaded, want.module, want.table), loaded.topology), want.table)
end

local function planner_of(loaded, more)
  local args = { topology = loaded.topology, batch_size = loaded.case.batch_size, constraints = loaded.constraints }
  for key, value in pairs(more or {}) do args[key] = value end
  return plan.EmbeddingShardingPlanner(args)
end

if not worlds.mpirun then
  describe("EmbeddingShardingPlanner", function()
    for _, name in ipairs(support.names) do
      it("plans as TorchRec does: " .. name, function()
        local loaded = support.load(name)
        loaded.collections.dense_bytes = loaded.case.dense_parameters * 4
        for _, want in ipairs(loaded.case.plans) do
          local reservation = reservations[want.storage_reservation:match "^%l+"]
          local planner = planner_of(loaded, { storage_reservation = reservation { percentage = 0.15 } })
          local made = planner:plan(loaded.collections)
          assert.same({ want.proposals, want.plans }, { planner.last.num_proposals, planner.last.num_plans })
          for i, d in ipairs(want.reserved_devices) do
            local got = planner.last.topology.devices[i]
            assert.same({ d.hbm, d.ddr }, { got.hbm, got.ddr })
          end
          for _, entry in ipairs(want.plan) do
            compare_entry(loaded, entry, made.plan[entry.module].tables[entry.table])
          end
        end
      end)
    end

    it("gives the same plan again, whatever the order of the constraints' keys", function()
      local loaded = support.load "plan_small_cuda16"
      local first = plan.to_json(planner_of(loaded):plan(loaded.collections))
      local again = {}
      for _, name in ipairs { "t3", "t1", "t0" } do again[name] = loaded.constraints[name] end
      loaded.constraints = again
      assert.equal(first, plan.to_json(planner_of(loaded):plan(loaded.collections)))
    end)

    it("stops at its limit and keeps the best plan so far", function()
      local loaded = support.load "plan_big_cuda2"
      local planner = planner_of(loaded, { max_placements = 2000 })
      planner:plan(loaded.collections)
      assert.is_true(planner.last.stopped and planner.last.num_proposals < 2000)
    end)
  end)

  --- Options of made-up tables on 4 ranks of 2 hosts.
  local function space_of(seed, n, cap)
    local state = seed
    local function draw(a, b)
      state = 16807 * state % 2147483647
      return a + state % (b - a + 1)
    end
    local tables = {}
    for i = 1, n do
      tables[i] = { name = "t" .. i, num_embeddings = draw(1000, 400000), embedding_dim = 4 * draw(2, 40),
        feature_names = { "f" .. i } }
    end
    local topology = plan.Topology { world_size = 4, local_world_size = 2, compute_device = "cuda", hbm_cap = cap }
    local enumerator = plan.EmbeddingEnumerator { topology = topology, batch_size = 64 }
    return enumerator:enumerate { { path = "m", kind = "EmbeddingBagCollection", tables = tables } }, topology,
      enumerator
  end

  describe("RefiningProposer", function()
    --- A model of tables of several sizes, two of each.
    local function model_of(sizes)
      local tables = {}
      for i, rows in ipairs(sizes) do
        for k = 1, 2 do
          tables[#tables + 1] = { name = ("t%d_%d"):format(i, k), num_embeddings = rows,
            embedding_dim = ({ 16, 64 })[1 + i % 2] }
        end
      end
      return plan.describe.of { tables = tables, optimizer = "rowwise_adagrad" }
    end

    local function rated(model, proposers)
      local planner = plan.EmbeddingShardingPlanner { topology = plan.Topology { world_size = 4, local_world_size = 2,
        ddr_cap = 2 ^ 30 }, sharder = plan.perilune_sharder, estimates = "step", proposers = proposers }
      local made = planner:plan(model)
      return planner.last.best.rating, plan.to_text(made)
    end

    it("finds the best of all combinations of a small model, from whatever plan it begins with", function()
      for _, sizes in ipairs { { 100000, 200 }, { 50, 3000000 }, { 7, 70000 } } do
        local model = model_of(sizes)
        local best = rated(model, { plan.GridSearchProposer { max_proposals = 1e6 } })
        local first = rated(model, { plan.UniformProposer() })
        local refined = rated(model, { plan.UniformProposer(), plan.RefiningProposer() })
        assert.is_true(best <= first)
        assert.is_true(math.abs(refined / best - 1) < 0.01, ("%g, wanted %g; began with %g"):format(refined, best,
          first))
      end
    end)

    it("is part of our own planner, which is no worse than any proposer before it", function()
      local model = model_of { 1000000, 500000, 40000, 3000, 200, 30 }
      local ours = rated(model)
      for _, proposer in ipairs { plan.GreedyProposer(), plan.GreedyProposer { use_depth = false },
        plan.UniformProposer() } do
        local alone = rated(model, { proposer })
        local refined = rated(model, { proposer, plan.RefiningProposer() })
        assert.is_true(refined <= alone and ours <= alone)
      end
    end)

    it("says that it needs another one before it", function()
      assert.error_matches(function() rated(model_of { 100 }, { plan.RefiningProposer() }) end,
        "proposers%[1%] is a RefiningProposer, which changes the best proposal of those before it; put it behind "
          .. "others")
    end)
  end)

  describe("DynamicProgrammingProposer", function()
    it("finds the least sum of times for the memory there is", function()
      for seed = 1, 4 do
        local space, topology = space_of(seed, 3, 2 ^ 28)
        local proposer = plan.DynamicProgrammingProposer { hbm_bins_per_device = 1000 }
        proposer:load(space)
        assert.is_table(proposer:propose()) -- the one of the least memory
        proposer:feedback(true, nil, 1, topology)
        local proposal, grid, best = proposer:propose(), plan.GridSearchProposer { max_proposals = 1e6 }, math.huge
        local function sum(list)
          local ms, bytes = 0, 0
          for _, o in ipairs(list) do ms, bytes = ms + o.total_perf, bytes + o.total_storage.hbm end
          return ms, bytes
        end
        local least = math.huge
        while proposal do
          least = math.min(least, (sum(proposal)))
          proposer:feedback()
          proposal = proposer:propose()
        end
        grid:load(space)
        for list in function() return grid:propose() end do
          local ms, bytes = sum(list)
          if bytes < 4 * 2 ^ 28 then best = math.min(best, ms) end
          grid:feedback()
        end
        assert.is_true(math.abs(least - best) <= 1e-12 * best, ("seed %d: %g, wanted %g"):format(seed, least, best))
      end
    end)
  end)

  describe("partitioners", function()
    local function proposal_of(seed)
      local space, topology = space_of(seed, 12, 2 ^ 30)
      local chosen, list = {}, {}
      for _, o in ipairs(space) do
        local wanted = ({ "table_wise", "column_wise", "table_row_wise", "row_wise" })[#list % 4 + 1]
        if not chosen[o.fqn] and o.compute_kernel == "fused" and o.sharding_type == wanted then
          chosen[o.fqn] = true
          list[#list + 1] = o
        end
      end
      assert(#list > 8)
      return list, topology
    end
    local function bytes_by_rank(list, placement)
      local used = { 0, 0, 0, 0 }
      for i, o in ipairs(list) do
        for k, s in ipairs(o:shards()) do
          local r = placement[i] == true and k or placement[i][k] + 1
          used[r] = used[r] + s.storage.hbm
        end
      end
      return used
    end

    it("keep shards of a host together and every rank within its memory", function()
      for seed = 1, 8 do
        local list, topology = proposal_of(seed)
        local placement = assert(plan.GreedyPerfPartitioner():partition(list, topology))
        for _, bytes in ipairs(bytes_by_rank(list, placement)) do assert.is_true(bytes <= 2 ^ 30) end
        for i, o in ipairs(list) do
          if o.partition_by == "host" then
            assert.equal(math.floor(placement[i][1] / 2), math.floor(placement[i][2] / 2))
          end
        end
      end
    end)

    it("balance memory without a slower plan", function()
      for seed = 1, 8 do
        local list, topology = proposal_of(seed)
        local model = plan.NoopPerfModel { topology = topology }
        local plain = assert(plan.GreedyPerfPartitioner({ sort_by = "perf" }):partition(list, topology))
        local even = assert(plan.MemoryBalancedPartitioner():partition(list, topology))
        local a, b = bytes_by_rank(list, plain), bytes_by_rank(list, even)
        assert.is_true(math.max(unpack(b)) <= math.max(unpack(a)))
        assert.is_true(model:rate(list, even) <= 1.02 * model:rate(list, plain))
      end
    end)

    it("say which table found no place", function()
      local list, topology = proposal_of(3)
      local small = topology:with_devices(function(d) d.hbm = 2 ^ 20 end)
      local placement, why = plan.GreedyPerfPartitioner():partition(list, small)
      assert.is_nil(placement)
      assert.is_true(why.run.storage.hbm > 2 ^ 20)
      assert.is_nil((plan.UniformPartitioner():partition(list, topology)))
    end)
  end)

  it("says why nothing was tried", function()
    local tables = {}
    for i = 1, 6 do tables[i] = { name = "t" .. i, num_embeddings = 1000, embedding_dim = 64 } end
    local model = plan.describe.of { tables = tables }
    local function refusal(args)
      args.topology, args.sharder = plan.Topology { world_size = 4, compute_device = "cuda" }, plan.perilune_sharder
      local ok, e = pcall(function() return plan.EmbeddingShardingPlanner(args):plan(model) end)
      assert.is_false(ok)
      return tostring(e)
    end
    assert.matches("no proposals %(GridSearchProposer: [%de+.]+ combinations of 6 tables' options, max_proposals is "
      .. "100%)", refusal { proposers = { plan.GridSearchProposer { max_proposals = 100 } } })
    local constraints = { t1 = plan.ParameterConstraints { sharding_types = { "row_wise" } } }
    for i = 2, 6 do constraints["t" .. i] = plan.ParameterConstraints { sharding_types = { "table_wise" } } end
    assert.matches("no proposals (UniformProposer: no sharding type is an option of all tables)",
      refusal { proposers = { plan.UniformProposer() }, constraints = constraints }, 1, true)
    assert.matches("no proposals (there are no proposers)", refusal { proposers = {} }, 1, true)
  end)

  it("refuses arguments that proposers and partitioners cannot have", function()
    for _, case in ipairs {
      { "GridSearchProposer", { max_proposals = -1 }, "GridSearchProposer: max_proposals is -1" },
      { "GridSearchProposer", { max_proposals = 0.5 }, "GridSearchProposer: max_proposals is 0.5" },
      { "GreedyProposer", { threshold = -1 }, "GreedyProposer: threshold is -1" },
      { "UniformPartitioner", { tolerance = 1 }, "UniformPartitioner: no argument 'tolerance'; allowed: none" },
      { "UniformPartitioner", 3, "UniformPartitioner: named arguments in a table wanted, got 3" },
    } do
      local ok, e = pcall(function() return plan[case[1]](case[2]) end)
      assert.is_false(ok, case[1])
      assert.matches(case[3], tostring(e), 1, true)
    end
  end)

  describe("EmbeddingOffloadScaleupProposer", function()
    --- Three cached tables in `cap` bytes: their options in the best plan, and the planner.
    local function scaled(cap)
      local tables, constraints, proposer = {}, {}, plan.EmbeddingOffloadScaleupProposer()
      for i = 1, 3 do
        tables[i] = { name = "t" .. i, num_embeddings = 1e6, embedding_dim = 64, feature_names = { "f" .. i } }
        constraints["t" .. i] = plan.ParameterConstraints { sharding_types = { "table_wise" },
          compute_kernels = { "fused_uvm_caching" },
          cache_params = { load_factor = 0.1, stats = plan.EmbeddingOffloadStats { cacheability = 0.1 * i,
            expected_lookups = 5e4, mrc_hist_counts = { 4, 3, 2, 1 }, height = 1e6 } } }
      end
      local planner = plan.EmbeddingShardingPlanner { topology = plan.Topology { world_size = 1,
        compute_device = "cuda", hbm_cap = cap }, constraints = constraints, proposers = { proposer },
        storage_reservation = plan.FixedPercentageStorageReservation { percentage = 0 } }
      planner:plan { { path = "m", kind = "EmbeddingBagCollection", tables = tables } }
      return planner.last.best.proposal, planner, proposer
    end
    local function bytes_of(options)
      local used = 0
      for _, o in ipairs(options) do used = used + o.total_storage.hbm end
      return used
    end
    local function factor(option) return option.compute_kernel == "fused" and 1 or option.cache_params.load_factor end

    it("uses what memory there is: more for tables that gain more", function()
      local options, planner = scaled(3 * 2 ^ 27)
      assert.is_true(bytes_of(options) <= 3 * 2 ^ 27 and planner.last.num_plans > 1)
      assert.is_true(factor(options[1]) > 0.1 and factor(options[2]) > factor(options[1])
        and factor(options[3]) > factor(options[2]))
    end)

    it("leaves the caches as they are where nothing is left, and needs none where there is room for all", function()
      local _, _, proposer = scaled(2 ^ 40)
      local options = scaled(bytes_of(proposer.start))
      assert.same({ 0.1, 0.1, 0.1 }, { factor(options[1]), factor(options[2]), factor(options[3]) })
      local search = plan.EmbeddingOffloadScaleupProposer()
      search:load(options, plan.EmbeddingEnumerator { topology = plan.Topology { world_size = 1,
        compute_device = "cuda" } })
      for _, o in ipairs(search:_scaled(2 ^ 40)) do assert.equal("fused", o.compute_kernel) end
    end)

    it("has miss rates that fall from 1 to 0", function()
      local stats = plan.EmbeddingOffloadStats { cacheability = 0.1, expected_lookups = 1,
        mrc_hist_counts = { 6, 3, 1, 0 }, height = 100 }
      assert.same({ 1, 0.4, 0.1 }, { stats:expected_miss_rate(0), stats:expected_miss_rate(0.2),
        math.floor(10 * stats:expected_miss_rate(0.5) + 0.5) / 10 })
      assert.near(0, stats:expected_miss_rate(1), 1e-12)
    end)
  end)
end

describe("storage reservations", function()
  it("keep one copy of everything for a model that is not trained, several for one that is", function()
    local model = plan.describe.of { tables = { { name = "t", num_embeddings = 1000, embedding_dim = 16 } },
      dense_bytes = 1e6 }
    local topology = plan.Topology { world_size = 2, compute_device = "cuda" }
    local function taken(class)
      return topology.devices[1].hbm - class { percentage = 0 }:reserve(topology, model, 100).devices[1].hbm
    end
    local ids = 100 * 8 -- of a batch of 100 samples with an id each; TorchRec counts them 20 times for training
    assert.equal(1e6 + ids, taken(plan.InferenceStorageReservation))
    assert.equal(6e6 + 20 * ids, taken(plan.HeuristicalStorageReservation))
  end)
end)

describe("collective_plan", function()
  worlds.each("is one plan on all ranks of any group", function(world)
    local loaded = support.load "plan_small_cuda16"
    local planner = planner_of(loaded)
    local made = plan.to_json(planner:collective_plan(loaded.collections, world))
    for _, text in ipairs(world:all_gather_object(made)) do assert.equal(made, text) end
    assert.equal(plan.to_json(planner_of(loaded):plan(loaded.collections)), made)
  end, { devices = { "cpu" } })

  it("refuses what was assigned after it was checked, or would not be heeded", function()
    local model = plan.describe.of { tables = { { name = "t", num_embeddings = 400, embedding_dim = 16 } } }
    for _, case in ipairs {
      { "topology", "ddr_cap", 100, "Topology: ddr_cap is now 100, but was %d+ when it was made" },
      { "topology", "world_size", 3, "Topology: world_size is now 3, but was 2" },
      { "constraint", "compute_kernels", "fused", "compute_kernels" },
      { "constraint", "pooling_factors", { -1 }, "pooling_factors%[1%] is %-1, allowed" } } do
      local changed = { topology = plan.Topology { world_size = 2 }, constraint = plan.ParameterConstraints {} }
      local planner = plan.EmbeddingShardingPlanner { topology = changed.topology, batch_size = 4,
        constraints = { t = changed.constraint } }
      planner:plan(model)
      changed[case[1]][case[2]] = case[3]
      assert.error_matches(function() planner:plan(model) end, case[4])
    end
  end)

  worlds.each("refuses ranks that ask for other tables, and raises what rank 0 does on all", function(world, _, n)
    if n == 1 then return end
    local loaded = support.load "plan_small_cuda2"
    loaded.collections[1].tables[1].num_embeddings = 100 + world:rank()
    assert.error_matches(function() planner_of(loaded):collective_plan(loaded.collections, world) end,
      "table 't0' of 'ebc' is 100 x 32 on rank 0")
    loaded.collections[1].tables[1].num_embeddings = 1e12
    assert.error_matches(function() planner_of(loaded):collective_plan(loaded.collections, world) end,
      "EmbeddingShardingPlanner: none of")
  end, { devices = { "cpu" } })
end)
