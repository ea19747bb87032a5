-- table_fused_params: tables of one collection with optimizers of their own. The law: a table is trained as in a
-- collection of its own with that optimizer, bit for bit, under every plan.
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local nn, plan = peri.nn, peri.plan

local COMMON = { optimizer = "rowwise_adagrad", learning_rate = 0.1, exact = true }
local OWN = { b = { optimizer = "adam", learning_rate = 0.02, exact = true },
  d = { optimizer = "sgd", learning_rate = 0.5, exact = true }, e = { optimizer = "none" } }
local ROWS = { a = 20, b = 31, c = 12, d = 17, e = 9 }
local kinds = {
  bags = { "EmbeddingBagCollection", "EmbeddingBagConfig" }, rows = { "EmbeddingCollection", "EmbeddingConfig" } }

local function collection(kind, names, params, own)
  local classes = kinds[kind]
  return peri[classes[1]] { fused_params = params, table_fused_params = own, tables = peri.util.map(names, function(n)
    return peri[classes[2]] { name = n, num_embeddings = ROWS[n], embedding_dim = 8, feature_names = { "f" .. n },
      init_fn = peri.embed.constant(ROWS[n] / 64) }
  end) }
end

--- One collection of all tables, or (apart) one for each.
local Net = nn.Module:extend "Net"
function Net:init(kind, apart)
  self.names = { "a", "b", "c", "d", "e" }
  if not apart then self.all = collection(kind, self.names, COMMON, OWN) end
  for _, name in ipairs(apart and self.names or {}) do self[name] = collection(kind, { name }, OWN[name] or COMMON) end
end
function Net:forward(kjt, factors)
  local loss, all
  if self.all then all = peri.util.resolve(self.all(kjt)) end
  for _, name in ipairs(self.names) do
    local out = all or peri.util.resolve(self[name](kjt))
    local key = "f" .. name
    local rows = out.to_dict and out:to_dict()[key] or out[key]:values()
    loss = (loss or 0) + (rows * factors[name]:slice(1, 0, rows:size(1))):sum()
  end
  return loss
end

local entries = {
  function(n) return { a = plan.row_wise(), b = plan.column_wise { ranks = { 0, n - 1 } }, c = plan.table_wise(n - 1),
    d = plan.data_parallel(), e = plan.row_wise() } end,
  function(n) return { a = plan.table_wise(n - 1), b = plan.row_wise(), c = plan.data_parallel(),
    d = plan.table_wise(0), e = plan.data_parallel() } end,
}

