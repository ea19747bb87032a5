-- explain/report.lua: a plan and its reasons as tables for people.
local P = require "perilune.ffi"
local util = require "perilune.util"
local partitioners = require "perilune.plan.partitioners"
local topologies = require "perilune.plan.topology"
local reasons = require "perilune.explain.reasons"
local signature = require "perilune.signature"

local M = {}

local MOST_RANKS = 16       -- that get a line of their own
local MOST_PLACEMENTS = 5e6 -- shards placed to find reasons; beyond it the first tables have some

--- "0,1,2" in words: "all", or ranges.
function M._ranks_text(ranks)
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
function M._columns(rows, right)
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
    tables[#tables + 1] = { o.fqn, ("%d x %d"):format(o.rows, o.dim), o.sharding_type, o.compute_kernel,
      M._ranks_text(best.placement[i]), reasons._gib(o.max_storage[tier]), ("%.4g"):format(o.max_perf) }
  end
  local bytes = partitioners.by_rank(best.proposal, best.placement, topology.world_size, function(run)
    return run.storage[tier]
  end)
  local times = partitioners.by_rank(best.proposal, best.placement, topology.world_size, function(run)
    return run.perf.total
  end)
  local ranks, order = { { "rank", tier, "of", "ms of shards" } }, {}
  for r = 1, topology.world_size do order[r] = r end
  table.sort(order, function(a, b)
    if times[a] ~= times[b] then return times[a] > times[b] end
    return a < b
  end)
  local shown = {}
  for i = 1, math.min(MOST_RANKS, #order) do shown[i] = order[i] end
  if #order <= MOST_RANKS then table.sort(shown) end
  for _, r in ipairs(shown) do
    local has = search.topology.devices[r][tier]
    ranks[#ranks + 1] = { tostring(r - 1), reasons._gib(bytes[r]), reasons._gib(has), ("%.4g"):format(times[r]) }
  end
  local words = util.map(reasons._ratings(planner), function(r) return r[1] .. " " .. r[2] end)
  local lines = { ("%s on %s: %s (%s tried, %d fit%s)"):format(util.number_of(#best.proposal, "table"),
    (tostring(topology):gsub("^Topology: ", "")), table.concat(words, ", "),
    util.number_of(search.num_proposals, "proposal"), search.num_plans, search.stopped
      and "; the search stopped at its limit" or "") }
  for _, t in ipairs(search.left_out) do
    lines[#lines + 1] = ("  table '%s' is left out: its constraint device_group is %s, this is a plan for a %s"):format(
      t.fqn, t.device_group, topology.compute_device)
  end
  for _, line in ipairs(M._columns(tables, { false, true, false, false, false, true, true })) do
    lines[#lines + 1] = line
  end
  lines[#lines + 1] = #order > MOST_RANKS and ("the %d slowest of %d ranks"):format(MOST_RANKS, #order) or nil
  for _, line in ipairs(M._columns(ranks, { true, true, true, true })) do lines[#lines + 1] = line end
  return lines
end

--- The reasons of a plan (reasons.lua), of as many tables as can be looked at in a few seconds.
function M._reasons(planner, model)
  local search, shards = planner.last, 0
  for _, option in ipairs(search.best.proposal) do shards = shards + option.num_shards end
  local tables = #search.best.proposal
  return reasons.of(planner, model,
    math.max(1, math.min(tables, math.floor(MOST_PLACEMENTS / (shards * #search.space / tables)))))
end

--- Lines that say why each table has not another option. list: reasons; tables: of the plan.
function M._reason_lines(list, tables)
  local n = 0
  for _, entry in ipairs(list) do n = n + #entry.tables end
  local lines = { n < tables and ("why, for the first %d of %d tables:"):format(n, tables) or "why:" }
  for _, entry in ipairs(list) do
    lines[#lines + 1] = ("  %s: %s %s"):format(entry.table, entry.chosen.sharding_type, entry.chosen.compute_kernel)
    local rows = {}
    for i, other in ipairs(entry.others) do rows[i] = { "  " .. other.option, other.kind, other.text } end
    for _, line in ipairs(M._columns(rows, {})) do lines[#lines + 1] = line end
  end
  return lines
end

--- Numbers of ranks a host for which a topology of so many ranks is kept, from the most.
local function kept_hosts(ranks)
  local found = {}
  for host = ranks, 1, -1 do
    local path = ranks % host == 0 and topologies.Topology.kept_path(ranks, host)
    local file = path and io.open(path)
    if file then
      file:close()
      found[#found + 1] = host
    end
  end
  return found
end

--- The topology of `perilune plan` without a name: what `perilune calibrate` has kept of so many ranks, on one host or
--- on several; and a line that says which it is.
local function usual(ranks)
  local hosts, of_ranks = kept_hosts(ranks), util.number_of(ranks, "rank")
  if #hosts == 0 then
    return topologies.Topology.preset("cpu_ethernet_10g", { world_size = ranks, local_world_size = ranks }),
      ("no topology of %s is kept (perilune calibrate -n %d): planned for cpu_ethernet_10g"):format(of_ranks, ranks)
  end
  local line = ("planned for the kept topology of %s, %d a host"):format(of_ranks, hosts[1])
  local others = {}
  for i = 2, #hosts do
    others[#others + 1] = ("%d a host: --topology %s"):format(hosts[i], topologies.Topology.kept_path(ranks, hosts[i]))
  end
  return topologies.Topology.kept(ranks, hosts[1]), #others > 0
    and ("%s (kept too: %s)"):format(line, table.concat(others, "; ")) or line
end

--- The topology of `perilune plan`: a machine's name, or a file; ranks go over what it says. Without a name: what is
--- kept of this machine, or machines; then also a line that says which that is.
function M._topology(name, ranks)
  local over = { world_size = ranks }
  if not name then return usual(ranks or 1) end
  if util.index_of(topologies.Topology.presets)[name] then return topologies.Topology.preset(name, over) end
  local file = io.open(name)
  if not file and not name:find "[/.]" then
    P.fail(("topology '%s': there is no such file, nor a machine of that name, but %s"):format(name,
      table.concat(topologies.Topology.presets, ", ")))
  end
  if file then file:close() end
  return topologies.Topology.load(name, over)
end

signature.kind("ranks_of_shards", "a list of ranks, or true", function(x)
  return x == true or signature.is("numbers", x)
end)
signature.list_of("cells", "a list of lists of texts", "strings")
signature.object("chosen_option", "an option", { sharding_type = "string", compute_kernel = "string" })
signature.object("other_option", "an option that lost", { option = "string", kind = "string", text = "string" })
signature.list_of("other_options", "a list of options that lost", "other_option")
signature.object("reason", "why a table has its option",
  { table = "string", tables = "strings", chosen = "chosen_option", others = "other_options" })
signature.list_of("reasons", "a list of what plan.reasons.of says", "reason")
signature.check("plan.report.", M, { _columns = "rows: cells, right: table", _ranks_text = "ranks: ranks_of_shards",
  lines = "planner: planned", _reasons = "planner: planned, model: model",
  _reason_lines = "list: reasons, tables: count",
  _topology = "name: string?, ranks: int?" })

return M
