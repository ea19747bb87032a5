-- models.lua: whole recommendation models around an embedding bag collection (sharded or not): DLRM, its relatives,
-- DeepFM. Names, arguments and paths of parameters are TorchRec's. The collection is anything with
-- embedding_bag_configs() whose call returns a KeyedTensor (or an awaitable of one): this module needs nothing else of
-- it.
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local util = require "perilune.util"
local signature = require "perilune.signature"
local F = require "perilune.nn.functional"
local Module = require "perilune.nn.module"
local layers = require "perilune.nn.layers"
local interaction = require "perilune.nn.interaction"
local losses = require "perilune.nn.losses"

local M = {}

--- Number of features and embedding dimension of a collection whose tables all have one dimension.
local function features_of(func, collection)
  if type(collection) ~= "table" or type(collection.embedding_bag_configs) ~= "function" then
    P.fail(("%s: embedding_bag_collection is a %s, wanted an EmbeddingBagCollection"):format(func, type(collection)))
  end
  local features, dim = 0, nil
  for _, config in ipairs(collection:embedding_bag_configs()) do
    features = features + #config.feature_names
    if dim and dim ~= config.embedding_dim then
      P.fail(("%s: table '%s' has dimension %d, those before it %d; all must have one"):format(func, config.name,
        config.embedding_dim, dim))
    end
    dim = config.embedding_dim
  end
  if not dim then P.fail(("%s: the embedding bag collection has no table"):format(func)) end
  return features, dim
end

