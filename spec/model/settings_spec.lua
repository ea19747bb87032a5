-- What a model is set to, beside its numbers: evaluation mode, frozen tables, the time of maps of raw ids; and the
-- modules that a script holds. A model that is wrapped, resharded or copied goes on as one that was not.
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local text = require "spec.support.facts"
local nn, plan, embed = peri.nn, peri.plan, peri.embed

local function config(name)
  return peri.EmbeddingBagConfig { name = name, num_embeddings = 32, embedding_dim = 8,
    feature_names = { "f" .. name } }
end
local function kernel(make, rank)
  if rank then return make(rank, { compute_kernel = "dense" }) end
  return make { compute_kernel = "dense" }
end

local Net = nn.Module:extend "Net"
function Net:init()
  self.ebc = peri.EmbeddingBagCollection { seed = 5, tables = { config "a", config "b" } }
  self.maps = peri.ManagedCollisionEmbeddingBagCollection {
    embedding_bag_collection = peri.EmbeddingBagCollection { seed = 6, tables = { config "raw" },
      fused_params = { optimizer = "adagrad", learning_rate = 0.1, exact = true } },
    managed_collision_collection = peri.ManagedCollisionCollection { embedding_configs = { config "raw" },
      managed_collision_modules = { raw = embed.HashZchManagedCollisionModule { zch_size = 32, total_num_buckets = 4,
        max_probe = 8, eviction_policy_name = "SINGLE_TTL_EVICTION",
        eviction_config = { features = { "fraw" }, single_ttl = 10 } } } } }
  self.over = nn.Linear { in_features = 24, out_features = 1 }
end
function Net:forward(kjt)
  return self.over(nn.functional.cat({ self.ebc(kjt):values(), self.maps(kjt):values() }, 2)):mean()
end

local function batch(i)
  return peri.KeyedJaggedTensor { keys = { "fa", "fb", "fraw" },
    lengths = { 1, 1, 2, 0, 1, 1 },
    values = { i * 7 % 32, i * 3 % 32, i * 5 % 32, i % 32, i * 37 % 997, i * 13 % 997 } }
end

local A = { ebc = { a = kernel(plan.row_wise), b = kernel(plan.table_wise, 0) }, maps = { raw = plan.row_wise() } }
local B = { ebc = { a = kernel(plan.table_wise, 1), b = kernel(plan.row_wise) }, maps = { raw = plan.table_wise(1) } }

local function build(world, freeze)
  nn.manual_seed(3)
  local net = Net()
  if freeze then freeze(net) end
  return peri.DistributedModelParallel { module = net, group = world, plan = A }
end

local function freeze(module)
  for _, p in ipairs(module:named_parameters()) do
    if p.name:find "%.a%.weight" then p.tensor:requires_grad(false) end
  end
end
local function state(model) return text(peri.shard.gather_state_dict(model:state_dict())) end
local function table_a(model)
  return text(peri.shard.gather_state_dict { a = model:state_dict()["ebc.embedding_bags.a.weight"] })
end

--- Six steps, before the third of which something happens to the model. Maps are told the time now and then.
local function trained(model, happens)
  local optimizer = nn.optim.SGD { params = model:named_parameters(), lr = 0.1 }
  local maps = model.module.maps:managed_collision_collection()
  for i = 1, 6 do
    if i == 2 then maps:set_time(40) end
    if i == 5 then maps:set_time(55) end
    if i == 3 and happens then happens(model) end
    peri.scope(function()
      optimizer:zero_grad()
      model(batch(i)):backward()
      optimizer:step()
    end)
  end
  return state(model)
end

