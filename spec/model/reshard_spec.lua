-- model:reshard: a live model under other plans, between two steps: the run that goes A -> B -> A is the run that was
-- never resharded, bit for bit, with its optimizers, maps of raw ids and row files; and B is what a checkpoint of A
-- would be under B.
-- deadline: 120 s
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local text = require "spec.support.facts"
local shell = require "spec.support.shell"
local nn, plan = peri.nn, peri.plan

local folder, clean = shell.temporary()
teardown(clean)

local Net = nn.Module:extend "Net"
function Net:init(options)
  local function config(name, rows, dim)
    return peri.EmbeddingBagConfig { name = name, num_embeddings = rows, embedding_dim = dim,
      feature_names = { "f" .. name } }
  end
  local params = { optimizer = options.optimizer or "rowwise_adagrad", learning_rate = 0.1, exact = true }
  if options.dense then params = nil end
  self.ebc = peri.EmbeddingBagCollection { seed = 5, fused_params = params,
    tables = { config("a", 50, 8), config("b", 37, 16) } }
  if options.raw then
    local tables = { config("raw", 30, 8) }
    self.mc = peri.ManagedCollisionEmbeddingBagCollection {
      embedding_bag_collection = peri.EmbeddingBagCollection { seed = 6, tables = tables,
        fused_params = { optimizer = "adagrad", learning_rate = 0.1, exact = true } },
      managed_collision_collection = peri.ManagedCollisionCollection { embedding_configs = tables,
        managed_collision_modules = {
        raw = peri.MCHManagedCollisionModule { zch_size = 30, device = "cpu", eviction_interval = 3,
          input_hash_size = 1000, buckets = 6, eviction_policy = peri.embed.LFU_EvictionPolicy() } } } }
  end
  self.over = nn.Linear { in_features = options.raw and 32 or 24, out_features = 1 }
end
function Net:forward(kjt, raw)
  local rows = self.ebc(kjt):values()
  if self.mc then
    local more = self.mc(raw)
    rows = nn.functional.cat({ rows, more:values() }, 2)
  end
  return self.over(rows):mean()
end

local function batch(i)
  local values = { i * 7 % 50, i * 3 % 50, i * 5 % 37, i % 37 }
  return peri.KeyedJaggedTensor { keys = { "fa", "fb" }, values = values, lengths = { 1, 1, 2, 0 } },
    peri.KeyedJaggedTensor { keys = { "fraw" }, values = { i * 37 % 997, i * 13 % 997, i % 5 }, lengths = { 2, 1 } }
end

local function build(world, entries, options)
  nn.manual_seed(3)
  local model = peri.DistributedModelParallel { module = Net(options), group = world, plan = entries }
  local params = model:named_parameters()
  local function group(pattern, lr) return { params = nn.optim.select(params, pattern), lr = lr } end
  local optimizer = nn.optim.Adam { params = options.groups and { group("^over", 0.05) } or params, lr = 0.05 }
  if options.groups then optimizer:add_param_group(group("^ebc", 0.02)) end
  local clipped = nn.optim.GradientClippingOptimizer { optimizer = optimizer, clipping = "norm", max_gradient = 0.01 }
  local function halved(of) return nn.optim.StepLR { optimizer = of, step_size = 2, gamma = 0.5 } end
  if options.accumulate then model:accumulate(true) end
  return { accumulate = options.accumulate, model = model, optimizer = optimizer, clipped = clipped,
    rates = halved(optimizer), table_rates = not options.dense and halved(model:fused_optimizer()) or nil }
end

--- What a checkpoint of it has.
local function parts(p)
  return { model = p.model, optimizer = p.optimizer, rates = p.rates, table_rates = p.table_rates }
end

local function train(p, from, last)
  for i = from, last do
    peri.scope(function()
      p.clipped:zero_grad()
      p.model(batch(i)):backward()
      if p.accumulate then
        p.model(batch(i + 3)):backward()
        p.model:apply_accumulated()
      end
      p.clipped:step()
      p.rates:step()
      if p.table_rates then p.table_rates:step() end
    end)
  end
end

local function state(p)
  return text(peri.shard.gather_state_dict { model = p.model:state_dict(),
    tables = p.model:fused_optimizer():state_dict(), optimizer = p.optimizer:state_dict(),
    rates = p.rates:state_dict() })
end

local cached = function()
  return plan.row_wise { compute_kernel = "fused_uvm_caching", cache_params = plan.CacheParams { load_factor = 0.5 } }
