-- Sharders: who shards what. A module of the user's own, with a sharder of its own, in a model; lists of sharders, and
-- what is wrong in them.
-- mpirun: 3
local peri = require "perilune"
local worlds = require "spec.support.worlds"
local nn, plan, shard = peri.nn, peri.plan, peri.shard
local ShardingEnv = plan.ShardingEnv

local ROWS, COLS = 5, 4

local function start_rows()
  local list = {}
  for i = 1, ROWS do
    list[i] = {}
    for j = 1, COLS do list[i][j] = 10 * i + j end
  end
  return list
end

--- Rows of a matrix, by their numbers (a list, which may be empty).
local function select(weight, numbers, device)
  local n = #numbers
  local indices = peri.tensor(numbers, "i64", device)
  local rows = peri.sparse.batch_index_select_dim0(weight:reshape(-1), indices, { n }, { weight:size(1) }, { COLS })
  return rows:reshape(n, COLS)
end

--- What a user writes: a module of rows, ...
local Rows = nn.Module:extend "Rows"
function Rows:init() self.weight = nn.Parameter(peri.tensor(start_rows())) end
function Rows:forward(ids) return select(self.weight, ids:to_list(), ids:device()) end

--- ... the same in blocks of rows, one to a rank, ...
local ShardedRows = shard.ShardedModule:extend "ShardedRows"
function ShardedRows:init(rows, block, env)
  self.env, self.block = env, block
  local weight = peri.empty { block.rows, COLS }
  weight:copy(rows.weight:detach():slice(1, block.row_offset, block.row_offset + block.rows))
  self:own_parameter("weight", nn.Parameter(weight))
end
function ShardedRows:input_dist(ids)
  self.stages = { "input_dist" }
  return self.env.pg:all_gather(ids)
end
function ShardedRows:lookup(ids)
  self.stages[2] = "lookup"
  local numbers, here = ids:to_list(), {}
  for i, id in ipairs(numbers) do
    local number = id - self.block.row_offset
    here[i] = number >= 0 and number < self.block.rows and 1 or 0
    numbers[i] = here[i] == 1 and number or 0
  end
  local rows = select(self.weight, numbers, ids:device())
  rows = rows * peri.tensor(here, "f32", ids:device()):reshape(#here, 1):expand { #here, COLS }
  return peri.dist.ops.reduce_scatter_base_pooled { input = rows, group = self.env.pg }
end
function ShardedRows:output(rows)
  self.stages[3] = "output"
  return rows
end

--- ... and their sharder, which the class names.
local RowsSharder = peri.util.class("RowsSharder", shard.ModuleSharder)
RowsSharder.module_type = Rows
function RowsSharder:shardable_parameters() -- luacheck: ignore
  return { { name = "weight", num_embeddings = ROWS, embedding_dim = COLS } }
end
function RowsSharder:sharding_types() return { "row_wise" } end -- luacheck: ignore
function RowsSharder:shard(module, its_plan, env) -- luacheck: ignore
  for _, block in ipairs(its_plan.tables.weight:shards(self:shardable_parameters()[1], env)) do
    if block.rank == env.rank then return ShardedRows(module, block, env) end
  end
end
Rows.sharder = RowsSharder

local dense = { compute_kernel = "dense" }
local by_rows = { weight = plan.row_wise(dense) }

local Net = nn.Module:extend "Net"
function Net:init()
  self.rows = Rows()
  self.scale = nn.Parameter(peri.ones { COLS })
end
function Net:forward(ids) return self.rows(ids) * self.scale:reshape(1, COLS):expand { ids:size(1), COLS } end

local function ids_of(rank) return { rank % ROWS, 4, (2 * rank + 1) % ROWS } end

local function collection(fused)
  return peri.EmbeddingBagCollection {
    tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = 6, embedding_dim = COLS,
      feature_names = { "f" } } },
    fused_params = fused,
  }
end
local sgd = { optimizer = "sgd", learning_rate = 1 }

