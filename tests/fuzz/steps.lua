-- steps.lua: models of several collections drawn at random: bags, sequences, weighted ones, behind feature processors,
-- variable batches, maps of raw ids, in memory and in files, trained under any plan on 1 to 4 ranks and nodes, with or
-- without autocast, by any pipeline, in parts of a large batch or not, as replicas of the whole (DMPCollection) or not;
-- what the collections return is used in an order of its own. The law: losses, weights, maps and the states of all
-- optimizers are those of the plain loop, bit for bit.
--
--   luajit tests/fuzz/steps.lua [MODELS [SEED]]    as `make test` runs it; a failure says how to repeat it
--   luajit tests/fuzz/steps.lua SECONDSs [SEED]    as `make fuzz` runs it
--   luajit tests/fuzz/steps.lua once SEED          one model of it, printed first
-- inputs: 20
-- takes: 2 s
local ffi = require "ffi"
local here, build = io.popen("pwd"):read "*l", os.getenv "PERI_BUILD" or "build"
package.path = ("%s/%s/lua/?.lua;%s/lua/?.lua;%s/lua/?/init.lua;%s/?.lua;%s"):format(here, build, here, here, here,
  package.path)
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local drawing = require "spec.support.drawing"
local nn, plan, embed, optim, pipeline = peri.nn, peri.plan, peri.embed, peri.nn.optim, peri.pipeline
local generator, pick, map = drawing.generator, drawing.pick, peri.util.map

local ROWS, DIM = 24, 4
local PLAIN = { "base", "sparse_dist", "sparse_dist_lite", "fused_sparse_dist", "prefetch_sparse_dist", "wire_first" }
peri.ffi.C.peri_log_level_set(peri.ffi.C.PERI_LOG_ERROR)
rawset(io, "stderr", io.open("/dev/null", "w")) -- pipelines say which modules they do not pipeline

-- -- drawing ----------------------------------------------------------------------------------------------------------

