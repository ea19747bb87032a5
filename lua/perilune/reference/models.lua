-- models.lua: Recommendation models and their parts.
--
-- Names, arguments, formulas and paths of parameters are TorchRec's. The collections may be sharded or not. In shapes,
-- B is the number of samples, F the number of sparse features, D the embedding dimension.
---@meta

---@class peri.nn
local nn = {}
---@class peri.nn.models
local models = {}

---DLRM's interaction: the dense features, then the dot products of all pairs among the dense and sparse features.
---
---Errors: sparse features of another dimension than the dense ones, or another number of them.
---
---```lua
---local inter = nn.InteractionArch { num_sparse_features = 2 }
---print(inter(peri.ones { 1, 3 }, peri.ones { 1, 2, 3 }):size(2),
---  inter:forward(peri.ones { 1, 3 }, peri.ones { 1, 2, 3 }):item(5)) --> 6 3
---```
---@class peri.nn.InteractionArch: peri.nn.Module
---@overload fun(args: peri.nn.InteractionArch.args): peri.nn.InteractionArch
nn.InteractionArch = {}

---@class peri.nn.InteractionArch.args
---@field num_sparse_features integer F; with 0 the dense features are the result.

---Compute it. Calling the module calls it.
---@param dense_features peri.Tensor `[B, D]`.
---@param sparse_features peri.Tensor `[B, F, D]`.
---@return peri.Tensor # `[B, D + F (F + 1) / 2]`.
function nn.InteractionArch:forward(dense_features, sparse_features) end

---All features as one row, through a cross network.
---
---Errors: a crossnet that cannot be called.
---
---```lua
---local cross = nn.CrossNet { in_features = 9, num_layers = 1 }
---print(nn.InteractionDCNArch { num_sparse_features = 2, crossnet = cross }(peri.ones { 1, 3 },
---  peri.ones { 1, 2, 3 }):size(2)) --> 9
---```
---@class peri.nn.InteractionDCNArch: peri.nn.Module
---@overload fun(args: peri.nn.InteractionDCNArch.args): peri.nn.InteractionDCNArch
nn.InteractionDCNArch = {}

---@class peri.nn.InteractionDCNArch.args
---@field num_sparse_features integer F; with 0 the dense features are the result.
---@field crossnet peri.nn.Module A module for `(F + 1) * D` columns.

---Compute it. Calling the module calls it.
---@param dense_features peri.Tensor `[B, D]`.
---@param sparse_features peri.Tensor `[B, F, D]`.
---@return peri.Tensor # `[B, (F + 1) * D]`.
function nn.InteractionDCNArch:forward(dense_features, sparse_features) end

---The dense features, then the products of two projections: two branches make I1 and I2 vectors of all features, and
---each of the first is multiplied with each of the second.
---
---Errors: a branch that cannot be called.
---
---```lua
---local function branch() return nn.Linear { in_features = 9, out_features = 6 } end
---local inter = nn.InteractionProjectionArch { num_sparse_features = 2,
---  interaction_branch1 = branch(), interaction_branch2 = branch() }
---print(inter(peri.ones { 1, 3 }, peri.ones { 1, 2, 3 }):size(2)) --> 7
---```
---@class peri.nn.InteractionProjectionArch: peri.nn.Module
---@overload fun(args: peri.nn.InteractionProjectionArch.args): peri.nn.InteractionProjectionArch
nn.InteractionProjectionArch = {}

---@class peri.nn.InteractionProjectionArch.args
---@field num_sparse_features integer F; with 0 the dense features are the result.
---@field interaction_branch1 peri.nn.Module From `(F + 1) * D` to `I1 * D` columns.
---@field interaction_branch2 peri.nn.Module From `(F + 1) * D` to `D * I2` columns.

---Compute it. Calling the module calls it.
---@param dense_features peri.Tensor `[B, D]`.
---@param sparse_features peri.Tensor `[B, F, D]`.
---@return peri.Tensor # `[B, D + I1 * I2]`.
function nn.InteractionProjectionArch:forward(dense_features, sparse_features) end

---A cross network (DCN V2): in each layer `x = x0 * (W x + b) + x`, beginning with `x = x0`.
---
---Errors: num_layers below 0 or above 4096.
---
---```lua
---print(nn.CrossNet({ in_features = 4, num_layers = 2 })(peri.zeros { 1, 4 }):item(0)) --> 0
---```
---@class peri.nn.CrossNet: peri.nn.Module
---@overload fun(args: peri.nn.CrossNet.args): peri.nn.CrossNet
nn.CrossNet = {}

