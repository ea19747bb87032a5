-- retrieval.lua: sparse.top_products of --items rows of 64 numbers, f32 and int8, for 1, 16 and 256 queries, k = 100.
-- Columns: case, best and median time, GB/s of the items' bytes, GFLOP/s, share of the time of reading as many bytes (a
-- sum of them, all threads, same run).
local peri = require "perilune"
local argparse = require "argparse"
local json = require "dkjson"
local ffi = require "ffi"
local C, sparse = peri.ffi.C, peri.sparse

local parser = argparse("tests/bench/retrieval.lua", "Speed of exact retrieval.")
parser:option("--out", "Append results as JSON lines to this file.")
parser:option("--items", "Items.", 1e6, tonumber)
parser:option("--dim", "Numbers of an item.", 64, tonumber)
parser:option("-k", "Items that are found.", 100, tonumber)
parser:option("--runs", "Times that everything is measured, in turns.", 7, tonumber)
parser:option("--threads", "Worker threads.", 0, tonumber)
parser:option("--python", "A Python with torch (and faiss): measures them on the same numbers and prints ratios.")
local options = parser:parse(arg)
if options.threads > 0 then peri.ffi.check(C.peri_threads_set(options.threads)) end
local out = options.out and assert(io.open(options.out, "a"))

local N, D = options.items, options.dim
local items, queries = peri.Tensor.uniform({ N, D }, -1, 1, 1), peri.Tensor.uniform({ 256, D }, -1, 1, 2)
local format = sparse.quantize.format { codes = "int8" }
local rows = sparse.quantize.rows(items, format)
local kinds = { { "f32", items, nil, 4 * D }, { "int8", rows, format, rows:size(2) } }

local function time(f)
  local from = tonumber(C.peri_time_ns())
  peri.scope(f)
  return (tonumber(C.peri_time_ns()) - from) / 1e6
end

local function best_and_median(times)
  local sorted = peri.util.copy(times)
  table.sort(sorted)
  return sorted[1], sorted[math.ceil(#sorted / 2)]
end

--- Lines of peers: { what =, case =, queries =, best_ms =, median_ms = }.
local function peers()
  local folder = os.tmpname()
  os.remove(folder)
  assert(os.execute(("mkdir '%s'"):format(folder)) == 0)
  for name, t in peri.util.ordered { items = items, queries = queries } do
    local file = assert(io.open(folder .. "/" .. name, "wb"))
    local bytes, n = t:read()
    file:write(ffi.string(bytes, n))
    file:close()
  end
  local script = debug.getinfo(1, "S").source:match "^@(.*)retrieval%.lua$" .. "peers/retrieval.py"
  local pipe = assert(io.popen(("'%s' '%s' --folder '%s' --threads %d --dim %d -k %d --runs %d"):format(options.python,
    script, folder, C.peri_threads(), D, options.k, options.runs)))
  local list = {}
  for line in pipe:lines() do list[#list + 1] = json.decode(line) or print(line) end
  pipe:close()
  os.execute(("rm -r '%s'"):format(folder))
  return list
end

local own = {}
for _, kind in ipairs(kinds) do
  local name, x, how, bytes = unpack(kind)
  local words = x:reshape { x:numel() }
  local into = peri.Tensor.empty({ x:numel() }, x:dtype())
  for _, q in ipairs { 1, 16, 256 } do
    local some, times, reads = queries:slice(1, 0, q), {}, {}
    for i = 0, options.runs do
      times[i] = time(function() sparse.top_products(some, x, options.k, how) end)
      reads[i] = time(function() into:copy(words) end)
    end
    local best, median = best_and_median(times)
    local copy = best_and_median(reads)
    local r = { case = "top_products", what = "perilune", dtype = name, queries = q, threads = C.peri_threads(),
      isa = ffi.string(C.peri_cpu_isa()), best_ms = best, median_ms = median, gb_per_s = N * bytes / best / 1e6,
      gflop_per_s = 2 * N * D * q / best / 1e6, copy_ratio = best / copy }
    own[name .. q] = best
    print(("%-5s %4d queries %10.2f ms %10.2f ms %7.2f GB/s %7.1f GFLOP/s %6.2f times a copy"):format(name, q, best,
      median, r.gb_per_s, r.gflop_per_s, r.copy_ratio))
    if out then out:write(json.encode(r), "\n") end
  end
end
if options.python and options.python ~= "" then
  for _, r in ipairs(peers()) do
    print(("f32   %4d queries %10.2f ms %10.2f ms   %s: %.2f times as long"):format(r.queries, r.best_ms, r.median_ms,
      r.what, r.best_ms / own["f32" .. r.queries]))
    if out then out:write(json.encode(r), "\n") end
  end
end
if out then out:close() end
