-- collision.lua: ids remapped by maps of managed collision, beside a bare lookup of the same ids in a hash table of as
-- many (find.c: the roofline, one random cache line an id), in turns. Cases: hits (MCH with LFU, ids are counted),
-- hits_lru and hits_distance (with the other policies), lookup (MCH, they are not counted), hits_hash (hash map with
-- PROBE_LRU: times are kept), inserts_1 and inserts_20 (the same with so many new ids in a hundred), evictions (MCH, 20
-- new ids in a hundred, an eviction at every tenth call, which is counted in), step (remap, start of the rows that
-- changed hands, forward and backward of a table batch beside forward and backward alone: `ratio`; over ranks:
-- collision_ranks.lua).
local ffi = require "ffi"
local peri = require "perilune"
local argparse = require "argparse"
local json = require "dkjson"
local C, Tensor, check = peri.ffi.C, peri.Tensor, peri.ffi.check

local parser = argparse("tests/bench/collision.lua", "Speed of managed collision.")
parser:option("--out", "Append results as JSON lines to this file.")
parser:option("--find", "The library built from find.c.", "build/tests/bench/libfind.so")
parser:option("--only", "Cases whose name has this in it.", "")
parser:option("--threads", "Worker threads.", 0, tonumber)
parser:option("--rounds", "Times that everything is measured, in turns.", 15, tonumber)
parser:option("--rows", "Rows of a table.", 4194304, tonumber)
parser:option("--ids", "Ids of a batch.", 1048576, tonumber)
parser:option("--python", "A Python with torchrec: measures its module on the same ids and prints the ratio.")
local options = parser:parse(arg)
peri.init()
if options.threads > 0 then check(C.peri_threads_set(options.threads)) end
local threads, isa = C.peri_threads(), ffi.string(C.peri_cpu_isa())
local out = options.out and assert(io.open(options.out, "a"))

ffi.cdef [[
typedef struct find_table find_table;
find_table *find_open(const int64_t *ids, int64_t n);
void find_close(find_table *t);
int64_t find_run(const find_table *t, const int64_t *ids, int64_t n, int64_t *rows, int32_t threads, int32_t ahead);
]]
local find = ffi.load(options.find)
local ROWS, N = options.rows, options.ids
local KNOWN = math.floor(ROWS * 0.75)

local median = peri.util.median

local function asked(name) return name:find(options.only, 1, true) ~= nil end

local function report(r)
  r.threads, r.isa = threads, isa
  print(("%-12s median %9.3f ms  %7.2f ns an id   %s"):format(r.case, r.median_ms, r.median_ms * 1e6 / N,
    r.share and ("roofline %9.3f ms, share %5.1f %%"):format(r.roofline_ms, 100 * r.share) or r.ratio
      and ("%.2f times"):format(r.ratio)
    or ""))
  io.flush()
  if out then out:write(json.encode(r), "\n") end
end

-- -- ids --------------------------------------------------------------------------------------------------------------

--- Id number i, of 63 bits, no two alike: an odd multiplier modulo 2^63.
local function id_of(i) return ffi.cast("int64_t", bit.band(0x9e3779b97f4a7c15ULL * (i + 1), 0x7fffffffffffffffULL)) end

local state = 1
local function draw(below)
  state = (state * 1103515245 + 12345) % 2147483648
  local high = state
  state = (state * 1103515245 + 12345) % 2147483648
  return math.floor((high * 2147483648 + state) / 4611686018427387904 * below)
end

local known = ffi.new("int64_t[?]", KNOWN)
for i = 0, KNOWN - 1 do known[i] = id_of(i) end
local fresh = KNOWN -- the next id that no one has seen

--- A batch of known ids, of which `percent` in a hundred are new instead.
local function batch(percent)
  local ids = ffi.new("int64_t[?]", N)
  for i = 0, N - 1 do
    if percent > 0 and draw(100) < percent then
      ids[i] = id_of(fresh)
      fresh = fresh + 1
    else
      ids[i] = known[draw(KNOWN)]
    end
  end
  return ids
end

-- -- maps -------------------------------------------------------------------------------------------------------------

local device = ffi.new "peri_device *[1]"
check(C.peri_device_get("cpu", device))
device = device[0]

local function new_map(config)
  local a, c = peri.ffi.struct("peri_collision_config", config), ffi.new "peri_collision *[1]"
  a.name, a.rows = "t", ROWS
  check(C.peri_collision_new(device, a, c))
  return c[0]
end

