-- pieces.lua: what a save has of the parts of a program: on each rank the pieces that it could write and what there is
-- beside tensors, and on rank 0 who writes which piece.
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local plan_json = require "perilune.plan.json"
local values = require "perilune.checkpoint.values"
local changes = require "perilune.embed.changes"
local row_format = require "perilune.tensor.row_format"
local parts_of = require "perilune.checkpoint.parts"
local maps = require "perilune.checkpoint.maps"
local Checkpoint = require "perilune.checkpoint.reader"
local C = P.C

local M = {}

--- A list of numbers as a text, for comparing.
function M.numbers_text(list) return table.concat(list, ",") end

local function element_bytes(dtype) return tonumber(C.peri_dtype_size(C.peri_dtype_parse(dtype))) end

--- A piece, as a save keeps it, which has one for each shard of 100,000 tables: { name =, bytes =, and what has its
--- elements: tensor =, or of = a ShardedTensor and k = which of its shards on this rank }; shared (true): another rank
--- could write it, too, and replica = "equal" (all ranks have the same), "first" (that of the first rank counts) or
--- nil. marked (true): its table marks the rows that change. Of an increment that has some rows of it only also list =
--- a M.list, and of a map of raw ids each (maps.lua). M.whole adds the rest. Lua keeps four fields in 160 bytes and
--- five to eight in 256, so a piece has no more fields than it needs.
function M.piece(name, dtype, shape, m, p)
  p.name, p.dtype, p.shape, p.offset, p.size, p.columns = name, dtype, shape, m.shard_offsets, m.shard_sizes, m.columns
  p.bytes = p.bytes or element_bytes(dtype) * util.product(p.size) -- of an increment those of the rows that are there
  return p
end

--- The list of n rows of which an increment has pieces, which is a piece, too: { bytes =, and what has its elements: of
--- a table from = such a piece and rows = function(piece, first) -> i64, counted from row `first` on; of a map of raw
--- ids each(f), evicted = (maps.lua) }. Its name comes when it is known which pieces this rank writes.
function M.list(n, p)
  p.bytes = 8 * n
  return p
end

--- How many rows of a piece are there; nil: all.
function M.listed(p) return p.list and p.list.bytes / 8 end

local function whole_metadata(shape)
  return { shard_offsets = util.map(shape, function() return 0 end), shard_sizes = shape }
end

--- The shard that a piece of a ShardedTensor is.
local function shard_of(p) return p.of:_local_shard(p.k) end

--- The tensor that a piece is; nil: it is none. Its shard is not made for that: a save asks this several times of each
--- of 100,000 tables.
local function own_tensor(p)
  if p.tensor then return p.tensor end
  if p.shard then return p.shard.tensor end
  return p.of and p.of:_local_tensor(p.k)
end

--- The tensor with the elements of a piece; nil: they are read block by block, see M.whole.
function M.tensor_of(p)
  if p.rows then return p.rows(p.from, M.whole(p.from).offset[1]) end
  return own_tensor(p)
end

--- All of a piece, in a table of its own: what M.piece says, and dtype, shape, offset, size, columns, and of a shard
--- shard and device.
function M.whole(p)
  if p.size then return p end
  local x = util.copy(p)
  if p.tensor then M.piece(p.name, p.tensor:dtype(), p.tensor:shape(), whole_metadata(p.tensor:shape()), x)
  elseif p.of then
    x.shard, x.device = shard_of(p), p.of._device
    M.piece(p.name, p.of:dtype(), p.of:size(), x.shard.metadata, x)
  else
    local size = { p.bytes / 8 }
    M.piece(p.name, "i64", size, whole_metadata(size), x)
  end
  return x
end

--- Where the marks of a piece's changed rows are (embed/changes.lua); nil: its rows are not marked. It is asked for
--- when it is needed, not kept.
function M.source_of(p)
  local tensor = own_tensor(p)
  return changes.source(tensor, not tensor and (p.shard or shard_of(p)) or nil)
