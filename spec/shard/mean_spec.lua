-- Mean pooling and clipping, under every sharding type. A bag's mean is made where its rows are, rows travel as rows;
-- the gradient of a bag is divided by the ranks, clipped, and multiplied by the mean's factor and the ids' weights: in
-- this order, on any number of ranks. The oracle is the unsharded collection on the batch of all ranks; with exact sums
-- of gradients its weights have the same bits.
local peri = require "perilune"
local golden = require "spec.support.golden"
local worlds = require "spec.support.worlds"
local plan, codec = peri.plan, peri.dist.codec

local ROWS, COLS = 21, 8
local tables = { sum = "SUM", mean = "MEAN" }
local names = { "sum", "mean" } -- both look up feature "f"; "mean" also "g"

--- Sharding of a table over n ranks.
local kinds = {
  table_wise = function(n) return plan.table_wise(n - 1) end,
  row_wise = function() return plan.row_wise() end,
  column_wise = function(n) return plan.column_wise { ranks = { 0, n - 1 } } end,
  data_parallel = function() return plan.data_parallel { compute_kernel = "fused" } end,
  grid_shard = function() return plan.grid_shard() end,
}
local all_kinds, on_nodes = peri.util.keys(kinds), { sizes = { 1, 2, 3, 5, 8 }, local_size = 2 }

local function configs()
  return peri.util.map(names, function(name)
    return peri.EmbeddingBagConfig { name = name, num_embeddings = ROWS, embedding_dim = COLS, pooling = tables[name],
      feature_names = name == "mean" and { "f", "g" } or { "f" } }
  end)
end
local WIDTH = 3 * COLS

local function generator(seed)
  local x = seed
  return function(n)
    x = x * 16807 % 2147483647
    return x % n
  end
end

--- The batches of all ranks at a step: { size, ids = { f = bags, g = bags }, weights likewise, grad = list }; some ids
--- are pruned (-1).
local function draw(step, n)
  local below, ranks = generator(31 * step + 7 * n), {}
  for r = 1, n do
    local b = { size = (r + step) % 3, ids = { f = {}, g = {} }, weights = { f = {}, g = {} }, grad = {} }
    for _, key in ipairs { "f", "g" } do
      for s = 1, b.size do
        b.ids[key][s], b.weights[key][s] = {}, {}
        for i = 1, below(6) do
          b.ids[key][s][i] = below(9) == 0 and -1 or below(ROWS)
          b.weights[key][s][i] = (below(41) - 10) / 16
        end
      end
    end
    for i = 1, b.size * WIDTH do b.grad[i] = n * (below(129) - 64) / 64 end -- of which the clip leaves some
    ranks[r] = b
  end
  return ranks
end

