-- tensor_reductions.lua: Functions of tensors: reductions, losses, making.
--
-- What is here is a method of tensors, too, where its first argument is a tensor `t`: `t:topk(2)` is
-- `peri.nn.functional.topk(t, 2)`. Names and meaning are PyTorch's. Dimensions count from 1 (-1 is the last), elements
-- from 0.
---@meta

---@class peri.nn.functional
local functional = {}

---@class peri.Tensor
local Tensor = {}

---The largest element over dimensions, NaN if there is one. Equal elements share the gradient.
---
---Errors: a dimension without elements; complex numbers.
---
---```lua
---print(peri.tensor({ 3, 1, 2 }):amax():item()) --> 3
---```
---@param t peri.Tensor The numbers: any shape.
---@param dim? integer|integer[] A dimension, or a list of them (default: all).
---@param keepdim? boolean Leave them with size 1 (default: false).
---@return peri.Tensor # The shape of t without the dimensions.
function functional.amax(t, dim, keepdim) end

---The smallest element over dimensions, NaN if there is one. Equal elements share the gradient.
---
---Errors: a dimension without elements; complex numbers.
---
---```lua
---print(peri.tensor({ 3, 1, 2 }):amin():item()) --> 1
---```
---@param t peri.Tensor The numbers: any shape.
---@param dim? integer|integer[] A dimension, or a list of them (default: all).
---@param keepdim? boolean Leave them with size 1 (default: false).
---@return peri.Tensor # The shape of t without the dimensions.
function functional.amin(t, dim, keepdim) end

---Whether any element is true, or not 0 (NaN is not); of nothing it is false.
---
---Errors: a dimension that t does not have; complex numbers.
---
---```lua
---print(peri.tensor({ 0, 2 }):any():item(), peri.tensor({ 0, 2 }):gt(5):any():item()) --> 1 0
---```
---@param t peri.Tensor The numbers: any shape.
---@param dim? integer|integer[] A dimension, or a list of them (default: all).
---@param keepdim? boolean Leave them with size 1 (default: false).
---@return peri.Tensor # The shape of t without the dimensions, bool.
function functional.any(t, dim, keepdim) end

---Whether all elements are true, or not 0; of nothing it is true.
---
---Errors: a dimension that t does not have; complex numbers.
---
---```lua
---print(peri.tensor({ 0, 2 }):all():item(), peri.tensor({ 1, 2 }):all():item()) --> 0 1
---```
---@param t peri.Tensor The numbers: any shape.
---@param dim? integer|integer[] A dimension, or a list of them (default: all).
---@param keepdim? boolean Leave them with size 1 (default: false).
---@return peri.Tensor # The shape of t without the dimensions, bool.
function functional.all(t, dim, keepdim) end

---The sum of the numbers that are not NaN, as of labels that are not known.
---
---Errors: a dimension that t does not have, or named twice.
---
---```lua
---print(peri.tensor({ 1, 0 / 0, 2 }):nansum():item()) --> 3
---```
---@param t peri.Tensor The numbers: any shape.
---@param dim? integer|integer[] A dimension, or a list of them (default: all).
---@param keepdim? boolean Leave them with size 1 (default: false).
---@return peri.Tensor # The shape of t without the dimensions.
function functional.nansum(t, dim, keepdim) end

---The mean of the numbers that are not NaN; NaN where all are.
---
---Errors: a dimension that t does not have, or named twice.
---
---```lua
---print(peri.tensor({ 1, 0 / 0, 2 }):nanmean():item()) --> 1.5
---```
---@param t peri.Tensor The numbers: any shape.
---@param dim? integer|integer[] A dimension, or a list of them (default: all).
---@param keepdim? boolean Leave them with size 1 (default: false).
---@return peri.Tensor # The shape of t without the dimensions.
function functional.nanmean(t, dim, keepdim) end

