-- small_net.lua: a model of two tables and a linear layer, small enough to be saved after every step, and its batches.
local peri = require "perilune"
local nn, plan = peri.nn, peri.plan

local M = {}

local Net = nn.Module:extend "Net"
M.Net = Net

--- options: rows = 50 of table a; outputs = 1 of the layer; params: fused_params of the tables, or optimizer =
--- "rowwise_adagrad", exact.
function Net:init(options)
  self.ebc = peri.EmbeddingBagCollection { seed = 5, fused_params = options.params
    or { optimizer = options.optimizer or "rowwise_adagrad", learning_rate = 0.1, exact = options.exact ~= false },
    tables = {
    peri.EmbeddingBagConfig { name = "a", num_embeddings = options.rows or 50, embedding_dim = 8,
      feature_names = { "fa" } },
    peri.EmbeddingBagConfig { name = "b", num_embeddings = 37, embedding_dim = 16, feature_names = { "fb" } } } }
  self.over = nn.Linear { in_features = 24, out_features = options.outputs or 1 }
end
function Net:forward(kjt) return self.over(self.ebc(kjt):values()):mean() end

--- A new model, the same each time; in a world sharded, both tables as `entry` says. class: Net, or one that extends
--- it.
function M.build(world, entry, options, class)
  nn.manual_seed(3)
  local net = (class or Net)(options or {})
  return world and peri.DistributedModelParallel { module = net, group = world,
    plan = { ebc = { a = entry, b = entry } } } or net
end

--- Batch i: two samples. rows: those of table a.
function M.batch(i, rows)
  rows = rows or 50
  return peri.KeyedJaggedTensor { keys = { "fa", "fb" }, values = { i * 7 % rows, i * 3 % rows, i * 5 % 37, i % 37 },
    lengths = { 1, 1, 2, 0 } }
end

--- Ways to shard the tables, by name.
M.entries = {
  table_wise = function() return plan.table_wise(0) end, row_wise = function() return plan.row_wise() end,
  column_wise = function() return plan.column_wise { ranks = { 0, 1 } } end,
  data_parallel = function() return plan.data_parallel() end,
  cached = function()
    return plan.row_wise { compute_kernel = "fused_uvm_caching", cache_params = { load_factor = 0.5 } }
  end,
}

return M
