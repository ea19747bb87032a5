-- tables.lua: Embedding tables.
--
-- A table has a row of numbers for each id. An EmbeddingBagCollection looks the ids of a KeyedJaggedTensor up and adds
-- the rows of each bag up (or takes their mean); an EmbeddingCollection gives the rows themselves. With `fused_params`
-- a table is trained in the backward pass, by an optimizer of its own; without, it is an ordinary parameter with a
-- dense gradient. docs/embedding_tables.md tells more. In shapes, B is the number of samples.
---@meta

---@class peri
local peri = {}

---A table of an EmbeddingBagCollection. Its arguments are its fields.
---
---Errors: an argument that is missing, unknown, or out of its range; `init_fn` together with `weight_init_min` or
---`weight_init_max`.
---
---```lua
---local config = peri.EmbeddingBagConfig { name = "product", num_embeddings = 1000,
---  embedding_dim = 16, feature_names = { "viewed", "bought" }, pooling = "MEAN" }
---print(config.name, config:num_features(), config.data_type) --> product 2 FP32
---```
---@class peri.EmbeddingBagConfig: peri.embed.config.BaseEmbeddingConfig
---@overload fun(args: peri.EmbeddingBagConfig.args): peri.EmbeddingBagConfig
peri.EmbeddingBagConfig = {}

---@class peri.EmbeddingBagConfig.args
---@field name string Name of the table; checkpoints and plans know it by this name.
---@field num_embeddings integer Rows; ids are 0 .. rows - 1.
---@field embedding_dim integer Columns.
---@field feature_names string[] Keys of the KeyedJaggedTensor that look into this table.
---@field pooling? string `SUM` or `MEAN` of the rows of a bag (default: `SUM`).
---@field data_type? string `FP32`, `FP16`, `BF16`; `INT8`, `FP8`, `INT4`, `INT2` are for quantized collections (default: `FP32`).
---@field weight_init_min? number Least start value (default: -sqrt(1 / rows)); they are uniform.
---@field weight_init_max? number Largest start value (default: sqrt(1 / rows)).
---@field init_fn? table `embed.uniform(low, high)`, `embed.normal(mean, deviation)` or `embed.constant(x)` (default: uniform).

---A table of an EmbeddingCollection. Its arguments are its fields.
---
---Errors: an argument that is missing, unknown, or out of its range.
---
---```lua
---local config = peri.EmbeddingConfig { name = "item", num_embeddings = 1000, embedding_dim = 8,
---  feature_names = { "history" },
---  init_fn = peri.embed.constant(0.5) }
---local rows = peri.EmbeddingCollection { tables = { config } }
---print(rows:weight("item"):item(0)) --> 0.5
---```
---@class peri.EmbeddingConfig: peri.embed.config.BaseEmbeddingConfig
---@overload fun(args: peri.EmbeddingConfig.args): peri.EmbeddingConfig
peri.EmbeddingConfig = {}

---@class peri.EmbeddingConfig.args
---@field name string Name of the table; checkpoints and plans know it by this name.
---@field num_embeddings integer Rows; ids are 0 .. rows - 1.
---@field embedding_dim integer Columns.
---@field feature_names string[] Keys of the KeyedJaggedTensor that look into this table.
---@field data_type? string `FP32`, `FP16`, `BF16`; `INT8`, `FP8`, `INT4`, `INT2` are for quantized collections (default: `FP32`).
---@field weight_init_min? number Least start value (default: -sqrt(1 / rows)); they are uniform.
---@field weight_init_max? number Largest start value (default: sqrt(1 / rows)).
---@field init_fn? table `embed.uniform(low, high)`, `embed.normal(mean, deviation)` or `embed.constant(x)` (default: uniform).

---Tables whose rows are pooled by bag. Call it with a KeyedJaggedTensor, which has the features of the tables and may
---have others; the result is a KeyedTensor with the columns of each feature (`feature@table` where several tables have
---the feature). Start values depend on the seed, the table's name, row and column alone, so sharding changes nothing
---about them.
---
---Errors: tables that are no EmbeddingBagConfigs, have equal names or several data types; a feature that the batch does
---not have; an id outside of its table (`bounds_check_mode` in `fused_params` says otherwise).
---
---```lua
---local ebc = peri.EmbeddingBagCollection {
---  tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = 10, embedding_dim = 4,
---    feature_names = { "f" } } },
---  fused_params = { optimizer = "rowwise_adagrad", learning_rate = 0.1 }, seed = 1 }
---local batch = peri.KeyedJaggedTensor.from_lists { keys = { "f" }, { { 1, 2 }, {}, { 9 } } }
---local pooled = ebc(batch)
---print(pooled["f"]:size(1), pooled["f"]:size(2)) --> 3 4
---local before = ebc:weight("t"):to_list()[37]
---pooled:values():sum():backward()
---print(ebc:weight("t"):to_list()[37] ~= before, ebc:table_state("t", "momentum1"):numel())
-----> true 10
---```
---@class peri.EmbeddingBagCollection: peri.embed.TableCollection
---@overload fun(args: peri.EmbeddingBagCollection.args): peri.EmbeddingBagCollection
peri.EmbeddingBagCollection = {}