---The logarithm of the sum of `exp(t)`, which neither large nor small numbers take out of range. Integers and bool in
---f32.
---
---Errors: a dimension that t does not have; complex numbers.
---
---```lua
---print(("%.4f"):format(peri.tensor({ 1000, 1000 }):logsumexp():item())) --> 1000.6932
---```
---@param t peri.Tensor The numbers: any shape.
---@param dim? integer|integer[] A dimension, or a list of them (default: all).
---@param keepdim? boolean Leave them with size 1 (default: false).
---@return peri.Tensor # The shape of t without the dimensions.
function functional.logsumexp(t, dim, keepdim) end

---t divided by its p-norm along a dimension, so that rows have length 1. Rows of zeros stay zeros.
---
---Errors: a p below 0; a dimension that t does not have; dtypes that are no floats.
---
---```lua
---print(table.concat(peri.tensor({ { 3, 4 } }):normalize():to_list(), " "))
-----> 0.60000002384186 0.80000001192093
---```
---@param t peri.Tensor The numbers: any shape.
---@param p? number The norm, as in `norm` (default: 2).
---@param dim? integer|integer[] The dimension of a vector (default: 2, the columns of a matrix, as in PyTorch).
---@param eps? number Norms below it count as it (default: 1e-12).
---@return peri.Tensor # Of the shape of t.
function functional.normalize(t, p, dim, eps) end

---The absolute difference.
---
---Errors: shapes that do not broadcast; another reduction.
---
---```lua
---print(nn.functional.l1_loss(peri.tensor { 1, 4 }, peri.tensor { 0, 2 }):item()) --> 1.5
---```
---@param t peri.Tensor Predictions: any shape.
---@param target peri.Tensor What they should be: the same shape.
---@param reduction? string `"mean"` (default), `"sum"` or `"none"`.
---@return peri.Tensor # `[]`, or with `"none"` the shape of t.
function functional.l1_loss(t, target, reduction) end

---Half the squared difference up to delta, and from there on delta times the difference, less half of delta squared:
---outliers count less.
---
---Errors: delta not above 0; shapes that do not broadcast; another reduction.
---
---```lua
---print(nn.functional.huber_loss(peri.tensor { 1, 4 }, peri.tensor { 0, 0 }):item()) --> 2
---```
---@param t peri.Tensor Predictions: any shape.
---@param target peri.Tensor What they should be: the same shape.
---@param delta? number Where the line begins (default: 1).
---@param reduction? string `"mean"` (default), `"sum"` or `"none"`.
---@return peri.Tensor # `[]`, or with `"none"` the shape of t.
function functional.huber_loss(t, target, delta, reduction) end

---`huber_loss` with delta = beta, divided by beta; `l1_loss` for 0.
---
---Errors: beta below 0; shapes that do not broadcast; another reduction.
---
---```lua
---print(nn.functional.smooth_l1_loss(peri.tensor { 1, 4 }, peri.tensor { 0, 0 }, 2):item())
-----> 1.625
---```
---@param t peri.Tensor Predictions: any shape.
---@param target peri.Tensor What they should be: the same shape.
---@param beta? number Where the line begins (default: 1).
---@param reduction? string `"mean"` (default), `"sum"` or `"none"`.
---@return peri.Tensor # `[]`, or with `"none"` the shape of t.
function functional.smooth_l1_loss(t, target, beta, reduction) end

---Without `dim` the largest of all elements; with a dimension the largest along it and their places, of equal ones the
---first; with a tensor `maximum`.
---
---Errors: a dimension without elements; complex numbers.
---
---```lua
---local values, places = peri.tensor({ 3, 1, 2 }):max(1)
---print(values:item(), places:item()) --> 3 0
---```
---@param t peri.Tensor The numbers: any shape.
---@param dim? integer|peri.Tensor A dimension, or a tensor of a shape that broadcasts (default: none).
---@param keepdim? boolean Leave the dimension with size 1 (default: false).
---@return peri.Tensor # Values: the shape of t without the dimension.
---@return peri.Tensor? # Places: of the same shape, i64.
function functional.max(t, dim, keepdim) end

