-- Copies of trained sharded models: the same numbers, and nothing shared.
local peri = require "perilune"
local shell = require "spec.support.shell"
local worlds = require "spec.support.worlds"
local nn, plan, gather = peri.nn, peri.plan, peri.shard.gather_state_dict

local dense = { compute_kernel = "dense" }
local names = { "rows", "columns", "whole", "copied", "parts" }
local function entries(n)
  return { rows = plan.row_wise(), columns = plan.column_wise { ranks = { n - 1, 0 } }, whole = plan.table_wise(n - 1),
    copied = plan.data_parallel { compute_kernel = "fused" }, parts = plan.row_wise(dense) }
end

local Net = nn.Module:extend "Net"
function Net:init()
  local function tables(config)
    return peri.util.map(names, function(name)
      return config { name = name, num_embeddings = 13, embedding_dim = 8, feature_names = { "f" } }
    end)
  end
  local params = { optimizer = "partial_rowwise_adam", learning_rate = 0.1 }
  self.list = { peri.EmbeddingBagCollection { tables = tables(peri.EmbeddingBagConfig), fused_params = params },
    peri.EmbeddingCollection { tables = tables(peri.EmbeddingConfig), fused_params = params } }
  self.weighted = peri.embed.FeatureProcessedEmbeddingBagCollection {
    embedding_bag_collection = peri.EmbeddingBagCollection { tables = tables(peri.EmbeddingBagConfig),
      fused_params = params, is_weighted = true },
    feature_processors = peri.embed.PositionWeightedModuleCollection { max_feature_lengths = { f = 4 } } }
  self.over = nn.Linear { in_features = 80, out_features = 1 }
end
function Net:forward(kjt)
  local sequences, bags = self.list[2](kjt),
    nn.functional.cat({ self.list[1](kjt):values(), self.weighted(kjt):values() }, 2)
  local sum = self.over(bags):square():sum()
  for _, name in ipairs(names) do sum = sum + sequences["f@" .. name]:values():square():sum() end
  return sum
end

local function wrap(world, device)
  local n = world:size()
  return peri.DistributedModelParallel { module = Net(), group = world, device = device,
    plan = { ["list.0"] = entries(n), ["list.1"] = entries(n), weighted = entries(n) } }
end

local function batch(world, device, step)
  return peri.KeyedJaggedTensor { keys = { "f" }, values = { step, 12, world:rank() + step, 3 }, lengths = { 3, 1 },
    device = device }
end

local function train(model, world, device, from, to)
  for step = from, to do model(batch(world, device, step)):backward() end
end

local function numbers(dict)
  local copy = {}
  for name, x in peri.util.ordered(dict) do
    copy[name] = peri.Tensor.is(x) and table.concat(x:to_list(), " ") or type(x) == "table" and numbers(x) or x
  end
  return copy
end
local function state_of(model)
  return { numbers(gather(model:state_dict())), numbers(gather(model:fused_optimizer():state_dict())) }
end

describe("a copy of a trained sharded model", function()
  worlds.each("has its numbers, and learns on its own", function(world, device)
    peri.ffi.state.device = device
    local model = wrap(world, device)
    train(model, world, device, 1, 2)
    model:set_fused_learning_rate(0.03)
    local copy = model:copy()
    local before = state_of(model)
    assert.same(before, state_of(copy))
    assert.is_false(copy.training)
    assert.equal(0.03, copy:fused_optimizer().param_groups[1].lr)
    assert.equal(model(batch(world, device, 3)):item(), copy(batch(world, device, 3)):item())
    train(model, world, device, 3, 3)
    assert.same(before, state_of(copy))
    copy:train():init_data_parallel()
    train(copy, world, device, 3, 3) -- the iteration and the rates too
    local after = state_of(model)
    assert.same(after, state_of(copy))
    train(copy, world, device, 4, 4)
    assert.same(after, state_of(model))
    assert.not_same(after, state_of(copy))
  end, { sizes = { 1, 2, 3 } })

  worlds.each("is on the device that is asked for", function(world)
    local model = wrap(world, "cpu")
    train(model, world, "cpu", 1, 2)
    local copy = model:copy "opaque"
    assert.same(state_of(model), state_of(copy))
    assert.equal("opaque", copy.module.over.weight:device())
    local want = model(batch(world, "cpu", 3)):item()
    assert.near(want, copy(batch(world, "opaque", 3)):item(), 1e-5 * math.abs(want))
  end, { sizes = { 1, 2 }, devices = { "cpu" } })

  worlds.each("of an EmbeddingBag with index dedup beside it keeps what it was told", function(world, device)
    peri.ffi.state.device = device
    local bag = peri.shard.ShardedEmbeddingBag { num_embeddings = 9, embedding_dim = 4, mode = "mean",
      plan = { weight = plan.row_wise() }, group = world, fused_params = { optimizer = "sgd", learning_rate = 1 } }
    local ids, offsets = peri.tensor({ 1, 8, 3 }, "i64"), peri.tensor({ 0, 2 }, "i64")
    local other = bag:copy()
    assert.equal("mean", other.mode)
    assert.same(bag(ids, offsets):to_list(), other(ids, offsets):to_list())
    local ebc = peri.shard.ShardedEmbeddingBagCollection { group = world, plan = { t = plan.row_wise() },
      use_index_dedup = true, fused_params = { optimizer = "sgd", learning_rate = 1 },
      tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = 9, embedding_dim = 4,
        feature_names = { "f" } } } }
    assert.same({ asked = 0, sent = 0 }, peri.shard.sharded_model_copy(ebc):index_dedup_counts())
  end, { sizes = { 2 } })

  worlds.each("is refused where two would share a file, or replicas", function(world)
    local folder, remove = shell.temporary()
    local function model(class, options)
      options.module = peri.EmbeddingBagCollection { fused_params = { optimizer = "sgd", learning_rate = 1,
        cache_params = { directory = folder } },
        tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = 9, embedding_dim = 4,
          feature_names = { "f" } } } }
      return class(options)
    end
    local filed = model(peri.DistributedModelParallel, { group = world,
      plan = { [""] = { t = plan.row_wise { compute_kernel = "fused_uvm_caching" } } } })
    assert.error_matches(function() filed:copy() end,
      "ShardedEmbeddingBagCollection:copy: it has tables in files, which")
    filed.sharded[1]:release()
    remove()
    local replicas = model(peri.DMPCollection, { global_pg = world, sharding_group_size = 1 })
    assert.error_matches(function() replicas:copy() end,
      "DMPCollection:copy: its replicas are averaged together; copy the model")
  end, { sizes = { 1 }, devices = { "cpu" } })
end)
