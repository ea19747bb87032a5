-- tensor_functions.lua: Functions of tensors: comparing, choosing, picking, sorting.
--
-- What is here is a method of tensors, too, where its first argument is a tensor `t`: `t:topk(2)` is
-- `peri.nn.functional.topk(t, 2)`. Names and meaning are PyTorch's. Dimensions count from 1 (-1 is the last), elements
-- from 0.
---@meta

---@class peri.nn.functional
local functional = {}

---Where an element is equal to `x`: a bool tensor. With a NaN only `ne` is true.
---
---Errors: shapes that do not broadcast; complex numbers.
---
---```lua
---print(table.concat(peri.tensor({ 1, 2, 3 }):eq(2):to_list(), " ")) --> 0 1 0
---```
---@param t peri.Tensor The numbers: any shape.
---@param x peri.Tensor|number A tensor of any shape that broadcasts with t, or a number (of i64 from 2^53 on: with LL).
---@return peri.Tensor # Of the broadcast shape, bool.
function functional.eq(t, x) end

---Where an element is different from `x`: a bool tensor. With a NaN only `ne` is true.
---
---Errors: shapes that do not broadcast; complex numbers.
---
---```lua
---print(table.concat(peri.tensor({ 1, 2, 3 }):ne(2):to_list(), " ")) --> 1 0 1
---```
---@param t peri.Tensor The numbers: any shape.
---@param x peri.Tensor|number A tensor of any shape that broadcasts with t, or a number (of i64 from 2^53 on: with LL).
---@return peri.Tensor # Of the broadcast shape, bool.
function functional.ne(t, x) end

---Where an element is smaller than `x`: a bool tensor. With a NaN only `ne` is true.
---
---Errors: shapes that do not broadcast; complex numbers.
---
---```lua
---print(table.concat(peri.tensor({ 1, 2, 3 }):lt(2):to_list(), " ")) --> 1 0 0
---```
---@param t peri.Tensor The numbers: any shape.
---@param x peri.Tensor|number A tensor of any shape that broadcasts with t, or a number (of i64 from 2^53 on: with LL).
---@return peri.Tensor # Of the broadcast shape, bool.
function functional.lt(t, x) end

---Where an element is smaller than, or equal to, `x`: a bool tensor. With a NaN only `ne` is true.
---
---Errors: shapes that do not broadcast; complex numbers.
---
---```lua
---print(table.concat(peri.tensor({ 1, 2, 3 }):le(2):to_list(), " ")) --> 1 1 0
---```
---@param t peri.Tensor The numbers: any shape.
---@param x peri.Tensor|number A tensor of any shape that broadcasts with t, or a number (of i64 from 2^53 on: with LL).
---@return peri.Tensor # Of the broadcast shape, bool.
function functional.le(t, x) end

---Where an element is larger than `x`: a bool tensor. With a NaN only `ne` is true.
---
---Errors: shapes that do not broadcast; complex numbers.
---
---```lua
---print(table.concat(peri.tensor({ 1, 2, 3 }):gt(2):to_list(), " ")) --> 0 0 1
---```
---@param t peri.Tensor The numbers: any shape.
---@param x peri.Tensor|number A tensor of any shape that broadcasts with t, or a number (of i64 from 2^53 on: with LL).
---@return peri.Tensor # Of the broadcast shape, bool.
function functional.gt(t, x) end

---Where an element is larger than, or equal to, `x`: a bool tensor. With a NaN only `ne` is true.
---
---Errors: shapes that do not broadcast; complex numbers.
---
---```lua
---print(table.concat(peri.tensor({ 1, 2, 3 }):ge(2):to_list(), " ")) --> 0 1 1
---```
---@param t peri.Tensor The numbers: any shape.
---@param x peri.Tensor|number A tensor of any shape that broadcasts with t, or a number (of i64 from 2^53 on: with LL).
---@return peri.Tensor # Of the broadcast shape, bool.
function functional.ge(t, x) end

---Where an element is NaN: a bool tensor.
---
---Errors: complex numbers.
---
---```lua
---print(peri.tensor({ 1, 0 / 0 }):isnan():to_list()[2]) --> 1
---```
---@param t peri.Tensor The numbers: any shape.
---@return peri.Tensor # Of the shape of t, bool.
function functional.isnan(t) end

---Where an element is neither NaN nor an infinity: a bool tensor.
---
---Errors: dtypes that are no floats.
---
---```lua
---print(table.concat(peri.tensor({ 1, math.huge }):isfinite():to_list(), " ")) --> 1 0
---```
---@param t peri.Tensor The numbers: any shape.
---@return peri.Tensor # Of the shape of t, bool.
function functional.isfinite(t) end

---Elements of `a` where the condition is true, else of `b`. Gradients go to the ones that were chosen.
---
---Operands of two dtypes become one, as in add; two numbers are f32 (i64 if one is written with LL).
---
---Errors: a condition that is not bool.
---
---```lua
---local t = peri.tensor { 1, -2, 3 }
---print(table.concat(peri.nn.functional.where(t:gt(0), t, 0):to_list(), " ")) --> 1 0 3
---```
---@param condition peri.Tensor bool, of any shape; all three broadcast.
---@param a peri.Tensor|number Any shape.
---@param b peri.Tensor|number Any shape.
---@return peri.Tensor # Of the broadcast shape.
function functional.where(condition, a, b) end

