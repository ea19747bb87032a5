-- What all ranks must agree on: everything that changes what is learnt. A difference is an error on every rank that
-- says what differs, on which rank, and from what; nobody waits for ever. And what is of one table stays of that table.
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local worlds = require "spec.support.worlds"
local codec = require "perilune.dist.codec"
local plan = peri.plan

local function make(world, o)
  o = o or {}
  local params = o.fused_params or { optimizer = "adam", learning_rate = 0.01 }
  return peri.shard.ShardedEmbeddingBagCollection {
    tables = { peri.EmbeddingBagConfig { name = "users", num_embeddings = 10, embedding_dim = o.dim or 4,
      feature_names = { "u" }, pooling = o.pooling, init_fn = o.init_fn },
      peri.EmbeddingBagConfig { name = "items", num_embeddings = 20, embedding_dim = 8,
        feature_names = { o.feature or "i" } } },
    group = world, name = o.name, seed = o.seed or 3, fused_params = params, table_fused_params = o.table_fused_params,
    plan = { users = o.users or plan.row_wise(), items = o.items or plan.table_wise(world:size() - 1) },
    gradient_division = o.gradient_division, is_weighted = o.is_weighted, device = o.device,
    use_index_dedup = o.use_index_dedup, qcomm_codecs_registry = o.codecs and codec.get_qcomm_codecs_registry(o.codecs),
  }
end

local function kjt(device, u, i)
  return peri.KeyedJaggedTensor { keys = { "u", "i", "j" }, values = { u or 1, i or 2, 3 }, lengths = { 1, 1, 1 },
    device = device }
end

--- The errors of all ranks, of which the last one has other options; under mpirun those of this rank.
local function disagreement(n, one, other)
  local _, errors = sim.run(n, function(rank, world)
    make(world, rank == n - 1 and other or one):forward(kjt()):wait()
  end, { catch = true, timeout = 20 })
  local list = {}
  for r = 1, n do list[r] = tostring(errors[r] and errors[r].message or errors[r]) end
  return list
end

local adam = { optimizer = "adam", learning_rate = 0.01 }
local function with(options)
  for k, v in peri.util.ordered(adam) do if options[k] == nil then options[k] = v end end
  return { fused_params = options }
end
local cached = { compute_kernel = "fused_uvm_caching", cache_params = { load_factor = 0.5 } }

local cases = {
  { "an optimizer", with { optimizer = "lamb" },
    "optimizer lamb (number 0) where rank 0 has adam (number 0) (table 'users')" },
  { "a learning rate", with { learning_rate = 0.02 },
    "learning_rate 0.02 where rank 0 has 0.01 (optimizer of table 'users')" },
  { "a beta", with { beta1 = 0.8 }, "beta1 0.8 where rank 0 has 0.9 (optimizer of table 'users')" },
  { "a decay", with { weight_decay = 0.1 }, "weight_decay 0.1 where rank 0 has 0 (optimizer of table 'users')" },
  { "clipping", with { gradient_clipping = true, max_gradient = 2 },
    "max_gradient 2 where rank 0 has 0 (optimizer of table 'users')" },
  { "exact sums", with { exact = true }, "exact 1 where rank 0 has 0 (optimizer of table 'users')" },
  { "an optimizer of one table", { table_fused_params = { items = { optimizer = "sgd", learning_rate = 0.01 } } },
    "optimizer sgd (number 1) where rank 0 has adam (number 0) (table 'items')" },
  -- else alike: called in another order
  { "a name", { name = "towers.0" }, "name 'towers.0' where rank 0 has '' (the module)" },
  { "a seed", { seed = 4 }, "seed 4 where rank 0 has 3 (the module)" },
  { "start values", { init_fn = peri.embed.normal(0, 0.5) },
    "start values normal (mean 0, deviation 0.5) where rank 0 has default (uniform, by the number of rows) (table "
      .. "'users')" },
  { "a precision on the way", { codecs = { forward = "FP16", forward_loss_scale = 8 } },
    "forward codec FP16, loss_scale 8 where rank 0 has FP32 (rows of table-wise and column-wise shards)" },
  { "rows of a precision", { codecs = { forward = "MX4" } },
    "forward codec MX4, row_dim 32, rounding_mode EVEN where rank 0 has FP32 (rows of table-wise and column-wise "
      .. "shards)" },
  { "a bounds check", with { bounds_check_mode = "IGNORE" },
    "bounds_check_mode IGNORE where rank 0 has FATAL (table 'users')" },
  { "a compute kernel", { users = plan.row_wise { compute_kernel = "dense" } },
    "compute_kernel dense where rank 0 has fused (table 'users')" },
  { "a cache's size", { users = plan.row_wise(cached) }, "load_factor 0.5 where rank 0 has 0.2 (table 'users')",
    { users = plan.row_wise { compute_kernel = "fused_uvm_caching" } } },
  { "a pooling", { pooling = "MEAN" }, "pooling MEAN where rank 0 has SUM (table 'users')" },
  { "a shape", { dim = 12 }, "embedding_dim 12 where rank 0 has 4 (table 'users')" },
  { "a feature", { feature = "j" }, "feature_names j where rank 0 has i (table 'items')" },
  { "gradient division", { gradient_division = false }, "gradient_division false where rank 0 has true (the module)" },
  { "index dedup", { use_index_dedup = true }, "use_index_dedup true where rank 0 has false (the module)" },
  { "a sharding type", { users = plan.table_wise(0) },
    "sharding_type table_wise where rank 0 has row_wise (table 'users')" },
  { "a place", { items = plan.table_wise(0) },
    "shard 0 on rank 0, rows 0..19, columns 0..7 where rank 0 has on rank %d, " },
}

