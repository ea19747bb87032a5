-- Shampoo's matrix of a table that is cut by columns (docs/checkpoint_format.md): what parts knew comes through a whole
-- table unchanged, and what the whole knew of pairs of columns that are apart is left out.
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local shell = require "spec.support.shell"
local plan = peri.plan

local folder, clean = shell.temporary()
teardown(clean)

local function build(world, entry)
  local ebc = peri.EmbeddingBagCollection { seed = 3, fused_params = { optimizer = "shampoo", learning_rate = 0.1,
    eps = 0.5 }, tables = {
    peri.EmbeddingBagConfig { name = "t", num_embeddings = 20, embedding_dim = 8, feature_names = { "f" } } } }
  return peri.DistributedModelParallel { module = ebc, group = world, plan = { [""] = { t = entry } } }
end

local function step(model, world, i)
  peri.scope(function()
    local kjt = peri.KeyedJaggedTensor { keys = { "f" }, values = { i % 20, (3 * i + world:rank()) % 20, 7 },
      lengths = { 1, 2 } }
    local y = model(kjt):wait():values()
    ;(y * y):sum():backward()
  end)
end

local function weights(model) return model:state_dict()["embedding_bags.t.weight"]:gather():to_list() end

local function matrix(model)
  return model:fused_optimizer():state()["embedding_bags.t.weight.preconditioner"]:gather():to_list()
end

it("parts that were together for a moment train on with the same bits; what is cut has its block", function()
  sim.run(2, function(_, world)
    local cut = build(world, plan.column_wise { ranks = { 0, 1 } })
    for i = 1, 5 do step(cut, world, i) end
    cut:save(folder .. "/cut")
    local whole = build(world, plan.table_wise(1))
    whole:load(folder .. "/cut")
    whole:save(folder .. "/together")
    local again = build(world, plan.column_wise { ranks = { 1, 0 } })
    again:load(folder .. "/together")
    step(cut, world, 6)
    step(again, world, 6)
    assert.same(weights(cut), weights(again))
    assert.same(matrix(cut), matrix(again))
    step(whole, world, 6) -- learns of all pairs
    whole:save(folder .. "/whole")
    cut:load(folder .. "/whole")
    local all, mixed = matrix(whole), 0
    for k, x in ipairs(matrix(cut)) do
      local row, col = math.floor((k - 1) / 8), (k - 1) % 8
      local together = (row < 4) == (col < 4)
      assert.equal(together and all[k] or 0, x)
      mixed = mixed + (together and 0 or math.abs(all[k]))
    end
    assert.is_true(mixed > 0)
  end)
end)
