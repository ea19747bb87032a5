-- DMPCollection: sharding groups times replica groups. TorchRec's own numbers (spec/golden/sharded/two_d_*); with SGD
-- and an average after each step the model learns what it does over all ranks in one group; averages every few steps,
-- of weights and all optimizer states, are those of an oracle that averages copies by hand.
-- mpirun: 2 4
local peri = require "perilune"
local golden = require "spec.support.golden"
local shell = require "spec.support.shell"
local sharded = require "spec.support.sharded"
local worlds = require "spec.support.worlds"
local nn, plan, gather = peri.nn, peri.plan, peri.shard.gather_state_dict

describe("DMPCollection reproduces", function()
  local function entry(t)
    return plan.ParameterSharding { sharding_type = t.sharding_type, compute_kernel = t.compute_kernel,
      ranks = t.sharding_type ~= "row_wise" and t.ranks or nil }
  end
  local function near(case, key, s, got)
    golden.assert_near(case:part_of(key, s, got:dim() == 1):to_list(), got:to_list(), case.tol, key)
  end

  local function run(case, world, device)
    local entries = {}
    for _, t in ipairs(case.tables) do entries[t.name] = entry(t) end
    local model = peri.DMPCollection { global_pg = world, sharding_group_size = #case.sharding_groups[1],
      device = device, sync_interval = 0, plan = { [""] = entries }, module = peri.EmbeddingBagCollection {
        tables = peri.util.map(case.tables, function(t)
          return peri.EmbeddingBagConfig { name = t.name, num_embeddings = t.num_embeddings,
            embedding_dim = t.embedding_dim, feature_names = t.feature_names, pooling = t.pooling }
        end),
        fused_params = { optimizer = "rowwise_adagrad", learning_rate = case.optimizer.learning_rate,
          eps = case.optimizer.eps },
      } }
    local replica
    for g, ranks in ipairs(case.sharding_groups) do
      replica = peri.util.index_of(ranks)[world:rank()] and g - 1 or replica
    end
    local shards = model.sharded[1]:local_shards()
    for _, s in ipairs(shards) do s.state("weight"):copy(case:part_of("table/" .. s.table .. "/init", s)) end
    for step = 1, case.steps do
      local at = ("rank%d/step%d/"):format(world:rank(), step)
      local kt = model(peri.KeyedJaggedTensor { keys = case.kjt_keys,
        values = case:tensor(at .. "input/values", device), lengths = case:tensor(at .. "input/lengths", device) })
      golden.assert_near(case:list(at .. "output/values"), kt:values():to_list(), case.tol, at)
      kt:values():backward(case:tensor(at .. "grad_output", device))
      local function check(prefix, when)
        for _, s in ipairs(shards) do
          near(case, ("%stable/%s/%sstep%d"):format(prefix, s.table, when, step), s, s.state "weight")
          near(case, ("%stable/%s/optimizer/%sstep%d/momentum1"):format(prefix, s.table, when, step), s,
            s.state "momentum1")
        end
      end
      check(("replica%d/"):format(replica), "before_sync/")
      model:sync()
      model:wait()
      check("", "")
    end
  end

  for _, name in ipairs(golden.names("sharded", "^two_d_")) do
    local case = golden.load(name)
    worlds.each(case.name, function(world, device) run(case, world, device) end, { sizes = { case.world_size } })
  end
end)

-- -- against one group, and against averages by hand ------------------------------------------------------------------

local Model = nn.Module:extend "Model"
function Model:init(options)
  self.ebc = peri.EmbeddingBagCollection { tables = sharded.tables { data_type = options.data_type },
    fused_params = options.fused_params, seed = 5 }
  self.over = nn.Linear { in_features = sharded.WIDTH, out_features = 1 }
end
function Model:forward(kjt) return nn.functional.mean(self.over(self.ebc(kjt):values())) end

--- kind: of spec.support.sharded, or a kernel: "dense", "fused_uvm".
local function entries_for(kind, n)
  local entries = {}
  for i, t in ipairs(sharded.configs) do
    local make = sharded.kinds[kind] or sharded.kinds[i == 1 and "row_wise" or "table_wise"]
    entries[t.name] = make(i, n, { compute_kernel = not sharded.kinds[kind] and kind or nil })
  end
  if kind == "dense" then entries.c = plan.data_parallel { compute_kernel = "dense" } end
  return { ebc = entries }
end

