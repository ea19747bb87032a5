-- fit.lua: which ids of a stored map of raw ids get which rows of a map of another size, or of other buckets; the rules
-- are those of resize.lua.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local Gather = require "perilune.checkpoint.gather"
local mc_map = require "perilune.embed.mc_map"
local policies = require "perilune.embed.mc_policies"
local C, check = P.C, P.check

local INFINITE = 9223372036854775807LL -- MCH: no id
local MOST = 2 ^ 31 - 1                -- rows of a stored map: their numbers are kept as int32_t
local PROBE = 4096 -- rows that an id is looked for: where it is more, very many could go on to the next window
local picked, number_out = P.struct "peri_collision_picked", ffi.new "int64_t[1]"
local ids_of = { mch = "_mch_sorted_raw_ids", hash = "_hash_zch_identities" }
-- States by which ids are scored, beside the row that an id had.
local scored = { mch = { "_mch_counts", "_mch_last_access_iter" }, hash = { "_hash_zch_metadata" } }

--- Scores of n MCH ids by the policy, into `scores` (double *).
local function fill_scores(scores, policy, counts, last, n, now, name)
  local d, kind = policy.decay_exponent, policy.kind
  if kind == C.PERI_FORGET_LFU then for k = 0, n - 1 do scores[k] = tonumber(counts[k]) end
  elseif kind == C.PERI_FORGET_LRU then for k = 0, n - 1 do scores[k] = tonumber(last[k]) end
  elseif kind == C.PERI_FORGET_DISTANCE_LFU then
    for k = 0, n - 1 do scores[k] = tonumber(counts[k]) / (now - tonumber(last[k]) + 1) ^ d end
  else
    P.scope(function()
      local function tensor(array)
        return Tensor.from_memory(ffi.cast("const int64_t *", array), { n }, "i64", "cpu")
      end
      ffi.copy(scores, policies.scores(policy, tensor(counts), tensor(last), now, name):contiguous():read(), 8 * n)
    end)
  end
end

--- Whether an id is rather kept than the one in row `row` of a window.
local function better(w, score, id, row)
  if score ~= w.scores[row] then return score > w.scores[row] end
  return id < w.ids[row]
end

--- Which ids of a stored map get which rows of another one. A window is some whole buckets of the new map, or some rows
--- of one that is larger than a window. It has by row the id (`ids`), its score, and the row that it had (`from`; -1:
--- none). Ids that are read from the checkpoint are entries: arrays by the same names. Each window takes a walk through
--- all ids, so of what it found `from` is kept, for a span of up to SPAN rows (4 bytes each): weights and states follow
--- their ids by that, and no further walk is needed.
local Fit = util.class "Fit"
Fit.ids_of = ids_of
Fit.SPAN = 2 ^ 22

