-- Models with quantized collections: sharded over the places of one process and over ranks, copied; what C and Lua
-- refuse of them.
--
-- mpirun: none
local ffi = require "ffi"
local peri = require "perilune"
local quant = require "spec.support.quant"
local plan, shard, ShardingEnv = peri.plan, peri.shard, peri.ShardingEnv
local P = peri.ffi
local C = P.C
local tables, trained, batch, plan_of = quant.tables, quant.trained, quant.batch, quant.plan_of
local near, assert_same_rows = quant.near, quant.assert_same_rows

describe("a quantized model", function()
  local Net = peri.nn.Module:extend "Net"
  function Net:init()
    self.sparse = trained()
    self.rows = peri.EmbeddingCollection { tables = tables("EmbeddingConfig", 8) }
    self.over = peri.nn.Linear { in_features = 40, out_features = 2 }
  end
  function Net:forward(kjt) return self.over(self.sparse(kjt):values()), self.rows(kjt) end

  it("is sharded over places, and copied", function()
    local net = peri.quantize_embeddings { module = Net() }
    local kjt = batch("cpu", 1)
    local want, rows = net(kjt)
    local model, made = shard.shard_quant_model { module = net, env = ShardingEnv.from_local(2) }
    assert.same({ "rows", "sparse" }, peri.util.keys(made.plan))
    assert.equal("ShardedQuantEmbeddingBagCollection", model.sparse.class_name)
    local copy = shard.sharded_model_copy(model)
    for _, s in ipairs(model:named_state()) do s.tensor:detach():fill(0) end
    local got, got_rows = copy(kjt)
    near(want, got)
    assert_same_rows(rows, got_rows, "")
  end)

  it("is sharded over ranks by DistributedModelParallel", function()
    require("perilune.dist.sim").run(3, function(rank, world)
      local net = peri.quantize_embeddings { module = Net() }
      local kjt = batch("cpu", rank)
      local want, rows = net(kjt)
      local model = peri.DistributedModelParallel { module = net, group = world,
        plan = plan.ShardingPlan { sparse = plan_of("row_wise", 3), rows = plan_of("table_wise", 3) } }
      local got, got_rows = model(kjt)
      near(want, got)
      assert_same_rows(rows, got_rows, "")
    end)
  end)

  it("refuses what it cannot do", function()
    local env = ShardingEnv.from_local(2)
    local sharder = shard.QuantEmbeddingBagCollectionSharder {}
    local function refused(message, f) assert.error_matches(f, message) end
    local function with(entries, more)
      return function()
        local collection = peri.quantize_embeddings { module = trained(), dtype = "INT2" }
        sharder:shard(collection, plan.EmbeddingModuleShardingPlan(entries), more or env)
      end
    end
    local function entries(a)
      local list = plan_of("table_wise", 2)
      list.a = a
      return list
    end
    refused("table 'a' has compute_kernel 'dense', allowed: fused, fused_uvm, quant, quant_uvm",
      with(entries(plan.row_wise { compute_kernel = "dense" })))
    refused("table 'a': column_wise block 0 of 2 columns starts at column 0, allowed: positive multiples of 4",
      with(entries(plan.column_wise { ranks = { 0, 1 }, sizes = { 2, 6 } })))
    refused("table 'a'.*rank 2", with(entries(plan.table_wise(2))))
    refused("env is a table, wanted a ShardingEnv", with(entries(plan.table_wise(0)), { world_size = 2 }))
    refused("module is a table, wanted a QuantEmbeddingBagCollection", function() sharder:shard(trained(), {}, env) end)
    refused("table 'a' has compute_kernel 'quant', which is for quantized collections", function()
      require("perilune.dist.sim").run(1, function(_, world)
        shard.ShardedEmbeddingBagCollection { tables = tables "EmbeddingBagConfig", plan = plan_of("row_wise", 1),
          group = world, fused_params = { optimizer = "sgd" } }
      end)
    end)
    local net = Net()
    refused("no quantized collection", function() shard.shard_quant_model { module = net, env = env } end)
    net = peri.quantize_embeddings { module = net }
    refused("env is 3, wanted a ShardingEnv", function() shard.shard_quant_model { module = net, env = 3 } end)
    refused("names module 'none', which is no quantized collection of the model; those are: rows, sparse", function()
      shard.shard_quant_model { module = net, env = env, plan = plan.ShardingPlan { none = {}, sparse = {},
        rows = {} } }
    end)
    refused("module 'rows' has no entry in the plan", function()
      shard.shard_quant_model { module = net, env = env, plan = plan.ShardingPlan { sparse = plan_of("row_wise", 2) } }
    end)
    local sharded = sharder:shard(peri.quantize_embeddings { module = trained("cpu", { is_weighted = true }) },
      plan.EmbeddingModuleShardingPlan(plan_of("row_wise", 2)), env)
    refused("the input has no weights, the module is weighted", function() sharded(batch("cpu", 1)) end)
    refused("features is 3, wanted a KeyedJaggedTensor", function() sharded(3) end)
    refused("rows are not trained", function() sharded:set_learning_rate(1) end)
    refused("copy_from: collection is a table, wanted a quantized collection", function()
      sharded:copy_from(trained())
    end)
    local other = peri.quantize_embeddings { module = trained("cpu", { is_weighted = true }),
      per_table_weight_dtype = { b = "INT4" } }
    refused("copy_from: table 'b' is 17 x 16 INT4 in the collection, and 17 x 16 INT8 here", function()
      sharded:copy_from(other)
    end)
    local left_out = peri.quantize_embeddings { module = trained(), pruned = { a = peri.full({ 20 }, -1, "i32") } }
    refused("copy_from: table 'a' is 0 x 8 INT8 in the collection, and 20 x 8 INT8 here", function()
      sharded:copy_from(left_out)
    end)
    refused("whose rows are in shards", function() peri.quantize_embeddings { module = sharded } end)
    local kjt = batch("cpu", 1, true)
    local weights = kjt:weights():detach()
    weights:requires_grad()
    local wanting = peri.KeyedJaggedTensor { keys = kjt:keys(), values = kjt:values(), lengths = kjt:lengths(),
      weights = weights }
    refused("the input's weights want a gradient, which tables that are not trained do not give", function()
      sharded(wanting)
    end)
    local plain = sharded(kjt):values():to_list()
    assert.same(plain, peri.no_grad(function() return sharded(wanting):values():to_list() end))
  end)

  it("may have tables of which no row is left", function()
    local collection = peri.quantize_embeddings { module = trained(), pruned = { a = peri.full({ 20 }, -1, "i32") } }
    local kjt = batch("cpu", 1)
    for _, kind in ipairs { "table_wise", "row_wise" } do
      local sharded = shard.QuantEmbeddingBagCollectionSharder {}:shard(collection,
        plan.EmbeddingModuleShardingPlan(plan_of(kind, 2)), ShardingEnv.from_local(2))
      near(collection(kjt):values(), sharded(kjt):values())
      for _, x in ipairs(sharded(kjt):get("f1"):to_list()) do assert.equal(0, x) end
    end
  end)

  it("is told apart from trained ones in C, and places from ranks", function()
    require("perilune.dist.sim").run(2, function(_, world)
      local out, first = ffi.new "peri_sharded *[1]", ffi.new("int32_t[1]", 0)
      local names = ffi.new("const char *[1]", { "f" })
      local function refused(message, more, kernel, dtype)
        local list, cfg = P.structs("peri_sharded_table", 2), P.struct "peri_sharded_config"
        for i, name in ipairs { "a", "b" } do
          local t = list[i - 1]
          t.name, t.rows, t.cols, t.features, t.n_features = name, 8, 4, first, 1
          t.pooling, t.sharding_type, t.compute_kernel, t.init = C.PERI_POOLING_SUM, C.PERI_ROW_WISE,
            C.PERI_KERNEL_QUANT, C.PERI_INIT_NONE
        end
        list[1].compute_kernel, list[1].dtype = kernel or C.PERI_KERNEL_QUANT, dtype or C.PERI_ROWS_INT4
        cfg.group, cfg.device, cfg.tables, cfg.n_tables = world:ptr(), peri.ffi.device "cpu", list, 2
        cfg.features, cfg.n_features = names, 1
        for key, value in pairs(more) do cfg[key] = value end
        local status = C.peri_sharded_new(cfg, out)
        if not message then
          assert.equal(0, status)
          return C.peri_sharded_release(out[0])
        end
        assert.equal(C.PERI_EINVAL, status)
        assert.matches(message, ffi.string(C.peri_error_message()))
      end
      refused(nil, {})
      refused("2 places on each of 2 ranks, allowed: 1, or more on one rank", { places = 2 })
      refused("%-1 places on each of 2 ranks", { places = -1 })
      refused("of the tables 'a' and 'b' one has the compute kernel quant; allowed: all or none", {},
        C.PERI_KERNEL_DENSE, C.PERI_F32)
      refused("table 'b': compute kernel 3, allowed: fused, dense, quant", {}, 3)
      refused("table 'b': weights of dtype i64", {}, nil, C.PERI_I64)
    end)
  end)

  it("reports ids outside their table as it was told", function()
    for mode, message in peri.util.ordered {
      FATAL = "table 'c', feature 'f3', sample 1: id 33 at position 0 of the bag, allowed: 0..32", IGNORE = false } do
      local collection = peri.quantize_embeddings { module = trained(), bounds_check_mode = mode }
      local sharded = shard.QuantEmbeddingBagCollectionSharder {}:shard(collection,
        plan.EmbeddingModuleShardingPlan(plan_of("row_wise", 2)), ShardingEnv.from_local(2))
      local function call(id)
        local lists = { keys = { "f1", "f2", "f3" }, { { 1 }, {} }, { {}, {} }, { {}, { id, 3 } } }
        return sharded(peri.KeyedJaggedTensor.from_lists(lists)):values():to_list()
      end
      if message then assert.error_matches(function() call(33) end, message) else assert.same(call(-1), call(33)) end
    end
  end)
end)
