-- moments.lua: small models drawn at random, with everything that a step depends on; their moments are kept, and loaded
-- back.
--
--   local m = moments.make(case, world, device)      -- { model =, optimizer =, schedule =, ... }
--   local loss = moments.step(m, n)                  -- step n
--   local kept = moments.keep(m, "clone")            -- or "gather"
--   moments.load(m, kept)
local peri = require "perilune"
local draws = require("spec.support.tbe").generator
local nn, plan, optim = peri.nn, peri.plan, peri.nn.optim

local M = {}

local ROWS, DIM = 12, 4

-- -- cases ------------------------------------------------------------------------------------------------------------

local row_optimizers = {
  { optimizer = "sgd" }, { optimizer = "sgd", weight_decay = 0.01, weight_decay_mode = "l2" },
  { optimizer = "adagrad" }, { optimizer = "rowwise_adagrad" }, { optimizer = "adam" },
  { optimizer = "partial_rowwise_adam" }, { optimizer = "lamb" }, { optimizer = "partial_rowwise_lamb" },
  { optimizer = "lars_sgd", eta = 0.5 }, { optimizer = "lion" },
  { optimizer = "rowwise_adagrad", weight_decay_mode = "counter", counter_based_regularization = {} },
  { optimizer = "rowwise_adagrad", weight_decay_mode = "cowclip", cowclip_regularization = {} },
  { optimizer = "rowwise_rmsprop_ar" },
  { optimizer = "emainplace_rowwise_adagrad", emainplace_mode = { step_ema = 2, step_start = 1, step_ema_coef = 0.5 } },
  { optimizer = "shampoo" },
}
local parts = { "bags", "rows", "half", "processed", "parameters", "raw", "two" }
local dense_optimizers = { "SGD", "Momentum", "Adagrad", "Adam", "AdamW", "RMSprop", "Clipped", "Warm", "Both" }
local schedules = { false, "StepLR", "ExponentialLR", "CosineAnnealingLR", "LinearLR" }

