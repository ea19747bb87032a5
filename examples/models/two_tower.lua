-- two_tower.lua: retrieval with two towers: one makes a vector of what is known about a person, the other one of an
-- item; their product says how well they fit. Vectors of items can be made ahead and searched with
-- peri.sparse.top_products.
local peri = require "perilune"
local nn, F = peri.nn, peri.nn.functional
local util = peri.util

local TwoTower = nn.Module:extend "TwoTower"

--- The pooled rows of some features, one behind the other, through a tower.
local function vector(self, pooled, features, tower)
  return tower(peri.KeyedTensor.regroup({ pooled }, { features })[1])
end

function TwoTower:init(a)
  local tables = {}
  for i, t in ipairs(a.tables) do
    tables[i] = peri.EmbeddingBagConfig { name = t.name, num_embeddings = t.rows, embedding_dim = a.embedding_dim,
      feature_names = t.features, pooling = "SUM" }
  end
  self.embeddings = peri.EmbeddingBagCollection { tables = tables,
    fused_params = { optimizer = "adagrad", learning_rate = a.learning_rate, eps = a.eps } }
  self.query_features, self.candidate_features = a.query_features, a.candidate_features
  self.query_proj = nn.MLP { in_size = #a.query_features * a.embedding_dim, layer_sizes = a.layer_sizes }
  self.candidate_proj = nn.MLP { in_size = #a.candidate_features * a.embedding_dim, layer_sizes = a.layer_sizes }
  self.loss = nn.BCEWithLogitsLoss { reduction = "global_mean" }
end

--- Vectors [B, D] of the people, and of the items, of a batch of ids.
function TwoTower:vectors(features)
  local pooled = self.embeddings(features)
  return vector(self, pooled, self.query_features, self.query_proj),
    vector(self, pooled, self.candidate_features, self.candidate_proj)
end

--- The logits [B] of a batch { sparse_features =, labels = }.
function TwoTower:logits(batch)
  local query, candidate = self:vectors(batch.sparse_features)
  return F.sum(query * candidate, 2)
end

function TwoTower:forward(batch)
  local logits = self:logits(batch)
  return self.loss(logits, batch.labels), logits:detach(), batch.labels
end

--- tables: list of { name =, rows =, features = }; query_features and candidate_features: names of features;
--- embedding_dim; layer_sizes of both towers; learning_rate and eps: of the tables.
return function(args)
  return TwoTower(util.named("TwoTower", args, { tables = util.required.list, query_features = util.required.list,
    candidate_features = util.required.list, embedding_dim = 32, layer_sizes = { 64, 32 }, learning_rate = 0.05,
    eps = 1e-8 }))
end
