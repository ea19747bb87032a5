-- Table batches: how weights start, what block lists mean, exact updates over many steps, on both devices.
-- deadline: 300 s
-- cuda: always
local ffi = require "ffi"
local peri = require "perilune"
local golden = require "spec.support.golden"
local reference = require "spec.support.tbe_reference"
local support = require "spec.support.tbe"
local embed, util = peri.embed, peri.util
local C, check = peri.ffi.C, peri.ffi.check
local PRETENDED = os.getenv "PERI_OPAQUE_DEVICE" == "cuda_host" -- a pretended GPU is slow
local generator, numbers, bags_of = support.generator, support.numbers, support.bags_of

local optimizers = {
  sgd = { learning_rate = 0.1 },
  adagrad = { learning_rate = 0.1, eps = 1e-4 },
  rowwise_adagrad = { learning_rate = 0.1, eps = 1e-4 },
  ["rowwise_adagrad, l2"] = { optimizer = "rowwise_adagrad", learning_rate = 0.1, eps = 1e-4, weight_decay = 0.1,
    weight_decay_mode = "l2" },
  ["rowwise_adagrad, decouple"] = { optimizer = "rowwise_adagrad", learning_rate = 0.1, eps = 1e-4, weight_decay = 0.1,
    weight_decay_mode = "decouple" },
  adam = { learning_rate = 0.02, eps = 1e-4, beta1 = 0.8, beta2 = 0.95 },
  ["adam, decay"] = { optimizer = "adam", learning_rate = 0.02, eps = 1e-4, beta1 = 0.8, beta2 = 0.95,
    weight_decay = 0.1 },
  ["adam, row counts"] = { optimizer = "adam", learning_rate = 0.02, eps = 1e-4, beta1 = 0.8, beta2 = 0.95,
    use_rowwise_bias_correction = true },
  ["sgd, l2"] = { optimizer = "sgd", learning_rate = 0.1, weight_decay = 0.1, weight_decay_mode = "l2" },
  ["sgd, decouple"] = { optimizer = "sgd", learning_rate = 0.1, weight_decay = 0.1, weight_decay_mode = "decouple" },
  ["sgd, exact"] = { optimizer = "sgd", learning_rate = 0.1, exact = true },
  ["sgd, max norm"] = { optimizer = "sgd", learning_rate = 0.1, max_norm = 0.8 },
  ["adagrad, l2"] = { optimizer = "adagrad", learning_rate = 0.1, eps = 1e-4, weight_decay = 0.1,
    weight_decay_mode = "l2" },
  ["adagrad, decouple"] = { optimizer = "adagrad", learning_rate = 0.1, eps = 1e-4, weight_decay = 0.1,
    weight_decay_mode = "decouple" },
  ["rowwise_adagrad, max norm"] = { optimizer = "rowwise_adagrad", learning_rate = 0.1, eps = 1e-4, max_norm = 0.5 },
  partial_rowwise_adam = { learning_rate = 0.02, eps = 1e-4, beta1 = 0.8, beta2 = 0.95, weight_decay = 0.1 },
  ["partial_rowwise_adam, row counts"] = { optimizer = "partial_rowwise_adam", learning_rate = 0.02, eps = 1e-4,
    beta1 = 0.8, beta2 = 0.95, use_rowwise_bias_correction = true },
  lamb = { learning_rate = 0.02, eps = 1e-4, beta1 = 0.8, beta2 = 0.95, weight_decay = 0.1 },
  ["lamb, row counts, max norm"] = { optimizer = "lamb", learning_rate = 0.02, eps = 1e-4, beta1 = 0.8, beta2 = 0.95,
    use_rowwise_bias_correction = true, max_norm = 0.6 },
  partial_rowwise_lamb = { learning_rate = 0.02, eps = 1e-4, beta1 = 0.8, beta2 = 0.95, weight_decay = 0.1 },
  shampoo = { learning_rate = 0.05, eps = 0.1 },
  ["shampoo, decouple"] = { optimizer = "shampoo", learning_rate = 0.05, eps = 0.1, weight_decay = 0.1,
    weight_decay_mode = "decouple", max_norm = 0.9 },
  lars_sgd = { learning_rate = 0.1, eta = 0.2, momentum = 0.8, weight_decay = 0.1 },
  lion = { learning_rate = 0.01, beta1 = 0.8, beta2 = 0.95, weight_decay = 0.1 },
  rowwise_rmsprop_ar = { learning_rate = 0.05, eps = 1e-4, ema_beta = 0.8, ar_alpha = 3 },
  ["rowwise_rmsprop_ar, floor"] = { optimizer = "rowwise_rmsprop_ar", learning_rate = 0.05, eps = 1e-4, ar_alpha = 15,
    min_shrinkage = 0.3 },
  emainplace_rowwise_adagrad = { learning_rate = 0.1, eps = 1e-4 },
  ["emainplace_rowwise_adagrad, often, l2"] = { optimizer = "emainplace_rowwise_adagrad", learning_rate = 0.1,
    eps = 1e-4, weight_decay = 0.1, weight_decay_mode = "l2", emainplace_mode = { step_ema = 3, step_start = 5,
      step_ema_coef = 0.3 } },
}

