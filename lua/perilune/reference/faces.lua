-- faces.lua: what follows from the other definition files: made of them by `make reference`.
---@meta

---@class peri
---@field Tensor peri.Tensor
---@field arange fun(start: number|integer, stop?: number|integer, step?: number|integer, dtype?: string, device?: string): peri.Tensor
---@field checkpoint peri.checkpoint
---@field data peri.data
---@field dist peri.dist
---@field embed peri.embed
---@field empty_like fun(t: peri.Tensor, dtype?: string): peri.Tensor
---@field export peri.export
---@field eye fun(rows: integer, columns?: integer, dtype?: string, device?: string): peri.Tensor
---@field full_like fun(t: peri.Tensor, value: number, dtype?: string): peri.Tensor
---@field jagged peri.jagged
---@field linspace fun(start: number, stop: number, steps: integer, dtype?: string, device?: string): peri.Tensor
---@field model peri.model
---@field nn peri.nn
---@field ones_like fun(t: peri.Tensor, dtype?: string): peri.Tensor
---@field pipeline peri.pipeline
---@field plan peri.plan
---@field rand fun(shape: integer[], dtype?: string, device?: string): peri.Tensor
---@field rand_like fun(t: peri.Tensor, dtype?: string): peri.Tensor
---@field randint fun(low: integer, high: integer, shape: integer[], dtype?: string, device?: string): peri.Tensor
---@field randn fun(shape: integer[], dtype?: string, device?: string): peri.Tensor
---@field randn_like fun(t: peri.Tensor, dtype?: string): peri.Tensor
---@field randperm fun(n: integer, device?: string): peri.Tensor
---@field shard peri.shard
---@field sparse peri.sparse
---@field stream peri.stream
---@field tril_indices fun(rows: integer, columns?: integer, k?: integer, device?: string): peri.Tensor
---@field triu_indices fun(rows: integer, columns?: integer, k?: integer, device?: string): peri.Tensor
---@field zeros_like fun(t: peri.Tensor, dtype?: string): peri.Tensor

