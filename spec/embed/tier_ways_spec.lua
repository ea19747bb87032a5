-- Row caches let any row use any slot. Beside them a model of a cache of 32-way sets (FBGEMM's shape) with as many slots: the same ids find
-- as many rows here, and no batch that fits is refused a row for the sake of its neighbours in a set. docs/cuda.md says what follows.
-- deadline: 240 s
local peri = require "perilune"

local ROWS, SLOTS, WAYS = 20480, 2048, 32

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

--- A cache of `sets` sets of `ways` rows: which row leaves a set is the least of `age`. Rows of the running batch stay; one that finds its
--- set full of them is not kept.
local function model(sets, ways, algorithm)
  local place, set, uses, now = {}, {}, {}, 0
  for i = 0, sets - 1 do set[i] = {} end
  local m = { hits = 0, misses = 0, conflicts = 0 }
  local function set_of(row) -- FBGEMM hashes rows to sets, too
    local h = bit.bxor(row, bit.rshift(row, 16)) * 0x85eb % 2 ^ 31
    return math.floor(bit.bxor(h, bit.rshift(h, 13))) % sets
  end
  function m.batch(ids)
    now = now + 1
    local seen, wanted = {}, {}
    for _, row in ipairs(ids) do
      if not seen[row] then
        seen[row] = true
        local p = place[row]
        if p then
          m.hits = m.hits + 1
          p.last = now
        else
          m.misses = m.misses + 1
          wanted[#wanted + 1] = row
        end
        uses[row] = (uses[row] or 0) + 1
      end
    end
    for _, row in ipairs(wanted) do
      local s = set[set_of(row)]
      local victim
      if #s < ways then victim = #s + 1 end
      for i = 1, victim and 0 or ways do
        local x, y = s[i], victim and s[victim]
        if x.last < now then
          local less
          if algorithm == "LFU" and y and uses[x.row] ~= uses[y.row] then less = uses[x.row] < uses[y.row] end
          if less == nil then less = not y or x.last < y.last end
          if less then victim = i end
        end
      end
      if victim then
        if s[victim] then place[s[victim].row] = nil end
        s[victim] = { row = row, last = now }
        place[row] = s[victim]
      else
        m.conflicts = m.conflicts + 1
      end
    end
  end
  return m
end

local function cached(algorithm)
  local b = peri.embed.tbe.new { tables = { { name = "t", rows = ROWS, cols = 4 } }, device = "cpu", seed = 1, fused_params = {
    optimizer = "sgd", cache_params = { load_factor = SLOTS / ROWS, algorithm = algorithm } } }
  local list = b:blocks { { table = 1, first_bag = 0, bags = 1, out_offset = 0, out_stride = 4 } }
  return b, function(ids)
    peri.scope(function()
      peri.no_grad(function() b:lookup(peri.tensor(ids, "i64"), peri.tensor({ 0, #ids }, "i64"), list, 1, 4) end)
    end)
  end
end

--- Of the rows of 80 batches: the share found in the cache, and by the model of sets.
local function shares(algorithm, s)
  local draw, some = generator(31), zipf(s)
  local b, look = cached(algorithm)
  local sets, any = model(SLOTS / WAYS, WAYS, algorithm), model(1, SLOTS, algorithm)
  for step = 1, 80 do
    local ids = some(draw, 600)
    look(ids)
    sets.batch(ids)
    if step <= 12 then any.batch(ids) end -- it is slow: a look at the beginning, before and after the first rows leave
    if step == 12 then
      local hits = tonumber(b:cache_statistics().hits)
      assert.near(any.hits, hits, algorithm == "LRU" and 0 or any.hits / 200) -- who leaves among equals is each LFU's own choice
    end
  end
  local got, all = b:cache_statistics(), sets.hits + sets.misses
  assert.equal(all, tonumber(got.hits + got.misses))
  b:release()
  return tonumber(got.hits) / all, sets.hits / all
end

describe("a cache whose rows may use any slot", function()
  -- the figures are those of docs/cuda.md
  for _, case in ipairs { { "LRU", 0.6, "21.2", "21.1" }, { "LRU", 0.9, "40.3", "40.5" }, { "LRU", 1.2, "65.3", "65.2" },
    { "LFU", 0.6, "27.9", "27.7" }, { "LFU", 0.9, "47.6", "47.4" }, { "LFU", 1.2, "67.0", "66.9" } } do
    local algorithm, s = case[1], case[2]
    it(("finds as many rows as one of 32-way sets: %s, ids by rank^-%g"):format(algorithm, s), function()
      local any, sets = shares(algorithm, s)
      assert.near(sets, any, 0.01)
      assert.same({ case[3], case[4] }, { ("%.1f"):format(100 * any), ("%.1f"):format(100 * sets) })
    end)
  end

  it("takes every batch that fits, where sets have no room for some rows of it", function()
    local draw, some = generator(5), zipf(0)
    local b, look = cached "LRU"
    local sets, refused = model(SLOTS / WAYS, WAYS, "LRU"), {}
    for step = 1, 10 do
      local ids, distinct, n = some(draw, 1850), {}, 0 -- some are drawn twice
      for _, row in ipairs(ids) do
        if not distinct[row] then distinct[row], n = true, n + 1 end
      end
      look(ids)
      sets.batch(ids)
      refused[step] = sets.conflicts
      assert.equal(0, tonumber(b:cache_statistics().conflict_misses))
      assert.is_true(n <= SLOTS and n > SLOTS * 0.8)
    end
    assert.is_true(refused[1] > 0)
    assert.equal("2.0", ("%.1f"):format(100 * refused[10] / (sets.hits + sets.misses)))
    b:release()
  end)
end)