--- Row-wise Adagrad with counters.
local function counter(name, definition, more)
  local p = { optimizer = "rowwise_adagrad", learning_rate = 0.1, eps = 1e-3, weight_decay_mode = "counter",
    counter_based_regularization = definition }
  for key, value in pairs(more or {}) do p[key] = value end
  optimizers["counter" .. name] = p
end
counter("")
counter(", l2", { counter_weight_decay_mode = "l2", counter_halflife = 5 }, { weight_decay = 0.1 })
counter(", decouple", { counter_weight_decay_mode = "decouple", counter_halflife = 3, adjustment_iter = 4 },
  { weight_decay = 0.1 })
counter(", adagradw", { counter_weight_decay_mode = "adagradw", adjustment_iter = 6 },
  { weight_decay = 0.2, max_norm = 0.9 })
counter(", adagradw, bounded", { counter_weight_decay_mode = "adagradw", counter_halflife = -2, adjustment_ub = 0.4 },
  { weight_decay = 0.2, exact = true })
counter(", adagradw, fading", { counter_weight_decay_mode = "adagradw", counter_halflife = 4 }, { weight_decay = 0.2 })
counter(", up", { learning_rate_mode = "TAIL_ID_LR_INCREASE", adjustment_ub = 0.7, max_counter_update_freq = 3,
  tail_id_threshold = { val = 2 } })
counter(", down", { learning_rate_mode = "tail_id_lr_decrease", counter_halflife = 6, adjustment_ub = 1.5,
  max_counter_update_freq = 4, tail_id_threshold = { val = 0.4, is_ratio = true } })
counter(", sgd", { learning_rate_mode = "counter_sgd", adjustment_ub = 0.6, max_counter_update_freq = 0 })
for _, mode in ipairs { "none", "l2", "decouple" } do
  counter(", cowclip, " .. mode, nil, { weight_decay_mode = "cowclip", weight_decay = mode ~= "none" and 0.1 or nil,
    cowclip_regularization = { counter_weight_decay_mode = mode, counter_halflife = mode == "l2" and 4 or -1,
      weight_norm_coefficient = 0.1, lower_bound = 0.05 } })
end

-- Every optimizer once more with clamped gradients and rows of limited norm.
for _, name in ipairs(util.keys(optimizers)) do
  if not name:find "," then
    local p = { optimizer = name, gradient_clipping = true, max_gradient = 0.4, max_norm = 0.7 }
    for key, value in pairs(optimizers[name]) do p[key] = value end
    if name == "partial_rowwise_lamb" then p.use_rowwise_bias_correction = true end
    optimizers[name .. ", clipped, max norm"] = p
  end
end

