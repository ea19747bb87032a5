-- Row-wise quantization: FBGEMM's bytes (spec/golden/ops/quant), what other layouts hold, bad input.
-- cuda: always
local peri = require "perilune"
local golden = require "spec.support.golden"
local ffi = require "ffi"
local Q = peri.sparse.quantize

local function assert_bytes(case, name, got)
  local bytes = case:bytes(name)
  assert.same(case:shape(name), got:shape(), name)
  local buffer = got:read()
  local text = ffi.string(buffer, #bytes)
  for i = 1, #bytes do
    if bytes:byte(i) ~= text:byte(i) then
      error(("%s: byte %d is %d, wanted %d"):format(name, i - 1, text:byte(i), bytes:byte(i)), 2)
    end
  end
end

local exact, close = { abs = 0, rel = 0 }, { abs = 0, rel = 1e-6 }
local int8 = Q.format { codes = "int8" }

local checks = {}

--- f32 scale and bias behind the codes.
function checks.int8_rowwise(case, device)
  local x = case:tensor("in.input", device)
  local rows = Q.rows(x, int8)
  assert_bytes(case, "out.quantized", rows)
  local cols = x:size(2)
  if case:has "out.dequantized" then case:assert_near("out.dequantized", Q.restore(rows, int8, cols), close) end
  for _, name in ipairs { "f16", "f16_or" } do
    if case:has("out.dequantized_" .. name) then
      case:assert_near("out.dequantized_" .. name, Q.restore(rows, int8, cols, "f16"), exact)
    end
  end
  for _, name in ipairs { "bf16", "bf16_op" } do
    if case:has("out.dequantized_" .. name) then
      -- FBGEMM's ties go up
      case:assert_near("out.dequantized_" .. name, Q.restore(rows, int8, cols, "bf16"), { abs = 0, rel = 2 ^ -8 })
    end
  end
end

--- f16 scale and bias in front of the codes: what quantized tables look like.
function checks.int8_rowwise_half_front(case, device)
  local format = Q.format { codes = "int8", scale = "f16", scale_first = true }
  case:assert_near("out.dequantized", Q.restore(case:tensor("in.quantized", device), format,
    case:shape("out.dequantized")[2]))
end

function checks.sbhalf(case, device)
  local x, format = case:tensor("in.input", device), Q.format { codes = "int" .. case.args.bit_rate, scale = "f16" }
  local rows = Q.rows(x, format) -- FBGEMM's CPU operator ignores rowwise_min_max; see "limits" below
  assert_bytes(case, "out.quantized", rows)
  if case:has "out.dequantized" then case:assert_near("out.dequantized", Q.restore(rows, format, x:size(2)), close) end
  if case:has "out.quantized_from_half" then
    local half = Q.rows(case:tensor("in.input_half", device), format)
    assert_bytes(case, "out.quantized_from_half", half)
    case:assert_near("out.dequantized_half", Q.restore(rows, format, x:size(2), "f16"), exact)
  end
end

function checks.hfp8(case, device)
  local format = Q.format { codes = "fp8", exponent_bits = case.args.ebits, exponent_bias = case.args.bias }
  local x = case:tensor("in.input", device)
  local rows = Q.rows(x, format)
  assert_bytes(case, "out.quantized", rows)
  case:assert_near("out.dequantized", Q.restore(rows, format, x:size(2)), exact)
  case:assert_near("out.codes_as_f32", Q.restore(case:tensor("in.codes", device), format, 256), exact)
end

--- Numbers alone, which tensors convert by themselves. FBGEMM rounds ties of bf16 away from zero; we round them to
--- even.
function checks.conversions(case, device)
  local x = case:tensor("in.f32", device)
  if case:has "in.f32_bits" then
    x = peri.Tensor.from_memory(case:bytes "in.f32_bits", case:shape "in.f32", "f32", device)
  end
  for _, dtype in ipairs { "f16", "bf16" } do
    local back = "out." .. dtype .. "_back"
    if case:has(back) then case:assert_near(back, x:to(dtype):to "f32", exact) end
  end
end

function checks.half_to_float(case, device)
  for dtype, name in pairs { f16 = "out.f16_as_f32", bf16 = "out.bf16_as_f32" } do
    local bits = peri.Tensor.from_memory(case:bytes "in.bits", case:shape "in.bits", dtype, device)
    case:assert_near(name, bits:to "f32", exact)
  end
end

--- Clamped to the finite range first.
function checks.float_conversions_clamped(case, device)
  local x = peri.Tensor.from_memory((case:bytes "in.f32"), case:shape "in.f32", "f32", device)
  for dtype, most in pairs { f16 = 65504, bf16 = 3.3895313892515355e38 } do
    local want = peri.Tensor.from_memory((case:bytes("out." .. dtype .. "_bits")), case:shape "in.f32", dtype):to_list()
    local numbers = x:to_list()
    for i, y in ipairs(numbers) do
      if y == y then numbers[i] = math.max(-most, math.min(most, y)) end
    end
    golden.assert_near(want, peri.tensor(numbers, "f32", device):to(dtype):to_list(), exact, dtype)
  end
end

--- FBGEMM adds half a unit and cuts: ties go away from zero, where ours go to even; all else is the same.
function checks.bfloat16_quantized(case, device)
  local bytes = case:bytes "in.input"
  local words, n = ffi.cast("const uint32_t *", bytes), #bytes / 4
  -- casts keep nothing alive
  local own, theirs = case:tensor("in.input", device):to("bf16"):read(), case:bytes "out.quantized_bits"
  local got, want = ffi.cast("const uint16_t *", own), ffi.cast("const uint16_t *", theirs)
  for i = 0, n - 1 do
    local magnitude = bit.band(words[i], 0x7fffffff)
    if magnitude > 0x7f800000 then assert.is_true(bit.band(got[i], 0x7fff) > 0x7f80)
    elseif bit.band(words[i], 0xffff) == 0x8000 then assert.is_true(got[i] % 2 == 0 and math.abs(got[i] - want[i]) <= 1)
    else assert.equal(want[i], got[i]) end
  end
end

checks.float_conversions = checks.conversions
checks.int8_rowwise_to_half = checks.int8_rowwise

local function check_of(name)
  if name:match "_sbhalf_" then return checks.sbhalf end
  if name:match "^hfp8" then return checks.hfp8 end
  if checks[name] then return checks[name] end
  if name:match "^int8_rowwise" then return checks.int8_rowwise end
end

for _, device in ipairs(require "spec.support.devices") do
  describe("quantized rows as FBGEMM's on " .. device, function()
    for _, name in ipairs(golden.names "ops/quant") do
      local case = golden.load(name)
      local check = check_of(case.name) -- codecs and tables are reproduced elsewhere
      if check then it(case.name, function() check(case, device) end) end
    end
  end)
end

-- -- our own promises -------------------------------------------------------------------------------------------------

local formats = {
  { codes = "int8" }, { codes = "int8", scale = "f16" }, { codes = "int8", scale_first = true }, { codes = "int4" },
  { codes = "int2" }, { codes = "int8", scale = "f16", scale_first = true, alignment = 16 },
  { codes = "int4", scale_first = true, alignment = 16 }, { codes = "fp8" },
  { codes = "fp8", scale = "f32", exponent_bits = 4, exponent_bias = 15 },
  { codes = "fp8", scale = "f32", exponent_bits = 5, exponent_bias = 31, scale_first = true },
}

for _, device in ipairs(require "spec.support.devices") do
  describe("quantized rows on " .. device, function()
    it("come back within a step of their scale", function()
      for _, args in ipairs(formats) do
        local format = Q.format(args)
        for _, cols in ipairs { 1, 2, 3, 17, 64, 100, 1023 } do
          local x = peri.Tensor.uniform({ 2, 3, cols }, -2, 3, cols, 0, "f32", device)
          local rows = Q.rows(x, format)
          assert.same({ 2, 3, Q.row_bytes(format, cols) }, rows:shape())
          local want, got = x:to_list(), Q.restore(rows, format, cols):to_list()
          local step = ({ int8 = 5 / 255 * 0.51, int4 = 5 / 15 * 0.51, int2 = 5 / 3 * 0.51 })[args.codes]
          for i = 1, #want do
            local allowed = step and step + 0.004 or math.abs(want[i]) * 2 ^ -((args.exponent_bits or 4) == 5 and 3
              or 4) + 0.01
            if math.abs(want[i] - got[i]) > allowed then
              error(("%s of %d: %g came back as %g"):format(args.codes, cols, want[i], got[i]))
            end
          end
          for _, dtype in ipairs { "f16", "bf16" } do
            local narrow = x:to(dtype)
            assert.same(Q.rows(narrow:to "f32", format):to_list(), Q.rows(narrow, format):to_list())
            assert.same(Q.restore(rows, format, cols):to(dtype):to_list(),
              Q.restore(rows, format, cols, dtype):to_list())
          end
        end
      end
    end)

    it("take rows that are views, empty, or without columns", function()
      local x = peri.Tensor.uniform({ 6, 4 }, -1, 1, 3, 0, "f32", device)
      local turned = x:transpose(1, 2)
      assert.same(Q.rows(turned:contiguous(), int8):to_list(), Q.rows(turned, int8):to_list())
      assert.same({ 0, 12 }, Q.rows(peri.zeros({ 0, 4 }, "f32", device), int8):shape())
      assert.same({ 0, 0, 0, 0, 0, 0, 0, 0 }, Q.rows(peri.zeros({ 1, 0 }, "f32", device), int8):to_list())
    end)

    it("keep limits that are given", function() -- FBGEMM's CPU operator does not
      local x = peri.tensor({ { -3, -1, 0, 1, 9, 0.5, 0.25, -0.5 } }, "f32", device)
      for bits, most in pairs { [2] = 3, [4] = 15, [8] = 255 } do
        local format = Q.format { codes = "int" .. bits, scale = "f16" }
        local back = Q.restore(Q.rows(x, format, peri.tensor({ { -1, 1 } }, "f32", device)), format, 8):to_list()
        for i, y in ipairs(x:to_list()) do
          local clamped = math.max(-1, math.min(1, y))
          assert(math.abs(back[i] - clamped) <= 1 / most + 2e-3, ("%d bits: %g for %g"):format(bits, back[i], clamped))
        end
      end
    end)

    it("show rows that cannot be represented as NaN", function()
      local huge, inf = 3e38, math.huge
      local x = peri.tensor({ { 1, 0 / 0, 2 }, { 1, inf, 2 }, { -huge, huge, 0 }, { 1, 2, 3 } }, "f32", device)
      for _, args in ipairs(formats) do
        if args.codes ~= "fp8" then
          local format = Q.format(args)
          local back = Q.restore(Q.rows(x, format), format, 3):to_table()
          for r = 1, 3 do
            for c = 1, 3 do assert(back[r][c] ~= back[r][c], args.codes .. " row " .. r) end
          end
          assert(math.abs(back[4][3] - 3) < 0.01)
        end
      end
      local fp8 = Q.format { codes = "fp8" }
      local back = Q.restore(Q.rows(peri.tensor({ 1000, inf, -inf }, "f32", device), fp8), fp8, 3):to_list()
      assert.same({ 240, 240, -240 }, back)
      for _, dtype in ipairs { "f32", "f16", "bf16" } do
        assert.error_matches(function() Q.rows(peri.tensor({ { 1, inf }, { -inf, 0 / 0 } }, dtype, device), fp8) end,
          "row 1, number 1 is nan, which fp8 without a scale has no code for")
      end
    end)

    it("name what is wrong", function()
      local function bad(pattern, f, ...)
        local args, n = { ... }, select("#", ...)
        assert.error_matches(function() f(unpack(args, 1, n)) end, pattern)
      end
      local x = peri.zeros({ 2, 4 }, "f32", device)
      bad("codes is 'int3', allowed: fp8, int2, int4, int8", Q.format, { codes = "int3" })
      bad("argument 'codes' is missing", Q.format, {})
      bad("scales of f32, allowed: f16", Q.format, { codes = "int4", scale = "f32" })
      bad("scales of bf16, allowed: f32, f16", Q.format, { codes = "int8", scale = "bf16" })
      bad("scales of no dtype, allowed: f32, f16", Q.format, { codes = "int8", scale = "none" })
      bad("fp8 rows with scales of f16, allowed: f32, none", Q.format, { codes = "fp8", scale = "f16" })
      bad("6 exponent bits, allowed: 2..5", Q.format, { codes = "fp8", exponent_bits = 6 })
      bad("exponent bias %-1, allowed: 0..63", Q.format, { codes = "fp8", exponent_bias = -1 })
      bad("alignment %-1, allowed: 1..4096", Q.format, { codes = "int8", alignment = -1 })
      bad("x is i64 %[1%]", Q.rows, peri.zeros({ 1 }, "i64", device), int8)
      bad("x is f32 %[%]", Q.rows, peri.zeros({}, "f32", device), int8)
      bad("min_max is f32 %[2, 2%] for 2 rows, wanted two numbers a row, and f16", Q.rows, x, int8,
        peri.zeros({ 2, 2 }, "f32", device))
      bad("min_max is f32 %[1, 2%]", Q.rows, x, Q.format { codes = "int4" }, peri.zeros({ 1, 2 }, "f32", device))
      bad("rows are u8 %[2, 11%], wanted 12 bytes for 4", Q.restore, peri.zeros({ 2, 11 }, "u8", device), int8, 4)
      bad("rows", Q.restore, x, int8, 4)
      bad("dtype f64, allowed", Q.restore, peri.zeros({ 2, 12 }, "u8", device), int8, 4, "f64")
      bad("rows of %-1 numbers", Q.row_bytes, int8, -1)
    end)
  end)
end
