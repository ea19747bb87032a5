-- chains.lua: runs whose process is killed several times. A run is drawn at random: tables of any dtype and optimizer
-- (a table may have one of its own), pooled or as sequences, in memory or in files, trained by a dense optimizer or
-- not, maps of raw ids, a dense layer with an optimizer, a schedule and an average of its parameters, gradients of two
-- batches accumulated or not, one replica or two (DMPCollection), a metric, a loader; and how a Saver saves it: full
-- checkpoints and increments, at once or behind the training, how many are kept. Each start draws how many ranks and
-- machines there are, the plan and the pipeline, goes on from the newest checkpoint (or, at times, from an older one),
-- may reshard the live model, and is killed at any moment, before its first save or after some of them; between two
-- starts the newest checkpoint may be compacted, in its place or into that of a copy elsewhere, from which the next
-- start may go on, and that be killed, too. The law: what the last start has in the end is, to the bit, what a run has
-- that never stopped, and so is the model file that it exports. (The metric, whose sums depend on how samples are
-- spread over ranks, to rounding.) And a model file of before the first step, which follows the run, answers after each
-- start as one that is exported then.
--
--   luajit tests/fuzz/chains.lua [RUNS [SEED]]      as `make test` runs it; a failure says how to repeat it
--   luajit tests/fuzz/chains.lua SECONDSs [SEED]    as `make fuzz` runs it
--   luajit tests/fuzz/chains.lua once SEED          one run, printed (moments of kills are others each time)
-- inputs: 1
-- takes: 5 s
local here, build = io.popen("pwd"):read "*l", os.getenv "PERI_BUILD" or "build"
package.path = ("%s/%s/lua/?.lua;%s/lua/?.lua;%s/lua/?/init.lua;%s/?.lua;%s"):format(here, build, here, here, here,
  package.path)
local ffi = require "ffi"
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local drawing = require "spec.support.drawing"
local generator, pick, bits, read, write = drawing.generator, drawing.pick, drawing.bits, drawing.read, drawing.write
local nn, plan, embed, P, C = peri.nn, peri.plan, peri.embed, peri.ffi, peri.ffi.C
ffi.cdef "int usleep(unsigned); int kill(int, int); int getpid(void);"

local RANKS = { 1, 2, 3, 4 }
local SAMPLES = 4         -- of a step, of all ranks together

-- -- what is drawn ----------------------------------------------------------------------------------------------------

--- What may be beside a name: columns = each number is treated by itself, so the plan may cut columns; whole = a table
--- lies on one rank, in memory; own = other options.
local OPTIMIZERS = { { "sgd", columns = true }, { "adagrad", columns = true }, { "rowwise_adagrad" },
  { "adam", columns = true }, { "partial_rowwise_adam" }, { "lamb" }, { "partial_rowwise_lamb" }, { "lars_sgd" },
  { "lion", columns = true }, { "rowwise_rmsprop_ar" }, { "shampoo", whole = true },
  { "rowwise_adagrad", own = { weight_decay_mode = "counter", weight_decay = 0.1,
    counter_based_regularization = { counter_weight_decay_mode = "l2", counter_halflife = 3 } } },
  { "rowwise_adagrad", whole = true, own = { weight_decay_mode = "counter", counter_based_regularization = {
    learning_rate_mode = "tail_id_lr_decrease", adjustment_iter = 1, adjustment_ub = 0.3,
    max_counter_update_freq = 2 } } },
  { "rowwise_adagrad", own = { weight_decay_mode = "cowclip", weight_decay = 0.1, cowclip_regularization = {
    counter_weight_decay_mode = "decouple", weight_norm_coefficient = 0.3 } } },
  { "emainplace_rowwise_adagrad", whole = true, own = { emainplace_mode = { step_ema = 3, step_start = 1,
    step_ema_coef = 0.7 } } } }
local FROZEN = { "none", columns = true } -- of single tables
local DENSE = { { "SGD", momentum = 0.5, nesterov = true }, { "SGD" }, { "Adam", amsgrad = true }, { "Adam" },
  { "AdamW" }, { "Adagrad", lr_decay = 0.1 }, { "RMSprop", centered = true, momentum = 0.5 }, { "RMSprop" } }
