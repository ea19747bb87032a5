-- exchanges.lua: Exchanges of ids and embeddings between ranks.
--
-- These are the modules that sharded collections do their work with, for scripts that shard by hand: TorchRec's
-- `dist_data`. Modules are made once and called like functions for every batch. Everything is collective: all ranks
-- make the same calls in the same order. Exchanges of embeddings are on the gradient tape; gradients travel back in the
-- backward pass.
--
-- In shapes, W is the number of ranks, B this rank's samples, D a number of columns. Lists with an entry a rank begin
-- with rank 0. In the examples the world is one rank.
---@meta

---@class peri.dist
local dist = {}
---@class peri.dist.exchange
local exchange = {}

---Sends keys of KeyedJaggedTensors to ranks: the first `splits[1]` keys go to rank 0, the next `splits[2]` to rank 1,
---and so on. Each rank gets its keys with the samples of all ranks.
---
---Errors: splits without a number for each rank; a stagger that does not divide the number of ranks; a
---KeyedJaggedTensor with another number of keys.
---
---```lua
---peri.init()
---local kjt = peri.KeyedJaggedTensor { keys = { "f" }, values = { 1, 2 }, lengths = { 1, 1 } }
---local exchange = peri.dist.KJTAllToAll(nil, { 1 })
---print(exchange:forward(kjt):wait():wait():equal(kjt)) --> true
---local fused = peri.dist.FusedKJTListSplitsAwaitable { exchange:defer(kjt), exchange:defer(kjt) }
---print(fused:wait()[2]:wait():equal(kjt)) --> true
---local meta = peri.dist.exchange.KJTSplitsAllToAllMeta(exchange, kjt)
---print(rawequal(meta.dist, exchange)) --> true
---```
---@class peri.dist.KJTAllToAll
---@param pg? peri.dist.Group The ranks (default: the world).
---@param splits integer[] Numbers of keys, one a rank.
---@param stagger? integer s: ranks come in the order 0, W/s, 2W/s, ..., 1, W/s + 1, ... (default: 1, their own order).
---@overload fun(pg?: peri.dist.Group, splits: integer[], stagger?: integer): peri.dist.KJTAllToAll
dist.KJTAllToAll = {}

---Begin an exchange. Calling the module calls it.
---@param kjt peri.KeyedJaggedTensor Ids of this rank's samples.
---@return peri.Awaitable # Its result, when the sizes are known, is the Awaitable of the KeyedJaggedTensor.
function dist.KJTAllToAll:forward(kjt) end

---The exchange of a call, not yet begun: for `FusedKJTListSplitsAwaitable`.
---@param kjt peri.KeyedJaggedTensor Ids of this rank's samples.
---@return peri.dist.exchange.KJTSplitsAllToAllMeta
function dist.KJTAllToAll:defer(kjt) end

---An exchange that has not begun. `KJTAllToAll:defer` makes it.
---
---Errors: what is no KJTAllToAll, or no KeyedJaggedTensor.
---@class peri.dist.exchange.KJTSplitsAllToAllMeta
---@param dist peri.dist.KJTAllToAll The module.
---@param kjt peri.KeyedJaggedTensor The ids.
---@overload fun(dist: peri.dist.KJTAllToAll, kjt: peri.KeyedJaggedTensor): peri.dist.exchange.KJTSplitsAllToAllMeta
exchange.KJTSplitsAllToAllMeta = {}

---Begins several exchanges with one message for the sizes of all of them in each group. The result is the list of what
---follows each request.
---
---Errors: an entry that is none of those.
---@class peri.dist.FusedKJTListSplitsAwaitable: peri.Awaitable
---@param requests table[] What `KJTAllToAll:defer` or `ShardedModule:defer` returned; other Awaitables stay what they are.
---@overload fun(requests: table[]): peri.dist.FusedKJTListSplitsAwaitable
dist.FusedKJTListSplitsAwaitable = {}

---Ids with and without weights, side by side.
---
---Errors: an unknown argument.
---
---```lua
---print(peri.dist.SparseFeatures({}).id_list_features) --> false
---```
---@class peri.dist.SparseFeatures
---@overload fun(args?: peri.dist.SparseFeatures.args): peri.dist.SparseFeatures
dist.SparseFeatures = {}

