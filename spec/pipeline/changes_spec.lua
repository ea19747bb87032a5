-- What is changed between two steps of a pipeline (a training step outside of it, state that is loaded, rows that are
-- written) holds for the next step, whatever the schedule has looked up ahead: it learns what the plain loop learns.
local ffi = require "ffi"
local peri = require "perilune"
local support = require "spec.support.pipeline"
local worlds = require "spec.support.worlds"
local schedules = peri.pipeline.schedules

local STEPS, AT = 6, 3

local names = { "base", "sparse_dist", "sparse_dist_lite", "fused_sparse_dist", "wire_first", "prefetch_sparse_dist" }

--- f(all local shards of fused tables, by a name that does not depend on the plan's pieces).
local function each_shard(model, f)
  for _, sharded in ipairs(model.sharded) do
    for _, s in ipairs(sharded:local_shards()) do
      if not s.dense and s.rows > 0 then f(s) end
    end
  end
end

local function changed(model)
  for _, sharded in ipairs(model.sharded) do sharded:tables_changed() end
end

local changes = {
  ["a training step outside of it"] = function(model, optimizer, world, device)
    support.plain(model, optimizer, support.batches(world:rank() + 10, device, 1))
  end,
  ["a backward pass outside of it"] = function(model, _, world, device)
    model:backward((model(support.batches(world:rank() + 10, device, 1)())))
  end,
  ["a state_dict that is loaded"] = function(model, _, _, device)
    local dict = peri.shard.gather_state_dict(model:state_dict())
    for _, x in peri.util.ordered(dict) do x:copy(x * 0.5 + 0.25) end
    model:load_state_dict(dict)
    return device
  end,
  ["rows that are written"] = function(model, _, _, device)
    each_shard(model, function(s) s.write("weight", 0, peri.full({ s.rows, s.cols }, 0.125, "f32", device)) end)
    changed(model)
  end,
  ["a table that is written through its view"] = function(model)
    each_shard(model, function(s) s.state("weight"):fill(0.125) end)
    changed(model)
  end,
  ["a rate"] = function(model) model:fused_optimizer():set_lr(0.05) end,
  ["an evaluation, which changes nothing"] = function(model, _, world, device)
    peri.no_grad(function() model(support.batches(world:rank() + 20, device, 1)()) end)
  end,
}

describe("between two steps of a pipeline", function()
  for _, name in ipairs(names) do
    for what, change in peri.util.ordered(changes) do
      worlds.each(("%s, %s holds for the next step"):format(name, what), function(world, device)
        peri.ffi.state.device = device
        local expected = support.model(world, device)
        local optimizer, all, want = support.optimizer(expected), support.batches(world:rank(), device, STEPS), {}
        for step = 1, STEPS do
          if step == AT then change(expected, optimizer, world, device) end
          local batch = all()
          want[step] = support.plain(expected, optimizer, function()
            local one = batch
            batch = nil
            return one
          end)[1]
        end
        local model = support.model(world, device)
        local dense, got = support.optimizer(model), {}
        local pipeline = peri.pipeline.Pipeline { model = model, optimizer = dense, schedule = schedules.load(name) }
        local batches = support.batches(world:rank(), device, STEPS)
        for step = 1, STEPS do
          if step == AT then change(model, dense, world, device) end
          got[step] = pipeline:progress(batches):item()
        end
        assert.same(want, got)
        assert.same(support.learned(expected), support.learned(model))
      end, name == "wire_first" and { sizes = { 1, 3 } } or { sizes = { 2 }, devices = { "cpu" } })
    end
  end

  local function write_on_rank_0(schedule, say)
    return function(world, device)
      peri.ffi.state.device = device
      local model = support.model(world, device)
      local pipeline = peri.pipeline.Pipeline { model = model, optimizer = support.optimizer(model),
        schedule = schedules.load(schedule) }
      local batches = support.batches(world:rank(), device, STEPS)
      for _ = 1, AT do pipeline:progress(batches) end
      if world:rank() == 0 then
        for _, sharded in ipairs(model.sharded) do
          for _, s in ipairs(sharded:local_shards()) do
            if s.table == "b" then s.write("weight", 0, peri.zeros({ s.rows, s.cols }, "f32", device)) end
          end
        end
      end
      if say then changed(model) end
      return pcall(pipeline.progress, pipeline, batches)
    end
  end

  it("rows that one rank writes are refused on all where others do not know, and rows were looked up ahead", function()
    local seen = {}
    local ok = pcall(require("perilune.dist.sim").run, 3, function(rank, world)
      local fine, err = write_on_rank_0("wire_first")(world, "cpu")
      seen[rank + 1] = not fine and tostring(err.message or err)
      if not fine then error(err, 0) end
    end)
    assert.is_false(ok)
    for rank = 1, 3 do
      assert.matches("shards of module 'bags' were written to on rank 0 between two steps", seen[rank])
    end
  end)

  for _, name in ipairs(names) do
    it(("a state_dict within a step of %s is of one moment, or refused"):format(name), function()
      require("perilune.dist.sim").run(2, function(rank, world)
        local slots, i = support.slots(schedules.load(name), function() end), 1
        local edited, slot = slots(i)
        while edited do
          local model, seen = support.model(world, "cpu"), {}
          local function look()
            local ok, dict = pcall(model.state_dict, model)
            seen[#seen + 1] = ok and peri.shard.gather_state_dict(dict) or tostring(dict.message)
          end
          edited = edited:set { trouble = { run = look } }
          local pipeline = peri.pipeline.Pipeline { model = model, optimizer = support.optimizer(model),
            schedule = edited }
          local moments, batches = { support.learned(model) }, support.batches(rank, "cpu", 3)
          while pipeline:progress(batches) do moments[#moments + 1] = support.learned(model) end
          assert.is_true(#seen >= 3)
          for _, dict in ipairs(seen) do
            local among = type(dict) == "string"
              and dict:match "the tables have learned from batch %d of a pipeline, and the dense part"
            for _, moment in ipairs(type(dict) == "table" and moments or {}) do
              local same = true
              for key, x in pairs(dict) do -- any order: all are compared
                local buffer = x:contiguous():read()
                same = same and ffi.string(buffer, ffi.sizeof(buffer)) == moment[key]
              end
              among = among or same
            end
            assert.is_truthy(among, ("slot %d: %s"):format(slot, tostring(dict)))
          end
          i = i + 1
          edited, slot = slots(i)
        end
        assert.is_true(i > 4)
      end)
    end)
  end

  for schedule, say in peri.util.ordered { wire_first = true, sparse_dist = false } do
    it("rows that one rank writes are taken by " .. schedule, function()
      require("perilune.dist.sim").run(3, function(_, world)
        local ok, err = write_on_rank_0(schedule, say)(world, "cpu")
        assert.is_true(ok, tostring(not ok and err.message))
      end)
    end)
  end
end)

describe("between two runs of a pipeline", function()
  local Net = peri.nn.Module:extend "Net"
  function Net:init(device)
    local tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = 12, embedding_dim = 4,
      feature_names = { "f" } } }
    self.raw = peri.ManagedCollisionEmbeddingBagCollection {
      embedding_bag_collection = peri.EmbeddingBagCollection { tables = tables, device = device,
        fused_params = { optimizer = "sgd", learning_rate = 0.5 } },
      managed_collision_collection = peri.ManagedCollisionCollection { embedding_configs = tables,
        managed_collision_modules = { t = peri.MCHManagedCollisionModule { zch_size = 12, eviction_interval = 2,
          eviction_policy = peri.embed.LFU_EvictionPolicy() } } } }
  end
  function Net:forward(batch) return self.raw(batch.ids):values():square():mean() end

  --- What was learned from eight batches, in two runs.
  local function learned(world, device, schedule, change)
    peri.nn.manual_seed(3)
    local model = peri.DistributedModelParallel { module = Net(device), group = world, device = device,
      plan = { raw = { t = peri.plan.row_wise() } } }
    local pipeline = peri.pipeline.Pipeline { model = model, optimizer = false, schedule = schedules.load(schedule) }
    for from = 1, 5, 4 do
      if from > 1 then change(model) end
      local i = from - 1
      for _ in pipeline:run(function()
        i = i + 1
        return i < from + 4 and { ids = peri.KeyedJaggedTensor { keys = { "f" }, lengths = { 2, 1 }, device = device,
          values = { i * 7 % 40, i * 3 % 40 + world:rank(), i * 5 % 37 } } } or nil
      end) do end
    end
    return support.learned(model)
  end
  local function keep() end
  local function load(model) model:load_state_dict(peri.shard.gather_state_dict(model:state_dict())) end
  local function reshard(model) model:reshard { raw = { t = peri.plan.row_wise() } } end

  for _, name in ipairs { "sparse_dist", "prefetch_sparse_dist", "wire_first", "semi_sync" } do
    worlds.each(name .. ": maps learn once from the batches behind a load, or another plan", function(world, device)
      local want = learned(world, device, name, keep)
      assert.same(want, learned(world, device, name, load))
      assert.same(want, learned(world, device, name, reshard))
    end, { sizes = { 1, 2 }, devices = { "cpu" } })
  end
end)
