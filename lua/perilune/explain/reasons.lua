-- explain/reasons.lua: why a plan is what it is: for each table, what became of every other option; and, where nothing
-- fits, the smallest change with which something does. Every reason is a plan that was tried.
local P = require "perilune.ffi"
local util = require "perilune.util"
local constraints_of = require "perilune.plan.constraints"
local describe = require "perilune.plan.describe"
local parts = require "perilune.plan.parts"
local partitioners = require "perilune.plan.partitioners"
local proposers = require "perilune.plan.proposers"
local step = require "perilune.plan.step"
local topologies = require "perilune.plan.topology"
local sharding_types = require "perilune.plan.sharding_types"
local signature = require "perilune.signature"

local M = {}

local MOST_PLACEMENTS = 1e7 -- shards placed to find out how much more memory would do
local MOST_SEARCHED = 4e6 -- shards placed in all searches for a change with which a plan fits
-- of worlds for which changes are tried: a search for more ranks takes too long to be one of many
local MOST_RANKS = 2 ^ 14

local function gib(bytes)
  if bytes >= 2 ^ 40 then return ("%.2f TiB"):format(bytes / 2 ^ 40) end
  return bytes >= 2 ^ 30 / 100 and ("%.2f GiB"):format(bytes / 2 ^ 30) or ("%.2f MiB"):format(bytes / 2 ^ 20)
end
M._gib = gib
local function ms(x) return ("%.4g ms"):format(x) end

--- A rating of plans in words, by what they are rated by. A performance model says its unit: "ms" or "bytes"; of others
--- there are numbers.
function M._rated(planner, rating)
  local unit = planner.performance_model.unit
  if unit == "bytes" then return gib(rating) end
  return unit == "ms" and ms(rating) or ("%.6g"):format(rating)
end

--- What a planner found of its plan: a list of { value, of what } in words. A step takes what ranks take together, with
--- caches and links as the step before left them; milliseconds of shards are what each takes by itself, so that they
--- can be more.
function M._ratings(planner)
  local best, model, own = planner.last.best, planner.performance_model, M._rated(planner, planner.last.best.rating)
  if step.StepModel.is(model) then return { { own, "a step" } } end
  local shards = ms(partitioners.NoopPerfModel { topology = planner.topology }:rate(best.proposal, best.placement))
  local list = { { shards, "on the slowest rank" } }
  if not partitioners.NoopPerfModel.is(model) then
    list[2] = { own, planner.args.objective and "by the objective" or "by the performance model" }
  end
  return list
end

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

--- Words for a placement that failed: see partitioners.lua and the planner's too_large. topology: what the planner
--- could use.
function M._failure(why, topology)
  if why.bytes then
    return ("all shards together take %s (%s), all ranks have %s"):format(gib(why.bytes), why.tier, gib(why.room))
  end
  if why.says then return "the partitioner says: " .. why.says end
  local option = why.option
  if not option then P.fail "plan.reasons: why says neither bytes, nor says, nor option" end
  local which = ("table '%s' (%s, %s)"):format(option.fqn, option.sharding_type, option.compute_kernel)
  if why.count then
    return ("%s has %d shards, wanted one for each of %d ranks"):format(which, option.num_shards, why.count)
  end
  if why.group then
    return ("%s takes %s (%s) of a group of %d ranks, and the group that has most left, from rank %d on, has "
      .. "%s"):format(which, gib(option.total_storage[why.tier]), why.tier, why.group, why.rank, gib(why.left))
  end
  local among = why.tried == 1 and "" or (", and so do all %d that it was tried on"):format(why.tried)
  if why.relation then
    return ("a shard of %s may not be on rank %d by the relation '%s'%s"):format(which, why.rank,
      tostring(why.relation), why.tried == 1 and "" or (", nor on any other of %d ranks"):format(why.tried))
  end
  if not why.tier then return ("a shard of %s found no rank%s"):format(which, among) end
  return ("a shard of %s takes %s (%s), and rank %d%s has %s left of its %s"):format(which,
    gib(why.run.storage[why.tier]), why.tier, why.rank, why.tried == 1 and ""
    or (", of %d the one with most,"):format(why.tried), gib(why.left), gib(topology.devices[why.rank + 1][why.tier]))
end

