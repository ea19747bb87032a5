-- Sharded tables in files: every sharding type gives, bit for bit, what the same plan gives in memory, with and without
-- prefetches; plans say it per table.
-- deadline: 300 s
-- cuda: always
-- takes: 5 s
local peri = require "perilune"
local worlds = require "spec.support.worlds"
local sharded = require "spec.support.sharded"
local tier = require "spec.support.tier"
local plan = peri.plan
local batch, whole, compare = sharded.batch, sharded.whole, sharded.assert_same
local BATCH, WIDTH = sharded.BATCH, sharded.WIDTH

local function run(kind, world, device, n, prefetch, data_type, exact)
  local rank = world:rank()
  local params = { optimizer = "rowwise_adagrad", learning_rate = 0.1, exact = exact }
  local want = sharded.make { kind = kind, world = world, device = device, data_type = data_type,
    fused_params = params }
  local algorithm = rank % 2 == 0 and "LRU" or "LFU"
  local got = sharded.make { kind = kind, world = world, device = device, data_type = data_type, fused_params = params,
    cache = { load_factor = 0.5, algorithm = algorithm, prefetch_pipeline = prefetch } }
  compare(want, got, device)
  local dist = got:input_dist(batch(1, rank, device)):wait()
  for step = 1, 4 do
    local x = want:forward(batch(step, rank, device)):values()
    local y = got:compute_and_output_dist(dist):values()
    assert.same(x:to_list(), y:to_list())
    dist = got:input_dist(batch(step + 1, rank, device)):wait()
    if prefetch then got:prefetch(dist) end
    local grad = peri.Tensor.uniform({ BATCH, WIDTH }, -1, 1, step, rank, "f32", device)
    x:backward(grad)
    y:backward(grad)
  end
  compare(want, got, device)
  local any
  for _, s in ipairs(got:local_shards()) do
    local counts = s.cache_statistics()
    assert.equal(s.cached, counts ~= nil)
    assert.equal(s.cached, not s.replica)
    if counts and counts.hits + counts.misses > 0 then any = true end
    if counts and prefetch and counts.prefetched > 0 then assert.is_true(counts.prefetch_hits > 0) end
  end
  assert.is_true(any or n > 1)
  got:flush()
end