local function make(world, device, kind, options)
  peri.ffi.state.device = device
  nn.manual_seed(3)
  local size = options.size or world:size()
  local args = { module = Model(options), device = device, plan = entries_for(kind, size) }
  if not options.size then
    args.group = world
    return peri.DistributedModelParallel(args)
  end
  args.global_pg, args.sharding_group_size, args.sync_interval = world, size, options.interval
  args.use_inter_host_allreduce, args.custom_all_reduce = options.contiguous, options.custom
  return peri.DMPCollection(args)
end

--- One step on this rank's own batch.
local function train(model, optimizer, step, rank, device, by_model)
  optimizer:zero_grad()
  local loss = model(sharded.batch(step, rank, device))
  if by_model then model:backward(loss) else loss:backward() end
  optimizer:step()
end

local function assert_near(want, got)
  for name, x in peri.util.ordered(want) do
    golden.assert_near(x:to_list(), got[name]:to_list(), { abs = 2e-6, rel = 2e-5 }, name)
  end
end

local order = {} -- what the ranks of a sim world did

describe("DMPCollection", function()
  for _, kind in ipairs { "table_wise", "row_wise", "column_wise", "mixed", "dense", "fused_uvm" } do
    worlds.each(kind .. ": with SGD and an average after each step, is one group of all ranks",
      function(world, device, n)
      for _, contiguous in ipairs { false, true } do
        local params = kind ~= "dense" and { optimizer = "sgd", learning_rate = 0.5 } or nil
        local one = make(world, device, kind, { fused_params = params })
        local two = make(world, device, kind, { fused_params = params, size = n / 2, interval = kind == "dense" and 0
          or 1, contiguous = contiguous })
        local size = math.max(n / 2, 1)
        assert.same({ size, n / size }, { two.sharding_pg:size(), two.replica_pg:size() })
        assert.equal(contiguous and 1 or n / size, two.sharding_pg:size() > 1 and two.sharding_pg:global_rank(1)
          - two.sharding_pg:global_rank(0) or (contiguous and 1 or n / size))
        local optimizers = {}
        for i, model in ipairs { one, two } do
          optimizers[i] = nn.optim.Adam { params = model:dense_parameters(), lr = 0.01 }
        end
        for step = 1, 3 do
          for i, model in ipairs { one, two } do train(model, optimizers[i], step, world:rank(), device, contiguous) end
        end
        two:sync()
        assert_near(gather(one:state_dict()), gather(two:state_dict()))
      end
    end, { sizes = { 2, 4 }, devices = kind == "mixed" and { "cpu", "opaque" } or { "cpu" } })
  end

  for name, params in peri.util.ordered {
    adam = { optimizer = "adam", learning_rate = 0.1, use_rowwise_bias_correction = true },
    rowwise = { optimizer = "rowwise_adagrad" }, rmsprop = { optimizer = "rowwise_rmsprop_ar", learning_rate = 0.1 },
  } do
    worlds.each(name .. ": every second step all weights and states become averages", function(world, device, n)
      local by_hand = make(world, device, "mixed", { fused_params = params, size = n / 2, interval = 0 })
      local model = make(world, device, "mixed", { fused_params = params, size = n / 2, interval = 2 })
      local optimizers = { nn.optim.SGD { params = by_hand:dense_parameters(), lr = 0.1 },
        nn.optim.SGD { params = model:dense_parameters(), lr = 0.1 } }
      for step = 1, 5 do
        train(by_hand, optimizers[1], step, world:rank(), device)
        train(model, optimizers[2], step, world:rank(), device, step < 4)
        local a, b = by_hand.sharded[1]:local_shards(), model.sharded[1]:local_shards()
        for i, s in ipairs(a) do
          for _, state in ipairs(s.names()) do
            local mine = s.state(state)
            if step % 2 == 0 then -- by hand: on the host, in doubles
              local all = by_hand.replica_pg:all_gather(mine:reshape(1, -1):contiguous()):wait():to("f64",
                "cpu"):to_table()
              local list = {}
              for k = 1, #all[1] do
                list[k] = mine:dtype() == "i64" and math.max(all[1][k], all[2][k]) or (all[1][k] + all[2][k]) / 2
              end
              mine:copy(peri.tensor(list, "f64", "cpu", mine:shape()):to(mine:dtype(), device))
            end
            if not (step == 4 or step == 5) then -- after loss:backward() it comes with the next forward pass
              golden.assert_near(mine:to_list(), b[i].state(state):to_list(), { abs = 2e-6, rel = 2e-5 },
                ("%d %s"):format(step, state))
            end
          end
        end
      end
      for i, s in ipairs(by_hand.sharded[1]:local_shards()) do
        for _, state in ipairs(s.names()) do
          local got = model.sharded[1]:local_shards()[i].state(state)
          golden.assert_near(s.state(state):to_list(), got:to_list(), { abs = 2e-6, rel = 2e-5 })
        end
      end
    end, { sizes = { 2, 4 }, devices = { "cpu" } })
  end

  worlds.each("lets averages travel until somebody looks", function(world, device, n)
    local model = make(world, device, "mixed", { size = n / 2, data_type = "FP16",
      fused_params = { optimizer = "rowwise_adagrad", learning_rate = 0.25 } })
    local optimizer = nn.optim.SGD { params = model:dense_parameters(), lr = 0.1 }
    local function replicas_agree(x)
      local all = model.replica_pg:all_gather(x:reshape(1, -1):contiguous()):wait():to("f32"):to_table()
      for k, a in ipairs(all[1]) do
        if a ~= all[2][k] then return false end
      end
      return true
    end
    train(model, optimizer, 1, world:rank(), device, true)
    assert.is_truthy(model._pending) -- on their way
    for _, s in ipairs(model.sharded[1]:local_shards()) do -- waits
      assert.is_true(replicas_agree(s.state "weight"))
      assert.is_true(replicas_agree(s.state "momentum1"))
    end
    assert.is_falsy(model._pending)
    model:eval()
    peri.no_grad(model, sharded.batch(2, world:rank(), device)) -- no step
    model:train()
    model.sync_interval = 0
    train(model, optimizer, 3, world:rank(), device, true)
    assert.is_falsy(model._pending)
    model:sync(false) -- weights alone
    local differ = false
    for _, s in ipairs(model.sharded[1]:local_shards()) do
      assert.is_true(replicas_agree(s.state "weight"))
      differ = not replicas_agree(s.state "momentum1") or differ
    end
    assert.is_true(differ)
    assert.is_true(replicas_agree(model.module.over.weight:detach()))
  end, { sizes = { 2, 4 } })

  worlds.each("counts updates as steps: a batch in parts is a step as it is as a whole", function(world, device, n)
    local function learned(model)
      local list = {}
      for _, s in ipairs(model.sharded[1]:local_shards()) do
        for _, name in ipairs(s.rows > 0 and s.names() or {}) do
          for _, x in ipairs(s.state(name):to_list()) do list[#list + 1] = x end
        end
      end
      return list
    end
    for interval = 1, 3 do
      local function new()
        return make(world, device, "row_wise", { size = n / 2, interval = interval,
          fused_params = { optimizer = "adagrad", learning_rate = 0.25, eps = 0.1 } })
      end
      local whole, parts = new(), new()
      local one = nn.optim.SGD { params = whole:dense_parameters(), lr = 0.1 }
      local other = nn.optim.SGD { params = parts:dense_parameters(), lr = 0.1 }
      parts:accumulate(true)
      for step = 1, 5 do
        local halves = { world:rank(), world:rank() + n }
        one:zero_grad()
        whole:backward(whole(sharded.batch(step, halves, device)))
        one:step()
        other:zero_grad()
        for _, half in ipairs(halves) do
          local loss = parts(sharded.batch(step, half, device)) * 0.5
          if interval == 2 then loss:backward() else parts:backward(loss) end
        end
        parts:apply_accumulated()
        other:step()
        assert.equal((pcall(whole.state_dict, whole)), (pcall(parts.state_dict, parts)))
        golden.assert_near(learned(whole), learned(parts), { abs = 2e-6, rel = 2e-5 }, ("step %d"):format(step))
      end
    end
  end, { sizes = { 4 } })

  worlds.each("averages what a step had learned, and not the step that has begun", function(world, device, n)
    local function new()
      return make(world, device, "row_wise", { size = n / 2, interval = 0, fused_params = { optimizer = "sgd",
        learning_rate = 0.5 } })
    end
    local between, inside = new(), new()
    for step = 1, 3 do
      between:sync()
      between(sharded.batch(step, world:rank(), device)):backward()
      local loss = inside(sharded.batch(step, world:rank(), device))
      inside:sync()
      loss:backward()
      assert.error_matches(function() inside:state_dict() end, "learned apart since their last average %(1 step%)")
      for i, s in ipairs(inside.sharded[1]:local_shards()) do
        assert.same(between.sharded[1]:local_shards()[i].state("weight"):to_list(), s.state("weight"):to_list())
      end
      between.module.over.weight:grad():fill(0)
      inside.module.over.weight:grad():fill(0)
    end
  end, { sizes = { 2 } })

  worlds.each("has a state when its replicas are one model, and goes on from it bit for bit", function(world, device, n)
    local function new()
      local model = make(world, device, "row_wise", { size = n / 2, interval = 2, fused_params = { optimizer = "adam",
        learning_rate = 0.5 } })
      return model, nn.optim.SGD { params = model:dense_parameters(), lr = 0.5 }
    end
    local model, optimizer = new()
    for step = 1, 3 do
      train(model, optimizer, step, world:rank(), device, true)
      if step % 2 == 1 then
        assert.error_matches(function() model:state_dict() end,
          "DMPCollection:state_dict: the replicas have learned apart since their "
            .. "last average %(1 step%); allowed: after model:sync%(%) on all ranks")
      else
        model:state_dict()
      end
    end
    model:sync()
    local kept = peri.shard.gather_state_dict { model = model:state_dict(),
      tables = model:fused_optimizer():state_dict() }
    for step = 4, 7 do train(model, optimizer, step, world:rank(), device, true) end
    local want = peri.shard.gather_state_dict(model:state_dict())
    local other, dense = new()
    train(other, dense, 9, world:rank(), device, true)
    other:load_state_dict(kept.model)
    other:fused_optimizer():load_state_dict(kept.tables)
    for step = 4, 7 do train(other, dense, step, world:rank(), device, true) end
    for name, x in peri.util.ordered(peri.shard.gather_state_dict(other:state_dict())) do
      assert.same(want[name]:to_list(), x:to_list())
    end
  end, { sizes = { 2, 4 } })

  worlds.each("has no state on any rank, those without rows too, while its replicas are apart", function(world, device,
    n)
    for _, fused in ipairs { true, false } do
      local model = peri.DMPCollection { global_pg = world, device = device, sharding_group_size = n / 2,
        sync_interval = 2, module = peri.EmbeddingBagCollection {
          tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = 4, embedding_dim = 4,
            feature_names = { "f" } } }, fused_params = fused and { optimizer = "sgd" } or nil },
        plan = { [""] = { t = plan.table_wise(0, { compute_kernel = fused and "fused" or "dense" }) } } }
      for step = 1, 4 do
        model:backward(model(peri.KeyedJaggedTensor { keys = { "f" }, values = { step - 1 }, lengths = { 1 },
          device = device }):values():sum())
        assert.equal(not fused or step % 2 == 0, (pcall(model.state_dict, model)))
      end
    end
  end, { sizes = { 4 } })

  worlds.each("loads what all sharding groups are given alike, whole or in pieces", function(world, device, n)
    for _, kind in ipairs { "mixed", "dense" } do
      local model = make(world, device, kind, { size = n / 2, interval = 2, fused_params = { optimizer = "sgd" } })
      local state = model:state_dict():clone()
      local whole = peri.shard.gather_state_dict(state)
      model:load_state_dict(state)
      model:load_state_dict(whole)
      for name in peri.util.ordered(whole) do
        for _, given in ipairs { peri.shard.gather_state_dict(whole), state:clone() } do
          local x = given[name]
          local own = peri.Tensor.is(x) and { { tensor = x } } or x:local_shards()
          for _, piece in ipairs(model.sharding_pg:global_rank(0) > 0 and own or {}) do piece.tensor:fill(7) end
          assert.error_matches(function() model:load_state_dict(given) end,
            "'" .. name:gsub("%p", "%%%0") .. "' is not the same on rank 0 of group '[^']+' and on rank 1, but all")
          local now = peri.shard.gather_state_dict(model:state_dict())
          for key, was in peri.util.ordered(whole) do assert.same(was:to_list(), now[key]:to_list()) end
        end
      end
    end
  end, { sizes = { 4 }, devices = { "cpu" } })

  worlds.each("is made of what all sharding groups give alike, and so are the states of fused tables",
    function(world, device, n)
    local size = n / 2
    local function second(model) return model.sharding_pg:global_rank(0) > 0 end
    local other = world:rank() >= size -- of the second sharding group, where groups are ranks that follow each other
    for name, change in peri.util.ordered {
      ["eps %(optimizer of table 'a'%) is .* and 0.5 on rank 1"] = { eps = 0.5 },
      ["optimizer %(table 'a'%) is adam .* and lamb"] = { optimizer = "lamb" },
      ["learning_rate %(optimizer of table 'a'%) is 0.1 .* and 0.2"] = { learning_rate = 0.2 },
    } do
      local params = { optimizer = "adam", learning_rate = 0.1 }
      for field, value in peri.util.ordered(other and change or {}) do params[field] = value end
      assert.error_matches(function()
        make(world, device, "row_wise", { size = size, contiguous = true, fused_params = params })
      end, "DMPCollection: module 'ebc': " .. name)
    end
    for _, kind in ipairs { "row_wise", "data_parallel" } do
      local model = make(world, device, kind, { size = size, fused_params = { optimizer = "adam" } })
      local optimizer = model:fused_optimizer()
      for _, part in ipairs { "momentum1", "step" } do
        local dict = optimizer:state_dict():clone()
        optimizer:load_state_dict(dict)
        for _, t in ipairs(sharded.configs) do
          local state = dict.state[("ebc.embedding_bags.%s.weight"):format(t.name)][t.name .. "." .. part]
          for _, piece in ipairs(peri.Tensor.is(state) and { { tensor = state } } or state:local_shards()) do
            piece.tensor:fill(second(model) and 3 or 2)
          end
        end
        assert.error_matches(function() optimizer:load_state_dict(dict) end, "'ebc.embedding_bags.a.weight." .. part
          .. "' is not the same on rank 0 of group '.*' and on rank %d")
      end
    end
  end, { sizes = { 2, 4 }, devices = { "cpu" } })

  worlds.each("refuses averages of tables that were trained at different rates", function(world, device, n)
    local model = make(world, device, "row_wise", { size = n / 2, interval = 0, fused_params = { optimizer = "sgd",
      learning_rate = 0.5 } })
    local optimizer = nn.optim.SGD { params = model:dense_parameters(), lr = 0.5 }
    train(model, optimizer, 1, world:rank(), device, true)
    model:sync()
    model:fused_optimizer():set_lr(model.sharding_pg:global_rank(0) > 0 and 0.25 or 0.125)
    train(model, optimizer, 2, world:rank(), device, true)
    assert.error_matches(function()
      model:sync()
      model:wait()
    end, "tag %x+.*; the tag is that of the learning rates of fused tables %(on this rank 0%.%d+%)")
  end, { sizes = { 2, 4 }, devices = { "cpu" } })

  worlds.each("takes no memory from average to average", function(world, device, n)
    local model = make(world, device, "mixed", { size = n / 2, interval = 1, data_type = "FP16",
      fused_params = { optimizer = "rowwise_adagrad" } })
    local optimizer = nn.optim.SGD { params = model:dense_parameters(), lr = 0.1 }
    local function run(steps)
      for step = 1, steps do peri.scope(train, model, optimizer, step, world:rank(), device, true) end
      model:wait()
      world:barrier():wait()
      return tonumber(peri.ffi.C.peri_mem_live())
    end
    run(2)
    collectgarbage()
    collectgarbage "stop" -- nothing waits for the collector
    world:barrier():wait()
    local before = run(2)
    local after = run(10)
    collectgarbage "restart"
    assert.is_true(after - before < 65536, ("%d bytes, then %d"):format(before, after))
  end, { sizes = { 2 }, devices = { "cpu" } })

  worlds.each("does not wait when averages set out", function(world, device, n)
    local model = make(world, device, "row_wise", { size = n / 2, interval = 0, fused_params = { optimizer = "sgd" } })
    train(model, nn.optim.SGD { params = model:dense_parameters(), lr = 0.1 }, 1, world:rank(), device)
    world:barrier():wait()
    peri.ffi.pause(0) -- ranks of a sim world take turns where they wait, and here
    local before = #order
    order[before + 1] = "called"
    model:sync()
    order[#order + 1] = "posted"
    assert.equal("called", order[before + 1])
    assert.equal("posted", order[before + 2]) -- no other rank had its turn
    model:wait()
  end, { sizes = { 2, 4 }, devices = { "cpu" }, only = "sim" })

  worlds.each("starts with equal replicas, and averages as it is told", function(world, device, n)
    local calls = {}
    local model = make(world, device, "mixed", { size = n / 2, fused_params = { optimizer = "rowwise_adagrad" },
      custom = function(tensors, group) calls[#calls + 1] = { #tensors, group:size() } end })
    local rank = world:rank()
    local net = Model { fused_params = { optimizer = "sgd" } }
    net.ebc:weight("a"):fill(rank)
    local own = peri.DMPCollection { module = net, global_pg = world, sharding_group_size = n / 2, device = device,
      plan = entries_for("row_wise", n / 2) }
    local all = own.replica_pg:all_gather(
      own.sharded[1]:local_shards()[1].state("weight"):contiguous()):wait():to_list()
    assert.equal(all[1], all[#all])
    local states = 0
    for _, s in ipairs(model.sharded[1]:local_shards()) do states = states + #s.names() end
    model:sync()
    assert.same({ { states, 2 } }, calls)
  end, { sizes = { 2, 4 }, devices = { "cpu" } })

  worlds.each("refuses bad input, by name, on all ranks", function(world, device, n)
    local function refused(text, change)
      local args = { module = Model { fused_params = { optimizer = "sgd" } }, global_pg = world,
        sharding_group_size = 1, device = device }
      for name, value in pairs(change) do args[name] = value end -- any order: fields
      assert.error_matches(function() peri.DMPCollection(args) end, text)
    end
    refused(("sharding_group_size is %d, allowed for %d ranks: 1, %s"):format(n + 1, n, n == 4 and "2, 4" or "2"),
      { sharding_group_size = n + 1 })
    refused("DMPCollection: allreduce_comm_precision is 'fp16': replicas are averaged as f32",
      { allreduce_comm_precision = "fp16" })
    refused("sharding_group_size is 0, allowed", { sharding_group_size = 0 })
    refused("sharding_group_size is 1.5, allowed", { sharding_group_size = 1.5 })
    refused(("world_size is 7, but group .* has %d ranks"):format(n), { world_size = 7 })
    refused("DMPCollection: no argument 'group'; its ranks are global_pg", { group = world })
    refused("DMPCollection: sync_interval is %-1, allowed: whole numbers 0", { sync_interval = -1 })
    refused("DMPCollection: no argument 'sync_every'; allowed: bucket_bytes, custom_all_reduce, data_parallel_wrapper",
      { sync_every = 2 })
    refused("custom_all_reduce is 3, wanted a function", { custom_all_reduce = 3 })
    refused("DMPCollection: sync_interval is 0 on rank 0 of group '.*' and 1 on rank 1; allowed: the same on all ranks",
      { sync_interval = math.min(world:rank(), 1) })
    refused("DMPCollection: sharding_group_size is 1 on rank 0 of group '.*' and " .. n .. " on rank 1",
      { sharding_group_size = world:rank() == 1 and n or 1 })
    refused("DMPCollection: group is a number", { global_pg = 3 })
    refused("allowed: 0..0", { plan = { ebc = { a = plan.table_wise(1), b = plan.row_wise(), c = plan.row_wise() } } })
    local folder, remove = shell.temporary()
    refused("table 'a' of module 'ebc' is in files, which replicas cannot be averaged in; allowed compute_kernels: "
      .. "dense, fused", { plan = {
      ebc = { a = plan.row_wise { compute_kernel = "fused_uvm_caching", cache_params = { directory = folder } },
        b = plan.row_wise(), c = plan.row_wise() } } })
    remove()
    local raw = { peri.EmbeddingBagConfig { name = "t", num_embeddings = 16, embedding_dim = 4,
      feature_names = { "f" } } }
    refused("module '' takes raw ids %(managed collision%): each sharding group would give them rows of its own", {
      module = peri.ManagedCollisionEmbeddingBagCollection { embedding_bag_collection = peri.EmbeddingBagCollection {
        tables = raw, fused_params = { optimizer = "sgd" } },
          managed_collision_collection = peri.ManagedCollisionCollection { embedding_configs = raw,
            managed_collision_modules = { t = peri.MCHManagedCollisionModule { zch_size = 16, eviction_interval = 1,
              eviction_policy = peri.embed.LFU_EvictionPolicy {} } } } } })
    assert.error_matches(function() peri.DMPCollection(3) end, "DMPCollection: arguments are 3, wanted a table")
    assert.error_matches(function() peri.DMPCollection { module = nn.Identity() } end,
      "argument 'sharding_group_size' is missing")
  end, { sizes = { 2, 4 }, devices = { "cpu" } })
end)
