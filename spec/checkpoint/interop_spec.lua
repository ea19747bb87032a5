-- From and to TorchRec, by examples/interop/torch_checkpoint.py: a DLRM that was trained there predicts the same here,
-- to rounding, and one more training step on both sides leaves the same weights and states of optimizers, to rounding;
-- and the other way round.
--
-- PYTHON= a Python with torch, torchrec, fbgemm_gpu, safetensors and xxhash runs all of it. Without one,
-- spec/checkpoint/torchrec has checkpoints that TorchRec 1.9.2 made: <tables>-<dense>/before after 3 steps, after one
-- more, and their predictions.
-- deadline: 240 s
local peri = require "perilune"
local shell = require "spec.support.shell"
local nn = peri.nn

local GOLDEN = "spec/checkpoint/torchrec/"
local ROWS, DIM, BATCH = { a = 6, b = 4 }, 4, 4
local CASES = { { "rowwise_adagrad", "Adam", ranks = 2 }, { "adagrad", "Adagrad", ranks = 1 },
  { "sgd", "SGD", ranks = 1 } }

--- The batch of a step, as in interop.py.
local function batch(step)
  local lengths, ids, first, features, labels = {}, {}, 0, {}, {}
  for i = 0, 2 * BATCH - 1 do lengths[i + 1] = (step + i) % 3 end
  for i = 1, BATCH do first = first + lengths[i] end
  local total = first
  for i = BATCH + 1, 2 * BATCH do total = total + lengths[i] end
  for k = 0, total - 1 do ids[k + 1] = (step * 5 + k * 3) % (k < first and ROWS.a or ROWS.b) end
  for i = 0, BATCH - 1 do
    features[i + 1], labels[i + 1] = {}, (step + i) % 2
    for j = 0, 2 do features[i + 1][j + 1] = ((step + 2 * i + 3 * j) % 7) / 4 - 0.75 end
  end
  return peri.tensor(features), peri.KeyedJaggedTensor { keys = { "fa", "fb" }, values = ids, lengths = lengths },
    peri.tensor(labels)
end

