-- Ids of several modules that set out together: one message of a step says what travels, for all of them, and an error
-- names its module.
-- mpirun: 2
local ffi = require "ffi"
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local worlds = require "spec.support.worlds"
local support = require "spec.support.pipeline"
local nn, plan, schedules = peri.nn, peri.plan, peri.pipeline.schedules

local ROWS, DIM = 30, 4
local names = { "x", "y", "z" }

--- Three sharded collections, of which the last returns rows of ids.
local Model = nn.Module:extend "ThreeModules"
function Model:init(options)
  local function fused(i)
    return { optimizer = "rowwise_adagrad", learning_rate = options.rates and options.rates[i] or 0.3 }
  end
  for i, name in ipairs(names) do
    -- one name for all tables
    local fields = { name = "t", num_embeddings = ROWS, embedding_dim = DIM, feature_names = { "f" .. i } }
    self[name] = i < 3 and peri.EmbeddingBagCollection { tables = { peri.EmbeddingBagConfig(fields) },
      fused_params = fused(i) }
      or peri.EmbeddingCollection { tables = { peri.EmbeddingConfig(fields) }, fused_params = fused(i) }
  end
  self.dense = nn.Linear { in_features = 2 * DIM, out_features = 1, device = options.device }
  self.loss = nn.BCEWithLogitsLoss { reduction = "global_mean" }
end
function Model:forward(batch)
  local kjt = batch.sparse_features
  local rows = self.z(kjt)
  local logits = self.dense(nn.functional.cat({ self.x(kjt):values(), self.y(kjt):values() }, 2)):reshape(-1)
  local values = rows.f3:values()
  return self.loss(logits, batch.labels) + (values * values):sum() * 0.01
end

local function model_of(world, device, options)
  options = peri.util.copy(options or {})
  options.device = device
  nn.manual_seed(3)
  return peri.DistributedModelParallel { module = Model(options), device = device, group = world,
    plan = { x = { t = plan.row_wise() }, y = { t = plan.table_wise(world:size() - 1) }, z = { t = plan.row_wise() } } }
end

--- Note the control operations that this rank has posted in a group, in `seen`; returns their number. (The record keeps
--- 256 operations.)
local function controls(world, seen)
  for number, text in world:record():gmatch "operation (%d+): ([^\n]*)" do
    if text:find("on channel control", 1, true) and not seen[number] then
      seen[number], seen.n = true, (seen.n or 0) + 1
    end
  end
  return seen.n or 0
end

local inputs = {}
for _, name in ipairs(names) do inputs[name] = function(batch) return batch.sparse_features end end

--- A model that a schedule has trained with n batches, its pipeline, and the control operations of this rank.
local function trained(world, device, schedule, n)
  local model = model_of(world, device)
  local p = peri.pipeline.Pipeline { model = model, optimizer = support.optimizer(model), schedule = schedule,
    vote = false, inputs = inputs }
  local seen = {}
  local before = controls(world, seen)
  for _ in p:run(support.batches(world:rank(), device, n)) do controls(world, seen) end
  return model, p, controls(world, seen) - before
end

local only_lookup = schedules.sparse_dist:drop("input_dist", "wait_dist"):called "only_lookup"

--- A module whose ids no exchange of the library sends.
local Own = peri.shard.ShardedModule:extend "Own"
function Own:init() end
function Own:input_dist(x) return peri.dist.NoWait("own " .. x) end -- luacheck: ignore 212

describe("modules of a step", function()
  worlds.each("announce the sizes of all their ids in one message", function(world, device)
    local expected = model_of(world, device)
    support.plain(expected, support.optimizer(expected), support.batches(world:rank(), device, 12))
    expected = support.learned(expected)
    for _, schedule in ipairs { schedules.base, schedules.sparse_dist, schedules.sparse_dist_lite,
      schedules.fused_sparse_dist, schedules.prefetch_sparse_dist, only_lookup } do
      local model, p, n = trained(world, device, schedule, 12)
      assert.equal(3, #p.forwards)
      -- And one more with a first batch, which says beforehand what the modules are.
      assert.equal(world:size() == 1 and 0 or (schedule == schedules.base and 3 or 1) * (12 + 1), n, schedule.name)
      support.assert_same(expected, model, schedule.name)
    end
  end, { sizes = { 1, 2, 3 }, timeout = 60 })

  worlds.each("do so by hand, in groups of their own, and beside other exchanges", function(world, device)
    local all = {}
    for r = 1, world:size() do all[r] = r - 1 end
    local other = world:new_group(all, "other")
    local function module(group, feature)
      return peri.shard.ShardedEmbeddingBagCollection { group = group, device = device, plan = { t = plan.row_wise() },
        seed = 5, tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = ROWS, embedding_dim = DIM,
          feature_names = { feature } } },
        fused_params = { optimizer = "sgd", learning_rate = 0.1 } }
    end
    local modules = { module(world, "f1"), module(other, "f2"), module(world, "f3"), module(other, "f1") }
    local kjt = support.batches(world:rank(), device, 1)().sparse_features
    local a2a = peri.dist.KJTAllToAll(world, (function()
      local splits = { 3 }
      for r = 2, world:size() do splits[r] = 0 end
      return splits
    end)())
    local wanted, bytes = {}, function(tensor)
      local buffer = tensor:to(nil, "cpu"):contiguous():read()
      return ffi.string(buffer, ffi.sizeof(buffer))
    end
    for i, m in ipairs(modules) do wanted[i] = bytes(m(kjt):values()) end
    local here, there = {}, {}
    local before = { controls(world, here), controls(other, there) }
    local fused = peri.dist.FusedKJTListSplitsAwaitable { modules[1]:defer(kjt), a2a:defer(kjt), modules[2]:defer(kjt),
      peri.dist.NoWait "as it is", modules[3]:defer(kjt), modules[4]:defer(modules[4]:create_context(), kjt),
      Own():defer(3) }
    local list = fused:wait()
    assert.same({ "as it is", "own 3" }, { list[4], list[7] })
    assert.equal(kjt:values():numel(), (world:size() == 1 and list[2]:wait() or kjt):values():numel())
    if world:size() > 1 then list[2]:wait() end
    for i, at in ipairs { 1, 3, 5, 6 } do
      assert.equal(wanted[i], bytes(modules[i]:compute_and_output_dist(list[at]):values()))
    end
    -- One for two modules, one for the KeyedJaggedTensors; and one for two modules in the other group.
    assert.same(world:size() == 1 and { 0, 0 } or { 2, 1 },
      { controls(world, here) - before[1], controls(other, there) - before[2] })
    assert.error_matches(function() modules[1]:defer(kjt):wait() end,
      "these ids are deferred; FusedKJTListSplitsAwaitable sends them")
    world:barrier():wait()
    other:release()
  end, { sizes = { 1, 2, 3 }, timeout = 60 })
