-- Options weighed against memory: the knapsack's promises, plans that keep within memory, and those of small models
-- beside all plans.
local peri = require "perilune"
local weigh = require "perilune.plan.weigh"
local partitioners = require "perilune.plan.partitioners"
local by_table = require("perilune.plan.pack").by_table
local plan = peri.plan

local GB = 1e9

--- A planner for tables of these rows (64 columns), of a machine with so many bytes a rank (and of the host's memory,
--- host; 512 GiB).
local function planner_of(rows, ranks, bytes, more, kernels, host)
  local tables, constraints = {}, {}
  for i, n in ipairs(rows) do
    tables[i] = { name = "t" .. i, num_embeddings = n, embedding_dim = 64 }
    constraints["t" .. i] = plan.ParameterConstraints { pooling_factors = { 1 + i % 5 },
      sharding_types = { "table_wise", "row_wise" }, compute_kernels = kernels }
  end
  local args = { topology = plan.Topology { world_size = ranks, local_world_size = ranks, compute_device = "cuda",
      hbm_cap = bytes, ddr_cap = host },
    sharder = plan.perilune_sharder, constraints = constraints, batch_size = 128,
    storage_reservation = plan.FixedPercentageStorageReservation { percentage = 0 } }
  for key, value in pairs(more or {}) do args[key] = value end
  return plan.EmbeddingShardingPlanner(args), plan.describe.of { tables = tables, optimizer = "rowwise_adagrad" }
end

--- Bytes of the fullest rank.
local function fullest(search, tier)
  local best, most = search.best, 0
  for _, x in ipairs(partitioners.by_rank(best.proposal, best.placement, search.topology.world_size, function(run)
    return run.storage[tier]
  end)) do most = math.max(most, x) end
  return most
end

