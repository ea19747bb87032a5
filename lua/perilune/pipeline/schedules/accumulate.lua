-- accumulate.lua: sparse_dist whose updates, of tables and dense part, are those of `num_steps` batches as of one large
-- one. A last group of fewer is applied at the end of the data.
local util = require "perilune.util"
local sparse_dist = require "perilune.pipeline.schedules.sparse_dist"

return function(num_steps)
  num_steps = util.integer("accumulate", "num_steps", num_steps or 4, 1)
  return sparse_dist:insert({ "update", every = num_steps }, { after = "backward" })
    :set { zero_grad = { every = num_steps, at = 0 }, backward = { scale = 1 / num_steps },
      optimizer = { every = num_steps } }
    :called "accumulate"
end
