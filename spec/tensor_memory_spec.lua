-- Numbers that enter tensors, and leave them, as what they are: C memory goes by its type, and whole numbers that Lua's
-- do not hold are taken and given as 64-bit integers only.
local ffi = require "ffi"
local peri = require "perilune"
local draw = require("spec.support.tbe").generator(53)

local function refuses(words, f, ...)
  local ok, why = pcall(f, ...)
  assert.is_false(ok, words)
  assert.truthy(tostring(why):find(words, 1, true), words .. "\n" .. tostring(why))
end

--- C types by the dtype whose elements they are; those of no dtype under "none".
local elements = { f32 = { "float" }, f64 = { "double" }, i64 = { "int64_t", "long", "long long", "ptrdiff_t" },
  i32 = { "int32_t", "int" }, i16 = { "int16_t", "short" }, i8 = { "int8_t" }, u8 = { "uint8_t" },
  bool = { "bool", "uint8_t" }, f16 = { "uint16_t" }, bf16 = { "uint16_t" }, c64 = { "complex float", "float" },
  c128 = { "complex", "double" }, none = { "uint64_t", "uint32_t", "struct spec_number", "enum spec_name" } }
ffi.cdef "struct spec_number { float x; }; enum spec_name { SPEC_NAME };"
local COUNT = 4

describe("C memory", function()
  for dtype, own in peri.util.ordered(elements) do
    if dtype ~= "none" then
      it("becomes a tensor of " .. dtype .. " if its elements are of that type", function()
        local size = tonumber(peri.ffi.C.peri_dtype_size(peri.ffi.dtype(dtype)))
        local right = peri.util.index_of(own)
        local names = {}
        for _, list in pairs(elements) do
          for _, name in ipairs(list) do names[name] = true end
        end
        local same = {} -- other names of the same types
        for name in pairs(right) do same[tostring(ffi.typeof(name))] = true end
        for name in pairs(names) do
          local ctype = ffi.typeof(name)
          local bytes = ffi.sizeof(ctype)
          local n = math.max(1, math.ceil(COUNT * size / bytes))
          local array = ffi.new(name .. "[?]", n)
          local raw = ffi.cast("uint8_t *", array)
          for i = 0, COUNT * size - 1 do raw[i] = dtype == "bool" and draw(2) or draw(100) end
          local fits = same[tostring(ctype)] or tostring(ctype) == "ctype<char>" and n * bytes == COUNT * size
          for _, data in ipairs { array, ffi.cast("const " .. name .. " *", array) } do
            local t = peri.zeros({ COUNT }, dtype)
            if fits then
              assert.equal(ffi.string(array, COUNT * size), ffi.string(t:write(data):read(), COUNT * size), name)
              local made = peri.Tensor.from_memory(data, { COUNT }, dtype, "cpu")
              assert.equal(ffi.string(array, COUNT * size), ffi.string(made:read(), COUNT * size), name)
            else
              local called = tostring(ctype):match "<(.*)>"
              refuses(("write: data is C memory of '%s' for elements of %s"):format(called, dtype), t.write, t, data)
              refuses("from_memory: data is C memory of", peri.Tensor.from_memory, data, { COUNT }, dtype, "cpu")
            end
          end
          local t = peri.zeros({ COUNT }, dtype):write(ffi.string(array, COUNT * size)) -- bytes of any dtype
          assert.equal(ffi.string(array, COUNT * size), ffi.string(t:read(), COUNT * size))
          t:fill(0):write(ffi.cast("const void *", array))
          assert.equal(ffi.string(array, COUNT * size), ffi.string(t:read(), COUNT * size))
        end
      end)
    end
  end

  it("has room for the tensor: bytes exactly, elements at least", function()
    local t = peri.zeros { 2 }
    assert.same({ 1, 2 }, t:write(ffi.new("float[4]", 1, 2, 3, 4)):to_list())
    assert.same({ 1, 2 }, t:write(ffi.new("float[2][1]", { { 1 }, { 2 } })):to_list())
    refuses("write: 4 bytes of data", t.write, t, ffi.new "float[1]")
    refuses("write: 9 bytes of data", t.write, t, ("x"):rep(9))
    refuses("write: 9 bytes of data", t.write, t, ffi.new "char[9]")
    for _, data in ipairs { ffi.new "float", 3LL, ffi.cast("float *", nil), ffi.typeof "float", t } do
      refuses("write: data is", t.write, t, data)
    end
    local probabilities, model = ffi.new("double[?]", 4),
      peri.data.LogisticRegression { rows = { 10 }, dense_features = 1 }
    local batch = peri.data.synthetic { sparse_features = 1, dense_features = 1, rows = 10, batch_size = 4,
      num_rows = 4 }
    refuses("LogisticRegression:predict: data is C memory of 'double'", model.predict, model, batch:next_host(),
      probabilities)
  end)
end)

