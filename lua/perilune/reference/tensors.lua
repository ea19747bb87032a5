-- tensors.lua: Tensors: making, reading, views, gradients.
--
-- A tensor has numbers of one dtype (`f64 f32 f16 bf16 i64 i32 i16 i8 u8 bool c64 c128`), a shape, and a device (`cpu`,
-- `cuda:0`). In arguments, `nil` as a device stands for the rank's (`PERI_DEVICE`). Dimensions count from 1 (-1 is the
-- last), elements from 0. docs/tensors.md tells more; functions of tensors are on the pages `tensor_arithmetic`,
-- `tensor_functions` and `tensor_reductions`.
---@meta

---@class peri
local peri = {}
---@class peri.Tensor
local Tensor = {}

---Make a tensor of numbers. A number that the dtype cannot hold is an error (300 in u8, 1.5 in i64, a Lua number from
---2^53 on in i64: write `9007199254740993LL`), and so is a 64-bit integer that a float dtype would round (16777217LL in
---f32). Numbers of Lua are rounded to the nearest of a float dtype. Complex numbers are pairs.
---
---Errors: lists of different lengths or depths, or with a nil or a name in them; an entry that is no number, or does
---not fit the dtype; an unknown dtype or device.
---
---```lua
---local t = peri.tensor { { 1, 2, 3 }, { 4, 5, 6 } }
---print(t:dim(), t:size(-1), t:numel(), t:dtype(), t:device()) --> 2 3 6 f32 cpu
---print(table.concat(t:shape(), " "), t:item(3), t:to_table()[2][1], #t:to_list()) --> 2 3 4 4 6
---print(t:is_contiguous(), t:is_leaf(), t:is_mapped(), t:is_pinned()) --> true true false false
---print(tostring(t:describe().ndim)) --> 2
---```
---@param data number|table A number, or lists of them that are nested as deep as there are dimensions.
---@param dtype? string Its dtype (default: f32).
---@param device? string Where it is made (default: that of the rank).
---@param shape? integer[] Another shape for the same numbers (default: as the lists are nested).
---@return peri.Tensor # Of the shape of the lists.
function peri.tensor(data, dtype, device, shape) end

---A tensor whose numbers are not set.
---
---Errors: a shape that is no list of sizes; an unknown dtype or device.
---
---```lua
---print(peri.empty({ 2, 3 }, "i64"):numel()) --> 6
---```
---@param shape integer[] Its shape: sizes, at most 8 of them; `{}` is a scalar.
---@param dtype? string Its dtype (default: f32).
---@param device? string Where it is made (default: that of the rank).
---@return peri.Tensor # Of that shape.
function peri.empty(shape, dtype, device) end

---A tensor of zeros.
---
---Errors: a shape that is no list of sizes; an unknown dtype or device.
---
---```lua
---print(peri.zeros({ 2 }):item(1)) --> 0
---```
---@param shape integer[] Its shape.
---@param dtype? string Its dtype (default: f32).
---@param device? string Where it is made (default: that of the rank).
---@return peri.Tensor # Of that shape.
function peri.zeros(shape, dtype, device) end

---A tensor of ones.
---
---Errors: a shape that is no list of sizes; an unknown dtype or device.
---
---```lua
---print(peri.ones({ 2 }):item(1)) --> 1
---```
---@param shape integer[] Its shape.
---@param dtype? string Its dtype (default: f32).
---@param device? string Where it is made (default: that of the rank).
---@return peri.Tensor # Of that shape.
function peri.ones(shape, dtype, device) end

---A tensor whose elements are all one number.
---
---Errors: a shape that is no list of sizes; a number that the dtype cannot hold; an unknown dtype or device.
---
---```lua
---print(peri.full({ 2 }, 7):item(1)) --> 7
---```
---@param shape integer[] Its shape.
---@param value number|integer The number, which may be a 64-bit integer: 9007199254740993LL.
---@param dtype? string Its dtype (default: f32).
---@param device? string Where it is made (default: that of the rank).
---@return peri.Tensor # Of that shape.
function peri.full(shape, value, dtype, device) end

---Random numbers, uniform in `low <= x < high`. Element i is a function of (seed, stream, i) alone, on every device and
---number of threads.
---
---Errors: a shape that is no list of sizes; dtypes that are no floats.
---
---```lua
---print(peri.Tensor.uniform({ 2 }, 1, 2, 7):item(0) >= 1) --> true
---```
---@param shape integer[] Its shape.
---@param low number The least number.
---@param high number Above all numbers.
---@param seed integer Of the generator.
---@param stream? integer Of the generator (default: 0).
---@param dtype? string Its dtype (default: f32).
---@param device? string Where it is made (default: that of the rank).
---@return peri.Tensor # Of that shape.
function Tensor.uniform(shape, low, high, seed, stream, dtype, device) end