---@class peri.dist.SparseFeatures.args
---@field id_list_features? peri.KeyedJaggedTensor Ids without weights (default: none).
---@field id_score_list_features? peri.KeyedJaggedTensor Ids with weights (default: none).

---Sends both parts of SparseFeatures to ranks as `KJTAllToAll` does, with one message for the sizes of both.
---
---Errors: lists without a number for each rank; neither part; scores without weights.
---
---```lua
---peri.init()
---local kjt = peri.KeyedJaggedTensor { keys = { "f" }, values = { 1 }, lengths = { 1 } }
---local exchange = peri.dist.SparseFeaturesAllToAll { id_list_features_per_rank = { 1 },
---  id_score_list_features_per_rank = { 0 } }
---print(exchange:forward(peri.dist.SparseFeatures { id_list_features = kjt })
---  :wait().id_list_features:equal(
---  kjt)) --> true
---```
---@class peri.dist.SparseFeaturesAllToAll
---@overload fun(args: peri.dist.SparseFeaturesAllToAll.args): peri.dist.SparseFeaturesAllToAll
dist.SparseFeaturesAllToAll = {}

---@class peri.dist.SparseFeaturesAllToAll.args
---@field pg? peri.dist.Group The ranks (default: the world).
---@field id_list_features_per_rank integer[] Keys without weights, one number a rank.
---@field id_score_list_features_per_rank integer[] Keys with weights, one number a rank.
---@field device? string Not used; TorchRec's (default: none).
---@field stagger? integer As in `KJTAllToAll` (default: 1).

---Begin an exchange. Calling the module calls it.
---@param features peri.dist.SparseFeatures Ids of this rank's samples.
---@return peri.Awaitable # Of SparseFeatures.
function dist.SparseFeaturesAllToAll:forward(features) end

---Pooled embeddings back to the ranks whose samples they are: the way of tables that are whole on one rank each.
---
---Errors: lists without a number for each rank; rows that W does not divide, without batch sizes.
---
---```lua
---peri.init()
---print(peri.dist.PooledEmbeddingsAllToAll { dim_sum_per_rank = { 3 } }:forward(peri.ones { 2,
---  3 }):wait():size(2)) --> 3
---```
---@class peri.dist.PooledEmbeddingsAllToAll
---@overload fun(args: peri.dist.PooledEmbeddingsAllToAll.args): peri.dist.PooledEmbeddingsAllToAll
dist.PooledEmbeddingsAllToAll = {}

---@class peri.dist.PooledEmbeddingsAllToAll.args
---@field dim_sum_per_rank integer[] Columns that each rank has.
---@field pg? peri.dist.Group The ranks (default: the world).
---@field callbacks? function[] Called with the result, each with what the one before returned (default: none).
---@field codecs? peri.dist.QuantizedCommCodecs Numbers on the wire (default: f32).
---@field device? string Not used; TorchRec's (default: none).

---Begin an exchange. Calling the module calls it.
---@param local_embs peri.Tensor `[samples of all ranks, columns of this rank]`.
---@param batch_size_per_rank? integer[] Samples of each rank (default: equally many).
---@return peri.dist.exchange.PooledEmbeddingsAwaitable # Of `[B, columns of all ranks]`.
function dist.PooledEmbeddingsAllToAll:forward(local_embs, batch_size_per_rank) end

---As `PooledEmbeddingsAllToAll`, for features with different numbers of samples.
---
---Errors: lists that do not have an entry for each rank and feature.
---
---```lua
---peri.init()
---local exchange = peri.dist.VariableBatchPooledEmbeddingsAllToAll {
---  emb_dim_per_rank_per_feature = { { 2 } } }
---print(exchange:forward(peri.ones { 6 }, { { 3 } }, { 3 }):wait():numel()) --> 6
---```
---@class peri.dist.VariableBatchPooledEmbeddingsAllToAll
---@overload fun(args: peri.dist.VariableBatchPooledEmbeddingsAllToAll.args): peri.dist.VariableBatchPooledEmbeddingsAllToAll
dist.VariableBatchPooledEmbeddingsAllToAll = {}

