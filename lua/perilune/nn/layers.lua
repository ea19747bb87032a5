-- layers.lua: containers and the layers of a dense network. Names and arguments are PyTorch's and TorchRec's.
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local Tensor = require "perilune.tensor"
local util = require "perilune.util"
local F = require "perilune.nn.functional"
local Module = require "perilune.nn.module"
local signature = require "perilune.signature"
local parameter = require "perilune.nn.parameter"

local M = {}

-- -- containers -------------------------------------------------------------------------------------------------------

--- A list of modules: list[1] is the first, whose name in paths is "0", as in PyTorch.
local ModuleList = Module:extend "ModuleList"
M.ModuleList = ModuleList
function ModuleList:init(modules)
  if type(modules) ~= "nil" and (type(modules) ~= "table" or Module.is(modules)) then
    P.fail(("%s: a list of modules is wanted, { module, module }, not %s"):format(self.class_name,
      errors.kind(modules)))
  end
  local fault = modules and util.list_fault(modules)
  if fault then P.fail(("%s: the list of modules %s"):format(self.class_name, fault)) end
  for _, m in ipairs(modules or {}) do self:append(m) end
end
--- See util.seal.
function ModuleList.set_advice(_, key)
  return type(key) == "number" and "modules come with ModuleList { ... }, append(module) and replace(name, module)"
end

function ModuleList:append(module)
  local n = #self._children
  self:add_module(tostring(n), module)
  rawset(self, n + 1, module)
  return self
end
function ModuleList:replace(name, module)
  Module.replace(self, name, module)
  rawset(self, tonumber(name) + 1, module)
end

--- An error unless a dictionary can have something under a name: one that it has already (a list), or one that means
--- nothing else in a module.
local function check_name(dict, name, names)
  if type(name) ~= "string" or name:find(".", 1, true) then
    P.fail(("%s: the name %s, wanted a string without points"):format(dict.class_name, errors.kind(name)))
  end
  if dict[name] ~= nil and not util.index_of(names)[name] then
    P.fail(("%s: the name '%s', which all modules have for something else"):format(dict.class_name, name))
  end
end

--- Modules by name: dict.name is one; they run through paths, state dicts and named_children in the order of their
--- names, or, of those that `update` and `add_module` bring, in which they came.
local ModuleDict = Module:extend "ModuleDict"
M.ModuleDict = ModuleDict
function ModuleDict:init(modules) self:update(modules or {}) end
--- Add the modules of a table, or put them in the place of those that have their names.
function ModuleDict:update(modules)
  if type(modules) ~= "table" or Module.is(modules) then
    P.fail(("ModuleDict: a table of modules is wanted, { name = module }, not %s"):format(errors.kind(modules)))
  end
  for name, module in util.ordered(modules) do
    check_name(self, name, self._children)
    self:add_module(name, module)
  end
  return self
end
--- The names, in order.
function ModuleDict:keys() return util.map(self._children, function(name) return name end) end

--- A list of modules, each called with what the one before returned.
local Sequential = ModuleList:extend "Sequential"
M.Sequential = Sequential
function Sequential:forward(x)
  for i = 1, #self._children do x = self[i](x) end
  return x
end

--- A list of parameters: list[1] is the first, named "0".
local ParameterList = Module:extend "ParameterList"
M.ParameterList = ParameterList
function ParameterList:init(parameters)
  if type(parameters) ~= "nil" and type(parameters) ~= "table" then
    P.fail(("ParameterList: a %s, wanted a list of tensors"):format(type(parameters)))
  end
  for i, p in ipairs(parameters or {}) do
    self:register_parameter(tostring(i - 1), p)
    rawset(self, i, p)
  end
end

--- Parameters by name: dict.name is one; in the order of their names, or, of those that `update` brings later, in which
--- they came.
local ParameterDict = Module:extend "ParameterDict"
M.ParameterDict = ParameterDict
function ParameterDict:init(parameters) self:update(parameters or {}) end
--- Add the parameters of a table, or put them in the place of those that have their names.
function ParameterDict:update(parameters)
  if type(parameters) ~= "table" or Module.is(parameters) then
    P.fail(("ParameterDict: a table of parameters is wanted, { name = parameter }, not %s"):format(
      errors.kind(parameters)))
  end
  for name, p in util.ordered(parameters) do
    check_name(self, name, self._parameters)
    self:register_parameter(name, p)
  end
  return self
