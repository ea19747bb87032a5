-- dlrm.lua: the DLRM of Naumov et al. 2019: a perceptron over the dense features, an embedding per sparse feature, the dot products of all
-- pairs of those vectors, and a perceptron over them.
local peri = require "perilune"
local nn = peri.nn
local F = nn.functional

local DLRM = nn.Module:extend "DLRM"

--- tables: list of { name =, rows =, features = }, as a loader's table_list() gives; dense_features: their number; embedding_dim;
--- dense_layers and over_layers: sizes of the hidden layers; learning_rate and eps: of the tables; pooling: "MEAN" or "SUM".
function DLRM:init(args)
  local a = peri.util.named("DLRM", args, {
    tables = peri.util.required, dense_features = peri.util.required, embedding_dim = 32, dense_layers = { 64 }, over_layers = { 128, 64 },
    learning_rate = 0.05, eps = 1e-5, pooling = "MEAN",
  })
  local dim, features = a.embedding_dim, 0
  local tables = {}
  for i, t in ipairs(a.tables) do
    features = features + #t.features
    tables[i] = peri.EmbeddingBagConfig {
      name = t.name, num_embeddings = t.rows, embedding_dim = dim, feature_names = t.features, pooling = a.pooling,
    }
  end
  self.embedding_dim, self.features = dim, features
  -- Adagrad keeps a sum for every weight, so its result does not depend on how a table is cut.
  self.embeddings = peri.EmbeddingBagCollection {
    tables = tables, fused_params = { optimizer = "adagrad", learning_rate = a.learning_rate, eps = a.eps },
  }
  local sizes = {}
  for i, n in ipairs(a.dense_layers) do sizes[i] = n end
  sizes[#sizes + 1] = dim
  self.dense_arch = nn.MLP { in_size = a.dense_features, layer_sizes = sizes }
  self.over_arch = nn.MLP { in_size = dim + features * (features + 1) / 2, layer_sizes = a.over_layers }
  self.loss = nn.BCEWithLogitsLoss { reduction = "global_mean" }
  self.final = nn.Linear { in_features = a.over_layers[#a.over_layers], out_features = 1 }
end

--- Logits of a batch, [rows].
function DLRM:logits(batch)
  local dense = self.dense_arch(batch.dense_features)
  local sparse = self.embeddings(batch.sparse_features):values():reshape(batch.rows, self.features, self.embedding_dim)
  return self.final(self.over_arch(F.interaction(dense, sparse))):reshape(batch.rows)
end

--- The mean log-loss of the global batch, on every rank, and the logits of this rank's samples.
function DLRM:forward(batch)
  local logits = self:logits(batch)
  return self.loss(logits, batch.labels), logits
end

return DLRM
