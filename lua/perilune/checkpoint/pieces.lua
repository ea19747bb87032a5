-- pieces.lua: what a save has of the parts of a program: on each rank the pieces that it could write and what there is
-- beside tensors, and on rank 0 who writes which piece.
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local plan_json = require "perilune.plan.json"
local row_format = require "perilune.tensor.row_format"
local parts_of = require "perilune.checkpoint.parts"
local maps = require "perilune.checkpoint.maps"
local Checkpoint = require "perilune.checkpoint.reader"
local C = P.C

local M = {}

--- A list of numbers as a text, for comparing.
function M.numbers_text(list) return table.concat(list, ",") end

--- A piece: { key = the same for pieces that are the same, name =, dtype =, shape =, offset =, size =, columns =, bytes
--- =, and one of tensor = (elements), shard = (of a ShardedTensor) }. Of an increment that has some rows of it only
--- also listed = how many; of a table source = (embed/changes.lua), rows = which, from row 0 of the piece on, global =
--- function() -> the same, counted in the whole tensor; of a map of raw ids each, each_row, evicted (maps.lua).
function M.piece(name, dtype, shape, m, source)
  local p = source -- a new table, which becomes the piece
  p.name, p.dtype, p.shape, p.offset, p.size, p.columns = name, dtype, shape, m.shard_offsets, m.shard_sizes, m.columns
  p.bytes = tonumber(C.peri_dtype_size(C.peri_dtype_parse(dtype)))
  local whole = not p.columns
  for d, n in ipairs(p.size) do
    p.bytes = p.bytes * n
    whole = whole and n == shape[d]
  end
  p.key = whole and name or ("%s [%s] [%s] %s"):format(name, M.numbers_text(p.offset), M.numbers_text(p.size),
    p.columns and M.numbers_text(p.columns) or "")
  return p
end

--- Whether the pieces of a ShardedTensor are every element of it, where those at the same place count once. (Those of
--- Shampoo's preconditioners are blocks on a diagonal.)
local function is_whole(t)
  local pieces = t:metadata().shards_metadata
  if #pieces == 1 then return util.product(pieces[1].shard_sizes) == util.product(t:size()) end
  local seen, sums, all = {}, {}, util.product(t:size())
  for _, m in ipairs(pieces) do
    local columns = m.columns and M.numbers_text(m.columns) or ""
    local key, n = columns .. ";" .. M.numbers_text(m.shard_offsets), util.product(m.shard_sizes)
    sums[columns] = (sums[columns] or 0) + (seen[key] and 0 or n)
    seen[key] = true
  end
  for _, sum in util.ordered(sums) do
    if sum ~= all then return false end
  end
  return true
end

local function whole_metadata(shape)
  return { shard_offsets = util.map(shape, function() return 0 end), shard_sizes = shape }
end

--- Append the pieces of this rank. Collective where a ShardedTensor has to be made whole.
local function add_pieces(list, name, t, checked)
  if Tensor.is(t) then
    list[#list + 1] = M.piece(name, t:dtype(), t:shape(), whole_metadata(t:shape()),
      { tensor = t, replica = checked and "equal" or "first" })
  elseif is_whole(t) then
    for _, shard in ipairs(t:local_shards()) do
      list[#list + 1] = M.piece(name, t:dtype(), t:size(), shard.metadata, { shard = shard, device = t._device })
    end
  else
    local whole = t:gather()
    list[#list + 1] = M.piece(name, whole:dtype(), whole:shape(), whole_metadata(whole:shape()),
      { tensor = whole, replica = "first" })
  end
end

--- What is said of a model: its plan, if it is sharded, and the XXH3-64 of its tensors' names, dtypes and shapes, which
--- is the same under any plan.
local function model_facts(part, tensors)
  local lines = {}
  for i, t in ipairs(tensors) do
    local x = t.tensor
    lines[i] = ("%s %s [%s]\n"):format(t.name:sub(#part.name + 2), x:dtype(),
      table.concat(Tensor.is(x) and x:shape() or x:size(), ", "))
  end
  local text = table.concat(lines)
  return { plan = part.object.wraps and part.object.plan and plan_json._data(part.object.plan) or nil,
    description = P.scope(function()
      return Checkpoint._hex(Tensor._checksum(Tensor.from_memory(text, { #text }, "u8", "cpu")))
    end) }
end

--- Everything that this rank has: pieces, and what the parts have beside tensors: trees, by part what all ranks have
--- alike; own, by part what this rank has of its own; extra and facts, by model; rows, by tensor the format of its rows
--- (tensor/row_format.lua).
function M.collect(parts, rank)
  local pieces, trees, own, extra, facts, rows = {}, {}, {}, {}, {}, {}
  for _, part in ipairs(parts) do
    local tensors, of_ranks = {}, part.object.of_ranks
    local name = of_ranks and ("%s/ranks/#%d"):format(part.name, rank + 1) or part.name;
    (of_ranks and own or trees)[part.name] = parts_of.flatten(part.object:state_dict(), name, tensors)
    if part.module then
      extra[part.name], facts[part.name] = parts_of.extra_of(part.object), model_facts(part, tensors)
    end
    maps.order_by_row(tensors)
    for _, t in ipairs(tensors) do
      rows[t.name] = row_format.noted_format(t.tensor)
      -- What is trained is equal on all ranks; of a buffer, such as a running mean, each rank may have its own: the
      -- first one's is kept.
      local d = part.module and Tensor.is(t.tensor) and t.tensor:describe()
      add_pieces(pieces, t.name, t.tensor, not part.module or d and d.requires_grad and d.leaf)
    end
  end
  return pieces, trees, own, extra, facts, rows
end

-- Why a state of a parameter that is only known by its number may differ between ranks.
local UNNAMED = "the parameters of this optimizer have no names, so its states are saved as those of parameters that "
  .. "all ranks have alike; one that trains pieces of tables (compute_kernel dense), of which each rank has its own, "
  .. "is made of model:named_parameters()"

--- Who writes what: key -> rank (from 1). Ranks with the same piece share the work by bytes; a replica that is not
--- checked is the first rank's. Raises where replicas that must be equal are not.
local function owners(all)
  local first, load, owner = {}, {}, {}
  for r, list in ipairs(all) do
    load[r] = 0
    for _, x in ipairs(list) do
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

--- What rank 0 has to know of pieces to say who writes them.
function M.announcements(pieces)
  return util.map(pieces, function(p)
    return { key = p.key, bytes = p.bytes, replica = p.replica, name = p.name,
      sum = p.replica == "equal" and Tensor._checksum(p.tensor) or nil }
  end)
end

--- On rank 0, of the announcements of all ranks: for each rank a list of the pieces that it writes, numbers in its
--- announcements. Of a rank that is alone its pieces, in place of these.
function M.orders_of(all)
  local owner = owners(all)
  return util.map(all, function(told, r)
    local list, seen = {}, {}
    for i, x in ipairs(told) do
      if owner[x.key] == r and not seen[x.key] then list[#list + 1] = i end
      seen[x.key] = true
    end
    return list
  end)
end

return M
