-- Synthetic samples: the same rows however they are cut, power-law ids, a signal that only a model with interactions
-- finds, files.
local ffi = require "ffi"
local peri = require "perilune"
local data = require "perilune.data"
local metrics = require "perilune.nn.metrics"
local sim = require "perilune.dist.sim"
local P = require "perilune.ffi"

local function shape(args)
  local all = { num_rows = 100, batch_size = 7, dense_features = 3, sparse_features = 4, rows = 50, seed = 5 }
  for name, value in pairs(args or {}) do all[name] = value end
  return all
end

-- Rows of a loader as strings, by row number.
local function rows_of(loader)
  local list = {}
  local host = loader:next_host()
  while host do
    local b, at = host.ptr, 0
    local rows = tonumber(b.rows)
    for i = 0, rows - 1 do
      local line = { b.labels[i] }
      for d = 0, b.dense_features - 1 do line[#line + 1] = b.dense[i * b.dense_features + d] end
      list[tonumber(b.global_row) + i + 1] = table.concat(line, " ")
    end
    for f = 0, b.sparse_features - 1 do
      for i = 0, rows - 1 do
        local row = tonumber(b.global_row) + i + 1
        for _ = 1, b.lengths[f * rows + i] do
          list[row] = list[row] .. (" %d:%d"):format(f, tonumber(b.values[at]))
          at = at + 1
        end
      end
    end
    host = loader:next_host()
  end
  return list
end

describe("data.synthetic", function()
  it("makes the same rows for every batch size, rank and start", function()
    for _, bags in ipairs { 1, { 0, 3 } } do
      local want = rows_of(data.synthetic(shape { ids_per_bag = bags }))
      assert.equal(100, #want)
      for _, world in ipairs { 2, 3, 8 } do
        local got = {}
        for rank = 0, world - 1 do
          for row, line in pairs(rows_of(data.synthetic(shape { ids_per_bag = bags, batch_size = 13, rank = rank,
            world_size = world }))) do
            assert.is_nil(got[row])
            got[row] = line
          end
        end
        assert.same(want, got)
      end
      local tail = rows_of(data.synthetic(shape { ids_per_bag = bags, first_row = 90, num_rows = 10 }))
      for row = 1, 10 do assert.equal(want[90 + row], tail[row]) end
    end
    assert.are_not.same(rows_of(data.synthetic(shape())), rows_of(data.synthetic(shape { seed = 6 })))
  end)

  it("draws ids by a power law inside their tables, and bags of the lengths asked for", function()
    local loader = data.synthetic(shape { num_rows = 20000, batch_size = 20000,
      ids_per_bag = { 2, 6, { 1, 1 }, { 0, 4 } }, rows = { 1000, 1000, 1, 9 } })
    local b = loader:next_host().ptr
    local counts, at, lengths = {}, 0, { 0, 0, 0, 0 }
    for f = 1, 4 do
      counts[f] = {}
      for i = 0, 19999 do
        local n = b.lengths[(f - 1) * 20000 + i]
        lengths[f] = lengths[f] + n
        for _ = 1, n do
          local id = tonumber(b.values[at])
          counts[f][id] = (counts[f][id] or 0) + 1
          at = at + 1
        end
      end
    end
    assert.same({ 40000, 120000, 20000 }, { lengths[1], lengths[2], lengths[3] })
    assert.near(40000, lengths[4], 800)
    assert.equal(20000, counts[3][0])
    for id in pairs(counts[2]) do assert.is_true(id >= 0 and id < 1000) end
    for id in pairs(counts[4]) do assert.is_true(id >= 0 and id < 9) end
    -- P(0) over P(9): (2^-s - 1) / (11^-s - 10^-s) with s = alpha - 1 = 0.05
    local s = 0.05
    local want = (2 ^ -s - 1) / (11 ^ -s - 10 ^ -s)
    assert.near(want, counts[2][0] / counts[2][9], 0.15 * want)
    local uniform = data.synthetic(shape { num_rows = 20000, batch_size = 20000, alpha = 0 }):next_host().ptr
    local zero = 0
    for i = 0, 19999 do zero = zero + (uniform.values[i] == 0 and 1 or 0) end
    assert.near(400, zero, 80)
  end)

  -- Held-out AUC of a logistic regression on 4 features of 20 ids; `cross` joins each feature with the next one to 400
  -- ids.
  local function regression_auc(args, cross)
    args.first_row, args.num_rows = 0, 40000
    local train = data.synthetic(shape(args))
    local wide = data.host_batch(2, 4, 5000, 20000)
    local function view(host)
      if not cross then return host end
      local from, to, rows = host.ptr, wide.ptr, tonumber(host.ptr.rows)
      ffi.copy(to.dense, from.dense, rows * 2 * 4)
      ffi.copy(to.labels, from.labels, rows * 4)
      for f = 0, 3 do
        for i = 0, rows - 1 do
          to.values[f * rows + i] = from.values[f * rows + i] * 20 + from.values[(f + 1) % 4 * rows + i]
          to.lengths[f * rows + i] = 1
        end
      end
      to.rows, to.ids = rows, 4 * rows
      return wide
    end
    local n = cross and 400 or 20
    local model = data.LogisticRegression { rows = { n, n, n, n }, dense_features = 2, lr = 0.1 }
    for host in function() return train:next_host() end do model:train(view(host)) end
    args.first_row, args.num_rows = 40000, 10000
    local test, p, y, probabilities = data.synthetic(shape(args)), {}, {}, ffi.new "float[5000]"
    for host in function() return test:next_host() end do
      model:predict(view(host), probabilities)
      for i = 0, tonumber(host.ptr.rows) - 1 do p[#p + 1], y[#y + 1] = probabilities[i], host.ptr.labels[i] end
    end
    return (metrics.auc(p, y))
  end

  it("plants a signal, part of it beyond the reach of a logistic regression on the features", function()
    local args = { batch_size = 5000, rows = 20, dense_features = 2, sparse_features = 4, bias = 0, alpha = 0 }
    args.signal, args.interaction = 2, 0
    local first, first_crossed = regression_auc(args), regression_auc(args, true)
    assert.is_true(first > 0.75, tostring(first))
    assert.is_true(first_crossed < first + 0.01, tostring(first_crossed))
    args.signal, args.interaction = 0, 3
    local second, second_crossed = regression_auc(args), regression_auc(args, true)
    assert.is_true(second < 0.65, tostring(second))
    assert.is_true(second_crossed > second + 0.1, tostring(second_crossed))
    args.signal, args.interaction = 0, 0
    assert.near(0.5, regression_auc(args, true), 0.02)
  end)

  it("writes files that the Criteo reader reads back", function()
    local path = os.tmpname()
    finally(function() os.remove(path) end)
    local args = shape { ids_per_bag = { 1, { 0, 1 }, 1, { 0, 1 } }, first_row = 3 }
    local want = rows_of(data.synthetic(args))
    data.synthetic.write { path = path, first_row = 3, num_rows = 100, dense_features = 3, sparse_features = 4,
      rows = 50, seed = 5, ids_per_bag = { 1, { 0, 1 }, 1, { 0, 1 } } }
    local got = rows_of(data.criteo { path = path, batch_size = 7, dense_features = 3, sparse_features = 4, rows = 50,
      ids = "mod" })
    assert.equal(100, #got)
    assert.same(want, got)
  end)

  it("is refused in a world that was joined after it was made, unless it was told its place", function()
    sim.run(2, function(rank, world)
      P.state.world = false
      local early = data.synthetic(shape())
      local placed = data.synthetic(shape { rank = rank, world_size = 2 })
      assert.equal(7, early().rows) -- alone it is right
      P.state.world = world
      assert.error_matches(early,
        "data.synthetic: the loader was made before peri.init(), and has all samples on each of 2 ranks", 1, true)
      local rows, mine = placed().rows, data.synthetic(shape())().rows
      assert.equal(rows, mine)
    end)
  end)

  it("names what is wrong", function()
    local function fails(args, pattern) assert.error_matches(function() data.synthetic(shape(args)) end, pattern) end
    fails({ rows = { 1, 2 } }, "rows has 2 entries for 4 features")
    fails({ rows = 0 }, "rows is 0, allowed: whole numbers 1")
    fails({ ids_per_bag = { 3, 1 } }, "ids_per_bag is 1")
    fails({ num_rows = -1 }, "num_rows is %-1")
    fails({ alpha = -1 }, "alpha %-1")
    fails({ signal = 1 / 0 }, "signal inf")
    assert.error_matches(function() data.synthetic.write { path = "/nowhere/x", num_rows = 1 } end,
      "/nowhere/x: No such file")
    assert.error_matches(function() data.synthetic.write { path = "/tmp/x", num_rows = 1, ids_per_bag = 2 } end,
      "has room for 1")
    assert.error_matches(function() data.LogisticRegression { rows = { 5 }, dense_features = 0, lr = 0 } end,
      "learning rate 0")
    local model = data.LogisticRegression { rows = { 5, 5, 5, 5 }, dense_features = 3 }
    assert.error_matches(function() model:train(data.synthetic(shape()):next_host()) end,
      "feature %d, sample %d+: id %d+, allowed: 0%.%.4")
    local other = data.LogisticRegression { rows = { 50 }, dense_features = 3 }
    assert.error_matches(function() other:train(data.synthetic(shape()):next_host()) end,
      "3 dense and 4 sparse features, wanted 3 and 1")
    assert.error_matches(function() peri.data.host_batch(-1, 0, 1, 1) end, "%-1 dense")
    assert.error_matches(function() peri.data.host_batch("x", 0, 1, 1) end, "data.host_batch: dense_features is 'x'")
  end)
end)
