-- serve.lua: answers of model files, one thread, without HTTP: a DLRM of 26 tables, or MLPerf's DCN-v2 (--case dcn,
-- whose tables are cut to --rows), batches of several sizes, dtypes of tables. One line a measurement: case, dtype,
-- threads, samples of a call, p50 and p99 of a call in microseconds, samples a second. With --python beside PyTorch
-- with FBGEMM's tables (peers/serve.py), in turns: ratio is theirs over ours, of medians, the median of the rounds.
--
-- Ids are uniform and there are many batches of them, which take turns: rows come from memory, as in serving.
local ffi = require "ffi"
local peri = require "perilune"
local argparse = require "argparse"
local json = require "dkjson"
local nn, C, check = peri.nn, peri.ffi.C, peri.ffi.check

local parser = argparse("tests/bench/serve.lua", "Speed of model files.")
parser:option("--case", "The model: dlrm or dcn.", "dlrm"):choices { "dlrm", "dcn" }
parser:option("--out", "Append results as JSON lines to this file.")
parser:option("--rows", "Rows of each table.", 100000, tonumber)
parser:option("--dtypes", "Dtypes of tables, with commas.", "f32,int8,int4")
parser:option("--dense", "Dtype of matrices.", "f32")
parser:option("--peer-dense", "Dtype of the peer's matrices.", "f32"):choices { "f32", "bf16", "int8" }
parser:option("--batches", "Samples of a call, with commas.", "1,16,256")
parser:option("--seconds", "Of each measurement.", 2, tonumber)
parser:option("--rounds", "Times that everything is measured, in turns with the peer.", 3, tonumber)
parser:option("--python", "A Python with torch and fbgemm_gpu: measures them at the same, and prints ratios.")
local options = parser:parse(arg)
local out = options.out and assert(io.open(options.out, "a"))

local TABLES, DENSE, SETS = 26, 13, 64
local dcn = options.case == "dcn"
local COLUMNS = dcn and 128 or 64
-- Ids of each feature: MLPerf's numbers of Criteo's features with several ids each.
local IDS = dcn and { 3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1 } or {}
for i = #IDS + 1, TABLES do IDS[i] = 1 end

local beside = options.python and options.python ~= "" and not dcn
local tables, keys = {}, {}
for i = 1, TABLES do
  keys[i] = ("f%02d"):format(i)
  tables[i] = peri.EmbeddingBagConfig { name = "t" .. i, num_embeddings = options.rows, embedding_dim = COLUMNS,
    feature_names = { keys[i] } }
end
local collection = peri.EmbeddingBagCollection { tables = tables }
local model = dcn and nn.DLRM_DCN {
  embedding_bag_collection = collection, dense_in_features = DENSE, dense_arch_layer_sizes = { 512, 256, COLUMNS },
  over_arch_layer_sizes = { 1024, 1024, 512, 256, 1 }, dcn_num_layers = 3, dcn_low_rank_dim = 512,
} or nn.DLRM {
  embedding_bag_collection = collection, dense_in_features = DENSE, dense_arch_layer_sizes = { 512, 256, COLUMNS },
  over_arch_layer_sizes = { 512, 512, 256, 1 },
}

