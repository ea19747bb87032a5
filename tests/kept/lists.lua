-- lists.lua: writes a model file of lists as this version makes them, and prints what it answers: build/perilune run
-- tests/kept/lists.lua FILE. lists-1.peri was written so by the version that has the first format;
-- spec/export_kept_spec.lua has its answers. All operations of members (runtime/model/list_operations.c) are in it.
local peri = require "perilune"
peri.init()
local nn, F, sparse = peri.nn, peri.nn.functional, peri.sparse

local Model = nn.Module:extend "Model"
function Model:init()
  self.rows = peri.EmbeddingCollection { seed = 1, tables = { peri.EmbeddingConfig { name = "items", num_embeddings = 9,
    embedding_dim = 4, feature_names = { "item" } } } }
  self.places, self.times = nn.Embedding { num_embeddings = 4, embedding_dim = 4 }, nn.Embedding { num_embeddings = 8,
    embedding_dim = 4 }
  self.gru = nn.Linear { in_features = 4, out_features = 4 }
end
local function bag(x, lengths, mode)
  return nn.embedding.embedding_bag(x, peri.arange(0, x:size(1), 1, "i64"),
    sparse.asynchronous_complete_cumsum(lengths), mode, nil, true)
end
function Model:forward(b)
  local item = peri.util.resolve(self.rows(b.items)).item
  local offsets, n = item:offsets(), item:values():size(1)
  local x = item:values() * item:weights():reshape(-1, 1) + b.price:reshape(-1, 1)
    + self.places(sparse.sequence_positions { seq_offsets = offsets, rows = n, max_positions = 3,
      num_targets = b.targets })
    + self.times(sparse.time_buckets { seq_offsets = offsets, timestamps = b.time, num_buckets = 7, increment = 60 })
    + sparse.index_select_dim0(b.dense, sparse.sequence_numbers(offsets, n))
  local mask = x:select(2, 0):gt(0)
  local first, many = sparse.masked_select_jagged_1d(x:select(2, 1):contiguous(), item:lengths(), mask)
  local paid = sparse.masked_select_jagged_1d(b.price, item:lengths(), mask)
  local last, two = sparse.truncate_jagged(x, item:lengths(), 2)
  local part, three = sparse.jagged_slice(x, item:lengths(), b.targets, 3)
  local q = x:reshape(n, 2, 2)
  local steps = self.gru(item:to_padded_dense(3):transpose(1, 2)) -- [steps, samples, columns]
  return { list = first * paid, sums = F.cat({ bag((first + paid):reshape(-1, 1), many, "sum"), bag(last, two, "mean"),
    bag(part, three, "sum"), steps:select(1, 1) }, 2),
    attended = sparse.jagged_attention { q = q, k = q, v = q, seq_offsets = offsets, max_seq_len = 5,
      num_targets = b.targets }:reshape(n, 4) }
end

--- A batch of n samples, whose numbers are whole multiples of powers of two.
local function batch(n, seed)
  local x = seed
  local function draw(most)
    x = (x * 1103515245 + 12345) % 2 ^ 31
    return math.floor(x / 2 ^ 16) % most
  end
  local lengths, ids, weights, prices, times, targets, dense = {}, {}, {}, {}, {}, {}, {}
  for b = 1, n do
    lengths[b] = draw(6)
    for i = 1, lengths[b] do
      ids[#ids + 1], weights[#weights + 1], prices[#prices + 1] = draw(9), draw(8) / 4, draw(16) / 8 - 1
      times[#times + 1] = 1700000000 + b * 1000 + i * draw(4000)
    end
    targets[b], dense[b] = draw(lengths[b] + 1), { draw(8) / 8, draw(8) / 8 - 1, draw(8) / 16, 0.5 }
  end
  return { items = peri.KeyedJaggedTensor { keys = { "item" }, values = peri.tensor(ids, "i64"), lengths = lengths,
    weights = peri.tensor(weights) }, price = peri.tensor(prices), time = peri.tensor(times, "i64"),
    targets = peri.tensor(targets, "i64"), dense = peri.tensor(dense) }
end

if arg and (arg[1] or ""):match "%.peri$" then
  nn.manual_seed(11)
  print(Model():export(arg[1], { batches = { batch(20, 9) }, tables = "int8", allowed_difference = 1, name = "kept" }))
  for name, t in peri.util.ordered(peri.export.open(arg[1]):predict(batch(4, 99))) do
    local numbers, n = t:read()
    local list = {}
    for i = 0, n - 1 do list[i + 1] = ("%.9g"):format(tonumber(numbers[i])) end
    print(("    [%q] = { %s },"):format(name, table.concat(list, ", ")))
  end
end

return batch
