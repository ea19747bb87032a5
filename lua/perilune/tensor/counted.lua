-- counted.lua: distinct elements, how often they are there, places among sorted ones, and what stands in their middle:
-- with PyTorch's names.
local ffi = require "ffi"
local P = require "perilune.ffi"
local Tensor = require "perilune.tensor.core"
local F = require "perilune.tensor.ops"
local signature = require "perilune.signature"
local C, check, wrap, ptr, out = P.C, P.check, Tensor.wrap, Tensor.ptr, Tensor.out

local out2 = ffi.new "peri_tensor *[1]"

local function dimension(d) return d > 0 and d - 1 or d end

--- Where each element of t goes among those along the last dimension of `sorted`, which rise: the number of them that
--- are smaller (`right`: not larger): i64 of t's shape.
function F.searchsorted(sorted, t, right)
  check(C.peri_op_searchsorted(ptr(sorted), ptr(t), right or false, out))
  return (wrap(out[0]))
end
--- The number of the bucket of each element: searchsorted(boundaries, t, right).
function F.bucketize(t, boundaries, right) return (F.searchsorted(boundaries, t, right)) end

local found = ffi.new "peri_unique_result"

--- The distinct elements of t in rising order; with return_inverse, for each element of t, its number among them (i64,
--- t's shape), else nil; with return_counts how often each is there (i64), else nil. Waits. Each NaN is one of its own.
function F.unique(t, return_inverse, return_counts)
  check(C.peri_sparse_unique_elements(ptr(t), return_inverse or false, return_counts or false, found))
  local inverse, counts = found.inverse, found.counts
  local values = wrap(found.unique)
  return values, inverse ~= nil and wrap(inverse) or nil, counts ~= nil and wrap(counts) or nil
end

--- How often each number 0, 1, ... is there: i64 [the largest + 1, or minlength (0) if that is more]; with weights (f32
--- or f64, one for each) their sums. Waits.
function F.bincount(t, weights, minlength)
  if t:dim() ~= 1 then P.fail(("bincount: %s, wanted one dimension"):format(Tensor._text(t))) end
  Tensor._check_integers("bincount", t)
  local ids = t:dtype() == "i32" and t or t:to "i64"
  check(C.peri_sparse_counts(ptr(ids), minlength or 0, out))
  local counts = wrap(out[0])
  if not weights then return counts end
  check(C.peri_sparse_weights_and_counts(ptr(weights), ptr(ids), counts:numel(), out))
  local both = wrap(out[0])
  return (both:select(2, 0):contiguous())
end

--- How many elements of t fall into each of `bins` (100) intervals of one width from min to max, the largest one with
--- its upper bound; others do not count. Both 0: the smallest and the largest element. Of t's dtype. Waits.
function F.histc(t, bins, min, max)
  check(C.peri_sparse_histogram(ptr(t), bins or 100, min or 0, max or 0, out))
  return (wrap(out[0]))
end

--- How many elements over dim (as in sum) are not 0: i64.
function F.count_nonzero(t, dim) return (F.sum(F.ne(t, 0), dim)) end

--- Whether each element of t is among those of `tests`: bool.
function F.isin(t, tests)
  check(C.peri_op_isin(ptr(t), ptr(tests), out))
  return (wrap(out[0]))
end

-- -- in the middle ----------------------------------------------------------------------------------------------------

--- The k-th smallest element (from 1) along dim (-1), and its place (i64).
function F.kthvalue(t, k, dim, keepdim)
  check(C.peri_op_kthvalue(ptr(t), k, dimension(dim or -1), keepdim or false, out, out2))
  local second = out2[0]
  return wrap(out[0]), wrap(second)
end

--- The element that is there most often along dim (-1), of several the smallest, and the last of its places (i64).
function F.mode(t, dim, keepdim)
  check(C.peri_op_mode(ptr(t), dimension(dim or -1), keepdim or false, out, out2))
  local second = out2[0]
  return wrap(out[0]), wrap(second)
end

--- Without dim the middle element of all, along dim that of each line and its place (i64): of two the smaller one; NaN
--- if there is one.
function F.median(t, dim, keepdim)
  local along = dim and dimension(dim) or 0
  check(C.peri_op_median(ptr(dim and t or t:reshape(-1)), along, dim and keepdim or false, out, dim and out2 or nil))
  if not dim then return (wrap(out[0])) end
  local second = out2[0]
  return wrap(out[0]), wrap(second)
end

--- k elements along dim from rank `first` on; of lines with a NaN it, k times.
function F._ranks(t, dim, first, k)
  check(C.peri_op_ranks(ptr(t), dimension(dim), first, k, out, nil))
  return (wrap(out[0]))
end

local SORTED_FROM = 4 -- shares from which sorting takes less time than looking for each
--- What the share q lies below; sorted: all ranks of t, or nil.
local function quantile_of(t, sorted, dim, q)
  if not (q >= 0 and q <= 1) then P.fail(("quantile: q is %s, allowed: 0..1"):format(tostring(q))) end
  local at = q * (t:size(dim) - 1)
  local below = math.floor(at)
  local first = sorted and below or 0
  local line = sorted or F._ranks(t, dim, below, below < at and 2 or 1)
  local value = F.select(line, dim, first)
  return below < at and F.lerp(value, F.select(line, dim, first + 1), at - below) or value
end
--- The quantile q of t along dim (nil: of all), with that dimension kept or not.
local function kept(t, value, dim, keepdim)
  if not keepdim then return value end
  return (dim and t:dim() > 0 and F.unsqueeze(value, dim) or value:reshape(Tensor._ones_shape(t)))
end
--- What a share q (0..1) of the elements along dim, or of all, lies below; between two elements in proportion. A list
--- of shares: the results along a new first dimension. NaN if there is one.
function F.quantile(t, q, dim, keepdim)
  if not Tensor._is_float(t) then
    P.fail(("quantile: %s, allowed: floats; cast it with t:to \"f32\""):format(Tensor._text(t)))
  end
  local line = dim and t:dim() > 0 and t or t:reshape(-1)
  local along = dim or 1
  if line:size(along) == 0 then P.fail(("quantile: dimension %d of %s is empty"):format(along, Tensor._text(t))) end
  if type(q) == "number" then return (kept(t, quantile_of(line, nil, along, q), dim, keepdim)) end
  local list = {}
  local sorted = #q >= SORTED_FROM and F._ranks(line, along, 0, line:size(along)) or nil
  for i = 1, #q do list[i] = kept(t, quantile_of(line, sorted, along, q[i]), dim, keepdim) end
  return (F.stack(list, 1))
end

signature.kind("number_or_numbers", "a number or a list of them", function(x)
  return type(x) == "number" or signature.is("numbers", x)
end)
signature.check("", F, {
  unique = "t: tensor, return_inverse: boolean?, return_counts: boolean?",
  kthvalue = "t: tensor, k: count, dim: dim?, keepdim: boolean?", median = "t: tensor, dim: dim?, keepdim: boolean?",
  mode = "t: tensor, dim: dim?, keepdim: boolean?",
}, 3)
signature.check_one("", F, {
  searchsorted = "sorted: tensor, t: tensor, right: boolean?",
  bucketize = "t: tensor, boundaries: tensor, right: boolean?",
  bincount = "t: tensor, weights: tensor?, minlength: count?",
  histc = "t: tensor, bins: count?, min: number?, max: number?", count_nonzero = "t: tensor, dim: dims?",
  isin = "t: tensor, tests: tensor",
  quantile = "t: tensor, q: number_or_numbers, dim: dim?, keepdim: boolean?",
  _ranks = "t: tensor, dim: dim, first: integer, k: count",
})
for _, name in ipairs { "bucketize", "unique", "bincount", "histc", "count_nonzero", "isin", "kthvalue", "median",
  "mode", "quantile" } do
  Tensor.methods[name] = F[name]
end

return F