end)

if worlds.mpirun then return end -- below, ranks fail

describe("an error of modules that announce together", function()
  --- Errors of all ranks; one_of(rank, model, batch): the model's options and what is done to it and its batch before.
  local function errors_of(n, options, before)
    local _, errors = sim.run(n, function(rank, world)
      local model = model_of(world, "cpu", rank == n - 1 and options or nil)
      local p = peri.TrainPipelineSparseDist { model = model, optimizer = support.optimizer(model), inputs = inputs }
      local batches, k = support.batches(rank, "cpu", 6), 0
      for _ in p:run(function()
        local batch = batches()
        k = k + 1
        if batch and before and rank == n - 1 and k == 4 then before(batch, model) end
        return batch
      end) do end -- luacheck: ignore
    end, { catch = true, timeout = 20 })
    local list = {}
    for r = 1, n do list[r] = tostring(errors[r] and errors[r].message or errors[r]) end
    return list
  end

  local function all_say(list, ...)
    for _, text in ipairs(list) do
      for _, part in ipairs { ... } do assert.is_truthy(text:find(part, 1, true), text .. "\nwanted: " .. part) end
    end
  end

  for _, n in ipairs { 2, 3 } do
    it(("names the module, the rank and what differs [sim %d]"):format(n), function()
      for i, name in ipairs(names) do
        local rates = { 0.3, 0.3, 0.3 }
        rates[i] = 0.4
        all_say(errors_of(n, { rates = rates }),
          ("module '%s': rank %d runs another module or plan than rank 0"):format(name, n - 1),
          ("rank %d has learning_rate 0.4 where rank 0 has 0.3 (optimizer of table 't')"):format(n - 1))
        -- Also when they have agreed before.
        all_say(errors_of(n, nil, function(_, model) model.module[name]:set_learning_rate(0.5) end),
          ("module '%s': rank %d runs another"):format(name, n - 1), "has learning_rate 0.5 where rank 0 has 0.3")
      end
    end)

    it(("names the module, the rank and the id [sim %d]"):format(n), function()
      local list = errors_of(n, nil, function(batch)
        batch.sparse_features = peri.KeyedJaggedTensor { keys = { "f1", "f2", "f3" }, values = { 1, ROWS, 2 },
          lengths = { 1, 1, 1 } }
        batch.dense_features, batch.labels = nil, peri.tensor({ 1 }, "f32")
      end)
      all_say(list, ("module 'y': table 't', feature 'f2', sample 0: id %d at position 0 of the bag"):format(ROWS),
        ("rank %d"):format(n - 1))
    end)
  end

  it("is one on every rank where they list other modules", function()
    local _, errors = sim.run(2, function(rank, world)
      local model = model_of(world, "cpu")
      local kjt, list = support.batches(rank, "cpu", 1)().sparse_features, {}
      for i = 1, rank == 0 and 3 or 2 do list[i] = model.sharded[i]:defer(kjt) end
      peri.dist.FusedKJTListSplitsAwaitable(list):wait()
    end, { catch = true, timeout = 20 })
    for r = 1, 2 do assert.is_truthy(errors[r], "rank " .. r - 1) end
  end)

  it("of a module before its ids leave ends the others too", function()
    local _, errors = sim.run(2, function(rank, world)
      local model = model_of(world, "cpu")
      local kjt = support.batches(rank, "cpu", 1)().sparse_features
      local other = rank == 1 and peri.KeyedJaggedTensor { keys = { "f1" }, values = { 1 }, lengths = { 1 } } or kjt
      peri.dist.FusedKJTListSplitsAwaitable { model.sharded[1]:defer(kjt), model.sharded[2]:defer(other),
        model.sharded[3]:defer(kjt) }:wait()
    end, { catch = true, timeout = 20 })
    assert.matches("feature 'f2'", errors[2].message)
    assert.matches("feature 'f2'", errors[1].message)
  end)
end)
