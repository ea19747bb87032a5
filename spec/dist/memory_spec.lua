-- Memory that runs out in exchanges of embeddings and of KeyedJaggedTensors: wherever an allocation fails, that rank
-- says so, the other one is told at once (not by a deadline), nothing leaks, and the process goes on. (mpirun: none: a
-- rank of another process cannot count its neighbour's allocations)
-- deadline: 240 s
local codec = require "perilune.dist.codec"
local dist = require "perilune.dist"
local ops = require "perilune.dist.ops"
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local F, C = peri.nn.functional, peri.ffi.C

local function leaf(shape, device) return peri.ones(shape, "f32", device):requires_grad() end

local function backward(out)
  local all = peri.Tensor.is(out) and { out } or out
  local loss
  for _, t in ipairs(all) do
    local part = F.sum(t)
    loss = loss and F.add(loss, part) or part
  end
  loss:backward()
end

local function kjt(rank, device, more)
  local args = { keys = { "a", "b" }, values = { 1, 2, 3, 4 + rank }, lengths = { 1, 0, 1, 2 }, device = device }
  for k, v in next, more or {} do args[k] = v end
  return peri.KeyedJaggedTensor(args)
end
local variable = { stride_per_key_per_rank = { { 1 }, { 3 } }, weights = { 1, 2, 3, 4 } }

local fp16 = codec.get_qcomm_codecs { forward = "FP16", backward = "INT8" }
--- What rank `rank` of 2 does; each is one exchange with what belongs to it.
local cases = {
  { "alltoall_pooled", function(_, _, device)
    backward(ops.alltoall_pooled { a2a_pooled_embs_tensor = leaf({ 4, 2 }, device), batch_size_per_rank = { 2, 2 },
      dim_sum_per_rank = { 2, 2 } }:wait())
  end },
  { "alltoall_pooled with codecs", function(_, _, device)
    backward(ops.alltoall_pooled { a2a_pooled_embs_tensor = leaf({ 4, 2 }, device), batch_size_per_rank = { 2, 2 },
      dim_sum_per_rank = { 2, 2 }, codecs = fp16 }:wait())
  end },
  { "variable_batch_alltoall_pooled", function(_, _, device)
    backward(dist.VariableBatchPooledEmbeddingsAllToAll { emb_dim_per_rank_per_feature = { { 2 }, { 2 } } }(leaf({ 4 },
      device), { { 1 }, { 1 } }, { 1, 1 }):wait())
  end },
  { "alltoallv", function(_, _, device)
    backward(ops.alltoallv { inputs = { leaf({ 3, 1 }, device), leaf({ 3, 2 }, device) }, out_split = { 3, 3 } }:wait())
  end },
  { "reduce_scatter_pooled", function(_, _, device)
    backward(ops.reduce_scatter_pooled { inputs = { leaf({ 1, 2 }, device), leaf({ 3, 2 }, device) } }:wait())
  end },
  { "reduce_scatter_v_pooled with codecs", function(_, _, device)
    backward(dist.PooledEmbeddingsReduceScatter { codecs = fp16 }(leaf({ 3, 2 }, device), { 1, 2 }):wait())
  end },
  { "reduce_scatter_v_per_feature_pooled", function(_, _, device)
    backward(dist.VariableBatchPooledEmbeddingsReduceScatter {}(leaf({ 6 }, device), { { 1, 1 }, { 1, 1 } },
      { 2, 1 }):wait())
  end },
  { "all_gather_base_pooled", function(_, _, device)
    backward(dist.PooledEmbeddingsAllGather {}(leaf({ 2, 2 }, device)):wait())
  end },
  { "alltoall_sequence and its ids", function(rank, _, device)
    local sizes = dist.KJTAllToAll(nil, { 1, 1 })(kjt(rank, device)):wait()
    local known, mine = sizes:splits(), sizes:wait()
    backward(dist.SequenceEmbeddingsAllToAll { features_per_rank = { 1, 1 } } {
      local_embs = leaf({ mine:values():numel(), 2 }, device), lengths = mine:lengths(),
      input_splits = known.input_splits, output_splits = known.output_splits,
      batch_size_per_rank = known.stride_per_rank, unbucketize_permute_tensor = peri.tensor({ 1, 0, 3, 2 }, "i64",
        device),
    }:wait())
  end },
  { "fused sizes of two KJTs", function(rank, _, device)
    local a2a = dist.KJTAllToAll(nil, { 1, 1 })
    local both = dist.FusedKJTListSplitsAwaitable { a2a:defer(kjt(rank, device)), dist.NoWait(1),
      a2a:defer(kjt(rank, device, variable)) }
    local tensors = both:wait()
    tensors[3]:wait()
    tensors[1]:wait()
  end },
  { "SparseFeaturesAllToAll", function(rank, _, device)
    dist.SparseFeaturesAllToAll { id_list_features_per_rank = { 2, 0 },
      id_score_list_features_per_rank = { 1, 1 } }(dist.SparseFeatures {
      id_list_features = kjt(rank, device),
      id_score_list_features = kjt(rank, device, { weights = { 1, 2, 3, 4 } }) }):wait()
  end },
  { "one to all, all to one", function(_, _, device)
    for _, part in ipairs(dist.KJTOneToAll({ 1, 1 }, 2, device)(kjt(0, "cpu"))) do part:sync() end
    local parts = { leaf({ 2, 1 }, device), leaf({ 2, 1 }, device) }
    backward(dist.EmbeddingsAllToOne { world_size = 2, device = "cpu" }(parts))
    backward(dist.EmbeddingsAllToOneReduce { world_size = 2, device = device }(parts))
  end },
  { "tpu_all_to_all and a list", function(_, _, device)
    backward(dist.tpu_all_to_all { input = leaf({ 2, 2 }, device), group_assignment = { { 1, 0 } },
      concat_dimension = 1, split_dimension = 2, split_count = 2 }:wait())
    backward(dist.functional.all_to_all(nil, { leaf({ 2 }, device), leaf({ 2 }, device) }):wait())
  end },
  { "a group, a result of one rank", function(_, world)
    local group = world:new_group({ 1, 0 }, "turned")
    assert.equal("x", dist.collective_utils.invoke_on_rank_and_broadcast_result(group, 1, function() return "x" end))
    group:release()
  end },
}

local function objects()
  collectgarbage()
  collectgarbage()
  return tonumber(C.peri_mem_objects())
end

--- Run a case on 2 ranks, the k-th passage of `point` from its beginning on fails (0: none). Errors by rank + 1, and
--- the passages.
local function run(case, device, point, k)
  local passed
  local _, errors = sim.run(2, function(rank, world)
    world:barrier():wait()
    if rank == 0 then peri.ffi.check(C.peri_fault_arm(point, k)) end
    world:barrier():wait()
    case[2](rank, world, device)
    world:barrier():wait()
    passed = tonumber(C.peri_fault_passed(point))
  end, { device = device, catch = true })
  C.peri_fault_arm(point, 0)
  return errors, passed
end

--- Both ranks have an error that tells what happened, and none of them had to wait for a deadline.
local function check_told(errors, what)
  for rank = 0, 1 do
    local err = errors[rank + 1]
    local text = ("%s, rank %d: %s"):format(what, rank, tostring(err))
    assert.is_truthy(err and err.name, text)
    assert.is_true(err.name == "ENOMEM" or err.name == "EPEER" or err.name == "EABORTED", text)
    assert.is_truthy(err.message:match "no memory", text)
  end
end

describe("out of memory in", function()
  setup(function() C.peri_log_level_set(C.PERI_LOG_ERROR) end)
  teardown(function() C.peri_log_level_set(C.PERI_LOG_WARN) end)

  for _, device in ipairs { "cpu", "opaque" } do
    for _, case in ipairs(cases) do
      for _, point in ipairs { "alloc", "device_alloc" } do
        it(("%s, %s, %s"):format(case[1], device, point), function()
          assert.same({}, (run(case, device, point, 0)))
          local before = objects()
          local errors, passed = run(case, device, point, 0)
          assert.same({}, errors)
          local failures = 0
          for k = 1, passed do
            errors = run(case, device, point, k)
            -- Giving memory back does not fail: where that needs memory of its own (opaque), it is done another way.
            if errors[1] or errors[2] or device == "cpu" then
              failures = failures + 1
              check_told(errors, ("passage %d of %d"):format(k, passed))
            end
          end
          assert.is_true(failures > passed / 2 and failures > 2, failures .. " failures")
          assert.same({}, (run(case, device, point, 0)))
          assert.equal(before, objects())
        end)
      end
    end
  end
end)
