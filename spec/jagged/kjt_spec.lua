-- KeyedJaggedTensor: making, checking, looking.
local peri = require "perilune"
local KJT = peri.KeyedJaggedTensor

-- errors of content come at once where the host can look, else with the first sync
local function opaque_or_now(device, f)
  return function()
    local kjt = f()
    assert.equal("opaque", device)
    kjt:sync()
  end
end

for _, device in ipairs { "cpu", "opaque" } do
  describe("KeyedJaggedTensor on " .. device, function()
    local function kjt(a)
      a.device = device
      return KJT(a)
    end
    local function example(a)
      a = a or {}
      a.keys = a.keys or { "A", "B" }
      a.values = a.values or { 0, 1, 2, 3, 4, 5, 6, 7 }
      if not a.lengths and not a.offsets then a.lengths = { 2, 0, 1, 1, 1, 3 } end
      return kjt(a)
    end

    it("derives everything from lengths", function()
      local k = example()
      assert.same({ 3, 5 }, k:length_per_key())
      assert.same({ 0, 3, 8 }, k:offset_per_key())
      assert.same({ 0, 2, 2, 3, 4, 5, 8 }, k:offsets():to_list())
      assert.equal("i64", k:offsets():dtype())
      assert.equal("i32", k:lengths():dtype())
      assert.equal(3, k:stride())
      assert.same({ 3, 3 }, k:stride_per_key())
      assert.same({ { 3 }, { 3 } }, k:stride_per_key_per_rank())
      assert.same({ 0, 3, 6 }, k:lengths_offset_per_key())
      assert.same({ A = 0, B = 1 }, k:index_per_key())
      assert.same({ "A", "B" }, k:keys())
      assert.equal(3, k:longest())
      assert.equal(2, #k)
      assert.is_false(k:variable_stride_per_key())
      assert.is_nil(k:weights_or_none())
      assert.error_matches(function() k:weights() end, "no weights")
      assert.error_matches(function() k:inverse_indices() end, "no inverse indices")
    end)

    it("derives everything from offsets", function()
      local k = example { offsets = peri.tensor({ 0, 2, 2, 3, 4, 5, 8 }, "i32", device),
        weights = { 1, 2, 3, 4, 5, 6, 7, 8 } }
      assert.is_nil(k:lengths_or_none())
      assert.same({ 2, 0, 1, 1, 1, 3 }, k:lengths():to_list())
      assert.same({ 3, 5 }, k:length_per_key())
      assert.equal(3, k:longest())
      assert.same({ 1, 2, 3, 4, 5, 6, 7, 8 }, k:weights():to_list())
    end)

    it("accepts lengths of [keys, rows]", function()
      local k = example { lengths = peri.tensor({ { 2, 0, 1 }, { 1, 1, 3 } }, "i64", device) }
      assert.same({ 6 }, k:lengths():shape())
      assert.same({ 3, 5 }, k:length_per_key())
    end)

    it("knows variable batches", function()
      local k = example { stride_per_key_per_rank = { { 1, 1 }, { 4, 0 } } }
      assert.same({ 2, 6 }, k:length_per_key())
      assert.same({ 2, 4 }, k:stride_per_key())
      assert.same({ 0, 2, 6 }, k:lengths_offset_per_key())
      assert.equal(4, k:stride())
      assert.is_true(k:variable_stride_per_key())
      local same = example { stride_per_key_per_rank = peri.tensor({ { 1, 1 }, { 4, 0 } }, "i64", device) }
      assert.same(k:stride_per_key_per_rank(), same:stride_per_key_per_rank())
      local inverse = example { stride_per_key_per_rank = { { 2 }, { 4 } },
        inverse_indices = { { "B", "A" }, peri.tensor({ { 0, 3, 1, 2, 2 }, { 1, 0, 0, 0, 0 } }, "i64", device) } }
      assert.equal(5, inverse:stride())
      assert.same({ "B", "A" }, inverse:inverse_indices()[1])
      assert.equal(device, inverse:inverse_indices()[2]:device())
      inverse:validate()
    end)

    it("may be empty", function()
      local none = kjt { keys = {}, values = {}, lengths = {} }
      assert.same({ 0, {}, { 0 }, 0 }, { none:stride(), none:length_per_key(), none:offset_per_key(), none:longest() })
      local k = kjt { keys = { "a", "b" }, values = {}, lengths = {} }
      assert.same({ 0, { 0, 0 } }, { k:stride(), k:length_per_key() })
      assert.same({ 0 }, k:offsets():to_list())
      assert.same({ 0, 0, 0 }, kjt({ keys = { "a" }, values = {}, lengths = { 0, 0 } }):offsets():to_list())
    end)

    it("names key, sample and value of malformed content", function()
      local function content(pattern, a)
        assert.error_matches(opaque_or_now(device, function() return example(a) end), pattern)
      end
      content("sum to 7, but there are 8 values %(spec/", { lengths = { 2, 0, 1, 1, 1, 2 } })
      content("key 'A', sample 2: length %-1, allowed: 0 or more", { lengths = { 2, 0, -1, 1, 1, 3 } })
      content("sum to 9, but there are 8 values: key 'B', sample 2 ends at 9", { lengths = { 2, 0, 1, 1, 1, 4 } })
      content("key 'A', sample 2: length 9, but there are only 8 values", { lengths = { 2, 0, 9, 1, 1, 3 } })
      content("key 'B', sample 3: length %-5",
        { lengths = { 2, 0, 1, 1, 1, -5 }, stride_per_key_per_rank = { { 1, 1 }, { 1, 3 } } })
      content("key 'A', sample 0: length 9223372036854775807",
        { lengths = peri.Tensor.from_memory(require("ffi").new("int64_t[2]", 0x7fffffffffffffffLL, 1), { 2 }, "i64",
          device) })
      content("first offset is 1, wanted 0", { offsets = { 1, 2, 2, 3, 4, 5, 8 } })
      content("key 'A', sample 1: its offsets are 2 and 1", { offsets = { 0, 2, 1, 3, 4, 5, 8 } })
      content("key 'B', sample 2: it ends at offset 9, allowed: 0%.%.8", { offsets = { 0, 2, 2, 3, 4, 5, 9 } })
      content("last offset is 7, but there are 8 values", { offsets = { 0, 2, 2, 3, 4, 5, 7 } })
      content("key 'A', sample 0: its offsets are 0 and %-2", { offsets = { 0, -2, 2, 3, 4, 5, 8 } })
      content("key 'B', sample 1: length 2, but its offsets 4 and 5 say 1",
        { offsets = { 0, 2, 2, 3, 4, 5, 8 }, lengths = { 2, 0, 1, 1, 2, 3 } })
      local function inverse(list)
        return { stride_per_key_per_rank = { { 2 }, { 4 } }, inverse_indices = { { "A" }, list } }
      end
      content("key 'A', sample 2: inverse index 2, allowed: 0%.%.1", inverse { { 0, 1, 2 } })
      content("key 'A', sample 0: inverse index %-1, allowed: 0%.%.1",
        inverse(peri.tensor({ { -1, 1, 5 } }, "i32", device)))
      content("key 'A', sample 1: inverse index 9223372036854775807, allowed", inverse { { 1, 0x7fffffffffffffffLL } })
      content("key 'A', sample 0: inverse index 0, but the key has no bags",
        { stride_per_key_per_rank = { { 0 }, { 6 } }, inverse_indices = { { "A" }, { { 0 } } } })
      example(inverse { { 0, 1, 1 } }):validate()
    end)

    it("finds the first offender of many blocks", function()
      local n = 50000
      local lengths, total = {}, 0
      for i = 1, n do
        lengths[i] = i % 5
        total = total + i % 5
      end
      local values = peri.zeros({ total }, "i64", device)
      local good = kjt { keys = { "x", "y" }, values = values, lengths = lengths }
      assert.equal(total, good:offsets():item(n))
      assert.equal(4, good:longest())
      lengths[31000], lengths[45000] = -1, -2
      assert.error_matches(function() kjt({ keys = { "x", "y" }, values = values, lengths = lengths }):sync() end,
        "key 'y', sample 5999: length %-1")
    end)

    it("says at once what is wrong with the structure", function()
      local function structure(pattern, a) assert.error_matches(function() example(a) end, pattern) end
      structure("3 lengths do not divide by 2 keys", { lengths = { 1, 1, 1 } })
      structure("6 lengths for 2 keys of stride 4, wanted 8", { stride = 4 })
      structure("5 lengths do not divide", { offsets = { 0, 2, 2, 3, 4, 5 } })
      structure("offsets are empty", { offsets = {} })
      structure("7 offsets for 5 lengths, wanted 6", { offsets = { 0, 2, 2, 3, 4, 5, 8 }, lengths = { 1, 1, 1, 1, 1 } })
      structure("key 'A' stands at positions 0 and 1", { keys = { "A", "A" } })
      structure("name 1 is empty", { keys = { "A", "" } })
      structure("entry 2 is a number", { keys = { "A", 7 } })
      structure("lengths are f32 %[6%], allowed: i32, i64", { lengths = peri.zeros({ 6 }, "f32", device) })
      structure("lengths of 3 rows for 2 keys",
        { lengths = peri.zeros({ 3, 2 }, "i32", device) })
      structure("weights are f32 %[3%] for 8 values", { weights = { 1, 2, 3 } })
      structure("weights are bf16", { weights = peri.zeros({ 8 }, "bf16", device) })
      structure("different devices", { values = peri.zeros({ 8 }, "i64", device == "cpu" and "opaque" or "cpu") })
      structure("key 'B': stride %-1 of rank 1", { stride_per_key_per_rank = { { 1, 1 }, { 4, -1 } } })
      structure("sums to 5, but there are 6 lengths", { stride_per_key_per_rank = { { 1, 1 }, { 3, 0 } } })
      structure("key 'B': stride_per_key_per_rank sums to more than the 6 lengths",
        { stride_per_key_per_rank = { { 4 }, { 3 } } })
      structure("1 rows for 2 keys", { stride_per_key_per_rank = { { 6 } } })
      structure("with 0 ranks", { stride_per_key_per_rank = { {}, {} } })
      structure("row 2 of stride_per_key_per_rank is a list of 1", { stride_per_key_per_rank = { { 1, 1 }, { 4 } } })
      structure("wanted a whole number", { stride_per_key_per_rank = { { 1.5 }, { 4 } } })
      structure("inverse indices belong to variable batches", { inverse_indices = { { "A" }, { { 0, 0, 0 } } } })
      local strides = { { 2 }, { 4 } }
      structure("'C', which is not one of the keys",
        { stride_per_key_per_rank = strides, inverse_indices = { { "C" }, { { 0, 0, 0 } } } })
      structure("inverse indices are i64 %[1, 3%] for 2 keys",
        { stride_per_key_per_rank = strides, inverse_indices = { { "A", "B" }, { { 0, 0, 0 } } } })
      structure("no argument 'length'; allowed: device, inverse_indices, keys", { length = {} })
      assert.error_matches(function() kjt { values = {}, lengths = {} } end, "'keys' is missing")
      assert.error_matches(function() kjt { keys = {}, lengths = {} } end, "'values' is missing")
      assert.error_matches(function() kjt { keys = {}, values = {} } end, "neither lengths nor offsets")
      assert.error_matches(function() kjt { keys = {}, values = {}, lengths = { 0 } } end, "1 lengths without any key")
      assert.error_matches(function() kjt { keys = {}, values = { 1 }, lengths = {} } end, "1 values without any key")
      local k = example()
      k:release()
      assert.error_matches(function() k:stride() end, "released")
    end)

    it("leaves nothing behind", function()
      collectgarbage()
      collectgarbage()
      local before = tonumber(peri.ffi.C.peri_mem_objects())
      local keys = { "A", "B" }
      peri.scope(function()
        for _ = 1, 20 do
          local k = example { keys = keys }
          if _ % 2 == 0 then k:offsets() end -- released with its report on the way
          pcall(example, { keys = keys, lengths = { -1, 0, 0, 0, 0, 0 } })
        end
      end)
      assert.equal(before + 1, tonumber(peri.ffi.C.peri_mem_objects())) -- the key list stays with its Lua list
    end)
  end)
end

describe("key lists", function()
  local Keys = peri.jagged.Keys
  it("compare, find and are shared", function()
    local names = { "user", "item", "user" }
    local a = Keys.of(names)
    assert.equal(a, Keys.of(names))
    assert.is_false(a:unique())
    assert.equal(3, a:find "user")
    assert.equal(2, a:find "item")
    assert.is_nil(a:find "x")
    assert.is_true(a:equal { "user", "item", "user" })
    assert.is_false(a:equal { "user", "user", "item" })
    assert.equal(3, #a)
    names[2] = "shop" -- a changed list is another list
    assert.same(names, Keys.of(names):list())
    assert.same({ "user", "item", "user" }, a:list())
    local C = peri.ffi.C
    assert.equal(C.peri_keys_hash(a.ptr), C.peri_keys_hash(Keys.of({ "user", "item", "user" }).ptr))
    assert.not_equal(C.peri_keys_hash(a.ptr), C.peri_keys_hash(Keys.of({ "user", "item" }).ptr))
  end)
end)
