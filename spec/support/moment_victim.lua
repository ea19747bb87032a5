-- moment_victim.lua: trains a small model of raw ids in files on two ranks and flushes after every step, until it is
-- killed: luajit spec/support/moment_victim.lua FOLDER KIND. FOLDER/ready holds the process from the third flush on.
local ffi = require "ffi"
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local moments = require "spec.support.collision_moments"
local plan = peri.plan

local M = {}

--- The model on a group; its files in `folder`, nil: in memory.
function M.model(group, kind, folder)
  local options = folder and { compute_kernel = "fused_uvm_caching",
    cache_params = { load_factor = 1, directory = folder } } or {}
  return peri.DistributedModelParallel { group = group,
    plan = plan.ShardingPlan { mc = { t = plan.row_wise(options) } },
    module = moments.Model(kind, false, { optimizer = "adagrad", learning_rate = 0.5 }) }
end

function M.step(model, s) model(moments.batch(9, s, model.group:rank(), model.group:size())):backward() end

if arg and arg[0] and arg[0]:find "moment_victim%.lua$" then
  ffi.cdef "int getpid(void);"
  sim.run(2, function(_, world)
    local model = M.model(world, arg[2], arg[1])
    for s = 1, 1e9 do
      M.step(model, s)
      model:flush()
      if s == 3 and world:rank() == 0 then
        local file = io.open(arg[1] .. "/ready", "w")
        file:write(ffi.C.getpid())
        file:close()
      end
    end
  end)
end

return M
