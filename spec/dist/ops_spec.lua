-- Exchanges of embeddings with gradients: TorchRec's numbers, the adjoint identity, division, codecs, what is refused.
-- machines: 3,1
-- cuda: always
local ffi = require "ffi"
local golden = require "spec.support.golden"
local peri = require "perilune"
local ops = require "perilune.dist.ops"
local codec = require "perilune.dist.codec"
local worlds = require "spec.support.worlds"

-- -- TorchRec's numbers -----------------------------------------------------------------------------------------------

--- The exchange of a golden case on this rank: an awaitable of its result.
local exchange = {}
function exchange.pooled(case, input, o)
  return ops.alltoall_pooled { a2a_pooled_embs_tensor = input, batch_size_per_rank = case.batch_size_per_rank,
    dim_sum_per_rank = case.dim_sum_per_rank, codecs = o.codecs, gradient_division = case.gradient_division }
end
function exchange.variable_pooled(case, input, o)
  return ops.variable_batch_alltoall_pooled {
    a2a_pooled_embs_tensor = input, batch_size_per_rank_per_feature = case.batch_size_per_rank_per_feature[o.rank + 1],
    batch_size_per_feature_pre_a2a = case.batch_size_per_feature_pre_a2a[o.rank + 1],
    emb_dim_per_rank_per_feature = case.emb_dim_per_rank_per_feature, codecs = o.codecs,
    gradient_division = case.gradient_division,
  }
end
function exchange.reduce_scatter(case, input, o)
  return ops.reduce_scatter_v_pooled { input = input, input_splits = case.input_splits, codecs = o.codecs,
    gradient_division = case.gradient_division }
end
function exchange.variable_reduce(case, input, o)
  return ops.reduce_scatter_v_per_feature_pooled {
    input = input, batch_size_per_rank_per_feature = case.batch_size_per_rank_per_feature,
    embedding_dims = case.embedding_dims, codecs = o.codecs, gradient_division = case.gradient_division,
  }
end
function exchange.all_gather(case, input, o)
  return ops.all_gather_base_pooled { input = input, codecs = o.codecs, gradient_division = case.gradient_division }
end
function exchange.sequence(case, input, o)
  local mine = case.per_rank[o.rank + 1]
  return ops.alltoall_sequence {
    a2a_sequence_embs_tensor = input, lengths_after_sparse_data_all2all =
      case:tensor(("rank%d/lengths_after_input_dist"):format(o.rank), o.device), input_splits = mine.ids_sent_to,
      output_splits = mine.ids_received_from, batch_size_per_rank = case.batch_sizes,
    num_features = case.features_per_rank[o.rank + 1], codecs = o.codecs, gradient_division = case.gradient_division,
  }
end

