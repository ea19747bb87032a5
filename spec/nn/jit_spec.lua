-- What runs for every batch compiles: operations, modules, a whole training step of a small DLRM (style J2).
local peri = require "perilune"
local nn = peri.nn
local F = nn.functional
local jit_support = require "spec.support.jit"

describe("compiles:", function()
  local a, b = peri.ones { 4, 6 }, peri.ones { 4, 6 }
  local w, bias, dense, sparse = peri.ones { 3, 6 }, peri.ones { 3 }, peri.ones { 4, 5 }, peri.ones { 4, 2, 5 }
  local labels, classes = peri.zeros { 4 }, peri.zeros({ 4 }, "i64")
  local pair, square = { a, b }, { peri.ones { 6, 6 } }
  local mask, places, shape = a:gt(0), peri.zeros({ 4, 6 }, "i64"), { 2, 3 }

  local calls = {
    relu = function() return a:relu() end,
    leaky_relu = function() return a:leaky_relu() end,
    pow = function() return a:pow(2) end,
    arithmetic = function(i) return (a + b) * 2 - a / (i + 1) end,
    muladd = function() return F.muladd(a, b, a) end,
    linear = function() return F.linear(a, w, bias, 1) end,
    cross_net = function() return F.cross_net(a, nil, square) end,
    matmul = function() return F.matmul(a, w:transpose(1, 2)) end,
    cat = function() return F.cat(pair, 2) end,
    stack = function() return F.stack(pair, 1) end,
    sum = function() return a:sum(1) end,
    mean = function() return a:mean() end,
    max = function() return a:max(2) end,
    softmax = function() return a:softmax(2) end,
    index = function(i) return a[i % 4] end,
    ["several indices"] = function() return a[{ 1, { 0, 3 } }] end,
    ["compare with a number"] = function(i) return a:gt(i) end,
    compare = function() return a:le(b) end,
    where = function() return F.where(mask, a, 0) end,
    masked_fill = function() return a:masked_fill(mask, 2) end,
    clamp = function() return a:clamp(0, 1) end,
    maximum = function() return F.maximum(a, b) end,
    clone = function() return a:clone() end,
    gather = function() return a:gather(2, places) end,
    index_select = function() return a:index_select(2, classes) end,
    squeeze = function() return a:squeeze(1) end,
    unsqueeze = function() return a:unsqueeze(1) end,
    sort = function() return a:sort(2) end,
    argsort = function() return a:argsort(1) end,
    topk = function() return a:topk(2) end,
    argmax = function() return a:argmax(2) end,
    amax = function() return a:amax() end,
    var = function() return a:var(2) end,
    std = function() return a:std() end,
    norm = function() return a:norm() end,
    cumsum = function() return a:cumsum(2) end,
    arange = function(i) return peri.arange(i % 5) end,
    rand = function() return peri.rand(shape) end,
    layer_norm = function() return F.layer_norm(a, 1, nil, nil, 1e-5) end,
    dropout = function(i) return F.dropout(a, 0.5, 1, i) end,
    interaction = function() return F.interaction(dense, sparse) end,
    bce = function() return F.binary_cross_entropy_with_logits(labels, labels) end,
    mse = function() return F.mse_loss(a, b, "sum") end,
    cross_entropy = function() return F.cross_entropy(a, classes) end,
    einsum = function() return F.einsum("bd,kd->bk", a, w) end,
    ["einsum of rows"] = function() return F.einsum("bd,bd->b", a, b) end,
    cosine_similarity = function() return F.cosine_similarity(a, b) end,
    kl_div = function() return F.kl_div(a, b) end,
    in_batch_softmax_loss = function() return F.in_batch_softmax_loss(a, b, { temperature = 0.5, ids = classes }) end,
    focal = function() return F.sigmoid_focal_loss(a, b) end,
    logsumexp = function() return a:logsumexp(2) end,
    rms_norm = function() return F.rms_norm(a) end,
    attention = function() return F.scaled_dot_product_attention(a, a, a, nil, true) end,
    cumprod = function() return a:cumprod(2) end,
    scatter_add = function() return a:scatter_add(2, places, b) end,
    index_add = function() return a:index_add(1, classes, b) end,
    searchsorted = function() return F.searchsorted(bias, a) end,
    masked_select = function() return a:masked_select(mask) end,
    unique = function() return classes:unique(true, true) end,
    median = function() return a:median(2) end,
    pad = function() return a:pad(shape) end,
    tile = function() return a:tile(shape) end,
    roll = function() return a:roll(1, 2) end,
    chunk = function() return a:chunk(2)[1] end,
    randint = function() return peri.randint(0, 9, shape) end,
  }
  for name, call in peri.util.ordered(calls) do
    it(name, function()
      if name:match "^einsum" then call(1) end -- the first time its function is written
      jit_support.assert_compiles(name, function(i)
        local t = call(i)
        t:release()
      end)
    end)
  end

  it("a module's parameters, and limits of their gradients", function()
    local net = nn.Linear { in_features = 3, out_features = 1 } -- a walk through a tree of modules is a recursion
    local optim = nn.optim
    net(peri.ones { 2, 3 }):sum():backward()
    optim.clip_grad_value(net:parameters(), 1) -- loads its module
    jit_support.assert_compiles("parameters", function() return net:parameters() end)
    jit_support.assert_compiles("clip_grad_value", function() optim.clip_grad_value(net:parameters(), 1) end)
    jit_support.assert_compiles("clip_grad_norm", function()
      peri.scope(optim.clip_grad_norm, net:parameters(), 1)
    end)
  end)

  -- LuaJIT counts tail calls as rounds of a loop, and gives up at the 20th (loopunroll).
  it("a long row of functions", function()
    jit_support.assert_compiles("many functions", function()
      local t = (a:exp() + b):clamp(0, 1):sqrt():affine(2, 1):square():relu():abs():log1p():sigmoid():tanh():neg()
      t:release()
    end)
    jit_support.assert_compiles("many functions of two results", function()
      local t = a:sort(1):cummax(1):topk(3, 1):cummin(2):sort(2):cummax(2):topk(2, 2):cummin(1):max(1, true)
      t:release()
    end)
  end)

  local function training(module, x, optimizer)
    return function()
      optimizer:zero_grad()
      module:forward(x):sum():backward()
      optimizer:step()
    end
  end
  for _, class in ipairs { "SGD", "Adam" } do
    it("a training step with " .. class, function()
      local model = nn.MLP { in_size = 6, layer_sizes = { 4, 3 } }
      jit_support.assert_compiles(class, training(model, a, nn.optim[class] { params = model, lr = 1e-3 }))
    end)
  end

  it("modules", function()
    local modules = {
      nn.MLP { in_size = 6, layer_sizes = { 5, 4 }, activation = "swish_layernorm" },
      nn.CrossNet { in_features = 6, num_layers = 2 }, nn.LowRankCrossNet { in_features = 6, num_layers = 2,
        low_rank = 2 }, nn.Dropout { p = 0.2 },
      nn.Perceptron { in_size = 6, out_size = 2 },
    }
    for _, module in ipairs(modules) do
      jit_support.assert_compiles(module.class_name, function() module:forward(a) end)
    end
  end)

  it("modules within modules", function()
    local net = nn.MLP { in_size = 3, layer_sizes = { 4, 2 } }
    for i = 1, 6 do
      local Outer = nn.Module:extend("Outer" .. i)
      function Outer:init(inner) self.inner = inner end
      -- Code of its own, as classes of a model have: LuaJIT takes nested runs of the same code for recursion, and
      -- unrolls it three times.
      Outer.forward = loadstring("return function(self, x) local y = self.inner(x) return y end", "=outer" .. i)()
      net = Outer(net)
    end
    local x = peri.zeros { 2, 3 }
    jit_support.assert_compiles("modules within modules", function() peri.scope(net.forward, net, x) end)
  end)

  it("a dense DLRM step", function()
    local bottom = nn.MLP { in_size = 6, layer_sizes = { 8, 5 } }
    local inter, top = nn.InteractionArch { num_sparse_features = 2 },
      nn.OverArch { in_features = 8, layer_sizes = { 4, 1 } }
    local loss = nn.BCEWithLogitsLoss()
    local optimizer = nn.optim.Adagrad { params = bottom, lr = 0.01 }
    jit_support.assert_compiles("DLRM", function()
      local y = top:forward(inter:forward(bottom:forward(a), sparse)):reshape(-1)
      optimizer:zero_grad()
      loss:forward(y, labels):backward()
      optimizer:step()
    end)
  end)
end)
