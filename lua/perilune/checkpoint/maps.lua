-- maps.lua: what checkpoints have of maps of raw ids (managed collision).
--
-- A map is one number a row in each of its states: the id, and for MCH also the row, the count and the last step. A
-- state_dict has those of MCH in the order of ids, as TorchRec does; one id that is learned then moves the numbers of
-- all greater ones. So a checkpoint has them in the order of rows, where an id keeps its place as long as it keeps its
-- row:
--
--     state_dict   _mch_sorted_raw_ids        3   8   9   (free)       checkpoint     9   3   (free)   8
--                  _mch_remapped_ids_mapping  1   3   0   2                           0   1   2        3
--
-- Loading sorts them again. An increment has the rows in which a state differs from the parent's, found by comparing,
-- and the ids that the parent's map had and this one has not.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local ShardedTensor = require("perilune.tensor.sharded").ShardedTensor
local StoredTensor = require "perilune.tensor.stored"
local Gather = require "perilune.checkpoint.gather"
local numbers_in, room_for, numbers_of = Gather.numbers_in, Gather.room_for, Gather.numbers_of

local M = {}

local BLOCK = Gather.BLOCK -- rows that are compared at once
local IDS, MAPPING, SEGMENTS = "_mch_sorted_raw_ids", "_mch_remapped_ids_mapping", "_output_segments_tensor"
local by_row = util.index_of { IDS, MAPPING, "_mch_counts", "_mch_last_access_iter" }
local compared = util.index_of { IDS, MAPPING, "_mch_counts", "_mch_last_access_iter", "_hash_zch_identities",
  "_hash_zch_metadata" }
local INFINITE = 9223372036854775807LL
local free_of = { [IDS] = INFINITE, _hash_zch_identities = -1LL } -- states with ids: the id of a row that is free

--- The last component of a tensor's name, which says which state of a map it is, and what is before it.
local function split(name)
  local before, state = name:match "^(.*[./])(_[%w_]+)$"
  if not state then before, state = "", name:match "^_[%w_]+$" end
  return state, before
end

-- -- sorting ----------------------------------------------------------------------------------------------------------

--- One pass of sort: runs of `width` numbers become runs twice as long.
local function merge_runs(from, from_at, to, to_at, n, width)
  for low = 0, n - 1, 2 * width do
    local middle, high = math.min(low + width, n), math.min(low + 2 * width, n)
    local i, j = low, middle
    for k = low, high - 1 do
      if i < middle and (j >= high or from[i] <= from[j]) then
        to[k], to_at[k] = from[i], from_at[i]
        i = i + 1
      else
        to[k], to_at[k] = from[j], from_at[j]
        j = j + 1
      end
    end
  end
end

--- Sort n numbers; equal ones keep their order. Returns two tensors (i64): the sorted numbers, and in its first 4 n
--- bytes, as uint32_t, where each of them stood.
local function sort(numbers, n)
  local values, from = room_for(n)
  local places, at = room_for(math.ceil(n / 2))
  local more_values, to = room_for(n)
  local more_places, to_at = room_for(math.ceil(n / 2))
  local from_at, width = ffi.cast("uint32_t *", at), 1
  to_at = ffi.cast("uint32_t *", to_at)
  ffi.copy(from, numbers, 8 * n)
  for i = 0, n - 1 do from_at[i] = i end
  while width < n do
    merge_runs(from, from_at, to, to_at, n, width)
    from, from_at, to, to_at, width = to, to_at, from, from_at, 2 * width
    values, places, more_values, more_places = more_values, more_places, values, places
  end
  more_values:release()
  more_places:release()
  return values, places
end

--- A list of int64_t that grows.
local List = util.class "List"
function List:init()
  self.n, self.room = 0, 64
  self.kept, self.memory = room_for(self.room)
end
function List:add(x)
  if self.n == self.room then
    local kept, memory = room_for(2 * self.room)
    ffi.copy(memory, self.memory, 8 * self.n)
    self.kept:release()
    self.kept, self.memory, self.room = kept, memory, 2 * self.room
  end
  self.memory[self.n], self.n = x, self.n + 1
end

