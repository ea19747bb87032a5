-- 200 steps of a small DCN v2 beside PyTorch's, in f32 and under autocast: spec/golden/ops/autocast/dcn.json, which
-- tests/parity/autocast.py makes. Losses under autocast lie as near to PyTorch's as PyTorch's own runs, seven on one
-- processor, lie to one another. Each instruction set has an order of sums, thus a run, of its own; that of the
-- reference kernels, which nobody trains with, is a little farther away.
local ffi = require "ffi"
local peri = require "perilune"
local golden = require "spec.support.golden"
local F, nn = peri.nn.functional, peri.nn

local DENSE, COLUMNS, DIM, RANK, BATCH, BATCHES, STEPS = 13, 64, 16, 16, 128, 40, 200
local BOTTOM, TOP = { 64, 32, DIM }, { 64, 32 }
local state

--- n numbers of the generator of tests/parity/autocast.py.
local function draw(n, low, high)
  local out = {}
  for i = 1, n do
    state = state * 16807 % 2147483647
    out[i] = low + (high - low) * state / 2147483647
  end
  return out
end

local function model_on(device)
  state = 1
  local params, n = {}, COLUMNS + DIM
  local function parameter(...)
    local shape, size = { ... }, 1
    for _, s in ipairs(shape) do size = size * s end
    local bound = shape[#shape] ^ -0.5
    local p = peri.tensor(draw(size, -bound, bound), "f32", device, shape):requires_grad()
    params[#params + 1] = p
    return p
  end
  local function mlp(from, sizes)
    local layers = {}
    for i, to in ipairs(sizes) do
      layers[i] = { parameter(to, from), parameter(to) }
      from = to
    end
    return layers
  end
  local bottom, v, w, bias = mlp(DENSE, BOTTOM), {}, {}, {}
  for l = 1, 3 do v[l], w[l], bias[l] = parameter(RANK, n), parameter(n, RANK), parameter(n) end
  local top, last = mlp(n, TOP), { parameter(1, TOP[#TOP]), parameter(1) }
  local function forward(dense, pooled)
    local x = dense
    for _, layer in ipairs(bottom) do x = F.linear(x, layer[1], layer[2], F.activations.relu) end
    x = F.cross_net(F.cat({ x, pooled }, 2), v, w, bias)
    for _, layer in ipairs(top) do x = F.linear(x, layer[1], layer[2], F.activations.relu) end
    return F.linear(x, last[1], last[2]):reshape(-1)
  end
  return forward, params
end

local function batches_on(device)
  state = 2
  local list = {}
  for k = 1, BATCHES do
    local dense, pooled, noise = draw(BATCH * DENSE, -1, 1), draw(BATCH * COLUMNS, -1, 1), draw(BATCH, -1, 1)
    local d, p = peri.tensor(dense, "f32", device, { BATCH, DENSE }),
      peri.tensor(pooled, "f32", device, { BATCH, COLUMNS })
    local dd, pp, labels = d:to_list(), p:to_list(), {}
    for i = 1, BATCH do
      local x = dd[(i - 1) * DENSE + 1] * dd[(i - 1) * DENSE + 2] + pp[(i - 1) * COLUMNS + 1] + noise[i]
      labels[i] = x > 0 and 1 or 0
    end
    list[k] = { d, p, peri.tensor(labels, "f32", device) }
  end
  return list
end

local function train(device, enabled)
  local forward, params = model_on(device)
  local optimizer, data, losses = nn.optim.Adagrad { params = params, lr = 0.005 }, batches_on(device), {}
  for step = 1, STEPS do
    peri.scope(function()
      local b = data[(step - 1) % BATCHES + 1]
      optimizer:zero_grad()
      local loss = peri.autocast({ device = device, enabled = enabled }, function()
        return F.binary_cross_entropy_with_logits(forward(b[1], b[2]), b[3])
      end)
      loss:backward()
      optimizer:step()
      losses[step] = loss:item()
    end)
  end
  return losses
end

--- Largest distance of two lists.
local function apart(a, b)
  local most = 0
  for i = 1, STEPS do most = math.max(most, math.abs(a[i] - b[i])) end
  return most
end

describe("200 steps beside PyTorch's", function()
  local want = golden.document "ops/autocast/dcn"
  local own = 0
  for _, a in ipairs(want.autocast) do
    for _, b in ipairs(want.autocast) do own = math.max(own, apart(a, b)) end
  end

  it("in f32", function() assert.is_true(apart(want.f32, train("cpu", false)) < 1e-4) end)

  it("under autocast to bf16", function()
    local got, nearest = train("cpu", true), math.huge
    for _, losses in ipairs(want.autocast) do nearest = math.min(nearest, apart(losses, got)) end
    local allowed = (ffi.string(peri.ffi.C.peri_cpu_isa()) == "ref" and 1.5 or 1) * own
    if nearest > allowed then
      error(("%.6f from the nearest of PyTorch's runs, which are up to %.6f apart"):format(nearest, own))
    end
    assert.is_true(apart(want.f32, got) > 1e-5)
  end)
end)
