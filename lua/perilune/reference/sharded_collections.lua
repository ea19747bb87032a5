-- sharded_collections.lua: Sharded collections of tables.
--
-- Named arguments that all of them take: `tables` (configurations), `plan` (an EmbeddingModuleShardingPlan, or a table
-- of ParameterShardings), `group` (the ranks); optional: `fused_params`, `table_fused_params` (by table),
-- `is_weighted`, `device`, `seed`, `gradient_division`, `qcomm_codecs_registry`, `name` (the path, for messages).
-- Sharders make them; a script does so by hand where it wants to.
---@meta

---@class peri.shard
local shard = {}

---What all sharded collections have. There are no objects of it.
---
---Errors: a plan that does not fit the tables; the device `meta`; a batch that the unsharded collection would not take.
---
---```lua
---print(peri.shard.ShardedEmbeddingModule.is(nn.ReLU())) --> false
---```
---@class peri.shard.ShardedEmbeddingModule: peri.shard.ShardedModule
shard.ShardedEmbeddingModule = {}

---How many updates all fused tables count as made so far, which some optimizers look at. On all ranks alike. Local.
---@param iteration integer Updates.
function shard.ShardedEmbeddingModule:set_iteration(iteration) end

---Write the changed rows of tables in files; afterwards all files of all ranks are whole, and of one moment.
---Collective.
function shard.ShardedEmbeddingModule:flush() end

---An EmbeddingBagCollection over ranks. It also takes `use_index_dedup`: each id travels once.
---
---Errors: a plan that does not fit the tables; what the unsharded collection refuses.
---
---```lua
---local config = peri.EmbeddingBagConfig { name = "t", num_embeddings = 10, embedding_dim = 4,
---  feature_names = { "f" } }
---local sharded = peri.shard.ShardedEmbeddingBagCollection { tables = { config },
---  plan = { t = plan.row_wise() }, group = peri.init(),
---  fused_params = { optimizer = "sgd", learning_rate = 1 } }
---local batch = peri.KeyedJaggedTensor.from_lists { keys = { "f" }, { { 1, 2 }, {} } }
---local pooled = sharded:compute_and_output_dist(sharded:input_dist(batch):wait())
---print(pooled:values():size(2), sharded:forward(batch):values():size(1)) --> 4 2
---print(sharded:embedding_names()[1], sharded:embedding_dims()[1],
---  sharded:embedding_bag_configs()[1].name)
-----> f 4 t
---print(peri.shard.ShardedEmbeddingBagCollection.OutputAwaitable.is(pooled)) --> true
---print(sharded:index_dedup_counts() == nil, #sharded:local_shards(),
---  sharded:fused_optimizer():lr())
-----> true 1 1
---sharded:set_iteration(3)
---sharded:set_learning_rate(0.5)
---sharded:flush()
---local weight = sharded:state_dict()["embedding_bags.t.weight"]
---print(tostring(weight), weight:gather():size(1),
---  weight:clone():size(1)) --> ShardedTensor f32 [10, 4] in 1 pieces, 1 here 10 10
---print(weight:shape()[2], weight:dtype(), #weight:metadata().shards_metadata,
---  #weight:local_shards())
-----> 4 f32 1 1
---local dict = peri.shard.clone_state_dict(sharded:state_dict())
---print(peri.shard.gather_state_dict(dict)["embedding_bags.t.weight"]:numel(),
---  peri.shard.ShardedTensor.is(weight)) --> 40 true
---sharded:release()
---```
---@class peri.shard.ShardedEmbeddingBagCollection: peri.shard.ShardedEmbeddingModule
---@param args table Named arguments: those at the top of the page, and what is said here.
---@overload fun(args: table): peri.shard.ShardedEmbeddingBagCollection
shard.ShardedEmbeddingBagCollection = {}

---Stands for the KeyedTensor of a sharded collection.
---
---Errors: what is no Awaitable.
---@class peri.shard.ShardedEmbeddingBagCollection.OutputAwaitable: peri.shard.ShardedModule.OutputAwaitable
---@param module peri.shard.ShardedModule The module.
---@param exchange peri.Awaitable What `compute` returned.
---@overload fun(module: peri.shard.ShardedModule, exchange: peri.Awaitable): peri.shard.ShardedEmbeddingBagCollection.OutputAwaitable
shard.ShardedEmbeddingBagCollection.OutputAwaitable = {}

