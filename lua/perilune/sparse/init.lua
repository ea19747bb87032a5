-- sparse: sparse operators on tensors under the names of FBGEMM's, and row-wise quantization. Positions and offsets
-- count from 0.
local util = require "perilune.util"

local M = {}

for _, part in ipairs { "buckets", "permute", "dense", "arithmetic", "batches", "select", "pruned", "scalars",
  "retrieval", "sequence" } do
  for name, f in pairs(require("perilune.sparse." .. part)) do M[name] = f end
end
M.quantize = require "perilune.sparse.quantize"

return util.face("peri.sparse", M)
