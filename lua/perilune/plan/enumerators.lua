-- plan/enumerators.lua: all ways to shard the tables of a model (TorchRec's EmbeddingEnumerator).
--
-- A model is described by a list of collections in its order: { path =, kind = "EmbeddingBagCollection", tables = their
-- configurations, is_weighted = false, optimizer = nil or its name, fused_params = nil or all that it is given,
-- optimizers = nil or TorchRec's classes by table, sharder = nil or one }. No weights are needed.
local P = require "perilune.ffi"
local util = require "perilune.util"
local constraints_of = require "perilune.plan.constraints"
local buckets = require "perilune.plan.buckets"
local options = require "perilune.plan.options"
local runtime = require "perilune.plan.runtime"
local storage = require "perilune.plan.storage"
local perf = require "perilune.plan.perf"
local topologies = require "perilune.plan.topology"
local costs = require "perilune.plan.objectives"
local sharding_types = require "perilune.plan.sharding_types"
local kinds = require "perilune.plan.kinds"
local signature = require "perilune.signature"

local M = {}

--- What TorchRec's sharders offer, in its order.
local pooled = sharding_types.names(function(t) return not t.cuts_rows end)
local pooled_on_device = sharding_types.names()
local sequence = sharding_types.names(function(t) return not t.in_node end)
local by_kind = {
  EmbeddingBagCollection = function(device) return device == "cpu" and pooled or pooled_on_device end,
  EmbeddingCollection = function() return sequence end,
}
by_kind.EmbeddingBag, by_kind.FeatureProcessedEmbeddingBagCollection = by_kind.EmbeddingBagCollection,
  by_kind.EmbeddingBagCollection

local function type_of(name)
  return sharding_types.of[util.one_of("compute_kernels", "sharding_type", name, sharding_types.names())]
end

--- TorchRec's matrix of types and kernels: M.torchrec_sharder:sharding_types(device, kind),
--- :compute_kernels(sharding_type, device).
M.torchrec_sharder = {}
function M.torchrec_sharder:sharding_types(device, kind) -- luacheck: ignore 212
  if not by_kind[kind] then util.one_of("EmbeddingEnumerator", "the kind of a collection", kind, util.keys(by_kind)) end
  return by_kind[kind](device)
end
function M.torchrec_sharder:compute_kernels(sharding_type, device) -- luacheck: ignore 212
  if type_of(sharding_type).replica then return { "dense" } end
  return device == "cuda" and { "fused", "fused_uvm", "fused_uvm_caching" } or { "fused" }
end

--- What Perilune's modules can do on every device. Replicas are trained by the collection's own optimizer, so that the
--- plan does not change what is learned.
M.perilune_sharder = {}
function M.perilune_sharder:sharding_types(_, kind) -- luacheck: ignore 212
  return kind == "EmbeddingCollection" and sequence or pooled_on_device
end
function M.perilune_sharder:compute_kernels(sharding_type, device) -- luacheck: ignore 212
  if type_of(sharding_type).replica or device ~= "cuda" then return { "fused" } end
  return { "fused", "fused_uvm", "fused_uvm_caching" }
end

--- Those of `offered` that a constraint allows.
local function allowed(offered, list)
  local known = list and util.index_of(list)
  local out = {}
  for _, name in ipairs(offered) do
    if not known or known[name] then out[#out + 1] = name end
  end
  return out
end

--- The types of a table: some only where the user asks for them.
local function types_of(constraint, offered, kind)
  local out = {}
  for _, name in ipairs(allowed(offered, constraint.sharding_types)) do
    local t = sharding_types.of[name]
    local guarded = t and (t.asked_for or kind == "FeatureProcessedEmbeddingBagCollection" and t.cuts_rows)
    if constraint.sharding_types or not guarded then out[#out + 1] = name end
  end
  return out
end

local EmbeddingEnumerator = util.seal(util.class "EmbeddingEnumerator")
M.EmbeddingEnumerator = EmbeddingEnumerator

--- EmbeddingEnumerator { topology =, batch_size = 512, constraints = table name (or path.name) -> ParameterConstraints,
--- estimators = list (default: TorchRec's), sharder = of collections that name none (default: torchrec_sharder), cost =
--- function(perf, option, shard, topology), called after the estimators: it may change the milliseconds of one shard
--- (fields of perf, options.lua) }
function EmbeddingEnumerator:init(args)
  local a = util.named("EmbeddingEnumerator", args, { topology = util.required.table, batch_size = util.whole(512, 1),
    constraints = util.optional.table, estimators = util.optional.list, sharder = M.torchrec_sharder,
    cost = util.optional })
  for name, kind in util.ordered { topology = "Topology", constraints = "constraints", sharder = "sharder",
    estimators = "estimators" } do
    if a[name] ~= nil then signature.value("EmbeddingEnumerator", name, a[name], kind) end
  end
  self.topology, self.constraints, self.sharder = a.topology, a.constraints or {}, a.sharder
  self.batch_size = a.batch_size
  self.own_estimators = a.estimators ~= nil and #a.estimators > 0
  self.estimators = a.estimators or { perf.EmbeddingPerfEstimator { topology = a.topology },
    storage.EmbeddingStorageEstimator { topology = a.topology } }
  if a.cost ~= nil then
    if not util.is_callable(a.cost) then
      P.fail(("EmbeddingEnumerator: cost is a %s, wanted a function(perf, option, shard, topology)"):format(
        type(a.cost)))
    end
    self.estimators = util.copy(self.estimators)
    table.insert(self.estimators, costs.Cost(a.cost, a.topology))
  end
end

--- An error unless each run of options has bytes and milliseconds, as users' estimators may have left them; then sums
--- are those of what is there.
local function check_estimates(list)
  for _, option in ipairs(list) do
    for i, run in ipairs(option.runs) do
      local where = ("runs[%d] of table '%s' (%s, %s)"):format(i, option.fqn, option.sharding_type,
        option.compute_kernel)
      for _, field in ipairs { "storage", "perf" } do
        local numbers = signature.value("estimators", ("%s of %s, after them,"):format(field, where), run[field],
          "table")
        for _, name in ipairs(field == "perf" and costs.parts or topologies.tiers) do
          local x = numbers[name]
          if type(x) ~= "number" or not (x >= 0 and x < math.huge) then
            P.fail(("estimators: %s.%s of %s is %s after them, allowed: finite numbers >= 0 (%s)"):format(field, name,
              where, signature.text(x), field == "perf" and "milliseconds" or "bytes"))
          end
        end
      end
      run.perf.total = perf.total(run.perf)
    end
    option:sum_storage()
    option:sum_perf()
  end
end

--- Estimate options again, after a change of theirs.
function EmbeddingEnumerator:populate_estimates(list)
  for _, estimator in ipairs(self.estimators) do estimator:estimate(list) end
  if self.own_estimators then check_estimates(list) end
end

--- The fields that all options of a table share.
function EmbeddingEnumerator:_shared_fields(collection, config, constraint)
  local n = #config.feature_names
  local function numbers(key, default) return constraints_of.per_feature(constraint, key, config.name, n, default) end
  local weighted, own = constraint.is_weighted, collection.table_fused_params
  if weighted == nil then weighted = collection.is_weighted or false end
  return { path = collection.path, name = config.name, rows = config.num_embeddings, dim = config.embedding_dim,
    data_type = config.data_type or "FP32", is_pooled = collection.kind ~= "EmbeddingCollection",
    is_weighted = weighted, input_lengths = numbers("pooling_factors", 1), num_poolings = numbers("num_poolings", 1),
    batch_sizes = numbers("batch_sizes", self.batch_size), cache_params = constraint.cache_params,
    output_dtype = constraint.output_dtype or collection.output_dtype,
    optimizer = collection.optimizers and collection.optimizers[config.name] or collection.optimizer,
    fused_params = own and own[config.name] or collection.fused_params,
    map = collection.maps and collection.maps[config.name] }
end

--- Ways of a table that its sharder offers and its constraint allows, less those that the runtime refuses: a list of {
--- sharding_type, kernel }; and why it refuses the others: a list of { way = "row_wise fused", text = }.
function EmbeddingEnumerator:_ways(collection, shared, constraint)
  local device, sharder, list, refused = self.topology.compute_device, collection.sharder or self.sharder, {}, {}
  local offered = signature.value("EmbeddingEnumerator", "what sharder:sharding_types returned",
    sharder:sharding_types(device, collection.kind), "strings")
  local way = util.copy(shared)
  for _, sharding_type in ipairs(types_of(constraint, offered, collection.kind)) do
    local kernels = signature.value("EmbeddingEnumerator", "what sharder:compute_kernels returned",
      sharder:compute_kernels(sharding_type, device), "strings")
    for _, kernel in ipairs(allowed(kernels, constraint.compute_kernels)) do
      way.sharding_type, way.compute_kernel = sharding_type, kernel
      local why = runtime.refusal(way)
      if why then refused[#refused + 1] = { way = sharding_type .. " " .. kernel, text = why }
      else list[#list + 1] = { sharding_type, kernel } end
    end
  end
  return list, refused, offered
end

--- The options of one table, onto `list`.
function EmbeddingEnumerator:_add_table(list, collection, config)
  local topology = self.topology
  local constraint = constraints_of.for_table(self.constraints, collection.path, config.name)
  if constraint.device_group and constraint.device_group ~= topology.compute_device then return end
  local shared = self:_shared_fields(collection, config, constraint)
  local ways, refused, offered = self:_ways(collection, shared, constraint)
  for _, way in ipairs(ways) do
    local fields = util.copy(shared)
    fields.id, fields.sharding_type, fields.compute_kernel = #list + 1, way[1], way[2]
    fields.runs = shared.map and sharding_types.of[way[1]].way == "rank_sums"
      and buckets.runs(shared.map, topology.world_size, config.embedding_dim)
      or options.runs(way[1], config.num_embeddings, config.embedding_dim, topology, constraint.min_partition)
    list[#list + 1] = options.ShardingOption(fields)
  end
  if #ways > 0 then return end
  if refused[1] then
    P.fail(("EmbeddingEnumerator: table '%s' of module '%s': there is no way to train it with %s under its "
      .. "constraints (%s; %s): %s: %s")
      :format(config.name, collection.path, shared.optimizer, table.concat(constraint.sharding_types or { "any type" },
        ", "), table.concat(constraint.compute_kernels or { "any kernel" }, ", "), refused[1].way, refused[1].text))
  end
  P.fail(("EmbeddingEnumerator: table '%s' of module '%s': its constraints (%s; %s) leave none of the sharding types "
    .. "%s with a compute kernel on a %s%s"):format(config.name, collection.path,
    table.concat(constraint.sharding_types or { "any type" }, ", "),
    table.concat(constraint.compute_kernels or { "any kernel" }, ", "), table.concat(offered, ", "),
    topology.compute_device, (collection.sharder or self.sharder) == M.torchrec_sharder
    and ": what TorchRec's modules can do there; sharder = plan.perilune_sharder offers what Perilune's can" or ""))
end

--- All options of a model's tables, in a fixed order: collections from the last to the first (as TorchRec walks them),
--- their tables, types, kernels; each with its estimates.
function EmbeddingEnumerator:enumerate(collections)
  constraints_of.check("EmbeddingEnumerator", self.constraints, collections)
  local list = {}
  for i = #collections, 1, -1 do
    for _, config in ipairs(collections[i].tables) do self:_add_table(list, collections[i], config) end
  end
  self:populate_estimates(list)
  return list
end

kinds.methods(EmbeddingEnumerator, { populate_estimates = "list: options_with_ids", enumerate = "collections: model",
  _shared_fields = "collection: planned_module, config: planned_table, constraint: constraint",
  _ways = "collection: planned_module, shared: table, constraint: constraint",
  _add_table = "list: list, collection: planned_module, config: planned_table" })
for _, name in ipairs { "torchrec_sharder", "perilune_sharder" } do
  signature.check(name .. ":", M[name], { sharding_types = "self: sharder, device: string, kind: string",
    compute_kernels = "self: sharder, sharding_type: string, device: string" })
end

return M
