-- A model without a plan: the plan that the library makes changes nothing of what is learned, whoever says how the
-- tables are trained.
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local nn, shard = peri.nn, peri.shard

local ROWS, COLS, STEPS = 40, 512, 3 -- wide, so that blocks of columns are worth it
local rowwise = { optimizer = "rowwise_adagrad", learning_rate = 0.5 }

local function collection(fused_params)
  return peri.EmbeddingBagCollection { fused_params = fused_params, seed = 3, tables = { peri.EmbeddingBagConfig {
    name = "t", num_embeddings = ROWS, embedding_dim = COLS, feature_names = { "f" } } } }
end

local function bags(first, last)
  local lists = {}
  for bag = first, last do lists[#lists + 1] = { bag * 7 % ROWS, bag * bag % ROWS } end
  return peri.KeyedJaggedTensor.from_lists { keys = { "f" }, lists }
end

--- What `call` learns with an optimizer (or nil, where the tables train themselves): each column pulls another way, so
--- that a part of a row has other gradients than the whole.
local function train(call, optimizer, first, last)
  local pull = peri.arange(COLS) / COLS
  for _ = 1, STEPS do
    local loss = (call(bags(first, last)):values() * pull):sum() / (last - first + 1)
    if optimizer then optimizer:zero_grad() end
    loss:backward()
    if optimizer then optimizer:step() end
  end
end

local function row_wise(params) return nn.optim.RowWiseAdagrad { params = params, lr = 0.5 } end

describe("a model without a plan learns what one process learns", function()
  local function learns(said, own, of_sharder, both)
    it("where " .. said, function()
      local fused = both or own or of_sharder
      local plain = collection(fused)
      train(plain, not fused and row_wise(plain:named_parameters()) or nil, 0, 7)
      local wanted = plain:state_dict()["embedding_bags.t.weight"]
      sim.run(2, function(rank, world)
        local model = peri.DistributedModelParallel { module = collection(own), group = world,
          sharders = of_sharder and { shard.EmbeddingBagCollectionSharder { fused_params = of_sharder } } or nil }
        train(model, not fused and row_wise(model:named_parameters()) or nil, 4 * rank, 4 * rank + 3)
        local got = shard.gather_state_dict(model:state_dict())["embedding_bags.t.weight"]
        assert.is_true(got:allclose(wanted, 1e-4, 1e-5), tostring(model.plan))
      end)
    end)
  end
  learns("the collection has fused_params", rowwise)
  learns("its sharder has them", nil, rowwise)
  learns("each has a part of them", { optimizer = "sgd", learning_rate = 0.5 }, { max_norm = 0.5 },
    { optimizer = "sgd", learning_rate = 0.5, max_norm = 0.5 })
  learns("nobody has, and the optimizer of the dense part trains the tables")
end)
