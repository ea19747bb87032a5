-- tensor_making.lua: Functions of tensors: making them, and drawing by chance.
--
-- What is here is a method of tensors, too, where its first argument is a tensor `t`: `t:bernoulli()` is
-- `peri.nn.functional.bernoulli(t)`. Names and meaning are PyTorch's. Dimensions count from 1 (-1 is the last),
-- elements from 0.
---@meta

---@class peri.nn.functional
local functional = {}

---@class peri.Tensor
local Tensor = {}

---Numbers at equal distances, both ends included. Everyday name: `peri.linspace`.
---
---Errors: dtypes other than f32 and f64.
---
---```lua
---print(peri.linspace(0, 1, 5):item(1)) --> 0.25
---```
---@param start number The first one.
---@param stop number The last one.
---@param steps integer How many.
---@param dtype? string The dtype (default: f32).
---@param device? string The device (default: that of the rank).
---@return peri.Tensor # `[steps]`.
function Tensor.linspace(start, stop, steps, dtype, device) end

---Ones on the diagonal, zeros elsewhere. Everyday name: `peri.eye`.
---
---Errors: sizes below 0.
---
---```lua
---print(table.concat(peri.eye(2):to_list(), " ")) --> 1 0 0 1
---```
---@param rows integer Rows.
---@param columns? integer Columns (default: as many as rows).
---@param dtype? string The dtype (default: f32).
---@param device? string The device (default: that of the rank).
---@return peri.Tensor # `[rows, columns]`.
function Tensor.eye(rows, columns, dtype, device) end

---The places of a matrix on its diagonal and above it, row by row: pairs of features, with `k = 1`. Everyday
---name: `peri.triu_indices`.
---
---Errors: sizes below 0.
---
---```lua
---local pairs_ = peri.triu_indices(3, 3, 1)
---print(table.concat(pairs_:to_list(), " ")) --> 0 0 1 1 2 2
---```
---@param rows integer Rows.
---@param columns? integer Columns (default: as many as rows).
---@param k? integer The diagonal, so many places right of the main one; negative: left (default: 0).
---@param device? string The device (default: that of the rank).
---@return peri.Tensor # Rows and columns, from 0: i64 `[2, number of places]`.
function Tensor.triu_indices(rows, columns, k, device) end

---The places of a matrix on its diagonal and below it, row by row. Everyday name: `peri.tril_indices`.
---
---Errors: sizes below 0.
---
---```lua
---print(peri.tril_indices(3):size(2)) --> 6
---```
---@param rows integer Rows.
---@param columns? integer Columns (default: as many as rows).
---@param k? integer The diagonal, so many places right of the main one; negative: left (default: 0).
---@param device? string The device (default: that of the rank).
---@return peri.Tensor # Rows and columns, from 0: i64 `[2, number of places]`.
function Tensor.tril_indices(rows, columns, k, device) end

---Memory of another tensor's shape, whose numbers are not set. Everyday name: `peri.empty_like`.
---
---Errors: memory that is not there.
---
---```lua
---print(peri.empty_like(peri.ones { 2, 3 }):numel()) --> 6
---```
---@param t peri.Tensor The numbers: any shape.
---@param dtype? string The dtype (default: that of t).
---@return peri.Tensor # Of the shape of t, on its device.
function Tensor.empty_like(t, dtype) end

---One number in another tensor's shape. Everyday name: `peri.full_like`.
---
---Errors: numbers that the dtype cannot hold.
---
---```lua
---print(peri.full_like(peri.ones { 2 }, 7):item(0)) --> 7
---```
---@param t peri.Tensor The numbers: any shape.
---@param value number The number.
---@param dtype? string The dtype (default: that of t).
---@return peri.Tensor # Of the shape of t, on its device.
function Tensor.full_like(t, value, dtype) end

---Zeros in another tensor's shape. Everyday name: `peri.zeros_like`.
---
---Errors: numbers that the dtype cannot hold.
---
---```lua
---print(peri.zeros_like(peri.ones { 2, 3 }):size(2)) --> 3
---```
---@param t peri.Tensor The numbers: any shape.
---@param dtype? string The dtype (default: that of t).
---@return peri.Tensor # Of the shape of t, on its device.
function Tensor.zeros_like(t, dtype) end

