-- plan/amounts.lua: how much of each unit (topology.lua) a step has, of counts of its ranks (counts.lua): what the
-- slowest rank has, what caches have not, what is on links.
local util = require "perilune.util"

local M = {}

-- of the rows that a rank returns: as looked up, as they arrive, as they leave for the model; of a replica: weights,
-- its gradient, what arrives of it
local COPIES = 3

local ways = require("perilune.plan.sharding_types").ways

--- Units that are sums over the shards of a rank, as they are counted.
M.counted = { "table", "id", "id_byte", "row", "shared_row", "shared_id", "odd_id", "odd_row", "cut_id", "cut_bag",
  "bag", "bag_byte", "replica_byte", "state_row", "state_byte" }

--- Those that only updates have; and by direction what ranks have of a kind in one direction only.
local updates = { "state_row", "state_byte", "cold_state_byte" }
local way_of = { id_byte = "forward", grad_byte = "backward" }
for _, unit in ipairs(updates) do way_of[unit] = "backward" end

--- Share of so many bytes, met at random, that no cache has.
function M.cold_share(bytes, cache) return bytes > cache and 1 - cache / bytes or 0 end

--- The same of bytes that are gone through from end to end, again and again: what is met next has been away longest. A
--- line survives m bytes' worth of misses with the probability exp(-m bytes / cache), where misses drive out lines at
--- random.
local function cold_share_in_turn(bytes, cache)
  if bytes <= cache then return 0 end
  local m, x = 1, bytes / cache
  for _ = 1, 60 do -- Newton's, from above
    local alive = math.exp(-m * x)
    local less = (m - 1 + alive) / (1 - x * alive)
    m = m - less
    if less < 1e-9 then break end
  end
  return m
end