---t with a number where the mask is true.
---
---Errors: a mask that is not bool; a number that the dtype cannot hold.
---
---```lua
---local t = peri.tensor { 1, -2, 3 }
---print(table.concat(t:masked_fill(t:lt(0), 9):to_list(), " ")) --> 1 9 3
---```
---@param t peri.Tensor The numbers: any shape.
---@param mask peri.Tensor bool, of a shape that broadcasts with that of t.
---@param value number The number.
---@return peri.Tensor # Of the broadcast shape.
function functional.masked_fill(t, mask, value) end

---t with what is below `min` raised to it, and then what is above `max` lowered to it. NaN stays. Elements at a bound
---or beyond it get no gradient.
---
---Integers by whole bounds keep their dtype; a fraction makes f32 of them. A bound that is NaN makes all floats NaN.
---
---Errors: neither bound; NaN as a bound of integers; complex numbers.
---
---```lua
---print(table.concat(peri.tensor({ -1, 0.5, 7 }):clamp(0, 1):to_list(), " ")) --> 0 0.5 1
---```
---@param t peri.Tensor The numbers: any shape.
---@param min? number|integer The least number, which may be a 64-bit integer (default: none).
---@param max? number|integer The largest number, as min (default: none).
---@return peri.Tensor # Of the shape of t.
function functional.clamp(t, min, max) end

---The larger of both for each element, NaN if either is. Equal ones get half of the gradient each.
---
---Errors: shapes that do not broadcast; complex numbers.
---
---```lua
---print(table.concat(peri.tensor({ 1, 5 }):maximum(peri.tensor { 2, 2 }):to_list(), " ")) --> 2 5
---```
---@param a peri.Tensor Any shape.
---@param b peri.Tensor A shape that broadcasts with that of a.
---@return peri.Tensor # Of the broadcast shape.
function functional.maximum(a, b) end

---The smaller of both for each element, NaN if either is. Equal ones get half of the gradient each.
---
---Errors: shapes that do not broadcast; complex numbers.
---
---```lua
---print(table.concat(peri.tensor({ 1, 5 }):minimum(peri.tensor { 2, 2 }):to_list(), " ")) --> 1 2
---```
---@param a peri.Tensor Any shape.
---@param b peri.Tensor A shape that broadcasts with that of a.
---@return peri.Tensor # Of the broadcast shape.
function functional.minimum(a, b) end

---A copy in memory of its own, contiguous, through which gradients go.
---
---Errors: memory that there is not.
---
---```lua
---local t = peri.tensor { 1, 2 }
---local u = t:clone()
---t:fill(0)
---print(u:sum():item()) --> 3
---```
---@param t peri.Tensor The numbers: any shape.
---@return peri.Tensor # Of the shape of t.
function functional.clone(t) end

---Elements by their places along one dimension: for `dim` 1, element (i, j) of the result is t[index[i][j]][j]; for 2,
---t[i][index[i][j]]. Waits, to check the places.
---
---Errors: a place that t does not have; a shape that does not fit.
---
---```lua
---local t = peri.tensor { { 1, 2 }, { 3, 4 } }
---print(table.concat(t:gather(2, peri.tensor({ { 1 }, { 0 } }, "i64")):to_list(), " ")) --> 2 3
---```
---@param t peri.Tensor The numbers: any shape.
---@param dim integer The dimension.
---@param index peri.Tensor i64 or i32, of as many dimensions as t, and no larger in any but `dim`: its shape is that of the result.
---@return peri.Tensor # Of the shape of the index.
function functional.gather(t, dim, index) end

---The slices of t along a dimension that a list of ids names. Repeats are fine: gradients add up. Waits, to check the
---ids.
---
---Errors: an id that t does not have.
---
---```lua
---local t = peri.tensor { { 1, 2 }, { 3, 4 } }
---print(table.concat(t:index_select(1, peri.tensor({ 1, 1 }, "i64")):to_list(), " ")) --> 3 4 3 4
---```
---@param t peri.Tensor The numbers: any shape.
---@param dim integer The dimension.
---@param ids peri.Tensor i64 or i32: `[n]`, from 0.
---@return peri.Tensor # As t, with size n in the dimension: `[n, ...]` for 1.
function functional.index_select(t, dim, ids) end

---Element `i` of a dimension, which is gone from the result: a view. `t[i]` is `t:select(1, i)`.
---
---Errors: an element that there is not.
---
---```lua
---print(table.concat(peri.tensor({ { 1, 2 }, { 3, 4 } }):select(2, -1):to_list(), " ")) --> 2 4
---```
---@param t peri.Tensor The numbers: any shape.
---@param dim integer The dimension.
---@param i integer From 0; negative: from the end.
---@return peri.Tensor # The shape of t without the dimension.
function functional.select(t, dim, i) end

