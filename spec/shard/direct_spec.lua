-- Large batches, whose rows ranks copy from memory to memory: what arrives goes to where the results want it, and
-- gradients are read where they lie (runtime/shard/unbuffered.c). Outputs and updated weights are those of the
-- unsharded tables on the ids of all ranks. Weights and gradients are whole numbers, and so are all sums: they are
-- equal, whatever order they are added up in. (sim moves all rows through buffers: the other specs of this folder.)
-- mpirun: 3 machines: 2,2
local peri = require "perilune"
local ffi = require "ffi"
local worlds = require "spec.support.worlds"
local plan = peri.plan

local ROWS = 1000
local COLUMNS = { 64, 64, 24 } -- of bags; those of sequences are all alike
local FUSED = { optimizer = "sgd", learning_rate = 1 }

local kinds = {
  table_wise = function(t, n) return plan.table_wise(t % n) end,
  row_wise = function() return plan.row_wise() end,
  column_wise = function() return plan.column_wise() end,
  table_row_wise = function(t, n) return plan.table_row_wise(t % math.ceil(n / worlds.LOCAL_SIZE)) end,
  table_column_wise = function(t, n) return plan.table_column_wise(t % math.ceil(n / worlds.LOCAL_SIZE)) end,
  grid_shard = function() return plan.grid_shard() end,
}
--- One table by each of three types, with the odd one's columns on the last rank alone.
function kinds.mixed(t, n)
  if t == 1 then return plan.row_wise() end
  return t == 2 and plan.column_wise { ranks = { n - 1, 0 } } or plan.table_wise(n - 1)
end

--- Of a batch: samples of each rank, ids of a bag, how many ids in a hundred are -1 (skipped).
local batches = {
  { name = "rows of ids", samples = 500, ids = 9, skipped = 0 },
  { name = "with ids that are skipped", samples = 300, ids = 7, skipped = 20 },
  { name = "with ranks that have none", samples = 400, ids = 5, skipped = 0, only = 0 },
  { name = "variable, with bags of several samples and of none", samples = 450, ids = 6, skipped = 5, variable = true },
}

--- Bags of feature t: of a variable batch as many as samples, more, or less.
local function bags_of(batch, t) return batch.samples + (batch.variable and 150 * (t - 2) or 0) end

local function random(seed)
  local state = seed
  return function(n)
    state = (state * 48271) % 2147483647
    return state % n
  end
end

