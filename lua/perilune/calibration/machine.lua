-- machine.lua: what `perilune calibrate` measures of the machine: rates of copies, lookups, updates, products and
-- exchanges, and the prices of a training step (plan/step.lua), found by running steps and solving for them. Makes a
-- Topology.
--
-- On a GPU (perilune calibrate --device cuda) the same is measured of its memory, its kernels and the exchanges between
-- GPUs; probes have PROBE_SCALE (rates.lua) times the samples and rows there, since small ones tell of launches only.
--
-- All ranks measure at the same time, as they would train: rates are those of a rank while all are busy. Of several
-- turns the fastest counts, of ranks the slowest.
local ffi = require "ffi"
local peri = require "perilune"
local launcher = require "perilune.launcher"
local step = require "perilune.plan.step"
local measure = require "perilune.calibration.measure"
local fit = require "perilune.calibration.fit"
local dense = require "perilune.calibration.dense"
local rates = require "perilune.calibration.rates"
local beside = require "perilune.calibration.beside"
local files = require "perilune.text"
local topologies = require "perilune.plan.topology"
local plan, util, C = peri.plan, peri.util, peri.ffi.C

local M = {}

local now, most = rates.now, rates.most

-- -- prices -----------------------------------------------------------------------------------------------------------

local TABLES = 8
local MOST_TURNS = 100
local ROUNDS = 4
local LONG = 20 -- milliseconds of a step whose first turn is as good as the others