local SCHEDULES = { { "StepLR", step_size = 3, gamma = 0.5 }, { "MultiStepLR", milestones = { 2, 7 } },
  { "ExponentialLR", gamma = 0.9 }, { "ConstantLR" }, { "LinearLR", total_iters = 7 },
  { "PolynomialLR", total_iters = 40 }, { "CosineAnnealingLR", T_max = 5 },
  { "CosineAnnealingWarmRestarts", T_0 = 2, T_mult = 2 }, { "CyclicLR", base_lr = 0.01, max_lr = 0.1, step_size_up = 3,
    cycle_momentum = false } }
local PIPELINES = { false, false, "base", "sparse_dist", "fused_sparse_dist", "prefetch_sparse_dist" }
local POLICIES = { "LFU_EvictionPolicy", "LRU_EvictionPolicy", "DistanceLFU_EvictionPolicy" }

local function drawn(seed)
  local draw = generator(seed)
  local m = { seed = seed, last = 14 + draw(12), kills = 2 + draw(4), collections = {}, dense = pick(draw, DENSE),
    schedule = draw(3) > 0 and pick(draw, SCHEDULES), full_every = pick(draw, { 1, 2, 3, 1000 }), keep = draw(3) + 1,
    keep_every = pick(draw, { false, 3 }), every = draw(3) + 1, async = draw(2) == 0,
    pace = pick(draw, { 0.0001, 0.1, 1 }), workers = draw(3) == 0 and 1 or 0, accumulate = draw(4) == 0,
    average = draw(3) == 0, tables = pick(draw, { "as they are", "as they are", "f16", "bf16", "int8", "int4" }),
    matrices = pick(draw, { "f32", "f32", "bf16", "int8" }) }
  local whole = false -- a collection that has no replicas
  for i = 1, draw(2) + 1 do
    local c = { name = "c" .. i, kind = pick(draw, { "bags", "rows", "files", "dense", "mch", "hash" }),
      tables = {}, optimizer = pick(draw, OPTIMIZERS), policy = pick(draw, POLICIES), interval = draw(3) + 1 }
    if c.optimizer.whole and c.kind ~= "rows" then c.kind = "bags" end
    local data_type, dim = pick(draw, { "FP32", "FP32", "FP16", "BF16" }), pick(draw, { 4, 8 })
    if c.kind == "dense" then data_type = "FP32" end
    for k = 1, draw(2) + 1 do
      c.tables[k] = { name = ("t%d_%d"):format(i, k), num_embeddings = (draw(30) + 4) * 8, embedding_dim = c.kind
        == "rows" and dim or pick(draw, { 4, 8 }), data_type = data_type,
        optimizer = draw(3) == 0 and (draw(4) == 0 and FROZEN or pick(draw, OPTIMIZERS)) or c.optimizer,
        pooling = c.kind ~= "rows" and "SUM" or nil, feature_names = { ("f%d_%d"):format(i, k) } }
    end
    for _, t in ipairs(c.tables) do
      if t.optimizer.whole and c.kind ~= "rows" and c.kind ~= "bags" or t.optimizer == FROZEN and c.kind == "files" then
        t.optimizer = c.optimizer
      end
    end
    m.collections[i] = c
    if c.kind == "files" then m.accumulate = false end -- updates of tables in memory alone, which no replicas have
    whole = whole or c.kind == "files" or c.kind == "mch" or c.kind == "hash"
  end
  m.replicas, m.sync = not whole and draw(3) == 0 and 2 or 1, draw(3) + 1
  return m
end

local function described(m)
  local list = { ("dense %s, schedule %s"):format(m.dense[1], tostring(m.schedule and m.schedule[1])) }
  for name, value in peri.util.ordered(m) do
    if type(value) ~= "table" then list[1] = ("%s, %s %s"):format(list[1], name, tostring(value)) end
  end
  for _, c in ipairs(m.collections) do
    for _, t in ipairs(c.tables) do
      list[#list + 1] = ("  %s %s %s: %d x %d %s"):format(c.kind, t.optimizer[1], c.policy, t.num_embeddings,
        t.embedding_dim, t.data_type)
    end
  end
  return table.concat(list, "\n")
