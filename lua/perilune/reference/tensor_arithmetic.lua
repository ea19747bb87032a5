-- tensor_arithmetic.lua: Arithmetic of tensors, products, activations.
--
-- What is here is a method of tensors, too, where its first argument is a tensor `t`: `t:relu()` is
-- `peri.nn.functional.relu(t)`. The operators `+ - * / % ^` and unary `-` are `add`, `sub`, `mul`, `div`, `remainder`,
-- `pow` and `neg`. Names and meaning are PyTorch's. All of it is recorded on the gradient tape. Dimensions count from 1
-- (-1 is the last).
--
-- Operands of two dtypes become the later one of: bool, integers (the wider one), floats (f64, else f32, which is also
-- that of f16 beside bf16). A number, or a tensor without dimensions, beside a tensor with some changes its dtype only
-- where it is of a later kind: a fraction makes f32 of integers, a whole number makes i64 of bool.
---@meta

---@class peri.nn.functional
local functional = {}

---Elements below 0 become 0.
---
---Integers keep their dtype.
---
---Errors: bool; complex numbers.
---
---```lua
---print(peri.tensor({ -2 }):relu():item()) --> 0
---```
---@param t peri.Tensor Any shape.
---@return peri.Tensor # Of the shape of t.
function functional.relu(t) end

---`1 / (1 + exp(-x))` of each element.
---
---Of integers and bool it is f32.
---
---Errors: complex numbers.
---
---```lua
---print(peri.tensor({ 0 }):sigmoid():item()) --> 0.5
---```
---@param t peri.Tensor Any shape.
---@return peri.Tensor # Of the shape of t.
function functional.sigmoid(t) end

---The hyperbolic tangent of each element.
---
---Of integers and bool it is f32.
---
---Errors: complex numbers.
---
---```lua
---print(peri.tensor({ 0 }):tanh():item()) --> 0
---```
---@param t peri.Tensor Any shape.
---@return peri.Tensor # Of the shape of t.
function functional.tanh(t) end

---`x * sigmoid(x)` of each element, also called swish.
---
---Errors: dtypes that are no floats.
---
---```lua
---print(peri.tensor({ 0 }):silu():item()) --> 0
---```
---@param t peri.Tensor Any shape.
---@return peri.Tensor # Of the shape of t.
function functional.silu(t) end

---Each element times the normal distribution function of it, without approximation.
---
---Errors: dtypes that are no floats.
---
---```lua
---print(peri.tensor({ 0 }):gelu():item()) --> 0
---```
---@param t peri.Tensor Any shape.
---@return peri.Tensor # Of the shape of t.
function functional.gelu(t) end

---`log(1 + exp(x))` of each element.
---
---Errors: dtypes that are no floats.
---
---```lua
---print(peri.tensor({ -1e4 }):softplus():item()) --> 0
---```
---@param t peri.Tensor Any shape.
---@return peri.Tensor # Of the shape of t.
function functional.softplus(t) end

---`log(sigmoid(x))` of each element.
---
---Errors: dtypes that are no floats.
---
---```lua
---print(peri.tensor({ -500 }):logsigmoid():item()) --> -500
---```
---@param t peri.Tensor Any shape.
---@return peri.Tensor # Of the shape of t.
function functional.logsigmoid(t) end

---e to the power of each element.
---
---Of integers and bool it is f32.
---
---Errors: complex numbers.
---
---```lua
---print(peri.tensor({ 0 }):exp():item()) --> 1
---```
---@param t peri.Tensor Any shape.
---@return peri.Tensor # Of the shape of t.
function functional.exp(t) end

---The natural logarithm of each element; of 0 it is `-inf`, of numbers below NaN.
---
---Of integers and bool it is f32.
---
---Errors: complex numbers.
---
---```lua
---print(peri.tensor({ 1 }):log():item()) --> 0
---```
---@param t peri.Tensor Any shape.
---@return peri.Tensor # Of the shape of t.
function functional.log(t) end

---The square root of each element; of numbers below 0 it is NaN.
---
---Of integers and bool it is f32.
---
---Errors: complex numbers.
---
---```lua
---print(peri.tensor({ 9 }):sqrt():item()) --> 3
---```
---@param t peri.Tensor Any shape.
---@return peri.Tensor # Of the shape of t.
function functional.sqrt(t) end

---Each element without its sign.
---
---Integers keep their dtype.
---
---Errors: bool; complex numbers.
---
---```lua
---print(peri.tensor({ -2 }):abs():item()) --> 2
---```
---@param t peri.Tensor Any shape.
---@return peri.Tensor # Of the shape of t.
function functional.abs(t) end

