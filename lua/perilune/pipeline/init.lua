-- pipeline: training loops over batches: schedules as data, and what runs them.
local util = require "perilune.util"
local base = require "perilune.pipeline.base"
local forward = require "perilune.pipeline.forward"
local context = require "perilune.pipeline.context"

local M = util.copy(base)
M.Pipeline = require "perilune.pipeline.pipeline"
M.Schedule = require "perilune.pipeline.schedule"
M.Stage, M.check_stages = require("perilune.pipeline.stages").Stage, require("perilune.pipeline.stages").check_stages
M.ema = require "perilune.pipeline.ema"
M.DataLoadingThread = require "perilune.pipeline.loading"
M.register = require("perilune.pipeline.operations").register
M.ArgInfo, M.BaseForward, M.PipelinedForward = forward.ArgInfo, forward.BaseForward, forward.PipelinedForward
M.PrefetchPipelinedForward = forward.PrefetchPipelinedForward
M.TrainPipelineContext, M.PrefetchTrainPipelineContext = context.TrainPipelineContext,
  context.PrefetchTrainPipelineContext

return util.face("peri.pipeline", M, { schedules = "perilune.pipeline.schedules", show = "perilune.pipeline.show",
  cluster = "perilune.simulation.cluster" })
