-- plan/counts.lua: how much each rank has to do in a step of a plan: ids, bags and bytes of each shard by its rows and
-- columns. A rank's data for itself do not travel ((W - 1)/W), of rows cut within a host one sum crosses the network,
-- ids that come again find their rows in a cache. Steps are priced by it (step.lua), schedules simulated
-- (simulation/traffic.lua).
local ffi = require "ffi"
local P = require "perilune.ffi"
local signature = require "perilune.signature"
local embed = require "perilune.embed.config"
local tbes = require "perilune.embed.tbe"
local sharding_types = require "perilune.plan.sharding_types"
local data_bytes = require("perilune.plan.constraints").data_bytes
local batch_counts = require("perilune.plan.storage").batch_counts
local partitioners = require "perilune.plan.partitioners"
local amounts_of = require "perilune.plan.amounts"
require "perilune.plan.options"
local C = P.C

local M = {}

local WIRE = 4    -- bytes of an id on the wire (shards have fewer than 2^31 rows), of a length
local NUMBER = 4  -- bytes of what is pooled, of a gradient
local LINE = 64   -- bytes that come from memory at once
local USUAL_SHARE = embed.CacheParams({}).load_factor -- of a cache that nobody said anything about

local ways = sharding_types.ways

--- Bytes of the lines that a row of so many bytes touches, on average. Rows of a table lie one behind the other, so
--- they begin at multiples of the largest power of two in their length.
local function in_lines(bytes)
  local step = LINE
  while step > 1 and bytes % step > 0 do step = step / 2 end
  return bytes + LINE - step
end

--- Bytes of a row as it lies in its table: codes have their scale and bias beside them.
local function row_bytes(data_type, cols)
  local coded = embed.row_formats[embed.table_types[data_type]]
  return coded and embed._row_bytes(data_type, cols) or cols * data_bytes[data_type]
end

local NO_STATES = { row = 0, full = 0, square = 0 }
local kept_states = {} -- by optimizer

--- Bytes that an optimizer keeps: for a row, for each of its numbers, for a square of columns, as the library's tables
--- say it; none where nobody has said which optimizer.
local function states_of(optimizer)
  if not optimizer then return NO_STATES end
  local known = kept_states[optimizer]
  if not known then
    known = { row = 0, full = 0, square = 0, scalar = 0 }
    for _, state in ipairs(tbes.states_of(embed.usual_params(optimizer), "FP32")) do
      known[state.geometry] = known[state.geometry] + (state.dtype == "i64" and 8 or 4)
    end
    kept_states[optimizer] = known
  end
  return known
end

--- Of `ids` lookups among `rows` rows: rows that are looked up, those of them that more than one id asks for, and how
--- many ids do. Ids drawn alike from all rows, unless statistics know how many distinct ones there are; those are then
--- taken to be drawn alike from fewer.
local function rows_of(option, ids, rows)
  if ids <= 0 or rows <= 0 then return 0, 0, 0 end
  local stats = option.cache_params and option.cache_params.stats
  local known = stats and stats.expected_lookups and math.min(stats.expected_lookups * rows / math.max(option.rows, 1),
    ids, rows)
  if known and known > 0 and known < rows * (1 - math.exp(-ids / rows)) then
    local low, high = 0, rows
    for _ = 1, 50 do
      rows = (low + high) / 2
      if rows * (1 - math.exp(-ids / rows)) < known then low = rows else high = rows end
    end
  end
  local found, alone = rows * (1 - math.exp(-ids / rows)), ids * math.exp(-ids / rows)
  return found, math.max(0, found - alone), ids - alone
end

--- Milliseconds in which rows of a shard move between its device's memory and what lies below that (the host's; for
--- caches on processors files), in the forward and in the backward pass: mapped rows are read and updated there, with
--- their states; of rows behind a cache those that are missing come, and as many leave.
local function below(option, c, topology, width, updated, states)
  local kernel, apart = option.compute_kernel, topology.compute_device ~= "cpu"
  if kernel == "fused_uvm" and apart then
    local line = in_lines(width)
    return c.row * line / topology.hbm_to_ddr_mem_bw, 2 * updated * (line + states) / topology.hbm_to_ddr_mem_bw
  end
  if kernel ~= "fused_uvm_caching" then return 0, 0 end
  local params = option.cache_params
  local share = params and params.load_factor or USUAL_SHARE
  local missing = params and params.stats and params.stats:expected_miss_rate(share) or 1 - share
  return 2 * missing * c.row * (width + states) / (apart and topology.hbm_to_ddr_mem_bw or topology.ssd_mem_bw), 0