local function remap(map, ids, training)
  local list, rows = ffi.new("peri_tensor *[1]", ids), ffi.new "peri_tensor *[1]"
  check(C.peri_collision_remap(map, list, 1, training, rows))
  return rows[0]
end

local function tensor(ids, n)
  local shape, t = ffi.new("int64_t[1]", n), ffi.new "peri_tensor *[1]"
  check(C.peri_tensor_new(device, C.PERI_I64, 1, shape, t))
  check(C.peri_tensor_write(t[0], ids, n * 8))
  return t[0]
end

local MCH, HASH = C.PERI_COLLISION_MCH, C.PERI_COLLISION_HASH

--- The ids that MCH gives rows: those of a bucket with more ids than rows are not among them.
local function fill(config)
  local map = new_map(config)
  local ids = tensor(known, KNOWN)
  C.peri_tensor_release(remap(map, ids, true))
  C.peri_tensor_release(ids)
  return map
end

--- A map of the same ids with another configuration.
local function reload(from, config)
  local map = new_map(config)
  local n = C.peri_collision_states(from)
  local names, states = ffi.new("const char *[?]", n), ffi.new("peri_tensor *[?]", n)
  for i = 0, n - 1 do
    names[i] = C.peri_collision_state_name(from, i)
    check(C.peri_collision_state(from, i, states + i))
  end
  check(C.peri_collision_load(map, 0, C.peri_collision_buckets(ROWS), n, names, states))
  for i = 0, n - 1 do C.peri_tensor_release(states[i]) end
  return map
end

local function statistics(map)
  local s = peri.ffi.struct "peri_collision_stats"
  check(C.peri_collision_statistics(map, s))
  return s
end

-- -- measuring --------------------------------------------------------------------------------------------------------

local roof = find.find_open(known, KNOWN)
local rows = ffi.new("int64_t[?]", N)

--- The best number of ids to ask for ahead.
local ahead, best = 0, math.huge
do
  local ids = batch(0)
  for _ = 1, 3 do
    for _, distance in ipairs { 0, 8, 16, 32, 48, 64 } do
      local ns = tonumber(find.find_run(roof, ids, N, rows, threads, distance))
      if ns < best then best, ahead = ns, distance end
    end
  end
end

