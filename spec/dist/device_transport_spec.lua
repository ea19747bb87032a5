-- A second transport for the memory of a device: what it carries, what it does not promise, and that a whole training
-- step through it has the results of the host's. (spec/dist/coll_spec.lua has every operation by it.)
local peri = require "perilune"
local sim = require "perilune.dist.sim"

local BY_DEVICE = { device = "opaque", device_transport = "sim" }

describe("a device transport", function()
  it("carries the tensors of its device, and says how it sums", function()
    sim.run(3, function(rank, world)
      assert.same({ "sim", false }, { world:transport_of "opaque" })
      assert.same({ "sim", true }, { world:transport_of "cpu" })
      local t = peri.full({ 4 }, rank + 1)
      assert.same({ 6, 6, 6, 6 }, world:all_reduce(t):wait():to_list())
    end, BY_DEVICE)
    sim.run(3, function(_, world) assert.same({ "sim", true }, { world:transport_of "opaque" }) end,
      { device = "opaque" })
  end)

  it("need not sum in rank order: whoever needs that asks", function()
    local terms = { 1e8, 1, -1e8 } -- f32: (1e8 + 1) - 1e8 = 0, (-1e8 + 1) + 1e8 = 0, but 1e8 - 1e8 + 1 = 1
    local orders = { { 1, 2, 3 }, { 1, 3, 2 } }
    local by_host, by_device = {}, {}
    for k, order in ipairs(orders) do
      local function sum(rank, world)
        local x = world:all_reduce(peri.tensor({ terms[order[rank + 1]] }, "f32")):wait():to_list()[1]
        return x
      end
      by_host[k] = sim.run(3, sum, { device = "opaque" })[1]
      by_device[k] = sim.run(3, sum, BY_DEVICE)[1]
    end
    assert.same({ 0, 1 }, by_host) -- in rank order
    assert.same({ 0, 0 }, by_device) -- from the last rank to the first
  end)

  it("orders what is queued before and after an operation, on any stream", function()
    sim.run(2, function(rank, world)
      for round = 1, 20 do
        local x = peri.full({ 300 }, rank + round) * 2 -- queued, not computed yet
        local y = world:all_gather(x):wait()
        local back = y + 1 -- queued behind the operation
        x:fill(0)
        local list = back:to_list()
        assert.same({ 2 * round + 1, 2 * round + 3 }, { list[1], list[600] })
      end
    end, BY_DEVICE)
  end)

  it("fails with its rank and operation where ranks differ, and takes the group with it", function()
    local _, errors = sim.run(2, function(rank, world)
      local ok, err = pcall(function() return world:all_reduce(peri.ones { 2 + rank }):wait() end)
      assert.falsy(ok)
      assert.falsy(world:is_healthy())
      error(err, 0)
    end, { device = "opaque", device_transport = "sim", catch = true })
    for rank = 1, 2 do
      local both = "rank 0 posted operation 1: all_reduce sum f32 [2], rank 1 posted operation 1: all_reduce sum f32 "
        .. "[3]"
      assert.truthy(tostring(errors[rank]):find(both, 1, true))
    end
  end)

  it("is refused where it makes no sense", function()
    local function open(args) return function() sim.run(1, function() end, args) end end
    assert.error_matches(open { device = "cpu", device_transport = "sim" }, "device 'cpu' needs no device_transport")
    assert.error_matches(open { device = "opaque", device_transport = "self" },
      "transport 'self' takes no device memory")
    assert.error_matches(open { device = "opaque", device_transport = "smoke" }, "smoke")
  end)

  it("leaves a training step of a sharded model its results", function()
    local function train(rank, world)
      local tables = {
        peri.EmbeddingBagConfig { name = "t", embedding_dim = 4, num_embeddings = 20, feature_names = { "f" } },
        peri.EmbeddingBagConfig { name = "u", embedding_dim = 8, num_embeddings = 10, feature_names = { "g" } },
      }
      local function sharding(kind, ranks)
        return peri.ParameterSharding { sharding_type = kind, compute_kernel = "fused", ranks = ranks }
      end
      local e = peri.shard.ShardedEmbeddingBagCollection {
        tables = tables, group = world, fused_params = { optimizer = "sgd", learning_rate = 0.5 },
        plan = { t = sharding("row_wise", { 0, 1 }), u = sharding("table_wise", { 1 }) },
      }
      local seen = {}
      for step = 1, 3 do
        local kjt = peri.KeyedJaggedTensor.from_lists { keys = { "f", "g" }, { { rank, step }, { 3 } },
          { { 1, 2 }, { rank + step } } }
        local out = e(kjt):values()
        out:sum():backward()
        for _, x in ipairs(out:to_list()) do seen[#seen + 1] = x end
      end
      return seen
    end
    local expected = sim.run(2, train, { device = "opaque" })
    assert.is_true(#expected[1] > 0)
    assert.same(expected, sim.run(2, train, BY_DEVICE))
  end)
end)
