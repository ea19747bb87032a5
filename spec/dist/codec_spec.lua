-- Codecs of quantised communication: FBGEMM's bits, stated error bounds, splits of any size, the registry.
local golden = require "spec.support.golden"
local peri = require "perilune"
local codec = require "perilune.dist.codec"
local Codec = codec.QuantizedCommCodec

local devices = { "cpu", "opaque" }

local function bytes_equal(case, name, got)
  local want, dtype = case:bytes(name)
  assert.equal(dtype, got:dtype(), name)
  local buffer, n = got:read()
  local ffi = require "ffi"
  assert.equal(want, ffi.string(buffer, n * ffi.sizeof(dtype == "u8" and "uint8_t" or dtype == "f32" and "float"
    or "uint16_t")), name)
end

--- Every sort of codec: arguments, and its bound of |x - back| for the row's largest magnitude a and range r
--- (perilune/codec.h).
local sorts = {
  { { comm_precision = "FP32" }, function() return 0 end },
  { { comm_precision = "FP16" }, function(x) return 2 ^ -11 * math.abs(x) + 2 ^ -25 end, most = 65504 },
  { { comm_precision = "FP16", loss_scale = 24 }, function(x) return 2 ^ -11 * math.abs(x) * 1.001 + 2 ^ -25 / 24 end,
    most = 65504 / 24 },
  { { comm_precision = "BF16" }, function(x) return 2 ^ -8 * math.abs(x) + 2 ^ -133 end },
  { { comm_precision = "BF16", loss_scale = 1000 }, function(x) return 2 ^ -8 * math.abs(x) * 1.001 + 2 ^ -133 end },
  { { comm_precision = "FP8" }, function(x) return 2 ^ -4 * math.abs(x) + 2 ^ -18 end, most = 0.9375 },
  { { comm_precision = "FP8", exponent_bits = 5 }, function(x) return 2 ^ -3 * math.abs(x) + 2 ^ -33 end,
    most = 0.875 },
  { { comm_precision = "FP8", row_dim = 13 }, function(x, a)
    return (2 ^ -4 * math.abs(x) + 2 ^ -18 * (a + 1e-20) / 0.9375) * 1.001
  end }, { { comm_precision = "FP8", row_dim = 32, is_fwd = false },
    function(x, a) return (2 ^ -3 * math.abs(x) + 2 ^ -33 * (a + 1e-20) / 0.875) * 1.001 end },
  { { comm_precision = "INT8" }, function(_, a, r) return r / 509 + 2 ^ -22 * a + math.min(r, 1e-8) end },
  { { comm_precision = "INT8", row_dim = 7 }, function(_, a, r) return r / 509 + 2 ^ -22 * a + math.min(r, 1e-8) end },
}
for _, mode in ipairs(codec.rounding_modes) do
  sorts[#sorts + 1] = { { comm_precision = "MX4", rounding_mode = mode }, function(_, a) return a / 4 + 2 ^ -128 end }
end

--- The largest magnitude and the range of the row of element i (from 1) of a split.
local function row_of(list, first, n, row, i)
  local start = first + math.floor((i - first) / row) * row
  local a, low, high = 0, math.huge, -math.huge
  for k = start, math.min(start + row, first + n) - 1 do
    a, low, high = math.max(a, math.abs(list[k])), math.min(low, list[k]), math.max(high, list[k])
  end
  return a, high - low
end

local function check_bound(sort, device, splits, numbers)
  local args, bound = sort[1], sort[2]
  local c = Codec(args)
  local ctx = c:create_context(splits)
  local x = peri.tensor(numbers, "f32", device)
  local given, wire = x:to_list(), c:encode(x, ctx)
  local sum = 0
  for i, size in ipairs(ctx:wire_splits()) do
    assert.equal(size, c:calc_quantized_size(splits[i]))
    sum = sum + size
  end
  assert.equal(sum, wire:numel())
  assert.equal(c:quantized_dtype(), wire:dtype())
  local back, at = c:decode(wire, ctx):to_list(), 1
  assert.equal(#given, #back)
  for _, n in ipairs(splits) do
    for i = at, at + n - 1 do
      local a, r = row_of(given, at, n, math.max(c.row_dim, 1), i)
      local x_i = sort.most and math.max(-sort.most, math.min(sort.most, given[i])) or given[i]
      local off = math.abs(x_i - back[i])
      local limit = bound(x_i, a, r)
      if not (off <= limit) then -- luacheck: ignore 581 (NaN fails)
        error(("%s: %.9g came back as %.9g: error %g, bound %g"):format(tostring(c), given[i], back[i], off, limit))
      end
    end
    at = at + n
  end
end

local function numbers(n, kind, seed)
  local u = n > 0 and peri.Tensor.uniform({ n }, -1, 1, seed, 0, "f32", "cpu"):to_list() or {}
  for i = 1, n do
    if kind == "wide" then u[i] = u[i] * 10 ^ ((i * 7) % 13 - 6)
    elseif kind == "zeros" then u[i] = i % 5 == 0 and u[i] or 0
    elseif kind == "shifted" then u[i] = 1000 + u[i]
    elseif kind == "tiny" then u[i] = u[i] * 1e-38 end
  end
  return u
end

describe("codecs", function()
  it("write FBGEMM's bits", function()
    for _, device in ipairs(devices) do
      for _, name in ipairs(golden.names("ops/quant", "^codec_")) do
        local case = golden.load(name)
        local precision = case.args.comm_precision:upper()
        -- Two of FBGEMM's rows: INT8 always has rows of 32, whatever row_dim it is given.
        local c = Codec { comm_precision = precision, loss_scale = case.args.loss_scale, row_dim = precision == "MX4"
          and 32 or nil }
        local x, ctx = case:tensor("in.input", device), c:create_context()
        assert.equal(case.args.calc_quantized_size, c:calc_quantized_size(x:numel()))
        local wire = c:encode(x, ctx)
        bytes_equal(case, "out.encoded", wire)
        case:assert_near("out.decoded", c:decode(wire, ctx))
        case:assert_near("out.decoded", c:decode(case:tensor("out.encoded", device))) -- without a context
      end
      for _, name in ipairs(golden.names("ops/quant", "^hfp8_")) do
        local case = golden.load(name)
        local c = Codec { comm_precision = "FP8", exponent_bits = case.args.ebits, exponent_bias = case.args.bias }
        local wire = c:encode(case:tensor("in.input", device))
        bytes_equal(case, "out.quantized", wire)
        golden.assert_near(case:list "out.dequantized", c:decode(wire):to_list(), case.tol, case.name)
        local codes = case:tensor("in.codes", device):reshape(256)
        golden.assert_near(case:list "out.codes_as_f32", c:decode(codes):to_list(), case.tol, case.name)
      end
      for _, name in ipairs(golden.names("ops/quant", "^mx4_")) do
        local case = golden.load(name)
        local shape = case:shape "in.input"
        local splits = {}
        for i = 1, shape[1] do splits[i] = shape[2] end
        for _, mode in ipairs(case.args.rounding and { case.args.rounding }
          or { "ceil", "even", "floor", "nearest" }) do
          local c = Codec { comm_precision = "MX4", row_dim = case.args.group_size, rounding_mode = mode:upper() }
          local ctx = c:create_context(splits)
          local wire = c:encode(case:tensor("in.input", device), ctx)
          local name_of = case:has "out.quantized" and "out.quantized" or "out." .. mode
          bytes_equal(case, name_of, wire)
          if case:has "out.dequantized" then
            local width, want, got = case:shape "out.dequantized"[2], case:list "out.dequantized",
              c:decode(wire, ctx):to_list()
            local unpadded = {}
            for r = 0, shape[1] - 1 do
              for i = 1, shape[2] do unpadded[#unpadded + 1] = want[r * width + i] end
            end
            golden.assert_near(unpadded, got, case.tol, case.name)
          end
        end
      end
    end
  end)

  it("keep their stated error bounds, for splits of any size", function()
    for _, device in ipairs(devices) do
      for s, sort in ipairs(sorts) do
        for k, kind in ipairs { "plain", "wide", "zeros", "shifted", "tiny" } do
          peri.scope(check_bound, sort, device, { 64, 0, 1, 33, 5, 0, 100 }, numbers(203, kind, 10 * s + k))
        end
        peri.scope(check_bound, sort, device, {}, {})
        peri.scope(check_bound, sort, device, { 0, 0 }, {})
        peri.scope(check_bound, sort, device, { 1 }, { -3 })
        peri.scope(check_bound, sort, device, { 4 }, { 0, 0, 0, 0 })
      end
    end
  end)

  it("keep equal splits apart from each other", function() -- a row never reaches across two ranks
    for _, sort in ipairs(sorts) do
      if sort[1].rounding_mode ~= "STOCHASTIC" then -- its random numbers count the rows of the message
        local c = Codec(sort[1])
        local parts, splits, wires, all = {}, { 40, 3, 71 }, {}, {}
        for i, n in ipairs(splits) do
          parts[i] = peri.tensor(numbers(n, "wide", i))
          for _, b in ipairs(c:encode(parts[i]):to_list()) do wires[#wires + 1] = b end
          for _, x in ipairs(parts[i]:to_list()) do all[#all + 1] = x end
        end
        assert.same(wires, c:encode(peri.tensor(all), c:create_context(splits)):to_list())
      end
    end
  end)

  it("do what they say with numbers that are not finite", function()
    local inf, nan = math.huge, 0 / 0
    local function back(args, list) return Codec(args):decode(Codec(args):encode(peri.tensor(list))):to_list() end
    golden.assert_near({ 65504, -65504, nan, 65504, 1 }, back({ comm_precision = "FP16" }, { inf, -inf, nan, 1e6, 1 }))
    local bf = back({ comm_precision = "BF16" }, { inf, nan })
    assert.is_true(bf[1] > 3.38e38 and bf[1] < inf and bf[2] ~= bf[2])
    golden.assert_near({ 0.9375, -0.9375, 0.5 }, back({ comm_precision = "FP8" }, { inf, -inf, 0.5 }))
    for _, sort in ipairs { "FP8", "INT8", "MX4" } do
      local c = Codec { comm_precision = sort, row_dim = 4 }
      local ctx = c:create_context { 8 }
      local list = c:decode(c:encode(peri.tensor { 1, inf, 2, 3, 1, 2, 2, 1 }, ctx), ctx):to_list()
      for i = 1, 4 do assert.is_true(list[i] ~= list[i], sort) end
      for i = 5, 8 do assert.is_true(list[i] == list[i], sort) end
    end
  end)

  it("give the worked example of 8-bit rows", function()
    local x = peri.tensor { 2, -1, 0.3, 0.01 }
    local forward = Codec { comm_precision = "FP8", row_dim = 4 }
    local wire = forward:encode(x)
    assert.equal(12, wire:numel())
    golden.assert_near({ 2, -1, 0.3, 0.0104167 }, forward:decode(wire):to_list(), { rel = 1e-5 })
    local backward = Codec { comm_precision = "FP8", row_dim = 4, is_fwd = false }
    golden.assert_near({ 2, -1, 0.285714, 0.00892857 }, backward:decode(backward:encode(x)):to_list(), { rel = 1e-5 })
    local plain = Codec { comm_precision = "FP8" }
    assert.same({ 0.9375, 0.5, 0.3125, 0.9375 }, plain:decode(plain:encode(peri.tensor { 1, .5, .3, 3 })):to_list())
  end)

  it("round stochastically by their seed", function()
    local x = peri.tensor(numbers(3200, "plain", 4))
    local function wire(seed)
      return Codec({ comm_precision = "MX4", rounding_mode = "STOCHASTIC", seed = seed }):encode(x):to_list()
    end
    assert.same(wire(3), wire(3))
    assert.not_same(wire(3), wire(4))
  end)

  it("reach the registry by operation and direction", function()
    assert.is_nil(codec.get_qcomm_codecs_registry {})
    local registry = codec.get_qcomm_codecs_registry {
      forward = "FP8", backward = "BF16", backward_loss_scale = 16, fp8_quantize_dim = 8,
    }
    assert.same(peri.util.keys(codec.CommOp), peri.util.keys(registry))
    local codecs = registry.POOLED_EMBEDDINGS_ALL_TO_ALL
    assert.equal("FP8", codecs.forward.comm_precision)
    assert.equal(8, codecs.forward.row_dim)
    assert.equal(16, codecs.backward.loss_scale)
    local one = codec.get_qcomm_codecs_registry({ forward = "MX4", backward = "FP8", fp8_quantize_dim_bwd = 4,
      mx4_quantize_dim = 16 }, { "SEQUENCE_EMBEDDINGS_ALL_TO_ALL" })
    assert.same({ "SEQUENCE_EMBEDDINGS_ALL_TO_ALL" }, peri.util.keys(one))
    assert.equal(16, one.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.forward.row_dim)
    local backward = one.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.backward
    local ctx = backward:create_context()
    golden.assert_near({ 1, 0.285714 }, backward:decode(backward:encode(peri.tensor { 1, 0.3 }, ctx), ctx):to_list(),
      { abs = 1e-3 })
    assert.equal(64, Codec({ comm_precision = "INT8" }):padded_size(33))
  end)

  it("refuse what they cannot do", function()
    local function fails(pattern, f, ...)
      local ok, err = pcall(f, ...)
      assert.is_false(ok)
      assert.truthy(tostring(err):find(pattern, 1, true), tostring(err))
    end
    fails("comm_precision is 'FP4'", Codec, { comm_precision = "FP4" })
    fails("no argument 'scale'", Codec, { scale = 1 })
    fails("loss_scale is -1", Codec, { comm_precision = "FP16", loss_scale = -1 })
    fails("only FP16 and BF16 have one", Codec, { comm_precision = "INT8", loss_scale = 2 })
    fails("row_dim 5, allowed: even numbers in MX4", Codec, { comm_precision = "MX4", row_dim = 5 })
    fails("row_dim 4, allowed: 0..2^20 in FP8, INT8 and MX4, else 0", Codec, { comm_precision = "BF16", row_dim = 4 })
    fails("6 exponent bits, allowed: 2..5", Codec, { comm_precision = "FP8", exponent_bits = 6 })
    fails("rounding_mode is 'UP'", Codec, { comm_precision = "MX4", rounding_mode = "UP" })
    local c = Codec { comm_precision = "INT8" }
    local ctx = c:create_context { 3, 4 }
    fails("a split is -1", c.create_context, c, { -1 })
    fails("has 8 elements, the splits take 7", c.encode, c, peri.ones { 8 }, ctx)
    fails("the message", c.encode, c, peri.ones({ 7 }, "f64"), ctx)
    fails("has 79 elements, the splits take 80", c.decode, c, peri.full({ 79 }, 0, "u8"), ctx)
    fails("is f32", c.decode, c, peri.ones { 80 }, ctx)
    fails("allowed: multiples of 40", c.decode, c, peri.full({ 41 }, 0, "u8"))
    fails("the context is of", Codec({ comm_precision = "INT8" }).encode, Codec { comm_precision = "FP16" },
      peri.ones { 7 }, ctx)
    fails("an operation is 'all_to_all'", codec.get_qcomm_codecs_registry, { forward = "FP16" }, { "all_to_all" })
    fails("comm_ops is 'x', wanted a list", codec.get_qcomm_codecs_registry, { forward = "FP16" }, "x")
    fails("forward_loss_scale 2 for MX4", codec.get_qcomm_codecs_registry, { forward = "MX4", forward_loss_scale = 2 })
    fails("forward is a string", codec.QuantizedCommCodecs, { forward = "FP16" })
  end)

  it("leave nothing behind", function()
    collectgarbage() collectgarbage()
    local before = tonumber(peri.ffi.C.peri_mem_objects())
    for _ = 1, 20 do
      peri.scope(function()
        local c = Codec { comm_precision = "MX4" }
        local ctx = c:create_context { 5, 6 }
        c:decode(c:encode(peri.ones { 11 }, ctx), ctx)
      end)
    end
    collectgarbage() collectgarbage()
    assert.equal(before, tonumber(peri.ffi.C.peri_mem_objects()))
  end)
end)
