-- The Criteo reader: fields, line ends, ranks, parts, epochs, and what it says about bad lines.
local peri = require "perilune"
local data = require "perilune.data"
local util = require "perilune.util"

local folder = os.getenv "TMPDIR" or "/tmp"
local count = 0
local paths = {}
local function file(text)
  count = count + 1
  local path = ("%s/perilune_criteo_%d_%d.txt"):format(folder, tonumber(peri.ffi.C.peri_time_ns() % 1000000007), count)
  local f = assert(io.open(path, "wb"))
  f:write(text)
  f:close()
  paths[#paths + 1] = path
  return path
end
teardown(function()
  for _, path in ipairs(paths) do os.remove(path) end
end)

-- A loader of few columns.
local function small(text, args)
  local all = { path = file(text), batch_size = 4, dense_features = 2, sparse_features = 3, rows = 1000, ids = "mod" }
  for name, value in pairs(args or {}) do all[name] = value end
  return data.criteo(all)
end

-- All samples of a loader as { label, dense..., {ids}... } strings, in the order of the file.
local function samples(loader)
  local list = {}
  local host = loader:next_host()
  while host do
    local b, at = host.ptr, 0
    local rows = tonumber(b.rows)
    local lines = {}
    for i = 0, rows - 1 do
      lines[i] = { ("%d:%d"):format(tonumber(b.global_row) + i, b.labels[i]) }
      for d = 0, b.dense_features - 1 do table.insert(lines[i], ("%.6g"):format(b.dense[i * b.dense_features + d])) end
    end
    for f = 0, b.sparse_features - 1 do
      for i = 0, rows - 1 do
        local ids = {}
        for _ = 1, b.lengths[f * rows + i] do
          ids[#ids + 1] = tostring(tonumber(b.values[at]))
          at = at + 1
        end
        table.insert(lines[i], table.concat(ids, ","))
      end
    end
    for i = 0, rows - 1 do list[#list + 1] = table.concat(lines[i], " ") end
    host = loader:next_host()
  end
  return list
end

describe("data.criteo", function()
  it("reads every kind of field", function()
    assert.same({ "0:1 5 -3 28 1 15", "1:0 0 12  10 " },
      samples(small("1\t5\t-3\t000001C\tf4241\tF\n0\t\t12\t\tA\t\n", { dense = "raw", rows = { 1000, 1000000, 16 } })))
  end)

  it("takes LF, CR LF, and a last line without an end", function()
    local want = { "0:1 1 2 1 2 3", "1:0 3 4 4 5 6", "2:1 5 6 7 8 9" }
    local text = "1\t1\t2\t1\t2\t3\n0\t3\t4\t4\t5\t6\n1\t5\t6\t7\t8\t9\n"
    assert.same(want, samples(small(text, { dense = "raw" })))
    assert.same(want, samples(small(text:sub(1, -2), { dense = "raw" })))
    assert.same(want, samples(small(text:gsub("\n", "\r\n"), { dense = "raw" })))
    assert.same(want, samples(small((text:gsub("\n", "\r\n"):sub(1, -3)), { dense = "raw" })))
    assert.error_matches(function() small "" end, "is empty: it has no line")
  end)

  it("transforms integers", function()
    local line = "1\t1023\t-7\t1\t1\t1\n1\t100000\t\t1\t1\t1\n"
    local log = math.log
    local function dense(kind)
      local b = small(line, { dense = kind }):next_host().ptr
      return { b.dense[0], b.dense[1], b.dense[2], b.dense[3] }
    end
    local function near(want, got)
      for i = 1, 4 do assert.near(want[i], got[i], 1e-6 * math.max(1, math.abs(want[i]))) end
    end
    near({ 1023, -7, 100000, 0 }, dense "raw")
    near({ log(1024), 0, log(100001), 0 }, dense "log")
    near({ log(1024), -log(8), log(100001), 0 }, dense "signed_log")
  end)

  it("keeps all 64 bits of a category", function()
    -- equal in the low 31 and in the low 63 bits
    local function ids(mode)
      local b = small("1\t\t\t00000001\t80000001\t8000000000000001\n", { rows = 999983, ids = mode }):next_host().ptr
      return { tonumber(b.values[0]), tonumber(b.values[1]), tonumber(b.values[2]) }
    end
    assert.same({ 1, 520148, 2174 }, ids "mod") -- 1, 2^31 + 1, 2^63 + 1, mod 999983
    assert.same({ 678207, 890391, 273495 }, ids "hash") -- xxHash's own XXH3_64bits of their 8 bytes, mod 999983
    local raw = { 1, 0x80000001, 0x8000000000000001ULL }
    assert.same({ 678207, 890391, 273495 }, util.map(raw, function(id) return data.hash(id, 999983) end))
    for _, bad in ipairs { -1, 1.5, 2 ^ 53, true, -1LL } do
      assert.error_matches(function() data.hash(bad, 10) end, "data.hash: id is .*, allowed: a text, whole numbers")
    end
    assert.error_matches(function() data.hash("a", 0) end, "data.hash: rows is 0, allowed: whole numbers")
  end)

  it("gives missing categories an empty bag or the id 0", function()
    local text = "1\t\t\t0\t\t3e7\n"
    assert.same({ "0:1 0 0 0  999" }, samples(small(text)))
    assert.same({ "0:1 0 0 1 0 1" }, samples(small(text, { missing = "zero" }))) -- 999 mod 999 + 1
  end)

  local text = {}
  for i = 0, 22 do text[#text + 1] = ("%d\t%d\t\t%x\t%s\t%x\n"):format(i % 2, i, i, i % 3 == 0 and "" or "7", 2 * i) end
  text = table.concat(text)

  it("gives every rank its own rows of the same batches", function()
    local want = samples(small(text, { batch_size = 5 }))
    assert.equal(23, #want)
    for _, world in ipairs { 1, 2, 3, 5, 8 } do
      local got = {}
      for rank = 0, world - 1 do
        local loader = small(text, { batch_size = 5, rank = rank, world_size = world })
        for _, line in ipairs(samples(loader)) do got[#got + 1] = line end
      end
      table.sort(got, function(a, b) return tonumber(a:match "^%d+") < tonumber(b:match "^%d+") end)
      assert.same(want, got)
    end
  end)

  it("has all ranks agree on the number of batches, also where a share is empty", function()
    for _, world in ipairs { 2, 8 } do
      for rank = 0, world - 1 do
        local loader, sizes = small(text, { batch_size = 5, rank = rank, world_size = world }), {}
        local host = loader:next_host()
        while host do
          sizes[#sizes + 1] = tonumber(host.ptr.global_rows)
          host = loader:next_host()
        end
        assert.same({ 5, 5, 5, 5, 3 }, sizes)
      end
    end
  end)

  it("reads several epochs, drops a short batch when asked, and starts again", function()
    local function sizes(loader)
      local list = {}
      for batch in loader do
        list[#list + 1] = batch.rows
        batch:release()
      end
      return list
    end
    local loader = small(text, { batch_size = 10, epochs = 2 })
    assert.same({ 10, 10, 3, 10, 10, 3 }, sizes(loader))
    assert.same({ 10, 10, 3, 10, 10, 3 }, sizes(loader:rewind()))
    assert.same({ 10, 10, 10, 10 }, sizes(small(text, { batch_size = 10, epochs = 2, drop_last = true })))
    assert.same({ 10, 10, 10, 10 }, sizes(small(text, { batch_size = 10, epochs = 2, limit = 20 })))
    assert.same({ 10, 10 }, sizes(small(text, { batch_size = 10, limit = 11 })))
    assert.equal(20, small(text, { batch_size = 10, limit = 11 }):count())
    assert.equal(23, small(text, { batch_size = 10 }):count())
    assert.same({}, sizes(small(text, { batch_size = 30, epochs = math.huge, drop_last = true })))
  end)

  it("splits the file into a head and a tail", function()
    local all = samples(small(text, { dense = "raw" }))
    for _, holdout in ipairs { 0, 0.1, 0.5, 0.77, 1 } do
      local head = small(text, { dense = "raw", part = "train", holdout = holdout })
      local n = head.source:count()
      local got = samples(head)
      assert.equal(n, #got)
      for _, line in ipairs(samples(small(text, { dense = "raw", part = "test", holdout = holdout }))) do
        got[#got + 1] = line:gsub("^%d+", function(row) return tostring(tonumber(row) + n) end)
      end
      assert.same(all, got)
    end
  end)

  it("cuts the head again, into what is trained on and what is looked at", function()
    for _, validation in ipairs { 0, 0.2, 1 } do
      local function part(name) return samples(small(text, { dense = "raw", part = name, validation = validation })) end
      local fit, looked, want = part "fit", part "validation", part "train"
      for _, line in ipairs(looked) do
        fit[#fit + 1] = line:gsub("^%d+", function(row) return tostring(tonumber(row) + #want - #looked) end)
      end
      assert.same(want, fit)
      if validation == 0 then assert.equal(0, #looked) elseif validation == 1 then assert.equal(#want, #looked)
      else assert.is_true(#looked >= 3 and #looked <= 5) end -- of 20 lines or so
    end
    assert.error_matches(function() small(text, { validation = -1 }) end, "validation is %-1, allowed: 0..1")
  end)

  for _, device in ipairs { "cpu", "opaque" } do
    it("makes tensors on " .. device, function()
      local batch = small(text, { batch_size = 3, dense = "raw", device = device })()
      assert.same({ 0, 1, 0 }, batch.labels:to_list())
      assert.same({ { 0, 0 }, { 1, 0 }, { 2, 0 } }, batch.dense_features:to_table())
      assert.equal(device, batch.dense_features:device())
      local kjt = batch.sparse_features
      assert.same({ "c1", "c2", "c3" }, kjt:keys())
      assert.same({ 0, 1, 2, 7, 7, 0, 2, 4 }, kjt:values():to_list())
      assert.same({ 1, 1, 1, 0, 1, 1, 1, 1, 1 }, kjt:lengths():to_list())
      assert.equal(3, kjt:stride())
      local moved = batch:to "cpu"
      assert.equal("cpu", moved.sparse_features:values():device())
      assert.same({ 0, 1, 0 }, moved.labels:to_list())
      assert.equal(1 / 3, moved.loss_scale)
    end)
  end

  it("reads a pipe, once, as a whole, by one rank", function()
    local lines = text:rep(300) -- more than a pipe holds
    local path = file(lines)
    local pipe = path .. ".pipe"
    paths[#paths + 1] = pipe
    assert.equal(0, os.execute(("mkfifo %s && (cat %s > %s &)"):format(pipe, path, pipe)))
    local loader = small("", { path = pipe, batch_size = 1000 })
    local want = samples(small("", { path = path, batch_size = 1000 }))
    assert.equal(6900, #want)
    assert.same(want, samples(loader))
    assert.error_matches(function() loader:rewind():next_host() end,
      "is a pipe, which is read once; for more passes write it to a file")
    assert.error_matches(function() loader:count() end, "is a pipe, whose lines are not known; write it to a file")
    local function refused(args, pattern)
      args.path = "/dev/null"
      assert.error_matches(function() small("", args) end, "/dev/null is a pipe .*" .. pattern
        .. "; write it to a file first")
    end
    refused({ part = "train" }, "wanted: 0 to 0.9 of it on rank 0 of 1")
    refused({ part = "test" }, "wanted: 0.9 to 1 of it on rank 0 of 1")
    refused({ rank = 1, world_size = 2 }, "wanted: 0 to 1 of it on rank 1 of 2")
    assert.error_matches(function() small("", { path = "/dev/zero" }):next_host() end,
      "a line of more than 1048576 bytes")
  end)

  it("fails when a file is cut short while it is read", function()
    local path = file(text:rep(2000))
    local function cut(read)
      local loader = small("", { path = path, batch_size = 1000 })
      loader:next_host()
      assert.equal(0, os.execute("truncate -s 200000 " .. path))
      assert.error_matches(function() read(loader) end,
        "was cut short while it was read: it had %d+ bytes, now %d+ or fewer")
      local f = assert(io.open(path, "wb"))
      f:write(text:rep(2000))
      f:close()
    end
    cut(function(loader) while loader:next_host() do end end)
    cut(function(loader) loader:count() end)
  end)

  it("says what is wrong with a line, and where", function()
    local good = "1\t1\t2\t1\t2\t3\n"
    local function fails(line, pattern)
      assert.error_matches(function() samples(small(good .. good .. line)) end, ":3: " .. pattern)
    end
    fails("2\t1\t2\t1\t2\t3\n", "column 1 %(label%) is '2', allowed: 0, 1")
    fails("\t1\t2\t1\t2\t3\n", "column 1 %(label%) is ''")
    fails("1\t1x\t2\t1\t2\t3\n", "column 2 %(integer 1%) is '1x', allowed: empty, or a decimal")
    fails("1\t1\t-\t1\t2\t3\n", "column 3 %(integer 2%) is '%-'")
    fails("1\t1\t1234567890123456789\t1\t2\t3\n", "column 3 %(integer 2%) is '1234567890123456789'")
    fails("1\t1\t2.5\t1\t2\t3\n", "column 3.*'2%.5'")
    fails("1\t1\t2\tg\t2\t3\n", "column 4 %(category 1%) is 'g', allowed: empty, or 1 to 16 hex")
    fails("1\t1\t2\t1\t0123456G\t3\n", "column 5 %(category 2%) is '0123456G'")
    fails("1\t1\t2\t1\t0123/567\t3\n", "column 5")
    fails("1\t1\t2\t1\t\016123456\016\t3\n", "column 5 %(category 2%) is '%?123456%?'")
    fails("1\t1\t2\t1\t2\t12345678901234567\n", "column 6 %(category 3%) is '12345678901234567'")
    fails("1\t1\t2\t1\t2\n", "5 columns, wanted 6 %(a label, 2 integers, 3 categories%)")
    fails("1\t1\t2\t1\t2\t3\t4\n", "more than 6 columns")
    fails("\n", "the line is empty, wanted columns: 6 %(a label")
    fails("1 1 2 1 2 3\n", "1 columns.*'1 1 2 1 2 3'")
    -- far from the start, in a part
    local many = good:rep(100000) .. "1\tx\t2\t1\t2\t3\n" .. good:rep(10000)
    assert.error_matches(function() samples(small(many, { batch_size = 512, part = "test", holdout = 0.5 })) end,
      ":100001: column 2 ")
    -- and it stays there
    local loader = small("x\n")
    assert.error_matches(function() loader:next_host() end, ":1: ")
    assert.error_matches(function() loader:next_host() end, ":1: ")
  end)

  it("says what is wrong with its arguments", function()
    local function fails(args, pattern) assert.error_matches(function() small("", args) end, pattern) end
    fails({ path = "/nowhere/x.txt" }, "/nowhere/x%.txt: No such file")
    fails({ path = "/" }, "/: Is a directory")
    fails({ rows = 0 }, "category 1 has 0 rows, allowed: 1 or more")
    fails({ rows = 1, missing = "zero" }, "allowed: 2 or more")
    fails({ rows = { 5, 5 } }, "rows has no number for category 3")
    fails({ ids = "crc" }, "ids is 'crc', allowed: hash, mod")
    fails({ dense = "exp" }, "dense is 'exp', allowed: log, raw, signed_log")
    fails({ part = "tail" }, "part is 'tail', allowed: all, train, test, fit, validation")
    fails({ holdout = 2 }, "holdout is 2, allowed: 0..1")
    fails({ batch_size = 0 }, "batch_size is 0")
    fails({ rank = 2, world_size = 2 }, "rank is 2, allowed: whole numbers 0..1")
    fails({ colour = 1 }, "no argument 'colour'")
    assert.error_matches(function() data.criteo { batch_size = 1 } end, "'path' is missing")
  end)
end)
