-- sharder.lua: who shards which modules. A class of modules names its sharder in the field `sharder`: a ModuleSharder
-- (a class or an object), or the name of one in peri.shard. DistributedModelParallel asks for it, unless it is given
-- `sharders`.
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local util = require "perilune.util"
local config = require "perilune.embed.config"
local sharding_types = require "perilune.plan.sharding_types"
local types = require "perilune.plan.types"
local signature = require "perilune.signature"

local M = {}

--- Makes sharded modules of unsharded ones (TorchRec's ModuleSharder and BaseEmbeddingSharder). A subclass has
--- `module_type`, the class of modules that it shards, and the methods shard and shardable_parameters.
local ModuleSharder = util.seal(util.class "ModuleSharder")
M.ModuleSharder = ModuleSharder
ModuleSharder.module_type = false

local arguments = {
  fused_params = util.optional.table,    -- of modules that have none of their own; else what theirs leave open
  qcomm_codecs_registry = util.optional, -- operation -> QuantizedCommCodecs (dist/codec.lua)
  gradient_division = util.optional,     -- whether gradients of tables are means over ranks (not TorchRec's)
}

-- fused_params of a sharder: any part of those of a module.
local fused_arguments = util.extended(config.optimizer_arguments, { optimizer = util.optional })

--- What the class takes. Classes below it take more (util.extended).
ModuleSharder.allowed_arguments = arguments

--- Named arguments: fused_params, qcomm_codecs_registry, gradient_division.
function ModuleSharder:init(args)
  local a = util.named(self.class_name, args, self.allowed_arguments)
  if a.fused_params then
    util.named(self.class_name .. ": fused_params", a.fused_params, fused_arguments)
  end
  for name, value in util.ordered(a) do self[name] = value end
end

local function missing(self, method) P.fail(("%s: no method '%s'"):format(self.class_name, method)) end

--- The sharded module (a ShardedModule) of `module`. plan: its EmbeddingModuleShardingPlan; env: a ShardingEnv with a
--- process group; path: of the module in its model. Called by all ranks in the same order.
function ModuleSharder:shard(module, plan, env, device, path) missing(self, "shard") end -- luacheck: ignore 212
--- What a plan has entries for: a list of { name =, num_embeddings =, embedding_dim = }. (TorchRec: a map from names to
--- parameters; here tables may have no memory yet.)
function ModuleSharder:shardable_parameters(module) missing(self, "shardable_parameters") end -- luacheck: ignore 212
--- Names of the sharding types that plans may ask for on a device.
function ModuleSharder:sharding_types(device) return util.keys(sharding_types.of) end -- luacheck: ignore 212
--- Names of the compute kernels that they may ask for.
function ModuleSharder:compute_kernels(sharding_type, device) -- luacheck: ignore 212
  return types.trained_kernels
end

--- Parameters of a module's optimizers: the module's own, over those of the sharder; nil: neither has any.
function ModuleSharder:merged_fused_params(own)
  if not (own and self.fused_params) then return own or self.fused_params end
  local merged = util.copy(self.fused_params)
  for name, value in util.ordered(own) do merged[name] = value end
  return merged
end

--- fused_params and table_fused_params of a sharded module: those of the unsharded collection, each over the sharder's.
function ModuleSharder:_params_of(collection)
  local own
  for name, params in util.ordered(collection.table_fused_params or {}) do
    own = own or {}
    own[name] = self:merged_fused_params(params)
  end
  return self:merged_fused_params(collection.fused_params or nil), own
end

--- What a subclass's `method` names for these arguments: a list of texts.
local function names_of(self, method, a, b)
  local f = self[method]
  if type(f) ~= "function" then
    P.fail(("%s: %s is %s, wanted a method that returns a list of names"):format(self.class_name, method,
      errors.kind(f)))
  end
  local list = f(self, a, b)
  signature.value(self.class_name, ("what %s returns"):format(method), list, "strings")
  return list
end

--- An error unless this sharder can do what the plan of a module says. `from`: the plan, for messages.
function ModuleSharder:check_plan(plan, device, path, from)
  for name, sharding in util.ordered(plan.tables) do
    local function allow(what, value, allowed)
      if util.index_of(allowed)[value] then return end
      P.fail(("%s: %s: module '%s', table '%s': %s '%s', allowed: %s"):format(self.class_name, from, path, name, what,
        tostring(value), table.concat(allowed, ", ")))
    end
    allow("sharding_type", sharding.sharding_type, names_of(self, "sharding_types", device))
    allow("compute_kernel", sharding.compute_kernel, names_of(self, "compute_kernels", sharding.sharding_type, device))
  end
end

-- -- the registry -----------------------------------------------------------------------------------------------------

--- True for subclasses of ModuleSharder.
local function is_class(x)
  while type(x) == "table" and x ~= ModuleSharder do x = rawget(x, "super") end
  return x == ModuleSharder
end

--- Whether `class` is `wanted` or one of its subclasses.
local function derived(class, wanted)
  while class and class ~= wanted do class = rawget(class, "super") end
  return class == wanted
end

--- The sharders of a list, checked.
local function check_list(func, list)
  if type(list) ~= "table" or ModuleSharder.is(list) or is_class(list) then
    P.fail(("%s: sharders is %s, wanted a list of ModuleSharders"):format(func, errors.kind(list)))
  end
  local at = {}
  for i, sharder in ipairs(list) do
    if not ModuleSharder.is(sharder) then
      P.fail(("%s: sharders[%d] is %s, wanted a ModuleSharder (a class is called to make one)"):format(func, i,
        errors.kind(sharder)))
    end
    local class = sharder.module_type
    if type(class) ~= "table" or not rawget(class, "class_name") then
      P.fail(("%s: sharders[%d], %s, says no module_type, the class of modules that it shards"):format(func, i,
        sharder.class_name))
    end
    if at[class] then
      P.fail(("%s: sharders[%d] and sharders[%d] both shard %s; give one of them"):format(func, at[class], i,
        class.class_name))
    end
    at[class] = i
  end
  return list
end

--- What a class names, as a sharder or a class of sharders.
local function named_by(func, class, faces)
  local sharder = class.sharder
  if type(sharder) == "string" then
    sharder = rawget(faces, sharder)
      or P.fail(("%s: the sharder of class %s is '%s', which peri.shard has not; its own: %s"):format(func,
        class.class_name, sharder, "a class made with util.class(name, peri.shard.ModuleSharder), or an object of one"))
  end
  if sharder == nil or ModuleSharder.is(sharder) or is_class(sharder) then return sharder end
  P.fail(("%s: the sharder of class %s is %s, wanted a ModuleSharder"):format(func, class.class_name,
    errors.kind(class.sharder)))
end

--- A function(module) -> its sharder, or nil. list: ModuleSharders that shard, and nothing else does; nil: what the
--- modules' classes name, made with `options`. faces: peri.shard.
function M.registry(func, list, options, faces)
  if list then
    check_list(func, list)
    return function(module)
      local best
      for _, sharder in ipairs(list) do -- the nearest class counts
        local class = sharder.module_type
        if class.is(module) and not (best and derived(best.module_type, class)) then best = sharder end
      end
      return best
    end
  end
  local made = {}
  return function(module)
    local sharder = named_by(func, getmetatable(module), faces)
    if not sharder or ModuleSharder.is(sharder) then return sharder end
    made[sharder] = made[sharder] or sharder(options)
    return made[sharder]
  end
end

signature.kind("Sharder", "a ModuleSharder", ModuleSharder.is)
signature.check("ModuleSharder:", ModuleSharder,
  { check_plan = "self: Sharder, plan: table, device: any, path: string, from: string" })

return M
