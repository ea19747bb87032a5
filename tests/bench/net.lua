-- net.lua: what a step of a row-cut collection sends across the network, and how long it takes: table-row-wise beside
-- row-wise, each codec beside f32. For pretended machines (tests/net/nodes), equally many ranks on each: bytes are what
-- the machines' interfaces have sent, with the headers of packets. Cases take turns, a step each.
--
-- Beside them what is to be expected, of R ranks on M machines, T tables (table-row-wise: equally many on each machine)
-- of D columns, B samples a rank, I ids a bag, b bytes of a number on the wire (4 for f32):
--   row_wise        every rank sends every other rank its part of the sums of that rank's samples, and gets their
--                   gradients: R (R - R/M)
--                   pairs of ranks on two machines, 2 B T D b each
--   table_row_wise  parts are added up within the machine; each sum crosses once, and its gradient: 2 R (1 - 1/M) B T D
--                   b in all
--   ids             of 4 bytes (shards have fewer than 2^31 rows), to their owners: R (1 - 1/M) B T I, and lengths of 4
--                   bytes to all ranks
--                   that own a part of the table
local ffi = require "ffi"
local argparse = require "argparse"
local json = require "dkjson"
local peri = require "perilune"
local plan, C = peri.plan, peri.ffi.C

local parser = argparse("tests/bench/net.lua", "Bytes across the network, and time, of a step of row-cut tables.")
parser:option("--out", "Append results as JSON lines to this file.")
parser:option("--batch", "Samples of a rank.", 1024, tonumber)
parser:option("--ids", "Ids of a bag.", 4, tonumber)
parser:option("--tables", "Embedding tables.", 8, tonumber)
parser:option("--rows", "Rows of a table.", 100000, tonumber)
parser:option("--dim", "Columns of a table.", 64, tonumber)
parser:option("--rounds", "Timed steps of each case.", 15, tonumber)
parser:option("--codecs", "Codecs.", "FP32,FP16,BF16,FP8,INT8,MX4")
local options = parser:parse(arg)

local world = peri.init()
local rank, ranks = world:rank(), world:size()
local node_size = world.local_size
local machines = ranks / node_size
assert(machines > 1 and machines % 1 == 0,
  "tests/bench/net.lua: for several machines with equally many ranks: tests/net/nodes 2,2 ...")

--- Bytes of a number on the wire: 32 numbers share two f32 (INT8) or one byte (MX4).
local wire = { FP32 = 4, FP16 = 2, BF16 = 2, FP8 = 1, INT8 = 40 / 32, MX4 = 17 / 32 }
local entries = {
  row_wise = function() return plan.row_wise() end,
  table_row_wise = function(t) return plan.table_row_wise((t - 1) % machines) end,
}

local function expected(sharding, codec)
  local o = options
  local far = ranks * (ranks - node_size) -- pairs of ranks on two machines
  local once = ranks * (1 - 1 / machines)
  local pairs_of_lengths = sharding == "row_wise" and far or far / machines
  return 2 * (sharding == "row_wise" and far or once) * o.batch * o.tables * o.dim * wire[codec],
    4 * once * o.batch * o.tables * o.ids + 4 * pairs_of_lengths * o.batch * o.tables
end

local function make(sharding, precision)
  local tables, plans = {}, {}
  for t = 1, options.tables do
    tables[t] = peri.EmbeddingBagConfig { name = "t" .. t, num_embeddings = options.rows, embedding_dim = options.dim,
      feature_names = { "f" .. t } }
    plans["t" .. t] = entries[sharding](t)
  end
  local registry = peri.dist.codec.get_qcomm_codecs_registry { forward = precision, backward = precision }
  return peri.shard.ShardedEmbeddingBagCollection { tables = tables, plan = plans, group = world,
    qcomm_codecs_registry = registry, fused_params = { optimizer = "rowwise_adagrad", learning_rate = 0.01 } }
end

local function batch_of(k)
  local keys, bags = {}, options.tables * options.batch
  for t = 1, options.tables do keys[t] = "f" .. t end
  local values, x = ffi.new("int64_t[?]", bags * options.ids), (k * 7919 + rank * 31) * 2654435761 % 2147483647 + 1
  for i = 0, bags * options.ids - 1 do
    x = x * 48271 % 2147483647
    values[i] = x % options.rows
  end
  return peri.KeyedJaggedTensor { keys = keys, stride = options.batch,
    values = peri.Tensor.from_memory(values, { bags * options.ids }, "i64"),
    lengths = peri.full({ bags }, options.ids, "i32") }
end

local function now() return tonumber(C.peri_time_ns()) / 1e6 end

--- Bytes that this machine has sent; one rank of each tells.
local function sent()
  if world.local_rank ~= 0 then return 0 end
  for line in io.lines "/proc/self/net/dev" do
    local numbers = line:match "^%s*eth0:(.*)$"
    if numbers then return tonumber(numbers:match("^" .. ("%s*%d+"):rep(8) .. "%s*(%d+)")) end
  end
  error "tests/bench/net.lua: this machine has no eth0"
end

local batches = { batch_of(1), batch_of(2), batch_of(3) }
local gradient = peri.full({ options.batch, options.tables * options.dim }, 1e-3, "f32")

local function step(case, features)
  world:barrier():wait()
  local before, from = sent(), now()
  local values = case.module:forward(features):values()
  values:backward(gradient)
  local ms = now() - from
  world:barrier():wait()
  local bytes = peri.tensor({ sent() - before }, "f64")
  local time = peri.tensor({ ms }, "f64")
  world:all_reduce(bytes):wait()
  world:all_reduce(time, "max"):wait()
  return bytes:item(), time:item()
end

local median = peri.util.median

local cases = {}
for precision in options.codecs:gmatch "%w+" do
  for _, sharding in ipairs { "row_wise", "table_row_wise" } do
    cases[#cases + 1] = { sharding = sharding, codec = precision, module = make(sharding, precision), bytes = {},
      ms = {} }
  end
end
for round = -1, options.rounds do
  for _, case in ipairs(cases) do
    local bytes, ms = peri.scope(step, case, batches[round % 3 + 1])
    if round > 0 then case.bytes[round], case.ms[round] = bytes, ms end
  end
end

if rank == 0 then
  local out = options.out and assert(io.open(options.out, "a"))
  for _, case in ipairs(cases) do
    local rows, ids = expected(case.sharding, case.codec)
    local r = { sharding = case.sharding, codec = case.codec, ranks = ranks, machines = machines,
      bytes = median(case.bytes), expected_rows = rows, expected_ids = ids, median_ms = median(case.ms) }
    print(("%-15s %-5s %7.2f MB across, %7.2f expected (%.2f rows, %.2f ids)  %7.1f ms"):format(r.sharding, r.codec,
      r.bytes / 1e6, (rows + ids) / 1e6, rows / 1e6, ids / 1e6, r.median_ms))
    if out then out:write(json.encode(r), "\n") end
  end
  if out then out:close() end
end
peri.finish()