end

-- -- the model --------------------------------------------------------------------------------------------------------

local function params_of(o)
  if o == FROZEN then return { optimizer = "none" } end
  local params = peri.util.copy(o.own or {})
  params.optimizer, params.learning_rate, params.exact = o[1], 0.1, o[1] ~= "shampoo" or nil
  return params
end

local Net = nn.Module:extend "Net"
function Net:init(m)
  for _, c in ipairs(m.collections) do
    local modules, rows, own = {}, c.kind == "rows", nil
    local tables = peri.util.map(c.tables, function(t)
      if c.kind ~= "dense" and t.optimizer ~= c.optimizer then
        own = own or {}
        own[t.name] = params_of(t.optimizer)
      end
      local config = peri.util.copy(t)
      config.optimizer = nil
      return peri[rows and "EmbeddingConfig" or "EmbeddingBagConfig"](config)
    end)
    local bags = peri[rows and "EmbeddingCollection" or "EmbeddingBagCollection"] { tables = tables,
      seed = m.seed % 1000, fused_params = c.kind ~= "dense" and params_of(c.optimizer) or nil,
      table_fused_params = own }
    for _, t in ipairs(c.tables) do
      if c.kind == "mch" then
        modules[t.name] = peri.MCHManagedCollisionModule { zch_size = t.num_embeddings, buckets = 4,
          eviction_interval = c.interval, eviction_policy = embed[c.policy] {} }
      elseif c.kind == "hash" then
        modules[t.name] = peri.HashZchManagedCollisionModule { zch_size = t.num_embeddings, total_num_buckets = 4,
          max_probe = 5 }
      end
    end
    self[c.name] = next(modules) and peri.ManagedCollisionEmbeddingBagCollection { embedding_bag_collection = bags,
      managed_collision_collection = peri.ManagedCollisionCollection { embedding_configs = tables,
        managed_collision_modules = modules } } or bags
  end
  self.over = nn.Linear { in_features = 6, out_features = 2 }
end

--- Gradients are numbers of few bits, so that their sums over samples and their means over ranks are exact; those of
--- the layer are of what all ranks have alike.
function Net:forward(b)
  if not b.factors then return self:answers(b) end
  local loss = (self.over(b.dense) * b.weights):sum()
  for name, kjt in peri.util.ordered(b.ids) do
    local out = peri.util.resolve(self[name](kjt))
    if out.values then loss = loss + (out:values() * b.factors):sum() * b.ranks
    else
      for _, rows in peri.util.ordered(out) do
        loss = loss + (rows:values():reshape(b.factors:size(1), -1) * b.factors):sum() * b.ranks
      end
    end
  end
  return loss
end

--- What a model file answers: the layer's numbers, and rows of all tables.
function Net:answers(b)
  local out = { over = self.over(b.dense) }
  for name, kjt in peri.util.ordered(b) do
    local rows = name ~= "dense" and peri.util.resolve(self[name](kjt)) or {}
    if rows.values then out[name] = rows:values()
    else
      for feature, jt in peri.util.ordered(rows) do
        out[feature] = jt:to_padded_dense(2):reshape(-1, 2 * jt:values():size(2))
      end
    end
  end
  return out
end

local function entry_of(c, t, draw, w, accumulate)
  local cuts = (t.optimizer.columns or c.kind == "dense") and t.embedding_dim == 8
  local kinds = { "table_wise", "row_wise", "table_row_wise", "data_parallel" }
  if cuts then kinds[5], kinds[6] = "column_wise", "grid_shard" end
  local kind, rank, host = pick(draw, kinds), draw(w.size), draw(w.hosts)
  local options = c.kind == "dense" and { compute_kernel = "dense" } or c.kind == "files" and draw(3) > 0
    and { compute_kernel = "fused_uvm_caching", cache_params = plan.CacheParams { load_factor = 1 } } or {}
  if t.optimizer.whole and c.kind ~= "dense" then return plan.table_wise(rank) end
  if c.kind == "mch" or c.kind == "hash" then return plan.row_wise() end
  if kind == "row_wise" then return plan.row_wise(options) end
  if kind == "table_row_wise" then return plan.table_row_wise(host, options) end
  if kind == "grid_shard" then return plan.grid_shard({ host, draw(w.hosts) }, options) end
  if kind == "data_parallel" and not options.cache_params and not (accumulate and c.kind ~= "dense") then
    return plan.data_parallel { compute_kernel = options.compute_kernel or "fused" }
  end
  if kind == "column_wise" then
    options.ranks = { rank, draw(w.size) }
    return plan.column_wise(options)
  end
  return plan.table_wise(rank, options)
