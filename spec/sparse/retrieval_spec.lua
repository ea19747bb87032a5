-- peri.sparse.top_products. Expected: all products, in f64, sorted. Small whole numbers have exact products in any
-- order, so that items and ties are compared as they are; of random ones no item that was left out may have a larger
-- product than one that was found.
-- cuda: always
local peri = require "perilune"
local sparse, Q = peri.sparse, peri.sparse.quantize

local state = 12345
local function random(n)
  state = state * 16807 % 2147483647
  return state % n
end

--- A matrix of drawn numbers: its rows, and a tensor of them.
local function matrix(rows, cols, draw, dtype, device)
  local list = {}
  for r = 1, rows do
    list[r] = {}
    for c = 1, cols do list[r][c] = draw() end
  end
  return list, peri.tensor(list, dtype or "f32"):to(nil, device)
end

local function whole() return random(7) - 3 end
local function any() return random(2000001) / 1e6 - 1 end

local function product(q, x)
  local sum = 0
  for d = 1, #q do sum = sum + q[d] * x[d] end
  return sum == sum and sum or -math.huge
end

--- Numbers (from 0) and products of the k best.
local function best(q, items, k)
  local list = {}
  for i = 1, #items do list[i] = { product(q, items[i]), i - 1 } end
  table.sort(list, function(a, b) return a[1] > b[1] or a[1] == b[1] and a[2] < b[2] end)
  local scores, indices = {}, {}
  for i = 1, k do scores[i], indices[i] = list[i][1], list[i][2] end
  return scores, indices
end

--- Rows of k numbers.
local function rows_of(t, k)
  local flat, rows = t:to_list(), {}
  for i, x in ipairs(flat) do
    local r = math.floor((i - 1) / k) + 1
    rows[r] = rows[r] or {}
    table.insert(rows[r], x)
  end
  return rows
end

local function exact(queries, q, items, x, k, format)
  local scores, indices = sparse.top_products(q, x, k, format)
  assert.same({ { #queries, k }, { #queries, k } }, { scores:shape(), indices:shape() })
  scores, indices = rows_of(scores, k), rows_of(indices, k)
  for r, query in ipairs(queries) do
    local want, which = best(query, items, k)
    assert.same({ want, which }, { scores[r], indices[r] })
  end
end

for _, device in ipairs(require "spec.support.devices") do
  describe("sparse.top_products on " .. device, function()
    it("finds what a sort of all products finds, and ties by number", function()
      for _, case in ipairs { { 1, 1, 1, 1 }, { 1, 40, 3, 5 }, { 2, 33, 8, 33 }, { 3, 2100, 9, 7 }, { 5, 17, 16, 4 },
        { 11, 130, 33, 64 }, { 1, 5000, 64, 10 } } do
        local queries, q = matrix(case[1], case[3], whole, "f32", device)
        local items, x = matrix(case[2], case[3], whole, "f32", device)
        exact(queries, q, items, x, case[4])
      end
    end)

    it("takes f16, bf16, and rows of strides of their own", function()
      for _, dtype in ipairs { "f16", "bf16", "f32" } do
        local queries, q = matrix(3, 12, whole, dtype, device)
        local items, x = matrix(70, 12, whole, dtype, device)
        exact(queries, q, items, x, 9)
        local wide = peri.zeros({ 70, 20 }, dtype, device)
        wide:slice(2, 5, 17):copy(x)
        exact(queries, q, items, wide:slice(2, 5, 17), 9)
        exact(queries, q, items, x:transpose(1, 2):contiguous():transpose(1, 2), 9)
      end
    end)

    it("takes rows of codes for what they are restored to", function()
      for _, format in ipairs { Q.format { codes = "int8" },
        Q.format { codes = "int8", scale = "f16", scale_first = true }, Q.format { codes = "int4", alignment = 16 },
        Q.format { codes = "int2" }, Q.format { codes = "fp8" }, Q.format { codes = "fp8", scale = "f32" } } do
        local _, q = matrix(5, 20, any, "f32", device)
        local _, x = matrix(300, 20, any, "f32", device)
        local rows = Q.rows(x, format)
        local scores, indices = sparse.top_products(q, rows, 30, format)
        local other, same = sparse.top_products(q, Q.restore(rows, format, 20), 30)
        assert.same({ other:to_list(), same:to_list() }, { scores:to_list(), indices:to_list() })
      end
    end)

    it("has the bits of a query alone beside any others, and leaves out nothing that is better", function()
      local queries, q = matrix(9, 50, any, "f32", device)
      local items, x = matrix(3000, 50, any, "f32", device)
      local scores, indices = sparse.top_products(q, x, 40)
      scores, indices = rows_of(scores, 40), rows_of(indices, 40)
      for r = 1, 9 do
        local s, i = sparse.top_products(q:slice(1, r - 1, r), x, 40)
        assert.same({ s:to_list(), i:to_list() }, { scores[r], indices[r] })
        local want = best(queries[r], items, 40)
        for c = 1, 40 do
          assert.near(want[c], scores[r][c], 1e-5)
          assert.near(want[c], product(queries[r], items[indices[r][c] + 1]), 1e-5)
        end
      end
    end)

    it("puts products that are no numbers behind all others", function()
      local x = peri.tensor({ { 0 / 0 }, { 1 }, { -1 / 0 }, { 2 }, { 1 / 0 } }, "f32"):to(nil, device)
      local scores, indices = sparse.top_products(peri.tensor({ { 1 } }, "f32"):to(nil, device), x, 5)
      assert.same({ 1 / 0, 2, 1, -1 / 0, -1 / 0 }, scores:to_list())
      assert.same({ 4, 3, 1, 0, 2 }, indices:to_list())
      local none = sparse.top_products(peri.zeros({ 0, 1 }, "f32", device), x, 2)
      assert.same({ 0, 2 }, none:shape())
    end)

    it("refuses what does not fit, by name", function()
      local q, x = peri.zeros({ 2, 4 }, "f32", device), peri.zeros({ 6, 4 }, "f32", device)
      local function refused(text, ...)
        local args = { ... }
        assert.error_matches(function() sparse.top_products(args[1], args[2], args[3], args[4]) end, text)
      end
      refused("k is 0, allowed: 1..6", q, x, 0)
      refused("k is 7, allowed: 1..6", q, x, 7)
      refused("k is 1, allowed: 1..0", q, peri.zeros({ 0, 4 }, "f32", device), 1)
      refused("items are .*, wanted rows of 4 numbers", q, peri.zeros({ 6, 5 }, "f32", device), 1)
      refused("wanted rows of 4 numbers", q, peri.zeros({ 6, 4 }, "i64", device), 1)
      refused("items are .*, wanted u8 rows of 12 bytes, for 4 numbers", q, x, 1, Q.format { codes = "int8" })
      refused("queries", peri.zeros({ 4 }, "f32", device), x, 1)
    end)
  end)
end
