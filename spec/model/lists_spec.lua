-- Embedding collections wherever a model may hold them: in plain tables, twice, late; each is sharded, and none is left
-- behind.
local peri = require "perilune"
local worlds = require "spec.support.worlds"
local nn, plan = peri.nn, peri.plan

local function collection(name)
  return peri.EmbeddingBagCollection {
    tables = { peri.EmbeddingBagConfig { name = name, num_embeddings = 8, embedding_dim = 4,
      feature_names = { "f" } } },
    fused_params = { optimizer = "sgd", learning_rate = 1 },
  }
end

local function batch(world, device)
  return peri.KeyedJaggedTensor { keys = { "f" }, values = { world:rank(), 7 }, lengths = { 2 }, device = device }
end

--- A table over all ranks after the loss sum(rows), of its start weights (all 1) and rate 1: 1 - the mean number of
--- uses.
local function expected(row, n)
  local uses = row == 7 and n or row < n and 1 or 0
  if row == 7 and n > 7 then uses = n + 1 end
  return 1 - uses / n
end

local function check_rows(sharded, n)
  for _, s in ipairs(sharded:local_shards()) do
    for row = 0, s.rows - 1 do assert.near(expected(s.row_offset + row, n), s.state("weight"):item(row * 4), 1e-6) end
  end
end

describe("collections in plain tables", function()
  worlds.each("are sharded, and trained by the ids of all ranks", function(world, device, n)
    peri.ffi.state.device = device
    local net = nn.Module()
    net.list = { collection "a", { deep = collection "b" } }
    net.late = false
    net.late = collection "c"
    net.alias = { net.list[1] } -- the same in a second place
    function net.forward(self, kjt)
      return self.alias[1](kjt):values() + self.list[2].deep(kjt):values() + self.late(kjt):values()
    end
    local paths = {}
    for path in peri.util.ordered { ["alias.0"] = 1, late = 1, ["list.1.deep"] = 1 } do paths[path] = {} end
    paths["alias.0"].a, paths["list.1.deep"].b, paths.late.c = plan.row_wise(), plan.data_parallel(),
      plan.table_wise(n - 1)
    local model = peri.DistributedModelParallel { module = net, plan = paths, group = world, device = device }
    assert.equal(net.list[1], net.alias[1])
    for _, sharded in ipairs(model.sharded) do
      for _, s in ipairs(sharded:local_shards()) do s.state("weight"):fill(1) end
    end
    model(batch(world, device)):sum():backward()
    assert.equal(3, #model.sharded)
    for _, sharded in ipairs(model.sharded) do check_rows(sharded, n) end
  end, { sizes = { 1, 2, 3 } })

  worlds.each("are refused where the model does not say where it keeps them", function(world, device)
    peri.ffi.state.device = device
    local hidden = collection "a"
    local net = nn.Module()
    net.ebc = hidden
    function net.forward(_, kjt) return hidden(kjt):values() end
    local model = peri.DistributedModelParallel { module = net, group = world, device = device }
    assert.error_matches(function() model(batch(world, device)) end,
      "EmbeddingBagCollection: 'ebc' of a DistributedModelParallel has its tables in shards now; call the one that "
        .. "the model has")
  end, { sizes = { 1, 2 } })

  worlds.each("are wrapped once", function(world, device, n)
    peri.ffi.state.device = device
    local net = nn.Module()
    net.ebc, net.over = collection "a", nn.Linear { in_features = 2, out_features = 1 }
    local model = peri.DistributedModelParallel { module = net, group = world, device = device }
    local outer = nn.Module()
    outer.towers = { { inner = model }, collection "b" }
    local function refused(module, words)
      assert.error_matches(function()
        peri.DistributedModelParallel { module = module, group = world, device = device }
      end,
        "^DistributedModelParallel: " .. words)
    end
    refused(model, "module '' is a DistributedModelParallel already; wrap a model once")
    refused(outer, "module 'towers%.0%.inner' is a DistributedModelParallel already")
    if n == 1 then return end -- nothing is averaged
    refused(model.module, "parameter 'over%.weight' is averaged already: its module is in another "
      .. "DistributedModelParallel")
  end, { sizes = { 1, 2 } })
end)