---A view without dimensions of size 1.
---
---Errors: a dimension that there is not.
---
---```lua
---print(peri.zeros({ 2, 1, 3 }):squeeze(2):dim()) --> 2
---```
---@param t peri.Tensor The numbers: any shape.
---@param dim? integer Only this one, if it has size 1 (default: all of them).
---@return peri.Tensor # The shape of t without them.
function functional.squeeze(t, dim) end

---A view with a new dimension of size 1.
---
---Errors: more than 8 dimensions.
---
---```lua
---print(peri.zeros({ 2, 3 }):unsqueeze(2):size(2)) --> 1
---```
---@param t peri.Tensor The numbers: any shape.
---@param dim integer Which one it becomes.
---@return peri.Tensor # The shape of t with a 1 more.
function functional.unsqueeze(t, dim) end

---A view whose dimension k is dimension order[k] of t.
---
---Errors: a dimension that is missing or there twice.
---
---```lua
---print(table.concat(peri.zeros({ 2, 3, 4 }):permute({ 3, 1, 2 }):shape(), " ")) --> 4 2 3
---```
---@param t peri.Tensor The numbers: any shape.
---@param order integer[] All dimensions, each once.
---@return peri.Tensor # The sizes of t in that order: any shape.
function functional.permute(t, order) end

---The elements in order along a dimension, and their places. NaN is larger than all numbers; equal elements keep their
---order.
---
---Errors: complex numbers; 2^31 elements and more.
---
---```lua
---local values, places = peri.tensor({ 3, 1, 2 }):sort()
---print(table.concat(values:to_list(), " "), table.concat(places:to_list(), " ")) --> 1 2 3 1 2 0
---```
---@param t peri.Tensor The numbers: any shape.
---@param dim? integer The dimension (default: -1, the last one).
---@param descending? boolean In falling order (default: false).
---@return peri.Tensor # Values: of the shape of t.
---@return peri.Tensor # Places: of the shape of t, i64.
function functional.sort(t, dim, descending) end

---The places of the elements in order along a dimension, as `sort` gives them.
---
---Errors: as in `sort`.
---
---```lua
---print(table.concat(peri.tensor({ 3, 1, 2 }):argsort(1, true):to_list(), " ")) --> 0 2 1
---```
---@param t peri.Tensor The numbers: any shape.
---@param dim? integer The dimension (default: -1, the last one).
---@param descending? boolean In falling order (default: false).
---@return peri.Tensor # Of the shape of t, i64.
function functional.argsort(t, dim, descending) end

---The k largest elements along a dimension in falling order, and their places. Those of the products of queries with
---many items, without the matrix of all products: `peri.sparse.top_products`.
---
---Errors: more than the dimension has; complex numbers.
---
---```lua
---local values, places = peri.tensor({ 3, 1, 2 }):topk(2)
---print(table.concat(values:to_list(), " "), table.concat(places:to_list(), " ")) --> 3 2 0 2
---```
---@param t peri.Tensor The numbers: any shape.
---@param k integer How many.
---@param dim? integer The dimension (default: -1, the last one).
---@param largest? boolean False: the k smallest, in rising order (default: true).
---@return peri.Tensor # Values: the shape of t with size k in the dimension.
---@return peri.Tensor # Places: of the same shape, i64.
function functional.topk(t, k, dim, largest) end

---Views of t: n parts of one size along a dimension, the last of which may be smaller, or missing.
---
---Errors: n below 1; a dimension that t does not have.
---
---```lua
---print(#peri.arange(5):chunk(2), peri.arange(5):chunk(2)[2]:size(1)) --> 2 2
---```
---@param t peri.Tensor Any shape.
---@param n integer How many parts at most.
---@param dim? integer The dimension that is cut (default: 1).
---@return peri.Tensor[] # The parts, as a list: the shape of t but for the dimension.
function functional.chunk(t, n, dim) end

---t with the dimensions from `first` to `last` as one; a view where its memory allows it.
---
---Errors: dimensions that t does not have, or in the wrong order.
---
---```lua
---print(table.concat(peri.zeros({ 2, 3, 4 }):flatten(2):shape(), " ")) --> 2 12
---```
---@param t peri.Tensor Any shape.
---@param first? integer The first of them (default: 1).
---@param last? integer The last of them (default: -1).
---@return peri.Tensor # The shape of t with the product of these sizes in their place.
function functional.flatten(t, first, last) end

---For each id a row with 1 at its place and 0 elsewhere. It waits for the ids, to check them.
---
---Errors: ids outside of 0 .. classes - 1; ids that are no integers.
---
---```lua
---print(table.concat(peri.tensor({ 1 }, "i64"):one_hot(3):to_list(), " ")) --> 0 1 0
---```
---@param ids peri.Tensor Integers of any shape.
---@param classes integer How many numbers a row has.
---@return peri.Tensor # `[..., classes]`, i64.
function functional.one_hot(ids, classes) end
