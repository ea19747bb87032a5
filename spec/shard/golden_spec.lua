-- Sharded EmbeddingBagCollections and EmbeddingCollections against TorchRec's own (spec/golden/sharded): three steps of
-- forward, backward and fused or dense optimizers, on the ranks that the vectors were made on. Where TorchRec is known
-- to deviate from the mathematics (golden README), the unsharded result stored beside is the truth; row-wise states
-- under column-wise sharding are kept by column block, as TorchRec keeps them.
-- mpirun: 2 4
-- cuda: always
-- takes: 10 s
local peri = require "perilune"
local golden = require "spec.support.golden"
local worlds = require "spec.support.worlds"
local codec = require "perilune.dist.codec"
local plan = peri.plan

--- Cases in which `unsharded` is the truth.
local mathematics = {
  ebc_mean_trap_w2 = true, ebc_rw_mean_sum_shared_w4 = true, ebc_tw_w2_mean_weighted = true,
  ebc_tw_w2_rowwise_adagrad_l2 = true, ebc_tw_w2_rowwise_adagrad_decouple = true, ebc_grid_w4_mean = true,
}
--- Row-wise means of TorchRec are sum / (length + 1e-6): a little off the mean.
local nearly = { ebc_rw_w2_mean = true, ebc_rw_mean_sum_w4 = true, vbe_rw_w2_mean = true, ebc_twrw_w4_mean = true,
  ebc_rw_w2_mean_weighted = true }
--- TorchRec's weighted means under row-wise sharding are over the weights, sum(w x) / (sum(w) + 1e-6), ours over the
--- ids: results differ by one factor for each bag, and so do the gradients that make the same step.
local by_weights = { ebc_rw_w2_mean_weighted = true }

local function fused_params(o)
  local mode = tostring(o.weight_decay_mode or "none"):lower():gsub("weightdecaymode%.", "")
  return {
    optimizer = o.name:lower():gsub("exact_row_?wise", "rowwise"):gsub("exact_", ""), learning_rate = o.learning_rate,
    eps = o.eps, weight_decay = o.weight_decay, weight_decay_mode = mode, stochastic_rounding = o.stochastic_rounding,
  }
end

--- torch.optim's rules in doubles, on flat lists: what trains dense tables here.
local rules = {
  SGD = function(o, w, g)
    for i = 1, #w do w[i] = w[i] - o.lr * g[i] end
  end,
  Adagrad = function(o, w, g, s)
    for i = 1, #w do
      s[i] = (s[i] or 0) + g[i] ^ 2
      w[i] = w[i] - o.lr * g[i] / (math.sqrt(s[i]) + (o.eps or 1e-10))
    end
  end,
  Adam = function(o, w, g, s)
    local b1, b2 = (o.betas or { 0.9 })[1], (o.betas or { 0, 0.999 })[2]
    s.t = (s.t or 0) + 1
    for i = 1, #w do
      s[i] = b1 * (s[i] or 0) + (1 - b1) * g[i]
      s[-i] = b2 * (s[-i] or 0) + (1 - b2) * g[i] ^ 2
      w[i] = w[i] - o.lr * (s[i] / (1 - b1 ^ s.t)) / (math.sqrt(s[-i] / (1 - b2 ^ s.t)) + (o.eps or 1e-8))
    end
  end,
}

--- The codecs that a case ran with. TorchRec's registry makes FP16 of BF16 on a CPU.
local function registry_of(precisions, scale)
  if not precisions then return nil end
  local function real(name) return name == "BF16" and "FP16" or name end
  return codec.get_qcomm_codecs_registry { forward = real(precisions.forward), backward = real(precisions.backward),
    backward_loss_scale = scale }
end

local function is_sequence(case) return case.module == "EmbeddingCollection" end

