-- tensor/sharded.lua: a tensor of which each rank of a group has pieces (TorchRec's ShardedTensor): what a state_dict
-- holds for a table, or for a state of its optimizer, that is spread over ranks. It says where every piece is, and
-- reaches those of this rank.
--
--   local weight = model:state_dict()["ebc.embedding_bags.users.weight"]
--   weight:size()                      -- { rows, columns } of the whole
--   -- list of { shard_offsets =, shard_sizes =, placement = "rank:1" }: those of all ranks
--   weight:metadata().shards_metadata
--   -- a live view of a piece (nil: its rows are in a file; read and write reach them)
--   weight:local_shards()[1].tensor
--   weight:gather()                    -- the whole on every rank; collective
--   weight:clone()                     -- a copy of the pieces of this rank
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local signature = require "perilune.signature"
local StoredTensor = require "perilune.tensor.stored"
local row_format = require "perilune.tensor.row_format"
local narrow = require "perilune.tensor.narrow"

local M = {}
local COPY_ROWS = 65536

local ShardedTensor = util.seal(util.class "ShardedTensor")
M.ShardedTensor = ShardedTensor

local arguments = {
  size = util.required.list,             -- of the whole
  dtype = util.required.string,          -- of the numbers; "f32", ...
  shards_metadata = util.required.list,  -- of all ranks: { shard_offsets =, shard_sizes =, placement = "rank:R",
                                         -- columns = { offset, number, of } where a state has one number for a row of
                                         -- these columns }
  local_shards = util.required.list,     -- of this rank, in the order of shards_metadata: { metadata =, tensor = (a
                                         -- live view, or nil), read = function(row, tensor), write = function(row,
                                         -- tensor), take (or nil) = function(what is stored) -> whether it will be read
                                         -- later, by_row = see embed/mc_state.lua, source = of tables in files:
                                         -- function() -> table batch, table and state for peri_moment_add_table }
  group = util.any(false),               -- the ranks; false: this rank alone
  device = util.optional,                -- of what gather returns
  mark = util.optional,                  -- function() -> what moment_of says of copies; nil: nothing
  stored = false,                        -- pieces of some ranks are in files, whose reading may fail
  settle = util.optional,                -- function(): called before pieces are read; an error while they are of no one
                                         -- moment
}

signature.object("shard_metadata", "the metadata of a shard", { shard_offsets = "numbers", shard_sizes = "numbers",
  placement = "string" })
signature.list_of("shards_metadata", "a list of metadata of shards", "shard_metadata")
signature.object("place_of_shard", "offsets and sizes of a shard",
  { shard_offsets = "numbers", shard_sizes = "numbers" })
signature.object("local_shard", "a shard of this rank", { metadata = "place_of_shard", read = "callable?",
  write = "callable?" })
signature.list_of("local_shards", "a list of shards of this rank", "local_shard")

--- Arguments that are lists, in the order in which they are checked, and of what.
local lists = { "local_shards", "shards_metadata", "size", local_shards = "local_shards",
  shards_metadata = "shards_metadata", size = "numbers" }

function ShardedTensor:init(args)
  local a = util.named("ShardedTensor", args, arguments)
  for _, name in ipairs(lists) do signature.value("ShardedTensor", name, a[name], lists[name]) end
  for i, m in ipairs(a.shards_metadata) do
    if #m.shard_offsets ~= #a.size or #m.shard_sizes ~= #a.size then
      P.fail(("ShardedTensor: shards_metadata[%d] has %d offsets and %d sizes for %d dimensions"):format(i,
        #m.shard_offsets, #m.shard_sizes, #a.size))
    end
  end
  self._size, self._dtype, self._group, self._device = a.size, a.dtype, a.group, a.device
  self._stored, self._mark = a.stored, a.mark or false
  self._shards_metadata, self._local_shards, self._settle = a.shards_metadata, a.local_shards, a.settle or false
end

--- Sizes of the whole; with a number, that of one dimension (from 1).
function ShardedTensor:size(d)
  if d then return self._size[d] end
  return util.copy(self._size)
end
ShardedTensor.shape = ShardedTensor.size
function ShardedTensor:dtype() return self._dtype end
function ShardedTensor:local_shards() return self._local_shards end
--- The metadata of all shards, and the shards of this rank, whose metadata are among them.
function ShardedTensor:_layout() return self._shards_metadata, self._local_shards end
function ShardedTensor:_local_shard(k) return self._local_shards[k] end
function ShardedTensor:_local_tensor(k) return self._local_shards[k].tensor end
function ShardedTensor:metadata()
  return { size = self:size(), dtype = self._dtype, shards_metadata = self._shards_metadata }
end

local function text_of(list) return "[" .. table.concat(list, ", ") .. "]" end
local function same(a, b) return text_of(a) == text_of(b) end
function ShardedTensor:__tostring()
  local metadata, own = self:_layout()
  return ("ShardedTensor %s %s in %d pieces, %d here"):format(self._dtype, text_of(self._size), #metadata, #own)
end

--- A shard of this rank that is a tensor: what local_shards has for it.
function M.shard_of(metadata, tensor)
  return { metadata = metadata, tensor = tensor,
    read = function(row, result) return result:copy(tensor:slice(1, row, row + result:size(1))) end,
    write = function(row, source) tensor:slice(1, row, row + source:size(1)):copy(source) end }
end

-- -- copying into it --------------------------------------------------------------------------------------------------

local function is_sharded(x) return ShardedTensor.is(x) end

--- Where a source comes from, in words: tensors that are not read yet are those of a checkpoint.
local function origin(source) return StoredTensor.is(source) and "in the checkpoint" or "in the state that is given" end
M.origin = origin

--- The part of a whole tensor at a piece's place, `n` rows of it from `row` on.
local function part(whole, m, row, n)
  local from = m.shard_offsets[1] + row
  whole = whole:slice(1, from, from + n)
  if m.shard_sizes[2] then whole = whole:slice(2, m.shard_offsets[2], m.shard_offsets[2] + m.shard_sizes[2]) end
  return whole
end

--- Call f(row, n) for blocks of a piece's rows: n of them, from `row` of the piece on.
local function by_rows(m, f)
  local rows = m.shard_sizes[1]
  for row = 0, rows - 1, COPY_ROWS do f(row, math.min(COPY_ROWS, rows - row)) end
end

--- Some rows of a piece: a view, or a copy of what is in a file.
local function rows_of(self, shard, row, n)
  if shard.tensor then return shard.tensor:slice(1, row, row + n) end
  local shape = util.copy(shard.metadata.shard_sizes)
  shape[1] = n
  local rows = Tensor.empty(shape, self._dtype, self._device)
  shard.read(row, rows)
  return rows
end

--- What is stored, n rows from `row` on of what a piece gets.
local function stored_rows(source, m, row, n)
  local offset, shape = util.copy(m.shard_offsets), util.copy(m.shard_sizes)
  offset[1], shape[1] = offset[1] + row, n
  local rows = Tensor.empty(shape, source:dtype(), "cpu")
  source:read(offset, rows, m.columns and { m.columns[1], m.columns[2] } or nil)
  return rows
end

--- What one piece gets from a source: a function(row, n) of n rows from `row` of the piece on, as the source has them.
local function given_rows(source, m, own)
  return function(row, n)
    if StoredTensor.is(source) then return stored_rows(source, m, row, n) end
    return Tensor.is(source) and part(source, m, row, n) or rows_of(source, own, row, n)
  end
end

--- Why a number that this rank gets from `source` does not fit the dtype of `target`, in words; nil: all do. What is
--- stored is read for it, once for a place.
local function loss(target, source)
  local dtype, own, why = target:dtype(), is_sharded(source) and source._local_shards or {}, nil
  if not narrow.may_lose(dtype, source:dtype()) then return nil end
  local shape = target:shape()
  if #shape == 0 then
    return narrow.refusal(StoredTensor.is(source) and source:tensor "cpu" or source, dtype)
  end
  local pieces = is_sharded(target) and util.map(target._local_shards, function(s) return s.metadata end)
    or { { shard_offsets = util.map(shape, function() return 0 end), shard_sizes = shape } }
  for i, m in ipairs(pieces) do
    local rows, key = given_rows(source, m, own[i]), ("%s %s %s"):format(dtype, text_of(m.shard_offsets),
      text_of(m.shard_sizes))
    if not (StoredTensor.is(source) and source.fits[key]) then
      by_rows(m, function(row, n)
        why = why or P.scope(function()
          return narrow.refusal(rows(row, n), dtype, function(r) return m.shard_offsets[1] + row + r end,
            m.shard_offsets[2] or 0)
        end)
      end)
      if why then return why end
      if StoredTensor.is(source) then source.fits[key] = true end
    end
  end
end

--- Why `source` is not of the kind, the shape and the place of `target`, in words; nil: it is.
local function misfit(target, source)
  if not Tensor.is(source) and not is_sharded(source) and not StoredTensor.is(source) then
    return ("is %s, wanted a tensor or a ShardedTensor"):format(errors.kind(source))
  end
  local want, got = target:shape(), source:shape()
  if not same(want, got) then
    return ("has shape %s here, and %s %s"):format(text_of(want), text_of(got), origin(source))
  end
  if not is_sharded(source) then return row_format.refusal(target, source, origin(source)) end
  if Tensor.is(target) then
    return ("is whole here, and a ShardedTensor %s; ShardedTensor:gather() makes it whole"):format(origin(source))
  end
  local mine, theirs = target._local_shards, source._local_shards
  for i = 1, math.max(#mine, #theirs) do
    local a, b = mine[i] and mine[i].metadata, theirs[i] and theirs[i].metadata
    if not (a and b and same(a.shard_offsets, b.shard_offsets) and same(a.shard_sizes, b.shard_sizes)) then
      local function piece(m)
        return m and ("%s from %s on"):format(text_of(m.shard_sizes), text_of(m.shard_offsets)) or "none"
      end
      return ("has, as piece %d of this rank, %s here, and %s %s: it is of another plan; ShardedTensor:gather() "
        .. "makes it whole"):format(i, piece(a), piece(b), origin(source))
    end
  end
end

--- What keeps `source` (a Tensor, ShardedTensor or StoredTensor) from being copied into `target` (one of the former
--- two), in words; nil: nothing. Numbers that the dtype of `target` cannot hold keep it; what brings only changed rows
--- looks at these when it writes them.
function M.refusal(target, source)
  local why = misfit(target, source)
  if why or StoredTensor.is(source) and source:patches() then return why end
  return loss(target, source)
end

--- An error if what is read whole, because its changes alone could not be had, has numbers that do not fit.
local function check_whole(target, source)
  local why = source:patches() and loss(target, source)
  if why then P.fail(why) end
end

--- The checksum of n rows from `row` on (nil: of all) of a Tensor or StoredTensor.
local function sum_of(x, row, n)
  return P.scope(function()
    if not Tensor.is(x) then
      local size, offset = x:size(), util.map(x:size(), function() return 0 end)
      if row then size[1], offset[1] = n, row end
      local rows = Tensor.empty(size, x:dtype(), "cpu")
      x:read(offset, rows)
      x = rows
    elseif row then x = x:slice(1, row, row + n) end
    return (Tensor._checksum(x))
  end)
end

--- Whether two that refusal might be asked of (`source`) have the same dtype, shape and bytes, of ShardedTensors the
--- pieces of this rank. What is spread and what is whole are not compared: they differ. Local.
function M.equal(a, b)
  if rawequal(a, b) then return true end
  local function is_whole(x) return Tensor.is(x) or StoredTensor.is(x) end
  if is_sharded(a) and is_sharded(b) and a._dtype == b._dtype and same(a._size, b._size) then
    local mine, theirs = a._local_shards, b._local_shards
    for i = 1, math.max(#mine, #theirs) do
      if not (mine[i] and theirs[i] and mine[i].tensor and theirs[i].tensor
        and M.equal(mine[i].tensor, theirs[i].tensor)) then return false end
    end
    return true
  end
  if not (is_whole(a) and is_whole(b)) or a:dtype() ~= b:dtype() or not same(a:shape(), b:shape()) then return false end
  local rows = a:shape()[1]
  if not rows then return sum_of(a) == sum_of(b) end
  for row = 0, rows - 1, COPY_ROWS do
    local n = math.min(COPY_ROWS, rows - row)
    if sum_of(a, row, n) ~= sum_of(b, row, n) then return false end
  end
  return true
end

--- Copy a piece from what is stored: a tensor at once, so that what is read can be compared with a checksum, and rows
--- that are in a file block by block.
local function from_stored(self, shard, source)
  local m = shard.metadata
  if source:patch(shard, self._dtype) or shard.take and shard.take(source) then return end
  check_whole(self, source)
  local columns = m.columns and { m.columns[1], m.columns[2] } or nil
  local live = shard.tensor
  if live and same(live:shape(), m.shard_sizes) then return source:read(m.shard_offsets, live, columns) end
  if live and live:describe().contiguous then
    return source:read(m.shard_offsets, live:reshape(m.shard_sizes), columns)
  end
  by_rows(m, function(row, n)
    local offset, shape = util.copy(m.shard_offsets), util.copy(m.shard_sizes)
    offset[1], shape[1] = offset[1] + row, n
    local rows = Tensor.empty(shape, self._dtype, self._device)
    source:read(offset, rows, columns)
    shard.write(row, rows)
    rows:release()
  end)
end

--- Read all shards that are tensors at once, where the source can. Returns whether it was done.
local function all_from_stored(self, own, source)
  local regions, tensors, several = {}, {}, source._read_several
  if not several or source:patches() or source:dtype() ~= self._dtype or #own < 2 then return false end
  for i, shard in ipairs(own) do
    local m, live = shard.metadata, shard.tensor
    if not live or m.columns or not same(live:shape(), m.shard_sizes) then return false end
    regions[i], tensors[i] = { offset = m.shard_offsets, size = m.shard_sizes }, live
  end
  several(regions, tensors)
  return true
end

--- Copy `source`, of which refusal says nothing, into `target`. Local.
function M.assign(target, source)
  local stored = StoredTensor.is(source)
  if Tensor.is(target) then
    local zeros = util.map(target:shape(), function() return 0 end)
    if not stored then return target:copy(source) end
    local shard = { tensor = target, metadata = { shard_offsets = zeros, shard_sizes = target:shape() } }
    if source:patch(shard, target:dtype()) then return end
    check_whole(target, source)
    return source:read(zeros, target:detach(), nil, true)
  end
  if is_sharded(source) and source._settle then source._settle() end
  local own, theirs = target._local_shards, is_sharded(source) and source._local_shards or {}
  if stored and all_from_stored(target, own, source) then return end
  for i, shard in ipairs(own) do
    local rows = given_rows(source, shard.metadata, theirs[i])
    if stored then from_stored(target, shard, source)
    else by_rows(shard.metadata, function(row, n) shard.write(row, rows(row, n)) end) end
  end
end

-- -- copies -----------------------------------------------------------------------------------------------------------

local marks = setmetatable({}, { __mode = "k" })

--- Of which moment a copy is that gather or clone made, in the words of the module that it is of (see `mark`); nil:
--- nobody knows.
function M.moment_of(copy) return marks[copy] end

local function note(self, copy)
  if self._mark then marks[copy] = self._mark() end
  return copy
end

-- -- putting it together ----------------------------------------------------------------------------------------------

local function elements(m) return m.shard_sizes[1] * (m.shard_sizes[2] or 1) end
local function rank_of(m) return tonumber(m.placement:match "^rank:(%d+)") end

--- All elements of the pieces of this rank, one piece after the other.
local function flatten(self)
  local total, at, own = 0, 0, self._local_shards
  for _, s in ipairs(own) do total = total + elements(s.metadata) end
  local flat = Tensor.empty({ total }, self._dtype, self._device)
  for _, s in ipairs(own) do
    local width = s.metadata.shard_sizes[2] or 1
    by_rows(s.metadata, function(row, n)
      local rows = rows_of(self, s, row, n)
      flat:slice(1, at, at + n * width):copy(rows:reshape(-1))
      at = at + n * width
    end)
  end
  return flat
end

--- The same; where reading may fail, what one rank meets is an error on all.
local function flatten_all(self)
  if not self._stored or self._group:size() == 1 then return flatten(self) end
  local ok, flat = pcall(flatten, self)
  for r, said in ipairs(self._group:all_gather_object(not ok and errors.describe(flat), "ShardedTensor:gather")) do
    if said then P.fail(("ShardedTensor:gather: rank %d: %s"):format(r - 1, said)) end
  end
  return flat
end

--- Put a piece at its place. Where the whole has one number for each row and pieces have one for their columns of it,
--- the mean by the number of columns (`seen`: row -> columns so far); where pieces have the same place, they must be
--- equal.
local function place(whole, m, piece, seen)
  local at = part(whole, m, 0, m.shard_sizes[1])
  local key = text_of(m.shard_offsets)
  local before = seen[key] or 0
  seen[key] = before + (m.columns and m.columns[2] or 1)
  if before == 0 then
    at:copy(piece)
  elseif m.columns and piece:dtype() == "f32" then
    at:copy(at + (piece - at) * (m.columns[2] / seen[key]))
  elseif not same(at:to_list(), piece:to_list()) then
    P.fail(("ShardedTensor:gather: pieces at %s of %s differ between shards: each keeps its own, and there is no "
      .. "whole"):format(key, text_of(m.shard_sizes)))
  end
end

--- The whole, on every rank: what the state_dict of the unsharded module would hold. A state with a number for each
--- row, of a table cut by columns, becomes the mean of those of its blocks, by their width. Collective over the group.
function ShardedTensor:gather()
  if self._settle then self._settle() end
  local all, group, metadata = flatten_all(self), self._group, self._shards_metadata
  local counts, order = {}, {}
  for r = 1, group and group:size() or 1 do counts[r], order[r] = 0, {} end
  for _, m in ipairs(metadata) do
    local r = group and rank_of(m) + 1 or 1
    counts[r] = counts[r] + elements(m)
    table.insert(order[r], m)
  end
  if group and group:size() > 1 then all = group:all_gather_v(all, counts):wait() end
  local at, pieces = 0, {}
  for _, list in ipairs(order) do
    for _, m in ipairs(list) do
      pieces[m] = all:slice(1, at, at + elements(m)):reshape(m.shard_sizes)
      at = at + elements(m)
    end
  end
  local whole, seen = Tensor.zeros(self._size, self._dtype, self._device), {}
  for _, m in ipairs(metadata) do place(whole, m, pieces[m], seen) end
  return note(self, whole)
end

--- A copy: the same pieces, this rank's in memory of their own. Local.
function ShardedTensor:clone()
  if self._settle then self._settle() end
  local metadata, shards = self:_layout()
  local own = {}
  for i, s in ipairs(shards) do
    local copy = Tensor.empty(s.metadata.shard_sizes, self._dtype, self._device)
    by_rows(s.metadata, function(row, n) copy:slice(1, row, row + n):copy(rows_of(self, s, row, n)) end)
    own[i] = M.shard_of(s.metadata, copy)
  end
  return note(self, ShardedTensor { size = self._size, dtype = self._dtype, shards_metadata = metadata,
    local_shards = own, group = self._group, device = self._device })
end

signature.kind("ShardedTensor", "a ShardedTensor", is_sharded)
signature.check("ShardedTensor:", ShardedTensor, { gather = "self: ShardedTensor", clone = "self: ShardedTensor",
  size = "self: ShardedTensor, d: dim?" })

return M
