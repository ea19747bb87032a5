-- batches.lua: lists of inputs put together, and batches of candidates in another order.
local F = require "perilune.nn.functional"
local P = require "perilune.ffi"
local Tensor = require "perilune.tensor"
local permute = require "perilune.sparse.permute"
local signature = require "perilune.signature"

local M = {}

local function numbers(list, dtype, device) return Tensor.tensor(list, dtype, device) end

--- [batch][table][candidate] -> [table][batch * candidates]: positions of the segments that come next to each other.
local function reordered(func, segments, batch_offsets, num_ads_in_batch)
  local ends = batch_offsets:to_list()
  local batches = #ends - 1
  if batches < 1 or ends[1] ~= 0 or ends[#ends] ~= num_ads_in_batch then
    P.fail(("%s: batch_offsets from %s to %s, wanted 0 to %d"):format(func, tostring(ends[1]), tostring(ends[#ends]),
      num_ads_in_batch))
  end
  local tables = num_ads_in_batch > 0 and segments / num_ads_in_batch or 0
  if tables ~= math.floor(tables) then
    P.fail(("%s: %d lengths for %d candidates, wanted a multiple"):format(func, segments, num_ads_in_batch))
  end
  local order = {}
  for t = 0, tables - 1 do
    for b = 1, batches do
      local ads = ends[b + 1] - ends[b]
      for ad = 0, ads - 1 do order[#order + 1] = ends[b] * tables + t * ads + ad end
    end
  end
  return order
end

--- Lengths of bags from [batch][table][candidate] to [table][candidate of all batches].
function M.reorder_batched_ad_lengths(cat_ad_lengths, batch_offsets, num_ads_in_batch)
  local order = reordered("reorder_batched_ad_lengths", cat_ad_lengths:numel(), batch_offsets, num_ads_in_batch)
  return permute.index_select_dim0(cat_ad_lengths, numbers(order, "i64", cat_ad_lengths:device()))
end

--- Their ids; cat_ad_offsets are complete.
function M.reorder_batched_ad_indices(cat_ad_offsets, cat_ad_indices, batch_offsets, num_ads_in_batch)
  local ends, lengths = cat_ad_offsets:to_list(), {}
  for i = 1, #ends - 1 do lengths[i] = ends[i + 1] - ends[i] end
  local order = reordered("reorder_batched_ad_indices", #lengths, batch_offsets, num_ads_in_batch)
  local device = cat_ad_indices:device()
  local _, ids = permute.permute_1D_sparse_data(numbers(order, "i64", device), numbers(lengths, "i64", device),
    cat_ad_indices)
  return ids
end

--- The ids of input `i` as i32, which must hold them.
local function narrow(func, i, t)
  if t:dtype() == "i64" then
    local wide, n = t:read()
    for at = 0, n - 1 do
      if wide[at] < -2 ^ 31 or wide[at] >= 2 ^ 31 then
        P.fail(("%s: id %s of input %d does not fit i32, in which the ids are put together"):format(func,
          tostring(wide[at]):gsub("LL", ""), i))
      end
    end
  end
  return t:to "i32"
end

--- The ids of several inputs as one (i32), and their weights: an input without weights counts 1.
local function combined(func, indices_list, weights_list)
  local ids, weights, any = {}, {}, false
  for i, t in ipairs(indices_list) do
    ids[i] = narrow(func, i - 1, t)
    local w = weights_list and weights_list[i]
    if w and not Tensor.is(w) then
      P.fail(("%s: weights of input %d are a %s, wanted a tensor"):format(func, i - 1, type(w)))
    end
    if w and w:numel() > 0 then any = true else w = Tensor.ones({ t:numel() }, "f32", t:device()) end
    if w:numel() ~= t:numel() then
      P.fail(("%s: input %d has %d ids and %d weights"):format(func, i - 1, t:numel(), w:numel()))
    end
    weights[i] = w:to "f32"
  end
  if #ids == 0 then P.fail(func .. ": no inputs") end
  return F.cat(ids, 1), any and F.cat(weights, 1) or nil
end

--- Inputs with lengths: ids, lengths (i32) and weights of all of them.
function M.tbe_input_combine_with_length(indices_list, lengths_list, per_sample_weights)
  local func = "tbe_input_combine_with_length"
  local ids, weights = combined(func, indices_list, per_sample_weights)
  if #lengths_list ~= #indices_list then
    P.fail(("%s: %d inputs and %d lists of lengths"):format(func, #indices_list, #lengths_list))
  end
  for i, t in ipairs(lengths_list) do
    local sum, n = 0, indices_list[i]:numel()
    for _, length in ipairs(t:to_list()) do
      if length < 0 then
        P.fail(("%s: input %d has a length of %d, allowed: 0 and more"):format(func, i - 1, length))
      end
      sum = sum + length
    end
    if sum ~= n then
      P.fail(("%s: the lengths of input %d sum to %d, but it has %d ids"):format(func, i - 1, sum, n))
    end
  end
  return ids, F.cat(P.util.map(lengths_list, function(t) return t:to "i32" end), 1), weights
end

--- Offsets at which the bags of input `i` begin: a list, which is an error unless each of the n ids lies in one bag.
--- `complete`: the last one is the end of the last bag.
local function begins_of(i, offsets, n, complete)
  local list = offsets:to_list()
  local function fail(text, ...) P.fail(("tbe_input_combine: input %d: " .. text):format(i, ...)) end
  if not complete then list[#list + 1] = n end
  if #list < 2 and n > 0 then fail("%d ids, but offsets of no bag that they could belong to", n) end
  for b = 1, #list do
    local least = list[b - 1] or 0
    if b == 1 and list[1] ~= 0 then fail("its first offset is %d, wanted 0", list[1]) end
    if list[b] < least then
      fail("offsets[%d] is %d, allowed: no less than the one before, %d", b - 1, list[b], least)
    end
  end
  if #list > 0 and list[#list] ~= n then fail("its last offset is %d, but there are %d ids", list[#list], n) end
  list[#list] = nil
  return list
end

--- Inputs with offsets, complete where include_last_offsets says so: ids, complete offsets (i32) and weights of all of
--- them. With batch_size every input is filled up with empty bags to that many.
function M.tbe_input_combine(indices_list, offsets_list, per_sample_weights, include_last_offsets, batch_size)
  local ids, weights = combined("tbe_input_combine", indices_list, per_sample_weights)
  local ends, base = {}, 0
  if #offsets_list ~= #indices_list then
    P.fail(("tbe_input_combine: %d inputs and %d lists of offsets"):format(#indices_list, #offsets_list))
  end
  for i, t in ipairs(offsets_list) do
    local n = indices_list[i]:numel()
    local list = begins_of(i - 1, t, n, include_last_offsets and include_last_offsets[i])
    if batch_size and #list > batch_size then
      P.fail(("tbe_input_combine: input %d has %d bags, at most %d"):format(i - 1, #list, batch_size))
    end
    for b = 1, batch_size or #list do ends[#ends + 1] = base + (list[b] or n) end
    base = base + n
  end
  ends[#ends + 1] = base
  return ids, numbers(ends, "i32", ids:device()), weights
end

signature.check("sparse.", M, {
  reorder_batched_ad_lengths = "cat_ad_lengths: tensor, batch_offsets: tensor, num_ads_in_batch: integer",
  reorder_batched_ad_indices =
  "cat_ad_offsets: tensor, cat_ad_indices: tensor, batch_offsets: tensor, num_ads_in_batch: integer",
  tbe_input_combine_with_length = "indices_list: tensors, lengths_list: tensors, per_sample_weights: list?",
  tbe_input_combine = "indices_list: tensors, offsets_list: tensors, per_sample_weights: list?, include_last_offsets: "
    .. "list?, batch_size: integer?",
})

return M