---The values of the KeyedTensor, which wait when they are used.
---@return peri.LazyAwaitable # Of `[B, columns]`.
function shard.ShardedEmbeddingBagCollection.OutputAwaitable:values() end

---Names of the parts of the result.
---@return string[]
function shard.ShardedEmbeddingBagCollection:embedding_names() end

---Columns of the parts of the result.
---@return integer[]
function shard.ShardedEmbeddingBagCollection:embedding_dims() end

---The configurations of the tables.
---@return peri.EmbeddingBagConfig[]
function shard.ShardedEmbeddingBagCollection:embedding_bag_configs() end

---With `use_index_dedup`: ids that batches had, and that were sent.
---@return table|nil # `{ asked =, sent = }`.
function shard.ShardedEmbeddingBagCollection:index_dedup_counts() end

---An EmbeddingCollection over ranks. It also takes `need_indices`, and `use_index_dedup`: each id travels once.
---
---Errors: a plan that does not fit the tables; what the unsharded collection refuses.
---
---```lua
---local config = peri.EmbeddingConfig { name = "t", num_embeddings = 10, embedding_dim = 4,
---  feature_names = { "f" } }
---local sharded = peri.shard.ShardedEmbeddingCollection { tables = { config },
---  plan = { t = plan.table_wise(0) }, group = peri.init(), fused_params = { optimizer = "sgd" },
---  use_index_dedup = false }
---print(sharded:forward(peri.KeyedJaggedTensor.from_lists { keys = { "f" },
---  { { 1, 2 }, {} } }).f:values():size(
---  1)) --> 2
---print(sharded:embedding_names()[1], sharded:embedding_dim(), sharded:need_indices())
-----> f 4 false
---print(sharded:embedding_configs()[1].name, sharded:index_dedup_counts() == nil) --> t true
---```
---@class peri.shard.ShardedEmbeddingCollection: peri.shard.ShardedEmbeddingModule
---@param args table Named arguments: those at the top of the page, and what is said here.
---@overload fun(args: table): peri.shard.ShardedEmbeddingCollection
shard.ShardedEmbeddingCollection = {}

---Stands for the table of JaggedTensors of a sharded collection.
---
---Errors: what is no Awaitable.
---@class peri.shard.ShardedEmbeddingCollection.OutputAwaitable: peri.shard.ShardedModule.OutputAwaitable
---@param module peri.shard.ShardedModule The module.
---@param exchange peri.Awaitable What `compute` returned.
---@overload fun(module: peri.shard.ShardedModule, exchange: peri.Awaitable): peri.shard.ShardedEmbeddingCollection.OutputAwaitable
shard.ShardedEmbeddingCollection.OutputAwaitable = {}

---Names of the results.
---@return string[]
function shard.ShardedEmbeddingCollection:embedding_names() end

---Columns of the widest table.
---@return integer
function shard.ShardedEmbeddingCollection:embedding_dim() end

---The configurations of the tables.
---@return peri.EmbeddingConfig[]
function shard.ShardedEmbeddingCollection:embedding_configs() end

---Whether the results have the ids as weights.
---@return boolean
function shard.ShardedEmbeddingCollection:need_indices() end

---With `use_index_dedup`: ids that batches had, and that were sent.
---@return table|nil # `{ asked =, sent = }`.
function shard.ShardedEmbeddingCollection:index_dedup_counts() end

---An `nn.EmbeddingBag` over ranks. In place of `tables` it takes `num_embeddings`, `embedding_dim`, `mode` (`sum`,
---`mean`) and `include_last_offset`; the plan calls its table `weight`.
---
---Errors: a plan that does not fit; another mode.
---
---```lua
---local bag = peri.shard.ShardedEmbeddingBag { num_embeddings = 10, embedding_dim = 4,
---  plan = { weight = plan.table_wise(0) },
---  group = peri.init(), fused_params = { optimizer = "sgd" } }
---print(bag(peri.tensor({ 1, 2 }, "i64"), peri.tensor({ 0 }, "i64")):size(2)) --> 4
---```
---@class peri.shard.ShardedEmbeddingBag: peri.shard.ShardedEmbeddingModule
---@param args table Named arguments: those at the top of the page, and what is said here.
---@overload fun(args: table): peri.shard.ShardedEmbeddingBag
shard.ShardedEmbeddingBag = {}

