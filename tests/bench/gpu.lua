-- gpu.lua: how fast a device works, beside the copy bandwidth that the same run measures on it. Columns: case, best and
-- median time, GB/s of the bytes that have to move, their share of the copy's GB/s, and what the project wants of it on
-- one H200.
--
-- A forward pass reads every row that it is asked for, ids and offsets, and writes the output; a backward pass reads
-- rows and states and writes them, and reads ids and the gradient; its sort is in its time and not in its bytes. Calls
-- are queued one after the other, and the stream is waited for once: the time of a call is that of the device, or of
-- the host where it cannot keep up. Batches take turns.
--
-- --scale divides rows and samples: tests run it on a pretended GPU, where its times say nothing.
local peri = require "perilune"
local argparse = require "argparse"
local json = require "dkjson"
local ffi = require "ffi"
local C, Tensor, nn = peri.ffi.C, peri.Tensor, peri.nn

local parser = argparse("tests/bench/gpu.lua", "Speed of a device.")
parser:option("--out", "Append results as JSON lines to this file.")
parser:option("--device", "The device.", "cuda")
parser:option("--scale", "Divide rows and samples by this.", 1, tonumber)
parser:option("--rounds", "Times that everything is measured.", 15, tonumber)
parser:option("--only", "Cases whose name has this in it.", "")
parser:option("--precision", "Of products of f32 in the steps: highest, or high (TF32).", "highest")
parser:option("--autocast", "The dtype of products in the steps: bf16 or f16.")
parser:option("--tables", "The data type of the step's tables: FP32 or FP16.", "FP32")
parser:option("--output", "The data type of what the step's lookups give: FP32, BF16 or FP16.", "FP32")
parser:option("--bounds", "How the step's lookups check ids: FATAL (the host waits for each lookup's verdict) or NONE.",
  "FATAL")
local options = parser:parse(arg)
peri.init()
peri.set_float32_matmul_precision(options.precision)
local device, scale = options.device, options.scale
local out = options.out and assert(io.open(options.out, "a"))
local stream = peri.stream.current(device)

local function scaled(n) return math.max(math.floor(n / scale), 4) end

