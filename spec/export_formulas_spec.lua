-- The law of following, for all modules of nn and for constants that a model computes from its state: after a step of
-- its trainer, a file that follows it has the bits of a file that is exported at that moment.
-- takes: 1 s
local ffi = require "ffi"
local peri = require "perilune"
local shell = require "spec.support.shell"
local nn, F = peri.nn, peri.nn.functional

local folder, clean = shell.temporary()
teardown(clean)

local SIZE, SAMPLES = 24, 13
local x = peri.Tensor.uniform({ SAMPLES, SIZE }, -1, 1, 8)

--- A model whose outputs, each of its own name, are what `forward` makes of a batch; init(self) gives it its state.
local function model_of(init, forward)
  local Model = nn.Module:extend "Model"
  Model.init = init
  function Model:forward(b) return forward(self, b.x) end
  return Model()
end

--- Change every number of the state, as training does.
local function move(model, step)
  for i, entry in ipairs(model:named_state()) do
    local t = peri.util.resolve(entry.tensor)
    local by = peri.Tensor.uniform(t:shape(), 1.01, 1.2, 100 * step + i)
    peri.no_grad(function() t:copy((t:to "f32" * by):to(t:dtype())) end)
  end
end

--- The bits of each output.
local function answers(file)
  local bits = {}
  for name, t in peri.util.ordered(file:predict { x = x }) do
    local numbers, n = t:read()
    bits[name] = ffi.string(numbers, 4 * n)
  end
  file:release()
  return bits
end

--- A file of the model and what follows it, compared after each of two steps; returns the report of the export.
local function follow(model, name, dense)
  local of, path = ("%s/%s-%s"):format(folder, name, dense), ("%s/%s-%s.peri"):format(folder, name, dense)
  local saver = peri.checkpoint.Saver { folder = of, parts = { model = model }, every = 1 }
  local function export()
    return model:export(path, { batches = { { x = x } }, dense = dense, allowed_difference = 1e30 })
  end
  local report, before = export(), nil
  local follower = peri.export.follow(path, of)
  for step = 1, 2 do
    move(model, step)
    saver:step(step)
    local file, why = follower:poll()
    assert.is_truthy(file, why)
    export()
    local fresh, followed = answers(peri.export.open(path)), answers(file)
    for output, bits in peri.util.ordered(fresh) do
      assert.is_true(bits == followed[output], ("output '%s', step %d, %s"):format(output, step, dense))
      assert.is_false(before ~= nil and before[output] == bits, ("output '%s' stays the same"):format(output))
    end
    before = fresh
  end
  saver:close()
  return report
end

local function steps(y) return y:reshape(-1, 3, 8) end

-- Modules by their names in nn: what makes one, and how it is called, where that is not with [samples, 24].
local modules = {
  Linear = { function() return nn.Linear { in_features = SIZE, out_features = 3 } end },
  Perceptron = { function() return nn.Perceptron { in_size = SIZE, out_size = 3, activation = "tanh" } end },
  MLP = { function() return nn.MLP { in_size = SIZE, layer_sizes = { 5, 2 }, activation = "swish_layernorm" } end },
  LayerNorm = { function() return nn.LayerNorm { normalized_shape = SIZE } end },
  RMSNorm = { function() return nn.RMSNorm { normalized_shape = SIZE } end },
  SwishLayerNorm = { function() return nn.SwishLayerNorm { input_dims = SIZE } end },
  BatchNorm1d = { function() return nn.BatchNorm1d { num_features = SIZE } end },
  PReLU = { function() return nn.PReLU { num_parameters = SIZE } end },
  MultiheadAttention = { function()
    return nn.MultiheadAttention { embed_dim = 8, num_heads = 2, batch_first = true }
  end, function(m, y) return (m(steps(y), steps(y), steps(y))) end },
  GRU = { function() return nn.GRU { input_size = 8, hidden_size = 3, bidirectional = true, batch_first = true } end,
    function(m, y) return (m(steps(y))) end },
  LSTM = { function() return nn.LSTM { input_size = 8, hidden_size = 3, num_layers = 2, batch_first = true } end,
    function(m, y) return (m(steps(y))) end },
  Embedding = { function() return nn.Embedding { num_embeddings = 3, embedding_dim = 4 } end,
    function(m, y) return m((y * 1.5):clamp(0, 2):to "i64") * y:slice(2, 0, 1):unsqueeze(2) end },
  InteractionProjectionArch = { function()
    return nn.InteractionProjectionArch { num_sparse_features = 2,
      interaction_branch1 = nn.MLP { in_size = SIZE, layer_sizes = { 16 } },
      interaction_branch2 = nn.MLP { in_size = SIZE, layer_sizes = { 24 } } }
  end, function(m, y) return m(y:slice(2, 0, 8), y:slice(2, 8, 24):reshape(-1, 2, 8)) end },
  CrossNet = { function() return nn.CrossNet { in_features = SIZE, num_layers = 2 } end },
  LowRankCrossNet = { function() return nn.LowRankCrossNet { in_features = SIZE, num_layers = 2, low_rank = 3 } end },
  VectorCrossNet = { function() return nn.VectorCrossNet { in_features = SIZE, num_layers = 2 } end },
  LowRankMixtureCrossNet = { function()
    return nn.LowRankMixtureCrossNet { in_features = SIZE, num_layers = 2, num_experts = 2, low_rank = 3 }
  end },
  DenseArch = { function() return nn.DenseArch { in_features = SIZE, layer_sizes = { 5 } } end },
  DeepFM = { function() return nn.DeepFM { dense_module = nn.Linear { in_features = 48, out_features = 3 } } end,
    function(m, y) return m { y, y * 2 } end },
  OverArch = { function() return nn.OverArch { in_features = SIZE, layer_sizes = { 5, 1 } } end },
}

