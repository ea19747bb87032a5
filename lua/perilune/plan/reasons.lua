-- plan/reasons.lua: why a plan is what it is: for each table, what became of every other option; and, where nothing fits, the smallest
-- change with which something does. Every reason is a plan that was tried.
local util = require "perilune.util"
local partitioners = require "perilune.plan.partitioners"
local topologies = require "perilune.plan.topology"
local types = require "perilune.plan.types"

local M = {}

local function gib(bytes) return bytes >= 2 ^ 30 / 100 and ("%.2f GiB"):format(bytes / 2 ^ 30) or ("%.2f MiB"):format(bytes / 2 ^ 20) end
M.gib = gib
local function ms(x) return ("%.4g ms"):format(x) end

local function list_of(names) return #names > 0 and table.concat(names, ", ") or "none" end

--- The rank that has most to do, and how long that takes.
local function slowest(proposal, placement, world_size)
  local times = partitioners.by_rank(proposal, placement, world_size, function(run) return run.perf.total end)
  local at = 1
  for r, x in ipairs(times) do
    if x > times[at] then at = r end
  end
  return at - 1, times[at]
end

--- Words for a placement that failed: see partitioners.lua and the planner's too_large. topology: what the planner could use.
function M.failure(why, topology)
  if why.bytes then return ("all shards together take %s (%s), all ranks have %s"):format(gib(why.bytes), why.tier, gib(why.room)) end
  local option = why.option
  if why.count then
    return ("table '%s' (%s) has %d shards, wanted one for each of %d ranks"):format(option.fqn, option.sharding_type, option.num_shards,
      why.count)
  end
  local tier, most = nil, {}
  for _, name in ipairs(topologies.tiers) do
    local least = math.huge
    for _, device in ipairs(topology.devices) do least = math.min(least, device[name]) end
    most[name] = least
    if why.run.storage[name] > least then tier = tier or name end
  end
  tier = tier or topology:own_tier()
  local where = "no rank"
  if why.ranks and #why.ranks == 1 then where = ("rank %d"):format(why.ranks[1]) end
  return ("a shard of table '%s' (%s, %s) takes %s (%s), and %s has that left of its %s"):format(option.fqn, option.sharding_type,
    option.compute_kernel, gib(why.run.storage[tier]), tier, where, gib(most[tier]))
end

--- What a plan loses or gains by another option for table i. Returns kind ("memory", "time", "equal" or "faster") and words.
local function try_instead(planner, search, i, option)
  local best, proposal = search.best, {}
  for k, o in ipairs(search.best.proposal) do proposal[k] = k == i and option or o end
  local placement, why = planner.partitioner:partition(proposal, search.topology)
  if not placement then return "memory", M.failure(why, search.topology) end
  local rating = planner.performance_model:rate(proposal, placement)
  local rank, time = slowest(proposal, placement, search.topology.world_size)
  if rating > best.rating then
    return "time", ("%s instead of %s (rank %d: %s)"):format(ms(rating), ms(best.rating), rank, ms(time)), rating
  end
  if rating == best.rating then return "equal", ("no faster: %s"):format(ms(rating)), rating end
  return "faster", ("%s instead of %s; the search did not come to it"):format(ms(rating), ms(best.rating)), rating
end

--- The types that a table has no option of, and why.
local function not_offered(planner, collection_of, chosen, present)
  local constraint = require("perilune.plan.constraints").of(planner.constraints, chosen.path, chosen.name)
  local device, out = planner.topology.compute_device, {}
  local collection = collection_of[chosen.path]
  local sharder = collection.sharder or planner.enumerator.sharder
  local offered = util.index_of(sharder:sharding_types(device, collection.kind))
  for _, kind in ipairs(util.keys(types.type_codes)) do
    if not present[kind] then
      local why = "its constraint compute_kernels leaves it none"
      if not offered[kind] then why = ("not offered for %s on a %s"):format(collection.kind, device)
      elseif constraint.sharding_types then why = "constraint: sharding_types = " .. list_of(constraint.sharding_types)
      elseif kind == "grid_shard" then why = "only where a constraint names it" end
      out[#out + 1] = { option = kind, kind = "constraint", text = why }
    end
  end
  return out
end

--- The reasons of a plan: planner:plan(model) was called before. Returns a list, in the plan's order, of { table = fqn, chosen = the
--- option, ranks = of its shards (true: all), others = list of { option = "row_wise fused", kind = "time" | "memory" | "equal" | "faster" |
--- "constraint", text =, rating = } }. most: tables that are looked at (default: all).
function M.of(planner, model, most)
  local search, list, collection_of = planner.last, {}, {}
  for _, collection in ipairs(model) do collection_of[collection.path] = collection end
  local options_of = {}
  for _, option in ipairs(search.space) do
    options_of[option.fqn] = options_of[option.fqn] or {}
    table.insert(options_of[option.fqn], option)
  end
  for i, chosen in ipairs(search.best.proposal) do
    if i > (most or math.huge) then break end
    local entry = { table = chosen.fqn, chosen = chosen, ranks = search.best.placement[i], others = {} }
    local present = {}
    for _, option in ipairs(options_of[chosen.fqn]) do
      present[option.sharding_type] = true
      if option ~= chosen then
        local kind, text, rating = try_instead(planner, search, i, option)
        table.insert(entry.others, { option = option.sharding_type .. " " .. option.compute_kernel, kind = kind, text = text,
          rating = rating })
      end
    end
    for _, other in ipairs(not_offered(planner, collection_of, chosen, present)) do table.insert(entry.others, other) end
    list[i] = entry
  end
  return list
