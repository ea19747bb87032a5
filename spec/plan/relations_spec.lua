-- Relations, costs and objectives: no plan breaks a relation, what a user's functions say decides, and what cannot be
-- is said by name.
-- takes: 15 s
local peri = require "perilune"
local plan = peri.plan

local GiB = 2 ^ 30
local W, L = 8, 4

local function tables_of(n)
  local tables = {}
  for i = 1, n do
    tables[i] = { name = "t" .. i, num_embeddings = 1e5 * (1 + i * i % 7), embedding_dim = 64 * (1 + i % 4) }
  end
  return tables
end

local function planner_of(args)
  local copy = peri.util.copy(args)
  copy.topology = plan.Topology { world_size = W, local_world_size = L, compute_device = "cuda", hbm_cap = args.cap
    or 8 * GiB, ddr_cap = 16 * GiB }
  copy.cap, copy.sharder, copy.max_placements = nil, plan.perilune_sharder, args.max_placements or 1e4
  return plan.EmbeddingShardingPlanner(copy)
end

local function model_of(tables) return plan.describe.of { tables = tables, optimizer = "rowwise_adagrad" } end

--- Table -> list of the ranks of its shards, of a plan as ranks read it.
local function ranks_of(made, tables)
  local out = {}
  for _, t in ipairs(tables) do
    local entry, list = made.plan[""].tables[t.name], {}
    if entry.sharding_type == "data_parallel" then for r = 0, W - 1 do list[r + 1] = r end
    else
      for i, shard in ipairs(entry:shards(t, { world_size = W, local_size = L })) do list[i] = shard.rank end
    end
    out[t.name] = list
  end
  return out
end

local function set_of(list, per)
  local set = {}
  for _, r in ipairs(list) do set[per == "host" and math.floor(r / L) or r] = true end
  return set
end