--- share(bytes, cache), where the bytes are the sum of f(rank) over the ranks of a host, whose caches are theirs
--- together: a list.
local function cold_shares(ranks, topology, share, f)
  local shares, L = {}, topology.local_world_size
  for first = 1, #ranks, L do
    local bytes, last = 0, math.min(first + L - 1, #ranks)
    for r = first, last do bytes = bytes + f(ranks[r]) end
    local of_host = share(bytes, topology.cache_bytes)
    for r = first, last do shares[r] = of_host end
  end
  return shares
end

--- The largest of a list by rank; of ranks that share their host's processors: what the processor that has most to do
--- has, where the next rank in order of size goes to the one that has least (three ranks with as much to do take two
--- turns of two processors, not one and a half).
function M.busiest(list, topology)
  local most, n, L, P = 0, #list, topology.local_world_size * topology.hosts_sharing, topology.processors
  for first = 1, n, L do
    local last = math.min(first + L - 1, n)
    local alike = n < L and math.floor(L / n) or 1 -- hosts of which only one is here
    if (last - first + 1) * alike <= P then
      for r = first, last do most = math.max(most, list[r]) end
    else
      local sorted, on = {}, {}
      for r = first, last do
        for _ = 1, alike do sorted[#sorted + 1] = list[r] end
      end
      table.sort(sorted, function(x, y) return x > y end)
      for p = 1, P do on[p] = 0 end
      for _, x in ipairs(sorted) do
        local least = 1
        for p = 2, P do
          if on[p] < on[least] then least = p end
        end
        on[least] = on[least] + x
      end
      for p = 1, P do most = math.max(most, on[p]) end
    end
  end
  return most
end

--- Milliseconds of bytes that leave ranks for others of their host (`field`), and that arrive, evenly, at all: the
--- larger counts.
local function near_ms(ranks, topology, field)
  local most, sum = 0, 0
  for _, c in ipairs(ranks) do most, sum = math.max(most, c[field]), sum + c[field] end
  return math.max(most, sum / #ranks) / topology.intra_host_bw
end

--- Milliseconds of the fullest links with what is summed within hosts first; and milliseconds by which rows would
--- travel longer if those of one kind of exchanges waited for those of another: what the fullest links of all kinds
--- take together, less what the fullest link does.
local function far_ms(ranks, topology)
  local L, longest, apart, all, of_sums = topology.local_world_size, 0, 0, {}, 0
  if #ranks <= L then return 0, 0 end
  for _, way in ipairs(ways) do
    local most, field = 0, "far_" .. way
    for first = 1, #ranks, L do
      local bytes = 0
      for r = first, math.min(first + L - 1, #ranks) do bytes = bytes + ranks[r][field] end
      all[first] = (all[first] or 0) + bytes
      most, longest = math.max(most, bytes), math.max(longest, all[first])
    end
    apart, of_sums = apart + most, way == "host_sums" and most or of_sums
  end
  local bandwidth = topology.inter_host_bw * L
  return of_sums / bandwidth, (apart - longest) / bandwidth
end

local function of_tables(c) return c.bytes + c.state_bytes + COPIES * c.bag_byte end
local function of_bags(c) return c.row_byte + COPIES * c.bag_byte end
local function of_replicas(c) return COPIES * c.replica_byte end

--- Sum of a field over all ranks.
local function sum_of(ranks, field)
  local sum = 0
  for r = 1, #ranks do sum = sum + ranks[r][field] end
  return sum
end

--- Units of a step of these ranks, by direction, but far: { forward = { step = 1, ... }, backward = ..., own = of what
--- ranks do each for itself, a list of { unit =, [r] = of rank r - 1, way = the only direction it is in, or nil } }.
--- kept: a table whose lists are filled again (until the next call with it), of one who rates many plans on as many
--- ranks; nil: new ones.
function M.amounts_of_ranks(ranks, topology, kept)
  local shared = math.max(1, math.min(topology.local_world_size, #ranks) * topology.hosts_sharing / topology.processors)
  local each = shared / #ranks -- what is as much on every rank
  local amounts = { step = 1, home_id = sum_of(ranks, "id") * each, home_bag = sum_of(ranks, "home_bag") * each,
    home_bag_byte = sum_of(ranks, "home_bag_byte") * each, way = 0 }
  for _, way in ipairs(ways) do amounts.way = amounts.way + (#ranks > 1 and sum_of(ranks, way) > 0 and 1 or 0) end
  local own = {}
  --- A list for a unit: of each rank the field, times its factor in another list. Returns the busiest rank's.
  local function list_of(unit, field, factors, key)
    local list = kept and kept[key] or { unit = unit, way = way_of[key] }
    if kept then kept[key] = list end
    for r = 1, #ranks do list[r] = ranks[r][field] * (factors and factors[r] or 1) end
    own[#own + 1] = list
    return M.busiest(list, topology)
  end
  local function of_ranks(unit, field, factors) amounts[unit] = list_of(unit, field, factors, unit) end
  for _, name in ipairs(M.counted) do of_ranks(name, name) end
  --- Shares that a processor's own cache has not: ranks that take turns on it drive out each other's.
  local function of_core(share, f)
    local shares = {}
    for r = 1, #ranks do shares[r] = share(f(ranks[r]) * shared, topology.core_cache_bytes) end
    return shares
  end
  of_ranks("mid_row_byte", "row_byte", of_core(M.cold_share, of_tables))
  of_ranks("mid_bag_byte", "bag_byte", of_core(cold_share_in_turn, of_bags))
  local rows = cold_shares(ranks, topology, M.cold_share, of_tables)
  of_ranks("cold_row", "row", rows)
  of_ranks("cold_row_byte", "row_byte", rows)
  of_ranks("cold_state_byte", "state_line_byte", rows)
  of_ranks("cold_bag_byte", "bag_byte", cold_shares(ranks, topology, cold_share_in_turn, of_bags))
  of_ranks("cold_replica_byte", "replica_byte", cold_shares(ranks, topology, cold_share_in_turn, of_replicas))
  amounts.far_sums, amounts.far_mixed = far_ms(ranks, topology)
  local all = { forward = amounts, backward = util.copy(amounts), own = own }
  all.backward.id_byte = list_of("id_byte", "grad_byte", nil, "grad_byte") -- gradients are f32, whatever rows are
  for _, unit in ipairs(updates) do amounts[unit] = 0 end
  amounts.near = near_ms(ranks, topology, "near_out") + near_ms(ranks, topology, "near_ids")
  all.backward.near = near_ms(ranks, topology, "near_back")
  return all
end

return M
