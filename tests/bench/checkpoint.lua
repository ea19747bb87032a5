-- checkpoint.lua: saving and loading beside what the disk does in the same run, in turns. One table of --gb GiB (f32,
-- 64 columns, row-wise Adagrad) over all ranks, row-wise. Columns: case, ranks, GB/s, the disk's GB/s (as many bytes,
-- one sequential file a rank, written and synced, or read with nothing of it in memory), share = the former over the
-- latter.
--
--   save       checkpoint.save of the table and its states
--   load       checkpoint.load under the same plan
--   reshard    under another one: by columns
--   open       opening the checkpoint and reading 100 rows of one table (milliseconds)
--   async      steps from the call of an asynchronous save to its end, and as many without one before and after it:
--              step_ratio is the mean of the former over the mean of the latter, in wall time; cpu_ratio the same in
--              seconds of the process's processors, which a loaded machine disturbs less. One save a round, of
--              --async-gb GiB. A step looks up and updates 20,480 rows a rank, and does nothing else: of 64 batches,
--              so most rows are met again while the save runs. kept: MiB of rows that were kept as they were, at most.
--   marks      a training step of the DLRM of dlrm.lua whose changed rows are marked, for increments, beside one whose
--              are not, in turns:
--              milliseconds of both, and their ratio
local ffi = require "ffi"
local peri = require "perilune"
local argparse = require "argparse"
local json = require "dkjson"
local changes = require "perilune.embed.changes"
package.path = "tests/bench/?.lua;" .. package.path
local dlrm = require "dlrm"
local C, plan = peri.ffi.C, peri.plan

ffi.cdef [[
  int open(const char *, int, ...); int close(int); int fsync(int); int unlink(const char *);
  struct timespec { long tv_sec, tv_nsec; }; int clock_gettime(int, struct timespec *);
  long pread(int, void *, size_t, long); long pwrite(int, const void *, size_t, long); int posix_fadvise(int, long, long, int);
]]
local WRITE, DONTNEED, BLOCK = 1 + 64 + 512, 4, 4 * 2 ^ 20

local parser = argparse("tests/bench/checkpoint.lua", "Speed of checkpoints.")
parser:option("--out", "Append results as JSON lines to this file.")
parser:option("--gb", "GiB of the table.", 4, tonumber)
parser:option("--marks", "Steps with marks, and as many without.", 40, tonumber)
parser:option("--ids", "Ids of a bag in these steps (several: 1,20).", "1,20")
parser:option("--rounds", "Times that everything is measured, in turns.", 3, tonumber)
parser:option("--async-gb", "GiB of the table of the case async (0: as --gb).", 0, tonumber)
parser:option("--pace", "Share of the time that the asynchronous save may copy."):convert(tonumber)
parser:option("--directory", "Where files are made (and removed).", os.getenv "TMPDIR" or "/var/tmp")
local options = parser:parse(arg)
peri.init()
local world = peri.world()
local rank, ranks = world:rank(), world:size()
-- A new folder for each run: what a killed run has left is in nobody's way.
local made = rank == 0 and io.popen(("mktemp -d '%s/peri-bench-checkpoint-XXXXXX'"):format(options.directory)):read "*l"
local folder = world:all_gather_object(made or false)[1]
local path = folder .. "/model"

local function now() return tonumber(C.peri_time_ns()) * 1e-9 end

--- Seconds of f on all ranks together.
local function timed(f)
  world:barrier():wait()
  local from = now()
  f()
  world:barrier():wait()
  return now() - from
end

local buffer = ffi.new("char[?]", BLOCK)
ffi.fill(buffer, BLOCK, 1)
local own = ("%s/disk.%d"):format(folder, rank)

--- Let the system forget a file.
local function forget(file)
  local fd = ffi.C.open(file, 0)
  if fd < 0 then return end
  ffi.C.fsync(fd)
  ffi.C.posix_fadvise(fd, 0, 0, DONTNEED)
  ffi.C.close(fd)
end

local function write_plain(bytes)
  local fd = ffi.C.open(own, WRITE, ffi.cast("int", 420))
  assert(fd >= 0, "the disk's file cannot be made")
  for at = 0, bytes - 1, BLOCK do
    local n = math.min(BLOCK, bytes - at)
    assert(ffi.C.pwrite(fd, buffer, n, at) == n, "the disk is full")
  end
  assert(ffi.C.fsync(fd) == 0)
  ffi.C.close(fd)
end