---@class peri.EmbeddingBagCollection.args
---@field tables peri.EmbeddingBagConfig[] The tables.
---@field is_weighted? boolean Whether rows are multiplied by the weights of their ids (default: false).
---@field fused_params? table `optimizer =`, `learning_rate =`, `eps =`, ... (default: none: dense gradients); docs/embedding_tables.md.
---@field table_fused_params? table<string, table> By table name: `fused_params` of its own, in place of those of all (default: none). Trained in a DistributedModelParallel.
---@field table_batch? table A table batch that has these tables already (default: it makes one). It is a C program's (docs/embedding_c.md), or another collection's (`:materialise()`); `fused_params`, `device` and `seed` are then its own.
---@field device? string Where the tables are (default: the rank's device); `meta`: they get no memory, to be sharded.
---@field seed? integer Of the start values (default: that of the rank).

---Rows that are not pooled: what sequence models want. Call it with a KeyedJaggedTensor; the result is a table from the
---name of each feature to a JaggedTensor whose values are `[ids, embedding_dim]`.
---
---Errors: as of EmbeddingBagCollection.
---
---```lua
---local ec = peri.EmbeddingCollection { tables = { peri.EmbeddingConfig { name = "t",
---  num_embeddings = 10, embedding_dim = 4, feature_names = { "f" } } } }
---local rows = ec(peri.KeyedJaggedTensor.from_lists { keys = { "f" }, { { 1, 2 }, {}, { 9 } } })
---print(rows.f:values():size(1), rows.f:values():size(2), #rows.f) --> 3 4 3
---print(ec:embedding_dim(), ec:embedding_configs()[1].name, ec:need_indices()) --> 4 t false
---print(ec:embedding_names_by_table()[1][1]) --> f
---```
---@class peri.EmbeddingCollection: peri.embed.TableCollection
---@overload fun(args: peri.EmbeddingCollection.args): peri.EmbeddingCollection
peri.EmbeddingCollection = {}

---@class peri.EmbeddingCollection.args
---@field tables peri.EmbeddingConfig[] The tables. They may differ in embedding_dim.
---@field need_indices? boolean The JaggedTensors have the ids as weights (default: false).
---@field fused_params? table `optimizer =`, `learning_rate =`, `eps =`, ... (default: none: dense gradients); docs/embedding_tables.md.
---@field table_fused_params? table<string, table> By table name: `fused_params` of its own, in place of those of all (default: none). Trained in a DistributedModelParallel.
---@field table_batch? table A table batch that has these tables already (default: it makes one). It is a C program's (docs/embedding_c.md), or another collection's (`:materialise()`); `fused_params`, `device` and `seed` are then its own.
---@field device? string Where the tables are (default: the rank's device); `meta`: they get no memory, to be sharded.
---@field seed? integer Of the start values (default: that of the rank).

---@class peri.embed
local embed = {}

---What all collections of tables have, those with quantized rows too. Tables get their memory when it is first needed.
---
---```lua
---local ebc = peri.EmbeddingBagCollection { fused_params = { optimizer = "sgd",
---  learning_rate = 1 }, tables = {
---  peri.EmbeddingBagConfig { name = "t", num_embeddings = 10, embedding_dim = 4,
---    feature_names = { "f" } } } }
---print(peri.embed.TableCollection.is(ebc), ebc:is_materialised()) --> true false
---print(ebc:materialise() ~= nil, ebc:is_materialised()) --> true true
---ebc:prefetch(peri.KeyedJaggedTensor { keys = { "f" }, values = peri.tensor({ 1 }, "i64"),
---  lengths = { 1 } })
---ebc:flush()
---print(ebc:fused_optimizer().param_groups[1].lr) --> 1
---```
---@class peri.embed.TableCollection: peri.nn.Module
embed.TableCollection = {}

---Give the tables memory and their start values, if they have none yet.
---
---Errors: a collection on device `meta`, which is a description alone.
---@return any # The table batch, which `table_batch` of another collection takes.
function embed.TableCollection:materialise() end

---Whether the tables have memory yet.
---@return boolean
function embed.TableCollection:is_materialised() end

---Bring the rows of a later batch from files into memory, in the background. Nothing happens with tables in memory, and
---with variable batches. The batch must not change until it is looked up.
---
---Errors: what is no KeyedJaggedTensor.
---@param features peri.KeyedJaggedTensor The batch.
function embed.TableCollection:prefetch(features) end

---Write rows of tables in files that have changed to their files.
---
---Errors: a file that cannot be written.
function embed.TableCollection:flush() end

---The tables' own optimizer, which updates rows in the backward pass: for schedules and checkpoints.
---@return peri.nn.optim.KeyedOptimizer|nil # nil: there are no `fused_params`.
function embed.TableCollection:fused_optimizer() end

---The configurations of the tables, in their order.
---
---```lua
---local ebc = peri.EmbeddingBagCollection { tables = {
---  peri.EmbeddingBagConfig { name = "a", num_embeddings = 10, embedding_dim = 4,
---    feature_names = { "f" } },
---  peri.EmbeddingBagConfig { name = "b", num_embeddings = 10, embedding_dim = 2,
---    feature_names = { "f", "g" } } } }
---print(ebc:embedding_bag_configs()[2].name, ebc:is_weighted()) --> b false
---print(table.concat(ebc:embedding_names(), " "), table.concat(ebc:embedding_dims(), " "))
-----> f@a f@b g 4 2 2
---print(table.concat(ebc:feature_names(), " ")) --> f g
---```
---@return peri.EmbeddingBagConfig[]
function peri.EmbeddingBagCollection:embedding_bag_configs() end

---Whether rows are multiplied by the weights of their ids.
---@return boolean
function peri.EmbeddingBagCollection:is_weighted() end

---Names of the parts of the result, in order: the features, or `feature@table` where several tables have one.
---@return string[]
function embed.TableCollection:embedding_names() end

---Columns of the parts of the result, in the order of `embedding_names`.
---@return integer[]
function peri.EmbeddingBagCollection:embedding_dims() end

---Each feature once, in the order of first use.
---@return string[]
function embed.TableCollection:feature_names() end

---The weights of a table: a view, which changes as the table is trained.
---
---Errors: a table that is not there; a table in files, of which `table_rows` reads rows.
---@param name string Name of the table.
---@return peri.Tensor # `[num_embeddings, embedding_dim]`
function embed.TableCollection:weight(name) end

---What the optimizer keeps of a table: a view.
---
---Errors: a table or a state that is not there; the error lists those that are.
---@param name string Name of the table.
---@param which? string `weight`, `momentum1`, ...: docs/embedding_tables.md has those of each optimizer (default: `weight`).
---@return peri.Tensor # `[num_embeddings]` or `[num_embeddings, embedding_dim]`
function embed.TableCollection:table_state(name, which) end

---Rows of a table's weights or state: a view, or a copy where rows are in files.
---
---Errors: rows outside of the table; a state that is not there.
---
---```lua
---local ebc = peri.EmbeddingBagCollection { tables = { peri.EmbeddingBagConfig { name = "t",
---  num_embeddings = 10, embedding_dim = 4, feature_names = { "f" } } },
---  fused_params = { optimizer = "sgd", learning_rate = 1 } }
---local x = ebc:table_rows("t", "weight", 2, 3)
---print(x:size(1), x:size(2)) --> 3 4
---ebc:set_learning_rate(0.5)
---ebc:reset_rows("t", peri.tensor({ 2, 5 }, "i64"))
---print(ebc:cache_statistics("t")) --> nil
---```
---@param name string Name of the table.
---@param which string `weight`, or a state of the optimizer.
---@param row integer The first row, from 0.
---@param n integer How many rows.
---@return peri.Tensor # `[n, embedding_dim]`, or `[n]` of a state with one number a row.
function embed.TableCollection:table_rows(name, which, row, n) end

---Let rows start again: their weights are as they were at first, and so is what an optimizer keeps of them.
---
---Errors: a row outside of the table; a table that is not there.
---@param name string Name of the table.
---@param rows peri.Tensor Their numbers, in any order: `[n]` of `i64`.
function embed.TableCollection:reset_rows(name, rows) end

---The learning rate of the tables' own optimizer from now on.
---
---Errors: what is no number. Of a collection without `fused_params` the rate means nothing.
---@param rate number The rate.
function embed.TableCollection:set_learning_rate(rate) end

---Counts of the cache of a table in files or in the host's memory.
---
---Errors: a table that is not there.
---@param name string Name of the table.
---@return table|nil # nil: the table is in memory.
function embed.TableCollection:cache_statistics(name) end

---Columns of the widest table.
---@return integer
function peri.EmbeddingCollection:embedding_dim() end

---The configurations of the tables, in their order.
---@return peri.EmbeddingConfig[]
function peri.EmbeddingCollection:embedding_configs() end

---Whether the results have the ids as weights.
---@return boolean
function peri.EmbeddingCollection:need_indices() end

---For each table the names of its results.
---@return string[][]
function peri.EmbeddingCollection:embedding_names_by_table() end
