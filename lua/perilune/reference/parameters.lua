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
---print(nn.Linear({ in_features = 1, out_features = 1 }).weight:item() == a.weight:item()) --> true
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
