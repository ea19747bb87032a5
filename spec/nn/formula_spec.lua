-- Formulas (tensor/formula.lua, peri_op_formula): each step is the function that it is called after, bit for bit and
-- with its gradients, on both devices; sums and means over dimensions are those of the elements.
-- cuda: always
local ffi = require "ffi"
local peri = require "perilune"
local Tensor = require "perilune.tensor"
local F = require "perilune.nn.functional"
local P = require "perilune.ffi"
local formula = require "perilune.tensor.formula"
local C = P.C
local NONE, MEAN, SUM = C.PERI_LOSS_NONE, C.PERI_LOSS_MEAN, C.PERI_LOSS_SUM

local of_one = { relu = {}, sigmoid = {}, tanh = {}, exp = {}, sqrt = {}, silu = {}, gelu = {}, softplus = {},
  logsigmoid = {}, leaky_relu = { 0.2 }, log = {}, abs = {}, square = {}, pow = { 1.5 }, affine = { -2, 0.5 },
  reciprocal = { 3 }, clamp = { 0.3, 0.6 }, log1p = {}, expm1 = {}, rsqrt = {}, sin = {}, cos = {}, erf = {},
  floor = {}, ceil = {}, round = {}, trunc = {}, sign = {} }
local of_two = { add = F.add, sub = F.sub, mul = F.mul, div = F.div, maximum = F.maximum, minimum = F.minimum }
local comparisons = { "eq", "ne", "lt", "le", "gt", "ge" }

--- Two equal leaves of numbers in [0.1, 0.9), with a number of steps so that some of two of them are equal.
local function leaves(shape, dtype, device, stream)
  local x = Tensor.uniform(shape, 0, 1, 5, stream, dtype, device):affine(8, 1):floor():affine(0.1, 0)
  return x:detach():requires_grad(), x:detach():clone():requires_grad()
end

local function same(what, a, b)
  assert.same(a:shape(), b:shape(), what)
  assert.is_true(F.equal(a, b), what .. ": " .. tostring(a) .. tostring(b))
end

--- f and g of equal leaves have the same bits, and so have their gradients, of different upstream ones.
local function alike(what, shapes, dtype, device, f, g)
  local mine, theirs = {}, {}
  for i, shape in ipairs(shapes) do mine[i], theirs[i] = leaves(shape, dtype, device, i) end
  local y, z = f(unpack(mine)), g(unpack(theirs))
  same(what, y, z)
  local up = Tensor.uniform(y:shape(), -1, 1, 6, 1, dtype, device)
  y:backward(up)
  z:backward(up)
  for i = 1, #shapes do
    if theirs[i]:grad() then same(what .. ", gradient", mine[i]:grad(), theirs[i]:grad()) end
  end
end