local function held_out(n)
  local lengths, ids = {}, {}
  for t = 1, TABLES do
    for _ = 1, n do
      lengths[#lengths + 1] = IDS[t]
      for _ = 1, IDS[t] do ids[#ids + 1] = math.random(0, options.rows - 1) end
    end
  end
  return { dense_features = peri.Tensor.uniform({ n, DENSE }, -1, 1, 7),
    sparse_features = peri.KeyedJaggedTensor { keys = keys, values = ids, lengths = lengths } }
end

--- Inputs of a call with n samples, in C memory.
local function values_of(n, kept)
  local values = ffi.new("peri_model_values[?]", TABLES + 1)
  local dense = ffi.new("float[?]", n * DENSE)
  for i = 0, n * DENSE - 1 do dense[i] = math.random() end
  values[0].dense = dense
  for t = 1, TABLES do
    local ids, offsets = ffi.new("int64_t[?]", n * IDS[t]), ffi.new("int64_t[?]", n + 1)
    for i = 0, n do offsets[i] = i * IDS[t] end
    for i = 0, n * IDS[t] - 1 do ids[i] = math.random(0, options.rows - 1) end
    values[t].ids, values[t].offsets = ids, offsets
    kept[#kept + 1] = { ids, offsets }
  end
  kept[#kept + 1] = { dense, values }
  return values
end

local model_out, context_out = ffi.new "peri_model *[1]", ffi.new "peri_model_context *[1]"

local function measure(path, dtype, n)
  local began = C.peri_time_ns()
  check(C.peri_model_open(path, 0, model_out))
  local opened = tonumber(C.peri_time_ns() - began) / 1e3
  check(C.peri_model_context_new(model_out[0], n, 0, context_out))
  local kept, sets, times = {}, {}, {}
  for i = 1, SETS do sets[i] = values_of(n, kept) end
  local answer = ffi.new("float[?]", n)
  local answers = ffi.new("float *[1]", answer)
  local till, calls = C.peri_time_ns() + options.seconds * 1e9, 0
  while calls < 2 * SETS or C.peri_time_ns() < till do
    calls = calls + 1
    local from = C.peri_time_ns()
    check(C.peri_model_predict(context_out[0], n, sets[calls % SETS + 1], answers))
    times[calls] = tonumber(C.peri_time_ns() - from) / 1e3
  end
  for _ = 1, SETS do table.remove(times, 1) end -- the first round reads rows from the file
  local sum = 0
  for _, t in ipairs(times) do sum = sum + t end
  table.sort(times)
  local m = #times
  local line = { case = options.case, rows = options.rows, dtype = dtype, dense = options.dense, threads = 1,
    samples = n, open_us = opened, p50_us = times[math.ceil(m * 0.5)], p99_us = times[math.ceil(m * 0.99)],
    samples_per_s = n * m / sum * 1e6 }
  C.peri_model_context_release(context_out[0])
  C.peri_model_release(model_out[0])
  return line
end

local function say(line)
  print(("%-20s %-5s %5d samples  p50 %9.1f us  p99 %9.1f us  %10.0f samples/s%s"):format(line.peer or "Perilune",
    line.dtype, line.samples, line.p50_us, line.p99_us, line.samples_per_s, line.ratio
      and ("  (%.2f times as long as ours)"):format(line.ratio) or ""))
  if out then out:write(json.encode(line), "\n") end
end

--- What the peer measures, by samples of a call.
local function peer(dtype)
  local script, found = arg[0]:match "^(.*/)" .. "peers/serve.py", {}
  local pipe = assert(io.popen(("'%s' '%s' --rows %d --dtype %s --batches %s --seconds %g --dense %s"):format(
    options.python, script, options.rows, dtype, options.batches, options.seconds, options.peer_dense)))
  for text in pipe:lines() do
    local line = json.decode(text)
    if line then found[line.samples] = line else print(text) end
  end
  pipe:close()
  return found
end

--- The line in the middle of those of all rounds.
local function middle(lines)
  table.sort(lines, function(a, b) return a.p50_us < b.p50_us end)
  return lines[math.ceil(#lines / 2)]
end

for dtype in options.dtypes:gmatch "[^,]+" do
  local path, ours, theirs, ratios = os.tmpname(), {}, {}, {}
  model:export(path, { batches = { held_out(11) }, tables = dtype, dense = options.dense, allowed_difference = 1,
    finite = false, call = function(m, b) return m(b.dense_features, b.sparse_features) end })
  for _ = 1, options.rounds do
    local found = beside and peer(dtype) or {}
    for n in options.batches:gmatch "%d+" do
      n = tonumber(n)
      local line = measure(path, dtype, n)
      ours[n], theirs[n], ratios[n] = ours[n] or {}, theirs[n] or {}, ratios[n] or {}
      table.insert(ours[n], line)
      if found[n] then
        table.insert(theirs[n], found[n])
        table.insert(ratios[n], found[n].p50_us / line.p50_us)
      end
    end
  end
  for n in options.batches:gmatch "%d+" do
    n = tonumber(n)
    say(middle(ours[n]))
    if #theirs[n] > 0 then
      local line = middle(theirs[n])
      table.sort(ratios[n])
      line.case, line.threads, line.rows = options.case, 1, options.rows
      line.ratio = ratios[n][math.ceil(#ratios[n] / 2)]
      say(line)
    end
  end
  os.remove(path)
end
