-- dense_functions.lua: Joining tensors, losses, and what layers are made of.
--
-- Names and meaning are PyTorch's. In shapes, B is the number of samples, C the number of classes or columns, F of
-- sparse features, D the embedding dimension. Losses take `reduction`: `"mean"`, `"sum"` or `"none"`.
---@meta

---@class peri.nn
local nn = {}
---@class peri.nn.functional
local functional = {}

---Join tensors along a dimension that they have.
---
---Errors: an entry that is no tensor; sizes or dtypes that do not fit; an empty list.
---
---```lua
---print(nn.functional.cat({ peri.ones { 2, 3 }, peri.ones { 1, 3 } }):size(1)) --> 3
---```
---@param tensors peri.Tensor[] Of any shape; they differ in that dimension only.
---@param dim? integer The dimension (default: 1).
---@return peri.Tensor # Of the shape of one, with the sum of the sizes.
function functional.cat(tensors, dim) end

---Join tensors of one shape along a new dimension.
---
---Errors: an entry that is no tensor; shapes or dtypes that differ; an empty list.
---
---```lua
---print(nn.functional.stack({ peri.ones { 3 }, peri.ones { 3 } }):size(1)) --> 2
---```
---@param tensors peri.Tensor[] All of one shape.
---@param dim? integer Where the new dimension comes (default: 1).
---@return peri.Tensor # One dimension more, whose size is the number of tensors: `[n, ...]`.
function functional.stack(tensors, dim) end

---Normalise over the last dimensions: subtract the mean, divide by the root of the variance plus `eps`, multiply by the
---weight, add the bias.
---
---Errors: a weight or bias of another shape than the last n sizes.
---
---```lua
---print(nn.functional.layer_norm(peri.tensor { { 3, 3 } }):item(0)) --> 0
---```
---@param t peri.Tensor Any shape.
---@param n? integer How many dimensions (default: 1).
---@param weight? peri.Tensor Of the shape of the last n dimensions (default: none).
---@param bias? peri.Tensor Of the same shape (default: none).
---@param eps? number Added to the variance (default: 1e-5).
---@return peri.Tensor # Of the shape of t.
function functional.layer_norm(t, n, weight, bias, eps) end

---Zero elements with probability p, and divide the others by `1 - p`. Element i is dropped or not by (seed, stream,
---offset + i) alone. `nn.Dropout` chooses these numbers.
---
---Errors: a p that is not in `0 <= p < 1`.
---
---```lua
---print(nn.functional.dropout(peri.ones { 2 }, 0, 1, 0):item(0)) --> 1
---```
---@param t peri.Tensor Any shape.
---@param p number The probability.
---@param seed integer Of the generator.
---@param stream integer Of the generator.
---@param offset? integer Number of the first element (default: 0).
---@return peri.Tensor # Of the shape of t.
function functional.dropout(t, p, seed, stream, offset) end

---DLRM's interaction: the dense features, then the dot products of all pairs among dense and sparse ones.
---
---Errors: sparse features of another dimension than the dense ones.
---
---```lua
---print(nn.functional.interaction(peri.ones { 1, 4 }, peri.ones { 1, 2, 4 }):size(2)) --> 7
---```
---@param dense peri.Tensor `[B, D]`.
---@param sparse peri.Tensor `[B, F, D]`.
---@return peri.Tensor # `[B, D + F (F + 1) / 2]`.
function functional.interaction(dense, sparse) end

---A cross network in one operation: in each layer `x = x0 * (W (V x) + bias) + x`, beginning with `x = x0`.
---
---Errors: lists of different lengths; an entry that is no tensor; sizes that do not fit.
---
---```lua
---local x0, w = peri.tensor { { 2 } }, { peri.tensor { { 3 } } }
---print(nn.functional.cross_net(x0, nil, w):item()) --> 14
---```
---@param x0 peri.Tensor `[..., C]`.
---@param v? peri.Tensor[] A matrix for each layer: `[r, C]` (default: none, then W is [C, C]).
---@param w peri.Tensor[] A matrix for each layer: `[C, r]`, or `[C, C]` without v.
---@param bias? peri.Tensor[] C numbers for each layer: `[C]` or `[C, 1]` (default: none).
---@return peri.Tensor # `[..., C]`.
function functional.cross_net(x0, v, w, bias) end

---For a mean over ranks: what they add up. `nn.global_mean` does all of it.
---
---Errors: a sum of more than one element.
---
---```lua
---local parts = nn.functional.mean_parts(peri.tensor { 6 }, 3)
---print(parts:numel(), nn.functional.mean_of(peri.tensor { 6 }, parts):item()) --> 2 2
---```
---@param sum peri.Tensor The sum of this rank's losses: a scalar, or one element `[1]`.
---@param count peri.Tensor|number How many these are: a number, or one element `[1]`.
---@return peri.Tensor # f64 `[2]`: sum and count.
function functional.mean_parts(sum, count) end