end
--- The names, in order.
function ParameterDict:keys() return util.map(self._parameters, function(name) return name end) end

-- -- activations ------------------------------------------------------------------------------------------------------

local function activation(name, f)
  local class = Module:extend(name)
  function class:init(args) util.named(name, args or {}, {}) end -- luacheck: ignore 212
  function class:forward(x) return f(x) end
  M[name] = class
end
activation("Identity", function(x) return x end)
activation("ReLU", F.relu)
activation("Sigmoid", F.sigmoid)
activation("Tanh", F.tanh)
activation("SiLU", F.silu)
activation("GELU", F.gelu)
activation("Softplus", F.softplus)
activation("LogSigmoid", F.logsigmoid)

M.ELU = Module:extend "ELU"
function M.ELU:init(args) self.alpha = util.named("ELU", args or {}, { alpha = util.finite(1) }).alpha end
function M.ELU:forward(x) return F.elu(x, self.alpha) end

--- The argument dim of a class.
local function dim_of(name, args)
  return signature.value(name, "dim", util.named(name, args, { dim = util.required }).dim, "dim")
end

M.LogSoftmax = Module:extend "LogSoftmax"
function M.LogSoftmax:init(args) self.dim = dim_of("LogSoftmax", args) end
function M.LogSoftmax:forward(x) return F.log_softmax(x, self.dim) end

--- The dimensions from start_dim (2) to end_dim (-1) as one.
M.Flatten = Module:extend "Flatten"
function M.Flatten:init(args)
  local a = util.named("Flatten", args or {}, { start_dim = 2, end_dim = -1 })
  self.start_dim = signature.value("Flatten", "start_dim", a.start_dim, "dim")
  self.end_dim = signature.value("Flatten", "end_dim", a.end_dim, "dim")
end
function M.Flatten:forward(x) return F.flatten(x, self.start_dim, self.end_dim) end

M.LeakyReLU = Module:extend "LeakyReLU"
function M.LeakyReLU:init(args)
  self.negative_slope = util.named("LeakyReLU", args, { negative_slope = util.finite(0.01) }).negative_slope
end
function M.LeakyReLU:forward(x) return F.leaky_relu(x, self.negative_slope) end

M.Softmax = Module:extend "Softmax"
function M.Softmax:init(args) self.dim = dim_of("Softmax", args) end
function M.Softmax:forward(x) return F.softmax(x, self.dim) end

--- x where it is above 0, else weight * x: one trained number (num_parameters 1), or one for each element of dimension
--- 2.
local PReLU = Module:extend "PReLU"
M.PReLU = PReLU
function PReLU:init(args)
  local a = util.named("PReLU", args or {}, { num_parameters = util.whole(1, 1), init = util.finite(0.25),
    dtype = "f32", device = util.optional })
  self.num_parameters = a.num_parameters
  self.weight = parameter.full({ a.num_parameters }, a.init, a.dtype, a.device)
end
function PReLU:forward(x)
  local weight, shape = self.weight, {}
  if self.num_parameters > 1 then
    if x:dim() < 2 or x:size(2) ~= self.num_parameters then
      P.fail(("PReLU: %s, wanted a dimension 2 of size %d"):format(Tensor._text(x), self.num_parameters))
    end
    for d = 2, x:dim() do shape[d - 1] = d == 2 and self.num_parameters or 1 end
    weight = weight:reshape(shape)
  end
  return F.where(F.gt(x, 0), x, F.mul(weight, x))
end
function PReLU:extra_text() return "num_parameters=" .. self.num_parameters end

-- -- linear -----------------------------------------------------------------------------------------------------------

