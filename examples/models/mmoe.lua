-- mmoe.lua: several tasks (will it be clicked? bought?) that share experts: each task has a gate, which says how much
-- of each expert it takes, and a tower of its own (multi-gate mixture of experts).
local peri = require "perilune"
local nn, F = peri.nn, peri.nn.functional
local util = peri.util

local MMoE = nn.Module:extend "MMoE"

function MMoE:init(a)
  local tables, features = {}, 0
  for i, t in ipairs(a.tables) do
    tables[i] = peri.EmbeddingBagConfig { name = t.name, num_embeddings = t.rows, embedding_dim = a.embedding_dim,
      feature_names = t.features, pooling = "MEAN" }
    features = features + #t.features
  end
  local size = a.dense_features + features * a.embedding_dim
  self.embeddings = peri.EmbeddingBagCollection { tables = tables,
    fused_params = { optimizer = "adagrad", learning_rate = a.learning_rate, eps = a.eps } }
  self.experts, self.gates, self.towers = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
  for _ = 1, a.experts do self.experts:append(nn.MLP { in_size = size, layer_sizes = { a.expert_size } }) end
  for _ = 1, a.tasks do
    self.gates:append(nn.Linear { in_features = size, out_features = a.experts, bias = false })
    self.towers:append(nn.Sequential { nn.MLP { in_size = a.expert_size, layer_sizes = { a.tower_size } },
      nn.Linear { in_features = a.tower_size, out_features = 1 } })
  end
  self.loss = nn.BCEWithLogitsLoss { reduction = "global_mean" }
end

--- The logits [B, tasks] of a batch { dense_features =, sparse_features =, labels = [B, tasks] }.
function MMoE:logits(batch)
  local x = F.cat({ batch.dense_features, self.embeddings(batch.sparse_features):values() }, 2)
  local shared, logits = {}, {}
  for i = 1, #self.experts:children() do shared[i] = self.experts[i](x) end
  local all = F.stack(shared, 2) -- [B, experts, size]
  for t = 1, #self.gates:children() do
    local gate = self.gates[t](x):softmax(-1):unsqueeze(2)
    logits[t] = self.towers[t](F.bmm(gate, all):squeeze(2))
  end
  return F.cat(logits, 2)
end

function MMoE:forward(batch)
  local logits = self:logits(batch)
  return self.loss(logits, batch.labels), logits:detach(), batch.labels
end

--- tables: list of { name =, rows =, features = }; dense_features: their number; tasks; experts and expert_size;
--- tower_size; embedding_dim; learning_rate and eps: of the tables.
return function(args)
  return MMoE(util.named("MMoE", args, { tables = util.required.list, dense_features = util.required.number, tasks = 2,
    experts = 4, expert_size = 32, tower_size = 16, embedding_dim = 16, learning_rate = 0.05, eps = 1e-8 }))
end