---Normal random numbers. Element i is a function of (seed, stream, i) alone.
---
---Errors: a shape that is no list of sizes; dtypes that are no floats.
---
---```lua
---print(peri.Tensor.normal({ 2 }, 5, 0, 7):item(0)) --> 5
---```
---@param shape integer[] Its shape.
---@param mean number Their mean.
---@param deviation number Their standard deviation.
---@param seed integer Of the generator.
---@param stream? integer Of the generator (default: 0).
---@param dtype? string Its dtype (default: f32).
---@param device? string Where it is made (default: that of the rank).
---@return peri.Tensor # Of that shape.
function Tensor.normal(shape, mean, deviation, seed, stream, dtype, device) end

---A tensor of what is in host memory; the numbers are copied. A C array or pointer has elements of the dtype's C type
---(`float` for f32, `uint16_t` for f16 and bf16); a string, a `char` array and a `void *` are bytes.
---
---Errors: an array with too few elements; a string of another length; C memory of another type.
---
---```lua
---local array = require("ffi").new("float[2]", 3, 4)
---print(peri.Tensor.from_memory(array, { 2 }):item(1)) --> 4
---```
---@param data any A C array, a C pointer, or a string.
---@param shape integer[] Its shape.
---@param dtype? string Its dtype (default: f32).
---@param device? string Where it is made (default: that of the rank).
---@return peri.Tensor # Of that shape.
function Tensor.from_memory(data, shape, dtype, device) end

---Whether something is a tensor that was not released.
---
---Errors: nothing is raised.
---
---```lua
---print(peri.Tensor.is_live(peri.zeros { 1 }), peri.Tensor.is_live(3)) --> true false
---```
---@param x any Anything.
---@return boolean
function Tensor.is_live(x) end

---All that is known of the tensor at once, as C has it (`peri_tensor_info`): `ndim`, `shape[0..]`, `numel`, `dtype`,
---`device`, `contiguous`, `leaf`, `requires_grad`. The next call overwrites it.
---@return ffi.cdata*
function Tensor:describe() end

---The number of dimensions.
---@return integer
function Tensor:dim() end

---The sizes of all dimensions.
---@return integer[]
function Tensor:shape() end

---The size of one dimension.
---
---Errors: a dimension that the tensor does not have.
---@param d integer The dimension; 1 is the first, -1 the last.
---@return integer
function Tensor:size(d) end

---The number of elements.
---@return integer
function Tensor:numel() end

---The name of the dtype.
---@return string
function Tensor:dtype() end

---The name of the device.
---@return string
function Tensor:device() end

---Whether the elements lie in memory one after the other, the last dimension fastest.
---@return boolean
function Tensor:is_contiguous() end

---Whether a tensor of a GPU lies in host memory that the GPU's kernels can reach, as rows of tables with `fused_uvm`
---do.
---@return boolean
function Tensor:is_mapped() end

---A tensor whose numbers are not set, of the dtype and on the device of this one, if not said otherwise.
---
---Errors: sizes below 0.
---
---```lua
---print(peri.ones({ 2 }, "f64"):new_empty({ 3, 4 }):dtype()) --> f64
---```
---@param shape integer[] Its sizes.
---@param dtype? string The dtype (default: that of this tensor).
---@param device? string The device (default: that of this tensor).
---@return peri.Tensor # Of that shape.
function Tensor:new_empty(shape, dtype, device) end

---A tensor of zeros, of the dtype and on the device of this one, if not said otherwise.
---
---Errors: sizes below 0.
---
---```lua
---print(peri.ones({ 2 }, "f64"):new_zeros({ 3, 4 }):dtype()) --> f64
---```
---@param shape integer[] Its sizes.
---@param dtype? string The dtype (default: that of this tensor).
---@param device? string The device (default: that of this tensor).
---@return peri.Tensor # Of that shape.
function Tensor:new_zeros(shape, dtype, device) end

---A tensor of ones, of the dtype and on the device of this one, if not said otherwise.
---
---Errors: sizes below 0.
---
---```lua
---print(peri.ones({ 2 }, "f64"):new_ones({ 3, 4 }):dtype()) --> f64
---```
---@param shape integer[] Its sizes.
---@param dtype? string The dtype (default: that of this tensor).
---@param device? string The device (default: that of this tensor).
---@return peri.Tensor # Of that shape.
function Tensor:new_ones(shape, dtype, device) end

