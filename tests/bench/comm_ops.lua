-- comm_ops.lua: the exchanges of tensor lists, blocks and embeddings for comm.lua's table: each beside the bare call
-- that moves as many bytes between contiguous buffers. What an exchange makes (its output, the columns of pooled
-- embeddings side by side) is in its time.
local ffi = require "ffi"
local peri = require "perilune"
local P = peri.ffi
local C, check = P.C, P.check
local dist, embeddings, ptr = peri.dist, peri.dist.ops, peri.Tensor.ptr

--- Columns of a matrix of @count numbers: eight tables of 64.
local function columns_of(count) return math.min(count, 512) end

local world, work, calls = ... -- the world, where posts put their work, and comm_mpi.c
local group, n = world:ptr(), world.world_size
local results, tensor = ffi.new("peri_tensor *[?]", n), ffi.new "peri_tensor *[1]"
local function take(w)
  check(C.peri_exchange_result(w, results))
  for i = 0, C.peri_exchange_results(w) - 1 do C.peri_tensor_release(results[i]) end
end

local function filled(value)
  local list, array = {}, ffi.new("int64_t[?]", n)
  for i = 1, n do list[i], array[i - 1] = value, value end
  return list, array
end

--- b.input: what is sent as a matrix; b.rows, b.dims (and b.rows_at, b.dims_at for C): rows and columns for each rank.
local function matrix(b, count)
  local columns = columns_of(count)
  b.rows, b.rows_at = filled(count / columns)
  b.dims, b.dims_at = filled(columns)
  b.input = b.send:reshape(-1, columns)
  b.input_ptr = ptr(b.input)
  calls.bare_columns(columns)
  b.more = { b.input }
end

--- Views of equal parts of @t, and their pointers.
local function parts(b, t, count)
  local list, pointers = {}, ffi.new("peri_tensor *[?]", n)
  for i = 1, n do
    list[i] = t:slice(1, (i - 1) * count, i * count)
    pointers[i - 1] = ptr(list[i])
    table.insert(b.more, list[i])
  end
  return list, pointers
end

--- An exchange on a matrix.
local function pooled(name, bare, send, recv, post, method, more)
  return { name, bare, send, recv, post, method, prepare = function(b, count)
    matrix(b, count)
    if more then more(b, count) end
  end, results = take }
end

local function alltoall_pooled(b)
  check(C.peri_exchange_alltoall_pooled(group, b.input_ptr, b.rows_at, b.dims_at, nil, work))
end
local function alltoall_pooled_method(b)
  local args = { a2a_pooled_embs_tensor = b.input, batch_size_per_rank = b.rows, dim_sum_per_rank = b.dims }
  embeddings.alltoall_pooled(args):wait():release()
end

local variable, sequence, tpu = ffi.new "peri_variable_batch_args", ffi.new "peri_sequence_args",
  ffi.new "peri_tpu_all_to_all_args"
local ones = ffi.new("int32_t[?]", n)
for i = 0, n - 1 do ones[i] = 1 end
local assignment, everybody = ffi.new("int32_t[?]", n), {}
for i = 1, n do assignment[i - 1], everybody[i] = i - 1, i - 1 end

