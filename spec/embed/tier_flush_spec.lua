-- Row files of one table batch: they open together only when they are of one flush; files that were cut otherwise,
-- lost, emptied or damaged are refused; a flush that never came is told.
-- deadline: 120 s
local ffi = require "ffi"
local peri = require "perilune"
local shell = require "spec.support.shell"
local tier = require "spec.support.tier"
local collision = require "spec.support.collision"
local embed = peri.embed
local C, check = peri.ffi.C, peri.ffi.check

local info = ffi.new "peri_flush_info"
local function flush_of(batch)
  check(C.peri_tbe_flush_info(batch.ptr, info))
  return tonumber(info.number), tonumber(info.iteration), info.changed
end

local function refused(code, patterns, f, ...)
  local ok, err = pcall(f, ...)
  assert.is_false(ok)
  assert.equal(code, err.name, tostring(err))
  for _, pattern in ipairs(patterns) do
    assert.truthy(err.message:find(pattern), ("'%s' in: %s"):format(pattern, err.message))
  end
end

describe("row files of a table batch", function()
  local folder
  before_each(function()
    folder = tier.folder()
    C.peri_log_level_set(C.PERI_LOG_ERROR)
  end)
  after_each(function()
    collectgarbage()
    collectgarbage()
    C.peri_log_level_set(C.PERI_LOG_WARN)
    tier.remove(folder)
  end)

  local function two() return { { name = "a", rows = 40, cols = 4 }, { name = "b", rows = 70000, cols = 4 } } end
  local function make(tables)
    return embed.tbe.new { tables = tables or two(), device = "cpu", seed = 3,
      fused_params = { optimizer = "adagrad", learning_rate = 0.5,
        cache_params = { load_factor = 0.3, directory = folder } } }
  end
  --- One update of rows `ids` of both tables.
  local function step(batch, ids)
    local n = #ids
    local both = {}
    for k = 0, 1 do
      for i = 1, n do both[k * n + i] = ids[i] end
    end
    local blocks = batch:blocks { { table = 1, first_bag = 0, bags = 1, out_offset = 0, out_stride = 8 },
      { table = 2, first_bag = 1, bags = 1, out_offset = 4, out_stride = 8 } }
    batch:lookup(peri.tensor(both, "i64"), peri.tensor({ 0, n, 2 * n }, "i64"), blocks, 1,
      8):backward(peri.ones { 1, 8 })
  end
  local function rows(batch, t)
    return batch:read(t, "weight", 0, peri.empty(batch:state_shape(t, "weight"))):to_list()
  end
  --- Flushed files after `steps` updates of these rows, as { path -> bytes }.
  local function flushed(steps, ids)
    local batch = make()
    for _ = 1, steps do step(batch, ids) end
    batch:flush()
    batch:release()
    local copies = {}
    for _, path in ipairs(tier.files(folder)) do copies[path] = tier.read_file(path) end
    return copies
  end
  local function put(copies)
    for path, bytes in pairs(copies) do tier.write_file(path, bytes) end
  end

  it("carry the number of their flush, which only counts flushes of something", function()
    local batch = make()
    assert.same({ 0, 0, false }, { flush_of(batch) })
    step(batch, { 1, 2 })
    assert.same({ 0, 0, true }, { flush_of(batch) })
    batch:flush()
    assert.same({ 1, 1, false }, { flush_of(batch) })
    batch:flush()
    assert.same({ 1, 1, false }, { flush_of(batch) })
    batch:write(1, "weight", 3, peri.ones { 2, 4 })
    assert.same({ 1, 1, true }, { flush_of(batch) })
    batch:flush()
    assert.same({ 2, 1, false }, { flush_of(batch) })
    batch:set_iteration(7)
    batch:flush()
    assert.same({ 3, 7, false }, { flush_of(batch) })
    batch:release()
    batch = make()
    assert.same({ 3, 7, false }, { flush_of(batch) })
    batch:release()
  end)

  it("are flushed in two halves, with no update between them", function()
    local batch = make()
    local function commit() check(C.peri_tbe_flush_commit(batch.ptr, 5, 99)) end
    step(batch, { 1 })
    refused("EINVAL", { "not prepared" }, commit)
    check(C.peri_tbe_flush_prepare(batch.ptr))
    step(batch, { 2 })
    refused("EINVAL", { "or updated since" }, commit)
    check(C.peri_tbe_flush_prepare(batch.ptr))
    batch:write(1, "weight", 3, peri.ones { 2, 4 })
    refused("EINVAL", { "or updated since" }, commit)
    check(C.peri_tbe_flush_prepare(batch.ptr))
    assert.same({ 0, 0, true }, { flush_of(batch) })
    commit()
    assert.same({ 5, 2, false }, { flush_of(batch) })
    batch:flush()
    assert.same({ 5, 2, false }, { flush_of(batch) })
    refused("EINVAL", { "flush 0 with stamp 99" }, function() check(C.peri_tbe_flush_commit(batch.ptr, 0, 99)) end)
    batch:release()
  end)

  it("are refused when they are of different flushes, or of different runs", function()
    local old = flushed(2, { 1, 2, 3 })
    local new = flushed(3, { 3, 4 })
    tier.remove(folder .. "/*.peri")
    local other = flushed(2, { 5, 6 })
    local a, b = unpack(tier.files(folder))
    for _, case in ipairs { { old[a], new[b], "flush 1, iteration 2", "flush 2, iteration 5" },
      { new[a], old[b], "flush 2, iteration 5", "flush 1, iteration 2" },
      { old[a], other[b], "flush 1, iteration 2", "of another run" } } do
      put { [a] = case[1], [b] = case[2] }
      refused("EMISMATCH", { "a%.rows.*b%.rows", "must be of the same flush", case[3], case[4] }, make)
    end
    put(new)
    local batch = make()
    assert.equal(5, batch:iteration())
    batch:release()
  end)

  it("are refused when one is lost, and nothing new is left behind", function()
    local copies = flushed(2, { 1, 2, 3 })
    for path in pairs(copies) do
      os.remove(path)
      refused("EMISMATCH", { "a%.rows.*b%.rows", "flush 0, iteration 0", "flush 1, iteration 2",
        "must be of the same flush" }, make)
      assert.equal(1, #tier.files(folder))
      put(copies)
    end
    make():release()
  end)

  it("are refused when they are empty, and stay so", function()
    local copies = flushed(1, { 1 })
    for path in pairs(copies) do
      tier.write_file(path, "")
      refused("EFORMAT", { "row file '.*': 0 bytes, a header needs 4096" }, make)
      assert.equal(0, #tier.read_file(path))
      put(copies)
    end
  end)

  it("are refused when the table is cut or shaped in another way than the files that lie there", function()
    local whole = { name = "t", rows = 50, cols = 8 }
    local function with(change)
      local x = {}
      for key, value in pairs(whole) do x[key] = value end
      for key, value in pairs(change) do x[key] = value end
      return { x }
    end
    local function there(tables)
      tier.remove(folder .. "/*")
      local batch = make(tables)
      batch:flush()
      batch:release()
    end
    local function other(change, ...)
      refused("EMISMATCH", { "table 't'", "go on with what wrote them, or name another directory", ... }, make,
        with(change))
      assert.equal(1, #tier.files(folder)) -- nothing was made
    end
    there { whole }
    other({ rows = 60 }, "rows 0%.%.50 of columns 0%.%.8", "wanted are rows 0%.%.60")
    other({ cols = 4 }, "rows 0%.%.50 of columns 0%.%.8", "wanted are rows 0%.%.50 of columns 0%.%.4")
    other({ rows = 25, total_rows = 50 }, "rows 0%.%.50 of columns 0%.%.8")
    other({ rows = 25, row_offset = 25, total_rows = 50 }, "rows 0%.%.50 of columns 0%.%.8")
    there(with { rows = 25, row_offset = 25, total_rows = 50 })
    other({}, "rows 25%.%.50 of columns 0%.%.8")
    other({ rows = 17, row_offset = 17, total_rows = 50 }, "rows 25%.%.50")
    make(with { rows = 25, total_rows = 50 }):release() -- the other half
    make({ { name = "t2", rows = 5, cols = 8 }, { name = "T", rows = 50, cols = 8 } }):release() -- other tables
  end)

  it("notice every record that turned to zeros, moved, or belongs to another table, and a map that changed", function()
    local copies = flushed(2, { 1, 2, 3, 30 })
    local batch = make()
    local want = { rows(batch, 1), rows(batch, 2) }
    batch:release()
    for t, name in ipairs { "a", "b" } do
      local count = two()[t].rows
      local path = tier.files(folder)[t]
      local bytes, size = copies[path], tier.record_bytes(path, count)
      local function at(row) return 4096 + row * size end
      local function record(row, from) return (from or bytes):sub(at(row) + 1, at(row + 1)) end
      local function with(changes)
        local text = bytes
        for row, new in pairs(changes) do text = text:sub(1, at(row)) .. new .. text:sub(at(row + 1) + 1) end
        tier.write_file(path, text)
      end
      local function damaged(row)
        local again = make()
        refused("EFORMAT", { ("row file '.*%s%%.rows.*': row %d of table '%s' is damaged"):format(name, row, name) },
          rows, again, t)
        again:release()
      end
      local zeros = ("\0"):rep(size)
      for _, row in ipairs { 1, 3, 30 } do
        with { [row] = zeros }
        damaged(row)
      end
      with { [1] = record(2), [2] = record(1) }
      damaged(1)
      with { [1] = zeros, [9] = record(1) }
      damaged(1)
      with { [9] = record(1) } -- a row that was never written
      damaged(9)
      local other = tier.files(folder)[3 - t]
      with { [2] = record(2, copies[other]) }
      damaged(2)
      local map = #bytes - math.ceil(count / 64) * 8
      for _, place in ipairs { map, map + 3, #bytes - 1 } do
        tier.write_file(path, bytes:sub(1, place) .. string.char((bytes:byte(place + 1) + 16) % 256)
          .. bytes:sub(place + 2))
        refused("EFORMAT", { "row file '.*': the map of its written rows", "is damaged" }, make)
      end
      tier.write_file(path, bytes:sub(1, map) .. ("\0"):rep(#bytes - map))
      refused("EFORMAT", { "row file '.*': the map of its written rows", "is damaged" }, make)
      put(copies)
    end
    batch = make()
    assert.same(want, { rows(batch, 1), rows(batch, 2) })
    batch:release()
  end)

  it("keep which rows were written over many flushes and openings", function()
    local plain = embed.tbe.new { tables = two(), device = "cpu", seed = 3,
      fused_params = { optimizer = "adagrad", learning_rate = 0.5 } }
    for round = 1, 4 do
      local batch = make()
      for k = 1, 3 do
        local ids = { round, 10 + k, 39 - round * k % 7 }
        step(batch, ids)
        step(plain, ids)
      end
      batch:write(2, "weight", 69999 - round * 9000, peri.full({ 1, 4 }, round)) -- in other pages of the map
      plain:write(2, "weight", 69999 - round * 9000, peri.full({ 1, 4 }, round))
      batch:flush()
      batch:release()
    end
    local batch = make()
    for t = 1, 2 do assert.same(plain:state(t, "weight"):to_list(), rows(batch, t)) end
    batch:release()
  end)

  --- Call f with the fault at each of its passages in turn until it works; returns how often it failed. `after` runs
  --- after each failure.
  local function with_faults(point, code, f, after)
    for k = 1, 10000 do
      check(C.peri_fault_arm(point, k))
      local ok, result = pcall(f)
      check(C.peri_fault_arm(point, 0))
      if ok then return k - 1, result end
      assert.equal(code, result.name, tostring(result))
      after(result.message)
    end
    error "it never works"
  end

  it("are made, opened and flushed as a whole, whatever fails on the way", function()
    local failures, batch = with_faults("alloc", "ENOMEM", make, function()
      assert.equal("", (shell.run("ls -A " .. folder)))
    end)
    assert.is_true(failures > 10)
    local want
    failures = with_faults("row_write", "EIO", function()
      step(batch, { 1, 2, 3 })
      batch:write(2, "weight", 69999, peri.ones { 1, 4 })
      want = { rows(batch, 1), rows(batch, 2) }
      batch:flush()
    end, function(message) assert.matches("row file '.*': writing %d+ bytes at byte %d+: No space left on device",
      message) end)
    assert.is_true(failures >= 4) -- rows and map of both files
    batch:release()
    failures, batch = with_faults("row_read", "EIO", make, function(message)
      assert.matches("row file '.*': reading %d+ bytes at byte %d+: Input/output error", message)
    end)
    assert.is_true(failures >= 2)
    assert.same(want, { rows(batch, 1), rows(batch, 2) })
    batch:release()
    failures, batch = with_faults("alloc", "ENOMEM", make, function() assert.equal(2, #tier.files(folder)) end)
    assert.is_true(failures > 10)
    batch:release()
  end)

  --- What a script that makes the table batch and does `what` prints.
  local function printed(what)
    return (shell.luajit(([[
      local peri = require "perilune"
      local batch = peri.embed.tbe.new { tables = { { name = "a", rows = 40, cols = 4 } }, seed = 3, fused_params = { optimizer = "sgd",
        learning_rate = 1, cache_params = { load_factor = %s, directory = %q } } }
      local function step()
        batch:lookup(peri.tensor({ 1 }, "i64"), peri.tensor({ 0, 1 }, "i64"), batch:blocks { { table = 1, first_bag = 0, bags = 1,
          out_offset = 0, out_stride = 4 } }, 1, 4):backward(peri.ones { 1, 4 })
      end
      %s
      batch:release()]]):format("0.5", folder, what)))
  end

  it("that were removed, moved, replaced or cut off meanwhile are told by the next flush, whatever it has to write",
    function()
    ffi.cdef "int truncate(const char *, int64_t);"
    local random = collision.random(41)
    for case = 1, 24 do
      for _, path in ipairs(tier.files(folder)) do os.remove(path) end
      local batch, what = make(),
        ({ "removed", "moved", "replaced", "cut off", "moved back", "folder" })[(case - 1) % 6 + 1]
      for _ = 0, random(3) do step(batch, { random(40) - 1, random(40) - 1 }) end
      if random(2) == 1 then batch:flush() end
      local before = rows(batch, 1)
      local paths = tier.files(folder)
      local path = paths[random(#paths)]
      local aside = folder .. "-aside"
      if what == "removed" then os.remove(path)
      elseif what == "folder" then os.rename(folder, aside)
      elseif what == "cut off" then ffi.C.truncate(path, 4096 + random(100))
      else os.rename(path, aside) end
      if what == "replaced" then tier.write_file(path, tier.read_file(aside)) end
      if what == "moved back" then os.rename(aside, path) end
      if what == "moved back" then batch:flush() else
        local said = { replaced = "another file took its name", ["cut off"] = "cut off" }
        refused("EIO", { what == "folder" and "%.peri" or (path:gsub("[-.]", "%%%0")), said[what]
          or "removed or moved" }, batch.flush, batch)
      end
      if what ~= "cut off" then assert.same(before, rows(batch, 1)) end
      if what == "folder" then os.rename(aside, folder) end
      os.remove(aside)
      batch:release()
    end
  end)

  it("are found by a flush wherever the process has gone", function()
    ffi.cdef "int chdir(const char *); char *getcwd(char *, size_t);"
    local here, room, place = ffi.new("char[4096]"), 4096, folder
    assert(ffi.C.getcwd(here, room) ~= nil)
    ffi.C.chdir(place)
    folder = "."
    local batch = make()
    folder = place
    ffi.C.chdir(here)
    step(batch, { 1 })
    batch:flush()
    batch:release()
    assert.equal(2, #tier.files(folder))
  end)

  it("tell what a release without a flush costs", function()
    assert.equal("", printed "")
    assert.equal(0, #tier.files(folder)) -- nothing was ever written
    assert.equal("", printed "step() batch:flush()")
    assert.matches("warning: row file '.*a%.rows.*' is closed without a flush: it stays at flush 1, iteration 1, "
      .. "later updates are lost", printed "step()")
    assert.equal("", printed "") -- and indeed it opens
    assert.matches("warning: row file '.*a%.rows.*' is closed without a flush: its rows are of different times, so it "
      .. "will not open again", printed [[batch:write(1, "weight", 3, peri.ones { 2, 4 })]])
    assert.matches("was not flushed before its process ended %(the last flush was number 1, of iteration 1%)",
      printed "")
  end)
end)
