-- quantize.lua: a model to serve, made of a trained one: a copy whose embedding collections are quantized ones
-- (quant.lua, fp_quant.lua).
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Module = require "perilune.nn.module"
local copies = require "perilune.embed.copies"
local EmbeddingBagCollection = require "perilune.embed.bag"
local EmbeddingCollection = require "perilune.embed.sequence"
local FeatureProcessedEmbeddingBagCollection = require "perilune.embed.fp_bag"
local fp_quant = require "perilune.embed.fp_quant"
local quant = require "perilune.embed.quant"

local M = {}

local arguments = {
  module = util.required,                       -- an nn.Module: the model, or a collection
  dtype = "INT8",                               -- of rows: INT8, INT4, INT2, FP8, FP16, BF16, FP32
  output_dtype = "FP32",                        -- of what a lookup gives: FP32, FP16, BF16
  per_table_weight_dtype = util.optional.table, -- table name -> dtype of its own
  pruned = util.optional.table,                 -- table name -> which rows are left (remap.lua)
  additional_mapping = util.optional.list,      -- list of { class, class with from_float(module, args) }; they come
                                                -- before the usual ones
  bounds_check_mode = "WARNING",
  device = util.optional,                       -- of the quantized collections; default: that of each
  inplace = false,                              -- TorchRec's; the model that is trained always stays as it is
}

--- Pairs of classes, checked.
local function mapping_of(func, given)
  local list = {}
  local function is_class(x) return type(x) == "table" and rawget(x, "class_name") ~= nil end
  for i, pair in ipairs(given or {}) do
    if not (util.is_plain(pair) and is_class(pair[1]) and is_class(pair[2])
      and type(pair[2].from_float) == "function") then
      P.fail(("%s: additional_mapping[%d] is %s, wanted { a class of modules, a class with from_float }"):format(func,
        i, errors.kind(pair)))
    end
    list[i] = pair
  end
  list[#list + 1] = { EmbeddingBagCollection, quant.QuantEmbeddingBagCollection }
  list[#list + 1] = { EmbeddingCollection, quant.QuantEmbeddingCollection }
  list[#list + 1] = { FeatureProcessedEmbeddingBagCollection, fp_quant.QuantFeatureProcessedEmbeddingBagCollection }
  return list
end

--- The entries of `map` for the tables of a collection, noted in `used`; nil: none.
local function own(map, collection, used)
  local result
  local tables = collection.tables or collection.embedding_bag_configs and collection:embedding_bag_configs()
  for _, t in ipairs(map and tables or {}) do
    if map[t.name] ~= nil then
      result, used[t.name] = result or {}, true
      result[t.name] = map[t.name]
    end
  end
  return result
end

local function check_used(func, what, map, used)
  for name in util.ordered(map or {}) do
    if not used[name] then
      P.fail(("%s: %s names table '%s', which no collection that is quantized has"):format(func, what, tostring(name)))
    end
  end
end

--- A copy of a.module (a model or a collection) in evaluation mode, with quantized collections in the place of its
--- embedding collections. They share nothing: a.module may be trained on. Also returns a list of { path =, module = }
--- of the quantized collections.
function M.quantize_embeddings(args)
  local func = "quantize_embeddings"
  local a = util.named(func, args, arguments)
  if not Module.is(a.module) then
    P.fail(("%s: module is %s, wanted an nn.Module"):format(func, errors.kind(a.module)))
  end
  if a.inplace then
    P.fail(func .. ": inplace is true, allowed: false: tables that were trained would stop to learn, and nothing "
      .. "could say so; the copy that is returned has no other memory than its quantized rows and the dense part, and "
      .. "the model may be dropped")
  end
  local mapping, made, used_types, used_pruned = mapping_of(func, a.additional_mapping), {}, {}, {}
  local within, quantized = {}, {} -- modules of one that becomes another as a whole; that one -> the other
  for _, entry in ipairs(a.module:named_modules()) do
    local module = entry.module
    if type(module.local_shards) == "function" then
      P.fail(("%s: '%s' is a %s, whose rows are in shards; gather its state (shard.gather_state_dict) into an "
        .. "unsharded model, quantize that, and shard it again"):format(func, entry.path, module.class_name))
    end
    for _, pair in ipairs(within[module] and {} or mapping) do
      if pair[1].is(module) then
        for _, inner in ipairs(module:modules()) do within[inner] = true end
        made[#made + 1] = { path = entry.path, module = pair[2].from_float(module, {
          dtype = a.dtype, output_dtype = a.output_dtype, bounds_check_mode = a.bounds_check_mode, device = a.device,
          per_table_weight_dtype = own(a.per_table_weight_dtype, module, used_types),
          pruned = own(a.pruned, module, used_pruned),
        }) }
        quantized[module] = made[#made].module
        break
      end
    end
  end
  check_used(func, "per_table_weight_dtype", a.per_table_weight_dtype, used_types)
  check_used(func, "pruned", a.pruned, used_pruned)
  if #made == 0 then
    P.fail(("%s: '%s' has no module that could be quantized; those are: %s"):format(func, a.module.class_name,
      table.concat(util.map(mapping, function(pair) return pair[1].class_name end), ", ")))
  end
  return copies.copy_with(a.module, nil, quantized):eval(), made
end

return M
