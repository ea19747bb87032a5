-- mc_state.lua: the state of maps of ids as the pieces of ShardedTensors, in the terms of state_dicts.
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local StoredTensor = require "perilune.tensor.stored"
local mc_map = require "perilune.embed.mc_map"
local sharded = require "perilune.tensor.sharded"

local M = {}
local BLOCK = 65536 -- rows that are read at once, of what is stored

--- t + by, for rows (i64); -1, no row, stays.
function M.shift(t, by)
  local memory, n = t:read()
  for i = 0, n - 1 do
    if memory[i] >= 0 then memory[i] = memory[i] + by end
  end
  return Tensor.from_memory(memory, t:shape(), "i64", t:device())
end

--- One tensor of several of one dimension (i64).
function M.join(parts)
  if #parts == 1 then return parts[1] end
  local n, at = 0, 0
  for _, t in ipairs(parts) do n = n + t:numel() end
  local whole = Tensor.empty({ n }, "i64", parts[1] and parts[1]:device())
  for _, t in ipairs(parts) do
    local rows = t:numel()
    if rows > 0 then whole:slice(1, at, at + rows):copy(t) end
    at = at + rows
  end
  return whole
end

--- The state of a map. A map takes its parts all together, a state_dict brings them one by one: what is written is
--- gathered, and taken when all of it is there, or (a state_dict without some names) when somebody next needs the map.
--- What is stored somewhere else, in the order of rows (checkpoint/maps.lua), is not gathered: when all parts are known
--- they are read side by side, some rows at a time.
local State = util.class "CollisionState"
M.State = State

--- The state of a map of buckets [first_bucket, first_bucket + n_buckets). offsets: name -> number that the
--- state_dict's values are larger than the map's.
function State:init(map, first_bucket, n_buckets, offsets)
  self._map, self._first, self._n, self._offsets, self._written, self._read = map, first_bucket, n_buckets, offsets
    or {}, {}, {}
  self._stored, self._sound = {}, false
  self._index = util.index_of(map:state_names())
end

--- From now on it is the state of `map`, which has the state that the map before had.
function State:moved(map) self._map = map end

local function whole(self, name)
  local t = self._map:state(self._index[name])
  local by = self._offsets[name]
  return by and by ~= 0 and M.shift(t, by) or t
end

--- Rows [row, row + n) of part `name` into `result`, n rows.
function State:read(name, row, result)
  self:settle()
  if row == 0 or not self._read[name] then self._read[name] = P.lasting(whole, self, name) end
  local n = result:size(1)
  result:copy(self._read[name]:slice(1, row, row + n))
  if row + n < self._read[name]:size(1) then return end
  self._read[name]:release()
  self._read[name] = nil
end

--- The same in the order of rows, on the CPU, without the others.
function State:read_by_row(name, row, result)
  self:settle()
  self._map:read_rows(name, row, result)
  local by = self._offsets[name]
  if by and by ~= 0 then result:copy(M.shift(result, by)) end
end

--- What is stored in the order of rows, of part `name`; nil: it is not so.
local function rows_stored(name, source)
  return StoredTensor.is(source) and source:dtype() == mc_map._dtype_of(name) and source:by_row() or nil
end

--- Whether all parts that are given (name -> source) can be read some rows at a time.
function State:streams(given)
  for name, source in util.ordered(given) do
    if mc_map._is_by_row(name) and not rows_stored(name, source) then return false end
  end
  return next(given) ~= nil
end

--- Rows [row, row + n) of the map, of a part that is not given. parts: those that are. A row whose id stays keeps its
--- number.
local function kept_rows(self, name, row, n, parts)
  local function own(part)
    local block = Tensor.empty({ n }, mc_map._dtype_of(part), "cpu")
    self._map:read_rows(part, row, block)
    return block
  end
  local ids = parts._mch_sorted_raw_ids and "_mch_sorted_raw_ids" or "_hash_zch_identities"
  local block, initial = own(name), mc_map._initial[name]
  if not parts[ids] or not initial then return block end
  local numbers, before, now = block:read(), own(ids):read(), parts[ids]:read()
  for k = 0, n - 1 do
    if before[k] ~= now[k] then numbers[k] = initial end
  end
  return Tensor.from_memory(numbers, { n }, block:dtype(), "cpu")
