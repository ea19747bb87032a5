-- DistributedModelParallel seen from outside: the names of its parameters, buffers and states are the model's own; its
-- state is loaded from and into the model as it was; the optimizer of its fused tables; wrappers of its dense part.
local peri = require "perilune"
local worlds = require "spec.support.worlds"
local nn, plan, gather = peri.nn, peri.plan, peri.shard.gather_state_dict

local DIM = 16

local Model = nn.Module:extend "Model"
function Model:init(options)
  local function tables(prefix, config)
    return peri.util.map({ "1", "2" }, function(k)
      return config { name = prefix .. k, num_embeddings = 9, embedding_dim = DIM, feature_names = { "f" } }
    end)
  end
  local seed = options.tables or options.seed
  local params = not options.dense and { optimizer = "adagrad", learning_rate = options.rate or 0.5 } or nil
  self.towers = {
    peri.EmbeddingBagCollection { tables = tables("bag", peri.EmbeddingBagConfig), fused_params = params, seed = seed },
    peri.EmbeddingCollection { tables = tables("row", peri.EmbeddingConfig), fused_params = params, seed = seed },
  }
  self.over = nn.Linear { in_features = 2 * DIM, out_features = 1 }
  self:register_buffer("steps", peri.zeros { 1 })
end
function Model:forward(kjt)
  local rows = self.towers[2](kjt)
  return self.over(self.towers[1](kjt):values()):sum() + rows["f@row1"]:values():sum() + rows["f@row2"]:values():sum()
end

local function make(options)
  nn.manual_seed(options.seed)
  return Model(options)
end

local plans = {
  table_wise = function(n) return plan.table_wise(n - 1) end, row_wise = function() return plan.row_wise() end,
  column_wise = function(n) return plan.column_wise { ranks = { 0, n - 1 } } end,
  data_parallel = function() return plan.data_parallel() end,
}

local function wrap(world, device, kind, options)
  peri.ffi.state.device = device
  local entry = plans[kind](world:size())
  return peri.DistributedModelParallel { module = make(options), group = world, device = device, plan = {
    ["towers.0"] = { bag1 = entry, bag2 = plan.row_wise() },
    ["towers.1"] = { row1 = plan.table_wise(0), row2 = entry } } }
end

local function batch(world, device)
  return peri.KeyedJaggedTensor { keys = { "f" }, values = { 1, 8, (world:rank() + 2) % 9 }, lengths = { 2, 1 },
    device = device }
end

local function numbers(dict)
  local copy = {}
  for name, x in peri.util.ordered(dict) do
    copy[name] = peri.Tensor.is(x) and table.concat(x:to_list(), " ") or type(x) == "table" and numbers(x) or x
  end
  return copy
end

local function names_of(list) return peri.util.map(list, function(x) return x.name end) end

local all_names = { "over.bias", "over.weight", "steps", "towers.0.embedding_bags.bag1.weight",
  "towers.0.embedding_bags.bag2.weight", "towers.1.embeddings.row1.weight", "towers.1.embeddings.row2.weight" }

