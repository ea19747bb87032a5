-- parameters.lua: Parameters and their first values.
--
-- A parameter is a tensor that is trained: a leaf of the gradient tape that requires a gradient. Random first values
-- depend on `nn.manual_seed` and on how many parameters were made before, so ranks that build the same model get the
-- same ones.
---@meta

---@class peri.nn
local nn = {}
---@class peri.nn.parameter
local parameter = {}

---Make a trained tensor: a leaf that requires a gradient and outlives the current scope. It shares the tensor's memory.
---
---Errors: what is no tensor.
---
---```lua
---print(nn.Parameter(peri.zeros { 2 }):is_leaf()) --> true
---```
---@param tensor peri.Tensor The first values: any shape.
---@return peri.Tensor # Of the same shape.
function nn.Parameter(tensor) end

---Set the seed of all parameters, masks of Dropout and random numbers that this rank makes from now on. Ranks that
---build the same model after the same seed get the same parameters.
---
---Errors: a seed that is no whole number from 0 to 2^53 - 1.
---
---```lua
---nn.manual_seed(7)
---local a = nn.Linear { in_features = 1, out_features = 1 }
---nn.manual_seed(7)
---print(nn.Linear({ in_features = 1, out_features = 1 }).weight:item() == a.weight:item())
-----> true
---```
---@param seed integer The seed.
function nn.manual_seed(seed) end

---A parameter of random numbers, uniform in `low <= x < high`.
---
---Errors: a shape that is no list of sizes; an unknown dtype or device.
---
---```lua
---print(nn.parameter.uniform({ 2 }, 1, 2):item(0) >= 1) --> true
---```
---@param shape integer[] Sizes.
---@param low number The least number.
---@param high number Above all numbers.
---@param dtype? string Its dtype (default: f32).
---@param device? string Where it is (default: that of the rank).
---@return peri.Tensor # Of that shape.
function parameter.uniform(shape, low, high, dtype, device) end

---A parameter of normal random numbers.
---
---Errors: a shape that is no list of sizes; an unknown dtype or device.
---
---```lua
---print(nn.parameter.normal({ 2 }, 5, 0):item(0)) --> 5
---```
---@param shape integer[] Sizes.
---@param mean number Their mean.
---@param deviation number Their standard deviation.
---@param dtype? string Its dtype (default: f32).
---@param device? string Where it is (default: that of the rank).
---@return peri.Tensor # Of that shape.
function parameter.normal(shape, mean, deviation, dtype, device) end

---A parameter of normal random numbers of mean 0 and deviation `sqrt(2 / (fan in + fan out))`; the fans are sizes 2 and
---1, times the later sizes.
---
---Errors: a shape that is no list of sizes; an unknown dtype or device.
---
---```lua
---print(nn.parameter.xavier_normal({ 2, 3 }):numel()) --> 6
---```
---@param shape integer[] Two sizes or more.
---@param dtype? string Its dtype (default: f32).
---@param device? string Where it is (default: that of the rank).
---@return peri.Tensor # Of that shape.
function parameter.xavier_normal(shape, dtype, device) end

---A parameter whose elements are all one number.
---
---Errors: a shape that is no list of sizes; an unknown dtype or device.
---
---```lua
---print(nn.parameter.full({ 2 }, 3):item(1)) --> 3
---```
---@param shape integer[] Sizes.
---@param value number The number.
---@param dtype? string Its dtype (default: f32).
---@param device? string Where it is (default: that of the rank).
---@return peri.Tensor # Of that shape.
function parameter.full(shape, value, dtype, device) end

---A parameter of zeros.
---
---Errors: a shape that is no list of sizes; an unknown dtype or device.
---
---```lua
---print(nn.parameter.zeros({ 2 }):item(1)) --> 0
---```
---@param shape integer[] Sizes.
---@param dtype? string Its dtype (default: f32).
---@param device? string Where it is (default: that of the rank).
---@return peri.Tensor # Of that shape.
function parameter.zeros(shape, dtype, device) end

