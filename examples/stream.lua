-- stream.lua: ids that no one has seen before arrive all the time; tables stay as they are. Two models see the same
-- stream, with equally much memory: one hashes ids into its tables (modulo rows), the other has managed collision,
-- which gives rows to ids that are asked for, and takes them from ids that no longer are.
--
--   perilune run -n 2 examples/stream.lua                          the package lists of this Debian machine
--   perilune run -n 2 examples/stream.lua --data synthetic:60000   made-up packages
--
-- Every batch is predicted first and learned then; the AUC over time is of these predictions. It leaves OUT/stream.svg.
local here = arg[0]:match "^(.*/)" or "./"
package.path = here .. "?.lua;" .. package.path

local peri = require "perilune"
local Progress = require "perilune.progress"
local settings = require "stream.options"
local source = require "stream.source"
local model = require "stream.model"
local picture = require "stream.picture"

--- Train on one step of the stream. Returns the logits from before, and keeps the loss.
local function train(m, features, batch, options)
  m.optimizer:zero_grad()
  local logits = m.model(features)
  local loss = peri.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels, nil, nil, "sum")
    * (peri.world_size() / options.batch_size)
  loss:backward()
  m.optimizer:step()
  m.loss = loss:item()
  return logits:detach()
end

--- A point of the curve: the AUC of each model over the samples since the last point, of all ranks. Collective.
local function point(models, step)
  local p = { step = step }
  for _, m in ipairs(models) do
    p[m.key] = m.auc:compute().window_auc
    m.auc = peri.nn.metrics.AUCMetric {}
  end
  return p
end

local function run(options, stream, models)
  local progress = Progress { total = options.steps, samples_per_step = options.batch_size, style = peri.rank() > 0
    and "off" or nil }
  local points, rows = {}, models.rows
  for step = 1, options.steps do
    peri.scope(function()
      local batch = stream:batch(step, rows)
      for _, m in ipairs(models) do
        m.auc:update(train(m, batch[m.input], batch, options), batch.labels)
      end
    end)
    if step % options.points == 0 or step == options.steps then
      points[#points + 1] = point(models, step)
    end
    local last = points[#points]
    if last then
      progress:update(step, models[1].loss, ("AUC managed %.3f, modulo %.3f"):format(last.managed, last.modulo))
    end
  end
  progress:close()
  return points
end

--- Of the points of the second half of the stream, when the first ids are gone.
local function late(points, key)
  local sum, n = 0, 0
  for _, p in ipairs(points) do
    if p.step > points[#points].step / 2 then sum, n = sum + p[key], n + 1 end
  end
  return sum / n
end

local function main()
  peri.init()
  local options = settings.parse(arg, here)
  local say = peri.rank() == 0 and print or function() end
  peri.ffi.state.seed = options.seed
  local path = peri.rank() == 0 and picture.path(options.out)
  local stream = source.Source(options)
  local models = model.pair(options)
  local grouped = Progress.grouped
  say(("%s: %s packages, each lives %d of %d steps; tables of %s rows (managed collision) and %s (modulo), %s bytes "
    .. "both"):format(
    options.data, grouped(stream.packages.n), options.life, options.steps, grouped(options.rows), grouped(models.rows),
    grouped(models.bytes)))
  local points = run(options, stream, models)
  say(("%s samples of %s packages"):format(grouped(options.steps * options.batch_size), grouped(stream.distinct)))
  for _, m in ipairs(models) do
    say(("%-18s %s  AUC %.4f in the second half, %.4f at the end"):format(m.name, picture.bars(points, m.key, models),
      late(points, m.key), points[#points][m.key]))
  end
  if path then
    picture.write(path, points, models)
    say("the picture: " .. path)
  end
end

main()