---@class peri.dist.VariableBatchPooledEmbeddingsAllToAll.args
---@field emb_dim_per_rank_per_feature integer[][] Columns of each feature of each rank.
---@field pg? peri.dist.Group The ranks (default: the world).
---@field callbacks? function[] Called with the result, each with what the one before returned (default: none).
---@field codecs? peri.dist.QuantizedCommCodecs Numbers on the wire (default: f32).
---@field device? string Not used; TorchRec's (default: none).

---Begin an exchange. Calling the module calls it.
---@param local_embs peri.Tensor `[N]`: by rank, feature, sample, column.
---@param batch_size_per_rank_per_feature integer[][] Samples of each rank for each of this rank's features.
---@param batch_size_per_feature_pre_a2a integer[] This rank's samples for each feature of all ranks.
---@return peri.dist.exchange.PooledEmbeddingsAwaitable # Of `[N]`: by owner, feature, sample, column.
function dist.VariableBatchPooledEmbeddingsAllToAll:forward(local_embs, batch_size_per_rank_per_feature, batch_size_per_feature_pre_a2a) end

---Sums over ranks, of which each rank gets its samples: the way of tables whose rows are spread over ranks.
---
---Errors: splits without a number for each rank.
---
---```lua
---peri.init()
---print(peri.dist.PooledEmbeddingsReduceScatter({}):forward(peri.ones { 2, 3 },
---  { 2 }):wait():size(1))
-----> 2
---```
---@class peri.dist.PooledEmbeddingsReduceScatter
---@overload fun(args?: peri.dist.PooledEmbeddingsReduceScatter.args): peri.dist.PooledEmbeddingsReduceScatter
dist.PooledEmbeddingsReduceScatter = {}

---@class peri.dist.PooledEmbeddingsReduceScatter.args
---@field pg? peri.dist.Group The ranks (default: the world).
---@field callbacks? function[] Called with the result, each with what the one before returned (default: none).
---@field codecs? peri.dist.QuantizedCommCodecs Numbers on the wire (default: f32).
---@field device? string Not used; TorchRec's (default: none).

---Begin an exchange. Calling the module calls it.
---@param local_embs peri.Tensor `[samples of all ranks, D]`.
---@param input_splits? integer[] Samples of each rank (default: equally many).
---@return peri.dist.exchange.PooledEmbeddingsAwaitable # Of `[B, D]`.
function dist.PooledEmbeddingsReduceScatter:forward(local_embs, input_splits) end

---As `PooledEmbeddingsReduceScatter`, for features with different numbers of samples.
---
---Errors: lists that do not have an entry for each rank and feature.
---
---```lua
---peri.init()
---local exchange = peri.dist.VariableBatchPooledEmbeddingsReduceScatter {}
---print(exchange:forward(peri.ones { 6 }, { { 3 } }, { 2 }):wait():numel()) --> 6
---```
---@class peri.dist.VariableBatchPooledEmbeddingsReduceScatter
---@overload fun(args?: peri.dist.VariableBatchPooledEmbeddingsReduceScatter.args): peri.dist.VariableBatchPooledEmbeddingsReduceScatter
dist.VariableBatchPooledEmbeddingsReduceScatter = {}

---@class peri.dist.VariableBatchPooledEmbeddingsReduceScatter.args
---@field pg? peri.dist.Group The ranks (default: the world).
---@field callbacks? function[] Called with the result, each with what the one before returned (default: none).
---@field codecs? peri.dist.QuantizedCommCodecs Numbers on the wire (default: f32).
---@field device? string Not used; TorchRec's (default: none).

---Begin an exchange. Calling the module calls it.
---@param local_embs peri.Tensor `[N]`: by rank, feature, sample, column.
---@param batch_size_per_rank_per_feature integer[][] Samples of each rank for each feature.
---@param embedding_dims integer[] Columns of each feature.
---@return peri.dist.exchange.PooledEmbeddingsAwaitable # Of this rank's part, `[n]`.
function dist.VariableBatchPooledEmbeddingsReduceScatter:forward(local_embs, batch_size_per_rank_per_feature, embedding_dims) end

---The embeddings of all ranks, one after the other.
---
---Errors: what is no tensor.
---
---```lua
---peri.init()
---print(peri.dist.PooledEmbeddingsAllGather({}):forward(peri.ones { 2, 3 }):wait():size(1)) --> 2
---```
---@class peri.dist.PooledEmbeddingsAllGather
---@overload fun(args?: peri.dist.PooledEmbeddingsAllGather.args): peri.dist.PooledEmbeddingsAllGather
dist.PooledEmbeddingsAllGather = {}

