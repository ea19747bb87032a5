-- Several lookups of one collection before one backward pass: the optimizer takes a step for each, in the reverse of
-- their order, as FBGEMM's does, and once somebody is told. Joined into one lookup they are one step.
local peri = require "perilune"
local shell = require "spec.support.shell"

local COLS = 4
local function collection(optimizer)
  return peri.EmbeddingBagCollection { tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = 6,
    embedding_dim = COLS, feature_names = { "f", "g" } } },
      fused_params = { optimizer = optimizer, learning_rate = 0.5 } }
end
local function batch(f, g)
  return peri.KeyedJaggedTensor { keys = { "f", "g" }, values = { f, g }, lengths = { 1, 1 } }
end

describe("lookups of one collection in one backward pass", function()
  for _, optimizer in ipairs { "adam", "rowwise_adagrad", "sgd" } do
    it("are a step of " .. optimizer .. " each, the last one first", function()
      local together, apart, reverse = collection(optimizer), collection(optimizer), collection(optimizer)
      local first, second = batch(1, 2), batch(2, 3)
      peri.backward({ (together(first):values():sum() + together(second):values():sum() * 3) })
      local a, b = apart(second):values():sum() * 3, reverse(first):values():sum()
      a:backward()
      apart(first):values():sum():backward()
      b:backward()
      reverse(second):values():sum():backward()
      assert.same(apart:weight("t"):to_list(), together:weight("t"):to_list())
      assert.equal(2, together:materialise():iteration())
    end)
  end

  it("are told once of each table batch, but for SGD, whose steps add up", function()
    local function printed(optimizer, step, wrap)
      return (shell.luajit(([[
        local peri = require "perilune"
        local ebc = peri.EmbeddingBagCollection { tables = { peri.EmbeddingBagConfig { name = "users", num_embeddings = 6,
          embedding_dim = 4, feature_names = { "f" } } }, fused_params = { optimizer = %q, learning_rate = 0.5 } }
        %s
        local function look(id) return ebc(peri.KeyedJaggedTensor { keys = { "f" }, values = { id }, lengths = { 1 } }):values():sum() end
        for i = 1, 3 do %s end]]):format(optimizer, wrap or "", step)))
    end
    local twice, once = "(look(1) + look(2)):backward()", "look(1):backward() look(2):backward()"
    local told = printed("adam", twice)
    assert.matches("warning: table 'users': one backward pass updates it for each of several lookups, so its "
      .. "optimizer %(adam%)", told)
    assert.equal(1, select(2, told:gsub("warning", "")))
    assert.equal("", printed("adam", once))
    assert.equal("", printed("sgd", twice))
    local wrap = "ebc = peri.DistributedModelParallel { module = ebc }"
    assert.matches("warning: table 'users': one backward pass", printed("adam", twice, wrap))
    assert.equal("", printed("adam", once, wrap))
  end)
end)
