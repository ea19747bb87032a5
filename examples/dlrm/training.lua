-- training.lua: train with an eye on validation samples: keep the best weights, stop when nothing better comes.
local peri = require "perilune"
local Progress = require "perilune.progress"
local evaluation = require "dlrm.evaluation"
local Best = require "dlrm.best"

local M = {}

--- What a look at the validation samples found: whether it is the best so far, and whether to go on. Collective; all
--- ranks judge the same numbers, and so alike.
local function judge(watch, step, result)
  local best = not watch.lowest or result.logloss < watch.lowest.loss
  watch.last = { step = step, loss = result.logloss, auc = result.auc }
  if best then
    watch.lowest, watch.worse = watch.last, 0
    if watch.best then watch.lowest.kept = watch.best:keep(step) end
  else
    watch.worse = watch.worse + 1
  end
  return best, not watch.best or watch.worse < watch.patience
end

--- The loader of all looks, made once: to make one reads the validation part to its end (counts, an order of samples).
local function looked_at(options, data, model)
  return data.loader { part = "validation", batch_size = evaluation.batch_size(model, options),
    limit = options.eval_samples, num_workers = options.num_workers }
end

local function check_loss(loss, step)
  if loss == loss and math.abs(loss) < math.huge then return loss end
  error(("the loss at step %d is %g: give a lower --learning-rate or --dense-learning-rate"):format(step, loss), 0)
end

--- Whether there are looks: samples to look at, and a wish to.
local function watched(options, data) return options.eval_every > 0 and data.validation_samples > 0 end

--- Every so many steps of a pass, and at its end.
local function looks_now(options, step)
  local place = (step - 1) % options.steps_per_pass + 1
  return place % options.eval_every == 0 or place == options.steps_per_pass or step == options.steps
end

--- The loss of one step, nil at the end; what else the model returns is not needed.
local function step_of(pipeline, batches)
  local loss, logits, labels = pipeline:progress(batches)
  if logits then logits:release() end
  if labels then labels:release() end
  return loss
end

--- Train once on the validation samples too: in a log they are the newest.
local function finish(options, data, pipeline)
  local batches = data.loader { part = "validation", batch_size = options.batch_size,
    num_workers = options.num_workers }
  for loss in function() return step_of(pipeline, batches) end do loss:release() end
end

local function pipeline_of(options, model, optimizer)
  if options.schedule.name == "sparse_dist" then
    return peri.TrainPipelineSparseDist { model = model, optimizer = optimizer }
  end
  return peri.pipeline.Pipeline { model = model, optimizer = optimizer, schedule = options.schedule }
end

--- What a resumed run has to know beside the state of model and optimizer.
local function values_of(watch, points, losses)
  return { lowest = watch.lowest, last = watch.last, worse = watch.worse, pending = watch.pending, points = points,
    losses = peri.util.map(losses, function(loss) return loss:item() end) }
end

--- Go on where a checkpoint is (peri.checkpoint.Saver): returns the steps that were made.
local function resume(saver, watch, points, losses, log)
  local step, values = saver:resume()
  if not step then return 0 end
  watch.lowest, watch.last, watch.worse, watch.pending = values.lowest, values.last, values.worse, values.pending
  for i, point in ipairs(values.points) do
    points[i] = point
    log:write(point) -- the log is that of the whole run
  end
  for i, loss in ipairs(values.losses) do losses[i] = peri.tensor(loss) end
  if watch.best then watch.best:resume(watch.lowest and watch.lowest.kept) end
  return step
end

local WARM, MEASURED = 5, 20 -- steps

--- Measure some steps (--trace): their timeline into a file, and where they wait to the terminal.
local function trace(options, pipeline, step)
  if not options.trace then return end
  if step == WARM then pipeline:measure(true) end
  if step ~= WARM + MEASURED then return end
  local show = peri.pipeline.show
  local found = show.write(pipeline, options.trace)
  pipeline:measure(false)
  if peri.rank() == 0 then
    print(("%s: steps %d to %d\n%s"):format(options.trace, WARM + 1, step, show.waits_text(found)))
  end
end

--- The end of a training: the best weights, what is said of them, and a pass over the validation samples. Returns
--- `result`.
local function conclude(options, data, pipeline, watch, result)
  if watched(options, data) then
    local kept = watch.best and watch.lowest or watch.last
    result.kept = kept.step
    result.validation = { samples = data.validation_samples, loss = kept.loss, auc = kept.auc,
      last_loss = watch.last.loss }
  end
  if watch.best then
    if result.kept < result.steps then watch.best:restore() end
    watch.best:close()
    result.finished = not options.hold_out_validation
    if result.finished then finish(options, data, pipeline) end
  end
  return result
