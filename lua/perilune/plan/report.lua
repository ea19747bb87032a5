-- plan/report.lua: a plan as a table for people, and `perilune plan`.
local P = require "perilune.ffi"
local errors = require "perilune.errors"
local util = require "perilune.util"
local planners = require "perilune.plan.planner"
local partitioners = require "perilune.plan.partitioners"
local topologies = require "perilune.plan.topology"
local constraints_of = require "perilune.plan.constraints"
local enumerators = require "perilune.plan.enumerators"
local describe = require "perilune.plan.describe"
local reasons = require "perilune.plan.reasons"
local json = require "perilune.plan.json"

local M = {}

local MOST_RANKS = 16       -- that get a line of their own
local MOST_PLACEMENTS = 2e7 -- shards placed to find reasons; beyond it the first tables have some

--- "0,1,2" in words: "all", or ranges.
local function ranks_text(ranks)
  if ranks == true then return "all" end
  local parts, from = {}, 1
  while from <= #ranks do
    local to = from
    while ranks[to + 1] == ranks[to] + 1 do to = to + 1 end
    parts[#parts + 1] = to > from + 1 and ("%d-%d"):format(ranks[from], ranks[to]) or table.concat(ranks, ",", from, to)
    from = to + 1
  end
  return table.concat(parts, ",")
end

--- Lines of columns, as wide as their widest cell; numbers (right) to the right.
local function columns(rows, right)
  local width, lines = {}, {}
  for _, row in ipairs(rows) do
    for c, cell in ipairs(row) do width[c] = math.max(width[c] or 0, #cell) end
  end
  for _, row in ipairs(rows) do
    local cells = {}
    for c, cell in ipairs(row) do
      local blanks = (" "):rep(width[c] - #cell)
      cells[c] = right[c] and blanks .. cell or cell .. blanks
    end
    lines[#lines + 1] = ("  " .. table.concat(cells, "  ")):gsub("%s+$", "")
  end
  return lines
end

--- Lines about a plan that a planner has made: tables, then ranks.
function M.lines(planner)
  local search, topology = planner.last, planner.topology
  local best, tier = search.best, topology:own_tier()
  local tables = { { "table", "rows x columns", "sharding", "kernel", "ranks", tier .. " a shard", "ms a shard" } }
  for i, o in ipairs(best.proposal) do
    tables[#tables + 1] = { o.fqn, ("%d x %d"):format(o.rows, o.dim), o.sharding_type, o.compute_kernel, ranks_text(best.placement[i]),
      reasons.gib(o.max_storage[tier]), ("%.4g"):format(o.max_perf) }
  end
  local bytes = partitioners.by_rank(best.proposal, best.placement, topology.world_size, function(run) return run.storage[tier] end)
  local times = partitioners.by_rank(best.proposal, best.placement, topology.world_size, function(run) return run.perf.total end)
  local ranks, order = { { "rank", tier, "of", "ms" } }, {}
  for r = 1, topology.world_size do order[r] = r end
  table.sort(order, function(a, b)
    if times[a] ~= times[b] then return times[a] > times[b] end
    return a < b
  end)
  local shown = {}
  for i = 1, math.min(MOST_RANKS, #order) do shown[i] = order[i] end
  if #order <= MOST_RANKS then table.sort(shown) end
  for _, r in ipairs(shown) do
    ranks[#ranks + 1] = { tostring(r - 1), reasons.gib(bytes[r]), reasons.gib(search.topology.devices[r][tier]), ("%.4g"):format(times[r]) }
  end
  local lines = { ("%d tables on %s: %.4g ms on the slowest rank (%d proposals tried, %d fit%s)"):format(#best.proposal,
    tostring(topology):gsub("^Topology: ", ""), best.rating, search.num_proposals, search.num_plans,
    search.stopped and "; the search stopped at its limit" or "") }
  for _, line in ipairs(columns(tables, { false, true, false, false, false, true, true })) do lines[#lines + 1] = line end
  lines[#lines + 1] = #order > MOST_RANKS and ("the %d slowest of %d ranks"):format(MOST_RANKS, #order) or nil
  for _, line in ipairs(columns(ranks, { true, true, true, true })) do lines[#lines + 1] = line end
  return lines
end

--- Lines that say why each table has not another option.
function M.reason_lines(planner, model)
  local search, shards = planner.last, 0
  for _, option in ipairs(search.best.proposal) do shards = shards + option.num_shards end
  local tables = #search.best.proposal
  local most = math.max(1, math.min(tables, math.floor(MOST_PLACEMENTS / (shards * #search.space / tables))))
  local lines = { most < tables and ("why, for the first %d of %d tables:"):format(most, tables) or "why:" }
  for _, entry in ipairs(reasons.of(planner, model, most)) do
    lines[#lines + 1] = ("  %s: %s %s"):format(entry.table, entry.chosen.sharding_type, entry.chosen.compute_kernel)
    local rows = {}
    for i, other in ipairs(entry.others) do rows[i] = { "  " .. other.option, other.kind, other.text } end
    for _, line in ipairs(columns(rows, {})) do lines[#lines + 1] = line end
  end
  return lines
end

--- The topology of `perilune plan`: a machine's name, or a file; ranks go over what it says.
function M.topology(name, ranks)
  local over = { world_size = ranks }
  if name == nil then return topologies.Topology.preset("cpu_ethernet_10g", { world_size = ranks or 1, local_world_size = ranks or 1 }) end
  if util.index_of(topologies.Topology.presets)[name] then return topologies.Topology.preset(name, over) end
  return topologies.Topology.load(name, over)
end

--- The model and constraints that a file says: what it returns is a model (describe.lua), or { model =, constraints = }.
local function load_model(path)
  local chunk, err = loadfile(path)
  if not chunk then P.fail("perilune plan: " .. err) end
  local given = errors.run(chunk)
  local constraints = {}
  if type(given) == "table" and rawget(given, "model") ~= nil then
    for name, c in util.ordered(given.constraints or {}) do
      constraints[name] = constraints_of.ParameterConstraints.is(c) and c or constraints_of.ParameterConstraints(c)
    end
    given = given.model
  end
  return describe.of(given), constraints
end

--- perilune plan: options { model = path, topology = name or path, ranks =, batch_size =, save = path, reasons = true }. Prints; returns
--- an exit code. An error is one line.
function M.run(options, stream)
  stream = stream or io.stdout
  local ok, err = xpcall(function()
    local model, constraints = load_model(options.model)
    local planner = planners.EmbeddingShardingPlanner { topology = M.topology(options.topology, options.ranks),
      batch_size = options.batch_size, constraints = constraints, sharder = enumerators.perilune_sharder }
    local plan = planner:plan(model)
    stream:write(table.concat(M.lines(planner), "\n"), "\n")
    if options.reasons then stream:write(table.concat(M.reason_lines(planner, model), "\n"), "\n") end
    if options.save then
      json.save(plan, options.save, ("perilune plan %s"):format(options.model))
      stream:write("kept in ", options.save, "\n")
    end
  end, errors.locate)
  if ok then return 0 end
  io.stderr:write("perilune: ", tostring(type(err) == "table" and err.message or err), "\n")
  return 1
end

return M
