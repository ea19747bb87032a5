-- Tables of a device whose rows are in the host's memory: behind a cache on the device (fused_uvm_caching), and where
-- the device's kernels reach them (fused_uvm). Whatever a script does with them, they have the bits of fused tables on
-- the CPU.
-- deadline: 300 s
-- cuda: always
local peri = require "perilune"
local support = require "spec.support.tbe"
local embed = peri.embed
local C, check = peri.ffi.C, peri.ffi.check

local device = "opaque"
local optimizers = { { optimizer = "sgd", weight_decay = 0.1, weight_decay_mode = "l2" }, { optimizer = "adagrad" },
  { optimizer = "rowwise_adagrad", max_norm = 0.9 }, { optimizer = "adam", weight_decay = 0.1 },
  { optimizer = "adam", use_rowwise_bias_correction = true }, { optimizer = "partial_rowwise_adam" },
  { optimizer = "lamb" }, { optimizer = "partial_rowwise_lamb" }, { optimizer = "lars_sgd" }, { optimizer = "lion" },
  { optimizer = "rowwise_rmsprop_ar", ar_alpha = 3 },
  { optimizer = "rowwise_adagrad", weight_decay_mode = "cowclip", cowclip_regularization = { lower_bound = 0.1 } },
  { optimizer = "rowwise_adagrad", weight_decay_mode = "counter", weight_decay = 0.1,
    counter_based_regularization = { counter_weight_decay_mode = "l2", counter_halflife = 5 } } }
--- What looks at all rows, or at whole tables: not behind a cache.
local whole = { { optimizer = "shampoo" },
  { optimizer = "emainplace_rowwise_adagrad", emainplace_mode = { step_ema = 3 } },
  { optimizer = "rowwise_adagrad", weight_decay_mode = "counter", weight_decay = 0.1, counter_based_regularization = {
    counter_weight_decay_mode = "l2", counter_halflife = 5, learning_rate_mode = "tail_id_lr_increase",
    tail_id_threshold = { val = 0.5, is_ratio = true }, max_counter_update_freq = 3 } } }

local TABLES = { { name = "a", rows = 90, cols = 6 }, { name = "b", rows = 130, cols = 16, pooling = "MEAN" } }
local BAGS, WIDTH = 5, 22

--- A table batch: on the CPU, or how = { cache = CacheParams, mapped =, data_type = } on the device.
local function make(optimizer, how)
  local params = { learning_rate = 0.05 }
  for key, value in pairs(optimizer) do params[key] = value end
  how = how or {}
  params.cache_params = how.cache
  local b = embed.tbe.new { tables = how.tables or TABLES, device = how.cpu and "cpu" or device, seed = 5,
    fused_params = params, mapped = how.mapped, data_type = how.data_type or "FP32" }
  return { b = b, device = how.cpu and "cpu" or device, list = b:blocks {
    { table = 1, first_bag = 0, bags = BAGS, out_offset = 0, out_stride = WIDTH },
    { table = 2, first_bag = BAGS, bags = BAGS, out_offset = 6, out_stride = WIDTH } } }
end