---A tensor of one number, of the dtype and on the device of this one, if not said otherwise.
---
---Errors: sizes below 0; a number that the dtype cannot hold.
---
---```lua
---print(peri.ones({ 2 }):new_full({ 3 }, 7):item(2)) --> 7
---```
---@param shape integer[] Its sizes.
---@param value number The number, which the dtype must hold.
---@param dtype? string The dtype (default: that of this tensor).
---@param device? string The device (default: that of this tensor).
---@return peri.Tensor # Of that shape.
function Tensor:new_full(shape, value, dtype, device) end

---A tensor of numbers, as `peri.tensor` makes it, of the dtype and on the device of this one, if not said otherwise.
---
---Errors: lists of different lengths; numbers that the dtype cannot hold.
---
---```lua
---print(peri.ones({ 2 }, "i64"):new_tensor({ 3, 4 }):dtype()) --> i64
---```
---@param data any A number, or nested lists of numbers.
---@param dtype? string The dtype (default: that of this tensor).
---@param device? string The device (default: that of this tensor).
---@return peri.Tensor # Of the lists' shape.
function Tensor:new_tensor(data, dtype, device) end

---How many elements of memory lie from one element of a dimension to the next.
---
---Errors: a dimension that it does not have.
---
---```lua
---local t = peri.ones { 2, 3 }
---print(t:stride(1), t:transpose(1, 2):stride(1), t:element_size()) --> 3 1 4
---```
---@param d? integer The dimension, from 1, or from -1 for the last one (default: all).
---@return integer|integer[] # Elements; without d a list, one for each dimension.
function Tensor:stride(d) end

---How many bytes an element has.
---@return integer
function Tensor:element_size() end

---Whether it was made by a script, and not by an operation on the gradient tape.
---@return boolean
function Tensor:is_leaf() end

---Whether it lies in pinned host memory, from which a GPU copies without waiting.
---@return boolean
function Tensor:is_pinned() end

---One element as a number. i64 numbers from 2^53 on stay 64-bit integers. Waits for all that is queued on the current
---stream of its device; for a loss that a backward pass began from, only until the loss is there: pass and optimizer
---run on meanwhile.
---
---Errors: no position, and other than one element; a position outside of the tensor.
---@param i? integer Position of the element in order, from 0 (default: that of a tensor of one element).
---@return number
function Tensor:item(i) end

---All elements as a flat list. Waits for the device.
---@return number[]
function Tensor:to_list() end

---All elements as nested lists; of a scalar, its number. Waits for the device.
---@return table|number
function Tensor:to_table() end

---All elements as a new C array, in order. Waits for the device.
---
---```lua
---local t = peri.zeros { 2 }
---t:write(require("ffi").new("float[2]", 3, 4))
---local buffer, n = t:read()
---print(buffer[1], n) --> 4 2
---```
---@return ffi.cdata*
---@return integer # The number of its elements.
function Tensor:read() end

---Overwrite all elements from host memory, as in `Tensor.from_memory`.
---
---Errors: too few elements; C memory of another type.
---@param data any A C array, a C pointer, or a string.
---@return peri.Tensor # The tensor itself, of its shape.
function Tensor:write(data) end

---Overwrite all elements with those of another tensor, converted to this dtype and repeated as broadcasting does. It is
---not recorded on the tape.
---
---Errors: shapes that do not broadcast.
---
---```lua
---print(peri.zeros({ 2 }):copy(peri.tensor({ 5 }, "i64")):fill(6):item(1)) --> 6
---```
---@param src peri.Tensor Of a shape that broadcasts with this one.
---@return peri.Tensor # The tensor itself, of its shape.
function Tensor:copy(src) end

---Make all elements one number. It is not recorded on the tape.
---
---Errors: a number that the dtype cannot hold.
---@param value number The number.
---@return peri.Tensor # The tensor itself, of its shape.
function Tensor:fill(value) end

---The same numbers with another dtype, on another device, or both; the tensor itself where nothing changes. Recorded on
---the tape.
---
---Errors: an unknown dtype or device.
---
---```lua
---local t = peri.ones({ 2 }):to("i64")
---print(t:dtype(), (pcall(t.pin_memory, t, "cpu"))) --> i64 false
---```
---@param dtype? string The dtype (default: the same).
---@param device? string The device (default: the same).
---@param non_blocking? boolean Do not wait for the copy; nobody may change this tensor until the stream has passed it (default: false).
---@return peri.Tensor # Of the same shape.
function Tensor:to(dtype, device, non_blocking) end

---A copy of a tensor of `cpu` in pinned memory, from which a GPU copies without waiting.
---
---Errors: a tensor that is not of `cpu`; the device `cpu`, whose memory is the host's own.
---@param device? string The device that will copy from it (default: that of the rank).
---@return peri.Tensor # Of the same shape.
function Tensor:pin_memory(device) end

