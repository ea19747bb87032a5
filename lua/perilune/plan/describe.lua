-- plan/describe.lua: a model as planners take it (enumerators.lua), without its weights: of an nn.Module, or of a plain
-- table.
local P = require "perilune.ffi"
local util = require "perilune.util"
local nn = require "perilune.nn"
local embed = require "perilune.embed.config"
local sharding_types = require "perilune.plan.sharding_types"
local signature = require "perilune.signature"
local data_bytes = require("perilune.plan.constraints").data_bytes
require "perilune.plan.kinds"

local M = {}

--- Collections whose tables planners place, and how sharders call their kind.
local kinds = util.index_of { "EmbeddingBagCollection", "EmbeddingCollection",
  "FeatureProcessedEmbeddingBagCollection" }

--- Collections of raw ids, whose tables and rows are those of a collection within them.
local of_raw_ids = util.index_of { "ManagedCollisionEmbeddingBagCollection", "ManagedCollisionEmbeddingCollection" }

--- What may be done with tables of raw ids.
local raw_sharder = { sharding_types = function()
  return sharding_types.names(function(t) return not (t.replica or t.cuts_columns or t.in_node) end)
end, compute_kernels = function(_, _, device)
  return device == "cuda" and { "fused", "fused_uvm_caching" } or { "fused" }
end }

--- The collection whose tables a module trains: itself, or one that it has.
local function tables_within(module)
  if of_raw_ids[module.class_name] then return module:embedding_module() end
  return rawget(module, "_embedding_bag_collection") or module
end

--- What is known of a collection of a model. sharder (or nil): its sharder, whose fused_params count where the
--- collection has none. maps: the modules whose maps lie beside the rows, by table. dense: nothing trains the tables in
--- the backward pass, so the optimizer of the dense part does.
function M._collection(path, module, tables, sharder)
  local raw, within = of_raw_ids[module.class_name], tables_within(module)
  local params, own = rawget(within, "fused_params") or nil, rawget(within, "table_fused_params") or nil
  if sharder then params, own = sharder:_params_of(within) end
  local kind = raw and within.class_name or module.class_name
  local optimizers, output = own and {}, params and params.output_dtype
  for name, given in util.ordered(own or {}) do
    optimizers[name] = embed.optimizer_of("table_fused_params", given.optimizer)
    output = output or given.output_dtype -- a module has one for all of its tables
  end
  local weighted = rawget(within, "_weighted") or kind == "FeatureProcessedEmbeddingBagCollection"
  return { path = path, kind = kinds[kind] and kind or "EmbeddingBagCollection", tables = tables,
    is_weighted = weighted, optimizer = params and embed.optimizer_of("fused_params", params.optimizer) or nil,
    fused_params = params, optimizers = optimizers, table_fused_params = own, output_dtype = output,
    dense = not params and (kinds[module.class_name] or module.class_name == "EmbeddingBag") and true or nil,
    sharder = raw and raw_sharder or nil,
    maps = raw and module:managed_collision_collection():managed_collision_modules() or nil }
end

--- The same of a collection of a DistributedModelParallel, { path =, module =, tables =, sharder = }; of one that is in
--- shards by now what was known of it before (described), as a new table.
function M._of(c)
  return util.copy(c.described or M._collection(c.path, c.module, c.tables, c.sharder))
end