describe("a module of one's own", function()
  worlds.each("is sharded, looked up and trained like the unsharded one", function(world, device, n)
    peri.ffi.state.device = device
    local model = peri.DistributedModelParallel { module = Net(), plan = { rows = by_rows }, group = world,
      device = device }
    local rows = model.module.rows
    assert.is_true(ShardedRows.is(rows))
    assert.equal(rows, model.sharded[1])
    local mine = ids_of(world:rank())
    local out = model(peri.tensor(mine, "i64", device))
    local whole = start_rows()
    for i, id in ipairs(mine) do
      assert.same(whole[id + 1], out:slice(1, i - 1, i):reshape(-1):to_list())
    end
    assert.same({ "input_dist", "lookup", "output" }, rows.stages)
    -- Rank r's loss is r + 1 times the sum: a row's gradient is the mean over ranks of its uses times r + 1.
    local loss = out:sum() * (world:rank() + 1)
    loss:backward()
    nn.optim.SGD { params = model:dense_parameters(), lr = 1 }:step()
    local gradient, of_scale = {}, 0
    for r = 0, n - 1 do
      for _, id in ipairs(ids_of(r)) do
        gradient[id] = (gradient[id] or 0) + (r + 1) / n
        of_scale = of_scale + whole[id + 1][1] * (r + 1) / n
      end
    end
    for i = 0, rows.block.rows - 1 do
      local id = rows.block.row_offset + i
      assert.near(whole[id + 1][2] - (gradient[id] or 0), rows.weight:item(i * COLS + 1), 1e-4)
    end
    assert.near(1 - of_scale, model.module.scale:item(0), 1e-3) -- the dense part beside it: means over the ranks
  end, { sizes = { 1, 2, 3 } })

  worlds.each("works as a lazy result and in stages", function(world, device)
    peri.ffi.state.device = device
    local model = peri.DistributedModelParallel { module = Rows(), plan = { [""] = by_rows }, group = world,
      device = device }
    local ids = peri.tensor(ids_of(world:rank()), "i64", device)
    local rows = model.module
    local dist = rows:input_dist(ids):wait()
    rows:prefetch(dist)
    local lazy = rows:compute_and_output_dist(dist)
    assert.is_true(peri.Awaitable.is(lazy))
    assert.same({ "input_dist", "lookup" }, rows.stages) -- nobody has used the result yet
    assert.same({ #ids_of(0), COLS }, lazy:shape())
    assert.same({ "input_dist", "lookup", "output" }, rows.stages)
  end, { sizes = { 1, 2 } })

  worlds.each("works as TorchRec's schedules call it", function(world, device)
    local tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = 9, embedding_dim = 4,
      feature_names = { "f" } } }
    local bags = peri.shard.ShardedEmbeddingBagCollection { tables = tables, plan = { t = peri.plan.row_wise() },
      group = world, fused_params = { optimizer = "sgd" }, device = device }
    local kjt = peri.KeyedJaggedTensor { keys = { "f" }, values = { 1, 8, world:rank() }, lengths = { 2, 1 },
      device = device }
    local ctx = bags:create_context()
    local dist = bags:input_dist(ctx, kjt):wait()
    bags:prefetch(ctx, dist)
    local result = bags:output_dist(ctx, bags:compute(ctx, dist))
    assert.is_true(peri.Awaitable.is(result))
    assert.same(bags(kjt):values():to_list(), result:values():to_list())
    dist = bags:input_dist(kjt):wait()
    assert.same(bags(kjt):values():to_list(), bags:compute_and_output_dist(bags:create_context(),
      dist):values():to_list())
    assert.error_matches(function() bags:input_dist(ctx) end,
      "ShardedEmbeddingBagCollection:input_dist: features is nil")
    for _, given in ipairs { bags:input_dist(kjt), bags:input_dist(kjt):wait() } do
      assert.error_matches(function() bags:output_dist(given) end,
        "ShardedEmbeddingBagCollection:output_dist: rows is what input_dist returned, wanted what compute made of it")
      assert.error_matches(function() bags:output_dist(ctx, given) end, "output_dist: rows is what input_dist returned")
    end
    local twice = bags:compute(bags:input_dist(kjt):wait())
    assert.error_matches(function() bags:compute(twice) end,
      "compute: dist is what compute returned, wanted what input_dist returned")
    bags:output_dist(twice)
    assert.error_matches(function() bags:output_dist(twice) end, "output_dist: these rows already have a result")
    assert.error_matches(function() bags:output_dist(ctx, kjt) end, "output_dist: rows is a KeyedJaggedTensor")
  end, { sizes = { 1, 2 } })

  worlds.each("stands beside the library's in one plan", function(world, device)
    peri.ffi.state.device = device
    local net = nn.Module()
    net.rows = Rows()
    net.ebc = collection(sgd)
    local seen
    local model = peri.DistributedModelParallel { module = net, group = world, device = device, plan = function(env)
      seen = env
      return { rows = by_rows, ebc = { t = plan.row_wise() } }
    end }
    assert.is_true(ShardingEnv.is(seen))
    assert.same({ world:size(), world:rank(), world }, { seen.world_size, seen.rank, seen.pg })
    assert.same({ "ebc", "rows" }, peri.util.keys(seen.modules))
    assert.equal(ROWS, seen.modules.rows[1].num_embeddings)
    assert.same({ "ShardedRows", "ShardedEmbeddingBagCollection" }, peri.util.map(model.sharded, function(m)
      return m.class_name
    end))
    assert.same({ "rows.weight" }, peri.util.map(model.module:named_parameters(), function(p) return p.name end))
  end, { sizes = { 1, 2 } })
end)

