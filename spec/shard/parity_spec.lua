-- The parity law: however a collection is sharded, over however many ranks, outputs and updated weights are those of the unsharded tables
-- on the concatenated batch, here computed in doubles by spec/support/tbe_reference.lua. Batches differ between ranks, and some are empty.
-- One exception, as in TorchRec: optimizers with a number for each row (row-wise states, and the norms of LAMB and LARS) have one for each
-- column block under column-wise sharding; there the reference is the table cut into blocks.
local peri = require "perilune"
local reference = require "spec.support.tbe_reference"
local golden = require "spec.support.golden"
local worlds = require "spec.support.worlds"
local plan = peri.plan

local configs = {
  { name = "a", rows = 20, cols = 8, features = { "f1", "f2" }, pooling = "SUM" },
  { name = "b", rows = 7, cols = 16, features = { "f2" }, pooling = "MEAN" },
  { name = "c", rows = 33, cols = 4, features = { "f3" }, pooling = "SUM" },
  { name = "d", rows = 50, cols = 12, features = { "f1" }, pooling = "MEAN" },
  { name = "e", rows = 3, cols = 8, features = { "f4" }, pooling = "SUM" }, -- fewer rows than most worlds have ranks
}
local features = { "f1", "f2", "f3", "f4" }
local limit = { f1 = 20, f2 = 7, f3 = 33, f4 = 3 } -- ids that all tables of the feature have

--- Ranks of column blocks: as many blocks of 4 columns or more as there are ranks, round robin.
local function ranks_of_blocks(t, n)
  local count, ranks = 1, {}
  for k = 1, t.cols / 4 do
    if t.cols % k == 0 and t.cols / k % 4 == 0 and k <= n + 1 then count = k end
  end
  for k = 1, count do ranks[k] = (k * 2 + t.rows) % n end
  return ranks
end

