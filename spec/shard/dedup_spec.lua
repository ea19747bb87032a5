-- Index dedup: what comes back and what is learned is what it is without, and each id travels once.
-- mpirun: 3
local peri = require "perilune"
local golden = require "spec.support.golden"
local sim = require "perilune.dist.sim"
local worlds = require "spec.support.worlds"
local plan, shard = peri.plan, peri.shard

-- a and b share nothing; f1 and f2 share a's rows; f3 looks into b and c; f4 is another of b and c
local configs = { { "a", 20, { "f1", "f2" } }, { "b", 9, { "f3", "f4" } }, { "c", 12, { "f3", "f4" } },
  { "d", 7, { "f5" } } }
local limit = { f1 = 20, f2 = 20, f3 = 9, f4 = 9, f5 = 7 }
local keys = { "f5", "f2", "more", "f3", "f1", "f4" }
local names = { "f1", "f2", "f3@b", "f4@b", "f3@c", "f4@c", "f5" }

local kinds = {
  table_wise = function(i, n) return plan.table_wise(i * 3 % n) end, row_wise = function() return plan.row_wise() end,
  column_wise = function(i, n) return plan.column_wise { ranks = { n - 1, i % n } } end,
  data_parallel = function() return plan.data_parallel { compute_kernel = "fused" } end,
  table_row_wise = function(i, n) return plan.table_row_wise(i % math.ceil(n / 2)) end,
  grid_shard = function() return plan.grid_shard() end,
  dense = function(i, n)
    return i % 2 == 0 and plan.row_wise { compute_kernel = "dense" }
      or plan.table_wise(n - 1, { compute_kernel = "dense" })
  end,
}
local order = { "row_wise", "data_parallel", "column_wise", "table_wise" }
function kinds.mixed(i, n) return kinds[order[i]](i, n) end

local function make(kind, world, device, n, more)
  local entries = {}
  local tables = peri.util.map(configs, function(c, i)
    entries[c[1]] = kinds[kind](i, n)
    return peri.EmbeddingConfig { name = c[1], num_embeddings = c[2], embedding_dim = 8, feature_names = c[3] }
  end)
  local a = { tables = tables, plan = entries, group = world, device = device, seed = 5,
    fused_params = { optimizer = "rowwise_adagrad", learning_rate = 0.3 } }
  for name, value in pairs(more or {}) do a[name] = value end
  return shard.ShardedEmbeddingCollection(a)
end

local function generator(seed)
  local x = seed
  return function(n)
    x = x * 16807 % 2147483647
    return x % n
  end
end

