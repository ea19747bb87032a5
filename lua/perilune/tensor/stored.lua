-- tensor/stored.lua: a tensor that lies somewhere else, in a checkpoint say, and is read only where it is wanted: a
-- source for load_state_dict that is never in memory as a whole.
local util = require "perilune.util"
local Tensor = require "perilune.tensor"

local StoredTensor = util.class "StoredTensor"

local arguments = { size = util.required.list, dtype = util.required.string, read = util.required,
  patch = util.optional, read_several = util.optional, verify = util.optional, by_row = util.optional,
  ends = util.optional }

--- size: of the whole; dtype; read = function(region, tensor), which fills `tensor`, of that dtype, with a rectangle: {
--- offset = list, size = list, columns = { first, number } or nil }. columns: where the numbers are of rows of a table,
--- those of these columns are wanted. patch (or nil) = function(shard, dtype), which brings a shard (of that dtype) of
--- the place that the tensor is loaded into up to date by itself, where it knows what differs, and returns whether it
--- has; shards are as in tensor/sharded.lua. read_several (or nil) = function(regions, tensors), which fills tensors
--- with as many rectangles at once. verify (or nil) = function(first, rows): an error if what these rows lie in is
--- damaged. by_row (or nil): of a state of a map of raw ids, a StoredTensor that has it in the order of rows. ends (or
--- nil) = function(row), the end of the rows from `row` on that are best read before others (it is made some rows at a
--- time).
function StoredTensor:init(args)
  local a = util.named("StoredTensor", args, arguments)
  self._size, self._dtype, self._read, self._patch = a.size, a.dtype, a.read, a.patch or false
  self._read_several, self._verify, self._by_row = a.read_several or false, a.verify or false, a.by_row or false
  self._ends = a.ends or false
  self.fits = {} -- places whose numbers tensor/sharded.lua has found to fit a dtype: "f16 [0, 0] [40, 8]" -> true
end

function StoredTensor:size(d)
  if d then return self._size[d] end
  return util.copy(self._size)
end
StoredTensor.shape = StoredTensor.size
function StoredTensor:numel() return util.product(self._size) end
function StoredTensor:dtype() return self._dtype end
function StoredTensor:__tostring()
  return ("StoredTensor %s [%s]"):format(self._dtype, table.concat(self._size, ", "))
end

--- Fill `tensor` with the rectangle of its shape that begins at `offset`; numbers of another dtype are converted. alike
--- (true): all ranks that load together read this rectangle.
function StoredTensor:read(offset, tensor, columns, alike)
  local region = { offset = offset, size = tensor:shape(), columns = columns, alike = alike }
  if tensor:dtype() == self._dtype then return self._read(region, tensor) end
  local same = Tensor.empty(region.size, self._dtype, "cpu")
  self._read(region, same)
  tensor:copy(same)
  same:release()
end

--- Bring a shard, whose numbers are `dtype`, up to date without reading all of it; false: that is not possible, and
--- nothing was changed. An error if numbers do not fit.
function StoredTensor:patch(shard, dtype) return self._patch and self._patch(shard, dtype) or false end
--- Whether it may bring shards up to date by itself.
function StoredTensor:patches() return self._patch ~= false end

--- An error if what rows [first, first + rows) lie in is damaged: of who reads it in parts, which are compared with no
--- checksum.
function StoredTensor:verify(first, rows)
  if self._verify then self._verify(first, rows) end
end

--- How many of n rows from `row` on are best read before others.
function StoredTensor:run(row, n) return self._ends and math.min(n, self._ends(row) - row) or n end

--- The same in the order of rows; nil: it is not known.
function StoredTensor:by_row() return self._by_row or nil end

--- The whole, as a tensor.
function StoredTensor:tensor(device)
  local whole = Tensor.empty(self._size, self._dtype, device)
  self:read(util.map(self._size, function() return 0 end), whole)
  return whole
end

return StoredTensor
