-- mc_state.lua: the state of maps of ids as the pieces of ShardedTensors, in the terms of state_dicts.
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local sharded = require "perilune.tensor.sharded"

local M = {}

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

--- The state of a map. A map takes its parts all together, a state_dict brings them one by one: what is written is gathered, and taken
--- when all of it is there, or (a state_dict without some names) when somebody next needs the map.
local State = util.class "CollisionState"
M.State = State

--- The state of a map of buckets [first_bucket, first_bucket + n_buckets). offsets: name -> number that the state_dict's values are
--- larger than the map's.
function State:init(map, first_bucket, n_buckets, offsets)
  self._map, self._first, self._n, self._offsets, self._written, self._read = map, first_bucket, n_buckets, offsets or {}, {}, {}
  self._index = util.index_of(map:state_names())
end

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

--- Overwrite them.
function State:write(name, row, source)
  local w = self._written[name]
  if not w then
    w = { tensor = P.lasting(whole, self, name), rows = 0 }
    self._written[name] = w
  end
  local n = source:size(1)
  w.tensor:slice(1, row, row + n):copy(source)
  w.rows = w.rows + n
  for part in util.ordered(self._index) do
    local other = self._written[part]
    if not other or other.rows < other.tensor:size(1) then return end
  end
  self:settle()
end

--- Let the map take what was written.
function State:settle()
  if next(self._written) == nil then return end
  local map = {}
  for name, i in util.ordered(self._index) do
    local w, by = self._written[name], self._offsets[name]
    map[name] = not w and self._map:state(i) or by and by ~= 0 and M.shift(w.tensor, -by) or w.tensor
  end
  self._written, self._read = {}, {}
  self._map:load(map, self._first, self._n)
end

--- See Module:try_state: a copy of `module`, of which settle() is called, takes what `map` has under `path`. Returns it, and that by the
--- module's own names; nil: there is nothing.
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
    local size, dtype, device
    P.scope(function() -- a state has all its rows: none stays here
      local now = self._map:state(i)
      size, dtype, device = now:shape(), now:dtype(), now:device()
    end)
    local metadata = { shard_offsets = util.map(size, function() return 0 end), shard_sizes = size, placement = "rank:0" }
    list[i] = { name = name, tensor = sharded.ShardedTensor { size = size, dtype = dtype, shards_metadata = { metadata },
      device = device, local_shards = { { metadata = metadata,
        read = function(row, result) self:read(name, row, result) end,
        write = function(row, source) self:write(name, row, source) end } } } }
  end
  return list
end

return M
