-- Layers and losses as PyTorch computes them (spec/golden/layers.py): results, gradients of inputs and of parameters,
-- on both devices.
-- cuda: always
local peri = require "perilune"
local nn, F = peri.nn, peri.nn.functional
local devices = require "spec.support.devices"
local golden = require "spec.support.golden"

local document = golden.document "ops/tensor/layers"

local function load(entry, device)
  return peri.tensor({ unpack(entry[3]) }, entry[1], device, { unpack(entry[2]) }) -- dkjson's lists have metatables
end

local function compare(name, entry, got)
  assert.same(entry[2], got:shape(), name)
  golden.assert_near(entry[3], got:to_list(), document.tolerance, name)
end

--- How a case's module is called where it is not module(inputs).
local calls = {
  ["MultiheadAttention causal"] = function(m, x, mask)
    return m(x, x, x, { attn_mask = mask, average_attn_weights = false })
  end, ["MultiheadAttention padded"] = function(m, q, k, v, mask) return m(q, k, v, { key_padding_mask = mask }) end,
  ["MultiheadAttention batch first"] = function(m, x) return m(x, x, x) end,
  ["TransformerEncoderLayer masked"] = function(m, x, mask, padding)
    return m(x, { src_mask = mask, src_key_padding_mask = padding })
  end,
  ["InBatchSoftmaxLoss corrected"] = function(m, q, i, log_q, ids) return m(q, i, { log_q = log_q, ids = ids }) end,
  ["kl_div batchmean"] = function(_, t, p) return F.kl_div(t:log_softmax(2), p:log_softmax(2), true, "batchmean") end,
  cosine_similarity = function(_, a, b) return F.cosine_similarity(a, b, 2) end,
}
for _, reduction in ipairs { "mean", "sum", "none" } do
  calls["KLDivLoss " .. reduction] = function(m, t, p) return m(t:log_softmax(2), p) end
end

local function make(case, device)
  local class = case.name:match "^%S+"
  if not case.name:match "^%u" then return nil end
  local args = {}
  for name, value in pairs(case.args) do args[name] = value end
  if case.param then args.device = device end
  return nn[class](args)
end

local function check(case, device)
  local module, inputs = make(case, device), {}
  local parameters = {}
  if case.name == "LazyLinear" then module(load(case["in"][1], device)) end
  for _, p in ipairs(module and module:named_parameters() or {}) do
    local want = assert(case.param and case.param[p.name], case.name .. " has no " .. p.name)
    assert.same(want[2], p.tensor:shape(), p.name)
    peri.no_grad(function() p.tensor:copy(load(want, device)) end)
    parameters[p.name] = p.tensor
  end
  for name in pairs(case.param or {}) do assert.is_truthy(parameters[name], "no parameter " .. name) end
  for i, entry in ipairs(case["in"]) do
    inputs[i] = load(entry, device)
    if type(case.grad[i]) == "table" then inputs[i]:requires_grad() end
  end
  local out = { (calls[case.name] or function(m, ...) return m(...) end)(module, unpack(inputs)) }
  for i, entry in ipairs(case.out) do compare(case.name, entry, out[i]) end
  out[1]:backward(load(case.up, device))
  for i, t in ipairs(inputs) do
    if type(case.grad[i]) == "table" then
      compare(("%s: gradient of input %d"):format(case.name, i), case.grad[i], t:grad())
    end
  end
  for name, want in pairs(case.param_grad or {}) do
    compare(("%s: gradient of %s"):format(case.name, name), want, parameters[name]:grad())
  end
end

for _, device in ipairs(devices) do
  it("layers and losses give what PyTorch's give on " .. device, function()
    for _, case in ipairs(document.cases) do peri.scope(check, case, device) end
  end)
end

