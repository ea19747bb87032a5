-- collision_ranks.lua: the whole sparse step over ranks with managed collision beside the step without: input dist
-- (with it: raw ids become rows, are counted and learned, rows that change hands start again), lookup, output dist,
-- backward pass and update, row-wise sharded, one new id in a hundred, evictions at every tenth step. Both steps take
-- turns on as many ids of the same tables.
local ffi = require "ffi"
local argparse = require "argparse"
local json = require "dkjson"
local peri = require "perilune"
local plan, embed, C = peri.plan, peri.embed, peri.ffi.C

local parser = argparse("tests/bench/collision_ranks.lua", "The sparse step with managed collision, over ranks.")
parser:option("--out", "Append results as JSON lines to this file.")
parser:option("--tables", "Embedding tables.", 4, tonumber)
parser:option("--rows", "Rows of a table.", 1000000, tonumber)
parser:option("--dim", "Columns of a table.", 64, tonumber)
parser:option("--samples", "Samples of a rank.", 4096, tonumber)
parser:option("--ids", "Ids of a bag.", 16, tonumber)
parser:option("--rounds", "Timed steps of each; every tenth evicts.", 30, tonumber)
local options = parser:parse(arg)

local world = peri.dist.init {}
local rank, ranks = world:rank(), world:size()
local function now() return tonumber(C.peri_time_ns()) / 1e6 end

-- -- ids --------------------------------------------------------------------------------------------------------------

local KNOWN = math.floor(options.rows * 0.75)
local function id_of(i) return ffi.cast("int64_t", bit.band(0x9e3779b97f4a7c15ULL * (i + 1), 0x7fffffffffffffffULL)) end

local x = 88172645463325252ULL + rank
local function draw(below)
  x = bit.bxor(x, bit.lshift(x, 13))
  x = bit.bxor(x, bit.rshift(x, 7))
  x = bit.bxor(x, bit.lshift(x, 17))
  return tonumber(x % below)
end

local keys = {}
for t = 1, options.tables do keys[t] = "f" .. t end
local N = options.samples * options.ids

--- A batch of the ids that make(t, i) gives, i = 0..N - 1.
local function batch(make)
  local values = ffi.new("int64_t[?]", options.tables * N)
  for t = 1, options.tables do
    for i = 0, N - 1 do values[(t - 1) * N + i] = make(t, i) end
  end
  return peri.KeyedJaggedTensor { keys = keys, stride = options.samples,
    values = peri.Tensor.from_memory(values, { options.tables * N }, "i64"),
    lengths = peri.full({ options.tables * options.samples }, options.ids, "i32") }
end

local fresh = KNOWN + rank
local function raw_batch()
  return batch(function()
    if draw(100) > 0 then return id_of(draw(KNOWN)) end
    fresh = fresh + ranks
    return id_of(fresh)
  end)
end

-- -- modules ----------------------------------------------------------------------------------------------------------

local fused = { optimizer = "rowwise_adagrad", learning_rate = 0.01 }
local tables, plans, maps = {}, {}, {}
for t = 1, options.tables do
  tables[t] = peri.EmbeddingBagConfig { name = "t" .. t, num_embeddings = options.rows, embedding_dim = options.dim,
    feature_names = { keys[t] } }
  plans["t" .. t] = plan.row_wise()
  maps["t" .. t] = embed.MCHManagedCollisionModule { zch_size = options.rows, eviction_interval = 10,
    eviction_policy = embed.LFU_EvictionPolicy {} }
end
local plain = peri.shard.ShardedEmbeddingBagCollection { tables = tables, plan = plans, group = world,
  fused_params = fused, seed = 1 }
local managed = peri.shard.ShardedManagedCollisionEmbeddingBagCollection { tables = tables, plan = plans, group = world,
  fused_params = fused, seed = 1, managed_collision_collection =
    embed.ManagedCollisionCollection { managed_collision_modules = maps, embedding_configs = tables } }

local grad = peri.full({ options.samples, options.tables * options.dim }, 1e-3, "f32")
local function step(module, features)
  collectgarbage() -- what making the ids has left is not the step's
  world:barrier():wait()
  local from = now()
  peri.scope(function() peri.backward({ module:forward(features):values() }, { grad }) end)
  return now() - from
end

--- The largest of all ranks' numbers.
local function slowest(list)
  local t = peri.tensor(list, "f64")
  world:all_reduce(t, "max"):wait()
  return t:to_list()
end
local median = peri.util.median

for from = rank * N, KNOWN - 1, ranks * N do -- the maps learn what is known
  step(managed, batch(function(_, i) return id_of(math.min(from + i, KNOWN - 1)) end))
end
local rounds = math.ceil(KNOWN / N / ranks) -- ranks take part in as many steps
for _ = math.ceil((KNOWN - rank * N) / (ranks * N)) + 1, rounds do step(managed, raw_batch()) end

local with, without, ratios = {}, {}, {}
for round = -21, options.rounds do -- the first evictions give ids of the beginning rows
  local raw, rows = raw_batch(), batch(function() return draw(options.rows) end)
  local times = slowest { step(plain, rows), step(managed, raw) }
  if round > 0 then without[round], with[round], ratios[round] = times[1], times[2], times[2] / times[1] end
end
local sum_with, sum_without = 0, 0
for i = 1, options.rounds do sum_with, sum_without = sum_with + with[i], sum_without + without[i] end

local s = managed:statistics().t1
if rank == 0 then
  local r = { case = "step", ranks = ranks, median_ms = median(with), plain_ms = median(without),
    ratio = median(ratios), mean_ratio = sum_with / sum_without, rows = options.rows, ids = options.tables * N,
    dim = options.dim, hit_rate = s.hit_rate, evicted = s.evicted }
  print(("step, %d ranks median %9.3f ms, without %9.3f ms, %.2f times (means: %.2f); %.1f %% hits, %d evictions of a "
    .. "table"):format(
    ranks, r.median_ms, r.plain_ms, r.ratio, r.mean_ratio, 100 * r.hit_rate, r.evicted))
  if options.out then
    local out = assert(io.open(options.out, "a"))
    out:write(json.encode(r), "\n")
    out:close()
  end
end
