-- tables_more.lua: Tables: sequences, pieces, weights by position, caches.
--
-- More of the collections on the page `tables`. In shapes, B is the number of samples, N of ids.
---@meta

---@class peri
local peri = {}
---@class peri.embed
local embed = {}
---@class peri.embed.config
local config = {}
---@class peri.embed.tbe
local tbe = {}

---Look a batch up. Calling the module calls it.
---
---Errors: a feature that the batch does not have; weights that come unasked, or do not come; an id outside of its
---table.
---
---```lua
---local ebc = peri.EmbeddingBagCollection { tables = { peri.EmbeddingBagConfig { name = "t",
---  num_embeddings = 10, embedding_dim = 4, feature_names = { "f" } } } }
---local batch = peri.KeyedJaggedTensor.from_lists { keys = { "f" }, { { 1, 2 }, {} } }
---ebc:prefetch(batch)
---print(ebc:forward(batch):values():size(2)) --> 4
---```
---@param features peri.KeyedJaggedTensor The ids of B samples; it may have further keys.
---@return peri.KeyedTensor # `[B, columns of all features]`.
function peri.EmbeddingBagCollection:forward(features) end

---Look a batch up. Calling the module calls it.
---
---Errors: a feature that the batch does not have; an id outside of its table. Weights of the batch are handed on in the
---results; with need_indices they are not.
---
---```lua
---local ec = peri.EmbeddingCollection { tables = { peri.EmbeddingConfig { name = "t",
---  num_embeddings = 10, embedding_dim = 4, feature_names = { "f" } } },
---  fused_params = { optimizer = "rowwise_adagrad" } }
---local batch = peri.KeyedJaggedTensor.from_lists { keys = { "f" }, { { 1, 2 }, {} } }
---ec:prefetch(batch)
---print(ec:forward(batch).f:values():size(1), ec:is_weighted(), ec:cache_statistics("t"))
-----> 2 false nil
---print(ec:weight("t"):size(1), ec:table_state("t", "momentum1"):numel(),
---  ec:table_rows("t", "weight", 0, 2):size(1)) --> 10 10 2
---ec:reset_rows("t", peri.tensor({ 2 }, "i64"))
---ec:set_learning_rate(0.5)
---```
---@param features peri.KeyedJaggedTensor The ids of B samples; it may have further keys.
---@return table<string, peri.JaggedTensor> # Feature -> rows of its ids, with its lengths; with need_indices the weights are the ids.
function peri.EmbeddingCollection:forward(features) end

---Whether rows are multiplied by weights: never.
---@return boolean
function peri.EmbeddingCollection:is_weighted() end

---Tables that are cut by rows into pieces, each of which is a table of its own for plans: hot rows on every rank, warm
---ones sharded, cold ones in files. Pieces are called after their first row: `t:0`, `t:1000`, of the collection in the
---field `pieces`.
---
---Errors: a pooling other than SUM; cuts that do not rise within the table; optimizers that look at all rows of a
---table; a feature of two tables.
---
---```lua
---local bags = peri.PiecewiseEmbeddingBagCollection {
---  tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = 10, embedding_dim = 4,
---    feature_names = { "f" } } }, cuts = { t = { 3 } } }
---local batch = peri.KeyedJaggedTensor.from_lists { keys = { "f" }, { { 1, 7 } } }
---print(bags:forward(batch):values():size(2), table.concat(bags:cut(batch):keys(), " "))
-----> 4 f:0 f:3
---```
---@class peri.PiecewiseEmbeddingBagCollection: peri.nn.Module
---@overload fun(args: peri.PiecewiseEmbeddingBagCollection.args): peri.PiecewiseEmbeddingBagCollection
peri.PiecewiseEmbeddingBagCollection = {}

---@class peri.PiecewiseEmbeddingBagCollection.args
---@field tables peri.EmbeddingBagConfig[] The tables; pooling SUM.
---@field cuts table<string, integer[]> Table -> first rows of its pieces but the first, rising.
---@field fused_params? table As of EmbeddingBagCollection (default: none, dense gradients).
---@field is_weighted? boolean Whether rows are multiplied by the weights of their ids (default: false).

