-- sharders.lua: Sharders: who shards which modules.
--
-- DistributedModelParallel asks the sharder of a module's class for the sharded one. To shard a class of your own, make
-- a class below ModuleSharder with the field `module_type` and the methods `shard` and `shardable_parameters`, and name
-- it in the module class's field `sharder`, or give it to DistributedModelParallel as one of `sharders`.
---@meta

---@class peri.shard
local shard = {}
---@class peri
local peri = {}

---The base of sharders.
---
---Errors: a method that the class does not have; an unknown argument; a plan with types or kernels that the sharder
---does not do.
---
---```lua
---local config = peri.EmbeddingBagConfig { name = "t", num_embeddings = 10, embedding_dim = 4,
---  feature_names = { "f" } }
---local module = peri.EmbeddingBagCollection { tables = { config },
---  fused_params = { optimizer = "sgd" } }
---local sharder, env = peri.shard.EmbeddingBagCollectionSharder {},
---  peri.ShardingEnv.from_process_group(peri.init())
---print(#sharder:sharding_types("cpu") > 3, #sharder:compute_kernels("row_wise", "cpu") > 1)
-----> true true
---print(sharder:shardable_parameters(module)[1].name,
---  sharder:merged_fused_params({ eps = 1 }).eps)
-----> t 1
---local own = plan.EmbeddingModuleShardingPlan { t = plan.table_wise(0) }
---sharder:check_plan(own, "cpu", "", "my plan")
---print(sharder:shard(module, own, env, "cpu", "").class_name) --> ShardedEmbeddingBagCollection
---local of = peri.shard.registry("my script", { sharder }, {}, peri.shard)
---print(peri.shard.ModuleSharder.is(sharder)) --> true
---print(rawequal(of(module), sharder), of(nn.ReLU()) == nil) --> true true
---```
---@class peri.shard.ModuleSharder
---@overload fun(args?: peri.shard.ModuleSharder.args): peri.shard.ModuleSharder
shard.ModuleSharder = {}

---@class peri.shard.ModuleSharder.args
---@field fused_params? table Of modules that have none of their own, and what theirs leave open (default: none).
---@field qcomm_codecs_registry? table Operation -> QuantizedCommCodecs (default: rows travel as f32).
---@field gradient_division? boolean Whether gradients of tables are means over ranks (default: as `dist.ops` has it).

---Make the sharded module. Called by all ranks in the same order.
---@param module peri.nn.Module The unsharded module.
---@param plan peri.EmbeddingModuleShardingPlan Its plan.
---@param env peri.ShardingEnv With a process group.
---@param device any A device's name; nil: that of the rank.
---@param path? string Of the module in its model (default: none).
---@return peri.shard.ShardedModule
function shard.ModuleSharder:shard(module, plan, env, device, path) end

---What a plan has entries for.
---@param module peri.nn.Module The unsharded module.
---@return table[] # `{ name =, num_embeddings =, embedding_dim = }` each: the configurations of the tables.
function shard.ModuleSharder:shardable_parameters(module) end

---The sharding types that plans may ask for.
---@param device? string The device (default: any).
---@return string[]
function shard.ModuleSharder:sharding_types(device) end

---The compute kernels that plans may ask for.
---@param sharding_type? string Of the table (default: any).
---@param device? string The device (default: any).
---@return string[]
function shard.ModuleSharder:compute_kernels(sharding_type, device) end

---`fused_params` of a module over those of the sharder.
---@param own? table Of the module (default: none).
---@return table|nil
function shard.ModuleSharder:merged_fused_params(own) end

---Raise an error unless this sharder can do what a plan says.
---@param plan peri.EmbeddingModuleShardingPlan Of the module.
---@param device any A device's name, or nil.
---@param path string Of the module.
---@param from string What messages call the plan.
function shard.ModuleSharder:check_plan(plan, device, path, from) end

---The function that finds the sharder of a module.
---
---Errors: sharders that are no ModuleSharders, or shard the same class.
---@param func string Whose call it is, for messages.
---@param list? peri.shard.ModuleSharder[] Those that shard, and nothing else does (default: those that classes of modules name).
---@param options? table Arguments of sharders that classes name (default: none).
---@param faces? table Where names of sharders are found: `peri.shard` (default: none).
---@return function # `f(module)` -> its sharder, or nil.
function shard.registry(func, list, options, faces) end

---Shards EmbeddingBagCollections.
---
---Errors: an unknown argument.
---
---```lua
---print(peri.shard.EmbeddingBagCollectionSharder({}).module_type.class_name)
-----> EmbeddingBagCollection
---```
---@class peri.shard.EmbeddingBagCollectionSharder: peri.shard.ModuleSharder
---@overload fun(args?: peri.shard.EmbeddingBagCollectionSharder.args): peri.shard.EmbeddingBagCollectionSharder
shard.EmbeddingBagCollectionSharder = {}

