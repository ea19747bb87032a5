-- comm.lua: each collective operation beside the bare Open MPI call that moves the same bytes, on the same buffers, in one run: blocks of
-- a few milliseconds of one and of the other take turns, the time of a block is that of its slowest rank, ratios are of medians.
-- Columns: operation, bytes per peer, microseconds of the bare call and of ours (through the C API, as Lua calls it), ratio, difference,
-- and what the same operation costs through the Lua methods with an awaitable. Then how much of an exchange computation hides.
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
parser:flag("--no-overlap", "Leave the overlap part out.")
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
int bare_run(int op, void *recv, const void *send, int64_t count, int repeats);
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

local function median(list)
  table.sort(list)
  return list[math.floor(#list / 2) + 1]
end

-- -- the operations ------------------------------------------------------------------------------------------------------------------

local group, work = world:ptr(), ffi.new "peri_work *[1]"
local rows = ffi.new("int64_t[?]", ranks)

--- name, number in comm_mpi.c, how many parts the buffers hold, ours (C), ours (Lua methods). `b`: the buffers.
local ops = {
  { "barrier", 0, 0, 0, function() check(C.peri_coll_barrier(group, 0, work)) end, function() world:barrier():wait() end },
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
  { "all_to_all_v", 6, ranks, ranks, function(b) check(C.peri_coll_all_to_all_v(group, b.r, b.s, rows, rows, 0, work)) end,
    function(b) world:all_to_all_v(b.send, b.rows, b.rows, b.recv):wait() end },
}

local function ours(post, b, repeats)
  for _ = 1, repeats do
    post(b)
    check(C.peri_work_wait(work[0]))
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
  local number, post, method = op[2], op[5], op[6]
  local function one() must(bare.bare_run(number, b.to, b.from, count, 1)) end
  one()
  ours(post, b, 1)
  timed(0, function() must(bare.bare_run(number, b.to, b.from, count, 3)) end)
  must(bare.bare_max(times, 1))
  local repeats = math.max(1, math.min(2000, math.ceil(options.block_ms * 1000 / (times[0] / 3))))
  local pairs_wanted = times[0] / 3 > 20000 and math.ceil(options.blocks / 2) or options.blocks
  local lists = { {}, {}, {} }
  for k = -1, pairs_wanted do
    local function run_bare() timed(0, function() must(bare.bare_run(number, b.to, b.from, count, repeats)) end) end
    local function run_ours() timed(1, function() ours(post, b, repeats) end) end
    if k % 2 == 0 then
      run_bare()
      run_ours()
    else
      run_ours()
      run_bare()
    end
    timed(2, function() for _ = 1, repeats do method(b) end end)
    must(bare.bare_max(times, 3))
    if k > 0 then for i = 1, 3 do lists[i][k] = times[i - 1] / repeats end end
  end
  b.send:release()
  b.recv:release()
  return median(lists[1]), median(lists[2]), median(lists[3])
end

local wanted = options.ops and ("," .. options.ops .. ",")
if rank == 0 then print(("%-15s %5s %10s %10s %10s %7s %9s %10s"):format("operation", "ranks", "bytes", "bare us", "ours us", "ratio",
  "added us", "lua us")) end
for _, op in ipairs(ops) do
  local bytes = math.max(options.least, 4)
  while bytes <= options.most and (not wanted or wanted:find("," .. op[1] .. ",", 1, true)) do
    local plain, own, lua = measure(op, bytes / 4)
    if op[1] == "barrier" then bytes = 0 end
    emit({ op = op[1], ranks = ranks, bytes = bytes, bare_us = plain, own_us = own, lua_us = lua, ratio = own / plain,
      added_us = own - plain }, ("%-15s %5d %10d %10.2f %10.2f %7.3f %9.2f %10.2f"):format(op[1], ranks, bytes, plain, own, own / plain,
      own - plain, lua))
    if op[1] == "barrier" then break end
    bytes = bytes * options.factor
  end
end
must(bare.bare_close())
peri.finish()
