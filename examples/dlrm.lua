-- dlrm.lua: train a DLRM with sharded embedding tables, and say what it is worth.
--
--   perilune run -n 2 examples/dlrm.lua                                        the package lists of this Debian machine
--   perilune run -n 2 examples/dlrm.lua --data train.txt --steps 5000          a file in the Criteo layout
--   perilune run -n 2 examples/dlrm.lua --data synthetic:1000000               made-up samples
--
-- It leaves OUT/log.jsonl (an object per logged step), OUT/tensorboard (the same, as an event file), OUT/curve.png (if
-- gnuplot is there) and OUT/summary.json. What is trained does not depend on the number of ranks or on the plan:
-- --batch-size counts the samples of all ranks together.
local here = arg[0]:match "^(.*/)" or "./"
package.path = here .. "?.lua;" .. package.path

local peri = require "perilune"
local Progress = require "perilune.progress"
local settings = require "dlrm.options"
local sources = require "dlrm.sources"
local placement = require "dlrm.placement"
local training = require "dlrm.training"
local baselines = require "dlrm.baselines"
local evaluation = require "dlrm.evaluation"
local recommend = require "dlrm.recommend"
local report = require "dlrm.report"

--- The model on this rank, sharded by the plan file.
local function build(options, data)
  peri.ffi.state.seed, peri.ffi.state.device = options.seed, options.device
  local module = dofile(options.model) {
    tables = data.tables, dense_features = data.dense_features, embedding_dim = options.dim,
    learning_rate = options.learning_rate, eps = options.eps,
  }
  if options.precision == "bf16" then
    local forward, kind = module.forward, options.device:match "^[%a_]+"
    function module:forward(...) return peri.autocast({ device = kind, dtype = "bf16" }, forward, self, ...) end
  else
    peri.set_float32_matmul_precision(options.precision)
  end
  local model = peri.DistributedModelParallel { module = module, plan = options.plan, device = options.device }
  return model, peri.nn.optim.Adagrad { params = model:named_parameters(), lr = options.dense_learning_rate,
    eps = options.eps }
end

local function copy(to, from, names)
  for _, name in ipairs(names) do to[name] = from[name] end
  return to
end

--- What the model is worth on the test samples, beside what it must beat.
local function judge(options, data, model, summary, say)
  local result = evaluation.evaluate(model,
    data.loader { part = "test", batch_size = evaluation.batch_size(model, options),
      num_workers = options.num_workers })
  copy(summary, result, { "auc", "ne", "logloss", "calibration" })
  summary.test_samples = result.samples
  summary.baseline = { base_rate = baselines.base_rate(data, result.ctr) }
  if not options.no_baseline then
    summary.baseline.logistic_regression = baselines.logistic_regression(data, options, summary, say)
  end
  if data.packages and not options.no_recommend then
    summary.recommendations = recommend.run(model, data, evaluation.batch_size(model, options), say)
  end
end

local function main()
  peri.init()
  local options = settings.parse(arg, here)
  local started = Progress.now()
  local first = peri.rank() == 0
  local say = first and print or function() end

  local log = report.log(options.out, first)
  local data = sources.open(options, say)
  settings.fit(options, data.samples)
  local prepared = Progress.now() - started
  local grouped = Progress.grouped
  say(("%s: %s training, %s validation and %s test samples of %d dense and %d sparse features (%.1f s)"):format(
    data.name, grouped(data.samples), grouped(data.validation_samples), grouped(data.test_samples), data.dense_features,
    #data.keys, prepared))

  local model, optimizer = build(options, data)
  if options.device ~= "cpu" then say("transports: " .. peri.world():transports()) end
  local places = placement.of(model, options.plan)
  say(placement.text(places))
  say(("training on %d %s of %s, each with %d workers for its batches, at most %d steps of %d samples (%.1f passes), "
    .. "learning rates %g (tables) and %g (dense)"):format(peri.world_size(), peri.world_size() == 1 and "rank"
    or "ranks", options.device, options.num_workers, options.steps, options.batch_size,
    options.steps / options.steps_per_pass, options.learning_rate, options.dense_learning_rate))
  local points, result = training.run(options, data, model, optimizer, log)
  log:close()
  local function stopped(what)
    say(("stopped %s; the same command goes on from the last checkpoint"):format(what))
  end
  if result.interrupted then return stopped(("after step %d, and saved"):format(result.steps)) end
  say(training.words(options, result))

  local summary = copy({ data = data.name, ranks = peri.world_size(), steps = result.steps, kept_step = result.kept,
    schedule = options.schedule.name, stopped_early = result.stopped, finished = result.finished,
    validation = result.validation, seconds_preparing = prepared, seconds_training = result.seconds,
    samples = result.steps * options.batch_size, tables = places.list,
  }, options, { "batch_size", "steps_per_pass", "learning_rate", "dense_learning_rate", "plan", "seed", "device" })
  -- of this start
  if result.taken > 0 then summary.samples_per_s = result.taken * options.batch_size / result.seconds end
  summary.plan = summary.plan or "automatic"
  judge(options, data, model, summary, say)
  -- loaders end early then: numbers would be of some samples
  if peri.stopped() then return stopped "before all was judged" end
  summary.seconds = Progress.now() - started
  if first then report.finish(options.out, summary, points) end
end

main()