--- A number of bytes that is enough, for people: rounded up.
local function enough_gib(bytes)
  for _, unit in ipairs { { 2 ^ 40, "TiB" }, { 2 ^ 30, "GiB" }, { 2 ^ 20, "MiB" } } do
    if bytes >= unit[1] or unit[1] == 2 ^ 20 then
      return ("%.2f %s"):format(math.ceil(bytes / unit[1] * 100) / 100, unit[2])
    end
  end
end

local MOST_MORE = 2 ^ 50 -- bytes

--- The least bytes for which with(bytes) holds, to half a percent; nil: it does for none.
local function least_more(with)
  local high = 2 ^ 20
  while not with(high) do
    high = high * 4
    if high > MOST_MORE then return nil end
  end
  local low = high == 2 ^ 20 and 0 or high / 4
  while high - low > math.max(high * 0.005, 1) do
    local middle = math.floor((low + high) / 2)
    if with(middle) then high = middle else low = middle end
  end
  return high
end

--- The least memory more on every rank, before what is reserved for others, with which a proposal finds a place: words,
--- or nil. why: what it failed for; budget.left: shards that may be placed to find out.
local function more_would_do(planner, search, model, proposal, why, budget)
  local tier, shards = why.tier, #proposal
  if not tier or budget.left <= 0 then return nil end
  for _, option in ipairs(proposal) do shards = shards + option.num_shards end
  local function placed(more)
    budget.left = budget.left - shards
    local larger = planner.topology:with_devices(function(d)
      for name, bytes in util.ordered(more) do d[name] = d[name] + bytes end
    end)
    local ok, left = pcall(planner.storage_reservation.reserve, planner.storage_reservation, larger, model,
      planner.batch_size, planner.constraints)
    if not ok then return false end
    left.rules = search.topology.rules
    return parts.placement(planner.partitioner, proposal, left) ~= nil
  end
  local bytes = least_more(function(x) return placed { [tier] = x } end)
  if bytes then return ("; it would fit with %s (%s) more on every rank"):format(enough_gib(bytes), tier) end
  local other = tier == "ddr" and planner.topology:own_tier() or "ddr"
  if other == tier or not placed { [tier] = MOST_MORE, [other] = MOST_MORE } then return nil end
  bytes = least_more(function(x) return placed { [tier] = x, [other] = MOST_MORE } end)
  local others = bytes and least_more(function(x) return placed { [tier] = bytes, [other] = x } end)
  return others and ("; it would fit with %s (%s) and %s (%s) more on every rank"):format(enough_gib(bytes), tier,
    enough_gib(others), other)
end

--- What a plan loses or gains by another option for its unit i. Returns kind ("memory", "relation", "count", "other",
--- "time", "equal" or "faster") and words.
local function try_instead(planner, search, model, i, option, budget)
  local best, proposal = search.best, {}
  for k, o in ipairs(best.units) do proposal[k] = k == i and option or o end
  local placement, rating = planner:_instead(search, i, option)
  local placed, its = planner:_place(search, proposal)
  if not placement or placed and its < rating then placement, rating = placed, its end
  if not placement then
    local why = rating
    local kind = why.relation and "relation" or why.tier and "memory" or why.count and "count" or "other"
    return kind, M._failure(why, search.topology) .. (more_would_do(planner, search, model, proposal, why, budget)
      or "")
  end
  local function rated(x) return M._rated(planner, x) end
  local rank, time = slowest(proposal, placement, search.topology.world_size)
  if rating > best.rating then
    return "time", ("%s instead of %s (rank %d: shards of %.4g ms)"):format(rated(rating), rated(best.rating), rank,
      time), rating
  end
  if rating < best.rating and planner:score(rating, proposal) >= best.score then
    return "equal", ("%s instead of %s, with a sharding type more"):format(rated(rating), rated(best.rating)), rating
  end
  if rating == best.rating then return "equal", ("no faster: %s"):format(rated(rating)), rating end
  return "faster", ("%s instead of %s; the search did not come to it"):format(rated(rating), rated(best.rating)), rating
end

