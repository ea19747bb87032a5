-- Feature processors: TorchRec's own results, processors of one's own, and what they refuse; on both devices.
local peri = require "perilune"
local golden = require "spec.support.golden"
local embed = peri.embed

--- A parameter with these numbers.
local function set(parameter, tensor) parameter:detach():copy(tensor) end

local function refuses(words, f)
  local ok, err = pcall(f)
  assert.is_false(ok, words)
  assert.truthy(tostring(err):find(words, 1, true), tostring(err))
end

for _, device in ipairs { "cpu", "opaque" } do
  local function t(list, dtype) return peri.tensor(list, dtype, device, { #list }) end
  local function batch(more)
    local a = { keys = { "x", "f", "g" }, values = t({ 1, 2, 3, 4, 5, 6 }, "i64"),
      lengths = t({ 1, 0, 2, 1, 0, 2 }, "i32") }
    for key, value in pairs(more or {}) do a[key] = value end
    return peri.KeyedJaggedTensor(a)
  end
  local function positions(lengths, class)
    return embed[class or "PositionWeightedModuleCollection"] { max_feature_lengths = lengths, device = device }
  end

  describe("feature processors on " .. device, function()
    it("reproduce position_weighted", function()
      local case = golden.load "ops/embedding/position_weighted"
      local module = embed.PositionWeightedModule { max_feature_length = case.args.max_feature_length, device = device }
      assert.same(peri.ones({ 9 }, "f32", device):to_list(), module.position_weight:to_list())
      set(module.position_weight, case:tensor("in.position_weight", device))
      local result = module(peri.JaggedTensor { values = case:tensor("in.values", device),
        lengths = case:tensor("in.lengths", device) })
      case:assert_near("out.weights", result:weights())
      assert.same(case:list "in.values", result:values():to_list())
      result:weights():backward(case:tensor("in.grad_weights", device))
      case:assert_near("grad.position_weight", module.position_weight:grad())
    end)

    for _, name in ipairs(golden.names("sharded", "^position_weight_")) do
      it("reproduce " .. name, function()
        local case = golden.load(name)
        local module = positions(case.max_feature_lengths, case.processor)
        assert.is_true(embed.BaseGroupedFeatureProcessor.is(module))
        for _, p in ipairs(module:named_parameters()) do
          set(p.tensor, case:tensor(("position_weight/%s/init"):format(p.name:match "^position_weights%.(.*)"), device))
        end
        local given = case.positions_given and case:tensor("input/weights", device) or nil
        local result = module(peri.KeyedJaggedTensor { keys = case.kjt_keys,
          values = case:tensor("input/values", device), lengths = case:tensor("input/lengths", device),
          weights = given })
        case:assert_near("output/weights", result:weights())
        result:weights():backward(case:tensor("grad_output", device))
        for _, key in ipairs(case.kjt_keys) do
          case:assert_near(("position_weight/%s/grad"):format(key), module["position_weights." .. key]:grad())
        end
      end)
    end

    it("leave the collection its optimizer", function()
      local ebc = peri.EmbeddingBagCollection { is_weighted = true, device = device,
        fused_params = { optimizer = "sgd", learning_rate = 0.5 },
        tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = 4, embedding_dim = 4,
          feature_names = { "f" } } } }
      local fp = embed.FeatureProcessedEmbeddingBagCollection { embedding_bag_collection = ebc,
        feature_processors = positions { f = 3 } }
      assert.equal(0.5, fp:fused_optimizer():lr())
    end)

    it("reproduce fp_ebc, as a collection and one for each feature", function()
      local case = golden.load "ops/embedding/fp_ebc"
      local single = {}
      for name, length in pairs(case.args.max_feature_lengths) do
        single[name] = embed.PositionWeightedModule { max_feature_length = length, device = device }
      end
      for _, processors in ipairs { positions(case.args.max_feature_lengths), single } do
        local ebc = peri.EmbeddingBagCollection { is_weighted = true, device = device,
          tables = peri.util.map(case.args.tables, function(x)
          return peri.EmbeddingBagConfig { name = x.name, embedding_dim = x.dim, num_embeddings = x.rows,
            feature_names = x.features }
        end) }
        local fp = embed.FeatureProcessedEmbeddingBagCollection { embedding_bag_collection = ebc,
          feature_processors = processors }
        local names, of = {}, function(name) return name:match "%.(f%d)" end
        for _, p in ipairs(fp:named_parameters()) do
          names[#names + 1] = p.name
          set(p.tensor, of(p.name) and case:tensor("in.position." .. of(p.name), device)
            or case:tensor("in." .. p.name:match "%.(t%d%.weight)$", device))
        end
        assert.equal("_embedding_bag_collection.embedding_bags.t0.weight", names[1])
        assert.equal(processors == single and "_feature_processors.f0.position_weight"
          or "_feature_processors.position_weights.f0", names[4])
        local kt = fp(peri.KeyedJaggedTensor { keys = case.args.keys,
          values = case:tensor("in.features.values", device), lengths = case:tensor("in.features.lengths", device) })
        assert.same(case.args.out_keys, kt:keys())
        case:assert_near("out.values", kt:values())
        kt:values():backward(case:tensor("in.grad_values", device))
        for _, p in ipairs(fp:named_parameters()) do
          case:assert_near(of(p.name) and "grad.position." .. of(p.name) or "grad." .. p.name:match "%.(t%d%.weight)$",
            p.tensor:grad())
        end
      end
    end)

    it("leave features without a length alone, in any order and with variable batches", function()
      local module = positions { g = 2, f = 3 }
      set(module["position_weights.f"], t { 2, 3, 4 })
      set(module["position_weights.g"], t { 5, 6 })
      assert.same({ 1, 2, 3, 2, 5, 6 }, module(batch()):weights():to_list())
      local variable = module(batch { keys = { "f", "x", "g" }, lengths = t({ 3, 0, 1, 2 }, "i32"),
        stride_per_key_per_rank = { { 1 }, { 2 }, { 1 } },
        inverse_indices = { { "f", "x", "g" }, peri.zeros({ 3, 2 }, "i64", device) } })
      assert.same({ 2, 3, 4, 1, 5, 6 }, variable:weights():to_list())
      assert.same({ 1, 2, 1 }, variable:stride_per_key())
      assert.same({ 3, 2 }, variable:inverse_indices()[2]:shape())
      local empty = module(batch { values = t({}, "i64"), lengths = t({}, "i32") })
      assert.same({ 0 }, empty:weights():shape())
    end)

    it("may be one's own, for a feature and for a batch", function()
      local Scale = embed.FeatureProcessor:extend "Scale"
      function Scale:init() self.scale = peri.nn.Parameter(t { 3 }) end
      function Scale:forward(jt) return jt:with_weights(self.scale:expand { jt:values():numel() }) end
      local ByLength = embed.FeatureProcessorsCollection:extend "ByLength"
      function ByLength:init() self.slope = peri.nn.Parameter(t { 0.5 }) end
      function ByLength:forward(kjt) -- luacheck: ignore 432
        return kjt:with_weights(kjt:values():to "f32" * self.slope)
      end
      local ebc = peri.EmbeddingBagCollection { is_weighted = true, device = device,
        tables = { peri.EmbeddingBagConfig { name = "t", embedding_dim = 1, num_embeddings = 9,
          feature_names = { "f", "g" }, init_fn = embed.constant(2) } } }
      local function new(processors)
        return embed.FeatureProcessedEmbeddingBagCollection { embedding_bag_collection = ebc,
          feature_processors = processors }
      end
      local scale, slope = Scale {}, ByLength {}
      local kt = new({ g = scale })(batch())
      assert.same({ { 4, 0 }, { 2, 12 } }, kt:values():to_table())
      peri.nn.functional.sum(kt:values()):backward()
      assert.same({ 4 }, scale.scale:grad():to_list()) -- two ids of g, rows of 2
      kt = new(slope)(batch())
      assert.same({ { 5, 0 }, { 4, 11 } }, kt:values():to_table())
      peri.nn.functional.sum(kt:values()):backward()
      assert.same({ 40 }, slope.slope:grad():to_list()) -- 2 * (2 + 3 + 4 + 5 + 6): id 1, of x, is not looked up
    end)

    it("refuse what they cannot do, by name", function()
      local class = embed.PositionWeightedModuleCollection
      refuses("PositionWeightedModule: max_feature_length is 0, allowed: ",
        function() embed.PositionWeightedModule { max_feature_length = 0 } end)
      refuses("max_feature_lengths['f'] is 1.5", function() class { max_feature_lengths = { f = 1.5 } } end)
      refuses("max_feature_lengths['f'] is -1", function() class { max_feature_lengths = { f = -1 } } end)
      refuses("max_feature_lengths['f'] is ", function() class { max_feature_lengths = { f = "long" } } end)
      refuses("max_feature_lengths is no map", function() class { max_feature_lengths = {} } end)
      refuses("max_feature_lengths is no map", function() class { max_feature_lengths = { 3, 4 } } end)
      refuses("no argument 'max_lengths'", function() class { max_lengths = {} } end)
      refuses("sample 1 of feature 'g' has 2 ids, allowed: 0..1", function() positions({ g = 1 })(batch()) end)
      refuses("sample 2 of the batch has 3 ids, allowed: 0..2", function()
        embed.PositionWeightedModule({ max_feature_length = 2,
          device = device })(peri.JaggedTensor { values = t({ 1, 2, 3, 4 }, "i64"), lengths = t({ 1, 0, 3 }, "i32") })
      end)
      refuses("the batch has no feature 'h'; those are: x, f, g", function() positions({ h = 1 })(batch()) end)
      refuses("feature 'x' of the batch has no entry in max_feature_lengths; those are: f, g",
        function() positions({ f = 2, g = 2 }, "GroupedPositionWeightedModule")(batch()) end)
      refuses("the weight of id 1 of feature 'f', its place, is 2, allowed: whole numbers 0..1", function()
        positions({ x = 1, f = 2, g = 2 }, "GroupedPositionWeightedModule")(batch { weights = t { 0, 0, 2, 0, 0, 0 } })
      end)
      refuses("the batch has weights already", function()
        positions({ f = 2 })(batch { weights = t { 0, 0, 2, 0, 0, 0 } })
      end)
      refuses("features is a table, wanted a KeyedJaggedTensor", function() positions({ f = 2 })({}) end)
      refuses("wanted a JaggedTensor", function()
        embed.PositionWeightedModule({ max_feature_length = 2, device = device })(batch())
      end)
      refuses("wanted a FeatureProcessor", function()
        embed.FeatureProcessorDictWrapper { feature_processors = { f = peri.nn.ReLU {} } }
      end)
    end)

    it("and a collection behind them: refuse what does not fit", function()
      local function ebc(weighted)
        return peri.EmbeddingBagCollection { is_weighted = weighted, device = device,
          tables = { peri.EmbeddingBagConfig { name = "t", embedding_dim = 1, num_embeddings = 9,
            feature_names = { "f", "g" } } } }
      end
      local function new(collection, processors)
        return embed.FeatureProcessedEmbeddingBagCollection { embedding_bag_collection = collection,
          feature_processors = processors }
      end
      refuses("embedding_bag_collection is not weighted", function() new(ebc(false), positions { f = 2 }) end)
      refuses("embedding_bag_collection is a table", function() new({}, positions { f = 2 }) end)
      refuses("feature_processors has feature 'h', which no table has; those are: f, g", function()
        new(ebc(true), positions { h = 2 })
      end)
      refuses("feature_processors is", function() new(ebc(true), peri.nn.ReLU {}) end)
      refuses("features is nil, wanted a KeyedJaggedTensor", function() new(ebc(true), positions { f = 2 })() end)
      local Nothing = embed.FeatureProcessor:extend "Nothing"
      function Nothing:forward(jt) return jt end -- luacheck: ignore 212
      refuses("Nothing of feature 'f' returned", function() new(ebc(true), { f = Nothing {} })(batch()) end)
      local Short = embed.FeatureProcessorsCollection:extend "Short"
      function Short:forward(kjt) return kjt end -- luacheck: ignore 212
      refuses("Short returned", function() new(ebc(true), Short {})(batch()) end)
    end)
  end)
end
