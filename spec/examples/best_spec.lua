-- The demonstration's best weights: what was kept comes back bit for bit, whatever the plan, with tables in memory and in files.
local peri = require "perilune"
local worlds = require "spec.support.worlds"
local sharded = require "spec.support.sharded"
local shell = require "spec.support.shell"

package.path = "examples/?.lua;" .. package.path
local Best = require "dlrm.best"

--- All weights of this rank, as lists.
local function weights(model, device)
  local list = {}
  for _, p in ipairs(model.module:parameters()) do list[#list + 1] = p:to_list() end
  for _, s in ipairs(model.sharded[1]:local_shards()) do list[#list + 1] = sharded.whole(s, "weight", device) end
  return list
end

local function train(model, world, device, step)
  local ebc = model.sharded[1]
  local kt = ebc:forward(sharded.batch(step, world:rank(), device)):values()
  kt:backward(peri.Tensor.uniform({ sharded.BATCH, sharded.WIDTH }, -1, 1, step, world:rank(), "f32", device))
  for _, p in ipairs(model.module:parameters()) do p:detach():fill(step) end
  for _, p in ipairs(ebc:parameters()) do p:detach():fill(step) end
end

local function run(world, device, args)
  local folder, clean = shell.temporary()
  args.world, args.device = world, device
  local path = folder .. "/best.weights"
  local model = { module = peri.nn.Linear { in_features = 3, out_features = 2, device = device }, sharded = { sharded.make(args) } }
  local best = Best(model, path)
  train(model, world, device, 1)
  best:keep()
  local first = weights(model, device)
  train(model, world, device, 2)
  best:keep() -- again, over what is there
  local kept = weights(model, device)
  assert.is_not.same(first, kept)
  train(model, world, device, 3)
  assert.is_not.same(kept, weights(model, device))
  best:restore()
  assert.same(kept, weights(model, device))
  best:close()
  assert.is_nil(io.open(path))
  clean()
end

describe("the best weights come back:", function()
  local sizes = { sizes = { 1, 3 } }
  for _, kind in ipairs { "table_wise", "row_wise", "column_wise", "data_parallel", "mixed" } do
    worlds.each(kind, function(world, device) run(world, device, { kind = kind }) end, sizes)
  end
  for _, kind in ipairs { "table_wise", "row_wise", "column_wise", "mixed" } do
    worlds.each(kind .. ", in files", function(world, device)
      run(world, device, { kind = kind, cache = { load_factor = 0.5 }, data_type = { a = "FP32", b = "FP16", c = "BF16" } })
    end, sizes)
  end
  worlds.each("replicas of the dense optimizer", function(world, device)
    local entry = peri.plan.data_parallel { compute_kernel = "dense" }
    run(world, device, { kind = "mixed", plan = { a = entry, b = peri.plan.row_wise(), c = entry } })
  end, sizes)

  it("a disk that is full is an error", function()
    local world = peri.dist.init()
    local model = { module = peri.nn.Linear { in_features = 3, out_features = 2 },
      sharded = { sharded.make { kind = "row_wise", world = world, cache = { load_factor = 0.5 } } } }
    assert.error_matches(function() Best(model, "/dev/full"):keep() end, "cannot keep the best weights in /dev/full: No space left")
  end)
end)
