-- sequence.lua: an unsharded EmbeddingCollection: forward, and backward with its fused SGD: 26 tables of 100,000 x 64,
-- 2,048 samples a batch. Upstream gradients lie ready, as on the other sides.
local ffi = require "ffi"
local argparse = require "argparse"
local json = require "dkjson"
local peri = require "perilune"
local C = peri.ffi.C

local parser = argparse("tests/bench/sequence.lua", "Time of an EmbeddingCollection.")
parser:option("--out", "Append results as JSON lines to this file.")
parser:option("--ids", "Ids of a sample, of each feature.", 20, tonumber)
parser:option("--steps", "Timed steps.", 9, tonumber)
local options = parser:parse(arg)

local TABLES, ROWS, DIM, BATCH = 26, 100000, 64, 2048

local tables, keys = {}, {}
for t = 1, TABLES do
  keys[t] = "f" .. t
  tables[t] = peri.EmbeddingConfig { name = "t" .. t, num_embeddings = ROWS, embedding_dim = DIM,
    feature_names = { keys[t] } }
end
local ec = peri.EmbeddingCollection { tables = tables, fused_params = { optimizer = "sgd", learning_rate = 0.01 } }

local n = TABLES * BATCH * options.ids
local batches, grads = {}, {}
for k = 1, 3 do
  local values, x = ffi.new("int64_t[?]", n), k
  for i = 0, n - 1 do
    x = x * 48271 % 2147483647
    values[i] = x % ROWS
  end
  batches[k] = peri.KeyedJaggedTensor { keys = keys, values = peri.Tensor.from_memory(values, { n }, "i64"),
    lengths = peri.full({ TABLES * BATCH }, options.ids, "i32"), stride = BATCH }
end
for t = 1, TABLES do grads[t] = peri.full({ BATCH * options.ids, DIM }, 1e-3, "f32") end

local function now() return tonumber(C.peri_time_ns()) / 1e6 end

--- Milliseconds of a step.
local function step(batch)
  local from, rows = now(), {}
  local result = ec:forward(batch)
  for t, key in ipairs(keys) do rows[t] = result[key]:values() end
  local at = now()
  peri.backward(rows, grads)
  return now() - from, at - from
end

local times = {}
for i = -1, options.steps do
  local ms = peri.scope(step, batches[i % 3 + 1])
  if i > 0 then times[i] = ms end
end
local middle, best = peri.util.median(times)
local r = { ids = options.ids, median_ms = middle, best_ms = best, threads = C.peri_threads() }
print(("EmbeddingCollection, %d ids: %.1f ms (best %.1f)"):format(r.ids, r.median_ms, r.best_ms))
if options.out then
  local file = assert(io.open(options.out, "a"))
  file:write(json.encode(r), "\n")
  file:close()
end
