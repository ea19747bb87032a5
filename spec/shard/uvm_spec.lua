-- Sharded tables of a device whose rows are in the host's memory: every plan of fused_uvm and fused_uvm_caching, also
-- beside fused tables, gives bit for bit what the same plan gives with fused tables on the CPU; state goes from and to
-- them.
-- deadline: 300 s
local peri = require "perilune"
local worlds = require "spec.support.worlds"
local sharded = require "spec.support.sharded"
local shell = require "spec.support.shell"
local plan, gather = peri.plan, peri.shard.gather_state_dict
local BATCH, WIDTH = sharded.BATCH, sharded.WIDTH

--- A model of one collection, sharded by `kind`; kernels: of the tables in their order. folder: of the second table's
--- cache.
local function model(kind, world, device, kernels, optimizer, seed, folder)
  local entries = {}
  for i, t in ipairs(sharded.configs) do
    local kernel = kernels[(i - 1) % #kernels + 1]
    local cache = kernel == "fused_uvm_caching" and { load_factor = 0.5, algorithm = i % 2 == 0 and "LFU" or "LRU",
      directory = i == 2 and folder or nil, ways = i == 1 and 2 or nil } or nil
    entries[t.name] = sharded.kinds[kind](i, world:size(), { compute_kernel = kernel, cache_params = cache })
  end
  return peri.DistributedModelParallel { group = world, device = device, plan = plan.ShardingPlan { [""] = entries },
    module = peri.EmbeddingBagCollection { tables = sharded.tables {}, seed = seed or 5, device = "meta",
      fused_params = { optimizer = optimizer or "adam", learning_rate = 0.1 } } }
end

local function numbers(state)
  local copy = {}
  for name, x in peri.util.ordered(state) do
    copy[name] = peri.Tensor.is(x) and x:to_list() or type(x) == "table" and numbers(x) or x
  end
  return copy
end

local function compare(want, got)
  assert.same(numbers(gather(want:state_dict())), numbers(gather(got:state_dict())))
  assert.same(numbers(gather(want.sharded[1]:fused_optimizer():state_dict())),
    numbers(gather(got.sharded[1]:fused_optimizer():state_dict())))
end

local function step(want, got, world, device, k, prefetch)
  local rank = world:rank()
  local x = want(sharded.batch(k, rank, "cpu")):values()
  local y = prefetch and got.sharded[1]:compute_and_output_dist(prefetch):values()
    or got(sharded.batch(k, rank, device)):values()
  local ahead
  if prefetch then
    ahead = got.sharded[1]:input_dist(sharded.batch(k + 1, rank, device)):wait()
    got.sharded[1]:prefetch(ahead)
  end
  assert.same(x:to_list(), y:to_list())
  local grad = peri.Tensor.uniform({ BATCH, WIDTH }, -1, 1, k, rank, "f32", "cpu")
  x:backward(grad)
  y:backward(grad:to(nil, device))
  return ahead
end

local mixes = { ["fused_uvm"] = { "fused_uvm" }, ["fused_uvm_caching"] = { "fused_uvm_caching" },
  ["all of them"] = { "fused_uvm_caching", "fused", "fused_uvm" } }

describe("sharded tables in the host's memory:", function()
  for _, kind in ipairs { "table_wise", "row_wise", "column_wise", "mixed", "within_nodes" } do
    for mix, kernels in peri.util.ordered(mixes) do
      worlds.each(("%s, %s"):format(kind, mix), function(world, device)
        local optimizer = kind == "column_wise" and "rowwise_adagrad" or "adam"
        local want, got = model(kind, world, "cpu", { "fused" }, optimizer),
          model(kind, world, device, kernels, optimizer)
        for k = 1, 3 do step(want, got, world, device, k) end
        compare(want, got)
        local ahead = got.sharded[1]:input_dist(sharded.batch(4, world:rank(), device)):wait()
        got.sharded[1]:prefetch(ahead)
        for k = 4, 6 do ahead = step(want, got, world, device, k, ahead) end
        compare(want, got)
        got:flush()
        compare(want, got)
        for _, s in ipairs(got.sharded[1]:local_shards()) do
          local kernel = got.sharded[1].plan.tables[s.table].compute_kernel
          assert.equal(kernel == "fused_uvm_caching", s.cached)
          if s.cached then assert.equal("memory", s.cache_statistics().io)
          else assert.equal(kernel == "fused_uvm", s.state("weight"):is_mapped()) end
        end
      end, { sizes = #kernels == 1 and { 2 } or { 1, 3 }, local_size = 2, devices = { "opaque" } })
    end
  end

  worlds.each("beside tables in files", function(world, device)
    local folder, remove = shell.temporary()
    local want = model("row_wise", world, "cpu", { "fused" })
    local got = model("row_wise", world, device, { "fused_uvm_caching" }, "adam", 5, folder)
    local ahead = got.sharded[1]:input_dist(sharded.batch(1, world:rank(), device)):wait()
    for k = 1, 12 do ahead = step(want, got, world, device, k, ahead) end
    compare(want, got)
    for _, s in ipairs(got.sharded[1]:local_shards()) do
      local counts = s.cache_statistics()
      assert.is_true(counts.prefetch_hits > 0)
      assert.equal(s.table ~= "b", counts.io == "memory")
    end
    got:flush()
    got.sharded[1]:release()
    remove()
  end, { sizes = { 1 }, devices = { "opaque" } })

  worlds.each("states move between them and fused tables", function(world, device)
    local fused = model("row_wise", world, "cpu", { "fused" })
    for k = 1, 2 do fused(sharded.batch(k, world:rank(), "cpu")):values():sum():backward() end
    for _, kernels in peri.util.ordered(mixes) do
      local m = model("row_wise", world, device, kernels, "adam", 9)
      m:load_state_dict(fused:state_dict())
      m.sharded[1]:fused_optimizer():load_state_dict(fused.sharded[1]:fused_optimizer():state_dict())
      compare(fused, m)
      for k = 3, 5 do step(fused, m, world, device, k) end
      compare(fused, m)
      local back = model("row_wise", world, "cpu", { "fused" }, "adam", 10)
      back:load_state_dict(m:state_dict())
      back.sharded[1]:fused_optimizer():load_state_dict(m.sharded[1]:fused_optimizer():state_dict())
      compare(m, back)
    end
  end, { sizes = { 1, 2 }, devices = { "opaque" } })
end)
