-- The backward pass of a DistributedModelParallel: whichever way it is spelled, dense gradients are means over the
-- ranks afterwards.
-- mpirun: 2 3
local peri = require "perilune"
local worlds = require "spec.support.worlds"
local nn, plan = peri.nn, peri.plan

local ROWS, DIM = 6, 4

--- A table with the given plan entry, and a scale of its pooled rows: a parameter of the dense part.
local Model = nn.Module:extend "Model"
function Model:init(fused)
  self.ebc = peri.EmbeddingBagCollection {
    tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = ROWS, embedding_dim = DIM,
      feature_names = { "f" } } },
    fused_params = fused and { optimizer = "sgd", learning_rate = 0.5 } or nil,
  }
  self.scale = nn.Parameter(peri.ones { DIM })
  self.other = nn.Parameter(peri.ones { DIM })
end
--- The pooled rows times the scale, and as they are.
function Model:forward(kjt)
  local pooled = self.ebc(kjt):values()
  return pooled * self.scale:reshape(1, DIM):expand { pooled:size(1), DIM }, pooled
end

local function make(world, device, sharding)
  peri.ffi.state.device = device
  local model = peri.DistributedModelParallel { module = Model(sharding.compute_kernel ~= "dense"),
    plan = { ebc = { t = sharding } }, group = world, device = device }
  for _, s in ipairs(model.sharded[1]:local_shards()) do s.state("weight"):fill(1) end
  return model
end

