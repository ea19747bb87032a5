-- base.lua: TorchRec's pipelines: classes that run a schedule of schedules/. All take model, optimizer, device,
-- schedule (a function(step) that is called before each step, sets learning rates, and returns nothing), inputs, vote
-- and empty_batch (pipeline.lua says what they are), and some their own.
--
--   local pipeline = peri.TrainPipelineSparseDist { model = model, optimizer = optimizer }
--   for loss in pipeline:run(batches) do ... end        -- numbers; every batch of the iterator is trained on
--   local loss, logits, labels = pipeline:progress(batches) -- one step: tensors for the caller; nil at the end
local P = require "perilune.ffi"
local util = require "perilune.util"
local kind = require("perilune.errors").kind
local Pipeline = require "perilune.pipeline.pipeline"

local M = {}

local arguments = {
  model = util.required, optimizer = util.optional, device = util.optional, schedule = util.optional,
  inputs = util.optional, vote = true, empty_batch = util.optional,
}

--- A class that runs the schedule of a file, or what that file's function makes of one argument of the class.
local function class(name, file, argument, default)
  local c = util.class(name, Pipeline)
  local spec = util.copy(arguments)
  if argument then spec[argument] = default end
  function c:init(args)
    local a = util.named(name, args, spec)
    if a.schedule ~= nil and not util.is_callable(a.schedule) then
      P.fail(("%s: schedule is %s, wanted a function(step); a Schedule is run by "
        .. "peri.pipeline.Pipeline"):format(name, kind(a.schedule)))
    end
    local schedule = require("perilune.pipeline.schedules." .. file)
    if argument then schedule = schedule(util.integer(name, argument, a[argument], 0)) end
    a.on_step, a.schedule = a.schedule, schedule
    if argument then a[argument] = nil end
    Pipeline.init(self, a)
  end
  M[name] = c
end

class("TrainPipelineBase", "base")
class("TrainPipelineSparseDist", "sparse_dist")
class("TrainPipelineSparseDistLite", "sparse_dist_lite")
class("TrainPipelineFusedSparseDist", "fused_sparse_dist")
class("TrainPipelineSemiSync", "semi_sync", "start_batch", 900)
class("PrefetchTrainPipelineSparseDist", "prefetch_sparse_dist")
class("EvalPipelineSparseDist", "eval_sparse_dist")
class("EvalPipelineFusedSparseDist", "eval_fused_sparse_dist")
class("GradientAccumulationPipeline", "accumulate", "num_steps", 1)

return M
