-- mc_embedding.lua: ManagedCollisionEmbeddingBagCollection and ManagedCollisionEmbeddingCollection over ranks: raw ids
-- go to the rank that has their bucket, become rows there, and are looked up. Row-wise and table-wise, fused tables, in
-- memory or in files.
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local awaitable = require "perilune.dist.awaitable"
local group_of = require("perilune.dist.group").group_of
local embed = require "perilune.embed.mc_embedding"
local bag = require "perilune.shard.bag"
local sequence = require "perilune.shard.sequence"
local mc_collection = require "perilune.shard.mc_collection"
local ShardedEmbeddingModule = require "perilune.shard.embedding"
local ShardingEnv = require "perilune.plan.env"
local ModuleSharder = require("perilune.shard.sharder").ModuleSharder
local ManagedCollisionCollection = require "perilune.embed.mc_collection"
local Moment = require "perilune.embed.mc_moment"
local all_or_none = require("perilune.nn.ranks").all_or_none
local signature = require "perilune.signature"
local C, check = P.C, P.check

local M = {}

--- The batch with rows of the whole tables instead of ids, when the lookup that it belongs to is over.
local Remapped = awaitable.lazy_class("ManagedCollisionCollectionAwaitable", awaitable.Awaitable)
M.ManagedCollisionCollectionAwaitable = Remapped
function Remapped:init(result, rows)
  awaitable.Awaitable.init(self)
  rawset(self, "_result", result)
  rawset(self, "_rows", rows)
end
function Remapped:_wait_impl()
  rawget(self, "_result"):wait()
  return rawget(self, "_rows").remapped
end
function Remapped:_test_impl() return rawget(self, "_result"):test() end

--- `batch` with these rows (a tensor), its features in the order of `names`.
local function arranged(batch, rows, names)
  local with, keys, order, same = batch:with_values(rows), util.index_of(batch:keys()), {}, #batch:keys() == #names
  for i, name in ipairs(names) do
    order[i] = keys[name] - 1
    same = same and order[i] == i - 1
  end
  return same and with or with:permute(order)
end

--- The CollisionMoment of a module's rows and of the maps of `collisions`.
local function moment_of(module, collisions)
  local shards = {}
  for _, s in ipairs(module:local_shards()) do shards[s.table] = s.rows > 0 and s or shards[s.table] end
  return Moment(module.class_name, util.map(module.tables, function(t)
    return { name = t.name, weight = module:_parameter_name(t.name), map = function()
      return collisions:_map_of(t.name)
    end,
      buckets = function() return collisions:_buckets_of(t.name) end,
      file = function() return shards[t.name] and shards[t.name].file() end }
  end), module:in_files())
end

--- What the files of some rank lack is known on all: each finds the same when it is asked for its state. Collective.
local function share_problems(module)
  local list = module.group:all_gather_object(module._moment:problems(), module.class_name)
  for r = #list, 1, -1 do module._moment:know(list[r]) end -- of several ranks the first one's
end

--- Before rows are used for the first time, or after a load: an error of all ranks unless they are those of the maps.
--- Collective.
local function compare(module)
  local moment = module._moment
  local _, err = pcall(moment.check, moment)
  all_or_none({ module.group }, module.class_name, err)
  moment:used()
end

--- The sharded class, over the sharded collection `Base`.
local function sharded_class(Base, class_name, prefix)
  local Sharded = Base:extend("Sharded" .. class_name)
  M["Sharded" .. class_name] = Sharded
  Sharded.parameter_prefix = "_embedding_module." .. prefix

  --- managed_collision_collection = (a ManagedCollisionCollection), return_remapped_features = false, and all arguments
  --- of the sharded collection. Returns what that one does, and then (an awaitable of) the batch with rows instead of
  --- ids.
  function Sharded:init(args)
    local own, f = type(args) == "table" and util.copy(args) or {}, self.class_name
    local mcc = own.managed_collision_collection
    if not ManagedCollisionCollection.is(mcc) then
      P.fail(("%s: managed_collision_collection is %s, wanted a ManagedCollisionCollection"):format(f,
        signature.text(mcc)))
    end
    group_of(f, own.group)
    own.returns_rows = own.return_remapped_features or false
    own.plan = mc_collection.plan_of(own.plan, mcc, ShardingEnv.from_process_group(own.group))
    local maps = { managed_collision_collection = mcc, plan = own.plan, group = own.group, device = own.device,
      returns_rows = own.returns_rows }
    own.collisions = rawget(self, "_managed_collision_collection") -- of before: see ShardedModule:_remake
    if own.collisions then own.collisions:_remake(maps)
    else own.collisions = mc_collection.ShardedManagedCollisionCollection(maps) end
    own.managed_collision_collection, own.return_remapped_features = nil, nil
    Base.init(self, own)
    self._returns = own.returns_rows
    self:add_module("_managed_collision_collection", own.collisions)
    self._moment = moment_of(self, own.collisions)
    own.collisions:_goes_with(self._moment)
    if self:in_files() then share_problems(self) end
    local again = self._made_of -- what a copy is made of
    again.managed_collision_collection, again.return_remapped_features = mcc, own.returns_rows
    again.collisions, again.returns_rows = nil, nil
  end

  function Sharded:copy(device)
    local other = Base.copy(self, device)
    other._managed_collision_collection:_copy_maps(self._managed_collision_collection)
    return other
  end

  function Sharded:_map_mark(name) return self._moment:mark(name) end
  --- See Module:check_moment.
  function Sharded:check_moment()
    self._moment:check()
    check(C.peri_sharded_settle(self:_pointer()))
  end

  function Sharded:_ahead() return C.peri_sharded_ahead(self:_pointer()) > 0 end

  function Sharded:_give_scores() self._managed_collision_collection:_give_scores() end
  function Sharded:managed_collision_collection() return self._managed_collision_collection end
  --- As ShardedManagedCollisionCollection has them.
  function Sharded:set_time(now) self._managed_collision_collection:set_time(now) end
  function Sharded:open_slots() return self._managed_collision_collection:open_slots() end
  --- Counts and rates by table, over all ranks. Collective. (local_statistics of managed_collision_collection is not.)
  function Sharded:statistics() return self._managed_collision_collection:statistics() end
  return Sharded
