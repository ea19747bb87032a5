-- embed.lua: lookups and updates in embedding tables beside what the machine's memory gives at best, which roofline.c
-- measures on the same rows in the same run. One line a measurement: case, what, best and median milliseconds, GB/s,
-- share of the roofline.
--
-- Rooflines: a forward pass reads every row that it is asked for: a gather of those rows. A backward pass rewrites
-- them, and the states of its optimizer that are as wide as rows: an update of those rows, times the number of such
-- arrays. Ids, offsets, outputs and gradients, states of one number a row, and the sort of a backward pass are not in
-- the roofline: they are what a share below 1 pays for. The sort is measured by itself too (sort.c), and a backward
-- pass beside roofline + sort, and beside the time that the roofline's bytes per second give for all bytes that have to
-- move: rows and states read and written (a state of one number: its cache line), gradient and ids read.
-- Every case has several batches of ids, which take turns, as in training and serving: with one batch over and over,
-- much of what it needs would be in the processor's cache.
local ffi = require "ffi"
local peri = require "perilune"
local argparse = require "argparse"
local json = require "dkjson"
local C, Tensor = peri.ffi.C, peri.Tensor

local parser = argparse("tests/bench/embed.lua", "Speed of table batches.")
parser:option("--out", "Append results as JSON lines to this file.")
parser:option("--roofline", "The library built from roofline.c.", "build/tests/bench/libroofline.so")
parser:option("--only", "Cases whose name has this in it; several with commas between.", "")
parser:option("--what", "Measurements whose name has this in it, or with $ at the end is this.", "")
parser:option("--threads", "Worker threads.", 0, tonumber)
parser:option("--rounds", "Times that everything is measured, in turns.", 15, tonumber)
parser:option("--python", "A Python with torch and fbgemm_gpu: measures them on the same ids and prints ratios.")
local options = parser:parse(arg)
peri.init()
if options.threads > 0 then peri.ffi.check(C.peri_threads_set(options.threads)) end
local threads, isa = C.peri_threads(), ffi.string(C.peri_cpu_isa())
local out = options.out and assert(io.open(options.out, "a"))

ffi.cdef [[
typedef struct roof_way { int32_t threads, hint, distance, order, update; } roof_way;
int64_t roof_run(void *base, const int64_t *at, int64_t n, int64_t bytes, const roof_way *way, int64_t repeats);
typedef struct sort_shape { int64_t batch, features, shared, rows, cols, length, weighted; } sort_shape;
void *sort_open(const char *isa, const sort_shape *shape);
int64_t sort_run(void *sort, const int64_t *ids);
void sort_close(void *sort);
]]
local roof = ffi.load(options.roofline)

-- batch, tables, rows of each, columns, ids of each bag, power of the ids' law (0: uniform), type of the weights.
local cases = {
  { name = "default", 512, 32, 100000, 128, 20, 0, "FP32" },
  { name = "large", 2048, 4, 1000000, 128, 20, 0, "FP32" },
  { name = "wide", 2048, 2, 1000000, 256, 20, 0, "FP32" },
  { name = "narrow", 2048, 4, 2000000, 64, 20, 0, "FP32" },
  { name = "skewed", 2048, 4, 1000000, 128, 20, 1.05, "FP32" },
  { name = "fp16", 512, 32, 100000, 128, 20, 0, "FP16" },
  { name = "serving16", 16, 26, 100000, 64, 20, 0, "FP32" },
  { name = "serving1", 1, 26, 100000, 64, 20, 0, "FP32" },
}
for _, c in ipairs(cases) do
  c.batch, c.tables, c.rows, c.dim, c.length, c.alpha, c.dtype = unpack(c)
  c.n = c.batch * c.tables * c.length
  c.sets = c.batch >= 100 and 4 or 256 / c.batch -- batches of ids
end

--- Whether --only asks for this case.
local function chosen(name)
  for part in (options.only == "" and name or options.only):gmatch "[^,]+" do
    if name:find(part, 1, true) then return true end
  end
