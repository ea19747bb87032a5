-- dense.lua: jagged tensors as padded dense ones, and back.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local A = require "perilune.jagged.arguments"
local permute = require "perilune.sparse.permute"
local signature = require "perilune.signature"
local C, check = P.C, P.check
local ptr, wrap, out = Tensor.ptr, Tensor.wrap, Tensor.out

local M = {}

local LEVELS = 5
local levels = ffi.new("peri_tensor *[?]", LEVELS)
local sizes = ffi.new("int64_t[?]", LEVELS)

local function fill(func, offsets)
  local n = #offsets
  if n < 1 or n > LEVELS then P.fail(("%s: %d levels of offsets, allowed: 1..%d"):format(func, n, LEVELS)) end
  util.settle(offsets)
  for i = 1, n do levels[i - 1] = ptr(offsets[i]) end
  return n
end

--- values [n, ...] under one or more levels of offsets (a list) as [bags, max_lengths[1], ..., ...]. With gradient.
function M.jagged_to_padded_dense(values, offsets, max_lengths, padding_value)
  local n = fill("jagged_to_padded_dense", offsets)
  if #max_lengths ~= n then P.fail(("jagged_to_padded_dense: %d sizes for %d levels"):format(#max_lengths, n)) end
  for i = 1, n do sizes[i - 1] = signature.value("jagged_to_padded_dense", "a size", max_lengths[i], "integer") end
  check(C.peri_sparse_jagged_to_dense(ptr(values), levels, sizes, n, padding_value or 0, out))
  return (wrap(out[0]))
end

--- The way back; members beyond a size of `dense` are 0. total_L (optional): number of values. With gradient. Returns
--- values, offsets.
function M.dense_to_jagged(dense, offsets, total_L)
  check(C.peri_sparse_dense_to_jagged(ptr(dense), levels, fill("dense_to_jagged", offsets), total_L or -1, out))
  return wrap(out[0]), offsets
end

local one = {}
local one_size = {}

local function single(values, offsets, max_length, padding)
  one[1], one_size[1] = offsets, max_length
  return M.jagged_to_padded_dense(values, one, one_size, padding)
end

function M.jagged_1d_to_dense(values, offsets, max_sequence_length, padding_value)
  return single(values, offsets, max_sequence_length, padding_value)
end

function M.jagged_2d_to_dense(values, offsets, max_sequence_length)
  return single(values, offsets, max_sequence_length, 0)
end

--- One dense tensor for each row of lengths [T, B]; the values of row t begin at offset_per_key[t + 1] (a list of T +
--- 1).
function M.stacked_jagged_1d_to_dense(values, lengths, offset_per_key, max_lengths_per_key, padding_value)
  local func, keys = "stacked_jagged_to_dense", lengths:size(1)
  if #offset_per_key ~= keys + 1 or #max_lengths_per_key ~= keys then
    P.fail(("%s: %d offsets and %d sizes for %d rows of lengths"):format(func, #offset_per_key, #max_lengths_per_key,
      keys))
  end
  local ends = permute.asynchronous_complete_cumsum(lengths)
  return P.util.map(max_lengths_per_key, function(max, t)
    local rows = values:slice(1, offset_per_key[t], offset_per_key[t + 1])
    return single(rows, ends:slice(1, t - 1, t):reshape(ends:size(2)), max, padding_value or 0)
  end)
end

--- Segments as rows: [bags, max_length, ...], padded with 0.
function M.pack_segments(t, lengths, max_length)
  return single(t, permute.asynchronous_complete_cumsum(lengths), max_length, 0)
end

--- The same; padded with -inf if pad_minf; with return_presence_mask also a bool [bags, max_length].
function M.pack_segments_v2(t, lengths, max_length, pad_minf, return_presence_mask)
  local offsets = permute.asynchronous_complete_cumsum(lengths)
  local packed = single(t, offsets, max_length, pad_minf and -math.huge or 0)
  if not return_presence_mask then return packed end
  local there = Tensor.full({ t:size(1) }, 1, "bool", t:device())
  return packed, single(there, offsets, max_length, 0)
end

--- The first max_truncated_length values of each bag.
function M.jagged_1d_to_truncated_values(values, lengths, max_truncated_length)
  local host = A.matrix("jagged_1d_to_truncated_values", "lengths", { lengths:to_list() })
  local kept = ffi.new("int64_t[?]", math.max(lengths:numel(), 1))
  for i = 0, lengths:numel() - 1 do kept[i] = host[i] < max_truncated_length and host[i] or max_truncated_length end
  local short = Tensor.from_memory(kept, { lengths:numel() }, "i64", values:device())
  local padded = single(values, permute.asynchronous_complete_cumsum(lengths), max_truncated_length, 0)
  return (M.dense_to_jagged(padded, { permute.asynchronous_complete_cumsum(short) }))
end

signature.check("sparse.", M, {
  jagged_to_padded_dense = "values: tensor, offsets: list, max_lengths: list, padding_value: number?",
  dense_to_jagged = "dense: tensor, offsets: list, total_L: integer?",
  jagged_1d_to_dense = "values: tensor, offsets: tensor, max_sequence_length: integer, padding_value: number?",
  jagged_2d_to_dense = "values: tensor, offsets: tensor, max_sequence_length: integer",
  stacked_jagged_1d_to_dense =
  "values: tensor, lengths: tensor, offset_per_key: list, max_lengths_per_key: list, padding_value: number?",
  pack_segments = "t: tensor, lengths: tensor, max_length: integer",
  pack_segments_v2 = "t: tensor, lengths: tensor, max_length: integer, pad_minf: boolean?, return_presence_mask: "
    .. "boolean?",
  jagged_1d_to_truncated_values = "values: tensor, lengths: tensor, max_truncated_length: integer",
}, 2)
M.stacked_jagged_2d_to_dense = M.stacked_jagged_1d_to_dense

return M
