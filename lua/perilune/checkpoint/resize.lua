-- resize.lua: tables of raw ids (managed collision) into tables of other sizes, or of other buckets. What is loaded
-- then is, in place of what the checkpoint has, what this file makes of it: a map of the new size, and rows of weights
-- and states at the places of their ids.
--
-- Which ids fit: those that the table's own eviction policy would evict last. MCH: in each new bucket the ids with the
-- best scores, of equal ones the smaller id. Hash: ids get rows as new ones do (the first free one from their home row
-- on, at most max_probe away), in the order of their times, the longest first (tables without times: in the order of
-- their rows). Ids that do not fit are left out and counted. Rows without an id begin as ever when an id gets them. The
-- row that ids without a row share is that of the bucket at the same place.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local StoredTensor = require "perilune.tensor.stored"
local Gather = require "perilune.checkpoint.gather"
local maps = require "perilune.checkpoint.maps"
local mc_map = require "perilune.embed.mc_map"
local policies = require "perilune.embed.mc_policies"
local C = P.C

local M = {}

local INFINITE = 9223372036854775807LL -- MCH: no id
local ids_of = { mch = "_mch_sorted_raw_ids", hash = "_hash_zch_identities" }
local MAPPING = "_mch_remapped_ids_mapping"
-- Numbers of a state that an id brings along, and those of a row without one.
local brought = mc_map._initial

--- The numbers of a small state, as an array and how many.
local function array_of(x)
  local n, copy
  P.scope(function()
    local memory
    memory, n = (Tensor.is(x) and x:to(nil, "cpu") or x:tensor "cpu"):to("i64"):contiguous():read()
    copy = ffi.new("int64_t[?]", math.max(n, 1))
    ffi.copy(copy, memory, 8 * n)
  end)
  return copy, n
end

local function size_of(x) return Tensor.is(x) and x:shape() or x:size() end

-- -- which ids --------------------------------------------------------------------------------------------------------

--- Scores of n MCH ids by the policy, into `scores` (double *).
local function fill_scores(scores, policy, counts, last, n, now, name)
  local d, kind = policy.decay_exponent, policy.kind
  if kind == C.PERI_EVICT_LFU then for k = 0, n - 1 do scores[k] = tonumber(counts[k]) end
  elseif kind == C.PERI_EVICT_LRU then for k = 0, n - 1 do scores[k] = tonumber(last[k]) end
  elseif kind == C.PERI_EVICT_DISTANCE_LFU then
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

--- Which ids of a stored map get which rows of another one. A window (gather.lua) is some whole buckets of the new map,
--- or, of MCH, some rows of one that is larger than a window. It has by row the id (`ids`), its score, the row that it
--- had (`from`; -1: none), and what it brings along. Ids that are read from the checkpoint are entries: arrays by the
--- same names.
local Fit = util.class "Fit"

