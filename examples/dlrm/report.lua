-- report.lua: the log while training; the table, the picture and the summary at the end. A file that cannot be written
-- is an error.
local json = require "dkjson"
local Progress = require "perilune.progress"
local SummaryWriter = require("perilune").nn.metrics.SummaryWriter
local picture = require "dlrm.picture"
local files = require "dlrm.files"

local M = {}

local LOG_ORDER = { "step", "pass", "loss", "samples_per_s", "validation_loss", "validation_auc", "best" }
local SUMMARY_ORDER = { "data", "auc", "ne", "logloss", "calibration", "test_samples", "ranks", "steps", "kept_step",
  "stopped_early", "finished", "validation", "steps_per_pass", "batch_size", "learning_rate", "dense_learning_rate",
  "plan", "seed", "device", "samples", "samples_per_s", "seconds", "seconds_preparing", "seconds_training", "baseline",
  "base_rate", "logistic_regression", "rate", "recommendations", "package", "depends", "suggested", "hidden",
  "place_of_hidden", "tables" }

--- A log of one JSON object per line in the folder `out`, and the same numbers as an event file for TensorBoard; on
--- other ranks than the first it swallows everything.
function M.log(out, first)
  if not first then return { write = function() end, close = function() end } end
  files.folder(out)
  local file, events = files.open(out .. "/log.jsonl"), SummaryWriter { folder = out .. "/tensorboard" }
  return {
    write = function(_, point)
      file:write(json.encode(point, { keyorder = LOG_ORDER }) .. "\n")
      file:flush()
      events:add_scalars(point, point.step)
      events:flush()
    end,
    close = function()
      file:close()
      events:close()
    end,
  }
end

-- Samples that are all of one class have no normalized entropy.
local function row(name, r)
  print(("  %-22s %8.4f %8s %10.4f"):format(name, r.auc, r.ne < 1e6 and ("%.4f"):format(r.ne) or "-", r.logloss))
end

local FEW = 200 -- test samples

--- Whether the model was worth its tables, in words.
local function verdict(summary)
  local logistic = summary.baseline.logistic_regression
  local other = logistic or summary.baseline.base_rate
  local name, gain = logistic and "logistic regression" or "base rate", 100 * (1 - summary.logloss / other.logloss)
  if summary.test_samples < FEW then return ("%d test samples are too few to judge by"):format(summary.test_samples) end
  if gain > 0 then return ("the DLRM's log-loss is %.1f %% below that of the %s"):format(gain, name) end
  return ("the DLRM is no better than the %s (its log-loss is %.1f %% above): other rates (--learning-rate, "
    .. "--dense-learning-rate), another --batch-size or more data may help"):format(name, -gain)
end

--- Print the table, draw the picture, write the summary.
function M.finish(out, summary, points)
  print(("\n  %s test samples %s AUC       NE   log-loss"):format(Progress.grouped(summary.test_samples),
    (" "):rep(12 - #Progress.grouped(summary.test_samples))))
  row("base rate", summary.baseline.base_rate)
  if summary.baseline.logistic_regression then row("logistic regression", summary.baseline.logistic_regression) end
  row("DLRM", summary)
  print("  " .. verdict(summary))
  local file = files.open(out .. "/summary.json")
  file:write(json.encode(summary, { indent = true, keyorder = SUMMARY_ORDER }) .. "\n")
  file:close()
  local drawn = picture.draw(out, summary, points)
  local rate = summary.samples_per_s and Progress.grouped(summary.samples_per_s) .. " samples/s"
    or "no step was left to train"
  print(("\n%s, %s in all; see %s/log.jsonl, %ssummary.json"):format(rate,
    Progress.duration(summary.seconds), out, drawn and "curve.png, " or ""))
end

return M
