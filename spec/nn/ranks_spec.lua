-- The mean over the samples of all ranks: its value and its gradients are those of one rank that has all samples,
-- however they are shared.
-- mpirun: 2 3
local peri = require "perilune"
local worlds = require "spec.support.worlds"
local nn = peri.nn
local F = nn.functional

local N, COLUMNS = 11, 3

--- First and last place of rank r's samples, by kind of shares.
local shares = {
  uneven = function(r, n) return math.floor(N * (r / n) ^ 2), math.floor(N * ((r + 1) / n) ^ 2) end,
  first = function(r) return r == 0 and 0 or N, N end,   -- all on one rank, and none on the others
  last = function(r, n) return 0, r == n - 1 and N or 0 end,
  nobody = function() return 0, 0 end,
}

local function numbers(shape, low, high, stream) return peri.Tensor.uniform(shape, low, high, 5, stream, "f64") end

local CLASSES = peri.tensor({ 0, 1, 2, 2, 1, 0, 0, 1, 1, 2, 0 }, "i64")
--- Class, input of N samples, targets, the class's own arguments.
local cases = {
  { "BCEWithLogitsLoss", numbers({ N }, -2, 2, 1), numbers({ N }, 0, 1, 2) },
  { "BCELoss", numbers({ N }, 0.1, 0.9, 3), numbers({ N }, 0, 1, 4) },
  { "MSELoss", numbers({ N, COLUMNS }, -2, 2, 5), numbers({ N, COLUMNS }, -2, 2, 6) },
  { "CrossEntropyLoss", numbers({ N, COLUMNS }, -2, 2, 7), CLASSES },
  { "CrossEntropyLoss", numbers({ N, COLUMNS }, -2, 2, 7), CLASSES, { ignore_index = 1, label_smoothing = 0.2 } },
}

--- Value and gradient of a loss of samples [first, last) times a parameter that starts at 1: the parameter's gradient
--- is averaged.
local function one(world, device, first, last, case, make)
  local w = peri.ones({}, "f64", device):requires_grad()
  local reducer = world and peri.dist.Reducer { group = world, params = { w } }
  local input = case[2]:to(nil, device):slice(1, first, last)
  local loss = make(input * w:reshape(1):expand(input:shape()), case[3]:to(nil, device):slice(1, first, last))
  loss:backward()
  local value, grad = loss:item(), w:grad() and w:grad():item() or 0
  if reducer then reducer:release() end
  return value, grad
end

local function compare(world, device, case, make, whole)
  for kind in peri.util.ordered(shares) do
    local first, last = shares[kind](world:rank(), world:size())
    local value, grad = one(world, device, first, last, case, make)
    local want_value, want_grad = 0, 0
    if kind ~= "nobody" then want_value, want_grad = one(nil, "cpu", 0, N, case, whole) end
    assert.near(want_value, value, 1e-12, kind)
    assert.near(want_grad, grad, 1e-12, kind)
    local both = peri.tensor({ value, -value }, "f64", "cpu")
    world:all_reduce(both, "max"):wait()
    assert.same({ value, -value }, both:to_list()) -- the same on all ranks
  end
end

