-- A field that an object does not have cannot be assigned: `optimizer.lr = 5` would do nothing. The error tells the
-- names that there are.
local peri = require "perilune"
local util = peri.util
local nn, plan, embed, optim = peri.nn, peri.plan, peri.embed, peri.nn.optim

local function config(more)
  local a = { name = "t", num_embeddings = 10, embedding_dim = 4, feature_names = { "f" } }
  for key, value in pairs(more or {}) do a[key] = value end
  return peri.EmbeddingBagConfig(a)
end
local function parameters() return { peri.ones({ 2, 3 }):requires_grad(), peri.ones({ 2, 3 }):requires_grad() } end
local function sgd() return optim.SGD { params = parameters() } end
local function topology() return plan.Topology { world_size = 2 } end
local world = peri.dist.init { transport = "self" }
local function fused() return { optimizer = "sgd", learning_rate = 1 } end
local function ebc() return peri.EmbeddingBagCollection { tables = { config() }, fused_params = fused() } end
local function dmp()
  local m = nn.Module()
  m.ebc = ebc()
  return peri.DistributedModelParallel { module = m, group = world, plan = { ebc = { t = plan.table_wise(0) } } }
end

--- What scripts hold: name -> how it is made.
local makers = {
  SGD = sgd, Adam = function() return optim.Adam { params = parameters() } end,
  RowWiseAdagrad = function() return optim.RowWiseAdagrad { params = parameters() } end,
  StepLR = function() return optim.StepLR { optimizer = sgd(), step_size = 1 } end,
  OneCycleLR = function()
    return optim.OneCycleLR { optimizer = sgd(), max_lr = 1, total_steps = 9, cycle_momentum = false }
  end, WarmupOptimizer = function() return optim.WarmupOptimizer { optimizer = sgd(), stages = {} } end,
  GradientClippingOptimizer = function() return optim.GradientClippingOptimizer { optimizer = sgd() } end,
  CombinedOptimizer = function() return optim.CombinedOptimizer { sgd() } end,
  FusedOptimizer = function() return dmp():fused_optimizer() end,
  EmbeddingBagConfig = config, EmbeddingConfig = function()
    return peri.EmbeddingConfig { name = "t", num_embeddings = 10, embedding_dim = 4, feature_names = { "f" } }
  end,
  CacheParams = function() return embed.CacheParams {} end,
  HashZchEvictionConfig = function() return embed.HashZchEvictionConfig { features = { "f" }, single_ttl = 1 } end,
  ParameterSharding = function() return plan.row_wise() end,
  ParameterConstraints = function() return plan.ParameterConstraints {} end,
  ShardingPlan = function() return plan.ShardingPlan {} end, Topology = topology,
  EmbeddingShardingPlanner = function() return plan.EmbeddingShardingPlanner { topology = topology() } end,
  QuantizedCommCodec = function() return peri.dist.QuantizedCommCodec {} end,
  QuantizedCommCodecs = function() return peri.dist.QuantizedCommCodecs {} end,
  ["peri.Group"] = function() return world end,
  TrainPipelineBase = function() return peri.TrainPipelineBase { model = nn.Sequential {}, optimizer = false } end,
  Schedule = function() return peri.pipeline.schedules.base end,
  NEMetric = function() return nn.metrics.NEMetric {} end, AUCMetric = function() return nn.metrics.AUCMetric {} end,
  Linear = function() return nn.Linear { in_features = 3, out_features = 2 } end,
  Dropout = function() return nn.Dropout {} end,
  MLP = function() return nn.MLP { in_size = 3, layer_sizes = { 2 } } end,
  BatchNorm1d = function() return nn.BatchNorm1d { num_features = 3 } end, EmbeddingBagCollection = ebc,
  ShardedEmbeddingBagCollection = function() return dmp().module.ebc end,
  Saver = function()
    return peri.checkpoint.Saver { parts = { model = nn.Linear { in_features = 3, out_features = 2 } } }
  end,
  ["synthetic loader"] = function() return peri.data.synthetic { batch_size = 2, num_rows = 10 } end,
}