--- Steps that tell prices apart: ids of a bag, columns, rows, samples, tables (TABLES); how these are sharded. wide:
--- across hosts too, as those that are about exchanges are.
local probes = {
  -- next to nothing; tables that the caches hold: ids, bags, their bytes
  { ids = 1, dim = 4, rows = 100, batch = 1, wide = true }, { ids = 2, dim = 16, rows = 1000, batch = 32, tables = 24 },
  { ids = 1, dim = 16, rows = 1000, batch = 1024, wide = true },
  { ids = 1, dim = 128, rows = 1000, batch = 512, tables = 16 }, { ids = 1, dim = 256, rows = 1000, batch = 2048,
    tables = 6 }, { ids = 1, dim = 64, rows = 5000, batch = 200, tables = 12 },
  { ids = 1, dim = 32, rows = 2000, batch = 2048, tables = 12 },
  { ids = 20, dim = 16, rows = 1000, batch = 512 }, { ids = 20, dim = 128, rows = 1000, batch = 256 },
  { ids = 8, dim = 32, rows = 300, batch = 100, tables = 20 },
  { ids = 40, dim = 8, rows = 3000, batch = 256, tables = 4 },
  -- rows that some ids share
  { ids = 20, dim = 64, rows = 10000, batch = 512, tables = 3, wide = true },
  { ids = 4, dim = 64, rows = 10000, batch = 1024, wide = true },
  { ids = 8, dim = 8, rows = 12000, batch = 512, tables = 4 },
  { ids = 4, dim = 32, rows = 3000, batch = 256, tables = 28 },
  -- tables that they do not hold: of 61, 123 or 246 MB, so that one probe uses the memory of another, for pages that
  -- are new cost more than the steps
  { ids = 1, dim = 128, rows = 60000, batch = 1024, wide = true }, { ids = 1, dim = 32, rows = 120000, batch = 800,
    tables = 16 },
  { ids = 4, dim = 8, rows = 240000, batch = 1024, wide = true }, { ids = 4, dim = 64, rows = 120000, batch = 512,
    tables = 4 },
  { ids = 20, dim = 128, rows = 60000, batch = 256 }, { ids = 20, dim = 32, rows = 240000, batch = 256, wide = true },
  { ids = 1, dim = 64, rows = 120000, batch = 3072 }, { ids = 4, dim = 256, rows = 30000, batch = 300 },
  { ids = 1, dim = 256, rows = 30000, batch = 1536 }, { ids = 10, dim = 16, rows = 240000, batch = 100 },
  { ids = 2, dim = 64, rows = 60000, batch = 64, tables = 16, wide = true },
  { ids = 30, dim = 256, rows = 60000, batch = 128, tables = 4 },
  -- optimizers that keep numbers for each of a row's
  { ids = 4, dim = 32, rows = 3000, batch = 512, tables = 12, optimizer = "adam" },
  { ids = 8, dim = 128, rows = 2000, batch = 256, optimizer = "adagrad" },
  { ids = 2, dim = 32, rows = 120000, batch = 1024, optimizer = "adagrad" },
  { ids = 4, dim = 64, rows = 120000, batch = 512, tables = 4, optimizer = "adam" },
  -- cut, copied, uneven
  { ids = 1, dim = 64, rows = 20000, batch = 1024, sharding = "row_wise" },
  { ids = 10, dim = 64, rows = 120000, batch = 512, sharding = "row_wise" },
  { ids = 2, dim = 16, rows = 5000, batch = 100, sharding = "row_wise" },
  { ids = 1, dim = 16, rows = 2000, batch = 700, tables = 20, sharding = "row_wise" },
  { ids = 4, dim = 256, rows = 15000, batch = 256, tables = 4, sharding = "row_wise" },
  { ids = 40, dim = 64, rows = 120000, batch = 384, tables = 2, sharding = "row_wise" },
  { ids = 1, dim = 64, rows = 1000, batch = 1024, sharding = "data_parallel", tables = 12 },
  { ids = 4, dim = 64, rows = 4000, batch = 512, sharding = "data_parallel" },
  { ids = 1, dim = 16, rows = 100, batch = 200, sharding = "data_parallel" },
  { ids = 2, dim = 32, rows = 2000, batch = 400, sharding = "data_parallel" },
  { ids = 1, dim = 64, rows = 1000, batch = 1024, one_rank = true }, { ids = 10, dim = 64, rows = 20000, batch = 512,
    one_rank = true },
  { ids = 1, dim = 64, rows = 20000, batch = 1024, sharding = "table_row_wise" },
  { ids = 4, dim = 128, rows = 20000, batch = 200, sharding = "table_row_wise" },
  { ids = 10, dim = 16, rows = 50000, batch = 400, sharding = "table_row_wise" },
  -- several kinds of exchanges in a step, also one kind that loads links one way and another that loads them the other
  -- way; columns
  { ids = 4, dim = 64, rows = 60000, batch = 1024, tables = 4, sharding = "mixed" },
  { ids = 1, dim = 32, rows = 2000, batch = 300, sharding = "mixed" },
  { ids = 20, dim = 64, rows = 80000, batch = 512, tables = 6, sharding = "mixed" },
  { ids = 4, dim = 64, rows = 60000, batch = 1024, sharding = "apart" },
  { ids = 2, dim = 64, rows = 20000, batch = 512, tables = 6, sharding = "column_wise" },
  -- rows of 16 bits, which devices with memory of their own are measured with, too
  { ids = 20, dim = 128, rows = 60000, batch = 512, data_type = "FP16", device = true },
  { ids = 4, dim = 64, rows = 120000, batch = 1024, tables = 4, data_type = "FP16", device = true },
  { ids = 20, dim = 128, rows = 300000, batch = 2048, tables = 1, device = true },
  { ids = 3, dim = 128, rows = 30000, batch = 256, tables = 26, device = true },
}

--- Table t's entry in a plan.
local function entry_of(probe, t, topology)
  local hosts = topology.world_size / topology.local_world_size
  if probe.sharding == "row_wise" then return plan.row_wise() end
  if probe.sharding == "data_parallel" then return plan.data_parallel() end
  if probe.sharding == "table_row_wise" then return plan.table_row_wise((t - 1) % hosts) end
  if probe.sharding == "column_wise" then return plan.column_wise() end
  if probe.sharding == "apart" then
    return t == 1 and plan.table_row_wise(0) or plan.table_wise(topology.local_world_size + t - 2)
  end
  if probe.sharding == "mixed" and t % 4 == 1 then
    return hosts > 1 and plan.table_row_wise(math.floor(t / 4) % hosts) or plan.row_wise()
  end
  return plan.table_wise(probe.one_rank and 0 or (t - 1) % topology.world_size)
end

--- How many tables a probe has.
local function tables_of(probe, topology)
  if probe.sharding == "apart" then return 1 + topology.world_size - topology.local_world_size end
  return math.max(probe.tables or TABLES, topology.world_size)
