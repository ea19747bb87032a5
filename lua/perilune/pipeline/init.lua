-- pipeline: training loops over batches.
local util = require "perilune.util"

return util.face("peri.pipeline", {
  TrainPipelineBase = require "perilune.pipeline.base",
})