describe("what a model is set to", function()
  it("stays under another plan: times of maps, frozen tables", function()
    sim.run(2, function(_, world)
      local straight, other = build(world), build(world)
      assert.equal(trained(straight), trained(other, function(m) m:reshard(B) end))
      straight, other = build(world, freeze), build(world, freeze)
      local before = table_a(other)
      assert.equal(trained(straight), trained(other, function(m) m:reshard(B) end))
      assert.equal(before, table_a(other))
    end)
  end)

  it("stays under another plan where a rank gets its first shard of a frozen table", function()
    sim.run(2, function(_, world)
      local model = build(world, freeze)
      model:reshard { ebc = { a = kernel(plan.table_wise, 0), b = kernel(plan.row_wise) }, maps = A.maps }
      local before = table_a(model)
      trained(model, function(m) m:reshard(B) end)
      assert.equal(before, table_a(model))
    end)
  end)

  it("is of a whole table, or the model is not resharded", function()
    sim.run(2, function(rank, world)
      local model = build(world)
      if rank == 1 then freeze(model) end
      assert.error_matches(function() model:reshard(B) end,
        "module 'ebc', table 'a': some of its shards are frozen %(requires_grad%(false%)%) and others are not")
    end)
  end)

  it("stays in copies", function()
    sim.run(2, function(_, world)
      local model = build(world, freeze)
      trained(model)
      local copy = model:copy():train()
      copy:init_data_parallel()
      local before = table_a(copy)
      assert.equal(state(model), state(copy))
      trained(copy)
      assert.equal(before, table_a(copy))
    end)
  end)

  it("goes on in the middle of a window of ids: in copies, and when maps that have learned are sharded", function()
    for _, device in ipairs { "cpu", "opaque" } do
      sim.run(2, function(rank, world)
        local function module()
          return embed.ManagedCollisionCollection { embedding_configs = { config "raw" }, managed_collision_modules = {
            raw = embed.MCHManagedCollisionModule { zch_size = 32, buckets = 4, eviction_interval = 3, device = device,
              eviction_policy = embed.LFU_EvictionPolicy {} } } }
        end
        local function shard(mcc)
          return peri.shard.ShardedManagedCollisionCollection { managed_collision_collection = mcc, group = world,
            device = device, plan = plan.EmbeddingModuleShardingPlan { raw = plan.row_wise { ranks = { 0, 1 },
              sizes = { 16, 16 } } } }
        end
        local function learn(maps, first, last, share)
          for i = first, last do
            local ids = { i * 37 % 997, i * 13 % 997, i % 5, i * 7 % 97 }
            if share then ids = { ids[rank * 2 + 1], ids[rank * 2 + 2] } end
            maps(peri.KeyedJaggedTensor { keys = { "fraw" }, values = peri.tensor(ids, "i64", device),
              lengths = peri.tensor({ #ids }, "i32", device) })
          end
          return maps
        end
        local function known(maps)
          return text(peri.shard.gather_state_dict(maps:state_dict()))
        end
        local whole = learn(module(), 1, 4)
        local copy, pieces = embed.copy_to_device(whole), shard(whole)
        pieces:copy_from(whole)
        local copied = learn(embed.copy_to_device(pieces), 5, 9, true)
        local want = known(learn(whole, 5, 9))
        assert.equal(want, known(learn(copy, 5, 9)))
        assert.equal(known(learn(pieces, 5, 9, true)), known(copied))
        assert.equal(want, known(pieces))
      end)
    end
  end)

  it("stays in evaluation, in the modules that a script holds", function()
    sim.run(2, function(_, world)
      local model = build(world):eval()
      local before = model.module:modules()
      model:reshard(B)
      for i, m in ipairs(model.module:modules()) do
        assert.is_true(rawequal(before[i], m))
        assert.is_false(m.training)
      end
    end)
  end)

  it("is refused where backward passes would not heed it", function()
    sim.run(1, function(_, world)
      local net = Net()
      freeze(net)
      local sharder = peri.shard.EmbeddingBagCollectionSharder { fused_params = { optimizer = "sgd" } }
      assert.error_matches(function()
        peri.DistributedModelParallel { module = net.ebc, group = world, sharders = { sharder },
          plan = { [""] = { a = plan.table_wise(0), b = plan.table_wise(0) } } }
      end, "table 'a' is frozen %(requires_grad%(false%)%), and with compute_kernel 'fused' backward passes would "
        .. "train it by sgd; allowed: compute_kernel 'dense', or optimizer = 'none'")
    end)
  end)

  it("is of one moment in copies", function()
    sim.run(2, function(_, world)
      local model = build(world)
      local schedule = peri.pipeline.schedules.base:insert({ "peek", run = function()
        assert.error_matches(function() model:copy() end, "DistributedModelParallel:copy: the tables have learned from "
          .. "batch 0 of a pipeline, and the dense part has not")
      end }, { before = "optimizer" })
      local pipeline = peri.pipeline.Pipeline { model = model, schedule = schedule,
        optimizer = nn.optim.SGD { params = model:named_parameters(), lr = 0.1 } }
      local list = { batch(1) }
      pipeline:progress(function() return table.remove(list) end)
      pipeline:close()
    end)
  end)
end)
