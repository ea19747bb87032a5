-- plan/automatic.lua: the plan of a model that comes without one.
--
-- What is learned must not depend on the number of ranks, so first those ways are tried that leave every bit as it is:
-- whole tables, and blocks of columns where an optimizer treats each number by itself. Only a model that does not fit
-- so gets its rows cut.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local sharding_types = require "perilune.plan.sharding_types"
local signature = require "perilune.signature"
local describe = require "perilune.plan.describe"
local topologies = require "perilune.plan.topology"
local planners = require "perilune.plan.planner"
local constraints_of = require "perilune.plan.constraints"
local reservations = require "perilune.plan.reservations"
local json = require "perilune.plan.json"
local types_of = require "perilune.plan.types"
local collective_utils = require "perilune.dist.collective_utils"

local M = {}

local MOST_PLACED = 2e6 -- shards that the search places: a second or so
local SPARE = 0.1       -- share of memory that is left to others

--- fused_params of which each number of a row goes its own way.
local by_number = { optimizer = { sgd = true, exact_sgd = true, adagrad = true, adam = true, lion = true, none = true },
  learning_rate = true, eps = true, beta1 = true, beta2 = true, weight_decay = true }

local function each_number_alone(params)
  for name, value in util.ordered(params or {}) do
    local known = by_number[name]
    if not known or type(known) == "table" and not known[value] then return false end
  end
  return true
end

--- All fused_params of a described collection.
local function params_of(described)
  local list = { described.fused_params }
  for _, own in util.ordered(described.table_fused_params or {}) do list[#list + 1] = own end
  return list
end

--- Types that keep the numbers of an unsharded collection, bit for bit; and all that planners offer.
local exact = sharding_types.names(function(t) return not (t.replica or t.cuts_rows) end)
local all = sharding_types.names(function(t) return not (t.replica or t.asked_for) end)
for _, name in ipairs(sharding_types.names(function(t) return t.replica end)) do all[#all + 1] = name end

--- What planners may do with a collection: of `types` those that its sharder offers. Who trains the tables stays:
--- their fused_params (described: what is known of it, these too), or the optimizer of the dense part, which may look
--- at whole rows.
local function sharder_of(c, described, types, device, plain)
  local names = c.sharder:sharding_types(device)
  local offered = util.index_of(signature.value(c.sharder.class_name, "what sharding_types returns", names, "strings"))
  local list, cuts_columns = {}, not described.dense
  for _, params in ipairs(params_of(described)) do cuts_columns = cuts_columns and each_number_alone(params) end
  for _, name in ipairs(types) do
    local columns = sharding_types.of[name].cuts_columns
    if offered[name] and (plain or not columns or cuts_columns) then
      list[#list + 1] = name
    end
  end
  return { sharding_types = function() return list end, compute_kernels = function()
    return { described.dense and "dense" or "fused" }
  end }
end

--- Bytes of this host's memory for each of its ranks; more than there are where tables lie in files.
local function memory(collections, local_size)
  for _, c in ipairs(collections) do
    for _, params in ipairs(params_of(describe._of(c))) do
      if params.cache_params then return 2 ^ 50 end
    end
  end
  return math.min(2 ^ 50, math.floor(P.host_memory() / local_size))
end

--- Ranks of a host, if all have as many, one after the other; else all.
local function host_size(env)
  local n = env.local_size
  for rank, node in ipairs(env.nodes) do
    if node ~= env.nodes[math.floor((rank - 1) / n) * n + 1] then return env.world_size end
  end
  return env.world_size % n == 0 and n or env.world_size
end

local said = {}

--- Tell the user once what a plan that nobody asked for makes of what was measured.
local function say(text)
  if not said[text] then io.stderr:write("perilune: ", text, "\n") end
  said[text] = true
end

--- The measured topology (perilune calibrate) of so many ranks (device: of their GPUs), if this user has one that can
--- be read. One of other threads is still of this machine: its prices tell tables apart better than those of another
--- processor.
local function measured(n, host, device)
  local ok, kept = pcall(topologies.Topology.kept, n, host, device)
  if not ok then
    say(("plans go by default prices: %s"):format(type(kept) == "table" and kept.message or tostring(kept)))
    return nil
  end
  local threads = P.C.peri_threads()
  if kept and kept.threads and kept.threads ~= threads then
    say(("plans go by prices that were measured with %d worker threads a rank, here %s %d: perilune calibrate -n %d "
      .. "-t %d measures those")
      :format(kept.threads, threads == 1 and "is" or "are", threads, n, threads))
  end
  return kept
end

--- Bytes that are left on a device for tables of its ranks.
local function device_memory(device)
  local bytes = ffi.new "int64_t[1]"
  P.check(P.C.peri_device_memory(P.device(device or nil), bytes))
  return tonumber(bytes[0])
end

--- The kind of a device: a name, a handle, or none (the default one).
local function kind_of(device)
  device = device or P.state.device
  return topologies.device_kind(type(device) == "string" and device or ffi.string(P.C.peri_device_name(device)))
end

--- The topology of the ranks of env, whose tables are on @device (a name; nil: the default one): the measured one, or
--- one with default prices: those of an H100 for GPUs.
function M.topology(env, collections, device)
  local n, host = env.world_size, host_size(env)
  if kind_of(device) == "cuda" then
    local kept = measured(n, host, "cuda")
    if kept then return kept end
    return topologies.Topology.preset("h100", { world_size = n, local_world_size = host,
      hbm_cap = device_memory(device), ddr_cap = memory(collections, host) })
  end
  return measured(n, host) or topologies.Topology { world_size = n, local_world_size = host,
    ddr_cap = memory(collections, host), intra_host_bw = 4e6, inter_host_bw = 1e6 }
end

local function planned(collections, topology, types, device, plain)
  if #collections == 0 then return types_of.ShardingPlan {} end
  local model, constraints = {}, {}
  for i, c in ipairs(collections) do
    model[i] = describe._of(c)
    model[i].sharder = sharder_of(c, model[i], types, device, plain)
    for _, t in ipairs(c.tables) do
      constraints[constraints_of.fqn(c.path, t.name)] = constraints_of.ParameterConstraints {
        sharding_types = model[i].sharder:sharding_types() }
    end
  end
  local planner = planners.EmbeddingShardingPlanner { topology = topology, estimates = "step",
    constraints = constraints,
    storage_reservation = reservations.FixedPercentageStorageReservation { percentage = SPARE,
      tiers = { topology:own_tier() } },
    max_placements = MOST_PLACED }
  return planner:plan(model)
end

--- The plan of collections (list of { path =, module =, tables =, sharder = }) on the ranks of env. Local.
function M.plan_collections(collections, env, device)
  local topology = M.topology(env, collections, device)
  local ok, plan = pcall(planned, collections, topology, exact, device, false)
  if ok then return plan end
  local full = type(plan) == "table" and tostring(plan.message):find("proposals fits", 1, true)
  if not full then error(plan, 0) end
  return planned(collections, topology, all, device, true)
end

--- The same plan on all ranks of env: rank 0's. Collective; waits.
function M.collective(collections, env, device)
  if not env.pg then return M.plan_collections(collections, env, device) end
  local text = collective_utils.invoke_on_rank_and_broadcast_result(env.pg, 0, function()
    return json.to_json(M.plan_collections(collections, env, device))
  end)
  return json.from_json(text)
end

return M
