-- EmbeddingCollection and EmbeddingConfig, on both devices: TorchRec's own results; every optimizer against the
-- reference in double precision; shared tables and features, empty and variable batches, dtypes, tables in files, bad
-- inputs.
local peri = require "perilune"
local golden = require "spec.support.golden"
local jit_support = require "spec.support.jit"
local reference = require "spec.support.tbe_reference"
local support = require "spec.support.tbe"
local embed = peri.embed
local Config, Collection = peri.EmbeddingConfig, peri.EmbeddingCollection
local C = peri.ffi.C

local function config(more)
  local a = { name = "t", embedding_dim = 4, num_embeddings = 10, feature_names = { "f" } }
  for key, value in pairs(more or {}) do a[key] = value end
  return Config(a)
end

describe("EmbeddingConfig", function()
  it("knows TorchRec's fields and defaults, and no pooling", function()
    local c = config()
    assert.equal("FP32", c.data_type)
    assert.near(-math.sqrt(0.1), c:get_weight_init_min(), 1e-15)
    assert.equal(1, c:num_features())
    assert.is_nil(c.pooling)
    assert.is_true(Config.is(c))
    assert.is_false(peri.EmbeddingBagConfig.is(c))
    assert.is_true(embed.config.BaseEmbeddingConfig.is(c))
  end)

  it("refuses what makes no table", function()
    local function refused(more, message) assert.error_matches(function() config(more) end, message) end
    refused({ pooling = "SUM" }, "EmbeddingConfig: no argument 'pooling'")
    refused({ name = "" }, "EmbeddingConfig: name is '', allowed: a text")
    refused({ embedding_dim = 0 }, "EmbeddingConfig 't': embedding_dim is 0")
    refused({ num_embeddings = 1.5 }, "EmbeddingConfig 't': num_embeddings is 1.5")
    refused({ feature_names = { "f", "f" } }, "EmbeddingConfig 't': feature 'f' is listed twice")
    refused({ data_type = "FP33" }, "EmbeddingConfig 't': data_type is 'FP33', allowed: ")
    refused({ init_fn = 3 }, "EmbeddingConfig 't': init_fn, allowed: embed.uniform")
    refused({ weight_init_min = 2, weight_init_max = 1 }, "weight_init_min is 2, weight_init_max is 1")
  end)
end)

--- Two tables, one looked up by two features, one of these also in the other.
local rows, dim = { 13, 7 }, 6
local function shared(fused, device, more)
  local data_type = more and more.data_type
  return Collection {
    tables = {
      config { name = "a", num_embeddings = rows[1], embedding_dim = dim, feature_names = { "f", "g" },
        data_type = data_type },
      config { name = "b", num_embeddings = rows[2], embedding_dim = dim, feature_names = { "g", "h" },
        data_type = data_type },
    },
    fused_params = fused, device = device, seed = 3,
  }
end
local names = { "f", "g@a", "g@b", "h" }

