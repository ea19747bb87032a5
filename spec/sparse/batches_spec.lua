-- Inputs of several modules put together: each bag of each input keeps its ids, or the input that cannot is named.
local peri = require "perilune"
local generator = require("spec.support.tbe").generator
local sparse = peri.sparse

local function t(list, dtype) return peri.tensor(list, dtype or "i64", "cpu", { #list }) end
local function fails(words, f, ...)
  local ok, why = pcall(f, ...)
  assert.is_false(ok, words)
  assert.truthy(tostring(why):find(words, 1, true), tostring(why))
end

describe("inputs put together", function()
  it("keep the ids of each bag, whichever way their bags are given", function()
    local draw = generator(5)
    for _ = 1, 40 do
      local inputs, want, ids, offsets, lengths, complete = 1 + draw(3), {}, {}, {}, {}, {}
      for i = 1, inputs do
        local list, ends, sizes = {}, { 0 }, {}
        for b = 1, 1 + draw(3) do
          local bag = {}
          for k = 1, draw(4) do bag[k] = draw(100) end
          for _, id in ipairs(bag) do list[#list + 1] = id end
          ends[b + 1], sizes[b], want[#want + 1] = #list, #bag, bag
        end
        complete[i] = draw(2) == 1
        if not complete[i] then ends[#ends] = nil end
        ids[i], offsets[i], lengths[i] = t(list), t(ends), t(sizes)
      end
      local all, ends = sparse.tbe_input_combine(ids, offsets, nil, complete)
      local same, sizes = sparse.tbe_input_combine_with_length(ids, lengths)
      all, ends, same, sizes = all:to_list(), ends:to_list(), same:to_list(), sizes:to_list()
      assert.same(all, same)
      for b, bag in ipairs(want) do
        assert.same(bag, { unpack(all, ends[b] + 1, ends[b + 1]) })
        assert.equal(#bag, sizes[b])
      end
    end
  end)

  it("are refused where an id would be in no bag, in a bag of another input, or another id", function()
    local by_offsets, by_lengths = sparse.tbe_input_combine, sparse.tbe_input_combine_with_length
    local ids = t { 1, 2, 3 }
    fails("input 1: its first offset is 1, wanted 0", by_offsets, { ids, ids }, { t { 0, 1 }, t { 1, 2 } })
    fails("input 0: offsets[2] is 1, allowed: no less than the one before, 2", by_offsets, { ids }, { t { 0, 2, 1 } })
    fails("input 0: offsets[2] is 3, allowed: no less than the one before, 4", by_offsets, { ids }, { t { 0, 4 } })
    fails("input 0: its last offset is 2, but there are 3 ids", by_offsets, { ids }, { t { 0, 2 } }, nil, { true })
    fails("input 0: 3 ids, but offsets of no bag that they could belong to", by_offsets, { ids }, { t {} }, nil, nil, 2)
    fails("the lengths of input 1 sum to 2, but it has 3 ids", by_lengths, { ids, ids }, { t { 3 }, t { 1, 1 } })
    fails("input 0 has a length of -1", by_lengths, { ids }, { t { 4, -1 } })
    fails("2 inputs and 1 lists of lengths", by_lengths, { ids, ids }, { t { 6 } })
    fails("id 4294967297 of input 0 does not fit i32", by_offsets, { t { 1, 2 ^ 32 + 1 } }, { t { 0 } })
    fails("id -2147483649 of input 0 does not fit i32", by_lengths, { t { -2 ^ 31 - 1 } }, { t { 1 } })
  end)
end)