--- Numbers of a batch: low rows come often, some ids are repeated, -1 is nobody. most: rows of each table at most.
local function numbers(step, most)
  local draw, x = support.generator(500 + step), { ids = {}, offsets = { 0 } }
  for _, t in ipairs(TABLES) do
    for _ = 1, BAGS do
      for _ = 1, draw(4) do
        x.ids[#x.ids + 1] = draw(15) == 0 and -1 or draw(2) == 0 and draw(6) or draw(math.min(t.rows, most or t.rows))
      end
      x.offsets[#x.offsets + 1] = #x.ids
    end
  end
  x.grad = support.numbers(BAGS * WIDTH, draw)
  return x
end

--- A batch of those numbers for a table batch of make().
local function batch_of(m, x)
  local on = m.device
  return { batch = m.b:batch(peri.tensor(x.ids, "i64", on), peri.tensor(x.offsets, "i64", on), m.list),
    grad = peri.tensor(x.grad, "f32", on, { BAGS, WIDTH }) }
end

local function same(want, got, what)
  local a, b = want:to_list(), got:to_list()
  assert.equal(#a, #b)
  for i = 1, #a do
    if a[i] ~= b[i] and (a[i] == a[i] or b[i] == b[i]) then
      error(("%s, element %d: %.9g, wanted %.9g"):format(what, i, b[i], a[i]), 2)
    end
  end
end

--- All states of all tables are those of `reference`, on the CPU.
local function compare(reference, m)
  for t in ipairs(TABLES) do
    for _, name in ipairs(reference.b:state_names()) do
      local want = reference.b:state(t, name)
      local geometry = reference.b:state_geometry(name)
      local rows = geometry == "full" or geometry == "row"
      local got = rows and m.b:read(t, name, 0, peri.zeros(want:shape(), want:dtype(), m.device)) or m.b:state(t, name)
      same(want, got, ("table %d, %s"):format(t, name))
    end
  end
end

local function train(reference, m, first, last, prefetch)
  local ahead
  for step = first, last do
    local x = numbers(step)
    local r, y = batch_of(reference, x), ahead or batch_of(m, x)
    local want, got = r.batch:lookup(BAGS, WIDTH), y.batch:lookup(BAGS, WIDTH)
    if prefetch then
      ahead = batch_of(m, numbers(step + 1))
      ahead.batch:prefetch()
    end
    same(want, got, "output of step " .. step)
    want:backward(r.grad)
    got:backward(y.grad)
  end
end

local function settle()
  collectgarbage()
  collectgarbage()
  check(C.peri_device_synchronize(peri.ffi.device(device)))
end

describe("tables in the host's memory, behind a cache on a device,", function()
  for i, optimizer in ipairs(optimizers) do
    it(("have the bits of fused tables on the CPU: %d, %s"):format(i, optimizer.optimizer), function()
      local algorithm, prefetch = i % 2 == 0 and "LRU" or "LFU", i % 3 ~= 0
      local reference, m = make(optimizer, { cpu = true }),
        make(optimizer, { cache = { load_factor = 0.2, algorithm = algorithm,
        ways = ({ 0, 4, 2 })[i % 4] } }) -- or what the device has, 64
      train(reference, m, 1, 10, prefetch)
      compare(reference, m)
      m.b:flush()
      local s = m.b:cache_statistics()
      assert.equal("memory", s.io)
      assert.is_true(s.evictions > 0 and s.rows_written > 0 and s.rows_read > 0)
      assert.equal(prefetch, s.prefetch_hits > 0)
      train(reference, m, 11, 16, prefetch)
      compare(reference, m)
    end)
  end

  it("round narrow weights as fused tables do", function()
    for _, data_type in ipairs { "FP16", "BF16" } do
      for _, stochastic in ipairs { false, true } do
        local optimizer = { optimizer = "rowwise_adagrad", stochastic_rounding = stochastic }
        local reference = make(optimizer, { cpu = true, data_type = data_type })
        local m = make(optimizer, { data_type = data_type, cache = { load_factor = 0.35 } })
        train(reference, m, 1, 10, true)
        compare(reference, m)
      end
    end
  end)

  --- Some steps of whatever order a script may choose, on three streams; the reference makes the same steps in the same
  --- order.
  local function wander(seed, cache, optimizer)
    local draw = support.generator(40000 + seed)
    local reference, m = make(optimizer, { cpu = true }), make(optimizer, { cache = cache })
    local main = peri.stream.current(device)
    local streams, open, looked = { main, peri.stream.Stream(device), peri.stream.Stream(device) }, {}, {}
    for k = 1, 60 do
      local stream = streams[draw(3) + 1]
      stream:wait_stream(main)
      peri.stream.run(stream, function()
        local what = draw(12)
        if what < 3 and #open < 5 then -- a new batch, prefetched or not; its ids overlap with others'
          local x = numbers(1000 * seed + k, 60)
          local r, y = batch_of(reference, x), batch_of(m, x)
          if what < 2 then y.batch:prefetch() end
          open[#open + 1] = { r = r, y = y }
        elseif what < 6 and #open > 0 then -- a lookup, with its update to come, or not
          local o = table.remove(open, draw(#open) + 1)
          local function look(z) return z.batch:lookup(BAGS, WIDTH) end
          if what == 3 then
            peri.no_grad(function() same(look(o.r), look(o.y), ("seed %d, lookup %d"):format(seed, k)) end)
          else
            o.want, o.got = look(o.r), look(o.y)
            same(o.want, o.got, ("seed %d, output %d"):format(seed, k))
            looked[#looked + 1] = o
          end
        elseif what < 9 and #looked > 0 then -- the update of some batch, perhaps long after its rows have left
          local o = table.remove(looked, draw(#looked) + 1)
          o.want:backward(o.r.grad)
          o.got:backward(o.y.grad)
        elseif what == 9 then
          if draw(2) == 0 then table.remove(open) else table.remove(looked) end -- a batch that never comes
          collectgarbage()
        elseif what == 10 then
          local t, rows = draw(2) + 1, {}
          for row = draw(4), 40, 7 do rows[#rows + 1] = row end
          for _, z in ipairs { reference, m } do z.b:reset_rows(t, peri.tensor(rows, "i64", z.device)) end
        elseif draw(3) == 0 then
          m.b:flush()
        else
          local t, row = draw(2) + 1, draw(50)
          local values = support.numbers(20 * TABLES[t].cols, draw)
          for _, z in ipairs { reference, m } do
            z.b:write(t, "weight", row, peri.tensor(values, "f32", z.device, { 20, TABLES[t].cols }))
          end
        end
      end)
      main:wait_stream(stream)
    end
    compare(reference, m)
  end

  for seed = 1, 8 do
    it("keep their bits whatever is prefetched, looked up, updated, dropped, written and reset: " .. seed, function()
      local factor = ({ 0.35, 0.5, 1 })[seed % 3 + 1]
      check(C.peri_device_seed(peri.ffi.device(device), seed))
      peri.scope(wander, seed, { load_factor = factor, algorithm = seed % 2 == 0 and "LRU" or "LFU",
        ways = ({ 0, 3 })[seed % 4] }, optimizers[seed])
      settle()
    end)
  end

  it("say which table's cache is too small for a batch, and go on", function()
    local reference = make({ optimizer = "adam" }, { cpu = true })
    local m = make({ optimizer = "adam" }, { cache = { load_factor = 0.2 } })
    train(reference, m, 1, 2, false)
    local x = { ids = {}, offsets = { 0 }, grad = support.numbers(BAGS * WIDTH, support.generator(1)) }
    for i = 1, 40 do x.ids[i] = 2 * i end
    for i = 1, 2 * BAGS do x.offsets[i + 1] = i < BAGS and 0 or 40 end
    local y = batch_of(m, x)
    y.batch:prefetch() -- a hint: what fits comes
    assert.error_matches(function() y.batch:lookup(BAGS, WIDTH) end,
      "table 'a': the batch needs 40 different rows, its cache holds 18 of 90; set a load_factor of 0.4445 to 1")
    y = nil -- luacheck: ignore
    collectgarbage()
    compare(reference, m)
    train(reference, m, 3, 5, true)
    compare(reference, m)
  end)

  it("serve two table batches on one stream and one on two", function()
    local reference = make({ optimizer = "adagrad" }, { cpu = true })
    local a = make({ optimizer = "adagrad" }, { cache = { load_factor = 0.4 } })
    local b = make({ optimizer = "adagrad" }, { cache = { load_factor = 0.6, algorithm = "LFU" } })
    local side, main = peri.stream.Stream(device), peri.stream.current(device)
    for step = 1, 10 do
      local x, later = numbers(step), numbers(step + 1)
      local r, y, z = batch_of(reference, x), batch_of(a, x), batch_of(b, x)
      local want, got, also = r.batch:lookup(BAGS, WIDTH), y.batch:lookup(BAGS, WIDTH), z.batch:lookup(BAGS, WIDTH)
      local ahead = { batch_of(a, later), batch_of(b, later) }
      side:wait_stream(main)
      peri.stream.run(side, function()
        for _, p in ipairs(ahead) do p.batch:prefetch() end
      end)
      same(want, got, "output")
      same(want, also, "output")
      want:backward(r.grad)
      got:backward(y.grad)
      also:backward(z.grad)
      main:wait_stream(side)
    end
    compare(reference, a)
    compare(reference, b)
  end)

  it("leave nothing behind when they go with changed rows and rows on their way", function()
    settle()
    local objects = C.peri_mem_objects()
    peri.scope(function()
      local reference, m = make({ optimizer = "adam" }, { cpu = true }),
        make({ optimizer = "adam" }, { cache = { load_factor = 0.4 } })
      train(reference, m, 1, 3, true)
      batch_of(m, numbers(9)).batch:prefetch()
      assert.is_true(tonumber(C.peri_mem_objects()) > tonumber(objects))
    end)
    settle()
    assert.equal(tonumber(objects), tonumber(C.peri_mem_objects()))
  end)

  it("are refused where there is no room", function()
    local function big(cache, more)
      local args = { tables = { { name = "huge", rows = 2 ^ 40, cols = 64 } }, device = device,
        fused_params = { optimizer = "sgd", cache_params = cache } }
      for key, value in pairs(more or {}) do args[key] = value end
      return embed.tbe.new(args)
    end
    assert.error_matches(function() big { load_factor = 1e-10 } end,
      "table 'huge': its 1099511627776 rows need %d+ MB of the host's memory with their states, %d+ MB are available; "
      .. "give its cache_params a directory")
    assert.error_matches(function() big({ load_factor = 0.1, reserved_memory = 9e15 }) end,
      "reserved_memory is 9000000000000000 bytes, %d+ are available")
    assert.error_matches(function() big({ load_factor = 0.1 }, { mapped = true }) end,
      "mapped, or behind a cache, not both")
  end)

  it("leave to others what they are told to, of the device's memory", function()
    local function slots_of(reserved)
      local b = embed.tbe.new { tables = { { name = "t", rows = 1000, cols = 1000 } }, device = device, -- 4 MB
        fused_params = { optimizer = "sgd", cache_params = { load_factor = 1, reserved_memory = reserved } } }
      local slots = b:cache_statistics().slots
      b:release()
      check(C.peri_device_synchronize(peri.ffi.device(device)))
      return tonumber(slots)
    end
    assert.equal(1000, slots_of(0))
    local _, err = pcall(slots_of, 9e15)
    local left = tonumber(tostring(err):match "bytes, (%d+) are available")
    C.peri_log_level_set(C.PERI_LOG_ERROR) -- it is a warning
    local slots = slots_of(math.floor(left - 1e6)) -- 1 MB is left
    C.peri_log_level_set(C.PERI_LOG_WARN)
    assert.is_true(slots > 200 and slots < 260, slots)
  end)
end)

describe("tables that a device's kernels reach in the host's memory", function()
  for _, list in ipairs { optimizers, whole } do
    for i, optimizer in ipairs(list) do
      local cpu = list == optimizers -- the products of matrices in Shampoo are summed as each device likes
      it(("have the bits of fused tables%s: %d, %s"):format(cpu and " on the CPU" or "", i, optimizer.optimizer),
        function()
        local reference, m = make(optimizer, { cpu = cpu }), make(optimizer, { mapped = true })
        train(reference, m, 1, 8, false)
        compare(reference, m)
        for _, name in ipairs(m.b:state_names()) do
          local geometry = m.b:state_geometry(name)
          assert.equal(geometry == "full" or geometry == "row", m.b:state(1, name):is_mapped())
        end
        assert.is_false(reference.b:state(1):is_mapped())
        assert.is_nil(m.b:cache_statistics())
      end)
    end
  end

  it("are tensors of the device: copied, changed, and read", function()
    local m = make({ optimizer = "sgd" }, { mapped = true })
    local w = m.b:state(1)
    local here = w:to(nil, "cpu")
    w:fill(3)
    assert.same(3, w:to_list()[7])
    w:copy(here)
    assert.same(here:to_list(), w:to_list())
    local twice = w * 2
    assert.is_false(twice:is_mapped())
    w:copy(twice)
    assert.equal(here:to_list()[11] * 2, w:to_list()[11])
    m.b:reset_rows(1, peri.tensor({ 0, 1 }, "i64", device))
    assert.equal(here:to_list()[11], w:to_list()[11])
  end)

  it("are rows of bytes, too", function()
    local draw = support.generator(77)
    local rows = peri.tensor(support.numbers(90 * 6, draw), "f32", nil, { 90, 6 })
    for _, format in ipairs { "INT8", "INT4", "FP8" } do
      local function bytes(on, mapped)
        local b = embed.tbe.new { tables = { { name = "q", rows = 90, cols = 6 } }, device = on, data_type = format,
          mapped = mapped, fused_params = { optimizer = "none" } }
        b:write(1, "weight", 0, rows:to(nil, on))
        local list = b:blocks { { table = 1, first_bag = 0, bags = 2, out_offset = 0, out_stride = 6 } }
        return b:lookup(peri.tensor({ 3, 89, 3 }, "i64", on), peri.tensor({ 0, 1, 3 }, "i64", on), list, 2, 6), b
      end
      local got, b = bytes(device, true)
      assert.is_true(b:state(1):is_mapped())
      same((bytes("cpu", false)), got, format)
    end
  end)

  it("leave nothing behind", function()
    settle()
    local objects, live = C.peri_mem_objects(), tonumber(C.peri_mem_live())
    peri.scope(function()
      local reference, m = make({ optimizer = "adam" }, { cpu = true }), make({ optimizer = "adam" }, { mapped = true })
      train(reference, m, 1, 2, false)
    end)
    settle()
    assert.equal(tonumber(objects), tonumber(C.peri_mem_objects()))
    assert.is_true(math.abs(tonumber(C.peri_mem_live()) - live) < 1e6)
  end)
end)