---The same elements in order with other sizes: a view if that is possible, else a copy.
---
---Errors: sizes with another product; more than one -1.
---
---```lua
---print(peri.ones({ 2, 3 }):reshape(3, -1):size(2), peri.ones({ 2, 3 }):transpose(1, 2):size(1))
-----> 2 3
---```
---@param ... integer The sizes, or one list of them; one may be -1: what is left.
---@return peri.Tensor # Of that shape.
function Tensor:reshape(...) end

---A view in which two dimensions are exchanged.
---
---Errors: a dimension that the tensor does not have.
---@param a integer One dimension.
---@param b integer The other one.
---@return peri.Tensor # Of the shape with sizes a and b exchanged.
function Tensor:transpose(a, b) end

---A view of some elements of one dimension: `start` is the first, `stop` is not among them. Negative ones count from
---the end: `t:slice(1, -2)` are the last two rows.
---
---Errors: a range outside of the dimension; a step below 1.
---
---```lua
---print(peri.tensor({ 5, 6, 7 }):slice(1, 1, 3):item(0),
---  peri.ones({ 1, 2 }):expand({ 3, 2 }):size(1))
-----> 6 3
---```
---@param d integer The dimension, from 1.
---@param start integer The first element, from 0, or from -1 for the last one.
---@param stop? integer The end, counted so, too (default: the end of the dimension).
---@param step? integer Each so many elements one (default: 1).
---@return peri.Tensor # Of the shape with a smaller size d.
function Tensor:slice(d, start, stop, step) end

---A view of so many elements of one dimension from `start` on.
---
---Errors: elements that the dimension does not have.
---
---```lua
---print(peri.tensor({ 5, 6, 7 }):narrow(1, -2, 2):item(0)) --> 6
---```
---@param d integer The dimension, from 1.
---@param start integer The first element, from 0, or from -1 for the last one.
---@param length integer How many.
---@return peri.Tensor # Of the shape with the size `length` at d.
function Tensor:narrow(d, start, length) end

---A view in which dimensions of size 1 are repeated, without a copy.
---
---Errors: sizes that differ where the size is not 1.
---@param shape integer[] The sizes.
---@return peri.Tensor # Of that shape.
function Tensor:expand(shape) end

---The tensor if it is contiguous, else a copy that is.
---
---```lua
---local t = peri.ones({ 2, 3 }):transpose(1, 2):contiguous()
---print(t:is_contiguous(), t:detach():is_leaf(), t:share():numel()) --> true true 6
---t:release()
---```
---@return peri.Tensor # Of the same shape.
function Tensor:contiguous() end

---The same memory, cut off from the gradient tape.
---@return peri.Tensor # Of the same shape.
function Tensor:detach() end

---Another handle of the same tensor, which lives until it is released or collected, whatever scope is open.
---@return peri.Tensor # Of the same shape.
function Tensor:share() end

---Give the handle back now. The memory is freed when no handle and no operation uses it. The handle cannot be used any
---more.
function Tensor:release() end

---Let backward passes compute a gradient for this leaf, or not any more.
---
---Errors: a tensor that is no leaf, or is not of floats.
---
---```lua
---local x = peri.tensor({ 2 }):requires_grad();
---(x * x):backward()
---print(x:grad():item()) --> 4
---x:set_grad(nil)
---print(x:grad() == nil) --> true
---```
---@param on? boolean Whether it is wanted (default: true).
---@return peri.Tensor # The tensor itself, of its shape.
function Tensor:requires_grad(on) end

---The gradient that backward passes have added up.
---@return peri.Tensor|nil # Of the shape of the tensor; nil: there is none.
function Tensor:grad() end

---Replace the gradient.
---
---Errors: a gradient of another shape, dtype or device.
---@param grad? peri.Tensor Of the shape of the tensor (default: none, it is dropped).
---@return peri.Tensor # The tensor itself, of its shape.
function Tensor:set_grad(grad) end

---Run the backward pass from this tensor: gradients of all leaves that it was made of are added up, tables with
---`fused_params` are trained. Waits for exchanges between ranks.
---
---Errors: a tensor without tape; one of several elements without `grad`.
---@param grad? peri.Tensor The gradient of this tensor, of its shape (default: 1, for one element).
function Tensor:backward(grad) end

---One backward pass from several tensors.
---
---Errors: another number of gradients than tensors.
---
---```lua
---local x = peri.tensor({ 2 }):requires_grad()
---peri.backward { x * 3, x * 4 }
---print(x:grad():item()) --> 7
---```
---@param tensors peri.Tensor[] Of any shape.
---@param grads? peri.Tensor[] The gradient of each, of its shape (default: 1, for one element).
function peri.backward(tensors, grads) end
