-- follow.lua: how fresh a served model is, and what its requests wait for meanwhile: a DLRM of 26 tables trains here,
-- and saves after every step, first whole, then increments, and `perilune serve --follow` answers a client that asks a
-- thousand times a second (tests/bench/http.c). fresh_us: from the end of a step whose increment is saved to the first
-- answer of a model that knows it, the median, and the most of all; p50_us and p99_us are those of the requests.
--
--   perilune run tests/bench/follow.lua HTTP OUT.jsonl
local peri = require "perilune"
local json = require "dkjson"
local serving = require "spec.support.serving"
local shell = require "spec.support.shell"
peri.init()
local client, out = arg[1], arg[2]
local nn, C = peri.nn, peri.ffi.C
local TABLES, ROWS, BATCH, STEPS, DENSE = 26, 100000, 512, 30, 13

local tables, keys = {}, {}
for i = 1, TABLES do
  keys[i] = "f" .. i
  tables[i] = peri.EmbeddingBagConfig { name = "t" .. i, num_embeddings = ROWS, embedding_dim = 64,
    feature_names = { keys[i] } }
end
local model = peri.DistributedModelParallel { module = nn.DLRMTrain(nn.DLRM {
  embedding_bag_collection = peri.EmbeddingBagCollection { tables = tables,
    fused_params = { optimizer = "rowwise_adagrad", learning_rate = 0.05 } }, dense_in_features = DENSE,
  dense_arch_layer_sizes = { 512, 256, 64 }, over_arch_layer_sizes = { 512, 512, 256, 1 } }) }
local optimizer = nn.optim.SGD { params = model:parameters(), lr = 0.01 }

local function batch(step, n)
  local values, lengths = {}, {}
  for i = 1, TABLES * n do values[i], lengths[i] = (i * 379 + step * 7919) % ROWS, 1 end
  return { dense_features = peri.Tensor.uniform({ n, DENSE }, -1, 1, step),
    labels = peri.Tensor.uniform({ n }, 0, 1, step):round(),
    sparse_features = peri.KeyedJaggedTensor { keys = keys, values = values, lengths = lengths } }
end

local folder, clean = shell.temporary()
local function at(name) return folder .. "/" .. name end

--- The line of this benchmark, from what the client saw; ended[step]: the nanosecond at which the step ended.
local function report(ended)
  local fresh, took, known = {}, {}, 0
  for line in io.lines(at "answers") do
    local when, us, version = line:match '^(%d+) ([%d.]+) (%d+)"'
    took[#took + 1] = tonumber(us)
    version = tonumber(version)
    if version < known then error(("an answer of step %d after one of step %d"):format(version, known)) end
    for k = known + 1, version do fresh[k] = (tonumber(when) - ended[k]) / 1e3 end
    known = version
  end
  if known ~= STEPS then error(("the last answer was of step %d of %d"):format(known, STEPS)) end
  table.sort(fresh)
  table.sort(took)
  local line = { case = "follow", threads = 1, steps = STEPS, answers = #took, fresh_us = fresh[math.ceil(STEPS / 2)],
    fresh_most_us = fresh[STEPS], p50_us = took[math.ceil(#took / 2)], p99_us = took[math.ceil(#took * 0.99)],
    most_us = took[#took] }
  print(("follow: %d saves, from the end of a step to an answer that knows it %.0f ms, %.0f at most; %d requests "
    .. "meanwhile: %.0f us, 99th percentile %.0f, %.0f at most"):format(STEPS, line.fresh_us / 1e3,
    line.fresh_most_us / 1e3, line.answers, line.p50_us, line.p99_us, line.most_us))
  local file = assert(io.open(out, "a"))
  file:write(json.encode(line), "\n")
  file:close()
end

local function run()
  model:export(at "now.peri", { name = "m", tables = "int8", dense = "bf16", allowed_difference = 1,
    batches = { batch(0, 16) }, step = 0 })
  local parts = { ('{"name":"dense_features","shape":[1,%d],"datatype":"FP32","data":[%s0]}'):format(DENSE,
    ("0.5,"):rep(DENSE - 1)) }
  for i, key in ipairs(keys) do
    parts[i + 1] = ('{"name":"%s","shape":[1],"datatype":"INT64","data":[%d]},'
      .. '{"name":"%s.lengths","shape":[1],"datatype":"INT32","data":[1]}'):format(key, i * 379 % ROWS, key)
  end
  shell.write(at "body", '{"inputs":[' .. table.concat(parts, ",") .. "]}")
  local saver = peri.checkpoint.Saver { folder = at "run", parts = { model = model, optimizer = optimizer }, every = 1,
    full_every = STEPS + 1, keep = STEPS + 1 }
  local ended = {} -- ended[step]: the nanosecond at which it ended
  local function step(number)
    peri.scope(function()
      optimizer:zero_grad()
      model(batch(number, BATCH)):backward()
      optimizer:step()
    end)
    ended[number] = tonumber(C.peri_time_ns())
    saver:step(number)
  end
  step(0)
  local server = serving.start(at "now.peri", "--follow " .. at "run")
  local asker = serving.run(("%s %s /v2/models/m/infer %s %s watch >/dev/null & echo $!"):format(client,
    server.url:match ":(%d+)/", at "body", at "answers")):match "%d+"
  for number = 1, STEPS do
    os.execute "sleep 0.3"
    step(number)
  end
  saver:close()
  local last, health = ('"version":"%d"'):format(STEPS), ""
  for _ = 1, 200 do
    health = server:get "health"
    if health:find(last, 1, true) then break end
    os.execute "sleep 0.05"
  end
  os.execute("sleep 0.1; kill " .. asker .. "; sleep 0.2")
  local log = server:stop()
  if not health:find(last, 1, true) then error("the server does not follow: " .. health .. log) end
  report(ended)
end
local ok, why = xpcall(run, debug.traceback)
clean()
if not ok then error(why, 0) end
