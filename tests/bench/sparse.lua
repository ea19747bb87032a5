-- sparse.lua: how fast jagged containers and sparse operators move their bytes, beside a copy of the same bytes in the
-- same run. Columns: name, best and median time, ns per id, GB/s (bytes read and written), times the copy's time.
local peri = require "perilune"
local argparse = require "argparse"
local json = require "dkjson"
local sequences = require "spec.support.sequences"
local ffi = require "ffi"
local C = peri.ffi.C
local KJT, JT, KT, sparse = peri.KeyedJaggedTensor, peri.JaggedTensor, peri.KeyedTensor, peri.sparse

local parser = argparse("tests/bench/sparse.lua", "Speed of jagged containers and sparse operators.")
parser:option("--out", "Append results as JSON lines to this file.")
parser:option("--only", "Cases whose name has this in it.", "")
parser:option("--threads", "Worker threads.", 0, tonumber)
parser:option("--python", "A Python with torch and fbgemm_gpu: measures them on the same numbers and prints ratios.")
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

local measured = {}

local function case(name, ids, bytes, f)
  if not name:find(options.only, 1, true) then return end
  local best, median = time(f)
  local r = { case = name, what = "perilune", threads = C.peri_threads(), isa = ffi.string(C.peri_cpu_isa()),
    best_ms = best / 1e6, median_ms = median / 1e6, ns_per_id = best / math.max(ids, 1), gb_per_s = bytes / best,
    copy_ratio = best / copy_time(bytes) }
  measured[name] = r
  print(("%-44s %10.1f us %10.1f us %8.3f ns/id %7.2f GB/s %6.2fx copy"):format(name, best / 1e3, median / 1e3,
    r.ns_per_id, r.gb_per_s, r.copy_ratio))
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

--- Elements as bytes of a file of the folder.
local function save(folder, name, t)
  local buffer, n = t:read()
  local file = assert(io.open(folder .. "/" .. name, "wb"))
  file:write(ffi.string(buffer, n * ffi.sizeof(buffer) / math.max(n, 1)))
  file:close()
end

-- -- operators, beside FBGEMM's and PyTorch's -------------------------------------------------------------------------