-- Names of nn that are no such modules: without parameters, containers, of tables of ids (export_follow_spec), losses.
local others = {}
for name in ([[Parameter manual_seed Sequential ModuleList ModuleDict ParameterList Dropout Identity ReLU Sigmoid Tanh
  SiLU GELU Softplus LogSigmoid LeakyReLU Softmax ELU LogSoftmax Flatten EmbeddingBag InteractionArch
  InteractionDCNArch FactorizationMachine global_mean BCEWithLogitsLoss BCELoss MSELoss Loss CrossEntropyLoss
  BPRLoss FocalLoss MarginRankingLoss HingeEmbeddingLoss CosineEmbeddingLoss KLDivLoss InBatchSoftmaxLoss L1Loss
  HuberLoss SmoothL1Loss NLLLoss TripletMarginLoss graphed Graphed detect_anomaly extra_state load_extra_state
  SparseArch DLRM DLRM_DCN DLRM_Projection DLRMTrain SimpleDeepFMNN Module]]):gmatch "%S+" do others[name] = true end

--- A parameter.
local function of(shape, seed) return nn.Parameter(peri.Tensor.uniform(shape, -1, 1, seed)) end

-- What a model computes from its state alone: y are numbers of samples, s the state.
local computed = {
  temperature = function(s, y) return y / s.one:exp() end,
  scalar = function(s, y) return y * s.none:exp() end,
  weight_norm = function(s, y) return F.linear(y, s.w * (s.g / (s.w * s.w):sum(2, true):sqrt())) end,
  whole_norm = function(s, y) return F.linear(y, s.w / s.w:norm()) end,
  normalized = function(s, y) return F.linear(y, F.normalize(s.w, 2, 2)) end,
  low_rank = function(s, y) return F.linear(y, s.w + s.a:matmul(s.b) * 0.5) end,
  from_the_right = function(s, y) return y:matmul((s.w + s.a:matmul(s.b)):transpose(1, 2)) end,
  mask = function(s, y) return y * s.v + F.where(s.v:gt(0), y, y * 2) end,
  chosen = function(s, y) return y * F.where(s.v:gt(0), s.v, peri.zeros { SIZE }) end,
  joined = function(s, y) return F.linear(y, F.cat({ s.w, s.b }, 1), F.cat({ s.g:reshape(-1), s.two }, 1)) end,
  gates = function(s, y) return y * F.softmax(s.v, 1) + s.v:mean() + s.w:mean(1) end,
  positions = function(s, y) return y + peri.arange(0, SIZE, 1, "f32"):sin() * s.v end,
  rows = function(s, y) return y + s.rows(peri.tensor({ 3 }, "i64")):reshape(SIZE) end,
  layers = function(s, y) return F.linear(y, s.norm(s.layers(s.b))) end,
  spread = function(s, y) return y * F.var(s.w, 1) + F.std(s.v, 1) end,
  long = function(s, y) return y * s.long:sum() + s.long:reshape(90, 100):sum(1):mean() end,
  part = function(s, y) return y * (s.w:select(1, 2) + s.w:slice(1, 1, 3):sum(1)) end,
  products = function(s, y) return F.linear(y, F.einsum("ij,kj->ik", s.w, s.w):matmul(s.w)) end,
  half = function(s, y) return y * s.half:to("f32"):exp() end,
  as_it_is = function(s, y) return y * s.half:to "f32" + s.v:clone() end,
  rows_by_numbers = function(s, y) return y * s.rows((s.v * 2.5):abs():to "i64"):sum(1) end,
}

