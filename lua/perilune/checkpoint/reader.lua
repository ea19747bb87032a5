-- reader.lua: an open checkpoint.
--
--   local c = peri.checkpoint.open "model-1000"
--   c:names()                          -- of all tensors, sorted
--   c:tensor(name)                     -- { name =, dtype =, shape = { ... }, pieces = { { file =, begin =, bytes =,
--                                      -- xxh3 =, offset =, size =, columns = { first, number } or nil, and of an
--                                      -- increment rows = name of the tensor that lists which rows are there,
--                                      -- listed = how many }, ... } }
--   c:read(name)                       -- a tensor with all of it
--   c:read(name, { offset = { 10, 0 }, size = { 5, 64 } }, tensor)   -- a rectangle, into a tensor
--   c:stored(name)                     -- a StoredTensor: a source for load_state_dict
--   c:values() c:digest() c:parent() c:increment()
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local signature = require "perilune.signature"
local Tensor = require "perilune.tensor"
local StoredTensor = require "perilune.tensor.stored"
local row_format = require "perilune.tensor.row_format"
local values = require "perilune.checkpoint.values"
local C, check = P.C, P.check

local _, _, _, wrap = P.handle("peri_checkpoint", {}, nil, "a checkpoint")
local out, info = ffi.new "peri_checkpoint *[1]", P.struct "peri_checkpoint_tensor"
local data_out, number_out = ffi.new "void *[1]", ffi.new "int64_t[1]"
local place, region_out = P.struct "peri_checkpoint_place", P.struct "peri_checkpoint_region"

-- How names of the lists of an increment begin, which are no tensors of a program: of rows, and of evicted ids.
local lists = { ["%rows/"] = true, ["%evicted/"] = true }

local Checkpoint = util.class "Checkpoint"

local function check_path(path)
  signature.value("checkpoint.open", "path", path, "string")
  if path:find("\0", 1, true) then P.fail "checkpoint.open: the path has a zero byte in it" end
end

