-- shard_functions.lua: Functions around sharded models.
--
-- What stands around sharded models: tensors in pieces and copies of state_dicts, sharding of quantized models for
-- serving, and TorchRec's helpers under their names. Most scripts need none of them: models are sharded by
-- DistributedModelParallel of the page `training`.
---@meta

---@class peri.shard
local shard = {}
---@class peri.shard.utils
local utils = {}

---A tensor of which each rank of a group has pieces: what a `state_dict` holds for a table that is spread over ranks.
---It says where every piece is, and reaches those of this rank.
---
---Errors: metadata or pieces without offsets and sizes; pieces that are of no one moment.
---
---```lua
---local pieces = { { shard_offsets = { 0, 0 }, shard_sizes = { 2, 3 }, placement = "rank:0" } }
---local t = peri.shard.ShardedTensor { size = { 2, 3 }, dtype = "f32", shards_metadata = pieces,
---  local_shards = { { metadata = pieces[1],
---  tensor = peri.ones { 2, 3 } } } }
---print(t:size(2), t:shape()[1], t:dtype(), #t:local_shards(), t:metadata().size[1])
-----> 3 2 f32 1 2
---print(t:gather():sum():item(), t:clone():size(1)) --> 6 2
---```
---@class peri.shard.ShardedTensor
---@overload fun(args: peri.shard.ShardedTensor.args): peri.shard.ShardedTensor
shard.ShardedTensor = {}

---@class peri.shard.ShardedTensor.args
---@field size integer[] Sizes of the whole.
---@field dtype string Of the numbers.
---@field shards_metadata table[] Of all ranks: `{ shard_offsets =, shard_sizes =, placement = "rank:0" }` each.
---@field local_shards table[] Of this rank: `{ metadata =, tensor = }` each, or functions `read(row, tensor)`, `write(row, tensor)`.
---@field group? peri.dist.Group|boolean The ranks; `false`: this one alone (default: false).
---@field device? string Of what `gather` returns (default: that of the rank).
---@field mark? function For the library's own copies (default: none).
---@field stored? boolean Pieces of some ranks are in files (default: false).
---@field settle? function Called before pieces are read (default: none).

---Sizes of the whole, or one of them.
---@param d? integer The dimension, from 1 (default: all).
---@return integer|integer[]
function shard.ShardedTensor:size(d) end

---The same as `size`.
---@param d? integer The dimension, from 1 (default: all).
---@return integer|integer[]
function shard.ShardedTensor:shape(d) end

---The name of the dtype.
---@return string
function shard.ShardedTensor:dtype() end

---The pieces of this rank. `tensor` of a piece is a live view; nil: its rows are in a file.
---@return table[]
function shard.ShardedTensor:local_shards() end

---Size, dtype, and where all pieces are.
---@return table # `{ size =, dtype =, shards_metadata = }`.
function shard.ShardedTensor:metadata() end

---The whole, on every rank. A state with one number a row, of a table cut by columns, becomes the mean of its pieces,
---by their width. Collective.
---@return peri.Tensor # Of the whole's shape.
function shard.ShardedTensor:gather() end

---A copy of the pieces of this rank. Local.
---@return peri.shard.ShardedTensor
function shard.ShardedTensor:clone() end

---A copy of a state_dict, or of a table of several: of this moment, whatever is trained later. Local.
---
---Errors: dicts nested deeper than 100.
---
---```lua
---local dict = nn.Linear({ in_features = 1, out_features = 1 }):state_dict()
---print(dict:is_live(), peri.shard.clone_state_dict(dict):is_live()) --> true false
---print(peri.shard.gather_state_dict({ model = dict }).model.weight:numel()) --> 1
---```
---@param dict table What `state_dict()` returned, or a table of such.
---@return table
function shard.clone_state_dict(dict) end

---As `clone_state_dict`, with whole tensors in place of ShardedTensors. Collective.
---
---Errors: dicts nested deeper than 100.
---@param dict table What `state_dict()` returned, or a table of such.
---@return table
function shard.gather_state_dict(dict) end

