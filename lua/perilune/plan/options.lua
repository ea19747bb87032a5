-- plan/options.lua: one way to shard one table (TorchRec's ShardingOption), and how each way cuts tables.
--
-- A table on hundreds of ranks has hundreds of shards of two or three sizes. An option keeps them as `runs`: equal
-- shards that follow one another, with what one of them costs.
local P = require "perilune.ffi"
local util = require "perilune.util"
local signature = require "perilune.signature"
require "perilune.plan.topology"
local sharding_types = require "perilune.plan.sharding_types"
local constraints_of = require "perilune.plan.constraints"
local data_bytes = constraints_of.data_bytes

local M = {}

signature.kind("sharding_type", "the name of a sharding type", function(x)
  return type(x) == "string" and sharding_types.of[x] ~= nil
end)
signature.object("storage", "bytes of a shard: { hbm =, ddr =, ssd = }",
  { hbm = "number", ddr = "number", ssd = "number" })
local parts = { fwd_compute = "number", bwd_compute = "number", fwd_comms = "number", bwd_comms = "number",
  prefetch_compute = "number" }
signature.object("parts", "the parts of a shard's time", parts)
local times = util.copy(parts)
times.total = "number"
signature.object("times", "times of a shard, as an estimator makes them", times)
signature.object("run", "a run of shards", { n = "count", rows = "count", cols = "count", row_offset = "count",
  col_offset = "count", storage = "storage?", perf = "times?" })

local MIN_COLUMNS = 128 -- of a block of columns, unless a constraint says another number

--- Columns of a block: the least number from `least` on that divides `dim` and is a multiple of 4; dim if there is
--- none.
function M.block_columns(dim, least)
  for columns = least or MIN_COLUMNS, dim - 1 do
    if dim % columns == 0 and columns % 4 == 0 then return columns end
  end
  return dim
end

--- Runs of rows over n shards, as even as blocks of ceil(rows / n) are; appended to `runs`.
local function cut_rows(runs, rows, n, cols, col_offset)
  local block = math.ceil(rows / n)
  local full = math.floor(rows / block)
  local rest = rows - full * block
  local function add(count, size, offset)
    if count > 0 then
      runs[#runs + 1] = { n = count, rows = size, cols = cols, row_offset = offset, col_offset = col_offset }
    end
  end
  add(full, block, 0)
  add(rest > 0 and 1 or 0, rest, full * block)
  add(n - full - (rest > 0 and 1 or 0), 0, rows)
end

--- Blocks of rows in proportion to memory (bytes of each rank).
local function cut_rows_by_memory(runs, rows, memory, cols)
  local total, at = 0, 0
  for _, bytes in ipairs(memory) do total = total + bytes end
  for r, bytes in ipairs(memory) do
    local size = r == #memory and rows - at or math.floor(rows * bytes / total)
    runs[#runs + 1] = { n = 1, rows = size, cols = cols, row_offset = at, col_offset = 0 }
    at = at + size
  end
end

--- The runs of a table of `rows` x `dim` under a sharding type. They have n, rows, cols, row_offset, col_offset (of the
--- first shard).
function M.runs(sharding_type, rows, dim, topology, min_partition)
  local t, runs = sharding_types.of[sharding_type], {}
  local columns = t.cuts_columns and M.block_columns(dim, min_partition) or dim
  if not t.cuts_rows then
    return { { n = t.replica and topology.world_size or dim / columns, rows = rows, cols = columns, row_offset = 0,
      col_offset = 0 } }
  end
  local custom = not t.in_node and topology.custom_topology_data
  local memory = custom and custom[topology:own_tier() .. "_cap"]
  if memory then cut_rows_by_memory(runs, rows, memory, dim)
  else
    local n = sharding_types.row_parts(sharding_type, topology.world_size, topology.intra_group_size)
    for offset = 0, dim - columns, columns do cut_rows(runs, rows, n, columns, offset) end
  end
  return runs
end

-- -- options ----------------------------------------------------------------------------------------------------------

--- Fields: id (position in the search space), path, name, fqn, rows, dim, data_type, sharding_type, compute_kernel,
--- partition_by, runs, num_shards, input_lengths, num_poolings, batch_sizes (a number for each feature), is_pooled,
--- is_weighted, cache_params or nil, output_dtype or nil, optimizer or nil, fused_params (of the table's collection) or
--- nil, map (its managed-collision module, if it has raw ids) or nil. Estimators fill run.storage = { hbm =, ddr =,
--- ssd = } (bytes of one shard) and run.perf (ms of one shard: fwd_compute, fwd_comms, bwd_compute, bwd_comms,
--- prefetch_compute, input_dist_comms, total).
local ShardingOption = util.class "ShardingOption"
M.ShardingOption = ShardingOption

--- What the functions of planners read of an option.
local fields_of = { path = "string", name = "string", rows = "count", dim = "count", data_type = "string?",
  sharding_type = "string", compute_kernel = "string", runs = "list", input_lengths = "numbers?",
  num_poolings = "numbers?", batch_sizes = "numbers?", cache_params = "table?", output_dtype = "string?" }

local names_of = util.keys(fields_of)

function ShardingOption:init(fields)
  signature.value("ShardingOption", "fields", fields, "table")
  for _, name in ipairs(names_of) do
    local kind = fields_of[name]
    local needed = kind:find "?$" == nil
    if needed or fields[name] ~= nil then
      signature.value("ShardingOption", name, fields[name], (kind:gsub("%?$", "")))
    end
  end
  if not sharding_types.of[fields.sharding_type] then
    util.one_of("ShardingOption", "sharding_type", fields.sharding_type, util.keys(sharding_types.of))
  end
  for _, name in ipairs { "data_type", "output_dtype" } do
    if fields[name] and not data_bytes[fields[name]] then
      util.one_of("ShardingOption", name, fields[name], util.keys(data_bytes))
    end
  end
  for i, run in ipairs(fields.runs) do signature.value("ShardingOption", ("runs[%d]"):format(i), run, "run") end
  for _, name in ipairs { "num_poolings", "batch_sizes" } do
    local n, lengths = #(fields[name] or {}), #(fields.input_lengths or {})
    if n ~= lengths then
      P.fail(("ShardingOption: %d %s, wanted one for each of %d input_lengths"):format(n, name, lengths))
    end
  end
  for name, value in util.ordered(fields) do self[name] = value end
  self.fqn = constraints_of.fqn(self.path, self.name)
  self.partition_by = sharding_types.of[self.sharding_type].partition_by
  self.num_shards = 0
  for _, run in ipairs(self.runs) do self.num_shards = self.num_shards + run.n end
end

--- Once storage is known: bytes of all shards (total_storage) and of the largest (max_storage).
function ShardingOption:sum_storage()
  local total, most = { hbm = 0, ddr = 0, ssd = 0 }, { hbm = 0, ddr = 0, ssd = 0 }
  for _, run in ipairs(self.runs) do
    for tier, bytes in util.ordered(run.storage) do
      total[tier], most[tier] = total[tier] + run.n * bytes, math.max(most[tier], bytes)
    end
  end
  self.total_storage, self.max_storage = total, most
end

--- Once times are known: milliseconds of all shards added up (total_perf) and of the slowest (max_perf).
function ShardingOption:sum_perf()
  local total, most = 0, 0
  for _, run in ipairs(self.runs) do
    for _ = 1, run.n do total = total + run.perf.total end
    most = math.max(most, run.perf.total)
  end
  self.total_perf, self.max_perf = total, most
end

--- The shards, one by one: a list of { rows =, cols =, row_offset =, col_offset =, storage =, perf = }.
function ShardingOption:shards()
  local list, t = {}, sharding_types.of[self.sharding_type]
  local columns = t.cuts_columns and not t.cuts_rows
  for _, run in ipairs(self.runs) do
    for k = 0, run.n - 1 do
      list[#list + 1] = { rows = run.rows, cols = run.cols, storage = run.storage, perf = run.perf,
        row_offset = run.row_offset + (t.cuts_rows and k * run.rows or 0),
        col_offset = run.col_offset + (columns and k * run.cols or 0) }
    end
  end
  return list
end

--- Kinds of options: any, those of which an estimator knows the bytes, and those of which one knows the times.
signature.kind("ShardingOption", "a ShardingOption", ShardingOption.is)
signature.kind("option_with_ids", "a ShardingOption that knows its ids and its data_type", function(x)
  return ShardingOption.is(x) and x.input_lengths ~= nil and x.data_type ~= nil
end)
signature.list_of("options_with_ids", "a list of ShardingOptions that know their ids and data_types", "option_with_ids")
for kind, field in util.ordered { stored_option = "storage", timed_option = "perf" } do
  signature.kind(kind, ("a ShardingOption whose runs have their %s"):format(field), function(x)
    if not ShardingOption.is(x) then return false end
    for _, run in ipairs(x.runs) do
      if run[field] == nil then return false end
    end
    return true
  end)
end
signature.check("ShardingOption:", ShardingOption,
  { sum_storage = "self: stored_option", sum_perf = "self: timed_option", shards = "self: ShardingOption" })

function ShardingOption:__tostring() return ("%s %s %s"):format(self.fqn, self.sharding_type, self.compute_kernel) end
signature.check("plan.options.", M, {
  runs = "sharding_type: sharding_type, rows: count, dim: int, topology: Topology, min_partition: count?",
  block_columns = "dim: int, least: count?" })

return M
