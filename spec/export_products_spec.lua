-- Products in model files: in f32, bf16 and int8 their sums are those written out, and no number of rows changes them.
local ffi = require "ffi"
local peri = require "perilune"
local bits = require "spec.support.bits"
local nn, F = peri.nn, peri.nn.functional
local P = peri.ffi
ffi.cdef "float fmaf(float a, float b, float c);"

local function batch(n, seed) return { dense_features = peri.Tensor.uniform({ n, 13 }, -1, 1, seed) } end

describe("a model file", function()
  local path
  before_each(function() path = os.tmpname() end)
  after_each(function() os.remove(path) end)

  local function export(model, options)
    options.batches = { batch(40, 3), batch(150, 4) }
    return model:export(path, options), peri.export.open(path)
  end

  local Linear, number = nn.Module:extend "Linear", ffi.new "float[1]"
  function Linear:init() self.linear = nn.Linear { in_features = 13, out_features = 19 } end
  function Linear:forward(b) return self.linear(b.dense_features) end
  local function f32(v)
    number[0] = v
    return tonumber(number[0])
  end

  it("has products of bf16, whose sums are those written out, for samples together and alone", function()
    local model, b = Linear(), batch(37, 9)
    local report, file = export(model, { dense = "bf16_products", allowed_difference = 0.05 })
    assert.is_true(report.difference > 0)
    local x, w = b.dense_features:to("bf16"):to("f32"):read(), model.linear.weight:to("bf16"):to("f32"):read()
    local bias, y = model.linear.bias:read(),
      file:predict({ dense_features = b.dense_features }).logits:read()
    for r = 0, 36 do
      local alone = file:predict({ dense_features = b.dense_features:slice(1, r, r + 1) }).logits:read()
      for c = 0, 18 do
        local sums = { 0, 0 } -- of even and of odd k
        for k = 0, 12 do sums[k % 2 + 1] = ffi.C.fmaf(x[r * 13 + k], w[c * 13 + k], sums[k % 2 + 1]) end
        assert.equal(f32(f32(sums[1] + sums[2]) + bias[c]), y[r * 19 + c])
        assert.equal(y[r * 19 + c], alone[c])
      end
    end
  end)

  it("has matrices of int8: codes and a scale for each column, whose sums are those written out", function()
    local model = Linear()
    local function largest(numbers, at)
      local most = 0
      for k = at, at + 12 do most = math.max(most, math.abs(numbers[k])) end
      return most
    end
    for _, dense in ipairs { "int8", "int8_products" } do
      local report, file = export(model, { dense = dense, allowed_difference = 0.05 })
      assert.is_true(report.difference > 0)
      local b = batch(3, 9)
      local x, w, bias = b.dense_features:read(), model.linear.weight:read(), model.linear.bias:read()
      local y = file:predict({ dense_features = b.dense_features }).logits:read()
      local whole = dense == "int8_products"
      local times = f32(127 / largest(x, 0))
      for c = 0, 18 do
        local scale, sum = f32(largest(w, c * 13) / 127), 0
        for k = 0, 12 do
          local code = math.floor(f32(w[c * 13 + k] / scale) + 0.5)
          sum = whole and sum + code * math.floor(x[k] * times + 0.5) or ffi.C.fmaf(x[k], code, sum)
        end
        local s = f32(sum * scale)
        assert.equal(f32((whole and f32(s * f32(largest(x, 0) / 127)) or s) + bias[c]), y[c])
      end
    end
  end)
end)

describe("products in order", function()
  it("do not depend on the number of rows, and add one after the other", function()
    local x, w = peri.Tensor.uniform({ 70, 37 }, -1, 1, 1), peri.Tensor.uniform({ 19, 37 }, -1, 1, 2)
    peri.export.ordered(function()
      local y = F.linear(x, w)
      local a, b, c = x:read(), w:read(), y:read()
      for _, at in ipairs { { 0, 0 }, { 69, 18 }, { 33, 16 } } do
        local sum = 0
        for k = 0, 36 do sum = ffi.C.fmaf(a[at[1] * 37 + k], b[at[2] * 37 + k], sum) end
        assert.equal(sum, c[at[1] * 19 + at[2]])
      end
      for _, n in ipairs { 1, 2, 5, 6, 64 } do
        assert.equal(bits(y:slice(1, 0, n):contiguous()), bits(F.linear(x:slice(1, 0, n), w)))
      end
      assert.equal(bits(y), bits(F.matmul(x, w:transpose(1, 2))))
    end)
    assert.is_false(P.C.peri_products_ordered())
  end)
end)
