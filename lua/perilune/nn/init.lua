-- nn/init.lua: the dense part of models: modules, losses, optimizers, metrics. Submodules load when they are first
-- used; everyday names are reachable directly (nn.Linear, nn.MLP, nn.BCEWithLogitsLoss).
local util = require "perilune.util"

local modules = {
  functional = "perilune.nn.functional",
  module = "perilune.nn.module",
  parameter = "perilune.nn.parameter",
  layers = "perilune.nn.layers",
  embedding = "perilune.nn.embedding",
  attention = "perilune.nn.attention",
  init = "perilune.nn.initial",
  interaction = "perilune.nn.interaction",
  _ranks = "perilune.nn.ranks",
  losses = "perilune.nn.losses",
  models = "perilune.nn.models",
  optim = "perilune.nn.optim",
  extra = "perilune.nn.extra",
  anomaly = "perilune.nn.anomaly",
  _graphed = "perilune.nn.graphed",
  metrics = "perilune.nn.metrics",
  utils = "perilune.nn.utils",
}

local names = {
  Parameter = "parameter", manual_seed = "parameter",
  Sequential = "layers", ModuleList = "layers", ModuleDict = "layers",
  ParameterList = "layers", ParameterDict = "layers", LazyLinear = "layers", Linear = "layers", Perceptron = "layers",
  MLP = "layers", LayerNorm = "layers", SwishLayerNorm = "layers", BatchNorm1d = "layers", Dropout = "layers",
  Identity = "layers", ReLU = "layers", Sigmoid = "layers", Tanh = "layers", SiLU = "layers", GELU = "layers",
  Softplus = "layers", LogSigmoid = "layers", LeakyReLU = "layers", Softmax = "layers", PReLU = "layers",
  ELU = "layers", LogSoftmax = "layers", Flatten = "layers", RMSNorm = "layers",
  MultiheadAttention = "attention", TransformerEncoderLayer = "attention", GRU = "attention", LSTM = "attention",
  Embedding = "embedding", EmbeddingBag = "embedding",
  InteractionArch = "interaction", InteractionDCNArch = "interaction", InteractionProjectionArch = "interaction",
  CrossNet = "interaction", LowRankCrossNet = "interaction", VectorCrossNet = "interaction",
  LowRankMixtureCrossNet = "interaction", FactorizationMachine = "interaction", DeepFM = "interaction",
  global_mean = "_ranks", BCEWithLogitsLoss = "losses", BCELoss = "losses", MSELoss = "losses",
  Loss = "losses", CrossEntropyLoss = "losses", BPRLoss = "losses", FocalLoss = "losses", MarginRankingLoss = "losses",
  HingeEmbeddingLoss = "losses", CosineEmbeddingLoss = "losses", KLDivLoss = "losses", InBatchSoftmaxLoss = "losses",
  L1Loss = "losses", HuberLoss = "losses", SmoothL1Loss = "losses", NLLLoss = "losses", TripletMarginLoss = "losses",
  PoissonNLLLoss = "losses", GaussianNLLLoss = "losses",
  graphed = "_graphed", Graphed = "_graphed", detect_anomaly = "anomaly", extra_state = "extra",
  load_extra_state = "extra",
  DenseArch = "models", SparseArch = "models", OverArch = "models", DLRM = "models", DLRM_DCN = "models",
  DLRM_Projection = "models", DLRMTrain = "models", SimpleDeepFMNN = "models",
}

require "perilune.nn.functional" -- tensors get their methods and operators
return util.face("peri.nn", { Module = require "perilune.nn.module" }, modules, names)