---@class peri.nn.CrossNet.args
---@field in_features integer C, the columns.
---@field num_layers integer Layers; with 0 the input is the result.
---@field dtype? string dtype of the parameters: `f32` or `f64` (default: f32).
---@field device? string Where they are (default: that of the rank).

---Compute it. Calling the module calls it.
---@param x0 peri.Tensor `[B, C]`.
---@return peri.Tensor # `[B, C]`.
function nn.CrossNet:forward(x0) end

---A cross network whose W is a product of two thin matrices: in each layer `x = x0 * (W (V x) + b) + x`.
---
---Errors: num_layers below 0 or above 4096; low_rank below 1.
---
---```lua
---print(nn.LowRankCrossNet({ in_features = 4, num_layers = 2, low_rank = 2 })(
---  peri.zeros { 1, 4 }):size(2))
-----> 4
---```
---@class peri.nn.LowRankCrossNet: peri.nn.Module
---@overload fun(args: peri.nn.LowRankCrossNet.args): peri.nn.LowRankCrossNet
nn.LowRankCrossNet = {}

---@class peri.nn.LowRankCrossNet.args
---@field in_features integer C, the columns.
---@field num_layers integer Layers; with 0 the input is the result.
---@field low_rank? integer Numbers between V and W (default: 1).
---@field dtype? string dtype of the parameters: `f32` or `f64` (default: f32).
---@field device? string Where they are (default: that of the rank).

---Compute it. Calling the module calls it.
---@param x0 peri.Tensor `[B, C]`.
---@return peri.Tensor # `[B, C]`.
function nn.LowRankCrossNet:forward(x0) end

---A cross network with a vector in place of the matrix (DCN V1): in each layer `x = x0 * (w . x) + b + x`.
---
---Errors: num_layers below 0 or above 4096.
---
---```lua
---print(nn.VectorCrossNet({ in_features = 4, num_layers = 2 })(peri.zeros { 1, 4 }):item(0)) --> 0
---```
---@class peri.nn.VectorCrossNet: peri.nn.Module
---@overload fun(args: peri.nn.VectorCrossNet.args): peri.nn.VectorCrossNet
nn.VectorCrossNet = {}

---@class peri.nn.VectorCrossNet.args
---@field in_features integer C, the columns.
---@field num_layers integer Layers; with 0 the input is the result.
---@field dtype? string dtype of the parameters: `f32` or `f64` (default: f32).
---@field device? string Where they are (default: that of the rank).

---Compute it. Calling the module calls it.
---@param x0 peri.Tensor `[B, C]`.
---@return peri.Tensor # `[B, C]`.
function nn.VectorCrossNet:forward(x0) end

---A cross network of experts (DCN-Mix). In each layer expert e gives `x0 * (U_e f(C_e f(V_e x)) + b)`; the experts are
---weighted by the softmax of gates, and x is added.
---
---Errors: num_layers below 0 or above 4096; num_experts or low_rank below 1; an activation that is not among those.
---
---```lua
---local mix = nn.LowRankMixtureCrossNet { in_features = 4, num_layers = 1, num_experts = 2 }
---print(mix(peri.zeros { 1, 4 }):size(2)) --> 4
---```
---@class peri.nn.LowRankMixtureCrossNet: peri.nn.Module
---@overload fun(args: peri.nn.LowRankMixtureCrossNet.args): peri.nn.LowRankMixtureCrossNet
nn.LowRankMixtureCrossNet = {}

---@class peri.nn.LowRankMixtureCrossNet.args
---@field in_features integer C, the columns.
---@field num_layers integer Layers; with 0 the input is the result.
---@field num_experts? integer Experts; a single one has no gate (default: 1).
---@field low_rank? integer Numbers between the matrices of an expert (default: 1).
---@field activation? string|function f: `"relu"`, `"sigmoid"`, `"tanh"`, `"none"`, or a function (default: relu).
---@field dtype? string dtype of the parameters: `f32` or `f64` (default: f32).
---@field device? string Where they are (default: that of the rank).

---Compute it. Calling the module calls it.
---@param x0 peri.Tensor `[B, C]`.
---@return peri.Tensor # `[B, C]`.
function nn.LowRankMixtureCrossNet:forward(x0) end

---The part of second order of a factorization machine: half of (square of the sum - sum of the squares) over all
---columns of the embeddings. It has no parameters.
---
---Errors: an entry that is no tensor.
---
---```lua
---print(nn.FactorizationMachine()({ peri.ones { 1, 2 }, peri.ones { 1, 1, 2 } }):item()) --> 6
---```
---@class peri.nn.FactorizationMachine: peri.nn.Module
---@overload fun(): peri.nn.FactorizationMachine
nn.FactorizationMachine = {}