---A parameter of ones.
---
---Errors: a shape that is no list of sizes; an unknown dtype or device.
---
---```lua
---print(nn.parameter.ones({ 2 }):item(1)) --> 1
---```
---@param shape integer[] Sizes.
---@param dtype? string Its dtype (default: f32).
---@param device? string Where it is (default: that of the rank).
---@return peri.Tensor # Of that shape.
function parameter.ones(shape, dtype, device) end

---A tensor that is not trained but outlives scopes, for `register_buffer`.
---
---Errors: a shape that is no list of sizes; an unknown dtype or device.
---
---```lua
---print(nn.parameter.buffer({ 2 }, 4):item(1)) --> 4
---```
---@param shape integer[] Sizes.
---@param value number What all elements are.
---@param dtype? string Its dtype (default: f32).
---@param device? string Where it is (default: that of the rank).
---@return peri.Tensor # Of that shape.
function parameter.buffer(shape, value, dtype, device) end

---For an optimizer of one's own that keeps numbers for each row: from now on it is told when rows stand for something
---else, by its methods `restart_rows(position, first, n)` and, if it has one, `retire(position, why)`.
---
---Errors: what is no list of parameters.
---
---```lua
---local told, weight = 0, nn.parameter.ones { 4, 2 }
---local keeper = { restart_rows = function(_, _, first, n) told = first + n end,
---  retire = function(_, _, why) told = why end }
---nn.parameter.keep_rows(keeper, { weight })
---nn.parameter.restart_rows(weight, peri.tensor({ 1, 2 }, "i64"))
---print(told) --> 3
---nn.parameter.retire({ weight }, "is gone")
---print(told) --> is gone
---```
---@param keeper table The optimizer.
---@param parameters? peri.Tensor[] The parameters, `[rows, columns]` each; positions count from 1 (default: none any more).
function parameter.keep_rows(keeper, parameters) end

---Say that rows of a parameter stand for something else from now on: what optimizers keep for them starts again, and
---their gradients are zeroed.
---
---Errors: what is no tensor.
---@param parameter peri.Tensor `[rows, columns]`.
---@param rows peri.Tensor The numbers of the rows, i64 `[N]`, ascending, each once.
function parameter.restart_rows(parameter, rows) end

---Say that tensors are trained no more: optimizers that have them raise an error at their next step.
---
---Errors: what is no list.
---@param tensors peri.Tensor[] Parameters of any shape.
---@param why string The end of a sentence that begins with the parameter.
function parameter.retire(tensors, why) end

---As a keeper (see `parameter.keep_rows`): states of rows of a parameter are those of the first step again. Counts of
---steps stay.
---
---Errors: a parameter that it does not have.
---@param i integer Position of the parameter, from 1.
---@param first integer The first row, from 0.
---@param n integer How many rows.
function nn.optim.Optimizer:restart_rows(i, first, n) end

---As a keeper: the next step is an error that says why.
---
---Errors: none.
---@param i integer Position of the parameter, from 1.
---@param why string The end of a sentence that begins with the parameter.
function nn.optim.Optimizer:retire(i, why) end

---First values under PyTorch's names: each function fills a tensor in place, outside of the tape, and returns it.
---
---```lua
---local init = peri.nn.init
---local layer = peri.nn.Linear { in_features = 4, out_features = 2 }
---init.xavier_uniform_(layer.weight)
---init.zeros_(layer.bias)
---print(layer.bias:to_list()[1], init.ones_(peri.zeros { 1 }):item()) --> 0 1
---print(init.constant_(peri.zeros { 1 }, 3):item()) --> 3
---print(init.calculate_gain("relu") ^ 2 - 2 < 1e-9, init.calculate_gain "linear") --> true 1
---local t = init.uniform_(peri.zeros { 2, 3 }, -1, 1)
---for _, f in ipairs { init.normal_, init.trunc_normal_, init.xavier_normal_,
---  init.kaiming_uniform_, init.kaiming_normal_ } do f(t) end
---local q = init.orthogonal_(peri.zeros { 2, 2 })
---print(("%.3f"):format(q:matmul(q:transpose(1, 2)):item(0))) --> 1.000
---```
---@class peri.nn.init
local init = {}