--- Sharding of table i over n ranks.
local kinds = {
  table_wise = function(i, _, n) return plan.table_wise((i * 3) % n) end,
  row_wise = function(i, t, n)
    if i % 2 == 0 then return plan.row_wise() end
    local ranks, sizes, left = {}, {}, t.rows -- backwards, and cut unevenly
    for r = n - 1, 0, -1 do
      ranks[#ranks + 1] = r
      sizes[#sizes + 1] = r == 0 and left or math.floor(left / 3)
      left = left - sizes[#sizes]
    end
    return plan.row_wise { ranks = ranks, sizes = sizes }
  end,
  column_wise = function(_, t, n) return plan.column_wise { ranks = ranks_of_blocks(t, n) } end,
  data_parallel = function() return plan.data_parallel { compute_kernel = "fused" } end,
}
function kinds.mixed(i, t, n)
  local names = { "table_wise", "row_wise", "column_wise", "data_parallel", "row_wise" }
  return kinds[names[i]](i, t, n)
end

local optimizers = {
  { kind = "sgd", learning_rate = 0.3 },
  { kind = "adagrad", learning_rate = 0.2, eps = 1e-3 },
  { kind = "rowwise_adagrad", learning_rate = 0.2, eps = 1e-3, weight_decay = 0.01, weight_decay_mode = "l2" },
  { kind = "adam", learning_rate = 0.05, eps = 1e-3, beta1 = 0.8, beta2 = 0.9, weight_decay = 0.02 },
  { kind = "partial_rowwise_adam", learning_rate = 0.05, eps = 1e-3, beta1 = 0.8, beta2 = 0.9 },
  { kind = "lamb", learning_rate = 0.05, eps = 1e-3, beta1 = 0.8, beta2 = 0.9, weight_decay = 0.02 },
  { kind = "partial_rowwise_lamb", learning_rate = 0.05, eps = 1e-3, beta1 = 0.8, beta2 = 0.9, max_norm = 0.4 },
  { kind = "lars_sgd", learning_rate = 0.3, eta = 0.2, momentum = 0.8, weight_decay = 0.02 },
  { kind = "shampoo", learning_rate = 0.05, eps = 0.5 },
  { kind = "lion", learning_rate = 0.05, beta1 = 0.8, beta2 = 0.9, weight_decay = 0.02 },
  { kind = "rowwise_rmsprop_ar", learning_rate = 0.05, eps = 1e-3, ar_alpha = 2 },
  { kind = "emainplace_rowwise_adagrad", learning_rate = 0.2, eps = 1e-3, emainplace_mode = { step_ema = 2 } },
  { kind = "rowwise_adagrad_with_counter", learning_rate = 0.2, eps = 1e-3, weight_decay = 0.1, weight_decay_mode = "counter",
    counter_based_regularization = { counter_weight_decay_mode = "l2", counter_halflife = 3 } },
  { kind = "rowwise_adagrad_with_counter", label = "tail", learning_rate = 0.2, eps = 1e-3, weight_decay_mode = "counter",
    counter_based_regularization = { learning_rate_mode = "tail_id_lr_decrease", max_counter_update_freq = 2 } },
  { kind = "rowwise_adagrad_with_counter", label = "cowclip", learning_rate = 0.2, eps = 1e-3, weight_decay = 0.1,
    weight_decay_mode = "cowclip",
    cowclip_regularization = { counter_weight_decay_mode = "decouple", weight_norm_coefficient = 0.3, lower_bound = 0.01 } },
}
--- Optimizers with a number (a state, a norm) for each row of a shard.
local by_row = {
  rowwise_adagrad = true, partial_rowwise_adam = true, lamb = true, partial_rowwise_lamb = true, lars_sgd = true,
  shampoo = true, -- a matrix for each block
  rowwise_rmsprop_ar = true, emainplace_rowwise_adagrad = true, rowwise_adagrad_with_counter = true,
}
--- What needs more than a shard has: optimizer's kind or label -> plan -> the error.
local shampoo = "table 'a': shampoo needs all rows of its columns on one rank: allowed are table%-wise and column%-wise"
local refusals = {
  shampoo = { row_wise = shampoo, data_parallel = shampoo },
  emainplace_rowwise_adagrad = { column_wise = "table 'a': emainplace_rowwise_adagrad needs whole rows" },
  tail = { row_wise = "table 'a': max_counter, .* needs all rows on one rank: allowed are table%-wise, column%-wise and data%-parallel" },
}

--- A generator of whole numbers below n, the same on every rank.
local function generator(seed)
  local x = seed
  return function(n)
    x = (x * 16807) % 2147483647
    return x % n
  end
end

--- The batches of all ranks for one step: by rank, { size, ids by feature = list of bags, weights likewise, grad by output row }.
local function draw(step, n, columns, seed)
  local below, ranks = generator(1000 * step + 17 * n + seed), {}
  for r = 1, n do
    local batch = { size = (r * 2 + step) % 4, ids = {}, weights = {}, grad = {} }
    for _, f in ipairs(features) do
      batch.ids[f], batch.weights[f] = {}, {}
      for b = 1, batch.size do
        local ids, weights = {}, {}
        for i = 1, below(5) do
          ids[i] = below(11) == 0 and -1 or below(limit[f])
          weights[i] = (below(200) - 50) / 100
        end
        batch.ids[f][b], batch.weights[f][b] = ids, weights
      end
    end
    for i = 1, batch.size * columns do batch.grad[i] = (below(2000) - 1000) / 500 end
    ranks[r] = batch
  end
  return ranks
end

local function columns_of()
  local n = 0
  for _, t in ipairs(configs) do n = n + t.cols * #t.features end
  return n
end

--- Reference tables: each table, or each of its column blocks.
local function reference_tables(weights, n, split)
  local list = {}
  for i, t in ipairs(configs) do
    local count = split and #ranks_of_blocks(t, n) or 1
    local cols = t.cols / count
    for k = 0, count - 1 do
      local w = {}
      for row = 0, t.rows - 1 do
        for c = 1, cols do w[#w + 1] = weights[t.name][row * t.cols + k * cols + c] end
      end
      list[#list + 1] = { rows = t.rows, cols = cols, weight = w, pooling = t.pooling, config = i, column = k * cols }
    end
  end
  return list
end

--- The global batch as one stream for tbe_reference: ids by feature, all ranks' bags after each other; output [all rows, columns].
local function stream(ranks, tables, columns, weighted)
  local input = { ids = {}, offsets = { 0 }, weights = weighted and {} or nil, blocks = {} }
  local first, rows = {}, 0
  for _, batch in ipairs(ranks) do rows = rows + batch.size end
  for _, f in ipairs(features) do
    first[f] = #input.offsets - 1
    for _, batch in ipairs(ranks) do
      for b = 1, batch.size do
        for i, id in ipairs(batch.ids[f][b]) do
          input.ids[#input.ids + 1] = id
          if weighted then input.weights[#input.weights + 1] = batch.weights[f][b][i] end
        end
        input.offsets[#input.offsets + 1] = #input.ids
      end
    end
  end
  local column = 0
  for i, t in ipairs(configs) do
    for _, f in ipairs(t.features) do
      for k, x in ipairs(tables) do
        if x.config == i then
          input.blocks[#input.blocks + 1] = { table = k, first_bag = first[f], bags = rows, out_offset = column + x.column,
            out_stride = columns }
        end
      end
      column = column + t.cols
    end
  end
  return input, rows
end

local function kjt_of(batch, weighted, device)
  local values, weights, lengths = {}, {}, {}
  local keys = { "f3", "f1", "f4", "f2" } -- another order than the tables'
  for _, f in ipairs(keys) do
    for b = 1, batch.size do
      lengths[#lengths + 1] = #batch.ids[f][b]
      for i, id in ipairs(batch.ids[f][b]) do
        values[#values + 1] = id
        weights[#weights + 1] = batch.weights[f][b][i]
      end
    end
  end
  return peri.KeyedJaggedTensor {
    keys = keys, values = values, lengths = lengths, weights = weighted and weights or nil, stride = batch.size, device = device,
  }
end

--- Start values do not depend on the plan: they are those of a table batch that holds the whole tables.
local function start_weights()
  local tables, weights = {}, {}
  for i, t in ipairs(configs) do tables[i] = { name = t.name, rows = t.rows, cols = t.cols } end
  local tbe = peri.embed.tbe.new { tables = tables, fused_params = { optimizer = "none" }, seed = 5, device = "cpu" }
  for i, t in ipairs(configs) do weights[t.name] = tbe:state(i, "weight"):to_list() end
  return weights
end

local function make(kind, optimizer, weighted, world, device, n)
  local tables, entries, params = {}, {}, { optimizer = optimizer.kind }
  for i, t in ipairs(configs) do
    tables[i] = peri.EmbeddingBagConfig { name = t.name, num_embeddings = t.rows, embedding_dim = t.cols, feature_names = t.features,
      pooling = t.pooling }
    entries[t.name] = kinds[kind](i, t, n)
  end
  for key, value in peri.util.ordered(optimizer) do
    if key ~= "kind" and key ~= "label" then params[key] = value end
  end
  return peri.shard.ShardedEmbeddingBagCollection {
    tables = tables, plan = entries, group = world, device = device, fused_params = params, is_weighted = weighted, seed = 5,
  }
end

--- Compare this rank's shards with the reference tables `parts`, whose weights are in `ref`.
local function check_shards(ebc, ref, parts, split, step)
  for _, s in ipairs(ebc:local_shards()) do
    local x, list
    for k, p in ipairs(parts) do
      if configs[p.config].name == s.table and (not split or p.column == s.col_offset) then x = ref.tables[k] end
    end
    list = {}
    for row = s.row_offset, s.row_offset + s.rows - 1 do
      for c = 1, s.cols do list[#list + 1] = x.weight[row * x.cols + (split and 0 or s.col_offset) + c] end
    end
    golden.assert_near(list, s.state("weight"):to_list(), { abs = 5e-6, rel = 5e-5 }, ("step %d, table %s"):format(step, s.table))
  end
end

local function run(kind, optimizer, weighted, world, device, n)
  local rank, columns = world:rank(), columns_of()
  local ebc = make(kind, optimizer, weighted, world, device, n)
  local split = kind == "column_wise" and by_row[optimizer.kind] or false
  local parts = reference_tables(start_weights(), n, split)
  local ref = reference.new(parts, optimizer)
  check_shards(ebc, ref, parts, split, 0)
  for step = 1, 3 do
    local ranks = draw(step, n, columns, weighted and 1 or 0)
    local mine = ranks[rank + 1]
    local input, rows = stream(ranks, parts, columns, weighted)
    local want, before, grad, own = ref:forward(input, rows * columns), 0, {}, {}
    for r = 1, rank do before = before + ranks[r].size * columns end
    for i = 1, mine.size * columns do own[i] = want[before + i] end
    local kt = ebc:forward(kjt_of(mine, weighted, device))
    golden.assert_near(own, kt:values():to_list(), { abs = 2e-6, rel = 2e-5 }, ("step %d, output"):format(step))
    kt:values():backward(peri.tensor(mine.grad, "f32", device, { mine.size, columns }))
    for r = 1, n do
      for _, g in ipairs(ranks[r].grad) do grad[#grad + 1] = g / n end
    end
    ref:backward(input, grad)
    check_shards(ebc, ref, parts, split, step)
  end
end

describe("parity with unsharded tables:", function()
  for _, kind in ipairs { "table_wise", "row_wise", "column_wise", "data_parallel", "mixed" } do
    for i, optimizer in ipairs(optimizers) do
      local weighted = (i + #kind) % 2 == 0
      local name = optimizer.label and optimizer.kind .. ", " .. optimizer.label or optimizer.kind
      local title = ("%s, %s%s"):format(kind, name, weighted and ", weighted" or "")
      local refusal = (refusals[optimizer.label or optimizer.kind] or {})[kind]
      if refusal then
        worlds.each(title .. " is refused", function(world, device, n)
          assert.error_matches(function() make(kind, optimizer, weighted, world, device, n) end, refusal)
        end)
      elseif kind ~= "mixed" or not by_row[optimizer.kind] then -- a mix has both kinds of state
        worlds.each(title, function(world, device, n) run(kind, optimizer, weighted, world, device, n) end)
      end
    end
  end
end)

worlds.each("shards take over states without rows", function(world, device, n)
  local tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = 40, embedding_dim = 8, feature_names = { "f1" } } }
  local counts = { learning_rate_mode = "tail_id_lr_increase", max_counter_update_freq = 1 }
  for _, params in ipairs { { optimizer = "shampoo" },
    { optimizer = "rowwise_adagrad", weight_decay_mode = "counter", counter_based_regularization = counts } } do
    local source = peri.EmbeddingBagCollection { tables = tables, fused_params = params, seed = 3, device = device }
    local kjt = peri.KeyedJaggedTensor { keys = { "f1" }, values = { 1, 2, 39 }, lengths = { 3 }, device = device }
    for _ = 1, 3 do
      local values = source(kjt):values()
      values:backward(peri.Tensor.uniform({ 1, 8 }, -1, 1, 3, 0, "f32", device))
    end
    local target = peri.shard.ShardedEmbeddingBagCollection { tables = tables, group = world, device = device, fused_params = params,
      plan = { t = plan.column_wise { ranks = { 0, n - 1 } } } }
    target:copy_from(source)
    for _, s in ipairs(target:local_shards()) do
      local seen = 0
      for _, name in ipairs { "preconditioner", "max_counter" } do
        if peri.util.index_of(s.names())[name] then
          local want = source:table_state("t", name)
          if name == "preconditioner" then
            want = want:slice(1, s.col_offset, s.col_offset + 4):slice(2, s.col_offset, s.col_offset + 4)
          else
            assert.same({ 3 }, want:to_list()) -- two updates before the last
          end
          assert.same(want:to_list(), s.state(name):to_list())
          seen = seen + 1
        end
      end
      assert.equal(1, seen)
    end
  end
end, { sizes = { 1, 2 } })