---@class peri.shard.EmbeddingBagCollectionSharder.args
---@field fused_params? table Of modules that have none of their own (default: none).
---@field qcomm_codecs_registry? table Operation -> QuantizedCommCodecs (default: rows travel as f32).
---@field gradient_division? boolean Whether gradients of tables are means over ranks (default: as `dist.ops` has it).
---@field use_index_dedup? boolean Each id travels once (default: as `set_ec_index_dedup` says for EmbeddingCollections, else not).

---Shards EmbeddingCollections.
---
---Errors: an unknown argument.
---
---```lua
---print(peri.shard.EmbeddingCollectionSharder({}).module_type.class_name) --> EmbeddingCollection
---```
---@class peri.shard.EmbeddingCollectionSharder: peri.shard.ModuleSharder
---@overload fun(args?: peri.shard.EmbeddingCollectionSharder.args): peri.shard.EmbeddingCollectionSharder
shard.EmbeddingCollectionSharder = {}

---@class peri.shard.EmbeddingCollectionSharder.args
---@field fused_params? table Of modules that have none of their own (default: none).
---@field qcomm_codecs_registry? table Operation -> QuantizedCommCodecs (default: rows travel as f32).
---@field gradient_division? boolean Whether gradients of tables are means over ranks (default: as `dist.ops` has it).
---@field use_index_dedup? boolean Each id travels once (default: as `set_ec_index_dedup` says for EmbeddingCollections, else not).

---Shards FeatureProcessedEmbeddingBagCollections.
---
---Errors: an unknown argument.
---
---```lua
---print(peri.shard.FeatureProcessedEmbeddingBagCollectionSharder(
---  {}).module_type.class_name) --> FeatureProcessedEmbeddingBagCollection
---```
---@class peri.shard.FeatureProcessedEmbeddingBagCollectionSharder: peri.shard.ModuleSharder
---@overload fun(args?: peri.shard.ModuleSharder.args): peri.shard.FeatureProcessedEmbeddingBagCollectionSharder
shard.FeatureProcessedEmbeddingBagCollectionSharder = {}

---Shards nn.EmbeddingBags. EmbeddingBags are sharded only where it is among the `sharders`.
---
---Errors: an unknown argument.
---
---```lua
---print(peri.shard.EmbeddingBagSharder({}).module_type.class_name) --> EmbeddingBag
---```
---@class peri.shard.EmbeddingBagSharder: peri.shard.ModuleSharder
---@overload fun(args?: peri.shard.ModuleSharder.args): peri.shard.EmbeddingBagSharder
shard.EmbeddingBagSharder = {}

---Shards ManagedCollisionCollections. The maps are sharded with the collection of their tables, never by themselves.
---
---Errors: an unknown argument.
---
---```lua
---print(peri.shard.ManagedCollisionCollectionSharder({}).module_type.class_name)
-----> ManagedCollisionCollection
---```
---@class peri.shard.ManagedCollisionCollectionSharder: peri.shard.ModuleSharder
---@overload fun(args?: peri.shard.ModuleSharder.args): peri.shard.ManagedCollisionCollectionSharder
shard.ManagedCollisionCollectionSharder = {}

---Shards ManagedCollisionEmbeddingBagCollections.
---
---Errors: an unknown argument.
---
---```lua
---print(peri.shard.ManagedCollisionEmbeddingBagCollectionSharder(
---  {}).module_type.class_name) --> ManagedCollisionEmbeddingBagCollection
---```
---@class peri.shard.ManagedCollisionEmbeddingBagCollectionSharder: peri.shard.ModuleSharder
---@overload fun(args?: peri.shard.ModuleSharder.args): peri.shard.ManagedCollisionEmbeddingBagCollectionSharder
shard.ManagedCollisionEmbeddingBagCollectionSharder = {}

---Shards ManagedCollisionEmbeddingCollections.
---
---Errors: an unknown argument.
---
---```lua
---print(peri.shard.ManagedCollisionEmbeddingCollectionSharder(
---  {}).module_type.class_name) --> ManagedCollisionEmbeddingCollection
---```
---@class peri.shard.ManagedCollisionEmbeddingCollectionSharder: peri.shard.ModuleSharder
---@overload fun(args?: peri.shard.ModuleSharder.args): peri.shard.ManagedCollisionEmbeddingCollectionSharder
shard.ManagedCollisionEmbeddingCollectionSharder = {}

