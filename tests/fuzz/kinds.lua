-- kinds.lua: every public function, constructor and method called with values of wrong kinds, one at a time: nil,
-- numbers (huge, negative, fractions, NaN), strings, tables, functions, C values, handles of other kinds and released
-- ones, classes for objects. What comes is a result or an error in Perilune's words; never a crash, a hang, or an error
-- with a line of lua/perilune. A method that is called on something else than its object is looked at as the launcher
-- shows it (errors.locate): Lua itself complains there before any check. Left out are addresses that nothing is at: no
-- check can tell them from others.
--
--   luajit tests/fuzz/kinds.lua [CHILDREN [SEED]]    as `make test` runs it: each child calls its part of all
--                                                    functions, each function with every sixth value, from the
--                                                    one that SEED says on (with SECONDSs, as `make fuzz` runs it,
--                                                    with all)
--   luajit tests/fuzz/kinds.lua once K N [NAME]      part K (from 0) of N; or what has NAME in its name: all values.
--                                                    from0, ..., from5: every sixth one
--
-- Functions are found by walking `require "perilune"`. `valid` has arguments with which constructors and functions
-- work, in which one after the other is replaced.
-- inputs: 4             children
-- deadline: 300 s
-- takes: 10 s
local HANG = 100 -- seconds of one child

local api = require "spec.support.api"

local EVERY = 6
local from = (arg[1] or ""):match "^from(%d)$"