--- Case number n: what the model is made of, the same on all ranks.
function M.case(n)
  local draw = draws(n)
  for _ = 1, 5 do draw(2) end
  local case = { number = n, parts = {}, dense = dense_optimizers[1 + draw(#dense_optimizers)],
    schedule = schedules[1 + draw(#schedules)], of_tables = schedules[1 + draw(#schedules)], draw = draws(n + 1000) }
  for _ = 1, 1 + draw(3) do
    local part = parts[1 + draw(#parts)]
    case.parts[#case.parts + 1] = { kind = part, fused = row_optimizers[1 + draw(#row_optimizers)],
      other = row_optimizers[1 + draw(#row_optimizers)] }
  end
  case.text = ("case %d: %s; %s, %s, %s"):format(n, table.concat(peri.util.map(case.parts, function(p)
    return p.kind .. " " .. p.fused.optimizer
  end), ", "), case.dense, tostring(case.schedule), tostring(case.of_tables))
  return case
end

-- -- models -----------------------------------------------------------------------------------------------------------

local function tables(class, prefix, more)
  return peri.util.map({ "a", "b" }, function(name, i)
    local t = { name = prefix .. name, num_embeddings = ROWS, embedding_dim = DIM,
      feature_names = { i == 1 and "f" or "g" } }
    for key, value in peri.util.ordered(more or {}) do t[key] = value end
    return class(t)
  end)
end

local function fused_of(params)
  local copy = peri.util.copy(params)
  copy.learning_rate = 0.1
  return copy
end

local makers = {}
function makers.bags(p, name) return peri.EmbeddingBagCollection { tables = tables(peri.EmbeddingBagConfig, name),
  fused_params = fused_of(p.fused) } end
function makers.rows(p, name) return peri.EmbeddingCollection { tables = tables(peri.EmbeddingConfig, name),
  fused_params = fused_of(p.fused) } end
function makers.half(p, name) return peri.EmbeddingBagCollection { tables = tables(peri.EmbeddingBagConfig, name,
  { data_type = "FP16" }), fused_params = fused_of(p.fused) } end
function makers.processed(p, name)
  return peri.embed.FeatureProcessedEmbeddingBagCollection {
    embedding_bag_collection = peri.EmbeddingBagCollection { tables = tables(peri.EmbeddingBagConfig, name),
      is_weighted = true, fused_params = fused_of(p.fused) },
    feature_processors = peri.embed.PositionWeightedModuleCollection { max_feature_lengths = { f = 8, g = 8 } } }
end
function makers.parameters(_, name)
  return peri.EmbeddingBagCollection { tables = tables(peri.EmbeddingBagConfig, name) }
end
function makers.raw(p, name)
  local configs, modules = tables(peri.EmbeddingBagConfig, name), {}
  for _, t in ipairs(configs) do
    modules[t.name] = peri.HashZchManagedCollisionModule { zch_size = ROWS, total_num_buckets = 4, max_probe = 3,
      on_miss = "drop", eviction_policy_name = "SINGLE_TTL_EVICTION",
      eviction_config = { features = t.feature_names, single_ttl = 2 } }
  end
  return peri.ManagedCollisionEmbeddingBagCollection { embedding_bag_collection = peri.EmbeddingBagCollection {
    tables = configs, fused_params = fused_of(p.fused) },
    managed_collision_collection = peri.ManagedCollisionCollection { embedding_configs = configs,
      managed_collision_modules = modules } }
end
--- A module of two collections with optimizers of their own.
local Two = nn.Module:extend "Two"
function Two:init(p, name)
  self.one, self.other = makers.bags(p, name .. "one"), makers.bags({ fused = p.other }, name .. "other")
end
function Two:forward(kjt) return nn.functional.cat({ self.one(kjt):values(), self.other(kjt):values() }, 2) end
function makers.two(p, name) return Two(p, name) end

local Net = nn.Module:extend "Net"
function Net:init(case)
  self.parts, self.kinds = {}, peri.util.map(case.parts, function(p) return p.kind end)
  for i, p in ipairs(case.parts) do self.parts[i] = makers[p.kind](p, "p" .. i) end
  self.tower = nn.Sequential { nn.Linear { in_features = 3, out_features = 4 }, nn.BatchNorm1d { num_features = 4 },
    nn.Dropout { p = 0.25 }, nn.LayerNorm { normalized_shape = { 4 } } }
  self.over = nn.Linear { in_features = 4, out_features = 1 }
end
local function number_of(y)
  if peri.Tensor.is(y) then return y:square():mean() end
  if y.values then return y:values():square():mean() end
  local sum
  for _, jt in peri.util.ordered(y) do
    local one = jt:values():square():sum()
    sum = sum and sum + one or one
  end
  return sum
end
function Net:forward(batch)
  local y = self.over(self.tower(batch.dense)):square():mean()
  for i, kind in ipairs(self.kinds) do
    local out = self.parts[i](kind == "raw" and batch.raw or batch.ids)
    y = y + number_of(peri.util.resolve(out))
  end
  return y
end

--- An entry of a plan for one table.
local function entry_of(draw, p, n)
  local kinds = { "row_wise", "table_wise", "column_wise", "data_parallel" }
  local function has(name) return p.fused.optimizer == name or p.kind == "two" and p.other.optimizer == name end
  if has "emainplace_rowwise_adagrad" then kinds = { "row_wise", "table_wise", "data_parallel" } end
  if p.kind == "raw" then kinds = { "row_wise", "table_wise" } end
  if has "shampoo" and p.kind ~= "parameters" then kinds = { "table_wise" } end
  local kind = kinds[1 + draw(#kinds)]
  local options = p.kind == "parameters" and { compute_kernel = "dense" } or nil
  if kind == "table_wise" then return plan.table_wise(draw(n), options) end
  if kind == "column_wise" then
    return plan.column_wise { ranks = { draw(n) }, compute_kernel = options and "dense" or nil }
  end
  if kind == "data_parallel" then return plan.data_parallel { compute_kernel = options and "dense" or "fused" } end
  return plan.row_wise(options)
end

local function plan_of(case, n, salt)
  local draw, entries = draws(case.number * 7 + salt), {}
  local function of(p, name) return { [name .. "a"] = entry_of(draw, p, n), [name .. "b"] = entry_of(draw, p, n) } end
  for i, p in ipairs(case.parts) do
    local path, name = ("parts.%d"):format(i - 1), "p" .. i
    if p.kind == "two" then
      entries[path .. ".one"], entries[path .. ".other"] = of(p, name .. "one"), of(p, name .. "other")
    else
      entries[path] = of(p, name)
    end
  end
  return plan.ShardingPlan(entries)
end

local function dense_of(kind, model)
  local params = model:named_parameters()
  local function sgd(list) return optim.SGD { params = list, lr = 0.1 } end
  if kind == "Momentum" then return optim.SGD { params = params, lr = 0.1, momentum = 0.5 } end
  if kind == "Clipped" then
    return optim.GradientClippingOptimizer { optimizer = optim.Adam { params = params, lr = 0.1 }, clipping = "norm",
      max_gradient = 0.5 }
  end
  if kind == "Warm" then
    return optim.WarmupOptimizer { optimizer = sgd(params), lr = 0.2,
      stages = { { policy = "linear", max_iters = 4, value = 0.1 } } }
  end
  if kind == "Both" then
    local bare, rest = {}, { elsewhere = params.elsewhere, group = params.group, spread = params.spread }
    for _, p in ipairs(params) do
      if p.name:match "^tower" then bare[#bare + 1] = p else rest[#rest + 1] = p end
    end
    return optim.CombinedOptimizer { optim.AdamW { params = bare, lr = 0.05 },
      optim.Adagrad { params = rest, lr = 0.1 } }
  end
  return optim[kind] { params = params, lr = 0.1 }
end

local schedule_arguments = { StepLR = { step_size = 2, gamma = 0.5 }, ExponentialLR = { gamma = 0.9 },
  CosineAnnealingLR = { T_max = 5 }, LinearLR = { total_iters = 4 } }
local function schedule_of(name, optimizer)
  if not name or #optimizer.param_groups == 0 then return nil end
  local args = peri.util.copy(schedule_arguments[name])
  args.optimizer = optimizer
  return optim[name](args)
end

--- A model of the case; `salt`: of its plan.
function M.make(case, world, device, salt)
  nn.manual_seed(case.number)
  local m = { case = case, world = world, device = device }
  m.model = peri.DistributedModelParallel { module = Net(case), group = world, device = device,
    plan = plan_of(case, world:size(), salt or 0) }
  m.optimizer = dense_of(case.dense, m.model)
  m.schedule = schedule_of(case.schedule, m.optimizer)
  m.of_tables = schedule_of(case.of_tables, m.model:fused_optimizer())
  return m
end

-- -- training ---------------------------------------------------------------------------------------------------------

--- Batch n of a rank.
function M.batch(m, n)
  local draw, device, samples = draws(n * 31 + m.world:rank()), m.device, 2 + n % 2
  local values, raw, lengths = {}, {}, {}
  for bag = 1, 2 * samples do
    lengths[bag] = 1 + draw(3)
    for _ = 1, lengths[bag] do
      values[#values + 1] = draw(ROWS)
      raw[#raw + 1] = draw(1000)
    end
  end
  local function kjt(ids)
    return peri.KeyedJaggedTensor { keys = { "f", "g" }, values = peri.tensor(ids, "i64", device), lengths = lengths,
      device = device }
  end
  return { ids = kjt(values), raw = kjt(raw), dense = peri.Tensor.normal({ samples, 3 }, 0, 1, n, m.world:rank(), "f32",
    device) }
end

--- What a script does to rates in the middle, by hand.
local function by_hand(m, n)
  if n == 2 and #m.optimizer.param_groups > 0 then
    m.optimizer.param_groups[1].lr = m.optimizer.param_groups[1].lr * 0.75
  end
  local fused = m.model:fused_optimizer()
  if n == 3 and #fused.param_groups > 0 then fused.param_groups[1].lr = fused.param_groups[1].lr * 0.5 end
end

--- Before step n, and after it.
function M.before(m, n) by_hand(m, n) end
function M.after(m)
  if m.schedule then m.schedule:step() end
  if m.of_tables then m.of_tables:step() end
end

--- Step n of the plain loop; its loss.
function M.step(m, n)
  M.before(m, n)
  m.optimizer:zero_grad()
  local loss = m.model(M.batch(m, n))
  m.model:backward(loss)
  m.optimizer:step()
  M.after(m)
  return loss:item()
end

-- -- moments ----------------------------------------------------------------------------------------------------------

--- Everything of this moment: way is "clone" or "gather" (collective).
function M.keep(m, way)
  return peri.shard[way .. "_state_dict"] {
    model = m.model:state_dict(), tables = m.model:fused_optimizer():state_dict(), dense = m.optimizer:state_dict(),
    schedule = m.schedule and m.schedule:state_dict() or {}, of_tables = m.of_tables and m.of_tables:state_dict() or {},
    extra = nn.extra_state(m.model),
  }
end

function M.load(m, kept)
  m.model:load_state_dict(kept.model)
  m.model:fused_optimizer():load_state_dict(kept.tables)
  m.optimizer:load_state_dict(kept.dense)
  if m.schedule then m.schedule:load_state_dict(kept.schedule) end
  if m.of_tables then m.of_tables:load_state_dict(kept.of_tables) end
  nn.load_extra_state(m.model, kept.extra)
end

--- A moment as text.
function M.text(kept)
  local copy = {}
  for name, x in peri.util.ordered(kept) do
    copy[name] = peri.Tensor.is(x) and table.concat(x:to_list(), " ") or type(x) == "table" and not x.gather
      and M.text(x) or x
    if type(x) == "table" and x.is_live then copy[name] = M.text(x) end
  end
  return copy
end

return M