local function reproduce(kind, case, world, device)
  local rank = world.rank_number
  local at = ("rank%d/"):format(rank)
  local input = case:tensor(at .. (kind == "sequence" and "local_embs" or "input"), device):requires_grad()
  local codecs = type(case.codec) == "table" and codec.get_qcomm_codecs(case.codec) or nil
  if case:has(at .. "wire") then
    local splits = peri.util.map(case.batch_size_per_rank, function(rows)
      return rows * case.dim_sum_per_rank[rank + 1]
    end)
    local wire = codecs.forward:encode(input:detach(), codecs.forward:create_context(splits))
    case:assert_near(at .. "wire", wire, { abs = 0, rel = 0 })
    local want, got = case:bytes(at .. "wire"), wire:read()
    assert.is_true(want == ffi.string(got, #want), case.name .. ": other bits")
  end
  local output = exchange[kind](case, input, { codecs = codecs, rank = rank, device = device }):wait()
  if case:has(at .. "unbucketize_permute") then
    output = ops.unbucketize(output, case:tensor(at .. "unbucketize_permute", device))
  end
  case:assert_near(at .. "output", output)
  output:backward(case:tensor(at .. "grad_output", device))
  -- TorchRec sums what all ranks send in the wire's type, Perilune in f32.
  case:assert_near(at .. "grad_input", input:grad(), kind == "all_gather" and codecs and { abs = 1e-3, rel = 1e-3 }
    or nil)
end

describe("TorchRec's numbers", function()
  for _, kind in ipairs(peri.util.keys(exchange)) do
    for _, prefix in ipairs(kind == "variable_reduce" and { "^" } or { "^", "^codec_" }) do
      for _, name in ipairs(golden.names("sharded", prefix .. kind .. "_")) do
        local case = golden.load(name)
        worlds.each(case.name, function(world, device) reproduce(kind, case, world, device) end,
          { sizes = { case.world_size } })
      end
    end
  end
end)

-- -- the adjoint identity ---------------------------------------------------------------------------------------------

--- Numbers that all ranks know: entry i of a stream, in [low, high].
local function draw(stream, i, low, high)
  local x = math.sin(12.9898 * stream + 78.233 * i) * 43758.5453
  return low + math.floor((x - math.floor(x)) * (high - low + 1))
end
local function drawn(stream, n, low, high)
  local list = {}
  for i = 1, n do list[i] = draw(stream, i, low, high) end
  return list
end
local function sum(list)
  local s = 0
  for _, x in ipairs(list) do s = s + x end
  return s
end
local function random(shape, seed, rank, device, dtype)
  return peri.Tensor.uniform(shape, -1, 1, seed, rank, dtype or "f64", device)
end
local function inner(a, b)
  local s, x, y = 0, a:to_list(), b:to_list()
  for i = 1, #x do s = s + x[i] * y[i] end
  return s
end

--- Every operation on uneven sizes, some of them 0: inputs on this rank, and the call.
local forms = {}
function forms.alltoall_pooled(rank, n, o)
  local batch, dims = drawn(1, n, 0, 4), drawn(2, n, 0, 5)
  local x = random({ sum(batch), dims[rank + 1] }, 5, rank, o.device, o.dtype)
  return { x }, function(args)
    args.a2a_pooled_embs_tensor, args.batch_size_per_rank, args.dim_sum_per_rank = x, batch, dims
    return ops.alltoall_pooled(args)
  end
end
function forms.variable_batch_alltoall_pooled(rank, n, o)
  local counts, dims, pre, own, mine = drawn(3, n, 0, 3), {}, {}, {}, 0
  for r = 1, n do dims[r] = drawn(10 + r, counts[r], 1, 4) end
  -- rows of rank `of` for feature f of `owner`
  local function rows(of, owner, f) return draw(100 * of + owner, f, 0, 3) end
  for r = 1, n do
    own[r] = {}
    for f = 1, counts[r] do pre[#pre + 1] = rows(rank + 1, r, f) end
    for f = 1, counts[rank + 1] do
      own[r][f] = rows(r, rank + 1, f)
      mine = mine + own[r][f] * dims[rank + 1][f]
    end
  end
  local x = random({ mine }, 6, rank, o.device, o.dtype)
  return { x }, function(args)
    args.a2a_pooled_embs_tensor, args.batch_size_per_rank_per_feature = x, own
    args.batch_size_per_feature_pre_a2a, args.emb_dim_per_rank_per_feature = pre, dims
    return ops.variable_batch_alltoall_pooled(args)
  end
end
function forms.alltoallv(rank, n, o)
  local counts, rows = drawn(4, n, 1, 3), 7
  local dims, inputs = {}, {}
  for r = 1, n do dims[r] = drawn(20 + r, counts[r], 1, 3) end
  for i, d in ipairs(dims[rank + 1]) do inputs[i] = random({ rows, d }, 7 + i, rank, o.device, o.dtype) end
  return inputs, function(args)
    args.inputs, args.per_rank_split_lengths = inputs, dims
    return ops.alltoallv(args)
  end
end
function forms.reduce_scatter_pooled(rank, n, o)
  local inputs = {}
  for i, rows in ipairs(drawn(5, n, 0, 4)) do inputs[i] = random({ rows, 3 }, 30 + i, rank, o.device, o.dtype) end
  return inputs, function(args)
    args.inputs = inputs
    return ops.reduce_scatter_pooled(args)
  end
end
function forms.reduce_scatter_base_pooled(rank, n, o)
  local x = random({ 3 * n, 2 }, 40, rank, o.device, o.dtype)
  return { x }, function(args)
    args.input = x
    return ops.reduce_scatter_base_pooled(args)
  end
end
function forms.reduce_scatter_v_pooled(rank, n, o)
  local splits = drawn(6, n, 0, 5)
  local x = random({ sum(splits), 3 }, 41, rank, o.device, o.dtype)
  return { x }, function(args)
    args.input, args.input_splits = x, splits
    return ops.reduce_scatter_v_pooled(args)
  end
end
function forms.reduce_scatter_v_per_feature_pooled(rank, n, o)
  local dims, sizes, total = { 2, 1, 3 }, {}, 0
  for r = 1, n do
    sizes[r] = drawn(50 + r, 3, 0, 3)
    for k = 1, 3 do total = total + sizes[r][k] * dims[k] end
  end
  local x = random({ total }, 42, rank, o.device, o.dtype)
  return { x }, function(args)
    args.input, args.batch_size_per_rank_per_feature, args.embedding_dims = x, sizes, dims
    return ops.reduce_scatter_v_per_feature_pooled(args)
  end
end
function forms.all_gather_base_pooled(rank, _, o)
  local x = random({ 3, 2 }, 43, rank, o.device, o.dtype)
  return { x }, function(args)
    args.input = x
    return ops.all_gather_base_pooled(args)
  end
end
--- Ids that every rank sends to every rank, in bags; `variable`: batches differ by feature too.
function forms.alltoall_sequence(rank, n, o)
  local counts, stagger = drawn(8, n, 0, 3), o.stagger or 1
  local function rows(of, f) return o.variable and draw(60 + of, f, 0, 3) or draw(9, of, 0, 3) end
  local function ids(of, owner, f, row) return draw(1000 * of + 30 * owner + f, row, 0, 3) end
  local lengths, sent, received, strides, order = {}, {}, {}, {}, peri.KeyedJaggedTensor.recat(1, n, stagger)
  local function total(of, owner)
    local s = 0
    for f = 1, counts[owner] do
      for row = 1, rows(of, f) do s = s + ids(of, owner, f, row) end
    end
    return s
  end
  for r = 1, n do sent[r], received[r] = total(rank + 1, r), total(r, rank + 1) end
  for f = 1, counts[rank + 1] do
    strides[f] = {}
    for p = 1, n do
      local of = order[p] + 1
      strides[f][p] = rows(of, f)
      for row = 1, rows(of, f) do lengths[#lengths + 1] = ids(of, rank + 1, f, row) end
    end
  end
  local batch = {}
  for r = 1, n do batch[r] = rows(r, 1) end
  local x = random({ sum(received), 3 }, 44, rank, o.device, o.dtype)
  return { x }, function(args)
    args.a2a_sequence_embs_tensor, args.num_features, args.stagger = x, counts[rank + 1], stagger
    args.lengths_after_sparse_data_all2all = peri.tensor(lengths, "i32", o.device)
    args.input_splits, args.output_splits = sent, received
    if o.variable then args.stride_per_key_per_rank = strides else args.batch_size_per_rank = batch end
    return ops.alltoall_sequence(args)
  end
end

local function as_list(result) return peri.Tensor.is(result) and { result } or result end

--- Sum over ranks of both sides of the identity.
local function both_sides(world, device, form, options, args)
  local rank, n = world.rank_number, world.world_size
  options.device = device
  local inputs, call = forms[form](rank, n, options)
  for _, x in ipairs(inputs) do x:requires_grad() end
  local outputs = as_list(call(args):wait())
  local left, loss = 0, nil
  for i, out in ipairs(outputs) do
    local y = random(out:shape(), 90 + i, rank, device, options.dtype)
    left = left + inner(out, y)
    local part = peri.nn.functional.sum(peri.nn.functional.mul(out, y))
    loss = loss and peri.nn.functional.add(loss, part) or part
  end
  loss:backward()
  local right = 0
  for _, x in ipairs(inputs) do right = right + inner(x, x:grad()) end
  local sums = peri.tensor({ left, right }, "f64", device)
  world:all_reduce(sums):wait()
  return unpack(sums:to_list())
end

local function near(want, got, tolerance, what)
  assert(math.abs(want - got) <= tolerance * (1 + math.abs(want)), ("%s: %.15g, wanted %.15g"):format(what, got, want))
end

describe("the adjoint identity", function()
  for _, form in ipairs(peri.util.keys(forms)) do
    worlds.each(form, function(world, device)
      local left, right = both_sides(world, device, form, {}, { gradient_division = false })
      near(left, right, 1e-12, form)
      left, right = both_sides(world, device, form, {}, { gradient_division = true })
      near(left, right * world.world_size, 1e-12, form .. ", divided")
      left, right = both_sides(world, device, form, { dtype = "f32" }, { gradient_division = false })
      near(left, right, 1e-5, form .. " in f32")
    end)
  end
  worlds.each("alltoall_sequence, variable batches and stagger", function(world, device, n)
    for stagger = 1, n do
      if n % stagger == 0 then
        for _, variable in ipairs { false, true } do
          local o = { stagger = stagger, variable = variable }
          local left, right = both_sides(world, device, "alltoall_sequence", o, { gradient_division = false })
          near(left, right, 1e-12, "stagger " .. stagger)
        end
      end
    end
  end)
  worlds.each("unbucketize", function(world, device)
    local p = { 3, 0, 4, 1, 2 }
    local x = random({ 5, 2 }, 3, world.rank_number, device):requires_grad()
    local y, out = random({ 5, 2 }, 4, world.rank_number, device), ops.unbucketize(x, peri.tensor(p, "i64", device))
    local rows, picked = x:to_table(), out:to_table()
    for i = 1, 5 do assert.same(rows[p[i] + 1], picked[i]) end
    out:backward(y)
    near(inner(out, y), inner(x, x:grad()), 1e-14, "unbucketize")
  end, { sizes = { 1 } })

  --- Codecs: the identity holds as well as the codecs keep numbers.
  for _, precision in ipairs { "FP16", "BF16", "FP8", "INT8", "MX4" } do
    worlds.each("with " .. precision, function(world, device)
      local codecs = codec.get_qcomm_codecs { forward = precision, backward = precision, fp8_quantize_dim = 8,
        mx4_quantize_dim = 8 }
      for _, form in ipairs(peri.util.keys(forms)) do
        local o, args = { dtype = "f32" }, { gradient_division = false, codecs = codecs }
        local left, right = both_sides(world, device, form, o, args)
        local tolerance = ({ FP16 = 0.01, BF16 = 0.05, FP8 = 0.6, INT8 = 0.1, MX4 = 2 })[precision]
        assert(math.abs(left - right) <= tolerance * math.max(1, math.abs(left)) * math.sqrt(world.world_size),
          ("%s: %g and %g"):format(form, left, right))
      end
    end, { sizes = { 2, 3 } })
  end
end)

-- -- worked examples --------------------------------------------------------------------------------------------------

describe("worked examples", function()
  worlds.each("A3: pooled, two dims, unequal batches", function(world, device)
    local rank = world.rank_number
    local x = peri.tensor(rank == 0 and { { 1, 2 }, { 3, 4 }, { 5, 6 } } or { { 10 }, { 20 }, { 30 } }, "f32",
      device):requires_grad()
    local out = ops.alltoall_pooled { a2a_pooled_embs_tensor = x, batch_size_per_rank = { 1, 2 },
      dim_sum_per_rank = { 2, 1 } }:wait()
    assert.same(rank == 0 and { { 1, 2, 10 } } or { { 3, 4, 20 }, { 5, 6, 30 } }, out:to_table())
    out:backward(peri.tensor(rank == 0 and { { 1, 2, 3 } } or { { 4, 5, 6 }, { 7, 8, 9 } }, "f32", device))
    assert.same(rank == 0 and { { .5, 1 }, { 2, 2.5 }, { 3.5, 4 } } or { { 1.5 }, { 3 }, { 4.5 } }, x:grad():to_table())
  end, { sizes = { 2 } })

  worlds.each("the variable batch of TorchRec's documentation", function(world, device)
    local rank = world.rank_number
    local n = rank == 0 and 6 or 24
    local out = ops.variable_batch_alltoall_pooled {
      a2a_pooled_embs_tensor = peri.Tensor.full({ n }, rank, "f32", device),
      batch_size_per_rank_per_feature = rank == 0 and { { 2 }, { 1 } } or { { 1, 3 }, { 2, 2 } },
      batch_size_per_feature_pre_a2a = rank == 0 and { 2, 1, 3 } or { 1, 2, 2 },
      emb_dim_per_rank_per_feature = { { 2 }, { 3, 3 } },
    }:wait()
    assert.same({ rank == 0 and 16 or 14 }, out:shape())
  end, { sizes = { 2 } })

  worlds.each("A7: partial sums inside nodes, then between them", function(world, device)
    local rank = world.rank_number
    local intra, cross = world:intra_node(), world:cross_node()
    -- Rows on ranks 0 and 1 in the order of source ranks 0, 2, 1, 3: the partial sums of both halves of the table.
    local partial = ({ [0] = { { 0 }, { 3 }, { 0 }, { 0 } }, { { 5 }, { 0 }, { 4 }, { 3 } } })[rank]
      or { { 0 }, { 0 }, { 0 }, { 0 } }
    local x = peri.tensor(partial, "f32", device):requires_grad()
    local sums = ops.reduce_scatter_v_pooled { input = x, input_splits = { 2, 2 }, group = intra }:wait()
    if rank < 2 then assert.same(({ [0] = { { 5 }, { 3 } }, { { 4 }, { 3 } } })[rank], sums:to_table()) end
    local dims = { 1, 0 } -- node 1 has no columns of its own
    local mine = rank < 2 and sums or sums:slice(2, 0, 0)
    local out = ops.alltoall_pooled { a2a_pooled_embs_tensor = mine, batch_size_per_rank = { 1, 1 },
      dim_sum_per_rank = dims, group = cross }:wait()
    assert.same({ { ({ [0] = 5, 4, 3, 3 })[rank] } }, out:to_table())
    out:backward(peri.Tensor.full({ 1, 1 }, rank + 1, "f32", device))
    -- Divided by 2 in the node and by 2 between nodes.
    if rank < 2 then assert.same({ { 1 / 4 }, { 3 / 4 }, { 2 / 4 }, { 4 / 4 } }, x:grad():to_table()) end
  end, { sizes = { 4 }, local_size = 2 })

  worlds.each("A9: rows of a row-wise table, in the order of the ids", function(world, device)
    local rank = world.rank_number
    -- Rank 0 sent id 0 to rank 0, and 5, 4 (its rows 2, 1) to rank 1; rank 1 sent nothing.
    local rows = rank == 0 and { { 0 } } or { { 5 }, { 4 } }
    local got = ops.alltoall_sequence {
      a2a_sequence_embs_tensor = peri.tensor(rows, "f32", device), num_features = 1,
      lengths_after_sparse_data_all2all = peri.tensor(rank == 0 and { 1 } or { 2 }, "i32", device),
      batch_size_per_rank = { 1, 0 }, input_splits = rank == 0 and { 1, 2 } or { 0, 0 }, output_splits = rank == 0
        and { 1, 0 } or { 2, 0 },
    }:wait()
    if rank == 0 then
      assert.same({ { 0 }, { 5 }, { 4 } }, got:to_table())
      assert.same({ { 5 }, { 0 }, { 4 } }, ops.unbucketize(got, peri.tensor({ 1, 0, 2 }, "i64", device)):to_table())
    else
      assert.same({ 0, 1 }, got:shape())
    end
  end, { sizes = { 2 } })
end)

-- -- gradients --------------------------------------------------------------------------------------------------------

describe("gradients", function()
  worlds.each("are divided as the group, or the script, says", function(world, device)
    local n = world.world_size
    local ranks = {}
    for i = 1, n do ranks[i] = i - 1 end
    local other = world:new_group(ranks, "other")
    local function gradient(args)
      local x = peri.Tensor.ones({ n, 1 }, "f32", device):requires_grad()
      args.input = x
      ops.reduce_scatter_base_pooled(args):wait():backward(peri.Tensor.ones({ 1, 1 }, "f32", device))
      return x:grad():item(0) -- all are alike
    end
    local function near_to(want, got) assert(math.abs(want - got) < 1e-7, got) end
    assert.is_true(ops.get_gradient_division())
    near_to(1 / n, gradient {})
    ops.set_gradient_division(false, other)
    assert.is_false(ops.get_gradient_division(other))
    near_to(1, gradient { group = other })
    near_to(1 / n, gradient {})
    near_to(1 / n, gradient { group = other, gradient_division = true })
    ops.set_gradient_division(false)
    assert.is_false(ops.get_gradient_division())
    near_to(1, gradient {})
    ops.set_gradient_division(true, other)
    near_to(1 / n, gradient { group = other })
  end)

  worlds.each("travel while others are computed, for ranks without a part in the loss too", function(world, device)
    local n, rank = world.world_size, world.rank_number
    local F = peri.nn.functional
    -- Two exchanges, of which the ranks' losses use one each; rank 0 owns no column of the first and gives no leaf at
    -- all.
    local dims = {}
    for r = 1, n do dims[r] = r == 1 and 0 or 2 end
    local batch = {}
    for r = 1, n do batch[r] = r - 1 end -- rank 0 has an empty batch
    local a = peri.Tensor.ones({ n * (n - 1) / 2, dims[rank + 1] }, "f32", device)
    if rank > 0 then a:requires_grad() end
    local b = peri.Tensor.ones({ 2, 2 }, "f32", device):requires_grad()
    local first = ops.alltoall_pooled { a2a_pooled_embs_tensor = a, batch_size_per_rank = batch,
      dim_sum_per_rank = dims }
    local second = ops.all_gather_base_pooled { input = b }
    local x, y = first:wait(), second:wait()
    local weight = peri.Tensor.ones({ 1 }, "f32", device):requires_grad()
    local loss = F.add(F.sum(x), F.mul(F.sum(y), weight))
    F.sum(loss):backward()
    assert.same({ 4 * n }, weight:grad():to_list())
    for _, g in ipairs(b:grad():to_list()) do assert.equal(1, g) end
    if rank > 0 then
      for _, g in ipairs(a:grad():to_list()) do assert(math.abs(g - 1 / n) < 1e-7) end
    end
  end)

  worlds.each("are not recorded without need", function(world, device)
    local x = peri.Tensor.ones({ world.world_size, 1 }, "f32", device):requires_grad()
    local out = peri.no_grad(function() return ops.reduce_scatter_base_pooled { input = x }:wait() end)
    if world.world_size > 1 then assert.is_false(out:describe().requires_grad) end
    local batch, dims = {}, {} -- ids (no floats) of rank 0 to itself: the others take part with nothing
    for r = 1, world.world_size do batch[r], dims[r] = r == 1 and 2 or 0, r == 1 and 1 or 0 end
    local ids = world.rank_number == 0 and peri.tensor({ { 1 }, { 2 } }, "i64", device)
      or peri.Tensor.empty({ 2, 0 }, "i64", device)
    local back = ops.alltoall_pooled { a2a_pooled_embs_tensor = ids, batch_size_per_rank = batch,
      dim_sum_per_rank = dims }:wait()
    if world.rank_number == 0 then assert.same({ { 1 }, { 2 } }, back:to_table()) end
  end)
end)

-- -- what is refused --------------------------------------------------------------------------------------------------

describe("exchanges refuse", function()
  --- Local errors: nothing was posted, so the ranks go on.
  worlds.each("what cannot be", function(world, device)
    local n, rank = world.world_size, world.rank_number
    local function same(k)
      local list = {}
      for i = 1, n do list[i] = k end
      return list
    end
    local function fails(pattern, f, args)
      local ok, err = pcall(f, args)
      assert.is_false(ok)
      assert.truthy(tostring(err):find(pattern, 1, true), tostring(err))
    end
    local x = peri.Tensor.ones({ 2 * n, 3 }, "f32", device)
    local function pooled(t, batch, dims, more)
      local args = { a2a_pooled_embs_tensor = t, batch_size_per_rank = batch, dim_sum_per_rank = dims }
      for k, v in next, more or {} do args[k] = v end
      return args
    end
    fails("the batch sizes take", ops.alltoall_pooled, pooled(x, same(3), same(3)))
    fails(("dim_sum_per_rank[%d] is 4"):format(rank), ops.alltoall_pooled, pooled(x, same(2), same(4)))
    fails("batch_size_per_rank[0] is -2", ops.alltoall_pooled, pooled(x, same(-2), same(3)))
    fails("entry 1 of batch_size_per_rank is 0.5", ops.alltoall_pooled, pooled(x, same(0.5), same(3)))
    fails(("has %d entries for the %d ranks"):format(n + 1, n), ops.alltoall_pooled,
      pooled(x, same(2), { 3, unpack(same(3)) }))
    fails("no argument 'embs'", ops.alltoall_pooled, { embs = x })
    fails("a2a_pooled_embs_tensor is a table", ops.alltoall_pooled, pooled({}, same(2), same(3)))
    fails("2 dimensions", ops.alltoall_pooled, pooled(peri.Tensor.ones({ 2 }, "f32", device), same(2), same(3)))
    fails("group is a string", ops.alltoall_pooled, pooled(x, same(2), same(3), { group = "world" }))
    fails("codecs is a string", ops.alltoall_pooled, pooled(x, same(2), same(3), { codecs = "FP16" }))
    fails("a codec for f64, allowed: f32", ops.alltoall_pooled,
      pooled(x:to "f64", same(2), same(3), { codecs = codec.get_qcomm_codecs { forward = "FP16" } }))
    if n > 1 then
      local one = peri.Tensor.ones({ 1, 3 }, "f32", device)
      fails(("allowed: rows divisible by %d"):format(n), ops.reduce_scatter_base_pooled, { input = one })
    end
    fails("the input is i64, allowed: f32, f64", ops.reduce_scatter_base_pooled,
      { input = peri.Tensor.ones({ n }, "i64", device) })
    fails("the input_splits take", ops.reduce_scatter_v_pooled, { input = x, input_splits = same(1) })
    fails("inputs for the", ops.reduce_scatter_pooled, { inputs = { x, unpack(same(x)) } })
    fails("inputs must be a list", ops.alltoallv, { inputs = x, out_split = same(3) })
    fails("the inputs have 3 columns", ops.alltoallv, { inputs = { x }, out_split = same(2) })
    fails("has not 2 entries", ops.reduce_scatter_v_per_feature_pooled,
      { input = x:reshape(-1), batch_size_per_rank_per_feature = same { 1 }, embedding_dims = { 1, 2 } })
    fails("the batch sizes and dims take", ops.reduce_scatter_v_per_feature_pooled,
      { input = x:reshape(-1), batch_size_per_rank_per_feature = same { 1, 1 }, embedding_dims = { 1, 2 } })
    local function seq(more)
      local args = { a2a_sequence_embs_tensor = x, num_features = 1, batch_size_per_rank = same(1),
        input_splits = same(2), output_splits = same(2), lengths_after_sparse_data_all2all = peri.Tensor.full({ n }, 2,
          "i32", device) }
      for k, v in next, more do args[k] = v end
      return args
    end
    fails("the output_splits sum to", ops.alltoall_sequence, seq { output_splits = same(1) })
    fails("input_splits[0] is -1", ops.alltoall_sequence, seq { input_splits = same(-1) })
    fails("lengths, the batch sizes of 2 features take", ops.alltoall_sequence, seq { num_features = 2 })
    fails("stagger", ops.alltoall_sequence, seq { stagger = n + 1 })
    fails("num_features is missing", ops.alltoall_sequence, seq { num_features = false })
    fails("permutation[1] is 0, allowed: each of 0..2 once", function()
      ops.unbucketize(peri.Tensor.ones({ 3 }, "f32", device), peri.tensor({ 0, 0, 1 }, "i64", device))
    end)
    fails("permutation[0] is 7", function()
      ops.unbucketize(peri.Tensor.ones({ 3 }, "f32", device), peri.tensor({ 7, 0, 1 }, "i32", device))
    end)
    fails("allowed: true, false", function() ops.set_gradient_division(1) end)
    assert.same({ 2, 3 * n }, ops.alltoall_pooled(pooled(x, same(2), same(3))):wait():shape())
  end, { sizes = { 1, 2, 3 } })

  worlds.each("what the ranks do not agree on, on all ranks", function(world, device)
    local rank = world.rank_number
    local x = peri.Tensor.ones({ 4, 3 }, "f32", device)
    local ok, err = pcall(function()
      return ops.alltoall_pooled { a2a_pooled_embs_tensor = x, batch_size_per_rank = { 2, 2 },
        dim_sum_per_rank = rank == 0 and { 3, 3 } or { 2, 3 } }:wait()
    end)
    assert.is_false(ok)
    assert.truthy(tostring(err):find("rank", 1, true), tostring(err))
    assert.is_false(world:is_healthy())
  end, { sizes = { 2 }, timeout = 2, only = "sim" })
end)
