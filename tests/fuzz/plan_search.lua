-- plan_search.lua: how good plans are: models drawn at random under tight memory, on 8 to 512 ranks; the planner's plan
-- beside the best that a hill climber finds, which knows nothing of it: it changes the option and the ranks of one
-- table, or of two, at random, keeps what is better and, less and less, what is worse. Plans that break the memory of a
-- rank are an error; plans slower than the climber's by more than is allowed, too.
--
--   luajit tests/fuzz/plan_search.lua [MODELS [SEED]]   as `make test` runs it: climbs of a second
--   luajit tests/fuzz/plan_search.lua SECONDSs [SEED]   as `make fuzz` runs it
--   luajit tests/fuzz/plan_search.lua full MODELS SEED SECONDS   climbs of so many seconds of processor time each; a
--                                                                line for each model
-- inputs: 2
local ffi = require "ffi"
local here, build = io.popen("pwd"):read "*l", os.getenv "PERI_BUILD" or "build"
package.path = ("%s/%s/lua/?.lua;%s/lua/?.lua;%s/lua/?/init.lua;%s"):format(here, build, here, here, package.path)
local peri = require "perilune"
local plan = peri.plan

local ALLOWED = 1.03 -- times the climber's
--- Milliseconds that climbs of a minute, or the planner, found, by seed: models whose plans were slower once.
local KNOWN = { [31] = 1225.153, [50] = 3071.532 }

--- Numbers in (0, 1), by `seed` alone.
local function generator(seed)
  local x = seed * 48271 % 2147483647 + 1
  for _ = 1, 4 do x = x * 16807 % 2147483647 end
  return function()
    x = x * 16807 % 2147483647
    return x / 2147483647
  end
end