--- Time `call(ids tensor)` on batches with `percent` new ids, each after a bare lookup of the same ids.
local function measure(name, percent, call, finish)
  if not asked(name) then return end
  local ours, roofs, shares = {}, {}, {}
  local sets = percent == 0 and { batch(0), batch(0), batch(0), batch(0) } or nil
  for round = 0, options.rounds do
    local ids = sets and sets[round % #sets + 1] or batch(percent)
    local t = tensor(ids, N)
    local roof_ms = tonumber(find.find_run(roof, ids, N, rows, threads, ahead)) * 1e-6
    local from = C.peri_time_ns()
    C.peri_tensor_release(call(t))
    local ms = tonumber(C.peri_time_ns() - from) * 1e-6
    C.peri_tensor_release(t)
    if round > 0 then ours[round], roofs[round], shares[round] = ms, roof_ms, roof_ms / ms end
  end
  if finish then return finish(ours, roofs) end
  local middle, least = median(ours)
  report { case = name, what = "perilune", median_ms = middle, best_ms = least, roofline_ms = median(roofs),
    share = median(shares), rows = ROWS, ids = N, ns_per_id = middle * 1e6 / N, prefetch = ahead }
  return middle
end

local NEVER = 2 ^ 31 - 1
local lfu = fill { kind = MCH, policy = C.PERI_FORGET_LFU }
local hits
do
  local map = reload(lfu, { kind = MCH, policy = C.PERI_FORGET_LFU, eviction_interval = NEVER })
  hits = measure("hits", 0, function(ids) return remap(map, ids, true) end)
  measure("lookup", 0, function(ids) return remap(map, ids, false) end)
  assert(statistics(map).missed == 0)
  C.peri_collision_release(map)
end
for _, case in ipairs { { "hits_lru", C.PERI_FORGET_LRU }, { "hits_distance", C.PERI_FORGET_DISTANCE_LFU } } do
  local name, policy = case[1], case[2]
  if asked(name) then
    local learned = fill { kind = MCH, policy = policy }
    local map = reload(learned, { kind = MCH, policy = policy, eviction_interval = NEVER })
    C.peri_collision_release(learned)
    measure(name, 0, function(ids) return remap(map, ids, true) end)
    assert(statistics(map).missed == 0)
    C.peri_collision_release(map)
  end
end
do
  local ttl = ffi.new("int64_t[1]", 1)
  local map = fill { kind = HASH, policy = C.PERI_FORGET_PROBE_LRU, ttl = ttl, n_ttl = 1 }
  local function train(ids) return remap(map, ids, true) end
  measure("hits_hash", 0, train)
  measure("inserts_1", 1, train)
  measure("inserts_20", 20, train)
  C.peri_collision_release(map)
end
do
  local map = reload(lfu, { kind = MCH, policy = C.PERI_FORGET_LFU, eviction_interval = 10 })
  local function mean(times)
    local sum = 0
    for i = 1, #times do sum = sum + times[i] end
    return sum / #times
  end
  measure("evictions", 20, function(ids) return remap(map, ids, true) end, function(ours, roofs)
    report { case = "evictions", what = "perilune", median_ms = median(ours), mean_ms = mean(ours),
      roofline_ms = median(roofs), share = mean(roofs) / mean(ours), rows = ROWS, ids = N }
  end)
  C.peri_collision_release(map)
end
C.peri_collision_release(lfu)

-- -- a step -----------------------------------------------------------------------------------------------------------

local function step()
  local BAGS, DIM = N / 16, 64
  local tables = { { name = "t", rows = ROWS, cols = DIM, init = peri.embed.constant(0.01) } }
  local tbe = peri.embed.tbe.new { tables = tables, data_type = "FP32", seed = 1,
    fused_params = { optimizer = "rowwise_adagrad", bounds_check_mode = "NONE" } }
  local offsets = ffi.new("int64_t[?]", BAGS + 1)
  for b = 0, BAGS do offsets[b] = b * 16 end
  offsets = Tensor.from_memory(offsets, { BAGS + 1 }, "i64")
  local blocks = tbe:blocks { { table = 1, first_bag = 0, bags = BAGS, out_offset = 0, out_stride = DIM } }
  local pooled, grad = peri.zeros { BAGS, DIM }, Tensor.uniform({ BAGS, DIM }, -1, 1, 5)
  local map = fill { kind = MCH, policy = C.PERI_FORGET_LFU, eviction_interval = 10 }
  local plain, managed, ratios = {}, {}, {}
  for round = 0, options.rounds do
    local raw = Tensor.from_memory(batch(1), { N }, "i64")
    local from = C.peri_time_ns()
    local mapped = remap(map, raw.ptr, true)
    local changed = ffi.new "peri_tensor *[1]"
    check(C.peri_collision_evicted(map, changed))
    if changed[0] ~= nil then tbe:reset_rows(1, Tensor.wrap(changed[0])) end
    local remapped = tonumber(C.peri_time_ns() - from) * 1e-6
    local given = ffi.new("int64_t[?]", N)
    check(C.peri_tensor_read(mapped, given, N * 8))
    C.peri_tensor_release(mapped)
    local ids = Tensor.from_memory(given, { N }, "i64")
    from = C.peri_time_ns()
    tbe:forward(ids, offsets, blocks, pooled)
    tbe:backward(ids, offsets, blocks, grad)
    local ms = tonumber(C.peri_time_ns() - from) * 1e-6
    if round > 0 then plain[round], managed[round], ratios[round] = ms, ms + remapped, (ms + remapped) / ms end
    ids:release()
    raw:release()
  end
  report { case = "step", what = "perilune", median_ms = median(managed), plain_ms = median(plain),
    ratio = median(ratios), rows = ROWS, ids = N, dim = DIM }
  C.peri_collision_release(map)
end
if asked "step" then step() end

-- -- TorchRec ---------------------------------------------------------------------------------------------------------

local function save(folder, name, data, n)
  local file = assert(io.open(folder .. "/" .. name, "wb"))
  file:write(ffi.string(data, n * 8))
  file:close()
end

if options.python and options.python ~= "" and hits then
  local folder = os.tmpname()
  os.remove(folder)
  assert(os.execute(("mkdir '%s'"):format(folder)))
  save(folder, "known", known, KNOWN)
  save(folder, "batch", batch(0), N)
  local script = (arg[0]:match "^(.*)/[^/]*$" or ".") .. "/peers/collision.py"
  local pipe = assert(io.popen(("'%s' '%s' --folder '%s' --rows %d --threads %d"):format(options.python, script, folder,
    ROWS, threads)))
  for line in pipe:lines() do
    local r = json.decode(line)
    if r then
      r.ratio = r.median_ms / hits
      report(r)
    end
  end
  pipe:close()
  os.execute(("rm -r '%s'"):format(folder))
end
find.find_close(roof)
