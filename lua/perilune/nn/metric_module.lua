-- metric_module.lua: the metrics of a model with several tasks, and how many samples it trains on a second. Names are
-- TorchRec's.
local P = require "perilune.ffi"
local util = require "perilune.util"
local signature = require "perilune.signature"
local ranks = require "perilune.nn.ranks"
local check_merge = require("perilune.nn.metric_state").check_merge
local C = P.C

-- -- throughput -------------------------------------------------------------------------------------------------------

local function seconds() return tonumber(C.peri_time_ns()) * 1e-9 end

--- Samples a second of all ranks together, from the end of the warm-up on.
local ThroughputMetric = util.class "ThroughputMetric"

function ThroughputMetric:init(args)
  local a = util.named("ThroughputMetric", args, { window_seconds = util.whole(100, 1),
    warmup_steps = util.whole(100, 1), group = util.optional, clock = seconds })
  signature.value("ThroughputMetric", "clock", a.clock, "callable")
  self.options = a
  self:reset()
end

--- Forget all samples; a new warm-up begins.
function ThroughputMetric:reset()
  self.total, self.warmup, self.steps, self.time, self.last = 0, 0, 0, 0, false
  self.laps, self.first = {}, 1 -- steps of the window, { samples, seconds }; first: the oldest
end

--- A step has trained on n samples of this rank.
function ThroughputMetric:update(n)
  util.integer("ThroughputMetric:update", "n", n, 0)
  local now = self.options.clock()
  self.steps, self.total = self.steps + 1, self.total + n
  if self.steps <= self.options.warmup_steps then
    self.warmup, self.last = self.warmup + n, now
    return
  end
  local lap = now - (self.last or now) -- the time between a checkpoint and what goes on from it is nobody's
  self.time, self.last = self.time + lap, now
  table.insert(self.laps, { n, lap })
  local window = 0
  for i = self.first, #self.laps do window = window + self.laps[i][2] end
  while self.first < #self.laps and window > self.options.window_seconds do
    window = window - self.laps[self.first][2]
    self.laps[self.first], self.first = false, self.first + 1
  end
end

--- total_examples, warmup_examples, and, once the warm-up is over, lifetime_throughput and window_throughput.
--- Collective over the group.
function ThroughputMetric:compute()
  local samples, time = 0, 0
  for i = self.first, #self.laps do samples, time = samples + self.laps[i][1], time + self.laps[i][2] end
  local group = ranks.group_of("ThroughputMetric", self.options.group)
  local sum = ranks.sum(group, { self.total, self.warmup, self.time, samples, time, 1 })
  local out = { total_examples = sum[1], warmup_examples = sum[2] }
  if sum[3] > 0 then out.lifetime_throughput = (sum[1] - sum[2]) / (sum[3] / sum[6]) end
  if sum[5] > 0 then out.window_throughput = sum[4] / (sum[5] / sum[6]) end
  return out
end

local COUNTS = { "total", "warmup", "steps", "time" }

--- What this rank has counted. The window begins anew with what goes on from it.
function ThroughputMetric:state_dict()
  local dict = { class = "ThroughputMetric" }
  for _, field in ipairs(COUNTS) do dict[field] = self[field] end
  return dict
end
--- What keeps load_state_dict(dict) from loading, in words; nil: nothing does. Changes nothing; not collective.
function ThroughputMetric:check_state_dict(dict) -- luacheck: ignore 212
  if type(dict) ~= "table" or dict.class ~= "ThroughputMetric" then return "it is no state of ThroughputMetric" end
  for _, field in ipairs(COUNTS) do
    if type(dict[field]) ~= "number" then return ("its '%s' is no number"):format(field) end
  end
end
function ThroughputMetric:load_state_dict(dict)
  local why = self:check_state_dict(dict)
  if why then P.fail("ThroughputMetric:load_state_dict: " .. why) end
  self:reset()
  for _, field in ipairs(COUNTS) do self[field] = dict[field] end
end
--- Samples are shared out; steps and seconds, which all ranks have alike, stay.
function ThroughputMetric:merge_state_dicts(list, rank, size)
  check_merge("ThroughputMetric", list, rank, size)
  local merged = { class = "ThroughputMetric", total = 0, warmup = 0, steps = 0, time = 0 }
  for i, dict in ipairs(list) do
    local why = self:check_state_dict(dict)
    if why then return nil, why end
    merged.steps, merged.time = math.max(merged.steps, dict.steps), math.max(merged.time, dict.time)
    if (i - 1) % size == rank then
      merged.total, merged.warmup = merged.total + dict.total, merged.warmup + dict.warmup
    end
  end
  return merged
end
ThroughputMetric.of_ranks = true

-- -- the metrics of all tasks -----------------------------------------------------------------------------------------

local Module = util.class "RecMetricModule"
local classes -- the metrics by name

local task_spec = { name = util.required.string, label_name = util.required.string,
  prediction_name = util.required.string, weight_name = util.optional.string, group_name = util.optional.string }

--- How keys name a class, which is TorchRec's namespace of it: "NEPositiveMetric" is "ne_positive". A class whose
--- namespace does not follow from its name has a field of it.
local function namespace_of(class)
  return classes[class].namespace
    or (class:gsub("Metric$", ""):gsub("(%l)(%u)", "%1_%2"):gsub("(%u)(%u%l)", "%1_%2"):lower())
end

--- Whether `name` is that of a class of metrics.
local function is_metric(name)
  return type(name) == "string" and name:find "Metric$" ~= nil and name ~= "RecMetric" and name ~= "ThroughputMetric"
    and rawget(classes, name) ~= nil
