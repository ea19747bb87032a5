-- score.lua: the model of lua.c and threads.c. A host gets the table that a script returns, and calls its functions.
local peri = require "perilune"

local tables = ... -- a table batch of the host's (threads.c), or nil
local M = {}

local linear = peri.nn.Linear { in_features = 3, out_features = 1 }
linear.weight:detach():copy(peri.tensor { { 1, 2, 3 } })
linear.bias:detach():fill(0.5)

--- Scores of samples x [n, 3] into scores [n]: both are the host's memory.
function M.score(x, scores)
  peri.no_grad(function() scores:copy(linear(x):reshape { -1 }) end)
end

function M.describe() return "a linear model", linear.weight:numel() + linear.bias:numel() end

if tables then
  local rows = peri.EmbeddingBagCollection { table_batch = tables, tables = {
    peri.EmbeddingBagConfig { name = "items", num_embeddings = 1000, embedding_dim = 4, feature_names = { "item" } } } }

  --- The pooled rows of bags of ids, as lengths say, into out [bags, 4]: all three are the host's memory.
  function M.pool(ids, lengths, out)
    peri.no_grad(function()
      out:copy(rows(peri.KeyedJaggedTensor { keys = { "item" }, values = ids, lengths = lengths }):values())
    end)
  end
end

return M