describe("Whole numbers of 64 bits", function()
  --- A random one, all sizes alike.
  local function wide()
    local x = 0LL
    for _ = 1, 4 do x = x * 65536 + draw(65536) end
    return bit.arshift(x, draw(64))
  end

  it("pass through tensors and lists unchanged", function()
    for _ = 1, 50 do
      local list, rows = {}, {}
      for i = 1, 6 do list[i] = wide() end
      for i, x in ipairs { 9007199254740991LL, 9007199254740992LL, -9007199254740993LL, 0x7fffffffffffffffLL,
        -0x7fffffffffffffffLL - 1 } do list[6 + i] = x end
      list[12] = 2 ^ 53 - 1 -- Lua's numbers end here
      for i = 1, 4 do rows[i] = { list[3 * i - 2], list[3 * i - 1], list[3 * i] } end
      local t = peri.tensor(list, "i64")
      local memory, back, nested = t:read(), t:to_list(), peri.tensor(rows, "i64"):to_table()
      for i = 1, 12 do
        assert(memory[i - 1] == list[i] and back[i] == list[i] and t:item(i - 1) == list[i], tostring(list[i]))
        assert(nested[math.ceil(i / 3)][(i - 1) % 3 + 1] == list[i])
        local small = list[i] > -2 ^ 53 and list[i] < 2 ^ 53
        assert.equal(small and "number" or "cdata", type(back[i]))
      end
      assert.same(ffi.string(memory, 96), ffi.string(peri.tensor(back, "i64"):read(), 96))
      local kjt = peri.KeyedJaggedTensor { keys = { "a", "b" }, values = back, lengths = { 3, 0, 5, 4 } }
      assert.same(ffi.string(memory, 96), ffi.string(kjt:values():read(), 96))
      local bags = peri.KeyedJaggedTensor.from_lists { keys = { "a" }, { { list[1], list[7] }, {}, { list[2] } } }
      local ids = bags:values():read()
      assert(ids[0] == list[1] and ids[1] == list[7] and ids[2] == list[2])
    end
  end)

  it("are not made of Lua numbers that may have been rounded, at any entry", function()
    local K = peri.KeyedJaggedTensor
    local parts = { keys = { "a" }, values = { 1 }, lengths = { 1 } }
    local function kjt(name, value)
      local a = peri.util.copy(parts)
      a[name] = value
      return K(a)
    end
    local ids, lengths = peri.tensor({ 1 }, "i64"), peri.tensor({ 1 }, "i64")
    local function buckets(a)
      a.lengths, a.indices, a.my_size, a.block_sizes = lengths, ids, 1, a.block_sizes or { 4 }
      return peri.sparse.block_bucketize_sparse_features(a)
    end
    local entries = {
      tensor = function(x) peri.tensor({ 1, x }, "i64") end,
      ["nested lists"] = function(x) peri.tensor({ { 1 }, { x } }, "i64") end,
      full = function(x) peri.full({ 2 }, x, "i64") end, fill = function(x) peri.zeros({ 2 }, "i64"):fill(x) end,
      ["fill of a view"] = function(x) peri.zeros({ 2, 2 }, "i64"):slice(2, 0, 1):fill(x) end,
      values = function(x) kjt("values", { x }) end, offsets = function(x) kjt("offsets", { 0, x }) end,
      ["from_lists"] = function(x) K.from_lists { keys = { "a" }, { { x } } } end, ["values beside 64-bit ones"] =
      function(x) K { keys = { "a" }, values = { 5LL, x }, lengths = { 2 } } end,
      stride = function(x) kjt("stride", x) end, strides = function(x) kjt("stride_per_key_per_rank", { { x } }) end,
      ["inverse indices"] = function(x)
        K { keys = { "a" }, values = { 1 }, lengths = { 1 }, stride_per_key_per_rank = { { 1 } },
          inverse_indices = { { "a" }, { { x } } } }
      end,
      ["jagged offsets"] = function(x) peri.JaggedTensor { values = { 1 }, offsets = { 0, x } } end,
      ["desired_length"] = function(x) peri.JaggedTensor { values = { 1 }, offsets = { 0, 1 } }:to_padded_dense(x) end,
      ["block sizes"] = function(x) buckets { block_sizes = { x } } end,
      ["total_num_blocks"] = function(x) buckets { total_num_blocks = { x } } end,
      ["bounds of buckets"] = function(x) buckets { block_bucketize_pos = { { 0, x } } } end,
      ["max_L"] = function(x) peri.sparse.jagged_softmax(peri.ones { 1, 1 }, peri.tensor({ 0, 1 }, "i64"), x) end,
      ["input_hash_size"] = function(x)
        peri.embed.MCHManagedCollisionModule { zch_size = 4, input_hash_size = x, eviction_interval = 1,
          eviction_policy = peri.embed.LFU_EvictionPolicy {} }
      end,
      seed = function(x) peri.Tensor.uniform({ 1 }, 0, 1, x) end,
      ["seed of tables"] = function(x)
        peri.embed.tbe.new { tables = { { name = "t", rows = 4, cols = 4 } }, seed = x,
          fused_params = { optimizer = "none" } }
      end,
      ["seed of a collection"] = function(x)
        peri.EmbeddingBagCollection { seed = x,
          tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = 4, embedding_dim = 4,
            feature_names = { "f" } } } }
      end,
      ["seed of synthetic samples"] = function(x)
        peri.data.synthetic { sparse_features = 1, dense_features = 1, rows = 10, batch_size = 4, num_rows = 4,
          seed = x }
      end,
      ["rows of a table batch"] = function(x)
        peri.embed.tbe.new { tables = { { name = "t", rows = 4, cols = 4, total_rows = x } },
          fused_params = { optimizer = "none" } }
      end,
    }
    for name, f in peri.util.ordered(entries) do
      for _, x in ipairs { 2 ^ 53, -2 ^ 53, 2 ^ 53 + 2, tonumber "9007199254740993", 1e18, 2 ^ 63, 0.5, 0 / 0,
        math.huge } do
        local ok, why = pcall(f, x)
        assert.is_false(ok, ("%s: %.0f"):format(name, x))
        assert.truthy(tostring(why):find "allowed: " or tostring(why):find "wanted a whole number", tostring(why))
      end
    end
  end)
end)