---Whether EmbeddingCollections that are sharded from now on send each id once. `use_index_dedup` of the sharder counts
---where it is given.
---
---Errors: what is neither true nor false.
---
---```lua
---peri.shard.set_ec_index_dedup(true)
---print(peri.shard.get_ec_index_dedup()) --> true
---peri.shard.set_ec_index_dedup(false)
---```
---@param on boolean Whether they do.
function shard.set_ec_index_dedup(on) end

---What `set_ec_index_dedup` has set.
---@return boolean
function shard.get_ec_index_dedup() end

---Shard the quantized collections of a model, for serving.
---
---Errors: a model without quantized collections; a plan that names others.
---
---```lua
---local float = peri.EmbeddingBagCollection { tables = { peri.EmbeddingBagConfig { name = "t",
---  num_embeddings = 10, embedding_dim = 4, feature_names = { "f" } } } }
---local quant = peri.QuantEmbeddingBagCollection.from_float(float)
---local model = peri.shard.shard_quant_model { module = nn.Sequential { quant },
---  env = peri.ShardingEnv.from_local(2) }
---local copy = peri.shard.sharded_model_copy(model)
---print(model[1].class_name, copy[1].class_name == model[1].class_name)
-----> ShardedQuantEmbeddingBagCollection true
---```
---@param args peri.shard.shard_quant_model.args The model, and how.
---@return peri.nn.Module # The model, or what has taken its place.
---@return peri.ShardingPlan # The plan.
function shard.shard_quant_model(args) end

---@class peri.shard.shard_quant_model.args
---@field module peri.nn.Module The model, whose collections are replaced in place.
---@field env peri.ShardingEnv The ranks; without a process group, so many places of this process.
---@field plan? any What `plan.load` takes (default: whole tables, spread by size).
---@field sharders? peri.shard.ModuleSharder[] Who shards (default: those of the three quantized collections).
---@field device? string Where the shards are (default: that of the collections).

---A copy of a model, sharded or not: `embed.copy_to_device`.
---
---Errors: what is no Module; a collection that is trained.
---@param module peri.nn.Module The model.
---@param device? string Where the copy is (default: where its parts are).
---@return peri.nn.Module
function shard.sharded_model_copy(module, device) end

---A sharded quantized collection of tables that are all sharded by one type, without rows yet.
---`create_infer_embedding_sharding` makes that of rows that are not pooled.
---
---Errors: a type other than column_wise, row_wise, table_wise; a table of another type.
---
---```lua
---local bag = peri.EmbeddingBagConfig { name = "t", num_embeddings = 4, embedding_dim = 4,
---  feature_names = { "f" }, data_type = "INT8" }
---local row = peri.EmbeddingConfig { name = "t", num_embeddings = 4, embedding_dim = 4,
---  feature_names = { "f" }, data_type = "INT8" }
---local env, s = peri.ShardingEnv.from_local(2), peri.shard
---local entry = plan.ParameterSharding { sharding_type = "table_wise", compute_kernel = "quant",
---  ranks = { 1 } }
---local bags = s.create_infer_embedding_bag_sharding("table_wise",
---  { { embedding_config = bag, param_sharding = entry } }, env)
---local rows = s.create_infer_embedding_sharding("table_wise",
---  { { embedding_config = row, param_sharding = entry } }, env)
---print(bags.class_name, rows.class_name)
-----> ShardedQuantEmbeddingBagCollection ShardedQuantEmbeddingCollection
---```
---@param sharding_type string The type.
---@param infos table[] `{ embedding_config =, param_sharding = }` each.
---@param env peri.ShardingEnv The ranks, or places.
---@param device? string Where the shards are (default: that of the rank).
---@param options? table Further arguments of the module (default: none).
---@return peri.shard.ShardedQuantEmbeddingBagCollection
function shard.create_infer_embedding_bag_sharding(sharding_type, infos, env, device, options) end

