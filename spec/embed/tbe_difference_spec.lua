-- Gradients of table batches against central differences: of the rows (dense and sparse) and of the ids' weights, for
-- every pooling, with weights, scales, shared tables and bags, pruned, foreign and repeated ids. A lookup is linear in
-- each of them, so steps may be large.
local peri = require "perilune"
local support = require "spec.support.tbe"

local STEP = 0.5

local function dot(a, b)
  local sum = 0
  for i = 1, #a do sum = sum + a[i] * b[i] end
  return sum
end

local function differences(list, f) return support.differences(list, f, STEP) end

local function assert_near(want, got, what)
  assert.equal(#want, #got)
  for i = 1, #want do
    local far = math.abs(want[i] - got[i])
    assert(far <= 2e-5 * (1 + math.abs(want[i])), ("%s, element %d: %.9g, by differences %.9g"):format(what, i, got[i],
      want[i]))
  end
end

for _, device in ipairs { "cpu", "opaque" } do
  local function t(list, dtype, shape) return peri.tensor(list, dtype or "f32", device, shape) end

  describe("differences of lookups on " .. device, function()
    for _, pooling in ipairs { "SUM", "MEAN", "NONE" } do
      for _, with in ipairs { "", "weights", "scale", "weights and scale" } do
        it(("are the gradients: %s %s"):format(pooling, with), function()
          local draw = support.generator(#pooling * 31 + #with)
          local tables = { { name = "a", rows = 4, cols = 3, pooling = pooling },
            { name = "b", rows = 5, cols = 1, pooling = pooling },
            { name = "c", rows = 3, cols = 17, pooling = pooling } }
          local b = support.maker(device)(tables, { optimizer = "none", bounds_check_mode = "IGNORE" })
          local ids, offsets, bags = { 0, 2, 2, -1, 1, 3, 0, 9, 1, 2, 2, 0, 1 }, { 0, 3, 3, 5, 8, 9, 13 }, 6
          local width, rows = 3 + 1 + 17 + 3, pooling == "NONE" and #ids or bags
          local list = b:blocks {
            { table = 1, first_bag = 0, bags = 4, out_offset = 0, out_stride = width },
            { table = 3, first_bag = 1, bags = 5, out_offset = 4, out_stride = width }, -- bags 1 .. 3 are shared
            { table = 1, first_bag = 4, bags = 2, out_offset = 21, out_stride = width }, -- a table used twice
            { table = 2, first_bag = 0, bags = 6, out_offset = 3, out_stride = width },
          }
          local grad = support.numbers(rows * width, draw)
          local weights = with:find "weights" and support.numbers(#ids, draw) or nil
          local scale = with:find "scale" and t(support.numbers(bags, draw)) or nil
          local function loss(w)
            local out = peri.zeros({ rows * width }, "f32", device)
            b:forward(t(ids, "i64"), t(offsets, "i64"), list, out, w and t(w), scale)
            return dot(out:to_list(), grad)
          end

          local x = weights and t(weights):requires_grad()
          local out = b:lookup(t(ids, "i64"), t(offsets, "i64"), list, rows, width, x, scale)
          out:backward(t(grad, "f32", { rows, width }))
          if weights then assert_near(differences(weights, loss), x:grad():to_list(), "weights") end
          local sparse = b:sparse_gradient(t(ids, "i64"), t(offsets, "i64"), list, t(grad), weights and t(weights),
            scale)
          for i, config in ipairs(tables) do
            local shape, before = { config.rows, config.cols }, b:state(i):to_list()
            local want = differences(before, function(values)
              b:write(i, "weight", 0, t(values, "f32", shape))
              return loss(weights)
            end)
            b:write(i, "weight", 0, t(before, "f32", shape))
            assert_near(want, b:leaf(i):grad():to_list(), "table " .. config.name)
            local scattered = {}
            for k = 1, #want do scattered[k] = 0 end
            local values = sparse[i][2]:to_table()
            for k, row in ipairs(sparse[i][1]:to_list()) do
              for c = 1, config.cols do scattered[row * config.cols + c] = values[k][c] end
            end
            assert_near(want, scattered, "sparse rows of table " .. config.name)
          end
        end)
      end
    end
  end)
end
