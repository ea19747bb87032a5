-- A model that is not the one that was saved: in a load in part, states of optimizers go with the weights.
local peri = require "perilune"
local shell = require "spec.support.shell"
local sim = require "perilune.dist.sim"
local nn, shard = peri.nn, peri.shard

--- A model with these tables and layers (own: the tables' own fused_params, by name), and its optimizers, whose states
--- are not the first ones.
local function trained(tables, layers, world, seed, own)
  nn.manual_seed(seed)
  local module = nn.Module()
  local configs, lists = {}, { keys = tables }
  for i, name in ipairs(tables) do
    configs[i] = peri.EmbeddingBagConfig { name = name, num_embeddings = 10, embedding_dim = 4,
      feature_names = { name } }
    lists[i] = { { i, 7 }, { 3 } }
  end
  module.ebc = peri.EmbeddingBagCollection { tables = configs, fused_params = { optimizer = "adagrad",
    learning_rate = seed / 10 }, table_fused_params = own }
  for _, name in ipairs(layers) do module[name] = nn.Linear { in_features = 4, out_features = 1 } end
  function module:forward(ids)
    local sum, pooled = 0, self.ebc(ids)
    for _, name in ipairs(layers) do
      for _, table_name in ipairs(tables) do sum = sum + self[name](pooled[table_name]):sum() end
    end
    return sum
  end
  local model = peri.DistributedModelParallel { module = module, group = world }
  local optimizer = nn.optim.Adam { params = nn.optim.select(model:named_parameters(), "^[xyz]"), lr = seed }
  local parts = { model = model, optimizer = optimizer }
  function parts.step()
    optimizer:zero_grad()
    model(peri.KeyedJaggedTensor.from_lists(lists)):backward()
    optimizer:step()
  end
  parts.step()
  return parts
end

--- name -> the numbers, of weights and of states.
local function numbers(parts)
  local all, model = {}, parts.model
  for name, tensor in pairs(shard.gather_state_dict(model:state_dict())) do all[name] = tensor:to_list() end
  for _, dict in ipairs { model:fused_optimizer():state_dict(), parts.optimizer:state_dict() } do
    for name, states in pairs(shard.gather_state_dict(dict).state) do
      for key, tensor in pairs(states) do all[name .. "/" .. key] = tensor:to_list() end
    end
  end
  return all
end

describe("a load in part", function()
  local folder, clean = shell.temporary()
  teardown(clean)
  for _, ranks in ipairs { 1, 2 } do
    it("takes states with the weights that it takes, and leaves them with the others: " .. ranks .. " ranks", function()
      local path, saved = folder .. "/" .. ranks, nil
      sim.run(1, function(_, world)
        local old = trained({ "a", "gone" }, { "x", "y" }, world, 1)
        peri.checkpoint.save(path, { model = old.model, optimizer = old.optimizer }, { group = world })
        saved = numbers(old)
      end)
      sim.run(ranks, function(_, world)
        local new = trained({ "fresh", "a" }, { "x", "z" }, world, 2)
        local before = numbers(new)
        peri.checkpoint.load(path, { model = new.model, optimizer = new.optimizer }, { group = world,
          except = { "model/ebc.embedding_bags.fresh.", "model/z." } })
        local n = 0
        for name, list in pairs(numbers(new)) do
          local stays = name:find "fresh" or name:find "^z%."
          assert.same(stays and before[name] or saved[name], list, name)
          n = n + 1
        end
        assert.equal(6 + 4 * 3 + 4, n) -- weights; of each of the layers' parameters three states; of each table two
        assert.equal(1, new.optimizer:lr()) -- numbers of groups are the checkpoint's
        assert.error_matches(function() -- without the weights nobody knows which states would fit
          peri.checkpoint.load(path, { optimizer = new.optimizer, model = new.model }, { group = world,
            only = { "optimizer" } })
        end, "'exp_avg' of parameter 'z.bias' is missing.*it has no parameter 'y.bias'")
        new.step()
      end)
    end)
  end

  it("leaves states out by name: another optimizer trains these weights from now on", function()
    local path = folder .. "/other"
    sim.run(1, function(_, world)
      local old = trained({ "a", "b" }, { "x", "y" }, world, 1)
      peri.checkpoint.save(path, { model = old.model, optimizer = old.optimizer }, { group = world })
      local saved = numbers(old)
      local new = trained({ "a", "b" }, { "x", "y" }, world, 2, { a = { optimizer = "adam", learning_rate = 0.5 } })
      local before = numbers(new)
      peri.checkpoint.load(path, { model = new.model, optimizer = new.optimizer }, { group = world,
        except = { "model.tables/state/ebc.embedding_bags.a.", "optimizer/state/y." } })
      for name, list in pairs(numbers(new)) do
        local stays = name:find "%.a%.weight/" or name:find "^y%..*/"
        assert.same(stays and before[name] or saved[name], list, name)
      end
      local rates = {}
      for _, group in ipairs(new.model:fused_optimizer().param_groups) do rates[group.optimizer] = group.lr end
      assert.same({ adagrad = 0.1, adam = 0.5 }, rates)
      new.step()
    end)
  end)

  -- Both models and the checkpoint have what stays: its states must not become those of other weights.
  it("leaves the states and averages of weights that stay, and finds averages by the names of parameters", function()
    local path = folder .. "/averages"
    --- Layers of one shape, whose averages and first moments are `number`.
    local function parts_of(names, bare, number)
      local module = nn.Module()
      for _, name in ipairs(names) do module[name] = nn.Linear { in_features = 1, out_features = 1, bias = false } end
      local params = bare and module:parameters() or module:named_parameters()
      local optimizer = nn.optim.Adam { params = params }
      local _, average_of, averages = peri.pipeline.ema { params = params }
      peri.no_grad(function()
        for i, name in ipairs(names) do
          average_of(module[name].weight):fill(number + i)
          optimizer:state_dict().state[bare and tostring(i - 1) or name .. ".weight"].exp_avg:fill(number + i)
        end
      end)
      return { model = module, averages = averages, optimizer = optimizer }, function(name)
        local moment = optimizer:state_dict().state[bare and tostring(peri.util.index_of(names)[name] - 1)
          or name .. ".weight"].exp_avg
        return { average_of(module[name].weight):item(0), moment:item(0) }
      end
    end
    for _, bare in ipairs { false, true } do
      peri.checkpoint.save(path, (parts_of({ "a", "b" }, bare, 0)), { replace = true })
      --- What each layer has after a load: its average, and its first moment.
      local function has(names, options, wanted)
        local parts, of = parts_of(names, bare, 10)
        peri.checkpoint.load(path, parts, options)
        assert.same(wanted, peri.util.map(names, of))
      end
      has({ "b", "a" }, nil, { { 2, 2 }, { 1, 1 } })
      has({ "a", "new", "b" }, { except = { "model/new." } }, { { 1, 1 }, { 12, 12 }, { 2, 2 } })
      has({ "a", "new" }, { except = { "model/new.", "averages/new.", "model/b." } }, { { 1, 1 }, { 12, 12 } })
      has({ "b", "a" }, { except = { "model/b." } }, { { 11, 11 }, { 1, 1 } })
      has({ "b", "a" }, { only = { "model/a.", "averages/a.", "optimizer" } }, { { 11, 11 }, { 1, 1 } })
      has({ "b", "a" }, { except = { "averages/a." } }, { { 2, 2 }, { 12, 1 } })
      has({ "b", "x" }, { rename = { ["model/a."] = "model/x.", ["averages/a."] = "averages/x.",
        ["optimizer/state/a."] = "optimizer/state/x." } }, { { 2, 2 }, { 1, 1 } })
      -- Whole names do as well, if all states of a parameter have them.
      local rename, c = {}, peri.checkpoint.open(path)
      for _, name in ipairs(c:names()) do
        if name:find "/a%." then rename[name] = name:gsub("/a%.", "/x.") end
      end
      c:close()
      has({ "b", "x" }, { rename = rename }, { { 2, 2 }, { 1, 1 } })
      rename["optimizer/state/a.weight/exp_avg"] = nil
      assert.error_matches(function() has({ "b", "x" }, { rename = rename }, {}) end,
        "rename makes both 'a.weight' and 'x.weight' of parameter 'a.weight' of 'optimizer'")
    end
  end)

  it("says that a part raised an error, also one without a message", function()
    local path, raised = folder .. "/raises", false
    local part = { state_dict = function() return { n = 1 } end, load_state_dict = function() error(raised, 0) end }
    peri.checkpoint.save(path, { part = part })
    for _, case in ipairs { { nil, "an error without a message" }, { false, "an error without a message" },
      { "full", "full" } } do
      raised = case[1]
      assert.error_matches(function() peri.checkpoint.load(path, { part = part }) end,
        "part 'part' is loaded in part only: " .. case[2], 1, true)
    end
  end)

  it("objects of the user get the tensors that they gave, of any size", function()
    for ranks = 1, 2 do
      local path = ("%s/own-%d"):format(folder, ranks)
      sim.run(ranks, function(rank, world)
        local given = { few = peri.arange(2), many = peri.arange(5):to "f32" + rank, { deep = peri.zeros { 0, 3 } } }
        local function object(of_ranks, dict)
          return { of_ranks = of_ranks, state_dict = function() return dict end,
            load_state_dict = function(self, x) self.got = x end }
        end
        peri.checkpoint.save(path, { own = object(true, given), all = object(nil, { x = peri.arange(7) }) },
          { group = world })
        local own, all = object(true), object()
        peri.checkpoint.load(path, { own = own, all = all }, { group = world })
        assert.same({ { 0, 1 }, { rank, rank + 1, rank + 2, rank + 3, rank + 4 }, { 0, 3 }, 7 },
          { own.got.few:to_list(), own.got.many:to_list(), own.got[1].deep:shape(), all.got.x:numel() })
        own.got.many:fill(3) -- it is the object's
      end)
    end
  end)

  it("refuses what a state_dict cannot have, and names that are no part's", function()
    local dict = { x = peri.zeros { 3 } }
    local part = { state_dict = function() return dict end, load_state_dict = function() end }
    peri.checkpoint.save(folder .. "/odd", { part = part })
    for _, name in ipairs { "", "x", "/x" } do
      assert.error_matches(function()
        peri.checkpoint.load(folder .. "/odd", { part = part }, { rename = { ["part/x"] = name } })
      end, ("rename makes '%s' of 'part/x', wanted a part's name and '/' in front"):format(name), 1, true)
    end
    dict.itself = dict
    assert.error_matches(function() peri.checkpoint.save(folder .. "/deep", { part = part }) end,
      "is nested deeper than 60 tables, or contains itself", 1, true)
    dict.itself = { peri.nn.Linear { in_features = 1, out_features = 1 } }
    assert.error_matches(function() peri.checkpoint.save(folder .. "/object", { part = part }) end,
      "'part/itself/#1' of a state_dict is", 1, true)
  end)
end)
