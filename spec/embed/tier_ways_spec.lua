-- Row caches in sets beside caches whose rows may use any slot: the same ids find about as many rows, every batch that
-- fits is held, and the number of threads changes nothing. The figures are those of docs/benchmarks/gpu_kernels.md.
-- Each count of sets is held to a model in tier_count_spec.lua.
-- deadline: 240 s
local peri = require "perilune"
collectgarbage("setpause", 200) -- as in programs (tests/harness/busted_main.lua): memory is measured here
local C, check = peri.ffi.C, peri.ffi.check

local ROWS, SLOTS = 20480, 2048

--- The same numbers at any seed of the tests: draw(n) is in 0 .. n - 1.
local function generator(salt)
  local state = (4711 * 7919 + salt * 104729) % 2147483647
  return function(n)
    state = state * 48271 % 2147483647
    return state % n
  end
end

--- Ids of a batch, most of them few: Zipf's law with exponent `s`, the ranks strewn over the rows.
local function zipf(s)
  local sums, total = {}, 0
  for i = 1, ROWS do
    total = total + i ^ -s
    sums[i] = total
  end
  return function(draw, n)
    local ids = {}
    for k = 1, n do
      local want, low, high = draw(2 ^ 30) / 2 ^ 30 * total, 1, ROWS
      while low < high do
        local middle = math.floor((low + high) / 2)
        if sums[middle] < want then low = middle + 1 else high = middle end
      end
      ids[k] = low * 7919 % ROWS
    end
    return ids
  end
end

--- Returns a table batch and look(ids), which looks them up without an update.
local function cached(algorithm, ways, device)
  device = device or "cpu"
  local b = peri.embed.tbe.new { tables = { { name = "t", rows = ROWS, cols = 4 } }, device = device, seed = 1,
    fused_params = {
    optimizer = "sgd", cache_params = { load_factor = SLOTS / ROWS, algorithm = algorithm, ways = ways } } }
  local list = b:blocks { { table = 1, first_bag = 0, bags = 1, out_offset = 0, out_stride = 4 } }
  return b, function(ids)
    peri.scope(function()
      peri.no_grad(function()
        b:lookup(peri.tensor(ids, "i64", device), peri.tensor({ 0, #ids }, "i64", device), list, 1, 4)
      end)
    end)
  end
end

--- Of the rows of `steps` batches: the share found in the cache. Then all counts.
local function share(algorithm, ways, s, device, steps)
  local draw, some = generator(31), zipf(s)
  local b, look = cached(algorithm, ways, device)
  for _ = 1, steps or 80 do look(some(draw, 600)) end
  local got = b:cache_statistics()
  b:release()
  return got.hits / (got.hits + got.misses), got
end

describe("a cache of 64-way sets", function()
  for _, case in ipairs { { "LRU", 0.6, "21.2", "21.2" }, { "LRU", 0.9, "40.3", "40.5" },
    { "LRU", 1.2, "65.3", "65.2" },
    { "LFU", 0.6, "27.9", "27.8" }, { "LFU", 0.9, "47.6", "47.5" }, { "LFU", 1.2, "67.0", "67.0" } } do
    local algorithm, s = case[1], case[2]
    it(("finds about as many rows as one without sets: %s, ids by rank^-%g"):format(algorithm, s), function()
      local any, sets = share(algorithm, 0, s), share(algorithm, 64, s)
      assert.near(sets, any, 0.01)
      assert.same({ case[3], case[4] }, { ("%.1f"):format(100 * any), ("%.1f"):format(100 * sets) })
    end)
  end

  it("takes every batch that fits, some rows of it into other sets than their own", function()
    for _, device in ipairs { "cpu", "opaque" } do
      local draw, some = generator(5), zipf(0)
      local b, look = cached("LRU", 64, device)
      for _ = 1, 10 do
        local ids, distinct, n = some(draw, 1850), {}, 0 -- some are drawn twice
        for _, row in ipairs(ids) do
          if not distinct[row] then distinct[row], n = true, n + 1 end
        end
        look(ids)
        assert.is_true(n <= SLOTS and n > SLOTS * 0.8)
      end
      local got = b:cache_statistics()
      assert.equal(0, got.conflict_misses)
      assert.equal("0.8", ("%.1f"):format(100 * got.set_conflicts / (got.hits + got.misses)))
      local all = {} -- as many rows as the cache has slots, and not one more
      for i = 0, SLOTS do all[i + 1] = 10 * i % ROWS + (10 * i >= ROWS and 1 or 0) end
      assert.error_matches(function() look(all) end,
        "the batch needs 2049 different rows, its cache holds 2048 of 20480")
      all[#all] = nil
      look(all)
      look(all)
      local last = b:cache_statistics()
      assert.equal(SLOTS, last.resident)
      assert.is_true(last.hits - got.hits >= SLOTS)
      b:release()
    end
  end)

  it("is what a device with a memory of its own has where nobody says how many; files on a CPU have none", function()
    for _, algorithm in ipairs { "LRU", "LFU" } do
      local function counts(device, ways) return (select(2, share(algorithm, ways, 0.9, device, 30))) end
      local opaque, cpu = counts "opaque", counts "cpu"
      assert.same(counts("opaque", 64), opaque)
      assert.same(counts("cpu", 0), cpu)
      assert.not_equal(opaque.hits, counts("opaque", 0).hits)
      assert.not_equal(cpu.hits, counts("cpu", 64).hits)
    end
  end)

  it("has the same rows whatever the number of threads", function()
    local before, draw, some = C.peri_threads(), generator(77), zipf(0.9)
    local batches, want = {}, {}
    for k = 1, 12 do batches[k] = some(draw, 16000) end -- more than 2,048 different rows, as many as one thread takes
    batches[13] = {} -- as many rows as there are slots, and once more
    for i = 0, 6143 do batches[13][i + 1] = 3 * i end
    batches[14] = batches[13]
    for _, algorithm in ipairs { "LRU", "LFU" } do
      for threads = 1, 4 do
        check(C.peri_threads_set(threads))
        local b = peri.embed.tbe.new { tables = { { name = "t", rows = ROWS, cols = 4 } }, device = "cpu", seed = 1,
          fused_params = {
          optimizer = "sgd", cache_params = { load_factor = 0.3, algorithm = algorithm, ways = 16 } } }
        local list = b:blocks { { table = 1, first_bag = 0, bags = 3, out_offset = 0, out_stride = 4 } }
        for _, ids in ipairs(batches) do
          local out = b:lookup(peri.tensor(ids, "i64"), peri.tensor({ 0, 100, 100, #ids }, "i64"), list, 3, 4)
          out:backward(peri.full({ 3, 4 }, 0.5))
        end
        local got = b:cache_statistics()
        assert.is_true(got.evictions > 0 and got.hits > 6144 + 11 * 2048)
        assert.equal(6144, got.resident)
        got.wait_ns = nil
        want[algorithm] = want[algorithm] or got
        assert.same(want[algorithm], got)
        b:release()
      end
    end
    check(C.peri_threads_set(before))
  end)
end)
