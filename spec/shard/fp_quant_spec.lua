-- Quantized collections behind feature processors: in one piece they give what trained ones give (to the precision of
-- their rows), in shards, over ranks and over places of one process, what they give in one piece.
--
-- mpirun: 3
local peri = require "perilune"
local golden = require "spec.support.golden"
local support = require "spec.support.tbe"
local worlds = require "spec.support.worlds"
local plan, shard, embed, ShardingEnv = peri.plan, peri.shard, peri.embed, peri.ShardingEnv
local Quant = embed.QuantFeatureProcessedEmbeddingBagCollection

local lengths = { f1 = 6, f2 = 5 } -- f3 has no positions: its ids weigh 1

local function trained(device)
  local ebc = peri.EmbeddingBagCollection { is_weighted = true, device = device, seed = 4, tables = {
    peri.EmbeddingBagConfig { name = "a", num_embeddings = 20, embedding_dim = 8, feature_names = { "f1", "f2" },
      init_fn = embed.uniform(-1, 1) },
    peri.EmbeddingBagConfig { name = "b", num_embeddings = 17, embedding_dim = 16, feature_names = { "f3" },
      pooling = "MEAN", init_fn = embed.uniform(-1, 1) },
  } }
  local processors = embed.PositionWeightedModuleCollection { max_feature_lengths = lengths, device = device }
  for i, p in ipairs(processors:named_parameters()) do
    p.tensor:detach():copy(peri.Tensor.uniform(p.tensor:shape(), 0, 2, 9, i, "f32", device))
  end
  return embed.FeatureProcessedEmbeddingBagCollection { embedding_bag_collection = ebc,
    feature_processors = processors }
end

local function batch(device, rank)
  local draw, lists = support.generator(50 + rank), { keys = { "f3", "f1", "f2" }, device = device }
  for k, most in ipairs { 17, 20, 20 } do
    lists[k] = {}
    for b = 1, 3 do
      lists[k][b] = {}
      for i = 1, draw(6) do lists[k][b][i] = draw(most) end
    end
  end
  return peri.KeyedJaggedTensor.from_lists(lists)
end

local function near(want, got, tol)
  golden.assert_near(want:to_list(), got:to_list(), tol or { abs = 2e-6, rel = 2e-6 })
end
local kinds = {
  table_wise = function(n) return { a = plan.table_wise(n - 1), b = plan.table_wise(0) } end,
  row_wise = function() return { a = plan.row_wise(), b = plan.row_wise() } end,
  column_wise = function(n)
    return { a = plan.column_wise { ranks = { 0, n - 1 } }, b = plan.column_wise { ranks = { n - 1, 0 } } }
  end,
}

for kind, entries in peri.util.ordered(kinds) do
  worlds.each(kind .. " behind processors", function(world, device, n)
    local quant = peri.quantize_embeddings { module = trained(device), dtype = "INT8",
      per_table_weight_dtype = { b = "FP16" } }
    local sharder = shard.QuantFeatureProcessedEmbeddingBagCollectionSharder {}
    local sharded = sharder:shard(quant, plan.EmbeddingModuleShardingPlan(entries(n)),
      ShardingEnv.from_process_group(world))
    for step = 0, 1 do
      local kjt = batch(device, world:rank() + step)
      near(quant(kjt):values(), sharded(kjt):values())
    end
  end, { sizes = { 1, 2, 3 } })
end

if worlds.mpirun then return end

