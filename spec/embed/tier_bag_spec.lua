-- EmbeddingBagCollection over tables in files: cache_params in fused_params, prefetches of whole batches, what replaces
-- its tensors.
local peri = require "perilune"
local tier = require "spec.support.tier"
local support = require "spec.support.tbe"
local C, check = peri.ffi.C, peri.ffi.check

local function make(device, cache, more)
  local function table_of(name, rows, dim, features, pooling)
    return peri.EmbeddingBagConfig { name = name, num_embeddings = rows, embedding_dim = dim, feature_names = features,
      pooling = pooling }
  end
  local args = {
    tables = { table_of("a", 300, 8, { "f", "g" }, "SUM"), table_of("b", 400, 4, { "g" }, "MEAN"),
      table_of("c", 200, 12, { "h" }, "SUM") },
    fused_params = { optimizer = "adam", learning_rate = 0.1, cache_params = cache }, seed = 11, device = device,
  }
  for key, value in pairs(more or {}) do args[key] = value end
  return peri.EmbeddingBagCollection(args)
end

local function batch(step, size, device, weighted)
  local draw = support.generator(7000 + step)
  local values, lengths, limit = {}, {}, { 300, 300, 200 }
  for f = 1, 3 do
    for _ = 1, size do
      lengths[#lengths + 1] = draw(4)
      for _ = 1, lengths[#lengths] do values[#values + 1] = draw(limit[f]) end
    end
  end
  return peri.KeyedJaggedTensor { keys = { "f", "g", "h" }, values = values, lengths = lengths, device = device,
    weights = weighted and support.numbers(#values, draw) or nil }
end

for _, device in ipairs { "cpu", "opaque" } do
  describe("collections of tables in files on " .. device, function()
    for _, weighted in ipairs { false, true } do
      it("train as in memory, prefetching, with a short last batch" .. (weighted and ", weighted" or ""), function()
        local more = { is_weighted = weighted }
        local want = make(device, nil, more)
        local got = make(device, peri.CacheParams { load_factor = 0.3, prefetch_pipeline = true }, more)
        assert.same({}, got:named_state())
        local next_batch = batch(1, 8, device, weighted)
        for step = 1, 10 do
          local kjt = next_batch
          next_batch = batch(step + 1, step == 9 and 3 or 8, device, weighted)
          local x, y = want(kjt):values(), got(kjt):values()
          got:prefetch(next_batch)
          assert.same(x:to_list(), y:to_list())
          local grad = peri.Tensor.uniform(x:shape(), -1, 1, step, 0, "f32", device)
          x:backward(grad)
          y:backward(grad)
        end
        for _, name in ipairs { "a", "b", "c" } do
          for _, which in ipairs { "weight", "momentum1", "momentum2" } do
            assert.same(want:table_rows(name, which, 5, 190):to_list(), got:table_rows(name, which, 5, 190):to_list())
          end
          assert.is_true(got:cache_statistics(name).prefetch_hits > 0)
          assert.is_nil(want:cache_statistics(name))
        end
        want:prefetch(next_batch) -- nothing to do
        got:flush()
        want:flush()
      end)
    end

    it("say what they have instead of tensors", function()
      local ok, err = pcall(function() return make(device, {}):weight "a" end)
      assert.is_false(ok)
      assert.truthy(tostring(err):find("the rows of table 'a' are behind a cache, so there is no view of them; read "
        .. "and write rows"))
    end)

    it("go on from their files", function()
      local folder = tier.folder()
      local cache = peri.CacheParams { load_factor = 0.5, directory = folder, algorithm = "LFU" }
      local first, kjt = make(device, cache), batch(1, 8, device)
      first(kjt):values():backward(peri.ones({ 8, 32 }, "f32", device))
      local rows = first:table_rows("a", "weight", 0, 300):to_list()
      first:flush()
      first._tbe:release()
      local again = make(device, cache)
      assert.same(rows, again:table_rows("a", "weight", 0, 300):to_list())
      assert.equal(1, again:materialise():iteration())
      again._tbe:release()
      tier.remove(folder)
    end)

    it("read anew what could not be read for a prefetch, and call nothing damaged", function()
      local folder = tier.folder()
      local cache = peri.CacheParams { load_factor = 0.5, directory = folder }
      local first, kjt = make(device, cache), batch(1, 8, device)
      first(kjt):values():backward(peri.ones({ 8, 32 }, "f32", device))
      local function values_of(collection)
        return peri.no_grad(function() return collection(kjt):values():to_list() end)
      end
      local rows, values = first:table_rows("a", "weight", 0, 300):to_list(), values_of(first)
      first:flush()
      first._tbe:release()
      local again = make(device, cache)
      again:materialise()
      check(C.peri_fault_arm("row_read", 1))
      again:prefetch(kjt)
      assert.error_matches(function() again:table_rows("a", "weight", 0, 300) end, "reading %d+ bytes at byte %d+: Inp")
      check(C.peri_fault_arm("row_read", 0))
      assert.same(rows, again:table_rows("a", "weight", 0, 300):to_list())
      assert.same(values, values_of(again))
      again._tbe:release()
      tier.remove(folder)
    end)
  end)
end