---@class peri.Tensor
---@operator add(peri.Tensor|number): peri.Tensor
---@operator sub(peri.Tensor|number): peri.Tensor
---@operator mul(peri.Tensor|number): peri.Tensor
---@operator div(peri.Tensor|number): peri.Tensor
---@operator mod(peri.Tensor|number): peri.Tensor
---@operator pow(peri.Tensor|number): peri.Tensor
---@operator unm: peri.Tensor
---@field abs fun(self: peri.Tensor): peri.Tensor
---@field add fun(self: peri.Tensor, b: peri.Tensor|number): peri.Tensor
---@field addcmul fun(self: peri.Tensor, a: peri.Tensor, b: peri.Tensor, value?: number): peri.Tensor
---@field addmm fun(self: peri.Tensor, a: peri.Tensor, b: peri.Tensor, beta?: number, alpha?: number): peri.Tensor
---@field affine fun(self: peri.Tensor, scale: number, shift?: number): peri.Tensor
---@field all fun(self: peri.Tensor, dim?: integer|integer[], keepdim?: boolean): peri.Tensor
---@field allclose fun(self: peri.Tensor, b: peri.Tensor, rtol?: number, atol?: number, equal_nan?: boolean): boolean
---@field amax fun(self: peri.Tensor, dim?: integer|integer[], keepdim?: boolean): peri.Tensor
---@field amin fun(self: peri.Tensor, dim?: integer|integer[], keepdim?: boolean): peri.Tensor
---@field aminmax fun(self: peri.Tensor, dim?: integer|integer[], keepdim?: boolean): peri.Tensor, peri.Tensor
---@field any fun(self: peri.Tensor, dim?: integer|integer[], keepdim?: boolean): peri.Tensor
---@field argmax fun(self: peri.Tensor, dim?: integer, keepdim?: boolean): peri.Tensor
---@field argmin fun(self: peri.Tensor, dim?: integer, keepdim?: boolean): peri.Tensor
---@field argsort fun(self: peri.Tensor, dim?: integer, descending?: boolean): peri.Tensor
---@field baddbmm fun(self: peri.Tensor, a: peri.Tensor, b: peri.Tensor, beta?: number, alpha?: number): peri.Tensor
---@field bernoulli fun(self: peri.Tensor): peri.Tensor
---@field bincount fun(self: peri.Tensor, weights?: peri.Tensor, minlength?: integer): peri.Tensor
---@field bmm fun(self: peri.Tensor, b: peri.Tensor): peri.Tensor
---@field bucketize fun(self: peri.Tensor, boundaries: peri.Tensor, right?: boolean): peri.Tensor
---@field ceil fun(self: peri.Tensor): peri.Tensor
---@field chunk fun(self: peri.Tensor, n: integer, dim?: integer): peri.Tensor[]
---@field clamp fun(self: peri.Tensor, min?: number|integer, max?: number|integer): peri.Tensor
---@field clone fun(self: peri.Tensor): peri.Tensor
---@field cos fun(self: peri.Tensor): peri.Tensor
---@field count_nonzero fun(self: peri.Tensor, dim?: integer|integer[]): peri.Tensor
---@field cummax fun(self: peri.Tensor, dim: integer): peri.Tensor, peri.Tensor
---@field cummin fun(self: peri.Tensor, dim: integer): peri.Tensor, peri.Tensor
---@field cumprod fun(self: peri.Tensor, dim: integer): peri.Tensor
---@field cumsum fun(self: peri.Tensor, dim: integer): peri.Tensor
---@field diag fun(self: peri.Tensor, k?: integer): peri.Tensor
---@field diff fun(self: peri.Tensor, n?: integer, dim?: integer): peri.Tensor
---@field div fun(self: peri.Tensor, b: peri.Tensor|number): peri.Tensor
---@field elu fun(self: peri.Tensor, alpha?: number): peri.Tensor
---@field eq fun(self: peri.Tensor, x: peri.Tensor|number): peri.Tensor
---@field equal fun(self: peri.Tensor, b: peri.Tensor): boolean
---@field erf fun(self: peri.Tensor): peri.Tensor
---@field exp fun(self: peri.Tensor): peri.Tensor
---@field exp2 fun(self: peri.Tensor): peri.Tensor
---@field expm1 fun(self: peri.Tensor): peri.Tensor
---@field flatten fun(self: peri.Tensor, first?: integer, last?: integer): peri.Tensor
---@field flip fun(self: peri.Tensor, dim: integer|integer[]): peri.Tensor
---@field floor fun(self: peri.Tensor): peri.Tensor
---@field floor_divide fun(self: peri.Tensor, b: peri.Tensor|number): peri.Tensor
---@field fmod fun(self: peri.Tensor, b: peri.Tensor|number): peri.Tensor
---@field gather fun(self: peri.Tensor, dim: integer, index: peri.Tensor): peri.Tensor
---@field ge fun(self: peri.Tensor, x: peri.Tensor|number): peri.Tensor
---@field gelu fun(self: peri.Tensor): peri.Tensor
---@field glu fun(self: peri.Tensor, dim?: integer): peri.Tensor
---@field gt fun(self: peri.Tensor, x: peri.Tensor|number): peri.Tensor
---@field gumbel_softmax fun(self: peri.Tensor, tau?: number, hard?: boolean, dim?: integer): peri.Tensor
---@field histc fun(self: peri.Tensor, bins?: integer, min?: number, max?: number): peri.Tensor
---@field index_add fun(self: peri.Tensor, dim: integer, ids: peri.Tensor, src: peri.Tensor, alpha?: number): peri.Tensor
---@field index_copy fun(self: peri.Tensor, dim: integer, ids: peri.Tensor, src: peri.Tensor): peri.Tensor
---@field index_fill fun(self: peri.Tensor, dim: integer, ids: peri.Tensor, value: number): peri.Tensor
---@field index_select fun(self: peri.Tensor, dim: integer, ids: peri.Tensor): peri.Tensor
---@field isclose fun(self: peri.Tensor, b: peri.Tensor, rtol?: number, atol?: number, equal_nan?: boolean): peri.Tensor
---@field isfinite fun(self: peri.Tensor): peri.Tensor
---@field isin fun(self: peri.Tensor, tests: peri.Tensor): peri.Tensor
---@field isinf fun(self: peri.Tensor): peri.Tensor
---@field isnan fun(self: peri.Tensor): peri.Tensor
---@field kthvalue fun(self: peri.Tensor, k: integer, dim?: integer, keepdim?: boolean): peri.Tensor, peri.Tensor
---@field le fun(self: peri.Tensor, x: peri.Tensor|number): peri.Tensor
---@field leaky_relu fun(self: peri.Tensor, slope?: number): peri.Tensor
---@field lerp fun(self: peri.Tensor, b: peri.Tensor, weight: peri.Tensor|number): peri.Tensor
---@field log fun(self: peri.Tensor): peri.Tensor
---@field log10 fun(self: peri.Tensor): peri.Tensor
---@field log1p fun(self: peri.Tensor): peri.Tensor
---@field log2 fun(self: peri.Tensor): peri.Tensor
---@field log_softmax fun(self: peri.Tensor, dim: integer): peri.Tensor
---@field logaddexp fun(self: peri.Tensor, b: peri.Tensor): peri.Tensor
---@field logical_and fun(self: peri.Tensor, b: peri.Tensor): peri.Tensor
---@field logical_not fun(self: peri.Tensor): peri.Tensor
---@field logical_or fun(self: peri.Tensor, b: peri.Tensor): peri.Tensor
---@field logical_xor fun(self: peri.Tensor, b: peri.Tensor): peri.Tensor
---@field logit fun(self: peri.Tensor, eps?: number): peri.Tensor
---@field logsigmoid fun(self: peri.Tensor): peri.Tensor
---@field logsumexp fun(self: peri.Tensor, dim?: integer|integer[], keepdim?: boolean): peri.Tensor
---@field lt fun(self: peri.Tensor, x: peri.Tensor|number): peri.Tensor
---@field masked_fill fun(self: peri.Tensor, mask: peri.Tensor, value: number): peri.Tensor
---@field masked_select fun(self: peri.Tensor, mask: peri.Tensor): peri.Tensor
---@field matmul fun(self: peri.Tensor, b: peri.Tensor): peri.Tensor
---@field max fun(self: peri.Tensor, dim?: integer|peri.Tensor, keepdim?: boolean): peri.Tensor, peri.Tensor?
---@field maximum fun(self: peri.Tensor, b: peri.Tensor): peri.Tensor
---@field mean fun(self: peri.Tensor, dim?: integer|integer[], keepdim?: boolean): peri.Tensor
---@field median fun(self: peri.Tensor, dim?: integer, keepdim?: boolean): peri.Tensor, peri.Tensor|nil
---@field min fun(self: peri.Tensor, dim?: integer|peri.Tensor, keepdim?: boolean): peri.Tensor, peri.Tensor?
---@field minimum fun(self: peri.Tensor, b: peri.Tensor): peri.Tensor
---@field mish fun(self: peri.Tensor): peri.Tensor
---@field mode fun(self: peri.Tensor, dim?: integer, keepdim?: boolean): peri.Tensor, peri.Tensor
---@field movedim fun(self: peri.Tensor, from: integer|integer[], to: integer|integer[]): peri.Tensor
---@field mul fun(self: peri.Tensor, b: peri.Tensor|number): peri.Tensor
---@field multinomial fun(self: peri.Tensor, n: integer, replacement?: boolean): peri.Tensor
---@field nan_to_num fun(self: peri.Tensor, nan?: number, posinf?: number, neginf?: number): peri.Tensor
---@field nanmean fun(self: peri.Tensor, dim?: integer|integer[], keepdim?: boolean): peri.Tensor
---@field nansum fun(self: peri.Tensor, dim?: integer|integer[], keepdim?: boolean): peri.Tensor
---@field ne fun(self: peri.Tensor, x: peri.Tensor|number): peri.Tensor
---@field neg fun(self: peri.Tensor): peri.Tensor
---@field nonzero fun(self: peri.Tensor): peri.Tensor
---@field norm fun(self: peri.Tensor, p?: number, dim?: integer|integer[], keepdim?: boolean): peri.Tensor
---@field normalize fun(self: peri.Tensor, p?: number, dim?: integer|integer[], eps?: number): peri.Tensor
---@field one_hot fun(self: peri.Tensor, classes: integer): peri.Tensor
---@field outer fun(self: peri.Tensor, b: peri.Tensor): peri.Tensor
---@field pad fun(self: peri.Tensor, pads: integer[], value?: number|integer): peri.Tensor
---@field permute fun(self: peri.Tensor, order: integer[]): peri.Tensor
---@field pow fun(self: peri.Tensor, exponent: peri.Tensor|number): peri.Tensor
---@field prod fun(self: peri.Tensor, dim?: integer, keepdim?: boolean): peri.Tensor
---@field quantile fun(self: peri.Tensor, q: number|number[], dim?: integer, keepdim?: boolean): peri.Tensor
---@field reciprocal fun(self: peri.Tensor, numerator?: number): peri.Tensor
---@field relu fun(self: peri.Tensor): peri.Tensor
---@field remainder fun(self: peri.Tensor, b: peri.Tensor|number): peri.Tensor
---@field repeat_interleave fun(self: peri.Tensor, times: integer|peri.Tensor, dim?: integer): peri.Tensor
---@field roll fun(self: peri.Tensor, shifts: integer|integer[], dim?: integer|integer[]): peri.Tensor
---@field round fun(self: peri.Tensor): peri.Tensor
---@field rsqrt fun(self: peri.Tensor): peri.Tensor
---@field scatter fun(self: peri.Tensor, dim: integer, index: peri.Tensor, src: peri.Tensor|number): peri.Tensor
---@field scatter_add fun(self: peri.Tensor, dim: integer, index: peri.Tensor, src: peri.Tensor|number): peri.Tensor
---@field scatter_reduce fun(self: peri.Tensor, dim: integer, index: peri.Tensor, src: peri.Tensor, reduce: string, include_self?: boolean): peri.Tensor
---@field select fun(self: peri.Tensor, dim: integer, i: integer): peri.Tensor
---@field selu fun(self: peri.Tensor): peri.Tensor
---@field sigmoid fun(self: peri.Tensor): peri.Tensor
---@field sign fun(self: peri.Tensor): peri.Tensor
---@field silu fun(self: peri.Tensor): peri.Tensor
---@field sin fun(self: peri.Tensor): peri.Tensor
---@field softmax fun(self: peri.Tensor, dim: integer): peri.Tensor
---@field softplus fun(self: peri.Tensor): peri.Tensor
---@field sort fun(self: peri.Tensor, dim?: integer, descending?: boolean): peri.Tensor, peri.Tensor
---@field split fun(self: peri.Tensor, sizes: integer|integer[], dim?: integer): peri.Tensor[]
---@field sqrt fun(self: peri.Tensor): peri.Tensor
---@field square fun(self: peri.Tensor): peri.Tensor
---@field squeeze fun(self: peri.Tensor, dim?: integer): peri.Tensor
---@field std fun(self: peri.Tensor, dim?: integer|integer[], keepdim?: boolean, correction?: number): peri.Tensor
---@field std_mean fun(self: peri.Tensor, dim?: integer|integer[], keepdim?: boolean, correction?: number): peri.Tensor, peri.Tensor
---@field sub fun(self: peri.Tensor, b: peri.Tensor|number): peri.Tensor
---@field sum fun(self: peri.Tensor, dim?: integer|integer[], keepdim?: boolean): peri.Tensor
---@field take_along_dim fun(self: peri.Tensor, index: peri.Tensor, dim?: integer): peri.Tensor
---@field tanh fun(self: peri.Tensor): peri.Tensor
---@field tile fun(self: peri.Tensor, times: integer[]): peri.Tensor
---@field topk fun(self: peri.Tensor, k: integer, dim?: integer, largest?: boolean): peri.Tensor, peri.Tensor
---@field trace fun(self: peri.Tensor): peri.Tensor
---@field tril fun(self: peri.Tensor, k?: integer): peri.Tensor
---@field triu fun(self: peri.Tensor, k?: integer): peri.Tensor
---@field trunc fun(self: peri.Tensor): peri.Tensor
---@field unbind fun(self: peri.Tensor, dim?: integer): peri.Tensor[]
---@field unflatten fun(self: peri.Tensor, dim: integer, sizes: integer[]): peri.Tensor
---@field unique fun(self: peri.Tensor, return_inverse?: boolean, return_counts?: boolean): peri.Tensor, peri.Tensor|nil, peri.Tensor|nil
---@field unsqueeze fun(self: peri.Tensor, dim: integer): peri.Tensor
---@field var fun(self: peri.Tensor, dim?: integer|integer[], keepdim?: boolean, correction?: number): peri.Tensor
---@field var_mean fun(self: peri.Tensor, dim?: integer|integer[], keepdim?: boolean, correction?: number): peri.Tensor, peri.Tensor

