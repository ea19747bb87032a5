-- embedding_bag.lua: nn.EmbeddingBag over ranks: one table, whose bags are ids and offsets. DistributedModelParallel
-- replaces EmbeddingBags when its `sharders` have an EmbeddingBagSharder (else they are a part of the dense model); the
-- plan calls the table "weight".
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local jagged = require "perilune.jagged"
local nn = require "perilune.nn"
local awaitable = require "perilune.dist.awaitable"
local config = require "perilune.embed.config"
local types = require "perilune.plan.types"
local pieces = require "perilune.shard.pieces"
local ShardedEmbeddingModule = require "perilune.shard.embedding"
local ShardedModule = require "perilune.shard.module"
local ModuleSharder = require("perilune.shard.sharder").ModuleSharder
local signature = require "perilune.signature"

local M = {}

local EmbeddingAwaitable = awaitable.lazy_class("EmbeddingAwaitable", ShardedEmbeddingModule.OutputAwaitable)

--- ShardedEmbeddingBag { num_embeddings =, embedding_dim =, mode = "sum", include_last_offset = false, plan = { weight
--- = ... }, group =, ... }: other arguments are in embedding.lua, beside tables and is_weighted. Its result is a tensor
--- [bags, embedding_dim].
local ShardedEmbeddingBag = ShardedEmbeddingModule:extend "ShardedEmbeddingBag"
ShardedEmbeddingBag.OutputAwaitable = EmbeddingAwaitable
M.ShardedEmbeddingBag = ShardedEmbeddingBag
ShardedEmbeddingBag.codec_slots = {
  POOLED_EMBEDDINGS_ALL_TO_ALL = "all_to_all", POOLED_EMBEDDINGS_REDUCE_SCATTER = "reduce_scatter",
}
function ShardedEmbeddingBag:_parameter_name() return "weight" end -- luacheck: ignore 212

--- The one table, and the one feature.
local NAME, KEY = "weight", "input"
local keys = { KEY }

local function table_of(a)
  return config.EmbeddingBagConfig { name = NAME, num_embeddings = a.num_embeddings, embedding_dim = a.embedding_dim,
    feature_names = keys, pooling = a.mode == "mean" and "MEAN" or "SUM" }
end

local own = { "num_embeddings", "embedding_dim", "mode", "include_last_offset" }

function ShardedEmbeddingBag:init(args)
  local func = self.class_name
  local base = type(args) == "table" and util.copy(args) or {}
  local mine = {}
  for _, name in ipairs(own) do mine[name], base[name] = base[name], nil end
  local a = util.named(func, mine, { num_embeddings = util.required.number, embedding_dim = util.required.number,
    mode = "sum", include_last_offset = false })
  for _, name in ipairs { "tables", "is_weighted" } do
    if base[name] ~= nil then
      P.fail(("%s: no argument '%s': it has one table, and weights in mode 'sum'"):format(func, name))
    end
  end
  self.mode, self.include_last_offset = util.one_of(func, "mode", a.mode, { "sum", "mean" }), a.include_last_offset
  self.num_embeddings, self.embedding_dim = a.num_embeddings, a.embedding_dim
  base.tables, base.is_weighted = { table_of(a) }, a.mode == "sum"
  ShardedEmbeddingModule.init(self, base)
  self:_keep_arguments(args)
end

-- -- input ------------------------------------------------------------------------------------------------------------

local function fail(self, text, ...) P.fail((self.class_name .. ": " .. text):format(...)) end