end

-- -- what would fit -----------------------------------------------------------------------------------------------------------------------

--- Whether a planner like this one, with other arguments, finds a plan. Its search is kept short.
local function fits(planner, model, changes)
  local args = util.copy(planner.args)
  for key, value in util.ordered(changes) do args[key] = value end
  args.proposers, args.max_placements = nil, math.min(planner.max_placements, 2e6)
  local ok, search = pcall(function() return getmetatable(planner)(args):search(model) end)
  return ok and search.best ~= nil
end

--- The least whole number in (low, high] for which f holds; f(high) does. `near`: stop when the two are so near (a factor).
local function least(low, high, f, near)
  while high - low > 1 and high / low > near do
    local middle = math.floor((low + high) / 2)
    if f(middle) then high = middle else low = middle end
  end
  return high
end

local function doubled(from, most, f)
  local x = from
  while x < most do
    x = x * 2
    if f(x) then return x end
  end
end

--- More memory on every rank: bytes.
local function more_memory(planner, model)
  local t = planner.topology
  local tier = t:own_tier()
  local function with(bytes)
    return fits(planner, model, { topology = t:with_devices(function(device) device[tier] = math.max(device[tier], bytes) end) })
  end
  local now = math.max(t[tier .. "_cap"], 2 ^ 20)
  local enough = doubled(now, now * 2 ^ 20, with)
  return enough and least(enough / 2, enough, with, 1.005), tier
end

--- More hosts, and with them ranks.
local function more_hosts(planner, model)
  local t = planner.topology
  if t.custom_topology_data then return nil end
  local hosts = t.world_size / t.local_world_size
  local function with(n)
    local args = t:arguments()
    args.world_size = n * t.local_world_size
    return fits(planner, model, { topology = topologies.Topology(args) })
  end
  local enough = doubled(hosts, hosts * 64, with)
  return enough and least(enough / 2, enough, with, 1) * t.local_world_size
end

--- A table whose constraints may be lifted.
local function lifted(planner, model)
  for _, collection in ipairs(model) do
    for _, config in ipairs(collection.tables) do
      for _, key in ipairs { collection.path .. "." .. config.name, config.name } do
        local c = planner.constraints[key]
        for _, field in ipairs(c and { "sharding_types", "compute_kernels" } or {}) do
          if c[field] then
            local free = setmetatable(util.copy(c), getmetatable(c))
            free[field] = nil
            local constraints = util.copy(planner.constraints)
            constraints[key] = free
            if fits(planner, model, { constraints = constraints }) then return config.name, field, list_of(c[field]) end
          end
        end
      end
    end
  end
end

--- Words for the smallest changes with which a plan of the model is found; each was tried. nil: none was found, or the planner's parts are
--- the user's own and know one topology.
function M.would_fit(planner, model)
  if planner.args.enumerator or planner.args.performance_model then return nil end
  local ways = {}
  local bytes, tier = more_memory(planner, model)
  local now = planner.topology[tier .. "_cap"]
  if bytes then ways[#ways + 1] = ("%s (%s) on every rank (%s now)"):format(gib(bytes), tier, gib(now)) end
  local ranks = more_hosts(planner, model)
  if ranks then ways[#ways + 1] = ("%d ranks (%d now)"):format(ranks, planner.topology.world_size) end
  local name, field, list = lifted(planner, model)
  if name then ways[#ways + 1] = ("table '%s' without its %s (%s now)"):format(name, field, list) end
  return #ways > 0 and "it would fit with " .. table.concat(ways, ", or ") or nil
end

return M