---The square of each element.
---
---Integers keep their dtype, and wrap around.
---
---Errors: complex numbers.
---
---```lua
---print(peri.tensor({ -3 }):square():item()) --> 9
---```
---@param t peri.Tensor Any shape.
---@return peri.Tensor # Of the shape of t.
function functional.square(t) end

---Each element with the other sign.
---
---Integers keep their dtype.
---
---Errors: bool; complex numbers.
---
---```lua
---print(peri.tensor({ 2 }):neg():item()) --> -2
---```
---@param t peri.Tensor Any shape.
---@return peri.Tensor # Of the shape of t.
function functional.neg(t) end

---Elements below 0 are multiplied by a slope.
---
---Errors: dtypes that are no floats.
---
---```lua
---print(peri.tensor({ -2 }):leaky_relu(0.5):item()) --> -1
---```
---@param t peri.Tensor Any shape.
---@param slope? number The factor (default: 0.01).
---@return peri.Tensor # Of the shape of t.
function functional.leaky_relu(t, slope) end

---`x ^ exponent` of each element; either may be a number.
---
---Integers by whole numbers stay integers, and wrap around; by a tensor of negative ones they become 0 (of 1 and -1:
---1 and -1), by a negative number it is an error. A fraction makes f32 of integers. In a region of autocast it is f32.
---The gradient of the exponent is NaN where the base is negative, and 0 where the base is 0 and the exponent is not
---negative; that of the base is 0 where the exponent is 0.
---
---Errors: bool to the power of bool; integers to the power of a negative number, or of one from 2^53 on; shapes that do
---not broadcast; complex numbers.
---
---```lua
---local x = peri.tensor { 3 }
---print((x ^ 2):item(), x:pow(2):item(), (2 ^ x):item(), (x ^ x):item()) --> 9 9 8 27
---```
---@param t peri.Tensor|number Any shape; 64-bit integers (`5LL`) are numbers.
---@param exponent peri.Tensor|number A tensor of any shape that broadcasts with t, or a number.
---@return peri.Tensor # Of the broadcast shape, and the dtype of both together.
function functional.pow(t, exponent) end

---`scale * x + shift` of each element.
---
---Integers by whole numbers keep their dtype, and wrap around; a fraction makes f32 of them.
---
---Errors: a number that the integers' dtype cannot hold; complex numbers.
---
---```lua
---print(peri.tensor({ 2 }):affine(3, 1):item()) --> 7
---```
---@param t peri.Tensor Any shape.
---@param scale number The factor.
---@param shift? number What is added (default: 0).
---@return peri.Tensor # Of the shape of t.
function functional.affine(t, scale, shift) end

---A number divided by each element.
---
---Of integers and bool it is f32.
---
---Errors: complex numbers.
---
---```lua
---print(peri.tensor({ 2 }):reciprocal():item(), (3 / peri.tensor { 2 }):item()) --> 0.5 1.5
---```
---@param t peri.Tensor Any shape.
---@param numerator? number The number (default: 1).
---@return peri.Tensor # Of the shape of t.
function functional.reciprocal(t, numerator) end

---The sum of both for each element. A dimension of size 1, or one that is missing in front, is repeated.
---
---Integers wrap around; of bool it is "or". Operands of different dtypes: see the head of this page.
---
---Errors: shapes that do not broadcast; a number that the integers' dtype cannot hold; complex numbers.
---
---```lua
---print((peri.tensor { 3 } + 2):item(), peri.tensor({ 3 }):add(peri.tensor { 2 }):item()) --> 5 5
---```
---@param a peri.Tensor|number Any shape; 64-bit integers (`5LL`) are numbers.
---@param b peri.Tensor|number A tensor of any shape that broadcasts with a, or a number.
---@return peri.Tensor # Of the broadcast shape.
function functional.add(a, b) end

---The difference of both for each element. A dimension of size 1, or one that is missing in front, is repeated.
---
---Integers wrap around. Operands of different dtypes: see the head of this page.
---
---Errors: shapes that do not broadcast; a number that the integers' dtype cannot hold; complex numbers; bool - bool.
---
---```lua
---print((peri.tensor { 3 } - 2):item(), peri.tensor({ 3 }):sub(peri.tensor { 2 }):item()) --> 1 1
---```
---@param a peri.Tensor|number Any shape; 64-bit integers (`5LL`) are numbers.
---@param b peri.Tensor|number A tensor of any shape that broadcasts with a, or a number.
---@return peri.Tensor # Of the broadcast shape.
function functional.sub(a, b) end

