-- deepfm.lua: DeepFM: a factorization machine (products of all pairs of features) beside a deep network over the same
-- rows. The layers are nn.SimpleDeepFMNN's; here are its tables, its loss, and what a batch is.
local peri = require "perilune"
local nn = peri.nn
local util = peri.util

local DeepFM = nn.Module:extend "DeepFMTrain"

function DeepFM:init(a)
  local tables = {}
  for i, t in ipairs(a.tables) do
    tables[i] = peri.EmbeddingBagConfig { name = t.name, num_embeddings = t.rows, embedding_dim = a.embedding_dim,
      feature_names = t.features, pooling = "SUM" }
  end
  self.model = nn.SimpleDeepFMNN {
    num_dense_features = a.dense_features, hidden_layer_size = a.hidden_layer_size,
    deep_fm_dimension = a.deep_fm_dimension, embedding_bag_collection = peri.EmbeddingBagCollection { tables = tables,
      fused_params = { optimizer = "adagrad", learning_rate = a.learning_rate, eps = a.eps } },
  }
  self.loss = nn.BCELoss { reduction = "global_mean" }
end

--- The probabilities [B] of a batch { dense_features =, sparse_features =, labels = }.
function DeepFM:probabilities(batch) return self.model(batch.dense_features, batch.sparse_features):reshape(-1) end

function DeepFM:forward(batch)
  local p = self:probabilities(batch)
  return self.loss(p, batch.labels), p:detach(), batch.labels
end

--- tables: list of { name =, rows =, features = }; dense_features: their number; embedding_dim; hidden_layer_size: of
--- the dense features' network; deep_fm_dimension: of the deep part; learning_rate and eps: of the tables.
return function(args)
  return DeepFM(util.named("DeepFM", args, { tables = util.required.list, dense_features = util.required.number,
    embedding_dim = 16, hidden_layer_size = 32, deep_fm_dimension = 16, learning_rate = 0.05, eps = 1e-8 }))
end
