-- select.lua: members of bags by mask and by place, rows of several matrices by index. With gradient.
local ffi = require "ffi"
local P = require "perilune.ffi"
local Tensor = require "perilune.tensor"
local A = require "perilune.jagged.arguments"
local signature = require "perilune.signature"
local C, check = P.C, P.check
local ptr, wrap, out = Tensor.ptr, Tensor.wrap, Tensor.out

local M = {}

local lengths_out = ffi.new "peri_tensor *[1]"

local function both()
  local lengths = wrap(lengths_out[0])
  return wrap(out[0]), lengths
end

--- The values of bags for which `mask` (bool) is true, and the lengths that are left.
function M.masked_select_jagged_1d(values, lengths, mask)
  check(C.peri_sparse_masked_select(ptr(values), ptr(lengths), ptr(mask), out, lengths_out))
  local kept, left = both()
  return kept, left -- no tail call (signature.lua, guard)
end

--- At most slice_length members of each bag from place start[b] (0 .. its length) on, and how many there are.
function M.jagged_slice(x_values, x_lengths, start, slice_length)
  check(C.peri_sparse_slice(ptr(x_values), ptr(x_lengths), ptr(start), slice_length, out, lengths_out))
  local kept, left = both()
  return kept, left -- no tail call (signature.lua, guard)
end

local batch_args = ffi.new "peri_batch_select_args"
local host = {} -- the host arrays that batch_args points at: alive until the next call

--- Rows of several matrices, which lie one after the other in `inputs` (one dimension): lists of how many indices each
--- matrix has, its rows and its columns. The result, of one dimension, has the selected rows matrix by matrix;
--- permuted: the first one of every matrix, then the second one, ...
function M.batch_index_select_dim0(inputs, indices, input_num_indices, input_rows, input_columns,
  permute_output_dim_0_1)
  local func = "batch_index_select_dim0"
  local counts, _, n = A.matrix(func, "input_num_indices", { input_num_indices })
  local rows, _, n_rows = A.matrix(func, "input_rows", { input_rows })
  local columns, _, n_columns = A.matrix(func, "input_columns", { input_columns })
  if n_rows ~= n or n_columns ~= n then
    P.fail(("%s: %d input_num_indices, %d input_rows, %d input_columns, wanted equally many"):format(func, n, n_rows,
      n_columns))
  end
  host.counts, host.rows, host.columns = counts, rows, columns
  local a = batch_args
  a.n, a.num_indices, a.rows, a.columns = n, host.counts, host.rows, host.columns
  a.permute_output_dim_0_1 = permute_output_dim_0_1 or false
  check(C.peri_sparse_batch_index_select(ptr(inputs), ptr(indices), a, out))
  return (wrap(out[0]))
end

signature.check("sparse.", M, {
  masked_select_jagged_1d = "values: tensor, lengths: tensor, mask: tensor",
  jagged_slice = "x_values: tensor, x_lengths: tensor, start: tensor, slice_length: integer",
  batch_index_select_dim0 =
    "inputs: tensor, indices: tensor, input_num_indices: any, input_rows: any, input_columns: any, "
    .. "permute_output_dim_0_1: boolean?",
}, 2)

return M