--- One bag on each rank: the id 0, rank + 1 times.
local function batch(world, device)
  local values = {}
  for i = 1, world:rank() + 1 do values[i] = 0 end
  return peri.KeyedJaggedTensor { keys = { "f" }, values = values, lengths = { #values }, device = device }
end

--- The mean of rank + 1 over the ranks: the gradient of `scale` when all table weights are 1.
local function mean(n) return (n + 1) / 2 end
local function gradient(p) return p:grad() and p:grad():to_list() or nil end
local function all(x) return { x, x, x, x } end

describe("dense gradients are means over the ranks", function()
  worlds.each("after loss:backward()", function(world, device, n)
    local model = make(world, device, plan.table_wise(0))
    model(batch(world, device)):sum():backward()
    assert.same(all(mean(n)), gradient(model.module.scale))
    assert.is_nil(gradient(model.module.other)) -- no rank has one
  end, { sizes = { 1, 2, 3 } })

  worlds.each("after model:backward(loss)", function(world, device, n)
    local model = make(world, device, plan.row_wise())
    model:backward(model(batch(world, device)):sum())
    assert.same(all(mean(n)), gradient(model.module.scale))
  end, { sizes = { 1, 2, 3 } })

  worlds.each("after two passes that accumulate", function(world, device, n)
    local model = make(world, device, plan.table_wise(0))
    model(batch(world, device)):sum():backward()
    for _, s in ipairs(model.sharded[1]:local_shards()) do s.state("weight"):fill(1) end
    model:backward(model(batch(world, device)):sum())
    assert.same(all(2 * mean(n)), gradient(model.module.scale))
  end, { sizes = { 1, 2, 3 } })

  worlds.each("after two forward passes in one loss", function(world, device, n)
    local model = make(world, device, plan.table_wise(0))
    local loss = model(batch(world, device)):sum() + model(batch(world, device)):sum()
    loss:backward()
    assert.same(all(2 * mean(n)), gradient(model.module.scale))
  end, { sizes = { 1, 2, 3 } })

  worlds.each("with a term made outside the model, before it", function(world, device, n)
    local model = make(world, device, plan.table_wise(0))
    local penalty = (model.module.other * model.module.other):sum() * (world:rank() + 1)
    local loss = model(batch(world, device)):sum() + penalty
    loss:backward()
    assert.same(all(mean(n)), gradient(model.module.scale))
    assert.same(all(2 * mean(n)), gradient(model.module.other))
  end, { sizes = { 1, 2, 3 } })

  worlds.each("when the loss of one rank reaches no parameter", function(world, device, n)
    local model = make(world, device, plan.table_wise(0))
    local scaled, pooled = model(batch(world, device))
    local loss = world:rank() == 0 and scaled:sum() * n or pooled:sum() * 0
    loss:backward()
    assert.same(all(1), gradient(model.module.scale))
  end, { sizes = { 1, 2, 3 } })

  worlds.each("of a model inside another module, in a pipeline", function(world, device, n)
    local model = make(world, device, plan.data_parallel { compute_kernel = "dense" })
    local Outer = nn.Module:extend "Outer"
    function Outer:init() self.inner = model end
    function Outer:forward(kjt) return self.inner(kjt):sum() end
    local outer = Outer()
    local optimizer = nn.optim.SGD { params = outer:parameters(), lr = 1 }
    local given = false
    local loss = peri.TrainPipelineBase { model = outer, optimizer = optimizer }:progress(function()
      if given then return nil end
      given = true
      return batch(world, device)
    end)
    loss:release()
    assert.same(all(1 - mean(n)), model.module.scale:to_list())
    local weight = model.sharded[1]:local_shards()[1].state "weight"
    assert.same(all(1 - mean(n)), weight:slice(1, 0, 1):reshape(-1):to_list())
    assert.equal(1, weight:item(DIM))
  end, { sizes = { 1, 2, 3 } })
end)

describe("parameters()", function()
  local function names(model)
    local list = {}
    for i, p in ipairs(model:named_parameters()) do list[i] = p.name end
    return list
  end

  worlds.each("has the replicas and shards of dense tables, and no fused table", function(world, device)
    local table_name = "ebc.embedding_bags.t.weight"
    local dense = { compute_kernel = "dense" }
    local replicated = make(world, device, plan.data_parallel(dense))
    assert.same({ "scale", "other", table_name }, names(replicated))
    assert.equal(3, #replicated:dense_parameters())
    local rows = make(world, device, plan.row_wise(dense))
    assert.same({ "scale", "other", table_name }, names(rows))
    local last = world:size() - 1
    local columns = make(world, device, plan.table_wise(last, dense))
    assert.equal(world:rank() == last and 3 or 2, #columns:parameters())
    local cut = peri.DistributedModelParallel { module = Model(false), group = world, device = device,
      plan = { ebc = { t = plan.column_wise { ranks = { 0 }, compute_kernel = "dense" } } } }
    assert.equal(world:rank() == 0 and 3 or 2, #cut:parameters())
    assert.same({ "scale", "other" }, names(make(world, device, plan.row_wise())))
  end, { sizes = { 1, 2, 3 } })

  worlds.each("trains dense shards by the gradient of their rank alone", function(world, device, n)
    local model = make(world, device, plan.row_wise { compute_kernel = "dense" })
    local optimizer = nn.optim.SGD { params = model:parameters(), lr = 1 }
    model(batch(world, device)):sum():backward()
    optimizer:step()
    if world:rank() == 0 then -- has row 0: the mean over ranks of the gradients that they sent
      assert.equal(1 - mean(n), model.sharded[1]:local_shards()[1].state("weight"):item(0))
    end
    assert.same(all(1 - mean(n)), model.module.scale:to_list())
    model:zero_grad()
    assert.is_nil(model.module.scale:grad())
  end, { sizes = { 1, 2, 3 } })
end)

describe("an optimizer", function()
  it("is not made of nothing", function()
    for _, name in ipairs { "SGD", "Adagrad", "Adam", "AdamW", "RMSprop", "RowWiseAdagrad" } do
      assert.error_matches(function() nn.optim[name] { params = {} } end,
        name .. ": params is empty, so there is nothing to train")
    end
    assert.error_matches(function() nn.optim.SGD { params = nn.Identity() } end, "SGD: params is empty")
    assert.error_matches(function() nn.optim.SGD { params = { weight = peri.ones({ 2 }):requires_grad() } } end,
      "SGD: params is a table with the key 'weight', wanted a list")
    assert.error_matches(function() nn.optim.CombinedOptimizer {} end,
      "CombinedOptimizer: a list of optimizers is wanted")
  end)

  worlds.each("may have nothing on a rank whose neighbours have dense shards", function(world, device)
    local function collection(sharding)
      local ebc = Model(sharding.compute_kernel ~= "dense").ebc
      return peri.DistributedModelParallel { module = ebc, group = world, device = device,
        plan = { [""] = { t = sharding } } }
    end
    local optimizer = nn.optim.SGD { params = collection(plan.table_wise(0,
      { compute_kernel = "dense" })):dense_parameters() }
    assert.equal(world:rank() == 0 and 1 or 0, #optimizer.params)
    optimizer:zero_grad()
    optimizer:step()
    assert.error_matches(function() nn.optim.SGD { params = collection(plan.table_wise(0)):dense_parameters() } end,
      "params is empty")
  end, { sizes = { 2 } })
end)

describe("replicas of fused tables", function()
  worlds.each("start from rank 0's numbers", function(world, device)
    peri.ffi.state.device = device
    local module = Model(true)
    module.ebc:weight("t"):fill(world:rank() + 5)
    local model = peri.DistributedModelParallel { module = module, plan = { ebc = { t = plan.data_parallel() } },
      group = world, device = device }
    assert.equal(5, model.sharded[1]:local_shards()[1].state("weight"):item(3))
  end, { sizes = { 2, 3 } })
end)

describe("a norm of gradients is that of all ranks", function()
  local function sum(world, x) return world:all_reduce(peri.tensor({ x }, "f64", "cpu")):wait():item() end

  --- The square of what a step has changed in a parameter.
  local function changed(before, p)
    local total = 0
    for i, x in ipairs(p:detach():to_list()) do total = total + (x - before[i]) ^ 2 end
    return total
  end

  local function check(what, entry, list_of)
    worlds.each("with " .. what, function(world, device, n)
      local model = make(world, device, entry())
      local optimizer = nn.optim.GradientClippingOptimizer { optimizer = nn.optim.SGD { params = list_of(model),
        lr = 1 }, clipping = "norm", max_gradient = 0.5 }
      model(batch(world, device)):sum():backward()
      local before, mine = {}, {}
      for _, name in ipairs(model.sharded[1]:own_parameters()) do mine[rawget(model.sharded[1], name)] = true end
      for i, p in ipairs(model:parameters()) do before[i] = p:detach():to_list() end
      optimizer:step()
      local own, alike = 0, 0
      for i, p in ipairs(model:parameters()) do
        if mine[p] then own = own + changed(before[i], p)
        else
          alike = alike + changed(before[i], p)
          assert.near(p:detach():sum():item(), sum(world, p:detach():sum():item()) / n, 1e-6) -- the same on all ranks
        end
      end
      assert.near(0.5, math.sqrt(alike + sum(world, own)), 1e-6) -- as long as it may be
    end, { sizes = { 1, 2, 3 } })
  end
  local function parameters(model) return model:dense_parameters() end
  check("rows on all ranks", function() return plan.row_wise { compute_kernel = "dense" } end, parameters)
  check("a table on one", function() return plan.table_wise(0, { compute_kernel = "dense" }) end, parameters)
  check("columns", function() return plan.column_wise { compute_kernel = "dense", ranks = { 0 } } end, parameters)
  check("replicas", function() return plan.data_parallel { compute_kernel = "dense" } end, parameters)
  check("the model for a list", function() return plan.row_wise { compute_kernel = "dense" } end,
    function(model) return model end)

  worlds.each("or refused, where the list does not say that there are parts", function(world, device)
    local model = make(world, device, plan.row_wise { compute_kernel = "dense" })
    local list = peri.util.map(model:dense_parameters(), function(p) return p end)
    assert.error_matches(function()
      nn.optim.GradientClippingOptimizer { optimizer = nn.optim.SGD { params = list, lr = 1 }, clipping = "norm" }
    end, "GradientClippingOptimizer: parameter %d is this rank's shard of a dense table, so the norm is of all ranks: "
      .. "give model:dense_parameters%(%) as it is, or sharded = and group =")
  end, { sizes = { 1, 2 } })
end)