local function last(list) return list[#list] end

-- -- DLRM -------------------------------------------------------------------------------------------------------------

--- An MLP over the dense features.
local DenseArch = Module:extend "DenseArch"
M.DenseArch = DenseArch
function DenseArch:init(args)
  local a = util.named("DenseArch", args, { in_features = util.whole(util.required, 0),
    layer_sizes = util.required.list, dtype = "f32", device = util.optional })
  self.model = layers.MLP { in_size = a.in_features, layer_sizes = a.layer_sizes, dtype = a.dtype, device = a.device }
end
function DenseArch:forward(features) return self.model(features) end

--- Pooled embeddings of all features as [B, F, D]; of a sharded collection: lazy, on their way.
local SparseArch = Module:extend "SparseArch"
M.SparseArch = SparseArch
function SparseArch:init(embedding_bag_collection)
  self.num_features, self.embedding_dim = features_of("SparseArch", embedding_bag_collection)
  self.embedding_bag_collection = embedding_bag_collection
end
function SparseArch:forward(features)
  local pooled = self.embedding_bag_collection(features)
  return pooled:values():reshape(-1, self.num_features, self.embedding_dim)
end

--- An MLP and a last linear layer.
local OverArch = Module:extend "OverArch"
M.OverArch = OverArch
function OverArch:init(args)
  local a = util.named("OverArch", args, { in_features = util.whole(util.required, 0), layer_sizes = util.required.list,
    dtype = "f32", device = util.optional })
  local n = #a.layer_sizes
  if n < 2 then P.fail(("OverArch: %d layer_sizes, at least 2 are needed"):format(n)) end
  local hidden = {}
  for i = 1, n - 1 do hidden[i] = a.layer_sizes[i] end
  self.model = layers.Sequential {
    layers.MLP { in_size = a.in_features, layer_sizes = hidden, dtype = a.dtype, device = a.device },
    layers.Linear { in_features = hidden[n - 1], out_features = a.layer_sizes[n], dtype = a.dtype, device = a.device },
  }
end
function OverArch:forward(features)
  local model = self.model
  return model[2](model[1](features))
end

local dlrm_arguments = {
  embedding_bag_collection = util.required.table,
  dense_in_features = util.required.number,    -- columns of the dense features
  dense_arch_layer_sizes = util.required.list, -- the last is the embedding dimension
  over_arch_layer_sizes = util.required.list,  -- the last is the number of logits, 1
  dense_device = util.optional,
  dtype = "f32",
}

--- Arguments of the DLRM family, with those that one model adds.
local function with_arguments(added)
  local spec = {}
  for name, default in util.ordered(dlrm_arguments) do spec[name] = default end
  for name, default in util.ordered(added) do spec[name] = default end
  return spec
end

--- What all of them start with; returns F, D.
local function start(self, a)
  self.sparse_arch = SparseArch(a.embedding_bag_collection)
  local features, dim = self.sparse_arch.num_features, self.sparse_arch.embedding_dim
  if last(a.dense_arch_layer_sizes) ~= dim then
    P.fail(("%s: the last of dense_arch_layer_sizes is %s, the embedding dimension %d; they must agree"):format(
      self.class_name, tostring(last(a.dense_arch_layer_sizes)), dim))
  end
  self.dense_arch = DenseArch { in_features = a.dense_in_features, layer_sizes = a.dense_arch_layer_sizes,
    device = a.dense_device, dtype = a.dtype }
  return features, dim
end

--- Dense features [B, in], sparse features (KeyedJaggedTensor) -> logits [B, 1]. What a sharded collection exchanges is
--- on its way while the dense features are computed.
local function forward(self, dense_features, sparse_features)
  local sparse = self.sparse_arch(sparse_features)
  local dense = self.dense_arch(dense_features)
  return self.over_arch(self.inter_arch(dense, sparse))
end

local function over(a, in_features)
  return OverArch { in_features = in_features, layer_sizes = a.over_arch_layer_sizes, device = a.dense_device,
    dtype = a.dtype }
end

--- Naumov et al. 2019: pairwise dot products.
local DLRM = Module:extend "DLRM"
M.DLRM = DLRM
function DLRM:init(args)
  local a = util.named("DLRM", args, dlrm_arguments)
  local features, dim = start(self, a)
  self.inter_arch = interaction.InteractionArch { num_sparse_features = features }
  self.over_arch = over(a, dim + features * (features + 1) / 2)
end
DLRM.forward = forward

--- Wang et al. 2020 (DCN V2): a low-rank cross network.
local DLRM_DCN = Module:extend "DLRM_DCN"
M.DLRM_DCN = DLRM_DCN
function DLRM_DCN:init(args)
  local a = util.named("DLRM_DCN", args, with_arguments { dcn_num_layers = util.required.number,
    dcn_low_rank_dim = util.required.number })
  local features, dim = start(self, a)
  local width = (features + 1) * dim
  self.inter_arch = interaction.InteractionDCNArch { num_sparse_features = features,
    crossnet = interaction.LowRankCrossNet {
    in_features = width, num_layers = a.dcn_num_layers, low_rank = a.dcn_low_rank_dim, device = a.dense_device,
    dtype = a.dtype } }
  self.over_arch = over(a, width)
end
DLRM_DCN.forward = forward

--- Products of two projections of the features.
local DLRM_Projection = Module:extend "DLRM_Projection"
M.DLRM_Projection = DLRM_Projection
function DLRM_Projection:init(args)
  local a = util.named("DLRM_Projection", args,
    with_arguments { interaction_branch1_layer_sizes = util.required.list,
      interaction_branch2_layer_sizes = util.required.list })
  local features, dim = start(self, a)
  local branches, products = {}, 1
  for i, sizes in ipairs { a.interaction_branch1_layer_sizes, a.interaction_branch2_layer_sizes } do
    branches[i] = DenseArch { in_features = (features + 1) * dim, layer_sizes = sizes, device = a.dense_device,
      dtype = a.dtype }
    if #sizes == 0 or last(sizes) % dim ~= 0 then
      P.fail(("DLRM_Projection: the last of interaction_branch%d_layer_sizes is %s, no multiple of the embedding "
        .. "dimension %d"):format(
        i, tostring(last(sizes)), dim))
    end
    products = products * last(sizes) / dim
  end
  self.inter_arch = interaction.InteractionProjectionArch { num_sparse_features = features,
    interaction_branch1 = branches[1], interaction_branch2 = branches[2] }
  self.over_arch = over(a, dim + products)
end
DLRM_Projection.forward = forward

--- A model and its loss: called with a batch { dense_features =, sparse_features =, labels = }, returns the binary
--- cross entropy, and the logits [B] and labels [B] that it came from, outside the tape. loss: a module that is called
--- with logits and labels; default, as in TorchRec, the mean over this rank's samples, which is right where all ranks
--- have equally many.
local DLRMTrain = Module:extend "DLRMTrain"
M.DLRMTrain = DLRMTrain
function DLRMTrain:init(dlrm_module, loss)
  self.model = signature.value("DLRMTrain", "dlrm_module", dlrm_module, "module")
  self.loss = loss or losses.BCEWithLogitsLoss()
end
--- The model's logits of a batch, [B].
function DLRMTrain:logits(batch)
  if type(batch) ~= "table" then
    P.fail(("DLRMTrain: the batch is %s, wanted a table with labels"):format(errors.kind(batch)))
  end
  if batch.dense_features == nil or batch.sparse_features == nil then
    P.fail(("DLRMTrain: the batch has no %s; it has: %s"):format(batch.dense_features == nil and "dense_features"
      or "sparse_features", table.concat(util.keys(batch) or {}, ", ")))
  end
  return self.model(batch.dense_features, batch.sparse_features):reshape(-1)
end
function DLRMTrain:forward(batch)
  local logits = self:logits(batch)
  local labels = signature.value("DLRMTrain", "the batch's labels", batch.labels, "tensor"):to(logits:dtype() == "f64"
    and "f64" or "f32")
  return self.loss:forward(logits, labels), logits:detach(), labels
end

-- -- DeepFM -----------------------------------------------------------------------------------------------------------

--- [B, D + deep_fm_dimension + 1]: the dense features, the deep part, the factorization machine.
local FMInteractionArch = Module:extend "FMInteractionArch"
M.FMInteractionArch = FMInteractionArch
function FMInteractionArch:init(args)
  local a = util.named("FMInteractionArch", args,
    { fm_in_features = util.required.number, deep_fm_dimension = util.required.number, dtype = "f32",
      device = util.optional })
  self.deep_fm = interaction.DeepFM { dense_module = layers.Sequential {
    layers.Linear { in_features = a.fm_in_features, out_features = a.deep_fm_dimension, dtype = a.dtype,
      device = a.device }, layers.ReLU() } }
  self.fm = interaction.FactorizationMachine()
end
function FMInteractionArch:forward(dense_features, sparse_features)
  local embeddings = { dense_features, sparse_features }
  return F.cat({ dense_features, self.deep_fm(embeddings), self.fm(embeddings) }, 2)
end

--- Dense features [B, in], sparse features -> probabilities [B, 1].
local SimpleDeepFMNN = Module:extend "SimpleDeepFMNN"
M.SimpleDeepFMNN = SimpleDeepFMNN
function SimpleDeepFMNN:init(args)
  local a = util.named("SimpleDeepFMNN", args,
    { num_dense_features = util.required.number, embedding_bag_collection = util.required.table,
      hidden_layer_size = util.required.number, deep_fm_dimension = util.required.number, dtype = "f32",
      dense_device = util.optional })
  self.sparse_arch = SparseArch(a.embedding_bag_collection)
  local features, dim = self.sparse_arch.num_features, self.sparse_arch.embedding_dim
  local function linear(from, to) return layers.Linear { in_features = from, out_features = to, dtype = a.dtype,
    device = a.dense_device } end
  self.dense_arch = Module()
  self.dense_arch.model = layers.Sequential { linear(a.num_dense_features, a.hidden_layer_size), layers.ReLU(),
    linear(a.hidden_layer_size, dim), layers.ReLU() }
  self.inter_arch = FMInteractionArch { fm_in_features = (features + 1) * dim, deep_fm_dimension = a.deep_fm_dimension,
    dtype = a.dtype, device = a.dense_device }
  self.over_arch = Module()
  self.over_arch.model = layers.Sequential { linear(dim + a.deep_fm_dimension + 1, 1), layers.Sigmoid() }
end
function SimpleDeepFMNN:forward(dense_features, sparse_features)
  local sparse = self.sparse_arch(sparse_features) -- on its way while the dense features are computed
  local dense = self.dense_arch.model(dense_features)
  return self.over_arch.model(self.inter_arch(dense, sparse))
end

return M
