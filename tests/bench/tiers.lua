-- tiers.lua: how fast tables in files are, by load factor and policy, beside the same table in memory and beside what
-- the disk does in the same run. One table of --rows x --dim f32 with row-wise Adagrad; a step looks --batch bags of
-- --length ids up and updates their rows. Columns: case, best and median time of a step, rows (ids) per second, times
-- the table in memory, hit rate, MB read and written per step.
--
-- Two states of the file: "warm", when the system keeps it in memory (what a file smaller than memory comes to), and
-- "cold", when its pages are dropped before each step, so that every miss goes to the disk.
local ffi = require "ffi"
local peri = require "perilune"
local argparse = require "argparse"
local json = require "dkjson"
local C, check = peri.ffi.C, peri.ffi.check

ffi.cdef [[
  int open(const char *, int, ...); int close(int); int fsync(int);
  long pread(int, void *, size_t, long); int posix_fadvise(int, long, long, int);
]]
local DONTNEED = 4

local parser = argparse("tests/bench/tiers.lua", "Speed of tables in files.")
parser:option("--out", "Append results as JSON lines to this file.")
parser:option("--rows", "Rows of the table.", 1000000, tonumber)
parser:option("--dim", "Columns.", 64, tonumber)
parser:option("--batch", "Bags of a batch.", 1024, tonumber)
parser:option("--length", "Ids of a bag.", 20, tonumber)
parser:option("--steps", "Measured steps of a case.", 12, tonumber)
parser:option("--directory", "Where the file is made (and removed).", os.getenv "TMPDIR" or "/var/tmp")
parser:option("--only", "Cases whose name has this in it.", "")
parser:option("--giant",
  "Instead: train a table whose file seems to have this many GiB (rows that nobody used take no room), from "
    .. "a cache of 60,000 rows, and compare every row that was used with a table in memory.", nil, tonumber)
parser:option("--ways", "Instead: caches in sets of so many slots, in turns (0: rows may use any slot), as 0,8,32.")
parser:option("--threads", "Worker threads.", 0, tonumber)
local options = parser:parse(arg)
if options.threads > 0 then check(C.peri_threads_set(options.threads)) end

local function now() return tonumber(C.peri_time_ns()) end

-- -- the disk ---------------------------------------------------------------------------------------------------------

local BLOCK = 4096

--- A program that reads blocks of a file at random for a second and prints how many. Several of it make the disk's
--- queue deep.
local reader = [[
  local ffi = require "ffi"
  ffi.cdef "int open(const char *, int, ...); long pread(int, void *, size_t, long);"
  ffi.cdef "struct timespec { long s, ns; }; int clock_gettime(int, struct timespec *);"
  local t = ffi.new "struct timespec"
  local function now() ffi.C.clock_gettime(1, t) return tonumber(t.s) + tonumber(t.ns) * 1e-9 end
  local path, blocks, x = arg[1], tonumber(arg[2]), tonumber(arg[3]) * 7919 + 1
  local room = ffi.new "char[8192]"
  local buffer = room + (4096 - tonumber(ffi.cast("uintptr_t", room)) % 4096) -- O_DIRECT: past the system's memory, aligned
  local fd, n = ffi.C.open(path, 16384), 0
  local stop = now() + 1
  while now() < stop do
    x = x * 48271 % 2147483647
    if ffi.C.pread(fd, buffer, 4096, math.floor(x / 2147483647 * blocks) * 4096) == 4096 then n = n + 1 end
  end
  print(n)
]]

--- Write the file to the disk and let the system forget it.
local function drop(path)
  local fd = ffi.C.open(path, 0)
  if fd < 0 then error("cannot open " .. path) end
  ffi.C.fsync(fd)
  ffi.C.posix_fadvise(fd, 0, 0, DONTNEED)
  ffi.C.close(fd)
end