---Look a batch up. Calling the module calls it.
---@param features peri.KeyedJaggedTensor The ids of B samples.
---@return peri.KeyedTensor # `[B, columns of all features]`.
function peri.PiecewiseEmbeddingBagCollection:forward(features) end

---The batch as the pieces get it: a key for each piece, ids counted from the piece's first row.
---@param features peri.KeyedJaggedTensor The ids.
---@return peri.KeyedJaggedTensor
function peri.PiecewiseEmbeddingBagCollection:cut(features) end

---How a table that is larger than memory is cached (`cache_params` in `fused_params`, compute kernel
---`fused_uvm_caching`). Its arguments are its fields.
---
---Errors: a load_factor that is not in `0 < x <= 1`; an unknown algorithm; a directory that is no text.
---
---```lua
---print(tostring(peri.CacheParams { load_factor = 0.1, algorithm = "LFU" })) --> LFU 0.1
---```
---@class peri.CacheParams
---@overload fun(args?: peri.CacheParams.args): peri.CacheParams
peri.CacheParams = {}

---@class peri.CacheParams.args
---@field algorithm? string Which rows leave: `LRU` or `LFU` (default: LRU).
---@field load_factor? number Rows in the cache, as a share of the table's (default: 0.2).
---@field ways? integer Slots of a set, of which a row takes one; 0: any slot (default: 64 on GPUs, else 0).
---@field reserved_memory? number Bytes that caches leave to others (default: 0).
---@field precision? string Only the table's data type is allowed (default: that).
---@field prefetch_pipeline? boolean A note; prefetches are always safe (default: false).
---@field stats? any Hints for a planner: kept, not read (default: none).
---@field directory? string Folder of the files of rows (default: the host's memory; on a CPU a nameless file).

---Start values that are uniform in `low <= x < high`, for `init_fn`. Each depends on the seed, the table's name, row
---and column alone.
---
---Errors: numbers that are not finite; low above high.
---
---```lua
---local embed = peri.embed
---print(type(embed.uniform(-1, 1)), type(embed.normal(0, 1)), type(embed.constant(0)))
-----> table table table
---```
---@param low number The least number.
---@param high number Above all numbers.
---@return table
function embed.uniform(low, high) end

---Normal start values, for `init_fn`.
---
---Errors: numbers that are not finite; a deviation below 0.
---@param mean number Their mean.
---@param deviation number Their standard deviation.
---@return table
function embed.normal(mean, deviation) end

---Start values that are all one number, for `init_fn`.
---
---Errors: a number that is not finite.
---@param value number The number.
---@return table
function embed.constant(value) end

---What `EmbeddingBagConfig` and `EmbeddingConfig` share. Its fields are their arguments.
---
---Errors: methods that are called on the class.
---
---```lua
---local t = peri.EmbeddingConfig { name = "t", num_embeddings = 4, embedding_dim = 2,
---  feature_names = { "f" } }
---print(peri.embed.config.BaseEmbeddingConfig.is(t), t:num_features()) --> true 1
---print(t:get_weight_init_min(), t:get_weight_init_max(), type(t:initialiser()))
-----> -0.5 0.5 table
---```
---@class peri.embed.config.BaseEmbeddingConfig
config.BaseEmbeddingConfig = {}

---The least start value where they are uniform.
---@return number
function config.BaseEmbeddingConfig:get_weight_init_min() end

---The largest start value where they are uniform.
---@return number
function config.BaseEmbeddingConfig:get_weight_init_max() end

---How many features look into the table.
---@return integer
function config.BaseEmbeddingConfig:num_features() end

---How the table's weights start: what `init_fn` says, or uniform.
---@return table
function config.BaseEmbeddingConfig:initialiser() end

---The names that `optimizer` in `fused_params` may have.
---
---```lua
---local config = peri.embed.config
---print(#config.optimizers() > 10, config.optimizer_of("my script", "RowWiseAdagrad"))
-----> true rowwise_adagrad
---print(config.usual_params("sgd").learning_rate,
---  config.cache_params("my script", { load_factor = 1 }).load_factor) --> 0.01 1
---```
---@return string[]
function config.optimizers() end

---The optimizer that FBGEMM's or TorchRec's name means.
---
---Errors: a name that is none of them; the message lists those that are.
---@param func string Whose call it is, for the message.
---@param name string Such as `RowWiseAdagrad` or `exact_sgd`.
---@return string # Its name here.
function config.optimizer_of(func, name) end

---`fused_params` with which an optimizer of that name trains, for planners and measurements.
---
---Errors: a name that is none of them.
---@param name string The optimizer.
---@return table
function config.usual_params(name) end

---CacheParams, of CacheParams or of a table of its arguments.
---
---Errors: what is neither.
---@param func string Whose call it is, for the message.
---@param value peri.CacheParams|table Either.
---@return peri.CacheParams
function config.cache_params(func, value) end

---Check `fused_params`; unknown names and values are errors. docs/embedding_tables.md lists all of them.
---
---Errors: an unknown argument, optimizer or mode; a number out of its range.
---
---```lua
---local _, _, name = peri.embed.config.fused_params("my script", { optimizer = "exact_sgd" })
---print(name) --> sgd
---```
---@param func string Whose call it is, for the message.
---@param params table The parameters.
---@return ffi.cdata* # The optimizer, as C has it.
---@return integer # How ids outside of their table are treated.
---@return string # The optimizer's name.
---@return peri.CacheParams|nil
---@return string|nil # The data type of the result.
function config.fused_params(func, params) end

---Names and columns of the parts of a collection's result.
---
---Errors: what is no list of configurations.
---
---```lua
---local t = peri.EmbeddingConfig { name = "t", num_embeddings = 4, embedding_dim = 2,
---  feature_names = { "f" } }
---print(peri.embed.config.output_names({ t })[1]) --> f
---```
---@param tables table[] EmbeddingBagConfigs or EmbeddingConfigs.
---@return string[] # The features, or `feature@table` where several tables have one.
---@return integer[] # Their columns.
function config.output_names(tables) end

---A table batch: tables that are looked up and updated by one call, without a module around them. Named arguments:
---`tables` (a list of `{ name =, rows =, cols =, pooling =, init = }`) and `fused_params` are needed; `features`,
---`data_type`, `output_dtype`, `seed`, `device`, `mapped` are optional. docs/embedding_tables.md shows its methods.
---
---Errors: an argument that is missing or unknown; sizes out of range.
---
---```lua
---local batch = peri.embed.tbe.new { tables = { { name = "t", rows = 4, cols = 2 } },
---  fused_params = { optimizer = "sgd" } }
---print(batch:state(1):size(1), #peri.embed.tbe.states_of({ optimizer = "rowwise_adagrad" },
---  "FP32"))
-----> 4 1
---```
---@param args table The named arguments.
---@return any # The table batch.
function tbe.new(args) end

---The states that an optimizer keeps of a table, without the weights.
---
---Errors: an unknown optimizer or data type.
---@param params table `fused_params`.
---@param data_type? string Of the table (default: FP32).
---@return table[] # `{ name =, geometry =, dtype = }` each.
function tbe.states_of(params, data_type) end

---A model with the same numbers, on another device or the same one, that shares nothing with this one. Quantized
---collections copy themselves; of other modules the tensors, sub-modules and plain tables in their fields are copied.
---
---Errors: what is no Module; a collection that is trained.
---
---```lua
---local layer = nn.Linear { in_features = 1, out_features = 1 }
---local copy = peri.embed.copy_to_device(layer, "cpu")
---copy.weight:detach():fill(9)
---print(layer.weight:item() == 9) --> false
---```
---@param module peri.nn.Module The model.
---@param device? string Where the copy is (default: where its parts are).
---@return peri.nn.Module
function embed.copy_to_device(module, device) end
