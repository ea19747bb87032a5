-- Mistakes of newcomers, each in a script of its own, and the message that it gets: with the script's line, and without
-- raw internals. Each is run by the launcher, as `perilune run` does, and by plain luajit.
local shell = require "spec.support.shell"

-- Line 1 of every script; its own text begins in line 2.
local prelude = [[local peri = require "perilune"; local nn, data, plan = peri.nn, peri.data, require "perilune.plan"]]
-- What some scripts go on from; one line too.
local config = [[local config = peri.EmbeddingBagConfig { name = "t", num_embeddings = 10, embedding_dim = 4, feature_names = { "f" } } ]]
local ebc = config .. [[local ebc = peri.EmbeddingBagCollection { tables = { config } } ]]
local kjt = [[local kjt = peri.KeyedJaggedTensor { keys = { "f" }, values = { 1, 2, 3 }, lengths = { 3 } } ]]
local linear = [[local linear = nn.Linear { in_features = 3, out_features = 2 } ]]
local model = ebc .. [[local M = nn.Module:extend "M" function M:init() self.ebc = ebc end local m = M() ]]
local filed = config .. [[local M = nn.Module:extend "M" local m = M() m.ebc = peri.EmbeddingBagCollection {]]
  .. [[ tables = { config }, fused_params = { optimizer = "exact_row_wise_adagrad", learning_rate = 0.1 } } ]]
local loop = [[
local M = nn.Module:extend "M"
function M:init() self.net = nn.Sequential { nn.Linear { in_features = 3, out_features = 1 }, nn.Sigmoid() } end
function M:forward(x)
  local y = self.net(x)
  return nn.functional.mean(y)
end
local pipeline = peri.TrainPipelineBase { model = M(), optimizer = false }
]]

