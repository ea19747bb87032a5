-- nn.EmbeddingBag over ranks: TorchRec's own results (spec/golden/sharded/embedding_bag_*), and the law that a plan
-- changes nothing: rows, gradients of weights and trained tables are those of nn.EmbeddingBag.
-- mpirun: 3
local peri = require "perilune"
local golden = require "spec.support.golden"
local sim = require "perilune.dist.sim"
local worlds = require "spec.support.worlds"
local nn, plan, shard = peri.nn, peri.plan, peri.shard

local near = golden.assert_near
local TOLERANCE = { abs = 2e-6, rel = 1e-5 }

local function run(case, world, device)
  local t, o = case.tables[1], case.optimizer
  local names = { EXACT_SGD = "sgd", EXACT_ROWWISE_ADAGRAD = "rowwise_adagrad" }
  local bag = nn.EmbeddingBag { num_embeddings = t.num_embeddings, embedding_dim = t.embedding_dim,
    mode = t.pooling:lower(), device = device }
  bag.weight:detach():copy(case:tensor("table/t1/init", device))
  local model = peri.DistributedModelParallel { module = bag, group = world, device = device,
    plan = { [""] = { weight = plan.ParameterSharding { sharding_type = t.sharding_type } } },
    sharders = { shard.EmbeddingBagSharder { gradient_division = case.gradient_division,
      fused_params = { optimizer = assert(names[o.name]), learning_rate = o.learning_rate, eps = o.eps } } } }
  assert.equal("ShardedEmbeddingBag", model.module.class_name)
  assert.same({ "weight" }, peri.util.keys(model:state_dict()))
  for step = 1, case.steps do
    local at, offsets = ("rank%d/step%d/"):format(world:rank(), step), { 0 }
    for i, n in ipairs(case:list(at .. "input/lengths")) do offsets[i + 1] = offsets[i] + n end
    offsets[#offsets] = nil
    local rows = model(case:tensor(at .. "input/values", device), peri.tensor(offsets, "i64", device),
      case:tensor(at .. "input/weights", device))
    assert.equal("EmbeddingAwaitable", getmetatable(rows).class_name)
    near(case:list(at .. "output/values"), rows:to_list(), case.tol, at)
    rows:backward(case:tensor(at .. "grad_output", device))
    for _, s in ipairs(model.module:local_shards()) do
      near(case:tensor(("table/t1/step%d"):format(step), device):slice(1, s.row_offset, s.row_offset
        + s.rows):to_list(), s.state("weight"):to_list(), case.tol)
    end
  end
end

describe("a sharded nn.EmbeddingBag reproduces", function()
  for _, name in ipairs(golden.names("sharded", "^embedding_bag_")) do
    local case = golden.load(name)
    worlds.each(case.name, function(world, device) run(case, world, device) end, { sizes = { case.world_size } })
  end
end)

local function made(mode, device, more)
  local a = { num_embeddings = 24, embedding_dim = 8, mode = mode, device = device }
  for key, value in pairs(more or {}) do a[key] = value end
  local bag = nn.EmbeddingBag(a)
  local list = {}
  for i = 1, 24 * 8 do list[i] = (i * 37 % 101 - 50) / 32 end
  bag.weight:detach():copy(peri.tensor(list, "f32", device, { 24, 8 }))
  return bag
end

local function sharded(bag, entry, world, device, fused)
  return peri.DistributedModelParallel { module = bag, group = world, device = device,
    plan = { [""] = { weight = entry } }, sharders = { shard.EmbeddingBagSharder { fused_params = fused } } }
end

--- Inputs of nn.EmbeddingBag in all their forms: { mode, options of the module, arguments }; ids differ by rank.
local function forms(rank, device)
  local function t(list, dtype, shape) return peri.tensor(list, dtype, device, shape or { #list }) end
  local ids = {}
  for i = 1, 6 do ids[i] = (i * 7 + rank * 5) % 24 end
  local function weights(shape) return t({ 0.5, -1, 2, 0.25, 1.5, 3 }, "f32", shape):requires_grad() end
  return {
    { "sum", {}, t(ids, "i64"), t({ 0, 2, 2, 5 }, "i64") },
    { "mean", {}, t(ids, "i32"), t({ 0, 2, 2, 5 }, "i32") },
    { "sum", {}, t(ids, "i64"), t({ 0, 2, 2, 5 }, "i64"), weights { 6 } },
    { "sum", { include_last_offset = true }, t(ids, "i64"), t({ 0, 1, 6 }, "i64"), weights { 6 } },
    { "mean", { include_last_offset = true }, t(ids, "i64"), t({ 0, 6 }, "i64") },
    { "sum", {}, t(ids, "i64", { 2, 3 }), nil, weights { 2, 3 } },
    { "mean", {}, t(ids, "i64", { 3, 2 }) },
    { "sum", {}, t({}, "i64"), t({ 0, 0 }, "i64") },
  }
end

local entries = {
  table_wise = function(n) return plan.table_wise(n - 1) end, row_wise = function() return plan.row_wise() end,
  column_wise = function(n) return plan.column_wise { ranks = { n - 1, 0 } } end,
  table_row_wise = function(n) return plan.table_row_wise(nil, { ranks = { n - 1 } }) end,
  grid = function() return plan.grid_shard() end,
  data_parallel = function() return plan.data_parallel { compute_kernel = "fused" } end,
}

describe("a sharded nn.EmbeddingBag", function()
  for kind, entry in peri.util.ordered(entries) do
    worlds.each("is nn.EmbeddingBag, " .. kind, function(world, device, n)
      for i, form in ipairs(forms(world:rank(), device)) do
        local whole = made(form[1], device, form[2])
        local model = sharded(made(form[1], device, form[2]), entry(n), world, device,
          { optimizer = "sgd", learning_rate = 0.5 })
        local want = whole(form[3], form[4], form[5])
        want:sum():backward()
        local grad = form[5] and form[5]:grad():to_list()
        if form[5] then form[5]:set_grad(nil) end
        local got = model(form[3], form[4], form[5])
        near(want:to_list(), got:to_list(), TOLERANCE, "form " .. i)
        got:sum():backward()
        if grad then near(grad, form[5]:grad():to_list(), TOLERANCE, "weights of form " .. i) end
        local mean = whole.weight:grad():detach()
        world:all_reduce(mean):wait()
        local trained = whole.weight:detach() - mean * (0.5 / n)
        local now = shard.gather_state_dict(model:state_dict()).weight
        near(trained:to_list(), now:to_list(), TOLERANCE, "table of form " .. i)
      end
    end, { sizes = { 1, 2, 3 }, local_size = 2 })
  end

  worlds.each("has dense parameters when its plan says so", function(world, device)
    local model = sharded(made("sum", device), plan.row_wise { compute_kernel = "dense" }, world, device)
    local list = model:named_parameters()
    assert.equal(1, #list)
    assert.equal("weight", list[1].name)
  end, { sizes = { 1, 2 } })
end)

describe("a sharded nn.EmbeddingBag refuses", function()
  local function refuses(words, f)
    sim.run(1, function(_, world)
      local ok, err = pcall(f, world)
      assert.is_false(ok, words)
      assert.truthy(tostring(err):find(words, 1, true), tostring(err))
    end, { device = "cpu" })
  end
  local function t(list, dtype) return peri.tensor(list, dtype or "i64", "cpu", { #list }) end
  local sgd = { optimizer = "sgd", learning_rate = 0.5 }
  local function call(mode, more, ...)
    local arguments, n = { ... }, select("#", ...)
    return function(world)
      return sharded(made(mode, "cpu", more), plan.row_wise(), world, "cpu", sgd)(unpack(arguments, 1, n))
    end
  end
  for words, f in pairs {
    ["mode is 'max', allowed: sum, mean"] = call("max"),
    ["has a padding_idx, which sharded tables have not"] = call("sum", { padding_idx = 3 }),
    ["has a max_norm, which sharded tables have not"] = call("sum", { max_norm = 1 }),
    ["per_sample_weights with mode 'mean', allowed: sum"] = call("mean", {}, t { 1 }, t { 0 }, t({ 1 }, "f32")),
    ["wanted one for each of the ids"] = call("sum", {}, t { 1, 2 }, t { 0 }, t({ 1 }, "f32")),
    ["offsets are nil, wanted [bags] beside ids [n]"] = call("sum", {}, t { 1 }),
    ["offsets are nil, wanted [bags + 1] beside ids [n]"] = call("sum", { include_last_offset = true }, t { 1 }),
    ["offsets[2] is 1, allowed: 0 first, and no less than the one before"] = call("sum", {}, t { 1, 2, 3 },
      t { 0, 2, 1 }),
    ["offsets[0] is 1, allowed"] = call("sum", {}, t { 1, 2, 3 }, t { 1 }),
    ["the last offset is 4, wanted 3, the number of ids"] = call("sum", { include_last_offset = true }, t { 1, 2, 3 },
      t { 0, 4 }),
    ["the last offset is 2, wanted 3, the number of ids"] = call("sum", { include_last_offset = true }, t { 1, 2, 3 },
      t { 0, 2 }),
    ["3 ids, but offsets of no bag"] = call("sum", {}, t { 1, 2, 3 }, t {}),
    ["offsets are f32, allowed: i64, i32"] = call("sum", {}, t { 1 }, t({ 0 }, "f32")),
    ["offsets are empty"] = call("sum", { include_last_offset = true }, t { 1, 2, 3 }, t {}),
    ["ids is nil, wanted a tensor"] = call("sum", {}),
    ["offsets beside ids [bags, length]"] = call("sum", {}, t({ 1, 2 }):reshape(1, 2), t { 0 }),
    ["id 24"] = call("sum", {}, t { 24 }, t { 0 }),
    ["no argument 'tables'"] = function()
      shard.ShardedEmbeddingBag { num_embeddings = 3, embedding_dim = 2, tables = {} }
    end, ["no optimizer"] = function(world) sharded(made("sum", "cpu"), plan.row_wise(), world, "cpu") end,
  } do
    it(words, function() refuses(words, f) end)
  end
end)
