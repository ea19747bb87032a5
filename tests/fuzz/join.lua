-- join.lua: everything that keeps a model, in one run: at random, steps, full saves and increments (at once, or behind
-- the next steps), `model:reshard`, loads into new models, and a follower; over tables in memory and in files, and maps
-- of raw ids of both kinds. The law: after each of them the state is that of the run that only trained, bit for bit;
-- and what is loaded or followed is that of the step that was saved.
--
--   luajit tests/fuzz/join.lua [RUNS [SEED]]       as `make test` runs it; a failure prints the run and how to repeat
--                                                  it
--   luajit tests/fuzz/join.lua SECONDSs [SEED]     as `make fuzz` runs it
--   luajit tests/fuzz/join.lua once SEED           one run of it, which prints each thing before it is done
-- inputs: 25
-- takes: 10 s
local here, build_folder = io.popen("pwd"):read "*l", os.getenv "PERI_BUILD" or "build"
package.path = ("%s/%s/lua/?.lua;%s/lua/?.lua;%s/lua/?/init.lua;%s/?.lua;%s"):format(here, build_folder, here, here,
  here, package.path)
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local text = require "spec.support.facts"
local drawing = require "spec.support.drawing"
local nn, plan, embed = peri.nn, peri.plan, peri.embed
local generator, pick = drawing.generator, drawing.pick

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

local function plan_of(below, case)
  local p = { ebc = { a = entry_of(below, case.ranks, case.files, not case.by_row),
    b = entry_of(below, case.ranks, case.files, not case.by_row) } }
  if case.map then p.mc = { raw = entry_of(below, case.ranks, false, false) } end
  return p
end

local things = { "step", "step", "full", "full behind", "increment", "increment", "increment behind", "reshard", "load",
  "follow" }

local function draw(seed)
  local below = generator(seed)
  local case = { ranks = below(3) + 1, optimizer = pick(below, { "rowwise_adagrad", "adam", "sgd" }),
    files = below(2) == 0, map = pick(below, { "lfu", "lru", "ttl", "ttl", false }), list = {} }
  case.by_row = case.optimizer == "rowwise_adagrad" -- a number for each row: columns that are cut anew take the mean
  case.plan = plan_of(below, case)
  for i = 1, 6 + below(8) do
    local what = pick(below, things)
    case.list[i] = { what = what, plan = (what == "reshard" or what == "load") and plan_of(below, case) or nil }
  end
  return case
end

