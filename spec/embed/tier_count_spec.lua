-- Tables behind a cache, in files and in a host's memory: every count of the cache statistics against a model in plain
-- lists; sequences; offsets that run backwards.
-- deadline: 300 s
local peri = require "perilune"
local support = require "spec.support.tbe"
local tier = require "spec.support.tier"
collectgarbage("setpause", 200) -- as in programs (tests/harness/busted_main.lua): memory is measured here
local C, check = peri.ffi.C, peri.ffi.check

-- -- the model --------------------------------------------------------------------------------------------------------

local COUNTS = { "hits", "misses", "prefetched", "prefetch_hits", "set_conflicts", "evictions", "initialised",
  "rows_read", "rows_written" }

local Model = {}
Model.__index = Model

--- at_once: rows that a prefetch brings arrive with it, not when they are looked up. sets: of slots; 0: rows may use
--- any slot.
local function model_of(slots, algorithm, at_once, sets)
  local m = setmetatable({ slots = slots, lfu = algorithm == "LFU", at_once = at_once, here = 0, clock = 0, row = {},
    uses = {}, count = {}, sets = sets, holds = {}, batch = 0 }, Model)
  for _, name in ipairs(COUNTS) do m.count[name] = 0 end
  return m
end

function Model:add(name, n) self.count[name] = self.count[name] + (n or 1) end

function Model:use(row)
  self.uses[row] = (self.uses[row] or 0) + 1
  self.old = self.old or self.uses[row] == 255
  self.row[row].last = self.batch
end

--- A batch begins; first, counts that have come to their end are halved.
function Model:begin()
  self.batch = self.batch + 1
  if self.old and self.lfu then
    for row, n in pairs(self.uses) do self.uses[row] = math.floor(n / 2) end
  end
  self.old = false
end

--- The least used (LFU), of those the longest idle, or, in sets, that of the longest past batch.
function Model:sooner(a, b)
  local x, y = self.row[self.holds[a]], self.row[self.holds[b]]
  if self.lfu and self.uses[self.holds[a]] ~= self.uses[self.holds[b]] then
    return self.uses[self.holds[a]] < self.uses[self.holds[b]]
  end
  if self.sets == 0 then return x.idle < y.idle end
  return x.last < y.last
end

--- Of `n` slots from `first` on: one that is free, else the one whose row leaves; nil: batches in flight hold all.
function Model:choose(first, n)
  local best
  for s = first, first + n - 1 do
    if not self.holds[s] then return s end
  end
  for s = first, first + n - 1 do
    if self.row[self.holds[s]].pins == 0 and (not best or self:sooner(s, best)) then best = s end
  end
  return best
end

local ROUND = { { 30, 0xbf58476d1ce4e5b9ULL }, { 27, 0x94d049bb133111ebULL } }
--- splitmix64.
local function mixed(row)
  local z = row + 0x9e3779b97f4a7c15ULL
  for _, r in ipairs(ROUND) do z = bit.bxor(z, bit.rshift(z, r[1])) * r[2] end
  return bit.bxor(z, bit.rshift(z, 31))
end

--- A slot for a row, from 0: of its set or, if that is full, of the next one that is not.
function Model:slot_for(row)
  if self.sets == 0 then return self:choose(0, self.slots) end
  local least, more = math.floor(self.slots / self.sets), self.slots % self.sets
  local home = tonumber(bit.rshift(bit.rshift(mixed(row), 32) * self.sets, 32))
  for k = 0, self.sets - 1 do
    local set = (home + k) % self.sets
    local slot = self:choose(set * least + math.min(set, more), set < more and least + 1 or least)
    if slot then
      if k > 0 then self:add "set_conflicts" end
      return slot
    end
  end
end