local function kjt_of(batches, weighted, device)
  local values, weights, lengths, size = {}, {}, {}, 0
  for _, key in ipairs { "f", "g" } do
    for _, b in ipairs(batches) do
      for s = 1, b.size do
        lengths[#lengths + 1] = #b.ids[key][s]
        for i, id in ipairs(b.ids[key][s]) do
          values[#values + 1] = id
          weights[#weights + 1] = b.weights[key][s][i]
        end
      end
    end
  end
  for _, b in ipairs(batches) do size = size + b.size end
  return peri.KeyedJaggedTensor { keys = { "f", "g" }, values = values, lengths = lengths, weights = weighted
    and weights or nil, stride = size, device = device }
end

local function run(kind, clipped, weighted, world, device, n)
  local params = { optimizer = "sgd", learning_rate = 1, exact = true, gradient_clipping = clipped, max_gradient = 0.3 }
  local whole = peri.EmbeddingBagCollection { tables = configs(), fused_params = params, seed = 3,
    is_weighted = weighted, device = device }
  local ebc = peri.shard.ShardedEmbeddingBagCollection { tables = configs(), fused_params = params, seed = 3,
    is_weighted = weighted, device = device, group = world, plan = { sum = kinds[kind](n), mean = kinds[kind](n) } }
  for step = 1, 3 do
    local ranks, all, own, first = draw(step, n), {}, {}, 0
    local mine = ranks[world:rank() + 1]
    for r = 1, n do
      for _, g in ipairs(ranks[r].grad) do all[#all + 1] = g / n end
      if r <= world:rank() then first = first + ranks[r].size end
    end
    local want = whole(kjt_of(ranks, weighted, device)):values()
    local list = want:to_list()
    for i = 1, mine.size * WIDTH do own[i] = list[first * WIDTH + i] end
    local got = ebc(kjt_of({ mine }, weighted, device)):values()
    local summed = kind == "row_wise" or kind == "data_parallel" or kind == "grid_shard"
    if summed then golden.assert_near(own, got:to_list(), { abs = 1e-6, rel = 1e-6 }, "output")
    else assert.same(own, got:to_list()) end
    want:backward(peri.tensor(all, "f32", device, { #list / WIDTH, WIDTH }))
    got:backward(peri.tensor(mine.grad, "f32", device, { mine.size, WIDTH }))
    for _, s in ipairs(ebc:local_shards()) do
      local part = whole:weight(s.table):slice(1, s.row_offset, s.row_offset + s.rows):slice(2, s.col_offset,
        s.col_offset + s.cols)
      if kind == "data_parallel" then -- sums over ranks are f32
        golden.assert_near(part:to_list(), s.state("weight"):to_list(), { abs = 2e-6, rel = 1e-6 }, s.table)
      else
        assert.same(part:to_list(), s.state("weight"):to_list())
      end
    end
  end
end

describe("sums and means:", function()
  for _, kind in ipairs(all_kinds) do
    for _, clipped in ipairs { false, true } do
      for _, weighted in ipairs { false, true } do
        worlds.each(("%s%s%s"):format(kind, clipped and ", clipped" or "", weighted and ", weighted" or ""),
          function(world, device, n)
          run(kind, clipped, weighted, world, device, n)
        end, on_nodes)
      end
    end
  end
end)

--- A table "t" of `rows` rows of `value`, cut as `kind` says; pooling MEAN.
local function constant(kind, rows, value, world, device, n, options)
  return peri.shard.ShardedEmbeddingBagCollection {
    tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = rows, embedding_dim = 8, feature_names = { "f" },
      pooling = "MEAN", init_fn = peri.embed.constant(value) } },
    plan = { t = kinds[kind](n) }, group = world, device = device, gradient_division = false,
    fused_params = options.params or { optimizer = "sgd", learning_rate = 1 }, qcomm_codecs_registry = options.codecs,
  }
end

--- `count` ids all over the table.
local function bag(count, rows, device)
  local ids = {}
  for i = 1, count do ids[i] = (i * 7) % rows end
  return peri.KeyedJaggedTensor { keys = { "f" }, values = ids, lengths = { count }, device = device }
end

describe("a mean", function()
  for _, kind in ipairs(all_kinds) do
    worlds.each("is clipped before it is divided by the length, " .. kind, function(world, device, n)
      local ebc = constant(kind, 3, 0, world, device, n,
        { params = { optimizer = "sgd", learning_rate = 1, gradient_clipping = true, max_gradient = 0.3 } })
      local out = ebc(bag(world:rank() == 0 and 3 or 0, 3, device)):values()
      -- replicas are means over ranks
      out:backward(peri.full({ 1, 8 }, kind == "data_parallel" and 0.6 * n or 0.6, "f32", device))
      for _, s in ipairs(ebc:local_shards()) do
        for _, x in ipairs(s.state("weight"):to_list()) do assert.near(-0.1, x, 1e-7) end
      end
    end, { sizes = { 1, 2, 5 }, local_size = 2 })

    worlds.each("travels in 16 bits at the size of a row, " .. kind, function(world, device, n)
      local codecs = codec.get_qcomm_codecs_registry { forward = "FP16", backward = "FP16" }
      local ebc = constant(kind, 4000, 50, world, device, n, { codecs = codecs })
      local out = ebc(bag(2000, 4000, device)):values() -- whose sum is 100,000: no number of 16 bits
      for _, x in ipairs(out:to_list()) do assert.near(50, x, 50 * n * 2 ^ -11) end
    end, { sizes = { 1, 2, 5 }, local_size = 2 })

    worlds.each("keeps its gradient's bits, " .. kind, function(world, device, n)
      local codecs = codec.get_qcomm_codecs_registry { forward = "FP16", backward = "FP16" }
      local ebc = constant(kind, 200, 0, world, device, n, { codecs = codecs })
      local g = 2 ^ -20 * 1.625 -- a number of FP16; a 200th of it has one bit left there
      local out = ebc(bag(world:rank() == 0 and 200 or 0, 200, device)):values()
      out:backward(peri.full({ 1, 8 }, kind == "data_parallel" and g * n or g, "f32", device))
      for _, s in ipairs(ebc:local_shards()) do
        for _, x in ipairs(s.state("weight"):to_list()) do assert.near(-g / 200, x, g / 200 * 1e-6) end
      end
    end, { sizes = { 1, 2, 5 }, local_size = 2 })
  end
end)
