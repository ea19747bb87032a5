-- The loaders' hot functions compile: no aborted traces, no stitches (style J2).
local data = require "perilune.data"
local packages = require "perilune.data.packages"
local support = require "spec.support.jit"

local path = os.tmpname()
teardown(function() os.remove(path) end)
data.synthetic.write { path = path, num_rows = 20000, rows = 100, dense_features = 2, sparse_features = 3 }

local blocks = {}
for i = 0, 399 do
  blocks[#blocks + 1] = ("Package: p%d\nSection: s%d\nTag: t::%d\nDescription: word%d tool\nDepends: p%d, p%d, "
    .. "p%d\n"):format(i, i % 3, i % 5, i % 11, (i * 7 + 1) % 400, (i * i + 3) % 400, (i + 1) % 400)
end
local lists = packages.parse(table.concat(blocks, "\n"))

local common = { batch_size = 8, epochs = math.huge, drop_last = true }
local function with(args)
  for name, value in pairs(common) do args[name] = value end
  return args
end

local loaders = {
  { "criteo", function()
    return data.criteo(with { path = path, rows = 100, dense_features = 2, sparse_features = 3 })
  end }, { "synthetic", function() return data.synthetic(with { num_rows = 100000, rows = 100,
    ids_per_bag = { 0, 3 } }) end },
  { "debian", function() return data.debian(with { packages = lists, negatives = 3 }) end },
}

for _, case in ipairs(loaders) do
  it(case[1] .. " fills host batches in compiled code", function()
    local loader = case[2]()
    support.assert_compiles(case[1], function() loader:next_host() end)
  end)
end

it("a logistic regression trains in compiled code", function()
  local loader = loaders[2][2]()
  local model = data.LogisticRegression { rows = loader.rows, dense_features = 13 }
  support.assert_compiles("train", function() return model:train(loader:next_host()) end)
end)

for _, device in ipairs { "cpu", "opaque" } do
  it("batches become tensors in compiled code on " .. device, function()
    local loader = data.criteo(with { path = path, rows = 100, dense_features = 2, sparse_features = 3,
      device = device })
    -- How much is in a trace depends on what is inlined: one order in fifty has too many values, and is recorded anew.
    support.assert_compiles("next", function() loader():release() end, "too many spill slots")
  end)
end
