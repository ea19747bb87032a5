-- Sparse operators: random input against plain Lua, gradients by finite differences, empty and malformed input, on both
-- devices.
-- cuda: always
local peri = require "perilune"
local gradcheck = require "spec.support.gradcheck"
local sparse = peri.sparse

local state = 20261121
local function draw(below)
  state = (state * 16807) % 2147483647
  return state % below
end

local function draws(n, below)
  local list = {}
  for i = 1, n do list[i] = draw(below) end
  return list
end

local function sum(list)
  local total = 0
  for _, x in ipairs(list) do total = total + x end
  return total
end

local function complete(lengths)
  local list, total = { 0 }, 0
  for i, n in ipairs(lengths) do
    total = total + n
    list[i + 1] = total
  end
  return list
end

for _, device in ipairs(require "spec.support.devices") do
  local function t(data, dtype, shape) return peri.tensor(data, dtype or "i64", device, shape) end
  local function bad(pattern, f, ...)
    local args, n = { ... }, select("#", ...)
    assert.error_matches(function() f(unpack(args, 1, n)) end, pattern)
  end

  describe("cumulative sums on " .. device, function()
    it("are those of plain Lua", function()
      for _, n in ipairs { 0, 1, 7, 4096, 4097, 9000 } do
        for _, dtype in ipairs { "i32", "i64" } do
          local list = draws(n, 9)
          local want = complete(list)
          local x = t(list, dtype)
          assert.same(want, sparse.asynchronous_complete_cumsum(x):to_list())
          assert.equal(dtype, sparse.asynchronous_complete_cumsum(x):dtype())
          local exclusive, inclusive = sparse.asynchronous_exclusive_cumsum(x):to_list(),
            sparse.asynchronous_inclusive_cumsum(x):to_list()
          for i = 1, n do
            assert(exclusive[i] == want[i] and inclusive[i] == want[i + 1])
          end
          assert.equal(n, #exclusive)
        end
      end
    end)
    it("run along rows", function()
      local x = t({ { 1, -2, 3 }, { 4, 5, -6 } }, "i32")
      assert.same({ { 0, 1, -1, 2 }, { 0, 4, 9, 3 } }, sparse.asynchronous_complete_cumsum(x):to_table())
      assert.same({ { 0, 1, -1 }, { 0, 4, 9 } }, sparse.asynchronous_exclusive_cumsum(x):to_table())
      assert.same({ { 1, 0 }, { 4, 4 } },
        sparse.asynchronous_inclusive_cumsum(t({ { 1, 4 }, { -1, 0 } }, "i64"):transpose(1, 2)):to_table())
      assert.same({ 0, 4 }, sparse.asynchronous_complete_cumsum(t({}, "i32", { 0, 3 })):shape())
      assert.same({ { 0 }, { 0 } }, sparse.asynchronous_complete_cumsum(t({}, "i32", { 2, 0 })):to_table())
    end)
    it("must fit", function()
      local big = 2 ^ 31 - 1
      assert.same({ 0, big }, sparse.asynchronous_complete_cumsum(t({ big }, "i32")):to_list())
      bad("sum up to element 1 %(1%) does not fit in i32", sparse.asynchronous_complete_cumsum, t({ big, 1 }, "i32"))
      bad("sum up to element 2 %(%-1%) does not fit in i32", sparse.asynchronous_inclusive_cumsum,
        t({ -big, -1, -1 }, "i32"))
      bad("element 5 %(2147483647%) does not fit", sparse.asynchronous_complete_cumsum,
        t({ { 1, 2, 3 }, { 4, 5, big } }, "i32"))
      assert.same({ { 0, big - 1 }, { 0, big } }, -- what is not part of the result need not fit
        sparse.asynchronous_exclusive_cumsum(t({ { big - 1, big }, { big, 9 } }, "i32")):to_table())
      bad("element 1 %(1%) does not fit", sparse.asynchronous_exclusive_cumsum, t({ big, 1, 0 }, "i32"))
      local huge = peri.Tensor.from_memory(require("ffi").new("int64_t[2]", 0x7fffffffffffffffLL, 1), { 2 }, "i64",
        device)
      bad("sum up to element 1 %(1%) does not fit in i64", sparse.asynchronous_complete_cumsum, huge)
      local wide = peri.full({ 20000 }, 2 ^ 49, "i64", device)
      bad("sum up to element 16383", sparse.asynchronous_complete_cumsum, wide)
      assert.equal(100 * 2 ^ 49, sparse.asynchronous_complete_cumsum(wide:slice(1, 0, 100)):item(100))
      bad("x is f32", sparse.asynchronous_complete_cumsum, t({ 1 }, "f32"))
      bad("wanted 1 or 2 dimensions", sparse.asynchronous_complete_cumsum, t({}, "i64", { 1, 0, 1 }))
    end)
  end)

  describe("permuted segments on " .. device, function()
    local function by_hand(order, lengths, columns, values, width)
      local starts, out, new_lengths = { [0] = 0 }, {}, {}
      for s = 0, #lengths / columns - 1 do
        starts[s + 1] = starts[s]
        for c = 1, columns do starts[s + 1] = starts[s + 1] + lengths[s * columns + c] end
      end
      for _, p in ipairs(order) do
        for c = 1, columns do new_lengths[#new_lengths + 1] = lengths[p * columns + c] end
        for i = starts[p] * width + 1, starts[p + 1] * width do out[#out + 1] = values[i] end
      end
      return new_lengths, out
    end

    it("are those of plain Lua", function()
      for variant = 1, 30 do
        local parts, columns, width = 1 + draw(40), variant % 3 == 0 and 1 or 1 + draw(5), 1 + draw(3)
        local lengths, order = draws(parts * columns, variant % 7 == 0 and 1 or 6), draws(draw(60), parts)
        local n = sum(lengths)
        local values, weights = draws(n, 1000), draws(n * width, 1000)
        local want_lengths, want = by_hand(order, lengths, columns, values, 1)
        local _, want_weights = by_hand(order, lengths, columns, weights, width)
        local shaped = columns > 1 and { parts, columns } or nil
        local new_lengths, got, new_weights = sparse.permute_2D_sparse_data(t(order, variant % 2 == 0 and "i32"
          or "i64"), t(lengths, variant % 4 < 2 and "i32" or "i64", shaped), t(values, "i32"),
            t(weights, "f32", { n, width }))
        assert.same(want_lengths, new_lengths:to_list())
        assert.same(want, got:to_list())
        assert.same(want_weights, new_weights:to_list())
        if columns > 1 then
          local flat, same = sparse.permute_2D_sparse_data_input1D(t(order), t(lengths), t(values), columns)
          assert.same(want_lengths, flat:to_list())
          assert.same(want, same:to_list())
        end
      end
    end)

    it("pass gradients to the rows they came from", function()
      local lengths = t({ { 1, 0 }, { 2, 1 }, { 0, 0 }, { 1, 1 } }, "i32")
      for _, order in ipairs { { 3, 1, 0, 2 }, { 1, 1, 3, 1 }, { 2 }, {} } do
        gradcheck.check(function(values)
          local _, rows = sparse.permute_2D_sparse_data(t(order, "i32"), lengths, values)
          return rows
        end, { { 6, 2 } }, { device = device, seed = 5 })
      end
      gradcheck.check(function(values) return (sparse.jagged_index_select(values, t { 1, 0, 3 }, t { 2, 0, 2, 1 })) end,
        { { 4, 3 } }, { device = device, seed = 6 })
      gradcheck.check(function(values) return sparse.index_select_dim0(values, t({ 2, 2, 0, 2 }, "i32")) end,
        { { 4, 3 } }, { device = device, seed = 7 })
      gradcheck.check(function(weights)
        local _, _, moved = sparse.permute_1D_sparse_data(t { 1, 0 }, t { 2, 1 }, t { 7, 8, 9 }, weights)
        return moved
      end, { { 3 } }, { device = device, seed = 8 })
    end)

    it("name what is wrong", function()
      local permute = sparse.permute_2D_sparse_data
      bad("permute%[1%] is 2, allowed: 0..1", permute, t { 0, 2 }, t { 1, 1 }, t { 5, 6 })
      bad("permute%[0%] is %-1, allowed: 0..1", permute, t({ -1 }, "i32"), t { 1, 1 }, t { 5, 6 })
      bad("permute%[0%] is 0, and nothing is allowed", permute, t { 0 }, t {}, t {})
      bad("lengths, bag 1: length %-1", permute, t { 0 }, t { 2, -1 }, t { 5, 6 })
      bad("lengths, row 1, column 0: length %-4", permute, t { 0 }, t { { 3, 0 }, { -4, 1 } }, t { 5, 6, 7, 8 })
      bad("lengths sum to 3, but there are 2 values: lengths, bag 1 ends at 3", permute, t { 0 }, t { 1, 2 },
        t { 5, 6 })
      bad("lengths, bag 0: length 3, but there are only 2", permute, t { 0 }, t { 3, -1 }, t { 5, 6 })
      bad("lengths sum to 1, but there are 2", permute, t { 0 }, t { 1, 0 }, t { 5, 6 })
      bad("permute%[0%] is 9, allowed: 0..1", permute, t { 9 }, t { 3, -1 }, t { 5, 6 })
      bad("permute%[1%] is 3, allowed: 0..2", permute, t { 2, 3 }, t { {}, {}, {} }, t { 5, 6 })
      bad("permute is f32", permute, t({ 0 }, "f32"), t { 1, 1 }, t { 5, 6 })
      bad("lengths is f32", permute, t { 0 }, t({ 1, 1 }, "f32"), t { 5, 6 })
      bad("weights are f32 %[1%] for 2 values", permute, t { 0 }, t { 1, 1 }, t { 5, 6 }, t({ 1 }, "f32"))
      bad("wanted a multiple of the stride 2", sparse.permute_2D_sparse_data_input1D, t { 0 }, t { 1, 1, 0 },
        t { 5, 6 }, 2)
      bad("indices%[2%] is 3, allowed: 0..2", sparse.index_select_dim0, t { 5, 6, 7 }, t { 0, 1, 3 })
      bad("2 inputs, 1 lists", sparse.group_index_select_dim0, { t { 1 }, t { 2 } }, { t { 0 } })
      if device == "opaque" then bad("device", permute, peri.tensor({ 0 }, "i64", "cpu"), t { 1 }, t { 5 }) end
    end)
  end)

  describe("permutations on " .. device, function()
    it("turn around", function()
      for _, n in ipairs { 0, 1, 2, 100, 5000 } do
        local order = {}
        for i = 1, n do order[i] = i - 1 end
        for i = n, 2, -1 do
          local j = 1 + draw(i)
          order[i], order[j] = order[j], order[i]
        end
        for _, dtype in ipairs { "i32", "i64" } do
          local inverse = sparse.invert_permute(t(order, dtype))
          local list = inverse:to_list()
          for i = 1, n do assert(list[order[i] + 1] == i - 1) end
          assert.equal(dtype, inverse:dtype())
        end
      end
      bad("permute%[2%] is 1, as permute%[0%] is; allowed: every number of 0..2 once", sparse.invert_permute,
        t { 1, 0, 1 })
      bad("permute%[1%] is 3, allowed: 0..2", sparse.invert_permute, t { 1, 3, 1 })
      bad("permute is f32", sparse.invert_permute, t({ 1 }, "f32"))
    end)

    it("spread out over elements", function()
      local lengths, order = { 2, 0, 3, 1 }, { 2, 0, 2, 1, 3 }
      local in_offsets, new = complete(lengths), {}
      for i, p in ipairs(order) do new[i] = lengths[p + 1] end
      for _, dtype in ipairs { "i32", "i64" } do
        local got = sparse.expand_into_jagged_permute(t(order, dtype), t(in_offsets, "i32"), t(complete(new), "i64"), 9)
        assert.same({ 2, 3, 4, 0, 1, 2, 3, 4, 5 }, got:to_list())
        assert.equal(dtype, got:dtype())
      end
      assert.same({}, sparse.expand_into_jagged_permute(t {}, t { 0 }, t { 0 }):to_list())
      local expand = sparse.expand_into_jagged_permute
      bad("output_size 8, but the last output_offset is 9", expand, t(order), t(in_offsets), t(complete(new)), 8)
      bad("permute%[1%] is 4, allowed: 0..3", expand, t { 2, 4 }, t(in_offsets), t { 0, 3, 4 })
      bad("input_offset, bag 1: its offsets are 2 and 1", expand, t { 0 }, t { 0, 2, 1, 3 }, t { 0, 2 })
      bad("output_offset against the permuted input, bag 1: length 3, but its offsets 2 and 4 say 2", expand,
        t { 0, 2 }, t(in_offsets), t { 0, 2, 4 })
      bad("2 entries of output_offset for a permutation of 2", expand, t { 0, 2 }, t(in_offsets), t { 0, 2 })
      bad("input_offset are empty", expand, t {}, t {}, t { 0 })
      bad("input_offset%[3%] is %-3", expand, t { 0 }, t { 0, 1, 2, -3 }, t { 0, 1 })
    end)

    it("count within segments", function()
      assert.same({ 0, 1, 0, 0, 1, 2 }, sparse.offsets_range(t({ 0, 2, 3, 3 }, "i32"), 6):to_list())
      assert.same({ 0, 1, 0, 0, 1, 2 }, sparse.lengths_range(t { 2, 0, 1, 3 }):to_list())
      assert.same({}, sparse.offsets_range(t {}, 0):to_list())
      assert.same({}, sparse.lengths_range(t {}):to_list())
      bad("its offsets are 3 and 2", sparse.offsets_range, t { 0, 3, 2 }, 6)
      bad("the first offset is 1", sparse.offsets_range, t { 1, 2 }, 6)
      bad("bag 0: it ends at offset 7", sparse.offsets_range, t { 0, 7 }, 6)
      bad("range_size %-1", sparse.offsets_range, t { 0 }, -1)
      bad("no offsets for a range of 2", sparse.offsets_range, t {}, 2)
      bad("lengths%[1%] is %-2", sparse.lengths_range, t { 1, -2 })
    end)
  end)

  describe("sums of segments on " .. device, function()
    it("are those of plain Lua", function()
      for variant = 1, 20 do
        local lengths, step = draws(1 + draw(30), variant % 5 == 0 and 100 or 5), 1 + draw(3)
        local n = sum(lengths) * step
        local values, ends, want = draws(n, 100), complete(lengths), {}
        for s = 1, #lengths do
          want[s] = 0
          for i = ends[s] * step + 1, ends[s + 1] * step do want[s] = want[s] + values[i] end
        end
        for _, dtype in ipairs { "f32", "f64", "i32", "i64" } do
          assert.same(want, sparse.segment_sum_csr(step, t(ends, variant % 2 == 0 and "i32" or "i64"),
            t(values, dtype)):to_list())
        end
      end
    end)
    it("have gradients", function()
      for _, ends in ipairs { { 0, 2, 2, 3 }, { 0, 0, 3 }, { 0, 3, 3 } } do
        gradcheck.check(function(values) return sparse.segment_sum_csr(2, t(ends), values) end,
          { { 6 } }, { device = device, seed = 9 })
      end
      local none = peri.zeros({ 0 }, "f32", device):requires_grad(true)
      peri.nn.functional.sum(sparse.segment_sum_csr(1, t { 0 }, none)):backward()
      assert.same({ 0 }, none:grad():shape())
    end)
    it("name what is wrong", function()
      local f = sparse.segment_sum_csr
      bad("batch size 0", f, 0, t { 0, 2 }, t({ 1, 2 }, "f32"))
      bad("3 values, wanted a multiple of the batch size 2", f, 2, t { 0, 2 }, t({ 1, 2, 3 }, "f32"))
      bad("the last offset is 2, but there are 3", f, 1, t { 0, 2 }, t({ 1, 2, 3 }, "f32"))
      bad("its offsets are 2 and 1", f, 1, t { 0, 2, 1, 3 }, t({ 1, 2, 3 }, "f32"))
      bad("values are f16", f, 1, t { 0, 1 }, t({ 1 }, "f16"))
      bad("offsets is f32", f, 1, t({ 0, 1 }, "f32"), t({ 1 }, "f32"))
    end)
  end)

  describe("pooled embeddings on " .. device, function()
    it("have gradients through repeats and gaps", function()
      for _, order in ipairs { { 2, 0, 1 }, { 1, 1, 3 }, { 0 }, {} } do
        gradcheck.check(function(x) return sparse.permute_pooled_embs(x, { 0, 2, 3, 3, 6 }, order) end,
          { { 3, 6 } }, { device = device, seed = 10 })
      end
      local x = t({ { 1, 2, 3 }, { 4, 5, 6 } }, "f16")
      assert.same({ { 3, 1, 2 }, { 6, 4, 5 } }, sparse.permute_pooled_embs(x, { 0, 2, 3 }, { 1, 0 }):to_table())
    end)
    it("name what is wrong", function()
      local x, f = t({ { 1, 2, 3 } }, "f32"), sparse.permute_pooled_embs
      bad("permute_list%[1%] is 2, allowed: 0..1", f, x, { 0, 2, 3 }, { 0, 2 })
      bad("last of offset_dim_list is 4, but pooled are f32 %[1, 3%]", f, x, { 0, 2, 4 }, { 0 })
      bad("offset_dim_list%[2%] is 3", f, x, { 0, 4, 3 }, { 0 })
      bad("offset_dim_list%[0%] is 1", f, x, { 1, 3 }, { 0 })
      bad("offset_dim_list is empty", f, x, {}, {})
      bad("pooled are i64", f, t { { 1 } }, { 0, 1 }, { 0 })
    end)
  end)

  describe("distinct ids on " .. device, function()
    local function check(list, dtype)
      local unique, inverse, counts = sparse.unique(t(list, dtype), true, true)
      local seen, want = {}, {}
      for _, x in ipairs(list) do
        if not seen[x] then want[#want + 1] = x end
        seen[x] = (seen[x] or 0) + 1
      end
      table.sort(want)
      assert.same(want, unique:to_list())
      assert.equal(dtype, unique:dtype())
      local to, many = inverse:to_list(), counts:to_list()
      for i, x in ipairs(list) do assert(want[to[i] + 1] == x) end
      for i, x in ipairs(want) do assert(many[i] == seen[x]) end
      assert.same(want, (sparse.unique(t(list, dtype))):to_list())
    end
    it("are those of plain Lua, marked or sorted", function()
      for _, dtype in ipairs { "i32", "i64" } do
        for _, n in ipairs { 0, 1, 2, 50, 4096, 5000 } do
          check(draws(n, 7), dtype)
          check(draws(n, 2 * n + 1), dtype)
          local wide = {}
          for i = 1, n do wide[i] = draw(2 ^ 31) - 2 ^ 30 end
          check(wide, dtype)
        end
      end
      local far = {}
      for i = 1, 3000 do far[i] = (draw(1000) - 500) * 2 ^ 42 + draw(3) end
      check(far, "i64")
    end)
    it("hold the largest and smallest numbers", function()
      local ffi = require "ffi"
      local ids = peri.Tensor.from_memory(ffi.new("int64_t[4]", 0x7fffffffffffffffLL, -0x7fffffffffffffffLL - 1, 0,
        0x7fffffffffffffffLL), { 4 }, "i64", device)
      local unique, inverse, counts = sparse.unique(ids, true, true)
      local buffer = unique:read()
      assert.is_true(buffer[0] == -0x7fffffffffffffffLL - 1 and buffer[1] == 0 and buffer[2] == 0x7fffffffffffffffLL)
      assert.same({ 2, 0, 1, 2 }, inverse:to_list())
      assert.same({ 1, 1, 2 }, counts:to_list())
    end)
    it("name what is wrong", function()
      bad("ids is f32", sparse.unique, t({ 1 }, "f32"))
      bad("wanted 1 dim", sparse.unique, t { { 1 } })
    end)
  end)

  describe("jagged and dense on " .. device, function()
    -- 3 bags of 2, 0 and 1 bags of 1, 2 and 3 values
    local outer, inner = { 0, 2, 2, 3 }, { 0, 1, 3, 6 }
    it("have gradients through two and three levels", function()
      local values = peri.Tensor.uniform({ 6, 2 }, -1, 1, 12, 0, "f64", device)
      local options, to = { device = device }, sparse.jagged_to_padded_dense
      for _, sizes in ipairs { { 2, 3 }, { 1, 2 }, { 4, 5 }, { 0, 1 } } do
        gradcheck.check(function(x) return to(x, { t(outer), t(inner, "i32") }, sizes, 0.5) end, { { 6, 2 } }, options)
        gradcheck.check(function(x) return (sparse.dense_to_jagged(x, { t(outer), t(inner) })) end,
          { { 3, sizes[1], sizes[2], 2 } }, { device = device, seed = 13 })
      end
      local top = { 0, 1, 1, 3 }
      gradcheck.check(function(x) return to(x, { t(top), t(outer), t(inner) }, { 2, 2, 2 }) end, { { 6, 2 } }, options)
      local dense = sparse.jagged_to_padded_dense(values, { t(top), t(outer), t(inner) }, { 3, 3, 3 }, -1)
      assert.same({ 3, 3, 3, 3, 2 }, dense:shape())
      assert.same(values:to_list(), (sparse.dense_to_jagged(dense, { t(top), t(outer), t(inner) }, 6)):to_list())
    end)
    it("have gradients through one level", function()
      gradcheck.check(function(x) return sparse.jagged_to_padded_dense(x, { t { 0, 2, 2, 5 } }, { 2 }) end,
        { { 5 } }, { device = device, seed = 14 })
      gradcheck.check(function(x) return (sparse.dense_to_jagged(x, { t { 0, 2, 2, 5 } })) end,
        { { 3, 2, 2 } }, { device = device, seed = 15 })
    end)
    it("keep ids too", function()
      assert.same({ { 1, -7 }, { -7, -7 }, { 2, 3 } }, sparse.jagged_1d_to_dense(t { 1, 2, 3, 4 }, t { 0, 1, 1, 4 }, 2,
        -7):to_table())
      assert.same({ 1, 2, 3, 0 },
        (sparse.dense_to_jagged(t { { 1, 9 }, { 9, 9 }, { 2, 3 } }, { t { 0, 1, 1, 4 } })):to_list())
    end)
    it("name what is wrong", function()
      local x, to, from = t({ 1, 2, 3 }, "f32"), sparse.jagged_to_padded_dense, sparse.dense_to_jagged
      bad("2 sizes for 1 levels", to, x, { t { 0, 3 } }, { 1, 2 })
      bad("0 levels of offsets", to, x, {}, {})
      bad("6 levels of offsets", to, x, { 1, 2, 3, 4, 5, 6 }, { 1, 1, 1, 1, 1, 1 })
      bad("offsets of level 0, bag 0: it ends at offset 4, allowed: 0..3", to, x, { t { 0, 4 } }, { 2 })
      bad("last offset is 2, but there are 3", to, x, { t { 0, 2 } }, { 2 })
      bad("offsets of level 1, bag 1: its offsets are 2 and 1", to, x, { t { 0, 3 }, t { 0, 2, 1, 3 } }, { 2, 2 })
      bad("the first offset is 1, wanted 0", to, x, { t { 1, 3 }, t { 0, 2, 1, 3 } }, { 2, 2 })
      bad("last offset is 0, but there are 3", to, x, { t { 0 } }, { 2 })
      bad("bag 1: its offsets are 3 and 1", from, t({ { 1 }, { 2 }, { 3 } }, "f32"), { t({ 0, 3, 1, 4 }, "i32") }, 4)
      bad("size %-1 of level 0", to, x, { t { 0, 4 } }, { -1 })
      bad("offsets of level 0 are empty", to, x, { t {} }, { 1 })
      bad("offsets of level 0 is f32", to, x, { t({ 0, 3 }, "f32") }, { 1 })
      bad("the result would have", to, x, { t { 0, 3 } }, { 2LL ^ 62 })
      bad("dense is f32 %[3%] for 1 bags", from, x, { t { 0, 3 } })
      bad("dense is f32 %[2, 2%] for 1 bags", from, t({ { 1, 2 }, { 3, 4 } }, "f32"), { t { 0, 3 } })
      bad("the last offset is 3, but there are 4", from, t({ { 1, 2 } }, "f32"), { t { 0, 3 } }, 4)
      bad("the last offset of level 0 is %-1", from, t({ { 1, 2 } }, "f32"), { t { 0, -1 } })
      bad("2 offsets and 0 sizes", sparse.stacked_jagged_1d_to_dense, x, t { { 1, 2 } }, { 0, 3 }, {})
    end)
  end)

  describe("afterwards on " .. device, function()
    it("the unbucketize permutation is found again", function()
      local lengths, ids = t { 3, 0, 2, 4 }, t(draws(9, 100))
      local r = sparse.block_bucketize_sparse_features { lengths = lengths, indices = ids, block_sizes = { 30, 0 },
        my_size = 3, sequence = true, return_bucket_mapping = true }
      assert.same(r.unbucketize_permute:to_list(), sparse.populate_bucketized_permute(lengths, r.lengths,
        r.bucket_mapping):to_list())
      local f = sparse.populate_bucketized_permute
      bad("bucket_mapping%[1%] is 3, allowed: 0..2", f, t { 2 }, t { 1, 0, 1 }, t { 0, 3 })
      bad("bucketized_lengths%[0%] is 1, but bucket_mapping puts 2", f, t { 2 }, t { 1, 0, 1 }, t { 0, 0 })
      bad("2 bucketized lengths for 3 lengths", f, t { 1, 1, 0 }, t { 1, 1 }, t { 0, 0 })
      bad("lengths, bag 0: length 3", f, t { 3 }, t { 1, 0, 1 }, t { 0, 0 })
    end)
  end)
end
