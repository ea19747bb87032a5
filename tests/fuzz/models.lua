-- models.lua: models drawn at random, exported: tables of all dtypes and poolings, of several features, and features of
-- several tables; weighted, as parameters or fused, in files, quantised, with maps of raw ids, pooled or as sequences;
-- alone, or over ranks under a drawn plan (replicas and files among it); and layers of all kinds behind them. The law:
-- the file answers with the bits of the model in evaluation, for batches, and for samples alone or among any others;
-- where tables are f16 or bf16 in the file, it answers as a model whose rows were rounded before; and, of a third of
-- the models, a file that follows three steps of training has the bits of a file that is exported then.
--
--   luajit tests/fuzz/models.lua [MODELS [SEED]]   as `make test` runs it; a failure says how to repeat it
--   luajit tests/fuzz/models.lua SECONDSs [SEED]   as `make fuzz` runs it
--   luajit tests/fuzz/models.lua once SEED         one model, printed
-- inputs: 25
-- takes: 3 s
local here, build = io.popen("pwd"):read "*l", os.getenv "PERI_BUILD" or "build"
package.path = ("%s/%s/lua/?.lua;%s/lua/?.lua;%s/lua/?/init.lua;%s/?.lua;%s"):format(here, build, here, here, here,
  package.path)
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local drawing = require "spec.support.drawing"
local nn, F, plan, embed, sparse = peri.nn, peri.nn.functional, peri.plan, peri.embed, peri.sparse
local generator, pick, bits = drawing.generator, drawing.pick, drawing.bits

local folder = drawing.folder "models"

-- -- drawing ----------------------------------------------------------------------------------------------------------

local DENSE = 6 -- columns of the dense input