---@class peri.dist
---@field codec peri.dist.codec
---@field collective_utils peri.dist.collective_utils
---@field comm peri.dist.comm
---@field exchange peri.dist.exchange
---@field functional peri.dist.functional
---@field jagged peri.dist.jagged
---@field ops peri.dist.ops
---@field sim peri.dist.sim

---@class peri.embed
---@field config peri.embed.config
---@field tbe peri.embed.tbe

---@class peri.nn
---@field anomaly peri.nn.anomaly
---@field embedding peri.nn.embedding
---@field extra peri.nn.extra
---@field functional peri.nn.functional
---@field init peri.nn.init
---@field metrics peri.nn.metrics
---@field models peri.nn.models
---@field optim peri.nn.optim
---@field parameter peri.nn.parameter
---@field utils peri.nn.utils

---@class peri.pipeline
---@field cluster peri.pipeline.cluster
---@field schedules peri.pipeline.schedules
---@field show peri.pipeline.show

---@class peri.plan
---@field dense peri.plan.dense
---@field describe peri.plan.describe
---@field html peri.plan.html
---@field perilune_sharder peri.plan.perilune_sharder
---@field reasons peri.plan.reasons
---@field report peri.plan.report
---@field statistics peri.plan.statistics
---@field torchrec_sharder peri.plan.torchrec_sharder