---Stands for the tensor of a sharded EmbeddingBag.
---
---Errors: what is no Awaitable.
---@class peri.shard.ShardedEmbeddingBag.OutputAwaitable: peri.shard.ShardedModule.OutputAwaitable
---@param module peri.shard.ShardedModule The module.
---@param exchange peri.Awaitable What `compute` returned.
---@overload fun(module: peri.shard.ShardedModule, exchange: peri.Awaitable): peri.shard.ShardedEmbeddingBag.OutputAwaitable
shard.ShardedEmbeddingBag.OutputAwaitable = {}

---A FeatureProcessedEmbeddingBagCollection over ranks: the processors run at home, where whole bags are. It also takes
---`feature_processors`.
---
---Errors: a plan that does not fit the tables; what is no FeatureProcessorsCollection.
---
---```lua
---local config = peri.EmbeddingBagConfig { name = "t", num_embeddings = 10, embedding_dim = 4,
---  feature_names = { "f" } }
---local places = peri.embed.PositionWeightedModuleCollection { max_feature_lengths = { f = 5 } }
---local sharded = peri.shard.ShardedFeatureProcessedEmbeddingBagCollection { tables = { config },
---  plan = { t = plan.table_wise(0) },
---  group = peri.init(), fused_params = { optimizer = "sgd" }, feature_processors = places }
---print(rawequal(sharded:feature_processors(), places)) --> true
---```
---@class peri.shard.ShardedFeatureProcessedEmbeddingBagCollection: peri.shard.ShardedEmbeddingBagCollection
---@param args table Named arguments: those at the top of the page, and what is said here.
---@overload fun(args: table): peri.shard.ShardedFeatureProcessedEmbeddingBagCollection
shard.ShardedFeatureProcessedEmbeddingBagCollection = {}

---The processors.
---@return peri.embed.FeatureProcessorsCollection
function shard.ShardedFeatureProcessedEmbeddingBagCollection:feature_processors() end

---A quantized collection over ranks, or over places of one process, for serving. It takes `tables`, `plan`, `env` or
---`group`, `device`, `output_dtype`, `bounds_check_mode`, `pruned`, `is_weighted`, `qcomm_codecs_registry`, `name`.
---
---Errors: a plan that does not fit the tables; compute kernels of trained tables.
---
---```lua
---local config = peri.EmbeddingBagConfig { name = "t", num_embeddings = 10, embedding_dim = 4,
---  feature_names = { "f" } }
---local float = peri.EmbeddingBagCollection { tables = { config } }
---local quant = peri.QuantEmbeddingBagCollection.from_float(float)
---local model, made = peri.shard.shard_quant_model { module = nn.Sequential { quant },
---  env = peri.ShardingEnv.from_local(2) }
---print(model[1].class_name, #made.plan["0"].tables.t.ranks)
-----> ShardedQuantEmbeddingBagCollection 1
---local copy = peri.shard.sharded_model_copy(model)
---print(copy[1]:embedding_bag_configs()[1].data_type) --> INT8
---```
---@class peri.shard.ShardedQuantEmbeddingBagCollection: peri.shard.ShardedEmbeddingBagCollection
---@param args table Named arguments: those at the top of the page, and what is said here.
---@overload fun(args: table): peri.shard.ShardedQuantEmbeddingBagCollection
shard.ShardedQuantEmbeddingBagCollection = {}

---The configurations of the tables.
---@return peri.EmbeddingBagConfig[]
function shard.ShardedQuantEmbeddingBagCollection:embedding_bag_configs() end

---The same for rows that are not pooled. It takes `need_indices` in place of `is_weighted`.
---
---Errors: a plan that does not fit the tables; compute kernels of trained tables.
---
---```lua
---print(peri.shard.ShardedQuantEmbeddingCollection.is(nn.ReLU())) --> false
---```
---@class peri.shard.ShardedQuantEmbeddingCollection: peri.shard.ShardedEmbeddingCollection
---@param args table Named arguments: those at the top of the page, and what is said here.
---@overload fun(args: table): peri.shard.ShardedQuantEmbeddingCollection
shard.ShardedQuantEmbeddingCollection = {}

---The configurations of the tables.
---@return peri.EmbeddingConfig[]
function shard.ShardedQuantEmbeddingCollection:embedding_configs() end

