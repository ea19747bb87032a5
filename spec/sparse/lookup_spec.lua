-- Selections, pruned tables, numbers by id: random input against plain Lua, gradients by finite differences, empty and
-- malformed input, and where FBGEMM's operators are wrong the right answers, on both devices.
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
  local function f32(data, shape) return t(data, "f32", shape) end
  local function bad(pattern, f, ...)
    local args, n = { ... }, select("#", ...)
    assert.error_matches(function() f(unpack(args, 1, n)) end, pattern)
  end

  describe("members of bags on " .. device, function()
    it("are picked by a mask", function()
      for variant = 1, 20 do
        local lengths = draws(draw(30), variant % 5 == 0 and 1 or 5)
        local ends = complete(lengths)
        local n, dtype = ends[#ends], variant % 2 == 0 and "i32" or "i64"
        local values, mask, want, left = draws(n, 1000), draws(n, 2), {}, {}
        for b = 1, #lengths do
          left[b] = 0
          for i = ends[b] + 1, ends[b + 1] do
            if mask[i] == 1 then
              want[#want + 1] = values[i]
              left[b] = left[b] + 1
            end
          end
        end
        local got, got_lengths = sparse.masked_select_jagged_1d(t(values, "f64"), t(lengths, dtype), t(mask, "bool"))
        assert.same(want, got:to_list())
        assert.same(left, got_lengths:to_list())
        assert.equal(dtype, got_lengths:dtype())
      end
      local rows = sparse.masked_select_jagged_1d(f32 { { 1, 2 }, { 3, 4 }, { 5, 6 } }, t { 1, 2 },
        t({ 1, 0, 1 }, "bool"))
      assert.same({ { 1, 2 }, { 5, 6 } }, rows:to_table())
    end)
    it("are picked by their places", function()
      for variant = 1, 20 do
        local lengths, length = draws(draw(30), 6), draw(5)
        local ends = complete(lengths)
        local values, start, want, left = draws(ends[#ends], 1000), {}, {}, {}
        for b, n in ipairs(lengths) do
          start[b] = draw(n + 1)
          left[b] = math.min(length, n - start[b])
          for i = 1, left[b] do want[#want + 1] = values[ends[b] + start[b] + i] end
        end
        local got, got_lengths = sparse.jagged_slice(t(values), t(lengths, variant % 2 == 0 and "i32" or "i64"),
          t(start, variant % 3 == 0 and "i32" or "i64"), length)
        assert.same(want, got:to_list())
        assert.same(left, got_lengths:to_list())
      end
    end)
    it("pass their gradients on", function()
      gradcheck.check(function(values)
        return (sparse.masked_select_jagged_1d(values, t { 2, 0, 3 }, t({ 1, 0, 0, 1, 1 }, "bool")))
      end, { { 5, 2 } }, { device = device, seed = 3 })
      gradcheck.check(function(values) return (sparse.jagged_slice(values, t { 2, 0, 3 }, t { 1, 0, 1 }, 1)) end,
        { { 5, 2 } }, { device = device, seed = 4 })
    end)
    it("name what is wrong", function()
      local masked, slice = sparse.masked_select_jagged_1d, sparse.jagged_slice
      bad("mask is f32", masked, f32 { 1, 2 }, t { 2 }, f32 { 1, 0 })
      bad("mask is bool %[3%] for 2 values", masked, f32 { 1, 2 }, t { 2 }, t({ 1, 0, 1 }, "bool"))
      -- FBGEMM reads past the end
      bad("lengths sum to 1, but there are 2 values", masked, f32 { 1, 2 }, t { 1 }, t({ 1, 0 }, "bool"))
      bad("bag 0: length %-1", masked, f32 { 1, 2 }, t { -1, 3 }, t({ 1, 0 }, "bool"))
      bad("lengths is f32", masked, f32 { 1, 2 }, f32 { 2 }, t({ 1, 0 }, "bool"))
      bad("start%[1%] is 3, allowed in a bag of 2: 0..2", slice, f32 { 1, 2, 3 }, t { 1, 2 }, t { 0, 3 }, 1)
      bad("start%[0%] is %-1, allowed in a bag of 1: 0..1", slice, f32 { 1, 2, 3 }, t { 1, 2 }, t({ -1, 0 }, "i32"), 1)
      bad("slice_length %-1, allowed: 0 and more", slice, f32 { 1 }, t { 1 }, t { 0 }, -1)
      bad("2 starts for 1 bags", slice, f32 { 1 }, t { 1 }, t { 0, 0 }, 1)
      bad("start is f32", slice, f32 { 1 }, t { 1 }, f32 { 0 }, 1)
      bad("lengths, bag 1: length 4, but there are only 3", slice, f32 { 1, 2, 3 }, t { 0, 4 }, t { 0, 0 }, 1)
    end)
  end)

  describe("rows of several matrices on " .. device, function()
    local select = sparse.batch_index_select_dim0
    it("are those of plain Lua", function()
      for variant = 1, 20 do
        local n, side, same = 1 + draw(4), variant % 2 == 0, draw(5)
        local counts, rows, columns, indices, inputs, want = {}, {}, {}, {}, {}, {}
        local picked = {}
        for m = 1, n do
          counts[m], rows[m], columns[m] = side and same or draw(5), 1 + draw(4), draw(4)
          local first = #inputs
          for _ = 1, rows[m] * columns[m] do inputs[#inputs + 1] = draw(1000) end
          picked[m] = {}
          for k = 1, counts[m] do
            local row = draw(rows[m])
            indices[#indices + 1] = row
            picked[m][k] = { unpack(inputs, first + row * columns[m] + 1, first + (row + 1) * columns[m]) }
          end
        end
        local function append(list) for _, x in ipairs(list) do want[#want + 1] = x end end
        if side then
          for k = 1, same do for m = 1, n do append(picked[m][k]) end end
        else
          for m = 1, n do for k = 1, counts[m] do append(picked[m][k]) end end
        end
        local dtype = ({ "f32", "i64", "f16", "f64" })[variant % 4 + 1]
        local got = select(t(inputs, dtype), t(indices, variant % 3 == 0 and "i32" or "i64"), counts, rows, columns,
          side)
        assert.same(want, got:to_list())
      end
    end)
    it("pass gradients to the rows they came from", function()
      for _, side in ipairs { false, true } do
        gradcheck.check(function(inputs) return select(inputs, t { 1, 1, 0, 2, 0, 0 }, { 3, 3 }, { 2, 3 }, { 2, 1 },
          side) end, { { 7 } }, { device = device, seed = 9 })
      end
    end)
    it("name what is wrong", function()
      bad("indices%[2%] is 3 %(input 1%), allowed: 0..2", select, f32(draws(5, 9)), t { 0, 1, 3 }, { 2, 1 }, { 2, 3 },
        { 1, 1 })
      bad("indices%[0%] is %-1 %(input 0%), allowed: 0..1", select, f32(draws(5, 9)), t { -1 }, { 1, 0 }, { 2, 3 },
        { 1, 1 })
      bad("indices%[0%] is 0 %(input 0%), and nothing is allowed", select, f32 {}, t { 0 }, { 1 }, { 0 }, { 4 })
      bad("inputs have 5 elements, but input_rows and input_columns make 6", select, f32(draws(5, 9)), t { 0 }, { 1 },
        { 2 }, { 3 })
      bad("1 indices, but input_num_indices make 2", select, f32(draws(6, 9)), t { 0 }, { 2 }, { 2 }, { 3 })
      bad("input_rows%[1%] is %-1, allowed: 0 and more", select, f32 { 1 }, t { 0 }, { 1, 0 }, { 1, -1 }, { 1, 1 })
      bad("input_num_indices%[1%] is 0 and the first one is 1", select, f32 { 1, 2 }, t { 0 }, { 1, 0 }, { 1, 1 },
        { 1, 1 }, true)
      bad("2 input_num_indices, 1 input_rows, 1 input_columns", select, f32 { 1 }, t { 0 }, { 1, 0 }, { 1 }, { 1 })
      bad("0 inputs, allowed: 1 and more", select, f32 {}, t {}, {}, {}, {})
      bad("2%^63 elements or more up to number 0", select, f32 {}, t {}, { 0 }, { 2 ^ 40 }, { 2 ^ 40 })
      bad("indices is f32", select, f32 { 1 }, f32 { 0 }, { 1 }, { 1 }, { 1 })
      bad("inputs is f32 %[1, 1%]", select, f32 { { 1 } }, t { 0 }, { 1 }, { 1 }, { 1 })
    end)
  end)

  describe("pruned tables on " .. device, function()
    it("keep the rows that count", function()
      local prune = sparse.embedding_bag_rowwise_prune
      local weight, indicator = t({ { 1, 2 }, { 3, 4 }, { 5, 6 }, { 7, 8 } }, "u8"), f32 { 0.5, 0 / 0, -0.3, 0.2 }
      local rows, mapping = prune(weight, indicator, 0.25, "i32")
      assert.same({ { 1, 2 }, { 5, 6 } }, rows:to_table())
      assert.same({ 0, -1, 1, -1 }, mapping:to_list())
      assert.equal("i32", mapping:dtype())
      rows, mapping = prune(weight, indicator, 0.25, "i64", false)
      assert.same({ { 1, 2 } }, rows:to_table())
      assert.same({ 0, -1, -1, -1 }, mapping:to_list())
      assert.equal("i64", mapping:dtype())
      rows, mapping = prune(weight, indicator, 9, "i32")
      assert.same({ 0, 2 }, rows:shape())
      assert.same({ -1, -1, -1, -1 }, mapping:to_list())
      -- 4 + 2 * 2 >= 1 * 4 * 2: a mapping is not worth its size.
      for _, args in ipairs { { 2, 1 }, { 0, 0.5 }, { 0, 0 } } do
        rows, mapping = prune(weight, indicator, 0.25, "i32", true, args[1], args[2])
        assert.same(weight:to_table(), rows:to_table())
        assert.same({ 0 }, mapping:to_list())
      end
      assert.equal(2, prune(weight, indicator, 0.25, "i32", true, 1, 1):size(1))
      bad("indicator has 3 numbers for weights u8 %[4, 2%]", prune, weight, f32 { 1, 2, 3 }, 0, "i32")
      bad("indicator is f64", prune, weight, t({ 1, 2, 3, 4 }, "f64"), 0, "i32")
      bad("compressed_indices_dtype f32, allowed: i32, i64", prune, weight, indicator, 0, "f32")
      bad("min_num_rows %-1, allowed: 0 and more", prune, weight, indicator, 0, "i32", true, -1)
      bad("min_save_ratio %-1, allowed: 0 and more", prune, weight, indicator, 0, "i32", true, 0, -1)
      bad("weight is f32 %[2%]", prune, f32 { 1, 2 }, f32 { 1, 2 }, 0, "i32")
    end)

    it("are found by arrays", function()
      local find = sparse.pruned_array_lookup
      -- Tables of 3 rows, none (not pruned) and 2; two samples.
      local offsets, map, ends = t({ 0, 2, 3, 5, 5, 5, 7 }, "i32"), t({ 0, -1, 1, 1, 0 }, "i32"), t { 0, 3, 3, 5 }
      assert.same({ 1, -1, 0, 77, 5, 0, 1 }, find(t { 2, 1, 0, 77, 5, 1, 0 }, offsets, map, ends):to_list())
      local none = find(t({}, "i32"), t { 0, 0, 0, 0 }, map, ends)
      assert.same({ "i32", 0 }, { none:dtype(), none:numel() })
      -- FBGEMM reads beyond the mapping.
      bad("indices%[2%] is 3 %(table 0, sample 1%), allowed: 0..2", find, t { 2, 1, 3, 77, 5, 1, 0 }, offsets, map,
        ends)
      assert.same({ -1, -1, 0, -1, 5, 0, -1 }, find(t { -1, 1, 0, -1, 5, 1, -1 }, offsets, map, ends):to_list())
      bad("indices%[6%] is %-2 %(table 2, sample 1%), allowed: 0..1, or %-1", find, t { 2, 1, 0, 77, 5, 1, -2 },
        offsets, map, ends)
      bad("indices%[3%] is %-2 %(table 1, sample 0%), allowed: 0 and more", find, t { 2, 1, 0, -2, 5, 1, 1 }, offsets,
        map, ends)
      bad("index_remappings are i64 and indices i32", find, t({ 2 }, "i32"), t { 0, 1 }, t { 0, 1, 2 }, t { 0, 3 })
      bad("index_remappings_offsets: the last offset is 2, but there are 3 values", find, t { 2 }, t { 0, 1 },
        t { 0, 1, 2 }, t { 0, 2 })
      bad("lookup: offsets: bag 0: it ends at offset 2, allowed: 0..1", find, t { 2 }, t { 0, 2 }, t { 0, 1, 2 },
        t { 0, 3 })
      bad("3 offsets for 3 tables, wanted a multiple", find, t { 2 }, t { 0, 1, 1 }, map, ends)
      bad("1 offset for 1 tables", find, t {}, t { 0 }, t { 0 }, t { 0, 1 })
      bad("1 index_remappings_offsets, wanted one entry more", find, t { 2 }, t { 0, 1 }, map, t { 0 })
      bad("indices is f32", find, f32 { 2 }, t { 0, 1 }, map, ends)
    end)

    it("are found by hash tables", function()
      local insert, find = sparse.pruned_hashmap_insert, sparse.pruned_hashmap_lookup
      for variant = 1, 24 do
        local dtype, tables, batch = variant % 2 == 0 and "i32" or "i64", 1 + draw(3), 1 + draw(3)
        local lengths, slots, ids, rows, want = {}, {}, {}, {}, {}
        for table_ = 1, tables do
          local known, count = {}, 0
          for sample = 1, batch do
            local n = draw(variant % 5 == 0 and 60 or 6)
            lengths[(table_ - 1) * batch + sample] = n
            for _ = 1, n do
              local id = draw(2 ^ 31 - 1)
              ids[#ids + 1], rows[#rows + 1] = id, draw(9) - 1
              if rows[#rows] >= 0 then known[id] = rows[#rows] end
              count = count + 1
            end
          end
          slots[table_] = variant % 6 == 0 and table_ == 1 and 0 or count + (variant % 3 == 0 and 0 or draw(9))
          want[table_] = slots[table_] > 0 and known
        end
        local offsets, starts = complete(lengths), complete(slots)
        local empty = peri.full({ starts[#starts], 2 }, -1, dtype, device)
        local full = insert(t(ids, dtype), t(rows, "i32"), t(offsets), empty,
          t(starts, variant % 4 < 2 and "i32" or "i64"))
        assert.equal(-1, starts[#starts] > 0 and empty:item(0) or -1)
        for i = 1, #ids do if draw(4) == 0 then ids[i] = draw(9) == 0 and -5 or draw(2 ^ 31 - 1) end end
        local expected = {}
        for b, n in ipairs(lengths) do
          for i = offsets[b] + 1, offsets[b] + n do
            local known = want[math.floor((b - 1) / batch) + 1]
            expected[i] = known and (known[ids[i]] or -1) or ids[i]
          end
        end
        local got = find(t(ids, dtype), t(offsets, "i32"), full, t(starts))
        assert.same(expected, got:to_list())
        assert.equal(dtype, got:dtype())
      end
      -- The later of two rows of an id counts, and a table that is full is still searched to an end (FBGEMM's search
      -- has none).
      local one = insert(t { 7, 7, 9 }, t { 1, 2, 3 }, t { 0, 3 }, peri.full({ 2, 2 }, -1, "i64", device), t { 0, 2 })
      assert.same({ 2, 3, -1 }, find(t { 7, 9, 8 }, t { 0, 3 }, one, t { 0, 2 }):to_list())
    end)

    it("name what is wrong with hash tables", function()
      local insert, find = sparse.pruned_hashmap_insert, sparse.pruned_hashmap_lookup
      local empty = peri.full({ 2, 2 }, -1, "i64", device)
      bad("table 0 is full: no slot among its 2 for indices%[2%], 5", insert, t { 3, 4, 5 }, t { 0, 1, 2 }, t { 0, 3 },
        empty, t { 0, 2 })
      bad("indices%[1%] is %-3 %(table 1%), allowed: 0 and more", insert, t { 3, -3 }, t { 0, 1 }, t { 0, 1, 2 }, empty,
        t { 0, 1, 2 })
      bad("dense_indices%[0%] is %-2 %(table 0%), allowed: %-1 and more", insert, t { 3 }, t { -2 }, t { 0, 1 }, empty,
        t { 0, 2 })
      bad("1 dense_indices for 2 indices", insert, t { 3, 4 }, t { 0 }, t { 0, 2 }, empty, t { 0, 2 })
      bad("dense_indices are i64 and the hash table i32", insert, t({ 3 }, "i32"), t { 0 }, t { 0, 1 }, empty:to "i32",
        t { 0, 2 })
      -- FBGEMM looks in the wrong places.
      bad("hash_table is i64 and indices are i32", find, t({ 3 }, "i32"), t { 0, 1 }, empty, t { 0, 2 })
      bad("hash_table is i64 %[2, 3%], wanted pairs", find, t { 3 }, t { 0, 1 }, t { { 1, 2, 3 }, { 4, 5, 6 } },
        t { 0, 2 })
      bad("hash_table is f32", find, t { 3 }, t { 0, 1 }, f32 { { 1, 2 } }, t { 0, 1 })
      bad("hash_table_offsets: table 0: it ends at offset 3, allowed: 0..2", find, t { 3 }, t { 0, 1 }, empty,
        t { 0, 3 })
      bad("hash_table_offsets: table 0: its offsets are 0 and %-1", find, t { 3 }, t { 0, 0, 1 }, empty, t { 0, -1, 2 })
      bad("lookup: offsets: the first offset is 1", find, t { 3 }, t { 1, 1 }, empty, t { 0, 2 })
    end)
  end)

  describe("numbers by id on " .. device, function()
    local unary = sparse.batched_unary_embeddings
    it("are summed over bags", function()
      for variant = 1, 16 do
        local tasks, sizes, batch, lengths = draw(4), draws(1 + draw(3), 5), draw(5), {}
        for i, n in ipairs(sizes) do sizes[i] = n + 1 end
        local starts = complete(sizes)
        local width = starts[#starts]
        for i = 1, #sizes * batch do lengths[i] = draw(4) end
        local offsets, ids, weights, want = complete(lengths), {}, draws(tasks * width, 1000), {}
        for b, n in ipairs(lengths) do
          for _ = 1, n do ids[#ids + 1] = draw(sizes[math.floor((b - 1) / batch) + 1]) end
        end
        for task = 0, tasks - 1 do
          for sample = 1, batch do
            for table_ = 1, #sizes do
              local sum, b = 0, (table_ - 1) * batch + sample
              for i = offsets[b] + 1, offsets[b + 1] do
                sum = sum + weights[task * width + starts[table_] + ids[i] + 1]
              end
              want[#want + 1] = sum
            end
          end
        end
        local got = unary(t(weights, variant % 2 == 0 and "f32" or "f64", { tasks, width }), t(starts),
          t(offsets, "i32"), t(ids))
        assert.same({ tasks, batch, #sizes }, got:shape())
        assert.same(want, got:to_list())
      end
    end)
    it("pass gradients on", function()
      gradcheck.check(function(weight) return unary(weight, t { 0, 2, 5 }, t { 0, 2, 2, 5, 6 },
        t { 1, 1, 2, 0, 2, 1 }) end, { { 3, 5 } }, { device = device, seed = 11 })
    end)
    it("are counted with their weights", function()
      local count = sparse.jagged_acc_weights_and_counts
      local weights, to, want = draws(300, 99), draws(300, 40), {}
      for u = 1, 41 do want[2 * u - 1], want[2 * u] = 0, 0 end
      for i, u in ipairs(to) do
        want[2 * u + 1] = want[2 * u + 1] + weights[i]
        want[2 * u + 2] = want[2 * u + 2] + 1
      end
      for _, dtype in ipairs { "f32", "f64" } do
        local got = count(t(weights, dtype), t(to, "i32"), 41)
        assert.same({ dtype, 41, 2 }, { got:dtype(), got:size(1), got:size(2) })
        assert.same(want, got:to_list())
      end
      assert.same({ 0, 2 }, count(f32 {}, t {}, 0):shape())
      -- FBGEMM writes beyond its result
      bad("reverse_indices%[1%] is 2, allowed: 0..1", count, f32 { 1, 2 }, t { 0, 2 }, 2)
      bad("reverse_indices%[0%] is %-1, allowed: 0..1", count, f32 { 1 }, t { -1 }, 2)
      bad("1 reverse_indices for 2 weights", count, f32 { 1, 2 }, t { 0 }, 2)
      bad("num_unique_indices %-1, allowed", count, f32 {}, t {}, -1)
      bad("weights are i64", count, t { 1 }, t { 0 }, 1)
    end)
    it("name what is wrong", function()
      local weight = f32 { { 1, 2, 3 } }
      bad("indices%[1%] is 2 %(table 0, sample 1%), allowed: 0..1", unary, weight, t { 0, 2, 3 }, t { 0, 1, 2, 2, 2 },
        t { 0, 2 })
      bad("indices%[0%] is %-1 %(table 0, sample 0%), allowed: 0..1", unary, weight, t { 0, 2, 3 }, t { 0, 1, 1 },
        t { -1 })
      bad("indices%[0%] is 0 %(table 0, sample 0%), and nothing is allowed", unary, weight, t { 0, 0, 3 },
        t { 0, 1, 1 }, t { 0 })
      bad("table_offsets: table 0: it ends at offset 4, allowed: 0..3", unary, weight, t { 0, 4 }, t { 0, 1 }, t { 0 })
      bad("unary: offsets: bag 0: it ends at offset 2, allowed: 0..1", unary, weight, t { 0, 3 }, t { 0, 2 }, t { 0 })
      bad("4 offsets for 2 tables", unary, weight, t { 0, 1, 3 }, t { 0, 1, 1, 1 }, t { 0 })
      bad("1 table_offsets, wanted one entry more", unary, weight, t { 0 }, t { 0 }, t {})
      bad("weight is i64", unary, t { { 1 } }, t { 0, 1 }, t { 0, 1 }, t { 0 })
    end)
  end)

  describe("calibration on " .. device, function()
    local function bins(list) return t(list, "f64") end
    local function calibrate(a)
      local args = { logit = f32 { 0 }, bin_num_examples = bins { 100, 100, 100, 100 },
        bin_num_positives = bins { 10, 20, 30, 40 }, positive_weight = 1, bin_ctr_in_use_after = 10 }
      for name, value in pairs(a or {}) do args[name] = value end
      return sparse.histogram_binning_calibration(args)
    end
    it("takes every logit", function()
      -- sigmoid: 0, tiny, 1/2, 1, 1. FBGEMM has bin -1 for the first one, and reads there.
      local out, ids = calibrate { logit = f32 { -1000, -50, 0, 50, math.huge } }
      assert.same({ 0, 0, 1, 3, 3 }, ids:to_list())
      for i, want in ipairs { 0.1, 0.1, 0.2, 0.4, 0.4 } do assert.near(want, out:item(i - 1), 1e-6) end
      out, ids = calibrate { logit = f32 { 0 / 0, 0 } }
      assert.is_true(out:item(0) ~= out:item(0))
      assert.same({ -1, 1 }, ids:to_list())
      -- Bins from a lower bound on: FBGEMM counts them from 0, and leaves its arrays.
      out, ids = calibrate { logit = t({ -3, 0, 0.5, 9 }, "f64"), lower_bound = 0.25, upper_bound = 0.75 }
      assert.same({ 0, 1, 2, 3 }, ids:to_list())
      assert.near(0.3, out:item(2), 1e-12)
      -- Too few examples, a share of the prediction, shapes and dtypes.
      out = calibrate { logit = f32 { { 0, 9 } }, bin_ctr_in_use_after = 100 }
      assert.near(0.5, out:item(0), 1e-6)
      assert.same({ 1, 2 }, out:shape())
      assert.near(0.75 * 0.2 + 0.25 * 0.5, calibrate { bin_ctr_weight_value = 0.75 }:item(0), 1e-6)
      assert.near(0.2, calibrate { logit = t({ 0 }, "f16") }:item(0), 1e-3)
      assert.near(0.2, calibrate { logit = t({ 0 }, "bf16") }:item(0), 1e-2)
      assert.same({ 0 }, calibrate { logit = f32 {} }:shape())
    end)
    it("goes by feature", function()
      local function by_feature(values, lengths)
        local _, ids = sparse.histogram_binning_calibration_by_feature { logit = f32 { 0, 0, 0, 0 },
          segment_value = t(values), segment_lengths = t(lengths, "i32"), num_segments = 2, num_bins = 2,
          bin_num_examples = bins { 9, 9, 9, 9, 9, 9 }, bin_num_positives = bins { 1, 2, 3, 4, 5, 6 },
          positive_weight = 1 }
        return ids:to_list()
      end
      assert.same({ 2, 4, 0, 0 }, by_feature({ 0, 1 }, { 1, 1, 0, 0 }))
      assert.same({ 0, 0, 0, 4 }, by_feature({ 1, 1, 2, -1, 1 }, { 2, 1, 1, 1 }))
      bad("the lengths sum to 2, but there are 3 values", by_feature, { 0, 1, 1 }, { 1, 1, 0, 0 })
      bad("segment_lengths, bag 1: length %-1", by_feature, { 0, 1 }, { 1, -1, 1, 1 })
      bad("3 segment_lengths for 4 logits", by_feature, { 0, 1 }, { 1, 1, 0 })
    end)
    it("names what is wrong", function()
      bad("bin_num_examples is f32", calibrate, { bin_num_examples = f32 { 1 } })
      bad("bin_num_positives are f64 %[3%], wanted 4", calibrate, { bin_num_positives = bins { 1, 2, 3 } })
      bad("0 bins, allowed: 1 and more", calibrate, { bin_num_examples = bins {}, bin_num_positives = bins {} })
      bad("positive_weight 0, allowed", calibrate, { positive_weight = 0 })
      bad("bounds 1 and 1, wanted", calibrate, { lower_bound = 1 })
      bad("logit is i64, allowed: f32, f64, f16, bf16", calibrate, { logit = t { 1 } })
      bad("no argument 'bins'", calibrate, { bins = 3 })
      bad("bin_num_examples are f64 %[4%] for 3 bins and 1 segments", sparse.histogram_binning_calibration_by_feature,
        { logit = f32 { 0 }, segment_value = t {}, segment_lengths = t { 0 }, num_segments = 1, num_bins = 3,
          bin_num_examples = bins { 1, 2, 3, 4 },
        bin_num_positives = bins { 1, 2, 3, 4 }, positive_weight = 1 })
    end)
  end)

  describe("hashes on " .. device, function()
    it("take numbers for all, any shape, and give all bits", function()
      local x = t { { 1, 2, 3 }, { -4, 5, 6 } }
      local one, many = sparse.murmur_hash3(x, 7, 9), sparse.murmur_hash3(x, peri.full({ 2, 3 }, 7, "i64", device), 9)
      assert.same({ 2, 3 }, one:shape())
      assert.same(one:to_list(), many:to_list())
      local negative = 0
      for _, h in ipairs(sparse.murmur_hash3(t(draws(200, 1e9)), 0, 0):to_list()) do
        negative = negative + (h < 0 and 1 or 0)
      end
      assert.is_true(negative > 60 and negative < 140) -- FBGEMM's operator raises for these
      assert.same({ 0 }, sparse.murmur_hash3(t {}, 0, 0):shape())
      bad("input is i32", sparse.murmur_hash3, t({ 1 }, "i32"), 0, 0)
      bad("y is i64 %[2%]", sparse.murmur_hash3, x, t { 1, 2 }, 0)
      bad("seed is f32", sparse.murmur_hash3, x, 0, f32 { 1 })
      bad("y is i64 %[1, 2%] for an input i64 %[2, 3%], wanted one for each", sparse.murmur_hash3, x, t { { 1, 2 } }, 0)
    end)
  end)
end