---The product of both for each element. A dimension of size 1, or one that is missing in front, is repeated.
---
---Integers wrap around; of bool it is "and". Operands of different dtypes: see the head of this page.
---
---Errors: shapes that do not broadcast; a number that the integers' dtype cannot hold; complex numbers.
---
---```lua
---print((peri.tensor { 3 } * 2):item(), peri.tensor({ 3 }):mul(peri.tensor { 2 }):item()) --> 6 6
---```
---@param a peri.Tensor|number Any shape; 64-bit integers (`5LL`) are numbers.
---@param b peri.Tensor|number A tensor of any shape that broadcasts with a, or a number.
---@return peri.Tensor # Of the broadcast shape.
function functional.mul(a, b) end

---The quotient of both for each element. A dimension of size 1, or one that is missing in front, is repeated.
---
---Of integers it is f32, as in Python 3; floor_divide rounds down. Operands of different dtypes: see the head of this
---page.
---
---Errors: shapes that do not broadcast; a number that the integers' dtype cannot hold; complex numbers.
---
---```lua
---print((peri.tensor { 3 } / 2):item(), peri.tensor({ 3 }):div(peri.tensor { 2 }):item())
-----> 1.5 1.5
---```
---@param a peri.Tensor|number Any shape; 64-bit integers (`5LL`) are numbers.
---@param b peri.Tensor|number A tensor of any shape that broadcasts with a, or a number.
---@return peri.Tensor # Of the broadcast shape.
function functional.div(a, b) end

---`a / b` rounded down: -7 by 2 is -4.
---
---Integers stay integers: a divisor of 0 is an error, and where b is a tensor this waits for it, to look for one. A
---fraction makes f32 of integers. Floats are divided as IEEE 754 says (by 0: NaN or infinite).
---
---Errors: bool alone; integers by 0; shapes that do not broadcast; complex numbers.
---
---```lua
---print(peri.tensor({ -7 }, "i64"):floor_divide(2):item()) --> -4
---```
---@param a peri.Tensor|number Any shape; 64-bit integers (`5LL`) are numbers.
---@param b peri.Tensor|number A tensor of any shape that broadcasts with a, or a number.
---@return peri.Tensor # Of the broadcast shape, and the dtype of both together; it has no gradient.
function functional.floor_divide(a, b) end

---`a - b * floor_divide(a, b)`, which has the sign of b: -7 and 3 give 2. `a % b` is the same.
---
---Integers stay integers: a divisor of 0 is an error, and where b is a tensor this waits for it, to look for one. A
---fraction makes f32 of integers. Floats are divided as IEEE 754 says (by 0: NaN).
---
---Errors: bool alone; integers by 0; shapes that do not broadcast; complex numbers.
---
---```lua
---print((peri.tensor { -7.5 } % 3):item(), peri.tensor({ -7 }, "i64"):remainder(3):item())
-----> 1.5 2
---```
---@param a peri.Tensor|number Any shape; 64-bit integers (`5LL`) are numbers.
---@param b peri.Tensor|number A tensor of any shape that broadcasts with a, or a number.
---@return peri.Tensor # Of the broadcast shape, and the dtype of both together.
function functional.remainder(a, b) end

---What is left of `a / b` rounded towards 0, which has the sign of a: -7 and 3 give -1.
---
---Integers stay integers: a divisor of 0 is an error, and where b is a tensor this waits for it, to look for one. A
---fraction makes f32 of integers. Floats are divided as IEEE 754 says (by 0: NaN).
---
---Errors: bool alone; integers by 0; shapes that do not broadcast; complex numbers.
---
---```lua
---print(peri.tensor({ -7.5 }):fmod(3):item()) --> -1.5
---```
---@param a peri.Tensor|number Any shape; 64-bit integers (`5LL`) are numbers.
---@param b peri.Tensor|number A tensor of any shape that broadcasts with a, or a number.
---@return peri.Tensor # Of the broadcast shape, and the dtype of both together.
function functional.fmod(a, b) end

---`a * b + c` of each element, in one operation.
---
---Errors: shapes or dtypes that differ.
---
---```lua
---local x = peri.tensor { 2 }
---print(nn.functional.muladd(x, x, x):item()) --> 6
---```
---@param a peri.Tensor Any shape.
---@param b peri.Tensor The same shape.
---@param c peri.Tensor The same shape.
---@return peri.Tensor # The same shape.
function functional.muladd(a, b, c) end

---The matrix product of the last two dimensions. Leading dimensions broadcast; a tensor of one dimension is a row on
---the left and a column on the right. Integers wrap around, and are slower.
---
---Errors: sizes that do not fit; dtypes that differ; bool and complex numbers.
---
---```lua
---print(peri.ones({ 2, 3 }):matmul(peri.ones { 3, 4 }):item(0)) --> 3
---```
---@param a peri.Tensor `[..., m, k]` or `[k]`.
---@param b peri.Tensor `[..., k, n]` or `[k]`.
---@return peri.Tensor # `[..., m, n]`; a dimension of a vector is left out.
function functional.matmul(a, b) end