local function make(case, world, device, registry, output_dtype)
  local sequence = is_sequence(case)
  local tables, entries, own = {}, {}, {}
  for i, t in ipairs(case.tables) do
    tables[i] = (sequence and peri.EmbeddingConfig or peri.EmbeddingBagConfig) {
      name = t.name, num_embeddings = t.num_embeddings, embedding_dim = t.embedding_dim,
      feature_names = t.feature_names, pooling = not sequence and t.pooling or nil, data_type = t.data_type,
    }
    local placed = t.sharding_type ~= "row_wise" and t.sharding_type ~= "data_parallel"
    entries[t.name] = plan.ParameterSharding {
      sharding_type = t.sharding_type, compute_kernel = t.compute_kernel, ranks = placed and t.ranks or nil,
    }
    if t.optimizer then own[t.name] = fused_params(t.optimizer) end
  end
  local shared = fused_params(case.optimizer)
  shared.output_dtype = output_dtype
  return peri.shard[sequence and "ShardedEmbeddingCollection" or "ShardedEmbeddingBagCollection"] {
    tables = tables, plan = entries, group = world, device = device, fused_params = shared, table_fused_params = own,
    is_weighted = case.weighted, gradient_division = case.gradient_division, qcomm_codecs_registry = registry,
  }
end

--- The part of a table that a shard holds.
local function part(whole, s)
  return whole:slice(1, s.row_offset, s.row_offset + s.rows):slice(2, s.col_offset, s.col_offset + s.cols)
end

local function near(what, want, got, tol) golden.assert_near(want:to_list(), got:to_list(), tol, what) end

local function train_dense(case, world, shards, states)
  for i, s in ipairs(shards) do
    if s.dense then
      local leaf = s.leaf()
      local grad = leaf:grad()
      local scale = s.replica and 1 / world:size() or 1 -- what the data-parallel reducer does
      if s.replica then world:all_reduce(grad):wait() end
      local g = grad:to_list()
      for k = 1, #g do g[k] = g[k] * scale end
      local w = s.state "weight"
      local list = w:to_list()
      states[i] = states[i] or {}
      rules[case.dense_optimizer.name](case.dense_optimizer, list, g, states[i])
      w:copy(peri.tensor(list, "f32", w:device(), w:shape()))
      leaf:set_grad(nil)
    end
  end
end

local function check_states(case, s, step)
  if not s.dense and not mathematics[case.name] then case:assert_states(s, step, case.state_tol) end
end