local function build(tables, dense)
  nn.manual_seed(3)
  local model = nn.DLRM { dense_in_features = 3, dense_arch_layer_sizes = { 5, DIM }, over_arch_layer_sizes = { 5, 1 },
    embedding_bag_collection = peri.EmbeddingBagCollection { fused_params = { optimizer = tables, learning_rate = 0.5,
      eps = tables ~= "sgd" and 1e-8 or nil }, tables = {
        peri.EmbeddingBagConfig { name = "a", num_embeddings = ROWS.a, embedding_dim = DIM, feature_names = { "fa" } },
        peri.EmbeddingBagConfig { name = "b", num_embeddings = ROWS.b, embedding_dim = DIM, feature_names = { "fb" } },
      } } }
  local named = {}
  for _, p in ipairs(model:named_parameters()) do
    if not p.name:find("embedding_bags", 1, true) then named[#named + 1] = p end
  end
  return { model = model, optimizer = nn.optim[dense] { params = named, lr = 0.5, -- rates come with the checkpoint
    momentum = dense == "SGD" and 0.5 or nil } }
end

local function predict(p)
  local features, kjt = batch(0)
  return peri.no_grad(function() return p.model(features, kjt):reshape(-1):to_list() end)
end

local function train(p, step)
  local features, kjt, labels = batch(step)
  p.optimizer:zero_grad()
  nn.BCEWithLogitsLoss()(p.model(features, kjt):reshape(-1), labels):backward()
  p.optimizer:step()
end

--- Numbers are those that were expected, to rounding.
local function near(want, got, what)
  assert.equal(#want, #got, what)
  for i, x in ipairs(want) do
    local close = math.abs(x - got[i]) <= 2e-6 + 1e-5 * math.abs(x) -- false for NaN
    if not close then
      error(("%s, element %d: wanted %.9g, got %.9g"):format(what, i, x, got[i]))
    end
  end
end

--- Two checkpoints have the same tensors, to rounding. Tables' counts of updates, which TorchRec does not keep, aside.
local function same(want_path, got_path)
  local want, got = peri.checkpoint.open(want_path), peri.checkpoint.open(got_path)
  assert.same(want:names(), got:names())
  for _, name in ipairs(want:names()) do
    local a, b = want:read(name), got:read(name)
    if not name:find "%.tables/.*%.step$" then
      assert.equal(a:dtype(), b:dtype(), name)
      assert.same(a:shape(), b:shape(), name)
      near(a:reshape(-1):to_list(), b:reshape(-1):to_list(), name)
    end
  end
  want:close()
  got:close()
end

--- What was trained there goes on here. from: the folder with before and after; to: a folder for ours.
local function goes_on_here(from, to, tables, dense)
  local p = build(tables, dense)
  local values = peri.checkpoint.load(from .. "/before", p)
  near(values.logits, predict(p), "predictions")
  assert.near(0.0625, p.optimizer.param_groups[1].lr, 1e-9)
  assert.near(0.125, p.model.sparse_arch.embedding_bag_collection:fused_optimizer().param_groups[1].lr, 1e-9)
  train(p, 4)
  peri.checkpoint.save(to .. "/ours", p)
  same(from .. "/after", to .. "/ours")
  near(peri.checkpoint.open(from .. "/after"):values().values.logits, predict(p), "predictions after a step")
end

for _, case in ipairs(CASES) do
  local tables, dense = unpack(case)
  local name = tables .. "-" .. dense

  describe(("a DLRM with %s and %s"):format(tables, dense), function()
    local folder, clean = shell.temporary()
    teardown(function() clean() end)

    it("that TorchRec trained predicts and goes on here as there", function()
      goes_on_here(GOLDEN .. name, folder, tables, dense)
      shell.run("rm -r " .. folder .. "/ours")
      peri.checkpoint.open(GOLDEN .. name .. "/before"):verify()
    end)

    local python = os.getenv "PYTHON" or ""
    --- Run TorchRec's side on some ranks. (It may take a minute: shell.run would end it.)
    local function torchrec(command, ranks)
      local pipes, all = {}, ""
      os.remove(("%s/ranks-of-%s"):format(folder, command))
      local words = table.concat({ python, "spec/checkpoint/interop.py", command, folder, tables, dense }, " ")
      for r = 0, ranks - 1 do
        pipes[r] = assert(io.popen(("env -u LD_PRELOAD PYTHONDONTWRITEBYTECODE=1 RANK=%d WORLD_SIZE=%d %s 2>&1; "
          .. "echo status $?"):format(r, ranks, words)))
      end
      for r = 0, ranks - 1 do
        all = all .. pipes[r]:read "*a"
        pipes[r]:close()
      end
      assert.equal(ranks, select(2, all:gsub("status 0\n", "")), all)
    end

    if python == "" then
      it("goes from TorchRec to Perilune and back", function()
        pending "PYTHON= names no Python with torch, torchrec, fbgemm_gpu, safetensors and xxhash"
      end)
      return
    end

    it(("goes from TorchRec on %s to Perilune and back"):format(peri.util.number_of(case.ranks, "rank")), function()
      torchrec("train", case.ranks)
      goes_on_here(folder, folder, tables, dense)
      local p = build(tables, dense)
      for step = 1, 3 do train(p, step) end
      peri.checkpoint.save(folder .. "/perilune", p)
      shell.run(("rm -r %s/after %s/ours"):format(folder, folder))
      torchrec("resume", case.ranks)
      same(folder .. "/perilune", folder .. "/loaded")
      near(predict(p), peri.checkpoint.open(folder .. "/loaded"):values().values.logits, "predictions there")
      train(p, 4)
      peri.checkpoint.save(folder .. "/ours", p)
      same(folder .. "/ours", folder .. "/after")
    end)
  end)
end