--- A collection: { kind =, tables = list of plain tables, weighted =, mc =, sharding = }.
local function drawn_collection(draw, number)
  local kinds = { "bags", "bags", "bags", "parameters", "files", "quant", "mc_bags", "rows", "mc_rows", "quant_rows",
    "places" }
  local c = { kind = pick(draw, kinds), tables = {}, name = "c" .. number, length = draw(5) + 1,
    padding = pick(draw, { 0, 0, -1.5 }) }
  local rows = c.kind:find "rows"
  c.jagged = rows and pick(draw, { "none", "gru", "plain", "softmax", "silu" }) or "none"
  c.weighted = c.kind ~= "places" and draw(3) == 0 and not (rows and (c.jagged == "none" or c.jagged == "gru"))
  c.batch_first, c.part = draw(2) == 0, pick(draw, { "all", "all", "mask", "first", "last", "from" })
  local dim = pick(draw, { 4, 8, 12 })
  for i = 1, draw(3) + 1 do
    local t = { name = ("t%d_%d"):format(number, i), num_embeddings = draw(60) + 4, feature_names = {},
      embedding_dim = rows and dim or pick(draw, { 4, 8, 16 }), pooling = not rows and pick(draw, { "SUM", "MEAN" })
        or nil }
    if c.kind:find "quant" then t.data_type = pick(draw, { "INT8", "INT4", "INT2", "FP8", "FP16", "FP32", "BF16" })
    elseif c.kind ~= "parameters" then t.data_type = i == 1 and pick(draw, { "FP32", "FP32", "FP16", "BF16" })
      or c.tables[1].data_type end
    for k = 1, draw(3) + 1 do t.feature_names[k] = ("f%d_%d_%d"):format(number, i, k) end
    c.tables[i] = t
  end
  if not c.kind:find "mc" and draw(3) == 0 then -- a feature of two tables
    c.tables[#c.tables].feature_names[1] = c.tables[1].feature_names[1]
    if #c.tables == 1 then c.tables[1].feature_names = { c.tables[1].feature_names[1] } end
  end
  return c
end

local maps = {
  function(t) return peri.MCHManagedCollisionModule { zch_size = t.num_embeddings, eviction_interval = 1,
    eviction_policy = embed.LRU_EvictionPolicy {} } end,
  function(t) return peri.MCHManagedCollisionModule { zch_size = t.num_embeddings, eviction_interval = 2, buckets = 2,
    spread = "modulo", on_miss = "hash", eviction_policy = embed.LFU_EvictionPolicy {} } end,
  function(t)
    return peri.HashZchManagedCollisionModule { zch_size = t.num_embeddings, total_num_buckets = 1, max_probe = 3 }
  end, function(t) return peri.HashZchManagedCollisionModule { zch_size = t.num_embeddings, total_num_buckets = 1,
    disable_fallback = true } end,
}

--- The module of a drawn collection.
local function made(c, ranks)
  local rows, tables = c.kind:find "rows", {}
  for i, t in ipairs(c.tables) do
    tables[i] = (rows and peri.EmbeddingConfig or peri.EmbeddingBagConfig)(peri.util.copy(t))
    if c.kind:find "quant" then tables[i].data_type = "FP32" end
  end
  local fused = c.kind ~= "parameters" and { optimizer = "rowwise_adagrad", learning_rate = 0.1 } or nil
  if c.kind == "files" and ranks == 0 then fused.cache_params = plan.CacheParams { load_factor = 1 } end
  local collection = (rows and peri.EmbeddingCollection or peri.EmbeddingBagCollection) { tables = tables, seed = 3,
    fused_params = fused, is_weighted = not rows and (c.weighted or c.kind == "places") or nil }
  if c.kind:find "quant" then
    local types = {}
    for _, t in ipairs(c.tables) do types[t.name] = t.data_type end
    return (rows and peri.QuantEmbeddingCollection or peri.QuantEmbeddingBagCollection).from_float(collection,
      { dtype = c.tables[1].data_type, per_table_weight_dtype = types })
  end
  if c.kind == "places" then
    local lengths = {}
    for _, t in ipairs(c.tables) do lengths[t.feature_names[1]] = 4 + #t.feature_names end
    return embed.FeatureProcessedEmbeddingBagCollection { embedding_bag_collection = collection,
      feature_processors = embed.PositionWeightedModuleCollection { max_feature_lengths = lengths } }
  end
  if not c.kind:find "mc" then return collection end
  local modules = {}
  for i, t in ipairs(c.tables) do modules[t.name] = maps[(i + #t.name + t.num_embeddings) % #maps + 1](t) end
  local mcc = peri.ManagedCollisionCollection { embedding_configs = tables, managed_collision_modules = modules }
  if rows then
    return peri.ManagedCollisionEmbeddingCollection { embedding_collection = collection,
      managed_collision_collection = mcc }
  end
  return peri.ManagedCollisionEmbeddingBagCollection { embedding_bag_collection = collection,
    managed_collision_collection = mcc }
end

-- Layers of [samples, n] numbers: name -> f(n), which returns a module of as many.
local layers = {
  linear = function(n) return nn.Linear { in_features = n, out_features = n } end,
  bare = function(n) return nn.Linear { in_features = n, out_features = n, bias = false } end,
  norm = function(n) return nn.LayerNorm { normalized_shape = n } end,
  swish = function(n) return nn.SwishLayerNorm { input_dims = n } end,
  batch = function(n) return nn.BatchNorm1d { num_features = n } end,
  drop = function() return nn.Dropout { p = 0.3 } end,
  mlp = function(n) return nn.MLP { in_size = n, layer_sizes = { 7, n } } end,
  prelu = function(n) return nn.PReLU { num_parameters = n } end,
  cross = function(n) return nn.CrossNet { in_features = n, num_layers = 2 } end,
  low = function(n) return nn.LowRankCrossNet { in_features = n, num_layers = 2, low_rank = 3 } end,
  vector = function(n) return nn.VectorCrossNet { in_features = n, num_layers = 2 } end,
  mixture = function(n)
    return nn.LowRankMixtureCrossNet { in_features = n, num_layers = 1, num_experts = 2, low_rank = 2 }
  end, attention = function(n)
    local M = nn.Module:extend "Attention"
    function M:init() self.a = nn.MultiheadAttention { embed_dim = 2, num_heads = 2, batch_first = true } end
    function M:forward(x)
      local y = F.stack({ x, x:silu() }, 3)
      return (self.a(y, y, y)):mean(3)
    end
    return n > 0 and M()
  end,
  gate = function(n)
    local M = nn.Module:extend "Gate"
    function M:init() self.scale = nn.Parameter(peri.Tensor.uniform({ n }, 0.5, 2, 4)) end
    function M:forward(x) return x * self.scale + F.softmax(x, 2) / (1 + x:square()) - (x:abs() + 1):sqrt() end
    return M()
  end,
}
layers.unit = function()
  local M = nn.Module:extend "Unit"
  function M:forward(x) return F.normalize(x) * x:std(2, true) + x:norm(3, 2, true) end -- luacheck: ignore 212
  return M()
end
layers.ranked = function() -- the two best of each group of four, what is left of them, and their sums on the way
  local M = nn.Module:extend "Ranked"
  function M:forward(x) -- luacheck: ignore 212
    local groups = x:reshape(-1, 3, 4)
    local best, places = F.topk(groups, 2)
    local others = F.gather(F.cumsum(F.sort(groups, 2), 2), 3, places)
    return F.cat({ best + F.prod(groups, 3, true), others }, 3):reshape(-1, 12)
  end
  return M()
end
layers.placed = function() -- running extremes, ranks between, and numbers put and added at places of the batch
  local M = nn.Module:extend "Placed"
  function M:forward(x) -- luacheck: ignore 212
    local groups = x:reshape(-1, 3, 4)
    local rising, at = F.cummax(groups, 2)
    local common, last = F.mode(F.round(groups), 3, true)
    local put = F.scatter(groups, 2, at, rising)
    local added = F.scatter_add(put, 3, last, F.quantile(groups, 0.4, 3, true))
    added = F.index_add(added, 3, peri.tensor({ 1, 3, 1, 0 }, "i64"), F.cummin(groups, 3), 0.5)
    return F.where(F.isclose(rising, groups, 0.2, 0.1), added, common):reshape(-1, 12)
  end
  return M()
end
layers.angles = function(n)
  local M = nn.Module:extend "Angles"
  function M:init() self.centres = nn.Parameter(peri.Tensor.uniform({ n, 4 }, -1, 1, 5)) end
  function M:forward(x)
    local near = F.cosine_similarity(x:slice(2, 0, 4):unsqueeze(2), self.centres, -1)
    return F.tril(x:reshape(-1, 3, 4), 1):reshape(-1, n) % 1.5 + near
  end
  return M()
end
for _, name in ipairs { "relu", "sigmoid", "tanh", "gelu", "softplus" } do
  layers[name] = function()
    local M = nn.Module:extend(name)
    function M:forward(x) return x[name](x) end -- luacheck: ignore 212
    return M()
  end
end

local function drawn(seed)
  local draw = generator(seed)
  local m = { collections = {}, stack = {}, ranks = pick(draw, { 0, 0, 0, 1, 2 }), follow = draw(3) == 0, draw = draw,
    seed = seed }
  for i = 1, draw(2) + 1 do m.collections[i] = drawn_collection(draw, i) end
  for i = 1, draw(5) do m.stack[i] = pick(draw, peri.util.keys(layers)) end
  m.outputs, m.dense, m.interaction = draw(2) + 1, draw(4) > 0, pick(draw, { "cat", "cat", "products" })
  m.tables = pick(draw, { "as they are", "as they are", "f16", "bf16", "int8" })
  m.matrices = pick(draw, { "f32", "f32", "f32", "bf16", "bf16_products", "int8", "int8_products" })
  if m.ranks > 0 then
    for _, c in ipairs(m.collections) do
      if c.kind:find "quant" then c.kind = c.kind == "quant" and "bags" or "rows" end
      if c.kind == "places" then c.kind = "bags" end
      for _, t in ipairs(c.tables) do
        t.data_type = c.kind ~= "parameters" and pick(draw, { "FP32", "FP16" }) or "FP32"
      end
      for _, t in ipairs(c.tables) do t.data_type = c.tables[1].data_type end -- alone they are in one batch
    end
  end
  return m
end

-- -- the model --------------------------------------------------------------------------------------------------------

local Net = nn.Module:extend "Net"
function Net:init(m)
  for _, c in ipairs(m.collections) do
    self[c.name] = made(c, m.ranks)
    local d = c.tables[1].embedding_dim
    if c.jagged == "gru" then
      self["gru_" .. c.name] = (c.padding == 0 and nn.GRU or nn.LSTM) { input_size = d, hidden_size = d / 2,
        batch_first = c.batch_first,
        bidirectional = true, bias = d > 4, num_layers = d > 8 and 2 or 1 }
    elseif c.jagged ~= "none" then
      self["norm_" .. c.name] = nn.LayerNorm { normalized_shape = d }
      self["score_" .. c.name] = nn.MLP { in_size = d + 1, layer_sizes = { 3, 1 } }
    end
  end
  local width = m.dense and DENSE or 0
  for _, c in ipairs(m.collections) do
    for _, t in ipairs(c.tables) do
      local rows = c.kind:find "rows"
      local places = rows and (c.jagged == "none" or c.jagged == "gru") and c.length or 1
      width = width + #t.feature_names * t.embedding_dim * places + (rows and 1 or 0)
    end
  end
  self.under = nn.Linear { in_features = width, out_features = 12 }
  self.stack = nn.ModuleList(peri.util.map(m.stack, function(name) return layers[name](12) end))
  self.over = nn.MLP { in_size = 12, layer_sizes = { 5, m.outputs } }
  self.shape = setmetatable({ m = m }, {})
end

--- Some of the members of lists, and the offsets of these.
local function part_of(c, x, other, lengths, offsets)
  if c.part == "all" then return x, offsets end
  local parts, kept = {}, nil
  for i, v in ipairs { x, other } do
    if c.part == "mask" then
      local mask, columns = other:select(2, 0):gt(0), {}
      for k = 1, v:size(2) do
        columns[k], kept = sparse.masked_select_jagged_1d(v:select(2, k - 1):contiguous(), lengths, mask)
      end
      parts[i] = F.stack(columns, 2)
    elseif c.part == "from" then
      local from = (lengths:to "f32" - 1):clamp(0):to "i64"
      parts[i], kept = sparse.jagged_slice(v, lengths, from, c.length)
    else
      parts[i], kept = sparse.truncate_jagged(v, lengths, c.length, c.part)
    end
  end
  return parts[1] - parts[2] * 0.5, sparse.asynchronous_complete_cumsum(kept)
end

--- The members of lists as they are: attention among them, a score each of which the sample has a say, and their
--- weighted sum.
function Net:of_members(c, jt)
  local x, offsets, n, d = jt:values(), jt:offsets(), jt:values():size(1), c.tables[1].embedding_dim
  if c.jagged ~= "plain" then
    local q = x:reshape(n, 2, d / 2)
    local attend = { q = q, k = q:silu(), v = q * 2, seq_offsets = offsets, max_seq_len = 5,
      max_attn_len = c.length % 3, contextual_seq_len = (c.length + 1) % 2, min_full_attn_seq_len = c.length % 4,
      causal = c.length > 2 }
    x = x + (c.jagged == "softmax" and sparse.jagged_attention or sparse.hstu_mha)(attend):reshape(n, d)
  end
  x = self["norm_" .. c.name](x)
  local many = sparse.index_select_dim0(jt:lengths():to("f32"):reshape(-1, 1) * 0.125,
    sparse.sequence_numbers(offsets, n))
  local scored = x * self["score_" .. c.name](F.cat({ x, many }, 2))
  if c.weighted then scored = scored * jt:weights():reshape(-1, 1) end
  scored, offsets = part_of(c, scored, x, jt:lengths(), offsets)
  n = scored:size(1)
  return nn.embedding.embedding_bag(scored, peri.arange(0, n, 1, "i64"), offsets, c.length % 2 == 0 and "sum" or "mean",
    nil, true)
end

function Net:forward(b)
  local m, parts = self.shape.m, {}
  if m.dense then parts[1] = b.dense end
  for _, c in ipairs(m.collections) do
    local rows = self[c.name](b[c.name])
    if c.kind:find "rows" then
      rows = peri.util.resolve(rows)
      for _, t in ipairs(c.tables) do
        for k, feature in ipairs(t.feature_names) do
          local jt = rows[feature] or rows[feature .. "@" .. t.name]
          local padded = (c.jagged == "none" or c.jagged == "gru") and jt:to_padded_dense(c.length, c.padding)
          if c.jagged == "gru" and c.batch_first then padded = (self["gru_" .. c.name](padded))
          elseif c.jagged == "gru" then
            padded = (self["gru_" .. c.name](padded:transpose(1, 2))):transpose(1, 2)
          end
          parts[#parts + 1] = padded and padded:reshape(-1, c.length * t.embedding_dim) or self:of_members(c, jt)
          if k == 1 then parts[#parts + 1] = jt:lengths():to("f32"):reshape(-1, 1) end
        end
      end
    else parts[#parts + 1] = peri.util.resolve(rows):values() end
  end
  local x = self.under(#parts == 1 and parts[1] or F.cat(parts, 2))
  for _, layer in ipairs(self.stack) do x = layer(x) end
  if m.interaction == "products" then
    local v = x:reshape(-1, 3, 4)
    x = F.cat({ F.bmm(v, v:transpose(2, 3)):reshape(-1, 9), x:slice(2, 0, 3) }, 2)
  end
  local y = self.over(x)
  return { y = y, first = x:slice(2, 0, 2) }
end

--- A batch of n samples, and what they are made of.
local function batch_of(m, draw, n)
  local b = { dense = m.dense and peri.Tensor.uniform({ n, DENSE }, -1, 1, draw(1000)) or nil }
  for _, c in ipairs(m.collections) do
    local keys, values, lengths, weights, known = {}, {}, {}, {}, {}
    for _, t in ipairs(c.tables) do
      for _, feature in ipairs(t.feature_names) do
        if not known[feature] then
          known[feature], keys[#keys + 1] = true, feature
          local rows = t.num_embeddings
          for _, other in ipairs(c.tables) do
            if peri.util.index_of(other.feature_names)[feature] then rows = math.min(rows, other.num_embeddings) end
          end
          for _ = 1, n do
            lengths[#lengths + 1] = draw(5) * draw(2)
            for _ = 1, lengths[#lengths] do
              values[#values + 1] = c.kind:find "mc" and (draw(rows) * 0x9e3779b97f4a7c1LL) or draw(rows)
              weights[#weights + 1] = draw(64) / 16
            end
          end
        end
      end
    end
    b[c.name] = peri.KeyedJaggedTensor { keys = keys, values = peri.tensor(values, "i64"), lengths = lengths,
      stride = n, weights = c.weighted and peri.tensor(weights) or nil }
  end
  return b
end

local function plan_of(m, world)
  local draw, entries = generator(m.seed + 77), {}
  for _, c in ipairs(m.collections) do
    local e = {}
    for _, t in ipairs(c.tables) do
      local kind = pick(draw, { "table_wise", "row_wise", "column_wise", "data_parallel" })
      local rank = draw(world:size())
      if c.kind:find "mc" and kind ~= "row_wise" then kind = "table_wise" end
      if c.kind == "parameters" then kind = "data_parallel" end
      if kind == "data_parallel" then
        e[t.name] = plan.data_parallel { compute_kernel = c.kind == "parameters" and "dense" or "fused" }
      elseif kind == "column_wise" then e[t.name] = plan.column_wise { ranks = { rank }, sizes = { t.embedding_dim } }
      elseif kind == "table_wise" then
        local how = { compute_kernel = "fused_uvm_caching", cache_params = plan.CacheParams { load_factor = 1 } }
        e[t.name] = plan.table_wise(rank, c.kind == "files" and how or nil)
      else e[t.name] = plan.row_wise() end
    end
    entries[c.name] = e
  end
  return entries
end

local function step(model, optimizer, b)
  peri.scope(function()
    optimizer:zero_grad()
    local out = model(b)
    out.y:sum():backward()
    optimizer:step()
  end)
end

--- Check one model on one rank.
local function check(m, rank, world)
  nn.manual_seed(m.seed)
  local model = Net(m)
  if world then model = peri.DistributedModelParallel { module = model, group = world, plan = plan_of(m, world) } end
  local quantised = false
  for _, c in ipairs(m.collections) do quantised = quantised or c.kind:find "quant" ~= nil end
  local optimizer = not quantised and nn.optim.SGD { params = model:parameters(), lr = 0.001 }
  local draw, path = generator(m.seed + 1), ("%s/%d.peri"):format(folder, m.seed)
  for _ = 1, optimizer and 2 or 0 do step(model, optimizer, batch_of(m, draw, 6)) end
  local rounded = m.tables ~= "as they are" or m.matrices ~= "f32"
  -- rows that several ranks add up are added in another order
  local most = (rounded or m.ranks > 1) and math.huge or nil
  local held = { batch_of(m, draw, 12), batch_of(m, draw, 140) }
  local function export()
    return model:export(path, { batches = held, tables = m.tables, dense = m.matrices, allowed_difference = most })
  end
  local follower, saver
  if m.follow and optimizer then
    export()
    saver = peri.checkpoint.Saver { folder = ("%s/run%d"):format(folder, m.seed), parts = { model = model }, every = 1,
      full_every = 2, keep = 9, group = world }
    if rank == 0 then
      os.execute(("cp %s %s.first"):format(path, path))
      follower = peri.export.follow(path .. ".first", ("%s/run%d"):format(folder, m.seed))
    end
    for i = 1, 3 do
      step(model, optimizer, batch_of(m, draw, 6))
      saver:step(i)
      local now = follower and assert(follower:poll())
      export()
      if now then
        assert(bits(now:predict(held[2])) == bits(peri.export.open(path):predict(held[2])),
          "a follower has other bits at step " .. i)
        now:release()
      end
    end
    saver:close()
  end
  local report, state = export(), world and peri.shard.gather_state_dict(model:state_dict())
  if rank ~= 0 then return end
  assert(most or report.differ == 0)
  m.state, m.path, m.held = state, path, held
  if not world then m.model = model end
end

--- A model whose rows are rounded to the dtype that the file has them in gives the file's answers by itself. Of simple
--- tables only.
local function check_rounded(m, answers)
  if not m.model or m.matrices ~= "f32" or m.tables ~= "f16" and m.tables ~= "bf16" then return end
  local names, state = {}, m.model:state_dict():clone()
  for _, c in ipairs(m.collections) do
    if c.kind ~= "bags" and c.kind ~= "rows" and c.kind ~= "parameters" then return end
    local type = c.tables[1].data_type
    if type == "BF16" or type == "FP16" then return end -- rounded twice
    for _, t in ipairs(c.tables) do
      names[#names + 1] = ("%s.%s.%s.weight"):format(c.name, c.kind == "rows" and "embeddings" or "embedding_bags",
        t.name)
    end
  end
  for _, name in ipairs(names) do
    local rows = peri.Tensor.is(state[name]) and state[name] or state[name]:gather()
    state[name] = rows:to "f32":to(m.tables):to "f32":to(rows:dtype())
  end
  m.model:load_state_dict(state)
  local report = m.model:export(m.path, { batches = m.held })
  assert(report.differ == 0)
  assert(bits(peri.export.open(m.path):predict(m.held[2])) == bits(answers), "a rounded table has other bits")
end

--- Some samples of a batch (numbers from 0 on, in any order) as a batch; loud: which of them have huge dense numbers.
local function chosen(m, batch, samples, loud)
  local mine, dense = {}, {}
  for i, sample in ipairs(m.dense and samples or {}) do
    local row = batch.dense:slice(1, sample, sample + 1)
    dense[i] = loud[i] and row * 3e38 or row
  end
  mine.dense = m.dense and F.cat(dense, 1) or nil
  for _, c in ipairs(m.collections) do
    local kjt, values, lengths, weights = batch[c.name], {}, {}, {}
    for _, key in ipairs(kjt:keys()) do
      local jt = kjt:get(key)
      local offsets, ids, w = jt:offset_list(), jt:values():to_list(), c.weighted and jt:weights():to_list()
      for _, sample in ipairs(samples) do
        lengths[#lengths + 1] = offsets[sample + 2] - offsets[sample + 1]
        for k = offsets[sample + 1] + 1, offsets[sample + 2] do
          values[#values + 1] = ids[k]
          weights[#weights + 1] = w and w[k] or nil
        end
      end
    end
    mine[c.name] = peri.KeyedJaggedTensor { keys = kjt:keys(), values = peri.tensor(values, "i64"),
      lengths = lengths, stride = #samples, weights = c.weighted and peri.tensor(weights) or nil }
  end
  return mine
end

--- Check the file that it was written into.
local function check_file(m)
  local path, held = m.path, m.held
  if m.state then -- the same file as of the model alone
    local digest, alone = peri.export.open(path):describe().digest, Net(setmetatable({ ranks = 0 }, { __index = m }))
    alone:load_state_dict(m.state)
    local rounded = m.tables ~= "as they are" or m.matrices ~= "f32"
    local report = alone:export(path, { batches = held, tables = m.tables, dense = m.matrices,
      allowed_difference = rounded and math.huge or nil })
    assert(rounded or report.differ == 0)
    assert(digest == peri.export.open(path):describe().digest, "another file than that of the model alone")
  end
  local file = peri.export.open(path, { verify = true })
  local all = file:predict(held[2])
  -- A sample's own numbers, alone and among others, of which some are as large as an f32 may be.
  local draw = generator(m.seed + 2)
  for _, n in ipairs { 1, 2 + draw(3), 5 + draw(30) } do
    local list, loud, at = {}, {}, draw(n) + 1
    for i = 1, n do list[i], loud[i] = draw(140), i ~= at and draw(3) == 0 end
    local answer = file:predict(chosen(m, held[2], list, loud))
    for name, t in peri.util.ordered(all) do
      for i, sample in ipairs(list) do
        assert(loud[i] or bits { t = t:slice(1, sample, sample + 1) } == bits { t = answer[name]:slice(1, i - 1, i) },
          ("a sample has other bits in a batch of %d: %s"):format(n, name))
      end
    end
  end
  check_rounded(m, all)
end

local function described(m)
  local parts = { ("ranks %d, tables %s, matrices %s, follow %s, dense %s, %s: %s"):format(m.ranks, m.tables,
    m.matrices, tostring(m.follow), tostring(m.dense), m.interaction, table.concat(m.stack, " ")) }
  for _, c in ipairs(m.collections) do
    parts[#parts + 1] = ("  %s %s%s, length %d"):format(c.name, c.kind, c.weighted and ", weighted" or "", c.length)
    for _, t in ipairs(c.tables) do
      parts[#parts + 1] = ("    %s %dx%d %s %s: %s"):format(t.name, t.num_embeddings, t.embedding_dim, t.data_type
        or "", t.pooling or "", table.concat(t.feature_names, " "))
    end
  end
  return table.concat(parts, "\n")
end

local function run(seed)
  local m = drawn(seed)
  os.execute("mkdir -p " .. folder)
  local ok, why = xpcall(function()
    if m.ranks == 0 then check(m, 0) else sim.run(m.ranks, function(rank, world) check(m, rank, world) end) end
    check_file(m)
  end, function(e) return debug.traceback(tostring(e), 2) end)
  os.execute("rm -rf " .. folder)
  if not ok then
    print(described(m))
    print(why)
    print(("FAILED: repeat with: luajit tests/fuzz/models.lua once %d"):format(seed))
    os.exit(1)
  end
  collectgarbage()
end

peri.init()
if arg[1] == "once" then
  print(described(drawn(tonumber(arg[2]))))
  return run(tonumber(arg[2]))
end
local count, seconds = tonumber((arg[1] or "25"):match "^(%d+)$"), tonumber((arg[1] or ""):match "^([%d.]+)s$")
local first = tonumber(arg[2] or 1)
local began, n = os.time(), 0
while (count and n < count) or (seconds and os.time() - began < seconds) do
  run(first * 100003 + n)
  n = n + 1
end
print(("%d models"):format(n))