--- A batch of keys x, h, g, f, where nothing looks x up; per sample 0 to 3 ids that all tables have. Also its parts by
--- feature.
local function batch(salt, size, device, dtype)
  local draw = support.generator(salt)
  local keys, values, lengths, of = { "x", "h", "g", "f" }, {}, {}, {}
  for _, key in ipairs(keys) do
    of[key] = { ids = {}, lengths = {} }
    for _ = 1, size do
      local n = draw(4)
      lengths[#lengths + 1] = n
      of[key].lengths[#of[key].lengths + 1] = n
      for _ = 1, n do
        local id = draw(7)
        values[#values + 1] = id
        of[key].ids[#of[key].ids + 1] = id
      end
    end
  end
  local kjt = peri.KeyedJaggedTensor { keys = keys, values = peri.tensor(values, dtype or "i64", device),
    lengths = peri.tensor(lengths, "i32", device) }
  return kjt, of
end

--- The input of the reference for the same: one block for each output, over its own copy of the ids.
local function reference_input(of)
  local ids, offsets, blocks = {}, { 0 }, {}
  for i, name in ipairs(names) do
    local feature = of[name:match "^[^@]*"]
    blocks[i] = { table = (i <= 2) and 1 or 2, first_bag = i - 1, bags = 1, out_offset = 0, out_stride = dim }
    for _, id in ipairs(feature.ids) do ids[#ids + 1] = id end
    offsets[#offsets + 1] = #ids
  end
  return { ids = ids, offsets = offsets, blocks = blocks }
end

--- The values of all outputs, one after the other.
local function flat(result)
  local list = {}
  for _, name in ipairs(names) do
    for _, x in ipairs(result[name]:values():to_list()) do list[#list + 1] = x end
  end
  return list
end

--- Backward with the gradient `grad`, a flat list in the same order.
local function backward(result, grad, device)
  local sum, at = nil, 0
  for _, name in ipairs(names) do
    local values, own = result[name]:values(), {}
    for i = 1, values:numel() do own[i] = grad[at + i] end
    at = at + #own
    if #own > 0 then
      local part = peri.nn.functional.sum(values * peri.tensor(own, "f32", device):reshape(values:shape()))
      sum = sum and sum + part or part
    end
  end
  sum:backward()
end

for _, device in ipairs { "cpu", "opaque" } do
  local function t(list, dtype) return peri.tensor(list, dtype, device) end

  describe("EmbeddingCollection on " .. device, function()
    for _, name in ipairs(golden.names("ops/embedding", "^ec")) do
      it("reproduces " .. name, function()
        local case = golden.load(name)
        local tables = peri.util.map(case.args.tables, function(x)
          return Config { name = x.name, embedding_dim = x.dim, num_embeddings = x.rows, feature_names = x.features }
        end)
        local ec = Collection { tables = tables, need_indices = case.args.need_indices, device = device }
        for _, x in ipairs(case.args.tables) do
          ec:weight(x.name):copy(case:tensor("in." .. x.name .. ".weight", device))
        end
        local result = ec(peri.KeyedJaggedTensor { keys = case.args.keys,
          values = case:tensor("in.features.values", device), lengths = case:tensor("in.features.lengths", device) })
        assert.same(case.args.out_keys, ec:embedding_names())
        local sum
        for _, key in ipairs(case.args.out_keys) do
          local values = result[key]:values()
          case:assert_near("out." .. key .. ".values", values)
          assert.same(case:list("out." .. key .. ".lengths"), result[key]:lengths():to_list())
          local indices = result[key]:weights_or_none()
          assert.same(case:list("out." .. key .. ".indices"), indices and indices:to_list())
          local part = peri.nn.functional.sum(values * case:tensor("in.grad." .. key, device))
          sum = sum and sum + part or part
        end
        assert.equal(#case.args.out_keys, #peri.util.keys(result))
        sum:backward()
        for i, p in ipairs(ec:named_parameters()) do
          local x = case.args.tables[i]
          assert.equal("embeddings." .. x.name .. ".weight", p.name)
          case:assert_near("grad." .. x.name .. ".weight", p.tensor:grad())
        end
      end)
    end

    for _, kind in ipairs { "sgd", "adagrad", "rowwise_adagrad", "emainplace_rowwise_adagrad", "rowwise_rmsprop_ar",
      "adam", "partial_rowwise_adam", "lamb", "partial_rowwise_lamb", "lars_sgd" } do
      it("trains as the reference, three steps, with " .. kind, function()
        local ec = shared({ optimizer = kind, learning_rate = 0.05 }, device)
        local tables = {}
        for i, name in ipairs { "a", "b" } do
          tables[i] = { rows = rows[i], cols = dim, pooling = "NONE", weight = ec:weight(name):to_list() }
        end
        local o = { kind = kind, learning_rate = 0.05, eps = 1e-8, beta1 = 0.9, beta2 = 0.999, weight_decay = 0,
          eta = 0.001, momentum = 0.9, ema_beta = 0.99, ar_alpha = 0, min_shrinkage = 0.1 }
        local want, tol = reference.new(tables, o), { abs = 2e-5, rel = 2e-4 }
        for step = 1, 3 do
          local kjt, of = batch(40 + step, 5, device)
          local input, result = reference_input(of), ec(kjt)
          golden.assert_near(want:forward(input, #input.ids * dim), flat(result), tol, "output of step " .. step)
          local grad = support.numbers(#input.ids * dim, support.generator(90 + step))
          want:backward(input, grad)
          backward(result, grad, device)
          for i, name in ipairs { "a", "b" } do
            golden.assert_near(want.tables[i].weight, ec:weight(name):to_list(), tol, name .. " after step " .. step)
          end
        end
        assert.equal(3, ec:materialise():iteration())
      end)
    end

    it("gives rows and lengths by name, whatever the keys and the batch; ids of i32 as of i64", function()
      local ec = shared({ optimizer = "sgd" }, device)
      local weights = { a = ec:weight("a"):to_table(), b = ec:weight("b"):to_table() }
      for salt, size in ipairs { 5, 3, 0, 5 } do
        for _, dtype in ipairs { "i64", "i32" } do
          local kjt, of = batch(salt, size, device, dtype)
          local result = ec(kjt)
          for i, name in ipairs(names) do
            local feature, table_name = of[name:match "^[^@]*"], i <= 2 and "a" or "b"
            assert.same(feature.lengths, result[name]:lengths():to_list())
            assert.same({ #feature.ids, dim }, result[name]:values():shape())
            for j, row in ipairs(result[name]:values():to_table()) do
              assert.same(weights[table_name][feature.ids[j] + 1], row)
            end
          end
        end
      end
      assert.same({ { "f", "g@a" }, { "g@b", "h" } }, ec:embedding_names_by_table())
      assert.same({ "f", "g", "h" }, ec:feature_names())
      assert.equal(dim, ec:embedding_dim())
      assert.equal("b", ec:embedding_configs()[2].name)
      assert.is_false(ec:need_indices())
      assert.is_false(ec:is_weighted())
      assert.equal("EmbeddingCollection(a: 13 x 6, b: 7 x 6)", tostring(ec))
    end)

    it("gives each feature of a variable batch its own bags", function()
      local ec = Collection { device = device, need_indices = true,
        tables = { config { feature_names = { "f", "g" } } } }
      local w = ec:weight("t"):to_table()
      local function variable(keys, values, lengths, strides)
        return ec(peri.KeyedJaggedTensor { keys = keys, values = t(values, "i64"), lengths = t(lengths, "i32"),
          stride_per_key_per_rank = strides })
      end
      local fixed = peri.KeyedJaggedTensor { keys = { "g", "f" }, values = t({ 1, 2 }, "i64"),
        lengths = t({ 1, 1 }, "i32") }
      assert.same({ w[3] }, ec(fixed).f:values():to_table())
      local result = variable({ "g", "f" }, { 1, 2, 3, 4 }, { 1, 0, 2, 1, 0 }, { { 3 }, { 2 } })
      assert.same({ 1, 0, 2 }, result.g:lengths():to_list())
      assert.same({ w[2], w[3], w[4] }, result.g:values():to_table())
      assert.same({ 1, 0 }, result.f:lengths():to_list())
      assert.same({ w[5] }, result.f:values():to_table())
      assert.same({ 4 }, result.f:weights():to_list())
      result = variable({ "x", "f", "g" }, { 9, 5, 6 }, { 1, 0, 1, 1 }, { { 1 }, { 2 }, { 1 } })
      assert.same({ w[6] }, result.f:values():to_table())
      assert.same({ w[7] }, result.g:values():to_table())
      result = variable({ "f", "g" }, { 5, 6 }, { 0, 1, 1 }, { { 2 }, { 1 } })
      assert.same({ w[6] }, result.f:values():to_table())
      -- the batch of before, after others with their keys elsewhere
      assert.same({ w[3] }, ec(fixed).f:values():to_table())
      assert.error_matches(function() variable({ "f", "x" }, { 5, 6 }, { 0, 1, 1 }, { { 2 }, { 1 } }) end,
        "no feature 'g'")
      assert.same({ w[3] }, ec(fixed).f:values():to_table())
    end)

    it("gives zeros and no gradient for an id of -1", function()
      local ec = Collection { device = device, tables = { config { init_fn = embed.constant(1) } },
        fused_params = { optimizer = "sgd", learning_rate = 1 } }
      local kjt = peri.KeyedJaggedTensor { keys = { "f" }, values = t({ 2, -1, 2 }, "i64"),
        lengths = t({ 2, 1 }, "i32") }
      local values = ec(kjt).f:values()
      assert.same({ { 1, 1, 1, 1 }, { 0, 0, 0, 0 }, { 1, 1, 1, 1 } }, values:to_table())
      values:backward(t { { 1, 0, 0, 0 }, { 5, 5, 5, 5 }, { 2, 0, 0, 0 } })
      local want = {}
      for i = 1, 10 do want[i] = { 1, 1, 1, 1 } end
      want[3] = { -2, 1, 1, 1 }
      assert.same(want, ec:weight("t"):to_table())
      assert.same({}, ec:parameters())
      assert.equal("embeddings.t.weight", ec:named_state()[1].name)
      ec:set_learning_rate(0)
      ec(kjt).f:values():backward(peri.ones({ 3, 4 }, "f32", device))
      assert.same(want, ec:weight("t"):to_table())
    end)

    for _, data_type in ipairs { "FP16", "BF16" } do
      it("takes tables of " .. data_type, function()
        local ec = shared({ optimizer = "sgd", learning_rate = 0.5, stochastic_rounding = false }, device,
          { data_type = data_type })
        local kjt, of = batch(77, 4, device)
        local before, result = ec:weight("b"):to_table(), ec(kjt)
        local values = result.h:values()
        assert.equal("f32", values:dtype())
        local gradient = {}
        for j, row in ipairs(values:to_table()) do
          local id = of.h.ids[j]
          assert.same(before[id + 1], row)
          gradient[id] = (gradient[id] or 0) + 1
        end
        values:backward(peri.ones(values:shape(), "f32", device))
        for id, row in ipairs(ec:weight("b"):to_table()) do
          local n = gradient[id - 1] or 0
          for d = 1, dim do assert.near(before[id][d] - 0.5 * n, row[d], n > 0 and 2e-2 or 0) end
        end
      end)
    end

    it("trains tables in files as in memory, with and without prefetches", function()
      local fused = { optimizer = "adam", learning_rate = 0.1 }
      local want = shared(fused, device)
      fused = peri.util.copy(fused)
      fused.cache_params = peri.CacheParams { load_factor = 0.9 }
      local got = shared(fused, device)
      local next_batch = batch(1, 2, device)
      for step = 1, 6 do
        local kjt, of = next_batch, select(2, batch(step, 2, device))
        next_batch = batch(step + 1, 2, device)
        local x, y = want(kjt), got(kjt)
        if step % 3 > 0 then got:prefetch(next_batch) end
        assert.same(flat(x), flat(y))
        local grad = support.numbers(#reference_input(of).ids * dim, support.generator(step))
        backward(x, grad, device)
        backward(y, grad, device)
      end
      for _, name in ipairs { "a", "b" } do
        for _, which in ipairs { "weight", "momentum1", "momentum2" } do
          assert.same(want:table_rows(name, which, 1, 6):to_list(), got:table_rows(name, which, 1, 6):to_list())
        end
      end
      assert.is_true(got:cache_statistics("a").prefetch_hits > 0)
      assert.is_nil(want:cache_statistics "a")
      want:prefetch(next_batch) -- nothing to do
      got:flush()
    end)

    it("takes no memory before it is used", function()
      local before = C.peri_mem_live()
      local big = { config { num_embeddings = 1000000, embedding_dim = 64 } }
      local ec = Collection { tables = big, device = "meta" }
      assert.equal(1, #ec:named_modules())
      assert.is_false(ec:is_materialised())
      assert.is_true(C.peri_mem_live() - before < 1e6)
      assert.error_matches(function() ec(batch(1, 1, device)) end, "EmbeddingCollection: it is on device 'meta'")
      assert.error_matches(function() ec:parameters() end, "on device 'meta'")
      assert.is_true(shared(nil, device):parameters()[1]:numel() == rows[1] * dim)
    end)

    it("names what is wrong", function()
      local function refused(more, message)
        local a = { tables = { config() }, device = device }
        for key, value in pairs(more) do a[key] = value end
        assert.error_matches(function() Collection(a) end, message)
      end
      refused({ tables = {} }, "EmbeddingCollection: tables is no list of EmbeddingConfig")
      refused({ tables = { peri.EmbeddingBagConfig { name = "t", embedding_dim = 1, num_embeddings = 1,
        feature_names = { "f" } } } }, "EmbeddingCollection: entry 1 of tables is no EmbeddingConfig")
      refused({ tables = { config(), config() } }, "two tables are named 't'")
      refused({ tables = { config(), config { name = "u", data_type = "FP16" } } },
        "table 'u' holds FP16, table 't' FP32; allowed: one")
      refused({ need_indices = 1 }, "EmbeddingCollection: .*need_indices")
      refused({ seed = "x" }, "EmbeddingCollection: .*seed")
      refused({ fused_params = { optimizer = "x" } }, "EmbeddingCollection: fused_params: optimizer is 'x', allowed")
      refused({ is_weighted = true }, "EmbeddingCollection: no argument 'is_weighted'")

      local ec = Collection { tables = { config(), config { name = "u", feature_names = { "h" } } }, device = device }
      local function given(more)
        local a = { keys = { "x", "f", "h" }, values = t({ 1, 2, 3 }, "i64"), lengths = t({ 1, 1, 1 }, "i32") }
        for key, value in pairs(more or {}) do a[key] = value end
        return peri.KeyedJaggedTensor(a)
      end
      assert.error_matches(function() ec(given { keys = { "x", "f", "g" } }) end,
        "EmbeddingCollection: the batch has no feature 'h' %(of table 'u'%); those are: x, f, g")
      assert.same({ 1, 4 }, ec(given()).h:values():shape()) -- a batch after one that was refused
      local outside = given { keys = { "f", "h" }, values = t({ 1, 10, 3, 4 }, "i64"),
        lengths = t({ 0, 2, 1, 1 }, "i32") }
      assert.error_matches(function() ec(outside) end,
        "table 't', feature 'f', sample 1: id 10 at place 1 of the bag, allowed: 0%.%.9")
      assert.error_matches(function() ec(3) end, "EmbeddingCollection: features is 3, wanted a KeyedJaggedTensor")
      assert.error_matches(function() ec:weight "v" end, "EmbeddingCollection: no table 'v'; tables: t, u")
      assert.error_matches(function() ec:prefetch(3) end, "EmbeddingCollection:prefetch: .*KeyedJaggedTensor")
      assert.error_matches(function() ec:table_rows("t", "weight", "x", 1) end, "EmbeddingCollection:table_rows: .*row")
    end)

    it("takes the gradient of one output alone", function()
      local ec = shared(nil, device)
      local kjt, of = batch(21, 4, device)
      local result = ec(kjt)
      peri.nn.functional.sum(result["g@b"]:values()):backward()
      local want = {}
      for i = 1, rows[2] do want[i] = { 0, 0, 0, 0, 0, 0 } end
      for _, id in ipairs(of.g.ids) do
        for d = 1, dim do want[id + 1][d] = want[id + 1][d] + 1 end
      end
      local grads = {}
      for _, p in ipairs(ec:named_parameters()) do grads[p.name] = p.tensor:grad() end
      assert.same(want, grads["embeddings.b.weight"]:to_table())
      local a = grads["embeddings.a.weight"]
      for _, x in ipairs(a and a:to_list() or {}) do assert.equal(0, x) end
    end)

    it("reads gradients where they lie, or joins them where that cannot be", function()
      local kjt, of = batch(33, 5, device)
      --- Weights after a step with integers as gradients; how many pieces of the device's memory a second pass takes.
      local function trained(wrap, missing)
        local ec = shared({ optimizer = "sgd", learning_rate = 1 }, device)
        local before = { a = ec:weight("a"):to_table(), b = ec:weight("b"):to_table() }
        local function step(salt)
          local result, values, grads = ec(kjt), {}, {}
          for i = #names, 1, -1 do -- in memory in another order than their rows
            local rows_of = of[names[i]:sub(1, 1)].ids
            local list = {}
            for k = 1, #rows_of * dim do list[k] = (k * 7 + i * salt) % 5 - 2 end
            if not (missing and names[i] == "f") then
              values[#values + 1] = result[names[i]]:values()
              grads[#grads + 1] = wrap(t(list):reshape { #rows_of, dim })
              local table_ = before[(names[i] == "f" or names[i] == "g@a") and "a" or "b"]
              for k, id in ipairs(rows_of) do
                for d = 1, dim do table_[id + 1][d] = table_[id + 1][d] - list[(k - 1) * dim + d] end
              end
            end
          end
          C.peri_fault_arm("device_alloc", 0)
          peri.backward(values, grads)
          return tonumber(C.peri_fault_passed "device_alloc")
        end
        step(3)
        local taken = step(4)
        for name, want in pairs(before) do
          for r, row in ipairs(ec:weight(name):to_table()) do
            for d = 1, dim do assert.near(want[r][d], row[d], 1e-5) end
          end
        end
        return taken
      end
      local direct = trained(function(x) return x end)
      local joined = trained(function(x) return x:transpose(1, 2):contiguous():transpose(1, 2) end)
      assert.equal(device == "cpu" and 1 or 0, joined - direct) -- memory for all gradients
      trained(function(x) return x end, true)
    end)

    it("gives zeros for ids that no bag has", function()
      local ec = Collection { device = device, tables = { config() } }
      ec(peri.KeyedJaggedTensor { keys = { "f" }, values = t({ 1 }, "i64"), lengths = t({ 1 }, "i32") })
      local function rows_of(offsets)
        for _ = 1, 3 do peri.full({ 4, 4 }, 7, "f32", device) end -- memory that is not zeros
        collectgarbage()
        collectgarbage()
        local blocks = ec:materialise():blocks { { table = 1, first_bag = 0, bags = 2, out_offset = 0,
          out_stride = 4 } }
        return ec:materialise():lookup(t({ 1, 2, 3, 4 }, "i64"), t(offsets, "i64"), blocks, 4, 4):to_table()
      end
      local w = ec:weight("t"):to_table()
      assert.same({ w[2], w[3], w[4], w[5] }, rows_of { 0, 1, 4 })
      assert.same({ { 0, 0, 0, 0 }, w[3], w[4], { 0, 0, 0, 0 } }, rows_of { 1, 2, 3 })
      assert.same({ w[2], w[3], { 0, 0, 0, 0 }, { 0, 0, 0, 0 } }, rows_of { 0, 1, 2 })
    end)

    it("cuts rows of any shape, also views, into those of the keys", function()
      local kjt = peri.KeyedJaggedTensor { keys = { "f", "e", "g" }, values = t({ 7, 8, 9 }, "i64"),
        lengths = t({ 1, 1, 0, 0, 0, 1 }, "i32") }
      local jts = require("ffi").new "peri_jt *[3]"
      local function cut(x, indices)
        peri.ffi.check(C.peri_kjt_cut(peri.KeyedJaggedTensor.ptr(kjt), x.ptr, indices, jts))
        local list = {}
        for i = 1, 3 do list[i] = peri.JaggedTensor.wrap(jts[i - 1]) end
        return list
      end
      local leaf = t { { 1, 2, 3 }, { 4, 5, 6 } }:requires_grad()
      local list = cut(leaf:transpose(1, 2), true)
      assert.same({ { 1, 4 }, { 2, 5 } }, list[1]:values():to_table())
      assert.same({ 0, 2 }, list[2]:values():shape())
      assert.same({ { 3, 6 } }, list[3]:values():to_table())
      assert.same({ 0, 1 }, list[3]:lengths():to_list())
      assert.same({ 9 }, list[3]:weights():to_list())
      list[1]:values():backward(t { { 1, 2 }, { 3, 4 } })
      assert.same({ { 1, 3, 0 }, { 2, 4, 0 } }, leaf:grad():to_table())
      assert.is_nil(cut(t { 1, 2, 3 }, false)[1]:weights_or_none())
      assert.error_matches(function() cut(t { 1, 2 }, false) end,
        "peri_kjt_cut: rows are f32 %[2%].* for 3 ids, wanted one row per id")
      assert.error_matches(function() cut(peri.tensor(3, "f32", device), false) end, "wanted one row per id")
    end)

    it("leaves nothing behind", function()
      local ec, kjt = shared({ optimizer = "sgd" }, device), (batch(9, 4, device))
      local function step()
        local values = ec(kjt)["g@b"]:values()
        values:backward(peri.ones(values:shape(), "f32", device))
      end
      step()
      collectgarbage() -- twice: finalizers release handles of handles
      collectgarbage()
      local objects = tonumber(C.peri_mem_objects())
      for _ = 1, 20 do peri.scope(step) end
      assert.equal(objects, tonumber(C.peri_mem_objects()))
    end)
  end)
end

describe("EmbeddingCollection", function()
  it("names its sharder", function()
    local ec = shared(nil, "cpu")
    assert.is_true(peri.shard.EmbeddingCollectionSharder.is(peri.shard.registry("spec", nil, {}, peri.shard)(ec)))
    assert.error_matches(function() peri.shard.registry("spec", nil, {}, {})(ec) end,
      "class EmbeddingCollection is 'EmbeddingCollectionSharder', which peri.shard has not")
  end)

  it("compiles", function()
    for _, keys in ipairs { { "f", "g", "h" }, { "h", "g", "f", "x" } } do
      local ec = Collection { tables = { config { feature_names = { "f", "g", "h" } } },
        fused_params = { optimizer = "sgd" } }
      local n = #keys
      local lengths, values = {}, {}
      for i = 1, n do lengths[i], values[i] = 1, i end
      local kjt = peri.KeyedJaggedTensor { keys = keys, values = peri.tensor(values, "i64"),
        lengths = peri.tensor(lengths, "i32") }
      ec(kjt) -- takes memory, makes the block list
      peri.scope(function()
        local scope = peri.ffi.state.scope
        jit_support.assert_compiles("EmbeddingCollection:forward", function()
          ec:forward(kjt)
          for i = 1, scope.n do -- what a training step's scope does at its end
            scope[i]:release()
            scope[i] = false
          end
          scope.n = 0
        end)
      end)
    end
  end)
end)
