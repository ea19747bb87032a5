-- sequence.lua: sequences in jagged tensors: attention within them, and what goes with it. Nothing is padded. With
-- gradient.
--
-- Names and arguments are those of generative-recommenders (HSTU) where it has them. A sequence is a bag; its rows are
-- its members, the oldest first. Its last num_targets members are targets: items that a ranker is asked about, which
-- see the history and themselves, but not each other.
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local A = require "perilune.jagged.arguments"
local F = require "perilune.nn.functional"
local JaggedTensor = require "perilune.jagged.jt"
local permute = require "perilune.sparse.permute"
local select = require "perilune.sparse.select"
local signature = require "perilune.signature"
local C, check = P.C, P.check
local ptr, wrap, out = Tensor.ptr, Tensor.wrap, Tensor.out
local required, optional = util.required, util.optional

local M = {}

--- Fail unless a named argument is of a kind (signature.lua); nil passes if `may_lack`.
local function want(func, a, name, kind, may_lack)
  if a[name] == nil and may_lack then return nil end
  return signature.value(func, name, a[name], kind)
end

-- -- attention --------------------------------------------------------------------------------------------------------

local attention_args = P.struct "peri_attention_args"
local attention_spec = { q = required, k = required, v = required, seq_offsets = required, num_targets = optional,
  max_seq_len = optional, max_attn_len = 0, contextual_seq_len = 0, min_full_attn_seq_len = 0,
  alpha = optional, causal = true }

local function attend(func, a, form, max_seq_len, scale)
  local c = attention_args
  for _, name in ipairs { "q", "k", "v", "seq_offsets" } do want(func, a, name, "tensor") end
  want(func, a, "num_targets", "tensor", true)
  want(func, a, "alpha", "number", true)
  c.q, c.k, c.v, c.seq_offsets, c.num_targets = ptr(a.q), ptr(a.k), ptr(a.v), ptr(a.seq_offsets), A.ptr(a.num_targets)
  c.max_seq_len, c.max_attn_len, c.causal, c.form = max_seq_len, want(func, a, "max_attn_len", "count"), a.causal, form
  c.contextual_seq_len = want(func, a, "contextual_seq_len", "count")
  c.min_full_attn_seq_len = want(func, a, "min_full_attn_seq_len", "count")
  if a.alpha == 0 then P.fail(func .. ": alpha is 0, wanted: a factor of the products (default: 1 / sqrt(D))") end
  c.alpha, c.scale = a.alpha or 0, scale -- 0: C's default
  check(C.peri_sparse_attention(c, out))
  return (wrap(out[0]))
end