---As `create_infer_embedding_bag_sharding`, for rows that are not pooled.
---
---Errors: a type other than column_wise, row_wise, table_wise; a table of another type.
---@param sharding_type string The type.
---@param infos table[] `{ embedding_config =, param_sharding = }` each.
---@param env peri.ShardingEnv The ranks, or places.
---@param device? string Where the shards are (default: that of the rank).
---@param options? table Further arguments of the module (default: none).
---@return peri.shard.ShardedQuantEmbeddingCollection
function shard.create_infer_embedding_sharding(sharding_type, infos, env, device, options) end

---TorchRec's; the lengths of a batch are flat here.
---
---Errors: what is no KeyedJaggedTensor.
---
---```lua
---local kjt = peri.KeyedJaggedTensor { keys = { "f" }, values = { 1 }, lengths = { 1 } }
---print(peri.shard.flatten_feature_lengths(kjt):equal(kjt)) --> true
---```
---@param features peri.KeyedJaggedTensor The batch.
---@return peri.KeyedJaggedTensor # The batch.
function shard.flatten_feature_lengths(features) end

---`prefix.name`, or the one of both that is not empty.
---
---Errors: what is no string.
---
---```lua
---local utils = peri.shard.utils
---print(utils.append_prefix("a", "b"), utils.append_prefix("", "b")) --> a.b b
---local dict = utils.filter_state_dict({ ["over.weight"] = 1, other = 2 }, "over")
---utils.add_prefix_to_state_dict(dict, "x.")
---print(dict["x.weight"], utils.none_throws(5)) --> 1 5
---print(utils.merge_fused_params({ eps = 1 }, { lr = 2 }).learning_rate) --> 2
---print(utils.convert_to_fbgemm_types({ output_dtype = "FP16" }).output_dtype) --> f16
---print(utils.add_params_from_parameter_sharding({ eps = 1 }, plan.table_wise(0)).eps) --> 1
---print(utils.optimizer_type_to_emb_opt_type(nn.optim.Adam),
---  #utils.get_unsharded_module_names(nn.Sequential { nn.ReLU() })) --> adam 0
---utils.init_parameters(nn.ReLU(), "cpu")
---```
---@param prefix string The first part.
---@param name string The second part.
---@return string
function utils.append_prefix(prefix, name) end

---The entries `name.rest` of a state_dict, as a new one from `rest`.
---
---Errors: what is no state_dict.
---@param state_dict table The state_dict.
---@param name string The part before the dot.
---@return table
function utils.filter_state_dict(state_dict, name) end

---Put a prefix before all names of a state_dict, in place.
---
---Errors: what is no state_dict.
---@param state_dict table The state_dict.
---@param prefix string The prefix, with its dot if it should have one.
function utils.add_prefix_to_state_dict(state_dict, prefix) end

---A value, or an error if it is nil.
---
---Errors: nil.
---@param x any The value.
---@param message? string What the error says (default: that it is nil).
---@return any
function utils.none_throws(x, message) end

---`fused_params` with those of one table over them, as a new table. `lr` is called learning_rate.
---
---Errors: what is no table.
---@param fused_params? table Of the module (default: none).
---@param param_fused_params? table Of the table (default: none).
---@return table
function utils.merge_fused_params(fused_params, param_fused_params) end

---`fused_params` with what a plan's entry says of the table's cache, as a new table.
---
---Errors: what is no ParameterSharding.
---@param fused_params? table Of the module (default: none).
---@param parameter_sharding peri.ParameterSharding The plan's entry.
---@return table
function utils.add_params_from_parameter_sharding(fused_params, parameter_sharding) end

---`fused_params` with dtypes (`f32`) in place of data types (`FP32`), as a new table.
---
---Errors: a data type that there is not.
---@param fused_params table The parameters.
---@return table
function utils.convert_to_fbgemm_types(fused_params) end

---The optimizer of `fused_params` that does what a class of `nn.optim` does.
---
---Errors: a class that none of them is.
---@param class table `nn.optim.SGD`, `Adagrad`, `Adam` or `RowWiseAdagrad`.
---@return string
function utils.optimizer_type_to_emb_opt_type(class) end