--- A batch with many equal ids, some of them pruned; fixed or variable.
local function draw(seed, device, variable)
  local below, values, lengths, strides, total = generator(seed), {}, {}, {}, 0
  for k, key in ipairs(keys) do
    strides[k] = { variable and 1 + below(4) or seed % 5 }
    for _ = 1, strides[k][1] do
      local n = below(6)
      lengths[#lengths + 1] = n
      for _ = 1, n do
        total = total + 1
        values[total] = below(9) == 0 and -1 or below(limit[key] or 50)
      end
    end
  end
  return peri.KeyedJaggedTensor { keys = keys, values = peri.tensor(values, "i64", device, { total }),
    lengths = peri.tensor(lengths, "i32", device, { #lengths }), stride = not variable and seed % 5 or nil,
    stride_per_key_per_rank = variable and strides or nil,
    inverse_indices = variable and { keys, peri.zeros({ #keys, 1 }, "i64", device) } or nil }
end

--- Ids of a batch that look into something, and how many travel: each once by what its tables are.
local function count(kjt)
  local asked, sent = 0, 0
  for _, group in ipairs { { "f1", "f2" }, { "f3", "f4" }, { "f5" } } do
    local seen = {}
    for _, f in ipairs(group) do
      for _, id in ipairs(kjt:get(f):values():to_list()) do
        asked = asked + 1
        if not seen[id] then sent = sent + 1 end
        seen[id] = true
      end
    end
  end
  return asked, sent
end

local function step(ec, kjt)
  local result, loss, rows = ec(kjt), nil, {}
  for i, name in ipairs(names) do
    local values = result[name]:values()
    rows[name] = { values:to_list(), result[name]:lengths():to_list() }
    local n, grad = values:size(1), {}
    for k = 1, n * 8 do grad[k] = math.sin(k * i) end
    local term = (values * peri.tensor(grad, "f32", values:device(), { n, 8 })):sum()
    loss = loss and loss + term or term
  end
  loss:backward()
  return rows
end

local function same_shards(a, b, tolerance)
  local other = b:local_shards()
  for i, s in ipairs(a:local_shards()) do
    if s.dense then
      local want, got = s.leaf():grad(), other[i].leaf():grad()
      golden.assert_near(want:to_list(), got:to_list(), tolerance, s.table)
    end
    for _, name in ipairs(s.dense and {} or s.names()) do
      golden.assert_near(s.state(name):to_list(), other[i].state(name):to_list(), tolerance, s.table .. "." .. name)
    end
  end
end

local function run(kind, world, device, n, more)
  more = more or {}
  local fields = { fused_params = more.fused_params }
  local plain = make(kind, world, device, n, fields)
  fields.use_index_dedup = true
  local dedup = make(kind, world, device, n, fields)
  local asked, sent = 0, 0
  for k = 1, 3 do
    local seed = 31 * k + 7 * world:rank()
    local kjt = draw(seed, device, more.variable)
    local x, y = count(kjt)
    asked, sent = asked + x, sent + y
    local tolerance = more.exact and { abs = 0, rel = 0 } or { abs = 2e-6, rel = 2e-5 }
    local want, got = step(plain, kjt), step(dedup, kjt)
    for name, rows in pairs(want) do
      assert.same(rows[2], got[name][2])
      -- rows come as they are
      golden.assert_near(rows[1], got[name][1], k == 1 and { abs = 0, rel = 0 } or tolerance, name)
    end
    same_shards(plain, dedup, tolerance)
  end
  return dedup, asked, sent
end

describe("use_index_dedup", function()
  it("is among the arguments that those who mistype it are told", function()
    for name, others in peri.util.ordered { EmbeddingBagCollectionSharder = "", EmbeddingCollectionSharder = "",
      ShardedEmbeddingBagCollection = "", ShardedEmbeddingCollection = "need_indices, .*" } do
      assert.error_matches(function() peri.shard[name] { use_dedup = true } end, "no argument 'use_dedup'; allowed: .*"
        .. others .. "use_index_dedup")
    end
    assert.error_matches(function() peri.shard.EmbeddingBagCollectionSharder { use_index_dedup = 3 } end,
      "use_index_dedup is 3, wanted true")
  end)
end)

describe("index dedup changes nothing,", function()
  for kind in peri.util.ordered(kinds) do
    worlds.each(kind, function(world, device, n)
      local dedup, asked, sent = run(kind, world, device, n)
      assert.same({ asked = asked, sent = sent }, dedup:index_dedup_counts())
      assert.is_true(asked == 0 or sent < asked)
    end, { sizes = { 1, 2, 3 }, local_size = 2 })
  end
  worlds.each("of variable batches", function(world, device, n) run("mixed", world, device, n, { variable = true }) end,
    { sizes = { 1, 2 } })
  worlds.each("to the last bit with exact", function(world, device, n)
    local dedup = run("mixed", world, device, n,
      { exact = true, fused_params = { optimizer = "sgd", learning_rate = 0.3, exact = true } })
    assert.is_nil(dedup:index_dedup_counts()) -- sums at home would round
  end, { sizes = { 2, 3 } })
  worlds.each("with gradients that are clipped", function(world, device, n)
    local dedup = run("row_wise", world, device, n,
      { fused_params = { optimizer = "sgd", learning_rate = 0.3, gradient_clipping = true, max_gradient = 0.3 } })
    assert.is_nil(dedup:index_dedup_counts())
  end, { sizes = { 2 } })
end)

-- Bags: a and c are one-hot (c sometimes empty), b has bags of several ids, and shares f3 with c.
local bag_configs = { { "a", 20, { "f1", "f2" }, "SUM" }, { "b", 12, { "f3", "f4" }, "MEAN" },
  { "c", 9, { "f3" }, "SUM" } }

local function make_bags(kind, world, device, n, more)
  local entries = {}
  local tables = peri.util.map(bag_configs, function(c, i)
    entries[c[1]] = kinds[kind](i, n)
    return peri.EmbeddingBagConfig { name = c[1], num_embeddings = c[2], embedding_dim = 8 * i, feature_names = c[3],
      pooling = c[4] }
  end)
  local a = { tables = tables, plan = entries, group = world, device = device, seed = 5,
    fused_params = { optimizer = "rowwise_adagrad", learning_rate = 0.3 } }
  for name, value in pairs(more or {}) do a[name] = value end
  return shard.ShardedEmbeddingBagCollection(a)
end

--- A batch, the ids asked for, and those that travel.
local function draw_bags(seed, device, more)
  local below, values, lengths, asked, sent = generator(seed), {}, {}, 0, 0
  local order_of, samples = { "f4", "f2", "f3", "f1" }, seed % 8 + (more.samples or 0)
  for _, key in ipairs(order_of) do
    local seen, different, first, longest = {}, 0, asked, 0
    for _ = 1, samples do
      local n = key == "f4" and below(4) or key == "f3" and below(2) or key == "f1" and more.samples and below(6) or 1
      lengths[#lengths + 1] = n
      for _ = 1, n do
        local id = below(6) == 0 and -1 or below(5)
        values[#values + 1] = id
        asked = asked + 1
        different = different + (seen[id] and 0 or 1)
        seen[id] = true
      end
      longest = math.max(longest, n)
    end
    local several = longest > 1 or more.weighted and longest > 0
    sent = sent + (several and (different >= samples or more.rounded) and asked - first or different)
  end
  local weights = {}
  for i = 1, #values do weights[i] = math.cos(i) end
  weights = more.weighted and peri.tensor(weights, "f32", device, { #values }) or nil
  if more.weights_grad then weights:requires_grad() end
  return peri.KeyedJaggedTensor { keys = order_of, values = peri.tensor(values, "i64", device, { #values }),
    weights = weights, lengths = peri.tensor(lengths, "i32", device, { #lengths }), stride = samples }, asked, sent,
      weights
end

local function run_bags(kind, world, device, n, more)
  more = more or {}
  local fields = { fused_params = more.fused_params, is_weighted = more.weighted }
  local plain = make_bags(kind, world, device, n, fields)
  fields.use_index_dedup = true
  local dedup, asked, sent = make_bags(kind, world, device, n, fields), 0, 0
  local exact = more.fused_params and more.fused_params.exact
  for k = 1, 3 do
    local kjt, x, y, weights = draw_bags(29 * k + 5 * world:rank(), device, more)
    asked, sent = asked + x, sent + y
    local lists, gradients = {}, {}
    for i, ebc in ipairs { plain, dedup } do
      local kt = ebc(kjt)
      local rows, grad = kt:values(), {}
      lists[i] = rows:to_list()
      for g = 1, #lists[i] do grad[g] = math.sin(g * k) end
      rows:backward(peri.tensor(grad, rows:dtype(), device, { kjt:stride(), #lists[i] / math.max(1, kjt:stride()) }))
      if more.weights_grad then
        gradients[i] = weights:grad():to_list()
        weights:set_grad(nil)
      end
    end
    local tolerance = exact and { abs = 0, rel = 0 } or { abs = 2e-6, rel = 2e-5 }
    golden.assert_near(lists[1], lists[2], tolerance)
    if more.weights_grad then golden.assert_near(gradients[1], gradients[2], { abs = 1e-5, rel = 2e-5 }) end
    same_shards(plain, dedup, tolerance)
  end
  return dedup, asked, sent
end

describe("index dedup of bags changes nothing,", function()
  for kind in peri.util.ordered(kinds) do
    worlds.each(kind, function(world, device, n)
      local dedup, asked, sent = run_bags(kind, world, device, n)
      assert.same({ asked = asked, sent = sent }, dedup:index_dedup_counts())
    end, { sizes = { 1, 2, 3 }, local_size = 2 })
  end
  -- More bags than there are ids, so that most features have fewer ids than bags.
  for kind in peri.util.ordered(kinds) do
    for _, weighted in ipairs { false, true } do
      worlds.each(kind .. (weighted and ", of several ids with weights" or ", of several ids"),
        function(world, device, n)
        local dedup, asked, sent = run_bags(kind, world, device, n, { samples = 9, weighted = weighted,
          weights_grad = weighted and kind ~= "dense" })
        assert.same({ asked = asked, sent = sent }, dedup:index_dedup_counts())
        assert.is_true(sent < asked / 2)
      end, { sizes = { weighted and 3 or 2 }, local_size = 2 })
    end
  end
  worlds.each("of several ids, rows that come rounded", function(world, device, n)
    local dedup, asked, sent = run_bags("mixed", world, device, n, { samples = 9, rounded = true,
      fused_params = { optimizer = "sgd", learning_rate = 0.3, output_dtype = "FP16" } })
    assert.same({ asked = asked, sent = sent }, dedup:index_dedup_counts())
  end, { sizes = { 1, 2 } })
  worlds.each("to the last bit with exact", function(world, device, n)
    local dedup = run_bags("mixed", world, device, n,
      { fused_params = { optimizer = "sgd", learning_rate = 0.3, exact = true } })
    assert.is_nil(dedup:index_dedup_counts())
  end, { sizes = { 2 } })
end)

describe("index dedup", function()
  --- Bytes that this rank has sent on a channel since its record was `before`.
  local function sent_bytes(world, channel, before)
    local size, bytes = { f32 = 4, i32 = 4, i64 = 8 }, 0
    for dtype, n in world:record():sub(#before + 1):gmatch("all_to_all (%w+) on channel " .. channel
      .. ", (%d+) out") do
      bytes = bytes + size[dtype] * n
    end
    return bytes
  end

  worlds.each("sends each id and row once", function(world, device, n)
    local sent = {}
    for i, on in ipairs { false, true } do
      local group = world:new_group({ 0, 1 }, "dedup" .. i)
      local ec = make("row_wise", group, device, n, { use_index_dedup = on })
      local result = ec(peri.KeyedJaggedTensor { keys = { "f1", "f2", "f3", "f4", "f5" }, device = device,
        values = { 1, 1, 1, 1, 1, 19, 19, 19, 2, 2, 2, 2, 19 }, lengths = { 5, 8, 0, 0, 0 } })
      local ids, rows = sent_bytes(group, "ids", ""), sent_bytes(group, "rows", "")
      result.f2:values():sum():backward()
      sent[i] = { ids = ids, rows = rows, gradients = sent_bytes(group, "rows", "") - rows }
      if on then assert.same({ asked = 13, sent = 3 }, ec:index_dedup_counts()) end
      group:release()
    end
    -- it has the rows 1 and 2, the other one 19; both ask for the same, 9 times and 4 times
    local first = world:rank() == 0
    local row = 8 * 4
    assert.same({ ids = 13 * 4, rows = (first and 9 or 4) * row, gradients = (first and 4 or 9) * row }, sent[1])
    assert.same({ ids = 3 * 4, rows = (first and 2 or 1) * row, gradients = (first and 1 or 2) * row }, sent[2])
  end, { sizes = { 2 } })

  worlds.each("sends each one-hot bag once", function(world, device, n)
    local sent = {}
    for i, on in ipairs { false, true } do
      local group = world:new_group({ 0, 1 }, "bags" .. i)
      local ebc = make_bags("table_wise", group, device, n, { use_index_dedup = on })
      local rows = ebc(peri.KeyedJaggedTensor { keys = { "f1", "f2", "f3", "f4" }, device = device, stride = 4,
        values = { 5, 5, 5, 7, 1, 1, 1, 1 }, lengths = { 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0,
          0 } }):values():to_list()
      sent[i] = { rows = rows, bytes = sent_bytes(group, "rows", "") }
      group:release()
    end
    assert.same(sent[1].rows, sent[2].rows)
    -- rank 1 has table a, where 4 bags of f1 become 2 and 4 of f2 one, and c; rank 0 has b; features of empty bags only
    -- are as they were
    local last = world:rank() == 1
    local others = last and 4 * 24 or 8 * 16
    assert.equal(((last and 8 * 8 or 0) + others) * 4, sent[1].bytes)
    assert.equal(((last and 3 * 8 or 0) + others) * 4, sent[2].bytes)
  end, { sizes = { 2 } })

  worlds.each("sends each id of bags of several once", function(world, device, n)
    local sent = {}
    for i, on in ipairs { false, true } do
      local group = world:new_group({ 0, 1 }, "several" .. i)
      local ebc = make_bags("table_wise", group, device, n, { use_index_dedup = on })
      local rows = ebc(peri.KeyedJaggedTensor { keys = { "f1", "f2", "f3", "f4" }, device = device, stride = 4,
        values = { 5, 5, 7, 7, 5, 7, 5, 7 }, lengths = { 3, 2, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 } }):values()
      local list, forward = rows:to_list(), sent_bytes(group, "rows", "")
      rows:sum():backward()
      sent[i] = { rows = list, ids = sent_bytes(group, "ids", ""), forward = forward,
        back = sent_bytes(group, "rows", "") - forward }
      if on then assert.same({ asked = 8, sent = 2 }, ebc:index_dedup_counts()) end
      group:release()
    end
    golden.assert_near(sent[1].rows, sent[2].rows, { abs = 1e-6, rel = 1e-6 })
    -- rank 1 has table a: of 4 bags of f1 with 8 ids come 2 rows of 8 columns
    local last = world:rank() == 1
    local function saved(name) return sent[1][name] - sent[2][name] end
    assert.equal(last and 2 * 8 * 4 or 0, saved "forward")
    assert.equal(last and 0 or 2 * 8 * 4, saved "back")
    assert.equal((6 + 2 + 2) * 4, saved "ids") -- 6 ids, and the lengths and factors (b is a mean) of 2 bags
  end, { sizes = { 2 } })

  worlds.each("of bags leaves bad ids where they are, on one rank too", function(world, device, n)
    local ebc = make_bags("row_wise", world, device, n, { use_index_dedup = true,
      fused_params = { optimizer = "sgd", learning_rate = 1, bounds_check_mode = "IGNORE" } })
    local bad = world:rank() == 0
    local rows = ebc(peri.KeyedJaggedTensor { keys = { "f1", "f2", "f3", "f4" }, device = device, stride = 2,
      values = { bad and 99 or 3, 3, 3, 3 }, lengths = { 1, 1, 1, 1, 0, 0, 0, 0 } })
    local f1, f2 = rows:values():slice(2, 0, 8):to_list(), rows:values():slice(2, 8, 16):to_list()
    for k = 1, 8 do
      assert.equal(bad and 0 or f2[k], f1[k])
      assert.equal(f2[k], f1[8 + k])
    end
  end, { sizes = { 1, 2 } })

  worlds.each("of sequences on some ranks only is an error on all", function(world, device, n)
    local last = world:rank() == n - 1
    local ec = make("row_wise", world, device, n,
      { use_index_dedup = last, fused_params = { optimizer = "sgd", learning_rate = 1,
      exact = n == 3 } }) -- also where it does nothing
    local ok, err = pcall(function()
      return ec(peri.KeyedJaggedTensor { keys = { "f1", "f2", "f3", "f4", "f5" }, values = { 1, 2, 3, 4, 5 },
        lengths = { 1, 1, 1, 1, 1 }, device = device })
    end)
    assert.is_false(ok)
    local want = ("rank %d has use_index_dedup true where rank 0 has false (the module)"):format(n - 1)
    assert.truthy(tostring(err.message or err):find(want, 1, true), tostring(err.message or err))
  end, { sizes = { 2, 3 }, only = "sim" })

  it("is what set_ec_index_dedup says, unless the sharder says it", function()
    sim.run(1, function(_, world)
      assert.is_false(shard.get_ec_index_dedup())
      local function of(sharder)
        local ec = peri.EmbeddingCollection { tables = { peri.EmbeddingConfig { name = "t", num_embeddings = 9,
          embedding_dim = 4, feature_names = { "f" } } }, fused_params = { optimizer = "sgd", learning_rate = 1 } }
        local model = peri.DistributedModelParallel { module = ec, group = world,
          plan = { [""] = { t = plan.row_wise() } }, sharders = sharder and { sharder } }
        return model.module:index_dedup_counts() ~= nil
      end
      assert.is_false(of())
      assert.is_true(of(shard.EmbeddingCollectionSharder { use_index_dedup = true }))
      shard.set_ec_index_dedup(true)
      assert.is_true(shard.get_ec_index_dedup())
      assert.is_true(of())
      assert.is_false(of(shard.EmbeddingCollectionSharder { use_index_dedup = false }))
    end, { device = "cpu" })
    assert.is_false(shard.get_ec_index_dedup()) -- a rank's own
  end)

  it("leaves the words for bad batches to the module", function()
    for words, f in pairs {
      ["feature 'f2', sample 1: id 20 at position 0 of the bag, allowed: 0..19"] = function(ec)
        ec(peri.KeyedJaggedTensor { keys = { "f1", "f2", "f3", "f4", "f5" }, values = { 20 },
          lengths = { 0, 0, 0, 1, 0, 0, 0, 0, 0, 0 } })
      end,
      ["feature 'f5'"] = function(ec)
        ec(peri.KeyedJaggedTensor { keys = { "f1", "f2", "f3", "f4" }, values = { 2 }, lengths = { 0, 0, 0, 1 } })
      end,
      ["table 'a', feature 'f2', sample 1: id 20 at position 0 of the bag, allowed: 0..19"] = function(_, world)
        make_bags("row_wise", world, "cpu", 1,
          { use_index_dedup = true })(peri.KeyedJaggedTensor { keys = { "f1", "f2", "f3", "f4" }, values = { 20 },
            lengths = { 0, 0, 0, 1, 0, 0, 0, 0 } })
      end,
      ["no key 'f4'; keys: f1, f2, f3"] = function(_, world)
        make_bags("row_wise", world, "cpu", 1,
          { use_index_dedup = true })(peri.KeyedJaggedTensor { keys = { "f1", "f2", "f3" }, values = { 2 },
            lengths = { 0, 0, 1 } })
      end,
      ["EmbeddingBagCollectionSharder: use_index_dedup is 'no'"] = function()
        shard.EmbeddingBagCollectionSharder { use_index_dedup = "no" }
      end,
      ["set_ec_index_dedup: the argument is 'yes', wanted true or false"] = function()
        shard.set_ec_index_dedup "yes"
      end, ["use_index_dedup is 1, wanted true or false"] = function() shard.EmbeddingCollectionSharder {
        use_index_dedup = 1 } end,
      ["ShardedEmbeddingCollection: use_index_dedup is 1"] = function(_, world)
        make("row_wise", world, "cpu", 1, { use_index_dedup = 1 })
      end,
    } do
      sim.run(1, function(_, world)
        local ok, err = pcall(f, make("row_wise", world, "cpu", 1, { use_index_dedup = true }), world)
        assert.is_false(ok)
        assert.truthy(tostring(err):find(words, 1, true), tostring(err))
      end, { device = "cpu" })
    end
  end)
end)
