-- The parity law: however a collection is sharded, over however many ranks, outputs and updated weights are those of
-- the unsharded tables on the concatenated batch, here computed in doubles (spec/support/parity.lua). Batches differ
-- between ranks, and some are empty. One exception, as in TorchRec: optimizers with a number for each row (row-wise
-- states, and the norms of LAMB and LARS) have one for each column block under column-wise sharding; there the
-- reference is the table cut into blocks.
-- mpirun: 4
-- machines: 3,1
-- takes: 5 s
local peri = require "perilune"
local reference = require "spec.support.tbe_reference"
local golden = require "spec.support.golden"
local parity = require "spec.support.parity"
local worlds = require "spec.support.worlds"
local plan = peri.plan

local configs = {
  { name = "a", rows = 20, cols = 8, features = { "f1", "f2" }, pooling = "SUM" },
  { name = "b", rows = 7, cols = 16, features = { "f2" }, pooling = "MEAN" },
  { name = "c", rows = 33, cols = 4, features = { "f3" }, pooling = "SUM" },
  { name = "d", rows = 50, cols = 12, features = { "f1" }, pooling = "MEAN" },
  { name = "e", rows = 3, cols = 8, features = { "f4" }, pooling = "SUM" }, -- fewer rows than most worlds have ranks
}
local case = {
  configs = configs, features = { "f1", "f2", "f3", "f4" }, limit = { f1 = 20, f2 = 7, f3 = 33, f4 = 3 },
  keys = { "f3", "f1", "f4", "f2" }, -- another order than the tables'
}

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
  column_wise = function(_, t, n) return plan.column_wise { ranks = parity.ranks_of_blocks(t, n) } end,
  data_parallel = function() return plan.data_parallel { compute_kernel = "fused" } end,
}
--- Types that know nodes; here those of two ranks each, and the last maybe of one.
local on_nodes = { table_row_wise = true, table_column_wise = true, grid_shard = true, mixed_on_nodes = true }
local function node_of(x, n) return x % math.ceil(n / 2) end
function kinds.table_row_wise(i, t, n)
  local node = node_of(i * 3, n)
  local first, last = 2 * node, math.min(2 * node + 1, n - 1)
  if i % 3 == 0 then return plan.table_row_wise(node) end
  if i % 3 == 1 then return plan.table_row_wise(nil, { ranks = { last } }) end -- the other rank of the node has no rows
  if first == last then return plan.table_row_wise(nil, { ranks = { last }, sizes = { t.rows } }) end
  return plan.table_row_wise(nil,
    { ranks = { last, first }, sizes = { math.floor(t.rows / 3), t.rows - math.floor(t.rows / 3) } })
end
function kinds.table_column_wise(i, t, n)
  local node = node_of(i, n)
  return plan.table_column_wise(nil, { ranks = peri.util.map(parity.ranks_of_blocks(t, n), function(r)
    return math.min(2 * node + r % 2, n - 1)
  end) })
end
function kinds.grid_shard(i, t, n)
  return plan.grid_shard(peri.util.map(parity.ranks_of_blocks(t, n), function(r) return node_of(r + i, n) end))
end
function kinds.mixed(i, t, n)
  local names = { "table_wise", "row_wise", "column_wise", "data_parallel", "row_wise" }
  return kinds[names[i]](i, t, n)
end
function kinds.mixed_on_nodes(i, t, n)
  local names = { "table_row_wise", "row_wise", "grid_shard", "table_column_wise", "table_row_wise" }
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
  { kind = "rowwise_adagrad_with_counter", learning_rate = 0.2, eps = 1e-3, weight_decay = 0.1,
    weight_decay_mode = "counter", counter_based_regularization = { counter_weight_decay_mode = "l2",
      counter_halflife = 3 } },
  { kind = "rowwise_adagrad_with_counter", label = "tail", learning_rate = 0.2, eps = 1e-3,
    weight_decay_mode = "counter", counter_based_regularization = { learning_rate_mode = "tail_id_lr_decrease",
      max_counter_update_freq = 2 } },
  { kind = "rowwise_adagrad_with_counter", label = "cowclip", learning_rate = 0.2, eps = 1e-3, weight_decay = 0.1,
    weight_decay_mode = "cowclip",
    cowclip_regularization = { counter_weight_decay_mode = "decouple", weight_norm_coefficient = 0.3,
      lower_bound = 0.01 } },
}
--- Optimizers with a number (a state, a norm) for each row of a shard.
local by_row = {
  rowwise_adagrad = true, partial_rowwise_adam = true, lamb = true, partial_rowwise_lamb = true, lars_sgd = true,
  shampoo = true, -- a matrix for each block
  rowwise_rmsprop_ar = true, emainplace_rowwise_adagrad = true, rowwise_adagrad_with_counter = true,
}
--- What needs more than a shard has: optimizer's kind or label -> plan -> the error.
local shampoo = "table 'a': shampoo needs all rows of its columns on one rank: allowed are table%-wise and column%-wise"
local whole = "table 'a': emainplace_rowwise_adagrad needs whole rows"
local counter = "table 'a': max_counter, .* needs all rows on one rank: allowed are table%-wise, column%-wise and "
  .. "data%-parallel"
local refusals = {
  shampoo = { row_wise = shampoo, data_parallel = shampoo, table_row_wise = shampoo, grid_shard = shampoo },
  emainplace_rowwise_adagrad = { column_wise = whole, table_column_wise = whole, grid_shard = whole },
  tail = { row_wise = counter, table_row_wise = counter, grid_shard = counter },
}

