-- quant.lua: a small quantized collection, batches for it, and plans for its tables: what specs of quantized modules
-- share.
local assert = require "luassert"
local peri = require "perilune"
local golden = require "spec.support.golden"
local support = require "spec.support.tbe"
local plan = peri.plan

local M = {}

local features, limit = { "x", "f3", "f1", "f2" }, { x = 9, f1 = 20, f2 = 17, f3 = 33 }
local configs = {
  { name = "a", rows = 20, cols = 8, features = { "f1", "f2" }, pooling = "SUM" },
  { name = "b", rows = 17, cols = 16, features = { "f2" }, pooling = "MEAN" },
  { name = "c", rows = 33, cols = 8, features = { "f3" }, pooling = "SUM" },
}

function M.tables(class, cols)
  return peri.util.map(configs, function(t)
    return peri[class] { name = t.name, num_embeddings = t.rows, embedding_dim = cols or t.cols,
      feature_names = t.features, pooling = class == "EmbeddingBagConfig" and t.pooling or nil,
      init_fn = peri.embed.uniform(-1, 1) }
  end)
end

function M.trained(device, more)
  local a = { tables = M.tables "EmbeddingBagConfig", device = device, seed = 3 }
  for k, v in pairs(more or {}) do a[k] = v end
  return peri.EmbeddingBagCollection(a)
end

--- The batch of a rank; bags of no ids, and ids of -1.
function M.batch(device, rank, weighted, size)
  local draw, ids, lengths, weights = support.generator(100 + rank), {}, {}, {}
  size = size or 3 + rank % 3
  for _, f in ipairs(features) do
    for _ = 1, size do
      local n = draw(5)
      lengths[#lengths + 1] = n
      for _ = 1, n do
        ids[#ids + 1] = draw(8) == 0 and -1 or draw(limit[f])
        weights[#weights + 1] = draw(9) / 4 - 1
      end
    end
  end
  return peri.KeyedJaggedTensor { keys = features, values = ids, lengths = lengths, weights = weighted and weights
    or nil, stride = size, device = device }
end

--- Plan entries of a type for table i on n ranks or places.
M.kinds = {
  table_wise = function(i, n) return plan.table_wise((i + 1) % n) end,
  row_wise = function() return plan.row_wise { compute_kernel = "quant" } end,
  column_wise = function(i, n) return plan.column_wise { ranks = { i % n, (i + 1) % n } } end,
  mixed = function(i, n)
    if i == 1 then
      return plan.row_wise { ranks = n > 1 and { n - 1, 0 } or { 0 }, sizes = n > 1 and { 3, 17 } or { 20 } }
    end
    if i == 3 then return plan.data_parallel() end
    return plan.column_wise { ranks = { n - 1, 0, 0 }, sizes = { 4, 8, 4 }, compute_kernel = "quant_uvm" }
  end,
  grid_shard = function() return plan.grid_shard() end,
}
function M.plan_of(kind, n)
  local entries = {}
  for i, t in ipairs(configs) do entries[t.name] = M.kinds[kind](i, n) end
  return entries
end

function M.near(want, got, tol, what)
  golden.assert_near(want:to_list(), got:to_list(), tol or { abs = 2e-6, rel = 2e-6 }, what)
end
function M.assert_same_rows(want, got, what)
  for name, jt in peri.util.ordered(want) do
    assert.same(jt:values():to_list(), got[name]:values():to_list(), what .. name)
    assert.same(jt:lengths():to_list(), got[name]:lengths():to_list(), what .. name)
    if jt:weights_or_none() then assert.same(jt:weights():to_list(), got[name]:weights():to_list(), what .. name) end
  end
end

--- Row by id, for n ids, of which a third is left out; the rows in no order.
function M.mapping(n, salt)
  local draw, list, left, at = support.generator(salt), {}, {}, 0
  for id = 1, n do
    list[id] = draw(3) == 0 and -1 or 0
    if list[id] == 0 then left[#left + 1] = id end
  end
  for i = #left, 1, -1 do
    local k = draw(i) + 1
    list[left[k]], at = at, at + 1
    table.remove(left, k)
  end
  return peri.tensor(list, "i32")
end

return M
