-- EmbeddingBagCollection and its configuration, on both devices; TorchRec's own results.
local peri = require "perilune"
local golden = require "spec.support.golden"
local jit_support = require "spec.support.jit"
local embed = peri.embed
local Config, Collection = peri.EmbeddingBagConfig, peri.EmbeddingBagCollection
local C = peri.ffi.C

local function config(more)
  local a = { name = "t", embedding_dim = 4, num_embeddings = 10, feature_names = { "f" } }
  for key, value in pairs(more or {}) do a[key] = value end
  return Config(a)
end

describe("fields of a configuration that were assigned", function()
  it("are checked as those that were given", function()
    for field, value in pairs { pooling = "MAX", num_embeddings = 5.5, embedding_dim = 0, feature_names = {},
      data_type = "FP99", name = 7, init_fn = 5, weight_init_max = "x" } do
      for kind, collection in pairs { [peri.EmbeddingBagConfig] = peri.EmbeddingBagCollection,
        [peri.EmbeddingConfig] = peri.EmbeddingCollection } do
        local c = kind { name = "t", embedding_dim = 4, num_embeddings = 10, feature_names = { "f" } }
        if field ~= "pooling" or kind == peri.EmbeddingBagConfig then
          c[field] = value
          assert.error_matches(function() collection { tables = { c } } end, field)
        end
      end
    end
  end)
end)

describe("start values", function()
  for words, f in pairs {
    ["uniform: low is 2, high is 1, allowed: low <= high"] = function() embed.uniform(2, 1) end,
    ["uniform: high is nan, allowed: finite numbers"] = function() embed.uniform(2, tonumber "nan") end,
    ["normal: deviation is -1, allowed: numbers >= 0"] = function() embed.normal(0, -1) end,
    ["constant: value is inf, allowed: finite numbers"] = function() embed.constant(math.huge) end,
    ["weight_init_min is 2, weight_init_max is 1, allowed: min <= max"] = function()
      config { weight_init_min = 2, weight_init_max = 1 }
    end,
  } do
    it("refuse: " .. words, function()
      local ok, err = pcall(f)
      assert.is_false(ok)
      assert.truthy(tostring(err):find(words, 1, true), tostring(err))
    end)
  end
end)

describe("fused_params", function()
  it("refuse numbers that are none, or that f32 does not hold", function()
    local function refused(params, words)
      params.optimizer = "sgd"
      local ok, err = pcall(function() Collection { tables = { config() }, fused_params = params }:materialise() end)
      assert.is_false(ok, words)
      assert.truthy(tostring(err):find(words, 1, true), tostring(err))
    end
    for _, rate in ipairs { -1, math.huge, 1e60, 0 / 0 } do
      refused({ learning_rate = rate }, ("fused_params: learning_rate %s, allowed: finite numbers >= 0"):format(rate))
    end
    -- 0 stands for "off" where kernels get it
    refused({ max_norm = 1e-60 }, "max_norm 1e-60, allowed: finite numbers >= 0, also as f32")
    for _, most in ipairs { 0, -1, 1e60, 0 / 0 } do
      refused({ gradient_clipping = true, max_gradient = most },
        ("fused_params: max_gradient %s, allowed with gradient_clipping: finite numbers above 0"):format(most))
    end
  end)
end)

describe("EmbeddingBagConfig", function()
  it("knows TorchRec's fields and defaults", function()
    local c = config()
    assert.equal("SUM", c.pooling)
    assert.equal("FP32", c.data_type)
    assert.equal(1, c:num_features())
    assert.near(-math.sqrt(0.1), c:get_weight_init_min(), 1e-15)
    assert.near(math.sqrt(0.1), c:get_weight_init_max(), 1e-15)
    assert.equal(0.5, config { weight_init_max = 0.5 }:get_weight_init_max())
    assert.same({ "f", "g" }, config { feature_names = { "f", "g" } }.feature_names)
  end)

  it("refuses what makes no table", function()
    local function refused(more, message) assert.error_matches(function() config(more) end, message) end
    refused({ name = "" }, "name is '', allowed: a text")
    refused({ embedding_dim = 0 }, "'t': embedding_dim is 0")
    refused({ embedding_dim = 1.5 }, "embedding_dim is 1.5")
    refused({ num_embeddings = 0 }, "num_embeddings is 0")
    refused({ feature_names = {} }, "feature_names is no list")
    refused({ feature_names = { "f", "f" } }, "feature 'f' is listed twice")
    refused({ feature_names = { "f", 3 } }, "'3' is no feature name")
    refused({ pooling = "MAX" }, "pooling is 'MAX', allowed: MEAN, SUM")
    refused({ data_type = "FP33" }, "data_type is 'FP33', allowed: ")
    refused({ init_fn = function() end }, "init_fn, allowed: embed.uniform")
    refused({ init_fn = embed.constant(1), weight_init_max = 1 }, "exclude each other")
    refused({ dim = 4 }, "no argument 'dim'; allowed: .*embedding_dim")
    assert.error_matches(function() Config { name = "t" } end, "argument 'embedding_dim' is missing")
  end)
end)

