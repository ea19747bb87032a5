-- comm.lua: each collective operation beside the bare Open MPI call that moves the same bytes, on the same buffers, in
-- one run: blocks of a few milliseconds of one and of the other take turns, the time of a block is that of its slowest
-- rank, ratios are of medians. Columns: operation, bytes per peer, microseconds of the bare call and of ours (through
-- the C API, as Lua calls it), ratio, difference, and what the same operation costs through the Lua methods with an
-- awaitable. Then how much of an exchange computation hides.
local ffi = require "ffi"
local peri = require "perilune"
local argparse = require "argparse"
local json = require "dkjson"
local P = peri.ffi
local C, check = P.C, P.check

local parser = argparse("tests/bench/comm.lua", "Speed of collective operations.")
parser:option("--out", "Append results as JSON lines to this file.")
parser:option("--ops", "Operations to time, separated by commas (default: all).")
parser:option("--least", "Smallest message in bytes per peer.", 64, tonumber)
parser:option("--most", "Largest message in bytes per peer.", 64 * 2 ^ 20, tonumber)
parser:option("--factor", "From one size to the next.", 4, tonumber)
parser:option("--blocks", "Pairs of blocks for each size.", 15, tonumber)
parser:option("--block-ms", "Length of a block in milliseconds.", 2, tonumber)
parser:flag("--no-overlap", "Leave fingerprints and overlap out.")
local options = parser:parse(arg)

local world = peri.init()
local rank, ranks = world.rank_number, world.world_size
if ranks < 2 or world.transport ~= "mpi" then
  print "comm.lua: needs Open MPI and at least two ranks: nothing to measure"
  os.exit(0)
end
ffi.cdef [[
int bare_open(void);
int bare_close(void);
double bare_now_us(void);
int bare_barrier(void);
int bare_max(double *values, int n);
int bare_columns(int n);
int bare_run(int op, void *recv, const void *send, int64_t count, int repeats);
int bare_post(int op, void *recv, const void *send, int64_t count);
int bare_wait(void);
]]
local bare = ffi.load("build/bench/libcomm_mpi.so")
local function must(code) if code ~= 0 then error("MPI: code " .. code) end end
must(bare.bare_open())
local file = options.out and rank == 0 and assert(io.open(options.out, "a"))
local now = bare.bare_now_us

local function emit(r, text)
  if rank ~= 0 then return end
  print(text)
  if file then file:write(json.encode(r), "\n") end
end

local median = peri.util.median

-- -- the operations ---------------------------------------------------------------------------------------------------

local group, work = world:ptr(), ffi.new "peri_work *[1]"
local rows = ffi.new("int64_t[?]", ranks)

