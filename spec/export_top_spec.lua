-- Retrieval in model files: a model that ends in sparse.top_products becomes a file that answers with the best items
-- and their scores, as a sort of all products says; over HTTP too; and it follows a run whose items change.
-- takes: 2 s
local ffi = require "ffi"
local json = require "dkjson"
local peri = require "perilune"
local shell = require "spec.support.shell"
local serving = require "spec.support.serving"
local nn = peri.nn

local folder, clean = shell.temporary()
teardown(clean)
local ITEMS, DIM, K = 300, 8, 5

local Towers = nn.Module:extend "Towers"
function Towers:init()
  self.users = peri.EmbeddingBagCollection { fused_params = { optimizer = "sgd", learning_rate = 0.1 }, tables = {
    peri.EmbeddingBagConfig { name = "users", num_embeddings = 50, embedding_dim = DIM, feature_names = { "user" } } } }
  self.tower = nn.Linear { in_features = DIM, out_features = DIM }
  self.items = nn.Parameter(peri.Tensor.uniform({ ITEMS, DIM }, -1, 1, 3))
end
function Towers:query(b) return self.tower(self.users(b.ids):values()) end
function Towers:forward(b)
  local scores, items = peri.sparse.top_products(self:query(b), self.items, K)
  return { scores = scores, items = items }
end

local function batch(n)
  local values, lengths = {}, {}
  for i = 1, n do values[i], lengths[i] = i * 7 % 50, 1 end
  return { ids = peri.KeyedJaggedTensor { keys = { "user" }, values = values, lengths = lengths } }
end

--- The numbers of the K best items of each query, by all products.
local function by_sorting(model, b, round)
  local items = round and model.items:detach():to(round):to "f32" or model.items:detach()
  local queries = peri.export.ordered(function() return peri.ffi.no_grad(model.query, model, b):to_table() end)
  local rows, result = items:to_table(), {}
  for q, query in ipairs(queries) do
    local list = {}
    for i, row in ipairs(rows) do
      local sum = 0
      for d = 1, DIM do sum = sum + query[d] * row[d] end
      list[i] = { number = i - 1, score = sum }
    end
    table.sort(list, function(x, y) return x.score > y.score end)
    result[q] = { unpack(list, 1, K) }
  end
  return result
end

local function same(want, scores, items)
  for q, list in ipairs(want) do
    for k, x in ipairs(list) do
      assert.equal(x.number, items[q][k])
      assert.is_true(math.abs(x.score - scores[q][k]) < 1e-5)
    end
  end
end