---@class peri.shard
---@field utils peri.shard.utils

---@class peri.sparse
---@field quantize peri.sparse.quantize

---@class peri.EmbeddingBagCollection
---@overload fun(features: peri.KeyedJaggedTensor): peri.KeyedTensor

---@class peri.EmbeddingCollection
---@overload fun(features: peri.KeyedJaggedTensor): table<string, peri.JaggedTensor>

---@class peri.FeatureProcessedEmbeddingBagCollection
---@overload fun(features: peri.KeyedJaggedTensor): peri.KeyedTensor

---@class peri.ManagedCollisionCollection
---@overload fun(features: peri.KeyedJaggedTensor): peri.KeyedJaggedTensor

---@class peri.ManagedCollisionEmbeddingBagCollection
---@overload fun(features: peri.KeyedJaggedTensor): any, peri.KeyedJaggedTensor|nil

---@class peri.ManagedCollisionEmbeddingCollection
---@overload fun(features: peri.KeyedJaggedTensor): any, peri.KeyedJaggedTensor|nil

---@class peri.PiecewiseEmbeddingBagCollection
---@overload fun(features: peri.KeyedJaggedTensor): peri.KeyedTensor

---@class peri.QuantEmbeddingBagCollection
---@overload fun(features: peri.KeyedJaggedTensor): peri.KeyedTensor