--- Values and lengths of a rank's batch, feature after feature.
local function ids_of(batch, rank)
  local values, lengths = {}, {}
  for t = 1, #COLUMNS do
    local x = random(17 * t + 1009 * (rank + 1))
    for _ = 1, (batch.only or rank) == rank and bags_of(batch, t) or 0 do
      local n = x(batch.ids + 1)
      lengths[#lengths + 1] = n
      for _ = 1, n do
        local id = x(ROWS)
        values[#values + 1] = x(100) < batch.skipped and -1 or id
      end
    end
  end
  return values, lengths
end

local function keys() return { "f1", "f2", "f3" } end

local function features_of(batch, rank, device, bags)
  local values, lengths = ids_of(batch, rank)
  if batch.variable then
    local strides, inverse, x = {}, {}, random(rank + 5)
    for t = 1, #COLUMNS do
      strides[t], inverse[t] = { bags_of(batch, t) }, {}
      for s = 1, batch.samples do inverse[t][s] = x(bags_of(batch, t)) end
    end
    return peri.KeyedJaggedTensor { keys = keys(), stride_per_key_per_rank = strides,
      values = peri.tensor(values, "i64", device, { #values }),
      lengths = peri.tensor(lengths, "i32", device, { #lengths }), inverse_indices = bags
        and { keys(), peri.tensor(inverse, "i64", device) } or nil }
  end
  return peri.KeyedJaggedTensor { keys = keys(), stride = #lengths / #COLUMNS,
    values = peri.tensor(values, "i64", device, { #values }),
    lengths = peri.tensor(lengths, "i32", device, { #lengths }) }
end

--- Whole numbers that differ from place to place, as a tensor.
local function new_numbers(rows, cols, seed, device)
  local data = ffi.new("float[?]", rows * cols + 1)
  for i = 0, rows * cols - 1 do data[i] = (i * 7 + seed * 11 + math.floor(i / cols) * 3) % 17 - 8 end
  return peri.Tensor.from_memory(data, { rows, cols }, "f32"):to(nil, device)
end

local known = {}
local function numbers(rows, cols, seed, device)
  local key = ("%d %d %d %s"):format(rows, cols, seed, device)
  known[key] = known[key] or peri.ffi.lasting(new_numbers, rows, cols, seed, device)
  return known[key]
end

local function tables_of(config, columns)
  local list = {}
  for t = 1, #COLUMNS do
    list[t] = config { name = "t" .. t, num_embeddings = ROWS, embedding_dim = columns and columns[t] or 32,
      feature_names = { "f" .. t } }
  end
  return list
end

--- Results of a module in their order: tensors.
local function results_of(module, features, bags)
  local result, list = module(features), {}
  if bags then return { result:values() } end
  for t = 1, #COLUMNS do list[t] = result["f" .. t]:values() end
  return list
end

--- Weights of both modules: numbers by table.
local function load(module, device, columns)
  local state = {}
  for t = 1, #COLUMNS do
    local name = ("%s.t%d.weight"):format(columns and "embedding_bags" or "embeddings", t)
    state[name] = numbers(ROWS, columns and columns[t] or 32, t, device)
  end
  module:load_state_dict(state)
end

--- Gradients by (rank, result, row): those of all ranks are those of each, one after the other, feature by feature.
local function gradients(results, rank, device)
  local list = {}
  for i, x in ipairs(results) do list[i] = numbers(x:shape()[1], x:shape()[2], 5 * rank + i, device) end
  return list
end

--- What of a case does not depend on the plan, made once for all of them: { batches = of this rank, for each step;
--- results = the plain module's on them, for each step; gradients = of this rank }.
local made = {}

local function expected(bags, batch, rank, device, n)
  local key = ("%s/%s"):format(bags and "bags" or "sequences", batch.name)
  if made[key] then return made[key] end
  local columns = bags and COLUMNS or nil
  local plain = peri[bags and "EmbeddingBagCollection" or "EmbeddingCollection"] {
    tables = tables_of(bags and peri.EmbeddingBagConfig or peri.EmbeddingConfig, columns), device = device,
    fused_params = FUSED }
  load(plain, device, columns)
  local own, alone = features_of(batch, rank, device, bags), {}
  for r = 0, n - 1 do alone[r] = results_of(plain, r == rank and own or features_of(batch, r, device, bags), bags) end
  for r = 0, n - 1 do peri.backward(alone[r], gradients(alone[r], r, device)) end
  made[key] = { batch = own, results = { alone[rank], results_of(plain, own, bags) },
    gradients = gradients(alone[rank], rank, device) }
  return made[key]
end

local function check(bags, kind, batch)
  return function(world, device, n)
    local columns, entries = bags and COLUMNS or nil, {}
    for t = 1, #COLUMNS do entries["t" .. t] = kinds[kind](t, n) end
    local sharded = peri.shard[bags and "ShardedEmbeddingBagCollection" or "ShardedEmbeddingCollection"] {
      tables = tables_of(bags and peri.EmbeddingBagConfig or peri.EmbeddingConfig, columns), plan = entries,
      group = world, device = device, gradient_division = false, fused_params = FUSED }
    load(sharded, device, columns)
    local want = peri.ffi.lasting(expected, bags, batch, world:rank(), device, n)
    for step = 1, 2 do
      local results = results_of(sharded, want.batch, bags)
      for i, x in ipairs(want.results[step]) do
        assert.same(x:shape(), results[i]:shape())
        local gap = x - results[i]
        if gap:numel() > 0 then assert.equal(0, (gap * gap):sum():item(), ("step %d, result %d"):format(step, i)) end
      end
      if step == 1 then peri.backward(results, want.gradients) end
    end
  end
end

for _, bags in ipairs { true, false } do
  describe(bags and "large bags" or "large sequences", function()
    for k, kind in ipairs(peri.util.keys(kinds)) do
      for b, batch in ipairs(batches) do
        -- bags and sequences in turn: all pairs of two of kind, batch and these, and the other half on 4 ranks
        if (k + b + (worlds.mpirun or 0) + (bags and 1 or 0)) % 2 == 0 then
          worlds.each(kind .. ": " .. batch.name, check(bags, kind, batch),
            { devices = { "cpu" }, local_size = worlds.LOCAL_SIZE, only = "mpi" })
        end
      end
    end
  end)
end