--- Rows where windows of at most `rows` rows begin, and the end. split: by row, the bucket (from 0) that a window has
--- some rows of, not all; it is empty unless may_split.
local function bounds_of(segments, rows, may_split)
  local bounds, split = { 0 }, {}
  for b = 1, #segments - 1 do
    local low, past = segments[b], segments[b + 1]
    if past - bounds[#bounds] > rows and low > bounds[#bounds] then bounds[#bounds + 1] = low end
    if may_split and past - low > rows then
      for row = low, past - 1, rows do
        split[row] = b - 1
        if row > low then bounds[#bounds + 1] = row end
      end
      if b < #segments - 1 then bounds[#bounds + 1] = past end
    end
  end
  bounds[#bounds + 1] = segments[#segments]
  return bounds, split
end

--- stored: states of the checkpoint's map in the order of rows (StoredTensors). segments, old: rows where buckets
--- begin.
function Fit:init(a)
  for _, name in ipairs { "kind", "module", "stored", "segments", "old", "name", "now" } do self[name] = a[name] end
  local rows = self.old[#self.old]
  if rows > MOST then
    P.fail(("checkpoint.load: table '%s' had %d rows, and has another size or other buckets now; allowed: up to %d "
      .. "rows"):format(self.name, rows, MOST))
  end
  self.reserved, self.total, self.last, self.begins = self.module:_reserved() > 0, 0, {}, {}
  self.carried, self.counted = {}, {}
  self.rows = self.kind == "mch" and Gather.ROWS or 2 * Gather.ROWS -- their numbers are fewer
  self.initial = { ids = self.kind == "mch" and INFINITE or -1LL, scores = 0, from = -1 }
  self.initial.heap = self.kind == "mch" and 0 or nil
  self.names, self.entries = { "ids", "scores", "from" }, {}
  -- memory of the entries, the same as int64_t * in the order of names, and ids and scores as uint32_t *
  self.kept, self.here, self.halves = {}, {}, {}
  for i, name in ipairs(self.names) do
    self.kept[i] = ffi.new("int64_t[?]", Gather.BLOCK)
    self.here[i] = ffi.cast("int64_t *", self.kept[i])
    self.entries[name] = name == "scores" and ffi.cast("double *", self.kept[i]) or self.here[i]
  end
  for _, name in ipairs { "ids", "scores" } do self.halves[name] = ffi.cast("uint32_t *", self.entries[name]) end
  for _, name in ipairs(scored[self.kind]) do self.entries[name] = ffi.new("int64_t[?]", Gather.BLOCK) end
  self.buckets, self.places = ffi.new("int32_t[?]", Gather.BLOCK), ffi.new("int32_t[?]", Gather.BLOCK)
  self.homes, self.blocks, self.spilled = ffi.new("int64_t[?]", Gather.BLOCK), {}, {}
  self:_make_fit()
  self.bounds, self.split = bounds_of(self.segments, self.rows, self.kind == "mch" or self.module.max_probe <= PROBE)
end

--- What C functions are told of the map and the window; what changes from window to window is set there.
function Fit:_make_fit()
  local n, fit, module = #self.segments - 1, P.struct "peri_collision_fit", self.module
  self.fit, self.filled = fit, ffi.new("int64_t[?]", n)
  self.arrays = { segments = ffi.new("int64_t[?]", n + 1, self.segments),
    entries = ffi.new("int64_t *[?]", #self.names, self.here), rows = ffi.new("int64_t *[?]", #self.names) }
  for name, array in util.ordered(self.arrays) do fit[name] = array end
  fit.kind = self.kind == "mch" and C.PERI_COLLISION_MCH or C.PERI_COLLISION_HASH
  fit.spread, fit.input_hash_size, fit.buckets = mc_map.spreads[module.spread], module.input_hash_size or 0, n
  fit.aside, fit.max_probe = self.reserved, module.max_probe or 0
  fit.arrays, fit.filled = #self.names, self.filled
end

--- Number k of the entries into row `row` of a window, and what was there into the entries.
local function swap(self, w, row, k)
  local all = w.all
  for i = 1, #all do
    local there, here = all[i], self.here[i]
    there[row], here[k] = here[k], there[row]
  end
end

--- Let number `at` of a bucket's heap (n rows of the window, the worst id first) sink to its place.
local function sink(w, heap, at, n)
  local row = tonumber(heap[at])
  while 2 * at + 1 < n do
    local child = 2 * at + 1
    local least = tonumber(heap[child])
    if child + 1 < n then
      local other = tonumber(heap[child + 1])
      if better(w, w.scores[least], w.ids[least], other) then child, least = child + 1, other end
    end
    if better(w, w.scores[least], w.ids[least], row) then break end
    heap[at], at = least, child
  end
  heap[at] = row
end

--- MCH: ids get the rows of their bucket as they come; when it is full a better one takes the row of the worst.
local function place_mch(self, w, b, k)
  local base, n = self.segments[b + 1] - w.first, w.filled[b]
  local room, heap = self.segments[b + 2] - self.segments[b + 1] - 1, w.heap + base
  if n < room then
    swap(self, w, base + n, k)
    heap[n], w.filled[b] = base + n, n + 1
    return
  end
  if room == 0 then return end
  for at = w.full[b] and -1 or math.floor(room / 2) - 1, 0, -1 do sink(w, heap, at, room) end
  w.full[b] = true
  local worst, e = tonumber(heap[0]), self.entries
  if better(w, e.scores[k], e.ids[k], worst) then
    swap(self, w, worst, k)
    sink(w, heap, 0, room)
  end
end

--- Hash: put the first n entries into window w, each from its row in self.homes on. One that wants a row behind the
--- window, which is a part of a bucket then, is noted in w.spilled.
local function put_hash(self, n)
  local k = 0
  while true do
    check(C.peri_collision_fit_put(self.fit, k, n, self.buckets, self.homes, number_out))
    k = tonumber(number_out[0])
    if k == n then return end
    local numbers = ffi.new("int64_t[?]", #self.here)
    for i, here in ipairs(self.here) do numbers[i - 1] = here[k] end
    self.spilled[#self.spilled + 1], k = numbers, k + 1
  end
end

--- The ids of rows [row, past) of the checkpoint that the window wants (self.fit) become entries. Returns how many.
--- Notes how many ids there are in these rows, and of which buckets.
function Fit:_pick(row, past)
  local e, of, from, put = self.entries, picked, self.entries.from, self.entries.ids
  local t, ids = Gather.numbers_of(self.stored[ids_of[self.kind]], row, past)
  check(C.peri_collision_fit_pick(self.fit, ids, past - row, self.places, self.buckets, self.homes, of))
  local n = tonumber(of.n)
  for k = 0, n - 1 do
    local place = self.places[k]
    put[k], from[k] = ids[place], row + place
  end
  self.blocks[row] = { ids = tonumber(of.ids), lowest = tonumber(of.lowest), highest = tonumber(of.highest) }
  t:release()
  for _, name in ipairs(n > 0 and scored[self.kind] or {}) do
    local stored, to = self.stored[name], e[name]
    if stored then
      local block, numbers = Gather.numbers_of(stored, row, past)
      for k = 0, n - 1 do to[k] = numbers[self.places[k]] end
      block:release()
    end
  end
  return n
end

function Fit:_score(n)
  local e, times = self.entries, self.stored._hash_zch_metadata
  if self.kind == "mch" then
    return fill_scores(e.scores, self.module.eviction_policy, e._mch_counts, e._mch_last_access_iter, n, self.now,
      self.name)
  end
  for k = 0, n - 1 do e.scores[k] = times and tonumber(e._hash_zch_metadata[k]) or -tonumber(e.from[k]) end
end

--- Call f(n, row) for all ids that a window wants, as many of them as are read at once, until it returns true: n
--- entries have scores, they are of row `row` on. What has no id of its buckets is read once only. low, high: its
--- buckets; first (or nil: 0): the row to begin with.
function Fit:_each(low, high, f, first)
  local rows, total = self.old[#self.old], 0
  self.fit.low, self.fit.high = low, high
  for row = first or 0, rows - 1, Gather.BLOCK do
    local known = self.blocks[row]
    if not known or known.highest >= low and known.lowest < high then
      local n = self:_pick(row, math.min(row + Gather.BLOCK, rows))
      if n > 0 then self:_score(n) end
      if f(n, row) then return end
    end
    total = total + self.blocks[row].ids
  end
  if not first then self.total = total end
end

-- A bucket of more rows than a window has its ids put into its rows as they come, without those that do not fit. Which
-- these are is found without keeping all: the last id that fits is sought digit by digit, each time counting the ids
-- that agree with it so far by their next digit. The digits are those of numbers that order ids, the best first.

local DIGITS, DIGIT = 8, 16 -- of the score and the id, 64 bits each; bits of a digit
local top, number = bit.tobit(0x80000000), ffi.typeof "union { uint32_t words[4]; int32_t set[4]; }"

--- The number of entry k, its highest word first: the better an id, the less its number.
local function number_of(self, k, x)
  local e = self.entries
  e.scores[k] = e.scores[k] + 0 -- -0 is 0
  local score, id = self.halves.scores, self.halves.ids
  local high, low = bit.tobit(score[2 * k + 1]), bit.tobit(score[2 * k])
  -- of positive numbers the bits grow with them, of negative ones they fall; the greatest number comes first
  if high >= 0 then high, low = bit.bxor(bit.bnot(high), top), bit.bnot(low) end
  x.set[0], x.set[1] = high, low
  x.set[2], x.set[3] = bit.bxor(bit.tobit(id[2 * k + 1]), top), bit.tobit(id[2 * k])
end

--- Whether the first `digits` digits of x are those of y.
local function agrees(x, y, digits)
  local whole = math.floor(digits / 2)
  for w = 0, whole - 1 do
    if x.set[w] ~= y.set[w] then return false end
  end
  return digits % 2 == 0 or bit.rshift(x.set[whole], DIGIT) == bit.rshift(y.set[whole], DIGIT)
end

--- The number of the last id that fits into bucket b; false: all ids fit.
local function find_last(self, b)
  local room, last, x = self.segments[b + 2] - self.segments[b + 1] - 1, number(), number()
  local counts = ffi.new("uint32_t[?]", 2 ^ DIGIT)
  for digit = 0, DIGITS - 1 do
    local w, shift, n = math.floor(digit / 2), digit % 2 == 0 and DIGIT or 0, 0
    ffi.fill(counts, ffi.sizeof(counts))
    self:_each(b, b + 1, function(entries)
      n = n + entries
      for k = 0, entries - 1 do
        number_of(self, k, x)
        if agrees(x, last, digit) then
          local value = bit.band(bit.rshift(x.set[w], shift), 2 ^ DIGIT - 1)
          counts[value] = counts[value] + 1
        end
      end
    end)
    if digit == 0 and n <= room then return false end
    local value = 0
    while counts[value] < room do
      room = room - counts[value]
      value = value + 1
    end
    last.set[w] = bit.bor(last.set[w], bit.lshift(value, shift))
    if counts[value] == room then -- whatever their other digits are
      last.set[w] = bit.bor(last.set[w], bit.lshift(1, shift) - 1)
      for rest = w + 1, 3 do last.set[rest] = -1 end
      break
    end
  end
  return last
end

--- Whether x is at most y.
local function at_most(x, y)
  for w = 0, 3 do
    if x.words[w] ~= y.words[w] then return x.words[w] < y.words[w] end
  end
  return true
end

--- A window that has some rows of bucket b.
local function fill_some(self, w, b)
  if self.last[b] == nil then self.last[b] = find_last(self, b) end
  local last, x, known, filled = self.last[b], number(), w.first, 0
  -- begins: where windows begin, as far as it is known: from which row of the checkpoint on ids are read, and the row
  -- that the first of these gets
  self.begins[self.segments[b + 1]] = { from = 0, row = self.segments[b + 1] }
  while not self.begins[known] do known = known - self.rows end
  local row, first, past = self.begins[known].row, w.first, w.past
  self:_each(b, b + 1, function(n, from)
    local before = row
    for k = 0, n - 1 do
      if last then number_of(self, k, x) end
      if not last or at_most(x, last) then
        if row >= first and row < past then
          swap(self, w, row - first, k)
          filled = filled + 1
        end
        row = row + 1
        if self.split[row] == b then self.begins[row] = self.begins[row] or { from = from, row = before } end
      end
    end
    return row >= past
  end, self.begins[known].from)
  w.filled[b] = filled
end

-- Ids of a hash map that find no row in a window go on in the next one of their bucket, and behind its last one in its
-- first. Which ids these are does not depend on the order in which they come: more ids want rows of a window, and more
-- go on to the next.

--- Put the ids into the rows of bucket b that window w has: those that go on from the window before, and its own.
local function fill_part(self, w, b)
  self.fit.part, self.spilled, self.fit.low, self.fit.high = true, {}, b, b + 1
  for _, numbers in ipairs(self.carried[w.first]) do
    for i, here in ipairs(self.here) do here[0] = numbers[i - 1] end
    self.buckets[0], self.homes[0] = b, w.first
    put_hash(self, 1)
  end
  self:_each(b, b + 1, function(n) put_hash(self, n) end)
  w.filled[b], w.spilled = tonumber(self.filled[b]), self.spilled
end

--- Find which ids go on to each window of bucket b, and what is in the windows then.
local function carry(self, b)
  local base, past, carried = self.segments[b + 1], self.segments[b + 2], self.carried
  carried[base] = {}
  repeat
    local more = false
    for row = base, past - 1, self.rows do
      local w, release = Gather.blank(self.initial, row, math.min(row + self.rows, past))
      self:_fill(w)
      release()
      local known = carried[w.past < past and w.past or base]
      carried[w.past < past and w.past or base] = w.spilled
      if w.past == past then more = #w.spilled > #known
      elseif known and #known == #w.spilled then break end
    end
  until not more
end

--- A window of whole buckets.
local function fill_whole(self, w)
  local at, mch = util.index_of(self.segments), self.kind == "mch"
  local low, high = at[w.first] - 1, at[w.past] - 1 -- its buckets, from 0
  for b = low, high - 1 do w.filled[b] = 0 end
  self.fit.part = false
  self:_each(low, high, function(n)
    if not mch then return put_hash(self, n) end
    for k = 0, n - 1 do place_mch(self, w, self.buckets[k], k) end
  end)
  for b = low, mch and low - 1 or high - 1 do w.filled[b] = tonumber(self.filled[b]) end
end

--- Arrays of a window as the functions above want them.
function Fit:_prepare(w)
  w.all = util.map(self.names, function(name) return w[name] end)
  w.scores, w.filled, w.full = ffi.cast("double *", w.scores), {}, {}
  self.fit.first, self.fit.past = w.first, w.past
  for i, array in ipairs(w.all) do self.arrays.rows[i - 1] = array end
  ffi.fill(self.filled, ffi.sizeof(self.filled))
end

--- Put the ids of window w into its rows. How many they are is noted, and in the span where they were.
function Fit:_fill(w)
  local b, span = self.split[w.first], self._span
  self:_prepare(w)
  if not b then fill_whole(self, w)
  elseif self.kind == "mch" then fill_some(self, w, b)
  else fill_part(self, w, b) end
  -- the last row of each bucket is shared by ids without a row
  for bucket in util.ordered(self.reserved and w.filled or {}) do
    local twin = math.floor(bucket * (#self.old - 1) / (#self.segments - 1))
    local row = self.segments[bucket + 2] - 1
    if row < w.past then w.from[row - w.first] = self.old[twin + 2] - 1 end
  end
  self.counted[w.first] = w.filled
  if w.first < span.first or w.past > span.past then return end
  for row = w.first, w.past - 1 do span.from[row - span.first] = w.from[row - w.first] end
  span.has[w.first] = true
end

--- Begin the span that has the window of row `row`: whole windows.
local function begin_span(self, row)
  local first, past
  for i = 1, #self.bounds - 1 do
    if not past or self.bounds[i + 1] - first > Fit.SPAN then
      if past and past > row then break end
      first = self.bounds[i]
    end
    past = self.bounds[i + 1]
  end
  if self._span then self._span.memory:release() end
  local memory, from = Gather.room_for(math.ceil((past - first) / 2))
  self._span = { first = first, past = past, memory = memory, from = ffi.cast("int32_t *", from), has = {} }
end

--- Where the ids of new rows were: from[r - first] is the stored row of new row r (-1: none), for r in [first, past),
--- which has `row`. Rows that ids share who have none follow the like. Lasts until it is asked for other rows.
function Fit:span(row)
  local span = self._span
  if not (span and span.first <= row and row < span.past) then begin_span(self, row) end
  span = self._span
  for i = 1, #self.bounds - 1 do
    local first, past = self.bounds[i], self.bounds[i + 1]
    if first >= span.first and past <= span.past and not span.has[first] then
      local w, release = Gather.blank(self.initial, first, past)
      self:_fill(w)
      release()
    end
  end
  return span
end

--- How many ids are in it. Before this no span can be asked for.
function Fit:count()
  local n = 0
  begin_span(self, 0)
  for row, b in util.ordered(self.kind == "hash" and self.split or {}) do
    if row == self.segments[b + 1] then carry(self, b) end
  end
  for i = 1, #self.bounds - 1 do
    local first = self.bounds[i]
    if not self.counted[first] then self:span(first) end
    for _, filled in util.ordered(self.counted[first]) do n = n + filled end
  end
  return n
end

return Fit