describe("plans under tight memory", function()
  it("are no slower than 1.03 times the best of all plans of small models", function()
    for case = 1, 8 do
      -- a rank has no room for a whole one of the first tables, and the host not for all of them
      local mapped = case > 4
      local rows = mapped and { 8e6 + case * 4e5, 5e6, 2e6, 1e6 } or { 4e6, 3e6 + case * 1e5, 2e6, 1e6 }
      local planner, model = planner_of(rows, 2, math.floor((mapped and 0.1 or 1) * GB + 0.15 * case * GB), nil,
        mapped and { "fused", "fused_uvm", "fused_uvm_caching" } or nil, mapped and 2.2 * GB or nil)
      local search, best = planner:search(model), math.huge
      local of, names = {}, {}
      for _, o in ipairs(search.space) do
        if not of[o.fqn] then of[o.fqn], names[#names + 1] = {}, o.fqn end
        table.insert(of[o.fqn], o)
      end
      local W, time, used, host = 2, { 0, 0 }, { 0, 0 }, { 0, 0 }
      local function try(i)
        if math.max(time[1], time[2]) >= best then return end
        if i > #names then
          best = math.max(time[1], time[2])
          return
        end
        for _, o in ipairs(of[names[i]]) do
          for r = 1, o.partition_by == "device" and W or 1 do
            local shards, fits = o:shards(), true
            local function put(sign)
              for k, s in ipairs(shards) do
                local at = o.partition_by == "device" and r or k
                time[at], used[at] = time[at] + sign * s.perf.total, used[at] + sign * s.storage.hbm
                host[at] = host[at] + sign * s.storage.ddr
                fits = fits and used[at] <= planner.topology.hbm_cap and host[at] <= planner.topology.ddr_cap
              end
            end
            put(1)
            if fits then try(i + 1) end
            put(-1)
          end
        end
      end
      try(1)
      assert.is_true(search.least <= best, ("case %d: no plan may be better than %g, and one is %g"):format(case,
        search.least, best))
      assert.is_true(search.best.rating <= 1.03 * best, ("case %d: %g, best %g"):format(case, search.best.rating, best))
      assert.is_true(fullest(search, "hbm") <= planner.topology.hbm_cap
        and fullest(search, "ddr") <= planner.topology.ddr_cap)
    end
  end)

  it("take what memory there is: more memory never makes them slower by more than the search's noise", function()
    local rows, before = {}, math.huge
    for i = 1, 40 do rows[i] = math.floor(1e5 * 1.12 ^ i) end
    for _, bytes in ipairs { 1 * GB, 1.5 * GB, 2 * GB, 3 * GB, 6 * GB } do
      local planner, model = planner_of(rows, 4, bytes)
      local search = planner:search(model)
      assert.is_true(fullest(search, "hbm") <= bytes)
      assert.is_true(search.best.rating <= 1.03 * before,
        ("%g GB: %g, with less %g"):format(bytes / GB, search.best.rating, before))
      before = search.best.rating
    end
  end)

  it("are the same again", function()
    local planner, model = planner_of({ 4e6, 3e6, 2e6, 1e6, 5e5 }, 2, 1.2 * GB)
    assert.equal(plan.to_text(planner:plan(model)),
      plan.to_text((planner_of({ 4e6, 3e6, 2e6, 1e6, 5e5 }, 2, 1.2 * GB)):plan(model)))
  end)

  it("are found with a partitioner of one's own, too, by WeighingProposer", function()
    local rows = { 4e6, 3e6, 2e6, 1e6 }
    local planner, model = planner_of(rows, 2, 1.3 * GB, { proposers = { plan.WeighingProposer {} } })
    local alone = planner:search(model)
    planner, model = planner_of(rows, 2, 1.3 * GB, { proposers = { plan.GreedyProposer() } })
    assert.is_true(alone.best.rating <= planner:search(model).best.rating)
  end)
end)

describe("the knapsack", function()
  local function knapsack_of(...)
    local planner, model = planner_of(...)
    local search = planner:search(model)
    local k = weigh.knapsack(by_table(search.space))
    k:within(search.topology)
    return k, search
  end

  it("promises no more than there is, and no plan is faster than its bound", function()
    local k, search = knapsack_of({ 4e6, 3e6, 2e6, 1e6, 7e5, 3e5 }, 2, 1.1 * GB)
    for _, share in ipairs { 1, 0.8 } do
      local T = k:shortest(share)
      local ms = k:solve(T, share)
      local bytes, time = 0, 0
      for _, o in ipairs(k:proposal()) do bytes, time = bytes + o.total_storage.hbm, time + o.total_perf end
      assert.is_true(bytes <= share * 2 * 1.1 * GB)
      assert.near(time, ms, 1e-9 * time)
      assert.is_true(ms <= 2 * T * (1 + 1e-6))
    end
    assert.is_true(k:bound() <= math.min(search.best.rating, k:shortest(1)))
  end)

  it("finds, for tables that only all ranks together have room for, options beside which all others have room",
    function()
    local ranks, bytes, host = 4, 2 * GB, 6 * GB
    local k, search = knapsack_of({ 2e7, 1.8e7, 9e6, 8e6, 7e6, 2e6, 1e6, 5e5 }, ranks, bytes, nil, nil, host)
    local seen, T = 0, k:shortest(1)
    assert.is_true(k:bound() <= search.best.rating and T < math.huge)
    for _, longest in ipairs { T, 1.5 * T } do
      k:each(longest, 1, function(ms, right)
        local proposal, wide, all = k:proposal(), { 0, 0, 0 }, 0
        local function parts(o, kind)
          local s, cut = o[kind .. "_storage"], kind == "total" and ranks or 1
          return { o[kind .. "_perf"] / cut, s.hbm / cut, s.ddr / cut }
        end
        for _, o in ipairs(proposal) do
          all = all + o.total_perf
          for i, x in ipairs(o.num_shards == ranks and parts(o, "total") or {}) do wide[i] = wide[i] + x end
        end
        assert.near(all, ms, 1e-9 * all)
        local fit = true
        for _, o in ipairs(proposal) do
          for i, x in ipairs(parts(o, "max")) do
            local has = ({ longest, bytes, host })[i]
            fit = fit and x + (o.num_shards == ranks and 0 or wide[i]) <= has * (1 + 1e-9)
          end
        end
        assert.equal(fit, right)
        seen = seen + (right and 1 or 0)
      end)
    end
    assert.is_true(seen > 2, seen)
  end)
end)

describe("our own estimates", function()
  it("price kernels: rows in the host's memory take longer than those in the device's, missing ones of a cache between",
    function()
    local step = require "perilune.plan.step"
    local topology = plan.Topology.preset("h100", { world_size = 1 })
    local model = plan.describe.of { tables = { { name = "t", num_embeddings = 1e7, embedding_dim = 64 } },
      optimizer = "adagrad" }
    local function ms(kernel)
      local entries = plan.ShardingPlan { [""] = { t = plan.table_wise(0, { compute_kernel = kernel }) } }
      return step.predict(entries, model, topology, 65536, {}).ms
    end
    assert.is_true(ms "fused" < ms "fused_uvm_caching" and ms "fused" < ms "fused_uvm")
  end)
end)
