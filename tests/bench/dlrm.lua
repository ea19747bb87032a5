-- dlrm.lua: the model and the batches that benches of a whole training step share: 13 dense features, bottom MLP
-- 512-256-DIM, tables under row-wise Adagrad, pairwise dot products, top MLP 512-512-256-1, the dense part under
-- Adagrad.
local ffi = require "ffi"
local peri = require "perilune"
local nn, plan = peri.nn, peri.plan

local M = {}

--- What both need of a script's options: add them to its parser.
function M.options(parser)
  parser:option("--out", "Append results as JSON lines to this file.")
  parser:option("--batch", "Samples of a rank.", 2048, tonumber)
  parser:option("--tables", "Embedding tables.", 26, tonumber)
  parser:option("--rows", "Rows of a table.", 100000, tonumber)
  parser:option("--dim", "Columns of a table.", 64, tonumber)
  parser:option("--data-type", "Of the tables: FP32, FP16, BF16.", "FP32")
  parser:option("--qcomm", "Precision of rows and gradients between ranks: FP32, FP16, BF16, FP8, INT8, MX4.", "FP32")
  return parser
end

--- The model over `group`, all tables of one sharding type. cache: tables in files, this share of their rows in memory;
--- 0: in memory.
function M.model(options, group, sharding, cache)
  local tables, entries = {}, {}
  for t = 1, options.tables do
    local name = "t" .. t
    tables[t] = peri.EmbeddingBagConfig {
      name = name, num_embeddings = options.rows, embedding_dim = options.dim, feature_names = { "f" .. t },
      data_type = options.data_type,
    }
    entries[name] = plan.ParameterSharding {
      sharding_type = sharding, ranks = sharding == "table_wise" and { (t - 1) % group:size() } or nil,
      compute_kernel = cache > 0 and "fused_uvm_caching" or nil, cache_params = cache > 0 and { load_factor = cache }
        or nil,
    }
  end
  local model = peri.DistributedModelParallel {
    group = group, plan = { ["model.sparse_arch.embedding_bag_collection"] = entries },
    qcomm_codecs_registry = peri.dist.codec.get_qcomm_codecs_registry { forward = options.qcomm,
      backward = options.qcomm },
    module = nn.DLRMTrain(nn.DLRM {
      embedding_bag_collection = peri.EmbeddingBagCollection {
        tables = tables, device = "meta", fused_params = { optimizer = "rowwise_adagrad", learning_rate = 0.01 },
      },
      dense_in_features = 13, dense_arch_layer_sizes = { 512, 256, options.dim },
      over_arch_layer_sizes = { 512, 512, 256, 1 },
    }),
  }
  return model, nn.optim.Adagrad { params = model:dense_parameters(), lr = 0.01 }
end

--- A multiplicative generator of uniform ids: fast enough for tens of millions.
local function random_ids(values, n, rows, seed)
  local x = seed * 2654435761 % 2147483647 + 1
  for i = 0, n - 1 do
    x = x * 48271 % 2147483647
    values[i] = x % rows
  end
end

--- `count` batches of a rank, `ids` ids in each bag.
function M.batches(options, rank, ids, count)
  local batches, keys = {}, {}
  local bags = options.tables * options.batch
  for t = 1, options.tables do keys[t] = "f" .. t end
  local values, lengths, labels = ffi.new("int64_t[?]", bags * ids), ffi.new("int32_t[?]", bags),
    ffi.new("float[?]", options.batch)
  for i = 0, bags - 1 do lengths[i] = ids end
  for k = 1, count do
    random_ids(values, bags * ids, options.rows, 100 * rank + k)
    for i = 0, options.batch - 1 do labels[i] = (i * k + rank) % 2 end
    batches[k] = {
      dense_features = peri.Tensor.normal({ options.batch, 13 }, 0, 1, 100 * rank + k),
      labels = peri.Tensor.from_memory(labels, { options.batch }, "f32"),
      sparse_features = peri.KeyedJaggedTensor.from_lengths_sync {
        keys = keys, values = peri.Tensor.from_memory(values, { bags * ids }, "i64"),
        lengths = peri.Tensor.from_memory(lengths, { bags }, "i32"), stride = options.batch,
      },
    }
  end
  return batches
end

--- Release tensors, some of which may be nil.
function M.release(...)
  for i = 1, select("#", ...) do
    local tensor = select(i, ...)
    if tensor then tensor:release() end
  end
end

return M
