-- What saving, loading, following, resharding, compacting, exporting and comparing need beside the model: at most 64
-- MiB, whatever its size and its plan.
-- deadline: 180 s
local shell = require "spec.support.shell"

if shell.no_launcher() then return end

local folder, clean = shell.temporary()
teardown(function() clean() end)

--- A table of 100 MiB. Prints for each case the MiB that the process had more in the middle of it than before.
local script = shell.write(folder .. "/script.lua", [[
local peri = require "perilune"
local path = arg[1]
local function model(entry, group, mib)
  local ebc = peri.EmbeddingBagCollection { fused_params = { optimizer = "rowwise_adagrad" }, tables = {
    peri.EmbeddingBagConfig { name = "t", num_embeddings = (mib or 100) * 2 ^ 20 / 256, embedding_dim = 64, feature_names = { "f" } } } }
  return peri.DistributedModelParallel { module = ebc, group = group, plan = { [""] = { t = entry } } }
end
local function status(name)
  for line in io.lines "/proc/self/status" do
    local kb = line:match("^" .. name .. ":%s*(%d+) kB")
    if kb then return tonumber(kb) / 1024 end
  end
end
local function measure(case, f)
  collectgarbage() collectgarbage()
  local reset = assert(io.open("/proc/self/clear_refs", "w"))
  reset:write "5"
  reset:close()
  local before = status "VmRSS"
  f()
  print(case, math.ceil(status "VmHWM" - before))
end
peri.init()
local m = model(peri.plan.row_wise())
measure("save", function() m:save(path) end)
measure("load", function() m:load(path) end)
measure("async", function()
  local save = m:save(path, { replace = true, async = true })
  local kjt = peri.KeyedJaggedTensor { keys = { "f" }, values = { 1, 300000, 400000 }, lengths = { 1, 2 } }
  peri.scope(function() m(kjt):wait():values():sum():backward() end)
  save:wait()
end)
local function step()
  local ids = {}
  for i = 1, 100000 do ids[i] = i * 7919 % 409600 end
  local kjt = peri.KeyedJaggedTensor { keys = { "f" }, values = peri.tensor(ids, "i64"), lengths = { #ids } }
  peri.scope(function() m(kjt):wait():values():sum():backward() end)
end
local runs = path .. "-runs"
m:save(runs .. "/0", { increments = true })
step()
local follower = peri.checkpoint.follow(runs, { model = m })
measure("follow a full one", function() assert(follower:poll()) end)
m:save(runs .. "/0", { increments = true, replace = true })
follower = peri.checkpoint.follow(runs, { model = m })
follower:poll()
step()
measure("increment", function() m:save(runs .. "/1", { increment_of = runs .. "/0" }) end)
step()
measure("async increment", function() m:save(runs .. "/2", { increment_of = runs .. "/1", async = true }):wait() end)
measure("follow increments", function() assert(follower:poll()) end)
follower:close()
measure("compact", function() peri.checkpoint.open(runs .. "/2"):compact(path .. "-full") end)
local actions, name = require("perilune.launch.checkpoints").run, "model/embedding_bags.t.weight"
measure("export", function() actions { action = "export", paths = { runs .. "/2", name }, output = path .. ".npy" } end)
measure("diff", function() actions { action = "diff", paths = { path, runs .. "/2" } } end)
measure("reshard", function() m:reshard { [""] = { t = peri.plan.column_wise { ranks = { 0, 0 } } } } end)
measure("load by columns", function() m:load(path) end)
require("perilune.dist.sim").run(2, function(_, world) -- shards of another size than before: their memory is another's
  local whole = model(peri.plan.table_wise(0), world, 80)
  local function reshard() whole:reshard { [""] = { t = peri.plan.row_wise() } } end
  if world:rank() == 0 then measure("reshard to other sizes", reshard) else reshard() end
end)
local function from_disk(width, rows) -- MiB that the disk gives where each reader wants 'width' columns of the rows
  local function bytes() return tonumber(io.open("/proc/self/io"):read("*a"):match "\nread_bytes: (%d+)") end
  local c, before = peri.checkpoint.open(path), bytes()
  for column = 0, 63, width do c:read(name, { offset = { 0, column }, size = { rows, width } }):release() end
  c:close()
  print("the disk for columns", math.ceil((bytes() - before) / 2 ^ 20))
end
from_disk(16, 2 ^ 17) -- 32 MiB of the file
m, follower = nil, nil
local function learn(mc, rows, times) -- so many new ids as the map has rows
  peri.scope(function()
    local ids = peri.arange(times * rows, (times + 1) * rows, 1, "i64")
    mc(peri.KeyedJaggedTensor { keys = { "f" }, values = ids, lengths = { rows } }):values():sum():backward()
  end)
end
local function raw(rows, module) -- a table of raw ids, all of whose rows are in memory
  local table_of = peri.EmbeddingBagConfig { name = "t", num_embeddings = rows, embedding_dim = 1, feature_names = { "f" } }
  local mc = peri.ManagedCollisionEmbeddingBagCollection {
    embedding_bag_collection = peri.EmbeddingBagCollection { tables = { table_of }, seed = 4, fused_params = { optimizer = "sgd" } },
    managed_collision_collection = peri.ManagedCollisionCollection { embedding_configs = { table_of },
      managed_collision_modules = { t = module } } }
  learn(mc, rows, 0)
  return mc
end
local function mch(rows)
  return peri.MCHManagedCollisionModule { zch_size = rows, buckets = 2, device = "cpu", eviction_interval = 1,
    eviction_policy = peri.embed.DistanceLFU_EvictionPolicy { decay_exponent = 1 } }
end
local ROWS = 1000000 -- of maps of raw ids: whatever is kept of each for a moment is a MiB a byte
for kind, module in peri.util.ordered { mch = mch(ROWS),
  hash = peri.HashZchManagedCollisionModule { zch_size = ROWS, total_num_buckets = 2, max_probe = 64,
    eviction_policy_name = "SINGLE_TTL_EVICTION", eviction_config = { features = { "f" }, single_ttl = 3 } } } do
  local mc = raw(ROWS, module)
  local runs = path .. kind .. "-runs/"
  peri.checkpoint.save(runs .. 0, { mc = mc }, { increments = true })
  for i, how in ipairs { "increment", "async increment" } do
    learn(mc, ROWS, i)
    measure(how .. " of a map of kind " .. kind, function()
      local save = peri.checkpoint.save(runs .. i, { mc = mc }, { increment_of = runs .. i - 1, async = i == 2 })
      if i == 2 then save:wait() end
    end)
  end
  measure("save a map of kind " .. kind, function() peri.checkpoint.save(path .. kind, { mc = mc }) end)
  measure("load a map of kind " .. kind, function() peri.checkpoint.load(path .. kind, { mc = mc }) end)
  local numbers = "mc/_managed_collision_collection._managed_collision_modules.t." .. (kind == "mch" and "_mch_counts" or "_hash_zch_metadata")
  measure("load some states of kind " .. kind, function() peri.checkpoint.load(path .. kind, { mc = mc }, { except = { numbers } }) end)
  if kind == "mch" then
    local dict = {}
    for name, t in peri.util.ordered(mc:state_dict()) do dict[name] = peri.Tensor.is(t) and t or t:gather() end
    peri.checkpoint.save(path .. "ids", { mc = { state_dict = function() return dict end, load_state_dict = function() end } })
    dict = nil -- luacheck: ignore
    measure("load a map in the order of ids", function() peri.checkpoint.load(path .. "ids", { mc = mc }, { only = { "mc" } }) end)
    mc = raw(ROWS / 2, mch(ROWS / 2))
    local Gather = require "perilune.checkpoint.gather"
    Gather.ROWS = 16384 -- as if the buckets had 16 times as many rows
    measure("load a map into another size by windows", function() peri.checkpoint.load(path .. kind, { mc = mc }) end)
    Gather.ROWS = 262144
    measure("load a map into another size", function() peri.checkpoint.load(path .. kind, { mc = mc }) end)
  end
end
local layer = peri.nn.Linear { in_features = 1024, out_features = 8192 } -- with its optimizer 96 MiB
local adam = peri.nn.optim.Adam { params = layer:named_parameters() }
measure("async of a dense optimizer", function()
  peri.checkpoint.save(path .. "-dense", { layer = layer, adam = adam }, { async = true }):wait()
end)
]])

it("beside a model saves, loads, increments, followers, other plans, full checkpoints of chains and exports need at "
  .. "most 64 MiB", function()
  local probe = io.open("/proc/self/clear_refs", "w")
  if not probe then return pending "this system does not measure the peak of a process's memory" end
  probe:close()
  local out = shell.run(("%s run -n 1 -t 1 %s %s/model"):format(shell.perilune, script, folder), nil, 170)
  local cases, of = 0, {}
  if os.getenv "PERI_SHOW" then print(out) end
  for case, mib in out:gmatch "([%a ]+)\t(-?%d+)\n" do
    cases, of[case] = cases + 1, tonumber(mib)
    assert.is_true(tonumber(mib) <= 64, ("%s: %s MiB"):format(case, mib))
  end
  assert.equal(28, cases, out)
  -- A bucket of 250,000 rows is 12 MiB; where windows are small it is never there as a whole.
  local whole, windows = of["load a map into another size"], of["load a map into another size by windows"]
  assert.is_true(windows <= whole - 6, ("%d MiB by windows, %d by buckets"):format(windows, whole))
end)
