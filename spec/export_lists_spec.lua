-- Models whose rows are as many as a batch has ids (examples/models: din, hstu), as model files: they have the bits of
-- their model for any samples together and alone, in Lua and over HTTP; numbers of lists that do not fit are refused by
-- name.
-- takes: 2 s
local json = require "dkjson"
local peri = require "perilune"
local shell = require "spec.support.shell"
local serving = require "spec.support.serving"
local nn, sparse = peri.nn, peri.sparse

local folder, clean = shell.temporary()
teardown(clean)

local ROWS = 30
--- A batch of the samples from `first` to `last`; lengths: key -> function(sample), ids are functions of key, sample
--- and place.
local function lists(lengths, first, last)
  local keys, values, all = peri.util.keys(lengths), {}, {}
  for k, key in ipairs(keys) do
    for b = first, last do
      all[#all + 1] = lengths[key](b)
      for i = 1, all[#all] do values[#values + 1] = (k * 7 + b * 5 + i * 3) % ROWS end
    end
  end
  return peri.KeyedJaggedTensor { keys = keys, values = peri.tensor(values, "i64"), lengths = all, stride = last
    - first + 1 }
end

local function one() return 1 end
local function some(b) return b * b % 7 end
local function of_din(first, last)
  return { sparse_features = lists({ history = some, candidate = one }, first, last) }
end

local function length(b) return b * b % 9 + 1 end
local function targets_of(b) return b % 3 % (length(b) + 1) end
local function times_of(b)
  local times = {}
  for i = 1, length(b) do times[i] = 1700000000 + b * 1000 + i * 377 * b end
  return times
end
local function of_hstu(first, last)
  local times, targets, labels = {}, {}, {}
  for b = first, last do
    targets[#targets + 1] = targets_of(b)
    for _, x in ipairs(times_of(b)) do times[#times + 1] = x end
    for i = 1, targets_of(b) do labels[#labels + 1] = i % 2 end
  end
  return { sparse_features = lists({ item = length, action = length }, first, last),
    timestamps = peri.tensor(times, "i64"), num_targets = peri.tensor(targets, "i64"), labels = peri.tensor(labels) }
end

local function model(name, args) return dofile(("examples/models/%s.lua"):format(name))(args) end
local function numbers(t)
  return table.concat(peri.util.map(t:reshape(-1):to_list(), function(x) return ("%.9g"):format(x) end), " ")
end

local function whole(t) return peri.util.map(t:to_list(), function(x) return tonumber(x) end) end
local function size_of(path) return #shell.read(path) end

describe("a model of lists", function()
  it("has the bits of its file, for samples together and alone: din", function()
    local path, din = folder .. "/din.peri", model("din", { items = ROWS })
    assert.equal(0, din:export(path, { batches = { of_din(1, 40), of_din(1, 700) } }).differ)
    local file, alone = peri.export.open(path), {}
    local together = numbers(file:predict(of_din(1, 12)).logits)
    for b = 1, 12 do alone[b] = numbers(file:predict(of_din(b, b)).logits) end
    assert.equal(together, table.concat(alone, " "))
    local wrong = { sparse_features = lists({ history = some, candidate = function(b) return b == 3 and 2 or 1 end }, 1,
      5) }
    assert.error_matches(function() file:predict(wrong) end, "input 'candidate', sample 2: a list of 2, allowed: 1")
    file:release()
    local bytes = size_of(path)
    local report = din:export(path, { batches = { of_din(1, 40) }, size = bytes - 300, allowed_difference = 1 })
    assert.truthy(size_of(path) <= bytes - 300 and report.difference < 0.1)
  end)

  it("has the bits of its file, and a list of answers for a sample: hstu", function()
    local path = folder .. "/hstu.peri"
    assert.equal(0, model("hstu", { items = ROWS, actions = ROWS, max_seq_len = 9 }):export(path,
      { batches = { of_hstu(1, 40), of_hstu(1, 300) }, name = "hstu" }).differ)
    local file, alone, lengths = peri.export.open(path), {}, {}
    local together = file:predict(of_hstu(1, 12))
    for b = 1, 12 do
      alone[#alone + 1], lengths[b] = targets_of(b) > 0 and numbers(file:predict(of_hstu(b, b)).logits) or nil,
        targets_of(b)
    end
    assert.equal(numbers(together.logits), table.concat(alone, " "))
    assert.same(lengths, whole(together["logits.lengths"]))
    local function refused(what, change)
      local batch = of_hstu(1, 5)
      change(batch)
      assert.error_matches(function() file:predict(batch) end, what)
    end
    refused("input 'num_targets', sample 3 is 9, allowed: whole numbers 0..8, the length of its list 'item'",
      function(batch)
      batch.num_targets = peri.tensor({ 0, 0, 0, 9, 0 }, "i64")
    end)
    refused("input 'action', sample 1: a list of %d, allowed: 5, the length of its list 'item'", function(batch)
      batch.sparse_features = lists({ item = length, action = function(b) return b == 2 and 4 or length(b) end }, 1, 5)
    end)
    refused("input 'timestamps', sample 0: a list of 10 ids, allowed: up to 9", function(batch)
      batch.sparse_features = lists({ item = function() return 10 end, action = function() return 10 end }, 1, 5)
      batch.timestamps = peri.Tensor.zeros({ 50 }, "i64")
    end)
    file:release()
  end)

  it("is refused with its line where members of different lists meet", function()
    local collection = peri.EmbeddingCollection { tables = { peri.EmbeddingConfig { name = "t", num_embeddings = ROWS,
      embedding_dim = 4, feature_names = { "history", "other" } } } }
    local function other(b) return some(b <= 5 and 6 - b or b <= 11 and 17 - b or b) end -- as many in all
    local batch = { sparse_features = lists({ history = some, other = other }, 1, 42) }
    local Net = nn.Module:extend "Net"
    function Net:init() self.rows = collection end
    local function try(why, f)
      local ok, said = pcall(function()
        Net():export(folder .. "/no.peri", { batches = { batch }, call = function(m, b)
          return f(m.rows(b.sparse_features))
        end })
      end)
      assert.is_false(ok)
      assert.matches("export: .*export_lists_spec.lua:%d+: .*" .. why, tostring(said))
    end
    try("is of the members of 'other', beside something of the members of 'history'", function(rows)
      return rows.history:values() + rows.other:values()
    end)
    try("ids, allowed: 0, 1, ... for all members of a list", function(rows)
      local n = rows.history:values():size(1)
      return nn.embedding.embedding_bag(rows.history:values(), peri.tensor({ 0 }, "i64"):expand { n }:contiguous(),
        rows.history:offsets(), "sum", nil, true)
    end)
    try("values of the members of 'history', wanted: those of samples", function(rows)
      local x = rows.history:values()
      return sparse.index_select_dim0(x, sparse.sequence_numbers(rows.history:offsets(), x:size(1)))
    end)
  end)

  it("counts the members of lists whose ids nobody looks up", function()
    local Net = nn.Module:extend "Net"
    function Net:init()
      self.rows = peri.EmbeddingCollection { tables = { peri.EmbeddingConfig { name = "t", num_embeddings = ROWS,
        embedding_dim = 4, feature_names = { "item" } } } }
      self.times = nn.Embedding { num_embeddings = 8, embedding_dim = 3 }
    end
    function Net:forward(b)
      local offsets = self.rows(b.sparse_features).item:offsets()
      local rows = self.times(sparse.time_buckets { seq_offsets = offsets, timestamps = b.times, num_buckets = 7 })
      return nn.embedding.embedding_bag(rows, peri.arange(0, rows:size(1), 1, "i64"), offsets, "sum", nil, true)
    end
    local batch, path = { sparse_features = lists({ item = some }, 1, 30) }, folder .. "/counted.peri"
    batch.times = peri.arange(0, 100 * batch.sparse_features:values():size(1), 100, "i64")
    assert.equal(0, Net():export(path, { batches = { batch } }).differ)
    assert.same({ "times", "item" }, peri.util.map(peri.export.open(path):inputs(), function(x) return x.name end))
  end)

  --- Lists of one feature with weights, a price for each id, and a place in each list.
  local function of_shop(first, last)
    local prices, weights, starts = {}, {}, {}
    for b = first, last do
      for i = 1, some(b) do
        prices[#prices + 1], weights[#weights + 1] = (b * 3 + i * 5) % 17 / 4 - 1, (b % 4 + i) / 8
      end
      starts[#starts + 1] = b % (some(b) + 1)
    end
    local kjt = lists({ item = some }, first, last)
    return { prices = peri.tensor(prices), starts = peri.tensor(starts, "i64"),
      items = peri.KeyedJaggedTensor { keys = { "item" }, values = kjt:values(), lengths = kjt:lengths(),
        weights = peri.tensor(weights) } }
  end
  local Shop = nn.Module:extend "Shop"
  function Shop:init()
    self.rows = peri.EmbeddingCollection { tables = { peri.EmbeddingConfig { name = "t", num_embeddings = ROWS,
      embedding_dim = 4, feature_names = { "item" } } } }
    self.gru = nn.GRU { input_size = 4, hidden_size = 3, bidirectional = true }
    self.norm, self.over = nn.LayerNorm { normalized_shape = 4 }, nn.Linear { in_features = 4, out_features = 2 }
  end
  local function pooled(x, lengths)
    return nn.embedding.embedding_bag(x, peri.arange(0, x:size(1), 1, "i64"),
      sparse.asynchronous_complete_cumsum(lengths), "sum", nil, true)
  end
  function Shop:forward(b)
    local item = peri.util.resolve(self.rows(b.items)).item
    local x = item:values() * (item:weights() + b.prices):reshape(-1, 1)
    local score, mask = x:sum(2), x:select(2, 0):gt(0)
    local chosen, many = sparse.masked_select_jagged_1d(score, item:lengths(), mask)
    local paid = sparse.masked_select_jagged_1d(b.prices, item:lengths(), mask) -- the same members: they meet
    local last, two = sparse.truncate_jagged(x, item:lengths(), 2)
    local part, three = sparse.jagged_slice(x, item:lengths(), b.starts, 3)
    local mapped = item:map(self.norm):map(self.over)
    local steps, state = self.gru(item:to_padded_dense(4):transpose(1, 2)) -- [steps, samples, columns]
    return { some = pooled((chosen * paid):reshape(-1, 1), many), last = pooled(last, two),
      part = pooled(part, three), best = chosen + paid,
      mapped = pooled(mapped:values() * mapped:weights():reshape(-1, 1), mapped:lengths()),
      gru = peri.nn.functional.cat({ steps:mean(1), state:select(1, 1) }, 2) }
  end

  it("takes numbers and weights of members, and parts of lists", function()
    local path = folder .. "/shop.peri"
    assert.equal(0, Shop():export(path, { batches = { of_shop(1, 40), of_shop(1, 300) }, name = "shop" }).differ)
    local file, alone = peri.export.open(path), {}
    local together = file:predict(of_shop(1, 12))
    for b = 1, 12 do
      for name, t in peri.util.ordered(file:predict(of_shop(b, b))) do
        if t:numel() > 0 then alone[name] = (alone[name] and alone[name] .. " " or "") .. numbers(t) end
      end
    end
    for name, t in peri.util.ordered(together) do assert.equal(numbers(t), alone[name], name) end
    assert.equal(0, file:predict(of_shop(1, 0)).last:size(1))
    local function refused(what, change)
      local batch = of_shop(1, 5)
      change(batch)
      assert.error_matches(function() file:predict(batch) end, what)
    end
    refused("input 'starts', sample 2 is 3, allowed: whole numbers 0..2, the length of its list 'item'", function(b)
      b.starts = peri.tensor({ 0, 0, 3, 0, 0 }, "i64")
    end)
    refused("input 'prices' is tensor f32 %[3%] on cpu, wanted %d+ numbers, one for each id of 'item'", function(b)
      b.prices = peri.tensor { 1, 2, 3 }
    end)
    refused("input 'prices', sample 0, number 0 is NaN, allowed: finite numbers", function(b)
      b.prices = b.prices * (0 / 0)
    end)
    file:release()
  end)

  it("is refused where numbers may be of two lists, and by the line of what depends on data in Lua", function()
    local collection = peri.EmbeddingCollection { tables = { peri.EmbeddingConfig { name = "t", num_embeddings = ROWS,
      embedding_dim = 4, feature_names = { "a", "b" } } } }
    local function other(b) return some(43 - b) end -- as many in all
    local Net = nn.Module:extend "Net"
    function Net:init() self.rows = collection end
    local batch = { ids = lists({ a = some, b = other }, 1, 42) }
    batch.prices = peri.Tensor.zeros { batch.ids.a:values():size(1) }
    local function try(why, f)
      assert.error_matches(function()
        Net():export(folder .. "/no.peri", { batches = { batch }, call = function(m, b)
          return f(m.rows(b.ids).a, b)
        end })
      end, "export_lists_spec.lua:%d+: .*" .. why)
    end
    try("'prices' has as many numbers as 'a' has ids, and as 'b' has: whose they are is not known", function(a, b)
      return a:values() * b.prices:reshape(-1, 1)
    end)
    try("'to_list' makes what the model does depend", function(a)
      return (sparse.truncate_jagged(a:values(), a:lengths(), tonumber(a:lengths():to_list()[1])))
    end)
    try("of what JaggedTensor:map made; pad the collection's rows, then call the layer", function(a)
      return a:map(peri.nn.functional.relu):to_padded_dense(4)
    end)
    try("of a selection of the members of 'a', beside something of the members of 'a'", function(a)
      return a:values() + sparse.truncate_jagged(a:values(), a:lengths(), 9)
    end)
  end)

  it("answers over HTTP what it answers in Lua", function()
    if serving.missing() then return pending(serving.missing()) end
    local server = serving.start(folder .. "/hstu.peri")
    local file, rows = peri.export.open(folder .. "/hstu.peri"), {}
    for b = 1, 5 do
      local ids = whole(of_hstu(b, b).sparse_features:values())
      local n = length(b)
      local action, item = { unpack(ids, 1, n) }, { unpack(ids, n + 1) } -- keys are in the order of names
      rows[b] = { item = item, action = action, timestamps = times_of(b), num_targets = targets_of(b) }
    end
    local said = json.decode(server:post("v1/models/hstu:predict", json.encode { instances = rows }))
    local wanted, got = file:predict(of_hstu(1, 5)), {}
    for b, list in ipairs(said.predictions) do
      assert.equal(targets_of(b), #list)
      for _, x in ipairs(list) do got[#got + 1] = ("%.9g"):format(peri.tensor({ x }):item(0)) end
    end
    assert.equal(numbers(wanted.logits), table.concat(got, " "))
    rows[2].action = { 1, 2 }
    assert.matches("feature 'action', sample 1: a list of 2, wanted: 5, as long as that of 'item'",
      server:post("v1/models/hstu:predict", json.encode { instances = rows }))
    rows[2].action, rows[1].timestamps[1] = rows[3].action, "9223372036854775808" -- no id: it would be negative
    assert.matches("feature 'timestamps', sample 0: 9223372036854775808, allowed: up to 9223372036854775807",
      server:post("v1/models/hstu:predict", json.encode { instances = rows }))
    server:stop()
  end)

  it("takes numbers of members over HTTP, in rows and as tensors", function()
    if serving.missing() then return pending(serving.missing()) end
    local server, file, rows = serving.start(folder .. "/shop.peri"), peri.export.open(folder .. "/shop.peri"), {}
    local b, at = of_shop(1, 5), 0
    local ids, prices, weights = whole(b.items:values()), b.prices:to_list(), b.items:weights():to_list()
    for i = 1, 5 do
      local n = some(i)
      rows[i] = { item = setmetatable({ unpack(ids, at + 1, at + n) }, { __jsontype = "array" }),
        prices = setmetatable({ unpack(prices, at + 1, at + n) }, { __jsontype = "array" }),
        ["item.weights"] = setmetatable({ unpack(weights, at + 1, at + n) }, { __jsontype = "array" }),
        starts = i % (n + 1) }
      at = at + n
    end
    local path, got, wanted = "v1/models/shop:predict", {}, file:predict(b)
    for _, row in ipairs(json.decode(server:post(path, json.encode { instances = rows })).predictions) do
      for _, x in ipairs(row.last) do got[#got + 1] = ("%.9g"):format(peri.tensor({ x }):item(0)) end
    end
    assert.equal(numbers(wanted.last), table.concat(got, " "))
    local function tensor(name, datatype, data)
      return { name = name, datatype = datatype, shape = { #data }, data = data }
    end
    local v2 = json.decode(server:post("v2/models/shop/infer", json.encode { inputs = { tensor("item", "INT64", ids),
      tensor("item.lengths", "INT64", { some(1), some(2), some(3), some(4), some(5) }),
      tensor("item.weights", "FP32", weights), tensor("prices", "FP32", prices),
      tensor("starts", "FP32", whole(b.starts)) } }), 1, nil, nil)
    for _, o in ipairs(v2.outputs) do
      if o.name == "part" then assert.equal(numbers(wanted.part), numbers(peri.tensor(o.data))) end
    end
    rows[1].prices = { 1, 2, 3 }
    assert.matches("feature 'prices', sample 0: 3 numbers, wanted: 1, one for each of 'item'",
      server:post(path, json.encode { instances = rows }))
    server:stop()
  end)
end)
