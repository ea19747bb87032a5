-- Samples in arrays: files of NumPy's (spec/golden/arrays.py made them), folders of samples, shuffling, ranks,
-- positions, damaged files.
local data = require "perilune.data"
local util = require "perilune.util"
local vectors = require "spec.support.golden"

local golden = "spec/golden/arrays/"
local expected = vectors.document "arrays/samples"
local folder = os.tmpname()
os.remove(folder)
assert(os.execute("mkdir " .. folder) == 0)
teardown(function() os.execute("rm -rf " .. folder) end)
local function write(name, bytes)
  local f = assert(io.open(folder .. "/" .. name, "wb"))
  f:write(bytes)
  f:close()
  return folder .. "/" .. name
end
local function read(path)
  local f = assert(io.open(path, "rb"))
  local bytes = f:read "*a"
  f:close()
  return bytes
end

local function id_text(id) return type(id) == "number" and ("%.0f"):format(id) or (tostring(id):gsub("LL", "")) end

local function sample_text(label, dense, bags)
  local numbers, ids = {}, {}
  for i, x in ipairs(dense) do numbers[i] = ("%.5g"):format(x) end
  for i, bag in ipairs(bags) do ids[i] = table.concat(util.map(bag, id_text), ",") end
  return ("%g %s %s"):format(label, table.concat(numbers, " "), table.concat(ids, ";"))
end

