-- interaction.lua: how dense and sparse features meet: DLRM's pairwise products, cross networks, factorization
-- machines.
-- Dense features are [B, D], sparse ones [B, F, D]. Names, arguments and formulas are TorchRec's.
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local F = require "perilune.nn.functional"
local Module = require "perilune.nn.module"
local layers = require "perilune.nn.layers"
local parameter = require "perilune.nn.parameter"
local signature = require "perilune.signature"

local M = {}

-- -- DLRM -------------------------------------------------------------------------------------------------------------

local function callable(func, args, name) return signature.value(func, name, args[name], "module") end

--- [B, D + F + F (F - 1) / 2]: the dense features, then the dot products of all pairs.
local InteractionArch = Module:extend "InteractionArch"
M.InteractionArch = InteractionArch
function InteractionArch:init(args)
  self.num_sparse_features = util.named("InteractionArch", args,
    { num_sparse_features = util.whole(util.required, 0) }).num_sparse_features
end
function InteractionArch:forward(dense_features, sparse_features)
  local n = self.num_sparse_features
  if n == 0 then return dense_features end
  if Tensor.is(sparse_features) and sparse_features:dim() == 3 and sparse_features:size(2) ~= n then
    P.fail(("InteractionArch: sparse_features is %s, wanted [B, %d, D]: num_sparse_features is %d"):format(
      Tensor._text(sparse_features), n, n))
  end
  return F.interaction(dense_features, sparse_features)
end

--- [B, ...] as [B, numbers]. Not by reshape with -1, which says nothing of an empty batch.
local function as_rows(x) return x:dim() == 1 and F.unsqueeze(x, 2) or F.flatten(x, 2) end

--- dense and sparse features as one row of (F + 1) D numbers
local function combined(dense_features, sparse_features)
  return F.cat({ dense_features, as_rows(sparse_features) }, 2)
end

--- A cross network over the concatenated features.
local InteractionDCNArch = Module:extend "InteractionDCNArch"
M.InteractionDCNArch = InteractionDCNArch
function InteractionDCNArch:init(args)
  local a = util.named("InteractionDCNArch", args,
    { num_sparse_features = util.whole(util.required, 0), crossnet = util.required })
  self.num_sparse_features, self.crossnet = a.num_sparse_features, callable("InteractionDCNArch", a, "crossnet")
end
function InteractionDCNArch:forward(dense_features, sparse_features)
  if self.num_sparse_features <= 0 then return dense_features end
  return self.crossnet(combined(dense_features, sparse_features))
end

--- The features go through two branches, whose results, as [B, I1, D] and [B, D, I2], are multiplied.
local InteractionProjectionArch = Module:extend "InteractionProjectionArch"
M.InteractionProjectionArch = InteractionProjectionArch
function InteractionProjectionArch:init(args)
  local a = util.named("InteractionProjectionArch", args,
    { num_sparse_features = util.whole(util.required, 0), interaction_branch1 = util.required,
      interaction_branch2 = util.required })
  self.num_sparse_features = a.num_sparse_features
  self.interaction_branch1 = callable("InteractionProjectionArch", a, "interaction_branch1")
  self.interaction_branch2 = callable("InteractionProjectionArch", a, "interaction_branch2")
end
function InteractionProjectionArch:forward(dense_features, sparse_features)
  if self.num_sparse_features <= 0 then return dense_features end
  local batch, dim = dense_features:size(1), dense_features:size(2)
  local x = combined(dense_features, sparse_features)
  local left, right = self.interaction_branch1(x), self.interaction_branch2(x)
  left = left:reshape(batch, math.floor(left:size(2) / dim), dim)
  right = right:reshape(batch, dim, math.floor(right:size(2) / dim))
  return F.cat({ dense_features, as_rows(F.matmul(left, right)) }, 2)
end

-- -- cross networks ---------------------------------------------------------------------------------------------------

local MOST = 4096 -- layers, and experts

