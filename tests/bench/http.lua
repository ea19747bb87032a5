-- http.lua: what HTTP adds to a call: a model file of 26 tables, served on this machine, and tests/bench/http.c as its
-- client, in turns with a bare server, tests/bench/http_bare.c.
--
--   perilune run tests/bench/http.lua HTTP OUT.jsonl BARE
local peri = require "perilune"
local serving = require "spec.support.serving"
local shell = require "spec.support.shell"
peri.init()
local client, out, bare = arg[1], arg[2], arg[3]
local nn = peri.nn

local tables, fields = {}, {}
for i = 1, 26 do
  tables[i] = peri.EmbeddingBagConfig { name = "t" .. i, num_embeddings = 10000, embedding_dim = 64,
    feature_names = { "f" .. i } }
  fields[i] = ('"f%d":%d'):format(i, i * 379 % 10000)
end
local model = nn.DLRMTrain(nn.DLRM { embedding_bag_collection = peri.EmbeddingBagCollection { tables = tables },
  dense_in_features = 13, dense_arch_layer_sizes = { 512, 256, 64 }, over_arch_layer_sizes = { 512, 512, 256, 1 } })
local values, lengths, keys = {}, {}, {}
for i = 1, 26 do
  keys[i] = "f" .. i
  for k = 1, 16 do values[#values + 1], lengths[#lengths + 1] = (i * k * 379) % 10000, 1 end
end
local path, body = os.tmpname() .. ".peri", os.tmpname()
model:export(path, { name = "m", tables = "int8", dense = "bf16", allowed_difference = 1, batches = { {
  dense_features = peri.Tensor.uniform({ 16, 13 }, -1, 1, 1),
  sparse_features = peri.KeyedJaggedTensor { keys = keys, values = values, lengths = lengths } } } })
local file = assert(io.open(body, "w"))
file:write(('{"instances":[{"dense_features":[%s],%s}]}'):format(("0.5,"):rep(12) .. "0.25", table.concat(fields, ",")))
file:close()

-- The client has the last processor, the server the others: what a client takes is not the server's.
local allowed, cpus = shell.read("/proc/self/status"):match "Cpus_allowed_list:%s*(%S+)", {}
for first, last in (allowed .. ","):gmatch "(%d+)%-?(%d*)," do
  for cpu = tonumber(first), tonumber(last) or tonumber(first) do cpus[#cpus + 1] = cpu end
end
local function on(from, to) return #cpus > 1 and "taskset -c " .. table.concat(cpus, ",", from, to) or "" end
local server = serving.start(path, nil, on(1, #cpus - 1))
local bare_server = io.popen(("echo $$; exec %s %s"):format(on(1, #cpus - 1), bare))
local process, port = bare_server:read("*l", "*n")
local ok = os.execute(("%s %s %s /v1/models/m:predict %s %s %d"):format(on(#cpus, #cpus), client,
  server.url:match ":(%d+)/", body, out, port)) == 0
server:stop()
os.execute("kill " .. process)
bare_server:close()
for _, name in ipairs { path, body } do os.remove(name) end
os.exit(ok and 0 or 1)
