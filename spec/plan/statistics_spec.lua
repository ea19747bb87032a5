-- Plans from data: what is counted is what the file says, and what planners are told follows from it.
local peri = require "perilune"
local shell = require "spec.support.shell"
local plan, data = peri.plan, peri.data

local ROWS = { 50, 1000, 3 }

--- A file of n samples with 1 integer and 3 categories, some missing, ids skewed; and the samples themselves, by
--- category.
local function file_of(folder, n)
  local lines, ids = {}, { {}, {}, {} }
  for i = 1, n do
    local cells = {}
    for c = 1, 3 do
      local u = peri.ffi.C.peri_random_uniform(3, c, i)
      local id = c == 3 and i % 5 == 0 and -1 or math.floor(u * u * u * ROWS[c])
      ids[c][i], cells[c] = id, id < 0 and "" or ("%x"):format(id)
    end
    lines[i] = ("%d\t%d\t%s"):format(i % 2, i % 7, table.concat(cells, "\t"))
  end
  return shell.write(folder .. "/train.txt", table.concat(lines, "\n") .. "\n"), ids
end

local function tables_of()
  return { { name = "a", rows = ROWS[1], features = { "c1" } },
    { name = "b", rows = ROWS[2], features = { "c2", "c3" } } }
end

describe("statistics of data", function()
  local folder, clean = shell.temporary()
  local path = file_of(folder, 1003)
  teardown(clean)

  local function count(args)
    local a = { path = path, tables = tables_of(), batch_size = 100, dense_features = 1, sparse_features = 3 }
    for key, value in pairs(args or {}) do a[key] = value end -- any order
    return plan.statistics.count(a)
  end

  it("are those of the ids as tables see them", function()
    local loader = data.criteo { path = path, batch_size = 100, rows = { ROWS[1], ROWS[2], ROWS[2] },
      dense_features = 1, sparse_features = 3 }
    local seen, per_batch, n_batches, ids, samples = { {}, {}, {} }, { 0, 0, 0 }, 0, { 0, 0, 0 }, 0
    for batch in loader do
      local whole = batch.rows == 100 -- the last one is a part of a batch
      n_batches, samples = n_batches + (whole and 1 or 0), samples + batch.rows
      for c = 1, 3 do
        local here = {}
        for _, id in ipairs(batch.sparse_features["c" .. c]:values():to_list()) do
          ids[c] = ids[c] + 1
          seen[c][id], per_batch[c] = (seen[c][id] or 0) + 1, per_batch[c] + (whole and not here[id] and 1 or 0)
          here[id] = true
        end
      end
    end
    local list = count()
    assert.same({ "c1", "c2", "c3" }, peri.util.map(list, function(f) return f.name end))
    for c, f in ipairs(list) do
      local counts = {}
      for _, n in pairs(seen[c]) do counts[#counts + 1] = n end -- any order: sorted
      table.sort(counts, function(x, y) return x > y end)
      assert.same({ 1003, ids[c], #counts, 1, true }, { f.samples, f.ids, f.distinct, f.longest, f.exact })
      assert.is_true(math.abs(f.mean_length - ids[c] / samples) < 1e-12)
      assert.is_true(math.abs(f.batch_distinct - per_batch[c] / n_batches) < 1e-9)
      local sum = 0
      for k = 1, #counts do
        sum = sum + counts[k]
        assert.is_true(math.abs(f:share(k) - sum / ids[c]) < 1e-9, ("%d of %s"):format(k, f.name))
        assert.is_true(f:share(f:hot(sum / ids[c] * 0.999)) >= sum / ids[c] * 0.998)
      end
      assert.equal(1, f:share(1e6))
    end
    assert.is_true(list[3].mean_length < 0.81 and list[3].mean_length > 0.79)
  end)

  it("are of as many samples as asked for, and tell how far they are", function()
    local steps = {}
    local list = count { samples = 300, progress = function(done, all) steps[#steps + 1] = done .. "/" .. all end }
    assert.equal(300, list[1].samples)
    assert.same({ "100/300", "200/300", "300/300" }, steps)
  end)

  it("estimate distinct ids of tables that are too large to count each row", function()
    local lines = {}
    for i = 1, 60000 do lines[i] = ("0\t1\t%x"):format(i * 7919 % 40000) end
    local many = shell.write(folder .. "/many.txt", table.concat(lines, "\n") .. "\n")
    local f = plan.statistics.count { path = many, tables = { { name = "t", rows = 2 ^ 40, features = { "c1" } } },
      dense_features = 1, sparse_features = 1 }[1]
    assert.is_false(f.exact)
    assert.is_true(math.abs(f.distinct / 40000 - 1) < 0.02, f.distinct)
  end)

  it("become constraints where the user says nothing", function()
    local model = plan.describe.of { tables = {
      { name = "a", num_embeddings = ROWS[1], embedding_dim = 8, feature_names = { "c1" } },
      { name = "b", num_embeddings = ROWS[2], embedding_dim = 8, feature_names = { "c2", "c3" } } } }
    local list = count()
    local given = { a = plan.ParameterConstraints { pooling_factors = { 9 }, sharding_types = { "row_wise" } } }
    local made = plan.statistics.constrain(list, model, given, 4)
    assert.same({ 9 }, made.a.pooling_factors)
    assert.same({ "row_wise" }, made.a.sharding_types)
    assert.same({ 1, list[3].mean_length }, made.b.pooling_factors)
    local stats = made.a.cache_params.stats
    assert.same({ 50, 100, 0.2 }, { stats.height, #stats.mrc_hist_counts, made.a.cache_params.load_factor })
    for _, factor in ipairs { 0.1, 0.5, 0.9 } do
      assert.is_true(math.abs(stats:expected_miss_rate(factor) - (1 - list[1]:share(factor * 50))) < 0.05)
    end
    assert.is_false(made.b.cache_params ~= nil and made.b.cache_params.stats ~= nil)
  end)

  it("name what is wrong: the feature, the file, its line", function()
    assert.error_matches(function() count { tables = { { name = "t", rows = 5, features = { "c9" } } } } end,
      "train.txt' has no feature 'c9' of table 't', but c1 to c3")
    local bad = shell.write(folder .. "/bad.txt", "0\t1\t1\t2\t3\n0\t1\t1\tzz\t3\n")
    assert.error_matches(function() count { path = bad } end, "bad.txt:2: column 4", nil, true)
    assert.error_matches(function() count { path = shell.write(folder .. "/empty.txt", "") } end, "empty.txt is empty")
    assert.error_matches(function() count { path = folder .. "/none.txt" } end, "none.txt: No such file")
    assert.error_matches(function() count { batch_size = 0 } end, "batch_size is 0")
    assert.error_matches(function()
      count { path = folder .. "/none.txt", tables = { { name = "t", rows = 5, features = { "u" } } } }
    end,
      "none.txt: No such file")
    assert.error_matches(function() count { tables = {} } end, "count: tables is empty")
    assert.error_matches(function() count { tables = { 1 } } end,
      "count: tables%[1%]: named arguments in a table wanted")
    assert.error_matches(function() count { tables = { { name = "t", num_embeddings = 5, embedding_dim = 4 } } } end,
      "count: tables%[1%]: no argument 'embedding_dim'; allowed: features, name, rows")
    local list = count()
    for _, share in ipairs { -1, 1.5, 0 / 0, math.huge } do
      assert.error_matches(function() list[1]:hot(share) end, "hot: share is .*, allowed: 0%.%.1")
    end
    assert.error_matches(function() plan.statistics.constrain(list,
      plan.describe.of { tables = { { name = "t", num_embeddings = 5, embedding_dim = 4 } } }, nil, 0) end,
        "world_size is 0")
  end)
end)

describe("perilune plan --data", function()
  if shell.no_launcher() then return it("waits for the launcher", function() pending(shell.no_launcher()) end) end
  local folder, clean = shell.temporary()
  teardown(clean)
  local function run(words) return shell.run(("%s plan %s"):format(shell.perilune, words)) end
  local path = folder .. "/train.txt"
  data.synthetic.write { path = path, num_rows = 2000, rows = 500 }

  it("counts, and plans with the numbers", function()
    local output, code = run(("--data %s --topology dgx_a100_40gb --rows 3000000 --dim 64 --save %s/x.plan "
      .. "--no-reasons"):format(path, folder))
    assert.equal(0, code, output)
    assert.matches("train.txt: 2,000 samples", output, 1, true)
    assert.matches("c26 +t_c26 +1.000 +1 +%d+ +3000000", output)
    assert.matches("26 tables on 8 ranks", output, 1, true)
    assert.is_table(plan.load(folder .. "/x.plan").plan[""].tables.t_c26)
    local model = shell.write(folder .. "/m.lua", [[return { tables = { { name = "t", num_embeddings = 900, embedding_dim = 16,
      feature_names = { "c3", "c4" } } } }]])
    output = run(("%s --data %s --samples 1024 -n 2"):format(model, path))
    assert.matches("1,024 samples", output, 1, true)
    assert.matches("t +900 x 16", output)
  end)

  it("says what is wrong in a line", function()
    for words, want in pairs { -- any order
      [""] = "perilune: plan: neither a model nor --data; give one of them",
      ["--data " .. folder .. "/no.txt"] = "no.txt: No such file or directory",
      ["--data " .. path .. " --samples 0"] = "--samples: '0' is not a whole number above 0",
      ["spec/support/shell.lua --data " .. path] = "a model without tables",
    } do
      local output, code = run(words)
      assert.not_equal(0, code)
      assert.matches(want, output, 1, true)
    end
    local model = shell.write(folder .. "/f.lua",
      "return { tables = { { name = 't', num_embeddings = 9, embedding_dim = 4 } } }")
    local beside = shell.write(folder .. "/g.lua",
      "return { tables = { { name = 't', num_embeddings = 9, embedding_dim = 4 } }, constraints = {} }")
    assert.matches("constraints stands beside the model: return { model = { tables = ... }, constraints = ... }",
      (run(beside)), 1, true)
    assert.matches("has no feature 't' of table 't', but c1 to c26", (run(model .. " --data " .. path)), 1, true)
  end)
end)