end

--- Make one metric of a class for a task.
local function make(class, options, all)
  local args = {}
  for name, value in util.ordered(options) do args[name] = value end
  if args.window_size == nil then args.window_size = all.window_size end
  if args.group == nil then args.group = all.group end
  return classes[class](args)
end

function Module:init(args)
  local a = util.named("RecMetricModule", args, { tasks = util.required.table, metrics = util.required.table,
    window_size = 10000000, group = util.optional, throughput = util.optional })
  signature.value("RecMetricModule", "tasks", a.tasks, "list")
  self.tasks, self.entries, self.throughput = {}, {}, false
  for i, task in ipairs(a.tasks) do
    self.tasks[i] = util.named("RecMetricModule: tasks", task, task_spec)
    for class, options in util.ordered(a.metrics) do
      if not is_metric(class) then
        P.fail(("RecMetricModule: metrics has '%s', wanted names of metrics such as NEMetric"):format(
          tostring(class)))
      end
      local key = ("%s-%s"):format(namespace_of(class), task.name)
      for _, entry in ipairs(self.entries) do
        if entry.key == key then P.fail(("RecMetricModule: two tasks have the name '%s'"):format(task.name)) end
      end
      table.insert(self.entries, { key = key, task = i, metric = make(class, options, a) })
    end
  end
  if a.throughput then
    local options = util.copy(a.throughput)
    if options.group == nil then options.group = a.group end
    self.throughput = ThroughputMetric(options)
  end
end

--- What print shows: its tasks, and the metrics that each has.
function Module:__tostring()
  local keys = util.map(self.entries, function(entry) return entry.key end)
  if self.throughput then keys[#keys + 1] = "throughput-throughput" end
  return ("RecMetricModule { %s }"):format(table.concat(keys, ", "))
end

--- Take in what a model says of a batch: a table of tensors or lists by the names that the tasks give. If a metric
--- refuses the samples it is an error, and no metric has taken them.
function Module:update(model_out)
  signature.value("RecMetricModule:update", "model_out", model_out, "table")
  local columns, n = {}, 0
  for i, task in ipairs(self.tasks) do
    local function column(field)
      local name = rawget(task, field)
      if not name then return nil end
      local x = model_out[name]
      if x == nil then
        P.fail(("RecMetricModule:update: task '%s' wants '%s' = '%s', which the output has not; it has: %s"):format(
          task.name, field, name, table.concat(util.keys(model_out), ", ")))
      end
      return x
    end
    columns[i] = { column "prediction_name", column "label_name", column "weight_name" or false,
      column "group_name" or false }
    local labels = columns[i][2]
    n = math.max(n, type(labels) == "table" and #labels or labels:numel())
  end
  local looked = {}
  for i, entry in ipairs(self.entries) do
    local c = columns[entry.task]
    looked[i] = { entry.metric:_look(c[1], c[2], c[3] or nil, c[4] or nil) }
  end
  for i, entry in ipairs(self.entries) do entry.metric:_take(unpack(looked[i])) end
  if self.throughput then self.throughput:update(n) end
end

--- All values by TorchRec's keys, "ne-ctr|window_ne": the metric, the task, the value. Collective over the group.
function Module:compute()
  local out = {}
  for _, entry in ipairs(self.entries) do
    for name, value in util.ordered(entry.metric:compute()) do out[entry.key .. "|" .. name] = value end
  end
  for name, value in util.ordered(self.throughput and self.throughput:compute() or {}) do
    out["throughput-throughput|" .. name] = value
  end
  return out
end

--- Call f(key, object) for each part, the throughput last.
local function each(self, f)
  for _, entry in ipairs(self.entries) do f(entry.key, entry.metric) end
  if self.throughput then f("throughput", self.throughput) end
end

function Module:reset() each(self, function(_, part) part:reset() end) end

function Module:state_dict()
  local dict = { class = "RecMetricModule" }
  each(self, function(key, part) dict[key] = part:state_dict() end)
  return dict
end

--- What keeps load_state_dict(dict) from loading, in words; nil: nothing does. Changes nothing; not collective.
function Module:check_state_dict(dict)
  if type(dict) ~= "table" or dict.class ~= "RecMetricModule" then return "it is no state of RecMetricModule" end
  local why
  each(self, function(key, part)
    local fault = part:check_state_dict(dict[key])
    why = why or fault and ("'%s': %s"):format(key, fault)
  end)
  return why
end

function Module:load_state_dict(dict)
  local why = self:check_state_dict(dict)
  if why then P.fail("RecMetricModule:load_state_dict: " .. why) end
  each(self, function(key, part) part:load_state_dict(dict[key]) end)
end

function Module:merge_state_dicts(list, rank, size)
  check_merge("RecMetricModule", list, rank, size)
  local merged, why = { class = "RecMetricModule" }, nil
  for i, dict in ipairs(list) do
    why = why or self:check_state_dict(dict)
    if why then return nil, ("%d: %s"):format(i, why) end
  end
  each(self, function(key, part)
    if why then return end
    local fault
    merged[key], fault = part:merge_state_dicts(util.map(list, function(dict) return dict[key] end), rank, size)
    why = not merged[key] and ("'%s': %s"):format(key, fault) or nil
  end)
  if why then return nil, why end
  return merged
end
Module.of_ranks, Module.reads_stored = true, true

--- Give the face of metrics its module: `metrics` are the metrics by name.
return function(metrics)
  classes = metrics
  metrics.RecMetricModule, metrics.ThroughputMetric = util.seal(Module), util.seal(ThroughputMetric)
end
