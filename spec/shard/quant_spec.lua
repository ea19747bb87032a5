-- Quantized collections in shards, over the places of one process and over ranks: TorchRec's own results; every data
-- type, sharding type, pooling and number of ranks gives what the collection in one piece gives; pruned tables, copies.
-- Whole models, and what is refused: quant_model_spec.lua.
-- Where TorchRec is known to deviate (means under row-wise sharding) the unsharded result stored beside is the truth.
--
-- mpirun: 3
local peri = require "perilune"
local golden = require "spec.support.golden"
local quant = require "spec.support.quant"
local worlds = require "spec.support.worlds"
local plan, shard, ShardingEnv = peri.plan, peri.shard, peri.ShardingEnv
local C = peri.ffi.C

local tables, trained, batch, kinds, plan_of = quant.tables, quant.trained, quant.batch, quant.kinds, quant.plan_of
local near, assert_same_rows, mapping = quant.near, quant.assert_same_rows, quant.mapping

-- -- TorchRec's results -----------------------------------------------------------------------------------------------

local function entry_of(t)
  return plan.ParameterSharding { sharding_type = t.sharding_type, compute_kernel = "quant", ranks = t.ranks }
end

--- The quantized collection of a case.
local function collection_of(case, device)
  local float = peri.EmbeddingBagCollection { device = device, is_weighted = case.weighted,
    tables = peri.util.map(case.tables, function(t)
    return peri.EmbeddingBagConfig { name = t.name, num_embeddings = t.num_embeddings, embedding_dim = t.embedding_dim,
      feature_names = t.feature_names, pooling = t.pooling }
  end) }
  for _, t in ipairs(case.tables) do
    float:weight(t.name):copy(case:tensor(("table/%s/float"):format(t.name), device))
  end
  return peri.quantize_embeddings { module = float, dtype = case.weight_type }
end

local function check_case(case, collection, sharded, device)
  local result = sharded(peri.KeyedJaggedTensor { keys = case.kjt_keys, values = case:tensor("input/values", device),
    lengths = case:tensor("input/lengths", device), weights = case:tensor("input/weights", device) })
  for _, key in ipairs(case.output_keys) do case:assert_near("unsharded/output/" .. key, result:get(key)) end
  if not case.unsharded.deviates then
    case:assert_near("output/values", peri.KeyedTensor.regroup({ result }, { case.output_keys })[1])
  end
  for _, t in ipairs(case.tables) do
    local stored, codes = collection:weight(t.name):to("f32", "cpu"),
      case:tensor(("table/%s/weight"):format(t.name), "cpu")
    assert.same(codes:to_list(), stored:slice(2, 4, 4 + t.embedding_dim):contiguous():to_list(), "the codes of "
      .. t.name)
  end
end

