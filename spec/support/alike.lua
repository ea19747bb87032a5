-- alike.lua: models of tables that are alike, for specs of what a step of them takes.
local plan = require("perilune").plan

local M = { BATCH = 32, IDS = 4, DIM = 16, ROWS = 1000 } -- samples of a rank, ids of a bag, columns, rows

--- Tables t1 to t<n>, and their constraints.
function M.model_of(n)
  local tables, constraints = {}, {}
  for i = 1, n do
    tables[i] = { name = "t" .. i, num_embeddings = M.ROWS, embedding_dim = M.DIM }
    constraints["t" .. i] = plan.ParameterConstraints { pooling_factors = { M.IDS } }
  end
  return plan.describe.of { tables = tables, optimizer = "rowwise_adagrad" }, constraints
end

return M
