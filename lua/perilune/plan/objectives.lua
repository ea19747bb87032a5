-- plan/objectives.lua: what a user's functions say about plans: what a shard costs, and which of two plans is better.
local P = require "perilune.ffi"
local util = require "perilune.util"
local partitioners = require "perilune.plan.partitioners"
local perf = require "perilune.plan.perf"

local M = {}

local parts = { "fwd_compute", "fwd_comms", "bwd_compute", "bwd_comms", "prefetch_compute", "input_dist_comms" }
M.parts = parts -- fields of a run's perf that are milliseconds

--- An estimator that lets f(perf, option, shard, topology) change the milliseconds that others have found for a shard.
local Cost = util.seal(util.class "Cost")
M.Cost = Cost
function Cost:init(f, topology) self.f, self.topology = f, topology end

function Cost:estimate(options)
  for _, option in ipairs(options) do
    for _, run in ipairs(option.runs) do
      local known = util.index_of(util.keys(run.perf))
      local returned = self.f(run.perf, option, run, self.topology)
      if returned ~= nil then
        P.fail(("cost: it returned %s, wanted nothing: it changes fields of perf"):format(tostring(returned)))
      end
      for name in util.ordered(run.perf) do
        if not known[name] then
          P.fail(("cost: perf has no field '%s'; it has: %s"):format(tostring(name), table.concat(parts, ", ")))
        end
      end
      for _, part in ipairs(parts) do
        local ms = run.perf[part]
        if type(ms) ~= "number" or not (ms >= 0 and ms < math.huge) then
          P.fail(("cost: %s of table '%s' (%s, %s) is %s, allowed: finite numbers >= 0 (milliseconds)"):format(part,
            option.fqn, option.sharding_type, option.compute_kernel, tostring(ms)))
        end
      end
      run.perf.total = perf.total(run.perf)
    end
    option:sum_perf()
  end
end

--- A performance model whose rating is f(load), the less the better. load: ms, hbm, ddr, ssd (bytes) and each part of
--- the time (fwd_compute, fwd_comms, bwd_compute, bwd_comms, prefetch_compute): lists by rank; topology; proposal and
--- placement.
local Objective = util.seal(util.class "Objective")
M.Objective = Objective
function Objective:init(f, topology)
  if not util.is_callable(f) then
    P.fail(("EmbeddingShardingPlanner: objective is a %s, wanted a function(load)"):format(type(f)))
  end
  self.f, self.topology = f, topology
end

function Objective:rate(proposal, placement)
  local load = { topology = self.topology, proposal = proposal, placement = placement }
  local function sums(value) return partitioners.by_rank(proposal, placement, self.topology.world_size, value) end
  load.ms = sums(function(run) return run.perf.total end)
  for _, tier in ipairs { "hbm", "ddr", "ssd" } do load[tier] = sums(function(run) return run.storage[tier] end) end
  for i = 1, 5 do load[parts[i]] = sums(function(run) return run.perf[parts[i]] end) end
  local rating = self.f(load)
  if type(rating) ~= "number" or rating ~= rating then
    P.fail(("objective: it returned %s, wanted a number"):format(tostring(rating)))
  end
  return rating
end

return M