---The matrix products of two batches of matrices.
---
---Errors: tensors without three dimensions; sizes that do not fit.
---
---```lua
---print(peri.ones({ 5, 2, 3 }):bmm(peri.ones { 5, 3, 4 }):size(3)) --> 4
---```
---@param a peri.Tensor `[B, m, k]`.
---@param b peri.Tensor `[B, k, n]`.
---@return peri.Tensor # `[B, m, n]`.
function functional.bmm(a, b) end

---A fully connected layer: `x W^T + b`, and an activation with it in one operation.
---
---Errors: sizes that do not fit; dtypes that differ, or are no floats.
---
---```lua
---local f = nn.functional
---print(f.linear(peri.ones { 1, 2 }, peri.tensor { { 1, -5 } }, peri.ones { 1 },
---  f.activations.relu):item())
-----> 0
---```
---@param x peri.Tensor `[..., in]`.
---@param weight peri.Tensor `[out, in]`.
---@param bias? peri.Tensor `[out]` (default: none).
---@param activation? integer One of `activations`: none, relu, sigmoid, tanh (default: none).
---@return peri.Tensor # `[..., out]`.
function functional.linear(x, weight, bias, activation) end

---The sum of elements.
---
---Errors: a dimension that t does not have.
---
---```lua
---print(peri.ones({ 2, 3 }):sum():item(), peri.ones({ 2, 3 }):sum(2):size(1)) --> 6 2
---```
---@param t peri.Tensor Any shape.
---@param dim? integer|integer[] One dimension or several (default: all of them).
---@param keepdim? boolean Whether they stay, with size 1 (default: false).
---@return peri.Tensor # Of the shape of t without these dimensions.
function functional.sum(t, dim, keepdim) end

---The product of elements.
---
---Of integers and bool it is i64, which wraps around. The product of nothing is 1. Gradients are right where elements
---are 0.
---
---Errors: a dimension that t does not have; complex numbers.
---
---```lua
---print(peri.tensor({ 2, 3, 4 }):prod():item()) --> 24
---```
---@param t peri.Tensor Any shape.
---@param dim? integer One dimension (default: all of them).
---@param keepdim? boolean Whether it stays, with size 1 (default: false).
---@return peri.Tensor # Of the shape of t without this dimension.
function functional.prod(t, dim, keepdim) end

---The mean of elements.
---
---Errors: a dimension that t does not have; dtypes that are no floats.
---
---```lua
---print(peri.tensor({ 1, 3 }):mean():item()) --> 2
---```
---@param t peri.Tensor Any shape.
---@param dim? integer|integer[] One dimension or several (default: all of them).
---@param keepdim? boolean Whether they stay, with size 1 (default: false).
---@return peri.Tensor # Of the shape of t without these dimensions.
function functional.mean(t, dim, keepdim) end

---`exp(x)` divided by its sum over one dimension.
---
---Errors: a dimension that t does not have; dtypes that are no floats.
---
---```lua
---print(peri.zeros({ 2, 4 }):softmax(2):item(0)) --> 0.25
---```
---@param t peri.Tensor Any shape.
---@param dim integer The dimension.
---@return peri.Tensor # Of the shape of t.
function functional.softmax(t, dim) end

---The logarithm of `softmax`, computed without the loss of small numbers.
---
---Errors: a dimension that t does not have; dtypes that are no floats.
---
---```lua
---print(peri.zeros({ 1 }):log_softmax(1):item()) --> 0
---```
---@param t peri.Tensor Any shape.
---@param dim integer The dimension.
---@return peri.Tensor # Of the shape of t.
function functional.log_softmax(t, dim) end

---Cut a tensor along a dimension into views of the given sizes, or of one size, where the last may be smaller. Their
---gradients become that of t at once, so this is faster than a slice for each.
---
---Errors: sizes that do not add up to the dimension's; a size of 0 for all.
---
---```lua
---print(#peri.ones({ 5, 2 }):split({ 2, 3 }), peri.ones({ 5, 2 }):split({ 2, 3 })[2]:size(1))
-----> 2 3
---```
---@param t peri.Tensor Any shape.
---@param sizes integer|integer[] Sizes of the parts, or the one of all.
---@param dim? integer The dimension (default: 1).
---@return peri.Tensor[] # Parts, each of its size in that dimension: `[..., size, ...]`.
function functional.split(t, sizes, dim) end
