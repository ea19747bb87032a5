-- Quantized collections, on both devices: TorchRec's own bytes and results; every data type against the rows that it
-- stores, in doubles; tables of several data types, shared features, variable batches, pruned tables, copies,
-- descriptions; bad inputs.
local ffi = require "ffi"
local peri = require "perilune"
local golden = require "spec.support.golden"
local jit_support = require "spec.support.jit"
local shell = require "spec.support.shell"
local support = require "spec.support.tbe"
local Bags, Rows = peri.QuantEmbeddingBagCollection, peri.QuantEmbeddingCollection
local C = peri.ffi.C

local folder, clean = shell.temporary()
teardown(clean)

local types = { "INT8", "INT4", "INT2", "FP8", "FP16", "BF16", "FP32" }
local names = { f32 = "FP32", f16 = "FP16", int8 = "INT8", int4 = "INT4", int2 = "INT2" }

--- Tables of a trained collection: a (f, g), b (g: shared, with h), c (h).
local function tables(class, pooling, dim)
  local function t(name, rows, cols, features, i)
    return peri[class] { name = name, num_embeddings = rows, embedding_dim = dim or cols, feature_names = features,
      pooling = pooling and pooling[i], init_fn = peri.embed.uniform(-1, 1) }
  end
  return { t("a", 11, 8, { "f", "g" }, 1), t("b", 9, 16, { "g", "h" }, 2), t("c", 13, 4, { "h" }, 3) }
end

local features, limit = { "x", "h", "f", "g" }, { x = 99, h = 9, f = 11, g = 9 }