if arg[1] ~= "once" and not from then
  local n, folder, command = tonumber((arg[1] or "4"):match "^%d+"), api.children "tests/fuzz/kinds.lua"
  local how = ("from%d"):format((tonumber(arg[2]) or 0) % EVERY)
  if (arg[1] or ""):find "s$" then n, how = 6, "once" end -- of so many seconds: all parts, once
  for k = 0, n - 1 do
    local last = api.lines_of(command(("%s %d %d"):format(how, k, n)))
    if last[#last] ~= "ended with 0" then
      for i = 1, #last do -- what it found, and where it was in the end
        if i > #last - 20 or last[i]:find "^RAW: " or (last[i - 1] or ""):find "^RAW: " then print(last[i]) end
      end
      print(("FAILED: repeat with: luajit tests/fuzz/kinds.lua %s %d %d   (142: it hung for %d s)"):format(how, k, n,
        HANG))
      os.execute("rm -rf " .. folder)
      os.exit(1)
    end
  end
  os.execute("rm -rf " .. folder)
  print(("%d parts of all functions"):format(n))
  return
end

local ffi = require "ffi"
ffi.cdef "unsigned alarm(unsigned seconds); int setrlimit(int resource, const unsigned long *limits);"
ffi.C.alarm(HANG)
-- Modules of 1e9 rows are to be refused, not made: 16 GB of zeros take longer than all the rest. (Sanitizers reserve
-- more than any limit.)
local RLIMIT_AS, MOST_MEMORY = 9, 3 * 2 ^ 30
if (os.getenv "PERI_SAN" or "") == "" then
  ffi.C.setrlimit(RLIMIT_AS, ffi.new("unsigned long[2]", MOST_MEMORY, MOST_MEMORY))
end
io.stdout:setvbuf "line"

local util = require "perilune.util"
local heard, specs = nil, {} -- the function that checked named arguments last, and what each takes
local named = util.named
util.named = function(func, args, spec)
  if type(func) == "string" then heard, specs[func] = func, spec end
  return named(func, args, spec)
end
local peri = require "perilune"
local signature = require "perilune.signature"
local locate = require("perilune.errors").locate
local world = peri.init()
local nn, plan, embed, data, optim = peri.nn, peri.plan, peri.embed, peri.data, peri.nn.optim

-- -- what works -------------------------------------------------------------------------------------------------------

local function parameters() return { peri.ones({ 2, 3 }):requires_grad() } end
local function config()
  return peri.EmbeddingBagConfig { name = "t", num_embeddings = 10, embedding_dim = 4, feature_names = { "f" } }
end
local function row_config()
  return peri.EmbeddingConfig { name = "t", num_embeddings = 10, embedding_dim = 4, feature_names = { "f" } }
end
local function fused() return { optimizer = "sgd", learning_rate = 1 } end
local function kjt() return peri.KeyedJaggedTensor { keys = { "f" }, values = { 1, 2 }, lengths = { 1, 1 } } end
local function ebc() return peri.EmbeddingBagCollection { tables = { config() }, fused_params = fused() } end
local function ec() return peri.EmbeddingCollection { tables = { row_config() }, fused_params = fused() } end
local function sgd() return optim.SGD { params = parameters() } end
local function topology() return plan.Topology { world_size = 2 } end
local function sharded()
  return peri.shard.ShardedEmbeddingBagCollection { tables = { config() }, group = world, fused_params = fused(),
    plan = { t = plan.table_wise(0) } }
end
local function model()
  local m = nn.Module()
  m.ebc = ebc()
  return m
end
local function dmp()
  return peri.DistributedModelParallel { module = model(), plan = { ebc = { t = plan.table_wise(0) } } }
end
local function planner() return plan.EmbeddingShardingPlanner { topology = topology(), max_placements = 1000 } end
local function linear() return nn.Linear { in_features = 3, out_features = 2 } end

--- Name -> function() -> arguments that work. Names are of the walk.
local valid = {
  ["nn.Linear"] = function() return { in_features = 3, out_features = 2 } end,
  ["nn.MLP"] = function() return { in_size = 3, layer_sizes = { 2 }, activation = "relu" } end,
  ["nn.Perceptron"] = function() return { in_size = 3, out_size = 2, activation = "relu" } end,
  ["nn.LayerNorm"] = function() return { normalized_shape = 3 } end,
  ["nn.BatchNorm1d"] = function() return { num_features = 3 } end,
  ["nn.SwishLayerNorm"] = function() return { input_dims = { 3 } } end,
  ["nn.Dropout"] = function() return { p = 0.5 } end, ["nn.Softmax"] = function() return { dim = 1 } end,
  ["nn.Embedding"] = function() return { num_embeddings = 4, embedding_dim = 4 } end,
  ["nn.EmbeddingBag"] = function() return { num_embeddings = 4, embedding_dim = 4 } end,
  ["nn.Sequential"] = function() return { linear() } end, ["nn.ModuleList"] = function() return { linear() } end,
  ["nn.CrossNet"] = function() return { in_features = 3, num_layers = 2 } end,
  ["nn.LowRankCrossNet"] = function() return { in_features = 3, num_layers = 2, low_rank = 1 } end,
  ["nn.VectorCrossNet"] = function() return { in_features = 3, num_layers = 2 } end, ["nn.LowRankMixtureCrossNet"] =
  function() return { in_features = 3, num_layers = 2, num_experts = 2, low_rank = 1 } end,
  ["nn.DeepFM"] = function() return { dense_module = linear() } end, ["nn.DLRM"] = function()
    return { embedding_bag_collection = ebc(), dense_in_features = 3, dense_arch_layer_sizes = { 4 },
      over_arch_layer_sizes = { 4, 1 } }
  end,
  ["nn.BCEWithLogitsLoss"] = function() return { reduction = "mean" } end,
  ["nn.optim.SGD"] = function() return { params = parameters() } end,
  ["nn.optim.Adam"] = function() return { params = parameters() } end,
  ["nn.optim.StepLR"] = function() return { optimizer = sgd(), step_size = 1 } end,
  ["nn.optim.LambdaLR"] = function() return { optimizer = sgd(), lr_lambda = function() return 1 end } end,
  ["nn.optim.MultiStepLR"] = function() return { optimizer = sgd(), milestones = { 1 } } end,
  ["nn.optim.OneCycleLR"] = function()
    return { optimizer = sgd(), max_lr = 1, total_steps = 9, cycle_momentum = false }
  end, ["nn.optim.CyclicLR"] = function() return { optimizer = sgd(), base_lr = 0.1, max_lr = 1,
    cycle_momentum = false } end,
  ["nn.optim.WarmupOptimizer"] = function()
    return { optimizer = sgd(), stages = { { policy = "linear", max_iters = 4 } } }
  end, ["nn.optim.GradientClippingOptimizer"] = function() return { optimizer = sgd(), clipping = "norm" } end,
  ["nn.optim.CombinedOptimizer"] = function() return { sgd() } end,
  ["nn.metrics.NEMetric"] = function() return {} end, ["nn.metrics.AUCMetric"] = function() return {} end,
  ["nn.metrics.NDCGMetric"] = function() return {} end, ["nn.metrics.RAUCMetric"] = function() return {} end,
  ["nn.metrics.MulticlassRecallMetric"] = function() return { number_of_classes = 3 } end,
  EmbeddingBagConfig = function()
    return { name = "t", num_embeddings = 10, embedding_dim = 4, feature_names = { "f" } }
  end, EmbeddingConfig = function() return { name = "t", num_embeddings = 10, embedding_dim = 4,
    feature_names = { "f" } } end,
  EmbeddingBagCollection = function() return { tables = { config() }, fused_params = fused() } end,
  EmbeddingCollection = function() return { tables = { row_config() }, fused_params = fused() } end,
  KeyedJaggedTensor = function() return { keys = { "f" }, values = { 1, 2 }, lengths = { 1, 1 } } end,
  JaggedTensor = function() return { values = { 1, 2 }, lengths = { 1, 1 } } end,
  KeyedTensor = function() return { keys = { "a" }, length_per_key = { 2 }, values = peri.ones { 3, 2 } } end,
  DistributedModelParallel = function() return { module = model(), plan = { ebc = { t = plan.table_wise(0) } } } end,
  TrainPipelineBase = function() return { model = linear(), optimizer = false } end,
  TrainPipelineSparseDist = function() return { model = dmp(), optimizer = false } end,
  ["pipeline.Pipeline"] = function()
    return { model = linear(), optimizer = false, schedule = peri.pipeline.schedules.base }
  end, ["pipeline.Schedule"] = function() return { name = "x", depth = 1, { "load" }, { "forward" } } end,
  ["plan.Topology"] = function() return { world_size = 2 } end,
  ["plan.ParameterConstraints"] = function() return { sharding_types = { "row_wise" } } end,
  ParameterSharding = function() return { sharding_type = "table_wise", ranks = { 0 } } end,
  ["plan.EmbeddingShardingPlanner"] = function() return { topology = topology(), max_placements = 1000 } end,
  ["plan.ShardingEnv"] = function() return { world_size = 2 } end,
  ["plan.ShardingPlan"] = function() return { ebc = { t = plan.row_wise() } } end,
  ["plan.EmbeddingEnumerator"] = function() return { topology = topology() } end,
  ["shard.ShardedEmbeddingBagCollection"] = function()
    return { tables = { config() }, group = world, fused_params = fused(), plan = { t = plan.table_wise(0) } }
  end,
  ["embed.CacheParams"] = function() return {} end,
  ["embed.HashZchEvictionConfig"] = function() return { features = { "f" }, single_ttl = 1 } end,
  ["dist.QuantizedCommCodec"] = function() return { comm_precision = "INT8" } end,
  ["data.synthetic.loader"] = function() return { batch_size = 2, num_rows = 4 } end,
  ["data.synthetic"] = function() return { batch_size = 2, num_rows = 4 } end,
  ["sparse.quantize.format"] = function() return { codes = "int8" } end,
}

--- Objects whose methods are called.
local objects = { kjt, ebc, ec, sharded, sgd, linear, dmp, planner, topology, config,
  function() return optim.Adam { params = parameters() } end,
  function() return optim.StepLR { optimizer = sgd(), step_size = 1 } end,
  function() return optim.WarmupOptimizer { optimizer = sgd(), stages = {} } end,
  function() return optim.CombinedOptimizer { sgd() } end, function() return dmp():fused_optimizer() end,
  function() return plan.row_wise() end, function() return plan.ShardingPlan { ebc = { t = plan.row_wise() } } end,
  function() return planner():plan(model()) end,
  function() return plan.ShardingEnv { world_size = 2 } end,
  function() return peri.pipeline.Schedule { name = "x", depth = 1, { "load" }, { "forward" } } end,
  function() return peri.TrainPipelineBase { model = linear(), optimizer = false } end,
  function() return peri.TrainPipelineSparseDist { model = dmp(), optimizer = false } end,
  function() return nn.metrics.NEMetric {} end, function() return nn.metrics.AUCMetric {} end,
  function() return nn.MLP { in_size = 3, layer_sizes = { 2 } } end,
  function() return nn.BatchNorm1d { num_features = 3 } end, function() return nn.Sequential { linear() } end,
  function() return nn.EmbeddingBag { num_embeddings = 4, embedding_dim = 4 } end,
  function() return peri.dist.QuantizedCommCodec { comm_precision = "INT8" } end,
  function() return data.synthetic { batch_size = 2, num_rows = 4 } end, function() return embed.CacheParams {} end,
  function() return peri.JaggedTensor { values = { 1, 2, 3 }, lengths = { 1, 2 } } end,
  function() return peri.KeyedTensor { keys = { "a" }, length_per_key = { 2 }, values = peri.ones { 3, 2 } } end,
  function() return peri.LazyNoWait(peri.ones { 2 }) end, function() return peri.NoWait(peri.ones { 2 }) end,
  function() return world:new_group { 0 } end, function() return world:all_reduce(peri.ones { 2 }) end,
  function() return sharded():input_dist(kjt()) end, function() return peri.jagged.Keys.of { "f", "g" } end,
  function() return ebc():materialise() end, function() return peri.ones { 2, 3 } end,
}

-- -- wrong kinds ------------------------------------------------------------------------------------------------------

local function released()
  local t = peri.ones { 2 }
  t:release()
  return t
end

local wrongs = {
  function() return nil end, function() return true end, function() return 1 end, function() return -1 end,
  function() return 0.5 end, function() return 0 / 0 end, function() return 1e9 end, function() return 2 ^ 62 end,
  function() return 1e300 end, function() return "" end, function() return "x" end,
  function() return ("x"):rep(5000) end, function() return "/dev/zero" end, function() return {} end,
  function() return { 1, "a", {} } end, function() return { a = {} } end, function() return { { 1 } } end,
  function() return { 2 ^ 62 } end, function() return function() end end, function() return 5LL end,
  function() return ffi.new "int[3]" end, function() return ffi.new "void *" end,
  function() return ffi.typeof "int" end, function() return peri.ones { 2 } end,
  function() return peri.ones({ 2 }).ptr end, function() return ffi.new "peri_tensor_ref" end, released, kjt,
  function() return kjt().ptr end, function() return ffi.new "peri_tensor *[1]" end,
  function() return peri.EmbeddingBagConfig end, function() return nn.Linear end, linear, ebc,
  function() return peri end, function() return peri.NoWait(1) end, function() return coroutine.create(print) end,
  function() return io.stdout end,
}

local bad = 0

--- What an error must not say: a line of Perilune's own files, or Lua's words about its inside.
local function judge(text, err)
  local message = type(err) == "table" and rawget(err, "message") or err
  message = tostring(message):gsub("cdata<[^>]*>", "cdata") -- a value that a caller gave, shown to him
  if message:find "not enough memory" then return end
  local own_line = type(err) == "string"
    and (message:find "perilune/[%w_/]+%.lua:%d+:" or message:find "perilune[%w_./]*:%d+:")
  local inside = message:find "struct peri_" or message:find "attempt to " or message:find "cannot convert"
    or message:find "bad argument #" or message:find "size of C type" or message:find "these arguments do not fit"
  if not own_line and not inside then return end
  bad = bad + 1
  print(("RAW: %s\n  %s"):format(text, message:sub(1, 300)))
end

local function try(name, f, ...)
  local args, n = { ... }, select("#", ...)
  local ok, err = pcall(f, ...)
  if not ok then judge(api.call_text(name, args, n), err) end
end

--- As the launcher runs scripts: what Lua itself complains of is turned into words.
local function try_located(name, f, ...)
  local args, n = { ... }, select("#", ...)
  local ok, err = xpcall(f, locate, ...)
  if not ok and type(err) == "string" then judge(api.call_text(name, args, n), err) end
end

-- -- what is called ---------------------------------------------------------------------------------------------------

-- wrap takes a reference that C gave: what another object holds already is released twice, which no check can tell.
local left_out = { check = true, fail = true, C = true, lib = true, pause = true, raise = true, handle = true,
  finish = true, wrap = true }
local takes_long = { ["data.debian.read"] = true, ["data.debian.loader"] = true, ["data.debian"] = true, finish = true,
  exit = true }
local machinery = { util = true, ffi = true, signature = true }
local functions, classes = api.walk(peri, function(key, name)
  return left_out[key] or takes_long[name] or machinery[name]
end)

local signed = {} -- function -> its signature
for _, s in ipairs(signature.all) do signed[s.table[s.key]] = s end

local targets, seen = {}, {}
local function add(name, f, make)
  if seen[f] then return end
  seen[f] = true
  targets[#targets + 1] = { name = name, f = f, make = make, signed = signed[f] }
end
for _, e in ipairs(classes) do add(e.name, e.f) end
for _, e in ipairs(functions) do
  if not e.class then add(e.name, e.f) end
end
--- Methods that classes of optimizers have for each other: what one takes, another has checked; and those of every
--- class.
local protocol = { check_state = true, assign_state = true, is = true, extend = true, set_advice = true }
for _, make in ipairs(objects) do
  local x = make()
  local class = getmetatable(x)
  while type(class) == "table" do
    for _, key in ipairs(api.sorted(class)) do
      local f = rawget(class, key)
      -- not what a class below replaces
      local own = type(key) == "string" and type(f) == "function" and rawequal(x[key], f)
      if own and not key:find "^_" and not protocol[key] then
        add(tostring(rawget(class, "class_name")) .. ":" .. key, f, make)
      end
    end
    class = rawget(class, "super")
  end
end
for _, s in ipairs(signature.all) do
  local first = s.arguments[1]
  local private = tostring(s.key):find "^_" -- what the library's own parts give it is checked before
  if not private and not (first and first.name == "self" and rawget(s.table, "class_name")) then
    add(s.name, s.table[s.key])
  end
end

--- Arguments of right kinds for a function that says what it takes.
local by_kind = { tensor = function() return peri.ones { 2, 3 } end, KeyedJaggedTensor = kjt,
  number = function() return 1 end, integer = function() return 1 end, count = function() return 1 end,
  int = function() return 1 end, dim = function() return 1 end, dims = function() return 1 end,
  boolean = function() return true end, dtype = function() return "f32" end, device = function() return "cpu" end,
  operand = function() return 2 end, string = function() return "f" end,
  list = function() return { peri.ones { 2 } } end, table = function() return {} end, Topology = topology,
  Module = linear }

local function call_signed(t)
  local list = t.signed.arguments
  for i = 1, #list do
    for _, wrong in ipairs(wrongs) do
      local args = {}
      for k, a in ipairs(list) do args[k] = by_kind[a.kind] and by_kind[a.kind]() or nil end
      args[i] = wrong()
      try(t.name, t.f, unpack(args, 1, #list))
    end
  end
end

local function call_named(t)
  local args = valid[t.name] or function() return {} end
  heard = nil
  local works, err = pcall(t.f, args())
  if valid[t.name] and not works then
    error(("%s: its valid arguments do not work: %s"):format(t.name, tostring(err)), 0)
  end
  for name in pairs(heard and specs[heard] or {}) do
    for _, wrong in ipairs(wrongs) do
      local a = args()
      a[name] = wrong()
      try(t.name, t.f, a)
    end
  end
end

local function call_plain(t)
  for _, wrong in ipairs(wrongs) do
    try(t.name, t.f, wrong())
    try(t.name, t.f, wrong(), wrong())
    try(t.name, t.f, peri.ones { 2 }, wrong())
    try(t.name, t.f, 1, wrong())
    try(t.name, t.f, "f", wrong())
  end
  try(t.name, t.f)
end

local function call_method(t)
  for _, wrong in ipairs(wrongs) do
    try(t.name, t.f, t.make(), wrong())
    try(t.name, t.f, t.make(), 1, wrong())
    try_located(t.name, t.f, wrong(), 1)
  end
  try(t.name, t.f, t.make())
  try_located(t.name, t.f)
end

local all_wrongs = wrongs
--- What target i is called with: all wrong values, or some of them, and others for its neighbour.
local function wrongs_of(i)
  if arg[1] == "once" then return all_wrongs end
  local list = {}
  for k = 1 + (i + from) % EVERY, #all_wrongs, EVERY do list[#list + 1] = all_wrongs[k] end
  return list
end

-- functions after which all that they made is freed: with 8 it took a third of the time
local COLLECT = 32

local part, parts, only = tonumber(arg[2]), tonumber(arg[3]), arg[4]
local called = 0
for i, t in ipairs(targets) do
  if only and t.name:find(only, 1, true) or not only and i % parts == part then
    print(t.name)
    wrongs = wrongs_of(math.floor(i / parts))
    if t.make then call_method(t)
    elseif t.signed then call_signed(t)
    else
      call_plain(t)
      call_named(t)
    end
    called = called + 1
    if only or called % COLLECT == 0 then collectgarbage() end
  end
end
collectgarbage()
print(("%d of all functions; %d errors that show the inside"):format(math.ceil(#targets / parts), bad))
os.exit(bad == 0 and 0 or 1)