--- A parameter for each layer: make(shape, dtype, device).
local function of_layers(num_layers, make, shape, a)
  local list = {}
  for i = 1, util.integer("cross network", "num_layers", num_layers, 0, MOST) do
    list[i] = make(shape, a.dtype, a.device)
  end
  return layers.ParameterList(list)
end
local function kernels(num_layers, shape, a) return of_layers(num_layers, parameter.xavier_normal, shape, a) end
local function biases(num_layers, shape, a) return of_layers(num_layers, parameter.zeros, shape, a) end

--- x = x0 * (W x + b) + x in each layer. wide_kernels: the field with the matrices whose products have the dtype of x0
--- under autocast, too (plan/describe.lua reads it).
local CrossNet = Module:extend "CrossNet"
M.CrossNet = CrossNet
CrossNet.wide_kernels = "kernels"
function CrossNet:init(args)
  local a = util.named("CrossNet", args, { in_features = util.whole(util.required, 1),
    num_layers = util.whole(util.required, 0), dtype = "f32", device = util.optional })
  self.num_layers = a.num_layers
  self.kernels = kernels(a.num_layers, { a.in_features, a.in_features }, a)
  self.bias = biases(a.num_layers, { a.in_features, 1 }, a)
end
function CrossNet:forward(x0)
  if self.num_layers == 0 then return x0 end
  return F.cross_net(x0, nil, self.kernels, self.bias)
end

--- x = x0 * (W V x + b) + x, with V to low_rank numbers and W back.
local LowRankCrossNet = Module:extend "LowRankCrossNet"
M.LowRankCrossNet = LowRankCrossNet
LowRankCrossNet.wide_kernels = "W_kernels"
function LowRankCrossNet:init(args)
  local a = util.named("LowRankCrossNet", args,
    { in_features = util.whole(util.required, 1), num_layers = util.whole(util.required, 0),
      low_rank = util.whole(1, 1), dtype = "f32", device = util.optional })
  self.num_layers = a.num_layers
  self.W_kernels = kernels(a.num_layers, { a.in_features, a.low_rank }, a)
  self.V_kernels = kernels(a.num_layers, { a.low_rank, a.in_features }, a)
  self.bias = biases(a.num_layers, { a.in_features }, a)
end
function LowRankCrossNet:forward(x0)
  if self.num_layers == 0 then return x0 end
  return F.cross_net(x0, self.V_kernels, self.W_kernels, self.bias)
end

--- x = x0 * (w . x) + b + x in each layer.
local VectorCrossNet = Module:extend "VectorCrossNet"
M.VectorCrossNet = VectorCrossNet
function VectorCrossNet:init(args)
  local a = util.named("VectorCrossNet", args, { in_features = util.whole(util.required, 1),
    num_layers = util.whole(util.required, 0), dtype = "f32", device = util.optional })
  self.num_layers = a.num_layers
  self.kernels = kernels(a.num_layers, { a.in_features, 1 }, a)
  self.bias = biases(a.num_layers, { a.in_features, 1 }, a)
end
function VectorCrossNet:forward(x0)
  local x = x0
  for l = 1, self.num_layers do
    x = F.add(F.add(F.mul(x0, F.matmul(x, self.kernels[l])), self.bias[l]:reshape(-1)), x)
  end
  return x
end