--- A batch of `size` samples; among its keys is one that nothing looks up. Also its parts by feature.
local function batch(device, size, weighted, dtype)
  local draw, of, ids, lengths, weights = support.generator(size), {}, {}, {}, {}
  for _, f in ipairs(features) do
    of[f] = { bags = {} }
    for b = 1, size do
      of[f].bags[b] = {}
      lengths[#lengths + 1] = draw(4)
      for i = 1, lengths[#lengths] do
        local id = draw(7) == 0 and -1 or draw(limit[f])
        ids[#ids + 1], weights[#weights + 1] = id, draw(8) / 4 - 1
        of[f].bags[b][i] = { id = id, weight = weighted and weights[#weights] or 1 }
      end
    end
  end
  return peri.KeyedJaggedTensor { keys = features, values = peri.tensor(ids, dtype or "i64", device),
    lengths = peri.tensor(lengths, "i32", device), weights = weighted and weights or nil, device = device }, of
end

--- What a bag becomes: rows (a flat list) pooled in doubles.
local function pool(rows, cols, pooling, bag, map)
  local sum = {}
  for d = 1, cols do sum[d] = 0 end
  for _, x in ipairs(bag) do
    local row = map and x.id >= 0 and map[x.id + 1] or x.id
    for d = 1, row >= 0 and cols or 0 do sum[d] = sum[d] + x.weight * rows[row * cols + d] end
  end
  for d = 1, pooling == "MEAN" and #bag > 0 and cols or 0 do sum[d] = sum[d] / #bag end
  return sum
end

--- The output of a collection from the numbers that its rows stand for, as a flat list.
local function expected(collection, of, size, maps)
  local list = {}
  for b = 1, size do
    for i, t in ipairs(collection.tables) do
      local rows = collection:table_rows(t.name, "weight", 0, collection:_rows_of(i)):to_list()
      for _, f in ipairs(t.feature_names) do
        for _, x in ipairs(pool(rows, t.embedding_dim, t.pooling, of[f].bags[b], maps and maps[t.name])) do
          list[#list + 1] = x
        end
      end
    end
  end
  return list
end

for _, device in ipairs { "cpu", "opaque" } do
  describe("quantized collections on " .. device, function()
    local function trained(pooling, more)
      local args = { tables = tables("EmbeddingBagConfig", pooling or { "SUM", "MEAN", "SUM" }), device = device,
        seed = 7 }
      for k, v in pairs(more or {}) do args[k] = v end
      return peri.EmbeddingBagCollection(args)
    end

    for _, name in ipairs(golden.names("ops/quant", "^quant_e")) do
      it("reproduce " .. name, function()
        local case = golden.load(name)
        local a, pooled = case.args, name:match "quant_ebc" ~= nil
        local weighted = case:has "in.features.weights"
        local configs = peri.util.map(a.tables, function(t)
          return peri[pooled and "EmbeddingBagConfig" or "EmbeddingConfig"] { name = t.name, num_embeddings = t.rows,
            embedding_dim = t.dim, feature_names = t.features, pooling = t.pooling and t.pooling:upper() }
        end)
        local float = peri[pooled and "EmbeddingBagCollection" or "EmbeddingCollection"] { tables = configs,
          device = device, is_weighted = pooled and weighted or nil }
        for _, t in ipairs(a.tables) do
          float:weight(t.name):copy(case:tensor(("in.%s.weight"):format(t.name), device))
        end
        local model = peri.quantize_embeddings { module = float, dtype = names[a.weights_type],
          output_dtype = names[a.output_type] }
        for _, t in ipairs(a.tables) do
          local stored, want = model:weight(t.name), case:tensor(("out.%s.bytes"):format(t.name), "cpu")
          local bytes = stored:to(nil, "cpu"):read()
          local n = stored:size(2) * (stored:dtype() == "u8" and 1 or 2)
          local got = peri.Tensor.from_memory(ffi.string(bytes, n * t.rows), { t.rows, n }, "u8", "cpu")
          assert.same(want:slice(2, 0, n):contiguous():to_list(), got:to_list(), "the bytes of " .. t.name)
        end
        local function input(part) return case:tensor("in.features." .. part, device) end
        local result = model(peri.KeyedJaggedTensor { keys = a.keys, values = input "values",
          lengths = input "lengths":to "i32", weights = weighted and input "weights" or nil })
        if pooled then
          assert.equal(a.output_type, result:values():dtype())
          local columns = peri.KeyedTensor.regroup({ result }, { a.out_keys })[1] -- TorchRec groups tables by pooling
          return case:assert_near("out.values", columns)
        end
        for _, f in ipairs(a.out_keys) do case:assert_near(("out.%s.values"):format(f), result[f]:values()) end
      end)
    end

    it("pool what their rows stand for, whatever the data types", function()
      for _, weighted in ipairs { false, true } do
        for i, dtype in ipairs(types) do
          local other = types[i % #types + 1]
          local model = peri.quantize_embeddings { module = trained(nil, { is_weighted = weighted }), dtype = dtype,
            per_table_weight_dtype = { b = other } }
          assert.same({ dtype, other, dtype }, peri.util.map(model.tables, function(t) return t.data_type end))
          for _, size in ipairs { 5, 0, 1 } do
            local kjt, of = batch(device, size, weighted, i % 2 == 0 and "i32" or "i64")
            local kt = model(kjt)
            assert.same({ "f", "g@a", "g@b", "h@b", "h@c" }, kt:keys())
            golden.assert_near(expected(model, of, size), kt:values():to_list(), { abs = 2e-6, rel = 2e-6 }, dtype)
          end
        end
      end
    end)

    it("give f16 and bf16", function()
      for _, output in ipairs { "FP16", "BF16" } do
        local model = peri.quantize_embeddings { module = trained(), output_dtype = output }
        local kjt, of = batch(device, 4)
        local values = model(kjt):values()
        assert.equal(output:lower():gsub("fp", "f"), values:dtype())
        golden.assert_near(expected(model, of, 4), values:to_list(),
          { abs = 1e-6, rel = output == "FP16" and 5e-4 or 4e-3 }, output)
      end
    end)

    it("give each id its row, and zeros for -1", function()
      for _, dtype in ipairs { "INT8", "INT4", "FP16" } do
        local float = peri.EmbeddingCollection { tables = tables("EmbeddingConfig", nil, 8), device = device,
          need_indices = true }
        local model = peri.quantize_embeddings { module = float, dtype = dtype, output_dtype = "FP32",
          per_table_weight_dtype = { c = "FP8" } }
        local kjt, of = batch(device, 5)
        local result, outputs = model(kjt), { f = { "f", 1 }, ["g@a"] = { "g", 1 }, ["g@b"] = { "g", 2 },
          ["h@b"] = { "h", 2 }, ["h@c"] = { "h", 3 } }
        for name, output in peri.util.ordered(outputs) do
          local t, want, ids = model.tables[output[2]], {}, {}
          local rows = model:table_rows(t.name, "weight", 0, t.num_embeddings):to_list()
          for _, bag in ipairs(of[output[1]].bags) do
            for _, x in ipairs(bag) do
              ids[#ids + 1] = x.id
              for _, value in ipairs(pool(rows, 8, "SUM", { x })) do want[#want + 1] = value end
            end
          end
          assert.same(want, result[name]:values():to_list(), name)
          assert.same(ids, result[name]:weights():to_list(), name)
        end
      end
    end)

    it("take a variable batch", function()
      local model = peri.quantize_embeddings { module = trained(), dtype = "INT8",
        per_table_weight_dtype = { b = "FP16" } }
      local kjt = peri.KeyedJaggedTensor {
        keys = { "h", "f", "g" }, values = { 1, 2, 3, 4, 5, 6, 7 }, lengths = { 2, 1, 2, 0, 1, 1 },
        stride_per_key_per_rank = { { 2 }, { 1 }, { 3 } },
        inverse_indices = { { "h", "f", "g" }, peri.tensor({ 0, 1, 0, 0, 2, 1 }, "i64", device, { 3, 2 }) },
        device = device,
      }
      local whole = peri.KeyedJaggedTensor.from_lists { keys = { "h", "f", "g" }, device = device,
        { { 1, 2 }, { 3 } }, { { 4, 5 }, { 4, 5 } }, { { 7 }, { 6 } } }
      assert.same(model(whole):values():to_list(), model(kjt):values():to_list())
      assert.same({ 2, 52 }, model(kjt):values():shape())
    end)

    it("skip the rows that were left out, by arrays and by hash tables", function()
      local a = { 3, -1, 0, 1, -1, 2, 4, 5, -1, -1, 6 } -- in any order
      local b = { -1, -1, -1, -1, 0, -1, -1, 1, -1 }
      for _, hash in ipairs { { false, false }, { true, true }, { true, false } } do
        for _, dtype in ipairs { "i64", "i32" } do
          local float = trained()
          local before = peri.util.map({ "a", "b" }, function(n) return float:weight(n):to_table() end)
          local pruned = { a = { remapping = peri.tensor(a, "i32", device), hash = hash[1] },
            b = hash[2] and { remapping = peri.tensor(b, "i64", device), hash = true }
              or peri.tensor(b, "i64", device) }
          local model = peri.quantize_embeddings { module = float, dtype = "FP32", pruned = pruned }
          assert.same({ { 7, 8 }, { 2, 16 }, { 13, 4 } },
            peri.util.map({ "a", "b", "c" }, function(n) return model:weight(n):shape() end))
          for id, row in ipairs(a) do
            if row >= 0 then assert.same(before[1][id], model:weight "a":to_table()[row + 1]) end
          end
          assert.same(before[2][8], model:weight "b":to_table()[2])
          local kjt, of = batch(device, 6, false, dtype)
          golden.assert_near(expected(model, of, 6, { a = a, b = b }), model(kjt):values():to_list(),
            { abs = 2e-6, rel = 2e-6 })
          assert.same(model(kjt):values():to_list(), model:copy()(kjt):values():to_list())
        end
      end
      local rows = peri.quantize_embeddings { pruned = { b = peri.tensor(b, "i32", device) }, dtype = "FP16",
        module = peri.EmbeddingCollection { tables = tables("EmbeddingConfig", nil, 8), device = device } }
      local got = rows(peri.KeyedJaggedTensor.from_lists { keys = { "f", "g", "h" }, device = device, { { 1 } },
        { { 7, 0 } }, { { -1, 4 } } })
      local row = rows:table_rows("b", "weight", 0, 2):to_table()
      local zeros = { 0, 0, 0, 0, 0, 0, 0, 0 }
      assert.same({ row[2], zeros }, got["g@b"]:values():to_table())
      assert.same({ zeros, row[1] }, got["h@b"]:values():to_table())
      assert.same(rows:table_rows("a", "weight", 7, 1):to_table()[1], got["g@a"]:values():to_table()[1])
    end)

    it("are copied, saved and loaded", function()
      local model = peri.quantize_embeddings { module = trained(), dtype = "INT4",
        per_table_weight_dtype = { c = "BF16" } }
      local kjt = batch(device, 3)
      local want = model(kjt):values():to_list()
      local copy, blank = model:copy(), Bags { tables = model.tables, device = device }
      assert.same({ "embedding_bags.a.weight", "embedding_bags.b.weight", "embedding_bags.c.weight" },
        peri.util.map(blank:named_state(), function(s) return s.name end))
      assert.same({}, blank:named_parameters())
      blank:load_state_dict(model:state_dict())
      for _, name in ipairs { "a", "b", "c" } do model:weight(name):fill(0) end
      assert.same(want, copy(kjt):values():to_list())
      assert.same(want, blank(kjt):values():to_list())
      local elsewhere = copy:copy(device == "cpu" and "opaque" or "cpu")
      assert.same(want, elsewhere(kjt:to(device == "cpu" and "opaque" or "cpu")):values():to_list())
    end)

    it("take no rows of another format, whose shape may be the same", function()
      local byte_types, by_bytes, here, there = { "INT8", "INT4", "INT2", "FP8" }, {}, {}, {}
      local function collection(list)
        return Bags { device = device, tables = peri.util.map(list, function(x, i)
          return peri.EmbeddingBagConfig { name = "t" .. i, num_embeddings = 3, embedding_dim = x[2],
            feature_names = { "f" .. i }, data_type = x[1] }
        end) }
      end
      for cols = 4, 32, 4 do
        local formats = peri.util.map(byte_types, function(data_type) return { data_type, cols } end)
        for i, x in ipairs(formats) do
          local bytes = collection(formats):table_state("t" .. i):size(2)
          for _, other in ipairs(by_bytes[bytes] or {}) do
            here[#here + 1], there[#there + 1] = x, other
            here[#here + 1], there[#there + 1] = other, x
          end
          by_bytes[bytes] = by_bytes[bytes] or {}
          table.insert(by_bytes[bytes], x)
        end
      end
      assert.is_true(#here >= 10)
      local mine, theirs, whole = collection(here), collection(there), {}
      for _, s in ipairs(theirs:named_state()) do
        s.tensor:copy(peri.arange(0, s.tensor:numel(), 1, "i64"):reshape(s.tensor:shape()))
        whole[s.name] = s.tensor:to("i64"):to("u8")
      end
      local before = mine:state_dict():clone()
      local path = folder .. "/" .. device
      peri.checkpoint.save(path, { model = theirs })
      for origin, load in peri.util.ordered {
        ["in the state that is given"] = function() mine:load_state_dict(theirs:state_dict()) end,
        ["in the state that is given;"] = function() mine:load_state_dict(theirs:state_dict():clone(), false) end,
        ["in the checkpoint"] = function() peri.checkpoint.load(path, { model = mine }) end,
      } do
        local message = tostring(assert.has_error(load))
        for i, x in ipairs(here) do
          local text = ("'embedding_bags.t%d.weight' has rows of %s x %d here, and rows of %s x %d %s"):format(i, x[1],
            x[2], there[i][1], there[i][2], origin:match "[^;]+")
          assert.is_truthy(message:find(text, 1, true), text)
        end
        for _, s in ipairs(mine:named_state()) do
          assert.same(before[s.name]:to_list(), s.tensor:to_list())
        end
      end
      -- nor numbers in place of bytes, nor the other way round
      local float = peri.EmbeddingBagCollection { device = device, tables = { peri.EmbeddingBagConfig { name = "t1",
        num_embeddings = 3, embedding_dim = mine:table_state("t1"):size(2), feature_names = { "f1" } } } }
      local function takes(x, other) return function() x:load_state_dict(other:state_dict(), false) end end
      assert.error_matches(takes(mine, float), "and f32 numbers in the state")
      assert.error_matches(takes(float, mine), "has f32 numbers here")
      -- the same formats fit, and bytes of which nothing is said, as in older checkpoints
      local old = { state_dict = function() return whole end, load_state_dict = function() end }
      peri.checkpoint.save(path .. "-old", { model = old })
      for _, load in ipairs {
        function(x) x:load_state_dict(theirs:state_dict():clone()) end,
        function(x) x:load_state_dict(whole) end,
        function(x) peri.checkpoint.load(path, { model = x }) end,
        function(x) peri.checkpoint.load(path .. "-old", { model = x }) end,
      } do
        local other = collection(there)
        load(other)
        for _, s in ipairs(other:named_state()) do assert.same(whole[s.name]:to_list(), s.tensor:to_list()) end
      end
    end)

    it("do not allocate once they have been called", function()
      local mapping = peri.tensor({ 3, -1, 0, 1, -1, 2, 4, 5, -1, -1, 6 }, "i32", device)
      for _, pruned in ipairs { false, { a = mapping } } do
        local model = peri.quantize_embeddings { module = trained(), dtype = "INT4",
          per_table_weight_dtype = { c = "FP16" }, pruned = pruned or nil }
        local kjt = batch(device, 5)
        local function call() peri.scope(function() model(kjt):values() end) end
        for _ = 1, 50 do call() end
        collectgarbage()
        collectgarbage()
        local live, objects = C.peri_mem_live(), C.peri_mem_objects()
        for _ = 1, 200 do call() end
        assert.is_true(C.peri_mem_live() <= live)
        assert.is_true(C.peri_mem_objects() <= objects)
      end
    end)

    it("take rows of every data type, and from files", function()
      for _, dtype in ipairs { "FP32", "FP16", "BF16" } do
        local fused = { optimizer = "sgd", learning_rate = 1, cache_params = dtype == "FP32" and { load_factor = 0.5 }
          or nil }
        local float = peri.EmbeddingBagCollection { device = device, fused_params = fused, tables = {
          peri.EmbeddingBagConfig { name = "t", num_embeddings = 50, embedding_dim = 8, feature_names = { "f" },
            data_type = dtype },
        } }
        local kjt = peri.KeyedJaggedTensor.from_lists { keys = { "f" }, { { 1, 2 }, { 3, 49 } }, device = device }
        local exact = peri.quantize_embeddings { module = float, dtype = dtype }
        assert.same(float(kjt):values():to_list(), exact(kjt):values():to_list())
        assert.equal(("QuantEmbeddingBagCollection(t: 50 x 8 %s SUM)"):format(dtype), tostring(exact))
      end
    end)

    it("cost memory only where they are no description", function()
      local model = peri.quantize_embeddings { module = trained(nil, { device = "meta" }), dtype = "INT2" }
      assert.equal("meta", model.device)
      assert.is_false(model:is_materialised())
      assert.equal("INT2", model.tables[3].data_type)
      assert.error_matches(function() model(batch(device, 1)) end,
        "QuantEmbeddingBagCollection: it is on device 'meta'")
    end)

    it("refuse bad inputs", function()
      local model = peri.quantize_embeddings { module = trained(), dtype = "INT8", bounds_check_mode = "FATAL" }
      local function bad(message, f, ...) assert.error_matches(f, message, nil, nil, ...) end
      local function call(lists, of)
        lists.keys, lists.device = { "f", "g", "h" }, device
        return function() (of or model)(peri.KeyedJaggedTensor.from_lists(lists)):values() end
      end
      bad("features is a table, wanted a KeyedJaggedTensor", function() model {} end)
      bad("table 'b', feature 'h', sample 1: id 9 at place 1 of the bag, allowed: 0..8",
        call { { { 1 }, {} }, { {}, {} }, { {}, { 1, 9 } } })
      bad("the batch has weights, but is_weighted is false",
        call { { { 1 } }, { {} }, { {} }, weights = { { { 1 } }, { {} }, { {} } } })
      bad("no feature 'h' %(of table 'b'%); those are: f, g", function()
        model(peri.KeyedJaggedTensor.from_lists { keys = { "f", "g" }, { { 1 } }, { { 1 } }, device = device })
      end)
      local weighted = Bags { tables = model.tables, is_weighted = true, device = device }
      bad("is_weighted, but the batch has no weights", call({ { { 1 } }, { {} }, { {} } }, weighted))
      bad("rows are not trained, and have no learning rate", function() model:set_learning_rate(1) end)
      bad("table 'a' has no state 'momentum1'; its only one: weight", function()
        model:table_state("a", "momentum1")
      end)
      bad("no table 'z'; tables: a, b, c", function() model:weight "z" end)
      bad("write_rows: source is 3, wanted a tensor", function() model:write_rows("a", 0, 3) end)
      local mapping = peri.tensor({ 0, 1, 2, 3, 4, 5, 6, 7, -1 }, "i32", device)
      local pruned = peri.quantize_embeddings { module = trained(), pruned = { b = mapping } }
      bad("table 'b': id 12, allowed: 0..8, or %-1 for none", call({ { { 1 } }, { { 12 } }, { {} } }, pruned))
      local floats = peri.KeyedJaggedTensor { keys = { "f", "g", "h" },
        values = peri.tensor({ 1, 2, 3 }, "f32", device), lengths = peri.tensor({ 1, 1, 1 }, "i32", device) }
      bad("ids are f32, allowed: i64, i32", function() pruned(floats) end)
      bad("ids is f32 %[3%], allowed: i64, i32", function() model(floats) end)
    end)
  end)
end

describe("quantize_embeddings", function()
  local function trained(more)
    local args = { tables = tables("EmbeddingBagConfig", { "SUM", "SUM", "SUM" }) }
    for k, v in pairs(more or {}) do args[k] = v end
    return peri.EmbeddingBagCollection(args)
  end
  local Net = peri.nn.Module:extend "Net"
  function Net:init()
    self.sparse = { trained(), peri.EmbeddingCollection { tables = tables("EmbeddingConfig", nil, 4) } }
    self.over = peri.nn.Linear { in_features = 52, out_features = 2 }
  end
  function Net:forward(kjt) return self.over(self.sparse[1](kjt):values()) end

  it("makes a copy of a whole model", function()
    local model = Net()
    local kjt = batch("cpu", 4)
    local want = model(kjt):to_list()
    local net, made = peri.quantize_embeddings { module = model, dtype = "INT8" }
    assert.is_false(rawequal(model, net))
    assert.is_true(model.training)
    assert.same({ "sparse.0", "sparse.1" }, peri.util.map(made, function(m) return m.path end))
    assert.is_true(Bags.is(net.sparse[1]))
    assert.is_true(Rows.is(net.sparse[2]))
    assert.is_false(net.training)
    assert.is_false(rawequal(made[1].module, model.sparse[1]))
    golden.assert_near(want, net(kjt):to_list(), { abs = 0.05, rel = 0 })
    local copy = peri.embed.copy_to_device(net)
    want = net(kjt):to_list()
    assert.same(want, copy(kjt):to_list())
    net.over.weight:detach():fill(0)
    net.sparse[1]:weight "a":fill(0)
    assert.same(want, copy(kjt):to_list())
    assert.is_false(rawequal(copy.over, net.over))
  end)

  it("takes a DLRM", function()
    local model = peri.nn.DLRM { embedding_bag_collection = trained { tables = {
      peri.EmbeddingBagConfig { name = "a", num_embeddings = 50, embedding_dim = 8, feature_names = { "f" } },
    } }, dense_in_features = 4, dense_arch_layer_sizes = { 8, 8 }, over_arch_layer_sizes = { 8, 1 } }
    local dense = peri.Tensor.uniform({ 2, 4 }, 0, 1, 1, 1)
    local kjt = peri.KeyedJaggedTensor.from_lists { keys = { "f" }, { { 1, 2 }, {} } }
    local want = model(dense, kjt):to_list()
    local served = peri.quantize_embeddings { module = model, dtype = "INT8" }
    golden.assert_near(want, served(dense, kjt):to_list(), { abs = 0.02, rel = 0 })
    assert.is_true(Bags.is(served.sparse_arch.embedding_bag_collection))
    assert.same(want, model(dense, kjt):to_list())
  end)

  local fused = { optimizer = "rowwise_adagrad", learning_rate = 0.25 }
  local trainers = {
    ["a collection"] = function() return trained { fused_params = fused } end,
    ["a collection without an optimizer of its own"] = function() return trained() end,
    ["a model"] = function()
      local net = Net()
      net.sparse[1] = trained { fused_params = fused }
      return net
    end,
    ["a collection behind processors"] = function()
      return peri.embed.FeatureProcessedEmbeddingBagCollection {
        embedding_bag_collection = trained { fused_params = fused, is_weighted = true },
        feature_processors = peri.embed.PositionWeightedModuleCollection { max_feature_lengths = { f = 40 } } }
    end,
  }
  local function numbers(y) return peri.Tensor.is(y) and y or y:values() end
  for what, make in peri.util.ordered(trainers) do
    it(("leaves %s to train on as if nothing had been quantized, and the copy does not move"):format(what), function()
      local function run(quantize)
        peri.nn.manual_seed(3)
        local model, losses = make(), {}
        local params = model:parameters()
        local optimizer = #params > 0 and peri.nn.optim.SGD { params = params, lr = 0.5 }
        local served, before
        for step = 1, 4 do
          if quantize and step == 3 then
            served = peri.quantize_embeddings { module = model }
            before = numbers(served(batch("cpu", 4))):to_list()
          end
          local loss = numbers(model(batch("cpu", 4))):square():sum()
          losses[step] = loss:item()
          if optimizer then optimizer:zero_grad() end
          loss:backward()
          if optimizer then optimizer:step() end
        end
        if quantize then assert.same(before, numbers(served(batch("cpu", 4))):to_list()) end
        return losses
      end
      local want = run(false)
      assert.is_true(want[4] ~= want[3])
      assert.same(want, run(true))
    end)
  end

  it("takes classes of one's own", function()
    local Own = peri.nn.Module:extend "Own"
    function Own.from_float(module, args)
      local own = Own()
      own.inner = Bags.from_float(module, args)
      return own
    end
    local mapping = { { peri.EmbeddingBagCollection, Own } }
    local model = peri.quantize_embeddings { module = trained(), dtype = "FP8", additional_mapping = mapping }
    assert.is_true(Own.is(model))
    assert.equal("FP8", model.inner.tables[1].data_type)
  end)

  it("refuses what it cannot do", function()
    local function refused(args, message)
      assert.error_matches(function() peri.quantize_embeddings(args) end, message)
    end
    refused({ module = 3 }, "quantize_embeddings: module is 3, wanted an nn.Module")
    refused({ module = trained(), inplace = true },
      "inplace is true, allowed: false: tables that were trained would stop to learn")
    refused({ module = trained(), dtype = "INT3" },
      "from_float: dtype is 'INT3', allowed: BF16, FP16, FP32, FP8, INT2, INT4, INT8")
    refused({ module = trained(), output_dtype = "INT8" }, "output_dtype is 'INT8', allowed: BF16, FP16, FP32")
    refused({ module = trained(), bounds_check_mode = "LOUD" }, "bounds_check_mode is 'LOUD'")
    refused({ module = trained(), per_table_weight_dtype = { z = "INT8" } }, "per_table_weight_dtype names table 'z'")
    refused({ module = trained(), per_table_weight_dtype = { a = "INT3" } }, "dtype of table 'a' is 'INT3'")
    refused({ module = trained(), pruned = { z = 1 } }, "pruned names table 'z'")
    refused({ module = trained(), pruned = { a = 1 } }, "table 'a': the remapping is 1, wanted a tensor")
    refused({ module = trained(), pruned = { a = peri.zeros({ 3 }, "i32") } },
      "'a': the remapping is i32 %[3%], wanted i32 or i64 %[11%]")
    refused({ module = trained(), pruned = { a = peri.zeros({ 11 }, "i32") } },
      "table 'a': the remapping gives id 1 row 0 again")
    refused({ module = trained(), pruned = { a = peri.full({ 11 }, -2, "i32") } },
      "id 0 row %-2, allowed: %-1, and each of 0..10 once")
    refused({ module = trained(), additional_mapping = { {} } },
      "additional_mapping%[1%] is a table, wanted { a class of modules")
    refused({ module = peri.nn.Linear { in_features = 1, out_features = 1 } },
      "'Linear' has no module that could be quantized")
    assert.error_matches(function() Bags.from_float(trained().tables, {}) end,
      "collection is a table, wanted an EmbeddingBagC")
    assert.error_matches(function() peri.embed.copy_to_device(trained()) end,
      "EmbeddingBagCollection is trained, and has no copies")
    local configs = peri.util.map(trained().tables, function(t)
      return peri.EmbeddingBagConfig { name = t.name, num_embeddings = 2, embedding_dim = 4,
        feature_names = t.feature_names, data_type = "INT8" }
    end)
    assert.error_matches(function() peri.EmbeddingBagCollection { tables = configs } end,
      "table 'a' holds INT8, which is looked up only: see QuantEmbeddingBagCollection")
  end)

  it("compiles", function()
    local model, kjt = peri.quantize_embeddings { module = trained() }, batch("cpu", 3)
    local function call() model(kjt):values() end
    jit_support.assert_compiles("a quantized lookup", function() peri.scope(call) end)
  end)
end)