---What the sharders of quantized collections share: compute kernels of tables that are looked up only.
---
---Errors: an unknown argument.
---
---```lua
---print(#peri.shard.BaseQuantEmbeddingSharder({}):compute_kernels() > 0) --> true
---```
---@class peri.shard.BaseQuantEmbeddingSharder: peri.shard.ModuleSharder
---@overload fun(args?: peri.shard.ModuleSharder.args): peri.shard.BaseQuantEmbeddingSharder
shard.BaseQuantEmbeddingSharder = {}

---Shards QuantEmbeddingBagCollections. An env without a process group makes as many places of this process.
---
---Errors: an unknown argument.
---
---```lua
---print(peri.shard.QuantEmbeddingBagCollectionSharder({}).module_type.class_name)
-----> QuantEmbeddingBagCollection
---```
---@class peri.shard.QuantEmbeddingBagCollectionSharder: peri.shard.BaseQuantEmbeddingSharder
---@overload fun(args?: peri.shard.ModuleSharder.args): peri.shard.QuantEmbeddingBagCollectionSharder
shard.QuantEmbeddingBagCollectionSharder = {}

---Shards QuantEmbeddingCollections. An env without a process group makes as many places of this process.
---
---Errors: an unknown argument.
---
---```lua
---print(peri.shard.QuantEmbeddingCollectionSharder({}).module_type.class_name)
-----> QuantEmbeddingCollection
---```
---@class peri.shard.QuantEmbeddingCollectionSharder: peri.shard.BaseQuantEmbeddingSharder
---@overload fun(args?: peri.shard.ModuleSharder.args): peri.shard.QuantEmbeddingCollectionSharder
shard.QuantEmbeddingCollectionSharder = {}

---Shards QuantFeatureProcessedEmbeddingBagCollections. An env without a process group makes as many places of this
---process.
---
---Errors: an unknown argument.
---
---```lua
---local sharder = peri.shard.QuantFeatureProcessedEmbeddingBagCollectionSharder {}
---print(sharder.module_type.class_name) --> QuantFeatureProcessedEmbeddingBagCollection
---```
---@class peri.shard.QuantFeatureProcessedEmbeddingBagCollectionSharder: peri.shard.BaseQuantEmbeddingSharder
---@overload fun(args?: peri.shard.ModuleSharder.args): peri.shard.QuantFeatureProcessedEmbeddingBagCollectionSharder
shard.QuantFeatureProcessedEmbeddingBagCollectionSharder = {}

---The ranks that share a sharded model, and what a plan may look at. One that a plan's function gets has also `modules`
---(path of each collection -> its tables), and for a model with one collection `module` (its path) and `tables`. A
---field that it could have and has not, such as `rank` where none was given, raises an error when it is read.
---
---Errors: a rank outside of the world; nodes without a number for each rank; a process group that says otherwise.
---
---```lua
---local env = peri.ShardingEnv.from_local(4, 1, 2)
---print(env.world_size, env.rank, env.local_size, table.concat(env.nodes, " "), env.pg)
-----> 4 1 2 0 0 1 1 false
---print(peri.ShardingEnv.from_process_group(peri.init()).world_size,
---  peri.ShardingEnv.of({ world_size = 3 }).local_size) --> 1 3
---print(env:with_modules({ ebc = {} }).module) --> ebc
---```
---@class peri.ShardingEnv
---@overload fun(args: peri.ShardingEnv.args): peri.ShardingEnv
peri.ShardingEnv = {}

---@class peri.ShardingEnv.args
---@field world_size integer Ranks.
---@field rank? integer This one (default: 0).
---@field pg? peri.dist.Group The process group (default: none, it is only a description).
---@field local_size? integer Ranks of this rank's node (default: world_size).
---@field nodes? integer[] A node's number for each rank (default: local_size ranks each).

---The env of a group's ranks. Local.
---@param pg? peri.dist.Group The group (default: the world).
---@return peri.ShardingEnv
function peri.ShardingEnv.from_process_group(pg) end

---The env of ranks that are not there: to make and check plans without a job.
---@param world_size integer Ranks.
---@param rank? integer This one (default: 0).
---@param local_size? integer Ranks of a node (default: world_size).
---@return peri.ShardingEnv
function peri.ShardingEnv.from_local(world_size, rank, local_size) end

---An env of a plain table of fields: as many as are known.
---@param given? table The fields (default: none).
---@return peri.ShardingEnv
function peri.ShardingEnv.of(given) end

---A copy that knows the collections of a model.
---@param modules table<string, table[]> Path -> configurations of the tables.
---@return peri.ShardingEnv
function peri.ShardingEnv:with_modules(modules) end