end

--- A function for check_rows and load_rows of the map (mc_map.lua). stored: name -> StoredTensor in the order of rows,
--- first: the row of these that is the map's first. Parts that are not stored have what the map has.
local function each_block(self, stored, first, rows)
  return function(f)
    local row = 0
    while row < rows do
      local n, parts = math.min(BLOCK, rows - row), {}
      for _, source in util.ordered(stored) do n = source:run(first + row, n) end
      P.scope(function()
        for name, source in util.ordered(stored) do
          local size, offset = source:size(), util.map(source:size(), function() return 0 end)
          size[1], offset[1] = n, first + row
          local block, by = Tensor.empty(size, source:dtype(), "cpu"), self._offsets[name]
          source:read(offset, block)
          parts[name] = by and by ~= 0 and M.shift(block, -by) or block
        end
        for name in util.ordered(self._index) do
          if mc_map._is_by_row(name) and not stored[name] then parts[name] = kept_rows(self, name, row, n, parts) end
        end
        f(row, n, parts)
      end)
      row = row + n
    end
  end
end

--- What is given with a number a row, and all states without rows: the map's own where they are not given; and whether
--- rows of the map's own will be read.
local function rows_of(self, given)
  local stored, words, some = {}, {}, false
  for name, i in util.ordered(self._index) do
    local source = given[name]
    if mc_map._is_by_row(name) then
      stored[name] = rows_stored(name, source)
      some = some or not stored[name]
    else
      words[name] = StoredTensor.is(source) and source:tensor "cpu" or source or self._map:state(i)
    end
  end
  return stored, words, some
end

--- An error unless the map can take what is given, of which streams() is true; changes nothing. first: the row of these
--- that is the map's first. Returns the mark that the map would have: { sum =, iteration = }. A load asks twice, before
--- it lists what does not fit and before it changes anything: what is stored, and does not change, is read once.
function State:check(given, first)
  local stored, words, some = rows_of(self, given)
  local s, sound = self._map:statistics(), self._sound
  local rows, steps = tonumber(s.rows), tonumber(s.iterations)
  local known = sound and not some and sound.first == first and sound.steps == steps
  for name in util.ordered(self._index) do known = known and rawequal(sound.stored[name], stored[name]) end
  if known then
    local _, iteration = self._map:check_rows(words, function() end)
    if iteration == sound.mark.iteration then return sound.mark end
  end
  for _, source in util.ordered(stored) do source:verify(first, rows) end
  local sum, iteration = self._map:check_rows(words, each_block(self, stored, first, rows))
  local mark = { sum = sum, iteration = iteration }
  -- weak: a checkpoint that was not loaded after all is not kept open
  self._sound = not some and { stored = setmetatable(stored, { __mode = "v" }), first = first, steps = steps,
    mark = mark }
  return mark
end

--- Part `name` is stored; row `first` of it is the map's first. Returns whether it is taken so; else it is to be
--- written as ever.
function State:take(name, source, first)
  if not rows_stored(name, source) then return false end
  self._stored[name] = { source = source, first = first }
  self:_complete()
  return true
end

--- Load the map from the parts that were given, if all parts that have rows are stored tensors, which it reads a block
--- of rows at a time. Returns false, and loads nothing, if they are not.
local function settle_stored(self)
  local given, first = {}, 0
  for name in util.ordered(self._index) do
    local x, w = self._stored[name], self._written[name]
    given[name], first = x and x.source or w and w.tensor, x and x.first or first
  end
  if not self:streams(given) then return false end
  local stored, words, some = rows_of(self, given)
  self._written, self._read, self._stored, self._sound = {}, {}, {}, false
  local _, iteration = self._map:check_rows(words, function() end)
  self._map:load_rows(iteration, each_block(self, stored, first, tonumber(self._map:statistics().rows)), some)
  return true