end

--- Give the class Sharded the stages of a step: input_dist and what follows it.
local function add_stages(Sharded, Base, class_name)
  local Context = util.class(class_name .. "Context", mc_collection.ManagedCollisionCollectionContext)
  M[class_name .. "Context"] = Context
  function Sharded:create_context() return Context() end -- luacheck: ignore 212

  --- Ids to the ranks that have their buckets. In training mode (train()) they are learned there, in evaluation they
  --- are not.
  function Sharded:input_dist(features)
    local maps = self._managed_collision_collection
    maps:_settle_maps()
    if self._moment.open then compare(self) end
    local batch = self:_at_home(maps._hashed, maps, features)
    check(C.peri_sharded_training_set(self:_pointer(), self.training))
    maps:_tell_time(self:_pointer())
    local stage = Base.input_dist(self, batch)
    stage.batch = batch
    return stage
  end

  function Sharded:lookup(dist)
    local stage = Base.lookup(self, dist)
    stage.batch = dist.batch
    return stage
  end

  function Sharded:output(rows)
    if self._returns then
      check(C.peri_sharded_rows(self:_pointer(), rows.work.ptr, Tensor.out))
      rows.remapped = arranged(rows.batch, Tensor.wrap(Tensor.out[0]),
        self._managed_collision_collection:feature_names())
    end
    return Base.output(self, rows)
  end

  function Sharded:output_dist(rows)
    local result = Base.output_dist(self, rows)
    return result, self._returns and Remapped(result, rows) or nil
  end

  ShardedEmbeddingModule._check_arguments(Sharded, "features: KeyedJaggedTensor")
  function Sharded:try_copy_from(module) Base.try_copy_from(self, module:embedding_module()) end
  function Sharded:copy_from(module)
    Base.copy_from(self, module:embedding_module())
    self._managed_collision_collection:copy_from(module:managed_collision_collection())
  end
end

local function define(Base, class_name, unsharded, prefix, configs)
  local Sharded = sharded_class(Base, class_name, prefix)
  add_stages(Sharded, Base, class_name)
  local Sharder = util.class(class_name .. "Sharder", ModuleSharder)
  M[class_name .. "Sharder"] = Sharder
  Sharder.module_type = unsharded
  Sharder.sharding_types = mc_collection.ManagedCollisionCollectionSharder.sharding_types
  Sharder.compute_kernels = mc_collection.ManagedCollisionCollectionSharder.compute_kernels
  function Sharder:shardable_parameters(module) -- luacheck: ignore 212
    local collection = module:embedding_module()
    return collection[configs](collection)
  end
  function Sharder:shard(module, plan, env, device, path)
    local collection = module:embedding_module()
    local params, own = self:_params_of(collection)
    local args = {
      tables = collection[configs](collection), plan = plan, group = env.pg, device = device, name = path,
      managed_collision_collection = module:managed_collision_collection(),
      return_remapped_features = module.return_remapped_features,
      fused_params = params, table_fused_params = own, seed = collection.seed or nil,
      gradient_division = self.gradient_division, qcomm_codecs_registry = self.qcomm_codecs_registry,
    }
    if Base == bag.ShardedEmbeddingBagCollection then args.is_weighted = collection:is_weighted()
    else args.need_indices, args.use_index_dedup = collection:need_indices(), false end
    return Sharded(args)
  end
  signature.check(class_name .. "Sharder:", Sharder, {
    shardable_parameters = "self: Sharder, module: collision_embeddings",
    shard = "self: Sharder, module: collision_embeddings, plan: table, env: env_of_group, device: any, path: string?",
  })
end

signature.object("collision_embeddings",
  "a ManagedCollisionEmbeddingCollection or ManagedCollisionEmbeddingBagCollection",
  { embedding_module = "callable", managed_collision_collection = "callable" })
define(bag.ShardedEmbeddingBagCollection, "ManagedCollisionEmbeddingBagCollection",
  embed.ManagedCollisionEmbeddingBagCollection, "embedding_bags", "embedding_bag_configs")
define(sequence.ShardedEmbeddingCollection, "ManagedCollisionEmbeddingCollection",
  embed.ManagedCollisionEmbeddingCollection, "embeddings", "embedding_configs")

signature.check("ManagedCollisionCollectionAwaitable:", Remapped,
  { init = "self: table, result: awaitable, rows: table" })

return M
