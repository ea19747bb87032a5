-- Dense operations: gradients by finite differences at awkward shapes and layouts on both devices, values, bad inputs.
-- cuda: always
-- takes: 3 s
local peri = require "perilune"
local F = require "perilune.nn.functional"
local gradcheck = require "spec.support.gradcheck"

local function unary(name, options, ...)
  local extra = { ... }
  return { name = name, shapes = { { { 5 } }, { { 1, 1 } }, { { 0, 3 } }, { { 2, 3, 7 } }, { {} } }, options = options,
    f = function(x) return F[name](x, unpack(extra)) end }
end

-- name; shapes: lists of input shapes; f; options of gradcheck.
local cases = {
  unary "relu", unary "sigmoid", unary "tanh", unary "silu", unary "gelu", unary "softplus", unary "logsigmoid",
  unary("leaky_relu", nil, 0.2), unary "exp", unary("log", { low = 0.2, high = 2 }),
  unary("sqrt", { low = 0.2, high = 2 }), unary "abs", unary "square", unary("pow", nil, 3),
  unary("pow", { low = 0.2, high = 2 }, 1.5), unary("pow", nil, 0), unary("affine", nil, -2, 3), unary "neg",
  unary("reciprocal", { low = 0.5, high = 2 }, 3),
}
local broadcast = { { { 2, 3 }, { 2, 3 } }, { { 4, 3 }, { 3 } }, { { 3 }, { 2, 1 } }, { { 2, 1, 3 }, { 5, 1 } },
  { {}, { 2, 2 } }, { { 0, 3 }, { 3 } },
  { { 1, 3 }, { 1, 3 } }, { { 2, 3, 4 }, { 3, 1 } } }
