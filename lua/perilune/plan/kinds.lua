-- plan/kinds.lua: what the planner's public functions take, as kinds of signature.lua. Users write parts of planners
-- themselves, so what a part needs is asked of its methods, not of its class.
local util = require "perilune.util"
local signature = require "perilune.signature"
local nn = require "perilune.nn"
local options = require "perilune.plan.options"
local constraints = require "perilune.plan.constraints"
require "perilune.plan.topology"
require "perilune.plan.types"

signature.object("matrix_sizes", "a list of two numbers", { [1] = "number", [2] = "number" })
signature.list_of("matrices_sizes", "a list of { out, in }", "matrix_sizes")
signature.object("planned_table", "the configuration of a table with features",
  { name = "string", num_embeddings = "count", embedding_dim = "count", feature_names = "strings" })
signature.list_of("planned_tables", "a list of configurations of tables with features", "planned_table")
signature.object("collection", "a collection of a model", { path = "string", kind = "string", tables = "planned_tables",
  sharder = "table?", optimizers = "table?" })
signature.object("planned_module", "a collection of a model", { path = "string", kind = "string", sharder = "table?",
  optimizers = "table?" })
local described = "a model as plan.describe.of makes it: a list of collections"
signature.list_of("collections_of_model", described, "collection")
local function sums_of(x) -- of parameters beside tables
  for _, name in ipairs { "dense_bytes", "buffer_bytes" } do
    if x[name] ~= nil and not signature.is("count", x[name]) then return name end
  end
  if x.matrices ~= nil and not signature.is("matrices_sizes", x.matrices) then return "matrices" end
end
signature.kind("model", described, function(x)
  return signature.is("collections_of_model", x) and x[1] ~= nil and not sums_of(x)
end,
  function(x)
    local wrong = util.is_plain(x) and sums_of(x)
    if wrong then return ("has %s = %s, wanted %s"):format(wrong, signature.text(x[wrong]),
      wrong == "matrices" and "a list of { out, in }" or "a whole number of bytes") end
    if nn.Module.is(x) then
      return ("is an nn.Module, wanted what plan.describe.of(%s) makes of it"):format(x.class_name)
    end
    if util.is_plain(x) and x[1] == nil and (next(x) == nil or x.dense_bytes) then return "has no tables" end
    return signature.why("collections_of_model", x)
  end)

signature.kind("constraints", "a table of ParameterConstraints", function(x)
  if not util.is_plain(x) then return false end
  for _, c in util.ordered(x) do
    if type(c) ~= "table" then return false end
  end
  return true
end)
signature.kind("constraint", "ParameterConstraints", function(x)
  return constraints.ParameterConstraints.is(x) or util.is_plain(x)
end)

local function estimated(option)
  return options.ShardingOption.is(option) and option.total_storage ~= nil and option.total_perf ~= nil
end
local function all(test)
  return function(list)
    if not util.is_plain(list) then return false end
    for i = 1, #list do
      if not test(list[i]) then return false end
    end
    return true
  end
end
signature.kind("options", "a list of ShardingOptions", all(options.ShardingOption.is))
signature.kind("proposal", "a list of ShardingOptions with their estimates", all(estimated))

signature.object("sharder", "a sharder", { sharding_types = "callable", compute_kernels = "callable" })
signature.object("enumerator", "an enumerator", { enumerate = "callable", populate_estimates = "callable" })
signature.object("estimator", "an estimator", { estimate = "callable" })
signature.list_of("estimators", "a list of estimators", "estimator")
signature.object("reservation", "a storage reservation", { reserve = "callable" })
signature.object("proposer", "a proposer", { load = "callable", propose = "callable", feedback = "callable",
  begin = "callable?", within = "callable?" })
signature.list_of("proposers", "a list of proposers", "proposer")
signature.object("partitioner", "a partitioner", { partition = "callable" })
signature.object("performance_model", "a performance model", { rate = "callable" })

local M = {}

--- By checked method, the method without its checks: for a planner that calls it thousands of times with what it has
--- looked at itself.
M.unchecked = {}

--- Put checks in front of methods of a class: as signature.check, of which `self` is an object of the class (or of one
--- below it).
function M.methods(class, signatures)
  local name = class.class_name
  signature.kind(name, (name:match "^[AEIOU]" and "an " or "a ") .. name, class.is)
  local own, plain = {}, {}
  for method, line in util.ordered(signatures) do
    own[method], plain[method] = ("self: %s%s"):format(name, line == "" and "" or ", " .. line), class[method]
  end
  signature.check(name .. ":", class, own)
  for method, f in util.ordered(plain) do M.unchecked[class[method]] = f end
end

return M
