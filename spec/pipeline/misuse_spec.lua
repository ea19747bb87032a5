-- Pipelines that are used as they cannot be: each says so, by name.
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local support = require "spec.support.pipeline"
local pipeline = peri.pipeline
local schedules = pipeline.schedules

describe("a pipeline", function()
  it("is called on a pipeline, with inputs that are functions", function()
    sim.run(1, function(_, world)
      local model = support.model(world, "cpu")
      local function refused(text, f, ...)
        local ok, err = pcall(f, ...)
        assert.is_false(ok)
        assert.equal(text, err.message)
      end
      refused("Pipeline: inputs of module 'bags' is 5, wanted a function(batch) or false", pipeline.Pipeline,
        { model = model, optimizer = false, schedule = schedules.base, inputs = { bags = 5 } })
      local p = peri.TrainPipelineBase { model = model, optimizer = false }
      for _, name in ipairs { "progress", "run", "set_schedule", "measure", "attach", "detach", "not_pipelined", "stop",
        "close" } do
        refused(("Pipeline:%s: self is nil, wanted a Pipeline (a method is called with a colon: x:%s(...))"):format(
          name, name), p[name])
      end
      assert.equal(pipeline.EvalPipelineFusedSparseDist, peri.EvalPipelineFusedSparseDist)
      assert.equal(pipeline.GradientAccumulationPipeline, peri.GradientAccumulationPipeline)
    end)
  end)

  it("refuses within a step what belongs between steps, and what spoils its contexts", function()
    sim.run(1, function(_, world)
      local function fails(text, run)
        local model = support.model(world, "cpu")
        local p = pipeline.Pipeline { model = model, optimizer = false,
          schedule = schedules.sparse_dist:insert({ "own", run = run }, { before = "forward" }) }
        local batches = support.batches(0, "cpu", 3)
        for _, expected in ipairs { text, "Pipeline: an earlier step failed: " .. text } do
          local ok, err = pcall(p.progress, p, batches)
          assert.is_false(ok)
          assert.equal(expected, (err.message:gsub(" %(spec/.*$", "")))
        end
        assert.equal(0, p:close())
      end
      local within = "Pipeline: %s is called within a step (by an operation, the loader or on_step); there stop() "
        .. "asks for no more batches"
      fails(within:format "progress", function(_, p) p:progress(support.batches(0, "cpu", 3)) end)
      fails(within:format "progress", function(_, p) p:run(support.batches(0, "cpu", 3))() end)
      fails(within:format "close", function(_, p) p:close() end)
      local spoilt = "operation 'own' has assigned to dists, rows, events or index of its context, which are the "
        .. "pipeline's; a table for operations is context.own"
      for _, name in ipairs { "dists", "rows", "events", "index" } do
        fails(spoilt, function(context) context[name] = nil end)
      end
    end)
  end)

  it("has an optimizer if there is something for it, or says that this is meant", function()
    sim.run(1, function(_, world)
      local model = support.model(world, "cpu")
      local text = ("schedule '%%s' has an 'optimizer', but the pipeline has none for 4 parameters of the model "
        .. "('%s', ...)")
        :format(model:named_parameters()[1].name)
      for _, name in ipairs { "TrainPipelineBase", "TrainPipelineSparseDist", "TrainPipelineSparseDistLite",
        "TrainPipelineFusedSparseDist", "TrainPipelineSemiSync", "PrefetchTrainPipelineSparseDist" } do
        local ok, err = pcall(peri[name], { model = model })
        assert.is_false(ok)
        assert.matches(("^%s: schedule '.-' has an 'optimizer', but the pipeline has none for 4 parameters"):format(
          name), err.message)
      end
      local p = peri.EvalPipelineSparseDist { model = model }
      local ok, err = pcall(p.set_schedule, p, schedules.base)
      assert.is_false(ok)
      assert.matches(text:format "base", err.message, 1, true)
      pipeline.Pipeline { model = model, schedule = schedules.base:drop("optimizer", "zero_grad") }
      local before = model:dense_parameters()[1]:to_list()
      p = peri.TrainPipelineBase { model = model, optimizer = false }
      for _ in p:run(support.batches(0, "cpu", 2)) do end -- luacheck: ignore
      assert.same(before, model:dense_parameters()[1]:to_list())
    end)
  end)

  it("needs no optimizer where all parameters are in tables that backward updates", function()
    local Fused = peri.nn.Module:extend "Fused"
    function Fused:init()
      self.bags = peri.EmbeddingBagCollection { fused_params = { optimizer = "sgd", learning_rate = 1 }, tables = {
        peri.EmbeddingBagConfig { name = "t", num_embeddings = 30, embedding_dim = 4, feature_names = { "f1" } } } }
    end
    function Fused:forward(batch) return self.bags(batch.sparse_features):values():sum() end
    sim.run(1, function(_, world)
      for _, model in ipairs { Fused(), peri.DistributedModelParallel { module = Fused(), group = world } } do
        peri.TrainPipelineBase { model = model }
      end
    end)
  end)

  it("runs the same schedule on all ranks, or none", function()
    local base, own = schedules.base, { "own", run = print }
    local function differ(other, text)
      local _, errors = sim.run(2, function(rank, world)
        local model = support.model(world, "cpu")
        local p = pipeline.Pipeline { model = model, optimizer = false, schedule = rank == 0 and base or other }
        p:progress(support.batches(rank, "cpu", 2))
      end, { catch = true })
      for r = 1, 2 do assert.equal(("Pipeline: %s; allowed: the same on all ranks"):format(text), errors[r].message) end
    end
    differ(schedules.sparse_dist, "schedule is base on rank 0 of group 'world' and sparse_dist on rank 1")
    differ(base:retime { load = 2 }:with { depth = 3 }, "depth is 2 on rank 0 of group 'world' and 3 on rank 1")
    differ(base:set { to_device = { on = "dist" } },
      "on of 'to_device' is copy on rank 0 of group 'world' and dist on rank 1")
    differ(base:insert(own),
      "order of operations is load, to_device, zero_grad, forward, backward, optimizer on rank 0 of group 'world' "
        .. "and load, to_device, zero_grad, forward, backward, optimizer, own on rank 1")
  end)

  it("pipelines the same modules on all ranks, or none", function()
    local _, errors = sim.run(2, function(rank, world)
      local p = peri.TrainPipelineSparseDist { model = support.model(world, "cpu"), optimizer = false,
        inputs = rank == 1 and { bags = false } or nil }
      p:progress(support.batches(rank, "cpu", 2))
    end, { catch = true })
    for r = 1, 2 do
      assert.equal("TrainPipelineSparseDist: list of pipelined modules is bags, rows on rank 0 of group 'world' and "
        .. "bags (not pipelined), rows on rank 1; allowed: the same on all ranks", errors[r].message)
    end
  end)

  it("sends what the model is called with, or that is an error", function()
    local function other(batch)
      local kjt = batch.sparse_features
      return peri.KeyedJaggedTensor { keys = kjt:keys(), values = kjt:values(), lengths = kjt:lengths(),
        stride = kjt:stride() }
    end
    local text = "module 'bags' is called with batch.sparse_features, which was replaced after its ids were sent; "
      .. "inputs = { ['bags'] = false } has it run whole"
    for _, name in ipairs { "sparse_dist", "sparse_dist_lite", "fused_sparse_dist", "prefetch_sparse_dist",
      "wire_first" } do
      sim.run(1, function(_, world)
        local function run(schedule, in_model)
          local model = support.model(world, "cpu")
          local forward = model.module.forward
          if in_model then
            rawset(model.module, "forward", function(self, batch)
              batch.sparse_features = other(batch)
              return forward(self, batch)
            end)
          end
          local p = pipeline.Pipeline { model = model, optimizer = support.optimizer(model), schedule = schedule }
          for _ in p:run(support.batches(0, "cpu", 5)) do end -- luacheck: ignore
        end
        local own = { "other", run = function(context) context.batch.sparse_features = other(context.batch) end }
        for _, args in ipairs { { schedules[name], true }, { schedules[name]:insert(own, { before = "forward" }),
          false } } do
          local ok, err = pcall(run, args[1], args[2])
          assert.is_false(ok)
          assert.equal(text, err.message)
        end
        own.ahead = schedules[name]:check().ahead
        run(schedules[name]:insert(own, { after = "to_device" }), false) -- before ids are sent
      end)
    end
  end)
end)