for _, name in ipairs { "add", "sub", "mul", "div" } do
  cases[#cases + 1] = { name = name, shapes = broadcast, f = F[name], options = { low = 0.4, high = 2 } }
end
local function add(name, shapes, f, options)
  cases[#cases + 1] = { name = name, shapes = shapes, f = f, options = options }
end

add("x * x", { { { 3, 2 } } }, function(x) return x * x end)
add("muladd", { { { 2, 3 }, { 2, 3 }, { 2, 3 } }, { { 0, 2 }, { 0, 2 }, { 0, 2 } },
  { { 1, 17 }, { 1, 17 }, { 1, 17 } } }, F.muladd)
add("cross_net", { { { 4, 3 }, { 2, 3 }, { 3, 2 }, { 3 }, { 1, 3 }, { 3, 1 }, { 3, 1 } },
  { { 70, 2 }, { 1, 2 }, { 2, 1 }, { 2 }, { 3, 2 }, { 2, 3 }, { 2 } },
  { { 2, 2, 3 }, { 1, 3 }, { 3, 1 }, { 3 }, { 1, 3 }, { 3, 1 }, { 3 } },
  { { 0, 3 }, { 2, 3 }, { 3, 2 }, { 3 }, { 2, 3 }, { 3, 2 }, { 3 } } }, function(x, v, w, b, v2, w2, b2)
    return F.cross_net(x, { v, v2 }, { w, w2 }, { b, b2 })
  end)
add("cross_net of whole matrices",
  { { { 4, 3 }, { 3, 3 }, { 3, 3 }, { 3, 3 } }, { { 3 }, { 3, 3 }, { 3, 3 }, { 3, 3 } } }, function(x, a, b, c)
    return F.cross_net(x, nil, { a, b, c }) * x
  end)
add("cross_net of one layer", { { { 65, 3 }, { 3, 3 }, { 3 } } }, function(x, w, b)
  return F.cross_net(x, nil, { w }, { b })
end)
add("linear", { { { 4, 3 }, { 5, 3 } }, { { 3 }, { 2, 3 } }, { { 2, 3, 4 }, { 1, 4 } }, { { 0, 3 }, { 2, 3 } },
  { { 2, 0 }, { 3, 0 } }, {
  { 1, 1 }, { 1, 1 } } },
  function(x, w) return F.linear(x, w) end)
for name, code in peri.util.ordered(F.activations) do
  add("linear with bias and " .. name, { { { 4, 3 }, { 5, 3 }, { 5 } }, { { 2, 3, 4 }, { 1, 4 }, { 1 } },
    { { 0, 3 }, { 2, 3 }, { 2 } }, { { 70, 2 }, { 3, 2 }, { 3 } } },
    function(x, w, b) return F.linear(x, w, b, code) end)
end
add("matmul", { { { 2, 3 }, { 3, 4 } }, { { 5, 2, 3 }, { 5, 3, 4 } }, { { 5, 2, 3 }, { 3, 4 } },
  { { 2, 3 }, { 5, 3, 1 } }, { { 3 }, {
  3 } }, { { 3 }, { 3, 2 } }, { { 2, 3 }, { 3 } },
  { { 2, 1, 2, 3 }, { 4, 3, 2 } }, { { 0, 2, 3 }, { 3, 4 } }, { { 2, 0 }, { 0, 3 } }, { { 1, 1, 1 }, { 1, 1, 1 } },
  { { 4, 2, 3 }, {
    3 } } }, F.matmul)
add("bmm", { { { 3, 2, 5 }, { 3, 5, 1 } } }, F.bmm)
for _, dim in ipairs { 1, 2, -1 } do
  add("cat along " .. dim, { { { 2, 3 }, { 2, 3 }, { 2, 3 } }, { { 1, 1 }, { 1, 1 }, { 1, 1 } },
    { { 0, 2 }, { 0, 2 }, { 0, 2 } } }, function(a, b, c) return F.cat({ a, b, c, a }, dim) end)
  add("stack along " .. dim, { { { 2, 3 }, { 2, 3 } }, { { 0, 2 }, { 0, 2 } } }, function(a, b)
    return F.stack({ a, b, a }, dim)
  end)
end
add("cat of different sizes", { { { 2, 1 }, { 2, 4 }, { 2, 0 } } },
  function(a, b, c) return F.cat({ a, b, c }, 2) * F.cat({ c, b, a }, 2) end)
add("split", { { { 2, 6 } }, { { 0, 6 } } }, function(x) -- one part is used twice, one not at all
  local a, b, _, c = unpack(F.split(x, { 1, 3, 0, 1, 1 }, 2))
  return F.cat({ b, c, a, b }, -1):square()
end)
add("split of rows", { { { 5, 2 } }, { { 5 } } }, function(x)
  local a, b = unpack(x:split { 2, 3 })
  return a:sum() * b:square():sum()
end)
add("expand", { { { 2, 1 } }, { { 1 } }, { { 3, 1, 1 } } }, function(x)
  return x:expand(x:dim() == 3 and { 3, 2, 4 } or { 5, 2, 4 })
end)
add("reshape, transpose, slice", { { { 2, 6 } } }, function(x)
  return x:reshape(2, 2, 3):transpose(1, 3):slice(2, 1, 2):square()
end)
for _, dim in ipairs { 1, 2, 3, { 1, 3 }, { 2, 3 }, { 1, 2, 3 } } do
  local text = type(dim) == "table" and table.concat(dim, ",") or dim
  local shapes = { { { 2, 3, 4 } }, { { 1, 3, 1 } }, { { 2, 0, 3 } } }
  add("sum over " .. text, shapes, function(x) return F.sum(x, dim) end)
  add("mean over " .. text, { shapes[1], shapes[2] }, function(x) return F.mean(x, dim, true) end)
end
add("sum of all", { { { 2, 3 } }, { {} }, { { 0 } } }, function(x) return F.sum(x) end)
add("mean of all", { { { 2, 3 } }, { {} } }, function(x) return F.mean(x:square()) end)
for _, dim in ipairs { 1, 2, -1 } do
  local shapes = { { { 3, 4, 2 } }, { { 1, 5, 1 } } }
  add("max along " .. dim, shapes, function(x) return (F.max(x, dim)) end)
  add("max along " .. dim .. ", kept", shapes, function(x) return (F.max(x, dim, true)) end)
  add("softmax along " .. dim, shapes, function(x) return F.softmax(x, dim) end)
  add("log_softmax along " .. dim, shapes, function(x) return F.log_softmax(x, dim) end)
end
add("softmax of an empty batch", { { { 0, 3 } } }, function(x) return F.softmax(x, 2) end)
add("layer_norm", { { { 3, 5 } }, { { 2, 3, 4 } }, { { 0, 4 } }, { { 2, 1 } } },
  function(x) return F.layer_norm(x, 1) end, {
  tolerance = 1e-6 })
add("layer_norm with weight and bias", { { { 3, 5 }, { 5 }, { 5 } }, { { 70, 3 }, { 3 }, { 3 } },
  { { 0, 4 }, { 4 }, { 4 } } }, function(x, w, b) return F.layer_norm(x, 1, w, b) end, { tolerance = 1e-6 })
add("layer_norm over two dimensions", { { { 2, 3, 2 }, { 3, 2 }, { 3, 2 } } },
  function(x, w, b) return F.layer_norm(x, 2, w, b, 1e-3) end, { tolerance = 1e-6 })
add("dropout", { { { 4, 5 } }, { { 0, 2 } } }, function(x) return F.dropout(x, 0.4, 3, 5, 7) end)
add("interaction", { { { 3, 4 }, { 3, 2, 4 } }, { { 2, 1 }, { 2, 5, 1 } }, { { 0, 3 }, { 0, 2, 3 } },
  { { 2, 3 }, { 2, 0, 3 } }, { { 1, 5 }, { 1, 1, 5 } } }, F.interaction)
for _, reduction in ipairs { "none", "mean", "sum" } do
  add("bce with logits, " .. reduction, { { { 7 } }, { { 2, 3 } }, { { 1 } } }, function(x)
    local t = peri.Tensor.uniform(x:shape(), 0, 1, 9, 1, "f64", x:device())
    return F.binary_cross_entropy_with_logits(x, t, peri.tensor({ 0.7 }, "f64", x:device()), t:affine(2, 1), reduction)
  end)
  add("bce, " .. reduction, { { { 7 } } }, function(x)
    return F.binary_cross_entropy(x, peri.Tensor.uniform(x:shape(), 0, 1, 9, 1, "f64", x:device()), nil, reduction)
  end, { low = 0.2, high = 0.8 })
  add("mse, " .. reduction, { { { 7 } }, { { 2, 3 } } },
    function(x) return F.mse_loss(x, peri.zeros(x:shape(), "f64", x:device()), reduction) end)
  add("cross entropy, " .. reduction, { { { 3, 4 } }, { { 1, 1 } } }, function(x)
    local labels = {}
    for i = 1, x:size(1) do labels[i] = (i * 7) % x:size(2) end
    return F.cross_entropy(x, peri.tensor(labels, "i64", x:device()), reduction)
  end)
end
for options = 1, 7 do -- weights of classes, smoothed labels, rows that are ignored, each with and without the others
  add("cross entropy, options " .. options, { { { 3, 4 } }, { { 5, 2 } } }, function(x)
    local labels, classes, device = {}, x:size(2), x:device()
    for i = 1, x:size(1) do labels[i] = i == 2 and options > 3 and -100 or i * 7 % classes end
    local weight = options % 2 == 1 and peri.Tensor.uniform({ classes }, 0.2, 2, 9, 3, "f64", device) or nil
    local smoothing, ignored = options % 4 > 1 and 0.3 or nil, options > 3 and -100 or nil
    return F.cross_entropy(x, peri.tensor(labels, "i64", device), "mean", ignored, smoothing, weight)
  end)
end
add("losses of an empty batch", { { { 0 } } }, function(x)
  return F.mse_loss(x, peri.zeros({ 0 }, "f64", x:device()), "sum")
end)

describe("cross entropy", function()
  it("of a row is what its label and all classes have lost, by their weights", function()
    local classes, weights, labels = 4, { 0.5, 2, 1, 0.25 }, { 0, 3, -1, 1, 1 }
    local x = peri.Tensor.uniform({ #labels, classes }, -2, 2, 4, 0, "f64")
    local logits, y, w = x:to_table(), peri.tensor(labels, "i64"), peri.tensor(weights, "f64")
    for _, smoothing in ipairs { 0, 0.2, 1 } do
      local sum, counted = 0, 0
      local rows = F.cross_entropy(x, y, "none", -1, smoothing, w):to_list()
      for r, label in ipairs(labels) do
        local all, expected = 0, 0
        for c = 1, classes do all = all + math.exp(logits[r][c]) end
        for c = 1, label >= 0 and classes or 0 do
          local share = smoothing / classes + (c == label + 1 and 1 - smoothing or 0)
          expected = expected - share * weights[c] * (logits[r][c] - math.log(all))
        end
        assert.near(expected, rows[r], 1e-12)
        sum, counted = sum + expected, counted + (weights[label + 1] or 0)
      end
      assert.near(sum, F.cross_entropy(x, y, "sum", -1, smoothing, w):item(), 1e-12)
      assert.near(sum / counted, F.cross_entropy(x, y, "mean", -1, smoothing, w):item(), 1e-12)
      local loss = peri.nn.CrossEntropyLoss { reduction = "global_mean", ignore_index = -1, label_smoothing = smoothing,
        weight = w }
      assert.near(sum / counted, loss(x, y):item(), 1e-12)
    end
  end)
end)

describe("results", function()
  --- Everything that a small DLRM computes in one step, at shapes that every kernel splits over threads.
  local function step()
    local nn = peri.nn
    nn.manual_seed(3)
    local bottom, top = nn.MLP { in_size = 13, layer_sizes = { 130, 32 } },
      nn.OverArch { in_features = 32 + 10, layer_sizes = { 300, 1 } }
    local norm = nn.SwishLayerNorm { input_dims = 42 }
    local x, sparse = peri.Tensor.normal({ 1500, 13 }, 0, 1, 1, 0),
      peri.Tensor.normal({ 1500, 4, 32 }, 0, 1, 1, 1):requires_grad()
    local y = F.interaction(bottom(x), sparse)
    local logits = top(F.dropout(norm(y), 0.2, 1, 2)):reshape(-1)
    local loss = F.binary_cross_entropy_with_logits(logits, peri.Tensor.uniform({ 1500 }, 0, 1, 1, 2))
    loss:backward()
    local params = { sparse }
    for _, m in ipairs { bottom, norm, top } do
      for _, p in ipairs(m:parameters()) do params[#params + 1] = p end
    end
    local total = nn.optim.clip_grad_norm(params, 0.5)
    nn.optim.Adam({ params = params }):step()
    local lists = { loss:to_list(), total:to_list() }
    for i, p in ipairs(params) do lists[i + 2] = p:to_list() end
    return lists
  end

  it("do not depend on the number of threads", function()
    local C = peri.ffi.C
    local before, results = C.peri_threads(), {}
    for i, threads in ipairs { 1, 2, 5 } do
      peri.ffi.check(C.peri_threads_set(threads))
      results[i] = step()
    end
    peri.ffi.check(C.peri_threads_set(before))
    assert.same(results[1], results[2])
    assert.same(results[1], results[3])
  end)
end)

for _, device in ipairs(require "spec.support.devices") do
  describe("gradients on " .. device, function()
    for _, case in ipairs(cases) do
      it("of " .. case.name, function()
        for _, shapes in ipairs(case.shapes) do
          for _, layout in ipairs(gradcheck.layouts) do
            local options = { device = device, layout = layout }
            for key, value in pairs(case.options or {}) do options[key] = value end
            gradcheck.check(case.f, shapes, options)
          end
        end
      end)
    end
  end)

  describe("operations on " .. device, function()
    local function t(data, dtype) return peri.tensor(data, dtype, device) end

    it("compute with numbers on either side", function()
      local a = t { 1, 2, 4 }
      assert.same({ 3, 4, 6 }, (a + 2):to_list())
      assert.same({ 3, 4, 6 }, (2 + a):to_list())
      assert.same({ -1, 0, 2 }, (a - 2):to_list())
      assert.same({ 1, 0, -2 }, (2 - a):to_list())
      assert.same({ 3, 6, 12 }, (3 * a):to_list())
      assert.same({ 0.5, 1, 2 }, (a / 2):to_list())
      assert.same({ 4, 2, 1 }, (4 / a):to_list())
      assert.same({ -1, -2, -4 }, (-a):to_list())
    end)

    it("sum long tensors precisely", function()
      local ones = peri.full({ 3, 100000 }, 0.1, "f32", device)
      for _, x in ipairs(ones:sum(2):to_list()) do assert.near(10000, x, 0.01) end
      assert.near(30000, ones:sum():item(), 0.03)
      assert.near(0.1, ones:mean():item(), 3e-7)
      assert.near(0.3, ones:sum(1):to_list()[77777], 1e-7)
      assert.near(0.1, ones:transpose(1, 2):mean(1):to_list()[3], 3e-7)
    end)

    it("find the first of equal maxima", function()
      local value, index = t({ { 1, 3, 3 }, { 2, 2, 1 } }):max(2)
      assert.same({ 3, 2 }, value:to_list())
      assert.same({ 1, 0 }, index:to_list())
      assert.equal("i64", index:dtype())
    end)

    it("keep NaN and infinity where they belong", function()
      local nan, inf = 0 / 0, math.huge
      local relu = t({ nan, -1, inf, -inf }):relu():to_list()
      assert.is_true(relu[1] ~= relu[1])
      assert.same({ 0, inf, 0 }, { relu[2], relu[3], relu[4] })
      assert.same({ 1, 0.5, 0 }, t({ inf, 0, -inf }):sigmoid():to_list())
      assert.same({ 1, 0, -1 }, t({ inf, 0, -inf }):tanh():to_list())
      assert.same({ inf, 1, 0, inf }, t({ inf, 0, -inf, 89 }):exp():to_list())
      assert.same({ -inf, 0, inf }, t({ 0, 1, inf }):log():to_list())
      local max = t({ { 1, nan, 2 } }):max(2):to_list()[1]
      assert.is_true(max ~= max)
    end)

    it("drop the same elements however a batch is cut", function()
      local x = peri.ones({ 10, 7 }, "f32", device)
      local whole = F.dropout(x, 0.3, 42, 5, 0):to_list()
      local tail = F.dropout(x:slice(1, 4, 10), 0.3, 42, 5, 4 * 7):to_list()
      local dropped = 0
      for i = 1, 70 do
        assert.is_true(whole[i] == 0 or math.abs(whole[i] - 1 / 0.7) < 1e-6)
        if whole[i] == 0 then dropped = dropped + 1 end
      end
      for i = 1, 42 do assert.equal(whole[28 + i], tail[i]) end
      assert.is_true(dropped > 8 and dropped < 36)
      assert.not_same(whole, F.dropout(x, 0.3, 42, 6, 0):to_list())
      assert.not_same(whole, F.dropout(x, 0.3, 43, 5, 0):to_list())
      assert.same(x:to_list(), F.dropout(x, 0, 42, 5, 0):to_list())
      local many = F.dropout(peri.ones({ 20000 }, "f32", device), 0.3, 1, 1, 0):mean():item()
      assert.near(1, many, 0.03)
    end)

    it("join as many tensors as there are", function()
      local list, wanted = {}, {}
      for i = 1, 300 do list[i], wanted[i] = t { i }, i end
      assert.same(wanted, F.cat(list, 1):to_list())
      assert.same({ 300, 1 }, F.stack(list, 1):shape())
    end)

    it("name what is wrong", function()
      local a, b = t { { 1, 2, 3 }, { 4, 5, 6 } }, t { 1, 2 }
      local labels = t({ 0, 3 }, "i64")
      local function fails(pattern, f, ...)
        local args = { n = select("#", ...), ... }
        assert.error_matches(function() f(unpack(args, 1, args.n)) end, pattern)
      end
      fails("peri_op_add: f32 %[2, 3%] and f32 %[2%] do not broadcast: sizes 3 and 2", F.add, a, b)
      fails("peri_op_add: b is c64, allowed: f32, f64", F.add, a, peri.zeros({ 2, 3 }, "c64", device))
      fails("peri_op_silu: x is i64, allowed: f32, f64", F.silu, labels)
      fails("peri_op_cross_net: w%[0%] is f32 %[2, 3%], wanted %[3, 3%]", F.cross_net, a, nil, { a })
      fails("cross_net: 2 W, 1 V, 2 biases", F.cross_net, a, { a }, { a, a })
      fails("peri_op_muladd: shapes differ", F.muladd, a, a, b)
      fails("peri_op_linear: x is %[2, 3%], wanted %[%*, 2%]", F.linear, a, t { { 1, 2 }, { 3, 4 } })
      fails("bias.*their first sizes must agree", F.linear, a, a, t { 1, 2, 3 })
      fails("activation 9, allowed: 0%.%.3", F.linear, a, a, nil, 9)
      fails("peri_op_matmul: f32 %[2, 3%] and f32 %[2, 3%]", F.matmul, a, a)
      fails("leading sizes 2 and 3 do not broadcast", F.matmul, peri.ones({ 2, 1, 1 }, "f32", device),
        peri.ones({ 3, 1, 1 }, "f32", device))
      fails("bmm:.*three dimensions", F.bmm, a, a)
      fails("peri_op_cat: 0 tensors", F.cat, {})
      fails("peri_op_cat: the 1st and the 2nd tensor are f32 %[2, 3%] and f32 %[2%]", F.cat, { a, b }, 1)
      fails("peri_op_cat: the 3rd dimension of f32 %[2, 3%], which has 2", F.cat, { a }, 3)
      fails("peri_op_split: sizes%[1%] is 3, allowed: 0%.%.1, what is left of the 2nd dimension of f32 %[2, 3%]",
        F.split, a, { 2, 3 }, 2)
      fails("peri_op_split: the sizes add up to 1, the 1st dimension of f32 %[2, 3%] is 2", F.split, a, { 1 })
      fails("peri_op_split: 0 parts", F.split, a, {})
      fails("split: sizes is 0, allowed: from 1 on, or a list", F.split, a, 0)
      fails("split: sizes %[1%] is 1.5, wanted", F.split, a, { 1.5 })
      fails("peri_op_stack: the 4th dimension as a new one of tensors f32 %[2, 3%], which then have 3", F.stack, { a },
        4)
      fails("peri_op_sum: the 1st dimension is named twice", F.sum, a, { 1, -2 })
      fails("peri_op_max: the 2nd dimension of f32 %[2, 0%] is empty", F.max, peri.empty({ 2, 0 }, "f32", device), 2)
      fails("peri_op_softmax: the 3rd dimension of", F.softmax, a, 3)
      fails("peri_op_layer_norm: the last 3 dimensions, allowed: 1%.%.2", F.layer_norm, a, 3)
      fails("weight must have x's last 1 sizes", F.layer_norm, a, 1, b)
      fails("probability 1, allowed: 0 <= p < 1", F.dropout, a, 1, 0, 0)
      fails("wanted %[B, D%] and %[B, F, D%]", F.interaction, a, peri.ones({ 2, 4, 2 }, "f32", device))
      fails("their shapes must agree", F.mse_loss, a, b)
      fails("reduction 'median', allowed: none, mean, sum", F.mse_loss, a, a, "median")
      fails("weight must broadcast to x", F.binary_cross_entropy_with_logits, a, a, b)
      fails("the target requires grad", F.mse_loss, a, t({ { 1, 2, 3 }, { 4, 5, 6 } }):requires_grad())
      for i, what in ipairs { "weight", "pos_weight" } do
        fails("the " .. what .. " requires grad", F.binary_cross_entropy_with_logits, a, a, i == 1
          and peri.ones({ 3 }, "f32", device):requires_grad() or nil, i == 2
          and peri.ones({ 3 }, "f32", device):requires_grad() or nil)
      end
      fails("label 3 in row 1, allowed: 0%.%.2", F.cross_entropy, a, labels)
      fails("labels is f32", F.cross_entropy, a, b)
      local good = peri.tensor({ 0, 2 }, "i64", device)
      fails("wanted a weight for each class", F.cross_entropy, a, good, "mean", nil, nil, b)
      fails("label_smoothing is 1%.5, allowed: 0%.%.1", F.cross_entropy, a, good, "mean", nil, 1.5)
      fails("label 3 in row 1, allowed: 0%.%.2", F.cross_entropy, a, labels, "mean", 7)
      fails("weight requires grad", F.cross_entropy, a, good, "mean", nil, nil,
        peri.ones({ 3 }, "f32", device):requires_grad())
      fails("peri_tensor_expand: f32 %[2%] does not expand", function() b:expand { 3 } end)
      fails("size %-1 of the 1st dimension", function() b:expand { -1, 2 } end)
    end)
  end)
end
