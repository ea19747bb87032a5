-- dense_layers.lua: Layers of dense networks.
--
-- Names, arguments and formulas are PyTorch's and TorchRec's. A layer is an `nn.Module`: make it once, then call it
-- like a function, which runs its `forward`. Parameters start with random numbers that depend on `nn.manual_seed` only,
-- so all ranks get the same ones.
--
-- In shapes, B is the number of samples, C a number of columns, and `...` stands for any leading dimensions.
---@meta

---@class peri.nn
local nn = {}

---A fully connected layer: `x W^T + b`. Parameters: `weight` [out_features, in_features] and `bias` [out_features].
---Both start uniform between `-1 / sqrt(in_features)` and `1 / sqrt(in_features)`.
---
---Errors: sizes that are no whole numbers from 0 on; an input whose last dimension is not in_features; another dtype
---than that of the weight.
---
---```lua
---local layer = nn.Linear { in_features = 2, out_features = 3 }
---print(layer(peri.ones { 4, 2 }):size(2), layer:extra_text())
-----> 3 in_features=2, out_features=3, bias=true
---```
---@class peri.nn.Linear: peri.nn.Module
---@overload fun(args: peri.nn.Linear.args): peri.nn.Linear
nn.Linear = {}

---@class peri.nn.Linear.args
---@field in_features integer Columns of the input.
---@field out_features integer Columns of the result.
---@field bias? boolean Whether b is added (default: true).
---@field dtype? string dtype of the parameters: `f32` or `f64` (default: f32).
---@field device? string Where they are (default: that of the rank).

---Compute the layer. Calling the module calls it.
---@param x peri.Tensor The input: `[..., in_features]`.
---@return peri.Tensor # The result: `[..., out_features]`.
function nn.Linear:forward(x) end

---A linear layer and its activation: `activation(x W^T + b)`. The named activations are computed together with the
---product, in one operation.
---
---Errors: an activation that is not among those; sizes as in `Linear`.
---
---```lua
---local layer = nn.Perceptron { in_size = 2, out_size = 3, activation = "sigmoid" }
---print(layer:forward(peri.zeros { 1, 2 }):size(2)) --> 3
---```
---@class peri.nn.Perceptron: peri.nn.Module
---@overload fun(args: peri.nn.Perceptron.args): peri.nn.Perceptron
nn.Perceptron = {}

---@class peri.nn.Perceptron.args
---@field in_size integer Columns of the input.
---@field out_size integer Columns of the result.
---@field bias? boolean Whether b is added (default: true).
---@field activation? string|function|peri.nn.Module `"relu"`, `"sigmoid"`, `"tanh"`, `"none"`, or what can be called (default: relu).
---@field dtype? string dtype of the parameters: `f32` or `f64` (default: f32).
---@field device? string Where they are (default: that of the rank).

---Compute the layer. Calling the module calls it.
---@param x peri.Tensor The input: `[..., in_size]`.
---@return peri.Tensor # The result: `[..., out_size]`.
function nn.Perceptron:forward(x) end

---Perceptrons one after the other: the result of one is the input of the next.
---
---Errors: an activation that is not among those; sizes as in `Linear`.
---
---```lua
---local mlp = nn.MLP { in_size = 4, layer_sizes = { 8, 2 } }
---print(mlp(peri.ones { 3, 4 }):size(2)) --> 2
---```
---@class peri.nn.MLP: peri.nn.Module
---@overload fun(args: peri.nn.MLP.args): peri.nn.MLP
nn.MLP = {}

---@class peri.nn.MLP.args
---@field in_size integer Columns of the input.
---@field layer_sizes integer[] Columns of the result of each perceptron, in order.
---@field bias? boolean Whether the perceptrons have biases (default: true).
---@field activation? string|function|peri.nn.Module As in `Perceptron`; `"swish_layernorm"`; a class: one module a layer (default: relu).
---@field dtype? string dtype of the parameters: `f32` or `f64` (default: f32).
---@field device? string Where they are (default: that of the rank).

---Compute all of them. Calling the module calls it.
---@param x peri.Tensor The input: `[..., in_size]`.
---@return peri.Tensor # The result: `[..., the last of layer_sizes]`.
function nn.MLP:forward(x) end

