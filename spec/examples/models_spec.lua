-- examples/models: every model's loss is PyTorch's, step by step (spec/golden/models.py), on one rank, on two and on
-- three, wherever its tables lie; and hstu.lua is short.
-- takes: 3 s
local peri = require "perilune"
local golden = require "spec.support.golden"
local sim = require "perilune.dist.sim"
local devices = require "spec.support.devices"
local shell = require "spec.support.shell"
local plan = peri.plan

local document = golden.document "ops/tensor/models"
local SAMPLES, STEPS, LR, EPS, DIM = 6, 6, 0.05, 1e-8, 4

-- -- weights and batches, as spec/golden/models.py makes them ---------------------------------------------------------

local function start(name, n)
  local sum, values = 0, {}
  for i = 1, #name do sum = sum + name:byte(i) end
  local norm = name:match "norm%.weight$"
  for i = 0, n - 1 do
    local w = 0.15 + 0.4 * math.sin(0.7 * i + 0.13 * sum)
    values[i + 1] = norm and 1 + 0.2 * w or w
  end
  return values
end

local function draw(step, k, below) return (31 * step + 17 * k + 3 * k * k) % below end

--- Some of a list's samples, each of which is a list.
local function flat(samples)
  local values, lengths = {}, {}
  for i, sample in ipairs(samples) do
    lengths[i] = #sample
    for _, x in ipairs(sample) do values[#values + 1] = x end
  end
  return values, lengths
end

local function each(mine, f)
  local list = {}
  for b = mine.first, mine.last do list[#list + 1] = f(b) end
  return list
end

local function count_of(n, f)
  local list = {}
  for i = 0, n - 1 do list[i + 1] = f(i) end
  return list
end

--- features: list of { name, function(sample) -> ids }.
local function ids_of(mine, features)
  local keys, values, lengths = {}, {}, {}
  for i, f in ipairs(features) do
    keys[i] = f[1]
    local v, l = flat(each(mine, f[2]))
    for _, x in ipairs(v) do values[#values + 1] = x end
    for _, x in ipairs(l) do lengths[#lengths + 1] = x end
  end
  return peri.KeyedJaggedTensor { keys = keys, values = peri.tensor(values, "i64", nil, { #values }),
    lengths = peri.tensor(lengths, "i32") }
end

local function bag(step, feature, rows)
  return function(b)
    return count_of(draw(step, 5 * b + feature, 4), function(i)
      return draw(step, 11 * b + 3 * feature + 7 * i, rows)
    end)
  end
end

local function dense(mine, step, columns)
  return peri.tensor(each(mine, function(b)
    return count_of(columns, function(c) return (draw(step, 3 * b + c, 101) - 50) / 50 end)
  end))
end

local function label(step, b, t) return draw(step, 13 * b + 5 * t, 7) < 3 and 1 or 0 end
local function labels(mine, step) return peri.tensor(each(mine, function(b) return label(step, b, 0) end)) end

-- -- the models -------------------------------------------------------------------------------------------------------

local function table_of(name, rows) return { name = name, rows = rows, features = { name } } end

local models = {
  two_tower = {
    args = { tables = { table_of("user", 11), table_of("context", 7), table_of("item", 13) },
      query_features = { "user", "context" }, candidate_features = { "item" }, layer_sizes = { 8, 6 } },
    batch = function(mine, step)
      return { labels = labels(mine, step), sparse_features = ids_of(mine, { { "user", bag(step, 0, 11) },
        { "context", bag(step, 1, 7) }, { "item", bag(step, 2, 13) } }) }
    end,
  },
  deepfm = {
    args = { tables = { table_of("user", 11), table_of("item", 13) }, dense_features = 3, hidden_layer_size = 5,
      deep_fm_dimension = 3 },
    batch = function(mine, step)
      return { sparse_features = ids_of(mine, { { "user", bag(step, 0, 11) }, { "item", bag(step, 1, 13) } }),
        dense_features = dense(mine, step, 3), labels = labels(mine, step) }
    end,
  },
  din = {
    args = { items = 13, attention_size = 6, hidden_size = 5 },
    batch = function(mine, step)
      return { labels = labels(mine, step), sparse_features = ids_of(mine, { { "history", bag(step, 0, 13) },
        { "candidate", function(b) return { draw(step, 19 * b + 2, 13) } end } }) }
    end,
  },
  mmoe = {
    args = { tables = { table_of("user", 11), table_of("item", 13) }, dense_features = 3, experts = 3, expert_size = 5,
      tower_size = 4 },
    batch = function(mine, step)
      return { sparse_features = ids_of(mine, { { "user", bag(step, 0, 11) }, { "item", bag(step, 1, 13) } }),
        dense_features = dense(mine, step, 3),
        labels = peri.tensor(each(mine, function(b) return { label(step, b, 0), label(step, b, 1) } end)) }
    end,
  },
  hstu = {
    args = { items = 13, actions = 4, attention_dim = 2, hidden_dim = 3, max_seq_len = 12, num_time_buckets = 8 },
    batch = function(mine, step)
      local function history(b) return draw(step, 5 * b, 6) end
      local function targets(b) return 1 + draw(step, 3 * b, 3) end
      local function members(f)
        return function(b) return count_of(history(b) + targets(b), function(i) return f(b, i) end) end
      end
      local asked = each(mine, function(b)
        return count_of(targets(b), function(i) return label(step, b, history(b) + i) end)
      end)
      return {
        sparse_features = ids_of(mine, { { "item", members(function(b, i) return draw(step, 11 * b + 7 * i, 13) end) },
          { "action", members(function(b, i) return i < history(b) and 1 + draw(step, b + i, 3) or 0 end) } }),
        timestamps = peri.tensor((flat(each(mine, members(function(b, i) return 50 * i * i + b end)))), "i64"),
        num_targets = peri.tensor(each(mine, targets), "i64"), labels = peri.tensor((flat(asked))),
      }
    end,
  },
}

models.hstu_context = { file = "hstu", args = peri.util.copy(models.hstu.args), batch = function(mine, step)
  local batch = models.hstu.batch(mine, step)
  local function known(rows) return function(b) return { draw(step, 7 * b + rows, rows) } end end
  batch.sparse_features = peri.KeyedJaggedTensor.concat { batch.sparse_features, ids_of(mine, { { "country", known(5) },
    { "age", known(3) } }) }
  return batch
end }
models.hstu_context.args.max_seq_len = 14
models.hstu_context.args.context = { { name = "country", rows = 5 }, { name = "age", rows = 3 } }

-- -- training ---------------------------------------------------------------------------------------------------------

local entries = { plan.row_wise, function() return plan.table_wise(0) end, plan.column_wise, plan.data_parallel }

--- A plan of the module's collection: the kinds of sharding in turn.
local function plan_of(module, ranks)
  local all = {}
  for _, m in ipairs(module:named_modules()) do
    if peri.EmbeddingBagCollection.is(m.module) or peri.EmbeddingCollection.is(m.module) then
      all[m.path] = {}
      for i, t in ipairs(m.module.tables) do all[m.path][t.name] = entries[(i + ranks) % #entries + 1]() end
    end
  end
  return all
end

--- Give all weights their first values; how many numbers have got one.
local function set_weights(model, want)
  for _, p in ipairs(model.module:named_parameters()) do
    local shape = assert(want.parameters[p.name], p.name .. " is no parameter of PyTorch's")
    assert.same({ unpack(shape) }, p.tensor:shape(), p.name)
    peri.no_grad(function()
      p.tensor:copy(peri.tensor(start(p.name, p.tensor:numel()), "f32", nil, p.tensor:shape()))
    end)
  end
  for _, sharded in ipairs(model.sharded) do
    for _, s in ipairs(sharded:local_shards()) do
      local shape = assert(want.parameters["t/" .. s.table], s.table)
      local whole = peri.tensor(start("t/" .. s.table, shape[1] * shape[2]), "f32", nil, { unpack(shape) })
      s.state("weight"):copy(whole:slice(1, s.row_offset, s.row_offset + s.rows):slice(2, s.col_offset, s.col_offset
        + s.cols))
    end
  end
end

local function train(name, world, n)
  local case, want, losses = models[name], document.models[name], {}
  local args = { embedding_dim = DIM, learning_rate = LR, eps = EPS }
  for k, v in pairs(case.args) do args[k] = v end
  local module = dofile(("examples/models/%s.lua"):format(case.file or name))(args)
  local model = peri.DistributedModelParallel { module = module, plan = plan_of(module, n), group = world }
  set_weights(model, want)
  local optimizer = peri.nn.optim.Adagrad { params = model:named_parameters(), lr = LR, eps = EPS }
  local rank = world:rank()
  local mine = { first = math.floor(SAMPLES * rank / n), last = math.floor(SAMPLES * (rank + 1) / n) - 1 }
  for step = 1, STEPS do
    peri.scope(function()
      local loss = model(case.batch(mine, step))
      losses[step] = loss:item()
      optimizer:zero_grad()
      loss:backward()
      optimizer:step()
    end)
  end
  return losses
end

for _, name in ipairs { "two_tower", "deepfm", "din", "mmoe", "hstu", "hstu_context" } do
  for n, device in ipairs { devices[#devices], devices[1], "cpu" } do
    it(("%s.lua trains as PyTorch does, on %d rank(s), on %s"):format(name, n, device), function()
      local want = document.models[name].losses
      assert.is_true(math.abs(want[1] - want[STEPS]) > 1e-3) -- they are not all the same
      for _, losses in ipairs(sim.run(n, function(_, world) return train(name, world, n) end, { device = device })) do
        golden.assert_near({ unpack(want) }, losses, { abs = document.tolerance, rel = 0 }, name)
      end
    end)
  end
end

it("hstu.lua drops out while it is trained, and only then", function()
  local case = models.hstu
  local batch = case.batch({ first = 0, last = SAMPLES - 1 }, 1)
  local function losses(dropout)
    peri.nn.manual_seed(4)
    local args = peri.util.copy(case.args)
    args.dropout, args.embedding_dim = dropout, DIM
    local model = dofile "examples/models/hstu.lua"(args)
    model:eval()
    local known = model(batch):item()
    model:train()
    return { known, model(batch):item(), model(batch):item() }
  end
  local none, half = losses(0), losses(0.5)
  assert.same({ none[1], none[1], none[1] }, none)
  assert.equal(none[1], half[1])
  assert.is_true(half[2] ~= none[1] and half[3] ~= half[2])
end)

it("hstu.lua has at most 150 lines", function()
  local _, lines = shell.read "examples/models/hstu.lua":gsub("\n", "")
  assert.is_true(lines <= 150)
end)