---Paths of the largest parts of a model that have no sharded module. Of a model without any sharded module: none.
---
---Errors: what is no Module.
---@param model peri.nn.Module The model.
---@return string[]
function utils.get_unsharded_module_names(model) end

---Give all collections of a module that have no memory yet their memory and start values.
---
---Errors: tables of several data types in one collection.
---@param module peri.nn.Module The module.
---@param device? string Where (default: that of the collection, else of the rank).
function utils.init_parameters(module, device) end

---Blocks of columns in another order; repeats and subsets are fine.
---
---Errors: a block that there is not; rows of another width.
---
---```lua
---local permute = peri.shard.utils.PermutePooledEmbeddings({ 1, 2 }, { 1, 0 })
---print(permute:forward(peri.tensor { { 1, 2, 3 } }):item(0)) --> 2
---```
---@class peri.shard.utils.PermutePooledEmbeddings: peri.nn.Module
---@param dims integer[] Columns of each block.
---@param permute integer[] Numbers of blocks, from 0.
---@overload fun(dims: integer[], permute: integer[]): peri.shard.utils.PermutePooledEmbeddings
utils.PermutePooledEmbeddings = {}

---Put them in order. Calling the module calls it.
---@param pooled peri.Tensor `[B, columns]`.
---@return peri.Tensor # `[B, columns]`.
function utils.PermutePooledEmbeddings:forward(pooled) end

---The plan's entry of a table of raw ids, cut between buckets: row-wise shards get an even share of the buckets.
---
---Errors: what is no ParameterSharding.
---
---```lua
---local hash = peri.HashZchManagedCollisionModule { zch_size = 8, total_num_buckets = 2 }
---local entry = peri.shard.create_mc_sharding(plan.row_wise(), hash,
---  peri.ShardingEnv.from_local(2))
---print(table.concat(entry.sizes, " ")) --> 4 4
---```
---@param sharding peri.ParameterSharding The entry.
---@param module peri.embed.ManagedCollisionModule The maps of the table.
---@param env peri.ShardingEnv The ranks.
---@return peri.ParameterSharding
function shard.create_mc_sharding(sharding, module, env) end

---A ManagedCollisionCollection over ranks: each has the maps of its buckets. Sharded collections of raw ids have one.
---
---Errors: a plan that cuts within a bucket; ranks whose modules differ.
---
---```lua
---local config = peri.EmbeddingBagConfig { name = "t", num_embeddings = 8, embedding_dim = 2,
---  feature_names = { "f" } }
---local hash = peri.HashZchManagedCollisionModule { zch_size = 8, total_num_buckets = 1,
---  eviction_policy_name = "LRU_EVICTION" }
---local mcc = peri.ManagedCollisionCollection { managed_collision_modules = { t = hash },
---  embedding_configs = { config } }
---local maps = peri.shard.ShardedManagedCollisionCollection { managed_collision_collection = mcc,
---  group = peri.init(), plan = plan.EmbeddingModuleShardingPlan { t = plan.row_wise() } }
---local batch = peri.KeyedJaggedTensor.from_lists { keys = { "f" }, { { 1000000007 } } }
---print(maps:forward(batch):values():item() < 8, maps:feature_names()[1],
---  maps:embedding_configs()[1].name) --> true f t
---print(maps:open_slots().t, maps:statistics().t.ids, maps:local_statistics().t.ids,
---  type(maps:evict())) --> 7 1 1 table
---maps:set_time(5)
---print(maps:copy().class_name) --> ShardedManagedCollisionCollection
---maps:copy_from(mcc)
---```
---@class peri.shard.ShardedManagedCollisionCollection: peri.nn.Module
---@overload fun(args: peri.shard.ShardedManagedCollisionCollection.args): peri.shard.ShardedManagedCollisionCollection
shard.ShardedManagedCollisionCollection = {}

