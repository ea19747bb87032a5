-- tensor_places.lua: Functions of tensors: elements in other places.
--
-- What is here is a method of tensors, too, where its first argument is a tensor `t`: `t:roll(1)` is
-- `peri.nn.functional.roll(t, 1)`. Names and meaning are PyTorch's. Dimensions count from 1 (-1 is the last), elements
-- from 0.
---@meta

---@class peri.nn.functional
local functional = {}

---Elements moved up along a dimension; those that leave at the end come in at the front.
---
---Errors: as many shifts as dimensions are wanted.
---
---```lua
---print(table.concat(peri.arange(4):roll(1):to_list(), " ")) --> 3 0 1 2
---```
---@param t peri.Tensor The numbers: any shape.
---@param shifts integer|integer[] How far; negative: down.
---@param dim? integer|integer[] The dimension, or a list of them, one for each shift (default: of all in row-major order).
---@return peri.Tensor # Of the shape of t.
function functional.roll(t, shifts, dim) end

---Elements in reverse order along dimensions.
---
---Errors: a dimension that t does not have.
---
---```lua
---print(table.concat(peri.arange(3):flip(1):to_list(), " ")) --> 2 1 0
---```
---@param t peri.Tensor The numbers: any shape.
---@param dim integer|integer[] A dimension, or a list of them.
---@return peri.Tensor # Of the shape of t.
function functional.flip(t, dim) end