--- name, number in comm_mpi.c, how many parts the buffers hold, ours (C), ours (Lua methods); prepare(b, count): makes
--- what ours needs besides; results(work): takes and drops what a complete work has made. `b`: the buffers.
local ops = {
  { "barrier", 0, 0, 0, function() check(C.peri_coll_barrier(group, 0, work)) end,
    function() world:barrier():wait() end },
  { "broadcast", 1, 0, 1, function(b) check(C.peri_coll_broadcast(group, b.r, 0, 0, work)) end,
    function(b) world:broadcast(b.recv, 0):wait() end },
  { "all_reduce", 2, 0, 1, function(b) check(C.peri_coll_all_reduce(group, b.r, 0, 0, work)) end,
    function(b) world:all_reduce(b.recv):wait() end },
  { "all_gather", 3, 1, ranks, function(b) check(C.peri_coll_all_gather(group, b.r, b.s, 0, work)) end,
    function(b) world:all_gather(b.send, b.recv):wait() end },
  { "reduce_scatter", 4, ranks, 1, function(b) check(C.peri_coll_reduce_scatter(group, b.r, b.s, 0, 0, work)) end,
    function(b) world:reduce_scatter(b.send, "sum", b.recv):wait() end },
  { "all_to_all", 5, ranks, ranks, function(b) check(C.peri_coll_all_to_all(group, b.r, b.s, 0, work)) end,
    function(b) world:all_to_all(b.send, b.recv):wait() end },
  { "all_to_all_v", 6, ranks, ranks, function(b)
    check(C.peri_coll_all_to_all_v(group, b.r, b.s, rows, rows, 0, work))
  end,
    function(b) world:all_to_all_v(b.send, b.rows, b.rows, b.recv):wait() end },
  { "reduce_scatter_v", 7, ranks, 1, function(b)
    check(C.peri_coll_reduce_scatter_v(group, b.r, b.s, rows, 0, 0, work))
  end,
    function(b) world:reduce_scatter_v(b.send, b.rows, "sum", b.recv):wait() end },
  { "all_gather_v", 8, 1, ranks, function(b) check(C.peri_coll_all_gather_v(group, b.r, b.s, rows, 0, work)) end,
    function(b) world:all_gather_v(b.send, b.rows, b.recv):wait() end },
}
for _, op in ipairs(assert(loadfile "tests/bench/comm_ops.lua")(world, work, bare)) do ops[#ops + 1] = op end

local function ours(op, b, repeats)
  local post, results = op[5], op.results
  for _ = 1, repeats do
    post(b)
    check(C.peri_work_wait(work[0]))
    if results then results(work[0]) end
    C.peri_work_release(work[0])
  end
end

local data = ffi.new "void *[1]"
local function address(t)
  check(C.peri_tensor_data(peri.Tensor.ptr(t), data))
  return data[0]
end

local function buffers(op, count)
  local b = { rows = {} }
  for i = 1, ranks do b.rows[i], rows[i - 1] = count, count end
  b.send = peri.zeros({ math.max(op[3], 1) * count }, "f32", "cpu")
  b.recv = peri.zeros({ math.max(op[4], 1) * count }, "f32", "cpu")
  b.s, b.r = peri.Tensor.ptr(b.send), peri.Tensor.ptr(b.recv)
  b.from, b.to = address(b.send), address(b.recv)
  if op.prepare then op.prepare(b, count) end
  return b
end

local times = ffi.new "double[3]"
local function timed(slot, f)
  must(bare.bare_barrier())
  local from = now()
  f()
  times[slot] = now() - from
end

local function measure(op, count)
  local b = buffers(op, count)
  local number, method = op[2], op[6]
  local function one() must(bare.bare_run(number, b.to, b.from, count, 1)) end
  one()
  ours(op, b, 1)
  timed(0, function() must(bare.bare_run(number, b.to, b.from, count, 3)) end)
  must(bare.bare_max(times, 1))
  local once = times[0] / 3
  local repeats = math.max(1, math.min(2000, math.ceil(options.block_ms * 1000 / once)))
  local pairs_wanted = math.ceil(options.blocks / (once > 100000 and 5 or once > 20000 and 2 or 1))
  local lists = { {}, {}, {} }
  for k = -1, pairs_wanted do
    local function run_bare() timed(0, function() must(bare.bare_run(number, b.to, b.from, count, repeats)) end) end
    local function run_ours() timed(1, function() ours(op, b, repeats) end) end
    if k % 2 == 0 then
      run_bare()
      run_ours()
    else
      run_ours()
      run_bare()
    end
    if once < 20000 then timed(2, function() for _ = 1, repeats do method(b) end end)
    else times[2] = times[1] end
    must(bare.bare_max(times, 3))
    if k > 0 then for i = 1, 3 do lists[i][k] = times[i - 1] / repeats end end
  end
  for _, t in ipairs(b.more or {}) do t:release() end
  b.send:release()
  b.recv:release()
  return median(lists[1]), median(lists[2]), median(lists[3])
end

local wanted = options.ops and ("," .. options.ops .. ",")
if rank == 0 then print(("%-35s %5s %10s %10s %10s %7s %9s %10s"):format("operation", "ranks", "bytes", "bare us",
  "ours us", "ratio", "added us", "lua us")) end
for _, op in ipairs(ops) do
  local bytes = math.max(options.least, 4)
  while bytes <= options.most and (not wanted or wanted:find("," .. op[1] .. ",", 1, true)) do
    local plain, own, lua = measure(op, bytes / 4)
    if op[1] == "barrier" then bytes = 0 end
    emit({ op = op[1], ranks = ranks, bytes = bytes, bare_us = plain, own_us = own, lua_us = lua, ratio = own / plain,
      added_us = own - plain }, ("%-35s %5d %10d %10.2f %10.2f %7.3f %9.2f %10.2f"):format(op[1], ranks, bytes, plain,
      own, own / plain, own - plain, lua))
    if op[1] == "barrier" then break end
    bytes = bytes * options.factor
  end
end

-- -- fingerprints -----------------------------------------------------------------------------------------------------

--- Median of @list and the bounds between which that of all possible rounds lies in 95 of 100 cases (order statistics:
--- normal approximation of the binomial distribution).
local function confidence(list)
  table.sort(list)
  local n = #list
  local reach = 0.98 * math.sqrt(n)
  return list[math.floor(n / 2) + 1], list[math.max(1, math.floor(n / 2 - reach))],
    list[math.min(n, math.ceil(n / 2 + reach) + 1)]
end

-- The same operation in one group, whose fingerprints are on and off in turns: each round is a block of either, one
-- right after the other, and counts as one difference. Two groups would differ in where their memory lies.
local function fingerprints(bytes)
  local list = {}
  for i = 1, ranks do list[i] = i - 1 end
  local both = world:new_group(list, "fingerprints")
  local b, op = buffers(ops[6], bytes / 4), ops[6]
  local rounds, repeats = 20 * options.blocks, math.max(20, math.min(1000, math.ceil(2e7 / bytes)))
  local on, off, added, share = {}, {}, {}, {}
  group = both:ptr()
  for k = -1, rounds do
    for slot = 0, 1 do
      local signed = (k + slot) % 2 == 0
      both:fingerprints(signed)
      timed(signed and 0 or 1, function() ours(op, b, repeats) end)
    end
    must(bare.bare_max(times, 2))
    if k > 0 then
      on[k], off[k] = times[0] / repeats, times[1] / repeats
      added[k], share[k] = on[k] - off[k], on[k] / off[k]
    end
  end
  group = world:ptr()
  local ratio, low, high = confidence(share)
  emit({ op = "fingerprint", ranks = ranks, bytes = bytes, own_us = median(on), off_us = median(off), ratio = ratio,
    ratio_low = low, ratio_high = high, added_us = median(added) },
    ("%-35s %5d %10d %10.2f %10.2f %7.4f %9.3f   (all_to_all without and with; ratio within %.4f to "
      .. "%.4f)"):format("fingerprint", ranks,
    bytes, median(off), median(on), ratio, median(added), low, high))
  both:close()
end
-- Ranks that share processors hide nothing from each other, and their times scatter too much for small differences.
local extras = not options.no_overlap and ranks <= require("perilune.launcher").cpus()
if extras then for _, bytes in ipairs { 64, 65536, 262144 } do fingerprints(bytes) end end

-- -- KeyedJaggedTensors -----------------------------------------------------------------------------------------------

if not wanted or wanted:find(",kjt_all_to_all,", 1, true) then
  local kjt = dofile "tests/bench/comm_kjt.lua"
  local tools = { world = world, timed = timed, times = times, median = median, address = address, emit = emit,
    largest = function(n) must(bare.bare_max(times, n)) end,
    bare = function(to, from, count) must(bare.bare_run(6, to, from, count, 1)) end }
  for _, ids in ipairs { 1, 20 } do kjt(tools, ids, 4 * options.blocks) end
  kjt(tools, 20, 4 * options.blocks, true)
end

-- -- overlap ----------------------------------------------------------------------------------------------------------

local F = peri.nn.functional
local a = peri.Tensor.normal({ 128, 128 }, 0, 1, 1, 0)
local function compute(products) peri.scope(function() for _ = 1, products do F.matmul(a, a) end end) end

--- Time of rank 0 from the post to the end of the wait, with `products` matrix products of `who` in between.
local function overlapped(post, wait, products, who)
  local list = {}
  for k = 1, options.blocks do
    must(bare.bare_barrier())
    local from = now()
    post()
    if products > 0 and (who == "all" or rank == 0) then compute(products) end
    wait()
    times[0] = now() - from
    if rank ~= 0 then times[0] = 0 end
    must(bare.bare_max(times, 1))
    list[k] = times[0]
  end
  return median(list)
end

local function overlap(op, bytes)
  local b = buffers(op, bytes / 4)
  local kinds = {
    ours = { function() op[5](b) end, function()
      check(C.peri_work_wait(work[0]))
      C.peri_work_release(work[0])
    end },
    bare = { function() must(bare.bare_post(op[2], b.to, b.from, bytes / 4)) end,
      function() must(bare.bare_wait()) end },
  }
  local one = overlapped(function() end, function() end, 200, "first") / 200
  for _, kind in ipairs { "ours", "bare" } do
    local post, wait = kinds[kind][1], kinds[kind][2]
    overlapped(post, wait, 0) -- the first blocks touch new memory
    local alone = overlapped(post, wait, 0)
    for _, case in ipairs { { "first", 1 }, { "first", 3 }, { "all", 3 } } do
      local products = math.ceil(case[2] * alone / one)
      local computing = overlapped(function() end, function() end, products, case[1])
      local both = overlapped(post, wait, products, case[1])
      local hidden = math.max(0, math.min(1, (alone + computing - both) / alone))
      emit({ op = "overlap " .. op[1], ranks = ranks, bytes = bytes, kind = kind, computing = case[1] == "all"
        and "all ranks" or "rank 0", exchange_us = alone, compute_us = computing, both_us = both, hidden = hidden },
        ("overlap %-12s %2d %10d %s: exchange %8.1f us, computing on %s %8.1f us, both %8.1f us: %3.0f %% "
          .. "hidden"):format(op[1], ranks,
        bytes, kind, alone, case[1] == "all" and "all ranks" or "rank 0", computing, both, 100 * hidden))
    end
  end
end
if extras then
  for _, bytes in ipairs { 262144, 4194304 } do
    for _, i in ipairs { 6, 3, 2 } do overlap(ops[i], bytes) end
  end
end
if rank == 0 then
  print "ways in use:"
  for _, line in ipairs(require("perilune.calibration.choices").lines()) do
    if line:match "copy_" then print(line) end
  end
end
must(bare.bare_close())
peri.finish()