describe("sharded tables in files:", function()
  for _, kind in ipairs { "table_wise", "row_wise", "column_wise", "mixed", "within_nodes" } do
    for _, prefetch in ipairs { false, true } do
      worlds.each(kind .. (prefetch and ", prefetched" or ""), function(world, device, n)
        run(kind, world, device, n, prefetch)
      end,
        { sizes = { 1, 2, 3 }, local_size = 2 })
      worlds.each(kind .. ", stochastically rounded" .. (prefetch and ", prefetched" or ""), function(world, device, n)
        run(kind, world, device, n, prefetch, { a = "FP16", b = "BF16", c = "BF16" })
      end, { sizes = { 1, 3 }, local_size = 2 })
    end
  end
  for _, kind in ipairs { "row_wise", "mixed" } do -- a batch is then looked up and updated by lookups of its own
    worlds.each(kind .. ", exact, prefetched", function(world, device, n)
      run(kind, world, device, n, true, nil, true)
    end,
      { sizes = { 2, 3 } })
  end

  worlds.each("keep their files for the next model", function(world, device, n)
    local folder = tier.folder()
    local function model()
      return peri.DistributedModelParallel {
        module = peri.EmbeddingBagCollection {
          tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = 50, embedding_dim = 4,
            feature_names = { "f1" } } },
          fused_params = { optimizer = "sgd", learning_rate = 0.5,
            cache_params = { load_factor = 1, directory = folder } }, seed = 7,
        },
        group = world, device = device,
        plan = plan.ShardingPlan { [""] = { t = plan.row_wise { compute_kernel = "fused_uvm_caching" } } },
      }
    end
    local kjt = peri.KeyedJaggedTensor { keys = { "f1" }, values = { 1, 2, 49, 30 }, lengths = { 2, 2 },
      device = device }
    local m = model()
    local out = m(kjt):values()
    out:backward(peri.ones({ 2, 4 }, "f32", device))
    peri.no_grad(function() out = m(kjt):values():to_list() end)
    m:flush()
    for _, s in ipairs(m.sharded[1]:local_shards()) do assert.equal(1, s.iteration()) end
    m.sharded[1]:release()
    local again = model()
    peri.no_grad(function() assert.same(out, again(kjt):values():to_list()) end)
    again.sharded[1]:release()
    tier.remove(folder)
    assert.is_true(n >= 1)
  end, { sizes = { 1, 2 }, only = "sim" })

  worlds.each("take over what an unsharded collection holds", function(world, device)
    for _, from_cached in ipairs { false, true } do
      local function params(cached)
        return { optimizer = "rowwise_adagrad", learning_rate = 0.5, cache_params = cached and { load_factor = 0.5 }
          or nil }
      end
      local tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = 40, embedding_dim = 4,
        feature_names = { "f1" } } }
      local source = peri.EmbeddingBagCollection { tables = tables, fused_params = params(from_cached), seed = 3,
        device = device }
      local kjt = peri.KeyedJaggedTensor { keys = { "f1" }, values = { 1, 2, 39 }, lengths = { 3 }, device = device }
      source(kjt):values():backward(peri.ones({ 1, 4 }, "f32", device))
      local target = peri.shard.ShardedEmbeddingBagCollection { tables = tables, group = world, device = device,
        fused_params = params(false),
        plan = { t = plan.row_wise { compute_kernel = "fused_uvm_caching", cache_params = { load_factor = 0.6 } } } }
      target:copy_from(source)
      for _, s in ipairs(target:local_shards()) do
        for _, name in ipairs(s.names()) do
          assert.same(source:table_rows("t", name, s.row_offset, s.rows):to_list(), whole(s, name, device))
        end
      end
    end
  end, { sizes = { 1, 2 } })

  worlds.each("prefetch what was distributed and not yet looked up", function(world, device)
    local ebc = sharded.make { kind = "row_wise", world = world, device = device, cache = { load_factor = 0.5 } }
    local memory = sharded.make { kind = "row_wise", world = world, device = device }
    local other = sharded.make { kind = "row_wise", world = world, device = device, cache = { load_factor = 0.5 } }
    local function fails(module, dist, pattern)
      assert.error_matches(function() module:prefetch(dist) end, pattern)
    end
    local early = ebc:input_dist(batch(1, world:rank(), device))
    if not early:test() then fails(ebc, early, "peri_sharded_prefetch: the input_dist is not complete; wait for it") end
    early:wait()
    fails(other, early, "peri_sharded_prefetch: this work is not an input_dist of this module")
    ebc:prefetch(early)
    ebc:prefetch(early) -- once more changes nothing
    local dropped = ebc:input_dist(batch(2, world:rank(), device)):wait()
    ebc:prefetch(dropped) -- a batch that nobody will look up
    local x = memory:forward(batch(1, world:rank(), device)):values():to_list()
    assert.same(x, ebc:compute_and_output_dist(early):values():to_list())
    fails(ebc, early, "ShardedEmbeddingBagCollection:prefetch: this input_dist is already used")
    local plain = memory:input_dist(batch(1, world:rank(), device)):wait()
    memory:prefetch(plain) -- nothing to bring
    assert.same(x, memory:compute_and_output_dist(plain):values():to_list())
  end, { sizes = { 1, 2 } })

  it("are described by plans", function()
    local entry = plan.row_wise { compute_kernel = "fused_uvm_caching",
      cache_params = plan.CacheParams { algorithm = "LFU", load_factor = 0.1 } }
    assert.equal("row_wise fused_uvm_caching (LFU 0.1)", tostring(entry))
    assert.equal("fused_uvm_caching", plan.EmbeddingComputeKernel.FUSED_UVM_CACHING)
    local function fails(pattern, args)
      local ok, err = pcall(plan.ParameterSharding, args)
      assert.is_false(ok)
      assert.truthy(tostring(err):find(pattern), tostring(err))
    end
    fails("compute_kernel 'fast', allowed: dense, fused, fused_uvm, fused_uvm_caching", { sharding_type = "row_wise",
      compute_kernel = "fast" })
    fails("data_parallel tables are replicas in memory",
      { sharding_type = "data_parallel", compute_kernel = "fused_uvm_caching" })
    fails("cache_params with compute_kernel 'fused', allowed with: fused_uvm_caching",
      { sharding_type = "row_wise", cache_params = {} })
    fails("load_factor is 2, allowed", { sharding_type = "row_wise", compute_kernel = "fused_uvm_caching",
      cache_params = { load_factor =
      2 } })
  end)
end)
