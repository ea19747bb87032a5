-- data.lua: how fast samples come: Criteo files parsed (the file is in the page cache; the roofline is finding its line
-- ends), the same packed by gzip, as columns that are described, as a folder of samples, in its order and shuffled;
-- synthetic samples made, and package lists turned into batches. Columns: name, rows/s, ids/s, MB/s of the file, and
-- with --step how many times as fast as a training step of 2,048 samples (tests/bench/step.lua), which a loader should
-- be 5 times. Then by workers, 1, 2, 4, ... up to the processors: rows/s of batches as tensors, the share of so many
-- times one worker's, and what taking a batch that is there costs.
local peri = require "perilune"
local argparse = require "argparse"
local json = require "dkjson"
local C, data = peri.ffi.C, peri.data

local parser = argparse("tests/bench/data.lua", "Speed of readers.")
parser:option("--out", "Append results as JSON lines to this file.")
parser:option("--rows", "Rows of the file.", 300000, tonumber)
parser:option("--step", "Milliseconds of a training step of 2,048 samples, beside which loaders are shown.", nil,
  tonumber)
parser:option("--device", "Where batches by workers go.", "cpu")
parser:option("--only", "Of what is measured by workers, sources whose name has this in it.", "")
local options = parser:parse(arg)
peri.init()
local out = options.out and assert(io.open(options.out, "a"))

local function seconds() return tonumber(C.peri_time_ns()) * 1e-9 end

local function report(name, rows, ids, time, bytes)
  local r = { name = name, rows_per_s = rows / time, ids_per_s = ids / time, mb_per_s = bytes and bytes / time / 1e6
    or nil }
  r.steps = options.step and r.rows_per_s * options.step * 1e-3 / 2048
  print(("%-28s %12.0f rows/s %14.0f ids/s%s%s"):format(name, r.rows_per_s, r.ids_per_s,
    bytes and (" %10.0f MB/s"):format(r.mb_per_s) or "",
    r.steps and (" %8.1f times a step"):format(r.steps) or ""))
  if out then out:write(json.encode(r), "\n") end
end

--- Best of three passes over a loader's host batches.
local function pass(name, loader, bytes)
  local best, rows, ids = math.huge
  for _ = 1, 3 do
    loader:rewind()
    rows, ids = 0, 0
    local from = seconds()
    for host in function() return loader:next_host() end do
      rows, ids = rows + tonumber(host.ptr.rows), ids + tonumber(host.ptr.ids)
    end
    best = math.min(best, seconds() - from)
  end
  report(name, rows, ids, best, bytes)
end

--- Batches of a loader by its workers: make(n) is one of n workers, of about a second of batches for each.
local function by_workers(name, processors, make)
  if not name:find(options.only, 1, true) then return end
  local one, n = nil, 1
  while n <= math.max(processors, 2) do
    local loader, taken, rows, times = make(n), 0, 0, {}
    for _ = 1, 2 * n do loader():release() end -- all workers have begun
    local from = seconds()
    repeat
      local asked = seconds()
      local batch = loader()
      taken = taken + 1
      times[taken] = seconds() - asked
      rows = rows + batch.rows
      batch:release()
    until seconds() - from > 1.5 and taken % n == 0
    local r = { name = name, workers = n, device = options.device, rows_per_s = rows / (seconds() - from) }
    loader:stop()
    one = one or r.rows_per_s
    table.sort(times)
    r.share, r.taking_ms = r.rows_per_s / (n * one), times[1] * 1e3
    print(("%-24s %3d workers %12.0f rows/s  %5.2f of %d times one worker's; %.3f ms to take a batch"):format(name, n,
      r.rows_per_s, r.share, n, r.taking_ms))
    if out then out:write(json.encode(r), "\n") end
    n = n * 2
  end
end

local path = os.tmpname()
data.synthetic.write { path = path, num_rows = options.rows, ids_per_bag = { 1, 1 } }
local file = io.open(path)
local bytes = file:seek "end"
file:close()

local lines = data.criteo { path = path, batch_size = 2048 }
lines.source:count()
local from = seconds()
lines.source:count()
report("criteo, line ends only", options.rows, 0, seconds() - from, bytes)
pass("criteo, 1 rank", data.criteo { path = path, batch_size = 2048 }, bytes)
pass("criteo, rank 0 of 8", data.criteo { path = path, batch_size = 2048 * 8, rank = 0, world_size = 8 }, bytes)
os.execute(("gzip -1 -k -f %s"):format(path))
pass("criteo, gzip -1", data.criteo { path = path .. ".gz", batch_size = 2048 }, bytes)
os.remove(path .. ".gz")
local columns = { { name = "label", kind = "label" } }
for i = 1, 13 do columns[#columns + 1] = { name = "i" .. i, kind = "dense", transform = "log" } end
for i = 1, 26 do columns[#columns + 1] = { name = "c" .. i, kind = "ids", rows = 100000, ids = "hash", base = 16 } end
pass("csv, the same columns", data.csv { path = path, delimiter = "\t", columns = columns, batch_size = 2048 }, bytes)
local folder = path .. ".samples"
data.cache.write { path = folder, loader = data.criteo { path = path, batch_size = 2048 } }
pass("folder of samples", data.cache { path = folder, batch_size = 2048 })
pass("folder of samples, shuffled", data.cache { path = folder, batch_size = 2048, shuffle = true })
os.execute("rm -r " .. folder)
pass("synthetic, 1 id per bag", data.synthetic { num_rows = 100000, batch_size = 2048 })
pass("synthetic, 20 ids per bag", data.synthetic { num_rows = 10000, batch_size = 2048, ids_per_bag = 20 })
local lists
if io.popen("apt-cache dumpavail 2>/dev/null | head -c 1"):read(1) then
  from = seconds()
  local packages = data.debian.read()
  print(("%-28s %12.2f s for %d packages"):format("package lists, parsed", seconds() - from, packages.n))
  pass("package lists, batches", data.debian { packages = packages, part = "train", batch_size = 2048, limit = 500000 })
  lists = packages
end

local processors = tonumber(io.popen("nproc"):read "*a")
local common = { batch_size = 8192, epochs = math.huge, drop_last = true, device = options.device }
local function with(args, workers)
  for key, value in pairs(common) do args[key] = value end -- any order: named arguments
  args.num_workers = workers
  return args
end
by_workers("synthetic", processors, function(n) return data.synthetic(with({ num_rows = 2 ^ 40 }, n)) end)
by_workers("criteo", processors, function(n) return data.criteo(with({ path = path }, n)) end)
by_workers("csv", processors, function(n)
  return data.csv(with({ path = path, delimiter = "\t", columns = columns }, n))
end)
data.cache.write { path = folder, loader = data.criteo { path = path, batch_size = 2048 } }
by_workers("folder, shuffled", processors, function(n)
  return data.cache(with({ path = folder, shuffle = true }, n))
end)
os.execute("rm -r " .. folder)
by_workers("samples of a function", processors, function(n)
  local function make()
    local i = 0
    return setmetatable({ skip = function(_, few)
      local left = 200000 - i
      i = i + (few < left and few or left)
      return few < left and few or left
    end }, { __call = function()
      i = i + 1
      return i <= 200000 and { label = i % 2, age = i % 50, history = { i % 7, i % 11, i * 7 % 1000 } } or nil
    end })
  end
  return data.samples(with({ dense = { "age" }, ids = { { name = "history", rows = 1000 } }, make = make }, n))
end)
if lists then
  by_workers("package lists", processors, function(n)
    return data.debian(with({ packages = lists, part = "train" }, n))
  end)
end
os.remove(path)