--- A case by its seed: what the models are made of, how they are trained, on how many ranks.
local function draw_case(seed)
  local draw = generator(seed)
  local c = { seed = seed, parts = {}, ranks = 1 + draw(4), local_size = 1 + draw(3), steps = 4 + draw(3),
    cast = pick(draw, { "none", "bf16", "f16" }), device = pick(draw, { "cpu", "opaque" }),
    dense = pick(draw, { "SGD", "Adam", "Clipped" }), parts_of_batch = draw(4) == 0 and 2 + draw(2) or 1,
    schedule = pick(draw, PLAIN), evaluates = draw(2) == 0 }
  c.replicas = draw(5) == 0 and c.ranks % 2 == 0
  c.group, c.local_size = c.replicas and c.ranks / 2 or c.ranks, c.replicas and c.ranks or c.local_size
  local kinds = { "bags", "bags", "rows", "weighted", "processed", "variable" }
  if not c.replicas then kinds[#kinds + 1], kinds[#kinds + 2] = "raw", "raw_files" end
  if c.parts_of_batch > 1 then kinds[#kinds] = "bags" end
  local optimizers = { "sgd", "adagrad", "rowwise_adagrad", "adam", "lamb", "lion" }
  for i = 1, 1 + draw(3) do
    c.parts[i] = { kind = pick(draw, kinds), name = "p" .. i, optimizer = pick(draw, optimizers),
      data_type = pick(draw, { "FP32", "FP16", "BF16" }), pooling = pick(draw, { "SUM", "MEAN" }),
      clip = draw(3) == 0 or nil, probing = draw(2) == 0, entry = {} }
    for k = 1, 2 do c.parts[i].entry[k] = { pick(draw, { 1, 2, 3, 4, 5 }), draw(c.group) } end
  end
  c.order = {}
  for i = 1, #c.parts do table.insert(c.order, 1 + draw(i), i) end
  return c
end

local function entry_of(c, p, k)
  local files = p.kind == "raw_files"
  local options = files and { compute_kernel = "fused_uvm_caching", cache_params = { load_factor = 1 } } or {}
  local kind, rank = p.entry[k][1], p.entry[k][2]
  if kind == 1 then return plan.table_wise(rank, options) end
  if p.kind:find "raw" or kind == 2 then return plan.row_wise(options) end
  if kind == 3 then return plan.column_wise { ranks = { rank } } end
  if kind == 4 and c.parts_of_batch == 1 then return plan.data_parallel { compute_kernel = "fused" } end
  if c.replicas then return plan.row_wise() end
  return plan.table_row_wise(math.floor(rank / c.local_size))
end

local function text_of(c)
  return ("%d ranks of %d a node%s, %s, batches in %d parts, autocast %s, %s, %d steps, on %s, used in order %s\n%s"):
    format(c.ranks, c.local_size, c.replicas and ", replicas" or "", c.schedule, c.parts_of_batch, c.cast, c.dense,
      c.steps, c.device, table.concat(c.order, " "), table.concat(map(c.parts, function(p)
        return ("  %s: %s %s of %s, %s; %s; %s"):format(p.name, p.kind, p.pooling, p.data_type, p.optimizer,
          tostring(entry_of(c, p, 1)), tostring(entry_of(c, p, 2)))
      end), "\n"))
end

-- -- models -----------------------------------------------------------------------------------------------------------

local function tables_of(p, class)
  return map({ "a", "b" }, function(name, i)
    return class { name = p.name .. name, num_embeddings = ROWS, embedding_dim = DIM, data_type = p.data_type,
      feature_names = { i == 1 and "f" or "g" }, pooling = class == peri.EmbeddingBagConfig and p.pooling or nil }
  end)
end

local function map_of(p, t)
  if p.probing then
    return peri.HashZchManagedCollisionModule { zch_size = ROWS, total_num_buckets = 4, max_probe = 3,
      on_miss = "drop", eviction_policy_name = "SINGLE_TTL_EVICTION",
      eviction_config = { features = t.feature_names, single_ttl = 2 } }
  end
  return peri.MCHManagedCollisionModule { zch_size = ROWS, buckets = 4, eviction_interval = 2,
    eviction_policy = embed.DistanceLFU_EvictionPolicy {} }
end

local function collection_of(p)
  local fused = { optimizer = p.optimizer, learning_rate = 0.1, gradient_clipping = p.clip,
    max_gradient = p.clip and 0.05 }
  if p.kind == "rows" then
    return peri.EmbeddingCollection { tables = tables_of(p, peri.EmbeddingConfig), fused_params = fused }
  end
  local tables, weighted = tables_of(p, peri.EmbeddingBagConfig), p.kind == "weighted" or p.kind == "processed"
  local bags = peri.EmbeddingBagCollection { tables = tables, fused_params = fused, is_weighted = weighted or nil }
  if p.kind == "processed" then
    return peri.FeatureProcessedEmbeddingBagCollection { embedding_bag_collection = bags,
      feature_processors = embed.PositionWeightedModuleCollection { max_feature_lengths = { f = 4, g = 4 } } }
  end
  if not p.kind:find "raw" then return bags end
  local modules = {}
  for _, t in ipairs(tables) do modules[t.name] = map_of(p, t) end
  return peri.ManagedCollisionEmbeddingBagCollection { embedding_bag_collection = bags,
    managed_collision_collection = peri.ManagedCollisionCollection { embedding_configs = tables,
      managed_collision_modules = modules } }
end

local Net = nn.Module:extend "Net"
function Net:init(c)
  self.case, self.parts = c, map(c.parts, collection_of)
  self.tower = nn.Sequential { nn.Linear { in_features = 3, out_features = DIM }, nn.Dropout { p = 0.25 } }
  self.mix = nn.Linear { in_features = DIM, out_features = 2 }
end
function Net:compute(batch)
  local c, sum = self.case, self.mix(self.tower(batch.dense)):square():mean()
  local made = map(c.parts, function(p, i)
    return self.parts[i](batch[p.kind] or p.kind == "raw_files" and batch.raw or batch.ids)
  end)
  for _, i in ipairs(c.order) do
    local y = peri.util.resolve(made[i])
    local lists = c.parts[i].kind == "rows" and { y.f:values(), y.g:values() } or { y:values() }
    for _, rows in ipairs(lists) do sum = sum + self.mix(rows:reshape(-1, DIM)):square():sum() * 0.1 end
  end
  return sum
end
function Net:forward(batch)
  local cast = self.case.cast
  if cast == "none" then return self:compute(batch) end
  return peri.autocast({ device = self.case.device, dtype = cast }, self.compute, self, batch)
end

-- -- batches ----------------------------------------------------------------------------------------------------------

local function kjt_of(c, draw, samples, kind)
  local values, lengths, weights, bags_of, inverse = {}, {}, {}, {}, {}
  for f = 1, 2 do
    local bags = kind == "variable" and 1 + draw(samples) or samples
    bags_of[f], inverse[f] = { bags }, {}
    for s = 1, samples do inverse[f][s] = draw(bags) end
    for _ = 1, bags do
      lengths[#lengths + 1] = draw(4)
      for _ = 1, lengths[#lengths] do
        values[#values + 1] = kind == "raw" and ffi.cast("int64_t", draw(60)) * 150000000000000001LL or draw(ROWS)
        weights[#weights + 1] = (draw(200) - 100) / 100
      end
    end
  end
  return peri.KeyedJaggedTensor { keys = { "f", "g" }, device = c.device, lengths = lengths,
    values = peri.tensor(values, "i64", c.device, { #values }),
    weights = kind == "weighted" and peri.tensor(weights, "f32", c.device, { #weights }) or nil,
    stride_per_key_per_rank = kind == "variable" and bags_of or nil,
    inverse_indices = kind == "variable" and { { "f", "g" }, peri.tensor(inverse, "i64", c.device) } or nil }
end

local function batch_of(c, rank, n)
  local draw = generator(c.seed * 131 + n * 31 + rank)
  local samples = 1 + draw(3)
  local batch = { dense = peri.Tensor.normal({ samples, 3 }, 0, 1, n, rank, "f32", c.device) }
  for _, kind in ipairs { "ids", "weighted", "variable", "raw" } do batch[kind] = kjt_of(c, draw, samples, kind) end
  return batch
end

-- -- training ---------------------------------------------------------------------------------------------------------

local function made(c, world)
  nn.manual_seed(c.seed)
  local entries = {}
  for i, p in ipairs(c.parts) do
    entries["parts." .. i - 1] = { [p.name .. "a"] = entry_of(c, p, 1), [p.name .. "b"] = entry_of(c, p, 2) }
  end
  local args = { module = Net(c), device = c.device, plan = plan.ShardingPlan(entries) }
  if c.replicas then
    args.global_pg, args.sharding_group_size, args.sync_interval = world, c.group, 2
  else
    args.group = world
  end
  local m = { model = peri[c.replicas and "DMPCollection" or "DistributedModelParallel"](args) }
  local params = m.model:named_parameters()
  if c.dense == "SGD" then m.optimizer = optim.SGD { params = params, lr = 0.1, momentum = 0.5 }
  else m.optimizer = optim.Adam { params = params, lr = 0.05 } end
  if c.dense == "Clipped" then
    m.optimizer = optim.GradientClippingOptimizer { optimizer = m.optimizer, clipping = "norm", max_gradient = 0.1 }
  end
  m.rates = optim.StepLR { optimizer = m.model:fused_optimizer(), step_size = 2, gamma = 0.5 }
  return m
end

--- After step n of either loop. What an evaluation answers depends on the pipeline where maps are ahead.
local function between(c, m, world, n)
  m.rates:step()
  if not c.evaluates or n ~= 2 then return end
  m.model:eval()
  peri.no_grad(m.model, batch_of(c, world:rank(), 100))
  m.model:train()
end

local function bytes_of(dict, into, name)
  for key, x in peri.util.ordered(dict) do
    local path = ("%s/%s"):format(name, tostring(key))
    if peri.Tensor.is(x) then
      local buffer = x:to(nil, "cpu"):contiguous():read()
      into[path] = ffi.string(buffer, ffi.sizeof(buffer))
    elseif type(x) == "table" then bytes_of(x, into, path)
    else into[path] = tostring(x) end
  end
  return into
end

--- Train all batches; returns the losses and all that was learned, by name. schedule: nil for the plain loop.
local function trained(c, world, schedule)
  local m, losses, n, loaded = made(c, world), {}, 0, 0
  local function next_batch()
    loaded = loaded + 1
    return loaded <= c.steps and batch_of(c, world:rank(), loaded) or nil
  end
  local runner = schedule and pipeline.Pipeline { model = m.model, optimizer = m.optimizer, schedule = schedule,
    device = c.device }
  while n < c.steps do
    local loss
    if runner then loss = runner:progress(next_batch)
    else
      m.optimizer:zero_grad()
      loss = m.model(next_batch())
      m.model:backward(loss)
      m.optimizer:step()
    end
    n = n + 1
    losses[n] = ("%.17g"):format(loss:item())
    between(c, m, world, n)
  end
  if runner then runner:close() end
  if c.replicas then m.model:sync() end
  return bytes_of(peri.shard.gather_state_dict { losses = losses, model = m.model:state_dict(),
    tables = m.model:fused_optimizer():state_dict(), dense = m.optimizer:state_dict() }, {}, "")
end

local function check(c)
  sim.run(c.ranks, function(_, world)
    local one, other
    if c.parts_of_batch > 1 then -- the plain loop of parts is the pipeline that does nothing ahead
      local k = c.parts_of_batch
      one = pipeline.schedules.base:insert({ "update", every = k }, { after = "backward" }):set {
        zero_grad = { every = k, at = 0 }, backward = { scale = 1 / k }, optimizer = { every = k } }:called "parts"
      other = pipeline.schedules.accumulate(k)
    else
      other = pipeline.schedules[c.schedule]
    end
    local want, got = trained(c, world, one), trained(c, world, other)
    for name, bytes in peri.util.ordered(want) do
      if got[name] ~= bytes then error(("%s is another than the plain loop's"):format(name), 0) end
    end
  end, { device = c.device, timeout = 60, local_size = c.local_size })
end

-- -- the runs ---------------------------------------------------------------------------------------------------------

local once = arg[1] == "once"
local length, seed = once and "1" or arg[1] or "200", tonumber(arg[2]) or 1
local seconds = tonumber(length:match "^([%d.]+)s$")
local most = not seconds and assert(tonumber(length), "a number of models, or seconds as in 30s")
local begin, n = os.time(), 0
repeat
  local own = once and seed or seed * 1000003 + n -- far apart: runs of neighbouring seeds share no model
  local case = draw_case(own)
  if once then print(text_of(case)) end
  local ok, err = pcall(check, case)
  if not ok then
    print(text_of(case))
    print("FAILED: " .. tostring(type(err) == "table" and err.message or err))
    print(("repeat with: luajit tests/fuzz/steps.lua once %d"):format(own))
    os.exit(1)
  end
  n = n + 1
until seconds and os.time() - begin >= seconds or n == most
print(("%d models, seed %d"):format(n, seed))
