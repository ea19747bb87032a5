-- Module: registration in order, paths, replacement, state, modes; parameters from the counter-based generator; layers'
-- bad arguments.
local peri = require "perilune"
local nn = peri.nn

local Block = nn.Module:extend "Block"
function Block:init(size)
  self.second = nn.Linear { in_features = size, out_features = 2 }
  self.scale = nn.Parameter(peri.ones { 2 })
  self.first = nn.Linear { in_features = 2, out_features = 1, bias = false }
  self.number, self.words = 3, { "no parameter" }
end
function Block:forward(x) return self.first(self.second(x) * self.scale) end

local Net = nn.Module:extend "Net"
function Net:init()
  self.blocks = nn.ModuleList { Block(3), Block(4) }
  self:register_buffer("count", peri.zeros { 1 })
  self.list = nn.ParameterList { nn.Parameter(peri.ones { 1 }) }
end

local function names(list, field) return peri.util.map(list, function(e) return e[field or "name"] end) end

describe("Module", function()
  it("registers in the order of assignment", function()
    local block = Block(3)
    assert.same({ "scale", "second.weight", "second.bias", "first.weight" }, names(block:named_parameters()))
    assert.same({ "second", "first" }, names(block:named_children()))
    local net = Net()
    assert.same({ "", "blocks", "blocks.0", "blocks.0.second", "blocks.0.first", "blocks.1", "blocks.1.second",
      "blocks.1.first", "list" }, names(net:named_modules(), "path"))
    assert.same({ "x.blocks.0.scale", "x.blocks.0.second.weight" }, { unpack(names(net:named_parameters "x"), 1, 2) })
    assert.equal("count", net:named_state()[1].name)
    assert.equal(10, #net:named_state())
    assert.equal(9, #net:parameters())
    assert.equal(net.blocks[2], net:get_module "blocks.1")
    assert.is_true(nn.Module.is(net) and Net.is(net) and not Block.is(net))
  end)

  it("is called like a function, and trains", function()
    local block = Block(3)
    local y = block(peri.ones { 5, 3 })
    assert.same({ 5, 1 }, y:shape())
    y:sum():backward()
    for _, p in ipairs(block:named_parameters()) do assert.is_truthy(p.tensor:grad(), p.name) end
    block:zero_grad()
    for _, p in ipairs(block:named_parameters()) do assert.is_nil(p.tensor:grad()) end
  end)

  it("names shared parameters and modules once", function()
    local net = nn.Module()
    net.a = nn.Linear { in_features = 2, out_features = 2 }
    net.b = net.a
    net.tied = net.a.weight
    assert.same({ "tied", "a.bias" }, names(net:named_parameters()))
    assert.equal(2, #net:modules())
    local dict = net:state_dict()
    assert.same({ "a.bias", "tied" }, peri.util.keys(dict))
    dict["b.bias"], dict["a.weight"], dict["b.weight"] = dict["a.bias"], dict.tied, dict.tied -- as PyTorch has it
    local other = nn.Module()
    other.a = nn.Linear { in_features = 2, out_features = 2 }
    other.b = other.a
    other.tied = other.a.weight
    assert.same({ missing_keys = {}, unexpected_keys = {} }, other:load_state_dict(dict))
    assert.same(net.tied:to_list(), other.tied:to_list())
    -- copies that are equal, and a dict that has it under another name only
    local copied = {}
    for name, t in peri.util.ordered(dict) do copied[name] = t:clone():detach() end
    copied.tied:fill(3)
    copied["a.weight"], copied["b.weight"] = copied.tied:clone(), nil
    assert.is_nil(other:check_state_dict(copied))
    other:load_state_dict(copied)
    copied["a.bias"], copied.tied = nil, nil
    other:load_state_dict(copied)
    assert.same({ 3, 3, 3, 3 }, other.b.weight:to_list())
    -- copies that differ
    copied["b.weight"] = copied["a.weight"] + 1
    assert.error_matches(function() other:load_state_dict(copied) end,
      "'tied' and 'b.weight' are one tensor here, and differ", 1, true)
    assert.same({ 3, 3, 3, 3 }, other.b.weight:to_list())
    copied["b.weight"], copied["c.weight"] = nil, copied["a.weight"]
    assert.error_matches(function() other:load_state_dict(copied) end, "it has no 'c.weight'", 1, true)
  end)

  it("finds modules and parameters in plain tables, however deep, and those assigned late", function()
    local function linear() return nn.Linear { in_features = 2, out_features = 2, bias = false } end
    local net = nn.Module()
    net.layers = {}
    for i = 1, 3 do net.layers[i] = linear() end
    net.towers = { user = { linear(), linear() }, item = linear() }
    net.weights = { nn.Parameter(peri.ones { 1 }), extra = nn.Parameter(peri.ones { 2 }) }
    net.late, net.late_weight = false, 0
    net.late, net.late_weight = linear(), nn.Parameter(peri.ones { 3 })
    net.top = linear()
    net.again = { net.top, net.layers } -- known already, and a cycle
    net.layers.self = net.layers
    local expected = {
      "late_weight", "weights.0", "weights.extra", "top.weight", "again.1.0.weight", "again.1.1.weight",
      "again.1.2.weight", "late.weight", "towers.item.weight", "towers.user.0.weight", "towers.user.1.weight" }
    assert.same(expected, names(net:named_parameters()))
    assert.same(net.layers[3], net:get_module "layers.2")
    assert.same({ "top", "again.1.0", "again.1.1", "again.1.2", "late", "towers.item", "towers.user.0",
      "towers.user.1" }, names(net:named_children()))
    net:eval()
    assert.is_false(net.towers.user[2].training)
    local new = linear()
    net:set_module("towers.user.1", new)
    assert.equal(new, net.towers.user[2])
    assert.error_matches(function() net:get_module "towers.user.2" end,
      "no sub%-module at 'towers.user.2': 'Module' has top, again.1.0")
    assert.error_matches(function() net:get_module "towers.user" end, "no sub%-module at 'towers.user', but a table")
    local copy = nn.Module()
    copy.layers = { linear(), linear(), linear() }
    copy:load_state_dict { ["layers.0.weight"] = net.layers[1].weight, ["layers.1.weight"] = net.layers[2].weight,
      ["layers.2.weight"] = net.layers[3].weight }
    assert.same(net.layers[2].weight:to_list(), copy.layers[2].weight:to_list())
  end)

  it("trains what plain tables hold", function()
    local net = nn.Module()
    net.layers = { nn.Linear { in_features = 1, out_features = 1, bias = false } }
    local before = net.layers[1].weight:item()
    local optimizer = nn.optim.SGD { params = net, lr = 1 }
    net.layers[1](peri.ones { 1, 1 }):sum():backward()
    optimizer:step()
    assert.near(before - 1, net.layers[1].weight:item(), 1e-6)
  end)

  it("refuses what has no order, and one name for two", function()
    local net, key = nn.Module(), {}
    net.plain = { [key] = 3, [nn] = "words", [peri] = { 1, { 2 } } } -- of no concern
    assert.same({}, net:named_children())
    net.odd = { [key] = nn.Identity() }
    assert.error_matches(function() net:named_children() end,
      "Module: field 'odd' has keys that are no strings or numbers")
    net.odd = { ["0"] = nn.Identity(), nn.Identity() }
    assert.error_matches(function() net:named_children() end, "Module: two sub%-modules are named 'odd.0'")
  end)

  it("replaces sub-modules by path", function()
    local net = Net()
    local new = Block(7)
    net:set_module("blocks.1", new)
    assert.equal(new, net.blocks[2])
    assert.equal(new, net:get_module "blocks.1")
    local relu = nn.ReLU()
    net:set_module("blocks.0.second", relu)
    assert.equal(relu, net.blocks[1].second)
    assert.same({ "blocks.0.scale", "blocks.0.first.weight" }, { unpack(names(net:named_parameters()), 1, 2) })
    local list = nn.Sequential { nn.ReLU(), nn.Sigmoid() }
    list:set_module("1", nn.Identity())
    assert.same({ 2 }, list(peri.tensor { 2 }):to_list())
    assert.error_matches(function() net:set_module("blocks.2", new) end,
      "no sub%-module at 'blocks.2': 'ModuleList' has 0, 1")
    assert.error_matches(function() net:set_module("blocks.1", 3) end, "a Module is wanted, not a number")
    assert.error_matches(function() net:set_module("", new) end, "the path of a sub%-module is wanted")
    assert.error_matches(function() net:get_module "blocks.0.third" end, "'Block' has second, first")
    list:replace("0", nn.Sigmoid())
    assert.equal(nn.Sigmoid, getmetatable(list[1]))
    -- what would be called, or listed, and not both
    for _, name in ipairs { "2", "0 ", "second" } do
      assert.error_matches(function() list:replace(name, nn.ReLU()) end,
        "replace: no sub%-module is named '" .. name .. "', allowed: 0, 1")
    end
    assert.error_matches(function() list:replace(0, nn.ReLU()) end, "name is 0, wanted a string")
    assert.error_matches(function() list:replace("0", 3) end, "replace '0': a Module is wanted, not 3")
  end)

  it("has dicts of modules, in the order of their names", function()
    local towers = nn.ModuleDict { user = nn.Linear { in_features = 2, out_features = 1 }, item = nn.ReLU() }
    assert.same({ "item", "user" }, towers:keys())
    assert.same({ "user.weight", "user.bias" }, names(towers:named_parameters()))
    local other = nn.Sigmoid()
    assert.equal(towers, towers:update { item = other, also = nn.Tanh() })
    assert.same({ "item", "user", "also" }, towers:keys())
    assert.equal(other, towers.item)
    assert.equal(other, towers:get_module "item")
    assert.matches("^ModuleDict%(\n  %(item%): Sigmoid%(%)\n  %(user%)", tostring(towers))
    for wanted, bad in peri.util.ordered { ["a table of modules is wanted, .* not 3"] = 3,
      ["the name 'forward', which all modules have"] = { forward = nn.ReLU() },
      ["the name 'a.b', wanted a string without points"] = { ["a.b"] = nn.ReLU() },
      ["the name 1, wanted a string"] = { nn.ReLU() }, ["must be a Module, not a number"] = { x = 3 } } do
      assert.error_matches(function() nn.ModuleDict(bad) end, wanted)
    end
  end)

  it("switches modes below it", function()
    local net = Net()
    assert.is_true(net.blocks[1].first.training)
    assert.equal(net, net:eval())
    assert.is_false(net.blocks[1].first.training)
    net:train()
    assert.is_true(net.blocks[1].first.training)
  end)

  it("saves and restores its state", function()
    local a, b = Net(), Net()
    assert.not_same(a.blocks[1].second.weight:to_list(), b.blocks[1].second.weight:to_list())
    b:load_state_dict(a:state_dict())
    assert.same(a.blocks[1].second.weight:to_list(), b.blocks[1].second.weight:to_list())
    local state = a:state_dict()
    state["blocks.1.scale"] = nil
    assert.error_matches(function() b:load_state_dict(state) end, "Net:load_state_dict: missing: 'blocks.1.scale'")
    assert.same({ missing_keys = { "blocks.1.scale" }, unexpected_keys = {} }, b:load_state_dict(state, false))
    state["blocks.1.scale"] = peri.ones { 3 }
    local wrong = "'blocks.1.scale' has shape %[2%] here, and %[3%] in the state that is given"
    assert.error_matches(function() b:load_state_dict(state) end, wrong)
    assert.error_matches(function() b:load_state_dict(state, false) end, wrong)
    state["blocks.1.scale"], state.more = peri.ones { 2 }, peri.ones { 1 }
    state["blocks.0.scale"] = peri.full({ 2 }, 7)
    assert.error_matches(function() b:load_state_dict(state) end, "it has no 'more'")
    local typed = nn.Module:extend "Typed"
    function typed:init() self.blocs, self.other = nn.ModuleList { nn.PReLU() }, nn.PReLU() end
    assert.error_matches(function()
      typed {}:load_state_dict { ["blocks.0.weight"] = peri.ones { 1 }, unlike = peri.ones { 1 } }
    end, "it has no 'blocks.0.weight', 'unlike'; 'blocks.0.weight' may be what is 'blocs.0.weight' here", 1, true)
    assert.not_equal(7, b.blocks[1].scale:item(0)) -- nothing is copied if something is wrong
    assert.same({ missing_keys = {}, unexpected_keys = { "more" } }, b:load_state_dict(state, false))
    assert.equal(7, b.blocks[1].scale:item(0))
  end)

  it("says what it is", function()
    assert.equal("Linear(in_features=3, out_features=2, bias=true)", tostring(Block(3).second))
    assert.matches("%(1%): Block%(", tostring(Net()))
    assert.error_matches(function() nn.Module()(1) end, "Module: no forward method")
    assert.error_matches(function() nn.Module():add_module("a", 1) end, "sub%-module 'a' must be a Module")
    assert.error_matches(function() nn.Module():register_parameter("p", peri.ones { 1 }) end,
      "must be a leaf tensor that requires grad")
    assert.error_matches(function() nn.Module():register_buffer("b", 1) end, "buffer 'b' must be a tensor")
  end)
end)

describe("parameters", function()
  it("are a function of the seed and of the order in which they are made", function()
    nn.manual_seed(5)
    local a, b = Net(), Net()
    nn.manual_seed(5)
    peri.Tensor.uniform({ 10 }, 0, 1, 1, 1) -- other random numbers change nothing
    local c = Net()
    for i, p in ipairs(a:parameters()) do assert.same(p:to_list(), c:parameters()[i]:to_list()) end
    assert.not_same(a.blocks[1].second.weight:to_list(), b.blocks[1].second.weight:to_list())
    nn.manual_seed(6)
    assert.not_same(a.blocks[1].second.weight:to_list(), Net().blocks[1].second.weight:to_list())
    assert.error_matches(function() nn.manual_seed(-1) end, "manual_seed: seed is %-1, allowed: whole numbers 0")
  end)

  it("start as PyTorch's do", function()
    local w = nn.Linear { in_features = 25, out_features = 400 }.weight:to_list()
    local low, high, sum = 1, -1, 0
    for _, x in ipairs(w) do low, high, sum = math.min(low, x), math.max(high, x), sum + x end
    assert.is_true(low >= -0.2 and low < -0.199 and high < 0.2 and high > 0.199)
    assert.near(0, sum / #w, 0.005)
    local square = 0
    for _, x in ipairs(nn.CrossNet { in_features = 50, num_layers = 1 }.kernels[1]:to_list()) do
      square = square + x * x
    end
    assert.near(2 / 100, square / 2500, 0.002) -- Xavier: 2 / (fan in + fan out)
    assert.near(2 / ((40 + 50) * 6), nn.parameter.xavier_normal({ 40, 50, 6 }):square():mean():item(), 2e-4)
  end)

  it("outlive the scope in which they are made", function()
    local net
    peri.scope(function()
      net = Net()
      net.late = nn.Parameter(peri.ones { 2 } * 2)
    end)
    assert.same({ 2, 2 }, net.late:to_list())
    assert.equal(1, net.blocks[1]:forward(peri.ones { 1, 3 }):numel())
    assert.error_matches(function() nn.Parameter(3) end, "a tensor is wanted, not a number")
  end)
end)

describe("layers", function()
  it("drop elements in training only, anew at each step, alike on every rank's share", function()
    nn.manual_seed(1)
    local layer = nn.Dropout { p = 0.4 }
    local x = peri.ones { 8, 5 }
    local first, second = layer(x):to_list(), layer(x):to_list()
    assert.not_same(first, second)
    assert.same(x:to_list(), layer:eval()(x):to_list())
    nn.manual_seed(1)
    local other = nn.Dropout { p = 0.4 }
    local Of = nn.Module:extend "Of"
    function Of:init() self.drop = other end
    function Of:forward(batch) return self.drop(batch.x) end
    local share = Of() { x = x:slice(1, 6, 8), global_row = 6 }:to_list()
    for i = 1, 10 do assert.equal(first[30 + i], share[i]) end
    assert.not_same(first, nn.Dropout { p = 0.4 }(x):to_list())
  end)

  it("keep running statistics in BatchNorm1d", function()
    local layer = nn.BatchNorm1d { num_features = 2, momentum = 0.5 }
    layer(peri.tensor { { 1, 0 }, { 3, 0 } })
    assert.same({ 1, 0 }, layer.running_mean:to_list())
    assert.same({ 1.5, 0.5 }, layer.running_var:to_list())
    local y = layer:eval()(peri.tensor { { 1, 1 } }):to_list()
    assert.near(0, y[1], 1e-6)
    assert.near(1 / math.sqrt(0.5 + 1e-5), y[2], 1e-5)
    assert.error_matches(function() layer:train()(peri.tensor { { 1, 1 } }) end, "a batch of 1 in training")
    for _, shape in ipairs { { 4, 1 }, { 4, 3 }, { 2 }, { 4, 2, 2 } } do
      assert.error_matches(function() layer(peri.ones(shape)) end, "BatchNorm1d: x is %[.*%], wanted %[samples, 2%]")
    end
  end)

  it("take modules, classes, functions and names as activations", function()
    local x = peri.tensor { { -1, 2 } }
    local function mlp(activation)
      return nn.MLP { in_size = 2, layer_sizes = { 3, 2 }, activation = activation }(x):to_list()
    end
    local results = {}
    for i, activation in ipairs { "relu", nn.functional.relu, nn.ReLU(), nn.ReLU, function(t) return t:relu() end } do
      nn.manual_seed(3)
      results[i] = mlp(activation)
      assert.same(results[1], results[i])
    end
    assert.error_matches(function() mlp "relo" end, "activation 'relo', allowed: none, relu, sigmoid, tanh")
  end)

  it("name bad arguments", function()
    assert.error_matches(function() nn.Linear { in_features = 2 } end, "argument 'out_features' is missing")
    assert.error_matches(function() nn.Linear { in_features = 2.5, out_features = 1 } end, "in_features is 2.5")
    assert.error_matches(function() nn.Linear { in_features = 2, out_features = 1, biass = true } end,
      "no argument 'biass'")
    assert.error_matches(function() nn.LayerNorm { normalized_shape = {} } end, "a size or a list of sizes")
    assert.error_matches(function() nn.functional.rms_norm(peri.ones { 2, 4 }, 1, peri.ones { 1 }) end,
      "rms_norm: weight is tensor f32 %[1%] on cpu, wanted the last 1 size of tensor f32 %[2, 4%]")
    assert.error_matches(function() nn.LowRankCrossNet { in_features = 3, num_layers = 1, low_rank = 0 } end,
      "low_rank is 0")
    assert.error_matches(function() nn.LowRankMixtureCrossNet { in_features = 3, num_layers = 1,
      activation = "swish" } end, "'swish'")
    assert.error_matches(function() nn.BCEWithLogitsLoss { reduction = "max" } end,
      "reduction is 'max', allowed: mean, sum, none, global_mean")
    assert.error_matches(function() nn.OverArch { in_features = 3, layer_sizes = { 1 } } end,
      "1 layer_sizes, at least 2")
  end)
end)