--- Rows where windows begin, and the end. split: by row, the bucket (from 0) that a window has some rows of, not all.
local function bounds_of(segments, may_split)
  local bounds, split = { 0 }, {}
  for b = 1, #segments - 1 do
    local low, past = segments[b], segments[b + 1]
    if past - bounds[#bounds] > Gather.ROWS and low > bounds[#bounds] then bounds[#bounds + 1] = low end
    if may_split and past - low > Gather.ROWS then
      for row = low, past - 1, Gather.ROWS do
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
--- begin. names: those of `brought` that the new map has.
function Fit:init(a)
  for _, name in ipairs { "kind", "module", "stored", "segments", "old", "name", "now" } do self[name] = a[name] end
  self.reserved, self.total, self.last, self.begins = self.module:_reserved() > 0, 0, {}, {}
  local initial = { ids = self.kind == "mch" and INFINITE or -1LL, scores = 0, from = -1 }
  initial.heap = self.kind == "mch" and 0 or nil
  self.names, self.entries = { "ids", "scores", "from" }, {}
  for name, number in util.ordered(brought) do
    if a.names[name] then initial[name], self.names[#self.names + 1] = number, name end
  end
  -- memory of the entries, the same as int64_t * in the order of names, and ids and scores as uint32_t *
  self.kept, self.here, self.halves = {}, {}, {}
  for i, name in ipairs(self.names) do
    self.kept[i] = ffi.new("int64_t[?]", Gather.BLOCK)
    self.here[i] = ffi.cast("int64_t *", self.kept[i])
    self.entries[name] = name == "scores" and ffi.cast("double *", self.kept[i]) or self.here[i]
  end
  for _, name in ipairs { "ids", "scores" } do self.halves[name] = ffi.cast("uint32_t *", self.entries[name]) end
  self.buckets = ffi.new("int32_t[?]", Gather.BLOCK)
  local bounds
  bounds, self.split = bounds_of(self.segments, self.kind == "mch")
  self.gather = Gather(bounds, initial, function(w) self:_fill(w) end)
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

--- Hash: an id takes the first row from its home on that is free or has a worse id, which goes on from there. So all
--- lie as if the best had come first.
local function place_hash(self, w, b, k)
  local base, usable = self.segments[b + 1] - w.first, self.segments[b + 2] - self.segments[b + 1]
    - (self.reserved and 1 or 0)
  local most, e, reach = math.min(self.module.max_probe, usable), self.entries, 0
  local home = usable > 0 and C.peri_collision_home(e.ids[k], usable)
  while reach < most do
    local row = base + tonumber((home + reach) % usable)
    local free = w.ids[row] == -1
    if free or better(w, e.scores[k], e.ids[k], row) then
      swap(self, w, row, k)
      if free then
        w.filled[b] = w.filled[b] + 1
        return
      end
      home = C.peri_collision_home(e.ids[k], usable)
      reach = tonumber((row - base - home + usable) % usable)
    end
    reach = reach + 1
  end
end

--- The ids of rows [row, past) of the checkpoint that belong to buckets [w.low, w.high) become entries. Returns how
--- many, and how many ids there are in these rows.
function Fit:_pick(w, row, past)
  local module, e, n, all = self.module, self.entries, 0, 0
  local kind, buckets, free = mc_map.spreads[module.spread], #self.segments - 1, self.kind == "mch" and INFINITE or -1LL
  local t, ids = Gather.numbers_of(self.stored[ids_of[self.kind]], row, past)
  local low, high, range, put, from, of = w.low, w.high, module.input_hash_size, e.ids, e.from, self.buckets
  for k = 0, past - row - 1 do
    local id = ids[k]
    if id ~= free then
      all = all + 1
      local b = tonumber(C.peri_collision_bucket(id, kind, buckets, range))
      if b >= low and b < high then put[n], from[n], of[n], n = id, row + k, b, n + 1 end
    end
  end
  t:release()
  for i = 4, n > 0 and #self.names or 0 do -- behind ids, scores and rows
    local stored, to = self.stored[self.names[i]], e[self.names[i]]
    if stored then
      local block, numbers = Gather.numbers_of(stored, row, past)
      for k = 0, n - 1 do to[k] = numbers[e.from[k] - row] end
      block:release()
    else
      for k = 0, n - 1 do to[k] = brought[self.names[i]] end
    end
  end
  return n, all
end

function Fit:_score(n)
  local e, times = self.entries, self.stored._hash_zch_metadata
  if self.kind == "mch" then
    return fill_scores(e.scores, self.module.eviction_policy, e._mch_counts, e._mch_last_access_iter, n, self.now,
      self.name)
  end
  for k = 0, n - 1 do e.scores[k] = times and tonumber(e._hash_zch_metadata[k]) or -tonumber(e.from[k]) end
end

--- Call f(n, row) for all entries of buckets [low, high), as many of them as are read at once, until it returns true: n
--- of them have scores, they are of row `row` on. first (or nil: 0): the row to begin with.
function Fit:_each(low, high, f, first)
  local rows, total, buckets = self.old[#self.old], 0, { low = low, high = high }
  for row = first or 0, rows - 1, Gather.BLOCK do
    local n, all = self:_pick(buckets, row, math.min(row + Gather.BLOCK, rows))
    total = total + all
    if n > 0 then self:_score(n) end
    if f(n, row) then return end
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
  while not self.begins[known] do known = known - Gather.ROWS end
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

--- A window of whole buckets.
local function fill_whole(self, w)
  local place, at = self.kind == "mch" and place_mch or place_hash, util.index_of(self.segments)
  local low, high = at[w.first] - 1, at[w.past] - 1 -- its buckets, from 0
  for b = low, high - 1 do w.filled[b] = 0 end
  self:_each(low, high, function(n)
    for k = 0, n - 1 do place(self, w, self.buckets[k], k) end
  end)
end

function Fit:_fill(w)
  w.all = util.map(self.names, function(name) return w[name] end)
  w.scores, w.filled, w.full = ffi.cast("double *", w.scores), {}, {}
  local b = self.split[w.first]
  if b then fill_some(self, w, b) else fill_whole(self, w) end
  -- the last row of each bucket is shared by ids without a row
  for bucket in util.ordered(self.reserved and w.filled or {}) do
    local twin = math.floor(bucket * (#self.old - 1) / (#self.segments - 1))
    local row = self.segments[bucket + 2] - 1
    if row < w.past then w.from[row - w.first] = self.old[twin + 2] - 1 end
  end
end

--- How many ids are in it. All windows are looked at.
function Fit:count()
  local n = 0
  self.gather:each(function(w)
    for _, filled in util.ordered(w.filled) do n = n + filled end
  end)
  return n
end

-- -- what is loaded ---------------------------------------------------------------------------------------------------

--- The states of the new map by name. like: a map of the same table.
local function new_states(fit, like, states)
  local result, by_row, rows = {}, {}, fit.segments[#fit.segments]
  for name, i in util.ordered(util.index_of(like:state_names())) do
    if not mc_map._is_by_row(name) then result[name] = P.lasting(like.state, like, i)
    else
      local size, dtype = like:_describe(i)
      local old = fit.stored[name]
      size[1] = rows
      by_row[name] = name == MAPPING and StoredTensor { size = size, dtype = "i64", read = function(region, tensor)
        local first = region.offset[1]
        P.scope(function()
          tensor:copy(Tensor.arange(first, first + region.size[1], 1, "i64", "cpu"):reshape(region.size))
        end)
      end } or fit.gather:stored(brought[name] and name or "ids", size, dtype, function()
        if old then old:verify(0, old:size(1)) end
      end)
    end
  end
  for name, x in util.ordered(maps.of_rows(by_row, fit.kind == "mch" and fit.segments or nil)) do result[name] = x end
  if states._current_iter_tensor then result._current_iter_tensor = states._current_iter_tensor
  elseif result._current_iter_tensor then result._current_iter_tensor:fill(0) end
  return result
end

--- A stored tensor of rows with other rows: each is that of `stored` which its id had, and zeros where no id had one.
local function moved(stored, fit)
  local size = size_of(stored)
  size[1] = fit.segments[#fit.segments]
  return StoredTensor { size = size, dtype = stored:dtype(), read = function(region, tensor)
    local n, r = region.size[1], 0
    while r < n do
      local w = fit.gather:window(region.offset[1] + r)
      local from = w.from + (region.offset[1] + r - w.first)
      local first, last, count = tonumber(from[0]), math.min(n - r, w.past - region.offset[1] - r), 1
      while count < last and from[count] == (first < 0 and -1 or first + count) do count = count + 1 end
      local target = tensor:slice(1, r, r + count)
      if first < 0 then target:fill(0)
      elseif Tensor.is(stored) then target:copy(stored:slice(1, first, first + count))
      else
        local offset = util.copy(region.offset)
        offset[1] = first
        stored:read(offset, target, region.columns)
      end
      r = r + count
    end
  end }
end

-- -- the checkpoint's dicts -------------------------------------------------------------------------------------------

--- A map of a table: what it has of the table here, or, on ranks without rows, a new one of a bucket.
local function map_of(collection, module, name)
  local x = collection._tables and collection._tables[name]
  if not x then return module:_own_map() end
  return x.piece and x.piece.map or P.lasting(module._new_map, module, { device = "cpu", first_bucket = 0,
    n_buckets = 1 })
end

--- The module of a table, and its rows where buckets begin, of a collection of maps (unsharded, or over ranks); nil: it
--- has no such table.
local function module_of(collection, name)
  local x = collection._tables and collection._tables[name]
  local module = x and x.module or collection.managed_collision_modules and collection:managed_collision_modules()[name]
  if not module then return nil end
  local offset = module.output_global_offset
  return module, util.map(module:output_segments(), function(row) return row - offset end)
end

local function segments_of(states)
  local memory, n = array_of(states._output_segments_tensor)
  local list = {}
  for i = 0, n - 1 do
    if memory[i] >= 0 then list[#list + 1] = tonumber(memory[i]) end
  end
  return list
end

--- The fit of a table whose map, `states`, was one of other rows; nil: it was of these, or of another kind, which is an
--- error of its own. The second value is a map of the table.
local function fit_of(collection, module, segments, states, name)
  local kind = states[ids_of.mch] and "mch" or states[ids_of.hash] and "hash"
  if not module or not kind or (kind == "hash") ~= (module.max_probe ~= nil) or not states._output_segments_tensor then
    return nil
  end
  local old, stored = segments_of(states), {}
  if table.concat(old, " ") == table.concat(segments, " ") then return nil end
  local like = map_of(collection, module, name)
  local names = util.index_of(like:state_names())
  for state in util.ordered(names) do
    local x = states[state]
    if mc_map._is_by_row(state) then
      stored[state] = StoredTensor.is(x) and x:size(1) == old[#old] and x:by_row() or nil
      if not stored[state] and (kind == "mch" or x) then return nil end
    end
  end
  return Fit { kind = kind, module = module, stored = stored, segments = segments, old = old, name = name,
    names = names, now = states._current_iter_tensor and tonumber((array_of(states._current_iter_tensor))[0]) or 0 },
      like
end

--- One table: change the entries of the dicts of all parts. Returns what is to be said; nil: sizes and buckets are the
--- same.
local function resize(dicts, dict, path, name, collection)
  local prefix, states = ("%s._managed_collision_modules.%s."):format(path, name), {}
  for key, value in util.ordered(dict) do
    if type(key) == "string" and key:sub(1, #prefix) == prefix then states[key:sub(#prefix + 1)] = value end
  end
  local module, segments = module_of(collection, name)
  local fit, like = fit_of(collection, module, segments, states, name)
  if not fit then return nil end
  local before, after, kept = fit.old[#fit.old], module.zch_size, fit:count()
  for state, tensor in util.ordered(new_states(fit, like, states)) do dict[prefix .. state] = tensor end
  local parameter = "%." .. name:gsub("%p", "%%%0") .. "%.weight$"
  local root = path:match "^(.*)_managed_collision_collection$" or ""
  local function is_table(key)
    return type(key) == "string" and key:sub(1, #root) == root and key:sub(#root + 1):find "^_embedding_module"
      and key:find(parameter)
  end
  local function replace(map, key)
    local x = map[key]
    if (Tensor.is(x) or StoredTensor.is(x)) and size_of(x)[1] == before then map[key] = moved(x, fit) end
  end
  for _, d in util.ordered(dicts) do
    for key in util.ordered(d.dict) do
      if is_table(key) then replace(d.dict, key) end
    end
    for key, value in util.ordered(type(d.dict.state) == "table" and d.dict.state or {}) do
      for state in util.ordered(is_table(key) and type(value) == "table" and value or {}) do replace(value, state) end
    end
  end
  return ("table '%s' had %d rows and has %d: %d of %d ids are in it%s"):format(name, before, after, kept, fit.total,
    kept < fit.total and (", %d did not fit and are left out (docs/checkpoints.md)"):format(fit.total - kept) or "")
end

--- Fit the tables of raw ids of the models among `parts` to the sizes that they have here. Returns a list of what is to
--- be said. Local.
function M.fit(parts, dicts)
  local said = {}
  for _, part in ipairs(parts) do
    local d = dicts[part.name]
    for _, m in ipairs(d and part.module and (part.object.wraps and part.object.module or part.object):named_modules()
      or {}) do
      local collection = m.module
      local configs = (collection._tables and collection._configs or collection.managed_collision_modules)
        and collection.embedding_configs
      for _, t in ipairs(configs and collection:embedding_configs() or {}) do
        said[#said + 1] = resize(dicts, d.dict, m.path, t.name, collection)
      end
    end
  end
  return said
end

return M