---The mean, of what the ranks have added up. Its gradient goes to `sum`.
---
---Errors: what is no result of `mean_parts`, and no number.
---@param sum peri.Tensor This rank's sum: a scalar, or one element `[1]`.
---@param divided peri.Tensor|number The added-up parts `[2]`; or a number: then it is `sum / number`, of this rank alone.
---@param ranks? integer How many ranks have added (default: 1).
---@return peri.Tensor # A scalar.
function functional.mean_of(sum, divided, ranks) end

---Binary cross entropy of logits: `-(y log(sigmoid(x)) + (1 - y) log(1 - sigmoid(x)))`.
---
---Errors: shapes that do not fit; dtypes that are no floats; an unknown reduction.
---
---```lua
---print(("%.4f"):format(nn.functional.binary_cross_entropy_with_logits(peri.zeros { 2 },
---  peri.ones { 2 }):item())) --> 0.6931
---```
---@param t peri.Tensor Logits: any shape.
---@param target peri.Tensor Of the same shape: 0, 1, or between.
---@param weight? peri.Tensor A factor for each loss, of a shape that broadcasts (default: none).
---@param pos_weight? peri.Tensor A factor for the part of y = 1, of a shape that broadcasts (default: none).
---@param reduction? string `"mean"`, `"sum"` or `"none"` (default: mean).
---@return peri.Tensor # A scalar; with `"none"` of the shape of t.
function functional.binary_cross_entropy_with_logits(t, target, weight, pos_weight, reduction) end

---Binary cross entropy of probabilities. Logarithms are never below -100. Waits for the loss, to check it.
---
---Errors: probabilities or targets outside of 0..1; shapes that do not fit; dtypes that are no floats; an unknown
---reduction.
---
---```lua
---print(("%.4f"):format(nn.functional.binary_cross_entropy(peri.tensor { 0.5 },
---  peri.ones { 1 }):item()))
-----> 0.6931
---```
---@param t peri.Tensor Probabilities: any shape.
---@param target peri.Tensor Of the same shape: 0, 1, or between.
---@param weight? peri.Tensor A factor for each loss, of a shape that broadcasts (default: none).
---@param reduction? string `"mean"`, `"sum"` or `"none"` (default: mean).
---@return peri.Tensor # A scalar; with `"none"` of the shape of t.
function functional.binary_cross_entropy(t, target, weight, reduction) end

---The squared difference.
---
---Errors: shapes that do not fit; dtypes that are no floats; an unknown reduction.
---
---```lua
---print(nn.functional.mse_loss(peri.tensor { 1, 2 }, peri.tensor { 1, 4 }):item()) --> 2
---```
---@param t peri.Tensor Any shape.
---@param target peri.Tensor Of the same shape.
---@param reduction? string `"mean"`, `"sum"` or `"none"` (default: mean).
---@return peri.Tensor # A scalar; with `"none"` of the shape of t.
function functional.mse_loss(t, target, reduction) end

---Softmax cross entropy of logits and the numbers of the right classes.
---
---Errors: labels that are not i64, or outside of the classes; an unknown reduction; a label_smoothing outside of 0..1;
---a weight of another size than the classes.
---
---```lua
---print(("%.4f"):format(nn.functional.cross_entropy(peri.zeros { 1, 2 },
---  peri.tensor({ 1 }, "i64")):item()))
-----> 0.6931
---```
---@param t peri.Tensor Logits: `[B, C]`.
---@param labels peri.Tensor Classes from 0, i64: `[B]`.
---@param reduction? string `"mean"`, `"sum"` or `"none"` (default: mean).
---@param ignore_index? integer Rows with this label, of padding, have the loss 0 and do not count (default: none).
---@param label_smoothing? number The share of the target that all classes have in equal parts (default: 0).
---@param weight? peri.Tensor The factor of each class's losses; the mean is weighted by it: `[C]` (default: 1 each).
---@return peri.Tensor # A scalar; with `"none"` `[B]`.
function functional.cross_entropy(t, labels, reduction, ignore_index, label_smoothing, weight) end

---`functional.binary_cross_entropy_with_logits` as a module: called with logits and targets.
---
---Errors: an unknown argument or reduction; shapes that do not fit.
---
---```lua
---local loss = nn.BCEWithLogitsLoss { pos_weight = peri.tensor { 2 } }
---print(("%.4f"):format(loss(peri.zeros { 2 }, peri.ones { 2 }):item())) --> 1.3863
---```
---@class peri.nn.BCEWithLogitsLoss: peri.nn.Loss
---@overload fun(args?: peri.nn.BCEWithLogitsLoss.args): peri.nn.BCEWithLogitsLoss
nn.BCEWithLogitsLoss = {}

