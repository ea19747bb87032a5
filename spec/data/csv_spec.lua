-- Files of lines: columns by a description, packed files, several files, their ends over ranks, and what is said about
-- bad ones.
local data = require "perilune.data"

local folder = os.tmpname()
os.remove(folder)
assert(os.execute("mkdir " .. folder) == 0)
teardown(function() os.execute("rm -rf " .. folder) end)
local function write(name, text)
  local f = assert(io.open(folder .. "/" .. name, "wb"))
  f:write(text)
  f:close()
  return folder .. "/" .. name
end
local function packed(name, text)
  assert(os.execute(("gzip -nf %s"):format(write(name, text))) == 0)
  return folder .. "/" .. name .. ".gz"
end

local columns = {
  { name = "clicked", kind = "label" },
  { name = "age", kind = "dense", transform = "raw", fallback = -1 },
  { name = "user", kind = "ids", rows = 100 },
  { name = "history", kind = "ids", rows = 1000, separator = "|", most = 3 },
}
local function csv(path, args)
  local all = { path = path, columns = columns, batch_size = 4, world_size = 1, rank = 0 }
  for name, value in pairs(args or {}) do all[name] = value end
  return data.csv(all)
end

-- All samples as "label dense user;history".
local function samples(loader)
  local list = {}
  for batch in loader do
    local labels, dense, kjt = batch.labels:to_list(), batch.dense_features:to_list(), batch.sparse_features:to_dict()
    for i = 1, batch.rows do
      local bags = {}
      for f, key in ipairs(loader.keys) do bags[f] = table.concat(kjt[key]:to_dense()[i]:to_list(), ",") end
      list[#list + 1] = ("%g %g %s"):format(labels[i], dense[i] or 0, table.concat(bags, ";"))
    end
  end
  return list
end

local text = "1,20.5,7,1|2|3|4\n0,,8,\n1,-3e2,99,999\n"
local want = { "1 20.5 7;1,2,3", "0 -1 8;", "1 -300 99;999" }

describe("data.csv", function()
  it("reads what its description names", function()
    local loader = csv(write("a.csv", text))
    assert.same(want, samples(loader))
    assert.same({ "user", "history" }, loader.keys)
    assert.same({ { name = "t_user", rows = 100, features = { "user" } },
      { name = "t_history", rows = 1000, features = { "history" } } }, loader:table_list())
    assert.same(want, samples(csv(write("b.csv", "\239\187\191" .. text:gsub("\n", "\r\n"):sub(1, -3)))))
  end)

  it("finds columns by the names of a header, in any order", function()
    local named = "history,\"unused\",age,user,clicked\n1|2|3|4,\"x, "
      .. "\"\"y\"\"\",20.5,7,1\n\"\",,,8,0\n999,z,-3e2,99,1\n"
    assert.same(want, samples(csv(write("h.csv", named), { header = true })))
    local two = { write("h1.csv", "\239\187\191" .. named:sub(1, -2)), write("h2.csv", named) }
    assert.same({ want[1], want[2], want[3], want[1], want[2], want[3] }, samples(csv(two, { header = true })))
    local path = write("n.csv", text)
    assert.error_matches(function() csv(path, { header = true }) end,
      "n.csv:1: no column is named 'clicked'; the header is '1,20")
    two[2] = write("h3.csv", named:gsub("age", "old"))
    assert.error_matches(function() csv(two, { header = true }) end, "h3.csv:1: its header is not that of .*h1.csv")
    for name, head in pairs { h4 = named:match "^[^\n]*\n", h5 = named:match "^[^\n]*" } do
      for _, file in ipairs { write(name .. ".csv", head), packed(name, head) } do
        assert.error_matches(function() csv({ two[1], file }, { header = true }) end,
          name .. "[%.csvgz]+ has a header and no line behind it: there are no samples")
      end
    end
    assert.error_matches(function() csv(write("bom.csv", "\239\187\191")) end, "bom.csv is empty: it has no line")
  end)

  it("makes ids of texts and of hexadecimal numbers", function()
    local own = { { name = "x", kind = "ids", rows = 1000, ids = "text" },
      { name = "y", kind = "ids", rows = 10, ids = "mod", base = 16 } }
    local got = samples(csv(write("t.csv", "red;1F\n\"re\"\"d\";ffffffffffffffff\n"),
      { columns = own, delimiter = ";" }))
    -- XXH3_64bits of "red" and of 're"d' (python-xxhash), mod 1000; 31 and 2^64 - 1, mod 10
    assert.same({ "0 0 101;1", "0 0 535;5" }, got)
    assert.same({ 101, 535 }, { data.hash("red", 1000), data.hash('re"d', 1000) }) -- what a server is asked with
    local bags = { { name = "x", kind = "ids", rows = 1000, ids = "text", separator = "|" } }
    assert.same({ "0 0 101," .. data.hash("blue", 1000) },
      samples(csv(write("t.csv", "red|blue\n"), { columns = bags })))
  end)

  it("leaves raw ids as they are: any 64 bits", function()
    local own = { { name = "x", kind = "ids", rows = 10, ids = "raw", separator = "|" },
      { name = "y", kind = "ids", rows = 10, ids = "raw", base = 16 } }
    local function raw(line) return csv(write("raw.csv", line .. "\n"), { columns = own }) end
    local loader = raw "18446744073709551615|-9223372036854775808|-77|9223372036854775807|-0,ffffffffffffff9c"
    local ids = loader().sparse_features:values()
    local list = { -1LL, -9223372036854775807LL - 1, -77LL, 9223372036854775807LL, 0LL, -100LL }
    assert.equal(#list, ids:numel())
    for i, id in ipairs(list) do assert.equal(1, ids:slice(1, i - 1, i):eq(id):item()) end
    assert.same({ name = "t_x", rows = 10, features = { "x" } }, loader:table_list()[1])
    for _, bad in ipairs { "18446744073709551616", "-9223372036854775809", "--1", "-", "1.0", "+1" } do
      assert.error_matches(raw(bad .. ","), "column 1 %(x%) is '" .. bad:gsub("%p", "%%%0")
        .. "', allowed: whole numbers %-2%^63..2%^64%-1")
    end
    assert.error_matches(raw "1,-a", "column 2 %(y%) is '%-a', allowed: hexadecimal numbers of at most 16 digits")
  end)

  it("reads packed files, several members and files as one", function()
    local members = packed("m1", text:sub(1, 20)) .. " " .. packed("m2", text:sub(21))
    local both = folder .. "/both.gz"
    assert(os.execute(("cat %s > %s"):format(members, both)) == 0)
    assert.same(want, samples(csv(both)))
    local open = text:sub(1, -2) -- its last line has no end
    for _, paths in ipairs { { write("p.csv", open), write("q.csv", text) },
      { packed("p", open), write("r.csv", text) }, { write("s.csv", open), packed("q", text) } } do
      for _, workers in ipairs { 0, 1, 3 } do
        local loader = csv(paths, { batch_size = 2, epochs = 2, num_workers = workers })
        local got = samples(loader)
        assert.equal(12, #got)
        for i, line in ipairs(got) do assert.equal(want[(i - 1) % 3 + 1], line) end
        assert.equal(6, loader:count())
        loader:stop()
      end
    end
  end)

  it("gives ranks and parts their rows, also of packed files", function()
    local many = {}
    for i = 0, 22 do many[#many + 1] = ("%d,%d,%d,%s\n"):format(i % 2, i, i, ("5|"):rep(i % 4):sub(1, -2)) end
    local all = table.concat(many)
    local whole = samples(csv(write("all.csv", all)))
    assert.equal(23, #whole)
    local two = { write("x1.csv", table.concat(many, "", 1, 9)), write("x2.csv", table.concat(many, "", 10)) }
    for _, path in ipairs { folder .. "/all.csv", two, packed("all", all) } do
      for _, world in ipairs { 1, 2, 5 } do
        local by_batch = {}
        for rank = 0, world - 1 do
          local k = 0
          for batch in csv(path, { rank = rank, world_size = world, batch_size = 5 }) do
            k = k + 1
            by_batch[k] = (by_batch[k] or 0) + batch.rows
          end
        end
        assert.same({ 5, 5, 5, 5, 3 }, by_batch)
      end
    end
    local got = samples(csv(two, { part = "train", holdout = 0.3 }))
    for _, line in ipairs(samples(csv(two, { part = "test", holdout = 0.3 }))) do got[#got + 1] = line end
    assert.same(whole, got)
    assert.error_matches(function() csv(folder .. "/all.gz", { part = "test" }) end,
      "all.gz .* is packed by gzip, so its size is not known, and it is read as a whole; wanted: 0.9 to 1 of it; "
        .. "unpack it")
  end)

  it("gives each rank files of its own, if asked", function()
    local paths = {}
    for i = 1, 5 do paths[i] = write("f" .. i, ("1,%d,1,\n"):format(i):rep(i)) end
    local function own(rank, args)
      local all = { rank = rank, world_size = 2, split = "files", batch_size = 4 }
      for name, value in pairs(args or {}) do all[name] = value end
      return csv(paths, all)
    end
    assert.equal(9, own(0):count())
    assert.equal(6, own(1):count())
    local batch = own(1)()
    assert.same({ 2, 2, 0.5 }, { batch.rows, batch.global_rows, batch.loss_scale })
    local loader = own(0)
    loader()
    local position = loader:state_dict()
    local again = own(0)
    again:load_state_dict(position)
    assert.same(loader().dense_features:to_list(), again().dense_features:to_list())
    assert.matches("the order of its samples was another: split%.1 was 0, and is 1", own(1):check_state_dict(position))
    assert.error_matches(function() own(0, { world_size = 6 }) end,
      "5 files for 6 ranks, allowed: as many files as ranks")
  end)

  it("goes on from a position in a packed file", function()
    local path = packed("resume", text:rep(20))
    local loader = csv(path, { epochs = 3 })
    for _ = 1, 20 do loader() end
    local again = csv(path, { epochs = 3, num_workers = 2 })
    again:load_state_dict(loader:state_dict())
    assert.same(samples(loader), samples(again))
    again:stop()
  end)

  it("says what is wrong with a file", function()
    local function fails(path, pattern) assert.error_matches(function() samples(csv(path)) end, pattern) end
    local whole = packed("whole", text:rep(5000))
    assert(os.execute(("head -c 200 %s > %s/cut.gz"):format(whole, folder)) == 0)
    fails(folder .. "/cut.gz", "cut.gz: near byte 200 of the packed file: the gzip file is cut short")
    local bytes = assert(io.open(whole, "rb")):read "*a"
    fails(write("crc.gz", bytes:sub(1, -9) .. "abcd" .. bytes:sub(-4)),
      "crc.gz: near byte %d+ of the packed file: incorrect data check")
    fails(write("e.csv", ""), "e.csv is empty: it has no line")
    fails(packed("e", ""), "e.gz is empty: it has no line")
    fails(write("z.npz", "PK\3\4 and more"),
      "z.npz is a zip archive, such as npz, allowed: a text of lines, packed by gzip or not")
    fails(write("y.parquet", "PAR1 and more"), "is a Parquet file")
    fails(write("x.npy", "\147NUMPY\1\0"), "is an npy file")
    fails(packed("n", "a\0b"), "n.gz is a binary file")
    fails({ folder .. "/a.csv", "/nowhere/b" }, "/nowhere/b: No such file")
  end)

  it("gives batches that print what they have", function()
    local loader = csv(write("print.csv", "1,2,3,4|5\n0,1,7,\n1,1,1,1\n"), { batch_size = 2 })
    loader()
    assert.equal("Batch of 1 samples (1 of all ranks together, from sample 2 on)\n  dense_features: tensor f32 [1, 1] "
      .. "on cpu\n"
      .. "  sparse_features: KeyedJaggedTensor {user, history}: 2 values, batch 1, i64 on cpu\n  labels: tensor f32 "
      .. "[1] on cpu", tostring(loader()))
  end)

  it("says what is wrong with a line, and in which file it stands", function()
    local good = write("good.csv", text)
    local function fails(line, pattern, name)
      assert.error_matches(function() samples(csv { good, write("bad.csv", text .. line) }) end, "bad.csv:4: "
        .. pattern, name)
      assert.error_matches(function() samples(csv { good, packed("bad", text .. line) }) end, "bad.gz:4: " .. pattern,
        name)
    end
    fails("1,2,100,\n", "column 3 %(user%) is '100', allowed: ids 0..99, below the rows of its table")
    fails("1,2,18446744073709551616,\n",
      "column 3 %(user%) is '18446744073709551616', allowed: whole numbers 0..2%^64%-1; ids = text takes words")
    fails("1,2,-1,\n", "column 3 %(user%) is '%-1'")
    fails("x,2,1,\n", "column 1 %(clicked%) is 'x', allowed: a finite number")
    fails(",2,1,\n", "column 1 %(clicked%) is '', allowed: a finite number")
    fails("1,nan,1,\n", "column 2 %(age%) is 'nan', allowed: empty, or a finite number")
    fails("1,1e39,1,\n", "column 2 %(age%) is '1e39', allowed: numbers that f32 can hold")
    fails("1,2,1,5|\n", "column 4 %(history%) is '5|', allowed: an id behind the last separator")
    fails("1,2,1,\"5\n", "column 4 %(history%) is '\"5', allowed: a field between quotation marks")
    fails("1,2,1\n", "3 columns, wanted 4: '1,2,1'")
    fails("1,2,1,,\n", "more than 4 columns, wanted 4")
    fails("\n", "the line is empty, wanted columns: 4")
    assert.error_matches(function() samples(csv(write("l", "1,2,1," .. ("1"):rep(2 ^ 21)))) end,
      "a line of more than 1048576 bytes")
  end)

  it("says what is wrong with a description", function()
    local path = write("d.csv", text)
    local function fails(column, pattern, args)
      args = args or {}
      args.columns = { columns[1], column }
      assert.error_matches(function() csv(path, args) end, pattern)
    end
    fails({ name = "a", kind = "word" }, "column 'a': kind is 'word', allowed: dense, ids, label, skip")
    fails({ name = "a", kind = "ids" }, "column 'a': argument 'rows' is missing")
    fails({ name = "a", kind = "ids", rows = 5, separator = "::" }, "separator is .*, wanted one character")
    fails({ name = "a", kind = "ids", rows = 5, separator = "," },
      "'a': separator 44, allowed: a character that is not the delimiter")
    fails({ name = "a", kind = "dense", rows = 5 }, "no argument 'rows'")
    fails({ name = "clicked", kind = "skip" }, "column 'clicked' is described twice")
    fails({ name = "b", kind = "label" }, "2 columns of labels, allowed: 0, 1")
    fails({ kind = "label" }, "columns%[2%] is a table, wanted { name =, kind =")
    assert.error_matches(function() csv(path, { columns = {} }) end, "columns is .*, wanted a list of descriptions")
    assert.error_matches(function() csv {} end, "path is .*, wanted the path of a file, or a list of paths")
    assert.error_matches(function() csv { path, 5 } end, "path%[2%] is")
  end)
end)
