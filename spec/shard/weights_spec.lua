-- Gradients of the ids' weights: those of the unsharded collection, under every sharding type, on any number of ranks.
-- A rank's weights are its own input: their gradient is that of its own loss, whatever gradients of tables are divided
-- by, and is not clipped.
local peri = require "perilune"
local golden = require "spec.support.golden"
local sim = require "perilune.dist.sim"
local worlds = require "spec.support.worlds"
local plan, codec = peri.plan, peri.dist.codec

local ROWS = { a = 19, b = 11, c = 8 }
local COLS = { a = 8, b = 4, c = 12 }
local order = { "a", "b", "c" } -- "f" looks into a and c, "g" into b and c
local keys = { "f", "g" }
local LIMIT = { f = 8, g = 8 } -- rows of the smallest table of each

local function configs()
  return peri.util.map(order, function(name)
    return peri.EmbeddingBagConfig { name = name, num_embeddings = ROWS[name], embedding_dim = COLS[name],
      pooling = name == "b" and "MEAN" or "SUM", feature_names = name == "a" and { "f" } or name == "b" and { "g" }
        or keys }
  end)
end
local WIDTH = 8 + 4 + 24

local entries = {
  table_wise = function(i, n) return plan.table_wise(i % n) end,
  row_wise = function() return plan.row_wise() end,
  column_wise = function(_, n) return plan.column_wise { ranks = { n - 1 } } end,
  data_parallel = function() return plan.data_parallel { compute_kernel = "fused" } end,
  dense = function(i, n) return i == 1 and plan.data_parallel { compute_kernel = "dense" } or
    i == 2 and plan.row_wise { compute_kernel = "dense" } or plan.table_wise(n - 1, { compute_kernel = "dense" }) end,
}
entries.within_nodes = function(i, n)
  return i == 1 and plan.table_row_wise(nil, { ranks = { n - 1 } }) or plan.grid_shard()
end
local mix = { "row_wise", "data_parallel", "column_wise" }
entries.mixed = function(i, n)
  if i == 3 then return plan.column_wise { ranks = { 0, n - 1, 0 } } end
  return entries[mix[i]](i, n)
end

local function generator(seed)
  local x = seed
  return function(n)
    x = x * 16807 % 2147483647
    return x % n
  end
end

