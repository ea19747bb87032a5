-- KeyedJaggedTensors and embeddings between ranks: TorchRec's vectors, every batch against a plain computation, worked
-- examples, the document of SparseFeaturesAllToAll, what is refused.
-- machines: 1,1,1,1
local golden = require "spec.support.golden"
local peri = require "perilune"
local dist = require "perilune.dist"
local worlds = require "spec.support.worlds"
local KJT = peri.KeyedJaggedTensor

-- -- TorchRec's vectors -----------------------------------------------------------------------------------------------

local function input_of(case, at, device)
  local strides = case:list(at .. "input/strides")
  local per_rank
  if strides then
    per_rank = {}
    for i, s in ipairs(strides) do per_rank[i] = { s } end
  end
  return KJT { keys = case.keys, values = case:tensor(at .. "input/values", device),
    lengths = case:tensor(at .. "input/lengths", device), weights = case:tensor(at .. "input/weights", device),
    stride_per_key_per_rank = per_rank }
end

describe("KJTAllToAll gives TorchRec's vectors:", function()
  for _, name in ipairs(golden.names("sharded", "^kjt_all_to_all_")) do
    local case = golden.load(name)
    worlds.each(case.name, function(world, device)
      local at = ("rank%d/"):format(world.rank_number)
      local kjt = dist.KJTAllToAll(world, case.splits, case.stagger)(input_of(case, at, device)):wait():wait()
      local mine = case.per_rank[world.rank_number + 1]
      assert.same(mine.keys, kjt:keys())
      case:assert_near(at .. "output/values", kjt:values())
      case:assert_near(at .. "output/lengths", kjt:lengths())
      if case.weighted then case:assert_near(at .. "output/weights", kjt:weights()) end
      if #mine.keys > 0 then assert.equal(mine.stride, kjt:stride()) end
      if mine.stride_per_key_per_rank then assert.same(mine.stride_per_key_per_rank, kjt:stride_per_key_per_rank()) end
    end, { sizes = { case.world_size } })
  end
end)

