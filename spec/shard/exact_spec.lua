-- Exact sums (fused_params.exact) over ranks: the same batch, shared among any number of ranks under any plan, gives
-- the unsharded collection's outputs, gradients of the ids' weights, weights and optimizer states, to the last bit.
-- mpirun: 3
local peri = require "perilune"
local worlds = require "spec.support.worlds"
local codec = peri.dist.codec
local plan = peri.plan

local SAMPLES, STEPS, BAGS = 13, 2, 6
local FEATURES = { "f", "g", "h" }
local configs = {
  { name = "a", rows = 7, cols = 8, features = { "f", "g" }, pooling = "SUM" }, -- few rows: each is in many bags
  { name = "b", rows = 5, cols = 16, features = { "g" }, pooling = "MEAN" },
  -- g's weights have three gradients to be added up
  { name = "c", rows = 9, cols = 24, features = { "h", "g" }, pooling = "MEAN" },
}

--- By kind: the plan entry of the i-th table on n ranks, two of which share a node (the last may be alone).
local entries = {
  table_wise = function(i, n) return plan.table_wise(i % n) end,
  row_wise = function() return plan.row_wise() end,
  uneven_rows = function(i, n)
    local t, ranks, sizes = configs[i], {}, {}
    for r = 1, n do ranks[r], sizes[r] = n - r, r == 1 and 3 or 0 end -- some ranks have no rows
    sizes[n] = sizes[n] + t.rows - 3
    return plan.row_wise { ranks = ranks, sizes = sizes }
  end,
  column_wise = function(i, n) return plan.column_wise { ranks = { i % n, (i + 1) % n } } end,
  table_row_wise = function(i, n) return plan.table_row_wise(i % math.ceil(n / 2)) end,
  table_column_wise = function(i, n)
    local node = i % math.ceil(n / 2)
    return plan.table_column_wise(nil, { ranks = { 2 * node, math.min(2 * node + 1, n - 1) } })
  end,
  grid_shard = function(i, n)
    local nodes = math.ceil(n / 2)
    return plan.grid_shard { i % nodes, (i + 1) % nodes }
  end,
  data_parallel = function() return plan.data_parallel() end,
}
function entries.mixed(i, n) return entries[({ "data_parallel", "row_wise", "grid_shard" })[i]](i, n) end
local all = { "table_wise", "row_wise", "uneven_rows", "column_wise", "table_row_wise", "table_column_wise",
  "grid_shard", "data_parallel", "mixed" }
-- no blocks of columns
local whole_rows = { "table_wise", "row_wise", "uneven_rows", "table_row_wise", "data_parallel" }
local replicas = { data_parallel = true, mixed = true } -- whose gradients are means in any case

local function generator(seed)
  local x = seed
  return function(n)
    x = x * 16807 % 2147483647
    return x % n
  end
end

