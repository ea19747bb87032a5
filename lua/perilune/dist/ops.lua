-- ops.lua: exchanges of embeddings on the gradient tape (TorchRec's comm_ops). Each takes named arguments, among them
--   group              of ranks; default: the world
--   codecs             QuantizedCommCodecs for the wire, forward and backward (dist/codec.lua); default: none
--   gradient_division  whether the gradient that comes back is divided by the size of the group; default: see
--                      set_gradient_division
--   tag                a number on which the ranks must agree
-- and returns an Awaitable of the result. Collective: every rank makes the same calls in the same order. What the
-- inputs and results look like, and how gradients travel, is said in perilune/exchange.h.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local A = require "perilune.jagged.arguments"
local signature = require "perilune.signature"
local awaitable = require "perilune.dist.awaitable"
local group_of = require("perilune.dist.group").group_of
local C, check, state = P.C, P.check, P.state
local tensor_ptr, work_out, finish_work = Tensor.ptr, awaitable.work_out, awaitable.finish_work

local M = {}

P.own { gradient_division = "unsaid" } -- what set_gradient_division says where no group is meant: true, false

-- -- results ----------------------------------------------------------------------------------------------------------

local results, results_room = ffi.new "peri_tensor *[16]", 16

--- An exchange on its way; `list`: its result is a list of tensors even if it is one.
local ExchangeAwaitable = util.class("ExchangeAwaitable", awaitable.Awaitable)
M.ExchangeAwaitable = ExchangeAwaitable

function ExchangeAwaitable:init(ptr, list)
  awaitable.Awaitable.init(self)
  self._work = awaitable.wrap_work(ptr)
  self._list = list or false
end

function ExchangeAwaitable:_wait_impl()
  local work = self._work
  finish_work(work)
  local n = C.peri_exchange_results(work.ptr)
  if n > results_room then results, results_room = ffi.new("peri_tensor *[?]", n), n end
  check(C.peri_exchange_result(work.ptr, results))
  work:release()
  if not self._list then return Tensor.wrap(results[0]) end
  local list = {}
  for i = 1, n do list[i] = Tensor.wrap(results[i - 1]) end
  return list
end

function ExchangeAwaitable:_test_impl() return C.peri_work_test(self._work.ptr) ~= C.PERI_PENDING end

-- -- arguments --------------------------------------------------------------------------------------------------------

--- Host arrays that grow; each is read by the C call that follows.
local function array(ctype)
  return { type = ffi.typeof(ctype .. "[?]"), room = 64, at = ffi.new(ctype .. "[64]") }
end
local first, second, third = array "int64_t", array "int64_t", array "int64_t"
local features = array "int32_t"

local function array_with_room(a, n)
  if n > a.room then
    a.room = n
    a.at = a.type(n)
  end
  return a.at
end

--- Append the whole numbers of `list` to the array behind position `at`; returns the end.
local function append(func, what, a, at, list)
  if type(list) ~= "table" then P.fail(("%s: %s is a %s, wanted a list of numbers"):format(func, what, type(list))) end
  local n = #list
  if at + n > a.room then
    local old = a.at
    a.room = 2 * (at + n)
    a.at = a.type(a.room)
    ffi.copy(a.at, old, at * ffi.sizeof(a.type, 1))
  end
  local buffer = a.at
  for i = 1, n do
    local x = list[i]
    if type(x) ~= "number" or x ~= math.floor(x) then
      P.fail(("%s: entry %d of %s is %s, wanted a whole number"):format(func, i, what, tostring(x)))
    end
    buffer[at + i - 1] = x
  end
  return at + n
end

--- A list with one entry for each rank, in array `a`.
local function per_rank(func, what, group, a, list)
  local n = append(func, what, a, 0, list)
  if n ~= group.world_size then
    P.fail(("%s: %s has %d entries for the %d ranks of group '%s'"):format(func, what, n, group.world_size, group.name))
  end
  return a.at
end

local function tensor_of(func, what, t)
  t = awaitable.resolve(t)
  if not Tensor.is(t) then P.fail(("%s: %s is a %s, wanted a tensor"):format(func, what, type(t))) end
  return tensor_ptr(t)
end

local options = P.struct "peri_exchange_args"

--- Fill the options struct from named arguments.
local function options_of(func, args, group)
  local codecs, division = args.codecs, args.gradient_division
  options.forward, options.backward = nil, nil
  if codecs then
    if type(codecs) ~= "table" then
      P.fail(("%s: codecs is a %s, wanted QuantizedCommCodecs"):format(func, type(codecs)))
    end
    codecs = signature.value(func, "codecs", codecs, "codecs")
    if codecs.forward then options.forward = codecs.forward.ptr end
    if codecs.backward then options.backward = codecs.backward.ptr end
  end
  if division ~= nil then signature.value(func, "gradient_division", division, "boolean") end
  if division == nil then division = group._gradient_division end
  if division == nil and state.gradient_division ~= "unsaid" then division = state.gradient_division end
  options.division = division == nil and C.PERI_DIVISION_DEFAULT or division and C.PERI_DIVISION_ON
    or C.PERI_DIVISION_OFF
  options.tag = args.tag and signature.value(func, "tag", args.tag, "integer") or 0
  return options
end

local function posted(status, list)
  check(status)
  return ExchangeAwaitable(work_out[0], list)
end

local function set_of_arguments(names)
  local allowed = { group = true, codecs = true, gradient_division = true, tag = true }
  for _, name in ipairs(names) do allowed[name] = true end
  return allowed
end

-- -- gradient division ------------------------------------------------------------------------------------------------

--- Whether gradients that exchanges bring back are divided by the size of their group: for later exchanges of `group`,
--- or (nil) the default of this rank's script. On unless said otherwise.
function M.set_gradient_division(on, group)
  if type(on) ~= "boolean" then P.fail(("set_gradient_division: %s, allowed: true, false"):format(tostring(on))) end
  if not group then
    state.gradient_division = on
    return
  end
  check(C.peri_exchange_division_set(group_of("set_gradient_division", group):ptr(), on and C.PERI_DIVISION_ON
    or C.PERI_DIVISION_OFF))
  group._gradient_division = on
end

--- What holds for `group`, or by default.
function M.get_gradient_division(group)
  group = group and group_of("get_gradient_division", group)
  if group and group._gradient_division ~= nil then return group._gradient_division end
  if state.gradient_division ~= "unsaid" then return state.gradient_division end
  return C.peri_exchange_division(group and group:ptr() or nil)
end

-- -- pooled -----------------------------------------------------------------------------------------------------------

local pooled = set_of_arguments { "a2a_pooled_embs_tensor", "batch_size_per_rank", "dim_sum_per_rank" }
--- { a2a_pooled_embs_tensor [sum of batches, dim_sum_per_rank of this rank], batch_size_per_rank, dim_sum_per_rank } ->
--- [this rank's batch, sum of dims].
function M.alltoall_pooled(args)
  local func = "alltoall_pooled"
  A.check(func, args, pooled)
  local group = group_of(func, args.group)
  local input = tensor_of(func, "a2a_pooled_embs_tensor", args.a2a_pooled_embs_tensor)
  local batch = per_rank(func, "batch_size_per_rank", group, first, args.batch_size_per_rank)
  local dims = per_rank(func, "dim_sum_per_rank", group, second, args.dim_sum_per_rank)
  return posted(C.peri_exchange_alltoall_pooled(group:ptr(), input, batch, dims, options_of(func, args, group),
    work_out))
end

local variable = set_of_arguments {
  "a2a_pooled_embs_tensor", "batch_size_per_rank_per_feature", "batch_size_per_feature_pre_a2a",
  "emb_dim_per_rank_per_feature",
}
local variable_args = ffi.new "peri_variable_batch_args"
--- { a2a_pooled_embs_tensor (one dimension), batch_size_per_rank_per_feature[rank][own feature],
--- batch_size_per_feature_pre_a2a[feature], emb_dim_per_rank_per_feature[rank][its feature] } -> one dimension:
--- [owner][feature][row][column].
function M.variable_batch_alltoall_pooled(args)
  local func = "variable_batch_alltoall_pooled"
  A.check(func, args, variable)
  local group = group_of(func, args.group)
  local n, dims, sizes = group.world_size, args.emb_dim_per_rank_per_feature, args.batch_size_per_rank_per_feature
  local input = tensor_of(func, "a2a_pooled_embs_tensor", args.a2a_pooled_embs_tensor)
  if type(dims) ~= "table" or #dims ~= n or type(sizes) ~= "table" or #sizes ~= n then
    P.fail(("%s: emb_dim_per_rank_per_feature and batch_size_per_rank_per_feature need one list for each of %d "
      .. "ranks"):format(func, n))
  end
  local count, at, end_ = array_with_room(features, n), 0, 0
  for r = 1, n do
    local stop = append(func, "emb_dim_per_rank_per_feature", first, at, dims[r])
    count[r - 1] = stop - at
    at = stop
  end
  for r = 1, n do
    local stop = append(func, "batch_size_per_rank_per_feature", second, end_, sizes[r])
    if stop - end_ ~= count[group.rank_number] then
      P.fail(("%s: batch_size_per_rank_per_feature has %d entries for rank %d, but this rank has %d features"):format(
        func, stop - end_, r - 1, count[group.rank_number]))
    end
    end_ = stop
  end
  local total = append(func, "batch_size_per_feature_pre_a2a", third, 0, args.batch_size_per_feature_pre_a2a)
  if total ~= at then
    P.fail(("%s: batch_size_per_feature_pre_a2a has %d entries for %d features"):format(func, total, at))
  end
  variable_args.features_per_rank, variable_args.emb_dim_per_rank_per_feature = count, first.at
  variable_args.batch_size_per_rank_per_feature, variable_args.batch_size_per_feature_pre_a2a = second.at, third.at
  return posted(C.peri_exchange_variable_batch_alltoall_pooled(group:ptr(), input, variable_args,
    options_of(func, args, group), work_out))
end

--- Pointers of a list of tensors.
local function tensors_of(func, what, list)
  if type(list) ~= "table" or #list == 0 then P.fail(("%s: %s must be a list of tensors"):format(func, what)) end
  local pointers = ffi.new("peri_tensor *[?]", #list)
  for i = 1, #list do pointers[i - 1] = tensor_of(func, what, list[i]) end
  return pointers, #list
end

local listed = set_of_arguments { "inputs", "out_split", "per_rank_split_lengths" }
--- { inputs (a list of [rows, columns]), out_split = columns of each rank (or per_rank_split_lengths = a list of them
--- for each rank) } -> a list of W tensors [this rank's rows, columns of rank i]. Rows are dealt as evenly as possible.
--- Gradients are not divided by default.
function M.alltoallv(args)
  local func = "alltoallv"
  A.check(func, args, listed)
  local group = group_of(func, args.group)
  local dims = args.out_split
  if not dims then
    if type(args.per_rank_split_lengths) ~= "table" then
      P.fail(func .. ": either out_split or per_rank_split_lengths is wanted")
    end
    dims = {}
    for r, list in ipairs(args.per_rank_split_lengths) do
      if not signature.is("numbers", list) then
        signature.value(func, ("per_rank_split_lengths[%d]"):format(r), list, "numbers")
      end
      dims[r] = 0
      for _, d in ipairs(list) do dims[r] = dims[r] + d end
    end
  end
  local pointers, n = tensors_of(func, "inputs", args.inputs)
  local columns = per_rank(func, "out_split", group, first, dims)
  local o = options_of(func, args, group)
  if args.gradient_division == nil then o.division = C.PERI_DIVISION_DEFAULT end
  return posted(C.peri_exchange_alltoallv(group:ptr(), pointers, n, columns, o, work_out), true)
end

-- -- reduce-scatter, all-gather ---------------------------------------------------------------------------------------

local inputs_only, input_only = set_of_arguments { "inputs" }, set_of_arguments { "input" }
--- { inputs = one tensor for each rank, of equal shapes on all ranks } -> the sum over ranks of those for this rank.
function M.reduce_scatter_pooled(args)
  local func = "reduce_scatter_pooled"
  A.check(func, args, inputs_only)
  local group = group_of(func, args.group)
  local pointers, n = tensors_of(func, "inputs", args.inputs)
  if n ~= group.world_size then
    P.fail(("%s: %d inputs for the %d ranks of group '%s'"):format(func, n, group.world_size, group.name))
  end
  return posted(C.peri_exchange_reduce_scatter_pooled(group:ptr(), pointers, options_of(func, args, group), work_out))
end

--- { input [W n, ...] } -> this rank's n rows of the sum over ranks.
function M.reduce_scatter_base_pooled(args)
  local func = "reduce_scatter_base_pooled"
  A.check(func, args, input_only)
  local group = group_of(func, args.group)
  local input = tensor_of(func, "input", args.input)
  return posted(C.peri_exchange_reduce_scatter_base_pooled(group:ptr(), input, options_of(func, args, group), work_out))
end

local split = set_of_arguments { "input", "input_splits" }
--- { input [sum of input_splits, ...], input_splits } -> this rank's rows of the sum over ranks.
function M.reduce_scatter_v_pooled(args)
  local func = "reduce_scatter_v_pooled"
  A.check(func, args, split)
  local group = group_of(func, args.group)
  local input = tensor_of(func, "input", args.input)
  local splits = per_rank(func, "input_splits", group, first, args.input_splits)
  return posted(C.peri_exchange_reduce_scatter_v_pooled(group:ptr(), input, splits, options_of(func, args, group),
    work_out))
end

local per_feature = set_of_arguments { "input", "batch_size_per_rank_per_feature", "embedding_dims" }
--- { input (one dimension: [rank][feature][row][column]), batch_size_per_rank_per_feature[rank][feature],
--- embedding_dims[feature] } -> this rank's part of the sum over ranks, one dimension.
function M.reduce_scatter_v_per_feature_pooled(args)
  local func = "reduce_scatter_v_per_feature_pooled"
  A.check(func, args, per_feature)
  local group = group_of(func, args.group)
  local input, sizes = tensor_of(func, "input", args.input), args.batch_size_per_rank_per_feature
  local n = append(func, "embedding_dims", first, 0, args.embedding_dims)
  if type(sizes) ~= "table" or #sizes ~= group.world_size then
    P.fail(("%s: batch_size_per_rank_per_feature needs one list for each of %d ranks"):format(func, group.world_size))
  end
  local at = 0
  for r = 1, #sizes do
    at = append(func, "batch_size_per_rank_per_feature", second, at, sizes[r])
    if at ~= r * n then P.fail(("%s: batch_size_per_rank_per_feature[%d] has not %d entries"):format(func, r, n)) end
  end
  local o = options_of(func, args, group)
  return posted(C.peri_exchange_reduce_scatter_v_per_feature_pooled(group:ptr(), input, n, second.at, first.at, o,
    work_out))
end

--- { input [n, ...] } -> [W n, ...]: the inputs of all ranks.
function M.all_gather_base_pooled(args)
  local func = "all_gather_base_pooled"
  A.check(func, args, input_only)
  local group = group_of(func, args.group)
  local input = tensor_of(func, "input", args.input)
  return posted(C.peri_exchange_all_gather_base_pooled(group:ptr(), input, options_of(func, args, group), work_out))
end

-- -- sequences --------------------------------------------------------------------------------------------------------

local sequence = set_of_arguments {
  "a2a_sequence_embs_tensor", "lengths_after_sparse_data_all2all", "input_splits", "output_splits",
  "batch_size_per_rank", "stride_per_key_per_rank", "num_features", "stagger",
}
local sequence_args = ffi.new "peri_sequence_args"
--- { a2a_sequence_embs_tensor [ids received, D], lengths_after_sparse_data_all2all ([bags] or [features, bags] of the
--- KJT that was looked up), input_splits (ids sent to each rank), output_splits (ids received from each),
--- batch_size_per_rank or (variable batch) stride_per_key_per_rank, num_features (default: rows of the lengths),
--- stagger = 1 } -> [ids sent, D], in the order in which this rank sent its ids. TorchRec's recat tensors follow from
--- batch sizes and stagger here.
function M.alltoall_sequence(args)
  local func = "alltoall_sequence"
  A.check(func, args, sequence)
  local group = group_of(func, args.group)
  local input = tensor_of(func, "a2a_sequence_embs_tensor", args.a2a_sequence_embs_tensor)
  local lengths, strides = args.lengths_after_sparse_data_all2all, args.stride_per_key_per_rank
  tensor_of(func, "lengths_after_sparse_data_all2all", lengths)
  local count = args.num_features or (strides and #strides) or (lengths:dim() == 2 and lengths:size(1))
  if not count then P.fail(func .. ": num_features is missing") end
  local flat = lengths:dim() == 2 and lengths:reshape(lengths:numel()) or lengths
  sequence_args.lengths, sequence_args.features, sequence_args.stagger = tensor_ptr(flat), count, args.stagger or 1
  sequence_args.batch_size_per_rank, sequence_args.stride_per_key_per_rank = nil, nil
  if strides then
    local at = 0
    for k = 1, #strides do
      at = append(func, "stride_per_key_per_rank", first, at, strides[k])
      if at ~= k * group.world_size then
        P.fail(("%s: stride_per_key_per_rank[%d] has not one entry a rank"):format(func, k))
      end
    end
    sequence_args.stride_per_key_per_rank = first.at
  else
    sequence_args.batch_size_per_rank = per_rank(func, "batch_size_per_rank", group, first, args.batch_size_per_rank)
  end
  sequence_args.input_splits = per_rank(func, "input_splits", group, second, args.input_splits)
  sequence_args.output_splits = per_rank(func, "output_splits", group, third, args.output_splits)
  return posted(C.peri_exchange_alltoall_sequence(group:ptr(), input, sequence_args, options_of(func, args, group),
    work_out))
end

--- Row i of the result is row permutation[i] of `rows` (0 is the first); permutation has each of 0..n-1 once. With
--- gradient.
function M.unbucketize(rows, permutation)
  check(C.peri_exchange_unbucketize(tensor_ptr(rows), tensor_ptr(permutation), Tensor.out))
  return Tensor.wrap(Tensor.out[0])
end

return M