local function median_of(times)
  table.sort(times)
  return times[math.ceil(#times / 2)]
end

--- Best and median time of one of the calls f(1), f(2), ... in ns: enough of them to make @least ns, and then the
--- stream is waited for.
local function time(f, least)
  local calls = 1
  local function run()
    local from = C.peri_time_ns()
    for i = 1, calls do peri.scope(f, i) end
    stream:synchronize()
    return tonumber(C.peri_time_ns() - from) / calls
  end
  run()
  while scale == 1 and calls < 1000 and run() * calls < least do calls = calls * 2 end
  local times = {}
  for i = 1, options.rounds do times[i] = run() end
  local median = median_of(times)
  return times[1], median
end

--- What the host takes to queue a call: of two in a row after the stream was waited for, since a full queue would make
--- it wait.
local function host_time(f)
  local times = {}
  for round = 1, options.rounds do
    stream:synchronize()
    local from = C.peri_time_ns()
    for i = 1, 2 do peri.scope(f, i) end
    times[round] = tonumber(C.peri_time_ns() - from) / 2
  end
  return median_of(times)
end

local copied -- bytes a ns, read and written together

--- @wanted: a share of the copy's speed, or "<= 45 us".
local function case(name, bytes, wanted, f)
  if not name:find(options.only, 1, true) then return end
  local best, median = time(f, 2e6)
  local speed = bytes / median
  local r = { case = name, device = device, best_us = best / 1e3, median_us = median / 1e3, gb_per_s = speed,
    wanted = wanted, share_of_copy = copied and speed / copied }
  if not copied then copied = speed end
  print(("%-42s %11.1f us %11.1f us %9.1f GB/s  %5.1f %%   %s"):format(name, r.best_us, r.median_us, speed,
    100 * speed / copied, type(wanted) == "number" and (">= %g %%"):format(100 * wanted) or wanted or ""))
  io.flush()
  if out then out:write(json.encode(r), "\n") end
end

local function only(name) return name:find(options.only, 1, true) end

-- -- a copy -----------------------------------------------------------------------------------------------------------

print(("%-42s %14s %14s %14s %8s   %s"):format("case", "best", "median", "speed", "of copy", "wanted on one H200"))
do
  local n = scaled(2 ^ 28)
  local a, b = peri.zeros({ n }, "f32", device), peri.zeros({ n }, "f32", device)
  local chosen = options.only
  options.only = "" -- all others are measured by it
  case("copy of 1 GiB", 8 * n, nil, function() b:copy(a) end)
  options.only = chosen
end

-- -- tables -----------------------------------------------------------------------------------------------------------

local function random_ids(n, rows, seed) return Tensor.uniform({ n }, 0, rows, seed, 0, "f64", device):to "i64" end

--- Ids by a power law: row r about r^-alpha as often as row 1.
local function skewed_ids(n, rows, seed, alpha)
  local below = 1 - alpha
  return (Tensor.uniform({ n }, rows ^ below, 1, seed, 0, "f64", device) ^ (1 / below) - 1):to "i64"
end

--- c: batch, tables, rows, dim, length, data_type, optimizer, out (dtype of the output), alpha (of a power law of ids;
--- else uniform).
local function tables_of(c)
  local tables, blocks, bags, SETS = {}, {}, c.batch * c.tables, 4
  local start = not peri.embed.config.row_formats[c.data_type] and peri.embed.constant(0.01) or nil
  for t = 1, c.tables do
    tables[t] = { name = "t" .. t, rows = c.rows, cols = c.dim, init = start }
    blocks[t] = { table = t, first_bag = (t - 1) * c.batch, bags = c.batch, out_offset = (t - 1) * c.dim,
      out_stride = c.tables * c.dim }
  end
  local batch = peri.embed.tbe.new { tables = tables, data_type = c.data_type, seed = 1, device = device,
    fused_params = { optimizer = c.optimizer, bounds_check_mode = "NONE" } }
  local offsets = ffi.new("int64_t[?]", bags + 1)
  for b = 0, bags do offsets[b] = b * c.length end
  offsets = Tensor.from_memory(offsets, { bags + 1 }, "i64", device)
  local ids, n = {}, bags * c.length
  for i = 1, SETS do ids[i] = c.alpha and skewed_ids(n, c.rows, i, c.alpha) or random_ids(n, c.rows, i) end
  blocks = batch:blocks(blocks)
  local result = peri.zeros({ c.batch, c.tables * c.dim }, c.out or "f32", device)
  local grad = Tensor.uniform({ c.batch, c.tables * c.dim }, -1, 1, 5, 0, "f32", device)
  local function forward(i) batch:forward(ids[i % SETS + 1], offsets, blocks, result) end
  local function backward(i) batch:backward(ids[i % SETS + 1], offsets, blocks, grad) end
  local around = 8 * n + 8 * (bags + 1)
  return forward, backward, n, around + bags * c.dim * (c.out == "f16" and 2 or 4), around + bags * c.dim * 4
end

local function large(data_type, optimizer, result, alpha)
  return tables_of { batch = scaled(65536), tables = 1, rows = scaled(1e7), dim = 128, length = 20,
    data_type = data_type, optimizer = optimizer, out = result, alpha = alpha }
end

if only "forward f32" or only "backward" then
  peri.scope(function()
    local forward, backward, n, written, read = large("FP32", "rowwise_adagrad")
    case("forward f32, E 1e7, D 128, L 20, B 65,536", n * 512 + written, 0.94, forward)
    case("backward row-wise Adagrad, the same", n * (2 * 512 + 2 * 4) + read, 0.68, backward)
  end)
end
-- Bytes of the last one are as if no two ids were the same: the share is above that of the others because most are.
for _, c in ipairs { { "backward f16 row-wise Adagrad, the same", "FP16", "rowwise_adagrad", 2 * 256 + 2 * 4 },
  { "backward SGD, the same", "FP32", "sgd", 2 * 512 }, { "backward Adam, the same", "FP32", "adam", 6 * 512 },
  { "backward row-wise Adagrad, ids by r^-1.05", "FP32", "rowwise_adagrad", 2 * 512 + 2 * 4, 1.05 } } do
  local name, data_type, optimizer, row_bytes, alpha = unpack(c, 1, 5)
  if only(name) then
    peri.scope(function()
      local _, backward, n, _, read = large(data_type, optimizer, "f32", alpha)
      case(name, n * row_bytes + read, nil, backward)
    end)
  end
end
for _, c in ipairs { { "forward f16, E 1e7, D 128, L 20, B 65,536", "FP16", "rowwise_adagrad", 256, 0.90 },
  { "forward bf16 to f16, the same", "BF16", "rowwise_adagrad", 256, 0.90 },
  { "int8 rows to f16, the same", "INT8", "none", 136, 0.65 }, { "int4 rows to f16, the same", "INT4", "none", 68,
    0.50 } } do
  local name, data_type, optimizer, row_bytes, wanted = unpack(c)
  if only(name) then
    peri.scope(function()
      local forward, _, n, written = large(data_type, optimizer, "f16")
      case(name, n * row_bytes + written, wanted, forward)
    end)
  end
end
if only "B 512" then
  peri.scope(function()
    local forward, backward, n, written, read = tables_of { batch = scaled(512), tables = 32, rows = scaled(1e5),
      dim = 128, length = 20, data_type = "FP32", optimizer = "rowwise_adagrad" }
    case("B 512, T 32, E 1e5, D 128, L 20: forward", n * 512 + written, "<= 45 us", forward)
    case("B 512, T 32, E 1e5, D 128, L 20: backward", n * (2 * 512 + 2 * 4) + read, "<= 190 us", backward)
  end)
  peri.scope(function()
    local forward, _, n, written = tables_of { batch = scaled(512), tables = 32, rows = scaled(1e5), dim = 128,
      length = 20, data_type = "FP16", optimizer = "rowwise_adagrad", out = "f16" }
    case("B 512, T 32, f16, the same: forward", n * 256 + written, 0.70, forward)
  end)
end

-- -- sparse operators -------------------------------------------------------------------------------------------------

if only "permute" or only "bucketize" or only "jagged" then
  peri.scope(function()
    local FEATURES, sparse = 26, peri.sparse
    local batch = scaled(65536)
    local bags = FEATURES * batch
    local lengths = random_ids(bags, 41, 3):to "i32"
    local n = lengths:to("f64"):sum():item()
    local ids, order, blocks = random_ids(n, 1e6, 4), {}, {}
    for i = 1, FEATURES do order[i], blocks[i] = (i * 7) % FEATURES, math.ceil(1e6 / 8) end
    local square = lengths:reshape(FEATURES, batch)
    order = peri.tensor(order, "i32", device)
    case("permute_2D, F 26, B 65,536, L 20", 16 * n + 16 * bags, 0.65, function()
      sparse.permute_2D_sparse_data(order, square, ids)
    end)
    do -- the bags of a quarter of them, one by one, in another order
      local quarter = math.floor(bags / 4)
      local mixed = Tensor.uniform({ quarter }, 0, quarter, 6, 0, "f64", device):to "i32"
      local some = lengths:slice(1, 0, quarter):contiguous()
      local m = some:to("f64"):sum():item()
      local part = ids:slice(1, 0, m):contiguous()
      local moved = sparse.permute_1D_sparse_data(mixed, some, part):to("f64"):sum():item()
      case("permute_1D, 425,984 bags of 20 ids", 8 * (m + moved) + 8 * quarter, nil, function()
        sparse.permute_1D_sparse_data(mixed, some, part)
      end)
    end
    local args = { lengths = lengths, indices = ids, block_sizes = blocks, my_size = 8 }
    case("bucketize 8, F 26, B 65,536, L 20", 16 * n + 4 * bags * 9, 0.55, function()
      sparse.block_bucketize_sparse_features(args)
    end)
    for i = 1, FEATURES do blocks[i] = math.ceil(1e6 / 64) end
    args.my_size = 64
    case("bucketize 64, the same", 16 * n + 4 * bags * 65, nil, function()
      sparse.block_bucketize_sparse_features(args)
    end)
    local few = scaled(65536)
    local some = lengths:slice(1, 0, few):contiguous()
    local offsets = sparse.asynchronous_complete_cumsum(some:to "i64")
    local m = some:to("f64"):sum():item()
    local rows = Tensor.uniform({ m, 64 }, -1, 1, 11, 0, "f32", device)
    local dense = sparse.jagged_2d_to_dense(rows, offsets, 40)
    case("jagged to dense, B 65,536, D 64, 40 rows", 256 * (m + few * 40), 0.85, function()
      sparse.jagged_2d_to_dense(rows, offsets, 40)
    end)
    case("dense to jagged, the same", 2 * 256 * m, 0.85, function() sparse.dense_to_jagged(dense, { offsets }, m) end)
  end)
end

-- -- a whole step -----------------------------------------------------------------------------------------------------

--- MLPerf's DLRM of cross layers: 26 tables of 128 columns, 13 dense features, 512-256-128, three cross layers of rank
--- 512, 1024-1024-512-256-1, 8,192 samples. Tables of 1e6 rows at most here, and bags of 3 ids; the dense part under
--- Adagrad.
local function precision()
  local words = options.precision == "high" and "TF32" or "f32"
  return (options.autocast or words) .. (options.tables ~= "FP32" and (", %s tables"):format(options.tables) or "")
    .. (options.output ~= "FP32" and (", %s rows"):format(options.output) or "")
end

--- f(...), in the region of autocast that the options ask for.
local function cast(f, ...)
  if not options.autocast then return f(...) end
  return peri.autocast({ device = device:match "^[^:]*", dtype = options.autocast }, f, ...)
end

local function report(name, case_name, batch, median, host, spent, steps)
  print(("%-42s %11.0f samples/s, %.3f ms a step (the host: %.3f); one part after the other: forward %.3f, backward%s "
    .. "%.3f, optimizer %.3f ms"):format(
    name, batch / median * 1e9, median / 1e6, host / 1e6, spent[1] / steps / 1e6, case_name:find "^step"
    and " and tables" or "", spent[2] / steps / 1e6, spent[3] / steps / 1e6))
  if out then out:write(json.encode { case = case_name, device = device, precision = precision(),
    samples_per_s = batch / median * 1e9, step_ms = median / 1e6, host_ms = host / 1e6, bounds = case_name:find "^step"
    and options.bounds or nil, forward_ms = spent[1] / steps / 1e6, backward_ms = spent[2] / steps / 1e6,
    optimizer_ms = spent[3] / steps / 1e6 }, "\n") end
end

--- The time of steps, of which forward(i) makes the loss, and of their parts.
local function steps(name, case_name, batch, optimizer, forward)
  local at, spent = nil, { 0, 0, 0 }
  local function lap(i, split)
    if not split then return end
    stream:synchronize()
    local now = C.peri_time_ns()
    if i > 0 then spent[i] = spent[i] + tonumber(now - at) end
    at = now
  end
  local function once(i, split)
    lap(0, split)
    optimizer:zero_grad()
    local loss = cast(forward, i)
    lap(1, split)
    loss:backward()
    lap(2, split)
    optimizer:step()
    lap(3, split)
  end
  -- many steps in a row: the host may queue the next one while the device has this one
  local _, median = time(once, 5e7)
  local host = host_time(once)
  local count = scale > 1 and 2 or 20
  for i = 1, count do peri.scope(once, i, true) end
  report(name, case_name, batch, median, host, spent, count)
end

local function step()
  local TABLES, DIM, IDS = 26, 128, 3
  local batch, rows = scaled(8192), scaled(1e6)
  local tables, keys = {}, {}
  for t = 1, TABLES do
    keys[t] = "f" .. t
    tables[t] = peri.EmbeddingBagConfig { name = "t" .. t, num_embeddings = rows, embedding_dim = DIM,
      feature_names = { keys[t] }, data_type = options.tables }
  end
  local ebc = peri.EmbeddingBagCollection { tables = tables, device = device,
    fused_params = { optimizer = "rowwise_adagrad", learning_rate = 0.01, output_dtype = options.output,
      bounds_check_mode = options.bounds } }
  local small = scale > 1
  local model = nn.DLRM_DCN { embedding_bag_collection = ebc, dense_in_features = 13, dense_device = device,
    dense_arch_layer_sizes = small and { 16, DIM } or { 512, 256, DIM },
    over_arch_layer_sizes = small and { 16, 1 } or { 1024, 1024, 512, 256, 1 }, dcn_num_layers = 3,
    dcn_low_rank_dim = small and 8 or 512 }
  local dense = {}
  for _, p in ipairs(model:named_parameters()) do
    if not p.name:find "embedding_bags" then dense[#dense + 1] = p.tensor end
  end
  local optimizer = nn.optim.Adagrad { params = dense, lr = 0.01 }
  local lengths = peri.full({ TABLES * batch }, IDS, "i32", device)
  local batches = {}
  for k = 1, 4 do
    batches[k] = { Tensor.normal({ batch, 13 }, 0, 1, k, 0, "f32", device),
      peri.KeyedJaggedTensor.from_lengths_sync { keys = keys, values = random_ids(TABLES * batch * IDS, rows, k),
        lengths = lengths, stride = batch },
      Tensor.uniform({ batch }, 0, 2, k, 0, "f64", device):to("i64"):to "f32" }
  end
  local function forward(i)
    local b = batches[i % 4 + 1]
    return nn.functional.binary_cross_entropy_with_logits(model:forward(b[1], b[2]):reshape(-1), b[3])
  end
  steps("DLRM of cross layers, B 8,192, " .. precision(), "step", batch, optimizer, forward)
  for _, part in ipairs { "dense_arch", "inter_arch", "over_arch" } do nn.graphed(model[part]) end
  steps("the same, its dense part captured", "step, captured", batch, optimizer, forward)
end
if only "step" then peri.scope(step) end

--- The same model without its tables: what torch.compile makes of it is in docs/benchmarks/training_step.md.
local function dense_step()
  local COLUMNS, DIM, batch, small = 26 * 128, 128, scaled(8192), scale > 1
  local bottom = nn.MLP { in_size = 13, layer_sizes = small and { 16, DIM } or { 512, 256, DIM }, device = device }
  local cross = nn.LowRankCrossNet { in_features = COLUMNS + DIM, num_layers = 3, low_rank = small and 8 or 512,
    device = device }
  local hidden = small and { 16 } or { 1024, 1024, 512, 256 }
  local top = nn.MLP { in_size = COLUMNS + DIM, layer_sizes = hidden, device = device }
  local last = nn.Linear { in_features = hidden[#hidden], out_features = 1, device = device }
  local params = {}
  for _, module in ipairs { bottom, cross, top, last } do
    for _, p in ipairs(module:parameters()) do params[#params + 1] = p end
  end
  local optimizer = nn.optim.Adagrad { params = params, lr = 0.01 }
  local x = Tensor.normal({ batch, 13 }, 0, 1, 1, 0, "f32", device)
  local pooled = Tensor.normal({ batch, COLUMNS }, 0, 1, 2, 0, "f32", device):requires_grad(true)
  local labels = Tensor.uniform({ batch }, 0, 2, 3, 0, "f64", device):to("i64"):to "f32"
  local function loss_of(features, embedded, wanted)
    local logits = last(top(cross(nn.functional.cat({ bottom(features), embedded }, 2))))
    return nn.functional.binary_cross_entropy_with_logits(logits:reshape(-1), wanted)
  end
  local graph = nn.graphed(loss_of, { modules = { bottom, cross, top, last } })
  for _, way in ipairs { { "its dense part alone, " .. precision(), "dense step", loss_of },
    { "the same, captured with its loss", "dense step, captured", graph } } do
    steps(way[1], way[2], batch, optimizer, function()
      pooled:set_grad(nil)
      return way[3](x, pooled, labels)
    end)
  end
  print(graph)
end
if only "dense step" then peri.scope(dense_step) end
