-- layers_more.lua: A transformer's layer, parameters by name, losses of likelihoods, nn.utils.
--
-- Layers and losses whose names, arguments and parameters are PyTorch's.
---@meta

---@class peri.nn
local nn = {}

---@class peri.nn.utils
local utils = {}

---A layer of a transformer, as PyTorch's: attention of a sequence to itself, and two linear layers. What each of both
---was called with is added to its result, and the sum is normalised. Parameters: those of `self_attn`, `linear1`,
---`linear2`, `norm1` and `norm2`.
---
---Errors: a d_model that the heads do not divide; another activation.
---
---```lua
---local block = nn.TransformerEncoderLayer { d_model = 8, nhead = 2, batch_first = true }
---print(block(peri.randn { 3, 5, 8 }):size(2)) --> 5
---```
---@class peri.nn.TransformerEncoderLayer: peri.nn.Module
---@overload fun(args: peri.nn.TransformerEncoderLayer.args): peri.nn.TransformerEncoderLayer
nn.TransformerEncoderLayer = {}

---@class peri.nn.TransformerEncoderLayer.args
---@field d_model integer E, the size of the vectors.
---@field nhead integer Heads of the attention.
---@field dim_feedforward? integer Size between the two linear layers (default: 2048).
---@field dropout? number Share that is dropped in training (default: 0.1).
---@field activation? string|fun(x: peri.Tensor): peri.Tensor `"relu"`, `"gelu"`, or a function or module whose result has the shape of its input (default: relu).
---@field layer_norm_eps? number Added to variances (default: 1e-5).
---@field batch_first? boolean Whether inputs are [B, L, E] instead of [L, B, E] (default: false).
---@field norm_first? boolean Normalise before attention and linear layers, instead of behind (default: false).
---@field bias? boolean Whether products and normalisations have biases (default: true).
---@field dtype? string dtype of the parameters: `f32` or `f64` (default: f32).
---@field device? string Where they are (default: that of the rank).

---Compute the layer. Calling the module calls it. Masks are those of `MultiheadAttention`.
---
---Errors: shapes that do not fit.
---
---```lua
---local block = nn.TransformerEncoderLayer { d_model = 4, nhead = 1 }
---local later = peri.ones({ 3, 3 }):triu(1):gt(0) -- true is left out
---print(block:forward(peri.zeros { 3, 2, 4 }, { src_mask = later }):size(1)) --> 3
---```
---@param src peri.Tensor `[L, B, E]`, or `[B, L, E]` with batch_first.
---@param options? table `src_mask` [L, L] and `src_key_padding_mask` [B, L] (default: none).
---@return peri.Tensor # The shape of src.
function nn.TransformerEncoderLayer:forward(src, options) end

---A `Linear` that learns `in_features` from what it is called with first. Until then it has no parameters: make the
---optimizer, and wrap the model, after a first call.
---
---Errors: its parameters or its state are asked for before the first call.
---
---```lua
---local layer = nn.LazyLinear { out_features = 2 }
---layer(peri.zeros { 1, 3 })
---print(layer.in_features) --> 3
---```
---@class peri.nn.LazyLinear: peri.nn.Linear
---@overload fun(args: peri.nn.LazyLinear.args): peri.nn.LazyLinear
nn.LazyLinear = {}

---@class peri.nn.LazyLinear.args
---@field out_features integer Size of the results.
---@field bias? boolean Whether something is added to the product (default: true).
---@field dtype? string dtype of the parameters: `f32` or `f64` (default: f32).
---@field device? string Where they are (default: where the first input is).

---Compute the layer, and at the first call make its parameters. Calling the module calls it.
---
---Errors: another last size than that of the first call.
---
---```lua
---print(nn.LazyLinear({ out_features = 2 }):forward(peri.zeros { 4, 3 }):size(2)) --> 2
---```
---@param x peri.Tensor `[..., in_features]`.
---@return peri.Tensor # `[..., out_features]`.
function nn.LazyLinear:forward(x) end

---Parameters by name: `dict.name` is one. They are in the order of their names.
---
---Errors: an entry that is no parameter; a name that all modules have for something else.
---
---```lua
---print(nn.ParameterDict({ scale = nn.Parameter(peri.ones { 3 }) }).scale:numel()) --> 3
---```
---@class peri.nn.ParameterDict: peri.nn.Module
---@param parameters? table<string, peri.Tensor> Parameters of any shape (default: none).
---@overload fun(parameters?: table<string, peri.Tensor>): peri.nn.ParameterDict
nn.ParameterDict = {}

