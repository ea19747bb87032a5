-- What a training step does with groups, exchanges and awaitables compiles (style J2). In a world of one rank: what
-- differs between ranks is behind the FFI. (mpirun: none. SparseFeaturesAllToAll and FusedKJTListSplitsAwaitable are
-- missing: of their pieces, which are here, LuaJIT makes one trace or several, and one is longer than its registers
-- reach: the latter's in one of ten orders of these tests, with the LuaJIT of Debian 13)
local dist = require "perilune.dist"
local ops = require "perilune.dist.ops"
local codec = require "perilune.dist.codec"
local peri = require "perilune"
local support = require "spec.support.jit"
local P = require "perilune.ffi"

for _, device in ipairs { "cpu", "opaque" } do
  describe("exchanges, compiled on " .. device, function()
    local world, hot

    local function wait(a) a:wait():release() end

    setup(function()
      world = peri.init { transport = "self" }
      local t = peri.ones({ 4, 2 }, "f32", device)
      local flat = peri.ones({ 8 }, "f32", device)
      local ids = peri.ones({ 4 }, "i64", device)
      local lengths = peri.full({ 4 }, 1, "i32", device)
      local keys = { "a", "b" }
      local kjt = peri.KeyedJaggedTensor { keys = keys, values = ids, lengths = lengths }:sync()
      local one, two, list, lists = { 4 }, { 2 }, { t }, { { 2, 2 } }
      local codecs = codec.get_qcomm_codecs { forward = "FP16", backward = "BF16" }
      local pooled = { a2a_pooled_embs_tensor = t, batch_size_per_rank = one, dim_sum_per_rank = two, codecs = codecs }
      local variable = { a2a_pooled_embs_tensor = flat, batch_size_per_rank_per_feature = { { 2, 2 } },
        batch_size_per_feature_pre_a2a = { 2, 2 }, emb_dim_per_rank_per_feature = { { 2, 2 } } }
      local inputs, scatter, base = { inputs = list }, { input = t, input_splits = one }, { input = t }
      local dealt = { inputs = list, out_split = two }
      local feature = { input = flat, batch_size_per_rank_per_feature = lists, embedding_dims = { 2, 2 } }
      local sequence = { a2a_sequence_embs_tensor = t, lengths_after_sparse_data_all2all = lengths, input_splits = one,
        output_splits = one, batch_size_per_rank = two, num_features = 2 }
      local a2a = dist.KJTAllToAll(world, { 2 })
      local pooled_module = dist.PooledEmbeddingsAllToAll { pg = world, dim_sum_per_rank = { 2 } }
      local scatter_module = dist.PooledEmbeddingsReduceScatter { pg = world }
      local gather_module = dist.PooledEmbeddingsAllGather { pg = world }
      local sequence_module = dist.SequenceEmbeddingsAllToAll { pg = world, features_per_rank = { 2 } }
      local returned = { local_embs = t, lengths = lengths, input_splits = one, output_splits = one,
        batch_size_per_rank = two }
      local variable_module = dist.VariableBatchPooledEmbeddingsAllToAll { pg = world,
        emb_dim_per_rank_per_feature = lists }
      local feature_module = dist.VariableBatchPooledEmbeddingsReduceScatter { pg = world }
      local c = codecs.forward
      local context = c:create_context { 8 }
      local dims = { 2, 2 }
      local blocks = { input = t, group_assignment = { { 0 } }, split_count = 1, split_dimension = 1,
        concat_dimension = 2, group = world }
      local outputs = { peri.empty({ 4, 2 }, "f32", device) }
      local gathered = peri.empty({ 4, 2 }, "f32", device)
      hot = {
        ["barrier"] = function() world:barrier():wait() end,
        ["broadcast"] = function() world:broadcast(t, 0):wait() end,
        ["all_reduce"] = function() world:all_reduce(t):wait() end,
        ["all_gather"] = function() world:all_gather(t, gathered):wait() end,
        ["reduce_scatter"] = function() world:reduce_scatter(t, "sum", gathered):wait() end,
        ["all_to_all_v"] = function() world:all_to_all_v(t, one, one, gathered):wait() end,
        ["all_to_all of lists"] = function() dist.all_to_all(outputs, list, world) end,
        ["test, then wait"] = function()
          local a = world:barrier()
          if not a:test() then a:wait() end
          a:wait()
        end,
        ["alltoall_pooled"] = function() wait(ops.alltoall_pooled(pooled)) end,
        ["variable_batch_alltoall_pooled"] = function() wait(ops.variable_batch_alltoall_pooled(variable)) end,
        ["alltoallv"] = function() ops.alltoallv(dealt):wait()[1]:release() end,
        ["reduce_scatter_pooled"] = function() wait(ops.reduce_scatter_pooled(inputs)) end,
        ["reduce_scatter_base_pooled"] = function() wait(ops.reduce_scatter_base_pooled(base)) end,
        ["reduce_scatter_v_pooled"] = function() wait(ops.reduce_scatter_v_pooled(scatter)) end,
        ["reduce_scatter_v_per_feature_pooled"] = function() wait(ops.reduce_scatter_v_per_feature_pooled(feature)) end,
        ["all_gather_base_pooled"] = function() wait(ops.all_gather_base_pooled(base)) end,
        ["alltoall_sequence"] = function() wait(ops.alltoall_sequence(sequence)) end,
        ["KJTAllToAll"] = function()
          local tensors = a2a(kjt):wait()
          tensors:wait():release()
        end,
        ["PooledEmbeddingsAllToAll"] = function() wait(pooled_module(t, one)) end,
        ["PooledEmbeddingsReduceScatter"] = function() wait(scatter_module(t, one)) end,
        ["PooledEmbeddingsAllGather"] = function() wait(gather_module(t)) end,
        ["SequenceEmbeddingsAllToAll"] = function() wait(sequence_module(returned)) end,
        ["VariableBatchPooledEmbeddingsAllToAll"] = function() wait(variable_module(flat, lists, dims)) end,
        ["VariableBatchPooledEmbeddingsReduceScatter"] = function() wait(feature_module(flat, lists, dims)) end,
        ["encode and decode"] = function()
          local wire = c:encode(flat, context)
          c:decode(wire, context):release()
          wire:release()
        end,
        ["tpu_all_to_all"] = function() wait(dist.tpu_all_to_all(blocks)) end,
        ["the control of a step"] = function()
          return world:is_healthy() and world:rank() + world:size() + world:timeout()
        end, ["a lazy result"] = function() return dist.LazyNoWait(t):numel() end,
      }
    end)
    teardown(function()
      hot = nil
      collectgarbage()
      peri.finish()
    end)

    for _, name in ipairs {
      "barrier", "broadcast", "all_reduce", "all_gather", "reduce_scatter", "all_to_all_v", "all_to_all of lists",
      "test, then wait", "alltoall_pooled", "variable_batch_alltoall_pooled", "alltoallv", "reduce_scatter_pooled",
      "reduce_scatter_base_pooled", "reduce_scatter_v_pooled", "reduce_scatter_v_per_feature_pooled",
      "all_gather_base_pooled", "alltoall_sequence", "KJTAllToAll", "SequenceEmbeddingsAllToAll",
      "VariableBatchPooledEmbeddingsAllToAll", "VariableBatchPooledEmbeddingsReduceScatter", "encode and decode",
      "tpu_all_to_all", "the control of a step", "PooledEmbeddingsAllToAll",
      "PooledEmbeddingsReduceScatter", "PooledEmbeddingsAllGather", "a lazy result",
    } do
      it(name, function()
        assert.equal(world, P.state.world)
        support.assert_compiles(name, hot[name])
      end)
    end
  end)
end