--- Rows of a batch in the order in which they first come: a ticket with those that were there and those that were
--- brought.
function Model:resolve(rows, prefetch)
  local ticket, wants, seen = { pins = {}, wants = {}, initialised = 0 }, {}, {}
  self:begin()
  for _, row in ipairs(rows) do
    local r = self.row[row] or { pins = 0, idle = 0 }
    self.row[row] = r
    if not seen[row] then
      if r.here then
        r.pins = r.pins + 1
        self:use(row)
        table.insert(ticket.pins, row)
      else
        table.insert(wants, row)
      end
    end
    seen[row] = true
  end
  for _, row in ipairs(wants) do
    local slot = self:slot_for(row)
    local v = self.row[self.holds[slot]]
    if v then
      if v.dirty then self:add "rows_written" end
      v.here, v.dirty, v.fetched, v.stored = false, false, false, v.stored or v.dirty
      self:add "evictions"
    else
      self.here = self.here + 1
    end
    local r = self.row[row]
    if r.stored then self:add "rows_read" else ticket.initialised = ticket.initialised + 1 end
    r.here, r.pins, r.fetched = true, 1, prefetch
    self.holds[slot] = row
    self:use(row)
    if prefetch then self:add "prefetched" end
    table.insert(ticket.wants, row)
  end
  if prefetch and self.at_once then
    self:add("initialised", ticket.initialised)
    ticket.initialised = 0
  end
  return ticket
end

