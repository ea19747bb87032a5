-- rates.lua: bare rates of the machine, or of a device, for `perilune calibrate` (machine.lua): copies, products,
-- exchanges. Of several turns the fastest counts, of ranks the slowest.
local ffi = require "ffi"
local peri = require "perilune"
local tbe = require "perilune.embed.tbe"
local Tensor, util, C = peri.Tensor, peri.util, peri.ffi.C

local M = {}

function M.now() return tonumber(C.peri_time_ns()) / 1e6 end

--- The largest of all ranks' numbers.
function M.most(group, x)
  local t = Tensor.tensor({ x }, "f64")
  group:all_reduce(t, "max"):wait()
  return t:item()
end

-- the part of the best time below which a turn is better; times `turns` that are made in all
local BETTER, MOST = 0.97, 6

--- Run f again and again, and return the milliseconds of its fastest turn. A turn takes as long as on the slowest rank.
--- It ends when `turns` turns in a row were no faster: while other programs disturb, it goes on for longer. The first
--- turn does not count. Collective.
local function fastest(group, turns, f)
  local best, found, turn = math.huge, 0, 0
  while turn < found + turns and turn < MOST * turns or turn == 0 do
    group:barrier():wait()
    local from = M.now()
    peri.scope(f)
    local ms = M.most(group, M.now() - from)
    if turn > 0 then
      if ms < BETTER * best then found = turn end
      best = math.min(best, ms)
    end
    turn = turn + 1
  end
  return best
end

local SIDE = 384          -- of a processor's matrices
local PROBE_SCALE = 32

local USUAL_CACHE = 32 * 2 ^ 20 -- bytes of caches of which probes and copies without a scale are larger
local LEAST_PART = 1 / 16       -- of USUAL_CACHE, where PERI_CACHE_BYTES is set

--- What is measured: { device = (nil: the processor), copied = bytes of a copy, side = of matrices, scale = of probes'
--- samples and rows, cold = of the rows of probes that caches do not hold, dense_scale = of the sizes of networks }.
--- cache_bytes: of a processor's caches; what is to be of memory is larger, whatever they have.
--- Tables and copies are made for caches of USUAL_CACHE at least, unless PERI_CACHE_BYTES asks for less: clearing their
--- pages is most of what a calibration costs, and a test does not need the machine's true rates.
function M.target_of(device, cache_bytes)
  if not device then
    local least = (os.getenv "PERI_CACHE_BYTES" or "") ~= "" and LEAST_PART or 1
    local times = math.max(least, cache_bytes / USUAL_CACHE)
    return { copied = math.ceil(times / least) * least * USUAL_CACHE, side = SIDE, scale = 1, cold = times }
  end
  if device:match "^cuda:?%d*$" then
    return { device = device, copied = 2 ^ 29, side = 8192, scale = PROBE_SCALE, dense_scale = 1 }
  end
  return { device = device, copied = 2 ^ 16, side = 32, scale = 1 / 16, dense_scale = 1 / 64 } -- a pretended one
end

local function wait_for(target)
  if target.device then peri.stream.current(target.device):synchronize() end
end

local TURNS = 7

--- Bytes a millisecond of copies. Collective.
function M.copies(group, target)
  local function bytes() return Tensor.zeros({ target.copied / 4 }, "f32", target.device or "cpu") end
  local a, b = bytes(), bytes()
  return target.copied / fastest(group, TURNS, function()
    b:copy(a)
    wait_for(target)
  end)
end

local function product(a, b) peri.nn.functional.matmul(a, b):shape() end

local function product_rate(group, turns, target)
  local side = target.side
  local function matrix(seed) return Tensor.uniform({ side, side }, -1, 1, seed, 0, "f32", target.device or "cpu") end
  local a, b = matrix(1), matrix(2)
  return 2 * side ^ 3 / fastest(group, turns, function()
    product(a, b)
    wait_for(target)
  end)
end

local COLUMNS, A_BAG = 128, 16

--- Bytes a millisecond of single rows in the host's memory that the device's kernels read in no order: what tables with
--- fused_uvm do.
function M.bus_rate(group, turns, target)
  local rows = target.copied / (4 * COLUMNS) -- a power of two
  local bags = rows / A_BAG
  local ids = ffi.new("int64_t[?]", rows)
  for i = 0, rows - 1 do ids[i] = i * 2654435761 % rows end -- each row once
  local values = Tensor.from_memory(ids, { rows }, "i64", target.device)
  local offsets = Tensor.arange(0, rows + 1, A_BAG, "i64", target.device)
  local batch = tbe.new { tables = { { name = "rows", rows = rows, cols = COLUMNS, init = peri.embed.constant(0.01) } },
    fused_params = { optimizer = "none", bounds_check_mode = "NONE" }, mapped = true, device = target.device }
  local blocks = batch:blocks { { table = 1, first_bag = 0, bags = bags, out_offset = 0, out_stride = COLUMNS } }
  local ms = fastest(group, turns, function()
    peri.no_grad(batch.lookup, batch, values, offsets, blocks, bags, COLUMNS)
    wait_for(target)
  end)
  blocks:release()
  batch:release()
  return target.copied / ms