end

--- Bytes that each rank sends to others of its host, and to other hosts, in a reduction of `bytes` on all ranks: parts
--- go to their sums, and sums back to all. Processors do it so among all ranks (runtime/backends/mpi/phases.c); devices
--- within hosts first, then, by as many ranks as a host has, between hosts.
function M.reduction(bytes, topology)
  local W, L = topology.world_size, math.min(topology.local_world_size, topology.world_size)
  if topology.compute_device == "cpu" then return 2 * bytes * (L - 1) / W, 2 * bytes * (W - L) / W end
  return 2 * bytes * (L - 1) / L, 2 * bytes / L * (W - L) / W
end

--- What one shard of a run is to the rank that has it. Fields: as in `units`; grad_byte (bytes of the ids' gradients),
--- row_byte (bytes of rows that are looked up, in lines), bytes (of the shard), below_forward, below_backward (see
--- `below`), home_bag, home_bag_byte (its part of what comes back to all ranks), near_out, far_out: bytes of rows that
--- leave for the same host and for others; near_back, far_back: of gradients; near_ids, far_ids: bytes of ids and
--- lengths that arrive.
function M.count(option, run, topology)
  local t, kind = topology, sharding_types.of[option.sharding_type]
  local W, L, G = t.world_size, t.local_world_size, t.intra_group_size
  local ids, _, bags = batch_counts(option)
  local width = run.cols * data_bytes[option.data_type]
  local c = { table = run.rows * run.cols > 0 and 1 or 0, bytes = run.rows * width, replica_byte = 0, near_out = 0,
    far_out = 0, near_back = 0, far_back = 0, near_ids = 0, far_ids = 0 }
  for _, way in ipairs(ways) do c[way], c["far_" .. way] = 0, 0 end
  c[kind.way] = 1
  if kind.replica then
    c.id, c.bag, c.replica_byte = ids, option.is_pooled and bags or ids, run.rows * run.cols * NUMBER
    c.near_back, c.far_back = M.reduction(c.replica_byte, t) -- gradients only
  else
    local share = option.rows > 0 and run.rows / option.rows or 0
    c.id = ids * W * share
    c.bag = option.is_pooled and bags * W or c.id
    local out = c.bag * run.cols * data_bytes[option.output_dtype or "FP32"] / W -- for each rank
    local by_host = option.is_pooled and kind.way == "host_sums" and W > L
    if by_host then -- sums within the host, then one of them for every sample crosses
      c.near_out, c.far_out = out * W * (G - 1) / G, out * (W - L) / G
    else
      c.near_out, c.far_out = out * (L - 1), out * (W - L)
    end
    c.near_back, c.far_back = c.near_out, c.far_out
    c["far_" .. kind.way] = c.far_out
    local sent = (c.id + bags * W) * WIRE / W
    c.near_ids, c.far_ids = sent * (L - 1), sent * (W - L)
  end
  local whole = option.is_pooled and bags or ids
  local part = option.rows * option.dim > 0 and run.rows * run.cols / (option.rows * option.dim) or 0
  c.home_bag = kind.replica and 0 or whole * part * (W - 1) -- a rank's own are looked up to where they belong
  c.home_bag_byte = c.home_bag * option.dim * NUMBER
  c.id_byte, c.grad_byte, c.bag_byte = c.id * width, c.id * run.cols * NUMBER, c.bag * run.cols * NUMBER
  c.row, c.shared_row, c.shared_id = rows_of(option, c.id, run.rows)
  local common = C.peri_tbe_width_is_common(run.cols)
  c.odd_id, c.odd_row = common and 0 or c.id, common and 0 or c.row
  local cut = kind.cuts_rows and 1 or 0
  c.cut_id, c.cut_bag = cut * c.id, cut * c.bag
  c.row_byte = c.row * in_lines(row_bytes(option.data_type, run.cols))
  local state = states_of(option.optimizer).full * run.cols -- of one for each row, prices of rows know
  local updated = kind.replica and rows_of(option, ids * W, run.rows) or c.row -- of a replica, by all ranks' gradients
  c.state_row, c.state_byte = state > 0 and updated or 0, updated * state
  c.below_forward, c.below_backward = below(option, c, topology, width, updated,
    state + states_of(option.optimizer).row)
  c.state_line_byte, c.state_bytes = updated * (state > 0 and in_lines(state) or 0), run.rows * state
  return c
end

M.summed = { "below_forward", "below_backward", "home_bag", "home_bag_byte", "grad_byte", "row_byte", "bytes",
  "state_line_byte", "state_bytes", "near_out", "far_out", "near_back", "far_back", "near_ids", "far_ids" }
for _, name in ipairs(amounts_of.counted) do M.summed[#M.summed + 1] = name end
for _, name in ipairs(ways) do
  M.summed[#M.summed + 1], M.summed[#M.summed + 2] = name, "far_" .. name
end

--- Counts of a rank that has nothing, and the addition of a shard's: written out field by field, since plans are rated
--- thousands of times. Those of one who rates are structs of C, whose fields lie at known places.
local fields, sums = { "most_ids = 0" }, {} -- most_ids: of a shard
for _, name in ipairs(M.summed) do
  fields[#fields + 1], sums[#sums + 1] = name .. " = 0", ("to.%s = to.%s + c.%s"):format(name, name, name)
end
local empty, add_of = assert(loadstring(([[return function() return { %s } end, function() return function(to, c)
  %s
  if c.id > to.most_ids then to.most_ids = c.id end
end end]]):format(table.concat(fields, ", "), table.concat(sums, " ")), "=counts"))()
local struct = ffi.typeof(("struct { double most_ids, %s; }"):format(table.concat(M.summed, ", ")))
local add, add_structs = add_of(), add_of() -- each sees one kind of counts: its traces are for that

--- Counts that `count` made, as a struct.
function M._struct(c)
  local to = struct()
  add_structs(to, c)
  return to
end

--- Sums of counts by rank. count(option, run): of a shard.
local function sum(proposal, placement, ranks, count, adding)
  for i, option in ipairs(proposal) do
    local where, k = placement[i], 0
    for _, run in ipairs(option.runs) do
      local c = count(option, run)
      for _ = 1, run.n do
        adding(ranks[where == true and k + 1 or where[k + 1] + 1], c)
        k = k + 1
      end
    end
  end
  return ranks
end

--- Counts of a placement: a list from rank 0 on, each with the fields that `count` tells. What travels in a step is
--- counted here only.
function M.by_rank(proposal, placement, topology)
  partitioners.check_placement("plan.step.by_rank", proposal, placement, topology.world_size)
  local ranks = {}
  for r = 1, topology.world_size do ranks[r] = empty() end
  return sum(proposal, placement, ranks, function(option, run) return run.count or M.count(option, run, topology) end,
    add)
end

--- As by_rank, into `kept`, a list of before, of as many ranks, that is filled again: structs.
function M._by_rank_again(proposal, placement, topology, kept)
  partitioners.check_placement("plan.step.by_rank", proposal, placement, topology.world_size)
  for r = 1, topology.world_size do
    if kept[r] then ffi.fill(kept[r], ffi.sizeof(struct)) else kept[r] = struct() end
  end
  return sum(proposal, placement, kept, function(option, run)
    if not run.count then return M._struct(M.count(option, run, topology)) end
    run.counted = run.counted or M._struct(run.count)
    return run.counted
  end, add_structs)
end

signature.check("plan.counts.", M, { count = "option: option_with_ids, run: run, topology: Topology",
  by_rank = "proposal: options_with_ids, placement: table, topology: Topology",
  reduction = "bytes: number, topology: Topology" })

return M
