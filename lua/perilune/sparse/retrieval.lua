-- retrieval.lua: exact search for the items with the largest products: the last step of two-tower models.
local ffi = require "ffi"
local P = require "perilune.ffi"
local Tensor = require "perilune.tensor"
local signature = require "perilune.signature"
require "perilune.sparse.quantize" -- the kind RowFormat
local C, check = P.C, P.check
local out = Tensor.out
local indices_out = ffi.new "peri_tensor *[1]"

local M = {}

--- For each row of queries [Q, D] the k items with the largest products, the largest first, of equal ones the one with
--- the smaller number first: scores f32 [Q, k] and indices i64 [Q, k]. items: [N, D] of f32, f16, bf16, or with
--- `format` (of quantize.format) rows of codes (quantize.rows). Nothing of size Q x N is made; no gradient. k: 1 to
--- 2048.
function M.top_products(queries, items, k, format)
  check(C.peri_top_products(Tensor.ptr(queries), Tensor.ptr(items), format, k, out, indices_out))
  return Tensor.wrap(out[0]), Tensor.wrap(indices_out[0])
end

signature.check("sparse.", M, { top_products = "queries: tensor, items: tensor, k: count, format: RowFormat?" }, 2)

return M
