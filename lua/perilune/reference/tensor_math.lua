-- tensor_math.lua: Functions of tensors: rounding, truth, distances.
--
-- What is here is a method of tensors, too, where its first argument is a tensor `t`: `t:floor()` is
-- `peri.nn.functional.floor(t)`. Names and meaning are PyTorch's. Dimensions count from 1 (-1 is the last), elements
-- from 0.
---@meta

---@class peri.nn.functional
local functional = {}

---Each number rounded down. The gradient is 0. Integers stay.
---
---Errors: bool or complex numbers.
---
---```lua
---print(peri.tensor({ -0.5 }):floor():item()) --> -1
---```
---@param t peri.Tensor The numbers: any shape.
---@return peri.Tensor # Of the shape of t.
function functional.floor(t) end

---Each number rounded up. The gradient is 0. Integers stay.
---
---Errors: bool or complex numbers.
---
---```lua
---print(peri.tensor({ 1.2 }):ceil():item()) --> 2
---```
---@param t peri.Tensor The numbers: any shape.
---@return peri.Tensor # Of the shape of t.
function functional.ceil(t) end

---The whole number nearest to each; of two, the even one. The gradient is 0. Integers stay.
---
---Errors: bool or complex numbers.
---
---```lua
---print(peri.tensor({ 2.5 }):round():item()) --> 2
---```
---@param t peri.Tensor The numbers: any shape.
---@return peri.Tensor # Of the shape of t.
function functional.round(t) end

---Each number rounded towards 0. The gradient is 0. Integers stay.
---
---Errors: bool or complex numbers.
---
---```lua
---print(peri.tensor({ -1.7 }):trunc():item()) --> -1
---```
---@param t peri.Tensor The numbers: any shape.
---@return peri.Tensor # Of the shape of t.
function functional.trunc(t) end

---1 where a number is above 0, -1 where it is below, 0 elsewhere (NaN too). The gradient is 0. Integers stay integers.
---
---Errors: bool or complex numbers.
---
---```lua
---print(peri.tensor({ -3 }):sign():item()) --> -1
---```
---@param t peri.Tensor The numbers: any shape.
---@return peri.Tensor # Of the shape of t.
function functional.sign(t) end

---log(1 + t), which is exact also where t is so small that 1 + t would be rounded. Integers become f32.
---
---Errors: complex numbers.
---
---```lua
---print(("%.4f"):format(peri.tensor({ 1 }):log1p():item())) --> 0.6931
---```
---@param t peri.Tensor The numbers: any shape.
---@return peri.Tensor # Of the shape of t.
function functional.log1p(t) end

---exp(t) - 1, which is exact also where t is small. Integers become f32.
---
---Errors: complex numbers.
---
---```lua
---print(("%.4f"):format(peri.tensor({ 1 }):expm1():item())) --> 1.7183
---```
---@param t peri.Tensor The numbers: any shape.
---@return peri.Tensor # Of the shape of t.
function functional.expm1(t) end

---1 / sqrt(t). Integers become f32.
---
---Errors: complex numbers.
---
---```lua
---print(peri.tensor({ 4 }):rsqrt():item()) --> 0.5
---```
---@param t peri.Tensor The numbers: any shape.
---@return peri.Tensor # Of the shape of t.
function functional.rsqrt(t) end

---The sine of each number. Integers become f32.
---
---Errors: complex numbers.
---
---```lua
---print(peri.tensor({ 0 }):sin():item()) --> 0
---```
---@param t peri.Tensor The numbers: any shape.
---@return peri.Tensor # Of the shape of t.
function functional.sin(t) end

---The cosine of each number. Integers become f32.
---
---Errors: complex numbers.
---
---```lua
---print(peri.tensor({ 0 }):cos():item()) --> 1
---```
---@param t peri.Tensor The numbers: any shape.
---@return peri.Tensor # Of the shape of t.
function functional.cos(t) end

---The error function: 2 / sqrt(pi) times the integral of exp(-x^2) from 0 to t. Integers become f32.
---
---Errors: complex numbers.
---
---```lua
---print(("%.4f"):format(peri.tensor({ 1 }):erf():item())) --> 0.8427
---```
---@param t peri.Tensor The numbers: any shape.
---@return peri.Tensor # Of the shape of t.
function functional.erf(t) end

---log(t / (1 - t)), of probabilities.
---
---Errors: bounds that cross; complex numbers.
---
---```lua
---print(peri.tensor({ 0.5 }):logit():item()) --> 0
---```
---@param t peri.Tensor The numbers: any shape.
---@param eps? number t below it counts as eps, above 1 - eps as that (default: none).
---@return peri.Tensor # Of the shape of t.
function functional.logit(t, eps) end

