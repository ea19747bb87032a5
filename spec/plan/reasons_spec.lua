-- Reasons: what is said of an option that lost holds when one tries it, what is said to fit does, and `perilune plan`
-- prints it all.
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

  it("name the least memory more with which an option that does not fit would", function()
    local model = model_of(tables)
    local said = 0
    local function planner_with(more, pinned)
      local topology = plan.Topology { world_size = 4, local_world_size = 2, compute_device = "cuda", hbm_cap = GiB,
        ddr_cap = 2 * GiB }
      topology = topology:with_devices(function(d)
        for tier, bytes in pairs(more) do d[tier] = d[tier] + bytes end -- any order
      end)
      return plan.EmbeddingShardingPlanner { topology = topology, constraints = pinned,
        proposers = { plan.GreedyProposer() },
        storage_reservation = plan.FixedAbsoluteStorageReservation { bytes = 0 } }
    end
    local planner = planner_with {}
    planner:plan(model)
    for _, entry in ipairs(plan.reasons.of(planner, model)) do
      for _, other in ipairs(entry.others) do
        local rank, n, unit, tier =
          other.text:match "rank (%d).*; it would fit with ([%d.]+) ([GM])iB %((%w+)%) more on every rank"
        assert.equal(other.kind == "memory", n ~= nil, other.text)
        if n then
          assert.is_true(tonumber(rank) < 4)
          said = said + 1
          -- the plan with this option and no other
          local pinned, kind, kernel = {}, other.option:match "^(%S+) (%S+)$"
          for i, t in ipairs(tables) do
            local o = planner.last.best.proposal[i]
            local mine = "m." .. t.name == entry.table
            pinned[t.name] = plan.ParameterConstraints { sharding_types = { mine and kind or o.sharding_type },
              compute_kernels = { mine and kernel or o.compute_kernel } }
          end
          local bytes = tonumber(n) * (unit == "G" and 2 ^ 30 or 2 ^ 20)
          assert.is_true(pcall(function() planner_with({ [tier] = math.ceil(bytes * 1.02 + 2 ^ 18) },
            pinned):plan(model) end), other.text)
          local less = bytes * 0.97 - 2 ^ 18
          if less > 0 then
            assert.is_nil(planner_with({ [tier] = math.floor(less) }, pinned):search(model).best, other.text)
          end
        end
      end
    end
    assert.is_true(said >= 4, said)
  end)

  it("name memory as it is given, before what is reserved, and as much as is enough", function()
    local large = { { name = "users", num_embeddings = 4e6, embedding_dim = 128 },
      { name = "items", num_embeddings = 1e6, embedding_dim = 64 } }
    local model = plan.describe.of { tables = large, optimizer = "adagrad" }
    local function planner_with(hbm, ddr, wanted)
      return plan.EmbeddingShardingPlanner { constraints = wanted, sharder = plan.perilune_sharder,
        topology = plan.Topology {
        world_size = 2, compute_device = "cuda", hbm_cap = hbm, ddr_cap = ddr } }
    end
    local hbm, ddr = math.floor(0.8 * GiB), math.floor(3.2 * GiB)
    local planner, both, alone = planner_with(hbm, ddr), 0, 0
    local made = planner:plan(model)
    local function bytes(number, unit)
      return number and math.ceil(tonumber(number) * (unit == "G" and GiB or 2 ^ 20)) or 0
    end
    for _, entry in ipairs(plan.reasons.of(planner, model)) do
      for _, other in ipairs(entry.others) do
        if other.kind == "memory" then
          local n, unit, tier, rest =
            other.text:match "it would fit with ([%d.]+) ([GM])iB %((%w+)%)(.*) more on every rank"
          assert.is_string(n, other.text)
          local n2, unit2 = rest:match " and ([%d.]+) ([GM])iB"
          both, alone = both + (n2 and 1 or 0), alone + (n2 and 0 or 1)
          local of_hbm, of_ddr = bytes(n, unit), bytes(n2, unit2)
          if tier == "ddr" then of_hbm, of_ddr = of_ddr, of_hbm end
          local pinned, kind, kernel = {}, other.option:match "^(%S+) (%S+)$"
          for name, e in pairs(made.plan[""].tables) do -- any order
            local mine = name == entry.table
            pinned[name] = plan.ParameterConstraints { sharding_types = { mine and kind or e.sharding_type },
              compute_kernels = { mine and kernel or e.compute_kernel } }
          end
          assert.is_true(pcall(function() planner_with(hbm + of_hbm, ddr + of_ddr, pinned):plan(model) end),
            other.option .. other.text)
          assert.is_false(pcall(function()
            planner_with(hbm + math.floor(of_hbm * 0.98), ddr + math.floor(of_ddr * 0.98), pinned):plan(model)
          end), other.option .. other.text)
        end
      end
    end
    assert.is_true(both > 0 and alone > 0, both .. " " .. alone)
    -- and where nothing fits
    local only = { users = plan.ParameterConstraints { sharding_types = { "table_wise" },
      compute_kernels = { "fused_uvm_caching" } } }
    local _, err = pcall(function() planner_with(hbm, ddr, only):plan(model) end)
    local n, n2 = err.message:match(
      "it would fit with ([%d.]+) MiB %(hbm%) and ([%d.]+) GiB %(ddr%) on every rank %(0.80 GiB and 3.20 GiB now%)")
    assert.is_string(n, err.message)
    assert.is_true(pcall(function() planner_with(bytes(n, "M"), bytes(n2, "G"), only):plan(model) end))
    assert.is_false(pcall(function() planner_with(bytes(n * 0.98, "M"), bytes(n2, "G"), only):plan(model) end))
    assert.is_false(pcall(function() planner_with(bytes(n, "M"), bytes(n2 * 0.98, "G"), only):plan(model) end))
  end)

  it("name the kernels that a constraint leaves out, and the margin that would do", function()
    local model = model_of { tables[2] }
    local planner = planner_of { constraints = { middle = plan.ParameterConstraints { compute_kernels = { "fused",
      "dense" } } } }
    planner:plan(model)
    local found = {}
    for _, other in ipairs(plan.reasons.of(planner, model)[1].others) do found[other.option] = other.text end
    assert.equal("constraint: compute_kernels = fused, dense", found["row_wise fused_uvm"])
    assert.is_nil(found["data_parallel fused_uvm"])
    -- of 2 GiB each table_wise takes 1.91
    local only = { middle = plan.ParameterConstraints { sharding_types = { "table_wise" },
      compute_kernels = { "fused" } } }
    assert.error_matches(function() planner_of({ constraints = only }):plan(model) end,
      "a storage reservation of (%d) %% %(15 %% now%)")
    for percent, fits in pairs { [4] = true, [5] = false } do -- any order
      local other = planner_of { constraints = only,
        storage_reservation = plan.HeuristicalStorageReservation { percentage = percent / 100 } }
      assert.equal(fits, (pcall(other.plan, other, model)))
    end
    assert.error_matches(function() planner_of({ constraints = only }):plan(model) end, "a storage reservation of 4 %%")
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
    assert.matches(", or table 'huge' without its compute_kernels (fused now)", field, 1, true)
  end)

  it("name the memory that the dense part lacks", function()
    local model = plan.describe.of { tables = { tables[3] }, dense_bytes = 400 * 2 ^ 20 }
    assert.error_matches(function() planner_of({ cap = 2 ^ 30 }):plan(model) end,
      "HeuristicalStorageReservation: rank 0 has .*; it would fit with 2.76 GiB %(hbm%) on every rank %(1.00 GiB now%)")
  end)

  it("name a constraint that may go", function()
    local only = { middle = plan.ParameterConstraints { sharding_types = { "table_wise" },
      compute_kernels = { "fused" } } }
    assert.error_matches(function()
      planner_of({ constraints = only, cap = 0.75 * GiB, ddr = 2 ^ 26 }):plan(model_of { tables[2] })
    end,
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
    local name = os.tmpname()
    local kept = name .. ".plan"
    local page = os.tmpname()
    local output, code = run(body, ("--topology dgx_a100_40gb --save %s --html %s"):format(kept, page))
    assert.equal(0, code, output)
    assert.matches("2 tables on 8 ranks %(cuda%)", output)
    assert.matches("users +40000000 x 128 +row_wise +fused +all", output)
    assert.matches("table_wise fused +memory +a shard of table 'users'", output)
    assert.matches("row_wise +constraint +constraint: sharding_types = table_wise", output)
    assert.equal("row_wise", plan.load(kept).plan[""].tables.users.sharding_type)
    assert.matches("^<!doctype html>.*<svg.*table_wise fused</td><td>memory", shell.read(page))
    os.remove(page)
    output, code = run(body, ("--topology dgx_a100_40gb --no-reasons --save %s.json"):format(name))
    assert.equal(0, code, output)
    assert.equal(tostring(plan.load(kept)), tostring(plan.load(name .. ".json")))
    for _, file in ipairs { name, kept, name .. ".json" } do os.remove(file) end
  end)

  it("plans a module without its weights, for other numbers of ranks", function()
    local output, code = run([[local peri = require "perilune"
      return peri.EmbeddingBagCollection { tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = 1e10, embedding_dim = 128,
        feature_names = { "f" } } } }]], "--topology dgx_h100_80gb --ranks 128 --no-reasons")
    assert.equal(0, code, output)
    assert.matches("1 table on 128 ranks", output)
    local ranks = "--topology cpu_ethernet_10g -n 8 --no-reasons --memory "
    output, code = run(body, ranks .. "2G") -- a rank has 2.4 GiB of users' rows, and as much of their states
    assert.equal(1, code)
    assert.matches("none of %d+ proposals fits 8 ranks of 2.00 GiB %(ddr%).*%(2.00 GiB now%)", output)
    assert.matches("2 tables on 8 ranks %(cpu%), 1 a host, 10.0 GiB each", (run(body, ranks .. "10G")))
    assert.not_matches("why", output)
  end)

  it("names in its help every machine that it knows", function()
    local help = shell.run(shell.perilune .. " plan --help"):gsub("%s+", " ")
    for _, name in ipairs(plan.Topology.presets) do assert.matches("[ ,]" .. name .. "[,.]", help) end
  end)

  it("says in a line what is wrong", function()
    local model = "return { tables = { { name = 't', num_embeddings = 10, embedding_dim = 4 } } }"
    for words, want in pairs { ["--topology no/file"] = "no/file: No such file",
      ["--memory lots"] = "perilune: plan: --memory: size 'lots', wanted bytes, such as 2G",
      ["--ranks 0"] = "'0' is not a whole number above 0",
      ["--ranks -1"] = "'-1' is no option, and no number that an option takes",
      ["--samples 5"] = "perilune: plan: --samples goes with --data FILE",
      ["--dim 5"] = "perilune: plan: --dim goes with --data FILE and no model", ["--data /no/where --rows 5"] =
      "perilune: plan: --rows goes with --data FILE and no model",
      ["--data /no/where"] = "/no/where: No such file or directory", ["--save /tmp/x.plan --html /tmp/x.plan"] =
      "plan: --save and --html are both '/tmp/x.plan'", ["--simulate base --scale 2,,4"] =
      "plan: --scale '2,,4', wanted numbers of ranks",
      ["--batch-size 99999999999"] = "--batch-size: 99999999999, allowed: whole numbers 1..2147483647",
      ["--save x.lua"] = "perilune: plan: --save 'x.lua', allowed: names that end in .plan or .json",
      ["--html no/folder/x.html"] = "perilune: plan --html: no/folder/x.html: No such file" } do
      local output, code = run(model, words)
      assert.not_equal(0, code)
      assert.matches(want, output, 1, true)
    end
    assert.matches("a model that is a number", (run("return 5", "")), 1, true)
    local t = "{ name = 't', num_embeddings = 10, embedding_dim = 4 }"
    for text, want in pairs { -- any order
      ["return { tables = { " .. t .. ", " .. t .. " } }"] =
      "model[1]: tables[2] 't': a table of this name comes before it",
      ["return { { tables = { " .. t .. " } }, { tables = { " .. t .. " } } }"] =
        "model[2]: path '' is that of model[1] too",
      ["return { model = { tables = { " .. t .. " } }, constraints = { u = {} } }"] =
      "constraints of table 'u', which the model has not",
      ["return { model = { tables = { " .. t .. " } }, relation = {} }"] =
        "no argument 'relation'; allowed: constraints, cost, model",
      ["return { tables = { { name = 't', num_embeddings = 0, embedding_dim = 4 } } }"] =
      "tables[1] 't': num_embeddings is 0", ["return { tables = { " .. t .. ", nil, " .. t .. " } }"] =
      "tables has an entry [3], and no entry [2]", ["return { tables = { a = " .. t .. " } }"] =
      "tables is a table with the key 'a', wanted a list",
      ["return { tables = {} }"] = "model[1]: tables is empty, wanted at least one table",
      ["return require('perilune').nn.Linear { in_features = 2, out_features = 1 }"] =
        "the model has no collections of tables",
      ["return { tables = { { name = 't', num_embeddings = 1, embedding_dim = 4, feature_names = {} } } }"] =
      "feature_names is empty",
      ["return { tables = { { name = 't', num_embeddings = 1, embedding_dim = 4, feature_names = { 'x', 'x' } } } }"] =
        "tables[1] 't': feature 'x' comes twice",
      ["return { tables = { { name = 't', num_embeddings = 1e18, embedding_dim = 4 } } }"] =
        "num_embeddings is 1000000000000000000, allowed: whole numbers 1..2^53 - 1",
      ["return { model = { tables = { " .. t .. " } }, constraints = { t = { sharding_types = { 'foo' } } } }"] =
        "constraints of table 't': ParameterConstraints: one of sharding_types is 'foo'",
      ["return { model = { tables = { " .. t .. " } }, constraints = { t = 3 } }"] = "constraints of table 't': ",
      ["x = = 3"] = "unexpected symbol near '='",
    } do assert.matches(want, (run(text, "")), 1, true) end
    local file = os.tmpname()
    for text, want in pairs { -- any order
      ["world_size = 0"] = "world_size is 0, allowed: whole numbers 1..",
      ["world_size = 2, inter_host_latency = -1"] = "inter_host_latency is -1, allowed: finite numbers >= 0",
      ["world_size = 2, intra_host_bw = 0"] = "intra_host_bw is 0, allowed: finite numbers > 0",
    } do
      shell.write(file, "return { perilune_topology = 1, " .. text .. " }")
      assert.matches(("topology '%s': Topology: %s"):format(file, want), (run(model, "--topology " .. file)), 1, true)
    end
    os.remove(file)
    assert.matches("tables[1]: argument 'num_embeddings' is missing",
      (run("return { tables = { { name = 't', embedding_dim = 4 } } }", "")), 1, true)
  end)
end)
