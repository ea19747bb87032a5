-- A DistributedModelParallel whose modules or parameters change after it was wrapped: what ranks would train apart is
-- refused before anything is changed, or taken in by init_data_parallel.
local peri = require "perilune"
local worlds = require "spec.support.worlds"
local nn, plan = peri.nn, peri.plan

local function tables(prefix)
  return peri.util.map({ "a", "b" }, function(name)
    return peri.EmbeddingBagConfig { name = prefix .. name, num_embeddings = 9, embedding_dim = 4,
      feature_names = { "f" } }
  end)
end
local fused = { optimizer = "sgd", learning_rate = 0.25 }

local Net = nn.Module:extend "Net"
function Net:init(dense)
  self.ebc = peri.EmbeddingBagCollection { tables = tables "", fused_params = not dense and fused or nil }
  self.head, self.late = nn.Linear { in_features = 8, out_features = 1 }, false
end
function Net:forward(kjt)
  if self.grow then self:grow() end
  local rows = self.ebc(kjt):values()
  local y = self.head(rows):sum()
  if self.more then y = y + self.more(kjt):values():square():sum() end
  if self.late then y = y + self.late(rows):sum() end
  if self.scale then y = y * self.scale:sum() end
  return y
end

local function wrap(world, device, dense)
  nn.manual_seed(1)
  local kernel = dense and { compute_kernel = "dense" } or nil
  return peri.DistributedModelParallel { module = Net(dense), group = world, device = device,
    plan = { ebc = { a = plan.row_wise(kernel), b = plan.table_wise(0, kernel) } } }
end

local function batch(world, device)
  return peri.KeyedJaggedTensor { keys = { "f" }, values = { world:rank(), 8 }, lengths = { 1, 1 }, device = device }
end

local function linear(device) return nn.Linear { in_features = 8, out_features = 1, device = device } end

--- What may happen to a model, with numbers that are each rank's own; and what the message names.
local changes = {
  ["a head in the place of another"] = { function(m, device) m.head = linear(device) end,
    "parameters 'head.weight', 'head.bias'" },
  ["a module in a field that was something else"] = { function(m, device) m.late = linear(device) end,
    "'late.weight', 'late.bias'" },
  ["a module in a new list"] = { function(m, device)
    m.list = { linear(device) }
    m.late = m.list[1]
  end, "parameters '.*weight'" },
  ["a parameter"] = { function(m, device) m.scale = nn.parameter.uniform({ 2 }, 0, 1, "f32", device) end,
    "parameter 'scale'" },
  ["a module that forward makes"] = { function(m, device)
    m.grow = function(net) net.late = net.late or linear(device) end
  end,
    "'late.weight', 'late.bias'" },
  ["a parameter in the place of one of a module"] = { function(m, device)
    m.head.bias = nn.parameter.uniform({ 1 }, 0, 1, "f32", device)
  end, "parameter 'head.bias'" },
}

local function all_of(model)
  local list = {}
  for name, x in peri.util.ordered(peri.shard.gather_state_dict(model:state_dict())) do list[name] = x:to_list() end
  return list
end