end

-- times as long as one host alone: less is chance (other work on a machine makes less of a difference of it)
local SHARED = 1.3
local PRODUCTS, BATCHES = 8, 9
local ASLEEP = 1e6 -- a round of peri_pause that sleeps

--- Milliseconds of some products on those ranks that work, the slowest one's median; the others sleep meanwhile.
local function products_ms(group, works)
  local a, b, times = Tensor.ones { SIDE, SIDE }, Tensor.ones { SIDE, SIDE }, { 0 }
  group:barrier():wait()
  for i = 1, works and BATCHES or 0 do
    local from = M.now()
    for _ = 1, PRODUCTS do peri.scope(product, a, b) end
    times[i] = M.now() - from
  end
  local done = Tensor.tensor({ 0 }, "f32")
  local work = group:all_reduce(done)
  while not work:test() do C.peri_pause(ASLEEP) end
  work:wait()
  return M.most(group, (util.median(times)))
end

--- How many hosts have their processors together, being parts of one machine: all, or 1. One whole host is measured
--- alone, and all: what its own ranks, threads and clocks cost each other is in both.
local function hosts_sharing(group)
  local host = group.local_size
  local slowdown = products_ms(group, true) / products_ms(group, group:rank() < host)
  return slowdown < SHARED and 1 or group:size() / host
end

local IN_A_ROW = 8 -- exchanges that are timed together: ranks leave a barrier one after the other

--- Bytes a millisecond that a rank sends in an all-to-all of a group, and milliseconds of one that moves next to
--- nothing. bytes: to each of the others.
local function exchange(world, group, turns, bytes, target)
  local n = group:size()
  local function ms(numbers)
    local function all() return Tensor.zeros({ n * numbers }, "f32", target.device or "cpu") end
    local a, b = all(), all()
    return fastest(world, turns, function()
      for _ = 1, IN_A_ROW do group:all_to_all(a, b):wait() end
      wait_for(target)
    end) / IN_A_ROW
  end
  local latency, large = ms(1), ms(bytes / 4)
  -- a disturbed latency is not taken for all of it
  return bytes * (n - 1) / math.max(large - latency, large / 2), latency
end

local REST = 20  -- milliseconds
local SLIGHT = 0.1

--- Bytes that a rank sends beyond bandwidth (bytes a millisecond) right after its link rested: the limit of a link lets
--- bursts through. Nothing where it makes little of a difference to `bytes` to each of the others. The median of
--- `turns`: the fastest is twice as fast, by luck.
local function burst(world, group, turns, bytes, bandwidth)
  local n = group:size()
  local a, b, times = Tensor.zeros({ n * bytes / 4 }, "f32"), Tensor.zeros({ n * bytes / 4 }, "f32"), {}
  for turn = 1, turns do
    group:all_to_all(a, b):wait()
    local rested = M.now() + REST
    repeat until M.now() >= rested
    world:barrier():wait()
    local from = M.now()
    group:all_to_all(a, b):wait()
    times[turn] = M.most(world, M.now() - from)
  end
  local all = bytes * (n - 1)
  local beyond = all - util.median(times) * bandwidth
  return beyond > SLIGHT * all and math.floor(beyond) or 0
end

--- Rates of copies, products and exchanges; of `before`, if that is there, those that are better.
function M.bare(group, t, before, tell, target)
  local turns, n, host = TURNS, t.world_size, t.local_world_size
  local function better(pick, new, old) return old and pick(new, old) or new end
  tell(0, 1, "copies and products")
  t.rates.copy = better(math.max, M.copies(group, target), before and before.rates.copy)
  t.rates.products = better(math.max, product_rate(group, turns, target), before and before.rates.products)
  local intra, cross = peri.dist.comm.intra_and_cross_node_pg { group = group }
  tell(0, 1, "exchanges")
  local function links(kind, sub)
    local bandwidth, latency = exchange(group, sub, turns, target.device and 2 ^ 24 or 2 ^ 20, target)
    t[kind .. "_bw"] = better(math.max, bandwidth, before and before[kind .. "_bw"])
    t[kind .. "_latency"] = better(math.min, latency, before and before[kind .. "_latency"])
  end
  if host > 1 then links("intra_host", intra) end
  if n > host then
    links("inter_host", cross)
    if target.device then return end
    t.inter_host_burst = better(math.max, burst(group, cross, 2 * turns + 1, 2 ^ 18, t.inter_host_bw), before
      and before.inter_host_burst)
    t.hosts_sharing = hosts_sharing(group)
  end
end

return M