end

--- Whether --what asks for this measurement.
local function asked(what)
  local exact = options.what:match "^(.*)%$$"
  if exact then return what == exact end
  return what:find(options.what, 1, true) ~= nil
end

-- -- inputs -----------------------------------------------------------------------------------------------------------

--- Ids of all batches of a case in host memory: uniform, or by a power law whose small ids are the hot ones.
local function draw(c)
  local n, rows, alpha = c.n * c.sets, c.rows, c.alpha
  local numbers = peri.scope(function() return (Tensor.uniform({ n }, 0, 1, 11, 0, "f64"):read()) end)
  local ids = ffi.new("int64_t[?]", n)
  local low = 1 - alpha
  local top = math.pow(rows + 1, low) - 1
  for i = 0, n - 1 do
    local u = numbers[i]
    local x = alpha == 0 and u * rows or math.pow(u * top + 1, 1 / low) - 1
    ids[i] = math.min(math.floor(x), rows - 1)
  end
  return ids
end

--- Everything that calls on a case's tables need.
local function inputs(c, batch, v)
  local blocks, width = {}, c.tables * c.dim
  for t = 1, c.tables do
    blocks[t] = { table = math.ceil(t / v.shared), first_bag = (t - 1) * c.batch, bags = c.batch,
      out_offset = (t - 1) * c.dim, out_stride = width }
  end
  local offsets = ffi.new("int64_t[?]", c.batch * c.tables + 1)
  for b = 0, c.batch * c.tables do offsets[b] = b * c.length end
  local ids = {}
  for i = 1, c.sets do ids[i] = Tensor.from_memory(c.ids + (i - 1) * c.n, { c.n }, "i64") end
  return {
    ids = ids, offsets = Tensor.from_memory(offsets, { c.batch * c.tables + 1 }, "i64"),
    blocks = batch:blocks(blocks), out = peri.zeros { c.batch, width }, grad = Tensor.uniform({ c.batch, width }, -1, 1,
      5),
    weights = v.weighted and Tensor.uniform({ c.n }, 0, 1, 6) or nil,
  }
end

-- -- what is measured -------------------------------------------------------------------------------------------------

--- One entry: a table batch (data type, optimizer), and what is timed on it. `states`: states as wide as rows, which a
-- backward pass rewrites beside the rows; `shared`: features that look into one table.
local function variant(dtype, optimizer, states, weighted, shared)
  return { dtype = dtype, optimizer = optimizer, states = states, weighted = weighted, shared = shared or 1 }
end
local suffixes = { FP32 = "", FP16 = " f16", BF16 = " bf16", INT8 = " int8", FP8 = " fp8", INT4 = " int4",
  INT2 = " int2" }
local adagrad, sgd = variant("FP32", "rowwise_adagrad", 0), variant("FP32", "sgd", 0)
local formats = { variant("FP16", "none"), variant("BF16", "none"), variant("INT8", "none"), variant("FP8", "none"),
  variant("INT4", "none"), variant("INT2", "none") }
local whole = {
  adagrad, sgd, variant("FP32", "adagrad", 1), variant("FP32", "adam", 2), variant("FP32", "lamb", 2),
  variant("FP32", "rowwise_adagrad", 0, true), variant("FP32", "rowwise_adagrad", 0, false, 2),
  variant("FP16", "rowwise_adagrad", 0), variant("BF16", "rowwise_adagrad", 0), variant("INT8", "none"),
  variant("FP8", "none"), variant("INT4", "none"), variant("INT2", "none"),
}
local variants = {
  default = whole, large = whole, narrow = { adagrad, sgd, unpack(formats) }, wide = { adagrad, sgd, unpack(formats) },
  skewed = { adagrad, sgd }, fp16 = { variant("FP16", "rowwise_adagrad", 0), variant("FP16", "sgd", 0) },
  serving16 = { adagrad, unpack(formats) }, serving1 = { adagrad, unpack(formats) },
}