local function sequential_speed(path)
  drop(path)
  local fd, size, total = ffi.C.open(path, 0), 4 * 2 ^ 20, 0
  local buffer, from = ffi.new("char[?]", size), now()
  while now() - from < 2e9 do
    local n = tonumber(ffi.C.pread(fd, buffer, size, total))
    if n <= 0 then break end
    total = total + n
  end
  ffi.C.close(fd)
  return total / (now() - from) * 1e9
end

--- Blocks per second that `readers` processes read at random.
local function random_speed(path, blocks, readers)
  local script, pipes, sum = os.tmpname(), {}, 0
  local file = assert(io.open(script, "w"))
  file:write(reader)
  file:close()
  drop(path)
  for i = 1, readers do pipes[i] = io.popen(("luajit %s %s %d %d"):format(script, path, blocks, i)) end
  for _, pipe in ipairs(pipes) do
    sum = sum + (tonumber(pipe:read "*l") or 0)
    pipe:close()
  end
  os.remove(script)
  return sum
end

-- -- batches ----------------------------------------------------------------------------------------------------------

local seed = 12345
local function draw()
  seed = seed * 48271 % 2147483647
  return seed / 2147483647
end

local BATCHES = 24
local bags, ids = options.batch, options.batch * options.length
local offsets
do
  local list = {}
  for i = 0, bags do list[i + 1] = i * options.length end
  offsets = peri.tensor(list, "i64")
end

--- uniform: every row alike. skewed: rank r with a chance of 1 / r (Zipf, exponent 1), ranks strewn over the table.
local function batches_of(kind)
  local list = {}
  for b = 1, BATCHES do
    local values = {}
    for i = 1, ids do
      local x = draw()
      if kind == "skewed" then
        local rank = math.floor(options.rows ^ x)
        values[i] = rank * 7919 % options.rows
      else
        values[i] = math.floor(x * options.rows)
      end
    end
    list[b] = peri.tensor(values, "i64")
  end
  return list
end

-- -- cases ------------------------------------------------------------------------------------------------------------

local out = options.out and assert(io.open(options.out, "a"))
local in_memory = {}

local function make(cache)
  return peri.embed.tbe.new {
    tables = { { name = "t", rows = options.rows, cols = options.dim } }, device = "cpu", seed = 1,
    fused_params = { optimizer = "rowwise_adagrad", learning_rate = 0.01, cache_params = cache },
  }
end

local blocks = { { table = 1, first_bag = 0, bags = bags, out_offset = 0, out_stride = options.dim } }
local grad = peri.full({ bags, options.dim }, 0.01)