describe("ranks that disagree about", function()
  for _, case in ipairs(cases) do
    it(case[1], function()
      for _, n in ipairs { 2, 3 } do
        local want = ("rank %d has %s"):format(n - 1, case[3]:gsub("%%d", n - 1))
        for _, text in ipairs(disagreement(n, case[4] or {}, case[2])) do
          assert.is_truthy(text:find(want, 1, true), text .. "\nwanted: " .. want)
          assert.is_truthy(text:find("runs another module or plan", 1, true), text)
        end
      end
    end)
  end

  it("files are told so", function()
    for _, text in ipairs(disagreement(2, {}, { users = plan.row_wise(cached) })) do
      assert.is_truthy(text:find "rank [01]", text)
    end
  end)

  it("which tables are behind caches are told so, in words, when the model is made", function()
    for _, n in ipairs { 2, 3 } do
      local _, errors = sim.run(n, function(rank, world)
        local tables = { peri.EmbeddingBagConfig { name = "users", num_embeddings = 10, embedding_dim = 4,
          feature_names = { "u" } } }
        peri.DistributedModelParallel { group = world,
          plan = { [""] = { users = plan.row_wise(rank == n - 1 and cached or nil) } },
          module = peri.EmbeddingBagCollection { tables = tables, fused_params = adam, device = "meta" } }
      end, { catch = true, timeout = 20 })
      local here, there = "DistributedModelParallel",
        "ShardedEmbeddingBagCollection with compute kernel fused_uvm_caching"
      for r = 1, n do
        local own, other, rank = here, there, n - 1
        if r == n then own, other, rank = there, here, 0 end
        local want = ("%s: rank %d of group '%s' came to %s instead; all ranks make the same calls in the same "
          .. "order"):format(own, rank, "world", other)
        local text = tostring(errors[r] and errors[r].message or errors[r])
        assert.is_truthy(text:find(want, 1, true), text .. "\nwanted: " .. want)
        assert.equal("EMISMATCH", errors[r].name)
      end
    end
  end)

  worlds.each("a learning rate that was set later", function(world, device, n)
    local ebc, rank = make(world, { device = device }), world:rank()
    ebc:forward(kjt(device)):wait()
    ebc:set_learning_rate(0.5)
    ebc:forward(kjt(device)):wait() -- all alike
    if rank == n - 1 then ebc:set_learning_rate(0.25) end
    local ok, err = pcall(function() ebc:forward(kjt(device)):wait() end)
    assert.is_false(ok)
    local text = tostring(err.message or err)
    assert.is_truthy(text:find(("rank %d has learning_rate 0.25 where rank 0 has 0.5"):format(n - 1), 1, true), text)
  end, { sizes = { 2, 3 }, only = "sim" })

  it("how caches choose rows, and how much memory they leave, go on", function()
    sim.run(3, function(rank, world)
      local ebc = make(world, { users = plan.row_wise { compute_kernel = "fused_uvm_caching",
        cache_params = { load_factor = 0.5, reserved_memory = rank, algorithm = rank == 0 and "LRU" or "LFU",
          ways = 2 * rank } } })
      for _ = 1, 3 do ebc:forward(kjt()):wait() end
    end)
  end)
end)