--- Which of n rows are marked: a bit for each.
local Marks = util.class "Marks"
function Marks:init(n)
  local kept, memory = room_for(math.ceil(n / 64))
  ffi.fill(memory, 8 * math.ceil(n / 64))
  self.n, self.count, self.kept, self.bits = n, 0, kept, ffi.cast("int32_t *", memory)
end
function Marks:has(row) return bit.band(self.bits[math.floor(row / 32)], bit.lshift(1, row % 32)) ~= 0 end
function Marks:add(row)
  local word = math.floor(row / 32)
  self.bits[word], self.count = bit.bor(self.bits[word], bit.lshift(1, row % 32)), self.count + 1
end
--- f(row, marked, n) for each BLOCK of rows that has marked ones: it begins with `row`; marked: its n marked rows,
--- counted from `row` on. In a scope of its own.
function Marks:each(f)
  local marked = ffi.new("int32_t[?]", BLOCK)
  for row = 0, self.n - 1, BLOCK do
    local n = 0
    for k = 0, math.min(BLOCK, self.n - row) - 1 do
      if self:has(row + k) then marked[n], n = k, n + 1 end
    end
    if n > 0 then P.scope(f, row, marked, n) end
  end
end

-- -- saving: in the order of rows -------------------------------------------------------------------------------------

--- Tensor `name`, which is x, in the order of rows if it is a state of a map; any other one, and a copy that is whole,
--- as it is. It is for one save: maps do not change until it has read them.
function M.by_row(name, x)
  local some, metadata, own = false, nil, nil
  if ShardedTensor.is(x) and split(name) then metadata, own = x:_layout() end
  for _, shard in ipairs(own or {}) do some = some or shard.by_row ~= nil end
  if not some then return x end
  return ShardedTensor { size = x:size(), dtype = x:dtype(), shards_metadata = metadata, group = x._group,
    device = "cpu", local_shards = util.map(own, function(shard)
      return { metadata = shard.metadata, read = shard.by_row }
    end) }
end

-- -- saving: what changed ---------------------------------------------------------------------------------------------

--- Whether a piece (save.lua) is of a map's states: an increment has the rows of it that differ.
function M.is_state(p) return p.of ~= nil and not p.marked and compared[split(p.name)] ~= nil end

--- The numbers that a piece's map has now in the BLOCK of rows from `row` on, and how many.
local function numbers_now(p, row)
  local size = util.copy(p.size)
  size[1] = math.min(BLOCK, size[1] - row)
  local block = Tensor.empty(size, p.dtype, "cpu")
  p.shard.read(row, block)
  return block:read()
end

--- Those of the ids `before` (a List) that none of a piece's listed rows has now, in ascending order; nil: all are
--- there.
local function missing(before, p)
  local n = before.n
  local sorted, places = sort(before.memory, n)
  local ids, found = numbers_in(sorted), Marks(n)
  p.each(function(block)
    local now, count = block:read()
    for k = 0, count - 1 do
      local low, past = 0, n -- the first of ids[low], ..., ids[past - 1] that is now[k] or more
      while low < past do
        local middle = math.floor((low + past) / 2)
        if ids[middle] < now[k] then low = middle + 1 else past = middle end
      end
      if low < n and ids[low] == now[k] and not found:has(low) then found:add(low) end
    end
  end)
  local list, at = nil, 0
  if found.count < n then
    local memory
    list, memory = room_for(n - found.count)
    for k = 0, n - 1 do
      if not found:has(k) then memory[at], at = ids[k], at + 1 end
    end
  end
  for _, t in ipairs { sorted, places, found.kept, before.kept } do t:release() end
  return list
end