---Compute it. Calling the module calls it.
---@param embeddings peri.Tensor[] Each of shape `[B, ...]`; dimensions behind the first become columns.
---@return peri.Tensor # `[B, 1]`.
function nn.FactorizationMachine:forward(embeddings) end

---The deep part of DeepFM: a module over all embeddings, concatenated.
---
---Errors: a dense_module that cannot be called.
---
---```lua
---local deep = nn.DeepFM { dense_module = nn.Linear { in_features = 4, out_features = 3 } }
---print(deep({ peri.ones { 1, 2 }, peri.ones { 1, 1, 2 } }):size(2)) --> 3
---```
---@class peri.nn.DeepFM: peri.nn.Module
---@overload fun(args: peri.nn.DeepFM.args): peri.nn.DeepFM
nn.DeepFM = {}

---@class peri.nn.DeepFM.args
---@field dense_module peri.nn.Module|function Called with `[B, all columns]`.

---Compute it. Calling the module calls it.
---@param embeddings peri.Tensor[] Each of shape `[B, ...]`; dimensions behind the first become columns.
---@return peri.Tensor # What dense_module makes of them: `[B, ...]`.
function nn.DeepFM:forward(embeddings) end

---DeepFM's interaction: the dense features, the deep part (a linear layer and ReLU), and the factorization machine.
---
---Errors: sizes that are no whole numbers from 0 on.
---
---```lua
---local inter = nn.models.FMInteractionArch { fm_in_features = 6, deep_fm_dimension = 4 }
---print(inter(peri.ones { 1, 2 }, peri.ones { 1, 2, 2 }):size(2)) --> 7
---```
---@class peri.nn.models.FMInteractionArch: peri.nn.Module
---@overload fun(args: peri.nn.models.FMInteractionArch.args): peri.nn.models.FMInteractionArch
models.FMInteractionArch = {}

---@class peri.nn.models.FMInteractionArch.args
---@field fm_in_features integer Columns of all features together: `(F + 1) * D`.
---@field deep_fm_dimension integer Columns of the deep part.
---@field dtype? string dtype of the parameters: `f32` or `f64` (default: f32).
---@field device? string Where they are (default: that of the rank).

---Compute it. Calling the module calls it.
---@param dense_features peri.Tensor `[B, D]`.
---@param sparse_features peri.Tensor `[B, F, D]`.
---@return peri.Tensor # `[B, D + deep_fm_dimension + 1]`.
function models.FMInteractionArch:forward(dense_features, sparse_features) end

---An MLP over the dense features, with ReLU.
---
---Errors: sizes that are no whole numbers from 0 on.
---
---```lua
---print(nn.DenseArch { in_features = 3, layer_sizes = { 4, 2 } }(peri.ones { 1, 3 }):size(2))
-----> 2
---```
---@class peri.nn.DenseArch: peri.nn.Module
---@overload fun(args: peri.nn.DenseArch.args): peri.nn.DenseArch
nn.DenseArch = {}

---@class peri.nn.DenseArch.args
---@field in_features integer Columns of the dense features.
---@field layer_sizes integer[] Columns of the result of each layer.
---@field dtype? string dtype of the parameters: `f32` or `f64` (default: f32).
---@field device? string Where they are (default: that of the rank).

---Compute it. Calling the module calls it.
---@param features peri.Tensor `[B, in_features]`.
---@return peri.Tensor # `[B, the last of layer_sizes]`.
function nn.DenseArch:forward(features) end

---The pooled embeddings of all features as one tensor. Of a sharded collection it is lazy: rows are on their way until
---it is used.
---
---Errors: what is no collection of bags; tables of different dimensions; a collection without tables.
---@class peri.nn.SparseArch: peri.nn.Module
---@param embedding_bag_collection peri.EmbeddingBagCollection The tables, all of one dimension; sharded or not.
---@overload fun(embedding_bag_collection: peri.EmbeddingBagCollection): peri.nn.SparseArch
nn.SparseArch = {}

---Look them up. Calling the module calls it.
---@param features peri.KeyedJaggedTensor The ids of B samples.
---@return peri.Tensor # `[B, F, D]`.
function nn.SparseArch:forward(features) end

---An MLP with ReLU and a last linear layer without activation: the end of a ranking model.
---
---Errors: fewer than 2 layer_sizes.
---
---```lua
---print(nn.OverArch { in_features = 3, layer_sizes = { 4, 1 } }(peri.ones { 2, 3 }):size(1)) --> 2
---```
---@class peri.nn.OverArch: peri.nn.Module
---@overload fun(args: peri.nn.OverArch.args): peri.nn.OverArch
nn.OverArch = {}

