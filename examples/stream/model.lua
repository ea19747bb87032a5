-- model.lua: the two models of the stream: the same network over tables that are looked up by managed rows, or by ids
-- modulo rows.
local peri = require "perilune"
local nn, embed = peri.nn, peri.embed

local M = {}

--- Bytes of a row's weights and its optimizer's state, and of a row in a map of ids: what perilune/collision.h says it
--- keeps for one.
local function row_bytes(dim) return 4 * dim + 4 end
local MAP_BYTES = 64

local function tables(dim, rows)
  return { peri.EmbeddingBagConfig { name = "releases", num_embeddings = rows, embedding_dim = dim,
    feature_names = { "release" }, init_fn = embed.uniform(-0.01, 0.01) } }
end

local function collection(options, configs)
  return peri.EmbeddingBagCollection { tables = configs,
    fused_params = { optimizer = "rowwise_adagrad", learning_rate = options.learning_rate, eps = 1e-5 } }
end

local function managed(options, configs)
  local modules = {}
  for _, t in ipairs(configs) do
    modules[t.name] = peri.MCHManagedCollisionModule { zch_size = t.num_embeddings,
      eviction_interval = options.interval, eviction_policy = embed.DistanceLFU_EvictionPolicy { decay_exponent = 1 } }
  end
  return peri.ManagedCollisionEmbeddingBagCollection { embedding_bag_collection = collection(options, configs),
    managed_collision_collection = peri.ManagedCollisionCollection { managed_collision_modules = modules,
      embedding_configs = configs } }
end

local Net = nn.Module:extend "Net"
function Net:init(tables_of_ids, dim)
  self.tables = tables_of_ids
  self.over = nn.MLP { in_size = dim, layer_sizes = { 32 } }
  self.last = nn.Linear { in_features = 32, out_features = 1 }
end
function Net:forward(features)
  local pooled = self.tables(features)
  return self.last(self.over(pooled:values())):reshape(-1)
end

local function build(options, key, name, input, tables_of_ids)
  local model = Net(tables_of_ids, options.dim)
  if peri.world_size() > 1 then model = peri.DistributedModelParallel { module = model, plan = options.plan } end
  local params = model:named_parameters()
  return { key = key, name = name, input = input, model = model, auc = nn.metrics.AUCMetric {},
    optimizer = nn.optim.Adagrad { params = params, lr = options.dense_learning_rate, eps = 1e-5 } }
end

--- The list of both, and what they have: rows of the table without managed collision, bytes.
function M.pair(options)
  local bytes = options.rows * (row_bytes(options.dim) + MAP_BYTES)
  local rows = math.floor(bytes / row_bytes(options.dim))
  local list = {
    build(options, "managed", "managed collision", "raw", managed(options, tables(options.dim, options.rows))),
    build(options, "modulo", "modulo rows", "hashed", collection(options, tables(options.dim, rows))),
    rows = rows, bytes = bytes,
  }
  return list
end

return M
