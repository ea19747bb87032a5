-- plan/relations.lua: what a user says about tables together and about ranks: same ranks, different ranks, not these,
-- only these, at most so many. A planner takes them as `relations`; no plan that it makes breaks one.
--
-- A table is named by its name, its path and name, or a pattern of these with * for any letters. `per` is "rank" or
-- "host": hosts are local_world_size ranks one after the other.
local P = require "perilune.ffi"
local util = require "perilune.util"
local sharding_types = require "perilune.plan.sharding_types"
local options = require "perilune.plan.options"
local signature = require "perilune.signature"

local M = {}

--- kind, tables (names and patterns), units (set of ranks or hosts) or count or bytes, per.
local Relation = util.class "Relation"
M.Relation = Relation
function Relation:init(fields)
  if type(fields) ~= "table" or type(fields.tables) ~= "table" or not fields.kind then
    P.fail("Relation: relations are made by plan.colocate, spread, at_most, at_most_bytes, forbid and pin")
  end
  for name, value in util.ordered(fields) do self[name] = value end
end

function Relation:__tostring()
  local what = table.concat(self.tables, ", ")
  local units = self.units and table.concat(util.keys(self.units), ", ") or ""
  if self.kind == "colocate" then return ("colocate { %s }"):format(what) end
  if self.kind == "spread" then return ("spread { %s } over %ss"):format(what, self.per) end
  if self.kind == "at_most" then return ("at most %d of { %s } on a %s"):format(self.count, what, self.per) end
  if self.kind == "at_most_bytes" then
    return ("at most %.0f bytes of { %s } on a %s"):format(self.bytes, what, self.per)
  end
  return ("%s { %s } %s %ss %s"):format(self.kind, what, self.kind == "pin" and "to" or "on", self.per, units)
end

local function tables_of(func, tables, least)
  if type(tables) == "string" then tables = { tables } end
  if type(tables) ~= "table" or #tables < least then
    P.fail(("%s: tables is %s, wanted a list of %s or more"):format(func, type(tables) == "table" and "a list of "
      .. #tables
      or type(tables), util.number_of(least, "name")))
  end
  for i, name in ipairs(tables) do
    if type(name) ~= "string" then P.fail(("%s: tables[%d] is a %s, wanted a name"):format(func, i, type(name))) end
  end
  return tables
end

local function per_of(func, per) return util.one_of(func, "per", per or "rank", { "rank", "host" }) end

local function units_of(func, units)
  if type(units) == "number" then units = { units } end
  if type(units) ~= "table" or #units == 0 then
    P.fail(("%s: units is %s, wanted the number of a rank or host, or a list of such"):format(func,
      type(units) == "table" and "an empty list" or type(units)))
  end
  local set = {}
  for i, unit in ipairs(units) do set[util.integer(func, ("units[%d]"):format(i), unit, 0, 2 ^ 20)] = true end
  return set
end

--- The same of a relation between tables: two names, or a pattern.
local function several_of(func, tables)
  tables = tables_of(func, tables, 1)
  if tables[2] or tables[1]:find("*", 1, true) then return tables end
  P.fail(("%s: tables is the one table '%s', wanted a list of two or more, or a pattern with *"):format(func,
    tables[1]))
end

--- Tables that are cut alike, and shard by shard on the same ranks.
function M.colocate(tables, more)
  if more ~= nil then
    P.fail(("plan.colocate: %s behind tables, wanted one list of names"):format(signature.text(more)))
  end
  return Relation { kind = "colocate", tables = several_of("plan.colocate", tables), per = "rank" }
end

--- No rank (or host) has shards of two of the tables.
function M.spread(tables, per)
  return Relation { kind = "spread", tables = several_of("plan.spread", tables), count = 1,
    per = per_of("plan.spread", per) }
end

--- No rank (or host) has shards of more than `count` of the tables.
function M.at_most(count, tables, per)
  return Relation { kind = "at_most", tables = tables_of("plan.at_most", tables, 1),
    count = util.integer("plan.at_most", "count", count, 1), per = per_of("plan.at_most", per) }
end

--- No rank (or host) has more than `bytes` (of all kinds of memory) of the tables' shards.
function M.at_most_bytes(bytes, tables, per)
  local f = "plan.at_most_bytes"
  return Relation { kind = "at_most_bytes", tables = tables_of(f, tables, 1),
    bytes = util.integer(f, "bytes", bytes, 0), per = per_of(f, per) }
end

--- The tables have no shard on these ranks (or hosts).
function M.forbid(tables, units, per)
  local f = "plan.forbid"
  return Relation { kind = "forbid", tables = tables_of(f, tables, 1), units = units_of(f, units),
    per = per_of(f, per) }