---@class peri.QuantEmbeddingCollection
---@overload fun(features: peri.KeyedJaggedTensor): table<string, peri.JaggedTensor>

---@class peri.dist.KJTAllToAll
---@overload fun(kjt: peri.KeyedJaggedTensor): peri.Awaitable

---@class peri.dist.KJTOneToAll
---@overload fun(kjt: peri.KeyedJaggedTensor): peri.KeyedJaggedTensor[]

---@class peri.dist.PooledEmbeddingsAllGather
---@overload fun(local_emb: peri.Tensor): peri.dist.exchange.PooledEmbeddingsAwaitable

---@class peri.dist.PooledEmbeddingsAllToAll
---@overload fun(local_embs: peri.Tensor, batch_size_per_rank?: integer[]): peri.dist.exchange.PooledEmbeddingsAwaitable

---@class peri.dist.PooledEmbeddingsReduceScatter
---@overload fun(local_embs: peri.Tensor, input_splits?: integer[]): peri.dist.exchange.PooledEmbeddingsAwaitable

---@class peri.dist.SparseFeaturesAllToAll
---@overload fun(features: peri.dist.SparseFeatures): peri.Awaitable

---@class peri.dist.VariableBatchPooledEmbeddingsAllToAll
---@overload fun(local_embs: peri.Tensor, batch_size_per_rank_per_feature: integer[][], batch_size_per_feature_pre_a2a: integer[]): peri.dist.exchange.PooledEmbeddingsAwaitable

---@class peri.dist.VariableBatchPooledEmbeddingsReduceScatter
---@overload fun(local_embs: peri.Tensor, batch_size_per_rank_per_feature: integer[][], embedding_dims: integer[]): peri.dist.exchange.PooledEmbeddingsAwaitable

---@class peri.embed.FeatureProcessorDictWrapper
---@overload fun(features: peri.KeyedJaggedTensor): peri.KeyedJaggedTensor

---@class peri.embed.GroupedPositionWeightedModule
---@overload fun(features: peri.KeyedJaggedTensor): peri.KeyedJaggedTensor