describe("an object", function()
  for name, make in util.ordered(makers) do
    it("takes no field that it does not have: " .. name, function()
      local object = make()
      local class = getmetatable(object)
      for _, key in ipairs { "num_embedings", "lrr", "learning_rte", 1 } do
        for _, value in ipairs { 5, "x", true, {}, peri.ones({ 1 }):requires_grad() } do
          local ok, err = pcall(function() object[key] = value end)
          assert.is_false(ok, tostring(key))
          assert.equal(("%s: no field '%s' can be set; allowed: "):format(class.class_name, tostring(key)),
            err.message:match "^(.- can be set; allowed: )")
          assert.is_nil(rawget(object, key))
        end
      end
      for key, value in pairs(object) do object[key] = value end -- those that it has
    end)
  end

  it("that sets numbers another way says how", function()
    local o = optim.SGD { params = parameters(), lr = 1 }
    local ok, err = pcall(function() o.lr = 5 end)
    assert.is_false(ok)
    assert.equal("SGD: no field 'lr' can be set, it is a method; allowed: names, param_groups, params; numbers are "
      .. "fields of param_groups[i]: dampening, lr, momentum, weight_decay; set_lr(lr) sets the rate of all",
      err.message)
    assert.equal(1, o:lr())
    assert.is_false((pcall(function() o.param_groups[1].lrr = 5 end)))
  end)

  it("takes what it could have been made with, and a method of one's own in place of its own", function()
    local c = config()
    c.init_fn = embed.constant(3)
    assert.equal(3, c:initialiser().a)
    local o = sgd()
    function o.lr() return 7 end
    assert.equal(7, o:lr())
  end)

  it("of a script's own class takes any", function()
    local Mine = util.class("Mine", optim.SGD)
    local o = Mine { params = parameters() }
    o.count = 1
    assert.equal(1, o.count)
    for _, base in ipairs { nn.Module, nn.Linear, nn.Sequential } do
      local Own = base:extend "Own"
      function Own.init() end
      local m = Own()
      m.count, m.inner = 1, nn.Linear { in_features = 1, out_features = 1 }
      assert.equal(1, m.count)
      assert.equal("inner", m:named_children()[1].name)
    end
    local m = nn.Module()
    m.count = 1
  end)
end)

describe("a plan", function()
  it("does not change with what it was made of, nor does a model that has it", function()
    local ranks, cache = { 0, 0 }, plan.CacheParams { load_factor = 0.5 }
    local cached = plan.row_wise { compute_kernel = "fused_uvm_caching", cache_params = cache }
    local whole, columns = plan.table_wise(0), plan.column_wise { ranks = ranks }
    ranks[1], cache.load_factor, cache.algorithm = 7, 0.1, "LFU"
    local tables = {}
    for i, entry in ipairs { cached, whole, columns } do
      tables["t" .. i] = entry
    end
    local made = plan.ShardingPlan { [""] = tables }
    local text = tostring(made)
    local e = peri.EmbeddingBagCollection { fused_params = fused(), tables = { config { name = "t1" },
      config { name = "t2" }, config { name = "t3", embedding_dim = 8 } } }
    local model = peri.DistributedModelParallel { module = e, plan = made, group = world }
    cached.cache_params.load_factor, whole.ranks[1], whole.sharding_type = 0.2, 5, "row_wise"
    columns.ranks[2], columns.compute_kernel, tables.t1 = 9, "dense", nil
    assert.equal(text, tostring(made))
    assert.equal(text, tostring(model.plan))
    assert.matches("t1 +row_wise fused_uvm_caching %(LRU 0.5%)", text)
    assert.matches("t2 +table_wise fused ranks 0\n.*t3 +column_wise fused ranks 0,0", text)
  end)
end)

describe("a schedule", function()
  it("does not change with the list of its milestones", function()
    local milestones = { 2 }
    local o = optim.SGD { params = parameters(), lr = 1 }
    local s = optim.MultiStepLR { optimizer = o, milestones = milestones, gamma = 0.5 }
    milestones[1], milestones[2] = 1, 3
    local rates = {}
    for i = 1, 4 do
      s:step()
      rates[i] = o:lr()
    end
    assert.same({ 1, 0.5, 0.5, 0.5 }, rates)
  end)
end)