local function pick(draw, list) return list[math.floor(draw() * #list) + 1] end

--- A model whose tables take 0.8 to 2.5 times the memory of its machine, and the planner's arguments for it.
local function drawn(seed)
  local draw = generator(seed)
  local ranks, tables, constraints, bytes = pick(draw, { 8, 16, 32, 64, 128, 256, 512 }), {}, {}, 0
  local spread, optimizer = 2 + 3 * draw(), pick(draw, { "rowwise_adagrad", "adam", "sgd", "adagrad" })
  local copies = ({ adam = 3, adagrad = 2 })[optimizer] or 1
  for i = 1, math.floor(20 * 50 ^ draw()) do
    local t = { name = "t" .. i, num_embeddings = 10 ^ (3 + spread * draw()),
      embedding_dim = pick(draw, { 16, 32, 64, 128, 256 }) }
    tables[i], bytes = t, bytes + t.num_embeddings * t.embedding_dim * 4 * copies
    constraints[t.name] = plan.ParameterConstraints { pooling_factors = { math.floor(1 + 30 * draw() ^ 3) } }
  end
  local batch_size, tight = pick(draw, { 128, 512, 1024 }), 0.4 + 0.8 * draw()
  local topology = plan.Topology.preset(pick(draw, { "dgx_a100_80gb", "dgx_h100_80gb", "dgx_v100_32gb" }),
    { world_size = ranks })
  local scale = 0.85 * ranks * topology.devices[1].hbm / tight / bytes
  for _, t in ipairs(tables) do
    t.num_embeddings = math.max(100, math.min(2e9, math.floor(t.num_embeddings * scale)))
  end
  return plan.describe.of { tables = tables, optimizer = optimizer },
    { topology = topology, constraints = constraints, batch_size = batch_size, sharder = plan.perilune_sharder }
end

-- -- the climber ------------------------------------------------------------------------------------------------------

local function shards_of(option)
  local list = {}
  for _, run in ipairs(option.runs) do
    for _ = 1, run.n do list[#list + 1] = run end
  end
  return list
end

local Climber = {}
Climber.__index = Climber

--- tables: lists of options.
local function climber_of(tables, topology, seed)
  local W = topology.world_size
  local self = setmetatable({ tables = tables, W = W, G = topology.intra_group_size, draw = generator(seed),
    option = {}, ranks = {}, shards = {}, time = ffi.new("double[?]", W), used = {}, cap = {} }, Climber)
  for _, tier in ipairs { "hbm", "ddr" } do
    self.used[tier], self.cap[tier] = ffi.new("double[?]", W), ffi.new("double[?]", W)
    for r, device in ipairs(topology.devices) do self.cap[tier][r - 1] = math.max(device[tier], 1) end
  end
  for _, options in ipairs(tables) do
    for _, o in ipairs(options) do self.shards[o] = shards_of(o) end
  end
  return self
end

function Climber:put(t, option, ranks, sign)
  for k, run in ipairs(self.shards[option]) do
    local r = ranks == true and k - 1 or ranks[k]
    self.time[r] = self.time[r] + sign * run.perf.total
    self.used.hbm[r], self.used.ddr[r] = self.used.hbm[r] + sign * run.storage.hbm, self.used.ddr[r]
      + sign * run.storage.ddr
  end
  self.option[t], self.ranks[t] = option, ranks
end

--- What is climbed: the longest rank's time, what all ranks have near it, and memory beyond what there is. And the
--- first alone, and whether all fits.
function Climber:cost()
  local longest, over, sum = 0, 0, 0
  local time, hbm, ddr, cap_hbm, cap_ddr, scale = self.time, self.used.hbm, self.used.ddr, self.cap.hbm, self.cap.ddr,
    self.scale
  for r = 0, self.W - 1 do
    local x = time[r] / scale
    longest = math.max(longest, x)
    x = x * x
    x = x * x
    sum = sum + x * x
    over = over + math.max(0, hbm[r] / cap_hbm[r] - 1) + math.max(0, ddr[r] / cap_ddr[r] - 1)
  end
  return scale * (0.3 * (sum / self.W) ^ 0.125 + 0.7 * longest + 3 * over), scale * longest, over == 0
end

--- Ranks for an option, at random: now and then the least busy of several.
function Climber:places(option)
  local n, draw, W, G = option.num_shards, self.draw, self.W, self.G
  if option.partition_by == "uniform" then return true end
  local ranks, used = {}, {}
  if option.partition_by == "device" then
    if n > W then return nil end
    for k = 1, n do
      local least, at, s = math.huge, nil, self.shards[option][k].storage
      while not at do
        for _ = 1, draw() < 0.5 and 1 or 6 do
          local r = math.floor(draw() * W)
          local full = self.used.hbm[r] + s.hbm > self.cap.hbm[r] or self.used.ddr[r] + s.ddr > self.cap.ddr[r]
          local x = self.time[r] + (full and 1e9 or 0)
          if not used[r] and x < least then least, at = x, r end
        end
      end
      used[at], ranks[k] = true, at
    end
    return ranks
  end
  if option.sharding_type == "table_column_wise" then
    local first, order = math.floor(draw() * (W / G)) * G, {}
    if n > G then return nil end
    for i = 1, G do order[i] = first + i - 1 end
    for k = 1, n do
      local i = k + math.floor(draw() * (G - k + 1))
      order[k], order[i] = order[i], order[k]
      ranks[k] = order[k]
    end
    return ranks
  end
  if n > W then return nil end
  for _ = 1, n / G do
    local first
    repeat first = math.floor(draw() * (W / G)) * G until not used[first]
    used[first] = true
    for k = 0, G - 1 do ranks[#ranks + 1] = first + k end
  end
  return ranks
end

--- A table, of the rank that works longest half of the time.
function Climber:some_table()
  local t = math.floor(self.draw() * #self.tables) + 1
  if self.draw() < 0.5 then return t end
  local longest, at = -1, 0
  for r = 0, self.W - 1 do
    if self.time[r] > longest then longest, at = self.time[r], r end
  end
  for _ = 1, 20 do
    local u = math.floor(self.draw() * #self.tables) + 1
    for _, r in ipairs(self.ranks[u] == true and {} or self.ranks[u]) do
      if r == at then return u end
    end
  end
  return t
end

--- Another option, or other places, for a table. Returns what it had.
function Climber:change(t)
  local option, ranks = self.option[t], self.ranks[t]
  local other = self.draw() < 0.6 and pick(self.draw, self.tables[t]) or option
  self:put(t, option, ranks, -1)
  local same = other ~= option and other.sharding_type == option.sharding_type and other.num_shards == option.num_shards
  local places = same and ranks or self:places(other)
  self:put(t, places and other or option, places or ranks, 1)
  return { t, option, ranks }
end

--- Two tables with a shard each exchange their ranks; nil: they cannot.
function Climber:exchange(t)
  local u = math.floor(self.draw() * #self.tables) + 1
  local a, b = self.ranks[t], self.ranks[u]
  if t == u or a == true or b == true or #a ~= 1 or #b ~= 1 then return nil end
  local x, y = self.option[t], self.option[u]
  self:put(t, x, a, -1)
  self:put(u, y, b, -1)
  self:put(t, x, b, 1)
  self:put(u, y, a, 1)
  return { t, x, a }, { u, y, b }
end

function Climber:undo(...)
  local before = { ... }
  for i = #before, 1, -1 do
    local t, option, ranks = unpack(before[i])
    self:put(t, self.option[t], self.ranks[t], -1)
    self:put(t, option, ranks, 1)
  end
end

--- The best time that is found in so many seconds of this process; math.huge: nothing fits.
function Climber:climb(seconds)
  for t, options in ipairs(self.tables) do -- from what takes least memory
    local least, at = math.huge, nil
    for _, o in ipairs(options) do
      local bytes = o.total_storage.hbm / self.cap.hbm[0] + o.total_storage.ddr / self.cap.ddr[0]
      if bytes < least and (o.partition_by ~= "device" or o.num_shards <= self.W) then least, at = bytes, o end
    end
    self:put(t, at, self:places(at), 1)
  end
  self.scale = 1
  self.scale = math.max(select(2, self:cost()), 1e-9)
  local now = self:cost()
  local best, from, steps, left = math.huge, os.clock(), 0, 1
  while left > 0 do
    steps = steps + 1
    if steps % 256 == 0 then left = 1 - (os.clock() - from) / seconds end
    if steps % 20000 == 0 then
      self.scale = math.max(math.min(self.scale, (select(2, self:cost()))), 1e-9)
      now = self:cost()
    end
    local t = self:some_table()
    local a, b
    if self.draw() < 0.2 then a, b = self:exchange(t) else
      a = self:change(t)
      if self.draw() < 0.3 then b = self:change(self:some_table()) end
    end
    if a then
      local cost, longest, fits = self:cost()
      if cost < now or self.draw() < math.exp((now - cost) / (0.03 * self.scale * left * left + 1e-9)) then
        now = cost
        if fits and longest < best then best = longest end
      elseif b then self:undo(a, b)
      else self:undo(a) end
    end
  end
  return best
end

-- -- one model --------------------------------------------------------------------------------------------------------

--- An error unless every rank has the memory that a plan takes there.
local function check_memory(search)
  local best, partitioners = search.best, require "perilune.plan.partitioners"
  for _, tier in ipairs { "hbm", "ddr", "ssd" } do
    local used = partitioners.by_rank(best.proposal, best.placement, search.topology.world_size, function(run)
      return run.storage[tier]
    end)
    for r, bytes in ipairs(used) do
      local has = search.topology.devices[r][tier]
      if bytes > has then error(("rank %d takes %.17g bytes (%s) and has %.17g"):format(r - 1, bytes, tier, has)) end
    end
  end
end

--- { ranks, tables, ours (ms; nil: no plan), climbed, seconds = of the planner }
local function compare(seed, seconds)
  local model, args = drawn(seed)
  local planner, from = plan.EmbeddingShardingPlanner(args), os.clock()
  local search = planner:search(model)
  local took, tables, at = os.clock() - from, {}, {}
  if search.best then check_memory(search) end
  for _, option in ipairs(search.space) do
    if not at[option.fqn] then
      tables[#tables + 1] = {}
      at[option.fqn] = tables[#tables]
    end
    table.insert(at[option.fqn], option)
  end
  local climbed = KNOWN[seed] or climber_of(tables, search.topology, seed):climb(seconds)
  return { ranks = args.topology.world_size, tables = #tables, ours = search.best and search.best.rating,
    climbed = climbed, seconds = took }
end

local function line_of(seed, x)
  return ("seed %d: %d ranks, %d tables: planned %s ms in %.2f s, climbed %s ms (%s)"):format(seed, x.ranks, x.tables,
    x.ours and ("%.4g"):format(x.ours) or "no", x.seconds, x.climbed < math.huge and ("%.4g"):format(x.climbed) or "no",
    x.ours and x.climbed < math.huge and ("%.3f"):format(x.ours / x.climbed) or "-")
end

local function fails(x) return x.climbed < math.huge and not (x.ours and x.ours <= ALLOWED * x.climbed) end

if arg[1] == "full" then
  local models, seed, seconds, ratios = tonumber(arg[2] or 200), tonumber(arg[3] or 1), tonumber(arg[4] or 600), {}
  for s = seed, seed + models - 1 do
    local x = compare(s, seconds)
    print(line_of(s, x))
    io.stdout:flush()
    ratios[#ratios + 1] = x.climbed < math.huge and (x.ours and x.ours / x.climbed or math.huge) or nil
  end
  table.sort(ratios)
  local within = 0
  for _, ratio in ipairs(ratios) do within = within + (ratio <= ALLOWED and 1 or 0) end
  print(("%d models, %d with a plan of the climber; ours over its: least %.3f, median %.3f, largest %.3f; %d within "
    .. "%g"):format(models, #ratios, ratios[1] or 0, ratios[math.ceil(#ratios / 2)] or 0, ratios[#ratios] or 0, within,
    ALLOWED))
  return
end

local seconds = (arg[1] or ""):match "^([%d.]+)s$"
local models, seed, from = tonumber(arg[1] or 6) or math.huge, tonumber(arg[2] or 1), os.time()
local function check(s)
  local x = compare(s, 1)
  if not fails(x) then return end
  print(line_of(s, x))
  print(("again: luajit tests/fuzz/plan_search.lua full 1 %d 1"):format(s))
  os.exit(1)
end

for known in peri.util.ordered(seconds and {} or KNOWN) do check(known) end
local s = seed
while seconds and os.time() - from < tonumber(seconds) or not seconds and s < seed + models do
  check(s)
  s = s + 1
end