---@class peri.dist.PooledEmbeddingsAllGather.args
---@field pg? peri.dist.Group The ranks (default: the world).
---@field callbacks? function[] Called with the result, each with what the one before returned (default: none).
---@field codecs? peri.dist.QuantizedCommCodecs Numbers on the wire (default: f32).
---@field device? string Not used; TorchRec's (default: none).

---Begin an exchange. Calling the module calls it.
---@param local_emb peri.Tensor `[B, D]`, alike on all ranks.
---@return peri.dist.exchange.PooledEmbeddingsAwaitable # Of `[W * B, D]`.
function dist.PooledEmbeddingsAllGather:forward(local_emb) end

---A row for each id, back to the rank that sent the id.
---
---Errors: lists without a number for each rank; batches that are not equal, without batch sizes.
---
---```lua
---peri.init()
---local exchange = peri.dist.SequenceEmbeddingsAllToAll { features_per_rank = { 1 } }
---local rows = exchange:forward { local_embs = peri.ones { 3, 2 },
---  lengths = peri.tensor({ 1, 2 }, "i32"), input_splits = { 3 }, output_splits = { 3 } }
---print(rows:wait():size(1)) --> 3
---```
---@class peri.dist.SequenceEmbeddingsAllToAll
---@overload fun(args: peri.dist.SequenceEmbeddingsAllToAll.args): peri.dist.SequenceEmbeddingsAllToAll
dist.SequenceEmbeddingsAllToAll = {}

---@class peri.dist.SequenceEmbeddingsAllToAll.args
---@field pg? peri.dist.Group The ranks (default: the world).
---@field features_per_rank integer[] Features of each rank.
---@field codecs? peri.dist.QuantizedCommCodecs Numbers on the wire (default: f32).
---@field device? string Not used; TorchRec's (default: none).

---Begin an exchange. Calling the module calls it.
---@param a table `local_embs`, `lengths`, `input_splits`, `output_splits`, and so on, as `ops.alltoall_sequence`.
---@return peri.dist.exchange.SequenceEmbeddingsAwaitable # Of a row for each id that this rank sent: `[ids, D]`.
function dist.SequenceEmbeddingsAllToAll:forward(a) end

---In one process with several devices: the first `splits[1]` keys on the first device, and so on.
---
---Errors: splits without a number for each device.
---
---```lua
---local kjt = peri.KeyedJaggedTensor { keys = { "f", "g" }, values = { 1, 2 },
---  lengths = { 1, 1 } }
---print(#peri.dist.KJTOneToAll({ 1, 1 }, 2, "cpu"):forward(kjt)) --> 2
---```
---@class peri.dist.KJTOneToAll
---@param splits integer[] Numbers of keys, one a device.
---@param world_size integer Devices.
---@param device? string|string[] One for each, or `cuda` for `cuda:0`, `cuda:1`, ... (default: where the ids are).
---@overload fun(splits: integer[], world_size: integer, device?: string|string[]): peri.dist.KJTOneToAll
dist.KJTOneToAll = {}

---Cut and copy. Calling the module calls it.
---@param kjt peri.KeyedJaggedTensor The ids.
---@return peri.KeyedJaggedTensor[] # One a device.
function dist.KJTOneToAll:forward(kjt) end

---The tensors of all devices, side by side on one. In one process with several devices.
---
---Errors: another number of tensors than devices.
---
---```lua
---local merge = peri.dist.EmbeddingsAllToOne { device = "cpu", world_size = 2 }
---merge:set_device("cpu")
---print(merge:forward({ peri.ones { 1, 2 }, peri.ones { 1, 2 } }):numel()) --> 4
---```
---@class peri.dist.EmbeddingsAllToOne
---@overload fun(args: peri.dist.EmbeddingsAllToOne.args): peri.dist.EmbeddingsAllToOne
dist.EmbeddingsAllToOne = {}

---@class peri.dist.EmbeddingsAllToOne.args
---@field device? string Where the result is (default: where the first tensor is).
---@field world_size integer Devices.
---@field cat_dim? integer The dimension in which they are joined (default: 2).