end

--- The place of a shard as a text.
local function key_of(m)
  return ("[%s] [%s] %s"):format(M.numbers_text(m.shard_offsets), M.numbers_text(m.shard_sizes), m.columns
    and M.numbers_text(m.columns) or "")
end

--- Whether shards are every element of a tensor of this size, where those at the same place count once (those of
--- Shampoo's preconditioners are blocks on a diagonal); and, of several, by place (key_of) the first shard there.
local function places_of(metadata, size)
  local first, sums, all = {}, {}, util.product(size)
  if #metadata == 1 then return util.product(metadata[1].shard_sizes) == all end
  for _, m in ipairs(metadata) do
    local columns, key = m.columns and M.numbers_text(m.columns) or "", key_of(m)
    sums[columns] = (sums[columns] or 0) + (first[key] and 0 or util.product(m.shard_sizes))
    first[key] = first[key] or m
  end
  for _, sum in util.ordered(sums) do
    if sum ~= all then return false end
  end
  return true, first
end

--- Append the pieces that this rank has of a ShardedTensor. Where all ranks of the save (group, or nil: this one) have
--- it together, all of them know who writes a piece: who has its first shard.
local function add_shards(list, name, t, group)
  local metadata, own = t:_layout()
  local whole, first = places_of(metadata, t:size())
  if not whole then return false end
  local together, done = t._group and (not group or t._group:size() == group:size()), {}
  local here = together and "rank:" .. t._group:rank()
  local size = element_bytes(t:dtype())
  for k, shard in ipairs(own) do
    local key = first and key_of(shard.metadata) or 1
    local shared = not together and group ~= nil
    if not done[key] and not (together and first and first[key].placement ~= here) then
      local p = { name = name, of = t, k = k, bytes = size * util.product(shard.metadata.shard_sizes) }
      if shared then p.shared = true end
      list[#list + 1], done[key] = p, not shared
    end
  end
  return true
end

--- Append the pieces of this rank. Collective where a ShardedTensor has to be made whole. checked: of a tensor that all
--- ranks have alike.
local function add_pieces(list, name, t, checked, group)
  if not Tensor.is(t) then
    if add_shards(list, name, t, group) then return end
    t = t:gather()
  end
  list[#list + 1] = { name = name, tensor = t, replica = checked and "equal" or "first", shared = group and true,
    bytes = t:numel() * element_bytes(t:dtype()) }
end

--- What is said of a model: its plan, if it is sharded, and the XXH3-64 of its tensors' names, dtypes and shapes, which
--- is the same under any plan.
local function model_facts(part, tensors)
  local lines = {}
  for i, t in ipairs(tensors) do
    local x = t.tensor
    lines[i] = ("%s %s [%s]\n"):format(t.name:sub(#part.name + 2), x:dtype(), table.concat(x:shape(), ", "))
  end
  local text = table.concat(lines)
  return { plan = part.object.wraps and part.object.plan and plan_json._data(part.object.plan) or nil,
    description = P.scope(function()
      return Checkpoint._hex(Tensor._checksum(Tensor.from_memory(text, { #text }, "u8", "cpu")))
    end) }
end

--- Everything that this rank has to save with the ranks of `group` (nil: alone), func: for errors. Pieces, and JSON
--- texts of what the parts have beside tensors: trees, by part what all ranks have alike; own, by part what this rank
--- has of its own; extra and facts, by model; and rows, by tensor the format of its rows (tensor/row_format.lua).
function M.collect(func, parts, rank, group)
  local pieces, trees, own, extra, facts, rows = {}, {}, {}, {}, {}, {}
  for _, part in ipairs(parts) do
    local tensors, of_ranks = {}, part.object.of_ranks
    local name = of_ranks and ("%s/ranks/#%d"):format(part.name, rank + 1) or part.name;
    (of_ranks and own or trees)[part.name] = values.encode(parts_of.flatten(part.object:state_dict(), name, tensors),
      func, "state")
    if part.module then
      extra[part.name] = values.encode(parts_of.extra_of(part.object), func, "get_extra_state")
      facts[part.name] = values.encode(model_facts(part, tensors), func, "models")
    end
    for i, t in ipairs(tensors) do
      local x = maps.by_row(t.name, t.tensor)
      rows[t.name] = row_format.noted_format(x)
      -- What is trained is equal on all ranks; of a buffer, such as a running mean, each rank may have its own: the
      -- first one's is kept.
      local d = part.module and Tensor.is(x) and x:describe()
      add_pieces(pieces, t.name, x, not part.module or d and d.requires_grad and d.leaf, group)
      tensors[i] = false
    end
  end
  return pieces, trees, own, extra, facts, rows
end

-- Why a state of a parameter that is only known by its number may differ between ranks.
local UNNAMED = "the parameters of this optimizer have no names, so its states are saved as those of parameters that "
  .. "all ranks have alike; one that trains pieces of tables (compute_kernel dense), of which each rank has its own, "
  .. "is made of model:named_parameters()"

--- Of pieces that several ranks may have, who writes what: key -> rank (from 1). Ranks share the work by bytes; a
--- replica that is not checked is the first rank's. Raises where replicas that must be equal are not.
local function owners(all)
  local first, load, owner = {}, {}, {}
  for r, told in ipairs(all) do
    load[r] = told.bytes
    for _, x in ipairs(told) do
      local f = first[x.key]
      if not f then
        f = { sum = x.sum, rank = r, ranks = {}, bytes = x.bytes, replica = x.replica, name = x.name }
        first[x.key], first[#first + 1] = f, x.key
      elseif x.sum and x.sum ~= f.sum then
        P.fail(("tensor '%s' differs between rank %d and rank %d: %s"):format(x.name, f.rank - 1, r - 1,
          x.name:find "^[^/]*/state/%d+/" and UNNAMED or "what all ranks train alike has drifted apart"))
      end
      f.ranks[#f.ranks + 1] = r
    end
  end
  for _, key in ipairs(first) do
    local f = first[key]
    local best = f.ranks[1]
    for _, r in ipairs(f.replica ~= "first" and f.ranks or {}) do
      if load[r] < load[best] then best = r end
    end
    owner[key] = best
    load[best] = load[best] + f.bytes
  end
  return owner
end

--- What rank 0 has to know to say who writes those pieces that several ranks may have: a list of them; bytes: those of
--- the others.
function M.announcements(pieces)
  local told = { bytes = 0 }
  for _, p in ipairs(pieces) do
    if not p.shared then told.bytes = told.bytes + p.bytes
    else
      local x = M.whole(p)
      local place = key_of { shard_offsets = x.offset, shard_sizes = x.size, columns = x.columns }
      told[#told + 1] = { key = p.name .. " " .. place, bytes = p.bytes, replica = p.replica, name = p.name,
        sum = p.replica == "equal" and Tensor._checksum(p.tensor) or nil }
    end
  end
  return told
end

--- On rank 0, of the announcements of all ranks: for each rank the set of those that it writes, by their numbers.
function M.orders_of(all)
  local owner = owners(all)
  return util.map(all, function(told, r)
    local mine, seen = {}, {}
    for i, x in ipairs(told) do
      mine[i] = owner[x.key] == r and not seen[x.key]
      seen[x.key] = true
    end
    return mine
  end)
end

--- Of this rank's pieces those that it writes; mine: what orders_of says for it.
function M.to_write(pieces, mine)
  local list, told = {}, 0
  for _, p in ipairs(pieces) do
    told = told + (p.shared and 1 or 0)
    if not p.shared or mine[told] then list[#list + 1] = p end
  end
  return list
end

return M
