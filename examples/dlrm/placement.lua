-- placement.lua: where the tables lie: a table for people, and one for summary.json.
local peri = require "perilune"
local Progress = require "perilune.progress"

local M = {}

local COLUMNS = 6 -- ranks that get a column of their own

local function bytes(n)
  local unit = 1
  local units = { "B", "kB", "MB", "GB", "TB" }
  while n >= 1000 and unit < #units do n, unit = n / 1000, unit + 1 end
  return (unit > 1 and n < 100 and "%.1f %s" or "%.0f %s"):format(n, units[unit])
end

--- Of a model: plan (its file), and list: by table { table =, rows =, columns =, sharding =, compute_kernel =, bytes =
--- { by rank } }, where bytes are those of the weights.
function M.of(model, plan_file)
  local places = { plan = plan_file, list = {}, ranks = model.group:size() }
  for _, sharded in ipairs(model.sharded) do
    for _, t in ipairs(sharded.tables) do
      local entry = sharded.plan.tables[t.name]
      local shards = entry:shards(t, { world_size = model.group:size(), local_size = model.group.local_size })
      local row = { table = t.name, rows = t.num_embeddings, columns = t.embedding_dim, sharding = entry.sharding_type,
        compute_kernel = entry.compute_kernel, bytes = {} }
      local element = t.data_type == "FP32" and 4 or 2
      for rank = 1, places.ranks do
        row.bytes[rank] = #shards == 0 and t.num_embeddings * t.embedding_dim * element or 0
      end
      for _, s in ipairs(shards) do row.bytes[s.rank + 1] = row.bytes[s.rank + 1] + s.rows * s.cols * element end
      places.list[#places.list + 1] = row
    end
  end
  return places
end

local function line(name, rows, sharding, cells)
  local parts = { ("  %-24s %12s  %-32s"):format(name, rows, sharding) }
  for _, cell in ipairs(cells) do parts[#parts + 1] = ("%10s"):format(cell) end
  return table.concat(parts, " ")
end

--- The bytes of each rank as cells; of many ranks only the least and the most.
local function cells(list)
  if #list <= COLUMNS then return peri.util.map(list, function(n) return n > 0 and bytes(n) or "-" end) end
  return { bytes(math.min(unpack(list))), bytes(math.max(unpack(list))) }
end

function M.text(places)
  local head, sum, rows = { "least", "most" }, {}, 0
  if places.ranks <= COLUMNS then
    for rank = 1, places.ranks do head[rank] = "rank " .. rank - 1 end
    head[places.ranks + 1] = nil
  end
  for rank = 1, places.ranks do sum[rank] = 0 end
  local lines = { ("tables and the bytes of their weights, placed by %s:"):format(places.plan or "the planner"),
    line("table", "rows", "sharding", head) }
  for _, t in ipairs(places.list) do
    lines[#lines + 1] = line(t.table, Progress.grouped(t.rows), t.sharding .. ", " .. t.compute_kernel, cells(t.bytes))
    rows = rows + t.rows
    for rank = 1, places.ranks do sum[rank] = sum[rank] + t.bytes[rank] end
  end
  lines[#lines + 1] = line(("%d tables"):format(#places.list), Progress.grouped(rows), "", cells(sum))
  return table.concat(lines, "\n")
end

return M