---Normalise over the last dimensions: subtract the mean, divide by the root of the variance plus `eps`, then multiply
---by `weight` and add `bias`. Both have the shape `normalized_shape`; they start with ones and zeros.
---
---Errors: a normalized_shape that is empty; an input whose last sizes are others.
---
---```lua
---local norm = nn.LayerNorm { normalized_shape = 2, elementwise_affine = false }
---print(("%.2f"):format(norm(peri.tensor { { 1, 3 } }):item(1))) --> 1.00
---```
---@class peri.nn.LayerNorm: peri.nn.Module
---@overload fun(args: peri.nn.LayerNorm.args): peri.nn.LayerNorm
nn.LayerNorm = {}

---@class peri.nn.LayerNorm.args
---@field normalized_shape integer|integer[] The last sizes of the input.
---@field eps? number Added to the variance (default: 1e-5).
---@field elementwise_affine? boolean Whether there is a weight (default: true).
---@field bias? boolean Whether there is a bias beside the weight (default: true).
---@field dtype? string dtype of the parameters: `f32` or `f64` (default: f32).
---@field device? string Where they are (default: that of the rank).

---Normalise. Calling the module calls it.
---@param x peri.Tensor The input: `[..., sizes of normalized_shape]`.
---@return peri.Tensor # Of the shape of x.
function nn.LayerNorm:forward(x) end

---`x * sigmoid(LayerNorm(x))`.
---
---Errors: as in `LayerNorm`.
---
---```lua
---print(nn.SwishLayerNorm { input_dims = 2 }(peri.tensor { { 4, 4 } }):item(0)) --> 2
---```
---@class peri.nn.SwishLayerNorm: peri.nn.Module
---@overload fun(args: peri.nn.SwishLayerNorm.args): peri.nn.SwishLayerNorm
nn.SwishLayerNorm = {}

---@class peri.nn.SwishLayerNorm.args
---@field input_dims integer|integer[] The last sizes of the input.
---@field dtype? string dtype of the parameters: `f32` or `f64` (default: f32).
---@field device? string Where they are (default: that of the rank).

---Compute it. Calling the module calls it.
---@param x peri.Tensor The input: `[..., sizes of input_dims]`.
---@return peri.Tensor # Of the shape of x.
function nn.SwishLayerNorm:forward(x) end

---Normalise each column over the samples of the batch. In training mode it uses the batch's mean and variance, and
---moves the buffers `running_mean` and `running_var` towards them. In evaluation mode it uses these buffers. The batch
---is that of this rank alone.
---
---Errors: in training mode, a batch of fewer than 2 samples.
---
---```lua
---local norm = nn.BatchNorm1d { num_features = 1 }
---print(("%.2f"):format(norm:forward(peri.tensor { { 1 }, { 3 } }):item(0)),
---  ("%.2f"):format(norm.running_mean:item())) --> -1.00 0.20
---```
---@class peri.nn.BatchNorm1d: peri.nn.Module
---@overload fun(args: peri.nn.BatchNorm1d.args): peri.nn.BatchNorm1d
nn.BatchNorm1d = {}

---@class peri.nn.BatchNorm1d.args
---@field num_features integer C, the columns.
---@field eps? number Added to the variance (default: 1e-5).
---@field momentum? number Share of the new value in the running ones (default: 0.1).
---@field affine? boolean Whether there are a weight and a bias (default: true).
---@field dtype? string dtype of the parameters: `f32` or `f64` (default: f32).
---@field device? string Where they are (default: that of the rank).

---Normalise. Calling the module calls it.
---@param x peri.Tensor The input: `[B, C]`.
---@return peri.Tensor # Of the shape of x.
function nn.BatchNorm1d:forward(x) end

---In training mode, zero elements with probability `p`, and divide the others by `1 - p`. In evaluation mode the input
---is returned as it is. Which elements are dropped depends on the seed, on this layer, on how often it has run, and on
---the sample's number in the batch of all ranks: so the number of ranks does not change it.
---
---Errors: a p that is not in `0 <= p < 1`.
---
---```lua
---local drop = nn.Dropout { p = 0.25 }
---local kept = drop:get_extra_state()
---local first = drop(peri.ones { 8 })
---drop:set_extra_state(kept)
---print(drop:forward(peri.ones { 8 }):eq(first):to_list()[3],
---  drop:eval()(peri.ones { 2 }):item(0))
-----> 1 1
---```
---@class peri.nn.Dropout: peri.nn.Module
---@overload fun(args?: peri.nn.Dropout.args): peri.nn.Dropout
nn.Dropout = {}

---@class peri.nn.Dropout.args
---@field p? number The probability (default: 0.5).

