-- What the reference says is refused, or is so, of names all over the library: one law each.
local peri = require "perilune"
local nn = peri.nn

local function refuses(words, f, ...)
  local ok, err = pcall(f, ...)
  assert.is_false(ok, "no error: " .. words)
  local message = tostring(type(err) == "table" and err.message or err)
  assert.is_truthy(message:find(words, 1, true), ("'%s' has not '%s'"):format(message, words))
end

describe("what the reference says", function()
  setup(function() peri.init() end)

  it("of first states of GRU and LSTM: a matrix for each layer and direction, of no other shape", function()
    for _, n in ipairs { 1, 2 } do
      local args = { input_size = 3, hidden_size = 4, num_layers = n, bidirectional = true }
      local x, right = peri.zeros { 2, 5, 3 }, peri.zeros { 2 * n, 5, 4 }
      assert.same({ 2, 5, 8 }, nn.GRU(args)(x, right):shape())
      for _, shape in ipairs { { 2 * n + 1, 5, 4 }, { 2 * n, 1, 4 }, { 2 * n, 5, 3 }, { 5, 4 } } do
        local wrong, wanted = peri.zeros(shape), ("wanted [%d, 5, 4]"):format(2 * n)
        refuses(wanted, nn.GRU(args), x, wrong)
        refuses(wanted, nn.LSTM(args), x, wrong, right)
        refuses(wanted, nn.LSTM(args), x, right, wrong)
      end
    end
  end)

  it("of arguments that there are not, behind the first ones", function()
    refuses("no argument 'logq'; allowed: ids, log_q", nn.InBatchSoftmaxLoss {}, peri.ones { 2, 2 }, peri.ones { 2, 2 },
      { logq = peri.zeros { 2 } })
    refuses("no argument 'weight'; allowed: keys", peri.KeyedJaggedTensor.from_lists,
      { keys = { "f" }, { { 1 } }, weight = { { { 2 } } } })
    for _, name in ipairs { "Identity", "ReLU", "Sigmoid", "Tanh", "SiLU", "GELU", "Softplus", "LogSigmoid" } do
      refuses(name .. ": no argument 'inplace'", nn[name], { inplace = true })
    end
  end)

  it("of elements of a result that has none", function()
    refuses("the result is 5, wanted one with elements, for the key 'b'", function()
      return peri.dist.GetItemLazyAwaitable(peri.NoWait(5), "b"):wait()
    end)
    assert.equal(7, peri.dist.GetItemLazyAwaitable(peri.NoWait { b = 7 }, "b"):wait())
  end)

  it("of ranges", function()
    refuses("desired_length is -1, wanted a whole number 0", function()
      peri.JaggedTensor({ values = { 1 }, lengths = { 1 } }):to_padded_dense(-1)
    end)
    refuses("leader_rank is 1, allowed: whole numbers 0..0", peri.dist.collective_utils.is_leader, peri.init(), 1)
    refuses("collective is 'all', allowed: all_to_all", function()
      peri.plan.Topology({ world_size = 2 }):bandwidth("all", 2, 2)
    end)
    refuses("wanted [B, 3, D]", nn.InteractionArch { num_sparse_features = 3 }, peri.ones { 1, 4 },
      peri.ones { 1, 2, 4 })
    refuses("num_sparse_features is -1", nn.InteractionArch, { num_sparse_features = -1 })
    refuses("go_to: n is -1", function()
      peri.pipeline.DataLoadingThread({ loader = function() return function() end end }):go_to(-1)
    end)
  end)

  it("of kinds", function()
    for _, dtype in ipairs { "i64", "i32", "bool" } do
      local t = peri.zeros({ 2, 2 }, dtype)
      for _, name in ipairs { "uniform_", "normal_", "trunc_normal_", "xavier_uniform_", "xavier_normal_",
        "kaiming_uniform_", "kaiming_normal_", "orthogonal_" } do
        refuses("wanted a tensor of f32, f64, f16 or bf16", nn.init[name], t)
      end
    end
    refuses("permutation is 5, wanted a tensor", peri.dist.exchange.SequenceEmbeddingsAwaitable,
      peri.NoWait(peri.ones { 2, 2 }), 5)
    refuses("id_list_features is 5, wanted a KeyedJaggedTensor", peri.dist.SparseFeatures, { id_list_features = 5 })
    refuses("gradient_division is 5, wanted true or false", peri.dist.ops.all_gather_base_pooled,
      { input = peri.ones { 1 }, gradient_division = 5 })
    refuses("clock is 5, wanted a function", nn.metrics.ThroughputMetric, { clock = 5 })
    refuses("pin_memory is 5, wanted true or false", peri.data.synthetic,
      { num_rows = 1, batch_size = 1, pin_memory = 5 })
    refuses("device 'gpu'", peri.autocast, { device = "gpu" }, function() end)
    assert.equal("f32", peri.autocast({ device = "cuda" }, function() return peri.ones({ 1 }):mul(2) end):dtype())
  end)

  it("of one rank: a value goes through all_gather_object as it does through several, as a copy", function()
    for n = 1, 2 do
      peri.dist.sim.run(n, function(_, world)
        local value = { 1, { a = "x" } }
        local got = world:all_gather_object(value)
        assert.same(value, got[n])
        assert.is_false(rawequal(value, got[n]) or rawequal(value[2], got[n][2]))
        refuses("is a function, allowed", world.all_gather_object, world, print)
      end)
    end
  end)

  it("of ranks outside of a group: nil, which is a value", function()
    peri.dist.sim.run(2, function(rank, world)
      assert.equal(1, select("#", world:new_group { 0 }))
      if rank == 1 then assert.is_nil((world:new_group { 0 })) end
    end)
  end)

  it("of counts: as many samples as a pass gives", function()
    for _, drop_last in ipairs { false, true } do
      for _, limit in ipairs { 30, 33, 1000 } do
        local loader = peri.data.synthetic { num_rows = 100, batch_size = 32, sparse_features = 1, rows = 5,
          drop_last = drop_last, limit = limit }
        local n = 0
        for batch in loader do n = n + batch.rows end
        assert.equal(n, loader:count())
      end
    end
  end)

  it("of optimizers with groups: names of the states that all parameters have", function()
    local function p() return peri.ones({ 2 }):requires_grad() end
    local adam = nn.optim.Adam { params = { p() } }
    assert.same({ "exp_avg", "exp_avg_sq" }, adam:state_names())
    adam:add_param_group { params = { p() }, amsgrad = true }
    assert.same({ "exp_avg", "exp_avg_sq" }, adam:state_names())
    local all = nn.optim.Adam { params = { { params = { p() } }, { params = { p() } } }, amsgrad = true }
    assert.same({ "exp_avg", "exp_avg_sq", "max_exp_avg_sq" }, all:state_names())
  end)

  it("of fused_params: lr is called learning_rate, wherever it comes from", function()
    local merge = peri.shard.utils.merge_fused_params
    assert.same({ learning_rate = 2, eps = 1 }, merge({ lr = 1, eps = 1 }, { lr = 2 }))
    assert.same({ learning_rate = 1 }, merge({ lr = 1 }))
    assert.same({ learning_rate = 3 }, merge({ learning_rate = 1 }, { lr = 3 }))
  end)

  it("of pipelines: they print themselves in a line", function()
    local pipeline = peri.EvalPipelineSparseDist { model = nn.ReLU() }
    assert.equal("EvalPipelineSparseDist (schedule 'eval_sparse_dist', 0 steps taken)", tostring(pipeline))
  end)

  it("of groups: what they are can be read, not set", function()
    local world = peri.init()
    for _, name in ipairs { "name", "rank_number", "world_size", "local_rank", "local_size", "transport" } do
      local is = world[name]
      refuses(name .. " cannot be set", function() world[name] = is end)
      assert.equal(is, world[name])
    end
    refuses("no field 'rank_numbr' can be set", function() world.rank_numbr = 1 end)
  end)

  it("of losses and metrics: their group is one of ranks", function()
    local words = "group is a number, wanted a group of ranks"
    for _, name in ipairs { "MSELoss", "BCEWithLogitsLoss", "InBatchSoftmaxLoss" } do
      refuses(words, nn[name], { group = 5 })
      refuses(words, function() nn[name]({}):set_group(5) end)
    end
    for _, name in ipairs { "AUCMetric", "NEMetric", "GAUCMetric" } do
      refuses(words, nn.metrics[name], { group = 5 })
    end
  end)

  it("of numbers, when an object is made", function()
    local optimizer = nn.optim.SGD { params = { peri.ones({ 2 }):requires_grad() }, lr = 1 }
    for _, clipping in ipairs { "norm", "value" } do
      for _, x in ipairs { -1, 0, 0 / 0 } do
        refuses("max_gradient is", nn.optim.GradientClippingOptimizer,
          { optimizer = optimizer, clipping = clipping, max_gradient = x })
      end
    end
    refuses("norm_type is -1", nn.optim.GradientClippingOptimizer,
      { optimizer = optimizer, clipping = "norm", norm_type = -1 })
    for _, name in ipairs { "alpha", "signal", "interaction", "bias" } do
      for _, x in ipairs { math.huge, -math.huge, 0 / 0, name == "alpha" and -1 or nil } do
        local args = { num_rows = 1, batch_size = 1, [name] = x }
        refuses(name .. (x == x and (" %g"):format(x) or ""), peri.data.synthetic, args)
      end
    end
    refuses("EmbeddingBagCollectionSharder: fused_params: no argument 'learning_rat'",
      peri.shard.EmbeddingBagCollectionSharder, { fused_params = { learning_rat = 1 } })
    assert.same({ eps = 1 }, peri.shard.EmbeddingBagCollectionSharder { fused_params = { eps = 1 } }.fused_params)
    local ok, why = pcall(peri.data.share, -1, 0, 1)
    assert.is_falsy(ok or tostring(why):find("colon", 1, true)) -- it is no method
    assert.matches("data.share: rows is %-1", tostring(why))
  end)

  it("of samples: a name that no column has", function()
    for _, sample in ipairs { { lable = 1, x = 2, a = 1 }, { label = 1, x = 2, b = { 1 } }, { label = 1, x = 2, 7 } } do
      local loader = peri.data.samples { batch_size = 1, dense = { "x" }, ids = { { name = "a", rows = 3 } },
        make = function() return function() return sample end end }
      refuses("allowed: a, label, x", loader)
    end
  end)

  it("of shapes, by the function that was called", function()
    local sparse, offsets = peri.sparse, peri.tensor({ 0, 2, 4 }, "i64")
    for _, name in ipairs { "jagged_dense_elementwise_add", "jagged_dense_elementwise_add_jagged_output",
      "jagged_dense_elementwise_mul" } do
      for _, shape in ipairs { { 2, 2, 2 }, { 3, 2, 3 }, { 2, 3 }, { 2, 2, 1 } } do
        refuses(("sparse.%s: y is [%s], wanted [2, L, 3]"):format(name, table.concat(shape, ", ")), sparse[name],
          peri.ones { 4, 3 }, { offsets }, peri.ones(shape))
      end
    end
    for _, shape in ipairs { { 3, 2 }, { 4 }, { 1, 2 }, { 6, 2 } } do -- 2 bags; of 3 heads 4 columns are no multiple
      refuses("sparse.batched_dense_vec_jagged_2d_mul: v [" .. table.concat(shape, ", "),
        sparse.batched_dense_vec_jagged_2d_mul, peri.ones(shape), peri.ones { 4, 4 }, offsets)
    end
    local world = peri.init()
    for name, args in pairs { reduce_scatter = {}, all_to_all = {}, reduce_scatter_v = { { 1 } }, -- any order: a set
      all_gather_v = { { 1 } }, all_to_all_v = { { 1 }, { 1 } } } do
      refuses(name .. ": input is one number, wanted a tensor with a dimension", world[name], world, peri.tensor(3),
        unpack(args))
    end
  end)

  it("of schedules one after the other, which are a function of the step", function()
    refuses("no 'SequentialLR'; here it is 'LambdaLR'", function() return nn.optim.SequentialLR end)
  end)

  it("of metrics: they print what they were made with", function()
    local m = nn.metrics
    assert.equal("NEMetric { include_logloss = true, window_size = 7 }",
      tostring(m.NEMetric { window_size = 7, include_logloss = true }))
    assert.equal("AUCMetric { group = false, window_size = 10000000 }", tostring(m.AUCMetric { group = false }))
    assert.equal("RecMetricModule { auc-t, ne-t }", tostring(m.RecMetricModule { metrics = { NEMetric = {},
      AUCMetric = {} }, tasks = { { name = "t", label_name = "l", prediction_name = "p" } } }))
  end)
end)
