-- Numbers that a constructor can't use are refused by it, not by the first call: the error names the class's argument
-- and what is allowed. Where PyTorch refuses, so does this table; where PyTorch takes what makes NaN, this table
-- refuses it too.
local peri = require "perilune"
local nn, optim = peri.nn, peri.nn.optim

local NAN, INF = 0 / 0, math.huge
local sizes, counts = { -1, 1.5, NAN, INF, "x" }, { 0, -1, 1.5, NAN, INF, "x" }
local above_0, from_0 = { 0, -1, NAN, INF, "x" }, { -1, NAN, INF, "x" }
local finite, share, to_1 = { NAN, INF, -INF, "x" }, { -0.1, 1, NAN, INF, "x" }, { -0.1, 1.1, NAN, INF, "x" }
local dims = { 0, 1.5, NAN, "x" }

local function params() return nn.Linear { in_features = 2, out_features = 2, bias = false }:parameters() end
local function weights(x) return function() return peri.tensor(x) end end
local bad_weights = { weights { 1, -1 }, weights { 1, NAN }, weights { 1, INF }, "x", 1 }

-- { where, class, arguments that are right, { argument = { values that are refused } } }
local cases = {
  { nn, "InBatchSoftmaxLoss", {}, { temperature = above_0 } }, { nn, "HuberLoss", {}, { delta = above_0 } },
  { nn, "SmoothL1Loss", {}, { beta = from_0 } },
  { nn, "FocalLoss", {}, { gamma = from_0, alpha = { 1.5, -2, NAN, INF, "x" } } },
  { nn, "CrossEntropyLoss", {}, { label_smoothing = to_1, weight = bad_weights, ignore_index = { 1.5, NAN, "x" } } },
  { nn, "BCEWithLogitsLoss", {}, { weight = bad_weights, pos_weight = bad_weights } },
  { nn, "BCELoss", {}, { weight = bad_weights } }, { nn, "MarginRankingLoss", {}, { margin = finite } },
  { nn, "HingeEmbeddingLoss", {}, { margin = finite } }, { nn, "CosineEmbeddingLoss", {}, { margin = finite } },
  { nn, "TripletMarginLoss", {}, { margin = above_0, p = from_0, eps = from_0 } },
  { nn, "MSELoss", {}, { reduction = { "avg", 1 } } },
  { nn, "Dropout", {}, { p = share } }, { nn, "PReLU", {}, { num_parameters = counts, init = finite } },
  { nn, "LeakyReLU", {}, { negative_slope = finite } }, { nn, "ELU", {}, { alpha = finite } },
  { nn, "Softmax", { dim = 1 }, { dim = dims } }, { nn, "LogSoftmax", { dim = 1 }, { dim = dims } },
  { nn, "Flatten", {}, { start_dim = dims, end_dim = dims } },
  { nn, "Linear", { in_features = 2, out_features = 2 }, { in_features = sizes, out_features = sizes } },
  { nn, "Perceptron", { in_size = 2, out_size = 2 }, { in_size = sizes, out_size = sizes } },
  { nn, "MLP", { in_size = 2, layer_sizes = { 2 } },
    { in_size = sizes, layer_sizes = { { -1 }, { 2, 1.5 }, { NAN }, { "x" }, "x" } } },
  { nn, "DenseArch", { in_features = 2, layer_sizes = { 2 } }, { in_features = sizes, layer_sizes = { { -1 } } } },
  { nn, "LayerNorm", { normalized_shape = 2 }, { normalized_shape = sizes, eps = from_0 } },
  { nn, "RMSNorm", { normalized_shape = 2 }, { normalized_shape = sizes, eps = from_0 } },
  { nn, "SwishLayerNorm", { input_dims = 2 }, { input_dims = sizes } },
  { nn, "BatchNorm1d", { num_features = 2 }, { num_features = sizes, eps = from_0, momentum = to_1 } },
  { nn, "MultiheadAttention", { embed_dim = 4, num_heads = 2 },
    { embed_dim = counts, num_heads = { 3, unpack(counts) }, dropout = share } },
  { nn, "GRU", { input_size = 2, hidden_size = 2 },
    { input_size = counts, hidden_size = counts, num_layers = counts, dropout = share } },
  { nn, "LSTM", { input_size = 2, hidden_size = 2 }, { input_size = counts, num_layers = counts, dropout = share } },
  { nn, "Embedding", { num_embeddings = 2, embedding_dim = 2 },
    { num_embeddings = sizes, embedding_dim = counts, padding_idx = { 2, -3, 1.5, NAN, "x" } } },
  { nn, "InteractionArch", { num_sparse_features = 2 }, { num_sparse_features = sizes } },
  { nn, "CrossNet", { in_features = 2, num_layers = 1 }, { in_features = counts, num_layers = sizes } },
  { nn, "VectorCrossNet", { in_features = 2, num_layers = 1 }, { in_features = counts, num_layers = sizes } },
  { nn, "LowRankCrossNet", { in_features = 2, num_layers = 1 }, { in_features = counts, low_rank = counts } },
  { nn, "LowRankMixtureCrossNet", { in_features = 2, num_layers = 1 },
    { in_features = counts, num_layers = sizes, num_experts = counts, low_rank = counts } },

  { optim, "SGD", { params = params, lr = 0.1 },
    { lr = from_0, weight_decay = from_0, momentum = from_0, dampening = finite, nesterov = { true } } },
  { optim, "Adam", { params = params },
    { lr = from_0, eps = from_0, weight_decay = from_0, betas = { { 1, 0.9 }, { 0.9, 1 }, { NAN, 0.9 }, { 0.9 } } } },
  { optim, "AdamW", { params = params }, { lr = from_0, eps = from_0, weight_decay = from_0 } },
  { optim, "Adagrad", { params = params },
    { lr = from_0, eps = from_0, lr_decay = from_0, initial_accumulator_value = from_0 } },
  { optim, "RMSprop", { params = params },
    { lr = from_0, eps = from_0, momentum = from_0, alpha = { -1, 1.5, NAN, "x" } } },
  { optim, "RowWiseAdagrad", { params = params }, { lr = from_0, eps = from_0 } },

  { optim, "StepLR", { step_size = 2 }, { step_size = counts, gamma = from_0 } },
  { optim, "MultiStepLR", { milestones = { 2 } },
    { milestones = { { -1 }, { 1, 1.5 }, { NAN }, "x" }, gamma = from_0 } },
  { optim, "ExponentialLR", { gamma = 0.5 }, { gamma = from_0 } },
  { optim, "ConstantLR", {}, { factor = to_1, total_iters = counts } },
  { optim, "LinearLR", {}, { start_factor = { 0, unpack(to_1) }, end_factor = to_1, total_iters = counts } },
  { optim, "PolynomialLR", {}, { power = from_0, total_iters = counts } },
  { optim, "CosineAnnealingLR", { T_max = 2 }, { T_max = counts, eta_min = from_0 } },
  { optim, "CosineAnnealingWarmRestarts", { T_0 = 2 }, { T_0 = counts, T_mult = counts, eta_min = from_0 } },
  { optim, "OneCycleLR", { max_lr = 1, total_steps = 9 },
    { max_lr = from_0, total_steps = counts, pct_start = to_1, div_factor = above_0, final_div_factor = above_0,
      base_momentum = from_0, max_momentum = from_0 } },
  { optim, "CyclicLR", { base_lr = 0.1, max_lr = 1 },
    { base_lr = from_0, max_lr = from_0, step_size_up = counts, gamma = from_0, base_momentum = from_0,
      max_momentum = from_0 } },
  { optim, "GradientClippingOptimizer", { clipping = "norm" }, { max_gradient = { 0, -1, NAN, "x" } } },
  { optim, "WarmupOptimizer", { stages = { { max_iters = 2 } } }, { lr = from_0 } },

  { nn.metrics, "NEMetric", {}, { window_size = counts } },
  { nn.metrics, "AccuracyMetric", {}, { threshold = finite } },
  { nn.metrics, "NDCGMetric", {}, { k = { 0, -2, 1.5, NAN, INF, "x" } } },
  { nn.metrics, "MulticlassRecallMetric", { number_of_classes = 2 }, { number_of_classes = counts } },
  { nn.metrics, "ThroughputMetric", {}, { window_seconds = counts, warmup_steps = counts } },
}

