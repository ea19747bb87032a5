-- quantized.lua: Quantized tables, for serving.
--
-- Collections whose rows are bytes, or f16, bf16, f32. They are written once (`from_float`, `load_state_dict`,
-- `write_rows`) and looked up; nothing is trained or recorded. docs/quantized_tables.md tells more. In shapes, B is the
-- number of samples.
---@meta

---@class peri
local peri = {}

---A quantized EmbeddingBagCollection: called with a KeyedJaggedTensor, it returns what that returns. Tables may be of
---different data types. Ids outside of a table, and ids of rows that pruning left out, add nothing.
---
---Errors: tables that are no EmbeddingBagConfigs; an unknown data type; a feature that the batch does not have; a
---learning rate.
---
---```lua
---local float = peri.EmbeddingBagCollection { tables = { peri.EmbeddingBagConfig { name = "t",
---  num_embeddings = 10, embedding_dim = 4, feature_names = { "f" } } } }
---local quant = peri.QuantEmbeddingBagCollection.from_float(float, { dtype = "INT8" })
---local batch = peri.KeyedJaggedTensor.from_lists { keys = { "f" }, { { 1, 2 }, {} } }
---print(quant:forward(batch):values():size(2), quant:is_weighted(), quant:embedding_dims()[1])
-----> 4 false 4
---print(quant:embedding_bag_configs()[1].data_type, quant:weight("t"):dtype(),
---  quant:table_state("t"):size(2)) --> INT8 u8 8
---quant:write_rows("t", 3, peri.ones { 1, 4 })
---print(quant:copy("cpu"):table_rows("t", "weight", 3, 1):item(0)) --> 1
---```
---@class peri.QuantEmbeddingBagCollection: peri.embed.TableCollection
---@overload fun(args: peri.QuantEmbeddingBagCollection.args): peri.QuantEmbeddingBagCollection
peri.QuantEmbeddingBagCollection = {}

---@class peri.QuantEmbeddingBagCollection.args
---@field tables peri.EmbeddingBagConfig[] The tables; `data_type` says how rows are stored: INT8, FP8, INT4, INT2, FP16, BF16, FP32.
---@field output_dtype? string Of what a lookup gives: `FP32`, `FP16`, `BF16` (default: FP32).
---@field bounds_check_mode? string Ids outside of a table: `FATAL`, `WARNING`, `IGNORE`, `NONE` (default: WARNING).
---@field pruned? table Table -> which rows are left (default: all): docs/quantized_tables.md.
---@field is_weighted? boolean Whether rows are multiplied by the weights of their ids (default: false).
---@field device? string Where the tables are (default: that of the rank); `meta`: they get no memory, to be sharded.

---Look a batch up. Calling the module calls it.
---@param features peri.KeyedJaggedTensor The ids of B samples; it may have further keys.
---@return peri.KeyedTensor # `[B, columns of all features]`.
function peri.QuantEmbeddingBagCollection:forward(features) end

---The configurations of the tables.
---@return peri.EmbeddingBagConfig[]
function peri.QuantEmbeddingBagCollection:embedding_bag_configs() end

---Whether rows are multiplied by the weights of their ids.
---@return boolean
function peri.QuantEmbeddingBagCollection:is_weighted() end

---Columns of the parts of the result.
---@return integer[]
function peri.QuantEmbeddingBagCollection:embedding_dims() end

---The rows of a table as they are stored: a view.
---@param name string Name of the table.
---@return peri.Tensor # u8 `[rows, bytes of a row]`, or numbers `[rows, embedding_dim]`.
function peri.QuantEmbeddingBagCollection:weight(name) end

---The same as `weight`; there is no other state.
---@param name string Name of the table.
---@param which? string Only `weight` (default: weight).
---@return peri.Tensor # u8 `[rows, bytes of a row]`, or numbers `[rows, embedding_dim]`.
function peri.QuantEmbeddingBagCollection:table_state(name, which) end

---Rows of a table as numbers.
---@param name string Name of the table.
---@param which string `weight`.
---@param row integer The first row, from 0.
---@param n integer How many rows.
---@return peri.Tensor # f32 `[n, embedding_dim]`.
function peri.QuantEmbeddingBagCollection:table_rows(name, which, row, n) end

---Overwrite rows of a table, with numbers or with bytes as they are stored.
---@param name string Name of the table.
---@param row integer The first row, from 0.
---@param source peri.Tensor Numbers `[n, embedding_dim]`, or u8 `[n, bytes of a row]`.
function peri.QuantEmbeddingBagCollection:write_rows(name, row, source) end

---A collection with the same rows that shares nothing with this one.
---@param device? string Where it is (default: the same device).
---@return peri.QuantEmbeddingBagCollection
function peri.QuantEmbeddingBagCollection:copy(device) end

---Make one of a trained collection, which stays as it is. Of one on device `meta` it makes a description on device
---`meta`.
---@param collection peri.EmbeddingBagCollection The trained one.
---@param args? table `dtype` (INT8), `per_table_weight_dtype`, `output_dtype`, `bounds_check_mode`, `pruned`, `device` (default: INT8).
---@return peri.QuantEmbeddingBagCollection
function peri.QuantEmbeddingBagCollection.from_float(collection, args) end

