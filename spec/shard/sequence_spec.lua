-- Sharded EmbeddingCollections: a row for each id, whatever the plan, the number of ranks and the nodes; updated
-- weights are those of the unsharded tables on the ids of all ranks, computed in doubles
-- (spec/support/tbe_reference.lua): there each id is a bag of its own.
-- machines: 2,2
local peri = require "perilune"
local reference = require "spec.support.tbe_reference"
local golden = require "spec.support.golden"
local parity = require "spec.support.parity"
local worlds = require "spec.support.worlds"
local sharded = require "spec.support.sharded"
local codec = require "perilune.dist.codec"
local plan = peri.plan

local COLS = 16
local configs = {
  { name = "a", rows = 20, cols = COLS, features = { "f1", "f2" }, pooling = "SUM" },
  { name = "b", rows = 7, cols = COLS, features = { "f2" }, pooling = "SUM" },
  { name = "c", rows = 33, cols = COLS, features = { "f3" }, pooling = "SUM" },
  { name = "d", rows = 3, cols = COLS, features = { "f4" }, pooling = "SUM" }, -- fewer rows than most worlds have ranks
}
local case = {
  configs = configs, features = { "f1", "f2", "f3", "f4" }, limit = { f1 = 20, f2 = 7, f3 = 33, f4 = 3 },
  keys = { "f3", "f1", "f4", "f2" }, -- another order than the tables'
}

--- Sharding of table i over n ranks, in nodes of 2.
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
  table_row_wise = function(i, _, n) return plan.table_row_wise(i % math.ceil(n / 2)) end,
  grid_shard = function(_, t, n)
    return plan.grid_shard(peri.util.map(parity.ranks_of_blocks(t, n), function(r) return r % math.ceil(n / 2) end))
  end,
}
function kinds.mixed(i, t, n)
  local names = { "row_wise", "data_parallel", "column_wise", "table_wise" }
  return kinds[names[i]](i, t, n)
end

local optimizers = {
  { kind = "sgd", learning_rate = 0.3 },
  { kind = "adam", learning_rate = 0.05, eps = 1e-3, beta1 = 0.8, beta2 = 0.9, weight_decay = 0.02 },
  { kind = "rowwise_adagrad", learning_rate = 0.2, eps = 1e-3 },
}
local cuts_columns = { column_wise = true, grid_shard = true }

local function tables(data_type)
  return peri.util.map(configs, function(t)
    return peri.EmbeddingConfig { name = t.name, num_embeddings = t.rows, embedding_dim = t.cols,
      feature_names = t.features, data_type = data_type }
  end)
end

local function make(kind, world, device, n, options)
  local entries = {}
  for i, t in ipairs(configs) do entries[t.name] = kinds[kind](i, t, n) end
  local args = { tables = tables(options.data_type), plan = entries, group = world, device = device, seed = 5 }
  for name, value in peri.util.ordered(options) do
    if name ~= "data_type" then args[name] = value end
  end
  return peri.shard.ShardedEmbeddingCollection(args)
end

--- The outputs of the collection: { name, feature, config = number of its table }.
local outputs = {
  { "f1", "f1", 1 }, { "f2@a", "f2", 1 }, { "f2@b", "f2", 2 }, { "f3", "f3", 3 }, { "f4", "f4", 4 },
}