-- The samples of a batch, or of all that a loader gives.
local function of_batch(batch, keys, list)
  local labels, dense, kjt = batch.labels:to_list(), batch.dense_features:to_table(), batch.sparse_features:to_dict()
  local bags = {}
  for f, key in ipairs(keys) do bags[f] = kjt[key]:to_dense() end
  for i = 1, batch.rows do
    local ids = {}
    for f = 1, #keys do ids[f] = bags[f][i]:to_list() end
    list[#list + 1] = sample_text(labels[i], dense[i] or {}, ids)
  end
  return list
end
local function samples(loader)
  local list = {}
  for batch in loader do of_batch(batch, loader.keys, list) end
  return list
end
local function wanted(name)
  local list = {}
  for i, s in ipairs(expected[name]) do list[i] = sample_text(s.label, s.dense, s.ids) end
  return list
end

local layouts = {
  torchrec = { files = { { dense = golden .. "dense.npy", sparse = golden .. "sparse.npy", labels = golden
    .. "labels.npy" } }, rows = 100, ids = "mod" },
  mlperf = { files = { { dense = golden .. "dense.npy", sparse = golden .. "multi_hot.npz", labels = golden
    .. "labels.npy" } }, rows = 90 },
  dlrm = { files = { golden .. "packed.npz" }, rows = 1000, dense = "log" },
}
local function npy(name, args)
  local all = { batch_size = 5, rank = 0, world_size = 1 }
  for k, v in pairs(layouts[name]) do all[k] = v end
  for k, v in pairs(args or {}) do all[k] = v end
  return data.npy(all)
end

describe("data.npy", function()
  for name in pairs(layouts) do
    it("reads what NumPy wrote: " .. name, function() assert.same(wanted(name), samples(npy(name))) end)
  end

  it("reads zip64, and several files as one", function()
    assert.same(wanted "dlrm", samples(npy("dlrm", { files = { golden .. "zip64.npz" } })))
    local twice = samples(npy("dlrm", { files = { golden .. "zip64.npz", golden .. "packed.npz" }, batch_size = 7 }))
    local once = wanted "dlrm"
    assert.equal(46, #twice)
    for i, line in ipairs(twice) do assert.equal(once[(i - 1) % 23 + 1], line) end
  end)

  it("leaves padding out", function()
    local loader = npy("mlperf", { padding = expected.mlperf[1].ids[4][2] })
    local first = samples(loader)[1]
    local ids = expected.mlperf[1].ids[4]
    assert.equal(sample_text(expected.mlperf[1].label, expected.mlperf[1].dense,
      { expected.mlperf[1].ids[1], expected.mlperf[1].ids[2], expected.mlperf[1].ids[3],
        { ids[1], ids[3], ids[4], ids[5] } }), first)
  end)

  it("cuts samples into parts, and gives ranks their rows", function()
    local got = samples(npy("mlperf", { part = "train", holdout = 0.25 }))
    assert.equal(17, #got)
    for _, line in ipairs(samples(npy("mlperf", { part = "test", holdout = 0.25 }))) do got[#got + 1] = line end
    assert.same(wanted "mlperf", got)
    for _, world in ipairs { 2, 3, 8 } do
      local loaders, all = {}, {}
      for rank = 0, world - 1 do loaders[rank + 1] = npy("mlperf", { rank = rank, world_size = world }) end
      for _ = 1, 5 do
        for _, loader in ipairs(loaders) do of_batch(loader(), loader.keys, all) end
      end
      assert.same(wanted "mlperf", all)
    end
  end)

  it("says what is wrong with a file", function()
    local function fails(args, pattern, name)
      assert.error_matches(function() samples(npy(name or "dlrm", args)) end, pattern)
    end
    local npz = read(golden .. "zip64.npz")
    fails({ files = { write("cut.npz", npz:sub(1, -100)) } },
      "cut.npz: the end of a zip archive is missing: it is cut short")
    fails({ files = { write("empty.npz", "") } }, "empty.npz: it is empty, wanted an npy or npz file")
    fails({ files = { write("text.npz", "1\t2\t3\n") } }, "text.npz: it is no npy file")
    fails({ files = { write("gz.npz", "\31\139 and more") } }, "gz.npz: it is a gzip file, wanted an npy or npz file")
    local packed = read(golden .. "packed.npz")
    local at = assert(packed:find("X_cat.npy", 1, true)) + 40
    fails({ files = { write("damaged.npz", packed:sub(1, at - 1) .. "\255\255\255\255" .. packed:sub(at + 4)) } },
      "damaged.npz: X_cat: its packed bytes are damaged, or cut short")
    at = assert(npz:find("X_cat.npy", 1, true)) + 300 -- one bit of an id of a member that is not packed
    local bit = string.char((npz:byte(at) + 1) % 256)
    fails({ files = { write("bit.npz", npz:sub(1, at - 1) .. bit .. npz:sub(at + 1)) } },
      "bit.npz: X_cat: its bytes are damaged: their checksum is %x+, and the directory says %x+")
    local dense = read(golden .. "dense.npy")
    local function other(path)
      return { files = { { dense = path, labels = golden .. "labels.npy", sparse = golden .. "sparse.npy" } } }
    end
    fails(other(write("cut.npy", dense:sub(1, -2))),
      "cut.npy: it is cut short: its array has 69 elements of 4 bytes, and 275 bytes", "torchrec")
    for _, way in ipairs { "raw", "log", "signed_log" } do -- of the logarithms, too
      local args = other(write("nan.npy", dense:sub(1, -5) .. "\0\0\192\127"))
      args.dense = way
      fails(args, "row %d+: dense feature 2 is %-?nan, allowed: finite numbers", "torchrec")
    end
    -- each array by its own file, and rows as they are numbered there, in any part
    local ids, labels = read(golden .. "sparse.npy"), dense:gsub("%(23, 3%), ", "(23,),   "):sub(1, -23 * 8 - 1)
    for _, part in ipairs { "all", "test" } do
      local last = { { dense = golden .. "dense.npy", sparse = golden .. "sparse.npy", labels = write("l.npy",
        labels:sub(1, -5) .. "\0\0\192\127") } }
      fails({ files = last, part = part, holdout = 0.2 }, "/l.npy: row 22: its label is %-?nan", "torchrec")
      last = { { dense = golden .. "dense.npy", labels = golden .. "labels.npy", sparse = write("s.npy",
        ids:sub(1, 128) .. ("\0"):rep(23 * 16 - 4) .. "\255\255\255\127") } }
      fails({ files = last, part = part, holdout = 0.2, ids = "exact" },
        "/s.npy: row 22: sparse feature 3 has the id 2147483647, allowed: 0%.%.99", "torchrec")
    end
    fails(other(write("order.npy", (dense:gsub("fortran_order", "fortran_0rder")))),
      "order.npy: the header of its array has no 'fortran_order'", "torchrec")
    fails(other(golden .. "fortran.npy"), "lies column by column", "torchrec")
    fails(other(golden .. "big_endian.npy"), "its elements are '>f4', allowed: little%-endian", "torchrec")
    fails(other "/nowhere", "/nowhere: No such file", "torchrec")
  end)
end)

describe("data.cache", function()
  local ragged = {}
  for i = 0, 99 do ragged[#ragged + 1] = ("%d,%d,%d,%s\n"):format(i % 2, i, i, ("7|"):rep(i % 5):sub(1, -2)) end
  local columns = { { name = "y", kind = "label" }, { name = "age", kind = "dense" },
    { name = "user", kind = "ids", rows = 100 }, { name = "history", kind = "ids", rows = 9, separator = "|",
      table = "items" } }
  local text = write("ragged.csv", table.concat(ragged))
  local function csv(args)
    local all = { path = text, columns = columns, batch_size = 8, rank = 0, world_size = 1 }
    for k, v in pairs(args or {}) do all[k] = v end
    return data.csv(all)
  end
  local whole, cached = samples(csv()), folder .. "/ragged.samples"
  local function cache(args)
    local all = { path = cached, batch_size = 8, rank = 0, world_size = 1 }
    for k, v in pairs(args or {}) do all[k] = v end
    return data.cache(all)
  end
  local function sorted(list)
    local copy = {}
    for i, x in ipairs(list) do copy[i] = x end
    table.sort(copy)
    return copy
  end

  it("gives back what a loader had", function()
    assert.equal(100, data.cache.write { path = cached, loader = csv() })
    local loader = cache()
    assert.same(whole, samples(loader))
    assert.same(csv():table_list(), loader:table_list())
    assert.same({ "age" }, loader.dense)
    local double = samples(cache { path = { cached, cached } })
    assert.equal(200, #double)
    for i, line in ipairs(double) do assert.equal(whole[(i - 1) % 100 + 1], line) end
    assert.same(whole, samples(cache { num_workers = 2 }))
  end)

  it("shuffles by blocks: each pass has all samples, in an order of its own", function()
    local passes = {}
    for epoch = 1, 3 do
      local loader = cache { shuffle = true, shuffle_block = 6, shuffle_blocks = 3, epochs = epoch }
      local all = samples(loader)
      assert.equal(100 * epoch, #all)
      passes[epoch] = { unpack(all, 100 * epoch - 99) }
      assert.same(sorted(whole), sorted(passes[epoch]))
    end
    assert.is_not.same(passes[1], passes[2])
    assert.is_not.same(passes[2], passes[3])
    assert.is_not.same(whole, passes[1])
    -- Of 100 samples in blocks of 6, what is read together (18 samples) lies in 3 blocks, or, beside the short block,
    -- in 3, too.
    local place = {}
    for i, line in ipairs(whole) do place[line] = i - 1 end
    local blocks = {}
    for i = 1, 12 do blocks[math.floor(place[passes[1][i]] / 6)] = true end
    local n = 0
    for _ in pairs(blocks) do n = n + 1 end
    assert.is_true(n <= 3)
    -- One block of all: any order of all samples; a seed of its own gives another one.
    local one = samples(cache { shuffle = true, shuffle_block = 1000 })
    assert.same(sorted(whole), sorted(one))
    assert.is_not.same(one, samples(cache { shuffle = true, shuffle_block = 1000, seed = 2 }))
  end)

  it("puts every sample at every place about equally often", function()
    local counts = {}
    for i = 1, 100 do counts[i] = 0 end
    local place = {}
    for i, line in ipairs(whole) do place[line] = i end
    for seed = 1, 200 do
      local batch = cache({ shuffle = true, shuffle_block = 7, shuffle_blocks = 4, seed = seed })()
      local line = of_batch(batch, { "user", "history" }, {})[1]
      counts[place[line]] = counts[place[line]] + 1
    end
    local chi = 0
    for i = 1, 100 do chi = chi + (counts[i] - 2) ^ 2 / 2 end
    assert.is_true(chi < 160, ("chi square %g of 99 degrees of freedom"):format(chi)) -- 160: once in 10,000
  end)

  it("has one order for all ranks, workers and positions", function()
    local args = { shuffle = true, shuffle_block = 5, shuffle_blocks = 4, epochs = 3 }
    local function with(more)
      local all = {}
      for k, v in pairs(args) do all[k] = v end
      for k, v in pairs(more) do all[k] = v end
      return cache(all)
    end
    local want = samples(with {})
    for _, workers in ipairs { 1, 3 } do assert.same(want, samples(with { num_workers = workers })) end
    local all, loaders = {}, {}
    for rank = 0, 2 do loaders[rank + 1] = with { rank = rank, world_size = 3 } end
    for _ = 1, 39 do
      for _, loader in ipairs(loaders) do of_batch(loader(), loader.keys, all) end
    end
    assert.same(want, all)
    local loader = with {}
    for _ = 1, 20 do loader() end
    local again = with { num_workers = 2, batch_size = 4 } -- behind sample 56 of the second pass
    again:load_state_dict(loader:state_dict())
    assert.same(samples(loader), samples(again))
    assert.matches("shuffle_block was 5, and is 6", with({ shuffle_block = 6 }):check_state_dict(loader:state_dict()))
  end)

  it("says what is wrong", function()
    local function fails(args, pattern) assert.error_matches(function() samples(cache(args)) end, pattern) end
    assert.error_matches(function() data.cache.write { path = cached, loader = csv() } end,
      "ragged.samples: File exists")
    assert.error_matches(function() data.cache.write { path = cached .. 2, loader = csv { num_workers = 1 } } end,
      "this loader has 1 workers")
    assert.error_matches(function() data.cache.write { path = cached .. 3, loader = csv { world_size = 2 } } end,
      "one of 2 ranks")
    assert.error_matches(function() data.cache.write { path = "/nowhere/x", loader = csv() } end,
      "/nowhere/x.part: No such file")
    fails({ path = "/nowhere" }, "/nowhere: no folder of samples, as data.cache.write makes")
    local function damaged(name, file, bytes)
      local copy = folder .. "/" .. name
      assert(os.execute(("cp -r %s %s"):format(cached, copy)) == 0)
      write(name .. "/" .. file, bytes)
      return { path = copy }
    end
    fails(damaged("d1", "samples.txt", "hello\n"), "samples.txt:1: 'hello', wanted 'perilune samples 1'")
    fails(damaged("d2", "samples.txt", "perilune samples 1\nids\tuser\t0\n"), "samples.txt:2: ")
    local offsets, lengths, ids = read(cached .. "/offsets.npy"), read(cached .. "/lengths.npy"),
      read(cached .. "/ids.npy")
    fails(damaged("d3", "offsets.npy", offsets:sub(1, -9) .. ("\255"):rep(8)),
      "d3: row 99: .*: the offsets are damaged")
    fails(damaged("d4", "lengths.npy", lengths:sub(1, -2) .. "\127"),
      "d4: row 99: sparse feature 1 has %d+ of 4 ids: the lengths are damaged")
    fails(damaged("d5", "ids.npy", ids:sub(1, -2) .. "\1"),
      "d5: row 99: sparse feature 1 has the id %d+, allowed: 0..8")
    fails(damaged("d6", "labels.npy", read(cached .. "/labels.npy"):sub(1, -5) .. "\0\0\192\127"),
      "d6: row 99: its label is %-?nan")
    fails(damaged("d7", "dense.npy", read(golden .. "dense.npy")),
      "dense.npy is f32 %[23, 3%], wanted dense features: .*%[100, 1%]")
  end)
end)

describe("data.samples", function()
  local function make(arguments, epoch)
    local i = 0
    return function()
      i = i + 1
      if i > arguments.n then return nil end
      local sample = { label = i % 2, age = i + 100 * epoch }
      if not arguments.bare then sample.user, sample.history = i, i % 3 > 0 and { i % 7, i % 5 } or nil end
      return sample
    end
  end
  local function loader(args)
    local all = { make = make, arguments = { n = 20 }, dense = { "age" }, batch_size = 6, rank = 0, world_size = 1,
      ids = { { name = "user", rows = 100 }, { name = "history", rows = 10 } } }
    for k, v in pairs(args or {}) do all[k] = v end
    return data.samples(all)
  end

  it("makes batches of a function's samples, on ranks and workers, and from a position on", function()
    local all = samples(loader { epochs = 2 })
    assert.equal(40, #all)
    assert.equal("1 1 1;1,1", all[1])
    assert.equal("1 103 3;", all[23])
    assert.equal(20, loader():count())
    assert.same(all, samples(loader { epochs = 2, num_workers = 2 }))
    local got = {}
    local ranks = { loader { rank = 0, world_size = 2 }, loader { rank = 1, world_size = 2 } }
    for _ = 1, 4 do
      for _, own in ipairs(ranks) do of_batch(own(), own.keys, got) end
    end
    assert.same({ unpack(all, 1, 20) }, got)
    local first, again = loader { epochs = 2 }, loader { epochs = 2 }
    for _ = 1, 5 do first() end
    again:load_state_dict(first:state_dict())
    assert.same(samples(first), samples(again))
    local raw = { -- no dense features, and ids of any 64 bits
      make = function()
        local i = 0
        return function()
          i = i + 1
          return i <= 9 and { user = 2LL ^ 63 + i, history = { -i, 2 ^ 53 - 1, 2ULL ^ 63 - i } } or nil
        end
      end,
      dense = {}, ids = { { name = "user", rows = 10, ids = "raw" }, { name = "history", rows = 10, ids = "raw" } },
    }
    local bare = { ids = {}, arguments = { n = 20, bare = true } }
    for name, args in pairs { made = {}, raw = raw, bare = bare } do -- any order
      local path = folder .. "/" .. name .. ".samples"
      assert.equal(#samples(loader(args)), data.cache.write { path = path, loader = loader(args) })
      local read_back = data.cache { path = path, batch_size = 6, rank = 0, world_size = 1, num_workers = 1 }
      assert.same(samples(loader(args)), samples(read_back))
      assert.same(loader(args):table_list(), read_back:table_list())
      read_back:stop()
    end
    assert.equal("0  -9223372036854775807;-1,9007199254740991,9223372036854775807", samples(loader(raw))[1])
  end)

  it("says which sample is wrong", function()
    local function fails(sample, pattern)
      assert.error_matches(function() loader({ make = function() return function() return sample end end })() end,
        pattern)
    end
    fails({ age = 1, user = 100 }, "sample 0 of pass 0: user, id 1, is .*, wanted whole numbers 0..99")
    fails({ age = 1, history = { 1, 2.5 } }, "history, id 2, is")
    fails({ age = 1, history = { 1, "2" } }, "history, id 2, is '2'")
    fails({ age = 1, history = { 1, nil, 3 } }, "the list history has an entry %[3%], and no entry %[2%]")
    fails({ age = 1, history = { id = 3 } }, "the list history is a table with the key 'id'")
    fails({ user = 1 }, "age is nil, wanted a finite number")
    fails({ age = 0 / 0 }, "age is")
    fails({ age = 1e39 }, "age is 1e%+39, wanted a number that f32 can hold")
    fails(7, "sample 0 of pass 0 is .*, wanted a table, or nil at the end")
    local raw = loader { ids = { { name = "user", rows = 1, ids = "raw" } },
      make = function() return function() return { age = 1, user = 2 ^ 53 } end end }
    assert.error_matches(raw, "user, id 1, is .*, wanted whole numbers %-2%^53 %+ 1..2%^53 %- 1, or 64%-bit integers")
    assert.error_matches(function() loader { make = 5 } end, "make is .*, wanted a function%(arguments, epoch%)")
    local n = 3
    assert.error_matches(function() loader { num_workers = 1, make = function() return n end } end,
      "make uses 'n' of what surrounds it")
  end)
end)