--- The bags of a step: by feature and bag its ids and weights, and by sample its bag (with a variable batch another
--- one).
local function draw(step, variable)
  local below, bags, inverse = generator(step * 977), {}, {}
  for k, f in ipairs(FEATURES) do
    bags[f], inverse[f] = {}, {}
    for b = 1, variable and BAGS + k or SAMPLES do
      bags[f][b] = { ids = {}, weights = {} }
      for i = 1, below(5) do bags[f][b].ids[i], bags[f][b].weights[i] = below(6) - 1, below(1000) / 700 - 0.3 end
    end
    for s = 1, SAMPLES do inverse[f][s] = variable and below(#bags[f]) + 1 or s end
  end
  return bags, inverse
end

--- Samples [from, to) of a step as a batch, whose bags are in the order of the whole one's. Returns it, its weights,
--- and by feature which bags it has.
local function batch(c, step, from, to, device)
  local bags, inverse = draw(step, c.variable)
  local values, lengths, weights, strides, places, taken = {}, {}, {}, {}, {}, {}
  for k, f in ipairs(FEATURES) do
    local used, place, n = {}, {}, 0
    for s = from, to - 1 do used[inverse[f][s + 1]] = true end
    taken[k] = {}
    for b, bag in ipairs(bags[f]) do
      if used[b] then
        n = n + 1
        place[b], taken[k][n] = n - 1, b
        lengths[#lengths + 1] = #bag.ids
        for i, id in ipairs(bag.ids) do values[#values + 1], weights[#weights + 1] = id, bag.weights[i] end
      end
    end
    strides[k], places[k] = { n }, {}
    for s = from, to - 1 do places[k][s - from + 1] = place[inverse[f][s + 1]] end
  end
  local leaf = c.weighted and peri.tensor(weights, "f32", device, { #weights }) or nil
  if leaf and not c.frozen then leaf:requires_grad() end
  return peri.KeyedJaggedTensor { keys = FEATURES, values = peri.tensor(values, "i64", device, { #values }),
    lengths = peri.tensor(lengths, "i32", device, { #lengths }), weights = leaf, stride = not c.variable and to - from
    or nil, stride_per_key_per_rank = c.variable and strides or nil,
    inverse_indices = c.variable and { FEATURES, peri.tensor(places, "i64", device) } or nil }, leaf, taken
end

local function tables_of(c)
  return peri.util.map(configs, function(t)
    return (c.sequence and peri.EmbeddingConfig or peri.EmbeddingBagConfig) { name = t.name, num_embeddings = t.rows,
      embedding_dim = c.sequence and 16 or t.cols, feature_names = t.features, pooling = not c.sequence and t.pooling
      or nil, data_type = c.data_type }
  end)
end

local function params_of(c, exact)
  return { optimizer = c.optimizer, learning_rate = c.rate or 0.1, exact = exact, cache_params = c.kernel
    and { load_factor = 1 } or nil }
end

--- Gradients of the whole batch's rows, divided as f32.
local function gradient(step, what, shape, divisor, device)
  local grad = peri.Tensor.uniform(shape, -1, 1, 31 * step + what, 0, "f32", device)
  return divisor > 1 and grad / peri.tensor({ divisor }, "f32", device) or grad
end

--- One step of `module` on samples [from, to): rows by output, and the weights' gradients by feature and bag. grad_of:
--- output and its rows' shape to the rows' gradient.
local function train(c, module, step, from, to, device, grad_of)
  local features, leaf, taken = batch(c, step, from, to, device)
  if not c.sequence then
    local values = module:forward(features):values()
    local result = { values:to_list() }
    values:backward(grad_of(1, values:shape(), taken))
    return result, leaf and not c.frozen and leaf:grad():to_list() or nil, taken
  end
  local result, out, loss = module:forward(features), {}, nil
  for i, name in ipairs(module:embedding_names()) do
    local values = result[name]:values()
    out[i] = values:to_list()
    local term = (values * grad_of(i, values:shape(), taken)):sum()
    loss = loss and loss + term or term
  end
  loss:backward()
  return out, nil, taken
end

--- By bag of the whole batch the numbers of it in a list of `width` numbers an id, where bags lie as `taken` says.
local function by_bag(c, step, list, taken, width, features)
  local bags, at, result = draw(step, c.variable), 0, {}
  for k, f in ipairs(FEATURES) do
    for _, b in ipairs(features[f] and taken[k] or {}) do
      local part = {}
      for i = 1, #bags[f][b].ids * width do part[i] = list[at + i] end
      at, result[f .. b] = at + #part, part
    end
  end
  assert.equal(#list, at)
  return result
end

--- Rows [from, to) of a flat list of rows.
local function rows(list, from, to, width)
  local result = {}
  for i = from * width + 1, to * width do result[#result + 1] = list[i] end
  return result
end

local all_features = { f = true, g = true, h = true }

--- Train without ranks; returns the collection, and by step what `train` returned, with rows and gradients by bag.
local function unsharded(c, device, divisor)
  local whole = peri[c.sequence and "EmbeddingCollection" or "EmbeddingBagCollection"] { tables = tables_of(c),
    seed = 5, device = device, fused_params = params_of({ optimizer = c.optimizer, rate = c.rate }, true),
    is_weighted = c.weighted or nil }
  local steps = {}
  for step = 1, STEPS do
    local out, weights, taken = train(c, whole, step, 0, SAMPLES, device,
      function(what, shape) return gradient(step, what, shape, divisor, device) end)
    steps[step] = { out = out, weights = weights and by_bag(c, step, weights, taken, 1, all_features), taken = taken }
  end
  return whole, steps
end

--- Train on this rank's share; same(want, got, what) is told what ought to be equal.
local function share(c, world, device, n, exact, same)
  local rank, plans, divisor = world:rank(), {}, replicas[c.kind] and n or 1
  local whole, steps = unsharded(c, device, divisor)
  for i, t in ipairs(configs) do
    plans[t.name] = entries[c.kind](i, n)
    if c.kernel and not plans[t.name].sharding_type:find "data" then plans[t.name].compute_kernel = c.kernel end
    if c.dense and i ~= 2 then plans[t.name].compute_kernel = "dense" end
  end
  local module = peri.shard[c.sequence and "ShardedEmbeddingCollection"
    or "ShardedEmbeddingBagCollection"] { tables = tables_of(c), plan = plans, group = world, device = device, seed = 5,
    fused_params = params_of(c, exact), is_weighted = c.weighted or nil, gradient_division = divisor > 1,
    qcomm_codecs_registry = c.codecs }
  local from, to = math.floor(SAMPLES * rank / n), math.floor(SAMPLES * (rank + 1) / n)
  local names = c.sequence and module:embedding_names()
  for step = 1, STEPS do
    local want = steps[step]
    local function feature_of(what) return { [names[what]:match "^[^@]*"] = true } end
    local out, weights, taken = train(c, module, step, from, to, device, function(what, shape, mine_taken)
      if not c.sequence then
        return gradient(step, 1, { SAMPLES, shape[2] }, 1, device):slice(1, from, to):contiguous()
      end
      local width, list = shape[2], {}
      local total = #want.out[what] / width
      local mine = by_bag(c, step, gradient(step, what, { total, width }, 1, device):to_list(), want.taken, width,
        feature_of(what))
      for k, f in ipairs(FEATURES) do
        for _, b in ipairs(feature_of(what)[f] and mine_taken[k] or {}) do
          for _, x in ipairs(mine[f .. b]) do list[#list + 1] = x end
        end
      end
      return peri.tensor(list, "f32", device, shape)
    end)
    if not c.sequence then
      local width = #want.out[1] / SAMPLES
      same(rows(want.out[1], from, to, width), out[1], "outputs")
    end
    for what = 1, c.sequence and #out or 0 do
      local mine = by_bag(c, step, out[what], taken, 16, feature_of(what))
      local theirs = by_bag(c, step, want.out[what], want.taken, 16, feature_of(what))
      for bag, list in peri.util.ordered(mine) do same(theirs[bag], list, "rows of bag " .. bag) end
    end
    if weights and divisor == 1 and not c.variable then
      for bag, list in peri.util.ordered(by_bag(c, step, weights, taken, 1, all_features)) do
        same(want.weights[bag], list, "gradients of the weights of bag " .. bag)
      end
    end
  end
  for _, s in ipairs(module:local_shards()) do
    for _, name in ipairs(s.names()) do
      local state = whole:table_state(s.table, name)
      state = state:slice(1, s.row_offset, s.row_offset + s.rows)
      if state:dim() == 2 then state = state:slice(2, s.col_offset, s.col_offset + s.cols) end
      local got = s.cached and s.read(name, 0, peri.zeros(state:shape(), state:dtype(), device)) or s.state(name)
      same(state:to_list(), got:to_list(), ("%s of table %s"):format(name, s.table))
    end
  end
end

local cases = {
  { title = "adam", optimizer = "adam", weighted = true, kinds = all, sizes = { 1, 2, 3, 5 } },
  { title = "rowwise_adagrad", optimizer = "rowwise_adagrad", kinds = whole_rows, sizes = { 2, 5 } },
  { title = "sgd of BF16", optimizer = "sgd", data_type = "BF16", weighted = true, kinds = all, sizes = { 3 } },
  { title = "partial_rowwise_lamb of FP16", optimizer = "partial_rowwise_lamb", data_type = "FP16", kinds = whole_rows,
    sizes = { 3 } },
  { title = "weights without gradient", optimizer = "sgd", weighted = true, frozen = true, kinds = all, sizes = { 5 } },
  { title = "variable batch", optimizer = "adagrad", weighted = true, variable = true, kinds = all, sizes = { 1 } },
  { title = "in files", optimizer = "adam", weighted = true, kernel = "fused_uvm_caching",
    kinds = { "row_wise", "grid_shard", "mixed" }, sizes = { 2, 3 } },
  { title = "sequences", optimizer = "adam", sequence = true, kinds = all, sizes = { 1, 2, 3, 5 } },
  -- Tables that somebody else trains: here nobody does.
  { title = "beside dense tables", optimizer = "sgd", rate = 0, weighted = true, dense = true, kinds = all,
    sizes = { 3 } },
  -- Copies would drift apart if a rank saw its own gradients as they are and those of others rounded.
  { title = "codecs", optimizer = "adam", kinds = { "data_parallel" }, sizes = { 2, 3 },
    codecs = codec.get_qcomm_codecs_registry { forward = "FP16", backward = "FP16" } },
}

describe("exact sums are those of the unsharded collection, bit for bit:", function()
  for _, case in ipairs(cases) do
    for _, kind in ipairs(case.kinds) do
      local c = peri.util.copy(case)
      c.kind, c.data_type = kind, case.data_type or "FP32"
      worlds.each(("%s, %s"):format(c.title, kind), function(world, device, n)
        share(c, world, device, n, true, function(want, got, what) assert.same(want, got, what) end)
      end, { sizes = c.sizes, local_size = 2 })
    end
  end

  for _, kind in ipairs(all) do -- the test of the test: without `exact` bits depend on the plan
    worlds.each(("not without them: %s"):format(kind), function(world, device, n)
      local differs = false
      share({ kind = kind, optimizer = "adam", weighted = true, data_type = "FP32" }, world, device, n, false,
        function(want, got)
        for i, x in ipairs(want) do differs = differs or x ~= got[i] end
      end)
      local any = world:all_reduce(peri.tensor({ differs and 1 or 0 }, "f32", "cpu")):wait()
      assert.is_true(any:to_list()[1] > 0)
    end, { sizes = { 5 }, local_size = 2, devices = { "cpu" } })
  end
end)