describe("the bounds check of a table", function()
  local modes = { users = { optimizer = "sgd", bounds_check_mode = "FATAL" },
    items = { optimizer = "sgd", bounds_check_mode = "IGNORE" } }
  local dense = { compute_kernel = "dense" }
  local plans = {
    fused = {}, swapped = { users = plan.table_wise(0), items = plan.row_wise() },
    dense = { users = plan.data_parallel(dense), items = plan.table_wise(0, dense) },
    replicas = { users = plan.data_parallel { compute_kernel = "fused" },
      items = plan.data_parallel { compute_kernel = "fused" } },
  }
  for name, plans_of in peri.util.ordered(plans) do
    worlds.each("is its own, " .. name, function(world, device)
      local o = { table_fused_params = modes, device = device, users = plans_of.users, items = plans_of.items }
      local out = make(world, o):forward(kjt(device, 1, 20)):values():to_list()
      for i = 5, 12 do assert.equal(0, out[i]) end
    end, { sizes = { 1, 2 } })
    for _, mode in ipairs { "FATAL", "IGNORE" } do -- the other table has the other mode
      it(("decides what happens to ids of table users: %s, %s"):format(mode, name), function()
        sim.run(1, function(_, world)
          local ebc = make(world, { users = plans_of.users, items = plans_of.items, table_fused_params = {
            users = { optimizer = "sgd", bounds_check_mode = mode },
            items = { optimizer = "sgd", bounds_check_mode = mode == "FATAL" and "IGNORE" or "FATAL" } } })
          if mode == "FATAL" then
            assert.error_matches(function() ebc:forward(kjt("cpu", 10, 0)):wait() end,
              "table 'users', feature 'u', sample 0: id 10")
          else
            ebc:forward(kjt("cpu", 10, 0)):wait()
            assert.error_matches(function() ebc:forward(kjt("cpu", 0, 20)):wait() end,
              "table 'items', feature 'i', sample 0: id 20")
          end
        end)
      end)
    end
  end

  it("is the strictest where tables share their ids", function()
    sim.run(1, function(_, world)
      local tables = peri.util.map({ "a", "b" }, function(name)
        return peri.EmbeddingBagConfig { name = name, num_embeddings = 10, embedding_dim = 4, feature_names = { "u" } }
      end)
      local ebc = peri.shard.ShardedEmbeddingBagCollection { tables = tables, group = world,
        plan = { a = plan.table_wise(0), b = plan.table_wise(0) }, table_fused_params = {
          a = { optimizer = "sgd", bounds_check_mode = "NONE" },
          b = { optimizer = "sgd", bounds_check_mode = "FATAL" } } }
      assert.error_matches(function() ebc:forward(kjt("cpu", 10)):wait() end, "table 'b', feature 'u', sample 0: id 10")
    end)
  end)
end)

--- Wrapping a trained collection goes on where it stopped: the next step is the one it would have made itself.
describe("a trained collection", function()
  local params = { optimizer = "adam", learning_rate = 0.1, weight_decay = 0.01 }
  local entries = {
    table_wise = function(n) return plan.table_wise(n - 1) end,
    row_wise = function() return plan.row_wise() end,
    column_wise = function(n) return plan.column_wise { ranks = { 0, n - 1 } } end,
    data_parallel = function() return plan.data_parallel { compute_kernel = "fused" } end,
    cached = function()
      return plan.row_wise { compute_kernel = "fused_uvm_caching", cache_params = { load_factor = 1 } }
    end,
  }
  for kind, entry in peri.util.ordered(entries) do
    worlds.each("goes on as " .. kind, function(world, device, n)
      local tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = 12, embedding_dim = 8,
        feature_names = { "f" } } }
      local function collection()
        return peri.EmbeddingBagCollection { tables = tables, fused_params = params, seed = 2, device = device }
      end
      local whole, wrapped = collection(), collection()
      local function train(module, step)
        local input = peri.KeyedJaggedTensor { keys = { "f" }, values = { step, 11 - step, 5 }, lengths = { 3 },
          device = device }
        module(input):values():backward(peri.Tensor.uniform({ 1, 8 }, -1, 1, step, 0, "f32", device))
      end
      for _, module in ipairs { whole, wrapped } do
        for step = 1, 4 do train(module, step) end
        module:set_learning_rate(0.05)
      end
      local model = peri.DistributedModelParallel { module = wrapped, group = world, device = device,
        plan = { [""] = { t = entry(n) } } }
      local sharded = model.sharded[1]
      for step = 5, 6 do
        train(whole, step)
        train(sharded, step) -- every rank's batch is the same, and gradients are means
      end
      for _, s in ipairs(sharded:local_shards()) do
        assert.equal(6, s.iteration())
        local want = whole:weight("t"):slice(1, s.row_offset, s.row_offset + s.rows):slice(2, s.col_offset,
          s.col_offset + s.cols):to_list()
        local got = s.read("weight", 0, peri.zeros { s.rows, s.cols }):to_list()
        for i, x in ipairs(want) do assert.near(x, got[i], 1e-5) end
      end
    end, { sizes = { 1, 2, 3 } })
  end
end)