local function row_bytes(c, dtype)
  local bytes = { FP32 = 4 * c.dim, INT8 = c.dim + 8, FP8 = c.dim, INT4 = 4 + c.dim / 2, INT2 = 4 + c.dim / 4 }
  return bytes[dtype] or 2 * c.dim
end

local median = peri.util.median

--- Milliseconds of a call; f(n) makes n calls.
local function timed(f, n)
  local from = C.peri_time_ns()
  f(n)
  return tonumber(C.peri_time_ns() - from) * 1e-6 / n
end

--- Where the rows of a case's ids lie, in bytes from the first row of the first table.
local function addresses(c, batch, bytes, shared)
  local base, at = ffi.new "void *[1]", ffi.new("int64_t[?]", c.n * c.sets)
  local first, ids = nil, c.batch * c.length
  for t = 1, c.tables do
    peri.ffi.check(C.peri_tensor_data(batch:state(math.ceil(t / shared)).ptr, base))
    first = first or ffi.cast("char *", base[0])
    local start = ffi.cast("char *", base[0]) - first
    for set = 0, c.sets - 1 do
      for i = set * c.n + (t - 1) * ids, set * c.n + t * ids - 1 do at[i] = start + c.ids[i] * bytes end
    end
  end
  return first, at
end

--- Every way in which a roofline is tried: threads, hint (0 none, 1 T0, 2 T1), rows ahead, order of a row's lines.
local function ways(c, update)
  local list = {}
  for _, t in ipairs(c.batch < 100 and threads > 1 and { 1, threads } or { threads }) do
    for order = 0, 1 do
      for hint = 0, 2 do
        for _, distance in ipairs(hint == 0 and { 0 } or { 8, 16, 32, 64 }) do
          list[#list + 1] = ffi.new("roof_way", t, hint, distance, order, update)
        end
      end
    end
  end
  return list
end

--- The best way of a roofline on these rows: a function that runs it, and what it is in words.
local function roofline(c, base, at, bytes, update)
  local list, best, time = ways(c, update), nil, math.huge
  local function run(way) return tonumber(roof.roof_run(base, at, c.n * c.sets, bytes, way, 1)) * 1e-6 / c.sets end
  for _ = 1, 4 do
    for _, way in ipairs(list) do
      local ms = run(way)
      if ms < time then best, time = way, ms end
    end
  end
  return function() return run(best) end,
    ("%d threads, prefetch %s %d rows ahead, lines %s"):format(best.threads, ({ [0] = "none", "T0", "T1" })[best.hint],
      best.distance, best.order == 0 and "in order" or "scattered"), best
end

-- -- results ----------------------------------------------------------------------------------------------------------

local results, peers = {}, {}

--- The roofline's time over ours, round by round (what else the machine does moves both), and of those the median.
local function share_of(roof_times, times)
  local shares = {}
  for i = 1, #times do shares[i] = roof_times[i] / times[i] end
  return (median(shares))
end

--- @extra: of a backward pass: times of the sort alone, and milliseconds of its bytes at the roofline's speed, each
--- round by round.
local function report(c, what, times, bytes, roof_times, roof_text, extra)
  local share, with_sort, of_bytes = share_of(roof_times, times), nil, nil
  if extra then
    local both = {}
    for i = 1, #times do both[i] = roof_times[i] + extra.sort[i] end
    with_sort, of_bytes = share_of(both, times), 1 / share_of(extra.bytes, times)
    table.sort(extra.sort)
  end
  table.sort(times)
  table.sort(roof_times)
  local r = { case = c.name, what = what, threads = threads, isa = isa, best_ms = times[1], median_ms = median(times),
    gb_per_s = bytes / times[1] * 1e-6, bytes = bytes, roofline_share = share, roofline_best_ms = roof_times[1],
    roofline_median_ms = median(roof_times), roofline = roof_text,
    sort_median_ms = extra and median(extra.sort), sort_ns_per_id = extra and median(extra.sort) * 1e6 / c.n,
    share_with_sort = with_sort, times_its_bytes = of_bytes }
  results[c.name .. "/" .. what] = r
  print(("%-10s %-26s best %9.4f  median %9.4f ms %7.2f GB/s   roofline %9.4f %9.4f ms  share %5.1f %%  (%s)"):format(
    c.name, what, r.best_ms, r.median_ms, r.gb_per_s, r.roofline_best_ms, r.roofline_median_ms, 100 * share, roof_text))
  if extra then
    print(("%-10s %-26s sort %.4f ms, %.2f ns an id; roofline and sort %.1f %%; %.2f times its bytes"):format(c.name,
      what, r.sort_median_ms, r.sort_ns_per_id, 100 * with_sort, of_bytes))
  end
  io.flush()
  if out then out:write(json.encode(r), "\n") end
end

--- A function that sorts a case's batches of ids as a backward pass does, and gives milliseconds a batch.
local function sorter(c, v, ids)
  local shape = ffi.new("sort_shape", c.batch, c.tables, v.shared, c.rows, c.dim, c.length, v.weighted and 1 or 0)
  local sort = ffi.gc(roof.sort_open(isa, shape), roof.sort_close)
  local at, data = {}, ffi.new "void *[1]"
  for i = 1, c.sets do
    peri.ffi.check(C.peri_tensor_data(ids[i].ptr, data))
    at[i] = ffi.cast("const int64_t *", data[0])
  end
  return function()
    local time = 0
    for i = 1, c.sets do time = time + tonumber(roof.sort_run(sort, at[i])) end
    return time * 1e-6 / c.sets
  end
end

--- Allocations of the library and of Lua in one call.
local function allocations(f)
  C.peri_fault_arm("alloc", 0)
  C.peri_fault_arm("device_alloc", 0)
  collectgarbage "stop"
  local before = collectgarbage "count"
  f(100)
  local lua = collectgarbage "count" - before
  collectgarbage "restart"
  return tonumber(C.peri_fault_passed "alloc" + C.peri_fault_passed "device_alloc") / 100, lua * 1024 / 100
end

--- A table batch of a case in a data type, and what calls on it need.
local function made(c, v)
  local tables = {}
  local start = not peri.embed.config.row_formats[v.dtype] and peri.embed.constant(0.01) or nil
  for t = 1, c.tables / v.shared do tables[t] = { name = "t" .. t, rows = c.rows, cols = c.dim, init = start } end
  local batch = peri.embed.tbe.new { tables = tables, data_type = v.dtype, seed = 1,
    fused_params = { optimizer = v.optimizer, bounds_check_mode = "NONE" } }
  return batch, inputs(c, batch, v)
end

--- A call's time over that of its rows alone, both again and again on one batch of ids, whose rows are then as near as
--- caches hold them. The rows alone: gathered in the fastest way, and in the way that is fastest where caches do not
--- hold them.
local function overhead(c, what, call, base, at, bytes, way)
  local most = math.ceil(10000 / c.n) * 10
  local ours, rows, same = math.huge, math.huge, math.huge
  local function gathered(w) return tonumber(roof.roof_run(base, at, c.n, bytes, w, most)) * 1e-3 end
  local function forwards(n) for _ = 1, n do call() end end
  local list = ways(c, 0)
  for _ = 1, options.rounds do
    ours = math.min(ours, timed(forwards, most) * 1e3)
    same = math.min(same, gathered(way))
    for i = 1, #list do rows = math.min(rows, gathered(list[i])) end
  end
  local allocated, lua = allocations(forwards)
  print(("%-10s %-26s rows in the caches: %.2f us a call, %.2f over the rows (%.2f over rows asked for ahead); " ..
    "allocations a call: %.2f, bytes of Lua: %.1f"):format(c.name, what, ours, ours - rows, ours - same, allocated,
      lua))
  if out then out:write(json.encode { case = c.name, what = what .. " overhead", warm_us = ours, over_rows_us = ours
    - rows, over_rows_ahead_us = ours - same, allocations = allocated, lua_bytes = lua }, "\n") end
end

local function measure(c, v)
  local suffix = (v.dtype == c.dtype and "" or suffixes[v.dtype]) .. (v.weighted and " weighted" or "")
    .. (v.shared > 1 and " shared" or "")
  local forward, backward = "forward" .. suffix, "backward" .. suffix .. "+" .. v.optimizer
  local do_forward = not results[c.name .. "/" .. forward] and asked(forward)
  local do_backward = v.optimizer ~= "none" and asked(backward)
  if not do_forward and not do_backward then return end
  local bytes, calls = row_bytes(c, v.dtype), c.sets
  local batch, x = made(c, v)
  local function forwards(n)
    for i = 0, n - 1 do batch:forward(x.ids[i % calls + 1], x.offsets, x.blocks, x.out, x.weights) end
  end
  local function backwards(n)
    for i = 0, n - 1 do batch:backward(x.ids[i % calls + 1], x.offsets, x.blocks, x.grad, x.weights) end
  end
  local base, at = addresses(c, batch, bytes, v.shared)
  local gather, gather_text, gather_way = roofline(c, base, at, bytes, 0)
  local update, update_text
  local sort = do_backward and sorter(c, v, x.ids)
  if do_backward then update, update_text = roofline(c, base, at, bytes, 1) end
  local times, extra = { {}, {}, {}, {} }, { sort = {}, bytes = {} }
  local rewritten = c.n * bytes + c.n * 4 * c.dim * (v.states or 0) -- rows and states
  local moved = 2 * rewritten + (v.optimizer == "rowwise_adagrad" and 2 * 64 * c.n or 0)
    + 4 * c.batch * c.tables * c.dim + 8 * c.n
  timed(forwards, 1)
  if do_backward then timed(backwards, 1) end
  for i = 1, options.rounds do
    times[1][i] = gather()
    if do_forward then times[2][i] = timed(forwards, calls) end
    if do_backward then
      local roof_time = update()
      times[3][i], times[4][i] = roof_time * rewritten / (c.n * bytes), timed(backwards, calls)
      extra.sort[i], extra.bytes[i] = sort(), roof_time * moved / (2 * c.n * bytes)
    end
  end
  -- ids, offsets, output or gradient
  local around = 8 * c.n + 8 * (c.batch * c.tables + 1) + 4 * c.batch * c.tables * c.dim
  if do_forward then report(c, forward, times[2], c.n * bytes + around, times[1], gather_text) end
  if do_backward then report(c, backward, times[4], 2 * rewritten + around, times[3], update_text, extra) end
  if do_forward and c.batch < 100 then
    overhead(c, forward, function() batch:forward(x.ids[1], x.offsets, x.blocks, x.out, x.weights) end, base, at, bytes,
      gather_way)
  end
end

--- Rows a second of one measurement over those of another, both forward, in turns: the median over the rounds, and the
--- bests.
local function compare(what, c, v, other, w)
  local rates, ratios = { {}, {} }, {}
  local sides = {}
  for i, side in ipairs { { c, v }, { other, w } } do
    local batch, x = made(side[1], side[2])
    sides[i] = function(n)
      for k = 0, n - 1 do batch:forward(x.ids[k % side[1].sets + 1], x.offsets, x.blocks, x.out, x.weights) end
    end
    timed(sides[i], 1)
  end
  for r = 1, options.rounds do
    rates[1][r], rates[2][r] = c.n / timed(sides[1], c.sets), other.n / timed(sides[2], other.sets)
    ratios[r] = rates[1][r] / rates[2][r]
  end
  for _, list in ipairs { ratios, rates[1], rates[2] } do table.sort(list) end
  local best = rates[1][#ratios] / rates[2][#ratios]
  print(("%-10s %-26s %.2f times the rows per second of %s (bests %.2f; in turns, %d rounds)"):format(c.name, what,
    median(ratios), other.name .. (other == c and " " .. w.dtype or ""), best, #ratios))
  if out then out:write(json.encode { case = c.name, what = what .. " rows", other = other.name, ratio = median(ratios),
    ratio_best = best }, "\n") end
end

-- -- peers ------------------------------------------------------------------------------------------------------------

local function run_peers(wanted)
  local folder = os.tmpname()
  os.remove(folder)
  assert(os.execute(("mkdir -p '%s'"):format(folder)) == 0)
  local list = {}
  for i, c in ipairs(wanted) do
    list[i] = { name = c.name, batch = c.batch, tables = c.tables, rows = c.rows, dim = c.dim, length = c.length,
      sets = c.sets, dtype = c.dtype }
    local file = assert(io.open(("%s/%s.ids"):format(folder, c.name), "wb"))
    file:write(ffi.string(c.ids, 8 * c.n * c.sets))
    file:close()
  end
  local file = assert(io.open(folder .. "/cases.json", "w"))
  file:write(json.encode(list))
  file:close()
  local script = debug.getinfo(1, "S").source:match "^@(.*)embed%.lua$" .. "peers/embedding.py"
  local pipe = assert(io.popen(("'%s' '%s' --ids '%s' --threads %d%s"):format(options.python, script, folder, threads,
    options.what:find("forward", 1, true) and " --forward" or "")))
  for line in pipe:lines() do
    local r = json.decode(line)
    if r and r.case then
      local key = r.case .. "/" .. r.what
      peers[key] = peers[key] or {}
      table.insert(peers[key], r)
      local ours = results[key]
      if r.skipped then print(("%-10s %-26s %s: %s"):format(r.case, r.what, r.peer, r.skipped))
      elseif ours then
        print(("%-10s %-26s %-18s best %9.4f  median %9.4f ms   %6.2f times as long (medians %6.2f)"):format(r.case,
          r.what, r.peer, r.best_ms, r.median_ms, r.best_ms / ours.best_ms, r.median_ms / ours.median_ms))
        r.ratio, r.ratio_median = r.best_ms / ours.best_ms, r.median_ms / ours.median_ms
      end
      if out then out:write(json.encode(r), "\n") end
      io.flush()
    end
  end
  pipe:close()
  os.execute(("rm -rf '%s'"):format(folder))
end

-- -- the run ----------------------------------------------------------------------------------------------------------

print(("%d threads, %s; times in ms"):format(threads, isa))
local shown
--- Which ways are in use: those that `perilune calibrate` kept, else the defaults. PERI_TUNE forces them.
local function show_choices()
  if shown then return end
  shown = {}
  for _, c in ipairs(require("perilune.choices").list()) do
    if not c.name:match "^copy" then shown[#shown + 1] = ("%s=%s (%s)"):format(c.name, c.way, c.source) end
  end
  print("ways: " .. table.concat(shown, ", "))
  if out then out:write(json.encode { ways = shown }, "\n") end
end
local wanted = {}
for _, c in ipairs(cases) do
  if chosen(c.name) then
    wanted[#wanted + 1] = c
    c.ids = draw(c)
    for _, v in ipairs(variants[c.name]) do
      peri.scope(function() measure(c, v) end)
      show_choices()
      collectgarbage()
    end
  end
end
local by_name = {}
for _, c in ipairs(wanted) do by_name[c.name] = c end
for _, name in ipairs { "default", "large" } do
  local c = asked "forward int8" and by_name[name]
  if c then peri.scope(function() compare("forward int8", c, formats[3], c, adagrad) end) end
  collectgarbage()
end
if by_name.skewed and by_name.large and asked "forward" then
  peri.scope(function() compare("forward", by_name.skewed, adagrad, by_name.large, adagrad) end)
end
if options.python and options.python ~= "" then run_peers(wanted) end
if out then out:close() end
