-- utils.lua: small functions around sharded models, under the names of torchrec.distributed.utils.
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local sparse = require "perilune.sparse"
local nn = require "perilune.nn"
local config = require "perilune.embed.config"
local TableCollection = require "perilune.embed.collection"
local ShardedModule = require "perilune.shard.module"
local state_dicts = require "perilune.tensor.state_dict"
local signature = require "perilune.signature"

local M = {}

-- -- names of a state_dict --------------------------------------------------------------------------------------------

--- "prefix.name", or the one of them that is not empty.
function M.append_prefix(prefix, name)
  if prefix == "" then return name end
  return name == "" and prefix or prefix .. "." .. name
end

--- The entries "name.rest" of a state_dict, as a new one from "rest".
function M.filter_state_dict(state_dict, name)
  local result, start = {}, name .. "."
  for key, value in util.ordered(state_dict) do
    if type(key) == "string" and key:sub(1, #start) == start then result[key:sub(#start + 1)] = value end
  end
  return result
end

--- Put `prefix` (with its dot, if it should have one) before all names of a state_dict, in place.
function M.add_prefix_to_state_dict(state_dict, prefix)
  local renamed = {}
  for key, value in util.ordered(state_dict) do renamed[prefix .. tostring(key)] = value end
  for _, key in ipairs(util.keys(state_dict)) do state_dict[key] = nil end
  for key, value in util.ordered(renamed) do state_dict[key] = value end
end

--- x, or an error if it is nil.
function M.none_throws(x, message)
  if x == nil then P.fail("none_throws: " .. tostring(message or "the value is nil")) end
  return x
end

-- -- options of fused tables ------------------------------------------------------------------------------------------

--- fused_params of a module with those of one table (or of its optimizer) over them, as a new table; "lr" is called
--- learning_rate.
function M.merge_fused_params(fused_params, param_fused_params)
  local merged = {}
  for _, params in ipairs { fused_params or {}, param_fused_params or {} } do
    for name, value in util.ordered(params) do merged[name == "lr" and "learning_rate" or name] = value end
  end
  return merged
end

--- fused_params with what the plan's entry of a table says of its cache, as a new table.
function M.add_params_from_parameter_sharding(fused_params, parameter_sharding)
  local merged = util.copy(fused_params or {})
  merged.cache_params = parameter_sharding.cache_params or merged.cache_params
  return merged
end

--- fused_params with the dtypes of tensors ("f32") in place of data types ("FP32"), as a new table.
function M.convert_to_fbgemm_types(fused_params)
  local converted = util.copy(fused_params)
  for _, name in ipairs { "output_dtype", "cache_precision", "weights_precision" } do
    local value = converted[name]
    if value ~= nil then
      util.one_of("convert_to_fbgemm_types", name, value, util.keys(config.data_types))
      converted[name] = config.data_types[value]
    end
  end
  return converted
end

--- Optimizers of the dense part, and those of fused tables that do the same.
local fused_of = { SGD = "sgd", Adagrad = "adagrad", Adam = "adam", RowWiseAdagrad = "rowwise_adagrad" }

--- The optimizer of fused_params that does what a class of nn.optim does.
function M.optimizer_type_to_emb_opt_type(class)
  local name = type(class) == "table" and rawget(class, "class_name")
  if name and fused_of[name] and rawequal(nn.optim[name], class) then return fused_of[name] end
  P.fail(("optimizer_type_to_emb_opt_type: the class is %s, allowed: nn.optim.%s"):format(name or errors.kind(class),
    table.concat(util.keys(fused_of), ", nn.optim.")))
end

-- -- models -----------------------------------------------------------------------------------------------------------

--- Whether a module is, or holds, one that is sharded.
local function is_sharded(module)
  for _, m in ipairs(module:modules()) do
    if ShardedModule.is(m) then return true end
  end
  return false
end

--- Paths of the largest parts of a model without sharded modules, in the model's order; of a model that has no sharded
--- module at all, none.
function M.get_unsharded_module_names(model)
  local list = {}
  local function visit(module, path)
    for _, c in ipairs(ShardedModule.is(module) and {} or module:named_children()) do
      local name = M.append_prefix(path, c.name)
      if is_sharded(c.module) then visit(c.module, name) else list[#list + 1] = name end
    end
  end
  if is_sharded(model) then visit(model, "") end
  return list
end

--- Give all collections of a module that are descriptions ("meta"), or were not used yet, their memory and start
--- values, on `device` (nil: the default one). Other modules have theirs when they are made.
function M.init_parameters(module, device)
  for _, m in ipairs(module:modules()) do
    if TableCollection.is(m) and not m:is_materialised() then
      for _, t in ipairs(m.data_types and {} or m.tables) do
        if t.data_type ~= m.tables[1].data_type then
          P.fail(("init_parameters: table '%s' holds %s, table '%s' %s; allowed in memory: one data_type"):format(
            t.name, t.data_type, m.tables[1].name, m.tables[1].data_type))
        end
      end
      m.device = device or m.device ~= "meta" and m.device
      m:materialise()
    end
  end
end

--- PermutePooledEmbeddings(dims, permute), or by TorchRec's names { embs_dims =, permute = }: called with pooled rows
--- of blocks of dims[i] columns, it returns them in the order of `permute` (numbers of blocks from 0; repeats and
--- subsets are fine). With gradient.
local PermutePooledEmbeddings = nn.Module:extend "PermutePooledEmbeddings"
M.PermutePooledEmbeddings = PermutePooledEmbeddings
function PermutePooledEmbeddings:init(dims, permute)
  if permute == nil and type(dims) == "table" and dims[1] == nil then
    local a = util.named("PermutePooledEmbeddings", dims,
      { embs_dims = util.required.list, permute = util.required.list })
    dims, permute = a.embs_dims, a.permute
  end
  signature.value("PermutePooledEmbeddings", "dims", dims, "list")
  signature.value("PermutePooledEmbeddings", "permute", permute, "list")
  local offsets = setmetatable({ 0 }, {})
  for i, dim in ipairs(dims) do
    offsets[i + 1] = offsets[i] + util.integer("PermutePooledEmbeddings", ("dims[%d]"):format(i), dim, 0)
  end
  for i, block in ipairs(permute) do
    util.integer("PermutePooledEmbeddings", ("permute[%d]"):format(i), block, 0, #dims - 1)
  end
  self._offsets, self._permute = offsets, setmetatable(util.copy(permute), {})
end
function PermutePooledEmbeddings:forward(pooled)
  if not Tensor.is(pooled) or pooled:dim() ~= 2 or pooled:size(2) ~= self._offsets[#self._offsets] then
    P.fail(("PermutePooledEmbeddings: pooled is %s, wanted a tensor [batch, %d]"):format(signature.text(pooled),
      self._offsets[#self._offsets]))
  end
  return sparse.permute_pooled_embs(pooled, self._offsets, self._permute)
end

signature.kind("state_dict", "a state_dict: a table of names, no object", state_dicts.is_dict)
signature.check("utils.", M, {
  append_prefix = "prefix: string, name: string", filter_state_dict = "state_dict: state_dict, name: string",
  add_prefix_to_state_dict = "state_dict: state_dict, prefix: string",
  merge_fused_params = "fused_params: table?, param_fused_params: table?",
  add_params_from_parameter_sharding = "fused_params: table?, parameter_sharding: ParameterSharding",
  convert_to_fbgemm_types = "fused_params: table", get_unsharded_module_names = "model: Module",
  init_parameters = "module: Module, device: device?",
})

return util.face("peri.shard.utils", M)
