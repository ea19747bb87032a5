-- tensor_counts.lua: Functions of tensors: distinct elements, counts, quantiles.
--
-- What is here is a method of tensors, too, where its first argument is a tensor `t`: `t:median()` is
-- `peri.nn.functional.median(t)`. Names and meaning are PyTorch's. Dimensions count from 1 (-1 is the last), elements
-- from 0.
---@meta

---@class peri.nn.functional
local functional = {}

---Where elements go among sorted ones: how many of those are smaller.
---
---Errors: lines that do not fit; complex numbers.
---
---```lua
---print(nn.functional.searchsorted(peri.tensor { 1, 3, 5 }, peri.tensor { 3 }):item()) --> 1
---```
---@param sorted peri.Tensor `[n]`, or all sizes of t but the last, then n; rising along the last dimension.
---@param t peri.Tensor The numbers: any shape.
---@param right? boolean Count those that are not larger (default: false).
---@return peri.Tensor # Of the shape of t, i64.
function functional.searchsorted(sorted, t, right) end

---The number of the bucket of each element: `searchsorted(boundaries, t, right)`.
---
---Errors: complex numbers.
---
---```lua
---print(peri.tensor({ 0.5 }):bucketize(peri.tensor { 0, 1, 2 }):item()) --> 1
---```
---@param t peri.Tensor The numbers: any shape.
---@param boundaries peri.Tensor `[n]`, rising.
---@param right? boolean Whether a boundary belongs to the bucket above it (default: false).
---@return peri.Tensor # Of the shape of t, i64.
function functional.bucketize(t, boundaries, right) end

---The distinct elements in rising order. Each NaN is one of its own. Waits. Nothing has a gradient.
---
---Errors: complex numbers.
---
---```lua
---local values, inverse, counts = peri.tensor({ 3, 1, 3 }, "i64"):unique(true, true)
---print(values:item(1), inverse:item(2), counts:item(1)) --> 3 1 2
---```
---@param t peri.Tensor The numbers: any shape.
---@param return_inverse? boolean Whether the second result is wanted (default: false).
---@param return_counts? boolean Whether the third one is (default: false).
---@return peri.Tensor # `[n]`, of t's dtype.
---@return peri.Tensor|nil # For each element its number among them: of the shape of t, i64; nil if not wanted.
---@return peri.Tensor|nil # How often each is there: `[n]`, i64; nil if not wanted.
function functional.unique(t, return_inverse, return_counts) end

---How often each number 0, 1, ... is there. Waits.
---
---Errors: a number that is negative, no whole one, or from 2^40 on; other than one dimension.
---
---```lua
---print(peri.tensor({ 2, 0, 2 }, "i64"):bincount():item(2)) --> 2
---```
---@param t peri.Tensor `[n]`, integers.
---@param weights? peri.Tensor `[n]`, f32 or f64: add these up (default: count).
---@param minlength? integer At least so many results (default: 0).
---@return peri.Tensor # `[largest number + 1]`: i64, or the weights' dtype.
function functional.bincount(t, weights, minlength) end

---How many elements fall into each of some intervals of one width. Those outside do not count. Waits.
---
---Errors: bounds that are not finite or do not rise.
---
---```lua
---print(peri.tensor({ 0, 1, 1 }):histc(2):item(1)) --> 2
---```
---@param t peri.Tensor The numbers: any shape.
---@param bins? integer How many intervals (default: 100).
---@param min? number Where the first begins (default: 0; with max 0, too, the smallest element).
---@param max? number Where the last ends; it belongs to it (default: 0; with min 0, too, the largest element).
---@return peri.Tensor # `[bins]`, of t's dtype.
function functional.histc(t, bins, min, max) end

---How many elements over dimensions are not 0.
---
---Errors: complex numbers.
---
---```lua
---print(peri.tensor({ 0, 5, 7 }):count_nonzero():item()) --> 2
---```
---@param t peri.Tensor The numbers: any shape.
---@param dim? integer|integer[] A dimension, or a list of them (default: all).
---@return peri.Tensor # The shape of t without the dimensions, i64.
function functional.count_nonzero(t, dim) end

---Whether each element is among those of another tensor.
---
---Errors: complex numbers.
---
---```lua
---print(peri.tensor({ 1, 2 }):isin(peri.tensor { 2, 3 }):item(1)) --> 1
---```
---@param t peri.Tensor The numbers: any shape.
---@param tests peri.Tensor Any shape.
---@return peri.Tensor # Of the shape of t, bool.
function functional.isin(t, tests) end

---The k-th smallest element along a dimension, and its place.
---
---Errors: k outside of 1..size.
---
---```lua
---print((peri.tensor({ 3, 1, 2 }):kthvalue(2)):item()) --> 2
---```
---@param t peri.Tensor The numbers: any shape.
---@param k integer Which, from 1.
---@param dim? integer The dimension (default: -1, the last one).
---@param keepdim? boolean Leave it with size 1 (default: false).
---@return peri.Tensor # The shape of t without the dimension.
---@return peri.Tensor # Places: of the same shape, i64.
function functional.kthvalue(t, k, dim, keepdim) end

---The middle element; of two the smaller one; NaN if there is one. Without a dimension there is one result.
---
---Errors: no elements.
---
---```lua
---print(peri.tensor({ 3, 1, 2 }):median():item()) --> 2
---```
---@param t peri.Tensor The numbers: any shape.
---@param dim? integer The dimension (default: all).
---@param keepdim? boolean Leave it with size 1 (default: false).
---@return peri.Tensor # The shape of t without the dimension, or a scalar.
---@return peri.Tensor|nil # Along a dimension: places, of the same shape, i64.
function functional.median(t, dim, keepdim) end

---The element that is there most often, of several the smallest, and its last place.
---
---Errors: no elements.
---
---```lua
---print((peri.tensor({ 3, 1, 2, 1 }):mode()):item()) --> 1
---```
---@param t peri.Tensor The numbers: any shape.
---@param dim? integer The dimension (default: -1, the last one).
---@param keepdim? boolean Leave it with size 1 (default: false).
---@return peri.Tensor # The shape of t without the dimension.
---@return peri.Tensor # Places: of the same shape, i64.
function functional.mode(t, dim, keepdim) end

---What a share of the elements lies below; between two elements in proportion. NaN if there is one.
---
---Errors: a share outside of 0..1; dtypes that are no floats; no elements.
---
---```lua
---print(peri.tensor({ 1, 2, 3, 4 }):quantile(0.5):item()) --> 2.5
---```
---@param t peri.Tensor The numbers: any shape.
---@param q number|number[] The share, or a list of them.
---@param dim? integer The dimension (default: all).
---@param keepdim? boolean Leave it with size 1 (default: false).
---@return peri.Tensor # The shape of t without the dimension; of a list one dimension more in front.
function functional.quantile(t, q, dim, keepdim) end