end
local copies = function() return plan.data_parallel { compute_kernel = "dense" } end
local cases = {
  ["tables in memory"] = { { ebc = { a = plan.row_wise(), b = plan.table_wise(0) } }, { ebc = { a = plan.table_wise(1),
    b = plan.row_wise() } }, { ebc = { a = plan.data_parallel(), b = plan.table_wise(1) } } },
  ["gradients of two batches that are accumulated"] = { { ebc = { a = plan.row_wise(), b = plan.table_wise(0) } },
    { ebc = { a = plan.table_wise(1), b = plan.row_wise() } }, accumulate = true },
  ["tables of adam cut by columns"] = { { ebc = { a = plan.column_wise(), b = plan.table_wise(0) } },
    { ebc = { a = plan.table_wise(1), b = plan.column_wise() } }, optimizer = "adam" },
  ["raw ids"] = { { ebc = { a = plan.row_wise(), b = plan.row_wise() }, mc = { raw = plan.row_wise() } },
    { ebc = { a = plan.row_wise(), b = plan.table_wise(1) }, mc = { raw = plan.table_wise(1) } }, raw = true },
  ["tables in files"] = { { ebc = { a = cached(), b = plan.table_wise(0) } },
    { ebc = { a = plan.row_wise(), b = cached() } } },
  ["dense tables of which one rank has none"] = { { ebc = { a = plan.table_wise(1, { compute_kernel = "dense" }),
    b = plan.table_wise(1, { compute_kernel = "dense" }) } },
      { ebc = { a = plan.table_wise(0, { compute_kernel = "dense" }),
    b = plan.row_wise { compute_kernel = "dense" } } }, dense = true, groups = true },
  ["dense tables that were copies"] = { { ebc = { a = copies(), b = copies() } },
    { ebc = { a = plan.row_wise { compute_kernel = "dense" }, b = copies() } }, dense = true, groups = true },
  ["dense tables"] = { { ebc = { a = plan.row_wise { compute_kernel = "dense" },
    b = plan.table_wise(0, { compute_kernel = "dense" }) } },
      { ebc = { a = plan.table_wise(1, { compute_kernel = "dense" }),
        b = plan.column_wise { compute_kernel = "dense" } } },
    dense = true, groups = true },
}