--- { what, script, message }
local mistakes = {
  -- names
  { "a misspelt class", "nn.Linaer { in_features = 3, out_features = 2 }",
    "peri.nn has no 'Linaer'; is 'Linear' meant? (s.lua:2)" },
  { "a misspelt helper of plans", "plan.row_wize()", "peri.plan has no 'row_wize'; is 'row_wise' meant? (s.lua:2)" },
  { "a class of another face", "local x = peri.Linear {}", "peri has no 'Linear'; it is peri.nn.Linear (s.lua:2)" },
  { "the face that has the optimizers", "local x = peri.optim", "peri has no 'optim'; it is peri.nn.optim (s.lua:2)" },
  { "an optimizer among the layers", "nn.Adam {}", "peri.nn has no 'Adam'; it is peri.nn.optim.Adam (s.lua:2)" },
  { "a collection among the layers", "nn.EmbeddingBagCollection {}",
    "peri.nn has no 'EmbeddingBagCollection'; it is peri.EmbeddingBagCollection (s.lua:2)" },
  { "TorchRec's way to an optimizer of tables", "peri.apply_optimizer_in_backward()",
    "peri has no 'apply_optimizer_in_backward'; here it is fused_params = { optimizer = ..., learning_rate = ... } of "
      .. "the collection; of single tables table_fused_params (s.lua:2)" },
  { "a model in place of its parts", "peri.checkpoint.save('x', nn.ReLU())",
    "checkpoint.save: parts is ReLU, wanted a table of parts by name: { model = ... } (s.lua:2)" },
  { "a misspelt field of a batch",
    ebc .. "local d = nn.DLRM { embedding_bag_collection = ebc, dense_in_features = 2, dense_arch_layer_sizes = { 4 }, "
      .. "over_arch_layer_sizes = { 2, 1 } } nn.DLRMTrain(d) { dense_feature = peri.ones { 1, 2 } }",
    "DLRMTrain: the batch has no dense_features; it has: dense_feature (s.lua:2)" },
  { "an initializer without its line", "nn.init.uniform(peri.ones { 3 })",
    "peri.nn.init has no 'uniform'; is 'uniform_' meant? (s.lua:2)" },
  { "letters exchanged", "peri.tesnor { 1 }", "peri has no 'tesnor'; is 'tensor' meant? (s.lua:2)" },
  { "an optimizer in small letters", "nn.optim.adam {}", "peri.nn.optim has no 'adam'; is 'Adam' meant? (s.lua:2)" },
  { "a misspelt method", "peri.ones({ 3 }):sunm()", "a tensor has no method 'sunm'; is 'sum' meant? (s.lua:2)" },
  { "a method of NumPy", "local y = peri.ones({ 3 }):astype 'f16'",
    "a tensor has no method 'astype'; here it is 'to' (s.lua:2)" },
  { "a conversion of PyTorch", "local y = peri.ones({ 3 }):long()",
    "a tensor has no method 'long'; here it is to('i64') (s.lua:2)" },
  { "the transpose of a matrix", "local y = peri.ones({ 3, 2 }).T",
    "a tensor has no method 'T'; here it is transpose(1, 2) (s.lua:2)" },
  { "a method that is set", "peri.ones({ 3 }).requires_grad = true",
    "a tensor has no field 'requires_grad' that could be set; it is a method: t:requires_grad(...) (s.lua:2)" },
  { "a dot for a colon, with an argument", linear .. "linear.train(false)",
    "train: it is a method: object:train(...), with a colon (s.lua:2)" },
  { "a pooling that does not exist", "local p = peri.embed.PoolingType.AVERAGE",
    "peri.embed.PoolingType has no 'AVERAGE' (s.lua:2)" },
  { "a compute kernel that does not exist",
    "plan.row_wise { compute_kernel = plan.EmbeddingComputeKernel.FUSED_CACHING }",
    "peri.plan.EmbeddingComputeKernel has no 'FUSED_CACHING' (s.lua:2)" },
  { "a sharding type in small letters", "local p = plan.ShardingType.rowwise",
    "peri.plan.ShardingType has no 'rowwise'; is 'ROW_WISE' meant? (s.lua:2)" },
  { "a misspelt function", "nn.functional.relo(peri.ones { 3 })",
    "peri.nn.functional has no 'relo'; is 'relu' meant? (s.lua:2)" },
  { "a module where a function is", "peri.embed.tbe.make {}", "peri.embed.tbe has no 'make' (s.lua:2)" },
  -- options
  { "options by position", "nn.Linear(3, 4)",
    "Linear: named arguments in a table wanted: { in_features = ..., out_features = ... }, got 3 (s.lua:2)" },
  { "a module for the options", linear .. "peri.DistributedModelParallel(linear)",
    "DistributedModelParallel: named arguments in a table wanted: { module = ... }, got Linear (s.lua:2)" },
  { "an option that is missing", "nn.Linear { in_features = 3 }",
    "Linear: argument 'out_features' is missing (s.lua:2)" },
  { "an option that is misspelt", "\nnn.MLP { in_size = 3, layers = { 4 } }",
    "MLP: no argument 'layers'; allowed: activation, bias, device, dtype, in_size, layer_sizes (s.lua:3)" },
  { "a size as a string", "nn.Linear { in_features = '3', out_features = 2 }",
    "Linear: in_features is '3', wanted a number (s.lua:2)" },
  { "a negative size", "nn.Linear { in_features = -3, out_features = 2 }",
    "Linear: in_features is -3, allowed: whole numbers 0.. (s.lua:2)" },
  { "a number for true or false", "nn.Linear { in_features = 3, out_features = 2, bias = 0 }",
    "Linear: bias is 0, wanted true or false (s.lua:2)" },
  { "a string for a number", "nn.LayerNorm { normalized_shape = 3, eps = 'small' }",
    "LayerNorm: eps is 'small', wanted a number (s.lua:2)" },
  { "a size for a list of sizes", "nn.MLP { in_size = 3, layer_sizes = 4 }",
    "MLP: layer_sizes is 4, wanted a list (s.lua:2)" },
  { "an activation that is unknown", "nn.MLP { in_size = 3, layer_sizes = { 4 }, activation = 'relu6' }",
    "Perceptron: activation 'relu6', allowed: none, relu, sigmoid, tanh, a function or a Module (s.lua:2)" },
  { "a group that is a number", linear .. "peri.DistributedModelParallel { module = linear, group = 3 }",
    "DistributedModelParallel: group is a number (s.lua:2)" },
  { "buckets of less than nothing", linear .. "peri.DistributedModelParallel { module = linear, bucket_bytes = -1 }",
    "DistributedModelParallel: bucket_bytes is -1, allowed: whole numbers 1.. (s.lua:2)" },
  { "a plan that is a number", linear .. "peri.DistributedModelParallel { module = linear, plan = 3 }",
    "plan is 3, wanted a ShardingPlan (s.lua:2)" },
  { "a plan of a number", "plan.ShardingPlan(3)", "ShardingPlan: modules is 3, wanted a table (s.lua:2)" },
  { "a disk that is full", "plan.save_json(plan.ShardingPlan {}, '/dev/full')",
    "plan.save_json: /dev/full: No space left on device (s.lua:2)" },
  { "features with a hole",
    "peri.EmbeddingBagConfig { name = 't', num_embeddings = 3, embedding_dim = 4, feature_names = { 'f', nil, 'g' } }",
    "EmbeddingBagConfig: feature_names has an entry [3], and no entry [2] (s.lua:2)" },
  { "a number for a gradient division",
    filed .. "peri.DistributedModelParallel { module = m, gradient_division = 'yes' }",
    "ShardedEmbeddingBagCollection: gradient_division is 'yes', wanted true or false (s.lua:2)" },
  { "a number to exchange", "peri.init() peri.dist.PooledEmbeddingsAllToAll { dim_sum_per_rank = { 4 } }(3)",
    "PooledEmbeddingsAllToAll: local_embs is 3, wanted a tensor (s.lua:2)" },
  { "a probability of 2", "nn.Dropout { p = 2 }", "Dropout: p is 2, allowed: numbers from 0 to below 1 (s.lua:2)" },
  { "modules that are no list", linear .. "nn.Sequential(linear, linear)",
    "Sequential: a list of modules is wanted, { module, module }, not Linear (s.lua:2)" },
  { "a module by name", linear .. "nn.Sequential { linear, 'relu' }",
    "Sequential: sub-module '1' must be a Module, not a string (s.lua:2)" },
  { "a class without a name", "nn.Module:extend()",
    "Module:extend: the name of the class is nil, wanted a string (s.lua:2)" },
  { "a model without forward", "local M = nn.Module:extend 'M'\nM()(1)", "M: no forward method (s.lua:3)" },
  { "TorchRec's name of an optimizer's option", linear .. "nn.optim.Adam { params = linear, learning_rate = 0.1 }",
    "Adam: no argument 'learning_rate'; allowed: amsgrad, betas, eps, lr, maximize, params, weight_decay (s.lua:2)" },
  { "a learning rate as a string", linear .. "nn.optim.Adam { params = linear, lr = '0.1' }",
    "Adam: lr is '0.1', wanted a number (s.lua:2)" },
  { "one beta", linear .. "nn.optim.Adam { params = linear, lr = 0.1, betas = 0.9 }",
    "Adam: betas is 0.9, wanted a list (s.lua:2)" },
  { "an optimizer of nothing", "nn.optim.SGD { params = {}, lr = 0.1 }",
    "SGD: params is empty, so there is nothing to train; tables with "
      .. "fused_params are updated in the backward pass and need no optimizer (s.lua:2)" },
  { "a seed as a string", "nn.manual_seed 'x'",
    "manual_seed: seed is 'x', allowed: whole numbers 0..2^53 - 1 (s.lua:2)" },
  { "a misspelt option of the world", "peri.init { time_out = 3 }",
    "dist.init: no argument 'time_out'; allowed: device, device_transport, job, local_size, rank, size, timeout, "
      .. "transport (s.lua:2)" },
  -- plans in files
  { "a rank in a plan's file that is not there", model .. [[
write("p.lua", "return { ebc = { t = require('perilune.plan').table_wise(9) } }")
peri.DistributedModelParallel { module = m, plan = "p.lua" }]],
    "plan 'p.lua': module 'ebc': table 't' (table_wise): rank 9 does not exist, allowed: 0..0 (s.lua:3)" },
  { "the same in JSON", model .. [[
write("p.json", '{"perilune_plan": 1, "modules": {"ebc": {"t": {"sharding_type": "table_wise", "ranks": [9]}}}}')
peri.DistributedModelParallel { module = m, plan = "p.json" }]],
    "plan 'p.json': module 'ebc': table 't' (table_wise): rank 9 does not exist, allowed: 0..0 (s.lua:3)" },
  { "a module that a plan's file invents", model .. [[
write("p.lua", "return { abc = {} }")
peri.DistributedModelParallel { module = m, plan = "p.lua" }]],
    "DistributedModelParallel: plan 'p.lua' names module 'abc', which is no EmbeddingBagCollection of the model; "
      .. "those are: 'ebc' (s.lua:3)" },
  { "a misspelt type in JSON", model .. [[
write("p.json", '{"perilune_plan": 1, "modules": {"ebc": {"t": {"sharding_type": "rowwise"}}}}')
peri.DistributedModelParallel { module = m, plan = "p.json" }]],
    "plan 'p.json': module 'ebc', table 't': ParameterSharding: sharding_type 'rowwise', allowed: column_wise, "
      .. "data_parallel, grid_shard, row_wise, table_column_wise, table_row_wise, table_wise (s.lua:3)" },
  { "sizes without ranks", "plan.column_wise { sizes = { 3, 1 } }",
    "ParameterSharding: 2 sizes without ranks; with sizes, say ranks too: a list of 2, one for each size (s.lua:2)" },
  -- tables in files
  { "a row file of nothing", filed .. [[
local cache = plan.CacheParams { load_factor = 0.5, directory = "." }
local sharding = plan.table_wise(0, { compute_kernel = "fused_uvm_caching", cache_params = cache })
write("t.rows-0-10.cols-0-4.peri", "")
peri.DistributedModelParallel { module = m, plan = { ebc = { t = sharding } } }]],
    "ShardedEmbeddingBagCollection: rank 0: row file './t.rows-0-10.cols-0-4.peri': 0 bytes, a header needs 4096 "
      .. "(s.lua:5)" },
  { "a folder that is not there", filed .. [[
local cache = plan.CacheParams { load_factor = 0.5, directory = "nowhere/rows" }
local sharding = plan.table_wise(0, { compute_kernel = "fused_uvm_caching", cache_params = cache })
peri.DistributedModelParallel { module = m, plan = { ebc = { t = sharding } } }]], "ShardedEmbeddingBagCollection: rank 0: row file "
    .. "'nowhere/rows/t.rows-0-10.cols-0-4.peri' of table 't': there is no directory 'nowhere/rows'; make it first "
    .. "(mkdir -p), or name another one (s.lua:4)" },
  -- what tensors and other objects do not do
  { "a nil in a list", "peri.tensor { 1, nil, 3 }", "tensor: entry [2] is nil, and there is an entry [3] (s.lua:2)" },
  { "a nil in a row", "peri.tensor { { 1, nil, 3 }, { 1, 2, 3 } }",
    "tensor: entry [2] is nil, and there is an entry [3] (s.lua:2)" },
  { "a list from 0", "peri.tensor { [0] = 1, 2 }", "tensor: entry [0] of a list, but lists begin at [1] (s.lua:2)" },
  { "a tensor and a text", "local x = peri.zeros { 2 } .. 'x'",
    "no operator '..' for tensor f32 [2] on cpu and 'x' (s.lua:2)" },
  { "an order of tensors", "local t = peri.zeros { 2 }\nlocal x = t < t",
    "no operator '<' for tensor f32 [2] on cpu and tensor f32 [2] on cpu (s.lua:3)" },
  { "a tensor and a number that are compared", "local t = peri.zeros {}\nlocal found = t == 0",
    "'==' of a tensor and 0 compares no elements; a tensor of truth values: t:eq(x), a number: t:item() == x (s.lua:3)"
  },
  { "an element that is not there", "local t = peri.zeros { 2 }\nt[2] = 5",
    "peri_tensor_select: element 2 of the 1st dimension of f32 [2], allowed: -2..1 (s.lua:3)" },
  { "a field that is set", "local t = peri.zeros { 2 }\nt.name = 3",
    "a tensor has no field 'name' that could be set (s.lua:3)" },
  { "the length of a tensor", "local n = #peri.zeros { 2 }", "a tensor has no length '#' (s.lua:2)" },
  { "a call of a tensor", "local t = peri.zeros { 2 }\nt()", "a tensor has no call: it is no function (s.lua:3)" },
  { "pairs of a tensor", "for _ in pairs(peri.zeros { 2 }) do end", "a tensor has no pairs: it is no table (s.lua:2)" },
  { "ipairs of a tensor", "for _ in ipairs(peri.zeros { 2 }) do end",
    "a tensor has no ipairs: it is no table (s.lua:2)" },
  { "a batch of ids plus 1", kjt .. "local x = kjt + 1",
    "no operator '+' for KeyedJaggedTensor {f}: 3 values, batch 1, i64 on cpu and 1 (s.lua:2)" },
  { "arguments by position", "nn.Linear { 3, 4 }",
    "Linear: argument 1 has no name; they go by name: bias, device, dtype, in_features, out_features (s.lua:2)" },
  -- shapes
  { "sizes by position", "peri.zeros(2, 3)", "zeros: shape is 2, wanted a list (s.lua:2)" },
  { "half an element", "peri.zeros { 2.5 }",
    "full: size 1 of the shape is 2.5, allowed: whole numbers 0..2^53 (s.lua:2)" },
  { "rows of different lengths", "peri.tensor { { 1, 2 }, { 3 } }",
    "tensor: a row of 1 elements beside one of 2 (s.lua:2)" },
  { "shapes that do not broadcast", "local t = peri.zeros { 2, 3 } + peri.zeros { 4 }",
    "peri_op_add: f32 [2, 3] and f32 [4] do not broadcast: sizes 3 and 4, allowed: equal, or one of them 1 (s.lua:2)" },
  { "a reshape that loses elements", "\n\nlocal t = peri.zeros({ 2, 3 }):reshape(4, 2)",
    "peri_tensor_reshape: f32 [2, 3] has 6 elements, the new shape 8 (s.lua:4)" },
  { "matrices that do not fit", "nn.functional.matmul(peri.zeros { 2, 3 }, peri.zeros { 2, 3 })",
    "peri_op_matmul: f32 [2, 3] and f32 [2, 3]: the last size of a must be b's last but one (s.lua:2)" },
  { "tensors for a list of tensors", "nn.functional.cat(peri.zeros { 2 }, peri.zeros { 2 })",
    "cat: tensors is a tensor, wanted a list (s.lua:2)" },
  { "a layer of another width", linear .. "linear(peri.zeros { 2, 4 })",
    "Linear: x is [2, 4], wanted [*, 3] (s.lua:2)" },
  { "a layer of another width, inside a model",
    loop .. "for _ in pipeline:run(function() return peri.zeros { 5, 4 } end) do end",
    "net.0: Linear: x is [5, 4], wanted [*, 3] (s.lua:5)" },
  { "an element by two numbers", "return peri.ones { 2, 2 }:item(0, 1)",
    "tensor:item: an argument more than the 1 that it takes: 1 (s.lua:2)" },
  { "labels of another length", "nn.functional.binary_cross_entropy_with_logits(peri.zeros { 4 }, peri.zeros { 5 })",
    "peri_op_bce_with_logits: x and target are f32 [4] and f32 [5]; their shapes must agree (s.lua:2)" },
  { "a state of another shape", linear .. "linear:load_state_dict { weight = peri.zeros { 2, 2 } }",
    "Linear:load_state_dict: 'weight' has shape [2, 3] here, and [2, 2] in the state that is given; "
      .. "missing: 'bias' (s.lua:2)" },
  { "a loss of many elements",
    linear .. "for _ in peri.TrainPipelineBase { model = linear, optimizer = false }:run(function() return peri.zeros "
      .. "{ 4, 3 } end) do end",
    "TrainPipelineBase: the loss, which the model returned first, is f32 [4, 2], wanted one number: its mean or sum "
      .. "(s.lua:2)" },
  { "many elements that are to go back", linear .. "linear(peri.zeros { 4, 3 }):backward()",
    "peri_backward_new: f32 [4, 2] has more than one element; make one number of it (mean, sum), or give its upstream "
      .. "gradient (s.lua:2)" },
  { "a crossing of another width", "nn.CrossNet { in_features = 4, num_layers = 2 } (peri.zeros { 2, 5 })",
    "CrossNet: x0 is f32 [2, 5], wanted [*, 4], for w[0] (s.lua:2)" },
  { "a method with a dot", linear .. "linear.eval()",
    "eval: it is a method: object:eval(...), with a colon (s.lua:2)" },
  { "PyTorch's name", "peri.zeros({ 2, 3 }):view(-1)",
    "a tensor has no method 'view'; here it is 'reshape' (s.lua:2)" },
  { "a place in a list of modules", "nn.ModuleList()[1] = nn.ReLU()",
    "ModuleList: no field '1' can be set; allowed: training; modules come with ModuleList { ... }, append(module) and "
      .. "replace(name, module) (s.lua:2)" },
  { "a device for a dtype", "peri.zeros({ 2 }):to 'cuda'",
    "to: dtype is 'cuda'; a device is the second argument: t:to(nil, 'cuda') (s.lua:2)" },
  { "a group of no parameters", linear .. "nn.optim.select(linear:named_parameters(), '^over')",
    "select: no parameter's name has '^over' in it; those are: weight, bias (s.lua:2)" },
  -- dtypes and devices
  { "a dtype that is unknown", "local t = peri.zeros({ 2, 3 }):to 'int'",
    "peri_dtype_parse: 'int' is no dtype; known: f32 f64 f16 bf16 i64 i32 i16 i8 u8 bool c64 c128 (s.lua:2)" },
  { "whole numbers into a layer", linear .. "linear(peri.zeros({ 2, 3 }, 'i64'))",
    'Linear: x is i64, allowed: f32, f64, f16, bf16; cast it (in Lua t:to "f32") (s.lua:2)' },
  { "f64 into a layer of f32", linear .. "linear(peri.zeros({ 2, 3 }, 'f64'))",
    "Linear: x is f64 [2, 3], wanted f32 (s.lua:2)" },
  { "labels of whole numbers",
    "nn.functional.binary_cross_entropy_with_logits(peri.zeros { 4 }, peri.zeros({ 4 }, 'i64'))",
    "peri_op_bce_with_logits: target is i64 [4], wanted f32 (s.lua:2)" },
  { "strings in a tensor", "peri.tensor { 'a', 'b' }", "tensor: entry [1] is 'a', wanted a number (s.lua:2)" },
  { "ids that are no whole numbers",
    ebc .. "ebc(peri.KeyedJaggedTensor { keys = { 'f' }, values = peri.zeros { 3 }, lengths = { 3 } })",
    "EmbeddingBagCollection: ids is f32 [3], allowed: i64, i32 (s.lua:2)" },
  { "lengths that are no whole numbers",
    "peri.KeyedJaggedTensor { keys = { 'f' }, values = { 1 }, lengths = peri.zeros { 1 } }",
    "peri_kjt_new: lengths are f32 [1], allowed: i32, i64 (s.lua:2)" },
  { "a device that is not there", "peri.zeros({ 2 }, 'f32', 'gpu')",
    "device 'gpu': no libperilune_gpu.so on PERI_PLUGIN_PATH or beside libperilune; Perilune's own are cpu, cuda and "
      .. "opaque (s.lua:2)" },
  { "a rate behind the options of an optimizer",
    "peri.nn.optim.Adagrad({ params = peri.nn.Linear { in_features = 1, out_features = 1 }:named_parameters() }, 0.5)",
    "Adagrad: argument 2 is 0.5, but it takes 1, a table with all options by name (s.lua:2)" },
  { "a plan behind the options of a model over ranks",
    "peri.DistributedModelParallel({ module = peri.nn.Module() }, {})",
    "DistributedModelParallel: argument 2 is a table, but it takes 1, a table with all options by name (s.lua:2)" },
  { "two modules where one is wanted", "local l = peri.nn.ReLU(); peri.nn.DLRMTrain(l, l, l)",
    "DLRMTrain: argument 3 is ReLU, but it takes 2 (s.lua:2)" },
  { "a misspelt operation of a group", "peri.init():all_redcue(peri.ones { 2 })",
    "a group of ranks has no method 'all_redcue'; is 'all_reduce' meant? (s.lua:2)" },
  { "a simulation of nothing", "peri.dist.sim.run(2)", "sim.run: body is nil, wanted a function (s.lua:2)" },
  { "nodes of a rank and a half", "peri.init { local_size = 1.5 }",
    "dist.init: local_size is 1.5, wanted a whole number below 2^31 (s.lua:2)" },
  { "another transport in a world", "peri.init { transport = 'self' } peri.init { transport = 'mpi' }",
    "dist.init: transport is 'mpi', but this rank is in a world by 'self' already: see peri.finish() (s.lua:2)" },
  { "another device transport in a world",
    "peri.init { transport = 'self' } peri.init { device_transport = 'sim', device = 'opaque' }",
    "dist.init: device_transport is 'sim', but this rank is in a world by 'self' already: see peri.finish() "
      .. "(s.lua:2)" },
  -- plans
  { "a sharding type that is unknown", "plan.ParameterSharding { sharding_type = 'table_wize' }",
    "ParameterSharding: sharding_type 'table_wize', allowed: column_wise, data_parallel, grid_shard, row_wise, "
      .. "table_column_wise, table_row_wise, table_wise (s.lua:2)" },
  { "a plan of strings", "plan.EmbeddingModuleShardingPlan { t = 'row_wise' }",
    "EmbeddingModuleShardingPlan: table 't' has a string, wanted "
    .. "a ParameterSharding (plan.table_wise(0), plan.row_wise(), ...) (s.lua:2)" },
  { "a rank that is not there",
    model .. "\nperi.DistributedModelParallel { module = m, plan = { ebc = { t = plan.table_wise(3) } } }",
    "peri_sharding_shards: table 't' (table_wise): rank 3 does not exist, allowed: 0..0 (s.lua:3)" },
  { "a plan for another module",
    model .. "peri.DistributedModelParallel { module = m, plan = { embeddings = { t = plan.row_wise() } } }",
    "DistributedModelParallel: the plan names module 'embeddings', which is no EmbeddingBagCollection of the model; "
      .. "those are: 'ebc' (s.lua:2)" },
  { "a plan for another table",
    model .. "peri.DistributedModelParallel { module = m, plan = { ebc = { users = plan.row_wise() } } }",
    "module 'ebc': table 't' is not in the plan; planned tables: users (s.lua:2)" },
  { "a plan's file that is not there",
    linear .. "peri.DistributedModelParallel { module = linear, plan = 'nowhere.lua' }",
    "plan: cannot open nowhere.lua: No such file or directory (s.lua:2)" },
  { "an error in a plan's file",
    linear .. "\nwrite('p.lua', 'return function(env)\\nreturn { t = env.ranks.x }\\nend')\n"
      .. "peri.DistributedModelParallel { module = linear, plan = 'p.lua' }",
    "attempt to index field 'ranks' (a nil value) (p.lua:2)" },
  { "a plan's file that returns nothing",
    linear .. "write('p.lua', '')\nperi.DistributedModelParallel { module = linear, plan = 'p.lua' }",
    "p.lua returns nil, wanted a ShardingPlan (s.lua:3)" },
  { "a plan's file that is no Lua",
    linear .. "write('p.lua', 'x = = 1')\nperi.DistributedModelParallel { module = linear, plan = 'p.lua' }",
    "plan: unexpected symbol near '=' (p.lua:1)" },
  { "a class for a model", "local M = nn.Module:extend 'M'\nperi.DistributedModelParallel { module = M }",
    "DistributedModelParallel: module is the class M, wanted an nn.Module (a class is called to make one) (s.lua:3)" },
  -- tables and features
  { "a feature for a list of features",
    "peri.EmbeddingBagConfig { name = 't', num_embeddings = 10, embedding_dim = 4, feature_names = 'f' }",
    "EmbeddingBagConfig: feature_names is 'f', wanted a list (s.lua:2)" },
  { "a pooling that is unknown",
    "peri.EmbeddingBagConfig { name = 't', num_embeddings = 9, embedding_dim = 4, feature_names = { 'f' }, pooling = "
      .. "'max' }",
    "EmbeddingBagConfig 't': pooling is 'max', allowed: MEAN, SUM (s.lua:2)" },
  { "tables that are no configurations", "peri.EmbeddingBagCollection { tables = { { name = 't' } } }",
    "EmbeddingBagCollection: entry 1 of tables is no EmbeddingBagConfig (s.lua:2)" },
  { "a rate of fused tables as a string",
    config .. "peri.EmbeddingBagCollection { tables = { config }, fused_params = { optimizer = 'sgd', learning_rate = "
      .. "'1' } }",
    "EmbeddingBagCollection: fused_params: learning_rate is '1', wanted a number (s.lua:2)" },
  { "a feature that the batch has not",
    ebc .. "ebc(peri.KeyedJaggedTensor { keys = { 'g' }, values = { 1 }, lengths = { 1 } })",
    "EmbeddingBagCollection: the batch has no feature 'f' (of table 't'); those are: g (s.lua:2)" },
  { "an id beyond the table", ebc .. "ebc(peri.KeyedJaggedTensor { keys = { 'f' }, values = { 10 }, lengths = { 1 } })",
    "EmbeddingBagCollection: table 't', feature 'f', sample 0: id 10 at place 0 of the bag, allowed: 0..9, or -1 for "
      .. "none (1 such ids) (s.lua:2)" },
  { "a tensor for a batch", ebc .. "ebc(peri.zeros { 3 })",
    "EmbeddingBagCollection: features is tensor f32 [3] on cpu, wanted a KeyedJaggedTensor (s.lua:2)" },
  { "a key that is not there", kjt .. "local x = kjt['g']", "KeyedJaggedTensor: no key 'g'; keys: f (s.lua:2)" },
  { "lengths that do not add up",
    "local k = peri.KeyedJaggedTensor { keys = { 'f' }, values = { 1, 2, 3 }, lengths = { 1 } }",
    "peri_kjt_sync: the lengths sum to 1, but there are 3 values (s.lua:2)" },
  { "no lengths", "peri.KeyedJaggedTensor { keys = { 'f' }, values = { 1 } }",
    "peri_kjt_new: neither lengths nor offsets are given (s.lua:2)" },
  -- files
  { "data that are not there", "data.criteo { path = 'nowhere.txt', batch_size = 4 }",
    "peri_criteo: nowhere.txt: No such file or directory (s.lua:2)" },
  { "data of another kind",
    "write('bad.txt', 'hello\\n')\nlocal batches = data.criteo { path = 'bad.txt', batch_size = 4 }\nbatches()",
    "peri_criteo: bad.txt:1: 1 columns, wanted 40 (a label, 13 integers, 26 categories): 'hello' (s.lua:4)" },
  { "data without a path", "data.criteo { batch_size = 4 }", "data.criteo: argument 'path' is missing (s.lua:2)" },
  { "a batch of nothing", "data.criteo { path = 'x', batch_size = 0 }",
    "data.criteo: batch_size is 0, allowed: whole numbers 1..2147483648 (s.lua:2)" },
  -- released tensors
  { "a tensor that was released", "local t = peri.zeros { 2 }\nt:release()\nt:fill(1)",
    "tensor:fill: this tensor was released (did it outlive its scope? keep it with peri.keep) (s.lua:4)" },
  { "a tensor that outlived its scope",
    "local t = peri.scope(function() return peri.zeros { 2 } end)\nprint(t:numel())",
    "tensor:numel: this tensor was released (did it outlive its scope? keep it with peri.keep) (s.lua:3)" },
  -- nil, and things of another kind
  { "a nil operand", "local t = peri.zeros { 2 } + nil", "add: b is nil, wanted a tensor or a number (s.lua:2)" },
  { "a nil shape", "local sizes\nperi.zeros(sizes)", "zeros: shape is nil, wanted a list (s.lua:3)" },
  { "a nil value", "peri.full({ 2 })", "full: value is nil, wanted a number (s.lua:2)" },
  { "nil for numbers", "local numbers\nperi.tensor(numbers)",
    "tensor: the data are nil, wanted a number or a list (s.lua:3)" },
  { "a nil argument", "nn.functional.relu()",
    "relu: t is nil, wanted a tensor (a method is called with a colon: x:relu(...)) (s.lua:2)" },
  { "a list for a tensor", linear .. "linear { 1, 2, 3 }", "linear: x is a table, wanted a tensor (s.lua:2)" },
  { "a method that is not there", "local t = peri.zeros { 2 }\nlocal u = t:relu6()",
    "a tensor has no method 'relu6'; is 'relu' meant? (s.lua:3)" },
  { "a dot for a colon", "local n = peri.zeros({ 2 }).numel()",
    "tensor:numel: self is nil, wanted a tensor (a method is called with a colon: x:numel(...)) (s.lua:2)" },
  { "a dot for a colon, of a function that is a method too", "local s = peri.zeros({ 2 }).sum(1)",
    "sum: t is 1, wanted a tensor (a method is called with a colon: x:sum(...)) (s.lua:2)" },
  { "an argument behind the last of a function", "peri.zeros({ 2 }, 'f32', 'cpu', true)",
    "zeros: an argument more than the 3 that it takes: true (s.lua:2)" },
  { "an argument behind the last of a function of tensors", "nn.functional.relu(peri.zeros { 2 }, 0.5)",
    "relu: an argument more than the 1 that it takes: 0.5 (s.lua:2)" },
  { "a field of nil, inside a model", [[
local Net, Tower = nn.Module:extend "Net", nn.Module:extend "Tower"
function Net:init() self.tower = Tower() end
function Net:forward(batch)
  return self.tower(batch)
end
function Tower:forward(batch)
  return batch.dense.values
end
peri.scope(Net(), {})]], "tower: attempt to index field 'dense' (a nil value) (s.lua:8)" },
  { "a state that is nil", linear .. "linear:load_state_dict(nil)",
    "Linear:load_state_dict: map is nil, wanted a table (s.lua:2)" },
  { "no batches", loop .. "for _ in pipeline:run() do end",
    "TrainPipelineBase: batches is nil, wanted a function that returns the next batch, such as data.synthetic {...} "
      .. "(s.lua:9)" },
  { "a list for batches", loop .. "for _ in pipeline:run {} do end",
    "TrainPipelineBase: batches is a table, wanted a function that returns the next batch, such as data.synthetic "
      .. "{...} (s.lua:9)" },
  { "a model that returns nothing",
    "local M = nn.Module:extend 'M'\nfunction M:forward() end\nfor _ in peri.TrainPipelineBase { model = M() "
      .. "}:run(function() return 1 end) do end",
    "TrainPipelineBase: the model returned nil, wanted the loss (a tensor) (s.lua:4)" },
  { "a model that returns more than a pipeline passes on",
    "local M = nn.Module:extend 'M'\nfunction M:forward(x) return x:sum(), x, x, x end\nfor _ in "
      .. "peri.TrainPipelineBase { model = M() }:run(function() return peri.ones { 2 } end) do end",
    "TrainPipelineBase: the model returned more than three values; a pipeline passes on the loss and two more, each a "
      .. "tensor or a table of tensors: return loss, { click = a, buy = b }, { click = c, buy = d } (s.lua:4)" },
  { "a forgotten optimizer", linear .. "peri.TrainPipelineBase { model = linear }",
    "TrainPipelineBase: schedule 'base' has an 'optimizer', but the pipeline has none for 2 parameters of the model "
      .. "('weight', ...): give optimizer = one of nn.optim, or optimizer = false to leave them as they are "
      .. "(s.lua:2)" },
  { "an optimizer by name", linear .. "peri.TrainPipelineBase { model = linear, optimizer = 'adam' }",
    "TrainPipelineBase: optimizer is 'adam', wanted one of nn.optim (s.lua:2)" },
  { "a backward pass of what has no gradient", "peri.zeros({}):backward()",
    "peri_backward_new: f32 [] does not require grad: no leaf of its computation does (s.lua:2)" },
  -- ranks
  { "splits for another number of ranks", "peri.init()\nperi.world():all_to_all_v(peri.zeros { 3 }, { 1, 2 }, { 3 })",
    "all_to_all_v: send_rows: 2 entries for the 1 ranks of group 'world' (s.lua:3)" },
  { "a reduction that is unknown", "peri.init()\nperi.world():all_reduce(peri.zeros { 1 }, 'avg')",
    "reduce operator 'avg', allowed: sum, min, max (s.lua:3)" },
  { "a mistake of one rank",
    "require('perilune.dist.sim').run(3, function(rank)\n  if rank == 2 then nn.Linear {} end\nend)",
    "rank 2 of 3: Linear: argument 'in_features' is missing (s.lua:3)" },
  { "an error of the script's own, of one rank",
    "require('perilune.dist.sim').run(3, function(rank)\n  if rank == 1 then error 'no data' end\nend)",
    "rank 1 of 3: no data (s.lua:3)" },
  { "a table that one rank raised",
    "require('perilune.dist.sim').run(3, function(rank)\n  if rank == 1 then error { code = 5 } end\nend)",
    "rank 1 of 3: the script raised a table: { code = 5 } (s.lua:2)" },
}