for _, device in ipairs { "cpu", "opaque" } do
  describe("a quantized collection behind processors on " .. device, function()
    it("gives what the trained one gives", function()
      local float, kjt = trained(device), batch(device, 1)
      local want = float(kjt):values()
      local exact = Quant.from_float(float, { dtype = "FP32" })
      near(want, exact(kjt):values())
      assert.is_false(exact(kjt):values():describe().requires_grad)
      local quant = peri.quantize_embeddings { module = float, dtype = "INT8" }
      assert.is_true(Quant.is(quant))
      near(want, quant(kjt):values(), { abs = 0.05, rel = 0 })
      near(float:embedding_bag_collection():table_rows("a", "weight", 2, 7), quant:table_rows("a", "weight", 2, 7),
        { abs = 0.01, rel = 0 })
      local before = quant(kjt):values():to_list()
      local copy = quant:copy()
      for _, p in ipairs(float:parameters()) do p:detach():fill(7) end
      assert.same(before, quant(kjt):values():to_list())
      for _, s in ipairs(quant:named_state()) do s.tensor:detach():fill(0) end
      assert.same(before, copy(kjt):values():to_list())
    end)

    it("is sharded over places, with its model, and copied", function()
      local Net = peri.nn.Module:extend "Net"
      function Net:init() self.bags = trained(device) end
      function Net:forward(kjt) return self.bags(kjt):values() end
      local kjt = batch(device, 2)
      for _, entries in peri.util.ordered(kinds) do
        local net = peri.quantize_embeddings { module = Net(), dtype = "INT4" }
        local want = net(kjt)
        local model, made = shard.shard_quant_model { module = net, env = ShardingEnv.from_local(3),
          plan = plan.ShardingPlan { bags = entries(3) } }
        assert.same({ "bags" }, peri.util.keys(made.plan))
        assert.equal("ShardedQuantFeatureProcessedEmbeddingBagCollection", model.bags.class_name)
        near(want, model(kjt))
        local copy = shard.sharded_model_copy(model)
        for _, s in ipairs(model:named_state()) do s.tensor:detach():fill(0) end
        near(want, copy(kjt))
      end
    end)

    it("reads positions in whole bags, whatever rows were left out", function()
      local mapping = {}
      for id = 1, 20 do mapping[id] = id % 3 == 0 and -1 or id - 1 - math.floor(id / 3) end
      local float, kjt = trained(device), batch(device, 3)
      local quant = peri.quantize_embeddings { module = float, dtype = "FP16",
        pruned = { a = peri.tensor(mapping, "i32", device) } }
      for id = 3, 20, 3 do float:embedding_bag_collection():weight("a"):slice(1, id - 1, id):fill(0) end
      near(float(kjt):values(), quant(kjt):values(), { abs = 1e-2, rel = 0 })
      local sharded = shard.QuantFeatureProcessedEmbeddingBagCollectionSharder {}:shard(quant,
        plan.EmbeddingModuleShardingPlan(kinds.row_wise(2)), ShardingEnv.from_local(2))
      near(quant(kjt):values(), sharded(kjt):values())
    end)
  end)
end

describe("a quantized collection behind processors", function()
  it("tells all ranks of a bag that is too long", function()
    local seen = {}
    local ok = pcall(require("perilune.dist.sim").run, 3, function(rank, world)
      local quant = peri.quantize_embeddings { module = trained "cpu" }
      local sharded = shard.QuantFeatureProcessedEmbeddingBagCollectionSharder {}:shard(quant,
        plan.EmbeddingModuleShardingPlan(kinds.row_wise(3)), ShardingEnv.from_process_group(world))
      local bag = rank == 1 and { 1, 1, 1, 1, 1, 1, 1 } or { 1 }
      local _, why = pcall(function()
        sharded(peri.KeyedJaggedTensor.from_lists { keys = { "f3", "f1", "f2" }, { {} }, { bag },
          { {} } }):values():wait()
      end)
      seen[rank + 1] = tostring(why.message)
      error(why, 0)
    end)
    assert.is_false(ok)
    for rank = 1, 3 do assert.matches("sample 0 of feature 'f1' has 7 ids, allowed: 0..6", seen[rank]) end
  end)

  it("refuses what it cannot use", function()
    local function refused(message, f) assert.error_matches(f, message) end
    local float = trained "cpu"
    local quant = Quant.from_float(float, {})
    local plain = peri.QuantEmbeddingBagCollection { tables = quant:embedding_bag_configs() }
    local processors = quant:feature_processors()
    refused("embedding_bag_collection is EmbeddingBagCollection, wanted a Quant", function()
      Quant { embedding_bag_collection = float:embedding_bag_collection(), feature_processors = processors }
    end)
    refused("embedding_bag_collection is not weighted", function()
      Quant { embedding_bag_collection = plain, feature_processors = processors }
    end)
    refused("feature_processors is 3, wanted", function()
      Quant { embedding_bag_collection = quant:embedding_bag_collection(), feature_processors = 3 }
    end)
    refused("from_float: module is 3, wanted", function() Quant.from_float(3, {}) end)
    refused("features is 3, wanted a KeyedJaggedTensor", function() quant(3) end)
    refused("ShardedQuantFeatureProcessedEmbeddingBagCollection: feature_processors is nil", function()
      shard.ShardedQuantFeatureProcessedEmbeddingBagCollection { tables = quant:embedding_bag_configs(),
        plan = kinds.row_wise(2), env = ShardingEnv.from_local(2) }
    end)
    local sharder = shard.QuantFeatureProcessedEmbeddingBagCollectionSharder {}
    refused("module is a table, wanted a QuantFeatureProcessed", function()
      sharder:shard(plain, {}, ShardingEnv.from_local(2))
    end)
    local sharded = sharder:shard(quant, plan.EmbeddingModuleShardingPlan(kinds.row_wise(2)), ShardingEnv.from_local(2))
    refused("f2", function()
      sharded(peri.KeyedJaggedTensor.from_lists { keys = { "f3", "f1" }, { { 1 } }, { { 1 } } })
    end)
    sharded(batch("cpu", 1)):values():wait() -- alone, a refused batch is the end of nothing
  end)
end)
