-- din.lua: Deep Interest Network: what a person did before counts as much as it has to do with the item that is asked
-- about. A small network looks at each pair of a member of the history and the candidate, and gives it a weight.
local peri = require "perilune"
local nn, F, sparse = peri.nn, peri.nn.functional, peri.sparse
local util = peri.util

local DIN = nn.Module:extend "DIN"

function DIN:init(a)
  local dim = a.embedding_dim
  self.items = peri.EmbeddingCollection {
    tables = { peri.EmbeddingConfig { name = "item", num_embeddings = a.items, embedding_dim = dim,
      feature_names = { "history", "candidate" } } },
    fused_params = { optimizer = "adagrad", learning_rate = a.learning_rate, eps = a.eps },
  }
  self.attention = nn.Sequential { nn.Linear { in_features = 4 * dim, out_features = a.attention_size }, nn.Sigmoid(),
    nn.Linear { in_features = a.attention_size, out_features = 1 } }
  self.over = nn.Sequential { nn.Linear { in_features = 3 * dim, out_features = a.hidden_size }, nn.PReLU(),
    nn.Linear { in_features = a.hidden_size, out_features = 1 } }
  self.loss = nn.BCEWithLogitsLoss { reduction = "global_mean" }
end

--- The weighted sum of each history, [B, D]; candidate [B, D], one for each sample.
function DIN:interest(history, candidate)
  local rows, offsets = history:values(), history:offsets()
  local of = sparse.index_select_dim0(candidate, sparse.sequence_numbers(offsets, rows:size(1)))
  local weights = self.attention(F.cat({ rows, of, rows - of, rows * of }, 2))
  -- Each bag's sum: the weighted rows are a table, of which bag b has its own.
  local every = peri.arange(0, rows:size(1), 1, "i64", rows:device())
  return nn.embedding.embedding_bag(rows * weights, every, offsets, "sum", nil, true)
end

--- The logits [B] of a batch { sparse_features = { history, candidate }, labels = }: each sample has one candidate.
function DIN:logits(batch)
  local rows = self.items(batch.sparse_features)
  local candidate = rows.candidate:values()
  local interest = self:interest(rows.history, candidate)
  return self.over(F.cat({ interest, candidate, interest * candidate }, 2)):reshape(-1)
end

function DIN:forward(batch)
  local logits = self:logits(batch)
  return self.loss(logits, batch.labels), logits:detach(), batch.labels
end

--- items: rows of the table; embedding_dim; attention_size and hidden_size: of the two networks; learning_rate and eps:
--- of the table.
return function(args)
  return DIN(util.named("DIN", args, { items = util.required.number, embedding_dim = 16, attention_size = 16,
    hidden_size = 32, learning_rate = 0.05, eps = 1e-8 }))
end
