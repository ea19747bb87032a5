-- init.lua: `require "perilune"`: one table whose lazy submodules are the library's faces; everyday names are reachable
-- directly.
local util = require "perilune.util"

--- The faces, in the order of the layers.
local modules = {
  util = "perilune.util",
  ffi = "perilune.ffi",
  Tensor = "perilune.tensor",
  stream = "perilune.tensor.stream",
  jagged = "perilune.jagged",
  dist = "perilune.dist",
  stop = "perilune.stop",
  nn = "perilune.nn",
  data = "perilune.data",
  sparse = "perilune.sparse",
  embed = "perilune.embed",
  plan = "perilune.plan",
  shard = "perilune.shard",
  checkpoint = "perilune.checkpoint",
  export = "perilune.export",
  model = "perilune.model",
  pipeline = "perilune.pipeline",
}

--- Everyday names and the face that has them.
local names = {
  Error = "ffi", scope = "ffi", keep = "ffi", no_grad = "ffi",
  tensor = "Tensor", empty = "Tensor", zeros = "Tensor", ones = "Tensor", full = "Tensor", arange = "Tensor",
  rand = "Tensor", randn = "Tensor", backward = "Tensor", linspace = "Tensor", eye = "Tensor", randint = "Tensor",
  triu_indices = "Tensor", tril_indices = "Tensor",
  randperm = "Tensor", zeros_like = "Tensor", ones_like = "Tensor", full_like = "Tensor", rand_like = "Tensor",
  randn_like = "Tensor", empty_like = "Tensor",
  autocast = "Tensor", set_float32_matmul_precision = "Tensor", get_float32_matmul_precision = "Tensor",
  JaggedTensor = "jagged", KeyedJaggedTensor = "jagged", KeyedTensor = "jagged",
  on_stop = "stop", stopping = "stop", stopped = "stop", request_stop = "stop",
  init = "dist", rank = "dist", world_size = "dist", world = "dist", finish = "dist",
  Awaitable = "dist", LazyAwaitable = "dist", NoWait = "dist", LazyNoWait = "dist",
  EmbeddingBagConfig = "embed", EmbeddingBagCollection = "embed", CacheParams = "embed",
  EmbeddingConfig = "embed", EmbeddingCollection = "embed",
  FeatureProcessedEmbeddingBagCollection = "embed", PiecewiseEmbeddingBagCollection = "embed",
  QuantEmbeddingBagCollection = "embed", QuantEmbeddingCollection = "embed", quantize_embeddings = "embed",
  ManagedCollisionCollection = "embed", ManagedCollisionEmbeddingBagCollection = "embed",
  ManagedCollisionEmbeddingCollection = "embed", MCHManagedCollisionModule = "embed", HashZchManagedCollisionModule =
  "embed", ParameterSharding = "plan", EmbeddingModuleShardingPlan = "plan", ShardingPlan = "plan",
  ShardingEnv = "plan", DistributedModelParallel = "model", DMPCollection = "model", TrainPipelineBase = "pipeline",
  TrainPipelineSparseDist = "pipeline", TrainPipelineSparseDistLite = "pipeline",
  TrainPipelineFusedSparseDist = "pipeline", TrainPipelineSemiSync = "pipeline", PrefetchTrainPipelineSparseDist =
  "pipeline", EvalPipelineSparseDist = "pipeline", EvalPipelineFusedSparseDist = "pipeline",
  GradientAccumulationPipeline = "pipeline", Schedule = "pipeline",
}

return util.face("peri", {}, modules, names) --[[@as peri]]
