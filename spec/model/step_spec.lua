-- The training step over many steps: memory stays flat, and the whole loop is compiled.
local peri = require "perilune"
local jit_support = require "spec.support.jit"
local sim = require "perilune.dist.sim"
local nn, plan, C = peri.nn, peri.plan, peri.ffi.C

local function make(world, device)
  local tables, entries = {}, {}
  for i = 1, 3 do
    tables[i] = peri.EmbeddingBagConfig { name = "t" .. i, num_embeddings = 40, embedding_dim = 4, feature_names = { "f" .. i }, pooling = i == 2 and "MEAN" or "SUM" }
  end
  entries = { t1 = plan.table_wise(world:size() - 1), t2 = plan.row_wise(), t3 = plan.data_parallel { compute_kernel = "fused" } }
  local dlrm = nn.DLRM {
    embedding_bag_collection = peri.EmbeddingBagCollection { tables = tables, fused_params = { optimizer = "rowwise_adagrad" } },
    dense_in_features = 3, dense_arch_layer_sizes = { 8, 4 }, over_arch_layer_sizes = { 6, 1 }, dense_device = device,
  }
  local model = peri.DistributedModelParallel {
    module = nn.DLRMTrain(dlrm), group = world, device = device, plan = { ["model.sparse_arch.embedding_bag_collection"] = entries },
  }
  local optimizer = nn.optim.Adam { params = model:dense_parameters(), lr = 0.001 }
  return peri.TrainPipelineBase { model = model, optimizer = optimizer }
end

--- Two batches that come again and again.
local function batches_of(rank, device)
  local list, i = {}, 0
  for k = 1, 2 do
    local values, lengths = {}, {}
    for bag = 1, 12 do
      lengths[bag] = (bag * k + rank) % 4
      for j = 1, lengths[bag] do values[#values + 1] = (bag * 7 + j * 3 + k + rank) % 40 end
    end
    list[k] = {
      dense_features = peri.Tensor.normal({ 4, 3 }, 0, 1, k + rank, 0, "f32", device), labels = peri.tensor({ 0, 1, 1, 0 }, "f32", device),
      sparse_features = peri.KeyedJaggedTensor { keys = { "f1", "f2", "f3" }, values = values, lengths = lengths, stride = 4, device = device },
    }
  end
  return function()
    i = i % 2 + 1
    return list[i]
  end
end

local function release(loss, logits, labels)
  loss:release()
  logits:release()
  labels:release()
end

local function resident()
  local file = assert(io.open "/proc/self/statm")
  local pages = tonumber(file:read("*a"):match "^%d+ (%d+)")
  file:close()
  return pages * 4096
end

local function flat(device, steps)
  sim.run(2, function(rank, world)
    local pipeline, batches = make(world, device), batches_of(rank, device)
    local function run(n)
      for _ = 1, n do release(pipeline:progress(batches)) end
      collectgarbage()
      collectgarbage()
      world:barrier():wait()
      peri.ffi.check(C.peri_device_synchronize(peri.ffi.device(device))) -- what is queued holds memory
      world:barrier():wait()
    end
    run(steps / 10)
    local live, objects, rss, lua = tonumber(C.peri_mem_live()), tonumber(C.peri_mem_objects()), resident(), collectgarbage "count"
    run(steps)
    assert.is_true(tonumber(C.peri_mem_objects()) <= objects + 16, ("objects: %d, then %d"):format(objects, tonumber(C.peri_mem_objects())))
    assert.is_true(tonumber(C.peri_mem_live()) <= live + 65536, ("bytes: %d, then %d"):format(live, tonumber(C.peri_mem_live())))
    assert.is_true(collectgarbage "count" <= lua + 512, "Lua's memory grew")
    assert.is_true(resident() <= rss + 8 * 1024 * 1024, ("resident: %d, then %d"):format(rss, resident()))
  end, { device = device })
end

describe("the training step", function()
  it("takes no memory: 10,000 steps on two ranks", function() flat("cpu", 10000) end)
  it("takes no memory on opaque", function() flat("opaque", 600) end)

  it("is compiled, without an aborted trace", function()
    local world = peri.dist.init { transport = "self" }
    local pipeline, batches = make(world, "cpu"), batches_of(0, "cpu")
    local function step() release(pipeline:progress(batches)) end
    step()
    jit_support.assert_compiles("TrainPipelineBase:progress", step)
    peri.dist.finish()
  end)
end)