--- Leave the rows of a piece out that are as the open parent has them. Sets each(f), which gives f the numbers of the
--- rows that are left, block by block; and returns what their list has: each(f), likewise the rows, counted in the
--- whole tensor; of ids, evicted = those that the parent's rows had and no row has now (nil: none); and how many they
--- are. Which rows are left is kept as a bit for each row; the map is read again when they are written.
function M.leave_out(parent, p)
  local marks, before, free = Marks(p.size[1]), List(), free_of[split(p.name)]
  for row = 0, marks.n - 1, BLOCK do
    P.scope(function()
      local now, count = numbers_now(p, row)
      local size, offset = util.copy(p.size), util.copy(p.offset)
      size[1], offset[1] = count, offset[1] + row
      local old = parent:read(p.name, { offset = offset, size = size }):read()
      for k = 0, count - 1 do
        if now[k] ~= old[k] then
          marks:add(row + k)
          if free and old[k] ~= free then before:add(old[k]) end
        end
      end
    end)
  end
  p.bytes = p.bytes / math.max(marks.n, 1) * marks.count
  p.each = function(f)
    marks:each(function(row, marked, n)
      local block, now = Tensor.empty({ n }, "i64", "cpu"), numbers_now(p, row)
      local numbers = numbers_in(block)
      for i = 0, n - 1 do numbers[i] = now[marked[i]] end
      f(block:to(p.dtype))
    end)
  end
  local function each_row(f)
    marks:each(function(row, marked, n)
      local block, first = Tensor.empty({ n }, "i64", "cpu"), p.offset[1] + row
      local numbers = numbers_in(block)
      for i = 0, n - 1 do numbers[i] = first + marked[i] end
      f(block)
    end)
  end
  return { each = each_row, evicted = missing(before, p) }, marks.count
end

-- -- loading: in the order of ids -------------------------------------------------------------------------------------

--- The states of one map of MCH, in whatever order, in the order of ids, which maps take. segments: rows where buckets
--- begin, and the end.
local function sorted_states(states, segments)
  -- by bucket: places in the order of ids (of sort); and some buckets of one state
  local orders, kept = {}, { first = 0, past = 0 }
  --- A state's rows [first, past) lie in buckets [from, to]: these buckets, sorted. They are read at once, so that what
  --- is whole in a file is compared with its checksum.
  local function buckets_of(name, first, past)
    if kept.name == name and kept.first <= first and past <= kept.past then return kept end
    local from, to, ids, all_ids = 1, #segments - 1, nil, nil
    while segments[from + 1] <= first do from = from + 1 end
    while segments[to] >= past do to = to - 1 end
    local low, high = segments[from], segments[to + 1]
    local t, numbers = numbers_of(states[name], low, high)
    local result, sorted = room_for(high - low)
    for b = from, to do
      local base, n = segments[b] - low, segments[b + 1] - segments[b]
      if not orders[b] then
        if not ids then all_ids, ids = numbers_of(states[IDS], low, high) end
        local values, places = sort(ids + base, n)
        values:release()
        orders[b] = places
      end
      local order = ffi.cast("uint32_t *", numbers_in(orders[b]))
      for k = 0, n - 1 do sorted[base + k] = numbers[base + order[k]] end
    end
    for _, x in pairs { t, all_ids, kept.tensor } do x:release() end
    kept = { name = name, first = low, past = high, tensor = result }
    return kept
  end
  local sorted = {}
  for name, stored in util.ordered(states) do
    sorted[name] = StoredTensor { size = stored:size(), dtype = stored:dtype(), read = function(region, tensor)
      local first, n = region.offset[1], region.size[1]
      if n == 0 then return end
      local from = buckets_of(name, first, first + n)
      P.scope(function()
        tensor:copy(from.tensor:slice(1, first - from.first, first - from.first + n):reshape(region.size))
      end)
    end }
  end
  return sorted
end