--- Softmax attention within each sequence. Named arguments: q and k [n, heads, D], v [n, heads, V], seq_offsets
--- [sequences + 1], num_targets [sequences], max_attn_len (how far a member looks; 0: everywhere), contextual_seq_len
--- (how many of the first members of each sequence are contextual: they see the whole history; 0),
--- min_full_attn_seq_len (how far from the history's end members look everywhere in spite of max_attn_len; 0), alpha
--- (1 / sqrt(D)), causal (true), max_seq_len (a longer sequence is an error; default: any length is fine). Returns [n,
--- heads, V].
function M.jagged_attention(args)
  local a = util.named("jagged_attention", args, attention_spec)
  return attend("jagged_attention", a, C.PERI_ATTENTION_SOFTMAX, want("jagged_attention", a, "max_seq_len", "count",
    true) or 0, 0)
end

--- HSTU's attention: the weights are silu(alpha * q . k) / max_seq_len. Arguments as above; max_seq_len has to be
--- given.
function M.hstu_mha(args)
  local a = util.named("hstu_mha", args, attention_spec)
  local most = want("hstu_mha", a, "max_seq_len", "count")
  if most < 1 then P.fail "hstu_mha: max_seq_len is 0, allowed: 1 and more" end
  return attend("hstu_mha", a, C.PERI_ATTENTION_SILU, most, 1 / most)
end

-- -- places and times -------------------------------------------------------------------------------------------------

local positions_spec = { seq_offsets = required, rows = required, num_targets = optional, max_positions = required }

--- For each of `rows` members (i64) how far it is from the first target, or from the end: length - place without
--- targets; 0 for targets; at most max_positions - 1.
function M.sequence_positions(args)
  local func = "sequence_positions"
  local a = util.named(func, args, positions_spec)
  check(C.peri_sparse_sequence_positions(ptr(want(func, a, "seq_offsets", "tensor")),
    A.ptr(want(func, a, "num_targets", "tensor", true)), want(func, a, "rows", "count"),
    want(func, a, "max_positions", "count"), out))
  return (wrap(out[0]))
end

--- For each of `rows` members (i64) the number of its sequence: what repeats a row of each sequence for its members, by
--- index_select_dim0.
function M.sequence_numbers(seq_offsets, rows)
  check(C.peri_sparse_sequence_numbers(ptr(seq_offsets), rows, out))
  return (wrap(out[0]))
end

local time_args = P.struct "peri_time_buckets_args"
local time_spec = { timestamps = required, seq_offsets = required, num_buckets = 2048, increment = 60,
  time_bucket_fn = "sqrt" }

--- For each member (i64) how long before the last one of its sequence it was: 0..num_buckets, the whole part of
--- sqrt(difference / increment), or of its logarithm with time_bucket_fn = "log".
function M.time_buckets(args)
  local func, c = "time_buckets", time_args
  local a = util.named(func, args, time_spec)
  c.timestamps, c.seq_offsets = ptr(want(func, a, "timestamps", "tensor")), ptr(want(func, a, "seq_offsets", "tensor"))
  c.num_buckets, c.increment = want(func, a, "num_buckets", "count"), a.increment
  c.log = util.one_of(func, "time_bucket_fn", a.time_bucket_fn, { "sqrt", "log" }) == "log"
  check(C.peri_sparse_time_buckets(c, out))
  return (wrap(out[0]))
end

-- -- joining and cutting ----------------------------------------------------------------------------------------------

local function lengths_of(values, offsets)
  return JaggedTensor { values = values, offsets = offsets }:lengths():to "i64"
end

--- 0, n, 1, n + 1, ...: the bags of two lists of n in turn; or the way back.
local function in_turn(n, back, device)
  local order = {}
  for b = 0, n - 1 do
    order[2 * b + 1], order[2 * b + 2] = b, n + b
  end
  local t = Tensor.tensor(order, "i64", device)
  return back and permute.invert_permute(t) or t
end

local function same_bags(func, left, right)
  if left:numel() ~= right:numel() or left:numel() < 1 then
    P.fail(("%s: %d offsets_left and %d offsets_right, wanted equally many, at least one"):format(func, left:numel(),
      right:numel()))
  end
  return left:numel() - 1
end

--- Named arguments that are all tensors and all needed.
local function tensors(func, args, ...)
  local spec = {}
  for _, name in ipairs { ... } do spec[name] = required end
  local a = util.named(func, args, spec)
  for _, name in ipairs { ... } do want(func, a, name, "tensor") end
  return a, same_bags(func, a.offsets_left, a.offsets_right)
end

--- Bag by bag the rows of two jagged tensors, one behind the other. Named arguments: values_left [n, ...], values_right
--- [m, ...] and their offsets. Returns the values [n + m, ...] and their offsets.
function M.concat_2D_jagged(args)
  local func = "concat_2D_jagged"
  local a, n = tensors(func, args, "values_left", "values_right", "offsets_left", "offsets_right")
  local lengths = F.cat({ lengths_of(a.values_left, a.offsets_left), lengths_of(a.values_right, a.offsets_right) }, 1)
  local order = in_turn(n, false, a.values_left:device())
  local mixed, values = permute.permute_1D_sparse_data(order, lengths, F.cat({ a.values_left, a.values_right }, 1))
  return values, permute.asynchronous_complete_cumsum(mixed):slice(1, 0, 2 * n + 1, 2):contiguous()
end

--- The way back: the first rows of each bag, as many as offsets_left says, and the others. Returns both.
function M.split_2D_jagged(args)
  local func = "split_2D_jagged"
  local a, n = tensors(func, args, "values", "offsets_left", "offsets_right")
  local left, right = a.offsets_left:item(n), a.offsets_right:item(n)
  if left + right ~= a.values:size(1) then
    P.fail(("%s: the bags have %d and %d rows, but there are %d values"):format(func, left, right, a.values:size(1)))
  end
  local device = a.values:device()
  local mixed = permute.asynchronous_complete_cumsum(F.stack({ lengths_of(a.values:slice(1, 0, left), a.offsets_left),
    lengths_of(a.values:slice(1, 0, right), a.offsets_right) }, 2):reshape(2 * n))
  local _, values = permute.permute_1D_sparse_data(in_turn(n, true, device), lengths_of(a.values, mixed), a.values)
  return values:slice(1, 0, left), values:slice(1, left, left + right)
end

--- At most max_length rows of each bag: the last ones, or with keep = "first" the first. lengths [bags]. Returns the
--- values and their lengths.
function M.truncate_jagged(values, lengths, max_length, keep)
  keep = util.one_of("truncate_jagged", "keep", keep or "last", { "first", "last" })
  local start = (lengths:to "f64" - max_length):clamp(0)
  if keep == "first" then start = start * 0 end
  return select.jagged_slice(values, lengths, start:to "i64", max_length)
end

signature.check("sparse.", M, {
  sequence_numbers = "seq_offsets: tensor, rows: count",
  truncate_jagged = "values: tensor, lengths: tensor, max_length: count, keep: string?",
})
signature.check_none("sparse.", M, { "jagged_attention", "hstu_mha", "sequence_positions", "time_buckets" })

return M