---Apply it. Calling the module calls it.
---@param x peri.Tensor Any shape; the first dimension counts samples.
---@return peri.Tensor # Of the shape of x.
function nn.Dropout:forward(x) end

---What decides which elements it drops next: plain numbers, for `nn.extra_state`.
---@return table # `{ seed =, stream =, step = }`.
function nn.Dropout:get_extra_state() end

---Continue where `get_extra_state` was called.
---@param state table What `get_extra_state` returned.
function nn.Dropout:set_extra_state(state) end

---The input as it is. It has no parameters and takes no arguments.
---
---Errors: an argument of the constructor. What forward gets is not looked at.
---
---```lua
---print(nn.Identity()(peri.tensor { -2 }):item()) --> -2
---```
---@class peri.nn.Identity: peri.nn.Module
---@overload fun(): peri.nn.Identity
nn.Identity = {}

---Apply it. Calling the module calls it.
---@param x peri.Tensor Any shape.
---@return peri.Tensor # Of the shape of x.
function nn.Identity:forward(x) end

---Elements below 0 become 0. It has no parameters and takes no arguments.
---
---Errors: an argument of the constructor; what is no tensor. Integers are taken, too.
---
---```lua
---print(nn.ReLU()(peri.tensor { -2 }):item()) --> 0
---```
---@class peri.nn.ReLU: peri.nn.Module
---@overload fun(): peri.nn.ReLU
nn.ReLU = {}

---Apply it. Calling the module calls it.
---@param x peri.Tensor Any shape.
---@return peri.Tensor # Of the shape of x.
function nn.ReLU:forward(x) end

---`1 / (1 + exp(-x))`. It has no parameters and takes no arguments.
---
---Errors: an argument of the constructor; what is no tensor. Integers become f32.
---
---```lua
---print(nn.Sigmoid()(peri.tensor { 0 }):item()) --> 0.5
---```
---@class peri.nn.Sigmoid: peri.nn.Module
---@overload fun(): peri.nn.Sigmoid
nn.Sigmoid = {}

---Apply it. Calling the module calls it.
---@param x peri.Tensor Any shape.
---@return peri.Tensor # Of the shape of x.
function nn.Sigmoid:forward(x) end

---The hyperbolic tangent. It has no parameters and takes no arguments.
---
---Errors: an argument of the constructor; what is no tensor. Integers become f32.
---
---```lua
---print(nn.Tanh()(peri.tensor { 0 }):item()) --> 0
---```
---@class peri.nn.Tanh: peri.nn.Module
---@overload fun(): peri.nn.Tanh
nn.Tanh = {}

---Apply it. Calling the module calls it.
---@param x peri.Tensor Any shape.
---@return peri.Tensor # Of the shape of x.
function nn.Tanh:forward(x) end

---`x * sigmoid(x)`, also called swish. It has no parameters and takes no arguments.
---
---Errors: an argument of the constructor; what is no tensor of floats.
---
---```lua
---print(nn.SiLU()(peri.tensor { 0 }):item()) --> 0
---```
---@class peri.nn.SiLU: peri.nn.Module
---@overload fun(): peri.nn.SiLU
nn.SiLU = {}

---Apply it. Calling the module calls it.
---@param x peri.Tensor Any shape.
---@return peri.Tensor # Of the shape of x.
function nn.SiLU:forward(x) end

---`x` times the normal distribution function of `x`, without approximation. It has no parameters and takes no
---arguments.
---
---Errors: an argument of the constructor; what is no tensor of floats.
---
---```lua
---print(nn.GELU()(peri.tensor { 0 }):item()) --> 0
---```
---@class peri.nn.GELU: peri.nn.Module
---@overload fun(): peri.nn.GELU
nn.GELU = {}

---Apply it. Calling the module calls it.
---@param x peri.Tensor Any shape.
---@return peri.Tensor # Of the shape of x.
function nn.GELU:forward(x) end

---`log(1 + exp(x))`. It has no parameters and takes no arguments.
---
---Errors: an argument of the constructor; what is no tensor of floats.
---
---```lua
---print(("%.4f"):format(nn.Softplus()(peri.tensor { 0 }):item())) --> 0.6931
---```
---@class peri.nn.Softplus: peri.nn.Module
---@overload fun(): peri.nn.Softplus
nn.Softplus = {}

