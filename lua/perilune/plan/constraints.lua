-- plan/constraints.lua: what a user tells a planner about one table (TorchRec's ParameterConstraints).
local P = require "perilune.ffi"
local util = require "perilune.util"
local topologies = require "perilune.plan.topology"
local embed = require "perilune.embed.config"
local signature = require "perilune.signature"
local sharding_types = require "perilune.plan.sharding_types"
local types = require "perilune.plan.types"

local M = {}

--- The name of a table in a model: under the path of its collection.
function M.fqn(path, name) return path == "" and name or path .. "." .. name end

--- Bytes of a number of a data type.
local data_bytes = embed.data_bytes
M.data_bytes = data_bytes

local arguments = {
  sharding_types = util.optional.list,   -- names that are allowed; default: all but grid_shard
  compute_kernels = util.optional.list,  -- names that are allowed
  min_partition = util.whole(nil, 1),    -- least columns of a shard of column_wise, table_column_wise, grid_shard;
                                         -- default 128
  pooling_factors = util.optional.list,  -- mean ids of a sample, one number for each feature; default 1
  num_poolings = util.optional.list,     -- bags of a sample, one number for each feature; default 1
  batch_sizes = util.optional.list,      -- samples of a rank, one number for each feature; default: the planner's
  is_weighted = util.optional.boolean,   -- ids have weights; default: what the module says
  cache_params = util.optional,          -- CacheParams of fused_uvm_caching
  output_dtype = util.optional.string,   -- "FP32", "FP16", "BF16": of what is looked up; default: the
                                         -- collection's, or the table's
  device_group = util.optional.string,   -- "cpu", "cuda", ...: planners for other devices leave the table out
  feature_names = util.optional.list,    -- kept for the user
}

local MOST = 1e12 -- ids, bags or samples

local ParameterConstraints = util.seal(util.class "ParameterConstraints", arguments)
M.ParameterConstraints = ParameterConstraints

--- The tables of a model that planners for a device leave out, as { { fqn =, device_group = } }.
function M.left_out(constraints, model, device)
  local out = {}
  for _, c in ipairs(model) do
    for _, t in ipairs(c.tables) do
      local group = M.for_table(constraints, c.path, t.name).device_group
      if group and group ~= device then out[#out + 1] = { fqn = M.fqn(c.path, t.name), device_group = group } end
    end
  end
  return out
end

local function check_names(what, list, allowed)
  if list and #list == 0 then
    P.fail(("ParameterConstraints: %s is empty, which allows nothing; leave it out"):format(what))
  end
  for _, name in ipairs(list or {}) do util.one_of("ParameterConstraints", "one of " .. what, name, allowed) end
end

function ParameterConstraints:init(args)
  local f = "ParameterConstraints"
  for name, value in util.ordered(util.named(f, args, arguments)) do self[name] = value end
  check_names("sharding_types", self.sharding_types, util.keys(sharding_types.of))
  check_names("compute_kernels", self.compute_kernels, types.kernels)
  for _, name in ipairs { "pooling_factors", "num_poolings", "batch_sizes" } do
    for i, x in ipairs(self[name] or {}) do
      if type(x) ~= "number" or not (x >= 0 and x <= MOST) then
        P.fail(("%s: %s[%d] is %s, allowed: numbers from 0 to %g"):format(f, name, i, tostring(x), MOST))
      end
    end
  end
  if self.feature_names then signature.value(f, "feature_names", self.feature_names, "strings") end
  if self.output_dtype and not data_bytes[self.output_dtype] then
    util.one_of(f, "output_dtype", self.output_dtype, util.keys(data_bytes))
  end
  if self.device_group then util.one_of(f, "device_group", self.device_group, topologies.compute_devices) end
  if self.cache_params ~= nil then self.cache_params = embed.cache_params(f, self.cache_params) end
end

--- An error for constraints of tables that no module of a model has. func: who complains.
function M.check(func, constraints, model)
  local known, names = {}, {}
  for _, c in ipairs(model) do
    for _, t in ipairs(c.tables) do
      local fqn = M.fqn(c.path, t.name)
      known[t.name], known[fqn], names[#names + 1] = true, true, fqn
    end
  end
  for name, c in util.ordered(constraints) do
    local now = {} -- once more: fields may have been assigned since
    for field in util.ordered(arguments) do now[field] = c[field] end
    ParameterConstraints(now)
    if not known[name] then
      P.fail(("%s: constraints of table '%s', which the model has not; it has: %s%s"):format(func, tostring(name),
        table.concat(names, ", ", 1, math.min(8, #names)), #names > 8 and ", ..." or ""))
    end
  end
end

--- What is said about a table: under its path and name ("sparse.ebc.t"), else under its name. Empty if nothing is.
function M.for_table(constraints, path, name)
  local found = constraints and (constraints[M.fqn(path, name)] or constraints[name])
  if found and not ParameterConstraints.is(found) then found = ParameterConstraints(found) end
  return found or {}
end

--- The numbers of a table's features: what a constraint says, one for each, or `default` each.
function M.per_feature(constraint, key, table_name, n, default)
  util.integer("plan.constraints.per_feature", "n", n, 0, 2 ^ 20)
  local list = constraint[key]
  if list and #list ~= n then
    P.fail(("ParameterConstraints of table '%s': %d %s, wanted one for each of %d features"):format(table_name, #list,
      key, n))
  end
  local out = {}
  for i = 1, n do out[i] = list and list[i] or default end
  return out
end
signature.object("with_tables", "a collection of a model", { path = "string", tables = "table" })
signature.list_of("lists_of_tables", "a list of collections of a model", "with_tables")
signature.check("plan.constraints.", M, { fqn = "path: string, name: string",
  check = "func: string, constraints: table, model: lists_of_tables",
  for_table = "constraints: table?, path: string, name: string",
  left_out = "constraints: table?, model: lists_of_tables, device: string",
  per_feature = "constraint: table, key: string, table_name: string, n: count, default: number" })

return M
