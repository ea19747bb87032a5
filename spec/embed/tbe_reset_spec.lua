-- Rows that start again (peri_tbe_rows_reset): they are what the rows of a new table batch are, the others what they
-- were; in memory and in files, wherever a row is.
local peri = require "perilune"
local support = require "spec.support.tbe"
local tier = require "spec.support.tier"
local embed = peri.embed

local BAGS, COLS = 6, 5

for _, device in ipairs { "cpu", "opaque" } do
  local function t(list, dtype, shape) return peri.tensor(list, dtype or "f32", device, shape) end

  local function table_batch(args)
    local params = { optimizer = "rowwise_adagrad", learning_rate = 0.1 }
    for key, value in pairs(args.optimizer or {}) do params[key] = value end
    params.cache_params = args.cache
    return embed.tbe.new { device = device, seed = 3, fused_params = params, data_type = args.data_type or "FP32",
      tables = {
      { name = "a", rows = 9, cols = 3 },
      { name = "b", rows = 60, cols = COLS, row_offset = 20, total_rows = 100, col_offset = 4, total_cols = 16,
        init = args.init },
    } }
  end

  local function batch_of(b, step)
    local draw, ids, offsets = support.generator(step), {}, { 0 }
    for i = 1, BAGS do
      for _ = 1, 3 do ids[#ids + 1] = draw(60) end
      offsets[i + 1] = #ids
    end
    local list = b:blocks { { table = 2, first_bag = 0, bags = BAGS, out_offset = 0, out_stride = COLS } }
    return { batch = b:batch(t(ids, "i64"), t(offsets, "i64"), list),
      grad = t(support.numbers(BAGS * COLS, draw), "f32", { BAGS, COLS }) }
  end

  local function step(x)
    local out = x.batch:lookup(BAGS, COLS)
    local values = out:to_list()
    out:backward(x.grad)
    return values
  end

  --- All states of table b by row: row -> list of numbers.
  local function rows_of(b)
    local rows = {}
    for r = 1, 60 do rows[r] = {} end
    for _, name in ipairs(b:state_names()) do
      local shape = b:state_shape(2, name)
      local all, width = b:read(2, name, 0, peri.zeros(shape, "f32", device)):to_list(), shape[2] or 1
      for i, x in ipairs(all) do table.insert(rows[math.floor((i - 1) / width) + 1], x) end
    end
    return rows
  end

  local list = { 59, 0, 17, 3, 17, 31 }
  local function is_reset(r)
    for _, x in ipairs(list) do
      if x == r - 1 then return true end
    end
    return false
  end

  describe("rows that start again on " .. device, function()
    local cases = {
      { "sgd", optimizer = { optimizer = "sgd" } }, { "adam", optimizer = { optimizer = "adam" } },
      { "rowwise_adagrad" }, { "partial_rowwise_adam", optimizer = { optimizer = "partial_rowwise_adam" } },
      { "counters", optimizer = { weight_decay_mode = "counter", weight_decay = 0.1,
        counter_based_regularization = { counter_weight_decay_mode = "l2", counter_halflife = 5 } } },
      { "a normal start", init = embed.normal(1, 2) }, { "a constant start", init = embed.constant(0.5) },
      { "FP16", data_type = "FP16" }, { "BF16, rounded to nearest", data_type = "BF16",
        optimizer = { stochastic_rounding = false } },
    }
    for _, case in ipairs(cases) do
      for _, cache in ipairs { false, { load_factor = 0.4 }, { load_factor = 1 } } do
        it(("are new, the others stay: %s, %s"):format(case[1], cache and "in files " .. cache.load_factor
          or "in memory"), function()
          local args = { optimizer = case.optimizer, init = case.init, data_type = case.data_type }
          local fresh = rows_of(table_batch(args))
          args.cache = cache or nil
          local b = table_batch(args)
          for k = 1, 6 do step(batch_of(b, k)) end
          local before, changed = rows_of(b), 0
          b:reset_rows(2, t(list, "i64"))
          local after = rows_of(b)
          for r = 1, 60 do
            local reset = is_reset(r)
            assert.same(reset and fresh[r] or before[r], after[r], "row " .. r - 1)
            for i, x in ipairs(before[r]) do changed = changed + ((reset and x ~= fresh[r][i]) and 1 or 0) end
          end
          assert.is_true(changed > 0)
          assert.equal(6, b:iteration())
        end)
      end
    end

    it("start again in files as in memory, also rows that a prefetch brings or an update still changes", function()
      for _, factor in ipairs { 0.35, 1 } do
        local pair = { table_batch { optimizer = { optimizer = "adam" } },
          table_batch { optimizer = { optimizer = "adam" }, cache = { load_factor = factor } } }
        local ahead, outputs = {}, { {}, {} }
        for i, b in ipairs(pair) do ahead[i] = batch_of(b, 1) end
        for k = 1, 12 do
          local draw, rows = support.generator(1000 + k), {}
          for i = 1, 8 do rows[i] = draw(60) end
          for i, b in ipairs(pair) do
            local now = ahead[i]
            ahead[i] = batch_of(b, k + 1)
            local out
            if k % 3 == 0 then -- between a lookup and its update
              out = now.batch:lookup(BAGS, COLS)
              outputs[i][k] = out:to_list()
            end
            ahead[i].batch:prefetch()
            b:reset_rows(2, t(rows, "i64"))
            if out then out:backward(now.grad) else outputs[i][k] = step(now) end
          end
          assert.same(outputs[1][k], outputs[2][k], "step " .. k)
        end
        assert.same(rows_of(pair[1]), rows_of(pair[2]))
      end
    end)

    it("are of the next flush", function()
      local folder = tier.folder()
      local cache = { load_factor = 0.3, directory = folder }
      local b = table_batch { cache = cache }
      for k = 1, 4 do step(batch_of(b, k)) end
      b:flush()
      b:reset_rows(2, t(list, "i64"))
      b:flush()
      local want = rows_of(b)
      b:release()
      collectgarbage() -- batches keep files open
      collectgarbage()
      assert.same(want, rows_of(table_batch { cache = cache }))
      collectgarbage()
      collectgarbage()
      tier.remove(folder)
    end)

    it("say which rows there are", function()
      local b = table_batch {}
      local function fails(pattern, ...)
        local ok, err = pcall(b.reset_rows, b, ...)
        assert.is_false(ok)
        assert.truthy(tostring(err):find(pattern), tostring(err))
      end
      fails("table 'b': row 60, allowed: 0%.%.59", 2, t({ 1, 60 }, "i64"))
      fails("table 'b': row %-1, allowed: 0%.%.59", 2, t({ -1 }, "i64"))
      fails("allowed: i64 of one dimension", 2, t({ 1 }, "i32"))
      fails("table 2, allowed: 0%.%.1", 3, t({ 1 }, "i64"))
      b:reset_rows(2, peri.zeros({ 0 }, "i64", device))
      local bytes = embed.tbe.new { tables = { { name = "a", rows = 4, cols = 3 } }, data_type = "INT8",
        device = device, fused_params = { optimizer = "none" } }
      local ok, err = pcall(bytes.reset_rows, bytes, 1, t({ 1 }, "i64"))
      assert.is_false(ok)
      assert.truthy(tostring(err):find "rows of bytes", tostring(err))
    end)
  end)
end
