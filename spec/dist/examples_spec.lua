-- Whole chains of exchanges, small enough to be followed by hand: ids out, rows looked up, rows back, gradients the
-- reverse way. Each table is a tensor whose row i holds the number i (or i and a column's tenth), so that every result
-- can be read off.
local dist = require "perilune.dist"
local ops = require "perilune.dist.ops"
local peri = require "perilune"
local worlds = require "spec.support.worlds"
local F, KJT, sparse = peri.nn.functional, peri.KeyedJaggedTensor, peri.sparse

local function near(want, got, what)
  if type(got) ~= "table" then got = got:to_list() end
  assert.equal(#want, #got, what)
  for i = 1, #want do
    assert(math.abs(want[i] - got[i]) < 1e-9, ("%s: number %d is %.12g, wanted %.12g"):format(what or "result", i,
      got[i], want[i]))
  end
end

--- A leaf [to - from + 1, cols]: row i is i + c / 10 in column c (from 0).
local function shard(from, to, cols, device)
  local rows = {}
  for i = from, to do
    local row = {}
    for c = 1, cols do row[c] = i + (c - 1) / 10 end
    rows[#rows + 1] = row
  end
  if #rows == 0 then return peri.empty({ 0, cols }, "f64", device):requires_grad() end
  return peri.tensor(rows, "f64", device):requires_grad()
end

--- Sums of rows of a one-column shard, bag by bag: [bags, 1].
local function pooled(table_, kjt)
  local rows = sparse.index_select_dim0(table_, kjt:values())
  return sparse.segment_sum_csr(1, kjt:offsets(), rows:reshape(-1)):reshape(-1, 1)
end

describe("row-wise, pooled: a table of 5 rows over 2 ranks, bags [0 4], [2] and [3 3 1]", function()
  --- Ids to the halves of the table, sums of what each half has, and the sum of those sums.
  local function chain(world, device)
    local bags = world.rank_number == 0 and { { 0, 4 }, { 2 } } or { { 3, 3, 1 } }
    local kjt = KJT.from_lists { keys = { "f" }, bags, device = device }
    local cut = sparse.bucketize_kjt_before_all2all(kjt, { num_buckets = 2, block_sizes = { 3 } })
    local mine = dist.KJTAllToAll(world, { 1, 1 })(cut):wait():wait()
    assert.same(world.rank_number == 0 and { 1, 1, 1 } or { 1, 0, 2 }, mine:lengths():to_list())
    assert.same(world.rank_number == 0 and { 0, 2, 1 } or { 1, 0, 0 }, mine:values():to_list())
    local half = world.rank_number == 0 and shard(0, 2, 1, device) or shard(3, 4, 1, device)
    return half, kjt, dist.PooledEmbeddingsReduceScatter { pg = world }(pooled(half, mine), { 2, 1 }):wait()
  end

  worlds.each("sums, and each use of a row gives its gradient 1 / 2", function(world, device)
    local half, _, out = chain(world, device)
    near(world.rank_number == 0 and { 4, 2 } or { 7 }, out)
    out:sum():backward()
    near(world.rank_number == 0 and { .5, .5, .5 } or { 1, .5 }, half:grad())
  end, { sizes = { 2 } })

  worlds.each("means, divided after the sum over ranks", function(world, device)
    local half, kjt, out = chain(world, device)
    local means = F.div(out, kjt:lengths():to "f64":reshape(-1, 1))
    near(world.rank_number == 0 and { 2, 2 } or { 7 / 3 }, means)
    means:sum():backward()
    near(world.rank_number == 0 and { 1 / 4, 1 / 6, 1 / 2 } or { 1 / 3, 1 / 4 }, half:grad())
  end, { sizes = { 2 } })

  worlds.each("means with a millionth added to the divisor, as TorchRec makes them", function(world, device)
    local half, kjt, out = chain(world, device)
    local means = F.div(out, kjt:lengths():to "f64":reshape(-1, 1) + 1e-6)
    near(world.rank_number == 0 and { 4 / 2.000001, 2 / 1.000001 } or { 2.333332555556 }, means)
    means:sum():backward()
    near(world.rank_number == 0 and { .249999875, .16666661111, .4999995 } or { .33333322222, .249999875 }, half:grad())
  end, { sizes = { 2 } })
end)

describe("row-wise means of weighted ids", function()
  --- Bag [0 1] of rank 0, whose rows are 0.5 and 4 and lie on different ranks. The sum is divided by the number of ids,
  --- whatever the weights are (kernels' MEAN); TorchRec's row-wise sharding would divide by the sum of the weights.
  worlds.each("are divided by the number of ids", function(world, device)
    local rank = world.rank_number
    for _, case in ipairs { { { .5, 1.5 }, 3.125 }, { { .5, .5 }, 1.125 } } do
      local kjt = rank == 0 and KJT { keys = { "f" }, values = { 0, 1 }, lengths = { 2 }, weights = case[1],
        device = device }
        or KJT { keys = { "f" }, values = {}, lengths = {}, weights = {}, stride = 0, device = device }
      local cut = sparse.bucketize_kjt_before_all2all(kjt, { num_buckets = 2, block_sizes = { 1 } })
      local mine = dist.KJTAllToAll(world, { 1, 1 })(cut):wait():wait()
      local half = peri.tensor(rank == 0 and { { .5 } } or { { 4 } }, "f64", device):requires_grad()
      assert.same({ case[1][rank + 1] }, mine:weights():to_list())
      local rows = sparse.index_select_dim0(half, mine:values())
      local weighted = F.mul(rows, mine:weights():to "f64":reshape(-1, 1))
      local sums = sparse.segment_sum_csr(1, mine:offsets(), weighted:reshape(-1)):reshape(-1, 1)
      local out = ops.reduce_scatter_v_pooled { input = sums, input_splits = { 1, 0 } }:wait()
      local means = F.div(out, kjt:lengths():to "f64":reshape(-1, 1))
      near(rank == 0 and { case[2] } or {}, means)
      means:sum():backward()
      near({ case[1][rank + 1] / 2 / 2 }, half:grad())
    end
  end, { sizes = { 2 } })
end)

describe("column-wise: a table of 8 columns on ranks 1 and 0, another of 4 on rank 0", function()
  worlds.each("its blocks come back in the order of the table's columns", function(world, device)
    local rank = world.rank_number
    -- Features a (8 columns: 0..3 on rank 1, 4..7 on rank 0) and b (4 columns on rank 0). Slots by rank: a's second
    -- half, b, a's first.
    local batch = rank == 0 and { { { 2 }, { 0 } }, { { 1 }, {} } } or { { { 1, 2 } }, { { 0, 0 } } }
    local kjt = KJT.from_lists { keys = { "a", "b" }, batch[1], batch[2], device = device }
    local slots = kjt:permute { 0, 1, 0 }
    assert.same({ "a", "b", "a" }, slots:keys())
    local mine = dist.KJTAllToAll(world, { 2, 1 })(slots):wait():wait()
    assert.same(rank == 0 and { "a", "b" } or { "a" }, mine:keys())
    local function table_of(first, add) -- row i, column c: 100 i + first + c + add
      local rows = {}
      for i = 0, 2 do
        local x = 100 * i + first + add
        rows[i + 1] = { x, x + 1, x + 2, x + 3 }
      end
      return peri.tensor(rows, "f64", device):requires_grad()
    end
    local tables = rank == 0 and { table_of(4, 0), table_of(0, 0.5) } or { table_of(0, 0) }
    local parts = {}
    for i, key in ipairs(mine:keys()) do
      local jt = mine:split({ i - 1, 1, #mine:keys() - i })[2]
      assert.same({ key }, jt:keys())
      local rows = sparse.index_select_dim0(tables[i], jt:values())
      local columns = {}
      for c = 0, 3 do
        columns[c + 1] = sparse.segment_sum_csr(1, jt:offsets(), rows:slice(2, c, c + 1):reshape(-1)):reshape(-1, 1)
      end
      parts[i] = F.cat(columns, 2)
    end
    local a2a = dist.PooledEmbeddingsAllToAll { pg = world, dim_sum_per_rank = { 8, 4 }, callbacks = {
      function(t) return sparse.permute_pooled_embs(t, { 0, 4, 8, 12 }, { 2, 0, 1 }) end,
    } }
    local out = a2a(#parts == 2 and F.cat(parts, 2) or parts[1], { 2, 1 }):wait()
    local want, ids = {}, { batch[1], batch[2] }
    for b = 1, #batch[1] do
      for _, t in ipairs { { ids[1][b], 8, 0 }, { ids[2][b], 4, 0.5 } } do
        for c = 0, t[2] - 1 do
          local sum = 0
          for _, id in ipairs(t[1]) do sum = sum + 100 * id + c + t[3] end
          want[#want + 1] = sum
        end
      end
    end
    near(want, out)
    -- The gradient of column c of feature a's row is c + 1: it arrives at that column's block, halved.
    local g = {}
    for b = 1, #batch[1] do
      g[b] = {}
      for c = 1, 12 do g[b][c] = c end
    end
    out:backward(peri.tensor(g, "f64", device))
    local uses = { a = { 1, 1, 2 }, b = { 2, 1, 0 } }
    local function gradient(first, name)
      local list = {}
      for id = 1, 3 do
        for c = 1, 4 do list[#list + 1] = (first + c) * uses[name][id] / 2 end
      end
      return list
    end
    if rank == 0 then
      near(gradient(4, "a"), tables[1]:grad(), "columns 4 to 7")
      near(gradient(8, "b"), tables[2]:grad(), "the other table")
    else
      near(gradient(0, "a"), tables[1]:grad(), "columns 0 to 3")
    end
  end, { sizes = { 2 } })
end)

describe("a batch that varies between features", function()
  --- Rank 0: 3 rows; feature a has 2 distinct bags, used as 0 1 0; feature b has one. Rank 1: 2 rows; a has one, b two,
  --- used as 1 0.
  worlds.each("is expanded by its inverse indices, whose gradient adds up", function(world, device)
    local rank = world.rank_number
    local pre = ({ [0] = { 2, 1 }, { 1, 2 } })[rank]
    -- bags of a from both ranks on rank 0, of b on rank 1
    local own = rank == 0 and { { 2 }, { 1 } } or { { 1 }, { 2 } }
    -- a has 2 columns, b one: x of rank 0 are (1, 2), (3, 4), of rank 1 (5, 6); y of rank 0 is 7, of rank 1 are 8, 9.
    local flat = peri.tensor(rank == 0 and { 1, 2, 3, 4, 5, 6 } or { 7, 8, 9 }, "f64", device):requires_grad()
    local a2a = dist.VariableBatchPooledEmbeddingsAllToAll { pg = world,
      emb_dim_per_rank_per_feature = { { 2 }, { 1 } } }
    local got = a2a(flat, own, pre):wait()
    near(rank == 0 and { 1, 2, 3, 4, 7 } or { 5, 6, 8, 9 }, got)
    local inverse = rank == 0 and { { 0, 1, 0 }, { 0, 0, 0 } } or { { 0, 0 }, { 1, 0 } }
    local x = got:slice(1, 0, 2 * pre[1]):reshape(pre[1], 2)
    local y = got:slice(1, 2 * pre[1], 2 * pre[1] + pre[2]):reshape(pre[2], 1)
    local out = F.cat({ sparse.index_select_dim0(x, peri.tensor(inverse[1], "i64", device)),
      sparse.index_select_dim0(y, peri.tensor(inverse[2], "i64", device)) }, 2)
    near(rank == 0 and { 1, 2, 7, 3, 4, 7, 1, 2, 7 } or { 5, 6, 9, 5, 6, 8 }, out)
    out:backward(peri.tensor(rank == 0 and { { 1, 2, 3 }, { 4, 5, 6 }, { 7, 8, 9 } }
      or { { 10, 20, 30 }, { 40, 50, 60 } }, "f64", device))
    -- x0 of rank 0: rows 0 and 2; y of rank 0: all three; all halved.
    near(rank == 0 and { 4, 5, 2, 2.5, 25, 35 } or { 9, 30, 15 }, flat:grad())
  end, { sizes = { 2 } })
end)

describe("sequences", function()
  worlds.each("of a table in 2 blocks come back in the order of the ids", function(world, device)
    local rank = world.rank_number
    local kjt = KJT.from_lists { keys = { "f" }, rank == 0 and { { 5, 0, 4 } } or { { 3 }, {} }, device = device }
    local cut, unbucketize = sparse.bucketize_kjt_before_all2all(kjt,
      { num_buckets = 2, block_sizes = { 3 }, output_permute = true })
    if rank == 0 then
      assert.same({ 0, 2, 1 }, cut:values():to_list())
      assert.same({ 1, 0, 2 }, unbucketize:to_list())
    end
    local sizes = dist.KJTAllToAll(world, { 1, 1 })(cut):wait()
    local known, mine = sizes:splits(), sizes:wait()
    local half = shard(3 * rank, 3 * rank + 2, 2, device)
    local out = dist.SequenceEmbeddingsAllToAll { pg = world, features_per_rank = { 1, 1 } } {
      local_embs = sparse.index_select_dim0(half, mine:values()), lengths = mine:lengths(),
      input_splits = known.input_splits, output_splits = known.output_splits,
      batch_size_per_rank = known.stride_per_rank, unbucketize_permute_tensor = unbucketize,
    }:wait()
    near(rank == 0 and { 5, 5.1, 0, .1, 4, 4.1 } or { 3, 3.1 }, out)
    out:backward(peri.tensor(rank == 0 and { { 2, 4 }, { 6, 8 }, { 10, 12 } } or { { 20, 40 } }, "f64", device))
    near(rank == 0 and { 3, 4, 0, 0, 0, 0 } or { 10, 20, 5, 6, 1, 2 }, half:grad())
  end, { sizes = { 2 } })

  worlds.each("whose ids are sent once each: rows are dealt out where they came back", function(world, device)
    local rank = world.rank_number
    local ids = peri.tensor(rank == 0 and { 3, 5, 3, 7, 5 } or { 7, 7 }, "i64", device)
    local unique, inverse = sparse.unique(ids, true)
    assert.same(rank == 0 and { 3, 5, 7 } or { 7 }, unique:to_list())
    assert.same(rank == 0 and { 0, 1, 0, 2, 1 } or { 0, 0 }, inverse:to_list())
    -- A batch of 2 rows on each rank carries the distinct ids: the first rows take one more where they do not divide.
    local kjt = KJT { keys = { "f" }, values = unique, lengths = peri.tensor(rank == 0 and { 2, 1 } or { 1, 0 }, "i32",
      device) }
    local sizes = dist.KJTAllToAll(world, { 0, 1 })(kjt):wait() -- the table is on rank 1
    local known, mine = sizes:splits(), sizes:wait()
    if rank == 1 then assert.same({ 3, 5, 7, 7 }, mine:values():to_list()) end
    local table_ = rank == 1 and shard(0, 9, 2, device) or shard(0, -1, 2, device)
    local rows = rank == 1 and sparse.index_select_dim0(table_, mine:values()) or table_
    local received = dist.SequenceEmbeddingsAllToAll { pg = world, features_per_rank = { 0, 1 } } {
      local_embs = rows, lengths = mine:lengths(), input_splits = known.input_splits,
      output_splits = known.output_splits, batch_size_per_rank = known.stride_per_rank,
    }:wait()
    assert.same({ rank == 0 and 3 or 1, 2 }, received:shape())
    local out = sparse.index_select_dim0(received, inverse)
    near(rank == 0 and { 3, 3.1, 5, 5.1, 3, 3.1, 7, 7.1, 5, 5.1 } or { 7, 7.1, 7, 7.1 }, out)
    out:sum():backward()
    if rank == 1 then -- uses, halved
      local uses, want = { [3] = 2, [5] = 2, [7] = 3 }, {}
      for id = 0, 9 do
        for _ = 1, 2 do want[#want + 1] = (uses[id] or 0) / 2 end
      end
      near(want, table_:grad())
    end
  end, { sizes = { 2 } })
end)

describe("table-row-wise: a table of 6 rows in one of two nodes", function()
  worlds.each("ids in the order of staggered ranks, sums in the node, then between nodes", function(world, device)
    local rank = world.rank_number
    local intra, cross = world:intra_node(), world:cross_node()
    local bags = { [0] = { { 0, 5 } }, { { 4 } }, { { 1, 2 } }, { { 3 } } }
    local kjt = KJT.from_lists { keys = { "a" }, bags[rank], device = device }
    local cut = sparse.bucketize_kjt_before_all2all(kjt, { num_buckets = 2, block_sizes = { 3 } })
    local mine = dist.KJTAllToAll(world, { 1, 1, 0, 0 }, 2)(cut):wait():wait() -- both buckets to node 0
    local half = rank < 2 and shard(3 * rank, 3 * rank + 2, 1, device) or shard(0, -1, 1, device)
    local sums = rank < 2 and pooled(half, mine) or peri.zeros({ 4, 1 }, "f64", device)
    if rank < 2 then near(rank == 0 and { 0, 3, 0, 0 } or { 5, 0, 4, 3 }, sums) end -- of ranks 0, 2, 1, 3
    local in_node = ops.reduce_scatter_v_pooled { input = sums, input_splits = { 2, 2 }, group = intra }:wait()
    local out = ops.alltoall_pooled { a2a_pooled_embs_tensor = rank < 2 and in_node or in_node:slice(2, 0, 0),
      batch_size_per_rank = { 1, 1 }, dim_sum_per_rank = { 1, 0 }, group = cross }:wait()
    near({ ({ [0] = 5, 4, 3, 3 })[rank] }, out)
    out:sum():backward()
    if rank == 0 then
      near({ 1 / 4, 1 / 4, 1 / 4 }, half:grad())
    elseif rank == 1 then
      near({ 1 / 4, 1 / 4, 1 / 4 }, half:grad())
    end
  end, { sizes = { 4 }, local_size = 2 })
end)