return {
  { "all_to_all_list", 5, n, n, function(b) check(C.peri_coll_all_to_all_list(group, b.out, b.inp, false, 0, work)) end,
    function(b) dist.all_to_all(b.outputs, b.inputs) end, prepare = function(b, count)
      b.more = {}
      b.outputs, b.out = parts(b, b.recv, count)
      b.inputs, b.inp = parts(b, b.send, count)
    end },
  { "tpu_all_to_all", 5, n, n, function(b) check(C.peri_coll_tpu_all_to_all(group, b.s, tpu, tensor, work)) end,
      function(b)
      dist.tpu_all_to_all { input = b.send, group_assignment = { everybody }, concat_dimension = 1, split_dimension = 1,
        split_count = n }:wait():release()
    end, prepare = function()
      tpu.group_assignment, tpu.groups, tpu.replicas, tpu.concat_dimension, tpu.split_dimension = assignment, 1, n, 0, 0
      tpu.split_count, tpu.tag = n, 0
    end, results = function() C.peri_tensor_release(tensor[0]) end },
  pooled("alltoall_pooled", 5, n, n, alltoall_pooled, alltoall_pooled_method),
  -- Beside the call that makes the same result, with types that put the rows in their places.
  pooled("alltoall_pooled/alltoallw", 9, n, n, alltoall_pooled, alltoall_pooled_method),
  pooled("variable_batch_alltoall_pooled", 5, n, n,
    function(b) check(C.peri_exchange_variable_batch_alltoall_pooled(group, b.s, variable, nil, work)) end, function(b)
      embeddings.variable_batch_alltoall_pooled { a2a_pooled_embs_tensor = b.send,
        batch_size_per_rank_per_feature = b.each_rows, batch_size_per_feature_pre_a2a = b.rows,
        emb_dim_per_rank_per_feature = b.each_dims }:wait():release()
    end, function(b)
      b.each_rows, b.each_dims = peri.util.map(b.rows, function(x) return { x } end),
        peri.util.map(b.dims, function(x) return { x } end)
      variable.features_per_rank, variable.batch_size_per_rank_per_feature = ones, b.rows_at
      variable.batch_size_per_feature_pre_a2a, variable.emb_dim_per_rank_per_feature = b.rows_at, b.dims_at
    end),
  pooled("alltoallv", 5, n, n,
    function(b) check(C.peri_exchange_alltoallv(group, b.list, 1, b.dims_at, nil, work)) end, function(b)
      for _, t in ipairs(embeddings.alltoallv({ inputs = { b.input }, out_split = b.dims }):wait()) do t:release() end
    end, function(b) b.list = ffi.new("peri_tensor *[1]", b.input_ptr) end),
  pooled("alltoall_sequence", 5, n, n,
    function(b) check(C.peri_exchange_alltoall_sequence(group, b.input_ptr, sequence, nil, work)) end, function(b)
      embeddings.alltoall_sequence { a2a_sequence_embs_tensor = b.input, lengths_after_sparse_data_all2all = b.lengths,
        num_features = 1, input_splits = b.rows, output_splits = b.rows, batch_size_per_rank = b.rows }:wait():release()
    end, function(b)
      b.lengths = peri.full({ n * b.rows[1] }, 1, "i32", "cpu")
      table.insert(b.more, b.lengths)
      sequence.lengths, sequence.features, sequence.stagger = ptr(b.lengths), 1, 1
      sequence.batch_size_per_rank, sequence.input_splits, sequence.output_splits = b.rows_at, b.rows_at, b.rows_at
    end),
  pooled("reduce_scatter_pooled", 4, n, 1,
    function(b) check(C.peri_exchange_reduce_scatter_pooled(group, b.list, nil, work)) end,
    function(b) embeddings.reduce_scatter_pooled({ inputs = b.inputs }):wait():release() end,
    function(b) b.inputs, b.list = parts(b, b.input, b.rows[1]) end),
  pooled("reduce_scatter_base_pooled", 4, n, 1,
    function(b) check(C.peri_exchange_reduce_scatter_base_pooled(group, b.input_ptr, nil, work)) end,
    function(b) embeddings.reduce_scatter_base_pooled({ input = b.input }):wait():release() end),
  pooled("reduce_scatter_v_pooled", 7, n, 1,
    function(b) check(C.peri_exchange_reduce_scatter_v_pooled(group, b.input_ptr, b.rows_at, nil, work)) end,
    function(b) embeddings.reduce_scatter_v_pooled({ input = b.input, input_splits = b.rows }):wait():release() end),
  pooled("reduce_scatter_v_per_feature_pooled", 7, n, 1,
    function(b)
      check(C.peri_exchange_reduce_scatter_v_per_feature_pooled(group, b.s, 1, b.rows_at, b.dims_at, nil, work))
    end, function(b)
      embeddings.reduce_scatter_v_per_feature_pooled({ input = b.send, batch_size_per_rank_per_feature = b.each_rows,
        embedding_dims = { b.dims[1] } }):wait():release()
    end, function(b) b.each_rows = peri.util.map(b.rows, function(x) return { x } end) end),
  pooled("all_gather_base_pooled", 3, 1, n,
    function(b) check(C.peri_exchange_all_gather_base_pooled(group, b.input_ptr, nil, work)) end,
    function(b) embeddings.all_gather_base_pooled({ input = b.input }):wait():release() end),
}
