-- Large data: sizes around and above those from which ranks of one machine copy for each other
-- (runtime/backends/mpi/near.c), with small, empty and large parts in one exchange, many operations in flight, and
-- ranks that are late. What is larger than any threshold of another transport runs on real processes only. (mpirun: 2 3
-- 4)
local peri = require "perilune"
local worlds = require "spec.support.worlds"
local F, dist, KJT = peri.nn.functional, peri.dist, peri.KeyedJaggedTensor

local counts = { 3999, 4001, 20001, 300007 }

--- Whole numbers: their sums are exact in any order, and some transports have an order of their own.
--- Made once for all that compare with them; what is given to operations that write into it is a copy.
local kept = {}
local function numbers(count, r, device)
  local key = ("%d %d %s"):format(count, r, device)
  kept[key] = kept[key] or peri.ffi.lasting(function()
    return peri.Tensor.uniform({ count }, -1000, 1000, 3, r, "f32", device):to("i32"):to("f32")
  end)
  return kept[key]
end

--- The sum over ranks, in their order.
local function sum(count, n, device)
  local total = numbers(count, 0, device)
  for r = 1, n - 1 do total = F.add(total, numbers(count, r, device)) end
  return total
end

--- Equal element by element, compared in bulk first.
local function same(want, got, what)
  assert.same(want:shape(), got:shape())
  local difference = F.sub(want, got)
  local worst = F.mul(difference, difference):sum():item()
  assert.equal(0, worst, what)
end

