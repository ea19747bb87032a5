-- dlrm.lua: train a DLRM with sharded embedding tables, and say what it is worth.
--
--   perilune run -n 2 examples/dlrm.lua                                        the package lists of this Debian machine
--   perilune run -n 2 examples/dlrm.lua --data train.txt --steps 5000          a file in the Criteo layout
--   perilune run -n 2 examples/dlrm.lua --data synthetic:1000000               made-up samples
--
-- It leaves OUT/log.jsonl (an object per logged step), OUT/curve.png (if gnuplot is there) and OUT/summary.json. What is trained does not
-- depend on the number of ranks or on the plan: --batch-size counts the samples of all ranks together.
local here = arg[0]:match "^(.*/)" or "./"
package.path = here .. "?.lua;" .. package.path

local peri = require "perilune"
local argparse = require "argparse"
local Progress = require "perilune.progress"
local sources = require "dlrm.sources"
local baselines = require "dlrm.baselines"
local evaluation = require "dlrm.evaluation"
local recommend = require "dlrm.recommend"
local report = require "dlrm.report"

local function options_of(words)
  local parser = argparse("examples/dlrm.lua", "Train a DLRM with sharded embedding tables, and say what it is worth.")
  parser:option("--data", "debian (this machine's package lists), synthetic:SAMPLES, or a file in the Criteo layout.", "debian")
  parser:option("--steps", "Training steps; default: two passes over the data, at most 100,000.", nil, tonumber)
  parser:option("--batch-size", "Samples of a step, of all ranks together.", 2048, tonumber)
  parser:option("--plan", "Lua file that says where the tables live.", here .. "plans/mixed.lua")
  parser:option("--model", "Lua file with the model's class.", here .. "models/dlrm.lua")
  parser:option("--device", "cpu, opaque, ...", "cpu")
  parser:option("--dim", "Columns of the embedding tables.", 32, tonumber)
  parser:option("--lr", "Learning rate of the tables.", 0.05, tonumber)
  parser:option("--dense-lr", "Learning rate of the dense part.", 0.01, tonumber)
  parser:option("--rows", "Rows of each table (Criteo and synthetic).", 100000, tonumber)
  parser:option("--seed", "Everything random depends on it.", 1, tonumber)
  parser:option("--log-every", "Steps between lines of the log.", 10, tonumber)
  parser:option("--eps", "Added to Adagrad's roots. Far below it gradients make no steps: without that, Adagrad's first steps would have" ..
    " full size even where gradients are rounding errors, and curves on different numbers of ranks would part.", 1e-5, tonumber)
  parser:option("--eval-every", "Steps between looks at the held-out samples; 0: only at the end.", 100, tonumber)
  parser:option("--eval-samples", "Held-out samples of those looks (the end uses all).", 20000, tonumber)
  parser:option("--out", "Folder for log.jsonl, curve.png and summary.json.", "build/demo")
  parser:flag("--no-baseline", "Leave the logistic regression out.")
  parser:flag("--no-recommend", "Leave the recommendations out.")
  return parser:parse(words)
end

--- The model on this rank, sharded by the plan file.
local function build(options, data)
  peri.ffi.state.seed, peri.ffi.state.device = options.seed, options.device
  local module = dofile(options.model) {
    tables = data.tables, dense_features = data.dense_features, embedding_dim = options.dim, learning_rate = options.lr,
    eps = options.eps,
  }
  local plan = peri.plan.load(options.plan, {
    world_size = peri.world_size(), local_size = peri.world().local_size,
    module = "embeddings", tables = module.embeddings:embedding_bag_configs(),
  })
  local model = peri.DistributedModelParallel { module = module, plan = plan, device = options.device }
  return model, peri.nn.optim.Adagrad { params = model:dense_parameters(), lr = options.dense_lr, eps = options.eps }
end

--- Train; returns the points of the curve { step =, loss =, samples_per_s =, auc = } and the seconds it took, looks not counted.
local function train(options, data, model, optimizer, log)
  local pipeline = peri.pipeline.TrainPipelineBase { model = model, optimizer = optimizer }
  local batches = data.loader { part = "train", batch_size = options.batch_size, epochs = math.huge, drop_last = true }
  local progress = Progress { total = options.steps, samples_per_step = options.batch_size, style = peri.rank() > 0 and "off" or nil }
  local points, losses, mean = {}, {}, 0
  local function look()
    return evaluation.evaluate(model, data.loader { part = "test", batch_size = 8192, limit = options.eval_samples })
  end
  for step = 1, options.steps do
    local loss = pipeline:progress(batches)
    if not loss then error(("the data has no batch of %d samples"):format(options.batch_size), 0) end
    losses[#losses + 1] = loss
    if step % options.log_every == 0 or step == options.steps then
      mean = evaluation.mean_loss(losses)
      losses = {}
      local point = { step = step, loss = mean, samples_per_s = progress:rate(step) }
      if options.eval_every > 0 and step % options.eval_every == 0 then point.auc = progress:pause(look).auc end
      points[#points + 1] = point
      log:write(point)
    end
    if points[1] then progress:update(step, mean) end
  end
  progress:close()
  return points, progress:seconds()
end

local function main()
  local options = options_of(arg)
  local started = Progress.now()
  peri.init()
  local first = peri.rank() == 0
  local say = first and print or function() end

  local data = sources.open(options)
  options.steps = options.steps or math.max(1, math.min(100000, math.floor(2 * data.samples / options.batch_size)))
  local prepared = Progress.now() - started
  say(("%s: %s training samples of %d dense and %d sparse features, %d tables of %s rows in all (%.1f s)"):format(data.name,
    Progress.grouped(data.samples), data.dense_features, #data.keys, #data.tables, Progress.grouped(data.table_rows), prepared))

  local model, optimizer = build(options, data)
  say(("training on %d %s, %d steps of %d samples, plan %s"):format(peri.world_size(), peri.world_size() == 1 and "rank" or "ranks",
    options.steps, options.batch_size, options.plan))
  local log = report.log(options.out, first)
  local points, seconds = train(options, data, model, optimizer, log)
  log:close()

  local summary = {
    data = data.name, ranks = peri.world_size(), steps = options.steps, batch_size = options.batch_size, plan = options.plan,
    seed = options.seed, device = options.device, samples = options.steps * options.batch_size, seconds_preparing = prepared,
    seconds_training = seconds, samples_per_s = options.steps * options.batch_size / seconds,
  }
  local result = evaluation.evaluate(model, data.loader { part = "test", batch_size = 8192 })
  for _, name in ipairs { "auc", "ne", "logloss", "calibration" } do summary[name] = result[name] end
  summary.test_samples = result.samples
  summary.baseline = { base_rate = baselines.base_rate(data, result.ctr) }
  if not options.no_baseline then summary.baseline.logistic_regression = baselines.logistic_regression(data, options, say) end
  if data.packages and not options.no_recommend then summary.recommendations = recommend.run(model, data, say) end
  summary.seconds = Progress.now() - started
  if first then report.finish(options.out, summary, points) end
end

main()