--- x W^T + b; weight [out_features, in_features] and bias start uniform in +-1 / sqrt(in_features).
local Linear = Module:extend "Linear"
M.Linear = Linear
function Linear:init(args)
  local a = util.named("Linear", args, { in_features = util.whole(util.required, 0),
    out_features = util.whole(util.required, 0), bias = true, dtype = "f32", device = util.optional })
  self.in_features, self.out_features = a.in_features, a.out_features
  local bound = 1 / math.sqrt(math.max(a.in_features, 1))
  self.weight = parameter.uniform({ a.out_features, a.in_features }, -bound, bound, a.dtype, a.device)
  self.bias = a.bias and parameter.uniform({ a.out_features }, -bound, bound, a.dtype, a.device)
end
function Linear:forward(x) return F.linear(x, self.weight, self.bias) end
function Linear:extra_text()
  local inner, out = self.in_features, self.out_features
  return ("in_features=%d, out_features=%d, bias=%s"):format(inner or 0, out or 0, tostring(self.bias and true))
end

--- A Linear whose in_features is the last size of what it is called with first. Until then it has no parameters, and to
--- ask for those, or for its state, is an error.
local LazyLinear = Linear:extend "LazyLinear"
M.LazyLinear = LazyLinear
function LazyLinear:init(args)
  self._made_of = util.named("LazyLinear", args, { out_features = util.whole(util.required, 0), bias = true,
    dtype = "f32", device = util.optional })
  self.in_features, self.out_features, self.weight, self.bias = false, self._made_of.out_features, false, false
  self._awaits = "a first call, which tells in_features"
end
function LazyLinear:forward(x)
  if self._awaits then
    if x:dim() < 1 then P.fail(("LazyLinear: %s, wanted one dimension and more"):format(Tensor._text(x))) end
    local linear = Linear { in_features = x:size(-1), out_features = self.out_features, bias = self._made_of.bias,
      dtype = self._made_of.dtype, device = self._made_of.device or x:device() }
    self.in_features, self._awaits = linear.in_features, false
    self:register_parameter("weight", P.keep(linear.weight))
    if linear.bias then self:register_parameter("bias", P.keep(linear.bias)) end
  end
  return F.linear(x, self.weight, self.bias or nil)
end

-- -- normalisation ----------------------------------------------------------------------------------------------------

--- A size, or a list of sizes, as a list.
local function shape_of(func, what, value)
  if type(value) == "number" then value = { value } end
  if type(value) ~= "table" or #value == 0 then
    P.fail(("%s: %s is %s, wanted a size or a list of sizes"):format(func, what, errors.kind(value)))
  end
  for i = 1, #value do util.integer(func, #value == 1 and what or ("%s[%d]"):format(what, i), value[i], 0) end
  return value
end

local LayerNorm = Module:extend "LayerNorm"
M.LayerNorm = LayerNorm
function LayerNorm:init(args)
  local a = util.named("LayerNorm", args,
    { normalized_shape = util.required, eps = util.from(1e-5, 0), elementwise_affine = true, bias = true, dtype = "f32",
      device = util.optional })
  self.normalized_shape, self.eps = shape_of("LayerNorm", "normalized_shape", a.normalized_shape), a.eps
  self.weight = a.elementwise_affine and parameter.ones(self.normalized_shape, a.dtype, a.device)
  self.bias = a.elementwise_affine and a.bias and parameter.zeros(self.normalized_shape, a.dtype, a.device)