describe("new layers", function()
  it("keep their state in state dicts, and show themselves", function()
    for _, make_one in ipairs {
      function() return nn.GRU { input_size = 3, hidden_size = 4, num_layers = 2 } end,
      function() return nn.LSTM { input_size = 3, hidden_size = 4, num_layers = 2 } end,
      function() return nn.MultiheadAttention { embed_dim = 4, num_heads = 2 } end,
      function() return nn.PReLU { num_parameters = 3 } end,
      function() return nn.TransformerEncoderLayer { d_model = 4, nhead = 2, dim_feedforward = 3 } end,
      function()
        local list = {}
        for _, name in ipairs { "b", "a" } do list[name] = nn.Parameter(peri.randn { 2 }) end
        return nn.ParameterDict(list)
      end,
    } do
      nn.manual_seed(1)
      local a = make_one()
      nn.manual_seed(2)
      local b = make_one()
      b:load_state_dict(a:state_dict():clone())
      for name, t in peri.util.ordered(a:state_dict()) do
        assert.same(t:to_list(), b:state_dict()[name]:to_list(), name)
      end
    end
    assert.matches("^GRU%(3, 4, num_layers=1%)",
      (tostring(nn.GRU { input_size = 3, hidden_size = 4 }):gsub("\n.*", ")")))
    assert.equal("PReLU(num_parameters=3)", tostring(nn.PReLU { num_parameters = 3 }))
  end)

  it("have zeros as the gradient of a single step's weight of states, as PyTorch has", function()
    for i = 1, 4 do
      local batch_first = i > 2
      local class = nn[i % 2 == 0 and "LSTM" or "GRU"]
      local gru = class { input_size = 3, hidden_size = 4, batch_first = batch_first, bidirectional = true }
      local x = peri.randn(batch_first and { 2, 1, 3 } or { 1, 2, 3 })
      local y = gru(x)
      golden.assert_near(peri.no_grad(function() return gru(x) end):to_list(), y:to_list(), { abs = 1e-6 })
      y:sum():backward()
      assert.equal(0, gru.weight_hh_l0:grad():abs():amax():item())
      assert.equal(0, gru.weight_hh_l0_reverse:grad():abs():amax():item())
      assert.is_true(gru.bias_hh_l0:grad():abs():amax():item() > 0)
    end
  end)

  it("run under autocast", function()
    local gru, lstm = nn.GRU { input_size = 3, hidden_size = 4 }, nn.LSTM { input_size = 4, hidden_size = 4 }
    local x = peri.randn { 5, 2, 3 }
    local attention = nn.MultiheadAttention { embed_dim = 4, num_heads = 2 }
    local states = lstm((gru(x)))
    local exact = attention(states, states, states):to_list()
    local near = peri.autocast({ device = "cpu", dtype = "bf16" }, function()
      local h = lstm((gru(x)))
      local y = attention:forward(h, h, h)
      y:sum():backward()
      return y:to("f32"):to_list()
    end)
    golden.assert_near(exact, near, { abs = 0.05, rel = 0.05 })
    assert.is_truthy(gru.weight_hh_l0:grad())
  end)

  it("refuse wrong sizes", function()
    local function refuses(text, f) assert.error_matches(f, text) end
    refuses("embed_dim 5 in 2 heads", function() nn.MultiheadAttention { embed_dim = 5, num_heads = 2 } end)
    refuses("is tensor f32 %[2, 3%]", function()
      local m, x = nn.MultiheadAttention { embed_dim = 4, num_heads = 2 }, peri.zeros { 2, 3 }
      m(x, x, x)
    end)
    refuses("GRU: x is tensor f32 %[2, 3, 4%]", function()
      nn.GRU { input_size = 3, hidden_size = 4 } (peri.zeros { 2, 3, 4 })
    end)
    refuses("LSTM: one of h0 and c0 is nil", function()
      nn.LSTM { input_size = 3, hidden_size = 4 } (peri.zeros { 2, 1, 3 }, peri.zeros { 1, 1, 4 })
    end)
    refuses("activation is 'tanh', allowed: relu, gelu", function()
      nn.TransformerEncoderLayer { d_model = 4, nhead = 2, activation = "tanh" }
    end)
    local lazy = nn.LazyLinear { out_features = 2 }
    refuses("LazyLinear '1' has no parameters yet", function() nn.Sequential { nn.ReLU(), lazy }:parameters() end)
    refuses("LazyLinear has no parameters yet", function() lazy:state_dict() end)
    peri.scope(function() assert.same({ 2, 2 }, lazy(peri.ones { 2, 5 }):shape()) end)
    assert.equal("LazyLinear(in_features=5, out_features=2, bias=true)", tostring(lazy))
    assert.same({ "weight", "bias" }, peri.util.map(lazy:named_parameters(), function(p) return p.name end))
    refuses("the name 'training'", function() nn.ModuleDict { training = nn.ReLU() } end)
    refuses("the name 'training'", function() nn.ParameterDict { training = nn.Parameter(peri.ones { 1 }) } end)
    refuses("wanted a dimension 2 of size 3", function() nn.PReLU { num_parameters = 3 } (peri.zeros { 2, 4 }) end)
  end)
end)

