-- Exact sums of gradients (fused_params.exact) over ranks: what one batch does to weights and optimizer states does not depend, to the last
-- bit, on how many ranks share it nor on where the rows live: for table-wise and row-wise shards, and for column-wise ones under optimizers
-- without a number for each row. Each rank sums the gradients of its own rows from what all ranks sent: their order is an order of terms.
-- mpirun: none
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local plan = peri.plan

local SAMPLES, STEPS = 12, 3
local configs = {
  { name = "a", rows = 7, cols = 8, features = { "f", "g" }, pooling = "SUM" }, -- few rows: each is in many bags
  { name = "b", rows = 5, cols = 16, features = { "g" }, pooling = "MEAN" },
}
local columns = 8 + 8 + 16

local entries = {
  table_wise = function(i, n) return plan.table_wise(i % n) end,
  row_wise = function() return plan.row_wise() end,
  column_wise = function(i, n) return plan.column_wise { ranks = { i % n, (i + 1) % n } } end,
}

local function generator(seed)
  local x = seed
  return function(n)
    x = x * 16807 % 2147483647
    return x % n
  end
end

--- The samples of rank r of n at a step: those from r * 12 / n on.
local function share(step, r, n, device)
  local draw = generator(step * 977)
  local values, lengths, weights = {}, {}, {}
  local from, to = r * SAMPLES / n, (r + 1) * SAMPLES / n
  for _ = 1, 2 do
    for sample = 0, SAMPLES - 1 do
      local mine, length = sample >= from and sample < to, draw(5)
      if mine then lengths[#lengths + 1] = length end
      for _ = 1, length do
        local id, weight = draw(5), draw(1000) / 700
        if mine then
          values[#values + 1] = id
          weights[#weights + 1] = weight
        end
      end
    end
  end
  local grad = peri.Tensor.uniform({ SAMPLES, columns }, -1, 1, step, 0, "f32", device):slice(1, from, to):contiguous()
  return peri.KeyedJaggedTensor { keys = { "f", "g" }, values = values, lengths = lengths, weights = weights, stride = to - from,
    device = device }, grad
end

--- Train on n ranks; returns the whole tables: "a.weight" -> list, and so on. Powers of two: the division is exact.
local function train(kind, n, params, data_type, device)
  local function body(rank, world)
    local tables, plans = {}, {}
    for i, t in ipairs(configs) do
      tables[i] = peri.EmbeddingBagConfig { name = t.name, num_embeddings = t.rows, embedding_dim = t.cols, feature_names = t.features,
        pooling = t.pooling, data_type = data_type }
      plans[t.name] = entries[kind](i, n)
    end
    local ebc = peri.shard.ShardedEmbeddingBagCollection { tables = tables, plan = plans, group = world, device = device, seed = 5,
      fused_params = params, is_weighted = true, gradient_division = false }
    for step = 1, STEPS do
      local kjt, grad = share(step, rank, n, device)
      ebc:forward(kjt):values():backward(grad)
    end
    local pieces = {}
    for i, s in ipairs(ebc:local_shards()) do
      pieces[i] = { s = s, lists = {} }
      for _, name in ipairs(s.names()) do pieces[i].lists[name] = s.state(name):to_list() end
    end
    return pieces
  end
  local whole = {}
  for _, pieces in ipairs(sim.run(n, body, { device = device })) do
    for _, piece in ipairs(pieces) do
      for name, list in peri.util.ordered(piece.lists) do
        local s, cols = piece.s, #list / piece.s.rows
        local all, total = whole[s.table .. "." .. name] or {}, cols == s.cols and (s.table == "a" and 8 or 16) or 1
        whole[s.table .. "." .. name] = all
        for k, x in ipairs(list) do
          local row, col = math.floor((k - 1) / cols), (k - 1) % cols
          all[(s.row_offset + row) * total + (total > 1 and s.col_offset or 0) + col + 1] = x
        end
      end
    end
  end
  return whole
end

local cases = {
  { kinds = { "table_wise", "row_wise", "column_wise" }, optimizer = "adam", data_type = "FP32" },
  { kinds = { "table_wise", "row_wise" }, optimizer = "rowwise_adagrad", data_type = "FP32" },
  { kinds = { "table_wise", "row_wise", "column_wise" }, optimizer = "sgd", data_type = "BF16" },
  { kinds = { "table_wise", "row_wise" }, optimizer = "partial_rowwise_lamb", data_type = "FP16" },
}

describe("exact sums of gradients on", function()
  for _, device in ipairs { "cpu", "opaque" } do
    for _, case in ipairs(cases) do
      it(("%s: %s of %s has the same bits on 1, 2 and 4 ranks"):format(device, case.optimizer, case.data_type), function()
        local function all(exact)
          local list = {}
          for _, kind in ipairs(case.kinds) do
            for _, n in ipairs { 1, 2, 4 } do
              local params = { optimizer = case.optimizer, learning_rate = 0.1, exact = exact }
              list[#list + 1] = train(kind, n, params, case.data_type, device)
            end
          end
          return list
        end
        local list = all(true)
        for i = 2, #list do assert.same(list[1], list[i]) end
        if case.data_type == "FP32" then -- sums in f32 in the order of the batch depend on it
          list = all(false)
          local differs = false
          for i = 2, #list do
            for name, values in peri.util.ordered(list[1]) do
              for k, x in ipairs(values) do differs = differs or x ~= list[i][name][k] end
            end
          end
          assert.is_true(differs)
        end
      end)
    end
  end
end)