end

-- bytes of a probe's tables (without a scale) from which on caches of 32 MiB do not hold them
local COLD = 1.5 * 32 * 2 ^ 20

--- Whether a probe is about rows that caches do not hold.
local function is_cold(probe)
  return not probe.device and (probe.tables or TABLES) * probe.rows * probe.dim * 4 >= COLD
end

--- What a probe measures, with target.scale times its samples and rows, and target.cold times the rows if it is cold: {
--- model =, plan =, constraints =, batch_size = }.
local function described(probe, topology, target)
  local tables, entries, constraints, scale = {}, {}, {}, target.scale
  local function scaled(n) return math.max(1, math.floor(n * scale)) end
  local rows = scaled(probe.rows * (target.cold and is_cold(probe) and target.cold or 1))
  local n = tables_of(probe, topology)
  for t = 1, n do
    local name = "t" .. t
    tables[t] = { name = name, num_embeddings = rows, embedding_dim = probe.dim, feature_names = { "f" .. t },
      data_type = probe.data_type or "FP32" }
    entries[name], constraints[name] = entry_of(probe, t, topology),
      plan.ParameterConstraints { pooling_factors = { probe.ids } }
  end
  return { model = { { path = "", kind = "EmbeddingBagCollection", tables = tables, optimizer = probe.optimizer
    or "rowwise_adagrad" } }, plan = plan.ShardingPlan { [""] = entries }, constraints = constraints,
      batch_size = scaled(probe.batch) }
end

local across = { table_row_wise = true, apart = true } -- need several hosts

