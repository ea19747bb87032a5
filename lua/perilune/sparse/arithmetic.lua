-- arithmetic.lua: jagged operands in sums, products and softmax: the jagged one is padded, or the dense one cut. With
-- gradient.
local P = require "perilune.ffi"
local util = require "perilune.util"
local F = require "perilune.nn.functional"
local dense = require "perilune.sparse.dense"
local signature = require "perilune.signature"

local M = {}

--- An error unless a jagged and a dense operand fit: values [N, ...], y [B, a size for each level of offsets, ...].
local function check_pair(func, values, offsets, y)
  local levels, n = #offsets, values:dim() - 1
  local fits = levels > 0 and n >= 0 and y:dim() == 1 + levels + n and y:size(1) == offsets[1]:numel() - 1
  for d = 2, fits and values:dim() or 0 do fits = fits and values:size(d) == y:size(levels + d) end
  if not fits then
    local wanted = { levels > 0 and ("%d"):format(offsets[1]:numel() - 1) or "B" }
    for _ = 1, levels do wanted[#wanted + 1] = "L" end
    for d = 2, values:dim() do wanted[#wanted + 1] = ("%d"):format(values:size(d)) end
    P.fail(("sparse.%s: y is [%s], wanted [%s], for values [%s] and %s of offsets"):format(func,
      table.concat(y:shape(), ", "), table.concat(wanted, ", "), table.concat(values:shape(), ", "),
      util.number_of(levels, "level")))
  end
end

local function padded(values, offsets, y, padding)
  local sizes = {}
  for i = 1, #offsets do sizes[i] = y:size(i + 1) end
  return dense.jagged_to_padded_dense(values, offsets, sizes, padding)
end

local function cut(y, offsets, values) return (dense.dense_to_jagged(y, offsets, values:size(1))) end

--- x + y as dense; where x is not there: y.
function M.jagged_dense_elementwise_add(x_values, x_offsets, y)
  check_pair("jagged_dense_elementwise_add", x_values, x_offsets, y)
  return F.add(padded(x_values, x_offsets, y, 0), y)
end

--- x + y as jagged values (and the offsets).
function M.jagged_dense_elementwise_add_jagged_output(x_values, x_offsets, y)
  check_pair("jagged_dense_elementwise_add_jagged_output", x_values, x_offsets, y)
  return F.add(x_values, cut(y, x_offsets, x_values)), x_offsets
end

function M.jagged_dense_dense_elementwise_add_jagged_output(x_values, x_offsets, y_0, y_1)
  for _, y in ipairs { y_0, y_1 } do
    check_pair("jagged_dense_dense_elementwise_add_jagged_output", x_values, x_offsets, y)
  end
  return F.add(F.add(x_values, cut(y_0, x_offsets, x_values)), cut(y_1, x_offsets, x_values)), x_offsets
end

--- x * y as jagged values (and the offsets).
function M.jagged_dense_elementwise_mul(x_values, x_offsets, y)
  check_pair("jagged_dense_elementwise_mul", x_values, x_offsets, y)
  return F.mul(x_values, cut(y, x_offsets, x_values)), x_offsets
end

--- Softmax over each bag's values, column by column; members beyond max_L are 0.
function M.jagged_softmax(values, offsets, max_L)
  local all = dense.jagged_to_padded_dense(values, { offsets }, { max_L }, -math.huge)
  return (dense.dense_to_jagged(F.softmax(all, 2), { offsets }, values:size(1)))
end

--- Each bag's rows [n_b, D] times y[b] [D, T].
function M.jagged_dense_bmm(x_values, x_offsets, y, max_L)
  local all = dense.jagged_to_padded_dense(x_values, { x_offsets }, { max_L }, 0)
  return (dense.dense_to_jagged(F.bmm(all, y), { x_offsets }, x_values:size(1)))
end

--- For each bag the sum over its rows of x y': [bags, D, T].
function M.jagged_jagged_bmm(x_values, y_values, x_offsets, max_L)
  local x = dense.jagged_to_padded_dense(x_values, { x_offsets }, { max_L }, 0)
  local y = dense.jagged_to_padded_dense(y_values, { x_offsets }, { max_L }, 0)
  return F.bmm(x:transpose(2, 3), y)
end

--- v [bags * heads, max] times the rows [n, heads * D] of each bag, head by head: [bags * heads, D].
function M.batched_dense_vec_jagged_2d_mul(v, a_values, a_offsets)
  local bags, heads, columns = a_offsets:numel() - 1, 1, nil
  if v:dim() == 2 and a_values:dim() == 2 then
    if bags > 0 then heads = v:size(1) / bags end
    columns = a_values:size(2) / heads
  end
  if not columns or heads < 1 or heads % 1 ~= 0 or columns % 1 ~= 0 then
    P.fail(("sparse.batched_dense_vec_jagged_2d_mul: v [%s], a_values [%s] and %d bags, wanted v [bags * heads, L] and "
      .. "a_values [N, heads * D]"):format(table.concat(v:shape(), ", "), table.concat(a_values:shape(), ", "), bags))
  end
  local max = v:size(2)
  local rows = dense.jagged_to_padded_dense(a_values, { a_offsets }, { max }, 0):reshape(bags, max, heads,
    columns):transpose(2, 3)
  return F.bmm(v:reshape(bags * heads, 1, max), rows:reshape(bags * heads, max, columns)):reshape(bags * heads, columns)
end

--- A [m, batch, k] times B [batch, k, n], plus bias [batch, n]: [m, batch, n].
function M.permute102_baddbmm_permute102(bias, A, B)
  local product = F.bmm(A:transpose(1, 2), B)
  return F.add(product, bias:reshape(bias:size(1), 1, bias:size(2))):transpose(1, 2):contiguous()
end

signature.check("sparse.", M, {
  jagged_dense_elementwise_add = "x_values: tensor, x_offsets: tensors, y: tensor",
  jagged_dense_elementwise_add_jagged_output = "x_values: tensor, x_offsets: tensors, y: tensor",
  jagged_dense_dense_elementwise_add_jagged_output = "x_values: tensor, x_offsets: tensors, y_0: tensor, y_1: tensor",
  jagged_dense_elementwise_mul = "x_values: tensor, x_offsets: tensors, y: tensor",
  jagged_softmax = "values: tensor, offsets: tensor, max_L: integer",
  jagged_dense_bmm = "x_values: tensor, x_offsets: tensor, y: tensor, max_L: integer",
  jagged_jagged_bmm = "x_values: tensor, y_values: tensor, x_offsets: tensor, max_L: integer",
  batched_dense_vec_jagged_2d_mul = "v: tensor, a_values: tensor, a_offsets: tensor",
  permute102_baddbmm_permute102 = "bias: tensor, A: tensor, B: tensor",
}, 2)

return M
