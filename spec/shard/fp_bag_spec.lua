-- Feature-processed collections over ranks, under DistributedModelParallel: TorchRec's own results
-- (spec/golden/sharded/fp_ebc_*), and the law that a plan changes nothing.
local peri = require "perilune"
local golden = require "spec.support.golden"
local sim = require "perilune.dist.sim"
local worlds = require "spec.support.worlds"
local embed, plan, nn = peri.embed, peri.plan, peri.nn

--- The loss of a rank: the sum of what comes back times a gradient, by output.
local Model = nn.Module:extend "Model"
function Model:init(fp) self.fp = fp end
function Model:forward(features, grads)
  local kt = self.fp(features)
  local loss
  for key, grad in peri.util.ordered(grads) do
    local term = (kt[key] * grad):sum()
    loss = loss and loss + term or term
  end
  return loss, kt
end

local function processors_of(case, device)
  if case.processor == "PositionWeightedModuleCollection" then
    return embed.PositionWeightedModuleCollection { max_feature_lengths = case.max_feature_lengths, device = device }
  end
  assert.equal("PositionWeightedModule", case.processor)
  local list = {}
  for name, length in pairs(case.max_feature_lengths) do
    list[name] = embed.PositionWeightedModule { max_feature_length = length, device = device }
  end
  return list
end

local function make(case, world, device)
  local entries, dense = {}, false
  local tables = peri.util.map(case.tables, function(t)
    local placed = t.sharding_type ~= "row_wise" and t.sharding_type ~= "data_parallel"
    entries[t.name] = plan.ParameterSharding { sharding_type = t.sharding_type, compute_kernel = t.compute_kernel,
      ranks = placed and t.ranks or nil }
    dense = dense or t.compute_kernel == "dense"
    return peri.EmbeddingBagConfig { name = t.name, num_embeddings = t.num_embeddings, embedding_dim = t.embedding_dim,
      feature_names = t.feature_names, pooling = t.pooling }
  end)
  local optimizer = { EXACT_SGD = "sgd", EXACT_ROWWISE_ADAGRAD = "rowwise_adagrad" }
  local fp = embed.FeatureProcessedEmbeddingBagCollection {
    embedding_bag_collection = peri.EmbeddingBagCollection { tables = tables, is_weighted = true, device = "meta",
      fused_params = { optimizer = assert(optimizer[case.optimizer.name]), learning_rate = case.optimizer.learning_rate,
        eps = case.optimizer.eps } },
    feature_processors = processors_of(case, device),
  }
  for _, p in ipairs(fp:feature_processors():named_parameters()) do
    p.tensor:detach():copy(case:tensor(("position_weight/%s/init"):format(p.name:match "f%d"), device))
  end
  return peri.DistributedModelParallel { module = Model(fp), plan = { fp = entries }, group = world, device = device,
    gradient_division = case.gradient_division }
end

