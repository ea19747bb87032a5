-- hstu.lua: a ranker of the HSTU kind (generative recommenders). A person's sequence has the items of the past, the
-- oldest first, and behind them the items that are asked about (targets). Every layer lets each member look at what
-- came before it; a target sees the past and itself, so many targets are ranked at the price of one pass. Nothing is
-- padded: docs/sequences.md.
-- What is known of a person (context: a country, an age) stands in front of the sequence, sees all of it and is seen by
-- all.
--
-- A batch: sparse_features: ids by "item" (the sequence with its targets) and "action" (what the person did with each
-- item; for targets the number of "not known yet"), of equal lengths, and one id of each context; timestamps [n] in
-- seconds, i64; num_targets [B]; labels: 0 or 1 for each target, [T].
local peri = require "perilune"
local nn, F, sparse = peri.nn, peri.nn.functional, peri.sparse
local util = peri.util

-- -- a layer ----------------------------------------------------------------------------------------------------------

--- A sequential transduction unit: one product makes u, v, q and k of each member; attention with the weights silu(q .
--- k); what comes out is normed, gated by u, and added to what came in.
local STULayer = nn.Module:extend "STULayer"

function STULayer:init(a)
  local d, hidden = a.embedding_dim, a.num_heads * a.hidden_dim
  self.heads, self.hidden, self.attention = a.num_heads, a.hidden_dim, a.num_heads * a.attention_dim
  self.max_seq_len, self.context, self.alpha = a.max_seq_len, #a.context, 1 / math.sqrt(a.attention_dim)
  self.input_norm = nn.LayerNorm { normalized_shape = d }
  self.uvqk = nn.Linear { in_features = d, out_features = 2 * hidden + 2 * self.attention }
  self.output_norm = nn.LayerNorm { normalized_shape = hidden }
  self.output = nn.Linear { in_features = hidden, out_features = d }
  self.drop = nn.Dropout { p = a.dropout }
end

function STULayer:forward(x, offsets, num_targets)
  local n, hidden = x:size(1), self.heads * self.hidden
  local parts = F.split(F.silu(self.uvqk(self.input_norm(x))), { hidden, hidden, self.attention, self.attention }, 2)
  local u, v, q, k = unpack(parts)
  local size = self.attention / self.heads
  local y = sparse.hstu_mha { max_seq_len = self.max_seq_len, alpha = self.alpha, q = q:reshape(n, self.heads, size),
    k = k:reshape(n, self.heads, size), v = v:reshape(n, self.heads, self.hidden), seq_offsets = offsets,
    num_targets = num_targets, contextual_seq_len = self.context }
  return x + self.output(self.drop(u * self.output_norm(y:reshape(n, hidden))))
end

-- -- the model --------------------------------------------------------------------------------------------------------

local HSTU = nn.Module:extend "HSTU"

function HSTU:init(a)
  local d = a.embedding_dim
  local function table_of(name, rows)
    return peri.EmbeddingConfig { name = name, num_embeddings = rows, embedding_dim = d, feature_names = { name } }
  end
  self.scale, self.positions, self.buckets = math.sqrt(d), a.max_seq_len + 1, a.num_time_buckets
  local tables = { table_of("item", a.items), table_of("action", a.actions) }
  self.context_names = util.map(a.context, function(t) return t.name end)
  for _, t in ipairs(a.context) do table.insert(tables, table_of(t.name, t.rows)) end
  if #a.context > 0 then self.context = nn.Embedding { num_embeddings = #a.context, embedding_dim = d } end
  self.embeddings = peri.EmbeddingCollection { tables = tables,
    fused_params = { optimizer = "adagrad", learning_rate = a.learning_rate, eps = a.eps } }
  self.position = nn.Embedding { num_embeddings = self.positions, embedding_dim = d }
  self.time = nn.Embedding { num_embeddings = a.num_time_buckets + 1, embedding_dim = d }
  self.layers = nn.ModuleList()
  for _ = 1, a.num_layers do self.layers:append(STULayer(a)) end
  self.input_drop = nn.Dropout { p = a.dropout }
  self.norm = nn.LayerNorm { normalized_shape = d }
  self.head = nn.Linear { in_features = d, out_features = 1 }
  self.loss = nn.BCEWithLogitsLoss { reduction = "global_mean" }
end

--- The sequences x of `items` with the vectors of their context in front, their offsets and lengths.
function HSTU:with_context(rows, x, items)
  local names, offsets = self.context_names, items:offsets()
  if #names == 0 then return x, offsets, items:lengths() end
  local vectors = F.stack(util.map(names, function(name) return rows[name]:values() end), 2) + self.context.weight
  x, offsets = sparse.concat_2D_jagged { values_left = vectors:reshape(-1, vectors:size(3)), values_right = x,
    offsets_left = peri.arange(0, vectors:size(1) * #names + 1, #names, "i64", x:device()), offsets_right = offsets }
  return x, offsets, peri.JaggedTensor { values = x, offsets = offsets }:lengths()
end

--- The logits of all targets of a batch, [T].
function HSTU:logits(batch)
  local rows = self.embeddings(batch.sparse_features)
  local items, targets = rows.item, batch.num_targets
  local offsets, n = items:offsets(), items:values():size(1)
  local places = sparse.sequence_positions { seq_offsets = offsets, rows = n, num_targets = targets,
    max_positions = self.positions }
  local times = sparse.time_buckets { timestamps = batch.timestamps, seq_offsets = offsets, num_buckets = self.buckets }
  local x = items:values() * self.scale + rows.action:values() + self.position(places) + self.time(times)
  local lengths
  x, offsets, lengths = self:with_context(rows, x, items)
  x = self.input_drop(x)
  for i = 1, #self.layers:children() do x = self.layers[i](x, offsets, targets) end
  places = sparse.sequence_positions { seq_offsets = offsets, rows = x:size(1), num_targets = targets,
    max_positions = 2 } -- 0: a target
  local asked = sparse.masked_select_jagged_1d(self.norm(x), lengths, places:eq(0))
  return self.head(asked):reshape(-1)
end

function HSTU:forward(batch)
  local logits = self:logits(batch)
  return self.loss(logits, batch.labels), logits:detach(), batch.labels
end

--- items and actions: rows of the tables; embedding_dim; num_layers; num_heads, of attention_dim and hidden_dim numbers
--- each; max_seq_len: of a sequence with its context and targets; context: a list of { name =, rows = }, the feature
--- and the table of each; num_time_buckets; dropout: of what goes into the first layer and out of each, while it is
--- trained; learning_rate and eps: of the tables.
return function(args)
  return HSTU(util.named("HSTU", args, { items = util.required.number, actions = util.required.number,
    embedding_dim = 32, num_layers = 2, num_heads = 2, attention_dim = 16, hidden_dim = 16, max_seq_len = 200,
    num_time_buckets = 2048, context = {}, dropout = 0, learning_rate = 0.05, eps = 1e-8 }))
end