describe("a global mean", function()
  it("has the gradient of its upstream one, given or begun with, and of what is computed from it", function()
    for _, device in ipairs { "cpu", "opaque" } do
      local function gradient(after)
        local x = peri.tensor({ 1, 2, 4 }, "f64", device):requires_grad()
        after(F.mean_of(F.sum(x), 4))
        return x:grad():to_list()
      end
      local quarters = { 0.25, 0.25, 0.25 }
      assert.same(quarters, gradient(function(mean) mean:backward() end))
      assert.same(quarters, gradient(function(mean) mean:backward(peri.ones({}, "f64", device)) end))
      assert.same({ 0.5, 0.5, 0.5 }, gradient(function(mean) mean:backward(peri.full({}, 2, "f64", device)) end))
      assert.same({ 0.75, 0.75, 0.75 }, gradient(function(mean) (mean * 3):backward() end))
    end
  end)

  for _, case in ipairs(cases) do
    local options = case[4] or {}
    local name = case[1] .. (case[4] and ", by arguments" or "")
    worlds.each(("of %s is the mean of one rank with all samples"):format(name), function(world, device)
      local all = { reduction = "global_mean", group = world, ignore_index = options.ignore_index,
        label_smoothing = options.label_smoothing }
      local global, mean = nn[case[1]](all), nn[case[1]](options)
      compare(world, device, case, function(x, y) return global(x, y) end, function(x, y) return mean(x, y) end)
    end, { sizes = { 1, 2, 3, 5 } })
  end

  it("of losses of tensors that broadcast is the mean of all that there are", function()
    local function of(...) return peri.Tensor.uniform({ ... }, -1, 1, 3, 0, "f64") end
    local sign = peri.tensor({ 1, -1, 1, 1 }, "f64")
    for name, given in pairs { BPRLoss = { of(4, 1), of(4) }, TripletMarginLoss = { of(1, 3), of(4, 3), of(4, 3) },
      CosineEmbeddingLoss = { of(4, 3), of(4, 3), sign }, MarginRankingLoss = { of(4), of(4), sign },
      InBatchSoftmaxLoss = { of(4, 3), of(4, 3) } } do
      local loss = nn[name] { reduction = "global_mean", group = false }
      assert.near(nn[name] {}(unpack(given)):item(), loss(unpack(given)):item(), 1e-12, name)
    end
  end)

  it("and every loss of an input and its target want them of one shape", function()
    local column, list = peri.ones { 4, 1 }, peri.ones { 4 }
    for _, name in ipairs { "MSELoss", "L1Loss", "HuberLoss", "SmoothL1Loss", "BCELoss", "BCEWithLogitsLoss",
      "FocalLoss", "KLDivLoss", "HingeEmbeddingLoss", "MarginRankingLoss", "CosineEmbeddingLoss" } do
      for _, reduction in ipairs { "mean", "global_mean" } do
        local loss = nn[name] { reduction = reduction, group = false }
        for _, given in ipairs { { column, list, list }, { list, column, list },
          { list, list:slice(1, 0, 1), list } } do
          assert.error_matches(function() loss(given[1], given[2], loss._many and given[3] or nil) end, "shape", name)
        end
      end
    end
    assert.error_matches(function() nn.BCEWithLogitsLoss {}(list, list, list) end,
      "BCEWithLogitsLoss: a third argument, tensor f32 %[4%] on cpu; it takes an input and its target, and `weight`")
  end)

  worlds.each("of any losses, weighted or not", function(world, device)
    local case = cases[3]
    compare(world, device, case, function(x, y) return nn.global_mean(F.mse_loss(x, y, "none"), nil, world) end,
      function(x, y) return F.mse_loss(x, y) end)
    local function weight(y) return y:square() + 0.5 end
    compare(world, device, case, function(x, y) return nn.global_mean(F.mse_loss(x, y, "none"), weight(y), world) end,
      function(x, y) return (F.mse_loss(x, y, "none") * weight(y)):sum() / weight(y):sum() end)
    -- weights that are learned, too
    compare(world, device, case, function(x, y) return nn.global_mean(F.mse_loss(x, y, "none"), weight(x), world) end,
      function(x, y) return (F.mse_loss(x, y, "none") * weight(x)):sum() / weight(x):sum() end)
    local zero = nn.global_mean(F.mse_loss(case[2], case[3], "none"), peri.zeros({ N, COLUMNS }, "f64", "cpu"), world)
    assert.equal(0, zero:item())
  end, { sizes = { 1, 2, 3 } })

  worlds.each("is over the ranks of the model that the loss is in, or of the world", function(world, device, n)
    peri.ffi.state.device = device
    local half = world:new_group({ world:rank() }, "alone")
    local net = nn.Module()
    net.losses = { nn.MSELoss { reduction = "global_mean" }, nn.MSELoss { reduction = "global_mean", group = false } }
    net.scale = nn.Parameter(peri.ones { 2 })
    function net.forward(self, x)
      return self.losses[1](self.scale * x, x * 0), self.losses[2](self.scale * x, x * 0)
    end
    local x = peri.full({ 2 }, world:rank() + 1)
    local function values(module)
      local a, b = module(x)
      return { a:item(), b:item() }
    end
    local own, all = (world:rank() + 1) ^ 2, 0
    for r = 1, n do all = all + r ^ 2 / n end
    peri.ffi.state.world = world
    local got = values(net)
    assert.near(all, got[1], 1e-6)
    assert.equal(own, got[2])
    assert.same({ own, own }, values(peri.DistributedModelParallel { module = net, group = half }))
    half:release()
  end, { sizes = { 2, 3 } })

  it("is of this rank alone in a world of one, and says what it cannot take", function()
    assert.equal(2.5, nn.global_mean(peri.tensor { 1, 2, 3, 4 }):item())
    assert.error_matches(function() nn.global_mean(peri.ones { 2 }, peri.ones { 2, 1 }) end,
      "global_mean: losses is tensor f32 %[2%] on cpu, weights is tensor f32 %[2, 1%].*, wanted the same shape")
    assert.error_matches(function() nn.global_mean(peri.ones { 2 }, nil, 7) end,
      "global_mean: group is a number, wanted a group of ranks")
    assert.error_matches(function() F.mse_loss(peri.ones { 2 }, peri.ones { 2 }, "global_mean") end,
      "reduction 'global_mean', allowed: none, mean, sum; for a mean over all ranks: nn.global_mean")
  end)
end)