local function make(kind, optimizer, weighted, world, device, n)
  local tables, entries, params = {}, {}, { optimizer = optimizer.kind }
  for i, t in ipairs(configs) do
    tables[i] = peri.EmbeddingBagConfig { name = t.name, num_embeddings = t.rows, embedding_dim = t.cols,
      feature_names = t.features, pooling = t.pooling }
    entries[t.name] = kinds[kind](i, t, n)
  end
  for key, value in peri.util.ordered(optimizer) do
    if key ~= "kind" and key ~= "label" then params[key] = value end
  end
  return peri.shard.ShardedEmbeddingBagCollection {
    tables = tables, plan = entries, group = world, device = device, fused_params = params, is_weighted = weighted,
    seed = 5,
  }
end

--- Backward from a result, or (@among) from it among other features, where its gradient's rows are apart.
local function backward(values, mine, device, columns, among)
  local grad = peri.tensor(mine.grad, "f32", device, { mine.size, columns })
  if not among then return values:backward(grad) end
  local rest = peri.zeros({ mine.size, 4 }, "f32", device):requires_grad()
  local g = peri.nn.functional.cat({ rest, grad }, 2):detach()
  peri.nn.functional.cat({ rest, values:reshape(mine.size, columns / 4, 4):reshape(mine.size, columns) }, 2):backward(g)
end

--- The weights of all tables of a reference, as parity.check_shards takes them.
local function weights_of(ref)
  return { tables = peri.util.map(ref.tables, function(t) return { cols = t.cols, weight = { unpack(t.weight) } } end) }
end

--- What the unsharded tables do in three steps. It does not depend on the rank, the device and most of the plan, and is
--- computed once for all that have the same `key`.
local computed = {}
local function expected(optimizer, weighted, n, split)
  local key = ("%s %s %s %d %s"):format(optimizer.kind, optimizer.label or "", weighted, n, split)
  if computed[key] then return computed[key] end
  local columns = parity.columns_of(case)
  local parts = parity.reference_tables(case, parity.start_weights(case), n, split)
  local ref, out = reference.new(parts, optimizer), { parts = parts }
  out[0] = weights_of(ref)
  for step = 1, 3 do
    local ranks, grad = parity.draw(case, step, n, columns, weighted and 1 or 0), {}
    local input, rows = parity.stream(case, ranks, parts, columns, weighted)
    local results = ref:forward(input, rows * columns)
    for r = 1, n do
      for _, g in ipairs(ranks[r].grad) do grad[#grad + 1] = g / n end
    end
    ref:backward(input, grad)
    out[step] = weights_of(ref)
    out[step].ranks, out[step].results = ranks, results
  end
  computed[key] = out
  return out
end

local function run(kind, optimizer, weighted, among, world, device, n)
  local rank, columns = world:rank(), parity.columns_of(case)
  local ebc = make(kind, optimizer, weighted, world, device, n)
  local split = (kind:find "column" or kind == "grid_shard") and by_row[optimizer.kind] or false
  local want = expected(optimizer, weighted, n, split)
  parity.check_shards(case, ebc, want[0], want.parts, split, 0)
  for step = 1, 3 do
    local ranks = want[step].ranks
    local mine, before, own = ranks[rank + 1], 0, {}
    for r = 1, rank do before = before + ranks[r].size * columns end
    for i = 1, mine.size * columns do own[i] = want[step].results[before + i] end
    local kt = ebc:forward(parity.kjt_of(case, mine, weighted, device))
    golden.assert_near(own, kt:values():to_list(), { abs = 2e-6, rel = 2e-5 }, ("step %d, output"):format(step))
    backward(kt:values(), mine, device, columns, among)
    parity.check_shards(case, ebc, want[step], want.parts, split, step)
  end
end

describe("parity with unsharded tables:", function()
  for _, kind in ipairs { "table_wise", "row_wise", "column_wise", "data_parallel", "mixed", "table_row_wise",
    "table_column_wise", "grid_shard", "mixed_on_nodes" } do
    local options = on_nodes[kind] and { local_size = 2 } or nil
    for i, optimizer in ipairs(optimizers) do
      local weighted = (i + #kind) % 2 == 0
      local name = optimizer.label and optimizer.kind .. ", " .. optimizer.label or optimizer.kind
      local title = ("%s, %s%s"):format(kind, name, weighted and ", weighted" or "")
      local refusal = (refusals[optimizer.label or optimizer.kind] or {})[kind]
      if refusal then
        worlds.each(title .. " is refused", function(world, device, n)
          assert.error_matches(function() make(kind, optimizer, weighted, world, device, n) end, refusal)
        end, options)
      elseif not kind:find "mixed" or not by_row[optimizer.kind] then -- a mix has both kinds of state
        local among = i % 4 < 2 -- with weights, and without
        worlds.each(title, function(world, device, n) run(kind, optimizer, weighted, among, world, device, n) end,
          options)
      end
    end
  end
end)

worlds.each("shards take over states without rows", function(world, device, n)
  local tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = 40, embedding_dim = 8,
    feature_names = { "f1" } } }
  local counts = { learning_rate_mode = "tail_id_lr_increase", max_counter_update_freq = 1 }
  for _, params in ipairs { { optimizer = "shampoo" },
    { optimizer = "rowwise_adagrad", weight_decay_mode = "counter", counter_based_regularization = counts } } do
    local source = peri.EmbeddingBagCollection { tables = tables, fused_params = params, seed = 3, device = device }
    local kjt = peri.KeyedJaggedTensor { keys = { "f1" }, values = { 1, 2, 39 }, lengths = { 3 }, device = device }
    for _ = 1, 3 do
      local values = source(kjt):values()
      values:backward(peri.Tensor.uniform({ 1, 8 }, -1, 1, 3, 0, "f32", device))
    end
    local target = peri.shard.ShardedEmbeddingBagCollection { tables = tables, group = world, device = device,
      fused_params = params, plan = { t = plan.column_wise { ranks = { 0, n - 1 } } } }
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
