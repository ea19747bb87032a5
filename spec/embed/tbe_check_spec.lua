-- Table batches: bounds checks, malformed arguments, state, statistics, life and memory, on both devices.
-- deadline: 300 s
local peri = require "perilune"
local ffi = require "ffi"
local sim = require "perilune.dist.sim"
local support = require "spec.support.tbe"
local embed = peri.embed
local C, check = peri.ffi.C, peri.ffi.check
local generator, numbers, bags_of = support.generator, support.numbers, support.bags_of

for _, device in ipairs { "cpu", "opaque" } do
  local function t(list, dtype) return peri.tensor(list, dtype, device) end
  local batch = support.maker(device)

  describe("table batch on " .. device, function()
    -- -- checks -------------------------------------------------------------------------------------------------------

    local bad = { ids = { 0, 1, 2, 5, -3 }, offsets = { 0, 2, 3, 5 } }
    local function checked(mode)
      local b = batch({ { name = "songs", rows = 3, cols = 2, init = embed.constant(1) } },
        { optimizer = "sgd", learning_rate = 1, bounds_check_mode = mode }, { features = { "heard", "liked" } })
      return b, b:blocks { { table = 1, first_bag = 0, bags = 3, out_offset = 0, out_stride = 2, feature = 2 } }
    end

    it("names table, feature, sample and id when an id is out of range", function()
      local b, list = checked "FATAL"
      local ids, offsets = t(bad.ids, "i64"), t(bad.offsets, "i64")
      local message = "peri_tbe_lookup: table 'songs', feature 'liked', sample 2: id 5 at place 0 of the bag, "
        .. "allowed: 0%.%.2, or %-1 for none %(2 such ids%)"
      local ok, err = pcall(function() b:lookup(ids, offsets, list, 3, 2) end)
      assert.is_false(ok)
      assert.equal("ERANGE", err.name)
      assert.matches(message, err.message)
      assert.same(bad.ids, ids:to_list())
      assert.equal(2, b:statistics().bad_ids)
      assert.error_matches(function() b:lookup(t(bad.ids, "i32"), offsets, list, 3, 2) end, "id 5 at place 0")
      assert.same({ { 2, 2 }, { 1, 1 }, { 0, 0 } }, b:lookup(t({ 0, 1, 2, -1, -1 }, "i64"), offsets, list, 3,
        2):to_table())
    end)

    if device ~= "cpu" then
      describe("in a loop that trains", function()
        local b, list, offsets, ids
        before_each(function()
          b, list = checked "FATAL"
          offsets, ids = t(bad.offsets, "i64"), t({ 0, 1, 2, 1, 0 }, "i64")
        end)
        local function step() b:lookup(ids, offsets, list, 3, 2):backward(peri.ones({ 3, 2 }, "f32", device)) end
        --- A lookup of bad ids, which is not judged yet.
        local function slip() return b:lookup(t(bad.ids, "i64"), offsets, list, 3, 2) end
        local message = "peri_tbe_lookup: table 'songs', feature 'liked', sample 2: id 5 at place 0 of the bag, "
          .. "allowed: 0%.%.2, or %-1 for none %(2 such ids%)"
        local function fails(f, ...)
          local ok, err = pcall(f, ...)
          assert.is_false(ok)
          assert.equal("ERANGE", err.name)
          assert.matches(message, err.message)
        end

        it("tells of bad ids where a number is read, and once", function()
          step()
          local out = slip()
          local ok, why = pcall(out.to_list, out)
          assert.is_false(ok)
          assert.matches(message .. " %(of an earlier lookup%)", why.message)
          assert.same({ -2, -2, 0, 0, 0, 0 }, out:to_list()) -- of rows that the step has made -1, -1 and 0
          step()
          slip()
          fails(peri.ones({ 1 }, "f32", device).item, peri.ones({ 1 }, "f32", device))
          step()
          slip()
          local now = peri.stream.current(device)
          fails(now.synchronize, now)
          step()
        end)

        it("tells of them in the next step's lookup at the latest, and changes nothing in that call", function()
          step()
          local updates = b:statistics().updates
          local out = slip()
          local ok, err = pcall(out.backward, out, peri.ones({ 3, 2 }, "f32", device))
          if ok then
            fails(step)
            assert.equal(updates + 1, b:statistics().updates)
          else -- the report was there already
            assert.matches(message, err.message)
          end
          step()
        end)

        it("judges at once what no backward pass has led to", function()
          fails(slip)
          step()
          slip() -- there may be one for each backward pass
          fails(slip)
          fails(slip)
        end)

        it("tells it to the rank that looked up", function()
          local heard = {}
          sim.run(2, function(rank, world)
            local mine, blocks = checked "FATAL"
            mine:lookup(ids, offsets, blocks, 3, 2):backward(peri.ones({ 3, 2 }, "f32", device))
            if rank == 0 then mine:lookup(t(bad.ids, "i64"), offsets, blocks, 3, 2) end
            world:barrier():wait()
            local one = peri.ones({ 1 }, "f32", device)
            if rank == 1 then heard[2] = pcall(one.item, one) end
            world:barrier():wait()
            if rank == 0 then heard[1] = pcall(one.item, one) end
          end)
          assert.same({ false, true }, heard)
        end)

        it("is logged, if the tables are given up before anybody has heard it; they are not kept for it", function()
          b, list = nil, nil
          collectgarbage()
          collectgarbage()
          local before = C.peri_mem_objects()
          local log = os.tmpname()
          ffi.cdef "int dup(int); int dup2(int, int); int open(const char *, int, ...); int close(int);"
          local stderr, file = ffi.C.dup(2), ffi.C.open(log, 1)
          ffi.C.dup2(file, 2)
          do
            local mine, blocks = checked "FATAL"
            mine:lookup(ids, offsets, blocks, 3, 2):backward(peri.ones({ 3, 2 }, "f32", device))
            mine:lookup(t(bad.ids, "i64"), offsets, blocks, 3, 2)
          end
          collectgarbage()
          collectgarbage()
          ffi.C.dup2(stderr, 2)
          ffi.C.close(file)
          ffi.C.close(stderr)
          assert.equal(before, C.peri_mem_objects())
          local text = assert(io.open(log)):read "*a"
          os.remove(log)
          assert.matches(message, text)
          assert.matches("of the last lookup in these tables", text)
        end)
      end)
    end

    for _, mode in ipairs { "WARNING", "IGNORE", "NONE" } do
      it("leaves bad ids out in mode " .. mode, function()
        local b, list = checked(mode)
        local ids = t(bad.ids, "i64")
        C.peri_log_level_set(C.PERI_LOG_ERROR)
        local out = b:lookup(ids, t(bad.offsets, "i64"), list, 3, 2)
        C.peri_log_level_set(C.PERI_LOG_WARN)
        assert.same({ { 2, 2 }, { 1, 1 }, { 0, 0 } }, out:to_table())
        out:backward(peri.ones({ 3, 2 }, "f32", device))
        assert.same({ { 0, 0 }, { 0, 0 }, { 0, 0 } }, b:state(1):to_table())
        assert.same(bad.ids, ids:to_list())
        assert.equal(mode == "NONE" and 0 or 2, b:statistics().bad_ids)
      end)
    end

    it("says which offsets make no bag", function()
      for _, mode in ipairs { "FATAL", "WARNING" } do
        local b, list = checked(mode)
        local function look(offsets)
          return function() b:lookup(t({ 0, 1, 2 }, "i64"), t(offsets, "i64"), list, 3, 2) end
        end
        assert.error_matches(look { 0, 2, 1, 3 },
          "table 'songs', feature 'liked', sample 1: offsets 2 and 1 make no bag of 3 ids")
        assert.error_matches(look { -1, 1, 1, 3 }, "sample 0: offsets %-1 and 1")
        assert.error_matches(look { 0, 1, 1, 4 }, "sample 2: offsets 1 and 4 make no bag of 3 ids")
        look { 0, 1, 1, 3 } ()
      end
    end)

    it("refuses malformed arguments", function()
      local function with(more)
        local table_config = { name = "a", rows = 3, cols = 2 }
        for key, value in pairs(more) do table_config[key] = value end
        return function() batch { table_config } end
      end
      assert.error_matches(with { name = "" }, "table 0 has no name")
      assert.error_matches(with { rows = -1 }, "table 'a' has %-1 rows")
      assert.error_matches(with { cols = 0 }, "table 'a' has 0 columns, allowed: 1")
      assert.error_matches(with { row_offset = 2, total_rows = 4 }, "3 rows from 2 on of 4")
      assert.error_matches(with { col_offset = 3, total_cols = 4 }, "2 columns from 3 on of 4")
      assert.error_matches(with { pooling = "MAX" }, "pooling is 'MAX', allowed: SUM, MEAN")
      assert.error_matches(with { init = { kind = C.PERI_INIT_UNIFORM, a = 1, b = 0 } },
        "init parameters 1, 0, allowed: finite")
      assert.error_matches(with { init = { kind = C.PERI_INIT_NORMAL, a = 0, b = -1 } },
        "init parameters 0, %-1, allowed: finite")
      local function fused(p) return function() batch({ { name = "a", rows = 3, cols = 2 } }, p) end end
      assert.error_matches(fused { optimizer = "ftrl" },
        "optimizer is 'ftrl', allowed: adagrad, adam, emainplace_rowwise_adagrad, lamb, lars_sgd, lion, ")
      assert.error_matches(fused { optimizer = "sgd", momentum = 0.9 }, "optimizer sgd has no momentum %(given: 0.9%)")
      assert.error_matches(fused { optimizer = "lars_sgd", momentum = 1 }, "momentum 1, allowed: 0 <= number < 1")
      assert.error_matches(fused { optimizer = "lars_sgd", eta = -1 }, "eta %-1, allowed: finite numbers >= 0")
      assert.error_matches(fused { optimizer = "lion", eps = 1e-8 }, "optimizer lion has no eps")
      assert.error_matches(fused { optimizer = "lion", use_rowwise_bias_correction = true },
        "lion has no row_bias_correction")
      assert.error_matches(fused { optimizer = "shampoo", eps = 0 }, "shampoo wants eps > 0 %(given: 0%)")
      assert.error_matches(fused { optimizer = "shampoo", weight_decay = 1, weight_decay_mode = "l2" },
        "decouples weight decay")
      local s = batch({ { name = "a", rows = 3, cols = 2 } }, { optimizer = "shampoo" })
      assert.same({ 2, 2 }, s:state(1, "preconditioner"):shape())
      assert.error_matches(function() s:state(1, "momentum1") end,
        "has no state 'momentum1'; it has: weight, preconditioner")
      assert.error_matches(function() s:apply_gradient(peri.zeros({ 16 + 3 }, "f32", device)) end,
        "shampoo updates from the ids' gradients")
      local r = batch({ { name = "a", rows = 3, cols = 2 } }, { optimizer = "rowwise_rmsprop_ar" })
      assert.error_matches(function() r:state(1, "row_counter") end, "it has: weight, momentum1, prev_iter")
      assert.error_matches(fused { optimizer = "none", max_norm = 1 }, "optimizer none has no max_norm")
      assert.error_matches(fused { optimizer = "sgd", max_norm = -1 }, "max_norm %-1, allowed")
      assert.error_matches(fused { optimizer = "sgd", eps = 1 }, "optimizer sgd has no eps %(given: 1%)")
      assert.error_matches(fused { optimizer = "sgd", learning_rate = -1 }, "learning_rate %-1, allowed")
      assert.error_matches(fused { optimizer = "sgd", learning_rate = 0 / 0 }, "learning_rate .*nan, allowed")
      assert.error_matches(fused { optimizer = "adam", beta1 = 1 }, "beta1 1, allowed: 0 <= number < 1")
      assert.error_matches(fused { optimizer = "adagrad", weight_decay = 1 }, "without a weight_decay_mode")
      assert.error_matches(fused { optimizer = "rowwise_adagrad", weight_decay = 1 }, "without a weight_decay_mode")
      assert.error_matches(fused { optimizer = "adam", weight_decay_mode = "l2" }, "adam has no weight_decay_mode")
      assert.error_matches(fused { optimizer = "sgd", use_rowwise_bias_correction = true },
        "sgd has no row_bias_correction")
      assert.error_matches(fused { optimizer = "sgd", bounds_check_mode = "LOUD" },
        "bounds_check_mode is 'LOUD', allowed: FATAL")
      assert.error_matches(fused { optimizer = "sgd", rate = 1 }, "no argument 'rate'")
    end)

    it("refuses malformed arguments of averages and counters", function()
      local function fused(p) return function() batch({ { name = "a", rows = 3, cols = 2 } }, p) end end
      --- Row-wise Adagrad with this definition of mode "counter", or of "cowclip".
      local function counter(definition, decay)
        return fused { optimizer = "rowwise_adagrad", weight_decay_mode = "counter",
          counter_based_regularization = definition, weight_decay = decay }
      end
      local function clip(definition, decay)
        return fused { optimizer = "rowwise_adagrad", weight_decay_mode = "cowclip",
          cowclip_regularization = definition, weight_decay = decay }
      end
      local nan, inf = 0 / 0, 1 / 0
      assert.error_matches(fused { optimizer = "sgd", ema_beta = 0.5 }, "optimizer sgd has no ema_beta %(given: 0.5%)")
      assert.error_matches(fused { optimizer = "rowwise_rmsprop_ar", ema_beta = 1 },
        "ema_beta 1, allowed: 0 <= number < 1")
      assert.error_matches(fused { optimizer = "rowwise_rmsprop_ar", ar_alpha = -1 },
        "ar_alpha %-1, allowed: finite numbers >= 0")
      assert.error_matches(fused { optimizer = "rowwise_rmsprop_ar", min_shrinkage = 1.5 },
        "min_shrinkage 1.5, allowed: 0 <= number <= 1")
      fused { optimizer = "rowwise_rmsprop_ar", min_shrinkage = 1 } ()
      assert.error_matches(fused { optimizer = "rowwise_rmsprop_ar", weight_decay = 0.1 },
        "rowwise_rmsprop_ar has no weight_decay")

      local average = "emainplace_rowwise_adagrad"
      for _, name in ipairs { "EMAINPLACE_ROWWISE_ADAGRAD", "emainplace_row_wise_adagrad" } do
        assert.error_matches(fused { optimizer = name, eta = 1 }, "optimizer emainplace_rowwise_adagrad has no eta")
      end
      assert.error_matches(function() batch({ { name = "odd", rows = 3, cols = 5 } }, { optimizer = average }) end,
        "table 'odd' has 5 columns; emainplace_rowwise_adagrad wants an even number of them")
      assert.error_matches(fused { optimizer = "sgd", emainplace_mode = {} },
        "emainplace_mode of optimizer 'sgd', allowed")
      assert.error_matches(fused { optimizer = average, emainplace_mode = { step_ema = 0 } },
        "step_ema is 0, allowed: whole numbers 1")
      assert.error_matches(fused { optimizer = average, emainplace_mode = { step_start = -1 } },
        "step_start is %-1, allowed")
      assert.error_matches(fused { optimizer = average, emainplace_mode = { step_ema_coef = 1.1 } },
        "step_ema_coef 1.1, allowed: 0 <= number <= 1")
      assert.error_matches(fused { optimizer = average, emainplace_mode = { step_ema_coef = nan } },
        "step_ema_coef .*nan, allowed")
      assert.error_matches(fused { optimizer = average, emainplace_mode = { steps = 1 } },
        "emainplace_mode: no argument 'steps'")
      assert.error_matches(fused { optimizer = average, cache_params = {} },
        "cached tables cannot train with emainplace_rowwise_adagrad, which changes all rows")

      assert.error_matches(fused { optimizer = "sgd", weight_decay_mode = "counter" },
        "weight_decay_mode counter is of row%-wise Adagrad only, this is optimizer sgd")
      assert.error_matches(fused { optimizer = "adam", weight_decay_mode = "cowclip" },
        "weight_decay_mode cowclip is of row%-wise Adagrad")
      assert.error_matches(fused { optimizer = "rowwise_adagrad_with_counter", weight_decay_mode = "l2" },
        "weight_decay_mode 1 of optimizer rowwise_adagrad_with_counter, allowed: 3 %(counter%), 4 %(cowclip%)")
      assert.error_matches(fused { optimizer = "rowwise_adagrad", weight_decay_mode = "l2",
        counter_based_regularization = {} },
          "counter_based_regularization with weight_decay_mode 'l2', allowed: 'counter'")
      assert.error_matches(fused { optimizer = "rowwise_adagrad", weight_decay_mode = "counter",
        cowclip_regularization = {} }, "cowclip_regularization with weight_decay_mode 'counter', allowed: 'cowclip'")
      assert.error_matches(counter({ halflife = 3 }),
        "counter_based_regularization: no argument 'halflife'; allowed: adjustment_iter")
      assert.error_matches(counter({ counter_weight_decay_mode = "l1" }),
        "counter_weight_decay_mode is 'l1', allowed: adagradw, decouple")
      assert.error_matches(counter({ counter_halflife = -3 }), "counter_halflife is %-3, allowed: whole numbers %-2")
      assert.error_matches(counter({ counter_halflife = 1.5 }), "counter_halflife is 1.5, allowed")
      assert.error_matches(counter({ adjustment_iter = -2 }), "adjustment_iter is %-2, allowed: whole numbers %-1")
      assert.error_matches(counter({ adjustment_ub = -1 }), "adjustment_ub %-1, allowed: finite numbers >= 0")
      assert.error_matches(counter({ learning_rate_mode = "tail" }),
        "learning_rate_mode is 'tail', allowed: counter_sgd, equal, tail_id_")
      assert.error_matches(counter({ grad_sum_decay = "ctr_decay" }),
        "grad_sum_decay is 'ctr_decay', allowed: no_decay")
      assert.error_matches(counter({ tail_id_threshold = { val = inf } }),
        "tail_id_threshold inf, allowed: finite numbers >= 0")
      assert.error_matches(counter({ tail_id_threshold = { ratio = true } }), "tail_id_threshold: no argument 'ratio'")
      assert.error_matches(counter({ max_counter_update_freq = -1 }),
        "max_counter_update_freq is %-1, allowed: whole numbers 0")
      assert.error_matches(counter({}, 0.1),
        "weight_decay 0.1 without a counter_weight_decay_mode, allowed: l2, decouple, adagradw")
      for _, mode in ipairs { "l2", "decouple" } do
        assert.error_matches(counter({ counter_weight_decay_mode = mode }, 0.1),
          "counter_halflife %-1 with weight_decay 0.1 would make weights grow, allowed with counter_weight_decay_mode "
            .. mode .. ": >= 0")
      end
      assert.error_matches(clip({ counter_weight_decay_mode = "adagradw" }, 0.1),
        "counter_weight_decay_mode 3, allowed with cowclip: none")
      assert.error_matches(clip({}, 0.1),
        "weight_decay 0.1 without a counter_weight_decay_mode, allowed: l2, decouple %(spec/")
      assert.error_matches(clip({ lower_bound = -1 }), "lower_bound %-1, allowed")
      assert.error_matches(clip({ weight_norm_coefficient = nan }), "weight_norm_coefficient .*nan, allowed")
      assert.error_matches(clip({ adjustment_iter = 1 }), "cowclip_regularization: no argument 'adjustment_iter'")
      for _, definition in ipairs { { learning_rate_mode = "tail_id_lr_decrease" },
        { learning_rate_mode = "counter_sgd", tail_id_threshold = { val = 0.5, is_ratio = true } } } do
        assert.error_matches(fused { optimizer = "rowwise_adagrad", weight_decay_mode = "counter", cache_params = {},
          counter_based_regularization = definition }, "cached tables have no max_counter, which looks at all rows")
      end
    end)

    it("refuses malformed block lists and inputs", function()
      local b = batch({ { name = "a", rows = 3, cols = 2 } }, nil, { features = { "f" } })
      local function block(more)
        local x = { table = 1, first_bag = 0, bags = 2, out_offset = 0, out_stride = 2 }
        for key, value in pairs(more) do x[key] = value end
        return function() b:blocks { x } end
      end
      assert.error_matches(block { table = 2 }, "block 0: table 1, allowed: 0%.%.0")
      assert.error_matches(block { feature = 3 }, "feature 2, allowed: %-1%.%.0")
      assert.error_matches(block { first_bag = -1 }, "2 bags from bag %-1")
      assert.error_matches(block { bags = -1 }, "%-1 bags")
      assert.error_matches(block { out_offset = -2 }, "out_offset %-2")
      assert.error_matches(block { out_stride = 1 }, "out_stride 1 makes rows of table 'a' overlap, allowed: >= 2")
      assert.error_matches(block { bags = 2 ^ 40, out_stride = 2 ^ 40 }, "out_stride")
      local list = b:blocks { { table = 1, first_bag = 0, bags = 2, out_offset = 0, out_stride = 2 } }
      local ids, offsets = t({ 0, 1 }, "i64"), t({ 0, 1, 2 }, "i64")
      local function look(...)
        local a = { ... }
        return function() b:lookup(unpack(a, 1, 7)) end
      end
      assert.error_matches(look(t { 0, 1 }, offsets, list, 2, 2), "ids is f32 %[2%], allowed: i64, i32")
      assert.error_matches(look(ids, t({ 0, 1, 2 }, "f32"), list, 2, 2), "offsets is f32")
      assert.error_matches(look(ids, t({ 0, 1 }, "i64"), list, 2, 2), "offsets of 1 bags, the blocks need 2")
      assert.error_matches(look(ids, offsets, list, 2, 1),
        "the output is f32 %[2, 1%], the blocks write up to element 3")
      assert.error_matches(look(ids, offsets, list, 2, 2, t { 1 }), "1 weights for 2 ids")
      assert.error_matches(look(ids, offsets, list, 2, 2, t({ 1, 1 }, "i64")), "weights is i64")
      assert.error_matches(look(ids, offsets, list, 2, 2, nil, t { 1 }), "1 scales for 2 bags")
      assert.error_matches(look(t { { 0 }, { 1 } }:to "i64", offsets, list, 2, 2), "ids is i64 %[2, 1%], wanted 1 dim")
      local other = batch({ { name = "a", rows = 3, cols = 2 }, { name = "b", rows = 3, cols = 2 } })
      assert.error_matches(function() other:lookup(ids, offsets, list, 2, 2) end,
        "made for 1 tables, this table batch has 2")
      assert.error_matches(function() b:backward(ids, offsets, list, t { 1, 2, 3 }) end,
        "the gradient is f32 %[3%], the blocks read up to element 3")
      assert.error_matches(function() b:backward(ids, offsets, list, t { 1, 2, 3, 4 }, nil, nil, t { 1 }) end,
        "one for each of 2 ids")
      assert.error_matches(function() b:apply_gradient(t { 1 }) end, "no gradient of this table batch")
      assert.error_matches(function() b:state(2) end, "table 1, allowed: 0%.%.0")
      assert.error_matches(function() b:state(1, "momentum1") end, "table 'a' has no state 'momentum1'; it has: weight")
      assert.error_matches(function() b:leaf(1) end, "fused optimizer sgd")
      assert.error_matches(function() b:set_learning_rate(-1) end, "%-1, allowed")
      assert.error_matches(function() b:set_iteration(-1) end, "%-1, allowed")
      b:release()
      assert.error_matches(function() b:iteration() end, "was released")
    end)

    -- -- state and life -----------------------------------------------------------------------------------------------

    it("reads and writes rows of weights and state", function()
      local b = batch({ { name = "x", rows = 2, cols = 3 }, { name = "a", rows = 5, cols = 2 } },
        { optimizer = "rowwise_adagrad" })
      assert.same({ "weight", "momentum1" }, b:state_names())
      b:write(2, "weight", 1, t { { 1, 2 }, { 3, 4 } })
      b:write(2, "momentum1", 3, peri.tensor({ 7, 8 }, "f64")) -- cast, and from another device
      local rows = b:read(2, "weight", 2, peri.zeros({ 1, 2 }, "f64"))
      assert.same({ { 3, 4 } }, rows:to_table())
      assert.same({ 0, 0, 0, 7, 8 }, b:state(2, "momentum1"):to_list())
      b:state(2):slice(1, 0, 1):fill(9)
      assert.same({ { 9, 9 }, { 1, 2 } }, b:read(2, "weight", 0, peri.zeros({ 2, 2 }, "f32", device)):to_table())
      assert.error_matches(function() b:write(2, "weight", 4, t { { 1, 2 }, { 3, 4 } }) end,
        "rows 4 %.%. 6 of table 'a', allowed: 0%.%.5")
      assert.error_matches(function() b:write(2, "weight", 0, t { { 1, 2, 3 } }) end, "columns: 2")
      assert.error_matches(function() b:read(2, "momentum1", 0, t { { 1, 2 } }) end, "1 dimensions")
    end)

    it("counts what it did", function()
      local b = batch({ { name = "a", rows = 5, cols = 2 } }, { optimizer = "adam" })
      local list = b:blocks { { table = 1, first_bag = 0, bags = 3, out_offset = 0, out_stride = 2 } }
      for _ = 1, 2 do b:lookup(t({ 1, 1, 4, 4 }, "i64"), t({ 0, 1, 1, 4 }, "i64"), list, 3,
        2):backward(peri.ones({ 3, 2 }, "f32", device)) end
      local s = b:statistics()
      assert.equal(2, s.lookups)
      assert.equal(2, s.updates)
      assert.equal(8, s.ids)
      assert.equal(6, s.bags)
      assert.equal(4, s.rows_updated)
      assert.equal(16 * 4, s.weight_bytes)
      assert.equal(2 * 16 * 4, s.state_bytes)
      assert.is_true(s.workspace_bytes > 0)
    end)

    it("holds no tables, no blocks, no ids", function()
      local b = batch {}
      assert.same({}, b:lookup(t({}, "i64"), t({ 0 }, "i64"), b:blocks {}, 0):to_list())
      b = batch({ { name = "a", rows = 2, cols = 2 } })
      local list = b:blocks { { table = 1, first_bag = 0, bags = 2, out_offset = 2, out_stride = 2 } }
      local out = b:lookup(t({}, "i64"), t({ 0, 0, 0 }, "i64"), list, 6)
      assert.same({ 0, 0, 0, 0, 0, 0 }, out:to_list())
      out:backward(peri.ones({ 6 }, "f32", device))
      assert.equal(1, b:iteration())
    end)

    it("releases everything, and keeps its memory flat over many steps", function()
      collectgarbage()
      collectgarbage()
      local objects, draw, live = tonumber(C.peri_mem_objects()), generator(5), nil
      peri.scope(function()
        local b = batch({ { name = "a", rows = 100, cols = 16 } }, { optimizer = "rowwise_adagrad" })
        local list = b:blocks { { table = 1, first_bag = 0, bags = 20, out_offset = 0, out_stride = 16 } }
        local steps = device == "cpu" and 400 or 60
        for step = 1, steps do
          peri.scope(function()
            local ids, offsets = bags_of(20, 10, 100, draw)
            for _ = #ids + 1, 200 do ids[#ids + 1] = 0 end
            b:lookup(t(ids, "i64"), t(offsets, "i64"), list, 20, 16,
              t(numbers(200, draw))):backward(peri.ones({ 20, 16 }, "f32", device))
          end)
          if step == 5 then
            b:statistics()
            live = tonumber(C.peri_mem_live())
          end
        end
        b:statistics() -- waits
        assert.is_true(tonumber(C.peri_mem_live()) <= live)
      end)
      check(C.peri_device_synchronize(peri.ffi.device(device)))
      assert.equal(objects, tonumber(C.peri_mem_objects()))
    end)

    it("unwinds when memory runs out, wherever that is", function()
      local ids, offsets, grad = t({ 1, 2, 0 }, "i64"), t({ 0, 1, 3 }, "i64"), t { { 1, 2 }, { 3, 4 } }
      collectgarbage()
      collectgarbage()
      local objects = tonumber(C.peri_mem_objects())
      for _, point in ipairs { "alloc", "device_alloc" } do
        local k, failed = 1, true
        while failed do
          check(C.peri_fault_arm(point, k))
          local ok, err = pcall(peri.scope, function()
            local b = batch({ { name = "a", rows = 3, cols = 2, pooling = "MEAN" } }, { optimizer = "adagrad" })
            local list = b:blocks { { table = 1, first_bag = 0, bags = 2, out_offset = 0, out_stride = 2 } }
            local out = b:lookup(ids, offsets, list, 2, 2)
            out:backward(grad)
          end)
          check(C.peri_fault_arm(point, 0))
          failed = not ok
          if failed then assert.equal("ENOMEM", err.name, tostring(err)) end
          assert.equal(objects, tonumber(C.peri_mem_objects()), ("objects left after failing %s %d"):format(point, k))
          k = k + 1
          assert.is_true(k < 500)
        end
        assert.is_true(k > 5)
      end
    end)
  end)
end