---A quantized EmbeddingCollection: called with a KeyedJaggedTensor, it returns what that returns. Tables may be of
---different data types. Ids outside of a table, and ids of rows that pruning left out, add nothing.
---
---Errors: tables that are no EmbeddingConfigs; an unknown data type; a feature that the batch does not have; a learning
---rate.
---
---```lua
---local float = peri.EmbeddingCollection { tables = { peri.EmbeddingConfig { name = "t",
---  num_embeddings = 10, embedding_dim = 4, feature_names = { "f" } } } }
---local quant = peri.QuantEmbeddingCollection.from_float(float, { dtype = "INT8" })
---local batch = peri.KeyedJaggedTensor.from_lists { keys = { "f" }, { { 1, 2 }, {} } }
---print(quant:forward(batch).f:values():size(1), quant:need_indices(), quant:embedding_dim())
-----> 2 false 4
---print(quant:embedding_configs()[1].data_type, quant:weight("t"):dtype(),
---  quant:table_state("t"):size(2)) --> INT8 u8 8
---quant:write_rows("t", 3, peri.ones { 1, 4 })
---print(quant:copy("cpu"):table_rows("t", "weight", 3, 1):item(0)) --> 1
---```
---@class peri.QuantEmbeddingCollection: peri.embed.TableCollection
---@overload fun(args: peri.QuantEmbeddingCollection.args): peri.QuantEmbeddingCollection
peri.QuantEmbeddingCollection = {}

---@class peri.QuantEmbeddingCollection.args
---@field tables peri.EmbeddingConfig[] The tables; `data_type` says how rows are stored: INT8, FP8, INT4, INT2, FP16, BF16, FP32.
---@field output_dtype? string Of what a lookup gives: `FP32`, `FP16`, `BF16` (default: FP32).
---@field bounds_check_mode? string Ids outside of a table: `FATAL`, `WARNING`, `IGNORE`, `NONE` (default: WARNING).
---@field pruned? table Table -> which rows are left (default: all): docs/quantized_tables.md.
---@field need_indices? boolean The results have the ids as weights (default: false).
---@field device? string Where the tables are (default: that of the rank); `meta`: they get no memory, to be sharded.

---Look a batch up. Calling the module calls it.
---@param features peri.KeyedJaggedTensor The ids of B samples; it may have further keys.
---@return table<string, peri.JaggedTensor> # Feature -> rows of its ids, with its lengths.
function peri.QuantEmbeddingCollection:forward(features) end

---The configurations of the tables.
---@return peri.EmbeddingConfig[]
function peri.QuantEmbeddingCollection:embedding_configs() end

---Columns of the widest table; the rows of an output are as wide as its own table.
---@return integer
function peri.QuantEmbeddingCollection:embedding_dim() end

---Whether the results have the ids as weights.
---@return boolean
function peri.QuantEmbeddingCollection:need_indices() end

---The rows of a table as they are stored: a view.
---@param name string Name of the table.
---@return peri.Tensor # u8 `[rows, bytes of a row]`, or numbers `[rows, embedding_dim]`.
function peri.QuantEmbeddingCollection:weight(name) end

---The same as `weight`; there is no other state.
---@param name string Name of the table.
---@param which? string Only `weight` (default: weight).
---@return peri.Tensor # u8 `[rows, bytes of a row]`, or numbers `[rows, embedding_dim]`.
function peri.QuantEmbeddingCollection:table_state(name, which) end

---Rows of a table as numbers.
---@param name string Name of the table.
---@param which string `weight`.
---@param row integer The first row, from 0.
---@param n integer How many rows.
---@return peri.Tensor # f32 `[n, embedding_dim]`.
function peri.QuantEmbeddingCollection:table_rows(name, which, row, n) end

---Overwrite rows of a table, with numbers or with bytes as they are stored.
---@param name string Name of the table.
---@param row integer The first row, from 0.
---@param source peri.Tensor Numbers `[n, embedding_dim]`, or u8 `[n, bytes of a row]`.
function peri.QuantEmbeddingCollection:write_rows(name, row, source) end

---A collection with the same rows that shares nothing with this one.
---@param device? string Where it is (default: the same device).
---@return peri.QuantEmbeddingCollection
function peri.QuantEmbeddingCollection:copy(device) end

---Make one of a trained collection, which stays as it is. Of one on device `meta` it makes a description on device
---`meta`.
---@param collection peri.EmbeddingCollection The trained one.
---@param args? table `dtype` (INT8), `per_table_weight_dtype`, `output_dtype`, `bounds_check_mode`, `pruned`, `device` (default: INT8).
---@return peri.QuantEmbeddingCollection
function peri.QuantEmbeddingCollection.from_float(collection, args) end

---A copy of a model in evaluation mode, with quantized collections in place of its embedding collections. The model
---stays as it is, and shares nothing with the copy.
---
---Errors: a model without collections; a sharded model; a table that is named and is not there; inplace.
---
---```lua
---local float = peri.EmbeddingBagCollection { tables = { peri.EmbeddingBagConfig { name = "t",
---  num_embeddings = 10, embedding_dim = 4, feature_names = { "f" } } } }
---local served, made = peri.quantize_embeddings { module = nn.Sequential { float },
---  dtype = "INT4" }
---print(served[1].class_name, made[1].path) --> QuantEmbeddingBagCollection 0
---```
---@param args peri.quantize_embeddings.args What becomes of it.
---@return peri.nn.Module # The copy.
---@return table[] # `{ path =, module = }` of each quantized collection.
function peri.quantize_embeddings(args) end

---@class peri.quantize_embeddings.args
---@field module peri.nn.Module The model, or a collection.
---@field dtype? string Of the rows: INT8, INT4, INT2, FP8, FP16, BF16, FP32 (default: INT8).
---@field output_dtype? string Of what a lookup gives (default: FP32).
---@field per_table_weight_dtype? table<string, string> Table -> a dtype of its own (default: none has).
---@field pruned? table Table -> which rows are left (default: all).
---@field additional_mapping? table[] `{ class, class with from_float }`, before the usual ones (default: none).
---@field bounds_check_mode? string Ids outside of a table (default: WARNING).
---@field device? string Of the quantized collections (default: that of each).
---@field inplace? boolean Only `false` is allowed (default: false).