---Without `dim` the smallest of all elements; with a dimension the smallest along it and their places, of equal ones
---the first; with a tensor `minimum`.
---
---Errors: a dimension without elements; complex numbers.
---
---```lua
---local values, places = peri.tensor({ 3, 1, 2 }):min(1)
---print(values:item(), places:item()) --> 1 1
---```
---@param t peri.Tensor The numbers: any shape.
---@param dim? integer|peri.Tensor A dimension, or a tensor of a shape that broadcasts (default: none).
---@param keepdim? boolean Leave the dimension with size 1 (default: false).
---@return peri.Tensor # Values: the shape of t without the dimension.
---@return peri.Tensor? # Places: of the same shape, i64.
function functional.min(t, dim, keepdim) end

---The place of the largest element, of equal ones the first, of NaN if there is one.
---
---Errors: a dimension without elements; complex numbers.
---
---```lua
---print(peri.tensor({ 3, 1, 2 }):argmax():item()) --> 0
---```
---@param t peri.Tensor The numbers: any shape.
---@param dim? integer Along this dimension (default: among all in row-major order).
---@param keepdim? boolean Leave the dimension with size 1 (default: false).
---@return peri.Tensor # The shape of t without the dimension, i64.
function functional.argmax(t, dim, keepdim) end

---The place of the smallest element, of equal ones the first, of NaN if there is one.
---
---Errors: a dimension without elements; complex numbers.
---
---```lua
---print(peri.tensor({ 3, 1, 2 }):argmin():item()) --> 1
---```
---@param t peri.Tensor The numbers: any shape.
---@param dim? integer Along this dimension (default: among all in row-major order).
---@param keepdim? boolean Leave the dimension with size 1 (default: false).
---@return peri.Tensor # The shape of t without the dimension, i64.
function functional.argmin(t, dim, keepdim) end

---The sum of squared distances from the mean, divided by n - correction.
---
---Errors: dtypes that are no floats.
---
---```lua
---print(peri.tensor({ 1, 2, 3 }):var():item()) --> 1
---```
---@param t peri.Tensor The numbers: any shape.
---@param dim? integer|integer[] A dimension, or a list of them (default: all).
---@param keepdim? boolean Leave them with size 1 (default: false).
---@param correction? number What the number of elements is lowered by (default: 1).
---@return peri.Tensor # The shape of t without the dimensions.
function functional.var(t, dim, keepdim, correction) end

---The square root of `var`. Its gradient is 0 where it is 0.
---
---Errors: dtypes that are no floats.
---
---```lua
---print(peri.tensor({ 1, 3 }):std(nil, false, 0):item()) --> 1
---```
---@param t peri.Tensor The numbers: any shape.
---@param dim? integer|integer[] A dimension, or a list of them (default: all).
---@param keepdim? boolean Leave them with size 1 (default: false).
---@param correction? number What the number of elements is lowered by (default: 1).
---@return peri.Tensor # The shape of t without the dimensions.
function functional.std(t, dim, keepdim, correction) end

---The p-norm over dimensions. Its gradient is 0 where it is 0.
---
---Errors: a negative p; dtypes that are no floats.
---
---```lua
---print(peri.tensor({ 3, 4 }):norm():item()) --> 5
---```
---@param t peri.Tensor The numbers: any shape.
---@param p? number Above 0; 0: counts what is not 0; math.huge, -math.huge: largest, smallest absolute value (default: 2).
---@param dim? integer|integer[] A dimension, or a list of them (default: all).
---@param keepdim? boolean Leave them with size 1 (default: false).
---@return peri.Tensor # The shape of t without the dimensions.
function functional.norm(t, p, dim, keepdim) end

---The sum of all elements up to this one along a dimension. Floats are added in f64; integers and bool give i64.
---
---Errors: complex numbers.
---
---```lua
---print(table.concat(peri.tensor({ 1, 2, 3 }):cumsum(1):to_list(), " ")) --> 1 3 6
---```
---@param t peri.Tensor The numbers: any shape.
---@param dim integer The dimension.
---@return peri.Tensor # Of the shape of t.
function functional.cumsum(t, dim) end