for _, device in ipairs(require("spec.support.devices")) do
  describe("formulas on " .. device, function()
    for _, dtype in ipairs { "f32", "f64" } do
      it("have steps that are the functions of one element, " .. dtype, function()
        for name, numbers in peri.util.ordered(of_one) do
          local one = formula("test", 1, 0, function(f, x) return f[name](x, unpack(numbers)) end)
          alike(name, { { 3, 7 } }, dtype, device, function(x) return one(NONE, nil, false, x) end,
            function(x) return F[name](x, unpack(numbers)) end)
        end
      end)
      it("have steps that are the functions of two elements, broadcast, " .. dtype, function()
        for name, of in peri.util.ordered(of_two) do
          local two = formula("test", 2, 0, function(f, x, y) return f[name](x, y) end)
          for _, shapes in ipairs { { { 3, 7 }, { 3, 7 } }, { { 2, 1, 5 }, { 3, 1 } }, { {}, { 4 } },
            { { 0, 3 }, { 3 } } } do
            alike(name, shapes, dtype, device, function(x, y) return two(NONE, nil, false, x, y) end, of)
          end
        end
      end)
      it("choose by comparisons, " .. dtype, function()
        for _, name in ipairs(comparisons) do
          local two = formula("test", 2, 1, function(f, x, y, n)
            return f.where(f[name](x, y), f.mul(x, f.number(n)), f.add(y, x))
          end)
          alike(name, { { 3, 150 }, { 150 } }, dtype, device,
            function(x, y) return two(NONE, nil, false, x, y, 3) end,
            function(x, y) return F.where(F[name](x, y), x * 3, y + x) end)
        end
      end)
    end
    it("are added up over dimensions", function()
      local product = formula("test", 2, 0, function(f, x, y) return f.mul(f.sin(x), y) end)
      for _, dim in ipairs { false, 1, -1, { 1, 3 }, { 2 } } do
        for _, keepdim in ipairs { true, false } do
          for code, reduce in pairs { [SUM] = F.sum, [MEAN] = F.mean } do -- any order: each by itself
            local of = dim or nil
            local x, same_x = leaves({ 3, 4, 5 }, "f64", device, 1)
            local y, same_y = leaves({ 4, 1 }, "f64", device, 2)
            local got, want = product(code, of, keepdim, x, y), reduce(same_x:sin() * same_y, of, keepdim)
            assert.same(want:shape(), got:shape())
            got:square():sum():backward()
            want:square():sum():backward()
            for _, pair in ipairs { { got, want }, { x:grad(), same_x:grad() }, { y:grad(), same_y:grad() } } do
              assert.is_true(F.allclose(pair[1], pair[2], 1e-12, 1e-13))
            end
          end
        end
      end
    end)
    it("round a result of 16 bits once", function()
      local third = formula("test", 1, 0, function(f, x) return f.square(f.affine(x, 1 / 3, 0)) end)
      local x = Tensor.uniform({ 40 }, 0, 1, 1, 1, "f32", device):to "f16"
      same("f16", third(NONE, nil, false, x), third(NONE, nil, false, x:to "f32"):to "f16")
      local integers = peri.tensor({ 1, 2, 3 }, "i64", device)
      assert.equal("f32", third(NONE, nil, false, integers):dtype())
    end)
  end)
end

it("a model that is recorded hears of the steps, which give what the formula gives", function()
  local watch, heard = require("perilune.signature").watch, {}
  local x, y = Tensor.uniform({ 4, 6 }, -1, 1, 1, 1), Tensor.uniform({ 4, 6 }, -1, 1, 1, 2)
  local calls = {
    abs = function() return F.huber_loss(x, y, 0.5, "sum") end, expm1 = function() return F.elu(x) end,
    where = function() return F.lerp(x, y, y) end, rsqrt = function() return F.rms_norm(x) end,
    log = function() return F.logsumexp(x, 2) end, div = function() return F.normalize(x) end,
    pow = function() return F.norm(x, 3, 1) end, square = function() return F.var(x, 1) end,
    softplus = function() return F.sigmoid_focal_loss(x, x:gt(0):to "f32") end,
  }
  for step, call in peri.util.ordered(calls) do
    local want = call()
    watch.call = function(func, f, ...)
      heard[func] = true
      return f(...)
    end
    local ok, got = pcall(call)
    watch.call = false
    assert.is_true(ok, got)
    assert.is_true(F.allclose(got, want, 1e-6, 1e-6), step)
    assert.is_true(heard[step], step)
  end
end)

it("losses of 16-bit numbers have their dtype", function()
  for _, dtype in ipairs { "f16", "bf16" } do
    local t = {}
    for _, p in ipairs { 1, 2 } do
      local leaf = {}
      for i = 1, 3 do
        leaf[i] = Tensor.uniform({ 4, 8 }, -1, 1, 1, i):requires_grad()
        t[i] = leaf[i]:to(dtype)
      end
      local loss = F.triplet_margin_loss(t[1], t[2], t[3], 1, p)
      assert.equal(dtype, loss:dtype())
      loss:backward()
      for i = 1, 3 do assert.equal("f32", leaf[i]:grad():dtype()) end
    end
    assert.equal(dtype, F.cosine_embedding_loss(t[1], t[2], peri.ones({ 4 }, dtype)):dtype())
    assert.equal(dtype, F.l1_loss(t[1], t[2]):dtype())
  end
end)