local function kjt_of(case, prefix, device, weighted)
  return peri.KeyedJaggedTensor {
    keys = case.args.keys, values = case:tensor(prefix .. "values", device),
    lengths = case:tensor(prefix .. "lengths", device), weights = weighted or nil,
  }
end

for _, device in ipairs { "cpu", "opaque" } do
  local function t(list, dtype) return peri.tensor(list, dtype, device) end

  describe("EmbeddingBagCollection on " .. device, function()
    for _, name in ipairs(golden.names("ops/embedding", "^ebc")) do
      it("reproduces " .. name, function()
        local case = golden.load(name)
        local tables = peri.util.map(case.args.tables, function(x)
          return Config { name = x.name, embedding_dim = x.dim, num_embeddings = x.rows, feature_names = x.features,
            pooling = x.pooling:upper() }
        end)
        local weights = case:tensor("in.features.weights", device)
        if weights then weights:requires_grad() end
        local ebc = Collection { tables = tables, is_weighted = case.args.is_weighted, device = device }
        for _, x in ipairs(case.args.tables) do
          ebc:weight(x.name):copy(case:tensor("in." .. x.name .. ".weight", device))
        end
        local kt = ebc(kjt_of(case, "in.features.", device, weights))
        assert.same(case.args.out_keys, kt:keys())
        assert.same(case.args.out_length_per_key, kt:length_per_key())
        case:assert_near("out.values", kt:values())
        kt:values():backward(case:tensor("in.grad_values", device))
        for i, p in ipairs(ebc:named_parameters()) do
          local x = case.args.tables[i]
          assert.equal("embedding_bags." .. x.name .. ".weight", p.name)
          case:assert_near("grad." .. x.name .. ".weight", p.tensor:grad())
        end
        if weights then case:assert_near("grad.features.weights", weights:grad()) end
      end)
    end

    local function features(more)
      local a = { keys = { "x", "g", "f" }, values = t({ 1, 2, 3, 4, 5, 6 }, "i64"),
        lengths = t({ 1, 0, 2, 1, 0, 2 }, "i32") }
      for key, value in pairs(more or {}) do a[key] = value end
      return peri.KeyedJaggedTensor(a)
    end
    local function ones(tables, more)
      local a = { tables = tables, device = device, fused_params = { optimizer = "sgd", learning_rate = 0.5 } }
      for key, value in pairs(more or {}) do a[key] = value end
      return Collection(a)
    end
    local one = embed.constant(1)

    it("takes features of any batch by name, also when keys and batch change", function()
      local ebc = ones { config { feature_names = { "f", "g" }, init_fn = one },
        config { name = "u", embedding_dim = 1, init_fn = one } }
      assert.same({ "f@t", "g", "f@u" }, ebc:embedding_names())
      assert.same({ 4, 4, 1 }, ebc:embedding_dims())
      assert.same({ "f", "g" }, ebc:feature_names())
      local kt = ebc(features())
      assert.same({ { 0, 0, 0, 0, 2, 2, 2, 2, 0 }, { 2, 2, 2, 2, 1, 1, 1, 1, 2 } }, kt:values():to_table())
      kt = ebc(features { keys = { "f", "g", "x" } })
      assert.same({ { 1, 1, 1, 1, 2, 2, 2, 2, 1 }, { 0, 0, 0, 0, 1, 1, 1, 1, 0 } }, kt:values():to_table())
      kt = ebc(features { keys = { "f", "g" }, lengths = t({ 1, 1, 1, 0, 3, 0 }, "i32") })
      assert.same({ { 1 }, { 1 }, { 1 } }, kt:get("f@u"):to_table())
      assert.same({ 3, 4 }, kt:get("g"):shape())
      kt = ebc(features { values = t({}, "i64"), lengths = t({}, "i32") })
      assert.same({ 0, 9 }, kt:values():shape())
    end)

    it("expands a variable batch by its inverse indices", function()
      local ebc = ones { config { feature_names = { "f", "g" }, embedding_dim = 2, init_fn = one },
        config { name = "u", init_fn = one } }
      ebc:weight("t"):slice(1, 3, 4):fill(10)
      ebc:weight("u"):slice(1, 7, 8):fill(5)
      local function batch(inverse)
        return peri.KeyedJaggedTensor {
          keys = { "g", "f" }, values = t({ 1, 3, 7, 3 }, "i64"), lengths = t({ 1, 1, 0, 1, 1 }, "i32"),
          stride_per_key_per_rank = { { 3 }, { 2 } }, inverse_indices = { { "f", "g" }, t(inverse, "i64") },
        }
      end
      local kt = ebc(batch { { 0, 0, 1, 0 }, { 2, 1, 1, 0 } })
      assert.same({ "f@t", "g", "f@u" }, kt:keys())
      assert.same({ { 1, 1, 0, 0, 5, 5, 5, 5 }, { 1, 1, 10, 10, 5, 5, 5, 5 }, { 10, 10, 10, 10, 1, 1, 1, 1 },
        { 1, 1, 1, 1, 5, 5, 5, 5 } }, kt:values():to_table())
      kt:values():backward(t { { 1, 0, 8, 0, 0, 0, 0, 0 }, { 2, 0, 16, 0, 0, 0, 0, 0 }, { 4, 0, 32, 0, 64, 0, 0, 0 },
        { 0, 0, 0, 0, 0, 0, 0, 1 } })
      local w = ebc:weight("t"):to_table() -- learning rate 0.5
      assert.same({ 1 - 0.5 * 3, 1 }, w[8]) -- f, row 0 of its batch
      assert.same({ 10 - 0.5 * (4 + 48), 10 }, w[4]) -- f, row 1; g, row 1
      assert.same({ 1, 1 }, w[2])
      assert.same({ 1 - 32, 1, 1, 1 }, ebc:weight("u"):to_table()[4])
      assert.same({ 5, 5, 5, 4.5 }, ebc:weight("u"):to_table()[8])
      assert.error_matches(function() ebc(batch { { 0, 2, 1, 0 }, { 2, 1, 1, 0 } }) end,
        "'f', sample 1: inverse index 2, allowed: 0%.%.1")
      assert.error_matches(function()
        ebc(peri.KeyedJaggedTensor {
          keys = { "g", "f" }, values = t({ 1 }, "i64"), lengths = t({ 1, 0, 0 }, "i32"),
          stride_per_key_per_rank = { { 2 }, { 1 } },
        })
      end, "needs inverse indices")
    end)

    it("updates its tables in the backward pass when it has an optimizer", function()
      local ebc = ones { config { init_fn = one } }
      local kt = ebc(features())
      kt:values():backward(peri.full({ 2, 4 }, 2, "f32", device))
      assert.same({}, ebc:parameters())
      assert.same({ 1, 1, 1, 1 }, ebc:weight("t"):slice(1, 4, 5):to_list())
      assert.same({ 0, 0, 0, 0 }, ebc:weight("t"):slice(1, 5, 6):to_list()) -- 1 - 0.5 * 2
      ebc:set_learning_rate(0)
      ebc(features()):values():backward(peri.full({ 2, 4 }, 2, "f32", device))
      assert.same({ 0, 0, 0, 0 }, ebc:weight("t"):slice(1, 5, 6):to_list())
      assert.equal("embedding_bags.t.weight", ebc:named_state()[1].name)
    end)

    -- A gradient whose rows are apart is read where it lies, else made contiguous first: the same bits.
    it("updates its tables from a part of a gradient", function()
      for _, case in ipairs { { "sgd", 4 }, { "rowwise_adagrad", 8, { pooling = "MEAN" } }, { "adam", 5 },
        { "shampoo", 4 }, { false, 4 }, { "adagrad", 4, { data_type = "FP16" } }, { "lamb", 4, {}, "accumulated" },
        { "rowwise_adagrad", 4, {}, "weighted" }, { "sgd", 4, {}, "before" } } do
        local optimizer, least, more, way = unpack(case)
        local weights = {}
        for _, copied in ipairs { false, true } do
          local ebc = Collection { tables = { config(more), config { name = "u", embedding_dim = 8,
            feature_names = { "g", "f" }, data_type = more and more.data_type } }, device = device, seed = 3,
            is_weighted = way == "weighted",
            fused_params = optimizer and { optimizer = optimizer, learning_rate = 0.1 } or nil }
          local kjt = features(way == "weighted" and { weights = t({ 1, 2, 3, 4, 5, 6 }, "f32"):requires_grad() })
          for step = 1, 3 do
            if way == "accumulated" then ebc:materialise():accumulate(step < 3) end
            local values = ebc(kjt):values()
            local dense = least + 4 * (step % 2) -- not always as many
            local x = peri.Tensor.uniform({ 2, dense }, -1, 1, step, 0, "f32", device):requires_grad()
            local parts = way == "before" and { values:reshape(2, 5, 4):reshape(2, -1), x } or { x, values }
            local g = peri.Tensor.uniform({ 2, dense + 20 }, -1, 1, 9 + step, 0, "f32", device)
            if copied then
              local from = way == "before" and 0 or dense
              values:backward(g:slice(2, from, from + 20):contiguous())
            else
              peri.nn.functional.cat(parts, 2):backward(g)
            end
          end
          for i, name in ipairs { "t", "u" } do
            weights[#weights + 1] = (optimizer and ebc:weight(name) or ebc:parameters()[i]:grad()):to_list()
          end
        end
        for i = 1, 2 do
          assert.same(weights[i], weights[2 + i], (optimizer or "none") .. (way or ""))
        end
      end
    end)

    it("starts with the same weights whatever else there is", function()
      local a = ones({ config(), config { name = "u", embedding_dim = 7 } }, { seed = 5 }):weight("u"):to_list()
      assert.same(a, ones({ config { name = "u", embedding_dim = 7 } }, { seed = 5 }):weight("u"):to_list())
      assert.not_same(a, ones({ config { name = "u", embedding_dim = 7 } }, { seed = 6 }):weight("u"):to_list())
    end)

    it("takes no memory before it is used", function()
      local before = C.peri_mem_live()
      local ebc = ones({ config { num_embeddings = 1000000, embedding_dim = 64 } }, { device = "meta" })
      assert.equal(1, #ebc:named_modules())
      assert.is_true(C.peri_mem_live() - before < 1e6)
      assert.error_matches(function() ebc(features()) end, "on device 'meta'")
      assert.error_matches(function() ebc:parameters() end, "on device 'meta'")
    end)

    it("names what is wrong", function()
      local ebc = ones({ config(), config { name = "u", feature_names = { "h" } } })
      assert.error_matches(function() ebc(features()) end, "no feature 'h' %(of table 'u'%); those are: x, g, f")
      ebc = ones { config() }
      assert.error_matches(function() ebc(features { values = t({ 1, 2, 3, 4, 5, 10 }, "i64") }) end,
        "table 't', feature 'f', sample 1: id 10 at place 1 of the bag, allowed: 0%.%.9")
      assert.error_matches(function() ones({ config() }, { is_weighted = true })(features()) end,
        "is_weighted, but the batch has no weights")
      assert.error_matches(function() ones {} end, "no list of EmbeddingBagConfig")
      assert.error_matches(function() ones { {} } end, "entry 1 of tables is no EmbeddingBagConfig")
      assert.error_matches(function() ones { config(), config() } end, "two tables are named 't'")
      assert.error_matches(function() ones({ config() }, { fused_params = { optimizer = "x" } }) end,
        "optimizer is 'x', allowed")
      assert.error_matches(function() ebc:weight "v" end, "no table 'v'; tables: t")
      assert.error_matches(function() ebc(3) end, "features is 3, wanted a KeyedJaggedTensor")
    end)

    it("leaves nothing behind", function()
      local ebc = ones { config { pooling = "MEAN" } }
      local kjt = features()
      ebc(kjt):values():backward(peri.ones({ 2, 4 }, "f32", device))
      collectgarbage() -- twice: finalizers release handles of handles
      collectgarbage()
      local objects = tonumber(C.peri_mem_objects())
      for _ = 1, 20 do
        peri.scope(function() ebc(kjt):values():backward(peri.ones({ 2, 4 }, "f32", device)) end)
      end
      assert.equal(objects, tonumber(C.peri_mem_objects()))
    end)
  end)
end

describe("EmbeddingBagCollection", function()
  it("compiles", function()
    local ebc = Collection { tables = { config() }, fused_params = { optimizer = "sgd" } }
    local kjt = peri.KeyedJaggedTensor { keys = { "f" }, values = peri.tensor({ 1, 2 }, "i64"),
      lengths = peri.tensor({ 1, 1 }, "i32") }
    ebc(kjt) -- takes memory, makes the block list
    peri.scope(function()
      local scope = peri.ffi.state.scope
      jit_support.assert_compiles("EmbeddingBagCollection:forward", function()
        ebc:forward(kjt)
        for i = 1, scope.n do -- what a training step's scope does at its end
          scope[i]:release()
          scope[i] = false
        end
        scope.n = 0
      end)
    end)
  end)
end)