describe("a file that follows its trainer has the bits of a fresh one", function()
  it("of all modules of nn", function()
    for name in pairs(modules) do assert.is_nil(others[name], name) end -- any order
    for _, name in ipairs(peri.util.keys(nn)) do
      if name:match "^%u" then assert.is_truthy(modules[name] or others[name], "nn." .. name .. " is not tried") end
    end
    nn.manual_seed(3)
    local model = model_of(function(self)
      for name, how in peri.util.ordered(modules) do self[name] = how[1]() end
    end, function(self, y)
      local out = {}
      for name, how in peri.util.ordered(modules) do
        out[name] = how[2] and how[2](self[name], y) or self[name](y)
      end
      return out
    end)
    for _, dense in ipairs { "f32", "int8" } do
      assert.not_matches("follow", tostring(follow(model, "modules", dense)))
    end
  end)

  it("of constants that are computed from its state", function()
    nn.manual_seed(4)
    local model = model_of(function(self)
      self.one, self.none, self.w, self.g, self.v = of({ 1 }, 1), of({}, 2), of({ 7, SIZE }, 3), of({ 7, 1 }, 4),
        of({ SIZE }, 5)
      self.a, self.b, self.two, self.long = of({ 7, 2 }, 6), of({ 2, SIZE }, 7), of({ 2 }, 8), of({ 9000 }, 9)
      self.rows = nn.Embedding { num_embeddings = 5, embedding_dim = SIZE }
      self.layers = nn.MLP { in_size = SIZE, layer_sizes = { 8, SIZE } }
      self.norm = nn.LayerNorm { normalized_shape = SIZE }
      self:register_buffer("half", peri.Tensor.uniform({ SIZE }, -1, 1, 11):to "f16")
    end, function(self, y)
      local out = {}
      for name, f in peri.util.ordered(computed) do out[name] = f(self, y) end
      return out
    end)
    for _, dense in ipairs { "f32", "bf16_products" } do
      assert.not_matches("follow", tostring(follow(model, "computed", dense)))
    end
  end)

  it("of items that are computed, or a part of a parameter", function()
    local model = model_of(function(self) self.items = of({ 40, SIZE }, 3) end, function(self, y)
      local scores = peri.sparse.top_products(y, F.normalize(self.items, 2, 2) * self.items:sum(), 5)
      return { all = scores, some = (peri.sparse.top_products(y, self.items:slice(1, 10, 30), 5)) }
    end)
    assert.not_matches("follow", tostring(follow(model, "items", "f32")))
  end)

  it("or says whose constant keeps it from following, before anybody waits for it", function()
    local function refused(what, init, forward)
      local model = model_of(init, forward)
      local path = folder .. "/refused.peri"
      assert.matches("no trainer can be followed .*export_formulas_spec.lua:%d+: " .. what,
        tostring(model:export(path, { batches = { { x = x } } })))
      assert.error_matches(function() peri.export.follow(path, folder) end, "cannot follow: .*" .. what)
    end
    local function state(self) self.v, self.mine = of({ SIZE }, 1), { peri.Tensor.uniform({ SIZE }, 1, 2, 2) } end
    refused("'mul' uses a constant", state, function(self, y) return y * self.mine[1] end)
    refused("'mul' uses a constant", state, function(self, y) return y * (self.mine[1] + self.v) end)
    refused("'mul' uses a constant", state, function(self, y) return y * F.amax(self.v:reshape(2, 12), 1):sum() end)
    refused("'mul' uses a constant", state, function(self, y) return y * (self.v * 5):to("i64"):to "f32" end)
    -- whole numbers and truth, of functions that no formula has
    for _, f in ipairs { function(v) return F.argsort(v, 1):eq(3) end, function(v) return (F.cummax(v, 1)):gt(1) end,
      function(v) return select(2, F.sort(v, 1)):gt(5) end } do
      refused("'where' uses a constant", state, function(self, y)
        local z = F.where(f(self.v), y, y * 2)
        return z
      end)
    end
    refused("what takes numbers of a tensor into Lua", state, function(self, y) return y * self.v[2]:item() end)
    refused("what takes numbers of a tensor into Lua", state,
      function(self, y) return y * peri.tensor((self.v * 2):to_list()) end)
  end)
end)
