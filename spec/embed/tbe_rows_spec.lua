-- Rows of bytes, outputs of f16 and bf16, tables without pooling; FBGEMM's tables for inference
-- (spec/golden/ops/quant/table_*).
-- cuda: always
local peri = require "perilune"
local golden = require "spec.support.golden"

local formats = { int8 = "INT8_HALF", int4 = "INT4", int2 = "INT2", fp8 = "FP8", f16 = "FP16", f32 = "FP32" }
local quantized = { INT8_HALF = true, INT4 = true, INT2 = true, FP8 = true }

--- Blocks of `features` features, one for each table, of `batch` samples: pooled side by side, or one row an id.
local function blocks_of(dims, batch, pooled)
  local blocks, width, column = {}, 0, 0
  for _, dim in ipairs(dims) do width = width + dim end
  for f, dim in ipairs(dims) do
    blocks[f] = {
      table = f, first_bag = (f - 1) * batch, bags = batch, out_offset = pooled and column or 0, out_stride = pooled
        and width or dim,
    }
    column = column + dim
  end
  return blocks, width
end

for _, device in ipairs(require "spec.support.devices") do
  describe("rows of bytes on " .. device, function()
    local function t(list, dtype, shape) return peri.tensor(list, dtype, device, shape) end
    local function table_batch(data_type, more)
      local args = { tables = { { name = "a", rows = 4, cols = 3 } }, data_type = data_type,
        fused_params = { optimizer = "none" }, device = device }
      for key, value in pairs(more or {}) do args[key] = value end
      return peri.embed.tbe.new(args)
    end

    --- Table i of a case of FBGEMM's, as a table batch that has only this one: a table batch has one format.
    local function table_of(case, i)
      local a, format = case.args, formats[case.args.types[i]]
      local batch = peri.embed.tbe.new { tables = { { name = "t" .. i, rows = a.rows[i], cols = a.dims[i],
        pooling = a.pooling:upper() } }, data_type = format, output_dtype = a.output_type,
          fused_params = { optimizer = "none" }, device = device }
      local numbers = case:tensor(("in.table%d.float"):format(i - 1), device)
      if not quantized[format] then
        batch:write(1, "weight", 0, numbers)
        return batch
      end
      -- without the rows' padding
      local bytes = case:tensor(("in.table%d.bytes"):format(i - 1), device):slice(2, 0, batch:state(1):size(2))
      batch:write(1, "weight", 0, bytes:contiguous())
      local other = table_batch(format, { tables = { { name = "t", rows = a.rows[i], cols = a.dims[i] } } })
      other:write(1, "weight", 0, numbers)
      assert.same(bytes:to_list(), other:state(1):to_list(), "the bytes that the numbers become")
      return batch
    end

    for _, name in ipairs(golden.names("ops/quant", "^table_")) do
      it("reproduces " .. name, function()
        local case = golden.load(name)
        local a = case.args
        local pooled = a.pooling ~= "none"
        local ids, offsets = case:tensor("in.indices", device), case:tensor("in.offsets", device)
        local weights = case:tensor("in.per_sample_weights", device)
        local blocks, width = blocks_of(a.dims, a.batch, pooled)
        local shape = { pooled and a.batch or ids:numel(), pooled and width or a.dims[1] }
        local out = peri.zeros(shape, a.output_type, device)
        for i, block in ipairs(blocks) do
          local batch = table_of(case, i)
          block.table = 1
          batch:forward(ids, offsets, batch:blocks { block }, out, weights)
          if #blocks == 1 then
            local same = batch:lookup(ids, offsets, batch:blocks { block }, shape[1], shape[2], weights)
            assert.same({ a.output_type, out:to_list() }, { same:dtype(), same:to_list() })
          end
        end
        case:assert_near("out.output", out)
      end)
    end

    it("looks rows of many tables up in one call", function()
      for format in peri.util.ordered(quantized) do
        local dims, tables = { 1, 5, 16, 30, 67 }, {}
        for i, cols in ipairs(dims) do tables[i] = { name = "t" .. i, rows = 3 + i, cols = cols } end
        local fused, rows = { optimizer = "none", bounds_check_mode = "IGNORE" }, {}
        local batch = table_batch(format, { tables = tables, fused_params = fused })
        local blocks, width = blocks_of(dims, 2, true)
        for i, cols in ipairs(dims) do
          batch:write(i, "weight", 0, peri.Tensor.uniform({ 3 + i, cols }, -1, 1, 7, i, "f32", device))
          rows[i] = batch:read(i, "weight", 0, peri.zeros({ 3 + i, cols }, "f32", device)):to_list()
        end
        -- Of each feature two bags: rows 0 and 3 with weights 1 and 2 (and an id that is no row), and row 2 with -0.5
        -- beside a pruned one.
        local ids, offsets, weights = {}, { 0 }, {}
        for i = 1, #dims do
          for k, x in ipairs { { 0, 1 }, { 3, 2 }, { 99, 7 }, { 2, -0.5 }, { -1, 9 } } do
            ids[5 * i - 5 + k], weights[5 * i - 5 + k] = x[1], x[2]
          end
          offsets[2 * i], offsets[2 * i + 1] = 5 * i - 2, 5 * i
        end
        local want, column = {}, 0
        for i, cols in ipairs(dims) do
          for d = 1, cols do
            want[column + d] = rows[i][d] + 2 * rows[i][3 * cols + d]
            want[width + column + d] = -0.5 * rows[i][2 * cols + d]
          end
          column = column + cols
        end
        local out = batch:lookup(t(ids, "i32"), t(offsets, "i64"), batch:blocks(blocks), 2, width, t(weights, "f32"))
        golden.assert_near(want, out:to_list(), { abs = 1e-6, rel = 1e-6 }, format)
        assert.equal(#dims, batch:statistics().bad_ids)
      end
    end)

    it("writes and reads numbers and bytes", function()
      for data_type, slack in peri.util.ordered { INT8 = 0.01, INT8_HALF = 0.01, FP8 = 0.07, INT4 = 0.07,
        INT2 = 0.35 } do
        local b = table_batch(data_type)
        assert.same({ 0, 0, 0 }, b:read(1, "weight", 3, peri.zeros({ 1, 3 }, "f32", device)):to_list(),
          "zeros at first")
        b:write(1, "weight", 1, t({ 0.5, -1, 1, 0.25, 0.75, -0.125 }, "f32", { 2, 3 }))
        local got = b:read(1, "weight", 1, peri.zeros({ 2, 3 }, "f32", device))
        golden.assert_near({ 0.5, -1, 1, 0.25, 0.75, -0.125 }, got:to_list(), { abs = slack, rel = 0 }, data_type)
        assert.same(got:to_list(), b:read(1, "weight", 1, peri.zeros({ 2, 3 }, "f64", device)):to_list())
        local bytes = peri.zeros({ 2, b:state(1):size(2) }, "u8", device)
        b:read(1, "weight", 1, bytes)
        local other = table_batch(data_type)
        other:write(1, "weight", 0, bytes)
        local list = other:blocks { { table = 1, first_bag = 0, bags = 2, out_offset = 0, out_stride = 3 } }
        assert.same(got:to_list(), other:lookup(t({ 0, 1 }, "i64"), t({ 0, 1, 2 }, "i64"), list, 2, 3):to_list(),
          data_type)
      end
    end)

    it("writes FBGEMM's bytes", function()
      local b = table_batch "INT8"
      b:write(1, "weight", 0, t({ -1, 0, 1.55 }, "f32", { 1, 3 })) -- scale 0.01, bias -1
      local bytes = b:read(1, "weight", 0, peri.zeros({ 1, 11 }, "u8", device)):to_list()
      assert.same({ 0, 100, 255 }, { bytes[1], bytes[2], bytes[3] })
      assert.same({ 0, 0, 0x80, 0xbf }, { bytes[8], bytes[9], bytes[10], bytes[11] })
    end)

    it("refuses what rows of bytes cannot do", function()
      assert.error_matches(function() table_batch("INT8", { fused_params = { optimizer = "sgd" } }) end,
        "rows of bytes, allowed: 0 %(none%)")
      local constant = { { name = "a", rows = 4, cols = 3, init = peri.embed.constant(1) } }
      assert.error_matches(function() table_batch("FP8", { tables = constant }) end,
        "init 3 for rows of bytes, allowed: 4")
      assert.error_matches(function() table_batch("FP32", { output_dtype = "i64" }) end,
        "output_dtype i64, allowed: f32, f16, bf16")
      local b = table_batch "INT8"
      assert.error_matches(function() b:leaf(1) end, "leaves, whose gradients are f32, are f32")
      assert.error_matches(function() b:write(1, "weight", 0, peri.zeros({ 1, 4 }, "f32", device)) end,
        "table 'a', which has 3 columns %(or, as u8, 11 bytes a row%)")
      assert.error_matches(function() b:write(1, "weight", 4, peri.zeros({ 1, 3 }, "f32", device)) end, "allowed: 0..4")
      assert.error_matches(function() b:write(2, "weight", 0, peri.zeros({ 1, 3 }, "f32", device)) end,
        "table 1, allowed: 0..0")
      assert.error_matches(function() b:write(1, "weight", 0, peri.zeros({ 1, 12 }, "u8", device)) end, "columns: 11")
      local list = b:blocks { { table = 1, first_bag = 0, bags = 1, out_offset = 0, out_stride = 3 } }
      local weights = t({ 1 }, "f32")
      weights:requires_grad()
      local out = b:lookup(t({ 0 }, "i64"), t({ 0, 1 }, "i64"), list, 1, 3, weights)
      assert.error_matches(function() out:backward(peri.zeros({ 1, 3 }, "f32", device)) end,
        "rows of bytes have no gradients")
    end)

    it("passes gradients of narrow outputs on in f32", function()
      local b = table_batch("FP32", { fused_params = { optimizer = "sgd", learning_rate = 1 }, output_dtype = "bf16" })
      b:write(1, "weight", 0, peri.full({ 4, 3 }, 2, "f32", device))
      local list = b:blocks { { table = 1, first_bag = 0, bags = 2, out_offset = 0, out_stride = 3 } }
      local out = b:lookup(t({ 0, 1, 1 }, "i64"), t({ 0, 2, 3 }, "i64"), list, 2, 3)
      assert.same({ "bf16", { 4, 4, 4, 2, 2, 2 } }, { out:dtype(), out:to_list() })
      out:backward(t({ 0.5, 0.5, 0.5, 0.25, 0.25, 0.25 }, "bf16", { 2, 3 }))
      assert.same({ 1.5, 1.5, 1.5, 1.25, 1.25, 1.25 },
        b:read(1, "weight", 0, peri.zeros({ 2, 3 }, "f32", device)):to_list())
    end)

    it("gives every id its row without pooling, at its place among all ids", function()
      local tables = { { name = "a", rows = 4, cols = 3, pooling = "NONE" }, { name = "b", rows = 2, cols = 2 } }
      local b = table_batch("FP32",
        { tables = tables, fused_params = { optimizer = "none", bounds_check_mode = "WARNING" } })
      b:write(1, "weight", 0, t({ 0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3 }, "f32", { 4, 3 }))
      b:write(2, "weight", 0, t({ 5, 6, 7, 8 }, "f32", { 2, 2 }))
      local list = b:blocks {
        { table = 2, first_bag = 0, bags = 1, out_offset = 0, out_stride = 2 },
        { table = 1, first_bag = 1, bags = 2, out_offset = 2, out_stride = 3 },
      }
      local ids, offsets = t({ 0, 1, 3, -1, 2 }, "i64"), t({ 0, 2, 4, 5 }, "i64")
      local out = b:lookup(ids, offsets, list, 17)
      assert.same({ 12, 14, 0, 0, 0, 0, 0, 0, 3, 3, 3, 0, 0, 0, 2, 2, 2 }, out:to_list())
      out:backward(t({ 1, 1, 9, 9, 9, 9, 9, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9 }, "f32"))
      assert.same({ 0, 0, 0, 0, 0, 0, 7, 8, 9, 1, 2, 3 }, b:leaf(1):grad():to_list())
      assert.same({ 1, 1, 1, 1 }, b:leaf(2):grad():to_list())
      assert.error_matches(function() b:lookup(ids, offsets, list, 16) end, "the blocks write up to element 16")
    end)
  end)
end