---t several times over. (PyTorch's `repeat`, whose name is a word of Lua, too.)
---
---Errors: more than 8 dimensions.
---
---```lua
---print(table.concat(peri.arange(2):tile({ 2 }):to_list(), " ")) --> 0 1 0 1
---```
---@param t peri.Tensor The numbers: any shape.
---@param times integer[] How often along each dimension; of fewer numbers the last dimensions are meant.
---@return peri.Tensor # Of the shape of t times these numbers.
function functional.tile(t, times) end

---Each element several times, one beside the other. A tensor of numbers is waited for.
---
---Errors: another number of times than elements; negative ones.
---
---```lua
---print(table.concat(peri.arange(2):repeat_interleave(2):to_list(), " ")) --> 0 0 1 1
---```
---@param t peri.Tensor The numbers: any shape.
---@param times integer|peri.Tensor How often; a tensor `[size of dim]`: each its own.
---@param dim? integer The dimension (default: of all in row-major order).
---@return peri.Tensor # The shape of t with more in the dimension.
function functional.repeat_interleave(t, times, dim) end

---t with zeros below a diagonal.
---
---Errors: fewer than two dimensions.
---
---```lua
---print(table.concat(peri.ones({ 2, 2 }):triu():to_list(), " ")) --> 1 1 0 1
---```
---@param t peri.Tensor `[..., rows, columns]`.
---@param k? integer How many places right of the main one the diagonal is (default: 0).
---@return peri.Tensor # Of the shape of t.
function functional.triu(t, k) end

---t with zeros above a diagonal.
---
---Errors: fewer than two dimensions.
---
---```lua
---print(table.concat(peri.ones({ 2, 2 }):tril():to_list(), " ")) --> 1 0 1 1
---```
---@param t peri.Tensor `[..., rows, columns]`.
---@param k? integer How many places right of the main one the diagonal is (default: 0).
---@return peri.Tensor # Of the shape of t.
function functional.tril(t, k) end

---The diagonal of a matrix, a view if its memory allows it; or, of a row, the matrix that has it there.
---
---Errors: other than one or two dimensions.
---
---```lua
---print(table.concat(peri.tensor({ 1, 2 }):diag():to_list(), " ")) --> 1 0 0 2
---```
---@param t peri.Tensor `[rows, columns]` or `[n]`.
---@param k? integer How many places right of the main diagonal (default: 0).
---@return peri.Tensor # `[n]`, or a square.
function functional.diag(t, k) end

---The sum of a matrix's diagonal.
---
---Errors: other than two dimensions.
---
---```lua
---print(peri.ones({ 3, 3 }):trace():item()) --> 3
---```
---@param t peri.Tensor `[rows, columns]`.
---@return peri.Tensor # A scalar.
function functional.trace(t) end

---The product of each element of a with each of b.
---
---Errors: other than one dimension each.
---
---```lua
---print(table.concat(peri.tensor({ 1, 2 }):outer(peri.tensor { 3, 4 }):to_list(), " "))
-----> 3 4 6 8
---```
---@param a peri.Tensor `[n]`.
---@param b peri.Tensor `[m]`.
---@return peri.Tensor # `[n, m]`.
function functional.outer(a, b) end

---t with a number around it.
---
---Errors: an odd number of pads, or more than two for each dimension.
---
---```lua
---print(table.concat(peri.ones({ 2 }):pad({ 1, 2 }):to_list(), " ")) --> 0 1 1 0 0
---```
---@param t peri.Tensor The numbers: any shape.
---@param pads integer[] How many before and behind along the last dimension, then along the one before it, and so on; negative: cut off.
---@param value? number|integer What is put there, which may be a 64-bit integer (default: 0).
---@return peri.Tensor # The shape of t with these sizes more.
function functional.pad(t, pads, value) end

---Views, one for each element along a dimension.
---
---Errors: a dimension that t does not have.
---
---```lua
---print(#peri.zeros({ 3, 2 }):unbind()) --> 3
---```
---@param t peri.Tensor The numbers: any shape.
---@param dim? integer The dimension, which the views do not have (default: 1).
---@return peri.Tensor[] # A list of views of the shape of t without the dimension.
function functional.unbind(t, dim) end

---Views of each of some rows in the shape of all their sizes.
---
---Errors: an entry of other than one dimension.
---
---```lua
---local x, y = nn.functional.meshgrid { peri.arange(2), peri.arange(3) }
---print(x:size(1), y:size(2)) --> 2 3
---```
---@param tensors peri.Tensor[] Each of `[n]`, n its own.
---@return peri.Tensor ... # As many tensors as there are, all of the shape of their sizes; the i-th one changes along dimension i (PyTorch's `"ij"`).
function functional.meshgrid(tensors) end

---t with numbers put at places: the way back of `gather`. Of several at one place the last along the dimension stays.
---
---Errors: an index that t has not (waits for that); shapes or dtypes that differ.
---
---```lua
---local t = peri.zeros({ 1, 3 }):scatter(2, peri.tensor({ { 2 } }, "i64"), 5)
---print(t:item(2)) --> 5
---```
---@param t peri.Tensor The numbers: any shape.
---@param dim integer The dimension.
---@param index peri.Tensor Places along the dimension, i64 or i32, of any shape with as many dimensions as t, no larger but in that one.
---@param src peri.Tensor|number A number, or a tensor of the index's shape, or without dimensions (then it wants no gradient), and of t's dtype.
---@return peri.Tensor # Of the shape of t.
function functional.scatter(t, dim, index, src) end

---t with numbers added at places. A line along the dimension is one thread's work: for rows, `index_add` is the way
---that a GPU shares.
---
---Errors: an index that t has not (waits for that); shapes or dtypes that differ.
---
---```lua
---local t = peri.zeros({ 3 }):scatter_add(1, peri.tensor({ 2, 2 }, "i64"), peri.ones { 2 })
---print(t:item(2)) --> 2
---```
---@param t peri.Tensor The numbers: any shape.
---@param dim integer The dimension.
---@param index peri.Tensor Places along the dimension, i64 or i32, of any shape with as many dimensions as t, no larger but in that one.
---@param src peri.Tensor|number A number, or a tensor of the index's shape, or without dimensions, and of t's dtype.
---@return peri.Tensor # Of the shape of t.
function functional.scatter_add(t, dim, index, src) end

---t with each slice of src added to the slice that its id names.
---
---Errors: an id that t has not (waits for that); shapes that do not fit; dtypes that are no floats.
---
---```lua
---local t = peri.zeros({ 3, 1 }):index_add(1, peri.tensor({ 2, 2 }, "i64"), peri.ones { 2, 1 })
---print(t:item(2)) --> 2
---```
---@param t peri.Tensor The numbers: any shape.
---@param dim integer The dimension.
---@param ids peri.Tensor `[n]`, i64 or i32.
---@param src peri.Tensor The shape of t with n in the dimension.
---@param alpha? number The factor of src (default: 1).
---@return peri.Tensor # Of the shape of t.
function functional.index_add(t, dim, ids, src, alpha) end

---`gather`, whose index broadcasts in the other dimensions.
---
---Errors: an index that t has not.
---
---```lua
---local t = peri.tensor { { 3, 1 } }
---print(t:take_along_dim(t:argsort(2), 2):item(0)) --> 1
---```
---@param t peri.Tensor The numbers: any shape.
---@param index peri.Tensor Places, i64 or i32, of any shape that broadcasts with t but in the dimension.
---@param dim? integer The dimension (default: of all in row-major order).
---@return peri.Tensor # The index's shape, or the one that it broadcasts to.
function functional.take_along_dim(t, index, dim) end

---The elements where a mask is true. `t[mask]` does it for the first dimensions of t. Waits for the mask.
---
---Errors: a mask that is not bool, or does not broadcast.
---
---```lua
---print(peri.tensor({ 1, -2, 3 }):masked_select(peri.tensor({ true, false, true },
---  'bool')):item(1))
-----> 3
---```
---@param t peri.Tensor The numbers: any shape.
---@param mask peri.Tensor bool, of any shape that broadcasts with t.
---@return peri.Tensor # `[number of true ones]`.
function functional.masked_select(t, mask) end

---The places of elements that are not 0. Waits.
---
---Errors: complex numbers.
---
---```lua
---print(peri.tensor({ 0, 5 }):nonzero():item()) --> 1
---```
---@param t peri.Tensor The numbers: any shape.
---@return peri.Tensor # `[number of them, dimensions of t]`, i64.
function functional.nonzero(t) end

---t with one dimension cut into several.
---
---Errors: sizes whose product is not the dimension's; two sizes of -1.
---
---```lua
---print(peri.zeros({ 6, 2 }):unflatten(1, { 2, -1 }):size(2)) --> 3
---```
---@param t peri.Tensor The numbers: any shape.
---@param dim integer The dimension.
---@param sizes integer[] Their sizes; one may be -1: what is left.
---@return peri.Tensor # The shape of t with these sizes in the dimension's place; a view if its memory allows it.
function functional.unflatten(t, dim, sizes) end

---t with dimensions at other places; the others keep their order.
---
---Errors: a dimension or a place twice, or one that t does not have.
---
---```lua
---print(peri.zeros({ 2, 3, 4 }):movedim(1, -1):size(1)) --> 3
---```
---@param t peri.Tensor The numbers: any shape.
---@param from integer|integer[] A dimension, or a list of them.
---@param to integer|integer[] Where they go, as many.
---@return peri.Tensor # A view: the shape of t with its sizes in the new order.
function functional.movedim(t, from, to) end

---Tensors side by side: joined along dimension 2, those of one dimension along 1.
---
---Errors: sizes that do not fit.
---
---```lua
---local t = peri.ones { 2, 1 }
---print(peri.nn.functional.hstack({ t, t }):size(2)) --> 2
---```
---@param tensors peri.Tensor[] Tensors of one shape but for the size that is joined.
---@return peri.Tensor # Of their shape, with the sum of their sizes where they are joined.
function functional.hstack(tensors) end

---Tensors one below the other: joined along dimension 1; those of one dimension are rows.
---
---Errors: sizes that do not fit.
---
---```lua
---local t = peri.ones { 3 }
---print(peri.nn.functional.vstack({ t, t }):size(1)) --> 2
---```
---@param tensors peri.Tensor[] Tensors of one shape but for the size that is joined.
---@return peri.Tensor # All of them: `[rows, ...]`.
function functional.vstack(tensors) end

---t with slices replaced by those of another tensor. Of several for one place the last one stays; the gradient goes to
---all of them, as in PyTorch.
---
---Errors: ids out of range; another shape of src.
---
---```lua
---local t = peri.zeros { 3 }
---print(t:index_copy(1, peri.tensor({ 2 }, "i64"), peri.ones { 1 }):item(2)) --> 1
---```
---@param t peri.Tensor The numbers: any shape.
---@param dim integer The dimension.
---@param ids peri.Tensor Numbers of slices, from 0: `[n]`, i32 or i64.
---@param src peri.Tensor The slices: t's shape with n in the dimension.
---@return peri.Tensor # Of the shape of t.
function functional.index_copy(t, dim, ids, src) end

---t with a number in some of its slices.
---
---Errors: ids out of range.
---
---```lua
---print(peri.zeros({ 3 }):index_fill(1, peri.tensor({ 2 }, "i64"), 7):item(2)) --> 7
---```
---@param t peri.Tensor The numbers: any shape.
---@param dim integer The dimension.
---@param ids peri.Tensor Numbers of slices, from 0: `[n]`, i32 or i64.
---@param value number The number.
---@return peri.Tensor # Of the shape of t.
function functional.index_fill(t, dim, ids, value) end

---t with what src has for each place: added up, the mean, the largest or the smallest. Places that index does not name
---keep their elements. Of equal largest elements of src one has the gradient (in PyTorch they share it).
---
---Errors: another shape of src than index; indices out of range; another word.
---
---```lua
---local index = peri.tensor({ 0, 0, 1 }, "i64")
---local most = peri.zeros({ 2 }):scatter_reduce(1, index, peri.tensor { 3, 5, 4 }, "amax")
---print(table.concat(most:to_list(), " ")) --> 5 4
---```
---@param t peri.Tensor The numbers: any shape.
---@param dim integer The dimension.
---@param index peri.Tensor Places along it, from 0, i32 or i64: any shape with as many dimensions as t.
---@param src peri.Tensor What comes there, of index's shape.
---@param reduce string "sum", "mean", "amax" or "amin".
---@param include_self? boolean With the element that t has there (default: true).
---@return peri.Tensor # Of the shape of t.
function functional.scatter_reduce(t, dim, index, src, reduce, include_self) end
