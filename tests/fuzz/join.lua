-- join.lua: everything that keeps a model, in one run: at random, steps, full saves and increments (at once, or behind
-- the next steps), `model:reshard`, loads into new models, ways back to older checkpoints, from where the chain forks,
-- compactions, removals, loads of the model alone, under its names or others, a reader, and a follower; over tables in
-- memory and in files, of several dtypes, and maps of raw ids of both kinds, with a feature of two tables, a layer that
-- came into the wrapped model, a frozen parameter, autocast, a batch of its own for each rank (at times of no samples)
-- or not. A run has up to three phases, each on another number of ranks, which begins with a load. In half of the runs
-- a Saver saves, which removes old checkpoints.
-- The law: after each of them the state is that of a run that only trained, bit for bit; what is loaded, read or
-- followed is that of the step that was saved; a checkpoint can be removed unless another one stands on it, or somebody
-- reads it; and a Saver removes all that it does not have to keep (spec/support/saver_law.lua), and nothing else.
--
--   luajit tests/fuzz/join.lua [RUNS [SEED]]       as `make test` runs it; a failure prints the run and how to repeat
--                                                  it
--   luajit tests/fuzz/join.lua SECONDSs [SEED]     as `make fuzz` runs it
--   luajit tests/fuzz/join.lua once SEED           one run of it, which prints each thing before it is done
-- inputs: 5
-- takes: 6 s
local here, build_folder = io.popen("pwd"):read "*l", os.getenv "PERI_BUILD" or "build"
package.path = ("%s/%s/lua/?.lua;%s/lua/?.lua;%s/lua/?/init.lua;%s/?.lua;%s"):format(here, build_folder, here, here,
  here, package.path)
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local text = require "spec.support.facts"
local drawing = require "spec.support.drawing"
local saver_law = require "spec.support.saver_law"
local nn, plan, embed = peri.nn, peri.plan, peri.embed
local generator, pick = drawing.generator, drawing.pick
local expect, parts, of_first, name_of, stands_on = saver_law.expect, saver_law.parts, saver_law.of_first,
  saver_law.name_of, saver_law.stands_on

local kept = drawing.folder "join"

-- -- drawing ----------------------------------------------------------------------------------------------------------

local maps = {
  lfu = function() return peri.MCHManagedCollisionModule { zch_size = 30, device = "cpu", eviction_interval = 3,
    buckets = 6, eviction_policy = embed.LFU_EvictionPolicy() } end,
  lru = function() return peri.MCHManagedCollisionModule { zch_size = 30, device = "cpu", eviction_interval = 1,
    buckets = 3, eviction_policy = embed.LRU_EvictionPolicy {} } end,
  ttl = function() return peri.HashZchManagedCollisionModule { zch_size = 30, total_num_buckets = 3, max_probe = 8,
    eviction_policy_name = "SINGLE_TTL_EVICTION", eviction_config = { features = { "fraw" }, single_ttl = 3 } } end,
}

--- Where a table is, for `ranks` ranks: in memory or, with `files`, behind a cache.
local function entry_of(below, ranks, files, columns)
  local options = files and below(2) == 0 and { compute_kernel = "fused_uvm_caching",
    cache_params = plan.CacheParams { load_factor = 0.5 } } or {}
  local kind = below(columns and 3 or 2)
  if kind == 0 then return plan.row_wise(options) end
  if kind == 1 then return plan.table_wise(below(ranks), options) end
  return plan.column_wise()
end

local function plan_of(below, case, ranks)
  local p = { ebc = { a = entry_of(below, ranks, case.files, not case.by_row),
    b = entry_of(below, ranks, case.files, not case.by_row) } }
  if case.map then p.mc = { raw = entry_of(below, ranks, false, false) } end
  return p
end

local things = { "step", "step", "step", "full", "full behind", "increment", "increment", "increment behind", "reshard",
  "load", "follow", "back", "compact", "remove", "model alone", "model renamed", "read" }
local planned = peri.util.index_of { "reshard", "load", "back", "model alone", "model renamed" }