---t where it is above 0, else alpha (exp(t) - 1).
---
---Errors: complex numbers.
---
---```lua
---print(("%.4f"):format(peri.tensor({ -1 }):elu():item())) --> -0.6321
---```
---@param t peri.Tensor The numbers: any shape.
---@param alpha? number The factor of the negative side (default: 1).
---@return peri.Tensor # Of the shape of t.
function functional.elu(t, alpha) end

---Where an element is an infinity.
---
---Errors: complex numbers.
---
---```lua
---print(peri.tensor({ 1, math.huge }):isinf():item(1)) --> 1
---```
---@param t peri.Tensor The numbers: any shape.
---@return peri.Tensor # Of the shape of t, bool.
function functional.isinf(t) end

---t with numbers in place of NaN and infinities.
---
---Errors: numbers that the dtype cannot hold.
---
---```lua
---print(peri.tensor({ 0 / 0 }):nan_to_num(7):item()) --> 7
---```
---@param t peri.Tensor The numbers: any shape.
---@param nan? number For NaN (default: 0).
---@param posinf? number For the positive infinity (default: the largest number of the dtype).
---@param neginf? number For the negative one (default: the least).
---@return peri.Tensor # Of the shape of t.
function functional.nan_to_num(t, nan, posinf, neginf) end

---Where t is 0 or false.
---
---Errors: complex numbers.
---
---```lua
---print(peri.tensor({ 0, 3 }):logical_not():item(0)) --> 1
---```
---@param t peri.Tensor The numbers: any shape.
---@return peri.Tensor # Of the shape of t, bool.
function functional.logical_not(t) end

---Where both are not 0.
---
---Errors: shapes that do not broadcast.
---
---```lua
---print(peri.tensor({ 1, 2 }):logical_and(peri.tensor { 0, 3 }):item(1)) --> 1
---```
---@param a peri.Tensor Any shape.
---@param b peri.Tensor Of a shape that broadcasts with that of a.
---@return peri.Tensor # Of the broadcast shape, bool.
function functional.logical_and(a, b) end

---Where one of both, or both, are not 0.
---
---Errors: shapes that do not broadcast.
---
---```lua
---print(peri.tensor({ 0, 0 }):logical_or(peri.tensor { 0, 3 }):item(1)) --> 1
---```
---@param a peri.Tensor Any shape.
---@param b peri.Tensor Of a shape that broadcasts with that of a.
---@return peri.Tensor # Of the broadcast shape, bool.
function functional.logical_or(a, b) end

---Where exactly one of both is not 0.
---
---Errors: shapes that do not broadcast.
---
---```lua
---print(peri.tensor({ 1, 1 }):logical_xor(peri.tensor { 0, 3 }):item(0)) --> 1
---```
---@param a peri.Tensor Any shape.
---@param b peri.Tensor Of a shape that broadcasts with that of a.
---@return peri.Tensor # Of the broadcast shape, bool.
function functional.logical_xor(a, b) end

---Where |a - b| <= atol + rtol |b|, or both are equal.
---
---Errors: shapes that do not broadcast; complex numbers.
---
---```lua
---print(peri.tensor({ 1 }):isclose(peri.tensor { 1.000001 }):item()) --> 1
---```
---@param a peri.Tensor Any shape.
---@param b peri.Tensor Of a shape that broadcasts with that of a.
---@param rtol? number Relative (default: 1e-5).
---@param atol? number Absolute (default: 1e-8).
---@param equal_nan? boolean Whether NaN is close to NaN (default: false).
---@return peri.Tensor # Of the broadcast shape, bool.
function functional.isclose(a, b, rtol, atol, equal_nan) end

---Whether isclose holds everywhere. Waits.
---
---Errors: shapes that do not broadcast.
---
---```lua
---print(peri.ones({ 2 }):allclose(peri.ones { 2 })) --> true
---```
---@param a peri.Tensor Any shape.
---@param b peri.Tensor Of a shape that broadcasts with that of a.
---@param rtol? number Relative (default: 1e-5).
---@param atol? number Absolute (default: 1e-8).
---@param equal_nan? boolean Whether NaN is close to NaN (default: false).
---@return boolean # True or false.
function functional.allclose(a, b, rtol, atol, equal_nan) end

---Whether both have one shape and equal elements. Waits.
---
---Errors: complex numbers.
---
---```lua
---print(peri.ones({ 2 }):equal(peri.ones { 3 })) --> false
---```
---@param a peri.Tensor Any shape.
---@param b peri.Tensor Any shape.
---@return boolean # True or false.
function functional.equal(a, b) end

