-- The dense cases that PyTorch and TorchRec computed (spec/golden/ops/dense): outputs and all gradients, on both
-- devices.
-- cuda: always
local peri = require "perilune"
local nn = peri.nn
local F = nn.functional
local golden = require "spec.support.golden"

local handled = {} -- every case of the folder must be one of these

local function each_device(body)
  for _, device in ipairs { "cpu", "opaque" } do body(device) end
end

--- Feed the upstream gradient (or 1, for losses that have none) and compare the gradients of the given leaves.
local function check_backward(c, out, leaves)
  out:backward(c:has "in.grad_output" and c:tensor("in.grad_output", out:device()):reshape(out:shape()) or nil)
  for _, leaf in ipairs(leaves) do c:assert_near("grad." .. leaf.name, leaf.tensor:grad()) end
end

local function input(c, name, device)
  return { name = name, tensor = c:tensor("in." .. name, device):requires_grad() }
end

-- -- functions of inputs ----------------------------------------------------------------------------------------------

local case -- the one that runs: a few functions take more from it

--- The inputs e0, e1, ... that a case has.
local function numbered()
  local names = {}
  while case:has("in.e" .. #names) do names[#names + 1] = "e" .. #names end
  return names
end

--- The piece of x that the case cuts out, which its numbers say alone.
local function narrow(x)
  local shape = case:shape "out.output"
  local there = table.concat(shape, " ") .. ": " .. table.concat(case:list "out.output", " ")
  for dim = 1, x:dim() do
    for start = 0, x:size(dim) - shape[dim] do
      local piece = x:slice(dim, start, start + shape[dim])
      local here = table.concat(piece:shape(), " ") .. ": " .. table.concat(piece:to_list(), " ")
      if here == there then return piece end
    end
  end
  error "op_narrow: no piece of the input is the output"
end

--- The slope that the numbers of act_leaky_relu show best: where the most negative number of its input goes.
local function slope()
  local from, to, at = case:list "in.input", case:list "out.output", 1
  for i = 2, #from do
    if from[i] < from[at] then at = i end
  end
  assert(from[at] < 0, "act_leaky_relu: no negative input")
  return tonumber(("%.4g"):format(to[at] / from[at]))
end

--- name -> { inputs (a list, or a function that returns it), f, output }
local functions = {
  act_softmax_first = { { "input" }, function(x) return x:softmax(1) end },
  act_softmax_last = { { "input" }, function(x) return x:softmax(-1) end },
  act_log_softmax = { { "input" }, function(x) return x:log_softmax(-1) end },
  op_add_broadcast = { { "x0", "x1" }, F.add }, op_sub = { { "x0", "x1" }, F.sub },
  op_mul_broadcast = { { "x0", "x1" }, F.mul }, op_div = { { "x0", "x1" }, F.div }, op_bmm = { { "x0", "x1" }, F.bmm },
  op_matmul = { { "x0", "x1" }, F.matmul }, op_linear = { { "x0", "x1", "x2" }, function(x, w, b)
    return F.linear(x, w, b)
  end }, op_exp = { { "input" }, F.exp }, op_pow3 = { { "input" }, function(x) return x:pow(3) end },
  op_sqrt_abs = { { "input" }, function(x) return F.sqrt(F.abs(x)) end },
  op_max_dim1 = { { "input" }, function(x) return (x:max(2)) end },
  op_sum_all = { { "input" }, function(x) return x:sum() end },
  op_sum_dim1 = { { "input" }, function(x) return x:sum(2) end },
  op_mean_all = { { "input" }, function(x) return x:mean() end },
  op_mean_dim0 = { { "input" }, function(x) return x:mean(1) end }, op_narrow = { { "input" }, narrow },
  op_transpose_reshape = { { "input" }, function(x) return x:transpose(1, 2):reshape(-1) end },
  interaction_f1 = { { "dense_features", "sparse_features" }, F.interaction },
  interaction_f3 = { { "dense_features", "sparse_features" }, F.interaction },
  interaction_f6 = { { "dense_features", "sparse_features" }, F.interaction },
  act_leaky_relu = { { "input" }, function(x) return F.leaky_relu(x, slope()) end },
  factorization_machine = { numbered, function(...) return nn.FactorizationMachine() { ... } end },
}
for name, loss in pairs { bce = { "probabilities", nn.BCELoss }, mse = { "predictions", nn.MSELoss },
  cross_entropy = { "logits", nn.CrossEntropyLoss } } do
  functions[name] = { { loss[1] }, function(x)
    return loss[2] { reduction = case.args.reduction }(x, case:tensor("in.labels", x:device()))
  end, "loss" }
end
for _, name in ipairs { "gelu", "logsigmoid", "relu", "sigmoid", "silu", "softplus", "tanh" } do
  functions["act_" .. name] = { { "input" }, F[name] }
end
for _, name in ipairs { "none", "plain", "pos_weight", "sum", "weighted" } do
  functions["bce_with_logits_" .. name] = { { "logits" }, function(x)
    local loss = nn.BCEWithLogitsLoss { reduction = case.args.reduction, weight = case:tensor("in.weight", x:device()),
      pos_weight = case:tensor("in.pos_weight", x:device()) }
    return loss(x, case:tensor("in.labels", x:device()))
  end, "loss" }
end

describe("golden functions", function()
  for name, spec in peri.util.ordered(functions) do
    handled["ops/dense/" .. name] = true
    it(name, function()
      each_device(function(device)
        case = golden.load("ops/dense/" .. name)
        local leaves, tensors = {}, {}
        for i, input_name in ipairs(type(spec[1]) == "function" and spec[1]() or spec[1]) do
          leaves[i] = input(case, input_name, device)
          tensors[i] = leaves[i].tensor
        end
        local out = spec[2](unpack(tensors))
        case:assert_near("out." .. (spec[3] or "output"), out)
        check_backward(case, out, leaves)
      end)
    end)
  end
end)

-- -- modules ----------------------------------------------------------------------------------------------------------

--- Put the case's parameters into a module; every name must agree.
local function load_parameters(c, module, device)
  local map = {}
  for _, name in ipairs(c:tensor_names "^param%.") do map[name:sub(7)] = c:tensor(name, device) end
  local running = { "running_mean", "running_var" }
  for _, b in ipairs(module:named_buffers()) do
    assert(b.name == running[1] or b.name == running[2])
    map[b.name] = b.tensor
  end
  module:load_state_dict(map)
end

local function mlp(sizes, activation)
  return function(device)
    return nn.MLP { in_size = case:shape("in.input")[2], layer_sizes = sizes or case.args.layer_sizes,
      activation = activation or case.args.activation, device = device }
  end
end
local function crossnet(class)
  return function(device)
    local a = case.args
    return nn[class] { in_features = a.in_features, num_layers = a.num_layers, low_rank = a.low_rank,
      num_experts = a.num_experts, activation = a.activation, device = device }
  end
end
local function perceptron(device)
  local w = case:shape "param._linear.weight"
  return nn.Perceptron { in_size = w[2], out_size = w[1], bias = case.args.bias, activation = case.args.activation,
    device = device }
end

--- Columns of what an interaction takes: dense features and each sparse one, side by side.
local function interaction_columns()
  local sparse = case:shape "in.sparse_features"
  assert(sparse[2] == case.args.num_sparse_features)
  return (sparse[2] + 1) * sparse[3]
end

--- name -> { module of a case, inputs (a list, or a function that returns it), whether the module takes them as one
--- list }
local modules = {
  batch_norm_train = { function(device)
    return nn.BatchNorm1d { num_features = case:shape "in.input"[2], eps = case.args.eps, momentum = case.args.momentum,
      device = device }
  end },
  crossnet = { crossnet "CrossNet" }, low_rank_crossnet = { crossnet "LowRankCrossNet" },
  vector_crossnet = { crossnet "VectorCrossNet" }, low_rank_mixture_crossnet = { crossnet "LowRankMixtureCrossNet" },
  low_rank_mixture_one_expert = { crossnet "LowRankMixtureCrossNet" }, mlp_relu = { mlp() }, mlp_sigmoid = { mlp() },
  mlp_swish_layernorm = { mlp() },
  layer_norm_affine = { function(device) return nn.LayerNorm { normalized_shape = case:shape "param.weight",
    eps = case.args.eps, device = device } end },
  layer_norm_plain = { function(device)
    return nn.LayerNorm { normalized_shape = { case:shape("in.input")[2] }, eps = case.args.eps,
      elementwise_affine = false, device = device }
  end },
  perceptron_no_bias = { perceptron }, perceptron_none = { perceptron }, perceptron_relu = { perceptron },
  perceptron_sigmoid = {
    perceptron },
  perceptron_tanh = { perceptron },
  swish_layer_norm_1d = { function(device)
    return nn.SwishLayerNorm { input_dims = case.args.input_dims[1], device = device }
  end }, swish_layer_norm_2d = {
    function(device) return nn.SwishLayerNorm { input_dims = case.args.input_dims, device = device } end },
  deepfm = { function(device)
    local columns = 0
    for _, name in ipairs(numbered()) do columns = columns + case:shape("in." .. name)[2] end
    return nn.DeepFM { dense_module = nn.MLP { in_size = columns, layer_sizes = case.args.layers, device = device } }
  end, numbered, true },
  interaction_dcn = { function(device)
    return nn.InteractionDCNArch { num_sparse_features = case.args.num_sparse_features,
      crossnet = nn.LowRankCrossNet { in_features = interaction_columns(), num_layers = case.args.num_layers,
        low_rank = case.args.low_rank, device = device } }
  end, { "dense_features", "sparse_features" } },
  interaction_projection = { function(device)
    local function branch(sizes)
      return nn.MLP { in_size = interaction_columns(), layer_sizes = sizes, device = device }
    end
    local a = case.args
    return nn.InteractionProjectionArch { num_sparse_features = a.num_sparse_features,
      interaction_branch1 = branch(a.branch1), interaction_branch2 = branch(a.branch2) }
  end, { "dense_features", "sparse_features" } },
}

describe("golden modules", function()
  for name, spec in peri.util.ordered(modules) do
    handled["ops/dense/" .. name] = true
    it(name, function()
      each_device(function(device)
        case = golden.load("ops/dense/" .. name)
        local module = spec[1](device)
        load_parameters(case, module, device)
        local leaves, tensors = {}, {}
        for i, input_name in ipairs(type(spec[2]) == "function" and spec[2]() or spec[2] or { "input" }) do
          leaves[i] = input(case, input_name, device)
          tensors[i] = leaves[i].tensor
        end
        local out = spec[3] and module(tensors) or module(unpack(tensors))
        case:assert_near("out.output", out)
        for _, p in ipairs(module:named_parameters()) do
          leaves[#leaves + 1] = { name = "param." .. p.name, tensor = p.tensor }
        end
        check_backward(case, out, leaves)
      end)
    end)
  end
end)

-- -- models -----------------------------------------------------------------------------------------------------------

--- Stands for an embedding bag collection: pooling as a product with the matrix of counts, made of dense operations.
local Bags = nn.Module:extend "Bags"
function Bags:init(device)
  self.embedding_bags = nn.Module()
  for _, t in ipairs(case.args.tables) do
    local bag = nn.Module()
    bag.weight = nn.Parameter(peri.zeros({ t.rows, t.dim }, "f32", device))
    self.embedding_bags:add_module(t.name, bag)
  end
end
function Bags:embedding_bag_configs()
  return peri.util.map(case.args.tables,
    function(t)
      return { name = t.name, embedding_dim = t.dim, num_embeddings = t.rows, feature_names = t.features }
    end)
end
--- counts(feature, rows, mean): for each sample how often each row is in its bag (mean: divided by the length of the
--- bag).
function Bags:counts() -- luacheck: ignore 212
  local lengths, values = case:list "in.features.lengths", case:list "in.features.values"
  local batch, first, at = case.args.batch, {}, 1
  for k, key in ipairs(case.args.keys) do -- bags lie key after key
    first[key] = { bag = (k - 1) * batch, value = at }
    for b = 1, batch do at = at + lengths[(k - 1) * batch + b] end
  end
  return function(feature, rows, mean)
    local list, value = {}, first[feature].value
    for b = 1, batch do
      local length, row = lengths[first[feature].bag + b], {}
      for r = 1, rows do row[r] = 0 end
      for _ = 1, length do
        row[values[value] + 1] = row[values[value] + 1] + (mean and 1 / length or 1)
        value = value + 1
      end
      list[b] = row
    end
    return list
  end
end

function Bags:forward()
  local parts, counts = {}, self:counts()
  for _, t in ipairs(case.args.tables) do
    local weight = self.embedding_bags[t.name].weight
    for _, name in ipairs(t.features) do
      local list = counts(name, t.rows, t.pooling == "mean")
      parts[#parts + 1] = F.matmul(peri.tensor(list, "f32", weight:device()), weight)
    end
  end
  local all = F.cat(parts, 2)
  return { values = function() return all end }
end

--- name -> model of a case
local models = {
  model_dlrm = function(a, bags, device)
    return nn.DLRM { embedding_bag_collection = bags, dense_in_features = a.dense_in_features,
      dense_arch_layer_sizes = a.dense_arch, over_arch_layer_sizes = a.over_arch, dense_device = device }
  end,
  model_dlrm_dcn = function(a, bags, device)
    return nn.DLRM_DCN { embedding_bag_collection = bags, dense_in_features = a.dense_in_features,
      dense_arch_layer_sizes = a.dense_arch, over_arch_layer_sizes = a.over_arch, dcn_num_layers = a.dcn_num_layers,
      dcn_low_rank_dim = a.dcn_low_rank_dim, dense_device = device }
  end,
  model_dlrm_projection = function(a, bags, device)
    return nn.DLRM_Projection { embedding_bag_collection = bags, dense_in_features = a.dense_in_features,
      dense_arch_layer_sizes = a.dense_arch,
      over_arch_layer_sizes = a.over_arch, interaction_branch1_layer_sizes = a.branch1,
      interaction_branch2_layer_sizes = a.branch2,
        dense_device = device }
  end,
  model_deepfm = function(a, bags, device)
    return nn.SimpleDeepFMNN { num_dense_features = a.dense_in_features, embedding_bag_collection = bags,
      hidden_layer_size = a.hidden_layer_size,
      deep_fm_dimension = a.deep_fm_dimension, dense_device = device }
  end,
}

describe("golden models", function()
  for name, make in peri.util.ordered(models) do
    handled["ops/dense/" .. name] = true
    it(name, function()
      each_device(function(device)
        case = golden.load("ops/dense/" .. name)
        local bags = Bags(device)
        local model = make(case.args, bags, device)
        load_parameters(case, model, device)
        local loss
        local dense, labels = case:tensor("in.dense_features", device), case:tensor("in.labels", device)
        if name == "model_deepfm" then
          local probabilities = model(dense, false)
          case:assert_near("out.probabilities", probabilities)
          loss = F.binary_cross_entropy(probabilities:reshape(-1), labels:to "f32")
        else
          local logits
          loss, logits = nn.DLRMTrain(model)({ dense_features = dense, sparse_features = false, labels = labels })
          case:assert_near("out.logits", logits)
        end
        case:assert_near("out.loss", loss)
        loss:backward()
        local n = 0
        for _, p in ipairs(model:named_parameters()) do
          case:assert_near("grad.param." .. p.name, p.tensor:grad())
          n = n + 1
        end
        assert.equal(#case:tensor_names "^param%.", n)
        -- A batch without samples, as a rank with fewer batches has it: no result, and gradients of zeros.
        local columns = bags():values():size(2)
        rawset(bags, "forward", function()
          return { values = function() return peri.zeros({ 0, columns }, "f32", device) end }
        end)
        model:zero_grad()
        local none = model(dense:slice(1, 0, 0), false)
        assert.same({ 0, 1 }, none:shape())
        F.sum(none):backward()
        for _, p in ipairs(model:named_parameters()) do
          assert.is_true(not p.tensor:grad() or F.sum(F.square(p.tensor:grad())):item() == 0, p.name)
        end
      end)
    end)
  end
end)

it("every golden case of the dense part is reproduced", function()
  for _, name in ipairs(golden.names "ops/dense") do assert.is_true(handled[name], name .. " is not covered") end
end)
