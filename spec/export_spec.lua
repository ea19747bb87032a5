-- A model file answers what its model answers, bit for bit, whatever stands beside a sample; what cannot be written
-- down is refused.
local peri = require "perilune"
local bits = require "spec.support.bits"
local nn, F = peri.nn, peri.nn.functional

local NAMES = { "a", "b", "c" }
local ROWS = 50

local function batch(n, seed, weighted)
  local lengths, values, weights, labels = {}, {}, {}, {}
  local state = seed
  local function draw(most) -- a generator of its own: the same numbers everywhere
    state = (state * 1103515245 + 12345) % 2 ^ 31
    return math.floor(state / 2 ^ 31 * most)
  end
  for _ = 1, #NAMES * n do
    lengths[#lengths + 1] = draw(5)
    for _ = 1, lengths[#lengths] do
      values[#values + 1] = draw(ROWS)
      weights[#weights + 1] = draw(100) / 50
    end
  end
  for i = 1, n do labels[i] = draw(2) end
  return { dense_features = peri.Tensor.uniform({ n, 13 }, -1, 1, seed), labels = peri.tensor(labels),
    sparse_features = peri.KeyedJaggedTensor { keys = NAMES, values = values, lengths = lengths, weights = weighted
      and weights or nil } }
end

local function collection(args)
  args = args or {}
  local tables = {}
  for i, name in ipairs(NAMES) do
    tables[i] = peri.EmbeddingBagConfig { name = "t_" .. name, num_embeddings = ROWS, embedding_dim = 8,
      feature_names = { name }, pooling = args.pooling, data_type = args.data_type }
  end
  return peri.EmbeddingBagCollection { tables = tables, is_weighted = args.weighted,
    fused_params = { optimizer = "sgd", learning_rate = 0.1 } }
end

local function dlrm(args)
  return nn.DLRMTrain(nn.DLRM { embedding_bag_collection = collection(args), dense_in_features = 13,
    dense_arch_layer_sizes = { 20, 8 }, over_arch_layer_sizes = { 33, 1 } })
end

local function both(m, b) return m(b.dense_features, b.sparse_features) end

describe("a model file", function()
  local path
  before_each(function() path = os.tmpname() end)
  after_each(function() os.remove(path) end)

  local function export(model, options)
    options = options or {}
    options.batches = options.batches or { batch(40, 3, options.weighted), batch(150, 4, options.weighted) }
    options.weighted = nil
    return model:export(path, options), peri.export.open(path)
  end

  local function cross(args)
    args.embedding_bag_collection, args.dense_in_features = collection(), 13
    args.dense_arch_layer_sizes, args.over_arch_layer_sizes = { 8 }, { 16, 1 }
    return args
  end
  local models = {
    ["DLRM, mean"] = function() return dlrm { pooling = "MEAN" } end,
    ["DLRM, sum, weighted"] = function() return dlrm { weighted = true }, nil, true end,
    ["DLRM, f16 tables"] = function() return dlrm { data_type = "FP16" } end,
    ["DCN v2"] = function() return nn.DLRMTrain(nn.DLRM_DCN(cross { dcn_num_layers = 3, dcn_low_rank_dim = 5 })) end,
    ["projections"] = function()
      return nn.DLRMTrain(nn.DLRM_Projection(cross { interaction_branch1_layer_sizes = { 24 },
        interaction_branch2_layer_sizes = { 16 } }))
    end,
    ["DeepFM"] = function()
      return nn.SimpleDeepFMNN { num_dense_features = 13, embedding_bag_collection = collection(),
        hidden_layer_size = 20, deep_fm_dimension = 6 }, both
    end,
  }
  for name, make in peri.util.ordered(models) do
    it("has the bits of " .. name .. ", whatever the batch", function()
      local model, call, weighted = make()
      local report, file = export(model, { call = call, weighted = weighted })
      assert.equal(0, report.differ)
      local whole = file:predict(batch(150, 4, weighted)).logits
      local one = file:predict((function()
        local b = batch(150, 4, weighted)
        local ids, at = {}, 0
        local lengths = b.sparse_features:lengths():to_list()
        local values, weights = b.sparse_features:values():to_list(), weighted and b.sparse_features:weights():to_list()
        local mine = { values = {}, weights = {}, lengths = {} }
        for k = 1, #NAMES do
          for i = 1, 150 do
            local n = lengths[(k - 1) * 150 + i]
            if i == 131 then
              mine.lengths[k] = n
              for j = at + 1, at + n do
                table.insert(mine.values, values[j])
                table.insert(mine.weights, weights and weights[j])
              end
            end
            at = at + n
          end
        end
        ids.sparse_features = peri.KeyedJaggedTensor { keys = NAMES, values = peri.tensor(mine.values, "i64"),
          lengths = mine.lengths, weights = weighted and peri.tensor(mine.weights) or nil }
        ids.dense_features = b.dense_features:slice(1, 130, 131):contiguous()
        return ids
      end)()).logits
      assert.equal(bits(whole:slice(1, 130, 131):contiguous()), bits(one))
    end)
  end

  it("has the bits of a model of the other operations", function()
    local Odd = nn.Module:extend "Odd"
    function Odd:init()
      self.norm = nn.LayerNorm { normalized_shape = 13 }
      self.batch = nn.BatchNorm1d { num_features = 13 }
      self.scale = nn.Parameter(peri.Tensor.uniform({ 13 }, 0.5, 2, 9))
      self.cross = nn.VectorCrossNet { in_features = 13, num_layers = 2 }
      self.root, self.elu = nn.RMSNorm { normalized_shape = 13 }, nn.ELU {}
    end
    function Odd:forward(b)
      local x = self.batch(self.norm(b.dense_features)) * self.scale
      local parts = F.split(self.cross(x), { 4, 9 }, 2)
      local y = F.cat({ F.softmax(parts[2], 2), parts[1]:abs():sqrt(), F.gelu(x) - 1 }, 2)
      local cube = F.stack({ y:slice(2, -26, 8), y:narrow(2, 8, 8) }, 2) -- [samples, 2, 8]
      local gram = F.bmm(cube, cube:transpose(2, 3))
      local weighed = F.einsum("bi,i->b", x, self.scale) + F.einsum("i,bi->b", self.scale, x) + x:matmul(self.scale)
        + F.sum(F.einsum("bi,i->bi", x, self.scale) * x:gt(0), 2) * self.scale[0]
      return { weighed = weighed, sum = F.sum(cube, 3) + cube:matmul(self.scale:narrow(1, 2, 8)),
        mean = F.mean(gram, { 2, 3 }), most = 2 / (1 + F.exp(F.neg(y))),
        other = self.elu(self.root(x)) + (x * x):log1p() + x:sin() * x:cos() - x:erf() + (x * 2):floor()
          - x:ceil() * x:sign() + (x * 3):round() - (x * 4):trunc() }
    end
    local model = Odd()
    local report, file = export(model)
    assert.equal(0, report.differ)
    local outputs = peri.util.map(file:outputs(), function(o) return o.name end)
    assert.same({ "mean", "most", "other", "sum", "weighed" }, outputs)
  end)

  it("has fields of the batch as they are, products by einsum, and rows by numbers that were made whole", function()
    local Model = nn.Module:extend "Model"
    function Model:init()
      self.w = nn.Parameter(peri.Tensor.uniform({ 13, 6 }, -1, 1, 3))
      self.rows = nn.Embedding { num_embeddings = 4, embedding_dim = 3 }
    end
    function Model:forward(b)
      local x = b.dense_features
      return { same = x, product = F.einsum("bi,ij->bj", x:clone(), self.w), twice = x:to("f64"):to "f32" * 2,
        rows = self.rows((x * 4):clamp(-0.99, 3.99):to "i64"), more = x:gt(0):to("f16"):to "f32" }
    end
    local report = export(Model())
    assert.same({ 0, 190 * (13 * 3 + 6 + 13 * 3) }, { report.differ, report.numbers })
    assert.not_matches("follow", tostring(report))
  end)

  it("judges each output by labels of its own, where there are several", function()
    local Model = nn.Module:extend "Model"
    function Model:init() self.l = nn.Linear { in_features = 13, out_features = 2 } end
    function Model:forward(b)
      local y = self.l(b.dense_features)
      return { click = y:select(2, 0), buy = y:select(2, 1) }
    end
    local model, rows = Model(), 190
    local function saved(labels)
      local x = peri.Tensor.uniform({ rows, 13 }, -1, 1, 5)
      return peri.export.save(model, path, { batches = { { dense_features = x, labels = labels(x) } } })
    end
    -- labels of `buy` that its own logits decide: AUC 1; those of `click` are all 1, which no AUC is made of
    local function right(x) return model(x and { dense_features = x }).buy:gt(0):to "f32" end
    local report = saved(function(x) return { click = peri.ones { rows }, buy = right(x) } end)
    assert.same({ 1, "buy", 1 }, { #report.judged, report.judged[1].name, report.model.auc })
    assert.matches("output 'click' is not judged", tostring(report))
    report = saved(function(x) return { click = 1 - right(x), buy = right(x) } end)
    assert.same({ "buy", "click" }, { report.judged[1].name, report.judged[2].name })
    assert.matches("output 'buy' beside its labels: AUC 1%.0+, NE", tostring(report))
    assert.is_true(report.judged[2].model.auc < 1)
    assert.error_matches(function() saved(function(x) return F.cat({ right(x), right(x) }, 1) end) end,
      "380 labels beside 190 numbers of output 'buy'")
    assert.error_matches(function() saved(function(x) return { clik = right(x) } end) end, "clik")
  end)

  it("is refused where an output that is not the first loses more than is allowed", function()
    local Model = nn.Module:extend "Model"
    function Model:init()
      self.e = peri.EmbeddingBagCollection { tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = 50,
        embedding_dim = 4, feature_names = { "f" } } } }
    end
    function Model:forward(b)
      return { buy = b.x:reshape(-1), click = F.sum(self.e(b.sparse_features):values(), 2) }
    end
    local model, lists = Model(), {}
    for i = 1, 200 do lists[i] = { i % 50 } end
    local all = { x = peri.Tensor.uniform({ 200, 1 }, -1, 1, 6),
      sparse_features = peri.KeyedJaggedTensor.from_lists { keys = { "f" }, lists } }
    local y = model(all).click
    local above = y:gt(y:median():item()):to "f32"
    local refused = 0
    for _, labels in ipairs { above, 1 - above } do -- what rounding makes better by these makes it worse by those
      all.labels = { buy = peri.rand({ 200 }):gt(0.5):to "f32", click = labels }
      local ok, why = pcall(peri.export.save, model, path, { batches = { all }, tables = "int2", allowed_ne = 0 })
      if not ok then
        refused = refused + 1
        assert.matches("the NE of its output 'click' is larger", tostring(why))
      end
    end
    assert.is_true(refused > 0)
  end)

  -- as docs/tutorial_first_model.md writes them: forward gives the loss first, sizes come from batch.rows, batches from
  -- a loader
  it("is made of a model for pipelines and batches of a loader", function()
    local function batches()
      return peri.data.synthetic { num_rows = 100, batch_size = 30, dense_features = 13, sparse_features = 3,
        rows = ROWS, bias = 0 }
    end
    local Clicks = nn.Module:extend "Clicks"
    function Clicks:init()
      local tables = {}
      for i, t in ipairs(batches():table_list()) do
        tables[i] = peri.EmbeddingBagConfig { name = t.name, num_embeddings = t.rows, embedding_dim = 8,
          feature_names = t.features }
      end
      self.tables = peri.EmbeddingBagCollection { tables = tables }
      self.out, self.loss = nn.Linear { in_features = 13 + 24, out_features = 1 },
        nn.BCEWithLogitsLoss { reduction = "global_mean" }
    end
    function Clicks:forward(b)
      local logits = self.out(F.cat({ b.dense_features, self.tables(b.sparse_features):values() }, 2)):reshape(b.rows)
      return self.loss(logits, b.labels), logits, b.labels
    end
    local model = Clicks()
    local report = export(model, { batches = batches() })
    assert.same({ 100, 0 }, { report.samples, report.difference })
    local words = { "field 'dense_features' has no columns", "logits returns more than one result" }
    for i, logits in ipairs { function(_, b) return F.cat({ b.dense_features, b.x }, 2) end,
      function(_, b) return b.x, b.x end, function(_, b) return b.x:tanh() end } do
      local other = nn.Module:extend "Other" {}
      other.logits = logits
      local held_out = { x = peri.ones { 12, 2 }, dense_features = peri.zeros { 12, 0 } }
      local ok, why = pcall(export, other, { batches = { held_out } })
      assert.equal(words[i] == nil, ok, tostring(why))
      assert.is_truthy(ok or tostring(why):find(words[i], 1, true), tostring(why))
    end
    assert.error_matches(function() model:export(path, { batches = 7 }) end,
      "export: batches is 7, wanted a list of batches or a loader")
  end)

  it("is the same file of a sharded model", function()
    peri.init()
    local model = dlrm { pooling = "MEAN", weighted = true }
    export(model, { weighted = true })
    local digest = peri.export.open(path):describe().digest
    local sharded = peri.DistributedModelParallel { module = dlrm { pooling = "MEAN", weighted = true },
      init_data_parallel = false }
    sharded:load_state_dict(model:state_dict())
    local report = export(sharded, { weighted = true })
    assert.equal(0, report.differ)
    assert.equal(digest, peri.export.open(path):describe().digest)
  end)

  it("rounds its tables as asked, and tells how much that costs", function()
    for dtype, most in peri.util.ordered { int8 = 0.01, f16 = 0.001, bf16 = 0.01 } do
      local report, file = export(dlrm {}, { tables = { default = dtype, t_a = "f32" }, allowed_difference = most,
        allowed_ne = 0.1 })
      assert.is_true(report.difference > 0 and report.difference <= most)
      assert.same({ "f32", dtype, dtype }, peri.util.map(file:tables(), function(t) return t.dtype end))
      assert.is_truthy(report.model.auc and report.file.ne)
    end
  end)

  describe("of a size", function()
    local Model = nn.Module:extend "Model"
    function Model:init()
      self.ebc, self.over = collection(), nn.Linear { in_features = 8 * #NAMES, out_features = 2 }
      local w = self.over.weight
      w:slice(2, 8, 16):fill(0) -- nobody hears of t_b, and little of t_c
      w:slice(2, 16, 24):copy(w:slice(2, 16, 24) * 0.01)
    end
    function Model:forward(b) return self.over(self.ebc(b.sparse_features):values()) end
    local model, rows = Model(), ROWS * 8 * 4
    local function chosen(saved, options)
      options = peri.util.copy(options or {})
      local whole = export(model, {}) and peri.export.open(path):describe().bytes
      options.size = whole + 2048 - saved
      local report, file = export(model, options)
      assert.is_true(file:describe().bytes <= options.size)
      return peri.util.map(file:tables(), function(t) return t.dtype end), report
    end

    it("rounds first what the answers depend on least, and no more than is needed", function()
      local loose = { allowed_difference = 1 }
      local dtypes, report = chosen(rows * 0.4, loose)
      assert.same({ "f32", "f32" }, { dtypes[1], dtypes[3] })
      assert.is_true(dtypes[2] ~= "f32")
      assert.equal(0, report.difference) -- the other numbers are the model's
      assert.matches("table t_a: f32, 1600 bytes\ntable t_b: %w+, %d+ bytes, not f32; by itself that changes answers "
        .. "by 0 of", tostring(report))
      dtypes, report = chosen(rows * 1.2, loose)
      assert.equal("f32", dtypes[1])
      assert.is_true(dtypes[2] ~= "f32" and dtypes[3] ~= "f32" and report.difference > 0)
    end)
    it("is refused where that is too small, or loses too much", function()
      assert.error_matches(function() chosen(rows * 3) end, "with all tables as small as can be the file has some %d+")
      assert.error_matches(function() chosen(rows * 2.2, { allowed_difference = 1e-9 }) end,
        "the file would answer otherwise")
      assert.error_matches(function() export(model, { size = "2X" }) end, "size '2X', wanted bytes, such as 2G")
      assert.error_matches(function() export(model, { size = "2G", tables = "int8" }) end, "allowed: one of them")
    end)
  end)

  it("is not made with options that mean nothing", function()
    for words, options in peri.util.ordered { ["step is 1.5, wanted a whole number 0..2^53"] = { step = 1.5 },
      ["step is -3, wanted"] = { step = -3 }, ["name is 7, wanted a string"] = { name = 7 },
      ["finite is 'no', wanted true or false"] = { finite = "no" }, ["allowed_ne is nan, allowed: 0 and more"] =
        { allowed_ne = 0 / 0 }, ["allowed_difference is -1, allowed: 0 and more"] = { allowed_difference = -1 } } do
      assert.error_matches(function() export(dlrm {}, options) end, "export: " .. words, 1, true)
    end
  end)

  it("is not published if it loses too much", function()
    assert.error_matches(function() export(dlrm {}, { tables = { t_a = "int8", t_z = "int8" } }) end,
      "export: tables names 't_z', which is no table of the model; those are: 't_a'", 1, true)
    local ok, why = pcall(export, dlrm {}, { tables = "int4", allowed_difference = 1e-9 })
    assert.is_false(ok)
    assert.matches("the file would answer otherwise than the model.*allowed_difference: 1e%-09 %(an option of "
      .. "model:export, and a field of what the script of `perilune export %-%-model` returns; without it",
      tostring(why))
    assert.is_nil(io.open(path):read "*a":match "PERIMODL")
  end)

  it("has no table whose numbers the dtype cannot hold, looked up or not, and chooses none for its size", function()
    local model = dlrm {}
    local small, big = batch(40, 3), model.model.sparse_arch.embedding_bag_collection
    local seen = peri.util.index_of(small.sparse_features:values():to_list())
    local row = 0
    while seen[row] do row = row + 1 end
    local element = big:weight("t_c"):detach():slice(1, row, row + 1):slice(2, 5, 6)
    local names = { f16 = "FP16", bf16 = "BF16", fp8 = "FP8", int8 = "INT8", int4 = "INT4", int8_half = "INT8" }
    -- by dtype: a number that fits, and one that does not
    for dtype, x in peri.util.ordered { f16 = { 65519, 65520 }, bf16 = { 3.38e38, 3.4e38 }, fp8 = { 240, 241 },
      int8 = { 3e38, 1 / 0 }, int4 = { 5e5, 1e6 }, int8_half = { 1e7, 2e7 } } do
      element:fill(x[1])
      export(model, { batches = { small }, tables = { t_c = dtype } })
      element:fill(x[2])
      assert.error_matches(function() export(model, { batches = { small }, tables = { t_c = dtype } }) end,
        ("export: .*table 't_c', row %d: .*rows of %s do not hold; allowed: .*"):format(row, names[dtype]))
    end
    element:fill(1e6) -- of the dtypes that a size may choose, int8 alone holds it
    export(model, { batches = { small } })
    local function size() return assert(io.open(path)):seek "end" end
    local _, file = export(model, { batches = { small }, size = size() - 1400, allowed_ne = 1 })
    assert.equal("int8", file:tables()[3].dtype)
  end)

  --- The model is refused with these words, and a line of forward, or of `at`, which it calls.
  local function refused(words, forward, at)
    local Model = nn.Module:extend "Model"
    function Model:init() self.linear = nn.Linear { in_features = 13, out_features = 2 } end
    Model.forward = forward
    local ok, why = pcall(export, Model())
    assert.is_false(ok)
    assert.matches(words, tostring(why))
    local line, within = tonumber(tostring(why):match "export_spec.lua:(%d+)"), false
    for _, f in ipairs { forward, at } do
      local of = debug.getinfo(f, "S")
      within = within or line >= of.linedefined and line <= of.lastlinedefined
    end
    assert.is_true(within, tostring(why))
  end

  it("refuses what depends on the numbers of a batch, with its line", function()
    local ids = function(b) return b.sparse_features end
    for what, taken in peri.util.ordered {
      item = function(y) return y:item(0) end, read = function(y) return y:read()[0] end,
      to_list = function(_, b) return tonumber(ids(b):lengths():to_list()[1]) end, -- of what has no form itself
      to_table = function(y) return #tostring(y) end,
      offset_list = function(_, b) return tonumber(ids(b):get("a"):offset_list()[2]) end,
      longest = function(_, b) return ids(b):longest() end,
      length_per_key = function(_, b) return ids(b):length_per_key()[1] end,
    } do
      for _, caught in ipairs { false, true } do
        refused(("'%s' makes what the model does depend"):format(what), function(self, b)
          local y = self.linear(b.dense_features)
          if not caught then return y * taken(y, b) end
          local ok, x = pcall(taken, y, b)
          return y * (ok and x or 1)
        end, taken)
      end
    end
  end)
  it("refuses other dtypes where they change numbers", function()
    for _, dtype in ipairs { "f16", "bf16", "bool" } do
      refused(("'to': %s of f32 would be other numbers"):format(dtype), function(self, b)
        local x = b.dense_features:to(dtype):to "f32"
        return self.linear(x)
      end)
    end
    refused("'to': f32 of whole numbers that were made of f32", function(self, b)
      local x = self.linear(b.dense_features):to "i32"
      return x:to "f32" * 2
    end)
    refused("the model's result 'logits' has whole numbers that were made of f32 .*, and a model file keeps",
      function(self, b)
        local x = self.linear(b.dense_features):to "i64"
        return x
      end)
  end)
  it("refuses what goes across samples", function()
    refused("across samples", function(self, b)
      local y = self.linear(b.dense_features)
      return y - F.mean(y, 1)
    end)
  end)
  it("refuses what has no form for inference by its name", function()
    refused("'histc' has no form for inference", function(_, b) return (F.histc(b.dense_features, 4)) end)
    -- a tail call leaves no line of its own: then it is the one where the function begins
    refused("'mse_loss' has no form for inference", function(_, b) return F.mse_loss(b.labels, b.labels, "none") end)
    refused("'masked_select' has no form for inference", function(_, b)
      return (F.masked_select(b.dense_features, b.dense_features:gt(0)))
    end)
    refused("'add': argument 2 is made anew for each batch", function(self, b)
      local x = self.linear(b.dense_features)
      return x + peri.arange(0, x:size(1), 1, "f32"):reshape(-1, 1)
    end)
  end)
  it("has the bits of what is made of other functions, for zeros of both signs, NaN and infinities, too", function()
    local places = peri.tensor({ 4, 1, 2, 2 }, "i64")
    local Model = nn.Module:extend "Model"
    function Model:forward(b)
      local x, y = b.x, b.y
      local chosen = F.logical_and(F.gt(x, 0), F.logical_or(F.gt(y, 0), F.lt(x, y)))
      return { flip = F.flip(x, 2), taken = F.index_select(x, -1, places), pad = F.pad(x, { 1, -2 }, 1.5),
        most = F.amax(x / y, 2), least = F.amin(b.z, { 2, 3 }, true), lse = F.logsumexp(x / y, 2),
        norm = F.norm(x, math.huge, 2), masked = F.where(chosen, x, y * 2),
        ones = F.cat({ peri.ones { x:size(1), 1 }, peri.Tensor.ones_like(x) * 3 - x }, 2) }
    end
    local function drawn(n, seed)
      local function quarters(shape, k) return F.round(peri.Tensor.uniform(shape, -3, 3, 3 * seed + k)) * 0.25 end
      return { x = quarters({ n, 7 }, 0), y = quarters({ n, 7 }, 1), z = quarters({ n, 3, 5 }, 2) }
    end
    local report = export(Model(), { batches = { drawn(40, 1), drawn(600, 2) }, finite = false })
    assert.same({ 0, 640 * 36 }, { report.differ, report.numbers })
  end)
  it("refuses numbers that depend on the size of the batch", function()
    refused("must not depend on their number", function(self, b)
      return self.linear(b.dense_features) * (1 / b.dense_features:size(1))
    end)
  end)

  it("weighs places as the model's processors do, and refuses longer lists", function()
    local Model = nn.Module:extend "Model"
    function Model:init()
      self.fp = peri.embed.FeatureProcessedEmbeddingBagCollection {
        embedding_bag_collection = collection { weighted = true },
        feature_processors = { a = peri.embed.PositionWeightedModule { max_feature_length = 4 },
          c = peri.embed.PositionWeightedModule { max_feature_length = 6 } } }
    end
    function Model:forward(b) return self.fp(b.sparse_features):values() end
    local model = Model()
    for _, p in ipairs(model:parameters()) do
      if p:dim() == 1 then p:copy(peri.Tensor.uniform(p:shape(), -2, 2, p:size(1))) end
    end
    local report, file = export(model)
    assert.equal(0, report.differ)
    local function long(n) return { sparse_features = peri.KeyedJaggedTensor { keys = NAMES, lengths = { n, 0, 0 },
      values = peri.arange(0, n, 1, "i64") } } end
    file:predict(long(4))
    assert.error_matches(function() file:predict(long(5)) end, "input 'a', sample 0: a list of 5 ids, allowed: up to 4")
  end)

  it("takes each input from its own field, and refuses two", function()
    local Model = nn.Module:extend "Model"
    function Model:init() self.ebc = collection() end
    function Model:forward(b)
      local rows = self.ebc(b.sparse_features):values()
      return self.both and rows + self.ebc(b.a_other):values() or rows * F.sum(b.cube, { 2, 3 }, true):reshape(-1, 1)
    end
    local function with(n, seed)
      return { sparse_features = batch(n, seed).sparse_features, a_other = batch(n, seed + 1).sparse_features,
        z_other = batch(n, seed + 2).sparse_features, cube = peri.Tensor.uniform({ n, 2, 3 }, -1, 1, seed) }
    end
    local model, held = Model(), { with(20, 3) }
    local report, file = export(model, { batches = held })
    assert.equal(0, report.differ)
    assert.error_matches(function() file:predict(held[1]) end,
      "predict: input 'a' is in the batch's fields 'sparse_features' and 'z_other', allowed: one of them")
    model.both = true
    assert.error_matches(function() export(model, { batches = held }) end,
      "two inputs of the name 'a', of the batch's fields 'sparse_features' and 'a_other'")
    held[1].sparse_features = peri.KeyedJaggedTensor { keys = { "a", "b" }, values = { 1 }, lengths = { 1, 0, 0 },
      stride_per_key_per_rank = { { 2 }, { 1 } } }
    assert.error_matches(function() export(model, { batches = held }) end,
      "export: the batch's field 'sparse_features' has another number of samples for each key")
    assert.error_matches(function() file:predict { sparse_features = held[1].sparse_features } end,
      "predict: the batch's field 'sparse_features' has another number")
  end)

  it("says which input, sample and id does not fit", function()
    local _, file = export(dlrm {})
    local b = batch(3, 5)
    local function with(values, lengths)
      return { dense_features = b.dense_features,
        sparse_features = peri.KeyedJaggedTensor { keys = NAMES, values = values, lengths = lengths } }
    end
    assert.error_matches(function() file:predict(with({ 1, 2, ROWS }, { 1, 0, 0, 0, 1, 0, 0, 0, 1 })) end,
      ("input 'c', sample 2: id %d, allowed: 0..%d"):format(ROWS, ROWS - 1))
    assert.error_matches(function() file:predict { dense_features = b.dense_features } end, "input 'a' is missing")
    assert.error_matches(function() file:predict { dense = b.dense_features } end,
      "no input 'dense', it has: a, b, c, dense_features")
    assert.error_matches(function() file:predict {} end, "'dense_features' is missing")
    b.dense_features:fill(0 / 0)
    assert.error_matches(function() file:predict(b) end, "input 'dense_features', sample 0, number 0 is NaN")
  end)

  it("is found damaged", function()
    local _, file = export(dlrm {})
    file:verify()
    local text = io.open(path, "rb"):read "*a"
    local function with(at, byte)
      local f = io.open(path .. ".bad", "wb")
      f:write(text:sub(1, at - 1), string.char(bit.bxor(text:byte(at), byte)), text:sub(at + 1))
      f:close()
      local ok, why = pcall(peri.export.open, path .. ".bad", { verify = true })
      os.remove(path .. ".bad")
      return ok, tostring(why)
    end
    for _, case in ipairs { { 3, "no model file" }, { 20, "first 64 bytes" }, { 100, "section 0.*damaged" },
      { #text - 5, "header is damaged" } } do
      local ok, why = with(case[1], 1)
      assert.is_false(ok)
      assert.matches(case[2], why)
    end
  end)

  it("survives being cut while it is mapped", function()
    local _, file = export(dlrm {})
    local copy = peri.export.open(path, { copy = true })
    local b = batch(20, 6)
    local before = bits(copy:predict(b).logits)
    io.open(path, "wb"):close()
    assert.error_matches(function() file:predict(b) end, "was cut, or could not be read, while it was mapped")
    assert.error_matches(function() file:check_unchanged() end, "was cut")
    assert.equal(before, bits(copy:predict(b).logits))
  end)
end)