---a + weight (b - a).
---
---Errors: shapes that do not broadcast.
---
---```lua
---print(peri.tensor({ 1 }):lerp(peri.tensor { 3 }, 0.5):item()) --> 2
---```
---@param a peri.Tensor Any shape.
---@param b peri.Tensor Of a shape that broadcasts with that of a.
---@param weight peri.Tensor|number A number, or a tensor of any shape that broadcasts.
---@return peri.Tensor # Of the broadcast shape.
function functional.lerp(a, b, weight) end

---beta t + alpha a b, a product of matrices.
---
---Errors: other dimensions than two; sizes that do not fit.
---
---```lua
---print(peri.ones({ 1 }):addmm(peri.ones { 2, 3 }, peri.ones { 3, 1 }):item(1)) --> 4
---```
---@param t peri.Tensor Of a shape that broadcasts with `[m, n]`.
---@param a peri.Tensor `[m, k]`.
---@param b peri.Tensor `[k, n]`.
---@param beta? number The factor of t (default: 1); of 0 times t nothing is added, not even NaN.
---@param alpha? number The factor of the product (default: 1).
---@return peri.Tensor # `[m, n]`.
function functional.addmm(t, a, b, beta, alpha) end

---beta t + alpha a b of batches of matrices.
---
---Errors: other dimensions than three; sizes that do not fit.
---
---```lua
---local a = peri.ones { 2, 1, 3 }
---print(peri.ones({ 1 }):baddbmm(a, a:transpose(2, 3)):item(1)) --> 4
---```
---@param t peri.Tensor Of a shape that broadcasts with `[B, m, n]`.
---@param a peri.Tensor `[B, m, k]`.
---@param b peri.Tensor `[B, k, n]`.
---@param beta? number The factor of t (default: 1); of 0 times t nothing is added, not even NaN.
---@param alpha? number The factor of the products (default: 1).
---@return peri.Tensor # `[B, m, n]`.
function functional.baddbmm(t, a, b, beta, alpha) end

---Each element minus the one before it.
---
---Errors: a dimension that t does not have.
---
---```lua
---print(table.concat(peri.tensor({ 1, 4, 9 }):diff():to_list(), " ")) --> 3 5
---```
---@param t peri.Tensor The numbers: any shape.
---@param n? integer How often (default: 1).
---@param dim? integer The dimension (default: -1, the last one).
---@return peri.Tensor # Of the shape of t, n fewer in the dimension.
function functional.diff(t, n, dim) end

---The product of all elements up to this one along a dimension. Floats are multiplied in f64; integers and bool give
---i64.
---
---Errors: complex numbers.
---
---```lua
---print(table.concat(peri.tensor({ 1, 2, 3 }):cumprod(1):to_list(), " ")) --> 1 2 6
---```
---@param t peri.Tensor The numbers: any shape.
---@param dim integer The dimension.
---@return peri.Tensor # Of the shape of t.
function functional.cumprod(t, dim) end

---The largest of all elements up to this one along a dimension, and its place, of equal ones the last. From a NaN on
---it is NaN.
---
---Errors: complex numbers.
---
---```lua
---local most, where = peri.tensor({ 1, 3, 2 }):cummax(1)
---print(table.concat(most:to_list(), " "), table.concat(where:to_list(), " ")) --> 1 3 3 0 1 1
---```
---@param t peri.Tensor The numbers: any shape.
---@param dim integer The dimension.
---@return peri.Tensor # Of the shape of t.
---@return peri.Tensor # Places: of the same shape, i64.
function functional.cummax(t, dim) end

---The smallest of all elements up to this one along a dimension, and its place, of equal ones the last. From a NaN on
---it is NaN.
---
---Errors: complex numbers.
---
---```lua
---print(table.concat((peri.tensor({ 2, 3, 1 }):cummin(1)):to_list(), " ")) --> 2 2 1
---```
---@param t peri.Tensor The numbers: any shape.
---@param dim integer The dimension.
---@return peri.Tensor # Of the shape of t.
---@return peri.Tensor # Places: of the same shape, i64.
function functional.cummin(t, dim) end

---The sum of products over some dimensions of a and some of b.
---
---Errors: dimensions that are not there, or twice; sizes that differ.
---
---```lua
---local a, b = peri.ones { 2, 3, 4 }, peri.ones { 4, 3, 5 }
---print(table.concat(peri.nn.functional.tensordot(a, b, { { 2, 3 }, { 2, 1 } }):shape(), " "))
-----> 2 5
---```
---@param a peri.Tensor The first one: any shape.
---@param b peri.Tensor The second one: any shape.
---@param dims? integer|integer[][] How many: the last ones of a with the first ones of b, or two lists: those of a, those of b (default: 2).
---@return peri.Tensor # Its shape: the dimensions of a that are left, then those of b.
function functional.tensordot(a, b, dims) end