---@class peri.nn.OverArch.args
---@field in_features integer Columns of the input.
---@field layer_sizes integer[] Columns of the result of each layer; the last is the number of logits.
---@field dtype? string dtype of the parameters: `f32` or `f64` (default: f32).
---@field device? string Where they are (default: that of the rank).

---Compute it. Calling the module calls it.
---@param features peri.Tensor `[B, in_features]`.
---@return peri.Tensor # `[B, the last of layer_sizes]`.
function nn.OverArch:forward(features) end

---The model of Naumov et al. 2019: an MLP over the dense features, tables for the sparse ones, dot products of all
---pairs, and an MLP over these. What a sharded collection exchanges is on its way while the dense features are
---computed.
---
---Errors: what is no collection of bags; tables of different dimensions; a last dense layer of another size than the
---embedding dimension.
---
---```lua
---local tables = peri.EmbeddingBagCollection { tables = { peri.EmbeddingBagConfig { name = "t",
---  num_embeddings = 5, embedding_dim = 2, feature_names = { "f" } } } }
---local kjt = peri.KeyedJaggedTensor { keys = { "f" }, values = { 1, 2, 3 }, lengths = { 1, 2 } }
---print(nn.SparseArch(tables):forward(kjt):size(3)) --> 2
---local model = nn.DLRM { embedding_bag_collection = tables, dense_in_features = 3,
---  dense_arch_layer_sizes = { 2 }, over_arch_layer_sizes = { 4, 1 } }
---print(model:forward(peri.ones { 2, 3 }, kjt):size(1)) --> 2
---local train = nn.DLRMTrain(model)
---local loss, logits, labels = train { dense_features = peri.ones { 2, 3 }, sparse_features = kjt,
---  labels = peri.ones { 2 } }
---loss:backward()
---print(loss:numel(), logits:numel(), labels:numel()) --> 1 2 2
---print(train:logits({ dense_features = peri.ones { 2, 3 }, sparse_features = kjt }):numel())
-----> 2
---local fm = nn.SimpleDeepFMNN { num_dense_features = 3, embedding_bag_collection = tables,
---  hidden_layer_size = 4, deep_fm_dimension = 3 }
---print(fm(peri.ones { 2, 3 }, kjt):size(1)) --> 2
---local dcn = nn.DLRM_DCN { embedding_bag_collection = tables, dense_in_features = 3,
---  dense_arch_layer_sizes = { 2 }, over_arch_layer_sizes = { 4, 1 }, dcn_num_layers = 2,
---  dcn_low_rank_dim = 2 }
---local projection = nn.DLRM_Projection { embedding_bag_collection = tables,
---  dense_in_features = 3, dense_arch_layer_sizes = { 2 }, over_arch_layer_sizes = { 4, 1 },
---  interaction_branch1_layer_sizes = { 4 }, interaction_branch2_layer_sizes =
---    { 6 } }
---print(dcn(peri.ones { 2, 3 }, kjt):size(2), projection(peri.ones { 2, 3 }, kjt):size(2)) --> 1 1
---```
---@class peri.nn.DLRM: peri.nn.Module
---@overload fun(args: peri.nn.DLRM.args): peri.nn.DLRM
nn.DLRM = {}

---@class peri.nn.DLRM.args
---@field embedding_bag_collection peri.EmbeddingBagCollection The tables, all of one dimension; sharded or not.
---@field dense_in_features integer Columns of the dense features.
---@field dense_arch_layer_sizes integer[] The last is the embedding dimension.
---@field over_arch_layer_sizes integer[] Two or more; the last is the number of logits, 1.
---@field dtype? string dtype of the dense parameters: `f32` or `f64` (default: f32).
---@field dense_device? string Where they are (default: that of the rank).

---Logits of a batch. Calling the module calls it. `DLRM_DCN` and `DLRM_Projection` have the same.
---@param dense_features peri.Tensor `[B, dense_in_features]`.
---@param sparse_features peri.KeyedJaggedTensor The ids of B samples.
---@return peri.Tensor # `[B, 1]`.
function nn.DLRM:forward(dense_features, sparse_features) end

---DLRM with a low-rank cross network in place of the dot products (Wang et al. 2020). The example of `DLRM` makes one.
---
---Errors: as `DLRM`; dcn_low_rank_dim below 1.
---@class peri.nn.DLRM_DCN: peri.nn.Module
---@overload fun(args: peri.nn.DLRM_DCN.args): peri.nn.DLRM_DCN
nn.DLRM_DCN = {}

