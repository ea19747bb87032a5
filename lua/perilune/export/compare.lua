-- export/compare.lua: whether a model file answers what the model answers.
local ffi = require "ffi"
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor.core"
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

--- The least and the largest number of a list; nil if it is empty or one of them lies outside of 0..1.
local function range_of_shares(list)
  local least, most = math.huge, -math.huge
  for _, x in ipairs(list) do
    if not (x >= 0 and x <= 1) then return nil end -- NaN is neither
    least, most = math.min(least, x), math.max(most, x)
  end
  return #list > 0 and least or nil, most
end

--- AUC and NE of predictions and labels; false unless the predictions are probabilities, and both classes are there.
local function quality(predictions, labels)
  local least, most = range_of_shares(labels)
  if not least or least == most or not range_of_shares(predictions) then return false end
  local report = metrics.evaluate(predictions, labels)
  return { auc = report.auc, ne = report.ne }
end

--- What a batch says of an output: a list of one label a sample, or nil. labels: a tensor, which belongs to the first
--- output, or a table of tensors by the names of outputs.
local function labels_of(batch, output, first, n)
  local labels, found = batch.labels, nil
  if Tensor.is(labels) then found = first and labels elseif labels then found = labels[output.name] end
  if not found or output.columns ~= 1 then return nil end
  if found:numel() ~= n then
    P.fail(("export: %d labels beside %d numbers of output '%s', wanted as many; of several outputs: labels = { %s = a "
      .. "tensor, ... }"):format(found:numel(), n, output.name, output.name))
  end
  return found:to("f32", "cpu"):to_list()
end

--- An error where the labels of a batch name what is no output.
local function check_labels(batch, outputs)
  if Tensor.is(batch.labels) then return end
  local known = {}
  for i, o in ipairs(outputs) do known[i] = o.name end
  for name in util.ordered(batch.labels or {}) do util.one_of("export", "a name in batch.labels", name, known) end
end

local Report = util.class "ExportReport"
function Report:init()
  self.samples, self.difference, self.differ, self.numbers, self.model, self.file = 0, 0, 0, 0, false, false
  self.outputs = 0 -- how many there are
  self.judged = {} -- { name =, model =, file = } of each output that batches have labels for
  self.unjudged = {} -- names of outputs whose labels allow no AUC and NE
  self.chosen = false -- dtypes of tables, in words, where the exporter chose them
end
function Report:__tostring()
  local lines = { ("%d of %d numbers for %d samples differ, by up to %.3g"):format(self.differ, self.numbers,
    self.samples, self.difference) }
  for _, j in ipairs(self.judged) do
    local line = ("AUC %.6f, NE %.6f of the model; AUC %.6f, NE %.6f of the file"):format(j.model.auc, j.model.ne,
      j.file.auc, j.file.ne)
    lines[#lines + 1] = self.outputs > 1 and ("output '%s' beside its labels: %s"):format(j.name, line) or line
  end
  for _, name in ipairs(self.unjudged) do
    lines[#lines + 1] = ("output '%s' is not judged: its labels are not of two classes, or not 0..1"):format(name)
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
--- Returns a report: samples, difference (the largest), differ (numbers that differ), numbers (all); judged: name,
--- model and file, each { auc =, ne = }, of every output that is one number a sample and has labels of both classes;
--- model and file: those of the first of them, else false. Outputs are logits; where `probabilities`, the first is a
--- probability.
function M.run(answers, file, batches, probabilities, given)
  local report, outputs, found = Report(), file:outputs(), {}
  report.outputs = #outputs
  for i = 1, #outputs do found[i] = { model = {}, file = {}, labels = {} } end
  for _, batch in ipairs(batches) do
    check_labels(batch, outputs)
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
        local map = probabilities and i == 1 and tonumber or sigmoid
        for k, y in ipairs(labels_of(batch, o, i == 1, n) or {}) do
          local of, at = found[i], #found[i].labels + 1
          of.model[at], of.file[at], of.labels[at] = map(a[k - 1]), map(b[k - 1]), y
        end
      end
    end)
  end
  for i, of in ipairs(found) do
    local own, theirs = quality(of.model, of.labels), quality(of.file, of.labels)
    if own and theirs then table.insert(report.judged, { name = outputs[i].name, model = own, file = theirs })
    elseif #of.labels > 0 then table.insert(report.unjudged, outputs[i].name) end
  end
  local first = report.judged[1] or { model = false, file = false }
  report.model, report.file = first.model, first.file
  return report
end

return M
