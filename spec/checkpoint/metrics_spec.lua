-- Metrics outlive the process: on as many ranks each goes on with its own sums and windows, bit for bit; on others all
-- ranks together have seen the same. And the whole: model, optimizer, data and metrics of a run that goes on are those
-- of the run that never stopped.
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local shell = require "spec.support.shell"
local nn, data, metrics, plan = peri.nn, peri.data, peri.nn.metrics, peri.plan

local folder, clean = shell.temporary()
teardown(clean)

local names = {
  "AUCMetric", "AUPRCMetric", "AccuracyMetric", "AverageMetric", "CTRMetric", "CaliFreeNEMetric", "CalibrationMetric",
  "MAEMetric", "MSEMetric", "MulticlassRecallMetric", "NDCGMetric", "NEMetric", "NEPositiveMetric", "NMSEMetric",
  "PrecisionMetric", "RAUCMetric", "RecallMetric", "UnweightedNEMetric", "WeightedAvgMetric", "XAUCMetric",
  "HindsightTargetPRMetric", "NumMissingLabelsMetric", "RecalibratedNEMetric", "ServingNEMetric",
}

local WINDOW = 40

local function all_of(world, window)
  local parts = {}
  for _, name in ipairs(names) do
    parts[name] = metrics[name] { window_size = window or WINDOW, group = world,
      number_of_classes = name == "MulticlassRecallMetric" and 2 or nil }
  end
  return parts
end

--- Update number i on a rank: 6 samples (on rank 1 of 2: 3).
local function update(parts, i, rank)
  local n = rank == 1 and 3 or 6
  local p = peri.Tensor.uniform({ n }, 0.02, 0.98, 7, 100 * i + rank, "f64", "cpu"):to_list()
  local r = peri.Tensor.uniform({ n }, 0, 1, 8, 100 * i + rank, "f64", "cpu"):to_list()
  local y, w, session, two = {}, {}, {}, {}
  for k = 1, n do
    y[k], w[k], session[k] = r[k] < p[k] and 1 or 0, 0.5 + k % 3, k % 2
    two[2 * k - 1], two[2 * k] = 1 - p[k], p[k]
  end
  for _, name in ipairs(names) do
    parts[name]:update(name == "MulticlassRecallMetric" and two or p, y, w, name == "NDCGMetric" and session or nil)
  end
end

--- One sample, the same whichever rank has it.
local function one_sample(parts, i)
  local p, y, w = 0.02 + 0.96 * (i * 0.6180339887 % 1), i % 3 == 0 and 1 or 0, 0.5 + i % 4
  for _, name in ipairs(names) do
    parts[name]:update(name == "MulticlassRecallMetric" and { 1 - p, p } or { p }, { y }, { w },
      name == "NDCGMetric" and { 0 } or nil)
  end
end

local function values(parts)
  local out = {}
  for _, name in ipairs(names) do
    for key, value in peri.util.ordered(parts[name]:compute()) do
      if type(value) == "table" then value = value[1] end
      out[name .. "." .. key] = value
    end
  end
  return out
end