---Tensors multiplied, and summed over the names of dimensions that the result does not have: `"ij,jk->ik"` is a matrix
---product, `...` stands for dimensions without names. Without `->` the result has the names that stand once, in
---alphabetical order.
---
---Errors: another number of operands or dimensions; a name with two sizes, or twice in one operand.
---
---```lua
---local t = peri.tensor { { 1, 2 }, { 3, 4 } }
---print(table.concat(peri.nn.functional.einsum("ij,j->i", t, peri.tensor { 1, 10 }):to_list(),
---  " "))
-----> 21 43
---```
---@param equation string The names of the dimensions of each operand, and after `->` of the result.
---@param ... peri.Tensor The operands, of shapes that the names fit.
---@return peri.Tensor # Of the shape that the equation says.
function functional.einsum(equation, ...) end

---Bayesian personalised ranking: -log sigmoid(positive - negative).
---
---Errors: an unknown reduction.
---
---```lua
---print(("%.4f"):format(peri.nn.functional.bpr_loss(peri.tensor { 2 }, peri.tensor { 1 }):item()))
-----> 0.3133
---```
---@param positive peri.Tensor Scores of items that were taken: any shape.
---@param negative peri.Tensor Scores of others, of a shape that broadcasts.
---@param reduction? string "mean", "sum" or "none" (default: "mean").
---@return peri.Tensor # A scalar, or with "none" the broadcast shape.
function functional.bpr_loss(positive, negative, reduction) end

---Binary cross entropy that heeds easy samples less: times (1 - p)^gamma, p being the probability of the target.
---
---Errors: an unknown reduction; shapes that differ.
---
---```lua
---print(("%.4f"):format(peri.nn.functional.sigmoid_focal_loss(peri.tensor { 0 },
---  peri.tensor { 1 }):item()))
-----> 0.0433
---```
---@param t peri.Tensor Logits: any shape.
---@param target peri.Tensor 0 or 1, of the same shape.
---@param alpha? number Weight of targets 1, of others 1 - alpha; negative: no weights (default: 0.25).
---@param gamma? number The exponent (default: 2).
---@param reduction? string "mean", "sum" or "none" (default: "mean").
---@return peri.Tensor # A scalar, or with "none" the broadcast shape.
function functional.sigmoid_focal_loss(t, target, alpha, gamma, reduction) end

---max(0, -target (a - b) + margin): one of two scores should be larger.
---
---Errors: an unknown reduction.
---
---```lua
---local f = peri.nn.functional.margin_ranking_loss
---print(f(peri.tensor { 1 }, peri.tensor { 3 }, peri.tensor { 1 }, 0.5):item()) --> 2.5
---```
---@param a peri.Tensor Any shape.
---@param b peri.Tensor The same shape.
---@param target peri.Tensor 1: a should be larger, -1: b should; of the same shape.
---@param margin? number By how much (default: 0).
---@param reduction? string "mean", "sum" or "none" (default: "mean").
---@return peri.Tensor # A scalar, or with "none" the broadcast shape.
function functional.margin_ranking_loss(a, b, target, margin, reduction) end

---t where the target is 1, max(0, margin - t) where it is -1.
---
---Errors: an unknown reduction.
---
---```lua
---print(peri.nn.functional.hinge_embedding_loss(peri.tensor { 0.25 }, peri.tensor { -1 }):item())
-----> 0.75
---```
---@param t peri.Tensor Distances: any shape.
---@param target peri.Tensor 1 or -1, of the same shape.
---@param margin? number From where on a distance costs nothing (default: 1).
---@param reduction? string "mean", "sum" or "none" (default: "mean").
---@return peri.Tensor # A scalar, or with "none" the broadcast shape.
function functional.hinge_embedding_loss(t, target, margin, reduction) end

---The cosine of the angle between vectors.
---
---Errors: shapes that do not broadcast.
---
---```lua
---print(peri.nn.functional.cosine_similarity(peri.tensor { 3, 4 },
---  peri.tensor { 6, 8 }):item() > 0.9999)
-----> true
---```
---@param a peri.Tensor Any shape.
---@param b peri.Tensor A shape that broadcasts with that of a.
---@param dim? integer The dimension of the vectors (default: -1).
---@param eps? number Least size that a vector counts with (default: 1e-8).
---@return peri.Tensor # The shape without the dimension.
function functional.cosine_similarity(a, b, dim, eps) end