---Uniform numbers of [a, b).
---
---Errors: what is no tensor of floats.
---@param t peri.Tensor Any shape.
---@param a? number The least (default: 0).
---@param b? number The bound (default: 1).
---@return peri.Tensor # t, of its shape.
function init.uniform_(t, a, b) end

---Normal numbers.
---
---Errors: what is no tensor of floats.
---@param t peri.Tensor Any shape.
---@param mean? number Their mean (default: 0).
---@param std? number Their deviation (default: 1).
---@return peri.Tensor # t, of its shape.
function init.normal_(t, mean, std) end

---Normal numbers, of which those outside of [a, b] are not drawn.
---
---Errors: a deviation that is not above 0; a that is not below b.
---@param t peri.Tensor Any shape.
---@param mean? number Their mean (default: 0).
---@param std? number Their deviation, before it is cut (default: 1).
---@param a? number The least (default: -2).
---@param b? number The largest (default: 2).
---@return peri.Tensor # t, of its shape.
function init.trunc_normal_(t, mean, std, a, b) end

---One number everywhere.
---
---Errors: what is no number.
---@param t peri.Tensor Any shape.
---@param value number The number.
---@return peri.Tensor # t, of its shape.
function init.constant_(t, value) end

---Zeros everywhere.
---
---Errors: what is no tensor.
---@param t peri.Tensor Any shape.
---@return peri.Tensor # t, of its shape.
function init.zeros_(t) end

---Ones everywhere.
---
---Errors: what is no tensor.
---@param t peri.Tensor Any shape.
---@return peri.Tensor # t, of its shape.
function init.ones_(t) end

---Glorot and Bengio: uniform numbers of deviation `gain * sqrt(2 / (fan in + fan out))`.
---
---Errors: fewer than two dimensions.
---@param t peri.Tensor A weight: `[out, in, ...]`, two dimensions at least.
---@param gain? number A factor (default: 1).
---@return peri.Tensor # t, of its shape.
function init.xavier_uniform_(t, gain) end

---As `xavier_uniform_`, with normally distributed numbers.
---
---Errors: fewer than two dimensions.
---@param t peri.Tensor A weight: `[out, in, ...]`, two dimensions at least.
---@param gain? number A factor (default: 1).
---@return peri.Tensor # t, of its shape.
function init.xavier_normal_(t, gain) end

---He and others: uniform numbers of deviation `gain / sqrt(fan)`.
---
---Errors: fewer than two dimensions; an unknown mode or function.
---@param t peri.Tensor A weight: `[out, in, ...]`, two dimensions at least.
---@param args? peri.nn.init.kaiming.args Arguments by name (default: none).
---@return peri.Tensor # t, of its shape.
function init.kaiming_uniform_(t, args) end

---As `kaiming_uniform_`, with normally distributed numbers.
---
---Errors: fewer than two dimensions; an unknown mode or function.
---@param t peri.Tensor A weight: `[out, in, ...]`, two dimensions at least.
---@param args? peri.nn.init.kaiming.args Arguments by name (default: none).
---@return peri.Tensor # t, of its shape.
function init.kaiming_normal_(t, args) end

---An orthogonal matrix: taken as `[rows, columns]`, its rows are orthonormal or, if they are more than the columns, its
---columns.
---
---Errors: fewer than two dimensions.
---@param t peri.Tensor A weight: `[out, in, ...]`, two dimensions at least.
---@param gain? number A factor (default: 1).
---@return peri.Tensor # t, of its shape.
function init.orthogonal_(t, gain) end

---@class peri.nn.init.kaiming.args
---@field a? number The slope of leaky_relu for negative numbers (default: 0).
---@field mode? string `fan_in` keeps deviations forward, `fan_out` backward (default: fan_in).
---@field nonlinearity? string The function behind the layer (default: leaky_relu).

---By how much deviations have to grow for a layer with such a function behind it.
---
---Errors: an unknown function; the error lists those that are known.
---@param nonlinearity string `linear`, `sigmoid`, `tanh`, `relu`, `leaky_relu` or `selu`.
---@param param? number The slope of leaky_relu (default: 0.01).
---@return number
function init.calculate_gain(nonlinearity, param) end
