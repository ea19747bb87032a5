-- The demonstration script: the loss curve does not depend on ranks or plan; what it leaves behind; its arguments.
-- deadline: 600 s
-- takes: 25 s
local json = require "dkjson"
local shell = require "spec.support.shell"
local peri = require "perilune"

local folder, clean
setup(function() folder, clean = shell.temporary() end)
teardown(function() clean() end)

local many = shell.has "mpirun" and peri.dist.probe "mpi"

local runs = 0
--- Run the script; returns the points of its log, its summary, and what it printed; an error it must end with: that.
local function run(ranks, options, env, fails)
  runs = runs + 1
  local out = ("%s/run%d"):format(folder, runs)
  local text, status = shell.run(("%s run -n %d -t 1 examples/dlrm.lua --out %s %s"):format(shell.perilune, ranks, out,
    options), env)
  assert.equal(fails and 1 or 0, status, text)
  if fails then return text end
  local points = {}
  for line in shell.read(out .. "/log.jsonl"):gmatch "[^\n]+" do points[#points + 1] = assert(json.decode(line)) end
  return points, assert(json.decode(shell.read(out .. "/summary.json"))), text, out
end

-- 25 steps are one pass: in a second one the losses jump further (assert_same_curve)
local quick = "--data synthetic:8000 --rows 300 --dim 16 --steps 25 --batch-size 250 --log-every 1 --eval-every 0 "
  .. "--no-baseline "

--- Equal to the rounding of f32 at first; later a hidden unit whose input is 0 but for rounding may be on in one run
--- and off in the other, which makes a jump of about 1e-4.
local function assert_same_curve(want, got, what)
  assert.equal(#want, #got)
  for i, point in ipairs(want) do
    assert.equal(point.step, got[i].step)
    assert.near(point.loss, got[i].loss, (i <= 10 and 2e-6 or 1e-3) * point.loss,
      ("%s: step %d"):format(what, point.step))
  end
end

--- For what a few steps show.
local few = "--data synthetic:1000 --rows 100 --dim 8 --steps 4 --batch-size 32 --log-every 1 --eval-every 0 "
  .. "--no-baseline "

local function describe_script(name, f)
  describe(name, function()
    if shell.no_launcher() then return it("runs", function() pending(shell.no_launcher()) end) end
    f()
  end)
end

describe_script("examples/dlrm.lua", function()
  local reference
  setup(function() reference = run(1, quick) end)

  it("learns", function()
    assert.equal(25, #reference)
    local early, late = 0, 0
    for i = 1, 5 do early, late = early + reference[i].loss, late + reference[20 + i].loss end
    assert.is_true(late < early)
  end)

  -- 250 is not a multiple of 3: shares of 83 and 84 rows
  -- (other plans: tests/fuzz/plans.lua)
  for _, case in ipairs { { 1, "table_wise" }, { 3, "row_wise" }, { 2, "mixed", "opaque" } } do
    local ranks, plan, device = case[1], case[2], case[3] or "cpu"
    it(("has the same loss curve on %d ranks with plan %s on %s"):format(ranks, plan, device), function()
      if ranks > 1 and not many then return pending "Open MPI was not found" end
      assert_same_curve(reference,
        run(ranks, quick .. ("--plan examples/plans/%s.lua --device %s"):format(plan, device)), plan)
    end)
  end

  it("learns the same to the last bit, whatever number of workers makes the batches", function()
    local function same(ranks, options, n, want)
      want = want or run(ranks, options .. " --num-workers 0")
      local got = run(ranks, ("%s --num-workers %d"):format(options, n))
      assert.equal(#want, #got)
      for i, point in ipairs(want) do assert.equal(point.loss, got[i].loss) end
    end
    same(1, quick, 3, reference)
    same(1, few .. "--device opaque", 2)
    if many then same(2, few .. "--plan examples/plans/mixed.lua", 2) end
    local path = folder .. "/workers.txt"
    peri.data.synthetic.write { path = path, num_rows = 1500, rows = 50 }
    same(1, ("--data %s --rows 50 --dim 8 --steps 14 --batch-size 100 --log-every 1 --eval-every 7 "
      .. "--no-baseline"):format(path), 2)
  end)

  it("trains on the device that PERI_DEVICE names, unless --device does", function()
    local want, summary = run(1, few)
    assert.equal("cpu", summary.device)
    local here = io.popen("pwd"):read "*l" .. "/" .. shell.build
    local devices, plugins = { "opaque" }, here .. "/cuda_host:" .. here
    local there = io.open(shell.build .. "/cuda_host/libperilune_cuda_host.so")
    if there then
      there:close()
      devices[2] = "cuda_host"
      local text = run(1, few, { PERI_DEVICE = "cuda_host:7", PERI_PLUGIN_PATH = plugins }, true)
      assert.matches("cuda_host: device 7, allowed: 0 to 0", text)
    end
    for _, device in ipairs(devices) do
      local got, other = run(1, few, { PERI_DEVICE = device, PERI_PLUGIN_PATH = plugins })
      assert.equal(device, other.device)
      assert_same_curve(want, got, device)
    end
    assert.matches("device 'smoke'", run(1, few, { PERI_DEVICE = "smoke" }, true))
    assert_same_curve(want, run(1, few .. "--device cpu", { PERI_DEVICE = "smoke" }), "--device")
  end)

  it("learns the same under every schedule, also where it looks at samples in between and trains on them at the end",
    function()
    if not many then return pending "Open MPI was not found" end
    local options = "--data synthetic:1500 --rows 300 --dim 8 --steps 12 --batch-size 125 --log-every 1 --eval-every "
      .. "5 --no-baseline "
    local want, summary = run(2, options)
    assert.equal("sparse_dist", summary.schedule)
    local got, other, out = run(2, options .. "--schedule prefetch_sparse_dist")
    assert.equal("prefetch_sparse_dist", other.schedule)
    for i, point in ipairs(want) do
      assert.equal(point.loss, got[i].loss)
      assert.equal(point.validation_loss, got[i].validation_loss)
    end
    assert.equal(summary.logloss, other.logloss, out)
    -- on one rank, whose sums are rounded otherwise: a start of mpirun takes as long as the training
    got, other, out = run(1, options .. "--schedule base")
    assert.equal("base", other.schedule)
    assert_same_curve(want, got, "base")
    for i, point in ipairs(want) do
      if point.validation_loss then assert.near(point.validation_loss, got[i].validation_loss, 1e-3) end
    end
    assert.near(summary.logloss, other.logloss, 1e-3, out)
    local text, status = shell.run(("%s run examples/dlrm.lua --out %s --schedule eval_sparse_dist"):format(
      shell.perilune, folder))
    assert.equal(2, status)
    assert.matches("%-%-schedule is 'eval_sparse_dist', which trains nothing: it has no 'backward'", text)
  end)

  it("has another curve with another seed", function()
    local other = run(1, quick .. "--seed 2")
    assert.is_true(math.abs(other[25].loss - reference[25].loss) > 1e-3)
  end)

  it("leaves a log, a picture and a summary, and beats the baselines on a signal of pairs", function()
    local points, summary, text, out = run(many and 2 or 1,
      "--data synthetic:30000 --rows 5 --dim 8 --steps 200 --batch-size 300 --log-every 10 --eval-every 50 "
        .. "--eval-samples 2000")
    local looks = 0
    for _, point in ipairs(points) do
      assert.equal("number", type(point.samples_per_s))
      -- a pass has 27,000 - 2,700 training samples, that is 81 steps: looks every 50 steps of it, at its end, and at
      -- the end of all
      local place = (point.step - 1) % 81 + 1
      assert.equal(place == 50 or place == 81 or point.step == 200, point.validation_auc ~= nil)
      if point.validation_auc then looks = looks + 1 end
    end
    assert.equal(5, looks)
    assert.matches("placed by the planner:\n", text)
    assert.matches("t_c26 +5  table_wise, fused [^\n]*160 B", text)
    assert.matches("26 tables +130 ", text)
    local regression = summary.baseline.logistic_regression
    assert.is_true(summary.auc > regression.auc + 0.01, text)
    assert.is_true(regression.auc > 0.6, text)
    assert.equal(0.5, summary.baseline.base_rate.auc)
    assert.near(1, summary.baseline.base_rate.ne, 0.01)
    assert.is_true(summary.ne < regression.ne and summary.logloss < regression.logloss)
    assert.equal(200, summary.steps)
    assert.equal(many and 2 or 1, summary.ranks)
    assert.equal(3000, summary.test_samples)
    assert.matches("step 200/200  100 %%  loss [%d.]+  validation [%d.]+  [%d,]+ samples/s  0 s left", text)
    assert.matches("DLRM +0%.%d+", text)
    assert.matches("the DLRM's log%-loss is [%d.]+ %% below that of the logistic regression", text)
    if shell.has "gnuplot" then
      assert.equal("\137PNG", shell.read(out .. "/curve.png"):sub(1, 4))
      local script = shell.read(out .. "/curve.gnuplot")
      for _, part in ipairs { "validation loss", "validation AUC", "training loss", "end of pass 2",
        "weights kept: step " .. summary.kept_step } do
        assert.truthy(script:find(part, 1, true), part)
      end
    end
  end)

  -- Interactions of columns with 4 values are there to be learnt; 6 columns of 20,000 invite to learn samples by heart
  -- in a second pass.
  it("stops early and keeps the best weights where two passes overfit, and beats the logistic regression", function()
    local path, rows = folder .. "/overfit.txt", {}
    for i = 1, 26 do rows[i] = i <= 20 and 4 or 20000 end
    peri.data.synthetic.write { path = path, num_rows = 10000, rows = rows, signal = 0.3, interaction = 5, bias = 0,
      alpha = 0.5 }
    local options = ("--data %s --rows 20000 --dim 8 --batch-size 80 "):format(path)
    local _, without, text = run(1, options .. "--epochs 2 --patience 0")
    assert.is_true(without.logloss > 1.2 * without.baseline.logistic_regression.logloss, text)
    assert.is_true(without.validation.last_loss > 1.2 * without.baseline.base_rate.logloss, text)
    assert.matches("the DLRM is no better than the logistic regression", text)
    local in_files = shell.write(folder .. "/in_files.lua", [[
      local plan = require "perilune.plan"
      return function(env)
        local entries = {}
        for i, t in ipairs(env.tables) do
          local cut = i % 2 == 0 and plan.row_wise or plan.column_wise
          entries[t.name] = i % 5 == 0 and cut { compute_kernel = "fused_uvm_caching" }
            or plan.table_wise(i % env.world_size)
        end
        return plan.ShardingPlan { [env.module] = entries }
      end]])
    -- on one rank, all in memory: examples/best_spec.lua
    local points, summary, said = run(many and 2 or 1, options .. "--plan " .. in_files)
    local regression, lowest = summary.baseline.logistic_regression, math.huge
    for _, point in ipairs(points) do lowest = math.min(lowest, point.validation_loss or math.huge) end
    assert.is_true(summary.stopped_early, said)
    assert.is_true(summary.steps < summary.steps_per_pass * 3, said)
    assert.equal(lowest, summary.validation.loss)
    assert.is_true(summary.validation.last_loss > 1.2 * lowest, said)
    assert.is_true(summary.kept_step <= 1.2 * summary.steps_per_pass, said)
    assert.is_true(summary.logloss < 0.97 * regression.logloss and summary.auc > regression.auc + 0.03, said)
    assert.matches("stopped early, after step %d+ of at most %d+: the validation loss was lowest at step %d+ %(pass "
      .. "[%d.]+%)", said)
    assert.matches("%(overfitting%): the weights of step %d+ are kept", said)
    assert.matches("the DLRM's log%-loss is [%d.]+ %% below", said)
  end)

  it("takes a file of a few lines, and says how little that tells", function()
    local path = folder .. "/few.txt"
    peri.data.synthetic.write { path = path, num_rows = 40, rows = 50 }
    local _, summary, text = run(1, ("--data %s --rows 100 --dim 8"):format(path))
    assert.equal(16, summary.batch_size)
    assert.matches("%d test samples are too few to judge by", text)
    assert.matches("%d%d training, %d validation and %d test samples", text)
  end)

  it("shows its options and their defaults, once", function()
    local text, status = shell.run(("%s run -n %d examples/dlrm.lua --help"):format(shell.perilune, many and 2 or 1))
    assert.equal(0, status)
    assert.equal(1, select(2, text:gsub("Usage:", "")))
    for _, default in ipairs { "0.05", "0.01", "0.1", "10", "32", "100000", "20000", "1", "build/demo", "debian" } do
      assert.truthy(text:find(("(default: %s)"):format(default), 1, true), default)
    end
  end)

  it("fails when the disk is full", function()
    for _, name in ipairs { "log.jsonl", "summary.json", "curve.gnuplot" } do
      local out = ("%s/full-%s"):format(folder, name)
      os.execute(("mkdir -p %s && ln -s /dev/full %s/%s"):format(out, out, name))
      local ranks = many and name == "log.jsonl" and 2 or 1 -- all files are rank 0's
      local text, status = shell.run(("%s run -n %d examples/dlrm.lua %s --out %s"):format(shell.perilune, ranks, few,
        out))
      if name ~= "curve.gnuplot" or shell.has "gnuplot" then
        assert.is_true(status ~= 0, text)
        assert.matches(("cannot write %s/%s: No space left on device"):format(out, name):gsub("%-", "%%-"), text)
      end
    end
  end)

  it("trains on a file in the Criteo layout", function()
    local path = folder .. "/train.txt"
    peri.data.synthetic.write { path = path, num_rows = 3000, rows = 50 }
    local points, summary = run(1,
      ("--data %s --rows 100 --dim 8 --steps 8 --batch-size 300 --log-every 4 --eval-every 4"):format(path))
    assert.equal(2, #points)
    assert.equal(path, summary.data)
    assert.equal("number", type(summary.baseline.logistic_regression.auc))
  end)

  it("draws into folders of any name, and says what gnuplot says when it cannot", function()
    local out = ("--rows 20 --steps 4 --no-recommend --out \"%s/it's\" --data synthetic:1000"):format(folder)
    local text, status = shell.run(("%s run examples/dlrm.lua %s"):format(shell.perilune, out))
    assert.equal(0, status, text)
    if shell.has "gnuplot" then assert.equal("\137PNG", shell.read(folder .. "/it's/curve.png"):sub(1, 4)) end
    os.execute("mkdir -p " .. folder .. "/bin")
    shell.write(folder .. "/bin/gnuplot", "#!/bin/sh\necho 'no terminal of that name' >&2\nexit 3\n")
    os.execute("chmod +x " .. folder .. "/bin/gnuplot")
    text, status = shell.run(("%s run examples/dlrm.lua %s"):format(shell.perilune, out),
      { PATH = folder .. "/bin:" .. os.getenv "PATH" })
    assert.equal(1, status)
    assert.matches("it's/curve%.png: gnuplot's status is %d+, and .* 0 bytes; gnuplot says: no terminal of that name",
      text)
  end)

  it("says what is wrong", function()
    local function fails(options, pattern)
      local text, status = shell.run(("%s run examples/dlrm.lua --out %s/bad %s"):format(shell.perilune, folder,
        options))
      assert.is_true(status ~= 0)
      assert.matches(pattern, text)
    end
    fails("--data /nowhere/train.txt", "/nowhere/train%.txt: No such file")
    fails("--data synthetic:100 --batch-size 1000 --steps 5",
      "%-%-batch%-size is 1000, but there are 81 training samples; give a smaller")
    fails("--data synthetic:100 --steps 0", "%-%-steps is '0', allowed: whole numbers, 1 or more")
    fails("--data synthetic:100 --epochs 1.5", "%-%-epochs is '1.5', allowed: whole numbers, 1 or more")
    fails("--data synthetic:100 --batch-size 0", "%-%-batch%-size is '0', allowed: whole numbers, 1 to 2147483648")
    fails("--data synthetic:100 --num-workers 2000", "%-%-num%-workers is '2000', allowed: whole numbers, 0 to 1024")
    fails("--data synthetic:100 --lr fast", "%-%-learning%-rate is 'fast', allowed: 0 or more")
    fails("--data synthetic:100 --seed 1e16", "%-%-seed is '1e16', allowed: whole numbers, 0 to 2%^53 %- 1")
    fails("--data synthetic:100 --steps 2 --epochs 2", "can not be used together")
    fails("--data synthetic:1000 --lr 1e30 --rows 100", "the loss at step %d+ is .*give a lower %-%-learning%-rate")
    fails("--data synthetic:1", "1 synthetic samples: 0 samples to train on, 0 to validate and 1 to test")
    fails("--data /dev/stdin < /dev/null", "/dev/stdin is a pipe .*write it to a file first")
    fails(quick .. "--plan /nowhere/plan.lua", "/nowhere/plan%.lua")
    fails("--colour blue", "unknown option '%-%-colour'")
  end)
end)
