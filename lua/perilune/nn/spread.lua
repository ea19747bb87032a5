-- spread.lua: states of parameters of which each rank has its own part, a shard of a table: under the table's name, as
-- ShardedTensors, so that they can be made whole and loaded under another plan.
--
-- Lists of parameters that hold such parts say so by `spread` (DistributedModelParallel:named_parameters): a list of {
-- name = of the whole, size =, group =, device =, of = the sharded module, shards_metadata = of all ranks, pieces = { {
-- tensor =, metadata = }, ... } }, alike on all ranks but for the pieces, which are this rank's in the order of
-- shards_metadata: it may have none.
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local signature = require "perilune.signature"
local of_ranks = require "perilune.tensor.sharded"

local ShardedTensor, shard_of = of_ranks.ShardedTensor, of_ranks.shard_of

local M = {}

--- Parameters that are pieces: tensor -> true.
function M.pieces_of(spread)
  local own = {}
  for _, e in ipairs(spread or {}) do
    for _, piece in ipairs(e.pieces) do own[piece.tensor] = true end
  end
  return own
end

--- The part of a list of named parameters whose names `which` accepts (a function(name), or a pattern of Lua's), for a
--- group of an optimizer: a list that says of ranks what the whole list says. Pieces of a table have the table's name
--- here.
function M.select(params, which)
  local part, whole = { spread = {} }, {}
  local function accepts(name)
    if type(which) == "string" then return name:find(which) ~= nil end
    return which(name)
  end
  for _, e in ipairs(params.spread or {}) do
    local taken = accepts(e.name)
    if taken then part.spread[#part.spread + 1] = e end
    for _, piece in ipairs(e.pieces) do whole[piece.tensor] = { taken = taken } end
  end
  for i, p in ipairs(params) do
    signature.value("select", ("params[%d].name"):format(i), type(p) == "table" and p.name or nil, "string")
    local piece = whole[p.tensor]
    if piece and piece.taken or not piece and accepts(p.name) then part[#part + 1] = p end
  end
  if #part == 0 and #part.spread == 0 then
    P.fail(("select: no parameter's name %s; those are: %s"):format(type(which) == "string"
      and ("has '%s' in it"):format(which) or "is accepted", table.concat(util.map(params, function(p)
      return p.name
    end), ", ")))
  end
  if #part.spread > 0 then part.elsewhere, part.group = params.elsewhere, params.group end
  return part
end

signature.kind("chooser", "a function(name) or a pattern", function(x)
  return type(x) == "string" or util.is_callable(x)
end)

--- The groups of the ranks that share them.
function M.groups_of(spread) return util.map(spread or {}, function(e) return e.group end) end

--- What a state that has one number for each row has of a piece.
local function by_row(m, size)
  return { shard_offsets = { m.shard_offsets[1], 0 }, shard_sizes = { m.shard_sizes[1], 1 }, placement = m.placement,
    columns = { m.shard_offsets[2], m.shard_sizes[2], size[2] } }
end

--- A state of the entry `e`. rows: it has one number for each row; state_of(parameter): that of a piece.
function M.state(e, rows, state_of)
  local metadata = rows and util.map(e.shards_metadata, function(m) return by_row(m, e.size) end) or e.shards_metadata
  local own = {}
  for _, piece in ipairs(e.pieces) do
    local m = rows and by_row(piece.metadata, e.size) or piece.metadata
    own[#own + 1] = shard_of(m, state_of(piece.tensor))
  end
  return ShardedTensor { size = rows and { e.size[1], 1 } or e.size, dtype = "f32", shards_metadata = metadata,
    local_shards = own, group = e.group, device = e.device }
end

--- The number of its steps, which all pieces have alike: a ShardedTensor of one number.
function M.steps(e, steps_of)
  local metadata = util.map(e.shards_metadata, function(m)
    return { shard_offsets = { 0 }, shard_sizes = { 1 }, placement = m.placement }
  end)
  local own = util.map(e.pieces, function(piece)
    local n = Tensor.tensor({ steps_of(piece.tensor) }, "f64", e.device or nil)
    return { metadata = { shard_offsets = { 0 }, shard_sizes = { 1 } }, tensor = n }
  end)
  return ShardedTensor { size = { 1 }, dtype = "f64", shards_metadata = metadata, local_shards = own, group = e.group,
    device = e.device }
end

--- The number that the state "step" of a source is; nil: it is a ShardedTensor that has no piece on this rank.
function M.number_of(source)
  if Tensor.is(source) then return source:item() end
  local shard = source:local_shards()[1]
  return shard and shard.tensor:item()
end

--- Why the number of a source's state "step" is no number of steps, in words; nil: it is one, or not on this rank.
function M.steps_refusal(source)
  local n = M.number_of(source)
  if not n or tonumber(n) >= 0 and tonumber(n) < 2 ^ 53 and tonumber(n) % 1 == 0 then return nil end
  return ("is %s, wanted a number of steps: a whole number, 0..2^53 - 1"):format(tostring(n))
end

signature.check("", M, { select = "params: list, which: chooser" })

return M