--- The options that tables of a unit have not, and why: what their constraints leave out, and what is not offered at
--- all.
local function not_offered(planner, collection_of, chosen, present)
  local constraint = require("perilune.plan.constraints").for_table(planner.constraints, chosen.path, chosen.name)
  local device, out = planner.topology.compute_device, {}
  local collection = collection_of[chosen.path]
  local sharder = collection.sharder or planner.enumerator.sharder
  local offered = util.index_of(sharder:sharding_types(device, collection.kind))
  local forbidden = {} -- by the runtime, with this optimizer
  local function say(option, text) out[#out + 1] = { option = option, kind = "constraint", text = text } end
  local enumerator = planner.enumerator
  for _, r in ipairs(enumerator._ways and select(2, enumerator:_ways(collection, chosen, constraint)) or {}) do
    forbidden[r.way], forbidden[r.way:match "%S+"] = true, true
    out[#out + 1] = { option = r.way, kind = "optimizer", text = r.text }
  end
  for _, kind in ipairs(util.keys(sharding_types.of)) do
    if not present[kind] and not forbidden[kind] then
      if not offered[kind] then say(kind, ("not offered for %s on a %s"):format(collection.kind, device))
      elseif constraint.sharding_types then say(kind, "constraint: sharding_types = "
        .. list_of(constraint.sharding_types))
      elseif sharding_types.of[kind].asked_for then say(kind, "only where a constraint names it")
      else say(kind, "its constraint compute_kernels leaves it none") end
    elseif present[kind] then
      for _, kernel in ipairs(sharder:compute_kernels(kind, device)) do
        if not present[kind .. " " .. kernel] and not forbidden[kind .. " " .. kernel] then
          say(kind .. " " .. kernel, "constraint: compute_kernels = " .. list_of(constraint.compute_kernels or {}))
        end
      end
    end
  end
  return out
end

--- The options of each unit (a table, or co-located ones) by its name, and by table which types and ways it has at all.
local function by_unit(search)
  local options_of, present = {}, {}
  for _, option in ipairs(search.units) do
    options_of[option.fqn] = options_of[option.fqn] or {}
    table.insert(options_of[option.fqn], option)
  end
  for _, option in ipairs(search.space) do
    local ways = present[option.fqn] or {}
    present[option.fqn] = ways
    ways[option.sharding_type], ways[option.sharding_type .. " " .. option.compute_kernel] = true, true
  end
  return options_of, present
end

local function type_kernel(option) return option.sharding_type .. " " .. option.compute_kernel end

--- Why a unit has not its other options: list of { option =, kind =, text =, rating = }.
local function others_of(planner, search, model, i, chosen, options_of, budget)
  local out = {}
  for _, option in ipairs(options_of[chosen.fqn]) do
    if option ~= chosen then
      local kind, text, rating = try_instead(planner, search, model, i, option, budget)
      out[#out + 1] = { option = type_kernel(option), kind = kind, text = text, rating = rating }
    end
  end
  return out
end

--- An error unless the tables of the plan are those of the model.
local function check_planned(search, model)
  local sizes = {}
  for _, c in ipairs(model) do
    for _, t in ipairs(c.tables) do
      sizes[constraints_of.fqn(c.path, t.name)] = { t.num_embeddings, t.embedding_dim }
    end
  end
  for _, o in ipairs(search.best.proposal) do
    local size = sizes[o.fqn]
    if not (size and size[1] == o.rows and size[2] == o.dim) then
      P.fail(("plan.reasons.of: the planner has planned table '%s' of %d x %d, which the model has not; give the "
        .. "model that it has planned")
        :format(o.fqn, o.rows, o.dim))
    end
  end
end

--- The reasons of a plan: planner:plan(model) was called before. Returns a list, in the plan's order, of { table = fqn,
--- or those of co-located tables with + between them, tables = list of fqns, chosen = the option, ranks = of its shards
--- (true: all), others = list of { option = "row_wise fused", kind = "time" | "memory" | "relation" | "count" | "other"
--- | "equal" | "faster" | "constraint" | "optimizer", text =, rating = } }.
--- most: tables that are looked at (default: all).
function M.of(planner, model, most)
  local search, list, collection_of, budget = planner.last, {}, {}, { left = MOST_PLACEMENTS }
  model = describe._model("plan.reasons.of", model)
  for _, collection in ipairs(model) do collection_of[collection.path] = collection end
  check_planned(search, model)
  local options_of, present = by_unit(search)
  for i, chosen in ipairs(search.best.units) do
    if i > (most or math.huge) then break end
    local members = chosen.members or { chosen }
    local entry = { table = chosen.fqn, tables = util.map(members, function(o) return o.fqn end), chosen = chosen,
      ranks = search.best.unit_placement[i], others = others_of(planner, search, model, i, chosen, options_of, budget) }
    local seen = {}
    local function add(other)
      local key = other.option .. other.text
      if not seen[key] then seen[key] = table.insert(entry.others, other) or true end
    end
    for _, member in ipairs(members) do
      for _, r in ipairs(search.refused) do
        if r.option.fqn == member.fqn then add { option = type_kernel(r.option), kind = "relation", text = r.text } end
      end
      for _, other in ipairs(not_offered(planner, collection_of, member, present[member.fqn])) do add(other) end
    end
    list[i] = entry
  end
  return list
end

-- -- what would fit ---------------------------------------------------------------------------------------------------

--- Whether the options that take least of each kind of memory are already too large: then no search finds a plan.
local function hopeless(other, model)
  local ok, topology = pcall(other.storage_reservation.reserve, other.storage_reservation, other.topology, model,
    other.batch_size, other.constraints)
  if not ok then return true end
  local least = {}
  for _, option in ipairs(other.enumerator:enumerate(model)) do
    local l = least[option.fqn] or { hbm = math.huge, ddr = math.huge, ssd = math.huge }
    least[option.fqn] = l
    for _, tier in ipairs(topologies.tiers) do l[tier] = math.min(l[tier], option.total_storage[tier]) end
  end
  for _, tier in ipairs(topologies.tiers) do
    local sum, room = 0, 0
    for _, l in util.ordered(least) do sum = sum + l[tier] end
    for _, device in ipairs(topology.devices) do room = room + device[tier] end
    if sum > room then return true end
  end
  return false
end

--- Whether a planner like this one, with other arguments, finds a plan. Its search is kept short, and all searches of a
--- planner are. same_options: the change leaves the options of tables, and what they cost, as they are.
local function fits(planner, model, changes, same_options)
  -- which options a user's own would have then is not known
  if planner.args.enumerator and not same_options then return false end
  local args = util.copy(planner.args)
  for key, value in util.ordered(changes) do args[key] = value end
  args.max_placements = math.min(planner.max_placements, MOST_SEARCHED / 10, planner.may_search)
  args.proposers = { proposers.LeastMemoryProposer(), proposers.GridSearchProposer(), proposers.GreedyProposer(),
    proposers.GreedyProposer { use_depth = false }, proposers.UniformProposer() }
  if args.max_placements < 1 then return false end
  if same_options and planner.last then -- what options cost does not depend on what there is of memory
    local space = planner.last.space
    args.enumerator, args.cost = { enumerate = function() return space end, sharder = planner.enumerator.sharder,
      populate_estimates = function(_, list) return planner.enumerator:populate_estimates(list) end }, nil
  end
  local other = getmetatable(planner)(args)
  if hopeless(other, model) then return false end
  other.first_will_do = true
  local ok, search = pcall(other.search, other, model)
  planner.may_search = math.floor(planner.may_search - (ok and search.placements or args.max_placements))
  return ok and search.best ~= nil
end

--- The least whole number in (low, high] for which f holds; f(high) does. `near`: stop when the two are so near (a
--- factor).
local function least(low, high, f, near)
  while high - low > 1 and high / low > near do
    local middle = math.floor((low + high) / 2)
    if f(middle) then high = middle else low = middle end
  end
  return high
end

local function first_doubling_that(from, most, f)
  local x = from
  while x < most do
    x = x * 2
    if f(x) then return x end
  end
end

--- Whether at least so many bytes of each kind on every rank would do.
local function does(planner, model, bytes)
  return fits(planner, model, { topology = planner.topology:with_devices(function(device)
    for tier, x in util.ordered(bytes) do device[tier] = math.max(device[tier], x) end
  end) }, true)
end

--- The least memory of a kind on every rank that would do, where some does: bytes. beside: of another kind, bytes that
--- are there too.
local function least_memory(planner, model, tier, beside)
  local function with(x)
    local bytes = util.copy(beside or {})
    bytes[tier] = x
    return does(planner, model, bytes)
  end
  local now = math.max(planner.topology[tier .. "_cap"], 2 ^ 20)
  if beside and with(now) then return now end
  local enough = first_doubling_that(now, now * 2 ^ 20, with)
  return enough and least(enough / 2, enough, with, 1.005)
end

--- Words for the least memory with which a plan is found: of the device's own kind, of the host's, or of both.
local function memory_that_does(planner, model)
  local t = planner.topology
  local own = t:own_tier()
  if not does(planner, model, { [own] = MOST_MORE, ddr = MOST_MORE }) then return nil end
  for _, tier in ipairs { own, "ddr" } do
    local bytes = does(planner, model, { [tier] = MOST_MORE }) and least_memory(planner, model, tier)
    if bytes then return ("%s (%s) on every rank (%s now)"):format(enough_gib(bytes), tier, gib(t[tier .. "_cap"])) end
  end
  local bytes = own ~= "ddr" and least_memory(planner, model, own, { ddr = MOST_MORE })
  local host = bytes and least_memory(planner, model, "ddr", { [own] = bytes })
  return host and ("%s (%s) and %s (ddr) on every rank (%s and %s now)"):format(enough_gib(bytes), own,
    enough_gib(host), gib(t[own .. "_cap"]), gib(t.ddr_cap))
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
  local enough = first_doubling_that(hosts, math.min(hosts * 64, MOST_RANKS / t.local_world_size / 2), with)
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

local MOST_RELATIONS = 3 -- that are named

--- Relations each of which may go: words.
local function without_relation(planner, model)
  local found = {}
  for i, relation in ipairs(planner.relations) do
    local others = util.copy(planner.relations)
    table.remove(others, i)
    if fits(planner, model, { relations = others }, true) then
      found[#found + 1] = ("no relation '%s'"):format(tostring(relation))
    end
    if #found == MOST_RELATIONS then break end
  end
  return found
end

--- Less memory for others: the largest margin in whole percents.
local function smaller_margin(planner, model)
  local r = planner.storage_reservation
  if type(r.percentage) ~= "number" or r.percentage <= 0 then return nil end
  local function with(percent)
    local other = setmetatable(util.copy(r), getmetatable(r))
    other.percentage = percent / 100
    return fits(planner, model, { storage_reservation = other }, true)
  end
  local now = math.ceil(r.percentage * 100)
  if not with(0) then return nil end
  return now - least(0, now, function(n) return with(now - n) end, 1), r.percentage * 100
end

--- Words for the smallest changes with which a plan of the model is found; each was tried. nil: none was found, or the
--- planner's parts are the user's own and know one topology.
function M._would_fit(planner, model)
  if planner.args.enumerator or planner.args.performance_model or planner.topology.world_size > MOST_RANKS then
    return nil
  end
  planner.may_search = MOST_SEARCHED
  local ways = {}
  ways[1] = memory_that_does(planner, model)
  local ranks = more_hosts(planner, model)
  if ranks then ways[#ways + 1] = ("%d ranks (%d now)"):format(ranks, planner.topology.world_size) end
  local percent, before = smaller_margin(planner, model)
  if percent then ways[#ways + 1] = ("a storage reservation of %d %% (%g %% now)"):format(percent, before) end
  local name, field, list = lifted(planner, model)
  if name then ways[#ways + 1] = ("table '%s' without its %s (%s now)"):format(name, field, list) end
  for _, way in ipairs(without_relation(planner, model)) do ways[#ways + 1] = way end
  return #ways > 0 and "it would fit with " .. table.concat(ways, ", or ") or nil
end

signature.kind("planner", "an EmbeddingShardingPlanner", function(x)
  return type(x) == "table" and x.class_name == "EmbeddingShardingPlanner"
end)
signature.kind("planned", "an EmbeddingShardingPlanner that has made a plan (by planner:plan, or on rank 0 of "
  .. "collective_plan)", function(x)
  return signature.is("planner", x) and type(x.last) == "table" and x.last.best ~= nil
end)
signature.object("placement_failure", "why a placement failed (plan/partitioners.lua)",
  { option = "ShardingOption?", run = "run?", bytes = "number?", room = "number?", tier = "string?", count = "number?",
    ranks = "list?", says = "string?" })
signature.check("plan.reasons.", M, { _rated = "planner: planned, rating: number", _ratings = "planner: planned",
  _gib = "bytes: number", _failure = "why: placement_failure, topology: Topology",
  of = "planner: planned, model: any, most: number?", _would_fit = "planner: planner, model: model" })

return M
