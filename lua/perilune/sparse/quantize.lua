-- quantize.lua: matrices whose rows are stored in 8, 4 or 2 bits a number, with a scale and a bias of their own:
-- FBGEMM's layouts.
local ffi = require "ffi"
local P = require "perilune.ffi"
local Tensor = require "perilune.tensor"
local A = require "perilune.jagged.arguments"
local signature = require "perilune.signature"
local C, check = P.C, P.check
local out = Tensor.out

local M = {}

--- Codes of rows by name: those of which tables have some (both 8-bit layouts have the same).
local codes, format_of, row_format = {}, ffi.new "peri_row_format", C.PERI_ROWS_INT8
while C.peri_row_format_name(row_format) ~= nil do
  check(C.peri_row_format_of(row_format, format_of))
  codes[ffi.string(C.peri_row_format_name(row_format)):lower():match "^[^_]*"] = format_of.codes
  row_format = row_format + 1
end
local spec = { codes = P.util.required, scale = P.util.optional, scale_first = false, alignment = 1, exponent_bits = 4,
  exponent_bias = 7 }

--- A format from named arguments: codes ("int8", "int4", "int2", "fp8"); scale: dtype of scale and bias ("f32", "f16",
--- or "none" for fp8; default "f32" for int8, "f16" for int4 and int2, "none" for fp8); scale_first; alignment of rows
--- in bytes; exponent_bits and exponent_bias of fp8 (4 and 7).
function M.format(args)
  local a = P.util.named("quantize.format", args, spec)
  if not codes[a.codes] then P.util.one_of("quantize.format", "codes", a.codes, P.util.keys(codes)) end
  local scale = a.scale or (a.codes == "int8" and "f32" or a.codes == "fp8" and "none" or "f16")
  local format = ffi.new "peri_row_format"
  format.codes, format.scale_dtype = codes[a.codes], scale == "none" and -1 or P.dtype(scale)
  format.scale_first, format.alignment = a.scale_first, a.alignment
  format.exponent_bits, format.exponent_bias = a.exponent_bits, a.exponent_bias
  M.row_bytes(format, 1) -- an error if it is none of those that exist
  return format
end

local bytes = ffi.new "int64_t[1]"

--- Bytes of a row of `cols` numbers.
function M.row_bytes(format, cols)
  check(C.peri_quantize_row_bytes(format, cols, bytes))
  return tonumber(bytes[0])
end

--- x [..., cols] (f32, f16, bf16) as u8 [..., bytes of a row]. min_max (optional, f32 [rows, 2]): least and largest
--- number to be represented.
function M.rows(x, format, min_max)
  check(C.peri_quantize_rows(Tensor.ptr(x), format, A.ptr(min_max), out))
  return Tensor.wrap(out[0])
end

--- u8 [..., bytes of a row] as numbers [..., cols] of dtype (f32, f16, bf16; default f32).
function M.restore(rows, format, cols, dtype)
  check(C.peri_quantize_restore(Tensor.ptr(rows), format, cols, P.dtype(dtype or "f32"), out))
  return Tensor.wrap(out[0])
end

signature.kind("RowFormat", "a format (of quantize.format)", function(x) return ffi.istype("peri_row_format", x) end)
signature.check("quantize.", M, { row_bytes = "format: RowFormat, cols: integer",
  rows = "x: tensor, format: RowFormat, min_max: tensor?",
  restore = "rows: tensor, format: RowFormat, cols: integer, dtype: dtype?" })

return M