describe("one process, several devices:", function()
  it("gradients of what is joined and added up are their adjoints", function()
    local F = peri.nn.functional
    local function inner(a, b) return F.mul(a, b):sum():item() end
    for _, device in ipairs { "cpu", "opaque" } do
      for _, module in ipairs { dist.EmbeddingsAllToOne, dist.EmbeddingsAllToOneReduce } do
        local parts, right = {}, 0
        for i = 1, 3 do
          parts[i] = peri.Tensor.normal({ 4, 2 }, 0, 1, 5, i, "f64", i == 1 and "cpu" or device):requires_grad()
        end
        local out = module { device = device, world_size = 3 }(parts)
        local y = peri.Tensor.normal(out:shape(), 0, 1, 6, 0, "f64", device)
        local left = inner(out, y)
        out:backward(y)
        for i = 1, 3 do right = right + inner(parts[i], parts[i]:grad()) end
        assert(math.abs(left - right) < 1e-12 * (1 + math.abs(left)), ("%g and %g"):format(left, right))
      end
    end
  end)

  for _, device in ipairs { "cpu", "opaque" } do
    it("KJTOneToAll on " .. device, function()
      local case = golden.load "sharded/kjt_one_to_all"
      local input = case:tensor_names "^rank0/input" [1] and "rank0/" or ""
      local parts = dist.KJTOneToAll(case.splits, 4, device)(input_of(case, input, "cpu"))
      assert.equal(4, #parts)
      for i, part in ipairs(parts) do
        assert.same(case.per_rank[1].keys[i], part:keys())
        assert.equal(device, part:device())
        for _, what in ipairs { "values", "lengths", "weights" } do
          case:assert_near(("part%d/output/%s"):format(i - 1, what), part[what](part))
        end
      end
    end)
    it("embeddings to one, on " .. device, function()
      local case = golden.load "sharded/embeddings_all_to_one"
      local parts, narrow = {}, {}
      for i = 0, 2 do
        parts[i + 1] = case:tensor(("part%d/input"):format(i), i == 0 and "cpu" or device):requires_grad()
        narrow[i + 1] = parts[i + 1]:slice(2, 0, case.narrowest)
      end
      local wide = dist.EmbeddingsAllToOne { device = device, world_size = 3 }(parts)
      assert.equal(device, wide:device())
      case:assert_near("concatenated", wide)
      local reduced = dist.EmbeddingsAllToOneReduce { device = device, world_size = 3 }(narrow)
      case:assert_near("reduced", reduced)
      for i, t in ipairs(dist.SeqEmbeddingsAllToOne { device = device, world_size = 3 }(parts)) do
        case:assert_near(("part%d/sequence"):format(i - 1), t)
        assert.equal(device, t:device())
      end
      wide:backward(peri.Tensor.full(wide:shape(), 2, "f32", device))
      for _, p in ipairs(parts) do assert.same({ 2 }, { p:grad():to_list()[1] }) end
    end)
  end
end)

-- -- every batch against a plain computation --------------------------------------------------------------------------

local function draw(stream, i, low, high)
  local x = math.sin(12.9898 * stream + 78.233 * i) * 43758.5453
  return low + math.floor((x - math.floor(x)) * (high - low + 1))
end

--- The bags of key `k` on rank `of`: a function of both that every rank can compute.
local function bags(of, k, seed, o)
  local list = {}
  local rows = o.variable and draw(seed + k, of, 0, 4) or draw(seed, of, 0, 4)
  if o.empty and of == o.empty then rows = 0 end
  for b = 1, rows do
    list[b] = {}
    for i = 1, draw(1000 * seed + 10 * k + of, b, 0, 3) do list[b][i] = 1e6 * k + 1e4 * of + 100 * b + i end
  end
  return list
end

local function key_names(n, prefix)
  local names = {}
  for i = 1, n do names[i] = (prefix or "f") .. i end
  return names
end

local function made(of, keys, seed, o, device)
  local values, lengths, weights, strides = {}, {}, {}, {}
  for k = 1, #keys do
    local list = bags(of, k, seed, o)
    strides[k] = { #list }
    for _, bag in ipairs(list) do
      lengths[#lengths + 1] = #bag
      for _, id in ipairs(bag) do values[#values + 1], weights[#weights + 1] = id, id / 7 end
    end
  end
  return KJT { keys = keys, values = peri.tensor(values, o.ids or "i64", device),
    lengths = peri.tensor(lengths, o.lengths or "i32", device), weights = o.weighted
    and peri.tensor(weights, "f32", device) or nil, stride_per_key_per_rank = o.variable and strides or nil,
    stride = not o.variable and (#keys > 0 and strides[1][1] or 0) or nil }
end

local function order_of(n, stagger)
  return KJT.recat(1, n, stagger)
end

local function verify(kjt, world, keys, splits, seed, o)
  local first, n = 0, world.world_size
  for r = 1, world.rank_number do first = first + splits[r] end
  local mine, order = splits[world.rank_number + 1], order_of(n, o.stagger or 1)
  local values, lengths, weights, strides = {}, {}, {}, {}
  for i = 1, mine do
    strides[i] = {}
    for p = 1, n do
      local list = bags(order[p], first + i, seed, o)
      strides[i][p] = #list
      for _, bag in ipairs(list) do
        lengths[#lengths + 1] = #bag
        for _, id in ipairs(bag) do values[#values + 1], weights[#weights + 1] = id, id / 7 end
      end
    end
  end
  local names = {}
  for i = 1, mine do names[i] = keys[first + i] end
  assert.same(names, kjt:keys())
  assert.same(values, kjt:values():to_list())
  assert.same(lengths, kjt:lengths():to_list())
  assert.equal(o.ids or "i64", kjt:values():dtype())
  assert.equal(o.lengths or "i32", kjt:lengths():dtype())
  if o.weighted then assert.same(peri.tensor(weights):to_list(), kjt:weights():to_list()) end
  assert.equal(o.weighted or false, kjt:is_weighted())
  if n > 1 and o.variable then assert.same(strides, kjt:stride_per_key_per_rank()) end
  kjt:sync():validate()
end

local function splits_of(n, seed, keys)
  local splits, left = {}, keys
  for r = 1, n - 1 do
    splits[r] = math.min(left, draw(seed, r, 0, 3))
    left = left - splits[r]
  end
  splits[n] = left
  return splits
end

local kinds = {
  { "plain", {} }, { "weighted", { weighted = true } }, { "variable", { variable = true } },
  { "variable and weighted, i32 ids, i64 lengths", { variable = true, weighted = true, ids = "i32", lengths = "i64" } },
  { "a rank without a batch", { empty = 0 } },
}

describe("KJTAllToAll", function()
  for _, kind in ipairs(kinds) do
    worlds.each("moves what it should: " .. kind[1], function(world, device, n)
      local rank = world.rank_number
      for stagger = 1, n do
        if n % stagger == 0 then
          for seed = 1, 3 do
            local o = peri.util.copy(kind[2])
            o.stagger = stagger
            local count = draw(seed, 77, 0, 2 * n + 1)
            local keys, splits = key_names(count), splits_of(n, seed, count)
            local input = made(rank, keys, seed, o, device)
            local sizes = dist.KJTAllToAll(world, splits, stagger)(input)
            local tensors = sizes:wait()
            local known = tensors:splits()
            for r = 1, n do
              if not o.variable and count > 0 then assert.equal(#bags(r - 1, 1, seed, o), known.stride_per_rank[r]) end
            end
            verify(tensors:wait(), world, keys, splits, seed, o)
          end
        end
      end
    end)
  end

  worlds.each("keeps batches apart, in any order of waiting", function(world, device, n)
    local rank, keys, splits = world.rank_number, key_names(n), {}
    for r = 1, n do splits[r] = 1 end
    local a2a, waiting = dist.KJTAllToAll(world, splits), {}
    for seed = 1, 4 do waiting[seed] = a2a(made(rank, keys, seed, {}, device)) end
    for _, seed in ipairs(rank % 2 == 0 and { 3, 1, 4, 2 } or { 2, 4, 1, 3 }) do
      verify(waiting[seed]:wait():wait(), world, keys, splits, seed, {})
    end
  end)

  worlds.each("fuses the sizes of several modules into one message", function(world, device, n)
    local rank, groups = world.rank_number, {}
    for i = 1, n do groups[i] = i - 1 end
    local other = world:new_group(groups, "other")
    local requests, expected = {}, {}
    for i, kind in ipairs(kinds) do
      local keys = key_names(n + i, "m" .. i .. "_")
      local splits = splits_of(n, i, n + i)
      local pg = i == 3 and other or world
      local d = dist.KJTAllToAll(pg, splits)
      requests[#requests + 1] = d:defer(made(rank, keys, i, kind[2], device))
      expected[#requests] = { pg, keys, splits, i, kind[2] }
    end
    table.insert(requests, 2, dist.NoWait(dist.NoWait "data parallel"))
    table.insert(expected, 2, false)
    local before = tonumber(world:record():match "operation (%d+)[^\n]*\n[^\n]*$" or 0)
    local tensors = dist.FusedKJTListSplitsAwaitable(requests):wait()
    assert.is_number(before)
    assert.equal(#requests, #tensors)
    for i = #tensors, 1, -1 do
      local e = expected[i]
      if e then verify(tensors[i]:wait(), e[1], e[2], e[3], e[4], e[5])
      else assert.equal("data parallel", tensors[i]:wait()) end
    end
  end)

  --- Runs of more than 64 KiB are placed past the caches.
  worlds.each("moves many ids at once", function(world, device, n)
    local rank, keys, splits, count = world.rank_number, key_names(n), {}, 10000
    for r = 1, n do splits[r] = 1 end
    local a2a = dist.KJTAllToAll(world, splits)
    for case = 1, 3 do
      local function odd_of(of)
        return case == 1 and -1 or (case == 2 and of == n - 1 or case == 3) and -2 ^ 40 - of or 2 ^ 31 - 1
      end
      local values = peri.full({ n * count }, rank, "i64", device)
      for k = 0, n - 1 do values:slice(1, k * count + 77, k * count + 78):fill(odd_of(rank)) end
      local kjt = KJT { keys = keys, values = values, lengths = peri.full({ n * 10 }, count / 10, "i32", device) }
      local got = a2a(kjt):wait():wait():values()
      assert.same({ n * count }, got:shape())
      for of = 0, n - 1 do
        assert.equal(odd_of(of), got:item(of * count + 77))
        for _, i in ipairs { 0, 76, 78, count - 1 } do assert.equal(of, got:item(of * count + i)) end
      end
    end
  end)

  worlds.each("A1: unequal batches", function(world, device)
    local rank = world.rank_number
    local input = rank == 0 and KJT.from_lists { keys = { "A", "B", "C" }, { { 1, 2 }, { 3 } }, { { 4 }, {} },
      { { 5 }, { 6, 7 } }, device = device } or KJT.from_lists { keys = { "A", "B", "C" }, { { 8 } }, { { 9, 10 } },
      { {} }, device = device }
    local sizes = dist.KJTAllToAll(world, { 2, 1 })(input):wait()
    assert.same(rank == 0 and { stride_per_rank = { 2, 1 }, input_splits = { 4, 3 }, output_splits = { 4, 3 } }
      or { stride_per_rank = { 2, 1 }, input_splits = { 3, 0 }, output_splits = { 3, 0 } }, sizes:splits())
    local kjt = sizes:wait()
    assert.same(rank == 0 and { "A", "B" } or { "C" }, kjt:keys())
    assert.equal(3, kjt:stride())
    assert.same(rank == 0 and { 2, 1, 1, 1, 0, 2 } or { 1, 2, 0 }, kjt:lengths():to_list())
    assert.same(rank == 0 and { 1, 2, 3, 8, 4, 9, 10 } or { 5, 6, 7 }, kjt:values():to_list())
  end, { sizes = { 2 } })

  worlds.each("leaves nothing behind, dropped works included", function(world, device, n)
    local keys, splits = key_names(n), {}
    for r = 1, n do splits[r] = 1 end
    local a2a = dist.KJTAllToAll(world, splits)
    a2a(made(world.rank_number, keys, 1, {}, device)):wait():wait()
    peri.scope(function()
      a2a(made(world.rank_number, keys, 2, {}, device))
      a2a(made(world.rank_number, keys, 3, {}, device)):wait()
      verify(a2a(made(world.rank_number, keys, 4, {}, device)):wait():wait(), world, keys, splits, 4, {})
    end)
    world:barrier():wait()
  end)
end)

-- -- SparseFeaturesAllToAll -------------------------------------------------------------------------------------------

describe("SparseFeaturesAllToAll", function()
  --- The example of the document: A.V0 is 100, A.V1 is 101, ..., B.V0 200, ...
  local function lists(rank, scores)
    local V = { { A = { { 0 }, {}, { 1, 2 } }, B = { {}, { 0 }, { 1 } }, C = { { 0 }, { 1 }, {} },
      D = { {}, { 0 }, {} } }, { A = { { 3 }, { 4 }, {} }, B = { {}, { 2 }, { 3, 4 } }, C = { { 2 }, { 3 }, {} },
      D = { { 1 }, { 2 }, { 3, 4 } } } }
    local a = { keys = scores and { "A", "B", "C", "D" } or { "A", "B", "C" } }
    for i, key in ipairs(a.keys) do
      a[i] = {}
      for b, bag in ipairs(V[rank + 1][key]) do
        a[i][b] = {}
        for j, v in ipairs(bag) do a[i][b][j] = 100 * i + v end
      end
    end
    return a
  end
  local function weighted(a)
    a.weights = {}
    for k = 1, #a.keys do
      a.weights[k] = {}
      for b, bag in ipairs(a[k]) do a.weights[k][b] = peri.util.map(bag, function(id) return id / 2 end) end
    end
    return a
  end
  local function check(kjt, want)
    assert.same(want.keys, kjt:keys())
    assert.equal(6, kjt:stride())
    for k, key in ipairs(want.keys) do
      local jt = kjt:get(key)
      assert.same(want[k], jt:values():to_list(), key)
      assert.same(want.lengths[k], jt:lengths():to_list(), key)
      if want.weighted then
        assert.same(peri.util.map(want[k], function(id) return id / 2 end), jt:weights():to_list())
      end
    end
  end

  worlds.each("moves the features of the documented example", function(world, device)
    local rank = world.rank_number
    local function with_device(a)
      a.device = device
      return KJT.from_lists(a)
    end
    local sfa2a = dist.SparseFeaturesAllToAll { pg = world, id_list_features_per_rank = { 2, 1 },
      id_score_list_features_per_rank = { 1, 3 }, device = device }
    local awaitable = sfa2a(dist.SparseFeatures { id_list_features = with_device(lists(rank)),
      id_score_list_features = with_device(weighted(lists(rank, true))) })
    local out = awaitable:wait()
    assert.equal(out, awaitable:wait())
    local A, B = { 100, 101, 102, 103, 104 }, { 200, 201, 202, 203, 204 }
    local C, D = { 300, 301, 302, 303 }, { 400, 401, 402, 403, 404 }
    local lA, lB, lC, lD = { 1, 0, 2, 1, 1, 0 }, { 0, 1, 1, 0, 1, 2 }, { 1, 1, 0, 1, 1, 0 }, { 0, 1, 0, 1, 1, 2 }
    if rank == 0 then
      check(out.id_list_features, { keys = { "A", "B" }, A, B, lengths = { lA, lB } })
      check(out.id_score_list_features, { keys = { "A" }, A, lengths = { lA }, weighted = true })
    else
      check(out.id_list_features, { keys = { "C" }, C, lengths = { lC } })
      check(out.id_score_list_features, { keys = { "B", "C", "D" }, B, C, D, lengths = { lB, lC, lD },
        weighted = true })
    end
    local half = sfa2a(dist.SparseFeatures { id_score_list_features = with_device(weighted(lists(rank, true))) }):wait()
    assert.is_false(half.id_list_features)
    assert.equal(rank == 0 and 1 or 3, #half.id_score_list_features:keys())
  end, { sizes = { 2 } })

  worlds.each("moves both kinds, staggered too", function(world, device, n)
    local rank, keys = world.rank_number, key_names(n + 2)
    local lists_per_rank, scores_per_rank = splits_of(n, 3, n + 2), splits_of(n, 4, n + 2)
    for stagger = 1, n do
      if n % stagger == 0 then
        local sfa2a = dist.SparseFeaturesAllToAll { pg = world, id_list_features_per_rank = lists_per_rank,
          id_score_list_features_per_rank = scores_per_rank, stagger = stagger }
        local out = sfa2a(dist.SparseFeatures { id_list_features = made(rank, keys, 1, {}, device),
          id_score_list_features = made(rank, keys, 2, { weighted = true, empty = n - 1 }, device) }):wait()
        verify(out.id_list_features, world, keys, lists_per_rank, 1, { stagger = stagger })
        verify(out.id_score_list_features, world, keys, scores_per_rank, 2,
          { stagger = stagger, weighted = true, empty = n - 1 })
      end
    end
  end)
end)

-- -- modules of embeddings --------------------------------------------------------------------------------------------

describe("modules of embeddings", function()
  worlds.each("PooledEmbeddingsAllToAll: equal batches, callbacks, A4", function(world, device)
    local n, rank = world.world_size, world.rank_number
    local dims = {}
    for r = 1, n do dims[r] = r end
    local calls = 0
    local a2a = dist.PooledEmbeddingsAllToAll { pg = world, dim_sum_per_rank = dims, device = device, callbacks = {
      function(t) calls = calls + 1 return peri.nn.functional.affine and peri.nn.functional.affine(t, 2, 0) or t end,
    } }
    local x = peri.Tensor.full({ 2 * n, rank + 1 }, rank + 1, "f32", device):requires_grad()
    local out = a2a(x)
    assert.same({ 2, n * (n + 1) / 2 }, out:shape()) -- waits
    assert.equal(1, calls)
    assert.equal(out:wait(), out:wait())
    assert.equal(1, calls)
    out:wait():backward(peri.Tensor.full({ 2, n * (n + 1) / 2 }, 1, "f32", device))
    assert.equal(2 * n * (rank + 1), #x:grad():to_list())
  end)

  worlds.each("KJT out, rows back: SequenceEmbeddingsAllToAll", function(world, device, n)
    local rank = world.rank_number
    for _, o in ipairs { {}, { variable = true }, { stagger = n % 2 == 0 and 2 or 1 } } do
      local stagger = o.stagger or 1
      local keys, splits = key_names(n + 2), splits_of(n, 5, n + 2)
      local input = made(rank, keys, 5, o, device)
      local sizes = dist.KJTAllToAll(world, splits, stagger)(input):wait()
      local known = sizes:splits()
      local got = sizes:wait()
      -- An embedding that is the id itself must come back to where the id was.
      local ids = got:values():to "f32"
      local rows = ids:reshape(ids:numel(), 1)
      local back = dist.SequenceEmbeddingsAllToAll { pg = world, features_per_rank = splits } {
        local_embs = rows, lengths = got:lengths(), input_splits = known.input_splits,
        output_splits = known.output_splits, batch_size_per_rank = not o.variable and known.stride_per_rank or nil,
        stagger = stagger, stride_per_key_per_rank = o.variable and n > 1 and got:stride_per_key_per_rank()
          or o.variable and input:stride_per_key_per_rank() or nil,
      }:wait()
      assert.same(input:values():to "f32":to_list(), back:to_list())
    end
  end)

  worlds.each("the others, with their defaults", function(world, device, n)
    local rank = world.rank_number
    local x = peri.Tensor.full({ 2 * n, 3 }, rank + 1, "f32", device):requires_grad()
    local scatter = dist.PooledEmbeddingsReduceScatter { pg = world }
    local total = n * (n + 1) / 2
    assert.same({ { total, total, total }, { total, total, total } }, scatter(x):wait():to_table())
    local splits = {}
    for r = 1, n do splits[r] = r == 1 and 2 * n or 0 end
    assert.same({ rank == 0 and 2 * n or 0, 3 }, scatter(x, splits):shape())
    assert.same({ 2 * n * n, 3 }, dist.PooledEmbeddingsAllGather { pg = world }(x):shape())
    local sizes = {}
    for r = 1, n do sizes[r] = { 1, r } end
    local flat = peri.Tensor.full({ 2 * n + 3 * n * (n + 1) / 2 }, 1, "f32", device)
    local part = dist.VariableBatchPooledEmbeddingsReduceScatter { pg = world }(flat, sizes, { 2, 3 })
    assert.same({ 2 + 3 * (rank + 1) }, part:shape())
    if n > 1 then assert.equal(n, part:wait():item(0)) end
    local pre, own, dims = {}, {}, {}
    for r = 1, n do pre[r], own[r], dims[r] = rank + 1, { r }, { 2 } end
    local v = dist.VariableBatchPooledEmbeddingsAllToAll { pg = world, emb_dim_per_rank_per_feature = dims }
    assert.same({ 2 * n * (rank + 1) }, v(peri.Tensor.full({ n * (n + 1) }, 1, "f32", device), own, pre):shape())
  end)
end)

-- -- what is refused --------------------------------------------------------------------------------------------------

describe("exchanges refuse", function()
  worlds.each("what cannot be, and go on", function(world, device, n)
    local function fails(pattern, f, ...)
      local ok, err = pcall(f, ...)
      assert.is_false(ok)
      assert.truthy(tostring(err):find(pattern, 1, true), tostring(err))
    end
    local splits, keys = {}, key_names(n)
    for r = 1, n do splits[r] = 1 end
    local few = key_names(n + 1)
    fails("splits needs one number for each of", dist.KJTAllToAll, world, { 1, 2, 3, 4, 5, 6, 7, 8, 9 })
    fails("splits[1] is -1", dist.KJTAllToAll, world, { -1, unpack(splits, 2) })
    fails("stagger is 9", dist.KJTAllToAll, world, splits, 9)
    if n == 3 then fails("stagger 2, allowed: divisors of the 3 ranks", dist.KJTAllToAll, world, splits, 2) end
    local a2a = dist.KJTAllToAll(world, splits)
    fails(("the key splits sum to %d, the kjt has %d keys"):format(n, n + 1), a2a, made(0, few, 1, {}, device))
    fails("a table, wanted a KeyedJaggedTensor", a2a, {})
    fails("argument 'dim_sum_per_rank' is missing", dist.PooledEmbeddingsAllToAll, { pg = world })
    fails("dim_sum_per_rank[1] is 1.5", dist.PooledEmbeddingsAllToAll,
      { pg = world, dim_sum_per_rank = { 1.5, unpack(splits, 2) } })
    if n > 1 then
      local uneven = peri.Tensor.ones({ n + 1, 1 }, "f32", device)
      fails("rows for", dist.PooledEmbeddingsAllToAll { pg = world, dim_sum_per_rank = splits }, uneven)
    end
    fails("neither id_list_features", dist.SparseFeaturesAllToAll { pg = world, id_list_features_per_rank = splits,
      id_score_list_features_per_rank = splits }, dist.SparseFeatures {})
    local tensors = a2a(made(world.rank_number, keys, 1, {}, device)):wait()
    verify(tensors:wait(), world, keys, splits, 1, {})
    fails("ask for them before the KJT", function() tensors:splits() end)
  end, { sizes = { 1, 2, 3 } })

  --- Ranks that disagree: all of them learn it, by name.
  local disagreements = {
    { "keys", function(rank, device)
      return made(rank, rank == 1 and { "f2", "f1" } or { "f1", "f2" }, 1, {}, device), { 1, 1 }
    end }, { "key splits", function(rank, device) return made(rank, { "f1", "f2" }, 1, {}, device), rank == 1
      and { 2, 0 } or { 1, 1 } end },
    { "weights", function(rank, device)
      return made(rank, { "f1", "f2" }, 1, { weighted = rank == 1 }, device), { 1, 1 }
    end }, { "dtypes", function(rank, device) return made(rank, { "f1", "f2" }, 1,
      { ids = rank == 1 and "i32" or "i64" }, device), { 1, 1 } end },
    { "the kind of batch", function(rank, device)
      return made(rank, { "f1", "f2" }, 1, { variable = rank == 1 }, device), { 1, 1 }
    end },
  }
  for _, d in ipairs(disagreements) do
    worlds.each("ranks that disagree on " .. d[1], function(world, device)
      local kjt, splits = d[2](world.rank_number, device)
      local ok, err = pcall(function() return dist.KJTAllToAll(world, splits)(kjt):wait():wait() end)
      assert.is_false(ok)
      assert.truthy(tostring(err):find("rank", 1, true), tostring(err))
      assert.is_false(world:is_healthy())
    end, { sizes = { 2 }, timeout = 2, only = "sim" })
  end

  --- On devices that the host can access the KJT's constructor says it.
  worlds.each("malformed lengths, on all ranks", function(world, device)
    local rank = world.rank_number
    local lengths = rank == 1 and { 1, -2 } or { 1, 1 }
    local kjt = KJT { keys = { "a", "b" }, values = peri.tensor({ 5, 6 }, "i64", device),
      lengths = peri.tensor(lengths, "i32", device) }
    local ok, err = pcall(function() return dist.KJTAllToAll(world, { 1, 1 })(kjt):wait():wait() end)
    assert.is_false(ok)
    if rank == 1 then assert.truthy(tostring(err):find("key 'b', sample 0", 1, true), tostring(err)) end
    assert.is_false(world:is_healthy())
  end, { sizes = { 2 }, devices = { "opaque" }, timeout = 2, only = "sim" })
end)
