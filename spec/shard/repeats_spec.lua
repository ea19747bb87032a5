-- Variable batches of replicas, beside a table that is cut by rows: samples that share a bag, have one of their own, or
-- none that others lack. All numbers are whole, and sums of them small, so results are exact whatever order they are
-- added up in: what comes out is compared with loops over the definition.
-- mpirun: 3
local peri = require "perilune"
local worlds = require "spec.support.worlds"
local plan = peri.plan

local ROWS = 12
--- Outputs in their order: table, feature, columns.
local outputs = { { "a", "f1", 4 }, { "a", "f2", 4 }, { "b", "f2", 3 }, { "c", "f1", 5 } }
local tables = { { "a", 4, { "f1", "f2" } }, { "b", 3, { "f2" } }, { "c", 5, { "f1" } } }
local WIDTH = 16

--- Bags and samples of a feature: how many, and which bag each sample has.
local kinds = {
  ["several samples of a bag, and bags of none"] = { bags = 5, samples = 7, of = function(s, x) return x(5) end },
  ["one bag for all"] = { bags = 4, samples = 6, of = function() return 2 end },
  ["bags in another order"] = { bags = 6, samples = 6, of = function(s) return 5 - s end },
  ["the last bags of none"] = { bags = 9, samples = 3, of = function(s) return s end },
  ["one sample"] = { bags = 1, samples = 1, of = function() return 0 end },
  ["bags without samples"] = { bags = 3, samples = 0, of = function() return 0 end },
}

--- The batch of a rank: bags and inverse by feature, and the gradient.
local function draw(kind, step, rank)
  local state = step * 131 + rank * 17 + 7
  local function x(n)
    state = (state * 1103515245 + 12345) % 2147483648
    return math.floor(state / 65536) % n
  end
  local batch = { bags = {}, inverse = {}, grad = {} }
  for f = 1, 2 do
    local bags, inverse = {}, {}
    for b = 1, kind.bags do
      bags[b] = {}
      for k = 1, x(4) do bags[b][k] = x(ROWS) end
    end
    for s = 1, kind.samples do inverse[s] = kind.of(s - 1, x) end
    batch.bags["f" .. f], batch.inverse["f" .. f] = bags, inverse
  end
  for i = 1, kind.samples * WIDTH do batch.grad[i] = x(9) - 4 end
  return batch
end

local function kjt_of(kind, batch, device)
  local values, lengths, inverse = {}, {}, {}
  for f = 1, 2 do
    for _, bag in ipairs(batch.bags["f" .. f]) do
      lengths[#lengths + 1] = #bag
      for _, id in ipairs(bag) do values[#values + 1] = id end
    end
    for _, b in ipairs(batch.inverse["f" .. f]) do inverse[#inverse + 1] = b end
  end
  return peri.KeyedJaggedTensor { keys = { "f1", "f2" }, values = peri.tensor(values, "i64", device, { #values }),
    lengths = peri.tensor(lengths, "i32", device, { #lengths }),
    stride_per_key_per_rank = { { kind.bags }, { kind.bags } },
    inverse_indices = { { "f1", "f2" }, peri.tensor(inverse, "i64", device, { 2, kind.samples }) } }
end

--- Walk the definition: f(sample, column, table, id, column of the table).
local function each(kind, batch, f)
  for s = 1, kind.samples do
    local column = 0
    for _, o in ipairs(outputs) do
      for _, id in ipairs(batch.bags[o[2]][batch.inverse[o[2]][s] + 1]) do
        for c = 1, o[3] do f(s, column + c, o[1], id, c) end
      end
      column = column + o[3]
    end
  end
end

local function make(world, device)
  local list = {}
  for i, t in ipairs(tables) do
    list[i] = peri.EmbeddingBagConfig { name = t[1], num_embeddings = ROWS, embedding_dim = t[2], feature_names = t[3],
      init_fn = peri.embed.constant(i) }
  end
  return peri.shard.ShardedEmbeddingBagCollection { tables = list, group = world, device = device,
    gradient_division = false, plan = { a = plan.data_parallel(), b = plan.data_parallel(), c = plan.row_wise() },
    fused_params = { optimizer = "sgd",
      learning_rate = 1 } }
end

local function start()
  local weights = {}
  for i, t in ipairs(tables) do
    weights[t[1]] = {}
    for id = 0, ROWS - 1 do
      weights[t[1]][id] = {}
      for c = 1, t[2] do weights[t[1]][id][c] = i end
    end
  end
  return weights
end

describe("a variable batch of replicas has", function()
  for _, name in ipairs(peri.util.keys(kinds)) do
    local kind = kinds[name]
    worlds.each(name, function(world, device, n)
      local ebc, weights = make(world, device), start()
      for step = 1, 3 do
        local batch, want = draw(kind, step, world:rank()), {}
        for i = 1, kind.samples * WIDTH do want[i] = 0 end
        each(kind, batch, function(s, column, t, id, c)
          local i = (s - 1) * WIDTH + column
          want[i] = want[i] + weights[t][id][c]
        end)
        local values, scaled = ebc(kjt_of(kind, batch, device)):values(), {}
        assert.same(want, values:to_list())
        -- replicas: a mean over ranks
        for i, g in ipairs(batch.grad) do scaled[i] = (i - 1) % WIDTH < 11 and g * n or g end
        values:backward(peri.tensor(scaled, "f32", device, { kind.samples, WIDTH }))
        for r = 0, n - 1 do
          local other = draw(kind, step, r)
          each(kind, other, function(s, column, t, id, c)
            weights[t][id][c] = weights[t][id][c] - other.grad[(s - 1) * WIDTH + column]
          end)
        end
      end
      for _, s in ipairs(ebc:local_shards()) do
        local want = {}
        for id = s.row_offset, s.row_offset + s.rows - 1 do
          for c = 1, s.cols do want[#want + 1] = weights[s.table][id][c] end
        end
        assert.same(want, s.state("weight"):to_list())
      end
    end, { sizes = { 1, 2, 3 } })
  end
end)