---Apply it. Calling the module calls it.
---@param x peri.Tensor Any shape.
---@return peri.Tensor # Of the shape of x.
function nn.Softplus:forward(x) end

---`log(sigmoid(x))`. It has no parameters and takes no arguments.
---
---Errors: an argument of the constructor; what is no tensor of floats.
---
---```lua
---print(("%.4f"):format(nn.LogSigmoid()(peri.tensor { 0 }):item())) --> -0.6931
---```
---@class peri.nn.LogSigmoid: peri.nn.Module
---@overload fun(): peri.nn.LogSigmoid
nn.LogSigmoid = {}

---Apply it. Calling the module calls it.
---@param x peri.Tensor Any shape.
---@return peri.Tensor # Of the shape of x.
function nn.LogSigmoid:forward(x) end

---Elements below 0 are multiplied by `negative_slope`.
---
---Errors: what is no tensor of floats.
---
---```lua
---print(nn.LeakyReLU { negative_slope = 0.5 }(peri.tensor { -2 }):item()) --> -1
---```
---@class peri.nn.LeakyReLU: peri.nn.Module
---@overload fun(args?: peri.nn.LeakyReLU.args): peri.nn.LeakyReLU
nn.LeakyReLU = {}

---@class peri.nn.LeakyReLU.args
---@field negative_slope? number The factor (default: 0.01).

---Apply it. Calling the module calls it.
---@param x peri.Tensor Any shape.
---@return peri.Tensor # Of the shape of x.
function nn.LeakyReLU:forward(x) end

---`exp(x)` divided by its sum over one dimension.
---
---Errors: a dimension that x does not have.
---
---```lua
---print(nn.Softmax { dim = 1 }(peri.zeros { 2 }):item(0)) --> 0.5
---```
---@class peri.nn.Softmax: peri.nn.Module
---@overload fun(args: peri.nn.Softmax.args): peri.nn.Softmax
nn.Softmax = {}

---@class peri.nn.Softmax.args
---@field dim integer The dimension; 1 is the first, -1 the last.

---Apply it. Calling the module calls it.
---@param x peri.Tensor Any shape.
---@return peri.Tensor # Of the shape of x.
function nn.Softmax:forward(x) end

---A table of vectors that is an ordinary parameter, `weight` [num_embeddings, embedding_dim]: each id is replaced by
---its row. Rows start normal with mean 0 and deviation 1. An optimizer visits every row in every step; for large tables
---of which a batch touches few rows use `EmbeddingBagCollection`.
---
---Errors: sizes out of range; an id that the table does not have; a padding_idx outside of the rows.
---
---```lua
---local table_of_rows = nn.Embedding { num_embeddings = 3, embedding_dim = 2, padding_idx = 0 }
---print(table_of_rows(peri.tensor({ 0, 2 }, "i64")):size(2), table_of_rows:extra_text())
-----> 2 3, 2, padding_idx=0
---```
---@class peri.nn.Embedding: peri.nn.Module
---@overload fun(args: peri.nn.Embedding.args): peri.nn.Embedding
nn.Embedding = {}

---@class peri.nn.Embedding.args
---@field num_embeddings integer Rows.
---@field embedding_dim integer Columns.
---@field padding_idx? integer A row, from 0 (negative: from the end), that starts with zeros and is never trained (default: none).
---@field max_norm? number Rows whose norm is larger are scaled down in the table, for good, when they are looked up (default: none).
---@field norm_type? number p of that norm (default: 2).
---@field sparse? boolean Only `false` is allowed (default: false).
---@field _weight? peri.Tensor The first values; their memory is shared: `[num_embeddings, embedding_dim]` (default: random numbers).
---@field device? string Where the table is (default: that of the rank).

---Look up rows. Calling the module calls it.
---@param ids peri.Tensor Ids from 0, i64 or i32, any shape; -1 stands for no row, and gives zeros.
---@return peri.Tensor # The rows: the shape of ids, then embedding_dim.
function nn.Embedding:forward(ids) end

---Make a module of rows that exist. It shares their memory.
---
---Errors: what is no tensor of 2 dimensions; an argument that the constructor does not take.
---
---```lua
---print(nn.Embedding.from_pretrained(peri.tensor { { 5, 6 } })(peri.tensor({ 0 }, "i64")):item(1))
-----> 6
---```
---@param weight peri.Tensor The rows: f32 `[rows, columns]`.
---@param args? table `freeze` (default: true, the rows are a buffer that is not trained), and other arguments of the constructor.
---@return peri.nn.Embedding
function nn.Embedding.from_pretrained(weight, args) end