local function text_of(case)
  local function words(p)
    return ("a %s, b %s%s"):format(tostring(p.ebc.a), tostring(p.ebc.b), p.mc and ", raw " .. tostring(p.mc.raw) or "")
  end
  local lines = { ("%d ranks, %s, map %s, %s"):format(case.ranks, case.optimizer, tostring(case.map),
    words(case.plan)) }
  for _, x in ipairs(case.list) do lines[#lines + 1] = "  " .. x.what .. (x.plan and ": " .. words(x.plan) or "") end
  return table.concat(lines, "\n")
end

-- -- the program ------------------------------------------------------------------------------------------------------

local Net = nn.Module:extend "Net"
function Net:init(case)
  local function config(name, rows, dim)
    return peri.EmbeddingBagConfig { name = name, num_embeddings = rows, embedding_dim = dim,
      feature_names = { "f" .. name } }
  end
  local function params() return { optimizer = case.optimizer, learning_rate = 0.1, exact = true } end
  self.ebc = peri.EmbeddingBagCollection { seed = 5, fused_params = params(),
    tables = { config("a", 50, 8), config("b", 37, 16) } }
  if case.map then
    local tables = { config("raw", 30, 8) }
    self.mc = peri.ManagedCollisionEmbeddingBagCollection {
      embedding_bag_collection = peri.EmbeddingBagCollection { seed = 6, tables = tables, fused_params = params() },
      managed_collision_collection = peri.ManagedCollisionCollection { embedding_configs = tables,
        managed_collision_modules = { raw = maps[case.map]() } } }
  end
  self.over = nn.Linear { in_features = case.map and 32 or 24, out_features = 1 }
end
function Net:forward(kjt, raw)
  local rows = self.ebc(kjt):values()
  if self.mc then rows = nn.functional.cat({ rows, self.mc(raw):values() }, 2) end
  return self.over(rows):mean()
end

local function build(case, world, entries)
  nn.manual_seed(3)
  local model = peri.DistributedModelParallel { module = Net(case), group = world, plan = entries }
  return { model = model, optimizer = nn.optim.Adam { params = model:named_parameters(), lr = 0.05 } }
end

local function step(p, i)
  peri.scope(function()
    p.optimizer:zero_grad()
    p.model(peri.KeyedJaggedTensor { keys = { "fa", "fb" }, lengths = { 1, 1, 2, 0 },
      values = { i * 7 % 50, i * 3 % 50, i * 5 % 37, i % 37 } }, peri.KeyedJaggedTensor { keys = { "fraw" },
      values = { i * 37 % 997, i * 13 % 97, i % 5 }, lengths = { 2, 1 } }):backward()
    p.optimizer:step()
  end)
end

local function state(p)
  return text(peri.shard.gather_state_dict { model = p.model:state_dict(),
    tables = p.model:fused_optimizer():state_dict(), optimizer = p.optimizer:state_dict() })
end

-- -- one run ----------------------------------------------------------------------------------------------------------

local function expect(want, got, what)
  if want == got then return end
  local from = 1
  while want:byte(from) == got:byte(from) do from = from + 1 end
  local function part(x) return x:sub(math.max(1, from - 60), from + 80) end
  error(("%s: wanted ...%s, got ...%s"):format(what, part(want), part(got)), 0)
end

--- s: { case =, world =, p = the run, never = the one that only trains, i = its step, texts = by path what was saved,
--- steps = by path, newest = path, tip = path that the run knows its changes since, pending = a save behind the steps,
--- n = saves so far, folder = }.
local does = {}
function does.step(s)
  s.i = s.i + 1
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
  local path = ("%s/save-%06d-step-%d"):format(s.folder, s.n, s.i) -- names that say their order
  s.texts[path], s.steps[path] = state(s.p), s.i
  local handle = peri.checkpoint.save(path, { model = s.p.model, optimizer = s.p.optimizer },
    { group = s.world, async = async, increments = true, increment_of = parent })
  if async then s.pending = handle end
  s.newest, s.tip = path, path
end
function does.full(s) save(s, false) end
does["full behind"] = function(s) save(s, true) end
function does.increment(s) settle(s) save(s, false, s.tip) end
does["increment behind"] = function(s) settle(s) save(s, true, s.tip) end
function does.reshard(s, x)
  settle(s)
  s.p.model:reshard(x.plan, { folder = s.folder .. "/.." })
end
function does.load(s, x)
  settle(s)
  if not s.newest then return end
  local loaded = build(s.case, s.world, x.plan)
  peri.checkpoint.load(s.newest, { model = loaded.model, optimizer = loaded.optimizer },
    { group = s.world, increments = true })
  expect(s.texts[s.newest], state(loaded), "what was loaded")
  for i = s.steps[s.newest] + 1, s.i do step(loaded, i) end
  s.p, s.tip = loaded, s.newest
end
function does.follow(s)
  settle(s)
  if not s.newest then return end
  s.fans = s.fans or build(s.case, s.world, s.case.plan)
  s.follower = s.follower or peri.checkpoint.follow(s.folder, { model = s.fans.model, optimizer = s.fans.optimizer },
    { group = s.world })
  local path, why = s.follower:poll()
  if why then error("the follower: " .. why, 0) end
  expect(s.texts[path or s.newest], state(s.fans), "what was followed")
end

local function run(case, shows)
  os.execute(("rm -rf %s; mkdir -p %s/saves"):format(kept, kept))
  sim.run(case.ranks, function(rank, world)
    local s = { case = case, world = world, i = 0, n = 0, texts = {}, steps = {}, folder = kept .. "/saves",
      p = build(case, world, case.plan), never = build(case, world, case.plan) }
    for k, x in ipairs(case.list) do
      if shows and rank == 0 then print(k, x.what) end
      does[x.what](s, x)
      expect(state(s.never), state(s.p), ("number %d (%s)"):format(k, x.what))
    end
    settle(s)
    if s.follower then s.follower:close() end
  end)
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
local length, seed = arg[1] or "25", tonumber(arg[2]) or 1
local seconds, most, began, n = tonumber(length:match "^([%d.]+)s$"), tonumber(length), os.time(), 0
repeat
  try(seed * 1000003 % 2 ^ 30 + n)
  n = n + 1
until seconds and os.time() - began >= seconds or n == most
print(("%d runs, seed %d"):format(n, seed))
