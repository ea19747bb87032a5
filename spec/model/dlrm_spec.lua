-- DistributedModelParallel: a DLRM trained over ranks is TorchRec's (spec/golden/sharded/dlrm_*), and that of any other plan and world.
local peri = require "perilune"
local golden = require "spec.support.golden"
local worlds = require "spec.support.worlds"
local sim = require "perilune.dist.sim"
local nn, plan = peri.nn, peri.plan

-- -- TorchRec's own ---------------------------------------------------------------------------------------------------------------------

local kernels = { EXACT_ROWWISE_ADAGRAD = "rowwise_adagrad", EXACT_ADAGRAD = "adagrad", EXACT_SGD = "sgd" }

local function golden_model(case, world, device)
  local tables, entries = {}, {}
  for i, t in ipairs(case.tables) do
    tables[i] = peri.EmbeddingBagConfig { name = t.name, num_embeddings = t.num_embeddings, embedding_dim = t.embedding_dim, feature_names = t.feature_names }
    local placed = t.sharding_type == "table_wise" or t.sharding_type == "column_wise"
    entries[t.name] = plan.ParameterSharding { sharding_type = t.sharding_type, compute_kernel = t.compute_kernel, ranks = placed and t.ranks or nil }
  end
  local dlrm = nn.DLRM {
    embedding_bag_collection = peri.EmbeddingBagCollection {
      tables = tables, device = "meta",
      fused_params = { optimizer = kernels[case.optimizer.name], learning_rate = case.optimizer.learning_rate, eps = case.optimizer.eps },
    },
    dense_in_features = case.dense_in_features, dense_arch_layer_sizes = case.dense_arch_layer_sizes,
    over_arch_layer_sizes = case.over_arch_layer_sizes, dense_device = device,
  }
  return peri.DistributedModelParallel {
    module = nn.DLRMTrain(dlrm), plan = { ["model.sparse_arch.embedding_bag_collection"] = entries }, group = world, device = device,
  }
end

local function part(whole, s) return whole:slice(1, s.row_offset, s.row_offset + s.rows):slice(2, s.col_offset, s.col_offset + s.cols) end

local function reproduce(case, world, device)
  local model = golden_model(case, world, device)
  local parameters = {}
  for _, p in ipairs(model.module:named_parameters()) do parameters[p.name] = p.tensor end
  for _, name in ipairs(case.dense_parameters) do
    assert(parameters[name], name .. " is no parameter here"):detach():copy(case:tensor("dense/" .. name .. "/init", device))
  end
  local shards = model.sharded[1]:local_shards()
  for _, s in ipairs(shards) do s.state("weight"):copy(part(case:tensor("table/" .. s.table .. "/init", device), s)) end
  local o = case.dense_optimizer
  local optimizer = nn.optim[o.name] { params = model:dense_parameters(), lr = o.lr, eps = o.eps }
  local step = 0
  local pipeline = peri.TrainPipelineBase { model = model, optimizer = optimizer }
  local function batches()
    step = step + 1
    if step > case.steps then return nil end
    local at = ("rank%d/step%d/input/"):format(world:rank(), step)
    return {
      dense_features = case:tensor(at .. "dense_features", device), labels = case:tensor(at .. "labels", device),
      sparse_features = peri.KeyedJaggedTensor {
        keys = case.kjt_keys, values = case:tensor(at .. "values", device), lengths = case:tensor(at .. "lengths", device),
      },
    }
  end
  for s = 1, case.steps do
    local loss, logits = pipeline:progress(batches)
    local at = ("rank%d/step%d/"):format(world:rank(), s)
    golden.assert_near(case:list(at .. "loss"), { loss:item() }, case.tol, at .. "loss")
    golden.assert_near(case:list(at .. "logits"), logits:to_list(), case.tol, at .. "logits")
    for _, name in ipairs(case.dense_parameters) do
      local key = ("dense/%s/step%d"):format(name, s)
      golden.assert_near(case:list(key), parameters[name]:to_list(), case.tol, key)
    end
    for _, shard in ipairs(shards) do
      local key = ("table/%s/step%d"):format(shard.table, s)
      golden.assert_near(part(case:tensor(key, "cpu"), shard):to_list(), shard.state("weight"):to_list(), case.tol, key)
    end
  end
  assert.is_nil((pipeline:progress(batches)))
end

describe("DistributedModelParallel reproduces", function()
  for _, name in ipairs(golden.names("sharded", "^dlrm_")) do
    local case = golden.load(name)
    worlds.each(case.name, function(world, device) reproduce(case, world, device) end, { sizes = { case.world_size } })
  end
end)
