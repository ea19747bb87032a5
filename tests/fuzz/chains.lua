-- chains.lua: runs whose process is killed several times. A run is drawn at random: tables of any dtype and optimizer,
-- in memory or in files, maps of raw ids, a dense layer with an optimizer and a schedule, a metric, a loader; and how a
-- Saver saves it: full checkpoints and increments, at once or behind the training, how many are kept. Each start draws
-- how many ranks there are, and the plan, goes on from the newest checkpoint (or, at times, from an older one), may
-- reshard the live model, and is killed at any moment; between two starts the newest checkpoint may be compacted, and
-- that be killed, too. The law: what the last start has in the end is, to the bit, what a run has that never stopped.
-- (The metric, whose sums depend on how samples are spread over ranks, to rounding.)
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
local generator, pick = drawing.generator, drawing.pick
local nn, plan, embed, C = peri.nn, peri.plan, peri.embed, peri.ffi.C
ffi.cdef "int usleep(unsigned); int kill(int, int); int getpid(void);"

local RANKS = { 1, 2, 4 } -- means over so many ranks are exact
local SAMPLES = 4         -- of a step, of all ranks together

-- -- what is drawn ----------------------------------------------------------------------------------------------------

local OPTIMIZERS = { "sgd", "adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam", "lamb",
  "partial_rowwise_lamb", "lars_sgd", "lion", "rowwise_rmsprop_ar" }
local DENSE = { "SGD", "Adam", "AdamW", "Adagrad", "RMSprop" }
local POLICIES = { "LFU_EvictionPolicy", "LRU_EvictionPolicy", "DistanceLFU_EvictionPolicy" }

local function drawn(seed)
  local draw = generator(seed)
  local m = { seed = seed, last = 14 + draw(12), kills = 2 + draw(4), collections = {}, dense = pick(draw, DENSE),
    momentum = draw(2) * 0.5, schedule = draw(2) == 0, full_every = pick(draw, { 1, 2, 3, 1000 }), keep = draw(3) + 1,
    keep_every = pick(draw, { false, 3 }), every = draw(3) + 1, async = draw(2) == 0,
    pace = pick(draw, { 0.0001, 0.1, 1 }), workers = draw(3) == 0 and 1 or 0 }
  for i = 1, draw(2) + 1 do
    local c = { name = "c" .. i, kind = pick(draw, { "bags", "bags", "files", "mch", "hash" }), tables = {},
      optimizer = pick(draw, OPTIMIZERS), policy = pick(draw, POLICIES), interval = draw(3) + 1 }
    local data_type = pick(draw, { "FP32", "FP32", "FP16", "BF16" })
    for k = 1, draw(2) + 1 do
      c.tables[k] = { name = ("t%d_%d"):format(i, k), num_embeddings = (draw(30) + 4) * 8, embedding_dim = pick(draw,
        { 4, 8 }), data_type = data_type, pooling = "SUM", feature_names = { ("f%d_%d"):format(i, k) } }
    end
    m.collections[i] = c
  end
  return m
end

local function described(m)
  local list = { ("last %d, kills %d, dense %s, schedule %s, every %d, full_every %d, keep %d, keep_every %s, "
    .. "async %s, pace %g, workers %d"):format(m.last, m.kills, m.dense, tostring(m.schedule), m.every, m.full_every,
    m.keep, tostring(m.keep_every), tostring(m.async), m.pace, m.workers) }
  for _, c in ipairs(m.collections) do
    for _, t in ipairs(c.tables) do
      list[#list + 1] = ("  %s %s %s: %d x %d %s"):format(c.kind, c.optimizer, c.policy, t.num_embeddings,
        t.embedding_dim, t.data_type)
    end
  end
  return table.concat(list, "\n")
end

-- -- the model --------------------------------------------------------------------------------------------------------

local Net = nn.Module:extend "Net"
function Net:init(m)
  for _, c in ipairs(m.collections) do
    local modules = {}
    local tables = peri.util.map(c.tables, function(t) return peri.EmbeddingBagConfig(peri.util.copy(t)) end)
    local bags = peri.EmbeddingBagCollection { tables = tables, seed = m.seed % 1000,
      fused_params = { optimizer = c.optimizer, learning_rate = 0.1, exact = true } }
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