--- Per layer and expert e: x0 * (U_e f(C_e f(V_e x)) + b); the experts are weighted by a softmax of gates, and x is
--- added. activation: "relu" (default), "sigmoid", "tanh", "none" or a function.
local LowRankMixtureCrossNet = Module:extend "LowRankMixtureCrossNet"
M.LowRankMixtureCrossNet = LowRankMixtureCrossNet
function LowRankMixtureCrossNet:init(args)
  local a = util.named("LowRankMixtureCrossNet", args,
    { in_features = util.whole(util.required, 1), num_layers = util.whole(util.required, 0),
      num_experts = util.whole(1, 1, MOST), low_rank = util.whole(1, 1), activation = "relu", dtype = "f32",
      device = util.optional })
  self.num_layers, self.num_experts = a.num_layers, a.num_experts
  local activation = a.activation
  if type(activation) == "string" then
    if not F.activations[activation] then
      P.fail(("LowRankMixtureCrossNet: activation '%s', allowed: none, relu, sigmoid, tanh or a function"):format(
        activation))
    end
    activation = activation == "none" and function(x) return x end or F[activation]
  end
  self._activation = signature.value("LowRankMixtureCrossNet", "activation", activation, "callable")
  self.U_kernels = kernels(a.num_layers, { a.num_experts, a.in_features, a.low_rank }, a)
  self.V_kernels = kernels(a.num_layers, { a.num_experts, a.low_rank, a.in_features }, a)
  self.bias = biases(a.num_layers, { a.in_features, 1 }, a)
  local gates = {}
  for e = 1, a.num_experts > 1 and a.num_experts or 0 do
    gates[e] = layers.Linear { in_features = a.in_features, out_features = 1, bias = false, dtype = a.dtype,
      device = a.device }
  end
  self.gates = #gates > 0 and layers.ModuleList(gates)
  self.C_kernels = kernels(a.num_layers, { a.num_experts, a.low_rank, a.low_rank }, a)
end

--- Expert e's matrix of a stacked kernel.
local function expert_kernel(kernel, e) return kernel:slice(1, e - 1, e):reshape(kernel:size(2), kernel:size(3)) end

function LowRankMixtureCrossNet:forward(x0)
  local x, f = x0, self._activation
  for l = 1, self.num_layers do
    local weights
    if self.gates then
      local scores = {}
      for e = 1, self.num_experts do scores[e] = self.gates[e](x) end
      weights = F.softmax(F.cat(scores, 2), 2)
    end
    local sum, bias = x, self.bias[l]:reshape(-1)
    for e = 1, self.num_experts do
      local u = f(F.linear(x, expert_kernel(self.V_kernels[l], e)))
      u = f(F.linear(u, expert_kernel(self.C_kernels[l], e)))
      u = F.mul(x0, F.linear(u, expert_kernel(self.U_kernels[l], e), bias))
      if weights then u = F.mul(u, weights:slice(2, e - 1, e)) end
      sum = F.add(sum, u)
    end
    x = sum
  end
  return x
end

-- -- factorization machines -------------------------------------------------------------------------------------------

--- A list of [B, ...] embeddings as one [B, numbers] matrix.
local function flattened(embeddings)
  local list = {}
  for i = 1, #embeddings do
    local e = signature.value("embeddings", ("embedding %d"):format(i), embeddings[i], "tensor")
    list[i] = as_rows(e)
  end
  return F.cat(list, 2)
end

--- [B, 1]: half of (square of the sum - sum of the squares) over all columns of the embeddings (a list).
local FactorizationMachine = Module:extend "FactorizationMachine"
M.FactorizationMachine = FactorizationMachine
function FactorizationMachine:forward(embeddings)
  local x = flattened(embeddings)
  return F.affine(F.sub(F.square(F.sum(x, 2, true)), F.sum(F.square(x), 2, true)), 0.5)
end

--- dense_module over the concatenated embeddings (a list).
local DeepFM = Module:extend "DeepFM"
M.DeepFM = DeepFM
function DeepFM:init(args)
  self.dense_module = callable("DeepFM", util.named("DeepFM", args, { dense_module = util.required }), "dense_module")
end
function DeepFM:forward(embeddings) return self.dense_module(flattened(embeddings)) end

for name, forward in util.ordered {
  InteractionDCNArch = "dense_features: tensor, sparse_features: tensor",
  InteractionProjectionArch = "dense_features: tensor, sparse_features: tensor",
  FactorizationMachine = "embeddings: list", DeepFM = "embeddings: list",
} do
  signature.check(name .. ":", M[name], { forward = "self: table, " .. forward })
end

return M