--- A batch of this rank: { kjt, weights = leaf, grad }; ids may be pruned, bags empty. variable: each key has its own
--- bags.
local function draw(seed, device, variable)
  local below = generator(seed)
  local size = variable and 4 or seed % 4
  local values, lengths, weights, strides, inverse = {}, {}, {}, {}, {}
  for k, key in ipairs(keys) do
    strides[k] = { variable and 1 + below(3) or size }
    inverse[k] = {}
    for s = 1, size do inverse[k][s] = variable and below(strides[k][1]) or s - 1 end
    for _ = 1, strides[k][1] do
      local length = below(5)
      lengths[#lengths + 1] = length
      for _ = 1, length do
        values[#values + 1] = below(8) == 0 and -1 or below(LIMIT[key])
        weights[#weights + 1] = (below(60) - 20) / 16
      end
    end
  end
  local leaf = peri.tensor(weights, "f32", device, { #weights })
  leaf:requires_grad()
  local kjt = peri.KeyedJaggedTensor { keys = keys, values = peri.tensor(values, "i64", device, { #values }),
    lengths = peri.tensor(lengths, "i32", device, { #lengths }), weights = leaf,
    stride = not variable and size or nil, stride_per_key_per_rank = variable and strides or nil,
    inverse_indices = variable and { keys, peri.tensor(inverse, "i64", device) } or nil, device = device }
  local grad = {}
  for i = 1, size * WIDTH do grad[i] = (below(201) - 100) / 64 end
  return kjt, leaf, peri.tensor(grad, "f32", device, { size, WIDTH })
end

local function make(kind, world, device, n, options)
  local plans = {}
  for i, name in ipairs(order) do plans[name] = entries[kind](i, n) end
  return peri.shard.ShardedEmbeddingBagCollection { tables = configs(), plan = plans, group = world, device = device,
    seed = 9, fused_params = { optimizer = "sgd", learning_rate = 0, gradient_clipping = true, max_gradient = 0.01,
      exact = options.exact }, is_weighted = true,
    qcomm_codecs_registry = options.codecs, gradient_division = options.division }
end

--- The gradient of the weights in the unsharded collection.
local function wanted(seed, device, variable)
  local whole = peri.EmbeddingBagCollection { tables = configs(), seed = 9, is_weighted = true, device = device }
  local kjt, leaf, grad = draw(seed, device, variable)
  whole(kjt):values():backward(grad)
  return leaf:grad() and leaf:grad():to_list() or {}
end

local function run(kind, world, device, n, options)
  local ebc = make(kind, world, device, n, options)
  for step = 1, 2 do
    local seed = 100 * step + world:rank()
    local kjt, leaf, grad = draw(seed, device, options.variable)
    ebc(kjt):values():backward(grad)
    local want, got = wanted(seed, device, options.variable), leaf:grad():to_list()
    if options.exact then assert.same(want, got)
    else golden.assert_near(want, got, options.tolerance or { abs = 2e-6, rel = 2e-6 }, ("step %d"):format(step)) end
  end
end

describe("gradients of the ids' weights,", function()
  for _, kind in ipairs { "table_wise", "row_wise", "column_wise", "data_parallel", "dense", "mixed",
    "within_nodes" } do
    worlds.each(kind, function(world, device, n) run(kind, world, device, n, {}) end,
      { sizes = { 1, 2, 3, 5 }, local_size = 2 })
  end
  worlds.each("not divided", function(world, device, n) run("mixed", world, device, n, { division = false }) end,
    { sizes = { 2, 3 } })
  worlds.each("of a variable batch", function(world, device, n) run("mixed", world, device, n, { variable = true }) end,
    { sizes = { 1, 2, 3 } })
  -- one rank makes each sum, in the order of the unsharded tables
  for _, kind in ipairs { "column_wise", "mixed", "within_nodes" } do
    worlds.each("bit for bit with exact sums, " .. kind, function(world, device, n)
      run(kind, world, device, n, { exact = true })
    end,
      { sizes = { 1, 2, 3, 5 }, local_size = 2 })
  end
  worlds.each("bit for bit with exact sums, variable batch",
    function(world, device, n) run("mixed", world, device, n, { exact = true, variable = true }) end,
    { sizes = { 1, 3 } })
  worlds.each("from rounded gradients", function(world, device, n)
    local codecs = codec.get_qcomm_codecs_registry { forward = "FP16", backward = "FP16" }
    run("row_wise", world, device, n, { codecs = codecs, tolerance = { abs = 2e-3, rel = 2e-3 } })
  end, { sizes = { 2, 3 } })

  worlds.each("are slopes", function(world, device, n)
    local ebc = make("mixed", world, device, n, {})
    local kjt, leaf, grad = draw(7 + world:rank(), device)
    ebc(kjt):values():backward(grad)
    local got, start, g = leaf:grad():to_list(), leaf:to_list(), grad:to_list()
    local function loss(weights)
      local moved = peri.KeyedJaggedTensor { keys = keys, values = kjt:values(), lengths = kjt:lengths(),
        stride = kjt:stride(), weights = peri.tensor(weights, "f32", device, { #weights }), device = device }
      local sum = 0
      for i, x in ipairs(ebc(moved):values():to_list()) do sum = sum + x * g[i] end
      return sum
    end
    for i = 1, 3 do -- every rank moves one of its weights; the pooled rows are linear in them
      local moved = {}
      for k, x in ipairs(start) do moved[k] = x + (k == i and 0.5 or 0) end
      local up = loss(moved)
      for k, x in ipairs(start) do moved[k] = x - (k == i and 0.5 or 0) end
      local down = loss(moved)
      if got[i] then assert.near(up - down, got[i], 1e-4) end
    end
  end, { sizes = { 1, 3 } })

  it("are wanted on all ranks or on none", function()
    local _, errors = sim.run(2, function(rank, world)
      local ebc = make("row_wise", world, "cpu", 2, {})
      local kjt = peri.KeyedJaggedTensor { keys = keys, values = { 1, 2 }, lengths = { 1, 1 }, weights = { 1, 1 } }
      ebc(rank == 0 and kjt or draw(5, "cpu")):wait()
    end, { catch = true, timeout = 20 })
    for r = 1, 2 do
      local text = tostring(errors[r] and errors[r].message or errors[r])
      assert.is_truthy(text:find("the per%-sample weights of rank %d .-want a gradient, those of rank %d do"), text)
    end
  end)
end)

describe("weights of a batch", function()
  local function unsharded(weighted)
    return peri.EmbeddingBagCollection { tables = configs(), is_weighted = weighted }
  end
  it("are refused by a collection that is not weighted, sharded or not", function()
    local kjt = peri.KeyedJaggedTensor { keys = keys, values = { 1, 2 }, lengths = { 1, 1 }, weights = { 1, 1 } }
    assert.error_matches(function() unsharded(false)(kjt) end, "the batch has weights, but is_weighted is false")
    sim.run(1, function(_, world)
      local ebc = peri.shard.ShardedEmbeddingBagCollection { tables = configs(), group = world,
        fused_params = { optimizer = "sgd" }, plan = { a = plan.row_wise(), b = plan.row_wise(), c = plan.row_wise() } }
      assert.error_matches(function() ebc(kjt) end, "the input has weights, the module is not weighted")
    end)
  end)
  it("are carried by rows of ids, of quantized tables too", function()
    local kjt = peri.KeyedJaggedTensor { keys = { "f" }, values = { 1, 2, 0 }, lengths = { 1, 2 },
      weights = { 0.5, 2, 4 }, stride_per_key_per_rank = { { 2 } },
      inverse_indices = { { "f" }, peri.tensor({ { 1, 1, 0 } }, "i64") } }
    local tables = { peri.EmbeddingConfig { name = "t", num_embeddings = 3, embedding_dim = 4,
      feature_names = { "f" } } }
    local ec = peri.EmbeddingCollection { tables = tables }
    local quantized = peri.QuantEmbeddingCollection.from_float(ec)
    for _, collection in ipairs { ec, quantized } do
      local got = collection(kjt).f
      assert.same({ 2, 2, 1 }, got:lengths():to_list())
      assert.same({ 2, 4, 2, 4, 0.5 }, got:weights():to_list())
      assert.same({ 5, 4 }, got:values():shape())
    end
  end)
  it("are f32", function()
    local kjt = peri.KeyedJaggedTensor { keys = keys, values = { 1, 2 }, lengths = { 1, 1 },
      weights = peri.tensor({ 1, 1 }, "i64") }
    assert.error_matches(function() unsharded(true)(kjt) end, "weights is i64 .*allowed: f32")
    sim.run(1, function(_, world)
      assert.error_matches(function() make("row_wise", world, "cpu", 1, {})(kjt) end,
        "the weights are i64 of 1 dimensions, allowed: f32")
    end)
  end)
end)
