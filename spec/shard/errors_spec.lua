-- What a sharded collection says to wrong input: which table, feature, sample, id and rank, what is allowed; and no
-- rank waits for ever.
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local plan = peri.plan

local tables = {
  peri.EmbeddingBagConfig { name = "users", num_embeddings = 10, embedding_dim = 4, feature_names = { "u" } },
  peri.EmbeddingBagConfig { name = "items", num_embeddings = 20, embedding_dim = 8, feature_names = { "i", "u" } },
}

local function make(world, options)
  options = options or {}
  return peri.shard.ShardedEmbeddingBagCollection {
    tables = options.tables or tables, group = world, fused_params = options.fused_params or { optimizer = "sgd" },
    table_fused_params = options.table_fused_params,
    plan = options.plan or { users = plan.row_wise(), items = plan.table_wise(world:size() - 1) },
    is_weighted = options.is_weighted,
  }
end

local function kjt(u, i, weights)
  local values, lengths = {}, {}
  for _, bags in ipairs { u, i } do
    for _, bag in ipairs(bags) do
      lengths[#lengths + 1] = #bag
      for _, id in ipairs(bag) do values[#values + 1] = id end
    end
  end
  return peri.KeyedJaggedTensor { keys = { "u", "i" }, values = values, lengths = lengths, weights = weights,
    stride = #u }
end

--- Run `body` on n ranks; the message of each rank's error (nil: none), by rank + 1.
local function messages(n, body, device, local_size)
  local _, errors = sim.run(n, body, { catch = true, timeout = 20, device = device, local_size = local_size or 0 })
  local list = {}
  for r = 1, n do list[r] = errors[r] and tostring(errors[r].message or errors[r]) or false end
  return list
end

for _, device in ipairs { "cpu", "opaque" } do
  describe("bad ids on " .. device, function()
    for _, case in ipairs {
      { "above", { { 3 }, { 1, 10, 2 } }, { { 0 }, {} },
        "table 'users', feature 'u', sample 1: id 10 at position 1 of the bag, allowed: 0..9 (-1: skipped); rank 1" },
      { "below", { { 3 }, { 1 } }, { { -2 }, {} },
        "table 'items', feature 'i', sample 0: id -2 at position 0 of the bag, allowed: 0..19" },
      { "of another table of the feature", { { 3 }, {} }, { { 20 }, {} },
        "table 'items', feature 'i', sample 0: id 20" },
    } do
      it(case[1], function()
        local got = messages(3, function(rank, world)
          local ebc = make(world)
          local input = rank == 1 and kjt(case[2], case[3]) or kjt({ { 1 } }, { { 2 } })
          ebc:forward(input):wait()
        end, device)
        assert.is_truthy(got[2] and got[2]:find(case[4], 1, true), tostring(got[2]))
        for _, r in ipairs { 1, 3 } do -- the others learn why
          assert.is_truthy(got[r] and got[r]:find("id ", 1, true), tostring(got[r]))
        end
      end)
    end

    it("are skipped and counted in other modes", function()
      peri.ffi.C.peri_log_level_set(0)
      for _, mode in ipairs { "WARNING", "IGNORE", "NONE" } do
        sim.run(2, function(_, world)
          local ebc = make(world, { fused_params = { optimizer = "sgd", bounds_check_mode = mode } })
          local clean = ebc:forward(kjt({ { 3, 4 } }, { { 7 } })):values():to_list()
          local dirty = ebc:forward(kjt({ { 3, 400, 4, -1 } }, { { -7, 7 } })):values():to_list()
          for i = 1, 4 do assert.equal(clean[i], dirty[i]) end
        end, { device = device })
      end
      peri.ffi.C.peri_log_level_set(1)
    end)

    it("leave a world of one usable", function()
      sim.run(1, function(_, world)
        local ebc = make(world)
        assert.error_matches(function() ebc:forward(kjt({ { 11 } }, { { 0 } })) end, "id 11")
        assert.equal(4 + 8 + 8, ebc:forward(kjt({ { 1 } }, { { 0 } })):values():size(2))
      end, { device = device })
    end)
  end)
end

describe("wrong input", function()
  local function fails(build, pattern, options)
    sim.run(1, function(_, world)
      local ebc = make(world, options)
      assert.error_matches(function() ebc:forward(build()) end, pattern)
    end)
  end

  it("lacks a feature", function()
    fails(function()
      return peri.KeyedJaggedTensor { keys = { "u", "x" }, values = { 1, 2 }, lengths = { 1, 1 }, stride = 1 }
    end,
      "feature 'i' is not among the keys of the input: u, x")
  end)
  it("has weights that the module does not expect", function()
    fails(function() return kjt({ { 1 } }, { { 2 } }, { 1, 1 }) end,
      "the input has weights, the module is not weighted")
  end)
  it("has no weights where they are needed", function()
    fails(function() return kjt({ { 1 } }, { { 2 } }) end, "the input has no weights, the module is weighted",
      { is_weighted = true })
  end)
  it("is on another device", function()
    fails(function() return peri.KeyedJaggedTensor { keys = { "u", "i" }, values = { 1, 2 }, lengths = { 1, 1 },
      stride = 1, device = "opaque" } end,
      ("the input is on %s, the module on cpu"):format(
        require "ffi".string(peri.ffi.C.peri_device_name(peri.ffi.device "opaque"))))
  end)
  it("has ids of a wrong type", function()
    fails(function()
      return peri.KeyedJaggedTensor { keys = { "u", "i" }, values = peri.tensor { 1, 2 }, lengths = { 1, 1 },
        stride = 1 }
    end, "ids are f32, allowed: i64, i32")
  end)
  it("has inverse indices that name no bag since they were written over", function()
    local function build(strides, first, now)
      local inverse = peri.tensor(first, "i64")
      local batch = peri.KeyedJaggedTensor { keys = { "u", "i" }, values = { 1, 2 }, lengths = { 1, 1 },
        stride_per_key_per_rank = strides, inverse_indices = { { "i", "u" }, inverse } }
      inverse:copy(peri.tensor(now, "i64"))
      return batch
    end
    local function one(u) return build({ { 1 }, { 1 } }, { { 0, 0, 0 }, { 0, 0, 0 } }, { { 0, 0, 0 }, u }) end
    fails(function() return one { 0, 0, 2 } end, "feature 'u', sample 2: inverse index 2, allowed: 0%.%.0")
    fails(function() return one { 0, -1, 0 } end, "feature 'u', sample 1: inverse index %-1, allowed: 0%.%.0")
    local said = messages(2, function(rank, world)
      local ebc = make(world)
      ebc:forward(build({ { 1 }, { 1 } }, { { 0 }, { 0 } }, { { 0 }, { rank } })):wait()
    end)
    for r = 1, 2 do assert.matches("feature 'u', sample 0: inverse index 1, allowed: 0..0", said[r]) end
  end)
  it("is used twice, or too early", function()
    sim.run(1, function(_, world)
      local ebc, other = make(world), make(world)
      local d = ebc:input_dist(kjt({ { 1 } }, { { 2 } })):wait()
      assert.error_matches(function() other:compute_and_output_dist(d) end, "not an input_dist of this module")
      ebc:compute_and_output_dist(d):wait()
      assert.error_matches(function() ebc:compute_and_output_dist(d) end, "is already used")
    end)
    sim.run(2, function(rank, world)
      local ebc = make(world)
      local d = ebc:input_dist(kjt({ { 1 } }, { { 2 } }))
      if rank == 0 then
        assert.error_matches(function() ebc:compute_and_output_dist(d) end, "not complete; wait for it")
      end
      ebc:compute_and_output_dist(d:wait()):wait()
    end)
  end)
end)

describe("ranks that disagree", function()
  it("about the plan", function()
    local got = messages(2, function(rank, world)
      local ebc = make(world, { plan = { users = plan.row_wise(), items = plan.table_wise(rank) } })
      ebc:forward(kjt({ { 1 } }, { { 2 } })):wait()
    end)
    for r = 1, 2 do assert.is_truthy(got[r]
      and (got[r]:find "another module or plan" or got[r]:find "mismatch" or got[r]:find "all_to_all"),
      tostring(got[r])) end
  end)
  it("about the pooling", function()
    local got = messages(2, function(rank, world)
      local own = { peri.EmbeddingBagConfig { name = "users", num_embeddings = 10, embedding_dim = 4,
        feature_names = { "u" }, pooling = rank == 0 and "SUM" or "MEAN" }, tables[2] }
      make(world, { tables = own }):forward(kjt({ { 1 } }, { { 2 } })):wait()
    end)
    for r = 1, 2 do assert.is_truthy(got[r] and got[r]:find "another module or plan", tostring(got[r])) end
  end)
  for quitter = 0, 4 do
    it(("about going on: rank %d gives up, others wait for sums in its node or across nodes"):format(quitter),
      function()
      local started = os.time()
      local got = messages(5, function(rank, world) -- nodes of 0 1, 2 3, 4
        local ebc = make(world, { plan = { users = plan.table_row_wise(1), items = plan.grid_shard { 0, 1 } } })
        local ids = ebc:input_dist(kjt({ { 1 } }, { { 2 } })):wait()
        if rank == quitter then world:abort "had enough" end
        ebc:compute_and_output_dist(ids):wait()
      end, nil, 2)
      for r = 1, 5 do
        assert.is_truthy(got[r] and got[r]:find "had enough", ("rank %d: %s"):format(r - 1, tostring(got[r])))
      end
      assert.is_true(os.time() - started < 10)
    end)
  end

  it("about taking part", function()
    local got = messages(2, function(rank, world)
      local ebc = make(world)
      if rank == 0 then ebc:forward(kjt({ { 1 } }, { { 2 } })):wait() end
    end)
    assert.is_truthy(got[1] and got[1]:find "rank 1", tostring(got[1]))
  end)
end)

describe("a wrong configuration", function()
  local function fails(options, pattern)
    sim.run(1, function(_, world) assert.error_matches(function() make(world, options) end, pattern) end)
  end
  it("has no plan for a table", function()
    fails({ plan = { users = plan.row_wise() } }, "table 'items' is not in the plan")
  end)
  it("plans for a rank that is not there", function()
    fails({ plan = { users = plan.table_wise(1), items = plan.row_wise() } },
      "table 'users'.*rank 1 does not exist, allowed: 0%.%.0")
  end)
  it("has two tables of one name",
    function()
      fails({ tables = { tables[1], tables[1] }, plan = { users = plan.row_wise() } }, "two tables are called 'users'")
    end)
  it("has parameters for tables that do not exist", function()
    fails({ table_fused_params = { user = { optimizer = "sgd" } } },
      "table_fused_params of table 'user', which does not exist; tables: items, users")
    fails({ table_fused_params = { users = "sgd" } }, "table_fused_params of table 'users' is a string, wanted a table")
  end)
  it("has fused tables but no optimizer", function()
    sim.run(1, function(_, world)
      assert.error_matches(function()
        peri.shard.ShardedEmbeddingBagCollection { tables = tables, group = world,
          plan = { users = plan.row_wise(), items = plan.row_wise() } }
      end, "table 'users' has compute_kernel 'fused' but no optimizer")
    end)
  end)
end)