end
function LayerNorm:forward(x) return F.layer_norm(x, #self.normalized_shape, self.weight, self.bias, self.eps) end

--- x divided by the root of the mean of its squares, times the weight. eps: as in functional.rms_norm.
local RMSNorm = Module:extend "RMSNorm"
M.RMSNorm = RMSNorm
function RMSNorm:init(args)
  local a = util.named("RMSNorm", args, { normalized_shape = util.required, eps = util.from(nil, 0),
    elementwise_affine = true, dtype = "f32", device = util.optional })
  self.normalized_shape, self.eps = shape_of("RMSNorm", "normalized_shape", a.normalized_shape), a.eps or false
  self.weight = a.elementwise_affine and parameter.ones(self.normalized_shape, a.dtype, a.device)
end
function RMSNorm:forward(x)
  return F.rms_norm(x, #self.normalized_shape, self.weight or nil, self.eps or nil)
end

--- x * sigmoid(LayerNorm(x)); input_dims: a size or a list of sizes.
local SwishLayerNorm = Module:extend "SwishLayerNorm"
M.SwishLayerNorm = SwishLayerNorm
function SwishLayerNorm:init(args)
  local a = util.named("SwishLayerNorm", args, { input_dims = util.required, dtype = "f32", device = util.optional })
  local sizes = shape_of("SwishLayerNorm", "input_dims", a.input_dims)
  self.norm = Sequential { LayerNorm { normalized_shape = sizes, dtype = a.dtype, device = a.device },
    M.Sigmoid() }
end
function SwishLayerNorm:forward(x) return F.mul(x, self.norm(x)) end

--- Normalise each column of [B, C] over the batch; in evaluation mode by the running mean and variance.
local BatchNorm1d = Module:extend "BatchNorm1d"
M.BatchNorm1d = BatchNorm1d
function BatchNorm1d:init(args)
  local a = util.named("BatchNorm1d", args, { num_features = util.whole(util.required, 0), eps = util.from(1e-5, 0),
    momentum = util.from(0.1, 0, 1), affine = true, dtype = "f32", device = util.optional })
  self.num_features, self.eps, self.momentum = a.num_features, a.eps, a.momentum
  self.weight = a.affine and parameter.ones({ a.num_features }, a.dtype, a.device)
  self.bias = a.affine and parameter.zeros({ a.num_features }, a.dtype, a.device)
  self:register_buffer("running_mean", parameter.buffer({ a.num_features }, 0, a.dtype, a.device))
  self:register_buffer("running_var", parameter.buffer({ a.num_features }, 1, a.dtype, a.device))
end
local function update_running(running, now, momentum)
  running:copy(F.add(F.affine(running, 1 - momentum), F.affine(now, momentum)))
end
function BatchNorm1d:forward(x)
  if x:dim() ~= 2 or x:size(2) ~= self.num_features then -- others would be broadcast
    P.fail(("BatchNorm1d: x is [%s], wanted [samples, %d]"):format(table.concat(x:shape(), ", "), self.num_features))
  end
  local mean, var = self.running_mean, self.running_var
  if self.training then
    local n = x:size(1)
    if n < 2 then P.fail(("BatchNorm1d: a batch of %d in training, at least 2 are needed"):format(n)) end
    mean = F.mean(x, 1)
    local centred = F.sub(x, mean)
    var = F.mean(F.square(centred), 1)
    P.no_grad(update_running, self.running_mean, mean:detach(), self.momentum)
    P.no_grad(update_running, self.running_var, F.affine(var:detach(), n / (n - 1)), self.momentum)
  end
  local y = F.div(F.sub(x, mean), F.sqrt(F.affine(var, 1, self.eps)))
  if self.weight then y = F.add(F.mul(y, self.weight), self.bias) end
  return y
end

--- In training mode, zero elements with probability p and scale the others. The mask is a function of the seed, this
--- layer's number, how often it ran, and the element's number in the batch of all ranks, by what the batch says that
--- the model is called with (P.state.batch): global_row, the number of its first sample, and rows, of this rank. A
--- tensor whose first size is no multiple of rows is not of samples.
local Dropout = Module:extend "Dropout"
M.Dropout = Dropout
function Dropout:init(args)
  self.p = util.named("Dropout", args, { p = util.below(0.5, 0, 1) }).p
  self.seed, self.stream, self.step = P.state.seed, parameter._dropout_stream(), 0
end

--- The number, in the batch of all ranks, of the first element of a tensor of `rows` rows and `numel` elements.
local function first_element(rows, numel)
  local batch = P.state.batch
  if not batch or rows == 0 then return 0 end
  local samples, first = batch.rows or rows, batch.global_row
  signature.value("Dropout", "the batch's global_row", first, "count")
  signature.value("Dropout", "the batch's rows", samples, "count")
  return samples > 0 and rows % samples == 0 and first * (numel / samples) or 0
end

--- What draws the next mask's numbers when a captured call is replayed. A function of its own: LuaJIT compiles none
--- that makes functions.
local function drawing(dropout, rows, numel) return function() return dropout:_draw(rows, numel) end end

function Dropout:forward(x)
  if not self.training or self.p == 0 then return x end
  local d = x:describe()
  local rows, numel = d.ndim > 0 and tonumber(d.shape[0]) or 0, tonumber(d.numel)
  local capturing = P.state.capturing
  if capturing then capturing[#capturing + 1] = drawing(self, rows, numel) end
  return F.dropout(x, self.p, self:_draw(rows, numel))
end
--- Seed, stream and offset of the next mask.
function Dropout:_draw(rows, numel)
  local stream = self.stream + self.step
  self.step = self.step + 1
  return self.seed, stream, first_element(rows, numel)
end
Dropout._moving = { step = true } -- fields that change in each call, also in one that is replayed (graphed.lua)
--- What decides which elements it leaves out next.
function Dropout:get_extra_state() return { seed = self.seed, stream = self.stream, step = self.step } end
function Dropout:set_extra_state(state) self.seed, self.stream, self.step = state.seed, state.stream, state.step end
signature.object("dropout_state", "what get_extra_state returned", { stream = "number", step = "number" })
signature.check("Dropout:", Dropout, { set_extra_state = "self: table, state: dropout_state" })
function Dropout:extra_text() return "p=" .. self.p end

-- -- perceptrons ------------------------------------------------------------------------------------------------------

--- A function, a Module, or the name of an activation -> the code that F.linear fuses, or a callable.
local function resolve(func, value)
  if value == nil or value == "none" then return F.activations.none end
  if F.activations[value] then return F.activations[value] end
  if value == F.relu or value == F.sigmoid or value == F.tanh then
    return F.activations[value == F.relu and "relu" or value == F.sigmoid and "sigmoid" or "tanh"]
  end
  if type(value) == "function" or Module.is(value) then return F.activations.none, value end
  P.fail(("%s: activation '%s', allowed: none, relu, sigmoid, tanh, a function or a Module"):format(func,
    type(value) == "string" and value or errors.kind(value)))
end

--- activation(x W^T + b). activation: "relu" (default), "sigmoid", "tanh", "none", a function or a Module.
local Perceptron = Module:extend "Perceptron"
M.Perceptron = Perceptron
function Perceptron:init(args)
  local a = util.named("Perceptron", args,
    { in_size = util.whole(util.required, 0), out_size = util.whole(util.required, 0), bias = true,
      activation = "relu", dtype = "f32", device = util.optional })
  self._linear = Linear { in_features = a.in_size, out_features = a.out_size, bias = a.bias, dtype = a.dtype,
    device = a.device }
  local code, fn = resolve("Perceptron", a.activation)
  self._code = code
  self._activation_fn = fn or false
end
function Perceptron:forward(x)
  local linear, fn = self._linear, self._activation_fn
  local y = F.linear(x, linear.weight, linear.bias, self._code)
  if fn then return fn(y) end
  return y
end

--- Perceptrons one after the other. activation as in Perceptron, or "swish_layernorm"; a Module class makes one for
--- each layer.
local MLP = Module:extend "MLP"
M.MLP = MLP
function MLP:init(args)
  local a = util.named("MLP", args,
    { in_size = util.whole(util.required, 0), layer_sizes = util.required.list, bias = true, activation = "relu",
      dtype = "f32", device = util.optional })
  for i, size in ipairs(a.layer_sizes) do util.integer("MLP", ("layer_sizes[%d]"):format(i), size, 0) end
  local layers, size = {}, a.in_size
  for i, out in ipairs(a.layer_sizes) do
    local fn = a.activation
    if fn == "swish_layernorm" then fn = SwishLayerNorm { input_dims = out, dtype = a.dtype, device = a.device } end
    if type(fn) == "table" and rawget(fn, "class_name") then fn = fn() end
    layers[i] = Perceptron { in_size = size, out_size = out, bias = a.bias, activation = fn, dtype = a.dtype,
      device = a.device }
    size = out
  end
  self._mlp = Sequential(layers)
end
function MLP:forward(x) -- a loop of its own: one Sequential inside another would be a recursion, which compiles badly
  local list = self._mlp
  for i = 1, #list._children do x = list[i](x) end
  return x
end

for _, name in ipairs { "BatchNorm1d", "Dropout" } do
  signature.check(name .. ":", M[name], { forward = "self: table, x: tensor" })
end

return M
