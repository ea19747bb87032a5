-- data.lua: how fast samples come: Criteo files parsed (the file is in the page cache; the roofline is finding its line ends), synthetic
-- samples made, and package lists turned into batches. Columns: name, rows/s, ids/s, MB/s of the file.
local peri = require "perilune"
local argparse = require "argparse"
local json = require "dkjson"
local C, data = peri.ffi.C, peri.data

local parser = argparse("tests/bench/data.lua", "Speed of readers.")
parser:option("--out", "Append results as JSON lines to this file.")
parser:option("--rows", "Rows of the file.", 300000, tonumber)
local options = parser:parse(arg)
peri.init()
local out = options.out and assert(io.open(options.out, "a"))

local function seconds() return tonumber(C.peri_time_ns()) * 1e-9 end

local function report(name, rows, ids, time, bytes)
  local r = { name = name, rows_per_s = rows / time, ids_per_s = ids / time, mb_per_s = bytes and bytes / time / 1e6 or nil }
  print(("%-28s %12.0f rows/s %14.0f ids/s%s"):format(name, r.rows_per_s, r.ids_per_s, bytes and (" %10.0f MB/s"):format(r.mb_per_s) or ""))
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
os.remove(path)
pass("synthetic, 1 id per bag", data.synthetic { num_rows = 100000, batch_size = 2048 })
pass("synthetic, 20 ids per bag", data.synthetic { num_rows = 10000, batch_size = 2048, ids_per_bag = 20 })
if os.execute "command -v apt-cache >/dev/null 2>&1" == 0 then
  from = seconds()
  local packages = data.debian.read()
  print(("%-28s %12.2f s for %d packages"):format("package lists, parsed", seconds() - from, packages.n))
  pass("package lists, batches", data.debian { packages = packages, part = "train", batch_size = 2048, limit = 500000 })
end
