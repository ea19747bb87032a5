-- wrapper.lua: how the dense part of a DistributedModelParallel is kept equal on all ranks (TorchRec's
-- DataParallelWrapper): by averaging its gradients, unless a wrapper of one's own does something else.
--
--   local Local = peri.util.class("Local", peri.model.DataParallelWrapper)   -- each rank on its own
--   function Local:wrap(model, env, device) end
--   local model = peri.DistributedModelParallel { module = ..., data_parallel_wrapper = Local() }
local P = require "perilune.ffi"
local util = require "perilune.util"
local dist = require "perilune.dist"
local signature = require "perilune.signature"
local agree = require("perilune.dist.collective_utils").agree

local M = {}

--- A subclass has wrap(model, env, device): called by all ranks, in DistributedModelParallel:init_data_parallel, and
--- again if that is called when the model has got other parameters. It returns nil, or an object with watch(tensor):
--- called with each tensor that the model returns, so that a backward pass through it may be followed to its end. What
--- it averages: model:replicated_parameters().
local DataParallelWrapper = util.class "DataParallelWrapper"
M.DataParallelWrapper = DataParallelWrapper
function DataParallelWrapper:init() end
function DataParallelWrapper:wrap() P.fail(("%s: no method 'wrap'"):format(self.class_name)) end

--- Averages gradients over the ranks of env in buckets, while the backward pass runs, after rank 0's numbers went to
--- all.
local DefaultDataParallelWrapper = util.class("DefaultDataParallelWrapper", DataParallelWrapper)
M.DefaultDataParallelWrapper = DefaultDataParallelWrapper

--- bucket_cap_mb: MiB of gradients that are averaged together; broadcast: start from rank 0's numbers.
function DefaultDataParallelWrapper:init(args)
  local a = util.named("DefaultDataParallelWrapper", args, { bucket_cap_mb = 25, broadcast = true })
  if not (a.bucket_cap_mb > 0 and a.bucket_cap_mb < 2 ^ 30) then
    P.fail(("DefaultDataParallelWrapper: bucket_cap_mb is %g, allowed: numbers above 0"):format(a.bucket_cap_mb))
  end
  self.bucket_bytes, self.broadcast = math.max(1, math.floor(a.bucket_cap_mb * 2 ^ 20)), a.broadcast
end

--- Rank 0's numbers of these tensors to all. Collective.
local function broadcast(group, tensors)
  local pending = util.map(tensors, function(tensor) return group:broadcast(tensor, 0) end)
  for _, work in ipairs(pending) do work:wait() end
end

--- Parameter -> its name.
local function names_of(model)
  local names = {}
  for _, p in ipairs(model:named_parameters()) do names[p.tensor] = p.name end
  return names
end

--- What ranks must agree on before they average: by name, each parameter's dtype and shape.
local function facts_of(self, model, params)
  local names, facts = names_of(model), { { "bucket_cap_mb", self.bucket_bytes / 2 ^ 20 } }
  for i, p in ipairs(params) do
    facts[i + 1] = { ("parameter '%s'"):format(names[p] or i),
      ("%s [%s]"):format(p:dtype(), table.concat(p:shape(), ", ")) }
  end
  return facts
end

function DefaultDataParallelWrapper:wrap(model, env)
  local params, group = model:replicated_parameters(), env.pg
  agree(group, "DistributedModelParallel", facts_of(self, model, params))
  if self.broadcast and group:size() > 1 then
    broadcast(group, util.map(params, function(p) return p:detach() end))
    -- later they are alike, or those of a DMPCollection's sharding groups, which learn apart between two averages
    for _, sharded in ipairs(not model._wrapped and model.sharded or {}) do broadcast(group, sharded:replicas()) end
  end
  local ok, reducer = pcall(dist.Reducer, { group = group, params = params, bucket_bytes = self.bucket_bytes })
  if ok then return reducer end
  local n = tonumber(tostring(reducer.message):match "parameter (%d+) already belongs to a reducer")
  if not n then error(reducer, 0) end
  P.fail(("DistributedModelParallel: parameter '%s' is averaged already: its module is in another "
    .. "DistributedModelParallel"):format(
    names_of(model)[params[n + 1]]))
end

signature.object("parallel_model", "a DistributedModelParallel",
  { replicated_parameters = "callable", sharded = "list" })
signature.object("env_of_ranks", "a ShardingEnv with a process group", { pg = "Group" })
signature.check("DefaultDataParallelWrapper:", DefaultDataParallelWrapper,
  { wrap = "self: table, model: parallel_model, env: env_of_ranks, and more" })

return M
