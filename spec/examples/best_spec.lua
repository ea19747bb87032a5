-- The demonstration's best weights: what was kept comes back bit for bit, whatever the plan, with tables in memory and
-- in files.
local peri = require "perilune"
local worlds = require "spec.support.worlds"
local sharded = require "spec.support.sharded"
local shell = require "spec.support.shell"

package.path = "examples/?.lua;" .. package.path
local Best = require "dlrm.best"

local folder, clean = shell.temporary()
local folder_of_savers, clean_savers = shell.temporary()
teardown(function()
  clean()
  clean_savers()
end)

local Model = peri.nn.Module:extend "Model"
function Model:init(ebc, device)
  self.over, self.ebc = peri.nn.Linear { in_features = 3, out_features = 2, device = device }, ebc
end

--- All weights of this rank, as lists.
local function weights(model, device)
  local list = {}
  for _, p in ipairs(model:parameters()) do list[#list + 1] = p:to_list() end
  for _, s in ipairs(model.ebc:local_shards()) do list[#list + 1] = sharded.whole(s, "weight", device) end
  return list
end

local function train(model, world, device, step)
  local kt = model.ebc:forward(sharded.batch(step, world:rank(), device)):values()
  kt:backward(peri.Tensor.uniform({ sharded.BATCH, sharded.WIDTH }, -1, 1, step, world:rank(), "f32", device))
  for _, p in ipairs(model:parameters()) do p:detach():fill(step) end
end

local function kept() return (shell.run("ls " .. folder)) end

local function run(world, device, args)
  args.world, args.device = world, device
  local model = Model(sharded.make(args), device)
  local best = Best(model, folder)
  train(model, world, device, 1)
  best:keep(10)
  local first = weights(model, device)
  best:was_saved()
  train(model, world, device, 2)
  best:keep(20)
  best:keep(20) -- again, over what is there
  local second = weights(model, device)
  assert.is_not.same(first, second)
  train(model, world, device, 3)
  best:restore()
  assert.same(second, weights(model, device))
  world:barrier():wait()
  assert.equal("best-10\nbest-20\n", kept()) -- a run that is resumed knows the first
  local resumed = Best(model, folder)
  resumed:resume "best-10"
  resumed:restore()
  assert.same(first, weights(model, device))
  best:was_saved()
  world:barrier():wait()
  assert.equal("best-20\n", kept())
  world:barrier():wait()
  best:keep(30)
  best:close()
  world:barrier():wait()
  assert.equal("best-20\n", kept())
  world:barrier():wait()
  if world:rank() == 0 then peri.checkpoint.remove(folder .. "/best-20") end
  local alone = Best(model, folder) -- a run that saves nothing else
  alone:keep(5)
  alone:close()
  world:barrier():wait()
  assert.equal("", kept())
end

it("the best weights that a checkpoint of the folder knows stay, and are not replaced", function()
  require("perilune.dist.sim").run(1, function()
    local at, p = folder_of_savers, peri.nn.Linear { in_features = 3, out_features = 2 }
    local best, saver = Best(p, at), peri.checkpoint.Saver { folder = at, parts = { model = p }, every = 9, keep = 2 }
    local function save(step, name)
      assert.equal(name, best:keep(step))
      saver:save(step, { lowest = { kept = name } })
      best:was_saved()
    end
    save(5, "best-5")
    save(6, "best-6")
    assert.equal("best-5\nbest-6\nsave-000001-step-5\nsave-000002-step-6\n", (shell.run("ls " .. at)))
    save(6, "best-6-2") -- another future
    saver:close()
    assert.equal("best-6\nbest-6-2\nsave-000002-step-6\nsave-000003-step-6\n", (shell.run("ls " .. at)))
  end)
end)

describe("the best weights come back:", function()
  local sizes = { sizes = { 1, 3 } }
  for _, kind in ipairs { "table_wise", "row_wise", "column_wise", "data_parallel", "mixed" } do
    worlds.each(kind, function(world, device) run(world, device, { kind = kind }) end, sizes)
  end
  for _, kind in ipairs { "table_wise", "row_wise", "column_wise", "mixed" } do
    worlds.each(kind .. ", in files", function(world, device)
      run(world, device, { kind = kind, cache = { load_factor = 0.5 },
        data_type = { a = "FP32", b = "FP16", c = "BF16" } })
    end, sizes)
  end
  worlds.each("replicas of the dense optimizer", function(world, device)
    local entry = peri.plan.data_parallel { compute_kernel = "dense" }
    run(world, device, { kind = "mixed", plan = { a = entry, b = peri.plan.row_wise(), c = entry } })
  end, sizes)
end)