describe("a model file that finds items", function()
  local path = folder .. "/towers.peri"

  it("has those of a sort of all products, whatever the dtype of the items, and the bits of the model", function()
    local model = Towers()
    for dtype, round in peri.util.ordered { f32 = false, bf16 = "bf16", f16 = "f16" } do
      local report = model:export(path, { batches = { batch(40) }, tables = { items = dtype, default = "f32" },
        allowed_difference = dtype ~= "f32" and 1e9 or nil })
      if dtype == "f32" then assert.equal(0, report.differ) end
      local answers = peri.export.open(path):predict(batch(40))
      same(by_sorting(model, batch(40), round), answers.scores:to_table(), answers.items:to_table())
    end
    model:export(path, { batches = { batch(40) }, tables = { items = "int8", default = "f32" },
      allowed_difference = 1e9 })
    local found, hits = peri.export.open(path):predict(batch(40)).items:to_table(), 0
    for q, list in ipairs(by_sorting(model, batch(40))) do
      for _, x in ipairs(list) do hits = hits + (peri.util.index_of(found[q])[x.number] and 1 or 0) end
    end
    assert.is_true(hits > 0.9 * 40 * K)
  end)

  it("answers over HTTP, and follows a run whose items change", function()
    if serving.missing() then return pending(serving.missing()) end
    local model = Towers()
    model:export(path, { batches = { batch(40) }, name = "towers" })
    local saver = peri.checkpoint.Saver { folder = folder .. "/run", parts = { model = model }, every = 1, keep = 9 }
    local server = serving.start(path, "--watch 50ms --follow " .. folder .. "/run")
    local function ask()
      return json.decode(server:post("v1/models/towers:predict", '{"instances":[{"user":7},{"user":14}]}')).predictions
    end
    for step = 1, 3 do
      local want = by_sorting(model, batch(2))
      local list = ask()
      same(want, { list[1].scores, list[2].scores }, { list[1].items, list[2].items })
      model.items:copy(peri.Tensor.uniform({ ITEMS, DIM }, -1, 1, 10 + step))
      saver:step(step)
      for _ = 1, 100 do
        if server:get("health"):find(('"version":"%d"'):format(step), 1, true) then break end
        os.execute "sleep 0.05"
      end
    end
    saver:close()
    local two, all = '"instances":[{"user":7},{"user":14}]', ask()
    local few = json.decode(server:post("v1/models/towers:predict", '{"k":2,' .. two .. "}")).predictions
    for q = 1, 2 do
      for _, name in ipairs { "scores", "items" } do assert.same({ unpack(all[q][name], 1, 2) }, few[q][name]) end
    end
    local v2 = '{"inputs":[{"name":"user","shape":[2],"datatype":"INT64","data":[7,14]}],"parameters":{"k":1%s}}'
    local best = json.decode(server:post("v2/models/towers/infer", v2:format ""))
    assert.same({ { 2, 1 }, { all[1].items[1], all[2].items[1] } }, { best.outputs[1].shape, best.outputs[1].data })
    local binary = server:post("v2/models/towers/infer", v2:format ',"binary_data_output":true'):match "}%]}(.*)"
    local bytes = ffi.new("float[4]")
    assert.equal(16, #binary)
    ffi.copy(bytes, binary, 16)
    assert.same({ all[1].items[1], all[2].items[1] }, { bytes[0], bytes[1] })
    for _, k in ipairs { "0", "6", "-1", "1.5", '"2"' } do
      assert.matches('"error":', server:post("v1/models/towers:predict", ('{"k":%s,%s}'):format(k, two)))
    end
    assert.matches("k is 6, allowed: 1 to 5", server:post("v1/models/towers:predict", ('{"k":6,%s}'):format(two)))
    server:stop()
  end)

  it("finds among the rows of a table of raw ids, and follows a run that learns and forgets some", function()
    local function bags(name, kind)
      local t = peri.EmbeddingBagConfig { name = name, num_embeddings = 40, embedding_dim = DIM,
        feature_names = { name } }
      return peri.ManagedCollisionEmbeddingBagCollection {
        embedding_bag_collection = peri.EmbeddingBagCollection { tables = { t },
          fused_params = { optimizer = "rowwise_adagrad", learning_rate = 0.3 } },
        managed_collision_collection = peri.ManagedCollisionCollection { embedding_configs = { t },
          managed_collision_modules = { [name] = kind } } }
    end
    local function ids(name, from)
      local values, lengths = {}, {}
      for i = 1, 16 do values[i], lengths[i] = (from + i * i % 37 + 0LL) * 0x9e3779b97f4a7c1LL, 1 end
      return peri.KeyedJaggedTensor { keys = { name }, values = peri.tensor(values, "i64"), lengths = lengths }
    end
    local Raw = nn.Module:extend "Raw"
    function Raw:init()
      self.users = bags("user", peri.HashZchManagedCollisionModule { zch_size = 40, total_num_buckets = 2,
        on_miss = "hash" })
      self.items = bags("item", peri.MCHManagedCollisionModule { zch_size = 40, eviction_interval = 1,
        eviction_policy = peri.embed.LRU_EvictionPolicy {} })
    end
    function Raw:query(b) return (self.users(b.ids):values()) end
    function Raw:forward(b)
      local scores, items = peri.sparse.top_products(self:query(b), self.items:embedding_module():weight "item", K)
      return { scores = scores, items = items }
    end
    local model, run = Raw(), folder .. "/raw"
    local saver = peri.checkpoint.Saver { folder = run, parts = { model = model }, every = 1, full_every = 4, keep = 9 }
    local asked, follower = { ids = ids("user", 0) }, nil
    for step = 1, 9 do
      peri.scope(function()
        (model:query { ids = ids("user", step) } * (model.items(ids("item", 7 * step)):values())):sum():backward()
      end)
      assert.equal(0, model:export(path, { batches = { asked } }).differ)
      follower = follower or peri.export.follow(path, run)
      saver:step(step)
      local now = assert(follower:poll())
      local mine, fresh = now:predict(asked), peri.export.open(path):predict(asked)
      for _, name in ipairs { "scores", "items" } do assert.same(fresh[name]:to_table(), mine[name]:to_table()) end
      model:eval() -- ids that it does not know stay unknown
      local rows, queries, found = model.items:embedding_module():weight("item"):to_table(),
        peri.ffi.no_grad(model.query, model, asked):to_table(), mine.scores:to_table()
      for q, query in ipairs(queries) do
        local best = -math.huge
        for _, row in ipairs(rows) do
          local sum = 0
          for d = 1, DIM do sum = sum + query[d] * row[d] end
          best = math.max(best, sum)
        end
        assert.is_true(math.abs(best - found[q][1]) < 1e-5)
      end
      model:train()
      now:release()
    end
    assert.is_true(model.items:statistics().item.evicted > 20)
    saver:close()
  end)

  it("refuses items that depend on the batch", function()
    local Bad = Towers:extend "Bad"
    function Bad:forward(b)
      local q = self:query(b)
      return { scores = (peri.sparse.top_products(q, q, 2)) }
    end
    local bad = Bad()
    assert.error_matches(function() bad:export(path, { batches = { batch(40) } }) end, "items that depend on the batch")
  end)
end)