--- Rows where buckets begin, of a map of `rows` rows; nil: they are not what a map has, which is an error of its own.
local function segments_of(stored, rows)
  local list
  if not stored then return nil end
  P.scope(function()
    local memory, n = (Tensor.is(stored) and stored or stored:tensor "cpu"):to("i64"):read()
    list = {}
    for k = 0, n - 1 do
      local row = tonumber(memory[k])
      if row < 0 then break end
      if row > rows or k > 0 and row <= list[k] or k == 0 and row ~= 0 then list = nil return end
      list[k + 1] = row
    end
    if list[#list] ~= rows then list = nil end
  end)
  return list
end

--- Whether the rows of a stored mapping are in order, each the one after the one before; and the least of them.
local function order_of(mapping)
  local rows, sound, least, before = mapping:size(1), true, INFINITE, nil
  for row = 0, rows - 1, BLOCK do
    local block, numbers = numbers_of(mapping, row, math.min(row + BLOCK, rows))
    for k = 0, block:numel() - 1 do
      sound = sound and (before == nil or numbers[k] == before + 1)
      before = numbers[k]
      if before < least then least = before end
    end
    block:release()
  end
  return sound, least
end

--- Put the numbers of a window that lie in rows [row, past) of what is stored, in any order, where the mapping says.
local function place(w, states, least, row, past)
  local mapping, rows = numbers_of(states[MAPPING], row, past)
  local from, n, any = least + w.first, w.past - w.first, false
  for k = 0, past - row - 1 do
    rows[k] = rows[k] - from
    any = any or rows[k] >= 0 and rows[k] < n
  end
  for name, stored in util.ordered(any and states or {}) do
    local t, numbers = numbers_of(stored, row, past)
    local to = w[name]
    for k = 0, past - row - 1 do
      if rows[k] >= 0 and rows[k] < n then to[rows[k]] = numbers[k] end
    end
    t:release()
  end
  mapping:release()
end

--- The states of one map of MCH in the order of rows, where they are in another one, such as that of ids. name: the
--- begin of theirs.
local function gathered_states(states, least, name)
  local rows, bounds, initial, all = states[MAPPING]:size(1), {}, {}, {}
  for row = 0, rows - 1, Gather.ROWS do bounds[#bounds + 1] = row end
  bounds[#bounds + 1] = rows
  for state in util.ordered(states) do initial[state] = -1 end
  local gather = Gather(bounds, initial, function(w)
    for row = 0, rows - 1, BLOCK do place(w, states, least, row, math.min(row + BLOCK, rows)) end
    for k = 0, w.past - w.first - 1 do
      if w[MAPPING][k] < 0 then
        P.fail(("'%s%s' has no id for row %d, wanted each of %d rows once"):format(name, MAPPING, w.first + k, rows))
      end
    end
  end)
  for state, x in util.ordered(states) do
    all[state] = gather:stored(state, x:size(), x:dtype(), function() x:verify(0, rows) end)
  end
  return all
end

--- A StoredTensor that is `x`, and says how to have it in the order of rows.
local function with_rows(x, rows)
  return StoredTensor { size = x:size(), dtype = x:dtype(), read = function(region, tensor)
    x:read(region.offset, tensor)
  end,
    by_row = rows }
end

--- Whether the order of rows of another state may depend on this one, by its name.
function M.is_of_mch(name)
  local state = split(name)
  return state == SEGMENTS or by_row[state] ~= nil
end

--- Bring the maps of MCH of a dict (name -> StoredTensor) into the order of ids, which is sorted when somebody reads
--- it; and say of all maps how to have them in the order of rows. beside: the states of maps that the checkpoint has
--- and the dict has not, by the same names: they tell the order, too.
function M.order_by_id(dict, beside)
  local found = {}
  for key, value in util.ordered(dict) do
    local state, before
    if type(key) == "string" and StoredTensor.is(value) then state, before = split(key) end
    local ids = state and by_row[state] and (dict[before .. IDS] or beside[before .. IDS])
    if StoredTensor.is(ids) then found[before] = ids:size(1) end
    if state == "_hash_zch_identities" or state == "_hash_zch_metadata" then dict[key] = with_rows(value, value) end
  end
  for before, rows in util.ordered(found) do
    local states = {}
    for name in util.ordered(by_row) do
      local x = dict[before .. name] or beside[before .. name]
      if StoredTensor.is(x) and x:size(1) == rows then states[name] = x end
    end
    local segments = segments_of(dict[before .. SEGMENTS] or beside[before .. SEGMENTS], rows)
    local mapped = segments and states[MAPPING] and states[MAPPING]:dtype() == "i64"
    local plain, least, rows_of = false, 0, {}
    if mapped then plain, least = order_of(states[MAPPING]) end
    if mapped then rows_of = plain and states or gathered_states(states, least, before) end
    for name, x in util.ordered(segments and sorted_states(states, segments) or {}) do
      local loaded = dict[before .. name] ~= nil
      if loaded then dict[before .. name] = rows_of[name] and with_rows(x, rows_of[name]) or x end
    end
  end
end

--- The states of a map that are in the order of rows (StoredTensors), as order_by_id leaves them. segments (MCH): rows
--- where buckets begin.
function M.of_rows(states, segments)
  local sorted, all = segments and sorted_states(states, segments) or states, {}
  for name, x in util.ordered(states) do all[name] = with_rows(sorted[name], x) end
  return all
end

return M