--- path: of a checkpoint; of an increment, with all that it is an increment of; or a list of paths, a full checkpoint
--- and increments in their order, wherever they lie. alone (true): an increment without the others, to look at what it
--- says. late (or nil): so many seconds files that the manifest lists are waited for; see peri_checkpoint_open_late.
function Checkpoint:init(path, alone, late)
  if type(path) == "table" then
    local list = ffi.new("const char *[?]", math.max(#path, 1))
    for i, p in ipairs(path) do
      check_path(p)
      list[i - 1] = p
    end
    check(C.peri_checkpoint_open_chain(list, #path, out))
    path = path[#path]
  else
    check_path(path)
    if late then check(C.peri_checkpoint_open_late(path, late, out))
    else check((alone and C.peri_checkpoint_open_alone or C.peri_checkpoint_open)(path, out)) end
  end
  self.path, self._ref, self._row_formats = path, wrap(out[0]), false
  self._count = tonumber(C.peri_checkpoint_count(out[0]))
end
function Checkpoint:__tostring()
  return ("checkpoint '%s' of %s"):format(self.path, util.number_of(self._count, "tensor"))
end

local function pointer(self)
  if self._ref.ptr == nil then P.fail(("checkpoint '%s': it was closed"):format(self.path)) end
  return self._ref.ptr
end

function Checkpoint:close() self._ref:release() end

--- Names of all tensors, in order.
function Checkpoint:names()
  local list, c = {}, pointer(self)
  for i = 1, self._count do
    check(C.peri_checkpoint_tensor_at(c, i - 1, info))
    local name = ffi.string(info.name)
    if not lists[name:match "^%%%w+/"] then list[#list + 1] = name end
  end
  return list
end

function Checkpoint:has(name) return C.peri_checkpoint_find(pointer(self), name) >= 0 end

local function index_of(self, name)
  local i = C.peri_checkpoint_find(pointer(self), name)
  if i < 0 then P.fail(("checkpoint '%s': it has no tensor '%s'"):format(self.path, name)) end
  return i
end

local function numbers(array, n)
  local list = {}
  for d = 1, n do list[d] = tonumber(array[d - 1]) end
  return list
end

--- Dtype, shape and number of pieces of tensor `i` (from 0).
local function describe(self, i)
  check(C.peri_checkpoint_tensor_at(pointer(self), i, info))
  return P.dtype_names[info.dtype], numbers(info.shape, info.ndim), tonumber(info.pieces)
end

--- A checksum (uint64_t) as the manifest writes it.
function Checkpoint._hex(sum) return bit.tohex(tonumber(sum / 2 ^ 32)) .. bit.tohex(tonumber(sum % 2 ^ 32)) end

--- Everything that the checkpoint says of a tensor.
function Checkpoint:tensor(name)
  local index, pieces = index_of(self, name), {}
  local dtype, shape, n = describe(self, index)
  for k = 1, n do
    check(C.peri_checkpoint_piece(pointer(self), index, k - 1, region_out, place))
    pieces[k] = { file = ffi.string(place.file), begin = tonumber(place.begin), bytes = tonumber(place.bytes),
      xxh3 = place.checked and Checkpoint._hex(place.checksum) or nil, offset = numbers(region_out.offset, #shape),
      size = numbers(region_out.extent, #shape), columns = region_out.columns > 0
      and { tonumber(region_out.column), tonumber(region_out.columns) } or nil, rows = region_out.rows ~= nil
      and ffi.string(region_out.rows) or nil, listed = region_out.rows ~= nil and tonumber(region_out.listed) or nil }
  end
  return { name = name, dtype = dtype, shape = shape, pieces = pieces }
end

--- Whether it has a tensor of this name, dtype and shape, with a piece of the same columns: an increment of it may have
--- some rows of such a piece. No tables are made, since a save asks this of 100,000 tensors.
function Checkpoint:_has_alike(name, dtype, shape, columns)
  local c = pointer(self)
  local index = C.peri_checkpoint_find(c, name)
  if index < 0 then return false end
  check(C.peri_checkpoint_tensor_at(c, index, info))
  if P.dtype_names[info.dtype] ~= dtype or info.ndim ~= #shape then return false end
  for d = 1, #shape do
    if info.shape[d - 1] ~= shape[d] then return false end
  end
  for k = 0, tonumber(info.pieces) - 1 do
    check(C.peri_checkpoint_piece(c, index, k, region_out, place))
    local first, number = tonumber(region_out.column), tonumber(region_out.columns)
    if number == (columns and columns[2] or 0) and (number == 0 or first == columns[1]) then return true end
  end
  return false
end

--- A region for C; nil: all of `shape`.
local function region_of(shape, region)
  local r = P.struct "peri_checkpoint_region"
  for d = 1, #shape do
    r.offset[d - 1] = region and region.offset[d] or 0
    r.extent[d - 1] = region and region.size[d] or shape[d]
  end
  if region and region.columns then r.column, r.columns = region.columns[1], region.columns[2] end
  r.alike = region and region.alike or false
  return r
end

--- Note what the checkpoint says of the rows of tensor `name`, which is x. Returns x.
local function with_format(self, name, x)
  if x:dtype() ~= "u8" then return x end
  if not self._row_formats then
    local rows = self:values().rows
    self._row_formats = type(rows) == "table" and rows or {}
  end
  local format = self._row_formats[name]
  return row_format.note(x, type(format) == "string" and format or nil)
end

--- Fill `tensor` (nil: a new one) with a rectangle (nil: all) of tensor `i`. Returns it.
local function read_at(self, i, region, tensor)
  local dtype, shape = describe(self, i)
  local r = region_of(shape, region)
  tensor = tensor or Tensor.empty(region and region.size or shape, dtype, "cpu")
  check(C.peri_checkpoint_read(pointer(self), i, r, Tensor.ptr(tensor)))
  return tensor
end

--- A rectangle (nil: all) of a tensor, { offset =, size =, columns = or nil }, into `tensor` (nil: a new one). Returns
--- it. Blocks.
function Checkpoint:read(name, region, tensor)
  tensor = read_at(self, index_of(self, name), region, tensor)
  return region and tensor or with_format(self, name, tensor)
end

--- Several rectangles of tensor `i` into as many tensors; what they lie in is read once.
local function read_several(self, i, regions, tensors)
  local _, shape = describe(self, i)
  local n = #regions
  local list, pointers, kept = ffi.new("const peri_checkpoint_region *[?]", n), ffi.new("peri_tensor *[?]", n), {}
  for k = 1, n do
    kept[k] = region_of(shape, regions[k])
    list[k - 1], pointers[k - 1] = kept[k], Tensor.ptr(tensors[k])
  end
  check(C.peri_checkpoint_read_several(pointer(self), i, list, pointers, n))
end

-- -- as sources -------------------------------------------------------------------------------------------------------

--- A tensor of an open checkpoint as a StoredTensor: { checkpoint, number of the tensor (from 0), patch or false }. All
--- that it says it asks the checkpoint for: a load of 100,000 tables has 200,000 of these.
local OfCheckpoint = util.class("StoredTensor", StoredTensor)

local fields = {
  _dtype = function(self) return (describe(self[1], self[2])) end,
  _size = function(self) return select(2, describe(self[1], self[2])) end,
  _patch = function(self) return self[3] end,
  _read = function(self) return function(region, tensor) read_at(self[1], self[2], region, tensor) end end,
  _read_several = function(self)
    return function(regions, tensors) read_several(self[1], self[2], regions, tensors) end
  end,
  _verify = function(self)
    return function(first, rows)
      describe(self[1], self[2])
      self[1]:_verify_rows(ffi.string(info.name), first, rows)
    end
  end,
  fits = function(self)
    rawset(self, "fits", {})
    return rawget(self, "fits")
  end,
}
function OfCheckpoint:__index(key)
  local field = fields[key]
  if field then return field(self) end
  return OfCheckpoint[key]
end

--- The tensor as a source for load_state_dict, which reads from the checkpoint what it wants. patch (or nil): see
--- StoredTensor.
function Checkpoint:stored(name, patch)
  return with_format(self, name, setmetatable({ self, index_of(self, name), patch or false }, OfCheckpoint))
end

--- Share what is read with other processes of this machine; see peri_checkpoint_share.
function Checkpoint:_share(name, processes) check(C.peri_checkpoint_share(pointer(self), name, processes)) end

--- Of piece `piece` (from 1) of a tensor, of which this increment has some rows: `n` of them from number `from` (0) of
--- its list on. Returns which (i64, counted from row `first` of the whole tensor on), and their elements [n, ...], as
--- wide as the piece.
function Checkpoint:_piece_rows(name, piece, from, n, first)
  local index = index_of(self, name)
  local dtype, shape = describe(self, index)
  check(C.peri_checkpoint_piece(pointer(self), index, piece - 1, region_out, nil))
  local size = numbers(region_out.extent, #shape)
  size[1] = n
  local rows, elements = Tensor.empty({ n }, "i64", "cpu"), Tensor.empty(size, dtype, "cpu")
  check(C.peri_tensor_data(Tensor.ptr(rows), data_out))
  local list = ffi.cast("int64_t *", data_out[0])
  check(C.peri_tensor_data(Tensor.ptr(elements), data_out))
  check(C.peri_checkpoint_piece_rows(pointer(self), index, piece - 1, from, n, list, data_out[0]))
  for i = 0, first ~= 0 and n - 1 or -1 do list[i] = list[i] - first end
  return rows, elements
end

--- The number in the list of such a piece of the first row that is `row` or more, counted in the whole tensor.
function Checkpoint:_find_row(name, piece, row)
  check(C.peri_checkpoint_piece_find(pointer(self), index_of(self, name), piece - 1, row, number_out))
  return tonumber(number_out[0])
end

--- Paths of the checkpoints that it consists of: itself, what it is an increment of, and so on.
function Checkpoint:levels()
  local list = {}
  for i = 1, tonumber(C.peri_checkpoint_levels(pointer(self))) do
    list[i] = ffi.string(C.peri_checkpoint_level(pointer(self), i - 1))
  end
  return list
end

--- Make a full checkpoint at `path` of an increment and what it is an increment of; it stands for it. Returns its
--- digest. replace: its own path may be `path`; then nothing can be read from this object any more, and open() opens
--- the new one.
function Checkpoint:compact(path, replace)
  local digest = ffi.new "char[33]"
  check(C.peri_checkpoint_compact(pointer(self), path, replace or false, digest))
  return ffi.string(digest)
end

--- Compare all pieces, and the headers of files, with their checksums, of an increment its own. Raises at the first
--- that differs. rank, size: only this rank's share of the bytes, of so many ranks; headers are in that of rank 0.
function Checkpoint:verify(rank, size)
  local shares, least = {}, 1
  size = util.integer("Checkpoint:verify", "size", size or 1, 1)
  rank = util.integer("Checkpoint:verify", "rank", rank or 0, 0, size - 1)
  for r = 1, size do shares[r] = 0 end
  if rank == 0 then check(C.peri_checkpoint_verify_headers(pointer(self))) end
  for i = 0, self._count - 1 do
    check(C.peri_checkpoint_tensor_at(pointer(self), i, info))
    for k = 0, tonumber(info.pieces) - 1 do
      if least == rank + 1 then check(C.peri_checkpoint_verify(pointer(self), i, k)) end
      check(C.peri_checkpoint_piece(pointer(self), i, k, region_out, place))
      shares[least] = shares[least] + tonumber(place.bytes)
      for r = 1, #shares do least = shares[r] < shares[least] and r or least end
    end
  end
end

--- Compare what rows [first, first + rows) of a tensor lie in with its checksums, in all that the checkpoint consists
--- of.
function Checkpoint:_verify_rows(name, first, rows)
  for _, path in ipairs(self:levels()) do
    local level = Checkpoint(path, true)
    local ok, err = xpcall(function()
      local t = level:has(name) and level:tensor(name)
      for k, piece in ipairs(t and t.pieces or {}) do
        local low, high = math.max(first, piece.offset[1]), math.min(first + rows, piece.offset[1] + piece.size[1])
        if low < high then
          check(C.peri_checkpoint_verify(pointer(level), C.peri_checkpoint_find(pointer(level), name), k - 1))
        end
      end
    end, P.locate)
    level:close()
    if not ok then error(err, 0) end
  end
end

--- What was saved beside tensors.
function Checkpoint:values()
  return values.decode(ffi.string(C.peri_checkpoint_values(pointer(self))), ("checkpoint '%s'"):format(self.path))
end
function Checkpoint:digest() return ffi.string(C.peri_checkpoint_digest(pointer(self))) end
--- The digest of the checkpoint that this one is an increment of; nil: it is whole by itself.
function Checkpoint:parent()
  local digest = ffi.string(C.peri_checkpoint_parent(pointer(self)))
  return digest ~= "" and digest or nil
end

--- The digest of the increment for which it stands; nil: for none.
function Checkpoint:_same_as()
  local digest = ffi.string(C.peri_checkpoint_same_as(pointer(self)))
  return digest ~= "" and digest or nil
end

--- Which increment of its chain it is; 0: a full checkpoint.
function Checkpoint:increment() return tonumber(C.peri_checkpoint_increment(pointer(self))) end

signature.kind("checkpoint_region", "{ offset = list of numbers, size = list of numbers }", function(x)
  return type(x) == "table" and type(x.offset) == "table" and type(x.size) == "table"
end)
signature.check("Checkpoint:", Checkpoint, { tensor = "self: table, name: string", has = "self: table, name: string",
  compact = "self: table, path: string, replace: boolean?",
  read = "self: table, name: string, region: checkpoint_region?, tensor: tensor?",
  stored = "self: table, name: string, patch: callable?" })

return Checkpoint
