-- pipeline: training loops over batches.
return {
  TrainPipelineBase = require "perilune.pipeline.base",
}