local function batch(step, rank)
  local values, lengths, factors = {}, {}, {}
  for i, name in ipairs { "a", "b", "c", "d", "e" } do
    for s = 1, 3 do
      for k = 1, s - 1 do values[#values + 1] = (step * 5 + rank * 3 + i * s + k) % ROWS[name] end
      lengths[#lengths + 1] = s - 1
    end
    local list = {}
    for k = 1, 24 do list[k] = ((step * 7 + i * k * 5 + rank) % 63 - 31) / 32 end
    factors[name] = peri.tensor(list, "f32", "cpu", { 3, 8 })
  end
  return peri.KeyedJaggedTensor { keys = { "fa", "fb", "fc", "fd", "fe" }, values = peri.tensor(values, "i64"),
    lengths = lengths }, factors
end

--- Weights and states of optimizers after some steps, by table.
local function learned(world, kind, apart, way, halve)
  local of, wrapped = entries[way](world:size()), {}
  for name, entry in pairs(of) do wrapped[name] = { [name] = entry } end
  local model = peri.DistributedModelParallel { module = Net(kind, apart), group = world,
    plan = apart and wrapped or { all = of } }
  local optimizer = model:fused_optimizer()
  for step = 1, 6 do
    if halve and step == 4 then
      for _, group in ipairs(optimizer.param_groups) do group.lr = group.lr / 2 end
    end
    model(batch(step, world:rank())):backward()
  end
  local result = {}
  for name, x in pairs(peri.shard.gather_state_dict(model:state_dict())) do
    result[name:match "[abcde]%.weight$"] = x:to_list()
  end
  for name, states in pairs(peri.shard.gather_state_dict(optimizer:state_dict()).state) do
    for key, x in pairs(states) do result[name:match "[abcde]%.weight$" .. key] = x:to_list() end
  end
  return result
end

describe("table_fused_params", function()
  for kind in peri.util.ordered(kinds) do
    for ranks = 1, 3 do
      it(("trains each table as a collection of its own would: %s, %d ranks"):format(kind, ranks), function()
        sim.run(ranks, function(rank, world)
          for way = 1, 2 do
            local apart = learned(world, kind, true, way, way == 2)
            if rank == 0 then assert.truthy(apart["a.weight"] and apart["b.weightb.momentum2"]) end
            assert.same(apart, learned(world, kind, false, way, way == 2))
          end
        end)
      end)
    end
  end

  it("is planned by each table's own optimizer", function()
    local described = plan.describe.of(Net "bags")
    assert.equal("adam", described[1].optimizers.b)
    sim.run(2, function(_, world) -- without a plan
      local model = peri.DistributedModelParallel { module = Net("bags"), group = world }
      assert.same({ "rowwise_adagrad", "adam", "sgd", "none" },
        peri.util.map(model:fused_optimizer().param_groups, function(g) return g.optimizer end))
    end)
  end)

  for _, kind in ipairs { "table_wise", "row_wise", "data_parallel" } do
    it("of optimizer none leaves rows, and gives the ids' weights their gradients: " .. kind, function()
      sim.run(2, function(_, world)
        local ebc = peri.shard.ShardedEmbeddingBagCollection { group = world, fused_params = COMMON, is_weighted = true,
          table_fused_params = { a = { optimizer = "none" } }, plan = { a = plan[kind](), b = plan.table_wise(1) },
          gradient_division = false, tables = peri.util.map({ "a", "b" }, function(name)
            return peri.EmbeddingBagConfig { name = name, num_embeddings = 4, embedding_dim = 8,
              feature_names = { "f" .. name }, init_fn = peri.embed.constant(0.5) }
          end) }
        local weights = peri.tensor({ 1, 2, 3 }, "f32"):requires_grad()
        local kjt = peri.KeyedJaggedTensor { keys = { "fa", "fb" }, values = { 1, 2, 3 }, lengths = { 2, 1 },
          weights = weights }
        ebc(kjt):values():sum():backward()
        assert.same({ 4, 4, 4 }, weights:grad():to_list()) -- eight numbers of 0.5
        local state = peri.shard.gather_state_dict(ebc:state_dict())
        assert.equal(0.5, state["embedding_bags.a.weight"]:min():item())
        assert.is_true(state["embedding_bags.b.weight"]:min():item() < 0.5)
      end)
    end)
  end

  it("says what it is not for", function()
    local ebc = collection("bags", { "a", "b" }, COMMON, { b = OWN.b })
    local kjt = peri.KeyedJaggedTensor { keys = { "fa", "fb" }, values = { 1, 2 }, lengths = { 1, 1 } }
    assert.error_matches(function() ebc(kjt) end, "table_fused_params%) are trained in a DistributedModelParallel")
    assert.error_matches(function() ebc:set_learning_rate(1) end, "are trained in a DistributedModelParallel")
    assert.is_nil(ebc:fused_optimizer())
    assert.same({ 1, 16 }, peri.no_grad(function() return ebc(kjt):values():shape() end))
    assert.error_matches(function() collection("bags", { "a" }, COMMON, { x = OWN.b }) end,
      "table_fused_params of table 'x', which does not exist; tables: a")
    assert.error_matches(function() collection("bags", { "a" }, COMMON, { a = { optimizer = "adum" } }) end,
      "table_fused_params of table 'a': optimizer is 'adum'")
    assert.error_matches(function() collection("bags", { "a" }, nil, { a = OWN.b }) end, "give both")
  end)
end)
