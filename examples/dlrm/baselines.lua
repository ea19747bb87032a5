-- baselines.lua: what a model must beat: predicting the base rate, and a logistic regression on the same features.
local ffi = require "ffi"
local peri = require "perilune"
local Progress = require "perilune.progress"
local metrics = require "perilune.nn.metrics"
local data = peri.data

local M = {}

local DELAY = 3 -- seconds until a baseline shows its progress

--- The host batches of a loader, one after the other.
local function hosts(loader) return function() return loader:next_host() end end

local function alone(source, args)
  args.rank, args.world_size = 0, 1
  return source.loader(args)
end

--- Predict the share of positives among (some) training samples for every held-out one; `ctr` is the share among those.
function M.base_rate(source, ctr)
  local positives, n = 0, 0
  for host in hosts(alone(source, { part = source.training_part, batch_size = 8192, limit = 100000 })) do
    for i = 0, tonumber(host.ptr.rows) - 1 do positives = positives + host.ptr.labels[i] end
    n = n + tonumber(host.ptr.rows)
  end
  local function entropy(rate) return -ctr * math.log(rate) - (1 - ctr) * math.log(1 - rate) end
  local rate = positives / n
  return { rate = rate, auc = 0.5, ne = entropy(rate) / entropy(ctr), logloss = entropy(rate) }
end

local function predictions(model, loader)
  local n, at = loader:count(), 0
  local p, y, buffer = ffi.new("double[?]", n), ffi.new("double[?]", n), ffi.new("float[?]", loader.batch_size)
  for host in hosts(loader) do
    model:predict(host, buffer)
    for i = 0, tonumber(host.ptr.rows) - 1 do p[at + i], y[at + i] = buffer[i], host.ptr.labels[i] end
    at = at + tonumber(host.ptr.rows)
  end
  return metrics.evaluate(peri.Tensor.from_memory(p, { at }, "f64", "cpu"),
    peri.Tensor.from_memory(y, { at }, "f64", "cpu"))
end

local function regression(source, lr)
  return data.LogisticRegression { rows = source.rows, dense_features = source.dense_features, lr = lr }
end

--- Train a regression on `steps` batches; rank 0 shows how far it is.
local function train(model, loader, steps, label)
  local progress = Progress { total = steps, samples_per_step = loader.batch_size, label = label, delay = DELAY,
    style = peri.rank() > 0 and "off" or nil }
  for step = 1, steps do progress:update(step, model:train(loader:next_host())) end
  progress:close()
end

local RATES = { 0.01, 0.03, 0.1 }
local TRIAL = 600000 -- samples on which rates are compared

--- Normalized entropy on the validation part (without one: on the trained samples) of a regression trained on part of
--- the training samples with each rate; this rank tries its share.
local function try_rates(source, batch_size)
  local ne = ffi.new("double[?]", #RATES)
  for i = 1 + peri.rank(), #RATES, peri.world_size() do
    local model = regression(source, RATES[i])
    local loader = alone(source, { part = source.training_part, batch_size = batch_size, drop_last = true })
    train(model, loader, math.floor(math.min(source.samples, TRIAL) / batch_size),
      ("logistic regression, learning rate %g: "):format(RATES[i]))
    local part = source.validation_samples > 0 and "validation" or source.training_part
    ne[i - 1] = predictions(model, alone(source, { part = part, batch_size = 8192, limit = TRIAL })).ne
  end
  local sums = peri.Tensor.from_memory(ne, { #RATES }, "f64", "cpu")
  if peri.world_size() > 1 then peri.world():all_reduce(sums, "sum"):wait() end
  return sums:to_list()
end

--- Train a logistic regression on what the model saw (`summary` tells), with the best of RATES, and judge it on the
--- test samples. Collective; rank 0 has the result, the others nil.
function M.logistic_regression(source, options, summary, say)
  local started = Progress.now()
  local ne, best = try_rates(source, options.batch_size), 1
  for i = 2, #RATES do
    if ne[i] < ne[best] then best = i end
  end
  if peri.rank() > 0 then return nil end
  local model = regression(source, RATES[best])
  local args = { part = source.training_part, batch_size = options.batch_size, epochs = math.huge, drop_last = true }
  train(model, alone(source, args), summary.kept_step, "logistic regression: ")
  if summary.finished then
    for host in hosts(alone(source, { part = "validation", batch_size = options.batch_size })) do model:train(host) end
  end
  local result = predictions(model, alone(source, { part = "test", batch_size = 8192 }))
  say(("logistic regression: learning rate %g, best of %d on validation samples (%.1f s)"):format(RATES[best], #RATES,
    Progress.now() - started))
  return { auc = result.auc, ne = result.ne, logloss = result.logloss, learning_rate = RATES[best] }
end

return M