describe("sharders =", function()
  local function make(args)
    return function(world, device)
      peri.ffi.state.device = device
      args.group = world
      return peri.DistributedModelParallel(args)
    end
  end

  worlds.each("shard what they are for, and nothing else", function(world, device, n)
    local net = nn.Module()
    peri.ffi.state.device = device
    net.rows = Rows()
    net.ebc = collection(nil) -- dense gradients: a replica on each rank, which the reducer averages
    local model = make { module = net, plan = { rows = by_rows }, sharders = { RowsSharder() } }(world, device)
    assert.equal(1, #model.sharded)
    assert.is_true(peri.EmbeddingBagCollection.is(model.module.ebc))
    local kjt = peri.KeyedJaggedTensor { keys = { "f" }, values = { world:rank() }, lengths = { 1 }, device = device }
    function net.forward(self, ids) return self.ebc(ids):values() end
    model(kjt):sum():backward()
    local grad = model.module.ebc:named_parameters()[1].tensor:grad():to_list()
    for r = 0, n - 1 do assert.near(1 / n, grad[r * COLS + 1], 1e-6) end
  end, { sizes = { 1, 2, 3 } })

  worlds.each("bring optimizers for collections that have none, and complete those of others", function(world, device)
    local sharder = shard.EmbeddingBagCollectionSharder { fused_params = { optimizer = "adagrad",
      learning_rate = 0.25 } }
    local net = nn.Module()
    peri.ffi.state.device = device
    net.a = collection(nil)
    net.b = collection { optimizer = "sgd", learning_rate = 2 }
    local model = make { module = net, sharders = { sharder } }(world, device)
    local own = {}
    for i, m in ipairs(model.sharded) do
      own[i] = m.optimizers[1].name
      local kjt = peri.KeyedJaggedTensor { keys = { "f" }, values = { 1 }, lengths = { 1 }, device = device }
      local before = m(kjt):values():detach():to_list()
      m(kjt):values():sum():backward()
      local after = m(kjt):values():detach():to_list()
      -- SGD: rate 2 and gradient 1 (the mean); Adagrad's first step: the rate
      assert.near(before[1] - (i == 1 and 0.25 or 2), after[1], 1e-5)
    end
    assert.same({ "adagrad", "sgd" }, own)
  end, { sizes = { 1, 2 } })

  worlds.each("hand their codecs and gradient division on, those of the model too", function(world, device)
    local registry = peri.dist.get_qcomm_codecs_registry { forward = "BF16" }
    for _, args in ipairs {
      { sharders = { shard.EmbeddingBagCollectionSharder { qcomm_codecs_registry = registry,
        gradient_division = false } } },
      { qcomm_codecs_registry = registry, gradient_division = false },
    } do
      peri.ffi.state.device = device
      args.module, args.plan = collection(sgd), { [""] = { t = plan.table_wise(0) } }
      local model = make(args)(world, device)
      if world:rank() == 0 then model.module:local_shards()[1].state("weight"):fill(1 + 2 ^ -12) end
      local kjt = peri.KeyedJaggedTensor { keys = { "f" }, values = { 1 }, lengths = { 1 }, device = device }
      local pooled = model(kjt):values()
      assert.equal(world:rank() == 0 and 1 + 2 ^ -12 or 1, pooled:item(0)) -- 8 bits travel; what is at home does not
      pooled:sum():backward()
      if world:rank() == 0 then
        assert.near(1 - world:size(), model.module:local_shards()[1].state("weight"):item(COLS), 1e-3)
      end
    end
  end, { sizes = { 2 } })

  local function fails(title, args, text)
    worlds.each(title, function(world, device)
      peri.ffi.state.device = device
      local ok, err = pcall(function() return make(args())(world, device) end)
      assert.is_false(ok)
      assert.is_truthy(tostring(err.message or err):find(text, 1, true), tostring(err.message or err))
    end, { sizes = { 1, 2 }, devices = { "cpu" } })
  end
  local Other = peri.util.class("OtherSharder", shard.ModuleSharder)
  fails("are a list", function() return { module = Net(), sharders = RowsSharder() } end,
    "sharders is RowsSharder, wanted a list of ModuleSharders")
  fails("are objects", function() return { module = Net(), sharders = { RowsSharder } } end,
    "sharders[1] is the class RowsSharder, wanted a ModuleSharder (a class is called to make one)")
  fails("are nothing else", function() return { module = Net(), sharders = { RowsSharder(), "row_wise" } } end,
    "sharders[2] is ")
  fails("say what they shard", function() return { module = Net(), sharders = { Other() } } end,
    "sharders[1], OtherSharder, says no module_type")
  fails("are not two for one class", function()
    return { module = Net(), sharders = { RowsSharder(), RowsSharder() } }
  end,
    "sharders[1] and sharders[2] both shard Rows; give one of them")
  local vague = { nothing = false, ["a number"] = 3, ["a list of numbers"] = { 3 }, names = { { name = "weight" } } }
  for what, answer in peri.util.ordered(vague) do
    fails("say no " .. what .. " of a module", function()
      local Vague = peri.util.class("VagueSharder", RowsSharder)
      function Vague:shardable_parameters() return answer or nil end -- luacheck: ignore
      return { module = Net(), sharders = { Vague() } }
    end, "DistributedModelParallel: VagueSharder:shardable_parameters of module 'rows' ")
  end
  for method, wrong in peri.util.ordered { sharding_types = 3, compute_kernels = function() return 3 end } do
    fails("say no " .. method, function()
      local Odd = peri.util.class("OddSharder", RowsSharder)
      Odd[method] = wrong
      return { module = Net(), sharders = { Odd() }, plan = { rows = by_rows } }
    end, method == "sharding_types" and "OddSharder: sharding_types is 3, wanted a method that returns a list of names"
      or "OddSharder: what compute_kernels returns is 3, wanted a list of strings")
  end
  fails("are named as they are called", function()
    local Lost = Rows:extend "Lost"
    Lost.sharder = "LostSharder"
    return { module = Lost(), plan = { [""] = {} } }
  end, "the sharder of class Lost is 'LostSharder', which peri.shard has not")
  worlds.each("make modules whose stages return what can be waited for", function(world)
    local Hasty = shard.ShardedModule:extend "Hasty"
    function Hasty:init() end
    function Hasty:input_dist(x) return x end -- luacheck: ignore 212
    function Hasty:lookup(x) return x end -- luacheck: ignore 212
    assert.error_matches(function() Hasty():forward(3) end, "Hasty:input_dist returned 3, wanted an Awaitable")
    assert.error_matches(function() Hasty():compute_and_output_dist(world) end,
      "Hasty:lookup returned .*, wanted an Awaitable")
  end, { sizes = { 1 }, devices = { "cpu" } })
  worlds.each("need no plan for a module that has nothing to cut", function(world, device)
    peri.ffi.state.device = device
    local Whole = peri.util.class("WholeSharder", RowsSharder)
    local seen
    function Whole:shardable_parameters() return {} end -- luacheck: ignore
    function Whole:shard(rows, its_plan, env) -- luacheck: ignore
      seen = its_plan.tables
      return ShardedRows(rows, { row_offset = 0, rows = ROWS }, env)
    end
    local model = make { module = Net(), sharders = { Whole() } }(world, device)
    assert.same({}, seen)
    assert.is_true(ShardedRows.is(model.module.rows))
  end, { sizes = { 1, 2 }, devices = { "cpu" } })
  fails("leave no fused tables behind", function()
    local net = nn.Module()
    net.rows = Rows()
    net.ebc = collection(sgd)
    return { module = net, sharders = { RowsSharder() }, plan = { rows = by_rows } }
  end, "module 'ebc' has fused_params, and none of the sharders is for EmbeddingBagCollection: each rank would train "
    .. "tables of its own")
  fails("take the codecs themselves", function()
    return { module = Net(), sharders = { RowsSharder() }, gradient_division = false }
  end,
    "gradient_division is the sharders' own argument where these are given")
  fails("refuse what they cannot do", function()
    return { module = Net(), plan = { rows = { weight = plan.table_wise(0, dense) } } }
  end,
    "RowsSharder: the plan: module 'rows', table 'weight': sharding_type 'table_wise', allowed: row_wise")
  fails("have all arguments checked", function()
    return { module = Net(), sharders = { RowsSharder { colour = "red" } } }
  end,
    "RowsSharder: no argument 'colour'; allowed: fused_params, gradient_division, qcomm_codecs_registry")
end)

describe("a ShardingEnv", function()
  it("describes ranks that are not there", function()
    local env = ShardingEnv.from_local(8, 3, 4)
    assert.same({ 8, 3, 4, false }, { env.world_size, env.rank, env.local_size, env.pg })
    local configs = { { name = "t", num_embeddings = 16, embedding_dim = 4 } }
    local made = plan.load("examples/plans/row_wise.lua", env:with_modules { ebc = configs })
    assert.equal(8, #made:get_plan_for_module("ebc").tables.t:shards(configs[1], env))
    assert.equal("ShardingEnv: rank 3 of 8, no process group", tostring(env))
  end)
  worlds.each("is made of a group, and makes a model", function(world, device)
    peri.ffi.state.device = device
    local env = ShardingEnv.from_process_group(world)
    assert.same({ world:size(), world:rank(), world.local_size }, { env.world_size, env.rank, env.local_size })
    local model = peri.DistributedModelParallel { module = collection(sgd), env = env, device = device }
    assert.equal(world, model.group)
    assert.equal(env, model.env)
  end, { sizes = { 1, 2 } })
  worlds.each("says what is wrong with it", function(world)
    local function fails(args, text)
      args.module = collection(sgd)
      assert.error_matches(function() peri.DistributedModelParallel(args) end, text, 1, true)
    end
    fails({ env = ShardingEnv.from_local(world:size(), 0) }, "env has no process group (ShardingEnv: rank 0 of")
    fails({ env = ShardingEnv.from_process_group(world), group = world },
      "env and group both say which ranks share the model")
    fails({ env = { world_size = 1 } }, "env is a table, wanted a ShardingEnv")
    assert.error_matches(function() ShardingEnv { world_size = 2, rank = 2 } end,
      "ShardingEnv: rank is 2, allowed: whole numbers 0..1", 1, true)
    assert.error_matches(function() ShardingEnv { world_size = 9, rank = world:rank(), pg = world } end,
      "ShardingEnv: rank", 1, true)
  end, { sizes = { 1, 2 }, devices = { "cpu" } })
end)

describe("a sharded module", function()
  worlds.each("takes memory, of one device", function(world)
    local tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = 9, embedding_dim = 4,
      feature_names = { "f" } } }
    local trained = peri.EmbeddingBagCollection { tables = tables, fused_params = { optimizer = "sgd" } }
    local quantized = peri.quantize_embeddings { module = trained }
    local function places(device)
      return peri.shard.QuantEmbeddingBagCollectionSharder():shard(quantized,
        { t = peri.plan.row_wise { compute_kernel = "quant" } }, peri.ShardingEnv.from_local(2), device)
    end
    assert.error_matches(function()
      peri.shard.ShardedEmbeddingBagCollection { tables = tables, group = world, plan = { t = peri.plan.row_wise() },
        device = "meta", fused_params = { optimizer = "sgd" } }
    end, "ShardedEmbeddingBagCollection: device 'meta' has no shards; a plan is checked without them")
    assert.error_matches(function() places "meta" end,
      "ShardedQuantEmbeddingBagCollection: device 'meta' has no shards")
    assert.error_matches(function() places { "cpu", "opaque" } end,
      "ShardedQuantEmbeddingBagCollection: device is a list, but the places of one process are on one device")
  end, { sizes = { 1 }, devices = { "cpu" } })
end)