-- Runs every mistake as the launcher runs a script, one after the other: prints what would be reported.
local driver = [[
local errors = require "perilune.errors"
function write(path, text) local f = io.open(path, "w") f:write(text) f:close() end
local number = 0
for _, text in ipairs(dofile "mistakes.lua") do
  local chunk, why = loadstring(text, "@s.lua")
  local ok, err = xpcall(errors.run, errors.locate, chunk or function() error(why, 0) end)
  io.write((ok and "no error" or errors.describe(err)), "\1")
end
]]

local folder, clean
setup(function()
  folder, clean = shell.temporary()
  local list = {}
  for i, m in ipairs(mistakes) do list[i] = ("%q,\n"):format(prelude .. "\n" .. m[2]) end
  shell.write(folder .. "/mistakes.lua", "return {\n" .. table.concat(list) .. "}")
  shell.write(folder .. "/driver.lua", driver)
end)
teardown(function() clean() end)

local function reports(command, env)
  local out, status = shell.run(("cd %s && %s driver.lua"):format(folder, command), env)
  assert.equal(0, status, out)
  local list = {}
  for text in out:gmatch "([^\1]*)\1" do list[#list + 1] = text end
  assert.equal(#mistakes, #list, out)
  return list
end

local function check(found)
  local other = {}
  for i, m in ipairs(mistakes) do
    if found[i] ~= m[3] then other[#other + 1] = ("%s:\n  wanted %s\n  got    %s\n"):format(m[1], m[3], found[i]) end
  end
  assert.equal("", table.concat(other))
end

describe("the messages of common mistakes", function()
  it("are what a newcomer needs, under the launcher", function()
    if shell.no_launcher() then return pending(shell.no_launcher()) end
    local here = shell.run("pwd"):match "^[^\n]*"
    check(reports(here .. "/" .. shell.perilune .. " run"))
  end)

  it("and under plain luajit", function() check(reports("luajit", shell.luajit_env())) end)

  it("end with a line of the script, and show nothing of Perilune's own", function()
    assert.is_true(#mistakes >= 60)
    for _, m in ipairs(mistakes) do
      assert.matches(" %([sp]%.lua:%d+%)$", m[3])
      for _, raw in ipairs { "struct ", "cannot convert", "local '", "upvalue '", "perilune/", "cdata" } do
        assert.is_nil(m[3]:find(raw, 1, true), m[3])
      end
    end
  end)
end)