it("a formula that C cannot read is refused, and says what is allowed", function()
  local x, out = peri.ones { 2 }, ffi.new "peri_tensor *[1]"
  local steps, numbers, inputs = ffi.new("int32_t[12]"), ffi.new("double[1]"), ffi.new("peri_tensor *[1]", x.ptr)
  local function refused(message, n_steps, ...)
    for i = 0, 11 do steps[i] = select(i + 1, ...) or 0 end
    local f = P.struct "peri_formula"
    f.steps, f.numbers, f.n_in, f.n_steps, f.n_numbers = steps, numbers, 1, n_steps, 1
    local ok, err = pcall(function() P.check(C.peri_op_formula(f, inputs, out)) end)
    assert.is_false(ok)
    assert.matches(message, tostring(err), 1, true)
  end
  local exp, sub = C.peri_formula_code "exp", C.peri_formula_code "sub"
  assert.equal(-1, C.peri_formula_code "no such step")
  refused("0 steps, allowed: 1..4 and 1..64", 0)
  refused("step 0 is {-1, 0, 0, 0, 0, 0}", 1, -1)
  refused("step 1 is", 2, exp, 0, 0, 0, 0, 0, sub, 0, 2, 0, 0, 0) -- a register of its own
  refused("registers before 1, and two of 1 numbers", 1, exp, 0, 0, 0, 1, 0)
end)


it("allclose is true of equal tensors of all sizes, and false where one element of many differs", function()
  for _, dtype in ipairs { "f64", "f32", "f16", "bf16" } do
    for n = 1, 300 do
      local a = peri.ones({ n }, dtype)
      assert.is_true(F.allclose(a, a:clone()), n)
    end
    local a = peri.ones({ 70000 }, dtype)
    local b = a:clone()
    b:slice(1, 69999, 70000):fill(5)
    assert.is_false(F.allclose(a, b), dtype)
    assert.is_false(F.equal(a, b), dtype)
    assert.is_true(F.any(F.sub(a, b)):item() ~= 0, dtype)
  end
  local a = peri.ones({ 2 ^ 25 + 1 })
  local b = a:clone()
  b:slice(1, 0, 1):fill(5)
  assert.is_false(F.allclose(a, b))
end)

describe("losses", function()
  -- PyTorch 2.14: "not implemented for 'Long'", or no mean of integers; those in f32 are f32 there.
  it("are of floats, and refuse integers where PyTorch has no loss of them", function()
    local whole, other = peri.tensor({ { 1, 2 }, { 3, 4 } }, "i64"), peri.tensor({ { 2, 0 }, { 1, 1 } }, "i64")
    local calls = { l1_loss = { whole, other }, huber_loss = { whole, other }, smooth_l1_loss = { whole, other },
      kl_div = { whole, other }, hinge_embedding_loss = { whole, other }, mse_loss = { whole, other },
      nll_loss = { whole, peri.tensor({ 0, 1 }, "i64") }, sigmoid_focal_loss = { whole, other },
      bpr_loss = { whole, other }, cosine_similarity = { whole, other },
      binary_cross_entropy_with_logits = { whole, other } }
    for name, arguments in peri.util.ordered(calls) do
      assert.error_matches(function() F[name](unpack(arguments)) end, "i64.*allowed: f", nil, nil, name)
    end
    assert.equal("f32", F.l1_loss(whole, other:to "f32"):dtype())
    assert.equal("f32", F.margin_ranking_loss(whole, other, whole):dtype())
    assert.equal("f32", F.triplet_margin_loss(whole, other, whole):dtype())
    assert.equal("f32", F.cosine_embedding_loss(whole, other, peri.tensor { 1, -1 }):dtype())
  end)
end)