--- Times and counts of steps over `list` after `warm` of them. `before` runs before each measured step, uncounted.
local function measure(tbe, list, args)
  local block_list, times = tbe:blocks(blocks), {}
  local result = peri.zeros({ bags, options.dim })
  local before_stats
  for step = 1, args.warm + options.steps do
    if step == args.warm + 1 then before_stats = tbe:cache_statistics() end
    if args.before and step > args.warm then args.before() end
    local x, ahead = list[(step - 1) % #list + 1], list[step % #list + 1]
    local from = now()
    if args.train then
      tbe:forward(x, offsets, block_list, result)
      if args.prefetch then tbe:prefetch(ahead, offsets, block_list) end
      tbe:backward(x, offsets, block_list, grad)
    else
      peri.no_grad(tbe.forward, tbe, x, offsets, block_list, result)
    end
    if step > args.warm then times[#times + 1] = now() - from end
  end
  table.sort(times)
  local after, counts = tbe:cache_statistics(), nil
  if after then
    counts = { io = after.io }
    for name, value in pairs(after) do
      if type(value) == "number" then counts[name] = (value - before_stats[name]) / options.steps end
    end
  end
  return times[1], times[math.ceil(#times / 2)], counts
end

local function report(name, key, best, median, counts, more)
  local r = { case = name, ids = ids, best_ms = best / 1e6, median_ms = median / 1e6, rows_per_s = ids / median * 1e9,
    threads = C.peri_threads() }
  if key and not in_memory[key] then in_memory[key] = median end
  r.times_in_memory = key and median / in_memory[key] or nil
  local text = ("%-46s %8.2f ms %8.2f ms %7.2f M rows/s"):format(name, r.best_ms, r.median_ms, r.rows_per_s / 1e6)
  if key then text = text .. (" %6.2fx memory"):format(r.times_in_memory) end
  if counts then
    local unique = counts.hits + counts.misses
    r.hit_rate, r.read_mb, r.written_mb = counts.hits / unique, counts.bytes_read / 1e6, counts.bytes_written / 1e6
    r.misses, r.prefetch_hits, r.conflict_misses, r.evictions, r.io = counts.misses, counts.prefetch_hits,
      counts.conflict_misses, counts.evictions, counts.io
    text = text .. ("  hits %5.1f %%  read %6.2f MB  written %6.2f MB"):format(100 * r.hit_rate, r.read_mb,
      r.written_mb)
  end
  for k, v in pairs(more or {}) do r[k] = v end
  print(text .. (more and more.text or ""))
  if out then out:write(json.encode(r), "\n") end
end

-- -- a table larger than memory ---------------------------------------------------------------------------------------

local function first_number(path, pattern)
  local file = assert(io.open(path))
  local text = file:read "*a"
  file:close()
  return tonumber(text:match(pattern))
end

local function command(line)
  local pipe = io.popen(line)
  local text = pipe:read "*a"
  pipe:close()
  return text
end

--- Steps over uniform ids of the whole table, and the same ids, renumbered, in a table in memory of just the rows that
--- are used.
local function giant(folder)
  local rows, number, used, giants, smalls = math.floor(options.giant * 2 ^ 30 / 272), {}, {}, {}, {}
  for b = 1, options.steps do
    local x, y = {}, {}
    for i = 1, ids do
      local id = math.floor(draw() * 2 ^ 22) * 2 ^ 10 + math.floor(draw() * 2 ^ 10)
      if i % 4 == 0 and #used > 0 then id = used[1 + math.floor(draw() * #used)] end
      id = id % rows
      if not number[id] then
        used[#used + 1] = id
        number[id] = #used - 1
      end
      x[i], y[i] = id, number[id]
    end
    giants[b], smalls[b] = peri.tensor(x, "i64"), peri.tensor(y, "i64")
  end
  local function made(n, cache)
    return peri.embed.tbe.new {
      tables = { { name = "t", rows = n, cols = options.dim, init = peri.embed.constant(0.25) } }, device = "cpu",
      fused_params = { optimizer = "rowwise_adagrad", learning_rate = 0.1, cache_params = cache },
    }
  end
  local large, small = made(rows, { load_factor = 60000 / rows, directory = folder }), made(#used, nil)
  local lists = { large:blocks(blocks), small:blocks(blocks) }
  local from = now()
  for b = 1, options.steps do
    local result = peri.zeros({ bags, options.dim })
    large:forward(giants[b], offsets, lists[1], result)
    if giants[b + 1] then large:prefetch(giants[b + 1], offsets, lists[1]) end
    large:backward(giants[b], offsets, lists[1], peri.Tensor.uniform({ bags, options.dim }, -1, 1, b, 0))
  end
  large:flush()
  local seconds, counts = (now() - from) / 1e9, large:cache_statistics()
  for b = 1, options.steps do
    small:forward(smalls[b], offsets, lists[2], peri.zeros({ bags, options.dim }))
    small:backward(smalls[b], offsets, lists[2], peri.Tensor.uniform({ bags, options.dim }, -1, 1, b, 0))
  end
  large:release()
  large = made(rows, { load_factor = 60000 / rows, directory = folder })
  local want = small:state(1)
  for first = 1, #used, 20000 do -- lookups of single rows, which give their bits
    local x, cuts, last = {}, { 0 }, math.min(#used, first + 19999)
    for k = first, last do x[#x + 1], cuts[#cuts + 1] = used[k], k - first + 1 end
    local list = large:blocks { { table = 1, first_bag = 0, bags = #x, out_offset = 0, out_stride = options.dim } }
    local function look()
      return large:lookup(peri.tensor(x, "i64"), peri.tensor(cuts, "i64"), list, #x, options.dim)
    end
    local got, expected = peri.no_grad(look):to_list(), want:slice(1, first - 1, last):to_list()
    for i = 1, #got do
      assert(got[i] == expected[i], ("row %d differs"):format(used[first + math.floor((i - 1) / options.dim)]))
    end
  end
  large:release()
  local room = tonumber(command("du -B1 -s " .. folder):match "%d+")
  print(("a table of %.1f GiB (%d rows) on a machine of %.1f GiB: %d steps in %.1f s, %d rows used, evicted %d, read "
    .. "%.1f MB, written %.1f MB; the file takes %.2f GiB, the process %.2f GiB at most; every row as in "
    .. "memory"):format(options.giant, rows, first_number("/proc/meminfo", "MemTotal:%s+(%d+)") / 2 ^ 20, options.steps,
    seconds, #used, counts.evictions, counts.bytes_read / 1e6, counts.bytes_written / 1e6, room / 2 ^ 30,
    first_number("/proc/self/status", "VmHWM:%s+(%d+)") / 2 ^ 20))
end

local function wanted(name) return name:find(options.only, 1, true) end

local folder = ("%s/perilune-bench-%d"):format(options.directory, now() % 1000000000)
assert(os.execute("mkdir " .. folder) == 0)
if options.giant then
  local ok, err = pcall(giant, folder)
  collectgarbage()
  os.execute("rm -rf " .. folder)
  if not ok then error(err, 0) end
  os.exit(0, true)
end

local inputs = { uniform = batches_of "uniform", skewed = batches_of "skewed" }

--- Steps of caches that differ in their sets, in turns: medians, and what is found. The files have no name.
local function compare_ways(kind, factor, algorithm)
  local list, caches = inputs[kind], {}
  local result = peri.zeros({ bags, options.dim })
  for ways in options.ways:gmatch "%d+" do
    local tbe = make { load_factor = factor, algorithm = algorithm, ways = tonumber(ways) }
    caches[#caches + 1] = { ways = ways, tbe = tbe, blocks = tbe:blocks(blocks), lookups = {}, times = {} }
  end
  for step = 1, 2 * BATCHES + options.steps do
    local x = list[(step - 1) % #list + 1]
    for _, c in ipairs(caches) do
      if step == 2 * BATCHES + 1 then c.before = c.tbe:cache_statistics() end
      local from = now()
      c.tbe:forward(x, offsets, c.blocks, result)
      local middle = now()
      c.tbe:backward(x, offsets, c.blocks, grad)
      if c.before then
        table.insert(c.lookups, middle - from)
        table.insert(c.times, now() - from)
      end
    end
  end
  for _, c in ipairs(caches) do
    table.sort(c.lookups)
    table.sort(c.times)
    local s, half = c.tbe:cache_statistics(), math.ceil(options.steps / 2)
    local found, missed = s.hits - c.before.hits, s.misses - c.before.misses
    local r = { case = ("%s, %g %s, %s ways"):format(kind, factor, algorithm, c.ways),
      lookup_ms = c.lookups[half] / 1e6, median_ms = c.times[half] / 1e6, hit_rate = found / (found + missed),
      set_conflicts = s.set_conflicts - c.before.set_conflicts }
    print(("%-28s lookup %6.2f ms  train %6.2f ms  hits %6.2f %%  in other sets %d"):format(r.case, r.lookup_ms,
      r.median_ms, 100 * r.hit_rate, r.set_conflicts))
    if out then out:write(json.encode(r), "\n") end
    c.tbe:release()
  end
end

if options.ways then
  for _, factor in ipairs { 0.5, 0.2, 0.05 } do
    for _, algorithm in ipairs { "LRU", "LFU" } do compare_ways("skewed", factor, algorithm) end
  end
  os.execute("rm -rf " .. folder)
  os.exit(0, true)
end

for _, kind in ipairs { "uniform", "skewed" } do
  local tbe = make(nil)
  report(("in memory, %s, train"):format(kind), kind, measure(tbe, inputs[kind], { train = true, warm = BATCHES }))
  report(("in memory, %s, lookup"):format(kind), kind .. " lookup", measure(tbe, inputs[kind], { warm = 2 }))
  tbe:release()
end

local path = ("%s/t.rows-0-%d.cols-0-%d.peri"):format(folder, options.rows, options.dim)

local function fill_file()
  local tbe, chunk, from = make { load_factor = 0.001, directory = folder }, 2 ^ 16, now()
  for row = 0, options.rows - 1, chunk do
    local n = math.min(chunk, options.rows - row)
    peri.scope(function() tbe:write(1, "weight", row, peri.Tensor.uniform({ n, options.dim }, -1, 1, 1, row)) end)
  end
  tbe:flush()
  local bytes = tbe:cache_statistics().bytes_written
  print(("file of %.0f MB written and flushed at %.0f MB/s"):format(bytes / 1e6, bytes / (now() - from) * 1e3))
  tbe:release()
end

local function cases()
  fill_file()
  local record = 272
  local blocks_of_file = math.floor(options.rows * record / BLOCK)
  local raw = { case = "the disk", sequential_mb_per_s = sequential_speed(path) / 1e6 }
  for _, readers in ipairs { 1, 16, 32 } do
    raw["random_reads_per_s_" .. readers] = random_speed(path, blocks_of_file, readers)
  end
  print(("the disk: %.0f MB/s in sequence; %.0f, %.0f, %.0f random blocks of 4 KB per second with 1, 16, 32 "
    .. "readers"):format(
    raw.sequential_mb_per_s, raw.random_reads_per_s_1, raw.random_reads_per_s_16, raw.random_reads_per_s_32))
  if out then out:write(json.encode(raw), "\n") end

  for _, kind in ipairs { "uniform", "skewed" } do
    for _, factor in ipairs { 0.05, 0.2, 1 } do
      for _, algorithm in ipairs(kind == "skewed" and factor < 1 and { "LRU", "LFU" } or { "LRU" }) do
        for _, prefetch in ipairs { false, true } do
          local name = ("warm, %s, %g %s%s, train"):format(kind, factor, algorithm, prefetch and " prefetch" or "")
          if wanted(name) then
            local tbe = make { load_factor = factor, algorithm = algorithm, directory = folder }
            report(name, kind, measure(tbe, inputs[kind], { train = true, prefetch = prefetch, warm = BATCHES }))
            tbe:flush()
            tbe:release()
          end
        end
      end
    end
    local name = ("warm, %s, 1 LRU, lookup"):format(kind)
    if wanted(name) then
      local tbe = make { load_factor = 1, directory = folder }
      report(name, kind .. " lookup", measure(tbe, inputs[kind], { warm = BATCHES }))
      tbe:release()
    end
  end
  for _, io in ipairs { "uring", "threads" } do
    local name = ("cold, uniform, 0.05 LRU, lookup, %s"):format(io)
    if wanted(name) then
      ffi.cdef "int setenv(const char *, const char *, int);"
      ffi.C.setenv("PERI_ROW_IO", io, 1)
      local ok, tbe = pcall(make, { load_factor = 0.05, directory = folder })
      if ok then
        local best, median, counts = measure(tbe, inputs.uniform, { warm = 3, before = function() drop(path) end })
        local rate = counts.misses / median * 1e9
        report(name, nil, best, median, counts, { reads_per_s = rate,
          share_of_disk = rate / math.max(raw.random_reads_per_s_16, raw.random_reads_per_s_32),
          text = ("  %.0f reads/s, %.0f %% of the disk's"):format(rate,
            100 * rate / math.max(raw.random_reads_per_s_16, raw.random_reads_per_s_32)) })
        tbe:release()
      else
        print(("%-46s skipped: %s"):format(name, tostring(tbe)))
      end
    end
  end
end

local ok, err = pcall(cases)
collectgarbage()
os.execute("rm -rf " .. folder)
if not ok then error(err, 0) end
