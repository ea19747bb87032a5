-- dlrm.lua: the model of the demonstration: nn.DLRM over the tables of a loader, with its loss.
local peri = require "perilune"
local nn = peri.nn

--- A list with one more element.
local function with(list, last)
  local out = { unpack(list) }
  out[#out + 1] = last
  return out
end

--- tables: list of { name =, rows =, features = }, as a loader's table_list() gives; dense_features: their number;
--- embedding_dim; dense_layers and over_layers: sizes of the hidden layers; learning_rate and eps: of the tables;
--- pooling: "MEAN" or "SUM". Returns an nn.Module that is called with a batch, and whose logits(batch) are asked for in
--- evaluation: here an nn.DLRMTrain.
return function(args)
  local a = peri.util.named("DLRM", args, {
    tables = peri.util.required.list, dense_features = peri.util.required, embedding_dim = 32, dense_layers = { 64 },
    over_layers = { 128, 64 }, learning_rate = 0.05, eps = 1e-5, pooling = "MEAN",
  })
  local tables = {}
  for i, t in ipairs(a.tables) do
    tables[i] = peri.EmbeddingBagConfig {
      name = t.name, num_embeddings = t.rows, embedding_dim = a.embedding_dim, feature_names = t.features,
      pooling = a.pooling,
    }
  end
  local dlrm = nn.DLRM {
    embedding_bag_collection = peri.EmbeddingBagCollection {
      -- Adagrad keeps a sum for every weight, so its result does not depend on how a table is cut.
      tables = tables, fused_params = { optimizer = "adagrad", learning_rate = a.learning_rate, eps = a.eps },
    },
    dense_in_features = a.dense_features, dense_arch_layer_sizes = with(a.dense_layers, a.embedding_dim),
    over_arch_layer_sizes = with(a.over_layers, 1),
  }
  return nn.DLRMTrain(dlrm, nn.BCEWithLogitsLoss { reduction = "global_mean" })
end