describe("large data", function()
  teardown(function() kept = {} end)
  for _, count in ipairs(counts) do
    worlds.each(("%d numbers"):format(count), function(world, device, n)
      local rank = world.rank_number
      local reduced = world:all_reduce(numbers(count, rank, device):clone())
      local sent = world:broadcast(numbers(count, rank, device):clone(), n - 1)
      local gathered = world:all_gather(numbers(count, rank, device))
      local scattered = world:reduce_scatter(numbers(count * n, rank, device))
      same(sum(count * n, n, device):slice(1, rank * count, (rank + 1) * count), scattered:wait(), "reduce_scatter")
      for r = 0, n - 1 do
        same(numbers(count, r, device), gathered:wait():slice(1, r * count, (r + 1) * count), "all_gather")
      end
      same(numbers(count, n - 1, device), sent:wait(), "broadcast")
      same(sum(count, n, device), reduced:wait(), "all_reduce")
    end, { sizes = { 2, 3, 4 }, only = count > 1e5 and "mpi" or nil })
  end

  worlds.each("parts of all sizes in one exchange", function(world, device, n)
    local rank = world.rank_number
    local function part(from, to) return ({ 0, 5, 4000, 4001, 70000, 1 })[(from * 7 + to * 3) % 6 + 1] end
    for _ = 1, 3 do
      local send, recv, total = {}, {}, 0
      for r = 0, n - 1 do
        send[r + 1], recv[r + 1] = part(rank, r), part(r, rank)
        total = total + send[r + 1]
      end
      local got, at = world:all_to_all_v(numbers(total, rank, device), send, recv):wait(), 0
      for r = 0, n - 1 do
        local before, all = 0, 0
        for k = 0, n - 1 do
          if k < rank then before = before + part(r, k) end
          all = all + part(r, k)
        end
        same(numbers(all, r, device):slice(1, before, before + part(r, rank)), got:slice(1, at, at + recv[r + 1]),
          "from " .. r)
        at = at + recv[r + 1]
      end
    end
  end, { sizes = { 2, 3, 4 } })

  worlds.each("more in flight than there are cells", function(world, device, n)
    local flying = {}
    for i = 1, 80 do
      local t = peri.full({ 5000 }, i + world.rank_number, "f32", device)
      flying[i] = i % 2 == 0 and world:all_reduce(t) or world:all_gather(t)
    end
    for i = 80, 1, -1 do
      local t = flying[i]:wait()
      if i % 2 == 0 then assert.equal(n * i + n * (n - 1) / 2, t:item(4999))
      else for r = 0, n - 1 do assert.equal(i + r, t:item(5000 * r + 7)) end end
    end
  end, { sizes = { 2, 3 } })

  worlds.each("a rank that computes meanwhile finds its exchange done", function(world, device, n)
    local count = 500000
    local work = world:all_reduce(numbers(count, world.rank_number, device):clone())
    if world.rank_number == 0 then
      local a = numbers(128 * 128, 9, device):reshape(128, 128)
      for _ = 1, 100 do F.matmul(a, a) end
    end
    same(sum(count, n, device), work:wait(), "all_reduce")
  end, { sizes = { 2, 4 } })

  worlds.each("16-bit floats, whole numbers and complex ones are summed in rank order", function(world, device, n)
    for _, dtype in ipairs { "bf16", "i64", "u8" } do
      local t = world:all_reduce(peri.full({ 40001 }, world.rank_number + 1, dtype, device)):wait()
      for _, i in ipairs { 0, 20000, 40000 } do assert.equal(n * (n + 1) / 2, t:item(i)) end
    end
    local t = world:reduce_scatter(peri.full({ 20001 * n }, world.rank_number + 1, "c128", device)):wait()
    assert.equal(n * (n + 1) / 2, t:item(20000))
  end, { sizes = { 2, 3, 4 } })

  --- A transport may put what comes where it belongs: the parts of one rank large, small or empty, their receiver on
  --- time or late, so that the senders place them.
  worlds.each("KeyedJaggedTensors of all sizes, in their places", function(world, device, n)
    local rank, keys, splits, rows = world.rank_number, {}, {}, 3
    for r = 1, n do splits[r] = r == 2 and 7 or 3 end
    local count = 3 * n + 4
    for k = 1, count do keys[k] = "k" .. k end
    local function made(total, of, on) return peri.Tensor.uniform({ total }, 0, 1e6, 5, of, "f64", on):to "i64" end
    local function ids(of, k, seed) return ({ 0, 9001, 1, 300, 30011, 0, 2000 })[(of * 3 + k * 5 + seed) % 7 + 1] end
    local function values(of, seed, first, last)
      local lengths, from, total = {}, 0, 0
      for k = 1, count do
        local m = ids(of, k, seed)
        if k < first then from = from + m end
        if k >= first and k <= last then total = total + m end
        for row = 1, rows do lengths[#lengths + 1] = row < rows and math.floor(m / 4) or m - 2 * math.floor(m / 4) end
      end
      return lengths, from, total
    end
    local a2a, first = dist.KJTAllToAll(world, splits), 1
    for r = 1, rank do first = first + splits[r] end
    for seed = 1, 6 do
      local lengths, _, total = values(rank, seed, 1, count)
      local flying = a2a(KJT { keys = keys, values = made(total, rank, device), weights = numbers(total, rank, device),
        lengths = peri.tensor(lengths, "i32", device) }):wait()
      if seed > 3 and seed % n == rank then
        local a = numbers(128 * 128, 9, device):reshape(128, 128)
        for _ = 1, 40 do F.matmul(a, a) end
      end
      local got = flying:wait()
      local at, row, received, weights = 0, 1, got:values(), got:weights()
      local got_lengths, all = got:lengths():to_list(), {}
      for of = 0, n - 1 do
        local own, _, m = values(of, seed, 1, count)
        all[of] = { lengths = own, ids = made(m, of, device):to "f64", weights = numbers(m, of, device) }
      end
      for k = first, first + splits[rank + 1] - 1 do
        for of = 0, n - 1 do
          local theirs, _, from, m = all[of], values(of, seed, k, k)
          for i = 0, rows - 1 do assert.equal(theirs.lengths[(k - 1) * rows + 1 + i], got_lengths[row + i]) end
          row = row + rows
          same(theirs.ids:slice(1, from, from + m), received:slice(1, at, at + m):to "f64", "ids")
          same(theirs.weights:slice(1, from, from + m), weights:slice(1, at, at + m), "weights")
          at = at + m
        end
      end
      assert.equal(at, received:shape()[1])
    end
  end, { sizes = { 2, 3, 4 }, only = "mpi" })

  --- Their receiver on time or late, so that the senders place the rows; batches of none and of one.
  worlds.each("pooled embeddings of long and of short rows, side by side", function(world, device, n)
    local rank = world.rank_number
    for case, widths in ipairs { { 128, 300, 0, 513 }, { 200, 129, 128, 1 }, { 16, 1000, 17, 33 },
      { 300, 257, 0, 128 } } do
      local batch, dims, columns, rows = {}, {}, 0, 0
      for r = 0, n - 1 do
        batch[r + 1], dims[r + 1] = ({ 700, 1, 0, 77 })[(r + case) % 4 + 1], widths[r + 1]
        columns, rows = columns + dims[r + 1], rows + batch[r + 1]
      end
      local input = numbers(rows * dims[rank + 1], rank, device):reshape(rows, dims[rank + 1])
      local flying = dist.ops.alltoall_pooled({ a2a_pooled_embs_tensor = input, batch_size_per_rank = batch,
        dim_sum_per_rank = dims })
      if case % 2 == 0 and batch[rank + 1] > 1 then
        local a = numbers(128 * 128, 9, device):reshape(128, 128)
        for _ = 1, 40 do F.matmul(a, a) end
      end
      local got = flying:wait()
      assert.same({ batch[rank + 1], columns }, got:shape())
      local before, column = 0, 0
      for r = 0, rank - 1 do before = before + batch[r + 1] end
      for r = 0, n - 1 do
        local theirs = numbers(rows * dims[r + 1], r, device):reshape(rows, dims[r + 1])
        same(theirs:slice(1, before, before + batch[rank + 1]), got:slice(2, column, column + dims[r + 1]), "from "
          .. r)
        column = column + dims[r + 1]
      end
    end
  end, { sizes = { 2, 3, 4 }, only = "mpi" })

  worlds.each("results larger than the caches, at places of any alignment", function(world, device, n)
    local rank, rows = world.rank_number, math.ceil(2 ^ 21 / n)
    local send, recv, at = {}, {}, 0
    for r = 0, n - 1 do send[r + 1], recv[r + 1] = rows + 3 * rank + r, rows + 3 * r + rank end
    local function of(r) return numbers(n * rows + 3 * n * r + n * (n - 1) / 2, r, device) end
    local flying, gathered = world:all_to_all_v(of(rank), send, recv),
      world:all_gather(numbers(rows * 2 + 1, rank, device))
    local sent, got = world:broadcast(numbers(rows * n + 5, rank, device):clone(), n - 1), flying:wait()
    for r = 0, n - 1 do
      local first = rank * (rows + 3 * r) + rank * (rank - 1) / 2
      same(of(r):slice(1, first, first + recv[r + 1]), got:slice(1, at, at + recv[r + 1]), "from " .. r)
      at = at + recv[r + 1]
    end
    for r = 0, n - 1 do
      same(numbers(rows * 2 + 1, r, device), gathered:wait():slice(1, r * (rows * 2 + 1), (r + 1) * (rows * 2 + 1)),
        "all_gather")
    end
    same(numbers(rows * n + 5, n - 1, device), sent:wait(), "broadcast")
    local batch, dims, columns, total = {}, {}, 0, 0
    for r = 0, n - 1 do
      batch[r + 1], dims[r + 1] = math.floor(rows / 300) + 11 * r, ({ 513, 300, 128, 257 })[r + 1]
      columns, total = columns + dims[r + 1], total + batch[r + 1]
    end
    local function input(r) return numbers(total * dims[r + 1], r, device):reshape(total, dims[r + 1]) end
    local pooled = dist.ops.alltoall_pooled({ a2a_pooled_embs_tensor = input(rank), batch_size_per_rank = batch,
      dim_sum_per_rank = dims })
    local before, column, out = 0, 0, pooled:wait()
    for r = 0, rank - 1 do before = before + batch[r + 1] end
    for r = 0, n - 1 do
      same(input(r):slice(1, before, before + batch[rank + 1]), out:slice(2, column, column + dims[r + 1]),
        "pooled from " .. r)
      column = column + dims[r + 1]
    end
  end, { sizes = { 2, 4 }, only = "mpi" })
end)
