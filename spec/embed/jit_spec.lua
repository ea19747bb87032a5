-- A step of managed collision compiles (style J2).
local peri = require "perilune"
local jit_support = require "spec.support.jit"

local embed = peri.embed

local function collection(policy)
  local tables = {
    peri.EmbeddingBagConfig { name = "t", num_embeddings = 50, embedding_dim = 4, feature_names = { "f", "g" } },
    peri.EmbeddingBagConfig { name = "u", num_embeddings = 30, embedding_dim = 4, feature_names = { "h" } },
  }
  local modules = {}
  for _, t in ipairs(tables) do
    modules[t.name] = embed.MCHManagedCollisionModule { zch_size = t.num_embeddings, eviction_policy = policy,
      eviction_interval = 2 }
  end
  return peri.ManagedCollisionEmbeddingBagCollection {
    embedding_bag_collection = peri.EmbeddingBagCollection { tables = tables,
      fused_params = { optimizer = "rowwise_adagrad", learning_rate = 0.1 } },
    managed_collision_collection = peri.ManagedCollisionCollection { managed_collision_modules = modules,
      embedding_configs = tables },
  }
end

local function batches()
  local list = {}
  for b = 1, 8 do
    local values, lengths = {}, {}
    for i = 1, 24 do values[i], lengths[i] = (i * 37 + b * 101) % 400, 1 end
    list[b] = peri.KeyedJaggedTensor { keys = { "g", "h", "f" }, values = peri.tensor(values, "i64"),
      lengths = peri.tensor(lengths, "i32") }
  end
  return list
end

local function step(mc, list)
  return function(i)
    local values = mc:forward(list[i % 8 + 1]):values()
    values:sum():backward()
  end
end

describe("managed collision", function()
  it("compiles", function()
    local mc, list = collection(embed.LFU_EvictionPolicy {}), batches()
    local work = step(mc, list)
    for i = 1, 4 do peri.scope(work, i) end -- tables, maps and block lists are made
    jit_support.assert_compiles("a step", function(i) peri.scope(work, i) end)
    mc:eval()
    jit_support.assert_compiles("a lookup", function(i) peri.scope(work, i) end)
  end)
end)
