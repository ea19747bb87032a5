-- plan: sharding plans (types.lua), what they are made for (env.lua), and the ways to get one: by hand from a Lua file,
-- as data from JSON (json.lua), or evenly by size.
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local util = require "perilune.util"
local types = require "perilune.plan.types"
local sharding_types = require "perilune.plan.sharding_types"
local ShardingEnv = require "perilune.plan.env"
local json = require "perilune.plan.json"
local signature = require "perilune.signature"

local M = { ShardingEnv = ShardingEnv }
for _, name in ipairs { "ShardingType", "EmbeddingComputeKernel", "CacheParams", "CacheAlgorithm",
  "ParameterSharding", "EmbeddingModuleShardingPlan", "ShardingPlan" } do
  M[name] = types[name]
end
for _, t in ipairs(sharding_types.list) do M[t.name] = types[t.name] end -- plan.row_wise, ...
for _, name in ipairs { "to_json", "from_json", "save_json", "load_json", "to_text", "from_text", "save",
  "load_text" } do
  M[name] = json[name]
end

--- The planner's names and the files that have them: loaded when they are used. A part whose name begins with "_" is no
--- public name itself.
local planner = {
  Topology = "topology", ParameterStorage = "topology", ParameterConstraints = "constraints",
  ShardingOption = "options", EmbeddingEnumerator = "enumerators",
  EmbeddingStorageEstimator = "storage", EmbeddingPerfEstimator = "perf", torchrec_sharder = "enumerators",
  perilune_sharder = "enumerators", FixedPercentageStorageReservation = "reservations",
  FixedAbsoluteStorageReservation = "reservations", HeuristicalStorageReservation = "reservations",
  InferenceStorageReservation = "reservations", GreedyPerfPartitioner = "partitioners",
  MemoryBalancedPartitioner = "partitioners", UniformPartitioner = "partitioners", NoopPerfModel = "partitioners",
  NoopStorageModel = "partitioners", GreedyProposer = "proposers", UniformProposer = "proposers",
  GridSearchProposer = "proposers", DynamicProgrammingProposer = "proposers", RefiningProposer = "proposers",
  WeighingProposer = "weigh", EmbeddingShardingPlanner = "planner",
  colocate = "relations", spread = "relations", at_most = "relations", at_most_bytes = "relations",
  forbid = "relations", pin = "relations", EmbeddingOffloadScaleupProposer = "offload",
  EmbeddingOffloadStats = "offload",
}
for _, name in ipairs { "StepEstimator", "StepModel" } do planner[name] = "step" end
local planner_files = { dense = "perilune.plan.dense", describe = "perilune.plan.describe",
  reasons = "perilune.explain.reasons", report = "perilune.explain.report",
  html = "perilune.explain.html", statistics = "perilune.plan.statistics" }
for name, file in util.ordered(planner) do
  planner[name], planner_files["_" .. file] = "_" .. file, "perilune.plan." .. file
end

--- env as a plan's function gets it: a ShardingEnv; plain tables of its fields will do. See env.lua.
function M.environment(env) return ShardingEnv.of(env) end

--- A plan from what a user has: a ShardingPlan, a function(env) that returns one, a plain table of module paths, or the
--- path of a file: data, if its name ends in ".json" (load_json) or ".plan" (load_text), else Lua that returns any of
--- those. A Lua file is a program: it can do whatever Lua can. env: see env.lua.
function M.load(source, env)
  local from, file, ran = "plan", type(source) == "string" and source, false
  env = M.environment(env)
  if type(source) == "string" then
    if source:match "%.json$" then return json.load_json(source):_note_file(source) end
    if source:match "%.plan$" then return json.load_text(source):_note_file(source) end
    from = source
    local chunk, err = loadfile(source)
    if not chunk then
      local message, place = errors.syntax(err)
      errors.raise { code = P.C.PERI_EINVAL, name = "EINVAL", message = "plan: " .. message, where = "", place = place }
    end
    source, ran = errors.run(chunk, env), true
  end
  if type(source) == "function" then source, ran = errors.run(source, env), true end
  if type(source) ~= "table" then
    P.fail(("%s %s %s, wanted a ShardingPlan"):format(from, ran and "returns" or "is", errors.kind(source)))
  end
  local plan = types.ShardingPlan.is(source) and source or types.ShardingPlan(source)
  return file and plan:_note_file(file) or plan
end

--- The plan of one module from per-table shorthands, checked against its tables at once.
function M.construct_module_sharding_plan(configs, per_param_sharding, env)
  local plan = types.EmbeddingModuleShardingPlan(per_param_sharding)
  plan:validate(configs, env)
  return plan
end

--- Whole tables over ranks, the largest first, each to the rank that has the fewest bytes: what a model gets that comes
--- without a plan. `modules`: path -> list of table configs.
function M.table_wise_by_size(modules, env)
  local tables = {}
  for path, configs in util.ordered(modules) do
    signature.value("plan.table_wise_by_size", ("modules['%s']"):format(path), configs, "table_configs")
    for _, c in ipairs(configs) do
      tables[#tables + 1] = { path = path, name = c.name, bytes = c.num_embeddings * c.embedding_dim, order = #tables }
    end
  end
  table.sort(tables, function(a, b)
    if a.bytes ~= b.bytes then return a.bytes > b.bytes end
    return a.order < b.order
  end)
  local load, entries = {}, {}
  for r = 0, env.world_size - 1 do load[r] = 0 end
  for _, t in ipairs(tables) do
    local rank = 0
    for r = 1, env.world_size - 1 do
      if load[r] < load[rank] then rank = r end
    end
    load[rank] = load[rank] + t.bytes
    entries[t.path] = entries[t.path] or {}
    entries[t.path][t.name] = types.table_wise(rank)
  end
  return types.ShardingPlan(entries)
end

signature.check("plan.", M, {
  environment = "env: table?", load = "source: any, env: table?",
  table_wise_by_size = "modules: table, env: ranks_of_plan", construct_module_sharding_plan =
    "configs: table_configs, per_param_sharding: table, env: ranks_of_plan",
})

return util.face("peri.plan", M, planner_files, planner)
