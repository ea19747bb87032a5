-- Updates of table batches beyond the formulas: stochastic rounding, exact sums, rows for which a formula has no
-- number.
-- cuda: always
local ffi = require "ffi"
local peri = require "perilune"
local support = require "spec.support.tbe"
local generator, numbers, bags_of = support.generator, support.numbers, support.bags_of
local C, check = peri.ffi.C, peri.ffi.check

--- Row-wise Adagrad with counters, by what it is called here.
local counted = {
  counter = { optimizer = "rowwise_adagrad", weight_decay_mode = "counter", weight_decay = 0.1,
    counter_based_regularization = { counter_weight_decay_mode = "decouple", counter_halflife = 3,
      learning_rate_mode = "counter_sgd" } },
  cowclip = { optimizer = "rowwise_adagrad", weight_decay_mode = "cowclip",
    cowclip_regularization = { lower_bound = 0.1 } },
}
counted.rowwise_adagrad_with_counter = counted.counter

for _, device in ipairs(require "spec.support.devices") do
  local function t(list, dtype) return peri.tensor(list, dtype, device) end
  local batch = support.maker(device)

  --- One table of one row for each id, each asked for once: the gradient is the summed one.
  local function each_row(b, rows, cols, table_number)
    return b:blocks { { table = table_number or 1, first_bag = 0, bags = rows, out_offset = 0, out_stride = cols } }
  end
  local function iota(n, more) return peri.arange(0, n + (more or 0), 1, "i64", device) end

  describe("updates on " .. device, function()
    -- -- stochastic rounding ------------------------------------------------------------------------------------------

    for _, dtype in ipairs { "f16", "bf16" } do
      it("rounds " .. dtype .. " weights so that their mean is right", function()
        local rows, cols = 200, 48
        for _, case in ipairs { { start = 1, step = 0.0001 }, { start = 0, step = 3.1e-6 },
          { start = -3, step = 0.00021 } } do
          local b = batch({ { name = "a", rows = rows, cols = cols, init = peri.embed.constant(case.start) } },
            { optimizer = "sgd", learning_rate = 1 }, { data_type = dtype })
          b:backward(iota(rows), iota(rows, 1), each_row(b, rows, cols),
            peri.full({ rows, cols }, -case.step, "f32", device))
          local sum, values, seen = 0, {}, 0
          for _, x in ipairs(b:state(1):to_list()) do
            sum = sum + x
            if not values[x] then values[x], seen = true, seen + 1 end
          end
          local want, got = case.start + case.step, sum / (rows * cols)
          local unit = 0
          for x in pairs(values) do unit = math.max(unit, math.abs(x - want)) end
          assert.is_true(seen == 2 or unit < 1e-6, ("%d values for one number"):format(seen))
          assert.near(want, got, 4 * unit / math.sqrt(rows * cols) + 1e-9)
        end
      end)

      it("rounds " .. dtype .. " weights of every size as the processor does", function()
        local rows, cols, gradient, draw = 64, 40, {}, generator(5)
        for i = 1, rows * cols do
          local size = i % 2 == 0 and 2 ^ -14 * (1 - draw(4096) * 2 ^ -24) or 2 ^ (draw(60) - 40) * (1 + draw())
          gradient[i] = i % 4 < 2 and size or -size
        end
        local function rounded(on)
          local b = support.maker(on)({ { name = "a", rows = rows, cols = cols, init = peri.embed.constant(0) } }, nil,
            { data_type = dtype })
          local ids, ends = peri.arange(0, rows, 1, "i64", on), peri.arange(0, rows + 1, 1, "i64", on)
          b:backward(ids, ends, each_row(b, rows, cols), peri.tensor(gradient, "f32", on):reshape { rows, cols })
          return b:state(1):to_list()
        end
        assert.same(rounded "cpu", rounded(device))
      end)

      it("keeps " .. dtype .. " weights that need no rounding, and finite ones finite", function()
        local top = dtype == "f16" and 65504 or 3.3895313892515355e38
        local start = { 1, -0.5, 0.000030517578125, 0, top, -top, 1 / 0, -1 / 0 }
        local b = batch({ { name = "a", rows = 1, cols = #start } }, { optimizer = "sgd", learning_rate = 1 },
          { data_type = dtype })
        b:write(1, "weight", 0, t { start })
        local list = each_row(b, 1, #start)
        for _ = 1, 20 do
          b:backward(t({ 0 }, "i64"), t({ 0, 1 }, "i64"), list, peri.zeros({ 1, #start }, "f32", device))
        end
        assert.same(start, b:state(1):to_list())
        b:backward(t({ 0 }, "i64"), t({ 0, 1 }, "i64"), list, peri.full({ 1, #start }, dtype == "f16" and -20 or -1e36,
          "f32", device))
        assert.equal(top, b:state(1):to_list()[5])
      end)

      it("rounds " .. dtype .. " weights alike in every shard, and anew in every step", function()
        local rows, cols = 12, 70
        local function train(tables, part)
          local b = batch(tables, { optimizer = "sgd", learning_rate = 0.01 }, { data_type = dtype })
          local first, last, from, to = part[1], part[2], part[3], part[4]
          local draw, grad = generator(4), {}
          for r = 0, rows - 1 do
            for c = 0, cols - 1 do
              local x = draw()
              if r >= first and r < last and c >= from and c < to then grad[#grad + 1] = x end
            end
          end
          local n, width = last - first, to - from
          for _ = 1, 3 do
            b:backward(iota(n), iota(n, 1), each_row(b, n, width), peri.tensor(grad, "f32", device, { n, width }))
          end
          return b:state(1):to_table()
        end
        local whole = train({ { name = "a", rows = rows, cols = cols } }, { 0, rows, 0, cols })
        for _, p in ipairs { { 5, 12, 0, 70 }, { 0, 12, 32, 64 }, { 2, 7, 7, 70 }, { 0, 3, 45, 46 } } do
          local got = train({ { name = "a", rows = p[2] - p[1], cols = p[4] - p[3], row_offset = p[1],
            col_offset = p[3], total_rows = rows, total_cols = cols } }, p)
          for r, row in ipairs(got) do
            for c, x in ipairs(row) do assert.equal(whole[p[1] + r][p[3] + c], x) end
          end
        end
        local b = batch({ { name = "a", rows = 1, cols = 64, init = peri.embed.constant(1) } },
          { optimizer = "sgd", learning_rate = 1 }, { data_type = dtype })
        local made = {}
        for step = 1, 2 do
          b:write(1, "weight", 0, peri.ones({ 1, 64 }, "f32", device))
          b:backward(iota(1), iota(1, 1), each_row(b, 1, 64), peri.full({ 1, 64 }, 0.002, "f32", device))
          made[step] = b:state(1):to_list()
        end
        assert.not_same(made[1], made[2])
      end)
    end

    -- -- exact sums ---------------------------------------------------------------------------------------------------

    it("sums exactly the same whatever the order", function()
      local draw, bags, cols = generator(11), 700, 24
      local size = {}
      for b = 1, bags do size[b] = 10 ^ (draw(30) - 15) end
      local order = {}
      for i = 1, bags do order[i] = i end
      local made, plain = {}, {}
      local grads, weights, ids = {}, {}, {}
      for b = 1, bags do
        grads[b] = numbers(cols, draw)
        weights[b], ids[b] = draw() * size[b], draw(3)
      end
      for try = 1, 4 do
        for i = bags, 2, -1 do
          local k = draw(i) + 1
          order[i], order[k] = order[k], order[i]
        end
        local g, w, id = {}, {}, {}
        for i, b in ipairs(order) do
          for c = 1, cols do g[#g + 1] = grads[b][c] end
          w[i], id[i] = weights[b], ids[b]
        end
        for _, exact in ipairs { true, false } do
          local b = batch({ { name = "a", rows = 3, cols = cols } }, { optimizer = "sgd", exact = exact })
          b:backward(t(id, "i64"), iota(bags, 1), each_row(b, bags, cols),
            peri.tensor(g, "f32", device, { bags, cols }), t(w));
          (exact and made or plain)[try] = b:state(1):to_list()
        end
      end
      for try = 2, 4 do assert.same(made[1], made[try]) end
      assert.not_same(plain[1], plain[2]) -- otherwise this shows nothing
    end)

    it("sums exactly to the right number, and keeps infinities and NaN", function()
      local b = batch({ { name = "a", rows = 1, cols = 5, init = peri.embed.constant(0) } },
        { optimizer = "sgd", learning_rate = 1, exact = true })
      local inf, nan = 1 / 0, 0 / 0
      local rows = { { 1e30, 1, inf, inf, nan }, { 1, 2 ^ -30, 1, -inf, 1 }, { -1e30, -1, 1e30, 1, inf } }
      b:backward(t({ 0, 0, 0 }, "i64"), iota(3, 1), each_row(b, 3, 5), t(rows))
      local got = b:state(1):to_list()
      assert.equal(0, got[1]) -- 1 is below what is kept beside 1e30
      assert.equal(-(2 ^ -30), got[2])
      assert.equal(-inf, got[3])
      assert.is_true(got[4] ~= got[4] and got[5] ~= got[5])
    end)

    -- -- where formulas end -------------------------------------------------------------------------------------------

    it("trains rows of zeros with lamb and lars_sgd, and survives gradients of zeros", function()
      -- FBGEMM's formulas freeze rows of zeros (their trust ratio is 0) and divide 0 by 0 when there is no step.
      for _, name in ipairs { "lamb", "partial_rowwise_lamb", "lars_sgd" } do
        local b = batch({ { name = "a", rows = 2, cols = 3, init = peri.embed.constant(0) } },
          { optimizer = name, learning_rate = 0.5 })
        b:write(1, "weight", 1, t { { 1, 1, 1 } })
        local list = each_row(b, 2, 3)
        b:backward(iota(2), iota(2, 1), list, t { { 1, 2, 3 }, { 0, 0, 0 } })
        local got = b:state(1):to_table()
        for d = 1, 3 do
          assert.near(name == "lamb" and -0.5 or name == "lars_sgd" and -0.5 * d or -0.5 * d / math.sqrt(14 / 3),
            got[1][d], 1e-5)
          assert.equal(1, got[2][d])
        end
      end
    end)

    it("moves nothing where lion has no direction", function()
      local b = batch({ { name = "a", rows = 1, cols = 3, init = peri.embed.constant(2) } },
        { optimizer = "lion", learning_rate = 0.5 })
      b:backward(iota(1), iota(1, 1), each_row(b, 1, 3), t { { -3, 0, 7 } })
      assert.same({ 2.5, 2, 1.5 }, b:state(1):to_list())
    end)

    it("clips no row whose gradient and bound are 0", function() -- FBGEMM divides 0 by 0
      local b = batch({ { name = "a", rows = 2, cols = 2, init = peri.embed.constant(0) } },
        { optimizer = "rowwise_adagrad", learning_rate = 0.5, weight_decay_mode = "cowclip" })
      b:backward(iota(2), iota(2, 1), each_row(b, 2, 2), t { { 0, 0 }, { 3, 4 } })
      assert.same({ 0, 0, 0, 0 }, b:state(1):to_list()) -- row 1: lower_bound is 0, so nothing is let through
      assert.same({ 1, 1 }, b:state(1, "row_counter"):to_list())
    end)

    it("counts the steps of a row beyond 2^24, and takes an iteration that was set back for the next one", function()
      local b = batch({ { name = "a", rows = 1, cols = 2, init = peri.embed.constant(1) } },
        { optimizer = "rowwise_rmsprop_ar", learning_rate = 0.125, ar_alpha = 1, min_shrinkage = 0 })
      local list = each_row(b, 1, 2)
      --- The weight after an update of step t with a gradient of zeros.
      local function after(step)
        b:set_iteration(step - 1)
        b:backward(iota(1), iota(1, 1), list, t { { 0, 0 } })
        assert.same({ step }, b:state(1, "prev_iter"):to_list())
        return b:state(1):to_list()[1]
      end
      local past = 2 ^ 24 + 1
      assert.equal(0.875, after(past))
      assert.equal(0.875 * 0.875, after(past + 1))
      assert.equal(0.875 * 0.875 * 0.75, after(past + 3))
      assert.equal(0.875 * 0.875 * 0.75 * 0.875, after(5))
      assert.equal(0, after(1000))
    end)

    it("lets right halves of rows follow left ones once a step, in training only", function()
      local function fresh()
        local b = batch({ { name = "a", rows = 2, cols = 4, init = peri.embed.constant(0) },
          { name = "e", rows = 0, cols = 2 } }, { optimizer = "emainplace_rowwise_adagrad", learning_rate = 0,
            emainplace_mode = { step_ema = 2, step_start = 2, step_ema_coef = 0.5 } })
        b:write(1, "weight", 0, t { { 4, 8, 0, 0 }, { 2, 2, 2, 6 } })
        return b, each_row(b, 1, 4)
      end
      local first, second = { { 4, 8, 0, 0 }, { 2, 2, 2, 6 } }, { { 4, 8, 2, 4 }, { 2, 2, 2, 4 } }
      local b, list = fresh()
      local function look() return b:lookup(t({ 0 }, "i64"), iota(1, 1), list, 1, 4) end
      look():backward(peri.zeros({ 1, 4 }, "f32", device))
      assert.same(first, b:state(1):to_table()) -- step 1
      peri.no_grad(function() assert.same({ 4, 8, 0, 0 }, look():to_list()) end)
      b:forward(t({ 0 }, "i64"), iota(1, 1), list, peri.zeros({ 1, 4 }, "f32", device))
      assert.same(first, b:state(1):to_table())
      assert.same({ 4, 8, 2, 4 }, look():to_list()) -- step 2, of rows that are not asked for too
      assert.same(second, b:state(1):to_table())
      look():backward(peri.zeros({ 1, 4 }, "f32", device)) -- still step 2
      assert.same(second, b:state(1):to_table())
      look():backward(peri.zeros({ 1, 4 }, "f32", device))
      assert.same(second, b:state(1):to_table()) -- step 3
      assert.equal(3, b:iteration())
      b:write(1, "weight", 0, t { { 4, 8, 0, 0 }, { 2, 2, 2, 6 } })
      b:set_iteration(1) -- as loading a checkpoint of step 1 does
      b:backward(iota(1), iota(1, 1), list, peri.zeros({ 1, 4 }, "f32", device)) -- without a lookup: at the latest now
      assert.same(second, b:state(1):to_table())
      b, list = fresh()
      b:set_iteration(1)
      b:accumulate(true)
      for _ = 1, 3 do look():backward(peri.zeros({ 1, 4 }, "f32", device)) end
      b:apply_accumulated()
      assert.same(second, b:state(1):to_table())
      assert.equal(2, b:iteration())
    end)

    it("refreshes the largest counter of each table by itself", function()
      local b = batch({ { name = "a", rows = 3, cols = 2 }, { name = "b", rows = 2, cols = 2 } },
        { optimizer = "rowwise_adagrad", weight_decay_mode = "counter",
        counter_based_regularization = { learning_rate_mode = "tail_id_lr_increase", max_counter_update_freq = 3 } })
      assert.same({ "weight", "momentum1", "row_counter", "prev_iter", "max_counter" }, b:state_names())
      local list = each_row(b, 3, 2)
      for step, want in ipairs { 1, 1, 3, 3, 3, 6 } do -- as of the updates before
        b:backward(t({ 0, 2, 2 }, "i64"), iota(3, 1), list, peri.ones({ 3, 2 }, "f32", device))
        assert.same({ step, 0, step }, b:state(1, "row_counter"):to_list())
        assert.same({ want }, b:state(1, "max_counter"):to_list())
        assert.same({ 1 }, b:state(2, "max_counter"):to_list())
      end
      assert.same({ 1 }, b:state_shape(1, "max_counter"))
    end)

    it("scales down rows above max_norm, others not", function()
      local b = batch({ { name = "a", rows = 2, cols = 2 } }, { optimizer = "sgd", learning_rate = 1, max_norm = 5 })
      b:write(1, "weight", 0, t { { 6, 8 }, { 3, 4 } })
      b:backward(iota(2), iota(2, 1), each_row(b, 2, 2), peri.zeros({ 2, 2 }, "f32", device))
      assert.same({ { 3, 4 }, { 3, 4 } }, b:state(1):to_table())
    end)

    it("gives no leaves of narrow tables", function()
      local b = batch({ { name = "a", rows = 2, cols = 2 } }, { optimizer = "none" }, { data_type = "bf16" })
      assert.error_matches(function() b:leaf(1) end, "table 'a' is bf16; leaves, whose gradients are f32, are f32")
    end)
  end)
end

for _, device in ipairs(require "spec.support.devices") do
  local function t(list, dtype) return peri.tensor(list, dtype, device) end
  local batch = support.maker(device)
  local tables = {
    { name = "a", rows = 30, cols = 5, pooling = "MEAN" }, { name = "b", rows = 12, cols = 33 },
    { name = "c", rows = 9, cols = 16 },
  }

  --- Blocks of three features over `bags` bags each; the last shares table b, between the others.
  local function blocks_of(bags, factor)
    local width, list = 5 + 33 + 16 + 33, {}
    for k, at in ipairs { { 1, 0 }, { 2, 5 }, { 3, 38 }, { 2, 54 } } do
      list[k] = { table = at[1], first_bag = (k - 1) * bags, bags = bags, out_offset = at[2],
        out_stride = width * (factor or 1) }
    end
    return list, width
  end

  describe("gradients on " .. device, function()
    for _, with in ipairs { "", "weights", "scale" } do
      it("accumulate over micro-batches to the bits of the large batch" .. (with == "" and "" or ", with " .. with),
        function()
        for _, name in ipairs { "rowwise_adagrad", "adam", "sgd", "rowwise_rmsprop_ar", "counter", "cowclip" } do
          local fused = counted[name] or { optimizer = name }
          local draw = generator(21)
          local parts, sizes, all = {}, { 5, 1, 0, 8 }, 0
          for m, bags in ipairs(sizes) do
            local ids, offsets = bags_of(4 * bags, 6, 9, draw)
            local _, width = blocks_of(bags)
            parts[m] = { ids = ids, offsets = offsets, bags = bags, grad = numbers(bags * width, draw),
              weights = numbers(#ids, draw), scale = numbers(4 * bags, draw) }
            all = all + bags
          end
          --- The large batch: feature after feature, and in each the micro-batches.
          local large = { ids = {}, offsets = { 0 }, grad = {}, weights = {}, scale = {} }
          for f = 0, 3 do
            for _, p in ipairs(parts) do
              for b = f * p.bags, (f + 1) * p.bags - 1 do
                for i = p.offsets[b + 1] + 1, p.offsets[b + 2] do
                  large.ids[#large.ids + 1], large.weights[#large.weights + 1] = p.ids[i], p.weights[i]
                end
                large.offsets[#large.offsets + 1], large.scale[#large.scale + 1] = #large.ids, p.scale[b + 1]
              end
            end
          end
          for _, p in ipairs(parts) do
            for _, g in ipairs(p.grad) do large.grad[#large.grad + 1] = g end
          end
          local one, many = batch(tables, fused), batch(tables, fused)
          local function back(b, p, bags, i32)
            local list, width = blocks_of(bags)
            b:backward(t(p.ids, i32 and "i32" or "i64"), t(p.offsets, i32 and "i32" or "i64"), b:blocks(list),
              peri.tensor(p.grad, "f32", device, { bags, width }), with == "weights" and t(p.weights) or nil,
              with == "scale" and t(p.scale) or nil)
          end
          many:accumulate(true)
          for _ = 1, 3 do
            back(one, large, all)
            local before = many:state(1):to_list()
            for m, p in ipairs(parts) do back(many, p, p.bags, m % 2 == 0) end
            assert.equal(#parts, many:accumulated())
            assert.same(before, many:state(1):to_list())
            many:apply_accumulated()
            assert.equal(0, many:accumulated())
            for i = 1, 3 do
              for _, state in ipairs(one:state_names()) do
                assert.same(one:state(i, state):to_list(), many:state(i, state):to_list())
              end
            end
          end
          assert.equal(3, many:iteration())
          many:apply_accumulated() -- nothing kept, nothing done
          assert.equal(3, many:iteration())
          many:accumulate(false)
          back(many, parts[1], parts[1].bags)
          assert.equal(4, many:iteration())
        end
      end)
    end

    it("accumulate without pooling too", function()
      local draw = generator(22)
      local made = {}
      local function table_batch()
        return batch({ { name = "a", rows = 9, cols = 4, pooling = "NONE" },
          { name = "b", rows = 9, cols = 4, pooling = "NONE" } }, { optimizer = "rowwise_adagrad" })
      end
      local one, many = table_batch(), table_batch()
      local function back(b, ids, offsets, bags, grad)
        local list = b:blocks {
          { table = 1, first_bag = 0, bags = bags, out_offset = 0, out_stride = 4 },
          { table = 2, first_bag = bags, bags = bags, out_offset = 0, out_stride = 4 },
        }
        b:backward(t(ids, "i64"), t(offsets, "i64"), list, peri.tensor(grad, "f32", device, { #ids, 4 }))
      end
      local parts = {}
      for m = 1, 3 do
        local ids, offsets = bags_of(2 * m, 4, 9, draw)
        parts[m] = { ids = ids, offsets = offsets, bags = m, grad = numbers(#ids * 4, draw) }
      end
      local ids, offsets, grad = {}, { 0 }, {}
      for f = 0, 1 do
        for _, p in ipairs(parts) do
          for b = f * p.bags, (f + 1) * p.bags - 1 do
            for i = p.offsets[b + 1] + 1, p.offsets[b + 2] do
              ids[#ids + 1] = p.ids[i]
              for c = 1, 4 do grad[#grad + 1] = p.grad[(i - 1) * 4 + c] end
            end
            offsets[#offsets + 1] = #ids
          end
        end
      end
      back(one, ids, offsets, 6, grad)
      many:accumulate(true)
      for _, p in ipairs(parts) do back(many, p.ids, p.offsets, p.bags, p.grad) end
      many:apply_accumulated()
      for i = 1, 2 do
        made[i] = many:state(i):to_list()
        assert.same(one:state(i):to_list(), made[i])
      end
      assert.not_same(table_batch():state(1):to_list(), made[1])
    end)

    it("accumulate on the tape, with the ids' weights' gradients at once", function()
      local b = batch({ { name = "a", rows = 3, cols = 2, init = peri.embed.constant(1) } })
      local list = b:blocks { { table = 1, first_bag = 0, bags = 1, out_offset = 0, out_stride = 2 } }
      b:accumulate(true)
      local w = t({ 2 }):requires_grad()
      for _ = 1, 2 do b:lookup(t({ 1 }, "i64"), t({ 0, 1 }, "i64"), list, 1, 2, w):backward(t { { 3, 5 } }) end
      assert.same({ 16 }, w:grad():to_list())
      assert.same({ 1, 1, 1, 1, 1, 1 }, b:state(1):to_list())
      b:apply_accumulated()
      assert.same({ 1, 1, 1 - 12, 1 - 20, 1, 1 }, b:state(1):to_list())
      b:accumulate(true)
      -- kept, and dropped with the batch
      b:lookup(t({ 1 }, "i64"), t({ 0, 1 }, "i64"), list, 1, 2):backward(t { { 3, 5 } })
      -- without an optimizer gradients are the leaves' as ever
      local leaves = batch({ { name = "a", rows = 3, cols = 2 } }, { optimizer = "none" })
      leaves:accumulate(true)
      leaves:lookup(t({ 1 }, "i64"), t({ 0, 1 }, "i64"), list, 1, 2):backward(t { { 3, 5 } })
      leaves:apply_accumulated()
      assert.same({ 0, 0, 3, 5, 0, 0 }, leaves:leaf(1):grad():to_list())
    end)

    it("of the ids' weights are those of the loss, also where the rows' are clamped", function()
      local b = batch({ { name = "a", rows = 3, cols = 2, init = peri.embed.constant(1) } },
        { optimizer = "sgd", learning_rate = 1, gradient_clipping = true, max_gradient = 0.5 })
      local list = b:blocks { { table = 1, first_bag = 0, bags = 1, out_offset = 0, out_stride = 2 } }
      local weights = t({ 1, 1 }):requires_grad()
      b:lookup(t({ 0, 2 }, "i64"), t({ 0, 2 }, "i64"), list, 1, 2, weights):backward(peri.tensor({ 3, -0.25 }, "f32",
        device, { 1, 2 }))
      assert.same({ 2.75, 2.75 }, weights:grad():to_list())
      assert.same({ { 0.5, 1.25 }, { 1, 1 }, { 0.5, 1.25 } }, b:state(1):to_table())
    end)

    it("come as sparse rows", function()
      for _, ids_dtype in ipairs { "i64", "i32" } do
        local draw = generator(31)
        local b = batch(tables, { optimizer = "none" })
        local blocks, width = blocks_of(40)
        local list = b:blocks(blocks)
        local ids, offsets = bags_of(160, 5, 9, draw)
        for i = 1, #ids, 7 do ids[i] = -1 end
        for i = 3, #ids, 11 do ids[i] = 1000 end
        local grad, weights = numbers(40 * width, draw), numbers(#ids, draw)
        local x = { t(ids, ids_dtype), t(offsets, ids_dtype), list, peri.tensor(grad, "f32", device, { 40, width }),
          t(weights) }
        local rows, dense = b:sparse_gradient(unpack(x)), b:gradient(unpack(x))
        local seen = 0
        for i = 1, 3 do
          local want, place, values = b:gradient_table(dense, i):to_table(), rows[i][1]:to_list(), rows[i][2]:to_table()
          local found = {}
          for k, row in ipairs(place) do
            assert.is_true(k == 1 or row > place[k - 1])
            assert.same(want[row + 1], values[k])
            found[row] = true
            seen = seen + 1
          end
          for row, list_of in ipairs(want) do
            if not found[row - 1] then
              for _, v in ipairs(list_of) do assert.equal(0, v) end
            end
          end
        end
        assert.is_true(seen > 20 and seen < 52)
        assert.equal(0, b:iteration())
        local none = b:sparse_gradient(t({}, "i64"), t({ 0 }, "i64"), b:blocks {}, peri.zeros({ 0 }, "f32", device))
        for i = 1, 3 do assert.equal(0, none[i][1]:numel()) end
      end
    end)
  end)
end

describe("updates", function()
  local draw = generator(9)
  local ids, offsets = bags_of(4096, 9, 3000, draw)
  local grad = numbers(4096 * 40, draw)
  --- Three steps with this many threads: the bytes of weights and states.
  local function train(fused, data_type, threads)
    check(C.peri_threads_set(threads))
    local b = peri.embed.tbe.new { tables = { { name = "a", rows = 3000, cols = 40 } }, data_type = data_type,
      fused_params = fused, seed = 1 }
    local list = b:blocks { { table = 1, first_bag = 0, bags = 4096, out_offset = 0, out_stride = 40 } }
    local made = {}
    for _ = 1, 3 do
      b:backward(peri.tensor(ids, "i64"), peri.tensor(offsets, "i64"), list,
        peri.tensor(grad, "f32", nil, { 4096, 40 }))
    end
    for i, name in ipairs(b:state_names()) do
      local state = b:state(1, name)
      made[i] = ffi.string(state:read(), state:numel() * tonumber(C.peri_dtype_size(peri.ffi.dtype(state:dtype()))))
    end
    return made
  end

  local every = peri.util.map(peri.embed.config.optimizers(), function(name)
    return counted[name] or { optimizer = name }
  end)
  every[#every + 1] = counted.cowclip
  for _, fused in ipairs(every) do
    local name = fused.weight_decay_mode and fused.optimizer .. ", " .. fused.weight_decay_mode or fused.optimizer
    if name ~= "none" then
      it("with " .. name .. " round and sum to the same bits with 1, 2, 3 and 7 threads", function()
        local before = C.peri_threads()
        for _, data_type in ipairs { "f16", "f32" } do
          local want = train(fused, data_type, 1)
          for _, threads in ipairs { 2, 3, 7 } do
            local got = train(fused, data_type, threads)
            for i = 1, #want do
              assert.is_true(want[i] == got[i], ("%s: state %d with %d threads"):format(data_type, i, threads))
            end
          end
        end
        check(C.peri_threads_set(before))
      end)
    end
  end
end)