describe("a model that changes after it was wrapped", function()
  for what, change in peri.util.ordered(changes) do
    worlds.each(("by %s is refused before anything is trained, and taken in by init_data_parallel"):format(what),
      function(world, device)
      peri.ffi.state.device = device
      local model = wrap(world, device)
      nn.manual_seed(10 + world:rank())
      change[1](model.module, device)
      if model.module.grow then peri.no_grad(model, batch(world, device)) end
      local before = all_of(model)
      if world:size() > 1 then
        assert.error_matches(function() model(batch(world, device)):backward() end, "backward: .*" .. change[2])
        assert.error_matches(function() model(batch(world, device)):backward() end,
          "model:init_data_parallel%(%) on all ranks")
        assert.same(before, all_of(model))
      end
      model:init_data_parallel()
      local optimizer = nn.optim.SGD { params = model:dense_parameters(), lr = 0.5 }
      for _ = 1, 2 do
        optimizer:zero_grad()
        model(batch(world, device)):backward()
        optimizer:step()
      end
      for _, p in ipairs(model:parameters()) do
        local values = world:all_gather(p:detach():contiguous():reshape(-1)):wait():to_list()
        for i = 1, p:numel() * world:size() do assert.equal(values[(i - 1) % p:numel() + 1], values[i]) end
      end
    end, { sizes = { 1, 2, 3 } })
  end

  worlds.each("by a head leaves tables alone that sharding groups have learned apart", function(world, device)
    peri.ffi.state.device = device
    nn.manual_seed(1)
    local model = peri.DMPCollection { module = Net(), global_pg = world, sharding_group_size = world:size() / 2,
      sync_interval = 0, device = device,
      plan = { ebc = { a = plan.data_parallel { compute_kernel = "fused" }, b = plan.row_wise() } } }
    model(batch(world, device)):backward()
    local function replicas()
      return peri.util.map(model.sharded[1]:replicas(), function(t) return t:to_list() end)
    end
    local before = replicas()
    model.module.late = linear(device)
    model:init_data_parallel()
    assert.same(before, replicas())
  end, { sizes = { 2, 4 } })

  worlds.each("by tables that train themselves is refused by name", function(world, device)
    peri.ffi.state.device = device
    local model = wrap(world, device)
    model.module.more = peri.EmbeddingBagCollection { tables = tables "more", fused_params = fused, device = device }
    local before = all_of(model)
    assert.error_matches(function() model(batch(world, device)):backward() end,
      "backward: module 'more' %(EmbeddingBagCollection%) came into a DistributedModelParallel after it was wrapped")
    assert.same(before, all_of(model))
  end, { sizes = { 2, 3 } })

  worlds.each("by a parameter that is frozen no more averages its gradient", function(world, device)
    peri.ffi.state.device = device
    nn.manual_seed(1)
    local net = Net()
    net.head.weight:requires_grad(false)
    local model = peri.DistributedModelParallel { module = net, group = world, device = device,
      plan = { ebc = { a = plan.row_wise(), b = plan.row_wise() } } }
    model(batch(world, device)):backward()
    net.head.weight:requires_grad(true)
    model(batch(world, device)):backward()
    local values = world:all_gather(net.head.weight:grad():contiguous():reshape(-1)):wait():to_list()
    for i = 9, #values do assert.equal(values[(i - 1) % 8 + 1], values[i]) end
  end, { sizes = { 2 } })

  worlds.each("is as it was where nothing has changed, whatever else wants a gradient", function(world, device)
    peri.ffi.state.device = device
    local model = wrap(world, device, true)
    for _ = 1, 2 do model:init_data_parallel() end
    local input = peri.ones({}, "f32", device):requires_grad()
    local optimizer = nn.optim.SGD { params = model:dense_parameters(), lr = 0.5 }
    local loss = model(batch(world, device)) * input
    loss:backward()
    optimizer:step()
    assert.is_truthy(input:grad())
  end, { sizes = { 1, 2 } })

  worlds.each("is of no concern to a pass of another model", function(world, device)
    peri.ffi.state.device = device
    local changed = wrap(world, device)
    changed.module.head2 = nn.Linear { in_features = 2, out_features = 2, device = device }
    changed.module.more = peri.EmbeddingBagCollection { tables = tables "more", fused_params = fused, device = device }
    local input = peri.ones({}, "f32", device):requires_grad()
    local loss = wrap(world, device)(batch(world, device)) * input
    loss:backward()
    assert.is_truthy(input:grad())
    assert.error_matches(function() changed(batch(world, device)):backward() end,
      "module 'more' %(EmbeddingBagCollection%) came into")
  end, { sizes = { 2 } })

  worlds.each("to a parameter less trains on", function(world, device)
    peri.ffi.state.device = device
    local model = wrap(world, device)
    model.module.late = linear(device)
    model:init_data_parallel()
    model(batch(world, device)):backward()
    model.module.late = false
    model(batch(world, device)):backward()
    model:init_data_parallel()
    model(batch(world, device)):backward()
  end, { sizes = { 1, 2 } })
end)