describe("nn.init", function()
  local I = nn.init
  local function moments(t)
    local x = t:to "f64"
    return x:mean():item(), x:std():item(), x:min():item(), x:max():item()
  end

  it("draws the distributions that PyTorch documents", function()
    nn.manual_seed(5)
    local t = peri.zeros { 200, 300 }
    local function expect(mean, std, low, high)
      local m, s, least, most = moments(t)
      assert.is_true(math.abs(m - mean) < 0.02 * std + 1e-9 and math.abs(s - std) <= 0.02 * std, ("%g %g"):format(m, s))
      assert.is_true(least >= low and most <= high, ("%g %g"):format(least, most))
    end
    local inf, root = math.huge, math.sqrt
    I.uniform_(t, -1, 3) expect(1, 4 / root(12), -1, 3)
    I.normal_(t, 2, 0.5) expect(2, 0.5, -inf, inf)
    I.xavier_uniform_(t, 2) expect(0, 2 * root(2 / 500), -2 * root(6 / 500), 2 * root(6 / 500))
    I.xavier_normal_(t) expect(0, root(2 / 500), -inf, inf)
    I.kaiming_uniform_(t, { nonlinearity = "relu" }) expect(0, root(2 / 300), -root(6 / 300), root(6 / 300))
    I.kaiming_normal_(t, { a = root(5), mode = "fan_out" }) expect(0, root(2 / 6 / 200), -inf, inf)
    -- the deviation of a normal number cut at two deviations: sqrt(1 - 4 phi(2) / (2 Phi(2) - 1))
    I.trunc_normal_(t, 0, 1) expect(0, 0.87962566, -2, 2)
    I.trunc_normal_(t, 1, 0.5, 1, 9) expect(1 + 0.5 * root(2 / math.pi), 0.5 * root(1 - 2 / math.pi), 1, 9)
    I.constant_(t, 3) expect(3, 0, 3, 3)
    I.ones_(t) expect(1, 0, 1, 1)
    I.zeros_(t) expect(0, 0, 0, 0)
    local conv = peri.zeros { 8, 4, 5, 5 }
    I.kaiming_uniform_(conv)
    assert.is_true(conv:abs():max():item() <= root(6 / 100))
  end)

  it("makes orthonormal rows or columns", function()
    for _, shape in ipairs { { 5, 5 }, { 3, 7 }, { 7, 3 }, { 4, 2, 3 } } do
      local t = I.orthogonal_(peri.zeros(shape, "f64"), 2)
      local m = t:reshape(shape[1], -1)
      if m:size(1) > m:size(2) then m = m:transpose(1, 2) end
      local gram = F.matmul(m, m:transpose(1, 2)):to_table()
      for i, row in ipairs(gram) do
        for j, x in ipairs(row) do assert.is_true(math.abs(x - (i == j and 4 or 0)) < 1e-12) end
      end
    end
  end)

  it("draws the same numbers after manual_seed, also in parameters and on other devices", function()
    local layer = nn.Linear { in_features = 4, out_features = 3 }
    local seen
    for _, device in ipairs { "cpu", "opaque" } do
      nn.manual_seed(9)
      local t = peri.zeros({ 3, 4 }, "f32", device)
      local all = { I.xavier_normal_(t):to_list(), I.trunc_normal_(t):to_list(), I.orthogonal_(t):to_list() }
      for i, list in ipairs(seen or {}) do golden.assert_near(list, all[i], { abs = 1e-6, rel = 1e-6 }) end
      seen = seen or all
    end
    nn.manual_seed(9)
    assert.equal(layer.weight, I.xavier_normal_(layer.weight))
    assert.same(seen[1], layer.weight:to_list())
    assert.is_true(layer.weight:is_leaf() and layer.weight:describe().requires_grad)
  end)

  it("knows gains, and refuses what has no fans", function()
    assert.equal(math.sqrt(2 / (1 + 0.04)), I.calculate_gain("leaky_relu", 0.2))
    assert.equal(5 / 3, I.calculate_gain "tanh")
    assert.error_matches(function() I.xavier_normal_(peri.zeros { 3 }) end,
      "tensor f32 %[3%] on cpu, wanted 2 dimensions")
    assert.error_matches(function() I.kaiming_normal_(peri.zeros { 3, 2 }, { mode = "fan" }) end, "mode")
    assert.error_matches(function() I.trunc_normal_(peri.zeros { 3, 2 }, 0, 1, 2, 1) end, "std > 0, a < b")
  end)
end)

it("cosines of what broadcasts along the dimension, and of rows of zeros", function()
  local f = nn.functional
  local a, b = peri.tensor({ 1, 2 }, "f64"):requires_grad(), peri.tensor({ 3 }, "f64"):requires_grad()
  local cosine = f.cosine_similarity(a, b) -- of (1, 2) and (3, 3)
  assert.near(9 / math.sqrt(5 * 18), cosine:item(), 1e-12)
  cosine:backward()
  assert.near(0, b:grad():item(), 1e-12) -- the angle does not depend on it
  local zero = peri.zeros({ 1, 1 }, "f64"):requires_grad()
  f.cosine_embedding_loss(zero, peri.full({ 1, 1 }, 2, "f64"), peri.ones({ 1 }, "f64")):backward()
  assert.near(-1e6, zero:grad():item(), 1) -- -2 / sqrt(1e-12 * 4)
  -- PyTorch 2.14: a size below eps counts as eps, and yet the gradient is that of the true size
  local short = peri.tensor({ { 3e-9, 4e-9 } }, "f64"):requires_grad()
  f.cosine_similarity(short, peri.tensor({ { 1, 2 } }, "f64")):backward()
  assert.near(15205262.2470, short:grad():item(0), 1e-3)
  assert.near(50087922.6960, short:grad():item(1), 1e-3)
end)