--- Gradients of rows are exact sums over samples; those of the layer are of what all ranks have alike.
function Net:forward(b)
  local loss = self.over(b.dense):square():sum()
  for name, kjt in peri.util.ordered(b.ids) do
    loss = loss + (peri.util.resolve(self[name](kjt)):values() * b.factors):sum() * b.ranks
  end
  return loss
end

local function plan_of(m, draw, ranks)
  local entries = {}
  for _, c in ipairs(m.collections) do
    local e, raw = {}, c.kind == "mch" or c.kind == "hash"
    for _, t in ipairs(c.tables) do
      local kind = pick(draw, raw and { "row_wise" } or { "table_wise", "row_wise", "column_wise", "data_parallel" })
      if c.kind == "files" and draw(2) == 0 then
        e[t.name] = plan.table_wise(draw(ranks), { compute_kernel = "fused_uvm_caching",
          cache_params = plan.CacheParams { load_factor = 0.5 } })
      elseif kind == "column_wise" and c.optimizer == "adam" and t.embedding_dim == 8 then
        e[t.name] = plan.column_wise { ranks = { draw(ranks), draw(ranks) } }
      elseif kind == "data_parallel" then e[t.name] = plan.data_parallel { compute_kernel = "fused" }
      elseif kind == "row_wise" then e[t.name] = plan.row_wise()
      else e[t.name] = plan.table_wise(draw(ranks)) end
    end
    entries[c.name] = e
  end
  return entries
end