---Add the parameters of a table, or put them in the place of those that have their names.
---
---Errors: as those of the constructor.
---
---```lua
---local dict = nn.ParameterDict {}
---print(#dict:update({ b = nn.Parameter(peri.ones { 1 }) }):parameters()) --> 1
---```
---@param parameters table<string, peri.Tensor> Parameters of any shape.
---@return peri.nn.ParameterDict # Itself.
function nn.ParameterDict:update(parameters) end

---The names, in order.
---
---```lua
---print(nn.ParameterDict({ a = nn.Parameter(peri.ones { 1 }) }):keys()[1]) --> a
---```
---@return string[] # The names.
function nn.ParameterDict:keys() end

---`functional.poisson_nll_loss`. Called with the logarithms of means and with counts.
---
---Errors: an unknown argument or reduction; shapes that do not fit.
---
---```lua
---print(peri.nn.PoissonNLLLoss {}(peri.zeros { 2 }, peri.ones { 2 }):item()) --> 1
---```
---@class peri.nn.PoissonNLLLoss: peri.nn.Loss
---@overload fun(args: peri.nn.PoissonNLLLoss.args): peri.nn.PoissonNLLLoss
nn.PoissonNLLLoss = {}

---@class peri.nn.PoissonNLLLoss.args
---@field log_input? boolean It is called with logarithms of means; false: with means (default: true).
---@field full? boolean With the term that depends on the target alone (default: false).
---@field eps? number Added to means within the logarithm (default: 1e-8).
---@field reduction? string `"mean"`, `"sum"`, `"none"`, or `"global_mean"`: over the samples of all ranks (default: mean).
---@field group? peri.dist.Group|boolean The ranks of a global mean (default: those that train the model).

---`functional.gaussian_nll_loss`. Called with means, what came, and variances.
---
---Errors: an unknown argument or reduction; shapes that do not fit; a negative variance.
---
---```lua
---local t = peri.ones { 1 }
---print(peri.nn.GaussianNLLLoss {}(t, t * 3, t):item()) --> 2
---```
---@class peri.nn.GaussianNLLLoss: peri.nn.Loss
---@overload fun(args: peri.nn.GaussianNLLLoss.args): peri.nn.GaussianNLLLoss
nn.GaussianNLLLoss = {}

---@class peri.nn.GaussianNLLLoss.args
---@field full? boolean With the constant log(2 pi) / 2 (default: false).
---@field eps? number The least variance (default: 1e-6).
---@field reduction? string `"mean"`, `"sum"`, `"none"`, or `"global_mean"`: over the samples of all ranks (default: mean).
---@field group? peri.dist.Group|boolean The ranks of a global mean (default: those that train the model).

---All elements of parameters in one dimension, one parameter after the other. Gradients go through.
---
---Errors: an empty list; an entry that is no tensor.
---
---```lua
---local layer = nn.Linear { in_features = 3, out_features = 2 }
---print(nn.utils.parameters_to_vector(layer:parameters()):numel()) --> 8
---```
---@param parameters peri.Tensor[] Tensors of any shape, all of one device.
---@return peri.Tensor # `[elements of all]`.
function utils.parameters_to_vector(parameters) end

---Write the elements of a vector into parameters, in the order of `parameters_to_vector`.
---
---Errors: a vector of another size than the parameters have together.
---
---```lua
---local layer = nn.Linear { in_features = 1, out_features = 1 }
---nn.utils.vector_to_parameters(peri.tensor { 2, 3 }, layer:parameters())
---print(layer(peri.ones { 1 }):item()) --> 5
---```
---@param vector peri.Tensor `[elements of all]`.
---@param parameters peri.Tensor[] What is overwritten: tensors of any shape.
function utils.vector_to_parameters(vector, parameters) end

---Sequences of different lengths as one tensor, with a number behind the ends of the shorter ones.
---
---Errors: an empty list; sequences that differ in other sizes than the first.
---
---```lua
---local both = nn.utils.pad_sequence({ peri.arange(3), peri.arange(1) }, true)
---print(both:size(2), both:to_list()[5]) --> 3 0
---```
---@param sequences peri.Tensor[] Each `[its length, ...]`.
---@param batch_first? boolean The result is [B, longest, ...] (default: false: [longest, B, ...]).
---@param padding_value? number The number behind the ends (default: 0).
---@return peri.Tensor # `[B, longest, ...]` or `[longest, B, ...]`.
function utils.pad_sequence(sequences, batch_first, padding_value) end