do
  local FEATURES, BATCH, MEAN, ROWS, DIM = 26, 4096, 20, 1000000, 1664
  local bags = FEATURES * BATCH
  local lengths = random_lengths(bags, MEAN)
  local n = total(lengths)
  local ids, weights = random_ids(n, ROWS), peri.Tensor.uniform({ n }, 0, 1, 7)
  local skewed = peri.nn.functional.pow(peri.Tensor.uniform({ n }, 0, 1, 8, 0, "f64"), 8):to "f64"
  skewed = peri.nn.functional.affine(skewed, ROWS):to "i64"
  local wide = peri.Tensor.uniform({ n }, 0, 2 ^ 62, 9, 0, "f64"):to "i64"
  local order = {}
  for i = 1, FEATURES do order[i] = (i * 7) % FEATURES end
  order = peri.tensor(order, "i32")
  local square = lengths:reshape(FEATURES, BATCH)
  local offsets = sparse.asynchronous_complete_cumsum(lengths:to "i64")
  local chosen = random_ids(bags, bags)
  local matrix = peri.Tensor.uniform({ BATCH, DIM }, -1, 1, 10)
  local rows16 = peri.Tensor.uniform({ n, 16 }, -1, 1, 11)
  local floats = peri.Tensor.uniform({ n }, -1, 1, 12)

  local twin = peri.zeros({ n }, "i64")
  case("copy of the ids", n, 16 * n, function() twin:copy(ids) end)
  case("cumsum", bags, 12 * bags, function() return sparse.asynchronous_complete_cumsum(lengths) end)
  case("permute_2D", n, 16 * n + 8 * bags, function() return sparse.permute_2D_sparse_data(order, square, ids) end)
  case("permute_2D weighted", n, 24 * n + 8 * bags, function()
    return sparse.permute_2D_sparse_data(order, square, ids, weights)
  end)
  local shuffled = random_ids(bags, bags, "i32")
  case("permute_1D", n, 16 * n + 8 * bags, function() return sparse.permute_1D_sparse_data(shuffled, lengths, ids) end)
  case("jagged_index_select D16", n, 128 * n, function() return sparse.jagged_index_select(rows16, lengths, chosen) end)
  for _, p in ipairs { 2, 8, 16 } do
    local blocks = {}
    for i = 1, FEATURES do blocks[i] = math.ceil(ROWS / p) end
    local args = { lengths = lengths, indices = ids, block_sizes = blocks, my_size = p }
    case(("bucketize %d"):format(p), n, 16 * n + 4 * bags * (p + 1), function()
      return sparse.block_bucketize_sparse_features(args)
    end)
    local sequence = { lengths = lengths, indices = ids, block_sizes = blocks, my_size = p, sequence = true }
    case(("bucketize %d sequence"):format(p), n, 24 * n + 4 * bags * (p + 1), function()
      return sparse.block_bucketize_sparse_features(sequence)
    end)
  end
  for name, list in peri.util.ordered { ["unique uniform"] = ids, ["unique skewed"] = skewed,
    ["unique 62 bits"] = wide } do
    case(name, n, 24 * n, function() return sparse.unique(list, true) end)
    case(name .. " counts", n, 24 * n, function() return sparse.unique(list, true, true) end)
  end
  local bounds = offsets:slice(1, 0, bags + 1, BATCH):contiguous()
  local list = bounds:to_list()
  local sizes = peri.util.map(order:to_list(), function(f) return list[f + 2] - list[f + 1] end)
  local new_bounds = sparse.asynchronous_complete_cumsum(peri.tensor(sizes, "i64"))
  local wide_order = order:to "i64"
  case("expand_into_jagged_permute", n, 8 * n, function()
    return sparse.expand_into_jagged_permute(wide_order, bounds, new_bounds)
  end)
  case("offsets_range", n, 8 * n, function() return sparse.offsets_range(offsets:slice(1, 0, bags), n) end)
  local permutation = peri.tensor(peri.util.map(chosen:to_list(), function(_, i) return (i * 77773) % bags end), "i64")
  case("invert_permute", bags, 16 * bags, function() return sparse.invert_permute(permutation) end)
  case("segment_sum_csr", n, 4 * n + 8 * bags, function() return sparse.segment_sum_csr(1, offsets, floats) end)
  case("jagged_1d_to_dense", n, 8 * (n + bags * 40), function() return sparse.jagged_1d_to_dense(ids, offsets, 40) end)
  case("jagged_2d_to_dense D16", n, 64 * (n + bags * 40), function()
    return sparse.jagged_2d_to_dense(rows16, offsets, 40)
  end)
  local padded = sparse.jagged_2d_to_dense(rows16, offsets, 40)
  case("dense_to_jagged D16", n, 128 * n, function() return sparse.dense_to_jagged(padded, { offsets }, n) end)
  padded = nil -- luacheck: ignore
  local dims, turned = { 0 }, {}
  for i = 1, 26 do dims[i + 1], turned[i] = i * 64, (i * 7) % 26 end
  case("permute_pooled_embs", BATCH * 26, 8 * BATCH * DIM, function()
    return sparse.permute_pooled_embs(matrix, dims, turned)
  end)

  -- A pruned table of ROWS rows, half of them left out; masks and slices; numbers by id.
  local even, halves, remap = {}, {}, {}
  for id = 0, ROWS - 1 do
    remap[id + 1] = id % 2 == 0 and id / 2 or -1
    if id % 2 == 0 then even[#even + 1], halves[#halves + 1] = id, id / 2 end
  end
  local small, bag_bounds, one_table = ids:to "i32", peri.tensor({ 0, n }, "i64"), peri.tensor({ 0, ROWS }, "i64")
  local remapping, known = peri.tensor(remap, "i32"), peri.tensor(even, "i32")
  local table_ = sparse.pruned_hashmap_insert(known, peri.tensor(halves, "i32"), peri.tensor({ 0, #even }, "i64"),
    peri.full({ ROWS, 2 }, -1, "i32"), one_table)
  case("pruned_array_lookup", n, 8 * n, function()
    return sparse.pruned_array_lookup(small, bag_bounds, remapping, one_table)
  end)
  case("pruned_hashmap_lookup", n, 8 * n, function()
    return sparse.pruned_hashmap_lookup(small, bag_bounds, table_, one_table)
  end)
  local mask, starts = random_ids(n, 2):to "bool", peri.zeros({ bags }, "i64")
  local wide_lengths = lengths:to "i64"
  case("masked_select_jagged_1d", n, 7 * n, function()
    return sparse.masked_select_jagged_1d(floats, wide_lengths, mask)
  end)
  case("jagged_slice", n, 4 * n, function() return sparse.jagged_slice(floats, wide_lengths, starts, 10) end)
  case("murmur_hash3", n, 16 * n, function() return sparse.murmur_hash3(ids, 0, 0) end)
  local reverse = random_ids(n, ROWS)
  case("jagged_acc_weights_and_counts", n, 12 * n + 8 * ROWS, function()
    return sparse.jagged_acc_weights_and_counts(weights, reverse, ROWS)
  end)
  local unary_weight, unary_tables = peri.Tensor.uniform({ 3, ROWS }, -1, 1, 13), one_table
  case("batched_unary_embeddings", n, 8 * n + 36 * bags, function()
    return sparse.batched_unary_embeddings(unary_weight, unary_tables, offsets, ids)
  end)
  local logits = peri.Tensor.uniform({ n }, -4, 4, 14)
  local examples, positives = peri.full({ 5000 }, 100, "f64"), peri.full({ 5000 }, 30, "f64")
  local bins = { logit = logits, bin_num_examples = examples, bin_num_positives = positives, positive_weight = 0.4,
    bin_ctr_in_use_after = 10, bin_ctr_weight_value = 0.9995 }
  case("histogram_binning_calibration", n, 16 * n, function() return sparse.histogram_binning_calibration(bins) end)
  local counts, heights, widths, picks = {}, {}, {}, {}
  for m = 1, 8 do counts[m], heights[m], widths[m] = BATCH, BATCH, DIM / 8 end
  for m = 1, 8 do for k = 1, BATCH do picks[(m - 1) * BATCH + k] = (k * 7 * m) % BATCH end end
  local flat, chosen_rows = matrix:reshape(BATCH * DIM), peri.tensor(picks, "i64")
  case("batch_index_select_dim0", 8 * BATCH, 8 * BATCH * DIM, function()
    return sparse.batch_index_select_dim0(flat, chosen_rows, counts, heights, widths)
  end)

  for name, args in peri.util.ordered { ["int8"] = { codes = "int8" },
    ["int8 f16 scale"] = { codes = "int8", scale = "f16" }, int4 = { codes = "int4" }, int2 = { codes = "int2" },
    fp8 = { codes = "fp8" } } do
    local format = sparse.quantize.format(args)
    local rows = sparse.quantize.rows(matrix, format)
    local bytes = BATCH * (4 * DIM + rows:size(2))
    case("quantize " .. name, BATCH * DIM, bytes, function() return sparse.quantize.rows(matrix, format) end)
    case("restore " .. name, BATCH * DIM, bytes, function() return sparse.quantize.restore(rows, format, DIM) end)
  end

  --- Run the peers on the same numbers.
  local function run_peers()
    local folder = os.tmpname()
    os.remove(folder)
    assert(os.execute(("mkdir '%s'"):format(folder)) == 0)
    for name, t in peri.util.ordered { lengths = lengths, ids = ids, weights = weights, skewed = skewed, wide = wide,
      order = order, offsets = offsets, chosen = chosen, matrix = matrix, rows16 = rows16, floats = floats,
      shuffled = shuffled, permutation = permutation, bounds = bounds, new_bounds = new_bounds, remapping = remapping,
      hash_table = table_, mask = mask, reverse = reverse, unary_weight = unary_weight, logits = logits,
      chosen_rows = chosen_rows } do save(folder, name, t) end
    local file = assert(io.open(folder .. "/case.json", "w"))
    file:write(json.encode { features = FEATURES, batch = BATCH, rows = ROWS, dim = DIM, only = options.only })
    file:close()
    local script = debug.getinfo(1, "S").source:match "^@(.*)sparse%.lua$" .. "peers/sparse.py"
    local pipe = assert(io.popen(("'%s' '%s' --folder '%s' --threads %d"):format(options.python, script, folder,
      C.peri_threads())))
    for line in pipe:lines() do
      local r = json.decode(line)
      if not r then print(line)
      elseif r.skipped then print(("%-44s %s: %s"):format(r.case, r.what, r.skipped))
      else
        local own = measured[r.case]
        local ratio = own and r.best_ms / own.best_ms or 0
        print(("%-44s %10.1f us %10.1f us   %s: %.2f times as long"):format(r.case, r.best_ms * 1e3, r.median_ms * 1e3,
          r.what, ratio))
        r.ratio = ratio
        if out then out:write(json.encode(r), "\n") end
      end
    end
    pipe:close()
    os.execute(("rm -r '%s'"):format(folder))
  end
  if options.python and options.python ~= "" then run_peers() end
end

-- -- containers -------------------------------------------------------------------------------------------------------

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
  case("kjt from lengths" .. label, bags, bags * 12, function()
    return KJT { keys = keys, values = values, lengths = lengths }
  end)
  case("kjt permute" .. label, n, 2 * (n * 8 + bags * 4), function() return kjt:permute(turned) end)
  case("kjt permute weighted" .. label, n, 2 * (n * 12 + bags * 4), function() return weighted:permute(turned) end)
  case("kjt rebuilt of 8 ranks" .. label, n, 2 * (n * 8 + bags * 4) + 8 * bags, function()
    local per_rank = {}
    for r = 1, 8 do per_rank[r] = batch / 8 end
    return KJT.dist_init { keys = keys, values = values, lengths = lengths, num_workers = 8,
      stride_per_rank = per_rank }
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

for _, shape in ipairs(sequences.speed()) do
  local f, n = sequences.attention(shape.args, "cpu")
  local inputs, bytes = {}, 4 * n * shape.heads * shape.dim
  for i = 1, 3 do inputs[i] = peri.Tensor.normal({ n, shape.heads, shape.dim }, 0, 1, i):requires_grad() end
  case(shape.name, n, 4 * bytes, function() f(unpack(inputs)) end)
  local up = peri.ones { n, shape.heads, shape.dim }
  case(shape.name .. ", and back", n, 11 * bytes, function()
    f(unpack(inputs)):backward(up)
    for i = 1, 3 do inputs[i]:set_grad(nil) end
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