for _, name in ipairs(worlds.mpirun and {} or golden.names("sharded", "^quant_")) do
  for _, device in ipairs { "cpu", "opaque" } do
    it(("reproduces %s over places on %s"):format(name, device), function()
      local case, entries = golden.load(name), {}
      local collection = collection_of(case, device)
      for _, t in ipairs(case.tables) do entries[t.name] = entry_of(t) end
      local sharder = shard.QuantEmbeddingBagCollectionSharder {}
      local module_plan = plan.EmbeddingModuleShardingPlan(entries)
      local sharded = sharder:shard(collection, module_plan, ShardingEnv.from_local(case.devices), device, "ebc")
      check_case(case, collection, sharded, device)
      local pieces = sharded:local_shards()
      local wanted = {}
      for _, t in ipairs(case.tables) do
        for _, s in ipairs(t.shards) do
          wanted[#wanted + 1] = ("%s %d %d %d"):format(t.name, s.offsets[1], s.offsets[2], s.rank)
        end
      end
      local got = peri.util.map(pieces, function(s)
        return ("%s %d %d %d"):format(s.table, s.row_offset, s.col_offset, s.place)
      end)
      table.sort(wanted)
      table.sort(got)
      assert.same(wanted, got)
    end)
  end
end

for _, name in ipairs { "quant_tw_int8_mean", "quant_cw_int8", "quant_rw_int8_mean" } do
  worlds.each("reproduces " .. name .. " over ranks", function(world, device)
    local case, entries = golden.load("sharded/" .. name), {}
    local collection = collection_of(case, device)
    for _, t in ipairs(case.tables) do entries[t.name] = entry_of(t) end
    local sharded = shard.ShardedQuantEmbeddingBagCollection { tables = collection.tables, plan = entries,
      group = world, device = device }
    sharded:copy_from(collection)
    check_case(case, collection, sharded, device)
  end, { sizes = { 2 } })
end

-- -- the law ----------------------------------------------------------------------------------------------------------

local some = { "INT8", "INT4", "INT2", "FP8", "FP16", "FP32" }

for kind in peri.util.ordered(kinds) do
  worlds.each(kind .. " gives what one piece gives", function(world, device, n)
    for i, dtype in ipairs(n == 2 and some or { some[n % #some + 1] }) do
      for _, weighted in ipairs { false, true } do
        local own = some[(i + 2) % #some + 1]
        local collection = peri.quantize_embeddings { module = trained(device, { is_weighted = weighted }),
          dtype = dtype, per_table_weight_dtype = { b = own } }
        local sharder = shard.QuantEmbeddingBagCollectionSharder {}
        local sharded = sharder:shard(collection, plan.EmbeddingModuleShardingPlan(plan_of(kind, n)),
          ShardingEnv.from_process_group(world))
        for step = 0, 1 do
          local kjt = batch(device, world:rank() + step, weighted)
          local got = sharded(kjt)
          assert.same({ "f1", "f2@a", "f2@b", "f3" }, got:keys())
          near(collection(kjt):values(), got:values(), nil, dtype)
          assert.is_false(got:values():wait():describe().requires_grad)
        end
      end
    end
  end, { sizes = { 1, 2, 3, 4 } })

  worlds.each(kind .. " gives each id its row", function(world, device, n)
    local float = peri.EmbeddingCollection { tables = tables("EmbeddingConfig", 8), device = device,
      need_indices = n % 2 == 0 }
    local collection = peri.quantize_embeddings { module = float, dtype = some[n],
      per_table_weight_dtype = { c = "FP16" } }
    local entries = plan_of(kind, n)
    if kind == "mixed" then entries.b = plan.column_wise { ranks = { 0, n - 1 } } end
    local sharded = shard.QuantEmbeddingCollectionSharder {}:shard(collection,
      plan.EmbeddingModuleShardingPlan(entries), ShardingEnv.from_process_group(world))
    local kjt = batch(device, world:rank())
    assert_same_rows(collection(kjt), sharded(kjt), kind .. ": ")
  end, { sizes = { 1, 2, 3, 4 } })
end

-- -- pruned tables ----------------------------------------------------------------------------------------------------

for _, hash in ipairs { false, true } do
  worlds.each("looks pruned tables up by " .. (hash and "hash tables" or "arrays"), function(world, device, n)
    local pruned = { a = { remapping = mapping(20, 1), hash = hash }, c = { remapping = mapping(33, 2), hash = hash } }
    local env = ShardingEnv.from_process_group(world)
    local collection = peri.quantize_embeddings { module = trained(device, { is_weighted = true }), dtype = "INT8",
      pruned = pruned }
    assert.is_true(collection:_rows_of(1) < 20)
    for _, kind in ipairs { "table_wise", "row_wise", "column_wise" } do
      local module_plan = plan.EmbeddingModuleShardingPlan(plan_of(kind, n))
      local sharded = shard.QuantEmbeddingBagCollectionSharder {}:shard(collection, module_plan, env)
      local kjt = batch(device, world:rank(), true)
      near(collection(kjt):values(), sharded(kjt):values(), nil, kind)
      local float = peri.EmbeddingCollection { tables = tables("EmbeddingConfig", 8), device = device,
        need_indices = true }
      local rows = peri.quantize_embeddings { module = float, dtype = "FP16", pruned = pruned }
      local sharded_rows = shard.QuantEmbeddingCollectionSharder {}:shard(rows, module_plan, env)
      kjt = batch(device, world:rank())
      assert_same_rows(rows(kjt), sharded_rows(kjt), kind .. ": ")
    end
  end, { sizes = { 1, 2, 3 } })
end

-- -- variable batches, other uses of the stages -----------------------------------------------------------------------

worlds.each("takes a variable batch", function(world, device, n)
  local whole = peri.quantize_embeddings { module = trained(device), dtype = "INT4" }
  local pruned = peri.quantize_embeddings { module = trained(device), dtype = "INT4", pruned = { a = mapping(20, 1) } }
  local kjt = peri.KeyedJaggedTensor {
    keys = { "f3", "f1", "f2" }, values = { 1, 2, 3, 4, 5, 6, 7 }, lengths = { 2, 1, 2, 0, 1, 1 }, device = device,
    stride_per_key_per_rank = { { 2 }, { 1 }, { 3 } },
    inverse_indices = { { "f3", "f1", "f2" }, peri.tensor({ 0, 1, 0, 0, 2, 1 }, "i64", device, { 3, 2 }) },
  }
  local full = peri.KeyedJaggedTensor.from_lists { keys = { "f3", "f1", "f2" }, device = device,
    { { 1, 2 }, { 3 } }, { { 4, 5 }, { 4, 5 } }, { { 7 }, { 6 } } }
  for _, collection in ipairs { whole, pruned } do
    for _, kind in ipairs { "row_wise", "column_wise" } do
      local sharded = shard.QuantEmbeddingBagCollectionSharder {}:shard(collection,
        plan.EmbeddingModuleShardingPlan(plan_of(kind, n)), ShardingEnv.from_process_group(world))
      near(collection(full):values(), sharded(kjt):values(), nil, kind)
    end
  end
end, { sizes = { 1, 2, 3 } })

worlds.each("sends each id of a sequence once, if asked", function(world, device, n)
  local float = peri.EmbeddingCollection { tables = tables("EmbeddingConfig", 8), device = device, need_indices = true }
  for _, pruned in ipairs { false, { a = mapping(20, 1) } } do
    local rows = peri.quantize_embeddings { module = float, dtype = "INT8", pruned = pruned or nil }
    shard.set_ec_index_dedup(true)
    local sharded = shard.QuantEmbeddingCollectionSharder {}:shard(rows,
      plan.EmbeddingModuleShardingPlan(plan_of("row_wise", n)), ShardingEnv.from_process_group(world))
    shard.set_ec_index_dedup(false)
    local kjt = batch(device, world:rank(), false, 12)
    assert_same_rows(rows(kjt), sharded(kjt), "dedup: ")
    local counts = sharded:index_dedup_counts()
    assert.is_true(counts.sent < counts.asked)
  end
end, { sizes = { 1, 2 } })

worlds.each("says on all ranks what differs", function(world, device, n)
  local rank = world:rank()
  local collection = peri.quantize_embeddings { module = trained(device), dtype = rank == 1 and "INT4" or "INT8" }
  local sharded = shard.QuantEmbeddingBagCollectionSharder {}:shard(collection,
    plan.EmbeddingModuleShardingPlan(plan_of("row_wise", n)), ShardingEnv.from_process_group(world))
  assert.error_matches(function() sharded(batch(device, rank)):values():wait() end,
    "rank 1 has data_type INT4 where rank 0 has INT8_HALF")
end, { sizes = { 2 }, only = "sim" })

-- -- one process ------------------------------------------------------------------------------------------------------

if worlds.mpirun then return end

for _, device in ipairs { "cpu", "opaque" } do
  describe("over places on " .. device, function()
    local env, sharder = ShardingEnv.from_local(3), shard.QuantEmbeddingBagCollectionSharder {}
    local function quantized(more)
      local a = { module = trained(device), dtype = "INT8" }
      for k, v in pairs(more or {}) do a[k] = v end
      return peri.quantize_embeddings(a)
    end

    it("gives what one piece gives", function()
      for kind in peri.util.ordered(kinds) do
        for _, dtype in ipairs(some) do
          local collection = quantized { dtype = dtype, output_dtype = dtype == "INT8" and "FP16" or "FP32" }
          local sharded = sharder:shard(collection, plan.EmbeddingModuleShardingPlan(plan_of(kind, 3)), env, device,
            "ebc")
          local kjt = batch(device, 1)
          local want, got = collection(kjt):values(), sharded(kjt):values()
          assert.equal(want:dtype(), got:dtype())
          near(want, got, dtype == "INT8" and { abs = 1e-3, rel = 1e-3 }, kind .. " " .. dtype)
        end
        local float = peri.EmbeddingCollection { tables = tables("EmbeddingConfig", 8), device = device,
          need_indices = true }
        local rows = peri.quantize_embeddings { module = float, dtype = "INT4", pruned = { a = mapping(20, 1) } }
        local entries = plan_of(kind, 3)
        if kind == "mixed" then entries.a, entries.b = plan.row_wise(), plan.column_wise { ranks = { 2, 0 } } end
        local sharded = shard.QuantEmbeddingCollectionSharder {}:shard(rows, plan.EmbeddingModuleShardingPlan(entries),
          env, device, "ec")
        local kjt = batch(device, 2)
        assert_same_rows(rows(kjt), sharded(kjt), kind .. ": ")
      end
    end)

    it("is copied, saved and loaded", function()
      local collection = quantized { dtype = "INT4" }
      local sharded = sharder:shard(collection, plan.EmbeddingModuleShardingPlan(plan_of("column_wise", 3)), env,
        device, "ebc")
      local kjt = batch(device, 1)
      local want = sharded(kjt):values():to_list()
      local copy = shard.sharded_model_copy(sharded)
      local blank = shard.ShardedQuantEmbeddingBagCollection { tables = collection.tables, plan = sharded.plan,
        env = env, device = device }
      assert.same({ "embedding_bags.a.weight", "embedding_bags.a.weight.1", "embedding_bags.b.weight",
        "embedding_bags.b.weight.1", "embedding_bags.c.weight", "embedding_bags.c.weight.1" },
          peri.util.map(blank:named_state(), function(s) return s.name end))
      blank:load_state_dict(sharded:state_dict())
      for _, s in ipairs(sharded:named_state()) do s.tensor:fill(0) end
      assert.same(want, copy(kjt):values():to_list())
      assert.same(want, blank(kjt):values():to_list())
    end)

    it("takes no pieces of another format of rows", function()
      local function cut(data_type, cols)
        local t = peri.EmbeddingBagConfig { name = "t", num_embeddings = 5, embedding_dim = cols,
          feature_names = { "f" }, data_type = data_type }
        return shard.ShardedQuantEmbeddingBagCollection { device = device, env = env, tables = { t },
          plan = { t = plan.column_wise { ranks = { 0, 1 } } } }
      end
      local int8, int4 = cut("INT8", 8), cut("INT4", 16) -- pieces of 8 bytes a row
      cut("INT8", 8):load_state_dict(int8:state_dict():clone())
      for _, name in ipairs { "embedding_bags.t.weight", "embedding_bags.t.weight.1" } do
        assert.error_matches(function() int8:load_state_dict(int4:state_dict():clone()) end,
          ("'%s' has rows of INT8 x 4 here, and rows of INT4 x 8 in the state that is given"):format(name), 1, true)
      end
    end)

    it("does not allocate once it has been called", function()
      for _, pruned in ipairs { false, { a = mapping(20, 1) } } do
        local entries = plan_of("mixed", 3)
        if pruned then entries.a = plan.row_wise() end
        local sharded = sharder:shard(quantized { pruned = pruned or nil }, plan.EmbeddingModuleShardingPlan(entries),
          env, device)
        local kjt = batch(device, 1)
        local function call() peri.scope(function() sharded(kjt):values():wait() end) end
        for _ = 1, 50 do call() end
        collectgarbage()
        collectgarbage()
        local live, objects = C.peri_mem_live(), C.peri_mem_objects()
        for _ = 1, 100 do call() end
        assert.is_true(C.peri_mem_live() <= live)
        assert.is_true(C.peri_mem_objects() <= objects)
      end
    end)

    it("starts with zeros from a description", function()
      local described = peri.quantize_embeddings { module = trained("meta"), dtype = "INT2" }
      local sharded = sharder:shard(described, plan.EmbeddingModuleShardingPlan(plan_of("table_wise", 3)), env, device)
      for _, x in ipairs(sharded(batch(device, 1)):values():to_list()) do assert.equal(0, x) end
      assert.is_false(described:is_materialised())
    end)

    it("is made for one sharding type", function()
      for kind, entry in peri.util.ordered { table_wise = plan.table_wise(1), row_wise = plan.row_wise(),
        column_wise = plan.column_wise { ranks = { 0, 2 } } } do
        local collection = quantized()
        local infos = peri.util.map(collection.tables, function(t)
          return { embedding_config = t, param_sharding = entry }
        end)
        local sharded = shard.create_infer_embedding_bag_sharding(kind, infos, env, device)
        sharded:copy_from(collection)
        local kjt = batch(device, 1)
        near(collection(kjt):values(), sharded:compute_and_output_dist(sharded:input_dist(kjt):wait()):values(), nil,
          kind)
        local float = peri.EmbeddingCollection { tables = tables("EmbeddingConfig", 8), device = device }
        local rows = peri.quantize_embeddings { module = float, dtype = "INT8" }
        local row_infos = peri.util.map(rows.tables, function(t)
          return { embedding_config = t, param_sharding = entry }
        end)
        local row_shards = shard.create_infer_embedding_sharding(kind, row_infos, env, device)
        row_shards:copy_from(rows)
        assert_same_rows(rows(kjt), row_shards(kjt), kind)
        assert.error_matches(function() shard.create_infer_embedding_bag_sharding("grid_shard", infos, env, device) end,
          "sharding_type is 'grid_shard', allowed: column_wise, row_wise, table_wise")
        infos[2].param_sharding = plan.data_parallel()
        assert.error_matches(function() shard.create_infer_embedding_bag_sharding(kind, infos, env, device) end,
          "table 'b' is data_parallel, allowed: " .. kind)
      end
    end)
  end)
end

describe("flatten_feature_lengths", function()
  it("gives lengths that are flat", function()
    local kjt = peri.KeyedJaggedTensor.from_lists { keys = { "f" }, { { 1, 2 }, {}, { 3 } } }
    local flat = peri.shard.flatten_feature_lengths(kjt)
    assert.same({ 2, 0, 1 }, flat:lengths():to_list())
    assert.same({ 1, 2, 3 }, flat:values():to_list())
    assert.error_matches(function() peri.shard.flatten_feature_lengths(3) end,
      "features is 3, wanted a KeyedJaggedTensor")
  end)
end)
