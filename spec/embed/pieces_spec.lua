-- Tables cut by rows into pieces: what comes out and what is learned is what whole tables do, wherever the pieces are.
local peri = require "perilune"
local worlds = require "spec.support.worlds"
local plan = peri.plan

local ROWS = { 100, 30, 7 }

local function configs(more)
  local list = { { name = "t", num_embeddings = ROWS[1], embedding_dim = 8, feature_names = { "f", "g" } },
    { name = "u", num_embeddings = ROWS[2], embedding_dim = 4, feature_names = { "h" } },
    { name = "v", num_embeddings = ROWS[3], embedding_dim = 12, feature_names = { "k" } } }
  return peri.util.map(list, function(c)
    c.init_fn = peri.embed.constant(0.25)
    for name, value in pairs(more or {}) do c[name] = value end -- any order
    return peri.EmbeddingBagConfig(c)
  end)
end

local cuts = { t = { 3, 40 }, u = { 29 } }
local limit = { f = 100, g = 100, x = 1000, h = 30, k = 7 }
local keys = { "h", "g", "x", "f", "k" }

local function draw(seed, batch, weighted)
  local values, lengths, weights, at = {}, {}, {}, 0
  local function u()
    at = at + 1
    return peri.ffi.C.peri_random_uniform(seed, 7, at)
  end
  for _, key in ipairs(keys) do
    for _ = 1, batch do
      local n = math.floor(u() * 5)
      lengths[#lengths + 1] = n
      for _ = 1, n do
        values[#values + 1], weights[#weights + 1] = math.floor(u() ^ 2 * limit[key]), u()
      end
    end
  end
  return peri.KeyedJaggedTensor { keys = keys, values = values, lengths = lengths, weights = weighted and weights
    or nil }
end

local function train(model, rank, steps, batch, weighted)
  local outputs = {}
  for step = 1, steps do
    peri.scope(function()
      local out = model(draw(step * 10 + rank, batch, weighted)):values()
      outputs[step] = out:to_list()
      local scale = {}
      for i = 1, batch * 32 do scale[i] = peri.ffi.C.peri_random_uniform(99, rank, step * 1000 + i) - 0.4 end
      (out * peri.tensor(scale):reshape(batch, 32)):sum():backward()
    end)
  end
  return outputs
end

local function flat(list, out)
  for _, x in ipairs(list) do
    if type(x) == "table" then flat(x, out) else out[#out + 1] = x end
  end
  return out
end

local function same(a, b)
  a, b = flat(a, {}), flat(b, {})
  assert.equal(#a, #b)
  for i = 1, #a do
    assert.is_true(math.abs(a[i] - b[i]) <= 1e-5 * math.max(1, math.abs(b[i])), ("%d: %g %g"):format(i, a[i], b[i]))
  end
end

local fused = { optimizer = "adagrad", learning_rate = 0.3 }

describe("tables in pieces", function()
  for _, weighted in ipairs { false, true } do
    worlds.each("learn what whole tables learn" .. (weighted and ", with weights" or ""), function(world, device, n)
      peri.ffi.state.device = device
      local whole = peri.DistributedModelParallel { group = world,
        plan = { [""] = { t = plan.table_wise(0), u = plan.row_wise(), v = plan.table_wise(n - 1) } },
        module = peri.EmbeddingBagCollection { tables = configs(), fused_params = fused, is_weighted = weighted } }
      local pieces = { ["t:0"] = plan.data_parallel(), ["t:3"] = plan.row_wise(),
        ["t:40"] = plan.table_wise(n - 1,
          { compute_kernel = "fused_uvm_caching", cache_params = { load_factor = 0.5 } }),
        ["u:0"] = plan.column_wise(), ["u:29"] = plan.data_parallel(), ["v:0"] = plan.table_wise(0) }
      local cut = peri.DistributedModelParallel { group = world, plan = { pieces = pieces },
        module = peri.PiecewiseEmbeddingBagCollection { tables = configs(), cuts = cuts, fused_params = fused,
          is_weighted = weighted } }
      local rank = world:rank()
      same(train(cut, rank, 4, 3, weighted), train(whole, rank, 4, 3, weighted))
    end, { sizes = { 1, 2, 3 } })
  end

  it("are tables of planners", function()
    local module = peri.PiecewiseEmbeddingBagCollection { tables = configs(), cuts = cuts, fused_params = fused }
    local names = {}
    for _, c in ipairs(plan.describe.of(module)) do
      assert.equal("pieces", c.path)
      for _, t in ipairs(c.tables) do names[t.name] = t.num_embeddings end
    end
    assert.same({ ["t:0"] = 3, ["t:3"] = 37, ["t:40"] = 60, ["u:0"] = 29, ["u:29"] = 1, ["v:0"] = 7 }, names)
    local planner = plan.EmbeddingShardingPlanner { topology = plan.Topology { world_size = 2 },
      sharder = plan.perilune_sharder,
      constraints = { ["t:0"] = plan.ParameterConstraints { sharding_types = { "data_parallel" } } } }
    assert.equal("data_parallel", planner:plan(plan.describe.of(module)).plan.pieces.tables["t:0"].sharding_type)
  end)

  it("start within the whole table's range", function()
    local tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = 10000, embedding_dim = 8,
      feature_names = { "f" } } }
    local module = peri.PiecewiseEmbeddingBagCollection { tables = tables, cuts = { t = { 4 } }, fused_params = fused }
    local most = 0
    local out = module(peri.KeyedJaggedTensor { keys = { "f" }, values = { 0, 1, 2, 3 },
      lengths = { 1, 1, 1, 1 } }):values()
    for _, x in ipairs(flat(out:to_list(), {})) do most = math.max(most, math.abs(x)) end
    assert.is_true(most > 0 and most <= 0.01, most)
  end)

  it("refuse what they cannot do, by name", function()
    local function refused(words, args)
      local a = { tables = configs(), cuts = cuts, fused_params = fused }
      for name, value in pairs(args) do a[name] = value end -- any order
      assert.error_matches(function() peri.PiecewiseEmbeddingBagCollection(a) end, words, 1, true)
    end
    refused("cuts['t'][2] is 3, allowed: whole numbers 41..99", { cuts = { t = { 40, 3 } } })
    refused("cuts['u'][1] is 30, allowed: whole numbers 1..29", { cuts = { u = { 30 } } })
    refused("cuts has table 'w', which does not exist", { cuts = { w = { 1 } } })
    refused("cuts['t'] is 3, wanted a list of rows", { cuts = { t = 3 } })
    refused("cuts['t'] has entries behind a nil", { cuts = { t = { [1] = 10, [3] = 20 } } })
    refused("cuts['t'] has entries behind a nil, or keys that are no positions", { cuts = { t = { zz = 1 } } })
    refused("optimizer shampoo has one preconditioner for all rows of a table",
      { fused_params = { optimizer = "shampoo", learning_rate = 0.1 } })
    local counter = { optimizer = "rowwise_adagrad", learning_rate = 0.1, weight_decay_mode = "counter",
      counter_based_regularization = { learning_rate_mode = "tail_id_lr_increase" } }
    refused("goes by the largest counter of all rows of a table", { fused_params = counter })
    refused("output_dtype is FP16, allowed: FP32", {
      fused_params = { optimizer = "sgd", learning_rate = 0.1, output_dtype = "FP16" } })
    counter.counter_based_regularization.learning_rate_mode = "equal"
    peri.PiecewiseEmbeddingBagCollection { tables = configs(), cuts = cuts, fused_params = counter }
    refused("table 't' has pooling MEAN, allowed: SUM", { tables = configs { pooling = "MEAN" } })
    refused("feature 'f' is of two tables", { tables = configs { feature_names = { "f" } }, cuts = {} })
    local module = peri.PiecewiseEmbeddingBagCollection { tables = configs(), cuts = cuts, fused_params = fused }
    local function looked_up(words, args)
      assert.error_matches(function() module(peri.KeyedJaggedTensor(args)) end, words, 1, true)
    end
    for _, id in ipairs { 100, 1e12, 2 ^ 52, -7 } do
      looked_up(("feature 'f', sample 0: id %.0f, allowed: 0..99"):format(id),
        { keys = { "f", "g", "h", "k" }, values = { id }, lengths = { 1, 0, 0, 0 } })
    end
    looked_up("PiecewiseEmbeddingBagCollection: feature 'k', sample 1: id 7, allowed: 0..6",
      { keys = { "f", "g", "h", "k" }, values = { 1, 3, 7 }, lengths = { 1, 0, 0, 0, 0, 0, 1, 1 } })
    looked_up("the batch has no feature 'h'; it has: f, g, k",
      { keys = { "f", "g", "k" }, values = { 1 }, lengths = { 1, 0, 0 } })
    local weighted = peri.PiecewiseEmbeddingBagCollection { tables = configs(), cuts = cuts, fused_params = fused,
      is_weighted = true }
    assert.error_matches(function()
      weighted(peri.KeyedJaggedTensor { keys = { "f", "g", "h", "k" }, values = { 1 }, lengths = { 1, 0, 0, 0 },
        weights = peri.tensor({ 1 }):requires_grad() })
    end, "weights that require a gradient get none through pieces")
    assert.error_matches(function() module(3) end, "features is 3, wanted a KeyedJaggedTensor", 1, true)
  end)
end)
