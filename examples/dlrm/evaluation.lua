-- evaluation.lua: the loss of the last steps, and the metrics of held-out samples over all ranks.
local ffi = require "ffi"
local peri = require "perilune"
local metrics = require "perilune.nn.metrics"

local M = {}

--- Sum a host array of n doubles over the ranks, in place. Collective.
function M.sum_over_ranks(array, n)
  if peri.world_size() == 1 then return end
  peri.scope(function()
    local t = peri.Tensor.from_memory(array, { n }, "f64", "cpu")
    peri.world():all_reduce(t, "sum"):wait()
    ffi.copy(array, (t:read()), n * 8)
  end)
end

--- The mean of a list of losses (tensors, which are released).
function M.mean_loss(losses)
  local sum = 0
  for _, loss in ipairs(losses) do
    sum = sum + loss:item()
    loss:release()
  end
  return sum / #losses
end

local BATCH = 8192

--- Samples of a batch that is only looked at: those of a step where tables are in files, whose caches must hold the
--- rows of a batch.
function M.batch_size(model, options)
  for _, sharded in ipairs(model.sharded) do
    for _, t in ipairs(sharded.tables) do
      if sharded.plan.tables[t.name].compute_kernel == "fused_uvm_caching" then return options.batch_size end
    end
  end
  return BATCH
end

--- Logits of a model for this rank's rows of a batch, into to[0], to[1], ... Collective.
function M.logits(model, batch, to)
  peri.scope(peri.no_grad, function()
    local numbers, n = model.module:logits(batch):read()
    for i = 0, n - 1 do to[i] = numbers[i] end
  end)
end

--- Metrics of all batches of a loader (over all ranks): samples, auc, ne, logloss, calibration, ctr, accuracy.
--- Collective.
function M.evaluate(model, loader)
  local room = loader:count()
  local p, y, n = ffi.new("double[?]", room), ffi.new("double[?]", room), 0
  model:eval()
  for batch in loader do
    local at = batch.global_row
    M.logits(model, batch, p + at)
    local labels = batch.labels:read()
    for i = at, at + batch.rows - 1 do p[i], y[i] = 1 / (1 + math.exp(-p[i])), labels[i - at] end
    n = n + batch.global_rows
    batch:release()
  end
  model:train()
  M.sum_over_ranks(p, n)
  M.sum_over_ranks(y, n)
  return metrics.evaluate(peri.Tensor.from_memory(p, { n }, "f64", "cpu"),
    peri.Tensor.from_memory(y, { n }, "f64", "cpu"))
end

return M
