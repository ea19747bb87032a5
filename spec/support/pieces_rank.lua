-- pieces_rank.lua: one rank of a world whose messages may carry few bytes each (PERI_TEST_COUNT_LIMIT): every
-- collective, on sizes that fit no piece evenly. Prints "rank ok". Run by spec/dist/mpi_fault_spec.lua under mpirun.
local peri = require "perilune"
local world = peri.init { timeout = 10 }
local rank, n = world.rank_number, world.world_size

local function numbers(count, r) return peri.Tensor.uniform({ count }, -1, 1, 3, r) end
local function same(a, b, what)
  local x, y = a:to_list(), b:to_list()
  assert(#x == #y, what)
  for i = 1, #x do assert(x[i] == y[i], ("%s: element %d is %g, wanted %g"):format(what, i - 1, x[i], y[i])) end
end
--- The sum over ranks in their order.
local function sum(count)
  local total = numbers(count, 0):to_list()
  for r = 1, n - 1 do
    local x = numbers(count, r):to_list()
    for i = 1, count do total[i] = total[i] + x[i] end
    total = peri.tensor(total):to_list()
  end
  return peri.tensor(total)
end

local whole = (tonumber(os.getenv "PERI_TEST_COUNT_LIMIT") or 2 ^ 30) >= 2 ^ 30 -- pieces: 20001 numbers are many
for _, count in ipairs { 0, 1, 24, 25, 26, 1000, 20001, whole and 100000 or nil } do
  local t = world:all_reduce(numbers(count, rank)):wait()
  same(t, sum(count), "all_reduce " .. count)
  same(world:broadcast(numbers(count, rank), n - 1):wait(), numbers(count, n - 1), "broadcast " .. count)
  local gathered = world:all_gather(numbers(count, rank)):wait()
  for r = 0, n - 1 do same(gathered:slice(1, r * count, (r + 1) * count), numbers(count, r), "all_gather " .. count) end
  local scattered = world:reduce_scatter(numbers(count * n, rank)):wait()
  same(scattered, sum(count * n):slice(1, rank * count, (rank + 1) * count), "reduce_scatter " .. count)
end

-- Rank a sends rank b (a + 2 b + 1) * 13 numbers, some of them many pieces.
local send, recv, total = {}, {}, 0
for r = 0, n - 1 do
  send[r + 1], recv[r + 1] = (rank + 2 * r + 1) * 13, (r + 2 * rank + 1) * 13
  total = total + send[r + 1]
end
local got, at = world:all_to_all_v(numbers(total, rank), send, recv):wait(), 0
for r = 0, n - 1 do
  local before, all = 0, 0
  for k = 0, n - 1 do
    if k < rank then before = before + (r + 2 * k + 1) * 13 end
    all = all + (r + 2 * k + 1) * 13
  end
  same(got:slice(1, at, at + recv[r + 1]), numbers(all, r):slice(1, before, before + recv[r + 1]), "all_to_all_v")
  at = at + recv[r + 1]
end

-- Ids, lengths and weights of keys, and rows both ways: (a + 2 b + 1) * 7 ids of rank a for rank b, in one bag.
local dist, values, lengths, weights, splits, keys = peri.dist, {}, {}, {}, {}, {}
local function id(a, b, i) return 1e6 * a + 1e4 * b + i end
for r = 0, n - 1 do
  keys[r + 1], splits[r + 1], lengths[r + 1] = "f" .. r, 1, (rank + 2 * r + 1) * 7
  for i = 1, lengths[r + 1] do
    values[#values + 1], weights[#weights + 1] = id(rank, r, i), i
  end
end
local kjt = peri.KeyedJaggedTensor { keys = keys, values = values, lengths = lengths, weights = weights }
local sizes = dist.KJTAllToAll(world, splits)(kjt):wait()
local known, mine = sizes:splits(), sizes:wait()
local arrived, amounts, wanted, wanted_weights = mine:values():to_list(), mine:lengths():to_list(), {}, {}
for r = 0, n - 1 do
  assert(amounts[r + 1] == (r + 2 * rank + 1) * 7, "lengths of a KJT")
  for i = 1, amounts[r + 1] do
    wanted[#wanted + 1], wanted_weights[#wanted_weights + 1] = id(r, rank, i), i
  end
end
same(peri.tensor(wanted, "f64"), peri.tensor(arrived, "f64"), "ids of a KJT")
same(peri.tensor(wanted_weights), mine:weights(), "weights of a KJT")
local rows = mine:values():to("f64"):reshape(-1, 1):requires_grad()
local back = dist.SequenceEmbeddingsAllToAll { pg = world, features_per_rank = splits } {
  local_embs = rows, lengths = mine:lengths(), input_splits = known.input_splits, output_splits = known.output_splits,
  batch_size_per_rank = known.stride_per_rank,
}:wait()
same(peri.tensor(values, "f64"), back, "rows of a KJT")
back:backward(kjt:values():to("f64"):reshape(-1, 1))
local gradient = rows:grad():to_list()
for i, x in ipairs(wanted) do assert(math.abs(gradient[i] * n - x) < 1e-3, "gradients of rows") end

peri.finish()
io.stdout:write(rank .. " ok\n")
