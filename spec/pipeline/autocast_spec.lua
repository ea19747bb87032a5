-- Training under autocast: pipelines, sharded models and what else a step is made of, each with a region of bf16.
local peri = require "perilune"
local worlds = require "spec.support.worlds"
local support = require "spec.support.pipeline"
local pipeline, nn = peri.pipeline, peri.nn

local small = { sizes = { 1, 2 }, timeout = 60 }
local cast = { autocast = "bf16", no_replica = true }

describe("training under autocast", function()
  worlds.each("is the plain loop's in every pipeline", function(world, device)
    local one, losses = support.plain_run(world, device, 5, cast)
    local plain, exact = support.plain_run(world, device, 5, { no_replica = true })
    assert.is_false(pcall(support.assert_same, plain, support.run_class(pipeline.TrainPipelineBase, world, device, 5,
      cast), "f32"))
    for i, loss in ipairs(losses) do assert.is_true(math.abs(loss - exact[i]) < 0.02 * (1 + exact[i])) end
    for _, class in ipairs { "TrainPipelineBase", "TrainPipelineSparseDist", "TrainPipelineSparseDistLite",
      "TrainPipelineFusedSparseDist", "PrefetchTrainPipelineSparseDist", "GradientAccumulationPipeline" } do
      support.assert_same(one, (support.run_class(pipeline[class], world, device, 5, cast)), class)
    end
  end, small)

  worlds.each("is the same with a region around the whole step", function(world, device)
    local one = support.plain_run(world, device, 4, cast)
    for _, class in ipairs { "TrainPipelineBase", "TrainPipelineSparseDist" } do
      local model = peri.autocast({ device = device, dtype = "bf16" }, support.run_class, pipeline[class], world,
        device, 4, { no_replica = true })
      support.assert_same(one, model, class)
    end
  end, small)

  worlds.each("keeps weights, gradients and what optimizers know in f32", function(world, device)
    local model = support.model(world, device, { autocast = "bf16" })
    local optimizer = support.optimizer(model)
    for batch in support.batches(world:rank(), device, 2) do
      optimizer:zero_grad()
      local loss = model(batch)
      assert.equal("f32", loss:dtype())
      model:backward(loss)
      for _, p in ipairs(model:dense_parameters()) do assert.equal("f32", p:grad():dtype()) end
      optimizer:step()
    end
    local learned = peri.shard.gather_state_dict(model:state_dict())
    for name, tensor in peri.util.ordered(learned) do assert.equal("f32", tensor:dtype(), name) end
  end, small)

  worlds.each("goes with large batches in parts, two-dimensional sharding and tables of the dense optimizer",
    function(world, device)
    for _, options in ipairs { { dense = true }, { two_d = world:size() }, { bags_only = true } } do
      options.autocast, options.no_replica = "bf16", true
      local one = support.plain_run(world, device, 4, options)
      support.assert_same(one, (support.run_class(pipeline.TrainPipelineSparseDist, world, device, 4, options)),
        "options")
    end
    local model = support.run_class(pipeline.GradientAccumulationPipeline, world, device, 4, cast, { num_steps = 2 })
    local again = support.run_class(pipeline.GradientAccumulationPipeline, world, device, 4, cast, { num_steps = 2 })
    support.assert_same(support.learned(model), again, "in parts, twice")
  end, small)

  it("evaluates, too", function()
    local x, w = peri.Tensor.uniform({ 3, 4 }, -1, 1, 1), nn.Linear { in_features = 4, out_features = 2 }
    local trained = peri.autocast({ device = "cpu" }, w, x)
    local served = peri.no_grad(function() return peri.autocast({ device = "cpu" }, w, x) end)
    assert.same(trained:to("f32"):to_list(), served:to("f32"):to_list())
  end)

  it("goes with hooks, dropout, batch norm and all losses", function()
    local nets = { nn.BatchNorm1d { num_features = 4 }, nn.Dropout { p = 0.5 } }
    local x = peri.Tensor.uniform({ 6, 4 }, -1, 1, 1):requires_grad()
    local seen
    local hook = peri.Tensor.Hook(function(grad) seen = grad:dtype() end)
    local layer = nn.Linear { in_features = 4, out_features = 4 }
    for _, net in ipairs(nets) do
      x:set_grad(nil)
      local y = peri.autocast({ device = "cpu" }, function() return net(hook(layer(x))) end)
      nn.functional.mse_loss(y:to "f32", peri.zeros { 6, 4 }):backward()
      assert.equal("bf16", seen)
      assert.equal("f32", x:grad():dtype())
    end
  end)
end)