local function draw(seed)
  local below = generator(seed)
  local case = { optimizer = pick(below, { "rowwise_adagrad", "adam", "sgd" }), files = below(2) == 0, phases = {},
    map = pick(below, { "lfu", "lru", "ttl", "ttl", false }),
    dtype = pick(below, { "FP32", "FP32", "FP16", "BF16" }), shared = below(3) == 0, late = below(3) == 0,
    cast = pick(below, { false, false, "bf16", "f16" }), own = below(2) == 0, frozen = below(3) == 0 }
  case.keep = below(2) == 0 and { newest = 1 + below(3), every = pick(below, { 2, 3, 5, false }),
    full_every = 1 + below(4), async = below(2) == 0 } or false
  case.by_row = case.optimizer == "rowwise_adagrad" -- a number for each row: columns that are cut anew take the mean
  for k = 1, 1 + below(3) do
    local phase = { ranks = below(3) + 1, list = {} }
    phase.plan = plan_of(below, case, phase.ranks)
    for i = 1, 5 + below(8) do
      local what = pick(below, things)
      phase.list[i] = { what = what, plan = planned[what] and plan_of(below, case, phase.ranks) or nil,
        which = below(1000) }
    end
    case.phases[k] = phase
  end
  return case
end

local function text_of(case)
  local function words(p)
    return ("a %s, b %s%s"):format(tostring(p.ebc.a), tostring(p.ebc.b), p.mc and ", raw " .. tostring(p.mc.raw) or "")
  end
  local keep = case.keep
  local lines = { ("%s, %s, map %s%s%s%s%s%s%s"):format(case.optimizer, case.dtype, tostring(case.map),
    case.shared and ", shared features" or "", case.late and ", a late layer" or "",
    case.cast and ", autocast " .. case.cast or "", case.own and ", a batch for each rank" or "",
    case.frozen and ", a frozen bias" or "", keep and (", keep %d, every %s, full every %d%s"):format(
      keep.newest, tostring(keep.every), keep.full_every, keep.async and ", async" or "") or "") }
  for _, phase in ipairs(case.phases) do
    lines[#lines + 1] = ("%d ranks, %s"):format(phase.ranks, words(phase.plan))
    for _, x in ipairs(phase.list) do
      lines[#lines + 1] = ("  %s %d%s"):format(x.what, x.which, x.plan and ": " .. words(x.plan) or "")
    end
  end
  return table.concat(lines, "\n")
end

-- -- the program ------------------------------------------------------------------------------------------------------

local own_names = { ebc = "ebc", over = "over", late = "late" }
local other_names = { ebc = "bags", over = "head", late = "head2" }

local Net = nn.Module:extend "Net"
function Net:init(case, names)
  local function config(name, rows, dim, dtype)
    return peri.EmbeddingBagConfig { name = name, num_embeddings = rows, embedding_dim = dim, data_type = dtype,
      feature_names = { "f" .. name, case.shared and name == "b" and "fa" or nil } }
  end
  local function params() return { optimizer = case.optimizer, learning_rate = 0.1, exact = true } end
  self[names.ebc] = peri.EmbeddingBagCollection { seed = 5, fused_params = params(),
    tables = { config("a", 50, 8, case.dtype), config("b", 37, 16, case.dtype) } }
  if case.map then
    local tables = { config("raw", 30, 8) }
    self.mc = peri.ManagedCollisionEmbeddingBagCollection {
      embedding_bag_collection = peri.EmbeddingBagCollection { seed = 6, tables = tables, fused_params = params() },
      managed_collision_collection = peri.ManagedCollisionCollection { embedding_configs = tables,
        managed_collision_modules = { raw = maps[case.map]() } } }
  end
  self.case = case
  self.width = (case.map and 32 or 24) + (case.shared and 16 or 0)
  self[names.over] = nn.Linear { in_features = self.width, out_features = 1 }
  if case.frozen then self[names.over].bias:requires_grad(false) end
end
function Net:compute(kjt, raw)
  local rows = self.ebc(kjt):values()
  if self.mc then rows = nn.functional.cat({ rows, self.mc(raw):values() }, 2) end
  local sum = self.over(rows):sum()
  return self.late and sum + self.late(rows):square():sum() * 0.1 or sum
end
function Net:forward(kjt, raw)
  if not self.case.cast then return self:compute(kjt, raw) end
  return peri.autocast({ device = "cpu", dtype = self.case.cast }, self.compute, self, kjt, raw)
end

local function build(case, world, entries, names)
  nn.manual_seed(3)
  names = names or own_names
  local model = peri.DistributedModelParallel { module = Net(case, names), group = world,
    plan = { [names.ebc] = entries.ebc, mc = entries.mc } }
  if case.late then -- a layer that comes into a wrapped model, on each rank with numbers of its own
    nn.manual_seed(10 + world:rank())
    model.module[names.late] = nn.Linear { in_features = model.module.width, out_features = 2 }
    model:init_data_parallel()
  end
  return { model = model, optimizer = nn.optim.Adam { params = model:named_parameters(), lr = 0.05 }, case = case,
    world = world }
end

--- A batch of some lists of ids.
local function batch_of(keys, bags)
  local values, lengths = {}, {}
  for k, bag in ipairs(bags) do
    lengths[k] = #bag
    for _, id in ipairs(bag) do values[#values + 1] = id end
  end
  return peri.KeyedJaggedTensor { keys = keys, lengths = peri.tensor(lengths, "i32", "cpu", { #lengths }),
    values = peri.tensor(values, "i64", "cpu", { #values }), stride = #bags / #keys }
end

--- Step i: all ranks have the same batch, or each has its own, at times one of no samples.
local function step(p, i)
  local case, world = p.case, p.world
  local ids, raw = { { i * 7 % 50 % 37 }, { i * 3 % 37 }, { i * 5 % 37, i % 37 }, {} },
    { { i * 37 % 997, i * 13 % 97 }, { i % 5 } }
  if case.own then
    local below = generator(i * 64 + world:rank())
    local n = below(4)
    ids, raw = {}, {}
    for k = 1, 3 * n do
      local list, limit = k > 2 * n and raw or ids, k > 2 * n and 997 or 37
      list[#list + 1] = {}
      for j = 1, below(3) do list[#list][j] = below(limit) end
    end
  end
  peri.scope(function()
    p.optimizer:zero_grad()
    p.model(batch_of({ "fa", "fb" }, ids), batch_of({ "fraw" }, raw)):backward()
    p.optimizer:step()
  end)
end

local function state(p)
  return text(peri.shard.gather_state_dict { model = p.model:state_dict(),
    tables = p.model:fused_optimizer():state_dict(), optimizer = p.optimizer:state_dict() })
end

-- -- one run ----------------------------------------------------------------------------------------------------------

--- The numbers of a model's state, by name.
local function numbers_of(model)
  return peri.util.map(peri.shard.gather_state_dict(model:state_dict()), function(t) return text { t } end)
end

--- s: { case =, world =, phase = its number, plan = its plan, p = the run, never = one that only trains, history = the
--- batches of their steps, i = the last batch of any step, saves = list of what is in the folder: { path =, history =,
--- text = of the state, model = numbers_of, phase =, start =, run = path of the first save of its Saver's run }, start
--- = what `never` began with (nil: nothing): dense sums of other numbers of ranks round otherwise, tip = the one that
--- the run was saved as, or loaded from, last, n = saves so far, folder =, pending = a save behind the steps,
--- follower =, fans = what it follows with, open = of rank 0, by who reads: { c = the checkpoint of "read", saved =,
--- names = of what it stands on }, saver =, run = as of saves, from = what the Saver went on from, unswept = whether it
--- has removed nothing since its last save, starts = copies so far }.
local does = {}
-- -- what is done -----------------------------------------------------------------------------------------------------

function does.step(s)
  s.i = s.i + 1
  s.history[#s.history + 1] = s.i
  step(s.p, s.i)
  step(s.never, s.i)
end
local function settle(s)
  if s.pending then s.pending:wait() end
  s.pending = nil
end
local function save(s, async, parent)
  settle(s)
  s.n = s.n + 1
  local path = ("%s/save-%06d-step-%d"):format(s.folder, s.n, #s.history) -- names that say their order
  s.tip = { path = path, history = peri.util.copy(s.history), text = state(s.p), model = numbers_of(s.p.model),
    phase = s.phase, start = s.start }
  if s.saver then return saver_law.save(s, s.tip) end
  s.saves[#s.saves + 1] = s.tip
  local handle = peri.checkpoint.save(path, parts(s.p),
    { group = s.world, async = async, increments = true, increment_of = parent and parent.path })
  if async then s.pending = handle end
end
function does.full(s) save(s, false) end
does["full behind"] = function(s) save(s, true) end
function does.increment(s) settle(s) save(s, false, s.tip) end
does["increment behind"] = function(s) settle(s) save(s, true, s.tip) end
function does.reshard(s, x)
  settle(s)
  s.p.model:reshard(x.plan, { folder = s.folder .. "/.." })
end
--- The run is that of a checkpoint now.
local function go_on_from(s, saved, entries, anew)
  local loaded = build(s.case, s.world, entries)
  if s.case.keep then saver_law.open(s, loaded, saved, anew) end
  if not s.case.keep or anew then
    peri.checkpoint.load(saved.path, parts(loaded), { group = s.world, increments = true })
  end
  expect(saved.text, state(loaded), "what was loaded")
  s.p, s.tip = loaded, saved
end
function does.load(s, x)
  settle(s)
  if not s.tip then return end
  saver_law.close(s)
  go_on_from(s, s.tip, x.plan, x.which % 4 == 0)
  for k = #s.tip.history + 1, #s.history do step(s.p, s.history[k]) end
end
--- Train a new model as the run was, from the start on.
local function train_alone(s)
  s.never = build(s.case, s.world, s.plan)
  if s.start then peri.checkpoint.load(s.start.path, parts(s.never), { group = s.world }) end
  for k = s.start and #s.start.history + 1 or 1, #s.history do step(s.never, s.history[k]) end
end
--- A checkpoint that was loaded, and what it stands on, as what `never` begins with: nobody removes it there.
local function start_of(s, saved)
  s.starts = s.starts + 1
  local to = ("%s/start-%d-%d"):format(kept, s.phase, s.starts)
  of_first(s, function() assert(os.execute(("cp -r %s %s"):format(s.folder, to)) == 0) end)
  return { path = to .. "/" .. name_of(saved.path), history = saved.history }
end
local function which(s, x) return s.saves[x.which % math.max(#s.saves, 1) + 1] end
function does.back(s, x)
  settle(s)
  if not which(s, x) then return end
  saver_law.close(s)
  local saved = which(s, x)
  go_on_from(s, saved, x.plan, x.which % 4 == 0)
  s.history, s.start = peri.util.copy(saved.history), saved.start
  if saved.phase ~= s.phase then s.start = start_of(s, saved) end
  train_alone(s)
end
local function loads(s, saved, entries)
  local loaded = build(s.case, s.world, entries)
  peri.checkpoint.load(saved.path, parts(loaded), { group = s.world })
  expect(saved.text, state(loaded), saved.path)
end
function does.compact(s, x)
  settle(s)
  local saved = which(s, x)
  if not saved then return end
  of_first(s, function()
    local c = peri.checkpoint.open(saved.path)
    if c:parent() then
      c:compact(saved.path, true)
      for _, reader in pairs(s.open) do reader.names[name_of(saved.path)] = nil end -- it reads the old one
    end
    c:close()
  end)
  for _, other in ipairs(s.saves) do loads(s, other, s.plan) end
end
function does.remove(s, x)
  settle(s)
  local saved = which(s, x)
  if not saved or saved == s.tip or saved == s.saves[#s.saves] then return end
  local gone = of_first(s, function()
    local name, wanted = name_of(saved.path), false
    for _, other in ipairs(s.saves) do wanted = wanted or other ~= saved and stands_on(other)[name] or false end
    local is_read = false
    for _, reader in pairs(s.open) do is_read = is_read or reader.names[name] or false end
    local ok, err = pcall(peri.checkpoint.remove, saved.path)
    if not (ok or wanted or is_read) then error(err, 0) end
    if ok and is_read then error(("%s was removed, and is read"):format(name), 0) end
    return ok -- what is needed may have a double of the same digest; else it is missed below
  end)
  for k = #s.saves, 1, -1 do
    if gone and s.saves[k] == saved then table.remove(s.saves, k) end
  end
  for _, other in ipairs(s.saves) do loads(s, other, s.plan) end
end
--- What was opened before still is what it was; then another one is.
local function read_on(s, saved)
  settle(s)
  of_first(s, function()
    local reader = s.open.reader
    if reader then
      for name, numbers in peri.util.ordered(reader.saved.model) do
        if reader.c:has("model/" .. name) then
          expect(numbers, text { reader.c:read("model/" .. name) }, "what is read of " .. name)
        end
      end
      reader.c:close()
    end
    s.open.reader = saved and { c = peri.checkpoint.open(saved.path), saved = saved, names = stands_on(saved) } or nil
  end)
end
function does.read(s, x)
  settle(s)
  read_on(s, which(s, x))
end
does["model alone"] = function(s, x)
  settle(s)
  local saved = which(s, x)
  if not saved then return end
  local loaded = build(s.case, s.world, x.plan)
  local optimizer = text(loaded.optimizer:state_dict())
  peri.checkpoint.load(saved.path, { model = loaded.model }, { group = s.world, only = { "model/" } })
  for name, numbers in peri.util.ordered(numbers_of(loaded.model)) do expect(saved.model[name], numbers, name) end
  expect(optimizer, text(loaded.optimizer:state_dict()), "the optimizer")
end
does["model renamed"] = function(s, x)
  settle(s)
  local saved = which(s, x)
  if not saved then return end
  local loaded, rename, before = build(s.case, s.world, x.plan, other_names), {}, {}
  for own, other in pairs(other_names) do -- luacheck: ignore 512
    if own ~= "late" or s.case.late then
      rename["model/" .. own .. "."], before[other] = "model/" .. other .. ".", own
    end
  end
  peri.checkpoint.load(saved.path, { model = loaded.model }, { group = s.world, only = { "model/bags", "model/head" },
    rename = rename })
  for name, numbers in peri.util.ordered(numbers_of(loaded.model)) do
    local head, rest = name:match "^([^.]*)(.*)"
    if before[head] then expect(saved.model[before[head] .. rest], numbers, name) end
  end
end
function does.follow(s)
  settle(s)
  local newest = s.saves[#s.saves]
  if not newest then return end
  s.fans = s.fans or build(s.case, s.world, s.plan)
  s.follower = s.follower or peri.checkpoint.follow(s.folder, parts(s.fans), { group = s.world })
  local path, why = s.follower:poll() -- or what was saved beside
  if not path and why then error("the follower: " .. why, 0) end
  if path then s.open.follower = { names = stands_on(newest) } end
  expect(newest.text, state(s.fans), "what was followed")
end

--- A phase of the run, which goes on from what the one before has left (nil: nothing). Returns what it leaves.
local function run_phase(case, number, left, shows)
  local phase, result = case.phases[number], nil
  sim.run(phase.ranks, function(rank, world)
    local s = { case = case, world = world, plan = phase.plan, phase = number, starts = 0, open = {},
      i = left and left.i or 0, n = left and left.n or 0,
      saves = left and peri.util.copy(left.saves) or {}, history = left and peri.util.copy(left.history) or {},
      folder = kept .. "/saves", p = build(case, world, phase.plan) }
    if left then
      go_on_from(s, left.tip, phase.plan)
      s.start = start_of(s, left.tip)
    elseif case.keep then
      saver_law.open(s, s.p)
    end
    train_alone(s)
    for k, x in ipairs(phase.list) do
      if shows and rank == 0 then print(k, x.what) end
      does[x.what](s, x)
      expect(state(s.never), state(s.p), ("number %d (%s)"):format(k, x.what))
    end
    does.full(s)
    read_on(s)
    saver_law.close(s)
    if s.follower then s.follower:close() end
    if rank == 0 then result = s end
  end)
  return result
end

local function run(case, shows)
  os.execute(("rm -rf %s; mkdir -p %s/saves"):format(kept, kept))
  if case.keep then
    os.execute(("cd %s/saves && mkdir save-000002-step-1 && touch %s"):format(kept,
      table.concat(saver_law.strange, " ")))
  end
  local left
  for number = 1, #case.phases do left = run_phase(case, number, left, shows) end
  os.execute("rm -rf " .. kept)
end

local function try(seed, shows)
  local case = draw(seed)
  if shows then print(text_of(case)) end
  local ok, err = xpcall(run, function(e) return type(e) == "table" and e.message or debug.traceback(tostring(e)) end,
    case, shows)
  if ok then return end
  os.execute("rm -rf " .. kept)
  print(("FAILED: %s\n%s\nrepeat with: luajit tests/fuzz/join.lua once %d"):format(err, text_of(case), seed))
  os.exit(1)
end

if arg[1] == "once" then return try(tonumber(arg[2]), true) end
local length, seed = arg[1] or "9", tonumber(arg[2]) or 1
local seconds, most, began, n = tonumber(length:match "^([%d.]+)s$"), tonumber(length), os.time(), 0
repeat
  try(seed * 1000003 % 2 ^ 30 + n)
  n = n + 1
until seconds and os.time() - began >= seconds or n == most
print(("%d runs, seed %d"):format(n, seed))