--- Probes that a topology has a place for.
local function probes_of(topology)
  local list = {}
  for _, probe in ipairs(probes) do
    local about_exchanges, elsewhere = probe.sharding or probe.one_rank, probe.device
      and topology.compute_device == "cpu"
    if topology.world_size > topology.local_world_size then
      if (probe.wide or about_exchanges) and not elsewhere then list[#list + 1] = probe end
    elseif not across[probe.sharding] and not elsewhere then
      list[#list + 1] = probe
    end
  end
  return list
end

-- over all probes: what disturbs a machine for seconds does not meet a probe twice. Across hosts one of either kind
local PASSES = 2

--- Run a probe. Returns milliseconds: { ms =, forward =, backward = }.
local function run(probe, topology, group, world, seconds, target)
  local args = described(probe, topology, target)
  args.group, args.beside, args.device = group, world, target.device
  local prepared = measure.prepare(args)
  local best, from = { ms = math.huge }, now()
  for turn = 0, MOST_TURNS do
    local ms, ahead, back = measure.time(prepared)
    if (turn > 0 or ms > LONG) and ms < best.ms then best = { ms = ms, forward = ahead, backward = back } end
    if turn > (ms > LONG and 0 or 1) and most(world, now() - from) > seconds * 1000 then break end
  end
  measure.release(prepared)
  return best
end

--- The ranks of one host alone, of a Topology's arguments.
local function one_host(args)
  local own = util.copy(args)
  own.world_size, own.hosts_sharing = own.local_world_size, nil
  local topology = plan.Topology(own)
  topology.hosts_sharing = args.hosts_sharing -- the others are busy meanwhile
  return topology
end

--- What was counted of all probes: a list of { ranks = (step.by_rank), ms = what it took, one_host = of the ranks of
--- one host }. args: a Topology's; times: of all ranks; times.host: of those of one host, if there are several.
local function counted(args, times, target)
  local list = {}
  local function add(topology, own_times, alone)
    for i, probe in ipairs(probes_of(topology)) do
      local p = described(probe, topology, target)
      local options, placement = step.of_plan(p.plan, p.model, topology, p.batch_size, p.constraints)
      list[#list + 1] = { ranks = step.by_rank(options, placement, topology), ms = own_times[i], one_host = alone,
        probe = probe }
    end
  end
  add(plan.Topology(args), times, false)
  if times.host then add(one_host(args), times.host, true) end
  return list
end

--- Prices by which sums of the probes' milliseconds are nearest to what they took; by direction, with the mean relative
--- errors. free: those of rows in memory may be less than memory can give.
local function solved(args, list, free)
  local topology, host, costs, off, rows = plan.Topology(args), one_host(args), {}, {}, { forward = {}, backward = {} }
  local amounts = util.map(list, function(probe)
    return step.amounts(probe.ranks, probe.one_host and host or topology)
  end)
  for n, probe in ipairs(list) do
    for way, of_way in util.ordered(rows) do of_way[n] = { amounts = amounts[n][way], ms = probe.ms[way] } end
  end
  -- what crosses hosts takes what the links take; within a host it is memory, whose rate depends on what the caches
  -- have
  local known = { far = 1 }
  -- a copied byte is read, its place is read, and it is written: no row comes from memory faster than that
  local lowest = not args.compute_device and not free and { cold_row_byte = 1 / (3 * args.rates.copy) } or nil
  -- with what passes at once by the prices found before
  for round = 1, topology.world_size > topology.local_world_size and ROUNDS or 1 do
    for n, probe in ipairs(round > 1 and list or {}) do
      if not probe.one_host then
        local far = step.far(probe.ranks, topology, amounts[n], costs)
        for way in util.ordered(rows) do amounts[n][way].far = far[way] end
      end
    end
    for way, of_way in util.ordered(rows) do costs[way], off[way] = fit.least(of_way, step.units, known, lowest) end
  end
  off.steps = #list
  return costs, off
end

--- Measures all probes in a group, the others of whose world do the same at the same times. times: milliseconds of
--- each, the fastest of some passes and of what is there already. Collective.
local function measure_steps(times, topology, group, world, seconds, tell, target)
  local list, passes = probes_of(topology), world:size() > world.local_size and 1 or PASSES
  -- a first pass that took all that, for probes have a least, is the only one
  local from, most_ms = now(), passes * seconds * 1000
  for pass = 1, passes do
    if pass > 1 and most(world, now() - from) > most_ms then break end
    for i, probe in ipairs(list) do
      tell((pass - 1) * #list + i, passes * #list, ("%d ids of %d columns%s"):format(probe.ids, probe.dim,
        probe.sharding and ", " .. probe.sharding or ""))
      peri.scope(function()
        local found = run(probe, topology, group, world, seconds / passes / #list, target)
        if not times[i] or found.ms < times[i].ms then times[i] = found end
      end)
    end
  end
end

M.counted = counted -- for specs: what probes are, without a measurement

local PASSES_OF_MEMORY = 6 -- more bytes of rows for each that is copied, which memory reads and writes, no memory gives

--- Words if a probe's rows came faster than memory can give them, by the rate of copies: its tables are larger than the
--- caches, so then something else was measured, and prices of it would make plans that no machine keeps. t: a
--- Topology's arguments, with rates.copy; list: of `counted`.
local function wrong_sums(t, list)
  local topology, host = plan.Topology(t), one_host(t)
  for _, p in ipairs(list) do
    local amounts = step.amounts(p.ranks, p.one_host and host or topology)
    for _, way in ipairs { "forward", "backward" } do
      local rate = amounts[way].cold_row_byte / p.ms[way]
      if rate > PASSES_OF_MEMORY * t.rates.copy then
        return ("%s of %d ids of %d columns took %.3g ms, in which %.3g GB/s of rows would have come that no cache "
          .. "holds; copies take %.3g GB/s, so memory cannot"):format(way == "forward" and "lookups" or "updates",
          p.probe.ids, p.probe.dim, p.ms[way], rate / 1e6, t.rates.copy / 1e6)
      end
    end
  end
end

local CONTRADICTION = 0.1 -- of the mean relative error

--- Words if timings are explained by rows that come faster than memory gives them, and not by prices that memory can
--- keep. best: what M.prices found; free, off: the prices without that bound, and their errors.
local function wrong_prices(t, best, free, off)
  for _, way in ipairs { "forward", "backward" } do
    if best.off[way] - off[way] > CONTRADICTION then
      return ("by these timings rows that no cache holds are %s at %.3g GB/s; copies take %.3g GB/s, so memory cannot "
        .. "(prices that it can keep are %.0f %% off, not %.0f %%)"):format(way == "forward" and "looked up"
        or "updated", 1e-6 / math.max(free[way].cold_row_byte or 0, 1e-12), t.rates.copy / 1e6, 100 * best.off[way],
        100 * off[way])
    end
  end
end

--- Prices of all units by the probes' times, and bytes of the caches as they act, others being there too: of some parts
--- of the last one that which explains the probes best. nil and words if the timings contradict the rate of copies.
function M.prices(t, times, target)
  local list, best = counted(t, times, target), nil
  local wrong = not t.compute_device and wrong_sums(t, list)
  if wrong then return nil, wrong end
  for part = 0, 6 do
    for times_own = -1, 2 do
      local own = util.copy(t)
      own.cache_bytes = math.floor(t.cache_bytes / 2 ^ (part / 2))
      own.core_cache_bytes = math.floor(t.core_cache_bytes * 2 ^ times_own)
      local costs, off = solved(own, list)
      local sum = off.forward + off.backward
      if not best or sum < best.sum then
        best = { sum = sum, costs = costs, off = off, cache_bytes = own.cache_bytes,
          core_cache_bytes = own.core_cache_bytes, own = own }
      end
    end
  end
  wrong = not t.compute_device and wrong_prices(t, best, solved(best.own, list, true))
  if wrong then return nil, wrong end
  return best
end

local TRIES = 6

--- What solve() returns: a result, or nil and words on measurements that contradict each other, as they do where other
--- programs made some of them slow. Then again(try) measures again, for tries 2 to TRIES. An error if they still
--- contradict each other.
function M.agreed(solve, again)
  for try = 1, TRIES do
    if try > 1 then again(try) end
    local result, wrong = solve()
    if result then return result end
    if try == TRIES then
      peri.ffi.fail(("calibrate: %s, also measured again: nothing is kept; measure again"):format(wrong))
    end
  end
end

--- Bytes a millisecond at a price of a byte. A price of next to nothing, which probes on a busy machine leave, says
--- nothing: then it is the rate of copies.
function M.rate(price, copies)
  if price * copies < 0.1 then return copies end
  return 1 / price
end

-- -- all of it --------------------------------------------------------------------------------------------------------

--- Bytes that are free for the tables of each rank of this host.
local function memory(group)
  local bytes = peri.ffi.host_memory()
  return -most(group, -(bytes < 2 ^ 60 and bytes or 2 ^ 37) / group.local_size)
end

--- An error if a host has no room for tables that its caches do not hold: before all the work.
local function check_room(topology, target)
  local room, largest = topology.ddr_cap * topology.local_world_size / 2, 0
  for _, probe in ipairs(probes_of(topology)) do
    local t = described(probe, topology, target).model[1].tables
    largest = math.max(largest,
      #t * t[1].num_embeddings * probe.dim * 4 / topology.world_size * topology.local_world_size)
  end
  if largest > room then
    peri.ffi.fail(("calibrate: caches of %.0f MiB are to be measured beside tables of %.0f MiB, more than half of "
      .. "this host's memory")
      :format(topology.cache_bytes / 2 ^ 20, largest / 2 ^ 20))
  end
end

--- Bytes of a cache that is a processor's own.
local function core_cache_bytes()
  for level = 3, 1, -1 do
    local file = io.open(("/sys/devices/system/cpu/cpu0/cache/index%d/size"):format(level - 1))
    local text = file and file:read "*l"
    if file then file:close() end
    local number, unit = (text or ""):match "^(%d+)([KMG]?)$"
    if number then return tonumber(number) * ({ K = 2 ^ 10, M = 2 ^ 20, G = 2 ^ 30 })[unit ~= "" and unit or "K"] end
  end
  return 32 * 2 ^ 20
end

local DEVICE_CACHE = 64 * 2 ^ 20 -- more than a GPU has: of parts of it that which explains the probes best is taken

--- Bytes that are free on the devices of all ranks, of which a rank has its part where several share one.
local function device_memory(group, device)
  local bytes = ffi.new "int64_t[1]"
  peri.ffi.check(C.peri_device_memory(peri.ffi.device(device), bytes))
  return math.floor(-most(group, -tonumber(bytes[0])))
end

--- An error unless all hosts have as many ranks.
local function check_hosts(group)
  local host = group.local_size
  local least, largest = -most(group, -host), most(group, host)
  if least ~= largest then
    peri.ffi.fail(("calibrate: %d ranks, %d on one host and %d on another, wanted as many on each"):format(group:size(),
      largest, least))
  end
end

--- Completes a Topology's arguments t with the prices of measured times: { topology = t, off = }, or { wrong = words }.
local function finished(t, times, target, device, tell)
  local best, wrong = M.prices(t, times, target)
  if not best then return { wrong = wrong } end
  local ahead, back = best.costs.forward, best.costs.backward
  t.costs, t.cache_bytes, t.core_cache_bytes = best.costs, best.cache_bytes, best.core_cache_bytes
  t.rates.gather = M.rate(ahead.id_byte + ahead.cold_row_byte, t.rates.copy)
  t.rates.update = M.rate(back.id_byte + back.cold_row_byte, t.rates.copy)
  if device then t.hbm_mem_bw = 2 * t.rates.copy -- read and written
  else t.ddr_mem_bw = t.rates.gather end
  if device then t.dense, best.off.dense = dense.prices(device, target.dense_scale, tell) end
  return { topology = t, off = best.off }
end

--- The topology of a group's ranks, measured. args: { group =, choices = name -> way (or nil), seconds = (about; 20),
--- tell = function(done, all, text), before = the last result of an earlier call, or nil: what that found faster stays
--- }. Returns it, by direction the mean relative error of the prices over the probes and how many these are (steps),
--- and what was measured. Collective.
function M.topology(args)
  local group, tell, seconds, before = args.group, args.tell or function() end, args.seconds or 20, args.before
  local n, host = group:size(), group.local_size
  check_hosts(group)
  local caches = tonumber(C.peri_cache_bytes())
  local target = rates.target_of(args.device, caches)
  local t = { world_size = n, local_world_size = host, rates = {}, ddr_cap = math.floor(memory(group)) }
  if args.device then
    t.compute_device, t.hbm_cap = "cuda", device_memory(group, args.device)
    t.cache_bytes, t.core_cache_bytes = DEVICE_CACHE, DEVICE_CACHE / 8
    t.hbm_to_ddr_mem_bw = rates.bus_rate(group, 3, target)
  else
    t.processors, t.threads, t.choices = math.min(launcher.cpus(), 2 ^ 20), peri.ffi.C.peri_threads(), args.choices
    t.cache_bytes, t.core_cache_bytes = caches, math.min(core_cache_bytes(), caches)
    check_room(plan.Topology(t), target)
  end
  rates.bare(group, t, before and before.bare, tell, target)
  local found = { bare = util.copy(t), times = util.copy(before and before.times or {}) }
  found.bare.rates = t.rates
  if n > host then found.times.host = util.copy(found.times.host or {}) end
  local own = n > host and peri.dist.comm.intra_and_cross_node_pg { group = group }
  local function steps()
    measure_steps(found.times, plan.Topology(t), group, group, own and 0.5 * seconds or seconds, tell, target)
    -- what ranks compute is a small part of what they take across hosts: it is found by steps without that
    if own then measure_steps(found.times.host, one_host(t), own, group, 0.5 * seconds, tell, target) end
  end
  steps()
  local made = M.agreed(function()
    tell(0, 1, "prices")
    -- one topology on all ranks
    local one = peri.dist.collective_utils.invoke_on_rank_and_broadcast_result(group, 0, function()
      return finished(t, found.times, target, args.device, tell)
    end)
    return not one.wrong and one, one.wrong
  end, function(try) -- the copies, which take little time, and then the steps too
    tell(0, 1, "copies")
    t.rates.copy = math.max(t.rates.copy, rates.copies(group, target))
    if try > TRIES / 2 then steps() end
  end)
  return plan.Topology(made.topology), made.off, found
end

-- -- the command ------------------------------------------------------------------------------------------------------

local function report(topology, off, print_line)
  local function rate(bytes_per_ms) return ("%.3g GB/s"):format(bytes_per_ms / 1e6) end
  local r, t = topology.rates, topology
  local rows = { { "copies", rate(r.copy) }, { "rows looked up", rate(r.gather) }, { "rows updated", rate(r.update) },
    { "products", ("%.3g GFLOP/s"):format(r.products / 1e6) } }
  if t.compute_device == "cuda" then rows[#rows + 1] = { "from the host's memory", rate(t.hbm_to_ddr_mem_bw) } end
  for _, precision in ipairs(plan.dense.precisions) do
    local flop = t.dense and t.dense[precision].forward.flop
    if flop then
      rows[#rows + 1] = { "dense part, " .. precision, ("%s, prices %.0f %% off"):format(
        flop > 0 and ("products at %.0f TFLOP/s"):format(1e-9 / flop) or "launches alone", 100 * off.dense[precision]) }
    end
  end
  if t.local_world_size > 1 then
    rows[#rows + 1] = { "exchanges within a host", ("%s, %.3g ms"):format(rate(t.intra_host_bw), t.intra_host_latency) }
  end
  if t.world_size > t.local_world_size then
    rows[#rows + 1] = { "exchanges across hosts", ("%s, %.3g ms%s"):format(rate(t.inter_host_bw), t.inter_host_latency,
      t.inter_host_burst > 0 and (", rested %.3g MB at once"):format(t.inter_host_burst / 1e6) or "") }
  end
  print_line(("%s, %d a host; of each, while all are busy:"):format(util.number_of(t.world_size, "rank"),
    t.local_world_size))
  for _, row in ipairs(rows) do print_line(("  %-26s %s"):format(row[1], row[2])) end
  print_line(("  %-26s %.0f %% off forward, %.0f %% backward, in the mean over %d steps"):format("prices of a step",
    100 * off.forward, 100 * off.backward, off.steps))
end

--- The file for what is measured of so many ranks, so many a host, and whether it is the one that is kept for them. An
--- error if it cannot be: before all the work.
local function file_for(output, ranks, host, device)
  local kept = plan.Topology.kept_path(ranks, host, device and topologies.device_kind(device))
  local path = output or kept
  if not path then
    peri.ffi.fail "calibrate: no folder for what is measured (PERI_TUNE=off, or no home); give --output"
  end
  files.probe(path, output and "calibrate: --output" or "calibrate", path == kept)
  return path, path == kept
end

local BESIDE = 0.3 -- processors: with less beside them prices are what they are otherwise
local SECONDS, SECONDS_ACROSS = 15, 10 -- of hosts; making tables and the longest steps take as long again

--- Measure, print and keep: a rank's part of `perilune calibrate`. options: output = path or nil, seconds = or nil,
--- choices = name -> way; dry_run: only see that it can be done.
function M.run(options)
  local world = peri.init()
  local first = world:rank() == 0
  local live = first and (os.getenv "PERI_PROGRESS" or (os.execute "test -t 1" == 0 and "live" or "lines")) == "live"
  local path, kept
  local device = options.device ~= "cpu" and options.device or nil
  if options.dry_run then
    check_hosts(world) -- or M.topology does
    if device then peri.ffi.device(device) end -- an error if there is none
  end
  peri.dist.collective_utils.invoke_on_rank_and_broadcast_result(world, 0, function()
    path, kept = file_for(options.output, world:size(), world.local_size, device)
  end)
  if options.dry_run then return end
  local function tell(done, all, text)
    if not live then return end
    local full = math.floor(24 * done / all)
    io.stdout:write("\r[", ("#"):rep(full), ("."):rep(24 - full), "] ", text, "\27[K")
    io.stdout:flush()
  end
  local topology, off
  local others = most(world, beside.others(world, function()
    topology, off = M.topology { group = world, choices = options.choices, tell = tell, device = device,
      seconds = options.seconds or world:size() > world.local_size and SECONDS_ACROSS or SECONDS }
    return topology.hosts_sharing * topology.local_world_size < world:size()
  end))
  if not first then return end
  if live then io.stdout:write "\r\27[K" end
  report(topology, off, print)
  if others > BESIDE then
    print(("other programs had %.1f processors meanwhile: all takes longer than by itself; measure again when they "
      .. "have ended"):format(
      others))
  end
  topology:save(path, kept)
  print("kept in " .. path)
end

return M