---1 - cosine where the target is 1, max(0, cosine - margin) where it is -1.
---
---Errors: an unknown reduction.
---
---```lua
---local a = peri.tensor { { 1, 0 } }
---print(peri.nn.functional.cosine_embedding_loss(a, a, peri.tensor { -1 }):item()) --> 1
---```
---@param a peri.Tensor Rows: `[B, D]`.
---@param b peri.Tensor Rows: `[B, D]`.
---@param target peri.Tensor 1 or -1: `[B]`.
---@param margin? number Below this cosine rows are unlike enough (default: 0).
---@param reduction? string "mean", "sum" or "none" (default: "mean").
---@return peri.Tensor # A scalar, or with "none" the broadcast shape.
function functional.cosine_embedding_loss(a, b, target, margin, reduction) end

---The distance of the distribution `target` from the one whose logarithms are t: target (log target - t).
---
---Errors: an unknown reduction.
---
---```lua
---local p = peri.tensor { { 0.5, 0.5 } }
---print(peri.nn.functional.kl_div(p:log(), p):item()) --> 0
---```
---@param t peri.Tensor Logarithms of probabilities: any shape.
---@param target peri.Tensor Probabilities, of the same shape.
---@param log_target? boolean The target is given by its logarithms (default: false).
---@param reduction? string "mean", "batchmean" (the sum divided by the first size), "sum" or "none" (default: "mean").
---@return peri.Tensor # A scalar, or with "none" the broadcast shape.
function functional.kl_div(t, target, log_target, reduction) end

---Sampled softmax with the items of the batch as negatives: row i of the queries should choose row i of the items.
---Options: `temperature` (1) divides the products; `log_q`, of shape [B], the logarithm of how often each item is
---drawn, is subtracted; items with the same number in `ids` (i64, [B]) are no negatives of each other.
---
---Errors: shapes that do not fit.
---
---```lua
---local t = peri.tensor { { 1, 0 }, { 0, 1 } }
---print(("%.4f"):format(peri.nn.functional.in_batch_softmax_loss(t, t):item())) --> 0.3133
---```
---@param queries peri.Tensor `[B, D]`.
---@param items peri.Tensor `[B, D]`.
---@param options? table `temperature`, `log_q`, `ids`, `reduction`, as above (default: none of them).
---@return peri.Tensor # A scalar, or with "none" `[B]`.
function functional.in_batch_softmax_loss(queries, items, options) end

---start, start + step, ... below `stop`. With one number: 0, 1, ... below it. Everyday name: `peri.arange`.
---
---Errors: a step of 0, or away from the stop; numbers that the dtype does not hold.
---
---```lua
---print(table.concat(peri.arange(2, 8, 3):to_list(), " ")) --> 2 5
---```
---@param start number|integer The first number; alone, the stop. Each of the three may be a 64-bit integer.
---@param stop? number|integer Where it ends, not included (default: start, from 0 on).
---@param step? number|integer From one to the next (default: 1).
---@param dtype? string The dtype (default: i64 if all are whole, else f32).
---@param device? string The device (default: that of the rank).
---@return peri.Tensor # `[n]`.
function Tensor.arange(start, stop, step, dtype, device) end

---Uniform numbers in [0, 1). The n-th call after `nn.manual_seed(s)` is a function of s and n. Everyday name:
---`peri.rand`.
---
---Errors: dtypes but f32 and f64.
---
---```lua
---print(peri.rand({ 2, 3 }):numel()) --> 6
---```
---@param shape integer[] The sizes.
---@param dtype? string The dtype (default: f32).
---@param device? string The device (default: that of the rank).
---@return peri.Tensor # Of the shape.
function Tensor.rand(shape, dtype, device) end

---Normal numbers of mean 0 and deviation 1, otherwise as `rand`. Everyday name: `peri.randn`.
---
---Errors: dtypes but f32 and f64.
---
---```lua
---print(peri.randn({ 2, 3 }):dim()) --> 2
---```
---@param shape integer[] The sizes.
---@param dtype? string The dtype (default: f32).
---@param device? string The device (default: that of the rank).
---@return peri.Tensor # Of the shape.
function Tensor.randn(shape, dtype, device) end