end

--- What is stored, and waits for others that have not come, is read before its file is closed.
function State:fetch()
  if settle_stored(self) then return end
  local waiting = self._stored
  self._stored = {}
  for name, x in util.ordered(waiting) do
    local w = { tensor = P.lasting(whole, self, name) }
    local offset = util.map(w.tensor:shape(), function() return 0 end)
    offset[1], w.rows = x.first, w.tensor:size(1)
    x.source:read(offset, w.tensor)
    self._written[name] = w
  end
  if next(waiting) then self:_complete() end
end

--- Let the map take all parts when they are there.
function State:_complete()
  for part in util.ordered(self._index) do
    local other = self._written[part]
    if not self._stored[part] and (not other or other.rows < other.tensor:size(1)) then return end
  end
  self:settle()
end

--- Rows from `row` on of part `name` are those of `source`. Once all rows of all parts are there, the map takes them.
function State:write(name, row, source)
  local w = self._written[name]
  if not w then
    w = { tensor = P.lasting(whole, self, name), rows = 0 }
    self._written[name] = w
  end
  local n = source:size(1)
  w.tensor:slice(1, row, row + n):copy(source)
  w.rows = w.rows + n
  self:_complete()
end

--- Let the map take what was written.
function State:settle()
  if next(self._written) == nil and next(self._stored) == nil then return end -- in every step
  self:fetch()
  if next(self._written) == nil then return end
  local map = {}
  for name, i in util.ordered(self._index) do
    local w, by = self._written[name], self._offsets[name]
    map[name] = not w and self._map:state(i) or by and by ~= 0 and M.shift(w.tensor, -by) or w.tensor
  end
  self._written, self._read = {}, {}
  self._map:load(map, self._first, self._n)
end

--- See Module:try_state: a copy of `module`, of which settle() is called, takes what `map` has under `path`. Returns
--- it, and that by the module's own names; nil: there is nothing.
function M.try(module, map, path, settle)
  local given, prefix = {}, path == "" and "" or path .. "."
  for _, s in ipairs(module:own_state()) do
    local source = map[prefix .. s.name]
    given[s.name] = source
    local dtype = source and source:dtype()
    if dtype and dtype ~= "i64" and dtype ~= "i32" and dtype ~= s.tensor:dtype() then
      P.fail(("'%s' is %s, wanted %s: floats do not hold 64-bit ids"):format(prefix .. s.name, dtype, s.tensor:dtype()))
    end
  end
  if next(given) == nil then return end
  local copy = module:copy()
  for _, s in ipairs(copy:own_state()) do
    if given[s.name] then sharded.assign(s.tensor, given[s.name]) end
  end
  settle(copy)
  return copy, given
end

--- A list of { name =, tensor = a ShardedTensor of one piece }.
function State:entries()
  local list = {}
  for i, name in ipairs(self._map:state_names()) do
    local size, dtype, device = self._map:_describe(i)
    local metadata = { shard_offsets = util.map(size, function() return 0 end), shard_sizes = size,
      placement = "rank:0" }
    list[i] = { name = name, tensor = sharded.ShardedTensor { size = size, dtype = dtype,
      shards_metadata = { metadata }, device = device, local_shards = { { metadata = metadata,
        read = function(row, result) self:read(name, row, result) end,
        write = function(row, source) self:write(name, row, source) end,
        by_row = mc_map._is_by_row(name) and function(row, result) self:read_by_row(name, row, result) end or nil,
        take = function(source) return mc_map._is_by_row(name) and self:take(name, source, 0) end } } } }
  end
  return list
end

return M
