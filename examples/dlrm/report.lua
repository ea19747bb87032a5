-- report.lua: the log while training; the table, the picture and the summary at the end.
local json = require "dkjson"
local Progress = require "perilune.progress"

local M = {}

local LOG_ORDER = { "step", "loss", "samples_per_s", "auc" }
local SUMMARY_ORDER = { "data", "auc", "ne", "logloss", "calibration", "test_samples", "ranks", "steps", "batch_size", "plan", "seed",
  "device", "samples", "samples_per_s", "seconds", "seconds_preparing", "seconds_training", "baseline", "base_rate",
  "logistic_regression", "rate", "learning_rate", "recommendations", "package", "depends", "suggested", "hidden", "place_of_hidden" }

local function open(path)
  local file, why = io.open(path, "w")
  if not file then error(("cannot write %s: %s"):format(path, why), 0) end
  return file
end

local function quoted(path) return "'" .. path:gsub("'", "'\\''") .. "'" end

--- A log of one JSON object per line in the folder `out`; on other ranks than the first it swallows everything.
function M.log(out, first)
  if not first then return { write = function() end, close = function() end } end
  os.execute("mkdir -p " .. quoted(out))
  local file = open(out .. "/log.jsonl")
  return {
    write = function(_, point)
      file:write(json.encode(point, { keyorder = LOG_ORDER }), "\n")
      file:flush()
    end,
    close = function() file:close() end,
  }
end

--- Loss and held-out AUC over steps, drawn by gnuplot. Returns whether there is a picture; one of an earlier run does not stay.
local function picture(out, summary, points)
  os.remove(out .. "/curve.png")
  if os.execute "command -v gnuplot >/dev/null 2>&1" ~= 0 then
    print "curve.png is left out: gnuplot is not installed"
    return false
  end
  local plot = io.popen("gnuplot 2>/dev/null", "w")
  local auc = false
  for _, p in ipairs(points) do auc = auc or p.auc ~= nil end
  local logistic = summary.baseline.logistic_regression
  plot:write(("set terminal pngcairo size 900,540\nset output %s\n"):format(quoted(out .. "/curve.png")),
    "set xlabel 'step'\nset ylabel 'training loss'\nset grid\nset key center right\n",
    ("set title %s noenhanced\n"):format(quoted(("DLRM on %s, %d ranks"):format(summary.data, summary.ranks))))
  local parts = { "'-' using 1:2 with lines linewidth 2 title 'loss'" }
  if auc then
    plot:write "set y2label 'held-out AUC'\nset y2tics\nset ytics nomirror\n"
    parts[#parts + 1] = "'-' using 1:2 axes x1y2 with linespoints linewidth 2 pointtype 7 title 'AUC'"
    if logistic then parts[#parts + 1] = ("%.6f axes x1y2 dashtype 2 title 'AUC, logistic regression'"):format(logistic.auc) end
  end
  plot:write("plot ", table.concat(parts, ", "), "\n")
  for _, p in ipairs(points) do plot:write(("%d %.9g\n"):format(p.step, p.loss)) end
  plot:write "e\n"
  if auc then
    for _, p in ipairs(points) do
      if p.auc then plot:write(("%d %.9g\n"):format(p.step, p.auc)) end
    end
    plot:write "e\n"
  end
  plot:close()
  return true
end

local function row(name, r) print(("  %-22s %8.4f %8.4f %10.4f"):format(name, r.auc, r.ne, r.logloss)) end

--- Print the table, draw the picture, write the summary.
function M.finish(out, summary, points)
  print(("\n  %s held-out samples %s AUC       NE   log-loss"):format(Progress.grouped(summary.test_samples),
    (" "):rep(8 - #Progress.grouped(summary.test_samples))))
  row("base rate", summary.baseline.base_rate)
  if summary.baseline.logistic_regression then row("logistic regression", summary.baseline.logistic_regression) end
  row("DLRM", summary)
  local drawn = picture(out, summary, points)
  local file = open(out .. "/summary.json")
  file:write(json.encode(summary, { indent = true, keyorder = SUMMARY_ORDER }), "\n")
  file:close()
  print(("\n%s samples/s, %s in all; see %s/log.jsonl, %ssummary.json"):format(Progress.grouped(summary.samples_per_s),
    Progress.duration(summary.seconds), out, drawn and "curve.png, " or ""))
end

return M
