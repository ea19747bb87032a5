-- Reasons: what is said of an option that lost holds when one tries it, what is said to fit does, and `perilune plan` prints it all.
local peri = require "perilune"
local shell = require "spec.support.shell"
local plan = peri.plan

local GiB = 2 ^ 30

local function planner_of(args)
  args.topology = plan.Topology { world_size = args.ranks or 4, local_world_size = 2, compute_device = "cuda",
    hbm_cap = args.cap or 2 * GiB, ddr_cap = args.ddr or 8 * GiB }
  args.ranks, args.cap, args.ddr = nil, nil, nil
  return plan.EmbeddingShardingPlanner(args)
end

local function model_of(tables) return plan.describe.of { path = "m", tables = tables, optimizer = "adagrad" } end

local tables = { { name = "huge", num_embeddings = 8e6, embedding_dim = 64 },
  { name = "middle", num_embeddings = 1e6, embedding_dim = 256 },
  { name = "small", num_embeddings = 500, embedding_dim = 16, feature_names = { "a", "b" } } }

describe("reasons", function()
  local constraints = { middle = plan.ParameterConstraints { sharding_types = { "table_wise", "column_wise" } } }

  it("hold: each option that lost is slower, no faster, or does not fit", function()
    local model, planner = model_of(tables), planner_of { constraints = constraints }
    local best = planner:plan(model).plan.m
    local rating, kinds, n = planner.last.best.rating, {}, 0
    for _, entry in ipairs(plan.reasons.of(planner, model)) do
      local name = entry.table:match "[^.]+$"
      assert.equal(best.tables[name].sharding_type, entry.chosen.sharding_type)
      for _, other in ipairs(entry.others) do
        kinds[other.kind], n = true, n + 1
        local kind, kernel = other.option:match "^(%S+) ?(%S*)$"
        if other.kind == "constraint" then
          assert.is_true(name == "middle" or kind == "grid_shard")
        else
          -- the same plan with this option pinned
          local pinned = {}
          for _, t in ipairs(tables) do
            local e = best.tables[t.name]
            local mine = t.name == name
            pinned[t.name] = plan.ParameterConstraints { sharding_types = { mine and kind or e.sharding_type },
              compute_kernels = { mine and kernel or e.compute_kernel } }
          end
          local search = planner_of({ constraints = pinned }):search(model)
          if other.kind == "memory" then assert.is_nil(search.best, name .. " " .. other.option)
          else
            assert.equal(other.rating, search.best.rating, name .. " " .. other.option)
            assert.equal(other.kind == "time", search.best.rating > rating)
          end
        end
      end
    end
    assert.is_true(kinds.memory and kinds.time and kinds.constraint and n > 30)
  end)

  it("name the smallest memory and the fewest ranks with which a model fits", function()
    local only = { huge = plan.ParameterConstraints { sharding_types = { "row_wise" }, compute_kernels = { "fused" } } }
    local model = model_of { tables[1] }
    local args = { constraints = only, cap = GiB / 2 }
    local ok, err = pcall(function() planner_of(peri.util.copy(args)):plan(model) end)
    assert.is_false(ok)
    local gib, ranks, field = err.message:match(
      "it would fit with ([%d.]+) GiB %(hbm%) on every rank %(0.50 GiB now%), or (%d+) ranks %(4 now%)(.*)")
    assert.is_string(gib, err.message)
    local function fits(more)
      local a = peri.util.copy(args)
      for k, v in pairs(more) do a[k] = v end
      return pcall(function() planner_of(a):plan(model) end)
    end
    assert.is_true(fits { cap = math.ceil(gib * 1.01 * GiB) })
    assert.is_false(fits { cap = math.floor(gib * 0.98 * GiB) })
    assert.is_true(fits { ranks = tonumber(ranks) })
    assert.is_false(fits { ranks = tonumber(ranks) - 2 })
    assert.equal(", or table 'huge' without its compute_kernels (fused now)", field)
  end)

  it("name a constraint that may go", function()
    local only = { middle = plan.ParameterConstraints { sharding_types = { "table_wise" }, compute_kernels = { "fused" } } }
    assert.error_matches(function() planner_of({ constraints = only, cap = 0.75 * GiB, ddr = 2 ^ 26 }):plan(model_of { tables[2] }) end,
      "table 'm.middle' %(table_wise, fused%) takes 1.91 GiB %(hbm%).*without its sharding_types %(table_wise now%)")
  end)
end)

describe("perilune plan", function()
  if shell.no_launcher() then return it("waits for the launcher", function() pending(shell.no_launcher()) end) end
  local function run(body, words)
    local path = os.tmpname()
    local file = assert(io.open(path, "w"))
    file:write(body)
    file:close()
    local output, code = shell.run(("%s plan %s %s"):format(shell.perilune, path, words))
    os.remove(path)
    return output, code
  end
  local body = [[return { model = { tables = { { name = "users", num_embeddings = 4e7, embedding_dim = 128 },
    { name = "tags", num_embeddings = 1000, embedding_dim = 16 } }, optimizer = "adagrad" },
    constraints = { tags = { sharding_types = { "table_wise" } } } }]]

  it("prints the plan and the reasons, and keeps the plan", function()
    local kept = os.tmpname() .. ".plan"
    local output, code = run(body, "--topology dgx_a100_40gb --save " .. kept)
    assert.equal(0, code, output)
    assert.matches("2 tables on 8 ranks %(cuda%)", output)
    assert.matches("users +40000000 x 128 +row_wise +fused +all", output)
    assert.matches("table_wise fused +memory +a shard of table 'users'", output)
    assert.matches("row_wise +constraint +constraint: sharding_types = table_wise", output)
    assert.equal("row_wise", plan.load(kept).plan[""].tables.users.sharding_type)
    os.remove(kept)
  end)

  it("plans a module without its weights, for other numbers of ranks", function()
    local output, code = run([[local peri = require "perilune"
      return peri.EmbeddingBagCollection { tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = 1e10, embedding_dim = 128,
        feature_names = { "f" } } } }]], "--topology dgx_h100_80gb --ranks 128 --no-reasons")
    assert.equal(0, code, output)
    assert.matches("1 tables on 128 ranks", output)
    assert.not_matches("why", output)
  end)

  it("says in a line what is wrong", function()
    local model = "return { tables = { { name = 't', num_embeddings = 10, embedding_dim = 4 } } }"
    for words, want in pairs { ["--topology no/file"] = "no/file: No such file", ["--ranks 0"] = "'0' is not a whole number above 0" } do
      local output, code = run(model, words)
      assert.not_equal(0, code)
      assert.matches(want, output, 1, true)
    end
    assert.matches("a model that is a number", (run("return 5", "")), 1, true)
    assert.matches("tables[1]: argument 'num_embeddings' is missing",
      (run("return { tables = { { name = 't', embedding_dim = 4 } } }", "")), 1, true)
  end)
end)