---The p-norm of a - b + eps along the last dimension.
---
---Errors: shapes that do not broadcast.
---
---```lua
---local d = nn.functional.pairwise_distance(peri.zeros { 1, 2 }, peri.tensor { { 3, 4 } })
---print(("%.3f"):format(d:item())) --> 5.000
---```
---@param a peri.Tensor `[..., D]`.
---@param b peri.Tensor `[..., D]`; both broadcast.
---@param p? number Which norm (default: 2).
---@param eps? number Added to the difference (default: 1e-6).
---@param keepdim? boolean Leave the dimension with size 1 (default: false).
---@return peri.Tensor # `[...]`.
function functional.pairwise_distance(a, b, p, eps, keepdim) end

---The p-norm of the difference of each row of a and each of b. Of more than 25 rows it is made of squares and a product
---for p = 2: faster, and less exact where rows are near each other.
---
---Errors: rows of two sizes; fewer than two dimensions.
---
---```lua
---print(nn.functional.cdist(peri.zeros { 1, 2 }, peri.tensor { { 3, 4 } }):item()) --> 5
---```
---@param a peri.Tensor `[..., n, D]`.
---@param b peri.Tensor `[..., m, D]`.
---@param p? number Which norm (default: 2).
---@return peri.Tensor # `[..., n, m]`.
function functional.cdist(a, b, p) end

---max(0, d(anchor, positive) - d(anchor, negative) + margin), d being pairwise_distance.
---
---Errors: shapes that do not broadcast; another reduction.
---
---```lua
---local x = peri.zeros { 1, 2 }
---print(nn.functional.triplet_margin_loss(x, x, x, 0.5):item()) --> 0.5
---```
---@param anchor peri.Tensor `[..., D]`.
---@param positive peri.Tensor `[..., D]`.
---@param negative peri.Tensor `[..., D]`.
---@param margin? number By how much the negative should be farther (default: 1).
---@param p? number Which norm (default: 2).
---@param eps? number Of pairwise_distance (default: 1e-6).
---@param reduction? string `"mean"`, `"sum"` or `"none"` (default: mean).
---@return peri.Tensor # A scalar, or with "none" `[...]`.
function functional.triplet_margin_loss(anchor, positive, negative, margin, p, eps, reduction) end

---Minus the number of each row's class. The numbers are logarithms of probabilities, as log_softmax makes them.
---
---Errors: other dimensions; class numbers that t has not; another reduction.
---
---```lua
---local t = peri.tensor({ { 1, 2 } }):log_softmax(2)
---print(("%.4f"):format(nn.functional.nll_loss(t, peri.tensor({ 1 }, "i64")):item())) --> 0.3133
---```
---@param t peri.Tensor `[B, C]`.
---@param labels peri.Tensor `[B]`, i64, from 0.
---@param reduction? string `"mean"`, `"sum"` or `"none"` (default: mean).
---@return peri.Tensor # A scalar, or with "none" `[B]`.
function functional.nll_loss(t, labels, reduction) end

---Divide by the root of the mean of the squares plus eps over the last dimensions; then multiply by the weight.
---
---Errors: a weight whose shape does not broadcast.
---
---```lua
---print(("%.3f"):format(nn.functional.rms_norm(peri.tensor { 3, 4 }):item(1))) --> 1.131
---```
---@param t peri.Tensor `[..., sizes of the last n dimensions]`.
---@param n? integer How many dimensions (default: 1).
---@param weight? peri.Tensor Of the shape of these (default: none).
---@param eps? number Added to the mean (default: 2^-23; of f64 2^-52).
---@return peri.Tensor # Of the shape of t.
function functional.rms_norm(t, n, weight, eps) end

---softmax(scale q k^T + mask) v. A row that sees nothing is 0, as in PyTorch from 2.5 on. For sequences of different
---lengths without padding there is `peri.sparse.jagged_attention`.
---
---Errors: shapes that do not fit.
---
---```lua
---local x = peri.ones { 1, 2, 4 }
---print(nn.functional.scaled_dot_product_attention(x, x, x, nil, true):item(0)) --> 1
---```
---@param q peri.Tensor `[..., n, D]`.
---@param k peri.Tensor `[..., m, D]`.
---@param v peri.Tensor `[..., m, V]`.
---@param attn_mask? peri.Tensor Broadcast to `[..., n, m]`; bool: true may be seen; else it is added (default: none).
---@param is_causal? boolean Row i sees the rows 0..i only (default: false).
---@param scale? number The factor of the products (default: 1 / sqrt(D)).
---@return peri.Tensor # `[..., n, V]`.
function functional.scaled_dot_product_attention(q, k, v, attn_mask, is_causal, scale) end
