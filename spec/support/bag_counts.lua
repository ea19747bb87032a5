-- bag_counts.lua: how often a call of nn.EmbeddingBag with offsets, and one of attention after the first, make the host
-- wait for the pretended GPU:
--   perilune run -n 1 spec/support/bag_counts.lua FOLDER-OF-THE-PRETENDED-GPU
-- Prints a line "mode count, count of a step that trains" for each mode: waits of a call, the mean of four, and of a
-- step with a backward pass and an optimizer, on a device that has run a step when the next one begins.
local ffi = require "ffi"
local peri = require "perilune"

ffi.cdef "int peri_cuda_host_counts(int64_t *out, int most); void peri_cuda_host_catch_up(void);"
--- Waits for a stream, for an event; an event that was not there when the host looked; of these two, those with nothing
--- queued behind them.
local BLOCKED, AWAITED, WAITED, LAST, COUNTED = 13, 14, 16, 18, 19
local CALLS = 4

peri.init()
local device = "cuda_host"
local zero = peri.zeros({ 1 }, "f32", device) -- loads the library
local gpu = ffi.load(arg[1] .. "/libperilune_cuda_host.so")

local function counts()
  local numbers = ffi.new("int64_t[?]", COUNTED)
  assert(gpu.peri_cuda_host_counts(numbers, COUNTED) == COUNTED,
    "the pretended GPU counts other things than this script")
  return numbers
end

local function waits()
  local numbers = counts()
  return tonumber(numbers[BLOCKED] + numbers[AWAITED])
end

local ids, offsets = peri.tensor({ 1, 2, 3, 4, 0 }, "i64", device), peri.tensor({ 0, 2, 2 }, "i64", device)
for _, mode in ipairs { "sum", "mean", "max" } do
  local module = peri.nn.EmbeddingBag { num_embeddings = 5, embedding_dim = 4, mode = mode, device = device }
  module(ids, offsets)
  zero:item()
  local before = waits()
  for _ = 1, CALLS do module(ids, offsets) end
  local middle = waits()
  local optimizer = peri.nn.optim.SGD { params = module:parameters(), lr = 0.1 }
  local function train(steps)
    for _ = 1, steps do
      optimizer:zero_grad()
      module(ids, offsets):sum():backward()
      optimizer:step()
      gpu.peri_cuda_host_catch_up()
    end
    return waits()
  end
  local warm = train(1) -- what no backward pass has led to is judged at once
  print(("%s %g, %g"):format(mode, (middle - before) / CALLS, (train(CALLS) - warm) / CALLS))
end
local q, targets = peri.randn({ 2, 1, 4 }, "f32", device), peri.tensor({ 1, 0 }, "i64", device)
local function attend()
  return peri.sparse.hstu_mha { q = q, k = q, v = q, seq_offsets = offsets, num_targets = targets, max_seq_len = 2,
    contextual_seq_len = 1 }
end
attend()
local before = waits()
for _ = 1, CALLS do attend() end
print(("attention %g"):format((waits() - before) / CALLS))

local lengths, rows = peri.tensor({ 2, 0, 1, 2 }, "i64", device), peri.randn({ 5, 4 }, "f32", device)
local dense = peri.randn({ 2, 3, 4 }, "f32", device)
local level, order = { peri.tensor({ 0, 2, 5 }, "i64", device) }, peri.tensor({ 3, 1, 0, 2 }, "i32", device)
local tree = { peri.tensor({ 0, 1, 2 }, "i64", device), level[1] }
for _, call in ipairs {
  { "bucketize", peri.sparse.block_bucketize_sparse_features, { lengths = lengths, indices = ids,
    block_sizes = { 3, 2 }, my_size = 2 } },
  { "permute", peri.sparse.permute_1D_sparse_data, order, lengths, ids },
  { "to dense", peri.sparse.jagged_to_padded_dense, rows, level, { 3 } },
  { "of two levels", peri.sparse.jagged_to_padded_dense, rows, tree, { 2, 3 } },
  { "to jagged", peri.sparse.dense_to_jagged, dense, level, 5 },
} do
  call[2](unpack(call, 3))
  zero:item()
  local first = counts()
  for _ = 1, CALLS do call[2](unpack(call, 3)) end
  local after = counts()
  local function mean(kind) return tonumber(after[kind] - first[kind]) / CALLS end
  print(("%s %g, %g"):format(call[1], mean(BLOCKED) + math.max(mean(AWAITED), mean(WAITED)), mean(LAST)))
end
peri.finish()