describe("a model that is resharded", function()
  it("removes what a dead process left in the folder a day ago, and what may go on stays", function()
    local case, there = cases["tables in memory"], folder .. "/left"
    local young = ("perilune-reshard-%d-6-0"):format(os.time() - 3600)
    for _, name in ipairs { "perilune-reshard-1000-5-0", young, "reshard-1000-5-0" } do
      peri.checkpoint.save(there .. "/" .. name, { model = nn.Linear { in_features = 1, out_features = 1 } })
    end
    sim.run(2, function(_, world) build(world, case[1], case).model:reshard(case[2], { folder = there }) end)
    assert.equal(young .. "\nreshard-1000-5-0\n", (shell.run("ls " .. there)))
    shell.run("rm -r " .. there)
  end)

  it("goes through a folder that is there", function()
    sim.run(2, function(_, world)
      local case = cases["tables in memory"]
      local p = build(world, case[1], case)
      local ok, err = pcall(p.model.reshard, p.model, case[2], { folder = folder .. "/not/there" })
      assert.is_false(ok)
      assert.matches("folder '[^']*/not/there' is not there", tostring(err))
      assert.equal("", (shell.run("ls " .. folder .. " | grep not")))
    end)
  end)

  for name, case in peri.util.ordered(cases) do
    it("A -> B -> A is the one that never was: " .. name, function()
      local path = folder .. "/" .. name:gsub(" ", "_")
      sim.run(2, function(_, world)
        local never = build(world, case[1], case)
        train(never, 1, 7)
        local p = build(world, case[1], case)
        local fused, modules = p.model:fused_optimizer(), p.model.sharded
        local group = fused.param_groups[1]
        train(p, 1, 2)
        for k = 2, #case do
          peri.checkpoint.save(path, parts(p), { group = world, replace = true })
          p.model:reshard(case[k], { folder = folder })
          local loaded = build(world, case[k], case)
          peri.checkpoint.load(path, parts(loaded), { group = world })
          assert.equal(state(loaded), state(p))
          train(p, 1 + k, 1 + k)
          train(loaded, 1 + k, 1 + k)
          assert.equal(state(loaded), state(p))
        end
        p.model:reshard(case[1], { folder = folder })
        train(p, 2 + #case, 7)
        assert.equal(state(never), state(p))
        assert.is_true(rawequal(fused, p.model:fused_optimizer()) and rawequal(modules, p.model.sharded))
        if not group then return end
        group.lr = 0.125 -- a group that a script keeps is that of the tables
        assert.equal(0.125, p.model:fused_optimizer():lr())
        assert.is_truthy(state(p):find("0.125", 1, true))
      end)
      assert.equal("", (shell.run("ls " .. folder .. " | grep reshard-")))
    end)
  end

  it("is refused with words where something is in flight, the plan does not fit, or a dense optimizer has no names",
    function()
    sim.run(2, function(_, world)
      local p = build(world, cases["tables in memory"][1], {})
      local other = cases["tables in memory"][2]
      local k = 0
      local function batches()
        k = k + 1
        return k < 9 and (batch(k)) or nil
      end
      local pipeline = peri.pipeline.TrainPipelineSparseDist { model = p.model, optimizer = p.clipped }
      pipeline:progress(batches)
      assert.error_matches(function() p.model:reshard(other) end,
        "a pipeline has batches in flight.*allowed: after pipeline:stop")
      pipeline:stop()
      while pipeline:progress(batches) do end -- luacheck: ignore
      p.model:reshard(other, { folder = folder })
      assert.truthy(pipeline:progress(batches)) -- goes on with the same pipeline
      while pipeline:progress(batches) do end -- luacheck: ignore
      assert.error_matches(function() p.model:reshard { ebc = { a = plan.row_wise() } } end, "b")
      assert.error_matches(function()
        p.model:reshard { ebc = { a = plan.row_wise { compute_kernel = "dense" }, b = plan.row_wise() } }
      end,
        "table 'a': compute_kernel was fused and is dense")
      p.model:accumulate(true)
      assert.error_matches(function() p.model:reshard { ebc = { a = plan.data_parallel(), b = plan.row_wise() } } end,
        "updates of table 'a' %(data_parallel, compute_kernel fused%) cannot be accumulated; allowed: dense, or ")
      local q = build(world, cases["dense tables"][1], { dense = true })
      local plain = nn.optim.SGD { params = q.model:dense_parameters(), lr = 0.1 }
      assert.error_matches(function() q.model:reshard(cases["dense tables"][2]) end,
        "trained by a SGD, and its parameters have no names that the model knows %('0'%)")
      assert.truthy(plain)
    end)
  end)

  it("leaves averages and lists of its former shards with words", function()
    sim.run(2, function(_, world)
      local case = cases["dense tables"]
      local p = build(world, case[1], case)
      local params, words = p.model:dense_parameters(), "cut otherwise since"
      local ema = peri.pipeline.ema { params = p.model:named_parameters() }
      train(p, 1, 1)
      ema.run()
      p.model:reshard(case[2], { folder = folder })
      assert.error_matches(ema.run, "pipeline.ema: parameter 'ebc.embedding_bags.%l.weight' .*" .. words)
      assert.error_matches(function() nn.optim.clip_grad_norm(params, 1) end,
        "clip_grad_norm: parameter %d .*" .. words)
      assert.error_matches(function() nn.optim.clip_grad_value(params, 1) end, "clip_grad_value: .*" .. words)
    end)
  end)

  it("over several groups (DMPCollection) goes on with its averages", function()
    local case = cases["tables in memory"]
    sim.run(4, function(_, world)
      local function make()
        nn.manual_seed(3)
        local model = peri.model.DMPCollection { module = Net {}, global_pg = world, sharding_group_size = 2,
          plan = case[1] }
        local optimizer = nn.optim.Adam { params = model:named_parameters(), lr = 0.05 }
        return { model = model, optimizer = optimizer, clipped = optimizer,
          rates = nn.optim.StepLR { optimizer = optimizer, step_size = 2 } }
      end
      local never, p = make(), make()
      train(never, 1, 6)
      train(p, 1, 2)
      p.model:sync()
      p.model:reshard(case[2], { folder = folder })
      train(p, 3, 4)
      p.model:sync()
      p.model:reshard(case[1], { folder = folder })
      train(p, 5, 6)
      never.model:sync()
      p.model:sync()
      assert.equal(state(never), state(p))
    end)
  end)

  it("leaves quantized collections what they were made of, and their rows", function()
    local kjt = peri.KeyedJaggedTensor { keys = { "f" }, values = { 1, 49, 3 }, lengths = { 2, 1 } }
    local function answers(model)
      local m = model.module
      local rows = peri.util.resolve(m.rows(kjt)).f:values()
      local pooled, processed = m.bags(kjt):values(), m.processed(kjt):values()
      return pooled:dtype() .. processed:dtype() .. rows:dtype() .. text { pooled, processed, rows }
    end
    sim.run(2, function(_, world)
      local function config(of) return of { name = "t", num_embeddings = 50, embedding_dim = 8,
        feature_names = { "f" } } end
      local net = nn.Module()
      net.bags = peri.EmbeddingBagCollection { seed = 1, tables = { config(peri.EmbeddingBagConfig) } }
      net.rows = peri.EmbeddingCollection { seed = 2, tables = { config(peri.EmbeddingConfig) } }
      net.processed = peri.embed.FeatureProcessedEmbeddingBagCollection {
        embedding_bag_collection = peri.EmbeddingBagCollection { seed = 3, is_weighted = true,
          tables = { config(peri.EmbeddingBagConfig) } },
        feature_processors = peri.embed.PositionWeightedModuleCollection { max_feature_lengths = { f = 2 } } }
      local model = peri.DistributedModelParallel { group = world, plan = { bags = { t = plan.row_wise() },
        rows = { t = plan.table_wise(1) }, processed = { t = plan.row_wise() } },
        module = peri.quantize_embeddings { dtype = "INT8", output_dtype = "FP16", module = net } }
      local before = answers(model)
      model:reshard({ bags = { t = plan.table_wise(1) }, rows = { t = plan.row_wise() },
        processed = { t = plan.table_wise(0) } }, { folder = folder })
      assert.equal(before, answers(model))
      assert.error_matches(function() -- rows of another format
        model:reshard({ bags = { t = plan.column_wise { ranks = { 0, 1 } } }, rows = { t = plan.row_wise() },
          processed = { t = plan.row_wise() } }, { folder = folder })
      end, "has shape %[50, %d+%] here, and %[50, %d+%] in the checkpoint")
      assert.equal(before, answers(model))
      assert.equal(before, answers(model:copy()))
    end)
  end)

  it("is under its old plan again where the other cannot be, and goes on", function()
    local case = cases["tables in memory"]
    sim.run(2, function(rank, world)
      local never, p = build(world, case[1], case), build(world, case[1], case)
      train(never, 1, 3)
      train(p, 1, 2)
      local remake, done = p.model.sharded[1]._remake, false
      p.model.sharded[1]._remake = function(self, ...)
        if rank == 1 and not done then
          done = true
          peri.ffi.fail "no memory for it"
        end
        return remake(self, ...)
      end
      assert.error_matches(function() p.model:reshard(case[2], { folder = folder }) end, "no memory for it")
      train(p, 3, 3)
      assert.equal(state(never), state(p))
    end)
    assert.equal("", (shell.run("ls " .. folder .. " | grep reshard-")))
  end)

  it("is under its old plan again where making it under the other one fails half way: raw ids, and an optimizer that "
    .. "needs whole tables", function()
      local at = { ebc = { a = plan.table_wise(1), b = plan.table_wise(0) }, mc = { raw = plan.row_wise() } }
      local case = { optimizer = "shampoo", raw = true }
      sim.run(2, function(_, world)
        local never, p = build(world, at, case), build(world, at, case)
        train(never, 1, 4)
        train(p, 1, 3)
        local want = state(p)
        local module, failed = p.model.sharded[2], false
        local remake = module._remake
        module._remake = function(self, ...)
          if not failed then
            failed = true
            peri.ffi.fail "no memory for the second one"
          end
          return remake(self, ...)
        end
        local other = { ebc = { a = plan.table_wise(0), b = plan.table_wise(1) }, mc = { raw = plan.table_wise(0) } }
        assert.error_matches(function() p.model:reshard(other, { folder = folder }) end, "no memory for the second one")
        assert.equal(want, state(p))
        -- What the runtime would refuse is asked before anything is saved.
        other.ebc.b = plan.row_wise()
        assert.error_matches(function() p.model:reshard(other, { folder = folder .. "/missing" }) end,
          "shampoo needs all rows")
        train(p, 4, 4)
        assert.equal(state(never), state(p))
      end)
      assert.equal("", (shell.run("ls " .. folder .. " | grep reshard-")))
    end)
end)