--- The collections of an nn.Module, in its order, with dense_bytes: of the parameters outside of them, and matrices: {
--- out, in } of each of these that is one (as_features = true where what it gives has the dtype of the module's input).
--- Allocates nothing.
function M._module(module)
  local model, within, dense, seen, as_features = { dense_bytes = 0, matrices = {} }, {}, {}, {}, {}
  for _, entry in ipairs(module:named_modules()) do
    local m = entry.module
    if not within[m] and (kinds[m.class_name] or of_raw_ids[m.class_name]) then
      for _, inner in ipairs(m:modules()) do within[inner] = true end
      model[#model + 1] = M._collection(entry.path, m, tables_within(m).tables)
    elseif not within[m] then
      dense[#dense + 1] = m
      if m.wide_kernels then as_features[m[m.wide_kernels]] = true end
    end
  end
  for _, m in ipairs(dense) do
    for _, name in ipairs(m._parameters) do
      local p = rawget(m, name)
      if p and not seen[p] then
        seen[p], model.dense_bytes = true, model.dense_bytes + 4 * p:numel()
        local shape = p:shape()
        if #shape == 2 then
          shape.as_features = as_features[m]
          table.insert(model.matrices, shape)
        end
      end
    end
  end
  return model
end

local function check_tables(where, tables)
  util.whole_list(where, "tables", tables, "tables")
  if #tables == 0 then P.fail(("%s: tables is empty, wanted at least one table"):format(where)) end
  local seen = {}
  return util.map(tables, function(t, i)
    local what = ("%s: tables[%d]"):format(where, i)
    local a = util.named(what, t, { name = util.required.string, num_embeddings = util.required.number,
      embedding_dim = util.required.number, feature_names = util.optional.list, data_type = "FP32",
      pooling = util.optional.string })
    if a.name == "" then P.fail(what .. ": its name is empty") end
    what = ("%s '%s'"):format(what, a.name)
    if a.pooling then util.one_of(what, "pooling", a.pooling, { "SUM", "MEAN" }) end
    util.integer(what, "num_embeddings", a.num_embeddings, 1)
    util.integer(what, "embedding_dim", a.embedding_dim, 1)
    if seen[a.name] then P.fail(("%s: a table of this name comes before it; give each its own"):format(what)) end
    seen[a.name] = true
    if not data_bytes[a.data_type] then util.one_of(what, "data_type", a.data_type, util.keys(data_bytes)) end
    a.feature_names = signature.value(what, "feature_names", a.feature_names or { a.name }, "strings")
    if #a.feature_names == 0 then P.fail(what .. ": feature_names is empty, wanted at least one name") end
    local features = util.index_of(a.feature_names)
    for k, name in ipairs(a.feature_names) do
      if features[name] ~= k then P.fail(("%s: feature '%s' comes twice"):format(what, name)) end
    end
    return a
  end)
end

--- What a model or a collection of it says of its parameters beside tables, checked.
local function check_sums(where, of)
  util.integer(where, "dense_bytes", of.dense_bytes, 0)
  util.integer(where, "buffer_bytes", of.buffer_bytes, 0)
  if of.matrices ~= nil then signature.value(where, "matrices", of.matrices, "matrices_sizes") end
end

--- A table { tables = list } or { { path =, kind =, tables = ... }, ... }, checked.
local function described(given)
  local list = given.tables and { given } or given
  local model = { dense_bytes = given.dense_bytes or 0, buffer_bytes = given.buffer_bytes or 0,
    matrices = given.matrices }
  check_sums("model", model)
  local seen = {}
  for i, c in ipairs(list) do
    local where = ("model[%d]"):format(i)
    local a = util.named(where, c, { path = "", kind = "EmbeddingBagCollection", tables = util.required.list,
      is_weighted = false, optimizer = util.optional.string, dense_bytes = 0, buffer_bytes = 0,
      matrices = util.optional.list })
    util.one_of(where, "kind", a.kind, util.keys(kinds))
    if a.optimizer then a.optimizer = embed.optimizer_of(where, a.optimizer) end
    if seen[a.path] then
      P.fail(("%s: path '%s' is that of model[%d] too; give each its own"):format(where, a.path, seen[a.path]))
    end
    seen[a.path] = i
    check_sums(where, a)
    a.tables = check_tables(where, a.tables)
    model[i] = a
  end
  if #model == 0 then
    P.fail "a model without tables, wanted an nn.Module or { tables = { { name =, num_embeddings =, ... }, ... } }"
  end
  return model
end

--- Of an nn.Module, a table as above, or a function that returns one of these.
function M.of(source)
  if type(source) == "function" then source = source() end
  if nn.Module.is(source) then return M._module(source) end
  if type(source) ~= "table" then
    P.fail(("a model that is a %s, wanted an nn.Module or a table"):format(type(source)))
  end
  return described(source)
end

--- The model that a function of planners was given: of an nn.Module, or of one plain collection, what `of` makes of it.
function M._model(func, model)
  if nn.Module.is(model) or type(model) == "table" and rawget(model, "tables") ~= nil then model = M.of(model) end
  return signature.value(func, "model", model, "model")
end

signature.check("plan.describe.", M, { _model = "func: string, model: any",
  _collection = "path: string, module: Module, tables: list, sharder: any", _module = "module: Module" })

return M