--- Dense tables and processors, each with its own learning rate.
local function optimizers(case, model)
  local tables, weights = {}, {}
  for _, p in ipairs(model:named_parameters()) do
    local list = p.name:find "embedding_bags" and tables or weights
    list[#list + 1] = p.tensor
  end
  local list = { nn.optim.SGD { params = weights, lr = case.position_weight_lr } }
  if #tables > 0 then list[2] = nn.optim.SGD { params = tables, lr = case.dense_optimizer.lr } end
  return list
end

local function step_of(case, model, at, device)
  local grads, column, whole = {}, 0, case:tensor(at .. "grad_output", device)
  local want = case:tensor(at .. "output/values", device)
  for i, key in ipairs(case.output_keys) do
    grads[key] = whole:slice(2, column, column + case.output_dims[i])
    column = column + case.output_dims[i]
  end
  local loss, kt = model(peri.KeyedJaggedTensor { keys = case.kjt_keys,
    values = case:tensor(at .. "input/values", device), lengths = case:tensor(at .. "input/lengths", device) }, grads)
  column = 0
  for i, key in ipairs(case.output_keys) do
    golden.assert_near(want:slice(2, column, column + case.output_dims[i]):to_list(), kt[key]:to_list(), case.tol,
      at .. key)
    column = column + case.output_dims[i]
  end
  loss:backward()
end

local function run(case, world, device)
  local model = make(case, world, device)
  local sharded = model.module.fp
  assert.equal("ShardedFeatureProcessedEmbeddingBagCollection", sharded.class_name)
  local shards = sharded:local_shards()
  for _, s in ipairs(shards) do s.state("weight"):copy(case:part_of(("table/%s/init"):format(s.table), s)) end
  local trained = optimizers(case, model)
  for step = 1, case.steps do
    for _, o in ipairs(trained) do o:zero_grad() end
    step_of(case, model, ("rank%d/step%d/"):format(world:rank(), step), device)
    for _, o in ipairs(trained) do o:step() end
    for _, s in ipairs(shards) do
      golden.assert_near(case:part_of(("table/%s/step%d"):format(s.table, step), s):to_list(),
        s.state("weight"):to_list(), case.tol, ("table %s, step %d"):format(s.table, step))
    end
    for name in pairs(case.max_feature_lengths) do
      local processors = sharded:feature_processors()
      local got = processors["position_weights." .. name] or processors[name].position_weight
      case:assert_near(("position_weight/%s/step%d"):format(name, step), got:detach())
    end
  end
end

describe("a feature-processed collection over ranks reproduces", function()
  for _, name in ipairs(golden.names("sharded", "^fp_ebc_")) do
    local case = golden.load(name)
    worlds.each(case.name, function(world, device) run(case, world, device) end, { sizes = { case.world_size },
      local_size = case.local_size < case.world_size and case.local_size or 0 })
  end
end)

describe("a feature-processed collection over ranks", function()
  local function collection(device, described)
    return embed.FeatureProcessedEmbeddingBagCollection {
      embedding_bag_collection = peri.EmbeddingBagCollection { is_weighted = true, seed = 3, device = described
        and "meta" or device, tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = 40, embedding_dim = 4,
          feature_names = { "f", "g" } } },
        fused_params = { optimizer = "sgd", learning_rate = 0.5 } },
      feature_processors = embed.PositionWeightedModuleCollection { max_feature_lengths = { f = 3 }, device = device },
    }
  end
  local function batch(device, length)
    return peri.KeyedJaggedTensor { keys = { "f", "g" }, values = peri.tensor({ 1, 2, 3, 4, 5, 6, 7 }, "i64", device),
      lengths = peri.tensor({ length, 4 - length, 2, 1 }, "i32", device) }
  end
  local kinds = { plan.table_wise(0), plan.row_wise(), plan.data_parallel { compute_kernel = "fused" } }

  worlds.each("has the state of the unsharded one, whatever the plan", function(world, device)
    for _, entry in ipairs(kinds) do
      local whole, want = collection(device), {}
      whole(batch(device, 2))
      for name in pairs(whole:state_dict()) do want[name] = true end
      local model = peri.DistributedModelParallel { module = collection(device, true), plan = { [""] = { t = entry } },
        group = world, device = device }
      local names = {}
      for name in pairs(model:state_dict()) do names[name] = true end
      assert.same(want, names)
      local got, all = model(batch(device, 2)), whole(batch(device, 2))
      golden.assert_near(all:values():to_list(), got:values():to_list(), { abs = 1e-6, rel = 1e-6 })
    end
  end, { sizes = { 1, 2, 3 } })

  --- The bags of a rank: fixed, of none on one rank, or of as many of f as of g and one more.
  local function bags(kind, rank, device)
    local n = kind == "empty" and rank == 0 and 0 or 2
    local f, g, more = {}, {}, kind == "variable" and 1 or 0
    for i = 1, n do f[i] = { (rank + i) % 40, 3 * i, i > 1 and 7 or nil } end
    for i = 1, n + more do g[i] = { (5 * rank + i) % 40, i } end
    local kjt = peri.KeyedJaggedTensor.from_lists { keys = { "f", "g" }, f, g, device = device }
    if more == 0 then return kjt end
    return peri.KeyedJaggedTensor { keys = { "f", "g" }, values = kjt:values(), lengths = kjt:lengths(),
      stride_per_key_per_rank = { { 2 }, { 3 } },
      inverse_indices = { { "f", "g" }, peri.tensor({ { 1, 0, 1 }, { 2, 2, 0 } }, "i64", device) } }
  end

  for _, kind in ipairs { "fixed", "empty", "variable" } do
    worlds.each("gives processors the mean of the unsharded gradients, batches: " .. kind, function(world, device, n)
      for _, entry in ipairs(kinds) do
        local whole = collection(device)
        local model = peri.DistributedModelParallel { module = Model(collection(device, true)),
          plan = { fp = { t = entry } }, group = world, device = device }
        local batch_of = bags(kind, world:rank(), device)
        local want = whole(batch_of)
        local grads = { f = peri.full({ want:values():size(1), 4 }, 0.5, "f32", device) }
        local loss, got = model(batch_of, grads)
        golden.assert_near(want:values():to_list(), got:values():to_list(), { abs = 1e-6, rel = 1e-6 })
        loss:backward()
        local alone = (want.f * grads.f):sum()
        alone:backward()
        local own = whole:feature_processors()["position_weights.f"]
        local sum = (own:grad() or peri.zeros({ 3 }, "f32", device)):detach()
        world:all_reduce(sum):wait()
        golden.assert_near((sum * (1 / n)):to_list(),
          model.module.fp:feature_processors()["position_weights.f"]:grad():to_list(), { abs = 1e-6, rel = 1e-5 })
      end
    end, { sizes = { 1, 2, 3 } })
  end

  it("tells all ranks of a bag that is too long", function()
    local seen = {}
    local ok, err = pcall(sim.run, 3, function(_, world)
      local device = "cpu"
      local model = peri.DistributedModelParallel { module = collection(device, true),
        plan = { [""] = { t = plan.row_wise() } }, group = world, device = device }
      world:barrier():wait()
      local fine, why = pcall(function()
        return model(batch(device, world:rank() == 1 and 4 or 2)):values():to_list()
      end)
      seen[world:rank() + 1] = not fine and tostring(type(why) == "table" and why.message or why)
      error(why, 0)
    end, { device = "cpu" })
    assert.is_false(ok)
    for _, text in ipairs { tostring(err), seen[1], seen[2], seen[3] } do
      assert.truthy(text:find("sample 0 of feature 'f' has 4 ids, allowed: 0..3", 1, true), text)
    end
  end)

  it("refuses to be made without processors", function()
    for _, given in ipairs { false, {} } do
      local ok, err = pcall(function()
        peri.shard.ShardedFeatureProcessedEmbeddingBagCollection { feature_processors = given or nil, tables = {},
          plan = {} }
      end)
      assert.is_false(ok)
      assert.truthy(tostring(err):find("feature_processors is ", 1, true), tostring(err))
    end
  end)
end)
