-- export/compare.lua: whether a model file answers what the model answers.
local ffi = require "ffi"
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local util = require "perilune.util"
local metrics = require "perilune.nn.metrics"
local opened = require "perilune.export.open"
local C, check = P.C, P.check

local M = {}

--- call() with products whose sums have one order, as those of model files.
local function ordered(call, ...)
  if not util.is_callable(call) then
    P.fail(("export.ordered: call is %s, wanted a function"):format(errors.kind(call)))
  end
  local before = C.peri_products_ordered()
  check(C.peri_products_ordered_set(true))
  local results = { pcall(call, ...) }
  check(C.peri_products_ordered_set(before))
  if not results[1] then error(results[2], 0) end
  return unpack(results, 2)
end
M.ordered = ordered

--- The largest difference of two arrays of n numbers, how many differ in a bit, and whether only one has a NaN
--- somewhere.
local function differences(a, b, n)
  local x, y, most, differ = ffi.cast("uint32_t *", a), ffi.cast("uint32_t *", b), 0, 0
  for i = 0, n - 1 do
    if x[i] ~= y[i] then
      local d = math.abs(a[i] - b[i])
      if a[i] == a[i] or b[i] == b[i] then -- two NaN are equal, whatever their bits
        differ = differ + 1
        most = d == d and math.max(most, d) or math.huge
      end
    end
  end
  return most, differ
end

local function sigmoid(x) return 1 / (1 + math.exp(-x)) end

--- AUC and NE of predictions (probabilities) and labels, where both classes are there.
local function quality(predictions, labels)
  local ok, report = pcall(metrics.evaluate, predictions, labels)
  return ok and { auc = report.auc, ne = report.ne } or false
end

local Report = util.class "ExportReport"
function Report:init()
  self.samples, self.difference, self.differ, self.numbers, self.model, self.file = 0, 0, 0, 0, false, false
  self.outputs, self.first = 0, false -- how many there are, and the name of the first
  self.chosen = false -- dtypes of tables, in words, where the exporter chose them
end
function Report:__tostring()
  local lines = { ("%d of %d numbers for %d samples differ, by up to %.3g"):format(self.differ, self.numbers,
    self.samples, self.difference) }
  if self.model and self.file then
    lines[2] = ("AUC %.6f, NE %.6f of the model; AUC %.6f, NE %.6f of the file"):format(self.model.auc, self.model.ne,
      self.file.auc, self.file.ne)
    if self.outputs > 1 then lines[2] = ("output '%s' beside batch.labels: %s"):format(self.first, lines[2]) end
  end
  if self.chosen then table.insert(lines, 1, self.chosen) end
  for _, used in ipairs(self.loose or {}) do
    lines[#lines + 1] = ("no trainer can be followed (--follow) with this file: %s uses a constant that is "
      .. "neither of the model's state nor computed of it as a file can; put it there: self:register_buffer(name, "
      .. "tensor)"):format(used)
  end
  return table.concat(lines, "\n")
end

--- Compare on a list of batches. answers(batch): the model's table of tensors by name; file: an opened model file;
--- given(batch): what it is asked about.
--- Returns a report: samples, difference (the largest), differ (numbers that differ), numbers (all), model and file: {
--- auc =, ne = }, of the first output where it is one number a sample and batches have labels, else false; as logits,
--- or as probabilities where `probabilities`.
function M.run(answers, file, batches, probabilities, given)
  local report = Report()
  local predictions, labels = { {}, {} }, {}
  local outputs = file:outputs()
  report.outputs, report.first = #outputs, outputs[1].name
  for _, batch in ipairs(batches) do
    P.scope(function()
      local own, theirs = ordered(answers, batch), opened.answers(file, given(batch), true)
      for i, o in ipairs(outputs) do
        local a, n = own[o.name]:to("f32", "cpu"):contiguous():read()
        local b = theirs[o.name]:read()
        if theirs[o.name]:numel() ~= n then
          P.fail(("export: output '%s': %d numbers of the file, %d of the model"):format(o.name, theirs[o.name]:numel(),
            n))
        end
        local most, differ = differences(a, b, n)
        report.difference, report.differ, report.numbers = math.max(report.difference, most), report.differ + differ,
          report.numbers + n
        if i == 1 then report.samples = report.samples + n / o.columns end
        if i == 1 and o.columns == 1 and batch.labels then
          local y = batch.labels:to("f32", "cpu"):to_list()
          for k = 0, n - 1 do
            predictions[1][#predictions[1] + 1] = probabilities and a[k] or sigmoid(a[k])
            predictions[2][#predictions[2] + 1] = probabilities and b[k] or sigmoid(b[k])
            labels[#labels + 1] = y[k + 1]
          end
        end
      end
    end)
  end
  if #labels > 0 then report.model, report.file = quality(predictions[1], labels), quality(predictions[2], labels) end
  return report
end

return M