function Model:look(ticket, prefetched)
  self:add("hits", #ticket.pins + (prefetched and #ticket.wants or 0))
  if not prefetched then self:add("misses", #ticket.wants) end
  self:add("initialised", ticket.initialised)
  for _, list in ipairs { ticket.pins, ticket.wants } do
    for _, row in ipairs(list) do
      if self.row[row].fetched then self:add "prefetch_hits" end
      self.row[row].fetched = false
    end
  end
end

function Model:finish(ticket, updated)
  for _, list in ipairs { ticket.pins, ticket.wants } do
    for _, row in ipairs(list) do
      local r = self.row[row]
      r.pins = r.pins - 1
      self.clock = self.clock + 1
      if r.pins == 0 then r.idle = self.clock end
      r.dirty = r.dirty or updated
    end
  end
end

function Model:flush()
  for _, r in pairs(self.row) do
    if r.here and r.dirty then
      self:add "rows_written"
      r.dirty, r.stored = false, true
    end
  end
end

-- -- batches ----------------------------------------------------------------------------------------------------------

local ROWS, COLS, BAGS = 500, 6, 8

--- Ids that prefer low rows, some repeated.
local function rows_of(step)
  local draw, rows = support.generator(9000 + step), {}
  for i = 1, 60 do rows[i] = draw(3) == 0 and draw(ROWS) or draw(20 + step % 7 * 10) end
  return rows
end

for _, device in ipairs { "cpu", "opaque" } do
  local function t(list, dtype) return peri.tensor(list, dtype or "i64", device) end

  describe("counts of tables in files on " .. device, function()
    local folder
    before_each(function() folder = tier.folder() end)
    after_each(function()
      collectgarbage()
      collectgarbage()
      tier.remove(folder)
    end)

    local function compare(b, model, step, record)
      local got = b:cache_statistics()
      for _, name in ipairs(COUNTS) do
        assert(tonumber(got[name]) == model.count[name], ("step %d: %s is %d, the model has %d"):format(step, name,
          tonumber(got[name]), model.count[name]))
      end
      assert.equal(model.here, tonumber(got.resident))
      assert.equal(0, tonumber(got.conflict_misses))
      assert.equal(model.count.rows_read * record, tonumber(got.bytes_read))
      assert.equal(model.count.rows_written * record, tonumber(got.bytes_written))
    end

    local cases = {}
    for _, algorithm in ipairs { "LRU", "LFU" } do
      for _, factor in ipairs { 0.25, 0.5, 1 } do
        for _, prefetch in ipairs { false, true } do
          for i, ways in ipairs(factor < 1 and { false, 0, 4, 64 } or { false }) do -- false: not said
            if ways ~= (device == "cpu" and 0 or 64) then
              -- in files and in the host's memory in turn, whichever the other values
              local memory = device ~= "cpu" and (i + (prefetch and 1 or 0) + (algorithm == "LRU" and 1 or 0)
                + factor * 4) % 2 == 0
              cases[#cases + 1] = { algorithm, factor, prefetch, ways, memory and "memory" or nil }
            end
          end
        end
      end
    end
    for _, case in ipairs(cases) do
      local algorithm, factor, prefetch, ways, memory = unpack(case)
      it(("are the model's: %s, load factor %g%s%s%s"):format(algorithm, factor, prefetch and ", prefetching" or "",
        ways and (", %d ways"):format(ways) or "", memory and ", in the host's memory" or ""), function()
        local tables = { { name = "a", rows = ROWS, cols = COLS } }
        local b = tier.make(tables, { device = device, factor = factor, algorithm = algorithm, directory = not memory
          and folder or nil, ways = ways or nil, optimizer = { optimizer = "adagrad", learning_rate = 0.1 } }, true)
        local record = memory and 8 + 2 * 4 * COLS or tier.record_bytes(tier.files(folder)[1], ROWS)
        assert.equal(memory ~= nil, b:cache_statistics().io == "memory")
        local used = ways or (device == "cpu" and 0 or 64)
        local sets = used > 0 and factor < 1 and math.ceil(ROWS * factor / used) or 0
        local model, list = model_of(ROWS * factor, algorithm, memory, sets), b:blocks {
          { table = 1, first_bag = 0, bags = BAGS, out_offset = 0, out_stride = COLS } }
        local offsets, grad = t { 0, 5, 5, 20, 21, 30, 44, 58, 60 }, peri.full({ BAGS, COLS }, 0.5, "f32", device)
        local ids, ticket = t(rows_of(1)), nil
        for step = 1, 300 do
          local ahead, train = t(rows_of(step + 1)), step % 5 ~= 0
          local prefetched = ticket ~= nil
          local function look() return b:lookup(ids, offsets, list, BAGS, COLS) end
          local out
          if train then out = look() else peri.no_grad(look) end
          ticket = ticket or model:resolve(rows_of(step), false)
          model:look(ticket, prefetched)
          if not train then model:finish(ticket, false) end
          local next_ticket
          if prefetch then
            b:prefetch(ahead, offsets, list)
            next_ticket = model:resolve(rows_of(step + 1), true)
          end
          if train then
            out:backward(grad)
            model:finish(ticket, true)
          end
          if step % 60 == 0 then
            b:flush()
            model:flush()
          end
          if step % 10 == 0 then compare(b, model, step, record) end
          ids, ticket = ahead, next_ticket
        end
        assert.is_true(model.count.hits > 0 and model.count.initialised > 0)
        assert.equal(factor < 1, model.count.evictions > 0)
        if ways == 4 and factor == 0.25 then assert.is_true(model.count.set_conflicts > 0) end
        b:flush()
        b:release()
      end)
    end

    it("count nothing of ids that are no rows", function()
      local b = tier.make({ { name = "a", rows = ROWS, cols = COLS } },
        { device = device, factor = 0.2, algorithm = "LRU", optimizer = { optimizer = "sgd", learning_rate = 0.1,
          bounds_check_mode = "IGNORE" } }, true)
      local list = b:blocks { { table = 1, first_bag = 0, bags = 1, out_offset = 0, out_stride = COLS } }
      peri.no_grad(b.lookup, b, t { -1, 3, 500, -7, 3, 9007199254740991, 4 }, t { 0, 7 }, list, 1, COLS)
      local s = b:cache_statistics()
      assert.same({ 2, 0 }, { tonumber(s.misses), tonumber(s.hits) })
      assert.equal(3, b:statistics().bad_ids)
    end)
  end)

  describe("tables in files on " .. device, function()
    it("give sequences of tables that share bags", function()
      local tables = { { name = "a", rows = 40, cols = 3, pooling = "NONE" },
        { name = "b", rows = 50, cols = 2, pooling = "NONE" }, { name = "c", rows = 40, cols = 2 } }
      for _, factor in ipairs { 0.5, 1 } do
        local pair = tier.pair { tables = tables, device = device, cache = { load_factor = factor },
          optimizer = { optimizer = "adagrad", learning_rate = 0.3 } }
        for step = 1, 6 do
          local n = 4 + step % 3 * 2 -- the number of ids changes where the blocks do not
          local ids, draw = {}, support.generator(step)
          for i = 1, n do ids[i] = draw(40) end
          local width = 7
          local outs = {}
          for i, b in ipairs { pair.plain, pair.cached } do
            local list = pair[i] or b:blocks {
              { table = 1, first_bag = 0, bags = 2, out_offset = 0, out_stride = width },
              { table = 2, first_bag = 0, bags = 2, out_offset = 3, out_stride = width },
              { table = 3, first_bag = 1, bags = 1, out_offset = 5, out_stride = width } }
            pair[i] = list
            local out = b:lookup(t(ids), t { 0, 3, n }, list, n, width)
            outs[i] = out:to_list()
            out:backward(peri.Tensor.uniform({ n, width }, -1, 1, step, 0, "f32", device))
          end
          assert.same(outs[1], outs[2])
        end
        tier.assert_same(pair)
      end
    end)

    it("map large batches on any number of threads, and evict alike", function()
      local tables, rows, n = { { name = "a", rows = 20000, cols = 3 }, { name = "b", rows = 9000, cols = 2 } },
        { 20000, 9000 }, 12000
      for _, case in ipairs { { 0.7, 0 }, { 0.7, 16 }, { 1 } } do
        local counts, factor, ways = {}, unpack(case)
        for i, threads in ipairs { 1, 3 } do
          local before = C.peri_threads()
          check(C.peri_threads_set(threads))
          local pair = tier.pair { tables = tables, device = device, cache = { load_factor = factor, ways = ways } }
          local cuts = { 0, 2000, 2001, 7500, n, n + 100, 2 * n }
          for step = 1, 3 do
            local draw, ids = support.generator(700 + step), {}
            for k = 1, 2 * n do
              ids[k] = draw(k % 3 == 0 and 50 or rows[k <= n and 1 or 2]) - (k % 97 == 0 and 1 or 0)
            end
            for k = 1, 2 * n do ids[k] = math.max(ids[k], -1) end
            local outs, grad = {}, peri.Tensor.uniform({ 4 * 3 + 2 * 2 }, -1, 1, step, 0, "f32", device)
            for j, b in ipairs { pair.plain, pair.cached } do
              local list = b:blocks { { table = 1, first_bag = 0, bags = 4, out_offset = 0, out_stride = 3 },
                { table = 2, first_bag = 4, bags = 2, out_offset = 12, out_stride = 2 } }
              local out = b:lookup(t(ids, step % 2 == 0 and "i32" or "i64"), t(cuts), list, 16)
              outs[j] = out:to_list()
              out:backward(grad)
            end
            assert.same(outs[1], outs[2])
          end
          tier.assert_same(pair)
          local s = pair.cached:cache_statistics()
          counts[i] = { tonumber(s.hits), tonumber(s.misses), tonumber(s.evictions), tonumber(s.rows_written) }
          check(C.peri_threads_set(before))
        end
        assert.same(counts[1], counts[2])
      end
    end)

    it("refuse offsets that run backwards where no block looks", function()
      local pair = tier.pair { tables = { { name = "a", rows = 40, cols = 2 }, { name = "b", rows = 30, cols = 2 } },
        device = device, cache = { load_factor = 1 } }
      local blocks = { { table = 1, first_bag = 0, bags = 1, out_offset = 0, out_stride = 2 },
        { table = 2, first_bag = 2, bags = 1, out_offset = 2, out_stride = 2 } }
      local patterns = { "table 'b', sample 0: offsets 1 and 4 make no bag of 4 ids",
        "bag 1: offsets 4 and 1 make no bag of 4 ids" }
      for i, pattern in ipairs(patterns) do
        local b = i == 1 and pair.plain or pair.cached
        local ok, err = pcall(b.lookup, b, t { 1, 2, 3, 4 }, t { 0, 4, 1, 4 }, b:blocks(blocks), 1, 4)
        assert.is_false(ok)
        assert.truthy(tostring(err):find(pattern), tostring(err))
      end
    end)
  end)
end