describe("the state of a DistributedModelParallel", function()
  for kind in peri.util.ordered(plans) do
    worlds.each(kind .. ": is the model's, there and back", function(world, device)
      local model = wrap(world, device, kind, { seed = 1 })
      assert.same(all_names, peri.util.keys(model:state_dict()))
      model(batch(world, device)):backward()
      local state, states = gather(model:state_dict()), gather(model:fused_optimizer():state_dict())
      local plain = make { seed = 2 }
      assert.same(all_names, peri.util.keys(plain:state_dict()))
      plain:load_state_dict(state)
      assert.same(numbers(state), numbers(plain:state_dict()))
      local other = wrap(world, device, "row_wise", { seed = 3 })
      assert.same({ missing_keys = {}, unexpected_keys = {} }, other:load_state_dict(plain:state_dict()))
      other:fused_optimizer():load_state_dict(states)
      assert.same(numbers(state), numbers(gather(other:state_dict())))
      assert.same(numbers(states), numbers(gather(other:fused_optimizer():state_dict())))
    end, { sizes = { 1, 2, 3 } })
  end

  worlds.each("says what is missing, by the model's names", function(world, device)
    local model = wrap(world, device, "row_wise", { seed = 1 })
    local state = model:state_dict()
    state["over.bias"] = nil
    assert.error_matches(function() model:load_state_dict(state) end, "Model:load_state_dict: missing: 'over.bias'")
    assert.same({ missing_keys = { "over.bias" }, unexpected_keys = {} }, model:load_state_dict(state, false))
    assert.error_matches(function() model:load_state_dict(nil) end, "load_state_dict: map is nil, wanted a table")
  end, { sizes = { 1, 2 }, devices = { "cpu" } })

  worlds.each("is loaded by all ranks or by none, whatever part of it does not fit", function(world, device)
    local model, last = wrap(world, device, "row_wise", { seed = 1 }), world:size() - 1
    local before, state = numbers(gather(model:state_dict())),
      gather(wrap(world, device, "row_wise", { seed = 2 }):state_dict())
    if world:rank() == last then state["over.bias"] = nil end
    assert.error_matches(function() model:load_state_dict(state) end,
      ("Model:load_state_dict: rank %d of group '[^']*': missing: 'over.bias'"):format(last))
    assert.same(before, numbers(gather(model:state_dict())))
  end, { sizes = { 2, 3 }, devices = { "cpu" } })

  worlds.each("has lists by kind, with the model's names", function(world, device)
    local model = wrap(world, device, "row_wise", { seed = 1 })
    assert.same({ "over.weight", "over.bias" }, names_of(model:named_parameters()))
    assert.same({ "net.over.weight", "net.over.bias" }, names_of(model:named_parameters "net"))
    assert.same({ "steps" }, names_of(model:named_buffers()))
    assert.same({}, model:sparse_grad_parameter_names())
    local dense = peri.DistributedModelParallel { module = make { seed = 1, dense = true }, group = world, plan = {
      ["towers.0"] = { bag1 = plan.data_parallel { compute_kernel = "dense" },
        bag2 = plan.row_wise { compute_kernel = "dense" } },
      ["towers.1"] = { row1 = plan.data_parallel { compute_kernel = "dense" },
        row2 = plan.row_wise { compute_kernel = "dense" } } } }
    assert.same({ "over.weight", "over.bias", unpack(all_names, 4) }, names_of(dense:named_parameters()))
    assert.same({ "over.weight", "over.bias" }, names_of(dense:bare_named_parameters()))
    assert.same({}, dense:fused_optimizer().names)
    assert.error_matches(function() dense:fused_optimizer():lr() end, "it has no parameters, and so no learning rate")
  end, { sizes = { 1, 2 }, devices = { "cpu" } })
end)

describe("a copy of a model", function()
  worlds.each("for inference gives the same, whatever becomes of the model", function(world, device)
    peri.ffi.state.device = device
    local net = peri.quantize_embeddings { module = make { seed = 1 } }
    local entry = { bag1 = plan.row_wise(), bag2 = plan.table_wise(0) }
    local model = peri.DistributedModelParallel { module = net, group = world, device = device,
      plan = { ["towers.0"] = entry, ["towers.1"] = { row1 = plan.table_wise(world:size() - 1),
        row2 = plan.row_wise() } } }
    local function loss(x) return peri.no_grad(x, batch(world, device)):item() end
    local want, copy = loss(model), model:copy()
    assert.equal(want, loss(copy))
    for _, s in ipairs(model:named_state()) do s.tensor:detach():fill(0) end
    assert.equal(0, loss(model))
    assert.equal(want, loss(copy))
    assert.not_equal(model.sharded[1], copy.sharded[1])
    assert.equal(copy.module.towers[1], copy.sharded[1])
    assert.equal(want, copy(batch(world, device)):item()) -- for inference, whoever calls it
    copy:train()
    assert.error_matches(function() copy(batch(world, device)) end, "call model:init_data_parallel%(%)")
  end, { sizes = { 1, 2 } })
end)

describe("the fused optimizer of a model", function()
  worlds.each("combines those of its modules, and schedules reach the tables at once", function(world, device)
    local model = wrap(world, device, "row_wise", { seed = 1, rate = 0.5 })
    local fused = model:fused_optimizer()
    assert.equal(fused, model:fused_optimizer())
    assert.same({ unpack(all_names, 4) }, fused.names)
    assert.same({ "bag1.momentum1", "bag1.step" }, peri.util.keys(fused:state_dict().state[all_names[4]]))
    assert.same({ 0.5, 0.5 }, peri.util.map(fused.param_groups, function(group) return group.lr end))
    local schedule = nn.optim.ExponentialLR { optimizer = fused, gamma = 0.5 }
    local kjt = peri.KeyedJaggedTensor { keys = { "f" }, values = { 3 }, lengths = { 1 }, device = device }
    local function row() return gather(model:state_dict())["towers.1.embeddings.row1.weight"]:item(3 * DIM) end
    local before, sum = row(), 0
    for step = 1, 3 do -- Adagrad, gradients of 1 (means over the ranks): rate / sqrt(step)
      model(kjt):backward()
      sum = sum + 0.5 * 0.5 ^ (step - 1) / math.sqrt(step)
      assert.near(before - sum, row(), 1e-5)
      schedule:step()
    end
    local dense = nn.optim.SGD { params = model:named_parameters(), lr = 0.25 }
    local both = nn.optim.CombinedOptimizer { fused, { name = "dense", optimizer = dense } }
    assert.same({ 0.0625, 0.0625, 0.25 }, peri.util.map(both.param_groups, function(group) return group.lr end))
    both.param_groups[3].lr = 1
    assert.equal(1, both.optimizers[2].optimizer:lr())
    assert.equal(1, both:state_dict().state["dense.over.bias"].step:numel())
  end, { sizes = { 1, 2 } })
end)

