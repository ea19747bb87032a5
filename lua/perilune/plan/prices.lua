-- plan/prices.lua: the model by which estimators say what a shard takes: how much of each unit it has (ids, rows, bytes
-- on a link) times what a unit costs. Estimators differ in what they count and in their prices: perf.lua has
-- TorchRec's, step.lua those that were measured.
local M = {}

--- Parts of a shard's time.
M.parts = { "fwd_compute", "bwd_compute", "fwd_comms", "bwd_comms", "prefetch_compute", "input_dist_comms" }

--- The time that a plan's rating counts: all but the distribution of ids, which pipelines hide.
function M.total(p) return p.fwd_compute + p.bwd_compute + p.fwd_comms + p.bwd_comms + p.prefetch_compute end

--- Milliseconds of a shard by part, and `total`. amounts: by unit; prices: by part a list of units, each followed by
--- its price.
function M.times(amounts, prices)
  local p = {}
  for i = 1, #M.parts do
    local ms, list = 0, prices[M.parts[i]]
    for k = 1, #list, 2 do ms = ms + amounts[list[k]] * list[k + 1] end
    p[M.parts[i]] = ms
  end
  p.total = M.total(p)
  return p
end

return M
