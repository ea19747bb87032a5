-- schedules.lua: what `perilune schedule` prints: a schedule's slots, what follows from it, a simulated step, a
-- measured one.
local P = require "perilune.ffi"
local util = require "perilune.util"
local errors = require "perilune.errors"

local M = {}

--- "forward=3,backward=6" -> { forward = 3, backward = 6 }.
function M.times_of(text)
  local times = {}
  for part in (text .. ","):gmatch "([^,]*)," do
    local name, t = part:match "^%s*([^=]-)%s*=%s*([%d.e+-]+)%s*$"
    if not tonumber(t) then P.fail(("schedule: --times has '%s', wanted name=milliseconds"):format(part)) end
    if times[name] then P.fail(("schedule: --times has '%s' twice, as %g and %s"):format(name, times[name], t)) end
    times[name] = tonumber(t)
  end
  return times
end

--- Run a schedule on a small DLRM and synthetic data; returns the pipeline, which has measured the last `steps` steps.
local function measure(schedule, steps, ranks)
  local peri = require "perilune"
  local nn = peri.nn
  peri.init { transport = ranks == 1 and "self" or "auto" }
  local batches = peri.data.synthetic { num_rows = 2 ^ 30, batch_size = 2048 }
  local tables = {}
  for i, t in ipairs(batches:table_list()) do
    tables[i] = peri.EmbeddingBagConfig { name = t.name, num_embeddings = t.rows, embedding_dim = 16,
      feature_names = t.features }
  end
  local dlrm = nn.DLRM {
    embedding_bag_collection = peri.EmbeddingBagCollection { tables = tables,
      fused_params = { optimizer = "rowwise_adagrad" } },
    dense_in_features = #batches.dense, dense_arch_layer_sizes = { 64, 16 }, over_arch_layer_sizes = { 64, 1 },
  }
  local model = peri.DistributedModelParallel { module = nn.DLRMTrain(dlrm) }
  local trained = schedule:check().first.optimizer
  local pipeline = peri.pipeline.Pipeline { model = model, schedule = schedule,
    optimizer = trained and nn.optim.SGD { params = model:dense_parameters(), lr = 0.01 } or nil }
  for step = 1, 5 + steps do
    if step == 6 then pipeline:measure(true) end
    peri.scope(function() pipeline:progress(batches) end)
  end
  return pipeline
end

local actions = {}
function actions.print(schedule) print(tostring(schedule)) end
function actions.check(schedule) print(require("perilune.pipeline").show.check(schedule)) end
function actions.sim(schedule, options)
  print(require("perilune.pipeline").show.simulation(schedule, options.times and M.times_of(options.times) or {}))
end
function actions.trace(schedule, options)
  local show = require("perilune.pipeline").show
  local pipeline = measure(schedule, options.steps, options.ranks)
  local found = show.write(pipeline, options.output)
  if pipeline.group and pipeline.group:rank() > 0 then return end
  local times = show.times(pipeline)
  for name, ms in util.ordered(times) do print(("%-16s %8.3f ms"):format(name, ms)) end
  local c = show.compare(pipeline)
  if c then
    print(("\nmeasured  %8.3f ms a step, %.3f of them in operations\n"
      .. "predicted %8.3f ms of these times; %.3f if each stream went on by itself"):format(c.measured, c.operations,
      c.predicted, c.apart))
  end
  if pipeline.group then print("\n" .. show.waits_text(found)) end
  print(("\n%s: open it in https://ui.perfetto.dev\n\nsimulated with these times on %s:\n"):format(options.output,
    pipeline.streams and "its streams" or "the one stream that a processor has"))
  print(show.simulation(schedule, times, not pipeline.streams))
end

local action_of = { { "times", "sim" }, { "ranks", "trace", 1 }, { "steps", "trace", 20 },
  { "output", "trace", "trace.json" } }

--- Give options of the command line their defaults; returns why that cannot be done, before anything runs.
function M.settle(options)
  for _, x in ipairs(action_of) do
    local name, action, default = x[1], x[2], x[3]
    if options[name] and options.action ~= action then
      return ("schedule %s: --%s is for 'schedule %s'"):format(options.action, name, action)
    end
    if options[name] == nil then options[name] = default end
  end
  if options.action ~= "trace" then return nil end
  local ok, err = pcall(require("perilune.text").probe, options.output, "schedule trace")
  return not ok and errors.describe(err) or nil
end

--- `perilune schedule trace`, as a script of each rank.
function M.trace(options) actions.trace(require("perilune.pipeline").schedules.load(options.file), options) end

--- options: action, file, ranks, times, steps, output. Returns the exit code.
function M.run(options)
  local ok, err = pcall(function()
    actions[options.action](require("perilune.pipeline").schedules.load(options.file), options)
  end)
  if ok then return 0 end
  io.stderr:write("perilune: " .. errors.describe(err) .. "\n")
  return 1
end

return M