---@class peri.shard.ShardedManagedCollisionCollection.args
---@field managed_collision_collection peri.ManagedCollisionCollection The unsharded one.
---@field plan peri.EmbeddingModuleShardingPlan Of the tables.
---@field group peri.dist.Group The ranks.
---@field device? string Where the maps are (default: that of the rank).
---@field returns_rows? boolean Whether rows come home, too (default: false).

---Rows for ids, of all ranks. Calling the module calls it. Collective.
---@param features peri.KeyedJaggedTensor The ids.
---@return peri.KeyedJaggedTensor # The same bags and weights with rows.
function shard.ShardedManagedCollisionCollection:forward(features) end

---Rows on this rank that have got another id since the last call.
---@return table<string, peri.Tensor> # Table -> i64 `[n]`; tables without any are left out.
function shard.ShardedManagedCollisionCollection:evict() end

---The features, in the order of the result.
---@return string[]
function shard.ShardedManagedCollisionCollection:feature_names() end

---The configurations of the tables.
---@return table[]
function shard.ShardedManagedCollisionCollection:embedding_configs() end

---Take over what the unsharded collection knows. Local.
---@param mcc peri.ManagedCollisionCollection The unsharded one.
function shard.ShardedManagedCollisionCollection:copy_from(mcc) end

---Maps of the same plan that know the same. Collective.
---@param device? string Where they are (default: the same device).
---@return peri.shard.ShardedManagedCollisionCollection
function shard.ShardedManagedCollisionCollection:copy(device) end

---What time it is, for ids with times to live. All ranks alike.
---@param now integer The time.
function shard.ShardedManagedCollisionCollection:set_time(now) end

---By table, counts of this rank's maps. Local.
---@return table<string, table>
function shard.ShardedManagedCollisionCollection:local_statistics() end

---By table, counts and shares over all ranks. Collective.
---@return table<string, table>
function shard.ShardedManagedCollisionCollection:statistics() end

---By table, rows that no id has, and that one can get. Collective.
---@return table<string, integer>
function shard.ShardedManagedCollisionCollection:open_slots() end

---TorchRec's contexts, of which nothing is used here.
---
---Errors: nothing is raised.
---
---```lua
---print(peri.shard.ManagedCollisionCollectionContext.class_name)
-----> ManagedCollisionCollectionContext
---print(peri.shard.ManagedCollisionEmbeddingBagCollectionContext ~= nil) --> true
---print(peri.shard.ManagedCollisionEmbeddingCollectionContext ~= nil) --> true
---```
---@class peri.shard.ManagedCollisionCollectionContext
---@overload fun(): peri.shard.ManagedCollisionCollectionContext
shard.ManagedCollisionCollectionContext = {}

---As ManagedCollisionCollectionContext, of pooled collections.
---
---Errors: nothing is raised.
---@class peri.shard.ManagedCollisionEmbeddingBagCollectionContext: peri.shard.ManagedCollisionCollectionContext
---@overload fun(): peri.shard.ManagedCollisionEmbeddingBagCollectionContext
shard.ManagedCollisionEmbeddingBagCollectionContext = {}

---As ManagedCollisionCollectionContext, of rows that are not pooled.
---
---Errors: nothing is raised.
---@class peri.shard.ManagedCollisionEmbeddingCollectionContext: peri.shard.ManagedCollisionCollectionContext
---@overload fun(): peri.shard.ManagedCollisionEmbeddingCollectionContext
shard.ManagedCollisionEmbeddingCollectionContext = {}

---Stands for the batch with rows, the second result of a sharded collection of raw ids. Scripts do not make it.
---
---Errors: what is no Awaitable.
---
---```lua
---print(peri.shard.ManagedCollisionCollectionAwaitable.class_name)
-----> ManagedCollisionCollectionAwaitable
---```
---@class peri.shard.ManagedCollisionCollectionAwaitable: peri.Awaitable
---@param result peri.Awaitable The first result.
---@param rows table The stage that it came from.
---@overload fun(result: peri.Awaitable, rows: table): peri.shard.ManagedCollisionCollectionAwaitable
shard.ManagedCollisionCollectionAwaitable = {}
