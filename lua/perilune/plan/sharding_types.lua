-- plan/sharding_types.lua: what each sharding type does to a table, as runtime/plan/types/ says it
-- (peri_sharding_type_facts). Whoever plans, prices, simulates or shards asks here for what it needs to know; nobody
-- asks for a type's name.
--
--   types.of.table_row_wise = { name = "table_row_wise", code = 3, cuts_rows = true, cuts_columns = false, in_node =
--     true, replica = false,
--     partition_by = "host", way = "host_sums", asked_for = false }
local ffi = require "ffi"
local bit = require "bit"
local P = require "perilune.ffi"
local C = P.C

local M = { of = {}, list = {} }

--- What a type asks of placement: "uniform": shard k on rank k; "device": each shard on any rank; "host": all on one
--- group of topology.intra_group_size ranks; "multi_host": a block of columns a group.
local function partition_by(t)
  if t.in_node then return t.cuts_rows and t.cuts_columns and "multi_host" or "host" end
  return (t.replica or t.cuts_rows) and "uniform" or "device"
end

--- By which exchange rows come home, or gradients of replicas are summed.
local function way(t)
  if t.replica then return "replica_sums" end
  return not t.cuts_rows and "whole_rows" or t.in_node and "host_sums" or "rank_sums"
end

--- Kinds of exchanges.
M.ways = { "whole_rows", "rank_sums", "host_sums", "replica_sums" }

for code = 0, C.PERI_SHARDING_TYPE_COUNT - 1 do
  local facts = C.peri_sharding_type_facts(code)
  local function has(fact) return bit.band(facts, fact) ~= 0 end
  local t = { name = ffi.string(C.peri_sharding_type_name(code)), code = code,
    cuts_rows = has(C.PERI_SHARDING_CUTS_ROWS), cuts_columns = has(C.PERI_SHARDING_CUTS_COLUMNS),
    in_node = has(C.PERI_SHARDING_IN_NODE), replica = has(C.PERI_SHARDING_REPLICA) }
  t.partition_by, t.way = partition_by(t), way(t)
  t.asked_for = t.cuts_rows and t.cuts_columns -- planners offer it only where a constraint names it
  M.list[code + 1], M.of[t.name] = t, t
end

--- Over how many ranks one column's rows are cut: all of a world, those of a group (topology.intra_group_size), or 1.
function M.row_parts(name, world_size, group_size)
  local t = M.of[name]
  return not t.cuts_rows and 1 or t.in_node and group_size or world_size
end

--- Names of the types of which keep(type) is true, in TorchRec's order: replicas, then those that keep rows whole, then
--- the others.
function M.names(keep)
  local names = {}
  for place = 1, 3 do
    for _, t in ipairs(M.list) do
      local own = t.replica and 1 or t.cuts_rows and 3 or 2
      if own == place and (not keep or keep(t)) then names[#names + 1] = t.name end
    end
  end
  return names
end

return M