---@class peri.embed.PositionWeightedModule
---@overload fun(features: peri.JaggedTensor): peri.JaggedTensor

---@class peri.embed.PositionWeightedModuleCollection
---@overload fun(features: peri.KeyedJaggedTensor): peri.KeyedJaggedTensor

---@class peri.embed.PositionWeightedProcessor
---@overload fun(features: peri.KeyedJaggedTensor): peri.KeyedJaggedTensor

---@class peri.embed.QuantFeatureProcessedEmbeddingBagCollection
---@overload fun(features: peri.KeyedJaggedTensor): peri.KeyedTensor

---@class peri.nn.BCELoss
---@overload fun(input: peri.Tensor, target: peri.Tensor, third?: peri.Tensor): peri.Tensor

---@class peri.nn.BCEWithLogitsLoss
---@overload fun(input: peri.Tensor, target: peri.Tensor, third?: peri.Tensor): peri.Tensor

---@class peri.nn.BPRLoss
---@overload fun(input: peri.Tensor, target: peri.Tensor, third?: peri.Tensor): peri.Tensor

---@class peri.nn.BatchNorm1d
---@overload fun(x: peri.Tensor): peri.Tensor

---@class peri.nn.CosineEmbeddingLoss
---@overload fun(input: peri.Tensor, target: peri.Tensor, third?: peri.Tensor): peri.Tensor

---@class peri.nn.CrossEntropyLoss
---@overload fun(input: peri.Tensor, target: peri.Tensor, third?: peri.Tensor): peri.Tensor

---@class peri.nn.CrossNet
---@overload fun(x0: peri.Tensor): peri.Tensor

---@class peri.nn.DLRM
---@overload fun(dense_features: peri.Tensor, sparse_features: peri.KeyedJaggedTensor): peri.Tensor

---@class peri.nn.DenseArch
---@overload fun(features: peri.Tensor): peri.Tensor

---@class peri.nn.Dropout
---@overload fun(x: peri.Tensor): peri.Tensor

---@class peri.nn.ELU
---@overload fun(x: peri.Tensor): peri.Tensor

---@class peri.nn.Embedding
---@overload fun(ids: peri.Tensor): peri.Tensor

---@class peri.nn.EmbeddingBag
---@overload fun(ids: peri.Tensor, offsets?: peri.Tensor, per_sample_weights?: peri.Tensor): peri.Tensor

---@class peri.nn.Flatten
---@overload fun(x: peri.Tensor): peri.Tensor

---@class peri.nn.FocalLoss
---@overload fun(input: peri.Tensor, target: peri.Tensor, third?: peri.Tensor): peri.Tensor

---@class peri.nn.GELU
---@overload fun(x: peri.Tensor): peri.Tensor

---@class peri.nn.GRU
---@overload fun(x: peri.Tensor, h0?: peri.Tensor): peri.Tensor, peri.Tensor

---@class peri.nn.GaussianNLLLoss
---@overload fun(input: peri.Tensor, target: peri.Tensor, third?: peri.Tensor): peri.Tensor

---@class peri.nn.HingeEmbeddingLoss
---@overload fun(input: peri.Tensor, target: peri.Tensor, third?: peri.Tensor): peri.Tensor

---@class peri.nn.HuberLoss
---@overload fun(input: peri.Tensor, target: peri.Tensor, third?: peri.Tensor): peri.Tensor

---@class peri.nn.Identity
---@overload fun(x: peri.Tensor): peri.Tensor

---@class peri.nn.InBatchSoftmaxLoss
---@overload fun(input: peri.Tensor, target: peri.Tensor, third?: peri.Tensor): peri.Tensor

---@class peri.nn.InteractionArch
---@overload fun(dense_features: peri.Tensor, sparse_features: peri.Tensor): peri.Tensor

---@class peri.nn.InteractionDCNArch
---@overload fun(dense_features: peri.Tensor, sparse_features: peri.Tensor): peri.Tensor

---@class peri.nn.InteractionProjectionArch
---@overload fun(dense_features: peri.Tensor, sparse_features: peri.Tensor): peri.Tensor

---@class peri.nn.KLDivLoss
---@overload fun(input: peri.Tensor, target: peri.Tensor, third?: peri.Tensor): peri.Tensor

---@class peri.nn.L1Loss
---@overload fun(input: peri.Tensor, target: peri.Tensor, third?: peri.Tensor): peri.Tensor