---Ones in another tensor's shape. Everyday name: `peri.ones_like`.
---
---Errors: numbers that the dtype cannot hold.
---
---```lua
---print(peri.ones_like(peri.ones { 2, 3 }):size(2)) --> 3
---```
---@param t peri.Tensor The numbers: any shape.
---@param dtype? string The dtype (default: that of t).
---@return peri.Tensor # Of the shape of t, on its device.
function Tensor.ones_like(t, dtype) end

---Uniform numbers in [0, 1) in another tensor's shape, as `rand` draws them. Everyday name: `peri.rand_like`.
---
---Errors: numbers that the dtype cannot hold.
---
---```lua
---print(peri.rand_like(peri.ones { 2, 3 }):size(2)) --> 3
---```
---@param t peri.Tensor The numbers: any shape.
---@param dtype? string The dtype (default: that of t).
---@return peri.Tensor # Of the shape of t, on its device.
function Tensor.rand_like(t, dtype) end

---Normal numbers in another tensor's shape, as `randn` draws them. Everyday name: `peri.randn_like`.
---
---Errors: numbers that the dtype cannot hold.
---
---```lua
---print(peri.randn_like(peri.ones { 2, 3 }):size(2)) --> 3
---```
---@param t peri.Tensor The numbers: any shape.
---@param dtype? string The dtype (default: that of t).
---@return peri.Tensor # Of the shape of t, on its device.
function Tensor.randn_like(t, dtype) end

---Whole numbers by chance, each as likely as the others. Everyday name: `peri.randint`. The n-th call after
---`nn.manual_seed(s)` is a function of s and n, as of `rand`.
---
---Errors: no number between low and high, or more than 2^53.
---
---```lua
---print(peri.randint(0, 1, { 2 }):item(0)) --> 0
---```
---@param low integer The smallest.
---@param high integer What all are below.
---@param shape integer[] Sizes.
---@param dtype? string The dtype (default: i64).
---@param device? string The device (default: that of the rank).
---@return peri.Tensor # Of that shape.
function Tensor.randint(low, high, shape, dtype, device) end

---The numbers 0 .. n - 1 in an order by chance. Everyday name: `peri.randperm`.
---
---Errors: n below 0.
---
---```lua
---print(peri.randperm(5):sum():item()) --> 10
---```
---@param n integer How many.
---@param device? string The device (default: that of the rank).
---@return peri.Tensor # `[n]`, i64.
function Tensor.randperm(n, device) end

---1 with the probability that t has at a place, else 0. Waits for the probabilities, to check them.
---
---Errors: probabilities outside of 0..1; complex numbers.
---
---```lua
---print(peri.ones({ 1 }):bernoulli():item()) --> 1
---```
---@param t peri.Tensor Probabilities: any shape.
---@return peri.Tensor # Of the shape of t.
function functional.bernoulli(t) end

---Columns drawn with probabilities in proportion to weights. Waits for the weights, to check them.
---
---Errors: weights that are negative or not finite; without replacement fewer of them above 0 than are drawn.
---
---```lua
---print(peri.tensor({ 0, 1, 0 }):multinomial(1):item()) --> 1
---```
---@param t peri.Tensor Weights: `[columns]` or `[rows, columns]`.
---@param n integer How many are drawn of each row.
---@param replacement? boolean Whether a column may come again (default: false).
---@return peri.Tensor # `[n]` or `[rows, n]`, i64.
function functional.multinomial(t, n, replacement) end

---softmax((t + noise) / tau) with noise of the Gumbel distribution: the largest element of each line is each one with
---its probability under softmax(t).
---
---Errors: tau that is not above 0.
---
---```lua
---print(peri.zeros({ 4 }):gumbel_softmax(1, true):sum():item()) --> 1
---```
---@param t peri.Tensor The numbers: any shape.
---@param tau? number The temperature (default: 1).
---@param hard? boolean 1 for the largest and 0 for the others, with the gradient of the soft one (default: false).
---@param dim? integer The dimension (default: -1, the last one).
---@return peri.Tensor # Of the shape of t.
function functional.gumbel_softmax(t, tau, hard, dim) end