local function parts_of(m, world, draw)
  nn.manual_seed(m.seed)
  local ranks = world:size()
  local model = peri.DistributedModelParallel { module = Net(m), group = world, plan = plan_of(m, draw, ranks) }
  local named = {}
  for _, p in ipairs(model:named_parameters()) do
    if p.name:find "^over" then named[#named + 1] = p end
  end
  local momentum = (m.dense == "SGD" or m.dense == "RMSprop") and m.momentum or nil
  local parts = { model = model, optimizer = nn.optim[m.dense] { params = named, lr = 0.05, momentum = momentum },
    loader = peri.data.synthetic { num_rows = 44, epochs = 9, seed = m.seed % 1000, rows = 4000, dense_features = 6,
      sparse_features = 2, batch_size = SAMPLES, rank = world:rank(), world_size = ranks,
      num_workers = m.workers },
    metric = nn.metrics.NEMetric { group = world } }
  parts.schedule = m.schedule and nn.optim.StepLR { optimizer = parts.optimizer, step_size = 3, gamma = 0.5 } or nil
  return parts
end

--- One step: the ids of a feature are those of the batch, within its table; raw ones are spread.
local function train(m, parts, step, world)
  local b, ranks = parts.loader(), world:size()
  peri.scope(function()
    local n, ids, labels = b.sparse_features:stride(), {}, b.labels
    local raw = b.sparse_features:values():to_list()
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
    local dense = peri.Tensor.uniform({ 3, 6 }, -1, 1, m.seed % 1000 + step)
    if parts.optimizer.zero_grad then parts.optimizer:zero_grad() end
    local loss = parts.model { ids = ids, dense = dense, factors = labels:reshape(-1, 1) + 0.5, ranks = ranks }
    loss:backward()
    parts.optimizer:step()
    if parts.schedule then parts.schedule:step() end
    parts.metric:update(b.dense_features:select(2, 0):sigmoid():detach(), labels)
  end)
end

-- -- a start: the process that is killed ------------------------------------------------------------------------------

local function write(path, text)
  local file = assert(io.open(path .. ".new", "w"))
  file:write(text)
  file:close()
  os.rename(path .. ".new", path)
end

--- All that has been learned, as a text.
local function digest(parts)
  local out, lines = ffi.new "uint64_t[1]", {}
  local function add(name, x)
    if peri.Tensor.is(x) then
      peri.ffi.check(C.peri_checkpoint_checksum(peri.Tensor.ptr(x), out))
      x = out[0]
    elseif type(x) == "table" then
      for key, y in peri.util.ordered(x) do add(name .. "/" .. tostring(key), y) end
      return
    end
    lines[#lines + 1] = ("%s = %s"):format(name, tostring(x))
  end
  add("model", peri.shard.gather_state_dict(parts.model:state_dict()))
  for name, own in peri.util.ordered(parts.model:fused_optimizer():state_dict().state) do
    add("tables/" .. name, peri.shard.gather_state_dict(own))
  end
  add("optimizer", parts.optimizer:state_dict())
  if parts.schedule then add("schedule", parts.schedule:state_dict()) end
  add("loader", parts.loader:state_dict())
  return table.concat(lines, "\n")
end

if arg[1] == "child" then
  local m, start, ranks, folder, result = drawn(tonumber(arg[2])), tonumber(arg[3]), tonumber(arg[4]), arg[5], arg[6]
  local straight = folder == "-"
  local function body(rank, world)
    local draw = generator(m.seed * 64 + start)
    local parts, step, saver = parts_of(m, world, draw), 0, nil
    if not straight then
      local back = draw(3) == 0 and peri.checkpoint.Saver.list(folder) or {}
      saver = peri.checkpoint.Saver { folder = folder, parts = parts, every = m.every, full_every = m.full_every,
        keep = m.keep, keep_every = m.keep_every or nil, async = m.async, pace = m.async and m.pace or nil,
        group = world, resume = back[2] and back[draw(#back) + 1].path or "auto" }
      step = saver:resume() or 0
      if rank == 0 then write(result .. ".pid", ffi.C.getpid()) end
    end
    local moment = not straight and draw(2) == 0 and step + draw(6) + 1
    for i = step + 1, m.last do
      train(m, parts, i, world)
      if i == moment then parts.model:reshard(plan_of(m, draw, ranks), { folder = folder .. "/.." }) end
      if saver then saver:step(i) end
    end
    if saver then saver:close(m.last) end
    local text, value = digest(parts), parts.metric:compute()
    if rank == 0 then write(result, text .. "\n@" .. require("dkjson").encode(value)) end
  end
  if ranks == 1 and straight then
    local world = peri.init()
    body(0, world)
  else sim.run(ranks, body) end
  return
end

-- -- killing ----------------------------------------------------------------------------------------------------------

local folder = drawing.folder "chains"
local counts = { runs = 0, starts = 0, kills = 0, compactions = 0 }

local function read(path)
  local file = io.open(path)
  local text = file and file:read "*a"
  if file then file:close() end
  return text
end

--- Start a process, and kill it at a random moment within `within` seconds (nil: not) of its writing `ready` (nil: of
--- now). Returns what it said.
local function process(command, ready, within)
  local pipe = io.popen(("echo $$ >%s/shell; exec %s 2>&1; "):format(folder, command))
  local began, moment = tonumber(C.peri_time_ns()), nil
  local function since() return (tonumber(C.peri_time_ns()) - began) * 1e-9 end
  while within do
    local shell = tonumber(read(folder .. "/shell") or "")
    if not moment and shell and (not ready or read(ready)) then moment = since() + math.random() * within end
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

local function run(seed)
  local m = drawn(seed)
  os.execute(("rm -rf %s; mkdir -p %s/run"):format(folder, folder))
  local self = ("env PERI_BUILD=%s luajit tests/fuzz/chains.lua child %d"):format(build, seed)
  local said = process(("%s 0 1 - %s/straight"):format(self, folder))
  local want = read(folder .. "/straight")
  if not want then fail(m, "the run that never stops: " .. said) end
  local draw = generator(seed + 5)
  for start = 1, m.kills + 1 do
    local ranks = pick(draw, RANKS)
    os.remove(folder .. "/end")
    os.remove(folder .. "/end.pid")
    local last = start == m.kills + 1
    local out = process(("%s %d %d %s/run %s/end"):format(self, start, ranks, folder, folder),
      folder .. "/end.pid", not last and pick(draw, { 0.05, 0.3, 1 }) or nil)
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
      break
    end
    local newest = peri.checkpoint.Saver.list(folder .. "/run")[1]
    if newest and draw(3) == 0 then
      local c = peri.checkpoint.open(newest.path)
      local chain = #c:levels() > 1
      c:verify()
      c:close()
      if chain then
        counts.compactions = counts.compactions + 1
        process(("%s/perilune checkpoint compact %s"):format(build, newest.path), nil, 0.2)
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
print(("%d runs, %d starts, %d killed, %d compactions"):format(counts.runs, counts.starts, counts.kills,
  counts.compactions))
