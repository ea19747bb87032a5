-- step.lua: a small DLRM and its batches, for specs of the training step.
local peri = require "perilune"
local nn, plan = peri.nn, peri.plan

local M = {}

--- A pipeline (of class `class`, TrainPipelineBase) over three tables, one of each kind of sharding; two_d: of a
--- DMPCollection, each rank a sharding group.
function M.pipeline(world, device, two_d, class)
  local tables = {}
  for i = 1, 3 do
    tables[i] = peri.EmbeddingBagConfig {
      name = "t" .. i, num_embeddings = 40, embedding_dim = 4, feature_names = { "f" .. i }, pooling = i == 2
        and "MEAN" or "SUM",
    }
  end
  local entries = { t1 = plan.table_wise(two_d and 0 or world:size() - 1), t2 = plan.row_wise(),
    t3 = plan.data_parallel { compute_kernel = "fused" } }
  local dlrm = nn.DLRM {
    embedding_bag_collection = peri.EmbeddingBagCollection { tables = tables,
      fused_params = { optimizer = "rowwise_adagrad" } },
    dense_in_features = 3, dense_arch_layer_sizes = { 8, 4 }, over_arch_layer_sizes = { 6, 1 }, dense_device = device,
  }
  local model = peri[two_d and "DMPCollection" or "DistributedModelParallel"] {
    module = nn.DLRMTrain(dlrm, nn.BCEWithLogitsLoss { reduction = "global_mean" }),
    group = not two_d and world or nil, global_pg = two_d and world or nil, sharding_group_size = two_d and 1 or nil,
    device = device, plan = { ["model.sparse_arch.embedding_bag_collection"] = entries },
  }
  local optimizer = nn.optim.Adam { params = model:dense_parameters(), lr = 0.001 }
  return peri[class or "TrainPipelineBase"] { model = model, optimizer = optimizer }
end

--- Two batches that come again and again.
function M.batches(rank, device)
  local list, i = {}, 0
  for k = 1, 2 do
    local values, lengths = {}, {}
    for bag = 1, 12 do
      lengths[bag] = (bag * k + rank) % 4
      for j = 1, lengths[bag] do values[#values + 1] = (bag * 7 + j * 3 + k + rank) % 40 end
    end
    list[k] = {
      dense_features = peri.Tensor.normal({ 4, 3 }, 0, 1, k + rank, 0, "f32", device),
      labels = peri.tensor({ 0, 1, 1, 0 }, "f32", device), sparse_features = peri.KeyedJaggedTensor {
        keys = { "f1", "f2", "f3" }, values = values, lengths = lengths, stride = 4, device = device,
      },
    }
  end
  return function()
    i = i % 2 + 1
    return list[i]
  end
end

--- What a step returned is not needed.
function M.release(loss, logits, labels)
  loss:release()
  logits:release()
  labels:release()
end

return M
