-- layers.lua: Layers for sequences, losses of recommenders, first values, the search for NaN.
--
-- Names, arguments and parameters are PyTorch's where PyTorch has them. In shapes, B is the number of samples, L and S
-- lengths of sequences, E and D sizes of vectors.
---@meta

---@class peri.nn
local nn = {}

---@class peri.nn.anomaly
local anomaly = {}

---Multi-head attention, as PyTorch's: each query gets a mean of the values, weighted by the softmax of `q . k / sqrt(E
---/ num_heads)` over the keys; this is done for each head, a part of the vectors, by itself. Parameters:
---`in_proj_weight` [3 E, E], `in_proj_bias` [3 E], `out_proj`.
---
---Errors: an embed_dim that the heads do not divide.
---
---```lua
---local attention = peri.nn.MultiheadAttention { embed_dim = 8, num_heads = 2,
---  batch_first = true }
---local x = peri.randn { 3, 5, 8 }
---local y, weights = attention:forward(x, x, x, { attn_mask = peri.zeros { 5, 5 } })
---print(y:size(2), weights:size(3), attention:extra_text()) --> 5 5 embed_dim=8, num_heads=2
---```
---@class peri.nn.MultiheadAttention: peri.nn.Module
---@overload fun(args: peri.nn.MultiheadAttention.args): peri.nn.MultiheadAttention
nn.MultiheadAttention = {}

---@class peri.nn.MultiheadAttention.args
---@field embed_dim integer E, the size of the vectors.
---@field num_heads integer Parts that they are cut into.
---@field dropout? number Share of weights that is dropped in training (default: 0).
---@field bias? boolean Whether the products have biases (default: true).
---@field batch_first? boolean Whether inputs are [B, L, E] instead of [L, B, E] (default: false).
---@field dtype? string dtype of the parameters: `f32` or `f64` (default: f32).
---@field device? string Where they are (default: that of the rank).

---Compute the attention. Calling the module calls it. Masks are bool (true is left out) or numbers that are added to
---the products: `key_padding_mask` of shape [B, S], `attn_mask` of [L, S] or [B * heads, L, S]. A query for which all
---keys are left out gets NaN, as in PyTorch.
---
---Errors: shapes that do not fit.
---
---```lua
---local attention = peri.nn.MultiheadAttention { embed_dim = 4, num_heads = 4 }
---print(attention:forward(peri.zeros { 2, 1, 4 }, peri.zeros { 3, 1, 4 },
---  peri.zeros { 3, 1, 4 }):size(1))
-----> 2
---```
---@param query peri.Tensor `[L, B, E]`, or `[B, L, E]` with batch_first.
---@param key peri.Tensor `[S, B, E]`, or `[B, S, E]`.
---@param value peri.Tensor `[S, B, E]`, or `[B, S, E]`.
---@param options? table `key_padding_mask`, `attn_mask`, `average_attn_weights`, as above (default: none, none, true).
---@return peri.Tensor # The result: the shape of the query.
---@return peri.Tensor # The weights: `[B, L, S]`, or `[B, heads, L, S]`.
function nn.MultiheadAttention:forward(query, key, value, options) end

---Gated recurrent units over a sequence, in layers. Parameters: `weight_ih_l0`, `weight_hh_l0`, `bias_ih_l0`,
---`bias_hh_l0`, and so on, with `_reverse` for the other direction.
---
---Errors: sizes below 1.
---
---```lua
---local gru = peri.nn.GRU { input_size = 3, hidden_size = 4, num_layers = 2 }
---local states, last = gru:forward(peri.randn { 5, 2, 3 })
---print(states:size(1), last:size(1), gru:extra_text()) --> 5 2 3, 4, num_layers=2
---```
---@class peri.nn.GRU: peri.nn.Module
---@overload fun(args: peri.nn.GRU.args): peri.nn.GRU
nn.GRU = {}

---@class peri.nn.GRU.args
---@field input_size integer Size of the vectors of the sequence.
---@field hidden_size integer Size of the states.
---@field num_layers? integer Layers over one another (default: 1).
---@field bias? boolean Whether the products have biases (default: true).
---@field batch_first? boolean Whether inputs are [B, L, size] instead of [L, B, size] (default: false).
---@field dropout? number Share that is dropped between layers in training (default: 0).
---@field bidirectional? boolean Each layer in both directions (default: false).
---@field dtype? string dtype of the parameters: `f32` or `f64` (default: f32).
---@field device? string Where they are (default: that of the rank).

---All steps of a sequence. Calling the module calls it.
---
---Errors: shapes that do not fit; a sequence without steps.
---
---```lua
---print(peri.nn.GRU({ input_size = 3, hidden_size = 4 }):forward(peri.zeros { 2, 1, 3 }):size(3))
-----> 4
---```
---@param x peri.Tensor `[L, B, input_size]`, or `[B, L, input_size]` with batch_first.
---@param h0? peri.Tensor The first states: `[layers * directions, B, hidden_size]` (default: zeros).
---@return peri.Tensor # States of the last layer: `[L, B, directions * hidden_size]`.
---@return peri.Tensor # Last states of all layers: the shape of h0.
function nn.GRU:forward(x, h0) end

---Long short-term memory over a sequence, in layers. Parameters: `weight_ih_l0`, `weight_hh_l0`, `bias_ih_l0`,
---`bias_hh_l0`, and so on, with `_reverse` for the other direction; each has four parts: what is let in, what is kept,
---what is new, what is let out.
---
---Errors: sizes below 1.
---
---```lua
---local lstm = peri.nn.LSTM { input_size = 3, hidden_size = 4, num_layers = 2 }
---local states, last, cells = lstm:forward(peri.randn { 5, 2, 3 })
---print(states:size(1), last:size(1), cells:size(1), lstm:extra_text())
-----> 5 2 2 3, 4, num_layers=2
---```
---@class peri.nn.LSTM: peri.nn.Module
---@overload fun(args: peri.nn.GRU.args): peri.nn.LSTM
nn.LSTM = {}

---All steps of a sequence. Calling the module calls it.
---
---Errors: shapes that do not fit; a sequence without steps; one of h0 and c0 alone.
---
---```lua
---print(peri.nn.LSTM({ input_size = 3, hidden_size = 4 }):forward(peri.zeros { 2, 1, 3 }):size(3))
-----> 4
---```
---@param x peri.Tensor `[L, B, input_size]`, or `[B, L, input_size]` with batch_first.
---@param h0? peri.Tensor The first states: `[layers * directions, B, hidden_size]` (default: zeros).
---@param c0? peri.Tensor The first cells: of the same shape (default: zeros).
---@return peri.Tensor # States of the last layer: `[L, B, directions * hidden_size]`.
---@return peri.Tensor # Last states of all layers: the shape of h0.
---@return peri.Tensor # Last cells of all layers: the same shape.
function nn.LSTM:forward(x, h0, c0) end

---x where it is above 0, else `weight` times x.
---
---Errors: num_parameters below 1.
---
---```lua
---local prelu = peri.nn.PReLU { init = 0.5 }
---print(table.concat(prelu:forward(peri.tensor { -2, 3 }):to_list(), " "),
---  prelu:extra_text()) --> -1 3 num_parameters=1
---```
---@class peri.nn.PReLU: peri.nn.Module
---@overload fun(args: peri.nn.PReLU.args): peri.nn.PReLU
nn.PReLU = {}

---@class peri.nn.PReLU.args
---@field num_parameters? integer 1, or the size of dimension 2: a number for each of it (default: 1).
---@field init? number The first value of the weight (default: 0.25).
---@field dtype? string dtype of the parameters: `f32` or `f64` (default: f32).
---@field device? string Where they are (default: that of the rank).

---Apply it. Calling the module calls it.
---
---Errors: a dimension 2 of another size.
---
---```lua
---print(peri.nn.PReLU({}):forward(peri.tensor { -4 }):item()) --> -1
---```
---@param x peri.Tensor Any shape.
---@return peri.Tensor # Of the shape of x.
function nn.PReLU:forward(x) end

---Divide by the root of the mean of the squares over the last dimensions; then multiply by `weight`, which has the
---shape `normalized_shape` and starts with ones.
---
---Errors: a normalized_shape that is empty; an input whose last sizes are others.
---
---```lua
---print(("%.3f"):format(nn.RMSNorm { normalized_shape = 2 }(peri.tensor { 3, 4 }):item(1)))
-----> 1.131
---```
---@class peri.nn.RMSNorm: peri.nn.Module
---@overload fun(args: peri.nn.RMSNorm.args): peri.nn.RMSNorm
nn.RMSNorm = {}

---@class peri.nn.RMSNorm.args
---@field normalized_shape integer|integer[] The last sizes of the input.
---@field eps? number Added to the mean (default: 2^-23; of f64 2^-52).
---@field elementwise_affine? boolean Whether there is a weight (default: true).
---@field dtype? string dtype of the weight (default: f32).
---@field device? string Where it is (default: that of the rank).

---Compute it. Calling the module calls it.
---@param x peri.Tensor `[..., sizes of normalized_shape]`.
---@return peri.Tensor # Of the shape of x.
function nn.RMSNorm:forward(x) end

---x where it is above 0, else `alpha (exp(x) - 1)`.
---
---Errors: an unknown argument.
---
---```lua
---print(("%.4f"):format(nn.ELU {}(peri.tensor { -1 }):item())) --> -0.6321
---```
---@class peri.nn.ELU: peri.nn.Module
---@overload fun(args: peri.nn.ELU.args): peri.nn.ELU
nn.ELU = {}

---@class peri.nn.ELU.args
---@field alpha? number The factor of the negative side (default: 1).

---Compute it. Calling the module calls it.
---@param x peri.Tensor Any shape.
---@return peri.Tensor # Of the shape of x.
function nn.ELU:forward(x) end

---The logarithm of `Softmax`, which is exact also where that is 0.
---
---Errors: a dimension that x does not have.
---
---```lua
---print(("%.4f"):format(nn.LogSoftmax { dim = 1 }(peri.zeros { 2 }):item(0))) --> -0.6931
---```
---@class peri.nn.LogSoftmax: peri.nn.Module
---@overload fun(args: peri.nn.LogSoftmax.args): peri.nn.LogSoftmax
nn.LogSoftmax = {}

---@class peri.nn.LogSoftmax.args
---@field dim integer The dimension; 1 is the first, -1 the last.

---Compute it. Calling the module calls it.
---@param x peri.Tensor Any shape.
---@return peri.Tensor # Of the shape of x.
function nn.LogSoftmax:forward(x) end

---Some dimensions as one.
---
---Errors: dimensions that x does not have.
---
---```lua
---print(nn.Flatten {}(peri.zeros { 2, 3, 4 }):size(2)) --> 12
---```
---@class peri.nn.Flatten: peri.nn.Module
---@overload fun(args: peri.nn.Flatten.args): peri.nn.Flatten
nn.Flatten = {}

---@class peri.nn.Flatten.args
---@field start_dim? integer The first of them (default: 2).
---@field end_dim? integer The last of them (default: -1).

---Compute it. Calling the module calls it.
---@param x peri.Tensor Any shape.
---@return peri.Tensor # The shape of x with the product of these sizes in their place.
function nn.Flatten:forward(x) end

---`functional.l1_loss`. Called with values and targets.
---
---Errors: an unknown argument or reduction; shapes that do not fit.
---
---```lua
---print(peri.nn.L1Loss {}(peri.tensor { 2 }, peri.tensor { 5 }):item()) --> 3
---```
---@class peri.nn.L1Loss: peri.nn.Loss
---@overload fun(args: peri.nn.L1Loss.args): peri.nn.L1Loss
nn.L1Loss = {}

---@class peri.nn.L1Loss.args
---@field reduction? string `"mean"`, `"sum"`, `"none"`, or `"global_mean"`: over the samples of all ranks (default: mean).
---@field group? peri.dist.Group|boolean The ranks of a global mean (default: those that train the model).

---`functional.huber_loss`. Called with values and targets.
---
---Errors: an unknown argument or reduction; shapes that do not fit.
---
---```lua
---print(peri.nn.HuberLoss {}(peri.tensor { 2 }, peri.tensor { 5 }):item()) --> 2.5
---```
---@class peri.nn.HuberLoss: peri.nn.Loss
---@overload fun(args: peri.nn.HuberLoss.args): peri.nn.HuberLoss
nn.HuberLoss = {}

---@class peri.nn.HuberLoss.args
---@field delta? number Up to which difference it is a square (default: 1).
---@field reduction? string `"mean"`, `"sum"`, `"none"`, or `"global_mean"`: over the samples of all ranks (default: mean).
---@field group? peri.dist.Group|boolean The ranks of a global mean (default: those that train the model).

---`functional.smooth_l1_loss`. Called with values and targets.
---
---Errors: an unknown argument or reduction; shapes that do not fit.
---
---```lua
---print(peri.nn.SmoothL1Loss {}(peri.tensor { 2 }, peri.tensor { 5 }):item()) --> 2.5
---```
---@class peri.nn.SmoothL1Loss: peri.nn.Loss
---@overload fun(args: peri.nn.SmoothL1Loss.args): peri.nn.SmoothL1Loss
nn.SmoothL1Loss = {}

---@class peri.nn.SmoothL1Loss.args
---@field beta? number Up to which difference it is a square (default: 1).
---@field reduction? string `"mean"`, `"sum"`, `"none"`, or `"global_mean"`: over the samples of all ranks (default: mean).
---@field group? peri.dist.Group|boolean The ranks of a global mean (default: those that train the model).

---`functional.nll_loss`. Called with logarithms of probabilities `[B, C]` and class numbers `[B]`.
---
---Errors: an unknown argument or reduction; shapes that do not fit.
---
---```lua
---print(peri.nn.NLLLoss {}(peri.tensor { { -1, -2 } }, peri.tensor({ 1 }, "i64")):item()) --> 2
---```
---@class peri.nn.NLLLoss: peri.nn.Loss
---@overload fun(args: peri.nn.NLLLoss.args): peri.nn.NLLLoss
nn.NLLLoss = {}

---@class peri.nn.NLLLoss.args
---@field reduction? string `"mean"`, `"sum"`, `"none"`, or `"global_mean"`: over the samples of all ranks (default: mean).
---@field group? peri.dist.Group|boolean The ranks of a global mean (default: those that train the model).

---`functional.triplet_margin_loss`. Called with rows, rows that should be near them, and rows that should not.
---
---Errors: an unknown argument or reduction; shapes that do not fit.
---
---```lua
---local x = peri.zeros { 1, 2 }
---print(peri.nn.TripletMarginLoss {}(x, x, x):item()) --> 1
---```
---@class peri.nn.TripletMarginLoss: peri.nn.Loss
---@overload fun(args: peri.nn.TripletMarginLoss.args): peri.nn.TripletMarginLoss
nn.TripletMarginLoss = {}

---@class peri.nn.TripletMarginLoss.args
---@field margin? number By how much the last should be farther (default: 1).
---@field p? number Which norm (default: 2).
---@field eps? number Of pairwise_distance (default: 1e-6).
---@field reduction? string `"mean"`, `"sum"`, `"none"`, or `"global_mean"`: over the samples of all ranks (default: mean).
---@field group? peri.dist.Group|boolean The ranks of a global mean (default: those that train the model).

---Bayesian personalised ranking: `functional.bpr_loss`. Called with the scores of items that were taken and of others.
---
---Errors: an unknown argument or reduction; shapes that do not fit.
---
---```lua
---print(("%.4f"):format(peri.nn.BPRLoss {}(peri.tensor { 2 }, peri.tensor { 1 }):item()))
-----> 0.3133
---```
---@class peri.nn.BPRLoss: peri.nn.Loss
---@overload fun(args: peri.nn.BPRLoss.args): peri.nn.BPRLoss
nn.BPRLoss = {}

---@class peri.nn.BPRLoss.args
---@field reduction? string `"mean"`, `"sum"`, `"none"`, or `"global_mean"`: over the samples of all ranks (default: mean).
---@field group? peri.dist.Group|boolean The ranks of a global mean (default: those that train the model).

---`functional.sigmoid_focal_loss`. Called with logits and targets 0 or 1.
---
---Errors: an unknown argument or reduction; shapes that do not fit.
---
---```lua
---print(("%.4f"):format(peri.nn.FocalLoss {}(peri.tensor { 0 }, peri.tensor { 1 }):item()))
-----> 0.0433
---```
---@class peri.nn.FocalLoss: peri.nn.Loss
---@overload fun(args: peri.nn.FocalLoss.args): peri.nn.FocalLoss
nn.FocalLoss = {}

---@class peri.nn.FocalLoss.args
---@field alpha? number Weight of targets 1; negative: none (default: 0.25).
---@field gamma? number The exponent (default: 2).
---@field reduction? string `"mean"`, `"sum"`, `"none"`, or `"global_mean"`: over the samples of all ranks (default: mean).
---@field group? peri.dist.Group|boolean The ranks of a global mean (default: those that train the model).

---`functional.margin_ranking_loss`. Called with two scores, and 1 or -1.
---
---Errors: an unknown argument or reduction; shapes that do not fit.
---
---```lua
---print(peri.nn.MarginRankingLoss {}(peri.tensor { 1 }, peri.tensor { 3 },
---  peri.tensor { 1 }):item())
-----> 2
---```
---@class peri.nn.MarginRankingLoss: peri.nn.Loss
---@overload fun(args: peri.nn.MarginRankingLoss.args): peri.nn.MarginRankingLoss
nn.MarginRankingLoss = {}

---@class peri.nn.MarginRankingLoss.args
---@field margin? number By how much one should be larger (default: 0).
---@field reduction? string `"mean"`, `"sum"`, `"none"`, or `"global_mean"`: over the samples of all ranks (default: mean).
---@field group? peri.dist.Group|boolean The ranks of a global mean (default: those that train the model).

---`functional.hinge_embedding_loss`. Called with distances, and 1 or -1.
---
---Errors: an unknown argument or reduction; shapes that do not fit.
---
---```lua
---print(peri.nn.HingeEmbeddingLoss {}(peri.tensor { 0.25 }, peri.tensor { -1 }):item()) --> 0.75
---```
---@class peri.nn.HingeEmbeddingLoss: peri.nn.Loss
---@overload fun(args: peri.nn.HingeEmbeddingLoss.args): peri.nn.HingeEmbeddingLoss
nn.HingeEmbeddingLoss = {}

---@class peri.nn.HingeEmbeddingLoss.args
---@field margin? number From where on a distance costs nothing (default: 1).
---@field reduction? string `"mean"`, `"sum"`, `"none"`, or `"global_mean"`: over the samples of all ranks (default: mean).
---@field group? peri.dist.Group|boolean The ranks of a global mean (default: those that train the model).

---`functional.cosine_embedding_loss`. Called with two lists of rows, and 1 or -1 for each.
---
---Errors: an unknown argument or reduction; shapes that do not fit.
---
---```lua
---local a = peri.tensor { { 1, 0 } }
---print(peri.nn.CosineEmbeddingLoss {}(a, a, peri.tensor { -1 }):item()) --> 1
---```
---@class peri.nn.CosineEmbeddingLoss: peri.nn.Loss
---@overload fun(args: peri.nn.CosineEmbeddingLoss.args): peri.nn.CosineEmbeddingLoss
nn.CosineEmbeddingLoss = {}

---@class peri.nn.CosineEmbeddingLoss.args
---@field margin? number Below this cosine rows are unlike enough (default: 0).
---@field reduction? string `"mean"`, `"sum"`, `"none"`, or `"global_mean"`: over the samples of all ranks (default: mean).
---@field group? peri.dist.Group|boolean The ranks of a global mean (default: those that train the model).

---`functional.kl_div`. Called with logarithms of probabilities and with probabilities. `"mean"` is that of all
---elements; PyTorch's `batchmean` is `"sum"` divided by the number of samples.
---
---Errors: an unknown argument or reduction; shapes that do not fit.
---
---```lua
---local p = peri.tensor { { 0.5, 0.5 } }
---print(peri.nn.KLDivLoss {}(p:log(), p):item()) --> 0
---```
---@class peri.nn.KLDivLoss: peri.nn.Loss
---@overload fun(args: peri.nn.KLDivLoss.args): peri.nn.KLDivLoss
nn.KLDivLoss = {}

---@class peri.nn.KLDivLoss.args
---@field log_target? boolean The target is given by its logarithms (default: false).
---@field reduction? string `"mean"`, `"sum"`, `"none"`, or `"global_mean"`: over the samples of all ranks (default: mean).
---@field group? peri.dist.Group|boolean The ranks of a global mean (default: those that train the model).

---`functional.in_batch_softmax_loss`. Called with queries [B, D], items [B, D], and (optional) { log_q =, ids = }.
---Negatives are those of this rank.
---
---Errors: an unknown argument or reduction; shapes that do not fit.
---
---```lua
---local t = peri.tensor { { 1, 0 }, { 0, 1 } }
---print(("%.4f"):format(peri.nn.InBatchSoftmaxLoss {}(t, t):item())) --> 0.3133
---```
---@class peri.nn.InBatchSoftmaxLoss: peri.nn.Loss
---@overload fun(args: peri.nn.InBatchSoftmaxLoss.args): peri.nn.InBatchSoftmaxLoss
nn.InBatchSoftmaxLoss = {}

---@class peri.nn.InBatchSoftmaxLoss.args
---@field temperature? number What the products are divided by (default: 1).
---@field reduction? string `"mean"`, `"sum"`, `"none"`, or `"global_mean"`: over the samples of all ranks (default: mean).
---@field group? peri.dist.Group|boolean The ranks of a global mean (default: those that train the model).

---From now on an error tells which module of the model has the first NaN in a result, or in the gradient of one, and in
---which step. Everyday name: `peri.nn.detect_anomaly`.
---
---Errors: what is no module.
---
---```lua
---local model = peri.nn.Sequential { peri.nn.Linear { in_features = 2, out_features = 2 } }
---peri.nn.detect_anomaly(model)
---print((pcall(model, peri.full({ 1, 2 }, 0 / 0)))) --> false
---peri.nn.detect_anomaly(false)
---```
---@param model peri.nn.Module|boolean The model; `false`: no more.
function anomaly.detect_anomaly(model) end

---Capture what a module, or a function, computes on a GPU, and replay it: the host queues one launch where it queued
---dozens. PyTorch's `make_graphed_callables`. The forward pass is one graph, the backward pass of its results another.
---Results and gradients are those without it, to the last bit. The first call of a kind (shapes, dtypes, other
---arguments) runs as ever, the second is captured, later ones are replayed. When a parameter, a buffer or a field of a
---module is another than it was, the next call is captured anew. Where a call cannot be replayed (another kind beyond
---`max_graphs`, results of the call before that await their backward pass, a device that captures nothing), it runs as
---ever, and `graph.eager` counts it. docs/cuda.md tells more.
---
---Errors: what cannot be captured, by its name: reading an element, copies from the host, random numbers (but those of
---nn.Dropout), lookups in tables, optimizers' steps, hooks, fields that change in each call, inputs that are changed in
---place.
---
---```lua
---local layer = peri.nn.Linear { in_features = 2, out_features = 2 }
---local graph = peri.nn.graphed(layer)
---layer(peri.ones { 3, 2 })
---print(graph) --> Graphed(captures=0, replays=0, eager=1: device cpu captures nothing 1)
---```
---@param f peri.nn.Module|function A module, whose forward is captured from now on, or a function of tensors, numbers, strings and booleans that returns tensors; call the result in its place.
---@param options? peri.nn.graphed.args|boolean `false`: a module's forward is its own again (default: none).
---@return peri.nn.Graphed
function nn.graphed(f, options) end

---@class peri.nn.graphed.args
---@field modules? peri.nn.Module[] The modules whose parameters a function uses (default: none; of a module: itself).
---@field max_graphs? integer Kinds of calls that are captured at most (default: 8).

---What `nn.graphed` returns: what was captured, and how often it was replayed. Call it as the function.
---
---```lua
---local square = peri.nn.graphed(function(x) return x * x end)
---print(square(peri.full({ 1 }, 3)):item(), square.replays, square:bytes()) --> 9 0 0
---square:reset()
---```
---@class peri.nn.Graphed
---@field captures integer Captures so far.
---@field replays integer Calls that were replayed.
---@field eager table<string, integer> Calls that ran as ever, by the reason.
nn.Graphed = {}

---Bytes of the device's memory that the captures keep.
---@return integer
function nn.Graphed:bytes() end

---Forget what was captured. Results of calls stay what they are.
function nn.Graphed:reset() end