end

--- The tables have shards on these ranks (or hosts) only.
function M.pin(tables, units, per)
  local f = "plan.pin"
  return Relation { kind = "pin", tables = tables_of(f, tables, 1), units = units_of(f, units), per = per_of(f, per) }
end

-- -- tables that a relation means -------------------------------------------------------------------------------------

local function matcher(pattern)
  local lua = "^" .. pattern:gsub("[%^%$%(%)%%%.%[%]%+%-%?]", "%%%0"):gsub("%*", ".*") .. "$"
  return function(table_) return table_.fqn:match(lua) ~= nil or table_.name:match(lua) ~= nil end
end

--- The fqns that the names of a relation mean. tables: list of { fqn =, name = }.
local function resolve(relation, tables)
  local found, list = {}, {}
  for _, pattern in ipairs(relation.tables) do
    local is, any = matcher(pattern), false
    for _, t in ipairs(tables) do
      if is(t) then
        any = true
        if not found[t.fqn] then found[t.fqn], list[#list + 1] = true, t.fqn end
      end
    end
    if not any then
      P.fail(("EmbeddingShardingPlanner: relation '%s': there is no table '%s', but %s"):format(tostring(relation),
        pattern, table.concat(util.map(tables, function(t) return t.fqn end), ", ", 1, math.min(#tables, 8))
          .. (#tables > 8 and ", ..." or "")))
    end
  end
  return found, list
end

-- -- rules: relations while a plan is put together --------------------------------------------------------------------

local function bytes_of(storage) return storage.hbm + storage.ddr + storage.ssd end

local Rules = util.class "Rules"

local function check_units(relation, topology)
  local most = relation.per == "host" and math.ceil(topology.world_size / topology.local_world_size)
    or topology.world_size
  for unit in util.ordered(relation.units or {}) do
    if unit >= most then
      P.fail(("EmbeddingShardingPlanner: relation '%s': there is no %s %d, allowed: 0..%d"):format(tostring(relation),
        relation.per, unit, most - 1))
    end
  end
end

--- relations: list; tables: list of { fqn =, name = }.
function Rules:init(relations, tables, topology)
  self.local_size, self.of, self.list = topology.local_world_size, {}, {}
  for i, relation in ipairs(relations) do
    if not Relation.is(relation) then
      P.fail(("EmbeddingShardingPlanner: relations[%d] is a %s, wanted plan.colocate, spread, at_most, at_most_bytes, "
        .. "forbid or pin")
        :format(i, type(relation)))
    end
    check_units(relation, topology)
    local set, members = resolve(relation, tables)
    local rule = { relation = relation, set = set, members = members, state = {} }
    self.list[i] = rule
    for _, fqn in ipairs(members) do
      self.of[fqn] = self.of[fqn] or {}
      table.insert(self.of[fqn], rule)
    end
  end
  self:clear()
end

--- Forget what was placed: every rule is as before the first shard.
function Rules:clear()
  for _, rule in ipairs(self.list) do rule.state = {} end
end

local function members_of(option)
  return option.members and util.map(option.members, function(o) return o.fqn end) or { option.fqn }
end

--- The rules about an option: list of { rule, names = its tables that the rule is about }.
function Rules:about(option)
  local known = option.rules
  if known and known.of == self then return known end
  known = { of = self }
  local at = {}
  for _, fqn in ipairs(members_of(option)) do
    for _, rule in ipairs(self.of[fqn] or {}) do
      if not at[rule] then
        at[rule] = { rule = rule, names = {} }
        known[#known + 1] = at[rule]
      end
      table.insert(at[rule].names, fqn)
    end
  end
  option.rules = known
  return known
end

function Rules:unit(rule, r) return rule.relation.per == "host" and math.floor(r / self.local_size) or r end

--- The relation that keeps a shard of `run` from rank r, or nil.
function Rules:refuses(option, r, run)
  for _, about in ipairs(self:about(option)) do
    local rule = about.rule
    local relation, unit = rule.relation, self:unit(rule, r)
    local here = rule.state[unit]
    if relation.units then
      if (relation.units[unit] == true) == (relation.kind == "forbid") then return relation end
    elseif relation.bytes then
      if (here and here.bytes or 0) + bytes_of(run.storage) > relation.bytes then return relation end
    elseif relation.count then
      local n = here and here.n or 0
      for _, fqn in ipairs(about.names) do n = n + (here and here.names[fqn] and 0 or 1) end
      if n > relation.count then return relation end
    end
  end
end

--- A shard of `run` is on rank r.
function Rules:add(option, r, run)
  for _, about in ipairs(self:about(option)) do
    local rule = about.rule
    local unit = self:unit(rule, r)
    local here = rule.state[unit] or { n = 0, bytes = 0, names = {} }
    rule.state[unit] = here
    here.bytes = here.bytes + bytes_of(run.storage)
    for _, fqn in ipairs(about.names) do
      if not here.names[fqn] then here.names[fqn], here.n = true, here.n + 1 end
    end
  end
end

--- Whether an option may be on few ranks only: such ones are placed before others take these ranks.
function Rules:pinned(option)
  for _, about in ipairs(self:about(option)) do
    if about.rule.relation.units then return true end
  end
  return false
end

--- What is placed now, to go back to it.
function Rules:save()
  return util.map(self.list, function(rule)
    local copy = {}
    for unit, here in util.ordered(rule.state) do
      copy[unit] = { n = here.n, bytes = here.bytes, names = util.copy(here.names) }
    end
    return copy
  end)
end

--- Go back to what was saved, once.
function Rules:restore(saved)
  for i, rule in ipairs(self.list) do rule.state = saved[i] end
end

-- -- options that no plan can have ------------------------------------------------------------------------------------

--- Ranks that an option has shards on for sure: "all", a whole "group", or nil.
local function reach(option)
  if option.partition_by == "uniform" then return "all" end
  return option.partition_by == "host" and sharding_types.of[option.sharding_type].cuts_rows and "group" or nil
end

local function allowed_units(rules, rule, topology)
  local free = {}
  for r = 0, topology.world_size - 1 do
    local named = rule.relation.units[rules:unit(rule, r)] == true
    free[r] = named == (rule.relation.kind == "pin")
  end
  return free
end

local function whole_group(free, topology, size)
  for first = 0, topology.world_size - size, size do
    local all = true
    for r = first, first + size - 1 do all = all and free[r] end
    if all then return true end
  end
  return false
end

--- Why no plan can have this option, whatever the others are; nil: one can.
local function impossible(rules, option, topology)
  local ranks = reach(option)
  for _, about in ipairs(rules:about(option)) do
    local rule = about.rule
    local relation = rule.relation
    if relation.units and ranks then
      local size = ranks == "all" and topology.world_size or topology.intra_group_size
      if not whole_group(allowed_units(rules, rule, topology), topology, size) then
        return ("%s; %s is on %s"):format(tostring(relation), option.sharding_type,
          ranks == "all" and "all ranks" or ("all %d ranks of a group"):format(size))
      end
    elseif relation.count and #about.names > relation.count
      or relation.count == 1 and #rule.members > 1 and ranks == "all" then
      return ("%s; %s is where another of them is"):format(tostring(relation), option.sharding_type)
    elseif relation.bytes then
      for _, run in ipairs(option.runs) do
        if bytes_of(run.storage) > relation.bytes then
          return ("%s; a shard has %.0f"):format(tostring(relation), bytes_of(run.storage))
        end
      end
    end
  end
end

--- Several relations by which an option may be on no rank at all, each of which alone leaves it some: their words; nil:
--- there are none.
local function contradiction(rules, option, topology)
  local list = {}
  for _, about in ipairs(rules:about(option)) do
    if about.rule.relation.units then list[#list + 1] = about.rule end
  end
  if #list < 2 then return nil end
  for r = 0, topology.world_size - 1 do
    local free = true
    for _, rule in ipairs(list) do
      free = free and (rule.relation.units[rules:unit(rule, r)] == true) == (rule.relation.kind == "pin")
    end
    if free then return nil end
  end
  return ("relations %s leave table '%s' no rank"):format(table.concat(util.map(list, function(rule)
    return "'" .. tostring(rule.relation) .. "'"
  end), " and "), option.fqn)
end

-- -- tables that stay together ----------------------------------------------------------------------------------------

local function added(a, b)
  local sum = {}
  for key, x in util.ordered(a) do sum[key] = x + b[key] end
  return sum
end

--- Runs of two options with as many shards, shard by shard together.
local function merged_runs(a, b)
  local out, i, j, left_a, left_b = {}, 1, 1, a[1].n, b[1].n
  while i <= #a and j <= #b do
    local n = math.min(left_a, left_b)
    out[#out + 1] = { n = n, rows = a[i].rows + b[j].rows, cols = math.max(a[i].cols, b[j].cols), row_offset = 0,
      col_offset = 0, storage = added(a[i].storage, b[j].storage), perf = added(a[i].perf, b[j].perf) }
    left_a, left_b = left_a - n, left_b - n
    if left_a == 0 then i, left_a = i + 1, a[i + 1] and a[i + 1].n end
    if left_b == 0 then j, left_b = j + 1, b[j + 1] and b[j + 1].n end
  end
  return out
end

--- Options of several tables as one: it stands for all of them in proposals.
local function joined(members)
  local first, runs = members[1], members[1].runs
  for k = 2, #members do runs = merged_runs(runs, members[k].runs) end
  local names = util.map(members, function(o) return o.fqn end)
  local option = options.ShardingOption { id = first.id, path = first.path, name = table.concat(names, " + "),
    runs = runs, sharding_type = first.sharding_type, compute_kernel = first.compute_kernel, rows = 0, dim = 0,
    members = members }
  option.fqn = option.name
  option:sum_storage()
  option:sum_perf()
  return option
end

--- Groups of tables that colocate relations make, overlapping ones together: fqn -> list of fqns.
local function groups_of(rules)
  local group = {}
  for _, rule in ipairs(rules.list) do
    if rule.relation.kind == "colocate" then
      local list, seen = {}, {}
      for _, fqn in ipairs(rule.members) do
        for _, other in ipairs(group[fqn] or { fqn }) do
          if not seen[other] then seen[other], list[#list + 1] = true, other end
        end
      end
      for _, fqn in ipairs(list) do group[fqn] = list end
    end
  end
  return group
end

--- The space with one option for each way in which all tables of a group can be cut alike.
local function join_groups(rules, space, refused)
  local group, by_way, out, done = groups_of(rules), {}, {}, {}
  for _, option in ipairs(space) do
    local way = option.sharding_type .. " " .. option.compute_kernel
    by_way[option.fqn] = by_way[option.fqn] or {}
    by_way[option.fqn][way] = option
  end
  for _, option in ipairs(space) do
    local list, way = group[option.fqn], option.sharding_type .. " " .. option.compute_kernel
    if not list or #list == 1 then out[#out + 1] = option
    else
      local members = {}
      for _, fqn in ipairs(list) do
        local o = by_way[fqn][way]
        if o and o.num_shards == option.num_shards then members[#members + 1] = o end
      end
      if #members < #list then
        table.insert(refused, { option = option, text = ("colocate { %s }; not all can be cut alike"):format(
          table.concat(list, ", ")) })
      elseif not done[members[1]] then
        done[members[1]], out[#out + 1] = true, joined(members)
      end
    end
  end
  return out
end

--- The rules of a planner's relations for a search space; nil without relations. Returns also the space without the
--- options that no plan can have, and these: list of { option =, text = }.
function M.apply(relations, space, topology)
  if #relations == 0 then return nil, space, {} end
  local tables, seen, refused, left = {}, {}, {}, {}
  for _, option in ipairs(space) do
    if not seen[option.fqn] then
      seen[option.fqn], tables[#tables + 1] = true, { fqn = option.fqn, name = option.name }
    end
  end
  local rules = Rules(relations, tables, topology)
  local out, looked = {}, {}
  for _, option in ipairs(join_groups(rules, space, refused)) do
    if not looked[option.fqn] then
      rules.contradiction = rules.contradiction or contradiction(rules, option, topology)
    end
    looked[option.fqn] = true
    local why = impossible(rules, option, topology)
    if why then
      for _, member in ipairs(option.members or { option }) do
        table.insert(refused, { option = member, text = why })
      end
    else
      out[#out + 1] = option
      for _, fqn in ipairs(members_of(option)) do left[fqn] = true end
    end
  end
  for _, t in ipairs(tables) do
    if not left[t.fqn] then
      local words = {}
      for _, r in ipairs(refused) do
        if r.option.fqn == t.fqn then
          words[#words + 1] = ("%s %s (%s)"):format(r.option.sharding_type, r.option.compute_kernel, r.text)
        end
      end
      P.fail(("EmbeddingShardingPlanner: relations leave table '%s' no way to be sharded: %s"):format(t.fqn,
        table.concat(words, ", ")))
    end
  end
  return rules, out, refused
end

--- A proposal and its placement with options that stand for several tables taken apart.
function M.taken_apart(proposal, placement)
  local p, ranks = {}, {}
  for i, option in ipairs(proposal) do
    for _, member in ipairs(option.members or { option }) do p[#p + 1], ranks[#ranks + 1] = member, placement[i] end
  end
  return p, ranks
end

signature.list_of("ShardingOptions", "a list of ShardingOptions", "ShardingOption")
signature.check("plan.relations.", M, { apply = "relations: list, space: ShardingOptions, topology: Topology",
  taken_apart = "proposal: ShardingOptions, placement: list" })

return M