---As ShardedQuantEmbeddingBagCollection, behind feature processors. It also takes `feature_processors`.
---
---Errors: a plan that does not fit the tables; what is no FeatureProcessorsCollection.
---
---```lua
---print(peri.shard.ShardedQuantFeatureProcessedEmbeddingBagCollection.is(nn.ReLU())) --> false
---```
---@class peri.shard.ShardedQuantFeatureProcessedEmbeddingBagCollection: peri.shard.ShardedQuantEmbeddingBagCollection
---@param args table Named arguments: those at the top of the page, and what is said here.
---@overload fun(args: table): peri.shard.ShardedQuantFeatureProcessedEmbeddingBagCollection
shard.ShardedQuantFeatureProcessedEmbeddingBagCollection = {}

---The processors.
---@return peri.embed.FeatureProcessorsCollection
function shard.ShardedQuantFeatureProcessedEmbeddingBagCollection:feature_processors() end

---A ManagedCollisionEmbeddingBagCollection over ranks: raw ids go to the ranks that have their buckets. It also takes
---`managed_collision_collection` and `return_remapped_features`.
---
---Errors: a plan that does not fit the tables, or cuts within a bucket.
---
---```lua
---local config = peri.EmbeddingBagConfig { name = "t", num_embeddings = 8, embedding_dim = 2,
---  feature_names = { "f" } }
---local hash = peri.HashZchManagedCollisionModule { zch_size = 8, total_num_buckets = 1,
---  eviction_policy_name = "LRU_EVICTION" }
---local mcc = peri.ManagedCollisionCollection { managed_collision_modules = { t = hash },
---  embedding_configs = { config } }
---local sharded = peri.shard.ShardedManagedCollisionEmbeddingBagCollection { tables = { config },
---  plan = { t = plan.row_wise() },
---  group = peri.init(), fused_params = { optimizer = "sgd" },
---  managed_collision_collection = mcc }
---print(sharded(peri.KeyedJaggedTensor.from_lists { keys = { "f" },
---  { { 1000000007 } } }):values():size(2))
-----> 2
---sharded:set_time(5)
---print(sharded:open_slots().t, sharded:statistics().t.ids,
---  sharded:managed_collision_collection():feature_names()[1]) --> 7 1 f
---```
---@class peri.shard.ShardedManagedCollisionEmbeddingBagCollection: peri.shard.ShardedEmbeddingBagCollection
---@param args table Named arguments: those at the top of the page, and what is said here.
---@overload fun(args: table): peri.shard.ShardedManagedCollisionEmbeddingBagCollection
shard.ShardedManagedCollisionEmbeddingBagCollection = {}

---The maps of the tables.
---@return peri.shard.ShardedManagedCollisionCollection
function shard.ShardedManagedCollisionEmbeddingBagCollection:managed_collision_collection() end

---What time it is, for ids with times to live. All ranks alike.
---@param now integer The time.
function shard.ShardedManagedCollisionEmbeddingBagCollection:set_time(now) end

---By table, rows that no id has, and that one can get. Collective.
---@return table<string, integer>
function shard.ShardedManagedCollisionEmbeddingBagCollection:open_slots() end

---By table, counts and shares over all ranks. Collective.
---@return table<string, table>
function shard.ShardedManagedCollisionEmbeddingBagCollection:statistics() end

---As ShardedManagedCollisionEmbeddingBagCollection, for rows that are not pooled.
---
---Errors: a plan that does not fit the tables, or cuts within a bucket.
---
---```lua
---print(peri.shard.ShardedManagedCollisionEmbeddingCollection.is(nn.ReLU())) --> false
---```
---@class peri.shard.ShardedManagedCollisionEmbeddingCollection: peri.shard.ShardedEmbeddingCollection
---@param args table Named arguments: those at the top of the page, and what is said here.
---@overload fun(args: table): peri.shard.ShardedManagedCollisionEmbeddingCollection
shard.ShardedManagedCollisionEmbeddingCollection = {}

---The maps of the tables.
---@return peri.shard.ShardedManagedCollisionCollection
function shard.ShardedManagedCollisionEmbeddingCollection:managed_collision_collection() end

---What time it is, for ids with times to live. All ranks alike.
---@param now integer The time.
function shard.ShardedManagedCollisionEmbeddingCollection:set_time(now) end

---By table, rows that no id has, and that one can get. Collective.
---@return table<string, integer>
function shard.ShardedManagedCollisionEmbeddingCollection:open_slots() end

---By table, counts and shares over all ranks. Collective.
---@return table<string, table>
function shard.ShardedManagedCollisionEmbeddingCollection:statistics() end