describe("no plan breaks a relation", function()
  local tables = tables_of(7)
  local function places(relations, more)
    local args = peri.util.copy(more or {})
    args.relations = relations
    return ranks_of(planner_of(args):plan(model_of(tables)), tables)
  end

  it("of co-located tables: shard by shard on the same ranks", function()
    local at = places { plan.colocate { "t1", "t4" }, plan.colocate { "t4", "t6" } }
    assert.same(at.t1, at.t4)
    assert.same(at.t1, at.t6)
  end)

  for _, per in ipairs { "rank", "host" } do
    it("of tables that are spread over " .. per .. "s", function()
      local names = per == "rank" and { "t1", "t2", "t3" } or { "t1", "t2" }
      local at, seen = places { plan.spread(names, per) }, {}
      for _, name in ipairs(names) do
        for unit in pairs(set_of(at[name], per)) do -- any order
          assert.is_nil(seen[unit], name)
          seen[unit] = name
        end
      end
    end)

    it("of at most two of them on a " .. per, function()
      local names = per == "rank" and { "t1", "t2", "t3", "t4", "t5", "t6", "t7" } or { "t1", "t2", "t3", "t4" }
      local at, count = places { plan.at_most(2, per == "rank" and "t*" or names, per) }, {}
      for _, name in ipairs(names) do
        for unit in pairs(set_of(at[name], per)) do count[unit] = (count[unit] or 0) + 1 end -- any order
      end
      for _, n in pairs(count) do assert.is_true(n <= 2) end -- any order
    end)
  end

  it("of ranks that are forbidden, and of those that tables are pinned to", function()
    local at = places { plan.forbid({ "t1", "t2" }, { 0, 5 }), plan.pin("t3", 6), plan.pin("t7", 1, "host") }
    for _, name in ipairs { "t1", "t2" } do
      local set = set_of(at[name])
      assert.is_true(not set[0] and not set[5])
    end
    assert.same({ [6] = true }, set_of(at.t3))
    for r in pairs(set_of(at.t7)) do assert.is_true(r >= 4) end -- any order
  end)

  it("of a table that is pinned where larger ones would fill the rank before it", function()
    local full, only = { { name = "small", num_embeddings = 2e5, embedding_dim = 64 } }, {}
    for i = 1, W - 1 do full[i + 1] = { name = "large" .. i, num_embeddings = 1e6, embedding_dim = 64 } end
    for _, t in ipairs(full) do only[t.name] = { sharding_types = { "table_wise" }, compute_kernels = { "fused" } } end
    local planner = planner_of { relations = { plan.pin("small", 0) }, constraints = only, cap = 290 * 2 ^ 20,
      batch_size = 16, storage_reservation = plan.FixedPercentageStorageReservation { percentage = 0 } }
    assert.same({ [0] = true }, set_of(ranks_of(planner:plan(model_of(full)), full).small))
  end)

  it("of bytes on a host", function()
    local relation = plan.at_most_bytes(700 * 2 ^ 20, { "t*" }, "host")
    local planner = planner_of { relations = { relation } }
    planner:plan(model_of(tables))
    local bytes = { 0, 0 }
    for i, option in ipairs(planner.last.best.proposal) do
      local ranks = planner.last.best.placement[i]
      for k, shard in ipairs(option:shards()) do
        local host = math.floor((ranks == true and k - 1 or ranks[k]) / L) + 1
        bytes[host] = bytes[host] + shard.storage.hbm + shard.storage.ddr
      end
    end
    for _, x in ipairs(bytes) do assert.is_true(x > 0 and x <= 700 * 2 ^ 20, x) end
  end)

  it("drawn at random", function()
    local state, planned = 11, 0
    local function draw(n)
      state = 16807 * state % 2147483647
      return 1 + state % n
    end
    local function names(n)
      local list, seen = {}, {}
      while #list < n do
        local name = "t" .. draw(7)
        if not seen[name] then seen[name], list[#list + 1] = true, name end
      end
      return list
    end
    for _ = 1, 20 do
      local a, b, c, r = names(2), names(2), names(1)[1], draw(W) - 1
      local made, at = pcall(places, { plan.colocate(a), plan.spread(b), plan.forbid(c, r) }, { max_placements = 1e3 })
      if made then
        planned = planned + 1
        assert.same(at[a[1]], at[a[2]])
        local first = set_of(at[b[1]])
        for _, rank in ipairs(at[b[2]]) do assert.is_nil(first[rank]) end
        assert.is_nil(set_of(at[c])[r])
      else
        assert.is_true(at.message:match "relations leave table" ~= nil
          or at.message:match "none of %d+ proposals fits" ~= nil, at.message)
      end
    end
    assert.is_true(planned >= 12, planned)
  end)
end)

describe("relations that cannot be", function()
  local tables = tables_of(3)
  local function refused(relations, words)
    assert.error_matches(function() planner_of({ relations = relations }):plan(model_of(tables)) end, words, 1, true)
  end

  it("are named with what they leave", function()
    refused({ plan.colocate { "t1", "t2" }, plan.spread { "t1", "t2" } },
      "relations leave table 't1' no way to be sharded: ")
    refused({ plan.pin("t1", 2), plan.forbid("t1", 2) },
      "it would fit with no relation 'pin { t1 } to ranks 2', or no relation 'forbid { t1 } on ranks 2'")
    refused({ plan.at_most_bytes(10, "t1") }, "at most 10 bytes of { t1 } on a rank; a shard has ")
  end)

  it("name what does not exist", function()
    refused({ plan.pin("tt", 2) }, "relation 'pin { tt } to ranks 2': there is no table 'tt', but t1, t2, t3")
    refused({ plan.pin("t1", 8) }, "relation 'pin { t1 } to ranks 8': there is no rank 8, allowed: 0..7")
    refused({ plan.forbid("t1", 2, "host") }, "there is no host 2, allowed: 0..1")
    refused({ plan.pin("t1", 1), plan.pin("t1", 2) },
      "relations 'pin { t1 } to ranks 1' and 'pin { t1 } to ranks 2' leave table 't1' no rank")
    refused({ plan.colocate { "t1", "t2" }, plan.pin("t1", 1), plan.forbid("t2", { 1, 3 }) },
      "relations 'pin { t1 } to ranks 1' and 'forbid { t2 } on ranks 1, 3' leave table 't1 + t2' no rank")
    refused({ "t1" }, "relations[1] is a string, wanted plan.colocate")
  end)

  it("are kept by what takes least memory where no other proposal does", function()
    local state, drawn = 124, {}
    local function draw(n)
      state = (state * 1103515245 + 12345) % 2 ^ 31
      return math.floor(state / 65536) % n
    end
    for i = 1, 20 do
      local size = draw(5) + 1
      drawn[i] = { name = "t" .. i, num_embeddings = math.floor(10 ^ size) * (1 + draw(9)),
        embedding_dim = 4 * 2 ^ draw(6) }
    end
    for estimates in pairs { step = true, torchrec = true } do -- any order
      local planner = plan.EmbeddingShardingPlanner { topology = plan.Topology { world_size = 8, local_world_size = 4 },
        estimates = estimates, sharder = plan.perilune_sharder, relations = { plan.colocate { "t1", "t2" },
          plan.spread { "t3", "t4", "t5" }, plan.at_most(3, { "t1*" }), plan.forbid("t6", { 0, 1 }), plan.pin("t7", 3),
          plan.spread({ "t8", "t9" }, "host"), plan.at_most_bytes(2 ^ 27, { "t2*" }) } }
      local made = planner:plan(plan.describe.of { tables = drawn, optimizer = "sgd" }).plan[""].tables
      assert.same({ 3 }, made.t7.ranks)
      assert.equal(made.t1.sharding_type, made.t2.sharding_type)
    end
  end)

  it("are refused where they are made", function()
    for words, f in pairs { -- any order
      ["plan.spread: per is 'node', allowed: rank, host"] = function() plan.spread({ "a", "b" }, "node") end,
      ["plan.at_most: count is 0"] = function() plan.at_most(0, { "a" }) end,
      ["plan.pin: units[1] is -1"] = function() plan.pin("a", -1) end,
      ["plan.forbid: units is an empty list, wanted the number"] = function() plan.forbid("a", {}) end,
      ["plan.colocate: tables[2] is a number, wanted a name"] = function() plan.colocate { "a", 2 } end,
      ["plan.colocate: 'b' behind tables, wanted one list of names"] = function() plan.colocate("a", "b") end,
      ["plan.colocate: tables is the one table 'a', wanted a list of two or more"] = function()
        plan.colocate { "a" }
      end, ["plan.spread: tables is the one table 'a', wanted a list of two or more"] = function() plan.spread "a" end,
      ["plan.colocate: tables is nil"] = function() plan.colocate() end,
    } do assert.error_matches(f, words, 1, true) end
  end)

  it("are among the reasons", function()
    local model, planner = model_of(tables),
      planner_of { relations = { plan.pin("t2", 3), plan.colocate { "t1", "t3" } } }
    planner:plan(model)
    local seen = {}
    for _, entry in ipairs(plan.reasons.of(planner, model)) do
      for _, other in ipairs(entry.others) do
        if other.kind == "relation" then seen[entry.table .. " " .. other.option] = other.text end
      end
      if entry.table == "t1 + t3" then assert.same({ "t1", "t3" }, entry.tables) end
    end
    assert.equal("pin { t2 } to ranks 3; row_wise is on all ranks", seen["t2 row_wise fused"])
    assert.equal("pin { t2 } to ranks 3; table_row_wise is on all 4 ranks of a group", seen["t2 table_row_wise fused"])
    assert.equal("colocate { t1, t3 }; not all can be cut alike", seen["t1 + t3 column_wise fused"])
  end)
end)

describe("the order in which tables are given", function()
  it("decides nothing", function()
    for seed = 40, 59 do
      math.randomseed(seed)
      local list, reversed = {}, {}
      for i = 1, math.random(2, 10) do
        list[i] = { name = "t" .. i, num_embeddings = math.random(1, 3) * 10 ^ math.random(2, 6),
          embedding_dim = 4 * math.random(1, 32) }
        table.insert(reversed, 1, list[i])
      end
      local relations = seed % 2 == 0 and {} or { plan.spread { "t1", "t2" } }
      local function planned(tables)
        local planner = plan.EmbeddingShardingPlanner { topology = plan.Topology.preset("dgx_a100_40gb",
          { world_size = 4 }), sharder = plan.perilune_sharder, relations = relations }
        local half = math.floor(#list / 2)
        local a, b = { path = "a", tables = { unpack(list, 1, half) } },
          { path = "b", tables = { unpack(list, half + 1) } }
        return plan.to_json(planner:plan(plan.describe.of { tables = tables })),
          plan.to_json(planner:plan(plan.describe.of(tables == list and { a, b } or { b, a })))
      end
      assert.same({ planned(list) }, { planned(reversed) }, seed)
    end
  end)
end)

describe("a user's functions", function()
  local tables = tables_of(6)
  local model = model_of(tables)

  it("decide what a shard costs", function()
    local plain = planner_of {}
    plain:plan(model)
    local favourite = plain.last.best.proposal[1].sharding_type
    local planner = planner_of { cost = function(perf, option, shard, topology)
      assert(shard.rows and topology.world_size == W)
      if option.sharding_type == favourite then perf.fwd_compute = perf.fwd_compute + 1000 end
    end }
    local made = planner:plan(model)
    for _, t in ipairs(tables) do assert.not_equal(favourite, made.plan[""].tables[t.name].sharding_type) end
    -- the same times for all: the rating is the most shards on a rank
    planner = planner_of { cost = function(perf)
      for part in pairs(perf) do perf[part] = 0 end -- any order
      perf.bwd_compute = 1
    end }
    planner:plan(model)
    assert.equal(1, planner.last.best.rating)
  end)

  it("change what is there, and return nothing", function()
    assert.error_matches(function() planner_of({ cost = function(perf) perf.fwd_comp = 1 end }):plan(model) end,
      "cost: perf has no field 'fwd_comp'; it has: fwd_compute, ", nil, true)
    assert.error_matches(function() planner_of({ cost = function() return 5 end }):plan(model) end,
      "cost: it returned 5, wanted nothing")
  end)

  it("decide which plan is better", function()
    local function fullest(load)
      local most = 0
      for r = 1, W do most = math.max(most, load.hbm[r]) end
      return most
    end
    local planner, plain = planner_of { objective = fullest, max_placements = 2e5 }, planner_of { max_placements = 2e5 }
    planner:plan(model)
    plain:plan(model)
    local best, other = planner.last.best, plain.last.best
    local by_storage = plan.NoopStorageModel { topology = planner.topology }
    assert.equal(best.rating, by_storage:rate(best.proposal, best.placement))
    assert.is_true(best.rating < by_storage:rate(other.proposal, other.placement))
    assert.matches((", %.6g by the objective ("):format(best.rating), plan.report.lines(planner)[1], 1, true)
  end)

  it("are refused where they say nothing", function()
    for words, args in pairs { -- any order
      ["cost: bwd_comms of table 't1' (data_parallel, fused) is nan"] = { cost = function(perf)
        perf.bwd_comms = 0 / 0
      end }, ["objective: it returned nil, wanted a number"] = { objective = function() end },
      ["objective is a number, wanted a function(load)"] = { objective = 3 },
      ["cost is a table, wanted a function"] = { cost = {} },
      ["objective and performance_model; give one"] = { objective = print, performance_model = {} },
    } do
      local ok, err = pcall(function() planner_of(args):plan(model) end)
      assert.is_false(ok)
      assert.matches(words, (err.message:gsub("%-nan", "nan")), 1, true)
    end
  end)
end)
