-- plan/env.lua: ShardingEnv: the ranks that share a sharded model, and what a plan may look at.
local P = require "perilune.ffi"
local util = require "perilune.util"
local group_of = require("perilune.dist.group").group_of
local signature = require "perilune.signature"

--- Fields that may be missing, and why; to read one that is missing is an error.
local fields = {
  world_size = "it was not given", local_size = "it was not given", nodes = "world_size was not given",
  modules = "it was not given",
  module = "the model has several collections (see env.modules), or none was given",
  tables = "the model has several collections (see env.modules), or none was given",
}

--- TorchRec's ShardingEnv: world_size, rank, pg (a group; false: this is only a description), local_size (ranks of this
--- rank's node) and nodes (a number for each rank, from rank 0 on, equal for ranks of one node). One that a
--- plan's function gets has modules too (path of each embedding collection -> its tables' configs) and, for a model
--- with one collection, module (its path) and tables (its configs).
local MOST_RANKS = 2 ^ 20 -- as a Topology has

local ShardingEnv = util.class "ShardingEnv"

ShardingEnv.__index = function(_, key)
  local own = ShardingEnv[key]
  if own == nil and fields[key] then P.fail(("plan: it uses env.%s, but %s"):format(key, fields[key])) end
  return own
end

--- The node of each rank, where nodes have local_size ranks one after the other, the last one maybe fewer.
local function even_nodes(world_size, local_size)
  local nodes = {}
  for rank = 0, world_size - 1 do nodes[rank + 1] = math.floor(rank / local_size) end
  return nodes
end

local function check_nodes(func, nodes, world_size)
  signature.value(func, "nodes", nodes, "table")
  if #nodes ~= world_size then
    P.fail(("%s: %d nodes, wanted one for each of %d ranks"):format(func, #nodes, world_size))
  end
  for i, node in ipairs(nodes) do util.integer(func, ("nodes[%d]"):format(i), node, 0, 2 ^ 31 - 1) end
end

--- ShardingEnv { world_size =, rank = 0, pg =, local_size = world_size, nodes = local_size ranks each }
function ShardingEnv:init(args)
  local a = util.named("ShardingEnv", args, { world_size = util.whole(util.required, 1, MOST_RANKS), rank = 0,
    pg = util.optional, local_size = util.optional, nodes = util.optional })
  self.world_size = a.world_size
  self.rank = util.integer("ShardingEnv", "rank", a.rank, 0, a.world_size - 1)
  self.local_size = util.integer("ShardingEnv", "local_size", a.local_size or a.world_size, 1, 2 ^ 31 - 1)
  self.nodes = a.nodes or even_nodes(self.world_size, self.local_size)
  check_nodes("ShardingEnv", self.nodes, self.world_size)
  self.pg = a.pg ~= nil and group_of("ShardingEnv", a.pg)
  if self.pg and (self.pg:size() ~= self.world_size or self.pg:rank() ~= self.rank) then
    P.fail(("ShardingEnv: rank %d of %d, but in %s this is rank %d of %d"):format(self.rank, self.world_size,
      tostring(self.pg), self.pg:rank(), self.pg:size()))
  end
end

--- The env of a group's ranks (default: the world's). Local.
function ShardingEnv.from_process_group(pg)
  pg = group_of("ShardingEnv.from_process_group", pg)
  local nodes = {}
  for rank = 0, pg:size() - 1 do nodes[rank + 1] = pg:node(rank) end
  return ShardingEnv { world_size = pg:size(), rank = pg:rank(), pg = pg, local_size = pg.local_size, nodes = nodes }
end

--- The env of one of world_size ranks that are not there: to make and check plans without a job. local_size: ranks of a
--- node.
function ShardingEnv.from_local(world_size, rank, local_size)
  return ShardingEnv { world_size = world_size, rank = rank or 0, local_size = local_size }
end

--- A copy that knows the collections of a model: path -> list of table configs.
function ShardingEnv:with_modules(modules)
  local paths, copy = util.keys(modules), setmetatable(util.copy(self), ShardingEnv)
  copy.modules = modules
  if #paths == 1 then copy.module, copy.tables = paths[1], modules[paths[1]] end
  return copy
end

--- An env of plain fields: those of ShardingEnv, as many of them as are known, modules, or module and tables, and any
--- others.
function ShardingEnv.of(given)
  if ShardingEnv.is(given) then return given end
  local env = setmetatable(util.copy(given or {}), ShardingEnv)
  local world_size = rawget(env, "world_size")
  if world_size ~= nil then util.integer("ShardingEnv.of", "world_size", world_size, 1, MOST_RANKS) end
  local local_size = rawget(env, "local_size")
  if local_size ~= nil then util.integer("ShardingEnv.of", "local_size", local_size, 1, 2 ^ 31 - 1) end
  rawset(env, "local_size", rawget(env, "local_size") or world_size)
  if world_size and not rawget(env, "nodes") then rawset(env, "nodes", even_nodes(world_size, env.local_size)) end
  local modules, module, tables = rawget(env, "modules"), rawget(env, "module"), rawget(env, "tables")
  if not modules and module and tables then modules = { [module] = tables } end
  return modules and env:with_modules(modules) or env
end

function ShardingEnv:__tostring()
  return ("ShardingEnv: rank %s of %s, %s"):format(tostring(rawget(self, "rank")), tostring(rawget(self, "world_size")),
    rawget(self, "pg") and tostring(self.pg) or "no process group")
end

signature.kind("tables_by_path", "a table: path of a module -> list of its tables", function(x)
  if type(x) ~= "table" or getmetatable(x) then return false end
  for _, path in ipairs(util.keys(x) or { false }) do
    if type(path) ~= "string" or not util.is_plain(x[path]) then return false end
  end
  return true
end)
signature.check("ShardingEnv.", ShardingEnv, { from_local = "world_size: int, rank: int?, local_size: int?",
  with_modules = "self: table, modules: tables_by_path", of = "given: table?" })

return ShardingEnv