end

--- A plan for `world`: { size =, hosts = machines }.
local function plan_of(m, draw, world)
  local entries = {}
  for _, c in ipairs(m.collections) do
    entries[c.name] = {}
    for _, t in ipairs(c.tables) do entries[c.name][t.name] = entry_of(c, t, draw, world, m.accumulate) end
  end
  return entries
end

--- An object of nn.optim of a list { name, options }, with more options.
local function made(list, more)
  local args = peri.util.copy(list)
  for name, value in peri.util.ordered(more) do args[name] = value end
  return nn.optim[table.remove(args, 1)](args)
end

local function parts_of(m, world, entries)
  nn.manual_seed(m.seed)
  local ranks = world:size()
  local model = m.replicas == 1 and peri.DistributedModelParallel { module = Net(m), group = world, plan = entries }
    or peri.DMPCollection { module = Net(m), global_pg = world, sharding_group_size = ranks / m.replicas,
      sync_interval = m.sync, use_inter_host_allreduce = true, plan = entries }
  local parts = { model = model, optimizer = made(m.dense, { params = model:named_parameters(), lr = 0.05 }),
    loader = peri.data.synthetic { num_rows = 44, epochs = 9, seed = m.seed % 1000, rows = 4000, dense_features = 6,
      sparse_features = 2, batch_size = SAMPLES, rank = world:rank(), world_size = ranks,
      num_workers = m.workers },
    metric = nn.metrics.NEMetric { group = world } }
  parts.schedule = m.schedule and made(m.schedule, { optimizer = parts.optimizer }) or nil
  if m.accumulate then model:accumulate(true) end
  if not m.average then return parts end
  local average, _
  average, _, parts.averages = peri.pipeline.ema { params = model.module.over:named_parameters(), decay = 0.9 }
  return parts, average
end

