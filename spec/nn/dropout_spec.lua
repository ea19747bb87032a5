-- Dropout: what is trained with it does not depend on how the samples are shared among ranks.
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local nn = peri.nn

local Net = nn.Module:extend "Net"
function Net:init()
  local config = { name = "t", num_embeddings = 20, embedding_dim = 4, feature_names = { "c1" } }
  self.bags = peri.EmbeddingBagCollection { tables = { peri.EmbeddingBagConfig(config) },
    fused_params = { optimizer = "sgd", learning_rate = 0.5 } }
  self.drop, self.linear = nn.Sequential { nn.Dropout { p = 0.5 } }, nn.Linear { in_features = 4, out_features = 1 }
  self.loss = nn.BCEWithLogitsLoss { reduction = "global_mean" }
end
function Net:forward(b)
  local pooled = self.bags(b.sparse_features):values()
  local tall = self.drop(pooled:reshape(-1, 2)):reshape(-1, 4) -- two rows for each sample
  return self.loss(self.linear(self.drop(pooled) + tall):reshape(-1), b.labels)
end

local function batches()
  return peri.data.synthetic { num_rows = 65, batch_size = 16, dense_features = 2, sparse_features = 1, rows = 20 }
end

--- Losses of one pass, by each rank: equal on all.
local function losses(ranks, train)
  return sim.run(ranks, function()
    nn.manual_seed(3)
    return train(Net())
  end)
end

local function train_with(pipelined)
  return function(net)
    local model = peri.DistributedModelParallel { module = net }
    local optimizer = nn.optim.SGD { params = model:dense_parameters(), lr = 0.5 }
    local list = {}
    if pipelined then
      local p, source = peri.TrainPipelineSparseDist { model = model, optimizer = optimizer }, batches()
      local loss = p:progress(source)
      while loss do
        list[#list + 1] = loss:item()
        loss = p:progress(source)
      end
    else
      for b in batches() do
        peri.scope(function()
          local loss = model(b)
          optimizer:zero_grad()
          loss:backward()
          optimizer:step()
          list[#list + 1] = loss:item()
        end)
      end
    end
    return list
  end
end

describe("dropout", function()
  it("trains alike on 1, 2 and 3 ranks, by a loop and by a pipeline", function()
    local want
    for _, pipelined in ipairs { false, true } do
      for ranks = 1, 3 do
        for _, list in ipairs(losses(ranks, train_with(pipelined))) do
          want = want or list
          assert.equal(5, #list)
          for i, loss in ipairs(list) do assert.near(want[i], loss, 1e-5, ("%d ranks, step %d"):format(ranks, i)) end
        end
      end
    end
  end)

  it("has the masks of a bare module's samples by what the batch says of them", function()
    local Bare = nn.Module:extend "Bare"
    function Bare:init() self.drop, self.weight = nn.Dropout { p = 0.5 }, nn.Parameter(peri.ones { 3, 7 }) end
    function Bare:forward(b) return self.drop(b.x), self.drop(self.weight) end
    local function run(batch)
      nn.manual_seed(4)
      local x, weight = Bare()(batch)
      return x:to_list(), weight:to_list()
    end
    local whole, weight = run { x = peri.ones { 8, 5 }, rows = 8, global_row = 0 }
    local share, same = run { x = peri.ones { 2, 5 }, rows = 2, global_row = 6 }
    assert.same({ unpack(whole, 31) }, share)
    assert.same(weight, same) -- 3 rows are not of 2 samples: alike everywhere
    assert.same({}, (run { x = peri.ones { 0, 5 }, rows = 0, global_row = 8 }))
    assert.error_matches(function() run { x = peri.ones { 2, 5 }, rows = 2, global_row = 0.5 } end,
      "the batch's global_row")
    assert.same({ unpack(whole, 1, 10) }, (run { x = peri.ones { 2, 5 } })) -- what an error left is not there any more
  end)
end)