--- The ids as one row, the complete offsets (i64) of their bags, and the weights.
local function bags_of(self, ids, offsets, weights)
  if ids:dim() > 2 or ids:dim() < 1 then fail(self, "ids are %s, wanted [n] or [bags, length]", tostring(ids)) end
  if weights ~= nil then
    if self.mode ~= "sum" then fail(self, "per_sample_weights with mode '%s', allowed: sum", self.mode) end
    if table.concat(weights:shape(), ", ") ~= table.concat(ids:shape(), ", ") then
      fail(self, "per_sample_weights are %s, wanted one for each of the ids, %s", tostring(weights), tostring(ids))
    end
  end
  if ids:dim() == 2 then
    if offsets ~= nil then fail(self, "offsets beside ids [bags, length], whose rows are the bags; leave them out") end
    local bags, length = ids:size(1), ids:size(2)
    return ids:reshape(-1), Tensor.full({ bags }, length, "i32", ids:device()), weights and weights:reshape(-1)
  end
  if not offsets or offsets:dim() ~= 1 then
    fail(self, "offsets are %s, wanted [bags%s] beside ids [n]", tostring(offsets), self.include_last_offset and " + 1"
      or "")
  end
  if offsets:dtype() ~= "i64" and offsets:dtype() ~= "i32" then
    fail(self, "offsets are %s, allowed: i64, i32", offsets:dtype())
  end
  local first, n = offsets:to("i64"):to_list(), ids:size(1)
  if not self.include_last_offset then first[#first + 1] = n end
  local last = first[#first] or fail(self, "offsets are empty, wanted at least the last one (include_last_offset)")
  local lengths = {}
  for b = 1, #first - 1 do
    lengths[b] = first[b + 1] - first[b]
    if b == 1 and first[1] ~= 0 or lengths[b] < 0 then
      fail(self, "offsets[%d] is %d, allowed: 0 first, and no less than the one before", lengths[b] < 0 and b or 0,
        lengths[b] < 0 and first[b + 1] or first[1])
    end
  end
  if #lengths == 0 and n > 0 then fail(self, "%d ids, but offsets of no bag that they could belong to", n) end
  if last ~= n then fail(self, "the last offset is %d, wanted %d, the number of ids (include_last_offset)", last, n) end
  return ids, Tensor.tensor(lengths, "i32", ids:device(), { #lengths }), weights
end

local function batch_of(self, ids, offsets, weights)
  local lengths
  ids, lengths, weights = bags_of(self, ids, offsets, weights)
  if self.mode == "sum" and not weights then weights = Tensor.ones({ ids:numel() }, "f32", ids:device()) end
  return jagged.KeyedJaggedTensor { keys = keys, values = ids, lengths = lengths, weights = weights,
    stride = lengths:numel() }
end

--- Ids, offsets and per-sample weights, as nn.EmbeddingBag takes them.
function ShardedEmbeddingBag:input_dist(ids, offsets, per_sample_weights)
  return ShardedEmbeddingModule.input_dist(self, self:_at_home(batch_of, self, ids, offsets, per_sample_weights))
end

ShardedEmbeddingBag.forward = ShardedModule.forward -- the embedding modules' takes one argument
ShardedEmbeddingModule._check_arguments(ShardedEmbeddingBag,
  "ids: tensor, offsets: tensor?, per_sample_weights: tensor?")

--- Anything goes: EmbeddingBagSharder has seen to it that nothing of before is in files.
function ShardedEmbeddingBag:try_copy_from(module) end -- luacheck: ignore 212
--- Take this rank's rows of an nn.EmbeddingBag.
function ShardedEmbeddingBag:copy_from(module)
  local weight = module.weight:detach()
  self:_take_frozen(function() return not module.weight:describe().requires_grad end)
  pieces.copy(self:local_shards(), { table_rows = function(_, _, _, row, n) return weight:slice(1, row, row + n) end })
end

-- -- its sharder ------------------------------------------------------------------------------------------------------

local EmbeddingBagSharder = util.class("EmbeddingBagSharder", ModuleSharder)
M.EmbeddingBagSharder = EmbeddingBagSharder
EmbeddingBagSharder.module_type = nn.EmbeddingBag

function EmbeddingBagSharder:shardable_parameters(module) return { table_of(module) } end -- luacheck: ignore 212

function EmbeddingBagSharder:shard(module, plan, env, device, path)
  if module.padding_idx or module.max_norm then
    P.fail(("EmbeddingBagSharder: module '%s' has %s, which sharded tables have not"):format(path or "",
      module.padding_idx and "a padding_idx" or "a max_norm"))
  end
  local entry = (types.EmbeddingModuleShardingPlan.is(plan) and plan.tables or plan)[NAME]
  if entry and entry.cache_params and entry.cache_params.directory then
    P.fail(("EmbeddingBagSharder: module '%s' has cache_params with a directory: nobody could go on from files there, "
      .. "since an nn.EmbeddingBag always brings numbers of its own; allowed: no directory, or an "
      .. "EmbeddingBagCollection instead"):format(
      path or ""))
  end
  return ShardedEmbeddingBag {
    num_embeddings = module.num_embeddings, embedding_dim = module.embedding_dim, mode = module.mode,
    include_last_offset = module.include_last_offset, plan = plan, group = env.pg, device = device,
    fused_params = self.fused_params, gradient_division = self.gradient_division,
    qcomm_codecs_registry = self.qcomm_codecs_registry, name = path,
  }
end

signature.object("unsharded_bag", "an nn.EmbeddingBag", { weight = "tensor", mode = "string" })
signature.check("ShardedEmbeddingBag:", ShardedEmbeddingBag, { copy_from = "self: table, module: unsharded_bag" })
signature.check("EmbeddingBagSharder:", EmbeddingBagSharder, {
  shardable_parameters = "self: Sharder, module: unsharded_bag",
  shard = "self: Sharder, module: unsharded_bag, plan: table, env: env_of_group, device: any, path: string?",
})

return M
