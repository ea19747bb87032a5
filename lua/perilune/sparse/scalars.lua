-- scalars.lua: a number for each id: tables of one column, sums of weights, calibration by histogram, hashes.
local ffi = require "ffi"
local P = require "perilune.ffi"
local Tensor = require "perilune.tensor"
local signature = require "perilune.signature"
local C, check = P.C, P.check
local ptr, wrap, out = Tensor.ptr, Tensor.wrap, Tensor.out

local M = {}

--- Tables of one column for several tasks: weight [tasks, rows of all tables]; sums over bags as [tasks, batch,
--- tables]. With gradient.
function M.batched_unary_embeddings(weight, table_offsets, offsets, indices)
  check(C.peri_sparse_batched_unary(ptr(weight), ptr(table_offsets), ptr(offsets), ptr(indices), out))
  return (wrap(out[0]))
end

--- For each distinct id (reverse_indices: unique's inverse) the sum of its weights and how many they are:
--- [num_unique_indices, 2].
function M.jagged_acc_weights_and_counts(weights, reverse_indices, num_unique_indices)
  check(C.peri_sparse_weights_and_counts(ptr(weights), ptr(reverse_indices), num_unique_indices, out))
  return (wrap(out[0]))
end

local calibration = ffi.new "peri_calibration_args"
local bins_out = ffi.new "peri_tensor *[1]"

local required = P.util.required
local bins_spec = { logit = required, bin_num_examples = required, bin_num_positives = required,
  positive_weight = required, lower_bound = 0, upper_bound = 1, bin_ctr_in_use_after = 0, bin_ctr_weight_value = 1 }
local feature_spec = { segment_value = required, segment_lengths = required, num_segments = required,
  num_bins = required }
for name, default in P.util.ordered(bins_spec) do feature_spec[name] = default end

local function calibrate(func, a)
  for _, name in ipairs { "logit", "bin_num_examples", "bin_num_positives" } do
    signature.value(func, name, a[name], "tensor")
  end
  signature.value(func, "positive_weight", a.positive_weight, "number")
  if a.segment_lengths then
    for _, name in ipairs { "segment_value", "segment_lengths" } do signature.value(func, name, a[name], "tensor") end
  end
  local num_bins = a.segment_lengths and signature.value(func, "num_bins", a.num_bins, "integer")
    or a.bin_num_examples:numel()
  local c = calibration
  c.bin_num_examples, c.bin_num_positives, c.num_bins = ptr(a.bin_num_examples), ptr(a.bin_num_positives), num_bins
  c.positive_weight, c.lower_bound, c.upper_bound = a.positive_weight, a.lower_bound, a.upper_bound
  c.bin_ctr_in_use_after, c.bin_ctr_weight_value = a.bin_ctr_in_use_after, a.bin_ctr_weight_value
  c.segment_lengths, c.segment_value, c.num_segments = nil, nil, 0
  if a.segment_lengths then
    c.segment_lengths, c.segment_value, c.num_segments = ptr(a.segment_lengths), ptr(a.segment_value),
      signature.value(func, "num_segments", a.num_segments, "integer")
  end
  check(C.peri_sparse_calibrate(ptr(a.logit), c, out, bins_out))
  local bins = wrap(bins_out[0])
  return wrap(out[0]), bins
end

--- Calibration by histogram binning, from named arguments: logit, bin_num_examples and bin_num_positives (f64, one
--- entry a bin), positive_weight, lower_bound (0), upper_bound (1), bin_ctr_in_use_after (0), bin_ctr_weight_value (1).
--- Returns the calibrated predictions and their bins.
function M.histogram_binning_calibration(a)
  local func = "histogram_binning_calibration"
  return calibrate(func, P.util.named(func, a, bins_spec))
end

--- The same with num_bins bins for each segment, those of no segment first: also segment_value, segment_lengths (0 or 1
--- value of [0, num_segments) for each logit), num_segments, num_bins.
function M.histogram_binning_calibration_by_feature(a)
  local func = "histogram_binning_calibration_by_feature"
  return calibrate(func, P.util.named(func, a, feature_spec))
end

local murmur = ffi.new "peri_murmur_args"

--- MurmurHash3 of the pairs input[i], y[i] (i64) under seed[i]; y and seed: tensors, or numbers for all.
function M.murmur_hash3(input, y, seed)
  local a = murmur
  a.y, a.seed, a.y_number, a.seed_number = nil, nil, 0, 0
  if Tensor.is(y) then a.y = ptr(y) else a.y_number = signature.value("murmur_hash3", "y", y, "integer") end
  if Tensor.is(seed) then
    a.seed = ptr(seed)
  else
    a.seed_number = signature.value("murmur_hash3", "seed", seed, "integer")
  end
  check(C.peri_sparse_murmur_hash3(ptr(input), a, out))
  return (wrap(out[0]))
end

signature.check("sparse.", M, {
  batched_unary_embeddings = "weight: tensor, table_offsets: tensor, offsets: tensor, indices: tensor",
  jagged_acc_weights_and_counts = "weights: tensor, reverse_indices: tensor, num_unique_indices: integer",
  murmur_hash3 = "input: tensor, y: any, seed: any",
}, 2)

return M