---A table of vectors as in `Embedding`, of which whole bags of ids are looked up: the sum, the mean or the largest
---elements of the rows of each bag. An empty bag gives zeros.
---
---Errors: sizes out of range; an id that the table does not have; a mode that is not among those.
---
---```lua
---local bags = nn.EmbeddingBag { num_embeddings = 3, embedding_dim = 2, mode = "sum" }
---print(bags(peri.tensor({ 0, 2, 1 }, "i64"), peri.tensor({ 0, 2 }, "i64")):size(1),
---  bags:extra_text()) --> 2 3, 2, mode=sum
---```
---@class peri.nn.EmbeddingBag: peri.nn.Module
---@overload fun(args: peri.nn.EmbeddingBag.args): peri.nn.EmbeddingBag
nn.EmbeddingBag = {}

---@class peri.nn.EmbeddingBag.args
---@field num_embeddings integer Rows.
---@field embedding_dim integer Columns.
---@field mode? string `"sum"`, `"mean"` or `"max"` (default: mean).
---@field include_last_offset? boolean The last offset is the end of the last bag, not the start of one more (default: false).
---@field padding_idx? integer A row, from 0 (negative: from the end), that counts for nothing and is never trained (default: none).
---@field max_norm? number Rows whose norm is larger are scaled down in the table, for good, when they are looked up (default: none).
---@field norm_type? number p of that norm (default: 2).
---@field sparse? boolean Only `false` is allowed (default: false).
---@field _weight? peri.Tensor The first values; their memory is shared: `[num_embeddings, embedding_dim]` (default: random numbers).
---@field device? string Where the table is (default: that of the rank).

---Look up bags. Calling the module calls it.
---
---Errors: offsets that do not ascend, or reach beyond the ids; weights with another mode than `"sum"`.
---@param ids peri.Tensor Ids from 0, i64 or i32: `[bags, length]`, or `[N]` with offsets; -1 stands for no row.
---@param offsets? peri.Tensor Where each bag begins: `[bags]`, or `[bags + 1]` with include_last_offset (default: each row of ids is one).
---@param per_sample_weights? peri.Tensor A factor for each id, with mode `"sum"`: of the shape of ids (default: none).
---@return peri.Tensor # `[bags, embedding_dim]`.
function nn.EmbeddingBag:forward(ids, offsets, per_sample_weights) end

---Make a module of rows that exist. It shares their memory.
---
---Errors: what is no tensor of 2 dimensions; an argument that the constructor does not take.
---
---```lua
---local bags = nn.EmbeddingBag.from_pretrained(peri.tensor { { 5, 6 } },
---  { mode = "sum", freeze = false })
---print(bags:forward(peri.tensor({ { 0, 0 } }, "i64")):item(0), #bags:parameters()) --> 10 1
---```
---@param weight peri.Tensor The rows: f32 `[rows, columns]`.
---@param args? table `freeze` (default: true, the rows are a buffer that is not trained), and other arguments of the constructor.
---@return peri.nn.EmbeddingBag
function nn.EmbeddingBag.from_pretrained(weight, args) end

---@class peri.nn.embedding
local embedding = {}

---Look up bags in any matrix: `torch.nn.functional.embedding_bag`.
---
---Errors: a mode that is not among those; an id that the matrix does not have.
---
---```lua
---local rows = peri.tensor { { 1, 2 }, { 3, 4 } }
---print(nn.embedding.embedding_bag(rows, peri.tensor({ 0, 1 }, "i64"), peri.tensor({ 0 }, "i64"),
---  "sum"):item(0))
-----> 4
---```
---@param weight peri.Tensor The rows: f32 `[rows, columns]`, contiguous.
---@param ids peri.Tensor Ids from 0, i64 or i32: `[bags, length]`, or `[N]` with offsets; -1 stands for no row.
---@param offsets? peri.Tensor Where each bag begins: `[bags]` (default: none, each row of ids is a bag).
---@param mode string `"sum"`, `"mean"` or `"max"`.
---@param per_sample_weights? peri.Tensor A factor for each id, with mode `"sum"`: of the shape of ids (default: none).
---@param include_last_offset? boolean The last offset is the end of the last bag (default: false).
---@return peri.Tensor # `[bags, columns]`.
function embedding.embedding_bag(weight, ids, offsets, mode, per_sample_weights, include_last_offset) end
