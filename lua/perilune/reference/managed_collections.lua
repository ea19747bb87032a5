-- managed_collections.lua: Collections that take raw ids.
--
-- Collections of tables that take raw ids of 64 bits, any numbers. The modules of the page `managed_collision` give
-- each id that is learned a row of a table; a ManagedCollisionCollection has such a module for each table, and the two
-- collections below put it in front of their tables. docs/managed_collision.md tells more.
---@meta

---@class peri
local peri = {}
---@class peri.embed
local embed = {}

---Managed collision of several tables: called with a KeyedJaggedTensor, it returns one with rows in place of ids; keys
---come in the order of the configurations, others are left out. One step of every table in training mode.
---
---Errors: a table without a module; a module with another number of rows; a feature of two tables; a batch without one
---of the features.
---
---```lua
---local config = peri.EmbeddingBagConfig { name = "t", num_embeddings = 8, embedding_dim = 2,
---  feature_names = { "f" } }
---local hash = peri.HashZchManagedCollisionModule { zch_size = 8, total_num_buckets = 1,
---  eviction_policy_name = "LRU_EVICTION" }
---local mcc = peri.ManagedCollisionCollection { managed_collision_modules = { t = hash },
---  embedding_configs = { config } }
---local batch = peri.KeyedJaggedTensor.from_lists { keys = { "f" }, { { 1000000007 } } }
---print(mcc:forward(batch):values():item() < 8, mcc:feature_names()[1],
---  mcc:embedding_configs()[1].name)
-----> true f t
---print(mcc:open_slots().t, mcc:table_to_number_buckets().t, mcc:statistics().t.inserted,
---  mcc:evict().t ~= nil) --> 7 1 1 true
---mcc:set_time(5)
---print(rawequal(mcc:managed_collision_modules().t, hash)) --> true
---local bags = peri.ManagedCollisionEmbeddingBagCollection { managed_collision_collection = mcc,
---  return_remapped_features = true,
---  embedding_bag_collection = peri.EmbeddingBagCollection { tables = { config },
---    fused_params = { optimizer = "sgd" } } }
---local pooled, remapped = bags:forward(batch)
---print(pooled:values():size(2), remapped:values():numel(), bags:open_slots().t,
---  bags:statistics().t.ids)
-----> 2 1 7 2
---bags:check_moment()
---bags:set_time(6)
---print(bags:embedding_module().class_name,
---  rawequal(bags:managed_collision_collection(), mcc)) --> EmbeddingBagCollection true
---print(peri.embed.BaseManagedCollisionEmbeddingCollection.is(bags)) --> true
---```
---@class peri.ManagedCollisionCollection: peri.nn.Module
---@overload fun(args: peri.ManagedCollisionCollection.args): peri.ManagedCollisionCollection
peri.ManagedCollisionCollection = {}

---@class peri.ManagedCollisionCollection.args
---@field managed_collision_modules table<string, peri.embed.ManagedCollisionModule> Table -> module.
---@field embedding_configs table[] The configurations of the same tables, in the order of the result.
---@field need_preprocess? boolean `false`: ids come hashed, the modules' `input_hash_func` are left out (default: true).

---Rows for ids. Calling the module calls it.
---@param features peri.KeyedJaggedTensor The ids.
---@return peri.KeyedJaggedTensor # The same bags and weights with rows.
function peri.ManagedCollisionCollection:forward(features) end

---Rows that have got another id since the last call.
---@return table<string, peri.Tensor> # Table -> i64 `[n]`; tables without any are left out.
function peri.ManagedCollisionCollection:evict() end

---What time it is, for all tables whose ids have times to live: `HashZchManagedCollisionModule:set_time`.
---@param now integer The time.
function peri.ManagedCollisionCollection:set_time(now) end

---By table, rows that no id has, and that one can get.
---@return table<string, integer>
function peri.ManagedCollisionCollection:open_slots() end

---By table, the number of buckets.
---@return table<string, integer>
function peri.ManagedCollisionCollection:table_to_number_buckets() end

---By table, counts and shares: `ManagedCollisionModule:statistics`.
---@return table<string, table>
function peri.ManagedCollisionCollection:statistics() end

---The configurations of the tables.
---@return table[]
function peri.ManagedCollisionCollection:embedding_configs() end

