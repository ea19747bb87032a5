-- Tables in files: whatever the cache holds, lookups and updates have the bits of tables in memory; flushes, reopened
-- files, and everything that can be wrong with a file.
-- deadline: 300 s
-- cuda: always
-- takes: 7 s
local ffi = require "ffi"
local peri = require "perilune"
local support = require "spec.support.tbe"
local tier = require "spec.support.tier"
local embed = peri.embed
local C, check = peri.ffi.C, peri.ffi.check

local function fails(pattern, f, ...)
  local ok, err = pcall(f, ...)
  assert.is_false(ok)
  assert.truthy(tostring(err):find(pattern), ("'%s' in: %s"):format(pattern, tostring(err)))
end

for _, device in ipairs(require "spec.support.devices") do
  local function t(list, dtype, shape) return peri.tensor(list, dtype or "f32", device, shape) end

  describe("tables in files on " .. device, function()
    local folder
    before_each(function() folder = tier.folder() end)
    after_each(function()
      C.peri_fault_arm("row_read", 0)
      C.peri_fault_arm("row_write", 0)
      collectgarbage()
      collectgarbage()
      tier.remove(folder)
    end)

    -- -- parity -------------------------------------------------------------------------------------------------------

    -- On the CPU all combinations; elsewhere these six, which have each pair of two values.
    local covering = { ["0.05 LRU uring"] = "once", ["0.05 LFU threads"] = "ahead", ["0.2 LRU threads"] = "once",
      ["0.2 LFU uring"] = "ahead", ["1 LRU uring"] = "ahead", ["1 LFU threads"] = "once" }
    for _, factor in ipairs { 0.05, 0.2, 1.0 } do
      for _, algorithm in ipairs { "LRU", "LFU" } do
        for _, io in ipairs { "uring", "threads" } do
          local case = ("%g %s %s"):format(factor, algorithm, io)
          local function train(prefetch)
            local run = tier.run { device = device, factor = factor, algorithm = algorithm, prefetch = prefetch,
              steps = 50, optimizer = { optimizer = "rowwise_adagrad", learning_rate = 0.1 } }
            local s = run.statistics
            if factor == 1 then
              assert.equal(0, s.evictions)
            else
              assert.is_true(s.evictions > 0 and s.rows_written > 0)
            end
            if prefetch then assert.is_true(s.prefetch_hits > s.misses) end
            assert.equal(s.bytes_read > 0, factor < 1)
          end
          if device == "cpu" or covering[case] then
            it("train 50 steps as tables in memory do: load factor " .. case, function()
              tier.with_io(io, function()
                for _, prefetch in ipairs { false, true } do
                  if device == "cpu" or (covering[case] == "ahead") == prefetch then train(prefetch) end
                end
              end)
            end)
          end
        end
      end
    end

    for i, ways in ipairs { 0, 1, 2, 7, 32, 256 } do
      local algorithm = i % 2 == 0 and "LRU" or "LFU"
      it(("train as tables in memory do in sets of %d: %s"):format(ways, algorithm), function()
        for _, prefetch in ipairs(device == "cpu" and { false, true } or { i % 4 < 2 }) do
          local run = tier.run { device = device, factor = 0.1, algorithm = algorithm, prefetch = prefetch, steps = 30,
            ways = ways, optimizer = { optimizer = "rowwise_adagrad", learning_rate = 0.1 } }
          local s = run.statistics
          assert.is_true(s.evictions > 0 and s.rows_written > 0)
          if ways == 0 or ways == 256 then assert.equal(0, s.set_conflicts) end
          if ways == 1 or ways == 2 then assert.is_true(s.set_conflicts > 0) end
        end
      end)
    end

    it("carry every optimizer's states with their rows", function()
      for _, optimizer in ipairs { { optimizer = "sgd" }, { optimizer = "adagrad" },
        { optimizer = "adam", weight_decay = 0.1 }, { optimizer = "adam", use_rowwise_bias_correction = true },
        { optimizer = "partial_rowwise_adam" }, { optimizer = "lamb" }, { optimizer = "partial_rowwise_lamb" },
        { optimizer = "lars_sgd" }, { optimizer = "lion" }, { optimizer = "rowwise_rmsprop_ar", ar_alpha = 3 },
        { optimizer = "rowwise_adagrad", weight_decay_mode = "cowclip",
          cowclip_regularization = { lower_bound = 0.1 } },
        { optimizer = "rowwise_adagrad", weight_decay_mode = "counter", weight_decay = 0.1,
          counter_based_regularization = { counter_weight_decay_mode = "l2", counter_halflife = 5 } } } do
        optimizer.learning_rate = 0.05
        tier.run { device = device, factor = 0.1, algorithm = "LRU", prefetch = true, steps = 12,
          optimizer = optimizer }
      end
    end)

    it("keep narrow weights, and round them as tables in memory do", function()
      for _, data_type in ipairs { "FP16", "BF16" } do
        for _, stochastic in ipairs { false, true } do
          tier.run { device = device, factor = 0.1, algorithm = "LRU", prefetch = true, steps = 12,
            data_type = data_type, optimizer = { optimizer = "rowwise_adagrad", learning_rate = 0.05,
              stochastic_rounding = stochastic } }
        end
      end
    end)

    it("weigh ids, scale bags, and give the weights their gradients, with bags that tables share", function()
      for _, factor in ipairs { 0.1, 1 } do
        tier.run { device = device, factor = factor, algorithm = "LFU", prefetch = true, steps = 10, weighted = true,
          optimizer = { optimizer = "adagrad", learning_rate = 0.05 } }
      end
    end)

    it("start as tables in memory do, whatever the initialiser and the part of the table", function()
      for _, init in ipairs { false, embed.normal(1, 2), embed.uniform(3, 4), embed.constant(0.5) } do
        local tables = {
          { name = "a", rows = 70, cols = 5, init = init or nil, row_offset = 10, col_offset = 3, total_rows = 100,
            total_cols = 9 },
          { name = "b", rows = 0, cols = 4, total_rows = 10 },
        }
        local pair = tier.pair { tables = tables, device = device, cache = { load_factor = 0.1 } }
        tier.assert_same(pair)
      end
    end)

    it("read and write ranges of rows, cached or not", function()
      local pair = tier.pair { tables = { { name = "a", rows = 100, cols = 4 } }, device = device,
        cache = { load_factor = 0.2 }, optimizer = { optimizer = "adagrad", learning_rate = 0.5 } }
      local blocks = { { table = 1, first_bag = 0, bags = 2, out_offset = 0, out_stride = 4 } }
      local function step()
        for _, b in ipairs { pair.plain, pair.cached } do
          local out = b:lookup(t({ 3, 5, 7, 90, 91 }, "i64"), t({ 0, 2, 5 }, "i64"), b:blocks(blocks), 2, 4)
          out:backward(t({ 1, 2, 3, 4, 5, 6, 7, 8 }, "f32", { 2, 4 }))
        end
      end
      step()
      tier.assert_same(pair)
      local rows, momentum = peri.Tensor.uniform({ 20, 4 }, -1, 1, 5, 0, "f64", device),
        peri.full({ 3, 4 }, 2, "f32", device)
      for _, b in ipairs { pair.plain, pair.cached } do
        b:write(1, "weight", 80, rows)
        b:write(1, "momentum1", 4, momentum)
      end
      tier.assert_same(pair)
      step()
      tier.assert_same(pair)
      local some = pair.cached:read(1, "momentum1", 90, peri.zeros({ 2, 4 }, "f32", device)):to_table()
      assert.same({ { 50, 72, 98, 128 }, { 50, 72, 98, 128 } }, some)
    end)

    it("hold nothing for lookups that no update will follow, and look again at tensors that changed", function()
      local pair = tier.pair { tables = { { name = "a", rows = 100, cols = 4 } }, device = device,
        cache = { load_factor = 0.1 } }
      local list = pair.cached:blocks { { table = 1, first_bag = 0, bags = 1, out_offset = 0, out_stride = 4 } }
      local ids, offsets = peri.zeros({ 10 }, "i64", device), t({ 0, 10 }, "i64")
      for k = 0, 9 do
        local numbers = {}
        for i = 1, 10 do numbers[i] = 10 * k + i - 1 end
        ids:copy(t(numbers, "i64"))
        local plain_list = pair.plain:blocks { { table = 1, first_bag = 0, bags = 1, out_offset = 0, out_stride = 4 } }
        local want = pair.plain:lookup(ids, offsets, plain_list, 1, 4):to_list()
        -- an update could follow, but does not
        assert.same(want, pair.cached:lookup(ids, offsets, list, 1, 4):to_list())
        peri.no_grad(function() assert.same(want, pair.cached:lookup(ids, offsets, list, 1, 4):to_list()) end)
      end
      local s = pair.cached:cache_statistics()
      assert.equal(100, s.misses)
      assert.equal(100, s.hits)
      assert.equal(90, s.evictions)
      assert.equal(0, s.rows_written)
    end)

    it("forget prefetches that nobody asks for, and tell conflicts", function()
      local pair = tier.pair { tables = { { name = "a", rows = 1000, cols = 4 } }, device = device,
        cache = { load_factor = 0.02 } }
      local list = pair.cached:blocks { { table = 1, first_bag = 0, bags = 1, out_offset = 0, out_stride = 4 } }
      local offsets, inputs = t({ 0, 8 }, "i64"), {}
      for k = 1, 30 do
        local numbers = {}
        for i = 1, 8 do numbers[i] = 8 * k + i end
        inputs[k] = t(numbers, "i64")
        pair.cached:prefetch(inputs[k], offsets, list)
      end
      local s = pair.cached:cache_statistics()
      assert.is_true(s.prefetched >= 20)
      assert.equal(240, s.prefetched + s.conflict_misses)
      for k = 30, 1, -1 do
        local want = pair.plain:lookup(inputs[k], offsets,
          pair.plain:blocks { { table = 1, first_bag = 0, bags = 1, out_offset = 0, out_stride = 4 } }, 1, 4):to_list()
        assert.same(want, pair.cached:lookup(inputs[k], offsets, list, 1, 4):to_list())
      end
    end)

    -- -- files --------------------------------------------------------------------------------------------------------

    local function stored(more)
      local args = { device = device, factor = 0.2, algorithm = "LRU", prefetch = false, steps = 6, directory = folder,
        optimizer = { optimizer = "adam", learning_rate = 0.05 } }
      for key, value in pairs(more or {}) do args[key] = value end
      return args
    end

    local counted = { optimizer = "rowwise_adagrad", learning_rate = 0.05, weight_decay_mode = "counter",
      weight_decay = 0.1, counter_based_regularization = { counter_weight_decay_mode = "adagradw",
        counter_halflife = 3 } }
    for name, more in pairs { adam = {}, ["row-wise Adagrad with counters"] = { optimizer = counted },
      ["another number of ways"] = {
      ways = 8 } } do
      it("go on from a flushed file as if nothing had happened, with " .. name, function()
        local run = tier.run(stored(more))
        run.cached:flush()
        run.cached:flush()
        run.cached:release()
        local args = stored(more)
        if args.ways then args.ways, args.algorithm = 3, "LFU" end
        local again = tier.make(run.tables, args, true)
        assert.equal(6, again:iteration())
        tier.assert_same { plain = run.plain, cached = again, tables = run.tables }
        tier.train(run.plain, again, run.tables, stored(more), 7)
        tier.assert_same { plain = run.plain, cached = again, tables = run.tables }
      end)
    end

    it("are locked while they are open", function()
      local run = tier.run(stored())
      fails("row file '.*a%.rows%-0%-400%.cols%-0%-7%.peri': another table or process has it open", tier.make,
        run.tables, stored(), true)
    end)

    it("are refused when they were not flushed", function()
      local run = tier.run(stored())
      run.cached:release()
      fails("row file '.*' of table '.*': it was not flushed before its process ended", tier.make, run.tables, stored(),
        true)
    end)

    it("are refused when they belong to something else", function()
      local run = tier.run(stored())
      run.cached:flush()
      run.cached:release()
      local tables = run.tables
      local function with(change, pattern)
        local others = {}
        for i, x in ipairs(tables) do others[i] = x end
        others[1] = {}
        for key, value in pairs(tables[1]) do others[1][key] = value end
        local args = stored()
        change(others, args)
        fails(pattern, tier.make, others, args, true)
      end
      with(function(_, args) args.seed = 4 end, "row file '.*' of table 'a': seed 3, the table has 4")
      with(function(x) x[1].total_rows = 401 end, "rows of the whole table 400, the table has 401")
      with(function(x) x[1].init = embed.constant(1) end,
        "start values default %(uniform, .*%), the table has constant %(1%)")
      with(function(_, args) args.optimizer = { optimizer = "sgd", learning_rate = 1 } end,
        "optimizer adam, the table has sgd")
      with(function(_, args) args.data_type = "FP16" end, "dtype f32, the table has f16")
    end)

    it("say what is wrong with them", function()
      local run = tier.run(stored())
      run.cached:flush()
      run.cached:release()
      local path = tier.files(folder)[1]
      assert.truthy(path:match "a%.rows%-0%-400%.cols%-0%-7%.peri$")
      local whole = tier.read_file(path)
      local function with(bytes, pattern)
        tier.write_file(path, bytes)
        fails("row file '.*a%.rows.*" .. pattern, tier.make, run.tables, stored(), true)
      end
      with("hello", "5 bytes, a header needs 4096")
      with(("x"):rep(5000), "not a row file")
      with(whole:sub(1, #whole - 100), ("%d bytes, its 400 rows need %d: it was cut off"):format(#whole - 100, #whole))
      with(whole:sub(1, 50) .. "!" .. whole:sub(52), "the header is damaged")
      with(whole:sub(1, 8) .. "\9" .. whole:sub(10), "version 9, this library reads 3")
      local record = tier.record_bytes(path, 400)
      local at = 4096 + 17 * record + 12
      tier.write_file(path, whole:sub(1, at) .. string.char((whole:byte(at + 1) + 1) % 256) .. whole:sub(at + 2))
      local again = tier.make(run.tables, stored(), true)
      fails("row file '.*': row 17 of table 'a' is damaged", tier.assert_same,
        { plain = run.plain, cached = again, tables = run.tables })
      again:release()
      tier.write_file(path, whole)
      tier.assert_same { plain = run.plain, cached = tier.make(run.tables, stored(), true), tables = run.tables }
    end)

    it("need a place", function()
      local run = stored { directory = folder .. "/none" }
      fails("row file '.*none/a%.rows.*' of table 'a': there is no directory '.*none'; make it first %(mkdir %-p%)",
        tier.make, tier.tables(), run, true)
      run.directory = "/proc"
      fails("row file '/proc/a%.rows.*': opening it", tier.make, tier.tables(), run, true)
    end)

    --- Train in another process, flush, train `more` steps, and die.
    local function crash(more)
      local script = folder .. "/crash.lua"
      tier.write_file(script, ([[
        local tier = require "spec.support.tier"
        local run = tier.run { device = %q, factor = 0.1, algorithm = "LRU", prefetch = true, steps = 4, directory = %q,
          optimizer = { optimizer = "sgd", learning_rate = 0.05 } }
        run.cached:flush()
        if %d > 0 then tier.train(run.plain, run.cached, run.tables, run.args, 5, 4 + %d) end
        require("ffi").cdef "int kill(int, int); int getpid(void);"
        require("ffi").C.kill(require("ffi").C.getpid(), 9)
      ]]):format(device, folder, more, more))
      assert.not_equal(0, os.execute(("luajit -e 'package.path = %q' %s >/dev/null 2>&1"):format(package.path, script)))
      return stored { optimizer = { optimizer = "sgd", learning_rate = 0.05 } }
    end

    it("end a crash with rows of different times, which the next process is told", function()
      fails("it was not flushed before its process ended", tier.make, tier.tables(), crash(6), true)
    end)

    it("are as the last flush left them after a crash that came before the next write", function()
      local args = crash(0)
      local again, plain = tier.make(tier.tables(), args, true), tier.make(tier.tables(), args, false)
      assert.equal(4, again:iteration())
      tier.train(plain, nil, nil, args, 1, 4)
      tier.assert_same { plain = plain, cached = again, tables = tier.tables() }
    end)

    it("open as some flush left them, or say that they were not flushed, after a crash at any moment", function()
      local script, args = folder .. "/crash.lua", stored { optimizer = { optimizer = "sgd", learning_rate = 0.05 },
        factor = 0.5 }
      tier.write_file(script, ([[
        local tier = require "spec.support.tier"
        local args = { device = %q, factor = 0.5, algorithm = "LRU", directory = %q,
          optimizer = { optimizer = "sgd", learning_rate = 0.05 } }
        local tables = tier.tables()
        local b = tier.make(tables, args, true)
        for step = 1, 1e6 do
          tier.train(nil, b, tables, args, step)
          b:flush()
          if step == 3 then io.open(%q, "w"):close() end
        end
      ]]):format(device, folder, folder .. "/ready"))
      for k = 1, 4 do
        os.execute("rm -f " .. folder .. "/*.peri " .. folder .. "/ready")
        local run = [[luajit -e 'package.path = %q' %s >/dev/null 2>&1 & child=$!
          for i in $(seq 500); do test -e %s/ready && break; sleep 0.02; done
          sleep 0.0%d; kill -9 $child; wait $child 2>/dev/null]]
        assert.not_equal(0, os.execute(run:format(package.path, script, folder, k * 17)))
        local ok, again = pcall(tier.make, tier.tables(), args, true)
        if ok then
          local plain = tier.make(tier.tables(), args, false)
          assert.is_true(again:iteration() >= 3)
          tier.train(plain, nil, nil, args, 1, again:iteration())
          tier.assert_same { plain = plain, cached = again, tables = tier.tables() }
          again:release()
        else
          local why = tostring(again)
          assert.truthy(why:find "it was not flushed before its process ended"
            or why:find "they must be of the same flush", why)
        end
      end
    end)

    -- -- failures -----------------------------------------------------------------------------------------------------

    it("lose nothing when the disk is full", function()
      local args = stored { factor = 0.1, steps = 3 }
      local run = tier.run(args)
      tier.train(run.plain, run.cached, run.tables, args, 1)
      check(C.peri_fault_arm("row_write", 1))
      fails("row file '.*': writing %d+ bytes at byte %d+: No space left on device", run.cached.flush, run.cached)
      run.cached:flush()
      tier.assert_same(run)
      local failed = 0
      -- a write fails behind a lookup; whoever needs the file next is told, once, and the next one goes on
      for step = 4, 20 do
        check(C.peri_fault_arm("row_write", 1))
        local ok, err = pcall(tier.train, nil, run.cached, run.tables, args, step, step)
        if not ok then
          assert.truthy(tostring(err):find "No space left on device")
          failed = failed + 1
          check(C.peri_fault_arm("row_write", 0))
          tier.train(nil, run.cached, run.tables, args, step, step)
        end
        tier.train(run.plain, nil, run.tables, args, step, step)
      end
      assert.is_true(failed > 0)
      check(C.peri_fault_arm("row_write", 0))
      pcall(run.cached.flush, run.cached) -- tells of the last step's write, if it failed
      run.cached:flush()
      tier.assert_same(run)
    end)

    it("bring a row again after a read failed", function()
      local args = stored { factor = 0.05, steps = 6 }
      local run = tier.run(args)
      local failed = 0
      for step = 7, 26 do
        check(C.peri_fault_arm("row_read", step % 2 + 1))
        local ok, err = pcall(tier.train, nil, run.cached, run.tables, args, step, step)
        check(C.peri_fault_arm("row_read", 0))
        if not ok then
          failed = failed + 1
          assert.truthy(tostring(err):find "row file '.*': reading %d+ bytes at byte %d+: Input/output error")
          tier.train(nil, run.cached, run.tables, args, step, step)
        end
        tier.train(run.plain, nil, run.tables, args, step, step)
      end
      assert.is_true(failed > 2)
      tier.assert_same(run)
    end)

    it("say by how much a cache is too small", function()
      local pair = tier.pair { tables = { { name = "tiny", rows = 100, cols = 4 } }, device = device,
        cache = { load_factor = 0.05 } }
      local list = pair.cached:blocks { { table = 1, first_bag = 0, bags = 1, out_offset = 0, out_stride = 4 } }
      local function look(n)
        local numbers = {}
        for i = 1, 2 * n do numbers[i] = i % n end
        return pair.cached:lookup(t(numbers, "i64"), t({ 0, 2 * n }, "i64"), list, 1, 4)
      end
      look(5)
      fails("peri_tbe_lookup: table 'tiny': the batch needs 7 different rows, its cache holds 5 of 100; set a "
        .. "load_factor of 0%.07", look, 7)
      fails("needs 100 different rows, .*; set a load_factor of 1 %(less", look, 100)
      look(5)
      look(3)
    end)

    it("say what is wrong with ids, as tables in memory do", function()
      local pair = tier.pair { tables = { { name = "a", rows = 100, cols = 4 } }, device = device,
        cache = { load_factor = 0.1 }, features = { "f" } }
      local blocks = { { table = 1, first_bag = 0, bags = 2, out_offset = 0, out_stride = 4, feature = 1 } }
      local messages = {}
      for i, b in ipairs { pair.plain, pair.cached } do
        local ok, err = pcall(b.lookup, b, t({ 1, -1, 100, 2 }, "i64"), t({ 0, 1, 4 }, "i64"), b:blocks(blocks), 2, 4)
        assert.is_false(ok)
        messages[i] = tostring(err)
        assert.equal(1, b:statistics().bad_ids)
      end
      assert.equal(messages[1], messages[2])
      -- the first bag that is none, also where only its end is too far
      for _, offsets in ipairs { { 0, 1, 9 }, { -1, 1, 4 }, { 0, 3, 1 } } do
        local words = {}
        for i, b in ipairs { pair.plain, pair.cached } do
          local ok, err = pcall(b.lookup, b, t({ 1, 2, 3, 4 }, "i64"), t(offsets, "i64"), b:blocks(blocks), 2, 4)
          assert.is_false(ok)
          words[i] = tostring(err):gsub("^.-: ", "")
        end
        assert.equal(words[1], words[2])
      end
      fails("sample 1: offsets 3 and 1 make no bag of 4 ids", pair.cached.lookup, pair.cached, t({ 1, 2, 3, 4 }, "i64"),
        t({ 0, 3, 1 }, "i64"), pair.cached:blocks(blocks), 2, 4)
    end)

    it("refuse what they cannot do", function()
      local tables = { { name = "a", rows = 100, cols = 4 } }
      local function make(cache, optimizer)
        return embed.tbe.new { tables = tables, device = device, fused_params = {
          optimizer = optimizer or "sgd", cache_params = cache } }
      end
      fails("load_factor is 0, allowed: 0 < load_factor <= 1", make, { load_factor = 0 })
      fails("load_factor is 1.5, allowed: 0 < load_factor <= 1", make, { load_factor = 1.5 })
      fails("algorithm is 'FIFO', allowed: LFU, LRU", make, { algorithm = "FIFO" })
      fails("ways is %-1, allowed: whole numbers 0%.%.256", make, { ways = -1 })
      fails("ways is 257, allowed: whole numbers 0%.%.256", make, { ways = 257 })
      fails("ways is 1%.5, allowed: whole numbers 0%.%.256", make, { ways = 1.5 })
      fails("ways is a table, wanted a number", make, { ways = {} })
      fails("cache precision FP16 for a table of FP32; allowed: FP32", make, { precision = "FP16" })
      fails("no argument 'size'", make, { size = 3 })
      fails("cache_params is a number, wanted CacheParams", make, 3)
      fails("cached tables need a fused optimizer", make, {}, "none")
      for _, format in ipairs { "INT8", "INT8_HALF", "FP8", "INT4", "INT2" } do
        fails("cached tables hold f32, f16 or bf16; rows of bytes stay in memory", embed.tbe.new,
          { tables = tables, device = device, data_type = format,
            fused_params = { optimizer = "none", cache_params = {} } })
      end
      fails("reserved_memory is 9000000000000000 bytes, %d+ are available", make, { reserved_memory = 9e15 })
      local b = make {}
      fails("the rows of table 'a' are behind a cache, so there is no view of them", b.state, b, 1)
      fails("table 'a' has no state 'momentum2'; it has: weight", b.state, b, 1, "momentum2")
      fails("table 'a' has no state 'x'; it has: weight", b.read, b, 1, "x", 0, peri.zeros({ 1, 4 }, "f32", device))
      fails("rows 99 .. 101 of table 'a', allowed: 0..100", b.read, b, 1, "weight", 99,
        peri.zeros({ 2, 4 }, "f32", device))
      fails("2 dimensions and 4 columns", b.write, b, 1, "weight", 0, peri.zeros({ 2, 3 }, "f32", device))
      fails("cached tables have no dense gradients", b.apply_gradient, b, peri.zeros({ 3 }, "f32", device))
      assert.is_nil(support.maker(device)({ { name = "a", rows = 3, cols = 2 } }):cache_statistics())
    end)

    it("leave no objects and no memory behind", function()
      collectgarbage()
      collectgarbage()
      check(C.peri_device_synchronize(peri.ffi.device(device)))
      local objects, live = C.peri_mem_objects(), nil
      peri.scope(function()
        local pair = tier.pair { tables = tier.tables(), device = device, cache = { load_factor = 0.1 } }
        tier.train(pair.plain, pair.cached, pair.tables, stored(), 1, 3)
        live = ffi.cast("int64_t", C.peri_mem_objects())
        assert.is_true(live > objects)
      end)
      check(C.peri_device_synchronize(peri.ffi.device(device)))
      assert.equal(tonumber(objects), tonumber(C.peri_mem_objects()))
    end)
  end)
end