--- For each sample, what a bag of `key` weighs here (1 / its ids) beside what it weighs at TorchRec (1 / the sum of its
--- ids' weights).
local function ratios(case, at, key, device)
  local lengths, weights, first = case:list(at .. "input/lengths"), case:list(at .. "input/weights"), 0
  local bags = #lengths / #case.kjt_keys
  local feature = peri.util.index_of(case.kjt_keys)[key:match "^[^@]*"] - 1
  for bag = 1, feature * bags do first = first + lengths[bag] end
  local list = {}
  for b = 1, bags do
    local sum, n = 0, lengths[feature * bags + b]
    for i = first + 1, first + n do sum = sum + weights[i] end
    first = first + n
    list[b] = n / (sum + 1e-6)
  end
  return peri.tensor(list, "f32", device, { bags, 1 })
end

--- The batch of a rank; with a variable batch per feature, the number of bags by feature and the bag of each row of the
--- full batch.
local function input_of(case, at, device, batch)
  local strides = case:list(at .. "input/strides")
  return peri.KeyedJaggedTensor {
    keys = case.kjt_keys, values = case:tensor(at .. "input/values", device),
    lengths = case:tensor(at .. "input/lengths", device), weights = case:tensor(at .. "input/weights", device),
    stride = not strides and batch or nil, stride_per_key_per_rank = strides and peri.util.map(strides, function(n)
      return { n }
    end), inverse_indices = strides and { case.kjt_keys, case:tensor(at .. "input/inverse_indices", device) },
  }
end

--- Compare pooled rows with the case, and hand its gradient back.
local function pooled(case, at, kt, device, truth)
  local output, grad = case:tensor(at .. "output/values", device), case:tensor(at .. "grad_output", device)
  local places = peri.util.index_of(kt:keys())
  local upstream, column = peri.zeros({ output:size(1), output:size(2) }, "f32", device), 0
  for i, key in ipairs(case.output_keys) do
    local dim, own = case.output_dims[i], kt:offset_per_key()[places[key]]
    local want = output:slice(2, column, column + dim)
    if truth ~= "" then want = case:tensor(("unsharded/%soutput/%s"):format(at, key), device) end
    local got, back = kt[key], grad:slice(2, column, column + dim)
    if by_weights[case.name] then
      local ratio = ratios(case, at, key, device)
      got, back = got:detach() * ratio, back * ratio
    end
    near(at .. key, want, got, case.tol)
    upstream:slice(2, own, own + dim):copy(back)
    column = column + dim
  end
  kt:values():backward(upstream:to(kt:values():dtype()))
end

--- The same of rows of ids.
local function sequences(case, at, result, device)
  local loss
  for _, key in ipairs(case.output_keys) do
    local rows = result[key]
    assert.same(case:list(("%soutput/%s/lengths"):format(at, key)), rows:lengths():to_list())
    near(at .. key, case:tensor(("%soutput/%s/values"):format(at, key), device), rows:values(), case.tol)
    local term = (rows:values() * case:tensor(("%sgrad_output/%s"):format(at, key), device)):sum()
    loss = loss and loss + term or term
  end
  loss:backward()
end

local function run(case, world, device, registry, output_dtype)
  if nearly[case.name] then case.tol = { abs = 1e-5, rel = 1e-5 } end
  case.state_tol = { abs = 1e-6, rel = 1e-5 }
  if registry or output_dtype then -- what the cases with codecs have
    case.tol = { abs = 2e-3, rel = 2e-3 }
    case.state_tol = case.tol
  end
  local rank, truth = world:rank(), mathematics[case.name] and "unsharded/" or ""
  local module = make(case, world, device, registry, output_dtype)
  local shards, states = module:local_shards(), {}
  for _, s in ipairs(shards) do s.state("weight"):copy(part(case:tensor("table/" .. s.table .. "/init", device), s)) end
  for step = 1, case.steps do
    local at = ("rank%d/step%d/"):format(rank, step)
    local result = module:forward(input_of(case, at, device, case.batch_sizes[step][rank + 1]))
    if is_sequence(case) then sequences(case, at, result, device) else pooled(case, at, result, device, truth) end
    train_dense(case, world, shards, states)
    for _, s in ipairs(shards) do
      local key = ("%stable/%s/step%d"):format(truth, s.table, step)
      near(key, part(case:tensor(key, device), s), s.state "weight", case.tol)
      check_states(case, s, step)
    end
  end
end

--- The worlds that a case was made on; nodes matter where tables lie on one.
local function where(case)
  local nodes = case.local_size < case.world_size
  return { sizes = { case.world_size }, local_size = nodes and case.local_size or 0 }
end

--- Beside the other specs a pretended GPU, which is slow, has every second case; all on PERI_TEST_WORLDS=all.
local STEP = os.getenv "PERI_OPAQUE_DEVICE" == "cuda_host" and os.getenv "PERI_TEST_WORLDS" ~= "all" and 2 or 1

describe("a sharded collection reproduces", function()
  for _, kind in ipairs { "^ebc_", "^vbe_", "^codec_ebc_", "^ec_" } do
    local names = golden.names("sharded", kind)
    for i = 1, #names, STEP do
      local case = golden.load(names[i])
      worlds.each(case.name, function(world, device) run(case, world, device, registry_of(case.codec)) end, where(case))
    end
  end
  -- Cases of f32 whose rows take FP16 here: a loss is as small with variable batches, uneven shards and mixed plans.
  for _, name in ipairs { "ebc_mixed_w3", "ebc_cw_w3", "vbe_mixed_w2", "vbe_rw_w3_unequal", "ebc_mixed_w4",
    "vbe_grid_w4" } do
    local case = golden.load("sharded/" .. name)
    worlds.each(name .. " with FP16 rows", function(world, device)
      run(case, world, device, registry_of({ forward = "FP16", backward = "FP16" }, 256))
    end, where(case))
    worlds.each(name .. " with outputs of FP16", function(world, device) run(case, world, device, nil, "FP16") end,
      where(case))
  end
end)