---@class peri.nn.DLRM_DCN.args
---@field embedding_bag_collection peri.EmbeddingBagCollection The tables, all of one dimension; sharded or not.
---@field dense_in_features integer Columns of the dense features.
---@field dense_arch_layer_sizes integer[] The last is the embedding dimension.
---@field over_arch_layer_sizes integer[] Two or more; the last is the number of logits, 1.
---@field dcn_num_layers integer Layers of the cross network.
---@field dcn_low_rank_dim integer Its low_rank.
---@field dtype? string dtype of the dense parameters: `f32` or `f64` (default: f32).
---@field dense_device? string Where they are (default: that of the rank).

---DLRM with products of two projections in place of the dot products of all pairs. The example of `DLRM` makes one.
---
---Errors: as `DLRM`; branches whose last size is no multiple of the embedding dimension.
---@class peri.nn.DLRM_Projection: peri.nn.Module
---@overload fun(args: peri.nn.DLRM_Projection.args): peri.nn.DLRM_Projection
nn.DLRM_Projection = {}

---@class peri.nn.DLRM_Projection.args
---@field embedding_bag_collection peri.EmbeddingBagCollection The tables, all of one dimension; sharded or not.
---@field dense_in_features integer Columns of the dense features.
---@field dense_arch_layer_sizes integer[] The last is the embedding dimension.
---@field over_arch_layer_sizes integer[] Two or more; the last is the number of logits, 1.
---@field interaction_branch1_layer_sizes integer[] The last is a multiple of the embedding dimension.
---@field interaction_branch2_layer_sizes integer[] The last is a multiple of the embedding dimension.
---@field dtype? string dtype of the dense parameters: `f32` or `f64` (default: f32).
---@field dense_device? string Where they are (default: that of the rank).

---A model and its loss: what pipelines train. The default loss is the mean over this rank's samples, which is right
---where all ranks have equally many; `nn.BCEWithLogitsLoss { reduction = "global_mean" }` is right always. Called with
---a batch it returns the loss, the logits and the labels; so does `pipeline:progress(batches)`.
---
---Errors: a module that cannot be called; a batch that is no table, or has no labels. The example of `DLRM` makes one.
---@class peri.nn.DLRMTrain: peri.nn.Module
---@param dlrm_module peri.nn.Module Called with dense and sparse features.
---@param loss? peri.nn.Module Called with logits and labels (default: `BCEWithLogitsLoss`).
---@overload fun(dlrm_module: peri.nn.Module, loss?: peri.nn.Module): peri.nn.DLRMTrain
nn.DLRMTrain = {}

---The loss of a batch. Calling the module calls it.
---@param batch table `dense_features`, `sparse_features`, `labels`.
---@return peri.Tensor # The loss: a scalar.
---@return peri.Tensor # The logits, outside of the tape: `[B]`.
---@return peri.Tensor # The labels as floats: `[B]`.
function nn.DLRMTrain:forward(batch) end

---The logits of a batch.
---@param batch table `dense_features`, `sparse_features`.
---@return peri.Tensor # `[B]`.
function nn.DLRMTrain:logits(batch) end

---TorchRec's DeepFM: an MLP over the dense features, tables for the sparse ones, a factorization machine and a deep
---part over both, and a last linear layer with a sigmoid. The example of `DLRM` makes one.
---
---Errors: what is no collection of bags; tables of different dimensions.
---@class peri.nn.SimpleDeepFMNN: peri.nn.Module
---@overload fun(args: peri.nn.SimpleDeepFMNN.args): peri.nn.SimpleDeepFMNN
nn.SimpleDeepFMNN = {}

---@class peri.nn.SimpleDeepFMNN.args
---@field num_dense_features integer Columns of the dense features.
---@field embedding_bag_collection peri.EmbeddingBagCollection The tables, all of one dimension; sharded or not.
---@field hidden_layer_size integer Of the MLP over the dense features.
---@field deep_fm_dimension integer Columns of the deep part.
---@field dtype? string dtype of the dense parameters: `f32` or `f64` (default: f32).
---@field dense_device? string Where they are (default: that of the rank).

---Probabilities of a batch. Calling the module calls it.
---@param dense_features peri.Tensor `[B, num_dense_features]`.
---@param sparse_features peri.KeyedJaggedTensor The ids of B samples.
---@return peri.Tensor # `[B, 1]`.
function nn.SimpleDeepFMNN:forward(dense_features, sparse_features) end
