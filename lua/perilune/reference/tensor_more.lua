-- tensor_more.lua: Functions of tensors: logarithms, gates, pairs of results, likelihoods.
--
-- What is here is a method of tensors, too, where its first argument is a tensor `t`, but for losses: `t:log2()` is
-- `peri.nn.functional.log2(t)`. Names and meaning are PyTorch's. Dimensions count from 1 (-1 is the last).
---@meta

---@class peri.nn.functional
local functional = {}

---The logarithm to base 2. Powers of 2 have exact whole numbers. Integers become f32.
---
---Errors: complex numbers.
---
---```lua
---print(peri.tensor({ 8 }):log2():item()) --> 3
---```
---@param t peri.Tensor The numbers: any shape.
---@return peri.Tensor # Of the shape of t.
function functional.log2(t) end

---The logarithm to base 10. Powers of 10 have whole numbers. Integers become f32.
---
---Errors: complex numbers.
---
---```lua
---print(peri.tensor({ 1000 }):log10():item()) --> 3
---```
---@param t peri.Tensor The numbers: any shape.
---@return peri.Tensor # Of the shape of t.
function functional.log10(t) end

---2 to the power of t. Integers become f32.
---
---Errors: complex numbers.
---
---```lua
---print(peri.tensor({ 10 }):exp2():item()) --> 1024
---```
---@param t peri.Tensor The numbers: any shape.
---@return peri.Tensor # Of the shape of t.
function functional.exp2(t) end

---A gated linear unit: the first half of t along a dimension times the sigmoid of the second half.
---
---Errors: an odd size.
---
---```lua
---print(peri.tensor({ 4, 0 }):glu():item()) --> 2
---```
---@param t peri.Tensor The numbers: any shape.
---@param dim? integer The dimension that is cut into halves (default: -1).
---@return peri.Tensor # The shape of t with half of the size in the dimension.
function functional.glu(t, dim) end

---1.0507 times t where it is above 0, else 1.0507 times 1.6733 (exp(t) - 1).
---
---Errors: complex numbers.
---
---```lua
---print(("%.4f"):format(peri.tensor({ 1 }):selu():item())) --> 1.0507
---```
---@param t peri.Tensor The numbers: any shape.
---@return peri.Tensor # Of the shape of t.
function functional.selu(t) end

---t times the tanh of softplus(t).
---
---Errors: complex numbers.
---
---```lua
---print(("%.4f"):format(peri.tensor({ 1 }):mish():item())) --> 0.8651
---```
---@param t peri.Tensor The numbers: any shape.
---@return peri.Tensor # Of the shape of t.
function functional.mish(t) end

---t + value times a times b.
---
---Errors: shapes that do not broadcast.
---
---```lua
---local t = peri.ones { 2 }
---print(t:addcmul(t, t, 3):item(0)) --> 4
---```
---@param t peri.Tensor The numbers: any shape.
---@param a peri.Tensor A factor, of a shape that broadcasts.
---@param b peri.Tensor The other one, of a shape that broadcasts.
---@param value? number A number that the product is multiplied by (default: 1).
---@return peri.Tensor # The broadcast shape.
function functional.addcmul(t, a, b, value) end

---log(exp(a) + exp(b)), also where the exponentials would be infinite.
---
---Errors: shapes that do not broadcast; integers.
---
---```lua
---print(("%.4f"):format(peri.zeros({ 1 }):logaddexp(peri.zeros { 1 }):item())) --> 0.6931
---```
---@param a peri.Tensor Floats: any shape.
---@param b peri.Tensor Floats, of a shape that broadcasts.
---@return peri.Tensor # The broadcast shape.
function functional.logaddexp(a, b) end

---The smallest and the largest element.
---
---Errors: a dimension without elements; complex numbers.
---
---```lua
---local least, most = peri.tensor({ 3, 1, 2 }):aminmax()
---print(least:item(), most:item()) --> 1 3
---```
---@param t peri.Tensor The numbers: any shape.
---@param dim? integer|integer[] A dimension, or a list of them (default: all).
---@param keepdim? boolean Leave the dimensions with size 1 (default: false).
---@return peri.Tensor # The smallest: the shape of t without the dimensions.
---@return peri.Tensor # The largest: of the same shape.
function functional.aminmax(t, dim, keepdim) end

---The standard deviation, as `std` has it, and the mean.
---
---Errors: integers.
---
---```lua
---local deviation, mean = peri.tensor({ 1, 3 }):std_mean(1, false, 0)
---print(deviation:item(), mean:item()) --> 1 2
---```
---@param t peri.Tensor The numbers: any shape.
---@param dim? integer|integer[] A dimension, or a list of them (default: all).
---@param keepdim? boolean Leave the dimensions with size 1 (default: false).
---@param correction? number What is subtracted from the number of elements (default: 1).
---@return peri.Tensor # The deviation: the shape of t without the dimensions.
---@return peri.Tensor # The mean: of the same shape.
function functional.std_mean(t, dim, keepdim, correction) end

---The variance, as `var` has it, and the mean.
---
---Errors: integers.
---
---```lua
---local variance, mean = peri.tensor({ 1, 3 }):var_mean(1, false, 0)
---print(variance:item(), mean:item()) --> 1 2
---```
---@param t peri.Tensor The numbers: any shape.
---@param dim? integer|integer[] A dimension, or a list of them (default: all).
---@param keepdim? boolean Leave the dimensions with size 1 (default: false).
---@param correction? number What is subtracted from the number of elements (default: 1).
---@return peri.Tensor # The variance: the shape of t without the dimensions.
---@return peri.Tensor # The mean: of the same shape.
function functional.var_mean(t, dim, keepdim, correction) end

---The loss of predicted means of counts: minus the logarithm of the probability that a Poisson distribution of that
---mean has for the count that came.
---
---Errors: another shape of target; an unknown reduction.
---
---```lua
---local t = peri.zeros { 1 } -- the mean is exp(0)
---print(peri.nn.functional.poisson_nll_loss(t, peri.ones { 1 }):item()) --> 1
---```
---@param t peri.Tensor The logarithm of the mean, or with log_input false the mean: any shape.
---@param target peri.Tensor Counts, of the same shape.
---@param log_input? boolean t is the logarithm of the mean (default: true).
---@param full? boolean With the term that depends on the target alone, by Stirling's formula (default: false).
---@param eps? number Added to t within the logarithm, where log_input is false (default: 1e-8).
---@param reduction? string "mean", "sum" or "none" (default: "mean").
---@return peri.Tensor # A scalar, or with "none" the shape of t.
function functional.poisson_nll_loss(t, target, log_input, full, eps, reduction) end

---The loss of predicted means and variances: minus the logarithm of the density that a normal distribution has at
---target. Waits for var, to check it. What is below eps has no gradient (in PyTorch it has that of eps).
---
---Errors: another shape of target or var; a negative variance; an unknown reduction.
---
---```lua
---local t = peri.ones { 1 }
---print(peri.nn.functional.gaussian_nll_loss(t, t * 3, t):item()) --> 2
---```
---@param t peri.Tensor Means: any shape.
---@param target peri.Tensor What came, of the same shape.
---@param var peri.Tensor Variances, of the same shape, or with a last size of 1.
---@param full? boolean With the constant log(2 pi) / 2 (default: false).
---@param eps? number The least variance (default: 1e-6).
---@param reduction? string "mean", "sum" or "none" (default: "mean").
---@return peri.Tensor # A scalar, or with "none" the shape of t.
function functional.gaussian_nll_loss(t, target, var, full, eps, reduction) end
