-- machine.lua: what `perilune calibrate` measures of the machine: rates of copies, lookups, updates, products and exchanges, and the
-- prices of a training step (plan/step.lua), found by running steps and solving for them. Makes a Topology.
--
-- All ranks measure at the same time, as they would train: rates are those of a rank while all are busy. Of several turns the fastest
-- counts, of ranks the slowest.
local peri = require "perilune"
local launcher = require "perilune.launcher"
local step = require "perilune.plan.step"
local measure = require "perilune.launch.measure"
local fit = require "perilune.launch.fit"
local Tensor, plan, util, C = peri.Tensor, peri.plan, peri.util, peri.ffi.C

local M = {}

local function now() return tonumber(C.peri_time_ns()) / 1e6 end

--- The largest of all ranks' numbers.
local function most(group, x)
  local t = Tensor.tensor({ x }, "f64")
  group:all_reduce(t, "max"):wait()
  return t:item()
end

--- Milliseconds of f: the fastest of `turns` (each the slowest rank's). Collective.
local function fastest(group, turns, f)
  local best = math.huge
  for turn = 0, turns do
    group:barrier():wait()
    local from = now()
    peri.scope(f)
    local ms = most(group, now() - from)
    if turn > 0 then best = math.min(best, ms) end
  end
  return best
end

-- -- bare rates ------------------------------------------------------------------------------------------------------------------------

local COPIED = 32 * 2 ^ 20 -- bytes
local SIDE = 384           -- of the matrices

local function copy_rate(group, turns)
  local a, b = Tensor.zeros({ COPIED / 4 }, "f32"), Tensor.zeros({ COPIED / 4 }, "f32")
  return COPIED / fastest(group, turns, function() b:copy(a) end)
end

local function product_rate(group, turns)
  local a, b = Tensor.ones { SIDE, SIDE }, Tensor.ones { SIDE, SIDE }
  return 2 * SIDE ^ 3 / fastest(group, turns, function() peri.nn.functional.matmul(a, b):shape() end)
end

local IN_A_ROW = 8 -- exchanges that are timed together: ranks leave a barrier one after the other

--- Bytes a millisecond that a rank sends in an all-to-all of a group, and milliseconds of one that moves next to nothing. bytes: to each
--- of the others.
local function exchange(world, group, turns, bytes)
  local n = group:size()
  local function ms(numbers)
    local a, b = Tensor.zeros({ n * numbers }, "f32"), Tensor.zeros({ n * numbers }, "f32")
    return fastest(world, turns, function()
      for _ = 1, IN_A_ROW do group:all_to_all(a, b):wait() end
    end) / IN_A_ROW
  end
  local latency, large = ms(1), ms(bytes / 4)
  return bytes * (n - 1) / math.max(large - latency, large / 2), latency -- a disturbed latency is not taken for all of it
end

-- -- prices ----------------------------------------------------------------------------------------------------------------------------

local TABLES = 8
local MOST_TURNS = 100

--- Steps that tell prices apart: ids of a bag, columns, rows, samples; how tables are sharded.
local probes = {
  { ids = 1, dim = 4, rows = 100, batch = 1 },
  { ids = 1, dim = 16, rows = 1000, batch = 1024 }, { ids = 1, dim = 128, rows = 1000, batch = 1024 },
  { ids = 20, dim = 16, rows = 1000, batch = 512 }, { ids = 20, dim = 128, rows = 1000, batch = 512 },
  { ids = 1, dim = 128, rows = 60000, batch = 1024 }, { ids = 1, dim = 32, rows = 240000, batch = 1024 },
  { ids = 4, dim = 8, rows = 100000, batch = 1024, tables = 16 }, { ids = 4, dim = 64, rows = 100000, batch = 1024, tables = 2 },
  { ids = 2, dim = 16, rows = 1000, batch = 32, tables = 16 }, { ids = 4, dim = 64, rows = 10000, batch = 1024 },
  { ids = 20, dim = 128, rows = 60000, batch = 512 }, { ids = 20, dim = 32, rows = 240000, batch = 512 },
  { ids = 1, dim = 64, rows = 120000, batch = 4096 }, { ids = 4, dim = 64, rows = 120000, batch = 2048 },
  { ids = 1, dim = 64, rows = 20000, batch = 1024, sharding = "row_wise" },
  { ids = 10, dim = 64, rows = 100000, batch = 512, sharding = "row_wise" },
  { ids = 1, dim = 64, rows = 1000, batch = 1024, sharding = "data_parallel" },
  { ids = 4, dim = 64, rows = 10000, batch = 512, sharding = "data_parallel" },
  { ids = 1, dim = 64, rows = 1000, batch = 1024, one_rank = true }, { ids = 10, dim = 64, rows = 20000, batch = 512, one_rank = true },
}

--- Ranks of table t's shards, and its entry in a plan.
local function place(probe, t, ranks)
  if probe.sharding == "row_wise" then return true, plan.row_wise() end
  if probe.sharding == "data_parallel" then return true, plan.data_parallel() end
  local rank = probe.one_rank and 0 or (t - 1) % ranks
  return { rank }, plan.table_wise(rank)
end

local function tables_of(probe, ranks)
  local tables, entries, places = {}, {}, {}
  local n = math.max(probe.tables or TABLES, ranks)
  for t = 1, n do
    tables[t] = { name = "t" .. t, num_embeddings = probe.rows, embedding_dim = probe.dim, feature_names = { "f" .. t } }
    places[t], entries["t" .. t] = place(probe, t, ranks)
  end
  return { { path = "", kind = "EmbeddingBagCollection", tables = tables, optimizer = "rowwise_adagrad" } }, entries, places
end

--- The options of a probe's plan, in the order of its tables.
local function options_of(probe, model, topology, constraints)
  local enumerator = plan.EmbeddingEnumerator { topology = topology, batch_size = probe.batch, constraints = constraints,
    sharder = plan.perilune_sharder, estimators = {} }
  return util.map(enumerator:enumerate(model), function(option) return option end)
end

--- Amounts of a probe's step (plan/step.lua).
local function amounts(probe, topology, model, places)
  local constraints = {}
  for _, t in ipairs(model[1].tables) do
    constraints[t.name] = plan.ParameterConstraints { pooling_factors = { probe.ids }, sharding_types = { probe.sharding or "table_wise" } }
  end
  local options = options_of(probe, model, topology, constraints)
  return step.amounts(step.by_rank(options, places, topology), topology), constraints
end

--- Run a probe. Returns milliseconds: { forward =, backward = }.
local function run(probe, topology, group, seconds)
  local model, entries, places = tables_of(probe, topology.world_size)
  local _, constraints = amounts(probe, topology, model, places)
  local prepared = measure.prepare { model = model, plan = plan.ShardingPlan { [""] = entries }, constraints = constraints,
    batch_size = probe.batch, group = group }
  local ms, from = { forward = math.huge, backward = math.huge }, now()
  for turn = -1, MOST_TURNS do
    local _, ahead, back = measure.time(prepared)
    if turn > 0 then ms = { forward = math.min(ms.forward, ahead), backward = math.min(ms.backward, back) } end
    if turn > 3 and most(group, now() - from) > seconds * 1000 then break end
  end
  measure.release(prepared)
  return ms
end

--- Prices by which sums of the probes' milliseconds are nearest to what they took; by direction, with the mean relative errors.
local function solved(topology, times)
  local costs, off = {}, {}
  for _, way in ipairs { "forward", "backward" } do
    local rows = {}
    for i, probe in ipairs(probes) do
      local model, _, places = tables_of(probe, topology.world_size)
      rows[i] = { amounts = amounts(probe, topology, model, places)[way], ms = times[i][way] }
    end
    costs[way], off[way] = fit.least(rows, step.units)
  end
  return costs, off
end

--- Prices of all units, and bytes of the caches as they act, others being there too: of some parts of the last one that which explains the
--- probes best.
local function prices(t, group, seconds, tell)
  local times = {}
  for i, probe in ipairs(probes) do
    tell(i, #probes, ("%d ids of %d columns%s"):format(probe.ids, probe.dim, probe.sharding and ", " .. probe.sharding or ""))
    peri.scope(function() times[i] = run(probe, plan.Topology(t), group, seconds / #probes) end)
  end
  local best
  for part = 0, 4 do
    local own = util.copy(t)
    own.cache_bytes = math.floor(t.cache_bytes / 2 ^ part)
    local costs, off = solved(plan.Topology(own), times)
    local sum = off.forward + off.backward
    if not best or sum < best.sum then best = { sum = sum, costs = costs, off = off, cache_bytes = own.cache_bytes } end
  end
  return best
end

-- -- all of it -------------------------------------------------------------------------------------------------------------------------

--- Bytes that are free for the tables of each rank of this host.
local function memory(group)
  local file = io.open "/proc/meminfo"
  local kib = file and file:read "*a":match "MemTotal:%s*(%d+)"
  if file then file:close() end
  local bytes = (kib and tonumber(kib) * 1024 or 2 ^ 37) / group.local_size
  return -most(group, -bytes)
end

--- Bytes of the last cache of this host.
local function cache_bytes()
  for level = 4, 1, -1 do
    local file = io.open(("/sys/devices/system/cpu/cpu0/cache/index%d/size"):format(level - 1))
    local text = file and file:read "*l"
    if file then file:close() end
    local number, unit = (text or ""):match "^(%d+)([KMG]?)$"
    if number then return tonumber(number) * ({ K = 2 ^ 10, M = 2 ^ 20, G = 2 ^ 30 })[unit ~= "" and unit or "K"] end
  end
  return 32 * 2 ^ 20
end

--- The topology of a group's ranks, measured. args: { group =, choices = name -> way (or nil), seconds = (about; 20), tell =
--- function(done, all, text) }. Returns it, and by direction the mean relative error of the prices over the probes. Collective.
function M.topology(args)
  local group, tell, seconds = args.group, args.tell or function() end, args.seconds or 20
  local n, host = group:size(), group.local_size
  local far = n > host
  if far and n % host ~= 0 then peri.ffi.fail(("calibrate: %d ranks on hosts of %d, wanted as many on each"):format(n, host)) end
  local turns = 7
  local t = { world_size = n, local_world_size = host, processors = math.min(launcher.cpus(), 2 ^ 20), rates = {}, choices = args.choices,
    ddr_cap = math.floor(memory(group)), cache_bytes = cache_bytes() }
  tell(0, 1, "copies and products")
  t.rates.copy, t.rates.products = copy_rate(group, turns), product_rate(group, turns)
  local intra, cross = peri.dist.comm.intra_and_cross_node_pg { group = group }
  tell(0, 1, "exchanges")
  if host > 1 then t.intra_host_bw, t.intra_host_latency = exchange(group, intra, turns, 2 ^ 20) end
  if far then t.inter_host_bw, t.inter_host_latency = exchange(group, cross, turns, 2 ^ 20) end
  local found = prices(t, group, seconds, tell)
  local costs = found.costs
  t.costs, t.cache_bytes = costs, found.cache_bytes
  local bytes_ahead, bytes_back = costs.forward.id_byte + costs.forward.cold_id_byte, costs.backward.id_byte + costs.backward.cold_id_byte
  t.rates.gather, t.rates.update = 1 / math.max(bytes_ahead, 1e-12), 1 / math.max(bytes_back, 1e-12)
  t.ddr_mem_bw = t.rates.gather
  -- one topology on all ranks: that of rank 0
  local made = peri.dist.collective_utils.invoke_on_rank_and_broadcast_result(group, 0, function() return t end)
  return plan.Topology(made), found.off
end

-- -- the command -----------------------------------------------------------------------------------------------------------------------

local function report(topology, off, print_line)
  local function rate(bytes_per_ms) return ("%.3g GB/s"):format(bytes_per_ms / 1e6) end
  local r, t = topology.rates, topology
  local rows = { { "copies", rate(r.copy) }, { "rows looked up", rate(r.gather) }, { "rows updated", rate(r.update) },
    { "products", ("%.3g GFLOP/s"):format(r.products / 1e6) } }
  if t.local_world_size > 1 then
    rows[#rows + 1] = { "exchanges within a host", ("%s, %.3g ms"):format(rate(t.intra_host_bw), t.intra_host_latency) }
  end
  if t.world_size > t.local_world_size then
    rows[#rows + 1] = { "exchanges across hosts", ("%s, %.3g ms"):format(rate(t.inter_host_bw), t.inter_host_latency) }
  end
  print_line(("%d %s, %d a host; of each, while all are busy:"):format(t.world_size, t.world_size == 1 and "rank" or "ranks",
    t.local_world_size))
  for _, row in ipairs(rows) do print_line(("  %-26s %s"):format(row[1], row[2])) end
  print_line(("  %-26s %.0f %% off forward, %.0f %% backward, in the mean over %d steps"):format("prices of a step", 100 * off.forward,
    100 * off.backward, #probes))
end

--- Measure, print and keep: a rank's part of `perilune calibrate`. options: output = path or nil, seconds =, choices = name -> way.
function M.run(options)
  local world = peri.init()
  local first = world:rank() == 0
  local live = first and (os.getenv "PERI_PROGRESS" or (os.execute "test -t 1" == 0 and "live" or "lines")) == "live"
  local path = options.output or plan.Topology.kept_path(world:size(), world.local_size)
  if not path then peri.ffi.fail "calibrate: no folder for what is measured (PERI_TUNE=off, or no home); give --output" end
  peri.dist.collective_utils.invoke_on_rank_and_broadcast_result(world, 0, function() -- a file that cannot be, before all the work
    local file, why = io.open(path, "ab")
    if not file then peri.ffi.fail("calibrate: --output " .. why) end
    file:close()
  end)
  local function tell(done, all, text)
    if not live then return end
    local full = math.floor(24 * done / all)
    io.stdout:write("\r[", ("#"):rep(full), ("."):rep(24 - full), "] ", text, "\27[K")
    io.stdout:flush()
  end
  local topology, off = M.topology { group = world, choices = options.choices, seconds = options.seconds, tell = tell }
  if not first then return end
  if live then io.stdout:write "\r\27[K" end
  report(topology, off, print)
  topology:save(path)
  print("kept in " .. path)
end

return M