describe("a data-parallel wrapper", function()
  worlds.each("of one's own decides what becomes of dense gradients", function(world, device)
    peri.ffi.state.device = device
    local seen = {}
    local Own = peri.util.class("Own", peri.model.DataParallelWrapper)
    function Own.wrap(_, model, env, where)
      seen[#seen + 1] = { model = model, rank = env.rank, device = where, params = #model:replicated_parameters() }
      return { watch = function(_, tensor) seen[#seen + 1] = tensor:numel() end }
    end
    local model = peri.DistributedModelParallel { module = make { seed = 1 + world:rank(), tables = 5 }, group = world,
      device = device, data_parallel_wrapper = Own() }
    model:init_data_parallel() -- again: nothing
    assert.same({ model = model, rank = world:rank(), device = device, params = 2 }, seen[1])
    local bias = model.module.over.bias:item()
    model(batch(world, device)):backward()
    assert.equal(1, seen[2])
    assert.equal(2, #seen)
    local all = world:all_gather(model.module.over.weight:grad():reshape(1, -1):contiguous()):wait():to_table()
    if world:size() > 1 then assert.not_same(all[1], all[2]) end -- nobody averaged them
    assert.equal(bias, model.module.over.bias:item())
  end, { sizes = { 1, 2 } })

  worlds.each("refuses parts that differ between ranks", function(world)
    local wider = world:rank() == 1 and 3 or 2
    assert.error_matches(function()
      peri.DistributedModelParallel { module = peri.nn.Linear { in_features = 2, out_features = wider }, group = world,
        plan = {} }
    end, "parameter 'weight' is f32 %[2, 2%] on rank 0 of group '.*' and f32 %[3, 2%] on rank 1; allowed: the same on "
      .. "all ranks")
    local wrapper = peri.model.DefaultDataParallelWrapper { bucket_cap_mb = wider }
    assert.error_matches(function()
      peri.DistributedModelParallel { module = peri.nn.Linear { in_features = 2, out_features = 2 }, group = world,
        plan = {}, data_parallel_wrapper = wrapper }
    end, "bucket_cap_mb is 2 on rank 0 of group '.*' and 3 on rank 1")
  end, { sizes = { 2, 3 } })

  worlds.each("comes later where it is asked for later", function(world, device)
    peri.ffi.state.device = device
    local model = peri.DistributedModelParallel { module = make { seed = 1 + world:rank(), tables = 5 }, group = world,
      device = device, init_data_parallel = false,
      data_parallel_wrapper = peri.model.DefaultDataParallelWrapper { bucket_cap_mb = 0.001 } }
    assert.error_matches(function() model(batch(world, device)) end,
      "it is not ready to be trained: call model:init_data_parallel%(%)")
    peri.no_grad(function() model(batch(world, device)) end)
    model:init_data_parallel()
    model(batch(world, device)):backward()
    for _, x in ipairs { model.module.over.weight, model.module.over.weight:grad() } do
      local all = world:all_gather(x:detach():reshape(1, -1):contiguous()):wait():to_table()
      assert.same(all[1], all[world:size()])
    end
  end, { sizes = { 1, 2, 3 } })

  it("is a DataParallelWrapper", function()
    local world = peri.dist.init { transport = "self" }
    local function refused(args, text)
      args.module, args.group = nn.Linear { in_features = 1, out_features = 1 }, world
      assert.error_matches(function() peri.DistributedModelParallel(args) end, text)
    end
    refused({ data_parallel_wrapper = 3 },
      "DistributedModelParallel: data_parallel_wrapper is 3, wanted a DataParallelWrapper")
    refused({ data_parallel_wrapper = peri.model.DataParallelWrapper() }, "DataParallelWrapper: no method 'wrap'")
    refused({ data_parallel_wrapper = peri.model.DefaultDataParallelWrapper(), bucket_bytes = 7 },
      "give it to data_parallel_wrapper's")
    local Odd = peri.util.class("Odd", peri.model.DataParallelWrapper)
    function Odd.wrap() return 7 end
    refused({ data_parallel_wrapper = Odd() }, "Odd:wrap returned 7, wanted nil or an object with a method watch")
    assert.error_matches(function() peri.model.DefaultDataParallelWrapper { bucket_cap_mb = 0 } end,
      "bucket_cap_mb is 0, allowed")
    local linear = nn.Linear { in_features = 1, out_features = 1 }
    local model = peri.DistributedModelParallel { module = linear, group = world }
    assert.equal(linear, peri.model.get_module(model))
    assert.equal(linear, peri.model.get_unwrapped_module(linear))
    assert.error_matches(function() peri.model.get_module(3) end, "get_module: module is 3, wanted an nn.Module")
    peri.dist.finish()
  end)
end)

describe("a state that is loaded", function()
  worlds.each("is the same on all ranks where they train the same", function(world, device, n)
    local module = nn.Module()
    module.linear = nn.Linear { in_features = 2, out_features = 2, device = device }
    module.norm = nn.BatchNorm1d { num_features = 2, device = device }
    local model = peri.DistributedModelParallel { module = module, group = world, device = device }
    local rank, state = world:rank(), model:state_dict():clone()
    local before = state["linear.weight"]:to("f32", "cpu"):reshape(-1):to_list()
    state["norm.running_mean"] = peri.full({ 2 }, rank, "f32", device) -- each rank has its own
    model:load_state_dict(state)
    assert.equal(rank, module.norm.running_mean:item(1))
    state["linear.bias"] = peri.full({ 2 }, 7, "f32", device)
    state["linear.weight"] = peri.full({ 2, 2 }, rank == n - 1 and 3 or 4, "f32", device)
    if n == 1 then return model:load_state_dict(state) end
    local ok, err = pcall(model.load_state_dict, model, state)
    assert.is_false(ok)
    assert.matches("'linear.weight' is not the same on rank 0 of group '[^']+' and on rank " .. n - 1, err.message)
    assert.same(before, module.linear.weight:detach():to("f32", "cpu"):reshape(-1):to_list()) -- nothing was loaded
    assert.not_equal(7, module.linear.bias:item(1))
    state["linear.weight"] = peri.full({ 2, 2 }, 5, rank == 0 and "f64" or "f32", "cpu")
    model:load_state_dict(state)
    assert.equal(5, module.linear.weight:item(3))
    local part = { ["linear.bias"] = rank > 0 and peri.zeros { 2 } or nil }
    assert.error_matches(function() model:load_state_dict(part, false) end,
      "'linear.bias' is not the same on rank 0 of group '[^']+' and on rank 1, to which it is given")
    local Local = peri.util.class("Local", peri.model.DataParallelWrapper)
    function Local.wrap() end -- each rank has its own
    local own = peri.DistributedModelParallel { module = nn.Linear { in_features = 1, out_features = 1,
      device = device }, group = world, device = device, data_parallel_wrapper = Local() }
    own:load_state_dict({ bias = peri.full({ 1 }, rank, "f32", device) }, false)
    assert.equal(rank, own.module.bias:item())
  end, { sizes = { 1, 2, 3 } })

  worlds.each("is the same on all ranks for replicas of tables, with what their optimizer keeps",
    function(world, device, n)
      local rank, last = world:rank(), n - 1
      local model = wrap(world, device, "data_parallel", { seed = 3 })
      model(batch(world, device)):backward()
      local function try(what, change, name)
        local before, state = numbers(gather(what:state_dict())), gather(what:state_dict())
        change(state)
        local ok, err = pcall(what.load_state_dict, what, state)
        if n == 1 then return assert.is_true(ok, err) end
        assert.is_false(ok)
        assert.matches(("'%s' is not the same on rank 0 of group '[^']+' and on rank %d, but all ranks"):format(name,
          last), err.message)
        assert.same(before, numbers(gather(what:state_dict())))
      end
      local name = "towers.0.embedding_bags.bag1.weight"
      local function other(state) state[name]:slice(1, 4, 5):fill(rank == last and 1 or 2) end
      try(model, function(state) -- of a table over ranks each takes its part; what is no parameter may differ
        state["towers.0.embedding_bags.bag2.weight"]:fill(rank)
        state.steps:fill(rank)
        other(state)
      end, name)
      try(model:fused_optimizer(), function(state)
        state.state[name]["bag1.momentum1"]:slice(1, 2, 3):fill(rank == last and 3 or 1)
      end, name .. ".momentum1")
      local same = gather(model:state_dict())
      same[name]:fill(7)
      model:load_state_dict(same)
      assert.equal(7, gather(model:state_dict())[name]:item(0))
      local dense = plan.data_parallel { compute_kernel = "dense" }
      model = peri.DistributedModelParallel { module = make { seed = 3, dense = true }, group = world, device = device,
        plan = { ["towers.0"] = { bag1 = dense, bag2 = dense }, ["towers.1"] = { row1 = dense, row2 = dense } } }
      try(model, other, name)
    end, { sizes = { 1, 2, 3 } })
end)