---@class peri.nn.BCEWithLogitsLoss.args
---@field weight? peri.Tensor A factor for each loss, of a shape that broadcasts (default: none).
---@field pos_weight? peri.Tensor A factor for the part of targets 1, of a shape that broadcasts (default: none).
---@field reduction? string `"mean"`, `"sum"`, `"none"`, or `"global_mean"`: over the samples of all ranks (default: mean).
---@field group? peri.dist.Group|boolean The ranks of a global mean (default: those that train the model).

---The class above all losses: what they have in common. A loss is a module; it is called with what its function in
---`nn.functional` takes first. A loss of your own is a module (`nn.Module:extend "Mine"`) that returns one number, such
---as `nn.global_mean(losses)`.
---
---```lua
---print(nn.Loss.is(nn.MSELoss {})) --> true
---```
---@class peri.nn.Loss: peri.nn.Module
nn.Loss = {}

---`functional.binary_cross_entropy` as a module: called with probabilities and targets.
---
---Errors: an unknown argument or reduction; probabilities or targets outside of 0..1; shapes that do not fit.
---
---```lua
---local loss = nn.BCELoss { reduction = "sum" }
---print(("%.4f"):format(loss:forward(peri.tensor { 0.5, 0.5 }, peri.ones { 2 }):item()))
-----> 1.3863
---loss:set_group(false)
---```
---@class peri.nn.BCELoss: peri.nn.Loss
---@overload fun(args?: peri.nn.BCELoss.args): peri.nn.BCELoss
nn.BCELoss = {}

---@class peri.nn.BCELoss.args
---@field weight? peri.Tensor A factor for each loss, of a shape that broadcasts (default: none).
---@field reduction? string `"mean"`, `"sum"`, `"none"`, or `"global_mean"`: over the samples of all ranks (default: mean).
---@field group? peri.dist.Group|boolean The ranks of a global mean (default: those that train the model).

---The loss. Calling the module calls it. What it takes is what its function in `nn.functional` takes first. With
---`"global_mean"` it is collective.
---
---Errors: shapes that do not fit; what is no tensor.
---@param input peri.Tensor Any shape.
---@param target peri.Tensor Of the same shape; of other losses: what their function takes.
---@param third? peri.Tensor For losses of three tensors: any shape (default: none).
---@return peri.Tensor # A scalar; with `"none"` a loss for each sample: of the shape of target.
function nn.Loss:forward(input, target, third) end

---The ranks of a global mean, unless the constructor was told others. DistributedModelParallel calls it for every loss
---that it finds in a model.
---
---Errors: none.
---@param group peri.dist.Group|boolean The ranks; `false`: this one alone.
function nn.Loss:set_group(group) end

---`functional.mse_loss` as a module: called with predictions and targets.
---
---Errors: an unknown argument or reduction; shapes that do not fit.
---
---```lua
---print(nn.MSELoss { reduction = "sum" }(peri.tensor { 1, 2 }, peri.tensor { 1, 4 }):item()) --> 4
---```
---@class peri.nn.MSELoss: peri.nn.Loss
---@overload fun(args?: peri.nn.MSELoss.args): peri.nn.MSELoss
nn.MSELoss = {}

---@class peri.nn.MSELoss.args
---@field reduction? string `"mean"`, `"sum"`, `"none"`, or `"global_mean"`: over the samples of all ranks (default: mean).
---@field group? peri.dist.Group|boolean The ranks of a global mean (default: those that train the model).

---`functional.cross_entropy` as a module: called with logits [B, C] and the numbers of the right classes, i64 [B].
---
---Errors: an unknown argument or reduction; labels outside of the classes.
---
---```lua
---print(("%.4f"):format(nn.CrossEntropyLoss()(peri.zeros { 1, 2 },
---  peri.tensor({ 1 }, "i64")):item()))
-----> 0.6931
---```
---@class peri.nn.CrossEntropyLoss: peri.nn.Loss
---@overload fun(args?: peri.nn.CrossEntropyLoss.args): peri.nn.CrossEntropyLoss
nn.CrossEntropyLoss = {}

---@class peri.nn.CrossEntropyLoss.args
---@field weight? peri.Tensor The factor of each class's losses, [C]; the mean is weighted by it (default: 1 each).
---@field reduction? string `"mean"`, `"sum"`, `"none"`, or `"global_mean"`: over the samples of all ranks (default: mean).
---@field ignore_index? integer Labels that are left out: their loss is 0, and the mean is one of the others (default: none). A global mean waits for the labels then.
---@field label_smoothing? number The share of the target that all classes have in equal parts: 0..1 (default: 0).
---@field group? peri.dist.Group|boolean The ranks of a global mean (default: those that train the model).