local function read_plain(bytes)
  local fd = ffi.C.open(own, 0)
  for at = 0, bytes - 1, BLOCK do assert(ffi.C.pread(fd, buffer, math.min(BLOCK, bytes - at), at) > 0) end
  ffi.C.close(fd)
end

local function rows_of(gb) return math.floor(gb * 2 ^ 30 / (65 * 4)) end
local rows = rows_of(options.gb)
local function model(entry, n)
  local ebc = peri.EmbeddingBagCollection { fused_params = { optimizer = "rowwise_adagrad" }, tables = {
    peri.EmbeddingBagConfig { name = "t", num_embeddings = n or rows, embedding_dim = 64, feature_names = { "f" } } } }
  return peri.DistributedModelParallel { module = ebc, plan = { [""] = { t = entry } } }
end

-- -- steps ------------------------------------------------------------------------------------------------------------

local BAGS, LENGTH, TURN = 2048, 10, 50

--- Batches of ids that are drawn from `of_rows` rows, small ones more often.
local function draw_batches(n, of_rows)
  local x, list, lengths = 17 + rank, {}, {}
  for k = 1, BAGS do lengths[k] = LENGTH end
  for b = 1, n do
    local ids = {}
    for k = 1, BAGS * LENGTH do
      x = x * 16807 % 2147483647
      ids[k] = math.floor((x / 2147483647) ^ 3 * of_rows)
    end
    list[b] = peri.KeyedJaggedTensor { keys = { "f" }, values = peri.tensor(ids, "i64"),
      lengths = peri.tensor(lengths, "i32") }
  end
  return list
end

local clock = ffi.new "struct timespec"
--- Seconds that processors have worked for this process.
local function worked()
  assert(ffi.C.clock_gettime(2, clock) == 0)
  return tonumber(clock.tv_sec) + tonumber(clock.tv_nsec) * 1e-9
end