--- The ids of a feature are those that are given, within its table; raw ones are spread.
local function ids_of(m, n, raw, step)
  local ids = {}
  for i, c in ipairs(m.collections) do
    local keys, values, lengths = {}, {}, {}
    for k, t in ipairs(c.tables) do
      keys[k] = t.feature_names[1]
      for s = 1, n do
        for j = 0, 1 do
          local id = tonumber(raw[j * n + s]) * (i + k) + step
          values[#values + 1] = (c.kind == "mch" or c.kind == "hash") and id % 997 * 1000003 or id % t.num_embeddings
        end
        lengths[#lengths + 1] = 2
      end
    end
    ids[c.name] = peri.KeyedJaggedTensor { keys = keys, lengths = lengths, values = peri.tensor(values, "i64") }
  end
  return ids
end

--- Numbers of few bits, by step.
local function few_bits(m, step, shape, n)
  local draw, list = generator(m.seed + step * 31 + n), {}
  for i = 1, n do list[i] = (draw(63) - 31) / 32 end
  return peri.tensor(list, "f32", "cpu", shape)
end

--- The batches behind step `from`, as the model takes them; `samples` has, of those that were not trained yet, what the
--- metric sees.
local function batches_of(m, parts, from, ranks, samples)
  local step = from
  return function()
    local b = step < m.last and parts.loader()
    if not b then return nil end
    step = step + 1
    samples[#samples + 1] = P.lasting(function()
      return { b.dense_features:select(2, 0):sigmoid():detach(), b.labels:clone() }
    end)
    local raw = b.sparse_features:values():to_list()
    return { ids = ids_of(m, b.sparse_features:stride(), raw, step), dense = few_bits(m, step, { 3, 6 }, 18),
      weights = few_bits(m, step, { 3, 2 }, 6), factors = b.labels:reshape(-1, 1) + 0.5, ranks = ranks }
  end
end

--- Batches for a model file and the model that it was made of.
local function held_out(m)
  return peri.util.map({ 11, 40 }, function(n)
    local draw, raw = generator(m.seed + n), {}
    for i = 1, 2 * n do raw[i] = draw(4000) end
    local batch = ids_of(m, n, raw, 0)
    batch.dense = few_bits(m, n, { n, 6 }, 6 * n)
    return batch
  end)
end

--- Write a model file; returns its digest.
local function export(m, model, path)
  model:export(path, { batches = held_out(m), tables = m.tables, dense = m.matrices, allowed_difference = math.huge })
  return peri.export.open(path):describe().digest
end

--- A step on the next batch, by the pipeline or, without one, by hand.
local function train(m, parts, pipeline, average, batches, samples)
  if pipeline then pipeline:progress(batches)
  else
    peri.scope(function()
      parts.optimizer:zero_grad()
      local batch = batches()
      parts.model:backward(parts.model(batch))
      if m.accumulate then
        batch.weights, batch.factors = batch.weights * 0.5, batch.factors * 0.5
        parts.model:backward(parts.model(batch))
        parts.model:apply_accumulated()
      end
      parts.optimizer:step()
      if average then average.run() end
    end)
  end
  if parts.schedule then parts.schedule:step() end
  local seen = table.remove(samples, 1)
  parts.metric:update(seen[1], seen[2])
end

-- -- a start: the process that is killed ------------------------------------------------------------------------------

--- All that has been learned, as a text.
local function digest(parts)
  local out, lines = ffi.new "uint64_t[1]", {}
  local function add(name, x)
    if peri.Tensor.is(x) then
      peri.ffi.check(C.peri_checkpoint_checksum(peri.Tensor.ptr(x), out))
      x = out[0]
    elseif type(x) == "table" then
      for key, y in peri.util.ordered(x) do
        if key ~= "params" then add(name .. "/" .. tostring(key), y) end -- names, in the plan's order
      end
      return
    end
    lines[#lines + 1] = ("%s = %s"):format(name, tostring(x))
  end
  add("model", peri.shard.gather_state_dict(parts.model:state_dict()))
  for name, own in peri.util.ordered(parts.model:fused_optimizer():state_dict().state) do
    add("tables/" .. name, peri.shard.gather_state_dict(own))
  end
  add("optimizer", peri.shard.gather_state_dict(parts.optimizer:state_dict()))
  if parts.schedule then add("schedule", parts.schedule:state_dict()) end
  if parts.averages then add("averages", parts.averages:state_dict()) end
  add("loader", parts.loader:state_dict())
  return table.concat(lines, "\n")
end

if arg[1] == "child" then
  local m, start, ranks, folder, result = drawn(tonumber(arg[2])), tonumber(arg[3]), tonumber(arg[4]), arg[5], arg[6]
  local straight = folder == "-"
  local draw = generator(m.seed * 64 + start)
  local w = { size = ranks / m.replicas, local_size = m.replicas == 1 and 1 + draw(ranks) or ranks }
  w.hosts = math.ceil(ranks / w.local_size)
  local first, second = plan_of(m, draw, w), plan_of(m, draw, w)
  local name = not (straight or m.accumulate) and pick(draw, PIPELINES)
  local turn = { older = draw(3), which = draw(100), at = draw(2) == 0 and 1 + draw(6) }
  local copy = not straight and folder .. "/../copy/all"
  if copy and (draw(2) == 0 or not pcall(io.lines, copy .. "/manifest.json")) then copy = nil end
  local function body(rank, world)
    local parts, average = parts_of(m, world, first)
    local step, saver = 0, nil
    if straight then export(m, parts.model, result .. ".first")
    else
      local back = turn.older == 0 and peri.checkpoint.Saver.list(folder) or {}
      saver = peri.checkpoint.Saver { folder = folder, parts = parts, every = m.every, full_every = m.full_every,
        keep = m.keep, keep_every = m.keep_every or nil, async = m.async, pace = m.async and m.pace or nil,
        group = world, resume = copy or back[2] and back[turn.which % #back + 1].path or "auto" }
      step = saver:resume() or 0
      if rank == 0 then write(result .. ".pid", ffi.C.getpid()) end
    end
    local samples = {}
    local batches = batches_of(m, parts, step, w.size, samples)
    local pipeline = name and peri.pipeline.Pipeline { model = parts.model, optimizer = parts.optimizer,
      schedule = average and peri.pipeline.schedules[name]:insert(average, { last = true })
        or peri.pipeline.schedules[name] }
    for i = step + 1, m.last do
      train(m, parts, pipeline, average, batches, samples)
      if m.replicas > 1 and i == m.last then parts.model:sync() end
      if not (straight or name) and turn.at == i - step and (m.replicas == 1 or i % m.sync == 0) then
        parts.model:reshard(second, { folder = folder .. "/.." })
      end
      if saver then saver:step(i) end
    end
    if pipeline then pipeline:close() end
    if saver then saver:close(m.last) end
    local text, file, value = digest(parts), export(m, parts.model, result .. ".peri"), parts.metric:compute()
    if rank == 0 then write(result, ("%s\nfile = %s\n@%s"):format(text, file, require("dkjson").encode(value))) end
  end
  if ranks == 1 and straight then
    local world = peri.init()
    body(0, world)
  else sim.run(ranks, body, { local_size = w.local_size }) end
  return
end

-- -- killing ----------------------------------------------------------------------------------------------------------

local folder = drawing.folder "chains"
local counts = { runs = 0, starts = 0, kills = 0, compactions = 0, followed = 0 }

--- Start a process, and kill it at a random moment within `within` seconds (nil: not) of the first time that ready()
--- is true (nil: of now). Returns what it said.
local function process(command, ready, within)
  local pipe = io.popen(("echo $$ >%s/shell; exec %s 2>&1; "):format(folder, command))
  local began, moment = tonumber(C.peri_time_ns()), nil
  local function since() return (tonumber(C.peri_time_ns()) - began) * 1e-9 end
  while within do
    local shell = tonumber(read(folder .. "/shell") or "")
    if not moment and shell and (not ready or ready()) then moment = since() + math.random() * within end
    if moment and since() > moment or since() > 60 then
      if shell then ffi.C.kill(shell, 9) end
      break
    end
    local there = shell and read(("/proc/%d/stat"):format(shell))
    if there and not there:find "%) [^Z]" then break end -- it has ended
    ffi.C.usleep(500)
  end
  local out = pipe:read "*a"
  pipe:close()
  return out
end

local function fail(m, why)
  print(described(m))
  print(why)
  print(("FAILED: repeat with: luajit tests/fuzz/chains.lua once %d   (what it has saved is in %s)"):format(m.seed,
    folder))
  os.exit(1)
end

--- The names of what two digests have differently, and the metric's values.
local function compare(want, got)
  local list, other = {}, {}
  for line in got:gmatch "[^\n]+" do other[line] = true end
  for line in want:gmatch "[^\n]+" do
    if not other[line] and line:sub(1, 1) ~= "@" then list[#list + 1] = line end
  end
  local a, b = require("dkjson").decode(want:match "\n@(.*)"), require("dkjson").decode(got:match "\n@(.*)")
  for name, x in pairs(a) do -- any order
    local near = type(x) ~= "number" or math.abs(x - b[name]) <= 1e-9 * math.max(1, math.abs(x)) -- false for NaN
    if not near then
      list[#list + 1] = ("metric %s: %.17g, wanted %.17g"):format(name, b[name], x)
    end
  end
  return list
end

local function newest_of() return peri.checkpoint.Saver.list(folder .. "/run")[1] end
local function newest_number() return (newest_of() or { number = 0 }).number end

--- An error unless what follows the run has the newest checkpoint by now, and answers as a file that is exported of
--- it.
local function check_follower(m, follower, start)
  local model, why = follower:poll()
  if why then fail(m, ("start %d: the file that follows: %s"):format(start, why)) end
  local newest, path = newest_of(), follower:path()
  if (path or "") ~= (newest and newest.path or "") then
    fail(m, ("start %d: the file that follows has %s, not %s"):format(start, tostring(path), newest and newest.path))
  end
  if not model then return end
  counts.followed = counts.followed + 1
  peri.scope(function()
    local alone, batch = Net(m), held_out(m)[2]
    peri.checkpoint.load(path, { model = alone }, { only = { "model/" } })
    export(m, alone, folder .. "/alone.peri")
    if bits(peri.export.open(folder .. "/alone.peri"):predict(batch)) ~= bits(model:predict(batch)) then
      fail(m, ("start %d: the file that follows has other bits than %s"):format(start, path))
    end
  end)
  model:release()
end

local function run(seed)
  local m = drawn(seed)
  os.execute(("rm -rf %s; mkdir -p %s/run %s/copy"):format(folder, folder, folder))
  local self = ("env PERI_BUILD=%s luajit tests/fuzz/chains.lua child %d"):format(build, seed)
  local said = process(("%s 0 %d - %s/straight"):format(self, m.replicas, folder))
  local want = read(folder .. "/straight")
  if not want then fail(m, "the run that never stops: " .. said) end
  local draw, follower = generator(seed + 5), peri.export.follow(folder .. "/straight.first", folder .. "/run")
  for start = 1, m.kills + 1 do
    local ranks = pick(draw, m.replicas > 1 and { 2, 4 } or RANKS)
    os.remove(folder .. "/end")
    os.remove(folder .. "/end.pid")
    local last, goal = start == m.kills + 1, newest_number() + draw(4)
    local out = process(("%s %d %d %s/run %s/end"):format(self, start, ranks, folder, folder), function()
      return read(folder .. "/end.pid") and newest_number() >= goal
    end, not last and pick(draw, { 0.01, 0.1, 0.5 }) or nil)
    counts.starts = counts.starts + 1
    local got = read(folder .. "/end")
    counts.kills = counts.kills + (got and 0 or 1)
    if out:find "perilune: .*is not good" or out:find "rror" or out:find "chains.lua:" then
      fail(m, ("start %d on %d ranks: %s"):format(start, ranks, out))
    end
    if last and not got then fail(m, ("start %d on %d ranks: %s"):format(start, ranks, out)) end
    if got then
      local differ = compare(want, got)
      if #differ > 0 then
        fail(m, ("start %d, %d ranks:\n%s\n%s"):format(start, ranks, table.concat(differ, "\n"), out))
      end
      check_follower(m, follower, start)
      break
    end
    check_follower(m, follower, start)
    local newest = newest_of()
    if newest and draw(3) == 0 then
      local c = peri.checkpoint.open(newest.path)
      local chain = #c:levels() > 1
      c:verify()
      c:close()
      if chain then
        counts.compactions = counts.compactions + 1
        local elsewhere = draw(2) == 0 and (" -o %s/copy/all --replace"):format(folder) or ""
        process(("%s/perilune checkpoint compact %s%s"):format(build, newest.path, elsewhere), nil, 0.2)
        local copied, copy = pcall(peri.checkpoint.open, folder .. "/copy/all")
        if copied then
          copy:verify()
          if copy:parent() then fail(m, "the copy is no full checkpoint") end
          copy:close()
        elseif not tostring(copy):find "No such file" then fail(m, tostring(copy)) end
      end
    end
  end
  counts.runs = counts.runs + 1
end

local length = arg[1] or "1"
if length == "once" then
  print(described(drawn(tonumber(arg[2]))))
  run(tonumber(arg[2]))
else
  local seconds, most, began, n = tonumber(length:match "^([%d.]+)s$"), tonumber(length), os.time(), 0
  local first = tonumber(arg[2]) or 1
  while seconds and os.time() - began < seconds or not seconds and n < most do
    run(first * 100003 + n)
    n = n + 1
  end
end
os.execute("rm -rf " .. folder)
print(("%d runs, %d starts, %d killed, %d compactions, followed %d times"):format(counts.runs, counts.starts,
  counts.kills, counts.compactions, counts.followed))