--- All ranks' ids of each output, a bag each, for the reference with table parts `parts`; and by output and rank the
--- first row and number.
local function stream(ranks, parts)
  local input, place, row = { ids = {}, offsets = { 0 }, blocks = {} }, {}, 0
  for o, output in ipairs(outputs) do
    local first, n = #input.ids, 0
    place[o] = {}
    for r, batch in ipairs(ranks) do
      place[o][r] = { row = row + n, n = 0 }
      for b = 1, batch.size do
        for _, id in ipairs(batch.ids[output[2]][b]) do
          input.ids[#input.ids + 1] = id
          input.offsets[#input.offsets + 1] = #input.ids
          place[o][r].n = place[o][r].n + 1
        end
      end
      n = n + place[o][r].n
    end
    for k, x in ipairs(parts) do
      if x.config == output[3] then
        input.blocks[#input.blocks + 1] = { table = k, first_bag = first, bags = n, out_offset = row * COLS + x.column,
          out_stride = COLS }
      end
    end
    row = row + n
  end
  return input, place, row
end

--- Part of a flat list of rows.
local function rows_of(list, place)
  local part = {}
  for i = place.row * COLS + 1, (place.row + place.n) * COLS do part[#part + 1] = list[i] end
  return part
end

--- A gradient that every rank can make of every row.
local function gradient(rows, seed)
  local x, list = seed, {}
  for i = 1, rows * COLS do
    x = x * 16807 % 2147483647
    list[i] = (x % 2000 - 1000) / 500
  end
  return list
end

local function run(kind, optimizer, world, device, n)
  local rank, split = world:rank() + 1, cuts_columns[kind] and optimizer.kind == "rowwise_adagrad" or false
  local params = peri.util.copy(optimizer)
  params.optimizer, params.kind = optimizer.kind, nil
  local ec = make(kind, world, device, n, { fused_params = params })
  local parts = parity.reference_tables(case, parity.start_weights(case), n, split)
  local ref = reference.new(parts, optimizer)
  for step = 1, 3 do
    local ranks = parity.draw(case, step, n, 0, 3)
    local input, place, rows = stream(ranks, parts)
    local want, grad = ref:forward(input, rows * COLS), gradient(rows, 7 * step)
    local got, loss = ec:forward(parity.kjt_of(case, ranks[rank], false, device)), nil
    for o, output in ipairs(outputs) do
      local at, lengths = place[o][rank], {}
      local jt = got[output[1]]
      for b = 1, ranks[rank].size do lengths[b] = #ranks[rank].ids[output[2]][b] end
      assert.same(lengths, jt:lengths():to_list())
      assert.same({ at.n, COLS }, jt:values():shape())
      golden.assert_near(rows_of(want, at), jt:values():to_list(), { abs = 2e-6, rel = 2e-5 },
        ("step %d, %s"):format(step, output[1]))
      local term = (jt:values() * peri.tensor(rows_of(grad, at), "f32", device, { at.n, COLS })):sum()
      loss = loss and loss + term or term
    end
    loss:backward()
    for i, g in ipairs(grad) do grad[i] = g / n end
    ref:backward(input, grad)
    parity.check_shards(case, ec, ref, parts, split, step)
  end
end

describe("a row for each id:", function()
  for kind in peri.util.ordered(kinds) do
    for _, optimizer in ipairs(optimizers) do
      if kind ~= "mixed" or optimizer.kind ~= "rowwise_adagrad" then
        worlds.each(("%s, %s"):format(kind, optimizer.kind), function(world, device, n)
          run(kind, optimizer, world, device, n)
        end,
          { sizes = { 1, 2, 3, 5, 8 }, local_size = 2 })
      end
    end
  end
end)

--- Two collections over the same batches; their results and pieces must be the same.
local function same(one, other, world, device, n, tolerance)
  for step = 1, 3 do
    local ranks = parity.draw(case, step, n, 0, 3)
    local loss = {}
    local x = one:forward(parity.kjt_of(case, ranks[world:rank() + 1], false, device))
    local y = other:forward(parity.kjt_of(case, ranks[world:rank() + 1], false, device))
    for _, output in ipairs(outputs) do
      local a, b = x[output[1]]:values(), y[output[1]]:values()
      golden.assert_near(a:to_list(), b:to_list(), tolerance)
      for i, v in ipairs { a, b } do
        local term = (v:to "f32" * peri.full(v:shape(), 0.25 * step, "f32", device)):sum()
        loss[i] = loss[i] and loss[i] + term or term
      end
    end
    loss[1]:backward()
    loss[2]:backward()
  end
  if tolerance.abs == 0 then return sharded.assert_same(one, other, device) end
  local pieces = other:local_shards()
  for i, s in ipairs(one:local_shards()) do
    golden.assert_near(s.state("weight"):to_list(), pieces[i].state("weight"):to_list(), tolerance)
  end
end

describe("rows of ids", function()
  local sgd, exact = { optimizer = "sgd", learning_rate = 0.25 }, { abs = 0, rel = 0 }

  worlds.each("travel in 16 bits", function(world, device, n)
    local codecs = codec.get_qcomm_codecs_registry { forward = "FP16", backward = "FP16" }
    same(make("row_wise", world, device, n, { fused_params = sgd }),
      make("row_wise", world, device, n, { fused_params = sgd, qcomm_codecs_registry = codecs }), world, device, n,
      n == 1 and exact or { abs = 2e-3, rel = 2e-3 })
  end, { sizes = { 1, 2, 3 } })

  worlds.each("are of tables of 16 bits, and of 16 bits themselves", function(world, device, n)
    local narrow = { optimizer = "sgd", learning_rate = 0.25, output_dtype = "FP16", stochastic_rounding = false }
    local ec = make("mixed", world, device, n, { fused_params = narrow, data_type = "FP16" })
    local got = ec:forward(parity.kjt_of(case, parity.draw(case, 1, n, 0, 3)[world:rank() + 1], false, device))
    assert.equal("f16", got.f1:values():dtype())
    same(ec, make("mixed", world, device, n,
      { fused_params = { optimizer = "sgd", learning_rate = 0.25, stochastic_rounding = false } }), world, device, n,
        { abs = 4e-3, rel = 4e-3 })
  end, { sizes = { 1, 3 } })

  worlds.each("take gradients where they lie, or joined where that cannot be", function(world, device, n)
    local ecs, taken = {}, {}
    for i = 1, 2 do ecs[i] = make("mixed", world, device, n, { fused_params = sgd }) end
    for step = 1, 3 do
      local batch = parity.draw(case, step, n, 0, 3)[world:rank() + 1]
      for i, ec in ipairs(ecs) do
        local got, rows, grads = ec:forward(parity.kjt_of(case, batch, false, device)), {}, {}
        for o = #outputs, 1, -1 do -- in memory in another order than their rows
          local values = got[outputs[o][1]]:values()
          local shape = values:shape()
          local grad = peri.Tensor.uniform(shape, -1, 1, 10 * step + o, 0, "f32", device)
          if i == 2 then grad = grad:transpose(1, 2):contiguous():transpose(1, 2) end
          rows[#rows + 1], grads[#grads + 1] = values, grad
        end
        peri.ffi.C.peri_fault_arm("device_alloc", 0)
        peri.backward(rows, grads)
        taken[i] = tonumber(peri.ffi.C.peri_fault_passed "device_alloc")
      end
    end
    sharded.assert_same(ecs[1], ecs[2], device)
    if n == 1 then assert.equal(device == "cpu" and 1 or 0, taken[2] - taken[1]) end -- memory for all gradients
  end, { sizes = { 1, 2, 3 } })

  worlds.each("come from files", function(world, device, n)
    local entries, memory = {}, {}
    for _, t in ipairs(configs) do
      entries[t.name] = plan.row_wise { compute_kernel = "fused_uvm_caching",
        cache_params = plan.CacheParams { load_factor = 1 } }
      memory[t.name] = plan.row_wise()
    end
    local params = { optimizer = "rowwise_adagrad", learning_rate = 0.1 }
    local files = make("row_wise", world, device, n, { fused_params = params, plan = entries })
    same(make("row_wise", world, device, n, { fused_params = params, plan = memory }), files, world, device, n, exact)
    local dist = files:input_dist(parity.kjt_of(case, parity.draw(case, 9, n, 0, 3)[world:rank() + 1], false,
      device)):wait()
    files:prefetch(dist)
    files:compute_and_output_dist(dist):wait()
    files:release()
  end, { sizes = { 1, 3 } })

  worlds.each("are those of an unsharded collection, trained before", function(world, device, n)
    local unsharded = peri.EmbeddingCollection { tables = tables(), fused_params = sgd, seed = 8, device = device }
    local batch = parity.draw(case, 1, n, 0, 3)[world:rank() + 1]
    local everyone = parity.kjt_of(case, parity.draw(case, 2, n, 0, 3)[1], false, device) -- the same on all ranks
    unsharded(everyone)["f2@a"]:values():sum():backward()
    local want = unsharded(parity.kjt_of(case, batch, false, device))
    local holder = peri.nn.Module()
    holder.ec = unsharded
    local entries = {}
    for i, t in ipairs(configs) do entries[t.name] = kinds.mixed(i, t, n) end
    local model = peri.DistributedModelParallel { module = holder, group = world, device = device,
      plan = plan.ShardingPlan { ec = entries } }
    assert.equal("ShardedEmbeddingCollection", model.module.ec.class_name)
    local got = model.module.ec(parity.kjt_of(case, batch, false, device))
    for _, output in ipairs(outputs) do
      assert.same(want[output[1]]:lengths():to_list(), got[output[1]]:lengths():to_list())
      assert.same(want[output[1]]:values():to_list(), got[output[1]]:values():to_list())
    end
  end, { sizes = { 1, 2, 3 } })

  worlds.each("come with their ids", function(world, device, n)
    local batch = parity.draw(case, 1, n, 0, 3)[world:rank() + 1]
    local got, want = make("table_wise", world, device, n, { fused_params = sgd, need_indices = true }):forward(
      parity.kjt_of(case, batch, false, device)), {}
    for b = 1, batch.size do
      for _, id in ipairs(batch.ids.f2[b]) do want[#want + 1] = id end
    end
    assert.same(want, got["f2@a"]:weights():to_list())
    assert.same(want, got["f2@b"]:weights():to_list())
  end, { sizes = { 1, 2 } })

  worlds.each("may be of any number of bags by feature", function(world, device, n)
    local ec = make("row_wise", world, device, n, { fused_params = sgd })
    local input = peri.KeyedJaggedTensor { keys = { "f1", "f2", "f3", "f4" }, values = { 1, 2, 3, 4, 5, 0 },
      lengths = { 2, 1, 2, 1 }, stride_per_key_per_rank = { { 1 }, { 0 }, { 2 }, { 1 } }, device = device }
    local got = ec:forward(input)
    assert.same({ 2 }, got.f1:lengths():to_list())
    assert.same({}, got["f2@b"]:lengths():to_list())
    assert.same({ 1, 2 }, got.f3:lengths():to_list())
    assert.same({ 1, COLS }, got.f4:values():shape())
    local start = parity.start_weights(case).c
    assert.same(rows_of(start, { row = 3, n = 3 }), got.f3:values():to_list())
  end, { sizes = { 1, 2, 3 } })

  worlds.each("are those of the bags that inverse indices name, with the weights of their ids",
    function(world, device, n)
    for _, dedup in ipairs { false, true } do
      local ec = make("row_wise", world, device, n, { fused_params = sgd, use_index_dedup = dedup })
      local keys = { "f1", "f2", "f3", "f4" }
      local got = ec:forward(peri.KeyedJaggedTensor { keys = keys, values = { 1, 2, 3, 4, 5, 0 },
        lengths = { 2, 1, 2, 1 }, weights = { 1, 2, 3, 4, 5, 6 }, stride_per_key_per_rank = { { 1 }, { 0 }, { 2 },
          { 1 } }, device = device,
        inverse_indices = { { "f1", "f3", "f4", "f2" }, peri.tensor({ {}, {}, {}, {} }, "i64", device, { 4, 0 }) } })
      assert.same({ 0, COLS }, got.f3:values():shape())
      got = ec:forward(peri.KeyedJaggedTensor { keys = keys, values = { 1, 2, 6, 3, 4, 5, 0 },
        lengths = { 2, 1, 1, 2, 1 }, weights = { 1, 2, 7, 3, 4, 5, 6 }, stride_per_key_per_rank = { { 1 }, { 1 }, { 2 },
          { 1 } }, device = device,
        inverse_indices = { keys, peri.tensor({ { 0, 0, 0 }, { 0, 0, 0 }, { 1, 0, 1 }, { 0, 0, 0 } }, "i64",
          device) } })
      local start = parity.start_weights(case).c
      assert.same({ 2, 1, 2 }, got.f3:lengths():to_list())
      assert.same({ 4, 5, 3, 4, 5 }, got.f3:weights():to_list())
      local want = {}
      for _, id in ipairs { 4, 5, 3, 4, 5 } do
        for _, x in ipairs(rows_of(start, { row = id, n = 1 })) do want[#want + 1] = x end
      end
      assert.same(want, got.f3:values():to_list())
      assert.same({ 1, 2, 1, 2, 1, 2 }, got.f1:weights():to_list())
    end
  end, { sizes = { 1, 2, 3 } })

  worlds.each("refuse what is wrong", function(world, device, n)
    local function refused(pattern, options)
      options.fused_params = sgd
      assert.error_matches(function() make("table_wise", world, device, n, options) end, pattern)
    end
    refused("rows of ids are not weighted", { is_weighted = true })
    refused("need_indices is 1, wanted true or false", { need_indices = 1 })
    refused("no argument 'need_indexes'", { need_indexes = true })
    local wide = tables()
    wide[2] = peri.EmbeddingBagConfig { name = "b", num_embeddings = 7, embedding_dim = COLS, feature_names = { "f2" } }
    refused("table 'b': pooling 0, allowed: none", { tables = wide })
    local ec = make("row_wise", world, device, n, { fused_params = sgd })
    local function input(id, weights)
      return peri.KeyedJaggedTensor { keys = { "f1", "f2", "f3", "f4" }, values = { 1, id, 3, 0 },
        lengths = { 1, 1, 1, 1 }, weights = weights, device = device }
    end
    assert.same({ 3 }, ec:forward(input(1, { 1, 2, 3, 4 })).f3:weights():to_list())
    assert.error_matches(function() ec:forward(input(7)).f1:values() end,
      "table 'b', feature 'f2', sample 0: id 7 at position 0 of the bag, allowed: 0%.%.6")
    assert.error_matches(function() ec:forward(7) end, "features is 7, wanted a KeyedJaggedTensor")
  end, { sizes = { 1 }, devices = { "cpu" } })
end)