--- Steps, TURN at a time, until finished() says so on every rank: their mean seconds, those of processors, and how many
--- they were.
local function steps_until(finished, m, batches)
  local seconds, processors, steps, done = 0, 0, 0, false
  while not done do
    world:barrier():wait()
    local from, busy = now(), worked()
    for i = 1, TURN do
      peri.scope(function() m(batches[(steps + i) % #batches + 1]):wait():values():sum():backward() end)
    end
    seconds, processors, steps, done = seconds + now() - from, processors + worked() - busy, steps + TURN, true
    for _, one in ipairs(world:all_gather_object(finished(steps))) do done = done and one end
  end
  return seconds / steps, processors / steps, steps
end

local bytes = rows * 65 * 4
local share_of_rank = math.floor(bytes / ranks)
local out = options.out and rank == 0 and assert(io.open(options.out, "a"))
local times = {}
local function note(name, seconds)
  times[name] = times[name] or {}
  table.insert(times[name], seconds)
end

local function forget_all()
  if rank == 0 then
    for file in io.popen(("ls %s/*.safetensors 2>/dev/null"):format(path)):lines() do forget(file) end
  end
  forget(own)
  world:barrier():wait()
end

local saved, columns = model(plan.row_wise()), nil
for round = 1, options.rounds do
  note("disk write", timed(function() write_plain(share_of_rank) end))
  note("save", timed(function() saved:save(path, { replace = round > 1 }) end))
  forget_all()
  note("disk read", timed(function() read_plain(share_of_rank) end))
  note("load", timed(function() saved:load(path) end))
  forget_all()
  collectgarbage()
  columns = columns or model(plan.column_wise { ranks = ranks > 1 and { 0, 1 } or { 0, 0 } })
  note("reshard", timed(function() columns:load(path) end))
  forget_all()
  if rank == 0 then
    local from = now()
    local c = peri.checkpoint.open(path)
    c:read("model/embedding_bags.t.weight", { offset = { math.floor(rows / 2), 0 }, size = { 100, 64 } })
    note("open", now() - from)
    c:close()
  end
  world:barrier():wait()
end

local kept, last_steps = 0, 10000

--- One asynchronous save: steps until it has ended, and as many without it, half of them before it (by the number of
--- the save before this one) and half after it: machines whose speed drifts drift in both.
local function measure_async(m, batches)
  local function without(n) return steps_until(function(steps) return steps >= n end, m, batches) end
  local before, busy_before = without(last_steps / 2)
  local save = m:save(path, { replace = true, async = true, pace = options.pace })
  local with, busy_with, n = steps_until(function()
    local done = save:done()
    if save._moment then kept = math.max(kept, tonumber(C.peri_moment_bytes(save._moment.ptr))) end
    return done
  end, m, batches)
  save:wait()
  local after, busy_after = without(n / 2)
  last_steps = n
  note("async", with / ((before + after) / 2))
  note("async cpu", busy_with / ((busy_before + busy_after) / 2))
  note("async steps", n)
end

local async_gb = options.async_gb > 0 and options.async_gb or options.gb
local stepped = async_gb == options.gb and saved or model(plan.row_wise(), rows_of(async_gb))
local batches = draw_batches(64, rows_of(async_gb))
steps_until(function(steps) return steps >= 200 end, stepped, batches)
for _ = 1, options.rounds do measure_async(stepped, batches) end

-- -- what marking costs -----------------------------------------------------------------------------------------------

local marked = {}

--- Median milliseconds of steps without marks, and with them.
local function measure_marks(ids)
  local sizes = { batch = 2048, tables = 26, rows = 100000, dim = 64, data_type = "FP32", qcomm = "FP32" }
  local trained, optimizer = dlrm.model(sizes, world, "table_wise", 0)
  local of_step, all = dlrm.batches(sizes, rank, ids, 3), { {}, {} }
  local sources = {}
  for _, entry in ipairs(trained.sharded[1]:own_state()) do
    for _, shard in ipairs(entry.tensor:local_shards()) do
      local source = changes.source(nil, shard)
      sources[changes.key(source)] = source
    end
  end
  for i = 1, 2 * options.marks + 6 do
    local batch, marks = of_step[i % 3 + 1], {}
    if i % 2 == 0 then
      for key, source in peri.util.ordered(sources) do marks[key] = changes.marks(source) end
    end
    local seconds = timed(function()
      peri.scope(function()
        optimizer:zero_grad()
        trained:backward((trained(batch)))
        optimizer:step()
      end)
    end)
    for _, m in peri.util.ordered(marks) do m:release() end
    if i > 6 then table.insert(all[i % 2 + 1], seconds * 1e3) end
  end
  return peri.util.median(all[2]), peri.util.median(all[1])
end
for ids in options.ids:gmatch "%d+" do
  local without, with = measure_marks(tonumber(ids))
  marked[#marked + 1] = { case = "marks", ranks = ranks, ids = tonumber(ids), ms = with, plain_ms = without,
    step_ratio = with / without }
end

if rank == 0 then
  print(("%-10s %5s %8s %14s %6s"):format("case", "ranks", "GB/s", "disk GB/s", "share"))
  for _, case in ipairs { { "save", "disk write" }, { "load", "disk read" }, { "reshard", "disk read" } } do
    local rate, disk = bytes / 1e9 / peri.util.median(times[case[1]]), bytes / 1e9 / peri.util.median(times[case[2]])
    print(("%-10s %5d %8.2f %14.2f %6.2f"):format(case[1], ranks, rate, disk, rate / disk))
    if out then
      out:write(json.encode { case = case[1], ranks = ranks, gb = bytes / 1e9, gb_per_s = rate, disk_gb_per_s = disk,
        share = rate / disk }, "\n")
    end
  end
  local ratio, busy = peri.util.median(times.async), peri.util.median(times["async cpu"])
  print(("%-10s %5d %8.3f times the step without it, %.3f times the processor time (%d steps; %.1f MiB kept; rounds: "
    .. "%s)"):format("async", ranks, ratio, busy, peri.util.median(times["async steps"]), kept / 2 ^ 20,
    table.concat(peri.util.map(times.async, function(x) return ("%.3f"):format(x) end), " ")))
  if out then
    out:write(json.encode { case = "async", ranks = ranks, gb = async_gb * 2 ^ 30 / 1e9, step_ratio = ratio,
      cpu_ratio = busy, kept_mib = kept / 2 ^ 20 }, "\n")
  end
  local ms = 1e3 * peri.util.median(times.open)
  print(("%-10s %5d %8.2f ms"):format("open", ranks, ms))
  for _, m in ipairs(marked) do
    print(("%-10s %5d %8.2f ms, %.2f ms without, ratio %.4f (%d ids a bag)"):format("marks", ranks, m.ms, m.plain_ms,
      m.step_ratio, m.ids))
    if out then out:write(json.encode(m), "\n") end
  end
  if out then
    out:write(json.encode { case = "open", ranks = ranks, gb = bytes / 1e9, ms = ms }, "\n")
    out:close()
  end
  peri.checkpoint.remove(path)
end
ffi.C.unlink(own)
world:barrier():wait()
if rank == 0 then os.execute("rmdir " .. folder) end