describe("a collection", function()
  for _, used in ipairs { false, true } do
    it("does not change with what it was made of, " .. (used and "after" or "before") .. " its first batch", function()
      local batch = peri.KeyedJaggedTensor { keys = { "f" }, values = { 3 }, lengths = { 1 } }
      local c, params = config { init_fn = embed.constant(1) }, fused()
      local list = { c }
      local e = peri.EmbeddingBagCollection { tables = list, fused_params = params }
      if used then e(batch) end
      c.name, c.embedding_dim, c.num_embeddings, c.pooling, c.init_fn = "u", 2, 2, "MEAN", embed.constant(7)
      c.feature_names[1], list[2], params.learning_rate = "g", config { name = "v" }, 0.5
      local rows = e(batch):values()
      assert.same({ 1, 1, 1, 1 }, rows:to_list())
      rows:sum():backward()
      assert.same({ 0, 0, 0, 0 }, e(batch):values():to_list())
      assert.equal("EmbeddingBagCollection(t: 10 x 4 SUM)", tostring(e))
    end)
  end

  it("refuses another learning rate in its fused_params once its tables are made", function()
    local batch = peri.KeyedJaggedTensor { keys = { "f" }, values = { 3 }, lengths = { 1 } }
    for _, kind in ipairs { "EmbeddingBagCollection", "EmbeddingCollection" } do
      local e = peri[kind] { tables = { (kind:match "Bag" and peri.EmbeddingBagConfig or peri.EmbeddingConfig) {
        name = "t", num_embeddings = 10, embedding_dim = 4, feature_names = { "f" } } }, fused_params = fused() }
      e.fused_params.learning_rate = 2
      e(batch)
      assert.equal(2, e:fused_optimizer().param_groups[1].lr)
      e:set_learning_rate(3)
      e(batch)
      e.fused_params.learning_rate = 4
      for _, f in ipairs { function() e(batch) end, function() peri.DistributedModelParallel { module = e,
        group = world } end } do
        local ok, err = pcall(f)
        assert.is_false(ok)
        assert.matches(kind .. ": fused_params.learning_rate is now 4, but was 2 when the tables were made",
          err.message)
      end
      assert.equal(3, e:fused_optimizer().param_groups[1].lr)
    end
  end)

  it("refuses at its next use what a script changed of the fields its tables were made of", function()
    local batch = peri.KeyedJaggedTensor { keys = { "f" }, values = { 3 }, lengths = { 1 } }
    local changes = { -- path -> another value
      ["tables[1].num_embeddings"] = 20, ["tables[1].embedding_dim"] = 8, ["tables[1].name"] = "u",
      ["tables[1].pooling"] = "MEAN", ["tables[1].data_type"] = "FP16", ["tables[1].weight_init_min"] = -3,
      ["tables[1].init_fn"] = embed.constant(9), ["tables[1].feature_names[1]"] = "g",
      ["tables[1].feature_names[2]"] = "g", ["tables[2]"] = config { name = "v" },
      ["tables"] = { config() }, ["fused_params.optimizer"] = "adam",
      ["fused_params.weight_decay"] = 0.5, ["fused_params.cache_params"] = {}, ["fused_params"] = fused(),
      ["fused_params.stochastic_rounding"] = false, ["seed"] = 3, ["device"] = "opaque",
    }
    for path, value in util.ordered(changes) do
      local e = ebc()
      e(batch)
      local owner, key = e, nil
      for step in path:gmatch "[%w_]+" do
        if key then owner = owner[key] end
        key = tonumber(step) or step
      end
      local was = owner[key]
      owner[key] = value
      local ok, err = pcall(e, batch)
      assert.is_false(ok, path)
      assert.equal(("EmbeddingBagCollection: %s is now "):format(path), err.message:sub(1, 32 + #path))
      owner[key] = was
      e(batch)
    end
    local e = ebc() -- columns and names of outputs are known before there are tables
    e.tables[1].embedding_dim = 8
    assert.error_matches(function() e(batch) end, "tables%[1%].embedding_dim is now 8, but was 4 when")
    local model = dmp()
    model.module.ebc(batch)
    model.module.ebc.tables[1].pooling = "MEAN"
    assert.error_matches(function() model.module.ebc(batch) end,
      "ShardedEmbeddingBagCollection: tables%[1%].pooling is now 'MEAN', but was 'SUM' when")
    local many = {}
    for i = 1, 60 do many[i] = config { name = "t" .. i } end
    e = peri.EmbeddingBagCollection { tables = many, fused_params = fused() }
    e(batch)
    e.tables[37].num_embeddings = 11
    assert.error_matches(function() for _ = 1, 20 do e(batch) end end, "tables%[37%].num_embeddings is now 11")
    local taken = peri.EmbeddingBagCollection { tables = e.tables, fused_params = e.fused_params } -- copies
    taken(batch)
    e.tables[1].num_embeddings = 12
    for _ = 1, 20 do taken(batch) end
  end)
end)

describe("a parameter", function()
  it("is once in an optimizer, in several together, and in a norm", function()
    local p, q = unpack(parameters())
    local again = p:detach() -- another tensor of the same memory is another parameter
    assert.is_true(#optim.SGD({ params = { p, again:requires_grad() } }).params == 2)
    local function refused(text, f, ...)
      local ok, err = pcall(f, ...)
      assert.is_false(ok)
      assert.equal(text, err.message)
    end
    local twice = "%s: params[3] is the same tensor as params[1]; each may be there once"
    for _, name in ipairs { "SGD", "Adagrad", "Adam", "AdamW", "RMSprop", "RowWiseAdagrad" } do
      refused(twice:format(name), optim[name], { params = { p, q, p } })
      refused(twice:format(name), optim[name], { params = { { name = "a", tensor = p }, { name = "b", tensor = q },
        { name = "c", tensor = p } } })
    end
    refused(twice:format "grad_norm", optim.grad_norm, { p, q, p })
    refused(twice:format "clip_grad_norm", optim.clip_grad_norm, { p, q, p }, 1)
    refused("CombinedOptimizer: the parameters of all, params[3] is the same tensor as the parameters of all, "
      .. "params[1]; each may be there once", optim.CombinedOptimizer,
      { { name = "a", optimizer = optim.SGD { params = { p, q } } }, { name = "b",
        optimizer = optim.Adam { params = { p } } } })
    local tied = nn.Module()
    tied.a, tied.b = nn.Linear { in_features = 3, out_features = 2 }, nn.Linear { in_features = 3, out_features = 2 }
    tied.b.weight = tied.a.weight
    assert.equal(3, #optim.SGD({ params = tied }).params) -- of a module, what is shared counts once
  end)
end)
