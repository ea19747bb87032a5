-- The plans of the examples, given as the README gives its plan: to DistributedModelParallel, for models with one
-- collection or several.
local peri = require "perilune"
local worlds = require "spec.support.worlds"
local nn, plan = peri.nn, peri.plan

local files = {}
for path in io.popen("ls examples/plans/*"):lines() do files[#files + 1] = path end

local function collection(prefix, dim)
  local tables = {}
  for i, rows in ipairs { 40, 30, 2000, 9, 1100, 1500 } do
    tables[i] = peri.EmbeddingBagConfig { name = prefix .. i, num_embeddings = rows, embedding_dim = dim,
      feature_names = { "f" .. i } }
  end
  return peri.EmbeddingBagCollection { tables = tables, fused_params = { optimizer = "sgd" } }
end

describe("the plans of the examples", function()
  it("are there", function() assert.is_true(#files >= 3) end)

  for _, path in ipairs(files) do
    worlds.each(path .. " serves any model", function(world, device)
      peri.ffi.state.device = device
      local net = nn.Module()
      net.towers = { collection("user", 16), collection("item", 6) }
      local model = peri.DistributedModelParallel { module = net, plan = path, group = world }
      assert.same({ "towers.0", "towers.1" }, peri.util.keys(model.plan.plan))
      local one = peri.DistributedModelParallel { module = collection("t", 16), plan = path, group = world }
      local ids = { keys = { "f1", "f2", "f3", "f4", "f5", "f6" }, values = { 1, 2, 3, 4, 5, 6 },
        lengths = { 1, 1, 1, 1, 1, 1 } }
      assert.same({ 1, 96 }, one(peri.KeyedJaggedTensor(ids)):values():shape())
    end, { sizes = { 1, 2, 3, 4 }, devices = { "cpu" } })
  end
end)

describe("a plan's environment", function()
  local tables = { { name = "t", num_embeddings = 9, embedding_dim = 4 } }
  local function seen(env)
    local kept
    plan.load(function(e)
      kept = e
      return {}
    end, env)
    return kept
  end

  it("has the tables of the model", function()
    local env = seen { world_size = 3, modules = { ["a.b"] = tables } }
    assert.same({ 3, 3, "a.b", tables }, { env.world_size, env.local_size, env.module, env.tables })
    env = seen { world_size = 3, local_size = 2, module = "a", tables = tables, mine = 7 }
    assert.same({ 2, tables, 7 }, { env.local_size, env.modules.a, env.mine })
    assert.is_nil(env.other)
  end)

  it("says what it does not have", function()
    local env = seen { world_size = 3, modules = { a = tables, b = tables } }
    for _, name in ipairs { "module", "tables" } do
      assert.error_matches(function() return env[name] end, "plan: it uses env." .. name
        .. ", but the model has several collections")
    end
    assert.error_matches(function() return seen({}).world_size end,
      "plan: it uses env.world_size, but it was not given")
    assert.error_matches(function() plan.load("examples/plans/row_wise.lua", { world_size = 2 }) end,
      "it uses env.modules, but it was not")
    assert.error_matches(function() plan.load "examples/plans/table_wise.lua" end,
      "it uses env.modules, but it was not")
  end)
end)