local function arguments(where, right)
  local a = {}
  for name, value in pairs(right) do a[name] = type(value) == "function" and value() or value end
  if where == optim and not a.params then a.optimizer = optim.SGD { params = params(), lr = 0.1, momentum = 0.9 } end
  return a
end

describe("A constructor", function()
  for _, case in ipairs(cases) do
    local where, name, right, refused = unpack(case)
    it(name .. " refuses the numbers that it cannot use, by name", function()
      where[name](arguments(where, right))
      for argument, values in pairs(refused) do
        for i, value in ipairs(values) do
          local a = arguments(where, right)
          a[argument] = type(value) == "function" and value() or value
          local ok, why = pcall(where[name], a)
          local what = ("%s { %s = %s }"):format(name, argument, tostring(value))
          assert.is_false(ok, what .. " is taken, value " .. i)
          why = tostring(why)
          local named = why:find(argument, 1, true) or argument == "betas" and why:find "beta[12]"
          assert.truthy(named, what .. " does not name it: " .. why)
          assert.truthy(why:find "allowed" or why:find "wanted" or why:find "needs", what .. " says no range: " .. why)
        end
      end
    end)
  end

  it("takes the ends of ranges", function()
    nn.SmoothL1Loss { beta = 0 }
    nn.FocalLoss { gamma = 0, alpha = -1 }
    nn.CrossEntropyLoss { label_smoothing = 1, ignore_index = -100, weight = peri.tensor { 0, 1 } }
    nn.BatchNorm1d { num_features = 2, momentum = 1, eps = 0 }
    nn.Dropout { p = 0 }
    nn.RMSNorm { normalized_shape = { 2, 3 } }
    optim.SGD { params = params(), lr = 0, dampening = -1 }
    optim.Adam { params = params(), betas = { 0, 0 } }
  end)
end)