local function params(name)
  local p = {}
  for key, value in pairs(optimizers[name]) do p[key] = value end
  p.optimizer = p.optimizer or name
  return p
end

--- Columns that the optimizer can have.
local function width(name, cols) return name:find "^emainplace" and cols + cols % 2 or cols end

for _, device in ipairs(require "spec.support.devices") do
  local function t(list, dtype) return peri.tensor(list, dtype, device) end
  local batch = support.maker(device)

  describe("table batch on " .. device, function()
    -- -- start values -------------------------------------------------------------------------------------------------

    it("starts weights that do not depend on the sharding", function()
      local whole = batch({ { name = "a", rows = 30, cols = 12 }, { name = "b", rows = 5, cols = 3 } })
      local want = whole:state(1):to_table()
      local shards = batch {
        { name = "b", rows = 5, cols = 3 },
        { name = "a", rows = 10, cols = 5, row_offset = 20, col_offset = 7, total_rows = 30, total_cols = 12 },
        { name = "a", rows = 0, cols = 12, row_offset = 30, total_rows = 30, total_cols = 12 },
      }
      assert.same(whole:state(2):to_table(), shards:state(1):to_table())
      local got = shards:state(2):to_table()
      for r = 1, 10 do
        for c = 1, 5 do assert.equal(want[20 + r][7 + c], got[r][c]) end
      end
      assert.same({ 0, 12 }, shards:state(3):shape())
      local low, high = 0, 0
      for _, x in ipairs(whole:state(1):to_list()) do low, high = math.min(low, x), math.max(high, x) end
      local edge = math.sqrt(1 / 30)
      assert.is_true(low >= -edge and low < -0.8 * edge and high < edge and high > 0.8 * edge)
      assert.not_same(want, batch({ { name = "c", rows = 30, cols = 12 } }):state(1):to_table())
      assert.not_same(want, batch({ { name = "a", rows = 30, cols = 12 } }, nil, { seed = 4 }):state(1):to_table())
    end)

    it("adds nothing for an id that is none, whatever its weight, not even to -0", function()
      for _, cols in ipairs { 8, 3 } do -- rows that a kernel moves word by word, and others
        local b = batch({ { name = "a", rows = 1, cols = cols, init = peri.embed.constant(-1e-30) } })
        local list = b:blocks { { table = 1, first_bag = 0, bags = 3, out_offset = 0, out_stride = cols } }
        local out = b:lookup(t({ 0, -1, -1, 0, -1 }, "i64"), t({ 0, 2, 4, 5 }, "i64"), list, 3, cols,
          t { 1e-30, math.huge, 0 / 0, 1, math.huge }):to_table()
        for d = 1, cols do -- the product is too small for f32, and rounded to -0
          assert.same({ -math.huge, true, math.huge }, { 1 / out[1][d], out[2][d] < 0, 1 / out[3][d] })
        end
      end
    end)

    it("starts weights as asked", function()
      local b = batch {
        { name = "a", rows = 4, cols = 2, init = embed.constant(1.5) },
        { name = "b", rows = 300, cols = 8, init = embed.normal(2, 0.5) },
        { name = "c", rows = 300, cols = 8, init = embed.uniform(3, 4) },
      }
      assert.same({ 1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5 }, b:state(1):to_list())
      local sum, squares = 0, 0
      for _, x in ipairs(b:state(2):to_list()) do sum, squares = sum + x, squares + (x - 2) ^ 2 end
      assert.near(2, sum / 2400, 0.05)
      assert.near(0.25, squares / 2400, 0.03)
      for _, x in ipairs(b:state(3):to_list()) do assert.is_true(x >= 3 and x < 4) end
    end)

    -- -- block lists --------------------------------------------------------------------------------------------------

    it("follows block lists: any order, left out and shared bags, any place of the output", function()
      local draw = generator(1)
      local tables = {
        { name = "a", rows = 9, cols = 3 }, { name = "b", rows = 7, cols = 20, pooling = "MEAN" },
        { name = "c", rows = 8, cols = 16 },
      }
      local blocks = {
        { table = 3, first_bag = 4, bags = 3, out_offset = 100, out_stride = 17 },
        { table = 1, first_bag = 0, bags = 2, out_offset = 3, out_stride = 3 },
        { table = 2, first_bag = 4, bags = 3, out_offset = 20, out_stride = 25 },
        { table = 1, first_bag = 9, bags = 1, out_offset = 0, out_stride = 0 },
        { table = 3, first_bag = 2, bags = 0, out_offset = 0, out_stride = 0 },
        { table = 2, first_bag = 0, bags = 1, out_offset = 160, out_stride = 20 },
      }
      local b = batch(tables, { optimizer = "rowwise_adagrad", learning_rate = 0.5 })
      for i, x in ipairs(tables) do x.weight = b:state(i):to_list() end
      local exact = reference.new(tables, { kind = "rowwise_adagrad", learning_rate = 0.5, eps = 1e-8 })
      local list = b:blocks(blocks)
      for _ = 1, 3 do
        local ids, offsets = bags_of(10, 4, 7, draw)
        local scale, weights = numbers(10, draw), numbers(#ids, draw)
        local input = { ids = ids, offsets = offsets, blocks = blocks, scale = scale, weights = weights }
        local grad = numbers(180, draw)
        local out = b:lookup(t(ids, "i64"), t(offsets, "i64"), list, 180, nil, t(weights), t(scale))
        golden.assert_near(exact:forward(input, 180), out:to_list(), { abs = 1e-5 }, "output")
        out:backward(t(grad))
        exact:backward(input, grad)
        for i, x in ipairs(exact.tables) do
          golden.assert_near(x.weight, b:state(i):to_list(), { abs = 1e-4 }, "table " .. i)
        end
      end
    end)

    it("sums exactly what a bag holds, with i32 ids and offsets", function()
      local b = batch({ { name = "a", rows = 3, cols = 2 }, { name = "m", rows = 3, cols = 2, pooling = "MEAN" } })
      b:write(1, "weight", 0, t { { 1, 2 }, { 10, 20 }, { 100, 200 } })
      b:write(2, "weight", 0, t { { 3, 6 }, { 9, 12 }, { 0, 0 } })
      local list = b:blocks {
        { table = 1, first_bag = 0, bags = 3, out_offset = 0, out_stride = 4 },
        { table = 2, first_bag = 3, bags = 3, out_offset = 2,
          out_stride = 4 },
      }
      local ids, offsets = { 0, 2, 2, 1, 0, 1, -1, 0 }, { 0, 3, 3, 4, 6, 6, 8 }
      -- the pruned row counts in the length of its bag
      local want = { { 201, 402, 6, 9 }, { 0, 0, 0, 0 }, { 10, 20, 1.5, 3 } }
      assert.same(want, b:lookup(t(ids, "i32"), t(offsets, "i32"), list, 3, 4):to_table())
      assert.same(want, b:lookup(t(ids, "i64"), t(offsets, "i32"), list, 3, 4):to_table())
      assert.same(want, b:forward(t(ids, "i32"), t(offsets, "i64"), list,
        peri.zeros({ 3, 4 }, "f32", device)):to_table())
    end)

    -- -- updates ------------------------------------------------------------------------------------------------------

    for _, name in ipairs(util.keys(optimizers)) do
      it("trains 20 steps with " .. name .. " as double precision does", function()
        local draw, fused = generator(2), params(name)
        local a, m = width(name, 5), width(name, 33)
        local all = a + m + 16
        local tables = {
          { name = "a", rows = 11, cols = a }, { name = "b", rows = 6, cols = m, pooling = "MEAN" },
          { name = "c", rows = 40, cols = 16 },
        }
        local b = batch(tables, fused)
        for i, x in ipairs(tables) do x.weight = b:state(i):to_list() end
        local o = { kind = fused.optimizer }
        for key, value in pairs(fused) do o[key] = value end
        if name:find "^counter" then o.kind = "rowwise_adagrad_with_counter" end
        local exact = reference.new(tables, o)
        local blocks = {
          { table = 1, first_bag = 0, bags = 8, out_offset = 0, out_stride = all },
          { table = 2, first_bag = 8, bags = 8, out_offset = a,
            out_stride = all },
          { table = 3, first_bag = 16, bags = 8, out_offset = a + m, out_stride = all },
        }
        local list = b:blocks(blocks)
        local steps = PRETENDED and name:find "^shampoo" and 6 or 20
        for step = 1, steps do
          local ids, offsets = bags_of(24, 5, 6, draw)
          local input = { ids = ids, offsets = offsets, blocks = blocks, weights = step % 2 == 0
            and numbers(#ids, draw) or nil }
          local grad = numbers(8 * all, draw)
          local weights = input.weights and t(input.weights):requires_grad()
          local out = b:lookup(t(ids, "i64"), t(offsets, "i64"), list, 8, all, weights)
          golden.assert_near(exact:forward(input, 8 * all), out:to_list(), { abs = 2e-4 }, "output")
          local want = exact:weight_gradient(input, grad)
          exact:backward(input, grad)
          out:backward(peri.tensor(grad, "f32", device, { 8, all }))
          if weights then golden.assert_near(want, weights:grad():to_list(), { abs = 1e-3 }, "gradient of weights") end
        end
        for i, x in ipairs(exact.tables) do
          golden.assert_near(x.weight, b:state(i):to_list(), { abs = 2e-4 }, "table " .. i)
          for _, state in ipairs(b:state_names()) do golden.assert_near(x[state], b:state(i, state):to_list(),
            { abs = 1e-3, rel = 1e-4 }, state) end
        end
        assert.equal(steps, b:iteration())
      end)

      if not name:find "^shampoo" then it("gives the same bits through a dense gradient with " .. name, function()
        local draw, made = generator(3), {}
        local ids, offsets = bags_of(12, 9, 10, draw)
        local a, c = width(name, 7), width(name, 17)
        local grad = numbers(6 * (a + c), draw)
        for way = 1, 2 do
          local b = batch({ { name = "a", rows = 10, cols = a }, { name = "b", rows = 10, cols = c } }, params(name))
          local list = b:blocks {
            { table = 1, first_bag = 0, bags = 6, out_offset = 0, out_stride = a + c },
            { table = 2, first_bag = 6, bags = 6, out_offset = a, out_stride = a + c },
          }
          for _ = 1, 3 do
            if way == 1 then
              b:backward(t(ids, "i64"), t(offsets, "i64"), list, t(grad))
            else
              local dense = b:gradient(t(ids, "i64"), t(offsets, "i64"), list, t(grad))
              b:apply_gradient(dense)
            end
          end
          assert.equal(3, b:iteration())
          made[way] = {}
          for i = 1, 2 do
            for _, state in ipairs(b:state_names()) do table.insert(made[way], b:state(i, state):to_list()) end
          end
        end
        assert.same(made[1], made[2])
      end) end
    end

    it("trains only when gradients are recorded and flow, with the rate of that moment", function()
      local b = batch({ { name = "a", rows = 4, cols = 2, init = embed.constant(0) } })
      local list = b:blocks { { table = 1, first_bag = 0, bags = 1, out_offset = 0, out_stride = 2 } }
      local function look() return b:lookup(t({ 1, 1 }, "i64"), t({ 0, 2 }, "i64"), list, 1, 2) end
      peri.no_grad(function() assert.is_true(look():is_leaf()) end)
      look() -- dropped without a backward pass
      assert.equal(0, b:iteration())
      local out = look()
      b:set_learning_rate(0.5)
      out:backward(t { { 1, 2 } })
      assert.equal(1, b:iteration())
      assert.same({ { 0, 0 }, { -1, -2 }, { 0, 0 }, { 0, 0 } }, b:state(1):to_table())
      b:set_iteration(41)
      look():backward(t { { 0, 0 } })
      assert.equal(42, b:iteration())
      assert.equal(0.5, b:learning_rate())
    end)

    it("gives leaves their gradients without an optimizer", function()
      local b = batch({ { name = "a", rows = 3, cols = 2, init = embed.constant(1) },
        { name = "b", rows = 2, cols = 1 } }, { optimizer = "none" })
      local list = b:blocks { { table = 1, first_bag = 0, bags = 2, out_offset = 0, out_stride = 2 } }
      local function look() return b:lookup(t({ 0, 2, 2 }, "i64"), t({ 0, 2, 3 }, "i64"), list, 2, 2) end
      look():backward(t { { 1, 2 }, { 10, 20 } })
      assert.same({ { 1, 2 }, { 0, 0 }, { 11, 22 } }, b:leaf(1):grad():to_table())
      look():backward(t { { 1, 2 }, { 10, 20 } }) -- gradients of leaves accumulate
      assert.same({ { 2, 4 }, { 0, 0 }, { 22, 44 } }, b:leaf(1):grad():to_table())
      assert.same({ { 0 }, { 0 } }, b:leaf(2):grad():to_table())
      assert.same({ 1, 1, 1, 1, 1, 1 }, b:state(1):to_list())
      assert.equal(0, b:iteration())
    end)

    it("follows itself across streams", function()
      local b = batch({ { name = "a", rows = 50, cols = 16, init = embed.constant(0) } })
      local list = b:blocks { { table = 1, first_bag = 0, bags = 1, out_offset = 0, out_stride = 16 } }
      local d, stream = peri.ffi.device(device), ffi.new "peri_stream *[1]"
      local ids, offsets, grad = t({ 7 }, "i64"), t({ 0, 1 }, "i64"), peri.ones({ 16 }, "f32", device)
      check(C.peri_device_synchronize(d))
      check(C.peri_stream_new(d, stream))
      for _ = 1, 5 do
        for _, s in ipairs { stream[0], false } do
          check(C.peri_stream_current_set(d, s or nil))
          b:backward(ids, offsets, list, grad)
        end
      end
      local got = b:state(1):to_table()
      C.peri_stream_release(stream[0])
      assert.equal(-10, got[8][1])
      assert.equal(0, got[7][1])
    end)
  end)
end

describe("table batch", function()
  it("computes the same bits with any number of threads", function()
    local draw = generator(9)
    local ids, offsets = bags_of(4096, 9, 3000, draw)
    local grad = numbers(2048 * 112, draw)
    local made, before = {}, C.peri_threads()
    for i, threads in ipairs { 1, 2, 3, 5 } do
      check(C.peri_threads_set(threads))
      local b = embed.tbe.new {
        tables = { { name = "a", rows = 3000, cols = 64 }, { name = "b", rows = 3000, cols = 48, pooling = "MEAN" } },
        fused_params = { optimizer = "adam" }, seed = 1,
      }
      local list = b:blocks {
        { table = 1, first_bag = 0, bags = 2048, out_offset = 0, out_stride = 112 },
        { table = 2, first_bag = 2048, bags = 2048, out_offset = 64, out_stride = 112 },
      }
      local out = b:lookup(peri.tensor(ids, "i64"), peri.tensor(offsets, "i64"), list, 2048, 112)
      local first = out:read()
      out:backward(peri.tensor(grad, "f32", nil, { 2048, 112 }))
      made[i] = ffi.string(first, 2048 * 112 * 4) .. ffi.string(b:state(1):read(), 3000 * 64 * 4)
        .. ffi.string(b:state(2):read(), 3000 * 48 * 4)
    end
    check(C.peri_threads_set(before))
    for i = 2, #made do assert.is_true(made[1] == made[i], "another result with the thread count of run " .. i) end
  end)
end)