---@class peri.nn.LSTM
---@overload fun(x: peri.Tensor, h0?: peri.Tensor, c0?: peri.Tensor): peri.Tensor, peri.Tensor, peri.Tensor

---@class peri.nn.LayerNorm
---@overload fun(x: peri.Tensor): peri.Tensor

---@class peri.nn.LazyLinear
---@overload fun(x: peri.Tensor): peri.Tensor

---@class peri.nn.LeakyReLU
---@overload fun(x: peri.Tensor): peri.Tensor

---@class peri.nn.Linear
---@overload fun(x: peri.Tensor): peri.Tensor

---@class peri.nn.LogSigmoid
---@overload fun(x: peri.Tensor): peri.Tensor

---@class peri.nn.LogSoftmax
---@overload fun(x: peri.Tensor): peri.Tensor

---@class peri.nn.LowRankCrossNet
---@overload fun(x0: peri.Tensor): peri.Tensor

---@class peri.nn.LowRankMixtureCrossNet
---@overload fun(x0: peri.Tensor): peri.Tensor

---@class peri.nn.MLP
---@overload fun(x: peri.Tensor): peri.Tensor

---@class peri.nn.MSELoss
---@overload fun(input: peri.Tensor, target: peri.Tensor, third?: peri.Tensor): peri.Tensor

---@class peri.nn.MarginRankingLoss
---@overload fun(input: peri.Tensor, target: peri.Tensor, third?: peri.Tensor): peri.Tensor

---@class peri.nn.MultiheadAttention
---@overload fun(query: peri.Tensor, key: peri.Tensor, value: peri.Tensor, options?: table): peri.Tensor, peri.Tensor

---@class peri.nn.NLLLoss
---@overload fun(input: peri.Tensor, target: peri.Tensor, third?: peri.Tensor): peri.Tensor

---@class peri.nn.OverArch
---@overload fun(features: peri.Tensor): peri.Tensor

---@class peri.nn.PReLU
---@overload fun(x: peri.Tensor): peri.Tensor

---@class peri.nn.Perceptron
---@overload fun(x: peri.Tensor): peri.Tensor

---@class peri.nn.PoissonNLLLoss
---@overload fun(input: peri.Tensor, target: peri.Tensor, third?: peri.Tensor): peri.Tensor

---@class peri.nn.RMSNorm
---@overload fun(x: peri.Tensor): peri.Tensor

---@class peri.nn.ReLU
---@overload fun(x: peri.Tensor): peri.Tensor

---@class peri.nn.SiLU
---@overload fun(x: peri.Tensor): peri.Tensor

---@class peri.nn.Sigmoid
---@overload fun(x: peri.Tensor): peri.Tensor

---@class peri.nn.SimpleDeepFMNN
---@overload fun(dense_features: peri.Tensor, sparse_features: peri.KeyedJaggedTensor): peri.Tensor

---@class peri.nn.SmoothL1Loss
---@overload fun(input: peri.Tensor, target: peri.Tensor, third?: peri.Tensor): peri.Tensor

---@class peri.nn.Softmax
---@overload fun(x: peri.Tensor): peri.Tensor

---@class peri.nn.Softplus
---@overload fun(x: peri.Tensor): peri.Tensor

---@class peri.nn.SparseArch
---@overload fun(features: peri.KeyedJaggedTensor): peri.Tensor

---@class peri.nn.SwishLayerNorm
---@overload fun(x: peri.Tensor): peri.Tensor

---@class peri.nn.Tanh
---@overload fun(x: peri.Tensor): peri.Tensor

---@class peri.nn.TransformerEncoderLayer
---@overload fun(src: peri.Tensor, options?: table): peri.Tensor

---@class peri.nn.TripletMarginLoss
---@overload fun(input: peri.Tensor, target: peri.Tensor, third?: peri.Tensor): peri.Tensor

---@class peri.nn.VectorCrossNet
---@overload fun(x0: peri.Tensor): peri.Tensor

---@class peri.nn.models.FMInteractionArch
---@overload fun(dense_features: peri.Tensor, sparse_features: peri.Tensor): peri.Tensor

---@class peri.shard.ShardedManagedCollisionCollection
---@overload fun(features: peri.KeyedJaggedTensor): peri.KeyedJaggedTensor

---@class peri.shard.utils.PermutePooledEmbeddings
---@overload fun(pooled: peri.Tensor): peri.Tensor