---The modules by table.
---@return table<string, peri.embed.ManagedCollisionModule>
function peri.ManagedCollisionCollection:managed_collision_modules() end

---The features, in the order of the result.
---@return string[]
function peri.ManagedCollisionCollection:feature_names() end

---What both collections below share. There are no objects of it.
---
---Errors: a call of the class.
---@class peri.embed.BaseManagedCollisionEmbeddingCollection: peri.nn.Module
embed.BaseManagedCollisionEmbeddingCollection = {}

---Look a batch up. Calling the module calls it. In training mode ids are learned first, and rows that get another id
---start again before they are looked up.
---@param features peri.KeyedJaggedTensor Raw ids.
---@return any # What the collection returns for the rows.
---@return peri.KeyedJaggedTensor|nil # The batch with rows, with return_remapped_features.
function embed.BaseManagedCollisionEmbeddingCollection:forward(features) end

---What time it is: `ManagedCollisionCollection:set_time`.
---@param now integer The time.
function embed.BaseManagedCollisionEmbeddingCollection:set_time(now) end

---By table, rows that no id has, and that one can get.
---@return table<string, integer>
function embed.BaseManagedCollisionEmbeddingCollection:open_slots() end

---By table, counts and shares.
---@return table<string, table>
function embed.BaseManagedCollisionEmbeddingCollection:statistics() end

---The collection of the tables.
---@return peri.nn.Module
function embed.BaseManagedCollisionEmbeddingCollection:embedding_module() end

---The maps of the tables.
---@return peri.ManagedCollisionCollection
function embed.BaseManagedCollisionEmbeddingCollection:managed_collision_collection() end

---An EmbeddingBagCollection that takes raw ids. The example of ManagedCollisionCollection makes one.
---
---Errors: a collection and maps of different tables; quantized tables in training mode.
---@class peri.ManagedCollisionEmbeddingBagCollection: peri.embed.BaseManagedCollisionEmbeddingCollection
---@overload fun(args: peri.ManagedCollisionEmbeddingBagCollection.args): peri.ManagedCollisionEmbeddingBagCollection
peri.ManagedCollisionEmbeddingBagCollection = {}

---@class peri.ManagedCollisionEmbeddingBagCollection.args
---@field embedding_bag_collection peri.EmbeddingBagCollection The tables.
---@field managed_collision_collection peri.ManagedCollisionCollection The maps of the same tables.
---@field return_remapped_features? boolean Return the batch with rows, too (default: false).
---@field allow_in_place_embed_weight_update? boolean A note; rows are always reset in place (default: false).

---An EmbeddingCollection that takes raw ids.
---
---Errors: a collection and maps of different tables; quantized tables in training mode.
---
---```lua
---local config = peri.EmbeddingConfig { name = "t", num_embeddings = 8, embedding_dim = 2,
---  feature_names = { "f" } }
---local hash = peri.HashZchManagedCollisionModule { zch_size = 8, total_num_buckets = 1 }
---local rows = peri.ManagedCollisionEmbeddingCollection {
---  embedding_collection = peri.EmbeddingCollection {
---  tables = { config },
---  fused_params = { optimizer = "sgd" } },
---  managed_collision_collection = peri.ManagedCollisionCollection {
---  managed_collision_modules = { t = hash }, embedding_configs = { config } } }
---print(rows(peri.KeyedJaggedTensor.from_lists { keys = { "f" },
---  { { 1000000007, 5 } } }).f:values():size(1))
-----> 2
---```
---@class peri.ManagedCollisionEmbeddingCollection: peri.embed.BaseManagedCollisionEmbeddingCollection
---@overload fun(args: peri.ManagedCollisionEmbeddingCollection.args): peri.ManagedCollisionEmbeddingCollection
peri.ManagedCollisionEmbeddingCollection = {}

---@class peri.ManagedCollisionEmbeddingCollection.args
---@field embedding_collection peri.EmbeddingCollection The tables.
---@field managed_collision_collection peri.ManagedCollisionCollection The maps of the same tables.
---@field return_remapped_features? boolean Return the batch with rows, too (default: false).
---@field allow_in_place_embed_weight_update? boolean A note; rows are always reset in place (default: false).
