-- Batches that worker threads make ahead: for every source the same batches in the same order as without workers,
-- whatever their number; errors, ends and beginnings again; and pinned memory, which is used again only when its copies
-- have run.
-- takes: 15 s
local ffi = require "ffi"
local peri = require "perilune"
local P = require "perilune.ffi"
local packages = require "perilune.data.packages"
local data, DataLoadingThread = peri.data, peri.pipeline.DataLoadingThread
local C = P.C

local COUNTS = { 0, 1, 2, 3, 7 } -- one for each variant

local function objects()
  collectgarbage()
  collectgarbage()
  return tonumber(C.peri_mem_objects())
end

--- All that a data.Batch says, as text.
local function text_of(b)
  local sparse, parts = b.sparse_features, { b.rows, b.global_rows, b.global_row, b.loss_scale }
  for _, t in ipairs { b.dense_features, b.labels, sparse:values(), sparse:lengths() } do
    parts[#parts + 1] = table.concat(t:shape(), "x") .. ":" .. table.concat(t:to_list(), " ")
  end
  return table.concat(parts, " ") .. table.concat(sparse:keys(), " ") .. table.concat(sparse:length_per_key(), " ")
end

local function all(loader, most)
  local list = {}
  for b in loader do
    list[#list + 1] = text_of(b)
    if #list == most then break end
  end
  return list
end

local function all_of(t)
  local list = {}
  for b in t do list[#list + 1] = b end
  return list
end

local function with(args, more)
  local out = {}
  for _, t in ipairs { args, more or {} } do
    for name, value in pairs(t) do out[name] = value end -- any order: named arguments
  end
  return out
end

-- -- sources ----------------------------------------------------------------------------------------------------------

local path = os.tmpname()
local LINES, LONG = 200, 3000 -- the long file has several chunks of an index
local long_path = os.tmpname()
teardown(function()
  os.remove(path)
  os.remove(long_path)
end)
local shape = { rows = 50, dense_features = 3, sparse_features = 4, seed = 5 }
data.synthetic.write(with(shape, { path = path, num_rows = LINES, ids_per_bag = { 0, 1 } }))
do
  local file = io.open(long_path, "w")
  for i = 1, LONG do file:write(("%d\t%d\t%x%s\n"):format(i % 2, i, i, i % 3 == 0 and ("0"):rep(0) or "")) end
  for i = 1, LONG do file:write(("%d\t%s%d\t%x\n"):format(i % 2, ("0"):rep(i % 9), i, i)) end
  file:close()
end

local blocks = {}
for i = 0, 99 do
  blocks[#blocks + 1] = ("Package: p%d\nSection: s%d\nTag: t::%d\nMaintainer: m%d\nDescription: word%d tool\nDepends: "
    .. "p%d, p%d, p%d\n")
    :format(i, i % 3, i % 5, i % 7, i % 11, (i * 7 + 1) % 100, (i * i + 3) % 100, (i + 1) % 100)
end
local lists = packages.parse(table.concat(blocks, "\n"))

local common = { batch_size = 7, epochs = 3 }
local sources = {
  synthetic = function(a) return data.synthetic(with(with(shape, { num_rows = 100, ids_per_bag = { 0, 3 } }), a)) end,
  criteo = function(a) return data.criteo(with(with(shape, { path = path, seed = nil, ids = "mod" }), a)) end,
  ["part of a criteo file"] = function(a)
    return data.criteo(with({ path = path, rows = 50, dense_features = 3, sparse_features = 4, part = "test",
      holdout = 0.4 }, a))
  end,
  ["samples that can be left out"] = function(a)
    local function make(_, epoch)
      local i = 0
      return setmetatable({ skip = function(_, n)
        local left = 100 - i
        i = i + (n < left and n or left)
        return n < left and n or left
      end }, { __call = function()
        i = i + 1
        return i <= 100 and { label = i % 2, age = i + epoch, f = i % 5 > 0 and { i % 7, i % 11 } or nil } or nil
      end })
    end
    return data.samples(with({ dense = { "age" }, ids = { { name = "f", rows = 11 } }, make = make }, a))
  end,
  ["packages"] = function(a) return data.debian(with({ packages = lists, negatives = 2, seed = 3 }, a)) end,
}
shape.seed = nil
local variants = { {}, { drop_last = true }, { rank = 1, world_size = 3 }, { limit = 30 },
  { batch_size = 64, rank = 2, world_size = 3 } }

describe("workers", function()
  for name, make in pairs(sources) do -- any order: each by itself
    it("make what the caller's thread makes: " .. name, function()
      for i, variant in ipairs(variants) do
        local wanted = all(make(with(common, variant)))
        assert.is_true(#wanted > 3)
        for _, n in ipairs { COUNTS[i], i == 1 and 3 or nil } do
          local loader = make(with(with(common, variant), { num_workers = n, prefetch_factor = 1 + n % 3 }))
          assert.same(wanted, all(loader))
          assert.is_nil(loader())
          assert.same(wanted, all(loader:rewind()))
          assert.same({ wanted[1], wanted[2] }, all(loader:rewind(), 2)) -- left in the middle
          assert.same(wanted, all(loader:rewind()))
          loader:rewind()
          assert.same({ unpack(wanted, 4) }, all(loader:skip(3)))
        end
        if i % 2 == 1 then -- a loader that has made nothing yet: the whole, and ranks of a smaller and a larger batch
          assert.same({ unpack(wanted, 3) }, all(make(with(with(common, variant), { num_workers = 3 })):skip(2)))
        end
      end
    end)
  end

  it("are told how many samples were left out", function()
    local function make()
      return setmetatable({ skip = function() end }, { __call = function() return { label = 1 } end })
    end
    assert.error_matches(function()
      data.samples { batch_size = 4, ids = { { name = "f", rows = 3 } }, make = make }:skip(1)
    end, "data.samples: what skip of the iterator returned .how many samples it left out. is nil, allowed: whole "
      .. "numbers 0..4")
  end)

  it("find their lines in a file of several chunks, and count it together", function()
    local args = { path = long_path, rows = 1000, dense_features = 1, sparse_features = 1, batch_size = 64 }
    local wanted = all(data.criteo(args))
    for n = 1, 4 do
      local loader = data.criteo(with(args, { num_workers = n }))
      for _ = 1, 3 do assert.same(wanted, all(loader:rewind())) end
    end
  end)

  it("make batches of a generator in states of their own", function()
    local function generator(a)
      local peri_there, k = require "perilune", 0 -- its own
      return function()
        k = k + 1
        if k > a.n then return nil end
        return { number = k, x = peri_there.tensor({ k, k / 2 }, "f32", "cpu"), r = math.random(1000) }
      end
    end
    local function skipping(a)
      local k = 0
      return setmetatable({ skip = function(_, n) k = k + n end }, { __call = function()
        k = k + 1
        return k <= a.n and { number = k, x = require("perilune").tensor({ k, k / 2 }, "f32", "cpu") } or nil
      end })
    end
    local function numbers(t)
      local list = {}
      for b in t do list[#list + 1] = { b.number, b.x:to_list(), b.r } end
      return list
    end
    -- by number of batches, the numbers of workers: no batch, more workers than batches, more than one round (each
    -- worker starts a Lua state, which is what this costs)
    local few, many = { 3 }, { 1, 3 }
    for _, loader in ipairs { generator, skipping } do
      for n, counts in pairs { [0] = few, [1] = { 7 }, [5] = few, [20] = many } do -- any order: each by itself
        local wanted = numbers(loader { n = n })
        if loader == generator then -- each state's random numbers are those of a new state
          for i, x in ipairs(numbers(DataLoadingThread { loader = generator, arguments = { n = n } })) do
            wanted[i][3] = x[3]
          end
        end
        for _, workers in ipairs(counts) do
          assert.same(wanted, numbers(DataLoadingThread { loader = loader, arguments = { n = n },
            num_workers = workers }))
        end
      end
    end
  end)

  it("do not wait for a slow one before the queue is full", function()
    local folder = os.tmpname()
    os.remove(folder)
    assert.equal(0, os.execute("mkdir " .. folder))
    finally(function() os.execute("rm -r " .. folder) end)
    -- batch 0 is made when there is a file `go`
    local function held(dir)
      local k, pause = -1, require("perilune.ffi").C.peri_pause
      local function exists(name)
        local file = io.open(dir .. "/" .. name)
        return file and file:close()
      end
      return setmetatable({ skip = function(_, n) k = k + n end }, { __call = function()
        k = k + 1
        for _ = 1, k == 0 and 100000 or 0 do
          if exists "go" then break end
          pause(2 ^ 40)
        end
        if k < 40 then io.open(("%s/%d"):format(dir, k), "w"):close() end
        return k < 40 and k or nil
      end })
    end
    local workers, prefetch = 3, 2
    local t = DataLoadingThread { loader = held, arguments = folder, num_workers = workers, prefetch_factor = prefetch }
    local function made()
      local list = {}
      for k = 0, 39 do
        local file = io.open(("%s/%d"):format(folder, k))
        if file then list[#list + 1] = k file:close() end
      end
      return list
    end
    local wanted = {} -- all but the first fill the queue, and each of the other workers has one more in its hand
    for k = 1, workers * prefetch + workers - 2 do wanted[k] = k end
    for _ = 1, 100000 do
      if #made() >= #wanted then break end
      C.peri_pause(2 ^ 40)
    end
    for _ = 1, 100 do C.peri_pause(2 ^ 40) end
    assert.same(wanted, made())
    io.open(folder .. "/go", "w"):close()
    for k = 0, 39 do assert.equal(k, t()) end
    assert.is_nil(t())
  end)

  it("draw random numbers of a batch that depend on its number alone", function()
    local function drawing(a)
      local k, p = 0, require "perilune"
      return setmetatable({ skip = function(_, n) k = k + n end }, { __call = function()
        k = k + 1
        if k > a.n then return nil end
        local first = math.random()
        for _ = 1, (k * 7919) % 400 do math.random() end -- some batches take longer
        return { k, first, p.rand({ 2 }, "f64", "cpu"):to_list() }
      end })
    end
    local function numbers(workers) return all_of(DataLoadingThread { loader = drawing, arguments = { n = 30 },
      num_workers = workers }) end
    local seen, wanted = {}, nil
    for _, seed in ipairs { 2 ^ 53 - 1, 0 } do
      peri.nn.manual_seed(seed)
      wanted = numbers(1)
      for _, b in ipairs(wanted) do
        assert.is_nil(seen[b[2]])
        assert.is_nil(seen[b[3][1]])
        seen[b[2]], seen[b[3][1]], seen[b[3][2]] = true, true, true
      end
    end
    for _, workers in ipairs { 2, 3, 8 } do assert.same(wanted, numbers(workers)) end
    assert.same({ unpack(wanted, 11) },
      all_of(DataLoadingThread { loader = drawing, arguments = { n = 30 }, num_workers = 3 }:skip(10)))
  end)

  it("raise an error after the batches before it, with its batch and the user's line, and again", function()
    local function failing(a)
      local k = -1
      return function()
        k = k + 1
        if k == a.at then error "the disk is full" end
        return k
      end
    end
    for workers = 1, 4, 3 do
      for _, at in ipairs { 0, 3, 5 } do -- the first and last worker's of the first round, and one of the second
        local t, got = DataLoadingThread { loader = failing, arguments = { at = at }, num_workers = workers }, 0
        local ok, err
        repeat
          ok, err = pcall(t)
          got = got + (ok and 1 or 0)
        until not ok
        assert.equal(at, got)
        local words = ("DataLoadingThread: the disk is full %%(spec/data/workers_spec.lua:%%d+%%) %%(batch %d%%)")
          :format(at)
        assert.matches(words, err.message)
        ok, err = pcall(t)
        assert.is_false(ok)
        assert.matches(words, err.message)
      end
    end
    assert.error_matches(function()
      DataLoadingThread { loader = function() error "no such table" end, num_workers = 3 }()
    end, "no such table.*batch 0%)")
  end)

  it("raise a file's error at its batch, also after beginning again", function()
    local bad = os.tmpname()
    finally(function() os.remove(bad) end)
    local file = io.open(bad, "w")
    for i = 1, 40 do file:write(("1\t%s\t%x\n"):format(i == 26 and "x" or i, i)) end
    file:close()
    for _, n in ipairs { 0, 1, 2, 3 } do
      local loader = data.criteo { path = bad, rows = 10, dense_features = 1, sparse_features = 1, batch_size = 5,
        num_workers = n }
      for _ = 1, 2 do
        for _ = 1, 5 do assert.equal(5, loader().rows) end
        assert.error_matches(function() loader() end, ":26: column 2 .integer 1. is 'x'")
        loader:rewind()
      end
    end
  end)

  it("give everything back, wherever they are left", function()
    local before = objects()
    for _, taken in ipairs { 0, 1, 4, 5 } do
      local loader = sources.criteo(with(common, { num_workers = 3 }))
      for _ = 1, taken do loader():release() end
      if taken % 2 == 0 then loader:stop() end
      loader = nil -- luacheck: ignore
      assert.equal(before, objects())
    end
  end)

  it("refuse what they cannot do", function()
    local function refused(text, args, make)
      assert.error_matches(function() (make or sources.synthetic)(with(common, args)) end, text)
    end
    refused("data.synthetic: num_workers is %-1", { num_workers = -1 })
    refused("data.synthetic: prefetch_factor is 0, allowed: whole numbers 1..4096",
      { num_workers = 2, prefetch_factor = 0 })
    refused("data.criteo: timeout is 0, allowed: seconds above 0", { timeout = 0 }, sources.criteo)
    refused("DataLoadingThread: num_workers is 0", { loader = "x", num_workers = 0, batch_size = nil, epochs = nil },
      function(a)
      a.batch_size, a.epochs = nil, nil
      DataLoadingThread(a)
    end)
    local loader = sources.synthetic(with(common, { num_workers = 2 }))
    assert.error_matches(function() loader:next_host() end,
      "data.synthetic: next_host makes a batch on the thread that calls it; this loader has 2 workers")
    local source = sources.synthetic(common).source
    assert.error_matches(function() data.Loader("mine", source, with(common, { num_workers = 1 })) end,
      "mine: num_workers is given, but this kind of loader has no workers")
    local fifo = os.tmpname()
    finally(function() os.remove(fifo) end)
    os.remove(fifo)
    os.execute("mkfifo " .. fifo)
    os.execute(("(printf '1\\t2\\ta\\n0\\t3\\tb\\n' > %s) &"):format(fifo))
    local pipe = data.criteo { path = fifo, rows = 10, dense_features = 1, sparse_features = 1, batch_size = 1,
      num_workers = 2 }
    assert.error_matches(function() pipe() end, "is a pipe: one reader can read it")
  end)

  it("notice a file that has changed since the loader was made", function()
    local changing = os.tmpname()
    finally(function() os.remove(changing) end)
    data.synthetic.write(with(shape, { path = changing, num_rows = 20, ids_per_bag = 1 }))
    local loader = data.criteo(with(shape, { path = changing, batch_size = 5, num_workers = 2 }))
    loader():release()
    local file = io.open(changing, "a")
    file:write "1\t1\t1\t1\ta\ta\ta\ta\n"
    file:close()
    local late = data.criteo(with(shape, { path = changing, batch_size = 5, num_workers = 2 }))
    assert.equal(5, #all(late))
    local ok, rest = pcall(all, loader) -- workers that had opened it go on; one that had not says so
    if ok then assert.equal(3, #rest)
    else assert.matches("has changed since its loader was made: it had %d+ bytes, and has %d+", rest.message) end
  end)
end)

-- -- pinned memory ----------------------------------------------------------------------------------------------------

describe("pinned memory", function()
  local device = "opaque" -- copies from it read it late

  it("is what tensors are copied into, and told by them", function()
    local t = peri.tensor({ { 1, 2 }, { 3, 4 } }, "i64", "cpu")
    local p = t:pin_memory(device)
    assert.same({ false, true, "cpu" }, { t:is_pinned(), p:is_pinned(), p:device() })
    assert.same({ { 1, 2 }, { 3, 4 } }, p:to_table())
    assert.is_true(p:slice(1, 0, 1):is_pinned()) -- a view
    local there = p:to(nil, device, true)
    assert.same({ { 1, 2 }, { 3, 4 } }, there:to_table())
    assert.same({ { 1, 3 }, { 2, 4 } }, p:transpose(1, 2):to(nil, device, true):to_table())
    assert.same({ 1, 2, 3, 4 }, p:to("f32", device, true):to_list())
    assert.same({ 0 }, peri.zeros({ 0 }, "f32", "cpu"):pin_memory(device):shape())
    assert.error_matches(function() t:pin_memory "cpu" end, "the memory of device cpu is the host's own")
    assert.error_matches(function() there:pin_memory(device) end, "peri_tensor_pin: a tensor of device ")
  end)

  it("is read late by a copy that does not block, and at once by one that does", function()
    local side = peri.stream.Stream(device)
    local p = peri.full({ 1000 }, 1, "f32", "cpu"):pin_memory(device)
    local blocking = peri.stream.run(side, function() return p:to(nil, device) end)
    p:fill(2)
    local queued = peri.stream.run(side, function() return p:to(nil, device, true) end)
    p:fill(3) -- nobody may, before `side` has come past the copy: here it shows that the copy reads late
    side:synchronize()
    assert.equal(1, blocking:item(0))
    assert.equal(3, queued:item(0))
  end)

  it("is used again only when its copies have run, whichever streams they are on", function()
    local streams, there = { peri.stream.Stream(device), peri.stream.Stream(device) }, {}
    for i = 1, 60 do
      local p = peri.full({ 2000 }, i, "f32", "cpu"):pin_memory(device)
      there[i] = { peri.stream.run(streams[i % 2 + 1], function() return p:to(nil, device, true) end) }
      if i % 5 == 0 then
        there[i][2] = peri.stream.run(streams[(i + 1) % 2 + 1], function() return p:to(nil, device, true) end)
      end
      p:release()
      if i % 7 == 0 then streams[1]:query() end -- something runs, sometimes
    end
    for _, s in ipairs(streams) do s:synchronize() end
    for i, list in ipairs(there) do
      for _, t in ipairs(list) do
        local got = t:to_list()
        assert.same({ i, i, i }, { got[1], got[1000], got[2000] })
      end
    end
  end)

  it("is taken from the system for the first batches only", function()
    local before, places, n = P.state.device, {}, 0
    P.state.device = device
    local batches = DataLoadingThread { num_workers = 2, loader = function()
      local k, p = 0, require "perilune"
      return function()
        k = k + 1
        return k <= 90 and p.full({ 10 + k }, k, "f32", "cpu") or nil
      end
    end }
    P.state.device = before
    local data_out = ffi.new "void *[1]"
    for t in batches do
      n = n + 1
      assert.same({ true, n }, { t:is_pinned(), t:item(3) })
      P.check(C.peri_tensor_data(peri.Tensor.ptr(t), data_out))
      places[tostring(data_out[0])] = true
      if n % 3 == 0 then t:to(nil, device, true):item(0) end
      t:release()
    end
    assert.equal(90, n)
    local distinct = 0
    for _ in pairs(places) do distinct = distinct + 1 end -- any order: counted
    assert.is_true(distinct <= 10, distinct .. " places")
  end)

  it("is where workers make batches for a device; sizes of keys come with them", function()
    for name, make in pairs(sources) do -- any order: each by itself
      local wanted = all(make(common))
      for _, n in ipairs { 0, 1, 3 } do
        local list = {}
        for b in make(with(common, { num_workers = n, device = device, pin_memory = n ~= 3 or nil })) do
          assert.is_truthy(b.sparse_features:length_per_key_or_none(), name)
          list[#list + 1] = b
        end
        for i, b in ipairs(list) do list[i] = text_of(b) end -- all copies may wait until here
        assert.same(wanted, list)
      end
    end
  end)

  it("takes nested batches of generators, of whatever has tensors", function()
    local function generator()
      local p, k = require "perilune", 0
      return function()
        k = k + 1
        if k > 9 then return nil end
        return { k, { x = p.full({ 100 }, k, "f64", "cpu") },
          jt = p.JaggedTensor { values = p.tensor({ k, 2, 3 }, "i64", "cpu"),
            lengths = p.tensor({ 1, 2 }, "i32", "cpu") }, kjt = p.KeyedJaggedTensor { keys = { "a", "b" },
            values = { k, k, k },
          lengths = { 1, 2 }, device = "cpu" } }
      end
    end
    for workers = 1, 3 do
      local list = {}
      for b in DataLoadingThread { loader = generator, num_workers = workers, device = device } do
        list[#list + 1] = b
      end
      assert.equal(9, #list)
      for k, b in ipairs(list) do
        assert.not_equal("cpu", b[2].x:device())
        assert.same({ k, k, k }, { b[1], b[2].x:item(0), b[2].x:item(99) })
        assert.same({ k, 2, 3 }, b.jt:values():to_list())
        assert.same({ { 1, 2 }, { k, k, k } }, { b.kjt:length_per_key(), b.kjt:values():to_list() })
      end
    end
  end)
end)
