-- Sharding plans: geometry of the types, and errors that name the table and say what is allowed.
local peri = require "perilune"
local plan = peri.plan

local function config(rows, cols, name) return { name = name or "t", num_embeddings = rows, embedding_dim = cols } end
local function world(n, l) return { world_size = n, local_size = l or n } end

local function rows_of(shards)
  local out = {}
  for i, s in ipairs(shards) do out[i] = s.rows end
  return out
end

describe("geometry", function()
  it("cuts rows as the reference does", function()
    assert.same({ 3, 3, 3, 1 }, rows_of(plan.row_wise():shards(config(10, 4), world(4))))
    assert.same({ 2, 2, 1, 0 }, rows_of(plan.row_wise():shards(config(5, 4), world(4))))
    assert.same({ 1, 1, 1, 0 }, rows_of(plan.row_wise():shards(config(3, 4), world(4))))
    assert.same({ 4, 4, 4, 4 }, rows_of(plan.row_wise():shards(config(16, 4), world(4))))
    local s = plan.row_wise { ranks = { 2, 0 }, sizes = { 7, 3 } }:shards(config(10, 4), world(3))
    assert.same({ { rank = 2, row_offset = 0, rows = 7, col_offset = 0, cols = 4 },
      { rank = 0, row_offset = 7, rows = 3, col_offset = 0, cols = 4 } }, s)
  end)

  it("cuts columns, several blocks to a rank", function()
    local s = plan.column_wise { ranks = { 0, 1, 1, 0 } }:shards(config(40, 16), world(2))
    assert.equal(4, #s)
    assert.same({ rank = 1, row_offset = 0, rows = 40, col_offset = 8, cols = 4 }, s[3])
    s = plan.column_wise { ranks = { 1, 0 }, sizes = { 4, 12 } }:shards(config(5, 16), world(2))
    assert.same({ rank = 0, row_offset = 0, rows = 5, col_offset = 4, cols = 12 }, s[2])
    -- one block may have any width
    assert.equal(7, plan.column_wise { ranks = { 0 } }:shards(config(5, 7), world(2))[1].cols)
  end)

  it("cuts columns over any number of ranks when none is named: whole steps of 4, the first ranks a step more",
    function()
    for cols = 4, 40, 4 do
      for n = 1, 12 do
        local at, shards = 0, plan.column_wise():shards(config(5, cols), world(n))
        assert.equal(math.min(n, cols / 4), #shards)
        for i, s in ipairs(shards) do
          assert.same({ rank = i - 1, row_offset = 0, rows = 5, col_offset = at, cols = s.cols }, s)
          assert.equal(0, s.cols % 4)
          assert.is_true(s.cols <= shards[1].cols and s.cols >= shards[1].cols - 4
            and (i == 1 or s.cols <= shards[i - 1].cols))
          at = at + s.cols
        end
        assert.equal(cols, at)
      end
    end
  end)

  it("says quickly that an absurd width cannot be cut", function()
    local started = os.clock()
    local absurd = config(5, 4 * (2 ^ 50 - 27)) -- four times a prime
    assert.error_matches(function() plan.column_wise { ranks = { 0, 1, 2 } }:shards(absurd, world(3)) end,
      "cannot cut 4503599627370388 columns into 3 even blocks of a multiple of 4, allowed numbers of ranks: 1; or "
        .. "ranks with sizes %(spec")
    assert.is_true(os.clock() - started < 1)
  end)

  it("leaves whole tables whole", function()
    assert.same({ { rank = 1, row_offset = 0, rows = 9, col_offset = 0, cols = 3 } },
      plan.table_wise(1):shards(config(9, 3), world(2)))
    assert.same({}, plan.data_parallel():shards(config(9, 3), world(2)))
  end)

  --- Shards in short: { rank, first row, rows, first column, columns }.
  local function short(shards)
    return peri.util.map(shards, function(s) return { s.rank, s.row_offset, s.rows, s.col_offset, s.cols } end)
  end

  it("cuts within a node, all of whose ranks have a shard", function()
    local t, env = config(5, 8), world(5, 2) -- nodes of ranks 0 1, 2 3, 4
    assert.same({ { 0, 0, 3, 0, 8 }, { 1, 3, 2, 0, 8 } }, short(plan.table_row_wise():shards(t, env)))
    assert.same({ { 2, 0, 3, 0, 8 }, { 3, 3, 2, 0, 8 } }, short(plan.table_row_wise(1):shards(t, env)))
    assert.same({ { 4, 0, 5, 0, 8 } }, short(plan.table_row_wise(2):shards(t, env)))
    assert.same({ { 3, 0, 5, 0, 8 }, { 2, 5, 0, 0, 8 } },
      short(plan.table_row_wise(nil, { ranks = { 3 } }):shards(t, env)))
    assert.same({ { 1, 0, 1, 0, 8 }, { 0, 1, 4, 0, 8 } },
      short(plan.table_row_wise(nil, { ranks = { 1, 0 }, sizes = { 1, 4 } }):shards(t, env)))
    assert.same({ { 2, 0, 5, 0, 4 }, { 3, 0, 5, 4, 4 } }, short(plan.table_column_wise(1):shards(t, env)))
    assert.same({ { 3, 0, 5, 0, 4 }, { 2, 0, 5, 4, 4 } },
      short(plan.table_column_wise(nil, { ranks = { 3, 2 } }):shards(t, env)))
  end)

  it("cuts a grid: columns over nodes, rows over the ranks of each", function()
    local t, env = config(5, 16), world(5, 2)
    assert.same({ { 2, 0, 3, 0, 8 }, { 3, 3, 2, 0, 8 }, { 0, 0, 3, 8, 8 }, { 1, 3, 2, 8, 8 } },
      short(plan.grid_shard({ 1, 0 }):shards(t, env)))
    assert.same({ { 0, 0, 3, 0, 8 }, { 1, 3, 2, 0, 8 }, { 2, 0, 3, 8, 4 }, { 3, 3, 2, 8, 4 }, { 4, 0, 5, 12, 4 } },
      short(plan.grid_shard():shards(t, env)))
    -- a rank that comes again begins a block
    assert.same({ { 3, 0, 4, 0, 8 }, { 2, 4, 1, 0, 8 }, { 2, 0, 5, 8, 8 }, { 3, 5, 0, 8, 8 } },
      short(plan.grid_shard(nil, { ranks = { 3, 2, 2 }, sizes = { 4, 1, 5 } }):shards(t, env)))
    assert.same({ { 4, 0, 5, 0, 8 }, { 4, 0, 5, 8, 8 } }, short(plan.grid_shard({ 2, 2 }):shards(t, env)))
  end)

  it("knows nodes of any ranks", function()
    local env = plan.ShardingEnv { world_size = 4, nodes = { 7, 3, 7, 3 } }
    assert.same({ { 1, 0, 3, 0, 8 }, { 3, 3, 2, 0, 8 } }, short(plan.table_row_wise(1):shards(config(5, 8), env)))
    assert.error_matches(function() plan.ShardingEnv { world_size = 4, nodes = { 7, 3, 7 } } end,
      "3 nodes, wanted one for each of 4 ranks")
    assert.error_matches(function() plan.ShardingEnv { world_size = 1, nodes = { "a" } } end,
      "nodes%[1%] is .a., allowed: whole numbers")
  end)

  it("reproduces the shards of the golden cases' plans", function()
    local golden = require "spec.support.golden"
    local seen = 0
    for _, name in ipairs(golden.names "sharded") do
      local case = golden.load(name)
      for _, t in ipairs(case.tables or {}) do
        if plan.ShardingType[t.sharding_type:upper()] and #t.shards > 0 then
          local ranks = t.sharding_type ~= "row_wise" and t.ranks or nil
          -- those of one process, of one group
          local own = case.devices or case.sharding_groups and #case.sharding_groups[1]
          local env = own and world(own) or world(case.world_size, case.local_size)
          local got = plan.ParameterSharding { sharding_type = t.sharding_type,
            ranks = ranks }:shards(config(t.num_embeddings, t.embedding_dim, t.name), env)
          assert.equal(#t.shards, #got, name .. " " .. t.name)
          for i, s in ipairs(t.shards) do
            seen = seen + 1
            assert.same({ rank = s.rank, row_offset = s.offsets[1], rows = s.sizes[1], col_offset = s.offsets[2],
              cols = s.sizes[2] }, got[i], name .. " " .. t.name)
          end
        end
      end
    end
    assert.is_true(seen > 50)
  end)
end)

describe("a plan", function()
  local configs = { config(10, 8, "users"), config(20, 16, "items") }

  it("is checked against the tables", function()
    local p = plan.EmbeddingModuleShardingPlan { users = plan.table_wise(0), items = plan.row_wise() }
    local shards = p:validate(configs, world(2), "ebc")
    assert.equal(2, #shards.items)
    assert.error_matches(function()
      plan.EmbeddingModuleShardingPlan { users = plan.row_wise() }:validate(configs, world(2), "ebc")
    end,
      "module 'ebc': table 'items' is not in the plan; planned tables: users")
    assert.error_matches(function()
      plan.EmbeddingModuleShardingPlan { users = plan.row_wise(), items = plan.row_wise(),
        other = plan.row_wise() }:validate(configs, world(2))
    end, "table 'other', which does not exist; tables: items, users")
  end)

  for _, case in ipairs {
    { "a rank outside", function() return plan.table_wise(2) end,
      "table 't' %(table_wise%): rank 2 does not exist, allowed: 0%.%.1" },
    { "a rank below", function() return plan.table_wise(-1) end, "rank %-1 does not exist" },
    { "two ranks for one", function()
      return plan.ParameterSharding { sharding_type = "table_wise", ranks = { 0, 1 } }
    end,
      "lives on one rank, the plan names 2" },
    { "a rank twice", function() return plan.row_wise { ranks = { 0, 0 } } end, "names rank 0 twice" },
    { "rows that do not add up", function() return plan.row_wise { ranks = { 0, 1 }, sizes = { 3, 3 } } end,
      "6 rows together, the table has 12" },
    { "too many rows", function() return plan.row_wise { ranks = { 0, 1 }, sizes = { 3, 13 } } end,
      "shard 1 of 13 rows starts at row 3" },
    { "columns that do not divide", function() return plan.column_wise { ranks = { 0, 1, 0 } } end,
      "cannot cut 16 columns into 3 even blocks.*allowed numbers of ranks: 1, 2, 4" },
    { "columns of an odd width", function() return plan.column_wise { ranks = { 0, 1 }, sizes = { 6, 10 } } end,
      "block 0 of 6 columns.*multiples of 4" },
    { "columns that do not add up", function() return plan.column_wise { ranks = { 0, 1 }, sizes = { 4, 8 } } end,
      "12 columns together, the table has 16" },
    { "columns of no whole step", function() return plan.column_wise() end,
      "table 'odd': column_wise cannot cut 18 columns over 2 ranks, allowed: a multiple of 4 columns, or one rank",
      config(12, 18, "odd") },
    { "ranks of two nodes", function() return plan.table_row_wise(nil, { ranks = { 0, 1 } }) end,
      "table 't': table_row_wise names rank 0 of node 0 and rank 1 of node 1, allowed: ranks of one node", nil, 1 },
    { "blocks on two nodes", function() return plan.table_column_wise(nil, { ranks = { 0, 1 } }) end,
      "table_column_wise names rank 0 of node 0 and rank 1 of node 1, allowed: ranks of one node", nil, 1 },
    { "a rank of a node twice", function() return plan.table_row_wise(nil, { ranks = { 0, 0 } }) end,
      "table_row_wise names rank 0 twice, allowed: each rank once" },
    { "a node outside", function() return plan.table_row_wise(2) end,
      "table 't' %(table_row_wise%): host 2 does not exist, allowed: 0%.%.1", nil, 1 },
    { "a grid that does not divide", function() return plan.grid_shard { 0, 1, 0 } end,
      "grid_shard cannot cut 16 columns into 3 even blocks of a multiple of 4, allowed numbers of blocks: 1, 2, 4", nil,
      1 },
    { "rows of a grid that do not add up", function()
      return plan.grid_shard(nil, { ranks = { 0, 1 }, sizes = { 3, 4 } })
    end,
      "grid_shard shards have 7 rows together, the table has 12" },
    { "some ranks of all", function()
      return plan.ParameterSharding { sharding_type = "data_parallel", ranks = { 1 } }
    end,
      "lives on all 2 ranks" },
  } do
    it("names " .. case[1], function()
      assert.error_matches(function() case[2]():shards(case[4] or config(12, 16), world(2, case[5])) end, case[3])
    end)
  end

  for _, case in ipairs {
    { "an unknown type", { sharding_type = "diagonal" },
      "'diagonal', allowed: column_wise, data_parallel, grid_shard, row_wise, table_column_wise, table_row_wise, "
        .. "table_wise" },
    { "no type", {}, "'sharding_type' is missing" },
    { "an unknown kernel", { sharding_type = "row_wise", compute_kernel = "magic" }, "'magic', allowed: dense, fused" },
    { "an unknown argument", { sharding_type = "row_wise", rank = 1 },
      "no argument 'rank'; allowed: cache_params, compute_kernel, hosts, ranks" },
    { "hosts of a type that knows none", { sharding_type = "row_wise", hosts = { 0 } },
      "hosts with sharding_type 'row_wise', allowed with: grid_shard, table_column_wise, table_row_wise" },
    { "hosts and ranks", { sharding_type = "grid_shard", hosts = { 0 }, ranks = { 0 } },
      "hosts and ranks; give one of them" },
    { "two hosts for a table", { sharding_type = "table_row_wise", hosts = { 0, 1 } },
      "2 hosts for table_row_wise, allowed: 1" },
    { "hosts and sizes", { sharding_type = "table_row_wise", hosts = { 0 }, sizes = { 3 } }, "1 sizes without ranks" },
    { "ranks that are none", { sharding_type = "row_wise", ranks = {} },
      "0 ranks for row_wise, allowed: 1 and more, or no list" },
    { "ranks that are no list", { sharding_type = "row_wise", ranks = 3 }, "ranks is a number" },
    { "half a rank", { sharding_type = "row_wise", ranks = { 0.5 } }, "ranks%[1%] is 0.5" },
    { "a rank past all numbers", { sharding_type = "row_wise", ranks = { 2 ^ 40 } },
      "ranks%[1%] is 1099511627776, wanted a whole" },
    { "an infinite size", { sharding_type = "row_wise", ranks = { 0 }, sizes = { math.huge } },
      "sizes%[1%] is inf, wanted a whole" },
    { "ranks with a name", { sharding_type = "row_wise", ranks = { 0, first = 1 } },
      "ranks has the key first, wanted a list" },
    { "ranks with a hole", { sharding_type = "row_wise", ranks = { [1] = 0, [3] = 1 } },
      "ranks has the key 3, wanted a list" },
    { "a kernel that is false", { sharding_type = "row_wise", compute_kernel = false },
      "compute_kernel 'false', allowed" },
    { "sizes without ranks", { sharding_type = "row_wise", sizes = { 1, 2 } },
      "2 sizes without ranks; with sizes, say ranks too" },
  } do
    it("refuses " .. case[1], function()
      assert.error_matches(function() plan.ParameterSharding(case[2]) end, case[3])
    end)
  end

  it("is fused, whatever the sharding type, unless it says dense", function()
    for _, made in ipairs { plan.table_wise(), plan.row_wise(), plan.column_wise(), plan.data_parallel(),
      plan.table_row_wise(), plan.table_column_wise(), plan.grid_shard() } do
      assert.equal("fused", made.compute_kernel)
    end
    assert.equal("dense", plan.data_parallel({ compute_kernel = "dense" }).compute_kernel)
    assert.equal("fused", plan.ParameterSharding({ sharding_type = "data_parallel" }).compute_kernel)
  end)

  for _, case in ipairs {
    { "row_wise", { compute_kernl = "dense" },
      "plan%.row_wise: no argument 'compute_kernl'; allowed: cache_params, compute_kernel, ranks, sizes" },
    { "column_wise", { rank = 1 },
      "plan%.column_wise: no argument 'rank'; allowed: cache_params, compute_kernel, ranks, sizes" },
    { "data_parallel", { ranks = { 0 } }, "plan%.data_parallel: no argument 'ranks'; allowed: compute_kernel" },
    { "row_wise", 2, "plan%.row_wise: named arguments in a table wanted, got 2" },
    { "table_wise", { rank = 1 }, "plan%.table_wise: the rank is a table, wanted a number" },
    { "table_row_wise", { ranks = { 0 } },
      "plan%.table_row_wise: the node is a table, wanted a number %(options come second" },
    { "grid_shard", "all", "plan%.grid_shard: the node is a string, wanted a number" },
    { "grid_shard", { ranks = { 0 } },
      "plan%.grid_shard: the node is a table, wanted a number or a list of numbers %(options" },
    { "grid_shard", { 0 }, "plan%.grid_shard: a node and ranks; give one of them: grid_shard%(nil, { ranks",
      { ranks = { 2 } } },
    { "table_row_wise", 0, "plan%.table_row_wise: a node and ranks; give one of them", { ranks = { 2, 3 } } },
    { "table_column_wise", 1, "plan%.table_column_wise: a node and ranks; give one of them", { ranks = { 0 } } },
    { "table_wise", 0.5, "ranks%[1%] is 0.5, wanted a whole number" },
    { "table_wise", 0, "plan%.table_wise: no argument 'ranks'; allowed: cache_params, compute_kernel",
      { ranks = { 1 } } },
  } do
    it("is refused by " .. case[1] .. " with what it does not take", function()
      assert.error_matches(function() plan[case[1]](case[2], case[4]) end, case[3])
    end)
  end

  it("comes from a file, a function or a table", function()
    local path = os.tmpname()
    local f = assert(io.open(path, "w"))
    f:write('local plan = require "perilune.plan"\nreturn function(env) return { ebc = { t = plan.table_wise(1 % '
      .. 'env.world_size) } } end\n')
    f:close()
    assert.same({ 1 }, plan.load(path, world(2)):get_plan_for_module("ebc").tables.t.ranks)
    assert.same({ 0 }, plan.load(path, world(1)):get_plan_for_module("ebc").tables.t.ranks)
    f = assert(io.open(path, "w"))
    f:write "return 7"
    f:close()
    assert.error_matches(function() plan.load(path, world(1)) end, "returns 7, wanted a ShardingPlan")
    os.remove(path)
    assert.error_matches(function() plan.load(path, world(1)) end, "cannot open")
    assert.error_matches(function() plan.ShardingPlan { ebc = plan.row_wise() } end,
      "'ebc' has the entry of a table, wanted a list of such entries for each module: "
      .. "{ %[path of the module%] = { %[table%] = entry } }")
    assert.error_matches(function() plan.ShardingPlan { ebc = 7 } end,
      "module 'ebc' has a number, wanted an EmbeddingModuleShardingPlan")
    assert.error_matches(function() plan.ShardingPlan { ebc = { t = "row_wise" } } end,
      "table 't' has a string, wanted a ParameterSharding")
  end)

  it("prints itself in a fixed order", function()
    local p = plan.ShardingPlan { ["a.ebc"] = { users = plan.table_wise(3),
      items = plan.column_wise { ranks = { 0, 1 } } } }
    assert.equal("module: a.ebc\n  items                    column_wise fused ranks 0,1\n"
      .. "  users                    table_wise fused ranks 3", tostring(p))
  end)

  it("can be made by size", function()
    local p = plan.table_wise_by_size({ ebc = { config(10, 8, "a"), config(100, 8, "b"), config(60, 8, "c"),
      config(50, 8, "d") } }, world(2))
    local ranks = {}
    for name, s in peri.util.ordered(p.plan.ebc.tables) do ranks[#ranks + 1] = name .. s.ranks[1] end
    assert.same({ "a0", "b0", "c1", "d1" }, ranks)
  end)
end)