describe("an optimizer of tables that were sharded since", function()
  worlds.each("says so, made before or of a list from before", function(world, device)
    peri.ffi.state.device = device
    nn.manual_seed(1)
    local net = Net(true)
    local list = net:named_parameters()
    local optimizer, dense = nn.optim.SGD { params = list, lr = 0.5 }, { compute_kernel = "dense" }
    local of_head = nn.optim.SGD { params = net.head, lr = 0.5 }
    local model = peri.DistributedModelParallel { module = net, group = world, device = device,
      plan = { ebc = { a = plan.row_wise(dense), b = plan.data_parallel(dense) } } }
    model(batch(world, device)):backward()
    local words = "parameter 'ebc.embedding_bags.[ab].weight' is a table that DistributedModelParallel has cut into "
      .. "shards since"
    assert.error_matches(function() optimizer:step() end, "SGD: " .. words)
    assert.error_matches(function() nn.optim.Adam { params = list } end, "Adam: " .. words)
    of_head:step()
    nn.optim.SGD { params = model:dense_parameters(), lr = 0.5 }:step()
  end, { sizes = { 1, 2 } })
end)

describe("a layer outside of a model that an optimizer trains", function()
  local said, stderr = {}, io.stderr
  setup(function()
    io.stderr = { write = function(_, text) said[#said + 1] = text end } -- luacheck: ignore 122
  end)
  teardown(function()
    io.stderr = stderr -- luacheck: ignore 122
  end)

  worlds.each("is told of, once", function(world, device)
    peri.ffi.state.device = device
    local model, outside = wrap(world, device), nn.Linear { in_features = 1, out_features = 1, device = device }
    local input = peri.ones({ 1, 1 }, "f32", device):requires_grad() -- wants its gradient, and nobody trains it
    local function pass() (model(batch(world, device)) * outside(input):reshape()):backward() end
    --- What was said to this rank since message `from`.
    local function heard(from)
      local list = {}
      for i = from + 1, #said do
        if said[i]:find("perilune: rank " .. world:rank() .. ": ", 1, true) then list[#list + 1] = said[i] end
      end
      return list
    end
    local from = #said
    pass()
    assert.same({}, heard(from))
    local optimizer = nn.optim.SGD { params = outside:parameters(), lr = 0.5 }
    for _ = 1, 2 do pass() end
    local list = heard(from)
    assert.equal(1, #list)
    assert.matches("a backward pass of a DistributedModelParallel reaches params%[1%] of SGD %(f32 %[1, 1%]%), "
      .. "params%[2%] of SGD %(f32 %[1%]%), outside of the model: nobody averages", list[1])
    optimizer:zero_grad()
  end, { sizes = { 2 } })

  worlds.each("is looked for where optimizers or models have changed, and told of when a pass reaches it",
    function(world, device)
      peri.ffi.state.device = device
      local parameter, walks = require "perilune.nn.parameter", 0
      local model, other = wrap(world, device), nn.Linear { in_features = 1, out_features = 1, device = device }
      local input = peri.ones({ 1, 1 }, "f32", device):requires_grad() -- so each pass is looked at
      local function pass(with) (model(batch(world, device)) * (with or input):reshape()):backward() end
      local each_kept = parameter._each_kept
      parameter._each_kept = function(...)
        walks = walks + 1
        return each_kept(...)
      end
      local ok, err = pcall(function()
        local optimizer = nn.optim.SGD { params = other:parameters(), lr = 0.5 }
        for _ = 1, 2 do collectgarbage() end -- models of tests before would be missed when they go
        collectgarbage "stop"
        world:barrier():wait()
        walks = 0
        pass()
        world:barrier():wait()
        assert.equal(1, walks) -- of all ranks, which are in one process
        for _ = 1, 3 do pass() end
        assert.equal(1, walks)
        local from = #said
        pass(other(input)) -- nothing has changed, and it is reached now
        world:barrier():wait()
        assert.equal(1, walks)
        assert.equal(world:size(), #said - from)
        optimizer:zero_grad()
      end)
      parameter._each_kept = each_kept
      collectgarbage "restart"
      assert(ok, err)
    end, { sizes = { 2 }, only = "sim" })
end)