end

--- Train at most options.steps steps; afterwards the model has the best weights (options.patience > 0) or the last.
--- Returns the points of the curve { step =, pass =, loss =, samples_per_s =, validation_loss =, validation_auc =, best
--- = }, and a table: steps (taken), kept (the step of the weights), stopped (early), interrupted (asked to stop: then
--- there are only steps), finished (with the validation samples), validation { samples =, loss =, auc = (of those
--- weights), last_loss = } or nil, taken (steps of this start), seconds (for these, no looks). Collective.
function M.run(options, data, model, optimizer, log)
  local pipeline = pipeline_of(options, model, optimizer)
  local batches = data.loader { part = data.training_part, batch_size = options.batch_size, epochs = math.huge,
    drop_last = true, num_workers = options.num_workers }
  local saver = peri.checkpoint.Saver { parts = { model = model, optimizer = optimizer, batches = batches } }
  local looking = watched(options, data)
  local samples = looking and looked_at(options, data, model)
  local watch = { patience = options.patience, worse = 0, pending = false } -- pending: a look was interrupted
  if looking and options.patience > 0 then watch.best = Best(model, saver.folder or options.out) end
  local points, losses, note, go_on = {}, {}
  local step = resume(saver, watch, points, losses, log)
  go_on = not watch.best or watch.worse < watch.patience -- it may have come to its end
  local first, progress = step, Progress { total = options.steps, samples_per_step = options.batch_size, first = step,
    style = peri.rank() > 0 and "off" or nil }

  --- A point of the curve, with a look where one is due.
  local function add_point()
    local point = { step = step, pass = step / options.steps_per_pass,
      loss = check_loss(evaluation.mean_loss(losses), step), samples_per_s = progress:rate(step) }
    if looking and looks_now(options, step) then
      local result = progress:pause(evaluation.evaluate, model, samples:rewind())
      watch.pending = peri.stopped() ~= nil
      if watch.pending then return end
      point.validation_loss, point.validation_auc = result.logloss, result.auc
      point.best, go_on = progress:pause(judge, watch, step, result)
      note = ("validation %.4f"):format(result.logloss)
    end
    losses = {}
    points[#points + 1] = point
    log:write(point)
  end
  local function values() return values_of(watch, points, losses) end

  if watch.pending then add_point() end
  while go_on and step < options.steps do
    local loss = not peri.stopped() and step_of(pipeline, batches)
    if not loss then break end -- the run was asked to stop
    step = step + 1
    losses[#losses + 1] = loss
    trace(options, pipeline, step)
    if looking and looks_now(options, step) or step % options.log_every == 0 or step == options.steps then
      add_point()
    end
    if points[1] then progress:update(step, points[#points].loss, note) end
    local saved = saver:step(step, values)
    if saved and watch.best then watch.best:was_saved() end
  end
  if peri.stopped() then
    progress:close()
    saver:close(step, values)
    pipeline:close()
    batches:stop()
    return points, { steps = step, interrupted = true }
  end
  progress:close()
  local last = saver:close(step, values)
  if last and watch.best then watch.best:was_saved() end
  pipeline:close() -- batches that were loaded ahead
  batches:stop()
  return points, conclude(options, data, pipeline, watch, { steps = step, kept = step, stopped = not go_on
    and step < options.steps, seconds = progress:seconds(), taken = step - first })
end

--- What came of it, in words.
function M.words(options, result)
  return M.kept(options, result) .. (result.finished and ", and trained once on the validation samples too" or "")
end

--- Which weights were kept, and why.
function M.kept(options, result)
  local v = result.validation
  if not v then return ("the weights of the last step are kept: no validation samples were looked at") end
  if options.patience == 0 then
    return ("the weights of the last step are kept (--patience 0): validation loss %.4f"):format(v.last_loss)
  end
  local function pass(step) return ("step %d (pass %.1f)"):format(step, step / options.steps_per_pass) end
  if result.kept == result.steps then
    return ("the validation loss was lowest at the end, %.4f (more passes, --epochs, may help): the weights of the "
      .. "last step are kept")
      :format(v.loss)
  end
  return ("%sthe validation loss was lowest at %s, %.4f, and %.4f at the end%s: the weights of step %d are "
    .. "kept"):format(
    result.stopped and ("stopped early, after step %d of at most %d: "):format(result.steps, options.steps) or "",
    pass(result.kept), v.loss, v.last_loss, v.last_loss > 1.005 * v.loss and " (overfitting)" or "", result.kept)
end

return M
