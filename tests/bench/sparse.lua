-- sparse.lua: how fast jagged containers and sparse operators move their bytes, beside a copy of the same bytes in the same run. Columns:
-- name, best and median time, ns per id, GB/s (bytes read and written), times the copy's time.
local peri = require "perilune"
local argparse = require "argparse"
local json = require "dkjson"
local C = peri.ffi.C
local KJT, JT, KT, sparse = peri.KeyedJaggedTensor, peri.JaggedTensor, peri.KeyedTensor, peri.sparse

local parser = argparse("tests/bench/sparse.lua", "Speed of jagged containers and sparse operators.")
parser:option("--out", "Append results as JSON lines to this file.")
parser:option("--only", "Cases whose name has this in it.", "")
parser:option("--threads", "Worker threads.", 0, tonumber)
local options = parser:parse(arg)
if options.threads > 0 then peri.ffi.check(C.peri_threads_set(options.threads)) end
local out = options.out and assert(io.open(options.out, "a"))

local function now() return tonumber(C.peri_time_ns()) end

--- Best and median time of f in ns, over enough runs of at least 20 us each.
local function time(f)
  local batch = 1
  while true do
    local from = now()
    for _ = 1, batch do peri.scope(f) end
    if now() - from > 2e5 or batch > 1000 then break end
    batch = batch * 4
  end
  local times = {}
  for i = 1, 15 do
    local from = now()
    for _ = 1, batch do peri.scope(f) end
    times[i] = (now() - from) / batch
  end
  table.sort(times)
  return times[1], times[8]
end

local copies = {}

--- Time of a copy that reads and writes `bytes` in all.
local function copy_time(bytes)
  local n = math.max(math.floor(bytes / 2 / 8), 1)
  if not copies[n] then
    local a, b = peri.zeros({ n }, "i64"), peri.zeros({ n }, "i64")
    copies[n] = time(function() b:copy(a) end)
    a:release()
    b:release()
  end
  return copies[n]
end

local function case(name, ids, bytes, f)
  if not name:find(options.only, 1, true) then return end
  local best, median = time(f)
  local r = { name = name, threads = C.peri_threads(), best_us = best / 1e3, median_us = median / 1e3, ns_per_id = best / math.max(ids, 1),
    gb_per_s = bytes / best, copy_ratio = best / copy_time(bytes) }
  print(("%-44s %10.1f us %10.1f us %8.3f ns/id %7.2f GB/s %6.2fx copy"):format(name, r.best_us, r.median_us, r.ns_per_id, r.gb_per_s,
    r.copy_ratio))
  if out then out:write(json.encode(r), "\n") end
end

local seed = 1
local function random_ids(n, below, dtype)
  seed = seed + 1
  return peri.Tensor.uniform({ n }, 0, below, seed, 0, "f64"):to(dtype or "i64")
end

--- Lengths of a mean, all equal or spread over [0, 2 mean].
local function random_lengths(n, mean, fixed)
  if fixed then return peri.full({ n }, mean, "i32") end
  return random_ids(n, 2 * mean + 1, "i32")
end

local function total(lengths)
  local sum = 0
  for _, x in ipairs(lengths:to_list()) do sum = sum + x end
  return sum
end

local function names(n)
  local list = {}
  for i = 1, n do list[i] = "feature_" .. i end
  return list
end

for _, shape in ipairs { { 26, 2048, 1 }, { 26, 4096, 20 }, { 26, 64, 20 }, { 500, 512, 10 } } do
  local features, batch, mean = shape[1], shape[2], shape[3]
  local label = (" F%d B%d L%d"):format(features, batch, mean)
  local bags = features * batch
  local lengths = random_lengths(bags, mean)
  local n = total(lengths)
  local values, weights = random_ids(n, 1e6), peri.Tensor.uniform({ n }, 0, 1, 7)
  local keys = names(features)
  local kjt = KJT { keys = keys, values = values, lengths = lengths }
  local weighted = KJT { keys = keys, values = values, lengths = lengths, weights = weights }
  local turned = {}
  for i = 1, features do turned[i] = features - i end
  case("kjt from lengths" .. label, bags, bags * 12, function() return KJT { keys = keys, values = values, lengths = lengths } end)
  case("kjt permute" .. label, n, 2 * (n * 8 + bags * 4), function() return kjt:permute(turned) end)
  case("kjt permute weighted" .. label, n, 2 * (n * 12 + bags * 4), function() return weighted:permute(turned) end)
  case("kjt rebuilt of 8 ranks" .. label, n, 2 * (n * 8 + bags * 4) + 8 * bags, function()
    local per_rank = {}
    for r = 1, 8 do per_rank[r] = batch / 8 end
    return KJT.dist_init { keys = keys, values = values, lengths = lengths, num_workers = 8, stride_per_rank = per_rank }
  end)
  for _, p in ipairs { 2, 8 } do
    local blocks = {}
    for i = 1, features do blocks[i] = math.ceil(1e6 / p) end
    local args = { num_buckets = p, block_sizes = blocks }
    case(("kjt bucketize %d%s"):format(p, label), n, 2 * n * 8 + 4 * bags * (p + 1), function()
      return sparse.bucketize_kjt_before_all2all(kjt, args)
    end)
    local sequence = { num_buckets = p, block_sizes = blocks, output_permute = true }
    case(("kjt bucketize %d, permutation%s"):format(p, label), n, 3 * n * 8 + 4 * bags * (p + 1), function()
      return sparse.bucketize_kjt_before_all2all(kjt, sequence)
    end)
  end
end

do -- FBGEMM's benchmark of its bucketization
  local n, batch, rows, buckets = 300000, 2048, 2560000, 16
  local lengths = random_lengths(batch, math.floor(n / batch), true)
  n = total(lengths)
  local ids = random_ids(n, rows)
  local args = { lengths = lengths, indices = ids, block_sizes = { rows / buckets }, my_size = buckets }
  case("bucketize 16, FBGEMM's shape", n, 2 * n * 8 + 4 * batch * (buckets + 1), function()
    sparse.block_bucketize_sparse_features(args)
  end)
end

for _, shape in ipairs { { 2048, 20, 1 }, { 2048, 20, 64 }, { 20000, 5, 1 } } do
  local bags, mean, dim = shape[1], shape[2], shape[3]
  local label = (" B%d L%d D%d"):format(bags, mean, dim)
  local lengths = random_lengths(bags, mean)
  local n = total(lengths)
  local jt = JT { values = peri.Tensor.uniform({ n, dim }, 0, 1, 3), lengths = lengths }
  local longest = jt:longest()
  local padded = jt:to_padded_dense()
  case("jagged to padded" .. label, n, 4 * dim * (n + bags * longest), function() return jt:to_padded_dense() end)
  case("padded to jagged" .. label, n, 8 * dim * n, function() return JT.from_dense_lengths(padded, lengths) end)
end

do
  local kts, groups = {}, { {}, {} }
  for k = 1, 4 do
    local keys, dims = {}, {}
    for i = 1, 10 do
      keys[i], dims[i] = ("k%d_%d"):format(k, i), 64
      table.insert(groups[i % 2 + 1], keys[i])
    end
    kts[k] = KT { keys = keys, length_per_key = dims, values = peri.Tensor.uniform({ 2048, 640 }, 0, 1, k) }
  end
  local module = peri.jagged.KTRegroupAsDict(groups, { "a", "b" })
  case("regroup 40 keys of 64, B2048", 2048 * 40, 2 * 4 * 2048 * 2560, function() return module(kts) end)
end