---Merge. Calling the module calls it.
---@param tensors peri.Tensor[] One a device: `[B, columns]`.
---@return peri.Tensor # `[B, all columns]`.
function dist.EmbeddingsAllToOne:forward(tensors) end

---Another device for the result, from now on.
---@param device? string The device (default: where the first tensor is).
function dist.EmbeddingsAllToOne:set_device(device) end

---The sum of the tensors of all devices, on one. In one process with several devices.
---
---Errors: another number of tensors than devices.
---
---```lua
---local merge = peri.dist.EmbeddingsAllToOneReduce { device = "cpu", world_size = 2 }
---merge:set_device("cpu")
---print(merge:forward({ peri.ones { 1, 2 }, peri.ones { 1, 2 } }):numel()) --> 2
---```
---@class peri.dist.EmbeddingsAllToOneReduce
---@overload fun(args: peri.dist.EmbeddingsAllToOneReduce.args): peri.dist.EmbeddingsAllToOneReduce
dist.EmbeddingsAllToOneReduce = {}

---@class peri.dist.EmbeddingsAllToOneReduce.args
---@field device? string Where the result is (default: where the first tensor is).
---@field world_size integer Devices.

---Merge. Calling the module calls it.
---@param tensors peri.Tensor[] One a device: `[B, columns]`.
---@return peri.Tensor # Of the shape of one.
function dist.EmbeddingsAllToOneReduce:forward(tensors) end

---Another device for the result, from now on.
---@param device? string The device (default: where the first tensor is).
function dist.EmbeddingsAllToOneReduce:set_device(device) end

---The tensors of all devices, on one. In one process with several devices.
---
---Errors: another number of tensors than devices.
---
---```lua
---local merge = peri.dist.SeqEmbeddingsAllToOne { device = "cpu", world_size = 2 }
---merge:set_device("cpu")
---print(#merge:forward { peri.ones { 1, 2 }, peri.ones { 1, 2 } }) --> 2
---```
---@class peri.dist.SeqEmbeddingsAllToOne
---@overload fun(args: peri.dist.SeqEmbeddingsAllToOne.args): peri.dist.SeqEmbeddingsAllToOne
dist.SeqEmbeddingsAllToOne = {}

---@class peri.dist.SeqEmbeddingsAllToOne.args
---@field device? string Where the result is (default: where the first tensor is).
---@field world_size integer Devices.

---Merge. Calling the module calls it.
---@param tensors peri.Tensor[] One a device: `[B, columns]`.
---@return peri.Tensor[] # Each of its shape.
function dist.SeqEmbeddingsAllToOne:forward(tensors) end

---Another device for the result, from now on.
---@param device? string The device (default: where the first tensor is).
function dist.SeqEmbeddingsAllToOne:set_device(device) end

---Rows of tensors to ranks of one's choice. Called with a tensor `[n, ...]` and `input_splits`, the rows for each rank;
---returns an Awaitable of the rows that come, in the order of ranks. No gradients.
---
---Errors: splits that do not add up to the rows.
---
---```lua
---peri.init()
---print(peri.dist.TensorAllToAll()(peri.ones { 2, 3 }, { 2 }):wait():size(1)) --> 2
---```
---@class peri.dist.TensorAllToAll
---@param pg? peri.dist.Group The ranks (default: the world).
---@overload fun(pg?: peri.dist.Group): peri.dist.TensorAllToAll
dist.TensorAllToAll = {}

---Bags of JaggedTensors to ranks of one's choice. Called with a JaggedTensor and `num_items_to_send`, the bags for each
---rank; returns an Awaitable of the JaggedTensor of the bags that come. Weights travel along. No gradients.
---
---Errors: numbers that do not add up to the bags.
---
---```lua
---peri.init()
---local jt = peri.JaggedTensor { values = peri.tensor({ 1, 2, 3 }, "i64"), lengths = { 2, 1 } }
---print(peri.dist.JaggedTensorAllToAll()(jt, { 2 }):wait():values():numel()) --> 3
---```
---@class peri.dist.JaggedTensorAllToAll
---@param pg? peri.dist.Group The ranks (default: the world).
---@overload fun(pg?: peri.dist.Group): peri.dist.JaggedTensorAllToAll
dist.JaggedTensorAllToAll = {}