local function bits(t)
  local list = {}
  for key, value in peri.util.ordered(t) do list[#list + 1] = ("%s=%.17g"):format(key, value) end
  return table.concat(list, "\n")
end

describe("metrics in a checkpoint", function()
  it("go on bit for bit on as many ranks, and mean the same on others", function()
    local path, want, then_want = folder .. "/metrics", {}, {}
    sim.run(2, function(rank, world)
      local parts = all_of(world)
      for i = 1, 9 do update(parts, i, rank) end -- 81 samples: twice a window
      peri.checkpoint.save(path, parts, { group = world })
      want = values(parts)
      for i = 10, 15 do update(parts, i, rank) end
      then_want = bits(values(parts))
    end)
    for n = 1, 3 do
      sim.run(n, function(rank, world)
        local parts = all_of(world)
        update(parts, 1, rank) -- whatever it was before
        peri.checkpoint.load(path, parts, { group = world })
        local got = values(parts)
        if n == 2 then assert.equal(bits(want), bits(got)) end
        for key, value in peri.util.ordered(want) do
          assert.is_true(math.abs(got[key] - value) <= 1e-12 * math.max(1, math.abs(value)),
            ("%s: %.17g, was %.17g"):format(key, got[key], value))
        end
        if n ~= 2 then return end
        for i = 10, 15 do update(parts, i, rank) end
        assert.equal(then_want, bits(values(parts)))
      end)
    end
  end)

  --- Load `path` (or nil) on n ranks, go on with `more(parts, rank)`, save as `to`: values of all metrics before and
  --- after.
  local function go_on(n, window, path, to, more)
    local loaded, values_then = {}, {}
    sim.run(n, function(rank, world)
      local parts = all_of(world, window)
      if path then peri.checkpoint.load(path, parts, { group = world }) end
      loaded = values(parts)
      more(parts, rank)
      peri.checkpoint.save(to, parts, { group = world })
      values_then = values(parts)
    end)
    return loaded, values_then
  end

  local function assert_near(want, got, where)
    for key, value in peri.util.ordered(want) do
      local nan = value ~= value and got[key] ~= got[key] -- of fewer than two samples
      assert.is_true(nan or math.abs(got[key] - value) <= 1e-9 * math.max(1, math.abs(value)),
        ("%s: %s: %.17g, was %.17g"):format(where, key, got[key], value))
    end
  end

  it("say what they said, whatever ranks had and however it fits their windows", function()
    math.randomseed(5)
    for case = 1, 8 do
      local window, before, path = math.random(1, 50), nil, nil
      for stop = 1, 3 do
        local n, to = math.random(1, 4), ("%s/uneven-%d-%d"):format(folder, case, stop)
        local where = ("case %d, stop %d, %d ranks, window %d"):format(case, stop, n, window)
        local busy = math.random(0, n - 1)
        local loaded, then_values = go_on(n, window, path, to, function(parts, rank)
          for i = 1, rank == busy and 7 or 2 * stop - 2 do update(parts, 100 * stop + i, rank) end
        end)
        if before then assert_near(before, loaded, where) end
        before, path = then_values, to
      end
    end
  end)

  it("of samples that come in turns forget as those of one rank that never stopped", function()
    local WHOLE, at, path = 60, 0, nil
    local parts_of_one = all_of(false, WHOLE)
    for stop, n in ipairs { 2, 3, 1, 4, 5, 2 } do
      local rounds, to = 60 / n + 7, ("%s/turns-%d"):format(folder, stop)
      if stop % 2 == 0 then rounds = 12 / n end -- a fifth of the window is new
      local _, then_values = go_on(n, WHOLE, path, to, function(parts, rank)
        for i = 0, rounds - 1 do one_sample(parts, at + i * n + rank) end
      end)
      for i = 0, rounds * n - 1 do one_sample(parts_of_one, at + i) end
      at, path = at + rounds * n, to
      assert_near(values(parts_of_one), then_values, ("stop %d, %d ranks"):format(stop, n))
    end
  end)

  it("of nothing, of another class or meaning, or of ranks that share nothing are what they are said to be", function()
    local empty = metrics.NEMetric { group = false }
    local other = metrics.NEMetric { group = false }
    other:update({ 0.5 }, { 1 })
    other:load_state_dict(empty:state_dict())
    assert.same({}, other:compute())
    assert.error_matches(function() other:load_state_dict(metrics.AUCMetric {}:state_dict()) end,
      "a state of AUCMetric, wanted one of NEMetric")
    local strict = metrics.AccuracyMetric { threshold = 0.7 }
    assert.error_matches(function() strict:load_state_dict(metrics.AccuracyMetric {}:state_dict()) end,
      "its threshold is nil, that of this metric 0.7")
    local path = folder .. "/alone"
    sim.run(2, function(rank, world)
      local parts = { own = metrics.NEMetric { group = false }, first = metrics.AUCMetric { group = false },
        alike = metrics.AUCMetric { group = false } }
      parts.own:update({ 0.25 + 0.5 * rank }, { 1 })
      if rank == 0 then parts.first:update({ 0.5, 0.25 }, { 1, 0 }) end
      parts.alike:update({ 0.5, 0.25 }, { 0, 1 })
      peri.checkpoint.save(path, parts, { group = world })
    end)
    local parts = { own = metrics.NEMetric { group = false }, first = metrics.AUCMetric { group = false },
      alike = metrics.AUCMetric { group = false } }
    assert.error_matches(function() peri.checkpoint.load(path, parts) end,
      "part 'own': each of 2 ranks had seen samples of its own %(group = false%), allowed: as many ranks")
    peri.checkpoint.load(path, { first = parts.first, alike = parts.alike }, { except = { "own" } })
    assert.same({ 1, 0 }, { parts.first:compute().window_auc, parts.alike:compute().window_auc })
  end)
end)

describe("a Saver of a whole run", function()
  local Net = nn.Module:extend "Net"
  function Net:init()
    self.ebc = peri.EmbeddingBagCollection { seed = 5,
      fused_params = { optimizer = "rowwise_adagrad", learning_rate = 0.1, exact = true },
      tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = 50, embedding_dim = 4,
        feature_names = { "c1" } } } }
    self.over = nn.Linear { in_features = 4, out_features = 1 }
  end
  function Net:forward(b)
    local logits = self.over(self.ebc(b.sparse_features):values()):reshape(-1)
    local loss = nn.functional.binary_cross_entropy_with_logits(logits, b.labels, nil, nil, "sum")
    return loss * b.loss_scale, logits:sigmoid():detach(), b.labels
  end

  local function run(world, path, steps, out)
    nn.manual_seed(3)
    local model = peri.DistributedModelParallel { module = Net(), group = world,
      plan = { ebc = { t = plan.row_wise() } } }
    local optimizer = nn.optim.Adam { params = model:named_parameters(), lr = 0.05 }
    local batches = data.synthetic { num_rows = 100, batch_size = 8, epochs = 9, rows = 50, dense_features = 1,
      sparse_features = 1, rank = world:rank(), world_size = world:size() }
    local ne, auc = metrics.NEMetric { window_size = 64, group = world },
      metrics.AUCMetric { window_size = 64, group = world }
    local saver = peri.checkpoint.Saver { folder = path, every = 5, group = world,
      parts = { model = model, optimizer = optimizer, batches = batches, ne = ne, auc = auc } }
    local step = saver:resume() or 0
    local pipeline = peri.pipeline.TrainPipelineSparseDist { model = model, optimizer = optimizer }
    while step < steps do
      local _, predictions, labels = pipeline:progress(batches)
      step = step + 1
      ne:update(predictions, labels)
      auc:update(predictions, labels)
      saver:step(step)
    end
    saver:close()
    out[world:rank()] = bits { auc = auc:compute().window_auc, ne = ne:compute().window_ne,
      life = ne:compute().lifetime_ne, weight = model.module.over.weight:item(0),
      batches = batches:state_dict().batches }
  end

  it("goes on with the samples and the metrics of the run that never stopped", function()
    local whole, again, other = {}, {}, {}
    sim.run(2, function(_, world) run(world, folder .. "/whole", 33, whole) end)
    sim.run(2, function(_, world) run(world, folder .. "/again", 17, again) end)
    sim.run(2, function(_, world) run(world, folder .. "/again", 33, again) end)
    assert.equal(whole[0], again[0])
    sim.run(2, function(_, world) run(world, folder .. "/other", 17, other) end)
    sim.run(3, function(_, world) run(world, folder .. "/other", 33, other) end)
    assert.equal(other[0]:match "batches=33", "batches=33")
    assert.equal(whole[0]:match "life=%d%.%d%d%d%d", other[0]:match "life=%d%.%d%d%d%d") -- to rounding
  end)
end)
