-- The models of examples/models that are made of pooled rows have the bits of their model files (din, hstu:
-- export_lists_spec).
local peri = require "perilune"

local function kjt(keys, n, rows, most)
  local values, lengths = {}, {}
  for i = 1, #keys * n do
    lengths[i] = most == 1 and 1 or i % (most + 1)
    for k = 1, lengths[i] do values[#values + 1] = (i * 7 + k * 3) % rows end
  end
  return peri.KeyedJaggedTensor { keys = keys, values = peri.tensor(values, "i64"), lengths = lengths }
end

local TABLES = { { name = "users", rows = 40, features = { "user", "friend" } },
  { name = "items", rows = 50, features = { "item" } } }
local KEYS = { "user", "friend", "item" }
local function pooled(n)
  local labels = {}
  for i = 1, n do labels[i] = i % 2 end
  return { dense_features = peri.Tensor.uniform({ n, 13 }, -1, 1, n), sparse_features = kjt(KEYS, n, 40, 3),
    labels = peri.tensor(labels) }
end
local function model(name, args) return dofile(("examples/models/%s.lua"):format(name))(args) end

describe("a model of examples/models", function()
  local path
  before_each(function() path = os.tmpname() end)
  after_each(function() os.remove(path) end)

  for name, args in peri.util.ordered {
    deepfm = { tables = TABLES, dense_features = 13 }, mmoe = { tables = TABLES, dense_features = 13 },
    two_tower = { tables = TABLES, query_features = { "user", "friend" }, candidate_features = { "item" } },
  } do
    it("has the bits of its file: " .. name, function()
      assert.equal(0, model(name, args):export(path, { batches = { pooled(40), pooled(150) } }).differ)
    end)
  end

  it("ends in the best items, as a file: two_tower", function()
    local towers = model("two_tower", { tables = TABLES, query_features = { "user", "friend" },
      candidate_features = { "item" } })
    local items = kjt(KEYS, 30, 40, 1)
    towers.index = peri.nn.Parameter(peri.ffi.no_grad(function()
      return (select(2, towers:vectors(items))):detach()
    end))
    local report = towers:export(path, { batches = { pooled(40) }, call = function(m, batch)
      local scores, numbers = peri.sparse.top_products((m:vectors(batch.sparse_features)), m.index, 3)
      return { scores = scores, items = numbers }
    end })
    assert.equal(0, report.differ)
  end)
end)
